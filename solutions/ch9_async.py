"""Chapter 9: the sampler is not the learner.

Builds what a trainer needs once its rollouts come late, from a machine that computes with different
numbers, or from a different distribution than the one that is scored: a queue, gauges of the
mismatch, importance weights and masks, and an objective that can correct in three ways.

Simplified: one process plays both parts, so "late" is counted in updates and not in seconds; a
rollout has one sampler from its first token to its last (partial rollouts mix several).

Papers: IMPALA (Espeholt et al., 2018, arXiv:1802.01561); PPO (Schulman et al., 2017,
arXiv:1707.06347); AReaL (Fu et al., 2025, arXiv:2505.24298); truncated importance sampling for
rollouts (Yao et al., 2025, https://fengyao.notion.site/off-policy-rl).
"""

import contextlib
import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from solutions.ch0_sampling import Samples, at_least_float32, masked_mean
from solutions.ch1_lora import TransformerWithLora, find_lora_sites
from solutions.ch2_ppo import ReplayMemory, ReplayMinibatch, calc_ratio
from solutions.ch3_grpo import (
    GrpoArgs,
    GrpoTrainer,
    calc_grpo_objective,
    calc_single_update_objective,
    make_grpo_memory,
)
from utils.validation import CountOrZero, Positive, Range, require, shape_checked

# --- Too late -----------------------------------------------------------------------------------


class RolloutQueue:
    """Pass on rollouts in the order in which they came, so that each is `staleness` versions late.

    A version counts the updates of the policy. `len(queue)` says how many rollouts are waiting.
    Raises ValueError for a staleness that is not an integer of at least 0.
    """

    def __init__(self, staleness: int):
        require(
            isinstance(staleness, int) and staleness >= 0,
            f"staleness should be an integer of at least 0, but is {staleness!r}",
        )
        self.staleness = staleness
        self._waiting: deque[tuple[Any, int]] = deque()
        self._version = 0  # the newest that was named

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, rollout: Any, version: int) -> None:
        """Add a rollout that the policy of this version sampled.

        Raises a ValueError that names the version if it is below the version of an earlier `put` or
        `take` that was not refused.
        """
        self._move_on(version)
        self._waiting.append((rollout, version))

    def take(self, version: int) -> tuple[Any, int]:
        """Remove the oldest rollout, and return it with its age: how many versions ago it was
        sampled, now that the policy is at `version`.

        Raises ValueError unless `staleness` younger ones wait behind it, or if the
        version is below an earlier one. The queue then stays as it was.
        """
        require(
            len(self._waiting) > self.staleness,
            f"the queue should hold more than {self.staleness} rollouts before one is taken, but "
            f"holds {len(self._waiting)}",
        )
        self._move_on(version)
        rollout, sampled_at = self._waiting.popleft()
        return rollout, version - sampled_at

    def _move_on(self, version: int) -> None:
        require(
            version >= self._version,
            f"version should not go back from {self._version}, but is {version}",
        )
        self._version = version


def calc_stable_rate(delay: int) -> float:
    """Return the largest a for which x[t + 1] = x[t] - a x[t - delay] does not grow.

    That is gradient descent with rate a on x² / 2, with a gradient that is `delay` steps old. The
    answer is 2 sin(pi / (4 delay + 2)): 2 without a delay, about pi / (2 delay + 1) with a long
    one (Levin and May, 1976). Raises a ValueError that names the delay if it is not an integer of
    at least 0.
    """
    require(
        isinstance(delay, int) and delay >= 0,
        f"delay should be an integer of at least 0, but is {delay!r}",
    )
    return 2 * math.sin(math.pi / (4 * delay + 2))


# --- Not the same numbers -----------------------------------------------------------------------


