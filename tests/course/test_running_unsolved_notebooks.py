"""Every student's notebook runs from top to bottom, though nothing is written in it yet."""

import pytest

from tests.course.run_short import run_short
from utils.authoring.notebooks import Edition, get_written_chapters


@pytest.mark.takes_long
@pytest.mark.parametrize("chapter", get_written_chapters())
def test_an_unsolved_notebook_runs(chapter, monkeypatch):
    """`catch_up` puts solutions in for what is not written."""
    assert all("not written yet" in text for text in run_short(chapter, Edition(), monkeypatch))
