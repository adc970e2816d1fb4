"""Checks of chapter 6: preferences, the reward model, DPO, and picking samples."""

import itertools
import math
from tempfile import TemporaryDirectory

import torch

from tests.oracles.ch6_preferences import (
    accuracy_by_loops,
    best_by_sorting,
    best_of_n_kl_by_quadrature,
    dpo_by_odds,
    pool_by_statistics,
    preference_by_coins,
    rejection_probs,
    reward_fn_by_hugging_face,
    rewards_by_hugging_face,
)
from tests.support import models, trainers
from tests.support.inputs import (
    error_of,
    grouped_rewards,
    leaf,
    misfit,
    ragged_batch,
    value_and_gradients,
    with_inputs_after,
)
from tests.support.trainers import IN_FLOAT32, RANK, make_model
from utils.grading.checks import check
from utils.models.loading import load_base_model
from utils.rewards import call_reward_fn

# --- calc_preference_loss -----------------------------------------------------------------------


@check("calc_preference_loss", public=True, expected=[0.7732235, 0.3132617], atol=1e-6)
def worked_margins(student, rng):
    """Margins of 1, 0 and -1: the mean of 0.3133, 0.6931 and 1.3133; and the first one alone"""
    chosen, rejected = rng.tensor([1.0, 2.0, 0.0]), rng.tensor([0.0, 2.0, 1.0])
    return [student.calc_preference_loss(chosen[:n], rejected[:n]) for n in (3, 1)]


@check("calc_preference_loss", public=True, points=3, seeds=2, expected=preference_by_coins)
def losses_and_gradients(student, rng):
    """The loss and its gradients, of one pair and of many, for margins of either sign"""
    found = {}
    for n, std in ((1, 1.0), (7, 3.0), (40, 0.3)):
        chosen, rejected = rng.normal(n, mean=5, std=std), rng.normal(n, mean=5, std=std)
        found[f"{n} pairs"] = value_and_gradients(
            student.calc_preference_loss, chosen_rewards=chosen, rejected_rewards=rejected
        )
    return found


@check(
    "calc_preference_loss", public=True, points=2, expected=preference_by_coins, tier="hardening"
)
def margins_of_a_thousand(student, rng):
    """Margins of ±1000, where exp overflows: the loss and its gradients are finite"""
    sizes = rng.uniform(2, low=500, high=1000)
    return {
        name: value_and_gradients(
            student.calc_preference_loss,
            chosen_rewards=margins / 2,
            rejected_rewards=-margins / 2,
        )
        for name, margins in {"right": sizes, "wrong": -sizes}.items()
    }


# --- calc_preference_accuracy -------------------------------------------------------------------


@check("calc_preference_accuracy", public=True, expected=0.625)
def worked_accuracy(student, rng):
    """One right, one wrong, a tie, one right: (1 + 0 + 0.5 + 1) / 4"""
    chosen, rejected = rng.tensor([2.0, 0.0, 1.0, 3.0]), rng.tensor([1.0, 1.0, 1.0, 2.0])
    return student.calc_preference_accuracy(chosen, rejected)


@check("calc_preference_accuracy", public=True, points=3, seeds=3, expected=accuracy_by_loops)
def accuracies_with_ties(student, rng):
    """Pairs, some of which tie: a tie counts as half. One pair; only ties"""
    chosen, rejected = rng.integers(0, 4, 37).to(rng.dtype), rng.integers(0, 4, 37).to(rng.dtype)
    accuracy = student.calc_preference_accuracy
    return {
        "37 pairs": accuracy(chosen, rejected),
        "ties alone": accuracy(chosen, chosen.clone()),
        "of numbers that do not tie": accuracy(leaf(rng.normal(23)), leaf(rng.normal(23))),
        "of one pair": accuracy(chosen[:1], rejected[:1]),
        "chosen": chosen,
    }


# --- RewardModel --------------------------------------------------------------------------------


def _rewards_of_rows(student, rng, kind):
    model = make_model(student.RewardModel, rng, kind)
    ids, attention = ragged_batch(rng, rows=3, seq=9)
    rewards = model(ids, attention)
    weights = rng.normal(len(ids))
    found = {"the rewards": rewards}
    found |= trainers.adapter_gradients((rewards * weights).sum(), model)
    found["of a row alone"] = model(ids[1:2], attention[1:2])
    ids[:, -1] = ids[:, -2] = models.SPECIAL["eos_token_id"]
    ids[:, 0] = ids[0, -1] = models.SPECIAL["pad_token_id"]
    found["with pad and eos as real tokens"] = model(ids, torch.ones_like(ids))
    return found


