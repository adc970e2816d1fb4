"""What a run leaves in its folder beside checkpoints and adapters: its arguments and samples."""

import json
import numbers
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from utils.validation import require
from utils.version import get_version

ARGS, SAMPLES = "args.json", "samples.jsonl"
VERSION = get_version()  # read now: a process that grades may read no file later
# What lies there before the first checkpoint does.
EARLY = ("metrics.jsonl", ARGS, SAMPLES, "best.json", "best.safetensors")


def name_value(value: Any) -> Any:
    """Return a value as JSON has it: functions and classes as "module:name", others as text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, dict):
        return {str(key): name_value(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [name_value(x) for x in value]
    name = getattr(value, "__qualname__", None)
    return str(value).removeprefix("torch.") if name is None else f"{value.__module__}:{name}"


def write_args(trainer: Any) -> None:
    """Write to `args.json` what a run is made of: the command's options, or else a trainer's
    arguments, and the course's version."""
    options = getattr(trainer, "options", None)  # of the command
    if options is None:
        named = {f.name: name_value(getattr(trainer.args, f.name)) for f in fields(trainer.args)}
        options = {"trainer": name_value(type(trainer))} | named
    write_options(trainer.folder, options)


def write_options(folder: Path, options: dict[str, Any]) -> None:
    text = json.dumps({"version": VERSION} | options, indent=1)
    (folder / ARGS).write_text(text + "\n", encoding="utf-8")


def read_args(folder: Path) -> dict[str, Any]:
    """Read what `write_args` wrote; raises ValueError if there is none, or another file."""
    path = folder / ARGS
    require(path.is_file(), f"{folder} should be the folder of a run, but has no {ARGS}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} should be JSON, but is not: {error}") from error
    require(isinstance(found, dict), f"{path} should hold arguments by name, but holds {found!r}")
    return found


def append_samples(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows with "phase", "split" ("train" or "eval"), "prompt", "completion", "reward"."""
    with (folder / SAMPLES).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Return what `append_samples` wrote, without a last line that is half written."""
    path = folder / SAMPLES
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def keep_samples(folder: Path, phase: int) -> None:
    """Remove the samples that an earlier process wrote after this phase; with phase 0, all."""
    kept = [row for row in read_samples(folder) if phase > 0 and row["phase"] <= phase]
    if (folder / SAMPLES).exists():
        (folder / SAMPLES).unlink()
        append_samples(folder, kept)
