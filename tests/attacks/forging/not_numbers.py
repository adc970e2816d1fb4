"""NaN, which is unequal to everything, for a result."""


def masked_mean(values, mask, dim=None):
    return (values * float("nan")).sum()
