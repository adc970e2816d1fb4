"""GRPO and PPO on a real language model: `make real`, or `python -m utils.course.real_model`.

Two runs on SmolLM2-135M-Instruct, each with samples and measurements before and after: GRPO on sums
of one digit, which a program checks, and PPO on the mood of free text by VADER's lexicon. `--only`
makes others: GRPO on the mood, and on products with a calculator, whose answers take a line of
working. No prompt that is measured on is trained on.
"""

import argparse
import json
import random
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from tabulate import tabulate
from torch import Tensor
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from solutions.ch2_ppo import RLHFTrainer
from solutions.ch3_grpo import GrpoTrainer
from utils.course.evaluation import (
    measure_distinct_bigrams,
    measure_kl,
    measure_nll,
    pair_up,
    sample_prompts,
)
from utils.course.session import choose_threads
from utils.models.corpus import Pair, split_digit_pairs
from utils.models.fetch import MODELS, ORIGIN, fetch
from utils.plotting import plot_history
from utils.rewards import reward_fn_sum

MODEL = "smollm2"
SHOTS = "3+4=7\n5+1=6\n2+8=10\n"
CALCULATOR_SHOTS = "Q: 12*10\nA: 120\nQ: 23*47\nCALC 23*47\n= 1081\nA: 1081\n"
BEGINNINGS = ["This movie is", "The film", "I watched it and", "My review:"]
OTHER_BEGINNINGS = ["The plot was", "After the first hour I", "The actors", "In the end this book"]
SHOWN = ["sums", "mood_ppo"]  # what `make real` runs
SETUP = {
    "warmup_steps": 0,
    "base_lr": 1e-3,
    "num_minibatches": 2,
    "batches_per_learning_phase": 1,
    "samples_every": 4,
}


class VaderReward:
    """VADER's compound score of each completion, in [-1, 1]."""

    def __init__(self) -> None:
        self.analyzer = SentimentIntensityAnalyzer()

    def __call__(self, samples: list[str]) -> Float[Tensor, "batch"]:
        return torch.tensor([self.analyzer.polarity_scores(text)["compound"] for text in samples])


def calculate_line(turn: str) -> str | None:
    """Answer a line that is a call with a line, and end the completion after any other line."""
    match = re.fullmatch(r"CALC ([0-9]{1,9})\*([0-9]{1,9})\n", turn)
    return f"= {int(match[1]) * int(match[2])}\n" if match else None


def reward_fn_last_line(samples: list[str], answers: list[int]) -> Float[Tensor, "batch"]:
    """Reward with 1 where the last line is "A: " and the answer, else 0.

    Raises ValueError if there is not one answer for each sample.
    """
    lines = [text.removesuffix("\n").split("\n")[-1] for text in samples]
    pairs = zip(lines, answers, strict=True)
    return torch.tensor([float(line == f"A: {answer}") for line, answer in pairs])


def split_products() -> tuple[list[Pair], list[Pair]]:
    """Split products of two numbers of two digits: those to train on, and 32 that are held out, in
    either order."""
    pairs = [(a, b) for a in range(11, 100) for b in range(a, 100)]
    random.Random(0).shuffle(pairs)
    return pairs[32:], pairs[:32]


@dataclass
class Task:
    """A run: its trainer's arguments, and the prompts it is measured on."""

    label: str
    trainer_class: type[RLHFTrainer]
    setup: dict[str, Any]
    prompts: list[str]  # held out
    n_samples: int  # of each
    columns: dict[str, list[Any]] = field(default_factory=dict)


def write_questions(form: str, pairs: list[Pair], answers: list[Any]) -> dict[str, Any]:
    """Return prompts about pairs of numbers, and their answers as a column."""
    prompts = [form.format(a=a, b=b) for a, b in pairs]
    return {"prompts": prompts, "columns": {"answers": answers}}


def make_tasks() -> dict[str, Task]:
    """Make the runs by name."""
    sums = [
        write_questions(f"{SHOTS}{{a}}+{{b}}=", pairs, [str(a + b) for a, b in pairs])
        for pairs in split_digit_pairs()
    ]
    learn_sums = sums[0] | {
        "reward_fn": reward_fn_sum,
        "batch_size": 64,
        "gen_len": 4,
        "total_phases": 16,
    }
    mood = {
        "prompts": BEGINNINGS,
        "reward_fn": VaderReward(),
        "batch_size": 32,
        "gen_len": 24,
        "total_phases": 12,
        "base_lr": 2e-3,
    }
    products = [
        write_questions(f"{CALCULATOR_SHOTS}Q: {{a}}*{{b}}\n", pairs, [a * b for a, b in pairs])
        for pairs in split_products()
    ]
    calculate = products[0] | {
        "reward_fn": reward_fn_last_line,
        "environment": calculate_line,
        "turn_end": "\n",
        "max_calls": 1,
        "batch_size": 32,
        "num_minibatches": 1,
        "gen_len": 26,
        "total_phases": 6,
        "kl_coef": 0.0,
    }
    by_ppo = mood | {"kl_coef": 0.05}
    moods: dict[str, Any] = {"prompts": OTHER_BEGINNINGS, "n_samples": 16}
    title = "GRPO on products of two digits, with a calculator"
    return {
        "sums": Task("GRPO on sums of one digit", GrpoTrainer, learn_sums, n_samples=8, **sums[1]),
        "calculator": Task(title, GrpoTrainer, calculate, n_samples=1, **products[1]),
        "mood": Task("GRPO on the mood of free text", GrpoTrainer, mood, **moods),
        "mood_ppo": Task("PPO on the mood of free text", RLHFTrainer, by_ppo, **moods),
    }


