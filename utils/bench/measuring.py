"""How the benchmarks measure memory: its peak, in processes of their own."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil

CLEAR_PEAK = Path("/proc/self/clear_refs")  # Linux: "5" begins a new peak
MIB = 2**20


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
