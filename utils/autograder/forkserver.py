"""The process that forks all others: started afresh, it knows of no secret and no submission.

What a process holds when it forks is in reach of the child: of `python -m utils.grade`, the secret,
the reports of before, the command line with the names of all and the environment. So this one is a
program of its own, with little of the environment, and forks on demand a job server and the
trusted worker it serves, which gets the rest over a connection.

    python -m utils.autograder.forkserver DESCRIPTOR
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
import sysconfig
import tempfile
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from utils.autograder import child, jobs, sandbox
from utils.autograder.grader import Grader
from utils.autograder.reading import SubmittedFiles, read_submission
from utils.models.loading import IN_THIS_REPO, boot_ahead

ROOT = Path(__file__).parents[2]
FIRST_DESCRIPTOR = 3  # after standard input, output and errors
KEPT_DESCRIPTOR = 100  # where a process that is forked keeps its connections
# What chapters and probes import, some of it only when it is used: a child cannot.
PRELOADED = (
    "encodings.utf_8_sig", "transformer_lens", "torch", "torch._dynamo", "torch.distributions",
    "torch.distributed.device_mesh", "torch.distributed.fsdp", "torch.utils.checkpoint",
    "torch.testing._internal.distributed.multi_threaded_pg",
    "torch.func", "torch.multiprocessing.reductions", "torch.utils.serialization.config", "numpy",
    "numpy.ctypeslib", "einops", "einops._torch_specific", "jaxtyping", "tabulate", "tqdm.auto",
    "matplotlib.pyplot", "matplotlib.backends.backend_agg", "nbformat", "safetensors.torch",
    "transformers",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2", "wandb",
    "IPython.display", "utils.course", "utils.course.own_preferences", "utils.course.evaluation",
    "utils.plotting", "utils.preferences", "utils.prompts", "utils.rewards",
    "utils.tracking", "utils.validation",
    "utils.models.corpus", "utils.models.decoding", "utils.models.forward", "utils.models.loading",
    "utils.models.questions", "utils.models.turns",
)  # fmt: skip
# What libraries read of the system.
SYSTEM = (
    "/usr/lib", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/proc/cpuinfo",
    "/sys/devices/system/cpu",
)  # fmt: skip


def main(descriptor: int) -> None:
    """Fork a pair of processes for each connection that comes, and say their ids."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side says when it is over
    connection = Connection(descriptor)
    with tempfile.TemporaryDirectory(prefix="grading-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # removed with all that is in it
        prepare(Path(folder))
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                theirs = Connection(reduction.recv_handle(connection))
                connection.send(_start(theirs))
                theirs.close()
                _reap()


def prepare(folder: Path) -> None:
    """Import and run once what every child will, and make the models of the checks."""
    child.prepare()
    for name in PRELOADED:
        importlib.import_module(name)
    maker = os.fork()
    if maker == 0:  # this process never imports `tests`
        _become(lambda: _save_checkpoints(folder))
    os.waitpid(maker, 0)
    os.environ["COURSE_CHECKPOINTS"] = str(folder)
    child.warm_up(f"{folder}/shallow")
    boot_ahead("embedded")
    for path in folder.glob("*/config.json"):
        boot_ahead(path.parent)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    sandbox.use_huge_pages()


def _save_checkpoints(folder: Path) -> None:
    models = importlib.import_module("tests.support.models")
    for kind in models.N_LAYERS:
        models.save_checkpoint(kind, folder / kind)


def _start(theirs: Connection) -> tuple[int, int]:
    """Fork a job server, then the worker that it serves."""
    to_server, of_server = Pipe()
    limits = _get_limits()
    first = os.fork()
    if first == 0:
        _become(lambda own: jobs.start(own, limits), of_server)
    of_server.close()
    second = os.fork()
    if second == 0:
        _become(_work, theirs, to_server)
    to_server.close()
    return first, second


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(task: Any, *connections: Connection) -> None:
    """Run `task` with these connections and nothing else open, then end."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        copies = [os.dup(connection.fileno()) for connection in connections]
        first, end = KEPT_DESCRIPTOR, KEPT_DESCRIPTOR + len(copies)
        for place, descriptor in enumerate(copies, first):
            os.dup2(descriptor, place)
        os.closerange(FIRST_DESCRIPTOR, first)
        os.closerange(end, sandbox.MAX_DESCRIPTOR)
        task(*(Connection(place) for place in range(first, end)))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _get_limits() -> sandbox.Limits:
    """Return what a child may read: the installed packages and the embedded model."""
    folders = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    folders |= {*SYSTEM, *map(str, IN_THIS_REPO.values()), os.environ["COURSE_CHECKPOINTS"]}
    inside = {f for f in folders if not ROOT.is_relative_to(f)}
    return sandbox.Limits(tuple(sorted(inside)), str(Path(__file__)), os.getpid())


def _work(connection: Connection, to_server: Connection) -> None:
    """Grade what comes over the connection until it closes, as the trusted worker. None in place of
    a submission asks which protections a child has.
    """
    with contextlib.suppress(EOFError, OSError):
        options, points = connection.recv()
        while True:
            if (task := connection.recv()) is None:
                nothing = {"file": ("", b""), "names": {"": set()}}
                job = jobs.Job("list_definitions", options.seconds, nothing)
                connection.send(jobs.ask(to_server, job).protections)
                continue
            name, path, lost = task
            submitted = SubmittedFiles(name, (), (lost,)) if lost else read_submission(name, path)
            grader = Grader(to_server, options, points, submitted)
            report = grader.grade(options.only.get(name, ()))
            connection.send(report | {"digest": None if lost else submitted.digest})


if __name__ == "__main__":
    main(int(sys.argv[1]))
