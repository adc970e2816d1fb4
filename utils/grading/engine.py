"""The trusted side: what was observed of the student, held against the reference or an oracle.

The same verdicts in a notebook (`utils.grading.notebook`) and in pytest (`tests/conftest.py`).
"""

import functools
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from utils.grading import answers, recorded
from utils.grading.checks import Check, get_checks, get_reference
from utils.grading.comparison import Mismatch, find_mismatch, is_finite_as, measure_gap
from utils.grading.observation import Answers, Raised, is_sound, run_check

SAME_RTOL, SAME_ATOL = 1e-3, 1e-4  # two answers that round differently do the same
MAX_SOURCE_LINES = 15  # of a public check that is shown: a longer one says little to a student


@dataclass(frozen=True)
class Verdict:
    """How one check went: the observations of the seeds that ran, and the first mismatch."""

    check: Check
    observations: tuple[Any, ...]
    mismatch: Mismatch | None
    printed: str = ""
    seconds: float = 0.0  # that it took, where it was run here

    @property
    def passed(self) -> bool:
        return self.mismatch is None

    @property
    def is_stub(self) -> bool:
        """Whether the exercise has not been started."""
        last = self.observations[-1] if self.observations else None
        name = self.check.exercise.rpartition(".")[2]
        return (
            isinstance(last, Raised)
            and last.kind == "NotImplementedError"
            and last.place in (name, "__init__")
            and not last.message  # torch has NotImplementedErrors of its own
        )

    def describe(self) -> str:
        """What failed, for the student; of public checks alone the values, the probe unless it is
        long, and what was printed."""
        if self.passed:
            return ""
        lines = [self.mismatch.message]
        if self.check.public and self.observations and not self.is_stub:
            lines += self.mismatch.values.splitlines()
            source = self.check.source.splitlines()
            if len(source) <= MAX_SOURCE_LINES:
                lines += ["of:", *(f"    {line}" for line in source)]
            if self.printed.strip():
                lines += [
                    "printed:",
                    *(line[:200] for line in self.printed.rstrip().splitlines()[-10:]),
                ]
        return "\n".join(lines)


def grade(check: Check, student: Answers, secret: str = "") -> Verdict:
    """Run one check on a student's code, up to the first seed that fails."""
    return _grade(check, lambda index: run_check(check, student, index, secret), secret)


def grade_answer(check: Check, answer: "answers.Answer", secret: str = "") -> Verdict:
    """`grade` of a known answer; what was observed of it is kept."""
    return _grade(check, lambda index: (observe_answer(answer, check, index, secret), ""), secret)


def _grade(check: Check, run: Callable[[int], tuple[Any, str]], secret: str) -> Verdict:
    observations, start = [], time.perf_counter()
    for index in range(check.seeds):
        observed, printed = run(index)
        observations.append(observed)
        mismatch = judge(check, observed, index, secret)
        if mismatch is not None:
            break
    return Verdict(check, tuple(observations), mismatch, printed, time.perf_counter() - start)


def judge(check: Check, observed: Any, index: int, secret: str = "") -> Mismatch | None:
    """What is wrong with an observation, by the check's oracle or else by the reference."""
    if not check.float64 and check.holds is None:
        target = observe_expected(check, index, secret)
        return find_mismatch(observed, target, None, check.rtol, check.atol)
    reference = observe_reference(check, index, secret)
    if check.holds is not None:
        mismatch = find_mismatch(observed, reference, structure_only=True)
        if mismatch is None:
            try:
                message = check.holds(observed, reference)
            except Exception as error:  # a predicate on what cannot be
                message = f"the check could not read what was observed ({type(error).__name__})"
            if message is None and not is_finite_as(observed, reference):
                message = "the result is not finite"  # nan exceeds no predicate's limit
            mismatch = None if message is None else Mismatch(message)
        return mismatch
    gap = measure_reference_gap(check, index, secret)
    mismatch = find_mismatch(observed, reference, structure_only=True)
    if mismatch is None:
        target = observe_expected(check, index, secret)
        mismatch = find_mismatch(observed, target, gap, check.rtol, check.atol)
    return mismatch


@functools.lru_cache(maxsize=4096)
def observe_reference(
    check: Check, index: int, secret: str = "", dtype: torch.dtype = torch.float32
) -> Any:
    """What the reference gives. Raises RuntimeError if that is no observation."""
    if (known := recorded.load(check.stem)) is not None:
        return known.reference[check.path][index]
    reference = Answers(vars(get_reference(check.stem)))
    observed = run_check(check, reference, index, secret, dtype)[0]
    if not is_sound(observed):
        raise RuntimeError(f"{check.path}: the reference in {dtype} gave {observed}")
    return observed


@functools.lru_cache(maxsize=4096)
def measure_reference_gap(check: Check, index: int, secret: str = "") -> Any:
    """|reference in float32 - reference in float64|, number by number; None without float64."""
    if not check.float64:
        return None
    if (known := recorded.load(check.stem)) is not None:
        return known.gap[check.path][index]
    exact = observe_reference(check, index, secret, torch.float64)
    return measure_gap(observe_reference(check, index, secret), exact)


@functools.lru_cache(maxsize=4096)
def observe_expected(check: Check, index: int, secret: str = "") -> Any:
    """The oracle's observation, in the reference's dtypes; without an oracle the reference's."""
    if (known := recorded.load(check.stem)) is not None:
        return known.expected[check.path][index]
    if not callable(check.expected):
        reference = observe_reference(check, index, secret)
        if check.expected is None:
            return reference
        return _as_tensors_like(check.expected, reference)
    stand_in = answers.replace(check.stem, check.exercise, check.expected)
    dtype = torch.float64 if check.float64 else torch.float32
    observed = run_check(check, stand_in, index, secret, dtype)[0]
    if isinstance(observed, Raised):
        raise RuntimeError(f"{check.path}: the oracle raised {observed}\n{observed.trace}")
    if not check.float64:
        return observed
    return _as_tensors_like(observed, observe_reference(check, index, secret))


