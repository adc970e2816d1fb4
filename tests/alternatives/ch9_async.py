"""Right answers to chapter 9, written differently."""

import math

import torch

from utils.grading.known_answers import right

# --- RolloutQueue -------------------------------------------------------------------------------


@right("RolloutQueue")
class ListOfRollouts:
    """Plain lists, and a version that is unknown until one is named."""

    def __init__(self, staleness):
        if not isinstance(staleness, int) or staleness < 0:
            raise ValueError(f"the staleness {staleness} is no integer of at least 0")
        self.staleness = staleness
        self.rollouts, self.versions = [], []
        self.newest = None

    def __len__(self):
        return len(self.rollouts)

    def put(self, rollout, version):
        if self.newest is not None and version < self.newest:
            raise ValueError(f"the version {version} is older than {self.newest}")
        self.newest = version
        self.rollouts.append(rollout)
        self.versions.append(version)

    def take(self, version):
        if len(self.rollouts) - 1 < self.staleness:
            raise ValueError("there are too few rollouts")
        if self.newest is not None and version < self.newest:
            raise ValueError(f"the version {version} is older than {self.newest}")
        self.newest = version
        return self.rollouts.pop(0), version - self.versions.pop(0)


# --- calc_stable_rate ---------------------------------------------------------------------------


@right("calc_stable_rate")
def of_levin_and_may(delay):
    if not isinstance(delay, int) or delay < 0:
        raise ValueError("delay must be a non-negative integer")
    return 2 * math.cos(delay * math.pi / (2 * delay + 1))


# --- measure_mismatch ---------------------------------------------------------------------------


@right("measure_mismatch")
def with_a_softmax(logprobs, sampler_logprobs, mask):
    """The share is 1 / (n sum p^2), with p = softmax of the completions' log ratios."""
    logratio = torch.where(mask, logprobs.detach() - sampler_logprobs.detach(), 0.0).double()
    lengths = mask.sum(-1)
    if lengths.sum() == 0:
        return dict(k3=0.0, max_ratio=1.0, effective_share=1.0)
    k3 = torch.where(mask, logratio.expm1() - logratio, 0.0).sum() / lengths.sum()
    p = logratio.sum(-1)[lengths > 0].softmax(0)
    largest = torch.where(mask, logratio, -math.inf).max()
    return {
        "effective_share": float(1 / (len(p) * p.dot(p))),
        "max_ratio": float(largest.exp()),
        "k3": float(k3),
    }


# --- get_kept_logprobs --------------------------------------------------------------------------


@right("get_kept_logprobs")
def with_logits_of_minus_infinity(logits, tokens, temperature=1.0, top_k=None, top_p=None):
    """What is cut off gets a logit of -inf, in the order of the vocabulary."""
    if temperature <= 0:
        raise ValueError(f"temperature: {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: {top_k}")
    if top_p is not None and not (0 < top_p <= 1):
        raise ValueError(f"top_p: {top_p}")
    logits = logits.float() if logits.dtype != torch.float64 else logits
    scaled = logits / temperature
    kept = scaled
    if top_k is not None:
        least = kept.topk(min(top_k, kept.shape[-1]), dim=-1).values[:, -1:]
        kept = torch.where(kept < least, -math.inf, kept)
    if top_p is not None and top_p < 1:
        probs, order = kept.softmax(-1).sort(dim=-1, descending=True)
        before = probs.cumsum(-1).roll(1, -1)
        before[:, 0] = 0
        cut = torch.zeros_like(kept, dtype=torch.bool).scatter(-1, order, before >= top_p)
        kept = torch.where(cut, -math.inf, kept)
    rows = torch.arange(len(tokens))
    log_kept_mass = kept.logsumexp(-1) - scaled.logsumexp(-1)
    return kept.log_softmax(-1)[rows, tokens], log_kept_mass


# --- calc_importance_weights --------------------------------------------------------------------


@right("calc_importance_weights")
def capped_in_logs(logprobs, sampler_logprobs, mask, cap=2.0, level="token"):
    if level not in ("token", "sequence"):
        raise ValueError(f"the level {level!r} is unknown")
    if cap is not None and cap <= 0:
        raise ValueError(f"the cap {cap} is not above 0")
    zero = torch.zeros_like(logprobs)
    logratio = torch.where(mask, logprobs - sampler_logprobs, zero).detach()
    if level == "sequence":
        logratio = logratio.sum(dim=1, keepdim=True) + zero.detach().nan_to_num()
    limit = 80.0 if cap is None else min(math.log(cap), 80.0)
    return torch.where(mask, logratio.clamp(max=limit).exp(), zero).detach()


# --- mask_mismatched ----------------------------------------------------------------------------


@right("mask_mismatched")
def with_limits_in_logs(logprobs, sampler_logprobs, mask, low=0.5, high=2.0, kind="ratio"):
    if kind == "ratio":
        logratio = torch.where(mask, logprobs - sampler_logprobs, torch.zeros_like(logprobs))
        least = math.log(low) if low > 0 else -math.inf
        outside = (logratio < least) | (logratio > math.log(high))
    elif kind == "probability":
        outside = (logprobs.exp() - sampler_logprobs.exp()).abs() > high
    else:
        raise ValueError(f"the kind {kind!r} is unknown")
    return torch.logical_and(mask, ~outside)


# --- calc_async_objective -----------------------------------------------------------------------


@right("calc_async_objective")
def as_a_matrix_product(
    logprobs, sampler_logprobs, advantages, mask, correction="none", clip_coef=0.2, cap=2.0
):
    """One weight per token, computed without gradient; the objective is linear in it."""
    if correction not in ("none", "clip", "truncate", "mask"):
        raise ValueError(f"the correction {correction!r} is unknown")
    new = torch.where(mask, logprobs, 0.0)
    with torch.no_grad():
        ratio = torch.where(mask, logprobs - sampler_logprobs, 0.0).clamp(max=80.0).exp()
        up = advantages[:, None] > 0
        value, slope = torch.ones_like(ratio), torch.ones_like(ratio)
        kept = mask
        if correction == "truncate":
            value = slope = ratio.minimum(torch.full_like(ratio, cap))
        elif correction == "mask":
            kept = mask & (ratio <= cap) & (ratio >= 1 / cap)
            value = slope = ratio
        elif correction == "clip":
            high, low = (ratio > 1 + clip_coef) & up, (ratio < 1 - clip_coef) & ~up
            value = ratio.clamp(1 - clip_coef, 1 + clip_coef).where(high | low, ratio)
            slope = torch.where(high | low, 0.0, ratio)
        share = kept / kept.sum(-1, keepdim=True).clamp(min=1) / len(mask)
        share = share * advantages[:, None]
    return (share * (value + slope * (new - new.detach()))).sum()


# --- may_start ----------------------------------------------------------------------------------


@right("may_start")
def counted_against_the_room(n_started, batch_size, version, eta):
    """With this one there may be (version + eta + 1) batches."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}")
    for name, n in {"n_started": n_started, "version": version, "eta": eta}.items():
        if n < 0:
            raise ValueError(f"{name} is {n}")
    return n_started + 1 <= (version + eta + 1) * batch_size
