"""Plots in words, for those who do not see them."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

MOST = 8  # curves, or bars, that are told one by one


def describe_figure(figure: Figure) -> str:
    """Describe a figure: each panel's title and axes, and where its curves begin and end."""
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    panels = [_describe_panel(axes) for axes in figure.axes if axes not in bars]
    panels = [panel for panel in panels if panel]
    scales = [bar.get_ylabel() or bar.get_xlabel() for bar in bars]
    words = [f"Colours show {scale}." for scale in dict.fromkeys(filter(None, scales))]
    if shared := " by ".join(filter(None, (figure.get_supylabel(), figure.get_supxlabel()))):
        words.insert(0, f"{shared}.")
    if title := figure.get_suptitle():
        words.insert(0, f"{title}.")
    if len(panels) > 1:
        panels = [f"({place}) {panel}" for place, panel in enumerate(panels, start=1)]
        words.insert(0, f"{len(panels)} panels.")
    return " ".join(["Plot.", *words, *panels])


def _describe_panel(axes: Axes) -> str:
    kinds = (_list_curves, _list_bars, _list_grids, _list_intervals, _list_marks, _list_points)
    said = [text for list_ in kinds for text in list_(axes)]
    if not said:  # a picture of text
        bold = [text for text in axes.texts if text.get_fontweight() == "bold"]
        said = [text.get_text() for text in bold or axes.texts][:MOST]
    if not said:
        return ""
    texts = axes.get_title(), axes.get_xlabel(), axes.get_ylabel()
    title, across, up = (" ".join(text.split()) for text in texts)  # they may have two lines
    named = f"{up} by {across}" if across and up else across or up
    head = ", ".join(filter(None, (title, named)))
    return f"{head}: {'; '.join(said)}." if head else f"{'; '.join(said)}."


def _list_curves(axes: Axes) -> list[str]:
    said = []
    for line in axes.get_lines():
        heights = [y for y in _get_numbers(line.get_ydata()) if y == y]
        if len(heights) < 3 or len(set(heights)) == 1 or line.get_linestyle() == "None":
            continue  # a rule, or marks, and not a curve
        first, last, low, high = heights[0], heights[-1], min(heights), max(heights)
        curve = f"{_get_name(line) or 'a curve'} from {first:.3g} to {last:.3g}"
        beyond = 0.1 * (high - low)
        curve += f", at least {low:.3g}" * (low < min(first, last) - beyond)
        curve += f", at most {high:.3g}" * (high > max(first, last) + beyond)
        said.append(curve)
    return said[:MOST] + [f"{len(said) - MOST} more curves"] * (len(said) > MOST)


def _list_bars(axes: Axes) -> list[str]:
    said = []
    for bars in (drawn for drawn in axes.containers if isinstance(drawn, BarContainer)):
        heights = _get_numbers(bars.datavalues)  # of bars that lie, too
        name = _get_name(bars) or "bars"
        if len(heights) <= MOST:
            said.append(f"{name} {', '.join(f'{height:.3g}' for height in heights)}")
        else:
            highest = heights.index(max(heights)) + 1
            said.append(f"{name}: {len(heights)} bars, {min(heights):.3g} to {max(heights):.3g}, "
                        f"the highest is number {highest}")  # fmt: skip
    return said


def _list_grids(axes: Axes) -> list[str]:
    grids = [np.asarray(image.get_array()) for image in axes.get_images()]
    return [
        f"{grid.shape[0]} by {grid.shape[1]} squares from {grid.min():.3g} to {grid.max():.3g}"
        for grid in grids
    ]


def _list_intervals(axes: Axes) -> list[str]:
    """List what error bars show, and the names that stand beside them."""
    bars = [drawn for drawn in axes.containers if isinstance(drawn, ErrorbarContainer)]
    lines = [bar.lines[0] for bar in bars if bar.lines[0] is not None]
    if not lines:
        return []
    is_lying = bars[0].has_xerr
    data = [line.get_xdata() if is_lying else line.get_ydata() for line in lines]
    values = [value for one in data for value in _get_numbers(one)]
    ticks = axes.get_yticklabels() if is_lying else axes.get_xticklabels()
    names = ", ".join(tick.get_text() for tick in ticks if tick.get_text())
    return [f"{len(values)} intervals around {min(values):.3g} to {max(values):.3g} ({names})"]


def _list_marks(axes: Axes) -> list[str]:
    """List marks that no line joins, how many and where, and the names of outlines, as of
    histograms."""
    said, unnamed = [], []
    for line in axes.get_lines():
        heights = _get_numbers(line.get_ydata())
        if line.get_linestyle() != "None" or not heights:
            continue
        if name := _get_name(line):
            said.append(f"{name}: {_tell_range(heights)}")
        else:
            unnamed += heights
    said += [_tell_range(unnamed)] if unnamed else []
    outlines = [_get_name(patch) for patch in axes.patches if isinstance(patch, Polygon)]
    return said + [f"a histogram of {name}" for name in outlines if name]


def _tell_range(heights: list[float]) -> str:
    return f"{len(heights)} marks from {min(heights):.3g} to {max(heights):.3g}"


def _list_points(axes: Axes) -> list[str]:
    scatters = [drawn for drawn in axes.collections if type(drawn).__name__ == "PathCollection"]
    points = sum(len(np.asarray(drawn.get_offsets())) for drawn in scatters)
    return [f"{points} points"] if points else []


def _get_name(drawn: Any) -> str:
    """Return the label that its author gave, if one was given."""
    label = str(drawn.get_label())
    return "" if label.startswith("_") else label


def _get_numbers(data: Any) -> list[float]:
    return np.asarray(data, dtype=float).ravel().tolist()
