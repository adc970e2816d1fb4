"""What chapter 5 says of its experiments, against the committed results."""

import json
import statistics
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "chapters" / "results"


def load(name: str) -> list[dict]:
    return json.loads((RESULTS / f"ch5_rlvr_{name}.json").read_text())


@pytest.fixture(scope="module")
def signature():
    """By base and loss mode, the runs of three seeds."""
    found = {}
    for run in load("signature"):
        found.setdefault((run["base"], run["loss_mode"]), []).append(run)
    assert all(len(runs) == 3 for runs in found.values())
    return found


def test_length_grows_where_worked_answers_are_better_and_not_in_the_control(signature):
    for run in signature["embedded", "sequence"]:
        assert run["completion_len"][-1] > 2 * run["completion_len"][0]
        assert run["before"]["accuracy_worked"] > 2 * run["before"]["accuracy_direct"]
    for run in signature["control", "sequence"] + signature["control", "token"]:
        assert run["completion_len"][-1] < run["completion_len"][0]
        assert run["before"]["accuracy_worked"] < run["before"]["accuracy_direct"]


def test_long_wrong_answers_last_longer_under_the_sequence_mean(signature):
    by_mode = {mode: signature["control", mode] for mode in ("sequence", "token")}
    for slow, fast in zip(by_mode["sequence"], by_mode["token"], strict=True):
        assert slow["seed"] == fast["seed"]
        assert slow["after"]["worked"] > fast["after"]["worked"]


def test_training_sharpens(signature):
    """pass@32 is 1 before and after; accuracy doubles."""
    for run in signature["embedded", "sequence"]:
        assert min(run["before"]["right"]) > 0
        assert min(run["after"]["right"]) > 0
        assert sum(run["after"]["right"]) > 2 * sum(run["before"]["right"])


def test_the_policy_finds_the_hole():
    runs = load("holes")
    for run in runs:
        if run["setting"] == "verifier with a hole":
            assert run["reward"][-1] == 1
            assert run["right"][-1] == run["held_out"] == 0
        elif run["setting"] == "verifier mended":
            assert run["held_out"] > 0.8
        else:  # cut off
            assert run["worked"][0] > 0.15
            assert run["worked"][-1] < 0.05


def test_without_a_clip_four_updates_are_worse():
    """By the interval of the five paired differences, as the chapter has it."""
    areas = {}
    for run in load("ablations"):
        areas.setdefault(run["setting"], {})[run["seed"]] = run["area"]
    assert all(sorted(by_seed) == [1, 2, 3, 4, 5] for by_seed in areas.values())
    clipped, free = areas["four updates"], areas["four updates, no clip"]
    differences = [free[seed] - clipped[seed] for seed in clipped]
    half = 2.776 * statistics.stdev(differences) / len(differences) ** 0.5
    assert statistics.mean(differences) + half < 0
