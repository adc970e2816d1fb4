"""What the reference and the mistakes give on public checks, as a student's bundle records it.

There, neither solutions nor mistakes are at hand: a check is held against the recorded observation,
and a mistake is known by what it does, not by its code.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.grading.packing import unpack

FOLDER = Path(__file__).parents[2] / "tests" / "recorded"
SAME = "same as expected"  # a mistake's observation that the check accepts takes no room


@dataclass(frozen=True)
class RecordedMistake:
    """By the path of each check, what was observed with each seed; of `n` mistakes at once."""

    exercise: str
    sentence: str
    observed: dict[str, list[Any]]
    n: int = 1


@dataclass(frozen=True)
class Recorded:
    """What is recorded of a chapter."""

    reference: dict[str, list[Any]]  # by the path of each check, as are the next two
    expected: dict[str, list[Any]]
    gap: dict[str, list[Any]]  # of the reference
    n_checks: dict[str, int]  # of each exercise, hidden ones too
    calls: dict[str, list[str]]  # which others an exercise calls
    mistakes: tuple[RecordedMistake, ...]


@functools.cache
def load(chapter: str) -> Recorded | None:
    """Load the record of a chapter, where there is one: in a bundle."""
    path = FOLDER / f"{chapter}.bin"
    if not path.exists():
        return None
    return make(unpack(path.read_bytes(), max_nodes=10**7))


def make(data: dict[str, Any]) -> Recorded:
    """Make a record of what `utils.authoring.recording` collected."""
    mistakes = tuple(RecordedMistake(**mistake) for mistake in data["mistakes"])
    return Recorded(**(data | {"mistakes": mistakes}))
