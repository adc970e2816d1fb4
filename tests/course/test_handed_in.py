"""What people hand in: right work gets its marks however it is written, and nothing else does."""

import ast
import io
import json
import re
import sys
import textwrap
from pathlib import Path

import nbformat
import pytest

from tests.attacks.containers import make_notebook, write_zip
from tests.course.test_grade import linux, make_grader, sandboxed
from tests.course.test_grade import needs_time as takes_long
from utils.authoring.notebooks import CHAPTERS, SETUP, SOLUTIONS
from utils.autograder import batch, child, given, reading
from utils.autograder import grader as grader_module
from utils.autograder.jobs import Outcome, Reply
from utils.autograder.reading import SubmittedFiles, read_submission
from utils.grading.cells import parse
from utils.grading.checks import get_chapters, get_checks, get_reference, get_top_names
from utils.grading.extraction import (
    describe_left_out,
    select_statements,
)
from utils.grading.judging import Verdict, get_points, get_quick_checks, judge
from utils.grading.observation import StudentNames, run_check
from utils.grading.points import FILE
from utils.grading.reference import get_chapter_source, get_lines, get_source


def get_part(chapter: str, name: str) -> str:
    first, last = get_lines(chapter, name)
    return "\n".join(get_source(chapter).split("\n")[first:last])


MEAN = """
def masked_mean(values, mask, dim=None):
    kept = values.masked_fill(~mask, {fill})
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)
"""
PLAIN = MEAN.format(fill="0.0")
MASK = """
def before_eos(e):
    return (e.cumsum(-1) - e.int()) == 0
def get_completion_mask(completion_ids, eos_token_id):
    return before_eos(completion_ids == eos_token_id)
"""
REINFORCE = """
def calc_reinforce_objective(logprobs, advantages, mask):
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(logprobs)
    weights = advantages.detach().masked_fill(~mask, 0.0)
    return masked_mean(logprobs.masked_fill(~mask, 0.0) * weights, mask)
"""
ADD_TO_CLASS = """
def add_to_class(cls):
    def wrap(f):
        setattr(cls, f.__name__, f)
        return f
    return wrap
"""
VALUE_LOSS = get_part("ch2_ppo", "calc_value_function_loss").replace("@shape_checked\n", "")
IMPORTS = "import torch\nfrom torch import Tensor\nfrom jaxtyping import Bool, Float\n"
PICTURE = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "A" * 40_000_000}}


def notebook(*cells: str) -> bytes:
    return make_notebook(*cells).encode()


def attach_method() -> bytes:
    """Chapter 2 with a method in a cell of its own, attached by a decorator."""
    method = get_part("ch2_ppo", "RLHFTrainer.learning_phase")
    rest = get_source("ch2_ppo").replace(method, "")
    return notebook(rest, ADD_TO_CLASS, f"@add_to_class(RLHFTrainer)\n{textwrap.dedent(method)}")


def make_old() -> bytes:
    """Chapter 2 as before: what its notebook gave calls what the course no longer has, or calls
    otherwise, and an exercise imports what today's notebook does not."""
    source = get_source("ch2_ppo")
    for now, before in (
        ("    check_fields,\n", "    require_integers,\n"),
        ("        check_fields(self)\n", "        require_integers(self, 1, 'batch_size')\n"),
        ("    sample_completions,\n)\n", ")\nfrom utils.models.decoding import sample_faster\n"),
        ("        return sample_completions(\n", "        return sample_faster(\n"),
        ("self._read_scores(minibatch, scored).calc_mean_entropy(minibatch.mask)", "scored[0]"),
        ("        # (1) sample, (2) score\n", "        from utils.tracking import RunLog\n"),
    ):
        assert source.count(now) == 1, now
        source = source.replace(now, before)
    return source.encode()


def zipped(files: dict[str, str | bytes]) -> bytes:
    stream = io.BytesIO()
    write_zip(stream, files)
    return stream.getvalue()


