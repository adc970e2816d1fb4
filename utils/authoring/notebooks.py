"""Builds a chapter's notebooks from `chapters/source/<chapter>.md` and `solutions/<chapter>.py`.

chapters/README.md says what blocks a source has, and what they become. Besides them, a line
`<!-- play: NAME: QUESTION -->` is in the book a widget in which the model runs (see
`utils/authoring/book/static/play/widgets.js`), and in a notebook nothing. Text in
<repository>...</repository> stands where the whole repository is at hand, text in
<bundle>...</bundle> in a course bundle, which has no experiments, course tests or Makefile.

`chapters/<chapter>.ipynb` has stubs, `solutions/<chapter>.ipynb` the solutions in their place,
executed.
"""

import ast
import base64
import contextlib
import hashlib
import io
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from tqdm import tqdm

from utils.authoring import stubs
from utils.authoring.book.pages import name_page
from utils.authoring.diagrams import describe_loop, draw_loop
from utils.authoring.sums import (
    IN_SOURCE,
    SECTION,
    Exercise,
    fill,
    find_needed,
    read_exercises,
    read_options,
)
from utils.chapters import sort_chapters
from utils.course.checking import run_and_print
from utils.grading.checks import get_checks, get_reference
from utils.grading.reference import find_named
from utils.version import get_version

ROOT = Path(__file__).parents[2]
CHAPTERS, SOLUTIONS = ROOT / "chapters", ROOT / "solutions"
FIGURES, RESULTS = CHAPTERS / "figures", CHAPTERS / "results"
BLOCK = re.compile(r"^(`{3,})\{(\w+)\} *([^\n]*)\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
BY_PLACE = re.compile(r"<(repository|bundle)>(.*?)</\1>", re.DOTALL)
MADE_BY = re.compile(r"^#.* python -m chapters\.experiments\.[^\n]*\n", re.MULTILINE)
SCRIPT = re.compile(r"(a script in )?chapters/experiments[\w/.]*")
OPTIONAL = {True: " · optional", "lent": " · optional where the solutions are at hand"}
LENT_IN_BUNDLES = " · needed by others, so write it"  # nothing is lent there
OPENING = {
    "repository": "preview()  # the finished thing, in about 20 seconds",
    "bundle": "preview()  # what the finished thing printed, recorded",
}
FOLDED = (
    "*Run the next two cells first. They're folded: they find the course and import what we need.*"
)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

SETUP = """\
# Set-up: run this cell first.
import sys
import zipfile
from pathlib import Path

CHAPTER = "{chapter}"
VERSION = "{version}"  # of the course
bundles = sorted(Path.cwd().glob(f"{CHAPTER}*.zip"))  # uploaded beside this notebook
if bundles and not Path(CHAPTER, "utils/course").is_dir():
    zipfile.ZipFile(bundles[-1]).extractall()
folders = [Path.cwd(), *Path.cwd().parents, Path(CHAPTER).absolute(), *Path("/content").glob("*")]
root = next((folder for folder in folders if (folder / "utils/course").is_dir()), None)
if root is None:
    raise FileNotFoundError(
        "The course's folder was not found. Open this notebook inside it, or put the course's "
        f"{CHAPTER}.zip beside it (on Colab, upload it)."
    )
sys.path.insert(0, str(root))
from utils.course import catch_up, check, preview, progress, shorten, show_result, start

start(CHAPTER, VERSION)"""


@dataclass(frozen=True)
class Edition:
    """Which notebook is built: with stubs or solved, with or without the folded solutions."""

    solved: bool = False
    folded_solutions: bool = True

    @property
    def place(self) -> str:
        return "repository" if self.solved or self.folded_solutions else "bundle"


@dataclass
class _Builder:
    chapter: str
    edition: Edition
    cells: list[NotebookNode] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)  # exercises

    def __post_init__(self) -> None:
        self.is_on_core_path = {e.name: e.is_core for e in read_exercises(self.chapter)}

    def markdown(self, text: str, *tags: str) -> None:
        if text.strip():
            metadata = {"tags": list(tags)} if tags else {}
            self.cells.append(new_markdown_cell(text.strip(), metadata=metadata))

    def code(self, source: str, *tags: str, hidden: bool = False) -> None:
        metadata: dict[str, Any] = {"tags": list(tags)} if tags else {}
        if hidden or "hide-input" in tags:
            metadata["jupyter"] = {"source_hidden": True}
        self.cells.append(new_code_cell(source, metadata=metadata))

    def block(self, kind: str, argument: str, body: str) -> None:
        names = tuple(argument.split())
        if kind == "setup":
            setup = SETUP.replace("{version}", get_version())
            self.markdown(FOLDED, "about-setup")
            self.code(setup.replace("{chapter}", self.chapter), "setup", hidden=True)
            self.code(stubs.get_imports(self.chapter), "imports", hidden=True)
        elif kind == "opening":
            self.code(OPENING[self.edition.place], "opening")
        elif kind == "given":
            exercises = tuple(get_checks(self.chapter))
            given = [stubs.get_given(self.chapter, name, exercises) for name in names]
            self.code("\n\n\n".join(given), "given", hidden=body.strip() == "folded")
        elif kind == "result":
            source = f'show_result("{self.chapter}", "{names[0]}")'
            self.code(source, f"result-{names[0]}", hidden=True)
        elif kind == "exercise":
            self.exercise(names[0], body)
        else:
            raise ValueError(f"chapters/source/{self.chapter}.md: no block is called {kind}")

    def exercise(self, name: str, body: str) -> None:
        options = read_options(self.chapter, name, body)
        self.placed.append(name)
        self.markdown(
            f"### Exercise: `{name}`\n\n"
            f"Difficulty {_dots(options['difficulty'])} · importance "
            f"{_dots(options['importance'])} · about {options['minutes']} minutes"
            f"{self._place(name, options)}"
            f"{self._say_callable(name)}"
        )
        solved, inherited = self.edition.solved, options.get("inherited", False)
        if not inherited:
            also, helpers = (tuple(options.get(key, ())) for key in ("also", "helpers"))
            piece = stubs.cut_exercise(self.chapter, name, also, helpers)
            self.code(piece.solution if solved else piece.stub, "exercise", name)
        slow = ", slow=True" if options.get("slow") else ""
        self.code(f"check({name}{slow})", "inherited" if inherited else "check", name)
        self.markdown(_fold("Hint: the idea", options["idea"]))
        self.markdown(_fold("Hint: the API", options["api"]))
        if solved or inherited:
            self.markdown(options["why"])
        elif self.edition.folded_solutions:
            code = f"```python\n{piece.solution}\n```\n\n{options['why'].strip()}"
            self.markdown(_fold("Solution", code))

    def _place(self, exercise: str, options: dict[str, Any]) -> str:
        """Say where an exercise lies: on the core path or off it."""
        needed = [one.name for one in find_needed(self.chapter)]
        if self.edition.place == "bundle" and exercise in needed:
            return LENT_IN_BUNDLES
        if options.get("optional"):
            return OPTIONAL[options["optional"]]
        if not self.is_on_core_path[exercise]:
            return " · deeper"
        return " · core path" + " · milestone" * bool(options.get("milestone"))

    def _say_callable(self, exercise: str) -> str:
        """Say what an exercise may call: what is lent to it where it is missing."""
        names = [f"`{name}`" for name in find_named(self.chapter, exercise)]
        if self.placed[:-1]:
            names.append("any exercise above")
        return f" · may call {', '.join(names)}" if names else ""


