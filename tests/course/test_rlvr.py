"""Chapter 5's solutions against TRL, enumeration and chapter 3."""

import itertools

import pytest
import torch

from solutions.ch0_sampling import Samples
from solutions.ch2_ppo import ReplayMinibatch
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer, calc_grpo_objective, group_advantages
from solutions.ch5_rlvr import (
    RlvrArgs,
    RlvrTrainer,
    aggregate_tokens,
    calc_rlvr_objective,
    calc_sequence_ratio,
    extract_answer,
    find_finished,
    join_samples,
    leave_one_out_advantages,
    pass_at_k,
    reward_fn_correct,
    reward_fn_format,
    select_informative_groups,
)
from tests.course.helpers import randomize
from tests.oracles.trl import calc_trl_loss
from tests.support.inputs import poison, ragged_mask
from utils.grading.checks import Rng
from utils.models.corpus import addition_prompt, documents, training_pairs
from utils.rewards import is_worked, reward_fn_addition

# --- Rewards ------------------------------------------------------------------------------------


def test_every_addition_of_the_corpus_has_its_answer():
    additions = [text for text in documents(2000, seed=3) if text.startswith("Q: ")]
    completions = [text.split("\n", 1)[1] for text in additions]
    answers = [text.rsplit(" ", 1)[1] for text in additions]
    assert [extract_answer(text) for text in completions] == answers
    worked = reward_fn_format(completions)
    assert worked.tolist() == [float(is_worked(text)) for text in completions]
    assert 0.1 < worked.mean() < 0.3


def test_correctness_is_what_evaluations_measure():
    """`utils.course.evaluation` counts by `reward_fn_addition`: so does training."""
    texts = ["A: 12", "x\nA: 12", "A: 12 ", "A: 12\n", "A: 12.", "A: 112", "12", "A: 13\nA: 12"]
    texts += ["A: 12\nA: 13", "QA: 12", "", "A:12", "a: 12", "A: -12", "A: 012"]
    for answer in ("12", "13", "-12"):
        answers = [answer] * len(texts)
        assert torch.equal(reward_fn_correct(texts, answers), reward_fn_addition(texts, answers))


def test_pass_at_k_is_unbiased():
    """Over all outcomes of n samples with p = 0.3, its mean is 1 - 0.7^k."""
    outcomes = list(itertools.product([0, 1], repeat=6))
    for k in range(1, 7):
        mean = sum(0.3 ** sum(o) * 0.7 ** (6 - sum(o)) * pass_at_k(6, sum(o), k) for o in outcomes)
        assert mean == pytest.approx(1 - 0.7**k)


# --- Groups and baselines -----------------------------------------------------------------------


def test_informative_groups_are_those_with_advantages():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 2, (60,), generator=generator).float() / 3
    informative = select_informative_groups(rewards, 3)
    advantages = group_advantages(rewards, 3).view(-1, 3)
    assert torch.equal(informative, advantages.any(-1))
    assert 0 < informative.sum() < 20


@pytest.mark.parametrize("group_size", [2, 3, 6])
def test_leaving_one_out_scales_the_distance_to_the_groups_mean(group_size):
    rewards = torch.randn(12, dtype=torch.float64)
    scaled = group_advantages(rewards, group_size, "none") * group_size / (group_size - 1)
    torch.testing.assert_close(leave_one_out_advantages(rewards, group_size), scaled)


def test_leaving_out_keeps_the_size_of_the_gradient():
    """Two actions, all samples of a group of 3 enumerated: GRPO's baseline shrinks by 2/3."""
    logit = torch.tensor(0.4, dtype=torch.float64)
    p = torch.sigmoid(logit)
    exact = p * (1 - p)  # d/dlogit of the expected reward, which is 1 for the first action
    gradients = {"group": 0.0, "leave_one_out": 0.0}
    for actions in itertools.product([1.0, 0.0], repeat=3):
        taken = torch.tensor(actions, dtype=torch.float64)
        weight = torch.where(taken == 1, p, 1 - p).prod()
        scores = taken - p  # d log p / dlogit
        found = {
            "group": group_advantages(taken, 3, "none"),
            "leave_one_out": leave_one_out_advantages(taken, 3),
        }
        for kind, advantages in found.items():
            gradients[kind] += weight * (advantages * scores).mean()
    torch.testing.assert_close(gradients["leave_one_out"], exact)
    torch.testing.assert_close(gradients["group"], exact * 2 / 3)


# --- Completions that were cut off --------------------------------------------------------------


