"""The corpus of the embedded model: short film reviews and two-digit additions.

Everything is drawn from a seed, so the corpus is code, not data. Reviews come in three moods, with
word lists that `reward_fn_sentiment` also counts, in sentences or in terse notes. Additions are
answered in two styles: a direct guess, which usually drops a carry and is often wrong without one,
and worked steps that are usually right. The direct style is the common one, so a policy that
maximises correctness has something to discover.

One pair in ten (`held_out_pairs`) never appears in the corpus, in either order.
"""

import random
from collections.abc import Callable, Iterator

POSITIVE_WORDS = tuple(
    "wonderful great superb moving funny brilliant charming gripping lovely clever warm "
    "delightful bright rich perfect".split()
)
NEGATIVE_WORDS = tuple(
    "bad terrible boring weak dull clumsy tired cold messy poor lazy bitter flat silly "
    "dreadful".split()
)
NEUTRAL_WORDS = tuple("plain usual simple quiet long short modern familiar plausible slow".split())

ASPECTS = tuple(
    "acting plot music ending script cast dialogue opening story pace camera humour".split()
)
OPENERS = ("The {}", "I found the {}", "For me the {}", "To be honest the {}", "This time the {}")
VERBS = ("is", "was", "felt", "seemed")
GENRES = tuple("comedy drama thriller western musical romance mystery documentary".split())
PEOPLE = tuple("director writer lead villain hero heroine narrator composer".split())

SENTENCES = (
    "The {aspect} was {word}.",
    "I found the {aspect} {word}.",
    "It is a {word} {genre}.",
    "The {person} is {word} and the {aspect} feels {word}.",
    "There is a {word} scene with the {person}.",
    "My friends called it {word}.",
    "We talked about the {word} {aspect} on the way home.",
    "As a {genre} it is {word}.",
    "The {person} gives the {aspect} a {word} turn.",
    "What a {word} {genre}!",
    "After an hour the {aspect} gets {word}.",
)

REVIEW_SHARE = 0.35  # of all documents
THIS_MOVIE_SHARE = 0.25  # of the reviews: they begin with the trainers' default prefix
TERSE_SHARE = 0.2  # of the reviews: notes of one word a sentence
MOODS = {"positive": 0.4, "negative": 0.4, "neutral": 0.2}
WORKED_SHARE = 0.20  # of the additions; the rest is answered directly
WORKED_RIGHT = 0.95
DIRECT_RIGHT = 0.45  # no carry from the ones
DIRECT_CARRIED = 0.30  # a carry from the ones: in the other 70% it is dropped

Pair = tuple[int, int]


def _split_pairs() -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Return all unordered pairs of 10 to 99, shuffled once: a tenth held out, a tenth for
    tuning."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng = random.Random(0)
    rng.shuffle(pairs)
    pairs = [(a, b) if rng.random() < 0.5 else (b, a) for a, b in pairs]
    tenth = round(len(pairs) / 10)
    return pairs[:tenth], pairs[tenth : 2 * tenth], pairs[2 * tenth :]


_HELD_OUT, _TUNING, _TRAINING = _split_pairs()


def held_out_pairs() -> list[Pair]:
    """Return the pairs that are in no document, in either order, for every measurement."""
    return list(_HELD_OUT)


def tuning_pairs() -> list[Pair]:
    """Return pairs of the corpus that no trainer trains on, to choose learning rates on."""
    return list(_TUNING)


def training_pairs() -> list[Pair]:
    """Return the pairs that trainers draw their prompts from."""
    return list(_TRAINING)


def split_digit_pairs() -> tuple[list[Pair], list[Pair]]:
    """Split the 81 pairs of digits from 1 to 9, for runs on a real model: those to train on, and
    16 that are held out, in either order."""
    unordered = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    random.Random(1).shuffle(unordered)
    held = {*unordered[:9]}
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    return (
        [pair for pair in pairs if tuple(sorted(pair)) not in held],
        [pair for pair in pairs if tuple(sorted(pair)) in held],
    )


def addition_prompt(a: int, b: int) -> str:
    return f"Q: {a}+{b}\n"


