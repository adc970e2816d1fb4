"""The people of a class: whose a submission is, what is added or taken off, and exports.

A roster is a CSV file with a head: `id` and `name`, and if wanted `email`, `late` (how many percent
of the score are taken off), `adjustment` (points that are added, or taken off) and `comment`.
"""

import csv
import io
import re
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.grading.points import Report

COLUMNS = ("id", "name", "email", "late", "adjustment", "comment")
MAX_ADJUSTMENT = 1e6
MAX_SAID = 5  # people whom a submission fits
# Letters that are no letter with an accent, as platforms and people write them in file names.
PLAIN_LETTERS = str.maketrans({"ł": "l", "ø": "o", "đ": "d", "ı": "i", "æ": "ae", "œ": "oe"})


@dataclass(frozen=True)
class Person:
    """One row of a roster."""

    id: str
    name: str
    email: str = ""
    late: float = 0.0
    adjustment: float = 0.0
    comment: str = ""

    def count(self, score: float) -> float:
        """Return what a score counts, after the penalty and the adjustment: at least 0."""
        return round(max(score * (1 - self.late / 100) + self.adjustment, 0.0), 2)


def read_roster(path: Path) -> list[Person]:
    """Read a roster. Raises ValueError, with the line, if it is not a valid one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--roster should be a CSV file in UTF-8, but {path}: {error}") from error
    first = text.partition("\n")[0]
    delimiter = ";" if first.count(";") > first.count(",") else ","  # as some spreadsheets write
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    people: dict[str, Person] = {}
    try:
        rows.fieldnames = head = [str(name).strip().lower() for name in rows.fieldnames or ()]
        if not {"id", "name"} <= {*head} <= {*COLUMNS} or len({*head}) < len(head):
            raise ValueError(
                f"the first line should name id, name, and others of {COLUMNS}, each once: {head}"
            )
        for row in rows:
            person = _read_person(row)
            if person.id in people:
                raise ValueError(f"each id should stand there once, but {person.id} does not")
            people[person.id] = person
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
    return [*people.values()]


def _read_person(row: dict[Any, Any]) -> Person:
    if any(map(str.strip, row.get(None) or ())):
        raise ValueError(
            "there are more cells than the first line names: put quotation marks around one that"
            ' holds a comma, such as "Doe, Jane"'
        )
    given = {name: (row.get(name) or "").strip() for name in COLUMNS}
    if not given["id"] or not given["name"]:
        raise ValueError("id and name should not be empty")
    late, adjustment = (float(given[n].rstrip("%") or 0) for n in ("late", "adjustment"))
    if not 0 <= late <= 100 or not abs(adjustment) <= MAX_ADJUSTMENT:
        raise ValueError(f"late should be from 0 to 100, but is {late}, and adjustment a number")
    names = (given["id"], given["name"], given["email"])
    return Person(*names, late, adjustment, given["comment"])


def find_owners(name: str, people: list[Person]) -> list[Person]:
    """Find whose a submission is, by its file name: an id in it, an address, or a name. It is
    nobody's if it fits several, all of whom are returned."""
    words = _split(re.sub(r"\(\d+\)", " ", name))  # of a copy: "hw (2)"
    owners: dict[str, Person] = {p.id: p for p in people if words == _split(p.id)}
    several: dict[str, Person] = {}
    for get_keys in (
        lambda p: [_get_key(p.id)],
        lambda p: [_get_key(p.email.partition("@")[0])],
        lambda p: _get_names(p.name),
    ):
        fitting = {p.id: p for p in people if any(_is_in(key, words) for key in get_keys(p))}
        (owners if len(fitting) == 1 else several).update(fitting)
    return [*(owners or several).values()]


