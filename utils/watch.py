"""The curves of a run that is going on: `python -m utils.watch runs/my-run`.

In a terminal they are renewed in place until the run ends. `--html page.html` draws them into a
page that reloads itself. Elsewhere, as into a file or on another machine, they are shown once.
"""

import argparse
import json
import math
import os
import re
import sys
import time
from pathlib import Path

from filelock import Timeout
from tabulate import tabulate

from utils.plotting import plot_history, write_page
from utils.run_folder import read_rows
from utils.tracking import make_lock, tolerate_encoding
from utils.validation import require

BARS = "▁▂▃▄▅▆▇█"
SHOWN = ("kl_exact", "kl_k3", "entropy", "completion_len", "seconds")


def is_running(folder: Path) -> bool:
    """Return whether a process of this machine is writing the run."""
    try:
        with make_lock(folder).acquire(timeout=0):
            return False
    except Timeout:
        return True


def draw_curve(values: list[float], width: int = 24) -> str:
    """Draw numbers as bars from the lowest to the highest, each bar the mean of as many; a gap
    where a mean is infinite or no number."""
    n = -(-len(values) // width)
    groups = (values[i : i + n] for i in range(0, len(values), n))
    means = [sum(group) / len(group) for group in groups]
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    low, span = min(finite), max(max(finite) - min(finite), 1e-12)
    return "".join(
        BARS[round((mean - low) / span * (len(BARS) - 1))] if math.isfinite(mean) else " "
        for mean in means
    )


def describe(folder: Path, goes_on: bool) -> tuple[str, list[dict]]:
    """Return how far a run is, with its curves and its last phases, and its rows.

    Raises ValueError for a folder that is no run's.
    """
    path, args = folder / "metrics.jsonl", folder / "args.json"
    require(path.is_file(), f"run should be the folder of a run, but {path} is not there")
    rows = read_rows(path)
    noted = json.loads(args.read_text(encoding="utf-8")) if args.is_file() else {}
    done, all_phases = rows[-1]["phase"] if rows else 0, noted.get("total_phases", "?")
    state = "goes on" if goes_on else "has ended" if done == all_phases else "stopped there"
    text = f"{folder}: {done} of {all_phases} phases are done; it {state}."
    known = dict.fromkeys(name for row in rows for name in row if name != "reward_std")
    parts = [name for name in known if re.match("reward|eval_(reward|completion_len)", name)]
    names = sorted(parts, key=lambda name: name.startswith("eval"))
    names += [name for name in SHOWN if name in known]
    wide = max([14, *map(len, parts)])
    for name in names:
        values = [row[name] for row in rows if name in row]
        text += f"\n{name:{wide}} {draw_curve(values):24} {values[0]:.3f} to {values[-1]:.3f}"
    shown = [name for name in ("phase", "reward", "eval_reward", *SHOWN) if name in known]
    last = [[row.get(name) for name in shown] for row in rows[-8:]]
    return f"{text}\n\n{tabulate(last, shown, floatfmt='.3f')}".rstrip(), rows


def watch(folder: Path, page: Path | None = None, every_s: float = 2.0) -> None:
    """Show a run in the terminal, and as a page, until it ends."""
    n_lines, n_drawn, is_terminal = 0, -1, sys.stdout.isatty()
    while True:
        goes_on = is_running(folder)  # asked before its rows are read, or the last could be missed
        text, rows = describe(folder, goes_on)
        if page and rows and (len(rows) != n_drawn or not goes_on):
            figure, n_drawn = plot_history({folder.name: rows}), len(rows)
            write_page(page, folder.name, text.split("\n")[:1], "", figure, 5 * goes_on)
        if is_terminal:
            print(f"\x1b[{n_lines}F\x1b[J" * bool(n_lines) + text, flush=True)
            n_lines = text.count("\n") + 1
        if not goes_on or not (is_terminal or page):
            break
        time.sleep(every_s)
    if not is_terminal:
        print(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m utils.watch", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page, too, and go on until the run ends"
    )
    given = parser.parse_args(arguments)
    tolerate_encoding()
    try:
        watch(given.run, given.html)
    except BrokenPipeError:  # whoever read it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:  # of the watching: the run goes on
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