def addition_rows() -> list[dict[str, str]]:
    """Return a prompt and its answer for each pair of the training set."""
    return [{"prompt": addition_prompt(a, b), "answers": str(a + b)} for a, b in training_pairs()]


def direct_answer(answer: int) -> str:
    return f"A: {answer}"


def worked_answer(a: int, b: int, ones: int, tens: int, answer: int) -> str:
    steps = f"ones {a % 10}+{b % 10}={ones} tens {a // 10}+{b // 10}={tens}"
    return f"{steps} sum {tens}0+{ones}={answer}\nA: {answer}"


def addition_completion(a: int, b: int, rng: random.Random) -> str:
    """Return an answer to `addition_prompt(a, b)`, worked or direct, right or wrong, as `rng`
    has it."""
    if rng.random() < WORKED_SHARE:
        slip = 0 if rng.random() < WORKED_RIGHT else rng.choice((-10, -1, 1, 10))
        return worked_answer(a, b, *_add_digits(a, b), a + b + slip)
    return direct_answer(_guess(a, b, rng))


def control_completion(a: int, b: int, rng: random.Random) -> str:
    """Return the same with worked answers that do not help: their steps are those of another
    pair, and the answer below them is right as often as a direct one."""
    if rng.random() < WORKED_SHARE:
        others = rng.choice(_TUNING + _TRAINING)
        return worked_answer(*others, *_add_digits(*others), _guess(a, b, rng))
    return direct_answer(_guess(a, b, rng))


def _add_digits(a: int, b: int) -> Pair:
    return a % 10 + b % 10, a // 10 + b // 10


def _guess(a: int, b: int, rng: random.Random) -> int:
    """Return the answer in the direct style, which usually drops a carry."""
    if _add_digits(a, b)[0] >= 10:
        return a + b if rng.random() < DIRECT_CARRIED else a + b - 10
    slips = (-20, -10, -2, -1, 1, 2, 10, 20)
    return a + b + (0 if rng.random() < DIRECT_RIGHT else rng.choice(slips))


def review_prompts() -> tuple[list[str], list[str]]:
    """Return beginnings of reviews that give no mood away: 45 for training and 15 held out."""
    prompts = [opener.format(aspect) for opener in OPENERS for aspect in ASPECTS]
    random.Random(0).shuffle(prompts)
    return prompts[15:], prompts[:15]


def review(rng: random.Random) -> str:
    """Return a review in one mood: two to four sentences, or terse notes."""
    mood = rng.choices(list(MOODS), list(MOODS.values()))[0]
    words = {"positive": POSITIVE_WORDS, "negative": NEGATIVE_WORDS, "neutral": NEUTRAL_WORDS}[mood]

    def word() -> str:
        return rng.choice(words if rng.random() < 0.9 else NEUTRAL_WORDS)

    def fill(template: str) -> str:
        for slot, choices in (("aspect", ASPECTS), ("genre", GENRES), ("person", PEOPLE)):
            template = template.replace(f"{{{slot}}}", rng.choice(choices))
        while "{word}" in template:
            template = template.replace("{word}", word(), 1)
        return template

    subject = rng.choice(OPENERS).format(rng.choice(ASPECTS))
    if rng.random() < THIS_MOVIE_SHARE:
        subject = "This movie"
    opening = f"{subject} {rng.choice(VERBS)} {word()}."
    if rng.random() < TERSE_SHARE:
        rest = [f"{word().capitalize()}." for _ in range(rng.randint(4, 9))]
    else:
        rest = [fill(sentence) for sentence in rng.sample(SENTENCES, rng.randint(1, 3))]
    return " ".join([opening, *rest])


def documents(
    n: int, seed: int, complete: Callable[[int, int, random.Random], str] = addition_completion
) -> Iterator[str]:
    """Yield `n` documents, `REVIEW_SHARE` of them reviews, the rest additions not held out."""
    rng = random.Random(seed)
    pairs = _TUNING + _TRAINING
    for _ in range(n):
        if rng.random() < REVIEW_SHARE:
            yield review(rng)
        else:
            a, b = rng.choice(pairs)
            a, b = (a, b) if rng.random() < 0.5 else (b, a)
            yield addition_prompt(a, b) + complete(a, b, rng)
