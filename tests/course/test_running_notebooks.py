"""Every notebook runs from top to bottom, with its experiments cut short."""

import pytest

from utils import course
from utils.authoring.notebooks import SOLUTIONS, Edition, build, execute, get_written_stems


@pytest.mark.parametrize("solved", [True, False], ids=["solved", "unsolved"])
@pytest.mark.parametrize("stem", get_written_stems())
def test_a_notebook_runs_from_top_to_bottom(stem, solved, monkeypatch):
    """Unsolved too: `catch_up` puts solutions in for what is not written."""
    monkeypatch.setenv(course.SHORT, "1")
    executed = execute(build(stem, Edition(solved=solved)), SOLUTIONS)
    texts = [c.outputs[0].text for c in executed.cells if "check" in c.metadata.get("tags", [])]
    assert all("✗" not in text for text in texts)
    assert solved != all("not written yet" in text for text in texts)
