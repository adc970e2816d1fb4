"""Plots in words, for those who do not see them."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon

MOST = 8  # curves, or bars, that are told one by one


def describe_figure(figure: Figure) -> str:
    """Describe a figure: each panel's title and axes, and where its curves begin and end."""
    bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
    panels = [_describe_panel(axes) for axes in figure.axes if axes not in bars]
    panels = [panel for panel in panels if panel]
    scales = [bar.get_ylabel() or bar.get_xlabel() for bar in bars]
    words = [f"Colours show {scale}." for scale in dict.fromkeys(filter(None, scales))]
    if title := figure.get_suptitle():
        words.insert(0, f"{title}.")
    if len(panels) > 1:
        panels = [f"({place}) {panel}" for place, panel in enumerate(panels, start=1)]
        words.insert(0, f"{len(panels)} panels.")
    return " ".join(["Plot.", *words, *panels])


def _describe_panel(axes: Axes) -> str:
    said = [*_describe_curves(axes), *_describe_bars(axes), *_describe_grids(axes)]
    said += [*_describe_intervals(axes), *_describe_marks(axes)]
    points = sum(
        len(np.asarray(drawn.get_offsets())) for drawn in axes.collections if _is_scatter(drawn)
    )
    said += [f"{points} points"] if points else []
    if not said:  # a picture of text
        bold = [text for text in axes.texts if text.get_fontweight() == "bold"]
        said = [text.get_text() for text in bold or axes.texts][:MOST]
    if not said:
        return ""
    across, up = axes.get_xlabel(), axes.get_ylabel()
    named = f"{up} by {across}" if across and up else across or up
    head = ", ".join(filter(None, (axes.get_title(), named)))
    return f"{head}: {'; '.join(said)}." if head else f"{'; '.join(said)}."


def _is_scatter(drawn) -> bool:
    return type(drawn).__name__ == "PathCollection"


def _describe_curves(axes: Axes) -> list[str]:
    said = []
    for line in axes.get_lines():
        heights = [y for y in _get_heights(line) if y == y]
        if len(heights) < 3 or len(set(heights)) == 1 or line.get_linestyle() == "None":
            continue  # a rule, or marks, and not a curve
        first, last, low, high = heights[0], heights[-1], min(heights), max(heights)
        label = str(line.get_label())
        curve = f"{'a curve' if label.startswith('_') else label} from {first:.3g} to {last:.3g}"
        beyond = 0.1 * (high - low)
        curve += f", at least {low:.3g}" * (low < min(first, last) - beyond)
        curve += f", at most {high:.3g}" * (high > max(first, last) + beyond)
        said.append(curve)
    return said[:MOST] + [f"{len(said) - MOST} more curves"] * (len(said) > MOST)


def _describe_bars(axes: Axes) -> list[str]:
    said = []
    for bars in axes.containers:
        if not isinstance(bars, BarContainer):
            continue
        heights = [bar.get_height() for bar in bars]
        label = str(bars.get_label())
        name = "bars" if label.startswith("_") else label
        if len(heights) <= MOST:
            said.append(f"{name} {', '.join(f'{height:.3g}' for height in heights)}")
        else:
            highest = heights.index(max(heights)) + 1
            said.append(f"{name}: {len(heights)} bars, {min(heights):.3g} to {max(heights):.3g}, "
                        f"the highest is number {highest}")  # fmt: skip
    return said


def _describe_intervals(axes: Axes) -> list[str]:
    """Of error bars, and the names that stand beside them."""
    bars = [drawn for drawn in axes.containers if isinstance(drawn, ErrorbarContainer)]
    lines = [bar.lines[0] for bar in bars if bar.lines[0] is not None]
    if not lines:
        return []
    is_lying = bars[0].has_xerr
    places = [line.get_xdata() if is_lying else line.get_ydata() for line in lines]
    values = np.concatenate([np.asarray(x, dtype=float).ravel() for x in places])
    ticks = axes.get_yticklabels() if is_lying else axes.get_xticklabels()
    names = ", ".join(tick.get_text() for tick in ticks if tick.get_text())
    return [f"{len(values)} intervals around {min(values):.3g} to {max(values):.3g} ({names})"]


def _describe_marks(axes: Axes) -> list[str]:
    """Of marks that no line joins, how many and where; of outlines, as of histograms, the names."""
    said, unnamed = [], []
    for line in axes.get_lines():
        heights = _get_heights(line)
        if line.get_linestyle() != "None" or not heights:
            continue
        if (label := str(line.get_label())).startswith("_"):
            unnamed += heights
        else:
            said.append(f"{label}: {_tell_range(heights)}")
    said += [_tell_range(unnamed)] if unnamed else []
    names = [str(patch.get_label()) for patch in axes.patches if isinstance(patch, Polygon)]
    return said + [f"a histogram of {name}" for name in names if not name.startswith("_")]


def _get_heights(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata(), dtype=float).tolist()


def _tell_range(heights: list[float]) -> str:
    return f"{len(heights)} marks from {min(heights):.3g} to {max(heights):.3g}"


def _describe_grids(axes: Axes) -> list[str]:
    said = []
    for image in axes.get_images():
        values = np.asarray(image.get_array())
        rows, columns = values.shape[:2]
        said.append(f"{rows} by {columns} squares from {values.min():.3g} to {values.max():.3g}")
    return said
