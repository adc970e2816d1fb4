"""What an instructor does with a class: points, late work, another try, a roster, grade books."""

import csv
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.attacks.containers import make_notebook
from tests.course.test_grade import get_exercise, linux, load_reports
from utils import grade
from utils.autograder.roster import Person, find_owners, read_roster, write_grades
from utils.grading.points import FILE, earn, weigh
from utils.grading.reference import get_source
from utils.version import get_version

CHAPTER = "ch4_kl"
ROSTER = """id,name,email,late,adjustment,comment
101,"Doe, Jane",,20,,two days late
102,John Smith,,,1.5,explained it well
103,Zoë Müller,zm@example.org,,,
104,Nobody There,,,,
"""


def read_csv(path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def run_grade(capsys, monkeypatch):
    """Run `python -m utils.grade` in this process, whose forkserver starts once."""
    # pytest's own handler of SIGTERM stays.
    monkeypatch.setattr(grade, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=15))

    def run(*arguments):
        returncode = grade.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return SimpleNamespace(returncode=returncode, stdout=said.out, stderr=said.err)

    return run


@linux
@pytest.mark.takes_long
def test_a_class_from_its_first_day_to_its_grade_book(tmp_path, run_grade):
    folder, out = tmp_path / "handed in", tmp_path / "graded"
    folder.mkdir()
    right, of_before = get_source(CHAPTER), 'VERSION = "0.9"'
    half = right + "\n\ndef calc_exact_kl(logits, ref_logits):\n    return logits.sum(-1)\n"
    (folder / "doejane_101_9000_hw.ipynb").write_text(
        make_notebook(of_before, *right.split("\n\n\n"))
    )
    (folder / "John Smith_55_assignsubmission_file_.py").write_text(half)
    (folder / "broken.ipynb").write_bytes(b"%PDF-1.7")
    points, roster = tmp_path / "points.toml", tmp_path / "roster.csv"
    shutil.copy(FILE, points)
    roster.write_text(ROSTER)
    options = ["--out", out, "--chapters", CHAPTER, "--points", points, "--roster", roster]
    first = run_grade(*sorted(folder.iterdir()), *options)
    assert first.returncode == 1, first.stderr
    assert "not graded: broken" in first.stderr
    assert "Nobody There (104) handed in nothing" in first.stderr
    reports = load_reports(out)
    jane, john = reports["doejane_101_9000_hw"], reports["John Smith_55_assignsubmission_file_"]
    assert jane["score"] == jane["max_score"] > john["score"] > 0
    assert (reports["broken"]["score"], reports["broken"]["max_score"]) == (0, jane["max_score"])
    said = f"hw.ipynb is of version 0.9 of the course, and was graded by {get_version()}"
    assert said in str(jane["problems"])
    assert "version" not in str(john["problems"])
    assert {report["version"] for report in reports.values()} == {get_version()}
    assert f"version {get_version()} of the course" in (out / "class.html").read_text()
    assert jane["seconds"] >= sum(e["seconds"] for e in jane["exercises"]) - 0.5 > 0
    grades = {row["id"]: row for row in read_csv(out / "grades.csv")}
    assert float(grades["101"]["total"]) == pytest.approx(0.8 * jane["score"])
    assert float(grades["102"]["total"]) == pytest.approx(john["score"] + 1.5)
    assert float(grades["104"]["total"]) == 0
    assert read_csv(out / "moodle.csv")[0]["RLHF"] == grades["101"]["total"]
    assert read_csv(out / "canvas.csv")[1]["RLHF"] == grades["101"]["total"]

    # Other points run nothing; a late submission joins the others.
    text = points.read_text().replace(
        '"calc_exact_kl" = { points = 7', '"calc_exact_kl" = { points = 70'
    )
    points.write_text(text.replace("core_share = 0.6667", "core_share = 1"))
    assert points.read_text() != FILE.read_text()
    again = run_grade(*sorted(folder.iterdir()), *options)
    assert "(3 from before)" in again.stdout, again.stdout
    changed = load_reports(out)
    most = jane["max_score"] + 63
    assert {report["max_score"] for report in changed.values()} == {most}
    assert changed["doejane_101_9000_hw"]["score"] == most
    (tmp_path / "zm.py").write_text(right)
    mixed = run_grade(tmp_path / "zm.py", "--out", out)
    assert mixed.returncode == 2
    assert "--chapters should be as for what is in" in mixed.stderr
    late = run_grade(tmp_path / "zm.py", *options)
    assert late.returncode == 0, late.stderr
    assert len(read_csv(out / "class.csv")) == 4
    assert {row["id"]: row for row in read_csv(out / "grades.csv")}["103"]["submission"] == "zm"

    # One exercise again: of the others, what is stored stays.
    path = out / "zm" / "report.json"
    report = json.loads(path.read_text())
    for exercise in report["exercises"]:
        exercise["sentence"] = "stored"
    path.write_text(json.dumps(report))
    once = run_grade(tmp_path / "zm.py", *options, "--again", "calc_exact_kl")
    assert once.returncode == 0, once.stderr
    stored = json.loads(path.read_text())
    assert get_exercise(stored, "calc_exact_kl")["sentence"] is None
    assert get_exercise(stored, "calc_kl_estimate")["sentence"] == "stored"
    assert stored["score"] == most
    wrong = run_grade(tmp_path / "zm.py", *options, "--again", "calc_exact")
    assert "perhaps calc_exact_kl" in wrong.stderr


