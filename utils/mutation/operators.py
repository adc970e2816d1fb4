"""Changes of one place of a function: operators, signs, numbers, slices, calls, statements, and
arguments that have another default or are ignored."""

import ast
import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

SKIPPED_CALLS = {"require", "require_option", "check_fields", "_check_group_size"}
RECORDS = ("self.metrics", "self.record_ratios", "self._record_samples")
# On one device, and for sequences of one length, these change nothing.
KEPT_KEYWORDS = {"device", "strict"}

BINARY = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
RENAMED = {
    "sum": "mean",
    "mean": "sum",
    "amax": "amin",
    "amin": "amax",
    "max": "min",
    "min": "max",
    "maximum": "minimum",
    "minimum": "maximum",
    "exp": "expm1",
    "expm1": "exp",
    "log_softmax": "softmax",
    "softmax": "log_softmax",
    "logsumexp": "amax",
    "square": "abs",
    "argmax": "argmin",
    "zeros_like": "ones_like",
    "zeros": "ones",
    "zeros_": "ones_",
    "all": "any",
    "any": "all",
    "repeat_interleave": "repeat",
    "copy_": "add_",
    "std": "var",
}
DROPPED_METHODS = {
    *(
        "detach",
        "clone",
        "masked_fill",
        "clamp",
        "flip",
        "cumsum",
        "sort",
        "float",
        "exp",
        "square",
    ),
    *("long", "int", "contiguous", "squeeze", "unsqueeze", "reshape", "expand_as", "to", "data"),
}
DROPPED_FUNCTIONS = {"at_least_float32", "calc_per_token_kl", "normalize_advantages"}


def change(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every way in which one node is changed."""
    if isinstance(node, ast.BinOp):
        if type(node.op) in BINARY:
            yield ast.BinOp(node.left, BINARY[type(node.op)](), node.right)
        yield node.left
        if isinstance(node.op, ast.Sub):
            yield ast.BinOp(node.right, ast.Sub(), node.left)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
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
        yield from _change_call(node)
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


def _change_call(node: ast.Call) -> Iterator[ast.AST]:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if isinstance(node.func, ast.Attribute):
        if name in RENAMED:
            renamed = ast.Attribute(node.func.value, RENAMED[name], ast.Load())
            yield ast.Call(renamed, node.args, node.keywords)
        if name in DROPPED_METHODS and "device" not in ast.unparse(node):
            yield node.func.value
    elif name in DROPPED_FUNCTIONS:
        yield node.args[0]
    for i, keyword in enumerate(node.keywords):
        if keyword.arg in KEPT_KEYWORDS:
            continue
        yield ast.Call(node.func, node.args, node.keywords[:i] + node.keywords[i + 1 :])
    commutes = name in ("minimum", "maximum") or (name in ("min", "max") and len(node.args) == 2)
    for i in range(0 if commutes else len(node.args) - 1):
        swapped = list(node.args)
        swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
        yield ast.Call(node.func, swapped, node.keywords)
    if len(node.args) > 1 and not isinstance(node.args[-1], ast.Starred):
        yield ast.Call(node.func, node.args[:-1], node.keywords)


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
        is_again = isinstance(target, ast.Name) and target.id in get_names(statement.value)
        if is_again:
            yield ast.Pass()


def get_names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _find_changes(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        called = node.value if isinstance(node, ast.Expr) else node
        name = getattr(getattr(called, "func", None), "id", "")
        if name in SKIPPED_CALLS or isinstance(node, ast.arguments | ast.Raise):
            continue
        if isinstance(node, ast.Expr) and _is_record(node):
            continue
        if isinstance(node, ast.keyword) and node.arg in KEPT_KEYWORDS:
            continue
        is_last_axis = isinstance(tree, ast.Call | ast.keyword) and ast.unparse(node) == "-1"
        changes: Iterable[ast.AST] = drop(node) if isinstance(node, ast.stmt) else change(node)
        if is_last_axis:  # for most tensors here axis 1 is the last one
            changes = [ast.Constant(0)]
        for new in changes:
            yield node, new
        if not is_last_axis:
            yield from _find_changes(node)


def _is_record(statement: ast.Expr) -> bool:
    """Return whether a statement records what is only shown."""
    return ast.unparse(statement).startswith(RECORDS)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        if getattr(node, "origin", node) is self.old:
            return self.new
        return self.generic_visit(node)


def _copy_spine(tree: ast.AST) -> Any:
    """Return a copy whose nodes know what they are copies of."""
    made: Any = copy.copy(tree)
    made.origin = tree
    for field, value in ast.iter_fields(tree):
        if isinstance(value, ast.AST):
            setattr(made, field, _copy_spine(value))
        elif isinstance(value, list):
            setattr(made, field, [_copy_spine(v) if isinstance(v, ast.AST) else v for v in value])
    return made


def _show(node: ast.AST) -> str:
    if isinstance(node, ast.Slice):
        return f"[{ast.unparse(ast.fix_missing_locations(node))}]"
    if isinstance(node, ast.Pass):
        return "nothing"
    if isinstance(node, ast.If | ast.With):
        head = ast.unparse(ast.fix_missing_locations(node)).splitlines()[0]
        return head
    return ast.unparse(ast.fix_missing_locations(node))


def mutate(function: ast.FunctionDef) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every change of a function, with a name that is unique in it and has no line number."""
    names: Counter[str] = Counter()
    body = ast.Module(function.body, [])
    for old, new in _find_changes(body):
        name = f"{_show(old)} -> {_show(new)}"
        names[name] += 1
        if names[name] > 1:
            name += f" ({names[name]})"
        changed = copy.copy(function)
        changed.body = _Replace(old, new).visit(_copy_spine(body)).body
        yield name, changed
    yield from _change_arguments(function)
    for i, decorator in enumerate(function.decorator_list):
        if "no_grad" in (text := ast.unparse(decorator)):
            changed = copy.copy(function)
            changed.decorator_list = [d for j, d in enumerate(function.decorator_list) if j != i]
            yield f"@{text} -> nothing", changed


def _change_arguments(function: ast.FunctionDef) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield a function with each argument that has a default ignored, or with another one."""
    signature = function.args
    named = signature.args[len(signature.args) - len(signature.defaults) :]
    pairs: list[Any] = [*zip(named, signature.defaults, strict=True)]
    pairs += zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    for argument, default in pairs:
        if default is None:  # of a keyword that has to be given
            continue
        changed = copy.copy(function)
        ignored = ast.Assign([ast.Name(argument.arg, ast.Store())], default)
        changed.body = [ignored, *function.body]
        yield f"{argument.arg} is ignored", changed
        for value in _change_constant(getattr(default, "value", None)):
            changed = copy.copy(function)
            changed.args = _Replace(default, ast.Constant(value)).visit(_copy_spine(signature))
            yield f"{argument.arg}={_show(default)} -> {argument.arg}={value}", changed