@check(
    "RewardModel.forward",
    public=True,
    points=3,
    expected=rewards_by_hugging_face("gpt2"),
    **IN_FLOAT32,
)
def rewards_of_gpt2(student, rng):
    """Rewards and gradients of rows padded left, right or not at all; absolute positions"""
    return _rewards_of_rows(student, rng, "gpt2")


@check("RewardModel.forward", points=2, expected=rewards_by_hugging_face("llama"), **IN_FLOAT32)
def rewards_of_llama(student, rng):
    """Rewards and gradients: rotary positions, grouped-query attention"""
    return _rewards_of_rows(student, rng, "llama")


def _head_belongs_to_the_model(observed, reference):
    pairs = {
        "a saved and loaded model should give the same rewards": ("rewards", "loaded"),
        "merged() should give the same rewards": ("rewards", "merged"),
    }
    for message, (a, b) in pairs.items():
        if not torch.allclose(observed[a], observed[b], atol=1e-4, rtol=1e-4):
            return message
    if bool(observed["of a new model"].any()):
        return "a new model should give rewards of 0, as its head starts at zero"
    if not torch.allclose(observed["mean and std, loaded"], reference["mean and std, loaded"]):
        return "reward_mean and reward_std should be saved and loaded with the adapters"
    if torch.allclose(observed["rewards"], observed["in reference()"], atol=1e-3):
        return "the adapters should be on in forward, and off inside reference()"
    if not torch.allclose(observed["rewards"], reference["rewards"], atol=1e-3, rtol=1e-3):
        return "the rewards are wrong"
    return None


@check("RewardModel.forward", holds=_head_belongs_to_the_model, tier="hardening")
def reward_head_and_model(student, rng):
    """Head and scale are saved and loaded with the adapters; merged() and reference() still work"""
    options = {"sites": ("attn.q", "mlp.out"), "alpha": 20}
    model = make_model(student.RewardModel, rng, **options)
    model.reward_mean.fill_(1.5)
    model.reward_std.fill_(0.7)
    ids, attention = ragged_batch(rng)
    with torch.no_grad():
        found = {"rewards": model(ids, attention)}
        with model.merged():
            found["merged"] = model(ids, attention)
        with model.reference():
            found["in reference()"] = model(ids, attention)
        with TemporaryDirectory() as folder:
            model.save_adapter(f"{folder}/reward.safetensors")
            base = load_base_model(models.get_checkpoint("shallow"), "cpu", rng.dtype)
            other = student.RewardModel(base, RANK, **options)
            found["of a new model"] = other(ids, attention)
            other.load_adapter(f"{folder}/reward.safetensors")
        found["loaded"] = other(ids, attention)
        found["mean and std, loaded"] = torch.stack([other.reward_mean, other.reward_std])
    return found


def _are_rewards_of_float32(observed, reference):
    expected = reference["in float32"]
    if not torch.allclose(observed["in float32"], expected, rtol=0, atol=1e-3):
        return "on a base in float32 the rewards are wrong"
    if not torch.allclose(observed["in bfloat16"], expected, rtol=0, atol=0.15):
        return "on a base in bfloat16 the rewards are not those of one in float32, rounded"
    found = observed["in bfloat16"]
    if torch.equal(found.bfloat16().to(found.dtype), found):
        return "on a base in bfloat16 the head should compute in float32"
    return None


@check("RewardModel.forward", holds=_are_rewards_of_float32, tier="hardening")
def rewards_of_a_bfloat16_base(student, rng):
    """On a bfloat16 base: float32 rewards, equal to a float32 base's except for rounding"""
    ids, attention = ragged_batch(rng)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(student.RewardModel, rng, "llama", dtype=dtype)
        found[f"in {str(dtype).removeprefix('torch.')}"] = model(ids, attention)
    return found


# --- make_reward_fn -----------------------------------------------------------------------------

TEXTS = [
    " wonderful and moving.",
    "",
    " dull",
    " a plot. The cast was warm and the pace slow.",
    ".",
]


