"""Rebuild the notebooks of chapters.

python -m utils.authoring [CHAPTER ...]     the student's notebook and, executed, the solved one
python -m utils.authoring --no-execute      the student's notebooks alone
python -m utils.authoring --checks          text and outputs of checks, in solutions/CHAPTER.ipynb
python -m utils.authoring --without-solutions DIR    for course bundles, into DIR
python -m utils.authoring --points          new exercises into tests/points.toml; edits stay
"""

import argparse
import json
import re
import time
from pathlib import Path

import nbformat
from tqdm import tqdm

from utils.authoring.notebooks import (
    CHAPTERS,
    ROOT,
    SOLUTIONS,
    Edition,
    build,
    check_anew,
    embed_results,
    execute,
    get_written_chapters,
    is_as_built,
    save_figures,
    save_loop,
    save_opening,
    write,
)
from utils.authoring.sums import fill_pages, read_exercises
from utils.course.session import CORE_PATH
from utils.grading.checks import get_chapters, get_checks
from utils.grading.points import FILE, fill_points, load_points

FORM = ROOT / ".github" / "ISSUE_TEMPLATE" / "right-answer-rejected.yml"
OFFERED = re.compile(r"(?<=      options:\n)(?: {8}- ch\d+_\w+\n)+")


def build_student(chapter: str, folder: Path, folded_solutions: bool = True) -> None:
    """Write a student's notebook, unless somebody has worked in the one that is there."""
    path = folder / f"{chapter}.ipynb"
    if path.exists() and not is_as_built(path):
        tqdm.write(
            f"{path} has changes of your own and is left as it is. To renew it, move it away."
        )
        return
    notebook = build(chapter, Edition(folded_solutions=folded_solutions))
    solved = SOLUTIONS / f"{chapter}.ipynb"
    executed = nbformat.read(solved, as_version=4) if solved.exists() else notebook
    embed_results(chapter, notebook, executed)
    write(notebook, path)


def build_solved(chapter: str) -> None:
    start = time.perf_counter()
    notebook = execute(build(chapter, Edition(solved=True)), SOLUTIONS)
    save_figures(chapter, notebook)
    save_opening(chapter, notebook)
    embed_results(chapter, notebook, notebook)
    write(notebook, SOLUTIONS / f"{chapter}.ipynb")
    tqdm.write(f"{chapter}: executed in {time.perf_counter() - start:.0f} s")


def renew_checks(chapter: str) -> None:
    path = SOLUTIONS / f"{chapter}.ipynb"
    if not path.exists():
        raise ValueError(f"{path} is not there: build it without --checks first")
    notebook = nbformat.read(path, as_version=4)
    check_anew(chapter, notebook)
    embed_results(chapter, notebook, notebook)
    write(notebook, path)


def add_chapters(parser: argparse.ArgumentParser) -> None:
    """Let a command take names of chapters, by default all."""
    known = get_written_chapters()

    def read(name: str) -> str:  # before Python 3.12, `choices` would refuse that none is named
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
        return name

    said = "chapters, e.g. ch2_ppo; all"
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", type=read, help=said)


def fill_form(text: str) -> str:
    """Return the text of an issue form whose list of chapters is complete."""
    return OFFERED.sub("".join(f"        - {name}\n" for name in get_written_chapters()), text)


def format_core_path() -> str:
    """Format what `progress()` reads: the exercises on the core path, by chapter."""
    chapters = {c: [e.name for e in read_exercises(c) if e.is_core] for c in get_written_chapters()}
    return json.dumps(chapters, indent=1) + "\n"


def sum_points() -> dict[str, dict[str, float]]:
    """Sum the points of each exercise's checks, by chapter."""
    return {
        chapter: {
            name: sum(c.points for c in checks) for name, checks in get_checks(chapter).items()
        }
        for chapter in get_chapters()
    }


def add_points() -> str:
    """Give each exercise that tests/points.toml lacks the points of its checks, and say which."""
    worth, known = sum_points(), load_points(FILE).table
    added = [
        f"added {name}, {points:g} points"
        for chapter, exercises in worth.items()
        for name, points in exercises.items()
        if name not in known.get(chapter, {})
    ]
    FILE.write_text(fill_points(worth, FILE), encoding="utf-8")
    return "\n".join(added) or f"{FILE} had every exercise"


def rebuild(args: argparse.Namespace) -> None:
    """Build what the command line asks for."""
    if args.points:
        print(add_points())
        return
    CORE_PATH.write_text(format_core_path(), encoding="utf-8")
    FORM.write_text(fill_form(FORM.read_text(encoding="utf-8")), encoding="utf-8")
    with tqdm(args.chapters or get_written_chapters(), unit="chapter") as bar:
        for chapter in bar:
            save_loop(chapter)
            if args.without_solutions:
                build_student(chapter, args.without_solutions, folded_solutions=False)
            elif args.checks:
                renew_checks(chapter)
            else:
                if not args.no_execute:
                    build_solved(chapter)
                build_student(chapter, CHAPTERS)
    fill_pages()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_chapters(parser)
    parser.add_argument("--no-execute", action="store_true", help="the student's notebooks alone")
    parser.add_argument("--checks", action="store_true", help="outputs of checks alone, anew")
    parser.add_argument("--points", action="store_true", help="fill tests/points.toml, and end")
    parser.add_argument("--without-solutions", type=Path, metavar="DIR")
    try:
        rebuild(parser.parse_args())
    except SyntaxError as error:
        parser.exit(1, f"{error.filename}, line {error.lineno}: {error.msg}; mend that first\n")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("solutions", "tests"):
            raise
        parser.exit(1, f"{error}: a chapter needs solutions/NAME.py and tests/checks/NAME.py\n")
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
