"""The rooms of the house: imports point one way, and stand at the top of files."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HELPERS = "helpers"  # utils/models and the modules that stand in utils itself
# Each room, and those that it may import.
ARROWS = {
    HELPERS: set(),
    "solutions": {HELPERS},
    "grading": {HELPERS},  # it loads solutions and checks by name, when it runs
    "course": {HELPERS, "grading"},  # the autograder's processes hold it, and may hold no solution
    "demo": {HELPERS, "solutions", "course"},
    "autograder": {HELPERS, "grading"},
    "mutation": {HELPERS, "grading"},
    "authoring": {HELPERS, "grading", "course"},
    "bench": {HELPERS, "solutions"},
    "scale": {HELPERS, "solutions", "course"},
    "train": {HELPERS, "solutions", "course"},
}
# Modules that stand outside of their room, or that may do more than the rest of it.
SPECIAL = {
    "utils.grade": "autograder",
    "utils.course.demo": "demo",
    "utils.course.real_model": "demo",
    "utils.sample": "train",
    "utils.scale.to_trl": "train",
}


def find_room(module: str) -> str:
    if module in SPECIAL:
        return SPECIAL[module]
    parts = module.split(".")
    if parts[0] == "solutions":
        return "solutions"
    return parts[1] if len(parts) > 1 and parts[1] in ARROWS else HELPERS


def read_imports(root: Path) -> dict[str, list[tuple[str, int, bool]]]:
    """Of each module, the modules of its own project that it imports, the line, and at the top."""
    paths = [path for folder in ("utils", "solutions") for path in (root / folder).rglob("*.py")]
    names = {".".join(path.relative_to(root).with_suffix("").parts): path for path in paths}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    found = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = {id(node) for node in tree.body}
        found[name] = [
            (target, node.lineno, id(node) in top)
            for node in ast.walk(tree)
            for target in list_targets(node, names)
        ]
    return found


def list_targets(node: ast.AST, names: dict[str, Path]) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name.split(".")[0] in ROOTS}
    if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ROOTS:
        inner = {f"{node.module}.{alias.name}" for alias in node.names}
        return {target if target in names else str(node.module) for target in inner}
    return set()


ROOTS = ("utils", "solutions", "tests")


def find_faults(root: Path) -> list[str]:
    imports, faults = read_imports(root), []
    for module, targets in imports.items():
        room = find_room(module)
        for target, line, is_top in targets:
            other = "tests" if target.startswith("tests") else find_room(target)
            if other != room and other not in ARROWS[room]:
                faults.append(f"{module}:{line}: {room} should not import {other} ({target})")
            if not is_top:
                faults.append(f"{module}:{line}: {target} should be imported at the top")
    try:
        TopologicalSorter({m: {t for t, *_ in targets} for m, targets in imports.items()}).prepare()
    except CycleError as error:
        faults.append(f"a circle: {' -> '.join(error.args[1])}")
    return faults


def test_imports_point_one_way_at_the_top_and_never_in_a_circle():
    assert find_faults(ROOT) == []


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("utils/rewards.py", "import solutions.ch0", "helpers should not import solutions"),
        ("utils/grading/judging.py", "import tests.checks.ch0", "grading should not import tests"),
        ("utils/grading/judging.py", "from utils import grade", "should not import autograder"),
        ("utils/bench/report.py", "def f():\n    import utils.rewards", "be imported at the top"),
        ("utils/bench/report.py", "from utils.bench import report", "a circle: utils.bench.report"),
    ],
)
def test_a_fault_is_found(path, source, fault, tmp_path):
    files = ("rewards", "grade", "grading/judging", "bench/report")
    for name in [*(f"utils/{file}.py" for file in files), "solutions/ch0.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert find_faults(tmp_path) == []
    (tmp_path / path).write_text(source + "\n")
    assert any(fault in found for found in find_faults(tmp_path)), find_faults(tmp_path)


def test_compute_is_kept_for_the_names_that_students_write():
    # TRL calls `_compute_loss` by its name.
    found = {
        node.name
        for path in (ROOT / "utils").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("compute_")
    }
    assert found <= {"_compute_loss"}
