"""Reading the catalogue of mistakes, `tests/mistakes/<chapter>/<exercise>.md`, without torch.

An entry is a heading with the mistake's name and the check that rejects it, what a good teacher
says of it, and the change: whole lines of the reference as a diff, or a function to stand in its
place.

    ## lambda_left_out, rejected by random_rollouts
    The recursion decays by gamma alone. Each step back multiplies by gamma * lam.
    ```diff
    -running = delta + gamma * lam * running
    +running = delta + gamma * running
    ```

A diff may hold lines that stay, and names the definition that it is in if that is not the exercise
(```` ```diff select_completion ````). A function (```` ```python ````) comes after the chapter's
code, so that the reference can still be called under another name.

    python -m utils.grading.catalogue        which entries no longer fit the solutions
"""

import ast
import functools
import re
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from utils.chapters import sort_chapters

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "mistakes"
MAX_PER_EXERCISE = 8
_ENTRY = re.compile(
    r"(?P<name>\w+), rejected by (?P<check>\w+)\n"
    r"(?P<sentence>(?:(?!^```).)+\.)\n"
    r"(?P<changes>(?:^```.*?^```\n*)+)",
    re.MULTILINE | re.DOTALL,
)
_FENCE = re.compile(r"^```(diff|python) *([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Diff:
    """Lines of one definition that become others, as they stand but for their indentation."""

    within: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Mistake:
    """One entry. `code` is a whole definition, and then there are no `diffs`."""

    chapter: str
    exercise: str
    name: str
    sentence: str
    diffs: tuple[Diff, ...]
    code: str
    rejected_by: str

    @property
    def place(self) -> str:
        return f"tests/mistakes/{self.chapter}/{self.exercise}.md, {self.name}"


# --- Reading ------------------------------------------------------------------------------------


@functools.cache
def read_chapter(chapter: str) -> tuple[Mistake, ...]:
    """Return the mistakes of a chapter, by exercise and in their order; none without its folder.

    Raises ValueError, with the place, for an entry that is not as it should be.
    """
    found = []
    for path in sorted((FOLDER / chapter).glob("*.md")):
        title, *entries = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if title.strip() != f"# {path.stem}":
            raise ValueError(f"{path.name} should begin with '# {path.stem}'")
        found += [_read_entry(chapter, path.stem, entry) for entry in entries]
    names = Counter((mistake.exercise, mistake.name) for mistake in found)
    if twice := [f"{exercise} {name}" for (exercise, name), n in names.items() if n > 1]:
        raise ValueError(f"{chapter}: the names should differ, but these do not: {twice}")
    return tuple(found)


def _read_entry(chapter: str, exercise: str, text: str) -> Mistake:
    place = f"tests/mistakes/{chapter}/{exercise}.md, {text.partition(',')[0]}"
    entry = _ENTRY.fullmatch(text)
    if entry is None:
        raise ValueError(
            f"{place}: an entry should be '## name, rejected by check', a sentence, and a change"
        )
    fences = _FENCE.findall(entry["changes"])
    codes = [lines for kind, _, lines in fences if kind == "python"]
    diffs = [_read_diff(f[1] or exercise, f[2], place) for f in fences if f[0] == "diff"]
    if len(codes) != (0 if diffs else 1):
        raise ValueError(f"{place}: there should be diffs or one function")
    sentence = " ".join(entry["sentence"].split())
    name, check = entry["name"], entry["check"]
    return Mistake(chapter, exercise, name, sentence, tuple(diffs), "".join(codes), check)


def _read_diff(within: str, text: str, place: str) -> Diff:
    signs = [line[:1] or " " for line in text.splitlines()]
    lines = textwrap.dedent("\n".join(line[1:] for line in text.splitlines())).split("\n")
    if wrong := set(signs) - {"-", "+", " "}:
        raise ValueError(f"{place}: its lines should begin with -, + or a space, not {wrong}")
    before = tuple(line for sign, line in zip(signs, lines, strict=True) if sign != "+")
    after = tuple(line for sign, line in zip(signs, lines, strict=True) if sign != "-")
    if before == after or not any(before):
        raise ValueError(f"{place}: a diff should change lines, and show where")
    return Diff(within, before, after)


# --- Applying -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def find_definitions(source: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Return functions, classes and methods by dotted name."""
    found: dict[str, ast.FunctionDef | ast.ClassDef] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
    for cls in [node for node in found.values() if isinstance(node, ast.ClassDef)]:
        methods = [node for node in cls.body if isinstance(node, ast.FunctionDef)]
        found |= {f"{cls.name}.{method.name}": method for method in methods}
    return found


def get_span(node: ast.FunctionDef | ast.ClassDef) -> tuple[int, int]:
    """Return the first line of a definition with its decorators, from 0, and the line after it."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return first - 1, node.end_lineno or first


def apply(source: str, *mistakes: Mistake) -> str:
    """Return a chapter's source with these mistakes in it.

    Raises ValueError for a diff whose lines do not stand in their place exactly once, and for
    mistakes that change the same lines.
    """
    places = [(_locate(source, diff, m.place), diff) for m in mistakes for diff in m.diffs]
    end = len(source)
    for found, diff in sorted(places, key=lambda place: place[0].start(), reverse=True):
        if found.end() > end:
            raise ValueError(f"{mistakes[-1].place}: both change the same lines")
        after = "\n".join(line and found["indent"] + line for line in diff.after)
        source = source[: found.start()] + after + source[found.end() :]
        end = found.start()
    return source + "".join(_append(mistake) for mistake in mistakes if mistake.code)


def _append(mistake: Mistake) -> str:
    """Return a whole definition, and the line that puts it in the exercise's place."""
    names = [name for name in find_definitions(mistake.code) if "." not in name]
    is_renamed = mistake.exercise != names[-1]
    return f"\n\n{mistake.code}" + f"\n\n{mistake.exercise} = {names[-1]}\n" * is_renamed


def _locate(source: str, diff: Diff, place: str) -> re.Match[str]:
    """Return where a diff applies, with the `indent` that its lines have there."""
    same = "\n".join(line and f"(?P=indent){re.escape(line)}" for line in diff.before)
    pattern = f"^{same.replace('(?P=indent)', '(?P<indent> *)', 1)}$"
    return find_once(source, diff.within, pattern, place)


def find_once(source: str, within: str, pattern: str, place: str) -> re.Match[str]:
    """Find a pattern in a definition. Raises ValueError, with the place, unless it's there once."""
    definitions = find_definitions(source)
    if within not in definitions:
        raise ValueError(f"{place}: there is no definition {within}")
    lines = source.splitlines(keepends=True)
    start, end = (sum(map(len, lines[:n])) for n in get_span(definitions[within]))
    found = list(re.compile(pattern, re.MULTILINE).finditer(source, start, end))
    if len(found) != 1:
        raise ValueError(
            f"{place}: its lines should stand once in {within}, but stand {len(found)} times"
        )
    return found[0]


# --- Whether it still fits ----------------------------------------------------------------------


def find_stale(chapter: str) -> list[str]:
    """Return what is wrong with the entries of a chapter, a line each."""
    source = (ROOT / "solutions" / f"{chapter}.py").read_text(encoding="utf-8")
    path = ROOT / "tests" / "checks" / f"{chapter}.py"
    checks = find_definitions(path.read_text(encoding="utf-8"))
    try:
        mistakes = read_chapter(chapter)
    except ValueError as error:
        return [str(error)]
    problems = []
    for mistake in mistakes:
        try:
            apply(source, mistake)
        except (ValueError, SyntaxError) as error:
            problems.append(str(error))
        if mistake.rejected_by not in checks:
            problems.append(f"{mistake.place}: there is no check {mistake.rejected_by}")
    for exercise, n in Counter(mistake.exercise for mistake in mistakes).items():
        if n > MAX_PER_EXERCISE:
            problems.append(f"{chapter} {exercise}: {n} mistakes; {MAX_PER_EXERCISE} are plenty")
    return problems


def main() -> int:
    chapters = sort_chapters(path.name for path in FOLDER.glob("ch*"))
    problems = [problem for chapter in chapters for problem in find_stale(chapter)]
    total = 0 if problems else sum(len(read_chapter(chapter)) for chapter in chapters)
    print(*problems, f"{len(problems)} problems, {total} mistakes that fit", sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
