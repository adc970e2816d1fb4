"""Checks of chapter 2: the PPO trainer."""

import contextlib
import functools
import itertools
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from solutions import ch2_ppo
from solutions.ch1_lora import TransformerWithLora
from tests.oracles.ch2_ppo import (
    advantages_at_the_ends,
    advantages_by_double_sum,
    advantages_by_statistics,
    count_by_loops,
    entropy_bonus_by_categorical,
    kl_penalty_by_distributions,
    memory_by_loops,
    reward_by_statistics,
    sentiment_by_word,
    surrogate_by_cases,
    token_rewards_by_loops,
    value_loss_by_cases,
)
from tests.support import models, trainers
from tests.support.inputs import (
    NAN,
    attempt,
    error_of,
    gradients,
    is_error,
    leaf,
    poison,
    ragged_mask,
    sliced,
    with_inputs_after,
)
from tests.support.trainers import IN_FLOAT32, RANK, beyond, inside, make_model, make_samples
from utils.grading.checks import check
from utils.models.corpus import NEGATIVE_WORDS, NEUTRAL_WORDS, POSITIVE_WORDS

FILLS = {"NaN": NAN, "inf": torch.inf}  # of what is masked out


def call_with_gradients(function, *settings, **tensors: Tensor):
    """function(*tensors, *settings), and its gradient for every one of the tensors."""
    leaves = {name: leaf(x) for name, x in tensors.items()}
    output = function(*leaves.values(), *settings)
    return {"the result": output} | gradients(output, **leaves)


def poison_all(mask, fill, **tensors: Tensor) -> dict[str, Tensor]:
    return {name: poison(x, mask, fill) for name, x in tensors.items()}


def by_case(found: dict[str, dict]) -> dict:
    """One level less: a message then says in which case what is wrong."""
    return {f"{name} ({case})": x for case, parts in found.items() for name, x in parts.items()}


def weighted_gradients(rng, function, **tensors: Tensor) -> dict:
    """The gradients of a weighted sum of function(**tensors): zeros where it is detached."""
    leaves = {name: leaf(x) for name, x in tensors.items()}
    output = function(**leaves)
    return gradients(output * rng.normal(*output.shape), **leaves)


def in_every_form(call, mask, **tensors: Tensor) -> dict:
    """What `call(**tensors)` gives: with numbers beyond the mask, and with NaN or inf there, in
    all of the tensors and in one of them alone."""
    found = {"numbers beyond the mask": call(**tensors)}
    for fill_name, fill in FILLS.items():
        poisoned = poison_all(mask, fill, **tensors)
        found[f"{fill_name} beyond the mask"] = call(**poisoned)
        for name in tensors if len(tensors) > 1 else ():
            chosen = tensors | {name: poisoned[name]}
            found[f"{fill_name} beyond the mask in {name}"] = call(**chosen)
    return by_case(found)


def call_on_edges(rng, function, make_tensors, *settings):
    """Value and gradients of a masked mean: one token, one of three, none, many; ragged.

    The last is called without gradients, on slices of larger tensors, and gives what it left of its
    inputs.
    """
    masks = {
        "one token": torch.ones(1, 1),
        "one of three": torch.tensor([[1, 0, 0]]),
        "none": torch.zeros(2, 3),
        "1103 tokens": torch.ones(1, 1103),  # no multiple of a usual chunk
        "150 rows": ragged_mask(rng, 150, 3),
    }
    found = {}
    for name, mask in masks.items():
        mask = mask.bool()
        tensors = poison_all(mask, NAN, **make_tensors(rng, mask))
        found[name] = call_with_gradients(function, mask, *settings, **tensors)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    tensors = [sliced(x) for x in poison_all(mask, NAN, **make_tensors(rng, mask)).values()]
    found["ragged slices"] = with_inputs_after(function, *tensors, sliced(mask), *settings)
    in_float64 = function(*(x.double() for x in tensors), mask, *settings)
    found["float64"] = {"the result": in_float64.to(rng.dtype)}
    return by_case(found)


# --- reward_fn_char_count -----------------------------------------------------------------------


def random_texts(rng, rows):
    alphabet = "aA b.. ?*\n(eé…^[]\\12<>"
    return [
        "".join(alphabet[i] for i in rng.integers(0, len(alphabet), rng.integer(1, 40)).tolist())
        for _ in range(rows)
    ]


def of_default_dtype(rewards):
    """Floats of another width are right, too: nothing comes in that would say which."""
    is_float = isinstance(rewards, Tensor) and rewards.is_floating_point()
    return rewards.to(torch.get_default_dtype()) if is_float else rewards


@check("reward_fn_char_count", public=True, expected=[2.0, 0.0, 3.0, 0.0])
def worked_counts(student, rng):
    """The full stops of "a.b.", "", "...and" and "ab": 2, 0, 3 and 0"""
    return of_default_dtype(student.reward_fn_char_count(["a.b.", "", "...and", "ab"]))


@check("reward_fn_char_count", public=True, points=2, seeds=2, expected=count_by_loops)
def any_character(student, rng):
    """Random texts: full stops by default, and other characters"""
    texts = random_texts(rng, 9)
    texts[-1] *= rng.integer(30, 60)  # a long one

    def count(*args, **kwargs):
        return of_default_dtype(student.reward_fn_char_count(*args, **kwargs))

    return {f"{char!r}": count(texts, char) for char in ".aAé \n?(^[]\\"} | {
        "default": count([*texts, texts[0]]),
        "by keyword": count(texts, char="e"),
        "one text": count(texts[:1]),
        "150 texts": count(random_texts(rng, 150)),
    }


# --- reward_fn_sentiment ------------------------------------------------------------------------

OTHER_WORDS = tuple(
    "greatly unfunny badly enriched warmth coldest flatly superbly baddish notgreat enrich "
    "charmings bores greats good excellent amazing beautiful best love nice fantastic "
    "awful worst horrible hate stupid waste disappointing".split()
)


def reward_each(student, texts):
    """Sentiments by text, so that a message says which one is wrong."""
    rewards = of_default_dtype(student.reward_fn_sentiment(texts))
    is_tensor = isinstance(rewards, Tensor)
    fits = is_tensor and rewards.shape == (len(texts),)
    found = {"the tensor of rewards": torch.zeros_like(rewards) if is_tensor else rewards}
    return found | {
        f"the reward of {text!r}": rewards[i] if fits else rewards for i, text in enumerate(texts)
    }


def choose(rng, items):
    return items[rng.integer(0, len(items))]


def random_review(rng, words, n):
    """`n` of these words in any case, with punctuation, spaces, line breaks or hyphens between."""
    text = ""
    for _ in range(n):
        word = choose(rng, words)
        word = choose(rng, (word, word.capitalize(), word.upper()))
        after = choose(rng, ("", "", *".,!?;:\"')*]>", "..."))
        text += choose(rng, ("", "", "", *"\"'(*[<")) + word + after + choose(rng, "  \n\n-")
    return text


@check("reward_fn_sentiment", public=True, expected=[1 / 3, -1.0, 0.0, 0.0])
def worked_sentiments(student, rng):
    """Two good words and a bad one in "Great, and a bad end. Lovely!": 1/3; then -1, 0 and 0"""
    texts = ["Great, and a bad end. Lovely!", "Dull.", "It is a film", ""]
    return of_default_dtype(student.reward_fn_sentiment(texts))


@check("reward_fn_sentiment", public=True, points=3, seeds=2, expected=sentiment_by_word)
def random_reviews(student, rng):
    """Words in any case and punctuation, such as "great", *lovely* or dull-[bad]; repeated ones"""
    words = POSITIVE_WORDS + NEGATIVE_WORDS + NEUTRAL_WORDS
    kinds = (NEGATIVE_WORDS, POSITIVE_WORDS)[:: choose(rng, (1, -1))]  # what it ends with
    long = "".join(random_review(rng, kind, rng.integer(300, 600)) for kind in kinds)
    found = reward_each(student, ["...", *(random_review(rng, words, n) for n in range(12))])
    return found | {"a long review": of_default_dtype(student.reward_fn_sentiment([long]))}


@check("reward_fn_sentiment", points=2, expected=sentiment_by_word, tier="hardening")
def every_word_of_the_lists(student, rng):
    """Each word of the corpus's lists on its own, and 150 texts together, one of them twice"""
    words = POSITIVE_WORDS + NEGATIVE_WORDS + NEUTRAL_WORDS
    together = [random_review(rng, words, 1 + n % 9) for n in range(150)]
    return reward_each(student, [words[i] for i in rng.permutation(len(words)).tolist()]) | {
        "several together": of_default_dtype(student.reward_fn_sentiment([*together, together[0]]))
    }


@check("reward_fn_sentiment", public=True, expected=sentiment_by_word)
def words_inside_words(student, rng):
    """A word inside another ("great" in "greatly") does not count, nor do words of other lists"""
    mixed = (choose(rng, POSITIVE_WORDS), choose(rng, NEGATIVE_WORDS), *OTHER_WORDS)
    return reward_each(
        student, [*OTHER_WORDS, *(random_review(rng, mixed, n) for n in range(3, 12))]
    )


# --- normalize_reward ---------------------------------------------------------------------------


@check("normalize_reward", public=True, expected=[-0.5, 0.0, 0.5])
def worked_normal_rewards(student, rng):
    """1, 2, 3 with eps 1: the mean is 2, the std 1, so -1/2, 0, 1/2"""
    return student.normalize_reward(rng.tensor([1.0, 2.0, 3.0]), 1.0)


@check("normalize_reward", public=True, points=2, seeds=2, expected=reward_by_statistics)
def random_rewards(student, rng):
    """Random rewards, 2 and more, several eps; the rewards stay as they were"""
    rewards, f = rng.normal(9, mean=4, std=3), student.normalize_reward
    return by_case(
        {
            "default eps": with_inputs_after(f, rewards),
            "eps 0.7": with_inputs_after(f, rewards, eps=0.7),
        }
    ) | {
        "two rewards": f(rewards[:2]),
        "an outlier": f(torch.cat([rng.normal(250), rng.normal(1, mean=1000)])),
        "x, -x, -x, x": f(rewards[:1] * rng.tensor([1.0, -1.0, -1.0, 1.0])),
        "float64": f(rewards.double()).to(rng.dtype),
        "a mean of 300": f(rng.normal(9, mean=300)),
    }


