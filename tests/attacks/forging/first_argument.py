"""The first argument, whatever it is."""


def masked_mean(values, mask, dim=None):
    return values
