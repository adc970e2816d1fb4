"""Grades submissions: notebooks, scripts, folders, zips, each PATH one submission.

    python -m utils.grade submissions/* --out graded -j 2

Each is run in processes of its own, shut off from the solutions, the network and each other. What
is graded and unchanged is not graded again, so an interrupted batch goes on where it stopped, a
late submission joins the others, and new points are only counted.

Exit status: 0 if every submission was graded, 1 if some could not be, or not in full, 2 for wrong
arguments, 3 if --require-isolation is not met, 130 or 143 if it was ended: run it again to go on.
"""

import argparse
import difflib
import functools
import hashlib
import json
import os
import secrets
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from utils.chapters import sort_chapters

os.environ["OMP_NUM_THREADS"] = "1"  # more hang in a forked child

from tqdm import tqdm

from utils.autograder import batch, protections
from utils.autograder.reading import OWN_FILES, name_submissions, read_submission
from utils.autograder.reports import write_class, write_submission
from utils.autograder.roster import Person, read_roster, write_grades
from utils.grading.points import Points, Report, list_chapters, list_exercises, load_points

ROOT = Path(__file__).parents[1]
MAX_NAMES = 10  # of submissions, in a line
GRADER = ("tests", "solutions", "utils")  # what a report depends on, beside the submission


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m utils.grade",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="one submission each")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the reports")
    parser.add_argument("-j", "--jobs", type=int, default=_count_jobs(), metavar="N",
                        help="submissions at the same time, about 1 GB of memory each")  # fmt: skip
    parser.add_argument("--chapters", nargs="+", default=[], metavar="CHAPTER",
                        help="the chapters that were set (default: what is found)")  # fmt: skip
    parser.add_argument("--points", type=Path, default=ROOT / "tests" / "points.toml",
                        metavar="FILE", help="points and visibility of the exercises")  # fmt: skip
    parser.add_argument("--seconds", type=int, default=30, metavar="N",
                        help="wall clock of one check, six times that if it is slow")  # fmt: skip
    parser.add_argument("--submission-seconds", type=int, default=900, metavar="N",
                        help="of all checks of a submission together")  # fmt: skip
    parser.add_argument("--secret", help="what the seeds derive from (default: kept in DIR)")
    parser.add_argument("--again", nargs="*", metavar="EXERCISE",
                        help="grade again, all or these alone")  # fmt: skip
    parser.add_argument("--roster", type=Path, metavar="FILE",
                        help="CSV with id, name, and if wanted email, late, adjustment, comment:"
                        " writes grades.csv, canvas.csv and moodle.csv")  # fmt: skip
    parser.add_argument("--assignment", default="RLHF", metavar="NAME",
                        help="what its column is called in those")  # fmt: skip
    parser.add_argument("--require-isolation", action="store_true",
                        help="grade nothing where a protection is missing")  # fmt: skip
    args = parser.parse_args(arguments)
    # Paths may follow --again and --chapters: what is there and no such name is one.
    for option, known in (("again", _list_all_exercises()), ("chapters", list_chapters())):
        given = getattr(args, option)
        if given is not None:
            paths = [name for name in given if name not in known and Path(name).exists()]
            args.paths += map(Path, paths)
            setattr(args, option, [name for name in given if name not in paths])
    args.chapters = sort_chapters(set(args.chapters))
    if not args.paths:
        parser.error("there should be a PATH of a submission at least")
    return args


def _list_all_exercises() -> list[str]:
    return [exercise for chapter in list_chapters() for exercise in list_exercises(chapter)]


