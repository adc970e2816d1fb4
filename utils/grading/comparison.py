"""Comparing two observations: the first place where they differ, and what to say about it."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from utils.grading.observation import Raised, Unsupported


@dataclass(frozen=True)
class Mismatch:
    """Where an observation differs. `values` is for public checks only, and for a student's own
    notebook where they tell of an error (`is_error`)."""

    message: str
    values: str = ""
    is_error: bool = False


def find_mismatch(
    yours: Any,
    expected: Any,
    gap: Any = None,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    where: str = "the result",
    structure_only: bool = False,
) -> Mismatch | None:
    """Return the first difference, or None: type, keys or length, shape, dtype, finiteness, values.

    `gap` is an observation like `expected` with the absolute rounding error of the reference; ten
    times that is allowed on top of atol + rtol |expected|.
    """
    if isinstance(yours, Raised) or isinstance(expected, Raised):
        return _compare_raised(yours, expected)
    yours_kind, expected_kind = _describe_kind(yours), _describe_kind(expected)
    if yours_kind != expected_kind:
        return Mismatch(f"{where} is {yours_kind}, where {expected_kind} is expected")
    if isinstance(expected, dict):
        if missing := sorted(expected.keys() - yours.keys()):
            return Mismatch(f"{where} lacks {missing[0]}")
        if unexpected := sorted(yours.keys() - expected.keys()):
            return Mismatch(f"{where} has more parts than are expected", f"such as {unexpected[0]}")
        parts = {key: _name_part(key, where) for key in expected}
    elif isinstance(expected, list):
        if len(yours) != len(expected):
            return Mismatch(f"{where} has {len(yours)} entries, where {len(expected)} are expected")
        parts = {i: f"{where}[{i}]" for i in range(len(expected))}
    elif isinstance(expected, Tensor):
        return _compare_tensors(yours, expected, gap, rtol, atol, where, structure_only)
    else:
        return None if structure_only else _compare_scalars(yours, expected, gap, rtol, atol, where)
    for key, name in parts.items():
        mismatch = find_mismatch(
            yours[key], expected[key], _get_part(gap, key), rtol, atol, name, structure_only
        )
        if mismatch is not None:
            return mismatch
    return None


def is_finite_as(yours: Any, expected: Any) -> bool:
    """Return whether what should be finite is, of two observations of one structure."""
    if isinstance(expected, dict):
        return all(is_finite_as(yours[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return all(map(is_finite_as, yours, expected))
    if isinstance(expected, Tensor):
        return bool(yours.isfinite().all() or not expected.isfinite().all())
    if isinstance(expected, float):
        return math.isfinite(yours) or not math.isfinite(expected)
    return True


def calc_gap(a: Any, b: Any) -> Any:
    """Return |a - b| for each number of two observations; None where their structures differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: calc_gap(a[key], b[key]) for key in a if key in b}
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [calc_gap(x, y) for x, y in zip(a, b, strict=True)]
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
        return (a.double() - b.double()).abs().nan_to_num(nan=0.0, posinf=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) if math.isfinite(a - b) else 0.0
    return None


def _name_part(key: str, where: str) -> str:
    """Return a probe's label as the subject of a sentence: one that is none is put after it, and
    so are those of what it is a part of."""
    subject, bracket, labels = where.partition(" (")
    if key.startswith("the "):
        return f"{key}{bracket}{labels}"
    return f"{subject} ({labels[:-1]}, {key})" if where.endswith(")") else f"{where} ({key})"


def _get_part(gap: Any, key: Any) -> Any:
    if isinstance(gap, dict):
        return gap.get(key)
    return gap[key] if isinstance(gap, list) and key < len(gap) else None


def _compare_raised(yours: Any, expected: Any) -> Mismatch | None:
    if isinstance(yours, Raised) and isinstance(expected, Raised) and yours == expected:
        return None
    if not isinstance(yours, Raised):
        return Mismatch(f"raised nothing, where {expected.kind} is expected")
    if yours.kind == "NotDefined":  # the engine's own words
        return Mismatch(yours.message)
    if yours.kind == "NotImplementedError" and not yours.message:
        return Mismatch(f"{yours.place} is not written yet")
    what = f"raised {yours.kind}"
    if yours.origin == "check":
        what = f"the check could not go on with what it got ({yours.kind})"
        if "NoneType" in yours.message:
            what += ": it got None, perhaps for want of a `return`"
    return Mismatch(what, f"{yours.message}\n{yours.trace}".strip(), is_error=True)