def _scaled_model(student, rng):
    model = make_model(student.RewardModel, rng)
    model.reward_mean.fill_(rng.normal(1, mean=2).item())
    model.reward_std.fill_(rng.uniform(1, low=0.05, high=0.3).item())
    return model


@check("make_reward_fn", public=True, points=3, expected=reward_fn_by_hugging_face, **IN_FLOAT32)
def rewards_of_texts(student, rng):
    """Prompts and completions of several lengths, as the trainers call it: standardised rewards"""
    model = _scaled_model(student, rng)
    reward_fn = student.make_reward_fn(model)
    prompts = [trainers.PROMPTS[i] for i in rng.permutation(len(TEXTS)).tolist()]
    order = rng.permutation(len(TEXTS)).tolist()
    texts = [TEXTS[i] for i in order]
    rewards = call_reward_fn(reward_fn, texts, {"prompts": prompts})
    one = reward_fn(texts[:1], prompts[:1])
    return {
        "as a trainer calls it": rewards,
        # Together they would be other tokens than prompt and completion, each on its own.
        "a completion in mid-word": reward_fn(["ie was dull"], ["The mov"]),
        "of one": one,
        "prompts by keyword": reward_fn(texts, prompts=prompts),
    }


@check("make_reward_fn", public=True, points=2, expected=reward_fn_by_hugging_face, **IN_FLOAT32)
def the_scale_of_the_training_pairs(student, rng):
    """Mean and std are the model's, not those of the texts that are scored; no gradient"""
    model = _scaled_model(student, rng)
    reward_fn = student.make_reward_fn(model)
    prompts = list(trainers.PROMPTS[:2])
    found = {}
    for name, texts in {
        "two": TEXTS[:2],
        "two alike": [TEXTS[0]] * 2,
        "others": TEXTS[2:4],
    }.items():
        rewards = reward_fn(texts, prompts)
        found[name] = rewards.detach()
        found[f"{name}: whether a gradient flows"] = bool(rewards.requires_grad)
    trained = sum(p.requires_grad for p in model.trainable_parameters())
    return found | {
        "parameters that are trained afterwards": trained,
        "whether gradients are recorded afterwards": torch.is_grad_enabled(),
    }


# --- calc_dpo_loss ------------------------------------------------------------------------------

NAMES = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")


@check(
    "calc_dpo_loss",
    public=True,
    expected=[0.58361, [1.0, 0.5], [0.5, 0.5]],
    atol=1e-4,
)
def worked_dpo(student, rng):
    """Beta 0.5, log-ratios 2 and 1, then 1 and 1: margins of 0.5 and 0, rewards in halves"""
    policy = rng.tensor([-10.0, -12.0]), rng.tensor([-11.0, -9.0])
    ref = rng.tensor([-12.0, -13.0]), rng.tensor([-12.0, -10.0])
    loss, chosen, rejected = student.calc_dpo_loss(*policy, *ref, beta=0.5)
    return [loss, chosen, rejected]


def _draw_logprobs(rng, n):
    ref = [-rng.uniform(n, low=10, high=60) for _ in range(2)]
    policy = [x + rng.normal(n, std=4) for x in ref]
    return dict(zip(NAMES, (*policy, *ref), strict=True))


@check("calc_dpo_loss", public=True, points=4, seeds=2, expected=dpo_by_odds)
def dpo_losses(student, rng):
    """Loss, implicit rewards and the gradient for each argument: several betas, and the default"""
    found = {}
    for n, options in ((5, {}), (1, {"beta": 0.5}), (9, {"beta": 1.0}), (4, {"beta": 0.02})):
        logprobs = _draw_logprobs(rng, n)
        _, chosen, rejected = student.calc_dpo_loss(**logprobs, **options)
        gradients = value_and_gradients(
            lambda **x: student.calc_dpo_loss(**x, **options)[0],  # noqa: B023
            **logprobs,
        )
        found[f"{n} pairs, {options}"] = {"chosen": chosen, "rejected": rejected} | gradients
    return found


@check("calc_dpo_loss", expected=dpo_by_odds, tier="hardening")
def dpo_far_from_the_reference(student, rng):
    """Log-ratios of ±1000: the loss and its gradients are finite"""
    logprobs = _draw_logprobs(rng, 4)
    shift = rng.tensor([1000.0, -1000.0, 0.0, 500.0])
    logprobs["policy_chosen"] = logprobs["policy_chosen"] + shift
    return value_and_gradients(lambda **x: student.calc_dpo_loss(**x, beta=1.0)[0], **logprobs)


