"""The book: how notebooks become pages, where links lead, and the built site in a browser."""

import base64
import io
import json
import os
import re
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urldefrag, urljoin

import nbformat
import pytest
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from selenium.webdriver.support.ui import WebDriverWait
from tabulate import tabulate

from tests.course.helpers import read_page
from tests.course.test_browser import needs_browser, open_browser
from tests.course.test_grade import needs_time
from utils.authoring.book.pages import (
    SOLUTION,
    Site,
    describe_pictures,
    fold_results,
    make_chapter,
    name_page,
    nest_headings,
    put_widgets,
)
from utils.authoring.book.sources import ROOT, lay_out, list_chapters
from utils.authoring.book.tables import convert_tables
from utils.authoring.book.weights import write_weights
from utils.chapters import sort_chapters

BUILT = ROOT / "dist" / "book"
SITE = Site(frozenset({"chapters/ch3_grpo.ipynb", "chapters/README.md", "README.md"}))
PUBLISHED = Site(SITE.pages, "https://example.org/course/blob/main")


# --- Links --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "page", "expected"),
    [
        ("../README.md#run-it", "chapters/README.md", "../README.md#run-it"),
        ("solutions/ch3_grpo.ipynb", "README.md", "chapters/ch3_grpo.ipynb"),
        ("ch3_grpo.ipynb", "solutions/README.md", "../chapters/ch3_grpo.ipynb"),
        ("chapters/figures/a.png", "README.md", "chapters/figures/a.png"),
        ("#run-it", "README.md", "#run-it"),
        ("https://arxiv.org/abs/1", "README.md", "https://arxiv.org/abs/1"),
        ("LICENSE", "README.md", "file-here:../../LICENSE"),
        ("../tests/points.toml", "utils/README.md", "file-here:../../../tests/points.toml"),
    ],
)
def test_where_a_link_leads(target, page, expected):
    assert SITE.link_all(f"[`a`]({target})", page) == f"[`a`]({expected})"
    for code in (f"`[b]({target})`", f"```md\n[c]({target})\n```"):
        assert SITE.link_all(code, page) == code
    if expected.startswith("file-here:"):
        there = "https://example.org/course/blob/main/" + expected.rpartition("../")[2]
        assert PUBLISHED.link(target, page) == there


# --- Pages --------------------------------------------------------------------------------------


def write_editions():
    """Return a student's notebook of one exercise, and the same notebook solved."""
    fold = f"{SOLUTION}\n\n```python\ndef f(): return 1\n```\n\nBecause.\n\n</details>"
    drawn = {"image/png": "", "text/plain": "<Figure size 600x280 with 1 Axes>"}
    cells = [
        (new_markdown_cell("# 3 · Title\n\nProse."), None, []),
        (new_code_cell("start()", metadata={"tags": ["setup"]}), None, ["ready"]),
        (new_code_cell("import torch", metadata={"tags": ["imports"]}), None, []),
        (new_code_cell("show()", metadata={"tags": ["result-loop"]}), None, []),
        (new_markdown_cell("## Part\n\n```python\n# no heading\n```"), None, []),
        (new_code_cell("def f(): ...", metadata={"tags": ["exercise"]}), "def f(): return 1", []),
        (new_code_cell("check(f)", metadata={"tags": ["check"]}), None, ["\x1b[32m✓\x1b[0m one"]),
        (new_markdown_cell(fold), "Because.", []),
        (new_code_cell("plot()"), None, []),
    ]
    for index, (cell, _, _) in enumerate(cells):
        cell.id = f"ch3-{index}"
    student = new_notebook(cells=[cell for cell, _, _ in cells])
    solved = nbformat.from_dict(json.loads(json.dumps(student)))
    for cell, (_, source, printed) in zip(solved.cells, cells, strict=True):
        cell.source = source or cell.source
        if cell.cell_type == "code":
            cell.outputs = [new_output("stream", text=text) for text in printed]
    solved.cells[-1].outputs = [new_output("display_data", drawn)]
    return student, solved


