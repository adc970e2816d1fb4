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
    lines, parts, kept, i = output.text.splitlines(), [], 0, 0
    while i < len(lines):
        head = lines[i]
        end = i + 1
        if end < len(lines) and RULE.fullmatch(lines[end]) and _fits(head, lines[end]):
            rule, end = lines[end], end + 1
            while end < len(lines) and _fits(lines[end], rule) and not _is_head(lines, end):
                end += 1
            parts += _keep(lines[kept:i])
            rows = [_cut(line, rule) for line in [head, *lines[i + 2 : end]]]
            parts.append(_make_table("\n".join(lines[i:end]), rows))
            kept = end
        i = end
    return [*parts, *_keep(lines[kept:])]


def _is_head(lines: list[str], i: int) -> bool:
    return i + 1 < len(lines) and bool(RULE.fullmatch(lines[i + 1]))


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
