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

from utils.bench import comparisons, gpu
from utils.bench.report import format_report, publish

PARTS: dict[str, Callable[[], dict]] = {
    "steps": comparisons.measure_steps,
    "learning": comparisons.measure_learning,
    "gpu": gpu.measure_gpu,
}
DEFAULT = [part for part in PARTS if part != "gpu" or torch.cuda.is_available()]
OUT = Path("runs/bench.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=DEFAULT, metavar="PART")
    parser.add_argument("--publish", action="store_true", help="put the tables into README.md")
    args = parser.parse_args()
    results = json.loads(OUT.read_text()) if OUT.exists() else {}
    for part in args.only:
        print(f"{part} ...", flush=True)
        start = time.perf_counter()
        results[part] = PARTS[part]()
        if part != "gpu":  # which says its own
            results["machine"] = {
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "architecture": platform.machine(),
                "torch": torch.__version__,
            }
        OUT.parent.mkdir(exist_ok=True)
        partial = OUT.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(partial, OUT)
        print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
    report = format_report(results)
    OUT.with_suffix(".md").write_text(report)
    print(report)
    if args.publish:
        publish(results)


if __name__ == "__main__":
    main()
