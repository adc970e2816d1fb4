"""Right answers to chapter 5, written differently."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from solutions.ch0_sampling import get_logprobs
from solutions.ch2_ppo import ReplayMemory
from solutions.ch3_grpo import group_advantages
from solutions.ch5_rlvr import (
    aggregate_tokens,
    calc_rlvr_objective,
    extract_answer,
    leave_one_out_advantages,
)
from utils.grading.known_answers import edit, right

# --- Rewards that are checked -------------------------------------------------------------------


@right("extract_answer")
def split_at_the_last(text):
    parts = text.split("A: ")
    digits = parts[-1].removeprefix("-")
    is_integer = digits.isascii() and digits.isdigit()
    return parts[-1] if len(parts) > 1 and is_integer else None


@right("reward_fn_correct")
def with_numpy(samples, answers):
    try:
        right_ones = [extract_answer(s) == f"{a}" for s, a in zip(samples, answers, strict=True)]
    except ValueError as error:
        raise ValueError("answers should be one for each sample") from error
    return torch.from_numpy(np.array(right_ones, dtype=np.float32))


@right("reward_fn_format")
def by_words(samples):
    steps = ["ones ", "tens ", "sum "]
    worked = [not [step for step in steps if step not in text] for text in samples]
    answered = [extract_answer(text) is not None for text in samples]
    return torch.tensor(worked).float() * torch.tensor(answered).float()


@right("combine_rewards")
def by_einsum(rewards, weights):
    weights = torch.tensor(weights).to(rewards)
    if weights.shape != rewards.shape[:1]:
        raise ValueError("weights should be one for each function")
    return torch.einsum("f,fb->b", weights, rewards.detach())


@right("pass_at_k")
def factor_by_factor(n, c, k):
    """The numerically stable form of the paper's appendix."""
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, n is {n}")
    if not 0 <= c <= n:
        raise ValueError(f"c is {c}, n is {n}")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


@right("pass_at_k")
def by_gamma_functions(n, c, k):
    if not 0 < k <= n:
        raise ValueError(f"k should be in [1, {n}]")
    if not 0 <= c <= n:
        raise ValueError(f"c should be in [0, {n}]")
    if k > n - c:
        return 1

    def log_comb(a, b):
        return math.lgamma(a + 1) - math.lgamma(b + 1) - math.lgamma(a - b + 1)

    return -math.expm1(log_comb(n - c, k) - log_comb(n, k)) if c else 0


# --- Groups and baselines -----------------------------------------------------------------------


def _check_groups(group_size, batch):
    if group_size < 2 or batch % group_size != 0:
        raise ValueError(f"group_size should divide {batch} and be at least 2: {group_size}")


@right("select_informative_groups")
def beside_the_first(rewards, group_size):
    _check_groups(group_size, len(rewards))
    groups = rewards.reshape(-1, group_size)
    return (groups[:, 1:] != groups[:, :1]).any(dim=1)


@right("leave_one_out_advantages")
def by_differences(rewards, group_size):
    """The mean of the differences to each of the others: a constant group gives zeros by itself."""
    _check_groups(group_size, len(rewards))
    groups = rewards.detach().double().view(-1, group_size)
    differences = groups[:, :, None] - groups[:, None, :]
    return (differences.sum(-1) / (group_size - 1)).flatten().to(rewards.dtype)


# --- Completions that were cut off --------------------------------------------------------------


@right("mask_truncated")
def a_copy_with_rows_cleared(mask, finished):
    kept = mask.clone()
    kept[~finished] = False
    return kept


@right("apply_missing_eos_penalty")
@torch.no_grad()
def by_a_product(scores, finished, penalty):
    return scores - penalty * (~finished).to(scores.dtype)


# --- The objective ------------------------------------------------------------------------------


@right("aggregate_tokens")
def of_the_true_tokens(per_token, mask, mode="sequence", max_len=None):
    rows = len(mask)
    if mode == "constant" and (max_len is None or max_len <= 0):
        raise ValueError("max_len should be positive")
    if mode == "sequence":
        means = [
            row[kept].mean() if kept.any() else row[kept].sum()
            for row, kept in zip(per_token, mask, strict=True)
        ]
        return torch.stack(means).mean()
    kept = per_token[mask]
    if mode not in ("token", "constant"):
        raise ValueError(f"unknown mode {mode!r}")
    return kept.sum() / (rows * max_len if mode == "constant" else max(kept.numel(), 1))


