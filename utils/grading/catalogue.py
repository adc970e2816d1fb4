"""Reading the catalogue of mistakes, `tests/mistakes/<chapter>/<exercise>.md`, without torch.

An entry is a heading with the mistake's name, what a good teacher says of it, and the change: whole
lines of the reference as a diff, or a function to stand in its place.

    ## lambda_left_out

    The recursion decays by gamma alone. Each step back multiplies by gamma * lam.

    ```diff
    -        running = delta + gamma * lam * running
    +        running = delta + gamma * running
    ```

    Rejected by `random_rollouts`.

A diff may hold lines that stay, and names the definition that it is in if that is not the exercise
(```` ```diff select_completion ````). A function (```` ```python ````) comes after the chapter's
code, so that the reference can still be called under another name. The last line names the check
that rejects the mistake, and the automatic mutant that it is, if it is one: "Rejected by `check`;
the mutant `gamma * lam -> gamma`."

    python -m utils.grading.catalogue        which entries no longer fit the solutions
"""

import ast
import functools
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "mistakes"
MAX_PER_EXERCISE = 15
_FENCE = re.compile(r"^```(diff|python) *([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_REJECTED = re.compile(r"^Rejected by `(\w+)`(?:; the mutant `(.+)`)?\.$", re.MULTILINE)


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
    mutant: str

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
        if title.split("\n")[0] != f"# {path.stem}":
            raise ValueError(f"{path.name} should begin with '# {path.stem}'")
        found += [_read_entry(chapter, path.stem, entry) for entry in entries]
    names = Counter((mistake.exercise, mistake.name) for mistake in found)
    if twice := [f"{exercise} {name}" for (exercise, name), n in names.items() if n > 1]:
        raise ValueError(f"{chapter}: the names should differ, but these do not: {twice}")
    return tuple(found)


def _read_entry(chapter: str, exercise: str, text: str) -> Mistake:
    name, _, body = text.partition("\n")
    fences = list(_FENCE.finditer(body))
    rejected = _REJECTED.search(body)
    place = f"tests/mistakes/{chapter}/{exercise}.md, {name}"
    if not fences or rejected is None:
        raise ValueError(f"{place}: there should be a change and 'Rejected by `check`.'")
    codes = [f[3] for f in fences if f[1] == "python"]
    diffs = tuple(_read_diff(f[2] or exercise, f[3], place) for f in fences if f[1] == "diff")
    if len(codes) > 1 or (codes and diffs):
        raise ValueError(f"{place}: there should be diffs or one function")
    sentence = " ".join(body[: fences[0].start()].split())
    if not sentence.endswith("."):
        raise ValueError(f"{place}: there should be a sentence before the change")
    code = codes[0] if codes else ""
    return Mistake(chapter, exercise, name, sentence, diffs, code, rejected[1], rejected[2] or "")


def _read_diff(within: str, text: str, place: str) -> Diff:
    lines = text.splitlines()
    if wrong := [line for line in lines if line and line[0] not in "-+ "]:
        raise ValueError(f"{place}: a line of a diff should begin with -, + or a space: {wrong[0]}")
    before = tuple(line[1:] for line in lines if not line.startswith("+"))
    after = tuple(line[1:] for line in lines if not line.startswith("-"))
    if before == after or not any(line.strip() for line in before):
        raise ValueError(f"{place}: a diff should change lines, and show where")
    return Diff(within, before, after)


# --- Applying -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def read_solutions(chapter: str) -> str:
    """Return the source of a chapter's reference."""
    return (ROOT / "solutions" / f"{chapter}.py").read_text(encoding="utf-8")


@functools.lru_cache(maxsize=64)
def find_definitions(source: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Return functions, classes and methods by dotted name."""
    found: dict[str, ast.FunctionDef | ast.ClassDef] = {}
    waiting: list[tuple[str, ast.Module | ast.ClassDef]] = [("", ast.parse(source))]
    while waiting:
        prefix, tree = waiting.pop()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[prefix + node.name] = node
            if isinstance(node, ast.ClassDef):
                waiting.append((f"{prefix}{node.name}.", node))
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
    lines = source.splitlines()
    places = sorted(
        ((_locate(source, diff, m.place), diff) for m in mistakes for diff in m.diffs),
        key=lambda place: place[0],
        reverse=True,
    )
    end = len(lines) + 1
    for (first, shift), diff in places:
        if first + len(diff.before) > end:
            raise ValueError(f"{mistakes[-1].place}: both change the same lines")
        lines[first : first + len(diff.before)] = [_indent(line, shift) for line in diff.after]
        end = first
    return "\n".join([*lines, *(_append(mistake) for mistake in mistakes if mistake.code), ""])


def _append(mistake: Mistake) -> str:
    """Return a whole definition, and the line that puts it in the exercise's place."""
    last = find_definitions(mistake.code)
    name = next(reversed([name for name in last if "." not in name]))
    is_renamed = mistake.exercise != name
    return f"\n\n{mistake.code}" + f"\n\n{mistake.exercise} = {name}" * is_renamed


def _locate(source: str, diff: Diff, place: str) -> tuple[int, int]:
    """Return the line where a diff applies, and by how much it is indented there."""
    definitions = find_definitions(source)
    if diff.within not in definitions:
        raise ValueError(f"{place}: there is no definition {diff.within}")
    start, end = get_span(definitions[diff.within])
    lines, n = source.splitlines(), len(diff.before)
    found = []
    for first in range(start, end - n + 1):
        shift = _measure(lines[first : first + n]) - _measure(diff.before)
        if [_indent(line, shift) for line in diff.before] == lines[first : first + n]:
            found.append((first, shift))
    if len(found) != 1:
        raise ValueError(
            f"{place}: its lines should stand once in {diff.within}, but stand {len(found)} times"
        )
    return found[0]


def _measure(lines: tuple[str, ...] | list[str]) -> int:
    """Return the indentation of the first line that is not empty."""
    return next((len(x) - len(x.lstrip()) for x in lines if x.strip()), 0)


def _indent(line: str, shift: int) -> str:
    if not line.strip():
        return ""
    return " " * shift + line if shift >= 0 else line[-shift:]


# --- Whether it still fits ----------------------------------------------------------------------


def find_stale(chapter: str) -> list[str]:
    """Return what is wrong with the entries of a chapter, a line each."""
    try:
        mistakes = read_chapter(chapter)
    except ValueError as error:
        return [str(error)]
    problems, source = [], read_solutions(chapter)
    path = ROOT / "tests" / "checks" / f"{chapter}.py"
    checks = find_definitions(path.read_text(encoding="utf-8"))
    for mistake in mistakes:
        try:
            for diff in mistake.diffs:
                _locate(source, diff, mistake.place)
            if mistake.code:
                ast.parse(_append(mistake))
        except (ValueError, SyntaxError, StopIteration) as error:
            problems.append(str(error) or f"{mistake.place}: it should define a function")
        if mistake.rejected_by not in checks:
            problems.append(f"{mistake.place}: there is no check {mistake.rejected_by}")
    for exercise, n in Counter(mistake.exercise for mistake in mistakes).items():
        if n > MAX_PER_EXERCISE:
            problems.append(f"{chapter} {exercise}: {n} mistakes; {MAX_PER_EXERCISE} are plenty")
    return problems


def get_catalogued() -> list[str]:
    """Return the chapters that have a folder of mistakes."""
    return sorted(
        path.name for path in FOLDER.iterdir() if path.is_dir() and path.name.startswith("ch")
    )


def main() -> int:
    problems = [problem for chapter in get_catalogued() for problem in find_stale(chapter)]
    for problem in problems:
        print(problem)
    total = sum(len(read_chapter(chapter)) for chapter in get_catalogued()) if not problems else 0
    print(f"{len(problems)} problems" if problems else f"{total} mistakes fit the solutions")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
