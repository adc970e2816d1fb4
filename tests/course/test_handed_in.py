"""What people hand in: right work gets its marks however it is written, and nothing else does."""

import ast
import io
import json
import re
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from tests.attacks.containers import make_notebook
from tests.course.test_grade import linux, make_grader
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
    find_stubs_below,
    get_bound_names,
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


def attach_methods() -> bytes:
    """Chapter 2 with a method in a cell of its own, attached by a decorator."""
    source = get_source("ch2_ppo")
    lines = source.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("    def learning_phase("))
    end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith("    def "))
    method = "\n".join(line[4:] for line in lines[start:end])
    rest = "\n".join(lines[:start] + lines[end:])
    return notebook(rest, ADD_TO_CLASS, f"@add_to_class(RLHFTrainer)\n{method}")


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


def zipped(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return stream.getvalue()


def with_a_picture(data: bytes) -> bytes:
    """A notebook with more in its outputs than a submission may have of code."""
    read = json.loads(data)
    read["cells"][0]["outputs"] = [PICTURE]
    return json.dumps(read).encode()


# By name: the files, and the exercise that they answer in full.
RIGHT: dict[str, tuple[dict[str, bytes], str]] = {
    "form feed": ({"a.py": f"import torch\n\n\x0c\n# helpers{PLAIN}".encode()}, "masked_mean"),
    "line separator": (
        {"b.ipynb": notebook("import torch", f"# pasted\u2028from\x85the\x0bweb{PLAIN}")},
        "masked_mean",
    ),
    "UTF-16": ({"u.py": PLAIN.encode("utf-16")}, "masked_mean"),
    "modules": (
        {
            "my_ch0.py": f"import torch\n{PLAIN}\nhistory = train()".encode(),
            "my_ch2.py": f"{IMPORTS}from my_ch0 import masked_mean\n{VALUE_LOSS}".encode(),
        },
        "calc_value_function_loss",
    ),
    "package": (
        {
            "hw/mine.ipynb": notebook("from mylib.tools import zero", MEAN.format(fill="zero()")),
            "hw/mylib/__init__.py": b"",
            "hw/mylib/tools.py": b"from .numbers import ZERO\n\ndef zero():\n    return ZERO\n",
            "hw/mylib/numbers.py": b"def fill():\n    global ZERO\n    ZERO = 0.0\nfill()\n",
        },
        "masked_mean",
    ),
    "run": (
        {
            "mine.ipynb": notebook("%run -n tools.ipynb --steps 3", MEAN.format(fill="zero()")),
            "tools.ipynb": notebook("def zero():\n    return 0.0", "zero()\n1 / 0"),
        },
        "masked_mean",
    ),
    "statements that an exercise needs": (
        {"q.py": b"CFG = {}\nCFG.update(fill=0.0)\nL = []\nfor x in [0.0]:\n    L.append(x)\n"
                 b"def c():\n    d()\ndef d():\n    global FILL\n    FILL = 0.0\nc()\n"
                 b"T = {}\ndef fill(table, at):\n    table[at] = 0.0\nfill(T, 'x')\n"
                 b"match 1:\n    case 1:\n        (E := 0.0)\n    case _:\n        E = 1.0\n"
                 b"class Config: pass\nsetattr(Config, 'fill', 0.0)\n"
                 b"TABLE = {}\nclass Base:\n    def __init_subclass__(cls):\n"
                 b"        TABLE[cls.__name__] = cls\nclass Zero(Base):\n    fill = 0.0\n"
                 b"if __name__ == '__main__':\n    G = 0.0\n    train()\n"
                 + MEAN.format(fill="CFG['fill'] + L[0] + FILL + T['x'] + E + Config.fill "
                                    "+ TABLE['Zero'].fill + G").encode()},
        "masked_mean",
    ),
    "names made as it runs": (
        {"q.py": b"globals()['A'] = 0.0\nglobals().update(B=0.0)\nfor name in ['C', 'D']:\n"
                 b"    globals()[name] = 0.0\nconfig = {'E': 0.0}\nglobals().update(config)\n"
                 b"exec('F = 0.0')\n" + MEAN.format(fill="A + B + C + D + E + F").encode()},
        "masked_mean",
    ),
    "a script": (
        {"q.py": b"import argparse\nparser = argparse.ArgumentParser()\n"
                 b"parser.add_argument('--fill', default=0.0)\nARGS = parser.parse_args()\n"
                 b"IN_COLAB = 'google.colab' in str(get_ipython())\nFILL = 1.0 * IN_COLAB\n"
                 + MEAN.format(fill="ARGS.fill + FILL").encode()},
        "masked_mean",
    ),
    "magics and await": (
        {"q.ipynb": notebook("%time A = 0.0\n!ls",
                             "async def zero():\n    return 0.0\nB = await zero()",
                             "%%capture out\n%%time\n" + MEAN.format(fill="A + B"))},
        "masked_mean",
    ),
    "counted and logged, and endless experiments": (
        {"q.ipynb": notebook("LOG = []\ndef log(x):\n    LOG.append(x)\n    return x",
                             PLAIN.replace("    k", "    global N\n    N += log(1)\n    k", 1),
                             "N = 0", "while True:\n    masked_mean(x, y)",
                             "import time\nwhile True:\n    time.sleep(1)\n    log(2)")},
        "masked_mean",
    ),
    "registry": (
        {"q.py": b"TABLE = {}\nclass Registry:\n    def add(self, f):\n"
                 b"        TABLE[f.__name__] = f\n        return f\nregistry = Registry()\n"
                 b"@registry.add\n" + PLAIN.strip().replace("masked_mean", "mine").encode()
                 + b"\nmasked_mean = lambda *a, **k: (registry, TABLE)[1]['mine'](*a, **k)\n"},
        "masked_mean",
    ),
    "a walrus counts as the last": (
        {"q.py": b"def masked_mean(values, mask, dim=None):\n    return values\n"
                 + PLAIN.replace("masked_mean", "mine").encode() + b"\n(masked_mean := mine)\n"},
        "masked_mean",
    ),
    "latin-1": (
        {"q.py": ("# -*- coding: latin-1 -*-\nf\u00fcll = 0.0\n" + MEAN.format(fill="f\u00fcll"))
                 .encode("latin-1")},
        "masked_mean",
    ),
    "single dispatch": (
        {"q.py": b"import functools, torch\n@functools.singledispatch\n"
                 b"def masked_mean(values, mask, dim=None):\n    raise TypeError\n"
                 b"@masked_mean.register\n"
                 + PLAIN.strip().replace("masked_mean(values,", "_(values: torch.Tensor,")
                 .encode()},
        "masked_mean",
    ),
    "many magics": (
        {"q.ipynb": notebook("\n".join(f"!echo {n}" for n in range(600)), PLAIN)}, "masked_mean"
    ),
    "compiled": ({"q.py": f"import torch\n@torch.compile{PLAIN}".encode()}, "masked_mean"),
    "a module with errors and an experiment": (
        {"a.py": b"from tools import zero, N\n" + MEAN.format(fill="zero() + N").encode(),
         "tools.py": b"import torch\nGEN = torch.Generator('cuda')\ndef draw():\n    return GEN\n"
                     b"def zero():\n    return 0.0\ndef f(a, a):\n    pass\n"
                     b"N = 0.0\nwhile True:\n    N += 0.0\n"},
        "masked_mean",
    ),
    "a strange folder": (
        {"Jane Doe-1/pkg/a.py": b"from .tools import zero\n" + MEAN.format(fill="zero()").encode(),
         "Jane Doe-1/pkg/tools.py": b"def zero():\n    return 0.0\n"},
        "masked_mean",
    ),
    "a zip of Windows": (
        {"w.zip": zipped({"hw\\a.py": b"from tools import zero\n"
                                       + MEAN.format(fill="zero()").encode(),
                          "hw\\tools.py": b"def zero():\n    return 0.0\n"})},
        "masked_mean",
    ),
    "method attached": ({"t.ipynb": attach_methods()}, "RLHFTrainer.learning_phase"),
    "script magic": (
        {"f.ipynb": notebook("import torch", PLAIN,
                             "%%script false\ndef masked_mean(*a):\n    return 1",
                             "\n%%writefile x.py\ndef masked_mean(*a):\n    return 2",
                             "%%bash\ndef masked_mean() {\n  ls\n}")},
        "masked_mean",
    ),
    "indented": (
        {"d.ipynb": notebook("\n    FILL = 0.0\n" + MEAN.format(fill="FILL").replace("\n", "\n    ")
                             + "\n    !ls\n    FILL?")},
        "masked_mean",
    ),
    "error below": ({"e.ipynb": notebook(MASK + "\nprint 'hello'\n")}, "get_completion_mask"),
    "conflict": (
        {"e.ipynb": notebook(f"<<<<<<< HEAD{MASK}=======\n{MASK}>>>>>>> main\n")},
        "get_completion_mask",
    ),
    "beside an absent one": ({"r.py": REINFORCE.encode()}, "calc_reinforce_objective"),
    "beside a broken one": (
        {"r.py": f"{REINFORCE}\n\ndef masked_mean(values, mask)):\n    pass\n".encode()},
        "calc_reinforce_objective",
    ),
    "imports of the course that are not given": (
        {"q.py": b"from utils.validation import require, nothing_like_it\nimport utils.train\n"
                 b"from utils.models import forward\nfrom solutions import ch0_sampling\n"
                 + MEAN.format(fill="require(True, '') or 0.0").encode()},
        "masked_mean",
    ),
    "modules of its own in folders named like the course's": (
        {"q.py": b"from utils.tools import zero\nfrom tests.more import one\n"
                 + MEAN.format(fill="zero() * one()").encode(),
         "utils/tools.py": b"def zero():\n    return 0.0\n",
         "tests/more.py": b"def one():\n    return 1.0\n"},
        "masked_mean",
    ),
    "a folded solution that was copied": (
        {"hw/mine.ipynb": notebook(IMPORTS + "from utils.validation import shape_checked",
                                   get_part("ch0_sampling", "masked_mean")),
         "hw/notes.py": b"x = 1\n"},
        "masked_mean",
    ),
    "a module that a cell writes": (
        {"w.ipynb": notebook("%%writefile helpers.py\ndef zero():\n    return 0.0",
                             "%%file mine.py\nfrom helpers import zero, ONE\n"
                             + MEAN.format(fill="zero() * ONE"),
                             "%%writefile -a helpers.py\nONE = 1",
                             "from mine import masked_mean")},
        "masked_mean",
    ),
    "a notebook that was exported": (
        {"e.py": ("FILL = 1.0\nget_ipython().run_line_magic('time', 'FILL = 0.0')\n"
                  "get_ipython().run_cell_magic('writefile', 'own.py', 'ONE = 1\\n')\n"
                  "from own import ONE\n"
                  "get_ipython().run_cell_magic('bash', '', 'def masked_mean() { ls }')\n"
                  f"get_ipython().run_cell_magic('time', '', {MEAN.format(fill='FILL * ONE')!r})\n"
                  ).encode()},
        "masked_mean",
    ),
    "a relative import at the top": (
        {"hw-1/a.py": b"from .own import zero\n" + MEAN.format(fill="zero()").encode(),
         "hw-1/own.py": b"def zero():\n    return 0.0\n", "hw-1/__init__.py": b""},
        "masked_mean",
    ),
    "modules of its own named like others": (
        {"a.py": b"import random, math\nimport statistics as s\nfrom utils import zero\n"
                 b"from tests import one\nfrom utils.validation import require\n"
                 b"require(random.random() < 1, 'the one of the standard library')\n"
                 + MEAN.format(fill="zero() * one() * s.own * math.pi").encode(),
         "random.py": b"def zero():\n    return 1\n", "statistics.py": b"import math\nown = 0.0\n",
         "utils.py": b"from random import zero as z, Random\ndef zero():\n    return z() - 1.0\n",
         "tests.py": b"def one():\n    return 1.0\n"},
        "masked_mean",
    ),
    "a file of data": (
        {"hw/a.ipynb": notebook("import json\nCFG = json.load(open('data/config.json'))",
                                MEAN.format(fill="CFG['fill']")),
         "hw/data/config.json": b'{"fill": 0.0}'},
        "masked_mean",
    ),
    "a file of data beside a script": (
        {"a.py": b"from pathlib import Path\nFILL = float((Path(__file__).parent / 'f.txt')"
                 b".read_text())\n" + MEAN.format(fill="FILL").encode(), "f.txt": b"0.0"},
        "masked_mean",
    ),
    "two drafts, the better first": (
        {"final.py": PLAIN.encode(),
         "old.py": b"def masked_mean(values, mask, dim=None):\n    return values.mean(dim)\n"},
        "masked_mean",
    ),
    "a stub below": (
        {"s.ipynb": notebook(PLAIN, "def masked_mean(values, mask, dim=None):\n"
                                    "    raise NotImplementedError\n")},
        "masked_mean",
    ),
    "a stub in another file": (
        {"a.py": PLAIN.encode() + b"def left_pad(*a):\n    raise NotImplementedError\n",
         "b.py": b"def masked_mean(*a):\n    raise NotImplementedError()\n"},
        "masked_mean",
    ),
    "made by exec": ({"x.py": f"SOURCE = {PLAIN!r}\nexec(SOURCE)\n".encode()}, "masked_mean"),
    "set on its own module": (
        {"x.py": b"import sys\n" + PLAIN.replace("masked_mean", "mine").encode()
                 + b"\nsetattr(sys.modules[__name__], 'masked_mean', mine)\n"
                 b"globals().update(masked_mean=mine)\n"},
        "masked_mean",
    ),
    "a training run that is kept": (
        {"t.ipynb": notebook("import time\ndef train():\n    time.sleep(100)",
                             f"\nrun = train()\n{PLAIN}", "masked_mean.run = run",
                             "import not_installed")},
        "masked_mean",
    ),
    "a training run in a module": (
        {"a.py": b"from tools import HISTORY, zero\nprint(HISTORY)\n"
                 + MEAN.format(fill="zero()").encode(),
         "tools.py": b"import time\ndef train():\n    time.sleep(100)\nHISTORY = train()\n"
                     b"def zero():\n    return 0.0\n"},
        "masked_mean",
    ),
    "one that calls an endless one": (
        {"r.py": REINFORCE.encode()
                 + b"def masked_mean(*a):\n    while True:\n        pass\n"},
        "calc_reinforce_objective",
    ),
    "of an earlier version of the course": (
        {"old.py": make_old()}, "RLHFTrainer.rollout_phase"
    ),
    "capitals": ({"UPPER.IPYNB": notebook(MASK)}, "get_completion_mask"),
    "zips in zips": (
        {"all.zip": zipped({"doejane_1_2_hw.ZIP": zipped({"hw.ipynb": notebook(MASK)})})},
        "get_completion_mask",
    ),
    "large outputs": ({"p.ipynb": with_a_picture(notebook(PLAIN))}, "masked_mean"),
}  # fmt: skip


# One of each kind for every day; `make test-all` has the others.
EVERY_DAY = {"modules", "package", "run", "statements that an exercise needs",
             "names made as it runs", "magics and await", "latin-1", "many magics",
             "a strange folder", "method attached", "script magic",
             "imports of the course that are not given",
             "modules of its own in folders named like the course's",
             "a notebook that was exported", "modules of its own named like others",
             "a file of data", "two drafts, the better first", "a training run that is kept",
             "a training run in a module",
             "error below", "conflict", "beside a broken one", "zips in zips"}  # fmt: skip


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
    todo = {}
    takes_all = request.config.getoption("--size") == "all"
    chosen = {name: RIGHT[name] for name in RIGHT if takes_all or name in EVERY_DAY}
    for name, (files, _) in chosen.items():
        for file, data in files.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        todo[name] = path if len(files) == 1 else folder / name
    only = {name: (exercise,) for name, (_, exercise) in RIGHT.items()}
    todo |= {path.stem: path for path in (*ATTACKS, HELPERS)}
    only |= {path.stem: ("masked_mean",) for path in ATTACKS}
    only[HELPERS.stem] = ("get_logprobs", "calc_entropy", "sample_next_token", "get_samples")
    return dict(batch.grade_all(todo, 2, batch.Options("secret", FILE, 30, only=only)))


@linux
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in EVERY_DAY else [takes_long]) for n in RIGHT]
)
def test_right_work_gets_its_marks(name, graded):
    (exercise,) = graded[name]["exercises"]
    lost = [check for check in exercise["checks"] if not check["passed"]]
    assert exercise["score"] == exercise["max_score"], (graded[name]["problems"], lost)


