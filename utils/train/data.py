"""Rows, functions and rewards by name: what the command gets in place of Python values."""

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from solutions.ch5_rlvr import combine_rewards
from utils.rewards import call_reward_fn
from utils.validation import require

OWN_FILES: set[str] = set()  # of modules that are not the course's


def load_function(path: str) -> Callable:
    """Import a function by "module:function"; the module may lie in the folder one is in.

    Raises ValueError, with the names that there are, where there is no such function.
    """
    module_name, _, name = path.partition(":")
    module_name = module_name.removesuffix(".py")
    is_path = module_name and name and not module_name.startswith(".")
    require(is_path, f"a function should be given as module:function, not {path!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (module_name + ".").startswith(f"{error.name}."):
            raise  # the module is there, but what it imports is not
        here = f"in {os.getcwd()}, nor among what is installed"
        raise ValueError(f"there is no module {module_name!r} for {path!r} {here}") from error
    if module_name.partition(".")[0] not in ("solutions", "utils"):
        OWN_FILES.add(str(module.__file__))
    found = getattr(module, name, None)
    is_own = {n: getattr(x, "__module__", None) == module_name for n, x in vars(module).items()}
    names = [n for n, own in is_own.items() if own and not n.startswith("_")]
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
        lines = read_text(path).replace("\r\n", "\n").split("\n")
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
        function = load_function(data)
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise ValueError(f"data should need no arguments, but {data} is {error}") from None
        rows = list(function())
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


def read_text(path: Path) -> str:
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
    except ValueError as error:
        raise ValueError(f"{where} should be JSON, but is {line[:60]!r}: {error}") from error


class WeightedRewards:
    """A reward function that adds several up, each times its weight.

    `names` are those of the functions, with their modules where two are called the same. `parts`
    are the rewards that each gave in the last call.

    Raises ValueError unless there is a weight for each function; without weights they are 1.
    """

    def __init__(self, paths: list[str], weights: list[float] | None = None):
        self.weights = weights or [1.0] * len(paths)
        require(
            len(self.weights) == len(paths),
            f"reward_weights should be one for each of {len(paths)} rewards, but are "
            f"{self.weights}",
        )
        self.functions = [load_function(path) for path in paths]
        short = [path.partition(":")[2] for path in paths]
        self.names = [
            # "reward_std" is another metric
            path.replace(":", ".") if short.count(name) > 1 or name == "std" else name
            for path, name in zip(paths, short, strict=True)
        ]
        require(len(set(self.names)) == len(paths), f"reward should name each once, not {paths}")
        self.parts: dict[str, Float[Tensor, "batch"]] = {}

    def __call__(self, samples: list[str], **columns: list) -> Float[Tensor, "batch"]:
        """Return the sum, and keep its parts."""
        found = {}
        for name, function in zip(self.names, self.functions, strict=True):
            try:
                found[name] = call_reward_fn(function, samples, columns)
            except Exception as error:
                error.add_note(f"in the reward {name}")
                raise
        self.parts = found
        return combine_rewards(torch.stack([*found.values()]), self.weights)