@check("calc_dpo_loss", public=True, expected=dpo_by_odds, tier="hardening")
def implicit_rewards_are_numbers(student, rng):
    """The returned rewards carry no gradient; the arguments stay as they were"""
    logprobs = _draw_logprobs(rng, 3)
    _, chosen, rejected = student.calc_dpo_loss(*(leaf(x) for x in logprobs.values()))
    flags = {"whether a gradient flows": bool(chosen.requires_grad or rejected.requires_grad)}
    values = {"chosen": chosen.detach(), "rejected": rejected.detach()}
    return (
        flags
        | values
        | with_inputs_after(lambda *x: student.calc_dpo_loss(*x)[0], *logprobs.values())
    )


@check("calc_dpo_loss", tier="hardening")
def betas_that_are_not_positive(student, rng):
    """A beta of 0 or below: a ValueError names it"""
    logprobs = list(_draw_logprobs(rng, 3).values())
    bad = {f"beta {b}": error_of("beta", student.calc_dpo_loss, *logprobs, b) for b in (0, -0.1)}
    return bad | {"beta 0.2": student.calc_dpo_loss(*logprobs, 0.2)[0]}


# --- best_of_n ----------------------------------------------------------------------------------


@check("best_of_n", public=True, expected=["b", "f"])
def worked_best(student, rng):
    """Of a, b, c with rewards 1, 3, 2 the best is b; of d, e, f with -3, -2, -1 it is f"""
    rewards = rng.tensor([1.0, 3.0, 2.0, -3.0, -2.0, -1.0])
    return student.best_of_n(["a", "b", "c", "d", "e", "f"], rewards, 3)


@check("best_of_n", public=True, points=3, seeds=2, expected=best_by_sorting)
def best_of_groups(student, rng):
    """Several prompts, good and bad; n from 1 to all; as many prompts as completions per prompt"""
    found = {}
    for groups, n in ((4, 3), (3, 3), (2, 5), (1, 6), (5, 1)):
        rewards = grouped_rewards(rng, groups, n)
        texts = [f"text {i}" for i in rng.permutation(100)[: groups * n].tolist()]
        found[f"{groups} prompts, n {n}"] = student.best_of_n(texts, rewards, n)
    return found


@check("best_of_n", tier="hardening", beside=True)
def numbers_that_do_not_fit(student, rng):
    """n that does not divide the samples, or is 0; not one reward each: a ValueError names it"""
    texts, rewards, f = list("abcdef"), rng.normal(6), student.best_of_n
    bad = {f"n {n}": error_of("n", f, texts, rewards, n) for n in (4, 0, 12)}
    bad["5 rewards"] = error_of("rewards", f, texts, rewards[:5], 3)
    return bad | {"n 2": f(texts, rewards, 2), "the rewards": rewards}


# --- calc_best_of_n_kl --------------------------------------------------------------------------


@check("calc_best_of_n_kl", public=True, expected=[0.0, 0.193147, 1.204442, 3.174514], atol=1e-5)
def worked_kls(student, rng):
    """n 1, 2, 8 and 64"""
    return [student.calc_best_of_n_kl(n) for n in (1, 2, 8, 64)]


@check(
    "calc_best_of_n_kl",
    points=2,
    seeds=2,
    expected=best_of_n_kl_by_quadrature,
    rtol=1e-4,
    atol=1e-4,
)
def kls_by_quadrature(student, rng):
    """Random n up to 60, against the integral of q log q"""
    numbers = [rng.integer(2, 60) for _ in range(4)]
    found = [float(student.calc_best_of_n_kl(n)) for n in numbers]
    return {"n": numbers, "KL": torch.tensor(found, dtype=torch.float64)}


@check("calc_best_of_n_kl", tier="hardening")
def n_that_is_not_positive(student, rng):
    """n of 0 or below: a ValueError names it"""
    n = rng.integer(2, 100)
    bad = {f"n {n}": error_of("n", student.calc_best_of_n_kl, n) for n in (0, -1)}
    return bad | {"n": n, "KL": float(student.calc_best_of_n_kl(n))}


# --- rejection_sample ---------------------------------------------------------------------------


