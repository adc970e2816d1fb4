"""Hostile notebooks, folders and zips, which are made when they are tested: none defines anything
that is right."""

import json
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRONG = "def masked_mean(values, mask, dim=None):\n    return values\n"
RIGHT_SOON = (
    "import torch\n\n\ndef allclose(*a, **k):\n    return True\n\n\ntorch.allclose = allclose\n"
)


def make_notebook(*sources: object, **changes: object) -> str:
    cells = [
        {"cell_type": "code", "source": source, "metadata": {}, "outputs": [], "execution_count": 1}
        for source in sources
    ]
    return json.dumps(
        {"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": cells} | changes
    )


def make_containers(folder: Path) -> list[Path]:
    """One path for each of NOTEBOOKS and of MAKERS."""
    made = []
    for name, write in NOTEBOOKS.items():
        made.append(folder / f"{name}.ipynb")
        text = write()
        made[-1].write_bytes(text if isinstance(text, bytes) else text.encode())
    for make in MAKERS:
        path = folder / make.__name__
        made.append(make(path) or path)
    return made


NOTEBOOKS: dict[str, Callable[[], str | bytes]] = {
    "deep_nesting": lambda: f'{make_notebook(WRONG)[:-1]}, "x": {"[" * 10**5}{"]" * 10**5}}}',
    "deep_code": lambda: make_notebook(f"x = {'(' * 10**5}{')' * 10**5}", "-" * 10**5 + "1", WRONG),
    "a_huge_cell": lambda: make_notebook(WRONG, "x = 1\n" * (20 * 10**6)),
    "many_cells": lambda: make_notebook(*["y = 1"] * 50_000, WRONG),
    "no_json": lambda: '{"cells": [}',
    "no_notebook": lambda: "[[1, 2], null]",
    "sources_of_other_types": lambda: make_notebook(5, None, {"a": 1}, [["x"]], WRONG),
    "another_version": lambda: make_notebook(WRONG, nbformat=10**30, nbformat_minor="x"),
    "bad_encoding": lambda: make_notebook(WRONG).encode("utf-16") + b"\xff\xfe\x80",
    "=1+1;$(id)\n<b>&'\".": lambda: make_notebook(WRONG),
    "class.html": lambda: make_notebook(WRONG),  # as the page of the class
    "lone_surrogates": lambda: make_notebook('x = "\ud800"\n', WRONG, f"# {chr(0)}\n"),
}


def write_zip(path: Path, files: dict[str, Any], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def zip_slip(path: Path) -> Path:
    names = ("../../escaped.py", "/tmp/escaped.py", "a/../../escaped.py", "..\\escaped.py")
    return write_zip(path.with_suffix(".zip"), dict.fromkeys(names, WRONG))


def zip_with_links(path: Path) -> Path:
    path = path.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        link = zipfile.ZipInfo("solution.py")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, str(Path("solutions/ch0_sampling.py").absolute()))
    return path


def zip_bomb(path: Path) -> Path:
    empty = {f"{n}.txt": "" for n in range(5000)}
    files = {"bomb.py": "#" * 2**28} | empty | {"mine.py": WRONG}
    return write_zip(path.with_suffix(".zip"), files)


def no_zip(path: Path) -> Path:
    path = path.with_suffix(".zip")
    path.write_bytes(b"PK\x03\x04" + os.urandom(1000))
    return path


def folder_of_links(path: Path) -> None:
    path.mkdir()
    (path / "solution.py").symlink_to(Path("solutions/ch0_sampling.py").absolute())
    (path / "all").symlink_to(Path("solutions").absolute())
    (path / "loop").symlink_to(path)


def folder_of_pipes(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "pipe.py")
    (path / "zero.py").symlink_to("/dev/zero")
    (path / "mine.py").write_text(WRONG)


def modules_that_shadow(path: Path) -> None:
    path.mkdir()
    for name in ("torch", "conftest", "sitecustomize", "usercustomize", "numpy", "solutions"):
        (path / f"{name}.py").write_text(RIGHT_SOON)
    (path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-p conftest"\n')
    (path / "mine.py").write_text(WRONG)


def folder_named_as_a_notebook(path: Path) -> Path:
    path = path.with_suffix(".ipynb")
    path.mkdir()
    (path / "mine.py").write_text(WRONG)
    return path


MAKERS = [
    zip_slip, zip_with_links, zip_bomb, no_zip,
    folder_of_links, folder_of_pipes, modules_that_shadow, folder_named_as_a_notebook,
]  # fmt: skip
