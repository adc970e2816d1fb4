"""GRPO on additions with several seeds: how the worked steps take over.

`python -m chapters.experiments.ch3_grpo_additions` writes
chapters/results/ch3_grpo_additions.json: metrics by phase, and measurements on pairs that are in no
training text, before and after.
"""

import argparse
import json
import tempfile
from pathlib import Path

from tqdm import tqdm

from utils.course.demo import make_grpo_trainer
from utils.course.evaluation import evaluate_additions
from utils.models.corpus import held_out_pairs
from utils.rewards import is_worked, reward_fn_addition

RESULT = Path(__file__).parents[1] / "results" / "ch3_grpo_additions.json"
KEYS = (
    *("reward", "reward_std", "completion_len", "kl_k3", "kl_exact", "entropy"),
    *("objective", "grad_norm"),
)


def run(seed: int, phases: int, n_pairs: int, runs_dir: str) -> dict:
    """Train once; the share of worked answers is counted where the rewards are."""
    worked = []

    def reward_fn(samples, answers):
        worked.append(sum(map(is_worked, samples)) / len(samples))
        return reward_fn_addition(samples, answers)

    trainer = make_grpo_trainer(
        Path(runs_dir),
        seed,
        reward_fn=reward_fn,
        total_phases=phases,
        kl_kind="exact",
        samples_every=0,
        checkpoint_every=0,
        device="cpu",
    )
    pairs = held_out_pairs()[:n_pairs]
    before = evaluate_additions(trainer.model, pairs, seed=seed)
    history = trainer.train()
    after = evaluate_additions(trainer.model, pairs, seed=seed)
    by_phase = {key: [round(row[key], 6) for row in history] for key in KEYS}
    return {"seed": seed, "before": before, "after": after, "worked": worked, **by_phase}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--phases", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=150, help="of those held out, to measure on")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    seeds = tqdm(range(1, args.seeds + 1), unit="run")
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(seed, args.phases, args.pairs, folder) for seed in seeds]
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
