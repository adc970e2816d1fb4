"""Collects the checks of `tests/checks/` as pytest items of their own.

    pytest tests                        the reference, every mistake and every alternative, and
                                        the course's own tests; --size quick: the reference alone;
                                        --size all: also every mistake through every quick check
    pytest tests --submission PATH      a student's notebook or script
    pytest tests -k compute_advantages  one exercise; -m "not slow" leaves out the slow checks

A check returns what it observed, so it can be no test function: pytest warns of those that return.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from utils.grading.checks import Check, get_checks, get_reference
from utils.grading.diagnosis import SEARCH_SECONDS, diagnose, diagnose_answer, grade_answer
from utils.grading.judging import Verdict, count_points, get_points, get_quick_checks, grade
from utils.grading.known_answers import Answer, get_alternatives, get_chapter_source, get_mistakes
from utils.grading.observation import Answers
from utils.grading.submission import Submission, load_submission
from utils.grading.substitution import alone, find_written

SIZES = ("quick", "test", "all")
_student = pytest.StashKey[Submission]()
MIN_DIAGNOSED_SHARE = 0.8  # of a chapter's mistakes get their own sentence


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("grading")
    group.addoption("--submission", type=Path, metavar="PATH", help="a student's .ipynb or .py")
    group.addoption("--size", choices=SIZES, default="test", help="how much is tested")
    group.addoption("--secret", default="", help="what the seeds of the checks derive from")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: not run in a notebook unless asked for")
    config.addinivalue_line("markers", "takes_long: run with --size all only")
    path = config.getoption("--submission")
    if path is not None:
        try:
            config.stash[_student] = load_submission(path)
        except (ValueError, SyntaxError) as error:
            raise pytest.UsageError(str(error)) from error


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the course's own tests with a submission and with --size quick."""
    is_checks_alone = _student in config.stash or config.getoption("--size") == "quick"
    return True if is_checks_alone and collection_path.name == "course" else None


def deselect_long(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what takes long unless all is asked for."""
    if config.getoption("--size") != "all":
        long = {item for item in items if item.get_closest_marker("takes_long")}
        config.hook.pytest_deselected(items=list(long))
        items[:] = [item for item in items if item not in long]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector):
    if re.match(r"ch\d+_", module_path.name) and module_path.parent.name == "checks":
        return CheckFile.from_parent(parent, path=module_path)
    return None


class CheckFile(pytest.Module):
    """`tests/checks/chN_topic.py`: one collector for each exercise."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        chapter = Path(self.path).stem
        submission = self.config.stash.get(_student, None)
        if submission is not None and chapter not in submission.chapters:
            return
        for exercise, checks in get_checks(chapter).items():
            yield Exercise.from_parent(self, name=exercise, chapter=chapter, checks=checks)
        if submission is None and self.config.getoption("--size") == "all":
            yield DiagnosisItem.from_parent(self, name="diagnosis", chapter=chapter)


class Exercise(pytest.Collector):
    def __init__(self, *, chapter: str, checks: tuple[Check, ...], **kwargs):
        super().__init__(**kwargs)
        self.chapter, self.checks = chapter, checks
        self.secret = self.config.getoption("--secret")
        submission = self.config.stash.get(_student, None)
        self.is_reference = submission is None
        if submission is None:
            self.student = Answers(vars(get_reference(chapter)))
        else:
            self.student = submission.get_answers(chapter, self.name)

    def collect(self) -> Iterator[pytest.Item]:
        for check in self.checks:
            item = CheckItem.from_parent(self, name=check.name, check=check)
            if check.slow:
                item.add_marker("slow")
            yield item
        if self.is_reference and self.config.getoption("--size") != "quick":
            for mistake in self._mine(get_mistakes(self.chapter)):
                yield MistakeItem.from_parent(self, name=f"mistake:{mistake.name}", answer=mistake)
            for answer in self._mine(get_alternatives(self.chapter)):
                name = f"alternative:{answer.name}"
                yield AlternativeItem.from_parent(self, name=name, answer=answer)

    def _mine(self, answers: tuple[Answer, ...]) -> list[Answer]:
        return [answer for answer in answers if answer.exercise == self.name]

    @functools.cached_property
    def verdicts(self) -> dict[Check, Verdict]:
        """Return how each check went. What fails with the student's others is graded alone."""
        verdicts = self._grade(self.student)
        submission = self.config.stash.get(_student, None)
        if submission is None or all(verdict.passed for verdict in verdicts):
            return dict(zip(self.checks, verdicts, strict=True))
        chapter = get_chapter_source(self.chapter)
        answer = find_written(chapter, self.name, submission.namespace)
        if answer is not None:
            with alone(chapter, self.name, answer, submission.namespace) as student:
                again = self._grade(student)
            if count_points(again) > count_points(verdicts):
                verdicts = again
        return dict(zip(self.checks, verdicts, strict=True))

    def _grade(self, student: Answers) -> list[Verdict]:
        return [grade(check, student, self.secret) for check in self.checks]

    @functools.cached_property
    def sentence(self) -> str | None:
        """Return the sentence of the mistake that the student made, over all quick checks."""
        verdicts = [self.verdicts[check] for check in self.quick_checks]
        return diagnose(verdicts, self.secret, SEARCH_SECONDS)

    @property
    def quick_checks(self) -> list[Check]:
        return get_quick_checks(self.chapter, self.name)


class Failed(Exception):
    """A check, a mistake or an alternative that did not go as it should."""


class Item(pytest.Item):
    parent: Any  # an Exercise, or for the diagnosis of a chapter a CheckFile

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
                f"{self.check.chapter}  {self.check.exercise}",
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
    """Passes if the check that the mistake's entry names rejects it.

    With --size all, every quick check is run, and no other mistake's sentence may be given for it.
    """

    def __init__(self, *, answer: Answer, **kwargs):
        super().__init__(**kwargs)
        self.answer = answer

    def runtest(self) -> None:
        name = self.answer.mistakes[0].rejected_by
        check = next((check for check in self.parent.checks if check.name == name), None)
        if check is None:
            raise Failed(f"{self.parent.name} has no check {name}")
        if grade_answer(check, self.answer).passed:
            raise Failed(f"{name} accepts this: {self.answer.sentence}")
        if self.config.getoption("--size") == "all":
            sentence = diagnose_answer(self.answer)
            if sentence not in (None, self.answer.sentence):
                raise Failed(f"{self.answer.sentence}\nis taken for another mistake: {sentence}")


class DiagnosisItem(Item):
    """Passes if enough mistakes of a chapter get their own sentence; a tie of two gives none."""

    def __init__(self, *, chapter: str, **kwargs):
        super().__init__(**kwargs)
        self.chapter = chapter

    def runtest(self) -> None:
        mistakes = get_mistakes(self.chapter)
        without = [m for m in mistakes if diagnose_answer(m) is None]
        if len(without) > (1 - MIN_DIAGNOSED_SHARE) * len(mistakes):
            names = ", ".join(f"{m.exercise} {m.name}" for m in without)
            raise Failed(f"{len(without)} of {len(mistakes)} mistakes get no sentence: {names}")


class AlternativeItem(MistakeItem):
    """Passes if every check accepts the alternative."""

    def runtest(self) -> None:
        for check in self.parent.checks:
            verdict = grade_answer(check, self.answer)
            if verdict.mismatch is not None:
                detail = f"{verdict.mismatch.message}\n{verdict.mismatch.values}"
                raise Failed(f"{check.path} rejects this right answer: {detail}")


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Show the points by exercise, for a submission."""
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
