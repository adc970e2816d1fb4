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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from utils.grading import extraction
from utils.grading.cells import parse
from utils.grading.checks import Check, get_chapters, get_checks, get_reference, get_top_names
from utils.grading.diagnosis import SEARCH_SECONDS, diagnose, diagnose_answer, grade_answer
from utils.grading.judging import Verdict, count_points, get_points, get_quick_checks, grade
from utils.grading.known_answers import KnownAnswer, get_alternatives, get_mistakes
from utils.grading.observation import StudentNames
from utils.grading.reference import get_chapter_source
from utils.grading.substitution import alone, answer_with, build_module, find_written

SIZES = ("quick", "test", "all")
_student = pytest.StashKey["Submission"]()
MIN_DIAGNOSED_SHARE = 0.8  # of a chapter's mistakes get their own sentence


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("grading")
    group.addoption("--submission", type=Path, metavar="PATH", help="a student's .ipynb or .py")
    group.addoption("--size", choices=SIZES, default="test", help="how much is tested")


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
            yield Item.from_parent(self, name="diagnosis", test=lambda _: try_diagnosis(chapter))


class Exercise(pytest.Collector):
    """The tests of one exercise, on the reference or on a submission."""

    def __init__(self, *, chapter: str, checks: tuple[Check, ...], **kwargs):
        super().__init__(**kwargs)
        self.chapter, self.checks = chapter, checks
        self.size = self.config.getoption("--size")
        self.submission = self.config.stash.get(_student, None)
        if self.submission is None:
            self.names = vars(get_reference(chapter))
            self.student = StudentNames(self.names)
        else:
            self.names = self.submission.namespace
            self.student = answer_with(get_chapter_source(chapter), self.name, self.names)

    def collect(self) -> Iterator[pytest.Item]:
        grade_check = self.try_reference if self.submission is None else self.try_submission
        for check in self.checks:
            item = Item.from_parent(
                self, name=check.name, test=functools.partial(grade_check, check)
            )
            if check.slow:
                item.add_marker("slow")
            yield item
        if self.submission is not None or self.size == "quick":
            return
        for answer in (*get_mistakes(self.chapter), *get_alternatives(self.chapter)):
            if answer.exercise == self.name:
                kind = "mistake" if answer.mistakes else "alternative"
                test = self.try_mistake if answer.mistakes else self.try_alternative
                name = f"{kind}:{answer.name}"
                yield Item.from_parent(self, name=name, test=functools.partial(test, answer))

    def try_reference(self, check: Check, _: pytest.Item) -> None:
        """Pass if the check accepts the reference."""
        verdict = grade(check, self.student)
        if not verdict.passed:
            fail(f"{check.title}:\n{verdict.describe()}".rstrip())

    def try_submission(self, check: Check, item: pytest.Item) -> None:
        """Pass if the check accepts the student's work; what it earns is noted for the summary."""
        verdict = self.verdicts[check]
        points = get_points([*self.verdicts.values()])
        earned = dict(zip(self.checks, points, strict=True))
        row = (f"{check.chapter}  {check.exercise}", earned[check], check.points)
        item.user_properties.append(("points", row))
        if not verdict.passed:
            lines = [f"{check.title}:", verdict.describe(), self.sentence or ""]
            fail("\n".join(lines).rstrip())

    def try_mistake(self, mistake: KnownAnswer, _: pytest.Item) -> None:
        """Pass if the check that the mistake's entry names rejects it.

        With --size all, every quick check is run, and no other mistake's sentence may be given.
        """
        name = mistake.mistakes[0].rejected_by
        check = next((check for check in self.checks if check.name == name), None)
        if check is None:
            fail(f"{self.name} has no check {name}")
        if grade_answer(check, mistake).passed:
            fail(f"{name} accepts this: {mistake.sentence}")
        if self.size == "all":
            sentence = diagnose_answer(mistake)
            if sentence not in (None, mistake.sentence):
                fail(f"{mistake.sentence}\nis taken for another mistake: {sentence}")

    def try_alternative(self, alternative: KnownAnswer, _: pytest.Item) -> None:
        """Pass if every check accepts the alternative."""
        for check in self.checks:
            mismatch = grade_answer(check, alternative).mismatch
            if mismatch is not None:
                said = f"{check.path} rejects this right answer: {mismatch.message}"
                fail(f"{said}\n{mismatch.values}")

    @functools.cached_property
    def verdicts(self) -> dict[Check, Verdict]:
        """Return how each check went. What fails with the student's others is graded alone."""
        verdicts = [grade(check, self.student) for check in self.checks]
        if not all(verdict.passed for verdict in verdicts):
            source = get_chapter_source(self.chapter)
            answer = find_written(source, self.name, self.names)
            if answer is not None:
                with alone(source, self.name, answer, self.names) as student:
                    again = [grade(check, student) for check in self.checks]
                if count_points(again) > count_points(verdicts):
                    verdicts = again
        return dict(zip(self.checks, verdicts, strict=True))

    @functools.cached_property
    def sentence(self) -> str | None:
        """Return the sentence of the mistake that the student made, over all quick checks."""
        quick = get_quick_checks(self.chapter, self.name)
        return diagnose([self.verdicts[check] for check in quick], seconds=SEARCH_SECONDS)


