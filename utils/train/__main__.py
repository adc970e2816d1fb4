"""A training run from the command line, on one process or, under `torchrun`, on many.

    python -m utils.train grpo --data utils.models.corpus:addition_rows \\
        --reward utils.rewards:reward_fn_addition --gen-len 40
    torchrun --nproc-per-node 2 -m utils.train grpo ...   (the same arguments)

Every argument of the trainer is an option (`python -m utils.train grpo --help`), and so are those
of another one (`--trainer module:class`); `dpo` trains on a file of preferences. `--eval-data`
measures held-out prompts on the way and keeps the adapters that were best.

Under torchrun each process samples its share of `--batch-size`, and all learn as one; the first
writes the run's folder. A run that stopped, for whatever reason, goes on with `--resume FOLDER`; a
`kill -9` of the first process loses what came after the last checkpoint (`--checkpoint-every`). A
finished one goes on too, with a higher `--total-phases`.
"""

import json
import os
import signal
import sys
import traceback
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

from solutions.ch2_ppo import RLHFArgs
from solutions.ch7_scale import DataParallel
from utils.course.session import choose_threads
from utils.run_folder import ARGS, SAMPLES, find_run, name_fields, read_args, read_rows
from utils.train.data import OWN_FILES
from utils.train.dpo import DpoCommand, train_on_preferences
from utils.train.options import find_adapter, make_args
from utils.train.parsing import load_trainer, parse
from utils.train.watched import Evaluation, Watched, count_overlap, get_rank
from utils.validation import require

TIMEOUT = timedelta(minutes=10)  # until a rank that waits for another gives up


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


def make_trainer(command: Any, args: RLHFArgs) -> Watched:
    """Make the trainer that the options ask for, and say what is to be known of its data."""
    found = load_trainer(name_command(command), command.trainer)
    limits = {"microbatch_size": command.microbatch_size, "checkpointing": command.checkpointing}
    if not issubclass(found, DataParallel):
        asked = [name for name, value in limits.items() if value]
        asked += ["torchrun"] if get_rank()[1] > 1 else []
        require(
            not asked,
            f"trainer should derive from DataParallel for {' and '.join(asked)}, but "
            f"{found.__name__} does not",
        )
        limits = {}
    watched: Any = type(found.__name__, (Watched, found), {})
    trainer = watched(args, **limits)
    if command.adapter is not None and command.resume is None:
        trainer.model.load_adapter(find_adapter(command.adapter))
    trainer.options = {"command": name_command(command)} | name_fields(command)
    del trainer.options["resume"], trainer.options["config"]
    if command.stop:
        trainer.stop_at(command.stop)
    if command.eval_data is not None:
        rows = command.read_evaluation_rows(args.columns)
        trainer.evaluation = Evaluation(
            rows, command.eval_every, command.eval_samples, command.patience
        )
        shared = count_overlap(rows, args.get_prompts())
        if shared and get_rank()[0] == 0:
            which = f"{shared} of its {len(rows)} prompts are among those of training"
            say(f"eval_data: {which}, so its reward is not one on held-out prompts")
    return trainer


def name_command(command: Any) -> str:
    return type(command).__name__.removesuffix("Command").lower()


def train(command: Any) -> list[dict[str, float]]:
    """Train, or go on, on the processes that there are, and return the history."""
    args = make_args(command)
    with joined(args.device) as rank:
        trainer: Any = make_trainer(command, args)
        if command.resume is not None:
            go_on(trainer, find_run(command.resume), rank)
        try:
            history = trainer.train()
        except BaseException as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, while this is being said
            is_parallel = get_rank()[1] > 1
            if is_parallel:
                if isinstance(error, Exception):
                    traceback.print_exc()
                first, *_ = str(error).splitlines() or [type(error).__name__]
                say(f"rank {rank} stopped: {first}")
            if rank == 0 and trainer.folder and (trainer.folder / "checkpoint.pt").exists():
                how = "torchrun ... -m" if is_parallel else "python -m"
                hint = f"to go on: {how} utils.train --resume {trainer.folder}"
                if is_of_own_code(error) and not is_parallel:
                    error.add_note(hint)  # below the traceback that main lets through
                else:
                    say(hint)
            if is_parallel:
                os._exit(1)  # leaving the group would wait for the ranks that are gone
            raise
        if rank == 0:
            print_results(trainer)
    return history


