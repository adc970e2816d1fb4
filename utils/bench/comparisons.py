"""What the contestants are compared in: seconds and memory of a GRPO step, time to 0.90 accuracy.

A contestant is a module with a class `Contestant`, imported only when it is measured: each one's
memory is that of a process that holds it alone.

Time to 0.90 held-out accuracy is measured on additions, for each contestant at the best of its
learning rates: the embedded model, 16 prompts x 8 completions a step, one update, KL coefficient
0.001 (as `make demo` has it), constant learning rate. After every fourth step both are evaluated in
the same way, outside the measured time: 256 samples, whose standard error at 0.90 is 0.02, so times
come in steps of four and a lucky crossing counts, on both sides. The best learning rate is that of
the shortest time to the same accuracy on the pairs kept for tuning, with a seed of its own.
"""

import importlib
import itertools
import math
import statistics
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.bench.measuring import get_ratios, measure_peak, run_apart
from utils.bench.models import MODELS, Work, save_embedded, save_model
from utils.models.corpus import Pair, addition_prompt, held_out_pairs, tuning_pairs
from utils.models.loading import EMBEDDED_MODEL
from utils.rewards import reward_fn_addition

CONTESTANTS = {"ours": "utils.bench.ours", "trl": "utils.bench.trl"}
PEAKS = 3  # processes for a median of memory
SMALL = Work(n_prompts=4, group_size=4, gen_len=20)  # for models of all sizes
LARGE = ("124M", "smollm2_shape")  # whose memory is measured, too
TARGET, EVERY, MAX_STEPS = 0.90, 4, 80
RATES = (1e-3, 3e-3, 1e-2)
SEEDS, TRIAL_SEED = range(5), 100
ROWS = 256  # completions an evaluation
PATH_SEEDS, PATH_STEPS = range(3), 32


def load(name: str) -> Any:
    """Import a contestant's module."""
    return importlib.import_module(CONTESTANTS[name])


def measure_steps(folder: Path, rounds: int) -> dict:
    """Measure steps of the embedded model against TRL's best: 128 completions of exactly 40 tokens,
    and of up to 40 that end by themselves."""
    endless = save_embedded(folder / "embedded")
    fixed = compare(endless, Work(), rounds)
    fixed["memory_mib"] = measure_memory(endless, Work(), fixed["trl_configuration"])
    return {"fixed": fixed, "natural": compare(EMBEDDED_MODEL, Work(), rounds, is_fixed=False)}


def measure_scaling(folder: Path, rounds: int) -> dict:
    """Measure steps for models of four shapes with random weights, 16 completions of 20 tokens."""
    results = {}
    for name in MODELS:
        path = save_model(MODELS[name], folder / name)
        row = compare(path, SMALL, rounds, steps_to_choose=1 if name in LARGE else 2)
        if name in LARGE:
            row["memory_mib"] = measure_memory(path, SMALL, row["trl_configuration"])
        results[name] = row
    return results


def compare(
    folder: Path, work: Work, rounds: int, is_fixed: bool = True, steps_to_choose: int = 2
) -> dict:
    """Measure the seconds per step of both in turns: after each of TRL's steps one of ours.

    TRL runs in the fastest of its configurations at this work, by so many steps of each.
    """
    trl, ours = load("trl"), load("ours")
    best, tried = trl.choose_configuration(folder, work, steps_to_choose)
    if is_fixed:
        ours.Contestant(folder, work).check_length()
    sides = {
        "ours": ours.Contestant(folder, work),
        "trl": trl.Contestant(folder, work, **trl.CONFIGURATIONS[best]),
    }
    seconds: dict[str, list[float]] = {"ours": []}
    with tqdm(total=rounds + 1, desc="steps in turns", leave=False) as bar:

        def step_ours(step: int) -> None:
            seconds["ours"] += sides["ours"].train(1)
            bar.update()

        seconds["trl"] = sides["trl"].train(rounds + 1, step_ours)
    seconds = {name: values[1:] for name, values in seconds.items()}  # without the first
    return {
        "trl_configuration": best,
        "trl_seconds_by_configuration": tried,
        "seconds": seconds,
        "rate": {name: 1 / statistics.median(values) for name, values in seconds.items()},
        "ratios": get_ratios(seconds["trl"], seconds["ours"]),
        "parts": {name: side.get_parts() for name, side in sides.items()},
    }


