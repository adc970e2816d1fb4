"""The order of the chapters: by number, in which ch10_tools comes after ch9_async."""

import re
from collections.abc import Iterable


def sort_chapters(names: Iterable[str]) -> list[str]:
    """Return names such as "ch9_async" in the order of their numbers; others come last."""

    def get_place(name: str) -> tuple[float, str]:
        match = re.match(r"ch(\d+)", name)
        return (int(match[1]) if match else float("inf"), name)

    return sorted(names, key=get_place)
