"""Signals that rewards teach nothing, or that completions are cut off: what to say, and to try."""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

PHASES = 3  # in a row, before something is said


def find_cut_off(samples: Any, end_ids: list[int], gen_len: int) -> Bool[Tensor, "batch"]:
    """Mark the completions of chapter 0's `Samples` that had not ended after `gen_len` tokens."""
    ids = samples.input_ids[:, samples.prompt_len :]
    is_written = samples.attention_mask[:, samples.prompt_len :].bool()  # by an environment too
    is_end = torch.isin(ids, torch.tensor(end_ids, device=ids.device)) & is_written
    return (is_written.sum(-1) >= gen_len) & ~is_end.any(-1)


def take_latest(history: list[dict[str, float]], total_phases: int) -> list[dict[str, float]]:
    """Return the rows of the latest phases, or none while there are too few."""
    n = min(PHASES, total_phases)
    rows = [row for row in history if row["phase"] > 0][-n:]
    return rows if len(rows) == n else []


def find_equal_rewards(history: list[dict[str, float]], total_phases: int) -> str | None:
    """Return what to say if in the latest phases no group had two rewards."""
    rows = take_latest(history, total_phases)
    if not rows or any(row.get("frac_reward_zero_std") != 1 for row in rows):
        return None
    which = f"phases {rows[0]['phase']:.0f} to {rows[-1]['phase']:.0f}"
    which = f"phase {rows[0]['phase']:.0f}" if len(rows) == 1 else which
    mean = rows[-1]["reward"]
    return (
        f"In {which} every group's rewards are equal, so they teach nothing (the last mean reward "
        f"is {mean:.3g}); only an entropy bonus or a KL term moves the policy then. If all fail, "
        "try easier prompts, a worked example in the prompt, part marks, a higher temperature or "
        "larger groups; if all succeed, harder prompts"
    )


def find_mostly_cut_off(
    history: list[dict[str, float]], total_phases: int, gen_len: int
) -> str | None:
    """Return what to say if in the latest phases most completions were cut off by the length."""
    rows = take_latest(history, total_phases)
    if not rows or any(row.get("truncated_frac", 0) <= 0.5 for row in rows):
        return None
    share = rows[-1]["truncated_frac"]
    return (
        f"{share:.0%} of the completions are cut off after --gen-len {gen_len} tokens, before they "
        "end by themselves: if the reward depends on what would come next, raise --gen-len, or use "
        "--stop to give the text that ends a completion"
    )
