"""Chapter 9 by other means: roots of polynomials, plain lists, loops over tokens."""

import math
from decimal import Decimal

import torch
from torch.distributions import Categorical


class PlainQueue:
    """A queue that keeps everything it was ever given, and a place in it."""

    def __init__(self, staleness):
        if type(staleness) is not int or staleness < 0:
            raise ValueError(f"staleness is {staleness}")
        self.staleness, self.all, self.versions, self.place = staleness, [], [], 0

    def __len__(self):
        return len(self.all) - self.place

    def _name(self, version):
        if self.versions and version < max(self.versions):
            raise ValueError(f"version is {version}")
        self.versions.append(version)

    def put(self, rollout, version):
        self._name(version)
        self.all.append([rollout, version])

    def take(self, version):
        if self.place + self.staleness >= len(self.all):
            raise ValueError("too few")
        self._name(version)
        rollout, sampled_at = self.all[self.place]
        self.place += 1
        return rollout, version - sampled_at


def find_largest_root(rate: float, delay: int) -> float:
    """The largest |z| with z^(delay + 1) - z^delay + rate = 0, by the companion matrix."""
    companion = torch.zeros(delay + 1, delay + 1, dtype=torch.float64)
    companion[1:, :-1] = torch.eye(delay, dtype=torch.float64)
    companion[0, 0] = 1.0
    companion[0, -1] -= rate
    return float(torch.linalg.eigvals(companion).abs().max())


def stable_rate_by_roots(delay):
    """Bisect for the rate at which the largest root leaves the unit circle."""
    if type(delay) is not int or delay < 0:
        raise ValueError(f"delay is {delay}")
    low, high = 1e-3, 3.0  # is stable, is not
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if find_largest_root(middle, delay) < 1 else (low, middle)
    return low


def _list_rows(logprobs, sampler_logprobs, mask):
    """The pairs of log-probs of each completion."""
    rows = zip(logprobs.tolist(), sampler_logprobs.tolist(), mask.tolist(), strict=True)
    return [[(a, b) for a, b, true in zip(*row, strict=True) if true] for row in rows]


def mismatch_by_loops(logprobs, sampler_logprobs, mask):
    """Exponentiate in decimal numbers, which have room for any product."""
    rows = [row for row in _list_rows(logprobs, sampler_logprobs, mask) if row]
    if not rows:
        return {"k3": 0.0, "max_ratio": 1.0, "effective_share": 1.0}
    weights = []
    for row in rows:
        weights.append(Decimal(1))
        for a, b in row:
            weights[-1] *= (Decimal(a) - Decimal(b)).exp()
    logratios = [a - b for row in rows for a, b in row]
    share = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    return {
        "k3": math.fsum(math.expm1(x) - x for x in logratios) / len(logratios),
        "max_ratio": max(math.exp(x) for x in logratios),
        "effective_share": float(share),
    }


def kept_by_distributions(logits, tokens, temperature=1.0, top_k=None, top_p=None):
    """Row by row, a Categorical over the tokens that a loop has kept."""
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}")
    found = []
    for row, token in zip(logits, tokens.tolist(), strict=True):
        whole = Categorical(logits=row / temperature)
        likeliest = whole.probs.argsort(descending=True).tolist()[:top_k]
        kept, share = [], 0.0
        total = math.fsum(whole.probs[v].item() for v in likeliest)
        for v in likeliest:
            if top_p is None or top_p == 1 or share < top_p:
                kept.append(v)
            share += whole.probs[v].item() / total
        part = Categorical(logits=row[kept] / temperature)
        logprob = row.new_tensor(-torch.inf)
        if token in kept:
            logprob = part.log_prob(torch.tensor(kept.index(token)))
        found.append(torch.stack([logprob, (whole.logits[kept]).logsumexp(0)]))
    logprobs, log_kept_mass = torch.stack(found).T
    return logprobs, log_kept_mass


def weights_by_loops(logprobs, sampler_logprobs, mask, cap=2.0, level="token"):
    if level not in ("token", "sequence"):
        raise ValueError(f"level is {level}")
    if cap is not None and cap <= 0:
        raise ValueError(f"cap is {cap}")
    weights = torch.zeros_like(logprobs)
    for row, pairs in enumerate(_list_rows(logprobs, sampler_logprobs, mask)):
        logratios = [a - b for a, b in pairs]
        if level == "sequence":
            logratios = [math.fsum(logratios)] * len(pairs)
        ratios = [math.exp(min(x, 80.0)) for x in logratios]
        ratios = ratios if cap is None else [min(ratio, cap) for ratio in ratios]
        weights[row, mask[row]] = weights.new_tensor(ratios)
    return weights


def masked_by_loops(logprobs, sampler_logprobs, mask, low=0.5, high=2.0, kind="ratio"):
    if kind not in ("ratio", "probability"):
        raise ValueError(f"kind is {kind}")
    found = mask.clone()
    for row, pairs in enumerate(_list_rows(logprobs, sampler_logprobs, mask)):
        if kind == "ratio":
            least = math.log(low) if low > 0 else -math.inf
            kept = [least <= a - b <= math.log(high) for a, b in pairs]
        else:
            kept = [abs(math.exp(a) - math.exp(b)) <= high for a, b in pairs]
        found[row, mask[row]] = torch.tensor(kept, dtype=torch.bool)
    return found


def objective_by_loops(
    logprobs, sampler_logprobs, advantages, mask, correction="none", clip_coef=0.2, cap=2.0
):
    """Add up token by token; 1 + x - x.item() has the value 1 and the slope of x."""
    if correction not in ("none", "clip", "truncate", "mask"):
        raise ValueError(f"correction is {correction}")
    total = logprobs.new_zeros(())
    for row, advantage in enumerate(advantages.tolist()):
        terms = []
        for t in mask[row].nonzero().flatten().tolist():
            x = logprobs[row, t]
            logratio = x.item() - sampler_logprobs[row, t].item()
            slope = 1 + x - x.item()
            ratio = math.exp(min(logratio, 80.0))
            if correction == "none":
                terms.append(advantage * slope)
            elif correction == "clip":
                is_clipped = ratio > 1 + clip_coef if advantage > 0 else ratio < 1 - clip_coef
                end = 1 + clip_coef if advantage > 0 else 1 - clip_coef
                terms.append(advantage * (end if is_clipped else ratio * slope))
            elif correction == "truncate":
                terms.append(advantage * min(ratio, cap) * slope)
            elif 1 / cap <= ratio <= cap:
                terms.append(advantage * ratio * slope)
        if terms:
            total = total + sum(terms) / len(terms) / len(advantages)
    return total


def may_start_by_filling(n_started, batch_size, version, eta):
    """Put one rollout after the other into batches, and look where the next one comes to lie."""
    numbers = {"n_started": n_started, "version": version, "eta": eta}
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}")
    for name, n in numbers.items():
        if n < 0:
            raise ValueError(f"{name} is {n}")
    batches = [0]
    for _ in range(n_started + 1):
        if batches[-1] == batch_size:
            batches.append(0)
        batches[-1] += 1
    ahead = len(batches) - 1 - version
    return ahead <= eta
