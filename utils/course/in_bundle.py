"""What `check` and `catch_up` say in a course bundle, which has the public checks of its chapter
and neither its solutions nor its other checks."""

import ast
import contextlib
import json
import re
import time
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from utils.grading import recorded
from utils.grading.checks import get_checks
from utils.grading.extraction import get_bound_names
from utils.grading.judging import Verdict, get_quick_checks, grade
from utils.grading.observation import Raised, StudentNames
from utils.grading.reference import find_called, say_called
from utils.grading.substitution import find_answer, find_reached, is_stub

SECONDS = 1.0  # after which no more of what an exercise calls is checked
UNKNOWN = "This matches no mistake that we know, alone or with another."


def put_in_given(notebook: Path, names: dict[str, Any]) -> dict[str, FunctionType]:
    """Run what a chapter's notebook gives, definition by definition, where names lack it.

    Returns the definitions that fail, by the names that they would bind: they build on exercises
    that are not there, or were edited, as the notebook is the student's own.
    """
    waiting: dict[str, FunctionType] = {}
    for statement in _read_given(notebook):
        if missing := get_bound_names(statement) - names.keys():
            code = compile(ast.Module([statement], []), f"<given in {notebook.name}>", "exec")
            try:
                exec(code, names)
            except Exception:  # the student sees it on running that cell
                waiting |= dict.fromkeys(missing, FunctionType(code, names))
    return waiting


def _read_given(notebook: Path) -> list[ast.stmt]:
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, LookupError):  # half written, or no notebook
        return []
    statements: list[ast.stmt] = []
    for cell in cells:
        if "given" in cell["metadata"].get("tags", []):
            with contextlib.suppress(SyntaxError, ValueError):
                statements += ast.parse("".join(cell["source"])).body
    return statements


def find_needed(chapter: str, code: CodeType, names: dict[str, Any]) -> list[str]:
    """Return the exercises that code needs and that are not written, in the chapter's order.

    A method that its class only inherits is not written, unless there is nothing to write.
    """
    exercises = [name for name in get_checks(chapter) if get_quick_checks(chapter, name)]
    waiting, reached = find_reached(code, names, exercises), set()
    while waiting:
        reached.add(exercise := waiting.pop())
        waiting += {*find_called(chapter, exercise)} - reached
    answers = {name: _find_own(names, name) for name in exercises if name in reached}
    return [name for name, answer in answers.items() if answer is None or is_stub(answer)]


def _find_own(names: dict[str, Any], exercise: str) -> Any:
    """Find an answer; of a method, one in a class of that name, which may have been re-opened."""
    name, _, method = exercise.partition(".")
    if not method:
        return names.get(name)
    classes = [c for c in getattr(names.get(name), "__mro__", ()) if c.__name__ == name]
    return next((vars(c)[method] for c in classes if method in vars(c)), None)


def count_checks(chapter: str, exercise: str) -> int:
    """Count all checks of an exercise, those that the bundle does not hold too."""
    known = recorded.load(chapter)
    return known.n_checks[exercise] if known is not None else len(get_checks(chapter)[exercise])


def say_passed(verdicts: list[Verdict]) -> str:
    """Say how many checks pass, never that the exercise is solved: what hidden checks see is not
    known here."""
    n_passed = sum(verdict.passed for verdict in verdicts)
    check = verdicts[0].check
    n_checks = count_checks(check.chapter, check.exercise)
    if n_passed == len(verdicts):
        return f"passes the public checks: {n_passed} of {n_checks} checks"
    return f"passes {n_passed} of {len(verdicts)} public checks ({n_checks} checks in all)"


def comment(
    exercise: str,
    verdicts: list[Verdict],
    sentence: str | None,
    student: StudentNames,
    caller: dict[str, Any],
    hardening: bool,
) -> tuple[str | None, str | None]:
    """Return what to read before the checks and what after them, beside a mistake's sentence."""
    chapter = verdicts[0].check.chapter
    if all(verdict.passed for verdict in verdicts):
        left = count_checks(chapter, exercise) - len(get_checks(chapter)[exercise])
        which = "1 more check isn't" if left == 1 else f"{left} more checks aren't"
        said = f"{which} in this bundle, and may run when your work is graded."
        return None, said if left else None
    if lacking := _find_lacking(verdicts, chapter):
        names = ", ".join(sorted(lacking - {""}))
        which = f" ({names})" if names else ""
        said = f"This calls exercises that you haven't written yet{which}"
        return None, f"{said}. Write them, then check again."
    failing = _find_failing(chapter, exercise, student, caller)
    called = say_called(chapter, exercise)
    if failing:
        is_one = len(failing) == 1
        what = "fails its own check, so fix that" if is_one else "fail their own, so fix those"
        return f"Your {' and '.join(failing)} {what} first.", called
    shown = [v for v in verdicts if not v.passed and (hardening or v.check.is_core)]
    is_odd = any(v.mismatch is not None and not v.mismatch.is_error for v in shown)
    if sentence is not None:
        return None, None
    unknown = UNKNOWN if is_odd else None
    return None, "\n".join(text for text in (unknown, called) if text is not None) or None


def _find_failing(
    chapter: str, exercise: str, student: StudentNames, caller: dict[str, Any]
) -> list[str]:
    """Return those of the student's exercises that this one calls and that fail their own checks,
    as far as there is time."""
    start, failing = time.perf_counter(), []
    for other in find_called(chapter, exercise):
        answer = find_answer(caller, other)
        if answer is None or is_stub(answer) or time.perf_counter() - start > SECONDS:
            continue
        core = [check for check in get_quick_checks(chapter, other) if check.is_core]
        if not all(grade(check, student).passed for check in core):
            failing.append(other)
    return failing


def _find_lacking(verdicts: list[Verdict], chapter: str) -> set[str]:
    """Return other exercises that an answer needs and that are not written; "" for one unknown."""
    exercises = {exercise.rpartition(".")[2]: exercise for exercise in get_checks(chapter)}
    lacking = set()
    for verdict in verdicts:
        last = verdict.observations[-1]
        if not isinstance(last, Raised) or verdict.is_stub:
            continue
        if found := re.fullmatch(r"'(\w+)' object has no attribute '(\w+)'", last.message):
            if f"{found[1]}.{found[2]}" in exercises.values():  # it has no cell yet
                lacking.add(f"{found[1]}.{found[2]}")
        elif last.kind in ("NotImplementedError", "NotDefined"):
            found = re.search(r'(\w+) is not defined|required "(\w+)" function', last.message)
            name = (found[1] or found[2]) if found else last.place
            lacking.add(exercises.get(name, ""))
    return lacking
