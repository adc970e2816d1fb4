"""The recorded runs on a real model, and what the README files say of them."""

import pytest

from tests.course.helpers import read_page, read_results
from utils.plotting import format_spread

RUNS = read_results("real_runs")
ROWS = {  # of the table in solutions/README.md: measurement, key
    "sums": [
        ("share of right sums, sampled", "heldout"),
        ("share of right sums, greedy", "greedy"),
    ],
    "mood": [("VADER's score, from -1 to 1", "heldout"), ("distinct bigrams", "distinct_bigrams")],
}
ROWS["mood_ppo"] = ROWS["mood"]


def spread(task: str, key: str, digits: int = 2) -> str:
    return format_spread([run[key] for run in RUNS if run["task"] == task], digits)


@pytest.mark.parametrize("task", ROWS)
def test_the_readme_files_have_the_recorded_figures(task):
    table = read_page("solutions/README.md")
    table = table[table.index("## What `make real` measures") :]
    part = table[table.index(f"| `{task}`,") :]
    nll = ("nll under the base, nats per token", "nll")
    for label, key in (*ROWS[task], nll):
        line = f" {label} | {spread(task, f'{key}_before')} | {spread(task, f'{key}_after')} |"
        assert line in part, line
    assert f"| KL from the base, nats per token | 0 | {spread(task, 'kl')} |" in part
    seconds = spread(task, "seconds", 0)
    assert f"| seconds of training | | {seconds} |" in part
    first_page = read_page("README.md")
    ends = [spread(task, f"heldout_{when}") for when in ("before", "after")]
    assert f"| {ends[0]} | {ends[1]} | {seconds} |" in first_page


def test_three_seeds_of_each_run_are_recorded_and_learn():
    assert {(run["task"], run["seed"]) for run in RUNS} == {
        (task, seed) for task in ROWS for seed in (1, 2, 3)
    }
    for run in RUNS:
        gain = run["heldout_after"] - run["heldout_before"]
        assert gain > 0.4
        assert run["task"] != "sums" or run["heldout_after"] > 2 * run["heldout_before"]
        assert len(run["rewards"]) == len(run["phase_seconds"])


def test_the_page_on_gpus_has_what_was_measured_there():
    found = read_results("gpu_runs")
    page = read_page("solutions/gpu.md").replace("\n", " ")
    sums, mood = found["real"]
    held = [
        [f"{run[f'heldout_{when}']:.2f}" for when in ("before", "after")] for run in (sums, mood)
    ]
    assert (
        f"in {sums['seconds']:.0f} seconds, from {held[0][0]} to {held[0][1]} on held-out" in page
    )
    greedy = f"{sums['greedy_before']:.2f} to {sums['greedy_after']:.2f}"
    assert f"greedy from {greedy}" in page
    assert f"takes {mood['seconds']:.0f} seconds instead of" in page
    assert f"from {held[1][0]} to {held[1][1]}. A few" in page
    peak = f"{found['memory']['peak_gib']} GB at the peak"
    assert peak in page
    assert peak in read_page("chapters/source/ch7_scale.md")
