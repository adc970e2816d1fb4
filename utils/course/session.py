"""What a chapter's notebook calls: `start`, `check`, `progress`, `catch_up`, `show_result`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import transformer_lens  # noqa: F401  before transformers
from IPython.display import Image, display
from tabulate import tabulate

from utils.course import stale_cells
from utils.course.checking import YELLOW, is_solution, is_stub, paint, run_and_print
from utils.grading.checks import boot_models, get_chapters, get_checks, get_reference
from utils.grading.judging import count_points
from utils.grading.substitution import find_answer, find_owner, rebind

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "chapters" / "figures"
PROGRESS = Path(os.environ.get("COURSE_PROGRESS", ROOT / ".progress.json"))  # outlives the kernel
SHORT = "COURSE_SHORT"  # set when a notebook is only tested: experiments are cut short
SOLVED = "COURSE_SOLVED"  # set when the edition with solutions is executed: it needs none lent


def start(chapter: str) -> None:
    """Begin a chapter: what there is to do, and how far you are."""
    if (ROOT / "utils" / "models" / "embedded").exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    stale_cells.watch()
    done = _load_progress()
    exercises = [name for name in get_checks(chapter)]
    boot_models()
    solved = sum(done.get(f"{chapter}::{name}", 0) == 1 for name in exercises)
    print(
        f"{chapter}: {solved} of {len(exercises)} exercises solved. progress() shows all chapters."
    )


def check(answer: Any, slow: bool = False) -> None:
    """Check an exercise: `check(compute_advantages)`, or `check(RLHFTrainer.rollout_phase)`.

    Prints how each check went. `slow=True` runs those that train as well. What fails because of
    your other exercises is checked again with the solutions in their place.

    Raises ValueError for something that is no exercise.
    """
    caller = sys._getframe(1).f_globals
    chapter, exercise, verdicts = run_and_print(answer, caller, slow)
    if stale_cells.is_unrun(exercise):
        print(paint("The cell above was edited after it ran: run it again, then this one.", YELLOW))
    if verdicts and is_solution(chapter, exercise, answer):
        print("This is the solution that catch_up() put in: it does not count as solved.")
    elif verdicts:
        share = count_points(verdicts) / sum(verdict.check.points for verdict in verdicts)
        done = _load_progress()
        done[f"{chapter}::{exercise}"] = max(share, done.get(f"{chapter}::{exercise}", 0))
        partial = PROGRESS.with_suffix(".partial")
        partial.write_text(json.dumps(done, indent=1))
        os.replace(partial, PROGRESS)


def progress() -> None:
    """Show the course so far: the best that each exercise has reached."""
    done, rows = _load_progress(), []
    for chapter in get_chapters():
        names = list(get_checks(chapter))
        shares = [done.get(f"{chapter}::{name}", 0) for name in names]
        solved = sum(share == 1 for share in shares)
        bar = "█" * round(20 * sum(shares) / len(shares))
        rows.append((chapter, f"{bar:·<20}", f"{solved} of {len(names)}"))
        left = [name for name, share in zip(names, shares, strict=True) if 0 < share < 1]
        rows += [
            ("", f"  {name}", f"{done[f'{chapter}::{name}']:.0%} of its points") for name in left
        ]
    print(tabulate(rows, ("chapter", "progress", "solved"), disable_numparse=True))


def _load_progress() -> dict[str, float]:
    try:
        return json.loads(PROGRESS.read_text())
    except (OSError, ValueError):  # none yet, or damaged
        return {}


def catch_up() -> None:
    """Put the solution in place of every exercise of this chapter that is not written yet.

    So that a section can be started without those before it. What you have written stays, and what
    the chapter gives you is put in where its cell did not run. Where there are no solutions, it
    says what is not written.
    """
    caller = sys._getframe(1).f_globals
    chapter = str(caller.get("CHAPTER"))
    try:
        reference = vars(get_reference(chapter))
    except ModuleNotFoundError:
        found = {name: find_answer(caller, name) for name in get_checks(chapter)}
        left = [name for name, answer in found.items() if is_stub(answer)]
        if left:
            print("Not written yet, and there are no solutions here: " + ", ".join(left))
        elif not any(found.values()):
            print("There are no solutions here: run the cells of the exercises above first.")
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
    """Show the picture that an experiment of the chapter draws, from when it was last run."""
    path = FIGURES / f"{chapter}-{name}.png"
    if path.exists():
        display(Image(filename=path))
    else:
        print(f"{path} is not there: run the chapter's experiments to draw it.")


def shorten(n: int) -> int:
    """Return `n`, or a tenth of it when the notebook is only tested."""
    return max(n // 10, 1) if os.environ.get(SHORT) else n
