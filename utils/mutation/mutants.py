"""Automatic mutants of the reference: what the checks let through that nobody thought of.

    python -m utils.mutation [CHAPTER ...]      writes runs/mutants.md

Each definition of a chapter's exercises, and each helper that they call, is changed in one place at
a time: operators, signs, numbers, slices, dropped detach, swapped arguments. The checks of the
exercise should kill each one; what survives is listed in `tests/accepted_mutants.toml` with the
reason why it is the same function, or open to the student ("open: ..."), or the run fails.
"""

import argparse
import ast
import functools
import multiprocessing
import os
import re
import sys
import textwrap
import tomllib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from utils.grading import reference
from utils.grading.checks import get_chapters, get_checks
from utils.grading.judging import get_quick_checks, grade
from utils.grading.observation import StudentNames
from utils.grading.substitution import build_module
from utils.mutation.operators import get_names, mutate

ACCEPTED = Path(__file__).parents[2] / "tests" / "accepted_mutants.toml"
OUT = Path("runs/mutants.md")
# Definitions that tests/course covers instead: what records what is shown, and what checks a
# trainer's arguments beyond the contract.
TESTED_ELSEWHERE = re.compile(r"Args\.__post_init__$|(\.|^)_*record_\w+$")
MADE_AND_CALLED = {"__init__", "__post_init__", "train"}  # methods that run without being named


@dataclass(frozen=True)
class Mutant:
    """One change of one definition. `name` is unique in the chapter and has no line number."""

    chapter: str
    within: str
    name: str
    source: str  # of the chapter


# --- Mutants of a chapter -----------------------------------------------------------------------


@functools.cache
def generate(chapter: str) -> tuple[Mutant, ...]:
    """Return all mutants of a chapter: the changes of what its exercises reach."""
    definitions = reference.get_definitions(chapter)
    lines = reference.get_source(chapter).splitlines()
    found: list[Mutant] = []
    for within in reach(chapter):
        node = definitions[within]
        if not isinstance(node, ast.FunctionDef):
            continue
        first, last = reference.get_lines(chapter, within)
        before = ast.unparse(node)
        for name, text in mutate(node, find_converters()):
            if text != before:
                changed = textwrap.indent(text, " " * node.col_offset)
                source = "\n".join([*lines[:first], changed, *lines[last:]])
                found.append(Mutant(chapter, within, f"{within}: {name}", source))
    return tuple(found)


@functools.cache
def find_converters() -> frozenset[str]:
    """Return the functions of all chapters that give back another tensor of their first argument's
    kind, by their annotations: a call without which the program still runs."""
    return frozenset(
        name
        for chapter in get_chapters()
        for name, node in reference.get_definitions(chapter).items()
        if isinstance(node, ast.FunctionDef) and "." not in name
        if node.returns and node.args.args
        if "Tensor" in ast.unparse(node.returns)
        if ast.dump(node.returns) == ast.dump(node.args.args[0].annotation or node)
    )


# --- What the exercises reach -------------------------------------------------------------------


def _is_smoke_test(chapter: str, name: str) -> bool:
    """Return whether slow checks are all that a definition has: they detect almost nothing."""
    return name in get_checks(chapter) and not get_quick_checks(chapter, name)


@functools.cache
def reach(chapter: str) -> dict[str, tuple[str, ...]]:
    """Return each definition that a chapter's exercises run, and the exercises that reach it."""
    graded = get_checks(chapter)
    exercises = [exercise for exercise in graded if not _is_smoke_test(chapter, exercise)]
    reached: dict[str, list[str]] = {}
    for exercise in exercises:
        waiting, seen = [exercise], set()
        while waiting:
            name = waiting.pop()
            if name in seen or TESTED_ELSEWHERE.search(name) or _is_smoke_test(chapter, name):
                continue
            seen.add(name)
            if name in graded and name != exercise and "." not in name:
                continue  # has checks of its own
            reached.setdefault(name, []).append(exercise)
            waiting += _find_used(chapter, name)
    for name, mine in reached.items():
        owner = name.rpartition(".")[0]
        if name in graded:  # its own exercise's business
            mine[:] = [name]
        elif owner:  # other methods of the class may depend on it by what it leaves behind
            mine += [e for e in exercises if e.startswith(f"{owner}.") and e not in mine]
    return {name: tuple(mine) for name, mine in reached.items()}


