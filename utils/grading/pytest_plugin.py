"""Collects the checks of `tests/test_ch*.py` as pytest items of their own.

    pytest tests                        the reference, every mistake and every alternative
    pytest tests --submission PATH      a student's notebook or script
    pytest tests -k compute_advantages  one exercise; -m "not slow" leaves out the slow checks

A check returns what it observed, so it can be no test function: pytest warns of those that return.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from utils.grading.answers import Answer, get_alternatives, get_chapter, get_mistakes
from utils.grading.checks import Check, get_checks, get_reference
from utils.grading.engine import (
    Verdict,
    count_points,
    diagnose,
    diagnose_answer,
    get_points,
    get_quick_checks,
    grade,
    grade_answer,
)
from utils.grading.observation import Answers
from utils.grading.stand_in import alone, find_answer
from utils.grading.submission import Submission, load_submission

_student = pytest.StashKey[Submission]()
LEAST_DIAGNOSED = 0.8  # of a chapter's mistakes get their own sentence


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("grading")
    group.addoption("--submission", type=Path, metavar="PATH", help="a student's .ipynb or .py")
    group.addoption("--secret", default="", help="what the seeds of the checks derive from")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: not run in a notebook unless asked for")
    path = config.getoption("--submission")
    if path is not None:
        try:
            config.stash[_student] = load_submission(path)
        except (ValueError, SyntaxError) as error:
            raise pytest.UsageError(str(error)) from error


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With a submission, only the checks."""
    if _student in config.stash and collection_path.name == "course":
        return True
    return None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector):
    if re.match(r"test_ch\d+_", module_path.name) and module_path.parent.name == "tests":
        return CheckFile.from_parent(parent, path=module_path)
    return None


class CheckFile(pytest.Module):
    """`tests/test_chN_topic.py`: one collector for each exercise."""

    def collect(self) -> Iterator[pytest.Collector]:
        stem = Path(self.path).stem.removeprefix("test_")
        submission = self.config.stash.get(_student, None)
        if submission is not None and stem not in submission.stems:
            return
        for exercise, checks in get_checks(stem).items():
            yield Exercise.from_parent(self, name=exercise, stem=stem, checks=checks)
        if submission is None and get_mistakes(stem):
            yield DiagnosisItem.from_parent(self, name="diagnosis", stem=stem)


class Exercise(pytest.Collector):
    def __init__(self, *, stem: str, checks: tuple[Check, ...], **kwargs):
        super().__init__(**kwargs)
        self.stem, self.checks = stem, checks
        self.secret = self.config.getoption("--secret")
        submission = self.config.stash.get(_student, None)
        self.is_reference = submission is None
        if submission is None:
            self.student = Answers(vars(get_reference(stem)))
        else:
            self.student = submission.get_answers(stem, self.name)

    def collect(self) -> Iterator[pytest.Item]:
        for check in self.checks:
            item = CheckItem.from_parent(self, name=check.name, check=check)
            if check.slow:
                item.add_marker("slow")
            yield item
        if self.is_reference:
            for mistake in self._mine(get_mistakes(self.stem)):
                yield MistakeItem.from_parent(self, name=f"mistake:{mistake.name}", answer=mistake)
            for answer in self._mine(get_alternatives(self.stem)):
                name = f"alternative:{answer.name}"
                yield AlternativeItem.from_parent(self, name=name, answer=answer)

    def _mine(self, answers: tuple[Answer, ...]) -> list[Answer]:
        return [answer for answer in answers if answer.exercise == self.name]

    @functools.cached_property
    def verdicts(self) -> dict[Check, Verdict]:
        """How each check went. What fails with the student's other exercises is graded alone."""
        verdicts = self._grade(self.student)
        submission = self.config.stash.get(_student, None)
        answer = submission and find_answer(submission.namespace, self.name)
        if answer is not None and not all(verdict.passed for verdict in verdicts):
            chapter = get_chapter(self.stem)
            with alone(chapter, self.name, answer, submission.namespace) as student:
                again = self._grade(student)
            if count_points(again) > count_points(verdicts):
                verdicts = again
        return dict(zip(self.checks, verdicts, strict=True))

    def _grade(self, student: Answers) -> list[Verdict]:
        return [grade(check, student, self.secret) for check in self.checks]

    @functools.cached_property
    def sentence(self) -> str | None:
        """Of the mistake that the student made, over all quick checks."""
        return diagnose([self.verdicts[check] for check in self.quick_checks], self.secret)

    @property
    def quick_checks(self) -> list[Check]:
        return get_quick_checks(self.stem, self.name)


