"""Checks: probes that exercise a student's code and return what they observed, never a verdict.

    @check("compute_advantages", points=2, seeds=3, expected=advantages_by_double_sum)
    def random_rollouts(student, rng):
        \"\"\"Ragged random rollouts.\"\"\"
        return student.compute_advantages(*inputs.rollouts(rng), gamma=0.9, lam=0.8)

A probe runs on the student's code, and with the same seed on the reference; `utils.grading.judging`
compares. It is the check's name, and its docstring the line that a student reads.
"""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from utils.chapters import sort_chapters


class Rng:
    """Random inputs: the same numbers for the student and for the reference, in each of its dtypes.

    Floats are drawn in float32 and then cast, so that a run in float64 sees the same inputs.
    """

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32):
        self.seed, self.dtype = seed, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        draws = torch.randn(shape, generator=self.generator, dtype=torch.float32)
        return (draws * std + mean).to(self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        draws = torch.rand(shape, generator=self.generator, dtype=torch.float32)
        return (draws * (high - low) + low).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw uniformly in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator)

    def integer(self, low: int, high: int) -> int:
        return int(self.integers(low, high, 1))

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator)

    def tensor(self, values: list) -> Tensor:
        """Return numbers worked by hand, in the dtype of this run."""
        return torch.tensor(values, dtype=self.dtype)

    def new_generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.integer(0, 2**31))


@dataclass(frozen=True, eq=False)
class Check:
    """One probe of one exercise, and how what it observes is judged."""

    exercise: str  # a name of the chapter's solutions, dotted for a method ("RLHFTrainer.train")
    probe: Callable[[Any, Rng], Any]
    points: float = 1  # what it is worth beside the others of its tier (`utils.grading.points`)
    seeds: int = 1  # how many times it runs, each with other inputs
    # "core" for the idea, "hardening" for what a library needs besides, such as NaN behind masks,
    # dtypes, error messages and extreme numbers.
    tier: Literal["core", "hardening"] = "core"
    public: bool = False  # a student's bundle keeps it, and its failures show values
    slow: bool = False  # it is not run in a notebook unless asked for
    # An independent oracle. A callable stands in for the exercise and the probe runs on it;
    # anything else is the observation itself, worked by hand.
    expected: Any = None
    # A predicate `(observed, reference) -> None or what is wrong` on the observation, given the
    # reference's for the inputs that it carries. Nothing else is then compared but structure.
    holds: Callable[[Any, Any], str | None] | None = None
    # |difference| <= atol + rtol |expected| + 10 |reference in float32 - in float64|.
    rtol: float = 1e-4
    atol: float = 1e-6
    # It earns its points only beside another check of the exercise that passes, as numbers worked
    # by hand do: an answer could meet it without the work.
    beside: bool = False
    # The reference and the oracle run in float64 too. Without, where a model makes that costly,
    # rtol and atol alone are the tolerance and the oracle replaces the reference.
    float64: bool = True

    @property
    def name(self) -> str:
        return self.probe.__name__

    @property
    def title(self) -> str:
        """Return the first line of the docstring, without its full stop."""
        return (self.probe.__doc__ or self.name).strip().splitlines()[0].rstrip(".")

    @property
    def source(self) -> str:
        """Return the lines of the probe below its docstring."""
        source = inspect.getsource(self.probe)
        (function,) = ast.parse(source).body
        assert isinstance(function, ast.FunctionDef)
        first = function.body[1]  # after the docstring
        return textwrap.dedent("\n".join(source.splitlines()[first.lineno - 1 :]))

    @property
    def is_worked(self) -> bool:
        """Return whether inputs and result are the same at every run: numbers worked by hand."""
        return self.expected is not None and not callable(self.expected)

    @property
    def earns_alone(self) -> bool:
        return not (self.is_worked or self.beside)

    @property
    def is_core(self) -> bool:
        return self.tier == "core"

    @property
    def chapter(self) -> str:
        """Return the chapter: `tests.checks.ch0_sampling` checks `ch0_sampling`."""
        return self.probe.__module__.rpartition(".")[2]

    @property
    def path(self) -> str:
        return f"{self.chapter}::{self.exercise}::{self.name}"

    def seed(self, index: int, secret: str = "") -> int:
        """Return the seed of the run with this index; unpredictable where `secret` is."""
        digest = hashlib.sha256(f"{secret}|{self.path}|{index}".encode()).digest()
        return int.from_bytes(digest[:7], "big")


def check(exercise: str, **options: Any) -> Callable[[Callable[[Any, Rng], Any]], Check]:
    """Make a check of a probe; `options` are the fields of `Check`."""

    def decorate(probe: Callable[[Any, Rng], Any]) -> Check:
        return Check(exercise, probe, **options)

    return decorate


# --- Where things are ---------------------------------------------------------------------------


@cache
def get_chapters() -> tuple[str, ...]:
    """Return the chapters that have checks, in order."""
    found = pkgutil.iter_modules(importlib.import_module("tests.checks").__path__)
    return tuple(sort_chapters(module.name for module in found))


def get_reference(chapter: str) -> ModuleType:
    """Return the reference solutions of a chapter."""
    return importlib.import_module(f"solutions.{chapter}")


@cache
def has_reference(chapter: str) -> bool:
    """Return whether there is a reference: not so in a student's bundle of the chapter."""
    return importlib.util.find_spec(f"solutions.{chapter}") is not None


@cache
def get_checks(chapter: str) -> dict[str, tuple[Check, ...]]:
    """Return the checks of a chapter by exercise, in the order in which they are written."""
    module = importlib.import_module(f"tests.checks.{chapter}")
    by_exercise: dict[str, list[Check]] = {}
    for found in vars(module).values():
        if isinstance(found, Check):
            by_exercise.setdefault(found.exercise, []).append(found)
    return {exercise: tuple(checks) for exercise, checks in by_exercise.items()}


def get_top_names() -> dict[str, set[str]]:
    """Return by chapter the functions and classes that hold its exercises."""
    return {
        chapter: {e.partition(".")[0] for e in get_checks(chapter)} for chapter in get_chapters()
    }


def boot_models() -> None:
    """Boot the small models of the checks that are imported, in half a second: otherwise the first
    check that uses one waits for it. Not in a bundle, whose public checks use few of them."""
    if boot := getattr(sys.modules.get("tests.support.models"), "boot_small_ones", None):
        boot()


def find_chapter(exercise: str) -> str:
    """Return the chapter of an exercise. Raises ValueError, with the names that there are."""
    for chapter in get_chapters():
        if exercise in get_checks(chapter):
            return chapter
    names = [name for chapter in get_chapters() for name in get_checks(chapter)]
    close = difflib.get_close_matches(exercise, names, n=3, cutoff=0.4) or names
    raise ValueError(f"the exercise should be one of {close}, but is {exercise!r}")
