"""From the bytes of a notebook or a script to its statements, each with the place where it stands.

Nothing runs: the text is only parsed. A cell that does not parse costs the statements that cannot
be told apart from the error.
"""

import ast
import contextlib
import importlib
import io
import itertools
import json
import re
import sys
import textwrap
import tokenize
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

SUFFIXES = (".ipynb", ".py")
MAX_SOURCE_BYTES = 2**25  # of a file without its outputs
MAX_LINES_IN_PIECES = 10_000  # of a text with errors: a longer one is left out as a whole
MAX_PIECES = 40  # that one statement may span there, as a long string in column 0 does
MAX_SAID = 3  # errors of a cell that are named
# Cell magics whose body runs here, and leaves its names behind; `%%timeit` leaves none.
PYTHON_MAGICS = {"time", "capture", "prun", "debug", "wandb", "memit", "mprun", "pyinstrument"}
MAX_ERRORS = 200  # after which the rest of a text is not read
MAX_MAGICS = 100  # of a cell that IPython transforms, which takes their square
UNPARSABLE = (SyntaxError, ValueError, RuntimeError, MemoryError)  # RecursionError among them
# What Python 3.12 reads, and one before it refuses:
_OF_3_12 = re.compile(r"\s*(async\s+)?(def|class)\s+\w+\s*\[|\s*type\s+\w+.*=")
# What goes on with the statement above, though it stands in column 0.
_MAIN_GUARD = re.compile(r"__name__ == '__main__'|'__main__' == __name__")
_CONTINUES = re.compile(r"(else|elif|except|finally)\b|[)\]}]")
_TIME_MAGIC = re.compile(r"^([ \t]*)%time[ \t]+(?=\S)", re.M)  # its statement binds names
_CELL_MAGIC = re.compile(r"\s*%%(\w*)([^\n]*)\n?")
_WRITTEN = re.compile(r"[ \t]+(-a[ \t]+|--append[ \t]+)?[\"']?([\w./-]+\.py)[\"']?[ \t]*")
_RUN_MAGIC = re.compile(
    r"^%run\s+(?:-\w+\s+)*[\"']?([\w./-]+?)(?:\.ipynb|\.py)?[\"']?(?:\s.*)?$", re.M
)


@dataclass
class Parsed:
    """The statements of a file, and what is wrong with it, by cell and line."""

    # Each has where it begins (`place`, such as "hw.ipynb, cell 3", and `first_line`) and how its
    # first line reads (`line`).
    statements: list[Any] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)  # the texts of the places
    # Modules of `%%writefile` that it imports.
    written: dict[str, str] = field(default_factory=dict)


def parse(data: bytes, name: str, limit: Callable[[str, list[str]], Any] | None = None) -> Parsed:
    """Parse a script, or the code cells of a notebook.

    limit: what the reading of a place runs in, a context that adds to the problems what went wrong.
    Raises ValueError for what is neither; `name` tells which it should be.
    """
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"the submission should be a .py or .ipynb file, but is {name}")
    text = _decode(data)
    sources = {name: text} if suffix == ".py" else _read_cells(text, name)
    if sum(map(len, sources.values())) > MAX_SOURCE_BYTES:
        raise ValueError(f"the code of {name} should have at most {MAX_SOURCE_BYTES >> 20} MB")
    parsed = Parsed()
    for place, source in sources.items():
        with limit(place, parsed.problems) if limit else contextlib.nullcontext():
            _parse_source(source, place, parsed)
    _keep_what_is_imported(parsed)
    return parsed


def _read_cells(text: str, name: str) -> dict[str, str]:
    """Return the code cells of a notebook, by their places."""
    try:
        notebook = json.loads(text)
        if not isinstance(notebook, dict):
            raise ValueError("it holds other JSON than a notebook's")
        _strip_outputs(notebook)
        # Loaded here: the grammars of its validator take seconds to import.
        nbformat: Any = importlib.import_module("nbformat")
        cells = nbformat.reads(json.dumps(notebook), as_version=4).cells
        numbered = [(n, cell) for n, cell in enumerate(cells, 1) if cell.cell_type == "code"]
        return {f"{name}, cell {n}": cell.source for n, cell in numbered}
    except Exception as error:  # nbformat's own errors share no class
        said = f"{type(error).__name__}: {error}"[:300]
        raise ValueError(f"the submission should be a notebook, but {name}: {said}") from error


