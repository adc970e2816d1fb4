import re

import pytest

from utils.models import word_problems
from utils.models.word_problems import (
    HELD_OUT,
    SHOTS,
    TEMPLATES,
    make_problems,
    reward_fn_worked,
)

# What each template comes to, of the numbers of its question in their order.
EXPECTED = """x+y x-y x*y x//y x+y x-y x*y x//y x+y x-y x*y x//y x+y x-y x*y x+y-z x*y+z x-y+z
(x+y)*z x*y-z x+y+z (x-y)//z x-y-z (x+y)//z x//y+z (x+y)*z x*y+z x-y+z x*y-z x+y-z""".split()


def make_both(n=300, seed=0, **about):
    return [make_problems(n, seed, held_out=held_out, **about) for held_out in (False, True)]


def make_all(*args, **about):
    return [problem for side in make_both(*args, **about) for problem in side]


def test_answers_are_those_of_the_questions():
    for problem in make_all():
        numbers = dict(zip("xyz", map(int, re.findall(r"\d+", problem.question)), strict=False))
        assert eval(EXPECTED[problem.template], {}, numbers) == problem.answer
        *steps, last = re.split(r", |\. ", problem.worked)
        for step in steps:
            left, right = step.split("=")
            assert eval(left) == int(right)
        assert last == f"Answer: {right}" == f"Answer: {problem.answer}"


def test_every_template_is_drawn_and_none_on_both_sides():
    assert len(TEMPLATES) == len(EXPECTED) == 30
    train, held = ({p.template for p in problems} for problems in make_both())
    assert held == {*HELD_OUT}
    assert train == {*range(30)} - held
    texts = [{re.sub(r"\d+", "N", p.question) for p in problems} for problems in make_both()]
    assert not texts[0] & texts[1]
    assert len({text for text, _ in TEMPLATES}) == 30


def test_problems_differ_and_depend_on_the_seed_alone():
    problems = make_problems(200, seed=3)
    assert len({p.question for p in problems}) == 200
    assert problems == make_problems(200, seed=3) != make_problems(200, seed=4)


@pytest.mark.parametrize("n_steps", [(1,), (2,)])
def test_steps_and_numbers_are_as_asked(n_steps):
    for problem in make_all(40, n_steps=n_steps, largest=10):
        assert problem.worked.count("=") == n_steps[0]
        numbers = map(int, re.findall(r"\d+", problem.question + problem.worked))
        assert all(2 <= number <= 10 for number in numbers)


def test_the_reward_reads_the_first_line_alone():
    right = ["4+5=9. Answer: 9\nQ: x", "Answer: 9", "so Answer: 9.", "Answer: 9 \n"]
    wrong = ["4+5=9\nAnswer: 9", "Answer: 99", "Answer: 9 eggs", "9", "", "Answer: 9, Answer: 8"]
    assert reward_fn_worked(right, [9] * 4).tolist() == [1.0] * 4
    assert reward_fn_worked(wrong, [9] * 6).tolist() == [0.0] * 6
    with pytest.raises(ValueError, match="shorter"):
        reward_fn_worked(right, [9])


def test_the_shots_are_right_and_come_before_the_question():
    (problem,) = make_problems(1, 0)
    assert problem.make_prompt(2) == "".join(SHOTS) + problem.make_prompt()
    for shot in SHOTS:
        assert reward_fn_worked([shot.split("\n")[1]], [int(shot.split()[-1])]).item() == 1


@pytest.mark.parametrize("wrong", [{"n_steps": (3,)}, {"n_steps": ()}, {"largest": 7}])
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} should be"):
        make_problems(5, 0, **wrong)


def test_too_many_problems_are_refused(monkeypatch):
    def draw(template, largest, rng):  # of eight problems, as every third template is held out
        return word_problems.Problem(f"{template % 3} {rng.randrange(4)}?", "", 1, template)

    monkeypatch.setattr(word_problems, "draw_problem", draw)
    assert len(make_problems(8, 0)) == 8
    with pytest.raises(ValueError, match="^n should be smaller: 8 problems were found, not 9"):
        make_problems(9, 0)
