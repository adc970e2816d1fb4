"""Rewards for the embedded model's additions; chapter 5 builds verifiable rewards with care."""

import torch
from jaxtyping import Float
from torch import Tensor

from utils.validation import require


def reward_fn_addition(samples: list[str], answers: list[str]) -> Float[Tensor, "batch"]:
    """1 where a completion ends with `A: <answer>`, else 0."""
    right = [text.endswith(f"A: {answer}") for text, answer in zip(samples, answers, strict=True)]
    return torch.tensor(right, dtype=torch.float32)


def is_worked(sample: str) -> bool:
    """Whether an addition was answered with worked steps: ones, tens, sum."""
    return all(step in sample for step in ("ones ", "tens ", "sum "))


def check_rewards(rewards: Float[Tensor, "batch"], samples: list[str]) -> Float[Tensor, "batch"]:
    """What a reward function returned, detached and in float32.

    Raises ValueError unless there is one finite number a sample; shows a sample where one is not.
    """
    rewards = torch.as_tensor(rewards).detach().float()
    require(
        rewards.shape == (len(samples),),
        f"reward_fn should return one reward for each of {len(samples)} samples, but returned "
        f"shape {list(rewards.shape)}",
    )
    if not rewards.isfinite().all():
        row = int((~rewards.isfinite()).nonzero()[0])
        raise ValueError(
            f"reward_fn should return finite rewards, but gave {rewards[row]} for {samples[row]!r}"
        )
    return rewards
