"""The trainers: the first step, what training leaves alone, stopping and going on."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import torch

from solutions.ch0_sampling import get_logprobs
from solutions.ch2_ppo import RLHFArgs, RLHFTrainer, reward_fn_char_count
from solutions.ch3_grpo import (
    GrpoArgs,
    GrpoTrainer,
    calc_single_update_objective,
    measure_loss_and_gradient_at_start,
)
from tests.alternatives.ch3_grpo import objective_in_one_piece, rollout_in_one_batch
from tests.course.conftest import ARCHITECTURES
from tests.course.helpers import ONE_STEP, assert_bit_identical, get_base_weights, randomize
from utils.course.evaluation import sample_prompts
from utils.models.forward import NativeScorer, get_scorer
from utils.plotting import plot_history
from utils.rewards import call_reward_fn
from utils.run_folder import save_checkpoint

SIZES = {"total_phases": 4, "batch_size": 16, "gen_len": 10, "num_minibatches": 2}
SMALL = ONE_STEP | SIZES


def make_trainer(kind: str, folder, model=None, **overrides):
    arguments = SMALL | {"runs_dir": folder, "name": kind} | overrides
    if kind == "ppo":
        return RLHFTrainer(RLHFArgs(**arguments), model)
    return GrpoTrainer(GrpoArgs(**{"group_size": 4} | arguments), model)


def get_adapters(trainer):
    return {name: x.clone() for name, x in trainer.model.trainable_state().items()}


def assert_equal_adapters(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def without_seconds(history):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in history]


@pytest.mark.parametrize("architecture", ["embedded", *ARCHITECTURES])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_the_first_kl_is_exactly_zero_and_the_first_ratio_one(
    kind, architecture, checkpoints, tmp_path
):
    base_model = checkpoints.get(architecture, architecture)
    trainer = make_trainer(kind, tmp_path, base_model=base_model, temperature=0.7, kl_coef=0.1)
    memory = trainer.rollout_phase()
    assert torch.equal(memory.logprobs, memory.ref_logprobs)
    trainer.compute_rlhf_objective(memory.get_minibatches(trainer.generator)[0])
    assert trainer.metrics["kl_k3"] == [0.0]
    assert trainer.metrics.get("kl_exact", [0.0]) == [0.0]
    randomize(trainer.model)
    memory = trainer.rollout_phase()
    trainer.metrics.clear()
    for minibatch in memory.get_minibatches(trainer.generator):
        trainer.compute_rlhf_objective(minibatch)
    assert max(trainer.metrics["approx_kl"]) < 1e-9
    assert min(trainer.metrics["kl_k3"]) > 0


def test_one_update_per_rollout_has_a_ratio_of_exactly_one_and_no_pass_for_it(
    tmp_path, monkeypatch
):
    once = {"num_minibatches": 1, "batches_per_learning_phase": 1, "kl_coef": 0.0, "ent_coef": 0.0}
    trainer = make_trainer("grpo", tmp_path, temperature=0.7, **once)
    randomize(trainer.model)
    monkeypatch.setattr(GrpoTrainer, "score", None)
    (minibatch,) = trainer.rollout_phase().get_minibatches(trainer.generator)  # nothing is scored
    monkeypatch.undo()
    mask, adapters = minibatch.mask, trainer.model.trainable_parameters()
    logits = trainer.model(minibatch.input_ids, minibatch.attention_mask)
    logprobs = get_logprobs(logits, minibatch.input_ids, minibatch.prompt_len, 0.7)
    off = (logprobs - minibatch.logprobs)[mask]
    assert off.abs().max() < 2e-5  # the sampler's own
    minibatch.logprobs.add_(torch.randn_like(minibatch.logprobs))  # nobody reads them
    advantages = torch.randn(len(mask))
    minibatch = dataclasses.replace(minibatch, advantages=advantages)
    found = torch.autograd.grad(trainer.compute_rlhf_objective(minibatch), adapters)
    single = calc_single_update_objective(logprobs, advantages, mask)
    expected = torch.autograd.grad(single, adapters)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_measuring_at_the_start_leaves_the_trainer_as_it_was(tmp_path):
    trainer = make_trainer("grpo", tmp_path, num_minibatches=1)
    trainer.metrics["reward"].append(0.5)
    state = trainer.get_state()
    measure_loss_and_gradient_at_start(trainer)
    assert torch.equal(state["generator"], trainer.get_state()["generator"])
    assert trainer.metrics == {"reward": [0.5]}
    assert all(p.grad is None for p in trainer.model.trainable_parameters())
    trainer.args.reward_fn = lambda samples: torch.ones(len(samples))
    with pytest.raises(ValueError, match="all are equal in every group"):
        measure_loss_and_gradient_at_start(trainer)


@pytest.mark.parametrize(
    ("kind", "kinds"), [("ppo", {}), ("grpo", {"kl_kind": "k3"}), ("grpo", {"kl_kind": "exact"})]
)
def test_a_run_on_the_native_forward_is_the_run_on_the_bridge(kind, kinds, tmp_path):
    histories = []
    for path in ("native", "bridge"):
        setup = {"temperature": 0.9, "ent_coef": 0.1, "total_phases": 2} | kinds
        trainer = make_trainer(kind, tmp_path / path, **setup)
        if path == "bridge":
            trainer.model.base.register_forward_hook(lambda *_: None)  # as a reader's hook does
        assert isinstance(get_scorer(trainer.model), NativeScorer) == (path == "native")
        histories.append(trainer.train())
    for native, bridge in zip(*map(without_seconds, histories), strict=True):
        assert native == pytest.approx(bridge, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_training_moves_the_adapters_and_leaves_the_base_bit_identical(
    kind, dtype, tmp_path, monkeypatch
):
    monkeypatch.setattr("utils.tracking.plot_history", plot_history)
    trainer = make_trainer(kind, tmp_path, dtype=dtype)
    weights, before = get_base_weights(trainer.model), get_adapters(trainer)
    history = trainer.train()
    assert_bit_identical(trainer.model, weights)
    for name, after in get_adapters(trainer).items():
        assert not torch.equal(before[name], after)
        assert after.dtype == torch.float32
        assert after.isfinite().all()
    assert [row["phase"] for row in history] == [1, 2, 3, 4]
    folder = tmp_path / kind
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == history
    assert {path.name for path in folder.iterdir()} == {
        "args.json", "metrics.jsonl", "metrics.png", "checkpoint.pt", "adapter.safetensors",
    }  # fmt: skip
    assert (folder / "metrics.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_same_seed_same_run(kind, tmp_path):
    runs = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(runs))  # of the caller: must not matter
        trainer = make_trainer(kind, tmp_path, name=name, seed=seed, total_phases=2)
        runs.append((without_seconds(trainer.train()), get_adapters(trainer)))
    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert_equal_adapters(runs[0][1], runs[1][1])


@pytest.mark.parametrize(("kind", "at"), [("ppo", "reward"), ("grpo", "reward"), ("ppo", "step")])
def test_interrupted_and_resumed_is_the_same_run(kind, at, tmp_path, capsys):
    """Ctrl-C in phase 3, during the reward function or after the first of two steps."""
    calls = {"reward": 0, "step": 0}

    def press(where, n):
        calls[where] += 1
        if where == at and calls[where] == n:
            raise KeyboardInterrupt

    def reward_fn(samples):
        press("reward", n=3)
        return reward_fn_char_count(samples)

    whole = make_trainer(kind, tmp_path, name="whole", reward_fn=reward_fn_char_count)
    whole.train()
    stopped = make_trainer(kind, tmp_path, name="stopped", reward_fn=reward_fn)
    stopped.optimizer.register_step_post_hook(lambda *_: press("step", n=5))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        stopped.train()
    path = tmp_path / "stopped" / "checkpoint.pt"
    hint = f"trainer.load_checkpoint({str(path)!r})"
    assert hint in capsys.readouterr().out
    assert hint in interrupt.value.__notes__[0]
    resumed = make_trainer(kind, tmp_path, name="stopped", reward_fn=reward_fn_char_count)
    resumed.load_checkpoint(path)
    assert resumed.phase == 2
    # The interrupted trainer itself goes on as well: a notebook's cell run again.
    for trainer in (resumed, stopped):
        assert without_seconds(trainer.train()) == without_seconds(whole.history)
        assert_equal_adapters(get_adapters(trainer), get_adapters(whole))
        rows = (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["phase"] for row in rows] == [1, 2, 3, 4]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path, setup = tmp_path / "ppo" / "checkpoint.pt", {"total_phases": 1}
    given = {"base_lr": np.float64(1e-3), "lora_sites": ["attn.q"], "lora_alpha": 32}
    make_trainer("ppo", tmp_path, **setup, **given).train()
    alike = {"base_lr": 1e-3, "lora_sites": ("attn.q",), "lora_alpha": 32.0}
    same = make_trainer("ppo", tmp_path, **setup, **alike)
    same.load_checkpoint(path)
    assert same.phase == 1
    other = make_trainer("ppo", tmp_path, **setup, **alike | {"base_lr": 0.5})
    (tmp_path / "damaged.pt").write_bytes(b"PK" + b"\0" * 100)
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save({"model": torch.zeros(3)}, tmp_path / "other.pt")
    for name, said in (
        (path, "base_lr should be 0.001 as in the checkpoint, but is 0.5"),
        ("none.pt", "is not there"),
        ("damaged.pt", "should be a checkpoint"),
        ("empty.pt", "should be a checkpoint"),
        ("other.pt", "should be a trainer's checkpoint"),
    ):
        with pytest.raises(ValueError, match=said):
            other.load_checkpoint(tmp_path / name)


def test_a_new_run_does_not_overwrite_an_old_one(tmp_path):
    make_trainer("ppo", tmp_path, total_phases=1).train()
    files = {path: path.read_bytes() for path in (tmp_path / "ppo").iterdir()}
    with pytest.raises(ValueError, match="name should be new, but .* holds a run"):
        make_trainer("ppo", tmp_path, total_phases=1).train()
    assert files == {path: path.read_bytes() for path in (tmp_path / "ppo").iterdir()}
    for _ in range(2):
        make_trainer("ppo", tmp_path, name=None, total_phases=1, batch_size=2).train()
    assert len(list(tmp_path.glob("rlhf-*"))) == 2


def test_an_error_in_a_later_phase_loses_nothing_and_the_reward_function_may_be_mended(tmp_path):
    calls = []

    def broken(samples):
        calls.append(None)
        return reward_fn_char_count(samples) if len(calls) < 3 else torch.zeros(3)

    with pytest.raises(ValueError, match="reward_fn should return one reward"):
        make_trainer("ppo", tmp_path, reward_fn=broken).train()
    resumed = make_trainer("ppo", tmp_path, reward_fn=reward_fn_char_count)
    resumed.load_checkpoint(tmp_path / "ppo" / "checkpoint.pt")
    assert len(resumed.history) == 2
    assert len(resumed.train()) == 4


def test_a_crash_while_saving_leaves_the_previous_checkpoint_whole(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"trainable": 1})

    def crash(state, partial):
        partial.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(ValueError, match="runs_dir should have room for a checkpoint, .*no space"):
        save_checkpoint(path, {"trainable": 2})
    assert torch.load(path) == {"trainable": 1}
    assert list(tmp_path.iterdir()) == [path]


class Keeping(torch.nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def forward(self, samples, answers):
        return self.keep(samples, answers)


def test_reward_functions_get_what_they_name():
    samples, prompts, answers = ["a", "b"], ["p", "q"], ["1", "2"]
    got = []

    def keep(*values):
        got.append(values)
        return torch.zeros(2)

    for reward_fn, expected in (
        (lambda texts: keep(texts), (samples,)),
        (lambda samples, char=".": keep(samples, char), (samples, ".")),
        (lambda samples, *, answers: keep(samples, answers), (samples, answers)),
        (lambda *args, **kwargs: keep(*args, kwargs), (samples, {})),
        (functools.partial(lambda char, texts: keep(texts, char), "e"), (samples, "e")),
        (Keeping(keep), (samples, answers)),
        # the form that TRL uses
        (lambda prompts, completions, **kwargs: keep(prompts, completions, kwargs),
         (prompts, samples, {"answers": answers})),
        (lambda *, completions, prompts: keep(completions, prompts), (samples, prompts)),
        (lambda prompts, **kwargs: keep(prompts, kwargs),
         (prompts, {"completions": samples, "answers": answers})),
    ):  # fmt: skip
        call_reward_fn(reward_fn, samples, {"prompts": prompts, "answers": answers})
        assert got[-1] == expected


def test_tables_of_samples_are_printed(tmp_path, capsys):
    make_trainer("ppo", tmp_path, total_phases=3, samples_every=2).train()
    out = capsys.readouterr().out
    assert out.count("│ sample   │ reward") == 2
    assert "ppo, phase 1 of 3: mean reward" in out
    assert "ppo, phase 3 of 3: mean reward" in out


def test_methods_that_record_no_metrics_train_all_the_same(tmp_path, capsys):
    class Silent(GrpoTrainer):
        rollout_phase = rollout_in_one_batch.definition
        compute_rlhf_objective = objective_in_one_piece.definition

    args = GrpoArgs(**SMALL | {"group_size": 4, "samples_every": 1, "runs_dir": tmp_path})
    history = Silent(args).train()
    assert len(history) == 4
    assert "reward" not in history[0]
    assert "grad_norm" in history[0]
    assert "mean reward" not in capsys.readouterr().out


def test_wandb_is_offline_by_default(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    make_trainer("grpo", tmp_path, total_phases=1, use_wandb=True).train()
    assert list((tmp_path / "grpo" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.takes_long
def test_the_call_that_the_project_started_from_runs_and_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = GrpoArgs(use_wandb=False, kl_coef=2.5, total_phases=30, warmup_steps=0, reward_fn=reward_fn_char_count, base_lr=1e-3, gen_len=16)  # noqa: E501  # fmt: skip
    trainer = GrpoTrainer(args)

    def measure():
        samples = sample_prompts(trainer.model, ["This movie is"] * 1024, gen_len=16)
        rewards = reward_fn_char_count([text for batch in samples for text in batch.texts])
        return rewards.mean(), rewards.std() / 1024**0.5

    before, before_error = measure()
    trainer.train()
    after, after_error = measure()
    assert after - before > 5 * (before_error**2 + after_error**2) ** 0.5
    assert len(list((tmp_path / "runs").glob("grpo-*/metrics.jsonl"))) == 1