class Failed(Exception):
    """A check, a mistake or an alternative that did not go as it should."""


class Item(pytest.Item):
    parent: Exercise | CheckFile

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, Failed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, None, f"{self.parent.name}::{self.name}"


class CheckItem(Item):
    def __init__(self, *, check: Check, **kwargs):
        super().__init__(**kwargs)
        self.check = check

    def runtest(self) -> None:
        exercise = self.parent
        if exercise.is_reference:
            verdict = grade(self.check, exercise.student, exercise.secret)
        else:
            verdict = exercise.verdicts[self.check]
            points = get_points([*exercise.verdicts.values()])
            earned = dict(zip(exercise.checks, points, strict=True))
            row = (
                f"{self.check.stem}  {self.check.exercise}",
                earned[self.check],
                self.check.points,
            )
            self.user_properties.append(("points", row))
        if verdict.passed:
            return
        lines = [f"{self.check.title}:", verdict.describe()]
        if not exercise.is_reference:
            lines.append(exercise.sentence or "")
        raise Failed("\n".join(lines).rstrip())


class MistakeItem(Item):
    """Passes if the exercise's own checks reject the mistake, and never as another mistake."""

    def __init__(self, *, answer: Answer, **kwargs):
        super().__init__(**kwargs)
        self.answer = answer

    def runtest(self) -> None:
        checks = sorted(self.parent.checks, key=lambda check: check.slow)  # slow ones if need be
        if all(grade_answer(check, self.answer).passed for check in checks):
            raise Failed(f"all checks of {self.parent.name} accept this: {self.answer.sentence}")
        sentence = diagnose_answer(self.answer)
        if sentence not in (None, self.answer.sentence):
            raise Failed(f"{self.answer.sentence}\nis taken for another mistake: {sentence}")


class DiagnosisItem(Item):
    """Passes if enough mistakes of a chapter get their own sentence; a tie of two gives none."""

    def __init__(self, *, stem: str, **kwargs):
        super().__init__(**kwargs)
        self.stem = stem

    def runtest(self) -> None:
        mistakes = get_mistakes(self.stem)
        without = [m for m in mistakes if diagnose_answer(m) is None]
        if len(without) > (1 - LEAST_DIAGNOSED) * len(mistakes):
            names = ", ".join(f"{m.exercise} {m.name}" for m in without)
            raise Failed(f"{len(without)} of {len(mistakes)} mistakes get no sentence: {names}")


class AlternativeItem(MistakeItem):
    """Passes if every check accepts the alternative."""

    def runtest(self) -> None:
        for check in self.parent.checks:
            verdict = grade_answer(check, self.answer)
            if not verdict.passed:
                detail = f"{verdict.mismatch.message}\n{verdict.mismatch.values}"
                raise Failed(f"{check.path} rejects this right answer: {detail}")


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Points by exercise, for a submission."""
    if _student not in config.stash:
        return
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    rows = [dict(report.user_properties).get("points") for report in reports]
    totals: dict[str, list[float]] = {}
    for name, earned, worth in filter(None, rows):
        row = totals.setdefault(name, [0, 0])
        row[0] += earned
        row[1] += worth
    terminalreporter.section("points")
    for name, (earned, worth) in totals.items():
        terminalreporter.line(f"{name:60} {earned:g} of {worth:g}")
    earned, worth = (sum(column) for column in zip([0, 0], *totals.values(), strict=True))
    terminalreporter.line(f"{'all':60} {earned:g} of {worth:g}")
