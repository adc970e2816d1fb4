"""The group's mean against a value head, at equal budget: additions, a grid of learning rates.

`python -m chapters.experiments.ch3_grpo_baselines` trains each side with each learning rate and
seed on as many completions and updates, and writes chapters/results/ch3_grpo_baselines.json. The
learning rate is to be chosen on the pairs for tuning, the sides compared on those held out. A third
side is PPO with its head held at zero: all that PPO is but the values.
"""

import argparse
import json
import tempfile
from pathlib import Path

from tqdm import tqdm

from solutions.ch2_ppo import RLHFArgs, RLHFTrainer
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from utils.course.evaluation import sample_prompts
from utils.models.corpus import (
    Pair,
    addition_prompt,
    held_out_pairs,
    training_pairs,
    tuning_pairs,
)
from utils.models.loading import ALL_LINEAR_SITES
from utils.rewards import reward_fn_addition

RESULT = Path(__file__).parents[1] / "results" / "ch3_grpo_baselines.json"
SIDES = {
    "group mean (GRPO)": (GrpoTrainer, GrpoArgs, {}),
    "value head (PPO)": (RLHFTrainer, RLHFArgs, {}),
    "PPO, head held at 0": (RLHFTrainer, RLHFArgs, {"head_lr": 0.0, "vf_coef": 0.0}),
}
GRID = (3e-4, 1e-3, 3e-3)
LEARNING_RATES = dict(zip(SIDES, (GRID, GRID, (1e-3,)), strict=True))  # PPO's choice for the third


def measure_accuracy(model, pairs: list[Pair], seed: int) -> float:
    """Of one sample a pair."""
    prompts = [addition_prompt(a, b) for a, b in pairs]
    batches = sample_prompts(model, prompts, gen_len=40, seed=seed)
    texts = [text for batch in batches for text in batch.texts]
    return reward_fn_addition(texts, [str(a + b) for a, b in pairs]).mean().item()


def run(side: str, lr: float, seed: int, phases: int, runs_dir: str) -> dict:
    """64 completions and two updates a phase on either side; each has its own defaults besides."""
    trainer_class, args_class, options = SIDES[side]
    pairs = training_pairs()
    setup = {
        "seed": seed,
        "prompts": [addition_prompt(a, b) for a, b in pairs],
        "columns": {"answers": [str(a + b) for a, b in pairs]},
        "reward_fn": reward_fn_addition,
        "gen_len": 40,
        "lora_sites": ALL_LINEAR_SITES,
        "lora_rank": 8,
        "total_phases": phases,
        "batch_size": 64,
        "num_minibatches": 2,
        "batches_per_learning_phase": 1,
        "base_lr": lr,
        "head_lr": 3 * lr,
        "warmup_steps": 0,
        "final_scale": 1.0,
        "ent_coef": 0.0,
        "kl_coef": 0.0,
        "samples_every": 0,
        "checkpoint_every": 0,
        "runs_dir": runs_dir,
        "device": "cpu",
    }
    trainer = trainer_class(args_class(**setup | options))
    rewards = [round(row["reward"], 4) for row in trainer.train()]
    tuning = measure_accuracy(trainer.model, tuning_pairs()[:200], seed)
    held_out = measure_accuracy(trainer.model, held_out_pairs()[:200], seed)
    found = {"rewards": rewards, "tuning": round(tuning, 4), "held_out": round(held_out, 4)}
    return {"side": side, "lr": lr, "seed": seed} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--phases", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    seeds = range(1, args.seeds + 1)
    jobs = [(side, lr, seed) for side in SIDES for seed in seeds for lr in LEARNING_RATES[side]]
    runs = []
    args.out.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for job in tqdm(jobs, unit="run"):
            runs.append(run(*job, args.phases, folder))
            args.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
