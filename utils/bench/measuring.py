"""How the benchmarks measure: sides that take turns, peaks of memory in processes of their own."""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

CLEAR_PEAK = Path("/proc/self/clear_refs")  # Linux: "5" begins a new peak
MIB = 2**20


def take_turns(
    sides: dict[str, Callable[[], Any]], rounds: int, label: str = ""
) -> dict[str, list[float]]:
    """Measure the seconds of each side, `rounds` times, after a first round that is not counted.

    The sides take turns, so that whatever else the machine does disturbs them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in tqdm(range(rounds + 1), desc=label or " against ".join(sides), leave=False):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if round_ > 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def get_median(values: list[float]) -> float:
    return statistics.median(values)


def get_ratios(slow: list[float], fast: list[float]) -> list[float]:
    """Return how many times faster one is, round by round."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def clock_method(owner: Any, name: str, seconds: list[float]) -> None:
    """Make `owner`'s method append the seconds of each of its calls."""
    method = getattr(owner, name)

    def clocked(*args, **kwargs):
        start = time.perf_counter()
        result = method(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return result

    setattr(owner, name, clocked)


def run_apart(function: Callable, *arguments: Any) -> Any:
    """Run a function in a new process: nothing measured before is in its memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def measure_peak(run: Callable[[], Any]) -> dict[str, float]:
    """Measure what `run` adds to this process at its peak, and the whole peak, in MiB.

    On Linux. Elsewhere the peak is that of the process's whole life.
    """
    process = psutil.Process()
    before = process.memory_info().rss
    if CLEAR_PEAK.exists():
        CLEAR_PEAK.write_text("5")
    run()
    peak = max(_read_peak(process), before)
    return {"added": (peak - before) / MIB, "whole": peak / MIB}


def _read_peak(process: psutil.Process) -> int:
    if CLEAR_PEAK.exists():
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
