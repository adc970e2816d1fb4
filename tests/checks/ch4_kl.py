"""Checks of chapter 4: estimators of the KL, their values and the gradients that they have."""

import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from tests.oracles.ch4_kl import (
    estimate_in_plain_terms,
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
    gradients,
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


@check("calc_kl_estimate", public=True, points=2, seeds=2, expected=estimate_of_probabilities)
def estimates_of_every_shape(student, rng):
    """Random log-probs, 0 to 3 axes: value, gradient for the policy's alone, inputs unchanged"""
    f, found = student.calc_kl_estimate, {}
    for shape in ((4, 5), (6,), (2, 3, 2), ()):
        logprobs, ref_logprobs, _ = draw_logprobs(rng, *shape)
        for kind in KINDS:
            found[f"{kind}, shape {shape}"] = {
                "gradients": value_and_gradients(
                    lambda logprobs, ref_logprobs: f(logprobs, ref_logprobs, kind),  # noqa: B023
                    logprobs=logprobs,
                    ref_logprobs=ref_logprobs,
                ),
                "inputs": with_inputs_after(f, logprobs.clone(), ref_logprobs.clone(), kind),
            }
    return found


@check("calc_kl_estimate", points=2, seeds=2, expected=estimate_of_probabilities)
def samples_of_an_older_policy(student, rng):
    """With old log-probs: k4's ratio and its gradient, none for the old; k1 to k3 ignore them"""
    logprobs, ref_logprobs, old_logprobs = draw_logprobs(rng, 3, 4)
    old_logprobs[0] -= 6  # ratios from 20 to 8000
    return {
        kind: value_and_gradients(
            lambda logprobs, ref_logprobs, old_logprobs: student.calc_kl_estimate(
                logprobs,
                ref_logprobs,
                kind,  # noqa: B023
                old_logprobs,
            ),
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            old_logprobs=old_logprobs,
        )
        for kind in KINDS
    } | {
        "k4, by name": student.calc_kl_estimate(
            logprobs, ref_logprobs, kind="k4", old_logprobs=old_logprobs
        )
    }


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


@check("calc_kl_estimate", expected=estimate_in_plain_terms, tier="hardening")
def large_differences(student, rng):
    """Differences l from -60 to 1000, where probabilities underflow: values and gradients"""
    d = torch.cat([rng.tensor([1000.0, 200.0, 50.0, -20.0, -40.0, -60.0]), rng.normal(6, std=8)])
    ref_logprobs = -rng.uniform(12, low=1100.0, high=1500.0)
    logprobs = (ref_logprobs.float() + d.float()).to(rng.dtype)
    return {
        kind: value_and_gradients(
            lambda logprobs: student.calc_kl_estimate(logprobs, ref_logprobs, kind),  # noqa: B023
            logprobs=logprobs,
        )
        for kind in KINDS
    }


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


@check("calc_exact_kl", public=True, points=2, seeds=2, expected=kl_by_distributions)
def kl_of_every_shape(student, rng):
    """Random logits, 1 to 3 axes: value, gradient for the policy's alone, inputs unchanged"""
    f, found = student.calc_exact_kl, {}
    for shape in ((5,), (3, 7), (2, 3, 4), (1, 300)):
        logits, ref_logits = rng.normal(*shape, std=2), rng.normal(*shape, std=2)
        found[f"shape {shape}"] = {
            "gradients": value_and_gradients(f, logits=logits, ref_logits=ref_logits),
            "inputs": with_inputs_after(f, logits.clone(), ref_logits.clone()),
        }
    return found


# Logits near 100 are 8e-6 apart in float32, and so is a KL that is put together from them.
@check("calc_exact_kl", points=2, expected=kl_by_distributions, atol=2e-5, tier="hardening")
def large_logits_and_shifts(student, rng):
    """Probabilities that underflow, and a shift of all logits, which changes nothing"""
    logits, ref_logits = rng.normal(3, 6, std=3), rng.normal(3, 6, std=3)
    shift = rng.tensor([0.0, 16.0, -32.0])[:, None]
    rounded = ((logits * 64).round() / 64, (ref_logits * 64).round() / 64)  # shifts are exact
    wide = rng.normal(2, 5, std=100)
    return {
        "shifted": value_and_gradients(
            lambda logits: student.calc_exact_kl(logits, rounded[1] - shift),
            logits=rounded[0] + shift,
        ),
        "wide": value_and_gradients(
            lambda logits: student.calc_exact_kl(logits, wide.roll(1, -1)), logits=wide
        ),
    }


@check("calc_exact_kl", points=2, expected=kl_of_possible_tokens, tier="hardening")
def tokens_that_cannot_be(student, rng):
    """A policy logit of -inf counts as 0, in the gradient too, even if the reference's is -inf"""
    logits, ref_logits = rng.normal(4, 6), rng.normal(4, 6)
    gone = rng.integers(0, 6, 4)[:, None]
    logits = logits.scatter(1, gone, -INF)
    ref_logits[:2] = ref_logits[:2].scatter(1, gone[:2], -INF)
    return value_and_gradients(
        lambda logits: student.calc_exact_kl(logits, ref_logits), logits=logits
    )


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


@check("calc_estimator_stats", public=True, points=2, seeds=3, expected=stats_by_loops, atol=1e-5)
def stats_of_random_policies(student, rng):
    """Random policies and references, near and far, several vocabularies; logits unchanged"""
    found = {}
    for vocab, distance in ((5, 0.1), (5, 1.0), (8, 2.0), (2, 1.0), (30, 0.5)):
        ref_logits = rng.normal(vocab)
        logits = ref_logits + distance * rng.normal(vocab)
        if vocab == 8:  # a token that the policy hardly says, and one that the reference does
            logits, ref_logits = make_rare(logits, 0), make_rare(ref_logits, 1)
        level = rng.normal(1, std=5)  # logits are free up to a constant
        found |= {
            f"{kind}, {vocab} tokens, at a distance of {distance}": with_inputs_after(
                student.calc_estimator_stats, logits + level, ref_logits.clone(), kind
            )
            for kind in KINDS
        }
    return found


def _stats_fit(observed, reference):
    for distance, found in observed.items():
        bias = {kind: abs(float(found[kind][0])) for kind in KINDS}
        std = {kind: float(found[kind][1]) for kind in KINDS}
        if max(bias["k1"], bias["k3"], bias["k4"]) > 1e-5:
            return f"{distance}: k1, k3 and k4 should have no bias"
        if not bias["k2"] > 1e-6:
            return f"{distance}: k2 should have a bias"
        if not std["k3"] < std["k1"]:
            return f"{distance}: k3 should spread less than k1"
    return None


@check("calc_estimator_stats", holds=_stats_fit, beside=True)
def what_is_biased(student, rng):
    """On policies near the reference: only k2 has a bias, and k3 spreads less than k1"""
    ref_logits, direction = rng.normal(6), rng.normal(6)
    direction = direction / direction.std()
    return {
        f"at a distance of {distance}": {
            kind: student.calc_estimator_stats(ref_logits + distance * direction, ref_logits, kind)
            for kind in KINDS
        }
        for distance in (0.3, 0.5)
    }


@check("calc_estimator_stats", tier="hardening")
def stats_of_unknown_estimators(student, rng):
    """An unknown kind: a ValueError names it"""
    logits, ref_logits, f = rng.normal(4), rng.normal(4), student.calc_estimator_stats
    bad = {kind: error_of("kind", f, logits, ref_logits, kind) for kind in ("k5", "K1", "")}
    return bad | {kind: f(logits, ref_logits, kind) for kind in KINDS}


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


@check("calc_expected_gradient", points=2, seeds=3, expected=gradient_by_the_score, atol=1e-5)
def gradients_on_policy(student, rng):
    """Samples from the policy itself: every estimator, in the loss and in the reward"""
    near, far = rng.normal(5), rng.normal(7, std=1.5)
    return {
        "near": _every_gradient(student, near, near + 0.3 * rng.normal(5)),
        "far": _every_gradient(student, make_rare(far, 0), make_rare(rng.normal(7), 1)),
        "two tokens": _every_gradient(student, rng.normal(2), rng.normal(2)),
        "logits around 100": _every_gradient(student, rng.normal(4, mean=100), rng.normal(4)),
    }


@check(
    "calc_expected_gradient",
    public=True,
    points=3,
    seeds=3,
    expected=gradient_by_the_score,
    atol=1e-5,
)
def gradients_off_policy(student, rng):
    """Samples from an older policy: every estimator, in the loss and in the reward"""
    ref_logits, direction = rng.normal(6), rng.normal(6)
    return {
        "moved on": _every_gradient(student, ref_logits + direction, ref_logits, ref_logits),
        "anywhere": _every_gradient(student, rng.normal(4), rng.normal(4), rng.normal(4)),
        "by name": student.calc_expected_gradient(
            logits=ref_logits + direction,
            ref_logits=ref_logits,
            kind="k4",
            place="loss",
            sampler_logits=ref_logits - direction,
        ),
    }


def _fit_the_divergences(observed, reference):
    """Against gradients of KLs by autograd, which know nothing of estimators."""
    policy, ref, old = (
        reference[name].double() for name in ("the policy", "the reference", "the sampler")
    )

    def slope(kl) -> Tensor:
        logits = leaf(policy)
        return gradients(kl(Categorical(logits=logits)), logits=logits)["the gradient for logits"]

    forward = slope(lambda p: kl_divergence(p, Categorical(logits=ref)))
    backward = slope(lambda p: kl_divergence(Categorical(logits=ref), p))
    from_old = slope(lambda p: kl_divergence(Categorical(logits=old), p))
    expected = {
        "k1 in the loss": (torch.zeros_like(forward), "0"),
        "k2 in the loss": (forward, "that of KL(policy ‖ reference)"),
        "k3 in the loss": (backward, "that of KL(reference ‖ policy)"),
        "k4 in the loss": (forward, "that of KL(policy ‖ reference)"),
        "k1 in the reward": (forward, "that of KL(policy ‖ reference)"),
        "k3 in the reward": (forward - backward, "a difference of two gradients"),
        "k1 in the loss, off-policy": (-from_old, "that of -KL(sampler ‖ policy)"),
        "k4 in the loss, off-policy": (forward, "that of KL(policy ‖ reference)"),
    }
    for name, (gradient, words) in expected.items():
        if not torch.allclose(observed[name].double(), gradient, atol=1e-4):
            return f"{name}: the expected gradient should be {words}"
    return None


@check("calc_expected_gradient", points=2, holds=_fit_the_divergences)
def which_divergence(student, rng):
    """Compared with the true gradients of KL(policy ‖ reference) and of the other directions"""
    policy, ref, old = rng.normal(5), rng.normal(5), rng.normal(5)
    off_policy = _every_gradient(student, policy, ref, old)
    return {
        "the policy": policy,
        "the reference": ref,
        "the sampler": old,
        **_every_gradient(student, policy, ref),
        **{f"{name}, off-policy": gradient for name, gradient in off_policy.items()},
    }


@check("calc_expected_gradient", expected=gradient_by_the_score, atol=1e-5, tier="hardening")
def logits_that_require_gradient(student, rng):
    """Logits that require a gradient: the result carries none; no .grad is left on the inputs"""
    policy, ref, old = leaf(rng.normal(4)), leaf(rng.normal(4)), leaf(rng.normal(4))
    f, found = student.calc_expected_gradient, {}
    for kind, place in (("k4", "loss"), ("k3", "reward"), ("k2", "loss")):
        gradient = f(policy, ref, kind, place, old)
        found[f"{kind} in the {place}"] = {
            "the result": gradient,
            "requires gradient": bool(gradient.requires_grad),
            "gradients left behind": [x.grad is not None for x in (policy, ref, old)],
        }
    plain = rng.normal(4)
    f(plain, ref, "k2", "loss", old)
    found["other logits require gradient afterwards"] = bool(plain.requires_grad)
    return found | {"the inputs": [policy, ref, old]}


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
