"""Runs chapter 9's finished thing: the same trainer on time, late, and late with PPO's clip."""

import tempfile

import torch
from tqdm import tqdm

from solutions.ch0_sampling import sample_completions
from solutions.ch9_async import AsyncArgs, StaleTrainer
from utils.course import shorten
from utils.models.corpus import addition_prompt, held_out_pairs, training_pairs
from utils.models.loading import ALL_LINEAR_SITES
from utils.rewards import reward_fn_addition

RUNS = {
    "on time": {},
    "8 updates late": {"staleness": 8},
    "8 updates late, with the clip": {"staleness": 8, "correction": "clip"},
}


def train(phases: int, folder: str, **changes) -> StaleTrainer:
    """Train on additions, one update for each rollout of 8 groups of 8."""
    pairs = training_pairs()
    args = AsyncArgs(
        prompts=[addition_prompt(a, b) for a, b in pairs],
        columns={"answers": [str(a + b) for a, b in pairs]},
        reward_fn=reward_fn_addition,
        batch_size=64,
        num_minibatches=1,
        batches_per_learning_phase=1,
        gen_len=40,
        lora_sites=ALL_LINEAR_SITES,
        lora_rank=8,
        base_lr=1e-3,
        warmup_steps=0,
        final_scale=1.0,
        ent_coef=0.0,
        runs_dir=folder,
        **changes,
    )
    trainer = StaleTrainer(args)
    for _ in tqdm(range(phases), unit="phase"):
        trainer.learning_phase(trainer.rollout_phase())
        trainer.phase += 1
    return trainer


def main() -> None:
    pairs = held_out_pairs()[:200]
    for name, changes in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = train(shorten(20), folder, **changes).model
        prompts, generator = [addition_prompt(*pair) for pair in pairs], torch.Generator()
        texts = sample_completions(model, prompts, 40, generator=generator.manual_seed(0)).texts
        right = reward_fn_addition(texts, [str(a + b) for a, b in pairs]).mean()
        print(f"{name}: {right:.0%} of {len(pairs)} sums are right, for example")
        for (a, b), text in list(zip(pairs, texts, strict=True))[:3]:
            print(f"    {a}+{b}: " + text.strip().replace("\n", " ")[:70])


if __name__ == "__main__":
    main()