def test_a_page_shows_the_stub_and_folds_the_solution_with_what_its_check_prints():
    student, solved = write_editions()
    page = make_chapter(student, solved, "ch3_grpo", SITE)
    title, setup, result, _, stub, check, fold, plot = page.cells
    assert "```python\nstart()\n\n\nimport torch\n```" in setup.source
    assert title.source.startswith("# 3 · Title\n\n{.notebooks}\n")
    published = make_chapter(student, solved, "ch3_grpo", PUBLISHED).cells[0].source
    for path in ("chapters/ch3_grpo.ipynb", "solutions/ch3_grpo.ipynb"):
        assert f"(file-here:../notebooks/{path})" in title.source
        assert f"(https://example.org/course/blob/main/{path})" in published
    assert (stub.source, stub.outputs, check.outputs) == ("def f(): ...", [], [])
    assert "remove-input" in result.metadata.tags
    assert "`check(f)` then prints\n\n```text\n✓ one\n```\n\n</details>" in fold.source
    assert "def f(): return 1" in fold.source
    assert plot.outputs == solved.cells[-1].outputs
    assert plot.metadata.mystnb.image.alt == "A plot, in “Part”"


def test_results_are_folded_between_a_question_to_predict_and_its_answer():
    answer = "<details>\n<summary>Answer</summary>\n\nThis.\n\n</details>"
    texts = ["## Part", "shown", "**Predict.** Which?", "folded", "Look at both.", "folded, too"]
    texts += [answer, "shown", "**Predict.** And now?", "folded"]
    texts += [f"{answer}\n\n**Predict.** And then?", "folded", "## Next part", "shown"]
    notebook = new_notebook(cells=[new_markdown_cell(text) for text in texts])
    for i, text in enumerate(texts):
        if text.startswith(("shown", "folded")):
            notebook.cells[i] = new_code_cell(outputs=[new_output("stream", text=text)])
    fold_results(notebook)
    for cell, text in zip(notebook.cells, texts, strict=True):
        assert ("hide-output" in cell.metadata.get("tags", [])) == text.startswith("folded")


def test_the_parts_of_a_chapter_stand_below_its_title():
    texts = ["# Title", "## Before", "# Part\n\n```python\n# code\n```", "## Section"]
    notebook = new_notebook(cells=[new_markdown_cell(text) for text in texts])
    nest_headings(notebook)
    nested = ["# Title", "### Before", "## Part\n\n```python\n# code\n```", "### Section"]
    assert [cell.source for cell in notebook.cells] == nested


def draw(width):
    image = io.BytesIO()
    Figure(figsize=(width / 100, 0.1)).savefig(image, dpi=100)
    return {"image/png": base64.b64encode(image.getvalue()).decode()}


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({"image/svg+xml": "<svg/>"}, {}),
        (draw(width=1000), {}),
        (draw(width=1001), {"classes": "wide"}),  # a phone scrolls it
    ],
)
def test_a_picture_has_its_own_description(image, expected):
    data = image | {"text/plain": "Prompts go to the policy."}
    cell = new_code_cell(outputs=[new_output("display_data", data=data)])
    describe_pictures(new_notebook(cells=[cell]))
    assert cell.metadata.mystnb.image == {"alt": "Prompts go to the policy."} | expected


# --- The model in the pages ---------------------------------------------------------------------


def test_a_marker_becomes_the_element_of_a_widget():
    page = put_widgets("Before.\n\n<!-- play: ch3-phases: What's left? -->\n\nAfter.")
    before, opened, question, _, closed, after = page.split("\n\n")
    assert (before, closed, after) == ("Before.", "</div>", "After.")
    assert opened == '<div class="play" data-play="ch3-phases">'
    assert question == "{.play-question}\nWhat's left?"


def test_all_weights_together_are_small(tmp_path):
    write_weights(tmp_path)
    sizes = {path.stem: path.stat().st_size for path in tmp_path.iterdir()}
    assert {"base", "ch3_grpo-25"} <= sizes.keys()
    assert sum(sizes.values()) < 12e6


# --- The published address ----------------------------------------------------------------------


def test_a_notebook_names_its_page():
    student, solved = write_editions()
    first = student.cells[0]
    first.source = name_page(first.source, "ch3_grpo", "https://example.org/book/")
    assert "](https://example.org/book/chapters/ch3_grpo.html)" in first.source
    title, line, prose = first.source.split("\n\n")
    assert (title, prose) == ("# 3 · Title", "Prose.")
    assert line not in make_chapter(student, solved, "ch3_grpo", SITE).cells[0].source