def grade_emptily(todo, *_, **check):
    """In the place of the grader; of each submission one check, if something is said of it."""
    for name, path in todo.items():
        digest = grade.read_submission("", path).digest
        report = grade.batch.make_empty_report(name, "") | {"readable": True, "digest": digest}
        if check:
            whole = {"name": "a_check", "title": "", "tier": "core", "passed": False, "weight": 3,
                     "public": True, "earns_alone": True, "message": "", "error": ""}  # fmt: skip
            exercise = {"chapter": CHAPTER, "name": "calc_exact_kl", "sentence": None,
                        "seconds": 1, "checks": [whole | check]}  # fmt: skip
            report |= {"chapters": [CHAPTER], "problems": [], "exercises": [exercise]}
        yield name, grade.load_points(FILE).score(report)


def test_an_error_of_the_grader_is_said_at_the_end_and_graded_again(
    tmp_path, run_grade, monkeypatch
):
    def fail(todo, *_):
        return grade_emptily(todo, error="KeyError: 1")

    monkeypatch.setattr(grade.batch, "grade_all", fail)
    (tmp_path / "hw.py").write_text("x = 1\n")
    for _ in range(2):
        ended = run_grade(tmp_path / "hw.py", "--out", tmp_path / "out", "--chapters", CHAPTER)
        assert ended.returncode == 1
        last = ended.stderr.strip().splitlines()[-1]
        assert last.startswith("The grader failed on 1 check of hw.")
        assert "(0 from before)" in ended.stdout
    stored = load_reports(tmp_path / "out")["hw"]
    assert (stored["score"], stored["max_score"]) == (0, 0)
    assert stored["not_graded"] == [f"{CHAPTER} calc_exact_kl, a_check: KeyError: 1"]


def test_what_took_too_long_is_said_at_the_end(tmp_path, run_grade, monkeypatch):
    def grade_slowly(todo, *_):
        for name, path in todo.items():
            yield from grade_emptily({name: path}, took_too_long=name != "c")

    monkeypatch.setattr(grade.batch, "grade_all", grade_slowly)
    monkeypatch.setattr(grade, "MAX_NAMES", 1)
    paths = [tmp_path / f"{name}.py" for name in "abc"]
    for path in paths:
        path.write_text("x = 1\n")
    for given in (paths, paths, paths[2:]):
        ended = run_grade(*given, "--out", tmp_path / "out")
        said = "Checks of a and 1 more took too long, and earn nothing." in ended.stderr
        assert (ended.returncode, said) == (0, len(given) > 1)


def test_another_secret_grades_again_and_another_order_of_chapters_does_not():
    def digest(secret, *chapters):
        args = grade.parse_arguments(["x.py", "--out", "out", "--chapters", *chapters])
        return grade._digest_grader(args, secret)

    assert digest("one", "ch0", CHAPTER) == digest("one", CHAPTER, "ch0", CHAPTER)
    assert digest("one", "ch0", CHAPTER) != digest("another", "ch0", CHAPTER)


