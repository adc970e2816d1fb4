"""Rewards for the embedded model's additions, and calling and checking any reward function."""

import inspect
import reprlib
from collections.abc import Callable

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
    try:
        rewards = torch.as_tensor(rewards).detach().float()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"reward_fn should return a tensor of rewards, but returned {reprlib.repr(rewards)}"
        ) from error
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


def call_reward_fn(
    reward_fn: Callable[..., Float[Tensor, "batch"]], samples: list[str], columns: dict[str, list]
) -> Float[Tensor, "batch"]:
    """`reward_fn(samples)`, and with those `columns` that it names, each of one value a sample.

    Its first parameter that is no column gets the samples; `**kwargs` get every column.

    Raises ValueError if it needs another argument, or does not return finite rewards.
    """
    parameters = list(inspect.signature(reward_fn).parameters.values())
    free = [p for p in parameters if p.name not in columns]
    require(len(free) > 0, f"reward_fn should take the samples, but takes {list(columns)} alone")
    takes_samples, *others = free
    for parameter in others:
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        require(
            variadic or parameter.default is not parameter.empty,
            f"reward_fn should need no more than the samples and {sorted(columns)}, but needs "
            f"{parameter.name!r}",
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters}
    chosen = {name: column for name, column in columns.items() if takes_all or name in named}
    if parameters[0] is takes_samples:
        return check_rewards(reward_fn(samples, **chosen), samples)
    return check_rewards(reward_fn(**{takes_samples.name: samples}, **chosen), samples)
