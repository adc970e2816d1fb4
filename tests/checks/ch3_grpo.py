"""Checks of chapter 3: group-relative advantages, and the objective that they weigh."""

import functools
import itertools
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from solutions import ch3_grpo
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import (
    ReplayMemory,
)
from tests.oracles.ch3_grpo import (
    advantages_by_statistics,
    grpo_memory_by_loops,
    k3_number_by_number,
    k3_of_differences,
    k3_of_probabilities,
    objective_by_cases,
    ppo_without_values,
    process_by_statistics,
    reinforce_by_completions,
)
from tests.support import models, trainers
from tests.support.inputs import (
    NAN,
    constant_groups_are_zeros,
    error_of,
    gradients,
    grouped_rewards,
    leaf,
    masks_of_many_shapes,
    one_zero,
    poison,
    ragged_logprobs,
    ragged_mask,
    value_and_gradients,
    with_inputs_after,
)
from tests.support.trainers import beyond, inside, make_model, make_samples
from utils.grading.checks import check

# --- group_advantages ---------------------------------------------------------------------------

SCALES = ("group", "batch", "none")


def _every_scale(student, rewards, group_size, **options):
    return {
        scale: student.group_advantages(rewards, group_size, scale, **options) for scale in SCALES
    }


@check(
    "group_advantages",
    public=True,
    expected={
        "group": [-0.5, 0, 0.5, -0.75, 0, 0.75, 0, 0, 0, 0, -0.5, 0.5],
        "batch": [-0.24172, 0, 0.24172, -0.72516, 0, 0.72516, 0, 0, 0, 0, -0.24172, 0.24172],
        "none": [-1, 0, 1, -3, 0, 3, 0, 0, 0, 0, -1, 1],
        "the rewards afterwards": [1, 2, 3, 0, 3, 6, 5, 5, 5, 9, 8, 10],
        "whether a gradient flows": False,
    },
    atol=1e-5,
)
def worked_groups(student, rng):
    """Rewards 1, 2, 3 | 0, 3, 6 | 5, 5, 5 | 9, 8, 10, eps 1: stds 1, 3, 0, 1, overall 3.137"""
    rewards = rng.tensor([1.0, 2.0, 3.0, 0.0, 3.0, 6.0, 5.0, 5.0, 5.0, 9.0, 8.0, 10.0])
    found = {}
    for scale in SCALES:
        found[scale] = student.group_advantages(rewards.clone(), 3, scale, eps=1.0)
    again = student.group_advantages(rewards, 3, "none", eps=1.0)
    with_gradient = student.group_advantages(leaf(rewards), 3, eps=1.0)
    return found | {
        "the rewards afterwards": rewards,
        "whether a gradient flows": bool(again.requires_grad or with_gradient.requires_grad),
    }


@check("group_advantages", public=True, points=3, seeds=2, expected=advantages_by_statistics)
def several_groups(student, rng):
    """Several groups of different means and spreads, every scale; ties; a high level"""
    found = {
        f"{groups} groups of {size}": _every_scale(
            student, grouped_rewards(rng, groups, size), size
        )
        for groups, size in ((3, 2), (4, 3), (2, 5), (3, 3), (1, 4))
    }
    one_hit = rng.normal(200).index_fill(0, rng.integers(0, 200, 1), 600.0)
    found["an outlier"] = _every_scale(student, one_hit, 200)
    hits = [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 1], [0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]
    found["0 or 1"] = _every_scale(student, rng.tensor(hits)[rng.permutation(6)].flatten(), 4)
    zero_mean = rng.normal(1) * rng.tensor([1.0, -1.0, 2.0, -2.0, 3.0, 3.0, -1.0, -5.0])
    found["means of 0"] = _every_scale(student, zero_mean, 4)
    level = rng.tensor([1e4]) + rng.integers(-3, 4, 16)  # the means are exact
    found["a level of 10000"] = _every_scale(student, level, 4)
    close = 8 + rng.integers(-3, 4, 12) * rng.tensor([2.0**-17])  # and here
    found["a level of 8, close"] = _every_scale(student, close, 4)
    return found | {"defaults": student.group_advantages(grouped_rewards(rng, 3, 4), 4)}


@check("group_advantages", points=2, expected=advantages_by_statistics, tier="hardening")
def rewards_of_small_spread(student, rng):
    """Stds of 1e-3, 1e-5 and 1e-7, where the eps matters; its default, and one that is given"""
    return {
        f"spread {spread}": {
            "default eps": _every_scale(student, rewards, 4),
            "eps 0.01": _every_scale(student, rewards, 4, eps=0.01),
        }
        for spread in (1e-3, 1e-5, 1e-7)
        for rewards in [rng.normal(12, std=spread)]
    }


@check(
    "group_advantages",
    public=True,
    points=3,
    seeds=2,
    holds=constant_groups_are_zeros,
    tier="hardening",
)
def constant_groups(student, rng):
    """Groups of equal rewards such as 0.1 give exact zeros, next to another group and alone"""
    values = torch.cat([rng.tensor([0.1, 1 / 3, 1e6 / 3]), rng.uniform(3, low=-1e4, high=1e4)])
    constant = values.repeat_interleave(7)
    both = torch.cat([rng.normal(7, mean=2), constant])
    found = {}
    for scale in SCALES:
        found[f"{scale}, beside"] = student.group_advantages(both, 7, scale)
        found[f"{scale}, alone"] = student.group_advantages(constant, 7, scale)
        found[f"{scale}, one constant"] = student.group_advantages(values[:1].repeat(42), 7, scale)
    return found


@check("group_advantages", points=2, tier="hardening")
def groups_and_scales_that_do_not_fit(student, rng):
    """A group_size that doesn't divide the batch, or is below 2; an unknown scale: a ValueError"""
    rewards, f = rng.normal(6), student.group_advantages
    bad = {
        f"group_size {n} for 6 rewards": error_of("group_size", f, rewards, n)
        for n in (4, 5, 12, 1, 0, -3)
    } | {
        f"scale {s!r}": error_of("scale", f, rewards, 3, s)
        for s in ("std", "Group", "", None, True)
    }
    bad["4 for 6 equal rewards"] = error_of("group_size", f, rewards * 0, 4)
    bad["std of equal rewards"] = error_of("scale", f, rewards * 0, 3, "std")
    return bad | {"2": f(rewards, 2), "6": f(rewards, 6)}


# --- calc_single_update_objective ---------------------------------------------------------------


def _single(student, mask):
    return lambda logprobs, advantages: student.calc_single_update_objective(
        logprobs, advantages, mask
    )


