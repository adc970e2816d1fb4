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

from utils.autograder import seccomp

LINUX = sys.platform == "linux"
MAX_MEMORY_BYTES = 3 * 2**29  # beyond what is mapped at the fork
MAX_FILE_BYTES = 2**26
MAX_FOLDER_BYTES = 2**27
MAX_FOLDER_FILES = 10_000
MAX_OPEN_FILES = 128
MAX_DESCRIPTOR = 1024  # more than that no process here has open


@dataclass(frozen=True)
class Limits:
    """What a child may do, and what `protections` tries in it."""

    readable: tuple[str, ...]  # the folders and files that may be read
    forbidden: str  # a file that is there and may not
    outside: int  # a process that is there
    folder: str = ""  # the one that may be written: each child has its own
    seconds: int = 0  # of processor time, as each job says


def use_huge_pages() -> None:
    """Take pages of 2 MB for this process's memory, where the system can: a fork copies a
    table of them, which took a sixth of the time of grading."""
    if not LINUX:
        return
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, modes, _, _, inode = line.split()[:5]
        first, last = (int(address, 16) // HUGE_PAGE_BYTES for address in where.split("-"))
        if modes.startswith("rw") and inode == "0" and first + 1 < last:  # no file's, whole pages
            place, size = (first + 1) * HUGE_PAGE_BYTES, (last - first - 1) * HUGE_PAGE_BYTES
            _libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), MADV_COLLAPSE)


def end_with_parent() -> None:
    """End this process when the one that forked it ends, where the system can."""
    if LINUX:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become_root() -> bool:
    """Become root of namespaces of its own, where this is another user: it may then make more.

    Return whether this was needed and allowed; what is forked next is in them.
    """
    user, group = os.geteuid(), os.getegid()
    if not LINUX or user == 0 or not _unshare(CLONE_NEWUSER | CLONE_NEWPID):
        return False
    texts = {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}
    for name, text in texts.items():
        with contextlib.suppress(OSError):
            Path(f"/proc/self/{name}").write_text(text)
    return True


@contextlib.contextmanager
def separate_processes() -> Iterator[None]:
    """Give what is forked here a namespace of processes of its own, if the system allows that."""
    entered = _can_separate() and _unshare(CLONE_NEWPID)
    try:
        yield
    finally:
        if entered:
            _return_to_own_processes()


@functools.cache
def _can_separate() -> bool:
    """Try it in a process of its own: one that could not return could not fork again."""
    if not LINUX:
        return False
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if _unshare(CLONE_NEWPID) and _return_to_own_processes() else 1)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _return_to_own_processes() -> bool:
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        return _libc.setns(own, CLONE_NEWPID) == 0
    finally:
        os.close(own)


def enter(limits: Limits) -> None:
    """Give up what student code does not need: in a child that was forked in `separate_processes`.

    What the system did not allow is still open: `protections.confirm` says what is not.
    """
    if LINUX:
        _unshare(CLONE_NEWIPC)
        _unshare(CLONE_NEWNET)
        if _unshare(CLONE_NEWNS):
            _mount_folder(limits.folder)
    os.chdir(limits.folder)
    _set_limits(limits.seconds)
    if LINUX:
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        _restrict_files(limits)
        _drop_capabilities()
        seccomp.filter_calls()


# --- Limits -------------------------------------------------------------------------------------


def _set_limits(seconds: int) -> None:
    wanted = {
        "RLIMIT_CPU": seconds,
        "RLIMIT_FSIZE": MAX_FILE_BYTES,
        "RLIMIT_NOFILE": MAX_OPEN_FILES,
        "RLIMIT_CORE": 0,
    }
    if LINUX:  # macOS does not keep to it
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        wanted["RLIMIT_AS"] = pages * resource.getpagesize() + MAX_MEMORY_BYTES
    for name, value in wanted.items():
        limit = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(limit, (value, value))


