"""What runs beside a student's code: it loads the submission, runs a probe and packs what it saw.

Everything here is in the student's reach; what it says is judged elsewhere. It is imported before
the fork, and never with a solution, an oracle or the checks' modules as they are.
"""

import ast
import contextlib
import functools
import linecache
import marshal
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType
from typing import Any

import torch
import transformer_lens  # noqa: F401  before transformers
import transformers

from utils.autograder import facades, modules
from utils.grading import extraction, packing, substitution
from utils.grading.cells import Parsed, parse
from utils.grading.observation import Raised, observe
from utils.grading.substitution import ChapterSource, build_module
from utils.models.loading import load_base_model
from utils.plotting import plot_history

File = tuple[str, bytes]  # its name and what is in it
MAX_IMPORTS = 500  # from the course, of one file
MAX_WRITTEN = 20  # modules that the cells of one file write
MAX_PLACES = 20_000  # of statements of one file, that a report may name
MAX_DEFINITIONS = 20  # of one name in a file, that are compared


def prepare() -> None:
    """Leave one thread, before the doors close: more of them hang in a forked child."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    transformers.utils.logging.disable_progress_bar()
    sys.argv[1:] = []  # of the grader: a script that reads its arguments has none


@dataclass
class ProbeRun:
    """A probe to run, and the work that it is run on."""

    probe: tuple[str, str]  # its module and name
    modules: dict[str, bytes]  # compiled: the probe's, and the solutions of earlier chapters
    seeds: list[int]
    exercise: str
    stand_in: ChapterSource  # this chapter's solutions without the exercise
    is_alone: bool
    files: list[File]  # what defines the chapter's names, each as its code, from `pack_code`
    helpers: list[File]  # all scripts and notebooks, which may import one another
    data: list[File]  # small files that are no code
    given: dict[str, frozenset[str]]  # what the chapter's notebook imports of the course, by module
    patience: float  # seconds for one statement
    skipped: Collection[str]  # the places of those that took longer


def get_ready(action: str, arguments: Any) -> tuple[Callable[[], bytes], str]:
    """Return what does the action, "list_definitions" or "run_probe", and packs what comes of it.

    The probe is made here, before student code is loaded: where that fails, the second result says
    so, and it is no student's error.
    """
    if action == "list_definitions":
        return lambda: packing.pack(list_definitions(**arguments)), ""
    try:
        for other, code in arguments.modules.items():
            install(other, marshal.loads(code))
        module, name = arguments.probe
        probe = getattr(sys.modules[module], name)
    except Exception as error:
        return lambda: b"", f"{type(error).__name__}: {error}"
    return lambda: packing.pack(run_probe(probe, arguments)), ""


def list_definitions(
    file: File,
    names: dict[str, set[str]],
    given: frozenset[str] = frozenset(),
    solved: frozenset[str] = frozenset(),
    patience: float = modules.MAX_STATEMENT_SECONDS,
) -> dict[str, Any]:
    """List what a file defines of the chapters' names. Parses and compiles, and runs nothing.

    names: those of each chapter. given: lines of the course's own notebooks, of which nothing is
    said. solved: names of which digests are wanted. A cell that takes more than `patience` seconds
    to parse costs itself. Places come without the file's name; "problems" say what is wrong with
    the file and "left_out" what of it is not run, both by cell and line.
    """
    name, data = file
    parsed, kept, statements = read(name, data, set().union(*names.values()), patience)
    defined, unfinished = find_names(parsed, statements, names)
    digests = extraction.digest_definitions(parsed.statements, solved)
    code = pack_code(statements, extraction.get_flags(parsed.statements), parsed.sources)
    return {
        "defined": defined,  # by chapter
        "unfinished": unfinished,  # names that are stubs
        "stubs": extraction.count_stubs(statements),
        "places": list_places(parsed, name),
        "written": [  # modules that cells write
            [module, text, list_places(parse(text.encode(), module), module)]
            for module, text in [*parsed.written.items()][:MAX_WRITTEN]
        ],
        "problems": parsed.problems,
        "left_out": extraction.describe_left_out(kept, statements, given) if defined else [],
        "imports": extraction.list_imports(statements, facades.COURSE)[:MAX_IMPORTS],
        "digests": {
            key: [digest for digest, _ in found[-MAX_DEFINITIONS:]]
            for key, found in digests.items()
        },
        "first_line": get_first_line(parsed.statements),
        "code": torch.tensor([*code], dtype=torch.uint8),  # as `load` takes it
    }


def read(
    name: str, data: bytes, names: set[str], patience: float
) -> tuple[Parsed, list[Any], list[Any]]:
    """Read a file: what is parsed, its statements without stubs that would hide an answer, and
    those of them that these names need. Of a file that can't be read there is the problem alone."""
    try:
        parsed = parse(data, name, functools.partial(limit_reading, patience))
        below = extraction.find_stubs_below(parsed.statements, names)
        kept = [s for s in parsed.statements if not any(s is stub for stub in below)]
        statements = extraction.select_statements(kept, names)
    except Exception as error:
        is_said = isinstance(error, ValueError)  # by `parse`, with the file's name
        said = f"{error}" if is_said else f"{name}: {type(error).__name__}: {error}"
        return Parsed(problems=[said[:300]]), [], []
    parsed.problems = [problem[:300] for problem in parsed.problems] + [
        f"{s.place}, line {s.first_line}: this stub of {s.name} is left out, as an answer"
        " stands above it"
        for s in below
    ]
    return parsed, kept, statements