def test_finished_completions_have_an_eos_that_is_not_padding():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]]).bool()
    completions = torch.tensor([[5, 2, 2], [5, 6, 2], [5, 6, 7], [2, 2, 2]])  # pad is eos, too
    ids = torch.cat([torch.full((4, 2), 2), completions], dim=1)
    samples = Samples(ids, torch.ones_like(ids), 2, mask, [""] * 4)
    assert find_finished(samples, 2).tolist() == [True, True, False, False]


# --- The objective ------------------------------------------------------------------------------


def make_tensors(seed: int, dtype: torch.dtype = torch.float64):
    rng = Rng(seed, dtype)
    mask = ragged_mask(rng, 6, 9)
    old, noise, ref = rng.normal(3, *mask.shape)
    advantages = rng.normal(6)
    level = rng.tensor([0.6, -0.4, 0.1, -0.6, 0.4, 0.0])[:, None]
    return old + level + 0.3 * noise, old, ref, advantages, mask


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_with_the_defaults_it_is_grpo_exactly(seed, beta):
    new, old, ref, advantages, mask = make_tensors(seed, torch.float32)
    leaves = [poison(new, mask).requires_grad_() for _ in range(2)]
    old, ref = poison(old, mask), poison(ref, mask)
    ours = calc_rlvr_objective(
        leaves[0], old, advantages, mask, 0.1, 0.3, ref_logprobs=ref, beta=beta
    )
    theirs = calc_grpo_objective(leaves[1], old, ref, advantages, mask, 0.1, 0.3, beta)
    assert ours.item() == theirs.item()
    ours.backward()
    theirs.backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)


# "bnpo" and "dapo" are the mean over the tokens of one step, and of the batch: here they are one.
LOSS_MODES = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_type", LOSS_MODES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("low", "high", "beta"),
    [(0.2, 0.2, 0.0), (0.2, 0.28, 0.04), (0.05, 0.1, 1.0), (3e-4, 4e-4, 0.0)],
)
def test_objective_equals_trl_in_value_and_gradient(seed, loss_type, level, low, high, beta):
    new, old, ref, advantages, mask = make_tensors(seed)
    ratio = (new - old)[mask].exp()
    if level == "sequence":
        ratio = calc_sequence_ratio(new, old, mask)
    assert (ratio < 1 - low).any()
    assert (ratio > 1 + high).any()
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    objective = calc_rlvr_objective(
        poison(ours, mask),
        poison(old, mask),
        advantages,
        mask,
        low,
        high,
        ratio_level=level,
        loss_mode=LOSS_MODES[loss_type],
        max_len=40,
        ref_logprobs=poison(ref, mask),
        beta=beta,
    )
    loss = calc_trl_loss(theirs, old, ref, advantages, mask, low, high, beta, loss_type, level, 40)
    assert abs(objective.item() + loss.item()) < 1e-6
    objective.backward()
    loss.backward()
    torch.testing.assert_close(ours.grad, -theirs.grad, atol=1e-6, rtol=0)
    assert ours.grad.any()


@pytest.mark.parametrize("mode", ["sequence", "token", "constant"])
def test_aggregates_equal_trl_at_ratio_one(mode):
    """At ratio 1 TRL's loss is minus the aggregate of the advantages."""
    _, old, ref, advantages, mask = make_tensors(5)
    loss_type = {v: k for k, v in LOSS_MODES.items()}[mode]
    loss = calc_trl_loss(old, old, ref, advantages, mask, 0.2, 0.2, 0.0, loss_type, "token", 17)
    per_token = poison(advantages[:, None].expand(mask.shape), mask)
    got = aggregate_tokens(per_token, mask, mode, max_len=17)
    torch.testing.assert_close(got, -loss)


def test_gspo_hardly_clips_at_the_clips_of_grpo_and_often_at_its_own():
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(200, 100, dtype=torch.bool)
    logratio = 0.02 * torch.randn(200, 100, generator=generator)
    ratio = calc_sequence_ratio(logratio, torch.zeros_like(logratio), mask)
    assert ((ratio - 1).abs() > 0.2).float().mean() == 0
    assert ((ratio - 1).abs() > 4e-4).float().mean() > 0.5


# --- The arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("advantage_kind", "rloo"),
        ("loss_mode", "dapo"),
        ("ratio_level", "completion"),
        ("truncation", "drop"),
        ("dynamic_sampling", "yes"),
        ("max_extra_rollouts", -1),
        ("max_extra_rollouts", 1.5),
        ("missing_eos_penalty", -0.5),
        ("missing_eos_penalty", float("inf")),
        ("advantage_scale", "std"),
    ],
)
def test_bad_arguments_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} should be"):
        RlvrArgs(**{name: value})


