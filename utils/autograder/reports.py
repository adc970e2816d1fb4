"""What a batch leaves: JSON, Gradescope's results.json, a CSV of the class, and HTML pages."""

import csv
import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2

from utils.autograder.roster import shield
from utils.grading.points import ExerciseReport, Report

MAX_PROBLEMS = 5  # of a submission, on the page of the class and in its table
TEMPLATES = Path(__file__).parent / "templates"


def write_submission(folder: Path, report: Report) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "results.json", json.dumps(make_gradescope(report), indent=1))
    _write(folder / "report.html", _render("submission.html", report=report))
    _write(folder / "report.json", json.dumps(report, indent=1))  # last: it says that all is there


def _write(path: Path, text: str) -> None:
    """Write all of it or nothing, whenever this process is ended."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
    os.replace(partial, path)


def _render(name: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(name).render(**values)


def make_gradescope(report: Report) -> dict[str, Any]:
    """Return Gradescope's results.json, as its specification has it."""
    if not report["exercises"]:
        return {"score": 0, "output": format_problems(report), "output_format": "text", "tests": []}
    tests = []
    for exercise in report["exercises"]:
        passed = exercise["score"] >= exercise["max_score"] and not exercise["not_graded"]
        tests.append({
            "score": exercise["score"],
            "max_score": exercise["max_score"],
            "status": "passed" if passed else "failed",
            "name": f"{exercise['chapter']} {exercise['name']}{_say_not_graded(exercise)}",
            "output": format_exercise(exercise),
            "output_format": "text",
            "visibility": exercise["visibility"],
        })  # fmt: skip
    return {
        "score": report["score"],
        "output": format_problems(report),
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "extra_data": {key: report.get(key) for key in ("version", "protections", "seconds")},
        "tests": tests,
    }


def _say_not_graded(exercise: ExerciseReport) -> str:
    """Say that the grader failed at some of an exercise's checks, or at all."""
    failed, of = exercise["not_graded"], len(exercise["checks"])
    part = "" if failed == of else f", {failed} of {of} checks"
    return f" (not graded: an error of the grader{part})" if failed else ""


def format_problems(report: Report) -> str:
    """Format what is wrong with the files, what of them does not run, and what is not graded."""
    lines = list(report["problems"])
    lines += [f"{e['chapter']} {e['name']}{_say_not_graded(e)}: its points are neither earned nor"
              " counted" for e in report["exercises"] if e["not_graded"]]  # fmt: skip
    if report["left_out"]:
        lines += ["Not run, as no exercise needs it:", *(f"    {s}" for s in report["left_out"])]
    return "\n".join(lines)


def format_exercise(exercise: ExerciseReport) -> str:
    """Format a line per check, what is wrong below it, and the mistake's sentence."""
    messages = {check["message"] for check in exercise["checks"]}
    sentence = [f"→ {exercise['sentence']}"] if exercise["sentence"] else []
    if len(messages) == 1 and len(exercise["checks"]) > 1 and any(messages):
        return "\n".join([messages.pop(), *sentence])
    lines = []
    for check in exercise["checks"]:
        mark = "–" if check.get("error") else "✓" if check["passed"] else "✗"
        points = f"{check['points']:.3g}/{check['max_points']:.3g}"
        hardening = " (hardening)" * (check["tier"] == "hardening")
        lines.append(f"{mark} {points}  {check['title']}{hardening}")
        lines += [f"    {line}" for line in check["message"].splitlines()]
    return "\n".join(lines + sentence)


def write_class(out: Path, reports: list[Report]) -> None:
    """Write class.csv and class.html, of all submissions together."""
    reports = sorted(reports, key=lambda report: report["submission"])
    names = dict.fromkeys(f"{e['chapter']} {e['name']}" for r in reports for e in r["exercises"])
    columns = ["submission", "score", "max_score", *names, "seconds", "problems", "not graded"]
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, columns, extrasaction="ignore")
    writer.writeheader()
    for report in reports:
        scores = {f"{e['chapter']} {e['name']}": e["score"] for e in report["exercises"]}
        own = {"submission": shield(report["submission"]), "problems": shield(say_problems(report))}
        writer.writerow(report | scores | own | {"not graded": "; ".join(report["not_graded"])})
    _write(out / "class.csv", table.getvalue())
    versions = sorted({report["version"] for report in reports if "version" in report})
    values = {"reports": reports, "versions": versions, "say_problems": say_problems}
    _write(out / "class.html", _render("class.html", **values, **summarize(reports)))


def say_problems(report: Report) -> str:
    """Say in one line what is wrong with a submission's files: its own page says it in full."""
    problems = report["problems"]
    more = [f"and {len(problems) - MAX_PROBLEMS} more"] * (len(problems) > MAX_PROBLEMS)
    return "; ".join(problems[:MAX_PROBLEMS] + more)


def summarize(reports: list[Report]) -> dict[str, Any]:
    """Summarize for the class page each exercise's mean, the mistakes, and the spread of scores."""
    rows: dict[str, list[Report]] = {}
    mistakes: Counter[tuple[str, str]] = Counter()
    for exercise in (exercise for report in reports for exercise in report["exercises"]):
        name = f"{exercise['chapter']} {exercise['name']}"
        rows.setdefault(name, []).append(exercise)
        if exercise["sentence"]:
            mistakes[name, exercise["sentence"]] += 1
    exercises = []
    for name, found in rows.items():
        graded = [exercise for exercise in found if not exercise["not_graded"]]
        exercises.append({
            "name": name,
            "mean": sum(e["score"] for e in graded) / max(len(graded), 1),
            "max_score": graded[0]["max_score"] if graded else 0,
            "full": sum(e["score"] >= e["max_score"] for e in graded),
            "n": len(graded),
            "not_graded": len(found) - len(graded),
        })  # fmt: skip
    shares = [r["score"] / r["max_score"] for r in reports if r["max_score"]]
    bins = [sum(min(int(share * 10), 9) == b for share in shares) for b in range(10)]
    return {"exercises": exercises, "mistakes": mistakes.most_common(), "bins": bins}
