"""Which statements of a submission the checks need: the rest of a notebook does not run.

Imports are taken, and in source order what defines or alters the exercises' names and what those
use: definitions and assignments, and calls, loops or decorators that fill a container, set an
attribute or a global of them.
"""

import __future__

import ast
import builtins
import contextlib
import copy
import hashlib
import inspect
import re
import symtable
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

# What a notebook calls to look at its work; that it does not run is nothing to be told.
COURSE_CALLS = {"check", "progress", "start", "catch_up", "show_result"}
QUIET_CALLS = COURSE_CALLS | {"print", "display", "help"}
# Functions that alter their first argument, besides those of torch, which end in "_".
_ALTERING = re.compile(
    r"(set|del)attr|shuffle|heap\w+|insort\w*|copyto|put|update_wrapper|\w+[^_]_"
)
# Methods that alter their container, where the statement does more than call them.
_METHODS = re.compile(
    r"append|extend|insert|update|add|setdefault|pop\w*|remove|discard|clear|sort|reverse|"
    r"register\w*|\w+[^_]_"
)
_IMPORTS = ast.Import | ast.ImportFrom
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = _FUNCTIONS | ast.ClassDef
_NOT_RUN = {"annotation", "returns", "decorator_list", "type_comment", "type_params", "ctx", "kind"}
_NAMESPACES = {"globals", "locals", "vars", "setattr"}
_BUILTINS = {*dir(builtins)}  # which decorators and calls alter as little as libraries
ANY_NAME = "*"  # is changed by what binds names that are known only as it runs
MAX_LEFT_OUT = 20  # statements that are named


def select_statements(
    statements: list[Any], exercises: Iterable[str], are_graded: bool = True
) -> list[Any]:
    """Select imports, and the statements that the exercises need, in their order.

    are_graded: a call of one of them, or of a method of it that is no registry's, is an experiment,
    whatever it alters.
    """
    imports = [s for s in statements if isinstance(s, _IMPORTS)]
    taken = {id(s) for s in imports if not _is_future(s)}
    left = [s for s in statements if not isinstance(s, _IMPORTS)]
    exercises = set(exercises)
    functions = _find_effects(left)
    imported = [(s, get_import_name(alias)) for s in imports for alias in s.names]
    # Modules and functions, which are called and alter nothing here.
    libraries = {name for s, name in imported if isinstance(s, ast.Import) or name.islower()}
    for name in exercises & functions.keys() if are_graded else ():
        functions[name] = _EXERCISE
    changed = {
        id(s): get_bound_names(s)
        | _get_imported_names(s)
        | (_get_altered(_walk_running(s), functions) - libraries - _BUILTINS - {""})
        for s in left
    }
    needed = exercises | {ANY_NAME}
    while more := [s for s in left if changed[id(s)] & needed]:
        taken |= {id(s) for s in more}
        left = [s for s in left if id(s) not in taken]
        needed = needed.union(*map(get_used_names, more))
    return [s for s in statements if id(s) in taken]