@dataclass
class Run:
    """A run of the command."""

    args: argparse.Namespace
    options: batch.Options
    points: Points
    people: list[Person]
    named: dict[str, Path]  # the submissions
    stored: dict[str, Report]  # reports of before that count
    gone: dict[str, str]  # paths of those whose file was taken away
    version: str  # a digest of the grader
    reports: dict[str, Report] = field(default_factory=dict)  # that are kept, or made


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with all that is to be cleaned up
    try:
        run = open_run(args)
        todo = find_work(run)
        count_anew(run)
        if args.require_isolation and (lacking := batch.find_missing_protections(run.options)):
            _say(f"these protections are missing here: {', '.join(lacking)}")
            return 3
        grade(run, todo)
    except ValueError as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        _say("interrupted: run it again to go on")
        return 130
    write_results(run)
    return conclude(run, len(run.named) - len(todo))


def open_run(args: argparse.Namespace) -> Run:
    """Read points, roster and the reports of before, and give each submission its name.

    Raises ValueError, before anything is written, for arguments that are wrong or that do not fit
    the reports.
    """
    if wrong := _find_wrong_argument(args):
        raise ValueError(wrong)
    points = load_points(args.points)
    people = read_roster(args.roster) if args.roster else []
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        secret = args.secret or _load_secret(args.out)
    except OSError as error:
        raise ValueError(f"--out should be a folder to write into, but {error}") from error
    stored = load_reports(args.out)
    paths = list(dict.fromkeys(Path(os.path.abspath(path)) for path in args.paths))
    named, gone = _name_all(stored, paths)
    if blocked := [name for name in named if (args.out / name).is_file()]:
        raise ValueError(
            f"{args.out / blocked[0]} should be a folder, for a report, but is a file: move it"
            " away, or choose another --out"
        )
    counted = {n: r for n, r in stored.items() if n in named or not (n in gone or "is_gone" in r)}
    other = {
        n for n, report in counted.items() if report.get("set", args.chapters) != args.chapters
    }
    if other - named.keys():
        raise ValueError(
            f"--chapters should be as for what is in {args.out} already: give the same, or another"
            " --out, as pages and grade books would mix them"
        )
    if other:
        _say(f"{len(other)} submissions are graded again, as --chapters is another than before:"
             " to keep both, give another --out")  # fmt: skip
    for name in gone:
        write_submission(args.out / name, stored[name] | {"is_gone": True})
    limits, version = (args.seconds, args.submission_seconds), _digest_grader(args, secret)
    options = batch.Options(secret, args.points, *limits, tuple(args.chapters))
    return Run(args, options, points, people, named, counted, gone, version)


def find_work(run: Run) -> dict[str, Path]:
    """Find what has to be graded, wholly or in part, and keep the reports of the rest."""
    again, named = run.args.again, run.named
    only = run.options.only  # is filled here: which exercises of a submission are graded again
    for name, report in run.stored.items():
        is_kept = again is None and _is_current(report, named.get(name), run.version)
        if name not in named or is_kept:
            run.reports[name] = report
        elif again and _is_unchanged(report, named[name]):
            run.reports[name], only[name] = report, tuple(again)
        if run.args.require_isolation and _find_lacking([report]):
            run.reports.pop(name, None)
            only.pop(name, None)
    return {n: path for n, path in named.items() if n not in run.reports or n in only}


def count_anew(run: Run) -> None:
    """Count the points of the reports that are kept, and write those that have changed."""
    for name, report in run.reports.items():
        counted = run.points.score(report)
        counted.pop("is_gone", None)  # it is back
        if name in run.named:
            counted["path"] = str(run.named[name])  # it may have been moved
        if counted != report:
            write_submission(run.args.out / name, counted)
        run.reports[name] = counted


def grade(run: Run, todo: dict[str, Path]) -> None:
    """Grade what is to do, and write each report. Raises ValueError if the grader can't start."""
    done = batch.grade_all(todo, run.args.jobs, run.options) if todo else []
    total = len(run.named)
    for name, report in tqdm(
        done, total=total, initial=total - len(todo), unit="submission", file=sys.stderr
    ):
        report |= {"grader": run.version, "path": str(run.named[name]), "set": run.args.chapters}
        if name in run.options.only:
            report = run.points.score(merge(run.stored[name], report))
        run.reports[name] = report
        write_submission(run.args.out / name, report)


