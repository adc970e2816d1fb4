"""The work that is measured, and models whose completions never end early."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

from utils.models.corpus import Pair, addition_prompt, training_pairs
from utils.models.loading import ALL_LINEAR_SITES, EMBEDDED_MODEL

Between = Callable[[int], bool | None]  # called after each step; True ends the training


@dataclass(frozen=True)
class Work:
    """One GRPO step: completions of exactly `gen_len` tokens, one update."""

    n_prompts: int = 16
    group_size: int = 8
    gen_len: int = 40
    rank: int = 8
    beta: float = 0.04
    lr: float = 0.0

    @property
    def batch_size(self) -> int:
        return self.n_prompts * self.group_size


LLAMA = LlamaConfig(  # SmolLM2-135M's sizes
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True,
)
QWEN = Qwen2Config(  # Qwen2.5-0.5B's sizes
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32768,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    tie_word_embeddings=True,
)


def save_embedded(folder: Path) -> Path:
    """Save the embedded model with an eos beyond its vocabulary: no completion ends early."""
    shutil.copytree(EMBEDDED_MODEL, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        config["eos_token_id"] = tokenizer.eos_token_id
        (folder / name).write_text(json.dumps(config))
    return folder


@torch.no_grad()
def save_random(
    folder: Path,
    config: PretrainedConfig = LLAMA,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Save a Llama-type model with random weights that gives its eos a probability of practically
    0.

    What the eos's logit reads, and nothing else, is an entry of the embeddings, which no block
    changes, that is 1 at every position.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config).to(dtype)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    embeddings = model.get_input_embeddings().weight
    embeddings[:, 0] = 1.0
    embeddings[tokenizer.eos_token_id, 0] = -100.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def get_sites(folder: Path | str) -> tuple[str, ...]:
    """Return the names of a model's linear layers."""
    is_gpt2 = AutoConfig.from_pretrained(folder).model_type == "gpt2"
    return ALL_LINEAR_SITES if is_gpt2 else (*ALL_LINEAR_SITES, "mlp.gate")


def make_data(pairs: list[Pair] | None = None) -> tuple[list[str], list[str]]:
    """Return the prompts and answers of these additions, or of all training pairs."""
    pairs = training_pairs() if pairs is None else pairs
    return [addition_prompt(a, b) for a, b in pairs], [str(a + b) for a, b in pairs]