@check(
    "calc_single_update_objective",
    public=True,
    expected={
        "the result": 1.0,
        "the gradient for logprobs": [[0.75, 0.75], [-0.75, 0], [0, 0], [0.125, 0.125]],
        "the gradient for advantages": [0, 0, 0, 0],
    },
)
def worked_single_update(student, rng):
    """A = 6, -3, 9, 1 for 2, 1, 0, 2 tokens: (6 - 3 + 0 + 1)/4, gradients A / (4 tokens), no NaN"""
    logprobs = rng.tensor([[-1.0, -2.0], [-0.5, NAN], [NAN, NAN], [-3.0, -0.1]])
    advantages = rng.tensor([6.0, -3.0, 9.0, 1.0])
    return value_and_gradients(
        _single(student, ~logprobs.isnan()), logprobs=logprobs, advantages=advantages
    )


@check(
    "calc_single_update_objective",
    public=True,
    points=2,
    seeds=2,
    expected=reinforce_by_completions,
    atol=1e-7,
)
def ragged_single_updates(student, rng):
    """Ragged, NaN, inf or -1 beyond the mask: the value, and REINFORCE's gradient"""
    mask = ragged_mask(rng)
    logprobs, advantages = -rng.uniform(6, 7, high=3.0), one_zero(rng, mask)
    return {
        f"{fill}": value_and_gradients(
            _single(student, mask), logprobs=poison(logprobs, mask, fill), advantages=advantages
        )
        for fill in (NAN, torch.inf, -torch.inf, -1.0)
    }


@check(
    "calc_single_update_objective", points=2, expected=reinforce_by_completions, tier="hardening"
)
def single_updates_of_many_shapes(student, rng):
    """As many completions as tokens, one row, one token, 150 rows, nothing; log-probs of -1000"""
    masks = masks_of_many_shapes(rng)
    return {
        f"{name}, {level}": value_and_gradients(
            _single(student, mask),
            logprobs=poison(level - rng.uniform(*mask.shape), mask),
            advantages=rng.normal(len(mask), mean=1),
        )
        for level, (name, mask) in itertools.product((0, -1000), masks.items())
    }


# --- calc_per_token_kl --------------------------------------------------------------------------


def add(logprobs: Tensor, d: Tensor) -> Tensor:
    """The sum rounded to float32, so that a run in float64 sees the same numbers."""
    return (logprobs.float() + d.float()).to(logprobs.dtype)


@check(
    "calc_per_token_kl",
    public=True,
    expected={
        "the result": [0.30685282, 0.0, 0.19314718],
        "the gradient for logprobs": [-1.0, 0.0, 0.5],
        "the gradient for ref_logprobs": [0.0, 0.0, 0.0],
    },
)
def worked_k3(student, rng):
    """Policy 0.2, 0.5, 0.4, reference 0.4, 0.5, 0.2: 2 - 1 - ln 2, 0, 1/2 - 1 + ln 2; gradients"""
    policy, reference = rng.tensor([0.2, 0.5, 0.4]), rng.tensor([0.4, 0.5, 0.2])
    return value_and_gradients(
        student.calc_per_token_kl, logprobs=policy.log(), ref_logprobs=reference.log()
    )


@check("calc_per_token_kl", public=True, points=2, seeds=2, expected=k3_of_probabilities)
def k3_of_every_shape(student, rng):
    """0 to 3 axes, transposed or not; a gradient for the policy's alone; inputs unchanged"""
    f, found = student.calc_per_token_kl, {}
    for shape in ((4, 5), (6,), (2, 3, 2), ()):
        logprobs, ref_logprobs = -rng.uniform(*shape, high=4.0), -rng.uniform(*shape, high=4.0)
        if len(shape) > 1:
            logprobs, ref_logprobs = logprobs.mT, ref_logprobs.mT
        found[f"shape {shape}"] = {
            "gradients": value_and_gradients(f, logprobs=logprobs, ref_logprobs=ref_logprobs),
            "inputs": with_inputs_after(f, logprobs.clone(), ref_logprobs.clone()),
        }
    return found


@check(
    "calc_per_token_kl",
    public=True,
    points=2,
    seeds=2,
    expected=k3_number_by_number,
    rtol=0.05,
    atol=1e-12,
    tier="hardening",
)
def small_differences(student, rng):
    """Differences near 1e-4 and 1e-3: k3 is never negative, and right to a few percent"""
    signs = 2.0 * rng.integers(0, 2, 200) - 1
    logprobs = -rng.uniform(200, low=0.02, high=0.5)
    d = signs * torch.cat(
        [rng.uniform(100, low=2e-5, high=3e-4), rng.uniform(100, low=3e-4, high=3e-3)]
    )
    return student.calc_per_token_kl(logprobs, add(logprobs, d))


@check("calc_per_token_kl", points=2, expected=k3_of_differences, tier="hardening")
def large_differences(student, rng):
    """Differences from -1000 to 60, where probabilities underflow: the value, and the gradient"""
    d = torch.cat([rng.tensor([-1000.0, -200.0, -50.0, 20.0, 40.0, 60.0]), rng.normal(6, std=8)])
    logprobs = -rng.uniform(12, low=150.0, high=500.0)
    return value_and_gradients(
        student.calc_per_token_kl, logprobs=logprobs, ref_logprobs=add(logprobs, d)
    )


def _averages_to_the_kl(observed, reference):
    policy, ref = (Categorical(logits=reference[name].double()) for name in ("policy", "reference"))
    mean = (policy.probs * observed["k3"]).sum(-1)
    if not torch.allclose(mean, kl_divergence(policy, ref), rtol=1e-4, atol=1e-5):
        return "averaged over the policy's tokens, it should be KL(policy ‖ reference)"
    if not torch.allclose(observed["gradient"].double(), policy.probs - ref.probs, atol=1e-5):
        return "as a loss, its average gradient should be that of KL(reference ‖ policy)"
    return None


@check("calc_per_token_kl", holds=_averages_to_the_kl)
def what_k3_estimates(student, rng):
    """All tokens of a vocabulary: their average is KL(policy ‖ reference), and its gradient"""
    logits, ref_logits = leaf(rng.normal(3, 6)), rng.normal(3, 6)
    logprobs = logits.log_softmax(-1)
    k3 = student.calc_per_token_kl(logprobs, ref_logits.log_softmax(-1))
    average = (logprobs.detach().exp() * k3).sum()
    return {
        "policy": logits,
        "reference": ref_logits,
        "k3": k3,
        "gradient": gradients(average, logits=logits)["the gradient for logits"],
    }


# --- calc_grpo_objective ------------------------------------------------------------------------


def _objective(student, mask, *args, **options):
    """The objective as a function of the tensors that could have a gradient."""
    return lambda logprobs, old_logprobs, ref_logprobs, advantages: student.calc_grpo_objective(
        logprobs, old_logprobs, ref_logprobs, advantages, mask, *args, **options
    )


@check("calc_grpo_objective", public=True, expected=-5 / 6)
def worked_clips(student, rng):
    """Ratios 2, 0.5, 1.1: A = 1 gives 1.2, 0.5, 1.1 and A = -2 gives -4, -1.6, -2.2; no KL"""
    logprobs = rng.tensor([[2.0, 0.5, 1.1], [2.0, 0.5, 1.1]]).log()
    mask = torch.ones(2, 3, dtype=torch.bool)
    return student.calc_grpo_objective(
        logprobs, torch.zeros_like(logprobs), None, rng.tensor([1.0, -2.0]), mask, beta=0.0
    )


