"""What a chapter gives of the course, and what of the course lies among a submission's files.

All of it is found in the course itself: what a notebook imports, in its source and its solutions,
and what is the course's own file, by the definitions in it. For the trusted side.
"""

import ast
import functools
import importlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

from utils.autograder.facades import COURSE
from utils.grading.checks import get_chapters, get_checks
from utils.grading.extraction import digest_definitions
from utils.grading.reference import SOURCES, find_blocks, get_companions, get_source

# What the set-up cell of every notebook imports.
SETUP = {
    "utils.course": {"catch_up", "check", "preview", "progress", "shorten", "show_result", "start"}
}
# Modules without an answer to any exercise: their public names are given in every chapter, as an
# older notebook may import others of them than today's.
WITHOUT_ANSWERS = ("utils.plotting", "utils.tracking", "utils.validation")
# What share of a chapter's solutions a file of the course has as they are, of those that have so
# many nodes that nobody else writes them alike.
COPIED_SHARE, LONG_NODES = 0.75, 40
MARKED_SHARE = 1 / 3  # and in a file that begins as one of the course does, of whatever version
PART_SHARE = 0.25  # in each of several files that are a copy together
MAX_SAID = 5  # imports that are named


# --- Imports --------------------------------------------------------------------------------------


@functools.cache
def get_given(chapter: str) -> dict[str, frozenset[str]]:
    """Return by module the names of `utils` that a chapter gives: those that its notebook imports,
    in its code cells and at the head of its solutions, and those that answer nothing in it."""
    text = (SOURCES / f"{chapter}.md").read_text(encoding="utf-8")
    cells = [cell for _, cell in find_blocks(text, "code-cell")]
    plain = [re.sub(r"^(:\w+:|[%!]).*$", "", cell, flags=re.M) for cell in cells]  # tags, magics
    given: dict[str, set[str]] = defaultdict(set, {m: set(names) for m, names in SETUP.items()})
    for source in (get_source(chapter), *plain):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and _is_of(node.module, "utils"):
                given[str(node.module)] |= {alias.name for alias in node.names}
    for module in WITHOUT_ANSWERS:
        names = vars(importlib.import_module(module))
        given[module] |= {name for name in names if not name.startswith("_")}
    return {module: frozenset(names) for module, names in given.items()}


def say_not_given(
    imports: Iterable[tuple[str, str, str]], chapters: Collection[str], own: Collection[str]
) -> list[str]:
    """Say which imports of the course's packages none of these chapters gives.

    imports: place, module and name, which is empty for a whole module. own: the modules that the
    submission has itself.
    """
    why = f"the notebook of {', '.join(chapters)} does not import it"
    said = {
        f"{place}: {module}{'.' * bool(name)}{name} is left out: {why}": None
        for place, module, name in imports
        if _is_of(module, *COURSE)
        and not {module, f"{module}.{name}"} & {*own}
        and not any(_is_given(chapter, module, name) for chapter in chapters)
    }
    more = [f"and {len(said) - MAX_SAID} more imports like these"]
    return [*said][:MAX_SAID] + more * (len(said) > MAX_SAID)


def _is_of(module: str | None, *packages: str) -> bool:
    return str(module).partition(".")[0] in packages


def _is_given(chapter: str, module: str, name: str) -> bool:
    """Return whether a chapter gives a name of a module, or something that lies in it."""
    chapters, given = get_chapters(), get_given(chapter)
    earlier = [f"solutions.{other}" for other in chapters[: chapters.index(chapter)]]
    if module in earlier or name in given.get(module, ()):
        return True
    inner = module if name in ("", "*") else f"{module}.{name}"
    return any(f"{m}.".startswith(f"{inner}.") for m in (*given, *earlier, "solutions"))


# --- The course's own files -----------------------------------------------------------------------


def find_copy(definitions: dict[str, list[str]], first_line: str = "") -> str | None:
    """Return the chapter whose solutions a file holds as the course has them; None if it is
    somebody's work.

    definitions: digests by name, of `extraction.digest_definitions`. All long ones of a chapter
    count: a one-liner that everybody writes alike, or a few solutions that were copied from the
    notebook, make no file of the course. first_line: of the file's docstring.
    """
    for number, chapter in enumerate(get_chapters()):
        is_marked = first_line.startswith(f"Chapter {number}: ")
        least = MARKED_SHARE if is_marked else COPIED_SHARE
        if calc_copied_share(definitions, chapter) >= least:
            return chapter
    return None


def find_parts(files: dict[str, dict[str, list[str]]]) -> dict[str, str]:
    """Return files that are the course's solutions of a chapter taken together, by name, with the
    chapter: those that hold a quarter of them or more."""
    together: dict[str, list[str]] = defaultdict(list)
    for definitions in files.values():
        for name, digests in definitions.items():
            together[name] += digests
    chapter = find_copy(together)
    if chapter is None:
        return {}
    shares = {name: calc_copied_share(definitions, chapter) for name, definitions in files.items()}
    return {name: chapter for name, share in shares.items() if share >= PART_SHARE}


def calc_copied_share(definitions: dict[str, list[str]], chapter: str) -> float:
    """Return the share of a chapter's long definitions that are as in the solutions."""
    solved = _digest_solutions(chapter)
    return sum(digest in definitions.get(n, ()) for n, digest in solved.items()) / len(solved)


@functools.cache
def _digest_solutions(chapter: str) -> dict[str, str]:
    """Return digests of the exercises' solutions, and of what is written with them, if long."""
    companions = get_companions(chapter)
    names = {*get_checks(chapter)}.union(*companions.values())
    found = digest_definitions(ast.parse(get_source(chapter)).body)
    last = {name: digests[-1] for name, digests in found.items() if name in names}
    return {name: digest for name, (digest, size) in last.items() if size >= LONG_NODES}


@functools.cache
def list_solved() -> frozenset[str]:
    """Return the names of all chapters whose definitions are compared."""
    return frozenset().union(*(_digest_solutions(chapter) for chapter in get_chapters()))


def is_in_solutions(entry: str) -> bool:
    """Return whether a file lies in a folder "solutions", or in a zip of that name."""
    return PurePosixPath(entry.casefold().replace(".zip/", "/")).parent.name == "solutions"
