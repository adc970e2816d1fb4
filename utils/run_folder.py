"""A run's folder, and what it keeps: arguments, samples and checkpoints."""

import hashlib
import itertools
import json
import numbers
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

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


def name_fields(args: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON has them."""
    return {f.name: name_value(getattr(args, f.name)) for f in fields(args)}


def write_args(trainer: Any) -> None:
    """Write to `args.json` what a run is made of: the command's options, or else a trainer's
    arguments, and the course's version."""
    options = getattr(trainer, "options", None)  # of the command
    if options is None:
        options = {"trainer": name_value(type(trainer))} | name_fields(trainer.args)
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


def append_rows(path: Path, rows: Iterable[dict[str, Any]], anew: bool = False) -> None:
    """Append rows to a file of JSON lines, or write it anew. Those of samples have "phase", "split"
    ("train" or "eval"), "prompt", "completion" and "reward"."""
    with path.open("w" if anew else "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return what `append_rows` wrote, if anything, without a last line that is half written."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def keep_samples(folder: Path, phase: int) -> None:
    """Remove the samples that an earlier process wrote after this phase; with phase 0, all."""
    rows = read_rows(folder / SAMPLES)
    (folder / SAMPLES).unlink(missing_ok=True)
    if kept := [row for row in rows if phase > 0 and row["phase"] <= phase]:
        append_rows(folder / SAMPLES, kept)


def create_run_folder(runs_dir: Path, name: str | None, kind: str) -> Path:
    """Return the folder of a new run: `runs_dir/name`, or one named after `kind` and the time.

    Raises ValueError if a run with a checkpoint is there already, which would be overwritten, and
    where nothing can be written.
    """
    if name is None:
        stamp = time.strftime(f"{kind}-%Y%m%d-%H%M%S")
        names = itertools.chain([stamp], (f"{stamp}-{k}" for k in itertools.count(2)))
        name = next(name for name in names if not (runs_dir / name).exists())
    folder = runs_dir / name
    checkpoint = folder / "checkpoint.pt"
    require(
        not checkpoint.exists(),
        f"name should be new, but {folder} holds a run. Go on with it by "
        f"trainer.load_checkpoint({str(checkpoint)!r}), at the command line by --resume {folder}, "
        "or remove it",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise ValueError(
            f"runs_dir should be a folder that can be written, but {folder} cannot be: {error}"
        ) from error


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` so that a crash on the way leaves the previous checkpoint whole.

    Raises ValueError where it cannot be written, as on a full disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # PyTorch's own on a full disk says "unexpected pos"
        partial.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free // 2**20
        raise ValueError(
            f"runs_dir should have room for a checkpoint, but {path} could not be written, with "
            f"{free} MB free on its disk: {error}"
        ) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote; tensors and plain values only, no pickled code.

    Raises ValueError if the file is missing or is not a trainer's checkpoint.
    """
    require(path.is_file(), f"path should be a checkpoint, but {path} is not there")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes of the unpickler
        raise ValueError(f"path should be a checkpoint, but {path} is not: {error}") from error
    keys = {"args", "phase", "trainable", "optimizer", "scheduler", "generator", "history"}
    is_right = isinstance(state, dict) and keys <= state.keys()
    require(is_right, f"path should be a trainer's checkpoint, but {path} is another file")
    return state


def find_run(path: str | Path) -> Path:
    """Return the folder of a run, which may be given by a file in it."""
    path = Path(path).expanduser()
    return path.parent if path.suffix in (".pt", ".safetensors") else path


def read_trained(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what a run's folder or an adapter file holds of a policy, and the run's arguments:
    none for a file around which there is no run.

    Raises ValueError for a path that is neither, and for a run that changed its base, to which its
    adapters belong.
    """
    path = Path(path).expanduser()
    checkpoint, is_file = find_run(path) / "checkpoint.pt", path.suffix == ".safetensors"
    is_alone = is_file and not checkpoint.is_file()
    state = {"args": {}, "trainable": {}} if is_alone else load_checkpoint(checkpoint)
    require(
        "base" not in state,
        f"run should have left its base as it was, but {path} refreshed its reference: load it "
        "into its trainer, and sample from trainer.model, or hand that to save_merged",
    )
    trained, args = state["trainable"], state["args"]
    if is_file:
        said = f"run should be a folder or an adapter file, but there is no {path}"
        require(path.is_file(), said)
        try:
            trained = load_file(path)
        except SafetensorError as torn:
            said = f"run should be a safetensors file, but {path} isn't: {torn}"
            raise ValueError(said) from torn
    wanted = {"base_model", "lora_rank", "lora_alpha"}
    is_known = is_alone or wanted <= args.keys()
    require(is_known, f"{path} should be a run with {sorted(wanted)}: {args}")
    has_adapters = any(name.endswith(".lora_A") for name in trained)
    require(has_adapters, f"{path} should hold adapters, but has no adapters: {list(trained)[:3]}")
    return trained, args


def restore_generator(generator: torch.Generator, state: Tensor) -> None:
    """Give a generator a kept state. If that is of another kind of device, warn, and seed the
    generator with a number that follows from it."""
    if len(state) == len(generator.get_state()):
        generator.set_state(state)
        return
    warnings.warn(
        f"The checkpoint's random numbers are another device's. From here on the run draws others, "
        f"on {generator.device.type}.",
        stacklevel=3,
    )
    digest = hashlib.sha256(state.numpy().tobytes()).digest()
    generator.manual_seed(int.from_bytes(digest[:6]))