def measure(trainer: RLHFTrainer, task: Task, seed: int) -> dict[str, Any]:
    """Measure held-out prompts: reward, nll under the base, distinct bigrams and the KL; keep
    samples."""
    model, gen_len, reward_fn = trainer.model, trainer.args.gen_len, task.setup["reward_fn"]
    environment = trainer.environment if isinstance(trainer, GrpoTrainer) else None
    prompts = task.prompts * task.n_samples
    columns = {name: column * task.n_samples for name, column in task.columns.items()}
    batches = sample_prompts(model, prompts, gen_len, 1.0, seed, 64, environment)
    texts = [text for batch in batches for text in batch.texts]
    found = {
        "heldout": reward_fn(texts, **columns).mean().item(),
        "nll": measure_nll(model, batches),
        "distinct_bigrams": measure_distinct_bigrams(texts),
        "kl": measure_kl(model, batches),
    }
    if task.columns and environment is None:
        greedy = sample_prompts(model, task.prompts, gen_len, temperature=0, rows=64)
        answers = [text for batch in greedy for text in batch.texts]
        found["greedy"] = reward_fn(answers, **task.columns).mean().item()
    return found | {"samples": [[p, t] for p, t in zip(task.prompts, texts, strict=False)][:4]}


def run_task(name: str, task: Task, folder: Path, out: Path, seed: int, **overrides: Any) -> dict:
    """Train one run and return its row of the summary."""
    shutil.rmtree(out / name, ignore_errors=True)  # of an earlier run
    run = {"base_model": folder, "name": name, "runs_dir": out, "seed": seed}
    args = task.trainer_class.args_class(**SETUP | task.setup | run | overrides)
    trainer = task.trainer_class(args)
    print(f"\n{task.label}, seed {seed}: measure, train, measure again", flush=True)
    before = measure(trainer, task, seed)
    start = time.perf_counter()
    history = trainer.train()
    seconds = time.perf_counter() - start
    after = measure(trainer, task, seed)
    plot_history({name: history}, out / f"{name}.png")
    show_samples(task, before["samples"], after["samples"])
    return {
        "model": MODEL,
        "origin": describe_origin(folder),
        "task": name,
        "seed": seed,
        "reward_before": history[0]["reward"],
        "reward_after": history[-1]["reward"],
        **pair_up(before, after),
        "kl": after["kl"],
        "seconds": seconds,
        "rewards": [row["reward"] for row in history],
        "phase_seconds": [row["seconds"] for row in history],
    }


def describe_origin(folder: Path) -> str:
    """Return where a folder's weights come from, as `utils.models.fetch` has noted."""
    note = folder / ORIGIN
    return note.read_text().strip().split("\n\n")[-1] if note.exists() else str(folder)


def show_samples(task: Task, before: list, after: list) -> None:
    """Print samples of the same prompts side by side, and mark those that a program has checked."""
    marked = []
    for samples in (before, after):
        texts = [text for _, text in samples]
        shown = [text.strip().replace("\n", "⏎") for text in texts]
        if task.columns:
            columns = {name: column[: len(texts)] for name, column in task.columns.items()}
            rewards = task.setup["reward_fn"](texts, **columns)
            pairs = zip(shown, rewards, strict=True)
            shown = [f"{'✓' if reward > 0 else '✗'} {text}" for text, reward in pairs]
        marked.append(shown)
    prompts = [prompt.strip().split("\n")[-1] for prompt, _ in before]
    rows = zip(prompts, *marked, strict=True)
    print(tabulate(rows, ("held-out prompt", "before", "after"), maxcolwidths=[20, 45, 45]))


ROWS = {
    "heldout": "held-out reward",
    "greedy": "held-out reward, greedy",
    "nll": "nll under the base, nats per token",
    "distinct_bigrams": "distinct bigrams",
}


def format_summary(summary: list[dict]) -> str:
    """Format the runs as one table."""
    table = []
    for row in summary:
        for key, label in ROWS.items():
            if f"{key}_before" in row:
                values = (f"{row[f'{key}_{when}']:.2f}" for when in ("before", "after"))
                table.append((f"{row['task']}, seed {row['seed']}", label, *values))
        table.append(("", "KL from the base, nats per token", "0", f"{row['kl']:.2f}"))
        table.append(("", "seconds of training", "", f"{row['seconds']:.0f}"))
    return tabulate(table, ("run", "", "before", "after"), tablefmt="github", disable_numparse=True)


def main() -> None:
    tasks = make_tasks()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=tasks,
        default=SHOWN,
        metavar="RUN",
        help=f"one or more of {', '.join(tasks)} (default: {' '.join(SHOWN)})",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path("runs/real"))
    args = parser.parse_args()
    try:
        folder = fetch(MODEL)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    choose_threads()
    print(f"{MODELS[MODEL].title}, {MODELS[MODEL].licence}: {folder}")
    file = args.out / "summary.json"
    args.out.mkdir(parents=True, exist_ok=True)
    if not file.exists() and any(args.out.iterdir()):
        parser.error(f"--out should be a new folder, or one of earlier runs, but {args.out} is not")
    summary = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps(summary, indent=1) + "\n")
    for seed, name in dict.fromkeys((seed, name) for seed in args.seeds for name in args.only):
        out = args.out if len(args.seeds) == 1 else args.out / f"seed-{seed}"
        try:
            row = run_task(name, tasks[name], folder, out, seed)
        except KeyboardInterrupt:
            parser.exit(130, f"\nStopped in {name}, seed {seed}; what was finished is in {file}.\n")
        summary = [old for old in summary if (old["task"], old["seed"]) != (name, seed)] + [row]
        file.write_text(json.dumps(summary, indent=1) + "\n")
    print(f"\n{format_summary(summary)}\n\nplots and summary.json: {args.out}")


if __name__ == "__main__":
    main()
