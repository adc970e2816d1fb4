"""Changes of one place of a function: operators, signs, numbers, slices, calls, statements, and
arguments that have another default or are ignored."""

import ast
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Calls of functions that begin so check arguments; statements that begin so record what is shown.
CHECKING = ("require", "check_", "_check_")
RECORDING = ("self.metrics", "self.record_", "self._record_")
# On one device, and for sequences of one length, these change nothing.
KEPT_KEYWORDS = {"device", "strict"}

EXCHANGED: tuple[tuple[Any, Any], ...] = (
    *((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr), (ast.Lt, ast.LtE)),
    *((ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)),
    *(("sum", "mean"), ("amax", "amin"), ("max", "min"), ("maximum", "minimum")),
    *(("exp", "expm1"), ("log_softmax", "softmax"), ("all", "any")),
)
REPLACED: tuple[tuple[Any, Any], ...] = (
    *((ast.FloorDiv, ast.Mult), (ast.Pow, ast.Mult), ("logsumexp", "amax"), ("square", "abs")),
    *(("argmax", "argmin"), ("zeros_like", "ones_like"), ("zeros", "ones"), ("zeros_", "ones_")),
    *(("repeat_interleave", "repeat"), ("copy_", "add_"), ("std", "var")),
)
OTHER = dict((*EXCHANGED, *((other, one) for one, other in EXCHANGED), *REPLACED))
DROPPED_METHODS = set(
    "detach clone masked_fill clamp flip cumsum sort float exp square long int contiguous squeeze "
    "unsqueeze reshape expand_as to data".split()
)


