"""What noise, scale and warm-up do to GRPO, judged by the reward.

`python -m chapters.experiments.ch3_grpo_tricks` trains each of the settings on the sentiment of
reviews with each of the seeds and writes chapters/results/ch3_grpo_tricks.json.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from solutions.ch0_sampling import get_samples
from solutions.ch2_ppo import ReplayMemory, reward_fn_sentiment
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer

RESULT = Path(__file__).parents[1] / "results" / "ch3_grpo_tricks.json"
# name: (factor of the advantages, std of the noise on them, warm-up in phases)
SETTINGS = {
    "as it is": (1.0, 0.0, 0),
    "noise of std 1 added": (1.0, 1.0, 0),
    "advantages times 10": (10.0, 0.0, 0),
    "warm-up of 6 phases": (1.0, 0.0, 6),
    "noise alone": (0.0, 1.0, 0),
}


class ChangedTrainer(GrpoTrainer):
    """GRPO whose advantages become factor * advantages + noise."""

    factor, noise = 1.0, 0.0

    def rollout_phase(self) -> ReplayMemory:
        memory = super().rollout_phase()
        generator = torch.Generator().manual_seed(1000 * self.args.seed + self.phase)
        draws = torch.randn(memory.advantages.shape, generator=generator)
        return replace(memory, advantages=self.factor * memory.advantages + self.noise * draws)


def run(setting: str, seed: int, phases: int, runs_dir: str) -> dict:
    """Train once: metrics by phase, and the mean reward of 256 new samples."""
    factor, noise, warmup_steps = SETTINGS[setting]
    args = GrpoArgs(
        seed=seed,
        reward_fn=reward_fn_sentiment,
        gen_len=20,
        batch_size=64,
        num_minibatches=1,  # one update a rollout
        batches_per_learning_phase=1,
        base_lr=2e-3,
        warmup_steps=warmup_steps,
        final_scale=1.0,
        ent_coef=0.0,
        kl_coef=0.0,
        total_phases=phases,
        samples_every=0,
        checkpoint_every=0,
        runs_dir=runs_dir,
        device="cpu",
    )
    trainer = ChangedTrainer(args)
    trainer.factor, trainer.noise = factor, noise
    trainer.train()
    generator = torch.Generator().manual_seed(seed)
    with trainer.model.merged():
        samples = get_samples(trainer.model, [args.prefix] * 256, 20, generator=generator)
    keys = ("reward", "objective", "grad_norm")
    by_phase = {key: [round(row[key], 9) for row in trainer.history] for key in keys}
    after = reward_fn_sentiment(samples.texts).mean().item()
    return {"setting": setting, "seed": seed, "after": round(after, 4), **by_phase}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--phases", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    jobs = [(name, seed) for name in SETTINGS for seed in range(1, args.seeds + 1)]
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(*job, args.phases, folder) for job in tqdm(jobs, unit="run")]
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