def test_core_checks_share_two_thirds():
    points, tiers = [1, 3, 1, 1], ["core", "core", "hardening", "hardening"]
    weights, alone = weigh(points, tiers, 12), [False, True, True, True]
    assert weights == pytest.approx([2, 6, 2, 2])
    assert weigh(points, tiers, 12, core_share=1) == pytest.approx([3, 9, 0, 0])
    assert weigh(points[2:], tiers[2:], 12) == pytest.approx([6, 6])
    assert sum(earn([True, False, False, False], alone, weights)) == 0  # a worked number, alone
    assert sum(earn([True, True, False, True], alone, weights)) == pytest.approx(10)


def test_whose_a_submission_is(tmp_path):
    more = "2,Max Short,7@example.org,,,\n2026,Ann Year,,,,\n105,李雷,,,,\n106,Łukasz Ørsted,,,,\n"
    (tmp_path / "roster.csv").write_text(f"{ROSTER}{more}107,王 Wei,,,,\n", encoding="utf-8")
    people = read_roster(tmp_path / "roster.csv")
    owners = {
        "doejane_101_9000_hw": "101", "Jane Doe_55_assignsubmission_file_": "101", "hw-102": "102",
        "smith_john_hw (1)": "102", "john smith hw (101)": "102", "Zoe Muller final": "103",
        "zm": "103", "2": "2", "李雷 week 2": "105", "lukasz-orsted": "106", "Łukasz Ørsted": "106",
    }  # fmt: skip
    nobodys = ("zoe mueller", "1012", "jane and john smith 101", "solution", "week 2 final",
               "hw 2026", "week 7 final", "Wei Zhang")  # fmt: skip
    for name, owner in (owners | dict.fromkeys(nobodys)).items():
        found = find_owners(name, people)
        assert (found[0].id if len(found) == 1 else None) == owner, name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,mail\nx,y\n", "the first line should name id, name"),
        ("id,name\n1,a\n1,b\n", "each id should stand there once"),
        ("id,name,late\n1,a,often\n", "line 2: could not convert string to float: 'often'"),
        ("id,name,late\n1,a,101\n", "line 2: late should be from 0 to 100, but is 101"),
        ("id,name\n1,Doe, Jane\n", "line 2: there are more cells than the first line names"),
        ('id,name\n1,"Doe\n2,Smith\n', "line [12]: unexpected end of data"),
    ],
)
def test_what_is_no_roster_is_said(text, said, tmp_path):
    (tmp_path / "roster.csv").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_roster(tmp_path / "roster.csv")


def make_report(name: str, **scores: tuple[float, float]) -> dict:
    """Of each chapter the score and the most."""
    exercises = [{"chapter": chapter, "score": score, "max_score": most}
                 for chapter, (score, most) in scores.items()]  # fmt: skip
    return {"submission": name, "chapters": [*scores], "exercises": exercises, "not_graded": []}


PEOPLE = [Person("101", "Jane Doe"), Person("102", "John Smith"), Person("103", "Late Comer")]


def test_a_persons_chapters_are_added_up_and_of_each_the_best_counts(tmp_path):
    jane = [make_report("jane doe 0", a=(5, 6)), make_report("jane doe 1", b=(3, 4)),
            make_report("jane doe 1 old", b=(2, 4))]  # fmt: skip
    reports = [*jane, make_report("john smith", a=(6, 6))]
    said = write_grades(tmp_path, PEOPLE, reports, "RLHF")
    rows = {row["id"]: row for row in read_csv(tmp_path / "grades.csv")}
    assert (rows["101"]["score"], rows["101"]["of"]) == ("8", "10")
    assert rows["101"]["submission"] == "jane doe 0; jane doe 1"
    assert (rows["102"]["score"], rows["102"]["of"]) == ("6", "6")  # whatever others handed in
    assert said[0] == "jane doe 1 old: jane doe 1 of Jane Doe counts instead, in b"
    assert "give --chapters" in said[1]
    assert said[2:] == ["Late Comer (103) handed in nothing"]
    # Where chapters were set, all can reach the same.
    write_grades(tmp_path, PEOPLE, [*jane, make_report("john smith", a=(6, 6), b=(0, 4))],
                 "RLHF", ["a", "b"])  # fmt: skip
    rows = read_csv(tmp_path / "grades.csv")
    assert [(row["score"], row["of"]) for row in rows] == [("8", "10"), ("6", "10"), ("0", "10")]
    assert read_csv(tmp_path / "canvas.csv")[0]["RLHF"] == "10"


