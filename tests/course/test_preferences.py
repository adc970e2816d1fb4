"""Chapter 6 against TRL, enumeration and small files; what chapter 6 says of its recorded runs."""

import json
import re

import pytest
import torch
from datasets import Dataset
from torch.testing import assert_close

from chapters.experiments import ch6_preferences_runs
from solutions.ch6_preferences import (
    PickedGrpoArgs,
    PickedGrpoTrainer,
    RewardModel,
    calc_dpo_loss,
    calc_preference_accuracy,
    calc_preference_loss,
    encode_completions,
    make_preferences,
    make_reward_fn,
    reward_fn_true,
    sum_logprobs,
    train_reward_model,
)
from tests.course.helpers import read_page, read_results, write_lines
from tests.oracles.trl import calc_trl_dpo_loss, calc_trl_reward_loss
from utils.course import own_preferences
from utils.models.corpus import review_prompts
from utils.preferences import Preferences, load_preferences

TRAIN, HELD = review_prompts()


# --- Against TRL --------------------------------------------------------------------------------


def assert_same_gradients(ours, loss, theirs, trl_loss):
    assert_close(loss, trl_loss, rtol=1e-6, atol=1e-6)
    for mine, other in zip(
        torch.autograd.grad(loss, ours), torch.autograd.grad(trl_loss, theirs), strict=True
    ):
        assert_close(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("beta", [0.05, 0.1, 1.0])
def test_dpo_is_that_of_trl(beta):
    torch.manual_seed(0)
    ref = [-30 * torch.rand(6) - 5 for _ in range(2)]
    ours = [(x + 3 * torch.randn(6)).requires_grad_() for x in ref]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    loss, *rewards = calc_dpo_loss(*ours, *ref, beta=beta)
    trl_loss, *trl_rewards = calc_trl_dpo_loss(*theirs, *ref, beta)
    assert_same_gradients(ours, loss, theirs, trl_loss)
    assert [x.mean().item() for x in rewards] == pytest.approx(trl_rewards, rel=1e-6)


def test_the_preference_loss_is_that_of_trl():
    torch.manual_seed(0)
    ours = [torch.randn(9, requires_grad=True) for _ in range(2)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    trl_loss, trl_accuracy = calc_trl_reward_loss(*theirs)
    assert_same_gradients(ours, calc_preference_loss(*ours), theirs, trl_loss)
    assert calc_preference_accuracy(*(x.detach() for x in ours)) == pytest.approx(trl_accuracy)


# --- Texts as ids -------------------------------------------------------------------------------


def test_a_completion_is_scored_as_if_it_stood_alone(embedded):
    prompts, texts = [HELD[0], "A", HELD[1]], [" wonderful.", " plot. It was long.", ""]
    for layer in embedded.adapters.values():
        layer.lora_B.data.normal_(std=0.02)
    together = sum_logprobs(embedded, encode_completions(embedded, prompts, texts))
    tokenizer = embedded.tokenizer

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        start = [tokenizer.bos_token_id, *encode(prompt)]
        ids = [*start, *encode(text), tokenizer.eos_token_id]
        logp = embedded(torch.tensor([ids])).log_softmax(-1)[0]
        alone = sum(logp[t - 1, ids[t]] for t in range(len(start), len(ids)))
        assert_close(together[i], alone, rtol=1e-5, atol=1e-4)


def test_completions_beyond_the_context_are_refused(embedded):
    with pytest.raises(ValueError, match="context"):
        encode_completions(embedded, ["A"], ["plot " * embedded.cfg.n_ctx])


# --- The simulated person -----------------------------------------------------------------------


def test_the_true_reward_by_hand():
    texts = ["The plot was wonderful.", "Wonderful! wonderful", "bad and perfect", "a plot", ""]
    assert_close(reward_fn_true(texts), torch.tensor([1.5, 0.5, -1.0, 0.0, 0.0]))
    assert reward_fn_true(["great great great"], repeat_penalty=3.0).item() < -4


def test_choices_are_as_noisy_as_bradley_and_terry_say(embedded):
    pairs, ceiling = make_preferences(embedded, TRAIN, 300, seed=3)
    again, _ = make_preferences(embedded, TRAIN, 300, seed=3)
    assert pairs == again
    chosen, rejected = reward_fn_true([*pairs.chosen]), reward_fn_true([*pairs.rejected])
    margin = (chosen - rejected).abs() / 2
    assert ceiling == pytest.approx(margin.sigmoid().mean().item(), abs=1e-6)
    error = (margin.sigmoid() * (1 - margin.sigmoid())).sum().sqrt() / len(pairs)
    agreed = calc_preference_accuracy(chosen, rejected)
    assert abs(agreed - ceiling) < 4 * error


# --- Reward models and policies -----------------------------------------------------------------


@pytest.mark.takes_long
def test_a_reward_model_learns_and_keeps_its_scale(embedded):
    pairs, _ = make_preferences(embedded, TRAIN, 160, seed=1)
    held_pairs, _ = make_preferences(embedded, HELD, 200, seed=2)
    torch.manual_seed(1)
    model = RewardModel.from_pretrained("embedded", device="cpu")
    train_reward_model(model, pairs, seed=1)
    reward_fn = make_reward_fn(model)
    n = len(held_pairs)
    rewards = reward_fn([*held_pairs.chosen, *held_pairs.rejected], [*held_pairs.prompts] * 2)
    assert calc_preference_accuracy(rewards[:n], rewards[n:]) > 0.65
    on_training = reward_fn([*pairs.chosen, *pairs.rejected], [*pairs.prompts] * 2)
    assert_close(on_training.mean(), torch.tensor(0.0), rtol=0, atol=1e-4)
    assert_close(on_training.std(), torch.tensor(1.0), rtol=0, atol=1e-4)


def test_a_picked_group_is_compared_with_its_pool(embedded, tmp_path):
    sizes = {"batch_size": 8, "group_size": 4, "pool_size": 16, "num_minibatches": 1}
    setup = {"prompts": TRAIN[:3], "reward_fn": lambda samples: reward_fn_true(samples)}
    setup |= {"pick_temperature": 0.1, "runs_dir": tmp_path, "device": "cpu"}
    pool, kept = (
        PickedGrpoTrainer(PickedGrpoArgs(**sizes, **setup, baseline=baseline)).rollout_phase()
        for baseline in ("pool", "kept")
    )
    assert torch.equal(pool.input_ids, kept.input_ids)
    assert (pool.advantages.view(2, 4).mean(-1) > 0.5).all()
    assert_close(kept.advantages.view(2, 4).mean(-1), torch.zeros(2), rtol=0, atol=1e-3)


# --- Files of preferences -----------------------------------------------------------------------

CHAT = [{"role": "user", "content": "Hi"}]
GOOD, BAD = [{"role": "assistant", "content": text} for text in ("Hello!", "No.")]


def test_the_shapes_that_files_have(tmp_path):
    rows = [
        {"prompt": "A", "chosen": " b", "rejected": " c", "source": "ignored"},
        {"prompt": CHAT, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Hi", "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [*CHAT, GOOD], "rejected": [*CHAT, BAD]},
        {"prompt": CHAT, "chosen": [*CHAT, GOOD], "rejected": [*CHAT, BAD]},
        {"prompt": "Hi", "chosen": [*CHAT, GOOD], "rejected": [*CHAT, BAD]},
    ]
    found = load_preferences(write_lines(tmp_path / "pairs.jsonl", rows))
    assert found.prompts[0] == "A"
    assert all(prompt == CHAT for prompt in found.prompts[1:])
    assert list(found.chosen) == [" b"] + ["Hello!"] * 5
    assert list(found.rejected) == [" c"] + ["No."] * 5
    assert len(load_preferences(tmp_path / "pairs.jsonl", max_rows=2)) == 2


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("{", "JSON"),
        ("[1]", "object"),
        ('{"prompt": "A", "chosen": "b"}', "rejected"),
        ('{"prompt": "A", "chosen": "b", "rejected": 3}', "rejected"),
        ('{"chosen": "b", "rejected": "c"}', "prompt"),
        (json.dumps({"prompt": "A", "chosen": "b", "rejected": [BAD]}), "both"),
        (json.dumps({"chosen": [GOOD], "rejected": [BAD]}), "before"),
        (json.dumps({"chosen": [*CHAT, GOOD], "rejected": [BAD]}), "last message"),
        (json.dumps({"prompt": "No", "chosen": [*CHAT, GOOD], "rejected": [*CHAT, BAD]}), "before"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, named):
    path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "A", "chosen": "b", "rejected": "c"}])
    path.write_text(path.read_text() + "\n" + row + "\n")
    with pytest.raises(ValueError, match=rf"pairs\.jsonl, row 3.*{named}"):
        load_preferences(path)


