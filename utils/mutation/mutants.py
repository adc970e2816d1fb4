"""Automatic mutants of the reference: what the checks let through that nobody thought of.

    python -m utils.mutation [CHAPTER ...]      writes runs/kill_matrix.md

Each definition of a chapter's exercises, and each helper that they call, is changed in one place at
a time: operators, signs, numbers, slices, dropped detach, swapped arguments. Beside them stand null
answers: 0, None, the first argument, detached, noise of the right shape. The checks of the exercise
should kill each one; what survives is listed in `tests/equivalents.toml` with the reason why it is
the same function, or open to the student ("open: ..."), or the run fails.
"""

import argparse
import ast
import contextlib
import copy
import functools
import inspect
import multiprocessing
import os
import random
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

from utils.grading import known_answers
from utils.grading.checks import get_chapters, get_checks, get_reference
from utils.grading.judging import get_quick_checks, grade
from utils.grading.observation import Answers, run_check
from utils.grading.substitution import build_module
from utils.mutation.operators import get_names, mutate

EQUIVALENTS = Path(__file__).parents[2] / "tests" / "equivalents.toml"
MAX_SECONDS = 20  # of processor time, for all checks: a mutant that loops is killed

# What is recorded and shown, unusual tokenizers, and the checking of arguments beyond the contract
# are tested in tests/course instead.
SKIPPED_FUNCTIONS = {
    *("RLHFTrainer._record_samples", "RLHFTrainer.record_ratios", "RlvrTrainer.record_ratios"),
    *("encode_prompts", "get_pad_token_id"),
    *("RLHFArgs.__post_init__", "GrpoArgs.__post_init__", "RlvrArgs.__post_init__"),
}
# Methods that run without being named.
MADE_AND_CALLED = {"__init__", "__post_init__", "train"}


@dataclass(frozen=True)
class Mutant:
    """One change of one definition. `name` is unique in the chapter and has no line number."""

    chapter: str
    within: str
    name: str
    source: str = ""  # of the chapter
    null: str = ""  # or which null answer

    def build(self) -> Answers:
        if self.null:
            return _build_null(self.chapter, self.within, NULLS[self.null])
        return Answers(vars(build_module(self.chapter, self.source)))


# --- Mutants of a chapter -----------------------------------------------------------------------


@functools.cache
def generate(chapter: str, nulls: bool = True) -> tuple[Mutant, ...]:
    """Return all mutants of a chapter: the changes of what its exercises reach, and null
    answers."""
    found: list[Mutant] = []
    for within in reach(chapter):
        node = known_answers.get_definitions(chapter)[within]
        if isinstance(node, ast.FunctionDef):
            found += _mutate_function(chapter, within, node)
    for exercise in get_quick_exercises(chapter) if nulls else ():
        if isinstance(known_answers.get_definitions(chapter)[exercise], ast.FunctionDef):
            names = [(null, f"{exercise}: {null}") for null in _choose_nulls(chapter, exercise)]
            found += [Mutant(chapter, exercise, name, null=null) for null, name in names]
    return tuple(found)


def list_nulls(chapter: str, exercise: str) -> dict[str, Answers]:
    """Return answers to an exercise without a thought in them, those that no mutant is made of
    too: a stub, a refusal, a context that does nothing, the parent's method."""
    name, _, method = exercise.partition(".")
    right = getattr(get_reference(chapter), name)
    chosen = [null for null in NULLS if "return" not in null] + ["returns True"]
    if isinstance(right, type) and not method:
        chosen += ["returns 0", "returns None"]
    else:
        chosen += _choose_nulls(chapter, exercise)
        chosen += ["returns ones"] * ("returns zeros" in chosen)
    found = {null: _build_null(chapter, exercise, NULLS[null]) for null in chosen}
    found.pop("returns it detached", None)  # which may be right, but for its gradient
    if method and method in vars(right) and hasattr(super(right, right), method):
        inherited = getattr(super(right, right), method)
        found["inherits"] = known_answers.replace_definition(chapter, exercise, inherited)
    return found


def _choose_nulls(chapter: str, exercise: str) -> list[str]:
    """Choose those that differ from the reference: no tensor has no zeros of its shape."""
    returned: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        returned.append(x)
        return x

    spy = _build_null(chapter, exercise, lambda f: lambda *a, **k: _map_tensors(keep, f(*a, **k)))
    for check in get_quick_checks(chapter, exercise):
        run_check(check, spy, 0, "")
    chosen = ["returns 0", "returns None", "returns its first argument"]
    if returned:
        chosen += ["returns zeros", "returns noise of the right shape"]
    if any(x.requires_grad for x in returned):
        chosen.append("returns it detached")
    return chosen


def get_quick_exercises(chapter: str) -> list[str]:
    return [exercise for exercise in get_checks(chapter) if not _is_smoke_test(chapter, exercise)]


def _is_smoke_test(chapter: str, name: str) -> bool:
    """Return whether slow checks are all that a definition has: they detect almost nothing."""
    return name in get_checks(chapter) and not get_quick_checks(chapter, name)


