"""Builds the book, `dist/book/index.html`, from the committed notebooks and pages.

    python -m utils.authoring.book [--repository ADDRESS]

Nothing is executed and nothing is fetched, neither when the book is built nor when it is read. A
link that leads nowhere is an error. `make book` makes the environment and calls this.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from sphinx.cmd.build import main as run_sphinx

from utils.authoring.book.sources import ROOT, copy_notebooks, lay_out
from utils.authoring.book.weights import write_weights

OUT = ROOT / "dist" / "book"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repository",
        default="",
        metavar="ADDRESS",
        help="where the repository's files are shown, such as "
        "https://github.com/OWNER/NAME/blob/main; by default, the files around dist/book",
    )
    repository, start = parser.parse_args().repository.rstrip("/"), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        source, built = f"{name}/source", f"{name}/book"
        lay_out(Path(source), repository)
        options = ["-c", str(Path(__file__).parent), "-d", f"{name}/read", "-b", "html"]
        status = run_sphinx([*options, "-j", "auto", "-q", "-W", source, built])
        if status:
            sys.exit(status)
        copy_notebooks(Path(built))
        write_weights(Path(built) / "_static" / "play")
        shutil.rmtree(OUT, ignore_errors=True)
        shutil.copytree(built, OUT)
    print(f"{OUT.relative_to(ROOT)}/index.html: built in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
