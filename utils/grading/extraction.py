"""From the source of a notebook or a script to the definitions that the checks need.

Imports, and the functions, classes and assignments that the exercises need are taken, in source
order; nothing else of a notebook runs. Reading runs none of the code: it is only parsed.
"""

import __future__

import ast
import itertools
import re
import symtable
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.inputtransformer2 import TransformerManager

_ASSIGNMENT = ast.Assign | ast.AnnAssign | ast.AugAssign
_COMPOUND = ast.If | ast.Try | ast.With | ast.For | ast.While
_BINDING = ast.FunctionDef | ast.ClassDef | _ASSIGNMENT | _COMPOUND


def parse(data: bytes, name: str) -> list[ast.stmt]:
    """Return the statements of a script, or of the cells of a notebook that are free of syntax
    errors.

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
    """Parse a script; with a syntax error somewhere, the paragraphs that are free of it."""
    try:
        return _parse_text(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        paragraphs = re.split(r"\n\s*\n(?=\S)", text.replace("\0", ""))
        return [statement for part in paragraphs for statement in _parse_cell(part)]


def _parse_cell(source: str) -> list[ast.stmt]:
    """Parse a cell: if need be with magics as calls, or without the lines of magics and the
    shell."""
    kept = ["" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines()]
    for make_text in (lambda: source, lambda: _replace_magics(source), lambda: "\n".join(kept)):
        try:
            return _parse_text(make_text())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return []


def _parse_text(text: str) -> list[ast.stmt]:
    """Parse a text; each statement keeps its own lines as they were written."""
    statements: list[Any] = list(ast.parse(text).body)
    lines, end = text.splitlines(), 0
    for statement in statements:
        first = min(
            [statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))]
        )
        own = lines[first - 1 : statement.end_lineno]
        statement.first_line = first
        statement.text = "\n".join(own) if first > end else ast.unparse(statement)
        end = statement.end_lineno
    for one, other in itertools.pairwise(statements):  # several in a line
        if other.first_line <= one.end_lineno:
            one.text = ast.unparse(one)
    return statements


def join(statements: Iterable[Any]) -> str:
    """Return the source of statements, on the lines where they stood if those go up."""
    lines: list[str] = []
    for statement in statements:
        lines += [""] * (statement.first_line - 1 - len(lines))
        lines += statement.text.splitlines()
    return "\n".join(lines) + "\n"


def _replace_magics(source: str) -> str:
    """Replace `files = !ls`, `%timeit f()` and `f?` by the calls they stand for; not `%%time`."""
    lines = source.lstrip().splitlines(keepends=True)
    while lines and lines[0].startswith("%%"):
        lines.pop(0)
    return TransformerManager().transform_cell("".join(lines))


def select_statements(statements: list[ast.stmt], exercises: Iterable[str]) -> list[ast.stmt]:
    """Select imports, and the definitions of the exercises and of what those use."""
    imports = (s for s in statements if isinstance(s, ast.Import | ast.ImportFrom))
    taken: list[ast.stmt] = [s for s in imports if not _is_future(s)]
    left = [s for s in statements if isinstance(s, _BINDING)]
    needed = set(exercises)
    while more := [s for s in left if (get_bound_names(s) | _get_imported_names(s)) & needed]:
        taken += more
        left = [s for s in left if s not in more]
        needed = needed.union(*map(get_used_names, more))
    return [s for s in statements if s in taken]


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def get_future_flags(statements: Iterable[ast.stmt]) -> int:
    """Return, for `compile`, what `from __future__ import` asks for."""
    imports = [s for s in statements if isinstance(s, ast.ImportFrom) and _is_future(s)]
    names = {alias.name for s in imports for alias in s.names}
    return sum(
        getattr(__future__, n).compiler_flag for n in names & {*__future__.all_feature_names}
    )


def get_bound_names(statement: ast.stmt) -> set[str]:
    """Return the top-level names that a statement defines or, as `T.method = f`, changes: no
    imports."""
    names = set()
    for inner in _iterate_inner(statement):
        targets = []
        if isinstance(inner, ast.FunctionDef | ast.ClassDef):
            names.add(inner.name)
        elif isinstance(inner, ast.Assign):
            targets = inner.targets
        elif isinstance(inner, ast.AnnAssign | ast.AugAssign | ast.For):
            targets = [inner.target]
        elif isinstance(inner, ast.With):
            targets = [item.optional_vars for item in inner.items if item.optional_vars]
        nodes = [node for target in targets for node in ast.walk(target)]
        names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return names


def _get_imported_names(statement: ast.stmt) -> set[str]:
    """Return what is imported under `if` or `try`."""
    imports = [s for s in _iterate_inner(statement) if isinstance(s, ast.Import | ast.ImportFrom)]
    aliases = [alias for s in imports for alias in s.names]
    return {alias.asname or alias.name.partition(".")[0] for alias in aliases}


def _iterate_inner(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement and those in its blocks, not those in functions and classes."""
    yield statement
    if isinstance(statement, _COMPOUND | ast.ExceptHandler):
        for inner in ast.iter_child_nodes(statement):
            yield from _iterate_inner(inner)


def count_stubs(statements: Iterable[ast.stmt]) -> int:
    """Count the functions and methods that do nothing but raise NotImplementedError."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    last = [node.body[-1] for node in nodes if isinstance(node, ast.FunctionDef)]
    raised = [ast.unparse(s.exc) for s in last if isinstance(s, ast.Raise) and s.exc is not None]
    return sum(text.startswith("NotImplementedError") for text in raised)


def get_used_names(statement: ast.stmt) -> set[str]:
    """Return the global names that a statement refers to: no parameter and no local of a function.

    None of what parses and is refused later, as two parameters of one name are.
    """
    try:
        waiting = [symtable.symtable(ast.unparse(statement), "statement", "exec")]
    except (SyntaxError, ValueError, RecursionError):
        return set()
    names = set()
    while waiting:
        table = waiting.pop()
        is_top = table.get_type() == "module"
        names |= {s.get_name() for s in table.get_symbols() if is_top or s.is_global()}
        waiting += table.get_children()
    return names
