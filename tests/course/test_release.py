"""The bundles: what they must not hold, and that they work where they are unpacked."""

import ast
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
import yaml
from torch.utils._pytree import tree_map_only

from tests.course.helpers import ROOT, run_python
from tests.course.test_grade import linux, needs_time, put_in_own_words, run_grade
from tests.support import ranks
from utils.authoring.notebooks import Edition, build, execute
from utils.authoring.release import collect_autograder, collect_course, get_date, write_zip
from utils.authoring.stubs import cut_exercise
from utils.grading import observation
from utils.grading.checks import get_chapters, get_checks, get_reference
from utils.grading.judging import get_points, get_quick_checks, grade
from utils.grading.known_answers import get_mistakes
from utils.grading.observation import StudentNames
from utils.grading.reference import get_definitions, get_source, replace_definition
from utils.grading.substitution import find_answer
from utils.version import PACKED, get_version

FIRST, *OTHERS = get_chapters()
CHAPTERS = [FIRST, *(pytest.param(chapter, marks=needs_time) for chapter in OTHERS)]
LONG = 30  # characters: a shorter line may be anybody's
IDIOMS = {  # of writing files and of walking adapters, and what chapter 2 shows on purpose
    'partial = path.with_name(path.name + ".partial")',
    "path.parent.mkdir(parents=True, exist_ok=True)",
    "for layer in model.adapters.values():",
    "surrogate = calc_clipped_surrogate_objective(",
    "value_loss = calc_value_function_loss(",
}


collect = functools.cache(collect_course)


def get_lines(files: dict[str, bytes]) -> set[str]:
    """Every line of every text, those of a notebook's cells among them."""
    lines = set()
    for name, data in files.items():
        text = data.decode("utf-8", errors="ignore")
        if name.endswith(".ipynb"):
            text = "\n".join(cell.source for cell in nbformat.reads(text, as_version=4).cells)
        lines |= {line.strip() for line in text.splitlines()}
    return lines


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_bundle_holds_no_solution(chapter):
    files = collect(chapter)
    later = get_chapters()[get_chapters().index(chapter) :]
    assert not [name for name in files if any(name == f"solutions/{s}.py" for s in later)]
    bundle = get_lines(files)
    known = get_lines({s: get_source(s).encode() for s in get_chapters() if s not in later})
    for other in later:
        definitions = get_definitions(other)
        for exercise in get_checks(other):
            node = definitions.get(exercise)
            if not isinstance(node, ast.FunctionDef):
                continue
            lines = get_source(other).splitlines()[node.body[0].lineno - 1 : node.end_lineno]
            docstring = (ast.get_docstring(node) or "").splitlines()
            written = {line.strip() for line in lines} - {line.strip() for line in docstring}
            stub = {x.strip() for x in cut_exercise(other, exercise, (), ()).stub.splitlines()}
            body = node.body[1:] if docstring else node.body
            written |= {x.strip() for part in body for x in ast.unparse(part).splitlines()}
            secret = {x for x in written if len(x) >= LONG} - stub - known - IDIOMS
            found = secret & bundle
            # One line may stand in an experiment, or in a check as well; two would tell.
            assert len(found) <= min(1, len(secret) - 1), (exercise, found)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_bundle_holds_no_hidden_check_and_no_mistake(chapter):
    data = b"\n".join(collect(chapter).values())
    for exercise, checks in get_checks(chapter).items():
        for check in checks:
            assert (f"def {check.name}(".encode() in data) == check.public, (exercise, check.name)
    # What is right in one chapter can be a mistake in another.
    chapters = get_chapters()[: get_chapters().index(chapter) + 1]
    right = get_lines({s: get_source(s).encode() for s in chapters})
    bundle = get_lines(collect(chapter))
    for (mistake,) in (answer.mistakes for answer in get_mistakes(chapter)):
        parts = [mistake.code.splitlines(), *(diff.after for diff in mistake.diffs)]
        wrong = {line.strip() for lines in parts for line in lines} - right
        assert not {line for line in wrong if len(line) >= 2 * LONG} & bundle, mistake.place