@functools.cache
def reach(chapter: str) -> dict[str, tuple[str, ...]]:
    """Return each definition that a chapter's exercises run, and the exercises that reach it."""
    definitions = known_answers.get_definitions(chapter)
    reached: dict[str, list[str]] = {}
    for exercise in get_quick_exercises(chapter):
        waiting = [exercise]
        seen = set()
        while waiting:
            name = waiting.pop()
            if name in seen or name in SKIPPED_FUNCTIONS or _is_smoke_test(chapter, name):
                continue
            seen.add(name)
            if name in get_checks(chapter) and name != exercise and "." not in name:
                continue  # has checks of its own
            reached.setdefault(name, []).append(exercise)
            node = definitions[name]
            if isinstance(node, ast.ClassDef):
                methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
                waiting += [f"{name}.{method}" for method in methods]
                continue
            used = {
                n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
            } - MADE_AND_CALLED
            waiting += [d for d in definitions if d.rpartition(".")[2] in used and "." in d]
            owner = name.rpartition(".")[0]
            waiting += [f"{owner}.{m}" for m in MADE_AND_CALLED if f"{owner}.{m}" in definitions]
            waiting += [d for d in definitions if d in get_names(node) and "." not in d]
    for name, exercises in reached.items():
        owner = name.rpartition(".")[0]
        if name in get_checks(chapter):  # its own exercise's business
            exercises[:] = [name]
        elif owner:  # other methods of the class may depend on it by what it leaves behind
            mine = (e for e in get_quick_exercises(chapter) if e.startswith(f"{owner}."))
            exercises += [e for e in mine if e not in exercises]
    return {name: tuple(exercises) for name, exercises in reached.items()}


def _mutate_function(chapter: str, within: str, function: ast.FunctionDef) -> Iterator[Mutant]:
    for name, changed in mutate(function):
        source = splice(chapter, within, changed)
        if source is not None:
            yield Mutant(chapter, within, f"{within}: {name}", source)


def splice(chapter: str, within: str, changed: ast.FunctionDef) -> str | None:
    """Return the chapter's source with one definition replaced; None if it is the same or no
    program."""
    first, last = known_answers.get_lines(chapter, within)
    lines = known_answers.get_source(chapter).splitlines()
    indent = " " * (len(lines[first]) - len(lines[first].lstrip()))
    text = ast.unparse(ast.fix_missing_locations(changed)).splitlines()
    original = ast.unparse(known_answers.get_definitions(chapter)[within]).splitlines()
    if text == original:
        return None
    try:
        compile("\n".join(text), chapter, "exec")
    except SyntaxError:
        return None
    return "\n".join([*lines[:first], *(indent + line for line in text), *lines[last:]])


# --- Null answers -------------------------------------------------------------------------------


