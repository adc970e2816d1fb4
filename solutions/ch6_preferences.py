"""Chapter 6: preferences.

Builds the human half of RLHF: pairs in which one is preferred, a reward model fitted to them, DPO,
which needs none, and ways of picking good samples. The person is simulated by a reward that is
known, so that every method can be checked against the truth.

Simplified: one reward model and no ensemble, trained on one kind of pair; a completion is scored as
its text followed by an eos, even if it was cut off.

Papers: Bradley and Terry (1952); rewards from human preferences (Christiano et al., 2017,
arXiv:1706.03741); InstructGPT (Ouyang et al., 2022, arXiv:2203.02155); over-optimisation (Gao et
al., 2022, arXiv:2210.10760); DPO (Rafailov et al., 2023, arXiv:2305.18290); statistical rejection
sampling (Liu et al., 2023, arXiv:2309.06657); best-of-n's KL (Beirami et al., 2024,
arXiv:2401.01879).
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm
from transformer_lens.model_bridge import TransformerBridge

from solutions.ch0_sampling import (
    Samples,
    encode_prompts,
    get_pad_token_id,
    sample_completions,
)
from solutions.ch1_lora import ATTENTION_SITES, TransformerWithLora, calc_sft_loss
from solutions.ch2_ppo import ReplayMemory
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer, group_advantages, make_grpo_memory
from solutions.ch5_rlvr import select_samples
from utils.models.corpus import NEGATIVE_WORDS, POSITIVE_WORDS
from utils.models.forward import get_scorer
from utils.preferences import Preferences
from utils.prompts import Prompt
from utils.rewards import check_rewards
from utils.validation import Count, Positive, require, shape_checked

# --- The person, simulated ----------------------------------------------------------------------

MOOD_WEIGHTS = {
    **{word: 1.5 - i / 14 for i, word in enumerate(POSITIVE_WORDS)},
    **{word: -1.5 + i / 14 for i, word in enumerate(NEGATIVE_WORDS)},
}


def reward_fn_true(samples: list[str], repeat_penalty: float = 1.0) -> Float[Tensor, "batch"]:
    """Return what the simulated person thinks of each completion: the true reward.

    Every mood word counts once, from +1.5 ("wonderful") to +0.5 ("perfect") and from -1.5
    ("bad") to -0.5 ("dreadful"). Each repetition of such a word costs `repeat_penalty`:
    more of a good thing is not better forever.
    """
    rewards = []
    for text in samples:
        moods = [word for word in re.findall("[a-z]+", text.lower()) if word in MOOD_WEIGHTS]
        liked = sum(MOOD_WEIGHTS[word] for word in set(moods))
        rewards.append(liked - repeat_penalty * (len(moods) - len(set(moods))))
    return torch.tensor(rewards, dtype=torch.float32)


def make_preferences(
    model: TransformerWithLora,
    prompts: Sequence[Prompt],
    n_pairs: int,
    noise: float = 2.0,
    gen_len: int = 40,
    seed: int = 0,
    true_reward: Callable[[list[str]], Float[Tensor, "batch"]] = reward_fn_true,
) -> tuple[Preferences, float]:
    """Sample pairs of completions and let the simulated person choose. `noise` is positive.

    The first of a pair is preferred with probability sigmoid((r_1 - r_2) / noise), r being the true
    reward (Bradley-Terry). The second result is the ceiling: the mean probability of the likelier
    choice, which is the highest accuracy that any model can expect on such labels.
    """
    require(noise > 0, f"noise should be positive, but is {noise}")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    picked = torch.randint(len(prompts), (n_pairs,), generator=generator, device=device)
    pair_prompts = [prompts[i] for i in picked.tolist()]
    twice = [prompt for prompt in pair_prompts for _ in range(2)]
    texts = sample_texts(model, twice, gen_len, generator)
    first, second = texts[::2], texts[1::2]
    rewards = check_rewards(true_reward(texts), texts)
    margins = (rewards[::2] - rewards[1::2]) / noise
    p_first = margins.sigmoid()
    uniform = torch.rand(n_pairs, generator=generator, device=device).cpu()
    is_first = (uniform < p_first).tolist()
    rows = list(zip(is_first, first, second, strict=True))
    chosen = [a if wins else b for wins, a, b in rows]
    rejected = [b if wins else a for wins, a, b in rows]
    ceiling = torch.maximum(p_first, 1 - p_first).mean().item()
    return Preferences(pair_prompts, chosen, rejected), ceiling


def sample_texts(
    model: TransformerWithLora,
    prompts: Sequence[Prompt],
    gen_len: int,
    generator: torch.Generator | None = None,
    rows: int = 256,
) -> list[str]:
    """Sample a completion for each prompt, `rows` at a time, and return the texts."""
    texts: list[str] = []
    for start in tqdm(range(0, len(prompts), rows), desc="sample", leave=False):
        batch = prompts[start : start + rows]
        texts += sample_completions(model, list(batch), gen_len, generator=generator).texts
    return texts


def encode_completions(
    model: TransformerWithLora, prompts: Sequence[Prompt], completions: Sequence[str]
) -> Samples:
    """Return prompts and completions as token ids, each completion followed by an eos.

    Raises ValueError if the longest prompt and the longest completion, with its eos, do not fit
    the model's context together.
    """
    tokenizer = model.tokenizer
    encoded = tokenizer(list(completions), add_special_tokens=False)["input_ids"]
    sequences = [[*ids, tokenizer.eos_token_id] for ids in encoded]
    longest = max(map(len, sequences))
    prompt_ids, prompt_mask = encode_prompts(model, list(prompts), longest, prepend_bos=True)
    mask = torch.tensor([[t < len(ids) for t in range(longest)] for ids in sequences])
    pad = get_pad_token_id(tokenizer)
    padded = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in sequences])
    mask, padded = mask.to(prompt_ids.device), padded.to(prompt_ids.device)
    return Samples(
        input_ids=torch.cat([prompt_ids, padded], dim=1),
        attention_mask=torch.cat([prompt_mask, mask.long()], dim=1),
        prompt_len=prompt_ids.shape[1],
        completion_mask=mask,
        texts=list(completions),
    )


# --- Bradley-Terry ------------------------------------------------------------------------------


@shape_checked
def calc_preference_loss(
    chosen_rewards: Float[Tensor, "batch"], rejected_rewards: Float[Tensor, "batch"]
) -> Float[Tensor, ""]:
    """Return the mean of -log sigmoid(chosen - rejected), in nats (minimised).

    The negative log-likelihood of the choices under Bradley and Terry's model, in which a is
    preferred to b with probability sigmoid(r_a - r_b). It is finite, and so is its gradient, for
    margins of ±1000.
    """
    return -F.logsigmoid(chosen_rewards - rejected_rewards).mean()


@shape_checked
def calc_preference_accuracy(
    chosen_rewards: Float[Tensor, "batch"], rejected_rewards: Float[Tensor, "batch"]
) -> float:
    """Return the share of pairs whose chosen completion has the higher reward; ties count half."""
    wins = (chosen_rewards > rejected_rewards).float()
    ties = (chosen_rewards == rejected_rewards).float()
    return (wins + ties / 2).mean().item()


# --- The reward model ---------------------------------------------------------------------------


class RewardModel(TransformerWithLora):
    """Put a linear reward head, which starts at zero, on `TransformerWithLora`.

    `reward_mean` and `reward_std` are those of the rewards it gave on its training pairs;
    `train_reward_model` measures them. They are saved with the adapters and the head.
    """

    reward_mean: Tensor
    reward_std: Tensor

    def __init__(
        self,
        base: TransformerBridge,
        rank: int = 4,
        alpha: float = 32,
        sites: tuple[str, ...] = ATTENTION_SITES,
    ):
        super().__init__(base, rank, alpha, sites)
        device = next(base.parameters()).device
        self.reward_head = nn.Linear(self.cfg.d_model, 1, device=device)
        nn.init.zeros_(self.reward_head.weight)
        nn.init.zeros_(self.reward_head.bias)
        self.register_buffer("reward_mean", torch.zeros((), device=device))
        self.register_buffer("reward_std", torch.ones((), device=device))

    def forward(  # type: ignore[override]  # rewards, where the parent gives logits
        self, input_ids: Int[Tensor, "batch seq"], attention_mask: Int[Tensor, "batch seq"]
    ) -> Float[Tensor, "batch"]:
        """Return a reward for each row, from `ln_final.hook_out` at its last real token.

        That token has read the whole row. It is the last one that `attention_mask` marks: rows may
        be padded on the left, on the right, or on both sides. Head and rewards are in float32. The
        adapters act as in the parent's `forward`, and no hook stays behind.
        """
        hidden: list[Float[Tensor, "batch seq d_model"]] = []

        def read_hidden(x: Tensor, hook) -> None:
            hidden.append(x)

        self._run([("ln_final.hook_out", read_hidden)], input_ids, attention_mask)
        numbers = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        last = (attention_mask * numbers).argmax(-1)  # [batch]
        rows = torch.arange(len(input_ids), device=input_ids.device)
        rewards = self.reward_head(hidden[0][rows, last].to(self.reward_head.weight.dtype))
        return rewards.squeeze(-1)

    def trainable_parts(self) -> dict[str, list[nn.Parameter]]:
        return super().trainable_parts() | {"reward_head": list(self.reward_head.parameters())}

    def trainable_state(self) -> dict[str, Tensor]:
        head = {f"reward_head.{k}": v.data for k, v in self.reward_head.named_parameters()}
        scale = {"reward_mean": self.reward_mean, "reward_std": self.reward_std}
        return super().trainable_state() | head | scale


def make_reward_fn(reward_model: "RewardModel") -> Callable[..., Float[Tensor, "batch"]]:
    """Return a reward function for the trainers: `reward_fn(samples, prompts)`.

    It encodes prompts and completions with `encode_completions` and returns the reward model's
    rewards, minus `reward_mean`, divided by `reward_std`, without a gradient.
    """

    @torch.no_grad()
    def reward_fn(samples: list[str], prompts: list[Prompt]) -> Float[Tensor, "batch"]:
        encoded = encode_completions(reward_model, prompts, samples)
        rewards = reward_model(encoded.input_ids, encoded.attention_mask)
        return (rewards - reward_model.reward_mean) / reward_model.reward_std

    return reward_fn


# --- Learning from examples ---------------------------------------------------------------------


def fit(
    model: TransformerWithLora,
    n_rows: int,
    calc_loss: Callable[[Int[Tensor, "rows"]], Float[Tensor, ""]],
    lr: float,
    batch_size: int = 32,
    epochs: int = 1,
    seed: int = 0,
    label: str = "fit",
) -> list[float]:
    """Minimise `calc_loss(rows)` with AdamW, over all rows in a new order in each epoch; return the
    losses.

    The learning rate warms up over five steps and falls to zero at the end. Gradients are clipped
    to a norm of 1.
    """
    require(n_rows >= 1, "there should be at least one example, but there is none")
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.trainable_parameters(), lr=lr, weight_decay=0.0)
    orders = [torch.randperm(n_rows, generator=generator) for _ in range(epochs)]
    batches = [rows for order in orders for rows in order.split(batch_size)]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, (k + 1) / 5) * (1 - k / len(batches))
    )
    losses = []
    for rows in tqdm(batches, desc=label, leave=False):
        optimizer.zero_grad()
        loss = calc_loss(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.trainable_parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def train_reward_model(
    model: RewardModel,
    preferences: Preferences,
    lr: float = 2e-3,
    epochs: int = 2,
    batch_size: int = 32,
    seed: int = 0,
) -> list[float]:
    """Fit a reward model to preferences, and measure the scale of its rewards on them."""

    def calc_loss(rows: Int[Tensor, "rows"]) -> Float[Tensor, ""]:
        both = encode_pairs(model, preferences, rows.tolist())
        rewards = model(both.input_ids, both.attention_mask)
        return calc_preference_loss(*rewards.chunk(2))

    n_pairs = len(preferences)
    losses = fit(model, n_pairs, calc_loss, lr, batch_size, epochs, seed, "reward model")
    rewards = torch.cat(score_pairs(model, preferences, rows=batch_size))
    model.reward_mean.copy_(rewards.mean())
    if rewards.max() > rewards.min():
        model.reward_std.copy_(rewards.std())
    return losses


def encode_pairs(
    model: TransformerWithLora, preferences: Preferences, rows: Sequence[int]
) -> Samples:
    """Encode some pairs: their chosen completions, then the rejected ones, in the same order."""
    prompts = [preferences.prompts[row] for row in rows]
    chosen = [preferences.chosen[row] for row in rows]
    rejected = [preferences.rejected[row] for row in rows]
    return encode_completions(model, prompts * 2, chosen + rejected)


@torch.no_grad()
def score_pairs(
    model: RewardModel, preferences: Preferences, rows: int = 128
) -> tuple[Float[Tensor, "pairs"], Float[Tensor, "pairs"]]:
    """Return the rewards, before standardising, of all chosen and of all rejected completions.

    The pairs are scored `rows` at a time.
    """
    parts = []
    for chosen in torch.arange(len(preferences)).split(rows):
        both = encode_pairs(model, preferences, chosen.tolist())
        parts.append(model(both.input_ids, both.attention_mask).view(2, -1))
    chosen_rewards, rejected_rewards = torch.cat(parts, dim=1)
    return chosen_rewards, rejected_rewards


# --- DPO ----------------------------------------------------------------------------------------


@shape_checked
def calc_dpo_loss(
    policy_chosen: Float[Tensor, "batch"],
    policy_rejected: Float[Tensor, "batch"],
    ref_chosen: Float[Tensor, "batch"],
    ref_rejected: Float[Tensor, "batch"],
    beta: float = 0.1,
) -> tuple[Float[Tensor, ""], Float[Tensor, "batch"], Float[Tensor, "batch"]]:
    """Return the preference loss of the implicit rewards, and those of chosen and rejected.

    The arguments are log-probs of whole completions: sums over their tokens. The implicit reward is
    beta (log pi - log ref) (DPO, eq. 5), and with it the preference loss is DPO's (eq. 7). Detach
    the reference's log-probs, so that no gradient reaches them, and the rewards that are returned.

    Raises a ValueError that names `beta` unless it is positive.
    """
    require(beta > 0, f"beta should be positive, but is {beta}")
    chosen_rewards = beta * (policy_chosen - ref_chosen.detach())
    rejected_rewards = beta * (policy_rejected - ref_rejected.detach())
    loss = calc_preference_loss(chosen_rewards, rejected_rewards)
    return loss, chosen_rewards.detach(), rejected_rewards.detach()


def sum_logprobs(model: TransformerWithLora, samples: Samples) -> Float[Tensor, "batch"]:
    """Return the log-probability of each whole completion, its eos included."""
    scores = get_scorer(model).measure(
        samples.input_ids, samples.attention_mask, samples.prompt_len
    )
    return scores.logprobs.masked_fill(~samples.completion_mask, 0.0).sum(-1)


def train_dpo(
    model: TransformerWithLora,
    preferences: Preferences,
    beta: float = 0.1,
    lr: float = 1e-3,
    epochs: int = 1,
    batch_size: int = 32,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Train a policy on preferences with DPO; return the metrics of each step.

    "chosen" and "rejected" are mean log-probs of the completions, "margin" is the mean difference
    of the implicit rewards.
    """
    history: list[dict[str, float]] = []

    def calc_loss(rows: Int[Tensor, "rows"]) -> Float[Tensor, ""]:
        both = encode_pairs(model, preferences, rows.tolist())
        with torch.no_grad(), model.reference():
            ref = sum_logprobs(model, both)
        logprobs = sum_logprobs(model, both)
        loss, chosen, rejected = calc_dpo_loss(*logprobs.chunk(2), *ref.chunk(2), beta)
        means = [part.mean().item() for part in logprobs.chunk(2)]
        margin = (chosen - rejected).mean().item()
        accuracy = calc_preference_accuracy(chosen, rejected)
        history.append(
            {"chosen": means[0], "rejected": means[1], "margin": margin, "accuracy": accuracy}
        )
        return loss

    losses = fit(model, len(preferences), calc_loss, lr, batch_size, epochs, seed, "DPO")
    return [{"loss": loss} | row for loss, row in zip(losses, history, strict=True)]