@check(
    "calc_grpo_objective",
    public=True,
    expected={
        "the result": 0.94885787,
        "the gradient for logprobs": [[4.25 / 6, 4.25 / 6], [0, 0], [-0.25, 0]],
        "the gradient for old_logprobs": [[0, 0]] * 3,
        "the gradient for ref_logprobs": [[0, 0]] * 3,
        "the gradient for advantages": [0, 0, 0],
    },
)
def worked_completions(student, rng):
    """Ratio 1, A 4, 5, -1 for 2, 0, 1 tokens, beta 1/4: (3 - 2 beta k3)/3, (A + beta)/(3 tokens)"""
    logprobs = rng.tensor([[0.3, 0.4], [NAN, NAN], [0.2, NAN]]).log()
    return value_and_gradients(
        _objective(student, ~logprobs.isnan(), beta=0.25),
        logprobs=logprobs,
        old_logprobs=logprobs,
        ref_logprobs=logprobs + math.log(2),  # k3 = 2 - 1 - ln 2, its gradient 1 - 2
        advantages=rng.tensor([4.0, 5.0, -1.0]),
    )


@check("calc_grpo_objective", public=True, points=3, seeds=2, expected=objective_by_cases)
def ragged_objectives(student, rng):
    """Ragged, NaN or inf beyond the mask: the value, and a gradient for the log-probs alone"""
    mask = ragged_mask(rng)
    advantages = one_zero(rng, mask)
    return {
        f"{fill}": value_and_gradients(
            _objective(student, mask),
            **ragged_logprobs(rng, mask, fill, with_ref=True),
            advantages=advantages,
        )
        for fill in (NAN, torch.inf, -torch.inf)
    }


@check("calc_grpo_objective", public=True, points=2, seeds=2, expected=objective_by_cases)
def clips_and_beta(student, rng):
    """Different clip_coef, clip_coef_high and beta; by position too; no reference at beta 0"""
    mask, advantages = ragged_mask(rng, 8, 9), rng.normal(8)
    logprobs, old, ref = ragged_logprobs(rng, mask, with_ref=True).values()
    f = student.calc_grpo_objective
    options = {
        "narrow": {"clip_coef": 0.05, "beta": 0.0},
        "wide": {"clip_coef": 0.6, "beta": 0.0},
        "zero": {"clip_coef": 0.0, "beta": 0.0},
        "one": {"clip_coef": 1.0, "beta": 0.0},
        "higher": {"clip_coef_high": 0.6, "beta": 0.0},
        "no room above": {"clip_coef_high": 0.0, "beta": 0.0},  # a value, not a missing one
        "lower": {"clip_coef": 0.4, "clip_coef_high": 0.1, "beta": 0.0},
        "beta": {"beta": 1.5},
        "all": {"clip_coef": 0.1, "clip_coef_high": 0.3, "beta": 0.2},
    }
    found = {name: f(logprobs, old, ref, advantages, mask, **o) for name, o in options.items()}
    return found | {
        "by position": f(logprobs, old, ref, advantages, mask, 0.3, 0.5, 0.7),
        "no reference": value_and_gradients(
            lambda logprobs: f(logprobs, old, None, advantages, mask, 0.3, beta=0.0),
            logprobs=logprobs,
        ),
        "beta 0, the reference far off": value_and_gradients(
            lambda logprobs: f(logprobs - 100, old - 100, old, advantages, mask, beta=0.0),
            logprobs=logprobs,
        ),
        "no reference, but beta 0.04": _error_of_any_kind(f, logprobs, old, None, advantages, mask),
    }


def _error_of_any_kind(function, *args):
    """A ValueError is asked for; another error will do."""
    answer = error_of("ref_logprobs", function, *args)
    return answer if answer == "no error" else "a ValueError"


def _every_case(student, rng, **options):
    """Ratios from 0.05 to 20, each with both signs of the advantage."""
    logratio = rng.tensor([[-3.0, -1.0, -0.1, 0.1, 1.0, 3.0]]).repeat(4, 1)
    signs = rng.tensor([[1.0] * 6, [-1.0] * 6, [1.0, -1.0] * 3, [-1.0, 1.0] * 3])
    old = -rng.uniform(4, 6, low=3.5, high=4.0) * rng.tensor([[1.0], [3.0], [10.0], [30.0]])
    return value_and_gradients(
        _objective(student, torch.ones(4, 6, dtype=torch.bool), **options),
        logprobs=old + logratio,
        old_logprobs=old,
        ref_logprobs=old + rng.normal(4, 6),
        advantages=signs * rng.uniform(4, 6, low=0.5, high=2.0),
    )


@check("calc_grpo_objective", public=True, points=2, expected=objective_by_cases)
def every_case_of_the_minimum(student, rng):
    """Ratios from 0.05 to 20 with both signs of A, of exp(30) with A below 0: the gradient"""
    old = -rng.uniform(1, 3, low=35.0, high=40.0)
    far = value_and_gradients(
        _objective(student, torch.ones(1, 3, dtype=torch.bool), beta=0.0),
        logprobs=old + rng.tensor([[30.0, -30.0, 0.1]]),
        old_logprobs=old,
        ref_logprobs=old,
        advantages=-rng.uniform(1, low=0.5, high=2.0),
    )
    return {
        "a ratio of exp(30), A below 0": far,
        "defaults": _every_case(student, rng),
        "0.3 below, 0.05 above": _every_case(student, rng, clip_coef=0.3, clip_coef_high=0.05),
    }


@check("calc_grpo_objective", public=True, points=2, expected=objective_by_cases)
def advantages_of_tokens(student, rng):
    """Advantages [batch completion] that differ within a row, some 0, NaN or inf beyond; one row"""
    found = {}
    for rows, completion, fill in ((6, 4, NAN), (5, 5, torch.inf), (3, 7, -torch.inf), (1, 4, NAN)):
        mask, advantages = ragged_mask(rng, rows, completion), rng.normal(rows, completion)
        advantages[:, rng.integer(0, completion)] = 0.0
        found[f"{rows} by {completion}"] = value_and_gradients(
            _objective(student, mask),
            **ragged_logprobs(rng, mask, with_ref=True),
            advantages=poison(advantages, mask, fill),
        )
    return found


@check("calc_grpo_objective", points=3, expected=objective_by_cases, tier="hardening")
def objectives_of_many_shapes(student, rng):
    """As many completions as tokens, one row, one token, all full, 150 rows, nothing"""
    masks = masks_of_many_shapes(rng)
    return {
        name: value_and_gradients(
            _objective(student, mask),
            **ragged_logprobs(rng, mask, with_ref=True),
            advantages=rng.normal(len(mask)),
        )
        for name, mask in masks.items()
    }


