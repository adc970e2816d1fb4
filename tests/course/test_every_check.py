"""What holds of every check of every chapter, whatever it checks.

One process runs the tests of a chapter, which share the observations of its reference.
"""

import ast
import contextlib
import copy
import inspect
import random

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from utils.grading import known_answers, reference
from utils.grading.checks import get_chapters, get_checks, get_reference
from utils.grading.comparison import Mismatch, find_mismatch
from utils.grading.judging import (
    Verdict,
    count_points,
    get_quick_checks,
    grade,
    judge,
    measure_reference_gap,
    observe_reference,
)
from utils.grading.probes import collect_sources
from utils.mutation import mutants

CHAPTERS = get_chapters()
EXERCISES = [(chapter, exercise) for chapter in CHAPTERS for exercise in get_checks(chapter)]
OTHER_SECRET = "another secret"


def list_quick_checks(chapter):
    return [c for exercise in get_checks(chapter) for c in get_quick_checks(chapter, exercise)]


@pytest.mark.parametrize(("chapter", "exercise"), EXERCISES)
def test_every_exercise_has_an_oracle_and_a_public_check(chapter, exercise):
    checks = get_checks(chapter)[exercise]
    assert any(c.expected is not None or c.holds is not None for c in checks)
    assert any(c.public for c in checks)
    assert all(c.probe.__doc__ for c in checks), "a student reads the docstring's first line"
    assert sum(c.points for c in checks if not c.slow) > 0 or all(c.slow for c in checks)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_course_bundle_catches_typical_mistakes(chapter):
    """Only a quick public check does, as a bundle has no others."""
    public = {(c.exercise, c.name) for c in list_quick_checks(chapter) if c.public}
    mistakes = known_answers.get_mistakes(chapter)
    caught = [m for m in mistakes if (m.exercise, m.mistakes[0].rejected_by) in public]
    assert len(caught) > len(mistakes) / 3


# --- The reference ------------------------------------------------------------------------------


@pytest.mark.takes_long
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_reference_passes_with_another_secret(chapter):
    for check in list_quick_checks(chapter):
        for index in range(check.seeds):
            observed = observe_reference(check, index, OTHER_SECRET)
            assert judge(check, observed, index, OTHER_SECRET) is None, check.path


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_no_tolerance_is_so_wide_that_it_would_hide_a_mistake(chapter):
    """The gap is rounding: a probe whose inputs differ in float64 would accept anything."""
    for checks in get_checks(chapter).values():
        for c in (c for c in checks if c.holds is None and c.float64):
            for index in range(c.seeds):
                gaps = tree_leaves(measure_reference_gap(c, index))
                for gap, part in zip(gaps, tree_leaves(observe_reference(c, index)), strict=True):
                    if isinstance(gap, float | torch.Tensor) and torch.as_tensor(gap).numel():
                        sizes = torch.as_tensor(part).double().nan_to_num(0.0, 0.0, 0.0).abs()
                        assert 10 * torch.as_tensor(gap).max() <= 1e-3 * sizes.max() + 1e-4, c.path


@pytest.mark.takes_long
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_sample_of_the_mutants_is_killed(chapter):
    """`python -m utils.mutation` runs all."""
    accepted = mutants.get_accepted(chapter)
    found = [m for m in mutants.generate(chapter) if m.name not in accepted]
    sample = random.Random(0).sample(found, min(25, len(found)))
    assert [m.name for m in sample if not mutants.is_killed(m)] == []


# --- What cannot be had without an answer -------------------------------------------------------


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_probe_takes_neither_its_oracle_nor_its_chapter(chapter):
    """What is sent to a child names no reference of the chapter, and no oracle as a check does."""
    for checks in get_checks(chapter).values():
        for check in checks:
            sources = collect_sources(check)
            assert check.probe.__module__ in sources
            text = "\n".join(sources.values())
            assert f"def {check.name}(" in text
            assert "@check" not in text
            later = CHAPTERS[CHAPTERS.index(chapter) :]
            assert not [s for s in later if f"solutions.{s}" in text or f"import {s}" in text]
            if callable(check.expected) and "<locals>" not in check.expected.__qualname__:
                assert f"def {check.expected.__name__}(" not in text, check.path


@pytest.mark.takes_long
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_the_answer_to_a_check_cannot_be_prepared(chapter):
    """With another secret every check sees another observation, but for examples worked by hand."""
    constant = [
        check.path
        for check in list_quick_checks(chapter)
        if not check.is_worked
        and find_mismatch(observe_reference(check, 0), observe_reference(check, 0, OTHER_SECRET))
        is None
    ]
    assert constant == []


def fill(number: int):
    def change(value):
        if isinstance(value, torch.Tensor):
            return torch.full_like(value, number)
        return type(value)(number) if isinstance(value, bool | int | float) else value

    return change


def repeat_the_first_row(value):
    has_rows = isinstance(value, torch.Tensor) and value.ndim > 0
    return value[:1].expand_as(value).clone() if has_rows else value


