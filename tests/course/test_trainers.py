"""The trainers: the first step, what training leaves alone, stopping and going on."""

import json

import pytest
import torch

from solutions.ch0_sampling import get_logprobs
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import RLHFArgs, RLHFTrainer, reward_fn_char_count
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from tests.course.conftest import ARCHITECTURES
from tests.course.helpers import randomize
from tests.course.test_lora import assert_bit_identical, get_base_weights

SMALL = {
    "total_phases": 4,
    "batch_size": 16,
    "gen_len": 10,
    "warmup_steps": 0,
    "num_minibatches": 2,
    "device": "cpu",
    "samples_every": 0,
}


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
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_the_first_ratio_is_exactly_one_and_the_first_kl_exactly_zero(
    kind, temperature, architecture, checkpoints, tmp_path
):
    base_model = checkpoints.get(architecture, architecture)
    trainer = make_trainer(kind, tmp_path, base_model=base_model, temperature=temperature)
    memory = trainer.rollout_phase()
    assert torch.equal(memory.logprobs, memory.ref_logprobs)
    for minibatch in memory.get_minibatches(trainer.generator):
        prompt_len = minibatch.input_ids.shape[1] - minibatch.mask.shape[1]
        with torch.no_grad():
            logits = trainer.model(minibatch.input_ids, minibatch.attention_mask)
        logprobs = get_logprobs(logits, minibatch.input_ids, prompt_len, temperature)
        assert torch.equal(logprobs, minibatch.logprobs)
        trainer.compute_rlhf_objective(minibatch)
    assert trainer.metrics["approx_kl"] == [0.0, 0.0]
    assert trainer.metrics["kl_k3"] == [0.0, 0.0]
    if kind == "ppo":
        assert trainer.metrics["kl_exact"] == [0.0, 0.0]


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_with_moved_adapters_old_is_the_policy_and_the_reference_is_the_base(kind, tmp_path):
    trainer = make_trainer(kind, tmp_path, temperature=0.7)
    randomize(trainer.model)
    memory = trainer.rollout_phase()
    prompt_len = memory.input_ids.shape[1] - memory.mask.shape[1]
    with torch.no_grad():
        policy = trainer.model(memory.input_ids, memory.attention_mask)
        base = trainer.model.base(memory.input_ids, attention_mask=memory.attention_mask)
    for logits, stored in ((policy, memory.logprobs), (base, memory.ref_logprobs)):
        expected = get_logprobs(logits, memory.input_ids, prompt_len, 0.7)
        torch.testing.assert_close(stored[memory.mask], expected[memory.mask], atol=1e-5, rtol=0)
    assert not torch.allclose(memory.logprobs[memory.mask], memory.ref_logprobs[memory.mask])