def test_what_fits_nobody_or_several_is_said(tmp_path):
    people = [Person("101", "Jan Novak"), Person("102", "Novak, Jan"), Person("103", "Jan Doe")]
    reports = [
        make_report(name, a=(1, 1)) for name in ("jan_novak", "101 jan doe", "jan", "102 hw")
    ]
    assert write_grades(tmp_path, people, reports, "RLHF") == [
        "101 jan doe: fits several people: Jan Novak (101), Jan Doe (103)",
        "jan: fits nobody on the roster",
        "jan_novak: fits several people: Jan Novak (101), Novak, Jan (102)",
        "Jan Novak (101) handed in nothing",
        "Jan Doe (103) handed in nothing",
    ]


def test_what_was_taken_away_renamed_or_moved_is_counted_no_more(tmp_path, run_grade, monkeypatch):
    monkeypatch.setattr(grade.batch, "grade_all", grade_emptily)
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for name in ("jane", "john"):
        (folder / f"{name}.py").write_text(f"x = '{name}'\n")
    run_grade(*folder.iterdir(), "--out", out)
    (folder / "john.py").rename(folder / "john smith.py")
    renamed = run_grade(*folder.iterdir(), "--out", out)
    assert "john is no longer counted: there is no " in renamed.stderr
    assert "2 submissions (1 from before): 2 graded: " in renamed.stdout
    assert [row["submission"] for row in read_csv(out / "class.csv")] == ["jane", "john smith"]
    folder.rename(tmp_path / "moved")
    run_grade(tmp_path / "moved" / "jane.py", "--out", out)  # of the others nothing is known
    assert len(read_csv(out / "class.csv")) == 2
    moved = run_grade(*(tmp_path / "moved").iterdir(), "--out", out)
    assert [row["submission"] for row in read_csv(out / "class.csv")] == ["jane", "john smith"]
    assert (moved.returncode, moved.stdout[:33]) == (0, "2 submissions (2 from before): 2 ")
    places = {name: report["path"] for name, report in load_reports(out).items()}
    assert places["jane"] == str(tmp_path / "moved" / "jane.py")
    (tmp_path / "moved" / "bad.txt").write_text("x")
    other = run_grade(*(tmp_path / "moved").iterdir(), "--out", out, "--chapters", CHAPTER)
    assert "2 submissions are graded again, as --chapters is another than before" in other.stderr


@pytest.mark.parametrize("text", ["{", "[]", '{"readable": true}'])
def test_a_stored_report_that_is_none_is_said(text, tmp_path, run_grade, monkeypatch):
    monkeypatch.setattr(grade.batch, "grade_all", grade_emptily)
    out = tmp_path / "out"
    (tmp_path / "hw.py").write_text("x = 1\n")
    (out / "other").mkdir(parents=True)
    (out / "other" / "report.json").write_text(text)
    for path in (tmp_path / "hw.py", Path(os.path.relpath(tmp_path / "hw.py"))):
        ended = run_grade(path, "--out", out)
        assert ended.returncode == 0
        assert "report.json is damaged, or of another version: it is not counted" in ended.stderr
        assert ended.stdout.startswith("1 submission (")
    assert [row["submission"] for row in read_csv(out / "class.csv")] == ["hw"]
    shutil.rmtree(out / "hw")
    (out / "hw").write_text("")
    ended = run_grade(tmp_path / "hw.py", "--out", out)
    assert ended.returncode == 2
    assert "hw should be a folder, for a report, but is a file" in ended.stderr
