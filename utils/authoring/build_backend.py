"""What `pip install .` calls: it says what to type instead, and ends."""

from typing import NoReturn


def refuse(*_: object, **__: object) -> NoReturn:
    """Refuse to make a package of the course.

    Raises SystemExit, whose words pip shows.
    """
    raise SystemExit(
        "The course is not installed as a package: in its folder, run `make start`, or `pip install"
        " -r requirements.txt` and then `python -m jupyterlab`. To use its commands in another"
        " folder, set PYTHONPATH to the course's."
    )


build_wheel = build_editable = build_sdist = refuse  # the hooks of PEP 517 and 660
