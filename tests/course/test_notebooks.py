"""Notebooks: up to date with their source, and whole; and a student's loop."""

import argparse
import inspect
import json
import re
import textwrap
import types
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
import torch

from utils.authoring import __main__ as authoring
from utils.authoring import diagrams, notebooks, stubs
from utils.authoring.__main__ import build_student, format_core_path
from utils.authoring.notebooks import CHAPTERS, SOLUTIONS, Edition, build
from utils.authoring.sums import read_exercises
from utils.course import checking, session, stale_cells
from utils.grading.checks import Check, get_checks, get_reference

WRITTEN = notebooks.get_written_chapters()


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def get_sources(notebook: nbformat.NotebookNode) -> list[tuple[str, str, str]]:
    """What staleness compares: everything but outputs."""
    return [(cell.id, cell.cell_type, cell.source) for cell in notebook.cells]


# --- The committed notebooks --------------------------------------------------------------------


@pytest.mark.parametrize("chapter", WRITTEN)
def test_the_notebooks_are_as_their_source_says(chapter):
    hint = f"run `python -m utils.authoring {chapter}`"
    student, solved = read(CHAPTERS / f"{chapter}.ipynb"), read(SOLUTIONS / f"{chapter}.ipynb")
    assert get_sources(student) == get_sources(build(chapter, Edition())), hint
    assert get_sources(solved) == get_sources(build(chapter, Edition(solved=True))), hint


def is_exercise(cell) -> bool:
    return cell.cell_type == "code" and "exercise" in cell.metadata.get("tags", [])


@pytest.mark.parametrize("chapter", WRITTEN)
def test_the_executed_notebook_has_its_outputs_and_no_path_of_a_machine(chapter):
    cells = [
        cell for cell in read(SOLUTIONS / f"{chapter}.ipynb").cells if cell.cell_type == "code"
    ]
    assert all(cell.execution_count for cell in cells)
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    text = "".join(f"{o.get('text')} {o.get('data', {}).get('text/plain')}" for o in outputs)
    assert not re.findall(r"(?:/home|/root|/tmp|/Users|/work|C:\\)[^\s]*", text)
    for cell in (cell for cell in cells if "check" in cell.metadata.get("tags", [])):
        assert "✗" not in cell.outputs[0].text
        lines = re.sub(r"\x1b\[\d+m", "", cell.outputs[0].text).splitlines()
        checks = get_checks(chapter)[lines[0].partition(":")[0]]
        ran = [check for check in checks if not check.slow or "slow=True" in cell.source]
        harder = [check for check in ran if not check.is_core]
        told = [check.title for check in ran if check.is_core]
        told += [f"hardening: {len(harder)} of {len(harder)}"] * bool(harder)
        assert lines[0].endswith(", solved")
        printed = [line.partition("✓ ")[2] for line in lines if "✓" in line]
        assert printed == told, f"renew it: python -m utils.authoring --checks {chapter}"


@pytest.mark.parametrize("folder", [CHAPTERS, SOLUTIONS])
@pytest.mark.parametrize("chapter", WRITTEN)
def test_pictures_are_described(chapter, folder):
    cells = read(folder / f"{chapter}.ipynb").cells
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    words = [data["text/plain"] for data in shown if {"image/png", "image/svg+xml"} & {*data}]
    assert words
    assert all(len(text) > 20 and text[0] != "<" for text in words)
    results = [cell for cell in cells if "result-" in str(cell.metadata.get("tags"))]
    assert all(cell.outputs for cell in results)


TEX = set(
    "Big Bigl Bigr Delta Longleftrightarrow Longrightarrow Vert alpha approx bar begin beta "
    "big bigl bigr binom cdot delta dfrac dots end epsilon eta exp frac gamma ge hat iff in infty "
    "int lVert lambda ldots left ln log lt lvert mathbb mathbf mathrm max mid min mu nabla ne "
    "operatorname overline partial pi pm propto qquad quad rVert rho right rvert sigma sim sin "
    "sqrt sum tau text tfrac theta tilde to top underbrace varepsilon".split()
)


