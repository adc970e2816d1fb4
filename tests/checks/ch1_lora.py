"""Checks of chapter 1: the adapter, its hooks, the LoRA-hooked transformer, fine-tuning's loss.

The order in which a model gives its adapters' parameters is its own. So adapters of one shape get
the same values where logits are compared with an oracle, and what is measured of each parameter is
sorted. The rank equals no other size: a parameter that ends in it is an A.
"""

import contextlib
import functools
import gc
import itertools
import math
import operator
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache

from tests.oracles.ch1_lora import (
    ByHuggingFace,
    LoraByOuterProducts,
    OfTheClassAsked,
    context_by_hugging_face,
    forward_by_hugging_face,
    hooks_by_position,
    parameters_by_backward,
    score_by_hugging_face,
    sft_loss_by_loops,
)
from tests.support import models
from tests.support.inputs import (
    NAN,
    attempt,
    error_of,
    find_leaves,
    gradients,
    is_error,
    leaf,
    ragged_batch,
    ragged_mask,
    sliced,
    with_inputs_after,
)
from tests.support.models import ATTENTION, SITES, get_sizes
from utils.grading.checks import check
from utils.models.loading import load_base_model

RANK, ALPHA = 3, 7
# Logits are of size 3, and two ways of computing them in float32 differ by 1e-5.
CLOSE = {"float64": False, "atol": 2e-4, "rtol": 1e-4}

# --- LoraLayer ----------------------------------------------------------------------------------


def set_layer(layer, lora_A: Tensor, lora_B: Tensor):
    """Put values into an adapter."""
    layer.lora_A.data.copy_(lora_A)
    layer.lora_B.data.copy_(lora_B)
    return layer


def random_layer(student, rng, *args: int, **kwargs):
    """An adapter that does something: A and B are random."""
    layer = student.LoraLayer(*args, **kwargs)
    return set_layer(layer, rng.normal(*layer.lora_A.shape), rng.normal(*layer.lora_B.shape))


def compute_change(layer) -> Tensor:
    """What is added to the weight, by the layer's own `compute_delta` if it has one."""
    if hasattr(layer, "compute_delta"):
        return layer.compute_delta().to(layer.lora_A.dtype)
    return layer(torch.eye(*layer.lora_A.shape[:1], dtype=layer.lora_A.dtype))


def layer_and_gradients(layer, x: Tensor) -> dict[str, Tensor]:
    x = leaf(x)
    output = layer(x)
    return {"the result": output} | gradients_of_layer(output * output.detach(), layer, x=x)


def gradients_of_layer(output: Tensor, layer, **inputs: Tensor) -> dict[str, Tensor]:
    """`gradients` for the inputs and those of A and B that have one."""
    named = {"lora_A": layer.lora_A, "lora_B": layer.lora_B}
    trained = {name: p for name, p in named.items() if p.requires_grad}
    frozen = {f"the gradient for {name}": torch.zeros_like(p) for name, p in named.items()}
    return frozen | gradients(output, **inputs, **trained)


@check("LoraLayer", public=True, expected=[22.0, 0.0, -22.0])
def worked_adapter(student, rng):
    """x = [3, 4], A = [[1], [2]], B = [[1, 0, -1]]: x A = 11, times alpha / rank = 2 / 1"""
    layer = student.LoraLayer(2, 3, rank=1, alpha=2)
    set_layer(layer, rng.tensor([[1.0], [2.0]]), rng.tensor([[1.0, 0.0, -1.0]]))
    return layer(rng.tensor([3.0, 4.0]))


NEW_LAYERS = [(90, 5, 3000, 2), (40, 70)]


def _starts_right(observed, reference):
    for sizes, found, given in zip(NEW_LAYERS, observed, reference, strict=True):
        d_in, which, bound = sizes[0], f"LoraLayer{sizes}", f"±1/sqrt({sizes[0]})"
        shapes = sorted(list(found[name].shape) for name in ("lora_A", "lora_B"))
        if (trained := found["shapes of what is trained"]) != shapes:
            return f"{which} trains shapes {trained}, but A and B have {shapes}"
        if (matrices := found["shapes of its matrices"]) != shapes:
            return f"{which} has parameters of {matrices}, but A and B have {shapes}"
        if (n_listed := found["parameters listed for two"]) != 2 * found["parameters"]:
            return f"a module of two {which} lists {n_listed} parameters: layers should differ"
        entries = found["lora_A"].double().flatten() * math.sqrt(d_in)
        spread = entries.std().item() * math.sqrt(3)
        if abs(spread - 1) > 0.1:
            return f"{which}: lora_A spreads {spread:.2g} times as far as uniform in {bound} would"
        counts = torch.histc(entries, bins=10, min=-1, max=1)
        statistic = (counts - len(entries) / 10).square().sum() / (len(entries) / 10)
        if entries.abs().max() > 1 + 1e-6 or statistic > 65:  # 9 degrees of freedom: p < 1e-9
            return f"{which}: lora_A is not uniform in {bound}"
        if torch.equal(found["lora_A"], found["lora_A of a second layer"]):
            return f"{which}: two new layers should not have the same lora_A"
        if found["lora_B"].any() or found["the result"].any():
            return f"{which}: lora_B should start at 0, so that a new adapter changes nothing"
        rank, alpha = sizes[2:] or (4, 32)
        through = given["x"] @ found["lora_A"] @ given["another B"] * alpha / rank
        if not torch.allclose(found["the result with another B"], through, rtol=1e-3, atol=1e-3):
            return f"{which}: with another B the result should be x A B alpha/rank"
    return None


@check("LoraLayer", public=True, points=2, holds=_starts_right)
def new_adapters(student, rng):
    """A new adapter: A uniform in ±1/sqrt(d_in), B zero, and both are trained"""
    found = []
    for sizes in NEW_LAYERS:
        layer, second = student.LoraLayer(*sizes), student.LoraLayer(*sizes)
        shapes = [list(p.shape) for p in layer.parameters()]
        trained = [list(p.shape) for p in layer.parameters() if p.requires_grad]
        x, another = rng.normal(3, sizes[0]), rng.normal(*layer.lora_B.shape)
        found.append(
            {
                "shapes of what is trained": sorted(trained),
                "shapes of its matrices": sorted(shape for shape in shapes if len(shape) > 1),
                "parameters": len(shapes),
                "parameters listed for two": len([*nn.ModuleList([layer, second]).parameters()]),
                "lora_A": layer.lora_A,
                "lora_B": layer.lora_B.detach().clone(),
                "lora_A of a second layer": second.lora_A,
                "the result": layer(x),
                "x": x,
                "another B": another,
            }
        )
        layer.lora_B.data.copy_(another)
        found[-1]["the result with another B"] = layer(x)
    return found


@check("LoraLayer", public=True, points=2, seeds=2, expected=LoraByOuterProducts)
def random_adapters(student, rng):
    """Random adapters and inputs: output and gradients; in eval(), frozen and in float64 too"""
    found = {}
    for rank, alpha in ((1, 1), (2, 5), (6, 4), (3, 0.5)):
        layer = random_layer(student, rng, 5, 3, rank=rank, alpha=alpha)
        found[f"rank {rank}, alpha {alpha}"] = [
            layer_and_gradients(layer, rng.normal(*leading, 5)) for leading in ((), (1,), (2, 3))
        ]
    named = random_layer(student, rng, d_in=2, d_out=3)
    found["given by name"] = named(rng.normal(2))
    wide = random_layer(student, rng, 3, 6, 2, 8)
    found["given by position"] = with_inputs_after(wide, rng.normal(2, 1, 4, 3))
    defaults = random_layer(student, rng, 6, 6)
    found["default rank and alpha"] = layer_and_gradients(defaults, rng.normal(2, 6))
    found["an input that is a view"] = defaults(rng.normal(2, 6, 4).mT)
    found["the change of the weight"] = compute_change(wide)
    attempt(wide, rng.normal(2, 3).bfloat16())  # refused or cast: the parameters stay
    found["A and B after an input in bfloat16"] = [wide.lora_A, wide.lora_B]
    wide.eval()
    x = rng.normal(2, 3)
    found["eval()"] = layer_and_gradients(wide, x)
    for values in ("A and B as before", "other A and B"):
        with torch.no_grad():
            found[f"eval() and no_grad, {values}"] = [wide(x), compute_change(wide)]
        found[f"the change of the weight in eval(), {values}"] = compute_change(wide)
        set_layer(wide, rng.normal(3, 2), rng.normal(2, 6))
    wide.requires_grad_(False)  # what is before it may be trained
    found["A and B frozen"] = layer_and_gradients(wide, x)
    return found | {"all in float64": wide.double()(x.double()).to(rng.dtype)}


@check("LoraLayer", expected=LoraByOuterProducts)
def gradient_at_the_start(student, rng):
    """The gradients of A and B at the start, when B is zero"""
    layer = student.LoraLayer(5, 3, rank=2)
    layer.lora_A.data.copy_(rng.normal(5, 2))
    x, weights = rng.normal(4, 5), rng.normal(4, 3)
    return gradients_of_layer(layer(x) * weights, layer)


