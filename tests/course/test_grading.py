"""The engine of the checks: what it compares and says, and that it finds what it should."""

import inspect
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch

from tests.course.helpers import ROOT, read_page, run_python
from tests.support import models
from utils.course import checking
from utils.course.checking import run_and_print
from utils.grading.catalogue import find_definitions
from utils.grading.checks import get_chapters, get_checks, get_reference
from utils.grading.comparison import calc_gap, find_mismatch
from utils.grading.observation import NotDefined, Raised, StudentNames, observe, to_plain
from utils.grading.pytest_plugin import load_submission
from utils.grading.reference import get_chapter_source
from utils.grading.substitution import answer_with, build_module, find_answer
from utils.models import loading

CHAPTERS = get_chapters()


# --- Comparison ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_colour(monkeypatch):
    """Whether text is painted depends on what other tests of this process have imported."""
    monkeypatch.setenv("NO_COLOR", "1")


def check_in_notebook(answer, slow=False):
    """Check an exercise as a notebook does, with the names of this module's caller."""
    run_and_print(answer, inspect.currentframe().f_back.f_globals, slow)


@pytest.mark.parametrize(
    ("yours", "expected", "said"),
    [
        (1.0, torch.tensor(1.0), "is a float, where a tensor is expected"),
        (None, torch.tensor(1.0), "is None"),
        (torch.ones(2, 1), torch.ones(2), r"has shape \[2, 1\], where \[2\]"),
        (torch.ones(2).double(), torch.ones(2), "torch.float64, where torch.float32"),
        (torch.ones(2), torch.ones(2).long(), "torch.float32, where torch.int64"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), r"at \[1\].*1 of 2"),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), r"is nan at \[1\]"),
        (torch.tensor([torch.inf]), torch.ones(1), "is inf"),
        (torch.ones(1), torch.tensor([torch.inf]), "is wrong"),
        (torch.tensor([-torch.inf]), torch.tensor([torch.inf]), "is -inf|is wrong"),
        (3.0, math.inf, "is wrong"),
        ([torch.ones(1)], [torch.ones(1)] * 2, "has 1 entries, where 2"),
        ({"a": 1}, {"b": 1}, "lacks b"),
        ({"a": 1, "b": 1}, {"b": 1}, "has more parts than are expected"),
        (True, 1, "a bool, where an int"),
        ("x", "y", "is wrong"),
        (Raised("KeyError", "secret"), torch.ones(1), "raised KeyError$"),
        ({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, r"^the result \(a\)\[0\] \(b\) is wrong"),
        (
            {"k2, shape (2,)": {"gradients": {"the result": 1.0, "the gradient for x": 3.0}}},
            {"k2, shape (2,)": {"gradients": {"the result": 1.0, "the gradient for x": 2.0}}},
            r"^the gradient for x \(k2, shape \(2,\), gradients\) is wrong",
        ),
    ],
)
def test_mismatches_are_found_and_named(yours, expected, said):
    mismatch = find_mismatch(yours, expected)
    assert mismatch is not None
    assert re.search(said, mismatch.message)


@pytest.mark.parametrize(
    ("yours", "expected"),
    [
        *((x, x) for x in (torch.tensor([1.0, torch.nan, torch.inf]), [torch.ones(2), {"a": 2.0}])),
        *((x, x) for x in (3, "x", None, math.nan, math.inf)),
        (torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int64)),
    ],
)
def test_what_is_equal_is_no_mismatch(yours, expected):
    assert find_mismatch(yours, expected) is None


def test_the_gap_between_float32_and_float64_widens_the_tolerance():
    a, b = torch.tensor([1.0]), torch.tensor([1.01])
    gap = calc_gap(torch.tensor([1.0]), torch.tensor([1.002], dtype=torch.double))
    assert find_mismatch(a, b) is not None
    assert find_mismatch(a, b, gap) is None
    assert find_mismatch(a, torch.tensor([1.03]), gap) is not None


class AlwaysEqual(torch.Tensor):
    def __eq__(self, other):
        return torch.ones(1, dtype=torch.bool)


