"""What a chapter's notebook calls: `start`, `preview`, `check`, `progress`, `catch_up` and more."""

import ast
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import transformer_lens  # noqa: F401  before transformers
from filelock import Timeout
from IPython.display import SVG, Image, display
from matplotlib.figure import Figure
from tabulate import tabulate

from utils.course import in_bundle, kept_methods, stale_cells
from utils.course.checking import YELLOW, is_solution, is_solved, paint, run_and_print
from utils.grading.checks import (
    boot_models,
    get_chapters,
    get_checks,
    get_reference,
    has_reference,
)
from utils.grading.judging import Verdict, count_points
from utils.grading.substitution import find_owner, is_stub, rebind
from utils.plot_descriptions import describe_figure
from utils.tracking import make_lock, tolerate_encoding
from utils.version import get_version

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "chapters" / "figures"
PROGRESS = Path(os.environ.get("COURSE_PROGRESS", ROOT / ".progress.json"))  # outlives the kernel
OPENINGS, RESULTS = ROOT / "chapters" / "openings", ROOT / "chapters" / "results"
CORE_PATH = Path(__file__).with_name("core_path.json")  # made by utils.authoring
NOTHING = {"solved": False, "share": 0.0, "hardening": ""}  # of an exercise that was not checked
MAX_THREADS = 8  # the models are small: more hardly help
SHORT = "COURSE_SHORT"  # set when a notebook is only tested: experiments are cut short
SOLVED = "COURSE_SOLVED"  # set when the edition with solutions is executed: it needs none lent


def start(chapter: str, version: str | None = None) -> None:
    """Begin a chapter: what there is to do, and how far you are.

    version: the course's, when the notebook was made.
    """
    tolerate_encoding()
    if version is not None and version != (here := get_version()):
        print(f"This notebook is of version {version} of the course, and {ROOT} is of {here}.")
    choose_threads()
    stale_cells.watch()
    kept_methods.watch({name.partition(".")[0] for name in get_checks(chapter) if "." in name})
    _describe_figures()
    done = _load_progress()
    boot_models()
    found = [done.get(f"{chapter}::{name}", NOTHING) for name in get_checks(chapter)]
    n_done, goal = sum(_is_done(chapter, one) for one in found), _get_goal(chapter)
    print(f"{chapter}: {n_done} of {len(found)} exercises {goal}. progress() shows all chapters.")


def _describe_figures() -> None:
    """Put a plot's description beside its picture, where a reader of the screen finds it.

    As a method of the class: what is registered with IPython is lost when the first plot is made.
    """

    def print_description(figure: Figure, printer: Any, cycle: bool) -> None:
        printer.text(describe_figure(figure))

    Figure._repr_pretty_ = print_description  # type: ignore[attr-defined]


