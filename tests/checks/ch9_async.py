"""Checks of chapter 9: the sampler is not the learner."""

import torch

from tests.oracles.ch9_async import (
    PlainQueue,
    kept_by_distributions,
    masked_by_loops,
    may_start_by_filling,
    mismatch_by_loops,
    objective_by_loops,
    stable_rate_by_roots,
    weights_by_loops,
)
from tests.support.inputs import (
    INF,
    NAN,
    error_of,
    masks_of_many_shapes,
    one_zero,
    poison,
    ragged_logprobs,
    ragged_mask,
    value_and_gradients,
    with_inputs_after,
)
from utils.grading.checks import check

CORRECTIONS = ("none", "clip", "truncate", "mask")


def draw_pair(rng, mask, fill=NAN):
    """The learner's log-probs and the sampler's, with ratios beyond every limit."""
    return tuple(ragged_logprobs(rng, mask, fill).values())


def draw_extreme(rng):
    """A pair whose log ratios are 5, 60, 200, 2000, -5, -200 in turn, and a few small ones."""
    large = rng.tensor([5.0, 60.0, 200.0, 2000.0, -5.0, -200.0])
    small = (rng.normal(6, std=0.2) * 64).round() / 64  # which float32 can add to 2000
    logratio = torch.cat([large, small])[rng.permutation(12)].reshape(4, 3)
    sampler_logprobs = -rng.uniform(4, 3, low=2000.0, high=2100.0).round()
    return sampler_logprobs + logratio, sampler_logprobs


# --- RolloutQueue -------------------------------------------------------------------------------


def _run_late(student, rng, staleness, n_phases=7, n_updates=1):
    """Put until one may be taken, take one, move on, as a trainer does."""
    queue, version, n_put, found = student.RolloutQueue(staleness), 0, 0, []
    for _ in range(n_phases):
        while n_put - len(found) <= staleness:
            queue.put(rng.normal(2), version)
            n_put += 1
        found.append(queue.take(version))
        version += n_updates
    return [list(pair) for pair in found]


@check(
    "RolloutQueue",
    public=True,
    expected=[["a", 0], ["b", 1], ["c", 2], ["d", 2]],
)
def worked_queue(student, rng):
    """Staleness 2: a, b and c come at version 0, then one at each version; ages 0, 1, 2, 2"""
    queue, found = student.RolloutQueue(2), []
    for name in "abc":
        queue.put(name, 0)
    for version, name in enumerate("defg"):
        found.append(list(queue.take(version)))
        queue.put(name, version + 1)
    return found


@check("RolloutQueue", public=True, points=2, expected=PlainQueue)
def queues_of_a_trainer(student, rng):
    """One rollout per phase, up to four late, and on time; one update per phase, or two"""
    return {
        f"staleness {k}, {n} updates a phase": _run_late(student, rng, k, n_updates=n)
        for k in (0, 1, 2, 4)
        for n in (1, 2)
    }


@check("RolloutQueue", points=3, seeds=3, expected=PlainQueue)
def puts_and_takes_in_any_order(student, rng):
    """Several rollouts of a version, versions that jump, more rollouts waiting than needed"""
    staleness = rng.integer(0, 4)
    queue, version, waiting, found = student.RolloutQueue(staleness), rng.integer(0, 3), 0, []
    for _ in range(25):
        for _ in range(rng.integer(0, 4)):
            queue.put(rng.normal(2), version)
            waiting += 1
        if waiting > staleness and rng.integer(0, 4):
            found.append(list(queue.take(version)))
            waiting -= 1
        version += rng.integer(0, 3)
    return found