# --- The course's own pages ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("book") / "source"
    lay_out(folder)
    return folder


def test_the_answers_to_exams_are_in_the_repository_alone(sources):
    pages = list((sources / "chapters" / "teaching").glob("ch*.md"))
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        original = (ROOT / "chapters" / "teaching" / page.name).read_text(encoding="utf-8")
        n = original.count('<details class="graded">')
        assert 'class="graded"' not in text
        assert text.count("The model answer stands in the repository") == n > 0


def test_the_figures_of_both_front_pages_are_those_of_the_tables():
    table = read_page("solutions/README.md")

    def fill(phrase: str, label: str) -> str:
        """Put the means before and after of a row into a phrase."""
        row = re.search(rf"\| {re.escape(label)} +\|(.*)\|$", table, re.MULTILINE)
        return phrase.format(*(float(cell.split()[0]) for cell in row[1].split("|")))

    for page in ("README.md", "utils/authoring/book/index.md"):
        text = re.sub(r"\s+", " ", read_page(page))
        sums = fill("from {:.2f} to {:.2f}, in two minutes", "share of right sums, sampled")
        assert sums in text
        for share in fill("{:.0%} {:.1%}", "share of worked answers").split():
            assert share in text
    assert fill("is right in {:.0%} before and {:.0%} after", "accuracy, sampled") in text


def test_every_chapter_is_a_page_and_every_exercise_has_its_folds(sources):
    found = [path.stem for path in (ROOT / "chapters").glob("ch*.ipynb")]
    assert list_chapters() == sort_chapters(found)
    for chapter in list_chapters():
        page = nbformat.read(sources / f"chapters/{chapter}.ipynb", as_version=4)
        tags = [cell.metadata.get("tags", []) for cell in page.cells]
        stubs = sum("exercise" in cell_tags for cell_tags in tags)
        folds = [cell.source for cell in page.cells if cell.source.startswith(SOLUTION)]
        assert len(folds) == stubs > 0
        assert all("✓" in fold for fold in folds)
        assert sum("<summary>Hint" in cell.source for cell in page.cells) >= 2 * stubs
        assert sum(bool(cell.get("outputs")) for cell in page.cells) > 5


def test_printed_tables_become_html_and_nothing_is_lost():
    first = tabulate([("k1 < k2", 1.5), ("", 22)], ("kind", "seconds"))
    second = tabulate([(1, "yes, it is")], ("price", "is it right?"))
    texts = ["before\n", f"{first}\n{second}\n", "none\n---  ---\ntitle\n-----\ntext\n"]
    printed = [new_output("stream", name="stdout", text=text) for text in texts]
    notebook = new_notebook(cells=[new_code_cell("print(tabulate(rows))", outputs=printed)])
    convert_tables(notebook)
    outputs = notebook.cells[0].outputs
    kinds = [output.output_type for output in outputs]
    assert kinds == ["stream", "display_data", "display_data", "stream"]
    html = [output.data["text/html"] for output in outputs[1:3]]
    assert "<tr><th>kind</th><th>seconds</th></tr>" in html[0]
    assert "<tr><td>k1 &lt; k2</td><td>1.5</td></tr><tr><td></td><td>22</td></tr>" in html[0]
    assert "<tr><td>1</td><td>yes, it is</td></tr>" in html[1]
    left = [output.get("text") or output.data["text/plain"] + "\n" for output in outputs]
    assert "".join(left) == "".join(texts)


# --- The built site -----------------------------------------------------------------------------

is_built = pytest.mark.skipif(not (BUILT / "index.html").exists(), reason="needs `make book`")
ELSEWHERE = re.compile(r"^(https?|mailto|data):")


def read_built() -> dict[str, str]:
    """Return the built pages, by their paths."""
    found = sorted(BUILT.rglob("*.html"))
    return {path.relative_to(BUILT).as_posix(): path.read_text(encoding="utf-8") for path in found}


