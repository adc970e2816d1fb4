"""Let pytest collect the checks of the chapters, and share them out among processes."""

import gc
import os
import re

import pytest
import torch

from utils.grading import pytest_plugin
from utils.grading.pytest_plugin import (  # noqa: F401
    pytest_addoption,
    pytest_configure,
    pytest_ignore_collect,
    pytest_pycollect_makemodule,
    pytest_terminal_summary,
)

try:
    from xdist.scheduler import LoadScopeScheduling
except ModuleNotFoundError:  # it is of requirements-dev.txt: --submission needs only the others
    LoadScopeScheduling = object

gc.disable()  # until all is imported

if "PYTEST_XDIST_WORKER" in os.environ:  # one process for each core
    torch.set_num_threads(1)

# Long tests that share no fixture with others: they come first, each where a process is free.
APART = re.compile(r"test_running_|_from_the_unpacked_bundle|_in_processes_apart|_and_learns$")
OF_CHAPTER = re.compile(r"test_every_check\.py::.*\[(ch\d+)_")
CHECKS = re.compile(r"tests/checks/(ch\d+)_")
FIRST = re.compile(r"test_(every_check|grading|scale|trainers)\.py")  # the longest modules
FORKED = re.compile(r"course/test_(grade_class|handed_in)\.py")  # they share a forkserver
FEW = 4  # processes: all stay busy although one has a whole chapter's checks


class ByExercise(LoadScopeScheduling):
    """One process runs what belongs to an exercise, or stands in a module, as fixtures are shared.

    So the observations of a known answer are made once, and more cores make it faster. What holds
    of every check runs chapter by chapter; among few processes a chapter's checks run there too, so
    that the reference is observed once. The modules that grade in this process share one.
    """

    def _split_scope(self, nodeid: str) -> str:
        of_chapter = OF_CHAPTER.search(nodeid)
        is_quick = self.config.getoption("--size") == "quick"
        if of_chapter is None and self.numnodes <= FEW and not is_quick:
            of_chapter = CHECKS.search(nodeid)
        if of_chapter:
            return f"every check of {of_chapter[1]}"
        if FORKED.search(nodeid):
            return "grading in processes"
        return nodeid if APART.search(nodeid) else nodeid.rpartition("::")[0]


def pytest_cmdline_main(config: pytest.Config) -> None:
    """Say where the checks stand that were called `tests/test_ch2_ppo.py`."""
    for given in config.args:
        if moved := re.search(r"tests/test_(ch\d+_\w+\.py)", given):
            raise pytest.UsageError(f"{moved[0]} is tests/checks/{moved[1]} now")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    config.option.loadscopereorder = False
    return ByExercise(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests and modules first, so that no process is left with one of them at the end."""
    pytest_plugin.deselect_long(config, items)
    items.sort(key=lambda item: (not APART.search(item.nodeid), not FIRST.search(item.nodeid)))


@pytest.fixture(autouse=True, scope="session")
def _no_pictures():
    """Leave an empty file in place of each run's picture, which takes a quarter of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utils.tracking.plot_history", lambda histories, path: path.touch())
        yield


def pytest_collection_finish() -> None:
    gc.freeze()  # each full collection would look at all that was imported
    gc.enable()