@shape_checked
@torch.no_grad()
def measure_mismatch(
    logprobs: Float[Tensor, "batch completion"],
    sampler_logprobs: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
) -> dict[str, float]:
    """Measure how far the sampler is from the learner, on tokens that the sampler drew.

    "k3": the k3 estimate of KL(sampler ‖ learner), in nats per token. "max_ratio": the largest
    ratio of a token, learner / sampler. "effective_share": (sum w)² / (n sum w²) over the n
    completions, where w is the product of a completion's ratios: 1 if all weigh the same, 1 / n if
    one outweighs the rest. Completions without a token count in none of the three; without any
    token the three are 0, 1 and 1. `expm1` keeps the digits of a small k3, and a product too large
    for a float still has its share. What is masked out may be NaN or inf.
    """
    if not mask.any():
        return {"k3": 0.0, "max_ratio": 1.0, "effective_share": 1.0}
    logratio = at_least_float32(logprobs - sampler_logprobs).masked_fill(~mask, 0.0)
    of_tokens = logratio[mask]
    of_completions = logratio.sum(-1)[mask.any(-1)]
    weights = (of_completions - of_completions.max()).exp()  # their scale cancels
    share = weights.sum().square() / (len(weights) * weights.square().sum())
    return {
        "k3": (torch.expm1(of_tokens) - of_tokens).mean().item(),
        "max_ratio": of_tokens.max().exp().item(),
        "effective_share": share.item(),
    }


