"""Which protections a process has: each is tried there, before a student's code is loaded.

What is named in a report was active.
"""

import contextlib
import os
import resource
import socket

from utils.autograder import sandbox


def confirm(limits: sandbox.Limits) -> list[str]:
    """Return the names of those that hold in this process, which has called `sandbox.enter`."""
    return [name for name, test in _TESTS.items() if test(limits)]


def _fails(*errors: type[BaseException]):
    """Make a test of whether a call raises one of these."""

    def decorate(attempt):
        def test(limits: sandbox.Limits) -> bool:
            try:
                attempt(limits)
            except errors:
                return True
            except Exception:
                return False
            return False

        return test

    return decorate


@_fails(PermissionError)
def _read_outside(limits):
    with open(limits.forbidden, "rb") as file:
        file.read(1)


@_fails(OSError)
def _write_outside(limits):
    with open(os.path.join(os.path.dirname(limits.folder), ".written-outside"), "wb"):
        pass


@_fails(OSError)
def _cut_off(limits):
    os.truncate(limits.forbidden, os.stat(limits.forbidden).st_size)


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


@_fails(OSError)
def _write_much(limits):
    path = os.path.join(limits.folder, "large")
    try:
        with open(path, "wb") as file:
            file.truncate(sandbox.MAX_FILE_BYTES + 1)
    finally:
        os.unlink(path)


@_fails(OSError)
def _reach_the_network(limits):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(("192.0.2.1", 9))  # reserved for documentation; nothing is sent


@_fails(OSError)
def _start_a_process(limits):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


@_fails(OSError)
def _signal_another(limits):
    os.kill(limits.outside, 0)


@_fails(MemoryError)
def _take_memory(limits):
    bytearray(2 * sandbox.MAX_MEMORY_BYTES)


@_fails(OSError)
def _open_many(limits):
    opened = []
    try:
        for _ in range(sandbox.MAX_OPEN_FILES + 1):
            opened.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for descriptor in opened:
            os.close(descriptor)


_TESTS = {
    "reading files": _read_outside,
    "writing files": lambda limits: _write_outside(limits) and _cut_off(limits),
    "folder size": _has_a_small_folder,
    "modes of files": _keeps_modes,
    "file size": _write_much,
    "network": _reach_the_network,
    "new processes": _start_a_process,
    "memory": _take_memory,
    "open files": _open_many,
    "other processes": _signal_another,
    "processor time": lambda limits: resource.getrlimit(resource.RLIMIT_CPU)[0] == limits.seconds,
}
PROTECTIONS = (*_TESTS, "wall clock")
