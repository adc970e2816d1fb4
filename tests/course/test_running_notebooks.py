"""Every notebook with solutions runs from top to bottom, with its experiments cut short."""

import pytest

from tests.course.helpers import run_short
from utils.authoring.notebooks import Edition, get_written_stems


@pytest.mark.parametrize("stem", get_written_stems())
def test_a_solved_notebook_runs_and_passes_its_checks(stem, monkeypatch):
    texts = run_short(stem, Edition(solved=True), monkeypatch)
    assert all("✓" in text and "✗" not in text for text in texts)
