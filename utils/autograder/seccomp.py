"""System calls that a student's code may not make, as a seccomp filter on Linux.

Sources: seccomp(2); linux/filter.h; numbers of calls, flags and commands from the kernel's headers.
"""

import ctypes
import errno
import platform
import struct

# Numbers of the calls that are refused, on each machine; None is a call that it lacks. Threads stay
# possible: clone is looked at by its flags.
MACHINES = ("x86_64", "aarch64")
REFUSED_CALLS = {
    "socket": (41, 198), "socketpair": (53, 199), "fork": (57, None), "vfork": (58, None),
    "execve": (59, 221), "kill": (62, 129), "ptrace": (101, 117), "mount": (165, 40),
    "umount2": (166, 39), "tkill": (200, 130), "tgkill": (234, 131), "keyctl": (250, 219),
    "unshare": (272, 97), "perf_event_open": (298, 241), "setns": (308, 268),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "bpf": (321, 280),
    "execveat": (322, 281), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "pidfd_open": (434, 434), "chroot": (161, 51), "setsid": (112, 157), "memfd_create": (319, 279),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    # Memory that no limit counts, and what outlives the child.
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_secret": (447, 447), "shmat": (30, 196), "shmctl": (31, 195), "semctl": (66, 191),
    "msgctl": (71, 187), "mq_unlink": (241, 181), "add_key": (248, 217), "request_key": (249, 218),
    # The turns and places of others.
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # Landlock lets whoever owns a file change these, and before its version 3 cut it off.
    "truncate": (76, 45), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
# To copy a file in the child's own folder sets its mode and times as well: it may believe so.
PRETENDED_CALLS = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
UNKNOWN_CALLS = {"clone3": (435, 435)}  # glibc then takes clone

SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
ALLOW, REFUSE = SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | errno.EPERM
PRETEND = SECCOMP_RET_ERRNO  # errno 0: success, without doing it
UNKNOWN = SECCOMP_RET_ERRNO | errno.ENOSYS

# Calls that are looked at: numbers, which argument, which of its low 32 bits, what comes of them if
# they are one of some values, and if not.
ALL_BITS, CLONE_THREAD = 0xFFFFFFFF, 0x00010000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 1, 22, 2
F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE = 8, 10, 15, 1024
EXAMINED_CALLS = {
    # A thread may be started, a process may not.
    "clone": ((56, 220), 0, CLONE_THREAD, (CLONE_THREAD,), ALLOW, REFUSE),
    "prctl": ((157, 167), 0, ALL_BITS, (PR_SET_PDEATHSIG,), REFUSE, ALLOW),
    "prlimit64": ((302, 261), 0, ALL_BITS, (0,), ALLOW, REFUSE),  # pid 0: its own
    # A signal when a file is ready could be sent to others; for a lease others wait.
    "fcntl": ((72, 25), 1, ALL_BITS, (F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE), REFUSE, ALLOW),
    # The second byte of an ioctl says what it is for: 'f' and 'X' are for file systems, such as
    # FS_IOC_SETFLAGS and FS_IOC_FSSETXATTR.
    "ioctl": ((16, 29), 1, 0xFF00, (ord("f") << 8, ord("X") << 8), REFUSE, ALLOW),
}

# struct seccomp_data: the call's number, the architecture, and six arguments of 64 bits, of which
# the low half comes first.
NUMBER, ARCHITECTURE, ARGUMENTS, ARGUMENT_BYTES = 0, 4, 16, 8
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
X32_SYSCALL_BIT = 0x40000000  # x86_64 has a second set of numbers
# Instructions of classic BPF: load a word, keep the bits of a mask, jump if equal or at least, end.
LOAD, AND, JUMP_IF_EQUAL, JUMP_IF_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06

_libc = ctypes.CDLL(None)


def filter_calls() -> None:
    """Refuse, from now on in this process, what student code does not need: the calls above."""
    if platform.machine() not in MACHINES:
        return
    code = build_filter(platform.machine())
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(  # struct sock_fprog
        struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    )
    _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), program, 0, 0)


def build_filter(machine: str) -> bytes:
    """Return the program that decides on each call, as the kernel reads it."""
    place = MACHINES.index(machine)
    program = [
        _encode(LOAD, ARCHITECTURE),
        _encode(JUMP_IF_EQUAL, AUDIT_ARCHITECTURES[machine], then=1),
        _encode(RETURN, SECCOMP_RET_KILL_PROCESS),
        _encode(LOAD, NUMBER),
        _encode(JUMP_IF_AT_LEAST, X32_SYSCALL_BIT, otherwise=1),
        _encode(RETURN, SECCOMP_RET_KILL_PROCESS),
    ]
    for calls, verdict in (
        (REFUSED_CALLS, REFUSE), (PRETENDED_CALLS, PRETEND), (UNKNOWN_CALLS, UNKNOWN)
    ):  # fmt: skip
        for number in (numbers[place] for numbers in calls.values()):
            if number is not None:
                program += [_encode(JUMP_IF_EQUAL, number, otherwise=1), _encode(RETURN, verdict)]
    for numbers, argument, bits, values, verdict, other in EXAMINED_CALLS.values():
        look = [_encode(LOAD, ARGUMENTS + ARGUMENT_BYTES * argument), _encode(AND, bits)]
        for n, value in enumerate(values):  # over the other values, and what comes if it is none
            look.append(_encode(JUMP_IF_EQUAL, value, then=len(values) - n))
        look += [_encode(RETURN, other), _encode(RETURN, verdict)]
        program += [_encode(JUMP_IF_EQUAL, numbers[place], otherwise=len(look)), *look]
    return b"".join([*program, _encode(RETURN, ALLOW)])


def _encode(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Return an instruction, struct sock_filter: a jump leaves out so many of those below it."""
    return struct.pack("<HBBI", code, then, otherwise, value)