@check("RolloutQueue", points=3, expected=PlainQueue, tier="hardening")
def queues_that_refuse(student, rng):
    """A take too early, a version that goes back, a bad staleness: a ValueError, nothing changes"""
    found = {repr(k): error_of("staleness", student.RolloutQueue, k) for k in (-1, 1.5, 2.0, "2")}
    for staleness in (0, 1, 3):
        queue, rollouts = student.RolloutQueue(staleness), rng.normal(staleness + 1, 2)
        errors = [error_of("", queue.take, 5)]
        for rollout in rollouts[:-1]:
            queue.put(rollout, 1)  # the refused take has named no version
            errors.append(error_of("", queue.take, 5))
        queue.put(rollouts[-1], 2)
        found[f"staleness {staleness}"] = [errors, *queue.take(3), error_of("", queue.take, 3)]
    queue, first, second = student.RolloutQueue(0), *rng.normal(2, 3)
    queue.put(first, 4)
    found["put"] = error_of("version", queue.put, second, 3)
    found["take"] = error_of("version", queue.take, 3)
    queue.put(second, 6)
    found["a take after a put"] = error_of("version", queue.take, 5)
    taken = [[*queue.take(8)], len(queue)]
    found["a put after a take"] = error_of("version", queue.put, first, 7)
    found["taken"] = [*taken, [*queue.take(8)], len(queue)]
    return found | {"a put once it is empty": error_of("version", queue.put, first, 7)}


# --- calc_stable_rate ---------------------------------------------------------------------------


def _rates(student, delays):
    rates = [float(student.calc_stable_rate(delay)) for delay in delays]
    return torch.tensor(rates, dtype=torch.float64)


@check("calc_stable_rate", public=True, expected=[2.0, 1.0, 0.6180340], rtol=1e-6)
def worked_rates(student, rng):
    """No delay: 2; one step: 1; two steps: 2 sin(18°) = 0.618"""
    return _rates(student, (0, 1, 2))


@check("calc_stable_rate", public=True, points=4, expected=stable_rate_by_roots, rtol=1e-9)
def rates_by_roots(student, rng):
    """Delays up to 32: where the largest root of z^(delay + 1) - z^delay + a reaches 1"""
    return _rates(student, [3, 32, *rng.integers(4, 32, 4).tolist()])


@check("calc_stable_rate", tier="hardening")
def delays_that_are_none(student, rng):
    """A delay of -1, 1.5, 2.0, "2" or None: a ValueError names it"""
    wrong = (-1, 1.5, 2.0, "2", None)
    bad = {repr(k): error_of("delay", student.calc_stable_rate, k) for k in wrong}
    return bad | {"right ones": _rates(student, rng.integers(0, 33, 4).tolist())}


# --- measure_mismatch ---------------------------------------------------------------------------


@check(
    "measure_mismatch",
    public=True,
    expected={"k3": 0.4671292, "max_ratio": 3.0, "effective_share": 0.8},
)
def worked_mismatch(student, rng):
    """Ratios 2 and 1/2, and 3: k3 0.307, 0.193, 0.901; the products 1 and 3: 16 / (2 · 10)"""
    logprobs = rng.tensor([[0.5, 0.25], [0.6, NAN]]).log()
    sampler_logprobs = rng.tensor([[0.25, 0.5], [0.2, NAN]]).log()
    return student.measure_mismatch(logprobs, sampler_logprobs, sampler_logprobs.isfinite())


@check("measure_mismatch", public=True, points=3, seeds=3, expected=mismatch_by_loops)
def mismatch_of_ragged_rollouts(student, rng):
    """Ragged completions, an empty one too, near and far; NaN beyond the mask"""
    found = {}
    for name, scale in (("near", 0.1), ("far", 1.0)):
        mask = ragged_mask(rng, 8, 6)
        sampler_logprobs = poison(-rng.uniform(8, 6, low=0.1, high=3.0), mask)
        logprobs = sampler_logprobs + scale * rng.normal(8, 6)
        found[name] = student.measure_mismatch(logprobs, sampler_logprobs, mask)
    return found


@check("measure_mismatch", points=3, seeds=2, expected=mismatch_by_loops)
def mismatch_of_every_shape(student, rng):
    """One row, one token, no token at all, many rows; inf beyond the mask"""
    return {
        name: student.measure_mismatch(*draw_pair(rng, mask, INF), mask)
        for name, mask in masks_of_many_shapes(rng).items()
    }


@check("measure_mismatch", points=3, expected=mismatch_by_loops, tier="hardening")
def tokens_far_apart(student, rng):
    """Log ratios of -200 to 60, whose products no float holds; inputs that require a gradient"""
    found, mask = {}, torch.arange(60) < torch.tensor([60, 60, 59, 60, 0])[:, None]
    cases = {"large": (4, 4), "small": (-4, -4), "both": (-3, 3), "more": (25, 60)}
    for name, (low, high) in (cases | {"less": (-200, -25)}).items():
        sampler_logprobs = -rng.uniform(5, 60, low=300.0, high=400.0).round()
        middles = torch.linspace(low, high, 5).to(rng.dtype)[:, None].round()
        logprobs = sampler_logprobs + middles + 0.125 * (rng.normal(5, 60) * 2).round()
        given = (logprobs.requires_grad_(), sampler_logprobs, mask)
        found[name] = with_inputs_after(student.measure_mismatch, *given)
    return found