# --- Linux --------------------------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)
# linux/sched.h: what `unshare` makes anew.
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38  # linux/prctl.h
MAX_CAPABILITIES = 64
CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h; two sets of three words follow
HUGE_PAGE_BYTES, MADV_COLLAPSE = 2**21, 25
# Mounting: linux/mount.h.
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
MOUNT_ATTR_BYTES = 32
# Landlock: linux/landlock.h. An access is a bit; later versions know more of them.
SYS_LANDLOCK_CREATE_RULESET, SYS_LANDLOCK_ADD_RULE, SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION, LANDLOCK_RULE_PATH_BENEATH = 1, 1
ACCESS_FS_EXECUTE, ACCESS_FS_WRITE_FILE, ACCESS_FS_READ_FILE, ACCESS_FS_READ_DIR = 1, 2, 4, 8
N_ACCESSES_OF_FILES = {1: 13, 2: 14, 3: 15}  # by version: 2 adds "refer", 3 "truncate"
ACCESS_NET_BIND_TCP, ACCESS_NET_CONNECT_TCP = 1, 2  # from version 4 on
SCOPE_ABSTRACT_UNIX_SOCKET, SCOPE_SIGNAL = 1, 2  # from version 6 on


def _unshare(flags: int) -> bool:
    return _libc.unshare(flags) == 0


def _prctl(option: int, *values: int) -> bool:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return _libc.prctl(option, *padded) == 0


def _mount_folder(folder: str) -> None:
    """Make all read-only, and mount a file system in memory, of limited size, over the folder."""
    _libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    read_only = struct.pack("<4Q", MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(MOUNT_ATTR_BYTES)
    _libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, size)
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC)
    options = f"size={MAX_FOLDER_BYTES},nr_inodes={MAX_FOLDER_FILES},mode=0700".encode()
    _libc.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, options)


def _restrict_files(limits: Limits) -> None:
    """Allow, by Landlock, reading where `limits` says and writing in the folder, nothing else."""
    no_attributes = (None, ctypes.c_size_t(0))
    version = _libc.syscall(
        SYS_LANDLOCK_CREATE_RULESET, *no_attributes, LANDLOCK_CREATE_RULESET_VERSION
    )
    if version < 1:
        return
    all_of_files = (1 << N_ACCESSES_OF_FILES[min(version, max(N_ACCESSES_OF_FILES))]) - 1
    handled = [all_of_files]
    if version >= 4:
        handled.append(ACCESS_NET_BIND_TCP | ACCESS_NET_CONNECT_TCP)
    if version >= 6:
        handled.append(SCOPE_ABSTRACT_UNIX_SOCKET | SCOPE_SIGNAL)
    attributes = struct.pack(f"<{len(handled)}Q", *handled)
    size = ctypes.c_size_t(len(attributes))
    ruleset = _libc.syscall(SYS_LANDLOCK_CREATE_RULESET, attributes, size, 0)
    if ruleset < 0:
        return
    of_one_file = ACCESS_FS_READ_FILE | ACCESS_FS_WRITE_FILE
    allowed = [(path, ACCESS_FS_READ_FILE | ACCESS_FS_READ_DIR) for path in limits.readable]
    allowed += [
        (limits.folder, all_of_files & ~ACCESS_FS_EXECUTE),
        ("/dev/null", of_one_file),
        ("/dev/urandom", ACCESS_FS_READ_FILE),
    ]
    for path, access in allowed:
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH)
        access = access if os.path.isdir(path) else access & of_one_file
        rule = struct.pack("<Qi", access, descriptor)  # struct landlock_path_beneath_attr
        _libc.syscall(SYS_LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0)
        os.close(descriptor)
    _libc.syscall(SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _drop_capabilities() -> None:
    for capability in range(MAX_CAPABILITIES):
        _prctl(PR_CAPBSET_DROP, capability)
    header = struct.pack("<Ii", CAPABILITY_VERSION_3, 0)
    _libc.capset(header, bytes(24))
