"""The objectives of chapters 3 and 5 against TRL; chapter 5's trainer against chapter 3's."""

import pytest
import torch

from solutions.ch0_sampling import Samples
from solutions.ch2_ppo import ReplayMinibatch
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer, calc_grpo_objective
from solutions.ch5_rlvr import (
    RlvrArgs,
    RlvrTrainer,
    calc_rlvr_objective,
    calc_sequence_ratio,
    find_finished,
    join_samples,
    reward_fn_correct,
)
from tests.course.helpers import ONE_STEP, randomize
from tests.oracles.trl import calc_trl_loss
from tests.support.inputs import poison, ragged_mask
from utils.grading.checks import Rng
from utils.models.corpus import addition_prompt, training_pairs
from utils.rewards import reward_fn_addition

# --- Rewards ------------------------------------------------------------------------------------


def test_correctness_is_what_evaluations_measure():
    """`utils.course.evaluation` counts by `reward_fn_addition`: so does training."""
    texts = ["A: 12", "x\nA: 12", "A: 12 ", "A: 12\n", "A: 12.", "A: 112", "12", "A: 13\nA: 12"]
    texts += ["A: 12\nA: 13", "QA: 12", "", "A:12", "a: 12", "A: -12", "A: 012"]
    for answer in ("12", "13", "-12"):
        answers = [answer] * len(texts)
        assert torch.equal(reward_fn_correct(texts, answers), reward_fn_addition(texts, answers))


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


# "bnpo" and "dapo" are the mean over the tokens of one step, and of the batch: here they are one.
LOSS_MODES = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant"}


@pytest.mark.parametrize("loss_type", LOSS_MODES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("low", "high", "beta"),
    [(0.2, 0.2, 0.0), (0.2, 0.28, 0.04), (0.05, 0.1, 1.0), (3e-4, 4e-4, 0.0)],
)
def test_objective_equals_trl_in_value_and_gradient(loss_type, level, low, high, beta):
    new, old, ref, advantages, mask = make_tensors(0)
    ratio = (new - old)[mask].exp()
    if level == "sequence":
        ratio = calc_sequence_ratio(new, old, mask)
    assert (ratio < 1 - low).any()
    assert (ratio > 1 + high).any()
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    options = {"ratio_level": level, "loss_mode": LOSS_MODES[loss_type], "max_len": 40}
    args = poison(ours, mask), poison(old, mask), advantages, mask, low, high
    objective = calc_rlvr_objective(*args, **options, ref_logprobs=poison(ref, mask), beta=beta)
    loss = calc_trl_loss(theirs, old, ref, advantages, mask, low, high, beta, loss_type, level, 40)
    if (loss_type, level) == ("grpo", "token"):  # chapter 3's
        grpo = calc_grpo_objective(*args[:2], poison(ref, mask), *args[2:], beta)
        gradients = [torch.autograd.grad(x, ours, retain_graph=True)[0] for x in (grpo, objective)]
        torch.testing.assert_close(
            (grpo, gradients[0]), (objective, gradients[1]), rtol=0, atol=1e-12
        )
    assert abs(objective.item() + loss.item()) < 1e-6
    objective.backward()
    loss.backward()
    torch.testing.assert_close(ours.grad, -theirs.grad, atol=1e-6, rtol=0)
    assert ours.grad.any()


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


# --- The trainer --------------------------------------------------------------------------------


def make_args(tmp_path, args_class=RlvrArgs, **options):
    pairs = training_pairs()[:50]
    sizes = {"batch_size": 16, "group_size": 4, "num_minibatches": 2, "gen_len": 24}
    defaults = sizes | {
        "total_phases": 1,
        "prompts": [addition_prompt(a, b) for a, b in pairs],
        "columns": {"answers": [str(a + b) for a, b in pairs]},
        "reward_fn": reward_fn_correct,
        "runs_dir": tmp_path,
    }
    return args_class(**(ONE_STEP | defaults | options))


def test_with_the_defaults_the_trainer_is_grpos(tmp_path):
    grpo = GrpoTrainer(make_args(tmp_path / "grpo", GrpoArgs)).train()
    rlvr = RlvrTrainer(make_args(tmp_path / "rlvr")).train()
    for theirs, ours in zip(grpo, rlvr, strict=True):
        assert all(ours[name] == x for name, x in theirs.items() if name != "seconds")
        assert ours.keys() - theirs.keys() == {
            "informative_frac", "prompts_sampled", "truncated_frac",
        }  # fmt: skip
        assert ours["prompts_sampled"] == 4


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


def test_clip_frac_counts_completions_with_ratios_of_sequences(tmp_path):
    _, old, _, advantages, _ = make_tensors(2, torch.float32)
    mask = torch.arange(9) < torch.tensor([0, 1, 9, 4, 2, 8])[:, None]
    logratio = torch.tensor([0.0, 0.5, 0.1, -0.5, 0.1, 0.0])[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.long)
    fields = {"mask": mask, "logprobs": old, "advantages": advantages}
    minibatch = ReplayMinibatch(input_ids=ids, attention_mask=ids, **fields)
    logprobs = (old + logratio).masked_fill(~mask, torch.nan)
    for level, share in (("sequence", 2 / 5), ("token", 5 / 24)):
        trainer = RlvrTrainer(make_args(tmp_path, ratio_level=level))
        trainer.record_ratios(logprobs, minibatch)
        assert trainer.metrics["clip_frac"] == [pytest.approx(share)]


def test_ratios_of_bfloat16_are_taken_in_float32():
    old = torch.full((1, 64), -1.0, dtype=torch.bfloat16)
    new = old.clone()
    new[0, 0] = -0.9921875  # the neighbour in bfloat16
    ratio = calc_sequence_ratio(new, old, torch.ones(1, 64, dtype=torch.bool))
    assert ratio.dtype == torch.float32
    assert ratio.item() == pytest.approx(1 + 0.0078125 / 64, rel=1e-6)