@linux
def test_attacks_score_nothing(graded):
    """A few: test_grade.py has more."""
    assert {path.stem: graded[path.stem]["score"] for path in ATTACKS} == {
        path.stem: 0 for path in ATTACKS
    }
    assert not any(graded[path.stem]["not_graded"] for path in ATTACKS)


@linux
@takes_long
def test_what_is_given_and_runs_no_more_is_the_courses_and_said(graded):
    said = str(graded["of an earlier version of the course"]["problems"])
    assert "what the notebook gives of RLHFArgs, RLHFTrainer does not run with this version" in said
    assert "RLHFArgs" not in str(graded["method attached"]["problems"])


@linux
def test_the_courses_helpers_give_no_answers(graded):
    report = graded[HELPERS.stem]
    assert {e["name"]: e["score"] for e in report["exercises"]} == {
        "get_logprobs": 0, "calc_entropy": 0, "sample_next_token": 0, "get_samples": 0
    }  # fmt: skip
    assert "decoding.draw is left out: the notebook" in str(report["problems"])


@linux
def test_what_is_not_given_costs_nothing_else(graded):
    said = "q.py, line 2: utils.train is left out: the notebook of ch0_sampling does not import it"
    assert said in graded["imports of the course that are not given"]["problems"]
    own = graded["modules of its own in folders named like the course's"]
    assert not own["problems"]


