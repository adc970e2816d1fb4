"""Builds the slides, `dist/slides/index.html` and a deck per chapter.

    python -m utils.authoring.slides [--out FOLDER]

The decks are read from chapters/teaching/slides, and their figures are the chapters' own. Nothing
is fetched, neither when the slides are built nor when they are shown. `make slides` makes the
environment and calls this.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from sphinx.cmd.build import main as run_sphinx

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DECKS = ROOT / "chapters" / "teaching" / "slides"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "slides", metavar="FOLDER")
    out, start = parser.parse_args().out, time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        built = f"{name}/slides"
        options = ["-c", str(HERE), "-d", f"{name}/read", "-b", "revealjs", "-q", "-W"]
        if status := run_sphinx([*options, str(DECKS), built]):
            sys.exit(status)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(built, out)
    print(f"{out}/index.html: built in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