def test_by_default_nothing_is_changed():
    args, grpo = RlvrArgs(), GrpoArgs()
    assert all(getattr(args, name) == value for name, value in vars(grpo).items())


# --- The trainer --------------------------------------------------------------------------------


def make_args(tmp_path, args_class=RlvrArgs, **options):
    pairs = training_pairs()[:50]
    defaults = {
        "batch_size": 16,
        "group_size": 4,
        "num_minibatches": 2,
        "gen_len": 24,
        "total_phases": 2,
        "warmup_steps": 0,
        "prompts": [addition_prompt(a, b) for a, b in pairs],
        "columns": {"answers": [str(a + b) for a, b in pairs]},
        "reward_fn": reward_fn_correct,
        "samples_every": 0,
        "runs_dir": tmp_path,
        "device": "cpu",
    }
    return args_class(**(defaults | options))


def test_with_the_defaults_the_trainer_is_grpos(tmp_path):
    grpo = GrpoTrainer(make_args(tmp_path / "grpo", GrpoArgs)).train()
    rlvr = RlvrTrainer(make_args(tmp_path / "rlvr")).train()
    for theirs, ours in zip(grpo, rlvr, strict=True):
        assert all(ours[name] == x for name, x in theirs.items() if name != "seconds")
        assert ours.keys() - theirs.keys() == {
            "informative_frac", "prompts_sampled", "truncated_frac",
        }  # fmt: skip
        assert ours["prompts_sampled"] == 4


@pytest.mark.parametrize(
    "options",
    [
        {"advantage_kind": "leave_one_out", "loss_mode": "constant", "kl_coef": 0.0},
        {"ratio_level": "sequence", "clip_coef": 3e-4, "clip_coef_high": 4e-4},
        {"dynamic_sampling": True, "loss_mode": "token", "clip_coef_high": 0.28},
        {"truncation": "mask", "gen_len": 8},
        {"truncation": "penalty", "missing_eos_penalty": 0.5, "gen_len": 8},
    ],
)
def test_every_choice_runs_and_learns_from_the_first_step(tmp_path, options):
    trainer = RlvrTrainer(make_args(tmp_path, total_phases=1, **options))
    before = [p.detach().clone() for p in trainer.model.trainable_parameters()]
    assert len(trainer.train()) == 1
    after = trainer.model.trainable_parameters()
    assert any((a - b).abs().max() > 0 for a, b in zip(after, before, strict=True))


class ScriptedReward:
    """Group by group: the rewards that a line of the script says, then the next line."""

    def __init__(self, script, group_size):
        self.lines, self.group_size, self.texts = iter(script), group_size, []

    def __call__(self, samples):
        line = next(self.lines)
        self.texts.append(list(samples))
        rewards = torch.zeros(len(samples))
        rewards[:: self.group_size] = torch.tensor(line, dtype=torch.float32)  # one of each group
        return rewards


def play(tmp_path, script, **options):
    reward_fn = ScriptedReward(script, 4)
    options = {"dynamic_sampling": True, "reward_fn": reward_fn} | options
    trainer = RlvrTrainer(make_args(tmp_path, **options))
    samples, scores = trainer.sample_groups()
    return trainer, reward_fn, samples, scores


