"""What each exercise is worth, and what the checks that passed earn of it.

Core checks share `core_share` of an exercise's points in the proportion of their own `points`,
hardening checks the rest; where there is one tier alone, it has all of them.

`tests/points.toml`, edited by hand, says what exercises are worth and when results show. It is
applied to verdicts that are stored, so nothing runs again when it changes.
"""

import functools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.chapters import sort_chapters

TESTS = Path(__file__).parents[2] / "tests"
FILE = TESTS / "points.toml"
CORE_SHARE = 2 / 3
Report = dict[str, Any]  # of a submission
ExerciseReport = dict[str, Any]  # of one exercise in it
VISIBILITIES = ("visible", "after_due_date", "after_published", "hidden")


def weigh(
    points: Sequence[float], tiers: Sequence[str], worth: float, core_share: float = CORE_SHARE
) -> list[float]:
    """Return what each check is worth, of the `worth` of their exercise."""
    shares = {"core": core_share, "hardening": 1 - core_share}
    pairs = [*zip(points, tiers, strict=True)]
    totals = {tier: sum(p for p, t in pairs if t == tier) for tier in shares}
    if not all(totals.values()):
        shares = dict.fromkeys(shares, 1.0)
    return [worth * shares[tier] * p / totals[tier] for p, tier in pairs]


def earn(
    passed: Sequence[bool], earns_alone: Sequence[bool], weights: Sequence[float]
) -> list[float]:
    """Return what each check earns.

    What a worked example expects can be copied from it: those count beside another check that
    passes, not alone.
    """
    others = [p for p, alone in zip(passed, earns_alone, strict=True) if alone]
    is_earned = any(others) or not others
    return [w if p and is_earned else 0.0 for p, w in zip(passed, weights, strict=True)]


@dataclass(frozen=True)
class Points:
    """Points and visibility by chapter and exercise; those of the checks where nothing is said."""

    table: dict[str, dict[str, dict]]
    core_share: float = CORE_SHARE  # of an exercise, for its core checks: 1 switches hardening off

    def score(self, report: Report) -> Report:
        """Return a report with the scores that its verdicts have.

        A check that an error of the grader kept from a verdict neither earns nor counts.
        """
        exercises = [self._score_exercise(exercise) for exercise in report["exercises"]]
        not_graded = [
            f"{e['chapter']} {e['name']}, {check['name']}: {check['error']}"
            for e in exercises
            for check in e["checks"]
            if check.get("error")
        ]
        return report | {
            "score": round(sum(e["score"] for e in exercises), 4),
            "max_score": round(sum(e["max_score"] for e in exercises), 4),
            "not_graded": not_graded,
            "exercises": exercises,
        }

    def _score_exercise(self, exercise: ExerciseReport) -> ExerciseReport:
        row = self.table.get(exercise["chapter"], {}).get(exercise["name"], {})
        found = exercise["checks"]
        is_error = [bool(check.get("error")) for check in found]
        points = [check["weight"] for check in found]
        worth = row.get("points", sum(points))
        weights = weigh(points, [check["tier"] for check in found], worth, self.core_share)
        most = [0.0 if e else weight for e, weight in zip(is_error, weights, strict=True)]
        alone = [check["earns_alone"] and not check.get("error") for check in found]
        earned = earn([check["passed"] for check in found], alone, most)
        return exercise | {
            "score": round(sum(earned), 4),
            "max_score": round(sum(most), 4) if any(is_error) else worth,
            "not_graded": sum(is_error),
            "visibility": row.get("visibility", "visible"),
            "checks": [
                check | {"points": round(points, 4), "max_points": round(limit, 4)}
                for check, points, limit in zip(found, earned, most, strict=True)
            ],
        }


def load_points(path: Path = FILE) -> Points:
    """Load the points. Raises ValueError, with the place, for what is no exercise, or no number."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} should be a TOML file: {error}") from error
    core_share = table.pop("core_share", CORE_SHARE)
    if type(core_share) not in (int, float) or not 0 < core_share <= 1:
        raise ValueError(f"{path}: core_share should be above 0 and at most 1: {core_share!r}")
    chapters = list_chapters()
    for chapter, exercises in table.items():
        if chapter not in chapters or not isinstance(exercises, dict):
            raise ValueError(f"{path}: the chapter should be one of {chapters}, but is {chapter!r}")
        for exercise, row in exercises.items():
            place = f"{path}: {chapter}.{exercise!r}"
            if exercise not in list_exercises(chapter):
                raise ValueError(f"{place}: no exercise; there are {list_exercises(chapter)}")
            _check_row(place, row)
    return Points(table, core_share)


def _check_row(place: str, row: object) -> None:
    if not isinstance(row, dict) or row.keys() - {"points", "visibility"}:
        raise ValueError(f"{place} should have points and visibility, but is {row}")
    points, visibility = row.get("points", 0), row.get("visibility", "visible")
    if type(points) not in (int, float) or not 0 <= points < float("inf"):
        raise ValueError(f"{place}: points should be a number of at least 0, but is {points!r}")
    if visibility not in VISIBILITIES:
        raise ValueError(f"{place}: visibility should be one of {VISIBILITIES}: {visibility!r}")


# --- Names, without importing the checks, which takes seconds -----------------------------------


def list_chapters() -> list[str]:
    return sort_chapters(path.stem for path in TESTS.glob("checks/ch*.py"))


@functools.cache
def list_exercises(chapter: str) -> list[str]:
    """Return the exercises that the checks of a chapter name."""
    text = (TESTS / "checks" / f"{chapter}.py").read_text(encoding="utf-8")
    return list(dict.fromkeys(re.findall(r'^@check\(\s*"([\w.]+)"', text, re.MULTILINE)))


def fill_points(worth: dict[str, dict[str, float]], path: Path = FILE) -> str:
    """Return the file with all of these exercises in it: what was edited stays.

    worth: by chapter and exercise, the points of its checks.
    """
    points = load_points(path) if path.exists() else Points({})
    lines = [
        "# What each exercise is worth: edit it freely, and grade again; what is graded is only",
        "# counted anew. `visibility` is when Gradescope shows the result: visible,",
        "# after_due_date, after_published or hidden.",
        "",
        "# Of an exercise's points, the share of its core checks; the others have the rest.",
        "# 1 switches them off.",
        f"core_share = {points.core_share:.4g}",
    ]
    for chapter, exercises in worth.items():
        lines += ["", f"[{chapter}]"]
        for exercise, default in exercises.items():
            row = points.table.get(chapter, {}).get(exercise, {})
            value, visibility = row.get("points", default), row.get("visibility", "visible")
            lines.append(f'"{exercise}" = {{ points = {value:g}, visibility = "{visibility}" }}')
    return "\n".join(lines) + "\n"