@shape_checked
def get_kept_logprobs(
    logits: Float[Tensor, "batch vocab"],
    tokens: Int[Tensor, "batch"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> tuple[Float[Tensor, "batch"], Float[Tensor, "batch"]]:
    """Return the log-probs of tokens under the distribution that they were drawn from, and the log
    of the probability that it kept.

    The distribution is that of chapter 0's `sample_next_token`: temperature, then the `top_k`
    likeliest, then the fewest of the likeliest whose share reaches `top_p` (1 keeps them all,
    however rare); what is kept is renormalised. A token that could not be drawn has -inf. The kept
    probability is that of softmax(logits / temperature), and its log is 0 without truncation.

    Raises a ValueError that names the argument for a temperature that is not above 0, top_k < 1 or
    top_p outside (0, 1].
    """
    require(temperature > 0, f"temperature should be above 0, but is {temperature}")
    require(top_k is None or top_k >= 1, f"top_k should be at least 1, but is {top_k}")
    require(top_p is None or 0 < top_p <= 1, f"top_p should be in (0, 1], but is {top_p}")
    logprobs, order = (at_least_float32(logits) / temperature).log_softmax(-1).sort(descending=True)
    kept = torch.ones_like(logprobs, dtype=torch.bool)
    if top_k is not None:
        kept[:, top_k:] = False
    if top_p is not None and top_p < 1:
        probs = logprobs.masked_fill(~kept, -torch.inf).softmax(-1)
        kept = kept & (probs.cumsum(-1) - probs < top_p)  # the likelier ones do not reach it yet
    kept_logprobs = logprobs.masked_fill(~kept, -torch.inf)
    log_kept_mass = kept_logprobs.logsumexp(-1)
    if bool(kept.all()):
        log_kept_mass = torch.zeros_like(log_kept_mass)
    renormalised = torch.empty_like(logprobs).scatter(
        -1, order, kept_logprobs - log_kept_mass[:, None]
    )
    return renormalised.gather(-1, tokens[:, None]).squeeze(-1), log_kept_mass


# --- Corrections --------------------------------------------------------------------------------


@shape_checked
@torch.no_grad()
def calc_importance_weights(
    logprobs: Float[Tensor, "batch completion"],
    sampler_logprobs: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
    cap: float | None = 2.0,
    level: str = "token",
) -> Float[Tensor, "batch completion"]:
    """Return min(ratio, cap) for each token, with ratio = exp(logprobs - sampler_logprobs).

    At level "sequence" the ratio of each token is the product over its completion. A cap of None
    truncates nothing. Detached, in the log-probs' dtype (at least float32), and 0 outside the mask,
    where the inputs may be NaN or inf. A log ratio, or a sequence's sum of them, counts as 80 if it
    is more: exp(80) still fits into float32.

    Raises a ValueError that names the argument for any other level, and for a cap that is not above
    0.
    """
    require(
        level in ("token", "sequence"), f"level should be 'token' or 'sequence', but is {level!r}"
    )
    require(cap is None or cap > 0, f"cap should be None or above 0, but is {cap}")
    logratio = at_least_float32(logprobs - sampler_logprobs).masked_fill(~mask, 0.0)
    if level == "sequence":
        logratio = logratio.sum(-1, keepdim=True).expand_as(logratio)
    ratio = logratio.clamp(max=80.0).exp()
    if cap is not None:
        ratio = ratio.clamp(max=cap)
    return ratio.masked_fill(~mask, 0.0)


@shape_checked
@torch.no_grad()
def mask_mismatched(
    logprobs: Float[Tensor, "batch completion"],
    sampler_logprobs: Float[Tensor, "batch completion"],
    mask: Bool[Tensor, "batch completion"],
    low: float = 0.5,
    high: float = 2.0,
    kind: str = "ratio",
) -> Bool[Tensor, "batch completion"]:
    """Return a new mask, without the tokens on which the sampler and the learner disagree.

    "ratio": those whose ratio, learner / sampler, lies outside [low, high]. "probability": those
    whose probability moved by more than `high`, up or down; `low` is not read. What is masked out
    may be NaN or inf.

    Raises a ValueError that names any other kind.
    """
    require(
        kind in ("ratio", "probability"),
        f"kind should be 'ratio' or 'probability', but is {kind!r}",
    )
    if kind == "ratio":
        ratio = calc_ratio(logprobs, sampler_logprobs, mask)
        return mask & (ratio >= low) & (ratio <= high)
    moved = (logprobs.exp() - sampler_logprobs.exp()).masked_fill(~mask, 0.0)
    return mask & (moved.abs() <= high)


@shape_checked
def calc_async_objective(
    logprobs: Float[Tensor, "batch completion"],
    sampler_logprobs: Float[Tensor, "batch completion"],
    advantages: Float[Tensor, "batch"],
    mask: Bool[Tensor, "batch completion"],
    correction: str = "none",
    clip_coef: float = 0.2,
    cap: float = 2.0,
) -> Float[Tensor, ""]:
    """Return the objective of a rollout that another policy sampled: GRPO's, without a KL term.

    It averages over each completion, then over the batch. With r = exp(logprobs -
    sampler_logprobs), a token contributes, depending on `correction`,

    - "none": A times a ratio of 1 that carries the gradient of the log-prob, as if the learner had
      sampled (`calc_single_update_objective`);
    - "clip": min(r A, clip(r, 1 - clip_coef, 1 + clip_coef) A), PPO's;
    - "truncate": the same as "none" times min(r, cap), a constant weight (TIS);
    - "mask": the same as "none" times r, also a constant; tokens whose r lies outside [1 / cap,
      cap] are left out, and the mean does not divide by their number either (IcePop).

    No gradient reaches `sampler_logprobs` and `advantages`. What is masked out may be NaN or inf,
    and no ratio is too large: it is clipped, truncated or left out, without a NaN in the gradient.
    A completion without a token counts as 0, and so does one with none left.

    Raises a ValueError that names any other correction.
    """
    require(
        correction in ("none", "clip", "truncate", "mask"),
        f"correction should be 'none', 'clip', 'truncate' or 'mask', but is {correction!r}",
    )
    if correction == "none":
        return calc_single_update_objective(logprobs, advantages, mask)
    if correction == "clip":
        return calc_grpo_objective(
            logprobs, sampler_logprobs, None, advantages, mask, clip_coef, beta=0.0
        )
    if correction == "mask":
        mask = mask_mismatched(logprobs, sampler_logprobs, mask, 1 / cap, cap)
    weights = calc_importance_weights(logprobs, sampler_logprobs, mask, cap)
    logprobs = logprobs.masked_fill(~mask, 0.0)
    ratio = torch.exp(logprobs - logprobs.detach())  # 1, with the gradient of the log-prob
    return masked_mean(ratio * weights * advantages.detach()[:, None], mask, dim=-1).mean()


# --- The trainer --------------------------------------------------------------------------------


@dataclass
class AsyncArgs(GrpoArgs):
    """Add to GRPO's arguments how late the rollouts are, what the sampler computes with, and how
    the objective corrects for both.
    """

    kl_coef: float = 0.0
    staleness: CountOrZero = 0  # Rollouts are this many phases late.
    correction: Literal["none", "clip", "truncate", "mask"] = "none"
    cap: Positive = 2.0
    # The sampler's weights are rounded to this many bits.
    sampler_bits: Annotated[int, Range(2)] | None = None


class StaleTrainer(GrpoTrainer):
    """Train with GRPO on rollouts that are late: chapter 3's trainer behind a `RolloutQueue`.

    The memory's log-probs are what the sampler said when it drew the tokens, and they reach the
    objective and the gauges as they are. A run that goes on from a checkpoint begins with an empty
    queue.
    """

    args: AsyncArgs
    args_class = AsyncArgs

    def __init__(self, args: AsyncArgs, model: TransformerWithLora | None = None):
        super().__init__(args, model)
        self.queue = RolloutQueue(args.staleness)

    def sample_and_score(self, n_prompts: int, group_size: int = 1) -> tuple[Samples, Tensor]:
        """Sample and score as the trainers before do, with the sampler's rounded weights."""
        if self.args.sampler_bits is None:
            return super().sample_and_score(n_prompts, group_size)
        with quantised(self.model, self.args.sampler_bits):
            return super().sample_and_score(n_prompts, group_size)

    @torch.no_grad()
    def sample_rollout(self) -> ReplayMemory:
        """Sample whole groups, and remember what the sampler said about each token."""
        args = self.args
        samples, scores = self.sample_and_score(args.batch_size // args.group_size, args.group_size)
        assert samples.logprobs is not None  # `sample_completions` keeps them
        ref_logprobs = self.get_ref_logprobs(samples)
        return make_grpo_memory(args, samples, scores, samples.logprobs, ref_logprobs)

    def rollout_phase(self) -> ReplayMemory:
        """Sample rollouts until one is late enough, and return it."""
        while len(self.queue) <= self.args.staleness:
            self.queue.put(self.sample_rollout(), self.phase)
        memory, age = self.queue.take(self.phase)
        self.metrics["age"].append(age)
        return memory

    def get_old_logprobs(self, minibatch: ReplayMinibatch, logprobs: Tensor) -> Tensor:
        """Return what the sampler said. Chapter 2's returns the learner's own with one update per
        rollout: on late rollouts every ratio would be 1, and every gauge silent."""
        return minibatch.logprobs

    def compute_rlhf_objective(self, minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
        """Return chapter 3's objective, or the corrected one (maximised), and record the ratios of
        learner to sampler as clip_frac and approx_kl.
        """
        args, advantages, mask = self.args, minibatch.advantages, minibatch.mask
        scored = self.score(minibatch.input_ids, minibatch.attention_mask, minibatch.prompt_len)
        self.record_ratios(scored.logprobs, minibatch)
        if args.correction == "none":
            objective = calc_single_update_objective(scored.logprobs, advantages, mask)
        else:
            pair = (scored.logprobs, minibatch.logprobs)
            limits = (args.correction, args.clip_coef, args.cap)
            objective = calc_async_objective(*pair, advantages, mask, *limits)
        return objective + args.ent_coef * self.measure_entropy(minibatch, scored)


def quantise(weight: Float[Tensor, "out in"], bits: int) -> Float[Tensor, "out in"]:
    """Round weights to 2^bits - 1 levels, evenly spaced up to the largest of each column. With 16
    bits, round them to bfloat16.
    """
    if bits == 16:
        return weight.bfloat16().to(weight.dtype)
    top = 2 ** (bits - 1) - 1
    step = weight.abs().amax(0, keepdim=True).clamp(min=1e-8) / top
    return (weight / step).round().clamp(-top, top) * step


@contextlib.contextmanager
def quantised(model: TransformerWithLora, bits: int) -> Iterator[None]:
    """Merge the adapters inside, and round the weights that they were merged into.

    `merged()` puts all of them back on leaving.
    """
    with model.merged():
        for site, linear in find_lora_sites(model.base).items():
            if site in model.adapters:
                linear.weight.data.copy_(quantise(linear.weight.data, bits))
        yield


# --- The clock ----------------------------------------------------------------------------------


def may_start(n_started: int, batch_size: int, version: int, eta: int) -> bool:
    """Return whether one more rollout may begin, after `n_started` others (AReaL, eq. 3).

    Rollouts fill batches of `batch_size` in the order in which they begin, and batch i is learned
    by the policy of version i. One may begin if its batch is at most `eta` versions ahead of the
    policy, which is at `version`.

    Raises a ValueError that names the argument if batch_size is below 1, or if one of the others is
    negative.
    """
    require(batch_size >= 1, f"batch_size should be at least 1, but is {batch_size}")
    for name, n in (("n_started", n_started), ("version", version), ("eta", eta)):
        require(n >= 0, f"{name} should be at least 0, but is {n}")
    return n_started // batch_size <= version + eta


def simulate(
    mode: str,
    lengths: Sequence[float],
    n_slots: int = 64,
    batch_size: int = 64,
    learn_s: float = 60.0,
    eta: int | None = None,
    n_steps: int = 200,
    seed: int = 0,
) -> dict[str, float]:
    """Simulate who waits for whom, by mode:

        "sync"      sample a batch, wait for its last completion, learn, sample again
        "overlap"   sample the next batch while learning from this one: one step off
        "partial"   stop all slots while learning, and let them go on with the new policy
        "async"     slots never wait, except for `may_start` with `eta`; None lets them all start

    `lengths` are seconds; each completion draws one. `n_slots` completions are sampled at a time,
    each as fast as if it were alone. Returns seconds per step, the share of the time that slots
    sample, and the mean and largest age of what is learned from, in versions.
    """
    rng = random.Random(seed)
    ages: list[int] = []
    now = sampling_s = 0.0
    if mode in ("sync", "overlap"):
        for _ in range(n_steps):
            free_at = [0.0] * n_slots
            for _ in range(batch_size):
                length = rng.choice(lengths)
                heapq.heapreplace(free_at, free_at[0] + length)
                sampling_s += length
            last = max(free_at)
            now += last + learn_s if mode == "sync" else max(last, learn_s)
            ages += [int(mode == "overlap")] * batch_size
        return _sum_up(now, n_steps, sampling_s, n_slots, ages)

    events: list[tuple[float, int, int | None]] = []  # when, in which order, begun at which version
    finished: list[int] = []  # of each completion that nobody has learned from: the version
    n_started = n_idle = version = 0
    is_learning = False

    def fill_slots() -> None:
        nonlocal n_started, n_idle, sampling_s
        while n_idle and (eta is None or may_start(n_started, batch_size, version, eta)):
            length = rng.choice(lengths)
            n_started, n_idle, sampling_s = n_started + 1, n_idle - 1, sampling_s + length
            heapq.heappush(events, (now + length, n_started, version))

    n_idle = n_slots
    fill_slots()
    while version < n_steps:
        now, _, begun = heapq.heappop(events)
        if begun is None:  # the learner is done: a new version
            version, is_learning = version + 1, False
        else:
            finished.append(begun)
            n_idle += 1
        if not is_learning and len(finished) >= batch_size:
            ages += [version - begun for begun in finished[:batch_size]]
            finished = finished[batch_size:]
            is_learning = True
            if mode == "partial":
                events = [(at + learn_s, order, b) for at, order, b in events]
                heapq.heapify(events)
            heapq.heappush(events, (now + learn_s, -1, None))
        if not (mode == "partial" and is_learning):
            fill_slots()
    return _sum_up(now, n_steps, sampling_s, n_slots, ages)


def _sum_up(
    seconds: float, n_steps: int, sampling_s: float, n_slots: int, ages: list[int]
) -> dict[str, float]:
    return {
        "seconds_per_step": seconds / n_steps,
        "sampling_share": min(1.0, sampling_s / (n_slots * seconds)),
        "mean_age": sum(ages) / len(ages),
        "max_age": float(max(ages)),
    }
