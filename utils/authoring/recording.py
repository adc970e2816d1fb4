"""Recording what a student's bundle is judged by; `utils.grading.recorded` reads it there."""

import itertools
import sys
from collections.abc import Iterable
from typing import Any

from utils.grading.checks import Check, get_checks
from utils.grading.diagnosis import grade_answer, is_same_as_recorded
from utils.grading.judging import (
    grade,
    measure_reference_gap,
    observe_expected,
    observe_reference,
)
from utils.grading.known_answers import KnownAnswer, combine, get_mistakes
from utils.grading.observation import StudentNames
from utils.grading.packing import pack
from utils.grading.recorded import SAME
from utils.grading.reference import find_called
from utils.grading.substitution import build_module

MAX_BYTES = 20_000  # of an exercise's mistakes, if their pairs are to be recorded


def record(chapter: str) -> bytes:
    """Run the reference, the oracles, the mistakes of a chapter and pairs of those on its quick
    public checks; note how many checks an exercise has in all, and what its solution calls."""
    return pack(collect(chapter, get_checks(chapter)))


def collect(chapter: str, exercises: Iterable[str]) -> dict[str, Any]:
    """Return the record of some exercises as it is packed."""
    found: dict[str, Any] = {
        key: {} for key in ("reference", "expected", "gap", "n_checks", "calls")
    }
    found["mistakes"] = []
    for exercise in exercises:
        checks = get_checks(chapter)[exercise]
        found["n_checks"][exercise] = len(checks)
        found["calls"][exercise] = [*find_called(chapter, exercise)]
        public = [check for check in checks if check.public]
        for check in public:
            seeds = range(check.seeds)
            found["reference"][check.path] = [observe_reference(check, i) for i in seeds]
            found["expected"][check.path] = [observe_expected(check, i) for i in seeds]
            found["gap"][check.path] = [measure_reference_gap(check, i) for i in seeds]
        mistakes = [m for m in get_mistakes(chapter) if m.exercise == exercise]
        found["mistakes"] += _record_mistakes(mistakes, [c for c in public if not c.slow])
    return found


def _record_mistakes(mistakes: list[KnownAnswer], checks: list[Check]) -> list[dict[str, Any]]:
    """Record the mistakes that public checks see and, where that is cheap, pairs of them."""
    seen: list[tuple[KnownAnswer, dict[str, Any]]] = []
    for mistake in mistakes:
        verdicts = [grade_answer(check, mistake) for check in checks]
        if not all(verdict.passed for verdict in verdicts):
            observed = {v.check.path: SAME if v.passed else [*v.observations] for v in verdicts}
            seen.append((mistake, observed))
    is_cheap = not any("." in mistake.exercise for mistake in mistakes)  # a method makes a model
    if is_cheap and len(pack({"": [o for _, o in seen]})) <= MAX_BYTES:
        for one, other in list(itertools.combinations(seen, 2)):
            seen += _record_pair(one, other, checks)
    return [
        {"exercise": m.exercise, "sentence": m.sentence, "observed": o, "n": len(m.mistakes)}
        for m, o in seen
    ]


def _record_pair(
    one: tuple[KnownAnswer, dict[str, Any]],
    other: tuple[KnownAnswer, dict[str, Any]],
    checks: list[Check],
) -> list[tuple[KnownAnswer, dict[str, Any]]]:
    """Record two mistakes at once, unless on each check the two do what one of them does: that is
    told from their own observations."""
    pair = combine(one[0], other[0])
    try:
        module = build_module(pair.chapter, pair.make_source())
    except Exception:  # they change the same lines, or make no program together
        return []
    try:
        verdicts = [grade(check, StudentNames(vars(module))) for check in checks]
    finally:
        del sys.modules[module.__name__]
    observed = {v.check.path: SAME if v.passed else [*v.observations] for v in verdicts}
    alone = (one[1], other[1])
    is_new = any(
        not any(is_same_as_recorded(v, o[v.check.path]) for o in alone)
        for v in verdicts
        if not v.passed
    )
    return [(pair, observed)] if is_new else []