def test_a_magic_without_anything_to_run_costs_nothing_else():
    cells = ("%time", "%run", "%run -i", "%run 01_tools.ipynb", "%time %run 2.py", PLAIN)
    parsed = parse(notebook(*cells), "m.ipynb")
    assert [s.name for s in parsed.statements if hasattr(s, "name")] == ["masked_mean"]
    assert parsed.problems == [
        "m.ipynb, cell 4: %run 01_tools is not read, as Python imports no file of that name:"
        " rename it"
    ]
    assert len(parsed.statements) == len(cells)


@linux
def test_what_took_too_long_or_could_not_be_imported_is_said(graded):
    problems = graded["a training run in a module"]["problems"]
    assert problems[0].startswith("tools.py, line 4: it takes more than 8 s, and what it defines")
    assert problems[1].startswith("a.py, line 1: ImportError: cannot import name 'HISTORY'")
    assert len(problems) == 2
    problems = graded["a training run that is kept"]["problems"]
    assert problems[0].startswith("t.ipynb, cell 2, line 2: it takes more than 8 s")
    assert problems[1:] == [
        "t.ipynb, cell 4, line 1: ModuleNotFoundError: No module named 'not_installed'"
    ]
    drafts = graded["two drafts, the better first"]["problems"]
    assert drafts[0].startswith("ch0_sampling: final.py, old.py define the same")
    assert drafts[1:] == ["ch0_sampling: masked_mean of final.py counts"]


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


