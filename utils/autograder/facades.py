"""What student code sees of the course in a child: the names that its chapter's notebook imports.

Modules of `utils` and `tests` are taken out of `sys.modules` before student code is loaded, and
modules with the given names alone stand in their place. The course's own code goes on with what it
has imported. Solutions of earlier chapters, which are given whole, stay as they are.
"""

import contextlib
import sys
from collections.abc import Collection, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

COURSE = ("utils", "solutions", "tests")
HIDDEN = ("utils", "tests")
# By chapter, the modules whose functions are answers to its exercises: no child can call them.
ANSWERS = {
    "ch0_sampling": ("utils.models.decoding", "utils.models.forward"),
    "ch10_tools": ("utils.models.turns",),
}
# And exercises of other chapters whose probes do without them, though the chapter gives them.
ANSWERED = ("calc_entropy_bonus", "calc_kl_penalty")


def shut(chapter: str, exercise: str, given: Mapping[str, Collection[str]]) -> None:
    """Leave of the course what is given, by module. What this process has not loaded stays away."""
    like = "ch0_sampling" if exercise in ANSWERED else chapter
    for name in ANSWERS.get(like, ()):
        if name in sys.modules:
            blank(sys.modules[name], chapter)
    names = [name for name in sys.modules if name.partition(".")[0] in HIDDEN]
    real = {name: sys.modules.pop(name) for name in names}
    for name in sorted({*HIDDEN} | (given.keys() & real.keys())):
        facade = make_package(name)
        for key in given.get(name, ()):
            if not isinstance(value := getattr(real[name], key, facade), ModuleType):
                setattr(facade, key, value)


def make_package(name: str) -> ModuleType:
    """Return a module, made empty if it is not loaded, in packages that lead nowhere else."""
    if name in sys.modules:
        return sys.modules[name]
    sys.modules[name] = module = ModuleType(name)
    module.__path__ = []  # what is not here is looked for among the submission's own files
    package, _, last = name.rpartition(".")
    if package:
        setattr(make_package(package), last, module)
    return module


def blank(module: ModuleType, chapter: str) -> None:
    """Take the code out of a module's functions and methods: whatever leads to them gains nothing.

    An object that is found through `__globals__` or `gc` is the same object.
    """
    names = vars(module)
    empty = _make_empty(f"it is not given in {chapter}, as it answers exercises of it")
    waiting = [*names.values()]
    seen: set[int] = set()
    while waiting:
        value: Any = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, type) and value.__module__ == module.__name__:
            waiting += vars(value).values()
        elif isinstance(value, staticmethod | classmethod):
            waiting.append(value.__func__)
        elif isinstance(value, property):
            waiting += [value.fget, value.fset, value.fdel]
        elif isinstance(value, FunctionType):
            waiting.append(getattr(value, "__wrapped__", None))
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # it is empty
                    waiting.append(cell.cell_contents)
            if value.__globals__ is names:
                value.__code__ = empty.replace(co_freevars=value.__code__.co_freevars)


def _make_empty(said: str) -> CodeType:
    """Return the code of a function that takes anything and raises."""
    made: dict[str, Any] = {}
    exec(f"def not_given(*args, **kwargs):\n    raise RuntimeError({said!r})\n", made)
    return made["not_given"].__code__
