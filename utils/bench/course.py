"""What students and instructors wait for: checks, grading, imports, the tests."""

import json
import subprocess
import sys
import time
from pathlib import Path

import nbformat
from tqdm import tqdm

from utils.bench.measuring import get_median, run_apart, take_turns

ROOT = Path(__file__).parents[2]
BATCH, CLASS = 12, 60


def measure_checks(folder: Path, rounds: int) -> dict:
    """Seconds of `check()` on the reference, by exercise: the first time in a process, and once
    more. Medians of as many processes as `rounds`."""
    from utils.grading.checks import get_stems

    del folder
    results = {}
    with tqdm(total=len(get_stems()) * rounds, desc="check()", leave=False) as bar:
        for stem in get_stems():
            measured = []
            for _ in range(rounds):
                measured.append(run_apart(_time_checks, stem))
                bar.update()
            for name in measured[0]:
                results[f"{stem}::{name}"] = {
                    when: get_median([seconds[name][when] for seconds in measured])
                    for when in ("first", "later")
                }
    return results


def _time_checks(stem: str) -> dict[str, dict[str, float]]:
    import torch

    torch.set_num_threads(1)
    from solutions.ch1_lora import TransformerWithLora
    from utils.grading.checks import boot_models, get_checks, get_reference
    from utils.grading.engine import get_quick_checks, grade_exercise
    from utils.grading.observation import Answers

    TransformerWithLora.from_pretrained("embedded")  # as the notebook's first cells do
    checks = get_checks(stem)
    boot_models()
    submission, results = Answers(vars(get_reference(stem))), {}
    for exercise in (name for name in checks if get_quick_checks(stem, name)):
        seconds = {}
        for when in ("first", "later"):
            start = time.perf_counter()
            grade_exercise(stem, exercise, submission)
            seconds[when] = time.perf_counter() - start
        results[exercise] = seconds
    return results


def measure_grading(folder: Path, rounds: int) -> dict:
    """Seconds of `python -m utils.grade -j 2`: a batch of complete submissions of chapters 0 to 3,
    for each of them, and a class that hands in chapter 3. Starting is in both."""
    from utils.grading.checks import get_stems

    del rounds
    for number in range(BATCH):
        for stem in get_stems()[:4]:
            _hand_in(stem, folder / "batch" / f"student-{number:02}" / f"{stem}.ipynb")
    for number in range(CLASS):
        _hand_in("ch3_grpo", folder / "class" / f"student-{number:02}" / "ch3_grpo.ipynb")
    batch, course = (
        _grade(folder / name, folder / f"graded-{name}") for name in ("batch", "class")
    )
    return {
        f"a submission of chapters 0 to 3, in a batch of {BATCH}": batch / BATCH,
        f"a class of {CLASS}, chapter 3": course,
    }


def _hand_in(stem: str, path: Path) -> None:
    """The notebook with solutions, without outputs, numbered so that no two are the same file."""
    notebook = nbformat.read(ROOT / "solutions" / f"{stem}.ipynb", as_version=4)
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
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    reports = [json.loads(report.read_text()) for report in out.glob("*/report.json")]
    if not reports or any(report["score"] != report["max_score"] for report in reports):
        raise ValueError("the reference should get full marks, but does not")
    return seconds


def measure_imports(folder: Path, rounds: int) -> dict:
    """Seconds of a Python process that imports a module and ends."""
    del folder

    def run(module: str):
        subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, check=True)

    modules = ("torch", "transformer_lens", "solutions.ch3_grpo", "utils.course")
    seconds = take_turns({name: lambda m=name: run(m) for name in modules}, rounds, "imports")
    return {name: get_median(values) for name, values in seconds.items()}


def measure_tests(folder: Path, rounds: int) -> dict:
    """Seconds of the tests as `make test` runs them."""
    del folder, rounds
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4"]
    start = time.perf_counter()
    status = subprocess.run([*command, "--dist", "loadfile"], cwd=ROOT, check=False).returncode
    return {f"pytest, which ended with status {status}": time.perf_counter() - start}
