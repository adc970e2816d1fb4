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
    run_apart,
)
from utils.bench.models import SIZES, Work, save_random
from utils.bench.trainers import check_length, load_trl, make_trainer, measure_our_memory, run_step

PEAKS = 3  # processes for a median of memory
SMALL = Work(n_prompts=4, group_size=4, gen_len=20)  # for models of all sizes


def measure_throughput(folder: Path, rounds: int) -> dict:
    """Measure steps of the embedded model, 128 completions of 40 tokens, against TRL's best."""
    trl = load_trl()
    work = Work()
    best, tried = trl.choose_configuration()
    result = compare(folder, work, rounds, trl.CONFIGURATIONS[best])
    memory = {
        "ours": [run_apart(measure_our_memory, folder, work) for _ in range(PEAKS)],
        "trl": [
            run_apart(trl.measure_trl_memory, folder, work, trl.CONFIGURATIONS[best])
            for _ in range(PEAKS)
        ],
    }
    return result | {
        "tokens": work.batch_size * work.gen_len,
        "trl_configuration": best,
        "trl_seconds_by_configuration": tried,
        "memory_mib": memory,
    }


def measure_scaling(folder: Path, rounds: int) -> dict:
    """Measure steps per second for three sizes with random weights, 16 completions of 20 tokens."""
    trl = load_trl()
    options, results = trl.CONFIGURATIONS[trl.choose_configuration()[0]], {}
    for name, size in SIZES.items():
        results[name] = compare(save_random(folder / name, *size), SMALL, rounds, options)
    return results


def compare(folder: Path, work: Work, rounds: int, options: dict) -> dict:
    """Measure the seconds per step of both in turns: after each of TRL's steps one of ours."""
    trl = load_trl()
    ours = make_trainer(folder, work)
    check_length(ours, work)
    parts: dict[str, dict[str, list[float]]] = {
        "ours": defaultdict(list),
        "trl": defaultdict(list),
    }
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
        trainer, clock = trl.make_trl_trainer(folder, out, work, rounds + 1, step_ours, **options)
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
