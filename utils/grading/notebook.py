"""`check(function)`: the checks of one exercise, in the notebook's cell below it."""

import contextlib
import inspect
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from utils.grading import answers
from utils.grading.checks import find_stem, get_checks, get_reference, get_stems
from utils.grading.engine import Verdict, grade_exercise
from utils.grading.observation import Answers

Grade = tuple[str, str, list[Verdict]]  # chapter, exercise, how each check went
GREEN, RED, YELLOW, BOLD = 32, 31, 33, 1


def check(answer: Any, slow: bool = False) -> None:
    """Run the checks of an exercise on your function or class, and print how each went.

    `check(compute_advantages)`, or `check(RLHFTrainer.rollout_phase)` for a method. `slow=True`
    runs the slow checks as well. What fails because of your other exercises is checked again with
    the solutions in their place.

    Raises ValueError for something that is no exercise.
    """
    run_and_print(answer, inspect.currentframe().f_back.f_globals, slow)


def run_and_print(answer: Any, caller: dict[str, Any], slow: bool = False) -> Grade:
    """`check` with the caller's names given."""
    exercise = _get_exercise(answer, caller)
    stem = find_stem(exercise)
    if is_stub(answer):
        print(paint(f"{exercise}: not written yet: its cell still holds the stub", YELLOW))
        return stem, exercise, []
    name, _, method = exercise.partition(".")
    given = {} if method else {name: answer}
    home = vars(sys.modules.get(getattr(answer, "__module__", None), sys.modules["__main__"]))
    student = Answers(given, caller, home, vars(get_reference(stem)))
    verdicts, sentence = grade_exercise(stem, exercise, student, slow=slow)
    note = None
    if not all(verdict.passed for verdict in verdicts):
        with alone(stem, exercise, answer, caller) as stand_in:
            again = grade_exercise(stem, exercise, stand_in, slow=slow)
        if count_points(again[0]) > count_points(verdicts):
            verdicts, sentence = again
            note = "With the solutions of the other exercises: of yours, one is missing or wrong."
    print(format_verdicts(exercise, verdicts, sentence, note))
    return stem, exercise, verdicts


def count_points(verdicts: list[Verdict]) -> float:
    return sum(verdict.points for verdict in verdicts)


def _get_exercise(answer: Any, caller: dict[str, Any]) -> str:
    """The name under which the caller has it, or under which it was defined.

    A method may be inherited: of two names for it, the one of the notebook's chapter.
    """
    stems = sorted(get_stems(), key=lambda stem: stem != caller.get("CHAPTER"))
    exercises = [exercise for stem in stems for exercise in get_checks(stem)]
    for exercise in exercises:
        name, _, method = exercise.partition(".")
        found = caller.get(name)
        if found is not None and answer is (getattr(found, method, None) if method else found):
            return exercise
    return getattr(answer, "__qualname__", repr(answer))


def find_answer(names: dict[str, Any], exercise: str) -> Any:
    """The function, class or method of an exercise; None where there is none."""
    name, _, method = exercise.partition(".")
    found = names.get(name)
    return getattr(found, method, None) if method else found


def is_stub(answer: Any) -> bool:
    """Whether a function, or every method of a class, still raises NotImplementedError."""
    if isinstance(answer, type):
        functions = [f for f in vars(answer).values() if isinstance(f, types.FunctionType)]
        return bool(functions) and all(map(is_stub, functions))
    function = inspect.unwrap(getattr(answer, "__func__", answer))
    code = getattr(function, "__code__", None)
    return code is not None and "NotImplementedError" in code.co_names


# --- One exercise alone -------------------------------------------------------------------------


@contextlib.contextmanager
def alone(stem: str, exercise: str, answer: Any, caller: dict[str, Any]) -> Iterator[Answers]:
    """One exercise of the caller's with the reference in place of the chapter's others.

    The caller's functions find each other in its namespace: there, too, the reference stands in
    until the end.
    """
    name, _, method = exercise.partition(".")
    others = {other.partition(".")[0] for other in get_checks(stem)} - {name}
    reference = vars(get_reference(stem))
    if method:
        reference, answer = _graft(stem, name, method, caller.get(name))
    swapped = {other: reference[other] for other in others} | {name: answer}
    saved = {key: caller[key] for key in swapped if key in caller}
    caller.update({key: swapped[key] for key in saved})
    try:
        yield Answers({name: answer}, reference)
    finally:
        caller.update(saved)


def _graft(stem: str, name: str, method: str, student: type) -> tuple[dict[str, Any], type]:
    """The reference's class with one method of the student's, and what stands beside it."""
    owner = next(c for c in student.__mro__ if method in vars(c))
    exercises = get_checks(stem)
    mine = {
        key: value
        for key, value in vars(owner).items()
        if isinstance(value, types.FunctionType | classmethod | staticmethod | property)
        and (key == method or f"{name}.{key}" not in exercises)
    }
    lines = answers.get_source(stem).splitlines(keepends=True)
    for key in mine:
        if f"{name}.{key}" in answers.find_definitions(stem):
            first, last = answers.get_lines(stem, f"{name}.{key}")
            lines[first:last] = [""] * (last - first)
    module = answers.build_module(stem, "".join(lines))
    grafted = type(name, (getattr(module, name),), {})
    for key, value in mine.items():
        setattr(grafted, key, rebind(value, grafted))
    setattr(module, name, grafted)
    return vars(module), grafted


def rebind(method: Any, owner: type) -> Any:
    """A method whose `super()` means that of another class."""
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


# --- In print -----------------------------------------------------------------------------------


def paint(text: str, color: int) -> str:
    """In colour where that shows: in a notebook or a terminal, unless NO_COLOR is set."""
    shows = "ipykernel" in sys.modules or sys.stdout.isatty()
    return f"\033[{color}m{text}\033[0m" if shows and not os.environ.get("NO_COLOR") else text


def format_verdicts(
    exercise: str, verdicts: list[Verdict], sentence: str | None = None, note: str | None = None
) -> str:
    """One line a check, what differs below those that failed, and the mistake's sentence."""
    if all(verdict.is_stub for verdict in verdicts):
        return f"{exercise}: not written yet"
    earned, total = count_points(verdicts), sum(verdict.check.points for verdict in verdicts)
    lines = [paint(f"{exercise}: {earned:g} of {total:g} points", BOLD)]
    for verdict in verdicts:
        points = f"{verdict.points:g}/{verdict.check.points:g}"
        mark = paint("✓", GREEN) if verdict.passed else paint("✗", RED)
        lines.append(f"  {mark} {points}  {verdict.check.title}")
        lines += [f"      {line}" for line in verdict.describe().splitlines()]
    if sentence is not None:
        lines.append(paint(f"→ {sentence}", YELLOW))
    if note is not None:
        lines.append(note)
    return "\n".join(lines)
