"""Builds `dist/`: a course bundle for each chapter, and the autograder for Gradescope.

    python -m utils.authoring.release [STEM ...]

A course bundle is a zip with the chapter's notebook without solutions, the solutions of chapters
before it, its public checks, and what the reference and known mistakes give on those. It holds no
code of this or a later chapter's solutions, of a hidden check or of a mistake.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

from tqdm import tqdm

from utils.authoring.__main__ import build_student
from utils.authoring.notebooks import ROOT, get_written_stems
from utils.grading import probes, recorded
from utils.grading.checks import get_checks, get_stems

DIST = ROOT / "dist"
PARTS = (
    ROOT / "utils" / "authoring" / "release_parts"
)  # files of the bundles that are in no chapter
DATE = (2026, 1, 1, 0, 0, 0)  # two builds are byte-equal
SHARED = (
    "LICENSE", "requirements.txt", "utils/__init__.py", "utils/course.py", "utils/unrun.py",
    "utils/plotting.py", "utils/evaluation.py", "utils/rewards.py", "utils/tracking.py",
    "utils/validation.py", "utils/models/**/*", "utils/grading/__init__.py",
    "utils/grading/answers.py", "utils/grading/checks.py", "utils/grading/comparison.py",
    "utils/grading/engine.py", "utils/grading/extraction.py", "utils/grading/notebook.py",
    "utils/grading/observation.py", "utils/grading/recorded.py", "utils/grading/stand_in.py",
    "utils/grading/wire.py", "solutions/__init__.py", "tests/__init__.py",
)  # fmt: skip
AUTOGRADER = (
    "LICENSE", "requirements.txt", "solutions/*.py", "tests/*.py", "tests/points.toml",
    "tests/mistakes/*.py", "tests/alternatives/__init__.py", "utils/**/*",
)  # fmt: skip


def collect_files(patterns: tuple[str, ...]) -> dict[str, bytes]:
    """Path and content of what these patterns match, but for the control model: notebooks show what
    was made of it and do not load it."""
    paths = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    paths = {path for path in paths if not {"__pycache__", "control"} & set(path.parts)}
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in sorted(paths)}


def collect_course(stem: str) -> dict[str, bytes]:
    """The files of a chapter's course bundle."""
    stems = get_stems()
    earlier = stems[: stems.index(stem)]
    files = collect_files(SHARED) | collect_files(tuple(f"solutions/{s}.py" for s in earlier))
    files |= collect_files((f"chapters/figures/{stem}-*.png", f"chapters/results/{stem}*"))
    with tempfile.TemporaryDirectory() as folder:
        build_student(stem, Path(folder), folded_solutions=False)
        files[f"chapters/{stem}.ipynb"] = (Path(folder) / f"{stem}.ipynb").read_bytes()
    checks = [check for checks in get_checks(stem).values() for check in checks]
    for module, source in probes.collect_public(checks).items():
        files[f"{module.replace('.', '/')}.py"] = source.encode()
    files[f"tests/recorded/{stem}.bin"] = recorded.record(stem)
    readme = (PARTS / "README.md").read_text(encoding="utf-8")
    files["README.md"] = readme.replace("{stem}", stem).encode()
    return files


def collect_autograder() -> dict[str, bytes]:
    """The files of the autograder: the whole grader, and the two scripts that Gradescope calls."""
    files = collect_files(AUTOGRADER)
    for name in ("setup.sh", "run_autograder"):
        files[name] = (PARTS / name).read_bytes()
    return files


def write_zip(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            info = zipfile.ZipInfo(name, DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            is_script = data.startswith(b"#!")
            info.external_attr = (0o755 if is_script else 0o644) << 16
            archive.writestr(info, data)
    partial.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stems", nargs="*", metavar="STEM", help="chapters, e.g. ch2_ppo; all")
    args = parser.parse_args()
    unknown = set(args.stems) - set(get_written_stems())
    if unknown:
        parser.error(f"STEM should be among {get_written_stems()}, but {sorted(unknown)} are not")
    made = [DIST / "autograder.zip"]
    write_zip(made[0], collect_autograder())
    for stem in tqdm(args.stems or get_written_stems(), unit="bundle"):
        made.append(DIST / f"{stem}.zip")
        files = {f"{stem}/{name}": data for name, data in collect_course(stem).items()}
        write_zip(made[-1], files)
    for path in made:
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 2**20:.1f} MB")


if __name__ == "__main__":
    main()