@check("normalize_reward", public=True, points=2, expected=reward_by_statistics, tier="hardening")
def eps_is_visible(student, rng):
    """A spread as small as eps, and smaller; an eps of 0"""
    rewards, f = rng.normal(7), student.normalize_reward
    return {
        "default eps": [f(rewards * spread) for spread in (2e-5, 5e-6, 1e-7)],
        "eps 0.001": [f(rewards * spread, 1e-3) for spread in (2e-3, 5e-4)],
        "eps 0": [f(rewards * 2e-5, 0.0), f(torch.ones_like(rewards), eps=0.0)],
    }


@check("normalize_reward", public=True, expected=reward_by_statistics)
def equal_rewards(student, rng):
    """Equal rewards, or a single one: zeros, even if their mean is rounded"""
    f = student.normalize_reward
    return {
        f"{n} times {value}": f(rng.tensor([value] * n))
        for value, n in itertools.product((0.1, -3.3, 1e6 / 3, 0.0), (7, 100))
    } | {"one": with_inputs_after(f, rng.normal(1)), "not equal": f(rng.normal(5))}


# --- compute_token_rewards ----------------------------------------------------------------------


@check("compute_token_rewards", public=True, expected=[[0, 5, 0], [0, 0, -2], [0, 0, 0], [1, 0, 0]])
def worked_scores(student, rng):
    """Scores 5, -2, 9, 1 for completions with 2, 3, 0 and 1 tokens; no KL"""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]]).bool()
    return student.compute_token_rewards(rng.tensor([5.0, -2.0, 9.0, 1.0]), mask)


@check("compute_token_rewards", public=True, expected=[[-0.1, 5.05, 0], [0.2, -0.1, -2.1]])
def worked_token_kl(student, rng):
    """Scores 5 and -2, minus 0.1 times the log-ratios 1, -0.5 (then NaN) and -2, 1, 1"""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    logprobs = rng.tensor([[-1.0, -1.0, NAN], [-3.0, -1.0, -1.0]])
    ref_logprobs = rng.tensor([[-2.0, -0.5, NAN], [-1.0, -2.0, -2.0]])
    scores = rng.tensor([5.0, -2.0])
    return student.compute_token_rewards(scores, mask, logprobs, ref_logprobs, 0.1)


def token_logprobs(rng, mask):
    logprobs, ref_logprobs = (-rng.uniform(*mask.shape, high=4) for _ in "pq")
    return {"logprobs": logprobs, "ref_logprobs": ref_logprobs}


@check("compute_token_rewards", public=True, points=3, seeds=2, expected=token_rewards_by_loops)
def ragged_token_rewards(student, rng):
    """Different lengths, anything beyond the mask: a reward is a number, with no gradient"""
    mask, scores = ragged_mask(rng), rng.normal(6, mean=1, std=2)
    f, tensors = student.compute_token_rewards, token_logprobs(rng, mask)
    return in_every_form(
        lambda **x: with_inputs_after(f, scores, mask, *map(sliced, x.values()), kl_coef=0.3),
        mask,
        **tensors,
    ) | weighted_gradients(
        rng, lambda **x: f(scores, mask, **x, kl_coef=0.3), **poison_all(mask, NAN, **tensors)
    )


@check("compute_token_rewards", public=True, expected=token_rewards_by_loops)
def scores_alone(student, rng):
    """kl_coef 0 needs no log-probs and ignores NaN in them; above 0 without them: an error"""
    mask, scores, f = ragged_mask(rng), rng.normal(6, mean=1), student.compute_token_rewards
    logprobs, ref_logprobs = poison_all(mask, NAN, **token_logprobs(rng, mask)).values()
    return {
        "without": with_inputs_after(f, scores, mask),
        "None": f(scores, mask, None, None, 0.0),
        "with": f(scores, mask, logprobs, ref_logprobs),
        "kl_coef 0.3 without a reference": is_error(f, scores, mask, logprobs, None, 0.3),
    }


@check("compute_token_rewards", points=2, expected=token_rewards_by_loops, tier="hardening")
def token_reward_edges(student, rng):
    """One row of one token, no tokens at all, rows without an end, 150 rows"""
    masks = {
        "one token": torch.tensor([[True]]),
        "none": torch.zeros(2, 3, dtype=torch.bool),
        "all": torch.ones(2, 3, dtype=torch.bool),
        "150 rows": ragged_mask(rng, 150, 3),
    }
    return {
        name: student.compute_token_rewards(
            rng.normal(len(mask), mean=1),
            mask,
            **poison_all(mask, NAN, **token_logprobs(rng, mask)),
            kl_coef=0.5,
        )
        for name, mask in masks.items()
    }


# --- compute_advantages -------------------------------------------------------------------------


def rollouts(rng, mask):
    """Values of a mean that shows what follows the last token, rewards at every token."""
    values, token_rewards = rng.normal(*mask.shape, mean=2), rng.normal(*mask.shape)
    return {"values": values, "token_rewards": token_rewards}


@check("compute_advantages", public=True, expected=[[1.75, 1.5, -1], [-3, 0, 0]])
def worked_advantages(student, rng):
    """Values 1, 2, 4, rewards 0, 0, 3, lam 1/2: deltas 1, 2, -1, so 1.75, 1.5, -1. Short: 1 - 4"""
    values = rng.tensor([[1.0, 2.0, 4.0], [4.0, NAN, NAN]])
    token_rewards = rng.tensor([[0.0, 0.0, 3.0], [1.0, NAN, NAN]])
    return student.compute_advantages(values, token_rewards, ~values.isnan(), 1.0, 0.5)


@check("compute_advantages", public=True, points=4, seeds=2, expected=advantages_by_double_sum)
def ragged_advantages(student, rng):
    """Completions of different lengths, anything beyond the mask; no gradient to the inputs"""
    mask, f = ragged_mask(rng), student.compute_advantages
    tensors = rollouts(rng, mask)
    found = in_every_form(
        lambda **x: with_inputs_after(f, *map(sliced, x.values()), mask, gamma=0.9, lam=0.8),
        mask,
        **tensors,
    ) | {
        "defaults": f(*tensors.values(), mask),
        "gamma alone": f(*tensors.values(), mask, 0.7),
        "lam alone": f(*tensors.values(), mask, lam=0.7),
    }
    poisoned = poison_all(mask, NAN, **tensors)
    return found | weighted_gradients(rng, lambda **x: f(**x, mask=mask, gamma=0.9), **poisoned)


@check("compute_advantages", public=True, expected=advantages_at_the_ends)
def the_ends_of_lambda(student, rng):
    """lam 1 is the discounted return minus the value; lam 0 looks one step ahead"""
    mask = ragged_mask(rng)
    tensors = poison_all(mask, NAN, **rollouts(rng, mask))
    return {
        f"gamma {gamma}, lam {lam}": student.compute_advantages(*tensors.values(), mask, gamma, lam)
        for gamma, lam in itertools.product((1.0, 0.9, 0.0), (1.0, 0.0))
    }


@check("compute_advantages", expected=advantages_by_double_sum, tier="hardening")
def advantage_edges(student, rng):
    """One token, none, 1,100; 150 rows; empty columns"""
    masks = {
        "one token": torch.ones(1, 1),
        "none": torch.zeros(2, 3),
        "all have ended": (torch.arange(6) < torch.tensor([[4], [2]])),
        "150 rows": ragged_mask(rng, 150, 3),
        "1,100 tokens": torch.arange(1100) < torch.tensor([[1100], [200]]),
    }
    found = {}
    for name, mask in masks.items():
        tensors = poison_all(mask.bool(), NAN, **rollouts(rng, mask))
        found[name] = student.compute_advantages(*tensors.values(), mask.bool(), 0.97, 0.6)
    return found


# --- normalize_advantages -----------------------------------------------------------------------


@check("normalize_advantages", public=True, expected=[[-1.0, 1.0], [0.0, 0.0]])
def worked_normal_advantages(student, rng):
    """1 and 3 in one row, 2 in the other: the mean is 2, the std 1; beyond the end 0"""
    advantages = rng.tensor([[1.0, 3.0], [2.0, NAN]])
    return student.normalize_advantages(advantages, ~advantages.isnan())


@check("normalize_advantages", public=True, points=3, seeds=2, expected=advantages_by_statistics)
def ragged_normal_advantages(student, rng):
    """6 and 150 rows of different lengths and means, anything beyond the mask; no gradient"""
    mask, f = ragged_mask(rng), student.normalize_advantages
    means = (-4.0, 5.0, 1.0, 0.0, 8.0, -2.0)
    advantages = torch.cat([rng.normal(1, 7, mean=mean, std=2) for mean in means])
    return in_every_form(
        lambda advantages: with_inputs_after(f, sliced(advantages), mask),
        mask,
        advantages=advantages,
    ) | {
        "true zeros": f(poison(rng.normal(6, 7).clamp(min=0), mask), mask),
        "150 rows": f(rng.normal(150, 3), ragged_mask(rng, 150, 3)),
        "a mean of 300": f(rng.normal(6, 7, mean=300), mask),
        **weighted_gradients(rng, lambda x: f(x, mask), x=poison(advantages, mask)),
    }


@check("normalize_advantages", public=True, expected=advantages_by_statistics, tier="hardening")
def small_advantages(student, rng):
    """A spread of 0.1, and of 1e-4 with a smaller eps; a huge eps leaves nothing; an eps of 0"""
    mask, f = ragged_mask(rng), student.normalize_advantages
    advantages = poison(rng.normal(6, 7), mask)
    return {
        "default eps": f(advantages * 0.1, mask),
        "eps 1e-14": [f(advantages * 1e-4, mask, 1e-14), f(advantages * 1e-4, mask, eps=1e-14)],
        "eps 1e16": f(advantages, mask, 1e16),
        "eps 0": [f(x, mask, 0.0) for x in (advantages * 1e-7, torch.ones_like(advantages))],
    }


@check(
    "normalize_advantages",
    public=True,
    points=2,
    expected=advantages_by_statistics,
    tier="hardening",
)
def equal_advantages(student, rng):
    """Equal advantages, or a single one, give zeros, whatever is masked out"""
    mask, f, x = ragged_mask(rng), student.normalize_advantages, rng.normal(6, 7)
    one, full = torch.zeros_like(mask), torch.ones(5, 24, dtype=torch.bool)
    one[rng.integer(0, 6), 0] = True
    return {
        f"{value}, {fill} beyond": f(poison(torch.full_like(x, value), mask, fill), mask)
        for value, fill in itertools.product((0.1, -3.3, 1e5 / 3), (NAN, torch.inf, 5.0))
    } | {
        "120 equal ones": f(rng.tensor([[0.1] * 24] * 5), full),
        "one": f(poison(x, one), one),
        "none": f(x, torch.zeros_like(mask)),
        "two": f(x[:1, :2], full[:1, :2]),
        "float64": f(poison(x, mask).double(), mask).to(rng.dtype),
    }


