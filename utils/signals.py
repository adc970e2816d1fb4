"""Signals that a run learns nothing or is cut short, each as one sentence for its reader."""

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
        f"In {which} every group's rewards are equal, so nothing is learnt from them (the last "
        f"mean reward is {mean:.3g}). Where all fail, try easier prompts, a worked example in the "
        "prompt, part marks, a higher temperature or larger groups; where all succeed, harder "
        "prompts"
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
        "end by themselves: if the reward is for what comes later, raise --gen-len, or give the "
        "text after which a completion ends by --stop"
    )
