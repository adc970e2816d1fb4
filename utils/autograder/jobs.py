"""Jobs, each done in a process of its own, which the job server forks: it has imported torch.

The job server holds no solution, no check and no student code, nor leftovers of them: what it had
read would be in the memory of every child to come. So the child itself reads its job from the
trusted process, which reads the child's reply, up to a length and a time, through a pipe of its
own. The job server only forks the child in namespaces of its own, and ends it with all that it
started. The reply is bytes (`packing`): nothing of it is executed or unpickled.
"""

import contextlib
import enum
import json
import os
import select
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from utils.autograder import child, protections, sandbox
from utils.grading.packing import MAX_REPLY_BYTES

REPLY_DESCRIPTOR = 3  # the first after standard input, output and errors
MAX_THREADS, WATCH_SECONDS = 64, 0.2  # of a child, and how often they are counted


class Outcome(enum.Enum):
    """How a job ended, and what is said of one that gave no reply."""

    DONE = ""
    TOO_LONG = "was stopped after {seconds} s"
    TOO_MUCH = "gave more data than any answer has"
    ENDED = "ended its process before it gave a result, as exit() does, or too much memory"


@dataclass(frozen=True)
class Reply:
    """What came back from a child, and how that ended."""

    outcome: Outcome
    data: bytes = b""
    protections: tuple[str, ...] = ()  # that were confirmed before student code was loaded
    error: str = ""  # of the grader, which came before that, too


@dataclass
class Job:
    """What a child is to do: `child.get_ready(action, arguments)`, in `seconds` at most."""

    action: str
    seconds: int
    arguments: Any  # by name; of "run_probe", a `child.ProbeRun`


def start(connection: Connection, limits: sandbox.Limits) -> None:
    """Serve jobs, as root of its own namespaces where processes may be separated."""
    if sandbox.become_root() and (pid := os.fork()) != 0:
        os.waitpid(pid, 0)
        return
    sandbox.end_with_parent()
    serve(connection, limits)


def serve(connection: Connection, limits: sandbox.Limits) -> None:
    """Take jobs until the other side closes. limits: what is the same for all jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trusted process says when it is over
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while connection.recv():
            _run(connection, limits)


def ask(connection: Connection, job: Job) -> Reply:
    """Ask for a job, on the trusted side of `serve`. Raises EOFError or OSError if that ended."""
    connection.send("a job")
    reader = reduction.recv_handle(connection)
    start = time.monotonic()
    try:
        connection.send(job)
        data, outcome = _read(reader, start + job.seconds)
    finally:
        os.close(reader)
    connection.send("end")
    connection.recv()
    head, is_loaded, reply = data.partition(b"\n")
    active, error = json.loads(head) if is_loaded else ([], "it ended before the work was loaded")
    if outcome is Outcome.DONE and not reply:
        # The limit of processor time may end it shortly before the clock does.
        is_late = time.monotonic() - start > 0.9 * job.seconds
        outcome = Outcome.TOO_LONG if is_late else Outcome.ENDED
    return Reply(
        outcome,
        reply if outcome is Outcome.DONE else b"",
        (*active, "wall clock") if active else (),
        error,
    )


def _run(connection: Connection, limits: sandbox.Limits) -> None:
    """Hand over where the reply comes from, fork the child, end it with all that it started."""
    folder = tempfile.mkdtemp(prefix="grading-")
    reader, writer = os.pipe()
    waits, holds = os.pipe()
    try:
        reduction.send_handle(connection, reader, None)
        os.close(reader)
        with sandbox.separate_processes():
            pid = os.fork()
            if pid == 0:
                _be_child(connection, replace(limits, folder=folder), writer, holds)
        os.close(writer)
        os.close(holds)
        try:
            if not os.read(waits, 1):  # what is left of the job is no message
                raise EOFError("the child ended before it had its job")
            while not connection.poll(WATCH_SECONDS):
                if _count_threads() > MAX_THREADS:
                    os.kill(pid, signal.SIGKILL)  # it is waited for below
                    break
            connection.recv()  # "end"
        finally:
            for end in (os.kill, os.killpg):  # the group, where no namespace ends with it
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    end(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    finally:
        os.close(waits)
        shutil.rmtree(folder, ignore_errors=True)
    connection.send("ended")


def _count_threads() -> int:
    """Return the most threads that a process forked here has; 0 where the system does not say."""
    most = 0
    with contextlib.suppress(OSError, ValueError):
        for pid in Path("/proc/thread-self/children").read_text().split():
            status = Path(f"/proc/{pid}/status").read_text()
            most = max(most, int(status.partition("\nThreads:")[2].split("\n")[0]))
    return most


def _be_child(connection: Connection, limits: sandbox.Limits, writer: int, holds: int) -> None:
    """Be the child: close all but the way back, shut the doors, do the job. Does not return.

    It says over `holds` that it has read its job.
    """
    try:
        sandbox.end_with_parent()
        job = connection.recv()
        os.write(holds, b"1")
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(REPLY_DESCRIPTOR):
            os.dup2(null, descriptor)
        way = open(os.dup2(writer, REPLY_DESCRIPTOR), "wb")  # noqa: SIM115
        os.closerange(REPLY_DESCRIPTOR + 1, sandbox.MAX_DESCRIPTOR)
        os.environ["TMPDIR"] = tempfile.tempdir = limits.folder
        with contextlib.suppress(OSError):  # short of memory, the system should end this one first
            Path("/proc/self/oom_score_adj").write_text("1000")
        limits = replace(limits, seconds=job.seconds)
        sandbox.enter(limits)
        active = protections.confirm(limits)
        task, error = child.get_ready(job.action, job.arguments)
        way.write(json.dumps([active, error]).encode() + b"\n")
        way.flush()  # before student code is loaded, which may not write what it likes here
        if not error:
            way.write(task())
            way.flush()
    finally:
        os._exit(0)  # an error here, or an exit of the student's: there is no reply


def _read(descriptor: int, deadline: float) -> tuple[bytes, Outcome]:
    """Read all that comes until the other side closes, and say how that ended."""
    data = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return bytes(data), Outcome.TOO_LONG
        if not poll.poll(left * 1000):
            continue
        chunk = os.read(descriptor, 2**20)
        if not chunk:
            return bytes(data), Outcome.DONE
        data += chunk
        if len(data) > MAX_REPLY_BYTES:
            return bytes(data), Outcome.TOO_MUCH