def unpack_into(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, data in files.items():
        path = folder / name.replace("\\", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def mean(fill: str, above: str = "") -> str:
    """A right masked_mean, if `fill` is 0 after what stands above it."""
    return f"{above}\n{MEAN.format(fill=fill)}"


def with_a_picture(data: bytes) -> bytes:
    """A notebook with more in its outputs than a submission may have of code."""
    read = json.loads(data)
    read["cells"][0]["outputs"] = [PICTURE]
    return json.dumps(read).encode()


HANDED_IN = notebook(PLAIN)
OF_WINDOWS: dict[str, str | bytes] = {
    "Jane Doe-1\\pkg\\a.py": "from .tools import zero\ndef left_pad(*a):\n    return zero()",
    "Jane Doe-1\\pkg\\tools.py": "def zero():\n    return 0.0",
    "Jane Doe-1\\b.py": mean("zero() + ZERO", "from .own import ZERO"),
    "Jane Doe-1\\own.py": "ZERO = 0.0",
    "Jane Doe-1\\__init__.py": "",
}
STUB = "def masked_mean(*a):\n    raise NotImplementedError\n"
# By name the files; they answer masked_mean in full, or what ANSWERED says.
RIGHT: dict[str, dict[str, str | bytes]] = {
    "encodings": {
        "b.ipynb": notebook(
            "import torch\n\x0cfrom u import A\nfrom l import B",
            f"# pasted\u2028from\x85the\x0bweb\n{mean('A + B')}",
        ),
        "u.py": "A = 0.0".encode("utf-16"),
        "l.py": "# -*- coding: latin-1 -*-\nf\u00fcll = 0.0\nB = f\u00fcll".encode("latin-1"),
    },
    "modules": {
        "my_ch0.py": f"import torch\n{PLAIN}\nhistory = train()",
        "my_ch2.py": f"{IMPORTS}from my_ch0 import masked_mean\n{VALUE_LOSS}",
    },
    "package": {
        "hw/mine.ipynb": notebook(
            "from mylib.tools import zero",
            "from __future__ import annotations",
            MEAN.format(fill="zero()").replace("dim=None)", "dim=None) -> Unknown"),
        ),
        "hw/mylib/__init__.py": "",
        "hw/mylib/tools.py": "from .numbers import ZERO\n\ndef zero():\n    return ZERO\n",
        "hw/mylib/numbers.py": "def fill():\n    global ZERO\n    ZERO = 0.0\nfill()\n",
    },
    "a strange folder in a zip of Windows, and a relative import at the top": {
        "w.zip": zipped(OF_WINDOWS)
    },
    "run": {
        "mine.ipynb": notebook("%run -n tools.ipynb --steps 3", mean("zero()")),
        "tools.ipynb": notebook("def zero():\n    return 0.0", "zero()\n1 / 0"),
    },
    "statements that an exercise needs": {
        "q.py": mean(
            "CFG['fill'] + L[0] + FILL + T['x'] + E + Config.fill + TABLE['Zero'].fill + G"
            " + ALL['one']() + H + I",
            "CFG = {}\nCFG.update(fill=0.0)\nL = []\nfor x in [0.0]:\n    L.append(x)\n"
            "def c():\n    d()\ndef d():\n    global FILL\n    FILL = 0.0\nc()\n"
            "T = {}\ndef fill(table, at):\n    table[at] = 0.0\nfill(T, 'x')\n"
            "match 1:\n    case 1:\n        (E := 0.0)\n    case _:\n        E = 1.0\n"
            "class Config: pass\nsetattr(Config, 'fill', 0.0)\n"
            "TABLE = {}\nclass Base:\n    def __init_subclass__(cls):\n"
            "        TABLE[cls.__name__] = cls\nclass Zero(Base):\n    fill = 0.0\n"
            "if __name__ == '__main__':\n    G = 0.0\n    train()\n"
            "ALL = {}\nclass Registry:\n    def add(self, f):\n        ALL[f.__name__] = f\n"
            "        return f\nregistry = Registry()\n"
            "@registry.add\ndef one():\n    return 0.0\n"
            "try:\n    H = 0.0\nfinally:\n    pass\n"
            "import torch\nwith torch.no_grad():\n    I = 0.0\n",
        )
    },
    "names made as it runs, in a script with arguments": {
        "q.py": mean(
            "A + B + C + D + E + F + ARGS.fill + IN_COLAB",
            "globals()['A'] = 0.0\nglobals().update(B=0.0)\nfor name in ['C', 'D']:\n"
            "    globals()[name] = 0.0\nconfig = {'E': 0.0}\nglobals().update(config)\n"
            "exec('F = 0.0')\nimport argparse\nparser = argparse.ArgumentParser()\n"
            "parser.add_argument('--fill', default=0.0)\nARGS = parser.parse_args()\n"
            "IN_COLAB = 'google.colab' in str(get_ipython())\n",
        )
    },
    "magics and await": {
        "q.ipynb": notebook(
            "\n    %time A = 0.0\n    !ls\n    A?",
            "async def zero():\n    return 0.0\nB = await zero()",
            f"%%capture out\n%%time\n{mean('A + B')}",
            "%%script false\ndef masked_mean(*a):\n    return 1",
            "\n%%writefile x.py\ndef masked_mean(*a):\n    return 2",
            "%%bash\ndef masked_mean() {\n  ls\n}",
            *("%time", "%run", "%run -i", "%run 01_tools.ipynb", "%time %run 2.py"),
            "!pip install x \\\n  -q\nr = %timeit -o 1 + 1\nif True:\n    %matplotlib inline",
        )
    },
    "counted and logged, endless experiments, many magics": {
        "q.ipynb": notebook(
            "LOG = []\ndef log(x):\n    LOG.append(x)\n    return x",
            PLAIN.replace("    k", "    global N\n    N += log(1)\n    k", 1),
            "N = 0",
            "while True:\n    masked_mean(x, y)",
            "import time\nwhile True:\n    time.sleep(1)\n    log(2)",
            "\n".join(f"!echo {n}" for n in range(600)),
        )
    },
    "a module with errors and an experiment": {
        "a.py": mean("zero() + N", "from tools import zero, N"),
        "tools.py": "import torch\nGEN = torch.Generator('cuda')\ndef draw():\n    return GEN\n"
        "def zero():\n    return 0.0\ndef f(a, a):\n    pass\nN = 0.0\nwhile True:\n    N += 0.0\n",
    },
    "method attached": {"t.ipynb": attach_method()},
    "error below, capitals, zips in zips": {
        "all.zip": zipped({"jane_1.ZIP": zipped({"E.IPYNB": notebook(MASK + "\nprint 'hello'\n")})})
    },
    "conflict": {"e.ipynb": notebook(f"<<<<<<< HEAD{MASK}=======\n{MASK}>>>>>>> main\n")},
    "beside a broken one": {"r.py": f"{REINFORCE}\n\ndef masked_mean(values, mask)):\n    pass\n"},
    "imports of the course that are not given": {
        "q.py": mean(
            "require(True, '') or 0.0",
            "from utils.validation import require, nothing_like_it\nimport utils.train\n"
            "from utils.models import forward\nfrom solutions import ch0_sampling",
        )
    },
    "modules of its own in folders named like the course's": {
        "q.py": mean("zero() * one()", "from utils.tools import zero\nfrom tests.more import one"),
        "utils/tools.py": "def zero():\n    return 0.0\n",
        "tests/more.py": "def one():\n    return 1.0\n",
    },
    "a folded solution that was copied": {
        "hw/mine.ipynb": notebook(
            f"{IMPORTS}from utils.validation import shape_checked",
            get_part("ch0_sampling", "masked_mean"),
        ),
        "hw/notes.py": "x = 1\n",
    },
    "a module that a cell writes": {
        "w.ipynb": notebook(
            "%%writefile helpers.py\ndef zero():\n    return 0.0",
            "%%file mine.py\n" + mean("zero() * ONE", "from helpers import zero, ONE"),
            "%%writefile -a helpers.py\nONE = 1",
            "from mine import masked_mean",
        )
    },
    "a notebook that was exported": {
        "e.py": "FILL = 1.0\nget_ipython().run_line_magic('time', 'FILL = 0.0')\n"
        "get_ipython().run_cell_magic('writefile', 'own.py', 'ONE = 1\\n')\nfrom own import ONE\n"
        "get_ipython().run_cell_magic('bash', '', 'def masked_mean() { ls }')\n"
        f"get_ipython().run_cell_magic('time', '', {mean('FILL * ONE')!r})\n"
    },
    "modules of its own named like others": {
        "a.py": mean(
            "zero() * one() * s.own * math.pi",
            "import random, math\nimport statistics as s\nfrom utils import zero\n"
            "from tests import one\nfrom utils.validation import require\n"
            "require(random.random() < 1, 'the one of the standard library')",
        ),
        "random.py": "def zero():\n    return 1\n",
        "statistics.py": "import math\nown = 0.0\n",
        "utils.py": "from random import zero as z, Random\ndef zero():\n    return z() - 1.0\n",
        "tests.py": "def one():\n    return 1.0\n",
    },
    "files of data": {
        "hw/a.ipynb": notebook(
            "import json\nCFG = json.load(open('data/config.json'))",
            "from b import FILL",
            MEAN.format(fill="CFG['fill'] + FILL"),
        ),
        "hw/data/config.json": '{"fill": 0.0}',
        "hw/b.py": "from pathlib import Path\n"
        "FILL = float((Path(__file__).parent / 'f.txt').read_text())\n",
        "hw/f.txt": "0.0",
    },
    "two drafts, the better first": {
        "final.py": PLAIN,
        "old.py": "def masked_mean(values, mask, dim=None):\n    return values.mean(dim)\n",
    },
    "stubs below and in another file": {
        "a.ipynb": notebook(PLAIN, STUB, "def left_pad(*a):\n    raise NotImplementedError"),
        "b.py": STUB,
    },
    "a training run that is kept": {
        "t.ipynb": notebook(
            "import time\ndef train():\n    time.sleep(100)",
            f"\nrun = train()\n{PLAIN}",
            "masked_mean.run = run",
            "import not_installed",
        )
    },
    "a training run in a module": {
        "a.py": mean("zero()", "from tools import HISTORY, zero\nprint(HISTORY)"),
        "tools.py": "import time\ndef train():\n    time.sleep(100)\nHISTORY = train()\n"
        "def zero():\n    return 0.0\n",
    },
    "one that calls an endless one": {
        "r.py": f"{REINFORCE}def masked_mean(*a):\n    while True:\n        pass\n"
    },
    "of an earlier version of the course": {"old.py": make_old()},
    "large outputs": {"p.ipynb": with_a_picture(notebook(PLAIN))},
}
ANSWERED = {
    "modules": "calc_value_function_loss",
    "method attached": "RLHFTrainer.learning_phase",
    "of an earlier version of the course": "RLHFTrainer.rollout_phase",
    **dict.fromkeys(("error below, capitals, zips in zips", "conflict"), "get_completion_mask"),
    "beside a broken one": "calc_reinforce_objective",
    "one that calls an endless one": "calc_reinforce_objective",
}
# Of those that take long, and of each kind that another shows for every day.
NOT_EVERY_DAY = {
    "large outputs", "a module with errors and an experiment",
    "one that calls an endless one", "of an earlier version of the course",
    "a folded solution that was copied", "a module that a cell writes",
    "counted and logged, endless experiments, many magics",
}  # fmt: skip


ATTACKS = [
    Path(__file__).parents[1] / "attacks" / name
    for name in ("equal/subclass.py", "forging/replies.py", "patching/torch_functions.py",
                 "reading/frames.py", "reading/given_again.py", "ending/by_signals.py",
                 "forging/errors_of_the_grader.py")
]  # fmt: skip
HELPERS = Path(__file__).parents[1] / "attacks" / "reading" / "course_helpers.py"


@pytest.fixture(scope="module")
def graded(tmp_path_factory, request):
    """All of these in one run, each by its own exercise."""
    folder = tmp_path_factory.mktemp("handed in")
    takes_all = request.config.getoption("--size") == "all"
    chosen = [name for name in RIGHT if takes_all or name not in NOT_EVERY_DAY]
    todo = {name: unpack_into(folder / name, RIGHT[name]) for name in chosen}
    todo |= {n: path / next(iter(RIGHT[n])) for n, path in todo.items() if len(RIGHT[n]) == 1}
    todo |= {path.stem: path for path in (*ATTACKS, HELPERS)}
    only = {name: (ANSWERED.get(name, "masked_mean"),) for name in todo}
    only[HELPERS.stem] = ("get_logprobs", "calc_entropy", "sample_next_token", "get_samples")
    return dict(batch.grade_all(todo, 2, batch.Options("secret", FILE, 30, only=only)))


@linux
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[takes_long] * (n in NOT_EVERY_DAY)) for n in RIGHT]
)
def test_right_work_gets_its_marks(name, graded):
    (exercise,) = graded[name]["exercises"]
    lost = [check for check in exercise["checks"] if not check["passed"]]
    assert exercise["score"] == exercise["max_score"], (graded[name]["problems"], lost)


