"""A training run from the command line, on one process or, under `torchrun`, on many.

    python -m utils.train grpo --data utils.models.corpus:addition_rows \\
        --reward utils.rewards:reward_fn_addition --gen-len 40
    torchrun --nproc-per-node 2 -m utils.train grpo ...   (the same arguments)

Every field of the trainer's arguments is an option (`python -m utils.train grpo --help`). Under
torchrun each process samples its share of `--batch-size`, and all learn as one; the first writes
the run's folder. A run that stopped, for whatever reason, goes on with `--resume FOLDER` added; a
`kill -9` of the first process loses what came after the last checkpoint (`--checkpoint-every`).
"""

import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from tyro.conf import Suppress, arg, subcommand

from solutions.ch2_ppo import RLHFArgs, reward_fn_sentiment
from solutions.ch3_grpo import GrpoArgs
from solutions.ch7_scale import DataParallelGrpoTrainer, DataParallelRLHFTrainer
from utils.course.session import choose_threads
from utils.validation import require

TIMEOUT = timedelta(minutes=10)  # until a rank that waits for another gives up


def load_function(path: str) -> Callable:
    """Import a function by "module:function"; the module may lie in the folder one is in.

    Raises ValueError, with the names that there are, where there is no such function.
    """
    module_name, _, name = path.partition(":")
    require(module_name and name, f"a function should be given as module:function, not {path!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (module_name + ".").startswith(f"{error.name}."):
            raise  # the module is there, but what it imports is not
        raise ValueError(f"there is no module {module_name!r} for {path!r}") from error
    found = getattr(module, name, None)
    names = [n for n, x in vars(module).items() if inspect.isfunction(x)]
    require(callable(found), f"{module_name} has no function {name!r}, but has {', '.join(names)}")
    assert callable(found)
    return found


def load_rows(data: str) -> list[dict[str, Any]]:
    """Return rows of a prompt and other columns: of a file, or of a function that returns them.

    A line of a .jsonl file is {"prompt": a string or a chat, ...}; a line of a .txt file is a
    prompt. Lines end with a newline and nothing else.

    Raises ValueError for another file or encoding, and for rows without a prompt or with different
    columns.
    """
    path = Path(data).expanduser()
    if path.suffix in (".jsonl", ".txt"):
        require(path.is_file(), f"data should be a file, but there is no {path}")
        lines = _read_text(path).replace("\r\n", "\n").split("\n")
        numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip()]
        if path.suffix == ".txt":
            rows = [{"prompt": line} for _, line in numbered]
        else:
            rows = [_parse(line, f"{path}, line {i}") for i, line in numbered]
    else:
        how = ": pandas.read_csv(...).to_json('rows.jsonl', orient='records', lines=True) turns it"
        hint = f"{how} into one" if path.suffix == ".csv" else ""
        said = f"data should be a .jsonl or .txt file or module:function, not {data}"
        require(":" in data, said + hint)
        rows = list(load_function(data)())
    require(len(rows) > 0, f"data should hold at least one row, but {data} holds none")
    first = rows[0] if isinstance(rows[0], dict) else {}
    for name in ("prompts", "question", "input", "text"):
        require(
            "prompt" in first or name not in first,
            f"data should have a column prompt, but has {sorted(first)}: rename {name!r} to prompt",
        )
    for i, row in enumerate(rows, 1):
        require(
            isinstance(row, dict) and "prompt" in row and row.keys() == first.keys(),
            f"data should have a prompt, and the same columns, in each row, but row {i} is {row!r}",
        )
    return rows


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        said = f"{path}, line {line} should be UTF-8, but is in another encoding: save it as UTF-8"
        raise ValueError(said) from error


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} should be JSON, but is {line[:60]!r}: {error}") from error


