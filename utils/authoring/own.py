"""Builds `examples/own.ipynb` from `own.md` there, and runs it: `python -m utils.authoring.own`."""

import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

EXAMPLES = Path(__file__).parents[2] / "examples"


def build() -> NotebookNode:
    """Return the notebook, without outputs."""
    notebook = jupytext.reads((EXAMPLES / "own.md").read_text(encoding="utf-8"), fmt="md:myst")
    for index, cell in enumerate(notebook.cells):
        cell.id = f"own-{index}"
    notebook.metadata.pop("jupytext", None)
    return notebook


def execute(notebook: NotebookNode, folder: Path, timeout_s: int = 900) -> NotebookNode:
    """Run every cell in `folder`, and keep what is shown but not what goes to stderr."""
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout_s, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=EXAMPLES) as scratch:  # inside the course
        nbformat.write(execute(build(), Path(scratch)), EXAMPLES / "own.ipynb")