def get_import_name(alias: ast.alias) -> str:
    """Return the name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def describe_left_out(
    statements: list[Any], taken: list[Any], given: Collection[str] = ()
) -> list[str]:
    """Say which statements do something and are not run, by file, cell and line.

    given: first lines of statements of the course's own notebooks, which are not named.
    """
    assignments = ast.Assign | ast.AnnAssign | ast.AugAssign
    quiet = _IMPORTS | DEFINITIONS | assignments | ast.Assert | ast.Pass
    ids = {id(statement) for statement in taken}
    left = [s for s in statements if id(s) not in ids and not isinstance(s, quiet)]
    left = [s for s in left if s.line not in given and not _is_quiet_call(s)]
    said = [f"{s.place}, line {s.first_line}: {s.line[:80]}" for s in left]
    more = [f"and {len(said) - MAX_LEFT_OUT} more"] * (len(said) > MAX_LEFT_OUT)
    return said[:MAX_LEFT_OUT] + more


def _is_quiet_call(statement: ast.stmt) -> bool:
    """Return whether an expression does nothing, or calls what the course or Python shows with."""
    if not isinstance(statement, ast.Expr):
        return False
    if not isinstance(statement.value, ast.Call):
        return not isinstance(statement.value, ast.Await)
    function = statement.value.func
    if isinstance(function, ast.Name):
        return function.id in QUIET_CALLS
    return ast.unparse(function).startswith(("get_ipython()", "plt.", "sys.path."))


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def get_flags(statements: Iterable[ast.stmt]) -> int:
    """Return, for `compile`, what `from __future__ import` asks for, and await at top level."""
    imports = [s for s in statements if isinstance(s, ast.ImportFrom) and _is_future(s)]
    names = {alias.name for s in imports for alias in s.names}
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for name in names & {*__future__.all_feature_names}:
        flags |= getattr(__future__, name).compiler_flag
    return flags


def get_kind(statement: ast.stmt) -> str:
    """Return "import", "definition", which assignments are too, or "effect": what is run for what
    it alters, as a loop or a call is."""
    if isinstance(statement, _IMPORTS):
        return "import"
    is_definition = isinstance(statement, DEFINITIONS | ast.Assign | ast.AnnAssign)
    return "definition" if is_definition else "effect"


def compile_each(statements: Iterable[Any], flags: int) -> Iterator[tuple[Any, str, CodeType]]:
    """Compile each statement, imports name by name, with the lines on which it stands in its place,
    and yield it with that place; an error stands for what the compiler refuses."""
    for statement in (part for s in statements for part in _split_import(s)):
        try:
            module = ast.Module([statement], type_ignores=[])
            code = compile(module, statement.place, "exec", flags)
        except Exception as error:
            code = compile(f"raise SyntaxError({str(error)!r})", statement.place, "exec")
        yield statement, f"{statement.place}, line {statement.first_line}", code


def _split_import(statement: Any) -> Iterator[Any]:
    """Yield a `from ... import` name by name: one that fails costs no other."""
    if not isinstance(statement, ast.ImportFrom):
        yield statement
        return
    for alias in statement.names:
        part = copy.copy(statement)
        part.names = [alias]
        yield part


def list_imports(statements: Iterable[Any], packages: Collection[str]) -> list[list[str]]:
    """Return what is imported from these packages, in functions too: place, module and name.

    The name is empty for a whole module.
    """
    found = []
    for statement in statements:
        place = f"{statement.place}, line {statement.first_line}"
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                found += [[place, alias.name, ""] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found += [[place, str(node.module), alias.name] for alias in node.names]
    return [entry for entry in found if entry[1].partition(".")[0] in packages]


def run_statement(code: CodeType, namespace: dict[str, Any]) -> None:
    """Run a statement; one that awaits, up to its end."""
    result = eval(code, namespace)
    if inspect.iscoroutine(result):
        with contextlib.suppress(StopIteration):
            while True:
                result.send(None)


def count_stubs(statements: Iterable[ast.stmt]) -> int:
    """Count the functions and methods that end by raising NotImplementedError."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return sum(_get_last_error(f).startswith("NotImplementedError") for f in functions)


