"""Trains adapters on friendly reviews, then switches them off: the model of before is back."""

import copy
import random

import torch
from tqdm import tqdm

from solutions.ch0_sampling import get_samples, left_pad
from solutions.ch1_lora import TransformerWithLora, calc_sft_loss
from utils.course import shorten
from utils.models.corpus import NEGATIVE_WORDS, POSITIVE_WORDS, review
from utils.models.loading import load_base_model

PROMPT = "This movie is"


def make_batch(tokenizer, rng: random.Random, n: int = 16):
    """Token ids and attention mask of `n` reviews with friendly words and no unfriendly one."""
    rows = []
    while len(rows) < n:
        text = review(rng)
        if count(text, POSITIVE_WORDS) > 0 and count(text, NEGATIVE_WORDS) == 0:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            rows.append([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id])
    return left_pad(rows, tokenizer.pad_token_id)


def count(text: str, words: tuple[str, ...]) -> int:
    """How many of the words are in a text."""
    return sum(word.strip(".!") in words for word in text.lower().split())


def show_reviews(model, whose: str) -> None:
    generator = torch.Generator().manual_seed(1)
    texts = get_samples(model, [PROMPT] * 5, 20, generator=generator).texts
    print(f"{whose}:", *(f"  {PROMPT}{text}" for text in texts), sep="\n")


def train(model) -> None:
    """Train the adapters of a model for 30 steps on friendly reviews."""
    optimizer = torch.optim.AdamW(model.trainable_parameters(), lr=1e-3, weight_decay=0)
    rng = random.Random(0)
    for _ in tqdm(range(shorten(30)), unit="step"):
        ids, attention_mask = make_batch(model.tokenizer, rng)
        loss = calc_sft_loss(model(ids, attention_mask), ids, attention_mask.bool())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    base = load_base_model("embedded")
    untouched = copy.deepcopy(base.original_model.state_dict())
    model = TransformerWithLora(base)
    train(model)
    show_reviews(model, "The policy: adapters on")
    with model.reference():
        show_reviews(model, "The reference: the same object, adapters off")
    same = all(torch.equal(w, untouched[k]) for k, w in base.original_model.state_dict().items())
    trained = sum(p.numel() for p in model.trainable_parameters())
    storages = [p.untyped_storage() for p in base.original_model.parameters()]
    frozen = sum({s.data_ptr(): s.nbytes() // 4 for s in storages}.values())  # each number once
    print(f"Trained: {trained:,} numbers, beside {frozen:,} frozen ones.")
    print(f"Each frozen number is what it was, to the last bit: {same}")


if __name__ == "__main__":
    main()
