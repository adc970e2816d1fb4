"""Methods that stay on a class when the cell that gives it runs once more.

A class is given in one cell, and its exercises re-open it in later ones: `class T(T)`. Running the
first again would lose what was written in the others.
"""

import types
from typing import Any

from IPython import get_ipython

from utils.grading.substitution import rebind

METHODS = (types.FunctionType, classmethod, staticmethod, property)
_watched: set[str] = set()  # names of classes
_before: dict[str, type] = {}  # the classes as they were when a cell began


def watch(classes: set[str]) -> None:
    """Keep what is attached to classes of these names from now on; without IPython, do nothing."""
    _watched.clear()
    _watched.update(classes)
    shell = get_ipython()
    for event, callback in (("pre_run_cell", _begin_cell), ("post_run_cell", _end_cell)):
        if shell is not None and callback not in shell.events.callbacks[event]:
            shell.events.register(event, callback)


def _begin_cell(*_: Any) -> None:
    """Note what classes there are, before a cell runs."""
    names = get_ipython().user_ns
    _before.clear()
    _before.update({n: names[n] for n in _watched if isinstance(names.get(n), type)})


def _end_cell(*_: Any) -> None:
    if kept := keep(get_ipython().user_ns):
        print(f"A class was defined anew; what was attached to it stays: {', '.join(kept)}")


def keep(names: dict[str, Any]) -> list[str]:
    """Put back, after a cell has run, what was attached to the classes that it defined anew.

    Returns what is put back, as "T.method".
    """
    kept = []
    for name, old in _before.items():
        new = names.get(name)
        if not isinstance(new, type) or issubclass(new, old) or new.__module__ != old.__module__:
            continue
        layers = [cls for cls in reversed(old.__mro__) if cls.__name__ == name]
        lost = {key for layer in layers for key in _get_methods(layer)} - _get_methods(new).keys()
        for key, method in _get_methods(layers[0]).items():
            if key in lost:
                setattr(new, key, rebind(method, new))
        # What the cell did not define before has been moved into it.
        moved = _get_methods(new).keys() - _get_methods(layers[0]).keys()
        for layer in layers[1:]:
            methods = {k: m for k, m in _get_methods(layer).items() if k not in moved}
            if not methods:
                continue
            new = type(name, (new,), {"__module__": old.__module__, "__doc__": new.__doc__})
            for key, method in methods.items():
                setattr(new, key, rebind(method, new))
        names[name] = new
        kept += [f"{name}.{key}" for key in sorted(lost)]
    return kept


def _get_methods(cls: type) -> dict[str, Any]:
    return {key: value for key, value in vars(cls).items() if isinstance(value, METHODS)}
