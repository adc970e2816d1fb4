"""Rewards for the embedded model's additions; chapter 5 builds verifiable rewards with care."""

import torch
from jaxtyping import Float
from torch import Tensor


def reward_fn_addition(samples: list[str], answers: list[str]) -> Float[Tensor, "batch"]:
    """1 where a completion ends with `A: <answer>`, else 0."""
    right = [text.endswith(f"A: {answer}") for text, answer in zip(samples, answers, strict=True)]
    return torch.tensor(right, dtype=torch.float32)


def is_worked(sample: str) -> bool:
    """Whether an addition was answered with worked steps: ones, tens, sum."""
    return all(step in sample for step in ("ones ", "tens ", "sum "))
