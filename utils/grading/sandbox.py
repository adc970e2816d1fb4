"""What shuts a process that runs a student's code off from the rest: `enter` in the child itself.

On Linux: Landlock (files), namespaces (network, processes, mounts), a seccomp filter (sockets, new
processes, signals, shared memory, modes of files), capabilities dropped; everywhere limits of
memory, time, files.

Sources: landlock(7), namespaces(7), capabilities(7); numbers from the kernel's headers.
"""

import contextlib
import ctypes
import functools
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from utils.grading import seccomp

LINUX = sys.platform == "linux"
MEMORY = 3 * 2**29  # beyond what is mapped at the fork
FILE_SIZE = 2**26
FOLDER_SIZE = 2**27
OPEN_FILES = 128


@dataclass(frozen=True)
class Limits:
    """`readable`: the folders and files that may be read. `folder`: the one that may be written.

    `forbidden` and `outside`, a file and a process that are there: for `protections`.
    """

    folder: str
    readable: tuple[str, ...]
    forbidden: str
    seconds: int
    outside: int


def use_huge_pages() -> None:
    """Pages of 2 MB for this process's memory, where the system can: a fork copies a table of them,
    which took a sixth of the time of grading."""
    if not LINUX:
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, modes, _, _, inode = line.split()[:5]
        first, last = (int(address, 16) for address in where.split("-"))
        if modes.startswith("rw") and inode == "0":  # no file's
            first, last = -(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE
            if first < last:
                _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _COLLAPSE)


def end_with_parent() -> None:
    """Where the system can: end this process when the one that forked it ends."""
    if LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_root() -> bool:
    """Of namespaces of its own, where this is another user: it may then make more of them.

    Whether that was needed and is allowed: what is forked next is in them.
    """
    user, group = os.geteuid(), os.getegid()
    if not LINUX or user == 0 or not _unshare(_NEWUSER | _NEWPID):
        return False
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        with contextlib.suppress(OSError):
            Path(f"/proc/self/{name}").write_text(text)
    return True


@contextlib.contextmanager
def separate_processes() -> Iterator[None]:
    """What is forked here has a namespace of processes of its own, if the system allows that."""
    entered = _can_separate() and _unshare(_NEWPID)
    try:
        yield
    finally:
        if entered:
            _return_to_own_processes()


@functools.cache
def _can_separate() -> bool:
    """Tried in a process of its own: one that could not return could not fork again."""
    if not LINUX:
        return False
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if _unshare(_NEWPID) and _return_to_own_processes() else 1)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _return_to_own_processes() -> bool:
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        return _libc.setns(own, _NEWPID) == 0
    finally:
        os.close(own)


def enter(limits: Limits) -> None:
    """Give up what student code does not need: in a child that was forked in `separate_processes`.

    What the system did not allow is still open: `protections.confirm` says what is not.
    """
    if LINUX:
        _unshare(_NEWIPC)
        _unshare(_NEWNET)
        if _unshare(_NEWNS):
            _mount_folder(limits.folder)
    os.chdir(limits.folder)
    _set_limits(limits.seconds)
    if LINUX:
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        _restrict_files(limits)
        _drop_capabilities()
        seccomp.filter_calls()


# --- Limits -------------------------------------------------------------------------------------


def _set_limits(seconds: int) -> None:
    mapped = _get_mapped_bytes()
    wanted = {
        "RLIMIT_AS": mapped + MEMORY if mapped else None,
        "RLIMIT_CPU": seconds,
        "RLIMIT_FSIZE": FILE_SIZE,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_CORE": 0,
    }
    for name, value in wanted.items():
        limit = getattr(resource, name, None)
        if limit is None or value is None:
            continue
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (value, value))


def _get_mapped_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # macOS, whose kernel does not keep to RLIMIT_AS
        return None
    return pages * resource.getpagesize()


# --- Linux --------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
_NEWUSER, _NEWPID, _NEWNET, _NEWNS, _NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x20000, 0x8000000
_HUGE, _COLLAPSE = 2**21, 25
_MOUNT_SETATTR = 442
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 1, 38, 24


def _unshare(flags: int) -> bool:
    return _libc.unshare(flags) == 0


def _prctl(option: int, *values: int) -> bool:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return _libc.prctl(option, *padded) == 0


def _mount_folder(folder: str) -> None:
    """All read-only, and a file system in memory, of limited size, over the folder."""
    private, flags = 1 << 18 | 1 << 14, 2 | 4 | 8  # rec, private; no suid, dev, exec
    _libc.mount(None, b"/", None, ctypes.c_ulong(private), None)
    read_only = struct.pack("<4Q", 1, 0, 0, 0)
    _libc.syscall(_MOUNT_SETATTR, -100, b"/", 0x8000, read_only, ctypes.c_size_t(32))  # recursive
    options = f"size={FOLDER_SIZE},nr_inodes=10000,mode=0700".encode()
    _libc.mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(flags), options)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _restrict_files(limits: Limits) -> None:
    """Landlock: reading where `limits` says, writing in the folder, and nothing else."""
    create, add, restrict = 444, 445, 446
    abi = _libc.syscall(create, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return
    read, read_folders = 1 << 2, 1 << 3
    handled = (1 << (13 + (abi >= 2) + (abi >= 3))) - 1  # execute ... make_sym, refer, truncate
    fields = [handled]
    if abi >= 4:
        fields.append(0b11)  # no TCP
    if abi >= 6:
        fields.append(0b11)  # no abstract sockets, no signals to the outside
    attributes = struct.pack(f"<{len(fields)}Q", *fields)
    ruleset = _libc.syscall(create, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return
    allowed = [(path, read | read_folders) for path in limits.readable]
    allowed += [(limits.folder, handled & ~1), ("/dev/null", read | 1 << 1), ("/dev/urandom", read)]
    for path, access in allowed:
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            access &= read | 1 << 1
        descriptor = os.open(path, os.O_PATH)
        rule = _PathBeneath(access, descriptor)
        _libc.syscall(add, ruleset, 1, ctypes.byref(rule), 0)
        os.close(descriptor)
    _libc.syscall(restrict, ruleset, 0)
    os.close(ruleset)


def _drop_capabilities() -> None:
    for capability in range(64):
        _prctl(_PR_CAPBSET_DROP, capability)
    header = struct.pack("<Ii", 0x20080522, 0)
    _libc.capset(header, bytes(24))
