"""Notebooks, executed in short."""

from utils.authoring.notebooks import SOLUTIONS, Edition, build, execute
from utils.course import session


def run_short(chapter: str, edition: Edition, monkeypatch) -> list[str]:
    """Execute a chapter's notebook, cut short: what its cells with checks print."""
    monkeypatch.setenv(session.SHORT, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # another notebook runs beside it
    executed = execute(build(chapter, edition), SOLUTIONS)
    checks = [cell for cell in executed.cells if "check" in cell.metadata.get("tags", [])]
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in checks]
