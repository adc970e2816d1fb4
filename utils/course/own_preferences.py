"""Asks a reader which of two completions is better: with buttons, or in writing.

Each choice is on disk before the next pair is shown, so that nothing is lost, and the next run of
the cell goes on where the last one stopped.
"""

import importlib
import random
from html import escape
from pathlib import Path
from typing import Any

from IPython import get_ipython
from IPython.display import display

from utils.preferences import Preferences, append_preference, load_preferences
from utils.prompts import show_prompt

MINE = Path(__file__).parents[2] / "my_preferences.jsonl"


def ask_for_preferences(
    candidates: Preferences, path: str | Path = MINE, buttons: bool = True
) -> None:
    """Ask which of each pair is better, and add the answers to a file of JSON lines.

    With `buttons=False`, or in a terminal, the answers are typed. Where nobody can answer, as when
    a notebook is executed by a program, nothing is asked.
    """
    if not _is_attended():
        print("Nobody is here to choose: the simulated person does.")
        return
    n_made = count_choices(path)
    made = load_preferences(path).prompts if n_made else ()
    if list(made) != list(candidates.prompts[:n_made]):
        print(f"{path} holds choices between other pairs: move or delete it to choose here.")
    elif n_made >= len(candidates):
        print(f"All {len(candidates)} choices are in {path}; delete it to choose anew.")
    elif buttons and hasattr(get_ipython(), "kernel"):
        _Buttons(candidates, Path(path), n_made).show()
    else:
        _ask_in_writing(candidates, Path(path), n_made)


def load_own_preferences(candidates: Preferences, path: str | Path = MINE) -> Preferences:
    """Return the reader's choices, or those of the simulated person where there are none."""
    if count_choices(path) == 0:
        print("These are the simulated person's choices: you have made none yet.")
        return candidates
    own = load_preferences(path)
    print(f"These are your {len(own)} choices.")
    return own


def count_choices(path: str | Path) -> int:
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return sum(bool(line.strip()) for line in lines)


def get_sides(candidates: Preferences, i: int) -> tuple[str, str]:
    """Return a pair as it is shown: the sides are random, but the same at every call."""
    pair = (candidates.chosen[i], candidates.rejected[i])
    return pair if random.Random(i).random() < 0.5 else pair[::-1]


def _is_attended() -> bool:
    """Return whether somebody can answer: a kernel that a program runs may not ask."""
    kernel = getattr(get_ipython(), "kernel", None)
    return bool(getattr(kernel, "_allow_stdin", True))


def _ask_in_writing(candidates: Preferences, path: Path, n_made: int) -> None:
    for i in range(n_made, len(candidates)):
        left, right = get_sides(candidates, i)
        prompt = show_prompt(candidates.prompts[i])
        print(f"\n{i + 1} of {len(candidates)}. {prompt} ...\n 1: {left!r}\n 2: {right!r}")
        answer = ""
        while answer not in ("1", "2", "q"):
            answer = input("Which is better? 1, 2, or q to stop: ").strip()
        if answer == "q":
            print(f"Stopped: {i} choices are in {path}. Run the cell again to go on.")
            return
        pair = (left, right) if answer == "1" else (right, left)
        append_preference(path, candidates.prompts[i], *pair)
    print(f"Done: the choices are in {path}.")


class _Buttons:
    """Two buttons below the two completions, and how many are left."""

    def __init__(self, candidates: Preferences, path: Path, n_made: int):
        self.candidates, self.path, self.n_made = candidates, path, n_made
        widgets: Any = importlib.import_module("ipywidgets")
        self.title, self.note = widgets.HTML(), widgets.HTML()
        self.texts = [widgets.HTML() for _ in range(2)]
        self.buttons = [widgets.Button(description="This one is better") for _ in range(2)]
        for side, button in enumerate(self.buttons):
            button.on_click(lambda _, side=side: self.choose(side))
        half = widgets.Layout(width="48%", padding="0 1em 0 0")
        pairs = zip(self.texts, self.buttons, strict=True)
        sides = widgets.HBox([widgets.VBox(pair, layout=half) for pair in pairs])
        self.box = widgets.VBox([self.title, sides, self.note])

    def show(self) -> None:
        self.show_pair()
        display(self.box)
        print("No buttons? ask_for_preferences(candidates, buttons=False) asks in writing.")

    def show_pair(self) -> None:
        if self.n_made >= len(self.candidates):
            self.title.value = "Done. Run the next cell."
            for widget in (*self.texts, *self.buttons):
                widget.layout.display = "none"
            return
        prompt = escape(show_prompt(self.candidates.prompts[self.n_made]))
        self.title.value = f"<b>{self.n_made + 1} of {len(self.candidates)}.</b> {prompt} ..."
        for widget, text in zip(self.texts, get_sides(self.candidates, self.n_made), strict=True):
            widget.value = f"<p>{prompt}<b>{escape(text)}</b></p>"

    def choose(self, side: int) -> None:
        """Save a choice and show the next pair."""
        if self.n_made >= len(self.candidates):
            return
        left, right = get_sides(self.candidates, self.n_made)
        pair = (left, right) if side == 0 else (right, left)
        try:
            append_preference(self.path, self.candidates.prompts[self.n_made], *pair)
        except OSError as error:
            self.note.value = f"This choice could not be saved: {escape(str(error))}"
            return
        self.n_made += 1
        self.note.value = f"{self.n_made} choices are in {self.path.name}."
        self.show_pair()
