"""Rebuild the notebooks of chapters.

python -m utils.authoring [STEM ...]        chapters/STEM.ipynb and, executed, solutions/STEM.ipynb
python -m utils.authoring --no-execute      the student's notebooks alone
python -m utils.authoring --checks          outputs of checks alone, in solutions/STEM.ipynb
python -m utils.authoring --without-solutions DIR    for course bundles, into DIR
"""

import argparse
import time
from pathlib import Path

import nbformat
from tqdm import tqdm

from utils.authoring.notebooks import (
    CHAPTERS,
    SOLUTIONS,
    Edition,
    build,
    check_anew,
    embed_results,
    execute,
    get_written_stems,
    is_as_built,
    save_figures,
    write,
)


def build_student(stem: str, folder: Path, folded_solutions: bool = True) -> None:
    """Write a student's notebook, unless somebody has worked in the one that is there."""
    path = folder / f"{stem}.ipynb"
    if path.exists() and not is_as_built(path):
        tqdm.write(
            f"{path} has changes of your own and is left as it is. To renew it, move it away."
        )
        return
    notebook = build(stem, Edition(folded_solutions=folded_solutions))
    embed_results(stem, notebook)
    write(notebook, path)


def build_solved(stem: str) -> None:
    start = time.perf_counter()
    notebook = execute(build(stem, Edition(solved=True)), SOLUTIONS)
    save_figures(stem, notebook)
    embed_results(stem, notebook)
    write(notebook, SOLUTIONS / f"{stem}.ipynb")
    tqdm.write(f"{stem}: executed in {time.perf_counter() - start:.0f} s")


def renew_checks(stem: str) -> None:
    path = SOLUTIONS / f"{stem}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    check_anew(stem, notebook)
    write(notebook, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stems", nargs="*", metavar="STEM", help="chapters, e.g. ch2_ppo; all")
    parser.add_argument("--no-execute", action="store_true", help="the student's notebooks alone")
    parser.add_argument("--checks", action="store_true", help="outputs of checks alone, anew")
    parser.add_argument("--without-solutions", type=Path, metavar="DIR")
    args = parser.parse_args()
    unknown = set(args.stems) - set(get_written_stems())
    if unknown:
        parser.error(f"STEM should be among {get_written_stems()}, but {sorted(unknown)} are not")
    for stem in tqdm(args.stems or get_written_stems(), unit="chapter"):
        if args.without_solutions:
            build_student(stem, args.without_solutions, folded_solutions=False)
            continue
        if args.checks:
            renew_checks(stem)
            continue
        if not args.no_execute:
            build_solved(stem)
        build_student(stem, CHAPTERS)


if __name__ == "__main__":
    main()