def measure_memory(folder: Path, work: Work, trl_configuration: str) -> dict[str, list[dict]]:
    """Measure both sides' peaks, in turns, in processes of their own."""
    options = {"ours": {}, "trl": load("trl").CONFIGURATIONS[trl_configuration]}
    peaks: dict[str, list[dict]] = {name: [] for name in CONTESTANTS}
    for _, name in itertools.product(range(PEAKS), CONTESTANTS):
        peaks[name].append(run_apart(_measure_three_steps, name, folder, work, options[name]))
    return peaks


def _measure_three_steps(name: str, folder: Path, work: Work, options: dict) -> dict:
    contestant = load(name).Contestant(folder, work, **options)
    return measure_peak(lambda: contestant.train(3))


def measure_learning(folder: Path, rounds: int) -> dict:
    """Measure seconds and steps of training until the first evaluation that reaches the target."""
    del folder, rounds
    bar = tqdm(total=len(CONTESTANTS) * (len(RATES) + len(SEEDS)), desc="time to 0.90")

    def run(name: str, lr: float, seed: int, pairs: list[Pair]) -> dict:
        bar.set_postfix_str(f"{name}, lr {lr}, seed {seed}")
        result = learn(name, lr, seed, pairs)
        bar.update()
        return result

    trials = {
        name: {lr: [run(name, lr, TRIAL_SEED, tuning_pairs())] for lr in RATES}
        for name in CONTESTANTS
    }
    best = {
        name: min(RATES, key=lambda lr: trials[name][lr][0]["seconds"] or math.inf)
        for name in CONTESTANTS
    }
    runs: dict[str, list[dict]] = {name: [] for name in CONTESTANTS}
    for seed, name in itertools.product(SEEDS, CONTESTANTS):  # in turns
        runs[name].append(run(name, best[name], seed, held_out_pairs()))
    bar.close()
    return {"lr": best, "runs": runs, "trials": trials}


def learn(name: str, lr: float, seed: int, pairs: list[Pair]) -> dict[str, Any]:
    """Train a contestant until an evaluation reaches the target, and say when that was."""
    options = {}
    if name == "trl":
        best, _ = load("trl").choose_configuration(EMBEDDED_MODEL, Work())
        options = load("trl").CONFIGURATIONS[best]
    contestant = load(name).Contestant(EMBEDDED_MODEL, Work(lr=lr, beta=0.001), seed, **options)
    pairs = (pairs * ROWS)[:ROWS]
    prompts, answers = [addition_prompt(a, b) for a, b in pairs], [str(a + b) for a, b in pairs]
    accuracies: list[float] = []

    def is_over(step: int) -> bool:
        if step % EVERY:
            return False
        texts = []
        for start in range(0, ROWS, 128):
            texts += contestant.sample(prompts[start : start + 128], step + start)
        accuracies.append(reward_fn_addition(texts, answers).mean().item())
        return accuracies[-1] >= TARGET

    seconds = contestant.train(MAX_STEPS, is_over)
    is_there = accuracies[-1] >= TARGET
    return {
        "seconds": sum(seconds) if is_there else None,
        "steps": len(seconds) if is_there else None,
        "accuracy": accuracies,
    }


def compare_paths(folder: Path, rounds: int) -> dict:
    """Measure rewards by step of the same runs on the native forward and on the bridge."""
    del folder, rounds  # the embedded model; a curve is no time
    ours = load("ours")
    rewards: dict[str, list[list[float]]] = {"native": [], "bridge": []}
    for seed, path in tqdm([*itertools.product(PATH_SEEDS, rewards)], desc="paths", leave=False):
        contestant = ours.Contestant(EMBEDDED_MODEL, Work(lr=3e-3, beta=0.001), seed)
        if path == "bridge":
            ours.use_the_bridge(contestant.trainer)
        curve: list[float] = []

        def note(step: int, trainer=contestant.trainer, curve=curve) -> None:
            curve.append(trainer.metrics["reward"][0])

        contestant.train(PATH_STEPS, note)
        rewards[path].append(curve)
    return {"rewards": rewards}
