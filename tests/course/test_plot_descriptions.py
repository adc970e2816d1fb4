"""Plots in words: what somebody reads who does not see them."""

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.pylabtools import select_figure_formats
from matplotlib.figure import Figure

from utils.course import session
from utils.plot_descriptions import describe_figure
from utils.plotting import plot_tokens


def draw_panel():
    figure = Figure()
    return figure, figure.add_subplot()


def test_a_curve_is_told_from_its_beginning_to_its_end():
    figure, axes = draw_panel()
    axes.plot([0, 1, 2, 3], [0.2, 0.5, 0.95, 0.9], label="P(steps)")
    axes.axhline(0.999, label="the policy")
    axes.plot([0, 1, 2], [0.3, 0.1, 0.2], "x")
    axes.set(title="how an answer begins", xlabel="phase", ylabel="probability")
    expected = "Plot. how an answer begins, probability by phase: P(steps) from 0.2 to 0.9"
    assert describe_figure(figure) == f"{expected}; 3 marks from 0.1 to 0.3."


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([0, 5, 1], "a curve from 0 to 1, at most 5"),
        ([3, -2, 3.1], "a curve from 3 to 3.1, at least -2"),
        ([0, float("nan"), 2, 4], "a curve from 0 to 4"),
    ],
)
def test_a_turning_point_is_told(heights, expected):
    figure, axes = draw_panel()
    axes.plot(heights)
    assert describe_figure(figure) == f"Plot. {expected}."


def test_bars_squares_and_points_are_counted():
    figure = Figure()
    left, middle, right = figure.subplots(1, 3)
    left.bar([0, 1], [1.65, 0.02])
    image = middle.imshow([[0.0, 0.25], [0.5, 1.0], [0.1, 0.2]])
    figure.colorbar(image, ax=middle, label="P(steps)")
    right.scatter([1, 2, 3], [1, 2, 3])
    assert describe_figure(figure) == (
        "Plot. 3 panels. Colours show P(steps). (1) bars 1.65, 0.02. "
        "(2) 3 by 2 squares from 0 to 1. (3) 3 points."
    )


def test_intervals_are_named():
    figure, axes = draw_panel()
    for place, value in enumerate([0.1, -0.2]):
        axes.errorbar(value, place, xerr=0.05, marker="o")
    axes.set_yticks([0, 1], ["token mean", "one update"])
    axes.set(xlabel="difference to GRPO")
    expected = "2 intervals around -0.2 to 0.1 (token mean, one update)"
    assert describe_figure(figure) == f"Plot. difference to GRPO: {expected}."


def test_marks_outlines_and_text_are_told():
    figure = Figure()
    left, middle, right = figure.subplots(1, 3)
    left.plot([1, 2], [0.3, 0.5], "o", label="PPO")
    left.plot([1], [0.4], "x")
    left.plot([1], [0.2], "x")
    middle.hist([1, 2, 2, 3], histtype="step", label="k1")
    right.text(0, 0, "process 0")
    assert describe_figure(figure) == (
        "Plot. 3 panels. (1) PPO: 2 marks from 0.3 to 0.5; 2 marks from 0.2 to 0.4. "
        "(2) a histogram of k1. (3) process 0."
    )


def test_labels_that_panels_share_are_told_once():
    figure = Figure()
    for axes in figure.subplots(1, 2):
        axes.plot([0, 1, 2])
    figure.supxlabel("update")
    figure.supylabel("reward")
    assert describe_figure(figure).startswith("Plot. 2 panels. reward by update. (1) a curve")


@pytest.mark.parametrize("draw", ["bar", "barh"])
def test_many_bars_and_curves_are_told_together(draw):
    figure, axes = draw_panel()
    getattr(axes, draw)(range(9), [1, 2, 3, 9, 5, 4, 3, 2, 1])
    for place in range(10):
        axes.plot([0, 1, place])
    described = describe_figure(figure)
    assert "2 more curves" in described
    assert "9 bars, 1 to 9, the highest is number 4" in described


def test_tokens_are_named_by_their_rows():
    figure = plot_tokens({"completion 1": (["a", "b"], [0.0, 1.0])}, "k3, nats", center=None)
    assert describe_figure(figure) == "Plot. Colours show k3, nats. completion 1."


def test_a_notebook_puts_the_description_beside_the_picture():
    """Also when IPython chooses the formats of figures later, which drops what is registered."""
    session._describe_figures()
    shell = InteractiveShell()
    select_figure_formats(shell, {"png"})
    figure, axes = draw_panel()
    axes.plot([1, 2, 4], label="reward")
    data, _ = shell.display_formatter.format(figure)
    assert data["text/plain"] == "Plot. reward from 1 to 4."
    assert "image/png" in data
