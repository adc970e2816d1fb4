"""Chapter 4 by other means: probabilities in place of logs, the math module, the score."""

import math

import torch
from torch.distributions import Categorical, kl_divergence

from tests.support.inputs import INF, KINDS, PLACES


def estimate_of_probabilities(logprobs, ref_logprobs, kind, old_logprobs=None):
    """Estimate from two probabilities per token, not from the difference of their logs."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind}")
    p, q = logprobs.exp(), ref_logprobs.detach().exp()
    old = (logprobs if old_logprobs is None else old_logprobs).detach().exp()
    return {
        "k1": (p / q).log(),
        "k2": (p / q).log() ** 2 / 2,
        "k3": q / p - 1 - (q / p).log(),
        "k4": p / old * (p / q).log(),
    }[kind]


def estimate_number_by_number(logprobs, ref_logprobs, kind, old_logprobs=None):
    """Estimate with the math module."""
    old_logprobs = logprobs if old_logprobs is None else old_logprobs
    numbers = (x.flatten().tolist() for x in (logprobs, ref_logprobs, old_logprobs))
    found = []
    for log_p, log_q, log_old in zip(*numbers, strict=True):
        x = log_p - log_q
        k3 = math.expm1(-x) + x
        found.append({"k1": x, "k2": x**2 / 2, "k3": k3, "k4": math.exp(log_p - log_old) * x}[kind])
    return torch.tensor(found).reshape(logprobs.shape)


def kl_by_distributions(logits, ref_logits):
    """Return torch.distributions' own, in which a reference without gradient is a constant."""
    return kl_divergence(Categorical(logits=logits), Categorical(logits=ref_logits.detach()))


def kl_of_possible_tokens(logits, ref_logits):
    """Sum row by row, over the tokens that the policy can emit."""
    vocab = logits.shape[-1]
    rows = []
    for row, ref_row in zip(
        logits.reshape(-1, vocab), ref_logits.detach().reshape(-1, vocab), strict=True
    ):
        possible = row > -INF
        p = row[possible].softmax(-1)
        rows.append((p * (p.log() - ref_row.log_softmax(-1)[possible])).sum())
    return torch.stack(rows).reshape(logits.shape[:-1])


def stats_by_loops(logits, ref_logits, kind):
    """Go token by token in plain Python; the variance is a mean over all pairs of tokens."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind}")
    p, q = logits.softmax(-1).tolist(), ref_logits.softmax(-1).tolist()
    values, kl = [], 0.0
    for p_v, q_v in zip(p, q, strict=True):
        x = math.log(p_v) - math.log(q_v)
        values.append({"k1": x, "k2": x * x / 2, "k3": q_v / p_v - 1 + x, "k4": x}[kind])
        kl += p_v * x
    mean = sum(p_v * value for p_v, value in zip(p, values, strict=True))
    variance = sum(
        p_v * p_w * (v - w) ** 2 / 2
        for p_v, v in zip(p, values, strict=True)
        for p_w, w in zip(p, values, strict=True)
    )
    return torch.tensor(mean - kl), torch.tensor(math.sqrt(variance))


def gradient_by_the_score(logits, ref_logits, kind, place, sampler_logits=None):
    """Use no autograd: grad k(v) = k'(l_v) grad log p_v, and grad log p_v = onehot_v - p."""
    if kind not in KINDS:
        raise ValueError(f"kind is {kind}")
    if place not in PLACES:
        raise ValueError(f"place is {place}")
    p, q = logits.detach().softmax(-1), ref_logits.detach().softmax(-1)
    s = p if sampler_logits is None else sampler_logits.detach().softmax(-1)
    x = (p / q).log()
    value = {"k1": x, "k2": x**2 / 2, "k3": q / p - 1 + x, "k4": p / s * x}[kind]
    slope = {"k1": torch.ones_like(x), "k2": x, "k3": 1 - q / p, "k4": p / s * (x + 1)}[kind]
    score = torch.eye(len(p), dtype=p.dtype) - p  # [token vocab]
    return (s * (slope if place == "loss" else value)) @ score