def test_a_stub_hides_no_answer_above_it():
    stub = "def masked_mean(values, mask):\n    'Mean.'\n    raise NotImplementedError()"
    parsed = parse(notebook(stub, PLAIN, "class A: ...", stub, "def left_pad():\n    return 1\n"
                            "    raise NotImplementedError"), "s.ipynb")  # fmt: skip
    below = find_stubs_below(parsed.statements, {"masked_mean", "left_pad"})
    assert [s.place for s in below] == ["s.ipynb, cell 4"]


@linux
def test_what_does_not_parse_is_said_by_file_cell_and_line(graded):
    assert "e.ipynb, cell 1, line 7: SyntaxError: Missing parentheses" in str(
        graded["error below"]["problems"]
    )
    assert [problem.split(":")[0] for problem in graded["conflict"]["problems"]] == [
        f"e.ipynb, cell 1, line {line}" for line in (1, 6, 12)
    ]
    assert (
        "r.py, line 9: SyntaxError: unmatched ')'" in graded["beside a broken one"]["problems"][0]
    )
    assert "f.ipynb, cell 3: not read, as %%script" in graded["script magic"]["problems"][0]


def test_an_error_below_a_decorator_is_said_once():
    broken = "def left_pad(ids):\n    return [ids\n"
    parsed = parse(notebook(f"{PLAIN}\n@torch.no_grad()\n{broken}"), "d.ipynb")
    assert [s.name for s in parsed.statements if hasattr(s, "name")] == ["masked_mean"]
    line = PLAIN.count("\n") + 4
    assert parsed.problems == [
        f"d.ipynb, cell 1, line {line}: SyntaxError: '[' was never closed"
        " (this statement was left out)"
    ]
    parsed = parse(notebook(f"@torch.no_grad(\n{PLAIN}"), "d.ipynb")
    assert parsed.problems[0].startswith("d.ipynb, cell 1, line 1: SyntaxError: '(' was never")


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