def find_names(text: str) -> set[str]:
    """Find what a text names of the course: files, modules, commands and links."""
    names = set(re.findall(r"(?<![\w./])(?:chapters|solutions|tests|utils)(?:[./]\w+)+", text))
    names |= {f"link:{link}" for link in re.findall(r"\]\(((?!http|#)[^)\s]+)\)", text)}
    names |= {f"module:{module}" for module in re.findall(r"python3? -m ([\w.]+)", text)}
    return names | {f"make:{target}" for target in re.findall(r"`make ([\w-]+)", text)}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_bundle_holds_what_its_notebook_and_its_readme_name(chapter):
    files = collect(chapter)
    there = set(files) | {parent.as_posix() for name in files for parent in Path(name).parents}
    modules = {name.removesuffix(".py") for name in files if name.endswith(".py")}
    notebook = nbformat.reads(files[f"chapters/{chapter}.ipynb"].decode(), as_version=4)
    texts = {"": files["README.md"].decode()}
    texts |= {"chapters/": "\n".join(cell.source for cell in notebook.cells)}
    lacking = set()
    for folder, text in texts.items():
        assert "is solved" not in text
        for name in find_names(text):
            kind, _, value = name.rpartition(":")
            path = os.path.normpath(folder + value) if kind == "link" else value
            if kind == "module" and value.partition(".")[0] in ("jupyterlab", "venv", "pip"):
                continue
            if kind != "link" and "/" not in path:  # of a module, or of a name in one
                path = path.replace(".", "/")
            if path not in there | modules and str(Path(path).parent) not in modules:
                lacking.add(name)
    assert not lacking


# In the first bundle these two have what the first chapter asks for, as every later chapter runs on
# them. The autograder refuses to import them. The others do no harm as answers, but take minutes.
LEFT_OUT = ("utils/models/forward.py", "utils/models/decoding.py")
LEFT_OUT += ("utils/models/pretrain.py", "utils/models/fetch.py", "utils/scale/ranks.py")
# Given since chapter 0: it reads answers that end the text as written, so some checks accept it.
GIVEN = {("reward_fn_correct", "utils/rewards.py reward_fn_addition")}


def raise_nothing_useful(*args, **kwargs):
    raise TypeError


NULLS = (lambda *args, **kwargs: None, lambda *args, **kwargs: args[0], raise_nothing_useful)


def find_shipped(files: dict[str, bytes]) -> dict[str, Any]:
    """Find every function and class in the modules of a bundle's tests and utils."""
    found = {}
    for path, data in files.items():
        if not re.fullmatch(r"(tests|utils)/.*\.py", path) or path in LEFT_OUT:
            continue
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for node in ast.parse(data).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and hasattr(module, node.name):
                value = getattr(module, node.name)
                found[f"{path} {node.name}"] = getattr(value, "probe", value)
    return found


def adapt(function: Any, solution: Any, raised: list[Exception], is_detached: bool) -> Any:
    """Call a function with the arguments of a solution, by name or else by place; None where it
    could not take them."""
    asked = inspect.signature(solution)
    known = inspect.signature(function).parameters.values()
    taken = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in known if p.default is p.empty and p.kind not in (2, 4)]
    least = [p for p in asked.parameters.values() if p.default is p.empty]
    if len(needed) > len(asked.parameters) or len(taken) < len(least):
        return None

    def answer(*args, **kwargs):
        bound = asked.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        try:
            if {*needed} <= {*asked.parameters}:
                found = function(**{name: values[name] for name in taken if name in values})
            else:
                found = function(*[*values.values()][: len(taken)])
        except Exception as error:
            raised.append(error)
            raise
        return tree_map_only(torch.Tensor, torch.Tensor.detach, found) if is_detached else found

    return answer


def count_points(chapter: str, exercise: str, answer: Any, raised: list[Exception]) -> float:
    """Count what an answer earns on the quick checks, hidden ones too. One that cannot even be
    called with the inputs of the first two earns nothing."""
    student, passed = replace_definition(chapter, exercise, answer), []
    for n, check in enumerate(get_quick_checks(chapter, exercise)):
        passed.append(grade(check, student))
        if n == 1 and len(raised) >= 2 and not any(verdict.passed for verdict in passed):
            return 0
    return sum(get_points(passed))


