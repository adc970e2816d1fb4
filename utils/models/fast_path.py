"""Whether the native forward may stand in for a model's own: tried on a few tokens, not trusted.

`utils.models.forward` and `utils.models.decoding` compute, of the parts that a model's
`get_parts()` says, what the model computes, with less work. You may have edited the model, its
adapters, its value head, or the functions that make a trainer's objective of its logits. So both
ways are run once on a few tokens, with random numbers in place of what is trained, and compared:
values and gradients. If they differ by more than rounding, your own code runs, and a warning says
so. (In bfloat16, gradients alone have to differ by a quarter to be noticed.) They're compared anew
when the model's code, its modules or their plain attributes change, and whenever `train()` begins.
"""

import contextlib
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
from transformer_lens.model_bridge import TransformerBridge

from utils.models.blocks import NativeModel, Parts, is_covered

LIBRARIES = {*sys.stdlib_module_names, "torch", "transformers", "transformer_lens", "jaxtyping",
             "numpy", "einops", "safetensors", "pydantic", "tqdm"}  # fmt: skip
OBSERVED = ("transformers.", "transformer_lens.", "torch.distributed.fsdp.")  # hooks change nothing
PLAIN, FUNCTION = (bool, int, float, str), (FunctionType, MethodType)
UNTOLD = ("__annotations__", "__doc__")  # of a class
MAX_REPR = 300  # characters of a global
TOLERANCE = 1e-3  # of a norm: rounding, with room
SIZE = 0.3  # of the random numbers, so that what is trained changes what comes out
# In shorter dtypes. Thirty blocks with larger numbers make more of a rounding than of an edit, and
# with smaller ones a KL is rounding alone: SmolLM2's log-probs are off by 0.01 in bfloat16, its
# gradients and KL by up to 0.15.
ROUGH_TOLERANCE, ROUGHEST_TOLERANCE, ROUGH_SIZE = 0.08, 0.25, 0.15
SCALING = 8  # for which that is so: of adapters that are scaled otherwise, B is larger or smaller
MAX_KNOWN = 100  # states of a model's code that are remembered

# By model, and by what it was asked and the objects that its code consists of: a reason if the ways
# differ, and those objects, so that no other gets the identity of one of them.
_known: WeakKeyDictionary[Any, dict[Any, tuple[str | None, list[Any]]]] = WeakKeyDictionary()

Run = Callable[[list[Tensor]], dict[str, Tensor]]  # of the trained parameters: what comes out


# --- What a model is made of ----------------------------------------------------------------------


def get_parts(model: Any) -> Parts:
    """Return what a model says that it is made of now; a bridge alone is its own base."""
    return Parts(model) if isinstance(model, TransformerBridge) else model.get_parts()


def find_native(model: Any) -> NativeModel | str:
    """Return the model that `blocks` makes of a model's parts, or what is in the way, in words.

    With a warning where the model cannot say its parts, or a part is something else.
    """
    what = "get_parts()"
    try:
        parts, what = get_parts(model), "its parts"
        return _find_obstacle(model, parts.base) or NativeModel(parts)
    except Exception as error:  # of a reader's code, of any kind
        said = f"{what}: {type(error).__name__}: {error}"
        _say_once(model, said)
        return said


def _find_obstacle(model: Any, base: Any) -> str | None:
    if not is_covered(base.original_model.config):
        kind = base.original_model.config.model_type
        return f"utils.models.blocks can't compute a model of type {kind} with this configuration"
    if any(hasattr(p, "full_tensor") for p in list_parameters(model)):
        return "the weights are sharded"
    frozen = list_parameters(base)
    if torch.is_autocast_enabled(frozen[0].device.type):
        return "autocast is on"
    if torch.is_grad_enabled() and any(p.requires_grad for p in frozen):
        return "the base itself is to get gradients"
    return "somebody's hooks look on" if has_hooks(model) else None


