"""The calls of the system that a student's code may not make: a seccomp filter, on Linux.

Sources: seccomp(2); numbers of calls, flags and commands from the kernel's headers.
"""

import ctypes
import errno
import platform
import struct

from utils.autograder.bpf import (
    Program,
    assemble,
    give,
    jump_if_any_bit,
    jump_if_at_least,
    jump_if_equal,
    keep_bits,
    load,
)

# Numbers of the calls that are refused. Threads stay possible: clone is looked at by its flags.
REFUSED_CALLS = {
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
        "shmat": 30, "shmctl": 31, "semctl": 66, "msgctl": 71, "mq_unlink": 241,
        "add_key": 248, "request_key": 249,
        # The turns and places of others.
        "setpriority": 141, "ioprio_set": 251, "sched_setaffinity": 203, "sched_setattr": 314,
        "sched_setscheduler": 144, "sched_setparam": 142, "migrate_pages": 256, "move_pages": 279,
        # Landlock lets whoever owns a file change these, and before its version 3 cut it off.
        "truncate": 76,
        "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452,
        "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260,
        "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
        "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "setxattrat": 463,
        "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "removexattrat": 466,
        "file_setattr": 469,
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
        "shmat": 196, "shmctl": 195, "semctl": 191, "msgctl": 187, "mq_unlink": 181,
        "add_key": 217, "request_key": 218,
        "setpriority": 140, "ioprio_set": 30, "sched_setaffinity": 122, "sched_setattr": 274,
        "sched_setscheduler": 119, "sched_setparam": 118, "migrate_pages": 238, "move_pages": 239,
        "truncate": 45,
        "fchmod": 52, "fchmodat": 53, "fchmodat2": 452, "fchown": 55, "fchownat": 54,
        "utimensat": 88, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "setxattrat": 463,
        "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "removexattrat": 466,
        "file_setattr": 469,
    },
}  # fmt: skip
# To copy a file in the child's own folder sets its mode and times as well: it may believe so.
PRETENDED_CALLS = {
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime",
    "utimes", "futimesat", "utimensat",
}  # fmt: skip
# Numbers of the calls whose arguments are looked at.
EXAMINED_CALLS = {
    "x86_64": {
        "clone": 56, "clone3": 435, "prctl": 157, "prlimit64": 302, "fcntl": 72, "ioctl": 16,
    },
    "aarch64": {
        "clone": 220, "clone3": 435, "prctl": 167, "prlimit64": 261, "fcntl": 25, "ioctl": 29,
    },
}  # fmt: skip

# struct seccomp_data: the call's number, the architecture, and six arguments of 64 bits, of which
# the low half comes first.
NUMBER, ARCHITECTURE = 0, 4
FIRST_ARGUMENT, SECOND_ARGUMENT = 16, 24

AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
X32_SYSCALL_BIT = 0x40000000  # x86_64 has a second set of numbers
CLONE_THREAD = 0x00010000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 22, 2
OWN_PROCESS = 0  # as the pid of prlimit64
# A signal when a file is ready could be sent to others; for a lease others wait.
F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE = 8, 10, 15, 1024
# The second byte of an ioctl says what it is for: 'f' and 'X' are for file systems, such as
# FS_IOC_SETFLAGS and FS_IOC_FSSETXATTR.
IOCTL_KIND_BITS, FILE_SYSTEM_KINDS = 0xFF00, (ord("f") << 8, ord("X") << 8)

SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_libc = ctypes.CDLL(None)


def filter_calls() -> None:
    """Refuse, from now on in this process, what student code does not need.

    EPERM for new processes, sockets, signals, mounts, other processes' memory, limits and turns,
    shared memory, keys, outliving the parent, leases, and the attributes of files. Changes of
    modes, owners and times do nothing.
    """
    machine = platform.machine()
    if machine not in REFUSED_CALLS:
        return
    code = assemble(build_filter(machine))
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(  # struct sock_fprog
        struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    )
    _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), program, 0, 0)


def build_filter(machine: str) -> Program:
    """Return the program that decides on each call."""
    calls = EXAMINED_CALLS[machine]
    program: Program = [
        load(ARCHITECTURE),
        jump_if_equal(AUDIT_ARCHITECTURES[machine], otherwise="kill"),
        load(NUMBER),
        jump_if_at_least(X32_SYSCALL_BIT, "kill"),
        jump_if_equal(calls["clone3"], "unknown"),  # glibc then takes clone
        # A thread may be started, a process may not.
        jump_if_equal(calls["clone"], otherwise="no clone"),
        load(FIRST_ARGUMENT),
        jump_if_any_bit(CLONE_THREAD, "allow"),
        give(SECCOMP_RET_ERRNO | errno.EPERM),
        "no clone",
        jump_if_equal(calls["prctl"], otherwise="no prctl"),
        load(FIRST_ARGUMENT),
        jump_if_equal(PR_SET_PDEATHSIG, "refuse"),
        give(SECCOMP_RET_ALLOW),
        "no prctl",
        jump_if_equal(calls["prlimit64"], otherwise="no prlimit64"),
        load(FIRST_ARGUMENT),
        jump_if_equal(OWN_PROCESS, "allow"),
        give(SECCOMP_RET_ERRNO | errno.EPERM),
        "no prlimit64",
        jump_if_equal(calls["fcntl"], otherwise="no fcntl"),
        load(SECOND_ARGUMENT),
        *(jump_if_equal(c, "refuse") for c in (F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE)),
        give(SECCOMP_RET_ALLOW),
        "no fcntl",
        jump_if_equal(calls["ioctl"], otherwise="no ioctl"),
        load(SECOND_ARGUMENT),
        keep_bits(IOCTL_KIND_BITS),
        *(jump_if_equal(kind, "refuse") for kind in FILE_SYSTEM_KINDS),
        give(SECCOMP_RET_ALLOW),
        "no ioctl",
    ]
    for name, number in REFUSED_CALLS[machine].items():
        program.append(jump_if_equal(number, "pretend" if name in PRETENDED_CALLS else "refuse"))
    return [
        *program,
        "allow",
        give(SECCOMP_RET_ALLOW),
        "refuse",
        give(SECCOMP_RET_ERRNO | errno.EPERM),
        "pretend",
        give(SECCOMP_RET_ERRNO),  # errno 0: success, without doing it
        "unknown",
        give(SECCOMP_RET_ERRNO | errno.ENOSYS),
        "kill",
        give(SECCOMP_RET_KILL_PROCESS),
    ]
