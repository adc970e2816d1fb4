"""Right answers to chapter 4, written differently."""

import torch
import torch.nn.functional as F
from torch.distributions import Categorical

from utils.grading.known_answers import edit, right

KINDS = ("k1", "k2", "k3", "k4")


def _check_kind(kind):
    if kind not in KINDS:
        raise ValueError(f"kind should be one of {KINDS}, but is {kind!r}")


# --- calc_kl_estimate ---------------------------------------------------------------------------


@right("calc_kl_estimate")
def all_at_once(logprobs, ref_logprobs, kind, old_logprobs=None):
    _check_kind(kind)
    x = logprobs - ref_logprobs.clone().detach()
    on_policy = old_logprobs is None
    ratio = torch.exp(logprobs - (logprobs if on_policy else old_logprobs).detach())
    table = {"k1": lambda: x, "k2": lambda: x.pow(2).div(2), "k4": lambda: ratio * x}
    table["k3"] = lambda: x + torch.expm1(x.neg())
    return table[kind]()


# --- calc_exact_kl ------------------------------------------------------------------------------


@right("calc_exact_kl")
def by_kl_div(logits, ref_logits):
    logprobs = F.log_softmax(logits, dim=-1)
    ref_logprobs = F.log_softmax(ref_logits.detach(), dim=-1)
    possible = logits > -torch.inf
    logprobs = torch.where(possible, logprobs, torch.zeros_like(logprobs))
    ref_logprobs = torch.where(possible, ref_logprobs, torch.zeros_like(ref_logprobs))
    per_token = F.kl_div(ref_logprobs, logprobs, reduction="none", log_target=True)
    return torch.where(possible, per_token, torch.zeros_like(per_token)).sum(-1)


@right("calc_exact_kl")
def by_logsumexp(logits, ref_logits):
    possible = logits != -torch.inf
    ref_logits = ref_logits.detach()
    shift = ref_logits.logsumexp(-1) - logits.logsumexp(-1)
    difference = torch.where(possible, logits - ref_logits, 0.0)
    return (logits.softmax(-1) * difference).sum(-1) + shift


# The gradient of the log-ratio averages to sum_v grad p_v = 0.
ONLY_THE_WEIGHTS_DIFFERENTIATED = [
    edit(
        "calc_exact_kl",
        "log_ratio_detached",
        "logprobs.exp() * logratio",
        "logprobs.exp() * logratio.detach()",
    )
]


# --- calc_estimator_stats -----------------------------------------------------------------------


@right("calc_estimator_stats")
def by_weighted_covariance(logits, ref_logits, kind):
    _check_kind(kind)
    policy, reference = Categorical(logits=logits), Categorical(logits=ref_logits)
    tokens = torch.arange(len(logits))
    x = policy.log_prob(tokens) - reference.log_prob(tokens)
    values = {"k1": x, "k2": 0.5 * x * x, "k3": torch.expm1(-x) + x, "k4": x}[kind]
    bias = torch.dot(policy.probs, values - x)
    return bias, torch.cov(values, correction=0, aweights=policy.probs.detach()).sqrt()


# --- calc_expected_gradient ---------------------------------------------------------------------


@right("calc_expected_gradient")
@torch.no_grad()
def by_hand(logits, ref_logits, kind, place, sampler_logits=None):
    _check_kind(kind)
    if place not in ("loss", "reward"):
        raise ValueError(f"place is {place!r}")
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    p, x = logprobs.exp(), logprobs - ref_logprobs
    sampler = p if sampler_logits is None else sampler_logits.softmax(-1)
    ratio = p / sampler
    if place == "loss":
        factor = {"k1": torch.ones_like(x), "k2": x, "k3": -torch.expm1(-x), "k4": ratio * (x + 1)}
    else:
        factor = {"k1": x, "k2": x**2 / 2, "k3": torch.expm1(-x) + x, "k4": ratio * x}
    weights = sampler * factor[kind]
    return weights - weights.sum() * p
