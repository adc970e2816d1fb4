"""Chapter 5: verifiable rewards, and GRPO's descendants.

Builds rewards that a program checks, pass@k, and what later papers changed in GRPO: which groups
are trained on, how tokens are averaged, what the ratio is a ratio of, which baseline is subtracted,
and what happens to completions that were cut off. Each is an argument of the trainer; with none of
them turned on, it is chapter 3's.

Simplified: token means are taken over a minibatch (DAPO's paper: over the group of one question),
its soft overlong punishment is left out, rewards are right or wrong on additions, and no prompt is
remembered as solved from one rollout to the next.

Papers: RLVR (Tülu 3, Lambert et al., 2024, arXiv:2411.15124); pass@k (Chen et al., 2021,
arXiv:2107.03374); DAPO (Yu et al., 2025, arXiv:2503.14476); Dr. GRPO (Liu et al., 2025,
arXiv:2503.20783); GSPO (Zheng et al., 2025, arXiv:2507.18071); RLOO (Ahmadian et al., 2024,
arXiv:2402.14740; its baseline: Kool et al., 2019); the missing-eos penalty, "The N+ Implementation
Details of RLHF with PPO" (Huang et al., 2024, arXiv:2403.17031).
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from solutions.ch0_sampling import (
    Samples,
    at_least_float32,
    get_pad_token_id,
    masked_mean,
)
from solutions.ch2_ppo import ReplayMemory, ReplayMinibatch, calc_ratio
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer, calc_per_token_kl, make_grpo_memory
from utils.models.decoding import get_end_ids
from utils.rewards import is_worked
from utils.validation import CountOrZero, PositiveOrZero, require, shape_checked

# --- Rewards that are checked -------------------------------------------------------------------


def extract_answer(text: str) -> str | None:
    """Return the integer in the `A: <integer>` that ends the text, or None if none does.

    One space after the colon, perhaps a minus sign, then digits (0 to 9) up to the very end:
    nothing may follow, not even a full stop or a newline. An earlier `A: ` does not count. The
    integer is returned as it is written.
    """
    match = re.search(r"A: (-?[0-9]+)\Z", text)
    return match and match[1]


def reward_fn_correct(samples: list[str], answers: list[str | int]) -> Float[Tensor, "batch"]:
    """Reward a completion with 1 if its extracted answer is its own entry in `answers` (strings or
    integers), else with 0.

    Raises ValueError unless there is one answer per sample.
    """
    require(
        len(answers) == len(samples),
        f"answers should be one for each of {len(samples)} samples, but are {len(answers)}",
    )
    pairs = zip(samples, answers, strict=True)
    return torch.tensor([float(extract_answer(text) == str(answer)) for text, answer in pairs])


def reward_fn_format(samples: list[str]) -> Float[Tensor, "batch"]:
    """Reward a completion with 1 if it has worked steps (`is_worked`) and an answer, else with 0.

    Whether the steps or the answer are right makes no difference.
    """
    return torch.tensor(
        [float(is_worked(text) and extract_answer(text) is not None) for text in samples]
    )


@shape_checked
def combine_rewards(
    rewards: Float[Tensor, "functions batch"], weights: list[float] | Tensor
) -> Float[Tensor, "batch"]:
    """Return sum_f weights[f] * rewards[f], a new tensor: one reward per completion. Detached.

    The weights are not normalised. Raises ValueError unless there is one for each function.
    """
    require(
        len(weights) == len(rewards),
        f"weights should be one for each of {len(rewards)} functions, but are {len(weights)}",
    )
    weights = torch.as_tensor(weights, dtype=rewards.dtype, device=rewards.device)
    return weights @ rewards.detach()


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n completions, c of them right, include a right one.

    1 - C(n - c, k) / C(n, k) (Chen et al., eq. 1): the unbiased estimate, from n samples of a
    prompt, of how often one of k is right. It is 1 if fewer than k are wrong.

    Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    require(1 <= k <= n, f"k should be in [1, n = {n}], but is {k}")
    require(0 <= c <= n, f"c should be in [0, n = {n}], but is {c}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)


# --- Groups and baselines -----------------------------------------------------------------------


@shape_checked
def select_informative_groups(
    rewards: Float[Tensor, "batch"], group_size: int
) -> Bool[Tensor, "groups"]:
    """Mark each group whose rewards are not all equal.

    The others have advantages of 0 and teach nothing; DAPO (section 3.2) samples new ones in their
    place. Raises ValueError if `group_size` is below 2 or does not divide the batch.
    """
    groups = _split_groups(rewards, group_size)
    return groups.amax(-1) != groups.amin(-1)


@shape_checked
def leave_one_out_advantages(
    rewards: Float[Tensor, "batch"], group_size: int
) -> Float[Tensor, "batch"]:
    """Return A = reward - mean of the other rewards of its group (RLOO). Detached.

    That is G / (G - 1) times (reward - the group's mean): a completion's own reward does not enter
    its baseline, so the gradient keeps its full size. A constant group gives exact zeros.

    Raises ValueError if `group_size` is below 2 or does not divide the batch.
    """
    groups = _split_groups(rewards.detach(), group_size)
    others = (groups.sum(-1, keepdim=True) - groups) / (group_size - 1)
    # In floats the mean of equal numbers need not be that number.
    is_constant = groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)
    return rearrange(
        (groups - others).masked_fill(is_constant, 0.0), "group member -> (group member)"
    )


def _split_groups(
    rewards: Float[Tensor, "batch"], group_size: int
) -> Float[Tensor, "groups member"]:
    require(
        isinstance(group_size, int) and group_size >= 2,
        f"group_size should be an integer of at least 2, but is {group_size}",
    )
    require(
        len(rewards) > 0 and len(rewards) % group_size == 0,
        f"group_size should divide the batch of {len(rewards)}, but is {group_size}",
    )
    return rearrange(rewards, "(group member) -> group member", member=group_size)


# --- Completions that were cut off --------------------------------------------------------------


@shape_checked
def mask_truncated(
    mask: Bool[Tensor, "batch completion"], finished: Bool[Tensor, "batch"]
) -> Bool[Tensor, "batch completion"]:
    """Return a new mask, in which the rows that did not finish are false.

    Overlong filtering (DAPO, section 3.4): a completion that was cut off is neither rewarded nor
    punished. It still counts in its group's baseline.
    """
    return mask & finished[:, None]


@shape_checked
def apply_missing_eos_penalty(
    scores: Float[Tensor, "batch"], finished: Bool[Tensor, "batch"], penalty: float
) -> Float[Tensor, "batch"]:
    """Return the scores, less the penalty where a completion did not finish. Detached."""
    scores = scores.detach()
    return torch.where(finished, scores, scores - penalty)


# --- The objective ------------------------------------------------------------------------------


@shape_checked
def aggregate_tokens(
    per_token: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
    mode: str = "sequence",
    max_len: int | None = None,
) -> Float[Tensor, ""]:
    """Reduce one number per token to a single one. What is masked out may be NaN or inf, and never
    leaks.

    "sequence": the mean over each completion, then over the batch (GRPO): every completion counts
    the same, so a token in a long one counts little. "token": the mean over all tokens (DAPO,
    eq. 12). "constant": the sum over all tokens / (batch * max_len) (Dr. GRPO): every token counts
    the same, however many there are. An empty completion counts as 0; so does a batch without
    tokens. The arguments stay as they were.

    Raises ValueError for another mode, and for "constant" without a positive `max_len`.
    """
    if mode == "sequence":
        return masked_mean(per_token, mask, dim=-1).mean()
    if mode == "token":
        return masked_mean(per_token, mask)
    require(
        mode == "constant", f"mode should be 'sequence', 'token' or 'constant', but is {mode!r}"
    )
    require(
        max_len is not None and max_len > 0,
        f"max_len should be a positive integer for mode 'constant', but is {max_len}",
    )
    return per_token.masked_fill(~mask, 0.0).sum() / (len(mask) * max_len)


@shape_checked
def calc_sequence_ratio(
    logprobs: Float[Tensor, "batch completion"],
    old_logprobs: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
) -> Float[Tensor, "batch"]:
    """Return exp(mean over a completion of logprobs - old_logprobs) (GSPO, eq. 7).

    The geometric mean of the tokens' ratios; the mean, not the sum, keeps it in the same range
    for all lengths. 1 for an empty completion. `old_logprobs` are constants: detached. What is
    masked out may be NaN or inf. The mean is capped at 80, as in `calc_ratio`.
    """
    logratio = at_least_float32(logprobs - old_logprobs.detach())
    return masked_mean(logratio, mask, dim=-1).clamp(max=80.0).exp()


@shape_checked
def calc_rlvr_objective(
    logprobs: Float[Tensor, "batch completion"],
    old_logprobs: Float[Tensor, "batch completion"],
    advantages: Float[Tensor, "batch"] | Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
    clip_coef: float = 0.2,
    clip_coef_high: float | None = None,
    ratio_level: str = "token",
    loss_mode: str = "sequence",
    max_len: int | None = None,
    ref_logprobs: Float[Tensor, "batch completion"] | None = None,
    beta: float = 0.0,
) -> Float[Tensor, ""]:
    """Aggregate the tokens' min(ratio A, clip(ratio) A) - beta k3, with `aggregate_tokens`.

    The ratio is the token's own (GRPO), or with `ratio_level` "sequence" that of its completion
    (GSPO, eq. 5), through which each token gets the same gradient. With the defaults it is
    `calc_grpo_objective` at beta 0. The rest is as it is there: `old_logprobs`, `ref_logprobs` and
    `advantages` are detached; what is masked out may be NaN or inf.

    Raises ValueError for another `ratio_level`, and if `ref_logprobs` is None, unless beta is 0.
    """
    high = clip_coef if clip_coef_high is None else clip_coef_high
    require(
        ratio_level in ("token", "sequence"),
        f"ratio_level should be 'token' or 'sequence', but is {ratio_level!r}",
    )
    require(
        beta == 0 or ref_logprobs is not None,
        f"ref_logprobs should be given when beta is not 0, but is None and beta is {beta}",
    )
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(logprobs)
    advantages = advantages.detach().masked_fill(~mask, 0.0)
    if ratio_level == "token":
        ratio = calc_ratio(logprobs, old_logprobs, mask)
    else:
        ratio = calc_sequence_ratio(logprobs, old_logprobs, mask)[:, None]  # [batch 1]
    clipped = ratio.clamp(1 - clip_coef, 1 + high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)  # [batch completion]
    if beta != 0:
        kl = calc_per_token_kl(
            logprobs.masked_fill(~mask, 0.0), ref_logprobs.masked_fill(~mask, 0.0)
        )
        objective = objective - beta * kl
    return aggregate_tokens(objective, mask, loss_mode, max_len)


# --- The trainer --------------------------------------------------------------------------------


@dataclass
class RlvrArgs(GrpoArgs):
    """Add to GRPO's arguments what its descendants changed; the defaults change nothing.

    With `ratio_level` "sequence", GSPO's clips are 3e-4 (`clip_coef`) and 4e-4 (`clip_coef_high`);
    0.2 hardly ever clips the ratio of a sequence.
    """

    advantage_kind: Literal["group", "leave_one_out"] = "group"  # advantage_scale is for "group".
    loss_mode: Literal["sequence", "token", "constant"] = "sequence"  # "constant" uses gen_len.
    ratio_level: Literal["token", "sequence"] = "token"
    dynamic_sampling: Literal[True, False] = False  # Sample until all groups are informative,
    max_extra_rollouts: CountOrZero = 3  # or until this many more batches.
    truncation: Literal["keep", "mask", "penalty"] = "keep"  # For what gen_len cut off.
    missing_eos_penalty: PositiveOrZero = 1.0  # Subtracted if truncation is "penalty".


def find_finished(samples: Samples, eos_token_id: int | list[int]) -> Bool[Tensor, "batch"]:
    """Mark the completions that ended by themselves, with the eos or with one of several."""
    ends = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
    is_end = [(samples.completion_ids == end) & samples.completion_mask for end in ends]
    return torch.stack(is_end).any(0).any(-1)


def join_samples(parts: list[Samples], pad_token_id: int) -> Samples:
    """Join the rows of all parts: prompts padded on the left to one width, completions on the
    right.
    """
    prompt_len = max(part.prompt_len for part in parts)
    completion_len = max(part.completion_mask.shape[1] for part in parts)

    ids, attention_masks, masks = [], [], []
    for part in parts:
        left = prompt_len - part.prompt_len
        right = completion_len - part.completion_mask.shape[1]
        ids.append(F.pad(part.input_ids, (left, right), value=pad_token_id))
        attention_masks.append(F.pad(part.attention_mask, (left, right)))
        masks.append(F.pad(part.completion_mask, (0, right)))
    return Samples(
        input_ids=torch.cat(ids),
        attention_mask=torch.cat(attention_masks),
        prompt_len=prompt_len,
        completion_mask=torch.cat(masks),
        texts=[text for part in parts for text in part.texts],
    )


def select_samples(samples: Samples, rows: list[int]) -> Samples:
    """Return these rows, in this order."""
    return Samples(
        input_ids=samples.input_ids[rows],
        attention_mask=samples.attention_mask[rows],
        prompt_len=samples.prompt_len,
        completion_mask=samples.completion_mask[rows],
        texts=[samples.texts[row] for row in rows],
    )


class RlvrTrainer(GrpoTrainer):
    """Train with GRPO or its descendants: chapter 3's trainer, with a choice at each changed step.

    Its rollouts record "informative_frac", the share of the sampled groups whose rewards differ,
    "prompts_sampled", the number of groups sampled, and "truncated_frac", the share of all sampled
    completions that were cut off.
    """

    args: RlvrArgs
    args_class = RlvrArgs

    def sample_groups(self) -> tuple[Samples, Float[Tensor, "batch"]]:
        """Sample the groups of a batch, with their scores, less the penalty if there is one.

        Each batch is one call of `self.sample_and_score(n_groups, group_size)`.
        With dynamic sampling, batch after batch is sampled until enough groups are informative, or
        `max_extra_rollouts` have followed the first. We keep the informative groups that came
        first; if there are too few, the first of the others fill up the batch. What is kept stays
        in the order in which it came. The metrics are for all that was sampled.
        """
        args = self.args
        n_groups = args.batch_size // args.group_size
        parts, scores, finished = [], [], []
        for _ in range(1 + args.max_extra_rollouts * args.dynamic_sampling):
            part, part_scores = self.sample_and_score(n_groups, args.group_size)
            parts.append(part)
            finished.append(find_finished(part, get_end_ids(self.model)))
            if args.truncation == "penalty":
                part_scores = apply_missing_eos_penalty(
                    part_scores, finished[-1], args.missing_eos_penalty
                )
            scores.append(part_scores)
            informative = select_informative_groups(torch.cat(scores), args.group_size)
            if informative.sum() >= n_groups:
                break
        self.metrics["informative_frac"].append(informative.float().mean().item())
        self.metrics["prompts_sampled"].append(len(informative))
        self.metrics["truncated_frac"].append(1 - torch.cat(finished).float().mean().item())
        order = torch.cat([informative.nonzero(), (~informative).nonzero()]).flatten()
        chosen = order[:n_groups].sort().values
        first_rows = chosen[:, None] * args.group_size
        rows = (first_rows + torch.arange(args.group_size, device=chosen.device)).flatten()
        joined = join_samples(parts, get_pad_token_id(self.model.tokenizer))
        return select_samples(joined, rows.tolist()), torch.cat(scores)[rows]

    @torch.no_grad()
    def rollout_phase(self) -> ReplayMemory:
        """Make GRPO's rollout from `sample_groups`, with the arguments' advantages and mask.

        Truncation "mask" takes the rows that did not finish out of the memory's mask.
        """
        args = self.args
        samples, scores = self.sample_groups()
        logprobs = self.get_sample_logprobs(samples)
        ref_logprobs = self.get_ref_logprobs(samples)
        memory = make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)
        if args.advantage_kind == "leave_one_out":
            advantages = leave_one_out_advantages(scores, args.group_size)
            memory = replace(memory, advantages=advantages)
        if args.truncation == "mask":
            finished = find_finished(samples, get_end_ids(self.model))
            memory = replace(memory, mask=mask_truncated(memory.mask, finished))
        return memory

    def compute_rlhf_objective(self, minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
        """Return RLVR objective + entropy bonus (maximised); the KL is k3, inside it, or exact.

        "constant" divides by `gen_len` for each completion. Records clip_frac, approx_kl and kl_k3
        with `self.record_ratios`.
        """
        args, mask, prompt_len = self.args, minibatch.mask, minibatch.prompt_len
        scored = self.score(minibatch.input_ids, minibatch.attention_mask, prompt_len)
        logprobs = scored.logprobs
        objective = calc_rlvr_objective(
            logprobs,
            minibatch.logprobs,
            minibatch.advantages,
            mask,
            args.clip_coef,
            args.clip_coef_high,
            args.ratio_level,
            args.loss_mode,
            max_len=args.gen_len,
            ref_logprobs=minibatch.ref_logprobs,
            beta=args.kl_coef if args.kl_kind == "k3" else 0.0,
        )
        entropy = self.measure_entropy(minibatch, scored)
        has_kl = args.kl_kind == "exact" and args.kl_coef > 0
        kl = self.measure_kl(minibatch, scored) if has_kl else 0.0
        self.record_ratios(logprobs, minibatch)
        return objective + args.ent_coef * entropy - args.kl_coef * kl

    @torch.no_grad()
    def record_ratios(self, logprobs: Tensor, minibatch: ReplayMinibatch) -> None:
        """Record as PPO does; with sequence ratios, clip_frac is the share of completions outside
        the clip.
        """
        super().record_ratios(logprobs, minibatch)
        args, mask = self.args, minibatch.mask
        if args.ratio_level == "sequence":
            high = args.clip_coef if args.clip_coef_high is None else args.clip_coef_high
            ratio = calc_sequence_ratio(logprobs, minibatch.logprobs, mask)
            outside = (ratio < 1 - args.clip_coef) | (ratio > 1 + high)
            self.metrics["clip_frac"][-1] = masked_mean(outside.float(), mask.any(-1)).item()