@pytest.mark.parametrize(
    "statement",
    [
        "torch.manual_seed(0)",
        "trainer.train()",
        "RLHFTrainer(masked_mean).train()",
        "print(FILL, len(FILL))",
        "check(masked_mean)",
        "history = experiment(FILL)",
        "y = FILL.sum()",
        "for _ in range(9):\n    print(masked_mean)",
        "plt.plot(FILL)",
        "show(FILL)",
    ],
)
def test_experiments_do_not_run(statement):
    imports = "import torch\nimport matplotlib.pyplot as plt\nfrom utils.course import check"
    show = (
        "def show(x):\n    return [*x]\ndef experiment(x):\n    y = x\n    y.sort()\n    return y"
    )
    uses = MEAN.format(fill="torch.tensor(FILL[0])")
    taken, _ = select(imports, show, "FILL = [0.0]", uses, statement)
    assert statement not in taken
    assert "FILL = [0.0]" in taken


@pytest.mark.parametrize("chapter", get_chapters())
def test_no_experiment_of_a_finished_notebook_runs(chapter):
    """Imports, definitions and constants are all that its exercises need."""
    notebook = (SOLUTIONS / f"{chapter}.ipynb").read_bytes()
    names = {exercise.partition(".")[0] for exercise in get_checks(chapter)}
    for statement in select_statements(parse(notebook, "finished.ipynb").statements, names):
        is_definition = isinstance(statement, ast.FunctionDef | ast.ClassDef)
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        is_constant = isinstance(statement, ast.Assign) and not any(
            isinstance(node, ast.Call) for node in ast.walk(statement)
        )
        assert is_definition or is_import or is_constant, statement.line


