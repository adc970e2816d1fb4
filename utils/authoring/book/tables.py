"""Makes HTML of the tables that cells print, so that a page can wrap and scroll them."""

import re
from html import escape

from nbformat import NotebookNode
from nbformat.v4 import new_output

RULE = re.compile(r"-+( +-+)+ *")  # below the heads of a table of tabulate's


def convert_tables(notebook: NotebookNode) -> None:
    """Put HTML in place of the tables that a notebook's cells printed by `tabulate`.

    A table whose cells run over several lines stays as it is.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code" and "maxcolwidths" not in cell.source:
            outputs: list[NotebookNode] = []
            for output in cell.outputs:
                before = outputs[-1] if outputs else {}
                if output.get("name") == before.get("name") == "stdout":
                    before["text"] += output.text
                else:
                    outputs.append(output)
            cell.outputs = [part for output in outputs for part in _split(output)]


def _split(output: NotebookNode) -> list[NotebookNode]:
    """Return what a cell printed as outputs of plain text and of tables, in their order."""
    if output.get("name") != "stdout":
        return [output]
    lines, parts, kept = output.text.splitlines(), [], 0
    rules = {i for i, line in enumerate(lines) if i and RULE.fullmatch(line)}
    for i in sorted(i for i in rules if _fits(lines[i - 1], lines[i])):
        end = i + 1
        while end < len(lines) and _fits(lines[end], lines[i]) and end + 1 not in rules:
            end += 1
        rows = [_cut(line, lines[i]) for line in [lines[i - 1], *lines[i + 1 : end]]]
        parts += [*_keep(lines[kept : i - 1]), _make_table("\n".join(lines[i - 1 : end]), rows)]
        kept = end
    return [*parts, *_keep(lines[kept:])]


def _fits(line: str, rule: str) -> bool:
    """Return whether a line has text, and none between the columns."""
    gaps = (line[match.start() : match.end()] for match in re.finditer(" +", rule.rstrip()))
    return bool(line.strip()) and not any(gap.strip() for gap in gaps)


def _cut(line: str, rule: str) -> list[str]:
    """Return a line's cells; the last may be longer than its column."""
    starts = [match.start() for match in re.finditer("-+", rule)]
    ends = [*starts[1:], None]
    return [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def _keep(lines: list[str]) -> list[NotebookNode]:
    text = "\n".join(lines).strip("\n")
    return [new_output("stream", name="stdout", text=text + "\n")] if text.strip() else []


def _make_table(text: str, rows: list[list[str]]) -> NotebookNode:
    head, *body = (
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th", *["td"] * len(rows)], rows, strict=False)
    )
    html = f"<thead><tr>{head}</tr></thead><tbody>"
    html += "".join(f"<tr>{row}</tr>" for row in body) + "</tbody>"
    table = f'<table class="printed">{html}</table>'
    return new_output("display_data", data={"text/html": table, "text/plain": text})
