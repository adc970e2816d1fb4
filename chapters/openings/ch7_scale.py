"""Runs chapter 7's finished thing: the gradient of one update, from a fraction of its memory."""

import time
from contextlib import nullcontext

import torch
from tabulate import tabulate
from tqdm import tqdm

from solutions.ch0_sampling import get_logprobs
from solutions.ch7_scale import accumulate_gradients, checkpoint_blocks, estimate_memory
from utils.scale.memory import boot_gpt2, make_update, measure_allocated

SHAPE = dict(n_layers=6, d_model=64, n_heads=4, d_vocab=2048, batch=32, seq=128)
COMPLETION = 112  # tokens
WAYS = {  # pieces, and whether blocks are computed twice
    "in one piece": (1, False),
    "in eight pieces": (8, False),
    "in eight pieces, blocks computed twice": (8, True),
}


def calc_per_token(model, minibatch):
    """GRPO's objective of each token, at the first update."""
    logits = model(minibatch.input_ids, minibatch.attention_mask)
    logprobs = get_logprobs(logits, minibatch.input_ids, minibatch.prompt_len)
    return torch.exp(logprobs - logprobs.detach()) * minibatch.advantages[:, None]


def measure(policy, parts: list, is_checkpointed: bool) -> tuple[torch.Tensor, float, float]:
    """The gradient, the MiB at the peak, and the seconds of one update."""
    gradients = []

    def run() -> None:
        with checkpoint_blocks(policy) if is_checkpointed else nullcontext():
            accumulate_gradients(policy, parts, calc_per_token)
        gradients.append(torch.cat([p.grad.flatten() for p in policy.trainable_parameters()]))
        policy.zero_grad()

    peak = measure_allocated(run) / 2**20
    start = time.perf_counter()
    run()
    return gradients[-1], peak, time.perf_counter() - start


def main() -> None:
    policy = boot_gpt2(**SHAPE)
    minibatch = make_update(policy, SHAPE["batch"], SHAPE["seq"], COMPLETION).minibatch
    rows = []
    for name, (pieces, is_checkpointed) in tqdm(WAYS.items(), unit="way"):
        parts = [minibatch.get_rows(rows) for rows in torch.arange(SHAPE["batch"]).chunk(pieces)]
        gradient, peak, seconds = measure(policy, parts, is_checkpointed)
        whole = gradient if not rows else whole
        off = 100 * ((gradient - whole).abs().max() / whole.abs().max()).item()
        rows.append((name, f"{peak:.0f} MiB", f"{seconds:.1f} s", f"{off:.5f}%" if off else ""))
    n_trained = sum(p.numel() for p in policy.trainable_parameters())
    causes = estimate_memory(0, n_trained, completion=COMPLETION, **SHAPE)
    expected = sum(causes[key] for key in causes if key != "optimizer") / 2**20
    print(f"One update from {SHAPE['batch']} completions. On paper, in one piece: ", end="")
    print(f"{expected:.0f} MiB\n")
    headers = ("", "measured at the peak", "time", "gradient differs by")
    print(tabulate(rows, headers, disable_numparse=True))


if __name__ == "__main__":
    main()
