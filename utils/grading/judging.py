"""The trusted side: what was observed of the student, held against the reference or an oracle.

The same verdicts in a notebook (`utils.course.checking`) and in pytest (`tests/conftest.py`).
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from utils.grading import recorded
from utils.grading.checks import Check, get_checks, get_reference
from utils.grading.comparison import Mismatch, calc_gap, find_mismatch, is_finite_as
from utils.grading.observation import Raised, StudentNames, is_sound, run_check
from utils.grading.points import earn, weigh
from utils.grading.reference import replace_definition

MAX_SOURCE_LINES = 15  # of a public check that is shown: a longer one says little to a student


@dataclass(frozen=True)
class Verdict:
    """How one check went: the observations of the seeds that ran, and the first mismatch."""

    check: Check
    observations: tuple[Any, ...]
    mismatch: Mismatch | None
    printed: str = ""
    seconds: float = 0.0  # that it took, where it was run here
    is_timeout: bool = False  # it was stopped, where it was run apart
    is_unwritten: bool = False  # its answer holds nothing but the stub, where it was run apart
    error: str = ""  # what failed in the grader, for instructors; the answer is unjudged then

    @property
    def passed(self) -> bool:
        return self.mismatch is None

    @property
    def is_stub(self) -> bool:
        """Return whether the exercise has not been started."""
        last = self.observations[-1] if self.observations else None
        names = self.check.exercise.split(".")  # a class stands for its __init__
        return (
            isinstance(last, Raised)
            and last.kind == "NotImplementedError"
            and last.place in names
            and not last.message  # torch has NotImplementedErrors of its own
        )

    def describe(self, is_own: bool = False) -> str:
        """Return what failed, for the student; of public checks alone the values, the probe
        unless it is long, and what was printed. Who `is_own` sees errors of all checks."""
        if self.mismatch is None:
            return ""
        lines = [self.mismatch.message]
        if is_own and self.mismatch.is_error and not self.check.public:
            return "\n".join([*lines, *self.mismatch.values.splitlines()])
        if self.check.public and self.observations and not self.is_stub:
            lines += self.mismatch.values.splitlines()
            source = self.check.source.splitlines()
            if len(source) <= MAX_SOURCE_LINES:
                lines += ["of:", *(f"    {line}" for line in source)]
            if printed := self.printed.rstrip().splitlines()[-10:]:
                lines += ["printed:", *(line[:200] for line in printed)]
        return "\n".join(lines)


def grade(check: Check, student: StudentNames, secret: str = "") -> Verdict:
    """Run one check on a student's code, up to the first seed that fails."""
    return grade_runs(check, lambda index: run_check(check, student, index, secret), secret)


def grade_runs(check: Check, run: Callable[[int], tuple[Any, str]], secret: str) -> Verdict:
    """Judge what `run` gives for each seed's index, an observation and what was printed."""
    observations, start = [], time.perf_counter()
    for index in range(check.seeds):
        observed, printed = run(index)
        observations.append(observed)
        mismatch = judge(check, observed, index, secret)
        if mismatch is not None:
            break
    return Verdict(check, tuple(observations), mismatch, printed, time.perf_counter() - start)


def judge(check: Check, observed: Any, index: int, secret: str = "") -> Mismatch | None:
    """Return what is wrong with an observation, by the check's oracle or else the reference."""
    if check.holds is None:
        target = observe_expected(check, index, secret)
        gap = measure_reference_gap(check, index, secret)
        mismatch = find_mismatch(observed, target, structure_only=True)
        return mismatch or find_mismatch(observed, target, gap, check.rtol, check.atol)
    reference = observe_reference(check, index, secret)
    if mismatch := find_mismatch(observed, reference, structure_only=True):
        return mismatch
    try:
        message = check.holds(observed, reference)
    except Exception as error:  # a predicate on what cannot be
        message = f"the check could not read what was observed ({type(error).__name__})"
    if message is None and not is_finite_as(observed, reference):
        message = "the result is not finite"  # nan exceeds no predicate's limit
    return None if message is None else Mismatch(message)


@functools.lru_cache(maxsize=4096)
def observe_reference(
    check: Check, index: int, secret: str = "", dtype: torch.dtype = torch.float32
) -> Any:
    """Return what the reference gives. Raises RuntimeError if that is no observation."""
    if (known := recorded.load(check.chapter)) is not None:
        return known.reference[check.path][index]
    reference = StudentNames(vars(get_reference(check.chapter)))
    observed = run_check(check, reference, index, secret, dtype)[0]
    if not is_sound(observed):
        raise RuntimeError(f"{check.path}: the reference in {dtype} gave {observed}")
    return observed


@functools.lru_cache(maxsize=4096)
def measure_reference_gap(check: Check, index: int, secret: str = "") -> Any:
    """Measure |reference in float32 - in float64|, number by number; None without float64."""
    if not check.float64:
        return None
    if (known := recorded.load(check.chapter)) is not None:
        return known.gap[check.path][index]
    exact = observe_reference(check, index, secret, torch.float64)
    return calc_gap(observe_reference(check, index, secret), exact)


@functools.lru_cache(maxsize=4096)
def observe_expected(check: Check, index: int, secret: str = "") -> Any:
    """Return the oracle's observation, in the reference's dtypes; without one the reference's."""
    if (known := recorded.load(check.chapter)) is not None:
        return known.expected[check.path][index]
    if not callable(check.expected):
        reference = observe_reference(check, index, secret)
        if check.expected is None:
            return reference
        return _as_tensors_like(check.expected, reference)
    oracle = replace_definition(check.chapter, check.exercise, check.expected)
    dtype = torch.float64 if check.float64 else torch.float32
    observed = run_check(check, oracle, index, secret, dtype)[0]
    if isinstance(observed, Raised):
        raise RuntimeError(f"{check.path}: the oracle raised {observed}\n{observed.trace}")
    if not check.float64:
        return observed
    return _as_tensors_like(observed, observe_reference(check, index, secret))


def _as_tensors_like(worked: Any, reference: Any) -> Any:
    """Return numbers worked by hand as tensors where the reference has those."""
    if isinstance(reference, dict):
        return {key: _as_tensors_like(worked[key], value) for key, value in reference.items()}
    if isinstance(reference, list):
        return [_as_tensors_like(w, r) for w, r in zip(worked, reference, strict=True)]
    if isinstance(reference, torch.Tensor):
        return torch.as_tensor(worked, dtype=reference.dtype)
    return worked


# --- Exercises ----------------------------------------------------------------------------------


def get_points(verdicts: list[Verdict]) -> list[float]:
    """Return what each check of an exercise earns, which is worth the points of its checks."""
    checks = [verdict.check for verdict in verdicts]
    points = [check.points for check in checks]
    weights = weigh(points, [check.tier for check in checks], sum(points))
    return earn([v.passed for v in verdicts], [check.earns_alone for check in checks], weights)


def count_points(verdicts: list[Verdict]) -> float:
    """Return what an exercise earns by these verdicts."""
    return round(sum(get_points(verdicts)), 4)


def get_quick_checks(chapter: str, exercise: str) -> list[Check]:
    """Return the checks of an exercise that do not train."""
    return [check for check in get_checks(chapter)[exercise] if not check.slow]
