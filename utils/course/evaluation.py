"""Measuring a policy on prompts it was not trained on: rewards, accuracy, KL and fluency."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from utils.models.corpus import Pair, addition_prompt
from utils.models.forward import get_scorer
from utils.models.turns import Environment
from utils.rewards import is_worked, reward_fn_addition


def _load_sampling() -> Any:
    """Load chapter 0 by name: the autograder imports this module where no solution may be held."""
    return importlib.import_module("solutions.ch0_sampling")


def sample_prompts(
    model,
    prompts: list[str],
    gen_len: int,
    temperature: float = 1.0,
    seed: int = 0,
    rows: int = 128,
    environment: Environment | None = None,
) -> list:
    """Sample completions of all prompts, as `Samples` of up to `rows` rows each, in turns with the
    environment if there is one."""
    sampling = _load_sampling()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    batches = []
    for start in tqdm(range(0, len(prompts), rows), desc="evaluate", leave=False):
        batch = prompts[start : start + rows]
        if environment is None:
            samples = sampling.sample_completions(
                model, batch, gen_len, temperature, generator=generator
            )
        else:
            ids, mask = sampling.encode_prompts(model, batch, gen_len, prepend_bos=True)
            drawn = environment.sample(
                model, ids, mask, {"prompt": batch}, gen_len, temperature, generator=generator
            )
            samples = sampling.Samples(**drawn.put_behind(ids, mask))
        batches.append(samples)
    return batches


def measure_kl(model, batches: list) -> float:
    """Measure the exact KL(policy ‖ reference), in nats per token, on states of the policy."""
    return _mean_over_tokens(model, batches, lambda scores: scores.measure_kl())


def measure_nll(model, batches: list) -> float:
    """Measure the base model's negative log-likelihood of the samples, in nats per token."""
    with model.reference():
        return _mean_over_tokens(model, batches, lambda scores: -scores.logprobs)


@torch.no_grad()
def _mean_over_tokens(model, batches: list, measure: Callable) -> float:
    """Return the mean over all completion tokens of what `measure` makes of their scores."""
    mean, total, n_tokens = _load_sampling().masked_mean, 0.0, 0
    for batch in batches:
        ids, attention_mask, mask = batch.input_ids, batch.attention_mask, batch.completion_mask
        scores = get_scorer(model).measure(ids, attention_mask, batch.prompt_len)
        total += mean(measure(scores), mask).item() * mask.sum().item()
        n_tokens += mask.sum().item()
    return total / n_tokens


def measure_distinct_bigrams(texts: list[str]) -> float:
    """Measure different word bigrams as a share of all: low when a policy repeats itself."""
    bigrams = [pair for text in texts for pair in zip(text.split(), text.split()[1:], strict=False)]
    return len(set(bigrams)) / max(len(bigrams), 1)


def pair_up(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return both measurements under names that say when; of the KL, which was 0, neither."""
    both = {"before": before, "after": after}
    names = [name for name in before if name != "kl"]
    return {f"{name}_{when}": both[when][name] for name in names for when in both}


def evaluate_reviews(
    model,
    prompts: list[str],
    reward_fn,
    n_samples: int = 32,
    gen_len: int = 30,
    seed: int = 0,
) -> dict[str, float]:
    """Evaluate reward, KL, fluency and diversity of `n_samples` reviews per prompt."""
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
    model,
    pairs: list[Pair],
    n_samples: int = 8,
    seed: int = 0,
) -> dict[str, float]:
    """Evaluate sampled and greedy accuracy on `pairs`, and how the answers were reached.

    `pass` is the share of pairs with at least one right answer among `n_samples`: pass@k with
    k = n_samples. `accuracy_worked` is the accuracy within the sampled answers that show the steps.
    """
    prompts = [addition_prompt(a, b) for a, b in pairs]
    answers = [str(a + b) for a, b in pairs]
    batches = sample_prompts(model, prompts * n_samples, gen_len=40, seed=seed)
    texts = [text for batch in batches for text in batch.texts]
    lengths = torch.cat([batch.completion_mask.sum(-1) for batch in batches])
    right = reward_fn_addition(texts, answers * n_samples)
    worked = torch.tensor([float(is_worked(text)) for text in texts])
    greedy = [t for b in sample_prompts(model, prompts, 40, temperature=0) for t in b.texts]
    return {
        "accuracy": right.mean().item(),
        "greedy": reward_fn_addition(greedy, answers).mean().item(),
        "worked": worked.mean().item(),
        "accuracy_worked": ((right * worked).sum() / worked.sum().clamp(min=1)).item(),
        "accuracy_direct": ((right * (1 - worked)).sum() / (1 - worked).sum().clamp(min=1)).item(),
        "pass": right.view(n_samples, -1).amax(0).mean().item(),
        "completion_len": lengths.float().mean().item(),
        "kl": measure_kl(model, batches),
    }
