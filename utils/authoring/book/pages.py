"""Turns the course's notebooks and Markdown pages into pages of the book.

A chapter's page is the student's notebook, with what the solved one printed and drew: a stub, its
check, two folded hints, and the solution, folded together with what the check says about it. Every
page keeps its path in the repository, so that links between pages hold. Links to other files lead
to the repository.

Nothing here imports torch: the book is built in an environment of its own.
"""

import base64
import copy
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from utils.authoring.book.tables import convert_tables

CODE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1[`~]*[ \t]*$|(`+)(?!`).*?(?<!`)\2(?!`)", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^(?=#{1,5} )", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[\d;]*m")
NAMED = re.compile(r"^\[?This chapter as a page.*$\n*", re.MULTILINE)
WIDGET = re.compile(r"^<!-- play: ([\w-]+): (.+) -->$", re.MULTILINE)
SOLUTION = "<details>\n<summary>Solution</summary>"
FIGURES = "chapters/figures/"
WIDE = 1000  # pixels: a phone that showed so many at once would make letters of 4 pixels
NOTEBOOKS = "notebooks"  # the folder of their copies in the site


@dataclass(frozen=True)
class Site:
    """What a link needs to know.

    `pages` are the paths, in the repository, of what is a page of the book. `repository` is the
    address below which the repository's files are shown, such as
    https://github.com/OWNER/NAME/blob/main; if it is empty, links lead to the files around
    `dist/book`, where the book is built.
    """

    pages: frozenset[str]
    repository: str = ""

    def link_file(self, path: str, page: str) -> str:
        """Return the address of a file of the repository, seen from a page."""
        if self.repository:
            return f"{self.repository}/{path}"
        return "file-here:" + "../" * (page.count("/") + 2) + path

    def link(self, target: str, page: str) -> str:
        """Return where a relative link of a page leads in the book.

        A solved notebook is on the page of its chapter. Addresses, links within a page and figures
        stay as they are.
        """
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if ":" in target or target.startswith("#") or path.startswith(FIGURES):
            return target
        chapter = re.sub(r"^solutions/(.*\.ipynb)$", r"chapters/\1", path)
        if chapter in self.pages:
            path = posixpath.relpath(chapter, posixpath.dirname(page) or ".")
        else:
            path = self.link_file(path, page)
        return path + mark + anchor

    def link_all(self, text: str, page: str) -> str:
        """Return a page's Markdown with its links led as `link` says."""
        lead = partial(LINK.sub, lambda match: f"]({self.link(match[1], page)})")
        return map_prose(text, lead)


def map_prose(text: str, change: Callable[[str], str]) -> str:
    """Return Markdown with `change` applied to what stands between its pieces of code."""
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def make_chapter(
    student: NotebookNode, solved: NotebookNode, chapter: str, site: Site
) -> NotebookNode:
    """Return the notebook that a chapter's page shows.

    `student` and `solved` are its two editions. Raises ValueError if they are not of one build.
    """
    page = merge_editions(student, solved)
    nest_headings(page)
    describe_pictures(page)
    convert_tables(page)
    fold_results(page)
    path = f"chapters/{chapter}.ipynb"
    for cell in page.cells:
        if cell.cell_type == "markdown":
            cell.source = put_widgets(site.link_all(cell.source, path))
    first = page.cells[0]
    first.source = put_below_title(NAMED.sub("", first.source), link_notebooks(chapter, site))
    return page


def put_widgets(text: str) -> str:
    """Return Markdown with an element for each line `<!-- play: NAME: QUESTION -->`, of which a
    notebook shows nothing. On a page it becomes the widget of that name, in
    `static/play`, below the question that it answers."""
    inside = "{.play-question}\n\\2\n\nWith JavaScript, the model runs here."
    return WIDGET.sub(f'<div class="play" data-play="\\1">\n\n{inside}\n\n</div>', text)


def name_page(text: str, chapter: str, address: str) -> str:
    """Return a notebook's first cell with a link to its page in the published book."""
    link = f"[This chapter as a page]({address.rstrip('/')}/chapters/{chapter}.html)"
    return put_below_title(text, link)


def put_below_title(text: str, paragraph: str) -> str:
    """Return a text that begins with its title, with a paragraph put below that."""
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{paragraph}\n{rest}"


def link_notebooks(chapter: str, site: Site) -> str:
    """Return the paragraph of a page that leads to its two notebooks: in the repository where its
    address is known, else to their copies in the site."""
    paths = [f"{folder}/{chapter}.ipynb" for folder in ("chapters", "solutions")]
    mine, solved = (
        site.link_file(path, paths[0]) if site.repository else f"file-here:../{NOTEBOOKS}/{path}"
        for path in paths
    )
    return (
        "{.notebooks}\n"
        f"This page as a notebook: [to fill in]({mine}) · [solved]({solved}). In the course's "
        f"folder ([how to install it](../README.md)), `.venv/bin/python -m jupyterlab {paths[0]}` "
        "opens it. On this page, “your run” is the run of the solved notebook."
    )


def merge_editions(student: NotebookNode, solved: NotebookNode) -> NotebookNode:
    """Return the student's notebook with the outputs of the solved one.

    A stub has none. What a check prints goes into the fold of the solution, and a fold of their own
    holds the set-up and the imports. Raises ValueError if the editions do not have the same cells.
    """
    ids = [[cell.id for cell in notebook.cells] for notebook in (student, solved)]
    if ids[0] != ids[1]:
        raise ValueError(
            "the two notebooks should have the same cells, but one has "
            f"{sorted(set(ids[0]) ^ set(ids[1]))}; `make chapters` builds both anew"
        )
    page, printed, setup = copy.deepcopy(student), "", []
    for cell, twin in zip(page.cells, solved.cells, strict=True):
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "code":
            cell.outputs = [] if {"exercise", "check"} & {*tags} else copy.deepcopy(twin.outputs)
            cell.execution_count = None
        if any(tag.startswith("result-") for tag in tags):
            cell.metadata.tags = [*tags, "remove-input"]  # one line that shows the picture
        elif {"about-setup", "setup", "imports"} & {*tags}:
            setup.append(cell)
        elif "check" in tags:
            printed = f"`{cell.source}` then prints\n\n```text\n{read_streams(twin)}\n```"
        elif cell.source.startswith(SOLUTION):
            cell.source = cell.source.replace("\n</details>", f"\n{printed}\n\n</details>")
    if setup:
        code = "\n\n\n".join(cell.source for cell in setup if cell.cell_type == "code")
        fold = f"<details>\n<summary>Set-up</summary>\n\n```python\n{code}\n```\n\n</details>"
        page.cells[page.cells.index(setup[0])] = new_markdown_cell(fold, id=setup[0].id)
        page.cells = [cell for cell in page.cells if cell not in setup]
    return page


def read_streams(cell: NotebookNode) -> str:
    """Return what a cell printed, without colours."""
    return COLOUR.sub("", "".join(output.get("text", "") for output in cell.outputs)).strip()


def nest_headings(notebook: NotebookNode) -> None:
    """Put all headings except the first one level deeper if several are titles.

    The parts of a chapter would stand beside the chapters otherwise.
    """
    prose = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    if sum(len(re.findall(r"^# ", CODE.sub("", cell.source), re.M)) for cell in prose) > 1:
        for cell in prose:
            cell.source = map_prose(cell.source, lambda text: HEADING.sub("#", text))
        prose[0].source = prose[0].source.replace("##", "#", 1)


def describe_pictures(notebook: NotebookNode) -> None:
    """Give each picture words for those who do not see it.

    A drawing and a plot bring their description with them; any other picture is named after the
    section that it stands in. Those of many pixels get the class "wide".
    """
    section = ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            section = (re.findall(r"^#+ (.+)$", CODE.sub("", cell.source), re.M) or [section])[-1]
            continue
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/svg+xml" in data or "image/png" in data:
                own = data.get("text/plain", "<")
                alt = f"A plot, in “{section}”" if own.startswith("<") else own
                image = {"alt": alt}
                header = base64.b64decode(data.get("image/png", "")[:64])
                if int.from_bytes(header[16:20]) > WIDE:
                    image["classes"] = "wide"
                cell.metadata.mystnb = {"image": image}


def fold_results(notebook: NotebookNode) -> None:
    """Fold what cells printed and drew between a question to predict and its answer."""
    is_asked = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = CODE.sub("", cell.source)
            is_asked = "**Predict" in text.rpartition("</details>")[2] or (
                is_asked and not re.search(r"^## |<summary>(Answer|What to see)", text, re.M)
            )
        elif is_asked and cell.outputs:
            cell.metadata.tags = [*cell.metadata.get("tags", []), "hide-output"]
