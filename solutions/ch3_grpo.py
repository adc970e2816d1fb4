"""Chapter 3: the GRPO trainer, which drops the value head.

Builds group-relative policy optimisation: several completions per prompt, and the mean of their
rewards in place of a learned value. Compared with chapter 2, everything that served the values
goes.

Simplified: the reference is fixed (the paper's outer loop refreshes it), one reward per completion
in the trainer (`process_advantages` shows the step-wise one).

Papers: GRPO (Shao et al., 2024, arXiv:2402.03300); what its normalisations do, "Dr. GRPO" (Liu et
al., 2025, arXiv:2503.20783); Schulman's note on approximating the KL
(http://joschu.net/blog/kl-approx.html).
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from solutions.ch0_sampling import Samples, encode_prompts, get_logprobs, masked_mean
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import ReplayMemory, ReplayMinibatch, RLHFArgs, RLHFTrainer, calc_ratio
from utils.models.turns import Environment, fill_failed
from utils.prompts import Prompt
from utils.validation import CountOrZero, Positive, PositiveOrZero, Range, require, shape_checked

# --- Advantages ---------------------------------------------------------------------------------


@shape_checked
def group_advantages(
    rewards: Float[Tensor, "batch"], group_size: int, scale: str = "group", eps: float = 1e-4
) -> Float[Tensor, "batch"]:
    """Return A = (reward - mean of its group) / scale (GRPO, section 4.1.2). Detached.

    scale is "group": the group's std + eps, so that every prompt weighs the same, however small its
    differences; "batch": the std of all raw rewards of the batch + eps, one scale for all prompts;
    "none": 1 (Dr. GRPO). A group whose rewards are all equal gives exact zeros: it has nothing to
    compare. Standard deviations have ddof 1.

    Raises a ValueError that names the argument if `group_size` is below 2 or does not divide the
    batch, or `scale` is none of these.
    """
    _check_group_size(group_size, len(rewards))
    require(
        scale in ("group", "batch", "none"),
        f"scale should be 'group', 'batch' or 'none', but is {scale!r}",
    )
    groups = rearrange(rewards.detach(), "(group member) -> group member", member=group_size)
    centered = groups - groups.mean(-1, keepdim=True)
    # In floats the mean of equal numbers need not be that number.
    is_constant = groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)
    centered = centered.masked_fill(is_constant, 0.0)
    if scale == "group":
        centered = centered / (groups.std(-1, keepdim=True) + eps)
    elif scale == "batch":
        centered = centered / (groups.std() + eps)
    return rearrange(centered, "group member -> (group member)")


def process_advantages(
    step_rewards: list[Float[Tensor, "steps"]],
    step_ends: list[Int[Tensor, "steps"]],
    group_size: int,
    completion_len: int,
    eps: float = 1e-4,
) -> Float[Tensor, "batch completion"]:
    """Return advantages from rewards of individual steps (GRPO, section 4.1.3). Detached.

    The rewards of all steps of a group are normalised together, by their mean and std + eps. A
    token gets the sum of the normalised rewards of the steps that end at it or later: `step_ends`
    are 0-based positions, inclusive, in any order and of any integer type; steps that end at the
    same token all count. After the last end, and in a row without steps, it is 0. A group with
    fewer than two steps, or whose steps all have the same reward, gives zeros. Stds have ddof 1.

    Raises a ValueError that names `group_size` if it is below 2 or does not divide the rows, and
    one that names `step_ends` if the lists do not match or an end is outside the completion.
    """
    _check_group_size(group_size, len(step_rewards))
    require(
        [len(rewards) for rewards in step_rewards] == [len(ends) for ends in step_ends],
        "step_ends should have one end for each of step_rewards, row by row",
    )
    all_ends = torch.cat(step_ends)
    require(
        bool(((all_ends >= 0) & (all_ends < completion_len)).all()),
        f"step_ends should be in [0, {completion_len}), but are {all_ends.tolist()}",
    )
    ends_here = step_rewards[0].new_zeros(len(step_rewards), completion_len)
    for start in range(0, len(step_rewards), group_size):
        rows = range(start, start + group_size)
        together = torch.cat([step_rewards[row] for row in rows]).detach()
        if together.numel() < 2 or together.max() == together.min():
            continue
        for row in rows:
            normalized = (step_rewards[row].detach() - together.mean()) / (together.std() + eps)
            ends_here[row].index_add_(0, step_ends[row].long(), normalized)
    return ends_here.flip(-1).cumsum(-1).flip(-1)  # the sum over the steps that end here or later


def _check_group_size(group_size: int, batch: int) -> None:
    require(
        isinstance(group_size, int) and group_size >= 2,
        f"group_size should be an integer of at least 2, but is {group_size}",
    )
    require(
        batch > 0 and batch % group_size == 0,
        f"group_size should divide the batch of {batch}, but is {group_size}",
    )


# --- The objective ------------------------------------------------------------------------------


@shape_checked
def calc_single_update_objective(
    logprobs: Float[Tensor, "batch completion"],
    advantages: Float[Tensor, "batch"],
    mask: Bool[Tensor, "batch completion"],
) -> Float[Tensor, ""]:
    """Average exp(logprobs - detached logprobs) A over each completion, then over the batch.

    With one update per rollout (as in GRPO, section 4.2) the old policy is the current one: the
    ratio is 1 and never clips, and only its gradient remains, that of the log-probability.
    `calc_grpo_objective` then gives the same gradient; this is the only part of it at work.

    What is masked out may be NaN or inf, and reaches neither the value nor the gradient. An empty
    completion counts as 0. Detach `advantages`: no gradient reaches them.
    """
    logprobs = logprobs.masked_fill(~mask, 0.0)
    ratio = torch.exp(logprobs - logprobs.detach())
    return _mean_over_completions(ratio * advantages.detach()[:, None], mask)


@shape_checked
def calc_per_token_kl(
    logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return the k3 estimate of KL(policy ‖ reference) at each token (GRPO, eq. 4).

    k3 = exp(d) - 1 - d with d = ref_logprobs - logprobs, never negative. `expm1` keeps the digits
    that exp(d) - 1 loses when d is small. Detach `ref_logprobs`: no gradient reaches them.
    """
    d = ref_logprobs.detach() - logprobs
    return torch.expm1(d) - d


