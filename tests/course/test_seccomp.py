"""The filter of calls, run by a small interpreter of BPF, and the assembler that writes it."""

import errno
import struct

import pytest

from utils.autograder import seccomp
from utils.autograder.bpf import assemble
from utils.autograder.seccomp import EXAMINED_CALLS, PRETENDED_CALLS, REFUSED_CALLS, build_filter

MACHINES = sorted(REFUSED_CALLS)
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, PRETEND, UNKNOWN = (0x00050000 | number for number in (errno.EPERM, 0, errno.ENOSYS))
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
            holds = {0x15: word == value, 0x35: word >= value, 0x45: bool(word & value)}[operation]
            place += then if holds else otherwise


@pytest.fixture(params=MACHINES)
def call(request):
    code = assemble(build_filter(request.param))
    architecture = seccomp.AUDIT_ARCHITECTURES[request.param]

    def make(number: int, *arguments: int, machine: int = architecture) -> int:
        return run(code, number, machine, *arguments)

    make.machine = request.param
    return make


def test_what_is_refused_and_what_is_not(call):
    for name, number in REFUSED_CALLS[call.machine].items():
        assert call(number) == (PRETEND if name in PRETENDED_CALLS else REFUSE), name
    assert call(WRITE[call.machine]) == ALLOW


def test_calls_are_told_apart_by_their_arguments(call):
    calls = EXAMINED_CALLS[call.machine]
    assert call(calls["clone"], 0x003D0F00) == ALLOW  # as pthread_create starts a thread
    assert call(calls["clone"], 0x01200011) == REFUSE  # as fork does
    assert call(calls["clone3"]) == UNKNOWN
    assert call(calls["prctl"], 1) == REFUSE  # outliving the parent
    assert call(calls["prctl"], 15) == ALLOW  # the name of a thread
    assert call(calls["prlimit64"], 0) == ALLOW
    assert call(calls["prlimit64"], 1234) == REFUSE
    assert [call(calls["fcntl"], 3, c) for c in (8, 10, 15, 1024)] == [REFUSE] * 4
    assert call(calls["fcntl"], 3, 2) == ALLOW  # close on exec
    assert call(calls["ioctl"], 3, 0x40086602) == REFUSE  # FS_IOC_SETFLAGS
    assert call(calls["ioctl"], 3, 0x401C5820) == REFUSE  # FS_IOC_FSSETXATTR
    assert call(calls["ioctl"], 3, 0x5401) == ALLOW  # of a terminal


def test_calls_of_other_architectures_end_the_process(call):
    assert call(WRITE[call.machine], machine=0x40000003) == KILL  # 32-bit x86
    assert call(0x40000000) == KILL  # the x32 numbers
