"""Which protections a process has: each is tried there, before a student's code is loaded.

What is named in a report was active.
"""

import contextlib
import os
import resource
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.autograder import sandbox


def confirm(limits: sandbox.Limits) -> list[str]:
    """Return the names of those that hold in this process, which has called `sandbox.enter`."""
    return [name for name, test in _TESTS.items() if test(limits)]


def _refuses(attempt: Callable[[sandbox.Limits], Any], error: type[Exception] = OSError):
    """Make a test of whether a call raises this error."""

    def test(limits: sandbox.Limits) -> bool:
        try:
            attempt(limits)
        except error:
            return True
        except Exception:
            return False
        return False

    return test


_refuses_to_write = _refuses(
    lambda limits: Path(limits.folder).with_name(".written-outside").write_bytes(b"")
)
_refuses_to_cut_off = _refuses(
    lambda limits: os.truncate(limits.forbidden, os.stat(limits.forbidden).st_size)
)


def _has_a_small_folder(limits: sandbox.Limits) -> bool:
    system = os.statvfs(limits.folder)
    return system.f_blocks * system.f_frsize <= sandbox.MAX_FOLDER_BYTES


def _keeps_modes(limits: sandbox.Limits) -> bool:
    mode = os.stat(limits.forbidden).st_mode & 0o777
    with contextlib.suppress(OSError):
        os.chmod(limits.forbidden, mode ^ 1)
    is_kept = os.stat(limits.forbidden).st_mode & 0o777 == mode
    if not is_kept:
        os.chmod(limits.forbidden, mode)
    return is_kept


def _write_much(limits):
    with tempfile.TemporaryFile(dir=limits.folder) as file:
        file.truncate(sandbox.MAX_FILE_BYTES + 1)


def _reach_the_network(limits):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(("192.0.2.1", 9))  # reserved for documentation; nothing is sent


def _start_a_process(limits):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _open_many(limits):
    with contextlib.ExitStack() as stack:
        for _ in range(sandbox.MAX_OPEN_FILES + 1):
            stack.enter_context(open(os.devnull, "rb"))


_TESTS = {
    "reading files": _refuses(lambda limits: Path(limits.forbidden).read_bytes(), PermissionError),
    "writing files": lambda limits: _refuses_to_write(limits) and _refuses_to_cut_off(limits),
    "folder size": _has_a_small_folder,
    "modes of files": _keeps_modes,
    "file size": _refuses(_write_much),
    "network": _refuses(_reach_the_network),
    "new processes": _refuses(_start_a_process),
    "memory": _refuses(lambda limits: bytearray(2 * sandbox.MAX_MEMORY_BYTES), MemoryError),
    "open files": _refuses(_open_many),
    "other processes": _refuses(lambda limits: os.kill(limits.outside, 0)),
    "processor time": lambda limits: resource.getrlimit(resource.RLIMIT_CPU)[0] == limits.seconds,
}
PROTECTIONS = (*_TESTS, "wall clock")
