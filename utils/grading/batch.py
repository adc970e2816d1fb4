"""A class's submissions, graded by several pairs of processes: a zygote and the worker it serves.

This process imports torch and forks; it holds neither solutions nor student code. If a pair dies,
another takes its place, and the submission is tried once more.
"""

import atexit
import contextlib
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from utils.grading import child, sandbox, zygote
from utils.grading.intake import read_submission

ROOT = Path(__file__).parents[2]
TRIES = 2
# What chapters and probes import, some of it only when it is used: a child cannot.
PRELOADED = (
    "transformer_lens", "torch", "torch._dynamo", "torch.distributions", "torch.func",
    "torch.multiprocessing.reductions", "numpy", "einops", "jaxtyping", "tabulate", "tqdm.auto",
    "matplotlib.pyplot", "safetensors.torch", "transformers", "wandb", "IPython.display",
    "utils.course", "utils.evaluation", "utils.plotting", "utils.rewards", "utils.tracking",
    "utils.validation", "utils.models.corpus", "utils.models.loading",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """secret: what the seeds derive from. points: the TOML file. seconds: of one check."""

    secret: str
    points: Path
    seconds: int
    only: dict[str, str] = field(default_factory=dict)  # of a submission one exercise alone


@dataclass
class Pair:
    """A worker, with its zygote behind it, and the submission that it has."""

    connection: Connection
    pids: tuple[int, int]
    name: str | None = None


def grade_all(
    todo: dict[str, Path], jobs: int, options: Options
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and report of each submission, as they are done."""
    prepare()
    waiting = deque(todo)
    tries: dict[str, int] = {}
    pairs = [_start(options) for _ in range(max(1, min(jobs, len(todo))))]
    try:
        while True:
            for pair in pairs:
                if pair.name is None and waiting:
                    pair.name = waiting.popleft()
                    with contextlib.suppress(BrokenPipeError):
                        pair.connection.send((pair.name, todo[pair.name]))
            busy = {pair.connection: pair for pair in pairs if pair.name is not None}
            if not busy:
                return
            for connection in wait(list(busy)):
                pair = busy[connection]
                name, pair.name = pair.name, None
                try:
                    yield name, connection.recv()
                except (EOFError, OSError):
                    _stop(pair)
                    pairs[pairs.index(pair)] = _start(options)
                    tries[name] = tries.get(name, 0) + 1
                    if tries[name] < TRIES:
                        waiting.appendleft(name)
                    else:
                        yield name, make_empty_report(name, "grading it ended the grader's process")
    finally:
        for pair in pairs:
            _stop(pair)


@functools.cache
def prepare() -> None:
    """Import and run once what every child will, and make the models of the checks."""
    child.prepare()
    child.import_all(PRELOADED)
    folder = tempfile.mkdtemp(prefix="grading-models-")
    maker = os.fork()
    if maker == 0:  # this process never imports `tests`
        _become(lambda: _save_checkpoints(Path(folder)))
    os.waitpid(maker, 0)
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    os.environ["COURSE_CHECKPOINTS"] = folder
    child.warm_up(f"{folder}/shallow")
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page


def _save_checkpoints(folder: Path) -> None:
    from tests import models

    for kind in models.N_LAYERS:
        models.save_checkpoint(kind, folder / kind)


def make_empty_report(name: str, problem: str) -> dict[str, Any]:
    """Of a submission that could not be graded."""
    return {
        "submission": name, "digest": None, "chapters": [], "score": 0, "max_score": 0,
        "protections": [], "problems": [problem], "exercises": [],
    }  # fmt: skip


def _start(options: Options) -> Pair:
    """Fork a zygote, then the worker that it serves."""
    ours, theirs = Pipe()
    to_zygote, of_zygote = Pipe()
    first = os.fork()
    if first == 0:
        _become(lambda own: zygote.serve(own, _get_place()), of_zygote)
    of_zygote.close()
    second = os.fork()
    if second == 0:
        _become(lambda a, b: _work(a, b, options), theirs, to_zygote)
    to_zygote.close()
    theirs.close()
    return Pair(ours, (first, second))


def _become(task: Any, *connections: Connection) -> None:
    """Run `task` with these connections and nothing else open, then end."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        copies = [os.dup(connection.fileno()) for connection in connections]
        for place, descriptor in enumerate(copies, 100):
            os.dup2(descriptor, place)
        os.closerange(3, 100)
        os.closerange(100 + len(copies), 1024)
        task(*(Connection(place) for place in range(100, 100 + len(copies))))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _get_place() -> zygote.Place:
    """A child may read the installed packages and the embedded model."""
    import sysconfig

    folders = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    folders |= {
        "/usr/lib",
        "/lib",
        "/lib64",
        "/usr/share/zoneinfo",
        "/etc/ld.so.cache",
        "/proc/cpuinfo",
        "/sys/devices/system/cpu",
    }
    folders |= {str(ROOT / "utils" / "models" / "embedded"), os.environ["COURSE_CHECKPOINTS"]}
    inside = {f for f in folders if not ROOT.is_relative_to(f)}
    return zygote.Place(tuple(sorted(inside)), str(Path(__file__)))


def _work(connection: Connection, to_zygote: Connection, options: Options) -> None:
    """The trusted worker: grade what comes until the other side closes."""
    from utils.grading.marking import Marker
    from utils.grading.points import load_points

    points = load_points(options.points)
    marker = Marker(to_zygote, options.secret, points, options.seconds)
    with contextlib.suppress(EOFError):
        while True:
            name, path = connection.recv()
            intake = read_submission(name, path)
            report = marker.mark(intake, options.only.get(name))
            connection.send(report | {"digest": intake.digest})


def _stop(pair: Pair) -> None:
    pair.connection.close()
    for pid in pair.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def find_missing_protections() -> list[str]:
    """Those of `sandbox.PROTECTIONS` that a child does not have here."""
    prepare()
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        _become(lambda own: zygote.serve(own, _get_place()), theirs)
    theirs.close()
    reply = zygote.ask(ours, zygote.Job("inspect", 30, {"files": [], "names": {"": set()}}))
    ours.close()
    os.waitpid(pid, 0)
    return [name for name in sandbox.PROTECTIONS if name not in reply.protections]