def _map_tensors(f: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f(value)
    if isinstance(value, float):
        return f(torch.tensor(value)).item()
    if isinstance(value, tuple | list):
        return type(value)(_map_tensors(f, item) for item in value)
    if type(value).__name__ in ("Samples", "ReplayMemory"):
        changed = copy.copy(value)
        vars(changed).update({k: _map_tensors(f, v) for k, v in vars(value).items()})
        return changed
    return value


def _noise(x: torch.Tensor) -> torch.Tensor:
    return (
        torch.rand_like(x) if x.is_floating_point() else x[torch.randperm(len(x))] if x.ndim else x
    )


def _refuse(f: Callable) -> Callable:
    """Return a function that raises an error which names every argument of `f`."""
    names = " ".join(inspect.signature(f).parameters)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError(names)

    return refuse


@contextlib.contextmanager
def _do_nothing(*args: Any, **kwargs: Any) -> Iterator[Any]:
    yield args[0]


def _be_a_stub(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError


NULLS: dict[str, Callable[[Callable], Callable]] = {
    "is a stub": lambda f: _be_a_stub,
    "refuses everything": _refuse,
    "is a context that does nothing": lambda f: lambda *args, **kwargs: _do_nothing(*args),
    "returns True": lambda f: lambda *args, **kwargs: True,
    "returns ones": lambda f: lambda *a, **k: _map_tensors(torch.ones_like, f(*a, **k)),
    "returns 0": lambda f: lambda *args, **kwargs: 0,
    "returns None": lambda f: lambda *args, **kwargs: None,
    "returns its first argument": lambda f: lambda *args, **kwargs: args[0],
    "returns zeros": lambda f: lambda *a, **k: _map_tensors(torch.zeros_like, f(*a, **k)),
    "returns noise of the right shape": lambda f: lambda *a, **k: _map_tensors(_noise, f(*a, **k)),
    "returns it detached": lambda f: lambda *a, **k: _map_tensors(torch.Tensor.detach, f(*a, **k)),
}


def _build_null(chapter: str, exercise: str, wrap: Callable[[Callable], Callable]) -> Answers:
    name, _, method = exercise.partition(".")
    right = getattr(get_reference(chapter), name)
    right = vars(right)[method] if method else right
    if isinstance(right, classmethod):
        return known_answers.replace_definition(
            chapter, exercise, classmethod(wrap(right.__func__))
        )
    return known_answers.replace_definition(chapter, exercise, wrap(right))


# --- Running them -------------------------------------------------------------------------------


class _TookTooLong(KeyboardInterrupt):
    """Past the engine, which takes every other exception for an observation."""


def kill(mutant: Mutant) -> str | None:
    """Return the path of the check that rejects a mutant, or None if all accept it."""
    exercises = reach(mutant.chapter)[mutant.within]
    checks = [
        check for exercise in exercises for check in get_quick_checks(mutant.chapter, exercise)
    ]

    def stop(*_):
        raise _TookTooLong

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        student = mutant.build()
    except Exception:  # no module at all
        signal.setitimer(signal.ITIMER_PROF, 0)
        return "it does not import"
    check = checks[0]
    try:
        for check in checks:
            if not grade(check, student).passed:
                return check.path
    except _TookTooLong:
        return check.path
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


@functools.cache
def get_equivalents() -> dict[str, dict[str, str]]:
    """Return, by chapter, the mutants that are no other function, with the reason."""
    return tomllib.loads(EQUIVALENTS.read_text()) if EQUIVALENTS.exists() else {}


def sample(chapter: str, n: int) -> list[Mutant]:
    """Return some changes of a chapter that the checks should kill; the same ones each time."""
    known = get_equivalents().get(chapter, {})
    mutants = [mutant for mutant in generate(chapter, nulls=False) if mutant.name not in known]
    return random.Random(0).sample(mutants, min(n, len(mutants)))


def run(mutants: list[Mutant], jobs: int) -> list[tuple[Mutant, str | None]]:
    # Forked children of a process that has used two threads hang.
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_be_quiet) as pool:
        killers = pool.map(kill, mutants, chunksize=4)
        return list(zip(mutants, tqdm(killers, total=len(mutants), unit="mutant"), strict=True))


def _be_quiet() -> None:
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for the life of the process


def judge_fate(mutant: Mutant, killer: str | None) -> str:
    reason = get_equivalents().get(mutant.chapter, {}).get(mutant.name)
    if killer:
        return "killed"
    if reason is None:
        return "survived"
    return "open" if reason.startswith("open:") else "equivalent"


FATES = ("killed", "survived", "open", "equivalent")


def format_report(results: list[tuple[Mutant, str | None]]) -> str:
    """Return the kill matrix: by definition, and by check; then every mutant that was not
    killed."""
    by_definition: dict[str, Counter[str]] = {}
    by_fate: dict[str, list[Mutant]] = {fate: [] for fate in FATES}
    for mutant, killer in results:
        fate = judge_fate(mutant, killer)
        by_fate[fate].append(mutant)
        by_definition.setdefault(f"{mutant.chapter} {mutant.within}", Counter())[fate] += 1
    rows = [(name, *(row[fate] for fate in FATES)) for name, row in by_definition.items()]
    rows.append(("all", *(len(by_fate[fate]) for fate in FATES)))
    n_killed, n_survived = len(by_fate["killed"]), len(by_fate["survived"])
    share = 100 * n_killed / max(n_killed + n_survived, 1)
    killers = Counter(killer for _, killer in results if killer)
    parts = [
        "# Mutants",
        f"{n_killed} of {n_killed + n_survived} that break the contract are killed ({share:.1f}%).",
        tabulate(rows, ("definition", *FATES), tablefmt="github"),
        "## By the first check that rejects them",
        tabulate(killers.most_common(), ("check", "mutants"), tablefmt="github"),
    ]
    for fate in FATES[1:]:
        reasons = get_equivalents()
        listed = [
            f"- {m.chapter} `{m.name}` {reasons.get(m.chapter, {}).get(m.name, '')}"
            for m in by_fate[fate]
        ]
        parts += [f"## {fate.capitalize()}", "\n".join(listed) or "None."]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "chapters", nargs="*", metavar="CHAPTER", help="chapters, e.g. ch2_ppo; all"
    )
    parser.add_argument("--only", default="", help="definitions whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("runs/kill_matrix.md"))
    args = parser.parse_args()
    unknown = set(args.chapters) - set(get_chapters())
    if unknown:
        parser.error(f"CHAPTER should be among {get_chapters()}, but {sorted(unknown)} are not")
    mutants = [m for chapter in args.chapters or get_chapters() for m in generate(chapter)]
    results = run([m for m in mutants if args.only in m.within], args.jobs)
    report = format_report(results)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(report)
    print(report)
    survived = [m for m, killer in results if judge_fate(m, killer) == "survived"]
    stale = [] if args.only else _find_stale(results)
    for chapter, name in stale:
        print(f"{EQUIVALENTS}: {chapter} {name!r} is killed, or is no mutant any more")
    sys.exit(bool(survived or stale))


def _find_stale(results: list[tuple[Mutant, str | None]]) -> list[tuple[str, str]]:
    """Find entries of the file that no surviving mutant has."""
    known = get_equivalents()
    alive = {(m.chapter, m.name) for m, killer in results if not killer}
    chapters = {m.chapter for m, _ in results}
    listed = {
        (chapter, name) for chapter, names in known.items() if chapter in chapters for name in names
    }
    return sorted(listed - alive)
