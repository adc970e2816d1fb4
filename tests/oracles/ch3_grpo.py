"""Chapter 3 by other means: loops over groups, cases written out, and chapter 2."""

import math
import statistics
from types import SimpleNamespace

import torch

from solutions.ch2_ppo import (
    calc_clipped_surrogate_objective,
    compute_advantages,
    compute_token_rewards,
)
from tests.support import trainers


def advantages_by_statistics(rewards, group_size, scale="group", eps=1e-4):
    """Standardize group by group in plain Python."""
    numbers, advantages = rewards.tolist(), []
    for start in range(0, len(numbers), group_size):
        group = numbers[start : start + group_size]
        if scale == "none":
            divisor = 1.0
        else:
            divisor = statistics.stdev(group if scale == "group" else numbers) + eps
        advantages += [(r - statistics.mean(group)) / divisor for r in group]
    return torch.tensor(advantages)


def reinforce_by_completions(logprobs, advantages, mask):
    """Average mean log-prob times A over completions, with the value at ratio 1."""
    rows = []
    for row, advantage, kept in zip(logprobs, advantages.tolist(), mask, strict=True):
        chosen = row[kept]
        gain = chosen - chosen.detach()  # 0, and the log-prob's gradient
        rows.append(advantage * (1 + gain.mean()) if len(chosen) else torch.zeros(()))
    return torch.stack(rows).mean()


def k3_of_probabilities(logprobs, ref_logprobs):
    """Return r - 1 - log r of the ratio r of two probabilities (float64)."""
    r = ref_logprobs.detach().exp() / logprobs.exp()
    return r - 1 - r.log()


def k3_number_by_number(logprobs, ref_logprobs):
    """Use the math module, for ratios that float64 holds and probabilities that it cannot."""
    d = (ref_logprobs - logprobs).flatten().tolist()
    return torch.tensor([math.exp(x) - 1 - x for x in d]).reshape(logprobs.shape)


def k3_of_differences(logprobs, ref_logprobs):
    """Return exp(d) - 1 - d, where in float64 the digits lost do not count."""
    d = ref_logprobs.detach() - logprobs
    return d.exp() - 1 - d


def objective_by_cases(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    """Go token by token: the cases of the minimum written out, on probabilities."""
    high = 1 + (clip_coef if clip_coef_high is None else clip_coef_high)
    total = torch.zeros(())
    for i, t in mask.nonzero().tolist():
        ratio = logprobs[i, t].exp() / old_logprobs[i, t].detach().exp()
        advantage = (advantages[i] if advantages.ndim == 1 else advantages[i, t]).item()
        if advantage > 0 and ratio > high:
            term = torch.tensor(high * advantage)
        elif advantage < 0 and ratio < 1 - clip_coef:
            term = torch.tensor((1 - clip_coef) * advantage)
        else:
            term = ratio * advantage
        if beta != 0:
            term = term - beta * k3_of_probabilities(logprobs[i, t], ref_logprobs[i, t])
        total = total + term / mask[i].sum()
    return total / len(mask)


def ppo_without_values(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    """Run chapter 2 completion by completion, with values 0 and gamma = lam = 1."""
    token_rewards = compute_token_rewards(advantages, mask)
    advantages = compute_advantages(torch.zeros_like(token_rewards), token_rewards, mask, 1.0, 1.0)
    rows = [x.split(1) for x in (logprobs, old_logprobs, advantages, mask)]
    surrogates = [
        calc_clipped_surrogate_objective(*row, clip_coef, clip_coef_high)
        for row in zip(*rows, strict=True)
    ]
    return torch.stack(surrogates).mean()


def process_by_statistics(step_rewards, step_ends, group_size, completion_len, eps=1e-4):
    """Sum, token by token, the steps that end there or later."""
    rows = []
    for row, (rewards, ends) in enumerate(zip(step_rewards, step_ends, strict=True)):
        first = row // group_size * group_size
        together = torch.cat(step_rewards[first : first + group_size]).tolist()
        steps = list(zip(rewards.tolist(), ends.tolist(), strict=True))
        if len(set(together)) < 2:
            steps = []
        mean = statistics.mean(together) if steps else 0.0
        std = statistics.stdev(together) if steps else 0.0
        rows.append(
            [
                sum((r - mean) / (std + eps) for r, end in steps if end >= t)
                for t in range(completion_len)
            ]
        )
    return torch.tensor(rows, dtype=torch.get_default_dtype())


def grpo_memory_by_loops(args, samples, scores, logprobs, ref_logprobs):
    """Return the memory with the advantages of `advantages_by_statistics`."""
    per_epoch = [SimpleNamespace(mask=None)] * args.num_minibatches
    scores = scores.detach()
    return trainers.as_memory(
        input_ids=samples.input_ids,
        attention_mask=samples.attention_mask,
        mask=samples.completion_mask,
        logprobs=logprobs.detach(),
        ref_logprobs=None if ref_logprobs is None else ref_logprobs.detach(),
        advantages=advantages_by_statistics(scores, args.group_size, args.advantage_scale),
        get_minibatches=lambda: per_epoch * args.batches_per_learning_phase,
    )