def mutate(function: ast.FunctionDef, dropped: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield every change of a function: a name that is unique in it and has no line number, and the
    function's new source.

    dropped: functions that may be left out, so that their first argument stands in their place.
    """
    names: Counter[str] = Counter()
    for old, new, put in _find_changes(ast.Module(function.body, []), dropped):
        name = f"{_show(old)} -> {_show(new)}"
        names[name] += 1
        put(new)
        changed = _unparse(function)
        put(old)
        yield name if names[name] == 1 else f"{name} ({names[name]})", changed
    yield from _change_arguments(function)
    for decorator in function.decorator_list:
        if "no_grad" in (text := ast.unparse(decorator)):
            without = copy.copy(function)
            without.decorator_list = [d for d in function.decorator_list if d is not decorator]
            yield f"@{text} -> nothing", _unparse(without)


def get_names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _unparse(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def _show(node: ast.AST) -> str:
    if isinstance(node, ast.Pass):
        return "nothing"
    text = _unparse(node)
    if isinstance(node, ast.If | ast.With):
        return text.splitlines()[0]
    return f"[{text}]" if isinstance(node, ast.Slice) else text


# --- Where ---------------------------------------------------------------------------------------


def _find_changes(
    tree: ast.AST, dropped: Iterable[str]
) -> Iterator[tuple[ast.AST, ast.AST, Callable[[ast.AST], None]]]:
    """Yield each node below a tree with one that may replace it, and what puts either there."""
    for node, put in _find_children(tree):
        if _is_kept(node):
            continue
        if isinstance(tree, ast.Call | ast.keyword) and ast.unparse(node) == "-1":
            yield node, ast.Constant(0), put  # for most tensors here axis 1 is the last one
            continue
        for new in drop(node) if isinstance(node, ast.stmt) else change(node, dropped):
            yield node, new, put
        yield from _find_changes(node, dropped)


def _find_children(tree: ast.AST) -> Iterator[tuple[ast.AST, Callable[[ast.AST], None]]]:
    for name, value in ast.iter_fields(tree):
        if isinstance(value, ast.AST):
            yield value, functools.partial(setattr, tree, name)
        elif isinstance(value, list):
            for i, node in enumerate(value):
                if isinstance(node, ast.AST):
                    yield node, functools.partial(value.__setitem__, i)


def _is_kept(node: ast.AST) -> bool:
    """Return whether a node stays as it is: an argument's check, an error, or a record."""
    called = node.value if isinstance(node, ast.Expr) else node
    return (
        isinstance(node, ast.arguments | ast.Raise)
        or (isinstance(node, ast.keyword) and node.arg in KEPT_KEYWORDS)
        or (isinstance(node, ast.Expr) and ast.unparse(node).startswith(RECORDING))
        or getattr(getattr(called, "func", None), "id", "").startswith(CHECKING)
    )


# --- What ----------------------------------------------------------------------------------------


def drop(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield a statement left out, or its condition held true or false."""
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.Expr | ast.AugAssign) and not is_docstring:
        yield ast.Pass()
    elif isinstance(statement, ast.If):
        for constant in (True, False):
            yield ast.If(ast.Constant(constant), statement.body, statement.orelse)
    elif isinstance(statement, ast.With):
        yield ast.If(ast.Constant(True), statement.body, [])
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Name) and target.id in get_names(statement.value):
            yield ast.Pass()


def change(node: ast.AST, dropped: Iterable[str]) -> Iterator[ast.AST]:
    """Yield every way in which one node is changed."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in OTHER:
            yield ast.BinOp(node.left, OTHER[type(node.op)](), node.right)
        yield node.left
        if isinstance(node.op, ast.Sub):
            yield ast.BinOp(node.right, ast.Sub(), node.left)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        yield ast.Compare(node.left, [OTHER[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield ast.BoolOp(other, node.values)
        yield from node.values
    elif isinstance(node, ast.Constant):
        yield from (ast.Constant(value) for value in _change_constant(node.value))
    elif isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.Call):
        yield from _change_call(node, dropped)
    elif isinstance(node, ast.Slice):
        if node.lower is not None:
            yield ast.Slice(None, node.upper, node.step)
        if node.upper is not None:
            yield ast.Slice(node.lower, None, node.step)
    elif isinstance(node, ast.Attribute) and node.attr in ("T", "data"):
        yield node.value


def _change_constant(value: Any) -> Iterable[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if isinstance(value, float):
        return [0.0, 2 * value] if value else [1.0]
    return []


def _change_call(node: ast.Call, dropped: Iterable[str]) -> Iterator[ast.AST]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if isinstance(node.func, ast.Attribute):
        if name in OTHER:
            renamed = ast.Attribute(node.func.value, OTHER[name])
            yield ast.Call(renamed, node.args, node.keywords)
        if name in DROPPED_METHODS and "device" not in ast.unparse(node):
            yield node.func.value
    elif name in dropped and node.args:
        yield node.args[0]
    for keyword in node.keywords:
        if keyword.arg not in KEPT_KEYWORDS:
            yield ast.Call(node.func, node.args, [k for k in node.keywords if k is not keyword])
    commutes = name in ("minimum", "maximum") or (name in ("min", "max") and len(node.args) == 2)
    for i in range(0 if commutes else len(node.args) - 1):
        swapped = list(node.args)
        swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
        yield ast.Call(node.func, swapped, node.keywords)
    if len(node.args) > 1 and not isinstance(node.args[-1], ast.Starred):
        yield ast.Call(node.func, node.args[:-1], node.keywords)


def _change_arguments(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Yield a function with each argument that has a default ignored, or with another one."""
    signature = function.args
    named = signature.args[len(signature.args) - len(signature.defaults) :]
    places: list[Any] = [(name, signature.defaults, i) for i, name in enumerate(named)]
    places += [(name, signature.kw_defaults, i) for i, name in enumerate(signature.kwonlyargs)]
    for argument, defaults, i in places:
        if (default := defaults[i]) is None:  # of a keyword that has to be given
            continue
        changed = copy.copy(function)
        ignored = ast.Assign([ast.Name(argument.arg, ast.Store())], default)
        changed.body = [ignored, *function.body]
        yield f"{argument.arg} is ignored", _unparse(changed)
        for value in _change_constant(getattr(default, "value", None)):
            defaults[i] = ast.Constant(value)
            text = _unparse(function)
            defaults[i] = default
            yield f"{argument.arg}={_show(default)} -> {argument.arg}={value}", text
