"""Models of any shape, one update of them, and how many bytes it allocates: for chapter 7."""

import tempfile
import timeit
from collections.abc import Callable
from typing import Any

import torch
import transformer_lens  # noqa: F401  before transformers
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
)

from solutions.ch0_sampling import get_logprobs
from solutions.ch1_lora import ATTENTION_SITES, TransformerWithLora
from solutions.ch2_ppo import ReplayMinibatch
from solutions.ch3_grpo import calc_grpo_objective
from utils.models.loading import ALL_LINEAR_SITES, EMBEDDED_MODEL


def boot_gpt2(
    n_layers: int,
    d_model: int,
    n_heads: int,
    d_vocab: int,
    mlp_adapters: bool = False,
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> TransformerWithLora:
    """Return a random GPT-2 of this shape, on the CPU, with adapters that are not zero."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=n_layers,
        n_embd=d_model,
        n_head=n_heads,
        vocab_size=d_vocab,
        n_positions=128,
        activation_function="gelu_pytorch_tanh",  # one operation, as in the embedded model
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        GPT2LMHeadModel(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
        sites = ALL_LINEAR_SITES if mlp_adapters else ATTENTION_SITES
        model = TransformerWithLora.from_pretrained(folder, sites=sites, device="cpu", dtype=dtype)
    for layer in model.adapters.values():
        nn.init.normal_(layer.lora_B, std=0.02)
    return model


class Update:
    """GRPO's objective of random rows, its backward pass and a step of AdamW at a rate of 0.

    The logits are the model's own: nothing of what `get_scorer` saves is saved here.
    """

    def __init__(self, model: TransformerWithLora, minibatch: ReplayMinibatch, pieces: int):
        self.model, self.minibatch, self.pieces = model, minibatch, pieces
        self.optimizer = torch.optim.AdamW(model.trainable_parameters(), lr=0.0)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        for rows in torch.arange(len(self.minibatch.mask)).chunk(self.pieces):
            m = self.minibatch.get_rows(rows)
            logits = self.model(m.input_ids, m.attention_mask)
            logprobs = get_logprobs(logits, m.input_ids, m.prompt_len)
            given = (logprobs.detach(), m.ref_logprobs, m.advantages, m.mask)
            objective = calc_grpo_objective(logprobs, *given)
            del logits, logprobs
            (objective / self.pieces).backward()
        self.optimizer.step()

    def time(self, run: Callable[[], None]) -> float:
        """Return the shortest time of five runs, in seconds."""
        return min(timeit.repeat(run, repeat=5, number=1))


def make_update(
    model: TransformerWithLora,
    batch: int,
    seq: int,
    completion: int,
    pieces: int = 1,
    ragged: bool = False,
) -> Update:
    """Return an update on random rows of `seq` tokens, cut into `pieces`.

    With `ragged`, completions end at different tokens, up to `completion`.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 500, (batch, seq), generator=generator)
    mask = torch.ones(batch, completion, dtype=torch.bool)
    if ragged:
        lengths = torch.randint(1, completion + 1, (batch, 1), generator=generator)
        mask = torch.arange(completion) < lengths
    minibatch = ReplayMinibatch(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mask=mask,
        logprobs=torch.full(mask.shape, -6.0),
        ref_logprobs=torch.full(mask.shape, -6.0),
        advantages=torch.randn(batch, generator=generator),
    )
    return Update(model, minibatch, pieces)


def measure_allocated(run: Callable[[], None]) -> int:
    """Return the bytes that PyTorch has allocated at the peak of `run`, beyond those before it.

    `run` is called twice: what is made once and kept (Adam's moments) is there before it counts.
    Gradients are dropped in between, so they count.
    """
    run()
    if isinstance(run, Update):
        run.optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


# --- Models that people use ---------------------------------------------------------------------

QWEN_SHAPES = {  # Qwen2.5, from the configurations on its model pages
    "0.5B": dict(d=896, layers=24, heads=14, kv=2, mlp=4864, vocab=151936, tied=True),
    "1.5B": dict(d=1536, layers=28, heads=12, kv=2, mlp=8960, vocab=151936, tied=True),
    "7B": dict(d=3584, layers=28, heads=28, kv=4, mlp=18944, vocab=152064, tied=False),
    "32B": dict(d=5120, layers=64, heads=40, kv=8, mlp=27648, vocab=152064, tied=False),
    "72B": dict(d=8192, layers=80, heads=64, kv=8, mlp=29568, vocab=152064, tied=False),
}


def count_parameters(shape: dict[str, Any], rank: int) -> tuple[int, int]:
    """Count the parameters of a Qwen2.5, and of adapters on every linear layer of its blocks."""
    config = Qwen2Config(
        hidden_size=shape["d"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        intermediate_size=shape["mlp"],
        vocab_size=shape["vocab"],
        tie_word_embeddings=shape["tied"],
    )
    with torch.device("meta"):  # shapes without numbers
        model = AutoModelForCausalLM.from_config(config)
    linears = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    n_lora = sum(rank * (linear.in_features + linear.out_features) for linear in linears)
    return sum(p.numel() for p in model.parameters()), n_lora
