"""Chapter 2 by other means: loops over tokens, Python's statistics and torch.distributions."""

import operator
import re
import statistics

import torch
from torch.distributions import Categorical, kl_divergence

from tests.support import trainers
from utils.models.corpus import NEGATIVE_WORDS, POSITIVE_WORDS


def mean_of_terms(terms, of):
    """Return the mean of some terms, or a 0 that depends on `of`."""
    return torch.stack(terms).mean() if terms else of.nan_to_num(posinf=0.0).sum() * 0


def count_by_loops(samples, char="."):
    """Count a character by looking at each."""
    counts = torch.zeros(len(samples))
    for row, text in enumerate(samples):
        for c in text:
            counts[row] += c == char
    return counts


def sentiment_by_word(samples):
    """Search every text once for each word of the lists."""
    rewards = []
    for text in samples:
        positive, negative = (
            sum(len(re.findall(rf"\b{word}\b", text, re.IGNORECASE)) for word in words)
            for words in (POSITIVE_WORDS, NEGATIVE_WORDS)
        )
        total = positive + negative
        rewards.append((positive - negative) / total if total else 0.0)
    return torch.tensor(rewards)


def standardize(numbers, eps):
    """Standardize by Python's statistics; return zeros where there is no spread."""
    if len(set(numbers)) < 2:
        return [0.0] * len(numbers)
    mean, std = statistics.fmean(numbers), statistics.stdev(numbers)
    return [(x - mean) / (std + eps) for x in numbers]


def reward_by_statistics(rewards, eps=1e-5):
    """Standardize rewards by Python's statistics."""
    return torch.tensor(standardize(rewards.tolist(), eps))


def token_rewards_by_loops(scores, mask, logprobs=None, ref_logprobs=None, kl_coef=0.0):
    """Pay each token its KL, and the last one the score."""
    rewards = torch.zeros(mask.shape)
    for row, t in mask.nonzero().tolist():
        if kl_coef:
            rewards[row, t] -= kl_coef * (logprobs[row, t] - ref_logprobs[row, t]).item()
        if t == int(mask[row].sum()) - 1:
            rewards[row, t] += scores[row].item()
    return rewards


def deltas_of(values, rewards, gamma):
    """Return r + gamma V' - V for one completion, as a list."""
    after = [*values, 0.0][1:]
    return [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]


def advantages_by_double_sum(values, token_rewards, mask, gamma=1.0, lam=0.95):
    """Write out A_t = sum over l of (gamma lam)^l delta_{t+l}, row by row."""
    advantages = torch.zeros(mask.shape)
    for row, length in enumerate(mask.sum(-1).tolist()):
        v, r = (x[row, :length].tolist() for x in (values, token_rewards))
        deltas = deltas_of(v, r, gamma)
        decay = [(gamma * lam) ** k for k in range(length)]
        for t in range(length):
            advantages[row, t] = sum(map(operator.mul, decay, deltas[t:]))
    return advantages


def advantages_at_the_ends(values, token_rewards, mask, gamma, lam):
    """Discount what follows minus the value for lam 1; look one step ahead for lam 0."""
    advantages = torch.zeros(mask.shape)
    for row, length in enumerate(mask.sum(-1).tolist()):
        v, r = (x[row, :length].tolist() for x in (values, token_rewards))
        for t in range(length):
            if lam == 1:
                advantages[row, t] = sum(gamma**k * r[t + k] for k in range(length - t)) - v[t]
            else:
                advantages[row, t] = deltas_of(v, r, gamma)[t]
    return advantages


def advantages_by_statistics(advantages, mask, eps=1e-8):
    """Standardize the advantages of the true positions by Python's statistics."""
    normalized = torch.zeros(mask.shape)
    positions = mask.nonzero().tolist()
    numbers = standardize([advantages[i, t].item() for i, t in positions], eps)
    for (i, t), number in zip(positions, numbers, strict=True):
        normalized[i, t] = number
    return normalized


def surrogate_by_cases(
    logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None
):
    """Go token by token: what is gained beyond the interval is a constant."""
    high = clip_coef if clip_coef_high is None else clip_coef_high
    terms = []
    for i, t in mask.nonzero().tolist():
        logratio = logprobs[i, t] - old_logprobs[i, t].item()
        ratio, a = torch.tensor(min(logratio.item(), 100.0)).exp().item(), advantages[i, t].item()
        if a > 0 and ratio > 1 + high:
            terms.append(torch.tensor((1 + high) * a))
        elif a < 0 and ratio < 1 - clip_coef:
            terms.append(torch.tensor((1 - clip_coef) * a))
        else:
            terms.append(logratio.exp() * a)
    return mean_of_terms(terms, logprobs)


def value_loss_by_cases(values, old_values, returns, mask, vf_coef=0.5, clip_coef=None):
    """Go token by token: a value held at the end of its interval is a constant."""
    errors = []
    for i, t in mask.nonzero().tolist():
        value, old, target = values[i, t], old_values[i, t].item(), returns[i, t].item()
        error = (value - target) ** 2
        if clip_coef is not None and abs(value.item() - old) > clip_coef:
            held = old + clip_coef if value.item() > old else old - clip_coef
            if (held - target) ** 2 > error.item():
                error = torch.tensor((held - target) ** 2)
        errors.append(error)
    return vf_coef / 2 * mean_of_terms(errors, values)


def entropy_bonus_by_categorical(logits, mask, ent_coef):
    """Average the entropies that torch.distributions gives."""
    terms = [Categorical(logits=logits[mask]).entropy().mean()] if mask.any() else []
    return ent_coef * mean_of_terms(terms, logits)


def kl_penalty_by_distributions(logits, ref_logits, mask, kl_coef):
    """Average the divergences that torch.distributions gives."""
    terms = []
    if mask.any():
        p, q = (Categorical(logits=x[mask]) for x in (logits, ref_logits.detach()))
        terms.append(kl_divergence(p, q).mean())
    return kl_coef * mean_of_terms(terms, logits)


def memory_by_loops(args, samples, scores, logprobs, ref_logprobs, values):
    """Chain the oracles of rewards, of GAE and of one whitening."""
    mask = samples.completion_mask
    scores, logprobs, values = scores.detach(), logprobs.detach(), values.detach()
    if args.normalize_reward:
        scores = reward_by_statistics(scores)
    kl_coef = args.kl_coef if args.kl_in == "reward" else 0.0
    rewards = token_rewards_by_loops(scores, mask, logprobs, ref_logprobs, kl_coef)
    advantages = advantages_by_double_sum(values, rewards, mask, args.gamma, args.lam)

    def get_minibatches():
        epoch = samples.input_ids.tensor_split(args.num_minibatches)
        return [
            trainers.as_memory(input_ids=ids) for ids in epoch
        ] * args.batches_per_learning_phase

    return trainers.as_memory(
        input_ids=samples.input_ids,
        attention_mask=samples.attention_mask,
        mask=mask,
        logprobs=logprobs,
        ref_logprobs=None if ref_logprobs is None else ref_logprobs.detach(),
        values=values,
        advantages=advantages_by_statistics(advantages, mask),
        returns=advantages + values,
        get_minibatches=get_minibatches,
    )