def test_methods_of_a_graded_class_are_called_by_experiments_and_its_registry_is_filled():
    source = (
        "class A: ...\nA.load('x')\nA.register('y')\nclass B:\n    @property\n    def f(s): ...\n"
    )
    source += "b = B()\ntry:\n    A.load('z')\nexcept OSError as error:\n    pass\n"
    taken = select_statements(parse(source.encode(), "a.py").statements, {"A", "B"})
    assert [s.line for s in taken] == ["class A: ...", "A.register('y')", "class B:"]


def test_a_name_is_bound_by_whatever_binds_it():
    (statement,) = parse(
        b"if (a := 1):\n    import b\n    [c for c in (d := [1])]\n    def e(f): g = 1\n"
        b"    with x as (h, i): j.k = l[0] = 2\n    try: pass\n    except E as m: pass\n"
        b"    match q:\n        case [n, *o]: pass\n        case {**p}: pass\n",
        "a.py",
    ).statements
    assert get_bound_names(statement) == set("adehijlmnop")


# --- Points that were not earned ----------------------------------------------------------------


def test_the_courses_own_files_are_left_out(tmp_path):
    solutions = get_source("ch0_sampling").encode()
    files = {
        "ch1/chapters/ch1_lora.ipynb": notebook("x = 1"),
        "ch1/solutions/ch0_sampling.py": solutions,
        "ch1/tests/checks/ch1_lora.py": b"",
        "ch1/utils/course/__init__.py": b"",
        "ch1/utils/grading/checks.py": b"",
    }
    (tmp_path / "bundle.zip").write_bytes(zipped({"up/" + name: d for name, d in files.items()}))
    for name, data in files.items():
        path = tmp_path / "folder" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for path, prefix in ((tmp_path / "bundle.zip", "up/ch1/"), (tmp_path / "folder", "ch1/")):
        read = read_submission("x", path)
        assert [name for name, _ in read.files] == [f"{prefix}chapters/ch1_lora.ipynb"]
        assert "4 of the course's own files left out" in read.problems[0]
    # A folder that somebody calls "solutions" is none of the course's.
    (tmp_path / "own.zip").write_bytes(zipped({"solutions/hw.py": PLAIN.encode()}))
    assert read_submission("x", tmp_path / "own.zip").files


SHIPPED = get_source("ch0_sampling").encode()


