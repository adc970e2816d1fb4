"""Whether the native forward may stand in for a model's own: tried on a few tokens, not trusted.

`utils.models.forward` and `utils.models.decoding` compute what a model computes, with less work.
You may have edited the model, its adapters, its value head, or the functions that make a trainer's
objective of its logits. So both ways are run once on a few tokens, with random numbers in place of
what is trained, and compared: values and gradients. If they differ, your own code runs, and a
warning says so. They're compared anew when the model's code, its modules or their plain attributes
change, and whenever `train()` begins.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from utils.models.blocks import SITES, NativeModel, is_covered

LIBRARIES = {*sys.stdlib_module_names, "torch", "transformers", "transformer_lens", "jaxtyping",
             "numpy", "einops", "safetensors", "pydantic", "tqdm"}  # fmt: skip
CODE = FunctionType | MethodType | classmethod | staticmethod | property | type
PLAIN = (bool, int, float, str)
MAX_REPR = 300  # characters of a global
UNTOLD = {"__doc__", "__module__", "__qualname__", "__annotations__", "__firstlineno__"}
TOLERANCE, ROUGH_TOLERANCE = 1e-3, 0.1  # of a norm, and in shorter dtypes: rounding, with room
SIZE = 0.3  # of the random numbers, so that what is trained changes what comes out
SCALING = 8  # for which that is so: of adapters that are scaled otherwise, B is larger or smaller
MAX_KNOWN = 100  # states of a model's code that are remembered

# By model, and by what it was asked and the objects that its code consists of: a reason if the ways
# differ, and those objects, so that no other gets the identity of one of them.
_known: WeakKeyDictionary[Any, dict[Any, tuple[str | None, list[Any]]]] = WeakKeyDictionary()


# --- What the native forward can compute, as things are -------------------------------------------


def find_native(model: Any) -> tuple[NativeModel, bool] | None:
    """Return the parts of a model that `blocks` computes, and whether its adapters are on.

    None for other architectures and sites, when somebody's hooks are attached, in autocast, for
    sharded weights, and when the base itself is to get gradients.
    """
    base = getattr(model, "base", model)
    adapters = getattr(model, "adapters", {})
    mode = get_mode(model)
    if not (
        is_covered(base.original_model.config)
        and mode is not None
        and not any(hasattr(p, "full_tensor") for p in model.parameters())  # sharded
        and not torch.is_autocast_enabled(next(base.parameters()).device.type)
        and {site.split(".", 2)[2] for site in adapters} <= SITES
        and not has_hooks(model)
        and not (torch.is_grad_enabled() and any(p.requires_grad for p in base.parameters()))
    ):
        return None
    try:
        return NativeModel(base, adapters), mode == "hooked"
    except (AttributeError, RuntimeError, TypeError):  # a part was replaced by something else
        return None


def get_mode(model: Any) -> str | None:
    """Return "hooked", "reference" or "merged"; "reference" for a bridge alone."""
    return getattr(model, "_mode", None if getattr(model, "adapters", {}) else "reference")


def has_hooks(model: Any) -> bool:
    """Return whether hooks are attached, besides those of the libraries themselves.

    FSDP's gather the weights: where these are whole, they change nothing.
    """
    base = getattr(model, "base", model)
    if any(point.fwd_hooks or point.bwd_hooks for point in base.hook_dict.values()):
        return True
    if torch.nn.modules.module._has_any_global_hook():
        return True
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for m in model.modules() for kind in kinds for hook in vars(m)[kind].values()]
    homes = {getattr(hook, "__module__", None) or "" for hook in hooks}
    libraries = ("transformers.", "transformer_lens.", "torch.distributed.fsdp.")
    return not all(home.startswith(libraries) for home in homes)


# --- Trying it ------------------------------------------------------------------------------------


def agrees(
    model: Any, functions: tuple[Any, ...], way: str, compare: Callable[[list[Any]], str | None]
) -> bool:
    """Return whether another way to compute what a model computes gives the same.

    functions: what a reader wrote that takes part besides the model's own methods.
    way: what is compared, in words, for a warning.
    compare: given the trained parameters, whose numbers are random at that moment, it returns None
        or what differs. It is called once for each state of the model's code.

    A sharded model whose weights are gathered can't be tried, as a call would free them: what was
    found before it was sharded holds, and if nothing was, it is taken to be as the course's.
    """
    known = _known.setdefault(model, {})
    if any(type(m).__name__.startswith("FSDP") for m in model.modules()):
        return all(reason is None for key, (reason, _) in known.items() if key[0] == way)
    code, state = list_code(model, functions)
    key = (way, get_mode(model), torch.is_inference_mode_enabled(), state, *map(id, code))
    if key not in known:
        if len(known) > MAX_KNOWN:
            known.clear()
        device = next(model.parameters()).device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), randomized(model) as parameters:
            known[key] = (compare(parameters), code)
        if (reason := known[key][0]) is not None:
            _say_once(model, f"{way}: {reason}")
    return known[key][0] is None


def forget(model: Any) -> None:
    """Forget how a model compared, so that it is tried anew."""
    _known.pop(model, None)


def _say_once(model: Any, reason: str) -> None:
    """Warn, unless something was said already of the model as its code is now."""
    code, _ = list_code(model, ())
    key = ("said", *map(id, code))
    if key not in _known[model]:
        _known[model][key] = (reason, code)
        said = f"Your {type(model).__name__} doesn't compute what the fast path computes ({reason})"
        warnings.warn(f"{said}, so your own code runs. That takes longer.", stacklevel=5)


@contextmanager
def randomized(model: Any) -> Iterator[list[Any]]:
    """Put random numbers in place of all that a model has beside its base, until the end, and give
    what of it is trained.

    Bit for bit as before afterwards; autograd sees nothing of it, nor does a random generator.
    """
    named = [(n, p) for n, p in model.named_parameters() if not n.startswith("base.")]
    named = named if hasattr(model, "base") else []
    parameters = [p for _, p in named]
    scalings = {id(layer.lora_B): layer.scaling for layer in getattr(model, "adapters", {}).values()
                if hasattr(layer, "lora_B") and hasattr(layer, "scaling")}  # fmt: skip
    saved = [p.data.clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        for p in parameters:
            size = SIZE / p.shape[0] ** 0.5 if p.ndim else SIZE
            size = size * SCALING / float(scalings.get(id(p), SCALING))
            p.data.copy_(size * torch.randn(p.shape, generator=generator))
        yield [p for p in parameters if p.requires_grad]
    finally:
        for p, numbers in zip(parameters, saved, strict=True):
            p.data.copy_(numbers)


def find_difference(
    found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype
) -> str | None:
    """Return the first thing that differs by more than rounding does in a dtype, in words."""
    tolerance = TOLERANCE if torch.finfo(dtype).bits >= 32 else ROUGH_TOLERANCE
    for name, right in expected.items():
        if found[name].shape != right.shape:
            return f"{name}: shape {list(found[name].shape)} for {list(right.shape)}"
        off, size = (x.double().norm().item() for x in (found[name] - right, right))
        if not off <= tolerance * size + 1e-6:
            return f"{name}: off by {off / max(size, 1e-6):.2g} of their size"
    return None


# --- The state of its code ------------------------------------------------------------------------


def list_code(model: Any, functions: tuple[Any, ...]) -> tuple[list[Any], tuple[str, ...]]:
    """Return the code that a model and these functions run, without a library's, and the kinds of
    the model's modules: the very same objects until one of them is replaced. And the plain values
    that it may read, in words: attributes of the model's own modules, and globals."""
    modules = list(model.modules())
    own = [m for m in modules if not _is_of_a_library(type(m))]
    state = [repr(sorted((k, v) for k, v in vars(m).items() if isinstance(v, PLAIN))) for m in own]
    found: list[Any] = [x for m in modules for x in (type(m), m.training)]
    waiting: list[Any] = [*functions, *{type(m): None for m in modules}]
    waiting += [vars(m)["forward"] for m in modules if "forward" in vars(m)]  # an object's own
    waiting += [x for x in vars(model).values() if isinstance(x, FunctionType | MethodType)]
    seen: set[int] = set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, (*PLAIN, dict, list, tuple)):
            state.append(repr(thing)[:MAX_REPR])
        if not isinstance(thing, CODE) or _is_of_a_library(thing):
            continue
        elif isinstance(thing, type):
            waiting += [cls for cls in thing.__mro__ if cls is not thing]
            waiting += [x for name, x in vars(thing).items() if name not in UNTOLD]
        elif isinstance(thing, property):
            waiting.append(thing.fget)
        elif isinstance(thing, classmethod | staticmethod | MethodType):
            waiting.append(thing.__func__)
        else:
            found += [thing.__code__, thing.__defaults__]
            waiting += [cell.cell_contents for cell in thing.__closure__ or () if _is_set(cell)]
            names, known = _get_names(thing.__code__), thing.__globals__
            used = [known[name] for name in names if name in known]
            modules = [vars(x) for x in used if isinstance(x, ModuleType) and not _is_library(x)]
            waiting += used + [held[name] for held in modules for name in names if name in held]
    return found, tuple(state)


def _is_of_a_library(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in LIBRARIES


def _is_library(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] in LIBRARIES


@functools.cache
def _get_names(code: CodeType) -> tuple[str, ...]:
    """Return the names that code looks up, in the functions inside it too."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(n for c in inner for n in _get_names(c))]))


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
