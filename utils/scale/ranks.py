"""Processes that work together, started from a notebook: `run_ranks(function)`.

Each process gets the function, also one that a notebook defines, joins a process group (gloo, on
the CPU) and calls it; what it prints is shown under its rank. A failure is shown, not raised. A
rank that waits in vain for another gives up after `timeout` seconds, and says where it waited.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def run_ranks(
    function: Callable, *args: Any, n_ranks: int = 2, timeout: int = 60, limit: int = 300
) -> list[Any]:
    """Call `function(*args)` in `n_ranks` processes, and return what each returned.

    None stands for a rank that failed. `timeout`, in seconds, is how long a rank waits for another
    at most; after `limit` seconds a process is killed. What is returned is pickled: give numbers,
    not models.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work").write_bytes(cloudpickle.dumps((function, args)))
        modules = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": modules}
        command = [sys.executable, "-m", __name__, str(folder), str(n_ranks), str(timeout)]
        processes = []
        for rank in range(n_ranks):
            with (folder / f"output-{rank}").open("w") as output:
                streams: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT}
                processes.append(subprocess.Popen([*command, str(rank)], env=env, **streams))
        try:
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(limit)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        results = []
        for rank in range(n_ranks):
            for line in (folder / f"output-{rank}").read_text().splitlines():
                print(f"[rank {rank}] {line}")
            if processes[rank].returncode < 0:
                name = signal.Signals(-processes[rank].returncode).name
                print(f"[rank {rank}] was ended by {name}")
            path = folder / f"result-{rank}"
            results.append(cloudpickle.loads(path.read_bytes()) if path.exists() else None)
    return results


def main() -> None:
    """Be one rank."""
    folder, n_ranks, timeout, rank = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    # The logits are a view; nothing here changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=n_ranks,
        timeout=timedelta(seconds=timeout),  # of each wait for another rank
    )
    function, args = cloudpickle.loads((folder / "work").read_bytes())
    status = 0
    try:
        result = cloudpickle.dumps(function(*args))
        (folder / f"result-{rank}").write_bytes(result)
    except BaseException as error:
        print(describe(error))
        status = 1
    sys.stdout.flush()
    os._exit(status)  # leaving the group in order would wait for a rank that hangs


def describe(error: BaseException) -> str:
    """Say what an error was and where, in the code that is not a library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.name for frame in frames if "site-packages" not in frame.filename]
    first = (str(error).splitlines() or [""])[0]
    first = re.sub(r"^\[\S+\] ", "", first).partition(". This is")[0]  # gloo's file and advice
    return f"{type(error).__name__} in {own[-1]}: {first}"


if __name__ == "__main__":
    main()
