"""What shuts a process that runs a student's code off from the rest: `enter` in the child itself.

On Linux: Landlock (files), namespaces (network, processes, mounts), a seccomp filter (sockets, new
processes, signals, shared memory, modes of files), capabilities dropped; everywhere limits of
memory, time, files. Each is tested in the child before student code is loaded: what is named in a
report was active there.

Sources: landlock(7), seccomp(2), namespaces(7), capabilities(7); numbers from the kernel's headers.
"""

import contextlib
import ctypes
import functools
import os
import platform
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LINUX = sys.platform == "linux"
MEMORY = 3 * 2**29  # beyond what is mapped at the fork
FILE_SIZE = 2**26
FOLDER_SIZE = 2**27
OPEN_FILES = 128


@dataclass(frozen=True)
class Limits:
    """`readable`: the folders and files that may be read. `folder`: the one that may be written.

    `forbidden` and `outside`, a file and a process that are there: for the tests.
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


def enter(limits: Limits) -> list[str]:
    """Give up what student code does not need. Gives the protections that the tests below confirm.

    In a child that was forked in `separate_processes`.
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
        _filter_calls()
    return [name for name, test in _TESTS.items() if test(limits)]


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
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 38, 22, 24


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


# Numbers of the calls that are refused. Threads stay possible: clone is looked at by its flags.
_REFUSED = {
    "x86_64": {
        "socket": 41, "socketpair": 53, "fork": 57, "vfork": 58, "execve": 59, "kill": 62,
        "ptrace": 101, "mount": 165, "umount2": 166,
        "tkill": 200, "tgkill": 234, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
        "bpf": 321, "execveat": 322, "userfaultfd": 323, "io_uring_setup": 425,
        "pidfd_open": 434, "chroot": 161, "setsid": 112, "memfd_create": 319,
        "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424,
        # Memory that no limit counts, and what outlives the child.
        "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "memfd_secret": 447,
        "add_key": 248, "request_key": 249,
        # Landlock lets whoever owns a file change these.
        "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452,
        "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
        "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
        "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "setxattrat": 463,
        "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "removexattrat": 466,
    },
    "aarch64": {
        "socket": 198, "socketpair": 199, "execve": 221, "kill": 129, "ptrace": 117,
        "mount": 40, "umount2": 39, "tkill": 130,
        "tgkill": 131, "keyctl": 219, "unshare": 97, "perf_event_open": 241,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280,
        "execveat": 281, "userfaultfd": 282, "io_uring_setup": 425, "pidfd_open": 434,
        "chroot": 51, "setsid": 157, "memfd_create": 279,
        "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "pidfd_send_signal": 424,
        "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "memfd_secret": 447,
        "add_key": 217, "request_key": 218,
        "fchmod": 52, "fchmodat": 53, "fchmodat2": 452, "fchown": 55, "fchownat": 54,
        "utimensat": 88, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "setxattrat": 463,
        "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "removexattrat": 466,
    },
}  # fmt: skip
# What copies a file in the child's own folder sets its mode and times as well: it may believe so.
_IGNORED = {
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime",
    "utimes", "futimesat", "utimensat",
}  # fmt: skip
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3, _MOUNT_SETATTR = 435, 442
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _filter_calls() -> None:
    """seccomp: EPERM for new processes, sockets, signals, mounts, other processes' memory, shared
    memory, keys, and the modes, owners, times and attributes of files."""
    machine = platform.machine()
    if machine not in _REFUSED:
        return
    load, equal, greater, has_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000  # refuse: EPERM
    ignore = 0x00050000  # success, without doing it
    unknown = 0x00050026  # ENOSYS: glibc then takes clone for clone3
    thread = 0x00010000
    program = [
        (load, 0, 0, 4), (equal, 1, 0, _ARCHITECTURES[machine]), (give, 0, 0, kill),
        (load, 0, 0, 0), (greater, 0, 1, 0x40000000), (give, 0, 0, kill),  # the x32 numbers
        (equal, 0, 1, _CLONE3), (give, 0, 0, unknown),
        (equal, 0, 4, _CLONE[machine]), (load, 0, 0, 16), (has_bits, 1, 0, thread),
        (give, 0, 0, refuse), (give, 0, 0, allow),
    ]  # fmt: skip
    for name, number in _REFUSED[machine].items():
        program += [(equal, 0, 1, number), (give, 0, 0, ignore if name in _IGNORED else refuse)]
    program.append((give, 0, 0, allow))
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    header = ctypes.create_string_buffer(
        struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer))
    )
    _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(2), header, 0, 0)


# --- Tests of each protection -------------------------------------------------------------------


def _fails(*errors: type[BaseException]):
    """Whether the call that is decorated raises one of these."""

    def decorate(attempt):
        def test(limits: Limits) -> bool:
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


def _keeps_modes(limits: Limits) -> bool:
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
            file.truncate(FILE_SIZE + 1)
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
    bytearray(2 * MEMORY)


@_fails(OSError)
def _open_many(limits):
    opened = []
    try:
        for _ in range(OPEN_FILES + 1):
            opened.append(os.open("/dev/null", os.O_RDONLY))
    finally:
        for descriptor in opened:
            os.close(descriptor)


_TESTS = {
    "reading files": _read_outside,
    "writing files": _write_outside,
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