def find_names(
    parsed: Parsed, statements: list[Any], names: dict[str, set[str]]
) -> tuple[dict[str, list[str]], list[str]]:
    """Find the names of each chapter that a file defines or may define, and which of all these are
    stubs."""
    stems = {PurePosixPath(name).stem for name in parsed.written}
    imports = [s for s in statements if isinstance(s, ast.ImportFrom)]
    from_written = [s for s in imports if str(s.module).rpartition(".")[2] in stems]
    finished = [s for s in statements if not extraction.is_stub_definition(s)]
    answered = set().union(*map(extraction.get_bound_names, finished))
    defined = set().union(*map(extraction.get_bound_names, statements))
    defined |= {extraction.get_import_name(alias) for s in from_written for alias in s.names}
    # What strings may define is known when it has run: of the chapters that are here, if any is.
    likely = defined | extraction.get_names_in_strings(finished)
    here = {chapter for chapter, its in names.items() if defined & its} or names.keys()
    found = {chapter: sorted(likely & its) for chapter, its in names.items() if chapter in here}
    unfinished = set().union(*names.values()) & defined - answered
    return {chapter: mine for chapter, mine in found.items() if mine}, sorted(unfinished)


@contextlib.contextmanager
def limit_reading(seconds: float, place: str, problems: list[str]) -> Iterator[None]:
    """Say of a place that takes longer that it is not read."""
    try:
        with modules.limit_time(seconds):
            yield
    except modules.TookTooLong:
        problems.append(f"{place}: not read, as that takes more than {seconds:.2g} s")


def list_places(parsed: Parsed, name: str) -> list[str]:
    """List where the statements of a file stand, without its name."""
    places = [f"{s.place}, line {s.first_line}" for s in parsed.statements[:MAX_PLACES]]
    return [place.removeprefix(name) for place in places]


def get_first_line(statements: list[Any]) -> str:
    """Return the first line of a file's docstring; empty where there is none."""
    said = ast.get_docstring(ast.Module(body=statements[:1], type_ignores=[])) or ""
    return said.partition("\n")[0][:100]


def pack_code(statements: list[Any], flags: int, sources: dict[str, str]) -> bytes:
    """Compile each statement, and note its place, its kind, the name of a definition or an import,
    and whether it is a stub."""
    compiled = []
    for statement, place, code in extraction.compile_each(statements, flags):
        kind, name = extraction.get_kind(statement), getattr(statement, "name", "")
        name = extraction.get_import_name(statement.names[0]) if kind == "import" else name
        compiled.append((place, code, kind, name, extraction.is_stub_definition(statement)))
    return marshal.dumps((compiled, sources))


def run_probe(probe: Callable[..., Any], run: ProbeRun) -> dict[str, Any]:
    """Run a probe with every seed on what the files define. Where one of their statements takes too
    long, nothing is run after it: it has to be skipped, another time."""
    facades.shut(run.stand_in.chapter, run.exercise, run.given)
    lay_out(run.data)
    runner = modules.Runner(run.patience, run.skipped)
    namespace, own = load(run, runner)
    seen: dict[str, Any] = {
        "log": "\n".join(runner.said), "failed": runner.failed, "replaced": own,
        "slow": runner.slow, "stopped": runner.stopped,
        "is_stub": False, "observations": [], "printed": "",
    }  # fmt: skip
    if runner.slow:
        return seen
    answer = substitution.find_written(run.stand_in, run.exercise, namespace)
    seen["is_stub"] = substitution.is_stub(answer)
    with contextlib.ExitStack() as stack:
        if run.is_alone and answer is not None:
            by_itself = substitution.alone(run.stand_in, run.exercise, answer, namespace)
            student = stack.enter_context(by_itself)
        else:
            student = substitution.answer_with(run.stand_in, run.exercise, namespace)
        for seed in run.seeds:
            observed, seen["printed"] = observe(probe, student, seed, torch.float32)
            seen["observations"].append(observed)
            if isinstance(observed, Raised):
                break
    return seen