@linux
def test_attacks_score_nothing(graded):
    """A few: test_grade.py has more."""
    attacks = {path.stem: graded[path.stem] for path in ATTACKS}
    assert not {name for name, report in attacks.items() if report["score"] or report["not_graded"]}
    helpers = graded[HELPERS.stem]
    assert [exercise["score"] for exercise in helpers["exercises"]] == [0] * 4
    assert "decoding.draw is left out: the notebook" in str(helpers["problems"])


@sandboxed
def test_what_is_given_and_runs_no_more_is_the_courses_and_said(graded):
    said = str(graded["of an earlier version of the course"]["problems"])
    assert "what the notebook gives of RLHFArgs, RLHFTrainer does not run with this version" in said
    assert "RLHFArgs" not in str(graded["method attached"]["problems"])


@linux
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("imports of the course that are not given",
         [*(f"q.py, line {n}: {name} is left out: the notebook of ch0_sampling does not import it"
            for n, name in enumerate(("utils.validation.nothing_like_it", "utils.train",
                                      "utils.models.forward", "solutions.ch0_sampling"), 1)),
          *(f"q.py, line {n}: " for n in (1, 2, 3, 4))]),
        ("modules of its own in folders named like the course's", []),
        ("a training run in a module",
         ["tools.py, line 4: it takes more than 8 s, and what it defines",
          "a.py, line 1: ImportError: cannot import name 'HISTORY'"]),
        ("a training run that is kept",
         ["t.ipynb, cell 2, line 2: it takes more than 8 s",
          "t.ipynb, cell 4, line 1: ModuleNotFoundError: No module named 'not_installed'"]),
        ("two drafts, the better first",
         ["ch0_sampling: final.py, old.py define the same",
          "ch0_sampling: masked_mean of final.py counts"]),
        ("error below, capitals, zips in zips",
         ["jane_1.ZIP/E.IPYNB, cell 1, line 7: SyntaxError: Missing parentheses"]),
        ("conflict", [f"e.ipynb, cell 1, line {line}:" for line in (1, 6, 12)]),
        ("beside a broken one", ["r.py, line 9: SyntaxError: unmatched ')'"]),
        ("magics and await",
         ["q.ipynb, cell 4: not read, as %%script", "q.ipynb, cell 6: not read, as %%bash",
          "q.ipynb, cell 10: %run 01_tools is not read, as Python imports no file of that name",
          "x.py, which a cell writes, is not read"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_by_file_cell_and_line(name, said, graded):
    problems = graded[name]["problems"]
    assert len(problems) == len(said), problems
    assert all(map(str.startswith, problems, said)), problems


def test_which_python_is_needed_is_said():
    parsed = parse(b"type V = int\ndef f[T](x: T) -> V:\n    return x\n", "n.py")
    said = ": this needs Python 3.12, and the grader has "
    assert sys.version_info >= (3, 12) or all(said in problem for problem in parsed.problems)
    assert parse(b"def f[:\n    pass\nprint 1\n", "n.py").problems[1].count("Python") == 0


def test_a_cell_that_takes_long_to_read_is_named_and_costs_itself():
    slow = "!ls\n" * 90 + "x = f(\n" * 5 + "\n".join(f"a{n} = $x" for n in range(5000))
    file = ("r.ipynb", notebook("import torch", slow, PLAIN))
    seen = child.list_definitions(file, get_top_names(), patience=0.5)
    assert seen["problems"] == ["r.ipynb, cell 2: not read, as that takes more than 0.5 s"]
    assert seen["defined"] == {"ch0_sampling": ["masked_mean"]}


def select(*cells: str) -> tuple[list[str], list[str]]:
    """What runs of a notebook, and what is said of the rest."""
    parsed = parse(notebook(*cells), "hw.ipynb")
    taken = select_statements(parsed.statements, {"masked_mean"})
    return [ast.unparse(s) for s in taken], describe_left_out(parsed.statements, taken)


def test_what_is_left_out_is_said_by_cell_and_line():
    _, said = select(PLAIN, "x = 1\n\ntrainer.train()", "check(masked_mean)\nprint(x)\nimport os")
    assert said == ["hw.ipynb, cell 2, line 3: trainer.train()"]
    _, said = select(PLAIN, *["run()"] * 30)
    assert len(said) == 21
    assert said[-1] == "and 10 more"


def test_experiments_do_not_run():
    above = (
        "import torch\nimport matplotlib.pyplot as plt\nfrom utils.course import check",
        "def show(x):\n    return [*x]",
        "def experiment(x):\n    y = x\n    y.sort()\n    return y",
        "FILL = [0.0]",
        MEAN.format(fill="torch.tensor(FILL[0])"),
    )
    experiments = (
        "torch.manual_seed(0)", "trainer.train()", "RLHFTrainer(masked_mean).train()",
        "print(FILL, len(FILL))", "check(masked_mean)", "history = experiment(FILL)",
        "y = FILL.sum()", "for _ in range(9):\n    print(masked_mean)", "plt.plot(FILL)",
        "show(FILL)",
    )  # fmt: skip
    for experiment in experiments:
        taken, _ = select(*above, experiment)
        assert experiment not in taken
        assert "FILL = [0.0]" in taken


@pytest.mark.parametrize("chapter", get_chapters())
def test_no_experiment_of_a_finished_notebook_runs(chapter):
    """Imports, definitions and constants are all that its exercises need."""
    notebook = (SOLUTIONS / f"{chapter}.ipynb").read_bytes()
    names = {exercise.partition(".")[0] for exercise in get_checks(chapter)}
    needed = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    for statement in select_statements(parse(notebook, "finished.ipynb").statements, names):
        is_constant = isinstance(statement, ast.Assign) and not any(
            isinstance(node, ast.Call) for node in ast.walk(statement)
        )
        assert isinstance(statement, needed) or is_constant, statement.line


def test_methods_of_a_graded_class_are_called_by_experiments_and_its_registry_is_filled():
    source = (
        "class A: ...\nA.load('x')\nA.register('y')\nclass B:\n    @property\n    def f(s): ...\n"
        "b = B()\ntry:\n    A.load('z')\nexcept OSError as error:\n    pass\n"
    )
    taken = select_statements(parse(source.encode(), "a.py").statements, {"A", "B"})
    assert [s.line for s in taken] == ["class A: ...", "A.register('y')", "class B:"]


# --- Points that were not earned ----------------------------------------------------------------


def sort(submitted: SubmittedFiles, monkeypatch) -> tuple[list[str], list[str]]:
    """Which files remain, and what is said, without running any of it."""

    def ask(_, job):
        task, error = child.get_ready(job.action, job.arguments)
        return Reply(Outcome.DONE, task(), (), error)

    monkeypatch.setattr(grader_module.Grader, "ask", ask)
    grader = make_grader(submitted)
    grader.problems += submitted.problems
    found = grader._sort_files()
    return [*dict.fromkeys(n for files, _ in found.values() for n, _ in files)], grader.problems


SHIPPED = get_source("ch0_sampling")
STUBS = (CHAPTERS / "ch0_sampling.ipynb").read_bytes()
SOLVED = (SOLUTIONS / "ch0_sampling.ipynb").read_bytes()
BUNDLE = {f"c/{folder}": "" for folder in ("tests/checks/ch1_lora.py", "utils/course/__init__.py")}
LEFT_OUT = "{} of the course's own files left out"
ALONE = "{} is the course's solution of ch0_sampling"


@pytest.mark.parametrize(
    ("files", "kept", "said"),
    [
        # In the course's folders, however they come.
        (BUNDLE | {"c/chapters/hw.ipynb": HANDED_IN, "c/solutions/ch0_sampling.py": SHIPPED},
         ["c/chapters/hw.ipynb"], LEFT_OUT.format(3)),
        ({"ch1\\solutions\\ch0_sampling.py": SHIPPED, "ch1\\utils\\course\\__init__.py": ""},
         [], LEFT_OUT.format(2)),
        ({"a/chapters/x.ipynb": "{}", "a/solutions/ch0_sampling.py": SHIPPED},
         [], LEFT_OUT.format(1)),
        ({"C/Solutions/ch0_sampling.py": SHIPPED, "C/Utils/Course/__init__.py": ""},
         [], LEFT_OUT.format(2)),
        ({"./c/./solutions//ch0_sampling.py": SHIPPED, "./c/utils/course/__init__.py": ""},
         [], LEFT_OUT.format(2)),
        ({"c/solutions.zip": zipped({"ch0_sampling.py": SHIPPED}), "c/utils/course/x.py": ""},
         [], LEFT_OUT.format(2)),
        ({"solutions/ch0_sampling.py": SHIPPED.replace("\n", "\r\n")}, [], LEFT_OUT.format(1)),
        ({"solutions/hw.py": PLAIN}, ["solutions/hw.py"], None),  # somebody's own folder
        # Beside the work, in any layout.
        ({"hw/mine.ipynb": STUBS, "hw/ch0_sampling.py": f"{SHIPPED}\n"},
         ["hw/mine.ipynb"], LEFT_OUT.format(1)),
        ({"mine.ipynb": STUBS, "renamed.py": f"\ufeff{SHIPPED}"},
         ["mine.ipynb"], LEFT_OUT.format(1)),
        ({"mine.ipynb": STUBS, "ch0.zip": zipped({"x/y.py": SHIPPED.replace("    ", "  ")})},
         ["mine.ipynb"], LEFT_OUT.format(1)),
        ({"mine.ipynb": STUBS, "done.ipynb": SOLVED}, ["mine.ipynb"], LEFT_OUT.format(1)),
        # Alone it is graded, and said.
        ({"hw.py": SHIPPED}, ["hw.py"], ALONE.format("hw.py")),
    ],
)  # fmt: skip
def test_the_courses_own_files_are_left_out(files, kept, said, tmp_path, monkeypatch):
    (tmp_path / "hw.zip").write_bytes(zipped(files))
    for path in (tmp_path / "hw.zip", unpack_into(tmp_path / "hw", files)):
        found, problems = sort(read_submission("x", path), monkeypatch)
        assert found == kept
        assert said is None or said in str(problems)


def digest(file: str, data: bytes) -> dict[str, list[str]]:
    solved = given.list_solved()
    return child.list_definitions((file, data), get_top_names(), frozenset(), solved)["digests"]


def change(chapter: str, names: list[str]) -> bytes:
    """The solutions, with another first line in these."""
    tree = ast.parse(get_source(chapter))
    for name in names:
        nodes = tree.body
        for part in name.split("."):
            definition = next(node for node in nodes if getattr(node, "name", "") == part)
            nodes = definition.body
        nodes.insert(0, ast.Pass())
    return ast.unparse(tree).encode()


@pytest.mark.parametrize("chapter", get_chapters())
def test_the_courses_solutions_are_known_by_what_they_define(chapter):
    """Whatever the layout of the file; an older version too, but not work with half of them."""
    source, names = get_source(chapter), [*given._digest_solutions(chapter)]
    for file, data in {
        "b.py": b"\xef\xbb\xbf" + source.encode(),
        "c.py": ast.unparse(ast.parse(source)).encode(),
        "d.ipynb": (SOLUTIONS / f"{chapter}.ipynb").read_bytes(),
        "old.py": change(chapter, names[:1]),
    }.items():
        assert given.find_copy(digest(file, data)) == chapter, file
    half = digest("half.py", change(chapter, names[::2]))
    assert given.find_copy(half) is None
    first_line = child.get_first_line(parse(source.encode(), "older.py").statements)
    assert given.find_copy(half, first_line) == chapter
    stubs = (CHAPTERS / f"{chapter}.ipynb").read_bytes()
    assert given.calc_copied_share(digest("stubs.ipynb", stubs), chapter) == 0


# --- What a chapter gives -------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", get_chapters())
@pytest.mark.parametrize("folder", [CHAPTERS, SOLUTIONS])
def test_what_a_notebook_imports_is_given(chapter, folder, monkeypatch):
    data = (folder / f"{chapter}.ipynb").read_bytes()
    _, problems = sort(SubmittedFiles("x", (("hw.ipynb", data),)), monkeypatch)
    assert not [problem for problem in problems if "does not import it" in problem]
    names = given.get_given(chapter)
    assert f"from utils.course import {', '.join(sorted(given.SETUP['utils.course']))}" in SETUP
    for cell in nbformat.read(folder / f"{chapter}.ipynb", 4).cells:
        for module, found in re.findall(r"^from (utils[\w.]*) import (\w+)", cell.source, re.M):
            assert found in names[module]


def test_solutions_of_earlier_chapters_are_given_and_no_others(monkeypatch):
    source = "from solutions.ch0_sampling import get_logprobs\nfrom solutions import ch1_lora, {}\n"
    source = (source + VALUE_LOSS).format("ch2_ppo, ch3_grpo").encode()
    _, problems = sort(SubmittedFiles("x", (("hw.py", source),)), monkeypatch)
    assert [problem.partition(" is")[0] for problem in problems] == [
        "hw.py, line 2: solutions.ch2_ppo", "hw.py, line 2: solutions.ch3_grpo"
    ]  # fmt: skip


def test_zips_in_zips_share_one_bound_and_are_nested_as_platforms_send_them(tmp_path, monkeypatch):
    inner = zipped({f"{n}.txt": b"" for n in range(100)})
    (tmp_path / "many.zip").write_bytes(zipped({f"{n}.zip": inner for n in range(10)}))
    deep = HANDED_IN
    for _ in range(5):
        deep = zipped({"inner.zip": deep})
    (tmp_path / "deep.zip").write_bytes(deep)
    monkeypatch.setattr(reading, "MAX_ZIP_ENTRIES", 250)
    assert len(read_submission("x", tmp_path / "many.zip").problems) == 8
    read = read_submission("x", tmp_path / "deep.zip")
    assert not read.files
    assert "nested too deeply" in read.problems[0]


DELEGATES = """
from solutions.ch2_ppo import RLHFTrainer


class GrpoTrainer(RLHFTrainer):
    def rollout_phase(self):
        return super().rollout_phase()

    def compute_rlhf_objective(self, minibatch):
        return super().compute_rlhf_objective(minibatch)
"""


@sandboxed
def test_what_is_handed_on_earns_nothing(tmp_path):
    attack = Path(__file__).parents[1] / "attacks" / "reading" / "helper_that_stands_in.py"
    (tmp_path / "delegates.py").write_text(DELEGATES)
    todo = {"delegates": tmp_path / "delegates.py", "helper": attack}
    methods = ("rollout_phase", "compute_rlhf_objective", "train")
    only = {"delegates": tuple(f"GrpoTrainer.{name}" for name in methods),
            "helper": ("calc_clipped_surrogate_objective",)}  # fmt: skip
    reports = dict(batch.grade_all(todo, 2, batch.Options("secret", FILE, 30, only=only)))
    assert {name: report["score"] for name, report in reports.items()} == {
        "delegates": 0,
        "helper": 0,
    }


def test_what_belongs_to_an_exercise_is_not_in_its_stand_in():
    for chapter, exercise, helper in (
        ("ch0_sampling", "get_samples", "_generate"),
        ("ch2_ppo", "calc_clipped_surrogate_objective", "calc_ratio"),
    ):
        source = get_chapter_source(chapter)
        assert f"def {helper}(" in source.source
        assert f"def {helper}(" not in source.without(exercise).source


@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param(chapter, marks=[] if chapter == "ch4_kl" else [takes_long])
        for chapter in get_chapters()
    ],
)
def test_what_the_reference_gives_at_other_seeds_earns_nothing(chapter):
    """An answer that knows no input could have it ready."""
    reference = StudentNames(vars(get_reference(chapter)))
    for exercise in get_checks(chapter):
        verdicts = []
        for check in get_quick_checks(chapter, exercise):
            observed = [run_check(check, reference, i, "a")[0] for i in range(check.seeds)]
            wrong = [judge(check, o, i, "b") for i, o in enumerate(observed)]
            mismatch = next((mismatch for mismatch in wrong if mismatch), None)
            verdicts.append(Verdict(check, tuple(observed), mismatch))
        earned = [v.check.name for v, p in zip(verdicts, get_points(verdicts), strict=True) if p]
        assert not earned, exercise
