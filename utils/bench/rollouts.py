"""Rollouts alone: 128 completions of up to 40 tokens by several samplers of the same policy."""

from collections.abc import Callable
from pathlib import Path

import torch
import transformer_lens  # noqa: F401  before transformers
from transformers import AutoModelForCausalLM

from solutions.ch0_sampling import (
    encode_prompts,
    get_samples,
    sample_completions,
    sample_next_token,
)
from solutions.ch1_lora import TransformerWithLora
from utils.bench.measuring import get_median, get_ratios, take_turns
from utils.bench.models import Work, make_data
from utils.models.loading import ALL_LINEAR_SITES, EMBEDDED_MODEL

WORK = Work()


def measure_rollouts(folder: Path, rounds: int) -> dict:
    """Measure 40 tokens each, and the embedded model's own ends (12 on average)."""
    return {
        "exactly 40 tokens": _measure(folder, rounds, is_exact=True),
        "until they end": _measure(EMBEDDED_MODEL, rounds, is_exact=False),
    }


def _measure(folder: Path, rounds: int, is_exact: bool) -> dict:
    """Measure ours (decoding the texts included), chapter 0's plain
    sampler, `TransformerBridge.generate` and Hugging Face's `generate`, with its own and a static
    cache.

    The prompts are 16 additions, eight times each. Last, the same products and draws alone.
    """
    model = TransformerWithLora.from_pretrained(
        folder, rank=WORK.rank, sites=ALL_LINEAR_SITES, device="cpu"
    )
    hf = AutoModelForCausalLM.from_pretrained(folder)
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    distinct = make_data()[0][: WORK.n_prompts]
    prompts = [prompt for prompt in distinct for _ in range(WORK.group_size)]
    ids, mask = encode_prompts(model, prompts, WORK.gen_len, prepend_bos=True)
    generator = torch.Generator()

    def sample() -> torch.Tensor:
        return sample_completions(model, prompts, WORK.gen_len, generator=generator).input_ids

    def sample_plainly() -> torch.Tensor:
        with model.merged():
            return get_samples(model, prompts, WORK.gen_len, generator=generator).input_ids

    def generate_by_bridge():
        with model.merged():
            return model.base.generate(
                ids,
                max_new_tokens=WORK.gen_len,
                stop_at_eos=not is_exact,
                do_sample=True,
                return_type="tokens",
                verbose=False,
            )

    def generate_by_hugging_face(model=hf, **options):
        return model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=WORK.gen_len,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            **options,
        )

    sides = {
        "ours": sample,
        "plain": sample_plainly,
        "bridge": generate_by_bridge,
        "hugging face": generate_by_hugging_face,
        "hugging face, static cache": lambda: generate_by_hugging_face(
            cache_implementation="static", disable_compile=True
        ),
        "hugging face, eager attention": lambda: generate_by_hugging_face(eager),
    }
    if is_exact:
        for name, run in sides.items():
            if run().shape != (WORK.batch_size, ids.shape[1] + WORK.gen_len):
                raise ValueError(f"{name} should give {WORK.gen_len} new tokens, but does not")
        sides["the products and draws alone"] = make_arithmetic(ids.shape[1])
    seconds = take_turns(sides, rounds, "rollouts")
    others = [name for name in sides if name != "ours"]
    return {
        "seconds": {name: get_median(values) for name, values in seconds.items()},
        "ratios": {name: get_ratios(seconds[name], seconds["ours"]) for name in others},
    }


def make_arithmetic(prompt_len: int) -> Callable[[], None]:
    """Return the products, the attention over the mean length, the activation and the draws of
    40 tokens: no norms, no cache to write, no Python besides."""
    d_model, n_layers, heads, vocab, rows = 128, 4, 4, 512, WORK.batch_size
    x, hidden = torch.randn(rows, d_model), torch.randn(rows, 4 * d_model)
    weights = [torch.randn(d_model, width) for width in (3 * d_model, d_model, 4 * d_model)]
    back, unembed = torch.randn(4 * d_model, d_model), torch.randn(d_model, vocab)
    length = prompt_len + WORK.gen_len // 2
    q = torch.randn(rows * heads, 1, d_model // heads)
    caches = [torch.randn(2, rows * heads, length, d_model // heads) for _ in range(n_layers)]

    @torch.no_grad()
    def run() -> None:
        for _ in range(WORK.gen_len):
            for keys, values in caches:
                for weight in weights:
                    x @ weight
                torch.nn.functional.gelu(hidden, approximate="tanh") @ back
                (q @ keys.mT).softmax(-1) @ values
            sample_next_token(x @ unembed)

    return run
