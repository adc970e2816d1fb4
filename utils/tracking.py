"""What a run leaves in its folder: metrics.jsonl, a wandb log if asked for, and its checkpoint."""

import json
import os
from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from tabulate import tabulate


class RunLog:
    """Rows of metrics: appended to `folder/metrics.jsonl`, and to wandb if `args.use_wandb`.

    The file is begun anew from `history`, so a resumed run leaves what an unbroken one would.
    wandb is offline unless the user is logged in or has set WANDB_MODE.
    """

    def __init__(self, folder: Path, history: list[dict], args: Any):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self.path.write_text("".join(json.dumps(row) + "\n" for row in history))
        self.wandb_run = None
        if args.use_wandb:
            import wandb  # takes a second to import

            mode = os.environ.get("WANDB_MODE", "online" if wandb.api.api_key else "offline")
            self.wandb_run = wandb.init(
                project=args.wandb_project,
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

    Raises ValueError if the file is missing or is not a checkpoint.
    """
    if not path.is_file():
        raise ValueError(f"path should be a checkpoint, but {path} is not there")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        raise ValueError(f"path should be a checkpoint, but {path} is not: {error}") from error


def describe_args(args: Any) -> dict[str, str]:
    """The arguments that a run's result depends on, as text that a checkpoint can hold."""
    free = {"name", "runs_dir", "checkpoint_every", "samples_every", "use_wandb", "wandb_project"}

    def describe(value: Any) -> str:
        if callable(value):  # its repr may hold an address
            return getattr(value, "__qualname__", type(value).__qualname__)
        return str(value) if isinstance(value, Path) else repr(value)

    return {f.name: describe(getattr(args, f.name)) for f in fields(args) if f.name not in free}


def format_samples(rows: list[tuple[float, str, str]], width: int = 60) -> str:
    """A table of (reward, prompt, completion); line breaks are shown, long texts are cut."""

    def shorten(text: str) -> str:
        text = text.replace("\n", "⏎")
        return text if len(text) <= width else text[: width - 1] + "…"

    table = [(f"{reward:.2f}", shorten(prompt), shorten(text)) for reward, prompt, text in rows]
    return tabulate(table, headers=("reward", "prompt", "completion"), tablefmt="simple_outline")
