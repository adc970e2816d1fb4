"""Pays a model for full stops, by PPO: once without a KL term, and once on that leash."""

import torch
from tqdm import tqdm

from solutions.ch0_sampling import sample_completions
from solutions.ch2_ppo import RLHFArgs, RLHFTrainer, reward_fn_char_count
from utils.course import shorten

SEED = 1


def show_reviews(model, when: str) -> None:
    generator = torch.Generator().manual_seed(4)
    prompts = ["This movie is"] * 64
    samples = sample_completions(model, prompts, 24, generator=generator)
    points = reward_fn_char_count(samples.texts)
    print(f"{when}, {points.mean():.1f} full stops in a review:")
    print(*(f"  {prompts[0]}{text}" for text in samples.texts[:5]), sep="\n")


def train(kl_coef: float) -> RLHFTrainer:
    args = RLHFArgs(
        seed=SEED,
        reward_fn=reward_fn_char_count,
        kl_coef=kl_coef,
        base_lr=5e-3,  # large, so that seconds are enough
        warmup_steps=0,
        total_phases=20,
        batch_size=32,
        gen_len=24,
        device="cpu",
    )
    trainer = RLHFTrainer(args)
    if kl_coef == 0:
        show_reviews(trainer.model, "Before")
    for _ in tqdm(range(shorten(args.total_phases)), unit="phase"):
        trainer.learning_phase(trainer.rollout_phase())
    return trainer


def main() -> None:
    show_reviews(train(kl_coef=0.0).model, "After, without a leash")
    show_reviews(train(kl_coef=0.3).model, "After, on a leash")


if __name__ == "__main__":
    main()
