"""pytest collects the checks of the chapters as `utils.grading.pytest_plugin` says."""

import os

import pytest
import torch

from utils.grading.pytest_plugin import (  # noqa: F401
    pytest_addoption,
    pytest_configure,
    pytest_ignore_collect,
    pytest_pycollect_makemodule,
    pytest_terminal_summary,
)

if "PYTEST_XDIST_WORKER" in os.environ:  # one process for each core
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n`, what stands in one file runs in one process, as it shares what was computed."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