@pytest.mark.parametrize("chapter", WRITTEN)
def test_equations_have_no_command_that_mathjax_does_not_know(chapter):
    source = (CHAPTERS / "source" / f"{chapter}.md").read_text(encoding="utf-8")
    prose = re.sub(r"```\{code-cell\}.*?```|`[^`\n]*`", "", source, flags=re.DOTALL)
    assert {*re.findall(r"\\([A-Za-z]+)", prose)} <= TEX


@pytest.mark.parametrize("chapter", WRITTEN)
def test_the_diagram_is_as_drawn_and_says_in_words_what_it_shows(chapter):
    drawn = diagrams.draw_loop(chapter)
    assert (notebooks.FIGURES / f"{chapter}-loop.svg").read_text() == drawn
    parts = {part.tag.partition("}")[2]: part.text for part in ElementTree.fromstring(drawn)}
    assert parts["desc"] == diagrams.describe_loop(chapter)
    loop = diagrams.read_loop(chapter)
    assert all(name in parts["desc"] for name in (*loop.new, *loop.gone))


# --- Building -----------------------------------------------------------------------------------


SOURCE = """\
# Title

```{setup}
```

```{given} at_least_float32 Samples
```

````{exercise} masked_mean
difficulty: 1
importance: 5
minutes: 5
idea: Replace first.
api: |
  ```python
  x.masked_fill(mask, 0.0)
  ```
why: 0 times nan is nan.
````

```{code-cell} ipython3
:tags: [figure-one]
1 + 1
```
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A source with one exercise, in a folder of its own."""
    monkeypatch.setattr(notebooks, "CHAPTERS", tmp_path)
    monkeypatch.setattr(notebooks, "_require_every_exercise", lambda *args: None)
    path = tmp_path / "source" / "ch0_sampling.md"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def test_the_editions_of_a_notebook(small):
    editions = Edition(), Edition(solved=True), Edition(folded_solutions=False)
    student, solved, bundle = (build("ch0_sampling", edition) for edition in editions)
    solution = stubs.get_definition("ch0_sampling", "masked_mean").splitlines()[-1]
    assert sum(solution in cell.source for cell in student.cells) == 1  # folded
    assert not any(solution in cell.source for cell in bundle.cells)
    assert next(c.source for c in solved.cells if is_exercise(c)).endswith(solution)
    reference = get_reference("ch0_sampling")
    (stub,) = [run_cell(c.source, {**vars(reference)}) for c in bundle.cells if is_exercise(c)]
    for describe in (inspect.signature, inspect.getdoc):
        assert str(describe(stub["masked_mean"])) == str(describe(reference.masked_mean))
    assert student.cells[-1].metadata.tags == ["figure-one"]
    assert build("ch0_sampling", Edition()) == student


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("minutes: 5\n", "", "ch0_sampling.md: the block of masked_mean should have"),
        ("idea: ", "idea: [", "ch0_sampling.md: the block of masked_mean should be YAML"),
        ("{given}", "{gibt}", "ch0_sampling.md: no block is called gibt"),
        ("{given} ", "{given} mine ", "names mine, which solutions/ch0_sampling.py should define"),
        ("# Title", "{{count mine}}", "ch0_sampling.md: 'count mine': there is no chapter and no"),
    ],
)
def test_a_mistake_of_an_author_ends_in_a_sentence(old, new, said, small, monkeypatch, capsys):
    small.write_text(small.read_text().replace(old, new))
    run_main(monkeypatch, small.parent)
    assert said in capsys.readouterr().err


def test_a_solution_that_cannot_be_read_ends_in_a_sentence(small, monkeypatch, capsys):
    draw_loop = partial(compile, "\ndef (", "solutions/x.py")
    monkeypatch.setattr(notebooks, "draw_loop", lambda chapter: draw_loop("exec"))
    run_main(monkeypatch, small.parent)
    assert "solutions/x.py, line 2: invalid syntax" in capsys.readouterr().err


def test_commands_take_chapters_or_none_and_name_those_that_are_there(capsys):
    parser = argparse.ArgumentParser()
    authoring.add_chapters(parser)
    assert parser.parse_args([]).chapters == []
    assert parser.parse_args(["ch2_ppo", "ch4_kl"]).chapters == ["ch2_ppo", "ch4_kl"]
    with pytest.raises(SystemExit):
        parser.parse_args(["ch2_pop"])
    assert "ch2_pop is none of ch0_sampling, ch1_lora, " in capsys.readouterr().err


