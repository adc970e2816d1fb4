"""The source that a probe needs and no more: what is sent to where a student's code runs.

A check's oracle and predicate, other checks and the reference stay behind: a probe's module is cut
down to the probe and to what it refers to, through as many modules of `tests` as that takes.
"""

import ast
import functools
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable
from graphlib import TopologicalSorter

from utils.grading.checks import Check
from utils.grading.extraction import get_bound_names, get_import_name, get_used_names

# Their modules are cut down; all others are imported as they are.
PACKAGES = ("tests.checks", "tests.support", "tests.oracles")
_IMPORTS = ast.Import | ast.ImportFrom


@functools.cache
def collect_sources(check: Check) -> dict[str, str]:
    """Return the source of each module of `tests` that a probe takes, imported ones first."""
    return _collect([(check.probe.__module__, check.name)])


def collect_public(checks: Iterable[Check]) -> dict[str, str]:
    """Return the sources of a chapter's public checks, as checks: for a student's bundle.

    A predicate and numbers worked by hand stay; what else is expected has to be recorded.
    """
    public = [check for check in checks if check.public]
    module = public[0].probe.__module__
    predicates = {check.holds for check in public if check.holds is not None}
    taken = [(module, c.name) for c in public] + [(p.__module__, p.__name__) for p in predicates]
    sources = _collect(taken)
    decorators = {check.name: _describe(check) for check in public}
    statements = ast.parse(sources.pop(module)).body
    for statement in statements:
        if isinstance(statement, ast.FunctionDef) and statement.name in decorators:
            statement.decorator_list = [ast.parse(decorators[statement.name], mode="eval").body]
    imports = [f"from {p.__module__} import {p.__name__}" for p in predicates]
    imports = [line for line in sorted(imports) if not line.startswith(f"from {module} ")]
    text = "\n\n\n".join(["\n".join(imports), *map(ast.unparse, statements)])
    # What is expected is written by repr, which leaves infinities and NaN bare.
    header = "from math import inf, nan\n\nfrom utils.grading.checks import check"
    return sources | {module: f"{header}\n{text}\n"}


def _describe(check: Check) -> str:
    """Return the decorator of a public check without its oracle."""
    kept = ("points", "seeds", "tier", "slow", "rtol", "atol", "beside", "float64")
    options = {"public": True} | {name: getattr(check, name) for name in kept}
    if check.is_worked:
        options["expected"] = check.expected
    written = [f"{name}={value!r}" for name, value in options.items()]
    written += [f"holds={check.holds.__name__}"] if check.holds is not None else []
    return f"check({check.exercise!r}, {', '.join(written)})"


def _collect(start: list[tuple[str, str]]) -> dict[str, str]:
    """Return the sources that these names, each with its module, need: imported ones first."""
    names: dict[str, set[str]] = defaultdict(set)  # that are taken, by module
    imports: dict[str, set[str]] = defaultdict(set)  # which other modules they are taken from
    waiting = [*start]
    while waiting:
        module, name = waiting.pop()
        if name not in names[module]:
            names[module].add(name)
            used = _find_used(module, name)
            imports[module] |= {other for other, _ in used} - {module}
            waiting += used
    order = TopologicalSorter({module: sorted(imports[module]) for module in sorted(names)})
    return {module: _cut(module, names[module]) for module in order.static_order()}


def _find_used(module: str, name: str) -> list[tuple[str, str]]:
    """Return what a name of a module refers to, as modules and names of them."""
    home, original = _get_origins(module).get(name, ("", ""))
    is_cut_down = home not in PACKAGES and home.rpartition(".")[0] in PACKAGES
    found = [(home, original)] if is_cut_down else []
    for statement in _get_statements(module):
        if isinstance(statement, _IMPORTS) or name not in _get_names(statement):
            continue
        for used in get_used_names(statement):
            found.append((module, used))
            home, original = _get_origins(module).get(used, ("", ""))
            if home in PACKAGES:  # `from tests.support import inputs`
                attributes = re.findall(rf"\b{used}\.(\w+)", ast.unparse(statement))
                found += [(f"{home}.{original}", attribute) for attribute in attributes]
    return found


@functools.cache
def _get_origins(module: str) -> dict[str, tuple[str, str]]:
    """Return the names that a module imports from others, with module and name there."""
    imports = [s for s in _get_statements(module) if isinstance(s, ast.ImportFrom)]
    return {get_import_name(a): (str(s.module), a.name) for s in imports for a in s.names}


def _cut(module: str, names: set[str]) -> str:
    """Return the statements of a module that bind one of these names."""
    kept = []
    for statement in _get_statements(module):
        bound = _get_names(statement) & names
        if not bound:
            continue
        if isinstance(statement, _IMPORTS):
            names_kept = [alias for alias in statement.names if get_import_name(alias) in bound]
            statement = type(statement)(**vars(statement) | {"names": names_kept})
        kept.append(ast.unparse(statement))
    return "\n\n".join(kept)


@functools.cache
def _get_statements(module: str) -> tuple[ast.stmt, ...]:
    """Return the statements of a module; `@check(...)`, which names the oracle, is left out."""
    statements = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for statement in statements:
        if isinstance(statement, ast.FunctionDef):
            kept = [d for d in statement.decorator_list if not ast.unparse(d).startswith("check(")]
            statement.decorator_list = kept
    return tuple(statements)


@functools.cache
def _get_names(statement: ast.stmt) -> frozenset[str]:
    if isinstance(statement, _IMPORTS):
        return frozenset(map(get_import_name, statement.names))
    return frozenset(get_bound_names(statement))