@check("measure_mismatch", expected=mismatch_by_loops, rtol=0.02, atol=1e-12, tier="hardening")
def tiny_differences(student, rng):
    """Differences of 1e-4, as from a sampler in a different precision: k3 is right to 2%"""
    # Rounded to float32, so that a run in float64 sees the same numbers.
    sampler_logprobs = -rng.uniform(6, 50, low=0.02, high=0.5)
    logprobs = (sampler_logprobs.float() + rng.normal(6, 50, std=1e-4).float()).to(rng.dtype)
    return student.measure_mismatch(logprobs, sampler_logprobs, ragged_mask(rng, 6, 50))


# --- get_kept_logprobs --------------------------------------------------------------------------

TRUNCATIONS = ((None, None), (4, None), (None, 0.7), (5, 0.6), (1, None), (None, 0.05), (100, 1.0))


@check(
    "get_kept_logprobs",
    public=True,
    expected=[
        [[-0.9162907, -2.3025851], [0.0, 0.0]],
        [[-0.5596158, -INF], [-0.3566749, -0.3566749]],
        [[-0.5596158, -INF], [-0.3566749, -0.3566749]],
        [[-0.5596158, -INF], [-0.3566749, -0.3566749]],
    ],
)
def worked_truncations(student, rng):
    """0.4, 0.3, 0.2, 0.1: all; top_k 2; top_p 0.6; top_k 3 and top_p 0.75 of 4/9, 3/9, 2/9"""
    logits = rng.tensor([[0.1, 0.4, 0.2, 0.3]] * 2).log()
    tokens = torch.tensor([1, 0])
    options = ({}, {"top_k": 2}, {"top_p": 0.6}, {"top_k": 3, "top_p": 0.75})
    return [list(student.get_kept_logprobs(logits, tokens, **o)) for o in options]


def _every_token(student, logits, **options):
    """The log-probs of all tokens of each row, and the kept mass."""
    found = []
    for row in logits:
        alike = row.expand(len(row), -1)
        found += student.get_kept_logprobs(alike, torch.arange(len(row)), **options)
    return found


@check("get_kept_logprobs", public=True, points=2, seeds=3, expected=kept_by_distributions)
def tokens_of_random_policies(student, rng):
    """Random policies at a temperature of 0.8, cut off by top_k, top_p, both, and not at all"""
    found = {}
    for top_k, top_p in TRUNCATIONS:
        logits, tokens = rng.normal(6, 9, std=2), rng.integers(0, 9, 6)
        tokens[:3] = logits[:3].argmax(-1)  # these are always kept
        found[f"top_k {top_k}, top_p {top_p}"] = student.get_kept_logprobs(
            logits, tokens, temperature=0.8, top_k=top_k, top_p=top_p
        )
    return found


@check("get_kept_logprobs", points=5, seeds=2, expected=kept_by_distributions)
def every_token(student, rng):
    """Each token of peaked and flat policies at temperatures of 0.5 to 2: -inf where it is cut"""
    limits = [*TRUNCATIONS, *((k, p) for k in (3, 6) for p in (0.3, 0.55, 0.9))]
    return {
        f"temperature {t}, spread {std}, top_k {top_k}, top_p {top_p}": _every_token(
            student, rng.normal(2, 9, std=std), temperature=t, top_k=top_k, top_p=top_p
        )
        for t, std in ((0.5, 1.5), (2.0, 1.5), (1.0, 0.3))
        for top_k, top_p in limits
    }


