"""The benchmarks: `make bench`, or `python -m utils.bench --only steps learning`.

Each part is measured by itself and written to `runs/bench.json` when it is done, so that a run
that was stopped has lost nothing; the table at the end is of all that the file holds.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from utils.bench import comparisons
from utils.bench.report import format_report, publish

PARTS: dict[str, Callable[[int], dict]] = {  # each takes a number of rounds
    "steps": comparisons.measure_steps,
    "learning": lambda rounds: comparisons.measure_learning(),
}


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
        results[part] = PARTS[part](args.rounds)
        results["machine"] = describe_machine()
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