def test_an_observation_is_plain_and_a_copy():
    x = torch.ones(3, requires_grad=True)
    plain = to_plain({"x": (x, [torch.ones(1).expand(4)])})
    assert type(plain["x"]) is list
    assert not plain["x"][0].requires_grad
    assert plain["x"][1][0].is_contiguous()
    with torch.no_grad():
        x += 1
    assert plain["x"][0].tolist() == [1, 1, 1]
    mismatch = find_mismatch(to_plain(torch.ones(1).as_subclass(AlwaysEqual)), torch.zeros(1))
    assert "a AlwaysEqual, where a tensor" in mismatch.message


# --- Running a probe ----------------------------------------------------------------------------


def test_a_probe_leaves_no_trace():
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    state = torch.get_rng_state()

    def probe(student, rng):
        torch.manual_seed(5)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float16)
        torch.set_num_threads(3)
        print("hello")
        return rng.normal(2)

    observed, printed = observe(probe, StudentNames({}), 3, torch.float32)
    assert printed == "hello\n"
    assert observed.shape == (2,)
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == dtype
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


def test_a_loop_that_does_not_end_is_stopped():
    def probe(student, rng):
        while True:
            rng.normal(3)

    observed, _ = observe(probe, StudentNames({}), 0, torch.float32, seconds=0.2)
    assert observed.kind == "TimeoutError"
    assert "does a loop not end" in observed.message
    assert observe(lambda *_: np.float64(2.5), StudentNames({}), 0, torch.float32)[0] == 2.5


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), SystemExit(0), NotDefined("f"), GeneratorExit(), Unspeakable()],
)
def test_what_student_code_raises_is_an_observation(error):
    def probe(student, rng):
        raise error

    observed, _ = observe(probe, StudentNames({}), 0, torch.float32)
    assert observed.kind == type(error).__name__


def test_seeds_depend_on_the_secret_the_check_and_the_index():
    first, second = get_checks("ch0_sampling")["get_logprobs"][:2]
    seeds = [first.seed(0), first.seed(1), first.seed(0, "secret"), second.seed(0)]
    assert len(set(seeds)) == 4
    assert first.seed(0) == seeds[0]


# --- What a student sees ------------------------------------------------------------------------


def masked_mean(values, mask, dim=None):
    return (values * mask).sum(dim) / mask.sum(dim).clamp(min=1)


def test_the_notebook_names_the_mistake_and_shows_values_of_public_checks_only(capsys):
    check_in_notebook(masked_mean)
    said = capsys.readouterr().out
    assert "masked_mean: 0.667 of 6 points\n" in said
    assert "yours     nan\n" in said  # of the public check
    assert "expected  2.5" in said
    assert said.count("expected ") == 1
    assert "→ Multiplying by the mask leaves nan" in said
    assert said in read_page("README.md")


def test_the_notebook_on_a_stub_and_on_no_exercise(capsys):
    def calc_entropy(logits):
        raise NotImplementedError

    calc_entropy.__qualname__ = "calc_entropy"
    check_in_notebook(calc_entropy)
    assert capsys.readouterr().out == (
        "calc_entropy: not written yet: its cell still holds the stub\n"
    )
    with pytest.raises(ValueError, match="should be one of"):
        check_in_notebook(len)


def build_with(chapter, *changes):
    """A chapter's names with changes of its source, each what is right and what stands instead."""
    source = get_chapter_source(chapter).source
    for right, mistaken in changes:
        assert source.count(right) == 1
        source = source.replace(right, mistaken)
    return vars(build_module(chapter, source))