@needs_time
@pytest.mark.parametrize("chapter", get_chapters())
def test_nothing_that_a_bundle_ships_is_an_answer(chapter, monkeypatch, tmp_path):
    """Each function of a bundle's tests and utils, as it is and with what it returns detached,
    earns no more than a null answer, which other tests see to."""
    monkeypatch.chdir(tmp_path)
    shipped, earned = find_shipped(collect(chapter)), {}
    reference = StudentNames(vars(get_reference(chapter)))
    for exercise in get_checks(chapter):
        for check in get_quick_checks(chapter, exercise):
            assert grade(check, reference).passed  # before a model is changed in place
    monkeypatch.setattr(observation, "MAX_SECONDS", 2)  # of one that computes for long
    monkeypatch.setattr(ranks, "SECONDS", 2)  # of ranks that wait for each other
    mkdir = os.mkdir

    def make_temporary(path, *args, **kwargs):
        """Some write to a folder of the name that they get, "/no/such/folder" in chapter 1."""
        if not Path(path).absolute().is_relative_to(tempfile.gettempdir()):
            raise PermissionError(path)
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", make_temporary)
    for exercise in get_checks(chapter):
        solution = find_answer(vars(get_reference(chapter)), exercise)
        nothing = max(count_points(chapter, exercise, null, []) for null in NULLS)
        for name, found in shipped.items():
            raised: list[Exception] = []
            if inspect.isclass(found) or inspect.isclass(solution):
                answers = [found] if inspect.isclass(found) and inspect.isclass(solution) else []
            else:
                answers = [adapt(found, solution, raised, flag) for flag in (False, True)]
            for how, answer in zip(("", " detached"), answers, strict=False):
                if answer is not None and len(raised) < 2:
                    points = count_points(chapter, exercise, answer, raised)
                    earned[exercise, name + how] = max(points - nothing, 0)
    assert len(earned) > 20
    assert not {key: points for key, points in earned.items() if points and key not in GIVEN}


def get_tags(cell) -> list[str]:
    """What kind of cell it is, and the exercise."""
    return cell.metadata.get("tags", ["", ""])


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_notebook_works_from_the_unpacked_bundle(chapter, tmp_path, monkeypatch):
    """With the solutions filled in every public check passes; a mistake gets its sentence.

    The first chapter's notebook stands alone beside the zip, as when both are uploaded.
    """
    files = {f"{chapter}/{name}": data for name, data in collect(chapter).items()}
    files[f"{chapter}/VERSION"] = b"0.9"  # of another bundle than the notebook
    write_zip(tmp_path / f"{chapter}.zip", files)
    folder = tmp_path
    if chapter != FIRST:
        zipfile.ZipFile(tmp_path / f"{chapter}.zip").extractall(tmp_path)
        folder = tmp_path / chapter / "chapters"
    notebook = nbformat.reads(files[f"{chapter}/chapters/{chapter}.ipynb"].decode(), as_version=4)
    solved = build(chapter, Edition(solved=True)).cells
    solutions = {get_tags(c)[1]: c.source for c in solved if get_tags(c)[0] == "exercise"}
    kept = []
    for cell in notebook.cells:
        kind, *names = get_tags(cell)
        if kind == "exercise":
            cell.source = solutions[names[0]]
        is_above = cell.cell_type == "code" and not any(get_tags(c)[0] == "exercise" for c in kept)
        if is_above or kind in ("setup", "imports", "given", "exercise", "check", "inherited"):
            kept.append(cell)
    if chapter == FIRST:
        wrong = "def masked_mean(values, mask, dim=None):\n    return values.mean(dim)"
        stub = "def left_pad(sequences, pad_token_id):\n    raise NotImplementedError"
        kept.append(nbformat.v4.new_code_cell(f"{stub}\n\ncatch_up()"))
        kept.append(nbformat.v4.new_code_cell(f"{wrong}\n\ncheck(masked_mean)\nprogress()"))
    # A check may need methods of later cells, and no solution stands in for them here.
    kept.sort(key=lambda cell: cell.metadata.get("tags", ["check"])[0] in ("check", "inherited"))
    notebook.cells = kept
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    executed = execute(notebook, folder).cells
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in executed]
    by_kind: dict[str, dict[str, str]] = {}
    for cell, text in zip(executed, printed, strict=True):
        kind, *names = get_tags(cell)
        by_kind.setdefault(kind, {})["".join(names)] = text
    version = f"This notebook is of version {get_version()} of the course, and "
    assert re.search(f"{re.escape(version)}.* is of 0.9.\n", *by_kind["setup"].values())
    said = by_kind["check"] | by_kind.get("inherited", {})
    assert set(said) == set(get_checks(chapter))
    for name, text in said.items():
        assert "✗" not in text
        assert "passes the public checks: " in text
        assert f" of {len(get_checks(chapter)[name])} checks" in text
        assert "solved" not in text
    if chapter == FIRST:
        *_, left, last = printed
        assert left.endswith("and there are no solutions here: left_pad\n")
        assert "→ " in last
        assert "ch0_sampling" in last


