"""Runs chapter 3's finished thing: told only which sums are right, a model shows its work."""

import random

import torch
from tqdm import tqdm

from solutions.ch0_sampling import get_logprobs, get_samples
from solutions.ch1_lora import TransformerWithLora
from solutions.ch3_grpo import calc_single_update_objective, group_advantages
from utils.course import shorten
from utils.models.corpus import addition_prompt, held_out_pairs, training_pairs
from utils.models.loading import ALL_LINEAR_SITES
from utils.rewards import is_worked, reward_fn_addition


def answer(policy, pairs: list[tuple[int, int]], generator: torch.Generator):
    """The policy's answers to some additions, and 1 for each that's right."""
    with policy.merged():
        samples = get_samples(policy, [addition_prompt(*p) for p in pairs], 40, generator=generator)
    return samples, reward_fn_addition(samples.texts, [str(a + b) for a, b in pairs])


def show_answers(policy, when: str) -> None:
    pairs = held_out_pairs()[:100]  # it never saw these sums
    samples, rewards = answer(policy, pairs, torch.Generator().manual_seed(1))
    worked = sum(map(is_worked, samples.texts)) / len(pairs)
    print(f"{when}: {rewards.mean():.0%} of 100 new sums right, {worked:.0%} with steps")
    for (a, b), text, reward in list(zip(pairs, samples.texts, rewards, strict=True))[:5]:
        text = text.replace("\n", " / ")
        print(f"  {a}+{b}:  {text:<48} {'right' if reward else 'wrong'}")


def main() -> None:
    torch.manual_seed(0)
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    policy = TransformerWithLora.from_pretrained("embedded", rank=8, sites=ALL_LINEAR_SITES)
    optimizer = torch.optim.Adam(policy.trainable_parameters(), lr=3e-3, maximize=True)
    show_answers(policy, "Before")
    for _ in tqdm(range(shorten(16)), unit="phase"):
        pairs = [pair for pair in rng.sample(training_pairs(), 8) for _ in range(8)]
        samples, rewards = answer(policy, pairs, generator)
        logits = policy(samples.input_ids, samples.attention_mask)
        logprobs = get_logprobs(logits, samples.input_ids, samples.prompt_len)
        advantages = group_advantages(rewards, group_size=8)
        objective = calc_single_update_objective(logprobs, advantages, samples.completion_mask)
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
    show_answers(policy, "After")


if __name__ == "__main__":
    main()
