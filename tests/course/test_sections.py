"""Every section of a notebook can be started without those before it.

What stands above section 1, `catch_up()` and the section's own cells bind every name that these
use; and no section rebinds a name of the first two, which a later one would then see changed.
"""

import json
import re
import symtable
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from tests.course.helpers import run_python
from utils.authoring.notebooks import Edition, build, get_written_chapters
from utils.grading.checks import get_reference

MATERIAL = "The material"  # the heading in chapter 0 that stands above section 1


def split_sections(cells: list[NotebookNode]) -> dict[str, list[NotebookNode]]:
    """The code cells below each heading, and under "" those above section 1."""
    sections, title = {"": []}, ""
    for cell in cells:
        if cell.cell_type == "code":
            sections.setdefault(title, []).append(cell)
            continue
        for line in cell.source.splitlines():
            is_heading = line.startswith("## ") or (line.startswith("# ") and len(sections) > 1)
            if is_heading and line != f"## {MATERIAL}":
                title = line.lstrip("# ")
    return sections


def bind(names: set[str]) -> str:
    """A line that binds names: as if they were typing's, so that Literal is what it is."""
    return f"from typing import {', '.join(sorted(names))}\n" if names else ""


def write_code(cells: list[NotebookNode], supplied: set[str]) -> str:
    """Cells as one program, in which `catch_up()` binds the names that are supplied. The axes of
    tensors are left out, as a string in an annotation is read like code."""
    code = "".join(TransformerManager().transform_cell(cell.source) for cell in cells)
    code = re.sub(r'(?<=\[Tensor), "[^"]*"(?=\])', "", code)
    return re.sub(r"^catch_up\(\)\n", bind(supplied), code, flags=re.MULTILINE)


def get_bound(cells: list[NotebookNode]) -> set[str]:
    symbols = symtable.symtable(write_code(cells, set()), "<cells>", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def find_unbound(programs: dict[str, str], folder: Path) -> set[tuple[str, str]]:
    """Programs, by title, and the names that each uses before they are bound; those that a function
    uses have to be bound in the end."""
    titles = {f"{i}.py": title for i, title in enumerate(programs)}
    for name, title in titles.items():
        (folder / name).write_text(programs[title], encoding="utf-8")
    options = ["--isolated", "--config", "builtins = ['get_ipython']", "--select", "F821"]
    said = run_python("-m", "ruff", "check", "--output-format", "json", *options, folder)
    assert said.returncode in (0, 1), said.stderr
    return {
        (titles[Path(found["filename"]).name], found["message"].split("`")[1])
        for found in json.loads(said.stdout)
    }


@pytest.fixture(params=get_written_chapters())
def chapter(request):
    """Sections; the names of what stands above section 1; those of the solutions."""
    sections = split_sections(build(request.param, Edition()).cells)
    first = sections.pop("")
    return sections, first, set(vars(get_reference(request.param)))


def test_what_stands_above_section_1_needs_nothing_else(chapter, tmp_path):
    """But what is supplied later, in functions that are called in a section."""
    _, first, supplied = chapter
    program = write_code(first, set()) + bind(supplied)
    assert find_unbound({"above section 1": program}, tmp_path) == set()


def test_a_section_needs_no_other_one(chapter, tmp_path):
    """What it lacks is to be bound in it, or above section 1."""
    sections, first, supplied = chapter
    assert len(sections) >= 7  # as many as the shortest chapter has
    known = bind(get_bound(first))
    programs = {title: known + write_code(cells, supplied) for title, cells in sections.items()}
    assert find_unbound(programs, tmp_path) == set()


def test_a_section_rebinds_nothing_that_others_share(chapter):
    sections, first, supplied = chapter
    for title, cells in sections.items():
        written = [c for c in cells if not {"exercise", "given"} & set(c.metadata.get("tags", []))]
        shared = get_bound(written) & (get_bound(first) | supplied)
        assert not shared, f"{title}: give them names of their own"


@pytest.mark.parametrize(
    ("sources", "unbound"),
    [
        (["catch_up()\ny = x + supplied"], {"x"}),
        (["y = supplied", "catch_up()"], {"supplied"}),
        (["def f(a: supplied):\n    return supplied", "catch_up()"], {"supplied"}),
        (["y = y + 1"], {"y"}),
        (["def f(a):\n    return a + x\n\nx = 1\nf(x)"], set()),
        (["%matplotlib inline\nimport a.b as c\nfrom d import e\nc, e, known"], set()),
    ],
)
def test_the_names_that_are_found(sources, unbound, tmp_path):
    code = write_code([new_code_cell(source) for source in sources], {"supplied"})
    assert find_unbound({"": bind({"known"}) + code}, tmp_path) == {("", name) for name in unbound}