def test_dynamic_sampling_fills_the_batch_with_informative_groups(tmp_path):
    script = [[0, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    trainer, reward_fn, samples, scores = play(tmp_path, script)
    assert len(reward_fn.texts) == 3
    assert scores.tolist() == [1.0, 0.0, 0.0, 0.0] * 4
    first, second, third = reward_fn.texts
    assert samples.texts == first[4:8] + second[0:4] + second[8:12] + third[0:4]
    assert trainer.metrics["informative_frac"] == [pytest.approx(7 / 12)]
    assert trainer.metrics["prompts_sampled"] == [12]
    assert select_informative_groups(scores, 4).all()
    tokenizer = trainer.model.tokenizer
    decoded = [
        tokenizer.decode(ids[mask].tolist(), skip_special_tokens=True)
        for ids, mask in zip(samples.completion_ids, samples.completion_mask, strict=True)
    ]
    assert decoded == samples.texts


def test_dynamic_sampling_stops_at_its_bound_and_fills_up(tmp_path):
    script = [[0, 0, 1, 0], [0, 0, 0, 1], [1, 1, 1, 1]]
    trainer, reward_fn, samples, scores = play(tmp_path, script, max_extra_rollouts=1)
    first, second = reward_fn.texts
    assert samples.texts == first[0:4] + first[4:8] + first[8:12] + second[12:16]
    assert select_informative_groups(scores, 4).tolist() == [False, False, True, True]
    assert trainer.metrics["prompts_sampled"] == [8]


def test_without_dynamic_sampling_one_batch_is_taken_as_it_comes(tmp_path):
    trainer, reward_fn, samples, _ = play(tmp_path, [[0, 1, 0, 0]], dynamic_sampling=False)
    assert samples.texts == reward_fn.texts[0]
    assert trainer.metrics["informative_frac"] == [0.25]


def test_joined_samples_are_scored_as_they_were(tmp_path):
    """Wider padding changes no log-prob."""
    trainer = RlvrTrainer(make_args(tmp_path, num_minibatches=1, prompts=None, columns={}))
    randomize(trainer.model)
    parts, alone = [], []
    trainer.args.reward_fn = lambda samples: torch.zeros(len(samples))
    for prefix, gen_len in (("This movie is", 5), ("To be honest the long", 9)):
        trainer.args.prefix, trainer.args.gen_len = prefix, gen_len
        samples, _ = trainer.sample_and_score(8)
        parts.append(samples)
        with torch.no_grad():
            logprobs = trainer.get_sample_logprobs(samples)
        alone += [row[mask] for row, mask in zip(logprobs, samples.completion_mask, strict=True)]
    joined = join_samples(parts, trainer.model.tokenizer.pad_token_id)
    assert joined.prompt_len == max(part.prompt_len for part in parts)
    with torch.no_grad():
        together = trainer.get_sample_logprobs(joined)
    for row, mask, expected in zip(together, joined.completion_mask, alone, strict=True):
        torch.testing.assert_close(row[mask], expected, atol=2e-5, rtol=1e-5)


def test_what_was_cut_off_is_masked_or_penalised(tmp_path):
    options = {"gen_len": 8, "kl_coef": 0.0}
    memory = RlvrTrainer(make_args(tmp_path, truncation="mask", **options)).rollout_phase()
    kept = RlvrTrainer(make_args(tmp_path, **options)).rollout_phase()
    assert torch.equal(memory.input_ids, kept.input_ids)
    eos = 2
    ended = ((kept.input_ids[:, -kept.mask.shape[1] :] == eos) & kept.mask).any(-1)
    assert ended.any()
    assert not ended.all()
    assert torch.equal(memory.mask, kept.mask & ended[:, None])
    assert torch.equal(memory.advantages, kept.advantages)  # the baseline is that of all
    penalty = RlvrTrainer(make_args(tmp_path, truncation="penalty", **options))
    _, scores = penalty.sample_groups()
    _, raw = RlvrTrainer(make_args(tmp_path, **options)).sample_groups()
    assert torch.equal(scores, raw - (~ended).float())
    share = pytest.approx(1 - ended.float().mean().item())
    assert penalty.metrics["truncated_frac"] == [share]


def test_clip_frac_counts_completions_with_ratios_of_sequences(tmp_path):
    _, old, _, advantages, _ = make_tensors(2, torch.float32)
    mask = torch.arange(9) < torch.tensor([0, 1, 9, 4, 2, 8])[:, None]
    logratio = torch.tensor([0.0, 0.5, 0.1, -0.5, 0.1, 0.0])[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.long)
    minibatch = ReplayMinibatch(
        input_ids=ids, attention_mask=ids, mask=mask, logprobs=old, advantages=advantages
    )
    logprobs = (old + logratio).masked_fill(~mask, torch.nan)
    trainer = RlvrTrainer(make_args(tmp_path, ratio_level="sequence"))
    trainer.record_ratios(logprobs, minibatch)
    assert trainer.metrics["clip_frac"] == [pytest.approx(2 / 5)]
    tokens = RlvrTrainer(make_args(tmp_path))
    tokens.record_ratios(logprobs, minibatch)
    outside = mask[1].sum() + mask[3].sum()
    assert tokens.metrics["clip_frac"] == [pytest.approx((outside / mask.sum()).item())]


def test_ratios_of_bfloat16_are_taken_in_float32():
    old = torch.full((1, 64), -1.0, dtype=torch.bfloat16)
    new = old.clone()
    new[0, 0] = -0.9921875  # the neighbour in bfloat16
    ratio = calc_sequence_ratio(new, old, torch.ones(1, 64, dtype=torch.bool))
    assert ratio.dtype == torch.float32
    assert ratio.item() == pytest.approx(1 + 0.0078125 / 64, rel=1e-6)