def go_on(trainer: Watched, folder: Path, rank: int) -> None:
    """Load the checkpoint of a run, and say what will not be as one might think."""
    trainer.load_checkpoint(folder / "checkpoint.pt")
    before = read_args(folder) if (folder / ARGS).is_file() else {}
    now = trainer.options or {}
    names = ("reward", "reward_weights", "stop", "eval_samples")
    changed = [name for name in names if before.get(name, now[name]) != now[name]]
    held = [x for x in read_rows(folder / SAMPLES) if x["split"] == "eval"]
    held_out = {json.dumps(x["prompt"]) for x in held if x["phase"] == held[-1]["phase"]}
    rows = trainer.evaluation.rows if trainer.evaluation else []
    if held_out and held_out != {json.dumps(row["prompt"]) for row in rows}:
        changed.append("eval_data")  # by its prompts: a file may have moved
    if rank == 0 and changed:
        say(
            f"{' and '.join(changed)} changed: don't compare the rewards before and after this, "
            "nor take best.safetensors for the best"
        )
    if rank == 0 and trainer.phase >= trainer.args.total_phases:
        say(f"{folder} has had all its {trainer.phase} phases: for more, --total-phases")


def print_results(trainer: Any) -> None:
    """Say what the run has left, and what evaluation found."""
    print(f"{trainer.folder}: metrics.jsonl, metrics.png, adapter.safetensors")
    rows = [row for row in trainer.history if "eval_reward" in row]
    if rows:
        first, last, best = rows[0], rows[-1], max(rows, key=lambda row: row["eval_reward"])
        names = [name for name in last if name.startswith("eval_")]
        shown = (first, last, best)
        phases = [f"phase {row['phase']:.0f}" for row in shown]
        table = [[name.removeprefix("eval_"), *(x.get(name) for x in shown)] for name in names]
        print("Means over the evaluation's prompts:")
        print(tabulate(table, ("", *phases[:2], f"{phases[2]}, best.safetensors"), floatfmt=".3f"))
        if best is not last:
            print(
                f"The best of {len(rows)} is partly luck: measure it again on other prompts "
                "(examples/README.md says how)."
            )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class AskedToStop(KeyboardInterrupt):
    """SIGTERM: the run is saved as after Ctrl-C."""


def stop(signum: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: the run is being saved
    raise AskedToStop("asked to stop, as another rank ended or torchrun did")


def is_of_own_code(error: BaseException) -> bool:
    """Return whether an error was raised in a reward, an environment or data of the reader's.

    Ctrl-C is no error, wherever it arrives.
    """
    frames = traceback.extract_tb(error.__traceback__)
    is_error = isinstance(error, Exception)
    return is_error and any(frame.filename in OWN_FILES for frame in frames)


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    try:
        command = parse(sys.argv[1:], __doc__)
        choose_threads()
        train_on_preferences(command) if isinstance(command, DpoCommand) else train(command)
    except (ValueError, OSError) as error:
        if is_of_own_code(error):
            raise  # its line is worth more than a sentence
        where = [n for n in getattr(error, "__notes__", []) if n.startswith("in the reward")]
        raise SystemExit(f"error: {', '.join([str(error), *where])}") from None
    except KeyboardInterrupt as error:  # said already, with how to go on
        raise SystemExit(143 if isinstance(error, AskedToStop) else 130) from None


if __name__ == "__main__":
    main()
