"""Models that the tests of this folder share."""

import pytest
import torch
import transformer_lens  # noqa: F401  before transformers
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from solutions.ch1_lora import TransformerWithLora
from tests.course.helpers import randomize
from utils.models.loading import ALL_LINEAR_SITES, EMBEDDED_MODEL

SPECIAL = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SPECIAL | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ARCHITECTURES = ("gpt2", "llama", "qwen2")


def build_hf_model(kind: str):
    """A small random model: GPT-2 with dropout 0.1, or with grouped-query attention."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(**SPECIAL, n_positions=64, n_embd=32, n_layer=2, n_head=4)
        assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.1
        model = GPT2LMHeadModel(config)
    elif kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**GROUPED))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**GROUPED))
    for parameter in model.parameters():  # away from the tiny initial weights
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folders with the small checkpoints, by architecture, each with the embedded tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    folders = {}
    for kind in ARCHITECTURES:
        folders[kind] = tmp_path_factory.mktemp(kind)
        build_hf_model(kind).save_pretrained(folders[kind])
        tokenizer.save_pretrained(folders[kind])
    return folders


@pytest.fixture
def embedded():
    """The embedded model with fresh adapters on every linear site."""
    torch.manual_seed(0)
    return TransformerWithLora.from_pretrained("embedded", sites=ALL_LINEAR_SITES, device="cpu")


@pytest.fixture(params=ARCHITECTURES)
def lora(request, checkpoints):
    """Each architecture with adapters on every linear site whose B is random instead of 0."""
    torch.manual_seed(0)
    sites = ALL_LINEAR_SITES if request.param == "gpt2" else (*ALL_LINEAR_SITES, "mlp.gate")
    model = TransformerWithLora.from_pretrained(
        checkpoints[request.param], sites=sites, device="cpu"
    )
    return randomize(model)
