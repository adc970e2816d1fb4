"""The panel that a notebook shows of a run."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from IPython.display import DisplayHandle
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.course.test_trainers import make_trainer, without_seconds
from utils.panel import Panel

pytestmark = pytest.mark.takes_long  # most of them read one notebook that is run

CELLS = {
    "begin": """
import contextlib, io, json, threading
from matplotlib import pyplot
from tests.course.test_trainers import make_trainer
def make(name, phases, kind="ppo", every=1):
    return make_trainer(kind, FOLDER, name=name, total_phases=phases, samples_every=every)""",
    "train": "history = make('grpo', 3, 'grpo').train()",
    "history": "print(json.dumps(history))",
    "quiet": "history = make('quiet', 1, every=0).train()",
    "two": "history = [make(name, 1).train() for name in ('one', 'two')]",
    "captured": """
with contextlib.redirect_stdout(io.StringIO()) as printed:
    make("captured", 1).train()
print(printed.getvalue())""",
    "thread": """
thread = threading.Thread(target=make("thread", 1).train)
thread.start()
thread.join()""",
    "stopped": """
trainer = make("stopped", 3)
learn = trainer.learning_phase
def learn_once(memory):
    if trainer.phase == 1:
        raise KeyboardInterrupt
    learn(memory)
trainer.learning_phase = learn_once
with contextlib.suppress(KeyboardInterrupt):
    trainer.train()""",
    "own": """
pyplot.plot([1, 2])
make("own", 1).train()
print(pyplot.get_fignums(), pyplot.gca().lines[0].get_ydata())""",
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Run all cells in one kernel; return what each shows: the bundles, and the text it prints."""
    folder = str(tmp_path_factory.mktemp("runs"))
    sources = [source.replace("FOLDER", repr(folder)).strip() for source in CELLS.values()]
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    resources = {"metadata": {"path": Path(__file__).parents[2]}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    return {
        name: (
            [output.data for output in cell.outputs if "data" in output],
            "".join(output.get("text", "") for output in cell.outputs),
        )
        for name, cell in zip(CELLS, notebook.cells, strict=True)
    }


def assert_shows_one_panel(bundles, title, n_phases):
    picture, table = bundles
    assert picture.keys() == {"image/png", "text/plain"}
    assert title in picture["text/plain"]
    assert table.keys() == {"text/html", "text/plain"}
    assert table["text/html"].count("<tr>") == 4  # a head, the best, the median and the worst
    assert f"phase {n_phases} of" in table["text/plain"]


def test_a_notebook_shows_one_panel_and_prints_nothing(shown):
    bundles, printed = shown["train"]
    assert_shows_one_panel(bundles, "grpo, phase 3 of 3. (1) mean reward", 3)
    assert printed == ""


def test_a_panel_leaves_the_run_as_it_is_to_the_bit(shown, tmp_path):
    history = make_trainer("grpo", tmp_path, total_phases=3).train()
    assert without_seconds(json.loads(shown["history"][1])) == without_seconds(history)


def test_without_samples_there_is_a_bar_alone(shown):
    bundles, printed = shown["quiet"]
    assert bundles == []
    assert "quiet: 100%" in printed


def test_trainers_one_after_the_other_have_a_panel_each(shown):
    bundles, _ = shown["two"]
    assert_shows_one_panel(bundles[:2], "one, phase 1 of 1.", 1)
    assert_shows_one_panel(bundles[2:], "two, phase 1 of 1.", 1)


def test_output_that_is_captured_has_the_tables_of_a_terminal(shown):
    bundles, printed = shown["captured"]
    assert bundles == []
    assert "captured, phase 1 of 1: mean reward" in printed
    assert "│ median" in printed


def test_a_thread_shows_its_panel(shown):
    assert_shows_one_panel(shown["thread"][0], "thread, phase 1 of 1.", 1)


def test_a_run_that_is_stopped_keeps_its_last_state_and_says_how_to_go_on(shown):
    bundles, printed = shown["stopped"]
    assert_shows_one_panel(bundles, "stopped, phase 1 of 3, ", 1)
    assert re.search(r"phase 1 of 3, \d\d:\d\d left", bundles[0]["text/plain"])
    assert "Stopped in phase 2. To go on" in printed


def test_a_picture_that_the_reader_has_begun_stays_open(shown):
    bundles, printed = shown["own"]
    assert_shows_one_panel(bundles[:2], "own, phase 1 of 1.", 1)
    assert len(bundles) == 3
    assert printed.strip() == "[1] [1 2]"


def test_drawing_takes_a_hundredth_of_the_time(monkeypatch):
    clock, drawn = 0.0, []
    panel = Panel(trainer=None)

    def draw():
        nonlocal clock
        drawn.append(clock)
        clock += 0.5

    monkeypatch.setattr(panel, "draw", draw)
    monkeypatch.setattr("utils.panel.time.perf_counter", lambda: clock)
    while clock < 200:
        panel.update()
        clock += 1
    assert drawn == [0.0, 50.5, 101.0, 151.5]


def test_before_the_first_phase_no_time_is_told(monkeypatch):
    args = SimpleNamespace(name=None, total_phases=4)
    trainer = SimpleNamespace(args=args, phase=0, history=[{"phase": 0, "eval_reward": 0.3}])
    shown = []
    monkeypatch.setattr(DisplayHandle, "display", lambda _, bundle, **__: shown.append(bundle))
    Panel(trainer).draw()
    assert [bundle["text/plain"] for bundle in shown] == ["Plot. phase 0 of 4."]


def test_recorded_runs_are_a_band_behind_the_curves_that_have_one(monkeypatch):
    history = [{"phase": 1, "reward": 0.5, "entropy": 1.0}, {"phase": 2, "reward": 0.6}]
    recorded = [{"reward": [0.2, 0.7, 0.9]}, {"reward": [0.4, 0.3, 0.8]}]
    args = SimpleNamespace(name=None, total_phases=3)
    trainer = SimpleNamespace(args=args, phase=2, history=history, recorded=recorded)
    shown, figures = [], []
    monkeypatch.setattr(DisplayHandle, "display", lambda _, bundle, **__: shown.append(bundle))
    monkeypatch.setattr(
        "utils.panel.describe_figure", lambda figure: figures.append(figure) or "described"
    )
    Panel(trainer).draw()
    assert figures[0].get_suptitle() == "phase 2 of 3; grey: 2 recorded runs"
    bands = [list(axes.collections) for axes in figures[0].axes]
    assert [len(band) for band in bands] == [1, 0, 0, 0]
    corners = {(x, round(y, 6)) for x, y in bands[0][0].get_paths()[0].vertices}
    assert corners == {(1, 0.2), (1, 0.4), (2, 0.3), (2, 0.7), (3, 0.8), (3, 0.9)}
