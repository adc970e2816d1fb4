"""Chapter 6 by other means: torch.distributions, loops, enumeration, plain Hugging Face."""

import itertools
import math
import statistics

import torch
from torch.distributions import Bernoulli

from tests.support import models, trainers


def preference_by_coins(chosen_rewards, rejected_rewards):
    """Each choice is the toss of a coin whose logit is the margin; all came up heads."""
    coins = Bernoulli(logits=chosen_rewards - rejected_rewards)
    return -coins.log_prob(torch.ones_like(chosen_rewards)).sum() / len(chosen_rewards)


def accuracy_by_loops(chosen_rewards, rejected_rewards):
    """Count in halves."""
    halves = 0
    for a, b in zip(chosen_rewards.tolist(), rejected_rewards.tolist(), strict=True):
        halves += 2 if a > b else 1 if a == b else 0
    return halves / (2 * len(chosen_rewards))


def dpo_by_odds(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1):
    """Write the probability of the choices as odds: (pi_w / ref_w)^beta to (pi_l / ref_l)^beta."""
    chosen = (policy_chosen - ref_chosen.detach()) * beta
    rejected = (policy_rejected - ref_rejected.detach()) * beta
    both = torch.stack([chosen, rejected])
    loss = (torch.logsumexp(both, dim=0) - chosen).sum() / len(chosen)
    return loss, chosen.detach().clone(), rejected.detach().clone()


def rewards_by_hugging_face(kind):
    """Fold the adapters into plain Hugging Face; each row is read alone and without padding."""

    def forward(self, input_ids, attention_mask):
        rewards = []
        for ids, attention in zip(input_ids, attention_mask, strict=True):
            real = ids[attention.bool()][None]
            _, hidden = trainers.run_hugging_face(self, kind, real, torch.ones_like(real))
            rewards.append(hidden[0, -1] @ self.reward_head.weight[0] + self.reward_head.bias[0])
        return torch.stack(rewards)

    return forward


def reward_fn_by_hugging_face(reward_model):
    """One text at a time: bos, prompt, completion, eos."""
    forward = rewards_by_hugging_face("shallow")
    encode = models.load_tokenizer().encode
    bos, eos = (models.SPECIAL[f"{name}_token_id"] for name in ("bos", "eos"))

    def reward_fn(samples, prompts):
        found = []
        for prompt, text in zip(prompts, samples, strict=True):
            ids = torch.tensor([[bos, *encode(prompt), *encode(text), eos]])
            reward = forward(reward_model, ids, torch.ones_like(ids)).detach()
            found.append((reward - reward_model.reward_mean) / reward_model.reward_std)
        return torch.cat(found)

    return reward_fn


def best_by_sorting(samples, rewards, n):
    """Sort each n of them."""
    rows = list(zip(rewards.tolist(), samples, strict=True))
    groups = [rows[i : i + n] for i in range(0, len(rows), n)]
    return [sorted(group, key=lambda row: row[0])[-1][1] for group in groups]


def best_of_n_kl_by_quadrature(n):
    """Integrate u -> q log q, q = n u^(n-1) being the density of the best of n uniform numbers."""
    edges = [i / 20000 for i in range(20001)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    density = [n * u ** (n - 1) for u in middles]
    return math.fsum(q * math.log(q) for q in density if q > 0) / 20000


def rejection_probs(rewards, num_samples, temperature):
    """Return the exact probability of every result of `rejection_sample`, by enumeration."""
    probs: dict[tuple[int, ...], float] = {}

    def go_on(accepted, remaining, p):
        if len(accepted) >= num_samples:
            first = accepted[:num_samples]
            probs[first] = probs.get(first, 0.0) + p
            return
        top = max(rewards[i] for i in remaining)
        accept = {i: math.exp((rewards[i] - top) / temperature) for i in remaining}
        for flags in itertools.product([True, False], repeat=len(remaining)):
            p_pass = p
            for i, flag in zip(remaining, flags, strict=True):
                p_pass *= accept[i] if flag else 1 - accept[i]
            if p_pass == 0:
                continue
            taken = [i for i, flag in zip(remaining, flags, strict=True) if flag]
            left = [i for i in remaining if i not in taken]
            orders = list(itertools.permutations(taken))
            for order in orders:
                go_on((*accepted, *order), left, p_pass / len(orders))

    go_on((), list(range(len(rewards))), 1.0)
    return probs


def pool_by_statistics(scores, kept, pool_size):
    """Look up the pool of each kept row."""
    numbers, found = scores.tolist(), []
    for row in kept.tolist():
        start = row // pool_size * pool_size
        pool = numbers[start : start + pool_size]
        is_constant = min(pool) == max(pool)
        scale = statistics.stdev(pool) + 1e-4
        found.append(0.0 if is_constant else (numbers[row] - statistics.fmean(pool)) / scale)
    return torch.tensor(found, dtype=scores.dtype)