@check("LoraLayer", tier="hardening")
def inputs_of_other_dtypes(student, rng):
    """x in bfloat16, float16 and float64 is cast to the dtype of the adapter"""
    layer = random_layer(student, rng, 5, 3)
    x = rng.normal(4, 5)
    return {
        f"the result of x in {dtype}": layer(x.bfloat16().to(dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
    }


# --- make_lora_hooks ----------------------------------------------------------------------------


def call_hooks(hooks, point: str, activation: Tensor, ctx: dict | None = None) -> Tensor:
    """Call the hooks of a point as TransformerLens does: None leaves the activation as it is.

    ctx: what hooks may keep at their points, by the names of these.
    """
    kept = {} if ctx is None else ctx
    for name, function in hooks:
        if name == point:
            hook = SimpleNamespace(name=name, ctx=kept.setdefault(name, {}))
            result = function(activation, hook=hook)
            activation = activation if result is None else result
    return activation


def call_both(
    hooks, site: str, x: Tensor, out: Tensor, ctx: dict | None = None
) -> dict[str, Tensor]:
    return {
        "the input": call_hooks(hooks, f"{site}.hook_in", x, ctx),
        "the output": call_hooks(hooks, f"{site}.hook_out", out, ctx),
    }


@check(
    "make_lora_hooks",
    public=True,
    expected={
        "names": ["blocks.3.attn.q.hook_in", "blocks.3.attn.q.hook_out"],
        "the input": [[[3.0, 4.0]]],
        "the output": [[[[122.0], [100.0], [78.0]]]],
    },
)
def worked_hooks(student, rng):
    """x = [3, 4], x A B alpha / rank = [22, 0, -22], added to three heads of [100]"""
    layer = student.LoraLayer(2, 3, rank=1, alpha=2)
    set_layer(layer, rng.tensor([[1.0], [2.0]]), rng.tensor([[1.0, 0.0, -1.0]]))
    hooks = student.make_lora_hooks("blocks.3.attn.q", layer)
    x, out = rng.tensor([[[3.0, 4.0]]]), torch.full((1, 1, 3, 1), 100.0)
    return {"names": sorted(name for name, _ in hooks)} | call_both(
        hooks, "blocks.3.attn.q", x, out
    )


HEAD_AXES = {  # site, axes at hook_in, axes at hook_out
    "none": ("mlp.in", (6,), (8,)),
    "at hook_out": ("attn.q", (6,), (4, 2)),
    "at hook_in": ("attn.o", (3, 2), (8,)),
    "on both sides": ("some.site", (2, 3), (2, 4)),
    "in groups": ("some.site", (3, 1, 2), (2, 2, 2)),
    "a single one at hook_out": ("attn.k", (6,), (1, 8)),
    "a single one at hook_in": ("attn.o", (1, 6), (8,)),
}


@check("make_lora_hooks", public=True, points=2, seeds=2, expected=hooks_by_position)
def head_axes(student, rng):
    """Head axes on the input, the output, both or neither: the sum and its gradients"""
    found = {}
    layer = random_layer(student, rng, 6, 8, rank=3, alpha=7).eval()
    layer.lora_B.data.zero_()
    hooks = student.make_lora_hooks("blocks.1.some.site", layer)
    x, out = rng.normal(2, 3, 5, 2).transpose(1, 2), rng.normal(2, 5, 8)
    result = call_both(hooks, "blocks.1.some.site", x, out)["the output"]
    weights = rng.normal(2, 5, 8)
    found["B = 0"] = gradients(result * weights, lora_A=layer.lora_A, lora_B=layer.lora_B)
    layer.lora_B.data.copy_(rng.normal(3, 8))
    out = rng.normal(2, 4, 5, 2).transpose(1, 2)
    found["in eval()"] = call_both(hooks, "blocks.1.some.site", x, out)["the output"]
    layer.requires_grad_(False)  # what is before it may be trained
    x = leaf(x)
    result = call_both(hooks, "blocks.1.some.site", x * 1, out * 1)["the output"]
    found["A and B frozen"] = gradients(result * weights.reshape(out.shape), x=x)
    for name, (site, x_axes, out_axes) in HEAD_AXES.items():
        layer = random_layer(student, rng, 6, 8, rank=3, alpha=7)
        hooks = student.make_lora_hooks(f"blocks.1.{site}", layer)
        x, out = leaf(rng.normal(2, 5, *x_axes)), leaf(rng.normal(2, 5, *out_axes))
        result = call_both(hooks, f"blocks.1.{site}", x * 1, out * 1)
        found[f"{site}, head axes: {name}"] = result | gradients(
            result["the output"] * rng.normal(2, 5, *out_axes),
            x=x,
            out=out,
            lora_A=layer.lora_A,
            lora_B=layer.lora_B,
        )
    return found


@check("make_lora_hooks", expected=hooks_by_position, tier="hardening")
def several_forwards(student, rng):
    """Two adapters on one site; a forward pass after one that broke off; an adapter of NaN"""
    sites = ("blocks.0.attn.v", "blocks.10.attn.v", "blocks.0.attn.v")
    layers = [random_layer(student, rng, 4, 6, rank=2) for _ in sites]
    pairs = [student.make_lora_hooks(*both) for both in zip(sites, layers, strict=True)]
    hooks = [hook for pair in pairs for hook in pair]
    call_hooks(hooks, f"{sites[0]}.hook_in", rng.normal(2, 3, 4))  # and then an error
    found = {}
    for number, rows, seq in (("first", 2, 3), ("second", 1, 5)):
        for site in sites[:2]:
            call_hooks(hooks, f"{site}.hook_in", rng.normal(rows, seq, 4))
        for site in sites[:2]:
            out = rng.normal(rows, seq, 6)
            found[f"{site}, {number}"] = call_hooks(hooks, f"{site}.hook_out", out)
    layers[1].lora_B.data[0, 0] = NAN
    diverged = call_both(pairs[1], sites[1], rng.normal(2, 3, 4), rng.normal(2, 3, 6))
    n_nan = diverged["the output"].isnan().sum().item()
    return found | {"the number of nan where an adapter holds one": n_nan}


DTYPES = {
    "bfloat16 activations, a float32 adapter": (torch.bfloat16, torch.bfloat16),
    "float16 activations, a float32 adapter": (torch.float16, torch.float16),
    "float32 activations and adapter": (torch.float32, torch.float32),
    "a float32 input and a bfloat16 output": (torch.float32, torch.bfloat16),
}


def _keeps_the_dtype(observed, reference):
    for name in DTYPES:
        yours, expected = observed[name].double(), reference[name].double()
        if (yours - expected).abs().max() > 0.02 * expected.abs().max():
            return f"{name}: the output is wrong by more than rounding"
        if not torch.equal(observed[f"{name}, the input"], reference[f"{name}, the input"]):
            return f"{name}: the input should go on as it is"
        differs = observed[name] != observed[f"{name}, with gradients"]
        if differs.float().mean() > 0.2:  # one more or less by rounding
            return f"{name}: under no_grad the output is different, so the first ratio is not 1"
        for of in ("x", "out", "lora_A", "lora_B"):
            yours, expected = (
                found[f"{name}, the gradients"][f"the gradient for {of}"].double()
                for found in (observed, reference)
            )
            if (yours - expected).abs().max() > 0.05 * expected.abs().max():
                return f"{name}: the gradient for {of} is wrong by more than rounding"
    if not torch.equal(observed["lora_A afterwards"], reference["lora_A afterwards"]):
        return "the hooks round the trained lora_A: cast what passes through, not the layer"
    return None


@check("make_lora_hooks", holds=_keeps_the_dtype, tier="hardening")
def dtypes(student, rng):
    """A 16-bit model: the output keeps its dtype, and the adapter stays in float32"""
    layer = random_layer(student, rng, 6, 8, rank=3, alpha=7)
    hooks = student.make_lora_hooks("blocks.0.attn.q", layer)
    found = {}
    for name, (x_dtype, out_dtype) in DTYPES.items():
        x, out = rng.normal(2, 4, 6).to(x_dtype), rng.normal(2, 4, 4, 2).to(out_dtype)
        with torch.no_grad():
            both = call_both(hooks, "blocks.0.attn.q", x.clone(), out.clone())
        found |= {name: both["the output"], f"{name}, the input": both["the input"]}
        inputs = {"x": leaf(x), "out": leaf(out), "lora_A": layer.lora_A, "lora_B": layer.lora_B}
        both = call_both(hooks, "blocks.0.attn.q", inputs["x"] * 1, inputs["out"] * 1)
        found[f"{name}, with gradients"] = both["the output"].detach()
        weights = rng.normal(2, 4, 4, 2).to(out_dtype)
        found[f"{name}, the gradients"] = gradients(both["the output"] * weights, **inputs)
    return found | {"lora_A afterwards": layer.lora_A}


class Storages(TorchDispatchMode):
    """Inside, weak references to the storage of every tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        given, made = (
            {s.data_ptr(): s for s in map(Tensor.untyped_storage, _list_tensors(tree))}
            for tree in ((args, kwargs), output)
        )
        self.made += [StorageWeakRef(made[pointer]) for pointer in made.keys() - given.keys()]
        return output


def _list_tensors(tree: Any) -> list[Tensor]:
    """Scalars aside, which may be constants."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.numel() > 1]


def count_held(storages: Iterable[StorageWeakRef]) -> int:
    """How many storages something holds; cycles are collected only where one seems to be held."""
    if not all(storage.expired() for storage in storages):
        gc.collect()
    return sum(not storage.expired() for storage in storages)


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Inside, a collection of cycles looks at what is new alone: all there is takes half a second
    each time."""
    frozen = gc.get_freeze_count() > 0
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


@check("make_lora_hooks", points=2, expected=hooks_by_position, tier="hardening")
def what_is_kept(student, rng):
    """Nothing is held after a forward pass, and what a broken pass left is overwritten"""
    with quick_collections():
        return _find_what_is_kept(student, rng)


def _find_what_is_kept(student, rng):
    layer = random_layer(student, rng, 6, 8, rank=3, alpha=7)
    hooks = student.make_lora_hooks("blocks.0.attn.o", layer)
    found, ctx = {}, {}
    for mode in (torch.no_grad, torch.enable_grad):
        old_x, x, out = (rng.normal(*shape) for shape in ((2, 4, 3, 2), (2, 5, 3, 2), (2, 5, 8)))
        named = (("x", x), ("out", out), ("x of the forward that broke off", old_x))
        given = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in named}
        layer.train(mode is torch.enable_grad)
        with mode(), Storages() as storages:
            call_hooks(hooks, "blocks.0.attn.o.hook_in", old_x.clone(), ctx)  # and then an error
            first = [*storages.made]
            call_hooks(hooks, "blocks.0.attn.o.hook_in", old_x, ctx)
            n_of_first = count_held(first)
            result = call_both(hooks, "blocks.0.attn.o", x, out, ctx)["the output"]
        found[mode.__name__] = {
            "the output": result.detach().clone(),
            "tensors held of a first input, after the second": n_of_first,
        }
        del named, old_x, x, out, result  # with the result goes its graph
        found[mode.__name__] |= {
            f"{name} is freed": not count_held([s]) for name, s in given.items()
        }
        found[mode.__name__]["tensors held that were made of them"] = count_held(storages.made)
    return found


HOOKED_SITES = {
    "gpt2": ("blocks.0.attn.k", "blocks.0.attn.o", "blocks.1.mlp.out"),
    "llama": ("blocks.0.attn.q", "blocks.0.attn.v", "blocks.0.attn.o", "blocks.0.mlp.gate"),
}


def _equals_a_changed_weight(observed, reference):
    for kind, found in reference.items():
        layers = zip(HOOKED_SITES[kind], found["lora_A"], found["lora_B"], strict=True)
        deltas = {site: (a @ b).double() * ALPHA / RANK for site, a, b in layers}
        logits = score_by_hugging_face(kind, deltas, found["ids"])
        if not torch.allclose(observed[kind]["logits"].double(), logits, atol=1e-3):
            return f"{kind}: the logits differ from those with A B alpha/rank added to the weights"
    return None


@check("make_lora_hooks", points=2, holds=_equals_a_changed_weight)
def hooks_on_a_model(student, rng):
    """In a model: the logits of plain Hugging Face with the change added to its weights"""
    found = {}
    for kind, sites in HOOKED_SITES.items():
        layers = []
        for site in sites:
            d_in, d_out = get_sizes(kind, site.split(".", 2)[2])
            layer = student.LoraLayer(d_in, d_out, rank=RANK, alpha=ALPHA)
            lora_A, lora_B = rng.normal(d_in, RANK, std=d_in**-0.5), rng.normal(RANK, d_out)
            layers.append(set_layer(layer, lora_A, lora_B * 0.3))
        pairs = [student.make_lora_hooks(*both) for both in zip(sites, layers, strict=True)]
        base = load_base_model(models.get_checkpoint(kind), device="cpu")
        ids = rng.integers(3, 512, 2, 6)
        with base.hooks(fwd_hooks=[hook for pair in pairs for hook in pair]):
            logits = base(ids)
        found[kind] = {
            "logits": logits,
            "ids": ids,
            "lora_A": [layer.lora_A for layer in layers],
            "lora_B": [layer.lora_B for layer in layers],
        }
    return found


# --- Models and what is observed of them --------------------------------------------------------


def boot(student, kind: str, rank: int = RANK, alpha: int = ALPHA, sites=None, **options):
    """A model with adapters on every site, unless told which."""
    return student.TransformerWithLora.from_pretrained(
        models.get_checkpoint(kind),
        rank=rank,
        alpha=alpha,
        sites=SITES[kind] if sites is None else sites,
        device="cpu",
        **options,
    )


def set_alike(model, rng, rank: int = RANK):
    """Random values, the same in all parameters of one shape: their order does not matter."""
    seed = rng.integer(0, 2**31)
    for parameter in model.trainable_parameters():
        first, last = parameter.shape[0], parameter.shape[-1]
        generator = torch.Generator().manual_seed(seed + 1009 * first + last)
        draws = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.data.copy_(draws * (first**-0.5 if last == rank else 0.15))
    return model


def set_apart(model, rng, rank: int = RANK):
    """Random values, others in each parameter: for comparing a model with itself."""
    for parameter in model.trainable_parameters():
        scale = parameter.shape[0] ** -0.5 if parameter.shape[-1] == rank else 0.15
        parameter.data.copy_(rng.normal(*parameter.shape) * scale)
    return model


def add_head(model, rng, d_out: int = 1) -> list[nn.Parameter]:
    """Give a model a part more, as chapter 2 does; none if it lacks the helpers for that."""
    if not (hasattr(model, "trainable_parts") and hasattr(model, "trainable_state")):
        return []
    head = nn.Linear(models.D_MODEL, d_out)
    parts, state = model.trainable_parts, model.trainable_state
    named = dict(head.named_parameters(prefix="value_head"))
    for parameter in named.values():
        parameter.data.copy_(rng.normal(*parameter.shape))
    model.value_head = head
    model.trainable_parts = lambda: parts() | {"value_head": [*named.values()]}
    model.trainable_state = lambda: state() | {name: p.data for name, p in named.items()}
    return [*named.values()]


def score(model, ids: Tensor, mask: Tensor) -> Tensor:
    """The logits at real tokens, [tokens vocab]."""
    return model(ids, mask)[mask.bool()]


def measure(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Tensors in any order: by shape, four numbers for each, each of the four sorted."""
    by_shape: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        shape = " ".join(map(str, tensor.shape))
        by_shape.setdefault(shape, []).append(tensor.detach().flatten().double())
    measured = {}
    for shape, group in sorted(by_shape.items()):
        flat = torch.stack(group)  # [tensors size]
        generator = torch.Generator().manual_seed(flat.shape[1])
        directions = torch.randn(flat.shape[1], 3, generator=generator, dtype=torch.float64)
        numbers = torch.cat([flat @ directions, flat.norm(dim=1, keepdim=True)], dim=1)
        measured[f"parameters of shape [{shape}]"] = numbers.sort(dim=0).values.float()
    return measured


def measure_gradients(model, output: Tensor) -> dict[str, Tensor]:
    """`measure` of the gradients that a backward from `output` leaves in what is trained."""
    parameters = list(model.trainable_parameters())
    for parameter in parameters:
        parameter.grad = None
    output.backward()
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return {f"the gradients of {name}": m for name, m in measure(zeros).items()}


def list_shapes(tensors: Iterable[Tensor]) -> list[str]:
    return sorted(" ".join(map(str, tensor.shape)) for tensor in tensors)


def list_trained(model) -> list[str]:
    """The shapes of the parameters that require a gradient."""
    return list_shapes(p for p in model.parameters() if p.requires_grad)


def list_unfrozen(model) -> list[str]:
    """The same of the base alone: no weight of it has an axis of the rank's size."""
    return list_shapes(p for p in model.parameters() if p.requires_grad and RANK not in p.shape)


def count_hooks(model) -> int:
    modules = list(model.modules())
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)


def copy_weights(model) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def find_weight(model, name: str) -> Tensor | None:
    """What is at a parameter's place now: a plain tensor may stand in for it."""
    found = model
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, Tensor) else None


