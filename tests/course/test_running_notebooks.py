"""Every notebook with solutions runs from top to bottom, with its experiments cut short."""

import pytest

from tests.course.helpers import run_short
from utils.authoring.notebooks import Edition, get_written_chapters

QUICK = ("ch3_grpo",)  # it trains, by chapter 2's trainer as well
CHAPTERS = [
    pytest.param(chapter, marks=() if chapter in QUICK else pytest.mark.takes_long)
    for chapter in get_written_chapters()
]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_solved_notebook_runs_and_passes_its_checks(chapter, monkeypatch):
    texts = run_short(chapter, Edition(solved=True), monkeypatch)
    assert all("✓" in text and "✗" not in text for text in texts)
