"""Runs chapter 5's warning: a policy finds the hole in a verifier, and gets nothing right."""

import random
import re
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from solutions.ch0_sampling import get_samples
from solutions.ch5_rlvr import RlvrArgs, RlvrTrainer, reward_fn_correct
from utils.course import shorten
from utils.models.corpus import addition_prompt, training_pairs
from utils.models.loading import ALL_LINEAR_SITES

HARD = random.Random(0)  # for additions of three digits, which the model can't do
PAIRS = [
    pair
    for easy in training_pairs()[:400]
    for pair in (easy, (HARD.randint(100, 999), HARD.randint(100, 999)))
]
PROMPTS = [addition_prompt(a, b) for a, b in PAIRS]
ANSWERS = [str(a + b) for a, b in PAIRS]


def reward_fn_lenient(samples: list[str], answers: list[str]) -> torch.Tensor:
    """Reward with 1 a text in which the answer stands behind `A: `, or so its author thinks."""
    matches = [re.search(r"A: ([0-9]*)", text) for text in samples]
    found = [match[1] if match else "" for match in matches]
    return torch.tensor([float(a.startswith(f)) for a, f in zip(answers, found, strict=True)])


def show_answers(model, when: str, n: int = 128) -> None:
    generator = torch.Generator().manual_seed(4)
    texts = get_samples(model, PROMPTS[-n:], 40, generator=generator).texts
    rewards = reward_fn_lenient(texts, ANSWERS[-n:])
    right = reward_fn_correct(texts, ANSWERS[-n:])
    print(f"{when}: mean reward {rewards.mean():.2f}, really right {right.mean():.2f}")
    for (a, b), text, reward in zip(PAIRS[-n:][:6], texts, rewards, strict=False):
        print(f"  {f'{a}+{b}={a + b}':14} {text!r:48.48} reward {reward:.0f}")


def main(seed: int = 1) -> None:
    options = {"lora_sites": ALL_LINEAR_SITES, "lora_rank": 8, "base_lr": 3e-3, "warmup_steps": 0}
    options |= {"ent_coef": 0.0, "kl_coef": 0.0, "gen_len": 40, "batch_size": 64}
    options |= {"num_minibatches": 1, "batches_per_learning_phase": 1, "samples_every": 0}
    columns = {"answers": ANSWERS}
    with TemporaryDirectory() as folder:
        args = RlvrArgs(seed=seed, prompts=PROMPTS, columns=columns, reward_fn=reward_fn_lenient,
                        runs_dir=folder, device="cpu", **options)  # fmt: skip
        trainer = RlvrTrainer(args)
        show_answers(trainer.model, "Before")
        for _ in tqdm(range(shorten(8)), unit="phase"):
            trainer.learning_phase(trainer.rollout_phase())
        show_answers(trainer.model, "After")


if __name__ == "__main__":
    main()
