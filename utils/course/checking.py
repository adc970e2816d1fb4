"""Checking one exercise in a notebook: what `check(function)` prints in the cell below it."""

import contextlib
import inspect
import os
import sys
from functools import partial
from typing import Any

from utils.course import in_bundle
from utils.grading.checks import (
    Check,
    find_chapter,
    get_chapters,
    get_checks,
    get_reference,
    has_reference,
)
from utils.grading.diagnosis import SEARCH_SECONDS, grade_exercise, is_same_as_recorded
from utils.grading.judging import (
    Verdict,
    count_points,
    get_points,
    get_quick_checks,
    grade,
)
from utils.grading.observation import StudentNames, usual_settings
from utils.grading.reference import get_chapter_source, say_called
from utils.grading.substitution import alone, find_answer, find_owner, is_stub, replaced

Grade = tuple[str, str, list[Verdict]]  # chapter, exercise, how each check went
GREEN, RED, YELLOW, BOLD = 32, 31, 33, 1


@usual_settings()
def run_and_print(
    answer: Any, caller: dict[str, Any], slow: bool = False, hardening: bool = False
) -> Grade:
    """Run the checks of an exercise on the caller's function or class, and print how each went.

    What fails because of the caller's other exercises is checked again with the solutions in their
    place. Settings of PyTorch are the usual ones meanwhile, and afterwards what they were.

    Raises ValueError for something that is no exercise.
    """
    exercise = _get_exercise(answer, caller)
    chapter = find_chapter(exercise)
    if "." not in exercise and "." in getattr(answer, "__qualname__", ""):
        answer = caller.get(exercise, answer)
    if reason := _find_nothing_to_run(chapter, exercise, answer, caller, slow):
        print(paint(f"{exercise}: {reason}", YELLOW))
        return chapter, exercise, []
    name, _, method = exercise.partition(".")
    given = {} if method else {name: answer}
    home = vars(sys.modules.get(str(getattr(answer, "__module__", "")), sys.modules["__main__"]))
    rest = vars(get_reference(chapter)) if has_reference(chapter) else {}
    student = StudentNames(given, caller, home, rest)

    half = SEARCH_SECONDS / 2  # the other half is for the exercise alone
    grade_it = partial(
        grade_exercise, chapter, exercise, slow=slow, hardening=hardening, seconds=half
    )
    verdicts, sentence = grade_it(student)
    first = note = None
    if not has_reference(chapter):
        first, note = in_bundle.comment(exercise, verdicts, sentence, student, caller, hardening)
    elif not all(verdict.passed for verdict in verdicts):
        with alone(get_chapter_source(chapter), exercise, answer, caller) as student_alone:
            again = grade_it(student_alone)
        gained = count_points(again[0]) - count_points(verdicts)
        if gained > 0:
            pairs = zip(verdicts, again[0], strict=True)
            mended = [now.check for before, now in pairs if now.passed and not before.passed]
            note = "Graded with the solutions of the other exercises, "
            note += _find_culprit(chapter, exercise, mended, student, caller)
        elif gained == 0 and sentence is None and again[1]:
            note = "Graded with the solutions of the other exercises. "
            note += "With your own it fails too, in another way."
        if note is not None:
            verdicts, sentence = again
        elif not all(map(_went_alike, verdicts, again[0])):
            note = say_called(chapter, exercise)
    print(format_verdicts(exercise, verdicts, sentence, note, hardening, first))
    return chapter, exercise, verdicts


def _find_nothing_to_run(
    chapter: str, exercise: str, answer: Any, caller: dict[str, Any], slow: bool
) -> str | None:
    """Return why there is nothing to run: no answer yet, or only slow checks."""
    if is_stub(answer):
        return "not written yet: its cell still holds the stub"
    name, _, method = exercise.partition(".")
    if method and _is_of_an_earlier_chapter(chapter, exercise, caller.get(name)):
        said = f"not written yet: {name} inherits it. Run this exercise's cell"
        return f"{said} (again, if you ran the class's once more)"
    if not (get_checks(chapter)[exercise] if slow else get_quick_checks(chapter, exercise)):
        return f"its checks are slow: check({exercise}, slow=True)"
    return None


def _went_alike(verdict: Verdict, other: Verdict) -> bool:
    """Return whether a check fails in the same way for two, or for neither."""
    if verdict.passed or other.passed:
        return verdict.passed and other.passed
    return is_same_as_recorded(verdict, [*other.observations])


def _is_of_an_earlier_chapter(chapter: str, exercise: str, cls: type | None) -> bool:
    """Return whether a method that is to be written is an earlier chapter's still. What is
    inherited for good, a trainer's `train`, has slow checks alone."""
    method = exercise.partition(".")[2]
    owners = [owner for owner in getattr(cls, "__mro__", ()) if method in vars(owner)]
    home = owners[0].__module__ if owners else ""
    is_earlier = home.startswith("solutions.") and home != f"solutions.{chapter}"
    return is_earlier and len(get_quick_checks(chapter, exercise)) > 0


