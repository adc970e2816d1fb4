"""`make test-all`: every attack, a class of sixty that is killed half-way, every mistake."""

import signal
import subprocess
import sys
import time
import tomllib

import pytest

from tests.attacks.containers import make_containers
from tests.course.test_grade import (
    ATTACKS,
    LONG,
    ROOT,
    SECONDS,
    linux,
    load_reports,
    needs_time,
    run_grade,
)
from utils.autograder import batch
from utils.grading.checks import get_chapters
from utils.grading.known_answers import get_mistakes
from utils.grading.points import FILE


@linux
@needs_time
def test_a_class_of_sixty_that_is_killed_half_way(tmp_path):
    """A third is hostile or broken. After SIGKILL nothing is lost, and nothing graded twice."""
    folder, out = tmp_path / "submissions", tmp_path / "graded"
    folder.mkdir()
    (tmp_path / "containers").mkdir()
    hostile = [*ATTACKS, *make_containers(tmp_path / "containers")]
    paths = hostile[:: max(len(hostile) // 20, 1)][:20]
    expected, points = {}, tomllib.loads(FILE.read_text())
    for n in range(40):
        chapter = get_chapters()[n % len(get_chapters())]
        worth = {name: entry["points"] for name, entry in points[chapter].items()}
        path = folder / f"student{n}.py"
        source = (ROOT / "solutions" / f"{chapter}.py").read_text()
        if n % 3 == 1:  # one exercise wrong
            first = next(iter(worth)).partition(".")[0]
            source += f"\n\ndef {first}(*args, **kwargs):\n    return None\n"
            worth = {name: w for name, w in worth.items() if name.partition(".")[0] != first}
        path.write_text(source)
        paths.append(path)
        expected[path.stem] = sum(worth.values())
    options = [*map(str, paths), "--out", str(out), "--seconds", str(3 * SECONDS), "-j", "2"]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first_run = subprocess.Popen(
        [sys.executable, "-m", "utils.grade", *options], cwd=ROOT, **silent
    )
    end = time.monotonic() + 1200
    while len(list(out.glob("*/report.json"))) < 30:
        time.sleep(0.5)
        assert first_run.poll() is None
        assert time.monotonic() < end
    first_run.send_signal(signal.SIGKILL)
    first_run.wait()
    time.sleep(2)
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("*/report.json")}
    second = run_grade(*options)
    assert f"({len(stamps)} from before)" in second.stdout
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}
    scores = {name: report["score"] for name, report in load_reports(out).items()}
    assert len(scores) == 60
    assert {name: scores[name] for name in expected} == expected
    assert not {name for name, score in scores.items() if name not in expected and score}


@linux
@needs_time
@pytest.mark.parametrize("chapter", get_chapters())
def test_every_mistake_is_rejected_in_processes_apart(chapter, tmp_path):
    """Each is handed in with the rest of its chapter."""
    mistakes = {f"{answer.exercise}-{answer.name}": answer for answer in get_mistakes(chapter)}
    only = {name: (answer.exercise,) for name, answer in mistakes.items()}
    todo = {name: tmp_path / f"{name}.py" for name in mistakes}
    for name, path in todo.items():
        path.write_text(mistakes[name].make_source())
    reports = dict(batch.grade_all(todo, 2, batch.Options("secret", FILE, 15, only=only)))
    assert len(reports) == len(get_mistakes(chapter))
    assert not [n for n, report in reports.items() if report["score"] >= report["max_score"]]


@linux
@needs_time
def test_attacks_that_run_until_they_are_stopped_score_nothing(tmp_path):
    """The others are in the batch of test_grade.py."""
    attacks = [path for path in ATTACKS if path.stem in LONG]
    run_grade(*attacks, "--seconds", SECONDS, "--out", tmp_path / "out")
    scores = {name: report["score"] for name, report in load_reports(tmp_path / "out").items()}
    assert len(scores) == len(attacks)
    assert not any(scores.values()), scores
