"""Every notebook with solutions runs from top to bottom, with its experiments cut short."""

import pytest

from tests.course.run_short import run_short
from utils.authoring.notebooks import Edition, get_written_chapters


@pytest.mark.takes_long
@pytest.mark.parametrize("chapter", get_written_chapters())
def test_a_solved_notebook_runs_and_passes_its_checks(chapter, monkeypatch):
    texts = run_short(chapter, Edition(solved=True), monkeypatch)
    assert all("✓" in text and "✗" not in text for text in texts)
