"""Computes the sums that pages quote: how many exercises there are, how long they take, and points.

A sum is written as its kind and what it is of:

    count ch4_kl                           exercises, as a word: four
    time ch4_kl                            exercises that are not optional: 1 h 20
    time ch2_ppo:core reading:ch2_ppo:core those on the core path, and the reading of its sections
    time ch2_ppo:deeper                    those off it, the optional ones too
    time ch2_ppo:optional                  optional ones
    time ch2_ppo:1-6 reading:ch2_ppo:1-6   those of sections 1 to 6, and the reading of them
    time all:core                          of all chapters
    time ch4_kl -calc_exact_kl             all but one
    time calc_sft_loss LoraLayer           these
    points ch4_kl                          from tests/points.toml
    needed ch2_ppo                         a sentence: what the core path's cells run off it

In a chapter's source `{{time ch4_kl}}` becomes the sum. On a page that is read as it is, the sum
stands between two comments, `<!--time ch4_kl-->1 h 20<!---->`, and `python -m utils.authoring`
renews it.
"""

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from utils.grading.checks import get_checks, get_reference
from utils.grading.points import list_chapters, load_points
from utils.grading.reference import find_called
from utils.grading.substitution import find_reached

REQUIRED = {"difficulty", "importance", "minutes", "idea", "api", "why"}  # of an exercise's block
FIELDS = REQUIRED | {"also", "helpers", "slow", "inherited", "optional", "milestone"}
ROOT = Path(__file__).parents[2]
CHAPTERS = ROOT / "chapters"
PAGES = ("README.md", "chapters/*.md", "chapters/teaching/*.md", "utils/autograder/*.md")
WORDS_PER_MINUTE = 100  # of technical prose, with its equations, docstrings and code
NUMBERS = """no one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen twenty""".split()
SECTION = re.compile(r"^## (\d+) · .*?( · deeper)?$", re.MULTILINE)
EXERCISE = re.compile(r"^(`{3,})\{exercise\} (\S+)\n(.*?)^\1", re.MULTILINE | re.DOTALL)
UNREAD = re.compile(r"<details>\s*<summary>Solution.*?</details>|<!-- play: .*? -->", re.DOTALL)
CELL = re.compile(r"^```\{code-cell\} .*\n(?::.*\n)*(?P<code>(?:(?!```).*\n)*)", re.MULTILINE)
IN_SOURCE = re.compile(r"(?P<mark>)\{\{(?P<sum>(?:count|time|points|needed) [^}]+)\}\}")
ON_PAGE = re.compile(r"(?P<mark><!--(?P<sum>(?:count|time|points) [^>]+)-->)[^<]*(?=<!---->)")


@dataclass(frozen=True)
class Exercise:
    name: str
    section: int
    minutes: int
    is_optional: bool
    is_core: bool  # on the core path
    is_inherited: bool = False  # only run: there is nothing to write


def read_options(chapter: str, name: str, block: str) -> dict[str, Any]:
    """Read what an exercise's block in a chapter's source says.

    Raises ValueError if it is not YAML, or its fields are not those that a block has.
    """
    where = f"chapters/source/{chapter}.md: the block of {name}"
    try:
        options = yaml.safe_load(block)
        wrong = sorted((options.keys() - FIELDS) | (REQUIRED - options.keys()))
    except (yaml.YAMLError, AttributeError) as error:
        raise ValueError(f"{where} should be YAML: {error}") from None
    if wrong:
        raise ValueError(
            f"{where} should have {sorted(REQUIRED)} and may have {sorted(FIELDS - REQUIRED)}, "
            f"but these lack or are unknown: {wrong}"
        )
    return options


def _split(text: str) -> list[tuple[int, bool, str]]:
    """Return each section of a source or a notebook: its number, whether it is off the core path,
    and its text. What stands above the first has the number 0."""
    parts = re.split(r"^(?=## \d+ · )", text, flags=re.MULTILINE)
    headed = [(SECTION.match(part), part) for part in parts]
    return [(int(m[1]) if m else 0, bool(m and m[2]), part) for m, part in headed]


def _read_source(chapter: str) -> str:
    return (CHAPTERS / "source" / f"{chapter}.md").read_text(encoding="utf-8")


@functools.cache
def read_exercises(chapter: str) -> tuple[Exercise, ...]:
    """Read a chapter's exercises from its source, each with the number of its section."""
    found = []
    for section, is_deeper, text in _split(_read_source(chapter)):
        for _, name, body in EXERCISE.findall(text):
            options = read_options(chapter, name, body)
            optional, inherited = bool(options.get("optional")), bool(options.get("inherited"))
            is_core = not (optional or is_deeper)
            exercise = (name, section, options["minutes"], optional, is_core, inherited)
            found.append(Exercise(*exercise))
    return tuple(found)


