"""The source that a probe needs and no more: what is sent to where a student's code runs.

A check's oracle and predicate, other checks and the reference stay behind: a probe's module is cut
down to the probe and to what it refers to, through as many modules of `tests` as that takes.
"""

import ast
import copy
import dataclasses
import functools
import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeGuard

from utils.grading.checks import Check
from utils.grading.extraction import get_bound_names, get_used_names

# Their modules are cut down; all others are imported as they are.
PACKAGES = ("tests.checks", "tests.support", "tests.oracles")


@functools.cache
def collect_sources(check: Check) -> dict[str, str]:
    """Return the source of each module of `tests` that the probe takes, those first that others
    import."""
    return _collect([(check.probe.__module__, check.name)])


def collect_public(checks: Iterable[Check]) -> dict[str, str]:
    """Collect the same for the public checks of a chapter, as checks: for a student's bundle.

    A predicate and numbers worked by hand stay; what else is expected has to be recorded.
    """
    public = [check for check in checks if check.public]
    module = public[0].probe.__module__
    predicates = {check.holds for check in public if check.holds is not None}
    sources = _collect([(module, c.name) for c in public], predicates)
    decorators = {check.name: _describe(check) for check in public}
    statements = ast.parse(sources[module]).body
    for statement in statements:
        if isinstance(statement, ast.FunctionDef) and statement.name in decorators:
            statement.decorator_list = [ast.parse(decorators[statement.name], mode="eval").body]
    imports = [f"from {p.__module__} import {p.__name__}" for p in predicates]
    imports = [line for line in sorted(imports) if not line.startswith(f"from {module} ")]
    text = "\n\n\n".join(["\n".join(imports), *map(ast.unparse, statements)])
    return sources | {module: f"from utils.grading.checks import check\n{text}\n"}


def _describe(check: Check) -> str:
    """Return the decorator of a public check without its oracle."""
    options = {"public": True}
    for field in dataclasses.fields(Check):
        value = getattr(check, field.name)
        if field.name in ("points", "seeds", "tier", "slow", "beside", "rtol", "atol", "float64"):
            options[field.name] = value
    if check.is_worked:
        options["expected"] = check.expected
    written = [f"{name}={value!r}" for name, value in options.items()]
    written += [f"holds={check.holds.__name__}"] if check.holds is not None else []
    return f"check({check.exercise!r}, {', '.join(written)})"


def _collect(start: list[tuple[str, str]], predicates: Iterable[Callable] = ()) -> dict[str, str]:
    """Return the sources for the names of a module, and for predicates of it or of others."""
    names: dict[str, set[str]] = defaultdict(set)  # of each module
    for module, name in start + [(p.__module__, p.__name__) for p in predicates]:
        _add(module, name, names)
    sources: dict[str, str] = {}
    for module in sorted({p.__module__ for p in predicates} - {start[0][0]}):
        _put_in_order(module, names, sources)
    _put_in_order(start[0][0], names, sources)
    return sources


def _add(module: str, name: str, names: dict[str, set[str]]) -> None:
    """Take a name of a module, and what it refers to."""
    if name in names[module]:
        return
    names[module].add(name)
    for statement in _get_statements(module):
        if name not in _get_names(statement):
            continue
        if isinstance(statement, ast.ImportFrom) and _is_cut_down(str(statement.module)):
            _add(str(statement.module), _get_original(statement, name), names)
        for used in get_used_names(statement) if not _is_import(statement) else ():
            _add(module, used, names)
            if (home := _find_module(module, used)) is not None:
                for attribute in _get_attributes(used, statement):
                    _add(home, attribute, names)


def _put_in_order(module: str, names: dict[str, set[str]], sources: dict[str, str]) -> None:
    for statement in _get_statements(module):
        taken = _get_names(statement) & names[module]
        if not isinstance(statement, ast.ImportFrom) or not taken:
            continue
        if statement.module in PACKAGES:
            imported = [f"{statement.module}.{_get_original(statement, n)}" for n in sorted(taken)]
        else:
            imported = [str(statement.module)]
        for other in imported:
            if other in names and other not in sources:
                _put_in_order(other, names, sources)
    sources[module] = _cut(module, names[module])


def _is_cut_down(module: str) -> bool:
    return module not in PACKAGES and module.rpartition(".")[0] in PACKAGES


def _find_module(module: str, name: str) -> str | None:
    """Return the module that `name` is, if `module` has it by `from tests.support import name`."""
    for s in _get_statements(module):
        if isinstance(s, ast.ImportFrom) and s.module in PACKAGES and name in _get_names(s):
            return f"{s.module}.{_get_original(s, name)}"
    return None


def _get_attributes(name: str, statement: ast.stmt) -> set[str]:
    """Return what a statement takes of a module by the name of `name`."""
    return {
        node.attr
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    }


def _cut(module: str, names: set[str]) -> str:
    """Return the statements of a module that bind one of these names."""
    kept = []
    for statement in _get_statements(module):
        bound = _get_names(statement) & names
        if not bound:
            continue
        if _is_import(statement):
            statement = copy.copy(statement)
            statement.names = [alias for alias in statement.names if _get_alias(alias) in bound]
        kept.append(ast.unparse(statement))
    return "\n\n".join(kept)


@functools.cache
def _get_statements(module: str) -> tuple[ast.stmt, ...]:
    """Return the statements of a module; `@check(...)`, which names the oracle, is left out."""
    statements = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for statement in statements:
        if isinstance(statement, ast.FunctionDef):
            statement.decorator_list = [d for d in statement.decorator_list if not _is_check(d)]
    return tuple(statements)


@functools.cache
def _get_names(statement: ast.stmt) -> frozenset[str]:
    if _is_import(statement):
        return frozenset(_get_alias(alias) for alias in statement.names)
    return frozenset(get_bound_names(statement))


def _is_import(statement: ast.stmt) -> TypeGuard[ast.Import | ast.ImportFrom]:
    return isinstance(statement, ast.Import | ast.ImportFrom)


def _get_alias(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _get_original(statement: ast.ImportFrom, name: str) -> str:
    return next(alias.name for alias in statement.names if _get_alias(alias) == name)


def _is_check(decorator: ast.expr) -> bool:
    return (
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Name)
        and decorator.func.id == "check"
    )
