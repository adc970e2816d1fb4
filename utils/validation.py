"""Errors that name the argument, what it was and what it should have been."""

import functools
import inspect
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from jaxtyping import AbstractArray, jaxtyped
from torch import Tensor


def require(condition: Any, message: str) -> None:
    """Raise a ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Range:
    """The limits of a number, both included."""

    low: float
    high: float = math.inf


# Types of a dataclass's fields, with the limits that `check_fields` holds their values to.
Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]
Positive = Annotated[float, Range(1e-6)]
PositiveOrZero = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]


def check_fields(args: Any) -> None:
    """Raise a ValueError that names the field of a dataclass whose value its type does not allow.

    `Count` and the like allow numbers within their limits, `Literal["a", "b"]` one of these two,
    and either of them None where its type has `| None`. Other types are not checked.
    """
    types = typing.get_type_hints(type(args), include_extras=True)
    for name in (field.name for field in fields(args)):
        kind, value = types[name], getattr(args, name)
        if type(None) in typing.get_args(kind):
            if value is None:
                continue
            kind = next(o for o in typing.get_args(kind) if o is not type(None))
        if typing.get_origin(kind) is Literal:
            require_option(args, name, *typing.get_args(kind))
        elif typing.get_origin(kind) is Annotated:
            number, limits = typing.get_args(kind)[:2]
            if isinstance(limits, Range):  # not an annotation of some other library
                _require_number(name, value, number, limits)


def _require_number(name: str, value: Any, kind: Any, limits: Range) -> None:
    low, high = limits.low, limits.high
    what = f"a finite number in [{low}, {high}]"
    if kind is int:
        what = f"an integer of at least {low}"
    require(
        isinstance(value, int | kind)
        and not isinstance(value, bool)
        and (kind is int or math.isfinite(value))
        and low <= value <= high,
        f"{name} should be {what}, but is {value!r}",
    )


def require_option(args: Any, name: str, *options: Any) -> None:
    """Raise a ValueError unless the named field of `args` is one of `options`."""
    value = getattr(args, name)
    require(value in options, f"{name} should be one of {list(options)}, but is {value!r}")


def shape_checked(function: Callable) -> Callable:
    """Hold the tensors that `function` is called with against the jaxtyping of its signature.

    An axis that is named twice must have one size. A tensor whose dtype or shape does not fit is a
    ValueError that names it.
    """
    signature = inspect.signature(function)
    expected = {}
    for name, parameter in signature.parameters.items():
        kinds = typing.get_args(parameter.annotation) or (parameter.annotation,)
        arrays = [o for o in kinds if isinstance(o, type) and issubclass(o, AbstractArray)]
        is_optional = parameter.default is None or type(None) in kinds
        if arrays:
            expected[name] = arrays, is_optional

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        with jaxtyped("context"):
            sizes: list[str] = []
            for name, (arrays, is_optional) in expected.items():
                value = arguments.get(name)
                if value is None and is_optional:
                    continue
                if not any(isinstance(value, array) for array in arrays):
                    wanted = " or ".join(array.__name__ for array in arrays)
                    seen = f" beside {', '.join(sizes)}" if sizes else ""
                    raise ValueError(f"{name} should be {wanted}{seen}, but is {_describe(value)}")
                shape = getattr(value, "shape", ())
                sizes.append(f"{name} {list(shape)}")
        return function(*args, **kwargs)

    return checked


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