@check(
    "get_kept_logprobs",
    expected=[
        [[0.0, -INF, -INF, -INF], [0.5]],
        [[-0.4054651, -1.0986123, -INF, -INF], [0.75]],
        [[-0.6931472, -0.6931472, -INF, -INF], [0.5]],
    ],
)
def shares_that_reach_top_p(student, rng):
    """1/2, 1/4, 1/8, 1/8: top_p 0.5 keeps one, 0.75 two; of four equal ones 0.5 keeps two"""
    halves, even = rng.tensor([[0.5, 0.25, 0.125, 0.125]]).log(), rng.tensor([[0.0] * 4])
    found = []
    for logits, p in ((halves, 0.5), (halves, 0.75), (even, 0.5)):
        logprobs, log_kept_mass = student.get_kept_logprobs(
            logits.expand(4, -1), torch.arange(4), top_p=p
        )
        kept = sorted(logprobs.tolist(), reverse=True)  # which of equal ones stay is left open
        found.append([rng.tensor(kept), log_kept_mass[:1].exp()])
    return found


# Logits near 1e4 are 1e-3 apart in float32, and so is a difference of their logsumexps.
@check("get_kept_logprobs", points=2, expected=kept_by_distributions, atol=2e-3, tier="hardening")
def extreme_logits(student, rng):
    """Logits of 1e4, and logits of -inf; one row; the inputs stay as they were"""
    f, found = student.get_kept_logprobs, {}
    far = rng.normal(4, 6) + rng.tensor([1e3, -1e3, 2e3, 0.0])[:, None]
    far[3] = rng.tensor([1e4, 9e3, -1e4, 0.0, 1.0, 2.0])[rng.permutation(6)]
    barred = rng.normal(4, 6).scatter(1, rng.integers(0, 6, 4)[:, None], -INF)
    for name, logits in (("far", far), ("barred", barred), ("one row", rng.normal(1, 6))):
        tokens = logits.argmax(-1)
        for k, p in ((None, None), (3, None), (None, 0.8), (4, 0.9)):
            options = {"top_k": k, "top_p": p}
            found[f"{name}, top_k {k}, top_p {p}"] = with_inputs_after(
                f, logits.clone(), tokens.clone(), **options
            )
    never = barred.argmin(-1)
    return found | {"a token that cannot be": f(barred, never, top_p=0.8)}


@check("get_kept_logprobs", points=2, expected=kept_by_distributions, tier="hardening")
def limits_at_their_ends(student, rng):
    """A top_p of 1 keeps tokens of 1e-9; a temperature, top_k or top_p of 0: a ValueError"""
    logits = torch.cat([rng.normal(4, 3), rng.normal(4, 4) - 21], dim=-1)[:, rng.permutation(7)]
    f, tokens = student.get_kept_logprobs, logits.argmin(-1)
    bad = {"temperature": (0.0, -1.0), "top_k": (0, -1), "top_p": (0.0, -0.1, 1.5)}
    found = {
        f"{name} {value}": error_of(name, f, logits, tokens, **{name: value})
        for name, values in bad.items()
        for value in values
    }
    return found | {f"top_k {k}": f(logits, tokens, 0.8, k, 1.0) for k in (None, 7)}


# --- calc_importance_weights --------------------------------------------------------------------


@check(
    "calc_importance_weights",
    public=True,
    expected=[
        [[2.0, 0.5], [2.0, 0.0]],
        [[1.5, 0.5], [1.5, 0.0]],
        [[2.0, 0.5], [3.0, 0.0]],
        [[1.0, 1.0], [2.0, 0.0]],
    ],
)
def worked_weights(student, rng):
    """Ratios 2 and 1/2, and 3: caps of 2, 1.5 and none; of sequences, whose products are 1 and 3"""
    logprobs = rng.tensor([[0.5, 0.25], [0.6, NAN]]).log()
    sampler_logprobs = rng.tensor([[0.25, 0.5], [0.2, NAN]]).log()
    inputs = (logprobs, sampler_logprobs, sampler_logprobs.isfinite())
    options = ({}, {"cap": 1.5}, {"cap": None}, {"level": "sequence"})
    return [student.calc_importance_weights(*inputs, **o) for o in options]


@check("calc_importance_weights", public=True, points=2, seeds=3, expected=weights_by_loops)
def weights_of_ragged_rollouts(student, rng):
    """Both levels, with caps and without; NaN beyond the mask; no gradient flows"""
    mask, found = ragged_mask(rng), {}
    logprobs, sampler_logprobs = draw_pair(rng, mask)
    for level in ("token", "sequence"):
        for cap in (2.0, 1.2, 0.8, None):
            found[f"level {level}, cap {cap}"] = value_and_gradients(
                lambda logprobs, sampler_logprobs: student.calc_importance_weights(
                    logprobs,
                    sampler_logprobs,
                    mask,
                    cap,  # noqa: B023
                    level,  # noqa: B023
                ),
                logprobs=logprobs,
                sampler_logprobs=sampler_logprobs,
            )
    return found


