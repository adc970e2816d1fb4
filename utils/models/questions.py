"""The corpus of the tools model: sums and products, answered directly or by calling a calculator.

    Q: 23*47            Q: 23*47
    A: 1081             <23*47>=1081
                        A: 1081

All direct answers are right: what the model then gets wrong is beyond it, and no noise that it has
learnt. Calls are as frequent for every kind of question, so the corpus doesn't say when to call.
Some of them are malformed, which the calculator answers with "=?", or have a wrong digit.

Unordered pairs are split by a hash: "corpus" (70%) to pretrain on, "train" (20%) for trainers'
prompts, "held_out" (10%) for measurements. No trainer's prompt is in the corpus.
"""

import random
from typing import Literal

Split = Literal["corpus", "train", "held_out"]

KINDS = {"2-digit sum": 0.15, "3-digit sum": 0.2, "1x2 product": 0.25, "2x2 product": 0.4}
SPLITS: dict[Split, float] = {"corpus": 0.7, "train": 0.9, "held_out": 1.0}  # cumulative
CALL_SHARE = 0.15  # of all documents
MALFORMED = 0.06  # of the calls
MISTYPED = 0.05  # of the calls: a digit of the first number is another


def split_question(question: str) -> tuple[int, str, int]:
    """Return the parts of a question: 23, "*" and 47 of "23*47"."""
    op = "*" if "*" in question else "+"
    a, b = question.split(op)
    return int(a), op, int(b)


def calculate(question: str) -> int:
    a, op, b = split_question(question)
    return a * b if op == "*" else a + b


def find_kind(question: str) -> str:
    """Return the kind, a key of `KINDS`, of a question that `draw_question` may draw."""
    a, op, b = split_question(question)
    if op == "*":
        return "1x2 product" if min(a, b) < 10 else "2x2 product"
    return "2-digit sum" if a < 100 else "3-digit sum"


def find_split(question: str) -> Split:
    """Return the split that a question belongs to, in either order of its numbers."""
    a, op, b = split_question(question)
    a, b = sorted((a, b))
    mixed = (a * 7919 + b * 104729 + (op == "*") * 15485863) * 2654435761 % 2**32
    return next(name for name, top in SPLITS.items() if mixed / 2**32 < top)


def draw_question(rng: random.Random, split: Split, kind: str | None = None) -> str:
    """Draw a question of a split, of this kind or of any: "23*47"."""
    kind = kind or rng.choices(list(KINDS), list(KINDS.values()))[0]
    low, high = (100, 1000) if kind == "3-digit sum" else (10, 100)
    op = "*" if kind.endswith("product") else "+"
    while True:
        a, b = rng.randrange(low, high), rng.randrange(low, high)
        if kind == "1x2 product":
            a = rng.randrange(2, 10)
            if rng.random() < 0.5:
                a, b = b, a
        question = f"{a}{op}{b}"
        if find_split(question) == split:
            return question


def draw_questions(n: int, split: Split, seed: int, kind: str | None = None) -> list[str]:
    rng = random.Random(seed)
    return [draw_question(rng, split, kind) for _ in range(n)]


def question_prompt(question: str) -> str:
    return f"Q: {question}\n"


def question_rows() -> list[dict[str, str]]:
    """Return a prompt and its answer for each of 2,048 questions of the trainers' split."""
    return [
        {"prompt": question_prompt(question), "answers": str(calculate(question))}
        for question in draw_questions(2048, "train", seed=0)
    ]


def write_completion(question: str, rng: random.Random) -> str:
    """Return a completion of the corpus, what the calculator writes included: direct or by a call,
    as `rng` has it."""
    right = f"A: {calculate(question)}"
    if rng.random() >= CALL_SHARE:
        return right
    a, op, b = split_question(question)
    u = rng.random()
    if u < MALFORMED:
        failed = f"<{rng.choice((f'{a}{op}', f'{a}{b}', f'{op}{b}'))}>=?\n"
        if rng.random() < 0.5:
            return failed + right
        return f"{failed}<{question}>={calculate(question)}\n{right}"
    if u < MALFORMED + MISTYPED:
        digits = list(str(a))
        digits[rng.randrange(len(digits))] = rng.choice("123456789")
        question = f"{''.join(digits)}{op}{b}"
    return f"<{question}>={calculate(question)}\nA: {calculate(question)}"
