"""From a student's notebook or script to the definitions that the checks need.

Imports, functions, classes and the assignments that those need are taken, in source order. Nothing
else of a notebook runs. It runs in this process: grade the work of people whom you trust.
"""

import ast
import symtable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from utils.grading.answers import build_module
from utils.grading.checks import get_checks, get_reference, get_stems
from utils.grading.observation import Answers

_DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Submission:
    """What a file defines, and the chapters whose exercises are among it."""

    namespace: dict[str, Any]
    stems: tuple[str, ...]

    def get_answers(self, stem: str, exercise: str) -> Answers:
        """The student's names; what is missing is the reference's, but not the exercise itself."""
        name = exercise.partition(".")[0]
        rest = {k: v for k, v in vars(get_reference(stem)).items() if k != name}
        return Answers(self.namespace, rest)


def load_submission(path: Path) -> Submission:
    """A `.py` or `.ipynb` file; its chapters are recognised by what it defines.

    Raises ValueError for a file that cannot be read or defines no exercise.
    """
    if not path.is_file():
        raise ValueError(f"the submission should be a file, but {path} is not there")
    if path.suffix not in (".py", ".ipynb"):
        raise ValueError(f"the submission should be a .py or .ipynb file, but is {path.name}")
    statements = select_statements(parse(path))
    defined = set().union(*map(get_bound_names, statements))
    stems = tuple(stem for stem in get_stems() if defined & _get_top_names(stem))
    if not stems:
        raise ValueError(f"the submission should define an exercise, but {path} defines none")
    module = build_module(stems[-1], "from __future__ import annotations")
    for statement in statements:
        code = compile(ast.Module([statement], type_ignores=[]), str(path), "exec")
        try:
            exec(code, module.__dict__)
        except Exception as error:  # costs what it defines
            print(f"{path}, line {statement.lineno}: {type(error).__name__}: {error}")
    return Submission(module.__dict__, stems)


def _get_top_names(stem: str) -> set[str]:
    return {exercise.partition(".")[0] for exercise in get_checks(stem)}


def parse(path: Path) -> list[ast.stmt]:
    """The statements of a script, or of the cells of a notebook that are free of syntax errors."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return ast.parse(text).body
    try:
        notebook = nbformat.reads(text, as_version=4)
    except Exception as error:  # nbformat's own errors share no class
        raise ValueError(f"the submission should be a notebook, but {path}: {error}") from error
    cells = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    return [statement for cell in cells for statement in _parse_cell(cell)]


def _parse_cell(source: str) -> list[ast.stmt]:
    """Without the lines of magics and of the shell, if it does not parse with them."""
    kept = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    for text in (source, "\n".join(kept)):
        try:
            return ast.parse(text).body
        except SyntaxError:
            continue
    return []


def select_statements(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Definitions and imports, and the assignments of names that what is taken uses."""
    taken = [s for s in statements if isinstance(s, _DEFINITIONS) and not _is_future(s)]
    left = [s for s in statements if isinstance(s, ast.Assign | ast.AnnAssign)]
    exercises = set().union(*map(_get_top_names, get_stems()))
    while True:
        needed = exercises.union(*map(get_used_names, taken))
        more = [s for s in left if get_bound_names(s) & needed]
        if not more:
            break
        taken += more
        left = [s for s in left if s not in more]
    return [s for s in statements if s in taken]


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def get_bound_names(statement: ast.stmt) -> set[str]:
    """The top-level names that a statement defines or, as `T.method = f`, changes."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        nodes = [node for target in targets for node in ast.walk(target)]
        return {node.id for node in nodes if isinstance(node, ast.Name)}
    return set()


def get_used_names(statement: ast.stmt) -> set[str]:
    """The global names that a statement refers to: no parameter and no local of a function."""
    waiting = [symtable.symtable(ast.unparse(statement), "statement", "exec")]
    names = set()
    while waiting:
        table = waiting.pop()
        is_top = table.get_type() == "module"
        names |= {s.get_name() for s in table.get_symbols() if is_top or s.is_global()}
        waiting += table.get_children()
    return names
