"""A GRPO step on a GPU, in parts: models of real shapes, bfloat16, beside TRL.

Sampling, the reference's pass and the update are measured apart, each until the GPU has done its
work, and the peak of the memory that PyTorch has allocated. TRL samples with its own `generate`,
and with vLLM where that is installed; the table takes the fastest of its configurations.
"""

import functools
import gc
import importlib.util
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PretrainedConfig

from utils.bench.comparisons import load
from utils.bench.models import LLAMA, QWEN, Work, save_random

SHAPES: dict[str, tuple[PretrainedConfig, Work]] = {
    "SmolLM2-135M, 64 tokens": (LLAMA, Work(gen_len=64)),
    "Qwen2.5-0.5B, 256 tokens": (QWEN, Work(gen_len=256)),
}
ROUNDS = 3  # steps for a median, after a first one
PARTS = ("sampling", "reference", "update")
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "its generate": {},
    "its generate, static cache": {"cache_implementation": "static"},
}
if importlib.util.find_spec("vllm") is not None:
    CONFIGURATIONS["vLLM"] = {"use_vllm": True, "vllm_mode": "colocate"}
ON_GPU: dict[str, Any] = {"use_cpu": False, "bf16": True, "dtype": torch.bfloat16}


def measure_gpu() -> dict:
    """Measure steps of both shapes, of ours and of TRL's configurations.

    Raises ValueError without a GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("the part gpu should run on a machine with CUDA, and PyTorch finds none")
    result: dict[str, Any] = {
        "machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__},
        "shapes": {},
    }
    with tempfile.TemporaryDirectory() as name:
        for shape, (config, work) in SHAPES.items():
            folder = save_random(Path(name, shape), config, "cuda", torch.bfloat16)
            sides = {"ours": functools.partial(measure_ours, folder, work)}
            for label, options in CONFIGURATIONS.items():
                sides[f"TRL, {label}"] = functools.partial(measure_trl, folder, work, options)
            found = {}
            for side, measure in tqdm(sides.items(), desc=shape):
                found[side] = _measure_alone(measure)
                print(f"{shape}, {side}: {found[side]}", flush=True)
            result["shapes"][shape] = found
    return result


def _measure_alone(measure: Callable[[], dict]) -> dict:
    """Return what a side's steps took, or, in words, why it did not run."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        found = measure()
    except Exception as error:  # of another library, of any kind
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return found | {"peak_gb": torch.cuda.max_memory_allocated() / 2**30}


def measure_ours(folder: Path, work: Work) -> dict:
    """Measure the trainer's steps."""
    contestant = load("ours").Contestant(folder, work, device="cuda")
    contestant.check_length()
    methods = {"sampling": "sample_and_score", "reference": "get_ref_logprobs"}
    clock = Clock(contestant.trainer, methods)
    return clock.summarise(contestant.train(ROUNDS + 1, lambda _: clock.end_step()))


def measure_trl(folder: Path, work: Work, options: dict[str, Any]) -> dict:
    """Measure TRL's steps; what it does between sampling and the update is the reference's part."""
    contestant = load("trl").Contestant(folder, work, **ON_GPU | options)
    methods = {"sampling": "_generate", "rollout": "_generate_and_score_completions"}
    clock = Clock(contestant.trainer, methods)
    steps = contestant.train(ROUNDS + 1, lambda _: clock.end_step())
    for step in clock.steps:
        step["reference"] = step.pop("rollout") - step["sampling"]
    return clock.summarise(steps)


class Clock:
    """Measures what some methods of an object take in each step, the GPU's work included."""

    def __init__(self, owner: Any, methods: dict[str, str]):
        self.steps: list[dict[str, float]] = []
        self.here: dict[str, float] = defaultdict(float)
        for part, name in methods.items():
            setattr(owner, name, self._time(part, getattr(owner, name)))

    def _time(self, part: str, method: Callable) -> Callable:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            start = time.perf_counter()
            found = method(*args, **kwargs)
            torch.cuda.synchronize()
            self.here[part] += time.perf_counter() - start
            return found

        return timed

    def end_step(self) -> None:
        """Begin a new step."""
        self.steps.append(dict(self.here))
        self.here.clear()

    def summarise(self, seconds: list[float]) -> dict:
        """Return the seconds of each step but the first, and the medians of its parts."""
        steps = self.steps[1:]
        for step, whole in zip(steps, seconds[1:], strict=True):
            step["update"] = whole - sum(step.values())
        medians = {part: statistics.median(step[part] for step in steps) for part in PARTS}
        return {"seconds": seconds[1:]} | medians
