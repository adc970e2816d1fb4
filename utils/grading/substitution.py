"""The reference standing in for a chapter's other exercises, without the one that is graded.

Only source and names are needed, so that it works where the graded solution must not be.
"""

import ast
import contextlib
import dataclasses
import dis
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

from utils.grading.catalogue import find_definitions, get_span
from utils.grading.extraction import get_bound_names
from utils.grading.observation import StudentNames

GENERATED = ("__init__", "__repr__", "__eq__", "__setattr__", "__delattr__")  # of a dataclass
_numbers = itertools.count()


@dataclass(frozen=True)
class ChapterSource:
    """The source of a chapter's solutions, or what is left of it, and all exercises' names."""

    chapter: str
    source: str
    exercises: tuple[str, ...]
    companions: dict[str, tuple[str, ...]] = field(default_factory=dict)  # written with an exercise
    inherited: tuple[str, ...] = ()  # methods that the chapter's own class inherits
    may_call: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by exercise; else all

    def without(self, *names: str) -> "ChapterSource":
        """Leave out these functions, classes or methods, with what is written with them.

        Names that are not there are no error. A class is blanked after its members, which leave
        `pass` behind: the order in which the names are given does not matter.
        """
        lines, definitions = self.source.splitlines(keepends=True), find_definitions(self.source)
        all_names = {*names}.union(*(self.companions.get(name, ()) for name in names))
        found = all_names & definitions.keys()
        for name in sorted(found, key=lambda name: (-name.count("."), name)):
            first, last = get_span(definitions[name])
            lines[first:last] = ["\n"] * (last - first)
            if "." in name:  # a class may not be left empty
                lines[first] = " " * definitions[name].col_offset + "pass\n"
        return replace(self, source="".join(lines))

    @property
    def tops(self) -> set[str]:
        """Return the functions and classes that are, or hold, the exercises."""
        return {exercise.partition(".")[0] for exercise in self.exercises}

    def get_names(self) -> set[str]:
        """Return the names that the source defines."""
        return set().union(*map(get_bound_names, ast.parse(self.source).body))

    def get_given_names(self) -> set[str]:
        """Return the functions, classes and methods that no student writes, by dotted name."""
        written = self.tops.union(self.exercises, *self.companions.values())
        return find_definitions(self.source).keys() - written

    def build(self, **given: Any) -> dict[str, Any]:
        """Build its names; `given` stands beside them, for what was left out."""
        return vars(build_module(self.chapter, self.source, **given))


def build_module(chapter: str, source: str, **given: Any) -> ModuleType:
    """Build a module of this source, importable under a name of its own as dataclasses ask."""
    module = ModuleType(f"{chapter}_built_{next(_numbers)}")
    sys.modules[module.__name__] = module
    module.__dict__.update({"__file__": f"<{chapter}>"} | given)
    exec(compile(source, f"<{chapter}>", "exec"), module.__dict__)
    return module


# --- One exercise alone -------------------------------------------------------------------------


def find_answer(names: dict[str, Any], exercise: str) -> Any:
    """Find the function, class or method of an exercise; None where there is none."""
    name, _, method = exercise.partition(".")
    found = names.get(name)
    return getattr(found, method, None) if method else found


def find_written(source: ChapterSource, exercise: str, names: dict[str, Any]) -> Any:
    """Find an answer that these names define; None for a method that a class only inherits.

    Where the chapter's own class inherits it, too, the student's has to write something else.
    """
    name, _, method = exercise.partition(".")
    cls = names.get(name)
    if not method or not isinstance(cls, type):
        return find_answer(names, exercise)
    asked = {method}
    if exercise in source.inherited:
        asked = {e.partition(".")[2] for e in source.exercises if e.startswith(f"{name}.")}
    own = [c for c in cls.__mro__ if _is_of_the_student(c, names)]
    found = [vars(c)[key] for key in asked for c in own if key in vars(c)]
    is_written = any(_is_of_the_student(value, names) for value in found)
    return getattr(cls, method, None) if is_written else None


def _is_of_the_student(value: Any, names: dict[str, Any]) -> bool:
    """Return whether a class or a method is neither lent nor that of an earlier chapter."""
    home = str(getattr(value, "__module__", ""))
    is_lent = "_built_" in home and home != names.get("__name__")
    return not is_lent and home.partition(".")[0] not in ("solutions", "torch", "builtins")


def is_stub(answer: Any) -> bool:
    """Return whether a function, or every method of a class, does nothing but raise
    NotImplementedError without a message, whatever else its stub holds."""
    if isinstance(answer, type):
        generated = GENERATED if dataclasses.is_dataclass(answer) else ()
        members = [value for name, value in vars(answer).items() if name not in generated]
        functions = [f for f in members if isinstance(f, types.FunctionType)]
        return bool(functions) and all(map(is_stub, functions))
    function = inspect.unwrap(getattr(answer, "__func__", answer))
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    # A finished answer may raise it in a branch, or after all that it returns.
    end = 0  # of the branches so far
    for one, other in itertools.pairwise(dis.get_instructions(code)):
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            end = max(end, one.argval)
        if one.opname.startswith("RETURN_"):
            return False
        if one.argval == "NotImplementedError" and other.opname == "RAISE_VARARGS":
            return one.offset >= end
    return False


def answer_with(source: ChapterSource, exercise: str, names: dict[str, Any]) -> StudentNames:
    """Return a student's names; other exercises that are missing are the chapter's own."""
    name = exercise.partition(".")[0]
    if find_written(source, exercise, names) is None:
        names = {key: value for key, value in names.items() if key != name}
    given = {top: names.get(top) for top in source.tops}  # None where both lack it
    rest = source.without(exercise).build(**given)
    missing = {name, *(top for top in source.tops if rest[top] is None)}
    return StudentNames(names, {key: value for key, value in rest.items() if key not in missing})


