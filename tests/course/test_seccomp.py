"""The filter of calls, run by a small interpreter of BPF."""

import struct
import sys

import pytest

from tests.course.helpers import run_python
from utils.autograder import seccomp
from utils.autograder.seccomp import ALLOW, PRETEND, REFUSE, UNKNOWN

KILL = seccomp.SECCOMP_RET_KILL_PROCESS
WRITE = {"x86_64": 1, "aarch64": 64}


def run(code: bytes, number: int, architecture: int, first: int = 0, second: int = 0) -> int:
    """What the kernel makes of a program and a call, by its documentation of classic BPF."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, first, second, 0, 0, 0, 0)
    place = word = 0
    while True:
        operation, then, otherwise, value = struct.unpack_from("<HBBI", code, 8 * place)
        place += 1
        if operation == 0x20:
            (word,) = struct.unpack_from("<I", data, value)
        elif operation == 0x54:
            word &= value
        elif operation == 0x06:
            return value
        else:
            place += then if {0x15: word == value, 0x35: word >= value}[operation] else otherwise


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_what_a_call_may_do(machine):
    code, place = seccomp.build_filter(machine), seccomp.MACHINES.index(machine)
    architecture = seccomp.AUDIT_ARCHITECTURES[machine]
    for calls, verdict in (
        (seccomp.REFUSED_CALLS, REFUSE),
        (seccomp.PRETENDED_CALLS, PRETEND),
        (seccomp.UNKNOWN_CALLS, UNKNOWN),
    ):
        for name, numbers in calls.items():
            if numbers[place] is not None:
                assert run(code, numbers[place], architecture) == verdict, name
    write = WRITE[machine]
    assert run(code, write, architecture) == ALLOW
    assert run(code, write, 0x40000003) == KILL  # 32-bit x86
    assert run(code, 0x40000000, architecture) == KILL  # the x32 numbers
    for name, *arguments, verdict in (
        ("clone", 0x003D0F00, ALLOW),  # as pthread_create starts a thread
        ("clone", 0x01200011, REFUSE),  # as fork does
        ("prctl", 1, REFUSE),  # outliving the parent
        ("prctl", 15, ALLOW),  # the name of a thread
        ("prlimit64", 0, ALLOW),
        ("prlimit64", 1234, REFUSE),
        *(("fcntl", 3, command, REFUSE) for command in (8, 10, 15, 1024)),
        ("fcntl", 3, 2, ALLOW),  # close on exec
        ("ioctl", 3, 0x40086602, REFUSE),  # FS_IOC_SETFLAGS
        ("ioctl", 3, 0x401C5820, REFUSE),  # FS_IOC_FSSETXATTR
        ("ioctl", 3, 0x5401, ALLOW),  # of a terminal
    ):
        number = seccomp.EXAMINED_CALLS[name][0][place]
        assert run(code, number, architecture, *arguments) == verdict, (name, arguments)


# --- In the kernel ------------------------------------------------------------------------------

REFUSED = """
import ctypes, fcntl, os, sys

from utils.autograder import sandbox, seccomp

libc = ctypes.CDLL(None, use_errno=True)
file = os.open(sys.argv[1], os.O_RDONLY)
sandbox._prctl(sandbox.PR_SET_NO_NEW_PRIVS, 1)
seccomp.filter_calls()
said = []
for call in (
    lambda: fcntl.ioctl(file, 0x80086601, bytes(8)),  # FS_IOC_GETFLAGS; to set them needs it
    lambda: fcntl.ioctl(file, 0x40086602, bytes(8)),  # FS_IOC_SETFLAGS
    lambda: fcntl.ioctl(file, 0x401C5820, bytes(28)),  # FS_IOC_FSSETXATTR
    lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK),
):
    try:
        call()
    except OSError as error:
        said.append(error.errno)
libc.shmctl(-1, 0, None)  # IPC_RMID: there is no such segment, which is another error
said.append(ctypes.get_errno())
fcntl.fcntl(file, fcntl.F_GETFL)
fcntl.ioctl(file, 0x541B, bytes(4))  # FIONREAD
print(said)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_a_filter_refuses_what_reaches_files_and_segments_of_others(tmp_path):
    """Alone: where the system gives no namespaces, nothing else does."""
    path = tmp_path / "file"
    path.write_text("x")
    result = run_python("-c", REFUSED, path)
    assert result.stdout.strip() == str([1] * 5), result.stderr
