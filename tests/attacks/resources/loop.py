"""Never ends."""


def masked_mean(values, mask, dim=None):
    while True:
        pass