def run_main(monkeypatch, folder):
    """Build the student's notebook of chapter 0; it fails."""
    for module, name in ((authoring, "CORE_PATH"), (authoring, "FORM"), (notebooks, "FIGURES")):
        monkeypatch.setattr(module, name, folder / name)
    (folder / "FORM").touch()
    monkeypatch.setattr("sys.argv", ["authoring", "--no-execute", "ch0_sampling"])
    with pytest.raises(SystemExit, match="1"):
        authoring.main()


def test_every_exercise_has_one_place_and_its_checks_are_told(monkeypatch):
    first, *others = get_checks("ch0_sampling")
    for placed in (others, [first, *others, first]):
        with pytest.raises(ValueError, match=first):
            notebooks._require_every_exercise("ch0_sampling", placed)
    untold = Check("untold", lambda student, rng: 1)
    monkeypatch.setattr(notebooks, "get_checks", lambda chapter: {"untold": (untold,)})
    with pytest.raises(ValueError, match="untold has a check without a docstring in tests/checks/"):
        notebooks._require_every_exercise("ch0_sampling", ["untold"])


def test_a_notebook_that_somebody_has_worked_in_is_left_alone(small, tmp_path):
    path, text = tmp_path / "ch0_sampling.ipynb", small.read_text()
    build_student("ch0_sampling", tmp_path)
    small.write_text(text.replace("# Title", "# Another title"))
    build_student("ch0_sampling", tmp_path)
    assert "Another title" in path.read_text()
    mine = path.read_text().replace("raise NotImplementedError", "return values.mean()")
    path.write_text(mine)
    small.write_text(text)
    build_student("ch0_sampling", tmp_path)
    assert path.read_text() == mine


def test_points_are_added_for_what_has_none(tmp_path, monkeypatch):
    path = tmp_path / "points.toml"
    lines = authoring.FILE.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(x for x in lines if not x.startswith('"masked_mean"')))
    monkeypatch.setattr(authoring, "FILE", path)
    assert re.fullmatch(r"added masked_mean, [\d.]+ points", authoring.add_points())
    assert authoring.add_points() == f"{path} had every exercise"


# --- The student's loop -------------------------------------------------------------------------


def run_cell(source: str, names: dict) -> dict:
    """What a cell leaves: `inspect` and `check` see functions of this namespace."""
    exec(compile(textwrap.dedent(source), "<cell>", "exec"), names)
    return names


@pytest.fixture
def names(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "PROGRESS", tmp_path / "progress.json")
    module = types.ModuleType("a_notebook")
    module.__dict__.update(CHAPTER="ch0_sampling", check=session.check, catch_up=session.catch_up)
    imports = stubs.get_imports("ch0_sampling")
    return run_cell(imports, module.__dict__)


STUB = (
    "def masked_mean(values, mask, dim=None):\n    '''A mean.'''\n    raise NotImplementedError\n"
)
RIGHT = """
def calc_reinforce_objective(logprobs, advantages, mask):
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(logprobs)
    product = logprobs.masked_fill(~mask, 0) * advantages.detach().masked_fill(~mask, 0)
    return masked_mean(product, mask)
"""


def test_a_method_that_is_only_inherited_is_not_written_yet(names, capsys):
    names["CHAPTER"] = "ch3_grpo"
    inherited = "class GrpoTrainer(RLHFTrainer):\n    args_class = None"
    check = "check(GrpoTrainer.rollout_phase)"
    run_cell("\n".join([stubs.get_imports("ch3_grpo"), inherited, check]), names)
    assert "not written yet: GrpoTrainer inherits it" in capsys.readouterr().out


