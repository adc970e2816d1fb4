"""What a run leaves in its folder: metrics.jsonl, a wandb log if asked for, and its checkpoint."""

import itertools
import json
import os
import reprlib
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate


class RunLog:
    """Rows of metrics: appended to `folder/metrics.jsonl`, and to wandb if `args.use_wandb`.

    The file is begun anew from `history`, so a resumed run leaves what an unbroken one would.
    wandb is offline unless the user is logged in or has set WANDB_MODE.
    """

    def __init__(self, folder: Path, history: list[dict], args: Any):
        self.path = folder / "metrics.jsonl"
        self.path.write_text("".join(json.dumps(row) + "\n" for row in history))
        self.wandb_run = None
        if args.use_wandb:
            import wandb  # takes a second to import

            mode = os.environ.get("WANDB_MODE", "online" if wandb.api.api_key else "offline")
            self.wandb_run = wandb.init(
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                name=folder.name,
                config=describe_args(args),
                dir=folder,
                mode=mode,
            )

    def append(self, row: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.wandb_run:
            self.wandb_run.log(row, step=row["phase"])

    def close(self) -> None:
        if self.wandb_run:
            self.wandb_run.finish()


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` so that a crash on the way leaves the previous checkpoint whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote; tensors and plain values only, no pickled code.

    Raises ValueError if the file is missing or is not a trainer's checkpoint.
    """
    if not path.is_file():
        raise ValueError(f"path should be a checkpoint, but {path} is not there")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes of the unpickler
        raise ValueError(f"path should be a checkpoint, but {path} is not: {error}") from error
    keys = {"args", "phase", "trainable", "optimizer", "scheduler", "generator", "history"}
    if not isinstance(state, dict) or not keys <= state.keys():
        raise ValueError(f"path should be a trainer's checkpoint, but {path} is another file")
    return state


def create_run_folder(runs_dir: Path, name: str | None, kind: str) -> Path:
    """The folder of a new run: `runs_dir/name`, or one named after `kind` and the time.

    Raises ValueError if a run with a checkpoint is there already: it would be overwritten.
    """
    if name is not None:
        folder = runs_dir / name
        checkpoint = folder / "checkpoint.pt"
        if checkpoint.exists():
            raise ValueError(
                f"name should be new, but {folder} holds a run. Go on with it by "
                f"trainer.load_checkpoint({str(checkpoint)!r}), or remove it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    stamp = time.strftime(f"{kind}-%Y%m%d-%H%M%S")
    for suffix in itertools.chain([""], (f"-{k}" for k in itertools.count(2))):
        folder = runs_dir / (stamp + suffix)
        if not folder.exists():
            folder.mkdir(parents=True)
            return folder


def describe_args(args: Any) -> dict[str, Any]:
    """The arguments that a run's result depends on, as plain values that a checkpoint can hold."""

    def describe(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if callable(value):  # its repr may hold an address
            return getattr(value, "__qualname__", type(value).__qualname__)
        return str(value) if isinstance(value, Path) else repr(value)

    # A reward function may have been mended since; its name says little anyway.
    free = {"name", "runs_dir", "checkpoint_every", "samples_every", "reward_fn"}
    names = {f.name for f in fields(args) if "wandb" not in f.name} - free
    return {name: describe(getattr(args, name)) for name in sorted(names)}


def check_same_args(args: Any, saved: dict[str, Any]) -> None:
    """Raise ValueError unless `args` describe the run that `saved` was taken from."""
    own = describe_args(args)
    for name in own | saved:
        if own.get(name) != saved.get(name):
            raise ValueError(
                f"{name} should be {reprlib.repr(saved.get(name))} as in the checkpoint, but is "
                f"{reprlib.repr(own.get(name))}"
            )


def format_samples(rows: list[tuple[str, float, str, str]], width: int = 60) -> str:
    """A table of (which sample, reward, prompt, completion); line breaks are shown as ⏎."""
    table = [
        (which, f"{reward:.2f}", prompt.replace("\n", "⏎"), text.replace("\n", "⏎"))
        for which, reward, prompt, text in rows
    ]
    return tabulate(
        table,
        headers=("sample", "reward", "prompt", "completion"),
        tablefmt="simple_outline",
        maxcolwidths=[None, None, width // 2, width],
        disable_numparse=True,
    )
