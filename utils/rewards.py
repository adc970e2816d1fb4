"""Rewards for the embedded model's additions, and calling and checking any reward function."""

import inspect
import re
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from utils.validation import require


def reward_fn_addition(samples: list[str], answers: list[str]) -> Float[Tensor, "batch"]:
    """Reward with 1 where a completion ends with `A: <answer>`, else 0."""
    right = [text.endswith(f"A: {answer}") for text, answer in zip(samples, answers, strict=True)]
    return torch.tensor(right, dtype=torch.float32)


# A whole number at the start of a text, thousands grouped or not: not the 3 of 3.5, 3/4 or 3,5.
_WHOLE_NUMBER = re.compile(r"\s*([-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+))(?!\d|[.,/]\d)")


def reward_fn_sum(samples: list[str], answers: list[str] | list[int]) -> Float[Tensor, "batch"]:
    """Reward with 1 where a completion begins with its answer, a whole number, else 0.

    "9,801" is 9801, and "3.5" is not 3. Raises ValueError for an answer that is no whole number.
    """
    found = [_WHOLE_NUMBER.match(text) for text in samples]
    pairs = zip(found, map(_read_integer, answers), strict=True)
    return torch.tensor(
        [float(match is not None and _read_integer(match[1]) == answer) for match, answer in pairs]
    )


def _read_integer(answer: str | int) -> int:
    try:
        return int(str(answer).strip().replace(",", "").replace("\u2212", "-"))
    except ValueError as error:
        raise ValueError(f"answers should be whole numbers, but one is {answer!r}") from error


def is_worked(sample: str) -> bool:
    """Return whether an addition was answered with worked steps: ones, tens, sum."""
    return all(step in sample for step in ("ones ", "tens ", "sum "))


def check_rewards(rewards: Float[Tensor, "batch"], samples: list[str]) -> Float[Tensor, "batch"]:
    """Return what a reward function returned, detached and in float32.

    Raises ValueError unless there is one finite number a sample; shows a sample where one is not.
    """
    try:
        if isinstance(rewards, np.ndarray):
            rewards = np.ascontiguousarray(rewards)  # torch takes no negative strides
        rewards = torch.as_tensor(rewards).detach().float()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"reward_fn should return a list or tensor of numbers, but returned "
            f"{reprlib.repr(rewards)}"
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


def copy_containers(value: Any) -> Any:
    """Copy a list or dict, and those in it, but nothing else that they hold."""
    if isinstance(value, dict):
        return {key: copy_containers(x) for key, x in value.items()}
    return [copy_containers(x) for x in value] if isinstance(value, list) else value


def call_reward_fn(
    reward_fn: Callable[..., Float[Tensor, "batch"]], samples: list[str], columns: dict[str, list]
) -> Float[Tensor, "batch"]:
    """Call `reward_fn(samples)`, with the `columns` it names, one value for each sample.

    The samples are its first parameter; if that's named like a column, the one that isn't and has
    no default. `**kwargs` get every column, and the samples as `completions` where no parameter
    takes them. Lists and dicts are copies: a function that adds its judge's messages to a chat
    doesn't change what is trained on.

    Raises ValueError if it needs another argument, or does not return finite rewards.
    """
    require(
        "completions" not in columns,
        "columns should not hold 'completions', which is what reward_fn may call the samples: give "
        "the column another name",
    )
    function = reward_fn.forward if isinstance(reward_fn, nn.Module) else reward_fn
    parameters = [*inspect.signature(function).parameters.values()]
    kinds = {p.kind for p in parameters}
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names, takes_all = {p.name for p in named}, inspect.Parameter.VAR_KEYWORD in kinds
    wanted = [name for name in columns if takes_all or name in names]
    chosen = {name: copy_containers(columns[name]) for name in wanted}
    needed = [p for p in named if p is parameters[0] or p.default is p.empty]
    free = [p for p in needed if p.name not in columns]
    if len(free) > 1:
        said = f"reward_fn should need no more than the samples and {sorted(columns)}"
        raise ValueError(f"{said}, but needs {free[1].name!r}")
    if free and free[0] is parameters[0] and free[0].kind is not free[0].KEYWORD_ONLY:
        rewards = reward_fn(list(samples), **chosen)
    elif free:
        rewards = reward_fn(**{free[0].name: list(samples)}, **chosen)
    elif inspect.Parameter.VAR_POSITIONAL in kinds:  # a plain decorator
        rewards = reward_fn(list(samples))
    else:
        require(
            takes_all,
            f"reward_fn should take the samples, but its parameters {sorted(names)} are columns or "
            "have defaults: rename the one that's meant, or the column",
        )
        rewards = reward_fn(completions=list(samples), **chosen)
    return check_rewards(rewards, samples)
