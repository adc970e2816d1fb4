"""Word problems of one or two steps, for runs on a real language model.

Thirty templates of the course's own, in which names, things and numbers vary; every third one is
held out. An answer shows its working: "5+3=8, 8-2=6. Answer: 6". Everything is drawn from a seed.
"""

import operator
import random
import re
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from utils.validation import require

NAMES = tuple("Ann Ben Cara Dan Ella Finn Grace Hugo Iris Jack Kate Leo Mia Noah Olga Paul".split())
THINGS = tuple("pens apples books coins stones cards stamps balls shells cups".split())
# A text and its steps. {a}, {b}, {c} are numbers, and r is the result of the step before.
TEMPLATES: tuple[tuple[str, str], ...] = (
    ("{name} has {a} {things} and buys {b} more. How many {things} are there now?", "a+b"),
    ("{name} has {a} {things} and gives away {b}. How many are left?", "a-b"),
    ("A box has {a} {things}. How many {things} are in {b} boxes?", "a*b"),
    ("{name} shares {a} {things} equally among {b} friends. How many does each get?", "a/b"),
    ("{name} finds {a} {things} on Monday and {b} on Friday. How many in all?", "a+b"),
    ("There were {a} {things} on the table, and {name} took {b}. How many remain?", "a-b"),
    ("{name} packs {b} bags with {a} {things} each. How many {things} is that?", "b*a"),
    ("{name} puts {a} {things} into {b} equal rows. How long is a row?", "a/b"),
    ("{name} has {a} {things}. {other} has {b} more than {name}. How many has {other}?", "a+b"),
    ("{name} needs {a} {things} and has {b}. How many are missing?", "a-b"),
    ("{name} reads {a} pages a day. How many pages are read in {b} days?", "a*b"),
    ("{a} {things} fill {b} boxes evenly. How many {things} are in one box?", "a/b"),
    ("A bus has {a} riders. At a stop {b} get on. How many riders are there?", "a+b"),
    ("{name} is {a} years old. {other} is {b} years younger. How old is {other}?", "a-b"),
    ("One of the {things} costs {a} dollars. What do {b} of them cost?", "b*a"),
    ("{name} has {a} {things}, buys {b} and loses {c}. How many are left?", "a+b r-c"),
    ("{name} has {a} bags of {b} {things} and finds {c} more. How many in all?", "a*b r+c"),
    ("{name} has {a} {things}, gives away {b} and then gets {c}. How many now?", "a-b r+c"),
    ("{a} boys and {b} girls have {c} {things} each. How many {things} is that?", "a+b r*c"),
    ("{name} buys {a} boxes of {b} {things} and gives away {c}. How many are left?", "a*b r-c"),
    ("{name} has {a} {things}, {other} has {b}, and Sam has {c}. How many in all?", "a+b r+c"),
    (
        "{name} had {a} {things}, lost {b}, and shared the rest with {c} in all. Each got?",
        "a-b r/c",
    ),
    ("A bus has {a} riders. First {b} get off, then {c} more. How many are left?", "a-b r-c"),
    ("{name} and {other} put {a} and {b} {things} evenly into {c} boxes. Each holds?", "a+b r/c"),
    ("{name} shares {a} {things} among {b} bags and adds {c} to one. How many has it?", "a/b r+c"),
    ("A pen is {a} dollars and a book {b}. What do {c} pens and {c} books cost?", "a+b r*c"),
    ("{name} walks {a} miles a day for {b} days, then {c} more. How far is that?", "a*b r+c"),
    ("{name} has {a} dollars, spends {b}, and earns {c}. How many dollars are there?", "a-b r+c"),
    ("{name} bakes {a} trays of {b} cakes and eats {c}. How many cakes are left?", "a*b r-c"),
    (
        "{name} is {a}. {other} is {b} years older, and Sam {c} younger than {other}. Sam is?",
        "a+b r-c",
    ),
)
HELD_OUT = range(2, len(TEMPLATES), 3)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
SHOTS = (
    "Q: Rosa has 4 eggs and gets 5 more. How many eggs are there?\n4+5=9. Answer: 9\n",
    "Q: Tim has 3 nets of 2 fish and sells 1. How many are left?\n3*2=6, 6-1=5. Answer: 5\n",
)


@dataclass(frozen=True)
class Problem:
    """A question, an answer that shows its working, and the number that it comes to."""

    question: str
    worked: str
    answer: int
    template: int

    def make_prompt(self, n_shots: int = 0) -> str:
        """Return the question as a prompt, below `n_shots` solved ones."""
        return "".join(SHOTS[:n_shots]) + f"Q: {self.question}\n"


def make_problems(
    n: int, seed: int, n_steps: tuple[int, ...] = (1, 2), largest: int = 20, held_out: bool = False
) -> list[Problem]:
    """Draw `n` different problems, of the templates for training or of those that are held out.

    Every number in them, results included, is from 2 to `largest`.

    Raises ValueError for an n_steps other than 1 and 2, a `largest` below 8, and an `n` for which
    there are too few problems.
    """
    require({*n_steps} and {*n_steps} <= {1, 2}, f"n_steps should be of 1 and 2, but is {n_steps}")
    require(largest >= 8, f"largest should be at least 8, but is {largest}")
    rng = random.Random(seed)
    chosen = [
        i
        for i, (_, steps) in enumerate(TEMPLATES)
        if len(steps.split()) in n_steps and (i in HELD_OUT) == held_out
    ]
    problems: dict[str, Problem] = {}
    n_known = 0  # in a row
    while len(problems) < n:
        problem = draw_problem(rng.choice(chosen), largest, rng)
        n_known = n_known + 1 if problem.question in problems else 0
        require(
            n_known < 1000, f"n should be smaller: {len(problems)} problems were found, not {n}"
        )
        problems[problem.question] = problem
    return list(problems.values())


def draw_problem(template: int, largest: int, rng: random.Random) -> Problem:
    """Draw a problem of one template."""
    text, steps = TEMPLATES[template]
    while True:
        numbers = {slot: rng.randint(2, largest) for slot in "abc"}
        worked = []
        for left, sign, right in map(tuple, steps.split()):
            x, y = numbers[left], numbers[right]
            numbers["r"] = result = OPERATORS[sign](x, y)
            worked.append(f"{x}{sign}{y}={result}")
            if not 2 <= result <= largest or (sign == "/" and x % y):
                break
        else:
            break
        # A number is too large, too small or no integer: draw again.
    name, other = rng.sample(NAMES, 2)
    question = text.format(name=name, other=other, things=rng.choice(THINGS), **numbers)
    answer = f"{', '.join(worked)}. Answer: {result}"
    return Problem(question, answer, result, template)


def reward_fn_worked(samples: list[str], answers: list[int]) -> Float[Tensor, "batch"]:
    """Reward with 1 where a completion's first line ends with "Answer: " and the answer, else 0.

    Raises ValueError if there is not one answer for each sample.
    """
    found = [re.match(r"[^\n]*Answer: (\d+)\.?\s*(\n|$)", text) for text in samples]
    pairs = zip(found, answers, strict=True)
    return torch.tensor([float(match is not None and int(match[1]) == x) for match, x in pairs])
