"""A run that is going on, as its folder shows it: `python -m utils.watch runs/my-run`.

In a terminal a table of the last phases, with each metric's curve so far, is renewed in place until
the run ends; `--html page.html` draws the curves into a page that reloads itself. Elsewhere, as in
a file or from another machine than the run's, it shows once how far the run is.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from filelock import Timeout
from tabulate import tabulate

from utils.plotting import plot_history, write_page
from utils.tracking import make_lock, tolerate_encoding
from utils.validation import require

BARS = "▁▂▃▄▅▆▇█"
SHOWN = """phase reward eval_reward kl_exact kl_k3 entropy completion_len frac_reward_zero_std
seconds""".split()


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics that a run has written by now.

    Raises ValueError for a folder that is no run's.
    """
    path = folder / "metrics.jsonl"
    require(path.is_file(), f"run should be the folder of a run, but {path} is not there")
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # the last may be half written
    return [json.loads(line) for line in lines]


def is_running(folder: Path) -> bool:
    """Return whether a process of this machine is writing the run."""
    lock = make_lock(folder)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    lock.release()
    return False


def draw_curve(values: list[float], width: int = 24) -> str:
    """Draw numbers as a line of bars, from the lowest to the highest; the last `width` groups."""
    per_bar = -(-len(values) // width)
    groups = [values[i : i + per_bar] for i in range(0, len(values), per_bar)]
    means = [sum(group) / len(group) for group in groups]
    low, span = min(means), max(max(means) - min(means), 1e-12)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1))] for mean in means)


def format_rows(rows: list[dict[str, Any]], form: str = "simple") -> str:
    """Format the last eight phases as a table."""
    names = get_names(rows)
    table = [[row.get(name) for name in names] for row in rows[-8:]]
    return str(tabulate(table, names, floatfmt=".3f", tablefmt=form))


def get_names(rows: list[dict[str, Any]]) -> list[str]:
    return [name for name in SHOWN if any(name in row for row in rows)]


def format_curves(rows: list[dict[str, Any]]) -> str:
    """Format each metric's curve over all phases, with its first value and its last."""
    lines = []
    for name in get_names(rows)[1:]:
        values = [row[name] for row in rows if name in row]
        lines.append(f"{name:22} {draw_curve(values):24} {values[0]:.3f} to {values[-1]:.3f}")
    return "\n".join(lines)


def watch(folder: Path, page: Path | None = None, every_s: float = 2.0) -> None:
    """Show a run in the terminal, and as a page, until it ends."""
    n_lines, n_drawn = 0, -1
    while True:
        goes_on = is_running(folder)  # before its rows are read: else the last could be missed
        rows = read_rows(folder)
        state = "goes on" if goes_on else "isn't running (any more)"
        text = said = f"{folder}: {len(rows)} phases are done; the run {state}."
        if rows:
            text += f"\n\n{format_rows(rows)}\n\n{format_curves(rows)}"
        if page and rows and (len(rows) != n_drawn or not goes_on):
            figure = plot_history({folder.name: rows})
            write_page(page, folder.name, [said], format_rows(rows, "html"), figure, 5 * goes_on)
            n_drawn = len(rows)
        if sys.stdout.isatty():
            print(f"\x1b[{n_lines}F\x1b[J" * bool(n_lines) + text, flush=True)
            n_lines = text.count("\n") + 1
        if not goes_on or not (sys.stdout.isatty() or page):
            break
        time.sleep(every_s)
    if not sys.stdout.isatty():
        print(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m utils.watch", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    given = parser.parse_args(arguments)
    tolerate_encoding()
    try:
        watch(given.run, given.html)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:  # the run goes on
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
