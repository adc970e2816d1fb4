"""`make test-all`: every attack, a class of sixty that is killed half-way, every mistake."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

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
from utils.grading.checks import get_chapters, get_checks
from utils.grading.known_answers import get_mistakes


@linux
@needs_time
def test_a_class_of_sixty_that_is_killed_half_way(tmp_path):
    """A third is hostile or broken. After SIGKILL nothing is lost, and nothing graded twice."""
    folder, out = tmp_path / "submissions", tmp_path / "graded"
    folder.mkdir()
    (tmp_path / "containers").mkdir()
    hostile = [*ATTACKS, *make_containers(tmp_path / "containers")]
    hostile = hostile[:: max(len(hostile) // 20, 1)][:20]
    expected, paths = {}, list(hostile)
    for n in range(40):
        chapter = get_chapters()[n % len(get_chapters())]
        path = folder / f"student{n}.py"
        source = (ROOT / "solutions" / f"{chapter}.py").read_text()
        if n % 3 == 1:  # one exercise less
            name = next(iter(get_checks(chapter))).partition(".")[0]
            source += f"\n\ndef {name}(*args, **kwargs):\n    raise NotImplementedError\n"
        path.write_text(source)
        paths.append(path)
        checks = get_checks(chapter)
        expected[path.stem] = sum(
            check.points
            for exercise, found in checks.items()
            for check in found
            if n % 3 != 1 or exercise.partition(".")[0] != next(iter(checks)).partition(".")[0]
        )
    command = [sys.executable, "-m", "utils.grade", *map(str, paths), "--out", str(out)]
    command += ["--seconds", str(3 * SECONDS), "-j", "2"]
    first = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 1200
    while len(list(out.glob("*/report.json"))) < 30:
        time.sleep(0.5)
        assert first.poll() is None
        assert time.monotonic() < end
    first.send_signal(signal.SIGKILL)
    first.wait()
    time.sleep(2)
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("*/report.json")}
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert f"({len(stamps)} from before)" in second.stdout
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}
    reports = load_reports(out)
    assert len(reports) == 60
    wrong = {
        name: (reports[name]["score"], score)
        for name, score in expected.items()
        if reports[name]["score"] != score
    }
    assert not wrong
    assert not {n: r["score"] for n, r in reports.items() if n not in expected and r["score"]}


GRADE_ONE_EXERCISE_EACH = """
import json, sys
from pathlib import Path
from utils.autograder import batch
from utils.grading.points import FILE

folder = Path(sys.argv[1])
only = json.loads((folder / "only.json").read_text())
todo = {name: folder / f"{name}.py" for name in only}
if __name__ == "__main__":
    for name, report in batch.grade_all(todo, 2, batch.Options("secret", FILE, 15, only=only)):
        [exercise] = report["exercises"]
        print(json.dumps([name, exercise["score"] < exercise["max_score"]]))
"""


def grade_one_exercise_each(answers, folder: Path) -> dict[str, bool]:
    """Whether each answer, handed in with the rest of its chapter, loses points."""
    only = {}
    for answer in answers:
        name = f"{answer.exercise}-{answer.name}"
        only[name] = [answer.exercise]
        (folder / f"{name}.py").write_text(answer.make_source())
    (folder / "only.json").write_text(json.dumps(only))
    command = [sys.executable, "-c", GRADE_ONE_EXERCISE_EACH, str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(line) for line in result.stdout.splitlines())


@linux
@needs_time
@pytest.mark.parametrize("chapter", get_chapters())
def test_every_mistake_is_rejected_in_processes_apart(chapter, tmp_path):
    rejected = grade_one_exercise_each(get_mistakes(chapter), tmp_path)
    assert [name for name, lost in rejected.items() if not lost] == []
    assert len(rejected) == len(get_mistakes(chapter))


@linux
@needs_time
def test_attacks_that_run_until_they_are_stopped_score_nothing(tmp_path):
    """The others are in the batch of test_grade.py."""
    attacks = [path for path in ATTACKS if path.stem in LONG]
    run_grade(*attacks, "--seconds", SECONDS, "--out", tmp_path / "out")
    scores = {name: report["score"] for name, report in load_reports(tmp_path / "out").items()}
    assert scores == dict.fromkeys(scores, 0)
    assert len(scores) == len(attacks)
