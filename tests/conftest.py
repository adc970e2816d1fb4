"""pytest collects the checks of the chapters as `utils.grading.pytest_plugin` says."""

import os

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
