"""Every student's notebook runs from top to bottom, though nothing is written in it yet."""

import pytest

from tests.course.helpers import run_short
from utils.authoring.notebooks import Edition, get_written_stems


@pytest.mark.parametrize("stem", get_written_stems())
def test_an_unsolved_notebook_runs(stem, monkeypatch):
    """`catch_up` puts solutions in for what is not written."""
    assert all("not written yet" in text for text in run_short(stem, Edition(), monkeypatch))
