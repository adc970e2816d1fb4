"""Small random checkpoints for the checks: each shows what the embedded model hides.

"gpt2": dropout 0.1 in its config, absolute positions, two layers. "shallow": the same in one layer,
as booting takes most of a check's time. "deep": the same in eleven, the first number of two digits.
"ending": shallow, and eos is likely. "llama": one layer,
grouped-query attention, rotary positions, dropout of the attention alone, heads that are wider
together than the model. "qwen": the same with biases on q, k and v, with a token added to the
tokenizer and more logits than that has tokens, as Qwen's models have. All have an unembedding of
their own, as a tied one would repeat its input, and the embedded model's tokenizer.
"""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

import torch
import transformer_lens  # noqa: F401  before transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging

from utils.models.loading import EMBEDDED_MODEL, keep_booted, load_base_model

SPECIAL = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
N_LAYERS = {"gpt2": 2, "shallow": 1, "deep": 11, "ending": 1, "llama": 1, "qwen": 1}
D_MODEL, N_CTX = 32, 64
D_HEAD, VOCAB_SIZE = {"llama": 10, "qwen": 8}, {"llama": 512, "qwen": 520}
ADDED_ID = 512  # of the token that is added to qwen's tokenizer, whose `vocab_size` stays 512
EOS_BONUS = 5.0
ENDING_PROMPTS = ["This movie is", "A.", "The end", "I liked it"]  # greedy: 4, 7, 2 and 1 tokens

# The linear layers that can have adapters, and their names in Hugging Face.
ATTENTION = ("attn.q", "attn.k", "attn.v", "attn.o")
GPT2_NAMES = dict.fromkeys(ATTENTION[:3], "attn.c_attn") | {
    "attn.o": "attn.c_proj", "mlp.in": "mlp.c_fc", "mlp.out": "mlp.c_proj",
}  # fmt: skip
LLAMA_NAMES = {f"attn.{name}": f"self_attn.{name}_proj" for name in "qkvo"} | {
    "mlp.in": "mlp.up_proj", "mlp.gate": "mlp.gate_proj", "mlp.out": "mlp.down_proj",
}  # fmt: skip
SITES = dict.fromkeys(("gpt2", "shallow", "deep"), tuple(GPT2_NAMES))
SITES |= dict.fromkeys(("llama", "qwen"), tuple(LLAMA_NAMES))


@functools.cache
def get_checkpoint(kind: str) -> Path:
    """The folder of a checkpoint, made at its first use and removed at exit.

    Or the one that is in the folder COURSE_CHECKPOINTS already.
    """
    if (ready := os.environ.get("COURSE_CHECKPOINTS")) is not None:
        return Path(ready) / kind
    logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_checkpoint(kind, folder)
    keep_booted(folder)
    return folder


def boot_small_ones() -> None:
    """Make and boot every checkpoint but the deep one."""
    for kind in N_LAYERS.keys() - {"deep"}:
        load_base_model(get_checkpoint(kind), device="cpu")


def save_checkpoint(kind: str, folder: Path) -> None:
    """Save a small model, the same one in a run in float64 too, which would draw other weights."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _build(kind).save_pretrained(folder)
    finally:
        torch.set_default_dtype(dtype)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    if kind == "qwen":
        tokenizer.add_tokens(["<|im_end|>"])
    tokenizer.save_pretrained(folder)


def _build(kind: str):
    shape = SPECIAL | {"tie_word_embeddings": False}
    if kind in D_HEAD:
        config_class, model_class = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "qwen": (Qwen2Config, Qwen2ForCausalLM),
        }[kind]
        config = config_class(
            **(shape | {"vocab_size": VOCAB_SIZE[kind]}),
            head_dim=D_HEAD[kind],
            hidden_size=D_MODEL,
            intermediate_size=48,
            num_hidden_layers=N_LAYERS[kind],
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=N_CTX,
            attention_dropout=0.1,
        )
        model = model_class(config)
    else:
        config = GPT2Config(
            **shape,
            n_positions=N_CTX,
            n_embd=D_MODEL,
            n_layer=N_LAYERS[kind],
            n_head=4,
            activation_function="gelu_pytorch_tanh",
        )
        model = GPT2LMHeadModel(config)
    model = model.to(torch.float32)
    for name, parameter in model.named_parameters():  # away from the tiny initial weights
        spread = 0.5 if any(part in name for part in ("wte", "wpe", "embed", "lm_head")) else 0.15
        parameter.data += spread * torch.randn_like(parameter)
    if kind == "ending":  # a constant on top of the logit of eos
        bias = model.transformer.ln_f.bias.data
        model.lm_head.weight.data[SPECIAL["eos_token_id"]] += EOS_BONUS * bias / bias.square().sum()
    return model.eval()


def get_sizes(kind: str, site: str) -> tuple[int, int]:
    """Return d_in and d_out of a linear layer."""
    rotary = kind in D_HEAD
    hidden = 48 if rotary else 4 * D_MODEL
    heads = 4 * D_HEAD[kind] if rotary else D_MODEL
    d_out = {"mlp.in": hidden, "mlp.gate": hidden, "mlp.out": D_MODEL, "attn.o": D_MODEL}
    key_value_heads = heads // 2 if rotary else heads
    d_out |= {"attn.q": heads, "attn.k": key_value_heads, "attn.v": key_value_heads}
    return {"mlp.out": hidden, "attn.o": heads}.get(site, D_MODEL), d_out[site]


def fold(weights: dict[str, Tensor], site: str, delta: Tensor, kind: str) -> None:
    """Add to a weight of the plain Hugging Face model what an adapter adds, [d_in d_out]."""
    _, block, site = site.split(".", 2)
    if kind in D_HEAD:
        key, change = f"model.layers.{block}.{LLAMA_NAMES[site]}.weight", delta.T
    else:
        key, change = f"transformer.h.{block}.{GPT2_NAMES[site]}.weight", delta
        if site in ATTENTION[:3]:  # one matrix: the columns of q, then k, then v
            columns = [torch.zeros_like(delta)] * 3
            columns[ATTENTION.index(site)] = delta
            change = torch.cat(columns, 1)
    weights[key] = (weights[key] + change).to(weights[key].dtype)


@functools.cache
def load_hf(kind: str, dtype: torch.dtype = torch.float32):
    """The plain Hugging Face model of a checkpoint, for oracles."""
    return AutoModelForCausalLM.from_pretrained(get_checkpoint(kind), dtype=dtype).eval()


@functools.cache
def load_tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED_MODEL)


@torch.no_grad()
def score_unpadded(kind: str, rows: list[Tensor]) -> list[Tensor]:
    """The logits of plain Hugging Face for rows of ids, each as if it were alone: what stands
    behind a row's end is not seen."""
    logits = load_hf(kind)(nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits
    return [row_logits[: len(row)] for row_logits, row in zip(logits, rows, strict=True)]
