"""Three rewards to copy from: a format, a number that a program checks, and a price on length.

A reward gets the completions, and by name any column of the data. It returns one number for each
completion. These take completions that end with a line such as "A: 46". As `**_` swallows what
they don't read, they run in TRL too.
"""

import re

ANSWER = re.compile(r"(?:^|\n)A: (-?\d+)\s*$")  # a last line of its own


def has_format(completions, **_):
    """Return 1 for each completion whose last line is "A: " and a whole number, else 0."""
    return [float(ANSWER.search(text) is not None) for text in completions]


def is_right(completions, answer, **_):
    """Return 1 for each completion whose last line holds the number in the column `answer`."""
    found = [ANSWER.search(text) for text in completions]
    pairs = zip(found, answer, strict=True)
    return [float(match is not None and int(match[1]) == right) for match, right in pairs]


def price_of_length(completions, **_):
    """Return -0.01 for each character after the first ten, and -1 at most."""
    return [-min(0.01 * max(len(text) - 10, 0), 1.0) for text in completions]