def write_results(run: Run) -> None:
    """Write the class's pages and, with a roster, the grade books; say what no longer counts."""
    out, reports = run.args.out, list(run.reports.values())
    write_class(out, reports)
    for name, place in run.gone.items():
        _say(f"{name} is no longer counted: there is no {place}")
    if run.args.roster:
        for line in write_grades(out, run.people, reports, run.args.assignment, run.args.chapters):
            _say(line)
    elif (out / "grades.csv").exists():
        _say("grades.csv, canvas.csv and moodle.csv are of an earlier run: give --roster to renew"
             " them")  # fmt: skip


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _count_jobs() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find_wrong_argument(args: argparse.Namespace) -> str | None:
    if missing := [str(path) for path in args.paths if not path.exists()]:
        return f"there is no such path: {', '.join(missing)}"
    if min(args.jobs, args.seconds, args.submission_seconds) < 1:
        given = f"{args.jobs}, {args.seconds} and {args.submission_seconds}"
        return f"-j, --seconds and --submission-seconds should be at least 1, but are {given}"
    known = _list_all_exercises()
    if wrong := [name for name in args.again or () if name not in known]:
        close = difflib.get_close_matches(wrong[0], known, n=3, cutoff=0.4) or known
        return f"--again should name exercises, but {wrong[0]} is none: perhaps {', '.join(close)}"
    if unknown := [chapter for chapter in args.chapters if chapter not in list_chapters()]:
        return f"--chapters should be names like ch0_sampling, but are {', '.join(unknown)}"
    out = args.out.resolve()
    if out in [path.resolve() for path in args.paths]:
        return f"{args.out} is --out, with the reports: it should not be among the submissions"
    if mixed := [path for path in args.paths if path.parent.resolve() == out]:
        return f"--out should be another folder than the submissions', but {mixed[0]} is in it"
    if blocked := [str(args.out / name) for name in OWN_FILES if (args.out / name).is_dir()]:
        names = ", ".join(blocked)
        return f"{names} should be a file, but is a folder: move it away, or choose another --out"
    return None


def _find_lacking(reports: list[Report]) -> list[str]:
    """Return the protections that some graded submission did without."""
    active = [set(report["protections"]) for report in reports if report["readable"]]
    return sorted(set(protections.PROTECTIONS) - set.intersection(*active)) if active else []


def conclude(run: Run, kept: int) -> int:
    """Say how many were graded and what could not be, and return the exit status."""
    args, reports = run.args, [run.reports[name] for name in run.named]
    unreadable = [r["submission"] for r in reports if not r["readable"]]
    for name in unreadable:
        _say(f"not graded: {name}: see {args.out / name / 'report.json'}")
    if lacking := _find_lacking(reports):
        _say(f"protections that were missing: {', '.join(lacking)}")
    graded = f"{len(reports) - len(unreadable)} graded"
    graded += f", {len(unreadable)} not" if unreadable else ""
    all_of_them = "1 submission" if len(reports) == 1 else f"{len(reports)} submissions"
    print(f"{all_of_them} ({kept} from before): {graded}: {args.out / 'class.html'}")
    late = [
        report
        for report in reports
        if any(c.get("took_too_long") for e in report["exercises"] for c in e["checks"])
    ]
    if late:
        _say(f"Checks of {_list_names(late)} took too long, and earn nothing. It may be a loop that"
             " does not end; if the machine was busy, run this again with their paths and"
             " --again.")  # fmt: skip
    failed = [report for report in reports if report["not_graded"]]
    if failed:
        count = sum(len(report["not_graded"]) for report in failed)
        checks = "1 check" if count == 1 else f"{count} checks"
        _say(f"The grader failed on {checks} of {_list_names(failed)}. Their points are neither"
             " earned nor counted. See \"not_graded\" in report.json, and run this again once the"
             " grader is fixed.")  # fmt: skip
    if lacking and args.require_isolation:
        return 3
    return 1 if unreadable or failed else 0


