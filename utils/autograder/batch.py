"""A class's submissions, graded by pairs of processes: a job server and the worker it serves.

This process imports no torch and forks nothing: the pairs come from the forkserver. If a pair dies,
another takes its place, and the submission is tried once more.
"""

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from utils.autograder import protections
from utils.grading.points import Report, load_points
from utils.version import get_version

ROOT = Path(__file__).parents[2]
TRIES, LOST = 2, "grading it ended the grader's process"
# Of the environment: a child sees no more than this.
KEPT = (
    "PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PYTHONPATH",
    "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "MPLCONFIGDIR",
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY",
)  # fmt: skip


# More threads, and CUDA, hang a forked child. What is compiled needs a compiler's processes.
SET = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONHASHSEED": "0",  # a student's set is walked in one order, wherever it is graded
}


@dataclass(frozen=True)
class Options:
    """What is the same for all submissions."""

    secret: str  # what the seeds derive from
    points: Path  # the TOML file
    seconds: int  # of one check
    submission_seconds: int = 900  # of all checks of a submission
    chapters: tuple[str, ...] = ()  # that are graded; if there are none, those that are found
    only: dict[str, tuple[str, ...]] = field(default_factory=dict)  # exercises, by submission


@dataclass
class Pair:
    """A worker, with its job server behind it, and the submission that it has."""

    connection: Connection
    pids: tuple[int, int]
    name: str | None = None


def grade_all(todo: dict[str, Path], jobs: int, options: Options) -> Iterator[tuple[str, Report]]:
    """Yield each submission's name and report. Raises ValueError for a wrong file of points."""
    waiting = list(todo)
    tries: Counter[str] = Counter()
    pairs = [_start(options) for _ in range(max(1, min(jobs, len(todo))))]
    try:
        while True:
            for pair in pairs:
                if pair.name is None and waiting:
                    name = pair.name = waiting.pop(0)
                    lost = LOST if tries[name] >= TRIES else None  # then it is not read again
                    with contextlib.suppress(BrokenPipeError):
                        pair.connection.send((name, todo[name].absolute(), lost))
            busy: dict[Any, Pair] = {pair.connection: pair for pair in pairs if pair.name}
            if not busy:
                return
            for connection in wait(list(busy)):
                pair = busy[connection]
                name, pair.name = str(pair.name), None
                try:
                    report = pair.connection.recv()
                except (EOFError, OSError):
                    _stop(pair)
                    pairs[pairs.index(pair)] = _start(options)
                    tries[name] += 1
                    if tries[name] <= TRIES:
                        waiting.insert(0, name)
                        continue
                    report = make_empty_report(name, LOST)
                yield name, report
    finally:
        for pair in pairs:
            _stop(pair)


def make_empty_report(name: str, problem: str) -> Report:
    """Return the report of a submission that could not be graded."""
    return {
        "submission": name, "version": get_version(), "digest": None, "readable": False,
        "chapters": [], "score": 0, "max_score": 0, "seconds": 0, "protections": [],
        "problems": [problem], "left_out": [], "not_graded": [], "exercises": [],
    }  # fmt: skip


def find_missing_protections(options: Options) -> list[str]:
    """Return those of `protections.PROTECTIONS` that a child does not have here."""
    pair = _start(options)
    try:
        pair.connection.send(None)
        active = pair.connection.recv()
    finally:
        _stop(pair)
    return [name for name in protections.PROTECTIONS if name not in active]


@functools.cache
def _start_forkserver() -> Connection:
    """Start `utils.autograder.forkserver`, which ends when this process does."""
    ours, theirs = Pipe()
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    forkserver = subprocess.Popen(
        [sys.executable, "-m", "utils.autograder.forkserver", str(theirs.fileno())],
        cwd=ROOT,
        env=SET | kept,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    atexit.register(forkserver.wait)
    atexit.register(ours.close)  # the last that is registered comes first
    return ours


def _start(options: Options) -> Pair:
    points = load_points(options.points)
    forkserver = _start_forkserver()
    ours, theirs = Pipe()
    reduction.send_handle(forkserver, theirs.fileno(), None)
    try:
        pids = forkserver.recv()
    except (EOFError, OSError) as error:
        raise ValueError("the process that forks all others ended: its error is above") from error
    theirs.close()
    ours.send((options, points))
    return Pair(ours, pids)


def _stop(pair: Pair) -> None:
    pair.connection.close()
    for pid in pair.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
