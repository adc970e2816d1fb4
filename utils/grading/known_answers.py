"""Answers that are known to be wrong or right, and building a chapter that contains one.

Mistakes stand in the catalogue (`utils.grading.catalogue`), right answers that are written
differently in `tests/alternatives/<chapter>.py`, as whole functions or as edits of the reference:

    @right("compute_advantages")
    def by_a_double_sum(values, token_rewards, mask, gamma=1.0, lam=0.95):
        ...
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from utils.grading import catalogue
from utils.grading.catalogue import Mistake, find_definitions, get_span
from utils.grading.checks import get_chapters, get_checks, get_reference
from utils.grading.extraction import get_bound_names, get_used_names, select_statements
from utils.grading.observation import Answers
from utils.grading.substitution import ChapterSource, build_module

SOURCES = Path(__file__).parents[2] / "chapters" / "source"
AND = "{} And: {}"  # the sentences of two mistakes that are made at once
IN_ITS_MODULE = ""  # the chapter is that of the module in which an answer is collected


@dataclass(frozen=True)
class Edit:
    """In the source of `within`, `pattern` must occur exactly once and becomes `replacement`."""

    within: str
    pattern: str
    replacement: str


@dataclass(frozen=True)
class Answer:
    """A wrong or a right answer to one exercise. `sentence` is what a good teacher says of it.

    A wrong answer is one or more `mistakes` of the catalogue.
    """

    chapter: str
    exercise: str
    name: str
    sentence: str = ""
    mistakes: tuple[Mistake, ...] = ()
    edits: tuple[Edit, ...] = ()
    definition: Any = None  # the whole function, or class

    @functools.cache  # noqa: B019  answers live as long as the process
    def build(self) -> Answers:
        """Run the chapter with this answer in it. Raises ValueError if its mistakes overlap."""
        if self.definition is not None:
            return replace_definition(self.chapter, self.exercise, self.definition)
        return Answers(vars(build_module(self.chapter, self.make_source())))

    def make_source(self) -> str:
        """Return a script of the chapter with this answer, as somebody would hand it in."""
        if self.mistakes:
            return catalogue.apply(get_source(self.chapter), *self.mistakes)
        if self.definition is None:
            return apply_edits(self.chapter, self.edits)
        return _make_source(self)


def edit(
    exercise: str,
    name: str,
    pattern: str,
    replacement: str,
    sentence: str = "",
    within: str | None = None,
) -> Answer:
    """Make an answer that differs from the reference in one place, of `within` if given."""
    changes = (Edit(within or exercise, pattern, replacement),)
    return Answer(IN_ITS_MODULE, exercise, name, sentence, edits=changes)


def right(exercise: str) -> Callable[[Any], Answer]:
    """Make an answer of a whole function, or class, that is right; its name is the answer's."""
    return lambda f: Answer(IN_ITS_MODULE, exercise, f.__name__, definition=f)


@functools.cache
def get_mistakes(chapter: str) -> tuple[Answer, ...]:
    """Return the catalogue's mistakes; none where it is not shipped, as in a student's bundle."""
    return tuple(
        Answer(chapter, mistake.exercise, mistake.name, mistake.sentence, (mistake,))
        for mistake in catalogue.read_chapter(chapter)
    )


def combine(one: Answer, other: Answer) -> Answer:
    """Return the answer that makes two mistakes at once."""
    name, sentence = f"{one.name} and {other.name}", AND.format(one.sentence, other.sentence)
    return Answer(one.chapter, one.exercise, name, sentence, one.mistakes + other.mistakes)


def get_alternatives(chapter: str) -> tuple[Answer, ...]:
    return _collect(f"tests.alternatives.{chapter}")


@functools.cache
def _collect(module_name: str) -> tuple[Answer, ...]:
    """Return the answers of a module; none where it is not shipped, as in a student's bundle."""
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
    chapter = module_name.rpartition(".")[2]
    found = [dataclasses.replace(answer, chapter=chapter) for answer in found]
    names = [(answer.exercise, answer.name) for answer in found]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{module_name}: the names should differ, but these do not: {twice}")
    return tuple(found)


# --- Building a chapter -------------------------------------------------------------------------


def get_source(chapter: str) -> str:
    return inspect.getsource(get_reference(chapter))


def get_chapter_source(chapter: str) -> ChapterSource:
    """Return the reference of a chapter as source."""
    exercises, definitions = tuple(get_checks(chapter)), get_definitions(chapter)
    inherited = tuple(name for name in exercises if name not in definitions)
    may_call = {exercise: get_callable(chapter, exercise) for exercise in exercises}
    companions = get_companions(chapter)
    return ChapterSource(chapter, get_source(chapter), exercises, companions, inherited, may_call)