def test_catch_up_fills_in_what_is_not_written_which_does_not_count_as_solved(names, capsys):
    run_cell(STUB + RIGHT + "mine = calc_reinforce_objective\ncatch_up()", names)
    printed = capsys.readouterr().out
    assert "masked_mean" in printed
    assert "calc_reinforce_objective" not in printed
    assert names["calc_reinforce_objective"] is names["mine"]
    run_cell("check(masked_mean)", names)
    assert "the solution that catch_up() put in" in capsys.readouterr().out
    assert not session.PROGRESS.exists()
    run_cell("check(calc_reinforce_objective)", names)
    assert "put in" not in capsys.readouterr().out
    assert session.PROGRESS.exists()


def test_catch_up_supplies_what_is_given(names, capsys):
    run_cell(stubs.get_imports("ch3_grpo"), names)
    names["CHAPTER"] = "ch3_grpo"
    mine = "def _check_group_size(group_size, batch):\n    raise ZeroDivisionError\n"
    stub = stubs.cut_exercise("ch3_grpo", "GrpoTrainer.rollout_phase").stub
    written = stubs.cut_exercise("ch3_grpo", "calc_single_update_objective").solution
    run_cell(f"{mine}\n\n{written}\n\ncatch_up()\n\n{stub}\n\ncatch_up()", names)
    assert "_mean_over_completions" not in capsys.readouterr().out  # only exercises are listed
    with pytest.raises(ZeroDivisionError):
        names["_check_group_size"](1, 1)
    mask = torch.ones(2, 3, dtype=torch.bool)
    objective = names["calc_single_update_objective"](torch.zeros(2, 3), torch.ones(2), mask)
    assert objective == 1  # by _mean_over_completions
    assert names["GrpoTrainer"] is not get_reference("ch3_grpo").GrpoTrainer
    assert not checking.is_stub(names["GrpoTrainer"].rollout_phase)


@pytest.mark.parametrize(
    ("ran", "after_saving_s", "is_unrun"),
    [
        ("def f(x):\n    return 2 * x", -5, False),
        ("def f(x):\n    return x", -5, True),
        ("def f(x):\n    return x", 5, False),  # the notebook isn't saved yet
    ],
)
def test_a_cell_that_was_edited_but_not_run_is_noticed(
    ran, after_saving_s, is_unrun, tmp_path, monkeypatch
):
    path = tmp_path / "mine.ipynb"
    cell = nbformat.v4.new_code_cell("def f(x):\n    return 2 * x")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    monkeypatch.setattr(stale_cells, "_ran", {ran: path.stat().st_mtime + after_saving_s})
    assert stale_cells.is_unrun("f") == is_unrun
    assert not stale_cells.is_unrun("g")


# --- The core path and the openings ---------------------------------------------------------------


def test_the_core_path_is_that_of_the_headings_and_shown_in_progress(names, capsys):
    assert session.CORE_PATH.read_text(encoding="utf-8") == format_core_path(), "make chapters"
    on_path = json.loads(format_core_path())
    minutes = [e.minutes for chapter in WRITTEN for e in read_exercises(chapter) if e.is_core]
    assert 9 <= sum(minutes) / 60 <= 12
    session.progress()
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("ch0_sampling"))
    assert f"0 of {len(on_path['ch0_sampling'])}" in line


def test_an_opening_is_recorded_where_there_are_no_solutions(names, capsys, monkeypatch, tmp_path):
    (tmp_path / "ch0_sampling_opening.txt").write_text("Before:\n  short\n", encoding="utf-8")
    monkeypatch.setattr(session, "RESULTS", tmp_path)
    monkeypatch.setattr(session, "has_reference", lambda chapter: False)
    monkeypatch.setitem(globals(), "CHAPTER", "ch0_sampling")
    session.preview()
    assert "Before:\n  short" in capsys.readouterr().out


@pytest.mark.parametrize("chapter", WRITTEN)
def test_a_chapter_opens_with_its_finished_thing(chapter):
    """Within its first ten cells, and what it printed is kept for bundles."""
    cells = read(SOLUTIONS / f"{chapter}.ipynb").cells[:10]
    opening = [cell for cell in cells if "opening" in cell.metadata.get("tags", [])]
    assert len(opening) == 1
    recorded = (notebooks.RESULTS / f"{chapter}_opening.txt").read_text(encoding="utf-8")
    assert recorded == "".join(output["text"] for output in opening[0].outputs)
    assert len(recorded.splitlines()) <= 40  # one screen