def fail(message: str) -> NoReturn:
    pytest.fail(message, pytrace=False)


def try_diagnosis(chapter: str) -> None:
    """Pass if enough mistakes of a chapter get their own sentence; a tie of two gives none."""
    mistakes = get_mistakes(chapter)
    without = [m for m in mistakes if diagnose_answer(m) is None]
    if len(without) > (1 - MIN_DIAGNOSED_SHARE) * len(mistakes):
        names = ", ".join(f"{m.exercise} {m.name}" for m in without)
        fail(f"{len(without)} of {len(mistakes)} mistakes get no sentence: {names}")


class Item(pytest.Item):
    """One test; it fails if `test`, which is given this item, says so."""

    parent: Any  # an Exercise, or for the diagnosis of a chapter a CheckFile

    def __init__(self, *, test: Callable[[pytest.Item], None], **kwargs):
        super().__init__(**kwargs)
        self.test = test

    def runtest(self) -> None:
        self.test(self)

    def reportinfo(self):
        return self.path, None, f"{self.parent.name}::{self.name}"


# --- A submission in this process: for work that you trust ----------------------------------------


@dataclass(frozen=True)
class Submission:
    """What a file defines, and the chapters whose exercises are among it."""

    namespace: dict[str, Any]
    chapters: tuple[str, ...]


def load_submission(path: Path) -> Submission:
    """Load a `.py` or `.ipynb` file; its chapters are recognised by what it defines.

    Raises ValueError for a file that cannot be read or defines no exercise.
    """
    if not path.is_file():
        raise ValueError(f"the submission should be a file, but {path} is not there")
    names = get_top_names()
    parsed = parse(path.read_bytes(), path.name)
    statements = extraction.select_statements(parsed.statements, set().union(*names.values()))
    defined = set().union(*map(extraction.get_bound_names, statements))
    chapters = tuple(chapter for chapter in get_chapters() if defined & names[chapter])
    if not chapters:
        raise ValueError(f"the submission should define an exercise, but {path} defines none")
    for problem in parsed.problems:
        print(problem)
    if left_out := extraction.describe_left_out(parsed.statements, statements):
        print("not run, as no exercise needs it:", *left_out, sep="\n    ")
    module = build_module(chapters[-1], "from __future__ import annotations")
    flags = extraction.get_flags(parsed.statements)
    for _, place, code in extraction.compile_each(statements, flags):
        try:
            extraction.run_statement(code, module.__dict__)
        except Exception as error:  # costs what it defines
            print(f"{place}: {type(error).__name__}: {error}")
    return Submission(module.__dict__, chapters)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Show the points by exercise, for a submission."""
    if _student not in config.stash:
        return
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    rows = [dict(report.user_properties).get("points") for report in reports]
    found = [row for row in rows if row is not None]
    terminalreporter.section("points")
    for name in (*dict.fromkeys(row[0] for row in found), "all"):
        mine = [row for row in found if name in (row[0], "all")]
        earned, worth = (sum(row[i] for row in mine) for i in (1, 2))
        terminalreporter.line(f"{name:60} {earned:g} of {worth:g}")
