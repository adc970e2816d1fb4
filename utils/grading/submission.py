"""A submission in this process: for a reader's own work, and for people whom you trust.

`utils.grade` grades the work of others, in processes apart.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.grading.cells import parse
from utils.grading.checks import get_chapters, get_checks
from utils.grading.extraction import (
    compile_statement,
    describe_left_out,
    get_bound_names,
    get_flags,
    run_statement,
    select_statements,
)
from utils.grading.known_answers import get_chapter_source
from utils.grading.observation import Answers
from utils.grading.substitution import answer_with, build_module


@dataclass(frozen=True)
class Submission:
    """What a file defines, and the chapters whose exercises are among it."""

    namespace: dict[str, Any]
    chapters: tuple[str, ...]

    def get_answers(self, chapter: str, exercise: str) -> Answers:
        """Return the student's names; what is missing is the reference's, but not the exercise
        itself."""
        return answer_with(get_chapter_source(chapter), exercise, self.namespace)


def load_submission(path: Path) -> Submission:
    """Load a `.py` or `.ipynb` file; its chapters are recognised by what it defines.

    Raises ValueError for a file that cannot be read or defines no exercise.
    """
    if not path.is_file():
        raise ValueError(f"the submission should be a file, but {path} is not there")
    names = get_top_names()
    parsed = parse(path.read_bytes(), path.name)
    statements = select_statements(parsed.statements, set().union(*names.values()))
    defined = set().union(*map(get_bound_names, statements))
    chapters = tuple(chapter for chapter in get_chapters() if defined & names[chapter])
    if not chapters:
        raise ValueError(f"the submission should define an exercise, but {path} defines none")
    for problem in parsed.problems:
        print(problem)
    if left_out := describe_left_out(parsed.statements, statements):
        print("not run, as no exercise needs it:", *left_out, sep="\n    ")
    module = build_module(chapters[-1], "from __future__ import annotations")
    flags = get_flags(parsed.statements)
    for statement in statements:
        try:
            run_statement(compile_statement(statement, flags), module.__dict__)
        except Exception as error:  # costs what it defines
            place = f"{statement.place}, line {statement.first_line}"
            print(f"{place}: {type(error).__name__}: {error}")
    return Submission(module.__dict__, chapters)


def get_top_names() -> dict[str, set[str]]:
    """Return the functions and classes that hold the exercises of each chapter."""
    return {
        chapter: {e.partition(".")[0] for e in get_checks(chapter)} for chapter in get_chapters()
    }
