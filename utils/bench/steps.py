"""One GRPO step, the same work on both sides: this course's trainer against TRL's."""

import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tqdm import tqdm

from utils.bench.measuring import (
    clock_method,
    get_median,
    get_ratios,
    measure_peak,
    run_apart,
)
from utils.bench.models import SIZES, Work, check_length, make_trainer, run_step, save_random

PEAKS = 3  # processes for a median of memory
SMALL = Work(n_prompts=4, group_size=4, gen_len=20)  # for models of all sizes


def measure_throughput(folder: Path, rounds: int) -> dict:
    """The embedded model, 128 completions of 40 tokens: TRL's best configuration, then turns."""
    from utils.bench.trl import CONFIGURATIONS, choose_configuration

    work = Work()
    best, tried = choose_configuration()
    result = compare(folder, work, rounds, CONFIGURATIONS[best])
    memory = {
        "ours": [run_apart(_measure_our_memory, folder, work) for _ in range(PEAKS)],
        "trl": [
            run_apart(_measure_trl_memory, folder, work, CONFIGURATIONS[best]) for _ in range(PEAKS)
        ],
    }
    return result | {
        "tokens": work.batch_size * work.gen_len,
        "trl_configuration": best,
        "trl_seconds_by_configuration": tried,
        "memory_mib": memory,
    }


def measure_scaling(folder: Path, rounds: int) -> dict:
    """Steps per second for three sizes with random weights, 16 completions of 20 tokens."""
    from utils.bench.trl import CONFIGURATIONS, choose_configuration

    options, results = CONFIGURATIONS[choose_configuration()[0]], {}
    for name, size in SIZES.items():
        results[name] = compare(save_random(folder / name, *size), SMALL, rounds, options)
    return results


def compare(folder: Path, work: Work, rounds: int, options: dict) -> dict:
    """Seconds a step of both, in turns: after each of TRL's steps one of ours; and their parts."""
    from utils.bench.trl import make_trl_trainer

    ours = make_trainer(folder, work)
    check_length(ours, work)
    parts = {"ours": defaultdict(list), "trl": defaultdict(list)}
    for name in ("sample_and_score", "get_ref_logprobs", "rollout_phase", "learning_phase"):
        clock_method(ours, name, parts["ours"][name])
    seconds = []
    bar = tqdm(total=rounds + 1, desc="steps in turns", leave=False)

    def step_ours(step: int) -> None:
        start = time.perf_counter()
        run_step(ours)
        seconds.append(time.perf_counter() - start)
        bar.update()

    with tempfile.TemporaryDirectory() as out:
        trainer, clock = make_trl_trainer(folder, out, work, rounds + 1, step_ours, **options)
        for name in ("_generate", "_generate_and_score_completions"):
            clock_method(trainer, name, parts["trl"][name])
        trainer.train()
    bar.close()
    theirs, seconds = clock.seconds[1:], seconds[1:]  # without the first
    ours, trl = ({k: get_median(v[1:]) for k, v in parts[side].items()} for side in parts)
    rollout = trl["_generate_and_score_completions"]
    return {
        "seconds": {"ours": seconds, "trl": theirs},
        "rate": {"ours": 1 / get_median(seconds), "trl": 1 / get_median(theirs)},
        "ratios": get_ratios(theirs, seconds),
        "parts": {
            "ours": {
                "sampling": ours["sample_and_score"],
                "log-probs at sampling": ours["rollout_phase"]
                - ours["sample_and_score"]
                - ours["get_ref_logprobs"],
                "reference": ours["get_ref_logprobs"],
                "update": ours["learning_phase"],
            },
            "trl": {
                "sampling": trl["_generate"],
                "reference and the rest of the rollout": rollout - trl["_generate"],
                "update": get_median(theirs) - rollout,
            },
        },
    }


def _measure_our_memory(folder: Path, work: Work) -> dict:
    trainer = make_trainer(folder, work)
    return measure_peak(lambda: [run_step(trainer) for _ in range(3)])


def _measure_trl_memory(folder: Path, work: Work, options: dict) -> dict:
    from utils.bench.trl import make_trl_trainer

    with tempfile.TemporaryDirectory() as out:
        trainer, _ = make_trl_trainer(folder, out, work, 3, **options)
        return measure_peak(trainer.train)