@functools.cache
def find_needed(chapter: str) -> tuple[Exercise, ...]:
    """Return the exercises off the core path that have to be written for it: its cells and its
    exercises run them, themselves or through the solutions."""
    exercises, names = get_checks(chapter), vars(get_reference(chapter))
    waiting = [exercise.name for exercise in read_exercises(chapter) if exercise.is_core]
    for section, is_deeper, text in _split(_read_source(chapter)):
        for cell in CELL.finditer(text) if section and not is_deeper else ():
            waiting += find_reached(compile(cell["code"], chapter, "exec"), names, exercises)
    reached: set[str] = set()
    while waiting:
        reached.add(name := waiting.pop())
        waiting += {*find_called(chapter, name)} - reached
    found = [e for e in read_exercises(chapter) if e.name in reached]
    return tuple(e for e in found if not (e.is_core or e.is_inherited))


def say_needed(chapter: str) -> str:
    """Say which exercises off the core path it needs where there are no solutions."""
    sections: dict[int, list[str]] = {}
    for exercise in find_needed(chapter):
        sections.setdefault(exercise.section, []).append(f"`{exercise.name}`")
    if not sections:
        return ""
    names = "; ".join(f"{', '.join(found)} (section {n})" for n, found in sections.items())
    time = say_time(sum(exercise.minutes for exercise in find_needed(chapter)))
    return (
        "There are no solutions here to fill in, so the core path's experiments need some of those "
        f"as well: {names}. That's about {time}."
    )


def count_reading(chapter: str, part: str = "") -> float:
    """Count the minutes of reading in a part of the student's notebook: sections (`1-6`), `core` or
    `deeper`; by default in all of it.

    Hints, docstrings and code that is shown count; solutions and folded cells do not. Without a
    notebook it's 0: build a new chapter twice.
    """
    path = CHAPTERS / f"{chapter}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else []
    unfolded = [c for c in cells if not c["metadata"].get("jupyter", {}).get("source_hidden")]
    shown = "\n".join(UNREAD.sub("", "".join(cell["source"])) for cell in unfolded)
    read = [text for n, deeper, text in _split(shown) if _is_in(part, n, not deeper)]
    return sum(len(text.split()) for text in read) / WORDS_PER_MINUTE


def _is_in(part: str, section: int, is_core: bool) -> bool:
    if part in ("core", "deeper"):
        return is_core == (part == "core")
    first, _, last = part.partition("-")
    return not part or int(first) <= section <= int(last)


def calc_sum(expression: str) -> str:
    """Calculate a sum and say it as a page does: `1 h 20`, `four`, `73`.

    Raises ValueError for a term that names no chapter and no exercise.
    """
    kind, *terms = expression.split()
    if kind == "needed":
        return say_needed(terms[0])
    named = {e.name: e for chapter in list_chapters() for e in read_exercises(chapter)}
    exercises: dict[str, Exercise] = {}
    reading = 0.0
    for term in terms:
        name, *parts = term.removeprefix("reading:").removeprefix("-").split(":")
        is_optional = "optional" in parts
        part = "".join(p for p in parts if p != "optional")
        chapters = list_chapters() if name == "all" else [name]
        if name not in {*list_chapters(), *named, "all"}:
            raise ValueError(f"{expression!r}: there is no chapter and no exercise {name!r}")
        if term.startswith("reading:"):
            reading += sum(count_reading(chapter, part) for chapter in chapters)
        elif term.startswith("-"):
            exercises.pop(named[name].name, None)
        elif name in named:
            exercises[name] = named[name]
        else:
            found = [e for chapter in chapters for e in read_exercises(chapter)]
            found = [e for e in found if _is_in(part, e.section, e.is_core)]
            if kind == "time" and part != "deeper":
                found = [e for e in found if e.is_optional == is_optional]
            exercises |= {e.name: e for e in found}
    if kind == "count":
        return NUMBERS[len(exercises)]
    if kind == "points":
        rows = {n: row for chapter in load_points().table.values() for n, row in chapter.items()}
        if missing := [name for name in exercises if name not in rows]:
            raise ValueError(f"{missing} have no points yet: python -m utils.authoring --points")
        return f"{sum(rows[name]['points'] for name in exercises):g}"
    return say_time(reading + sum(e.minutes for e in exercises.values()))


def say_time(minutes: float) -> str:
    """Say minutes, rounded to five: `50 min`, `1 h`, `2 h 05`; nothing for none."""
    hours, rest = divmod(5 * round(minutes / 5), 60)
    if not hours:
        return f"{rest} min" if rest else ""
    return f"{hours} h {rest:02}" if rest else f"{hours} h"


def fill(path: Path, pattern: re.Pattern = ON_PAGE) -> str:
    """Return the text of a page, or with `IN_SOURCE` of a chapter's source, with its sums.

    Raises ValueError, with the file's name, for a sum of what is not there.
    """
    text = path.read_text(encoding="utf-8")
    try:
        return pattern.sub(lambda match: match["mark"] + calc_sum(match["sum"]), text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def fill_pages() -> None:
    """Renew the sums on all pages."""
    for path in (path for pattern in PAGES for path in ROOT.glob(pattern)):
        if (filled := fill(path)) != path.read_text(encoding="utf-8"):
            path.write_text(filled, encoding="utf-8")
