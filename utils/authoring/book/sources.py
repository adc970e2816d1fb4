"""Lays out what Sphinx reads: the front page, the chapters, the other pages and the figures.

Chapters and pages are found by listing, so a new one is in the book without being named here.
"""

import re
import shutil
from pathlib import Path

import nbformat

from utils.authoring.book.pages import FIGURES, NOTEBOOKS, Site, make_chapter
from utils.chapters import sort_chapters

ROOT = Path(__file__).parents[3]
FRONT = Path(__file__).with_name("index.md")
PAGES = (
    "README.md", "CHANGELOG.md", "chapters/*.md", "chapters/teaching/*.md", "solutions/*.md",
    "examples/README.md", "tests/README.md", "utils/README.md", "utils/*/README.md",
    "utils/*/INSTRUCTORS.md", "utils/models/*/README.md",
)  # fmt: skip
TITLES = {  # in the book, where no path stands beside them
    "README.md": "Install and run",
    "chapters/README.md": "How to work",
    "solutions/README.md": "Runs of your own",
    "tests/README.md": "Checks and mistakes",
    "utils/README.md": "The rooms of the machinery",
    "utils/autograder/INSTRUCTORS.md": "Hand out and grade",
}


GRADED = re.compile(r'<details class="graded">.*?</details>', re.DOTALL)


def list_chapters() -> list[str]:
    """Return the chapters that are executed, in their order."""
    return sort_chapters(path.stem for path in (ROOT / "solutions").glob("ch*.ipynb"))


def list_pages() -> list[str]:
    """Return the paths of the Markdown pages of the book."""
    found = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def lay_out(folder: Path, repository: str = "") -> None:
    """Write the book's sources into `folder`.

    `repository` is the address below which its files are shown, as `pages.Site` has it.
    """
    chapters = {f"chapters/{chapter}.ipynb": chapter for chapter in list_chapters()}
    site = Site(frozenset({*chapters, *list_pages()}), repository)
    shutil.copytree(ROOT / FIGURES, folder / FIGURES)
    for path in list_pages():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / path).read_text(encoding="utf-8")
        if path in TITLES:
            text = re.sub(r"^# .*$", f"# {TITLES[path]}", text, count=1, flags=re.MULTILINE)
        text = GRADED.sub("*The model answer stands in the repository's page alone.*", text)
        (folder / path).write_text(site.link_all(text, path), encoding="utf-8")
    for path, chapter in chapters.items():
        student, solved = (
            nbformat.read(ROOT / edition / f"{chapter}.ipynb", as_version=4)
            for edition in ("chapters", "solutions")
        )
        nbformat.write(make_chapter(student, solved, chapter, site), folder / path)
    listed = "\n".join(f"chapters/{chapter}" for chapter in list_chapters())  # 10 comes after 9
    lines = FRONT.read_text(encoding="utf-8").replace("chapters/ch*", listed).splitlines()
    kept = [line for line in lines if "*" not in line or " " in line or [*folder.glob(f"{line}.*")]]
    (folder / FRONT.name).write_text("\n".join(kept), encoding="utf-8")


def copy_notebooks(site: Path) -> None:
    """Copy both editions of each chapter's notebook into the built site, to be downloaded."""
    for chapter in list_chapters():
        for edition in ("chapters", "solutions"):
            path = f"{edition}/{chapter}.ipynb"
            (site / NOTEBOOKS / edition).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, site / NOTEBOOKS / path)
