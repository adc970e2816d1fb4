"""The teaching kit: every chapter has a page and a deck, and what they quote is what was measured.

A number in an answer has to stand in the chapter's executed notebook, which computes it from the
results files, and the numbers of a row in the table of an exam in one line of it.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.course.helpers import read_page
from tests.course.test_pages import CODE
from utils.authoring.notebooks import ROOT, get_written_chapters

KIT = ROOT / "chapters" / "teaching"
DECKS = KIT / "slides"
PYTHON = ROOT / ".venv-slides" / "bin" / "python"
CHAPTERS = get_written_chapters()
SECTIONS = (
    "Afterwards, a student can", "Before class", "In class", "Quiz", "Discussion", "Exam",
    "Two sentences to grade", "Known trouble", "When time is short",
)  # fmt: skip
TIMES = ("Before class", "In class", "When time is short")  # their numbers are minutes
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
NOTES = re.compile(r"^:::\{revealjs-notes\}\n(.*?)\n:::$", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
SMALL = 20  # integers up to here are counts and section numbers
MOST_WORDS = 45  # on a slide, besides its notes
MOST_SLIDES = 21  # per class, besides the spare ones

every_chapter = pytest.mark.parametrize("chapter", CHAPTERS)


def read(folder: Path, chapter: str) -> str:
    return (folder / f"{chapter}.md").read_text(encoding="utf-8")


def get_sections(page: str) -> dict[str, str]:
    """Return a page's sections by their titles, in order."""
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def get_slides(deck: str) -> list[str]:
    return re.split(r"^(?=#{1,2} )", CODE.sub("code", deck), flags=re.MULTILINE)[1:]


def list_numbers(text: str) -> list[float]:
    """Return the numbers of a text, without their signs: 1,024 and 5.1e-01 are one number each."""
    return [float(x) for x in NUMBER.findall(re.sub(r"\{,\}|(?<=\d),(?=\d{3})", "", text))]


# What a cell prints that trains differs from processor to processor: pages quote no digits of it.
TRAINS = re.compile(r"\.train\(\)|run_small\(|\.step\(\)|policy\.merged|train_\w+\(")


def get_notebook_text(chapter: str) -> str:
    """Return the prose, the code, and what does not train prints in the executed notebook."""
    notebook = json.loads(read_page(f"solutions/{chapter}.ipynb"))
    parts: list[str] = []
    for cell in notebook["cells"]:
        parts += cell["source"]
        outputs = [] if TRAINS.search("".join(cell["source"])) else cell.get("outputs", [])
        for output in outputs:
            parts += ["\n", *(output.get("text") or output.get("data", {}).get("text/plain", ""))]
        parts.append("\n")
    return "".join(parts)


@every_chapter
def test_a_page_has_classes_a_quiz_and_an_exam(chapter):
    """Classes last ninety minutes without a gap; an exam's points add up."""
    sections = get_sections(read(KIT, chapter))
    found = [name for title in sections for name in SECTIONS if title.startswith(name)]
    assert len(found) == len(sections)
    assert list(dict.fromkeys(found)) == [*SECTIONS]
    for text in (text for title, text in sections.items() if title.startswith("In class")):
        spans = re.findall(r"^\| (\d+)–(\d+) \|", text, re.MULTILINE)
        starts, ends = ([int(x) for x in column] for column in zip(*spans, strict=True))
        assert (starts[0], ends[-1]) == (0, 90)
        assert starts[1:] == ends[:-1]
        assert text.count("?") >= 5  # what to ask before it is shown
    _, *quiz = re.split(r"^\*\*(\d)\.\*\*", sections["Quiz"], flags=re.MULTILINE)
    assert quiz[::2] == list("12345")
    for question in quiz[1::2]:
        asked, answer = question.split("<details>\n<summary>Answer</summary>\n\n")
        assert "?" in asked
        assert answer.rstrip().endswith("\n\n</details>")
        assert len(answer.split()) > 5
    assert re.findall(r"^(\d)\. ", sections["Discussion"], re.MULTILINE) == ["1", "2"]
    _, *exam = re.split(r"^\*\*[AB] \((\d+) points\)\.\*\*", sections["Exam"], flags=re.MULTILINE)
    assert len(exam) == 4
    for points, question in zip(exam[::2], exam[1::2], strict=True):
        asked, answer = question.split('<details class="graded">\n<summary>Model answer</summary>')
        worth = re.findall(r"\((\d+)\)\n", asked)
        assert sum(map(int, worth)) == int(points)
        assert len(re.findall(r"^\d\. ", answer, re.MULTILINE)) == len(worth)