@right("calc_sequence_ratio")
def of_two_means(logprobs, old_logprobs, mask):
    lengths = mask.sum(-1).clamp(min=1)
    new = torch.where(mask, logprobs.double(), 0.0).sum(-1) / lengths
    old = torch.where(mask, old_logprobs.detach().double(), 0.0).sum(-1) / lengths
    return torch.exp(new - old).to(logprobs.dtype)


@right("calc_rlvr_objective")
def with_one_logratio(
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
    """The level only decides over which tokens the log-ratio is averaged."""
    logratio = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)
    if ratio_level == "sequence":
        logratio = (logratio.sum(-1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1).expand_as(mask)
    elif ratio_level != "token":
        raise ValueError(f"ratio_level is {ratio_level}")
    ratio = logratio.clamp(max=60).exp()
    a = advantages.detach().reshape(len(mask), -1).expand_as(mask)
    a = torch.where(mask, a, 0.0)
    high = clip_coef if clip_coef_high is None else clip_coef_high
    objective = torch.where(
        a > 0, ratio.clamp(max=1 + high) * a, ratio.clamp(min=1 - clip_coef) * a
    )
    if beta:
        if ref_logprobs is None:
            raise ValueError("beta needs ref_logprobs")
        d = torch.where(mask, ref_logprobs.detach(), 0.0) - torch.where(mask, logprobs, 0.0)
        objective = objective - beta * (d.expm1() - d)
    return aggregate_tokens(objective, mask, loss_mode, max_len)


# --- The trainer --------------------------------------------------------------------------------


SAMPLED_TO_THE_BOUND = [
    edit(
        "RlvrTrainer.sample_groups",
        "fewer_than_needed",
        "informative.sum() >= n_groups",
        "int(informative.count_nonzero()) > n_groups - 1",
    ),
]


@right("RlvrTrainer.rollout_phase")
def memory_from_scratch(self):
    args = self.args
    with torch.no_grad():
        samples, scores = self.sample_groups()
        ids, attention, n = samples.input_ids, samples.attention_mask, samples.prompt_len
        logprobs = get_logprobs(self.model(ids, attention), ids, n, args.temperature)
        ref_logprobs = None
        if args.kl_coef > 0:
            with self.model.reference():
                ref_logprobs = get_logprobs(self.model(ids, attention), ids, n, args.temperature)
    mask = samples.completion_mask
    if args.truncation == "mask":
        is_end = samples.completion_ids == self.model.tokenizer.eos_token_id
        mask = mask & (is_end & mask).sum(1, keepdim=True).bool()
    if args.advantage_kind == "group":
        advantages = group_advantages(scores, args.group_size, args.advantage_scale)
    else:
        advantages = leave_one_out_advantages(scores, args.group_size)
    return ReplayMemory(
        args.num_minibatches,
        args.batches_per_learning_phase,
        args.group_size,
        input_ids=ids,
        attention_mask=attention,
        mask=mask,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        advantages=advantages,
    )


@right("RlvrTrainer.compute_rlhf_objective")
def objective_by_names(self, minibatch):
    args, mask, ids = self.args, minibatch.mask, minibatch.input_ids
    n = mask.shape[1]
    logits = self.model(ids, minibatch.attention_mask)[:, -n - 1 : -1] / args.temperature
    logp = F.log_softmax(logits, dim=-1)
    uses_k3 = args.kl_kind == "k3" and args.kl_coef > 0
    objective = calc_rlvr_objective(
        logprobs=logp.gather(-1, ids[:, -n:, None])[..., 0],
        old_logprobs=minibatch.logprobs,
        advantages=minibatch.advantages,
        mask=mask,
        clip_coef=args.clip_coef,
        clip_coef_high=args.clip_coef_high,
        ratio_level=args.ratio_level,
        loss_mode=args.loss_mode,
        max_len=args.gen_len if args.loss_mode == "constant" else None,
        ref_logprobs=minibatch.ref_logprobs if uses_k3 else None,
        beta=args.kl_coef if uses_k3 else 0.0,
    )
    per_token = args.ent_coef * (logp.exp() * logp).sum(-1)
    if args.kl_kind == "exact" and args.kl_coef > 0:
        with torch.no_grad(), self.model.reference():
            ref_logits = self.model(ids, minibatch.attention_mask)[:, -n - 1 : -1]
        ref_logp = F.log_softmax(ref_logits / args.temperature, dim=-1)
        per_token = per_token + args.kl_coef * (logp.exp() * (logp - ref_logp)).sum(-1)
    return objective - per_token[mask].mean()