@functools.cache
def get_callable(chapter: str, exercise: str) -> tuple[str, ...]:
    """Return the functions and classes of a chapter's exercises that one of them may call: what its
    solution calls, and what stands before it."""
    exercises = tuple(get_checks(chapter))
    before = exercises[: exercises.index(exercise)]
    tops = [name.partition(".")[0] for name in (*before, *_get_called(chapter, exercise))]
    return tuple(dict.fromkeys(tops))


def get_called(chapter: str, exercise: str) -> list[str]:
    """Return the exercises that the solution of one calls, of its chapter and of earlier ones."""
    chapters = get_chapters()
    known = {e for c in chapters[: chapters.index(chapter) + 1] for e in get_checks(c)}
    return [name for name in _get_called(chapter, exercise) if name in known and name != exercise]


def _get_called(chapter: str, exercise: str) -> list[str]:
    definitions = get_definitions(chapter)
    names = [exercise, *get_companions(chapter).get(exercise, ())]
    used = [get_used_names(definitions[name]) for name in names if name in definitions]
    return sorted(set().union(*used))


@functools.cache
def get_given_lines() -> frozenset[str]:
    """Return the lines of the code cells that the course's notebooks give, such as experiments."""
    # Of the set-up cell:
    lines = {"if root is None:", 'if bundles and not Path(CHAPTER, "utils/course").is_dir():'}
    for path in SOURCES.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        for _, cell in re.findall(r"^(`{3,})\{code-cell\}[^\n]*\n(.*?)^\1", text, re.M | re.S):
            lines |= {line.strip() for line in cell.split("\n")}
    return frozenset(lines)


@functools.cache
def get_companions(chapter: str) -> dict[str, tuple[str, ...]]:
    """Return by exercise what is written with it, and helpers that its solution alone has.

    They stand in the fields `also` and `helpers` of the chapter's source.
    """
    text = (SOURCES / f"{chapter}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^(`{3,})\{exercise\} *(\S+)\n(.*?)^\1", text, re.MULTILINE | re.DOTALL)
    options = {name: yaml.safe_load(body) for _, name, body in blocks}
    return {
        name: (*found.get("also", ()), *found.get("helpers", ())) for name, found in options.items()
    }


def get_definitions(chapter: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Return functions, classes and methods of a chapter's solutions by dotted name."""
    return find_definitions(get_source(chapter))


def get_lines(chapter: str, name: str) -> tuple[int, int]:
    """Return first and last line of a definition, decorators included, from 0, the end
    exclusive."""
    definitions = get_definitions(chapter)
    if name not in definitions:
        raise ValueError(
            f"{chapter}: within should be one of {sorted(definitions)}, but is {name!r}"
        )
    return get_span(definitions[name])


def apply_edits(chapter: str, edits: tuple[Edit, ...]) -> str:
    """Return the chapter's source with the edits made.

    Raises ValueError for a pattern that does not occur exactly once.
    """
    lines = get_source(chapter).splitlines(keepends=True)
    for e in edits:
        first, last = get_lines(chapter, e.within)
        segment = "".join(lines[first:last])
        if (count := segment.count(e.pattern)) != 1:
            raise ValueError(
                f"{chapter}: pattern should occur once in {e.within}, but {e.pattern!r} occurs "
                f"{count} times"
            )
        # As one line: the numbers of the lines that follow stay.
        lines[first:last] = [segment.replace(e.pattern, e.replacement)] + [""] * (last - first - 1)
    return "".join(lines)


def replace_definition(chapter: str, exercise: str, definition: Any) -> Answers:
    """Build the reference with one definition replaced: a name of it, or a class's method."""
    name, _, method = exercise.partition(".")
    if not method:
        return Answers({name: definition}, vars(get_reference(chapter)))
    module = build_module(chapter, get_source(chapter))
    setattr(getattr(module, name), method, definition)
    return Answers(vars(module))


# --- As a submission ----------------------------------------------------------------------------

_RIGHT = "right = lambda *said: lambda f: f\n"


def _make_source(answer: Answer) -> str:
    module = sys.modules[answer.definition.__module__]
    name, expression = _find_expression(module, answer)
    statements = ast.parse(inspect.getsource(module)).body
    source = get_source(answer.chapter)
    known = set().union(*map(get_bound_names, ast.parse(source).body))
    taken = [
        ast.unparse(statement)
        for statement in select_statements(statements, {name})
        if getattr(statement, "module", None) not in (__name__, f"solutions.{answer.chapter}")
        and not (isinstance(statement, ast.Assign) and get_bound_names(statement) <= known)
    ]
    return "\n\n".join([source, _RIGHT, *taken, f"{answer.exercise} = {expression}\n"])


def _find_expression(module: ModuleType, answer: Answer) -> tuple[str, str]:
    """Return the name in its module that holds an answer, and how to get at it."""
    for name, value in vars(module).items():
        for place, found in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(found, Answer) and found.definition is answer.definition:
                return name, f"{name}[{place}]" if isinstance(value, list) else name
    raise ValueError(f"{module.__name__} should hold {answer.name}, but does not")