@every_chapter
def test_numbers_stand_in_the_executed_notebook(chapter):
    """Those of a row in an exam's table in one line of it."""
    page, printed = get_sections(read(KIT, chapter)), get_notebook_text(chapter)
    told = [text for title, text in page.items() if not title.startswith(TIMES)]
    numbers = list_numbers("\n".join([*told, read(DECKS, chapter)]))
    assert {x for x in numbers if x > SMALL or x % 1} <= {*list_numbers(printed)}
    lines = [list_numbers(line) for line in printed.splitlines()]
    for _, cells in re.findall(r"^\|([^|]*)\|(.*)\|$", page["Exam"], re.MULTILINE):
        rest_of = map(iter, lines)
        assert any(all(x in rest for x in list_numbers(cells)) for rest in rest_of), cells


def test_the_first_page_and_the_index_name_every_chapter():
    first, index = ((folder / name).read_text() for folder, name in (
        (KIT, "README.md"), (DECKS, "index.md")))  # fmt: skip
    for chapter in CHAPTERS:
        for link in (f"]({chapter}.md)", f"](slides/{chapter}.md)", f"<!--points {chapter}-->"):
            assert link in first
        assert f"]({chapter}.md)" in index
    # The mark counts the pairs of sentences that the weeks ask for.
    weeks = re.findall(r"^\| \d \|.*, (one|two|three) pairs? of sentences \|$", first, re.MULTILINE)
    pairs = sum(("one", "two", "three").index(word) + 1 for word in weeks)
    assert len(weeks) == 4
    assert f"sentence points / {4 * pairs} " in first


@every_chapter
def test_no_line_of_a_solution_is_given_away(chapter):
    solution = read_page(f"solutions/{chapter}.py").splitlines()
    lines = {line.strip() for line in solution if len(line.strip()) >= 30 and "(" in line}
    text = read(KIT, chapter) + read(DECKS, chapter)
    assert [line for line in lines if line in text] == []


@every_chapter
def test_a_deck_has_big_pictures_and_few_words(chapter):
    slides = get_slides(read(DECKS, chapter))
    titles = [slide.splitlines()[0].lstrip("# ") for slide in slides]
    n_shown = titles.index("Spare slides") if "Spare slides" in titles else len(slides)
    n_classes = read(KIT, chapter).count("\n## In class")
    assert 12 <= n_shown <= MOST_SLIDES * n_classes
    assert titles[n_shown - 1] == "Take home"
    for slide in slides:
        (notes,) = NOTES.findall(slide)
        assert len(notes.split()) >= 5
        shown = re.sub(r"\$\$.*?\$\$", "", IMAGE.sub("", NOTES.sub("", slide)))
        assert len(re.findall(r"[\w.%-]*\w", shown)) <= MOST_WORDS
    assert sum("?" in slide for slide in slides) >= 8
    images = IMAGE.findall(read(DECKS, chapter))
    assert len(images) >= 3
    for alt, path in images:
        assert alt
        assert (DECKS / path).is_file()


@pytest.mark.skipif(not PYTHON.exists(), reason="`make slides` has made no environment")
def test_the_slides_build_and_need_no_network(tmp_path):
    out = tmp_path / "slides"
    command = [PYTHON, "-m", "utils.authoring.slides", "--out", out]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=60)
    for chapter in CHAPTERS:
        page, deck = (out / f"{chapter}.html").read_text(), read(DECKS, chapter)
        assert page.count("<h1>") + page.count("<h2>") == len(get_slides(deck))
        assert page.count('<aside class="notes">') == len(get_slides(deck))
        assert page.count('display="block"') == deck.count("$$") // 2
        assert "$" not in page
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
        loaded = [path.partition("?")[0] for path in loaded]
        assert [path for path in loaded if not (out / path).is_file()] == []
        sheets = [out / path for path in loaded if path.endswith(".css")]
        assert not any(re.search(r"url\(['\"]?https?:", sheet.read_text()) for sheet in sheets)
