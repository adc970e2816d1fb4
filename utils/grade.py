"""Grades submissions: notebooks, scripts, folders, zips, each PATH one submission.

    python -m utils.grade submissions/* --out graded -j 2

Each is run in processes of its own, shut off from the solutions, the network and each other. What
is graded and unchanged is not graded again, so an interrupted batch goes on where it stopped.

Exit status: 0 if every submission was graded, 1 if some could not be, 2 for wrong arguments, 3 if
--require-isolation is not met, 130 or 143 if it was ended: run it again to go on.
"""

import argparse
import hashlib
import json
import os
import secrets
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more hang in a forked child

from tqdm import tqdm

from utils.autograder import batch, protections
from utils.autograder.reading import name_submissions, read_submission
from utils.autograder.reports import write_class, write_submission

ROOT = Path(__file__).parents[1]
GRADER = ("tests", "solutions", "utils")  # what a report depends on, beside the submission


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m utils.grade",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="one submission each")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the reports")
    parser.add_argument("-j", "--jobs", type=int, default=_count_jobs(), metavar="N",
                        help="submissions at the same time, about 1 GB of memory each")  # fmt: skip
    parser.add_argument("--chapters", nargs="+", default=[], metavar="CHAPTER",
                        help="the chapters that were set (default: what is found)")  # fmt: skip
    parser.add_argument("--points", type=Path, default=ROOT / "tests" / "points.toml",
                        metavar="FILE", help="points and visibility of the exercises")  # fmt: skip
    parser.add_argument("--seconds", type=int, default=30, metavar="N",
                        help="wall clock of one check, six times that if it is slow")  # fmt: skip
    parser.add_argument("--secret", help="what the seeds derive from (default: kept in DIR)")
    parser.add_argument("--again", action="store_true", help="grade also what is graded already")
    parser.add_argument("--require-isolation", action="store_true",
                        help="grade nothing where a protection is missing")  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    if (wrong := _find_wrong_argument(args)) is not None:
        print(wrong, file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    secret = args.secret or _load_secret(args.out)
    named = name_submissions(list(dict.fromkeys(args.paths)))
    version = _digest_grader(args)
    reports = {
        name: None if args.again else _load_report(args.out / name, path, version)
        for name, path in named.items()
    }
    if args.require_isolation:
        reports = {n: r if r and not _find_lacking([r]) else None for n, r in reports.items()}
    todo = {name: path for name, path in named.items() if reports[name] is None}
    options = batch.Options(secret, args.points, args.seconds, tuple(args.chapters))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with all that is to be cleaned up
    try:
        if args.require_isolation and (lacking := batch.find_missing_protections(options)):
            print(f"these protections are missing here: {', '.join(lacking)}", file=sys.stderr)
            return 3
        done = batch.grade_all(todo, args.jobs, options) if todo else []
        for name, report in _show_progress(done, len(named), len(todo)):
            report = report | {"grader": version}
            reports[name] = report
            write_submission(args.out / name, report)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: run it again to go on", file=sys.stderr)
        return 130
    graded = [report for report in reports.values() if report is not None]
    write_class(args.out, graded)
    return _conclude(graded, args, len(named) - len(todo))


def _count_jobs() -> int:
    """Return the processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find_wrong_argument(args: argparse.Namespace) -> str | None:
    missing = [str(path) for path in args.paths if not path.exists()]
    if missing:
        return f"there is no such path: {', '.join(missing)}"
    if args.jobs < 1 or args.seconds < 1:
        return f"-j and --seconds should be at least 1, but are {args.jobs} and {args.seconds}"
    if not args.points.is_file():
        return f"--points should be a TOML file, but {args.points} is none"
    unknown = [
        chapter
        for chapter in args.chapters
        if not (ROOT / "tests" / f"test_{chapter}.py").is_file()
    ]
    if unknown:
        return f"--chapters should be names like ch0_sampling, but are {', '.join(unknown)}"
    if args.out.exists() and not args.out.is_dir():
        return f"--out should be a folder, but {args.out} is a file"
    return None


def _show_progress(done: Iterable, total: int, left: int) -> Iterable:
    return tqdm(done, total=total, initial=total - left, unit="submission", file=sys.stderr)


def _find_lacking(reports: list[dict[str, Any]]) -> list[str]:
    """Return the protections that some graded submission did without."""
    active = [set(report["protections"]) for report in reports if report["chapters"]]
    return sorted(set(protections.PROTECTIONS) - set.intersection(*active)) if active else []


def _conclude(reports: list[dict[str, Any]], args: argparse.Namespace, kept: int) -> int:
    unreadable = [r["submission"] for r in reports if not r["chapters"]]
    for name in unreadable:
        print(f"not graded: {name}: see {args.out / name / 'report.json'}", file=sys.stderr)
    if lacking := _find_lacking(reports):
        print(f"protections that were missing: {', '.join(lacking)}", file=sys.stderr)
    print(f"graded {len(reports) - len(unreadable)} of {len(reports)} submissions"
          f" ({kept} from before): {args.out / 'class.html'}")  # fmt: skip
    if lacking and args.require_isolation:
        return 3
    return 1 if unreadable else 0


def _load_secret(out: Path) -> str:
    """Load the secret kept beside the reports: a batch that goes on has the same seeds."""
    path = out / ".secret"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(16))
    return path.read_text()


def _digest_grader(args: argparse.Namespace) -> str:
    """Digest what a report depends on, beside the submission and the secret."""
    digest = hashlib.sha256(args.points.read_bytes())
    digest.update(f"{args.seconds} {args.chapters}".encode())
    paths = [path for folder in GRADER for path in sorted((ROOT / folder).rglob("*.py"))]
    paths += sorted((ROOT / "tests" / "mistakes").rglob("*.md"))  # their sentences stand in reports
    for path in [*paths, ROOT / "requirements.txt"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _load_report(folder: Path, path: Path, version: str) -> dict[str, Any] | None:
    """Load the report of before, if submission and grader are what they were."""
    try:
        report = json.loads((folder / "report.json").read_text())
        digest = read_submission("", path).digest
    except (OSError, ValueError):
        return None
    same = report.get("digest") == digest and report.get("grader") == version
    return report if same else None


if __name__ == "__main__":
    sys.exit(main())
