"""The teaching kit: every chapter has a page and a deck, and what they quote is what was measured.

A number in an answer has to stand in the chapter's executed notebook; the tables of the exams are
computed anew from the results files.
"""

import json
import re
import statistics
import subprocess
from pathlib import Path

import pytest

from tests.course.test_pages import CODE, LINK, leads_somewhere
from utils.authoring.notebooks import ROOT, get_written_chapters

KIT = ROOT / "chapters" / "teaching"
DECKS = KIT / "slides"
RESULTS = ROOT / "chapters" / "results"
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


def get_numbers(text: str) -> set[float]:
    """Return the numbers of a text, without their signs: 1,024 and 5.1e-01 are one number each."""
    text = re.sub(r"\{,\}|(?<=\d),(?=\d{3})", "", text)
    return {float(found) for found in NUMBER.findall(text)}


# What a cell prints that trains differs from processor to processor: pages quote no digits of it.
TRAINS = re.compile(r"\.train\(\)|run_small\(|\.step\(\)|policy\.merged|train_\w+\(")


def get_notebook_text(chapter: str) -> str:
    """Return the prose, the code, and what does not train prints in the executed notebook."""
    notebook = json.loads((ROOT / f"solutions/{chapter}.ipynb").read_text(encoding="utf-8"))
    parts: list[str] = []
    for cell in notebook["cells"]:
        parts += cell["source"]
        outputs = [] if TRAINS.search("".join(cell["source"])) else cell.get("outputs", [])
        for output in outputs:
            parts += ["\n", *(output.get("text") or output.get("data", {}).get("text/plain", ""))]
        parts.append("\n")
    return "".join(parts)


@every_chapter
def test_a_page_has_all_its_sections_in_order(chapter):
    titles = get_sections(read(KIT, chapter))
    found = [name for title in titles for name in SECTIONS if title.startswith(name)]
    assert len(found) == len(titles)
    assert list(dict.fromkeys(found)) == [*SECTIONS]


@every_chapter
def test_a_class_lasts_ninety_minutes_without_a_gap(chapter):
    sections = get_sections(read(KIT, chapter))
    classes = [text for title, text in sections.items() if title.startswith("In class")]
    assert classes
    for text in classes:
        spans = re.findall(r"^\| (\d+)–(\d+) \|", text, re.MULTILINE)
        starts, ends = ([int(x) for x in column] for column in zip(*spans, strict=True))
        assert (starts[0], ends[-1]) == (0, 90)
        assert starts[1:] == ends[:-1]
        assert text.count("?") >= 5  # what to ask before it is shown


@every_chapter
def test_a_quiz_has_five_questions_with_folded_answers(chapter):
    quiz = get_sections(read(KIT, chapter))["Quiz"]
    assert re.findall(r"^\*\*(\d)\.\*\*", quiz, re.MULTILINE) == list("12345")
    questions = re.split(r"^\*\*\d\.\*\*", quiz, flags=re.MULTILINE)[1:]
    for question in questions:
        asked, answer = question.split("<details>\n<summary>Answer</summary>\n\n")
        assert "?" in asked
        assert answer.rstrip().endswith("\n\n</details>")
        assert len(answer.split()) > 5


@every_chapter
def test_an_exam_has_two_questions_whose_points_add_up(chapter):
    sections = get_sections(read(KIT, chapter))
    assert re.findall(r"^(\d)\. ", sections["Discussion"], re.MULTILINE) == ["1", "2"]
    exam = re.split(r"^\*\*[AB] \((\d+) points\)\.\*\*", sections["Exam"], flags=re.MULTILINE)[1:]
    assert len(exam) == 4
    for points, question in zip(exam[::2], exam[1::2], strict=True):
        asked, answer = question.split('<details class="graded">\n<summary>Model answer</summary>')
        worth = re.findall(r"\((\d+)\)\n", asked)
        assert sum(map(int, worth)) == int(points)
        assert len(re.findall(r"^\d\. ", answer, re.MULTILINE)) == len(worth)


@pytest.mark.parametrize("path", sorted(KIT.rglob("*.md")), ids=lambda path: path.stem)
def test_every_link_leads_somewhere(path):
    links = LINK.findall(CODE.sub("", path.read_text(encoding="utf-8")))
    assert [link for link in links if not leads_somewhere(path, link)] == []


def test_the_first_page_and_the_index_name_every_chapter():
    first, index = ((folder / name).read_text() for folder, name in (
        (KIT, "README.md"), (DECKS, "index.md")))  # fmt: skip
    for chapter in CHAPTERS:
        assert f"]({chapter}.md)" in first
        assert f"](slides/{chapter}.md)" in first
        assert f"<!--points {chapter}-->" in first
        assert f"]({chapter}.md)" in index