@shape_checked
def calc_grpo_objective(
    logprobs: Float[Tensor, "batch completion"],
    old_logprobs: Float[Tensor, "batch completion"],
    ref_logprobs: Float[Tensor, "batch completion"] | None,
    advantages: Float[Tensor, "batch"] | Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
    clip_coef: float = 0.2,
    clip_coef_high: float | None = None,
    beta: float = 0.04,
) -> Float[Tensor, ""]:
    """Average min(ratio A, clip(ratio) A) - beta k3 over each completion, then over the batch.

    GRPO, eq. 3. ratio = exp(logprobs - old_logprobs), clipped to [1 - clip_coef, 1 +
    clip_coef_high] (`clip_coef` unless given; 0 is given). An empty completion counts as 0. Detach
    `old_logprobs`, `ref_logprobs` and `advantages`: no gradient reaches them. What is masked out
    may be NaN or inf in each tensor, and reaches neither the value nor the gradient. With beta 0
    `ref_logprobs` is not read.

    Raises ValueError if `ref_logprobs` is None, unless beta is 0.
    """
    high = clip_coef if clip_coef_high is None else clip_coef_high
    require(
        beta == 0 or ref_logprobs is not None,
        f"ref_logprobs should be given when beta is not 0, but is None and beta is {beta}",
    )
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(logprobs)
    advantages = advantages.detach().masked_fill(~mask, 0.0)
    ratio = calc_ratio(logprobs, old_logprobs, mask)
    clipped = ratio.clamp(1 - clip_coef, 1 + high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if beta != 0:
        kl = calc_per_token_kl(
            logprobs.masked_fill(~mask, 0.0), ref_logprobs.masked_fill(~mask, 0.0)
        )
        objective = objective - beta * kl
    return _mean_over_completions(objective, mask)


def _mean_over_completions(
    per_token: Float[Tensor, "batch completion"], mask: Bool[Tensor, "batch completion"]
) -> Float[Tensor, ""]:
    """Average over each completion, then over the batch."""
    return masked_mean(per_token, mask, dim=-1).mean()


# --- The trainer --------------------------------------------------------------------------------


@dataclass
class GrpoArgs(RLHFArgs):
    """Say what a GRPO run is made of. A rollout has batch_size completions of batch_size /
    group_size prompts. `kl_coef` is the paper's beta, `kl_in` is "loss".

    The fields about values and token rewards, the last group in `RLHFArgs`, are not read.
    """

    kl_in: Literal["loss"] = "loss"
    kl_coef: PositiveOrZero = 0.04
    group_size: Annotated[int, Range(2)] = 8  # A prompt gets this many completions.
    advantage_scale: Literal["group", "batch", "none"] = "group"
    # k3 is averaged over completions, the exact KL over the vocabulary and over tokens.
    kl_kind: Literal["k3", "exact"] = "k3"

    # Turns (chapter 10)
    environment: Callable[..., str | None] | None = None  # It answers the policy's turns.
    turn_end: str = ">"  # A turn ends with this text.
    max_calls: CountOrZero = 2  # The environment answers at most this often in a completion.
    environment_seconds: Positive = 10.0  # A call that takes longer has failed.

    def __post_init__(self):
        super().__post_init__()
        self.make_environment()  # raises now what it would raise later
        require(
            self.minibatch_size % self.group_size == 0,
            f"group_size should divide a minibatch of batch_size / num_minibatches = "
            f"{self.minibatch_size} completions, but is {self.group_size}",
        )

    def make_environment(self) -> Environment | None:
        """Return what calls `environment`, within its limits; None if there is none."""
        if self.environment is None:
            return None
        limits = (self.turn_end, self.max_calls, self.environment_seconds)
        return Environment(self.environment, tuple(self.columns), *limits)


def make_grpo_memory(
    args: GrpoArgs,
    samples: Samples,
    scores: Float[Tensor, "batch"],
    logprobs: Float[Tensor, "batch completion"],
    ref_logprobs: Float[Tensor, "batch completion"] | None,
) -> ReplayMemory:
    """Turn a GRPO rollout's scores into advantages, one per completion, and a memory.

    Its fields are `input_ids`, `attention_mask`, `mask`, `logprobs`, `ref_logprobs` (or None) and
    `advantages`, scaled by `args.advantage_scale`. Every field is stored detached. Minibatches hold
    whole groups: they are cut by `num_minibatches`, `batches_per_learning_phase` and `group_size`
    of `args`.
    """
    return ReplayMemory(
        num_minibatches=args.num_minibatches,
        batches_per_learning_phase=args.batches_per_learning_phase,
        group_size=args.group_size,
        input_ids=samples.input_ids,
        attention_mask=samples.attention_mask,
        mask=samples.completion_mask,
        logprobs=logprobs.detach(),
        ref_logprobs=None if ref_logprobs is None else ref_logprobs.detach(),
        advantages=group_advantages(scores, args.group_size, args.advantage_scale),
    )


class GrpoTrainer(RLHFTrainer):
    """Train with GRPO: chapter 2's trainer, with whole groups in place of a value head."""

    args: GrpoArgs
    args_class = GrpoArgs
    model_class = TransformerWithLora

    @functools.cached_property
    def environment(self) -> Environment | None:
        """Return what answers the policy's turns (chapter 10), if anything does."""
        return self.args.make_environment()

    def sample(self, prompts: list[Prompt], columns: dict[str, list]) -> Samples:
        """Sample as chapter 2 does, or in turns with the environment, if there is one.

        What it writes is in the completions, but not in their mask. Records "calls", how often it
        was asked on average, and "environment_errors", how many rollouts it failed: these have
        nothing in their mask.
        """
        args = self.args
        if self.environment is None:
            return super().sample(prompts, columns)
        ids, mask = encode_prompts(self.model, prompts, args.gen_len, args.prepend_bos)
        rows = {"prompt": prompts, **columns}
        limits = (args.gen_len, args.temperature, args.top_k, args.top_p, self.generator)
        drawn = self.environment.sample(self.model, ids, mask, rows, *limits)
        self.metrics["calls"].append(drawn.n_calls.float().mean().item())
        self.metrics["environment_errors"].append(drawn.failed.sum().item())
        return Samples(**drawn.put_behind(ids, mask))

    def sample_and_score(self, n_prompts: int, group_size: int = 1) -> tuple[Samples, Tensor]:
        """Sample and score as chapter 2 does. A rollout that the environment failed moves no
        baseline: it gets the mean reward of the others in its group.
        """
        samples, scores = super().sample_and_score(n_prompts, group_size)
        failed = ~samples.completion_mask.any(-1)
        return samples, fill_failed(scores, failed, group_size)

    @torch.no_grad()
    def rollout_phase(self) -> ReplayMemory:
        """Sample whole groups, and score them under the policy and the reference.

        `batch_size` counts completions: `sample_and_score` gives `group_size` of them, side by
        side, for each prompt. `get_sample_logprobs` gives the old log-probs; with one update per
        rollout the sampler's own may stand in for them. The reference scores with either `kl_kind`,
        because kl_k3 is recorded, but not with kl_coef 0: `get_ref_logprobs`.
        """
        args = self.args
        # (1) sample, (2) score
        samples, scores = self.sample_and_score(args.batch_size // args.group_size, args.group_size)
        logprobs = samples.logprobs
        if args.updates_per_rollout > 1 or logprobs is None:
            logprobs = self.get_sample_logprobs(samples)
        ref_logprobs = self.get_ref_logprobs(samples)
        # (3) compare
        return make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)

    def compute_rlhf_objective(self, minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
        """Return GRPO objective + entropy bonus (maximised), of logits divided by the sampling
        temperature; the KL is k3, or exact.

        Entropy and exact KL are means over all tokens of the completions. Records clip_frac,
        approx_kl and kl_k3 by `self.record_ratios`. With kl_coef 0 the reference does not run.
        """
        args, mask, prompt_len = self.args, minibatch.mask, minibatch.prompt_len
        scored = self.score(minibatch.input_ids, minibatch.attention_mask, prompt_len)
        logprobs = scored.logprobs
        old_logprobs = self.get_old_logprobs(minibatch, logprobs)
        # (4) weight
        objective = calc_grpo_objective(
            logprobs,
            old_logprobs,
            minibatch.ref_logprobs,
            minibatch.advantages,
            mask,
            args.clip_coef,
            args.clip_coef_high,
            beta=args.kl_coef if args.kl_kind == "k3" else 0.0,
        )
        entropy = self.measure_entropy(minibatch, scored)
        has_kl = args.kl_kind == "exact" and args.kl_coef > 0
        kl = self.measure_kl(minibatch, scored) if has_kl else 0.0
        self.record_ratios(logprobs, minibatch)
        return objective + args.ent_coef * entropy - args.kl_coef * kl


def measure_loss_and_gradient_at_start(trainer: GrpoTrainer) -> tuple[float, float]:
    """Return GRPO's objective, without KL and entropy, on a fresh rollout, and its gradient's norm.

    The objective itself, which is maximised, not a loss; the norm of the adapters' gradients taken
    together. The old log-probs are those of the same forward pass, at the sampling temperature, so
    every ratio is 1, and each group's advantages sum to 0: the objective is 0 up to rounding. Its
    gradient is not: watch the reward, not the objective. The trainer's parameters, generator and
    metrics are left as they were.

    Raises ValueError if ten rollouts in a row have constant rewards in every group.
    """
    state, metrics = trainer.generator.get_state(), copy.deepcopy(trainer.metrics)
    samples_table = trainer.samples_table
    memory = trainer.rollout_phase()
    for _ in range(9):
        if memory.advantages.any():
            break
        memory = trainer.rollout_phase()
    trainer.generator.set_state(state)
    trainer.metrics = metrics
    trainer.samples_table = samples_table
    require(
        bool(memory.advantages.any()),
        "reward_fn should tell completions apart, but all are equal in every group",
    )
    # SOLUTION START
    ids = memory.input_ids
    logits = trainer.model(ids, memory.attention_mask)
    logprobs = get_logprobs(logits, ids, memory.prompt_len, trainer.args.temperature)
    # The old log-probs come from this very forward, so that every ratio is exactly 1.
    objective = calc_grpo_objective(
        logprobs, logprobs.detach(), None, memory.advantages, memory.mask, beta=0.0
    )
    adapters = trainer.model.trainable_parts()["adapters"]
    gradients = torch.autograd.grad(objective, adapters)
    return objective.item(), nn.utils.get_total_norm(gradients).item()
    # SOLUTION END
