"""What a chapter's notebook calls: `from utils.course import check, start, ...`."""

import importlib.util
import sys
import tempfile
import warnings
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
NEEDED = ("torch", "transformer_lens", "einops", "jaxtyping", "matplotlib", "nbformat", "tabulate")
_missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if _missing or sys.version_info < (3, 11):
    if "torch" not in _missing:  # it stays: Colab's, for one, is the one that knows the GPU
        _lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines(keepends=True)
        REQUIREMENTS = Path(tempfile.gettempdir(), "course-requirements.txt")
        REQUIREMENTS.write_text("".join(x for x in _lines if not x.startswith("torch==")))
    raise ImportError(
        f"The course needs Python 3.11 or later and packages that are not here: {_missing}. Run\n"
        f"    %pip install -r {REQUIREMENTS}\n"
        "in a cell, restart the kernel, and run this cell again."
    )

warnings.filterwarnings("ignore", message="IProgress not found")  # bars of text will do

if "ipykernel" in sys.modules:
    print("Importing PyTorch and TransformerLens: this takes 5 to 20 s ...", flush=True)

# Only now, as these import what may be missing.
from utils.course.session import (  # noqa: E402
    catch_up,
    check,
    preview,
    progress,
    shorten,
    show_result,
    start,
)

__all__ = ["catch_up", "check", "preview", "progress", "shorten", "show_result", "start"]