def _get_last_error(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return what a function raises in its last line, as it is written; "" if it does not."""
    last = function.body[-1]
    return ast.unparse(last.exc) if isinstance(last, ast.Raise) and last.exc is not None else ""


def is_stub_definition(statement: ast.stmt) -> bool:
    """Return whether a function, or each method of a class, does no more than raise
    NotImplementedError without a message."""
    if isinstance(statement, ast.ClassDef):
        methods = [s for s in statement.body if isinstance(s, _FUNCTIONS)]
        return bool(methods) and all(map(is_stub_definition, methods))
    if not isinstance(statement, _FUNCTIONS):
        return False
    is_bare = _get_last_error(statement).removesuffix("()") == "NotImplementedError"
    returns = ast.Return | ast.Yield | ast.YieldFrom
    return is_bare and not any(isinstance(node, returns) for node in ast.walk(statement))


def find_stubs_below(statements: list[Any], names: Collection[str]) -> list[Any]:
    """Find the stubs of these names that stand below an answer, and would hide it."""
    answered: set[str] = set()
    found = []
    for statement in statements:
        if not is_stub_definition(statement):
            answered |= get_bound_names(statement)
        elif statement.name in answered and statement.name in names:
            found.append(statement)
    return found


def get_names_in_strings(statements: list[Any]) -> set[str]:
    """Return what strings may define, where names are made as it runs: by `exec` or `setattr`."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    called = [n.func for n in nodes if isinstance(n, ast.Call)]
    calls = {ast.unparse(f) for f in called if isinstance(getattr(f, "value", f), ast.Name)}
    if not calls & (_NAMESPACES | {"exec", "eval", "type", "builtins.exec", "types.new_class"}):
        return set()
    docstrings = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    constants = [n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in docstrings]
    texts = [value for value in constants if isinstance(value, str)]
    pattern = r"\b(?:def|class)\s+(\w+)|^(\w+)\s*="
    pairs = [pair for text in texts for pair in re.findall(pattern, text, re.M)]
    return {text for text in texts if text.isidentifier()} | {one or other for one, other in pairs}


# --- Definitions, however they are laid out -------------------------------------------------------


def digest_definitions(
    statements: Iterable[ast.stmt], names: Collection[str] | None = None
) -> dict[str, list[tuple[str, int]]]:
    """Return digests and sizes, in AST nodes, of functions, classes and methods by dotted name.

    Comments, layout, docstrings, annotations and decorators do not count. A name that is defined
    several times has several; of those that are asked for, if `names` are given.
    """
    found: dict[str, list[tuple[str, int]]] = {}
    for statement in statements:
        named = [(statement.name, statement)] if isinstance(statement, DEFINITIONS) else []
        if isinstance(statement, ast.ClassDef):
            inner = [s for s in statement.body if isinstance(s, _FUNCTIONS)]
            named += [(f"{statement.name}.{s.name}", s) for s in inner]
        for name, definition in named:
            if names is None or name in names:
                text, size = _normalize(definition)
                digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
                found.setdefault(name, []).append((digest, size))
    return found


def _normalize(definition: Any) -> tuple[str, int]:
    """Write a definition without what is not run, and count its nodes."""
    parts, size = [], 0
    waiting: list[Any] = [definition]
    while waiting:  # no recursion, which could be too deep
        node = waiting.pop()
        if not isinstance(node, ast.AST):
            parts.append(f"{type(node).__name__} {node!r}")
            continue
        fields = {key: value for key, value in ast.iter_fields(node) if key not in _NOT_RUN}
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            fields["body"] = node.body[1:]
        parts.append(f"{type(node).__name__} {','.join(fields)}")
        size += 1
        for value in fields.values():
            waiting += [len(value), *value] if isinstance(value, list) else [value]
    return "\n".join(parts), size


# --- Names that a statement binds, alters and uses ------------------------------------------------


def get_bound_names(statement: ast.stmt) -> set[str]:
    """Return the top-level names that a statement binds, imports aside, or changes (`T.x = f`)."""
    names = set()
    for node in _walk_scope(statement):
        names |= _get_target_roots(node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.MatchMapping):
            names.add(node.rest or "")
        elif isinstance(node, DEFINITIONS | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            names.add(node.name or "")
    return names - {""}


def _get_imported_names(statement: ast.stmt) -> set[str]:
    """Return what is imported under `if` or `try`."""
    imports = [node for node in _walk_scope(statement) if isinstance(node, _IMPORTS)]
    return {get_import_name(alias) for node in imports for alias in node.names}


def get_used_names(statement: ast.stmt) -> set[str]:
    """Return the global names that a statement refers to: no parameter and no local of a function.

    None of what parses and is refused later, as two parameters of one name are.
    """
    try:
        waiting = [symtable.symtable(ast.unparse(statement), "statement", "exec")]
    except (SyntaxError, ValueError, RecursionError):
        return set()
    names = set()
    while waiting:
        table = waiting.pop()
        is_top = table.get_type() == "module"
        names |= {s.get_name() for s in table.get_symbols() if is_top or s.is_global()}
        waiting += table.get_children()
    return names


def _walk_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over what binds names where a statement stands: not into functions and classes, nor to
    the variables of comprehensions."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, DEFINITIONS | ast.Lambda):
            variables = node.target if isinstance(node, ast.comprehension) else None
            waiting += [child for child in ast.iter_child_nodes(node) if child is not variables]


def _walk_running(node: ast.AST) -> Iterator[ast.AST]:
    """Walk over what runs with a statement: not into the bodies of functions."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, _FUNCTIONS):
            waiting += [*node.decorator_list, node.args]
        elif isinstance(node, ast.Lambda):
            waiting.append(node.args)
        else:
            waiting += ast.iter_child_nodes(node)


def _get_target_roots(node: ast.AST) -> set[str]:
    """Return T for `T.method = f`, `T["x"] += 1` and `del T[0]`."""
    if not isinstance(node, ast.Attribute | ast.Subscript) or isinstance(node.ctx, ast.Load):
        return set()
    if isinstance(node, ast.Subscript) and _is_namespace(node.value):  # globals()["x"] = 1
        return _get_strings(node.slice) or {ANY_NAME}
    return {_get_root(node)} - {""}


def _get_root(node: ast.AST) -> str:
    """Return T of `T.x[0].y` and of `T.setdefault("x", []).append`; "" if there is none."""
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func
        else:
            return node.id if isinstance(node, ast.Name) else ""


def _is_namespace(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") in _NAMESPACES


def _get_strings(node: ast.AST) -> set[str]:
    found = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    return {value for value in found if isinstance(value, str)}


# --- Calls: what a function of the submission alters ----------------------------------------------


@dataclass
class _Effects:
    """What calling a function alters: globals, and which of its parameters."""

    parameters: list[str]
    own: set[str]  # its parameters and locals
    names: set[str]  # all that it alters
    nodes: list[ast.AST]

    @property
    def globals(self) -> set[str]:
        return self.names - self.own

    def get_altered_arguments(self, call: ast.Call) -> set[str]:
        """Return the names that are given for parameters that the function alters."""
        given = list(zip(self.parameters, call.args, strict=False))
        given += [(str(k.arg), k.value) for k in call.keywords]
        return {_get_root(value) for name, value in given if name in self.names}


def _find_effects(statements: list[Any]) -> dict[str, _Effects]:
    """Find what each function and class of a submission alters, through those that it calls."""
    found: dict[str, _Effects] = {}
    for statement in statements:
        if isinstance(statement, DEFINITIONS):
            found[statement.name] = _read_effects(statement)
        elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Lambda):
            names = [t.id for t in statement.targets if isinstance(t, ast.Name)]
            found |= {name: _read_effects(statement.value) for name in names}
    before = -1
    while before < (before := sum(len(effects.names) for effects in found.values())):
        for effects in found.values():
            effects.names |= _get_altered(effects.nodes, found)
    return found


def _read_effects(definition: Any) -> _Effects:
    is_class = isinstance(definition, ast.ClassDef)
    functions = [definition]
    if is_class:
        functions = [node for node in definition.body if isinstance(node, _FUNCTIONS)]
    parameters = []
    for function in functions:
        arguments = function.args
        own = [a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
        parameters += own[is_class:]
    nodes = list(ast.walk(definition))
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    altered = declared.union(*map(_get_target_roots, nodes))
    return _Effects(parameters, (stored | {*parameters, "self"}) - declared, altered, nodes)


_EXERCISE = _Effects([], set(), set(), [])


def _get_altered(nodes: Iterable[ast.AST], functions: dict[str, _Effects]) -> set[str]:
    """Return the names that calls and decorators among these nodes alter."""
    altered: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            altered |= _get_altered_by(node, functions)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Attribute):
                root, is_registry = _get_root(function), _METHODS.fullmatch(function.attr)
                if is_registry or functions.get(root) is not _EXERCISE:
                    altered.add(root)
        elif isinstance(node, ast.ClassDef):  # its bases may register it
            bases = [*node.bases, *(keyword.value for keyword in node.keywords)]
            names = {_get_root(base) for base in bases} & functions.keys()
            altered = altered.union(*(functions[name].globals for name in names))
        for decorator in getattr(node, "decorator_list", ()):
            function = getattr(decorator, "func", decorator)
            if isinstance(function, ast.Name) and function.id in functions:
                altered |= functions[function.id].globals  # a call is looked at like any other
            else:  # the registry of `@REGISTRY.register`, and T of `@add_to(T)`
                altered |= {*map(_get_root, (function, *getattr(decorator, "args", ())))}
    return altered


def _get_altered_by(call: ast.Call, functions: dict[str, _Effects]) -> set[str]:
    """Return what a call alters, whatever is done with its value."""
    function = call.func
    if isinstance(function, ast.Name) and function.id in functions:
        effects = functions[function.id]
        return effects.globals | effects.get_altered_arguments(call)
    altered = set()
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    is_method = _is_namespace(getattr(function, "value", None))  # vars().update(x=1)
    if is_method or _is_namespace(call):
        altered |= _get_strings(call) | {keyword.arg or ANY_NAME for keyword in call.keywords}
    if name == "exec" or (is_method and name == "update" and not altered):
        altered.add(ANY_NAME)
    if _ALTERING.fullmatch(name) and call.args:
        altered.add(_get_root(call.args[0]))
    if isinstance(function, ast.Attribute) and _METHODS.fullmatch(name):
        altered.add(_get_root(function))
    return altered