@check("calc_importance_weights", points=3, seeds=2, expected=weights_by_loops, rtol=1e-3)
def weights_of_every_shape(student, rng):
    """One row, one token, no token at all, products over 40 tokens; inf beyond the mask"""
    found = {}
    for name, mask in (masks_of_many_shapes(rng) | {"long": ragged_mask(rng, 5, 40)}).items():
        pair = draw_pair(rng, mask, INF)
        for cap, level in ((2.0, "token"), (3.0, "sequence"), (None, "sequence")):
            found[f"{name}, {level}, {cap}"] = student.calc_importance_weights(
                *pair, mask, cap=cap, level=level
            )
    return found


@check("calc_importance_weights", expected=weights_by_loops, tier="hardening")
def weights_of_extreme_ratios(student, rng):
    """Log ratios from -200 to 2000, with a cap and without: one above 80 counts as 80"""
    pair, mask = draw_extreme(rng), torch.ones(4, 3, dtype=torch.bool)
    return {
        f"level {level}, cap {cap}": student.calc_importance_weights(*pair, mask, cap, level)
        for level in ("token", "sequence")
        for cap in (2.0, None)
    }


@check("calc_importance_weights", points=2, expected=weights_by_loops, tier="hardening")
def levels_and_caps(student, rng):
    """The inputs stay, no gradient comes out; an unknown level, a cap of 0: a ValueError"""
    mask, f = ragged_mask(rng), student.calc_importance_weights
    pair = [x.requires_grad_() for x in draw_pair(rng, mask)]
    found = {x: error_of("level", f, *pair, mask, level=x) for x in ("tokens", "Sequence", "")}
    found |= {f"cap {x}": error_of("cap", f, *pair, mask, x) for x in (0.0, -1.0)}
    for level in ("token", "sequence"):
        found[level] = with_inputs_after(f, *pair, mask.clone(), level=level)
        found[f"{level}: requires gradient"] = bool(found[level]["the result"].requires_grad)
    return found


# --- mask_mismatched ----------------------------------------------------------------------------


@check(
    "mask_mismatched",
    public=True,
    expected=[
        [[False, True, True], [True, False, False]],
        [[True, True, True], [True, True, False]],
        [[True, False, True], [True, False, False]],
    ],
)
def worked_masks(student, rng):
    """Ratios 0.4, 0.6, 1, and 1.9, 2.1: in [0.5, 2]; in [0.2, 3]; moved by at most 0.35"""
    sampler_logprobs = rng.tensor([[0.5, 0.9, 0.3], [0.1, 0.4, NAN]]).log()
    ratio = rng.tensor([[0.4, 0.6, 1.0], [1.9, 2.1, NAN]])
    inputs = (ratio.log() + sampler_logprobs, sampler_logprobs, sampler_logprobs.isfinite())
    options = ({}, {"low": 0.2, "high": 3.0}, {"high": 0.35, "kind": "probability"})
    return [student.mask_mismatched(*inputs, **o) for o in options]


@check("mask_mismatched", public=True, points=2, seeds=3, expected=masked_by_loops)
def masks_of_ragged_rollouts(student, rng):
    """Both kinds, narrow and wide limits; NaN beyond the mask"""
    mask, found = ragged_mask(rng, 8, 9), {}
    pair = draw_pair(rng, mask)
    for low, high in ((0.5, 2.0), (0.8, 1.1), (0.1, 1.5), (0.9, 8.0)):
        found[f"ratios in [{low}, {high}]"] = student.mask_mismatched(*pair, mask, low, high)
    for high in (0.05, 0.2, 0.5):
        found[f"probabilities within {high}"] = student.mask_mismatched(
            *pair, mask, high=high, kind="probability"
        )
    return found


