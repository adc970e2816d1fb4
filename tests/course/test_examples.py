"""The examples: rewards, data that fits them, options that are read, and the notebook."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest

from utils.authoring import own
from utils.authoring.notebooks import run_cells
from utils.rewards import call_reward_fn
from utils.train.data import load_function, load_rows
from utils.train.options import make_args
from utils.train.parsing import parse

pytestmark = pytest.mark.takes_long

EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = {"prompts.jsonl": "eval.jsonl", "chat.jsonl": "chat_eval.jsonl"}


@pytest.fixture
def here(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("rewards", None)


@pytest.mark.parametrize(
    ("text", "form", "right", "price"),
    [("A: 46", 1, 1, 0), ("A: 47", 1, 0, 0), ("46", 0, 0, 0), ("", 0, 0, 0), ("A: 46 ", 1, 1, 0),
     ("ones 2+4=6 tens 1+3=4 sum 40+6=46\nA: 46", 1, 1, -0.29), ("A: 46\nA: 4", 1, 0, -0.0),
     ("So A: 46", 0, 0, 0), ("A: 46\nQ: 1+1", 0, 0, -0.02), ("x" * 500, 0, 0, -1)],
)  # fmt: skip
def test_the_rewards(text, form, right, price, here):
    for completion in (text, [{"role": "assistant", "content": text}]):  # as TRL has them
        columns = {"answer": [46], "prompts": ["Q: 12+34\n"]}
        found = [
            call_reward_fn(load_function(f"rewards:{name}"), [completion], columns).item()
            for name in ("has_format", "is_right", "price_of_length")
        ]
        assert found == pytest.approx([form, right, price])


@pytest.mark.parametrize(("train", "held_out"), DATA.items())
def test_the_data_is_right_and_what_is_held_out_is_not_trained_on(train, held_out, here):
    rows = {name: load_rows(name) for name in (train, held_out)}
    sums = {}
    for name, found in rows.items():
        asked = [x["prompt"] if isinstance(x["prompt"], str) else x["prompt"][-1]["content"]
                 for x in found]  # fmt: skip
        numbers = [sorted(map(int, "".join(c if c.isdigit() else " " for c in text).split()))
                   for text in asked]  # fmt: skip
        assert [sum(pair) for pair in numbers] == [row["answer"] for row in found]
        sums[name] = {tuple(pair) for pair in numbers}
    assert not sums[train] & sums[held_out]


@pytest.mark.parametrize("name", ["train.yaml", "chat.yaml"])
def test_the_options_are_read(name, here):
    command = parse(["grpo", "--config", name])
    args = make_args(command)
    assert len(args.prompts) == len(load_rows(command.data))
    assert command.reward_weights == [0.2, 1.0, 0.2]
    assert args.base_lr in (3e-3, 1e-3)


def test_the_notebook_is_its_source():
    made, kept = own.build(), nbformat.read(EXAMPLES / "own.ipynb", as_version=4)
    assert [(c.cell_type, c.source) for c in kept.cells] == [
        (c.cell_type, c.source) for c in made.cells
    ]
    outputs = json.dumps([c.get("outputs") for c in kept.cells])
    assert str(EXAMPLES.parent) not in outputs
    assert "error" not in outputs


def test_running_the_notebook_trains_and_exports(monkeypatch):
    folder = EXAMPLES / "own-test"  # inside of the course, where the notebook looks for it
    monkeypatch.setenv("OWN_PHASES", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder.mkdir()
    try:
        done = run_cells(own.build(), folder, os.environ)
        names = {p.name for p in (folder / "own").iterdir()}
    finally:
        shutil.rmtree(folder)
    shown = "".join(o.get("text", "") for c in done.cells for o in c.get("outputs", []))
    assert "phase   2: share right" in shown
    assert "before: the base" in shown
    assert re.search(r"the export, greedy, on held-out prompts: 0\.[4-9]", shown)
    assert {"prompts.jsonl", "eval.jsonl", "compare.html", "runs"} <= names
