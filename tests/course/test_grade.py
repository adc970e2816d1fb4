"""Grading code that nobody has read: attacks score nothing, honest work its marks.

`make test` grades what people hand in (test_handed_in.py) and a class (test_grade_class.py);
`make test-all` also most attacks in one batch, all of them in a class of 60 that is killed
half-way, and every mistake through processes apart.
"""

import ast
import copy
import csv
import dataclasses
import json
import re
import struct
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.attacks.containers import make_containers, write_zip
from tests.course.helpers import ROOT, run_python
from utils.authoring.__main__ import sum_points
from utils.autograder import child, protections, reading
from utils.autograder import grader as grader_module
from utils.autograder.batch import Options
from utils.autograder.reading import SubmittedFiles, name_submissions, read_submission
from utils.autograder.reports import write_class, write_submission
from utils.autograder.roster import shield
from utils.grading import judging
from utils.grading.checks import get_checks
from utils.grading.comparison import Mismatch
from utils.grading.observation import Raised, Unsupported
from utils.grading.packing import pack, unpack
from utils.grading.points import FILE, fill_points, list_exercises, load_points
from utils.grading.substitution import ChapterSource

ATTACKS = sorted((ROOT / "tests" / "attacks").glob("*/*.py"))
# They run until they are stopped: one of them is enough for the batch.
LONG = {"loop", "sleep", "memory", "recursion", "garbage", "processes", "disk", "flood"}
LONG |= {"only_inherits", "helper_that_stands_in"}  # of whole chapters: see test_handed_in.py
SECONDS = 5
needs_time = pytest.mark.takes_long
linux = pytest.mark.skipif(sys.platform != "linux", reason="what shuts a child off is Linux's")


def sandboxed(test):
    """Mark a test that grades in processes of the sandbox."""
    return linux(needs_time(test))


run_grade = partial(run_python, "-m", "utils.grade")


