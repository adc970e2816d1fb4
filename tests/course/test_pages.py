"""The pages for readers: links lead somewhere, commands exist, and the first page is short."""

import re
from pathlib import Path

import pytest
import yaml

from utils.authoring.__main__ import FORM, fill_form
from utils.grading.checks import get_chapters
from utils.grading.points import list_chapters

ROOT = Path(__file__).parents[2]
NEAR = ("", ".github", "chapters", "solutions", "tests", "utils")
KIT = ("chapters/teaching", "chapters/teaching/slides")
FOLDERS = (*NEAR, *KIT, "utils/autograder", "utils/bench")
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
LONGEST_FIRST_PAGE = 8192  # bytes
CODE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")

TOOLS = re.compile(r"^\s*(?:from|import) (?:jupytext|nbclient|selenium|xdist)\b", re.MULTILINE)


def name_page(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def get_anchors(page: str) -> set[str]:
    """Return what its headings can be linked by."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(path: Path, link: str) -> bool:
    """Return whether a link of a page is to the web, or to a path and a heading that are there."""
    target, _, anchor = link.partition("#")
    if target.startswith("https://"):
        return True
    there = path.parent / target if target else path
    return there.exists() and (
        not anchor or anchor in get_anchors(there.read_text(encoding="utf-8"))
    )


def find_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= LONGEST_FIRST_PAGE


@pytest.mark.parametrize("page", ["README.md", "chapters/README.md", "solutions/README.md"])
def test_a_page_names_every_chapter(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [chapter for chapter in list_chapters() if f"{chapter}.ipynb" not in text] == []


@pytest.mark.parametrize("path", PAGES, ids=name_page)
def test_every_link_leads_somewhere(path):
    links = LINK.findall(CODE.sub("", path.read_text(encoding="utf-8")))
    assert [link for link in links if not leads_somewhere(path, link)] == []


@pytest.mark.parametrize("path", PAGES, ids=name_page)
def test_every_command_exists(path):
    page = path.read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"^make ([a-z-]+) +#|`make ([a-z-]+)`", page, re.MULTILINE)
    assert {first or second for first, second in named} <= {*targets}
    modules = set(re.findall(r"python\s-m\s((?:utils|chapters)[\w.]*\w)", page))
    assert [name for name in modules if not find_module(name)] == []


@pytest.mark.parametrize(
    "path",
    [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"],
    ids=name_page,
)
def test_what_the_rails_run_can_be_read_and_exists(path):
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    modules = re.findall(r"python -m (utils[\w.]*\w)", text)
    assert [name for name in modules if not find_module(name)] == []


def test_the_form_of_a_rejected_answer_offers_every_chapter():
    text = FORM.read_text(encoding="utf-8")
    offered, *_ = (p["attributes"]["options"] for p in yaml.safe_load(text)["body"]
                   if p["type"] == "dropdown")  # fmt: skip
    assert offered == [*get_chapters()]
    assert fill_form(text.replace(f"        - {offered[-1]}\n", "")) == text


def test_the_course_runs_on_the_first_file_of_requirements():
    paths = [path for room in ("solutions", "utils") for path in (ROOT / room).rglob("*.py")]
    paths += (ROOT / "chapters").rglob("*.md")
    users = [name_page(path) for path in paths if TOOLS.search(path.read_text(encoding="utf-8"))]
    assert sorted(users) == ["utils/authoring/notebooks.py", "utils/authoring/own.py"]
