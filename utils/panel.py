"""A panel below a notebook's cell that follows a run: its curves and its last samples."""

import base64
import io
import sys
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from IPython.display import DisplayHandle
from tqdm import tqdm

from utils.plot_descriptions import describe_figure
from utils.plotting import plot_history

PAUSE_S = 2.0  # at least, from one drawing to the next
SHARE = 0.01  # of the time that drawing may take
RECENT = 5  # phases that the time left is told from


def is_in_notebook() -> bool:
    """Return whether what is printed now lands below a notebook's cell."""
    return type(sys.stdout).__module__ == "ipykernel.iostream"


class SamplesTable(str):
    """A table of samples as text, and `rows`, its cells, of which a notebook makes its own."""

    rows: Sequence[tuple[str, ...]]

    def _repr_html_(self) -> str:
        style = "text-align: left; white-space: pre-wrap; overflow-wrap: break-word"
        rows = [("sample", "reward", "prompt", "completion"), *self.rows]
        cells = ["".join(f'<td style="{style}">{escape(c)}</td>' for c in row) for row in rows]
        return f"<table class='printed'>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


class Panel:
    """The curves of a trainer's `history`, and below them its last samples, updated in place.

    The trainer has `args`, `history` and `phase`, and may have `recorded`: other runs of the same
    settings, as `plot_history` takes them, for a grey band behind the curves. Drawing takes at most
    a hundredth of the time, the first and the last one apart.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.handles: dict[str, DisplayHandle] = {}
        self.samples: tuple[str, str] | None = None
        self.next_s = 0.0  # when to draw again

    def show_samples(self, heading: str, table: str) -> None:
        """Keep a table to show when next it draws."""
        self.samples = heading, table

    def update(self) -> None:
        """Draw, unless it has drawn a moment ago."""
        start = time.perf_counter()
        if start >= self.next_s:
            self.draw()
            end = time.perf_counter()
            self.next_s = end + max(PAUSE_S, (end - start) / SHARE)

    def draw(self) -> None:
        """Put the run as it is now in place of what was shown; nothing before its first phase."""
        trainer = self.trainer
        if trainer.history:
            name, total = trainer.args.name, trainer.args.total_phases
            title = f"phase {trainer.phase} of {total}{self._tell_time()}"
            title = f"{name}, {title}" if name else title
            recorded = getattr(trainer, "recorded", ())
            if recorded:
                title += f"; grey: {len(recorded)} recorded runs"
            figure = plot_history({"this run": trainer.history}, recorded=recorded)
            figure.suptitle(title, fontsize=11, parse_math=False)
            for axes in figure.axes:
                axes.set_xlim(0, total + 1)
            image = io.BytesIO()
            figure.savefig(image)
            png = base64.b64encode(image.getvalue()).decode()
            self._show("curves", {"image/png": png, "text/plain": describe_figure(figure)})
        if self.samples is not None:
            heading, table = self.samples
            bundle = {"text/plain": f"{heading}\n{table}"}
            if isinstance(table, SamplesTable):
                bundle["text/html"] = f"<p>{escape(heading)}</p>{table._repr_html_()}"
            self._show("samples", bundle)

    def _tell_time(self) -> str:
        left = self.trainer.args.total_phases - self.trainer.phase
        recent = [row["seconds"] for row in self.trainer.history if "seconds" in row][-RECENT:]
        if not left or not recent:
            return ""
        return f", {tqdm.format_interval(left * sum(recent) / len(recent))} left"

    def _show(self, name: str, bundle: dict[str, str]) -> None:
        if name in self.handles:
            self.handles[name].update(bundle, raw=True)
        else:
            self.handles[name] = DisplayHandle()
            self.handles[name].display(bundle, raw=True)
