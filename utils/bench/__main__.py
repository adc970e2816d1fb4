"""The benchmarks: `make bench`, or `python -m utils.bench --only steps rollouts`.

Each part is measured by itself and written to `runs/bench.json` when it is done, so that a run
that was stopped has lost nothing; the table at the end is of all that the file holds.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from utils.bench import course, learning, limits, memory, rollouts, steps
from utils.bench.models import save_embedded
from utils.bench.report import format_report, publish

PARTS: dict[str, Callable] = {  # each takes a folder and a number of rounds
    "steps": steps.measure_throughput,
    "rollouts": rollouts.measure_rollouts,
    "limits": limits.measure_limits,
    "scaling": steps.measure_scaling,
    "memory": memory.measure_memory,
    "learning": learning.measure_learning,
    "paths": learning.compare_paths,
    "checks": course.measure_checks,
    "imports": course.measure_imports,
    "grading": course.measure_grading,
    "tests": course.measure_tests,
}
NEED_EMBEDDED = {"steps", "rollouts", "limits"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--rounds", type=int, default=7, help="of a median, at least 5 (7)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"))
    parser.add_argument("--publish", action="store_true", help="put the tables into README.md")
    args = parser.parse_args()
    if args.rounds < 5:
        parser.error(f"--rounds should be at least 5, but is {args.rounds}")
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in args.only:
        print(f"{part} ...", flush=True)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if part in NEED_EMBEDDED:
                folder = save_embedded(folder / "embedded")
            results[part] = PARTS[part](folder, args.rounds)
        results["machine"] = describe_machine()
        results["summary"] = steps.summarize(results)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        partial = args.out.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(partial, args.out)
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
    report = format_report(results)
    args.out.with_suffix(".md").write_text(report)
    print(report)
    if args.publish:
        publish(results)


def describe_machine() -> dict:
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "architecture": platform.machine(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
