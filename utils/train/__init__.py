"""The command `python -m utils.train`, and the rows and functions that it reads by name."""
