"""Runs chapter 6's finished thing: choices, a reward model of them, a policy that pleases it."""

from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from solutions.ch1_lora import TransformerWithLora
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch6_preferences import (
    RewardModel,
    make_preferences,
    make_reward_fn,
    reward_fn_true,
    sample_texts,
    train_reward_model,
)
from utils.course import shorten
from utils.models.corpus import review_prompts

TRAIN, HELD = review_prompts()
GEN_LEN = 32


def show(model, reward_fn, when: str) -> None:
    """Print the two mean rewards of 120 reviews, and the first three."""
    prompts = HELD * 8
    texts = sample_texts(model, prompts, GEN_LEN, torch.Generator().manual_seed(7))
    proxy, truth = reward_fn(texts, prompts).mean(), reward_fn_true(texts).mean()
    print(f"{when}: the reward model gives {proxy:+.1f}, the person {truth:+.1f}")
    print(
        *(f"  {prompt}{text}"[:97] for prompt, text in zip(HELD[:3], texts, strict=False)), sep="\n"
    )


def main(seed: int = 3) -> None:
    torch.manual_seed(seed)
    base = TransformerWithLora.from_pretrained("embedded", device="cpu")
    choices, _ = make_preferences(base, TRAIN, shorten(150), gen_len=GEN_LEN, seed=seed)
    reward_model = RewardModel.from_pretrained("embedded", device="cpu")
    train_reward_model(reward_model, choices, epochs=3, batch_size=16, seed=seed)
    reward_fn = make_reward_fn(reward_model)
    options = {"base_lr": 5e-3, "warmup_steps": 0, "ent_coef": 0.0, "kl_coef": 0.0}
    options |= {"gen_len": GEN_LEN, "batch_size": 32, "num_minibatches": 1, "samples_every": 0}
    options |= {"batches_per_learning_phase": 1}
    with TemporaryDirectory() as folder:
        args = GrpoArgs(seed=seed, prompts=TRAIN, reward_fn=reward_fn, runs_dir=folder,
                        device="cpu", **options)  # fmt: skip
        trainer = GrpoTrainer(args)
        show(trainer.model, reward_fn, "Before")
        for phase in tqdm(range(shorten(24)), unit="phase"):
            trainer.learning_phase(trainer.rollout_phase())
            if phase == 7:
                show(trainer.model, reward_fn, "After 8 phases")
        show(trainer.model, reward_fn, "After 24 phases")


if __name__ == "__main__":
    main()
