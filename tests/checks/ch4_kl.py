"""Checks of chapter 4: estimators of the KL, their values and the gradients that they have."""

import functools
import itertools

import torch
from torch import Tensor

from tests.oracles.ch4_kl import (
    estimate_number_by_number,
    estimate_of_probabilities,
    gradient_by_the_score,
    kl_by_distributions,
    kl_of_possible_tokens,
    stats_by_loops,
)
from tests.support.inputs import (
    INF,
    KINDS,
    PLACES,
    error_of,
    leaf,
    value_and_gradients,
    with_inputs_after,
)
from utils.grading.checks import check

# --- calc_kl_estimate ---------------------------------------------------------------------------


def draw_logprobs(rng, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the policy, the reference and the policy that sampled."""
    return tuple(-rng.uniform(*shape, high=3.0) for _ in range(3))


@check(
    "calc_kl_estimate",
    public=True,
    expected={
        "k1": [-0.6931472, 0.0, 0.6931472],
        "k2": [0.2402265, 0.0, 0.2402265],
        "k3": [0.3068528, 0.0, 0.1931472],
        "k4": [-0.6931472, 0.0, 0.6931472],
        "k4, sampled from 0.4, 0.4, 0.2": [-0.3465736, 0.0, 1.3862944],
    },
)
def worked_estimates(student, rng):
    """Policy 0.2, 0.5, 0.4, reference 0.4, 0.5, 0.2: l is -ln 2, 0, ln 2"""
    p, q, old = rng.tensor([[0.2, 0.5, 0.4], [0.4, 0.5, 0.2], [0.4, 0.4, 0.2]]).log()
    found = {kind: student.calc_kl_estimate(p, q, kind) for kind in KINDS}
    return found | {"k4, sampled from 0.4, 0.4, 0.2": student.calc_kl_estimate(p, q, "k4", old)}


@check("calc_kl_estimate", public=True, points=5, seeds=2, expected=estimate_of_probabilities)
def estimates_and_gradients(student, rng):
    """With or without old log-probs, tensors, numbers: the value, a gradient for the policy only"""
    found = {}
    for kind, shape in itertools.product(KINDS, ((3, 4), ())):
        logprobs, ref_logprobs, old_logprobs = draw_logprobs(rng, *shape)
        old_logprobs -= 6 * rng.integer(0, 2)  # ratios up to 8000
        given = {"logprobs": logprobs, "ref_logprobs": ref_logprobs}
        f = functools.partial(student.calc_kl_estimate, kind=kind)
        found[f"{kind}, shape {shape}"] = value_and_gradients(f, **given)
        found[f"{kind}, shape {shape}, an older policy"] = value_and_gradients(
            f, **given, old_logprobs=old_logprobs
        )
    return found


@check(
    "calc_kl_estimate",
    points=2,
    seeds=2,
    expected=estimate_number_by_number,
    rtol=0.05,
    atol=1e-12,
    tier="hardening",
)
def small_differences(student, rng):
    """Differences near 1e-4 and 1e-3: k3 is never negative, and right to a few percent"""
    signs = 2.0 * rng.integers(0, 2, 200) - 1
    logprobs = -rng.uniform(200, low=0.02, high=0.5)
    sizes = [rng.uniform(100, low=2e-5, high=3e-4), rng.uniform(100, low=3e-4, high=3e-3)]
    # Rounded to float32, so that a run in float64 sees the same numbers.
    ref_logprobs = (logprobs.float() + (signs * torch.cat(sizes)).float()).to(rng.dtype)
    return {kind: student.calc_kl_estimate(logprobs, ref_logprobs, kind) for kind in KINDS}


@check("calc_kl_estimate", tier="hardening")
def unknown_estimators(student, rng):
    """An unknown kind: a ValueError names it"""
    logprobs, ref_logprobs, _ = draw_logprobs(rng, 3)
    f = student.calc_kl_estimate
    bad = {kind: error_of("kind", f, logprobs, ref_logprobs, kind) for kind in ("k5", "K1", "")}
    return bad | {kind: f(logprobs, ref_logprobs, kind) for kind in KINDS}


# --- calc_exact_kl ------------------------------------------------------------------------------


@check("calc_exact_kl", public=True, expected=[0.3465736, 0.1438410, 0.1520494, 0.0])
def worked_kl(student, rng):
    """1/2, 1/2, 0 against 1/4, 1/2, 1/4: ln(2)/2; two policies, both ways round; one with itself"""
    p = rng.tensor([[4, 4, 0], [2, 4, 2], [4, 3, 1], [4, 3, 1]]).log()
    q = rng.tensor([[2, 4, 2], [4, 3, 1], [2, 4, 2], [4, 3, 1]]).log()
    return student.calc_exact_kl(p, q)


@check("calc_exact_kl", public=True, points=4, seeds=2, expected=kl_by_distributions)
def kl_and_gradients(student, rng):
    """Random logits, 1 to 3 axes: the value, and a gradient for the policy only"""
    return {
        f"shape {shape}": value_and_gradients(
            student.calc_exact_kl,
            logits=rng.normal(*shape, std=2),
            ref_logits=rng.normal(*shape, std=2),
        )
        for shape in ((5,), (3, 7), (2, 3, 4))
    }


@check("calc_exact_kl", points=2, expected=kl_of_possible_tokens, atol=2e-5, tier="hardening")
def tokens_that_cannot_be(student, rng):
    """A logit of -inf counts as 0, in the gradient too; logits of 100, p 0; they stay"""
    logits, ref_logits = rng.normal(4, 6), rng.normal(4, 6)
    gone = rng.integers(0, 6, 4)[:, None]
    logits = logits.scatter(1, gone, -INF)
    ref_logits[:2] = ref_logits[:2].scatter(1, gone[:2], -INF)
    large = rng.normal(2, 5, std=100)
    return [
        value_and_gradients(student.calc_exact_kl, ref_logits=q, logits=p)
        for p, q in ((logits, ref_logits), (large, large.roll(1, -1)))
    ] + [with_inputs_after(student.calc_exact_kl, large, large.roll(1, -1))]


# --- calc_estimator_stats -----------------------------------------------------------------------


def make_rare(logits: Tensor, token: int) -> Tensor:
    """`logits`, with about 1e-6 of `token`'s probability left."""
    logits = logits.clone()
    logits[token] -= 14
    return logits


@check(
    "calc_estimator_stats",
    public=True,
    expected={
        "k1": [0.0, 0.4757131],
        "k2": [-0.0091047, 0.0684271],
        "k3": [0.0, 0.1016372],
        "k4": [0.0, 0.4757131],
    },
    atol=1e-6,
)
def worked_stats(student, rng):
    """Policy 3/4, 1/4, reference 1/2, 1/2: l is ln 1.5, -ln 2; the KL is 0.1308"""
    logits, ref_logits = rng.tensor([3.0, 1.0]).log(), rng.tensor([1.0, 1.0]).log()
    return {kind: student.calc_estimator_stats(logits, ref_logits, kind) for kind in KINDS}


@check("calc_estimator_stats", public=True, points=3, seeds=3, expected=stats_by_loops, atol=1e-5)
def stats_of_random_policies(student, rng):
    """Random policies and references, near and far, over vocabularies of several sizes"""
    found = {}
    for vocab, distance in ((5, 0.1), (8, 2.0), (2, 1.0)):
        ref_logits = rng.normal(vocab)
        logits = ref_logits + distance * rng.normal(vocab)
        if vocab == 8:  # a token that the policy hardly says, and one that the reference does
            logits, ref_logits = make_rare(logits, 0), make_rare(ref_logits, 1)
        level = rng.normal(1, std=5)  # logits are free up to a constant
        found |= {
            f"{kind}, {vocab} tokens": student.calc_estimator_stats(
                logits + level, ref_logits, kind
            )
            for kind in KINDS
        }
    return found


@check("calc_estimator_stats", tier="hardening")
def stats_of_unknown_estimators(student, rng):
    """An unknown kind: a ValueError names it; logits stay as they were"""
    logits, ref_logits, f = rng.normal(4), rng.normal(4), student.calc_estimator_stats
    bad = {kind: error_of("kind", f, logits, ref_logits, kind) for kind in ("k5", "K1", "")}
    return bad | {kind: with_inputs_after(f, logits, ref_logits, kind) for kind in KINDS}


# --- calc_expected_gradient ---------------------------------------------------------------------


def _every_gradient(student, *logits):
    """Of every kind in every place; `logits` of the policy, the reference and maybe the sampler."""
    logits, ref_logits, *sampler = logits
    return {
        f"{kind} in the {place}": student.calc_expected_gradient(
            logits, ref_logits, kind, place, *sampler
        )
        for kind in KINDS
        for place in PLACES
    }


@check(
    "calc_expected_gradient",
    public=True,
    expected={
        "k1 in the loss": [0.0, 0.0],
        "k1 in the reward": [0.2059898, -0.2059898],
        "k2 in the loss": [0.2059898, -0.2059898],
        "k3 in the loss": [0.25, -0.25],
        "k3 in the reward": [-0.0440102, 0.0440102],
        "k4 in the loss": [0.2059898, -0.2059898],
    },
)
def worked_gradients(student, rng):
    """Policy 3/4, 1/4, reference 1/2, 1/2: grad log p is (1, -1)/4 and (-3, 3)/4"""
    found = _every_gradient(student, rng.tensor([3.0, 1.0]).log(), rng.tensor([1.0, 1.0]).log())
    del found["k2 in the reward"], found["k4 in the reward"]
    return found


@check(
    "calc_expected_gradient",
    public=True,
    points=7,
    seeds=3,
    expected=gradient_by_the_score,
    atol=1e-5,
)
def gradients_on_and_off_policy(student, rng):
    """Every estimator, in the loss and in the reward: samples of the policy, of an older one"""
    ref_logits, direction = rng.normal(6), rng.normal(6)
    rare = make_rare(rng.normal(7), 0), make_rare(rng.normal(7), 1)
    return {
        "on-policy": _every_gradient(student, ref_logits + 0.3 * direction, ref_logits),
        "on-policy, with tokens that are rare": _every_gradient(student, *rare),
        "moved on": _every_gradient(student, ref_logits + direction, ref_logits, ref_logits),
        "anywhere": _every_gradient(student, rng.normal(4), rng.normal(4), rng.normal(4)),
    }


@check("calc_expected_gradient", expected=gradient_by_the_score, atol=1e-5, tier="hardening")
def inputs_stay_as_they_were(student, rng):
    """The result carries no gradient, and the inputs are left without a .grad"""
    policy, ref, old = leaf(rng.normal(4)), leaf(rng.normal(4)), leaf(rng.normal(4))
    plain, f = rng.normal(4), student.calc_expected_gradient
    results = [f(policy, ref, kind, "loss", old) for kind in KINDS]
    return {
        "the results": [*results, f(plain, ref, "k2", "loss", old)],
        "a result requires gradient": any(result.requires_grad for result in results),
        "a .grad is left": any(x.grad is not None for x in (policy, ref, old)),
        "logits require gradient that did not": plain.requires_grad,
    }


@check("calc_expected_gradient", tier="hardening")
def unknown_kinds_and_places(student, rng):
    """An unknown kind or place: a ValueError names it"""
    logits, ref_logits, f = rng.normal(4), rng.normal(4), student.calc_expected_gradient
    found = {
        f"kind {kind!r}": error_of("kind", f, logits, ref_logits, kind, "loss")
        for kind in ("k5", "K2", "")
    }
    found |= {
        f"place {place!r}": error_of("place", f, logits, ref_logits, "k2", place)
        for place in ("rewards", "advantage", "")
    }
    return found | _every_gradient(student, logits, ref_logits)
