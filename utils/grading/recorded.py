"""What the reference and the mistakes give on public checks, recorded for a student's bundle.

There, neither solutions nor mistakes are at hand: a check is held against the recorded observation,
and a mistake is known by what it does, not by its code.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.grading.wire import pack, unpack

FOLDER = Path(__file__).parents[2] / "tests" / "recorded"
SAME = "same as expected"  # a mistake's observation that the check accepts takes no room


@dataclass(frozen=True)
class RecordedMistake:
    """By the path of each check, what was observed with each seed."""

    exercise: str
    sentence: str
    observed: dict[str, list[Any]]


@dataclass(frozen=True)
class Recorded:
    """By the path of each check: the reference, what is expected, and the reference's gap."""

    reference: dict[str, list[Any]]
    expected: dict[str, list[Any]]
    gap: dict[str, list[Any]]
    mistakes: tuple[RecordedMistake, ...]


@functools.cache
def load(stem: str) -> Recorded | None:
    """Of a chapter, where it was recorded: in a bundle."""
    path = FOLDER / f"{stem}.bin"
    if not path.exists():
        return None
    data = unpack(path.read_bytes(), most_nodes=10**7)
    mistakes = tuple(RecordedMistake(**mistake) for mistake in data.pop("mistakes"))
    return Recorded(**data, mistakes=mistakes)


def record(stem: str) -> bytes:
    """Run the reference, the oracles and the mistakes of a chapter on its quick public checks."""
    from utils.grading import engine
    from utils.grading.answers import get_mistakes
    from utils.grading.checks import get_checks

    found: dict[str, Any] = {"reference": {}, "expected": {}, "gap": {}, "mistakes": []}
    public = {e: [c for c in checks if c.public] for e, checks in get_checks(stem).items()}
    for check in (check for checks in public.values() for check in checks):
        seeds = range(check.seeds)
        found["reference"][check.path] = [engine.observe_reference(check, i) for i in seeds]
        found["expected"][check.path] = [engine.observe_expected(check, i) for i in seeds]
        found["gap"][check.path] = [engine.measure_reference_gap(check, i) for i in seeds]
    for mistake in get_mistakes(stem):
        verdicts = [engine.grade_answer(c, mistake) for c in public[mistake.exercise] if not c.slow]
        if all(verdict.passed for verdict in verdicts):
            continue  # hidden checks alone tell it
        observed = {v.check.path: SAME if v.passed else [*v.observations] for v in verdicts}
        found["mistakes"].append(
            {"exercise": mistake.exercise, "sentence": mistake.sentence, "observed": observed}
        )
    return pack(found)