def test_the_objective_is_the_sum_of_its_parts(tmp_path):
    trainer = make_trainer("ppo", tmp_path, vf_coef=0.0, ent_coef=0.0, kl_coef=0.0)
    randomize(trainer.model)
    torch.nn.init.normal_(trainer.model.value_head.weight)
    memory = trainer.rollout_phase()
    assert memory.ref_logprobs is None
    whole = memory.get_rows(torch.arange(16))
    whole.logprobs = whole.logprobs - 0.1 * torch.rand_like(whole.logprobs)

    def measure(**coefs):
        for name in ("vf_coef", "ent_coef", "kl_coef"):
            setattr(trainer.args, name, coefs.get(name, 0.0))
        return trainer.compute_rlhf_objective(whole).item()

    surrogate = measure()
    value_loss = surrogate - measure(vf_coef=0.5)
    bonus = measure(ent_coef=0.5) - surrogate
    penalty = surrogate - measure(kl_coef=0.5)
    assert min(value_loss, bonus, penalty) > 0
    together = measure(vf_coef=0.5, ent_coef=0.5, kl_coef=0.5)
    assert together == pytest.approx(surrogate - value_loss + bonus - penalty, abs=1e-6)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_kl_is_charged_once(kl_in, tmp_path):
    trainer = make_trainer("ppo", tmp_path, kl_in=kl_in, kl_coef=10.0, normalize_reward=False)
    randomize(trainer.model)
    charged = trainer.rollout_phase()
    total = charged.returns[:, 0]  # with gamma 1 and V = 0: of the GAE, so only compared
    trainer.args.kl_coef = 0.0
    trainer.generator.manual_seed(0)
    free = trainer.rollout_phase()
    assert torch.equal(total, free.returns[:, 0]) == (kl_in == "loss")
    trainer.args.kl_coef = 10.0
    trainer.metrics.clear()
    trainer.compute_rlhf_objective(charged.get_rows(torch.arange(16)))
    assert ("kl_exact" in trainer.metrics) == (kl_in == "loss")


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_training_moves_the_adapters_and_leaves_the_base_bit_identical(kind, tmp_path):
    trainer = make_trainer(kind, tmp_path)
    weights, before = get_base_weights(trainer.model), get_adapters(trainer)
    history = trainer.train()
    assert_bit_identical(trainer.model, weights)
    after = get_adapters(trainer)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert [row["phase"] for row in history] == [1, 2, 3, 4]
    folder = tmp_path / kind
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == history
    assert {path.name for path in folder.iterdir()} == {
        "metrics.jsonl", "metrics.png", "checkpoint.pt", "adapter.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_same_seed_same_run(kind, tmp_path):
    runs = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(runs))  # of the caller: must not matter
        trainer = make_trainer(kind, tmp_path, name=name, seed=seed, total_phases=2)
        runs.append((without_seconds(trainer.train()), get_adapters(trainer)))
    assert runs[0][0] == runs[1][0] != runs[2][0]
    assert_equal_adapters(runs[0][1], runs[1][1])


class Interrupting:
    """A reward function during whose third call Ctrl-C is pressed."""

    def __init__(self, at: int | None):
        self.calls, self.at = 0, at

    def __call__(self, samples):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return reward_fn_char_count(samples)


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_interrupted_and_resumed_is_the_same_run(kind, tmp_path, capsys):
    whole = make_trainer(kind, tmp_path, name="whole", reward_fn=Interrupting(None))
    whole.train()
    stopped = make_trainer(kind, tmp_path, name="stopped", reward_fn=Interrupting(3))
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    path = tmp_path / "stopped" / "checkpoint.pt"
    assert f"trainer.load_checkpoint({str(path)!r})" in capsys.readouterr().out
    resumed = make_trainer(kind, tmp_path, name="stopped", reward_fn=Interrupting(None))
    resumed.load_checkpoint(path)
    assert resumed.phase == 2
    assert without_seconds(resumed.train()) == without_seconds(whole.history)
    assert_equal_adapters(get_adapters(resumed), get_adapters(whole))
    rows = (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["phase"] for row in rows] == [1, 2, 3, 4]


def test_interrupted_in_the_middle_of_learning_loses_that_phase_only(tmp_path):
    whole = make_trainer("ppo", tmp_path, name="whole")
    whole.train()
    stopped = make_trainer("ppo", tmp_path, name="stopped")
    steps = []

    def interrupt(*_):
        steps.append(None)
        if len(steps) == 5:  # the first of phase 3's two
            raise KeyboardInterrupt

    stopped.optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = make_trainer("ppo", tmp_path, name="stopped")
    resumed.load_checkpoint(tmp_path / "stopped" / "checkpoint.pt")
    resumed.train()
    assert_equal_adapters(get_adapters(resumed), get_adapters(whole))


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    make_trainer("ppo", tmp_path, total_phases=1).train()
    other = make_trainer("ppo", tmp_path, total_phases=1, base_lr=0.5)
    with pytest.raises(
        ValueError, match=r"base_lr should be 0.001 as in the checkpoint, but is 0.5"
    ):
        other.load_checkpoint(tmp_path / "ppo" / "checkpoint.pt")
    with pytest.raises(ValueError, match="is not there"):
        other.load_checkpoint(tmp_path / "none.pt")
    (tmp_path / "damaged.pt").write_bytes(b"PK" + b"\0" * 100)
    with pytest.raises(ValueError, match="should be a checkpoint"):
        other.load_checkpoint(tmp_path / "damaged.pt")


