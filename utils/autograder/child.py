"""What runs beside a student's code: it loads the submission, runs a probe and packs what it saw.

Everything here is in the student's reach; what it says is judged elsewhere. It is imported before
the fork, and never with a solution, an oracle or the checks' modules as they are.
"""

import ast
import importlib
import linecache
import marshal
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformer_lens  # noqa: F401  before transformers
import transformers

from utils.autograder import facades
from utils.autograder.modules import Runner, SubmittedModules
from utils.grading import wire
from utils.grading.cells import parse
from utils.grading.extraction import (
    compile_statement,
    count_stubs,
    describe_left_out,
    digest_definitions,
    get_bound_names,
    get_flags,
    is_effect,
    list_imports,
    select_statements,
    split_import,
)
from utils.grading.observation import Answers, Raised, observe
from utils.grading.substitution import (
    ChapterSource,
    alone,
    answer_with,
    build_module,
    find_written,
    is_stub,
)
from utils.models.loading import load_base_model
from utils.plotting import plot_history

MAX_IMPORTS = 500  # from the course, of one file
MAX_DEFINITIONS = 20  # of one name in a file, that are compared


def prepare() -> None:
    """Leave one thread, before the doors close: more of them hang in a forked child."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    sys.argv[1:] = []  # of the grader: a script that reads its arguments has none


def get_ready(action: str, arguments: dict[str, Any]) -> tuple[Callable[[], bytes], str]:
    """Return what does the action, "list_definitions" or "run_probe", and packs what comes of it.

    The probe is made here, before student code is loaded: where that fails, the second result says
    so, and it is no student's error.
    """
    actions: dict[str, Callable[..., Any]] = {
        "list_definitions": list_definitions,
        "run_probe": run_probe,
    }
    try:
        if action == "run_probe":
            arguments = dict(arguments)
            module, name = arguments["probe"]
            for other, source in arguments.pop("modules").items():
                install(other, source)
            arguments["probe"] = getattr(sys.modules[module], name)
    except Exception as error:
        return lambda: b"", f"{type(error).__name__}: {error}"
    return lambda: wire.pack(actions[action](**arguments)), ""


def list_definitions(
    files: list[tuple[str, bytes]],
    names: dict[str, set[str]],
    given: frozenset[str] = frozenset(),
    solved: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """List what a file defines of the chapters' names. Parses and compiles, and runs nothing.

    Gives, by chapter, the defined names; the code that `load` takes; what is wrong with the file
    and what of it is not run, by cell and line, without lines `given` by the course; what it
    imports of the course; how many definitions are stubs; digests of those that are `solved`, and
    the first line of its docstring.
    """
    defined: set[str] = set()
    problems: list[str] = []
    left_out: list[str] = []
    imports: list[list[str]] = []
    first_line = ""
    digests: dict[str, list[str]] = {}
    stubs, code = 0, b""
    for name, data in files:
        try:
            parsed = parse(data, name)
            statements = select_statements(parsed.statements, set().union(*names.values()))
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}"[:300])
        else:
            problems += [problem[:300] for problem in parsed.problems]
            defined |= set().union(*map(get_bound_names, statements))
            stubs += count_stubs(statements)
            left_out += describe_left_out(parsed.statements, statements, given)
            imports += list_imports(statements, facades.COURSE)[:MAX_IMPORTS]
            first_line = get_first_line(parsed.statements)
            for key, found in digest_definitions(parsed.statements, solved).items():
                digests[key] = [digest for digest, _ in found[-MAX_DEFINITIONS:]]
            code = compile_each(statements, get_flags(parsed.statements), parsed.sources)
    mine = {chapter: sorted(defined & its) for chapter, its in names.items() if defined & its}
    return {
        "stubs": stubs,
        "defined": mine,
        "problems": problems,
        "left_out": left_out if mine else [],
        "imports": imports,
        "digests": digests,
        "first_line": first_line,
        "code": torch.tensor([*code], dtype=torch.uint8),
    }


def get_first_line(statements: list[Any]) -> str:
    """Return the first line of a file's docstring; empty where there is none."""
    said = ast.get_docstring(ast.Module(body=statements[:1], type_ignores=[])) or ""
    return said.partition("\n")[0][:100]


def compile_each(statements: list[Any], flags: int, sources: dict[str, str]) -> bytes:
    """Compile each statement, and note its place; an error stands for what the compiler refuses."""
    compiled = []
    for statement in (part for s in statements for part in split_import(s, facades.COURSE)):
        place = f"{statement.place}, line {statement.first_line}"
        try:
            code = compile_statement(statement, flags)
        except Exception as error:
            code = compile(f"raise SyntaxError({str(error)!r})", statement.place, "exec")
        compiled.append((place, code, is_effect(statement)))
    return marshal.dumps((compiled, sources))


