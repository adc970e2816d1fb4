"""The student's own modules, packages and notebooks, as far as they import one another.

Of a module, too, only definitions run and what others take from it: not its experiments.
"""

import ast
import builtins
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType
from typing import Any

from utils.autograder.facades import COURSE
from utils.grading import extraction
from utils.grading.cells import SUFFIXES, Parsed, parse

MAX_EFFECT_SECONDS = 3  # of a submission's loops and calls: an experiment may alter what is needed
MAX_STATEMENT_SECONDS = 8  # of one definition or assignment: a training run may be kept by one
STOPPED_AGAIN_SECONDS = 0.5  # where what stops a statement is caught by it
MAX_SAID = 20  # errors that are kept
COURSE_CODE = str(Path(__file__).parents[1])


# What a submission's own scripts of the same name come before.
SHADOWED = {*COURSE, *sys.stdlib_module_names}


def get_package(name: str) -> str:
    """Return the package of a file, for relative imports: its folders below the last one whose name
    is no identifier."""
    parts = Path(name).parts[:-1]
    strange = [n for n, part in enumerate(parts, 1) if not part.isidentifier()]
    return ".".join(parts[max(strange, default=0) :])


def get_all_names(code: CodeType) -> set[str]:
    """Return the names that code refers to, and the functions in it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names}.union(*map(get_all_names, inner))


def name_folder(name: str) -> str:
    """Return the package that stands for the folder of a file, where its name can be none."""
    return "handed_in_" + re.sub(r"\W", "_", str(PurePosixPath(name).parent))


def _make_fallback(name: str) -> Callable[[str], Any]:
    def get(key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return getattr(importlib.import_module(name), key)

    return get


class TookTooLong(BaseException):
    """What stops a statement: no `except Exception` in it should."""


@contextlib.contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in what takes longer; a limit around this one goes on afterwards."""

    def stop(*_: Any) -> None:
        raise TookTooLong

    start = time.monotonic()
    before = signal.signal(signal.SIGALRM, stop)
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds, STOPPED_AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:
            left = max(outer - (time.monotonic() - start), 0.01)
            signal.setitimer(signal.ITIMER_REAL, left, STOPPED_AGAIN_SECONDS)


@dataclass
class Runner:
    """Runs statements: an error costs what its statement defines.

    After a definition or an assignment that takes too long nothing runs, so that all can be run
    once more without it.
    """

    patience: float = MAX_STATEMENT_SECONDS  # for each definition or assignment
    skipped: Collection[str] = ()  # the places of those that took longer
    left: float = MAX_EFFECT_SECONDS  # for loops and calls together
    said: list[str] = field(default_factory=list)  # of errors
    failed: list[str] = field(default_factory=list)  # what is said of imports
    stopped: list[str] = field(default_factory=list)  # the places of loops and calls
    slow: list[str] = field(default_factory=list)  # the place of what took too long

    def run(self, place: str, code: CodeType, names: dict[str, Any], kind: str) -> bool:
        """Run one statement of a place, which is of a kind (`get_kind`), and return whether it ran
        to its end. Raises nothing."""
        if self.slow or place in self.skipped:
            return False
        start = time.monotonic()
        is_done = False
        limit = limit_time(self.left if kind == "effect" else self.patience)
        try:
            # What an import runs has limits of its own.
            with limit if kind != "import" else contextlib.nullcontext():
                extraction.run_statement(code, names)
            is_done = True
        except TookTooLong:
            if kind == "definition":
                self.slow.append(place)
            elif len(self.stopped) < MAX_SAID:
                self.stopped.append(place)
                self.said.append(f"{place}: it was stopped, as loops and calls took too long")
        except BaseException as error:
            said = f"{place}: {type(error).__name__}: {error}"[:300]
            # What notebooks import for experiments can't be read here, and no exercise needs it.
            is_shut = isinstance(error, PermissionError) and COURSE_CODE in str(error.filename)
            if len(self.said) < MAX_SAID and not is_shut:
                self.said.append(said)
                self.failed += [said] * (kind == "import")
        if kind == "effect":
            self.left = max(self.left - (time.monotonic() - start), 0.1)
        return is_done


class SubmittedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds files of a submission by the names under which its code imports them.

    Any folder may be the one that somebody worked in: `hw/lib/tools.py` is `tools`, `lib.tools`
    and `hw.lib.tools`. A script that is named like a module of the course or of the standard
    library comes before that one, where the submission imports it, and not before what is
    installed besides.
    """

    def __init__(
        self, files: list[tuple[str, bytes]], importing: Iterable[CodeType], runner: Runner
    ):
        self.runner = runner
        self.files: dict[str, tuple[str, bytes]] = {}
        self.packages: set[str] = set()
        self.importing = list(importing)
        self.parsed: dict[str, Parsed] = {}
        self.home = Path.cwd()
        for name, data in sorted(files, key=lambda file: file[0].count("/")):
            self._name(name, data)
        self.first: dict[str, ModuleType | None] = {
            module: None
            for module, (name, _) in self.files.items()
            if module in SHADOWED and name.endswith(".py")
        }

    def _name(self, name: str, data: bytes) -> None:
        path = PurePosixPath(name)
        if path.suffix.lower() not in SUFFIXES:
            return
        parts = [*path.parts[:-1], path.stem]
        parts = parts[:-1] if path.stem == "__init__" else parts
        for first in range(len(parts)):
            module = parts[first:]
            if all(part.isidentifier() for part in module):
                self.files.setdefault(".".join(module), (name, data))
                last = len(module) + (path.stem == "__init__")
                self.packages |= {".".join(module[:n]) for n in range(1, last)}
        if parts and parts[-1].isidentifier() and not get_package(name):
            folder = name_folder(name)
            self.files.setdefault(f"{folder}.{parts[-1]}", (name, data))
            self.packages.add(folder)

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None):
        """Find a module, or a package, which needs no `__init__.py`."""
        if fullname not in self.files and fullname not in self.packages:
            return None
        is_package = fullname in self.packages
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def get_builtins(self) -> dict[str, Any]:
        """Return what a module needs for its imports to find what comes first (`first`)."""
        return {"__builtins__": vars(builtins) | {"__import__": self._import}} if self.first else {}

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        """Import a module, or what comes before one of its name."""
        if level or name not in self.first:
            return builtins.__import__(name, globals, locals, fromlist, level)
        if (module := self.first[name]) is None:  # it gives what it lacks of the other
            self.first[name] = module = ModuleType(name)
            module.__package__ = name if name in self.packages else ""
            vars(module)["__getattr__"] = _make_fallback(name)
            self.exec_module(module)
        for key in fromlist or ():
            if f"{name}.{key}" in self.files and not hasattr(module, key):
                setattr(module, key, importlib.import_module(f"{name}.{key}"))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run what a module defines, and what others may take from it."""
        if module.__name__ not in self.files:
            return
        name, _ = self.files[module.__name__]
        module.__file__ = str(self.home / name)
        vars(module).update(self.get_builtins())
        statements = self._parse(name).statements
        definitions = {s.name for s in statements if isinstance(s, extraction.DEFINITIONS)}
        wanted = definitions | self._get_mentioned(name)
        taken = extraction.select_statements(statements, wanted, are_graded=False)
        flags = extraction.get_flags(statements)
        for statement, place, code in extraction.compile_each(taken, flags):
            self.runner.run(place, code, module.__dict__, extraction.get_kind(statement))

    def _parse(self, name: str) -> Parsed:
        if name not in self.parsed:
            data = next(data for found, data in self.files.values() if found == name)
            try:
                self.parsed[name] = parse(data, name)
            except ValueError as error:
                raise ImportError(f"{name}: {error}") from error
        return self.parsed[name]

    def _get_mentioned(self, name: str) -> set[str]:
        """Return all names that other code mentions, whatever it means by them."""
        mentioned = set().union(*map(get_all_names, self.importing))
        for other in {found for found, _ in self.files.values()} - {name}:
            try:
                nodes = [n for s in self._parse(other).statements for n in ast.walk(s)]
            except ImportError:
                continue
            for node in nodes:
                if isinstance(node, ast.alias):
                    mentioned.add(node.name)
                elif isinstance(node, ast.Name | ast.Attribute):
                    mentioned.add(node.id if isinstance(node, ast.Name) else node.attr)
        return mentioned