@check("rejection_sample", public=True, expected=[[1], [0, 1, 2, 3]])
def worked_picks(student, rng):
    """Of rewards 0, 10, 5 and -5 the best at temperature 0.001; all four, each once"""
    rewards = rng.tensor([0.0, 10.0, 5.0, -5.0])
    # Only one when it is cold: measured by the maximum of all rows, no second one is ever accepted.
    picks = student.rejection_sample(rewards, 1, 1e-3), student.rejection_sample(rewards, 4, 5.0)
    return [picks[0].tolist(), sorted(picks[1].tolist())]


# The probability of each result, worked by hand: at temperature 1 / ln 2 a row is accepted with
# probability 2 ** (reward - max).
WORKED_PICKS = {
    (1, 2): 1037 / 1536,
    (1, 0): 359 / 1536,
    (2, 1): 92 / 1536,
    (0, 1): 44 / 1536,
    (2, 0): 2 / 1536,
    (0, 2): 2 / 1536,
}
N_WORKED = 4000


def _have_worked_frequencies(observed, reference):
    if bool((observed["numbers of rows"] != 2).any()):
        return "num_samples is 2, but there are results with another number of rows"
    results = [tuple(rows) for rows in observed["picks"].tolist()]
    if not set(results) <= WORKED_PICKS.keys():
        return "each result should hold the numbers of two different rows of three"
    for rows, p in WORKED_PICKS.items():
        n = results.count(rows)
        if abs(n - N_WORKED * p) > 6.5 * (N_WORKED * p * (1 - p)) ** 0.5:
            return (
                f"the result {list(rows)} should come in {p:.1%} of the calls, but does in "
                f"{n / N_WORKED:.1%}: is each row accepted by a draw of its own, is the order of "
                "each pass random, and is the maximum that of the rows that remain?"
            )
    return None


@check("rejection_sample", public=True, points=2, holds=_have_worked_frequencies, beside=True)
def worked_frequencies(student, rng):
    """Rewards 0, 4 and 1, two picks at temperature 1 / ln 2: how often each result comes up"""
    rewards, generator = rng.tensor([0.0, 4.0, 1.0]), rng.new_generator()
    picks = [
        student.rejection_sample(rewards, 2, 1 / math.log(2), generator) for _ in range(N_WORKED)
    ]
    return {
        "numbers of rows": torch.tensor([len(rows) for rows in picks]),
        "picks": torch.stack([rows[:2] for rows in picks]),
    }


N_DRAWS = 1500
PICKS = {
    "one of three": ([0.0, 1.0, 0.5], 1, 1.0),
    "two of three": ([1.0, -1.0, 0.0], 2, 0.7),
    # The best one goes first and is far ahead: with its maximum, later passes weigh otherwise.
    "three of four": ([0.0, 3.0, -1.5, -3.0], 3, 1.5),
    "all of three": ([0.3, 0.0, 1.0], 3, 0.5),
    "high rewards": ([1000.0, 1001.0, 999.0], 2, 2.0),
}


def _fits_enumeration(observed, reference):
    for name, (_, num_samples, temperature) in PICKS.items():
        rewards, picks = reference[f"{name}: rewards"].tolist(), observed[name]
        if picks.shape != (N_DRAWS, num_samples):
            return f"{name}: the result should be {num_samples} row numbers"
        results = list(itertools.permutations(range(len(rewards)), num_samples))
        numbers = {result: i for i, result in enumerate(results)}
        rows = [numbers.get(tuple(row)) for row in picks.tolist()]
        if None in rows:
            return f"{name}: the rows should be different ones of 0 to {len(rewards) - 1}"
        exact = rejection_probs(rewards, num_samples, temperature)
        probs = torch.tensor([exact.get(result, 0.0) for result in results])
        wrong = misfit(torch.tensor(rows), probs)
        if wrong is not None:
            return f"{name}: {wrong}".replace("draws", "picks").replace("token", "result")
    return None


@check("rejection_sample", points=5, holds=_fits_enumeration, float64=False)
def frequencies_of_picks(student, rng):
    """How often each result comes up, order included, against the exact probabilities"""
    generator, found = rng.new_generator(), {}
    for name, (rewards, num_samples, temperature) in PICKS.items():
        # Neither the order nor a number that is added to all changes the probabilities.
        moved = rng.tensor(rewards)[rng.permutation(len(rewards))] + rng.normal(1)
        picks = [
            student.rejection_sample(moved, num_samples, temperature, generator)
            for _ in range(N_DRAWS)
        ]
        found[name], found[f"{name}: rewards"] = torch.stack(picks), moved
    return found


