"""The calls of the system that a student's code may not make: a seccomp filter, on Linux.

Sources: seccomp(2); numbers from the kernel's headers.
"""

import ctypes
import platform
import struct

_libc = ctypes.CDLL(None)
_PR_SET_SECCOMP = 22

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
        "shmat": 30, "shmctl": 31, "semctl": 66, "msgctl": 71, "mq_unlink": 241,
        "add_key": 248, "request_key": 249,
        # The turns and places of others.
        "setpriority": 141, "ioprio_set": 251, "sched_setaffinity": 203, "sched_setattr": 314,
        "sched_setscheduler": 144, "sched_setparam": 142, "migrate_pages": 256, "move_pages": 279,
        # Landlock lets whoever owns a file change these.
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
        "fchmod": 52, "fchmodat": 53, "fchmodat2": 452, "fchown": 55, "fchownat": 54,
        "utimensat": 88, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "setxattrat": 463,
        "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "removexattrat": 466,
        "file_setattr": 469,
    },
}  # fmt: skip
# What copies a file in the child's own folder sets its mode and times as well: it may believe so.
_IGNORED = {
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime",
    "utimes", "futimesat", "utimensat",
}  # fmt: skip
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_PRCTL, _PR_SET_PDEATHSIG = {"x86_64": 157, "aarch64": 167}, 1
_FCNTL = {"x86_64": 72, "aarch64": 25}
# F_SETOWN, F_SETSIG, F_SETOWN_EX; F_SETLEASE, for which others wait when they open the file.
_COMMANDS = (8, 10, 15, 1024)
_IOCTL = {"x86_64": 16, "aarch64": 29}
_KINDS = (0x6600, 0x5800)  # of FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR and others of file systems
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def filter_calls() -> None:
    """EPERM for new processes, sockets, signals, mounts, other processes' memory, limits and
    turns, shared memory, keys, outliving the parent, leases, and the modes, owners, times and
    attributes of files."""
    machine = platform.machine()
    if machine not in _REFUSED:
        return
    load, equal, greater, has_bits, keep, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
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
        (equal, 0, 4, _PRCTL[machine]), (load, 0, 0, 16), (equal, 0, 1, _PR_SET_PDEATHSIG),
        (give, 0, 0, refuse), (give, 0, 0, allow),
        (equal, 0, 4, _PRLIMIT[machine]), (load, 0, 0, 16), (equal, 1, 0, 0),  # its own
        (give, 0, 0, refuse), (give, 0, 0, allow),
        (equal, 0, 7, _FCNTL[machine]), (load, 0, 0, 24),
        *((equal, 4 - place, 0, command) for place, command in enumerate(_COMMANDS)),
        (give, 0, 0, allow), (give, 0, 0, refuse),
        (equal, 0, 6, _IOCTL[machine]), (load, 0, 0, 24), (keep, 0, 0, 0xFF00),
        *((equal, 2 - place, 0, kind) for place, kind in enumerate(_KINDS)),
        (give, 0, 0, allow), (give, 0, 0, refuse),
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