@torch.no_grad()
def measure_implicit_accuracy(
    model: TransformerWithLora, preferences: Preferences, rows: int = 128
) -> float:
    """Measure how often the log-ratio to the reference, DPO's implicit reward, is higher for the
    chosen completion.

    Every policy that has a reference has such a reward, however it was trained.
    """
    parts = []
    for chosen in torch.arange(len(preferences)).split(rows):
        both = encode_pairs(model, preferences, chosen.tolist())
        logprobs = sum_logprobs(model, both)
        with model.reference():
            parts.append((logprobs - sum_logprobs(model, both)).view(2, -1))
    return calc_preference_accuracy(*torch.cat(parts, dim=1))


# --- Picking samples ----------------------------------------------------------------------------


@shape_checked
def best_of_n(samples: list[str], rewards: Float[Tensor, "batch"], n: int) -> list[str]:
    """Return, of every n consecutive samples, the one with the highest reward.

    Raises a ValueError that names `n` unless it is positive and divides their number, and one that
    names `rewards` unless there is one for each.
    """
    require(
        len(rewards) == len(samples),
        f"rewards should be one for each of {len(samples)} samples, but are {len(rewards)}",
    )
    require(
        n >= 1 and len(samples) % n == 0,
        f"n should be positive and divide the {len(samples)} samples, but is {n}",
    )
    best = rewards.view(-1, n).argmax(-1)
    return [samples[group * n + i] for group, i in enumerate(best.tolist())]


