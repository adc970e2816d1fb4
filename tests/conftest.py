"""Let pytest collect the checks of the chapters, and share them out among processes."""

import os
import re

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from utils.grading import pytest_plugin
from utils.grading.pytest_plugin import (  # noqa: F401
    pytest_addoption,
    pytest_configure,
    pytest_ignore_collect,
    pytest_pycollect_makemodule,
    pytest_terminal_summary,
)

if "PYTEST_XDIST_WORKER" in os.environ:  # one process for each core
    torch.set_num_threads(1)

# Long tests that share no fixture with others: they come first, each where a process is free.
APART = re.compile(r"test_running_|_from_the_unpacked_bundle|_in_processes_apart|_and_learns$")
OF_CHAPTER = re.compile(r"test_every_check\.py::.*\[(ch\d+)_")


class ByExercise(LoadScopeScheduling):
    """One process runs what belongs to an exercise, or stands in a module, as fixtures are shared.

    So the observations of a known answer are made once, and more cores make it faster. What holds
    of every check runs chapter by chapter.
    """

    def _split_scope(self, nodeid: str) -> str:
        if found := OF_CHAPTER.search(nodeid):
            return f"every check of {found[1]}"
        return nodeid if APART.search(nodeid) else nodeid.rpartition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    config.option.loadscopereorder = False
    return ByExercise(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests first, then those of the course, whose modules take longer than exercises."""
    pytest_plugin.deselect_long(config, items)
    items.sort(key=lambda item: (not APART.search(item.nodeid), "/course/" not in item.nodeid))
