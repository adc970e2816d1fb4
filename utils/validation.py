"""Errors that name the argument, what it was and what it should have been."""

import functools
import inspect
import math
import typing
from collections.abc import Callable
from typing import Any

from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_integers(args: Any, least: int, *names: str) -> None:
    """Each named field of `args` should be an integer of at least `least`."""
    for name in names:
        value = getattr(args, name)
        require(
            isinstance(value, int) and not isinstance(value, bool) and value >= least,
            f"{name} should be an integer of at least {least}, but is {value!r}",
        )


def require_numbers(args: Any, low: float, high: float, *names: str) -> None:
    """Each named field of `args` should be a number in [low, high]."""
    for name in names:
        value = getattr(args, name)
        require(
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and low <= value <= high,
            f"{name} should be a finite number in [{low}, {high}], but is {value!r}",
        )


def require_option(args: Any, name: str, *options: str) -> None:
    """The named field of `args` should be one of `options`."""
    value = getattr(args, name)
    require(value in options, f"{name} should be one of {list(options)}, but is {value!r}")


def shape_checked(function: Callable) -> Callable:
    """Hold the tensors that `function` is called with against the jaxtyping of its signature.

    An axis that is named twice must have one size. A tensor whose dtype or shape does not fit is a
    ValueError that names it.
    """
    signature = inspect.signature(function)
    expected = {
        name: arrays
        for name, parameter in signature.parameters.items()
        if (arrays := _array_types(parameter.annotation))
    }

    optional = {
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is None or type(None) in typing.get_args(parameter.annotation)
    }

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        with jaxtyped("context"):
            sizes = []
            for name, arrays in expected.items():
                value = arguments.get(name)
                if value is None and name in optional:
                    continue
                if not any(isinstance(value, array) for array in arrays):
                    wanted = " or ".join(array.__name__ for array in arrays)
                    seen = f" beside {', '.join(sizes)}" if sizes else ""
                    raise ValueError(f"{name} should be {wanted}{seen}, but is {_describe(value)}")
                sizes.append(f"{name} {list(value.shape)}")
        return function(*args, **kwargs)

    return checked


def _array_types(annotation: Any) -> tuple[type, ...]:
    """The jaxtyping types in an annotation: one, none, or those of a union."""
    options = typing.get_args(annotation) or (annotation,)
    return tuple(o for o in options if isinstance(o, type) and issubclass(o, AbstractArray))


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