def test_parquet_is_read_through_datasets(tmp_path):
    rows = {"prompt": ["A", "B"], "chosen": ["c", "d"], "rejected": ["e", "f"]}
    Dataset.from_dict(rows).to_parquet(tmp_path / "pairs.parquet")
    assert load_preferences(tmp_path / "pairs.parquet").chosen == ("c", "d")


def test_empty_and_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl is not there"):
        load_preferences(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="at least one"):
        load_preferences(write_lines(tmp_path / "empty.jsonl", []))
    with pytest.raises(ValueError, match="equal lengths"):
        Preferences(["A"], ["b"], [])


# --- Choosing -----------------------------------------------------------------------------------

CANDIDATES = Preferences(["P0", "P1", CHAT, "P3"], ["good"] * 4, ["poor"] * 4)


def test_typed_choices_survive_a_stop_and_an_edit_by_hand(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.jsonl"
    assert own_preferences.load_own_preferences(CANDIDATES, path) is CANDIDATES
    assert "simulated" in capsys.readouterr().out
    answers = iter(["1", "what?", "2", "q", "1", "1"])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    own_preferences.ask_for_preferences(CANDIDATES, path, buttons=False)
    assert "2 choices" in capsys.readouterr().out
    lefts = [own_preferences.get_sides(CANDIDATES, i) for i in range(4)]
    mine = own_preferences.load_own_preferences(CANDIDATES, path)
    assert list(mine.chosen) == [lefts[0][0], lefts[1][1]]
    path.write_text(path.read_text().rstrip("\n"))  # as an editor may
    own_preferences.ask_for_preferences(CANDIDATES, path, buttons=False)
    assert list(load_preferences(path).prompts) == list(CANDIDATES.prompts)
    own_preferences.ask_for_preferences(CANDIDATES, path, buttons=False)  # asks nothing more
    assert "All 4" in capsys.readouterr().out
    others = Preferences(["Q"] * 4, ["good"] * 4, ["poor"] * 4)
    own_preferences.ask_for_preferences(others, path, buttons=False)
    assert "other pairs" in capsys.readouterr().out


def test_clicked_choices_are_saved_one_by_one_and_both_sides_get_the_good_one(tmp_path):
    path = tmp_path / "mine.jsonl"
    box = own_preferences._Buttons(CANDIDATES, path, 0)
    box.show_pair()
    for i in range(4):
        sides = own_preferences.get_sides(CANDIDATES, i)
        assert all(side in text.value for side, text in zip(sides, box.texts, strict=True))
        box.buttons[i % 2].click()
        assert load_preferences(path).chosen[i:] == (sides[i % 2],)
    assert "Done" in box.title.value
    many = Preferences(["P"] * 200, ["good"] * 200, ["poor"] * 200)
    lefts = [own_preferences.get_sides(many, i)[0] for i in range(200)]
    assert 70 < lefts.count("good") < 130


# --- What the chapter says of its runs ----------------------------------------------------------

RUNS = read_results("ch6_preferences_runs")
SOURCE = read_page("chapters/source/ch6_preferences.md")


def get_by_seed(name):
    return {run["seed"]: run for run in RUNS if run["run"] == name}


def test_every_run_of_the_script_is_recorded_with_three_seeds():
    assert {run["run"] for run in RUNS} == set(ch6_preferences_runs.RUNS)
    for name in ch6_preferences_runs.RUNS:
        assert get_by_seed(name).keys() == {1, 2, 3}, name
    named = re.findall(r'get_(?:runs|curves)\("([^"{]+)"', SOURCE)
    listed = re.search(r"order = \[(.*?)\]", SOURCE, re.DOTALL)
    named += re.findall(r'"([^"]+)"', listed[1])
    assert len(named) > 20
    assert {*named} <= set(ch6_preferences_runs.RUNS)


def test_a_reward_model_is_below_its_ceiling_and_a_baseline_of_the_kept_makes_the_truth_fall():
    for run in get_by_seed("reward model").values():
        assert 0.74 < run["accuracy"] < run["ceiling"] < 0.82
    base, pool = get_by_seed("base"), get_by_seed("picked GRPO, T 0.5, pool")
    for seed, run in get_by_seed("picked GRPO, T 0.5, kept").items():
        assert run["true"] < base[seed]["true"] < pool[seed]["true"]


def test_a_small_beta_breaks_the_samples_and_not_the_accuracy():
    large, small = get_by_seed("DPO, beta 0.5"), get_by_seed("DPO, beta 0.05")
    for seed, run in large.items():
        assert run["true"] - small[seed]["true"] > 1.2
        assert run["kl"] < 3
        assert small[seed]["kl"] > 25
        assert abs(run["accuracy"] - small[seed]["accuracy"]) < 0.05
        chosen = small[seed]["steps"]["chosen"]
        assert sum(chosen[-5:]) / 5 < sum(chosen[:5]) / 5 - 10


def test_without_a_kl_term_the_truth_falls_and_the_reward_model_does_not_notice():
    pairs = {"GRPO, beta 0.0": "GRPO", "GRPO, beta 0.0, 60 phases": "GRPO", "PPO, beta 0.0": "PPO"}
    for name, kind in pairs.items():
        held = get_by_seed(f"{kind}, beta 0.3")
        for seed, run in get_by_seed(name).items():
            best = max(point["rm"] for point in run["curve"])
            assert run["rm"] > best - 0.2
            assert held[seed]["true"] > run["true"] + 1
    for name in ("GRPO, beta 0.0, 60 phases", "PPO, beta 0.0"):  # not yet in all after thirty
        for run in get_by_seed(name).values():
            peak = max(run["curve"], key=lambda point: point["train_true"])  # on other prompts
            assert peak["true"] - run["true"] > 1
    held, free = (get_by_seed(f"GRPO, beta {beta}, 60 phases") for beta in (0.3, 0.0))
    assert len(held) == 3
    assert all(run["true"] > free[seed]["true"] + 1.5 for seed, run in held.items())