def _split(text: str) -> list[str]:
    """Return the words of a text in small letters, without accents; of any script."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
    return re.findall(r"[^\W_]+", plain.translate(PLAIN_LETTERS))


def _is_in(key: list[str], words: list[str]) -> bool:
    """Return whether the words of a key stand side by side, or run together as Canvas has them."""
    n = len(key)
    return bool(key) and (
        any(words[i : i + n] == key for i in range(len(words) - n + 1)) or "".join(key) in words
    )


def _get_key(text: str) -> list[str]:
    """Return the words of it, but no number that file names have otherwise, such as "week 2"."""
    return [] if re.fullmatch(r"\d{1,2}|(19|20)\d\d", text) else _split(text)


def _get_names(name: str) -> list[list[str]]:
    """Return the name as it stands, and with the last name first: "Doe, Jane" is Jane Doe."""
    last, comma, first = name.partition(",")
    words = _split(f"{first} {last}") if comma else _split(name)
    turned = _split(f"{last} {first}") if comma else [words[-1], *words[:-1]] if words else []
    return [words, turned]


# --- Exports --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grade:
    """What a person gets."""

    person: Person
    files: str  # that count
    score: float  # points before the roster's adjustment
    total: float  # points after it
    most: float  # to reach: without any file, that of the chapters that were set


def write_grades(
    out: Path,
    people: list[Person],
    reports: list[Report],
    assignment: str,
    chapters: Collection[str] = (),
) -> list[str]:
    """Write grades.csv, and what Canvas and Moodle import; return what could not be matched.

    assignment: the title of its column there. chapters: those that were set. Anyone who handed in
    nothing gets 0; a person's chapters are added up, and of several submissions of one chapter the
    best counts, and that is said.
    """
    reports = sorted(reports, key=lambda report: report["submission"])
    found = {r["submission"]: find_owners(r["submission"], people) for r in reports}
    owners = {name: fitting[0] for name, fitting in found.items() if len(fitting) == 1}
    set_in_all = sum(max(_count(r, c)[1] for r in reports) for c in chapters if reports)
    said: list[str] = []
    grades = []
    for person in people:
        mine = [r for r in reports if owners.get(r["submission"]) is person]
        grades.append(_grade(person, mine, set_in_all, said))
    possible = set_in_all if chapters else max((grade.most for grade in grades), default=0)
    pairs = [(grade, grade.person) for grade in grades]
    _write_csv(
        out / "grades.csv",
        ("id", "name", "submission", "score", "late", "adjustment", "total", "of", "comment"),
        *((p.id, p.name, g.files, g.score, p.late, p.adjustment, g.total, g.most, p.comment)
          for g, p in pairs),
    )  # fmt: skip
    _write_csv(
        out / "canvas.csv",
        ("Student", "ID", "SIS User ID", "SIS Login ID", "Section", assignment),
        ("    Points Possible", "", "", "", "", round(possible, 4)),
        *((p.name, p.id, "", p.email, "", g.total) for g, p in pairs),
    )
    _write_csv(
        out / "moodle.csv",
        ("ID number", "Full name", "Email address", assignment, "Feedback comments"),
        *((p.id, p.name, p.email, g.total, p.comment) for g, p in pairs),
    )
    if len({grade.most for grade in grades if grade.files}) > 1 and not chapters:
        said.append(
            "people handed in different chapters, so the points to reach differ (`of` in"
            " grades.csv; canvas.csv has the most): give --chapters to set the same for all"
        )
    said += [
        f"{r['submission']}: an error of the grader left {len(r['not_graded'])} checks without"
        " points"
        for r in reports
        if r["not_graded"]
    ]
    said += [f"{name}: {_say_owners(found[name])}" for name in found if name not in owners]
    missing = [grade.person for grade in grades if not grade.files]
    return said + [f"{person.name} ({person.id}) handed in nothing" for person in missing]


def _grade(person: Person, reports: list[Report], set_in_all: float, said: list[str]) -> Grade:
    best = _choose(reports, person.name, said)
    counts = [_count(report, chapter) for chapter, report in best.items()]
    score = sum(points for points, _ in counts)
    most = sum(points for _, points in counts) if best else set_in_all
    files = "; ".join(dict.fromkeys(r["submission"] for r in [*best.values()] or reports))
    return Grade(person, files, round(score, 2), person.count(score), round(most, 4))


def _write_csv(path: Path, *rows: tuple) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(map(shield, row) for row in rows)


def _say_owners(people: list[Person]) -> str:
    if not people:
        return "fits nobody on the roster"
    some = ", ".join(f"{person.name} ({person.id})" for person in people[:MAX_SAID])
    return f"fits several people: {some}" + ", ..." * (len(people) > MAX_SAID)


def _count(report: Report, chapter: str) -> tuple[float, float]:
    """Count what a report has of a chapter's points, and how many there are."""
    exercises = [e for e in report["exercises"] if e["chapter"] == chapter]
    return sum(e["score"] for e in exercises), sum(e["max_score"] for e in exercises)


def _choose(reports: list[Report], name: str, said: list[str]) -> dict[str, Report]:
    """Choose for each chapter the best of a person's submissions, and say which do not count."""
    best: dict[str, Report] = {}
    for chapter in dict.fromkeys(c for report in reports for c in report["chapters"]):
        tries = [r for r in reports if chapter in r["chapters"]]
        best[chapter] = max(reversed(tries), key=lambda r: _count(r, chapter)[0])
    for report in reports:
        others = {
            best[c]["submission"]: c
            for c in report["chapters"]
            if best[c] is not report and (_count(report, c)[0] or report not in best.values())
        }
        said += [
            f"{report['submission']}: {other} of {name} counts instead, in {chapter}"
            for other, chapter in others.items()
        ]
    return best


def shield(text: Any) -> Any:
    """Shield a cell that a spreadsheet would take for a formula."""
    is_formula = isinstance(text, str) and text.strip().startswith(("=", "+", "-", "@"))
    return f"'{text}" if is_formula else text