def _dots(n: int) -> str:
    return "●" * n + "○" * (5 - n)


def _fold(title: str, text: str) -> str:
    """Put text into a folded block, with empty lines around it, or it would not be read as
    markdown."""
    return f"<details>\n<summary>{title}</summary>\n\n{text.strip()}\n\n</details>"


def build(chapter: str, edition: Edition) -> NotebookNode:
    """Return a chapter's notebook, without outputs.

    Raises ValueError for a source whose blocks are wrong.
    """
    builder, path = _Builder(chapter, edition), CHAPTERS / "source" / f"{chapter}.md"
    source = fill(path, IN_SOURCE)
    source = lead_past(source, find_needed(chapter))
    source = BY_PLACE.sub(lambda match: match[2] if match[1] == edition.place else "", source)
    if edition.place == "bundle":  # which has what the scripts found, not the scripts
        source = SCRIPT.sub("a recorded run", MADE_BY.sub("", source))
    for cell in jupytext.reads(source, fmt="md:myst").cells:
        if cell.cell_type == "code":
            builder.code(cell.source, *cell.metadata.get("tags", []))
            continue
        end = 0
        for match in BLOCK.finditer(cell.source):
            builder.markdown(cell.source[end : match.start()])
            builder.block(match[2], match[3], match[4])
            end = match.end()
        builder.markdown(cell.source[end:])
    _require_every_exercise(chapter, builder.placed)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if address := settings["tool"]["course"]["book"]:  # empty until the book is published
        builder.cells[0].source = name_page(builder.cells[0].source, chapter, address)
    for index, cell in enumerate(builder.cells):
        cell.id = f"{chapter.replace('_', '-')}-{index}"
    notebook = new_notebook(cells=builder.cells, metadata=METADATA)
    notebook.metadata["course"] = {"built": _digest(notebook), "solved": edition.solved}
    return notebook