def _keep_what_is_imported(parsed: Parsed) -> None:
    """Leave out the modules that cells write and nothing here imports."""
    nodes = [n for s in parsed.statements for n in ast.walk(s)] if parsed.written else []
    aliases = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    modules = {str(n.module) for n in aliases if isinstance(n, ast.ImportFrom)}
    modules |= {alias.name for n in aliases for alias in n.names}
    for text in parsed.written.values():
        modules |= {*re.findall(r"^\s*(?:from|import)\s+([\w.]+)", text, re.M)}
    stems = {name: PurePosixPath(name).stem for name in parsed.written}
    last = {module.rpartition(".")[2] for module in modules}
    for name in [name for name, stem in stems.items() if stem not in last]:
        parsed.problems.append(f"{name}, which a cell writes, is not read: nothing imports it")
        del parsed.written[name]


def _decode(data: bytes) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # as PowerShell's > writes
        return data.decode("utf-16", errors="replace")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError:  # an encoding that there is not, or bytes that are not UTF-8
        encoding = "utf-8-sig"
    return data.decode(encoding, errors="replace")


def _strip_outputs(notebook: Any) -> None:
    """Strip pictures and prints, which can be many times as large as the work."""
    sheets = [notebook, *notebook.get("worksheets", [])]
    for cell in itertools.chain.from_iterable(sheet.get("cells", []) for sheet in sheets):
        cell.pop("attachments", None)
        if cell.get("cell_type") == "code":
            cell["outputs"] = []


def _parse_source(source: str, place: str, parsed: Parsed) -> None:
    """Parse a cell or a script, and add what it holds.

    As Python if it is; else as IPython reads it; else statement by statement.
    """
    text = re.sub(r"\r\n?", "\n", source).replace("\0", "")
    while magic := _CELL_MAGIC.match(text):
        body = _read_magic(magic[1], magic[2], text[magic.end() :], place, parsed)
        text = "\n" * magic[0].count("\n") + body  # all lines keep their numbers
    parsed.problems += [
        f"{place}: %run {match[1]} is not read, as Python imports no file of that name: rename it"
        for match in _RUN_MAGIC.finditer(text)
        if not PurePosixPath(match[1]).name.isidentifier() and not match[1].startswith("-")
    ][:MAX_SAID]
    text = _RUN_MAGIC.sub(_import_instead, text)
    untimed = _TIME_MAGIC.sub(r"\1", text)
    is_long = len(re.findall(r"^\s*[%!]", text, re.M)) > MAX_MAGICS
    for given, read in ((text, str), (untimed, _make_plain if is_long else _transform)):
        try:
            statements = _read_statements(read(given), place)
        except UNPARSABLE:
            continue
        break
    else:
        statements = _parse_in_pieces(_make_plain(untimed), place, parsed.problems)
    parsed.statements += [i for s in statements for i in _open_magic(s, place, parsed)]
    parsed.sources[place] = text


