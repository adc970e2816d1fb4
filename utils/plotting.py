"""Plots of what trainers record, of spreads over seeds, and of single tokens."""

import base64
import html
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.pyplot import get_cmap
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from utils.plot_descriptions import describe_figure

PANELS = {  # the first of the metrics that a run recorded
    "mean reward": ("reward",),
    "KL, nats per token, {}": ("kl_exact", "kl_k3"),
    "entropy, nats per token": ("entropy",),
    "completion length, tokens": ("completion_len",),
}


def plot_history(
    histories: dict[str, list[dict]], path: Path | None = None, recorded: Sequence[dict] = ()
) -> Figure:
    """Plot reward, KL, entropy and completion length by phase, one line per named run.

    The KL is the exact one where the run computed it, else the k3 estimate; a run without a
    reference has no line there. All axes but the reward's begin at 0, so that a line that hardly
    moves looks like one. Saved as an image if `path` is given.

    `recorded` has other runs, each with a list of values, from phase 1 on, by the name of a metric;
    a grey band shows their range.
    """
    figure = Figure(figsize=(6.4, 5))
    figure.subplots_adjust(0.09, 0.1, 0.98, 0.88, wspace=0.22, hspace=0.5)
    if len(histories) == 1:
        figure.suptitle(next(iter(histories)), fontsize=11, parse_math=False)
    for axes, (label, keys) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for name, history in histories.items():
            known = {key for row in history for key in row}
            key = next((key for key in keys if key in known), None)
            if key is not None:
                label = label.format({"kl_k3": "k3 estimate (noisy)"}.get(key, "exact"))
                axes.plot(*_read(history, key), ".-", markersize=4, label=name)
            if key == "reward" and "eval_reward" in known:
                axes.plot(*_read(history, "eval_reward"), "o--", label=f"{name}, held out")
                axes.legend(fontsize=8)
        if recorded and key in recorded[0]:
            values = np.asarray([run[key] for run in recorded])
            x = range(1, values.shape[1] + 1)
            axes.fill_between(x, values.min(0), values.max(0), color="grey", alpha=0.25, lw=0)
        axes.set_xlabel("phase")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))  # most of a drawing's time
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.set_title(label.replace(", {}", ""), fontsize=10)
        axes.grid(alpha=0.3)
        if axes.lines and "reward" not in keys:
            low, high = axes.get_ylim()
            axes.set_ylim(min(0, low), 1.05 * high)
        if len(histories) > 1:
            axes.legend(fontsize=8)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    return figure


def _read(history: list[dict], key: str) -> tuple[list[float], list[float]]:
    """Return the phases that recorded something, and what they recorded."""
    rows = [row for row in history if key in row]  # what is evaluated is not so in every phase
    return [row["phase"] for row in rows], [row[key] for row in rows]


def plot_spread(
    axes: Axes,
    curves: Sequence[Sequence[float]] | Tensor,
    label: str,
    x: Sequence[float] | Tensor | None = None,
    **options: Any,
) -> None:
    """Plot the mean of some runs, and the range between the lowest and the highest.

    `curves` has a row for each run, [run point]. The points are at `x`, by default the phases from
    1 on. Options are those of matplotlib's `plot`.
    """
    values = np.asarray(curves)
    if x is None:
        x = range(1, values.shape[1] + 1)
        axes.set_xlabel("phase")
    (line,) = axes.plot(x, values.mean(0), label=label, **options)
    axes.fill_between(x, values.min(0), values.max(0), color=line.get_color(), alpha=0.2, lw=0)
    axes.grid(alpha=0.3)