# --- calc_clipped_surrogate_objective -----------------------------------------------------------


def surrogate_inputs(rng, mask, spread=0.5):
    """Log-ratios with this spread, on top of old log-probs."""
    old_logprobs = -rng.uniform(*mask.shape, low=0.5, high=4)
    logprobs = old_logprobs + rng.normal(*mask.shape, std=spread)
    advantages = rng.normal(*mask.shape, mean=0.4, std=1.5)
    return {"logprobs": logprobs, "old_logprobs": old_logprobs, "advantages": advantages}


@check("calc_clipped_surrogate_objective", public=True, expected=-0.775)
def worked_surrogate(student, rng):
    """Ratios 2, 1/2, 2, 1/2, advantages 1, -1, -2, 1: the mean of 1.2, -0.8, -4 and 0.5"""
    old_logprobs = rng.tensor([[0.2, 0.5], [0.3, 0.4]]).log()
    logprobs = rng.tensor([[0.4, 0.25], [0.6, 0.2]]).log()
    advantages = rng.tensor([[1.0, -1.0], [-2.0, 1.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    return student.calc_clipped_surrogate_objective(logprobs, old_logprobs, advantages, mask, 0.2)


@check("calc_clipped_surrogate_objective", public=True, expected=[[1 / 3, 0], [-2 / 3, 1]])
def worked_slopes(student, rng):
    """Ratio 1, advantages 1, -2 and 3 at the three true positions: the gradient 1/3, -2/3 and 1"""
    old_logprobs = rng.tensor([[-1.0, NAN], [-0.5, -2.0]])
    advantages = rng.tensor([[1.0, NAN], [-2.0, 3.0]])
    logprobs, mask = leaf(old_logprobs), ~advantages.isnan()
    objective = student.calc_clipped_surrogate_objective(logprobs, old_logprobs, advantages, mask)
    return gradients(objective, logprobs=logprobs)["the gradient for logprobs"]


@check(
    "calc_clipped_surrogate_objective", public=True, points=4, seeds=2, expected=surrogate_by_cases
)
def ragged_surrogates(student, rng):
    """Different lengths, anything beyond the mask: the value, and a gradient for logprobs only"""
    mask, f = ragged_mask(rng), student.calc_clipped_surrogate_objective
    return in_every_form(
        lambda **x: call_with_gradients(f, mask, **x), mask, **surrogate_inputs(rng, mask)
    )


@check("calc_clipped_surrogate_objective", public=True, points=2, expected=surrogate_by_cases)
def every_case_of_the_clip(student, rng):
    """Ratios below, inside and above the interval, both signs of advantage and 0, several clips"""
    settings = [(0.2, None), (0.1, 0.4), (0.3, 0.05), (0.25, 0.0), (0.0, None), (1.0, 1.5)]
    logratios = rng.tensor([-3.0, -0.5, -0.03, 0.02, 0.6, 3.0, 0.1]).repeat(2, 1)
    old_logprobs, size = -rng.uniform(2, 7, low=1, high=3), rng.uniform(2, 7, low=0.5, high=2)
    size[:, -1] = 0  # a token that counts all the same
    tensors = {
        "logprobs": old_logprobs + logratios,
        "old_logprobs": old_logprobs,
        "advantages": size * rng.tensor([[1.0], [-1.0]]),
    }
    mask = torch.ones(2, 7, dtype=torch.bool)
    f = student.calc_clipped_surrogate_objective
    return by_case(
        {
            f"clip_coef {low}, clip_coef_high {high}": call_with_gradients(
                f, mask, low, high, **tensors
            )
            for low, high in settings
        }
    ) | {
        "by keyword": f(*tensors.values(), mask, clip_coef=0.1, clip_coef_high=0.5),
        "clip_coef alone": f(*tensors.values(), mask, 0.5),
    }


@check("calc_clipped_surrogate_objective", points=2, expected=surrogate_by_cases, tier="hardening")
def huge_log_ratios(student, rng):
    """Log-ratios of 20, -20 and 30, and of 1000 and -1000 beyond the mask; rare tokens"""
    mask = torch.tensor([[True] * 6 + [False] * 2])
    signs = rng.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0]])
    found = {}
    for largest in (12.0, 30.0):  # among those that are not clipped: it drowns the others
        old_logprobs = -rng.uniform(1, 8, low=35, high=40)
        old_logprobs[0, 5] = -110.0
        logratios = rng.tensor([[20.0, largest, -20.0, -20.0, 0.1, -0.1, 1000.0, -1000.0]])
        found[f"a log-ratio of {largest:g}"] = call_with_gradients(
            student.calc_clipped_surrogate_objective,
            mask,
            0.2,
            0.3,
            logprobs=old_logprobs + logratios,
            old_logprobs=old_logprobs,
            advantages=signs * rng.uniform(1, 8, low=0.5, high=2),
        )
    return by_case(found)


@check("calc_clipped_surrogate_objective", expected=surrogate_by_cases, tier="hardening")
def surrogate_edges(student, rng):
    """One token, no tokens (0), 1103 tokens, 150 rows; the inputs stay as they were"""
    return call_on_edges(rng, student.calc_clipped_surrogate_objective, surrogate_inputs)


# --- calc_value_function_loss -------------------------------------------------------------------


def value_inputs(rng, mask):
    old_values = rng.normal(*mask.shape, mean=1)
    values = old_values + rng.normal(*mask.shape, std=0.6)
    return {"values": values, "old_values": old_values, "returns": rng.normal(*mask.shape)}


TWO_ERRORS = {
    "the result": 1.25,
    "the gradient for values": [[-0.25, 0.75, 0]],
    "the gradient for old_values": [[0, 0, 0]],
    "the gradient for returns": [[0, 0, 0]],
}


@check("calc_value_function_loss", public=True, expected=TWO_ERRORS)
def worked_value_loss(student, rng):
    """Values 1, 3 and NaN, returns 2, 0: 0.5/2 times the mean of 1 and 9; slopes -1/4, 3/4 and 0"""
    values, returns = rng.tensor([[1.0, 3.0, NAN]]), rng.tensor([[2.0, 0.0, NAN]])
    tensors = {"values": values, "old_values": values - 1, "returns": returns}
    return call_with_gradients(student.calc_value_function_loss, ~values.isnan(), **tensors)


