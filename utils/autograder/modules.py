"""The student's own modules, packages and notebooks, as far as they import one another.

Of a module, too, only definitions run and what others take from it: not its experiments.
"""

import ast
import contextlib
import importlib.abc
import importlib.machinery
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType
from typing import Any

from utils.autograder.facades import COURSE
from utils.grading.cells import SUFFIXES, Parsed, parse
from utils.grading.extraction import (
    compile_statement,
    get_flags,
    is_effect,
    run_statement,
    select_statements,
    split_import,
)

MAX_EFFECT_SECONDS = 3  # of a submission's loops and calls: an experiment may alter what is needed
MAX_SAID = 20  # errors that are kept
COURSE_CODE = str(Path(__file__).parents[1])
_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _is_of_the_course(error: BaseException) -> bool:
    """Return whether a file of the course may not be read here: what its notebooks import for their
    experiments, and no exercise needs."""
    return isinstance(error, PermissionError) and str(error.filename).startswith(COURSE_CODE)


class Runner:
    """Runs statements: an error costs what its statement defines, and is kept in `said`.

    Loops and calls have `MAX_EFFECT_SECONDS` together.
    """

    def __init__(self) -> None:
        self.left = float(MAX_EFFECT_SECONDS)
        self.said: list[str] = []

    def run(self, place: str, code: CodeType, names: dict[str, Any], is_timed: bool) -> None:
        """Run one statement of a place. Raises nothing."""
        start = time.monotonic()
        try:
            with self._limit(is_timed):
                run_statement(code, names)
        except BaseException as error:
            if len(self.said) < MAX_SAID and not _is_of_the_course(error):
                self.said.append(f"{place}: {type(error).__name__}: {error}"[:300])
        if is_timed:
            self.left = max(self.left - (time.monotonic() - start), 0.1)

    @contextlib.contextmanager
    def _limit(self, is_timed: bool) -> Iterator[None]:
        def stop(*_: Any) -> None:
            raise TimeoutError(f"it took more than the {MAX_EFFECT_SECONDS} s for loops and calls")

        if not is_timed:
            yield
            return
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, self.left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class SubmittedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds files of a submission by the names under which its code imports them.

    Any folder may be the one that somebody worked in: `hw/lib/tools.py` is `tools`, `lib.tools`
    and `hw.lib.tools`.
    """

    def __init__(
        self, files: list[tuple[str, bytes]], importing: Iterable[CodeType], runner: Runner
    ):
        self.runner = runner
        self.files: dict[str, tuple[str, bytes]] = {}
        self.packages: set[str] = set()
        self.importing = list(importing)
        self.parsed: dict[str, Parsed] = {}
        for name, data in sorted(files, key=lambda file: file[0].count("/")):
            self._name(name, data)

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

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None):
        """Find a module, or a package, which needs no `__init__.py`."""
        if fullname not in self.files and fullname not in self.packages:
            return None
        is_package = fullname in self.packages
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave it to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Run what a module defines, and what others may take from it."""
        if module.__name__ not in self.files:
            return
        name, _ = self.files[module.__name__]
        statements = self._parse(name).statements
        definitions = {s.name for s in statements if isinstance(s, _DEFINITIONS)}
        wanted = definitions | self._get_mentioned(name)
        taken = select_statements(statements, wanted, are_graded=False)
        flags = get_flags(statements)
        for statement in (part for s in taken for part in split_import(s, COURSE)):
            place = f"{statement.place}, line {statement.first_line}"
            try:
                code = compile_statement(statement, flags)
            except Exception as error:
                self.runner.said.append(f"{place}: {type(error).__name__}: {error}"[:300])
            else:
                self.runner.run(place, code, module.__dict__, is_effect(statement))

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
        mentioned, waiting = set(), [*self.importing]
        while waiting:
            code = waiting.pop()
            mentioned |= {*code.co_names}
            waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
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