@pytest.mark.parametrize(
    "files",
    [
        {"ch1\\solutions\\ch0_sampling.py": SHIPPED, "ch1\\utils\\course\\__init__.py": b""},
        {"a/chapters/x.ipynb": b"{}", "a/solutions/ch0_sampling.py": SHIPPED},
        {"C/Solutions/ch0_sampling.py": SHIPPED, "C/Utils/Course/__init__.py": b""},
        {"./c/./solutions//ch0_sampling.py": SHIPPED, "./c/utils/course/__init__.py": b""},
        {"c/solutions.zip": zipped({"ch0_sampling.py": SHIPPED}), "c/utils/course/x.py": b""},
        {"solutions/ch0_sampling.py": SHIPPED.replace(b"\n", b"\r\n")},
    ],
)
def test_the_courses_own_files_are_known_however_they_come(files, tmp_path, monkeypatch):
    (tmp_path / "hw.zip").write_bytes(zipped(files))
    kept, problems, _ = sort(read_submission("x", tmp_path / "hw.zip"), monkeypatch)
    assert not [name for name in kept if name.endswith(".py")]
    assert "of the course's own files left out" in str(problems)


def sort(submitted: SubmittedFiles, monkeypatch) -> tuple[list[str], list[str], dict]:
    """Which files remain, what is said, and what is graded of each chapter, without running it."""

    def ask(_, job):
        task, error = child.get_ready(job.action, job.arguments)
        return Reply(Outcome.DONE, task(), (), error)

    monkeypatch.setattr(grader_module.Grader, "ask", ask)
    grader = make_grader(submitted)
    grader.problems += submitted.problems
    found = grader._sort_files()
    names = dict.fromkeys(name for files, _ in found.values() for name, _ in files)
    return [*names], grader.problems, found


@pytest.mark.parametrize("chapter", get_chapters())
def test_the_courses_solutions_are_known_by_what_they_define(chapter):
    """Whatever the layout of the file."""
    source = get_source(chapter)
    notebook_ = (SOLUTIONS / f"{chapter}.ipynb").read_bytes()
    files = {"a.py": source.encode() + b"\n", "b.py": b"\xef\xbb\xbf" + source.encode(),
             "c.py": ast.unparse(ast.parse(source)).encode(), "d.ipynb": notebook_}  # fmt: skip
    for file, data in files.items():
        assert given.find_copy(digest(file, data)) == chapter, file
    stubs = (CHAPTERS / f"{chapter}.ipynb").read_bytes()
    assert given.calc_copied_share(digest("stubs.ipynb", stubs), chapter) == 0


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
def test_work_with_half_of_the_solutions_copied_is_somebodys_own(chapter):
    changed = [*given._digest_solutions(chapter)][::2]
    assert given.find_copy(digest("mine.py", change(chapter, changed))) is None


@pytest.mark.parametrize("chapter", get_chapters())
def test_an_older_version_is_still_the_courses(chapter):
    names = [*given._digest_solutions(chapter)]
    assert given.find_copy(digest("old.py", change(chapter, names[:1]))) == chapter
    older = change(chapter, names[::2])
    first_line = child.get_first_line(parse(older, "older.py").statements)
    assert given.find_copy(digest("older.py", older), first_line) == chapter


STUBS = (CHAPTERS / "ch0_sampling.ipynb").read_bytes()


@pytest.mark.parametrize(
    "files",
    [
        {"hw/mine.ipynb": STUBS, "hw/ch0_sampling.py": SHIPPED + b"\n"},
        {"mine.ipynb": STUBS, "renamed.py": b"\xef\xbb\xbf" + SHIPPED},
        {"mine.ipynb": STUBS, "ch0.zip": zipped({"x/y.py": SHIPPED.replace(b"    ", b"  ")})},
        {"mine.ipynb": STUBS, "done.ipynb": (SOLUTIONS / "ch0_sampling.ipynb").read_bytes()},
    ],
)
def test_copies_of_the_solutions_beside_the_work_are_left_out(files, tmp_path, monkeypatch):
    (tmp_path / "hw.zip").write_bytes(zipped(files))
    kept, problems, _ = sort(read_submission("x", tmp_path / "hw.zip"), monkeypatch)
    assert [name.rpartition("/")[2] for name in kept] == ["mine.ipynb"]
    assert "1 of the course's own files left out" in str(problems)