def test_without_a_kl_term_the_reference_never_runs(tmp_path, monkeypatch):
    def refuse(self):
        raise AssertionError("the reference ran")

    monkeypatch.setattr(TransformerWithLora, "reference", refuse)
    trainer = make_trainer("grpo", tmp_path, kl_coef=0.0, total_phases=1)
    assert trainer.rollout_phase().ref_logprobs is None
    assert "kl_k3" not in trainer.train()[0]


def test_exact_kl_in_grpo(tmp_path):
    trainer = make_trainer(
        "grpo", tmp_path, kl_kind="exact", kl_coef=0.5, total_phases=2, num_minibatches=1
    )
    history = trainer.train()
    assert history[0]["kl_exact"] == 0.0
    assert history[1]["kl_exact"] > 0


def test_groups_share_a_prompt_and_answers_follow_it(tmp_path):
    seen = []

    def reward_fn(samples, answers):
        seen.extend(answers)
        return torch.arange(float(len(samples)))

    prompts = [f"Q: {a}+11\n" for a in range(10, 40)]
    answers = [str(a + 11) for a in range(10, 40)]
    trainer = make_trainer("grpo", tmp_path, prompts=prompts, answers=answers, reward_fn=reward_fn)
    memory = trainer.rollout_phase()
    prompt_len = memory.input_ids.shape[1] - memory.mask.shape[1]
    texts = trainer.model.tokenizer.batch_decode(
        memory.input_ids[:, :prompt_len], skip_special_tokens=True
    )
    for start in range(0, 16, 4):
        assert len(set(texts[start : start + 4])) == 1
    assert [text.split("+")[0] for text in texts] == [f"Q: {int(a) - 11}" for a in seen]
    assert len(set(texts)) > 1


def test_tables_of_samples_are_printed(tmp_path, capsys):
    make_trainer("ppo", tmp_path, total_phases=3, samples_every=2).train()
    out = capsys.readouterr().out
    assert out.count("│   reward │ prompt") == 2
    assert "phase 1, mean reward" in out
    assert "phase 3, mean reward" in out


def test_wandb_is_offline_by_default(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    make_trainer("grpo", tmp_path, total_phases=1, use_wandb=True).train()
    assert list((tmp_path / "grpo" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_bfloat16_trains(kind, architecture, checkpoints, tmp_path):
    trainer = make_trainer(
        kind, tmp_path, base_model=checkpoints[architecture], dtype=torch.bfloat16, total_phases=1
    )
    weights = get_base_weights(trainer.model)
    before = get_adapters(trainer)
    trainer.train()
    assert_bit_identical(trainer.model, weights)
    after = get_adapters(trainer)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(x.dtype == torch.float32 and x.isfinite().all() for x in after.values())


def test_the_call_that_the_project_started_from_runs_and_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = GrpoArgs(use_wandb=False, kl_coef=2.5, total_phases=30, warmup_steps=0, reward_fn=reward_fn_char_count, base_lr=1e-3, gen_len=16)  # noqa: E501  # fmt: skip
    history = GrpoTrainer(args).train()
    rewards = [row["reward"] for row in history]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    spread = sum(row["reward_std"] for row in history[:3]) / 3
    # three phases of 128 samples a side: five standard errors of the difference
    assert last - first > 5 * spread * (2 / (3 * 128)) ** 0.5
    assert len(list((tmp_path / "runs").glob("grpo-*/metrics.jsonl"))) == 1
