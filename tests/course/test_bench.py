"""The benchmarks measure what they say; nothing here is timed."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from solutions.ch0_sampling import encode_prompts
from utils.bench import comparisons, ours, trl
from utils.bench.measuring import measure_peak, run_apart
from utils.bench.models import LLAMA, Work, make_data, save_embedded, save_random
from utils.bench.report import MARKS, PUBLISHED, README, format_report, replace_tables
from utils.models.loading import EMBEDDED_MODEL

TINY = Work(n_prompts=2, group_size=2, gen_len=5)
CONTESTANTS = {"ours": ours.Contestant, "trl": trl.Contestant}


def allocate(mib: int) -> dict:
    freed = torch.ones(mib, 2**18)  # earlier peaks do not count
    del freed
    return measure_peak(lambda: torch.ones(mib, 2**18))


@pytest.mark.takes_long
def test_a_peak_is_what_the_work_adds():
    assert 190 < run_apart(allocate, 200)["added"] < 230


@pytest.fixture
def endless(tmp_path):
    return save_embedded(tmp_path / "embedded")


@pytest.mark.takes_long
def test_completions_never_end_early(endless, tmp_path):
    work = Work(n_prompts=8, group_size=8, gen_len=60)
    ours.Contestant(endless, work).check_length()
    small = LlamaConfig(**LLAMA.to_dict() | {"num_hidden_layers": 1, "vocab_size": 512})
    ours.Contestant(save_random(tmp_path / "llama", small), work).check_length()
    with pytest.raises(ValueError, match="should have 60 tokens"):
        ours.Contestant(EMBEDDED_MODEL, work).check_length()


def test_the_endless_model_is_the_embedded_one(endless):
    models = [ours.Contestant(folder, TINY).trainer.model for folder in (endless, EMBEDDED_MODEL)]
    ids = torch.arange(3, 40)[None]
    assert torch.equal(*(model.base(ids) for model in models))


def test_the_larger_model_has_the_size_of_smollm2():
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(LLAMA).num_parameters()
    assert abs(count / 135e6 - 1) < 0.05


def test_trl_does_the_same_work(endless):
    lengths, prompts = [], []
    contestant = trl.Contestant(endless, TINY)
    trainer = contestant.trainer
    score = trainer._generate_and_score_completions

    def record(inputs):
        batch = score(inputs)
        lengths.append((batch["completion_mask"].sum(-1).tolist(), "ref_per_token_logps" in batch))
        pairs = zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        prompts.extend(ids[mask.bool()].tolist() for ids, mask in pairs)
        return batch

    trainer._generate_and_score_completions = record
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    assert len(contestant.train(2)) == 2
    assert lengths == [([5] * 4, True)] * 2  # one rollout a step, scored by the reference
    model = ours.Contestant(endless, TINY).trainer.model
    ids, mask = encode_prompts(model, make_data()[0], 5, prepend_bos=True)
    known = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    assert all(prompt in known for prompt in prompts)  # with its bos
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    # Ours has queries', keys' and values' adapters apart: three A where theirs has one.
    n_ours = sum(p.numel() for p in model.trainable_parameters())
    n_theirs = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert n_ours - n_theirs == 4 * 2 * 128 * TINY.rank


@pytest.mark.parametrize("name", CONTESTANTS)
def test_a_contestant_stops_when_it_is_told_to(name):
    contestant, asked = CONTESTANTS[name](EMBEDDED_MODEL, TINY), []
    seconds = contestant.train(5, lambda step: asked.append(step) or step == 3)
    assert asked == [1, 2, 3]
    assert len(seconds) == 3
    texts = contestant.sample(["1 + 1", "2 + 2"], seed=0)
    assert texts == contestant.sample(["1 + 1", "2 + 2"], seed=0)
    assert len(texts) == 2


@pytest.mark.takes_long
def test_learning_is_said_to_be_there_only_at_the_target(monkeypatch):
    monkeypatch.setattr(comparisons, "MAX_STEPS", 4)
    monkeypatch.setattr(comparisons, "ROWS", 8)
    pairs = [(11, 12)]
    assert comparisons.learn("ours", 0.0, 0, pairs)["seconds"] is None
    monkeypatch.setattr(comparisons, "TARGET", 0.0)
    assert comparisons.learn("ours", 0.0, 0, pairs)["steps"] == 4


def test_the_readme_has_the_tables_of_the_published_results():
    readme = README.read_text()
    assert all(readme.count(mark) == 1 for mark in MARKS)
    assert replace_tables(readme, format_report(json.loads(PUBLISHED.read_text()))) == readme


def test_a_card_that_is_too_small_for_a_side_still_gets_its_table():
    measured = json.loads(PUBLISHED.read_text())["gpu"]
    small, large = measured["shapes"].values()
    small |= {side: {"error": "OutOfMemoryError: ..."} for side in small if side != "ours"}
    large["ours"] = {"error": "OutOfMemoryError: ..."}
    report = format_report({"gpu": measured})
    assert report.count("did not run: OutOfMemoryError") == 3
    assert "times as long" not in report
