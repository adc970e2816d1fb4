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
from utils.bench.models import SIZES, SMOLLM2_SHAPE, Work, save_random, save_smollm2_shape
from utils.bench.trainers import check_length, load_trl, make_trainer, measure_our_memory, run_step
from utils.models.loading import EMBEDDED_MODEL

PEAKS = 3  # processes for a median of memory
SMALL = Work(n_prompts=4, group_size=4, gen_len=20)  # for models of all sizes
LARGE = ("124M", SMOLLM2_SHAPE)  # whose memory is measured, too


def measure_throughput(folder: Path, rounds: int) -> dict:
    """Measure steps of the embedded model against TRL's best: 128 completions of exactly 40 tokens,
    and of up to 40 that end by themselves."""
    results = {}
    for name, path in (("fixed", folder), ("natural", EMBEDDED_MODEL)):
        results[name] = compare(path, Work(), rounds, is_fixed=name == "fixed")
    results["fixed"]["memory_mib"] = measure_memory(folder, Work(), results["fixed"])
    return results


def measure_scaling(folder: Path, rounds: int) -> dict:
    """Measure steps for models of four shapes with random weights, 16 completions of 20 tokens."""
    results = {}
    for name in (*SIZES, SMOLLM2_SHAPE):
        path = folder / name
        if name == SMOLLM2_SHAPE:
            save_smollm2_shape(path)
        else:
            save_random(path, *SIZES[name])
        results[name] = compare(path, SMALL, rounds, steps_to_choose=1 if name in LARGE else 2)
        if name in LARGE:
            results[name]["memory_mib"] = measure_memory(path, SMALL, results[name])
    return results


def measure_memory(folder: Path, work: Work, compared: dict) -> dict:
    """Measure both sides' peaks, in turns, in processes of their own."""
    trl, peaks = load_trl(), defaultdict(list)
    options = trl.CONFIGURATIONS[compared["trl_configuration"]]
    for _ in range(PEAKS):
        peaks["ours"].append(run_apart(measure_our_memory, folder, work))
        peaks["trl"].append(run_apart(trl.measure_trl_memory, folder, work, options))
    return dict(peaks)


def summarize(results: dict) -> dict:
    """Summarise what was measured against TRL: ratios of steps per second and of the peak memory
    of whole processes."""
    found = results.get("steps", {}) | {
        name: row for name, row in results.get("scaling", {}).items() if name in LARGE
    }
    memory = {}
    for name, row in found.items():
        if "memory_mib" in row:
            ours, trl = (
                get_median([peak["whole"] for peak in row["memory_mib"][side]])
                for side in ("ours", "trl")
            )
            memory["0.9M" if name == "fixed" else name] = ours / trl
    ratios = {name: get_median(row["ratios"]) for name, row in found.items()}
    return {"against_trl": ratios | {"memory": memory}}


def compare(
    folder: Path, work: Work, rounds: int, is_fixed: bool = True, steps_to_choose: int = 2
) -> dict:
    """Measure the seconds per step of both in turns: after each of TRL's steps one of ours.

    TRL in the fastest of its configurations at this work, by so many steps of each.
    """
    trl = load_trl()
    best, tried = trl.choose_configuration(folder, work, steps_to_choose)
    options = trl.CONFIGURATIONS[best]
    ours = make_trainer(folder, work)
    if is_fixed:
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
        "trl_configuration": best,
        "trl_seconds_by_configuration": tried,
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