@check("calc_grpo_objective", public=True, expected=ppo_without_values)
def ppo_of_each_completion(student, rng):
    """PPO with values 0 and gamma = lam = 1, completion by completion; beta 0, higher clip 0.28"""
    mask, advantages = ragged_mask(rng), rng.normal(6)
    return value_and_gradients(
        _objective(student, mask, 0.2, 0.28, beta=0.0),
        **ragged_logprobs(rng, mask, with_ref=True),
        advantages=advantages,
    )


@check("calc_grpo_objective", points=2, expected=objective_by_cases, tier="hardening")
def far_from_the_reference(student, rng):
    """Log-probs 9, 40, 80 away from the reference's; exp(6) against A below -15; inputs stay"""
    old, distances = -rng.uniform(2, 3), {"9": [9.0, -9.0, 7.0], "40": [40.0, 0.0, 39.0]}
    mask, advantages = ragged_mask(rng), rng.normal(6)
    rows = ragged_logprobs(rng, mask, with_ref=True)
    return {
        name: value_and_gradients(
            _objective(student, torch.ones(2, 3, dtype=torch.bool)),
            logprobs=old + rng.normal(2, 3, std=0.1),
            old_logprobs=old,
            ref_logprobs=old + rng.tensor([far, [-6.0, -80.0, 0.0]]),
            advantages=rng.normal(2),
        )
        for name, far in distances.items()
    } | {
        "a ratio of exp(6)": value_and_gradients(
            _objective(student, torch.ones(1, 2, dtype=torch.bool)),
            logprobs=old[:1, :2] + rng.tensor([[6.0, -6.0]]),
            old_logprobs=old[:1, :2],
            ref_logprobs=old[:1, :2],
            advantages=rng.tensor([-30.0]) * rng.uniform(1, low=0.5),
        ),
        "inputs": with_inputs_after(student.calc_grpo_objective, *rows.values(), advantages, mask),
    }


# --- process_advantages -------------------------------------------------------------------------


def rewarded_steps(rng, counts: list[int], completion_len: int):
    """Rewards of so many steps a row, and where they end: in any order, some at one token."""
    return [rng.normal(n, std=2) for n in counts], [
        rng.integers(0, completion_len, n) for n in counts
    ]