OTHERS = {  # what is written instead, or what is not written
    "get_samples": ("ch0_sampling", ("[0] * (seq", "[1] * (seq"), "left_pad fails here"),
    "RLHFTrainer.rollout_phase": (
        "ch2_ppo",
        ('rearrange(values, "batch seq 1 -> batch seq")', "values"),
        "TransformerWithValueHeadLora.forward_with_value_head fails here",
    ),
    "TransformerWithLora.load_adapter": (  # as when its cell comes first
        "ch1_lora",
        ["TransformerWithLora.reference", "TransformerWithLora.save_adapter"],
        "TransformerWithLora.reference and TransformerWithLora.save_adapter are not written yet",
    ),
    "measure_loss_and_gradient_at_start": (  # chapter 2's RLHFTrainer has one to inherit
        "ch3_grpo",
        ["GrpoTrainer.rollout_phase"],
        "GrpoTrainer.rollout_phase is not written yet",
    ),
}


@pytest.mark.parametrize("exercise", OTHERS)
def test_the_notebook_names_others_that_fail_or_are_not_written_and_leaves_them(exercise, capsys):
    chapter, change, said = OTHERS[exercise]
    if isinstance(change, tuple):
        names = build_with(chapter, change)
    else:
        names = get_chapter_source(chapter).without(*change).build()
    classes = [x for x in names.values() if isinstance(x, type)]
    before = dict(names), [dict(vars(x)) for x in classes]
    run_and_print(find_answer(names, exercise), names)
    printed = capsys.readouterr().out
    assert f"because your {said}." in printed
    assert "✗" not in printed
    assert (dict(names), [dict(vars(x)) for x in classes]) == before


def test_a_mistake_is_named_though_another_exercise_is_wrong_too(capsys):
    terms = "surrogate - args.vf_coef * value_loss + args.ent_coef * entropy - args.kl_coef * kl"
    names = build_with(
        "ch2_ppo",
        (f"return {terms}", f"return -({terms})"),
        ("errors = (values - returns).square()", "errors = 2 * (values - returns).square()"),
    )
    run_and_print(names["RLHFTrainer"].compute_rlhf_objective, names)
    said = capsys.readouterr().out
    assert "With your own it fails too, in another way." in said
    assert "The sign is that of a loss" in said


def list_stand_ins(chapter):
    """The source, and what is left out of it: each exercise alone, or everything."""
    source = get_chapter_source(chapter)
    tops = {name.partition(".")[0] for name in source.exercises}
    return source, [*((name,) for name in source.exercises), (*tops, *source.exercises)]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_stand_in_does_not_depend_on_the_order_of_what_is_left_out(chapter):
    source, left_out = list_stand_ins(chapter)
    for names in left_out:
        stand_in = source.without(*names)
        compile(stand_in.source, chapter, "exec")
        assert source.without(*reversed(names)) == stand_in
        assert not find_definitions(stand_in.source).keys() & {*names}


COMPILE = """
import json, sys
from utils.grading.substitution import ChapterSource
for made, left_out in json.load(sys.stdin):
    for names in left_out:
        compile(ChapterSource(**made).without(*names).source, made["chapter"], "exec")
"""


@pytest.mark.takes_long
def test_every_stand_in_parses_under_every_hash_seed():
    stand_ins = json.dumps(
        [(asdict(source), names) for source, names in map(list_stand_ins, CHAPTERS)]
    )
    for seed in range(32):
        subprocess.run(
            [sys.executable, "-c", COMPILE], input=stand_ins, text=True, check=True, cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
        )  # fmt: skip


def test_without_solutions_a_method_that_another_check_needs_is_said_to_be_missing(
    capsys, monkeypatch
):
    """The check of save_adapter calls load_adapter, whose cell comes later."""
    names = get_chapter_source("ch1_lora").without("TransformerWithLora.load_adapter").build()
    monkeypatch.setattr(checking, "has_reference", lambda chapter: False)
    monkeypatch.setattr(checking, "SEARCH_SECONDS", 0)  # of mistakes, which a bundle has not
    said = "This calls exercises that you haven't written yet"
    run_and_print(names["TransformerWithLora"].save_adapter, names)
    assert f"{said} (TransformerWithLora.load_adapter). " in capsys.readouterr().out
    names["TransformerWithLora"].reference = lambda self: None.merged()
    run_and_print(names["TransformerWithLora"].reference, names)
    assert said not in capsys.readouterr().out