def lead_past(source: str, needed: Sequence[Exercise]) -> str:
    """Say below the first heading of sections that are off the core path where it goes on, and in a
    bundle which exercises it needs of them."""
    sections = [(int(m[1]), bool(m[2]), m) for m in SECTION.finditer(source)]
    parts: list[str] = []
    end, was_deeper = 0, False
    for number, is_deeper, match in sections:
        if is_deeper and not was_deeper:
            later = [n for n, deeper, _ in sections if n > number and not deeper]
            said = "The core path leaves out this chapter."
            if later:
                said = f"The core path goes on with section {later[0]}."
                here = [f"`{e.name}`" for e in needed if number <= e.section < later[0]]
                if here:
                    names = ", ".join(here)
                    said += f"<bundle> Its experiments need {names} from here.</bundle>"
            elif parts or number > 1:
                said = "The core path through this chapter ends here."
            parts += [source[end : match.end()], f"\n\n*{said}*"]
            end = match.end()
        was_deeper = is_deeper
    return "".join([*parts, source[end:]])


def _digest(notebook: NotebookNode) -> str:
    """Digest what a person may edit: the cells' sources."""
    sources = [(cell.cell_type, cell.source) for cell in notebook.cells]
    return hashlib.sha256(repr(sources).encode()).hexdigest()


def is_as_built(path: Path) -> bool:
    """Return whether a notebook's cells are still those that were built."""
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception:  # not readable: somebody's all the same
        return False
    return notebook.metadata.get("course", {}).get("built") == _digest(notebook)


def _require_every_exercise(chapter: str, placed: list[str]) -> None:
    exercises = get_checks(chapter)
    untold = {name for name in exercises if not all(c.probe.__doc__ for c in exercises[name])}
    wrong = {
        f"has no {{exercise}} block in chapters/source/{chapter}.md": exercises.keys() - placed,
        f"has no check in tests/checks/{chapter}.py": {*placed} - exercises.keys(),
        f"has a check without a docstring in tests/checks/{chapter}.py": untold,
        "has more than one {exercise} block": {n for n in placed if placed.count(n) > 1},
    }
    said = [f"{name} {what}" for what, names in wrong.items() for name in sorted(names)]
    if said:
        raise ValueError(f"{chapter}: {'; '.join(said)}")


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run every cell of a chapter's notebook in `folder`.

    Raises nbclient's CellExecutionError with the cell that failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        environment = {"COURSE_PROGRESS": f"{scratch}/progress.json"}
        environment["COURSE_MODELS"] = scratch  # none is fetched: recorded runs are shown
        environment |= {"COURSE_SOLVED": "1"} if notebook.metadata["course"]["solved"] else {}
        run_cells(notebook, folder, os.environ | environment)
    notebook.metadata = nbformat.from_dict(METADATA | {"course": notebook.metadata["course"]})
    return notebook


