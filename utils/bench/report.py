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
    parts = {
        "steps": _format_steps,
        "learning": _format_learning,
        "paths": _format_paths,
        "scaling": _format_scaling,
    }
    machine = results["machine"]
    lines = [
        f"Measured on {machine['cores']} cores ({machine['architecture']}, no GPU), PyTorch "
        f"{machine['torch']}, {machine['threads']} threads. Medians, and in brackets the range."
    ]
    lines += [format_(results[name]) for name, format_ in parts.items() if name in results]
    return "\n\n".join(lines) + "\n"


def publish(results: dict) -> None:
    """Keep `results` and put their tables into the README."""
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
    for name, label, limit, aim in (
        ("fixed", "Exactly 40 tokens", "", "1.7"),
        ("natural", "Until they end", ", at most 40", "3"),
    ):
        row = result[name]
        ratio, seconds = _spread(row["ratios"]), row["seconds"]
        task = f"seconds a step, {label[0].lower()}{label[1:]}{limit}"
        sides = _spread(seconds["ours"]), _spread(seconds["trl"])
        rows.append((task, f"{ratio} times as fast", *sides, aim))
        tried = _list_seconds(row["trl_seconds_by_configuration"])
        ours, trl = (_list_seconds(row["parts"][side]) for side in ("ours", "trl"))
        notes.append(
            f"{label}. TRL's configurations that were tried, seconds a step: {tried}. Taken: "
            f"{row['trl_configuration']}. Parts of a step in seconds, here: {ours}; TRL: {trl}."
        )
    memory = result["fixed"]["memory_mib"]
    rows.append(("peak memory that three steps add, MiB", *_compare_memory(memory, "added"), ""))
    rows.append(("peak memory of the process, MiB", *_compare_memory(memory, "whole"), "0.8"))
    headers = "one GRPO step, 16 prompts × 8 completions", "ratio", "here", "TRL", "aim"
    return "\n\n".join([_table(rows, *headers), *notes])


def _list_seconds(seconds: dict[str, float]) -> str:
    # Parts are differences of medians, and one that takes no time may come out below 0.
    return ", ".join(f"{name} {max(0, value):.2f}" for name, value in seconds.items())


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


def _format_paths(result: dict) -> str:
    curves = result["rewards"]
    steps = [step for step in (1, 4, 8, 16, 24, 32) if step <= len(curves["native"][0])]
    rows = [
        (f"step {step}", *(_spread([run[step - 1] for run in curves[path]]) for path in curves))
        for step in steps
    ]
    return _table(rows, "reward on additions, three seeds", "native forward", "bridge")


def _format_scaling(result: dict) -> str:
    names = {"smollm2_shape": "SmolLM2's shape, 135M"}
    rows = []
    for size, row in result.items():
        ratio = peaks = ""
        if "memory_mib" in row:
            ratio, *both = _compare_memory(row["memory_mib"], "whole")
            peaks = " / ".join(both)
        rates = (f"{row['rate'][side]:.3g}" for side in ("ours", "trl"))
        label = names.get(size, size)
        rows.append((label, _spread(row["ratios"]), *rates, peaks, ratio, row["trl_configuration"]))
    return _table(
        rows,
        "GRPO, 16 × 20 tokens, parameters",
        "ratio",
        "here, steps/s",
        "TRL",
        "process's peak, MiB, here / TRL",
        "ratio",
        "TRL's configuration",
    )
