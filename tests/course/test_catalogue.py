"""The catalogue of mistakes: reading it, applying it, and naming one mistake or two."""

import ast
import builtins

import pytest

from tests.course.helpers import run_python
from utils.grading import catalogue, diagnosis, reference
from utils.grading.catalogue import apply, find_stale, read_chapter
from utils.grading.checks import get_chapters, get_checks
from utils.grading.extraction import get_bound_names, get_used_names
from utils.grading.judging import get_quick_checks, grade
from utils.grading.observation import StudentNames
from utils.grading.substitution import build_module

SOLUTION = '''\
def one(x):
    """Add one."""
    y = x + 1

    return y


class Two:
    def call(self, x):
        return x + 2
'''
ENTRY = """\
# one

## subtracted, rejected by worked
One is subtracted.
It should be added.
```diff
-y = x + 1
+y = x - 1
```
"""


@pytest.fixture
def chapter(tmp_path, monkeypatch):
    """A function that makes a chapter of one exercise with this text for its mistakes."""
    monkeypatch.setattr(catalogue, "FOLDER", tmp_path / "tests" / "mistakes")
    monkeypatch.setattr(catalogue, "ROOT", tmp_path)
    for folder in ("tests/mistakes/small", "tests/checks", "solutions"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "solutions" / "small.py").write_text(SOLUTION)
    (tmp_path / "tests" / "checks" / "small.py").write_text("def worked(student, rng): ...\n")

    def make(text: str, exercise: str = "one") -> str:
        (tmp_path / "tests" / "mistakes" / "small" / f"{exercise}.md").write_text(text)
        catalogue.read_chapter.cache_clear()
        return "small"

    yield make
    catalogue.read_chapter.cache_clear()


def test_an_entry_is_read_and_applied(chapter):
    assert find_stale(chapter(ENTRY)) == []
    (mistake,) = read_chapter("small")
    assert mistake.sentence == "One is subtracted. It should be added."
    assert mistake.rejected_by == "worked"
    assert apply(SOLUTION, mistake) == SOLUTION.replace("x + 1", "x - 1")


FUNCTION = "```python\nright = one\n\n\ndef twice(x):\n    return right(x) + 1\n```\n"
METHOD = "```python\ndef call(self, x):\n    return x\n```\n"


@pytest.mark.parametrize(
    ("exercise", "code", "call", "expected"),
    [("one", FUNCTION, "one(5)", 7), ("Two.call", METHOD, "Two().call(5)", 5)],
)
def test_a_function_stands_in_the_place_of_the_reference(chapter, exercise, code, call, expected):
    text = (ENTRY[: ENTRY.index("```diff")] + code).replace("# one", f"# {exercise}")
    (mistake,) = read_chapter(chapter(text, exercise))
    names = {}
    exec(apply(SOLUTION, mistake), names)
    assert eval(call, names) == expected


MANY = "\n".join(ENTRY.partition("\n\n")[2].replace("subtracted", f"m{n}", 1) for n in range(9))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("-y = x + 1", "-y = x + 3", "should stand once in one, but stand 0 times"),
        ("```diff\n", "```diff three\n", "there is no definition three"),
        ("rejected by worked", "rejected by other", "there is no check other"),
        ("# one", "# two", "should begin with '# one'"),
        ("rejected by", "found by", "an entry should be '## name, rejected by check', a sentence"),
        ("```\n", "```\nMore.\n", "a sentence, and a change"),
        ("+y = x - 1", "?y = x - 1", "should begin with -, + or a space"),
        ("It should be added.", "It should be added", "a sentence, and a change"),
        ("```diff\n-y = x + 1\n", "```diff\n", "a diff should change lines, and show where"),
        ("```diff", "```python\n```\n```diff", "there should be diffs or one function"),
        (ENTRY, f"{ENTRY}\n{ENTRY[7:]}", "the names should differ"),
        (ENTRY, f"# one\n\n{MANY}", "small one: 9 mistakes; 8 are plenty"),
    ],
)
def test_what_no_longer_fits_is_named(chapter, old, new, said):
    assert ENTRY.count(old) >= 1
    problems = find_stale(chapter(ENTRY.replace(old, new)))
    assert any(said in problem for problem in problems), problems


def test_staleness_is_checked_without_torch():
    probe = (
        "import sys; from utils.grading import catalogue; catalogue.main(); "
        "print(sorted({'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    assert run_python("-c", probe).stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("chapter", get_chapters())
def test_the_catalogue_fits_the_solutions(chapter):
    assert find_stale(chapter) == []
    sentences = [(mistake.exercise, mistake.sentence) for mistake in read_chapter(chapter)]
    assert len({*sentences}) == len(sentences)
    found = {exercise for exercise, _ in sentences}
    # What is inherited has slow checks alone, and mistakes in the chapter that it comes from.
    assert found >= {name for name in get_checks(chapter) if get_quick_checks(chapter, name)}


@pytest.mark.parametrize("chapter", get_chapters())
def test_a_function_uses_what_is_there(chapter):
    """One that raises NameError would be rejected whatever it is meant to show."""
    for mistake in (mistake for mistake in read_chapter(chapter) if mistake.code):
        changed = ast.parse(apply(reference.get_source(chapter), mistake))
        imported = {
            alias.asname or alias.name.partition(".")[0]
            for node in changed.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        bound = imported.union(dir(builtins), *map(get_bound_names, changed.body))
        used = set().union(*map(get_used_names, ast.parse(mistake.code).body))
        assert used <= bound, mistake.place


# --- Two mistakes at once -----------------------------------------------------------------------


PAIR = ("k2_without_the_half", "k3_without_the_one")


@pytest.mark.parametrize(
    ("names", "seconds", "named"),
    [(PAIR, 60, PAIR), (PAIR[:1], 60, PAIR[:1]), (PAIR, 0, ())],
    ids=["two", "one", "the search ends"],
)
def test_mistakes_are_named_alone_or_in_pairs(names, seconds, named):
    chosen = [mistake for mistake in read_chapter("ch4_kl") if mistake.name in names]
    source = apply(reference.get_source("ch4_kl"), *chosen)
    student = StudentNames(vars(build_module("ch4_kl", source)))
    checks = get_quick_checks("ch4_kl", "calc_kl_estimate")
    said = diagnosis.diagnose([grade(check, student) for check in checks], seconds=seconds)
    assert {m.name for m in read_chapter("ch4_kl") if m.sentence in (said or "")} == {*named}
    assert (said is None) == (not named)