def _list_names(reports: list[Report]) -> str:
    names = ", ".join(report["submission"] for report in reports[:MAX_NAMES])
    return names + f" and {len(reports) - MAX_NAMES} more" * (len(reports) > MAX_NAMES)


def _load_secret(out: Path) -> str:
    """Load the secret kept beside the reports: a batch that goes on has the same seeds."""
    path = out / ".secret"
    if not path.exists() or not path.read_text():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(16))
    return path.read_text()


def _digest_grader(args: argparse.Namespace, secret: str) -> str:
    """Digest what verdicts depend on, beside the submission: not the points."""
    digest = hashlib.sha256(f"{secret} {args.seconds} {args.submission_seconds}".encode())
    digest.update(f"{args.chapters}".encode())
    paths = [path for folder in GRADER for path in sorted((ROOT / folder).rglob("*.py"))]
    paths += sorted((ROOT / "tests" / "mistakes").rglob("*.md"))  # their sentences stand in reports
    paths += sorted((ROOT / "chapters" / "source").glob("*.md"))  # what belongs to an exercise
    for path in [*paths, ROOT / "requirements.txt"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def load_reports(out: Path) -> dict[str, Report]:
    """Load all reports of before, those of other runs among them, and say which are none."""
    reports = {}
    parts = batch.make_empty_report("", "").keys()
    for path in sorted(out.glob("*/report.json")):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            report = None
        if isinstance(report, dict) and parts <= report.keys():
            reports[path.parent.name] = report
        else:
            _say(f"{path} is damaged, or of another version: it is not counted until its submission"
                 " is graded again")  # fmt: skip
    return reports


def _name_all(
    stored: dict[str, Report], paths: list[Path]
) -> tuple[dict[str, Path], dict[str, str]]:
    """Name the submissions, and find the reports of files that were taken away, renamed or moved
    since, with their paths.

    Where the same work is among these, as after a move to another folder, its name is free again.
    Else, where the whole folder is away, as on another machine, a report stays.
    """
    places = {name: report.get("path", "") for name, report in stored.items()}
    away = {name for name, place in places.items() if not os.path.lexists(place)}
    digests = {_digest(path) for path in paths} if away else set()
    moved = {name for name in away if stored[name]["digest"] in digests}
    named = name_submissions(paths, {n: place for n, place in places.items() if n not in moved})
    gone = {name for name in away - named.keys() if places[name] and "is_gone" not in stored[name]}
    left = {name for name in gone if name in moved or Path(places[name]).parent.exists()}
    return named, {name: places[name] for name in places if name in left}


@functools.cache
def _digest(path: Path) -> str:
    """Digest a submission, which is read once."""
    return read_submission("", path).digest


def _is_unchanged(report: Report, path: Path | None) -> bool:
    digest = report.get("digest")
    return digest is not None and path is not None and digest == _digest(path)


def _is_current(report: Report, path: Path | None, version: str) -> bool:
    """Return whether submission and grader are what they were, and the grader made no error."""
    is_whole = not report.get("not_graded")
    return is_whole and report.get("grader") == version and _is_unchanged(report, path)


def merge(before: Report, again: Report) -> Report:
    """Put exercises that were graded again in the place of those of before."""
    new = {(e["chapter"], e["name"]): e for e in again["exercises"]}
    exercises = [new.get((e["chapter"], e["name"]), e) for e in before["exercises"]]
    return again | {
        "exercises": exercises,
        "chapters": before["chapters"],
        "grader": before.get("grader"),  # what is stored of others may be of an earlier one
        "protections": sorted({*before["protections"]} & {*again["protections"]}),
        "seconds": round(sum(exercise["seconds"] for exercise in exercises), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
