"""Models that the tests of this folder share."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen3Config,
)

from solutions.ch1_lora import TransformerWithLora
from tests.support.models import SPECIAL, get_checkpoint
from utils.models.loading import ALL_LINEAR_SITES, EMBEDDED_MODEL

ARCHITECTURES = ("gpt2", "llama", "qwen")
SHAPE = SPECIAL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}  # with one, a norm over all of them is each head's
CONFIGS = {
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    "mistral": MistralConfig(**GROUPED, sliding_window=None),
    "tied llama": LlamaConfig(**GROUPED, tie_word_embeddings=True, rope_parameters=SCALED),
    "phi": PhiConfig(**SHAPE),
    "gpt_neox": GPTNeoXConfig(**SHAPE),
    "windowed": MistralConfig(**GROUPED, sliding_window=4),
}


@pytest.fixture(scope="session")
def checkpoints() -> dict[str, Path]:
    """Folders with the small checkpoints, by architecture, each with the embedded tokenizer."""
    return {kind: get_checkpoint(kind) for kind in ARCHITECTURES}


@pytest.fixture
def embedded():
    """The embedded model with fresh adapters on every linear site."""
    torch.manual_seed(0)
    return TransformerWithLora.from_pretrained("embedded", sites=ALL_LINEAR_SITES, device="cpu")


@pytest.fixture(scope="session")
def folders(checkpoints, tmp_path_factory):
    """Checkpoints by name; those of CONFIGS with the embedded tokenizer."""
    found = {"embedded": "embedded"} | checkpoints
    for name, config in CONFIGS.items():
        found[name] = folder = tmp_path_factory.mktemp("models") / name
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():  # away from 0 and 1, and not all alike
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
    return found
