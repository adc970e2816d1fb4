"""Builds `dist/`: for each chapter a course bundle, and an autograder for Gradescope.

    python -m utils.authoring.release [CHAPTER ...]

A course bundle is a zip with the chapter's notebook without solutions, the solutions of chapters
before it, its public checks, what the reference and known mistakes give on those, and how many
checks there are in all. It holds no code of this or a later chapter's solutions, of a hidden check
or of a mistake. An autograder grades its own chapter, whatever else is handed in. Both carry the
course's version, and their files the date of the commit, so two builds of one are byte-equal.
"""

import argparse
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path

from tqdm import tqdm

from utils.authoring.__main__ import add_chapters, build_student
from utils.authoring.notebooks import ROOT, get_written_chapters
from utils.authoring.recording import record
from utils.grading import probes
from utils.grading.checks import get_chapters, get_checks
from utils.version import PACKED, get_version

DIST = ROOT / "dist"
PARTS = ROOT / "utils" / "authoring" / "release_parts"  # files of the bundles, of no chapter
SHARED = (
    "LICENSE", "requirements.txt", "solutions/__init__.py", "tests/__init__.py",
    "tests/checks/__init__.py", "tests/support/__init__.py", "tests/oracles/__init__.py",
    "utils/__init__.py", "utils/chapters.py", "utils/panel.py", "utils/plot_descriptions.py",
    "utils/plotting.py", "utils/preferences.py", "utils/prompts.py", "utils/rewards.py",
    "utils/run_folder.py", "utils/signals.py", "utils/tracking.py", "utils/validation.py",
    "utils/version.py",
    "utils/models/**/*", "utils/scale/*.py", "utils/course/__init__.py", "utils/course/checking.py",
    "utils/course/kept_methods.py", "utils/course/own_preferences.py", "utils/course/evaluation.py",
    "utils/course/core_path.json", "utils/course/in_bundle.py", "utils/course/session.py",
    "utils/course/stale_cells.py",
    "utils/grading/__init__.py", "utils/grading/catalogue.py", "utils/grading/checks.py",
    "utils/grading/comparison.py", "utils/grading/diagnosis.py", "utils/grading/extraction.py",
    "utils/grading/judging.py", "utils/grading/known_answers.py", "utils/grading/observation.py",
    "utils/grading/packing.py", "utils/grading/points.py", "utils/grading/recorded.py",
    "utils/grading/reference.py", "utils/grading/substitution.py",
)  # fmt: skip
AUTOGRADER = (
    "LICENSE", "requirements.txt", "solutions/*.py", "tests/__init__.py", "tests/checks/*.py",
    "tests/support/*.py", "tests/oracles/*.py", "tests/points.toml", "tests/mistakes/**/*.md",
    "tests/alternatives/__init__.py", "utils/**/*", "chapters/source/*.md",
)  # fmt: skip


def collect_files(patterns: tuple[str, ...]) -> dict[str, bytes]:
    """Read what these patterns match, except for the control model: notebooks
    show what was made of it and do not load it."""
    paths = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    paths = {path for path in paths if not {"__pycache__", "control"} & set(path.parts)}
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in sorted(paths)}


def collect_course(chapter: str) -> dict[str, bytes]:
    """Return the files of a chapter's course bundle."""
    chapters = get_chapters()
    earlier = chapters[: chapters.index(chapter)]
    files = collect_files(SHARED) | collect_files(tuple(f"solutions/{s}.py" for s in earlier))
    shown = ("chapters/results/real_runs.json", f"chapters/results/{chapter}*")
    files |= collect_files((f"chapters/figures/{chapter}-*", *shown))
    with tempfile.TemporaryDirectory() as folder:
        build_student(chapter, Path(folder), folded_solutions=False)
        files[f"chapters/{chapter}.ipynb"] = (Path(folder) / f"{chapter}.ipynb").read_bytes()
    checks = [check for checks in get_checks(chapter).values() for check in checks]
    for module, source in probes.collect_public(checks).items():
        files[f"{module.replace('.', '/')}.py"] = source.encode()
    files[f"tests/recorded/{chapter}.bin"] = record(chapter)
    readme = (PARTS / "README.md").read_text(encoding="utf-8")
    readme = readme.replace("{chapter}", chapter).replace("{version}", get_version())
    return files | {"README.md": readme.encode(), PACKED: get_version().encode()}


def collect_autograder(chapter: str) -> dict[str, bytes]:
    """Return the files of a chapter's autograder: the whole grader, the two scripts that Gradescope
    calls, and their settings."""
    files = collect_files(AUTOGRADER) | {PACKED: get_version().encode()}
    settings = (PARTS / "settings.sh").read_text(encoding="utf-8")
    files["settings.sh"] = settings.replace("{chapter}", chapter).encode()
    for name in ("setup.sh", "run_autograder"):
        files[name] = (PARTS / name).read_bytes()
    return files


def get_date() -> tuple[int, int, int, int, int, int]:
    """Return when the last commit was made, in UTC; without git the first date of any zip."""
    command = ["git", "log", "-1", "--format=%ct"]
    try:
        seconds = int(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return 1980, 1, 1, 0, 0, 0
    date = time.gmtime(seconds)
    return date.tm_year, date.tm_mon, date.tm_mday, date.tm_hour, date.tm_min, date.tm_sec


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    """Write these files into a zip, in the order of their names."""
    date = get_date()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            info = zipfile.ZipInfo(name, date)
            info.compress_type = zipfile.ZIP_DEFLATED
            is_script = data.startswith(b"#!")
            info.external_attr = (0o755 if is_script else 0o644) << 16
            archive.writestr(info, data)
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_chapters(parser)
    args = parser.parse_args()
    made = []
    for chapter in tqdm(args.chapters or get_written_chapters(), unit="chapter"):
        made += [DIST / f"{chapter}.zip", DIST / f"autograder_{chapter}.zip"]
        files = {f"{chapter}/{name}": data for name, data in collect_course(chapter).items()}
        write_zip(made[-2], files)
        write_zip(made[-1], collect_autograder(chapter))
    for path in made:
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 2**20:.1f} MB")


if __name__ == "__main__":
    main()
