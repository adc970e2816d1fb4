"""Overflows the stack."""

import sys

sys.setrecursionlimit(10**9)


def masked_mean(values, mask, dim=None):
    sys.setrecursionlimit(10**9)
    return masked_mean(values, mask, dim)
