"""From a student's notebook or script to the definitions that the checks need.

Imports, functions, classes and the assignments that those need are taken, in source order. Nothing
else of a notebook runs. It runs in this process: grade the work of people whom you trust.
"""

import ast
from pathlib import Path

import nbformat

from utils.grading.answers import build_module
from utils.grading.checks import get_checks, get_stems
from utils.grading.observation import Answers

_DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


def load_submission(path: Path) -> dict[str, Answers]:
    """The chapters that a `.py` or `.ipynb` file answers, recognised by what it defines.

    Raises ValueError for a file that cannot be read or defines no exercise.
    """
    if not path.is_file():
        raise ValueError(f"the submission should be a file, but {path} is not there")
    if path.suffix not in (".py", ".ipynb"):
        raise ValueError(f"the submission should be a .py or .ipynb file, but is {path.name}")
    statements = select_statements(parse(path))
    names = set().union(*map(get_bound_names, statements)) if statements else set()
    stems = [
        stem
        for stem in get_stems()
        if names & {exercise.partition(".")[0] for exercise in get_checks(stem)}
    ]
    if not stems:
        raise ValueError(f"the submission should define an exercise, but {path} defines none")
    source = ast.unparse(ast.Module(statements, type_ignores=[]))
    # Executed in the name of its last chapter; earlier chapters' names are looked up there as well.
    student = Answers(vars(build_module(stems[-1], source)))
    return dict.fromkeys(stems, student)


def parse(path: Path) -> list[ast.stmt]:
    """The statements of a script, or of the cells of a notebook that are free of syntax errors."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return ast.parse(text).body
    try:
        notebook = nbformat.reads(text, as_version=4)
    except Exception as error:  # nbformat's own errors share no class
        raise ValueError(f"the submission should be a notebook, but {path}: {error}") from error
    statements = []
    for cell in notebook.cells:
        if cell.cell_type != "code" or cell.source.startswith("%%"):
            continue
        lines = [line for line in cell.source.splitlines() if not line.lstrip().startswith("%")]
        lines = [line for line in lines if not line.lstrip().startswith("!")]
        try:
            statements += ast.parse("\n".join(lines)).body
        except SyntaxError:
            continue
    return statements


def select_statements(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Definitions and imports, and the assignments of names that what is taken uses."""
    taken = [s for s in statements if isinstance(s, _DEFINITIONS)]
    left = [s for s in statements if isinstance(s, ast.Assign | ast.AnnAssign)]
    exercises = {e.partition(".")[0] for stem in get_stems() for e in get_checks(stem)}
    while True:
        needed = exercises.union(*(get_used_names(s) for s in taken))
        more = [s for s in left if get_bound_names(s) & needed]
        if not more:
            break
        taken += more
        left = [s for s in left if s not in more]
    return [s for s in statements if s in taken]


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
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