def label_ends(axes: Axes, gap: float = 12.0) -> None:
    """Write each line's label to the right of it, moved up where two would overlap.

    Labels are at least `gap` points apart. Lines without a label are left as they are.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    ends = []
    for line in axes.get_lines():
        if not str(line.get_label()).startswith("_"):
            x, y = np.asarray(line.get_xydata())[-1]
            ends.append((axes.transData.transform((x, y))[1] * 72 / figure.dpi, y, line))
    lowest = -np.inf
    for height, y, line in sorted(ends, key=lambda end: end[0]):
        lowest = max(height, lowest + gap)
        axes.annotate(
            str(line.get_label()),
            (1, y),
            (5, lowest - height),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            color=line.get_color(),
            va="center",
            annotation_clip=False,
        )


def put_legend_above(figure: Figure, columns: int = 2) -> None:
    """Put the legend of a figure's first panel above all of them, where it hides nothing.

    A label that several lines have is in it once. The figure has to have layout="constrained",
    which makes room for it.
    """
    lines, labels = figure.axes[0].get_legend_handles_labels()
    drawn = dict(zip(labels, lines, strict=True))
    figure.legend(drawn.values(), drawn, loc="outside upper center", ncols=columns, frameon=False)


def format_spread(values: list[float], digits: int = 3) -> str:
    """Format the mean and, in brackets, the lowest and the highest."""
    low, mean, high = min(values), sum(values) / len(values), max(values)
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


COLUMNS = 52  # characters a line of a picture of tokens


def decode_tokens(tokenizer, ids: Tensor) -> list[str]:
    """Decode each token on its own, as text."""
    return [tokenizer.decode([token]) for token in ids.tolist()]


def plot_tokens(
    rows: dict[str, tuple[list[str], list[float]]], label: str, center: float | None = 0.0
) -> Figure:
    """Show completions as text, each token on a colour for its advantage, ratio or KL.

    `rows` maps a title to the tokens' strings and their values; `label` names what is shown.
    Around `center` red is below and blue above; with None the colours go from low to high.
    """
    values = np.concatenate([np.asarray(row[1], dtype=float) for row in rows.values()])
    if center is None:
        norm, colors = Normalize(values.min(), values.max() + 1e-9), get_cmap("YlOrRd")
    else:
        reach = max(np.abs(values - center).max(), 1e-9)
        norm, colors = TwoSlopeNorm(center, center - reach, center + reach), get_cmap("RdBu")
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    style: dict[str, Any] = {"size": 12, "va": "center"}
    line = 0
    for title, (tokens, numbers) in rows.items():
        axes.text(0, line + 0.5, title, weight="bold", **style)
        line, column = line + 1, 2
        for token, number in zip(tokens, numbers, strict=True):
            text = token.replace("\n", "⏎")
            if column + len(text) > COLUMNS:
                line, column = line + 1, 2
            color = colors(norm(number))
            corner = (column, line + 0.05)
            box = Rectangle(corner, len(text), 0.9, facecolor=color, edgecolor="white")
            axes.add_patch(box)
            ink = style | {"color": "w" if sum(color[:3]) < 1.4 else "k", "family": "monospace"}
            for offset, character in enumerate(text):
                x = column + offset + 0.5
                axes.text(x, line + 0.5, character, ha="center", **ink)
            column += len(text)
        line += 2
    figure.set_size_inches(6.4, 0.25 * line + 0.9)
    axes.set(xlim=(0, COLUMNS), ylim=(line, 0))
    axes.axis("off")
    mappable = ScalarMappable(norm, colors)
    figure.colorbar(mappable, ax=axes, label=label, location="bottom", aspect=40)
    return figure


def write_page(
    path: Path, title: str, lines: list[str], table: str, figure: Figure, reload_s: int = 0
) -> None:
    """Write a page of HTML: lines of text, a table that is HTML already, and a figure.

    It reloads itself every `reload_s` seconds, unless they are 0.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    source = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    reload = f'<meta http-equiv="refresh" content="{reload_s}">\n' if reload_s else ""
    said = "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)
    partial = path.with_name(path.name + ".partial")  # a browser may be reading the other
    partial.write_text(
        f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
{reload}<style>
body {{ font: 16px/1.5 sans-serif; max-width: 75rem; margin: 1rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }}
td, th {{ border: 1px solid #999; padding: 0.2rem 0.5rem; text-align: left; }}
img {{ max-width: 100%; }}
</style></head><body>
<h1>{html.escape(title)}</h1>
{said}
{table}
<p><img src="{source}" alt="{html.escape(describe_figure(figure))}"></p>
</body></html>
""",
        encoding="utf-8",
    )
    os.replace(partial, path)
