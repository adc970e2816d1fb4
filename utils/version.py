"""The version of the course, which its notebooks, bundles, reports and autograders carry."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKED = "VERSION"  # stands in bundles and autograders, which have no pyproject.toml
# In the set-up cell of a notebook, as JSON or exported as a script.
WRITTEN = re.compile(rb'(?:^|"|\\n)VERSION = \\?"([\d.]{1,20})\\?"', re.MULTILINE)


def get_version() -> str:
    """Return the version of the course that is installed here, such as "1.0"."""
    packed = ROOT / PACKED
    if packed.exists():
        return packed.read_text(encoding="utf-8").strip()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return settings["project"]["version"]


def find_other_versions(files: Iterable[tuple[str, bytes]]) -> dict[str, str]:
    """Return which notebooks and scripts were made by another version of the course, and which.

    files: their names and contents. What names no version, as a script may, is left out.
    """
    found = {name: WRITTEN.search(data) for name, data in files}
    made_by = {name: match[1].decode() for name, match in found.items() if match}
    return {name: version for name, version in made_by.items() if version != get_version()}
