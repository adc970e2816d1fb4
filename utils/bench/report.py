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
        "rollouts": _format_rollouts,
        "limits": _format_limits,
        "memory": _format_memory,
        "scaling": _format_scaling,
        "checks": _format_checks,
        "grading": _format_seconds("grading", "seconds"),
        "imports": _format_seconds("importing, a new process each", "seconds"),
        "tests": _format_seconds("`make test`, without installation", "seconds"),
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


def _table(rows: list, headers: tuple) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _spread(values: list[float], digits: int = 2) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _format_steps(result: dict) -> str:
    fixed = result["fixed"]
    rows = [
        (
            f"seconds a step, {label}",
            f"{_spread(result[name]['ratios'])} times as fast",
            _spread(result[name]["seconds"]["ours"]),
            _spread(result[name]["seconds"]["trl"]),
            aim,
        )
        for name, label, aim in (
            ("fixed", "exactly 40 tokens", "1.7"),
            ("natural", "until they end, at most 40", "3"),
        )
    ]
    rows += _list_memory(fixed["memory_mib"])
    lines = [
        _table(rows, ("one GRPO step, 16 prompts × 8 completions", "ratio", "here", "TRL", "aim"))
    ]
    for name, label in (("fixed", "Exactly 40 tokens"), ("natural", "Until they end")):
        tried = ", ".join(
            f"{configuration} {seconds:.2f}"
            for configuration, seconds in result[name]["trl_seconds_by_configuration"].items()
        )
        parts = {
            # Parts are differences of medians, and one that takes no time may come out below 0.
            side: ", ".join(f"{part} {max(0, seconds):.2f}" for part, seconds in row.items())
            for side, row in result[name]["parts"].items()
        }
        lines.append(
            f"{label}. TRL's configurations that were tried, seconds a step: {tried}. Taken: "
            f"{result[name]['trl_configuration']}. Parts of a step in seconds, here: "
            f"{parts['ours']}; TRL: {parts['trl']}."
        )
    return "\n\n".join(lines)


def _list_memory(memory: dict) -> list[tuple]:
    rows = []
    for name, label in (
        ("added", "peak memory that three steps add, MiB"),
        ("whole", "peak memory of the process, MiB"),
    ):
        ours, trl = ([run[name] for run in memory[side]] for side in ("ours", "trl"))
        ratio = statistics.median(ours) / statistics.median(trl)
        aim = "0.8" if name == "whole" else ""
        rows.append((label, f"{ratio:.2f} of TRL's", _spread(ours, 0), _spread(trl, 0), aim))
    return rows


def _format_paths(result: dict) -> str:
    curves = result["rewards"]
    steps = [step for step in (1, 4, 8, 16, 24, 32) if step <= len(curves["native"][0])]
    rows = [
        (f"step {step}", *(_spread([run[step - 1] for run in curves[path]]) for path in curves))
        for step in steps
    ]
    return _table(rows, ("reward on additions, three seeds", "native forward", "bridge"))


def _format_learning(result: dict) -> str:
    rows = []
    for side, label in (("ours", "here"), ("trl", "TRL")):
        runs = result["runs"][side]
        steps = [run["steps"] for run in runs]
        reached = [run["seconds"] for run in runs if run["steps"] is not None]
        if len(reached) < len(runs):
            rows.append((label, f"{len(reached)} of {len(runs)} got there", "", ""))
            continue
        rows.append((label, _spread(reached, 1), _spread(steps, 0), f"{result['lr'][side]:g}"))
    headers = ("time to 0.90 held-out accuracy, additions, five seeds", "seconds", "steps", "lr")
    pairs = zip(result["runs"]["trl"], result["runs"]["ours"], strict=True)
    both = [(a["seconds"], b["seconds"]) for a, b in pairs if a["steps"] and b["steps"]]
    ratio = f"\n\nSooner by a factor of {_spread([a / b for a, b in both])}." if both else ""
    return _table(rows, headers) + ratio


def _format_rollouts(result: dict) -> str:
    aims = {"bridge": "3", "hugging face": "2"}
    exact, ended = result["exactly 40 tokens"], result["until they end"]
    rows = [
        (
            name,
            _spread(ratios),
            f"{exact['seconds'][name]:.3f}",
            aims.get(name, ""),
            _spread(ended["ratios"][name]) if name in ended["ratios"] else "",
            f"{ended['seconds'][name]:.3f}" if name in ended["ratios"] else "",
        )
        for name, ratios in exact["ratios"].items()
    ]
    headers = (
        f"128 rollouts here: {exact['seconds']['ours']:.3f} s for 40 tokens each, "
        f"{ended['seconds']['ours']:.3f} s until they end; against",
        "40 tokens: times as fast",
        "seconds",
        "aim",
        "until they end: times as fast",
        "seconds",
    )
    return _table(rows, headers)


def _format_limits(result: dict) -> str:
    rows = [
        (
            kind.upper(),
            f"{row['fraction']:.2f}",
            f"{row['gflop']:.1f}",
            f"{row['seconds']:.2f}",
            f"{row['machine_gflop_per_second']:.0f}",
        )
        for kind, row in result.items()
    ]
    headers = (
        "one update of 128 × 40 tokens",
        "share of the machine's rate",
        "GFLOP",
        "seconds",
        "machine, GFLOP/s",
    )
    return _table(rows, headers)


def _format_memory(result: list) -> str:
    rows = [
        [f"{row[name]:.0f}" for name in ("vocabulary", "batch", "length", "ours", "textbook")]
        for row in result
    ]
    headers = ("vocabulary", "batch", "length", "here, MiB", "reference logits stored, MiB")
    return _table(rows, headers)


def _format_scaling(result: dict) -> str:
    names = {"smollm2_shape": "SmolLM2's shape, 135M"}
    rows = []
    for size, row in result.items():
        memory = [("", "", "", "", "")] * 2
        if "memory_mib" in row:
            memory = _list_memory(row["memory_mib"])
        rows.append(
            (
                names.get(size, size),
                _spread(row["ratios"]),
                f"{row['rate']['ours']:.3g}",
                f"{row['rate']['trl']:.3g}",
                " / ".join(filter(None, memory[1][2:4])),
                memory[1][1],
                row["trl_configuration"],
            )
        )
    headers = (
        "GRPO, 16 × 20 tokens, parameters",
        "ratio",
        "here, steps/s",
        "TRL",
        "process's peak, MiB, here / TRL",
        "ratio",
        "TRL's configuration",
    )
    return _table(rows, headers)


def _format_checks(result: dict) -> str:
    rows = []
    for when, label in (("first", "the first time"), ("later", "the second time")):
        seconds = {name: row[when] for name, row in result.items()}
        worst = max(seconds, key=lambda name: seconds[name])
        rows.append(
            (label, f"{statistics.median(seconds.values()):.2f}", f"{seconds[worst]:.2f}", worst)
        )
    return _table(rows, ("check() of a right answer, after start()", "median, s", "worst, s", "of"))


def _format_seconds(label: str, header: str):
    def format_(result: dict) -> str:
        rows = [(name, f"{seconds:.1f}") for name, seconds in result.items()]
        return _table(rows, (label, header))

    return format_
