"""The sums that pages quote are those of the sources."""

import re

import pytest

from utils.authoring import sums
from utils.authoring.notebooks import ROOT
from utils.authoring.sums import calc_sum, fill_page, fill_source, say_time


def test_the_pages_quote_the_sums():
    pages = [path for pattern in sums.PAGES for path in ROOT.glob(pattern)]
    texts = [path.read_text(encoding="utf-8") for path in pages]
    assert sum("<!--time " in text for text in texts) >= 5
    for path, text in zip(pages, texts, strict=True):
        assert fill_page(text) == text, f"{path} quotes an old sum: make chapters"


@pytest.mark.parametrize(
    ("expression", "expected"),
    [  # added by hand from chapters/source/ch4_kl.md: 15 + 20 + 15 + 30
        ("count ch4_kl", "four"),
        ("time ch4_kl", "1 h 20"),
        ("time ch4_kl -calc_expected_gradient", "50 min"),
        ("time calc_exact_kl calc_kl_estimate", "35 min"),
        ("time ch4_kl:optional", ""),
        ("time ch4_kl:1-1", "15 min"),
    ],
)
def test_a_sum_worked_by_hand(expression, expected):
    assert calc_sum(expression) == expected


def test_reading_counts_what_is_shown(tmp_path, monkeypatch):
    fold = "<details>\n<summary>Solution</summary>\n\nnot these words\n\n</details>"
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": f"one two {fold} three"},
        {"cell_type": "markdown", "metadata": {}, "source": ["## 1 · Title\n", "a b c"]},
        {"cell_type": "code", "metadata": {"jupyter": {"source_hidden": True}}, "source": "x = 1"},
    ]
    (tmp_path / "small.ipynb").write_text(sums.json.dumps({"cells": cells}))
    monkeypatch.setattr(sums, "CHAPTERS", tmp_path)
    monkeypatch.setattr(sums, "WORDS_PER_MINUTE", 1)
    assert sums.count_reading("small") == 10  # a heading has four words
    assert sums.count_reading("small", 1) == 7


def test_times_are_said_and_what_is_nothing_is_refused():
    assert [say_time(n) for n in (0, 52, 58, 65, 121)] == ["", "50 min", "1 h", "1 h 05", "2 h"]
    assert fill_source("{{count ch4_kl}} x {{y}}") == "four x {{y}}"
    with pytest.raises(ValueError, match="calc_nothing"):
        calc_sum("time calc_nothing")
    assert re.fullmatch(r"[\d.]+", calc_sum("points ch4_kl"))