@check("mask_mismatched", points=3, seeds=2, expected=masked_by_loops)
def masks_of_every_shape(student, rng):
    """One row, one token, no token at all, many rows; inf beyond the mask"""
    found = {}
    for name, mask in masks_of_many_shapes(rng).items():
        pair, f = draw_pair(rng, mask, INF), student.mask_mismatched
        found[f"{name}, ratio"] = f(*pair, mask)
        found[f"{name}, probability"] = f(*pair, mask, 0.5, 0.1, "probability")
    return found


@check("mask_mismatched", expected=masked_by_loops, tier="hardening")
def masks_at_the_limits(student, rng):
    """A ratio that equals a limit stays; log ratios from -200 to 2000"""
    mask, equal, f = torch.ones(4, 3, dtype=torch.bool), -rng.uniform(4, 3), student.mask_mismatched
    found = {
        f"in [{low}, {high}]": f(equal, equal.clone(), mask, low, high)
        for low, high in ((1.0, 1.0), (1.0, 2.0), (0.5, 1.0))
    }
    found["not moved"] = f(equal, equal.clone(), mask, 0.5, 0.0, "probability")
    pair = draw_extreme(rng)
    return found | {"extremes": f(*pair, mask), "wide": f(*pair, mask, 0.0, 1e6)}


@check("mask_mismatched", points=2, expected=masked_by_loops, tier="hardening")
def masks_are_new(student, rng):
    """The inputs stay as they were, even after the result is changed; bad kinds: a ValueError"""
    mask, f = ragged_mask(rng), student.mask_mismatched
    pair = draw_pair(rng, mask)
    found = {x: error_of("kind", f, *pair, mask, kind=x) for x in ("ratios", "Probability", "")}
    for kind, high in (("ratio", 2.0), ("ratio", 1e9), ("probability", 1.0), ("probability", 0.1)):
        given = [x.clone() for x in (*pair, mask)]
        found[f"{kind} {high}"] = with_inputs_after(f, *given, low=0.0, high=high, kind=kind)
        f(*given, 0.0, high, kind).zero_()
        found[f"{kind} {high}: the mask afterwards"] = given[-1]
    return found


# --- calc_async_objective -----------------------------------------------------------------------


def _objective(student, logprobs, sampler_logprobs, advantages, mask, **options):
    """The objective and its gradient for everything that may require one."""
    return value_and_gradients(
        lambda logprobs, sampler_logprobs, advantages: student.calc_async_objective(
            logprobs, sampler_logprobs, advantages, mask, **options
        ),
        logprobs=logprobs,
        sampler_logprobs=sampler_logprobs,
        advantages=advantages,
    )


@check(
    "calc_async_objective",
    public=True,
    expected={"none": 1.5, "clip": 0.2, "truncate": 1.25, "mask": 2.5},
)
def worked_objectives(student, rng):
    """Ratios 2 and 1/2 with A = 4, and 3 with A = -1; clip_coef 0.2, cap 2.5"""
    logprobs = rng.tensor([[0.5, 0.25], [0.6, NAN]]).log()
    sampler_logprobs = rng.tensor([[0.25, 0.5], [0.2, NAN]]).log()
    mask, advantages = sampler_logprobs.isfinite(), rng.tensor([4.0, -1.0])
    return {
        correction: student.calc_async_objective(
            logprobs, sampler_logprobs, advantages, mask, correction, cap=2.5
        )
        for correction in CORRECTIONS
    }


@check("calc_async_objective", public=True, points=2, seeds=3, expected=objective_by_loops)
def objectives_and_gradients(student, rng):
    """Every correction by default: value, gradient of the log-probs alone; NaN beyond the mask"""
    found = {}
    for correction in CORRECTIONS:
        mask = ragged_mask(rng)
        pair, advantages = draw_pair(rng, mask), one_zero(rng, mask)
        found[correction] = _objective(student, *pair, advantages, mask, correction=correction)
    found["by default"] = student.calc_async_objective(*pair, advantages, mask)
    return found