@is_built
def test_every_link_of_the_built_site_leads_to_a_file_and_a_place_in_it():
    pages, lost = read_built(), []
    ids = {name: {*re.findall(r'\bid="([^"]+)"', html)} for name, html in pages.items()}
    for name, html in pages.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', html):
            if ELSEWHERE.match(link):
                continue
            path, anchor = (unquote(part) for part in urldefrag(link.partition("?")[0]))
            there = os.path.normpath(BUILT / Path(name).parent / path) if path else BUILT / name
            places = ids.get(os.path.relpath(there, BUILT), {anchor})
            if not os.path.exists(there) or (anchor and anchor not in places):
                lost.append((name, link))
    assert lost == []


@is_built
def test_the_built_site_fetches_nothing_from_elsewhere():
    fetched = r"<(?:script|img|iframe|source)[^>]*\bsrc=\"([^\"]+)\"|<link[^>]*\bhref=\"([^\"]+)\""
    for name, html in read_built().items():
        found = [one or two for one, two in re.findall(fetched, html)]
        assert [link for link in found if re.match(r"(https?:)?//", link)] == [], name


@pytest.fixture(scope="module")
def address():
    """The folder of the course on a free port, so that links to its files lead somewhere."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(ROOT))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/dist/book/"
    server.shutdown()


@pytest.fixture(scope="module")
def driver():
    driver = open_browser()
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


def open_page(driver, url: str, width: int) -> None:
    """Open a page at a width, and wait until its mathematics is set."""
    screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    driver.get(url)
    driver.execute_async_script(
        "const done = arguments[0]; (window.MathJax?.startup?.promise ?? Promise.resolve())"
        ".then(() => done())"
    )


FAULTS = """
const faults = [], here = location.origin;
const content = document.querySelector(".content");  // Furo cuts off or scrolls what is wider
const spill = () => content.scrollWidth - content.clientWidth;
if (content.getBoundingClientRect().right > arguments[0]) faults.push("wider than the screen");
if (spill() > 0) faults.push(`${spill()} pixels too wide`);
for (const image of document.images)
    if (!image.complete || !image.naturalWidth) faults.push(`no image ${image.src}`);
for (const image of document.querySelectorAll("article img"))
    if (!image.alt) faults.push(`no words for ${image.src}`);
for (const math of document.querySelectorAll(".math"))
    if (!math.querySelector("mjx-container")) faults.push(`not set: ${math.textContent}`);
for (const wrong of document.querySelectorAll("mjx-merror")) faults.push(wrong.textContent);
for (const fetched of performance.getEntriesByType("resource"))
    if (!fetched.name.startsWith(here)) faults.push(`fetched ${fetched.name}`);
const folds = [...document.querySelectorAll("article details")];
if (folds.some(fold => fold.open)) faults.push("a fold is open");
for (const fold of folds) { fold.querySelector("summary").click(); }
if (folds.some(fold => !fold.open)) faults.push("a fold stays shut");
if (spill() > 0) faults.push(`${spill()} pixels too wide with its folds open`);
for (const table of document.querySelectorAll("table.printed"))
    if (arguments[0] > 1000 && table.offsetWidth > table.closest(".cell_output").clientWidth)
        faults.push(`cut off: ${table.textContent}`);
for (const theme of ["light", "dark"]) {
    document.body.dataset.theme = theme;
    for (const image of document.querySelectorAll("article img"))
        if ((getComputedStyle(image).filter !== "none") !== (theme === "dark"))
            faults.push(`not in the colours of the ${theme} page: ${image.src}`);
}
return faults;
"""


@needs_time
@is_built
@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_in_a_browser(driver, address, width):
    faults = {}
    for name in read_built():
        open_page(driver, urljoin(address, name), width)
        found = driver.execute_script(FAULTS, width)
        found += [entry["message"] for entry in driver.get_log("browser")]
        if found:
            faults[name] = found
    assert faults == {}


@needs_time
@is_built
@needs_browser
@pytest.mark.parametrize("start", ["http", "file"])
def test_the_search_finds_the_value_head(driver, address, start):
    base = address if start == "http" else f"{BUILT.as_uri()}/"
    open_page(driver, urljoin(base, "search.html?q=value+head"), 1280)
    count = "return document.querySelectorAll('#search-results li').length"
    WebDriverWait(driver, 60).until(lambda driver: driver.execute_script(count))
    found = driver.find_element("css selector", "#search-results").text
    assert "PPO" in found
    assert driver.get_log("browser") == []
