"""What a run shows while it trains, and the context that leaves it in a folder."""

import contextlib
import hashlib
import io
import itertools
import os
import re
import reprlib
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tabulate import tabulate
from tqdm import tqdm

from utils.models.fast_path import forget
from utils.panel import Panel, SamplesTable, is_in_notebook
from utils.plotting import plot_history
from utils.run_folder import (
    EARLY,
    append_rows,
    create_run_folder,
    keep_samples,
    save_checkpoint,
    write_args,
)
from utils.run_folder import load_checkpoint as load_checkpoint  # an older chapter 2 has them here
from utils.run_folder import restore_generator as restore_generator
from utils.signals import find_equal_rewards


class EarlyStop(Exception):
    """A run ends before its last phase, as if that were the last: the message says why."""


class Run:
    """The phases of a trainer that are left, as a context: what is shown and kept of them.

    The trainer has `args`, `history`, `metrics`, `phase`, `samples_table`, `folder`, `model`,
    `get_state()` and `set_state()`. If the block is left by an error or Ctrl-C, the trainer goes
    back to the end of the last phase, and that is saved; if it ends, so are the adapters, and a
    plot of the metrics. In a notebook a panel shows it, unless `args.samples_every` is 0, and
    elsewhere a bar and tables of samples.

    Entering raises ValueError if `args.name` is the name of an earlier run.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def __enter__(self) -> "Run":
        trainer, args = self.trainer, self.trainer.args
        tolerate_encoding()
        check_trainer(trainer)
        if trainer.folder is None:
            name = type(trainer).__name__.removesuffix("Trainer").lower()
            kind = getattr(trainer, "kind", name)  # a trainer on many ranks says whose runs it does
            trainer.folder = create_run_folder(Path(args.runs_dir), args.name, kind)
        self.lock = claim(trainer.folder)
        self.checkpoint = trainer.folder / "checkpoint.pt"
        self.is_told = False  # that no group had two rewards
        self.n_logged = len(trainer.history)
        self.state = trainer.get_state()
        forget(trainer.model)  # it may have been edited since
        self.panel = Panel(trainer) if args.samples_every and is_in_notebook() else None
        self.bar = tqdm(total=args.total_phases, initial=trainer.phase, desc=trainer.folder.name,
                        disable=self.panel is not None)  # fmt: skip
        if truncated := [n for n in ("top_k", "top_p") if getattr(args, n, None) is not None]:
            self.bar.write(
                f"Training with {' and '.join(truncated)}: what the sampler drops is never learned,"
                " and log-probs do not know of it. The metric kept_mass shows how much it keeps."
            )
        self.start = time.perf_counter()
        try:  # last of all: what is stopped from here on is saved
            self.log = RunLog(trainer.folder, trainer.history, args)
            write_args(trainer)
            keep_samples(trainer.folder, trainer.phase)
        except BaseException:  # as wandb raises
            self.bar.close()
            self.lock.release()
            raise
        return self

    def end_phase(self) -> None:
        """Append the phase's mean metrics to the history, show them, and save what is due."""
        trainer, args = self.trainer, self.trainer.args
        row = {name: sum(values) / len(values) for name, values in trainer.metrics.items()}
        row = {"phase": trainer.phase} | row | {"seconds": time.perf_counter() - self.start}
        trainer.history.append(row)
        for new in trainer.history[self.n_logged :]:  # an evaluation before training is one
            self.log.append(new)
        self.n_logged = len(trainer.history)
        # A method of one's own may record less.
        shown = {name: f"{row[name]:.3f}" for name in ("reward", "entropy") if name in row}
        is_due = args.samples_every and (trainer.phase - 1) % args.samples_every == 0
        if is_due and "reward" in shown:
            heading = f"phase {trainer.phase} of {args.total_phases}: mean reward {shown['reward']}"
            if self.panel:
                self.panel.show_samples(heading, trainer.samples_table)
            else:
                self.bar.write(f"{trainer.folder.name}, {heading}\n{trainer.samples_table}")
        said = find_equal_rewards(trainer.history, args.total_phases)
        if said and not self.is_told:
            self.bar.write(said)
            self.is_told = True
        self.bar.set_postfix(shown)
        self.bar.update()
        self.state = trainer.get_state()
        if args.checkpoint_every and trainer.phase % args.checkpoint_every == 0:
            save_checkpoint(self.checkpoint, self.state)
        if self.panel:
            self.panel.update()
        self.start = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.bar.close()
            if isinstance(error, EarlyStop):
                self.bar.write(str(error))
                error = None
            if error is not None:
                self._go_back(error)
            else:
                save_checkpoint(self.checkpoint, self.state)
                trainer = self.trainer
                trainer.model.save_adapter(trainer.folder / "adapter.safetensors")
                plot_history({trainer.folder.name: trainer.history}, trainer.folder / "metrics.png")
            if self.panel:
                self.panel.draw()
        finally:
            try:
                self.log.close()
            finally:
                self.lock.release()
            if error is not None and not self.checkpoint.exists():
                folder, self.trainer.folder = self.trainer.folder, None
                for name in EARLY:
                    (folder / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it holds something else, too
                    folder.rmdir()

    def _go_back(self, error: BaseException) -> None:
        """Undo the phase that was begun, save what was before it, and say how to go on."""
        self.trainer.set_state(self.state)
        phase = self.state["phase"]
        if phase > 0 or isinstance(error, KeyboardInterrupt):
            save_checkpoint(self.checkpoint, self.state)
            hint = f"Stopped in phase {phase + 1}."
            if getattr(self.trainer, "options", None) is None:  # else the command says how
                hint += (
                    " To go on, make a trainer with the same arguments, then:\n"
                    f"    trainer.load_checkpoint({str(self.checkpoint)!r})\n    trainer.train()"
                )
            self.bar.write(hint)
            error.add_note(hint)  # repeated below the traceback


def check_trainer(trainer: Any) -> None:
    """Raise ValueError if another trainer reads these arguments, and this one ignores some."""
    kind = type(trainer.args)
    others = vars(sys.modules.get(kind.__module__, sys)).values()
    made_for = [x for x in others if isinstance(x, type) and vars(x).get("args_class") is kind]
    names = {base.__name__ for base in type(trainer).__mro__}  # a notebook's has the same name
    if made_for and trainer.args_class is not kind and made_for[0].__name__ not in names:
        raise ValueError(
            f"args should be those of {type(trainer).__name__}, but are {kind.__name__}, which "
            f"{made_for[0].__name__} reads"
        )


def claim(folder: Path) -> FileLock:
    """Lock a run's folder for this process, until it is released or the process ends.

    Raises ValueError if another run is writing it.
    """
    lock = make_lock(folder)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"name should be new, but another run is writing {folder} now: give this one another "
            f"name"
        ) from error
    return lock


