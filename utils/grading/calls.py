"""Which of a chapter's other exercises the solution of one calls, and so may be blamed for."""

import ast
import functools

from torch import nn

from utils.grading import recorded
from utils.grading.checks import get_chapters, get_checks, get_reference
from utils.grading.extraction import get_used_names
from utils.grading.known_answers import get_companions, get_definitions


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
    for part in ast.walk(node):  # an object is called as a function is
        if isinstance(part, ast.arg) and part.annotation is not None:
            used |= {f"{ast.unparse(part.annotation)}.forward"} & exercises.keys()
    methods = {e.partition(".")[2]: e for e in get_checks(chapter) if "." in e}
    for part in ast.walk(node):
        if not isinstance(part, ast.Attribute):
            continue
        if ast.unparse(part.value) in ("self", "cls", "super()"):
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