def calc_best_of_n_kl(n: int) -> float:
    """Return log n - (n - 1) / n, in nats per completion.

    An upper bound on the KL between best of n and the policy that it samples from. It is approached
    when every completion is improbable and no two have the same reward (Beirami et al.).

    Raises a ValueError that names `n` unless it is positive.
    """
    require(n >= 1, f"n should be positive, but is {n}")
    return math.log(n) - (n - 1) / n


@shape_checked
def rejection_sample(
    rewards: Float[Tensor, "n"],
    num_samples: int,
    temperature: float,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "num_samples"]:
    """Pick `num_samples` different rows by statistical rejection sampling (Liu et al., 2023).

    In each pass the rows that remain come in a random order, and each is accepted with probability
    exp((reward - max) / temperature), max being the highest reward among those that remained when
    the pass began. Passes go on until enough rows are accepted, and the last one stops there. The
    result is in the order of acceptance. All draws are made with `generator`.

    A low temperature picks the best, a high one picks at random. Raises a ValueError that names the
    argument if `num_samples` is not in [1, n], or `temperature` is not positive.
    """
    n = len(rewards)
    require(rewards.isfinite().all(), "rewards should be finite, but one is nan or inf")
    require(1 <= num_samples <= n, f"num_samples should be in [1, {n}], but is {num_samples}")
    require(temperature > 0, f"temperature should be positive, but is {temperature}")
    device = rewards.device
    rows, accepted = torch.arange(n, device=device), list[int]()
    while len(accepted) < num_samples:
        rows = rows[torch.randperm(len(rows), generator=generator, device=device)]
        remaining = rewards[rows]
        p_accept = ((remaining - remaining.max()) / temperature).exp()
        is_accepted = torch.rand(len(rows), generator=generator, device=device) < p_accept
        accepted += rows[is_accepted].tolist()
        rows = rows[~is_accepted]
    return torch.tensor(accepted[:num_samples], device=device)


