"""The demonstration: PPO on the mood of reviews and GRPO on additions, before and after.

`python -m utils.course.demo` trains both once with the reference solutions on the embedded model;
`--seeds 5` repeats it and prints the spread. Prompts of the measurements are in no training set.
On a busy machine each training ends after `--seconds`, wherever it is, and fewer prompts are
measured; with `--seeds` nothing is cut short.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from solutions.ch0_sampling import sample_completions
from solutions.ch2_ppo import RLHFArgs, RLHFTrainer
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from utils.course.evaluation import evaluate_additions, evaluate_reviews, pair_up
from utils.course.session import choose_threads
from utils.models.corpus import (
    addition_prompt,
    held_out_pairs,
    review_prompts,
    training_pairs,
)
from utils.models.loading import ALL_LINEAR_SITES
from utils.plotting import format_spread, plot_history
from utils.rewards import reward_fn_addition
from utils.tracking import Run

SECONDS = 40  # of one training: on two idle processors it takes 30
MEASURED_SHARE = 1 / 3  # of that time, which the first measurement may take
SOME = 8  # where it would take longer, every eighth prompt is measured


def make_ppo_trainer(out: Path, seed: int, **overrides):
    """Return a trainer of PPO on the sentiment of reviews."""
    setup = {
        "prompts": review_prompts()[0],
        "total_phases": 30,
        "batches_per_learning_phase": 1,
        "warmup_steps": 5,
    }
    return RLHFTrainer(RLHFArgs(**setup | _get_run_args("ppo", out, seed) | overrides))


def make_grpo_trainer(out: Path, seed: int, **overrides):
    """Return a trainer of GRPO on additions, with adapters on every linear site.

    Each phase has one update. The KL term is almost nothing (0.001): it is there so that the KL is
    measured.
    """
    pairs = training_pairs()
    setup = {
        "prompts": [addition_prompt(a, b) for a, b in pairs],
        "columns": {"answers": [str(a + b) for a, b in pairs]},
        "reward_fn": reward_fn_addition,
        "gen_len": 40,
        "lora_sites": ALL_LINEAR_SITES,
        "lora_rank": 8,
        "total_phases": 40,
        "num_minibatches": 1,
        "batches_per_learning_phase": 1,
        "base_lr": 3e-3,
        "warmup_steps": 0,
        "final_scale": 0.0,
        "ent_coef": 0.0,
        "kl_coef": 0.001,
    }
    return GrpoTrainer(GrpoArgs(**setup | _get_run_args("grpo", out, seed) | overrides))


def _get_run_args(name: str, out: Path, seed: int) -> dict:
    if (out / name / "metrics.jsonl").exists():  # an earlier demonstration
        shutil.rmtree(out / name)
    return {"name": name, "runs_dir": str(out), "seed": seed, "samples_every": 10}


def run_ppo(out: Path, seed: int, seconds: float, **overrides) -> dict[str, Any]:
    """Train PPO and measure the mood of reviews before and after, on held-out beginnings."""
    trainer, prompts = make_ppo_trainer(out, seed, **overrides), review_prompts()[1]

    def measure(every: int) -> dict[str, float]:
        return evaluate_reviews(trainer.model, prompts[::every], trainer.args.reward_fn, seed=seed)

    return _run("PPO on the sentiment of reviews", trainer, prompts, measure, seconds)


def run_grpo(out: Path, seed: int, seconds: float, **overrides) -> dict[str, Any]:
    """Train GRPO and measure additions before and after, on all held-out pairs.

    The run has fewer phases than those that the chapters record, enough to see it learn.
    """
    trainer = make_grpo_trainer(out, seed, **{"total_phases": 25} | overrides)
    pairs = held_out_pairs()
    prompts = [addition_prompt(a, b) for a, b in pairs]

    def measure(every: int) -> dict[str, float]:
        return evaluate_additions(trainer.model, pairs[::every], seed=seed)

    return _run("GRPO on additions", trainer, prompts, measure, seconds)


def _run(
    label: str,
    trainer: RLHFTrainer,
    prompts: list[str],
    measure: Callable[[int], dict[str, float]],
    seconds: float,
) -> dict[str, Any]:
    """Train between two measurements, and add three prompts with what is written after them.

    If the first eighth of the prompts says that all would take more than `MEASURED_SHARE` of the
    seconds, it is all that is measured.
    """
    seed = trainer.args.seed
    print(f"\n{label}, seed {seed}: measure, train, measure again")
    start = time.perf_counter()
    every, before = SOME, measure(SOME) if seconds < math.inf else {}
    if SOME * (time.perf_counter() - start) <= MEASURED_SHARE * seconds:
        every, before = 1, measure(1)
    else:
        print("Only every eighth prompt is measured, because the machine is busy or slow.")
    start = time.perf_counter()
    train(trainer, seconds)
    took = time.perf_counter() - start
    after = measure(every)
    generator = torch.Generator(trainer.device).manual_seed(seed)
    chosen = prompts[:: max(len(prompts) // 3, 1)][:3]
    sampled = sample_completions(trainer.model, chosen, trainer.args.gen_len, generator=generator)
    return {
        **pair_up(before, after),
        "kl": after["kl"],
        "seconds": took,
        "phases": f"{trainer.phase} of {trainer.args.total_phases}",
        "samples": [list(pair) for pair in zip(chosen, sampled.texts, strict=True)],
    }


def train(trainer: RLHFTrainer, seconds: float) -> None:
    """Train as `trainer.train()` does, but begin no phase, except the first, after these seconds,
    and say so."""
    total, start = trainer.args.total_phases, time.perf_counter()
    with Run(trainer) as run:
        while trainer.phase < total:
            trainer.metrics.clear()
            trainer.learning_phase(trainer.rollout_phase())
            trainer.phase += 1
            run.end_phase()
            if time.perf_counter() - start >= seconds:
                break
    if trainer.phase < total:
        print(
            f"Training stopped after {trainer.phase} of {total} phases, because the machine is busy"
            f" or slow: they had {seconds:g} seconds. To give them more, use `python -m"
            " utils.course.demo --seconds 600`."
        )


ROWS = {  # trainer: (label, name of the measurement)
    "ppo": (
        ("mean sentiment of reviews", "reward"),
        ("nll under the base, nats per token", "nll"),
        ("distinct bigrams", "distinct_bigrams"),
    ),
    "grpo": (
        ("accuracy, sampled", "accuracy"),
        ("accuracy, greedy", "greedy"),
        ("accuracy within worked answers", "accuracy_worked"),
        ("accuracy within direct answers", "accuracy_direct"),
        ("at least one of 8 samples right (pass@8)", "pass"),
        ("share of worked answers", "worked"),
        ("completion length, tokens", "completion_len"),
    ),
}


def format_summary(summaries: list[dict]) -> str:
    """Format one table, before and after; with several seeds the mean and, in brackets, the
    range."""

    def cell(trainer: str, key: str) -> str:
        values = [summary[trainer][key] for summary in summaries]
        return f"{values[0]:.3f}" if len(values) == 1 else format_spread(values)

    table = []
    for trainer, rows in ROWS.items():
        name = trainer.upper()
        for label, key in rows:
            values = (cell(trainer, f"{key}_{when}") for when in ("before", "after"))
            table.append((name, label, *values))
        table.append((name, "KL from the base, nats per token", "0", cell(trainer, "kl")))
        table.append((name, "phases of training", "", summaries[0][trainer]["phases"]))
        table.append((name, "seconds of training", "", cell(trainer, "seconds")))
    headers = ("", "held-out", "before", "after")
    return tabulate(table, headers=headers, tablefmt="github", disable_numparse=True)


def run_demo(out: Path, seed: int, seconds: float = math.inf, **overrides) -> dict:
    """Run both trainers once: write `out/summary.json`, plots beside it, and return the summary.

    Each training begins no phase after these seconds.
    """
    runs = {"ppo": run_ppo, "grpo": run_grpo}
    summary = {name: run(out, seed, seconds, **overrides) for name, run in runs.items()}
    for trainer in summary:
        lines = (out / trainer / "metrics.jsonl").read_text().splitlines()
        plot_history({trainer: [json.loads(line) for line in lines]}, out / f"{trainer}.png")
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, help="repeat with this many seeds, from 0")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="of one training, on a busy machine (default: %(default)s; with --seeds no limit)",
    )
    args = parser.parse_args()
    if args.seeds is not None and args.seeds < 1:
        parser.error(f"--seeds should be at least 1, but is {args.seeds}")
    choose_threads()
    seeds, seconds = {args.out: args.seed}, args.seconds
    if args.seeds is not None:
        seconds = math.inf
        seeds = {args.out / f"seed-{k}": k for k in range(args.seeds)}
    try:
        summaries = [run_demo(out, seed, seconds) for out, seed in seeds.items()]
    except KeyboardInterrupt:
        print("The demonstration was stopped; it starts over next time.")
        raise SystemExit(130) from None
    if args.seeds is not None:
        (args.out / "seeds.json").write_text(json.dumps(summaries, indent=2) + "\n")
    table = format_summary(summaries)
    (args.out / "summary.md").write_text(table + "\n")
    print(f"\n{table}\n")
    for name, summary in summaries[-1].items():
        print(f"What the model writes after {name.upper()}, on prompts that it was not trained on:")
        for prompt, text in summary["samples"]:
            print("    " + f"{prompt}|{text}".strip().replace("\n", "⏎"))
    print(f"\nplots and summary.json: {args.out}")


if __name__ == "__main__":
    main()