def _as_tensors_like(worked: Any, reference: Any) -> Any:
    """Numbers worked by hand, as tensors where the reference has those."""
    if isinstance(reference, dict):
        return {key: _as_tensors_like(worked[key], value) for key, value in reference.items()}
    if isinstance(reference, list):
        return [_as_tensors_like(w, r) for w, r in zip(worked, reference, strict=True)]
    if isinstance(reference, torch.Tensor):
        return torch.as_tensor(worked, dtype=reference.dtype)
    return worked


# --- Which mistake it is ------------------------------------------------------------------------


def diagnose(verdicts: Iterable[Verdict], secret: str = "") -> str | None:
    """The sentence of the mistake whose observations equal the student's over all checks.

    None if no known mistake does, or more than one; and for an error in slow checks alone: to run
    every known mistake takes longer than reading the error.
    """
    # The telling ones first, and the quick ones of them: each mistake is run until one differs.
    verdicts = sorted(verdicts, key=lambda verdict: (verdict.passed, verdict.seconds))
    if not all(verdict.observations and not verdict.is_stub for verdict in verdicts):
        return None
    failed = [verdict for verdict in verdicts if not verdict.passed]
    if not failed:
        return None
    first = failed[0].check
    known = recorded.load(first.stem)
    is_read = [v.check.slow and isinstance(v.observations[-1], Raised) for v in failed]
    if known is None and all(is_read):
        return None
    mistakes = answers.get_mistakes(first.stem) if known is None else known.mistakes
    same = _same_as_mistake if known is None else _same_as_recorded
    mine = [mistake for mistake in mistakes if mistake.exercise == first.exercise]
    # Without a record each mistake is run, which takes seconds at the first time.
    is_hidden = known is not None or "ipykernel" not in sys.modules
    bar = tqdm(mine, "looking for the mistake", leave=False, delay=1, disable=is_hidden)
    fitting = [m for m in bar if all(same(verdict, m, secret) for verdict in verdicts)]
    return fitting[0].sentence if len(fitting) == 1 else None


def _same_as_recorded(verdict: Verdict, mistake: "recorded.RecordedMistake", secret: str) -> bool:
    observed = mistake.observed.get(verdict.check.path, recorded.SAME)
    if observed == recorded.SAME or verdict.passed:
        return verdict.passed and observed == recorded.SAME
    return len(observed) == len(verdict.observations) and all(
        same_observation(verdict.check, a, b, i, secret)
        for i, (a, b) in enumerate(zip(verdict.observations, observed, strict=True))
    )


def _same_as_mistake(verdict: Verdict, mistake: "answers.Answer", secret: str) -> bool:
    return all(
        same_observation(
            verdict.check, observed, observe_answer(mistake, verdict.check, i, secret), i, secret
        )
        for i, observed in enumerate(verdict.observations)
    )


@functools.lru_cache(maxsize=16384)
def observe_answer(answer: "answers.Answer", check: Check, index: int, secret: str = "") -> Any:
    return run_check(check, answer.build(), index, secret)[0]


def same_observation(check: Check, a: Any, b: Any, index: int, secret: str = "") -> bool:
    """Whether two answers did the same. A predicate may accept both though their draws differ."""
    if check.holds is not None:
        verdicts = [judge(check, observed, index, secret) for observed in (a, b)]
        if None in verdicts:
            return verdicts == [None, None]
        if verdicts[0].message != verdicts[1].message:  # values may hold a traceback
            return False
    gap = measure_reference_gap(check, index, secret) if check.holds is None else None
    rtol, atol = check.rtol, check.atol
    if gap is None:  # what rounding does to it is not known
        rtol, atol = max(rtol, SAME_RTOL), max(atol, SAME_ATOL)
    return find_mismatch(a, b, gap, rtol, atol) is None


def diagnose_answer(answer: "answers.Answer") -> str | None:
    """What `diagnose` says of a known mistake: its own sentence, unless another does the same."""
    checks = get_quick_checks(answer.stem, answer.exercise)
    return diagnose([grade_answer(check, answer) for check in checks])


# --- Exercises ----------------------------------------------------------------------------------


def get_points(verdicts: list[Verdict]) -> list[float]:
    """What each check of an exercise earns.

    What a worked example expects can be copied from it: those count beside another check that
    passes, not alone.
    """
    others = [v.passed for v in verdicts if v.check.earns_alone]
    is_earned = any(others) or not others
    return [v.check.points if v.passed and is_earned else 0 for v in verdicts]


def count_points(verdicts: list[Verdict]) -> float:
    return sum(get_points(verdicts))


def get_quick_checks(stem: str, exercise: str) -> list[Check]:
    return [check for check in get_checks(stem)[exercise] if not check.slow]


def grade_exercise(
    stem: str, exercise: str, student: Answers, secret: str = "", slow: bool = False
) -> tuple[list[Verdict], str | None]:
    """Every check of an exercise, and the mistake's sentence if exactly one fits."""
    checks = get_quick_checks(stem, exercise) if not slow else get_checks(stem)[exercise]
    verdicts = [grade(check, student, secret) for check in checks]
    failed = any(not verdict.passed for verdict in verdicts)
    return verdicts, diagnose(verdicts, secret) if failed else None
