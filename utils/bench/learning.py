"""Time to 0.90 held-out accuracy on additions, each side at the best of its learning rates.

The embedded model, 16 prompts x 8 completions a step, one update, KL coefficient 0.001 (as
`make demo` has it), constant learning rate. Every fourth step both are evaluated in the same way,
outside the measured time: 256 samples, whose standard error at 0.90 is 0.02, so times come in
steps of four and a lucky crossing counts, on both sides. The best learning rate is that of the
shortest time to the same accuracy on the pairs kept for tuning, with a seed of its own.
"""

import itertools
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from solutions.ch0_sampling import sample_completions
from utils.bench.measuring import get_median
from utils.bench.models import Work
from utils.bench.trainers import load_trl, make_trainer, run_step, use_the_bridge
from utils.models.corpus import Pair, addition_prompt, held_out_pairs, tuning_pairs
from utils.models.loading import EMBEDDED_MODEL
from utils.rewards import reward_fn_addition

TARGET, EVERY, MAX_STEPS = 0.90, 4, 80
RATES = (1e-3, 3e-3, 1e-2)
SEEDS, TRIAL_SEEDS = range(5), (100,)
ROWS = 256  # completions an evaluation
PATH_SEEDS, PATH_STEPS, LR_OF_PATHS = range(3), 32, 3e-3


def measure_learning(folder: Path, rounds: int) -> dict:
    """Measure seconds and steps of training until the first evaluation that reaches the target."""
    del folder, rounds
    sides = {"ours": learn, "trl": learn_by_trl}
    bar = tqdm(total=2 * (len(RATES) * len(TRIAL_SEEDS) + len(SEEDS)), desc="time to 0.90")

    def run(side: str, lr: float, seed: int, pairs: list[Pair]) -> dict:
        bar.set_postfix_str(f"{side}, lr {lr}, seed {seed}")
        result = sides[side](lr, seed, pairs)
        bar.update()
        return result

    trials = {
        side: {lr: [run(side, lr, seed, tuning_pairs()) for seed in TRIAL_SEEDS] for lr in RATES}
        for side in sides
    }
    best = {
        side: min(RATES, key=lambda lr: get_median([_or_never(run) for run in trials[side][lr]]))
        for side in sides
    }
    runs: dict[str, list[dict]] = {side: [] for side in sides}
    for seed in SEEDS:  # in turns
        for side in sides:
            runs[side].append(run(side, best[side], seed, held_out_pairs()))
    bar.close()
    return {"lr": best, "runs": runs, "trials": trials}


def _or_never(run: dict) -> float:
    return math.inf if run["seconds"] is None else run["seconds"]


class Race:
    """One run: evaluates every few steps, with the clock stopped, and says when to stop."""

    def __init__(self, sample: Callable[[list[str], int], list[str]], pairs: list[Pair]):
        self.sample = sample
        self.pairs = (pairs * ROWS)[:ROWS]
        self.result: dict[str, Any] = {"seconds": None, "steps": None, "accuracy": []}

    def is_over(self, step: int, seconds: float) -> bool:
        if step % EVERY == 0:
            accuracy = self._measure(step)
            self.result["accuracy"].append(accuracy)
            if accuracy >= TARGET:
                self.result |= {"seconds": seconds, "steps": step}
                return True
        return step == MAX_STEPS

    def _measure(self, seed: int) -> float:
        prompts = [addition_prompt(a, b) for a, b in self.pairs]
        texts = []
        for start in range(0, len(prompts), 128):
            texts += self.sample(prompts[start : start + 128], seed + start)
        return reward_fn_addition(texts, [str(a + b) for a, b in self.pairs]).mean().item()


def learn(lr: float, seed: int, pairs: list[Pair]) -> dict:
    """Learn by this course's trainer."""
    trainer = make_trainer(EMBEDDED_MODEL, Work(lr=lr, beta=0.001), seed=seed)

    def sample(prompts: list[str], seed: int) -> list[str]:
        generator = torch.Generator().manual_seed(seed)
        return sample_completions(trainer.model, prompts, 40, generator=generator).texts

    race, seconds, step = Race(sample, pairs), 0.0, 0
    while not race.is_over(step, seconds):
        start = time.perf_counter()
        run_step(trainer)
        seconds, step = seconds + time.perf_counter() - start, step + 1
    return race.result


def learn_by_trl(lr: float, seed: int, pairs: list[Pair]) -> dict:
    """Learn by TRL's trainer."""
    trl = load_trl()
    with tempfile.TemporaryDirectory() as out:
        race: Race
        clock: Any

        def is_over(step: int) -> bool:
            return race.is_over(step, sum(clock.seconds))

        trainer, clock = trl.make_trl_trainer(
            EMBEDDED_MODEL,
            out,
            Work(lr=lr, beta=0.001),
            MAX_STEPS,
            is_over,
            seed=seed,
            **trl.CONFIGURATIONS[trl.choose_configuration(EMBEDDED_MODEL, Work())[0]],
        )
        tokenizer: Any = trainer.processing_class
        model: Any = trainer.model

        @torch.no_grad()
        def sample(prompts: list[str], seed: int) -> list[str]:
            prompts = [tokenizer.bos_token + prompt for prompt in prompts]
            inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
            with torch.random.fork_rng():  # the training samples from the global generator
                torch.manual_seed(seed)
                ids = model.generate(
                    **inputs, max_new_tokens=40, do_sample=True, top_k=0, top_p=1.0, temperature=1.0
                )
            completions = ids[:, inputs["input_ids"].shape[1] :]
            return tokenizer.batch_decode(completions, skip_special_tokens=True)

        race = Race(sample, pairs)
        trainer.train()
    return race.result


def compare_paths(folder: Path, rounds: int) -> dict:
    """Measure rewards by step of the same runs on the native forward and on the bridge."""
    del folder, rounds  # the embedded model; a curve is no time
    rewards: dict[str, list[list[float]]] = {"native": [], "bridge": []}
    for seed, path in tqdm([*itertools.product(PATH_SEEDS, rewards)], desc="paths", leave=False):
        trainer = make_trainer(EMBEDDED_MODEL, Work(lr=LR_OF_PATHS, beta=0.001), seed=seed)
        if path == "bridge":
            use_the_bridge(trainer)
        curve = []
        for _ in range(PATH_STEPS):
            run_step(trainer)
            curve.append(trainer.metrics["reward"][0])
        rewards[path].append(curve)
    return {"rewards": rewards}
