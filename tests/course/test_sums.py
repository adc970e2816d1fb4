"""The sums that pages quote are those of the sources."""

import re
from types import SimpleNamespace

import pytest

from utils.authoring import sums
from utils.authoring.notebooks import ROOT
from utils.authoring.sums import IN_SOURCE, calc_sum, fill, say_time


def test_the_pages_quote_the_sums():
    pages = [path for pattern in sums.PAGES for path in ROOT.glob(pattern)]
    texts = {path: path.read_text(encoding="utf-8") for path in pages}
    assert sum("<!--time " in text for text in texts.values()) >= 5
    for path, text in texts.items():
        assert fill(path) == text, f"{path} quotes an old sum: make chapters"


BLOCK = "difficulty: 1\nimportance: 1\nidea: an idea\napi: a call\nwhy: a reason"
SMALL = f"""
## 1 · One

```{{code-cell}} ipython3
:tags: [hide-input]

helper()
```

````{{exercise}} first
{BLOCK}
minutes: 15
````

## 2 · Two · deeper

````{{exercise}} second
{BLOCK}
minutes: 20
````

````{{exercise}} Third.method
{BLOCK}
minutes: 25
optional: lent
````
"""


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("count small", "three"),
        ("count small -first", "two"),
        ("time small", "35 min"),
        ("time small:optional", "25 min"),
        ("time small:core", "15 min"),
        ("time all:core", "15 min"),
        ("time small:deeper", "45 min"),
        ("time small:2-2 Third.method", "45 min"),
        ("time small -second", "15 min"),
        ("time first second Third.method", "1 h"),
        ("time small:3-9", ""),
    ],
)
def test_a_sum_worked_by_hand(expression, expected, small, tmp_path):
    assert calc_sum(expression) == expected
    (tmp_path / "page.md").write_text(f"{{{{{expression}}}}} {{{{y}}}}")
    assert fill(tmp_path / "page.md", IN_SOURCE) == f"{expected} {{{{y}}}}"


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The file of a chapter's source, the only one that there is."""
    monkeypatch.setattr(sums, "CHAPTERS", tmp_path)
    monkeypatch.setattr(sums, "list_chapters", lambda: ["small"])
    path = tmp_path / "source" / "small.md"
    path.parent.mkdir()
    path.write_text(SMALL, encoding="utf-8")
    forget()
    yield path
    forget()


def forget():
    sums.read_exercises.cache_clear()
    sums.find_needed.cache_clear()


def test_the_core_path_needs_what_its_cells_and_exercises_run(small, monkeypatch):
    called = {"first": (), "second": (), "Third.method": ()}
    monkeypatch.setattr(sums, "get_checks", lambda chapter: [*called])
    monkeypatch.setattr(sums, "find_called", lambda chapter, name: called[name])
    space: dict = {}
    exec("def helper(): return second()\ndef second(): return 1", space)
    monkeypatch.setattr(sums, "get_reference", lambda chapter: SimpleNamespace(**space))
    inherited = SMALL.replace("optional: lent", "inherited: true")
    for called["first"], source, needed in (
        ((), SMALL, ["second"]),
        (("Third.method",), inherited, ["second"]),
        (("Third.method",), SMALL, ["second", "Third.method"]),
    ):
        small.write_text(source, encoding="utf-8")
        forget()
        assert [exercise.name for exercise in sums.find_needed("small")] == needed
    said = "some of those as well: `second`, `Third.method` (section 2). That's about 45 min."
    assert said in calc_sum("needed small")


def test_reading_counts_what_is_shown(tmp_path, monkeypatch):
    fold = "<details>\n<summary>Solution</summary>\n\nnot these words\n\n</details>"
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": f"one two {fold} three"},
        {"cell_type": "markdown", "metadata": {}, "source": ["x\n## 1 · Title\n", "a b c"]},
        {"cell_type": "markdown", "metadata": {}, "source": "## 2 · Title · deeper\n\nd e"},
        {"cell_type": "code", "metadata": {"jupyter": {"source_hidden": True}}, "source": "x = 1"},
    ]
    (tmp_path / "small.ipynb").write_text(sums.json.dumps({"cells": cells}))
    monkeypatch.setattr(sums, "CHAPTERS", tmp_path)
    monkeypatch.setattr(sums, "WORDS_PER_MINUTE", 1)
    assert sums.count_reading("small") == 19  # a heading has four words, and two of being deeper
    assert sums.count_reading("small", "1-1") == 7
    assert sums.count_reading("small", "core") == 11
    assert sums.count_reading("small", "deeper") == 8


def test_times_are_said_and_what_is_nothing_is_refused():
    assert [say_time(n) for n in (0, 52, 58, 65, 121)] == ["", "50 min", "1 h", "1 h 05", "2 h"]
    with pytest.raises(ValueError, match="calc_nothing"):
        calc_sum("time calc_nothing")
    assert re.fullmatch(r"[\d.]+", calc_sum("points ch4_kl"))
