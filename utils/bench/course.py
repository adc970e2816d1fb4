"""What students and instructors wait for: checks, grading, imports, the tests."""

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import torch
from tqdm import tqdm

from solutions.ch1_lora import TransformerWithLora
from utils.bench.measuring import get_median, run_apart, take_turns
from utils.grading.checks import boot_models, get_chapters, get_checks, get_reference
from utils.grading.diagnosis import grade_exercise
from utils.grading.judging import get_quick_checks
from utils.grading.observation import Answers

ROOT = Path(__file__).parents[2]
BATCH, CLASS = 12, 60


def measure_checks(folder: Path, rounds: int) -> dict:
    """Measure seconds of `check()` on the reference, by exercise: the first time in a process,
    and once more. Medians of as many processes as `rounds`."""
    del folder
    results = {}
    with tqdm(total=len(get_chapters()) * rounds, desc="check()", leave=False) as bar:
        for chapter in get_chapters():
            measured = []
            for _ in range(rounds):
                measured.append(run_apart(_time_checks, chapter))
                bar.update()
            for name in measured[0]:
                results[f"{chapter}::{name}"] = {
                    when: get_median([seconds[name][when] for seconds in measured])
                    for when in ("first", "later")
                }
    return results


def _time_checks(chapter: str) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    TransformerWithLora.from_pretrained("embedded")  # as the notebook's first cells do
    checks = get_checks(chapter)
    boot_models()
    submission, results = Answers(vars(get_reference(chapter))), {}
    for exercise in (name for name in checks if get_quick_checks(chapter, name)):
        seconds = {}
        for when in ("first", "later"):
            start = time.perf_counter()
            grade_exercise(chapter, exercise, submission)
            seconds[when] = time.perf_counter() - start
        results[exercise] = seconds
    return results


def measure_grading(folder: Path, rounds: int) -> dict:
    """Measure seconds of `python -m utils.grade -j 2`: a batch of complete submissions of
    chapters 0 to 3, for each of them, and a class that hands in chapter 3. Starting is in both."""
    del rounds
    for number in range(BATCH):
        for chapter in get_chapters()[:4]:
            _hand_in(chapter, folder / "batch" / f"student-{number:02}" / f"{chapter}.ipynb")
    for number in range(CLASS):
        _hand_in("ch3_grpo", folder / "class" / f"student-{number:02}" / "ch3_grpo.ipynb")
    batch, course = (
        _grade(folder / name, folder / f"graded-{name}") for name in ("batch", "class")
    )
    return {
        f"a submission of chapters 0 to 3, in a batch of {BATCH}": batch / BATCH,
        f"a class of {CLASS}, chapter 3": course,
    }


def _hand_in(chapter: str, path: Path) -> None:
    """Write the notebook with solutions, without outputs, numbered so that no two are the same."""
    notebook = nbformat.read(ROOT / "solutions" / f"{chapter}.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    notebook.cells.append(nbformat.v4.new_markdown_cell(str(path.parent.name)))
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


def _grade(path: Path, out: Path) -> float:
    command = [
        sys.executable,
        "-m",
        "utils.grade",
        *sorted(path.iterdir()),
        "--out",
        out,
        "-j",
        "2",
    ]
    start = time.perf_counter()
    subprocess.run([*map(str, command)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    reports = [json.loads(report.read_text()) for report in out.glob("*/report.json")]
    if not reports or any(report["score"] != report["max_score"] for report in reports):
        raise ValueError("the reference should get full marks, but does not")
    return seconds


def measure_imports(folder: Path, rounds: int) -> dict:
    """Measure the seconds of a Python process that imports a module and ends."""
    del folder

    def run(module: str):
        subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, check=True)

    modules = ("torch", "transformer_lens", "solutions.ch3_grpo", "utils.course")
    sides: dict[str, Callable[[], Any]] = {name: functools.partial(run, name) for name in modules}
    seconds = take_turns(sides, rounds, "imports")
    return {name: get_median(values) for name, values in seconds.items()}


def measure_tests(folder: Path, rounds: int) -> dict:
    """Measure the seconds of the tests as `make test` runs them."""
    del folder, rounds
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadscope"]
    start = time.perf_counter()
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return {f"pytest, which ended with status {status}": time.perf_counter() - start}
