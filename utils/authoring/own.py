"""Builds `examples/own.ipynb` from `own.md` there, and runs it: `python -m utils.authoring.own`."""

import os
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

from utils.authoring.notebooks import run_cells

EXAMPLES = Path(__file__).parents[2] / "examples"


def build() -> NotebookNode:
    """Return the notebook, without outputs."""
    notebook = jupytext.reads((EXAMPLES / "own.md").read_text(encoding="utf-8"), fmt="md:myst")
    for index, cell in enumerate(notebook.cells):
        cell.id = f"own-{index}"
    notebook.metadata.pop("jupytext", None)
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=EXAMPLES) as scratch:  # inside the course
        nbformat.write(run_cells(build(), Path(scratch), os.environ), EXAMPLES / "own.ipynb")
