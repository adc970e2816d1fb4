"""Three rewards to copy from: a format, a number that a program checks, and a price on length.

A reward gets the completions, and by name any column of the data. It returns one number for each
completion. These read completions whose last line is such as "A: 46". `**_` takes what they don't
read, so that they run in TRL too, which hands over more.
"""

import re

ANSWER = re.compile(r"(?:^|\n)A: (-?\d+)\s*$")


def read(completion):
    """Return a completion's text: TRL gives that of a chat as a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def has_format(completions, **_):
    """Return 1 for each completion whose last line is "A: " and a whole number, else 0."""
    return [float(ANSWER.search(read(one)) is not None) for one in completions]


def is_right(completions, answer, **_):
    """Return 1 for each completion whose last line holds the number in the column `answer`."""
    found = [ANSWER.search(read(one)) for one in completions]
    pairs = zip(found, answer, strict=True)
    return [float(match is not None and int(match[1]) == right) for match, right in pairs]


def price_of_length(completions, **_):
    """Return -0.01 for each character after the first ten, but never less than -1."""
    return [-min(0.01 * max(len(read(one)) - 10, 0), 1.0) for one in completions]
