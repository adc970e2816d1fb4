"""Running a probe, and what it observed as plain data: tensors, numbers, strings, lists, dicts."""

import contextlib
import io
import os
import random
import re
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub.constants
import numpy as np
import torch
from torch import Tensor, nn

from utils.grading.checks import Check, Rng

ROOT = Path(__file__).parents[2]
CHECKS = {ROOT / "tests" / "checks", ROOT / "tests" / "support", ROOT / "tests" / "oracles"}
STANDARD_LIBRARY = str(Path(os.__file__).parent)
MAX_NUMBERS = 10**7  # of a tensor that is observed
MAX_SECONDS = 30  # that a probe may compute,
SLOW_FACTOR = 6  # and so many times as long if its check trains: as when a class is graded


@dataclass(frozen=True, eq=False)
class Raised:
    """What is observed of code that raised. Two are equal if kind and wording are."""

    kind: str  # the exception's class name
    message: str
    trace: str = ""  # the frames of the student's code
    place: str = ""  # the function that raised
    origin: str = "answer"  # or "check", where no line of the answer was under way

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Raised) and self._wording() == other._wording()

    def _wording(self) -> tuple[str, str]:
        return self.kind, re.sub(r"\d+", "", self.message)


@dataclass(frozen=True)
class Unsupported:
    """Something that is no observation: its type is all that is known of it."""

    kind: str


class NotDefined(Exception):
    """The submission does not define what a probe asked for."""


class StudentNames:
    """What a probe sees as `student`: names, each looked up in one namespace after the other."""

    def __init__(self, *namespaces: Mapping[str, Any]):
        self._namespaces = namespaces

    def __getattr__(self, name: str) -> Any:
        for namespace in self._namespaces:
            if name in namespace:
                return namespace[name]
        raise NotDefined(f"{name} is not defined")


def observe(
    probe: Callable[[Any, Rng], Any],
    student: StudentNames,
    seed: int,
    dtype: torch.dtype,
    seconds: float = MAX_SECONDS,
) -> tuple[Any, str]:
    """Run a probe: the plain observation or `Raised`, and what was printed.

    One thread, no model hub, and the generators of Python, NumPy and PyTorch seeded; those, the
    number of threads, default dtype and device, grad mode and folder are afterwards as they were.
    """
    printed = _Unclosable()
    with _known_state(seed, dtype), contextlib.redirect_stdout(printed):
        try:
            with contextlib.redirect_stderr(printed), _limited(seconds):
                observed = to_plain(probe(student, Rng(seed, dtype)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            is_answer = any(not (_is_of_the_check(f) or _is_of_a_library(f)) for f in frames)
            trace, origin = _format_frames(frames, probe), "answer" if is_answer else "check"
            observed = Raised(type(error).__name__, _say(error), trace, _name_place(error), origin)
    return observed, printed.getvalue()


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError in a loop that does not end, where the system and the thread allow it.

    What counts is the time that this process computes, however busy the machine is.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and hasattr(signal, "ITIMER_VIRTUAL")):
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {seconds} s of computing: does a loop not end?")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class _Unclosable(io.StringIO):
    def close(self) -> None:
        """Stay open: whoever prints next to it may not close it."""


def _name_place(error: BaseException) -> str:
    """Return the function that raised; of a method such as `__init__` its class."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    owner, _, name = frame.f_code.co_qualname.rpartition(".")
    return owner.rpartition(".")[2] if name.startswith("__") and owner else name


def _say(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a student's own __str__
        return ""


def _get_device() -> torch.device | None:
    device = torch.get_default_device()
    return None if device.type == "cpu" else device  # as to set the processor costs time


# What checks rely on: how each is looked up and set, and what to.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any], Any], ...] = (
    (_get_device, torch.set_default_device, None),
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "default"),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False),
    (torch.get_num_threads, torch.set_num_threads, 1),
)


@contextlib.contextmanager
def usual_settings() -> Iterator[None]:
    """Set for a while what checks rely on: the above, grad mode, NumPy's errors and warnings."""
    saved = [(set_to, look_up()) for look_up, set_to, _ in _SETTINGS]
    for _, set_to, usual in _SETTINGS:
        set_to(usual)
    quiet = warnings.catch_warnings(action="ignore")
    try:
        with torch.enable_grad(), np.errstate(all="ignore"), quiet:
            yield
    finally:
        for set_to, value in saved:
            set_to(value)


@contextlib.contextmanager
def _known_state(seed: int, dtype: torch.dtype) -> Iterator[None]:
    python_state, numpy_state = random.getstate(), np.random.get_state()
    offline = mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with offline, contextlib.chdir("."), torch.random.fork_rng(devices=[]), usual_settings():
            torch.set_default_dtype(dtype)
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def to_plain(value: Any) -> Any:
    """Return `value` as plain data that shares nothing with it; a tuple becomes a list."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is np.float64:  # which is a float, too
        return float(value)
    if type(value) in (Tensor, nn.Parameter):
        if value.numel() > MAX_NUMBERS:  # an expanded one takes no memory until it is copied
            return Unsupported(f"tensor of {value.numel()} numbers")
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if type(value) is dict:
        return {str(key): to_plain(item) for key, item in value.items()}
    return Unsupported(type(value).__name__)


def is_sound(observed: Any) -> bool:
    """Return whether an observation holds nothing that cannot be compared."""
    if isinstance(observed, dict):
        return all(map(is_sound, observed.values()))
    if isinstance(observed, list):
        return all(map(is_sound, observed))
    return not isinstance(observed, Raised | Unsupported)


def _is_of_the_check(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    is_engine = ROOT / "utils" / "grading" in path.parents
    return is_engine or path.parent in CHECKS or frame.filename.startswith("<tests.")


def _is_of_a_library(frame: traceback.FrameSummary) -> bool:
    return "-packages" in frame.filename or frame.filename.startswith(STANDARD_LIBRARY)


def _format_frames(frames: traceback.StackSummary, probe: Callable) -> str:
    """Return the traceback without the engine's and the check's frames; of libraries' the last."""
    home = probe.__code__.co_filename
    kept = [f for f in frames if f.filename != home and not _is_of_the_check(f)]
    kept = [f for f in kept[:-1] if not _is_of_a_library(f)] + kept[-1:]
    return "".join(traceback.format_list(kept)).rstrip()


def run_check(
    check: Check, student: StudentNames, index: int, secret: str, dtype: torch.dtype = torch.float32
) -> tuple[Any, str]:
    """Run a check's probe with the seed of this index."""
    seconds = MAX_SECONDS * (SLOW_FACTOR if check.slow else 1)
    return observe(check.probe, student, check.seed(index, secret), dtype, seconds)