def _open_magic(statement: Any, place: str, parsed: Parsed) -> list[Any]:
    """Return what an exported notebook holds as a string, for `%%time` and the like."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return [statement]
    given = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if ast.unparse(call.func.value) != "get_ipython()" or len(given) < len(call.args):
        return [statement]
    text = ""
    match (call.func.attr, *given):
        case ("run_cell_magic", name, line, body):
            if name in PYTHON_MAGICS or name in ("writefile", "file"):
                text = f"%%{name} {line}\n{body}"
        case ("run_line_magic", name, line):
            text = f"%{name} {line}"
            # What is not read at once never is, as `%time` alone.
            if _RUN_MAGIC.sub(_import_instead, _TIME_MAGIC.sub(r"\1", text)) == text:
                text = ""
    if not text:
        return [statement]
    inner = Parsed(written=parsed.written)
    _parse_source(text, place, inner)
    for found in inner.statements:
        _place(found, place, statement.first_line - found.first_line, found.line)
    parsed.problems += inner.problems
    return inner.statements


def _read_magic(name: str, line: str, body: str, place: str, parsed: Parsed) -> str:
    """Return what runs here of the text below a cell magic; keep the module that it writes."""
    if name in PYTHON_MAGICS:
        return body
    if name in ("writefile", "file") and (written := _WRITTEN.fullmatch(line)):
        before = parsed.written.get(written[2], "") if written[1] else ""
        parsed.written[written[2]] = f"{before}{body}\n"
    elif re.search(r"^\s*(def|class) ", body, re.M):
        parsed.problems.append(f"{place}: not read, as %%{name} keeps no Python names")
    return ""


def _import_instead(match: re.Match) -> str:
    """Return the import that stands for `%run helpers.py`."""
    module = PurePosixPath(match[1]).name
    return f"from {module} import *" if module.isidentifier() else match[0]


def _transform(text: str) -> str:
    """Replace what IPython reads: `!ls`, `%timeit f()`, `f?`, prompts, a cell that is indented."""
    empty = re.match(r"(?:[ \t\f]*\n)*", text)
    return "\n" * (empty[0].count("\n") if empty else 0) + TransformerManager().transform_cell(text)


def _make_plain(text: str) -> str:
    """Empty the lines of magics and the shell, in a text that has errors besides."""
    lines = ["" if line.lstrip().startswith(("%", "!")) else line for line in text.split("\n")]
    return textwrap.dedent("\n".join(lines))


def _read_statements(text: str, place: str, first_line: int = 1) -> list[Any]:
    """Parse a text whose first line is that of its place; each statement keeps its own lines."""
    statements: list[Any] = ast.parse(text).body
    lines = text.split("\n")
    for statement in statements:
        written = lines[statement.lineno - 1].encode()[statement.col_offset :]
        _place(statement, place, first_line - 1, written.decode().strip())
    return [inner for statement in statements for inner in _open_main_guard(statement, place)]


def _place(statement: Any, place: str, shift: int, line: str) -> None:
    """Note where a statement stands, and how its first line reads."""
    ast.increment_lineno(statement, shift)
    decorators = [d.lineno for d in getattr(statement, "decorator_list", [])]
    statement.first_line = min([statement.lineno, *decorators])
    statement.place, statement.line = place, line


def _open_main_guard(statement: Any, place: str) -> list[Any]:
    """Return what stands under `if __name__ == "__main__":`, as it is so where people work."""
    if not isinstance(statement, ast.If) or not _MAIN_GUARD.fullmatch(ast.unparse(statement.test)):
        return [statement]
    for inner in statement.body:
        _place(inner, place, 0, ast.unparse(inner).split("\n")[0])
    return statement.body


def _say_version(lines: list[str], error: str) -> str:
    """Say which Python reads a line that this one refuses, if a newer one does."""
    here = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info >= (3, 12):
        return ""
    if any(map(_OF_3_12.match, lines)):
        return f": this needs Python 3.12, and the grader has {here}"
    return f": Python 3.12 may read it, and the grader has {here}" * error.startswith("f-string")


def _is_decorator(line: str) -> bool:
    try:
        return line.startswith("@") and bool(ast.parse(f"{line}\ndef decorated(): ..."))
    except UNPARSABLE:
        return False


def _parse_in_pieces(text: str, place: str, problems: list[str]) -> list[Any]:
    """Parse a text that has errors, from one line in column 0 to a later one.

    Each error is a problem with its line.
    """
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if re.match(r"[^\s#]", line)]
    starts = [i for i in starts if not _CONTINUES.match(lines[i])]
    ends = [*starts[1:], len(lines)]
    errors, statements, at = [], [], 0
    if len(lines) > MAX_LINES_IN_PIECES:
        errors, starts = [f"{place} is too long to be read in spite of its errors"], []
    while at < len(starts) and len(errors) <= MAX_ERRORS:
        for end in ends[at : at + MAX_PIECES]:
            piece = "\n".join(lines[starts[at] : end])
            try:
                found = _read_statements(piece, place, starts[at] + 1)
            except UNPARSABLE as error:
                if end == ends[at]:  # of the shortest, where the error is that of the statement
                    line = starts[at] + (getattr(error, "lineno", None) or 1)
                    said = getattr(error, "msg", None) or error
                    said = f"{said}{_say_version(lines[line - 1 : line], str(said))}"
                    first = f"{place}, line {line}: {type(error).__name__}: {said}"
                continue
            statements += found
            at = next((i for i, start in enumerate(starts) if start >= end), len(starts))
            break
        else:
            if not _is_decorator(lines[starts[at]]):  # the error is of what it decorates
                errors.append(f"{first} (this statement was left out)")
            at += 1
    more = [f"{place}: {len(errors) - MAX_SAID} more errors"] * (len(errors) > MAX_SAID)
    problems += errors[:MAX_SAID] + more
    return statements
