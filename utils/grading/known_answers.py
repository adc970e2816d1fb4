"""Answers that are known to be wrong or right, each built into the reference of its chapter.

Mistakes stand in the catalogue (`utils.grading.catalogue`), right answers that are written
differently in `tests/alternatives/<chapter>.py`, as whole functions or as edits of the reference:

    @right("compute_advantages")
    def by_a_double_sum(values, token_rewards, mask, gamma=1.0, lam=0.95):
        ...
"""

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from utils.grading import catalogue
from utils.grading.catalogue import Mistake
from utils.grading.observation import StudentNames
from utils.grading.reference import get_source, replace_definition
from utils.grading.substitution import build_module

AND = "{} And: {}"  # the sentences of two mistakes that are made at once
IN_ITS_MODULE = ""  # the chapter is that of the module in which an answer is collected


@dataclass(frozen=True)
class KnownAnswer:
    """A wrong or a right answer to one exercise."""

    chapter: str
    exercise: str
    name: str
    sentence: str = ""  # what a good teacher says of a wrong one
    mistakes: tuple[Mistake, ...] = ()  # of the catalogue: what a wrong one is made of
    # A right one is an edit of the reference (a definition, a pattern that must occur in it exactly
    # once, and its replacement), or a whole function or class.
    edit: tuple[str, str, str] | None = None
    definition: Any = None

    @property
    def n(self) -> int:
        """Return how many mistakes are made at once."""
        return len(self.mistakes)

    @functools.cache  # noqa: B019  answers live as long as the process
    def build(self) -> StudentNames:
        """Run the chapter with this answer in it. Raises ValueError if its mistakes overlap."""
        if self.definition is not None:
            return replace_definition(self.chapter, self.exercise, self.definition)
        return StudentNames(vars(build_module(self.chapter, self.make_source())))

    def make_source(self) -> str:
        """Return the chapter's source with these mistakes or this edit in it."""
        source = get_source(self.chapter)
        if self.edit is None:
            return catalogue.apply(source, *self.mistakes)
        within, pattern, replacement = self.edit
        place = f"{self.chapter}, {pattern!r}"
        found = catalogue.find_once(source, within, re.escape(pattern), place)
        return source[: found.start()] + replacement + source[found.end() :]


@functools.cache
def get_mistakes(chapter: str) -> tuple[KnownAnswer, ...]:
    """Return the catalogue's mistakes; none where it is not shipped, as in a student's bundle."""
    return tuple(
        KnownAnswer(chapter, mistake.exercise, mistake.name, mistake.sentence, (mistake,))
        for mistake in catalogue.read_chapter(chapter)
    )


def combine(one: KnownAnswer, other: KnownAnswer) -> KnownAnswer:
    """Return the answer that makes two mistakes at once."""
    name, sentence = f"{one.name} and {other.name}", AND.format(one.sentence, other.sentence)
    return KnownAnswer(one.chapter, one.exercise, name, sentence, one.mistakes + other.mistakes)


# --- Alternatives -------------------------------------------------------------------------------


def edit(
    exercise: str, name: str, pattern: str, replacement: str, within: str | None = None
) -> KnownAnswer:
    """Make a right answer that differs from the reference in one place, of `within` if given."""
    change = (within or exercise, pattern, replacement)
    return KnownAnswer(IN_ITS_MODULE, exercise, name, edit=change)


def right(exercise: str) -> Callable[[Any], KnownAnswer]:
    """Make a right answer of a whole function, or class, by whose name it is known."""
    return lambda f: KnownAnswer(IN_ITS_MODULE, exercise, f.__name__, definition=f)


@functools.cache
def get_alternatives(chapter: str) -> tuple[KnownAnswer, ...]:
    """Return a chapter's right answers, if it has any."""
    if importlib.util.find_spec(f"tests.alternatives.{chapter}") is None:
        return ()
    module = importlib.import_module(f"tests.alternatives.{chapter}")
    found = []
    for value in vars(module).values():
        values = value if isinstance(value, list) else [value]
        found += [answer for answer in values if isinstance(answer, KnownAnswer)]
    return tuple(dataclasses.replace(answer, chapter=chapter) for answer in found)
