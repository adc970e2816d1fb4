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
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.bench.measuring import measure_peak, run_apart
from utils.bench.models import Work, make_data, save_embedded, save_random
from utils.models.corpus import Pair, held_out_pairs, tuning_pairs
from utils.models.loading import EMBEDDED_MODEL
from utils.rewards import reward_fn_addition

CONTESTANTS = ("ours", "trl")
PEAKS = 3  # processes for a median of memory
ROUNDS = 7  # steps for a median of seconds
SMALL = Work(n_prompts=4, group_size=4, gen_len=20)  # for the larger model
TARGET, EVERY, MAX_STEPS = 0.90, 4, 80
RATES = (1e-3, 3e-3, 1e-2)
SEEDS, TRIAL_SEED = range(5), 100
ROWS = 256  # completions an evaluation
NEVER = {"seconds": None, "steps": None}  # of a run that did not reach the target


def load(name: str) -> Any:
    """Import a contestant's module."""
    return importlib.import_module(f"utils.bench.{name}")


def measure_steps() -> dict:
    """Measure steps against TRL's best: of the embedded model, 128 completions of exactly 40 tokens
    and of up to 40 that end by themselves; of SmolLM2's shape, 16 completions of 20 tokens."""
    with tempfile.TemporaryDirectory() as name:
        endless, llama = save_embedded(Path(name, "embedded")), save_random(Path(name, "llama"))
        return {
            "fixed": compare(endless, Work()),
            "natural": compare(EMBEDDED_MODEL, Work(), is_fixed=False),
            "larger": compare(llama, SMALL, steps_to_choose=1),
        }


def compare(folder: Path, work: Work, is_fixed: bool = True, steps_to_choose: int = 2) -> dict:
    """Measure the seconds per step of both in turns: after each of TRL's steps one of ours. Where
    completions have a fixed length, measure memory too.

    TRL runs in the fastest of its configurations at this work, by so many steps of each.
    """
    trl, ours = load("trl"), load("ours")
    best, tried = trl.choose_configuration(folder, work, steps_to_choose)
    result: dict[str, Any] = {"trl_configuration": best, "trl_seconds_by_configuration": tried}
    if is_fixed:
        ours.Contestant(folder, work).check_length()
        result["memory_mib"] = measure_memory(folder, work, best)
    contestant = ours.Contestant(folder, work)
    seconds: list[float] = []
    with tqdm(total=ROUNDS + 1, desc="steps in turns", leave=False) as bar:

        def step_ours(step: int) -> None:
            seconds.extend(contestant.train(1))
            bar.update()

        of_trl = trl.Contestant(folder, work, **trl.CONFIGURATIONS[best])
        both = {"trl": of_trl.train(ROUNDS + 1, step_ours), "ours": seconds}
    return result | {"seconds": {name: values[1:] for name, values in both.items()}}


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


def measure_learning() -> dict:
    """Measure seconds and steps of training until the first evaluation that reaches the target."""
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
    prompts, answers = make_data((pairs * ROWS)[:ROWS])
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
    found = {"seconds": sum(seconds), "steps": len(seconds)} if is_there else NEVER
    return found | {"accuracy": accuracies}
