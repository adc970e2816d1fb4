"""The command `python -m utils.train`, and the rows and functions that it reads by name."""

from utils.train.data import load_function, load_rows

__all__ = ["load_function", "load_rows"]