def list_changed(before: dict[str, Tensor], model) -> list[tuple[Tensor, Tensor]]:
    """The parameters that differ by as much as a bit, as they were and as they are."""
    pairs = [(weight, find_weight(model, name)) for name, weight in before.items()]
    pairs = [(old, old.new_zeros(0) if new is None else new.detach()) for old, new in pairs]
    return [(old, new.clone()) for old, new in pairs if not torch.equal(old, new)]


def name_changed(before: dict[str, Tensor], model) -> str:
    """The names of the parameters that differ by as much as a bit."""
    changed = [name for name, weight in before.items() if list_changed({name: weight}, model)]
    return ", ".join(changed) or "none"


def scale_weights(weights: Iterable[Tensor], factor: float) -> None:
    """In place, and each storage once."""
    for weight in {w.untyped_storage().data_ptr(): w for w in weights}.values():
        weight.data.mul_(factor)


def count_bytes(model) -> int:
    """What the parameters and buffers take, each storage once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


# --- TransformerWithLora.from_pretrained --------------------------------------------------------


def describe_new_model(model, ids: Tensor) -> dict[str, Any]:
    logits = model(ids)
    trained = list(model.trainable_parameters())
    lora_B = [p for p in trained if p.shape[-1] != RANK]
    return {
        "shapes of what is trained": list_shapes(trained),
        "shapes of what a backward reaches": list_shapes(find_leaves(logits)),
        "parameters that require a gradient": list_trained(model),
        "dtypes of what is trained": sorted({str(p.dtype) for p in trained}),
        "the largest entry of a B": max([float(p.abs().max()) for p in lora_B], default=-1.0),
        "logits": logits,
    }


@check("TransformerWithLora.from_pretrained", public=True, expected=ByHuggingFace, **CLOSE)
def a_new_model(student, rng):
    """1 block, rank 3 on q and o: A [32, 3] and B [3, 40], A [40, 3] and B [3, 32], B = 0"""
    model = boot(student, "llama", sites=("attn.q", "attn.o"))
    return describe_new_model(model, rng.integers(3, 512, 1, 4))


def _build_everywhere(student, rng, kind: str) -> dict[str, Any]:
    model = boot(student, kind)
    found = describe_new_model(model, rng.integers(3, 512, 1, 4))
    ids, mask = ragged_batch(rng)
    logits = score(set_alike(model, rng), ids, mask)
    found |= measure_gradients(model, logits.square().mean())
    model.train()  # both have dropout in their configs, GPT-2 in more places
    return found | {"logits after .train()": score(model, ids, mask)}


@check("TransformerWithLora.from_pretrained", public=True, expected=ByHuggingFace, **CLOSE)
def every_site_of_gpt2(student, rng):
    """GPT-2 with adapters on every site, both kinds of layers; the rest is frozen"""
    return _build_everywhere(student, rng, "gpt2")


@check("TransformerWithLora.from_pretrained", expected=ByHuggingFace, **CLOSE)
def every_site_of_llama(student, rng):
    """Grouped-query attention and a gated MLP, adapters on every site; the rest is frozen"""
    return _build_everywhere(student, rng, "llama")


def _list_ignored(build: Callable, path: Path) -> list[str]:
    """Whether the device has no effect, or the dtype. On a device that every machine has; as it
    holds no numbers, an error is no offence."""
    try:
        model = build(path, sites=("attn.q",), device="meta", dtype=torch.float64)
        parameters = list(model.parameters())
    except Exception:  # an observation: whatever it is
        return []
    devices = {p.device.type for p in parameters}
    dtypes = {p.dtype for p in parameters if not p.requires_grad}
    ignored = [("device", devices != {"meta"}), ("dtype", not dtypes <= {torch.float64})]
    return [name for name, is_ignored in ignored if is_ignored]


def list_started(model) -> list[Tensor]:
    """The As of a new model: what is trained and not 0."""
    return [p.detach() for p in model.trainable_parameters() if p.any()]


@check("TransformerWithLora.from_pretrained", points=2, expected=ByHuggingFace, **CLOSE)
def rank_alpha_and_sites(student, rng):
    """Rank, alpha, sites and device are passed on; the defaults; two models share no weights"""
    ids, mask = ragged_batch(rng)
    build, path = student.TransformerWithLora.from_pretrained, models.get_checkpoint("llama")
    models_built = {
        "chosen, by position": build(
            *(path, 37, 25.5, ("mlp.out", "attn.v", "mlp.in")),  # a rank above d_in and d_out
            *(torch.device("cpu"), torch.float32),
        ),
        "defaults": build(str(path)),
        "defaults, in the same words": build(str(path)),
    }
    found = {"what is asked for and ignored": ", ".join(_list_ignored(build, path)) or "nothing"}
    started = [list_started(model) for name, model in models_built.items() if "defaults" in name]
    found["As that are alike in two models"] = sum(
        torch.equal(a, b) for a, b in itertools.product(*started)
    )
    for (_, model), model_rank in zip(models_built.items(), (37, 4, 4), strict=True):
        set_alike(model, rng, rank=model_rank)
    for name, model in models_built.items():
        device = next(iter(model.trainable_parameters())).device
        found[name] = {
            "shapes of what is trained": list_shapes(model.trainable_parameters()),
            "logits": score(model, ids.to(device), mask.to(device)),
        }
        # The base of a model that has been scored changes: the next one's is another.
        scale_weights([p for p in model.parameters() if not p.requires_grad], 1.1)
    return found


@check("TransformerWithLora.from_pretrained", expected=ByHuggingFace, **CLOSE, tier="hardening")
def dropout(student, rng):
    """Qwen2 with dropout: .train() changes no logit and unfreezes nothing; the default alpha"""
    ids, mask = ragged_batch(rng)
    build = student.TransformerWithLora.from_pretrained  # alpha is left out, but not the rank
    sites = ("attn.q", "mlp.gate")
    model = build(models.get_checkpoint("qwen"), rank=RANK, sites=sites, device="cpu")
    set_alike(model, rng)
    logits = {"new": score(model, ids, mask)}
    logits["after .train()"] = score(model.train(), ids, mask)
    trained = list_trained(model)
    nn.Sequential(model.eval()).train()
    logits["after .train() of a container"] = score(model, ids, mask)
    return logits | {
        "parameters that require a gradient after .train()": trained,
        "parameters that require a gradient after .eval()": list_trained(model.eval()),
    }


def _look_at_new_adapters(student, rng, kind: str) -> dict[str, Any]:
    rank, sites = rng.integer(17, 24), ("mlp.out", "attn.q", "attn.k")

    class Descendant(student.TransformerWithLora):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.value_head = nn.Linear(2, 1)

    Descendant.__name__ = f"Descendant{rng.integer(0, 10**6)}"
    model = boot(SimpleNamespace(TransformerWithLora=Descendant), kind, rank=rank, sites=sites)
    head = list(model.value_head.parameters()) if hasattr(model, "value_head") else []
    trained = [p for p in model.trainable_parameters() if all(p is not other for other in head)]
    found = {
        "parameters of a subclass's head that are frozen": sum(not p.requires_grad for p in head),
        "the class of what a subclass builds": type(model).__name__,
        "shapes of what is trained": list_shapes(trained),
        "entries of the Bs that are not 0": sum(
            int(p.count_nonzero()) for p in trained if p.shape[-1] != rank
        ),
    }
    for d_in in (get_sizes(kind, site)[0] for site in sites):
        # Each of them in units of the bound: uniform in ±1.
        started = [p.detach() * d_in**0.5 for p in trained if p.shape == (d_in, rank)]
        pairs = itertools.combinations(started, 2)
        uneven = [abs(a.mean()) > 0.2 or abs(a.std() * 3**0.5 - 1) > 0.15 for a in started]
        found |= {
            f"As of {d_in} rows that are alike": sum(torch.equal(a, b) for a, b in pairs),
            f"As of {d_in} rows that leave ±1/sqrt({d_in})": sum(
                bool(a.abs().max() > 1 + 1e-6) for a in started
            ),
            f"As of {d_in} rows that stay in ±0.8/sqrt({d_in})": sum(
                bool(a.abs().max() < 0.8) for a in started
            ),
            f"As of {d_in} rows that are not uniform": sum(map(bool, uneven)),  # 8 standard errors
        }
    return found


@check("TransformerWithLora.from_pretrained", public=True, expected=OfTheClassAsked(), **CLOSE)
def initial_adapters(student, rng):
    """Two blocks, each with its own A and B = 0; in a subclass too, whose head isn't frozen"""
    return _look_at_new_adapters(student, rng, "gpt2")


@check(
    "TransformerWithLora.from_pretrained",
    slow=True,
    expected=OfTheClassAsked(),
    **CLOSE,
    tier="hardening",
)
def adapters_of_eleven_blocks(student, rng):
    """11 blocks, each with its own A and B = 0; in a subclass too, whose head isn't frozen"""
    return _look_at_new_adapters(student, rng, "deep")


# The relative error of the logits is about 7e-3 and 8e-4; in float32 it is 2e-7.
BASE_DTYPES = {torch.bfloat16: (1e-3, 0.1), torch.float16: (1e-4, 4e-3)}


