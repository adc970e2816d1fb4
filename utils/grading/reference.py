"""A chapter's solutions as source: its definitions, what is written together, what calls what.

What the chapter's notebook says beside them stands in `chapters/source/<chapter>.md`.
"""

import ast
import functools
import inspect
import re
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from utils.grading import recorded
from utils.grading.catalogue import find_definitions, get_span
from utils.grading.checks import get_chapters, get_checks, get_reference
from utils.grading.extraction import get_used_names
from utils.grading.observation import StudentNames
from utils.grading.substitution import ChapterSource, build_module

SOURCES = Path(__file__).parents[2] / "chapters" / "source"


def get_source(chapter: str) -> str:
    """Return the source of a chapter's solutions."""
    return inspect.getsource(get_reference(chapter))


@functools.cache
def get_chapter_source(chapter: str) -> ChapterSource:
    """Return the source of a chapter's solutions, with what the substitution needs to know."""
    exercises, definitions = tuple(get_checks(chapter)), get_definitions(chapter)
    inherited = tuple(name for name in exercises if name not in definitions)
    may_call = {}
    for n, exercise in enumerate(exercises):  # what its solution calls, and what stands before it
        names = (*exercises[:n], *_find_names(chapter, exercise))
        may_call[exercise] = tuple(dict.fromkeys(name.partition(".")[0] for name in names))
    companions = get_companions(chapter)
    return ChapterSource(chapter, get_source(chapter), exercises, companions, inherited, may_call)


@functools.cache
def get_given_lines() -> frozenset[str]:
    """Return the lines of the code cells that the course's notebooks give, such as experiments."""
    # Of the set-up cell:
    lines = {"if root is None:", 'if bundles and not Path(CHAPTER, "utils/course").is_dir():'}
    for path in SOURCES.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        for _, cell in find_blocks(text, "code-cell"):
            lines |= {line.strip() for line in cell.split("\n")}
    return frozenset(lines)


def find_blocks(text: str, kind: str) -> list[tuple[str, str]]:
    """Return the title and the body of each fenced block of a kind."""
    pattern = r"^(`{3,})\{KIND\} *([^\n]*)\n(.*?)^\1".replace("KIND", kind)
    return [found[1:] for found in re.findall(pattern, text, re.MULTILINE | re.DOTALL)]


@functools.cache
def get_companions(chapter: str) -> dict[str, tuple[str, ...]]:
    """Return what is written with each exercise of a chapter, and helpers of its solution alone.

    They stand in the fields `also` and `helpers` of the chapter's source.
    """
    text = (SOURCES / f"{chapter}.md").read_text(encoding="utf-8")
    options = {name: yaml.safe_load(body) for name, body in find_blocks(text, "exercise")}
    return {
        name: (*found.get("also", ()), *found.get("helpers", ())) for name, found in options.items()
    }


def get_definitions(chapter: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Return functions, classes and methods of a chapter's solutions by dotted name."""
    return find_definitions(get_source(chapter))


def get_lines(chapter: str, name: str) -> tuple[int, int]:
    """Return the first line of a definition with its decorators, from 0, and the line after it."""
    return get_span(get_definitions(chapter)[name])


def replace_definition(chapter: str, exercise: str, definition: Any) -> StudentNames:
    """Build the reference with one definition replaced: a name of it, or a class's method."""
    name, _, method = exercise.partition(".")
    if not method:
        return StudentNames({name: definition}, vars(get_reference(chapter)))
    module = build_module(chapter, get_source(chapter))
    setattr(getattr(module, name), method, definition)
    return StudentNames(vars(module))


# --- What calls what -----------------------------------------------------------------------------


def find_named(chapter: str, exercise: str) -> list[str]:
    """Return the exercises that the solution of one names, of its chapter and of earlier ones."""
    chapters = get_chapters()
    known = {e for c in chapters[: chapters.index(chapter) + 1] for e in get_checks(c)}
    return [name for name in _find_names(chapter, exercise) if name in known and name != exercise]


def _find_names(chapter: str, exercise: str) -> list[str]:
    """Return all names that the solution of an exercise uses, and what is written with it."""
    definitions = get_definitions(chapter)
    names = [exercise, *get_companions(chapter).get(exercise, ())]
    used = [get_used_names(definitions[name]) for name in names if name in definitions]
    return sorted(set().union(*used))


@functools.cache
def find_called(chapter: str, exercise: str) -> tuple[str, ...]:
    """Return the chapter's other exercises that the solution of one calls: itself, or through what
    is no exercise, such as a helper, the making of its class, or a method that it inherits."""
    if (known := recorded.load(chapter)) is not None:
        return tuple(known.calls.get(exercise, ()))
    exercises = get_checks(chapter)
    cls = exercise.partition(".")[0] if "." in exercise else ""
    waiting = [exercise, *get_companions(chapter).get(exercise, ()), f"{cls}.__init__"]
    found, seen = set(), set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        if name in exercises and name != exercise:
            found.add(name)
        else:
            waiting += _find_used(chapter, name) - seen
    return tuple(name for name in exercises if name in found)


def say_called(chapter: str, exercise: str) -> str | None:
    """Say that what fails where a student's other exercises run may be one of those."""
    called = find_called(chapter, exercise)
    said = f"The fault is in {exercise}, or something that it calls: {', '.join(called)}."
    return said if called else None


def _find_used(chapter: str, name: str) -> set[str]:
    """Return what a definition refers to: of the chapter, and a method of its own object."""
    home, node = _find_definition(chapter, name)
    if node is None or (isinstance(node, ast.ClassDef) and name not in get_checks(chapter)):
        return set()  # of a class that is given, making one is what counts
    used = get_used_names(node) & vars(get_reference(chapter)).keys() if home == chapter else set()
    used |= {f"{top}.__init__" for top in used}
    exercises = get_checks(chapter)
    methods = {e.partition(".")[2]: e for e in exercises if "." in e}
    for part in ast.walk(node):
        if isinstance(part, ast.arg) and part.annotation is not None:  # it is called as a function
            used |= {f"{ast.unparse(part.annotation)}.forward"} & exercises.keys()
        elif not isinstance(part, ast.Attribute):
            continue
        elif ast.unparse(part.value) in ("self", "cls", "super()"):
            used.add(f"{name.partition('.')[0]}.{part.attr}")
        elif part.attr in methods and not hasattr(nn.Module, part.attr):
            used.add(methods[part.attr])
    return used


def _find_definition(chapter: str, name: str) -> tuple[str, ast.stmt | None]:
    """Find a function or method, inherited ones too, and its chapter; no node for anything else."""
    top, _, method = name.partition(".")
    place = vars(get_reference(chapter)).get(top)
    if method:
        owners = [c for c in getattr(place, "__mro__", ()) if method in vars(c)]
        place, name = (owners[0], f"{owners[0].__name__}.{method}") if owners else (None, name)
    home = str(getattr(place, "__module__", "")).removeprefix("solutions.")
    return home, get_definitions(home).get(name) if home in get_chapters() else None
