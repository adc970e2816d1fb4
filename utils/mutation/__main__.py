"""Runs the automatic mutants of chapters: `python -m utils.mutation [CHAPTER ...]`."""

from utils.mutation.mutants import main

main()