@check(
    "process_advantages",
    public=True,
    expected=[
        [0.8, 0.8, -0.4, -0.4, 0.0],
        [-0.8, -0.4, -0.4, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ],
)
def worked_steps(student, rng):
    """Rewards 1, 5 | 1, 1 ending at 3, 1 | 0, 2; mean 2, std 2, eps 0.5: -0.4, 1.2 | -0.4, -0.4"""
    rewards = [rng.tensor(row) for row in ([1.0, 5.0], [1.0, 1.0], [3.0], [3.0, 3.0])]
    ends = [torch.tensor(row) for row in ([3, 1], [0, 2], [2], [1, 4])]
    return student.process_advantages(rewards, ends, 2, 5, eps=0.5)


@check("process_advantages", public=True, points=4, seeds=2, expected=process_by_statistics)
def ragged_steps(student, rng):
    """Several groups, uneven numbers of steps, some at one token, a row without any; no gradient"""
    found, f = {}, student.process_advantages
    for size, counts in ((2, [3, 2, 0, 4, 2, 2]), (3, [2, 0, 5, 1, 3, 1]), (4, [1, 6, 2, 3])):
        order = rng.permutation(len(counts)).tolist()
        rewards, ends = rewarded_steps(rng, [counts[i] for i in order], 7)
        rewards = [r + 3.0 * (row // size) for row, r in enumerate(rewards)]
        found[f"groups of {size}"] = f(rewards, ends, size, 7)
    rewards, ends = rewarded_steps(rng, [90, 110], 7)
    rewards[0][rng.integer(0, 90)] = 600.0
    found["an outlier"] = f(rewards, ends, 2, 7)
    ends = [torch.tensor(row) for row in ([0, 0, 0], [5, 2, 5, 2], [2], [5])]
    leaves = [leaf(rng.normal(len(row), std=2)) for row in ends]
    shared = f(leaves, ends, 2, 6)
    found |= {"shared ends": shared, "more tokens": f(leaves, ends, 4, 9), "ends afterwards": ends}
    rows = {f"the rewards of row {i}": x for i, x in enumerate(leaves)}
    return found | gradients(shared * rng.normal(*shared.shape), **rows)


@check("process_advantages", expected=process_by_statistics, tier="hardening")
def steps_of_small_spread(student, rng):
    """Stds near 1e-3 and 1e-7, where the eps matters; its default, and others"""
    rewards, ends = rewarded_steps(rng, [3, 1, 2, 4], 6)
    rewards, f = [r / 2000 for r in rewards], student.process_advantages
    return [
        f(rewards, ends, 2, 6),
        f(rewards, ends, 2, 6, 0.01),
        f(rewards, ends, 4, 6, eps=0.3),
        f([r / 1e4 for r in rewards], ends, 2, 6),
    ]


@check("process_advantages", points=2, seeds=2, expected=process_by_statistics, tier="hardening")
def groups_without_differences(student, rng):
    """All steps with the same reward, or no steps at all: zeros; two steps that differ: no zeros"""
    values = rng.integers(-5, 5, 4).tolist()
    rewards = [[float(v)] * n for v in values for n in (4, 3)]  # numbers whose mean is exact
    rewards += [[], [], rng.normal(1).tolist(), rng.normal(1).tolist()]
    rewards += [rng.normal(3).tolist(), rng.normal(2).tolist()]
    rewards = [rng.tensor(row) for row in rewards]
    ends = [rng.integers(0, 5, len(row)) for row in rewards]
    return student.process_advantages(rewards, ends, 2, 5)


def _error_of_steps(function, *args):
    """Which of the arguments is to blame is open."""
    answer = error_of("completion_len", function, *args)
    return answer if answer.endswith("names it") else error_of("step", function, *args)


@check("process_advantages", points=2, tier="hardening")
def steps_that_do_not_fit(student, rng):
    """Ends beyond the completion, or too few; a group_size that doesn't divide: a ValueError"""
    rewards, ends = rewarded_steps(rng, [2, 1, 3, 1], 5)
    f, first = student.process_advantages, rng.integers(0, 5, 1)
    bad = {
        "an end at 5 of 5 tokens": [torch.cat([first, torch.tensor([5])]), *ends[1:]],
        "an end at -1": [torch.cat([first, torch.tensor([-1])]), *ends[1:]],
        "an end at 5, before another, in row 2": [
            *ends[:2],
            torch.cat([torch.tensor([5]), ends[2][1:]]),
            ends[3],
        ],
        "2 rewards and 1 end": [first, *ends[1:]],
        "1 reward and 2 ends": [ends[0], ends[0], *ends[2:]],
        "4 rows of rewards and 3 of ends": ends[:3],
    }
    found = {name: _error_of_steps(f, rewards, bad_ends, 2, 5) for name, bad_ends in bad.items()}
    for n in (3, 5, 8):
        found[f"group_size {n} for 4 rows"] = error_of("group_size", f, rewards, ends, n, 5)
    return found | {"as it should be": f(rewards, ends, 2, 5)}


# --- make_grpo_memory ---------------------------------------------------------------------------

GRPO_FIELDS = ("input_ids", "attention_mask", "mask", "logprobs", "ref_logprobs", "advantages")


def _make_grpo_args(student, **options):
    defaults = {
        "batch_size": 6,
        "num_minibatches": 1,
        "group_size": 3,
        "gen_len": 5,
        "prompts": list(trainers.PROMPTS),
    }
    return student.GrpoArgs(**(defaults | options))


def _make_grpo_memory(student, rng, scores, with_reference=True, with_gradients=False, **options):
    rows = len(scores)
    args = _make_grpo_args(student, batch_size=rows, **options)
    samples = make_samples(rng, rows)
    mask = samples.completion_mask
    logprobs, ref_logprobs = (beyond(rng.normal(rows, 5, mean=-1), mask) for _ in range(2))
    if with_gradients:
        # As a forward gives them: no leaves.
        scores, logprobs, ref_logprobs = (1 * leaf(x) for x in (scores, logprobs, ref_logprobs))
    before = trainers.copy_arguments(args)
    memory = student.make_grpo_memory(
        args, samples, scores, logprobs, ref_logprobs if with_reference else None
    )
    names = GRPO_FIELDS if with_reference else [n for n in GRPO_FIELDS if n != "ref_logprobs"]
    fields = {name: getattr(memory, name) for name in names}
    tensors = {name: x for name, x in fields.items() if isinstance(x, Tensor)}
    per_token = {n: x for n, x in tensors.items() if "logprobs" in n and x.shape == mask.shape}
    found = fields | {name: inside(x, mask) for name, x in per_token.items()}
    return found | {
        "fields with a gradient": [name for name, x in tensors.items() if x.requires_grad],
        "minibatches": len(memory.get_minibatches()),
        "whether there are ref_logprobs": getattr(memory, "ref_logprobs", None) is not None,
        "the list of the arguments that changed": trainers.list_changed(args, before),
        "scores afterwards": scores,
        "logprobs afterwards": inside(logprobs, mask),
    }


@check("make_grpo_memory", public=True, points=2, seeds=2, expected=grpo_memory_by_loops)
def memory_of_groups(student, rng):
    """Groups, one of equal scores; ragged rows, NaN beyond the mask; stored detached"""
    # Seven times 1e6 / 9 in float32 has another mean.
    constant = rng.tensor([1e6 / 9]).repeat(7)
    scores = torch.cat([rng.normal(7, mean=5), constant, rng.normal(14, mean=-3, std=2)])
    sizes = {"group_size": 7, "batches_per_learning_phase": 3, "num_minibatches": 2}
    return _make_grpo_memory(student, rng, scores, with_gradients=True, **sizes)


@check("make_grpo_memory", public=True, expected=grpo_memory_by_loops)
def memory_with_other_scales(student, rng):
    """advantage_scale "batch" and "none", no reference; scores of small spread; stored detached"""
    scores = rng.normal(6, std=20) + rng.tensor([50.0, 50, 50, -30, -30, -30])
    batch = {"advantage_scale": "batch", "num_minibatches": 2, "kl_kind": "exact"}
    return [
        _make_grpo_memory(student, rng, scores, with_gradients=True, **batch),
        _make_grpo_memory(student, rng, scores, False, advantage_scale="none", kl_coef=0.0),
        _make_grpo_memory(student, rng, rng.normal(6, std=1e-3)),
    ]


def _whole_groups(observed, reference):
    orders, labels = [], reference["the last token of each row"]
    for epoch in observed["the last token of each row, in minibatches"]:
        rows = (labels == epoch.flatten()[:, None]).int().argmax(1)
        if not torch.equal(rows % 2, (torch.arange(24) % 2).to(rows)):
            return "a minibatch should hold whole groups, the completions of a prompt side by side"
        if not torch.equal(rows // 2 * 2, rows[::2].repeat_interleave(2)):
            return "a minibatch should hold whole groups, the completions of a prompt side by side"
        if rows.sort().values.tolist() != list(range(24)):
            return "every row should come exactly once per epoch"
        orders.append({frozenset(minibatch.tolist()) for minibatch in rows.reshape(3, 8)})
    if all(order == orders[0] for order in orders):  # by chance once in 5775 ** 3
        return "each epoch should mix the groups anew; here the same ones share a minibatch again"
    return None


@check("make_grpo_memory", public=True, holds=_whole_groups)
def groups_stay_together(student, rng):
    """Minibatches of whole groups: 12 groups of 2, 3 minibatches, 4 epochs"""
    args = _make_grpo_args(
        student, batch_size=24, group_size=2, num_minibatches=3, batches_per_learning_phase=4
    )
    samples = make_samples(rng, rows=24)
    samples.input_ids[:, -1] = labels = rng.permutation(500)[:24]
    logprobs = rng.normal(24, 5)
    memory = student.make_grpo_memory(args, samples, rng.normal(24), logprobs, logprobs)
    rows = [minibatch.input_ids[:, -1] for minibatch in memory.get_minibatches()]
    return {
        "the last token of each row": labels,
        "the last token of each row, in minibatches": torch.stack(rows).reshape(4, 3, 8),
        "advantages": memory.advantages,
    }


# --- GrpoTrainer: rollouts ----------------------------------------------------------------------


GRPO_ROLLOUT = {
    "batch_size": 36,
    "num_minibatches": 3,
    "group_size": 3,
    "gen_len": 6,
    "temperature": 0.5,
    "advantage_scale": "none",  # which sees a score that was scaled before
}


def _roll_out_groups(student, rng, **options):
    reward_fn = trainers.RecordingReward()
    args = _make_grpo_args(student, **(GRPO_ROLLOUT | {"reward_fn": reward_fn} | options))
    model = make_model(student.GrpoTrainer.model_class, rng, "ending")
    trainer = student.GrpoTrainer(args, model)
    trainers.roll_out_before(trainer, rng)
    found = {"texts of the first rollout": reward_fn.samples}
    found["prompts of the first rollout"] = reward_fn.prompts
    reward_fn.start()
    memory = trainer.rollout_phase()
    names = [name for name in GRPO_FIELDS if args.kl_coef > 0 or name != "ref_logprobs"]
    fields = {name: getattr(memory, name) for name in names}
    found |= {"texts": reward_fn.samples, "prompts": reward_fn.prompts, "seed": rng.seed}
    found["the memory"] = _find_rows(memory, memory)
    found["the list of minibatches"] = [_find_rows(memory, m) for m in memory.get_minibatches()]
    return found | trainers.describe_rollout(fields, args.gen_len)


def _find_rows(memory, rows) -> Tensor:
    """The first row of the memory that has the same ids, for each of some rows."""
    same = (rows.input_ids[:, None] == memory.input_ids).all(-1)
    return same.long().argmax(-1)


def _is_a_rollout_of_groups(**options):
    """A predicate that rebuilds the memory from the ids that were sampled."""

    def holds(observed, reference):
        args = ch3_grpo.GrpoArgs(**(GRPO_ROLLOUT | {"prompts": trainers.PROMPTS} | options))
        rebuilt = trainers.rebuild_rollout(TransformerWithLora, observed, reference["seed"], args)
        wrong = trainers.find_wrong_sample(observed, rebuilt, args)
        if wrong is not None:
            return wrong
        wrong = _find_wrong_groups(observed) or _find_torn_groups(observed)
        if wrong is not None:
            return wrong
        pairs = zip(observed["texts"], observed["prompts"], strict=True)
        scores = torch.tensor([trainers.score_text(*pair) for pair in pairs])
        memory = {
            "logprobs": inside(rebuilt.logprobs, observed["mask"]),
            "ref_logprobs": inside(rebuilt.ref_logprobs, observed["mask"]),
            "advantages": advantages_by_statistics(scores, 3, args.advantage_scale),
        }
        for name in memory.keys() & observed.keys():
            if not torch.allclose(observed[name], memory[name], atol=2e-3):
                return f"{name} of the memory are wrong"
        return None

    return holds


def _find_wrong_groups(observed) -> str | None:
    groups = [observed["prompts"][i : i + 3] for i in range(0, 36, 3)]
    if any(len(set(group)) > 1 for group in groups):
        return "the completions of one prompt should be next to each other"
    firsts = [group[0] for group in groups]
    if all(len(set(firsts[i : i + 4])) == 1 for i in range(0, 12, 4)):
        return (
            "there should be 12 groups of 3 completions, each group with a prompt of its own; "
            "here there are 3 prompts with 12 completions each"
        )
    if observed["prompts of the first rollout"] == observed["prompts"]:
        return "a second rollout should draw new prompts"
    texts = observed["texts"] + observed["texts of the first rollout"]
    if all(len(set(texts[i : i + 3])) == 1 for i in range(0, len(texts), 3)):
        return "each completion of a group should be sampled on its own; here all are the same"
    return None


def _find_torn_groups(observed) -> str | None:
    rows, minibatches = observed["the memory"], torch.stack(observed["the list of minibatches"])
    groups = [sorted(group) for group in rows.reshape(12, 3).tolist()]
    if any(sorted(group) not in groups for group in minibatches.reshape(72 // 3, 3).tolist()):
        return "the memory's minibatches should hold whole groups, the completions of one prompt"
    epochs = minibatches.reshape(2, 36).sort().values
    if not torch.equal(epochs, rows.sort().values.expand(2, 36)):
        return "the memory's minibatches should hold every row once per epoch"
    return None


@check("GrpoTrainer.rollout_phase", points=4, holds=_is_a_rollout_of_groups())
def rollout_of_groups(student, rng):
    """A second rollout: groups of the adapted policy at temperature 0.5, the memory's fields"""
    return _roll_out_groups(student, rng)


OTHER_GRPO_ROLLOUT = {
    "kl_coef": 0.0,
    "advantage_scale": "batch",
    "top_k": 5,
    "temperature": 1.0,
    "prepend_bos": False,
}


@check("GrpoTrainer.rollout_phase", points=2, holds=_is_a_rollout_of_groups(**OTHER_GRPO_ROLLOUT))
def rollout_without_a_reference(student, rng):
    """kl_coef 0, advantage_scale "batch", top_k 5, no bos: every argument reaches its place"""
    return _roll_out_groups(student, rng, **OTHER_GRPO_ROLLOUT)


def _right_ratio_with_the_exact_kl(observed, reference):
    if not observed["whether there are ref_logprobs"]:
        return 'the memory needs ref_logprobs with kl_kind "exact" too: kl_k3 is computed from them'
    return trainers.find_wrong_ratio(observed, reference)


@check("GrpoTrainer.rollout_phase", public=True, holds=_right_ratio_with_the_exact_kl, beside=True)
def first_ratio_is_one(student, rng):
    """In bfloat16, where the merged model's log-probs differ visibly; kl_kind "exact"; args.seed"""
    # Four prompts: args.seed decides them, too.
    options = {"batch_size": 12, "group_size": 3, "gen_len": 3, "kl_kind": "exact"}
    make_args = functools.partial(_make_grpo_args, student, **options)
    model = make_model(student.GrpoTrainer.model_class, rng, dtype=torch.bfloat16)
    sampled = trainers.sample_again(student.GrpoTrainer, make_args, model)
    has_reference = sampled["memory"].ref_logprobs is not None
    found = trainers.describe_first_ratio(sampled, model, gen_len=3)
    return found | {"whether there are ref_logprobs": has_reference}


def _counts(observed, reference):
    if observed["forwards without adapters"] != reference["forwards without adapters"]:
        return "with kl_coef 0 the reference should never run"
    if len(observed["prompts of groups"]) != 12:
        return "a rollout should have batch_size completions"
    groups = [observed["prompts of groups"][i : i + 3] for i in range(0, 12, 3)]
    if (n_prompts := max(len(set(group)) for group in groups)) > 1:
        return (
            "each prompt should get group_size completions, side by side; here completions of "
            f"{n_prompts} prompts share a group"
        )
    if observed["sizes of what is trained"] != reference["sizes of what is trained"]:
        return "without a value head there is nothing to train but the adapters"
    if observed["prompts"] != ["This movie is"] * 12:  # six for each of two rollouts
        return "without prompts, every prompt should be the prefix"
    if observed["log-probs off by"] > 1e-3:
        return "the old log-probs should be those of the model"
    if observed["reference off by"] > 1e-3:
        return "ref_logprobs of the memory should be those of the model with its adapters off"
    for scale, worked in {"group": [-1.0, 0.0, 1.0], "none": [-30.0, 0.0, 30.0]}.items():
        found = observed[f"advantages, {scale}"].reshape(-1, 3)
        if not torch.allclose(found, torch.tensor(worked).expand_as(found), atol=1e-3):
            return (
                f'with advantage_scale "{scale}" each group, rewarded by 0, 30 and 60, should have '
                f"the advantages {worked}, but the first has {found[0].tolist()}"
            )
    return None


class CountingReward(trainers.RecordingReward):
    """Rewards 0, 30, 60 and again, whatever the completions: a group of 3 has each of them."""

    def __call__(self, samples, *, prompts):
        start = len(self.samples)
        super().__call__(samples, prompts=prompts)
        return torch.tensor([30.0 * (i % 3) for i in range(start, start + len(samples))])


@check("GrpoTrainer.rollout_phase", public=True, holds=_counts, beside=True)
def no_value_head_and_no_reference(student, rng):
    """No value head; kl_coef 0: no reference runs; prompts None; then 4 groups with a reference"""
    reward_fn = CountingReward()
    args = _make_grpo_args(
        student,
        base_model=models.get_checkpoint("shallow"),
        kl_coef=0.0,
        lora_rank=rng.integer(2, 9),
        prompts=None,
        reward_fn=reward_fn,
    )
    trainer = student.GrpoTrainer(args)
    model, entered = trainer.model, []
    reference = type(model).reference

    def counted(self):
        entered.append(1)
        return reference(self)

    type(model).reference = counted
    try:
        memory = trainer.rollout_phase()
        ids, n_prompt = memory.input_ids, memory.input_ids.shape[1] - memory.mask.shape[1]
        with torch.no_grad():
            logprobs = trainers.score_rows(model(ids, memory.attention_mask), ids, n_prompt)
        off = (memory.logprobs - logprobs)[memory.mask]
        trainer.learning_phase(memory)
        trainers.make_end_likely(model)
        trainer.learning_phase(trainer.rollout_phase())
    finally:
        type(model).reference = reference
    groups = CountingReward()
    options = {"batch_size": 12, "advantage_scale": "none", "reward_fn": groups}
    other = make_model(student.GrpoTrainer.model_class, rng)
    grouped = student.GrpoTrainer(_make_grpo_args(student, **options), other).rollout_phase()
    ids, n_prompt = grouped.input_ids, grouped.input_ids.shape[1] - grouped.mask.shape[1]
    with torch.no_grad(), other.reference():
        ref_logprobs = trainers.score_rows(other(ids, grouped.attention_mask), ids, n_prompt)
    ref_off = (grouped.ref_logprobs - ref_logprobs)[grouped.mask]
    return {
        "prompts of groups": groups.prompts,
        "reference off by": ref_off.abs().max().float(),
        "advantages, none": grouped.advantages,
        "forwards without adapters": len(entered),
        "sizes of what is trained": sorted(p.numel() for p in model.trainable_parameters()),
        "prompts": reward_fn.prompts,
        "log-probs off by": off.abs().max().float(),
        "advantages, group": memory.advantages,
    }


# --- GrpoTrainer: the objective -----------------------------------------------------------------

GRPO_OBJECTIVE = {
    "batch_size": 12,  # twice the rows of a minibatch
    "num_minibatches": 2,
    "clip_coef": 0.6,  # no number twice: one could stand for another
    "ent_coef": 0.3,
    "kl_coef": 0.8,
    "temperature": 0.7,
    "top_k": 5,  # concerns sampling alone
    "gen_len": 8,  # no completion became as long
}


def _make_grpo_fields(rng, samples, temperature):
    mask, ids = samples.completion_mask, samples.completion_ids
    ends = mask & ~F.pad(mask[:, 1:], (0, 1))
    ends[mask.sum(-1).argmax()] = False  # cut off
    ids[ends] = models.SPECIAL["eos_token_id"]
    ids[mask[:, 1], 0] = models.SPECIAL["pad_token_id"]  # a token like any other
    old = trainers.draw_logprobs(rng, samples, temperature)
    ref = trainers.draw_logprobs(rng, samples, temperature, std=0)  # as a forward would give it
    fields = {
        "input_ids": samples.input_ids,
        "attention_mask": samples.attention_mask,
        "mask": mask,
        "logprobs": beyond(old, mask),
        "ref_logprobs": beyond(ref, mask),
    }
    return fields | {"advantages": one_zero(rng, mask)}


def grpo_objective_by_definition(self, minibatch):
    """Plain Hugging Face for the logits, loops over completions and their tokens."""
    args, mask, ids = self.args, minibatch.mask, minibatch.input_ids
    n_prompt = ids.shape[1] - mask.shape[1]
    run = trainers.run_hugging_face
    logits, _ = run(self.model, "shallow", ids, minibatch.attention_mask)
    ref_logits, _ = run(self.model, "shallow", ids, minibatch.attention_mask, adapters=False)
    rows, entropies, exact_kls = [], [], []
    for row, n in enumerate(mask.sum(-1).tolist()):
        terms = [logits.new_zeros(())] if n == 0 else []
        for t in range(n):
            at = n_prompt + t - 1
            policy = Categorical(logits=logits[row, at] / args.temperature)
            reference = Categorical(logits=ref_logits[row, at].detach() / args.temperature)
            logprob = policy.log_prob(ids[row, at + 1])
            ratio = (logprob - minibatch.logprobs[row, t]).exp()
            advantage = minibatch.advantages[row]
            low, high = 1 - args.clip_coef, 1 + args.clip_coef
            term = ratio * advantage
            if (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low):
                term = ratio.detach().clamp(low, high) * advantage
            if args.kl_kind == "k3" and args.kl_coef > 0:
                d = minibatch.ref_logprobs[row, t] - logprob
                term = term - args.kl_coef * (d.exp() - 1 - d)
            terms.append(term)
            entropies.append(policy.entropy())
            exact_kls.append(kl_divergence(policy, reference))
        rows.append(torch.stack(terms).mean())
    objective = torch.stack(rows).mean() + args.ent_coef * torch.stack(entropies).mean()
    if args.kl_kind == "exact":
        objective = objective - args.kl_coef * torch.stack(exact_kls).mean()
    return objective


def _grpo_objective(
    student,
    rng,
    one_row_twice=False,
    kl_kinds=("k3",),
    minibatches=1,
    **options,
):
    """The objective and its gradient, for minibatches of one trainer and for one kl_kind after the
    other."""
    model, found = make_model(TransformerWithLora, rng, alpha=8), []
    for kl_kind in kl_kinds:
        args = _make_grpo_args(student, kl_kind=kl_kind, **(GRPO_OBJECTIVE | options))
        trainer = student.GrpoTrainer(args, model)
        trainer.phase = args.total_phases // 2  # with the coefficients of the first
        model.train()
        for _ in range(minibatches):
            samples = make_samples(rng, prompt_len=4 + len(found))  # the next prompts are longer
            if "exact" in kl_kinds:  # of one length: whether its mean is over tokens is left open
                samples.completion_mask[:] = torch.arange(5) < 3
            fields = _make_grpo_fields(rng, samples, args.temperature)
            if args.kl_coef == 0:
                fields["ref_logprobs"] = model.reference = None  # no reference runs
                fields["advantages"] = 20 * fields["advantages"]
            if one_row_twice:  # which counts twice
                fields = {
                    k: None if x is None else x[[0, 0, 1, 2, 3, 4]] for k, x in fields.items()
                }
            (minibatch,) = ReplayMemory(**fields).get_minibatches()
            objective = trainer.compute_rlhf_objective(minibatch)
            gradients = trainers.adapter_gradients(objective, model)
            found.append({"the objective": objective} | gradients)
    return found if len(found) > 1 else found[0]


GRPO_CHECK = {
    "expected": grpo_objective_by_definition,
    "float64": False,
    "rtol": 1e-3,
    "atol": 1e-4,
}


@check("GrpoTrainer.compute_rlhf_objective", public=True, points=3, seeds=2, **GRPO_CHECK)
def grpo_objective_and_gradient(student, rng):
    """GRPO objective with k3, entropy bonus, temperature 0.7, and the gradient"""
    return _grpo_objective(student, rng)


@check("GrpoTrainer.compute_rlhf_objective", public=True, points=2, **GRPO_CHECK)
def objective_with_the_exact_kl(student, rng):
    """kl_kind "exact": the KL over the vocabulary in place of k3, minibatch after minibatch"""
    # One more than num_minibatches.
    options = {"kl_kinds": ("exact",), "batches_per_learning_phase": 1, "minibatches": 3}
    return _grpo_objective(student, rng, **options)


@check("GrpoTrainer.compute_rlhf_objective", public=True, **GRPO_CHECK)
def objective_without_kl(student, rng):
    """kl_coef and ent_coef 0: no ref_logprobs, whichever the kl_kind; large advantages, one 0"""
    options = {"kl_coef": 0.0, "ent_coef": 0.0, "kl_kinds": ("k3", "exact")}
    return _grpo_objective(student, rng, one_row_twice=True, **options)


@check("GrpoTrainer.compute_rlhf_objective", public=True, **GRPO_CHECK)
def grpo_objective_by_default(student, rng):
    """The default coefficients, temperature 1; as in the second of two epochs of one minibatch"""
    counts = {"batch_size": 6, "num_minibatches": 1, "batches_per_learning_phase": 2}
    defaults = {"clip_coef": 0.2, "ent_coef": 0.001, "kl_coef": 0.04, "temperature": 1.0}
    return _grpo_objective(student, rng, **defaults, **counts, top_k=None, gen_len=5)


# --- measure_loss_and_gradient_at_start ---------------------------------------------------------


def _zero_and_not_zero(observed, reference):
    for name in ("first", "second"):
        objective, norm = observed[name].tolist()
        if not abs(objective) < 1e-6:
            return (
                f"the objective is {objective:.2g}, but over whole groups, with every ratio "
                "exactly 1, it should be 0: the mean over each completion, then over the batch, "
                "without KL and entropy"
            )
        if not 1e-4 < norm < 1e4:
            return "the gradient should not be 0: it is that of the log-probs times advantages"
    if observed["first"][1] == observed["second"][1]:
        return "the gradient should be that of this trainer's own rollout"
    if observed["sum of the parameters"] != reference["sum of the parameters"]:
        return "measuring should not move the parameters"
    if not observed["arguments as before"]:
        return "measuring should leave the trainer's arguments as before"
    return None


def _count_letters(samples):
    return torch.tensor([float(len(text)) for text in samples])


def _make_grpo_trainer(student, rng, dtype=None, **options):
    args = _make_grpo_args(student, **(GRPO_ROLLOUT | {"reward_fn": _count_letters} | options))
    return student.GrpoTrainer(args, make_model(TransformerWithLora, rng, "ending", dtype))


@check(
    "measure_loss_and_gradient_at_start",
    public=True,
    points=2,
    holds=_zero_and_not_zero,
    beside=True,
)
def objective_at_the_start(student, rng):
    """Fresh rollouts, one in bfloat16: objective 0 up to 1e-6, gradient not; args unchanged"""
    trainer = _make_grpo_trainer(student, rng)
    before = dict(vars(trainer.args))
    first = [float(x) for x in student.measure_loss_and_gradient_at_start(trainer)]
    parameters = trainer.model.trainable_parameters()
    total = float(sum(p.detach().double().sum() for p in parameters))
    # Where the merged model would round visibly.
    other = SimpleNamespace(seed=rng.seed + 1, dtype=rng.dtype)
    other = _make_grpo_trainer(student, other, dtype=torch.bfloat16)
    second = [float(x) for x in student.measure_loss_and_gradient_at_start(other)]
    return {
        "first": torch.tensor(first),
        "second": torch.tensor(second),
        "sum of the parameters": total,
        "arguments as before": before == vars(trainer.args),
    }


def measure_by_reinforce(trainer):
    """At ratio 1 the gradient is that of the mean over completions of mean log-prob times A."""
    memory = trainer.rollout_phase()
    ids, mask = memory.input_ids, memory.mask
    n_prompt = ids.shape[1] - mask.shape[1]
    logits, _ = trainers.run_hugging_face(trainer.model, "ending", ids, memory.attention_mask)
    logprobs = trainers.score_rows(logits, ids, n_prompt, trainer.args.temperature)
    rows = [
        (logprobs[row, :n] * memory.advantages[row]).mean() if n else logprobs.new_zeros(())
        for row, n in enumerate(mask.sum(-1).tolist())
    ]
    gradients = torch.autograd.grad(torch.stack(rows).mean(), trainer.model.trainable_parameters())
    return 0.0, float(sum((g**2).sum() for g in gradients) ** 0.5)


@check(
    "measure_loss_and_gradient_at_start",
    public=True,
    points=2,
    expected=measure_by_reinforce,
    rtol=1e-3,
)
def gradient_at_the_start(student, rng):
    """On a given rollout, one group constant: the gradient's norm, without KL and entropy"""
    options = {"batch_size": 18, "num_minibatches": 1, "ent_coef": 0.5, "kl_coef": 2.0}
    trainer = _make_grpo_trainer(student, rng, **options)
    samples = make_samples(rng, 18, empty_row=False)  # empty, it would break its group's balance
    ids, temperature = samples.input_ids, trainer.args.temperature
    with torch.no_grad():
        logits = trainer.model(ids, samples.attention_mask)
    logprobs = trainers.score_rows(logits, ids, samples.prompt_len, temperature)
    # Not quite the model's: the ratio is taken against what its own forward gives.
    old, ref = (logprobs + rng.normal(*logprobs.shape, std=0.1) for _ in range(2))
    scores = rng.normal(18, mean=4)
    scores[6:9] = scores[6]
    memory = student.make_grpo_memory(trainer.args, samples, scores, old, ref)
    trainer.rollout_phase = lambda: memory
    trainer.sample_and_score = lambda n_prompts, group_size=1: (samples, scores)
    found = {}
    for call in ("", ", measured again"):
        objective, norm = student.measure_loss_and_gradient_at_start(trainer)
        found[f"the objective{call}"] = float(objective)
        found[f"the norm of the gradient{call}"] = float(norm)
    return found


# --- GrpoTrainer: all of it ---------------------------------------------------------------------


@check("GrpoTrainer.train", public=True, slow=True, holds=trainers.find_no_learning)
def a_short_run_of_grpo(student, rng):
    """Eight phases, rewarded for full stops: at least half as many again"""
    return trainers.train_shortly(student.GrpoTrainer, student.GrpoArgs, rng)
