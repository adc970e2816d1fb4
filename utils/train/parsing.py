"""Reading the command's options.

What the command line doesn't give is taken from the file after --config, else from the run after
--resume or, as far as it is about the model, after --adapter.
"""

import argparse
import difflib
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Union

import tyro
import yaml
from tyro.conf import subcommand

from solutions.ch2_ppo import RLHFTrainer
from solutions.ch3_grpo import GrpoTrainer
from solutions.ch7_scale import DataParallelGrpoTrainer, DataParallelRLHFTrainer
from utils.run_folder import ARGS, find_run, read_args
from utils.train.data import load_function, read_text
from utils.train.dpo import DpoCommand
from utils.train.options import GrpoCommand, PpoCommand, make_command
from utils.validation import require

COMMANDS: dict[str, Any] = {"ppo": PpoCommand, "grpo": GrpoCommand, "dpo": DpoCommand}
# Of a command, the class that a trainer of one's own has to derive from, and the one without.
TRAINERS: dict[str, tuple[type[RLHFTrainer], type[RLHFTrainer]]] = {
    "ppo": (RLHFTrainer, DataParallelRLHFTrainer),
    "grpo": (GrpoTrainer, DataParallelGrpoTrainer),
}

FIRST = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
for _name in ("trainer", "config", "resume", "adapter"):
    FIRST.add_argument(f"--{_name}")
OF_MODEL = ("base_model", "lora_rank", "lora_alpha", "lora_sites")


def parse(words: list[str], description: str | None = None) -> Any:
    """Return the options of a command line, as `GrpoCommand` or the like.

    Raises ValueError for a file or a run that cannot be read, and for an option there that none is.
    """
    first = {name: x for name, x in vars(FIRST.parse_known_args(words)[0]).items() if x}
    config = read_config(Path(first["config"])) if "config" in first else {}
    first = config | first
    saved = {}
    if "resume" in first and (find_run(first["resume"]) / ARGS).exists():
        saved = read_args(find_run(first["resume"]))
    elif "adapter" in first and (find_run(first["adapter"]) / ARGS).exists():
        of_run = read_args(find_run(first["adapter"]))
        saved = {name: of_run[name] for name in OF_MODEL if name in of_run}
    name = words[0] if words and words[0] in COMMANDS else saved.get("command")
    was = saved.get("command", name)
    require(was == name, f"resume should be a run of {name}, but {first.get('resume')} is of {was}")
    if name is None and "resume" in first:
        raise ValueError(f"{first['resume']} has no {ARGS}: say ppo or grpo, and its arguments")
    if name not in COMMANDS:
        every: Any = tuple(Annotated[c, subcommand(n)] for n, c in COMMANDS.items())
        prog = "python -m utils.train"
        return tyro.cli(Union[every], prog=prog, description=description, args=words)  # noqa: UP007
    path = (first.get("trainer") or saved.get("trainer")) if name in TRAINERS else None
    command = COMMANDS[name]
    if path is not None:
        doc = f"Train by {path}, with its own arguments."
        command = make_command(command.__name__, load_trainer(name, path).args_class, doc)
    options = [f.name for f in fields(command)]
    for key in config:
        near = difflib.get_close_matches(key, options, 1)
        hint = f": did you mean {near[0]}?" if near else ""
        require(key in options, f"{first['config']} should hold options, but {key!r} is none{hint}")
    is_none = {name for name, value in config.items() if value is None}  # null undoes what is saved
    given = write_words({k: x for k, x in saved.items() if k in options and k not in is_none})
    given += write_words(config) + words[words[:1] == [name] :]
    found: Any = tyro.cli(command, prog=f"python -m utils.train {name}", args=given)
    if "resume" in first:
        own = (None, saved.get("name"), find_run(first["resume"]).name)
        said = f"name should be left out beside resume, as a run keeps its folder: {found.name}"
        require(found.name in own, said)
    return found


def read_config(path: Path) -> dict[str, Any]:
    """Return the options of a YAML or JSON file, by the names that fields have."""
    require(path.is_file(), f"config should be a file, but there is no {path}")
    try:
        found = yaml.safe_load(read_text(path))  # JSON is YAML, too
    except yaml.YAMLError as error:
        raise ValueError(f"config should be YAML or JSON, but {path} is not: {error}") from error
    require(isinstance(found, dict), f"config should hold options by name, but holds {found!r}")
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def write_words(options: dict[str, Any]) -> list[str]:
    """Return options as a command line has them: there numbers are read as numbers, also the 1e-3
    that is text in YAML."""
    words: list[str] = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else f"--no{option[1:]}")
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        elif value is not None:
            words.append(f"{option}={value}")
    return words


def load_trainer(name: str, path: str | None) -> type[RLHFTrainer]:
    """Return the class of a command's trainer, or the one that is named as module:class.

    Raises ValueError for one that isn't a trainer of this kind.
    """
    base, plain = TRAINERS[name]
    found: Any = plain if path is None else load_function(path)
    require(
        isinstance(found, type) and issubclass(found, base),
        f"trainer should be a class derived from {base.__name__} for {name}, but is {path}",
    )
    return found