def _generator_decides(observed, reference):
    if not torch.equal(observed["from a seed"], observed["from the seed again"]):
        return "the same generator state should give the same rows"
    if sorted(observed["all"].tolist()) != list(range(12)):
        return "with num_samples = n each row should be there once"
    if not torch.equal(observed["rewards"], reference["rewards"]):
        return "the rewards should stay as they were"
    return None


@check("rejection_sample", public=True, holds=_generator_decides, tier="hardening", beside=True)
def picks_of_a_generator(student, rng):
    """Only the generator decides; all the rows, if that many are asked for"""
    rewards, seed = rng.normal(12, std=2), rng.seed % 2**31
    found = {}
    for name in ("from a seed", "from the seed again"):
        generator = torch.Generator().manual_seed(seed)
        found[name] = student.rejection_sample(rewards, 5, 1.0, generator)
        torch.rand(3)  # of the global generator
    return found | {"all": student.rejection_sample(rewards, 12, 1.0), "rewards": rewards}


@check("rejection_sample", tier="hardening", beside=True)
def picks_that_are_refused(student, rng):
    """More rows than there are, none, a temperature of 0 or below: a ValueError names it"""
    rewards, f = rng.normal(4), student.rejection_sample
    bad = {f"num_samples {k}": error_of("num_samples", f, rewards, k, 1.0) for k in (5, 0, -1)}
    bad |= {f"temperature {t}": error_of("temperature", f, rewards, 2, t) for t in (0.0, -1.0)}
    return bad | {"rewards": rewards}


# --- pool_advantages ----------------------------------------------------------------------------


@check("pool_advantages", public=True, expected=[1.1618, 0.3872, 1.2246, -1.2246], atol=1e-3)
def worked_pools(student, rng):
    """Pools 0, 1, 2, 3 and 10, 11, 12, 11: rows 3 and 2 of the first, 6 and 4 of the second"""
    scores = rng.tensor([0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 11.0])
    return student.pool_advantages(scores, torch.tensor([3, 2, 6, 4]), 4)


def _draw_kept(rng, pools, size, n):
    rows = [i * size + rng.permutation(size)[:n] for i in range(pools)]
    return torch.cat(rows)


@check("pool_advantages", public=True, points=3, seeds=2, expected=pool_by_statistics)
def kept_of_pools(student, rng):
    """Some rows of each pool in any order, one of each, all of them; good pools and bad ones"""
    found = {}
    for pools, size, n in ((3, 8, 3), (1, 5, 2), (4, 4, 1), (2, 6, 6), (3, 2, 1)):
        scores, kept = grouped_rewards(rng, pools, size), _draw_kept(rng, pools, size, n)
        found[f"{n} of {size}, {pools} pools"] = student.pool_advantages(scores, kept, size)
    scores, uneven = grouped_rewards(rng, 3, 4), rng.permutation(12)[:5]
    return found | {"as it comes": student.pool_advantages(scores, uneven, 4), "kept": uneven}


@check("pool_advantages", public=True, points=2, expected=pool_by_statistics, tier="hardening")
def pools_of_equal_scores(student, rng):
    """Pools whose scores are all equal give zeros; small spreads; no gradient"""
    constant = rng.uniform(2, low=-9, high=9).repeat_interleave(7)
    scores = torch.cat([constant, rng.normal(7, std=1e-5), rng.normal(7)])
    kept = _draw_kept(rng, 4, 7, 3)
    found = student.pool_advantages(leaf(scores), kept, 7)
    flags = {"whether a gradient flows": bool(found.requires_grad)}
    return flags | with_inputs_after(student.pool_advantages, scores, kept, 7)


@check("pool_advantages", tier="hardening")
def pool_sizes_that_do_not_fit(student, rng):
    """A pool_size that does not divide the scores, or is below 2: a ValueError names it"""
    scores, kept, f = rng.normal(6), torch.tensor([0, 4]), student.pool_advantages
    bad = {f"pool_size {n}": error_of("pool_size", f, scores, kept, n) for n in (4, 5, 1, 0)}
    return bad | {"3": f(scores, kept, 3)}
