"""Write the benchmarks' results as tables, into the README beside this file."""

import json
import re
import statistics
from pathlib import Path

from tabulate import tabulate

README = Path(__file__).with_name("README.md")
PUBLISHED = Path(__file__).with_name("results.json")  # what the README's tables are made of
MARKS = "<!-- bench -->\n", "<!-- end of bench -->\n"


def format_report(results: dict) -> str:
    """Return the parts that were measured, each as a table, ratios first."""
    parts = {"steps": _format_steps, "learning": _format_learning, "gpu": _format_gpu}
    lines = []
    if "machine" in results:
        said = "Measured on {cores} cores ({architecture}, no GPU), PyTorch {torch}, {threads} "
        said += "threads. Medians, and in brackets the range."
        lines.append(said.format(**results["machine"]))
    lines += [format_(results[name]) for name, format_ in parts.items() if name in results]
    return "\n\n".join(lines) + "\n"


def publish(results: dict) -> None:
    """Keep `results`, beside earlier ones of other parts, and put their tables into the README."""
    results = json.loads(PUBLISHED.read_text()) | results
    PUBLISHED.write_text(json.dumps(results, indent=1) + "\n")
    README.write_text(replace_tables(README.read_text(), format_report(results)))


def replace_tables(readme: str, report: str) -> str:
    """Return the README with this report between its marks."""
    begin, end = MARKS
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    return re.sub(pattern, lambda _: f"{begin}\n{report}\n{end}", readme, flags=re.DOTALL)


def _table(rows: list, *headers: str) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _spread(values: list[float], digits: int = 2) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _format_steps(result: dict) -> str:
    rows, notes = [], []
    for name, label in (
        ("fixed", "16 × 8 completions of exactly 40 tokens"),
        ("natural", "16 × 8 of at most 40, until they end"),
        ("larger", "SmolLM2's shape, 4 × 4 of exactly 20"),
    ):
        row = result[name]
        ours, trl = (row["seconds"][side] for side in ("ours", "trl"))
        ratios = _spread([b / a for a, b in zip(ours, trl, strict=True)])
        rows.append((label, "seconds", f"{ratios} times as fast", _spread(ours), _spread(trl)))
        for kind, unit in (("added", "MiB that three steps add"), ("whole", "MiB of the process")):
            if "memory_mib" in row:
                rows.append(("", f"peak, {unit}", *_compare_memory(row["memory_mib"], kind)))
        tried = row["trl_seconds_by_configuration"]
        listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in tried.items())
        notes.append(f"- {label}: {listed}. Taken: {row['trl_configuration']}.")
    table = _table(rows, "one GRPO step", "", "ratio", "here", "TRL")
    title = "TRL's configurations that were tried, in seconds a step:"
    return "\n\n".join([table, title, "\n".join(notes)])


def _compare_memory(memory: dict, kind: str) -> tuple[str, str, str]:
    """Return the ratio of the medians, and both sides' peaks."""
    ours, trl = ([peak[kind] for peak in memory[side]] for side in ("ours", "trl"))
    ratio = statistics.median(ours) / statistics.median(trl)
    return f"{ratio:.2f} of TRL's", _spread(ours, 0), _spread(trl, 0)


def _format_learning(result: dict) -> str:
    rows = []
    for side, label in (("ours", "here"), ("trl", "TRL")):
        runs = result["runs"][side]
        reached = [run for run in runs if run["steps"] is not None]
        if len(reached) < len(runs):
            rows.append((label, f"{len(reached)} of {len(runs)} got there", "", ""))
            continue
        seconds, steps = ([run[key] for run in reached] for key in ("seconds", "steps"))
        rows.append((label, _spread(seconds, 1), _spread(steps, 0), f"{result['lr'][side]:g}"))
    title = "time to 0.90 held-out accuracy, additions, five seeds"
    table = _table(rows, title, "seconds", "steps", "lr")
    pairs = zip(result["runs"]["trl"], result["runs"]["ours"], strict=True)
    both = [a["seconds"] / b["seconds"] for a, b in pairs if a["steps"] and b["steps"]]
    return table + (f"\n\nSooner by a factor of {_spread(both)}." if both else "")


def _format_gpu(result: dict) -> str:
    rows, ratios = [], []
    for shape, sides in result["shapes"].items():
        for side, found in sides.items():
            side = "here" if side == "ours" else side
            if "error" in found:  # as where the card is too small
                rows.append((shape, side, f"did not run: {found['error'][:60]}", *[""] * 4))
                continue
            parts = [f"{found[part]:.2f}" for part in ("sampling", "reference", "update")]
            step = _spread(found["seconds"])
            rows.append((shape, side, step, *parts, f"{found['peak_gb']:.1f}"))
        medians = {k: statistics.median(x["seconds"]) for k, x in sides.items() if "seconds" in x}
        ours = medians.pop("ours", None)
        if ours and medians:
            ratios.append(f"{min(medians.values()) / ours:.1f} ({shape})")
    headers = ("one GRPO step of 16 × 8", "", "seconds", *"sampling reference update".split())
    machine = result["machine"]
    parts = [
        f"On one {machine['gpu']}, PyTorch {machine['torch']}, in bfloat16 (a GB is 2^30 bytes):",
        _table(rows, *headers, "peak GB"),
    ]
    if ratios:
        parts.append(f"TRL's fastest step takes, as a multiple of ours: {'; '.join(ratios)}.")
    return "\n\n".join(parts)