def lay_out(data: list[tuple[str, bytes]]) -> None:
    """Write a submission's own files into the folder of this process, where its code looks."""
    for name, content in data:
        path = Path(*(part for part in PurePosixPath(name).parts if part not in ("/", "..")))
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def install(name: str, code: CodeType) -> None:
    """Install a module of this code, in packages that need no files."""
    module = facades.make_package(name)
    module.__file__ = f"<{name}>"
    exec(code, module.__dict__)


def load(run: ProbeRun, runner: modules.Runner) -> tuple[dict[str, Any], list[str]]:
    """Run what the files define, and return it, with the names of what is the course's instead.

    What a definition lacks of the chapter, as the class that it re-opens, is lent to an exercise
    that is run alone. What the chapter gives is the course's where it fails as it was handed in, or
    names what could not be imported; methods, where one exercise is run alone. A stub hides nothing
    that another file has.
    Where there are data, each file runs in its folder.
    """
    stand_in = run.stand_in
    module = build_module(stand_in.chapter, "from __future__ import annotations")
    module.__dict__["get_ipython"] = lambda: None  # as where no notebook is open
    loaded = [(name, *marshal.loads(data)) for name, data in run.files]
    codes = [entry[1] for _, compiled, _ in loaded for entry in compiled]
    # After all that is installed: they stand in for none of it.
    finder = modules.SubmittedModules(run.helpers, codes, runner)
    sys.meta_path.append(finder)
    module.__dict__.update(finder.get_builtins())
    home = Path.cwd()
    lendable = stand_in.get_names() if run.is_alone else set()
    lent: dict[str, Any] = {}
    missed: set[str] = set()
    replaced: list[str] = []
    get_given = functools.cache(stand_in.get_given_names)  # few need it
    for name, compiled, sources in loaded:
        for place, source in sources.items():  # tracebacks show its lines
            linecache.cache[place] = (len(source), None, source.splitlines(True), place)
        module.__package__ = modules.get_package(name) or modules.name_folder(name)
        if run.data:
            enter_folder(home / name, module)
        before = module.__dict__.keys() - lent.keys()
        for place, code, kind, bound, stub in compiled:
            if stub and bound in before:
                continue
            if missing := lendable.intersection(code.co_names) - module.__dict__.keys():
                lent = lent or vars(build_module(stand_in.chapter, stand_in.source))
                module.__dict__.update({key: lent[key] for key in missing})
            lacking = missed - module.__dict__.keys()
            is_old = kind == "definition" and lacking & modules.get_all_names(code)
            is_run = not (is_old and bound in get_given())
            if is_run and runner.run(place, code, module.__dict__, kind):
                if is_old and run.is_alone and isinstance(cls := module.__dict__.get(bound), type):
                    replaced += take_old_methods(cls, code, get_given(), lacking)
            elif kind == "import":
                missed.add(bound)
            elif kind == "definition" and bound in get_given():
                replaced += give_again(bound, stand_in, module.__dict__)
    return module.__dict__, replaced


def give_again(name: str, stand_in: ChapterSource, names: dict[str, Any]) -> list[str]:
    """Put the course's own definition into these names, beside the student's exercises, and return
    its name; none if it needs an exercise that is not there."""
    source = stand_in.without(*stand_in.tops, *stand_in.exercises)
    try:
        names[name] = source.build(**{top: names.get(top) for top in stand_in.tops})[name]
    except Exception:
        return []
    return [name]


def take_old_methods(cls: type, code: CodeType, given: set[str], lacking: set[str]) -> list[str]:
    """Take the methods that the chapter gives out of a class if one of them names what is lacking:
    the chapter's own, which fit one another, stand in for them. Return the class's name then."""
    bodies = [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    methods = [m for body in bodies for m in body.co_consts if isinstance(m, CodeType)]
    names = {m.co_name: f"{cls.__name__}.{m.co_name}" for m in methods}
    if not any(lacking & modules.get_all_names(m) and names[m.co_name] in given for m in methods):
        return []
    for name in vars(cls).keys() & names:
        if names[name] in given:
            delattr(cls, name)
    return [cls.__name__]


def enter_folder(path: Path, module: ModuleType) -> None:
    """Work where a file lies, as the one who wrote it."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.chdir(path.parent)
        module.__file__ = str(path)


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