def _find_culprit(
    chapter: str, exercise: str, mended: list[Check], student: StudentNames, caller: dict[str, Any]
) -> str:
    """Say why checks pass with the solutions of the others only, if few others explain it."""
    reference = vars(get_reference(chapter))
    quick = next((check for check in mended if not check.slow), None)

    if quick is None:
        return "as it fails with yours."

    def passes_with(others: list[str]) -> bool:
        with contextlib.ExitStack() as stack:
            for other in others:
                stack.enter_context(replaced(other, caller, reference))
            return grade(quick, student).passed

    others: list[str] = []
    unwritten: list[str] = []
    for other in get_checks(chapter):
        name, _, method = other.partition(".")
        mine = find_answer(caller, other)
        if other == exercise or name not in caller or mine is find_answer(reference, other):
            continue
        is_missing = method and find_owner(caller[name], method, reference[name]) is None
        (unwritten if is_missing or is_stub(mine) else others).append(other)
    if unwritten and passes_with(unwritten):
        for other in unwritten[::-1]:
            rest = [name for name in unwritten if name != other]
            unwritten = rest if rest and passes_with(rest) else unwritten
        *first, last = unwritten
        names = f"{', '.join(first)} and {last} are" if first else f"{last} is"
        return f"because your {names} not written yet."
    culprit = next((other for other in others if passes_with([other])), None)
    return f"because your {culprit} fails here." if culprit else "as it fails with yours."


def _get_exercise(answer: Any, caller: dict[str, Any]) -> str:
    """Return the name under which the caller has it, or under which it was defined.

    A method may be inherited: of two names for it, the one of the notebook's chapter.
    """
    chapters = sorted(get_chapters(), key=lambda chapter: chapter != caller.get("CHAPTER"))
    exercises = [exercise for chapter in chapters for exercise in get_checks(chapter)]
    for exercise in exercises:
        name, _, method = exercise.partition(".")
        found = caller.get(name)
        if found is not None and answer is (getattr(found, method, None) if method else found):
            return exercise
    name = getattr(answer, "__qualname__", repr(answer))
    if (top := name.partition(".")[0]) in exercises and name not in exercises:
        return top  # a method of a class that is one exercise
    return name


def is_solution(chapter: str, exercise: str, answer: Any) -> bool:
    """Return whether this is the reference itself, not the same text run in a cell."""
    if not has_reference(chapter):
        return False
    names, (name, _, method) = vars(get_reference(chapter)), exercise.partition(".")
    if method and method not in vars(names[name]):
        return False  # inherited from an earlier chapter: the class around it is what is checked
    solution = find_answer(names, exercise)
    codes = [getattr(inspect.unwrap(a), "__code__", a) for a in (answer, solution)]
    return codes[0] is codes[1]


# --- In print -----------------------------------------------------------------------------------


def paint(text: str, color: int) -> str:
    """Paint text where that shows: in a notebook or a terminal, unless NO_COLOR is set."""
    shows = "ipykernel" in sys.modules or sys.stdout.isatty()
    return f"\033[{color}m{text}\033[0m" if shows and not os.environ.get("NO_COLOR") else text


def format_verdicts(
    exercise: str,
    verdicts: list[Verdict],
    sentence: str | None = None,
    note: str | None = None,
    hardening: bool = False,
    first: str | None = None,
) -> str:
    """Format a line per core check, what differs below those that failed, and the mistake's
    sentence; one line for all that is hardening, unless that is asked for. What comes `first`
    stands above them, a `note` below."""
    if all(verdict.is_stub for verdict in verdicts):
        return f"{exercise}: not written yet"
    chapter = verdicts[0].check.chapter
    if has_reference(chapter):
        earned, total = count_points(verdicts), sum(verdict.check.points for verdict in verdicts)
        went = f"{earned:.3g} of {total:g} points{', solved' if is_solved(verdicts) else ''}"
    else:
        went = in_bundle.say_passed(verdicts)
    lines = [paint(f"{exercise}: {went}", BOLD)]
    if first is not None:
        lines.append(paint(first, YELLOW))
    points = dict(zip([v.check for v in verdicts], get_points(verdicts), strict=True))
    harder = [verdict for verdict in verdicts if not verdict.check.is_core]
    seen: set[str] = set()
    for verdict in [v for v in verdicts if v.check.is_core]:
        lines += _format_verdict(verdict, points[verdict.check] > 0, seen)
    if harder:
        n_passed = sum(verdict.passed for verdict in harder)
        mark = paint("✓", GREEN) if n_passed == len(harder) else paint("✗", RED)
        how = "" if hardening or n_passed == len(harder) else f": check({exercise}, hardening=True)"
        lines.append(f"  {mark} hardening: {n_passed} of {len(harder)}{how}")
        if hardening:
            for verdict in harder:
                told = _format_verdict(verdict, points[verdict.check] > 0, seen)
                lines += [f"  {line}" for line in told]
    if sentence is not None:
        lines.append(paint(f"→ {sentence}", YELLOW))
    if note is not None:
        lines.append(note)
    if left := len(get_checks(chapter)[exercise]) - len(verdicts):
        more = "1 slow check was" if left == 1 else f"{left} slow checks were"
        lines.append(f"({more} not run: check({exercise}, slow=True))")
    return "\n".join(lines)


def is_solved(verdicts: list[Verdict]) -> bool:
    """Return whether all core checks that ran have passed; all checks, if none of them is core."""
    core = [verdict for verdict in verdicts if verdict.check.is_core] or verdicts
    return bool(core) and all(verdict.passed for verdict in core)


def _format_verdict(verdict: Verdict, earns: bool, seen: set[str]) -> list[str]:
    """Format a check; an error that was `seen` above is not told once more."""
    mark = paint("✓", GREEN) if verdict.passed else paint("✗", RED)
    lines = [f"  {mark} {verdict.check.title}"]
    if verdict.passed and not earns:
        lines.append("      (this earns nothing alone: another check has to pass as well)")
    told = verdict.describe(is_own=True).splitlines()
    if verdict.mismatch is not None and verdict.mismatch.is_error:
        if verdict.mismatch.values in seen:
            told = [f"{verdict.mismatch.message}, as above"]
        seen.add(verdict.mismatch.values)
    return lines + [f"      {line}" for line in told]