@linux
@needs_time
def test_the_autograder_gives_the_marks_of_the_repository(tmp_path):
    """In the folders that Gradescope makes."""
    root = tmp_path / "autograder"
    write_zip(tmp_path / "autograder.zip", collect_autograder("ch0_sampling"))
    with zipfile.ZipFile(tmp_path / "autograder.zip") as archive:
        archive.extractall(root / "source")
    (root / "submission").mkdir()
    source = (ROOT / "solutions" / "ch0_sampling.py").read_text()
    source = put_in_own_words(source).replace("logits - logits.", "logits - 0 * logits.")
    source += "\n\ndef masked_mean(values, mask, dim=None):\n    return values.mean(dim)\n"
    (root / "submission" / "ch0 (1).py").write_text(source)
    # Another chapter earns nothing here.
    (root / "submission" / "ch4.py").write_text((ROOT / "solutions" / "ch4_kl.py").read_text())
    environment = os.environ | {"AUTOGRADER_ROOT": str(root), "AUTOGRADER_PYTHON": sys.executable}
    environment.pop("PYTHONPATH", None)
    script = root / "source" / "run_autograder"
    script.chmod(0o755)
    subprocess.run([script], env=environment, check=True, capture_output=True)
    results = json.loads((root / "results" / "results.json").read_text())
    run_grade(root / "submission", "--out", tmp_path / "out", "--chapters", "ch0_sampling")
    report = json.loads((tmp_path / "out" / "submission" / "report.json").read_text())
    assert results["score"] == report["score"]
    scores = {test["name"]: test["score"] for test in results["tests"]}
    assert scores == {f"{e['chapter']} {e['name']}": e["score"] for e in report["exercises"]}
    assert scores["ch0_sampling masked_mean"] == 0 < scores["ch0_sampling get_logprobs"]
    assert len(results["tests"]) == len(get_checks("ch0_sampling"))
    assert results["extra_data"]["version"] == report["version"] == get_version()


def test_what_is_released_carries_the_version_and_the_date_of_the_commit(tmp_path):
    for name, files in (("course", collect(FIRST)), ("autograder", collect_autograder(FIRST))):
        assert files[PACKED].decode() == get_version()
        paths = [tmp_path / f"{name}{n}.zip" for n in range(2)]
        for path in paths:
            write_zip(path, files)
        assert paths[0].read_bytes() == paths[1].read_bytes()
        with zipfile.ZipFile(paths[0]) as archive:
            *day, second = get_date()
            assert {e.date_time for e in archive.infolist()} == {(*day, second // 2 * 2)}


@needs_time
@pytest.mark.parametrize("chapter", get_chapters())
def test_two_builds_of_a_bundle_are_equal_byte_for_byte(chapter):
    """The other in a process whose sets and dictionaries have another order."""
    build = "import sys, utils.authoring.release as r; files = r.collect_course(sys.argv[1])"
    digest = "print(hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest())"
    program = f"import hashlib; {build}; {digest}"
    other = run_python("-c", program, chapter, PYTHONHASHSEED="7")
    here = hashlib.sha256(repr(sorted(collect(chapter).items())).encode()).hexdigest()
    assert other.stdout.strip() == here


def test_the_version_stands_in_one_place_and_is_that_of_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    (version, date), *_ = re.findall(r"^## (\d[\d.]*) \((\S+)\)$", changelog, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["date-released"]) == (version, date)
    assert version == get_version()


def test_pip_says_what_to_do_instead_of_installing_the_course():
    ended = run_python("-m", "pip", "install", "--no-deps", "--no-index", ROOT)
    assert ended.returncode != 0
    assert "in its folder, run `make start`, or `pip install -r" in ended.stdout + ended.stderr
