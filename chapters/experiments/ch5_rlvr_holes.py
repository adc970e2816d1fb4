"""A verifier with a hole and its fix, and three ways to treat completions that were cut off.

`python -m chapters.experiments.ch5_rlvr_holes` writes chapters/results/ch5_rlvr_holes.json. Every
run records, for each rollout, the reward that it was given and the share that was really right.
"""

import argparse
import random
import re
from pathlib import Path

import torch

from chapters.experiments.ch5_rlvr_ablations import carries, go_on, make_setup, measure
from solutions.ch5_rlvr import RlvrArgs, RlvrTrainer, reward_fn_correct
from utils.models.corpus import Pair, held_out_pairs, training_pairs
from utils.rewards import is_worked

RESULT = Path(__file__).parents[1] / "results" / "ch5_rlvr_holes.json"
SHORT = 24  # tokens: enough for a direct answer, not for a worked one


def reward_fn_with_a_hole(samples: list[str], answers: list[str]) -> torch.Tensor:
    """A verifier with a hole: any beginning of the answer passes, and so does none at all."""
    rewards = []
    for text, answer in zip(samples, answers, strict=True):
        match = re.search(r"A: ([0-9]*)", text)
        found = match[1] if match else ""
        rewards.append(float(answer.startswith(found)))
    return torch.tensor(rewards)


def make_easy_and_hard_pairs() -> list[Pair]:
    """A thousand pairs of two digits, and as many of three, which the model cannot add."""
    rng = random.Random(0)
    hard = [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(1000)]
    return training_pairs()[:1000] + hard


def make_carrying_pairs() -> list[Pair]:
    return [pair for pair in training_pairs() if carries(pair)]


SLOW = {"base_lr": 1e-3, "total_phases": 24}  # at 3e-3 both are unsteady on the hard pairs
SETTINGS = {
    "verifier with a hole": (make_easy_and_hard_pairs, reward_fn_with_a_hole, SLOW),
    "verifier mended": (make_easy_and_hard_pairs, reward_fn_correct, SLOW),
    "cut off: scored 0": (make_carrying_pairs, reward_fn_correct, {"gen_len": SHORT}),
    "cut off: left out": (
        make_carrying_pairs,
        reward_fn_correct,
        {"gen_len": SHORT, "truncation": "mask"},
    ),
    "cut off: penalty of 1": (
        make_carrying_pairs,
        reward_fn_correct,
        {"gen_len": SHORT, "truncation": "penalty"},
    ),
}
KEYS = ("reward", "completion_len", "truncated_frac", "informative_frac")


def run(setting: str, seed: int, phases: int, folder: str) -> dict:
    make_pairs, reward_fn, options = SETTINGS[setting]
    by_rollout = []

    def recorded(samples, answers):
        right = reward_fn_correct(samples, answers).mean().item()
        worked = sum(map(is_worked, samples)) / len(samples)
        by_rollout.append((round(right, 4), round(worked, 4)))
        return reward_fn(samples, answers)

    setup = make_setup(make_pairs(), seed, phases, folder, reward_fn=recorded)
    trainer = RlvrTrainer(RlvrArgs(**setup | options))
    history = trainer.train()
    held_out = [pair for pair in held_out_pairs() if carries(pair)][:100]
    completions = measure(trainer.model, held_out, 2, seed)
    right = [
        reward_fn_correct(texts, [a + b] * len(texts)).mean().item()
        for (a, b), texts in zip(held_out, completions, strict=True)
    ]
    found = {key: [round(row[key], 4) for row in history] for key in KEYS}
    found["right"], found["worked"] = (list(column) for column in zip(*by_rollout, strict=True))
    found["held_out"] = round(sum(right) / len(right), 4)
    shown = [(345, 178), (268, 671), *held_out[:4]]
    found["samples"] = [
        (f"{a}+{b}", texts[0])
        for (a, b), texts in zip(shown, measure(trainer.model, shown, 1, seed), strict=True)
    ]
    return {"setting": setting, "seed": seed, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--phases", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    jobs = [(setting, seed) for seed in range(1, args.seeds + 1) for setting in SETTINGS]
    go_on(
        args.out,
        jobs,
        lambda run: (run["setting"], run["seed"]),
        lambda setting, seed, folder: run(setting, seed, args.phases, folder),
    )


if __name__ == "__main__":
    main()
