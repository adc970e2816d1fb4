"""Recording what a student's bundle is judged by; `utils.grading.recorded` reads it there."""

from typing import Any

from utils.grading.checks import get_checks
from utils.grading.diagnosis import grade_answer
from utils.grading.judging import measure_reference_gap, observe_expected, observe_reference
from utils.grading.known_answers import get_mistakes
from utils.grading.recorded import SAME
from utils.grading.wire import pack


def record(chapter: str) -> bytes:
    """Run the reference, the oracles and the mistakes of a chapter on its quick public checks."""
    found: dict[str, Any] = {"reference": {}, "expected": {}, "gap": {}, "mistakes": []}
    public = {e: [c for c in checks if c.public] for e, checks in get_checks(chapter).items()}
    for check in (check for checks in public.values() for check in checks):
        seeds = range(check.seeds)
        found["reference"][check.path] = [observe_reference(check, i) for i in seeds]
        found["expected"][check.path] = [observe_expected(check, i) for i in seeds]
        found["gap"][check.path] = [measure_reference_gap(check, i) for i in seeds]
    for mistake in get_mistakes(chapter):
        verdicts = [grade_answer(c, mistake) for c in public[mistake.exercise] if not c.slow]
        if all(verdict.passed for verdict in verdicts):
            continue  # hidden checks alone tell it
        observed = {v.check.path: SAME if v.passed else [*v.observations] for v in verdicts}
        found["mistakes"].append(
            {"exercise": mistake.exercise, "sentence": mistake.sentence, "observed": observed}
        )
    return pack(found)