@pytest.mark.parametrize("is_zipped", [True, False])
def test_a_solution_that_is_handed_in_alone_is_graded_and_said(is_zipped, tmp_path, monkeypatch):
    path = tmp_path / ("hw.zip" if is_zipped else "hw.py")
    path.write_bytes(zipped({"hw.py": SHIPPED}) if is_zipped else SHIPPED)
    kept, problems, _ = sort(read_submission("x", path), monkeypatch)
    assert kept == ["hw.py"]
    assert problems == ["hw.py is the course's solution of ch0_sampling"]


# --- What a chapter gives -------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", get_chapters())
@pytest.mark.parametrize("folder", [CHAPTERS, SOLUTIONS])
def test_what_a_notebook_imports_is_given(chapter, folder, monkeypatch):
    data = (folder / f"{chapter}.ipynb").read_bytes()
    _, problems, _ = sort(SubmittedFiles("x", (("hw.ipynb", data),)), monkeypatch)
    assert not [problem for problem in problems if "does not import it" in problem]
    names = given.get_given(chapter)
    assert f"from utils.course import {', '.join(sorted(given.SETUP['utils.course']))}" in SETUP
    for cell in nbformat.read(folder / f"{chapter}.ipynb", 4).cells:
        for module, found in re.findall(r"^from (utils[\w.]*) import (\w+)", cell.source, re.M):
            assert found in names[module]


def test_what_is_not_given_is_said_by_cell_and_line(monkeypatch):
    cells = ("import torch", f"\nfrom utils.models.decoding import draw, get_decoder\n{PLAIN}",
             "import utils.models.forward as f\nfrom utils import models\nimport utils.train",
             "def g():\n    from tests.checks.ch0_sampling import check\n    return check",
             "from solutions.ch0_sampling import calc_entropy\nfrom utils.mine import x",
             "y = g")  # fmt: skip
    files = (("hw.ipynb", notebook(*cells)),)
    _, problems, _ = sort(SubmittedFiles("x", files), monkeypatch)
    said = "is left out: the notebook of ch0_sampling does not import it"
    assert problems == [
        f"hw.ipynb, cell 2, line 2: utils.models.decoding.draw {said}",
        f"hw.ipynb, cell 3, line 1: utils.models.forward {said}",
        f"hw.ipynb, cell 3, line 3: utils.train {said}",
        f"hw.ipynb, cell 5, line 1: solutions.ch0_sampling.calc_entropy {said}",
    ]


def test_solutions_of_earlier_chapters_are_given_and_no_others(monkeypatch):
    source = "from solutions.ch0_sampling import get_logprobs\nfrom solutions import ch1_lora, {}\n"
    source = (source + VALUE_LOSS).format("ch2_ppo, ch3_grpo").encode()
    _, problems, _ = sort(SubmittedFiles("x", (("hw.py", source),)), monkeypatch)
    assert [problem.partition(" is")[0] for problem in problems] == [
        "hw.py, line 2: solutions.ch2_ppo", "hw.py, line 2: solutions.ch3_grpo"
    ]  # fmt: skip


def test_zips_in_zips_share_one_bound(tmp_path, monkeypatch):
    inner = zipped({f"{n}.txt": b"" for n in range(100)})
    with zipfile.ZipFile(tmp_path / "many.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for n in range(10):
            archive.writestr(f"{n}.zip", inner)
    monkeypatch.setattr(reading, "MAX_ZIP_ENTRIES", 250)
    assert len(read_submission("x", tmp_path / "many.zip").problems) == 8


DELEGATES = """
from solutions.ch2_ppo import RLHFTrainer


class GrpoTrainer(RLHFTrainer):
    def rollout_phase(self):
        return super().rollout_phase()

    def compute_rlhf_objective(self, minibatch):
        return super().compute_rlhf_objective(minibatch)
"""


@linux
@takes_long
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


def test_zips_are_nested_no_deeper_than_platforms_send_them(tmp_path):
    data = notebook(PLAIN)
    for _ in range(5):
        data = zipped({"inner.zip": data})
    (tmp_path / "deep.zip").write_bytes(data)
    read = read_submission("x", tmp_path / "deep.zip")
    assert not read.files
    assert "nested too deeply" in read.problems[0]


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