@pytest.mark.parametrize("change", [fill(0), fill(1), repeat_the_first_row], ids=["0", "1", "row"])
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_constants_earn_nothing(chapter, change):
    """Whoever knows what parts an observation has can send some of the right shape."""

    def judge_all(check):
        if check.slow:
            return Mismatch("not run")
        for index in range(check.seeds):
            observed = observe_reference(check, index)
            changed = tree_map(change, observed)
            if repr(changed) == repr(observed):
                return Mismatch("nothing of it is changed")
            if mismatch := judge(check, changed, index):
                return mismatch
        return None

    earning = {
        exercise: [verdict.check.name for verdict in verdicts if verdict.passed]
        for exercise, checks in get_checks(chapter).items()
        if count_points(verdicts := [Verdict(check, (), judge_all(check)) for check in checks])
    }
    assert not earning


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_nan_holds_for_no_predicate(chapter):
    def make_nan(value):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return torch.full_like(value, torch.nan)
        return torch.nan if isinstance(value, float) else value

    for check in (check for check in list_quick_checks(chapter) if check.holds is not None):
        observed = observe_reference(check, 0)
        spoilt = tree_map(make_nan, observed)
        if repr(spoilt) != repr(observed):
            assert judge(check, spoilt, 0), check.path
            assert judge(check, observed, 0) is None, check.path


# --- Null answers --------------------------------------------------------------------------------


@contextlib.contextmanager
def do_nothing(first, *args, **kwargs):
    yield first


def be_a_stub(*args, **kwargs):
    raise NotImplementedError


def refuse(f):
    """An error that names every argument."""

    def refuse_all(*args, **kwargs):
        raise ValueError(" ".join(inspect.signature(f).parameters))

    return refuse_all


def make_noise(x):
    if x.is_floating_point():
        return torch.rand_like(x)
    return x[torch.randperm(len(x))] if x.ndim else x


NULLS = {
    "is a stub": lambda f: be_a_stub,
    "refuses everything": refuse,
    "is a context that does nothing": lambda f: lambda *args, **kwargs: do_nothing(*args),
    "returns True": lambda f: lambda *args, **kwargs: True,
    "returns 0": lambda f: lambda *args, **kwargs: 0,
    "returns None": lambda f: lambda *args, **kwargs: None,
    "returns its first argument": lambda f: lambda *args, **kwargs: args[0],
}
CHANGES = {
    "returns zeros": torch.zeros_like,
    "returns ones": torch.ones_like,
    "returns noise of the right shape": make_noise,
    "returns it detached": torch.Tensor.detach,
}
# Whether the moments of a gradient carry gradient themselves is open.
MAY_BE_DETACHED = {"calc_expected_policy_gradient"}


def map_tensors(f, value):
    """Change every tensor and number that a function returned."""
    if isinstance(value, torch.Tensor):
        return f(value)
    if isinstance(value, float):
        return f(torch.tensor(value)).item()
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(f, item) for item in value)
    fields = getattr(value, "__dict__", {})
    if any(isinstance(field, torch.Tensor) for field in fields.values()):  # samples, or a memory
        changed = copy.copy(value)
        vars(changed).update({name: map_tensors(f, field) for name, field in fields.items()})
        return changed
    return value


def grade_null(chapter, exercise, wrap):
    """Grade what `wrap` makes of the solution by the checks that do not train."""
    name, _, method = exercise.partition(".")
    right = getattr(get_reference(chapter), name)
    right = vars(right)[method] if method else right
    is_of_class = isinstance(right, classmethod)
    wrapped = classmethod(wrap(right.__func__)) if is_of_class else wrap(right)
    student = reference.replace_definition(chapter, exercise, wrapped)
    return [
        Verdict(c, (), Mismatch("not run")) if c.slow else grade(c, student)
        for c in get_checks(chapter)[exercise]
    ]


@pytest.mark.takes_long
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_an_answer_without_a_thought_earns_nothing(chapter):
    earning = {}
    for exercise in get_checks(chapter):
        if exercise not in (definitions := reference.get_definitions(chapter)):
            continue  # inherited, and there is nothing to write
        found = {name: grade_null(chapter, exercise, null) for name, null in NULLS.items()}
        cls, _, method = exercise.partition(".")
        cls = getattr(get_reference(chapter), cls)
        if method and (inherited := getattr(super(cls, cls), method, None)):
            found["inherits"] = grade_null(chapter, exercise, lambda f, given=inherited: given)
        is_function = isinstance(definitions[exercise], ast.FunctionDef)
        for name, change in CHANGES.items() if is_function else ():
            returned = []

            def wrap(f, change=change, returned=returned):
                def keep(tensor):
                    returned.append(tensor)
                    return change(tensor)

                return lambda *args, **kwargs: map_tensors(keep, f(*args, **kwargs))

            verdicts = grade_null(chapter, exercise, wrap)
            if name != "returns it detached":
                found |= {name: verdicts} if returned else {}
            elif any(x.requires_grad for x in returned) and exercise not in MAY_BE_DETACHED:
                assert not all(verdict.passed for verdict in verdicts), exercise
        for name, verdicts in found.items():
            if count_points(verdicts):
                earning[exercise, name] = [v.check.name for v in verdicts if v.passed]
    assert not earning