def make_lock(path: Path) -> FileLock:
    """Return a lock of this path that processes share; its file lies among the temporary ones."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir(), f"course-{digest}.lock"))


def tolerate_encoding() -> None:
    """Have `print` put "?" for what an output cannot encode, as files on Windows."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def get_wandb_mode(is_logged_in: bool) -> str:
    """Return wandb's mode: of WANDB_MODE, or offline unless the user is logged in."""
    if os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true", "yes"):
        return "disabled"
    return os.environ.get("WANDB_MODE") or ("online" if is_logged_in else "offline")


class RunLog:
    """Rows of metrics: appended to `folder/metrics.jsonl`, and to wandb if `args.use_wandb`.

    The file is begun anew from `history`, so a resumed run leaves what an unbroken one would.
    wandb is offline unless the user is logged in or has set WANDB_MODE.
    """

    def __init__(self, folder: Path, history: list[dict], args: Any):
        self.path = folder / "metrics.jsonl"
        append_rows(self.path, history, anew=True)
        self.wandb_run = None
        if args.use_wandb:
            import wandb  # takes a second to import

            mode: Any = get_wandb_mode(bool(wandb.api.api_key))
            self.wandb_run = wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                name=folder.name,
                config=describe_args(args),
                dir=folder,
                mode=mode,
            )

    def append(self, row: dict[str, float]) -> None:
        append_rows(self.path, [row])
        if self.wandb_run:
            self.wandb_run.log(row, step=int(row["phase"]))

    def close(self) -> None:
        if self.wandb_run:
            self.wandb_run.finish()


def describe_args(args: Any) -> dict[str, Any]:
    """Return the arguments that a run's result depends on, as plain values that a checkpoint can
    hold."""

    def describe(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(value) if isinstance(value, Path) else format_stably(value)

    # A reward function may have been mended since; its name says little anyway.
    free = {"name", "runs_dir", "checkpoint_every", "samples_every", "reward_fn", "device"}
    names = {f.name for f in fields(args) if "wandb" not in f.name} - free
    return {name: describe(getattr(args, name)) for name in sorted(names)}


def format_stably(value: Any) -> str:
    """Return a `repr` that is the same in every process: without addresses and orders of sets."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(format_stably, value)))}}}"
    if type(value) is dict:
        return f"{{{', '.join(f'{k!r}: {format_stably(v)}' for k, v in value.items())}}}"
    if type(value) is list:
        return f"[{', '.join(map(format_stably, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(format_stably, value))}{',' * (len(value) == 1)})"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def check_same_args(args: Any, saved: dict[str, Any]) -> None:
    """Raise ValueError unless `args` describe the run that `saved` was taken from."""
    own = describe_args(args)
    for name in own | saved:
        if own.get(name) != saved.get(name):
            was, now = show_difference(saved.get(name), own.get(name))
            raise ValueError(f"{name} should be {was} as in the checkpoint, but is {now}")


def show_difference(first: Any, second: Any) -> tuple[str, str]:
    """Return what an error shows of two values: of long texts, the part where they part."""
    start = 0
    if isinstance(first, str) and isinstance(second, str):
        pairs = zip(first, second, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        start = max(same - 20, 0)
    if start == 0:
        return reprlib.repr(first), reprlib.repr(second)
    shown = [f"...{text[start:]}" for text in (first, second)]
    was, now = (text if len(text) <= 60 else f"{text[:60]}..." for text in shown)
    return was, now


def format_samples(rows: list[tuple[str, float, str, str]]) -> str:
    """Format a table of (which sample, reward, prompt, completion); line breaks show as ⏎."""
    table = [
        (which, f"{reward:.2f}", prompt.replace("\n", "⏎"), text.replace("\n", "⏎"))
        for which, reward, prompt, text in rows
    ]
    headers, widths = ("sample", "reward", "prompt", "completion"), [None, None, 30, 60]
    layout: Any = {"tablefmt": "simple_outline", "maxcolwidths": widths}
    text = SamplesTable(tabulate(table, headers, disable_numparse=True, **layout))
    text.rows = table
    return text
