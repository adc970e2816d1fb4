"""`check(function)`: the checks of one exercise, in the notebook's cell below it."""

import inspect
import sys
from typing import Any

from utils.grading.checks import find_stem, get_checks, get_reference, get_stems
from utils.grading.engine import Verdict, grade_exercise
from utils.grading.observation import Answers


def check(answer: Any, slow: bool = False) -> None:
    """Run the checks of an exercise on your function or class, and print how each went.

    `check(compute_advantages)`, or `check(RLHFTrainer.rollout_phase)` for a method. `slow=True`
    runs the slow checks as well.

    Raises ValueError for something that is no exercise.
    """
    caller = inspect.currentframe().f_back.f_globals
    exercise = _get_exercise(answer, caller)
    stem = find_stem(exercise)
    name, _, method = exercise.partition(".")
    given = {} if method else {name: answer}
    home = vars(sys.modules.get(getattr(answer, "__module__", None), sys.modules["__main__"]))
    student = Answers(given, caller, home, vars(get_reference(stem)))
    verdicts, sentence = grade_exercise(stem, exercise, student, slow=slow)
    print(format_verdicts(exercise, verdicts, sentence))


def _get_exercise(answer: Any, caller: dict[str, Any]) -> str:
    """The name under which the caller has it, or under which it was defined."""
    exercises = [exercise for stem in get_stems() for exercise in get_checks(stem)]
    for exercise in exercises:
        name, _, method = exercise.partition(".")
        found = caller.get(name)
        if found is not None and answer is (vars(found).get(method) if method else found):
            return exercise
    return getattr(answer, "__qualname__", repr(answer))


def format_verdicts(exercise: str, verdicts: list[Verdict], sentence: str | None = None) -> str:
    """One line a check, what differs below those that failed, and the mistake's sentence."""
    earned = sum(verdict.points for verdict in verdicts)
    total = sum(verdict.check.points for verdict in verdicts)
    lines = []
    if all(verdict.is_stub for verdict in verdicts):
        return f"{exercise}: not written yet"
    for verdict in verdicts:
        points = f"{verdict.points:g}/{verdict.check.points:g}"
        lines.append(f"  {'✓' if verdict.passed else '✗'} {points}  {verdict.check.title}")
        lines += [f"      {line}" for line in verdict.describe().splitlines()]
    if sentence is not None:
        lines.append(f"→ {sentence}")
    return "\n".join([f"{exercise}: {earned:g} of {total:g} points", *lines])