@check("calc_value_function_loss", public=True, expected=2.65625)
def worked_value_clip(student, rng):
    """Values 3 held at 1 + 0.5, returns 0 and 5: 1/4 of the mean of 9 and 12.25"""
    values, old_values, returns = rng.tensor([[[3.0, 3.0]], [[1.0, 1.0]], [[0.0, 5.0]]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    return student.calc_value_function_loss(values, old_values, returns, mask, 0.5, 0.5)


@check("calc_value_function_loss", public=True, points=3, seeds=2, expected=value_loss_by_cases)
def ragged_value_losses(student, rng):
    """Different lengths, anything beyond the mask: the value, and a gradient for values only"""
    mask, f = ragged_mask(rng), student.calc_value_function_loss
    tensors = value_inputs(rng, mask)
    return in_every_form(
        lambda **x: call_with_gradients(f, mask, 0.3, None, **x), mask, **tensors
    ) | {
        "defaults": f(*tensors.values(), mask),
        "vf_coef alone": f(*tensors.values(), mask, 0.8),
        "vf_coef 0": f(*tensors.values(), mask, 0.0),
    }


@check("calc_value_function_loss", public=True, points=3, seeds=2, expected=value_loss_by_cases)
def clipped_value_losses(student, rng):
    """With clip_coef, 0 too: each token's larger error, then the mean; value and gradients"""
    mask, f = ragged_mask(rng), student.calc_value_function_loss
    tensors = value_inputs(rng, mask)
    return in_every_form(
        lambda **x: call_with_gradients(f, mask, 0.3, 0.2, **x), mask, **tensors
    ) | {
        "clip_coef 0": f(*tensors.values(), mask, 0.3, 0.0),
        "by keyword": f(*tensors.values(), mask, clip_coef=0.5, vf_coef=0.15),
    }


@check("calc_value_function_loss", expected=value_loss_by_cases, tier="hardening")
def value_loss_edges(student, rng):
    """One token, no tokens (0), 1103 tokens, 150 rows; the inputs stay as they were"""
    return call_on_edges(rng, student.calc_value_function_loss, value_inputs, 0.3, 0.2)


# --- calc_entropy_bonus -------------------------------------------------------------------------


def policy_logits(rng, mask, std=1.5, vocab=130):
    return {"logits": rng.normal(*mask.shape, vocab, std=std)}


THREE_COINS = {
    "the result": 0.18178175,
    "the gradient for logits": [
        [[0, 0], [-0.0205990, 0.0205990]],
        [[-0.0205990, 0.0205990], [0, 0]],
    ],
}


@check("calc_entropy_bonus", public=True, expected=THREE_COINS)
def worked_entropy_bonus(student, rng):
    """A fair coin (0.6931), two of 3 to 1 (0.5623), NaN beyond: 0.3 times the mean; its gradient"""
    logits = rng.tensor([[[1.0, 1.0], [3.0, 1.0]], [[3.0, 1.0], [NAN, NAN]]]).log()
    mask = torch.tensor([[True, True], [True, False]])
    return call_with_gradients(student.calc_entropy_bonus, mask, 0.3, logits=logits)


@check("calc_entropy_bonus", points=2, seeds=2, expected=entropy_bonus_by_categorical)
def ragged_entropy_bonuses(student, rng):
    """Different lengths, anything beyond the mask; a vocabulary of 20,000; a logit of -inf"""
    mask, f = ragged_mask(rng), student.calc_entropy_bonus
    tensors, two = policy_logits(rng, mask), torch.ones(1, 2, dtype=torch.bool)
    found = {f"ent_coef {c}": f(*tensors.values(), mask, c) for c in (0.01, 1.0, 0.0)}
    found["a vocabulary of 20,000"] = f(*policy_logits(rng, two, vocab=20_000).values(), two, 0.7)
    impossible = (tensors["logits"] - 200).index_fill(-1, rng.integers(0, 130, 1), -torch.inf)
    found |= by_case({"an impossible token": call_with_gradients(f, mask, 0.7, logits=impossible)})
    return found | in_every_form(
        lambda **x: call_with_gradients(f, mask, 0.7, **x), mask, **tensors
    )


@check(
    "calc_entropy_bonus",
    expected=entropy_bonus_by_categorical,
    rtol=1e-3,
    atol=1e-4,
    tier="hardening",
)
def entropy_bonus_of_hard_logits(student, rng):
    """Logits of some hundreds: no overflow, and a finite gradient"""
    mask, f = ragged_mask(rng), student.calc_entropy_bonus
    return call_with_gradients(f, mask, 0.5, **policy_logits(rng, mask, 100))


@check("calc_entropy_bonus", expected=entropy_bonus_by_categorical, tier="hardening")
def entropy_bonus_edges(student, rng):
    """One token, no tokens (0), 1103 tokens, 150 rows; the inputs stay as they were"""
    return call_on_edges(rng, student.calc_entropy_bonus, policy_logits, 0.3)


# --- calc_kl_penalty ----------------------------------------------------------------------------


def two_logits(rng, mask, std=1.5, vocab=130):
    logits, ref_logits = (rng.normal(*mask.shape, vocab, std=std) for _ in "pq")
    return {"logits": logits, "ref_logits": ref_logits}


THREE_PAIRS = {
    "the result": 0.07079112,
    "the gradient for logits": [
        [[0.0411980, -0.0411980], [0.0693147, -0.0693147]],
        [[0, 0], [0, 0]],
    ],
    "the gradient for ref_logits": [[[0, 0], [0, 0]], [[0, 0], [0, 0]]],
}


@check("calc_kl_penalty", public=True, expected=THREE_PAIRS)
def worked_kl_penalty(student, rng):
    """(3/4, 1/4) against (1/2, 1/2): 0.131; (1/2, 1/2) against (1/5, 4/5): 0.223; 0; gradients"""
    logits = rng.tensor([[[3.0, 1.0], [1.0, 1.0]], [[3.0, 1.0], [NAN, NAN]]]).log()
    ref_logits = rng.tensor([[[1.0, 1.0], [1.0, 4.0]], [[3.0, 1.0], [NAN, NAN]]]).log()
    mask = torch.tensor([[True, True], [True, False]])
    tensors = {"logits": logits, "ref_logits": ref_logits}
    return call_with_gradients(student.calc_kl_penalty, mask, 0.6, **tensors)


@check("calc_kl_penalty", points=3, seeds=2, expected=kl_penalty_by_distributions)
def ragged_kl_penalties(student, rng):
    """Different lengths, anything beyond the mask: value, gradients; a vocabulary of 20,000"""
    mask, f = ragged_mask(rng), student.calc_kl_penalty
    tensors, two = two_logits(rng, mask), torch.ones(1, 2, dtype=torch.bool)
    found = {f"kl_coef {c}": f(*tensors.values(), mask, c) for c in (0.2, 2.5, 0.0)}
    found["a vocabulary of 20,000"] = f(*two_logits(rng, two, vocab=20_000).values(), two, 0.7)
    return found | in_every_form(
        lambda **x: call_with_gradients(f, mask, 0.7, **x), mask, **tensors
    )


# With logits around 200, what is subtracted is rounded by up to 3e-5.
@check("calc_kl_penalty", expected=kl_penalty_by_distributions, atol=1e-5, tier="hardening")
def hard_kl_penalties(student, rng):
    """Logits around 200 and -200, or 100 times as large; equal policies: 0"""
    mask = ragged_mask(rng)
    same = policy_logits(rng, mask)["logits"]
    draw = [rng.normal(*mask.shape, 5, mean=mean, std=3) for mean in (200, -200)]
    draw[1][..., 0] -= 80  # the reference hardly ever says what the policy may say
    sure = two_logits(rng, mask, vocab=5)
    sure["logits"] = 100 * sure["logits"]  # most probabilities are 0 in float32
    cases = {
        "logits around 200": {"logits": draw[0], "ref_logits": draw[1]},
        "equal": {"logits": same, "ref_logits": same + 1},
        "logits 100 times as large": sure,
    }
    return by_case(
        {
            name: call_with_gradients(student.calc_kl_penalty, mask, 0.5, **tensors)
            for name, tensors in cases.items()
        }
    )


@check("calc_kl_penalty", expected=kl_penalty_by_distributions, tier="hardening")
def kl_penalty_edges(student, rng):
    """One token, no tokens (0), 1103 tokens, 150 rows; the inputs stay as they were"""
    return call_on_edges(rng, student.calc_kl_penalty, two_logits, 0.3)


# --- TransformerWithValueHeadLora ---------------------------------------------------------------


def by_hugging_face_and_a_product(self, input_ids, attention_mask=None):
    """Adapters folded into plain Hugging Face, and a product with its last hidden state."""
    kind = "llama" if "Llama" in type(self.base.original_model).__name__ else "gpt2"
    attention = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    logits, hidden = trainers.run_hugging_face(self, kind, input_ids, attention)
    return logits, hidden @ self.value_head.weight[0] + self.value_head.bias


@check(
    "TransformerWithValueHeadLora.forward_with_value_head",
    public=True,
    points=3,
    expected=by_hugging_face_and_a_product,
    **IN_FLOAT32,
)
def logits_values_and_gradients(student, rng):
    """A GPT-2 and a Llama, rows padded left or right: logits, values and gradients"""
    samples = make_samples(rng, rows=4)
    ids, attention = samples.input_ids, samples.attention_mask
    special = [models.SPECIAL[f"{name}_token_id"] for name in ("pad", "eos")]
    ids[:, -3:-1] = torch.tensor(special)  # in the completion: tokens like any other
    attention[0, -2:] = 0  # the other rows are padded on the left
    real, weights, found = attention.bool(), rng.normal(*ids.shape), {}
    for kind in ("gpt2", "llama"):
        model = make_model(student.TransformerWithValueHeadLora, rng, kind, alpha=8)
        logits, values = model.forward_with_value_head(ids, attention)
        found[kind] = {"the tensor of logits": logits[real], "the tensor of values": values[real]}
        objective = (values * weights)[real].sum() + logits[real].sum()
        found[kind] |= trainers.adapter_gradients(objective, model)
        for name, rows in {"without a mask": ids[1:3], "of one token": ids[:1, :1]}.items():
            logits, values = model.forward_with_value_head(rows)
            found[kind] |= {f"logits {name}": logits, f"values {name}": values}
    return by_case(found) | {"input_ids afterwards": ids, "attention_mask afterwards": attention}


def _head_is_a_part_of_the_model(observed, reference):
    pairs = {
        "forward() should give the logits of forward_with_value_head": ("logits", "by forward"),
        "a saved and loaded model should give the same values": ("values", "values loaded"),
        "merged() should give the same logits": ("logits", "logits merged"),
        "merged() should give the same values": ("values", "values merged"),
        "reference() should leave the adapters off": ("by reference", "by hugging face"),
        "reference() should leave the adapters off in forward_with_value_head too": (
            "logits in reference()",
            "by hugging face",
        ),
    }
    observed = observed | {"by hugging face": reference["by reference"]}
    for message, (a, b) in pairs.items():
        if not torch.allclose(observed[a], observed[b], atol=1e-4, rtol=1e-4):
            return message
    if torch.allclose(observed["logits"], observed["by reference"], atol=1e-2):
        return "the adapters should be on in forward_with_value_head"
    if observed["hooks more after a second call"] > 0:
        return "each call leaves a hook behind, which goes on running in every later forward pass"
    if observed["trainable"] != reference["trainable"]:
        return "trainable_parameters() should hold the adapters and the head"
    return None


def _count_hooks(model) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@check(
    "TransformerWithValueHeadLora.forward_with_value_head",
    points=2,
    holds=_head_is_a_part_of_the_model,
)
def head_and_model(student, rng):
    """The head is trained, saved and loaded with the adapters; merged() and reference() work"""
    sites = ("attn.q", "mlp.out")
    model = make_model(student.TransformerWithValueHeadLora, rng, sites=sites)
    samples = make_samples(rng, rows=3)
    ids, attention = samples.input_ids, samples.attention_mask
    real = attention.bool()
    model.train()
    with torch.no_grad():
        logits, values = model.forward_with_value_head(ids, attention)
        found = {"logits": logits[real], "values": values[real]}
        n_hooks = _count_hooks(model)
        model.forward_with_value_head(ids, attention)
        found["hooks more after a second call"] = _count_hooks(model) - n_hooks
        found["by forward"] = model(ids, attention)[real]
        with model.merged():
            logits, values = model.forward_with_value_head(ids, attention)
        found |= {"logits merged": logits[real], "values merged": values[real]}
        with model.reference():
            found["by reference"] = model(ids, attention)[real]
            found["logits in reference()"] = model.forward_with_value_head(ids, attention)[0][real]
        with TemporaryDirectory() as folder:
            path = Path(folder) / "adapter.safetensors"
            model.save_adapter(path)
            other = student.TransformerWithValueHeadLora.from_pretrained(
                models.get_checkpoint("shallow"),
                rank=RANK,
                device="cpu",
                dtype=rng.dtype,
                sites=sites,
            )
            other.load_adapter(path)
        found["values loaded"] = other.forward_with_value_head(ids, attention)[1][real]
    sizes = sorted(parameter.numel() for parameter in model.trainable_parameters())
    return found | {"trainable": sizes}


@check("TransformerWithValueHeadLora.forward_with_value_head", tier="hardening", **IN_FLOAT32)
def values_of_a_bfloat16_base(student, rng):
    """On a base in bfloat16: the same values as in float32, up to rounding"""
    ids, values = rng.integers(3, 512, 2, 6), {}
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(student.TransformerWithValueHeadLora, rng, "llama", dtype=dtype)
        values[dtype] = model.forward_with_value_head(ids)[1].float()
    off = (values[torch.bfloat16] - values[torch.float32]).abs().max()
    is_near = bool(off < 0.15)  # they differ by 0.02
    return {"the values": values[torch.float32], "whether those in bfloat16 are near": is_near}


# --- get_optimizer_and_scheduler ----------------------------------------------------------------


def _make_args(student, **options):
    defaults = {
        "batch_size": 6,
        "num_minibatches": 1,
        "gen_len": 8,  # more than the completions of make_samples have
        "prompts": list(trainers.PROMPTS),
    }
    return student.RLHFArgs(**(defaults | options))


def _lr_of(optimizer, parameter):
    groups = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    return [group["lr"] for group in groups]


def _is_head(parameter):
    return RANK not in parameter.shape


def _schedule_by_hand(warmup_steps, total_phases, final_scale):
    """The factor at each step, from the two sentences of its definition."""
    n_left = max(total_phases - warmup_steps, 1)
    rising = [(k + 1) / warmup_steps for k in range(warmup_steps)]
    return rising + [1 - (1 - final_scale) * i / n_left for i in range(n_left + 1)]


# warmup_steps, total_phases, final_scale
SCHEDULES = [(3, 7, 0.1), (0, 4, 0.25), (5, 6, 0.5), (1, 3, 0.0), (3, 3, 0.5), (5, 3, 0.5)]


def _adam_by_hand(args, model):
    """AdamW without weight decay, uphill, from the formulas of its paper."""
    parts = model.trainable_parts()
    lrs = {"adapters": args.base_lr, "value_head": args.head_lr}
    groups = [{"params": part, "lr": 0.0, "full": lrs[name]} for name, part in parts.items()]
    state = {p: (torch.zeros_like(p), torch.zeros_like(p)) for g in groups for p in g["params"]}
    factors = _schedule_by_hand(args.warmup_steps, args.total_phases, args.final_scale)
    clock = SimpleNamespace(adam=0, phase=0)

    def set_lr():
        for group in groups:
            group["lr"] = group["full"] * factors[clock.phase]

    def step_adam():
        clock.adam += 1
        for group in groups:
            for p in (p for p in group["params"] if p.grad is not None):
                m = 0.9 * state[p][0] + 0.1 * p.grad
                v = 0.999 * state[p][1] + 0.001 * p.grad**2
                state[p] = (m, v)
                m_hat, v_hat = m / (1 - 0.9**clock.adam), v / (1 - 0.999**clock.adam)
                p.data += group["lr"] * m_hat / (v_hat.sqrt() + 1e-5)

    def step_schedule():
        clock.phase = min(clock.phase + 1, len(factors) - 1)
        set_lr()

    set_lr()
    return SimpleNamespace(param_groups=groups, step=step_adam), SimpleNamespace(step=step_schedule)


@check("get_optimizer_and_scheduler", public=True, points=2, expected=_adam_by_hand)
def learning_rates(student, rng):
    """The learning rate of adapters and head at every phase, whether warm-up is 0, short or long"""
    found, model = {}, make_model(student.TransformerWithValueHeadLora, rng)
    parameters = list(model.trainable_parameters())
    adapter, head = (next(p for p in parameters if _is_head(p) == part) for part in (False, True))
    for warmup_steps, total_phases, final_scale in SCHEDULES:
        base_lr, head_lr = rng.uniform(2, low=1e-3).tolist()
        args = _make_args(
            student,
            warmup_steps=warmup_steps,
            total_phases=total_phases,
            final_scale=final_scale,
            base_lr=base_lr,
            head_lr=head_lr,
        )
        optimizer, scheduler = student.get_optimizer_and_scheduler(args, model)
        rates = []
        for phase in range(total_phases + 1):
            if phase > 0:
                optimizer.step()
                scheduler.step()
            if phase < total_phases or warmup_steps < total_phases:
                rates.append(rng.tensor([_lr_of(optimizer, p) for p in (adapter, head)]))
        name = f"warmup_steps {warmup_steps}, total_phases {total_phases}"
        columns = torch.stack(rates).unbind(1)
        for part, column in zip(("adapters", "value head"), columns, strict=True):
            found[f"the learning rate of the {part}, phase by phase ({name}),"] = column
    return found


@check("get_optimizer_and_scheduler", public=True, points=2, expected=_adam_by_hand)
def steps_of_adam(student, rng):
    """Three steps uphill with AdamW: eps 1e-5 and tiny gradients, no weight decay, both parts"""
    model = make_model(student.TransformerWithValueHeadLora, rng)
    args = _make_args(student, warmup_steps=0, base_lr=1.0, head_lr=0.5)  # large beside rounding
    optimizer, _ = student.get_optimizer_and_scheduler(args, model)
    parameters = list(model.trainable_parameters())
    for _ in range(3):
        trainers.set_gradients(parameters, rng)
        optimizer.step()
    after = trainers.canonical(parameters)
    return {f"{name} after three steps": x for name, x in after.items()}


@check("get_optimizer_and_scheduler", public=True)
def what_is_trained(student, rng):
    """One group for each part, frozen weights in none of them; also for a model without a head"""
    found = {}
    for model_class, kind in (
        (student.TransformerWithValueHeadLora, "shallow"),
        (TransformerWithLora, "gpt2"),  # of two blocks
    ):
        model, whose = make_model(model_class, rng, kind), f"for {model_class.__name__}"
        optimizer, _ = student.get_optimizer_and_scheduler(_make_args(student), model)
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        trained = {id(p) for p in model.trainable_parameters()}
        n_frozen = sum(id(p) not in trained for p in grouped)
        found[f"the number of frozen weights in the optimizer {whose}"] = n_frozen
        sizes = sorted(p.numel() for p in grouped)
        found[f"the list of the sizes of what is in the optimizer {whose}"] = sizes
        adapters = trainers.canonical([p for p in grouped if not _is_head(p)])
        found |= {f"{name} in the optimizer {whose}": x for name, x in adapters.items()}
        found[f"the number of groups {whose}"] = len(optimizer.param_groups)
    return found


# --- ReplayMemory -------------------------------------------------------------------------------


# Rows, the size of their groups, minibatches, epochs.
MEMORIES = {
    "24 rows": (24, 1, 4, 3),
    "9 rows": (9, 1, 4, 2),
    "24 groups of 4": (96, 4, 2, 2),
    "3 groups of 4": (12, 4, 2, 2),
}


def _numbered_fields(rng, rows):
    """Every field of a row holds the row's number, in the dtype and shape of that field."""
    numbers = torch.arange(rows)
    shifted = (numbers + rng.integer(100, 1000))[:, None]  # unpredictable
    return {
        "input_ids": shifted.repeat(1, 9),
        "attention_mask": shifted.repeat(1, 9),
        "mask": (numbers[:, None] >> torch.arange(7)) % 2 == 1,
        "logprobs": shifted.to(rng.dtype).repeat(1, 7),
        "advantages": shifted.to(rng.dtype).repeat(1, 7),
        "returns": shifted.to(rng.dtype).repeat(1, 7),
    }


def _decode_rows(minibatch, fields):
    """[row field] what each field says of a row, which is its number and that of the first row;
    the first and the last column each."""
    first = fields["input_ids"][0, 0]
    found = [(minibatch.mask * 2 ** torch.arange(7)).sum(-1) + first]
    for name in fields:
        if name != "mask":
            x = getattr(minibatch, name).long()
            found += [x[:, 0], x[:, -1]]
    return torch.stack(found, dim=1)


def _every_row_once_an_epoch(observed, reference):
    for name, (n_rows, size, _, n_epochs) in MEMORIES.items():
        rows, places = observed[name]["rows"], observed[name]["the minibatch of each"]
        numbers = rows[:, 0] - reference[name]["rows"].min()
        if not torch.equal(rows, rows[:, :1].expand_as(rows)):
            return f"{name}: all fields should be shuffled the same way, which these are not"
        orders = numbers.reshape(n_epochs, n_rows)
        if not torch.equal(orders.sort().values, torch.arange(n_rows).expand_as(orders)):
            return f"{name}: every row should come exactly once per epoch"
        n_minibatches = int(places.max()) + 1
        if n_minibatches != reference[name]["the minibatch of each"].max() + 1:
            return f"{name}: num_minibatches should be how many there are in an epoch"
        minibatches = [numbers[places == i].tolist() for i in range(n_minibatches)]
        if any(len(m) != size * len({row // size for row in m}) for m in minibatches):
            return f"{name}: group_size consecutive rows should be in one minibatch"
        if n_rows < 24:
            continue
        if any((order // size).diff().ge(0).all() for order in orders):
            return f"{name}: they should come in a random order"
        n = n_minibatches // n_epochs
        epochs = [set(map(frozenset, minibatches[i * n : (i + 1) * n])) for i in range(n_epochs)]
        if any(a == b for a, b in itertools.combinations(epochs, 2)):
            return f"{name}: each epoch should mix them anew, but they share a minibatch again"
    return None


@check("ReplayMemory", public=True, points=5, holds=_every_row_once_an_epoch)
def rows_and_groups(student, rng):
    """24 rows, 9 of them in 4 minibatches, groups of 4: each row once per epoch, whole groups"""
    found = {}
    for name, (n_rows, size, n_minibatches, n_epochs) in MEMORIES.items():
        fields = _numbered_fields(rng, n_rows)
        counts = {"num_minibatches": n_minibatches, "batches_per_learning_phase": n_epochs}
        memory = student.ReplayMemory(**counts, group_size=size, **fields)
        rows = [_decode_rows(minibatch, fields) for minibatch in memory.get_minibatches()]
        places = [torch.full((len(part),), i) for i, part in enumerate(rows)]
        found[name] = {"rows": torch.cat(rows), "the minibatch of each": torch.cat(places)}
    return found


@check("ReplayMemory", public=True, tier="hardening")
def fields_and_dtypes(student, rng):
    """One minibatch of one row and of all rows; the fields as given, None where one is"""
    fields = _numbered_fields(rng, 6)
    one = student.ReplayMemory(**{name: x[3:4] for name, x in fields.items()})
    memory = student.ReplayMemory(ref_logprobs=None, **fields)
    (whole,) = memory.get_minibatches()
    order = whole.returns[:, 0].argsort()
    found = {f"{name} of the memory": getattr(memory, name) for name in fields}
    found |= {f"{name} of one row": getattr(one.get_minibatches()[0], name) for name in fields}
    found |= {f"{name} of all rows": getattr(whole, name)[order] for name in fields}
    return found | {
        "ref_logprobs of the memory": memory.ref_logprobs,
        "ref_logprobs of all rows": whole.ref_logprobs,
    }


@check("ReplayMemory", tier="hardening")
def rows_that_do_not_fit(student, rng):
    """A field with one row fewer or more than the others; a group_size that doesn't divide them"""
    rows, name = rng.integer(5, 9), choose(rng, ("logprobs", "advantages", "returns"))
    names = ("input_ids", "attention_mask", "mask", "logprobs", "advantages", "returns")
    fields = {other: rng.normal(rows, 2) for other in names if other != name}

    def use(**arguments):
        return student.ReplayMemory(**arguments).get_minibatches()

    fitting = {name: rng.normal(rows, 2)}
    (whole,) = student.ReplayMemory(**fields, **fitting).get_minibatches()
    return {
        "a row less": error_of(name, use, **fields, **{name: rng.normal(rows - 1, 2)}),
        "a row more": error_of(name, use, **fields, **{name: rng.normal(rows + 1, 2)}),
        "a group_size that does not divide": error_of(
            "group_size", use, group_size=rows - 1, **fields, **fitting
        ),
        "the sum of what fits": whole.input_ids.sum(),
    }


# --- make_replay_memory -------------------------------------------------------------------------

MEMORY_FIELDS = (
    "input_ids",
    "attention_mask",
    "mask",
    "logprobs",
    "ref_logprobs",
    "values",
    "advantages",
    "returns",
)


def _get_counts(memory) -> list[int]:
    """What a memory was told; what its `get_minibatches` makes of it is another exercise."""
    names = ("num_minibatches", "batches_per_learning_phase")
    if all(hasattr(memory, name) for name in names):
        return [getattr(memory, name) for name in names]
    sizes = [len(minibatch.input_ids) for minibatch in memory.get_minibatches()]
    n_epochs = max(sum(sizes) // len(memory.input_ids), 1)
    return [len(sizes) // n_epochs, n_epochs]


def _make_memory(student, rng, with_reference=True, with_gradients=False, mean=6.0, **options):
    args = _make_args(student, **options)
    samples = make_samples(rng)
    mask = samples.completion_mask
    drawn = [beyond(rng.normal(*mask.shape, mean=-1), mask) for _ in range(3)]
    scores = rng.normal(6, mean=mean, std=2.0)
    if with_gradients:
        scores, *drawn = (1 * leaf(x) for x in (scores, *drawn))  # no leaves, as of a forward
    if not with_reference:
        drawn[1] = None
    before = trainers.copy_arguments(args)
    memory = student.make_replay_memory(args, samples, scores, *drawn)
    fields = {name: getattr(memory, name) for name in MEMORY_FIELDS}
    found = {
        name: inside(x, mask) if x is not None and x.shape == mask.shape else x
        for name, x in fields.items()
        if name != "ref_logprobs" or with_reference
    }
    found |= {
        f"the requires_grad of {name} in the memory": x is not None and x.requires_grad
        for name, x in fields.items()
    }
    return found | {
        "num_minibatches and batches_per_learning_phase of the memory": _get_counts(memory),
        "whether there are ref_logprobs": fields["ref_logprobs"] is not None,
        "the list of the arguments that changed": trainers.list_changed(args, before),
        "scores afterwards": scores,
        "values afterwards": inside(drawn[2], mask),
    }


@check("make_replay_memory", public=True, points=3, seeds=2, expected=memory_by_loops)
def memory_of_a_rollout(student, rng):
    """Normalised rewards, gamma 0.9, lambda 0.8, rows empty, ragged and of full length"""
    return _make_memory(
        student,
        rng,
        gen_len=5,
        gamma=0.9,
        lam=0.8,
        kl_coef=0.5,
        num_minibatches=2,
        batches_per_learning_phase=3,
    )


@check("make_replay_memory", public=True, points=3, expected=memory_by_loops)
def memory_with_kl_in_the_reward(student, rng):
    """kl_in "reward": every token pays for its k1, after the score is normalised"""
    options = {"kl_in": "reward", "gamma": 0.95, "lam": 0.7}
    cases = {"normalised": {"kl_coef": 0.5}, "raw": {"kl_coef": 2.5, "normalize_reward": False}}
    return by_case(
        {name: _make_memory(student, rng, **options, **case) for name, case in cases.items()}
    )


@check("make_replay_memory", public=True, expected=memory_by_loops)
def memory_of_raw_rewards(student, rng):
    """normalize_reward off, and no reference because kl_coef is 0, whatever kl_in is; lambda 0"""
    options = {"with_reference": False, "normalize_reward": False, "kl_coef": 0.0, "mean": 12.0}
    # gen_len 5: as many tokens as the longest has.
    cases = {
        'kl_in "loss"': {"kl_in": "loss"},
        'kl_in "reward", lambda 0': {"kl_in": "reward", "gamma": 0.9, "lam": 0.0, "gen_len": 5},
    }
    return by_case(
        {name: _make_memory(student, rng, **options, **case) for name, case in cases.items()}
    )


@check("make_replay_memory", public=True, expected=memory_by_loops)
def memory_with_default_gamma(student, rng):
    """Default gamma and lambda, no KL in the reward; what is stored is detached"""
    return _make_memory(student, rng, kl_in="loss", kl_coef=2.0, with_gradients=True)


# --- RLHFTrainer: rollouts ----------------------------------------------------------------------


def _roll_out(student, rng, **options):
    """A second rollout, and everything that says where it came from; what the first one sampled."""
    reward_fn = trainers.RecordingReward()
    args = _make_args(student, **(ROLLOUT | {"reward_fn": reward_fn} | options))
    model = make_model(student.TransformerWithValueHeadLora, rng, "ending")
    trainer = student.RLHFTrainer(args, model)
    trainers.roll_out_before(trainer, rng)  # of which nothing may be left
    found = {"texts of the first rollout": reward_fn.samples}
    found["prompts of the first rollout"] = reward_fn.prompts
    reward_fn.start()
    memory = trainer.rollout_phase()
    fields = {name: getattr(memory, name) for name in MEMORY_FIELDS}
    if args.kl_in == "loss":
        fields.pop("ref_logprobs")  # nothing needs them
    tensors = {name: x for name, x in vars(memory).items() if isinstance(x, torch.Tensor)}
    found["logits"] = [name for name, x in tensors.items() if x.shape[-1:] == (512,)]
    found |= {"texts": reward_fn.samples, "prompts": reward_fn.prompts, "seed": rng.seed}
    return found | trainers.describe_rollout(fields, args.gen_len)


ROLLOUT = {"batch_size": 90, "num_minibatches": 2, "gen_len": 5, "temperature": 0.5, "kl_coef": 0.3}


def _is_a_rollout(**options):
    """A predicate that rebuilds the memory from the ids that were sampled."""

    def holds(observed, reference):
        args = ch2_ppo.RLHFArgs(**(ROLLOUT | {"prompts": trainers.PROMPTS} | options))
        rebuilt = trainers.rebuild_rollout(
            ch2_ppo.TransformerWithValueHeadLora, observed, reference["seed"], args
        )
        wrong = trainers.find_wrong_sample(observed, rebuilt, args)
        if wrong is not None:
            return wrong
        if observed["logits"]:
            return f"a memory should hold no logits, but holds {observed['logits']}"
        if observed["prompts"][::2] == observed["prompts"][1::2]:
            return "each row should have a prompt of its own; here each comes twice in a row"
        others = observed["prompts of the first rollout"]
        if others == observed["prompts"]:
            return "prompts should be drawn anew for each rollout; here a second one has the same"
        # By chance: 8 * (7/8)^180 = 3e-10, and 2e-4 of 80 rows.
        if {*observed["prompts"], *others} != set(args.prompts):
            return "some of args.prompts are never drawn"
        pairs = zip(observed["texts"], observed["prompts"], strict=True)
        memory = memory_by_loops(
            args,
            rebuilt.samples,
            torch.tensor([trainers.score_text(*pair) for pair in pairs]),
            rebuilt.logprobs,
            rebuilt.ref_logprobs,
            rebuilt.values,
        )
        names = ("logprobs", "values", "returns", "advantages")
        names += ("ref_logprobs",) if args.kl_in == "reward" else ()
        for name in names:
            if not torch.allclose(
                observed[name], inside(getattr(memory, name), observed["mask"]), atol=2e-3
            ):
                return f"{name} of the memory are wrong"
        return None

    return holds


@check("RLHFTrainer.rollout_phase", points=4, holds=_is_a_rollout())
def rollout(student, rng):
    """A second rollout: samples of the adapted policy at temperature 0.5, the memory's fields"""
    return _roll_out(student, rng)


OTHER_ROLLOUT = {
    "batch_size": 40,
    "kl_in": "reward",
    "normalize_reward": False,
    "top_k": 5,
    "temperature": 1.3,
    "gamma": 0.9,
    "lam": 0.7,
    "prepend_bos": False,
}


@check("RLHFTrainer.rollout_phase", points=3, holds=_is_a_rollout(**OTHER_ROLLOUT))
def rollout_with_other_arguments(student, rng):
    """kl_in "reward", raw rewards, top_k 5, gamma 0.9, no bos: every argument; a second rollout"""
    return _roll_out(student, rng, **OTHER_ROLLOUT)


@check("RLHFTrainer.rollout_phase", public=True, holds=trainers.find_wrong_ratio, beside=True)
def first_ratio_is_one(student, rng):
    """In bfloat16, where the merged model's log-probs differ visibly; what args.seed decides"""
    make_args = functools.partial(_make_args, student, batch_size=8, gen_len=3)
    model = make_model(student.TransformerWithValueHeadLora, rng, dtype=torch.bfloat16)
    sampled = trainers.sample_again(student.RLHFTrainer, make_args, model)
    return trainers.describe_first_ratio(sampled, model, gen_len=3)


def _count_letters(samples) -> Tensor:
    return torch.tensor([float(len(text)) for text in samples])


@check("RLHFTrainer.rollout_phase", public=True, float64=False)
def the_model_that_is_built(student, rng):
    """The trainer's own model: rank, alpha, sites; what is stored of it and of its reference"""
    args = _make_args(
        student,
        batch_size=1,
        reward_fn=_count_letters,
        prompts=None,
        prefix="I thought",
        base_model=models.get_checkpoint("shallow"),
        lora_rank=RANK,
        lora_alpha=5,
        lora_sites=("attn.q", "attn.o"),
        kl_in="reward",
        temperature=0.5,
    )
    trainer = student.RLHFTrainer(args)
    model, drawn = trainers.fill(trainer.model, rng), rng.integers(3, 512, 2, 5)
    first, second = trainer.rollout_phase(), trainer.rollout_phase()
    ids, attention = first.input_ids, first.attention_mask
    n_prompt = ids.shape[1] - first.mask.shape[1]
    with torch.no_grad():
        found = dict(zip(("logits", "values"), model.forward_with_value_head(drawn), strict=True))
        logits, values = model.forward_with_value_head(ids, attention)
        with model.reference():
            ref_logits = model(ids, attention)
    found["prompts of a rollout, which are args.prefix,"] = ids[:, :n_prompt]
    is_same = ids.tolist() == second.input_ids.tolist()
    found["whether a rollout with the same weights is the same"] = is_same
    right = {
        "logprobs": trainers.score_rows(logits, ids, n_prompt, args.temperature),
        "ref_logprobs": trainers.score_rows(ref_logits, ids, n_prompt, args.temperature),
        "values": values[:, n_prompt - 1 : -1],
    }
    return found | {
        f"whether {name} of the memory are the model's": _is_near(getattr(first, name), x, first)
        for name, x in right.items()
    }


def _is_near(x, other, memory) -> bool:
    """Whether a field of a memory is this where it counts."""
    is_there = isinstance(x, Tensor) and x.shape == other.shape
    return is_there and bool(((x - other)[memory.mask].abs() < 1e-3).all())


# --- RLHFTrainer: the objective -----------------------------------------------------------------

OBJECTIVE = {
    "clip_coef": 0.6,  # no number twice: one could stand for another
    "vf_coef": 0.4,
    "ent_coef": 0.3,
    "kl_coef": 0.8,
    "temperature": 0.7,
    "lora_rank": RANK,
}


def _make_fields(rng, samples, temperature):
    """A memory whose old log-probs are far enough from the policy's that both clips act."""
    mask = samples.completion_mask
    drawn = {
        "logprobs": trainers.draw_logprobs(rng, samples, temperature),
        "ref_logprobs": trainers.draw_logprobs(rng, samples, temperature),
        "values": rng.normal(*mask.shape),
        "advantages": rng.normal(*mask.shape),
        "returns": rng.normal(*mask.shape),
    }
    ids = {"input_ids": samples.input_ids, "attention_mask": samples.attention_mask, "mask": mask}
    return ids | {name: beyond(x, mask) for name, x in drawn.items()}


def objective_by_definition(self, minibatch):
    """Plain Hugging Face for the logits, loops over true positions for the four terms."""
    args, mask, ids = self.args, minibatch.mask, minibatch.input_ids
    n_prompt = ids.shape[1] - mask.shape[1]
    run = trainers.run_hugging_face
    logits, hidden = run(self.model, "shallow", ids, minibatch.attention_mask)
    ref_logits, _ = run(self.model, "shallow", ids, minibatch.attention_mask, adapters=False)
    all_values = hidden @ self.model.value_head.weight[0] + self.model.value_head.bias
    terms, errors = [], []
    above = args.clip_coef if args.clip_coef_high is None else args.clip_coef_high
    for row, t in mask.nonzero().tolist():
        at = n_prompt + t - 1
        policy = Categorical(logits=logits[row, at] / args.temperature)
        reference = Categorical(logits=ref_logits[row, at].detach() / args.temperature)
        ratio = (policy.log_prob(ids[row, at + 1]) - minibatch.logprobs[row, t]).exp()
        advantage = minibatch.advantages[row, t]
        low, high = 1 - args.clip_coef, 1 + above
        gain = ratio * advantage
        if (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low):
            gain = ratio.detach().clamp(low, high) * advantage
        value, old = all_values[row, at], minibatch.values[row, t]
        error = (value - minibatch.returns[row, t]) ** 2
        if args.vf_clip_coef is not None:
            near = torch.clamp(value, old - args.vf_clip_coef, old + args.vf_clip_coef)
            error = torch.maximum(error, (near - minibatch.returns[row, t]) ** 2)
        errors.append(error.item())
        term = gain - args.vf_coef / 2 * error + args.ent_coef * policy.entropy()
        if args.kl_in == "loss":
            term = term - args.kl_coef * kl_divergence(policy, reference)
        terms.append(term)
    self.metrics["value_loss"].append(args.vf_coef / 2 * sum(errors) / len(errors))
    return torch.stack(terms).mean()


def _count_logits(kept) -> int:
    """Tensors of [.. vocab] in a trainer's attributes, but in its model and optimizer."""
    if isinstance(kept, Tensor):
        return int(kept.ndim > 1 and kept.shape[-1] == models.SPECIAL["vocab_size"])
    if isinstance(kept, dict | list | tuple):
        return sum(map(_count_logits, kept.values() if isinstance(kept, dict) else kept))
    return 0


def _objective(student, rng, with_reference=True, rows=(6,), model=None, **options):
    """The objective and its gradient, for one minibatch after the other, of so many rows each.

    A second one is that of a later phase, with large advantages and returns.
    """
    args = _make_args(student, **(OBJECTIVE | options))
    model = model or make_model(student.TransformerWithValueHeadLora, rng, alpha=8)
    trainer = student.RLHFTrainer(args, model)
    model.train()
    found, n_kept = {}, []
    for i, n_rows in enumerate(rows):
        trainer.phase = i * args.total_phases // 2  # no coefficient depends on it
        samples = make_samples(rng, n_rows, prompt_len=4 + i)  # the next prompts are longer
        fields = _make_fields(rng, samples, args.temperature)
        if not with_reference:
            fields["ref_logprobs"] = None
        if i > 0:  # as where one of many completions is rewarded, and others are longer
            fields["mask"][:, -1] = False
            fields["attention_mask"][:, -1] = 0
            fields["advantages"][:, 0] += choose(rng, (-20.0, 20.0))
            fields["returns"][:, 0] += choose(rng, (-12.0, 12.0))
        minibatch = trainers.as_memory(**fields)  # whatever the ReplayMemory is
        objective = trainer.compute_rlhf_objective(minibatch)
        n_kept.append(_count_logits(vars(trainer)))
        parts = {"the objective": objective} | trainers.adapter_gradients(objective, model)
        parts["value_loss in the metrics"] = trainer.metrics["value_loss"][i:]
        found |= by_case({f"minibatch {i + 1}": parts}) if len(rows) > 1 else parts
    piled_up = max(n_kept[-1] - n_kept[0], 0)
    return found | {"the number of logits that pile up in the trainer": piled_up}


OBJECTIVE_CHECK = {
    "expected": objective_by_definition,
    "float64": False,
    "rtol": 1e-3,
    "atol": 3e-4,
}


@check("RLHFTrainer.compute_rlhf_objective", public=True, points=3, seeds=2, **OBJECTIVE_CHECK)
def objective_and_gradient(student, rng):
    """Surrogate - value loss + entropy bonus - exact KL at 0.7; one row; large A; no logits kept"""
    return _objective(student, rng, rows=(6, 1))


@check("RLHFTrainer.compute_rlhf_objective", public=True, points=2, **OBJECTIVE_CHECK)
def objective_with_kl_in_the_reward(student, rng):
    """kl_in "reward": no KL term; vf_coef and clip_coef 0; clip_coef_high and vf_clip_coef set"""
    counts = {"batch_size": 12, "num_minibatches": 2, "batches_per_learning_phase": 1}
    cases = {
        'kl_in "reward"': {"kl_in": "reward", "top_k": 5} | counts,
        "vf_coef 0, clip_coef 0": {"vf_coef": 0.0, "clip_coef": 0.0},
        "clip_coef_high and vf_clip_coef": {"clip_coef_high": 0.9, "vf_clip_coef": 0.2},
    }
    model = make_model(student.TransformerWithValueHeadLora, rng, alpha=8)
    return by_case(
        {
            name: _objective(student, rng, model=model, ent_coef=0.0, **case)
            for name, case in cases.items()
        }
    )


@check("RLHFTrainer.compute_rlhf_objective", public=True, **OBJECTIVE_CHECK)
def objective_by_default(student, rng):
    """The default coefficients, temperature 1; no reference because kl_coef is 0"""
    defaults = {"clip_coef": 0.2, "vf_coef": 0.15, "ent_coef": 0.001, "temperature": 1.0}
    return _objective(student, rng, with_reference=False, kl_coef=0.0, **defaults)


# --- RLHFTrainer: learning ----------------------------------------------------------------------


def learning_by_hand(self, memory):
    """Clip the gradient's norm, AdamW uphill from its formulas, one schedule step a phase."""
    if not hasattr(self, "by_hand"):
        self.by_hand = _adam_by_hand(self.args, self.model)
    adam, schedule = self.by_hand
    for minibatch in memory.get_minibatches():
        _step_by_hand(self, adam, objective_by_definition(self, minibatch))
    schedule.step()


def _step_by_hand(trainer, adam, objective: Tensor) -> None:
    parameters = list(trainer.model.trainable_parameters())
    gradients = torch.autograd.grad(objective, parameters)
    norm = sum((g**2).sum() for g in gradients) ** 0.5
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g * min(1.0, float(trainer.args.max_grad_norm / norm))
    adam.step()


LEARNED = {"float64": False, "rtol": 1e-3, "atol": 2e-5}
LEARNING = {
    "vf_coef": 1e-3,
    "ent_coef": 1e-3,
    "kl_coef": 1e-3,
    "base_lr": 0.01,
    "head_lr": 0.03,
    "warmup_steps": 4,
}


def _learn(student, rng, scales, epochs, minibatches, **options):
    """Learning phases on memories whose advantages have the given scales, one after the other. Each
    is its longest row six times, so that it does not matter how rows are shuffled."""
    counts = {"num_minibatches": minibatches, "batches_per_learning_phase": epochs}
    args = _make_args(student, **(OBJECTIVE | LEARNING | counts | options))
    model = make_model(student.TransformerWithValueHeadLora, rng, alpha=8)
    trainer = student.RLHFTrainer(args, model)
    found, before = {}, trainers.copy_arguments(args)
    for phase, scale in enumerate(scales, start=1):
        fields = _make_fields(rng, make_samples(rng), args.temperature)
        fields["advantages"] = fields["advantages"] * scale
        longest = int(fields["mask"].sum(-1).argmax())
        fields = {name: x[[longest] * 6] for name, x in fields.items()}
        trainer.learning_phase(student.ReplayMemory(**counts, **fields))
        weights = trainers.canonical(list(model.trainable_parameters()))
        found |= {f"{name} after phase {phase}": x for name, x in weights.items()}
    return found | {"the list of the arguments that changed": trainers.list_changed(args, before)}


class _Ascent(torch.optim.Optimizer):
    """Plain gradient ascent, in place of what `get_optimizer_and_scheduler` makes."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter += group["lr"] * parameter.grad


def _make_memory_without_shuffling(fields, n_minibatches):
    """A memory of no student's class, whose minibatches are its rows in order."""
    chunks = {name: x.chunk(n_minibatches) for name, x in fields.items()}
    minibatches = [
        trainers.as_memory(**dict(zip(chunks, parts, strict=True)))
        for parts in zip(*chunks.values(), strict=True)
    ]
    counts = {"num_minibatches": n_minibatches, "batches_per_learning_phase": 1}

    def get_minibatches(*args, **kwargs):
        return minibatches

    return trainers.as_memory(get_minibatches=get_minibatches, **counts, **fields)


def ascent_by_hand(self, memory):
    """One clipped step uphill for each minibatch, then the schedule's."""
    for minibatch in memory.get_minibatches():
        parameters = list(self.model.trainable_parameters())
        found = torch.autograd.grad(self.compute_rlhf_objective(minibatch), parameters)
        norm = sum((g**2).sum() for g in found) ** 0.5
        rate = self.optimizer.param_groups[0]["lr"] * min(
            1.0, float(self.args.max_grad_norm / norm)
        )
        for parameter, g in zip(parameters, found, strict=True):
            parameter.data += rate * g
    self.scheduler.step()


@check("RLHFTrainer.learning_phase", public=True, points=3, expected=ascent_by_hand, **LEARNED)
def three_phases(student, rng):
    """Three phases of three minibatches, uphill: a step for each, clipped or not; falling rates

    The objective, the optimizer and the memory are the check's own.
    """
    args = _make_args(student, num_minibatches=3, max_grad_norm=3.0)
    trainer = student.RLHFTrainer(args, make_model(student.TransformerWithValueHeadLora, rng))

    def compute_rlhf_objective(minibatch):
        target = minibatch.advantages[minibatch.mask].mean()
        return sum((target * p - p**2 / 2).sum() for p in trainer.model.trainable_parameters())

    trainer.compute_rlhf_objective = compute_rlhf_objective
    groups = [{"params": part} for part in trainer.model.trainable_parts().values()]
    trainer.optimizer = _Ascent(groups)
    trainer.scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda k: 1 / (k + 1))
    found = {}
    for phase, scale in enumerate((10.0, 0.0, 0.1), start=1):
        fields = _make_fields(rng, make_samples(rng, empty_row=False), args.temperature)
        fields["advantages"] = fields["advantages"] * scale
        trainer.learning_phase(_make_memory_without_shuffling(fields, 3))
        weights = trainers.canonical(list(trainer.model.trainable_parameters()))
        found |= {f"{name} after phase {phase}": x for name, x in weights.items()}
    return found


def _learn_by_hand_without_values(self, memory):
    """One step of AdamW uphill: the memory is one minibatch."""
    adam, _ = _adam_by_hand(self.args, self.model)
    _step_by_hand(self, adam, self.compute_rlhf_objective(memory))


@check(
    "RLHFTrainer.learning_phase",
    expected=_learn_by_hand_without_values,
    tier="hardening",
    **LEARNED,
)
def without_a_value_head(student, rng):
    """A trainer whose model_class has no value head learns, too"""
    ids = rng.integers(3, 512, 2, 5)

    class Trainer(student.RLHFTrainer):
        model_class = TransformerWithLora

        def compute_rlhf_objective(self, minibatch):
            return self.model(ids).logsumexp(-1).mean()

    args = _make_args(student, base_lr=0.01, warmup_steps=2, max_grad_norm=1e3)
    trainer = Trainer(args, make_model(TransformerWithLora, rng, alpha=8))
    fields = _make_fields(rng, make_samples(rng), args.temperature)
    trainer.learning_phase(student.ReplayMemory(**fields))
    return trainers.canonical(list(trainer.model.trainable_parameters()))


@check("RLHFTrainer.learning_phase", points=2, expected=learning_by_hand, **LEARNED)
def epochs_and_minibatches(student, rng):
    """Twice two epochs of three minibatches; the rates fall"""
    rates = {"base_lr": 2.5e-3, "head_lr": 7.5e-3, "warmup_steps": 0, "total_phases": 3}
    return _learn(
        student,
        rng,
        scales=(0.1, 0.001),
        epochs=2,
        minibatches=3,
        max_grad_norm=0.02,  # clipped at first
        **rates,
    )


# --- RLHFTrainer: all of it ---------------------------------------------------------------------


def _list_rates(trainer) -> list[float]:
    """The learning rates of now; none if the trainer keeps its optimizer in another place."""
    groups = trainer.optimizer.param_groups if hasattr(trainer, "optimizer") else []
    return [float(group["lr"]) for group in groups]


def _is_a_run_that_learns(observed, reference):
    """Phases of 32 completions, one step of the schedule each, and what was learned."""
    phases, asked = observed["rewarded"] / 32, reference["rewarded"] // 32
    if phases != asked:
        return f"{phases:g} phases were run, but total_phases is {asked}"
    rate = observed["mean rate"]
    if rate > 0 and not math.isclose(rate, reference["mean rate"], rel_tol=1e-4):
        return "the learning rates are not those of a schedule that takes one step a phase"
    return trainers.find_no_learning(observed, reference)


@check("RLHFTrainer.train", public=True, float64=False)
def phases_are_counted(student, rng):
    """Three phases that learn nothing: each is counted before run.end_phase() writes its row"""
    args = _make_args(student, total_phases=3, checkpoint_every=2, samples_every=0, name="counted")
    trainer = student.RLHFTrainer(args, make_model(student.TransformerWithValueHeadLora, rng))
    learned = []

    def rollout_phase():
        trainer.metrics["reward"].append(float(trainer.phase))
        return trainer.phase

    trainer.rollout_phase, trainer.learning_phase = rollout_phase, learned.append
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        history = trainer.train()
    return {
        "what is trained": trainers.canonical(list(trainer.model.trainable_parameters())),
        "what rollout_phase gave, as learning_phase got it,": learned,
        "the phase of each row of history": [row["phase"] for row in history],
        "the trainer's phase afterwards": trainer.phase,
    }


@check("RLHFTrainer.train", public=True, slow=True, holds=_is_a_run_that_learns)
def a_short_run_that_learns(student, rng):
    """Nine phases of PPO for full stops: at least half as many again at the end"""
    rewarded, rates = [], []

    def reward_fn(samples):
        rewarded.extend(samples)
        rates.extend(_list_rates(trainer))
        return trainers.count_full_stops(samples)

    args = student.RLHFArgs(
        batch_size=32,
        num_minibatches=2,
        gen_len=10,
        total_phases=9,
        warmup_steps=1,
        base_lr=5e-3,
        kl_coef=0.0,
        reward_fn=reward_fn,
    )
    model = student.TransformerWithValueHeadLora.from_pretrained("embedded", device="cpu")
    sampled = {}
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        trainer = student.RLHFTrainer(args, model)
        for name in ("before", "after"):
            sampled[name] = trainers.sample_ids(model, args.prefix, rng)
            if name == "before":
                trainer.train()
    mean_rate = sum(rates) / max(len(rates), 1)  # 0.0 where none was seen
    return sampled | {"rewarded": len(rewarded), "mean rate": float(mean_rate)}


@check("RLHFTrainer.train", public=True, points=2, slow=True, tier="hardening")
def every_phase_is_run(student, rng):
    """Thirteen phases of equal rewards, each run once on new samples; the last weights are kept"""
    ends, sampled = [], []

    def reward_fn(samples):
        sampled.append(samples)
        return torch.ones(len(samples))

    counts = {"batch_size": 4, "num_minibatches": 1, "gen_len": 2, "total_phases": 13}
    still = {"base_lr": 1e-6, "head_lr": 1e-6}  # the phases differ by what is drawn alone
    args = _make_args(student, reward_fn=reward_fn, **counts, **still)
    trainer = student.RLHFTrainer(args, make_model(student.TransformerWithValueHeadLora, rng))
    start = [p.detach().clone() for p in trainer.model.trainable_parameters()]
    learn = trainer.learning_phase

    def learn_and_look(memory):
        learn(memory)
        ends.append([p.detach().clone() for p in trainer.model.trainable_parameters()])

    trainer.learning_phase = learn_and_look
    trainer.rollout_phase()
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        trainer.train()
        kept = [p.detach().clone() for p in trainer.model.trainable_parameters()]
        n_phases = len(ends)
        attempt(trainer.train)  # no phase is left
    return {
        "what is trained, before": trainers.canonical(start),
        "learning phases": n_phases,
        "learning phases of a second train()": len(ends) - n_phases,
        "whether the weights are the last phase's": all(map(torch.equal, kept, ends[n_phases - 1])),
        "whether they have changed": not all(map(torch.equal, kept, ends[0])),
        "rollouts that repeat the one before": sum(a == b for a, b in itertools.pairwise(sampled)),
    }


@check("RLHFTrainer.train", slow=True, tier="hardening")
def stopped_by_ctrl_c(student, rng):
    """Ctrl-C in the third phase: the weights are those of the two phases before"""
    ends = []

    def reward_fn(samples):
        ends.append([p.detach().clone() for p in trainer.model.trainable_parameters()])
        if len(ends) == 3:
            raise KeyboardInterrupt
        return torch.arange(float(len(samples)))

    counts = {"batch_size": 4, "num_minibatches": 1, "gen_len": 2, "total_phases": 30}
    args = _make_args(student, reward_fn=reward_fn, **counts)
    trainer = student.RLHFTrainer(args, make_model(student.TransformerWithValueHeadLora, rng))
    stopped = contextlib.suppress(KeyboardInterrupt)
    with TemporaryDirectory() as folder, contextlib.chdir(folder), stopped:
        trainer.train()
    kept = list(trainer.model.trainable_parameters())
    return {
        "what is trained, before": trainers.canonical(ends[0]),
        "whether two phases are kept": all(map(torch.equal, kept, ends[2])),
        "whether they have changed the weights": not all(map(torch.equal, ends[0], ends[2])),
    }
