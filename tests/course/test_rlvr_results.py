"""What chapter 5 says of its experiments, against the committed results."""

import statistics

import pytest

from tests.course.helpers import read_results


@pytest.fixture(scope="module")
def signature():
    """By base and loss mode, the runs of three seeds."""
    found = {}
    for run in read_results("ch5_rlvr_signature"):
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
    runs = read_results("ch5_rlvr_holes")
    for run in runs:
        if run["setting"] == "verifier with a hole":
            assert run["reward"][-1] == 1
            assert run["right"][-1] == run["held_out"] == 0
        elif run["setting"] == "verifier mended":
            assert run["held_out"] > 0.8
        else:  # cut off
            assert run["worked"][0] > 0.15
            assert run["worked"][-1] < 0.05


def compare_areas(mine, base):
    """Mean difference over the seeds, and half its 95% interval, as the chapter has it."""
    differences = [mine[seed] - base[seed] for seed in base]
    return statistics.mean(differences), 2.776 * statistics.stdev(differences) / 5**0.5


def test_three_of_twelve_changes_leave_zero_out_and_the_clip_does_for_four_updates():
    areas = {}
    for run in read_results("ch5_rlvr_ablations"):
        areas.setdefault(run["setting"], {})[run["seed"]] = run["area"]
    assert all(sorted(by_seed) == [1, 2, 3, 4, 5] for by_seed in areas.values())
    base = areas.pop("GRPO")
    found = {name: compare_areas(mine, base) for name, mine in areas.items()}
    seen = {name: mean > 0 for name, (mean, half) in found.items() if abs(mean) > half}
    assert len(found) == 12
    assert seen == {"token mean": True, "one update": False, "sequence ratio, clip of 0.2": False}
    mean, half = compare_areas(areas["four updates, no clip"], areas["four updates"])
    assert mean + half < 0


def test_dynamic_sampling_saves_a_third_of_the_updates():
    runs = [
        run for run in read_results("ch5_rlvr_ablations") if run["setting"] == "dynamic sampling"
    ]
    assert max(len(run["reward"]) for run in runs) == 8  # 12 without it
    for run in runs:
        kept = zip(run["prompts_sampled"], run["informative_frac"], strict=True)
        assert all(round(sampled * share) >= 8 for sampled, share in kept)
