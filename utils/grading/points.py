"""What each exercise is worth, and when its result shows: `tests/points.toml`, edited by hand."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from utils.grading.checks import get_chapters, get_checks

FILE = Path(__file__).parents[2] / "tests" / "points.toml"
VISIBILITIES = ("visible", "after_due_date", "after_published", "hidden")


@dataclass(frozen=True)
class Points:
    """Points and visibility by chapter and exercise; those of the checks where nothing is said."""

    table: dict[str, dict[str, dict]]

    def get(self, chapter: str, exercise: str) -> tuple[float, str]:
        row = self.table.get(chapter, {}).get(exercise, {})
        worth = sum(check.points for check in get_checks(chapter)[exercise])
        return row.get("points", worth), row.get("visibility", "visible")


def load_points(path: Path = FILE) -> Points:
    """Load the points. Raises ValueError, with the place, for what is no exercise, or no number."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the points should be in {path}, which cannot be read") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} should be TOML: {error}") from error
    for chapter, exercises in table.items():
        if chapter not in get_chapters() or not isinstance(exercises, dict):
            raise ValueError(
                f"{path}: the chapter should be one of {get_chapters()}, but is {chapter!r}"
            )
        for exercise, row in exercises.items():
            place = f"{path}: {chapter}.{exercise!r}"
            if exercise not in get_checks(chapter):
                raise ValueError(f"{place}: no exercise; there are {list(get_checks(chapter))}")
            _check_row(place, row)
    return Points(table)


def _check_row(place: str, row: object) -> None:
    if not isinstance(row, dict) or row.keys() - {"points", "visibility"}:
        raise ValueError(f"{place} should have points and visibility, but is {row}")
    points, visibility = row.get("points", 0), row.get("visibility", "visible")
    if type(points) not in (int, float) or not 0 <= points < float("inf"):
        raise ValueError(f"{place}: points should be a number of at least 0, but is {points!r}")
    if visibility not in VISIBILITIES:
        raise ValueError(f"{place}: visibility should be one of {VISIBILITIES}: {visibility!r}")


def format_points() -> str:
    """Format a file that says what holds without one."""
    lines = [
        "# What each exercise is worth. Edit freely: the checks of an exercise share its points",
        "# in their own proportion. visibility is when Gradescope shows the result: "
        + ", ".join(VISIBILITIES)
        + ".",
    ]
    for chapter in get_chapters():
        lines += ["", f"[{chapter}]"]
        for exercise, checks in get_checks(chapter).items():
            worth = sum(check.points for check in checks)
            lines.append(f'"{exercise}" = {{ points = {worth:g}, visibility = "visible" }}')
    return "\n".join(lines) + "\n"