@shape_checked
def pool_advantages(
    scores: Float[Tensor, "pool"], kept: Int[Tensor, "kept"], pool_size: int
) -> Float[Tensor, "kept"]:
    """Return the advantages of the kept rows, against the whole pool of their prompt. Detached.

    Each prompt has `pool_size` consecutive scores, and A = (score - mean of the pool) / (std of the
    pool + 1e-4), as in `group_advantages`: stds have ddof 1, and a pool of equal scores gives
    zeros. `kept` holds rows of `scores`. Those that were picked are not a sample from the policy,
    so their own mean is not a baseline.

    Raises a ValueError that names `pool_size` if it is below 2 or does not divide the scores.
    """
    require(
        pool_size >= 2 and len(scores) % pool_size == 0,
        f"pool_size should be at least 2 and divide the {len(scores)} scores, but is {pool_size}",
    )
    return group_advantages(scores, pool_size)[kept]


# --- Trainers -----------------------------------------------------------------------------------


def train_sft(
    model: TransformerWithLora,
    prompts: Sequence[Prompt],
    completions: Sequence[str],
    lr: float = 2e-3,
    epochs: int = 2,
    batch_size: int = 32,
    seed: int = 0,
) -> list[float]:
    """Train a policy to imitate completions; return the losses."""
    samples = encode_completions(model, prompts, completions)
    is_prompt = samples.completion_mask.new_zeros(len(completions), samples.prompt_len)
    is_target = torch.cat([is_prompt, samples.completion_mask], dim=1)

    def calc_loss(rows: Int[Tensor, "rows"]) -> Float[Tensor, ""]:
        ids = samples.input_ids[rows]
        logits = model(ids, samples.attention_mask[rows])
        return calc_sft_loss(logits, ids, is_target[rows])

    return fit(model, len(completions), calc_loss, lr, batch_size, epochs, seed, "SFT")


