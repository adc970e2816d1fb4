"""Runs chapter 0's finished thing: a model of film reviews learns to write friendly ones."""

import re

import torch
from tqdm import tqdm

from solutions.ch0_sampling import calc_reinforce_objective, get_logprobs, get_samples
from utils.course import shorten
from utils.models.corpus import NEGATIVE_WORDS, POSITIVE_WORDS
from utils.models.loading import load_base_model

PROMPT = "This movie is"


def count_friendly(texts: list[str]) -> torch.Tensor:
    """The friendly words minus the unfriendly ones, in each text."""
    words = [re.findall("[a-z]+", text.lower()) for text in texts]
    counts = [sum((w in POSITIVE_WORDS) - (w in NEGATIVE_WORDS) for w in text) for text in words]
    return torch.tensor(counts, dtype=torch.float32)


def show_reviews(model, when: str) -> None:
    generator = torch.Generator().manual_seed(4)
    texts = get_samples(model, [PROMPT] * 6, 24, generator=generator).texts
    print(f"{when}:", *(f"  {PROMPT}{text}" for text in texts), sep="\n")


def main() -> None:
    model = load_base_model("embedded").requires_grad_(False)
    gains = [p.requires_grad_() for name, p in model.named_parameters() if "ln_" in name]
    optimizer = torch.optim.Adam(gains, lr=5e-3, maximize=True)
    generator = torch.Generator().manual_seed(0)
    show_reviews(model, "Before")
    for _ in tqdm(range(shorten(30)), unit="phase"):
        samples = get_samples(model, [PROMPT] * 16, 24, generator=generator)
        rewards = count_friendly(samples.texts)
        logits = model(samples.input_ids, attention_mask=samples.attention_mask)
        logprobs = get_logprobs(logits, samples.input_ids, samples.prompt_len)
        objective = calc_reinforce_objective(
            logprobs, rewards - rewards.mean(), samples.completion_mask
        )
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
    show_reviews(model, "After")


if __name__ == "__main__":
    main()
