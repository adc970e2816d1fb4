"""Every notebook runs from top to bottom, cut short, whether its exercises are solved or not."""

import pytest

from utils.authoring.notebooks import SOLUTIONS, Edition, build, execute, get_written_chapters
from utils.course import session

pytestmark = [
    pytest.mark.takes_long,
    pytest.mark.parametrize("chapter", get_written_chapters()),
]


def run_short(chapter: str, edition: Edition, monkeypatch) -> list[str]:
    """Execute a chapter's notebook, cut short: what its cells with checks print."""
    monkeypatch.setenv(session.SHORT, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # another notebook runs beside it
    executed = execute(build(chapter, edition), SOLUTIONS)
    checks = [cell for cell in executed.cells if "check" in cell.metadata.get("tags", [])]
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in checks]


def test_a_solved_notebook_runs_and_passes_its_checks(chapter, monkeypatch):
    texts = run_short(chapter, Edition(solved=True), monkeypatch)
    assert all("✓" in text and "✗" not in text for text in texts)


def test_an_unsolved_notebook_runs(chapter, monkeypatch):
    """`catch_up` puts solutions in for what is not written."""
    assert all("not written yet" in text for text in run_short(chapter, Edition(), monkeypatch))