def load_reports(out: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/report.json")}


def look_at(path: Path) -> tuple[int, int]:
    return path.stat().st_mtime_ns, path.stat().st_mode


def get_exercise(report: dict, name: str) -> dict:
    return next(exercise for exercise in report["exercises"] if exercise["name"] == name)


COPIES = """
import shutil, tempfile
from pathlib import Path


def masked_mean(values, mask, dim=None):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a").write_text("kept")
        shutil.copy2(Path(folder, "a"), Path(folder, "b"))
    values = values.masked_fill(~mask, 0)
    total, count = (values.sum(), mask.sum()) if dim is None else (values.sum(dim), mask.sum(dim))
    return total / count.clamp(min=1)
"""


def put_in_own_words(source: str) -> str:
    """The reference with a line more in each function: as it is, it would be the course's file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body.insert(ast.get_docstring(node) is not None, ast.Pass())
    return ast.unparse(tree)


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """One run over honest work, hostile files and the attacks that end by themselves."""
    folder, out = tmp_path_factory.mktemp("submissions"), tmp_path_factory.mktemp("graded")
    # Work that is right, untouched, or writes files: test_handed_in.py has more.
    honest = [folder / name for name in ("full.py", "empty.ipynb", "copies.py")]
    honest[0].write_bytes((ROOT / "solutions" / "ch0_sampling.py").read_bytes())
    honest[1].write_bytes((ROOT / "chapters" / "ch0_sampling.ipynb").read_bytes())
    honest[2].write_text(COPIES)
    hostile = [path for path in ATTACKS if path.stem == "loop" or path.stem not in LONG]
    (folder / "containers").mkdir()
    containers = make_containers(folder / "containers")
    places = [ROOT / "utils", ROOT / "solutions", ROOT / "tests", folder]
    files = [path for place in places for path in place.rglob("*") if path.suffix != ".pyc"]
    before = {path: look_at(path) for path in files if path.is_file()}
    result = run_grade(
        *(*honest, *hostile, *containers, "--seconds", SECONDS, "--out", out),
        TMPDIR=str(tmp_path_factory.mktemp("temporary")),
    )
    changed = [str(path) for path, seen in before.items() if look_at(path) != seen]
    paths, reports = [*honest, *hostile, *containers], load_reports(out)
    found = {"result": result, "out": out, "reports": reports, "paths": paths}
    return SimpleNamespace(**found, folder=folder, changed=changed)


@sandboxed
def test_honest_work_gets_its_marks(batch):
    reports = batch.reports
    full = sum(check.points for checks in get_checks("ch0_sampling").values() for check in checks)
    assert reports["full"]["score"] == reports["full"]["max_score"] == full
    assert set(reports["full"]["protections"]) == set(protections.PROTECTIONS)
    mean = get_exercise(reports["copies"], "masked_mean")
    assert mean["score"] == mean["max_score"]
    assert reports["empty"]["score"] == 0
    assert reports["empty"]["max_score"] == full
    messages = [c["message"] for e in reports["empty"]["exercises"] for c in e["checks"]]
    assert all("not written yet" in message for message in messages)


@sandboxed
def test_attacks_score_nothing(batch):
    reports = [r for name, r in batch.reports.items() if name not in ("full", "copies")]
    assert len(batch.reports) == len(batch.paths)
    gained = {report["submission"]: report["score"] for report in reports if report["score"]}
    assert not gained
    ended = [r["submission"] for r in reports if "ended the grader" in " ".join(r["problems"])]
    assert not ended
    assert batch.result.returncode == 1  # some cannot be read
    assert "graded" in batch.result.stdout.splitlines()[-1]


@sandboxed
def test_attacks_change_nothing_outside(batch):
    assert not batch.changed
    places = [Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"), Path.home(), ROOT, batch.folder]
    names = ("escaped.py", "left-behind.py", "sitecustomize.py", "attack-0", "attack.sock",
             "attack-pipe", ".written-outside", "torch.py", "results.json")  # fmt: skip
    assert [
        str(place / name) for place in places for name in names if (place / name).exists()
    ] == []
    assert not list(Path(__import__("tempfile").gettempdir()).glob("grading-models-*/../escaped*"))


@sandboxed
def test_hidden_checks_tell_nothing_that_the_student_chose(batch):
    for report in batch.reports.values():
        for exercise in report["exercises"]:
            for check in exercise["checks"]:
                if not check["public"]:
                    for word in ("Chameleon", "Anything", "Number", "31337", "expected  ", "of:\n"):
                        assert word not in check["message"], (report["submission"], check)


@sandboxed
def test_a_child_knows_nothing_of_the_batch(batch):
    """Neither the secret nor the other submissions, the environment or the other solutions."""
    mean = get_exercise(batch.reports["what_the_batch_knows"], "masked_mean")
    said = mean["checks"][0]["message"]
    assert "printed:" in said
    secret = (batch.out / ".secret").read_text()
    for word in (secret, "PYTEST", "full.py", "secret", "named", "todo"):
        assert word not in said
    mean = get_exercise(batch.reports["solutions_that_stand_in"], "masked_mean")
    assert "calc_entropy" not in "".join(check["message"] for check in mean["checks"])


ENDED = """
import os, signal, sys
from multiprocessing.connection import Pipe

from utils.autograder import jobs, sandbox

ours, theirs = Pipe()
if os.fork() == 0:
    ours.close()

    def end_early(connection, *rest):
        os.read(connection.fileno(), 100)  # a part of the job
        os._exit(0)

    jobs._be_child = end_early
    jobs.serve(theirs, sandbox.Limits((), os.devnull, os.getpid()))
    os._exit(0)
theirs.close()
signal.alarm(20)
try:
    names = {"": set(range(1000))}
    jobs.ask(ours, jobs.Job("list_definitions", 5, {"file": ("", b""), "names": names}))
except (EOFError, OSError):
    print("another server takes its place")
"""


@sandboxed
def test_a_child_that_is_ended_while_it_reads_its_job_holds_up_nobody():
    result = run_python("-c", ENDED)
    assert "another" in result.stdout, result.stderr


@sandboxed
def test_the_reports_for_people_and_platforms(batch):
    results = json.loads((batch.out / "copies" / "results.json").read_text())
    report = batch.reports["copies"]
    assert results["score"] == report["score"]
    assert sum(test["score"] for test in results["tests"]) == pytest.approx(report["score"])
    allowed = {"score", "max_score", "status", "name", "output", "output_format", "visibility"}
    assert all(test.keys() <= allowed for test in results["tests"])
    assert {test["visibility"] for test in results["tests"]} == {"visible"}
    with (batch.out / "class.csv").open(newline="") as file:
        rows = {row["submission"]: row for row in csv.DictReader(file)}
    assert float(rows["copies"]["score"]) == report["score"]
    assert len(rows) == len(batch.paths)
    assert not any(name.startswith(("=", "+", "-", "@")) for name in rows)
    page = (batch.out / "class.html").read_text()
    assert "<b>&'" not in page
    assert "masked_mean" in page
    assert "not defined" in (batch.out / "copies" / "report.html").read_text()


# --- Parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.5, float("inf"), "text", [1, [2.0]], {"a": {"b": None}}, Unsupported("x"),
     Raised("KeyError", "m", "t", "p"), 10**30],
)  # fmt: skip
def test_plain_data_comes_back(value):
    back = unpack(pack(value))
    assert back == value or back == float("inf")
    assert unpack(pack(10**5000)) == float("inf")


def test_bytes_that_are_no_observation_are_refused():
    good = pack({"a": [1.0, 2.0]})
    twice = pack([torch.zeros(2), torch.zeros(2)]).replace(b'["tensor", "1"]', b'["tensor", "0"]')
    empty = {str(i): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(10**5)}
    header = json.dumps(empty).encode()
    tree = json.dumps(["plain", 0]).encode()
    many = b"".join(struct.pack("<Q", len(part)) + part for part in (tree, header))
    for bad in (twice, many, b"", b"\0" * 8, good[:-1], good[:5], b"\xff" * 40, b"[" * 10**6):
        with pytest.raises(ValueError, match="no observation"):
            unpack(bad)


def test_names_are_safe_and_differ(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [tmp_path / "a" / "ch0.ipynb", tmp_path / "b" / "ch0.ipynb", tmp_path / ".."]
    paths.append(tmp_path / "x\n<y>.py")
    paths += [tmp_path / "class.html.zip", tmp_path / "class.csv", tmp_path / ("語" * 80 + ".py")]
    names = name_submissions(paths)
    assert len(names) == len(paths)
    assert not {"class.html", "class.csv"} & names.keys()
    for name in reading.OWN_FILES:  # of the batch's, beside which the folders stand
        for path in (Path(name), Path(f"{name}.py"), Path(f"{name.upper()}.partial.zip")):
            assert not any(map(reading.is_taken, name_submissions([path])))
    assert max(len(name.encode()) for name in names) <= 110
    assert not any("/" in name or "\n" in name or name.startswith(".") for name in names)


MEAN = """def masked_mean(values, mask, dim=None):
    return values.masked_fill(~mask, 0).sum(dim) / mask.sum(dim).clamp(min=1)
"""


def test_what_is_no_submission_is_a_problem_and_no_error(tmp_path):
    (tmp_path / "text.txt").write_text("hello")
    assert read_submission("x", tmp_path / "nothing.ipynb").problems
    assert read_submission("x", tmp_path / "text.txt").problems
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.py").write_text(MEAN)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert read_submission("x", tmp_path / "folder").files
    assert not read_submission("x", tmp_path / "link").files


def test_small_files_beside_the_work_are_read_and_change_its_digest(tmp_path):
    folder = tmp_path / "hw"
    folder.mkdir()
    for name, data in {"a.py": b"x = 1", "cfg.json": b"{}", "big.bin": bytes(2**22)}.items():
        (folder / name).write_bytes(data)
    read = read_submission("x", folder)
    assert (read.data, read.problems) == ((("cfg.json", b"{}"),), ())
    (folder / "cfg.json").write_bytes(b"[]")
    assert read_submission("x", folder).digest != read.digest
    for number in range(100):
        (folder / f"{number}.txt").write_bytes(b"1")
        (folder / f"{number}.png").write_bytes(b"1")
    assert len(read_submission("x", folder).data) == reading.MAX_DATA_FILES


def test_a_zip_takes_no_more_than_a_submission_may_have(tmp_path):
    path = tmp_path / "work.zip"
    for compression in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):  # 4 KB can unpack to many GB
        assert not read_submission("x", write_zip(path, {"mine.py": MEAN}, compression)).files
    write_zip(path, {f"{number}.py": MEAN for number in range(1000)}, zipfile.ZIP_STORED)
    path.write_bytes(path.read_bytes().replace(b"values", b"valuse"))  # no checksum is right
    assert len(read_submission("x", path).problems) == reading.MAX_FILES + 1


def test_a_zip_has_a_bounded_number_of_entries_and_short_names(tmp_path, monkeypatch):
    path = tmp_path / "work.zip"
    hidden = {f".venv/{number}.py": "" for number in range(5000)}
    read = read_submission("x", write_zip(path, hidden | {"mine.py": MEAN}))
    assert [name for name, _ in read.files] == ["mine.py"]
    long = {f"{number}{'a' * 60_000}.py": MEAN for number in range(10)}
    read = read_submission("x", write_zip(path, long, zipfile.ZIP_BZIP2))  # which cannot be read
    assert len("".join(read.problems)) < 1000
    write_zip(path, {f"{number}": "" for number in range(5001)})
    monkeypatch.setattr(reading, "MAX_ZIP_ENTRIES", 5000)
    monkeypatch.setattr(zipfile, "ZipFile", None)  # an object of each entry is made at once
    assert "at most 5000 entries" in read_submission("x", path).problems[0]


def test_what_a_submission_puts_into_reports_is_bounded(tmp_path, monkeypatch):
    """Names of files, problems, statements that are left out."""
    inner = write_zip(tmp_path / "inner.zip", {f"{n}{'a' * 60_000}.zip": "" for n in range(60)})
    files = {f"{n}{'b' * 900}.py": f"{MEAN}\n" + "go()\n" * 30 + ")\n" * 9 for n in range(130)}
    path = write_zip(tmp_path / "work.zip", {"inner.zip": inner.read_bytes()} | files)
    read = read_submission("x", path)
    assert len("".join(read.problems)) < 100_000
    report = grade_without_processes(monkeypatch, torch.zeros(3), submitted=read)
    assert len(json.dumps(report)) < 100_000
    assert report["problems"][-1].startswith("and ")
    write_submission(tmp_path / "x", report)
    write_class(tmp_path, [report])
    assert (tmp_path / "x" / "report.html").stat().st_size < 150_000
    assert (tmp_path / "class.html").stat().st_size < 10_000
    assert (tmp_path / "class.csv").stat().st_size < 10_000


def make_grader(submitted: SubmittedFiles, **options) -> grader_module.Grader:
    """Without processes: what it asks for has to be answered here."""
    options = Options("secret", FILE, 30, **options)
    return grader_module.Grader(None, options, load_points(FILE), submitted)


# --- Errors of the grader -------------------------------------------------------------------------


def fail(*_, **__):
    raise KeyError("of the grader's own")


def end_in_an_error(source, *_):
    return dataclasses.replace(source, source=f"{source.source}\n    )")


BREAKS = {
    "stand-in": [(ChapterSource, "without", end_in_an_error)],
    "probe": [(grader_module, "collect_sources", lambda _: {"tests.broken": "def f(:"})],
    "collecting of sources": [(grader_module, "collect_sources", fail)],
    "reference": [(module, "observe_reference", fail) for module in (judging, grader_module)],
    "oracle": [(judging, "observe_expected", fail)],
    # So that the check rejects everything, the reference too:
    "tolerance": [(judging, "find_mismatch", lambda *_, **__: Mismatch("it differs"))],
}


def grade_without_processes(
    monkeypatch, observed=None, only=("masked_mean",), submitted=None, chapters=()
) -> dict:
    """Grade a function that is there, with what a child would give."""

    def ask(_, job):
        if job.action == "run_probe" and "tests.broken" not in job.arguments.modules:
            count = len(job.arguments.seeds)
            seen: dict = {"printed": "", "log": "", "is_stub": False}
            seen["observations"] = [copy.deepcopy(observed) for _ in range(count)]
            return grader_module.Reply(grader_module.Outcome.DONE, pack(seen))
        task, error = child.get_ready(job.action, job.arguments)
        data = b"" if error else task()
        return grader_module.Reply(grader_module.Outcome.DONE, data, (), error)

    monkeypatch.setattr(grader_module.Grader, "ask", ask)
    submitted = submitted or SubmittedFiles("x", (("work.py", MEAN.encode()),))
    grader_module._find_fault.cache_clear()
    try:
        return make_grader(submitted, chapters=chapters).grade(only=only)
    finally:
        grader_module._find_fault.cache_clear()
        grader_module._try_stand_in.cache_clear()


@pytest.mark.parametrize("broken", BREAKS)
def test_an_error_of_the_grader_is_no_zero(broken, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tests.broken", None)
    for place, name, value in BREAKS[broken]:
        monkeypatch.setattr(place, name, value)
    grader_module._try_stand_in.cache_clear()
    report = grade_without_processes(monkeypatch, torch.zeros(3))
    exercise = get_exercise(report, "masked_mean")
    failed = [check for check in exercise["checks"] if check["error"]]
    # An oracle that fails fails only those that have one; all others reject what was observed.
    assert 0 < len(failed) == exercise["not_graded"] == len(report["not_graded"])
    assert broken == "oracle" or len(failed) == len(exercise["checks"])
    lost = sum(check["max_points"] for check in exercise["checks"])
    assert exercise["max_score"] == report["max_score"] == pytest.approx(lost)
    assert all(check["max_points"] == check["points"] == 0 for check in failed)
    assert all(c["message"].startswith("not graded: an error of the grader") for c in failed)
    assert "grader's own" not in str([check["message"] for check in exercise["checks"]])
    write_submission(tmp_path / "x", report)
    write_class(tmp_path, [report])
    (test,) = json.loads((tmp_path / "x" / "results.json").read_text())["tests"]
    assert "not graded: an error of the grader" in test["name"]
    for page in ("x/report.html", "class.html"):
        assert "an error of the grader: " in (tmp_path / page).read_text()
    with (tmp_path / "class.csv").open(newline="") as file:
        assert "masked_mean" in next(csv.DictReader(file))["not graded"]


def test_what_a_student_gives_is_no_error_of_the_grader(monkeypatch):
    """Not even what cannot be compared; and where the search for a sentence fails, marks stay."""
    monkeypatch.setattr(grader_module, "diagnose", fail)
    strange = [torch.zeros(3), torch.zeros(2, dtype=torch.complex64), None, [[]], {"a": [None]},
               Raised("SyntaxError", "the stand-in", "", "", "check"),
               Unsupported("x"), torch.zeros(0, 5)]  # fmt: skip
    for observed in strange:
        report = grade_without_processes(monkeypatch, observed)
        assert not report["not_graded"]
        assert report["score"] == 0 < report["max_score"]


def test_what_is_larger_than_any_answer_is_not_kept(monkeypatch):
    """Of all checks of an exercise together that filled the memory."""
    kept = []
    monkeypatch.setattr(grader_module, "diagnose", lambda verdicts, _: kept.extend(verdicts))
    report = grade_without_processes(monkeypatch, torch.zeros(2**22))
    assert kept
    assert not any(verdict.observations for verdict in kept)
    assert all(check["message"] for check in get_exercise(report, "masked_mean")["checks"])


def test_work_of_another_chapter_is_said(monkeypatch):
    for chapters, said in (
        (("ch4_kl",), ["it defines exercises of ch0_sampling, but what was set is ch4_kl"]),
        (("ch0_sampling", "ch4_kl"), []),
    ):
        report = grade_without_processes(monkeypatch, only=("no exercise",), chapters=chapters)
        assert report["problems"] == said


@pytest.mark.parametrize("text", ["=1+1", "\t=1+1", "\r\n@SUM(A1)", " -1"])
def test_a_cell_of_the_class_is_no_formula(text):
    assert shield(text) == f"'{text}"


def test_reading_the_files_counts_as_time_of_the_submission(monkeypatch):
    submitted = SubmittedFiles("x", (("work.py", MEAN.encode()),))
    report = make_grader(submitted, submission_seconds=-1).grade()
    assert report["problems"] == ["work.py was not read, as others took too long"]


def test_points_are_those_of_the_checks_and_can_be_edited(tmp_path):
    worth = sum_points()
    assert {c: list(names) for c, names in worth.items()} == {c: list_exercises(c) for c in worth}
    points = tmp_path / "points.toml"
    points.write_text(
        'core_share = 1\n[ch0_sampling]\nmasked_mean = { points = 10, visibility = "hidden" }\n'
    )
    assert load_points(points).core_share == 1
    points.write_text(fill_points(worth, points))  # what was edited stays
    table = load_points(points).table
    assert load_points(points).core_share == 1
    assert table["ch0_sampling"]["masked_mean"] == {"points": 10, "visibility": "hidden"}
    assert table["ch0_sampling"]["left_pad"] == {"points": 3, "visibility": "visible"}
    assert {c: list(names) for c, names in table.items()} == {c: list(n) for c, n in worth.items()}
    for wrong in ("[ch9]", "[ch0_sampling]\nx = {points = 1}", "[ch0_sampling]\nleft_pad = 3",
                  "[ch0_sampling]\nleft_pad = {points = -1}", "[", "core_share = 2"):  # fmt: skip
        points.write_text(wrong)
        with pytest.raises(ValueError, match=r"points\.toml"):
            load_points(points)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.ipynb", "--out", "OUT"], "no such path: nowhere.ipynb"),
        (["README.md", "--out", "OUT", "-j", "0"], "--submission-seconds should be at least 1"),
        (["README.md", "--out", "OUT", "--points", "none.toml"], "none.toml should be a TOML file"),
        (["README.md", "--out", "Makefile"], "--out should be a folder to write into"),
        (["README.md", "--out", "README.md/graded"], "--out should be a folder to write into"),
        (["README.md", "--out", "."], "--out should be another folder"),
        (["chapters", "--out", "chapters"], "it should not be among the submissions"),
    ],
)
def test_wrong_arguments_are_named(arguments, said, tmp_path):
    result = run_grade(*[str(tmp_path / "out") if a == "OUT" else a for a in arguments])
    assert result.returncode == 2
    assert said in result.stderr


@sandboxed
def test_a_report_is_the_same_under_every_hash_seed(tmp_path):
    reports = []
    for seed in ("0", "3"):  # under 3 a class was once left out before its methods
        out = tmp_path / seed
        source = "solutions/ch2_ppo.py"
        run_grade(source, "--secret", "s", "--out", out, PYTHONHASHSEED=seed)
        (path,) = out.glob("*/report.json")
        reports.append(re.sub(r'"seconds": [0-9.]+', "", path.read_text()))
    assert reports[0] == reports[1]
    report = json.loads(path.read_text())
    assert report["score"] == report["max_score"] > 0
