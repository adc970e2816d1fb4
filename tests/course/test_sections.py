"""Every section of a notebook can be started without those before it.

What stands above section 1, `catch_up()` and the section's own cells bind every name that these
use; and no section rebinds a name of the first two, which a later one would then see changed.
"""

import builtins
import dis
import inspect
from types import CodeType

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from utils.authoring.notebooks import Edition, build, get_written_chapters
from utils.grading.checks import get_reference

MATERIAL = "The material"  # the heading in chapter 0 that stands above section 1
ALWAYS = {*dir(builtins), "__name__", "__annotations__", "get_ipython"}


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


def read_cell(cell: NotebookNode) -> list[tuple[str, str]]:
    """The names of a cell in order, and of each whether it is "bound", "used" or "used later".

    Later is when a function is called that the cell defines.
    """
    source = TransformerManager().transform_cell(cell.source)
    return _read_code(compile(source, cell.id, "exec"), later=False)


def _read_code(code: CodeType, later: bool) -> list[tuple[str, str]]:
    found, own = [], set()  # own: what a class body binds
    is_class = code.co_name != "<module>" and not later
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if isinstance(name, CodeType):
            found += _read_code(name, later or bool(name.co_flags & inspect.CO_OPTIMIZED))
        elif instruction.opname == "STORE_NAME" and is_class:
            own.add(name)
        elif instruction.opname in ("STORE_NAME", "STORE_GLOBAL"):
            found.append((name, "bound"))
        elif instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL") and name not in own:
            found.append((name, "used later" if later else "used"))
    return found


def get_bound(cells: list[NotebookNode]) -> set[str]:
    return {name for cell in cells for name, how in read_cell(cell) if how == "bound"}


def find_unbound(
    cells: list[NotebookNode], known: set[str], supplied: set[str]
) -> set[tuple[str, str]]:
    """The cells, by id, and the names that each uses before they are bound.

    `catch_up()` binds those `supplied`. A function's names have to be bound when its cell has run;
    those of an exercise or of what is given have until `catch_up()`, wherever it stands.
    """
    known, unbound = set(known), set()
    catches_up = any(("catch_up", "used") in read_cell(cell) for cell in cells)
    for cell in cells:
        later = set()
        for name, how in read_cell(cell):
            if how == "used later":
                later.add(name)
            elif how == "bound":
                known.add(name)
            elif name not in known:
                unbound.add((cell.id, name))
            if (name, how) == ("catch_up", "used"):
                known |= supplied
        waits = catches_up and {"exercise", "given"} & set(cell.metadata.get("tags", []))
        unbound |= {(cell.id, name) for name in later - known - (supplied if waits else set())}
    return unbound


@pytest.fixture(params=get_written_chapters())
def chapter(request):
    """Sections; the names of what stands above section 1; those of the solutions."""
    sections = split_sections(build(request.param, Edition()).cells)
    first = sections.pop("")
    return sections, first, set(vars(get_reference(request.param)))


def test_what_stands_above_section_1_needs_nothing_else(chapter):
    _, first, supplied = chapter
    unbound = {name for _, name in find_unbound(first, ALWAYS, supplied)}
    assert unbound <= supplied  # in functions that are called in a section
    assert not {name for cell in first for name, how in read_cell(cell) if how == "used"} & unbound


def test_a_section_needs_no_other_one(chapter):
    sections, first, supplied = chapter
    assert len(sections) >= 7  # as many as the shortest chapter has
    for title, cells in sections.items():
        unbound = find_unbound(cells, ALWAYS | get_bound(first), supplied)
        assert not unbound, f"{title}: bind them in this section, or above section 1"


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
        (["y = y + 1"], {"y"}),
        (["z = [y for y in known if y > x]"], {"x"}),
        (["def f(a):\n    return a + x", "x = 1"], {"x"}),
        (["def f(a):\n    return a + x\n\nx = 1\nf(x)"], set()),
        (["def f(a: x):\n    pass"], {"x"}),
        (["class A(B):\n    c = 1\n    d = c\n\n    def f(self, e=g):\n        pass"], {"B", "g"}),
        (["%matplotlib inline\nimport a.b as c\nfrom d import e\nc, e, known"], set()),
    ],
)
def test_the_names_that_are_found(sources, unbound):
    cells = [new_code_cell(source) for source in sources]
    found = find_unbound(cells, ALWAYS | {"catch_up", "known"}, {"supplied"})
    assert {name for _, name in found} == unbound


def test_an_exercise_may_call_what_is_supplied_later_but_not_refer_to_it():
    source = "def f(a: b):\n    return c + d"
    exercise = new_code_cell(source, metadata={"tags": ["exercise"]})
    cells = [exercise, new_code_cell("catch_up()")]
    found = find_unbound(cells, ALWAYS | {"catch_up"}, {"b", "c"})
    assert {name for _, name in found} == {"b", "d"}