def run_probe(
    files: list[tuple[str, bytes]],
    helpers: list[tuple[str, bytes]],
    stand_in: ChapterSource,
    exercise: str,
    probe: Callable[..., Any],
    seeds: list[int],
    is_alone: bool,
    given: dict[str, frozenset[str]],
) -> dict[str, Any]:
    """Run a probe with every seed on what the files define.

    files: of each its name and its code, from `compile_each`.
    helpers: all scripts and notebooks of the submission, which may import one another.
    stand_in: this chapter's solutions without the exercise.
    given: what the chapter's notebook imports of the course, by module.
    """
    facades.shut(stand_in.chapter, exercise, given)
    namespace, log = load(files, helpers, stand_in, is_alone)
    answer = find_written(stand_in, exercise, namespace)
    seen = {"log": log, "is_stub": is_stub(answer)}
    if is_alone and answer is not None:
        with alone(stand_in, exercise, answer, namespace) as student:
            return seen | observe_all(probe, student, seeds)
    return seen | observe_all(probe, answer_with(stand_in, exercise, namespace), seeds)


def observe_all(probe: Any, student: Answers, seeds: list[int]) -> dict[str, Any]:
    observations, printed = [], ""
    for seed in seeds:
        observed, printed = observe(probe, student, seed, torch.float32)
        observations.append(observed)
        if isinstance(observed, Raised):
            break
    return {"observations": observations, "printed": printed}


def install(name: str, source: str) -> None:
    """Install a module of this source, in packages that need no files."""
    package, _, last = name.rpartition(".")
    while package and package not in sys.modules:
        sys.modules[package] = parent = ModuleType(package)
        parent.__path__ = []
        package = package.rpartition(".")[0]
    package = name.rpartition(".")[0]
    module = ModuleType(name)
    module.__file__ = f"<{name}>"
    sys.modules[name] = module
    if package:
        setattr(sys.modules[package], last, module)
    exec(compile(source, module.__file__, "exec"), module.__dict__)


def load(
    files: list[tuple[str, bytes]],
    helpers: list[tuple[str, bytes]],
    stand_in: ChapterSource,
    is_lent: bool,
) -> tuple[dict[str, Any], str]:
    """Run what the files define, and return it with what went wrong.

    What a definition lacks of the chapter, as the class that it re-opens, is lent if so asked.
    """
    module = build_module(stand_in.chapter, "from __future__ import annotations")
    module.__dict__["get_ipython"] = lambda: None  # as where no notebook is open
    loaded = [(name, *marshal.loads(data)) for name, data in files]
    codes = [code for _, compiled, _ in loaded for _, code, _ in compiled]
    runner = Runner()
    # After all that is installed: they stand in for none of it.
    sys.meta_path.append(SubmittedModules(helpers, codes, runner))
    lendable = get_defined_names(stand_in) if is_lent else set()
    lent: dict[str, Any] = {}
    for name, compiled, sources in loaded:
        for place, source in sources.items():  # tracebacks show its lines
            linecache.cache[place] = (len(source), None, source.splitlines(True), place)
        module.__package__ = get_package(name)
        for place, code, is_timed in compiled:
            if missing := lendable.intersection(code.co_names) - module.__dict__.keys():
                lent = lent or vars(build_module(stand_in.chapter, stand_in.source))
                module.__dict__.update({key: lent[key] for key in missing})
            runner.run(place, code, module.__dict__, is_timed)
    return module.__dict__, "\n".join(runner.said)


def get_defined_names(source: ChapterSource) -> set[str]:
    return set().union(*map(get_bound_names, ast.parse(source.source).body))


def get_package(name: str) -> str:
    """Return the package of a file, for its relative imports: from the last folder on whose name
    is none."""
    parts = Path(name).parts[:-1]
    strange = [n for n, part in enumerate(parts, 1) if not part.isidentifier()]
    return ".".join(parts[max(strange, default=0) :])


def warm_up(name: str) -> None:
    """Do once what takes longer the first time, before the fork: boot, run, train and plot."""
    model = load_base_model(name, device="cpu")
    ids = torch.ones(2, 4, dtype=torch.long)
    model(ids, attention_mask=ids, return_type="logits").sum().backward()
    with torch.no_grad():
        model(ids, attention_mask=ids, use_cache=True, return_type="logits_and_cache")
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()
    with tempfile.TemporaryDirectory() as folder:
        plot_history({"run": [{"phase": 1, "reward": 0.0}]}, Path(folder, "metrics.png"))


def import_all(modules: tuple[str, ...]) -> None:
    """Import, before the fork, what a chapter imports, some of it lazily."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in modules:
        importlib.import_module(name)