def _is_in_the_dtype(observed, reference):
    exact = score_by_hugging_face("llama", {}, reference["ids"])
    for dtype, (least, most) in BASE_DTYPES.items():
        error = (observed[str(dtype)].double() - exact).norm() / exact.norm()
        if error < least:
            return f"with dtype={dtype}, the base should be in it; the logits are too exact"
        if error > most:
            return f"with dtype={dtype}, the logits are wrong by more than rounding"
        if observed[f"adapters of 16 bits, {dtype}"] > 0:
            return f"with dtype={dtype}, the base is in it and the adapters stay in float32"
        if observed[f"the default dtype is changed, {dtype}"]:
            return f"with dtype={dtype}, the base is in it: torch's default dtype stays as it was"
    return None


@check("TransformerWithLora.from_pretrained", holds=_is_in_the_dtype, tier="hardening")
def base_dtype(student, rng):
    """The base in bfloat16 or float16 if you ask for it, the adapters in float32"""
    ids, found, default = rng.integers(3, 512, 2, 6), {}, torch.get_default_dtype()
    for dtype in BASE_DTYPES:
        model = boot(student, "llama", sites=("attn.q", "attn.o"), dtype=dtype)
        changed = torch.get_default_dtype() != default
        found[f"the default dtype is changed, {dtype}"] = changed
        torch.set_default_dtype(default)
        found[str(dtype)] = model(ids).float()
        trained = list(model.trainable_parameters())
        found[f"adapters of 16 bits, {dtype}"] = sum(p.element_size() == 2 for p in trained)
    return {"ids": ids} | found


@check(
    "TransformerWithLora.from_pretrained",
    points=2,
    expected=ByHuggingFace,
    **CLOSE,
    tier="hardening",
)
def sites_that_do_not_fire(student, rng):
    """Sites that never fire or are not linear layers: a ValueError; an unknown name: an error"""
    unknown, build = f"attn.q{rng.integer(0, 10**6)}", student.TransformerWithLora.from_pretrained
    try:
        n_adapters = len(list(boot(student, "gpt2", sites=()).trainable_parameters()))
    except Exception:  # refused
        n_adapters = 0
    return {
        "a folder that is not there": is_error(build, "/no/such/folder"),
        "what is trained where no site is asked for": n_adapters,
    } | {
        site: error_of(site, boot, student, "gpt2", sites=(*before, site, *after))
        for site, before, after in (
            ("mlp.gate", ("attn.q",), ("attn.v",)),
            *(
                (site, (), ())
                for site in (
                    *("attn.qkv", "q", "q_proj", "attn", "attn.*", "ln1", "blocks.99.attn.q"),
                    unknown,
                )
            ),
        )
    }


# --- TransformerWithLora.forward ----------------------------------------------------------------


@check(
    "TransformerWithLora.forward", public=True, expected=forward_by_hugging_face("shallow"), **CLOSE
)
def one_row(student, rng):
    """One row, no mask: the logits with A B alpha/rank added to the weights of every site"""
    model = set_alike(boot(student, "shallow"), rng)
    return model(rng.integers(3, 512, 1, 5))


@check(
    "TransformerWithLora.forward",
    slow=True,
    expected=forward_by_hugging_face("deep"),
    **CLOSE,
    tier="hardening",
)
def eleven_blocks(student, rng):
    """11 blocks, each with its own adapters"""
    model = set_alike(boot(student, "deep"), rng)
    return model(rng.integers(3, 512, 1, 5))


def _logits_and_gradients(model, ids: Tensor, mask: Tensor, rng) -> dict[str, Any]:
    logits = score(model, ids, mask)
    weights = rng.normal(*logits.shape).to(logits.dtype)
    loss = 10 * (logits * weights).mean()  # gradients are of size 1
    return {"logits": logits} | measure_gradients(model, loss)


def _is_cut(model, rng) -> bool:
    """Whether a text longer than the context, as rotary positions can read, is scored in part."""
    ids = rng.integers(3, 512, 1, models.N_CTX + 2)
    try:
        return model(ids).shape[1] != ids.shape[1]
    except Exception:  # refused
        return False


@check(
    "TransformerWithLora.forward",
    public=True,
    points=2,
    expected=forward_by_hugging_face("gpt2"),
    **CLOSE,
)
def padded_gpt2(student, rng):
    """Rows padded left and right, absolute positions: logits, and each adapter's gradient"""
    ids, mask = ragged_batch(rng)
    return _logits_and_gradients(set_alike(boot(student, "gpt2"), rng), ids, mask, rng)


@check("TransformerWithLora.forward", points=2, expected=forward_by_hugging_face("qwen"), **CLOSE)
def padded_qwen(student, rng):
    """Rotary positions, grouped queries, an added token, spare logits; beyond the context"""
    ids, mask = ragged_batch(rng)
    ids[ids == ids.max()] = models.ADDED_ID
    model = set_alike(boot(student, "qwen"), rng)
    found = {"whether a text longer than the context is cut": _is_cut(model, rng)}
    return found | _logits_and_gradients(model, ids, mask, rng)


CACHED = {"use_cache": True, "return_type": "logits_and_cache"}


def _score_in_steps(model, ids: Tensor, mask: Tensor, when: str, ends: tuple) -> dict[str, Any]:
    """The logits at real tokens of a prompt, and of what follows, each step from the cache; the
    last token's step asks for no cache.

    In their place the error of a step that raised, and of those that would have followed.
    """
    found, past, failure = {}, {"past_key_values": None}, None  # given, as `get_samples` does
    for start, end in zip((0, *ends), ends, strict=False):
        name = f"a mask of {[len(ids), end]} for {start} cached positions and {end - start} new"
        if failure is None:
            asked = past | (CACHED if end < ids.shape[1] else {})
            try:
                output = model(ids[:, start:end], attention_mask=mask[:, :end], **asked)
                logits, cache = output if end < ids.shape[1] else (output, None)
                found[f"{name}, {when}"] = logits[mask[:, start:end].bool()]
                past = {"past_key_values": cache}
            except Exception as error:  # an observation: whatever it is
                failure = error
        if failure is not None:
            found[f"{name}, {when}"] = failure
    return found


def _refuse_masks(model, ids: Tensor, mask: Tensor) -> dict[str, str]:
    """How masks are answered that do not cover the cached positions and the new ones."""
    found = {
        "a mask of one column more than there are tokens": error_of(
            "mask", model, ids[:, :5], mask[:, :6]
        ),
        "one column more for one row": error_of("mask", model, ids[:1, :5], mask[:1, :6]),
        "a mask of one row for two": error_of("mask", model, ids[:, :5], mask[1:, :5]),
        "a mask of one row for two, and a cache is asked for": error_of(
            "mask", model, ids[:, :5], mask[1:, :5], **CACHED
        ),
        "a mask of two rows for one": error_of("mask", model, ids[:1, :5], mask[:, :5]),
        "a mask of the first columns alone": error_of("mask", model, ids[:, :5], mask[:, :3]),
        "a transposed mask": error_of("mask", model, ids[:, :5], mask[:, :5].T),
    }
    for name, misfit in (
        ("the new token alone", mask[:, 5:6]),
        ("the cached positions alone", mask[:, :5]),
        ("one row, with a cache of two", mask[1:, :6]),
        ("a position more than there are, with a cache", mask[:, :7]),
    ):
        _, cache = model(ids[:, :5], attention_mask=mask[:, :5], **CACHED)
        found[f"a mask of {name}"] = error_of(
            "mask", model, ids[:, 5:6], misfit, past_key_values=cache, **CACHED
        )
    return found


@check(
    "TransformerWithLora.forward", public=True, expected=forward_by_hugging_face("shallow"), **CLOSE
)
def key_value_cache(student, rng):
    """Padded prompts, then tokens from the cache, in every mode; masks of a wrong shape"""
    ids, mask = rng.integers(3, 512, 2, 9), torch.ones(2, 9, dtype=torch.long)
    ids[:, 6:] = rng.permutation(3)  # pad, bos and eos are real tokens as well
    mask[0, :2] = mask[1, 0] = 0
    model = set_alike(boot(student, "shallow"), rng)
    found = {}
    for name, (context, mode, rows, ends) in {
        "with the adapters on": (contextlib.nullcontext, torch.enable_grad, 2, (5, 6, 9)),
        "inside merged()": (model.merged, torch.no_grad, 2, (5, 6)),
        "inside reference()": (model.reference, torch.no_grad, 1, (3, 9)),
    }.items():
        with context(), mode():
            found |= _score_in_steps(model, ids[:rows, : ends[-1]], mask[:rows], name, ends)
            found[f"a mask of one column, {name}"] = error_of(
                "mask", model, ids[:, :5], mask[:, 4:5]
            )
    right = torch.ones_like(mask)
    right[1, 3:6] = 0  # the first new token too; on the left, and in the other row, is no padding
    model.train()  # which changes nothing
    found |= _score_in_steps(model, ids, right, "padded on the right", (5, 7))
    return found | _refuse_masks(model, ids, mask)


@check(
    "TransformerWithLora.forward",
    expected=forward_by_hugging_face("shallow"),
    **CLOSE,
    tier="hardening",
)
def caches_given_and_taken(student, rng):
    """Caches: empty, older, of fixed length, or not asked for; no mask; a full context"""
    ids, mask = rng.integers(3, 512, 2, 8), torch.ones(2, 8, dtype=torch.long)
    ids[:, 5:] = rng.permutation(3)  # pad, bos and eos are real tokens as well
    mask[0, :2] = mask[1, 0] = 0
    model = set_alike(boot(student, "shallow"), rng)
    found = {}
    with torch.no_grad():
        output = model(ids[:, :5], mask[:, :5], **(CACHED | {"use_cache": False}))
        by_default = model(ids[:, :5], mask[:, :5], return_type="logits_and_cache")
        empty = {"past_key_values": DynamicCache(), "use_cache": True}
        found["from an empty cache"] = model(ids[1:, 1:5], mask[1:, 1:5], **empty)
        fixed = StaticCache(config=models.load_hf("shallow").config, max_cache_len=9)

        def score_in_two_steps():
            _, cache = model(ids[:, :5], mask[:, :5], past_key_values=fixed, **CACHED)
            return model(ids[:, 5:7], mask[:, :7], past_key_values=cache, use_cache=True)

        found["from a cache of a fixed length"] = attempt(score_in_two_steps)
    found["whether use_cache=False gives a cache"] = output[1] is not None
    found["whether a cache is given by default"] = by_default[1] is not None
    _, cache = model(ids[:1, :5], **CACHED)
    model(ids[:, :3])  # in between, another forward
    covered = torch.ones_like(mask[:1, :7])
    found["from a cache older than the last forward"] = attempt(
        model, ids[:1, 5:7], covered, past_key_values=cache, use_cache=True
    )
    for in_training in (True, False):
        _, cache = model.train(in_training)(ids[1:, :2], **CACHED)
        logits = model(ids[1:, 2:6], past_key_values=cache, use_cache=True)
        parts = measure_gradients(model, logits.square().mean()) | {"logits": logits}
        found |= {f"{name}, without a mask, {in_training=}": x for name, x in parts.items()}
    goes_on = "from a cache that a forward has lengthened"
    found[goes_on] = model(ids[1:, 6:8], past_key_values=cache, use_cache=True)
    pads = nn.functional.pad(ids[:1, :4], (2, 0), value=models.SPECIAL["pad_token_id"])
    found["without a mask, pad ids first"] = model(pads)
    short = torch.ones_like(mask[:, :6])
    short[:, 4:] = 0
    padded = model(ids[:, :6], short)
    found |= {
        "where the last columns are padding in every row": padded[:, :4],
        "the number of positions there": padded.shape[1],
    }
    found["as many tokens as the context has"] = model(rng.integers(3, 512, 1, models.N_CTX))
    many, full = rng.integers(3, 512, 130, 3), torch.ones(130, 3, dtype=torch.long)
    with torch.no_grad():
        found |= _score_in_steps(model, many, full, "of many rows", (2, 3))
    return found


class Interruption(BaseException):
    """What is no `Exception`, as KeyboardInterrupt."""


