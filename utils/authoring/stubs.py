"""A chapter's solutions, cut into the pieces of a notebook: what is given, stubs and solutions.

A solution is written once, in `solutions/<chapter>.py`. Its signature and docstring are the stub;
its body, or what stands between `# SOLUTION START` and `# SOLUTION END` if it has those, is cut
out.
"""

import ast
import re
import textwrap
from dataclasses import dataclass

from utils.grading import reference

START, END = "# SOLUTION START", "# SOLUTION END"
CUT = "raise NotImplementedError"


@dataclass(frozen=True)
class Piece:
    """One exercise: the cell that a student fills in, and the same cell solved."""

    stub: str
    solution: str


def cut_exercise(
    chapter: str, exercise: str, also: tuple[str, ...] = (), helpers: tuple[str, ...] = ()
) -> Piece:
    """Return an exercise of a chapter. A method stands in a class that re-opens its own.

    `also` are definitions that the student writes in the same cell, methods of the same class or
    functions before it; `helpers` are those that only the solution uses and that are shown with it.
    """
    names = (*also, exercise)
    stubs = _join([(name, _cut(chapter, name)) for name in names])
    solutions = [(name, get_definition(chapter, name)) for name in names]
    shown = [get_definition(chapter, name) for name in helpers]
    return Piece(stubs, "\n\n\n".join([*shown, _join(solutions)]))


def _join(definitions: list[tuple[str, str]]) -> str:
    """Put definitions below each other, the methods of a class in one block."""
    blocks: dict[str, list[str]] = {}
    for name, text in definitions:
        owner = name.rpartition(".")[0]
        blocks.setdefault(owner or name, []).append(textwrap.indent(text, "    " * bool(owner)))
    parts = []
    for owner, texts in blocks.items():
        is_class = any("." in name for name, _ in definitions if name.startswith(f"{owner}."))
        head = f"class {owner}({owner}):\n" if is_class else ""
        parts.append(head + "\n\n".join(texts))
    return "\n\n\n".join(parts)


def get_definition(chapter: str, name: str) -> str:
    """Return the source of a function, class, method or constant, without what marks the
    solution."""
    lines = _get_lines(chapter, name)
    return "\n".join(line for line in lines if line.strip() not in (START, END))


def get_given(chapter: str, name: str, exercises: tuple[str, ...]) -> str:
    """Return a definition that students are given; of a class, without the methods that are
    exercises."""
    definitions = reference.get_definitions(chapter)
    if not isinstance(definitions.get(name), ast.ClassDef):
        return get_definition(chapter, name)
    lines = reference.get_source(chapter).splitlines()
    for method in exercises:
        if method.startswith(f"{name}.") and method in definitions:
            first, last = reference.get_lines(chapter, method)
            lines[first:last] = [START] * (last - first)  # which is left out
    kept = lines[slice(*reference.get_lines(chapter, name))]
    return _squeeze("\n".join(line for line in kept if line.strip() not in (START, END)))


def get_imports(chapter: str) -> str:
    """Return the imports of a chapter's solutions."""
    tree = ast.parse(reference.get_source(chapter))
    nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = reference.get_source(chapter).splitlines()
    return _squeeze("\n".join(lines[nodes[0].lineno - 1 : nodes[-1].end_lineno]))


def _get_lines(chapter: str, name: str) -> list[str]:
    """Return the lines of a definition, flush left."""
    lines = reference.get_source(chapter).splitlines()
    if name in reference.get_definitions(chapter):
        first, last = reference.get_lines(chapter, name)
    else:
        first, last = _find_constant(chapter, name)
    return textwrap.dedent("\n".join(lines[first:last])).splitlines()


def _find_constant(chapter: str, name: str) -> tuple[int, int]:
    for node in ast.parse(reference.get_source(chapter)).body:
        targets = getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return node.lineno - 1, node.end_lineno or node.lineno
    raise ValueError(
        f"chapters/source/{chapter}.md names {name}, which solutions/{chapter}.py should define"
    )


def _cut(chapter: str, exercise: str) -> str:
    lines = _get_lines(chapter, exercise)
    text = "\n".join(lines)
    if START in text:
        return re.sub(rf"{START}.*?({END}|\Z)", CUT, text, flags=re.DOTALL)
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    parts = [node] if isinstance(node, ast.FunctionDef) else node.body
    for function in (part for part in reversed(parts) if isinstance(part, ast.FunctionDef)):
        body = function.body
        docstring = ast.get_docstring(function) is not None
        first = body[0].end_lineno if docstring else body[0].lineno - 1
        indent = " " * body[0].col_offset
        lines[first : function.end_lineno] = [indent + CUT]
    return "\n".join(lines)


def _squeeze(text: str) -> str:
    """Leave no more than one empty line in a row, and none at the end."""
    return re.sub(r"\n{3,}", "\n\n", text).rstrip()
