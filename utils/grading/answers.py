"""Answers that are known to be wrong or right, and building a chapter that contains one.

`tests/mistakes/<stem>.py` and `tests/alternatives/<stem>.py` hold them, as edits of the reference
or as whole functions:

    MISTAKES = [
        edit("compute_advantages", "lambda_left_out", "gamma * lam", "gamma", "The recursion ..."),
    ]

    @wrong("compute_advantages", "The value after the last token ...")
    def bootstraps_from_the_last_value(values, token_rewards, mask, gamma=1.0, lam=0.95):
        ...
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from utils.grading import stand_in
from utils.grading.checks import get_checks, get_reference
from utils.grading.extraction import get_bound_names, select_statements
from utils.grading.observation import Answers
from utils.grading.stand_in import Chapter, build_module, get_span

IN_ITS_MODULE = ""  # the chapter is that of the module in which an answer is collected


@dataclass(frozen=True)
class Edit:
    """In the source of `within`, `pattern` must occur exactly once and becomes `replacement`."""

    within: str
    pattern: str
    replacement: str


@dataclass(frozen=True)
class Answer:
    """A wrong or a right answer to one exercise. `sentence` is what a good teacher says of it."""

    stem: str
    exercise: str
    name: str
    sentence: str = ""
    edits: tuple[Edit, ...] = ()
    definition: Any = None  # the whole function, or class

    @functools.cache  # noqa: B019  answers live as long as the process
    def build(self) -> Answers:
        if self.definition is not None:
            return replace(self.stem, self.exercise, self.definition)
        return Answers(vars(build_module(self.stem, apply_edits(self.stem, self.edits))))


def edit(
    exercise: str,
    name: str,
    pattern: str,
    replacement: str,
    sentence: str = "",
    within: str | None = None,
) -> Answer:
    """An answer that differs from the reference in one place, of `within` if not the exercise."""
    changes = (Edit(within or exercise, pattern, replacement),)
    return Answer(IN_ITS_MODULE, exercise, name, sentence, edits=changes)


def wrong(exercise: str, sentence: str) -> Callable[[Any], Answer]:
    """A whole function, or class, that is a mistake; its name is the mistake's."""
    return lambda f: Answer(IN_ITS_MODULE, exercise, f.__name__, sentence, definition=f)


def right(exercise: str) -> Callable[[Any], Answer]:
    """A whole function, or class, that is right."""
    return wrong(exercise, "")


def get_mistakes(stem: str) -> tuple[Answer, ...]:
    return _collect(f"tests.mistakes.{stem}")


def get_alternatives(stem: str) -> tuple[Answer, ...]:
    return _collect(f"tests.alternatives.{stem}")


@functools.cache
def _collect(module_name: str) -> tuple[Answer, ...]:
    """The answers of a module; none where it is not shipped, as in a student's bundle."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not module_name.startswith(str(error.name)):
            raise
        return ()
    found = []
    for value in vars(module).values():
        values = value if isinstance(value, list) else [value]
        found += [answer for answer in values if isinstance(answer, Answer)]
    stem = module_name.rpartition(".")[2]
    found = [dataclasses.replace(answer, stem=stem) for answer in found]
    names = [(answer.exercise, answer.name) for answer in found]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{module_name}: the names should differ, but these do not: {twice}")
    return tuple(found)


# --- Building a chapter -------------------------------------------------------------------------


def get_source(stem: str) -> str:
    return inspect.getsource(get_reference(stem))


def get_chapter(stem: str) -> Chapter:
    """The reference of a chapter as source."""
    return Chapter(stem, get_source(stem), tuple(get_checks(stem)))


def find_definitions(stem: str) -> dict[str, ast.AST]:
    """Functions, classes and methods of a chapter's solutions by dotted name."""
    return stand_in.find_definitions(get_source(stem))


def get_lines(stem: str, name: str) -> tuple[int, int]:
    """First and last line of a definition, decorators included, from 0, the end exclusive."""
    definitions = find_definitions(stem)
    if name not in definitions:
        raise ValueError(f"{stem}: within should be one of {sorted(definitions)}, but is {name!r}")
    return get_span(definitions[name])


def apply_edits(stem: str, edits: tuple[Edit, ...]) -> str:
    """The chapter's source with the edits made.

    Raises ValueError for a pattern that does not occur exactly once.
    """
    lines = get_source(stem).splitlines(keepends=True)
    for e in edits:
        first, last = get_lines(stem, e.within)
        segment = "".join(lines[first:last])
        if (count := segment.count(e.pattern)) != 1:
            raise ValueError(
                f"{stem}: pattern should occur once in {e.within}, but {e.pattern!r} occurs "
                f"{count} times"
            )
        # As one line: the numbers of the lines that follow stay.
        lines[first:last] = [segment.replace(e.pattern, e.replacement)] + [""] * (last - first - 1)
    return "".join(lines)


def replace(stem: str, exercise: str, definition: Any) -> Answers:
    """The reference with one definition replaced: a name of the module, or a class's method."""
    name, _, method = exercise.partition(".")
    if not method:
        return Answers({name: definition}, vars(get_reference(stem)))
    module = build_module(stem, get_source(stem))
    setattr(getattr(module, name), method, definition)
    return Answers(vars(module))


# --- As a submission ----------------------------------------------------------------------------

_WRONG = "wrong = right = lambda *said: lambda f: f\n"


def make_source(answer: Answer) -> str:
    """A script that holds the chapter with this answer in it, as somebody would hand it in."""
    if answer.definition is None:
        return apply_edits(answer.stem, answer.edits)
    module = sys.modules[answer.definition.__module__]
    name, expression = _find_expression(module, answer)
    statements = ast.parse(inspect.getsource(module)).body
    chapter = get_source(answer.stem)
    known = set().union(*map(get_bound_names, ast.parse(chapter).body))
    taken = [
        ast.unparse(statement)
        for statement in select_statements(statements, {name})
        if getattr(statement, "module", None) not in (__name__, f"solutions.{answer.stem}")
        and not (isinstance(statement, ast.Assign) and get_bound_names(statement) <= known)
    ]
    return "\n\n".join([chapter, _WRONG, *taken, f"{answer.exercise} = {expression}\n"])


def _find_expression(module: ModuleType, answer: Answer) -> tuple[str, str]:
    """The name in its module that holds an answer, and how to get at it."""
    for name, value in vars(module).items():
        for place, found in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(found, Answer) and found.definition is answer.definition:
                return name, f"{name}[{place}]" if isinstance(value, list) else name
    raise ValueError(f"{module.__name__} should hold {answer.name}, but does not")