def interrupt(model, ids: Tensor, mask: Tensor) -> str:
    """What comes of a forward that is interrupted at its second linear layer."""
    at = itertools.count(1)

    def stop(module, args):
        if isinstance(module, nn.Linear) and next(at) == 2:
            raise Interruption

    hook = nn.modules.module.register_module_forward_pre_hook(stop)
    try:
        model(ids, mask)
    except Interruption:
        return "passed on"
    finally:
        hook.remove()
    return "swallowed"


@check(
    "TransformerWithLora.forward",
    expected=forward_by_hugging_face("llama"),
    **CLOSE,
    tier="hardening",
)
def again_and_again(student, rng):
    """A second forward pass, also after an error or Ctrl-C: no hook is added twice; B = 0"""
    ids, mask = ragged_batch(rng)
    model = set_alike(boot(student, "llama", sites=("attn.o", "mlp.in")), rng)
    found = {"first": score(model, ids, mask)}
    with torch.no_grad():
        found["second"] = score(model, ids, mask)
    hooks = count_hooks(model)
    found["ids beyond the vocabulary"] = is_error(model, ids + 10**6, mask)
    found["after the error"] = score(model, ids, mask)
    found["hooks that are left behind"] = count_hooks(model) - hooks
    found["an interrupt"] = interrupt(model, ids, mask)
    found["after the interrupt"] = score(model, ids, mask)
    found["hooks that the interrupt left behind"] = count_hooks(model) - hooks
    set_alike(model, rng)
    with torch.no_grad():
        found["other values"] = score(model, ids, mask)
    for parameter in model.trainable_parameters():
        if parameter.shape[-1] != RANK:
            parameter.data.zero_()
    return found | measure_gradients(model, score(model, ids, mask).square().mean())


@check(
    "TransformerWithLora.forward",
    points=2,
    expected=forward_by_hugging_face("shallow"),
    **CLOSE,
    tier="hardening",
)
def every_way_of_calling(student, rng):
    """One padded row, pad, bos and eos as tokens, no_grad, train(), two models, nothing trained"""
    model = set_alike(boot(student, "shallow", sites=("attn.q", "mlp.in")), rng)
    other = set_alike(boot(student, "shallow", sites=("attn.v",)), rng)
    ids, mask = rng.integers(3, 512, 1, 6), torch.tensor([[0, 0, 1, 1, 1, 1]])
    found = {"one padded row": score(model, ids, mask)}
    special = ids.clone()
    special[0, 1:4] = rng.permutation(3)
    found["tokens 0, 1 and 2 without a mask"] = model(special)
    both = torch.cat([mask, mask.roll(-1, 1)])
    found["the same ids padded left and on both sides"] = score(model, ids.repeat(2, 1), both)
    column = ids[:, 2:].T
    found["rows of one token, with a mask"] = model(column, torch.ones_like(column))
    with torch.no_grad():
        found["no_grad"] = model(ids)
    found["a gradient is recorded under no_grad"] = found["no_grad"].requires_grad
    model.train()
    found |= {"after train()": model(ids), "after train(), again": model(input_ids=ids)}
    model.eval()
    found["after eval()"] = model(ids)
    found |= measure_gradients(model, found["after eval()"].square().mean())
    with other.reference():
        found["beside another's reference()"] = model(ids)
    found["the other"] = other(ids)
    for parameter in list(other.trainable_parameters()):
        parameter.requires_grad_(False)
    return found | {"adapters that are no longer trained": other(ids)}


def _close_in_bfloat16(observed, reference):
    for name, expected in reference.items():
        scale = expected.double().norm()
        error = (observed[name].double() - expected.double()).norm() / scale
        if not error < 0.1:
            return f"{name}: wrong by more than rounding in bfloat16"
    if (observed["under no_grad"] - observed["logits"]).abs().mean() > 1e-3:
        return "under no_grad the logits are different: PPO's first ratio would not be 1"
    return None


@check("TransformerWithLora.forward", holds=_close_in_bfloat16, tier="hardening")
def bfloat16_base(student, rng):
    """Float32 adapters on a base in bfloat16: logits and gradients; the same logits in no_grad"""
    ids, mask = ragged_batch(rng)
    model = set_alike(boot(student, "llama", dtype=torch.bfloat16), rng)
    logits = score(model, ids, mask).float()
    weights = rng.normal(*logits.shape)
    with torch.no_grad():
        found = {"logits": logits, "under no_grad": score(model, ids, mask).float()}
    return found | measure_gradients(model, (logits * weights).sum() / len(logits))


# --- TransformerWithLora.reference --------------------------------------------------------------

NEVER_ADAPTED = {kind: context_by_hugging_face(kind, adapted=False) for kind in ("gpt2", "llama")}


class SeveralErrors(ValueError, RuntimeError, LookupError, AssertionError):
    """An error of several kinds, none of which may be swallowed."""


@check("TransformerWithLora.reference", public=True, expected=NEVER_ADAPTED["llama"], **CLOSE)
def inside_and_after(student, rng):
    """Inside, the logits are the pretrained model's; before and after, the adapted model's"""
    ids = rng.integers(3, 512, 1, 5)
    model = set_alike(boot(student, "llama", sites=("attn.q", "attn.o")), rng)
    context = model.reference()
    found = {"before": model(ids)}
    with context:
        found["inside"] = model(ids)
        cached = model(ids, use_cache=True, return_type="logits_and_cache")
        found["inside, with a cache"] = cached[0]
        found["what is trained, inside"] = measure(model.trainable_parameters())
    return found | {"after": model(ids)}


@check(
    "TransformerWithLora.reference", public=True, points=2, expected=NEVER_ADAPTED["gpt2"], **CLOSE
)
def between_forward_and_backward(student, rng):
    """Forward passes of both on the same rows, one backward pass through both; then no_grad"""
    ids, mask = ragged_batch(rng)
    model = set_alike(boot(student, "gpt2"), rng)
    logits = score(model, ids, mask)
    with model.reference():
        ref_logits = score(model, ids, mask)
        again = score(model, ids, mask)
    found = {"ref_logits": ref_logits, "once more": again}
    loss = (logits * ref_logits).mean()
    found["a gradient is recorded"] = loss.requires_grad
    found["the backward"] = "passed"
    try:
        found |= measure_gradients(model, loss)
    except RuntimeError as error:
        found["the backward"] = str(error)
    with torch.no_grad():
        enter(model.reference)
        found["gradients after reference() under no_grad"] = torch.is_grad_enabled()
    return found | {"after": score(model, ids, mask)}


@check(
    "TransformerWithLora.reference",
    public=True,
    points=2,
    expected=NEVER_ADAPTED["llama"],
    **CLOSE,
    tier="hardening",
)
def errors_inside_reference(student, rng):
    """After an error or Ctrl-C inside, the adapters are on again and no hook is left behind"""
    ids, mask = ragged_batch(rng)
    model = set_alike(boot(student, "llama", sites=("attn.v", "mlp.out")), rng)
    with model.reference():
        score(model, ids, mask)
    score(model, ids, mask)
    hooks, found = count_hooks(model), {}
    for error, name in ((SeveralErrors, "an error"), (Interruption, "an interrupt")):
        found[name] = "swallowed"
        try:
            with model.reference():
                found[f"inside, before {name}"] = score(model, ids, mask)
                raise error
        except (error, Exception) as caught:
            found[name] = f"{type(caught).__name__} passed on"
        found[f"after {name}"] = score(model, ids, mask)
    other = set_alike(boot(student, "llama", alpha=2 * ALPHA, sites=("attn.q",)), rng)
    with model.reference():
        found["another model's logits"] = score(other, ids, mask)
        with other.reference():
            found["inside another's reference() too"] = score(model, ids, mask)
    found["after another's reference() too"] = score(model, ids, mask)
    found["parameters that require a gradient"] = list_trained(model)
    freeze_and_enter(other, "reference")
    found["frozen adapters that require a gradient after reference()"] = list_trained(other)
    return found | {"hooks that are left behind": count_hooks(model) - hooks}


def enter(context: Callable) -> None:
    with context():
        pass


def freeze_and_enter(model, context: str) -> None:
    """Freeze the adapters, as for a model that is only scored, and enter a context."""
    for parameter in list(model.trainable_parameters()):
        parameter.requires_grad_(False)
    enter(getattr(model, context))