@dataclass
class PickedGrpoArgs(GrpoArgs):
    """Add to GRPO's arguments a pool from which each group is picked."""

    pool_size: Count = 32  # A prompt gets this many completions, and group_size of them are kept.
    pick_temperature: Positive = 0.5
    baseline: Literal["pool", "kept"] = "pool"  # Advantages use its mean and std.

    def __post_init__(self):
        super().__post_init__()
        require(
            self.baseline == "kept" or self.advantage_scale == "group",
            f"advantage_scale should be 'group' with the pool's baseline, but is "
            f"{self.advantage_scale!r}",
        )
        require(
            self.pool_size >= self.group_size,
            f"pool_size should be at least group_size = {self.group_size}, but is {self.pool_size}",
        )


class PickedGrpoTrainer(GrpoTrainer):
    """Train with GRPO on groups that were picked by statistical rejection sampling."""

    args: PickedGrpoArgs
    args_class = PickedGrpoArgs

    @torch.no_grad()
    def rollout_phase(self) -> ReplayMemory:
        args = self.args
        n_prompts, size = args.batch_size // args.group_size, args.pool_size
        # (1) sample, (2) score, and pick
        samples, scores = self.sample_and_score(n_prompts, size)
        picked = [
            prompt * size
            + rejection_sample(pool, args.group_size, args.pick_temperature, self.generator)
            for prompt, pool in enumerate(scores.split(size))
        ]
        kept = torch.cat(picked)
        samples = select_samples(samples, kept.tolist())
        logprobs = self.get_sample_logprobs(samples)
        ref_logprobs = self.get_ref_logprobs(samples)
        # (3) compare
        memory = make_grpo_memory(args, samples, scores[kept], logprobs, ref_logprobs)
        if args.baseline == "pool":
            memory = replace(memory, advantages=pool_advantages(scores, kept, size))
        return memory
