"""The recorded runs of word problems and of the calculator, and what the pages say of them."""

import math

from chapters.experiments.word_problems import MIXED, RECIPES
from tests.course.helpers import read_page, read_results
from utils.course.real_model import (
    CALCULATOR_SHOTS,
    calculate_line,
    reward_fn_last_line,
    split_products,
)
from utils.models.word_problems import make_problems

WHEN = ("before", "after")
CALCULATOR = read_results("ch10_tools_real")
WORD_PROBLEMS = read_results("word_problems")


def test_a_line_that_is_a_call_is_answered_and_another_ends():
    assert calculate_line("CALC 21*13\n") == "= 273\n"
    others = ["A: 273\n", "\n", "CALC 21*13", "CALC 21+13\n", "x CALC 2*3\n", "CALC 2*3 \n"]
    assert [calculate_line(line) for line in others] == [None] * len(others)


def test_what_the_calculator_wrote_is_no_answer():
    right = ["A: 273\n", "A: 273", "CALC 21*13\n= 273\nA: 273\n"]
    wrong = ["CALC 21*13\n= 273\n", "CALC 21*13\n= 273\nA: 27", "A: 273\nA: 1\n", "273\n", ""]
    assert reward_fn_last_line(right, [273] * 3).tolist() == [1.0] * 3
    assert reward_fn_last_line(wrong, [273] * 5).tolist() == [0.0] * 5


def test_the_shots_show_both_ways_and_products_are_held_out_in_either_order():
    direct, called = CALCULATOR_SHOTS.split("Q: ")[1:]
    for shot, product in ((direct, 120), (called, 1081)):
        question, _, answer = shot.partition("\n")
        assert eval(question) == product
        assert reward_fn_last_line([answer], [product]).item() == 1
    assert calculate_line(called.split("\n")[1] + "\n") == called.split("\n")[2] + "\n"
    train, held = split_products()
    assert not {*map(frozenset, train)} & {*map(frozenset, held)}


def test_chapter_10_has_the_recorded_figures():
    page = read_page("chapters/source/ch10_tools.md")
    for key, what in (("right", "Right answers"), ("called", "calls")):
        found = [[f"{run[when][key]:.2f}" for run in CALCULATOR] for when in WHEN]
        ends = [f"{', '.join(runs[:-1])} and {runs[-1]}" for runs in found]
        assert f"{what} go from {ends[0]} to {ends[1]}".replace("calls go", "calls") in page
    assert all(run["before"]["right_direct"] == 0 for run in CALCULATOR)
    assert all(run["after"]["right"] > run["before"]["right"] + 0.4 for run in CALCULATOR)


def test_chapter_10_has_what_came_of_a_single_kind():
    page = read_page("chapters/source/ch10_tools.md")
    runs = read_results("ch10_tools_runs")
    thirds = [r["thirds"]["1x2 product"] for r in runs if r["setting"].startswith("1x2 products")]
    assert max(thirds[0]) < 0.002
    for found in thirds[1:]:
        assert "{:.2f}, {:.2f} and {:.2f}".format(*found) in page


def test_without_the_bonus_a_few_shot_policy_learns():
    """The ranges over three seeds don't touch, of samples and of greedy answers."""
    for how in ("sampled", "greedy"):
        found = {
            recipe: [run["after GRPO"][how] for run in WORD_PROBLEMS if run["recipe"] == recipe]
            for recipe in ("few-shot, easy, longer", "few-shot, easy, longer, no bonus")
        }
        with_bonus, without = found.values()
        assert len(with_bonus) == len(without) == 3
        assert max(with_bonus) < min(without)


def format_recipe(name: str) -> str:
    """Return the page's row of a recipe: three seeds, before GRPO and after it, and the rewards of
    its last sixth."""
    runs = [run for run in WORD_PROBLEMS if run["recipe"] == name]
    assert [run["seed"] for run in runs] == [1, 2, 3]

    def show(values):
        return ", ".join(f"{value:.2f}" for value in values)

    cells = [
        " → ".join(show(run[f"{when} GRPO"].get(how, math.nan) for run in runs) for when in WHEN)
        for how in ("sampled", "greedy", "sampled, steps: 2")
    ]
    last = [run["rewards"][-len(run["rewards"]) // 6 :] for run in runs]
    trained = show(sum(rewards) / len(rewards) for rewards in last)
    row = f"| {' | '.join([name, *cells, trained])} |"
    return row.replace("nan, nan, nan → nan, nan, nan", "–")  # problems of one step


def test_the_page_has_the_recorded_recipes():
    page = read_page("solutions/README.md")
    assert {run["recipe"] for run in WORD_PROBLEMS} == {*RECIPES}
    for name in RECIPES:
        assert format_recipe(name) in page


def test_the_page_says_what_the_long_runs_did():
    page = read_page("solutions/README.md").replace("\n", " ")
    runs = [run for run in WORD_PROBLEMS if run["recipe"] == "few-shot, easy then mixed"]
    parts = [[run["rewards"][start:][:10] for run in runs] for start in (20, 30, 50)]
    easy, switched, end = ([f"{sum(part) / 10:.2f}" for part in three] for three in parts)
    said = [f"{', '.join(three[:2])} and {three[2]}" for three in (easy, switched, end)]
    assert f"falls from {said[0]} to {said[1]} (means of ten phases), and ends at {said[2]}" in page
    first, held = [], []
    for name in ("SFT on 2,048, mixed, long", "SFT first, mixed, long"):
        runs = [run for run in WORD_PROBLEMS if run["recipe"] == name]
        first.append(sum(sum(run["rewards"][:10]) for run in runs) / 30)
        held.append(sum(run["before GRPO"]["sampled"] for run in runs) / 3)
    assert "first ten phases is {:.2f} instead of {:.2f}".format(*first) in page
    assert "{:.2f} are right before GRPO instead of {:.2f}".format(*held) in page


def test_grpos_problems_are_among_those_of_sft():
    grpo, sft = (make_problems(n, 1, **MIXED) for n in (400, 512))
    assert {*grpo} < {*sft}
