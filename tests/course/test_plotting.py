"""Helpers that the chapters' pictures share."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from utils.plotting import label_ends, plot_history, plot_spread, put_legend_above


@pytest.mark.parametrize("of", [list, torch.tensor], ids=["lists", "a tensor"])
def test_a_spread_is_the_mean_and_the_range_in_one_colour(of):
    axes = Figure().add_subplot()
    plot_spread(axes, of([[1.0, 4.0], [3.0, 8.0]]), "runs", color="C3")
    (line,), (band,) = axes.get_lines(), axes.collections
    assert line.get_xydata().tolist() == [[1, 2], [2, 6]]
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
    assert corners == {(1, 1), (1, 3), (2, 4), (2, 8)}
    assert line.get_color() == "C3"
    assert band.get_facecolor()[0, :3] == pytest.approx((214 / 255, 39 / 255, 40 / 255))
    assert axes.get_xlabel() == "phase"


def test_a_spread_over_other_points_is_not_labelled_as_phases():
    axes = Figure().add_subplot()
    plot_spread(axes, [[1.0, 4.0]], "runs", [0.5, 2.0])
    assert axes.get_lines()[0].get_xdata().tolist() == [0.5, 2.0]
    assert axes.get_xlabel() == ""


def test_labels_stand_at_the_ends_of_their_lines_and_apart():
    figure = Figure(dpi=72)  # a pixel is a point
    axes = figure.add_subplot()
    for name, end in {"first": 5.0, "second": 5.01, "far": 9.0, "_none": 7.0}.items():
        axes.plot([0, 1], [0, end], label=name)
    label_ends(axes, gap=12)
    heights = {}
    for text, line in zip(sorted(axes.texts, key=lambda t: t.xy[1]), axes.lines, strict=False):
        assert text.get_color() == line.get_color()
        heights[text.get_text()] = axes.transData.transform(text.xy)[1] + text.xyann[1]
    ends = {line.get_label(): axes.transData.transform(line.get_xydata()[-1])[1]
            for line in axes.lines}  # fmt: skip
    assert heights.keys() == {"first", "second", "far"}
    assert heights["first"] == pytest.approx(ends["first"])
    assert heights["second"] == pytest.approx(heights["first"] + 12)
    assert heights["far"] == pytest.approx(ends["far"])


def test_a_legend_above_covers_no_panel():
    figure = Figure(layout="constrained")
    for axes in figure.subplots(1, 2):
        axes.plot([0, 1], label="one")
        axes.plot([[1, 2], [0, 3]], label="two")
    put_legend_above(figure)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]
    lowest = legend.get_window_extent().y0
    assert all(axes.get_tightbbox().y1 <= lowest for axes in figure.axes)


def test_what_hardly_moves_looks_like_it():
    rows = [{"phase": p, "reward": p, "entropy": 1 + 0.01 * p} for p in range(1, 9)]
    reward, _, entropy, _ = plot_history({"run": rows}).axes
    assert entropy.get_ylim()[0] == 0
    low, high = entropy.get_ylim()
    drawn = entropy.get_lines()[0].get_ydata()
    assert np.ptp(drawn) < 0.1 * (high - low)
    assert reward.get_ylim()[0] != 0