def _find_used(chapter: str, name: str) -> list[str]:
    """Return the definitions of a chapter that one of them runs: a class, all of its methods."""
    definitions = reference.get_definitions(chapter)
    node = definitions[name]
    if not isinstance(node, ast.FunctionDef):
        return [d for d in definitions if d.rpartition(".")[0] == name]
    owner, names = name.rpartition(".")[0], get_names(node)
    used = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)} - MADE_AND_CALLED
    mine = {f"{owner}.{method}" for method in MADE_AND_CALLED}
    methods = [d for d in definitions if "." in d and (d in mine or d.rpartition(".")[2] in used)]
    return methods + [d for d in definitions if d in names]


# --- Running them -------------------------------------------------------------------------------


def is_killed(mutant: Mutant) -> bool:
    """Return whether a check rejects a mutant, or it can't be built; one that loops is stopped."""
    try:
        student = StudentNames(vars(build_module(mutant.chapter, mutant.source)))
    except Exception:
        return True
    return any(
        not grade(check, student).passed
        for exercise in reach(mutant.chapter)[mutant.within]
        for check in get_quick_checks(mutant.chapter, exercise)
    )


@functools.cache
def get_accepted(chapter: str) -> dict[str, str]:
    """Return the mutants of a chapter that no check has to reject, each with the reason."""
    return tomllib.loads(ACCEPTED.read_text(encoding="utf-8")).get(chapter, {})


def find_alive(mutants: list[Mutant]) -> list[Mutant]:
    """Find the mutants that no check rejects, in as many processes as there are processors."""
    torch.set_num_threads(1)  # forked children of a process that has used two hang
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        killed = pool.map(is_killed, mutants, chunksize=4)
        pairs = zip(mutants, tqdm(killed, total=len(mutants), unit="mutant"), strict=True)
        return [mutant for mutant, is_dead in pairs if not is_dead]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "chapters", nargs="*", metavar="CHAPTER", help="such as ch2_ppo (default: all)"
    )
    parser.add_argument("--only", default="", help="definitions whose name contains this")
    args = parser.parse_args()
    if unknown := set(args.chapters) - set(get_chapters()):
        parser.error(f"CHAPTER should be among {get_chapters()}, but {sorted(unknown)} are not")
    chapters = args.chapters or get_chapters()
    mutants = [m for chapter in chapters for m in generate(chapter) if args.only in m.within]
    if not mutants:
        parser.error(f"no definition of {', '.join(chapters)} has {args.only!r} in its name")
    alive = {(mutant.chapter, mutant.name) for mutant in find_alive(mutants)}
    accepted = {(chapter, name) for chapter in chapters for name in get_accepted(chapter)}
    survived = [f"{chapter} `{name}` survived" for chapter, name in sorted(alive - accepted)]
    stale = [
        f"{ACCEPTED.name}: {chapter} `{name}` is killed, or is no mutant any more"
        for chapter, name in sorted(accepted - alive)
    ]
    wrong = survived + (stale if not args.only else [])
    n_killed = len(mutants) - len(alive)
    report = [
        f"{n_killed} of {n_killed + len(survived)} mutants are killed.",
        f"{len(alive) - len(survived)} more survive, as `{ACCEPTED.name}` allows.",
        *(f"- {line}" for line in wrong),
    ]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text("\n".join([*report, ""]))
    print(*report, sep="\n")
    sys.exit(bool(wrong))
