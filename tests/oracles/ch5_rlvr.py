"""Chapter 5 by other means: characters, enumeration and loops over rows."""

import itertools
import math
from fractions import Fraction

import torch


def answer_by_characters(text):
    """Return what follows the last "A: ", if all of it is an integer."""
    _, found, tail = text.rpartition("A: ")
    digits = tail[1:] if tail.startswith("-") else tail
    is_integer = len(digits) > 0 and all(c in "0123456789" for c in digits)
    return tail if found and is_integer else None


def correct_by_characters(samples, answers):
    """Compare each answer with the one that `answer_by_characters` finds."""
    pairs = zip(samples, answers, strict=True)
    return torch.tensor([float(answer_by_characters(s) == f"{a}") for s, a in pairs])


def format_by_characters(samples):
    """Find each step's word and an answer."""
    steps = ("ones ", "tens ", "sum ")
    return torch.tensor(
        [
            float(all(text.find(step) >= 0 for step in steps) and bool(answer_by_characters(text)))
            for text in samples
        ]
    )


def combine_by_loops(rewards, weights):
    """Weigh one column after the other."""
    combined = []
    for column in rewards.T.tolist():
        combined.append(sum(w * r for w, r in zip(weights, column, strict=True)))
    return torch.tensor(combined)


def pass_by_enumeration(n, c, k):
    """Take k of n completions in all ways; the first c are right."""
    taken = list(itertools.combinations(range(n), k))
    return sum(min(rows) < c for rows in taken) / len(taken)


def pass_one_by_one(n, c, k):
    """Multiply exact fractions: all k are wrong, one after the other."""
    missed = Fraction(1)
    for i in range(k):
        missed *= Fraction(max(n - c - i, 0), n - i)
    return float(1 - missed)


def informative_by_sets(rewards, group_size):
    """Count the distinct rewards of each group."""
    numbers = rewards.tolist()
    groups = [numbers[i : i + group_size] for i in range(0, len(numbers), group_size)]
    return torch.tensor([len(set(group)) > 1 for group in groups])


def leave_one_out_by_loops(rewards, group_size):
    """Hold each reward against the mean of the others, which are listed."""
    numbers, advantages = rewards.tolist(), []
    for i, reward in enumerate(numbers):
        start = i // group_size * group_size
        others = [numbers[j] for j in range(start, start + group_size) if j != i]
        advantages.append(reward - math.fsum(others) / len(others))
    return torch.tensor(advantages)


def drop_by_loops(mask, finished):
    """Keep a token where its row has finished."""
    rows = zip(mask.tolist(), finished.tolist(), strict=True)
    return torch.tensor([[x and is_finished for x in row] for row, is_finished in rows])


def penalize_by_loops(scores, finished, penalty):
    """Subtract the penalty from each score whose row has not finished."""
    pairs = zip(scores.tolist(), finished.tolist(), strict=True)
    return torch.tensor([score - (0 if ended else penalty) for score, ended in pairs])


def aggregate_by_loops(per_token, mask, mode="sequence", max_len=None):
    """Weigh each true position, token by token."""
    total = per_token.new_zeros(())
    for i, t in mask.nonzero().tolist():
        weight = {
            "sequence": len(mask) * int(mask[i].sum()),
            "token": int(mask.sum()),
            "constant": len(mask) * (max_len or 1),
        }[mode]
        total = total + per_token[i, t] / weight
    return total


def geometric_mean_of_ratios(logprobs, old_logprobs, mask):
    """Multiply the ratios of a row to the power 1/n, by their logs."""
    rows = []
    for row, old, kept in zip(logprobs, old_logprobs.detach(), mask, strict=True):
        n = int(kept.sum())
        power = sum(row[t] / n - old[t] / n for t in range(len(kept)) if kept[t])
        rows.append(torch.exp(power) if n else torch.ones(()))
    return torch.stack(rows)


def rlvr_by_cases(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    ratio_level="token",
    loss_mode="sequence",
    max_len=None,
    ref_logprobs=None,
    beta=0.0,
):
    """Go token by token: the cases of the minimum written out."""
    high = 1 + (clip_coef if clip_coef_high is None else clip_coef_high)
    total = torch.zeros(())
    for i, t in mask.nonzero().tolist():
        at = [t] if ratio_level == "token" else mask[i].nonzero().flatten().tolist()
        logratio = sum(logprobs[i, s] - old_logprobs[i, s].detach() for s in at) / len(at)
        ratio = logratio.exp()
        advantage = (advantages[i] if advantages.ndim == 1 else advantages[i, t]).item()
        if advantage > 0 and ratio > high:
            term = torch.tensor(high * advantage)
        elif advantage < 0 and ratio < 1 - clip_coef:
            term = torch.tensor((1 - clip_coef) * advantage)
        else:
            term = ratio * advantage
        if beta != 0:
            d = ref_logprobs[i, t].detach() - logprobs[i, t]
            term = term - beta * (d.exp() - 1 - d)
        weights = {"sequence": len(mask) * mask[i].sum(), "token": mask.sum()}
        total = total + term / weights.get(loss_mode, len(mask) * (max_len or 1))
    return total