def run_cells(notebook: NotebookNode, folder: Path, environment: Mapping[str, str]) -> NotebookNode:
    """Run every cell in `folder`, with a bar of progress. What is written to stderr, as the cells'
    own bars are, is dropped."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    with tqdm(total=len(cells), unit="cell", leave=False) as bar:
        client = NotebookClient(
            notebook,
            timeout=900,
            resources={"metadata": {"path": str(folder)}},
            on_cell_executed=lambda **_: bar.update(),
            extra_arguments=["--log-level=ERROR"],  # it warns of a socket without encryption
        )
        client.execute(env=environment)
    for cell in cells:
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def check_anew(chapter: str, notebook: NotebookNode) -> None:
    """Renew an executed notebook's text and the outputs of its cells that check.

    All other outputs stay. Raises ValueError if other code has changed since it was executed, for
    which docstrings, comments and the course's version do not count.
    """
    built = build(chapter, Edition(solved=True))
    old, new = (
        [cell for cell in each.cells if cell.cell_type == "code"] for each in (notebook, built)
    )
    changed = [two.source for one, two in zip(old, new, strict=False) if not _run_alike(one, two)]
    if changed or len(old) != len(new):
        where = changed[0].splitlines()[0] if changed else "a code cell more or less"
        raise ValueError(f"{chapter}: code has changed ({where}): build it without --checks")
    for one, two in zip(old, new, strict=True):
        two.outputs, two.execution_count = one.outputs, one.execution_count
    notebook.cells, notebook.metadata = built.cells, built.metadata
    notebook.metadata = nbformat.from_dict(METADATA | {"course": built.metadata["course"]})
    import ipykernel  # noqa: F401  checks print in colour where it is

    names = vars(get_reference(chapter)) | {"CHAPTER": chapter}
    names["check"] = lambda answer, slow=False: run_and_print(answer, names, slow)
    for cell in notebook.cells:
        if "check" in cell.metadata.get("tags", []):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(cell.source, names)
            cell.outputs = [nbformat.v4.new_output("stream", text=printed.getvalue())]


def _run_alike(one: NotebookNode, two: NotebookNode) -> bool:
    """Return whether two cells hold the same code, docstrings, comments and version aside."""
    if one.source == two.source:
        return True
    try:
        trees = [ast.parse(cell.source) for cell in (one, two)]
    except SyntaxError:  # of magics
        return False
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERSION":
            node.value = ast.Constant("")
    return ast.dump(trees[0]) == ast.dump(trees[1])


def list_tagged(notebook: NotebookNode, prefix: str) -> list[tuple[NotebookNode, str]]:
    """Return the cells that have a tag `prefix-NAME`, each with the name."""
    return [
        (cell, tag.removeprefix(f"{prefix}-"))
        for cell in notebook.cells
        for tag in cell.metadata.get("tags", [])
        if tag.startswith(f"{prefix}-")
    ]


def list_pictures(cell: NotebookNode) -> list[NotebookNode]:
    """Return what a cell drew: a picture, and the words that stand beside it."""
    data = [output.get("data", {}) for output in cell.outputs]
    return [d for d in data if "image/png" in d]


def save_figures(chapter: str, notebook: NotebookNode) -> None:
    """Save the pictures of an executed notebook's cells with a tag `figure-NAME`, as PNG
    files."""
    for cell, name in list_tagged(notebook, "figure"):
        pictures = list_pictures(cell)
        if not pictures:
            raise ValueError(f"{chapter}: the cell figure-{name} should draw a picture")
        path = FIGURES / f"{chapter}-{name}.png"
        path.write_bytes(base64.b64decode(pictures[-1]["image/png"]))


def save_opening(chapter: str, notebook: NotebookNode) -> None:
    """Save what the executed opening printed, for bundles, which cannot run it."""
    for cell in notebook.cells:
        if "opening" in cell.metadata.get("tags", []):
            text = "".join(output.get("text", "") for output in cell.outputs)
            (RESULTS / f"{chapter}_opening.txt").write_text(text, encoding="utf-8")


def save_loop(chapter: str) -> None:
    """Save the chapter's diagram, which `{result} loop` shows."""
    FIGURES.mkdir(exist_ok=True)
    (FIGURES / f"{chapter}-loop.svg").write_text(draw_loop(chapter), encoding="utf-8")


def embed_results(chapter: str, notebook: NotebookNode, executed: NotebookNode) -> None:
    """Put the pictures below the cells that show them, so that they are seen before any run, and
    with them the words that stand beside them in the executed notebook."""
    figures = {name: list_pictures(cell) for cell, name in list_tagged(executed, "figure")}
    for cell, name in list_tagged(notebook, "result"):
        path = FIGURES / f"{chapter}-{name}.png"
        drawing = path.with_suffix(".svg")
        if drawing.exists():
            data = {"image/svg+xml": drawing.read_text(encoding="utf-8")}
            data["text/plain"] = describe_loop(chapter)
        elif path.exists():
            data = {"image/png": base64.b64encode(path.read_bytes()).decode()}
            drawn = figures.get(name, [])
            data["text/plain"] = drawn[-1]["text/plain"] if drawn else ""  # as in save_figures
        else:
            continue
        cell.outputs = [nbformat.v4.new_output("display_data", data)]


def write(notebook: NotebookNode, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    nbformat.write(notebook, partial)
    os.replace(partial, path)


def get_written_chapters() -> list[str]:
    """Return the chapters that have a source."""
    return sort_chapters(path.stem for path in (CHAPTERS / "source").glob("ch*.md"))