@contextlib.contextmanager
def alone(
    source: ChapterSource, exercise: str, answer: Any, caller: dict[str, Any]
) -> Iterator[StudentNames]:
    """Put the reference in place of the chapter's exercises except one of the caller's.

    The caller's functions find each other in its namespace: there, too, the reference stands in
    until the end, and lends what is not there, of the exercises those that this one may call.
    """
    name, _, method = exercise.partition(".")
    others = source.tops.intersection(source.may_call.get(exercise, source.tops)) - {name}
    if method:
        reference, answer = _graft(source, name, method, caller[name])
    else:
        reference = source.without(exercise).build(**{name: answer})
    swapped = {other: reference[other] for other in others} | {name: answer}
    given = source.without(exercise).get_names() - source.tops - caller.keys()
    swapped |= {key: reference[key] for key in given if key in reference}
    with _swapped(caller, swapped):
        yield StudentNames({name: answer}, reference)


@contextlib.contextmanager
def _swapped(names: dict[str, Any], others: dict[str, Any]) -> Iterator[None]:
    """Put others in the place of names, until the end; the rest, which threads use, stays."""
    saved = {key: names[key] for key in others if key in names}
    names.update(others)
    try:
        yield
    finally:
        for key in others.keys() - saved.keys():
            del names[key]
        names.update(saved)


@contextlib.contextmanager
def replaced(exercise: str, names: dict[str, Any], reference: dict[str, Any]) -> Iterator[None]:
    """Put the reference's function or method in the place of one of these names, until the end."""
    name, _, method = exercise.partition(".")
    if not method:
        with _swapped(names, {name: reference[name]}):
            yield
        return
    mine, theirs = names[name], reference[name]
    place = find_owner(mine, method, theirs) or mine
    their_method = next(vars(c)[method] for c in theirs.__mro__ if method in vars(c))
    with mock.patch.object(place, method, rebind(their_method, place), create=True):
        yield


def find_owner(cls: type, method: str, reference: type) -> type | None:
    """Find the class that a method of `cls` stands in; None if it is not written.

    Nor is it where only a class of an earlier chapter has it, but the reference's class its own.
    """
    owner = next((c for c in cls.__mro__ if method in vars(c)), None)
    # A class may be re-opened, by subclasses of its own name.
    first = [c for c in cls.__mro__ if c.__name__ == cls.__name__][-1]
    if owner is None or (method in vars(reference) and not issubclass(owner, first)):
        return None
    return owner


def _graft(
    source: ChapterSource, name: str, method: str, student: type
) -> tuple[dict[str, Any], type]:
    """Graft one method of the student's onto the reference's class; return what is beside it."""
    owner = next(c for c in student.__mro__ if method in vars(c))
    mine = {
        key: value
        for key, value in vars(owner).items()
        if isinstance(value, types.FunctionType | classmethod | staticmethod | property)
        and (key == method or f"{name}.{key}" not in source.exercises)
    }
    module = source.without(*(f"{name}.{key}" for key in mine)).build()
    grafted = type(name, (module[name],), {})
    for key, value in mine.items():
        setattr(grafted, key, rebind(value, grafted))
    module[name] = grafted
    return module, grafted


def rebind(method: Any, owner: type) -> Any:
    """Return a method whose `super()` means that of another class."""
    if isinstance(method, classmethod | staticmethod):
        return type(method)(rebind(method.__func__, owner))
    if not isinstance(method, types.FunctionType) or not method.__closure__:
        return method
    names = method.__code__.co_freevars
    cells = [
        types.CellType(owner) if name == "__class__" else cell
        for name, cell in zip(names, method.__closure__, strict=True)
    ]
    bound = types.FunctionType(
        method.__code__, method.__globals__, method.__name__, method.__defaults__, tuple(cells)
    )
    bound.__kwdefaults__ = method.__kwdefaults__
    vars(bound).update(vars(method))
    return bound


def find_reached(code: CodeType, names: dict[str, Any], exercises: Iterable[str]) -> list[str]:
    """Return those exercises that code may run, itself or through the functions and the classes
    among `names`: a method where its class is named and so is the method."""
    used: set[str] = set()
    seen: set[CodeType] = set()
    found = [code]
    while found:
        seen.update(found)
        for one in found:
            used |= {*one.co_names}
        inner = [c for one in found for c in one.co_consts if isinstance(c, CodeType)]
        found = [c for c in (*inner, *_list_code(used, names)) if c not in seen]
    pairs = ((exercise, exercise.partition(".")) for exercise in exercises)
    return [e for e, (name, _, method) in pairs if name in used and (not method or method in used)]


def _list_code(used: set[str], names: dict[str, Any]) -> Iterator[CodeType]:
    """Return the code of the functions that are named, and of a class's methods that are, too."""
    for value in [names[name] for name in used & names.keys()]:
        members = [value]
        if isinstance(value, type):
            held = [pair for cls in value.__mro__ for pair in vars(cls).items()]
            members = [x for key, x in held if key in used or key in ("__init__", "__post_init__")]
        for member in members:
            for key in ("fget", "func", "__func__"):  # of a property, cached or not, and a partial
                member = getattr(member, key, None) or member
            code = getattr(inspect.unwrap(member), "__code__", None)
            if isinstance(code, CodeType):
                yield code
