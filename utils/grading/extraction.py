"""From the source of a notebook or a script to the definitions that the checks need.

Imports, and the functions, classes and assignments that the exercises need are taken, in source
order; nothing else of a notebook runs. Reading runs none of the code: it is only parsed.
"""

import ast
import re
import symtable
from collections.abc import Iterable
from pathlib import Path

import nbformat

_BINDING = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def parse(data: bytes, name: str) -> list[ast.stmt]:
    """The statements of a script, or of the cells of a notebook that are free of syntax errors.

    Raises ValueError for what is neither; `name` tells which it should be.
    """
    suffix = Path(name).suffix
    if suffix not in (".py", ".ipynb"):
        raise ValueError(f"the submission should be a .py or .ipynb file, but is {name}")
    text = data.decode("utf-8-sig", errors="replace")
    if suffix == ".py":
        return _parse_script(text, name)
    try:
        cells = nbformat.reads(text, as_version=4).cells
        sources = [cell.source for cell in cells if cell.cell_type == "code"]
    except Exception as error:  # nbformat's own errors share no class
        said = f"{type(error).__name__}: {error}"[:300]
        raise ValueError(f"the submission should be a notebook, but {name}: {said}") from error
    return [statement for source in sources for statement in _parse_cell(source)]


def _parse_script(text: str, name: str) -> list[ast.stmt]:
    """With a syntax error somewhere: the paragraphs that are free of it."""
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError):
        paragraphs = re.split(r"\n\s*\n(?=\S)", text.replace("\0", ""))
        return [statement for part in paragraphs for statement in _parse_cell(part)]


def _parse_cell(source: str) -> list[ast.stmt]:
    """Without the lines of magics and of the shell, if it does not parse with them."""
    kept = ["" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines()]
    for text in (source, "\n".join(kept)):
        try:
            return ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return []


def select_statements(statements: list[ast.stmt], exercises: Iterable[str]) -> list[ast.stmt]:
    """Imports, and the definitions and assignments of the exercises and of what those use."""
    taken = [s for s in statements if isinstance(s, ast.Import | ast.ImportFrom)]
    taken = [s for s in taken if not _is_future(s)]
    left = [s for s in statements if isinstance(s, _BINDING)]
    needed = set(exercises)
    while more := [s for s in left if get_bound_names(s) & needed]:
        taken += more
        left = [s for s in left if s not in more]
        needed = needed.union(*map(get_used_names, more))
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
