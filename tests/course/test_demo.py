"""`make demo`, shortened: what it writes and prints."""

import json
import math

import pytest
from PIL import Image

from utils.course import demo
from utils.course.evaluation import measure_distinct_bigrams
from utils.models.corpus import held_out_pairs, review_prompts, training_pairs

SHORT = {"total_phases": 2, "batch_size": 16, "gen_len": 40, "device": "cpu"}
PPO = {
    "reward_before",
    "reward_after",
    "reward_std_before",
    "kl",
    "nll_before",
    "nll_after",
    "seconds",
}
GRPO = {
    "accuracy_before", "accuracy_after", "greedy_before", "greedy_after", "worked_before",
    "worked_after", "completion_len_before", "completion_len_after", "kl", "seconds",
}  # fmt: skip


@pytest.mark.takes_long
def test_the_demo_writes_a_summary_plots_and_a_table(tmp_path, monkeypatch):
    pairs, prompts = held_out_pairs()[:8], review_prompts()
    monkeypatch.setattr(demo, "held_out_pairs", lambda: pairs)
    monkeypatch.setattr(demo, "review_prompts", lambda: (prompts[0], prompts[1][:2]))
    summaries = [demo.run_demo(tmp_path / str(k), k, **SHORT) for k in range(2)]
    for k, summary in enumerate(summaries):
        folder = tmp_path / str(k)
        assert json.loads((folder / "summary.json").read_text()) == summary
        assert set(summary["ppo"]) >= PPO
        assert set(summary["grpo"]) >= GRPO
        for trainer in ("ppo", "grpo"):
            with Image.open(folder / f"{trainer}.png") as image:
                assert image.width > 500
            rows = (folder / trainer / "metrics.jsonl").read_text().splitlines()
            assert {"reward", "kl_k3", "entropy", "completion_len"} <= set(json.loads(rows[0]))
    one, two = demo.format_summary(summaries[:1]), demo.format_summary(summaries)
    accuracy = summaries[0]["grpo"]["accuracy_before"]
    assert f"{accuracy:.3f}" in one
    assert "[" not in one
    values = [summary["grpo"]["accuracy_before"] for summary in summaries]
    assert f"{sum(values) / 2:.3f} [{min(values):.3f}, {max(values):.3f}]" in two


def test_on_a_busy_machine_the_demo_ends_early_and_says_so(tmp_path, monkeypatch, capsys):
    """No time at all is left after the first phase, and for seven of eight prompts."""
    measured = []

    def evaluate(model, chosen, *args, **kwargs):
        measured.append(len(chosen))
        return {"reward": 0.0, "accuracy": 0.0, "kl": 0.0}

    monkeypatch.setattr(demo, "evaluate_reviews", evaluate)
    monkeypatch.setattr(demo, "evaluate_additions", evaluate)
    summary = demo.run_demo(tmp_path, 0, seconds=0, **SHORT)
    said = capsys.readouterr().out
    assert said.count("Training stopped after 1 of 2 phases, because the machine is busy") == 2
    assert said.count("Only every eighth prompt is measured") == 2
    some = [len(review_prompts()[1][::8]), len(held_out_pairs()[::8])]
    assert measured == [n for n in some for _ in range(2)]
    for name in ("ppo", "grpo"):
        assert summary[name]["phases"] == "1 of 2"
        assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 1
        assert (tmp_path / name / "adapter.safetensors").exists()
        assert len(summary[name]["samples"]) == 3


def test_seeds_are_measured_without_a_limit(tmp_path, monkeypatch):
    given = []

    def run(out, seed, seconds):
        given.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", run)
    for arguments in ([], ["--seeds", "2"], ["--seconds", "5"]):
        monkeypatch.setattr("sys.argv", ["demo", "--out", str(tmp_path), *arguments])
        with pytest.raises(SystemExit):
            demo.main()
    assert given == [demo.SECONDS, math.inf, 5]


def test_the_demo_trains_on_nothing_that_it_measures(tmp_path):
    """What is held out is in no training set (test_embedded_model.py)."""
    grpo = demo.make_grpo_trainer(tmp_path, seed=0, device="cpu")
    assert grpo.args.prompts == [f"Q: {a}+{b}\n" for a, b in training_pairs()]
    ppo = demo.make_ppo_trainer(tmp_path, seed=0, device="cpu")
    assert ppo.args.prompts == review_prompts()[0]


def test_the_demo_removes_its_own_runs_alone(tmp_path):
    (tmp_path / "ppo").mkdir()
    thesis = tmp_path / "ppo" / "thesis.txt"
    thesis.write_text("mine")
    demo.make_ppo_trainer(tmp_path, seed=0, device="cpu")
    assert thesis.exists()
    (tmp_path / "ppo" / "metrics.jsonl").write_text("")
    demo.make_ppo_trainer(tmp_path, seed=0, device="cpu")
    assert not thesis.exists()


def test_distinct_bigrams_by_hand():
    assert measure_distinct_bigrams(["a b a b", "a b"]) == pytest.approx(2 / 4)