def list_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a model's modules, each once. Its own `modules()` takes five times as long, which is
    felt where a model of thirty blocks learns from short texts on a GPU."""
    found: dict[int, torch.nn.Module] = {}
    waiting: list[torch.nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting.extend(module._modules.values())
    return list(found.values())


def list_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    held = [x for module in list_modules(model) for x in module._parameters.values()]
    return [x for x in held if x is not None]


def has_hooks(model: Any) -> bool:
    """Return whether hooks are attached, besides those of the libraries themselves.

    FSDP's gather the weights: where these are whole, they change nothing.
    """
    if torch.nn.modules.module._has_any_global_hook():
        return True
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for module in list_modules(model):
        held = vars(module)
        if held.get("fwd_hooks") or held.get("bwd_hooks"):  # of a hook point of TransformerLens
            return True
        for hook in (hook for kind in kinds for hook in held[kind].values()):
            if not str(getattr(hook, "__module__", "")).startswith(OBSERVED):
                return True
    return False


# --- Trying it ------------------------------------------------------------------------------------


def agrees(model: Any, functions: tuple[Any, ...], way: str, other: Run, own: Run) -> bool:
    """Return whether another way to compute what a model computes gives the same.

    functions: what a reader wrote that takes part besides the model's own methods.
    way: what is compared, in words, for a warning.
    other, own: run either way, given the trained parameters, whose numbers are random at that
        moment. They are called once for each state of the model's code.

    A sharded model whose weights are gathered can't be tried, as a call would free them: what was
    found before it was sharded holds, and if nothing was, it is taken to be as the course's.
    """
    known = _known.setdefault(model, {})
    code, state = list_code(model, functions)
    if any(isinstance(x, type) and x.__name__.startswith("FSDP") for x in code):
        return all(reason is None for key, (reason, _) in known.items() if key[0] == way)
    sites = tuple(get_parts(model).adapters)  # that are on
    key = (way, torch.is_inference_mode_enabled(), sites, state, *map(id, code))
    if key not in known:
        if len(known) > MAX_KNOWN:
            known.clear()
        reason = _try(model, other, own)
        known[key] = (reason, code)
        if reason is not None:
            _say_once(model, f"{way}: {reason}")
    return known[key][0] is None


def forget(model: Any) -> None:
    """Forget how a model compared, so that it is tried anew."""
    _known.pop(model, None)


def _try(model: Any, other: Run, own: Run) -> str | None:
    """Return the first thing in which two ways differ, in words."""
    weight = next(get_parts(model).base.parameters())
    devices = [weight.device] if weight.device.type == "cuda" else []
    with torch.random.fork_rng(devices), randomized(model) as parameters:
        try:
            return find_difference(other(parameters), own(parameters), weight.dtype)
        except Exception as error:  # of a reader's code, of any kind: it is met where it is run
            return f"{type(error).__name__}: {error}"


def _say_once(model: Any, reason: str) -> None:
    """Warn, unless something was said already of the model as its code is now."""
    known = _known.setdefault(model, {})
    code, _ = list_code(model, ())
    key = ("said", *map(id, code))
    if key not in known:
        known[key] = (reason, code)
        said = f"Your {type(model).__name__} doesn't compute what the fast path computes ({reason})"
        warnings.warn(f"{said}, so your own code runs. That takes longer.", stacklevel=5)


@contextmanager
def randomized(model: Any) -> Iterator[list[Any]]:
    """Put random numbers in place of all that a model has beside its base, until the end, and give
    what of it is trained.

    Bit for bit as before afterwards; autograd sees nothing of it, nor does a random generator.
    """
    parts = get_parts(model)
    frozen = {id(p) for p in parts.base.parameters()}
    parameters = [p for p in model.parameters() if id(p) not in frozen]
    layers = [x for x in parts.adapters.values() if hasattr(x, "lora_B") and hasattr(x, "scaling")]
    scalings = {id(layer.lora_B): layer.scaling for layer in layers}
    saved = [p.data.clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    general = ROUGH_SIZE if is_short(next(parts.base.parameters()).dtype) else SIZE
    try:
        for p in parameters:
            size = general / p.shape[0] ** 0.5 if p.ndim else general
            size = size * SCALING / float(scalings.get(id(p), SCALING))
            p.data.copy_(size * torch.randn(p.shape, generator=generator))
        yield [p for p in parameters if p.requires_grad]
    finally:
        for p, numbers in zip(parameters, saved, strict=True):
            p.data.copy_(numbers)


def is_short(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).bits < 32


def find_difference(
    found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype
) -> str | None:
    """Return the first thing that differs by more than rounding does in a dtype, in words."""
    for name, right in expected.items():
        tolerance = TOLERANCE
        if is_short(dtype):
            is_roughest = "gradient" in name or "KL" in name
            tolerance = ROUGHEST_TOLERANCE if is_roughest else ROUGH_TOLERANCE
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
    modules = list_modules(model)
    held = [vars(m) for m in modules if not _is_of_a_library(type(m))]
    state = [repr(sorted((k, v) for k, v in x.items() if isinstance(v, PLAIN))) for x in held]
    forwards = [vars(m)["forward"] for m in modules if "forward" in vars(m)]  # an object's own
    found: list[Any] = [*forwards, *(x for m in modules for x in (type(m), m.training))]
    waiting: list[Any] = [*functions, *forwards, *dict.fromkeys(map(type, modules))]
    waiting += [x for values in held for x in values.values() if isinstance(x, FUNCTION)]
    seen: set[int] = set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, (*PLAIN, dict, list, tuple)):
            state.append(repr(thing)[:MAX_REPR])
        elif _is_of_a_library(thing):
            continue
        elif isinstance(thing, type):
            waiting += [*thing.__mro__[1:], *(x for k, x in vars(thing).items() if k not in UNTOLD)]
        elif isinstance(thing, property):
            waiting.append(thing.fget)
        elif isinstance(thing, classmethod | staticmethod | MethodType):
            waiting.append(thing.__func__)
        elif isinstance(thing, FunctionType):
            found += [thing.__code__, thing.__defaults__]
            waiting += _list_what_it_reads(thing)
    return found, tuple(state)


def _list_what_it_reads(function: FunctionType) -> list[Any]:
    """Return the values of a function's closure, and the globals that it names: of a reader's
    module, what the function names in it."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    names, known = _get_names(function.__code__), function.__globals__
    found += [known[name] for name in names if name in known]
    modules = [vars(x) for x in found if isinstance(x, ModuleType) and not _is_of_a_library(x)]
    return found + [held[name] for held in modules for name in names if name in held]


def _is_of_a_library(thing: Any) -> bool:
    home = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", "")
    return str(home).partition(".")[0] in LIBRARIES


@functools.cache
def _get_names(code: CodeType) -> tuple[str, ...]:
    """Return the names that code looks up, in the functions inside it too."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(n for c in inner for n in _get_names(c))]))
