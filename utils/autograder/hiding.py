"""What is not passed on to students: where things lie on the grader's machine, and in what hidden
checks and solutions see, words of which code could have made anything."""

import builtins
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from utils.grading.checks import get_checks
from utils.grading.observation import Raised, Unsupported

MAX_EMPTY_SIZE, MAX_DIMENSIONS = 1000, 8  # a tensor without numbers can have any shape
_ROOTS = {str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix, tempfile.gettempdir()}
_PLACES = re.compile(
    r"(?:/[\w.@+-]+)+/(?:site|dist)-packages/|(?:/[\w.@+-]+)*/lib/python3[.\d]*/|"
    r"(?:/[\w.@+-]+)*/grading-\w+(?:/|\b)|"
    + "|".join(f"{re.escape(root)}/" for root in sorted(_ROOTS, key=len, reverse=True))
)


def hide_paths(text: str) -> str:
    """Leave out of a text where Python, its packages, the course and a child's folder lie."""
    return _PLACES.sub("", text)


def hide_words(observed: Any, chapter: str, exercise: str) -> Any:
    """Return what a message about a hidden check, or one that solutions ran in, would pass on of an
    observation: not the student's words.

    The shape of an empty tensor is as good as words.
    """
    if isinstance(observed, Tensor):
        said = observed.numel() == 0 and max(observed.shape) > MAX_EMPTY_SIZE
        return Unsupported("object") if said or observed.ndim > MAX_DIMENSIONS else observed
    if isinstance(observed, Raised):
        return _hide_error(observed, chapter, exercise)
    if isinstance(observed, Unsupported):
        return observed if _is_builtin(observed.kind, type) else Unsupported("object")
    if isinstance(observed, dict):
        return {key: hide_words(value, chapter, exercise) for key, value in observed.items()}
    if isinstance(observed, list):
        return [hide_words(value, chapter, exercise) for value in observed]
    return observed


def _hide_error(raised: Raised, chapter: str, exercise: str) -> Raised:
    known = {part for name in get_checks(chapter) for part in name.split(".")}
    place = raised.place if raised.place in known else exercise.rpartition(".")[2]
    kind, message = raised.kind, raised.message
    if kind == "NotDefined" and message.removesuffix(" is not defined") not in known:
        message = "something that the check needs is not defined"
    elif kind != "NotDefined" and not _is_builtin(kind, BaseException):
        kind = "an exception"
    return Raised(kind, message, "", place, "check" if raised.origin == "check" else "answer")


def _is_builtin(name: str, base: type) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and (base is type or issubclass(found, base))
