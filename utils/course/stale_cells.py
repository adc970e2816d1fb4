"""Whether a notebook's cell was edited and saved, but not run since."""

import json
import os
import time
from pathlib import Path

from IPython import get_ipython

from utils.grading.catalogue import find_definitions

_ran: dict[str, float] = {}  # when each source ran last


def watch() -> None:
    """Remember what runs from now on. Does nothing outside IPython."""
    shell = get_ipython()
    if shell is None:
        return
    for source in shell.user_ns.get("In", []):
        _ran.setdefault(source.strip(), time.time())
    if _remember not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _remember)


def is_unrun(name: str) -> bool:
    """Return whether the saved notebook defines `name` in a cell that has not run since it was
    saved."""
    path = _find_notebook()
    if path is None or not path.is_file():
        return False
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(c["source"]).strip() for c in cells if c["cell_type"] == "code"]
    except (OSError, ValueError, LookupError, TypeError):  # half written, or no notebook
        return False
    defining = [source for source in sources if name in _get_defined(source)]
    if not defining or defining[-1] in _ran:
        return False
    times = [at for source, at in _ran.items() if name in _get_defined(source)]
    return bool(times) and path.stat().st_mtime > max(times)


def _remember(result) -> None:
    _ran[result.info.raw_cell.strip()] = time.time()


def _find_notebook() -> Path | None:
    """Return the file of this kernel's notebook, where the front end tells (JupyterLab, VS
    Code)."""
    shell = get_ipython()
    path = (shell and shell.user_ns.get("__vsc_ipynb_file__")) or os.environ.get("JPY_SESSION_NAME")
    return Path(path) if path else None


def _get_defined(source: str) -> set[str]:
    """Return `f`, `T` and `T.method` for what a cell defines."""
    try:
        return {*find_definitions(source)}
    except SyntaxError:
        return set()
