"""Chapter 2: the PPO trainer.

Builds PPO for language models: rewards on whole completions, a value head, generalised advantage
estimation, the clipped objective in its parts, and a trainer that alternates rollouts and learning.

Simplified: one process, one learning rate schedule, no adaptive KL coefficient, rewards normalised
within each rollout instead of by running statistics.

Papers: PPO (Schulman et al., 2017, arXiv:1707.06347); GAE (Schulman et al., 2015,
arXiv:1506.02438); RLHF of language models (Ziegler et al., 2019, arXiv:1909.08593); "The N+
Implementation Details of RLHF with PPO" (Huang et al., 2024, arXiv:2403.17031).
"""

import copy
import re
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

from solutions.ch0_sampling import (
    Samples,
    at_least_float32,
    calc_entropy,
    encode_prompts,
    get_logprobs,
    masked_mean,
    sample_completions,
)
from solutions.ch1_lora import ATTENTION_SITES, TransformerWithLora
from utils.models.blocks import Parts
from utils.models.corpus import NEGATIVE_WORDS, POSITIVE_WORDS
from utils.models.forward import Formulas, Scores, get_scorer, read_logits
from utils.prompts import Prompt, show_prompt
from utils.rewards import call_reward_fn
from utils.run_folder import load_checkpoint, restore_generator
from utils.tracking import Run, check_same_args, describe_args, format_samples
from utils.validation import (
    Count,
    CountOrZero,
    Fraction,
    Positive,
    PositiveOrZero,
    check_fields,
    require,
    shape_checked,
)

# --- Rewards ------------------------------------------------------------------------------------


def reward_fn_char_count(samples: list[str], char: str = ".") -> Float[Tensor, "batch"]:
    """Count how often `char` occurs in each completion, as floats."""
    return torch.tensor([float(text.count(char)) for text in samples])


def reward_fn_sentiment(samples: list[str]) -> Float[Tensor, "batch"]:
    """Return each completion's sentiment, in [-1, 1], from the word lists of the review corpus.

    (positive - negative) / (positive + negative) words, in any case; 0 if neither occurs. A word is
    a run of letters, whatever is around it: "great", *lovely* and [dull] count.
    """
    rewards = []
    for text in samples:
        words = re.findall("[a-z]+", text.lower())
        positive = sum(word in POSITIVE_WORDS for word in words)
        negative = sum(word in NEGATIVE_WORDS for word in words)
        rewards.append((positive - negative) / max(positive + negative, 1))
    return torch.tensor(rewards)


@shape_checked
def normalize_reward(rewards: Float[Tensor, "batch"], eps: float = 1e-5) -> Float[Tensor, "batch"]:
    """Return (rewards - mean) / (std + eps), a new tensor; zeros for one reward or equal ones.

    Equal means max == min: rewards 1e-7 apart are normalised.
    """
    rewards = rewards.detach()
    # In floats a constant minus its mean need not be 0, and 1e-8 / eps is not small.
    if rewards.numel() < 2 or rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)


# --- The value head -----------------------------------------------------------------------------