def choose_threads() -> None:
    """Use the processors that are idle, eight at most and one at least.

    Threads that have to share a processor wait for each other, which can make a run ten times as
    long as one thread does.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    n_processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    n_processors = n_processors or os.cpu_count() or 1
    # Not the load average, in which a process counts for a minute after it has ended.
    busy = psutil.cpu_percent(interval=0.5) / 100 * (psutil.cpu_count() or 1)
    threads = max(1, min(MAX_THREADS, round(n_processors - busy)))
    torch.set_num_threads(threads)
    print(
        f"PyTorch uses {threads} of {n_processors} processors: torch.set_num_threads(n) changes it."
    )


def preview() -> None:
    """Run the finished thing of this chapter with the solutions, and print what it does.

    Where there are no solutions, as in a course bundle, it prints what it did when it was recorded.
    """
    tolerate_encoding()
    chapter = str(sys._getframe(1).f_globals.get("CHAPTER"))
    recorded = RESULTS / f"{chapter}_opening.txt"
    if has_reference(chapter):
        runpy.run_path(str(OPENINGS / f"{chapter}.py"), run_name="__main__")
    else:
        print(f"Recorded on two processors:\n\n{recorded.read_text(encoding='utf-8')}")


def check(answer: Any, slow: bool = False, hardening: bool = False) -> None:
    """Check an exercise: `check(compute_advantages)`, or `check(RLHFTrainer.rollout_phase)`.

    Prints how each check went. It is solved when the core checks pass; the others, which ask for
    what a library would need, stand in one line unless `hardening` is True. `slow=True` runs those
    that train as well. What fails because of your other exercises is checked again with the
    solutions in their place. Where there are no solutions, as in a course bundle, there are the
    public checks alone, and whether it is solved is not said.

    Raises ValueError for something that is no exercise.
    """
    tolerate_encoding()
    caller = sys._getframe(1).f_globals
    chapter, exercise, verdicts = run_and_print(answer, caller, slow, hardening)
    if stale_cells.is_unrun(exercise):
        print(paint("The cell above was edited after it ran: run it again, then this one.", YELLOW))
    if verdicts and is_solution(chapter, exercise, answer):
        print("This is the solution that catch_up() put in: it does not count as solved.")
    elif verdicts:
        _save_progress(f"{chapter}::{exercise}", verdicts)


def _save_progress(name: str, verdicts: list[Verdict]) -> None:
    harder = [verdict.passed for verdict in verdicts if not verdict.check.is_core]
    note: dict[str, Any] = {"hardening": f"{sum(harder)} of {len(harder)}" if harder else ""}
    if has_reference(verdicts[0].check.chapter):
        total = sum(verdict.check.points for verdict in verdicts)
        note |= {"solved": is_solved(verdicts), "share": count_points(verdicts) / total}
    else:  # its points depend on checks that are not here
        share = sum(verdict.passed for verdict in verdicts) / len(verdicts)
        note |= {"solved": False, "share": share, "public": in_bundle.say_passed(verdicts)}
    partial = PROGRESS.with_suffix(".partial")
    try:
        with make_lock(PROGRESS).acquire(timeout=10):  # other kernels write it too
            partial.write_text(json.dumps(_load_progress() | {name: note}, indent=1))
            os.replace(partial, PROGRESS)
    except Timeout:
        print(f"(Your progress was not saved: another process holds {PROGRESS})")
    except OSError as error:
        print(f"(Your progress could not be saved in {PROGRESS}: {error.strerror})")


def progress() -> None:
    """Show the course so far: how each exercise did when it was last checked."""
    tolerate_encoding()
    done, rows = _load_progress(), []
    core_path = json.loads(CORE_PATH.read_text(encoding="utf-8"))
    for chapter in get_chapters():
        names = list(get_checks(chapter))
        found = {name: done.get(f"{chapter}::{name}", NOTHING) for name in names}
        bar = "█" * round(20 * sum(one["share"] for one in found.values()) / len(found))
        is_done = {name: _is_done(chapter, one) for name, one in found.items()}
        core = [is_done[name] for name in core_path.get(chapter, []) if name in is_done]
        n_core = f"{sum(core)} of {len(core)}" if core else ""
        n_done = f"{sum(is_done.values())} of {len(names)}"
        harder = [one["hardening"].split(" of ") for one in found.values() if one["hardening"]]
        sums = [sum(int(pair[i]) for pair in harder) for i in (0, 1)]
        n_harder = f"{sums[0]} of {sums[1]}" if harder else ""
        rows.append((chapter, f"{bar:·<20}", n_core, n_done, n_harder))
        rows += [
            ("", f"  {name}", "", _say_how_far(one), one["hardening"])
            for name, one in found.items()
            if 0 < one["share"] < 1 or (one != NOTHING and not one["solved"])
        ]
    goal = _get_goal(get_chapters()[-1])
    print(
        tabulate(
            rows, ("chapter", "progress", "core path", goal, "hardening"), disable_numparse=True
        )
    )


def _get_goal(chapter: str) -> str:
    return "solved" if has_reference(chapter) else "pass the public checks"


def _is_done(chapter: str, note: dict[str, Any]) -> bool:
    """Return whether an exercise is solved; in a bundle, where nobody knows, whether the public
    checks pass."""
    return note["solved"] or (
        "public" in note and note["share"] == 1 and not has_reference(chapter)
    )


def _say_how_far(note: dict[str, Any]) -> str:
    if "public" in note:
        return note["public"]
    return "solved" if note["solved"] else f"{note['share']:.0%} of its points"


def _load_progress() -> dict[str, dict[str, Any]]:
    try:
        return json.loads(PROGRESS.read_text())
    except (OSError, ValueError):  # none yet, or damaged
        return {}


def catch_up() -> None:
    """Put the solution in place of every exercise of this chapter that is not written yet.

    So that a section can be started without those before it. What you have written stays, and what
    the chapter gives you is put in where its cell did not run. Where there are no solutions, it
    says which exercises its cell needs that are not written.
    """
    frame = sys._getframe(1)
    caller = frame.f_globals
    chapter = str(caller.get("CHAPTER"))
    try:
        reference = vars(get_reference(chapter))
    except ModuleNotFoundError:
        waiting = in_bundle.put_in_given(ROOT / "chapters" / f"{chapter}.ipynb", caller)
        codes = [frame.f_code]
        if "In" in caller:  # IPython runs a cell line by line: its code is more than this one
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            codes.append(compile(caller["In"][-1], "<cell>", "exec", flags))
        names = caller | waiting
        found = [name for code in codes for name in in_bundle.find_needed(chapter, code, names)]
        if found:
            needed = ", ".join(dict.fromkeys(found))
            said = "This cell needs exercises that you haven't written or run yet"
            print(f"{said}, and there are no solutions here: {needed}")
        return
    exercises = get_checks(chapter)
    for name in reference.keys() - exercises.keys() - caller.keys():
        if not name.startswith("__"):
            caller[name] = reference[name]  # given: a helper, a constant, a class
    filled = []
    for exercise in exercises:
        name, _, method = exercise.partition(".")
        if not method and (name not in caller or is_stub(caller[name])):
            caller[name] = reference[name]
            filled.append(exercise)
        elif method and name in caller and _fill_method(caller[name], reference[name], method):
            filled.append(exercise)
    if filled and not os.environ.get(SOLVED):
        print("From the solutions, until you write yours: " + ", ".join(filled))


def _fill_method(cls: type, reference: type, method: str) -> bool:
    """Take a method that is missing or a stub from the reference, and stubs that stand by it."""
    owner = find_owner(cls, method, reference)
    if owner is not None and not is_stub(vars(owner)[method]):
        return False
    place = owner or cls
    stubs = [key for key, value in vars(place).items() if callable(value) and is_stub(value)]
    for key in {method, *stubs} & vars(reference).keys():
        setattr(place, key, rebind(vars(reference)[key], place))
    return True


def show_result(chapter: str, name: str) -> None:
    """Show a chapter's diagram, or the picture that an experiment drew when it was last run."""
    path = FIGURES / f"{chapter}-{name}.png"
    drawing = path.with_suffix(".svg")
    if drawing.exists():
        display(SVG(filename=drawing))
    elif path.exists():
        display(Image(filename=path))
    else:
        print(f"{path} is not there: run the chapter's experiments to draw it.")


def shorten(n: int) -> int:
    """Return `n`, or a tenth of it when the notebook is only tested."""
    return max(n // 10, 1) if os.environ.get(SHORT) else n
