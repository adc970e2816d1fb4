"""Measuring a policy on prompts it was not trained on: rewards, accuracy, KL and fluency."""

from collections.abc import Callable

import torch
from tqdm.auto import tqdm

from utils.models.corpus import Pair, addition_prompt
from utils.rewards import is_worked, reward_fn_addition


def sample_prompts(
    model,
    prompts: list[str],
    gen_len: int,
    temperature: float = 1.0,
    seed: int = 0,
    rows: int = 128,
) -> list:
    """Completions of all prompts, merged weights, as `Samples` of up to `rows` rows each."""
    from solutions.ch0_sampling import get_samples

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    batches = []
    with model.merged():
        for start in tqdm(range(0, len(prompts), rows), desc="evaluate", leave=False):
            batch = prompts[start : start + rows]
            batches.append(get_samples(model, batch, gen_len, temperature, generator=generator))
    return batches


def mean_over_tokens(per_token: Callable[..., torch.Tensor], batches: list) -> float:
    """The mean of `per_token(samples)` [batch completion] over all completion tokens."""
    total = sum(per_token(b).masked_fill(~b.completion_mask, 0.0).sum().item() for b in batches)
    return total / sum(b.completion_mask.sum().item() for b in batches)


@torch.no_grad()
def measure_kl(model, batches: list) -> float:
    """Exact KL(policy ‖ reference), in nats per token, on states that the policy visited."""
    from solutions.ch0_sampling import select_completion

    def per_token(samples):
        logits = model(samples.input_ids, samples.attention_mask)
        with model.reference():
            ref_logits = model(samples.input_ids, samples.attention_mask)
        logprobs = select_completion(logits, samples.prompt_len).log_softmax(-1)
        ref_logprobs = select_completion(ref_logits, samples.prompt_len).log_softmax(-1)
        return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)

    return mean_over_tokens(per_token, batches)


@torch.no_grad()
def measure_nll(model, batches: list) -> float:
    """The base model's negative log-likelihood of the samples, in nats per token."""
    from solutions.ch0_sampling import get_logprobs

    def per_token(samples):
        with model.reference():
            logits = model(samples.input_ids, samples.attention_mask)
        return -get_logprobs(logits, samples.input_ids, samples.prompt_len)

    return mean_over_tokens(per_token, batches)


def measure_distinct_bigrams(texts: list[str]) -> float:
    """Different word bigrams as a share of all: low when a policy repeats itself."""
    bigrams = [pair for text in texts for pair in zip(text.split(), text.split()[1:], strict=False)]
    return len(set(bigrams)) / max(len(bigrams), 1)


def evaluate_reviews(
    model, prompts: list[str], reward_fn, n_samples: int = 32, gen_len: int = 30, seed: int = 0
) -> dict[str, float]:
    """Reward, KL, fluency and diversity of `n_samples` reviews a prompt."""
    batches = sample_prompts(model, prompts * n_samples, gen_len, seed=seed)
    texts = [text for batch in batches for text in batch.texts]
    rewards = reward_fn(texts)
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std().item(),
        "kl": measure_kl(model, batches),
        "nll": measure_nll(model, batches),
        "distinct_bigrams": measure_distinct_bigrams(texts),
    }


def evaluate_additions(
    model, pairs: list[Pair], n_samples: int = 8, gen_len: int = 40, seed: int = 0
) -> dict[str, float]:
    """Sampled and greedy accuracy on `pairs`, and how the answers were reached.

    `pass` is the share of pairs with at least one right answer among `n_samples`: pass@k with
    k = n_samples. `accuracy_worked` is the accuracy within the sampled answers that show the steps.
    """
    prompts = [addition_prompt(a, b) for a, b in pairs]
    answers = [str(a + b) for a, b in pairs]
    batches = sample_prompts(model, prompts * n_samples, gen_len, seed=seed)
    texts = [text for batch in batches for text in batch.texts]
    right = reward_fn_addition(texts, answers * n_samples)
    worked = torch.tensor([float(is_worked(text)) for text in texts])
    greedy = [t for b in sample_prompts(model, prompts, gen_len, temperature=0) for t in b.texts]
    return {
        "accuracy": right.mean().item(),
        "greedy": reward_fn_addition(greedy, answers).mean().item(),
        "worked": worked.mean().item(),
        "accuracy_worked": ((right * worked).sum() / worked.sum().clamp(min=1)).item(),
        "accuracy_direct": ((right * (1 - worked)).sum() / (1 - worked).sum().clamp(min=1)).item(),
        "pass": right.view(n_samples, -1).amax(0).mean().item(),
        "completion_len": torch.cat([b.completion_mask.sum(-1) for b in batches])
        .float()
        .mean()
        .item(),
        "kl": measure_kl(model, batches),
    }