def _try_to_nest(student, rng, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """What entering the second of two contexts inside the first gives, and the logits then."""
    ids, mask = ragged_batch(rng)
    model, found = boot(student, "llama", sites=("attn.q", "attn.o")), {}
    outer, inner = pairs[0]
    with getattr(model, outer)():
        found[f"{inner}() inside {outer}(), B = 0"] = is_error(enter, getattr(model, inner))
    before = copy_weights(set_alike(model, rng))
    model.train()  # dropout stays off, in a context and after it
    for outer, inner in pairs:
        with getattr(model, outer)():
            found[f"{inner}() inside {outer}()"] = is_error(enter, getattr(model, inner))
            found[f"logits inside {outer}(), {inner}() refused"] = score(model, ids, mask)
        found[f"logits after {inner}() inside {outer}()"] = score(model, ids, mask)
    found["weights that changed"] = len(list_changed(before, model))
    for name in ("reference", "merged"):
        with getattr(model, name)():
            found[f"logits inside {name}() alone"] = score(model, ids, mask)
            found |= _score_in_steps(model, ids, mask, f"inside {name}()", (5, 8))
            found[f"a mask of one column inside {name}()"] = error_of(
                "mask", model, ids, mask[:, :1]
            )
    return found


@check("TransformerWithLora.reference", expected=NEVER_ADAPTED["llama"], **CLOSE, tier="hardening")
def reference_does_not_nest(student, rng):
    """reference() inside reference() or merged() is an error that leaves the model usable"""
    pairs = [("reference", "reference"), ("reference", "merged"), ("merged", "reference")]
    return _try_to_nest(student, rng, pairs)


def _takes_no_second_copy(observed, reference):
    # bfloat16 rounds by up to 0.35 here; scaling the weights moves a logit by 3 and more.
    close = functools.partial(torch.allclose, rtol=0, atol=1.0)
    if not close(observed["inside"], reference["inside"]):
        return "the logits inside are not the pretrained model's"
    for when in ("bytes before", "bytes inside"):
        if observed[when] > 1.4 * reference[when]:
            return "the base takes more memory than one copy in its dtype: turn the adapters off"
    for when in ("weights changed before", "weights changed inside"):
        if not close(observed[when], reference[when]):
            return f"{when}: the logits do not follow the model's weights, so there is a copy"
    if observed["weights that go back"] != "none":
        return "weights that are changed inside go back on leaving, so there is a copy of them"
    return None


@check("TransformerWithLora.reference", holds=_takes_no_second_copy, tier="hardening")
def memory_of_the_reference(student, rng):
    """There's one copy of the weights: their bytes, and what happens if you change them"""
    ids = rng.integers(3, 512, 1, 4)
    model = set_alike(boot(student, "llama", sites=("attn.q",), dtype=torch.bfloat16), rng)
    base = [p for p in model.parameters() if not p.requires_grad]
    found = {"bytes before": count_bytes(model)}
    with model.reference():
        found |= {"bytes inside": count_bytes(model), "inside": model(ids).float()}
    scale_weights(base, 1.1)
    with model.reference():
        found["weights changed before"] = model(ids).float()
        scale_weights(base, 1.1)
        found["weights changed inside"] = model(ids).float()
        changed = copy_weights(model)
    return found | {"weights that go back": name_changed(changed, model)}


@check("TransformerWithLora.reference", tier="hardening")
def what_reference_yields(student, rng):
    """It yields the model itself; gradients are recorded inside exactly when they are outside"""
    model = set_alike(boot(student, "shallow"), rng)
    ids, mask = ragged_batch(rng)
    with model.reference() as yielded:
        found = {"the logits of what is yielded": score(yielded, ids, mask)}
        found["gradients are recorded inside"] = torch.is_grad_enabled()
    with torch.no_grad(), model.reference():
        found["gradients are recorded inside, under no_grad"] = torch.is_grad_enabled()
    return found


# --- TransformerWithLora.merged -----------------------------------------------------------------


def overwrite_adapters(model, value: float) -> None:
    for parameter in list(model.trainable_parameters()):
        parameter.data.fill_(value)


def _merge(student, rng, kind: str) -> dict[str, Any]:
    ids, mask = ragged_batch(rng)
    model = set_alike(boot(student, kind), rng)
    before, found, context = copy_weights(model), {}, model.merged()
    found["weights that changed before entering"] = name_changed(before, model)
    with context:
        found["inside"] = score(model, ids, mask)
        found["inside, once more"] = score(model, ids, mask)
    found["weights that changed"] = name_changed(before, model)
    found["after"] = score(model, ids, mask)
    before = copy_weights(set_alike(model, rng))
    with model.merged():
        found["inside, other adapters"] = score(model, ids, mask)
        overwrite_adapters(model, math.nan)  # the hooks are off: nothing looks at the adapters
        found["inside, adapters overwritten with nan"] = score(model, ids, mask)
        overwrite_adapters(model, 0)
    base = {name: weight for name, weight in before.items() if RANK not in weight.shape}
    found["weights of the base that changed, adapters overwritten"] = name_changed(base, model)
    found["after, adapters overwritten"] = score(model, ids, mask)
    return found


@check(
    "TransformerWithLora.merged",
    public=True,
    points=2,
    expected=context_by_hugging_face("gpt2", adapted=True),
    **CLOSE,
)
def merged_gpt2(student, rng):
    """Inside, the adapted model's logits, even if adapters change; then each weight is back"""
    return _merge(student, rng, "gpt2")


@check(
    "TransformerWithLora.merged",
    points=2,
    expected=context_by_hugging_face("llama", adapted=True),
    **CLOSE,
)
def merged_llama(student, rng):
    """The same with grouped-query attention and a gated MLP"""
    return _merge(student, rng, "llama")


def _is_the_same_model(observed, reference):
    hooked, base = observed["hooked"].double(), reference["reference"].double()
    if (observed["reference"].double() - base).abs().max() > 1e-3:
        return "the logits inside reference() are not the base's"
    if (hooked - base).abs().max() < 1e-2:
        return "the adapters have no effect on the logits"
    if (observed["merged"].double() - hooked).abs().max() > 1e-3:
        return "the logits inside merged() differ from the hooked model's by more than rounding"
    for name in ("hooked, after", "hooked, after an error", "hooked, after an interrupt"):
        if not torch.equal(observed[name], observed["hooked"]):
            return f"{name}: the logits are not bit for bit those from before"
    for name in ("reference, after", "reference, after an error", "reference, after an interrupt"):
        if not torch.equal(observed[name], observed["reference"]):
            return f"{name}: the logits are not bit for bit those from before"
    for name in (
        "weights changed",
        "weights changed by an error",
        "weights changed by an error while merging",
        "other weights changed",
    ):
        if observed[name]:
            return f"{name}: {observed[name]}, but none should"
    if (errors := observed["errors"]) != reference["errors"]:
        return f"an error inside merged() should pass on, but what came out is {errors}"
    if observed["hooks left behind"] > 0:
        return "hooks are left behind"
    if observed["merged() once more"] != "no error":
        return "after errors inside merged(), entering it again is an error"
    return None


def _merge_and_leave(student, rng, kind: str, dtype=torch.float32) -> dict[str, Any]:
    ids, mask = ragged_batch(rng)
    model = set_apart(boot(student, kind, dtype=dtype), rng)
    found = {"hooked": score(model, ids, mask)}
    with model.reference():
        found["reference"] = score(model, ids, mask)
    hooks, weights = count_hooks(model), copy_weights(model)

    def look(when):
        found[f"hooked, {when}"] = found[f"reference, {when}"] = score(model, ids, mask)
        with contextlib.suppress(Exception), model.reference():
            found[f"reference, {when}"] = score(model, ids, mask)

    with model.merged():
        found["merged"] = score(model, ids, mask)
    found["weights changed"] = len(list_changed(weights, model))
    look("after")
    found["errors"] = []
    for error, when in ((SeveralErrors, "after an error"), (Interruption, "after an interrupt")):
        passed = "swallowed"
        try:
            with model.merged():
                raise error
        except (error, Exception) as caught:
            passed = f"{type(caught).__name__} passed on"
        found["errors"].append(passed)
        look(when)
    found["weights changed by an error"] = len(list_changed(weights, model))
    parameters = list(model.trainable_parameters())
    for parameter in (parameters[0], parameters[-1]):  # whichever end merging begins at
        values, parameter.data = parameter.data, parameter.data.flatten()[1:]  # fits no product
        attempt(enter, model.merged)
        parameter.data = values
    found["weights changed by an error while merging"] = len(list_changed(weights, model))
    scale_weights([p for p in model.parameters() if not p.requires_grad], 1.1)
    weights = copy_weights(model)
    found["merged() once more"] = is_error(enter, model.merged)
    found["other weights changed"] = len(list_changed(weights, model))
    return found | {"hooks left behind": count_hooks(model) - hooks}


@check("TransformerWithLora.merged", public=True, points=2, beside=True, holds=_is_the_same_model)
def restored_bit_for_bit(student, rng):
    """Different adapters on each site: merged equals hooked; all is back, after errors too"""
    return _merge_and_leave(student, rng, "gpt2", torch.float64)


@check(
    "TransformerWithLora.merged",
    slow=True,
    beside=True,
    holds=_is_the_same_model,
    tier="hardening",
)
def merged_in_eleven_blocks(student, rng):
    """11 blocks, each with its own adapters: merged equals hooked, and every weight is back"""
    return _merge_and_leave(student, rng, "deep")


@check(
    "TransformerWithLora.merged",
    points=2,
    expected=context_by_hugging_face("shallow", adapted=True),
    **CLOSE,
    tier="hardening",
)
def merged_between_forward_and_backward(student, rng):
    """A forward pass, sampling inside merged(), then a backward pass through a loss of both"""
    ids, mask = ragged_batch(rng)
    model = set_alike(boot(student, "shallow"), rng)
    adapters = list(model.trainable_parameters())
    logits = score(model, ids, mask)
    with model.merged(), torch.no_grad():
        inside = score(model, ids, mask)
        nested = is_error(enter, model.merged)
        still_inside = score(model, ids, mask)
        unfrozen_inside = list_unfrozen(model)
    gradients_after = measure_gradients(model, (logits * inside).mean())
    with torch.no_grad():
        enter(model.merged)
        enabled = torch.is_grad_enabled()
        with set_alike(model, rng).merged():
            inside_later = score(model, ids, mask)
    unfrozen_afterwards = list_unfrozen(model)
    freeze_and_enter(model, "merged")
    with model.merged():
        inside_when_frozen = score(model, ids, mask)
    for parameter in adapters:
        parameter.data[0, 0] = NAN
    with model.merged():
        is_nan = bool(score(model, ids, mask).isnan().any())
    return {
        "whether an adapter that holds nan is merged": is_nan,
        "gradients after merged() under no_grad": enabled,
        "inside": inside,
        "inside the second under no_grad, with other adapters": inside_later,
        "inside, with frozen adapters": inside_when_frozen,
        "nesting": nested,
        "inside, after a refused merged()": still_inside,
        "weights of the base that require a gradient inside": unfrozen_inside,
        "weights of the base that require a gradient afterwards": unfrozen_afterwards,
        "frozen adapters that require a gradient after merged()": list_trained(model),
    } | gradients_after


@check(
    "TransformerWithLora.merged",
    expected=context_by_hugging_face("llama", adapted=True),
    **CLOSE,
    tier="hardening",
)
def merged_does_not_nest(student, rng):
    """merged() inside merged() or reference() is an error that leaves the model usable"""
    pairs = [("merged", "merged"), ("merged", "reference"), ("reference", "merged")]
    return _try_to_nest(student, rng, pairs)


def _is_rounded_once(observed, reference):
    for kind, found in observed.items():
        if found["weights that changed inside"] != reference[kind]["weights that changed inside"]:
            return f"{kind}: the number of weights that change inside merged() is wrong"
        if found["dtypes inside"] != reference[kind]["dtypes inside"]:
            return f"{kind}: the merged weights should keep their dtype: round the sum to it"
        if _measure_ulps(found["inside"], reference[kind]["the sums"], kind) > 0.51:
            return f"{kind}: a weight is further from W + A B alpha/rank than by rounding it once"
        if found["weights that changed afterwards"]:
            return f"{kind}: the weights in 16 bits should come back bit for bit"
    return None


def _measure_ulps(inside, exact, kind):
    """The largest distance of weights from their sums, in units of the last place."""
    eps = torch.finfo({"llama": torch.bfloat16, "shallow": torch.float16}[kind]).eps
    _, exponent = torch.frexp(inside.float())
    ulp = torch.ldexp(torch.ones_like(exact), exponent - 1) * eps
    # What float32 itself rounds off may be many ulps of a sum that is nearly 0.
    excess = ((inside.double() - exact).abs() - 1e-6).clamp(min=0)
    return (excess / ulp).max()


@check("TransformerWithLora.merged", holds=_is_rounded_once, tier="hardening")
def rounded_once(student, rng):
    """Two models at once, bfloat16 and float16: sums are computed in float32, rounded once"""
    models_built = {
        kind: set_alike(boot(student, kind, sites=sites, dtype=dtype), rng)
        for kind, sites, dtype in (
            ("llama", ATTENTION, torch.bfloat16),
            ("shallow", ("attn.o", "mlp.in", "mlp.out"), torch.float16),
        )
    }
    found = {}
    for (kind, model), other in zip(
        models_built.items(), reversed(models_built.values()), strict=True
    ):
        by_shape = {tuple(p.shape): p.detach().double() for p in model.trainable_parameters()}
        before, others = copy_weights(model), copy_weights(other)
        inside, sums, dtypes = [], [], set()
        with other.merged(), model.merged():
            for old, new in list_changed(before, model):
                # nn.Linear keeps [d_out d_in], GPT-2's Conv1D [d_in d_out].
                d_in, d_out = new.T.shape if kind == "llama" else new.shape
                delta = by_shape[d_in, RANK] @ by_shape[RANK, d_out] * ALPHA / RANK
                sums.append((old.double() + (delta.T if kind == "llama" else delta)).flatten())
                inside.append(new.clone().flatten())
                dtypes.add(str(new.dtype))
        found[kind] = {
            "weights that changed inside": len(inside),
            "dtypes inside": sorted(dtypes),
            "inside": torch.cat([*inside, torch.zeros(0)]).double(),
            "the sums": torch.cat([*sums, torch.zeros(0)]).double(),
            "weights that changed afterwards": len(list_changed(before, model))
            + len(list_changed(others, other)),
        }
    return found


# --- TransformerWithLora.trainable_parameters ---------------------------------------------------


@check(
    "TransformerWithLora.trainable_parameters",
    public=True,
    expected=parameters_by_backward,
    **CLOSE,
)
def shapes_of_the_parameters(student, rng):
    """Rank 3 on k and mlp.in of 1 block: 2 pairs, A [32, 3] and B [3, 20] or [3, 48]"""
    model = set_alike(boot(student, "llama", sites=("attn.k", "mlp.in")), rng)
    parameters = list(model.trainable_parameters())
    logits = model(rng.integers(3, 512, 1, 5))
    return {
        "shapes": list_shapes(parameters),
        "distinct ones": len({id(p) for p in parameters}),
        "numbers": sum(p.numel() for p in parameters),
    } | measure_gradients(model, logits.square().mean())


@check(
    "TransformerWithLora.trainable_parameters",
    points=2,
    expected=parameters_by_backward,
    float64=False,
    atol=5e-4,
    rtol=1e-3,
)
def steps_of_an_optimizer(student, rng):
    """An optimizer that gets them moves the adapters of the forward pass, and nothing else"""
    ids, mask = ragged_batch(rng)
    model = set_alike(boot(student, "gpt2"), rng)
    optimizer = torch.optim.SGD(model.trainable_parameters(), lr=0.03)
    with model.reference():
        found = {"the frozen model before": score(model, ids, mask)}
    for step in range(2):
        logits = score(model, ids, mask)
        optimizer.zero_grad()
        logits.logsumexp(-1).mean().backward()
        optimizer.step()
        found[f"logits before step {step}"] = logits
    with model.reference():
        found["the frozen model afterwards"] = score(model, ids, mask)
    return found | {"logits": score(model, ids, mask)} | measure(model.trainable_parameters())


@check("TransformerWithLora.trainable_parameters", expected=parameters_by_backward, **CLOSE)
def the_same_at_each_call(student, rng):
    """Each call gives the same parameters, of every site, in every mode; and a head's, if any"""
    model = set_alike(boot(student, "llama"), rng)
    calls = [list(model.trainable_parameters())]
    for parameter in calls[0][:1]:  # as after a backward that reaches one site
        parameter.grad = torch.zeros_like(parameter)
    for context in (model.merged, model.reference, contextlib.nullcontext):
        with context():
            calls.append(list(model.trainable_parameters()))
    again = calls[-1]
    found = {
        "how many": len(again),
        "other ones": sum({id(p) for p in c} != {id(p) for p in again} for c in calls),
        "kinds": sorted({type(p).__name__ for p in again}),
        "not trained": sum(not (p.requires_grad and p.is_leaf) for p in again),
        "weights of the base that require a gradient": list_unfrozen(model),
    } | measure(again)
    head = add_head(model, rng)
    with_head = {id(p) for p in model.trainable_parameters()}
    return found | {
        "parameters of a head left out": sum(id(p) not in with_head for p in head),
        "adapters left out beside a head": sum(id(p) not in with_head for p in again),
    }


# --- TransformerWithLora.save_adapter and load_adapter ------------------------------------------


def read_file(path: Path) -> list[Tensor]:
    with safe_open(str(path), framework="pt") as file:
        return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118


def rewrite_file(path: Path, change: Callable[[Tensor], Tensor | None], new_path: Path) -> Path:
    """A file in which every matrix is changed, or left out for None."""
    with safe_open(str(path), framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    changed = {k: change(t) if t.ndim == 2 else t for k, t in state.items()}
    kept = {k: t.contiguous() for k, t in changed.items() if t is not None}
    save_file(kept, new_path, metadata)
    return new_path


def _is_loaded(observed, reference):
    saved, loaded, before = (
        observed[f"logits {name}"].double() for name in ("saved", "loaded", "before loading")
    )
    base = reference["frozen model before"].double()
    limit = 0.3 if reference["dtype of the base"] == str(torch.bfloat16) else 1e-3
    if (observed["frozen model before"].double() - base).abs().max() > limit:
        return "the logits inside reference() are not the base's"
    if min((saved - other).abs().max() for other in (before, base)) < 1e-2:
        return "the adapters have no effect on the logits"
    if not torch.equal(observed["logits saved"], observed["logits of the first afterwards"]):
        return "saving should not change the model"
    if observed["trained after saving"] != reference["trained after saving"]:
        return "saving should leave requires_grad as it was, of the adapters and of the base"
    if observed["loading"] != "no error":
        return "loading what was saved is an error"
    if observed["loading a step"] != "no error":
        return "loading from a path that ends in .step100.pt is an error: take it as it is given"
    if torch.equal(loaded, before):
        return "after loading, the logits are those from before"
    fresh = observed["logits saved, B = 0"].double()
    if (difference := (loaded - saved).abs().max()) > 1e-6:
        if (loaded - fresh).abs().max() <= 1e-6:
            return "saving to a path again, or loading again, should give the newest values"
        how = "slightly" if difference < 0.2 else "altogether"
        return f"the model that loaded gives {how} different logits from the one that saved"
    if (observed["logits loaded, B = 0"].double() - fresh).abs().max() > 1e-6:
        return "a new adapter, whose B is 0, should be saved and loaded too"
    if not torch.equal(observed["frozen model before"], observed["frozen model afterwards"]):
        return "loading should not change the base"
    if observed["weights of the base that require a gradient"]:
        return "after loading, weights of the base require a gradient: they should stay frozen"
    if observed["a head is lost"]:
        return "in a subclass with one more part, like chapter 2's head, that part is lost"
    if observed["not trained after loading"] != 0:
        return "after loading, some trainable parameters get no gradient"
    if not observed["the same parameters"]:
        return "load_adapter should write into the existing parameters: an optimizer has them"
    return None


def _holds_the_adapters(observed, reference):
    if observed["format"] != "safetensors":
        return f"reading the file as safetensors fails: {observed['format']}"
    if observed["files"] != reference["files"]:
        return "save_adapter should write the file at its path, and touch no other"
    trained, saved = reference["numbers that are trained"], observed["numbers in the file"]
    if observed["numbers that are trained"] != trained or not 0 <= saved - trained <= 100:
        return f"the file holds {saved} numbers, but the adapters have {trained}"
    return _is_loaded(observed, reference)


def float_logits(model, ids: Tensor, mask: Tensor) -> Tensor:
    """`score` in float32: the dtype of a 16-bit base's logits is left open."""
    return score(model, ids, mask).float()


def _loses_a_head(first, second, rng) -> bool:
    ours, theirs = add_head(first, rng), add_head(second, rng)
    with tempfile.TemporaryDirectory() as folder:
        attempt(first.save_adapter, f"{folder}/with_head")
        attempt(second.load_adapter, f"{folder}/with_head")
    return any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _save_and_load(
    student, rng, kind: str, sites, other_sites, path_type, file_name: str, dtype=torch.float32
) -> dict[str, Any]:
    """One model saves, new and then with other values; a second one, with its own, loads each.

    path_type: makes the argument of an absolute path, in whose folder all this happens.
    """
    ids, mask = ragged_batch(rng)
    first = boot(student, kind, sites=sites, dtype=dtype)
    second = set_apart(boot(student, kind, sites=other_sites, dtype=dtype), rng)
    parameters = list(second.trainable_parameters())
    found = {
        "dtype of the base": str(dtype),
        "logits before loading": float_logits(second, ids, mask),
        "numbers that are trained": sum(p.numel() for p in first.trainable_parameters()),
    }
    with second.reference():
        found["frozen model before"] = float_logits(second, ids, mask)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        path = Path(folder) / file_name
        save_file({"of another model": torch.ones(1000)}, path)
        first.save_adapter(path_type(path))
        found["trained after saving"] = ", ".join(list_trained(first))
        attempt(second.load_adapter, path_type(path))
        found["logits saved, B = 0"] = float_logits(first, ids, mask)
        found["logits loaded, B = 0"] = float_logits(second, ids, mask)
        found["logits saved"] = float_logits(set_apart(first, rng), ids, mask)
        first.save_adapter(path_type(path))
        path.unlink(missing_ok=True)
        first.save_adapter(path_type(path))
        dotted = path.with_name(f"{path.name}.step100.pt")
        first.save_adapter(path_type(dotted))
        try:
            numbers = [sum(x.numel() for x in read_file(saved)) for saved in (path, dotted)]
            found |= {"format": "safetensors", "numbers in the file": max(numbers)}
        except Exception as error:  # an observation: whatever it is
            found |= {"format": type(error).__name__, "numbers in the file": 0}
        found["files"] = ", ".join(sorted(p.name for p in Path(folder).iterdir()))
        found["loading a step"] = is_error(second.load_adapter, path_type(dotted))
        set_apart(second, rng)
        try:
            second.load_adapter(path_type(path))
            found |= {"loading": "no error", "its words": ""}
        except Exception as error:  # an observation: its words tell mistakes apart
            words = str(error).replace(folder, "")
            found |= {"loading": "an error", "its words": f"{type(error).__name__}: {words}"}
    found["logits of the first afterwards"] = float_logits(first, ids, mask)
    found["logits loaded"] = float_logits(second, ids, mask)
    with second.reference():
        found["frozen model afterwards"] = float_logits(second, ids, mask)
    found["weights of the base that require a gradient"] = list_unfrozen(second)
    if (logits := float_logits(second, ids, mask)).requires_grad:
        logits.square().mean().backward()
    now = list(second.trainable_parameters())
    without = [p for p in now if p.grad is None or not p.grad.any()]
    found["the same parameters"] = {*map(id, now)} == {*map(id, parameters)}
    found["a head is lost"] = _loses_a_head(first, second, rng)
    return found | {"not trained after loading": len(without)}


@check("TransformerWithLora.save_adapter", public=True, holds=_holds_the_adapters)
def saved_and_loaded(student, rng):
    """A model that loads what another saved becomes the same: new adapters and changed ones"""
    sites, bare_name = ("attn.q", "attn.v"), operator.attrgetter("name")  # of one shape
    return _save_and_load(student, rng, "gpt2", sites, sites, bare_name, "adapter.safetensors")


@check("TransformerWithLora.save_adapter", slow=True, holds=_holds_the_adapters, tier="hardening")
def saved_from_eleven_blocks(student, rng):
    """11 blocks: the file has each one's own adapter"""
    sites = ("attn.q",)
    return _save_and_load(student, rng, "deep", sites, sites, str, "adapter.safetensors")


@check("TransformerWithLora.save_adapter", points=2, holds=_holds_the_adapters, tier="hardening")
def every_site_is_saved(student, rng):
    """Every site of Llama in bfloat16, in a different order when loading; a path with no suffix"""
    sites, dtype = SITES["llama"], torch.bfloat16  # the adapters are in float32, in the file too
    return _save_and_load(student, rng, "llama", sites, sites[::-1], Path, "adapter", dtype)


def _measure_adapters(model) -> dict[str, Tensor]:
    return measure(p for p in model.trainable_parameters() if p.ndim > 1)


def _save_random(student, rng, folder: str, alpha: int) -> tuple[Any, Path]:
    model = set_alike(boot(student, "shallow", alpha=alpha, sites=("attn.q", "mlp.out")), rng)
    path = Path(folder, "adapter.safetensors")
    model.save_adapter(path)
    return model, path


@check("TransformerWithLora.save_adapter", beside=True, tier="hardening")
def the_scaling_is_noted(student, rng):
    """An adapter that was saved with one scaling can't be loaded with another"""
    with tempfile.TemporaryDirectory() as folder:
        _, path = _save_random(student, rng, folder, alpha=7)
        other = set_alike(boot(student, "shallow", alpha=8, sites=("attn.q", "mlp.out")), rng)
        found = {"an error is raised": is_error(other.load_adapter, path)}
        return found | {"the parameters": _measure_adapters(other)}


@check("TransformerWithLora.load_adapter", public=True, holds=_is_loaded)
def loaded_into_another(student, rng):
    """A second model gets the first one's logits, and keeps its own parameter objects"""
    sites = ("attn.o", "mlp.in")
    bare_name = operator.attrgetter("name")
    return _save_and_load(student, rng, "gpt2", sites, sites[::-1], bare_name, "adapter")


@check("TransformerWithLora.load_adapter", slow=True, holds=_is_loaded, tier="hardening")
def loaded_into_eleven_blocks(student, rng):
    """11 blocks: each gets its own adapter from the file"""
    sites = ("attn.q",)
    return _save_and_load(student, rng, "deep", sites, sites, str, "adapter")


@check("TransformerWithLora.load_adapter", beside=True, tier="hardening")
def refused_files_change_nothing(student, rng):
    """A different scaling, or a last matrix that doesn't fit: no parameter changes"""
    with tempfile.TemporaryDirectory() as folder:
        _, path = _save_random(student, rng, folder, alpha=7)
        with safe_open(str(path), framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        last = sorted(name for name, tensor in state.items() if tensor.ndim > 1)[-1]
        wrong = Path(folder, "wrong.safetensors")
        save_file(state | {last: torch.cat([state[last]] * 2)}, wrong, metadata=metadata)
        found = {}
        for name, alpha, file in (("another alpha", 8, path), ("another shape", 7, wrong)):
            model, _ = _save_random(student, rng, tempfile.mkdtemp(dir=folder), alpha)
            found[f"{name}: an error is raised"] = is_error(model.load_adapter, file)
            found[f"{name}: the parameters afterwards"] = _measure_adapters(model)
        return found


LOADED_WRONGLY = {
    "the same shapes of another site": ("k and in", "v and in"),
    "a site too few": ("k and in", "k"),
    "a site too many": ("k", "k and in"),
    "rank 1 into rank 3": ("k and in", "k and in, rank 1"),
    "rank 6 into rank 3": ("k and in", "k and in, rank 6"),
    "transposed matrices": ("k and in", "k and in, transposed"),
    "one block into two": ("q of two blocks", "q of one block"),
    "two blocks into one": ("q of one block", "q of two blocks"),
    "an A of one row": ("k and in", "k and in, one row"),
    "one B of one column": ("k and in", "k and in, one column"),
    "a B that is not there": ("k and in", "k and in, no B of mlp.in"),
    "a B of one row, as a head has": ("o, with a head", "o, with a head, one row of B"),
    "a file that is not there": ("k", "never saved"),
    "a file that is cut off": ("k", "cut off"),
}
FORWARDED = ("k and in", "q of two blocks", "o, with a head")  # before and after they are loaded
INTO_A_HEAD_OF_TWO = "a head of one output into one of two"


def _resize(rank: int) -> Callable[[Tensor], Tensor]:
    """A change of A and B: along the axis of the rank, their parts over and over."""
    index = torch.arange(rank) % RANK

    def resize(matrix):
        shape = list(matrix.shape)
        return matrix.index_select(shape.index(RANK), index) if RANK in shape else matrix

    return resize


def _cut_to_a_row(matrix: Tensor) -> Tensor:
    """One row of every A, which could be broadcast."""
    return matrix[:1] if matrix.shape[-1] == RANK else matrix


def _cut_b_to_a_row(matrix: Tensor) -> Tensor:
    """One row of every B, which could be broadcast."""
    return matrix[:1] if matrix.shape[0] == RANK else matrix


def _cut_to_a_column(matrix: Tensor) -> Tensor:
    """One column of mlp.in's B, which could be broadcast; every A as it was."""
    return matrix[:, :1] if matrix.shape == (RANK, get_sizes("llama", "mlp.in")[1]) else matrix


def _leave_out_a_b(matrix: Tensor) -> Tensor | None:
    """Everything but mlp.in's B."""
    return None if matrix.shape == (RANK, get_sizes("llama", "mlp.in")[1]) else matrix


def _rejects_what_does_not_fit(observed, reference):
    cases = [*LOADED_WRONGLY, INTO_A_HEAD_OF_TWO]
    accepted = [name for name in cases if observed[name] == "no error"]
    if accepted:
        return f"what should be an error is not: {', '.join(accepted)}"
    if observed["bytes of what is trained"] != reference["bytes of what is trained"]:
        return "adapters are in float32, whatever the dtype in the file: copy, or raise an error"
    silent = [name for name in cases if observed[name] != reference[name]]
    if silent:
        return f"an error should say what does not fit, but has no message: {', '.join(silent)}"
    for name in observed["logits saved"]:
        saved, loaded = observed["logits saved"][name], observed["logits loaded"][name]
        if not torch.allclose(loaded, saved, rtol=0, atol=1e-6):
            return f"{name}: an adapter of the same rank and sites should load as it was saved"
    return None


@check(
    "TransformerWithLora.load_adapter",
    points=2,
    holds=_rejects_what_does_not_fit,
    beside=True,
    tier="hardening",
)
def adapters_that_do_not_fit(student, rng):
    """Wrong sizes, sites missing or left over, no B, no file or half a file: errors"""
    ids, mask = ragged_batch(rng)
    sites = {"k and in": ("attn.k", "mlp.in"), "v and in": ("attn.v", "mlp.in"), "k": ("attn.k",)}
    dtype = torch.bfloat16  # of the base: the adapters are in float32
    built = {
        name: boot(student, "llama", sites=chosen, dtype=dtype) for name, chosen in sites.items()
    }
    built["q of two blocks"] = boot(student, "gpt2", sites=("attn.q",))
    built["q of one block"] = boot(student, "shallow", sites=("attn.q",))
    model = built["o, with a head"] = boot(student, "llama", sites=("attn.o",), dtype=dtype)
    has_head = len(add_head(model, rng)) > 0
    changes = {
        "k and in, rank 1": _resize(1),
        "k and in, rank 6": _resize(6),
        "k and in, transposed": torch.t,
        "k and in, one row": _cut_to_a_row,
        "k and in, one column": _cut_to_a_column,
        "k and in, no B of mlp.in": _leave_out_a_b,
        "o, with a head, one row of B": _cut_b_to_a_row,
    }
    found = {"logits saved": {}, "logits loaded": {}}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.safetensors" for name in built}
        for name, saved in built.items():
            set_apart(saved, rng).save_adapter(paths[name])
            if name in FORWARDED:
                attempt(saved.load_adapter, paths[name])  # the file is read, and written anew
                set_apart(saved, rng).save_adapter(paths[name])
                found["logits saved"][name] = float_logits(saved, ids, mask)
        for name, function in changes.items():
            new_path = Path(folder) / f"{name}.safetensors"
            paths[name] = rewrite_file(paths[name.rpartition(", ")[0]], function, new_path)
        paths["never saved"] = Path(folder) / "never saved.safetensors"
        paths["cut off"] = Path(folder) / "cut off.safetensors"
        paths["cut off"].write_bytes(paths["k"].read_bytes()[:-7])
        for case, (into, other) in LOADED_WRONGLY.items():
            found[case] = is_error(built[into].load_adapter, paths[other], clear=True)
        in_16_bits = rewrite_file(paths["k"], Tensor.half, Path(folder) / "in 16 bits.safetensors")
        attempt(built["k"].load_adapter, in_16_bits)  # or cast
        parameters = built["k"].trainable_parameters()
        found["bytes of what is trained"] = sorted({p.element_size() for p in parameters})
        for name in FORWARDED:
            set_apart(built[name], rng).load_adapter(paths[name])
            found["logits loaded"][name] = float_logits(built[name], ids, mask)
        add_head(model, rng, 2)
        result = is_error(model.load_adapter, paths["o, with a head"], clear=True)
        found[INTO_A_HEAD_OF_TWO] = result if has_head else "an error"
    return found


# --- calc_sft_loss ------------------------------------------------------------------------------


def sft_batch(rng, rows: int = 6, seq: int = 7, vocab: int = 9, std: float = 1.0):
    """Logits, tokens and a mask with gaps: a row without targets, one with all, the rest ragged."""
    loss_mask = ragged_mask(rng, rows, seq) & (rng.uniform(rows, seq) < 0.8)
    loss_mask[rng.integer(0, rows)] = True
    loss_mask[0, seq - 1] = True
    return rng.normal(rows, seq, vocab, std=std), rng.integers(0, vocab, rows, seq), loss_mask


def sft_loss_and_gradient(student, logits, tokens, loss_mask) -> dict[str, Tensor]:
    logits = leaf(logits)
    loss = student.calc_sft_loss(logits, tokens, loss_mask)
    return {"the result": loss} | gradients(loss, logits=logits)


@check("calc_sft_loss", public=True, expected=1.5 * math.log(2))
def worked_sft_loss(student, rng):
    """Targets with probability 1/2 and 1/4, one row: (log 2 + log 4) / 2 = 1.0397"""
    probs = [[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]
    tokens, loss_mask = [[2, 0, 1, 1]], [[False, True, True, False]]
    logits = rng.tensor([probs]).log()
    return student.calc_sft_loss(logits, torch.tensor(tokens), torch.tensor(loss_mask))


@check("calc_sft_loss", public=True, points=2, seeds=2, expected=sft_loss_by_loops)
def random_targets(student, rng):
    """Targets with gaps, and a row without any: the loss and its gradient"""
    return sft_loss_and_gradient(student, *sft_batch(rng))


@check("calc_sft_loss", expected=sft_loss_by_loops)
def first_token(student, rng):
    """A row's first token never counts, even if the mask marks it as a target"""
    logits, tokens, loss_mask = sft_batch(rng)
    found = []
    for first in (True, False):
        loss_mask[:, 0] = first
        found.append(sft_loss_and_gradient(student, logits, tokens, loss_mask))
    return found


@check("calc_sft_loss", expected=sft_loss_by_loops, tier="hardening")
def large_logits(student, rng):
    """Logits of 1e4, and small differences on top of 200; a target of loss 0"""
    large, tokens, loss_mask = sft_batch(rng, std=1e4)
    offset = rng.integers(-3, 4, *large.shape).to(rng.dtype) + 200
    row, t = loss_mask[:, 1:].nonzero()[0].tolist()
    offset[row, t, tokens[row, t + 1]] += 60  # a certain target, whose loss is 0
    return [
        sft_loss_and_gradient(student, *batch)
        for batch in ((large, tokens, loss_mask), (offset, tokens, loss_mask))
    ]


@check("calc_sft_loss", expected=sft_loss_by_loops, tier="hardening")
def small_and_large_batches(student, rng):
    """One row, one target; 1025 targets; a row of 1100; an impossible target; inputs unchanged"""
    logits, tokens, loss_mask = sft_batch(rng, rows=4, seq=5)
    *large, large_mask = sft_batch(rng, rows=200, seq=20)
    order = large_mask[:, 1:].flatten().cumsum(0).reshape(200, 19)
    large_mask[:, 1:] &= order <= 1025  # one more than chunks of 64, of 512 or of 1024
    *long, long_mask = sft_batch(rng, rows=1, seq=1100)
    long_mask &= rng.uniform(1, 1100) < 0.02
    every_64th = torch.arange(1100)[None] % 64 == 0  # where chunks of positions may begin
    two = torch.tensor([[False, True]])
    some = torch.tensor([[False, True], [False, False], [False, True], [False, True]])
    impossible, (row, t) = logits.clone(), loss_mask[:, 1:].nonzero()[0].tolist()
    impossible[row, t, tokens[row, t + 1]] = -math.inf
    return {
        "two tokens": sft_loss_and_gradient(student, logits[:1, :2], tokens[:1, :2], two),
        "two tokens of four rows": sft_loss_and_gradient(
            student, logits[:, :2], tokens[:, :2], some
        ),
        "one row": with_inputs_after(
            student.calc_sft_loss,
            logits[:1],
            tokens[:1].clone(),
            torch.tensor([[False, False, True, False, True]]),
        ),
        "all": sft_loss_and_gradient(student, logits, tokens, torch.ones_like(loss_mask)),
        "whether an impossible target shows": bool(
            student.calc_sft_loss(impossible, tokens, loss_mask).isinf()
        ),
        "ragged": with_inputs_after(
            student.calc_sft_loss, sliced(logits), sliced(tokens), sliced(loss_mask)
        ),
        "1025 targets": sft_loss_and_gradient(student, *large, large_mask),
        "a row of 1100 tokens": sft_loss_and_gradient(student, *long, every_64th | long_mask),
    }


@check("calc_sft_loss", expected=sft_loss_by_loops, tier="hardening")
def no_targets(student, rng):
    """No targets at all, or only first tokens: the loss is 0, and so is its gradient"""
    logits, tokens, loss_mask = sft_batch(rng)
    none = torch.zeros_like(loss_mask)
    firsts = none.clone()
    firsts[:, 0] = True
    return {
        "no target": sft_loss_and_gradient(student, logits, tokens, none),
        "the first tokens alone": sft_loss_and_gradient(student, logits, tokens, firsts),
        "some": sft_loss_and_gradient(student, logits, tokens, loss_mask),
    }
