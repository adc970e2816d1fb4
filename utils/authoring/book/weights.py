"""Writes the weights that the book's pages run the model with, as scripts: `_static/play/*.js`.

A page that is opened as a file may load scripts and nothing else, so a file of weights is a script
that hands over its safetensors in base64, in float16.
"""

import base64
import json
import struct
from pathlib import Path

from utils.authoring.book.sources import ROOT
from utils.models.corpus import NEGATIVE_WORDS, POSITIVE_WORDS

MODEL = ROOT / "utils" / "models" / "embedded"
ADAPTERS = ROOT / "chapters" / "adapters"


def write_weights(folder: Path) -> None:
    """Write the base model with its tokenizer, its config and the words that reviews are judged by,
    and every adapter, into `folder`."""
    files = ("tokenizer", "config")
    base = {name: json.loads((MODEL / f"{name}.json").read_bytes()) for name in files}
    base["words"] = {"positive": POSITIVE_WORDS, "negative": NEGATIVE_WORDS}
    write_script(folder, "base", to_half((MODEL / "model.safetensors").read_bytes()), base)
    for path in ADAPTERS.glob("*.safetensors"):
        write_script(folder, path.stem, path.read_bytes(), {})


def write_script(folder: Path, name: str, weights: bytes, more: dict) -> None:
    """Write a script that hands over these weights, in base64, by this name."""
    data = {"weights": base64.b64encode(weights).decode()} | more
    script = f"play.receive({json.dumps(name)}, {json.dumps(data)});\n"
    (folder / f"{name}.js").write_text(script, encoding="utf-8")


def to_half(data: bytes) -> bytes:
    """Return a safetensors file of float32 in float16: the length of a header, the header in JSON,
    and the numbers, whose places the header says."""
    start = 8 + struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:start])
    for name, entry in header.items():
        if name != "__metadata__":
            if entry["dtype"] != "F32":
                raise ValueError(f"data should be float32, but {name} is {entry['dtype']}")
            entry["dtype"] = "F16"
            entry["data_offsets"] = [offset // 2 for offset in entry["data_offsets"]]
    count = (len(data) - start) // 4
    halves = struct.pack(f"<{count}e", *struct.unpack_from(f"<{count}f", data, start))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + halves