class TransformerWithValueHeadLora(TransformerWithLora):
    """Add a linear value head, on the final layer norm's output, to `TransformerWithLora`.

    The head starts at zero: an untrained one predicts 0 everywhere and adds no noise to the first
    advantages.
    """

    def __init__(
        self,
        base: TransformerBridge,
        rank: int = 4,
        alpha: float = 32,
        sites: tuple[str, ...] = ATTENTION_SITES,
    ):
        super().__init__(base, rank, alpha, sites)
        device = next(base.parameters()).device
        self.value_head = nn.Linear(self.cfg.d_model, 1, device=device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward_with_value_head(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Int[Tensor, "batch seq"] | None = None,
    ) -> tuple[Float[Tensor, "batch seq vocab"], Float[Tensor, "batch seq"]]:
        """Return logits and values. Both at position t are about token t + 1: the
        logits of the next token, the value of the state in which that token is chosen.

        The head reads `ln_final.hook_out`: what the unembedding reads, affine part included. A
        bfloat16 output is cast: the head and its values are in float32. No hook is left behind.
        Without a mask every token is attended to.
        """
        hidden: list[Float[Tensor, "batch seq d_model"]] = []

        def read_hidden(x: Tensor, hook) -> None:
            hidden.append(x)

        logits = self._run([("ln_final.hook_out", read_hidden)], input_ids, attention_mask)
        values = self.value_head(hidden[0].to(self.value_head.weight.dtype))
        return logits, rearrange(values, "batch seq 1 -> batch seq")

    def get_parts(self) -> Parts:
        return replace(super().get_parts(), value_head=self.value_head)

    def trainable_parts(self) -> dict[str, list[nn.Parameter]]:
        return super().trainable_parts() | {"value_head": list(self.value_head.parameters())}

    def trainable_state(self) -> dict[str, Tensor]:
        head = {f"value_head.{k}": v.data for k, v in self.value_head.named_parameters()}
        return super().trainable_state() | head


# --- Rewards and advantages of tokens -----------------------------------------------------------


@shape_checked
def compute_token_rewards(
    scores: Float[Tensor, "batch"],
    mask: Bool[Tensor, "batch completion"],
    logprobs: Float[Tensor, "batch completion"] | None = None,
    ref_logprobs: Float[Tensor, "batch completion"] | None = None,
    kl_coef: float = 0.0,
) -> Float[Tensor, "batch completion"]:
    """Return the score on the last true position, minus kl_coef * k1 at every true position.

    k1 = logprobs - ref_logprobs, a one-sample estimate of the KL (Ziegler et al., eq. 2). It is
    detached: as a reward it's a number that the policy is paid, not a loss. Outside the mask, where
    log-probs may be NaN, the reward is 0.

    Raises ValueError if log-probs are missing where kl_coef is not 0.
    """
    from_here_on = mask.flip(-1).cumsum(-1).flip(-1)  # true positions at t or later
    is_last = mask & (from_here_on == 1)
    rewards = torch.where(is_last, scores.detach()[:, None], 0.0)
    if kl_coef == 0:
        return rewards
    require(logprobs is not None, "logprobs should be given when kl_coef is not 0, but is None")
    require(ref_logprobs is not None, "ref_logprobs should be given when kl_coef is not 0")
    k1 = (logprobs - ref_logprobs).detach()
    return rewards - kl_coef * k1.masked_fill(~mask, 0.0)


@shape_checked
@torch.no_grad()
def compute_advantages(
    values: Float[Tensor, "batch completion"],
    token_rewards: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Float[Tensor, "batch completion"]:
    """Estimate advantages by GAE (Schulman et al., 2015, eq. 16), backwards in time.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}. V_t is the value of
    the state before token t is emitted. After the last true token V is 0, for rows that were cut
    short too. Outside the mask A is 0, even where the inputs are NaN. Detached. Returns are A + V.
    """
    values = values.masked_fill(~mask, 0.0)
    token_rewards = token_rewards.masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage) * mask[:, t]
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages


@shape_checked
def normalize_advantages(
    advantages: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
    eps: float = 1e-8,
) -> Float[Tensor, "batch completion"]:
    """Return (advantages - mean) / (std + eps) of the true positions; 0 outside, even where the
    input is NaN, and zeros if one position is true or all are equal.

    Computed once for a whole rollout: in a small minibatch the mean is so noisy that subtracting it
    could flip the sign of an advantage. Detached.
    """
    kept = advantages.detach()[mask]
    normalized = torch.zeros_like(advantages)
    if kept.numel() > 1 and kept.max() > kept.min():
        normalized[mask] = (kept - kept.mean()) / (kept.std() + eps)
    return normalized


# --- The objective in its parts -----------------------------------------------------------------


@shape_checked
def calc_clipped_surrogate_objective(
    logprobs: Float[Tensor, "batch completion"],
    old_logprobs: Float[Tensor, "batch completion"],
    advantages: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
    clip_coef: float = 0.2,
    clip_coef_high: float | None = None,
) -> Float[Tensor, ""]:
    """Return the masked mean of min(ratio A, clip(ratio, 1 - clip_coef, 1 + clip_coef_high) A).

    PPO, eq. 7, with ratio = exp(logprobs - old_logprobs); `clip_coef_high` is `clip_coef` unless
    given. The minimum takes away what the policy would gain beyond the interval, and leaves what it
    would lose there. `old_logprobs` and `advantages` are constants: detached. NaN outside the mask
    affects neither the result nor a gradient; with no true position the result is 0.
    """
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = calc_ratio(logprobs, old_logprobs, mask)
    advantages = advantages.detach().masked_fill(~mask, 0.0)
    clipped = ratio.clamp(1 - clip_coef, 1 + high)
    return masked_mean(torch.minimum(ratio * advantages, clipped * advantages), mask)


def calc_ratio(
    logprobs: Float[Tensor, "batch completion"],
    old_logprobs: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
) -> Float[Tensor, "batch completion"]:
    """Return exp(logprobs - old_logprobs), the probability ratio of PPO; 1 outside the mask.

    Masked and bounded before exp: behind a clip or a mask its gradient is multiplied by 0, and
    0 * nan and 0 * inf are nan. exp(80) is 5e34, near the end of float32.
    """
    logratio = at_least_float32(logprobs - old_logprobs.detach()).masked_fill(~mask, 0.0)
    return logratio.clamp(max=80.0).exp()


@shape_checked
def calc_value_function_loss(
    values: Float[Tensor, "batch completion"],
    old_values: Float[Tensor, "batch completion"],
    returns: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
    vf_coef: float = 0.5,
    clip_coef: float | None = None,
) -> Float[Tensor, ""]:
    """Return vf_coef / 2 times the masked mean of (values - returns)^2 (minimised).

    The 1/2, a convention of PPO implementations, cancels the 2 of the square's gradient.

    With `clip_coef`, it's elementwise the larger of that error and the error of values held within
    clip_coef of `old_values` (the value clipping of the N+ details). `old_values` and `returns` are
    constants: detached. NaN outside the mask affects neither the loss nor a gradient; with no true
    position the loss is 0.
    """
    values = values.masked_fill(~mask, 0.0)
    old_values = old_values.detach().masked_fill(~mask, 0.0)
    returns = returns.detach().masked_fill(~mask, 0.0)
    errors = (values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.maximum(errors, (clipped - returns).square())
    return vf_coef / 2 * masked_mean(errors, mask)


@shape_checked
def calc_entropy_bonus(
    logits: Float[Tensor, "batch completion vocab"],
    mask: Bool[Tensor, "batch completion"],
    ent_coef: float,
) -> Float[Tensor, ""]:
    """Return ent_coef times the masked mean of the policy's entropy, in nats.

    NaN outside the mask affects neither the bonus nor a gradient; with no true position the bonus
    is 0. Logits in the hundreds, or -inf, don't give NaN, not even in the gradient.
    """
    entropies = calc_entropy(logits[mask])  # [true positions]: nothing is computed for the others
    return ent_coef * entropies.sum() / max(entropies.numel(), 1)


@shape_checked
def calc_kl_penalty(
    logits: Float[Tensor, "batch completion vocab"],
    ref_logits: Float[Tensor, "batch completion vocab"],
    mask: Bool[Tensor, "batch completion"],
    kl_coef: float,
) -> Float[Tensor, ""]:
    """Return kl_coef times the masked mean of the exact KL(policy ‖ reference), nats per token.

    KL = sum_v p_v (log p_v - log q_v), over the whole vocabulary and not from the sampled token.
    The reference is a constant: detached. NaN outside the mask affects neither the penalty nor a
    gradient; with no true position the penalty is 0.
    """
    logprobs = at_least_float32(logits[mask]).log_softmax(-1)  # [true positions, vocab]
    ref_logprobs = at_least_float32(ref_logits.detach()[mask]).log_softmax(-1)
    # A token that the policy cannot emit counts 0, but 0 * (-inf - q) would be nan.
    logratio = torch.where(logprobs == -torch.inf, 0.0, logprobs - ref_logprobs)
    kl = (logprobs.exp() * logratio).sum(-1)
    return kl_coef * kl.sum() / max(kl.numel(), 1)


# --- Arguments, optimizer and memory ------------------------------------------------------------


@dataclass
class RLHFArgs:
    """Say what a run is made of. The defaults teach the embedded model to write film reviews in a
    good mood.

    Raises ValueError when it is made with an argument that its type doesn't allow.
    """

    # The run
    seed: CountOrZero = 1  # It decides the adapters at the start, the prompts and the samples.
    name: str | None = None  # The run's folder; None names it after the trainer and the time.
    runs_dir: str | Path = "runs"  # The folder that holds the run's folder.
    checkpoint_every: CountOrZero = 10  # Phases; 0 saves only at the end and when interrupted.
    samples_every: CountOrZero = 1  # Phases between tables of samples; 0: no table, and no panel.
    use_wandb: bool = False  # Weights & Biases logs offline unless you are logged in.
    wandb_project_name: str = "RLHF"
    wandb_entity: str | None = None

    # The model
    base_model: str | Path = "embedded"  # This, a local folder, or a name on the Hugging Face hub.
    lora_rank: Count = 4
    lora_alpha: Positive = 32
    lora_sites: tuple[str, ...] = ATTENTION_SITES
    device: str | None = None  # None takes the GPU if there is one.
    dtype: torch.dtype | None = None  # Of the base, None as `load_base_model`; adapters: float32.

    # The task
    prefix: str = "This movie is"  # It is the prompt, unless prompts are given.
    prompts: Sequence[Prompt] | None = None  # Strings or chats; each rollout draws from them.
    columns: dict[str, list] = field(default_factory=dict)  # Each has a value for each prompt.
    reward_fn: Callable[..., Float[Tensor, "batch"]] = reward_fn_sentiment

    # Rollouts
    total_phases: Count = 100  # A phase is one rollout and the learning from it.
    batch_size: Count = 128  # A rollout has this many completions.
    gen_len: Count = 30  # A completion has at most this many tokens.
    temperature: Positive = 1.0
    # Log-probs ignore top-k and top-p, so training with them is off-policy (chapter 9).
    top_k: Count | None = None
    top_p: Fraction | None = None
    prepend_bos: bool = True

    # Learning
    num_minibatches: Count = 4
    batches_per_learning_phase: Count = 2  # Learning goes over a rollout this many times (epochs).
    base_lr: PositiveOrZero = 1e-3  # The adapters learn at this rate.
    max_grad_norm: Positive = 1.0
    warmup_steps: CountOrZero = 20  # Phases until the learning rates are at their full size.
    final_scale: PositiveOrZero = 0.1  # The learning rates end at this share of that size.

    # The objective
    clip_coef: Fraction = 0.2
    clip_coef_high: PositiveOrZero | None = None  # None is clip_coef.
    ent_coef: PositiveOrZero = 0.001
    kl_coef: PositiveOrZero = 0.2
    kl_in: Literal["loss", "reward"] = "loss"  # The exact KL, or k1 off the reward of each token.

    # Values and the rewards of tokens, which chapter 3 no longer reads
    normalize_reward: bool = True  # The rewards of each rollout get mean 0 and std 1.
    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    head_lr: PositiveOrZero = 3e-3  # The value head learns at this rate.
    vf_coef: PositiveOrZero = 0.15
    vf_clip_coef: PositiveOrZero | None = None  # None does not clip the values.

    def __post_init__(self):
        for f in fields(self):
            if isinstance(getattr(self, f.name), float):  # NumPy's too, which no checkpoint holds
                setattr(self, f.name, float(getattr(self, f.name)))
        check_fields(self)
        require(callable(self.reward_fn), f"reward_fn should be a function: {self.reward_fn!r}")
        is_column = (
            not isinstance(self.prompts, str | dict) and getattr(self.prompts, "ndim", 1) == 1
        )
        if is_column and isinstance(self.prompts, Iterable):  # of a table, read by its labels
            self.prompts = list(self.prompts)
        require(
            self.prompts is None or (isinstance(self.prompts, list) and len(self.prompts) > 0),
            "prompts should be None or a list of at least one prompt, but is "
            f"{reprlib.repr(self.prompts)}",
        )
        require(
            isinstance(self.lora_sites, list | tuple),
            f"lora_sites should be a tuple of names, but is {self.lora_sites!r}",
        )
        self.lora_sites = tuple(self.lora_sites)
        require(
            isinstance(self.columns, dict) and "prompts" not in self.columns,
            f"columns should be a dict without 'prompts', but is {reprlib.repr(self.columns)}",
        )
        # As lists: a pandas column that was sorted or filtered would be read by its old labels.
        self.columns = {name: list(column) for name, column in self.columns.items()}
        for name, column in self.columns.items():
            require(
                len(column) == len(self.get_prompts()),
                f"columns should hold a value for each of {len(self.get_prompts())} prompts, but "
                f"{name!r} has {len(column)}",
            )
        require(
            self.batch_size % self.num_minibatches == 0,
            f"batch_size should be a multiple of num_minibatches = {self.num_minibatches}, but is "
            f"{self.batch_size}",
        )

    def get_prompts(self) -> Sequence[Prompt]:
        return [self.prefix] if self.prompts is None else self.prompts

    @property
    def minibatch_size(self) -> int:
        return self.batch_size // self.num_minibatches

    @property
    def updates_per_rollout(self) -> int:
        return self.num_minibatches * self.batches_per_learning_phase


def get_optimizer_and_scheduler(
    args: RLHFArgs, model: TransformerWithLora
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Return AdamW that maximises, with a group for each part of the model, and its schedule.

    `model.trainable_parts()` gives the parts: "adapters", which learn at `base_lr`, and, if the
    model has one, "value_head", at `head_lr`.

    At step k (one per phase) the learning rates are scaled by (k + 1) / warmup_steps while
    k < warmup_steps, then linearly from 1 down to final_scale at k = total_phases (or one step
    after the warm-up, if that is later), and then stay there. Adam's eps is 1e-5, and there is no
    weight decay.
    """
    lrs = {"adapters": args.base_lr, "value_head": args.head_lr}
    groups = [{"params": part, "lr": lrs[name]} for name, part in model.trainable_parts().items()]
    optimizer = torch.optim.AdamW(groups, eps=1e-5, weight_decay=0.0, maximize=True)

    def get_scale(k: int) -> float:
        if k < args.warmup_steps:
            return (k + 1) / args.warmup_steps
        decay_steps = max(args.total_phases - args.warmup_steps, 1)
        progress = min((k - args.warmup_steps) / decay_steps, 1.0)
        return 1.0 + progress * (args.final_scale - 1.0)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, get_scale)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplayMinibatch:
    """Hold some rows of a rollout; a field is None if it wasn't computed."""

    input_ids: Int[Tensor, "rows seq"]
    attention_mask: Int[Tensor, "rows seq"]
    mask: Bool[Tensor, "rows completion"]
    logprobs: Float[Tensor, "rows completion"]  # of the policy that sampled
    advantages: Float[Tensor, "rows completion"] | Float[Tensor, "rows"]
    ref_logprobs: Float[Tensor, "rows completion"] | None = None
    values: Float[Tensor, "rows completion"] | None = None
    returns: Float[Tensor, "rows completion"] | None = None

    @property
    def prompt_len(self) -> int:
        """Return the number of columns before the completions."""
        return self.input_ids.shape[1] - self.mask.shape[1]

    def get_fields(self) -> dict[str, Any]:
        """Return the tensors by name."""
        return {f.name: getattr(self, f.name) for f in fields(ReplayMinibatch)}

    def get_rows(self, chosen: Int[Tensor, "rows"]) -> "ReplayMinibatch":
        """Return these rows of every field."""
        rows: dict[str, Any] = {
            name: None if x is None else x[chosen.to(x.device)]
            for name, x in self.get_fields().items()
        }
        return ReplayMinibatch(**rows)


@dataclass(frozen=True, eq=False)
class ReplayMemory(ReplayMinibatch):
    """Hold all rows of a rollout, one per completion, and how learning cuts them into minibatches.

    `ReplayMemory(input_ids=..., mask=..., ...)`; each field of `ReplayMinibatch` is an attribute,
    and in every minibatch too. `group_size` consecutive rows are a group, which is never split
    between minibatches.

    Raises ValueError, with the name, for a field with a different number of rows than the first,
    and for a `group_size` that doesn't divide the number of rows.
    """

    num_minibatches: int = 1
    batches_per_learning_phase: int = 1
    group_size: int = 1

    def __post_init__(self):
        n_rows = len(self.input_ids)
        for name, rows in self.get_fields().items():
            n = n_rows if rows is None else len(rows)
            require(n == n_rows, f"{name} should have {n_rows} rows, but has {n}")
        require(
            self.group_size >= 1 and n_rows % self.group_size == 0,
            f"group_size should divide the {n_rows} rows, but is {self.group_size}",
        )

    def get_minibatches(self, generator: torch.Generator | None = None) -> list[ReplayMinibatch]:
        """Yield every row once per epoch, in a new random order each time, the same for all fields.

        `num_minibatches` an epoch, as even as whole groups allow.
        """
        device = generator.device if generator else None
        groups = torch.arange(len(self.input_ids), device=device).view(-1, self.group_size)
        require(
            1 <= self.num_minibatches <= len(groups),
            f"num_minibatches should be in [1, {len(groups)}], the number of groups, but is "
            f"{self.num_minibatches}",
        )
        minibatches = []
        for _ in range(self.batches_per_learning_phase):
            order = torch.randperm(len(groups), generator=generator, device=device)
            for chosen in groups[order].tensor_split(self.num_minibatches):
                minibatches.append(self.get_rows(chosen.flatten()))
        return minibatches


def make_replay_memory(
    args: RLHFArgs,
    samples: Samples,
    scores: Float[Tensor, "batch"],
    logprobs: Float[Tensor, "batch completion"],
    ref_logprobs: Float[Tensor, "batch completion"] | None,
    values: Float[Tensor, "batch completion"],
) -> ReplayMemory:
    """Turn a rollout's scores into token rewards, advantages, returns and a memory.

    Scores are normalised first if `args.normalize_reward` says so. The KL is charged here only if
    `args.kl_in` is "reward". Returns are taken before the advantages are normalised: they are what
    the values regress on. Every field is stored detached.
    """
    mask = samples.completion_mask
    rewards = normalize_reward(scores) if args.normalize_reward else scores
    kl_coef = args.kl_coef if args.kl_in == "reward" else 0.0
    token_rewards = compute_token_rewards(rewards, mask, logprobs, ref_logprobs, kl_coef)
    advantages = compute_advantages(values, token_rewards, mask, args.gamma, args.lam)
    return ReplayMemory(
        num_minibatches=args.num_minibatches,
        batches_per_learning_phase=args.batches_per_learning_phase,
        input_ids=samples.input_ids,
        attention_mask=samples.attention_mask,
        mask=mask,
        logprobs=logprobs.detach(),
        ref_logprobs=None if ref_logprobs is None else ref_logprobs.detach(),
        values=values.detach(),
        advantages=normalize_advantages(advantages, mask),
        returns=advantages + values.detach().masked_fill(~mask, 0.0),
    )


# --- The trainer --------------------------------------------------------------------------------


class RLHFTrainer:
    """Train with PPO, `args.total_phases` times:

        rollout_phase    sample completions, score them, compute advantages -> ReplayMemory
        learning_phase   for each minibatch: compute_rlhf_objective, backward, optimizer step

    Every rollout samples anew, whether or not the last one was learned from; `args.seed` decides
    what the rollouts are, prompts included.
    `history` has one row of metrics per phase, as `metrics.jsonl` in the run's folder has.
    `model_class` is what is built when no model is given.
    """

    args_class: type[RLHFArgs] = RLHFArgs
    model_class: type[TransformerWithLora] = TransformerWithValueHeadLora

    def __init__(self, args: RLHFArgs, model: TransformerWithLora | None = None):
        require(
            isinstance(args, self.args_class),
            f"args should be {self.args_class.__name__}, but is {type(args).__name__}",
        )
        require(
            model is None or isinstance(model, self.model_class),
            f"model should be a {self.model_class.__name__}, but is a {type(model).__name__}",
        )
        self.args = args
        if model is None:
            with torch.random.fork_rng():
                torch.manual_seed(args.seed)  # of the adapters
                model = self.model_class.from_pretrained(
                    args.base_model,
                    args.lora_rank,
                    args.lora_alpha,
                    args.lora_sites,
                    args.device,
                    args.dtype,
                )
        self.model = model
        # Raises now if a prompt is too long:
        encode_prompts(model, args.get_prompts(), args.gen_len, args.prepend_bos)
        self.optimizer, self.scheduler = get_optimizer_and_scheduler(args, model)
        self.device = next(model.base.parameters()).device
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        self.phase = 0
        self.history: list[dict[str, float]] = []
        self.metrics: dict[str, list[float]] = defaultdict(list)  # of the phase under way
        self.samples_table = ""
        self.folder: Path | None = None  # made by train(), or that of a loaded checkpoint

    # Rollouts

    def sample_and_score(self, n_prompts: int, group_size: int = 1) -> tuple[Samples, Tensor]:
        """Sample `group_size` completions, side by side, for each of `n_prompts` random prompts."""
        args = self.args
        all_prompts = args.get_prompts()
        chosen = torch.randint(
            len(all_prompts), (n_prompts,), generator=self.generator, device=self.device
        )
        rows = chosen.repeat_interleave(group_size).tolist()
        prompts = [all_prompts[row] for row in rows]
        columns = {name: [column[row] for row in rows] for name, column in args.columns.items()}
        samples = self.sample(prompts, columns)
        scores = call_reward_fn(args.reward_fn, samples.texts, {"prompts": prompts} | columns)
        scores = scores.to(self.device)
        self._record_samples(prompts, samples, scores)
        if group_size > 1:
            groups = scores.view(n_prompts, group_size)
            is_constant = (groups == groups[:, :1]).all(-1)
            self.metrics["frac_reward_zero_std"].append(is_constant.float().mean().item())
        return samples, scores

    def sample(self, prompts: list[Prompt], columns: dict[str, list]) -> Samples:
        """Sample a completion for each prompt; the columns are for chapter 10 to use."""
        args = self.args
        return sample_completions(
            self.model,
            prompts,
            args.gen_len,
            args.temperature,
            args.top_k,
            args.top_p,
            self.generator,
            prepend_bos=args.prepend_bos,
        )

    def _record_samples(self, prompts: list[Prompt], samples: Samples, scores: Tensor) -> None:
        lengths = samples.completion_mask.sum(-1).float()
        self.metrics["reward"].append(scores.mean().item())
        self.metrics["reward_std"].append(scores.std().item() if len(scores) > 1 else 0.0)
        self.metrics["completion_len"].append(lengths.mean().item())
        if self.args.top_k or self.args.top_p:
            kept_mass = masked_mean(samples.log_kept_mass.exp(), samples.completion_mask)
            self.metrics["kept_mass"].append(kept_mass.item())
        ranked = scores.argsort(descending=True).tolist()
        shown = {"best": ranked[0], "median": ranked[len(ranked) // 2], "worst": ranked[-1]}
        self.samples_table = format_samples(
            [
                (which, scores[row].item(), show_prompt(prompts[row]), samples.texts[row])
                for which, row in shown.items()
            ]
        )

    def split_samples(self, samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield input ids and attention masks, one minibatch after the other.

        Scoring in minibatches takes no more memory than learning does.
        """
        rows = self.args.minibatch_size
        return zip(samples.input_ids.split(rows), samples.attention_mask.split(rows), strict=True)

    def score(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Int[Tensor, "batch seq"],
        prompt_len: int,
    ) -> Scores:
        """Return `logprobs` and `entropies` of completions at the sampling temperature, and
        `values` if the model has a value head, each [batch completion]; mask them before use.
        The entropies carry a gradient unless `ent_coef` is 0.

        They're what `get_logprobs`, `calc_entropy` and `select_completion` would make of the
        model's logits and values, only faster (`utils/models/forward.py`); if a trial on a few
        tokens differs, these functions run instead. Inside `reference()`, under the reference.
        """
        args = self.args
        return get_scorer(self.model, self.get_formulas()).measure(
            input_ids, attention_mask, prompt_len, args.temperature, args.ent_coef > 0
        )

    def get_formulas(self) -> Formulas:
        """Return the functions that turn logits into parts of the objective, as you wrote them."""
        return Formulas(get_logprobs, calc_entropy_bonus, calc_kl_penalty)

    def get_sample_logprobs(self, samples: Samples) -> Float[Tensor, "batch completion"]:
        """Return the completions' log-probs under the model as it is, at the sampling
        temperature.
        """
        parts = [
            self.score(ids, mask, samples.prompt_len).logprobs
            for ids, mask in self.split_samples(samples)
        ]
        return torch.cat(parts)

    def get_old_logprobs(self, minibatch: ReplayMinibatch, logprobs: Tensor) -> Tensor:
        """Return log-probs of the policy that sampled: with one update per rollout it is the one
        that learns, so its own `logprobs` will do.
        """
        return minibatch.logprobs if self.args.updates_per_rollout > 1 else logprobs.detach()

    def get_ref_logprobs(self, samples: Samples) -> Float[Tensor, "batch completion"] | None:
        """Return the same under the reference; None without a KL term, where it never runs."""
        if self.args.kl_coef == 0:
            return None
        with self.model.reference():
            return self.get_sample_logprobs(samples)

    @torch.no_grad()
    def rollout_phase(self) -> ReplayMemory:
        """Sample, then score under the policy and the reference, at the sampling temperature.

        The old log-probs come from the same kind of forward pass that the ratio uses later, so that
        the first ratio is 1. No field carries a gradient, and no logits are kept.
        """
        args = self.args
        # (1) sample, (2) score
        samples, scores = self.sample_and_score(args.batch_size)
        logprobs, values = [], []
        for ids, attention_mask in self.split_samples(samples):
            scored = self.score(ids, attention_mask, samples.prompt_len)
            logprobs.append(scored.logprobs)
            values.append(scored.values)
        ref_logprobs = self.get_ref_logprobs(samples)
        # (3) compare
        return make_replay_memory(
            args, samples, scores, torch.cat(logprobs), ref_logprobs, torch.cat(values)
        )

    # Learning

    def compute_rlhf_objective(self, minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
        """Return surrogate - value loss + entropy bonus - KL penalty (maximised), of logits divided
        by the sampling temperature. The surrogate has the clips `args.clip_coef` and
        `args.clip_coef_high`, the value loss has `args.vf_clip_coef` as its `clip_coef`.

        Each part is a mean times its coefficient, which enters once. `measure_entropy` and
        `measure_kl` record what they return. Records clip_frac and approx_kl by `record_ratios`,
        and in `self.metrics["value_loss"]` what is subtracted for the values, with vf_coef in it.
        The exact KL is included if `args.kl_in` is "loss". No logits are kept.
        """
        args, mask, prompt_len = self.args, minibatch.mask, minibatch.prompt_len
        scored = self.score(minibatch.input_ids, minibatch.attention_mask, prompt_len)
        # (4) weight
        surrogate = calc_clipped_surrogate_objective(
            scored.logprobs,
            minibatch.logprobs,
            minibatch.advantages,
            mask,
            args.clip_coef,
            args.clip_coef_high,
        )
        value_loss = calc_value_function_loss(
            scored.values,
            minibatch.values,
            minibatch.returns,
            mask,
            vf_coef=1.0,
            clip_coef=args.vf_clip_coef,
        )
        entropy = self.measure_entropy(minibatch, scored)
        has_kl = args.kl_in == "loss" and args.kl_coef > 0
        kl = self.measure_kl(minibatch, scored) if has_kl else 0.0
        self.record_ratios(scored.logprobs, minibatch)
        self.metrics["value_loss"].append(args.vf_coef * value_loss.item())
        return surrogate - args.vf_coef * value_loss + args.ent_coef * entropy - args.kl_coef * kl

    def measure_entropy(
        self, minibatch: ReplayMinibatch, scored: Scores | Float[Tensor, "batch seq vocab"]
    ) -> Float[Tensor, ""]:
        """Return the policy's entropy at the sampling temperature, in nats per token.

        `scored` is what `score` gives, or the model's logits.
        """
        entropy = self._read_scores(minibatch, scored).calc_mean_entropy(minibatch.mask)
        self.metrics["entropy"].append(entropy.item())
        return entropy

    def measure_kl(
        self, minibatch: ReplayMinibatch, scored: Scores | Float[Tensor, "batch seq vocab"]
    ) -> Float[Tensor, ""]:
        """Return the exact KL from the reference, keeping none of its logits; `scored` as above."""
        kl = self._read_scores(minibatch, scored).calc_mean_kl(minibatch.mask)
        self.metrics["kl_exact"].append(kl.item())
        return kl

    def _read_scores(self, minibatch: ReplayMinibatch, scored: Scores | Tensor) -> Scores:
        if isinstance(scored, Scores):
            return scored
        ids, attention_mask = minibatch.input_ids, minibatch.attention_mask
        settings = (minibatch.prompt_len, self.args.temperature, self.get_formulas())
        return read_logits(self.model, scored, ids, attention_mask, *settings)

    @torch.no_grad()
    def record_ratios(self, logprobs: Tensor, minibatch: ReplayMinibatch) -> None:
        """Record how far the policy has moved from its sampler (clip_frac, and approx_kl: the k3
        estimate of KL(old ‖ new)), and from the reference if that ran (kl_k3).
        """
        args, mask = self.args, minibatch.mask
        logratio = logprobs - self.get_old_logprobs(minibatch, logprobs)
        ratio = logratio.exp()
        high = args.clip_coef if args.clip_coef_high is None else args.clip_coef_high
        outside = (ratio < 1 - args.clip_coef) | (ratio > 1 + high)
        self.metrics["clip_frac"].append(masked_mean(outside.float(), mask).item())
        approx_kl = masked_mean(torch.expm1(logratio) - logratio, mask)
        self.metrics["approx_kl"].append(approx_kl.item())
        if minibatch.ref_logprobs is not None:  # k3, from the sampled tokens alone
            d = minibatch.ref_logprobs - logprobs
            self.metrics["kl_k3"].append(masked_mean(torch.expm1(d) - d, mask).item())

    def learning_phase(self, memory: ReplayMemory) -> None:
        """Take one optimizer step for each minibatch, then one step of the schedule.

        The whole gradient is clipped to a norm of `max_grad_norm`. `self.generator`, whose state a
        checkpoint holds, shuffles the rows. Records "objective" and "grad_norm" of each minibatch,
        and once "lr", the adapters' learning rate in this phase.
        """
        for minibatch in memory.get_minibatches(self.generator):
            self.optimizer.zero_grad()
            objective = self.compute_rlhf_objective(minibatch)
            objective.backward()
            # (5) update
            grad_norm = nn.utils.clip_grad_norm_(
                self.model.trainable_parameters(), self.args.max_grad_norm, error_if_nonfinite=True
            )
            self.optimizer.step()
            self.metrics["objective"].append(objective.item())
            self.metrics["grad_norm"].append(grad_norm.item())
        self.metrics["lr"].append(float(self.scheduler.get_last_lr()[0]))
        self.scheduler.step()

    def train(self) -> list[dict[str, float]]:
        """Run all the phases that are left and return the history: the model is then the one from
        the last phase. `self.phase` counts the phases that are done; count one before
        `run.end_phase()`, which writes the count.

        If Ctrl-C or an error stops it, it goes back to the start of the phase, saves that, and
        says how to go on. Raises ValueError if `args.name` is the name of an earlier run.
        """
        with Run(self) as run:
            while self.phase < self.args.total_phases:
                self.metrics.clear()
                memory = self.rollout_phase()
                self.learning_phase(memory)
                self.phase += 1
                run.end_phase()  # a row of metrics, a table of samples, a checkpoint if one is due
        return self.history

    # Stopping and going on

    def get_state(self) -> dict:
        """Return a copy of everything that the rest of the run depends on."""
        state = {
            "args": describe_args(self.args),
            "phase": self.phase,
            "trainable": self.model.trainable_state(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "generator": self.generator.get_state(),
            "history": self.history,
        }
        return copy.deepcopy(state)

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a checkpoint, in its folder: `train()` gives what an uninterrupted run would.
        On another kind of device, which has other random numbers, it goes on with those.

        Raises ValueError if it is missing or damaged, or was made with other arguments.
        """
        state = load_checkpoint(Path(path))
        check_same_args(self.args, state["args"])
        self.set_state(state)
        self.folder = Path(path).parent

    def set_state(self, state: dict) -> None:
        self.model.load_trainable_state(state["trainable"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        restore_generator(self.generator, state["generator"])
        self.phase, self.history = state["phase"], list(state["history"])