@dataclass
class Options:
    """Hold what the command has in place of arguments that are Python values."""

    prompts: Suppress[Any] = None
    columns: Suppress[Any] = field(default_factory=dict)
    dtype: Suppress[Any] = None
    reward_fn: Suppress[Any] = reward_fn_sentiment
    data: str | None = None  # Prompts, and columns for the reward: .jsonl, .txt, module:function.
    reward: str | None = None  # module:function; without it, the sentiment of chapter 2.
    weights_dtype: str | None = None  # Of the base; else bfloat16 on a GPU that has it, or float32.
    microbatch_size: int | None = None  # Completions to learn from at a time, to save memory.
    checkpointing: bool = False  # Compute each block twice to keep less of it.
    resume: Path | None = None  # Go on with the run of this folder; give the same arguments.

    def __post_init__(self):
        """Turn the options into the trainer's arguments."""
        if self.data is not None and self.prompts is None:
            rows = load_rows(self.data)
            self.prompts = [row["prompt"] for row in rows]
            self.columns = {k: [row[k] for row in rows] for k in rows[0] if k != "prompt"}
        if self.reward is not None:
            self.reward_fn = load_function(self.reward)
        if self.weights_dtype is not None:
            self.dtype = getattr(torch, self.weights_dtype, None)
            require(
                isinstance(self.dtype, torch.dtype),
                f"weights_dtype should be float32 or bfloat16, but is {self.weights_dtype!r}",
            )
        super().__post_init__()  # type: ignore[misc]


@dataclass
class PpoCommand(Options, RLHFArgs):
    """Train by PPO, with a value head."""


OF_TURNS = "module:function; it gets a turn's text, and returns what is written next, or None."


@dataclass
class GrpoCommand(Options, GrpoArgs):
    """Train by GRPO, with groups of completions in place of a value head."""

    environment: Annotated[str | None, arg(help=OF_TURNS)] = None  # type: ignore[assignment]

    def __post_init__(self):
        """Turn the environment's name into a function, and the other options as above."""
        if isinstance(self.environment, str):
            self.environment = load_function(self.environment)  # type: ignore[assignment]
        super().__post_init__()


TRAINERS: dict[type, tuple[type, type]] = {
    PpoCommand: (DataParallelRLHFTrainer, RLHFArgs),
    GrpoCommand: (DataParallelGrpoTrainer, GrpoArgs),
}


@contextmanager
def joined(name: str | None):
    """Join the process group that torchrun has prepared; without torchrun nothing happens.

    A rank has a GPU of its own where there are GPUs, unless `name` is that of the CPU.
    """
    if "LOCAL_RANK" not in os.environ:
        yield 0
        return
    device = None
    if torch.cuda.is_available() and not str(name).startswith("cpu"):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device else "gloo", timeout=TIMEOUT, device_id=device)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def train(args: PpoCommand | GrpoCommand) -> list[dict[str, float]]:
    """Train, or go on, on the processes that there are, and return the history."""
    trainer_class, args_class = TRAINERS[type(args)]
    plain = args_class(**{f.name: getattr(args, f.name) for f in fields(args_class)})
    with joined(args.device) as rank:
        trainer = trainer_class(
            plain, microbatch_size=args.microbatch_size, checkpointing=args.checkpointing
        )
        if args.resume is not None:
            trainer.load_checkpoint(args.resume / "checkpoint.pt")
        try:
            history = trainer.train()
        except BaseException as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, while this is being said
            if trainer.n_ranks > 1:
                if isinstance(error, Exception):
                    traceback.print_exc()
                say(
                    f"rank {rank} stopped: {(str(error).splitlines() or [type(error).__name__])[0]}"
                )
            if rank == 0 and trainer.folder and (trainer.folder / "checkpoint.pt").exists():
                say(f"to go on: the same command with --resume {trainer.folder}")
            if trainer.n_ranks > 1:
                os._exit(1)  # leaving the group would wait for the ranks that are gone
            raise
        if rank == 0:
            print(f"{trainer.folder}: metrics.jsonl, metrics.png, adapter.safetensors")
    return history


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class AskedToStop(KeyboardInterrupt):
    """SIGTERM: the run is saved as after Ctrl-C."""


def stop(signum: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: the run is being saved
    raise AskedToStop("asked to stop, as another rank ended or torchrun did")


def main() -> None:
    ppo = Annotated[PpoCommand, subcommand("ppo")]
    grpo = Annotated[GrpoCommand, subcommand("grpo")]
    signal.signal(signal.SIGTERM, stop)
    try:
        args: Any = tyro.cli(ppo | grpo, prog="python -m utils.train", description=__doc__)
        choose_threads()
        train(args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt as error:  # said already, with how to go on
        raise SystemExit(143 if isinstance(error, AskedToStop) else 130) from None


if __name__ == "__main__":
    main()
