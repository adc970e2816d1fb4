"""The runs of chapter 2 that are too long for its notebook: what lambda and the KL term do.

    python chapters/experiments/ch2_ppo_runs.py

trains 18 times, three seeds for each setting, on one core, and writes
chapters/results/ch2_ppo_runs.json.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from solutions.ch0_sampling import get_samples  # noqa: E402
from solutions.ch2_ppo import (  # noqa: E402
    RLHFArgs,
    RLHFTrainer,
    reward_fn_char_count,
    reward_fn_sentiment,
)
from utils.course.evaluation import evaluate_reviews  # noqa: E402
from utils.models.corpus import review_prompts  # noqa: E402

METRICS = ("phase", "reward", "entropy", "kl_exact", "kl_k3", "approx_kl", "clip_frac")
LAMBDA = {  # the sentiment of reviews
    "reward_fn": reward_fn_sentiment,
    "prompts": review_prompts()[0],
    "total_phases": 16,
    "warmup_steps": 0,
}
KL = {  # as many full stops as possible, with a learning rate that finds out what the reward allows
    "reward_fn": reward_fn_char_count,
    "total_phases": 30,
    "warmup_steps": 0,
    "base_lr": 3e-3,
    "gen_len": 24,
}
SETTINGS = {
    "lambda 0": LAMBDA | {"lam": 0.0},
    "lambda 0.95": LAMBDA | {"lam": 0.95},
    "lambda 1": LAMBDA | {"lam": 1.0},
    "kl_coef 0": KL | {"kl_coef": 0.0},
    "kl_coef 0.2, in the loss": KL | {"kl_coef": 0.2},
    "kl_coef 0.2, in the reward": KL | {"kl_coef": 0.2, "kl_in": "reward"},
}
COMMON = {"batch_size": 64, "samples_every": 0, "checkpoint_every": 0, "device": "cpu"}


def run(setting: dict, seed: int) -> dict:
    """One run: metrics by phase, measurements before and after, a few samples."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = RLHFTrainer(RLHFArgs(seed=seed, runs_dir=folder, **COMMON | setting))
        trainer.train()
    args, model = trainer.args, trainer.model
    prompts, n_samples = ([args.prefix], 128) if args.prompts is None else (review_prompts()[1], 8)
    after = evaluate_reviews(model, prompts, args.reward_fn, n_samples, args.gen_len, seed)
    with model.merged():
        generator = torch.Generator().manual_seed(seed)
        texts = get_samples(model, prompts[:1] * 4, args.gen_len, generator=generator).texts
    history = [{k: round(row[k], 5) for k in METRICS if k in row} for row in trainer.history]
    return {"seed": seed, "history": history, "after": after, "texts": texts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--phases", type=int, help="of every run, instead of the settings' own")
    parser.add_argument("--out", type=Path, default=ROOT / "chapters/results/ch2_ppo_runs.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start, results = time.process_time(), {}
    todo = [(name, seed) for seed in range(1, args.seeds + 1) for name in SETTINGS]
    for name, seed in tqdm(todo, unit="run"):
        phases = {} if args.phases is None else {"total_phases": args.phases}
        results.setdefault(name, []).append(run(SETTINGS[name] | phases, seed))
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    tqdm.write(f"{time.process_time() - start:.0f} s of one core")


if __name__ == "__main__":
    main()
