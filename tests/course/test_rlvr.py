"""Chapter 5's solutions against TRL, brute force and chapter 3."""

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from trl import GRPOConfig, GRPOTrainer

from solutions.ch0_sampling import Samples
from solutions.ch2_ppo import ReplayMinibatch
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer, calc_grpo_objective, group_advantages
from solutions.ch5_rlvr import (
    RlvrArgs,
    RlvrTrainer,
    aggregate_tokens,
    apply_missing_eos_penalty,
    calc_rlvr_objective,
    calc_sequence_ratio,
    combine_rewards,
    extract_answer,
    find_finished,
    join_samples,
    leave_one_out_advantages,
    mask_truncated,
    pass_at_k,
    reward_fn_correct,
    reward_fn_format,
    select_informative_groups,
)
from tests.course.helpers import poison, ragged_mask, randomize
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
    """`utils.evaluation` counts by `reward_fn_addition`: so does training."""
    texts = ["A: 12", "x\nA: 12", "A: 12 ", "A: 12\n", "A: 12.", "A: 112", "12", "A: 13\nA: 12"]
    texts += ["A: 12\nA: 13", "QA: 12", "", "A:12", "a: 12", "A: -12", "A: 012"]
    for answer in ("12", "13", "-12"):
        answers = [answer] * len(texts)
        assert torch.equal(reward_fn_correct(texts, answers), reward_fn_addition(texts, answers))


def test_combined_rewards_by_hand():
    rewards = torch.tensor([[1.0, 0.0], [0.5, 1.0], [2.0, 4.0]], requires_grad=True)
    combined = combine_rewards(rewards, [1.0, -2.0, 0.25])
    assert combined.tolist() == [0.5, -1.0]
    assert not combined.requires_grad
    with pytest.raises(ValueError, match="weights should be one for each of 3 functions"):
        combine_rewards(rewards, [1.0])


def test_pass_at_k_by_enumerating_subsets():
    for n in range(1, 9):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            drawn = list(itertools.combinations([True] * c + [False] * (n - c), k))
            expected = sum(map(any, drawn)) / len(drawn)
            assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)
    assert pass_at_k(5, 3, 3) == 1  # fewer than 3 are wrong
    for n, c, k, name in ((4, 2, 5, "k"), (4, 2, 0, "k"), (4, 5, 2, "c"), (4, -1, 2, "c")):
        with pytest.raises(ValueError, match=f"{name} should be in"):
            pass_at_k(n, c, k)


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
    with pytest.raises(ValueError, match="group_size should divide the batch of 60, but is 7"):
        select_informative_groups(rewards, 7)


@pytest.mark.parametrize("group_size", [2, 3, 6])
def test_leave_one_out_by_double_loop(group_size):
    rewards = torch.randn(12, dtype=torch.float64, requires_grad=True)
    got = leave_one_out_advantages(rewards, group_size)
    for i in range(12):
        start = i // group_size * group_size
        others = [rewards[j].item() for j in range(start, start + group_size) if j != i]
        assert got[i].item() == pytest.approx(rewards[i].item() - sum(others) / len(others))
    scaled = group_advantages(rewards, group_size, "none") * group_size / (group_size - 1)
    torch.testing.assert_close(got, scaled)
    assert not got.requires_grad


def test_leave_one_out_equals_the_formula_of_trl():
    """TRL 1.16's RLOOTrainer, without `normalize_advantages`."""
    rewards = torch.rand(24)
    grouped = rewards.view(-1, 8)
    baselines = (grouped.sum(1, keepdim=True) - grouped) / (8 - 1)
    torch.testing.assert_close(
        leave_one_out_advantages(rewards, 8), rewards - baselines.view(-1), atol=1e-6, rtol=0
    )


def test_a_constant_group_left_out_gives_exact_zeros():
    rewards = torch.cat([torch.full((7,), 0.1), torch.randn(7), torch.full((7,), 1e6 / 3)])
    got = leave_one_out_advantages(rewards, 7)
    assert (got[:7] == 0).all()
    assert (got[14:] == 0).all()
    assert got[7:14].any()


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