def _describe_kind(value: Any) -> str:
    names = {type(None): "None", Tensor: "a tensor", bool: "a bool", int: "an int",
             float: "a float", str: "a string", list: "a sequence"}  # fmt: skip
    return f"a {value.kind}" if isinstance(value, Unsupported) else names.get(type(value), "a dict")


def _compare_tensors(
    yours: Tensor,
    expected: Tensor,
    gap: Any,
    rtol: float,
    atol: float,
    where: str,
    structure_only: bool,
) -> Mismatch | None:
    if yours.shape != expected.shape:
        return Mismatch(
            f"{where} has shape {list(yours.shape)}, where {list(expected.shape)} is expected"
        )
    if _classify_dtype(yours) != _classify_dtype(expected):
        return Mismatch(f"{where} is {yours.dtype}, where {expected.dtype} is expected")
    if structure_only:
        return None
    y, e = yours.double(), expected.double()
    allowed = atol + rtol * e.abs() if expected.is_floating_point() else torch.zeros_like(e)
    if isinstance(gap, Tensor) and gap.shape == e.shape:
        allowed = allowed + 10 * gap
    is_close = e.isfinite() & ((y - e).abs() <= allowed)  # what is not finite has to be the same
    differs = ~((y == e) | (y.isnan() & e.isnan()) | is_close)
    if not differs.any():
        return None
    position = differs.nonzero()[0].tolist()
    at = f" at {position} first, {int(differs.sum())} of {differs.numel()}" if position else ""
    y_first, e_first = yours[tuple(position)].item(), expected[tuple(position)].item()
    what = f"{where} is wrong{at}"
    if not math.isfinite(y_first) and math.isfinite(e_first):
        what = f"{where} is {y_first}{at}"
    elif where.startswith("the gradient") and not expected.any():
        what = f"{where} is not 0: nothing should get through here (detached, masked or clipped)"
    elif where.startswith("the gradient") and not yours.any():
        what = f"{where} is 0: none of it gets through"
    values = f"yours     {_format(yours, position)}\nexpected  {_format(expected, position)}"
    return Mismatch(what, values)


def _classify_dtype(x: Tensor) -> Any:
    """Return what a tensor's dtype counts as: integers of every width are alike; floats are not."""
    if x.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        return int
    return x.dtype


def _format(x: Tensor, position: list[int]) -> str:
    """Format a number; the row that it is in; or all of a small tensor."""
    shown = x if x.numel() <= 12 else x[tuple(position[:-1])]
    if shown.numel() > 12:
        start = min(max(position[-1] - 3, 0), shown.shape[-1] - 7)
        return f"... {_format_numbers(shown[start : start + 7].tolist())} ..."
    at = "" if x.numel() <= 12 or len(position) < 2 else f"row {position[:-1]}: "
    return at + _format_numbers(shown.tolist())


def _format_numbers(numbers: Any) -> str:
    if isinstance(numbers, list):
        return f"[{', '.join(map(_format_numbers, numbers))}]"
    return f"{numbers:.6g}" if isinstance(numbers, float) else str(numbers)


def _compare_scalars(
    yours: Any, expected: Any, gap: Any, rtol: float, atol: float, where: str
) -> Mismatch | None:
    is_same = yours == expected
    if isinstance(expected, float):
        allowed = atol + rtol * abs(expected) + 10 * (gap if isinstance(gap, float) else 0.0)
        is_same |= math.isfinite(expected) and abs(yours - expected) <= allowed
        is_same |= math.isnan(yours) and math.isnan(expected)
    if is_same:
        return None
    if isinstance(expected, str) and expected.startswith("a ValueError"):
        return Mismatch(f"{where}: {yours}, where {expected} is expected")
    values = f"yours     {yours!r}\nexpected  {expected!r}"
    return Mismatch(f"{where} is wrong", values)