def test_the_mark_counts_the_pairs_of_sentences_that_the_weeks_ask_for():
    first = (KIT / "README.md").read_text(encoding="utf-8")
    weeks = re.findall(r"^\| \d \|.*, (one|two|three) pairs? of sentences \|$", first, re.MULTILINE)
    pairs = sum(("one", "two", "three").index(word) + 1 for word in weeks)
    assert len(weeks) == 4
    assert f"sentence points / {4 * pairs} " in first


@every_chapter
def test_numbers_stand_in_the_executed_notebook(chapter):
    page = get_sections(read(KIT, chapter))
    told = [text for title, text in page.items() if not title.startswith(TIMES)]
    numbers = get_numbers("\n".join([*told, read(DECKS, chapter)]))
    numbers = {x for x in numbers if x > SMALL or x % 1}
    assert numbers - get_numbers(get_notebook_text(chapter)) == set()


@every_chapter
def test_no_line_of_a_solution_is_given_away(chapter):
    solution = (ROOT / f"solutions/{chapter}.py").read_text(encoding="utf-8").splitlines()
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
        assert (DECKS / path).resolve().parent == ROOT / "chapters" / "figures"
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


def load(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def mean(runs: list[dict], *path: str) -> float:
    """Return the mean over the runs of what stands at a path of keys."""
    assert runs
    found = []
    for value in runs:
        for key in path:
            value = value[key]
        found.append(float(value))
    return statistics.mean(found)


def get_table(chapter: str) -> dict[str, list[str]]:
    """Return the rows of the table of an exam, by their first cell."""
    exam = get_sections(read(KIT, chapter))["Exam"]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in exam.splitlines()]
    return {first: rest for first, *rest in filter(None, rows)}


def test_the_table_of_full_stops():
    (runs,) = [json.loads((RESULTS / "ch2_ppo_runs.json").read_text())]
    names = {
        "no KL term": "kl_coef 0",
        "0.2, in the loss": "kl_coef 0.2, in the loss",
        "0.2, in the reward": "kl_coef 0.2, in the reward",
    }
    table = get_table("ch2_ppo")
    for label, name in names.items():
        keys = ("reward", "kl", "nll", "distinct_bigrams")
        assert table[label] == [f"{mean(runs[name], 'after', key):.3f}" for key in keys]


def test_the_table_of_additions():
    runs, table = load("ch3_grpo_additions"), get_table("ch3_grpo")
    rows = {
        "accuracy, sampled": "accuracy",
        "within worked answers": "accuracy_worked",
        "at least one of 8 right": "pass",
        "share of worked answers": "worked",
        "KL, nats per token": "kl",
    }
    for label, key in rows.items():
        before, after = (mean(runs, when, key) for when in ("before", "after"))
        assert table[label] == [f"{before:.3f}" if before else "0", f"{after:.3f}"]


def test_the_table_of_the_scan():
    runs, table = load("ch4_kl_scan"), get_table("ch4_kl")
    for beta in ("0", "0.1", "1"):
        cells = []
        for kind in ("k1", "k2"):
            label, n = ("none" if beta == "0" else kind), 4
            of = [
                r for r in runs if (r["label"], r["beta"], r["updates"]) == (label, float(beta), n)
            ]
            cells += [f"{mean(of, 'after', 'kl'):.3f}", f"{mean(of, 'after', 'reward'):+.2f}"]
        assert table[beta] == [cell.replace("-0.00", "+0.00") for cell in cells]


def test_the_intervals_of_the_changes():
    runs = load("ch5_rlvr_ablations")
    exam = " ".join(get_sections(read(KIT, "ch5_rlvr"))["Exam"].split())
    by_name: dict[str, dict[int, float]] = {}
    for run in runs:
        by_name.setdefault(run["setting"], {})[run["seed"]] = run["area"]
    quoted = {
        "token mean": "token mean",
        "constant length": "constant length",
        "sequence ratio with a clip of 0.2": "sequence ratio, clip of 0.2",
        "upper clip": "upper clip 0.28",
    }
    for label, name in quoted.items():
        differences = [by_name[name][seed] - by_name["GRPO"][seed] for seed in by_name["GRPO"]]
        half = 2.776 * statistics.stdev(differences) / len(differences) ** 0.5
        assert f"{label} {statistics.mean(differences):+.3f} ± {half:.3f}" in exam


def test_the_table_of_methods():
    runs, table = load("ch6_preferences_runs"), get_table("ch6_preferences")
    names = {
        "DPO, beta 0.5": "DPO, beta 0.5",
        "DPO, beta 0.1": "DPO, beta 0.1",
        "GRPO, no KL term": "GRPO, beta 0.0",
        "GRPO, KL term of 0.3": "GRPO, beta 0.3",
        "GRPO on the truth, no KL term": "GRPO on the truth, beta 0.0",
    }
    for label, name in names.items():
        of_name = [run for run in runs if run["run"] == name]
        keys = (("accuracy", 3), ("true", 2), ("rm", 2), ("kl", 1))
        assert table[label] == [f"{mean(of_name, key):.{digits}f}" for key, digits in keys]