def test_what_was_cut_off_by_hand():
    mask = torch.tensor([[True, True], [True, False]])
    finished = torch.tensor([False, True])
    assert mask_truncated(mask, finished).tolist() == [[False, False], [True, False]]
    assert mask.tolist() == [[True, True], [True, False]]
    scores = torch.tensor([1.0, 1.0], requires_grad=True)
    penalised = apply_missing_eos_penalty(scores, finished, 0.25)
    assert penalised.tolist() == [0.75, 1.0]
    assert not penalised.requires_grad


def test_finished_completions_have_an_eos_that_is_not_padding():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [0, 0, 0]]).bool()
    completions = torch.tensor([[5, 2, 2], [5, 6, 2], [5, 6, 7], [2, 2, 2]])  # pad is eos, too
    ids = torch.cat([torch.full((4, 2), 2), completions], dim=1)
    samples = Samples(ids, torch.ones_like(ids), 2, mask, [""] * 4)
    assert find_finished(samples, 2).tolist() == [True, True, False, False]


# --- The objective ------------------------------------------------------------------------------


def make_tensors(seed: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask()
    old, noise, ref = torch.randn(3, *mask.shape, generator=generator, dtype=dtype)
    advantages = torch.randn(6, generator=generator, dtype=dtype)
    level = torch.tensor([0.0, 0.6, -0.4, 0.1, -0.6, 0.4], dtype=dtype)[:, None]
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


def calc_trl_loss(
    new, old, ref, advantages, mask, low, high, beta, loss_type, level, max_completion_length
):
    """The loss of `trl.GRPOTrainer` on given log-probs, which are the leaf of its gradient."""
    config = GRPOConfig(output_dir="unused", use_cpu=True, report_to="none", bf16=False)
    assert hasattr(config, "use_bias_correction_kl")
    config.use_bias_correction_kl = False
    config.steps_per_generation = 1
    trainer = SimpleNamespace(
        args=config,
        beta=beta,
        epsilon_low=low,
        epsilon_high=high,
        loss_type=loss_type,
        max_completion_length=max_completion_length,
        importance_sampling_level=level,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        model=torch.nn.Identity(),
        accelerator=Accelerator(cpu=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
    )
    completion_ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": completion_ids[:, :1],
        "prompt_mask": completion_ids[:, :1],
        "completion_ids": completion_ids,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


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


def test_tokens_of_a_completion_share_the_gradient_of_its_ratio():
    new, old, _, advantages, mask = make_tensors(1)
    new.requires_grad_()
    objective = calc_rlvr_objective(new, old, advantages, mask, 10.0, ratio_level="sequence")
    objective.backward()
    ratio = calc_sequence_ratio(new.detach(), old, mask)
    lengths = mask.sum(-1).clamp(min=1)
    expected = (ratio * advantages / lengths / len(mask))[:, None] * mask
    torch.testing.assert_close(new.grad, expected)


def test_gspo_hardly_clips_at_the_clips_of_grpo_and_often_at_its_own():
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(200, 100, dtype=torch.bool)
    logratio = 0.02 * torch.randn(200, 100, generator=generator)
    ratio = calc_sequence_ratio(logratio, torch.zeros_like(logratio), mask)
    assert ((ratio - 1).abs() > 0.2).float().mean() == 0
    assert ((ratio - 1).abs() > 4e-4).float().mean() > 0.5


def test_a_long_completion_weighs_as_its_mode_says():
    """One completion of 8 tokens and one of 2, both of value 1 a token: the share of the long."""
    mask = torch.arange(8) < torch.tensor([8, 2])[:, None]
    shares = {}
    for mode in ("sequence", "token", "constant"):
        per_token = torch.ones(2, 8, requires_grad=True)
        aggregate_tokens(per_token, mask, mode, max_len=8).backward()
        shares[mode] = (per_token.grad[0].sum() / per_token.grad.sum()).item()
    assert shares == pytest.approx({"sequence": 0.5, "token": 0.8, "constant": 0.8})


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
    trainer = RlvrTrainer(make_args(tmp_path, **options))
    before = [p.detach().clone() for p in trainer.model.trainable_parameters()]
    history = trainer.train()
    assert len(history) == 2
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
    _, old, _, advantages, mask = make_tensors(2, torch.float32)
    logratio = torch.tensor([0.0, 0.5, 0.1, -0.5, 0.1, 0.0])[:, None]  # the first row is empty
    minibatch = ReplayMinibatch(mask=mask, logprobs=old, ref_logprobs=None, advantages=advantages)
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