@check("calc_async_objective", points=6, seeds=2, expected=objective_by_loops)
def objectives_of_every_shape(student, rng):
    """One row, one token, 150 rows, no token; inf beyond the mask; other clips and caps"""
    limits = [(0.2, 2.0), (0.2, 1.3), (0.1, 4.0), (0.5, 2.0), (0.3, 0.8)]
    masks, found = masks_of_many_shapes(rng), {}
    masks |= {f"ragged {i}": ragged_mask(rng, 8, 6) for i in range(3)}
    for i, (name, mask) in enumerate(masks.items()):
        pair, advantages = draw_pair(rng, mask, INF), one_zero(rng, mask)
        clip_coef, cap = limits[i % len(limits)]
        for correction in CORRECTIONS:
            options = {"correction": correction, "clip_coef": clip_coef, "cap": cap}
            objective = _objective(student, *pair, advantages, mask, **options)
            found[f"{name}, {correction}, clip_coef {clip_coef}, cap {cap}"] = objective
    return found


@check("calc_async_objective", points=2, expected=objective_by_loops, tier="hardening")
def objectives_of_extreme_ratios(student, rng):
    """Log ratios from -200 to 2000: neither the value nor the gradient is NaN"""
    pair, mask = draw_extreme(rng), torch.ones(4, 3, dtype=torch.bool)
    good, bad = rng.uniform(4, low=0.5, high=2.0), -rng.uniform(4, low=0.5, high=2.0)
    cases = [("clip", good), ("truncate", good), ("truncate", bad), ("mask", good), ("mask", bad)]
    found = [_objective(student, *pair, a, mask, correction=name) for name, a in cases]
    # With a negative advantage the clip leaves a large ratio as it is.
    sampler_logprobs = -rng.uniform(4, 3, low=20.0, high=30.0)
    logprobs = sampler_logprobs + rng.uniform(4, 3, low=2.5, high=9.0)
    clipped = _objective(student, logprobs, sampler_logprobs, bad, mask, correction="clip")
    return [*found, clipped]


@check("calc_async_objective", points=2, expected=objective_by_loops, tier="hardening")
def unknown_corrections(student, rng):
    """Log-probs, advantages and mask stay as they were; an unknown correction: a ValueError"""
    mask, f = ragged_mask(rng), student.calc_async_objective
    args = (*draw_pair(rng, mask), rng.normal(len(mask)), mask)
    found = {x: error_of("correction", f, *args, x) for x in ("tis", "Clip", "", None)}
    return found | {x: with_inputs_after(f, *args, correction=x) for x in CORRECTIONS}


# --- may_start ----------------------------------------------------------------------------------


@check(
    "may_start",
    public=True,
    expected={
        "the 4th, version 0, eta 0": True,
        "the 5th, version 0, eta 0": False,
        "the 5th, version 0, eta 1": True,
        "the 5th, version 1, eta 0": True,
        "the 12th, version 1, eta 1": True,
        "the 13th, version 1, eta 1": False,
    },
)
def worked_starts(student, rng):
    """Batches of 4: with eta 0, 4 may begin before the first update; with eta 1, 8; and so on"""
    cases = ((3, 0, 0), (4, 0, 0), (4, 0, 1), (4, 1, 0), (11, 1, 1), (12, 1, 1))
    return {
        f"the {n + 1}th, version {version}, eta {eta}": bool(student.may_start(n, 4, version, eta))
        for n, version, eta in cases
    }


@check("may_start", public=True, points=4, seeds=3, expected=may_start_by_filling)
def starts_around_the_limit(student, rng):
    """Any batch size, version and eta, and numbers of rollouts around the last that may begin"""
    found = {}
    for _ in range(8):
        batch_size, version, eta = rng.integer(1, 9), rng.integer(0, 6), rng.integer(0, 4)
        limit = batch_size * (version + eta + 1)
        for n in (0, limit - 2, limit - 1, limit, limit + 1, limit + batch_size):
            found[f"{n} started, {batch_size} a batch, version {version}, eta {eta}"] = bool(
                student.may_start(max(n, 0), batch_size, version, eta)
            )
    return found


@check("may_start", expected=may_start_by_filling, tier="hardening")
def numbers_that_are_none(student, rng):
    """A batch size of 0, negative numbers: a ValueError names each"""
    right = {"n_started": rng.integer(0, 20), "batch_size": 4, "version": 2, "eta": 1}
    f = student.may_start
    bad = (("batch_size", 0), ("batch_size", -1), ("n_started", -1), ("version", -1), ("eta", -1))
    found = {f"{name} {x}": error_of(name, f, **right | {name: x}) for name, x in bad}
    return found | {
        f"{n} started": bool(f(**right | {"n_started": n}))
        for n in rng.permutation(24)[:12].tolist()
    }
