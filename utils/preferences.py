"""Preferences: pairs of completions of which one was preferred, and the files that hold them."""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.prompts import Prompt, is_prompt
from utils.validation import require

KEYS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True)
class Preferences:
    """Hold for each prompt the completion that was preferred, and the other one.

    Raises ValueError unless there is one of each for each prompt.
    """

    prompts: Sequence[Prompt]
    chosen: Sequence[str]
    rejected: Sequence[str]

    def __post_init__(self):
        lengths = {len(self.prompts), len(self.chosen), len(self.rejected)}
        require(
            len(lengths) == 1,
            f"prompts, chosen and rejected should have equal lengths, but have "
            f"{len(self.prompts)}, {len(self.chosen)} and {len(self.rejected)}",
        )

    def __len__(self) -> int:
        return len(self.prompts)


def load_preferences(path: str | Path, max_rows: int | None = None) -> Preferences:
    """Read preferences from a file of JSON lines, or of parquet.

    Each line, or row, has "prompt", "chosen" and "rejected", as TRL's datasets have them: strings,
    or chats of messages, where chosen and rejected are the assistant's last message, or the whole
    conversation with or without "prompt". A chat stays one; its last message is the completion.

    Raises ValueError, with the number of the line, for one that is something else.
    """
    path = Path(path)
    require(path.is_file(), f"path should be a file, but {path} is not there")
    require(max_rows is None or max_rows >= 1, f"max_rows should be at least 1: {max_rows}")
    if path.suffix == ".parquet":
        from datasets import Dataset  # takes a second to import

        rows: Iterable[tuple[int, Any]] = enumerate(Dataset.from_parquet(str(path)), 1)
    else:
        rows = _read_lines(path)
    numbered = itertools.islice(rows, max_rows)
    found = [_read_row(row, f"{path.name}, row {number}") for number, row in numbered]
    require(len(found) > 0, f"{path} should hold at least one preference, but holds none")
    prompts, chosen, rejected = zip(*found, strict=True)
    return Preferences(prompts, chosen, rejected)


def append_preference(path: str | Path, prompt: Prompt, chosen: str, rejected: str) -> None:
    """Append one preference to a file of JSON lines, and return when it is on disk."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    row = dict(zip(KEYS, (prompt, chosen, rejected), strict=True))
    is_open = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # its last line
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * is_open + json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path.name}, row {number} should be JSON, but is not: {error}"
                ) from error


def _read_row(row: Any, where: str) -> tuple[Prompt, str, str]:
    require(isinstance(row, dict), f"{where} should be an object with {KEYS}, but is {row!r:.80}")
    for key in ("chosen", "rejected"):
        require(key in row, f"{where} should have {key!r}, but has {sorted(row)}")
        is_right = isinstance(row[key], str) or is_prompt(row[key])
        require(is_right, f"{where}: {key} should be text or messages, but is {row[key]!r:.80}")
    kinds = {isinstance(row[key], str) for key in ("chosen", "rejected")}
    require(len(kinds) == 1, f"{where}: chosen and rejected should both be text or both messages")
    prompt = row.get("prompt")
    if kinds == {True}:
        said = f"{where}: prompt should be text or messages, but is {prompt!r:.80}"
        require(is_prompt(prompt), said)
        return prompt, row["chosen"], row["rejected"]
    (*before, chosen), (*other_before, rejected) = row["chosen"], row["rejected"]
    said = f"{where}: chosen and rejected should"
    is_answer = chosen["role"] == rejected["role"] == "assistant"
    require(is_answer, f"{said} end with a message of the assistant")
    require(before == other_before, f"{said} differ in the last message")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    before = before or prompt
    require(
        is_prompt(before) and (prompt is None or list(prompt) == list(before)),
        f"{where} should have the messages before the answer, in prompt or in chosen and rejected",
    )
    return before, chosen["content"], rejected["content"]
