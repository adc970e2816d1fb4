"""The benchmarks measure what they say; nothing here is timed."""

import json

import pytest
import torch
from transformers import GPT2LMHeadModel

from solutions.ch0_sampling import encode_prompts
from utils.bench.measuring import get_ratios, measure_peak, run_apart, take_turns
from utils.bench.memory import store_reference_logits
from utils.bench.models import SIZES, Work, make_config, make_data, save_embedded, save_random
from utils.bench.report import MARKS, PUBLISHED, README, format_report, replace_tables
from utils.bench.trainers import check_length, make_trainer, run_step
from utils.bench.trl import make_trl_trainer

TINY = Work(n_prompts=2, group_size=2, gen_len=5)


def test_sides_take_turns_and_the_first_round_is_not_counted():
    calls = []
    seconds = take_turns({side: lambda side=side: calls.append(side) for side in "ab"}, 3)
    assert calls == ["a", "b"] * 4
    assert {side: len(values) for side, values in seconds.items()} == {"a": 3, "b": 3}
    assert get_ratios([2.0, 9.0, 8.0], [1.0, 3.0, 1.0]) == [2.0, 3.0, 8.0]


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
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_completions_never_end_early(endless, tmp_path, kind):
    work = Work(n_prompts=8, group_size=8, gen_len=60)
    check_length(make_trainer(endless, work, kind), work)
    random = save_random(tmp_path / "random", 1, 16, 2, 512)
    check_length(make_trainer(random, work, kind), work)
    with pytest.raises(ValueError, match="should have 60 tokens"):
        check_length(make_trainer("embedded", work, kind), work)


def test_the_endless_model_is_the_embedded_one(endless):
    ours = make_trainer(endless, TINY).model.base
    embedded = make_trainer("embedded", TINY).model.base
    ids = torch.arange(3, 40)[None]
    assert torch.equal(ours(ids), embedded(ids))


@pytest.mark.parametrize("name", SIZES)
def test_the_sizes_are_what_they_are_called(name):
    with torch.device("meta"):
        count = GPT2LMHeadModel(make_config(*SIZES[name])).num_parameters()
    assert abs(count / 1e6 / float(name.removesuffix("M")) - 1) < 0.05


def test_trl_does_the_same_work(endless, tmp_path):
    lengths, prompts = [], []
    trainer, clock = make_trl_trainer(endless, tmp_path, TINY, 2)
    score = trainer._generate_and_score_completions

    def record(inputs):
        batch = score(inputs)
        lengths.append((batch["completion_mask"].sum(-1).tolist(), "ref_per_token_logps" in batch))
        pairs = zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        prompts.extend(ids[mask.bool()].tolist() for ids, mask in pairs)
        return batch

    trainer._generate_and_score_completions = record
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert lengths == [([5] * 4, True)] * 2  # one rollout a step, scored by the reference
    assert len(clock.seconds) == 2
    model = make_trainer(endless, TINY).model
    ids, mask = encode_prompts(model, make_data()[0], 5, prepend_bos=True)
    known = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    assert all(prompt in known for prompt in prompts)  # with its bos
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    # Ours has queries', keys' and values' adapters apart: three A where theirs has one.
    ours = sum(p.numel() for p in make_trainer(endless, TINY).model.trainable_parameters())
    theirs = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert ours - theirs == 4 * 2 * 128 * TINY.rank


def test_the_textbook_way_computes_the_same_objective(endless):
    ours, textbook = (make_trainer(endless, TINY, "ppo", base_lr=0.1) for _ in range(2))
    store_reference_logits(textbook)
    for trainer in (ours, textbook):
        for tensor in trainer.model.trainable_state().values():
            tensor.copy_(torch.linspace(-0.05, 0.05, tensor.numel()).view_as(tensor))
        run_step(trainer)
    for name in ("reward", "objective", "grad_norm"):
        assert ours.metrics[name] == pytest.approx(textbook.metrics[name], rel=1e-5)
    assert ours.metrics["kl_exact"][0] > 0


def test_the_readme_has_the_tables_of_the_published_results():
    readme = README.read_text()
    assert all(readme.count(mark) == 1 for mark in MARKS)
    assert replace_tables(readme, format_report(json.loads(PUBLISHED.read_text()))) == readme