def test_the_notebook_says_that_checks_are_slow(capsys):
    names = vars(get_reference("ch3_grpo")) | {"CHAPTER": "ch3_grpo"}
    run_and_print(names["GrpoTrainer"].train, names)
    assert capsys.readouterr().out == (
        "GrpoTrainer.train: its checks are slow: check(GrpoTrainer.train, slow=True)\n"
    )


# --- Submissions --------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import Tensor
from solutions.ch0_sampling import calc_entropy

eps = 0.0
kept = print("not run")  # the name of a local
1 / 0

def helper(mask):
    return mask.sum().clamp(min=1) + eps

def calc_reinforce_objective(logprobs, advantages, mask):
    kept = torch.where(mask, logprobs * advantages.detach(), 0.0)
    return kept.sum() / helper(mask)

left_pad = lambda sequences, pad_token_id: None
"""


def test_definitions_are_taken_and_nothing_else_runs(tmp_path, capsys):
    path = tmp_path / "answers (1).py"
    path.write_text(SCRIPT)
    submission = load_submission(path)
    assert submission.chapters == ("ch0_sampling",)
    assert capsys.readouterr().out == ""
    assert submission.namespace["eps"] == 0.0
    assert "kept" not in submission.namespace
    source = get_chapter_source("ch0_sampling")
    names = answer_with(source, "masked_mean", submission.namespace)
    with pytest.raises(NotDefined, match="masked_mean is not defined"):
        _ = names.masked_mean


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.py", "x = 1", "should define an exercise"),
        ("a.py", "if 1:\n from solutions.ch0_sampling import left_pad", "defines none"),
        ("a.txt", "", "should be a .py or .ipynb"),
        ("a.ipynb", "{", "should be a notebook"),
        ("missing.py", None, "is not there"),
    ],
)
def test_what_is_no_submission_is_said(tmp_path, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        load_submission(tmp_path / name)


def test_pytest_grades_a_submission_with_the_verdicts_of_the_notebook(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    command = ["-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "-v"]
    command += ["tests/checks/ch0_sampling.py", "tests/checks/ch1_lora.py", "-m", "not slow"]
    command += ["-k", "masked_mean or reinforce or left_pad", "--submission", str(path)]
    result = run_python(*command)
    namespace = load_submission(path).namespace
    for exercise in ("calc_reinforce_objective", "left_pad"):
        exec(
            "check(answer)", namespace | {"check": check_in_notebook, "answer": namespace[exercise]}
        )
        marks = re.findall("^  ([✓✗])", capsys.readouterr().out, re.MULTILINE)
        for check_, mark in zip(get_checks("ch0_sampling")[exercise], marks, strict=True):
            word = "PASSED" if mark == "✓" else "FAILED"
            assert f"::{exercise}::{check_.name} {word}" in result.stdout
    assert "the product is nan" in result.stdout  # the mistake's sentence
    assert "masked_mean is not defined" in result.stdout
    assert "ch1" not in result.stdout
    assert "ch0_sampling  calc_reinforce_objective" in result.stdout


@pytest.mark.parametrize("kind", [kind for kind in models.N_LAYERS if kind != "deep"])
def test_the_models_of_the_checks_are_copies_that_share_nothing(kind):
    folder = models.get_checkpoint(kind)
    booted = loading._boot(str(folder), "cpu", torch.float32)
    one, other = (loading.load_base_model(folder, device="cpu") for _ in range(2))
    parts = [{*map(id, [*m.modules(), *m.parameters(), *m.buffers()])} for m in (one, other)]
    assert parts[0].isdisjoint(parts[1])
    ids, fired = torch.tensor([[5, 7, 9]]), []
    point = one.hook_dict["blocks.0.attn.o.hook_out"]
    point.add_hook(lambda value, hook: fired.append(hook) or value + 1)
    for parameter in one.parameters():
        parameter.data += 1
    torch.testing.assert_close(other(ids, return_type="logits"), booted(ids, return_type="logits"))
    assert not fired
    one(ids, return_type="logits")
    assert fired == [point]
