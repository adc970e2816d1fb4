"""Checks of chapter 1: the adapter, its hooks, the LoRA-hooked transformer, fine-tuning's loss.

The order in which a model gives its adapters' parameters is its own. So adapters of one shape get
the same values where logits are compared with an oracle, and what is measured of each parameter is
sorted. The rank equals no other size: a parameter that ends in it is an A.
"""

import contextlib
import gc
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

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
    attempt,
    error_of,
    find_leaves,
    gradients,
    is_error,
    leaf,
    ragged_batch,
    ragged_mask,
)
from tests.support.models import ATTENTION, SITES
from utils.grading.checks import check

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
        return layer.compute_delta()
    return layer(torch.eye(*layer.lora_A.shape[:1], dtype=layer.lora_A.dtype))


def layer_and_gradients(layer, x: Tensor) -> dict[str, Tensor]:
    x = leaf(x)
    output = layer(x)
    weighted = output * (1 + output.detach())  # which leaves a gradient where B is 0
    return {"the result": output} | gradients(
        weighted, x=x, lora_A=layer.lora_A, lora_B=layer.lora_B
    )


@check("LoraLayer", public=True, expected=[22.0, 0.0, -22.0])
def worked_adapter(student, rng):
    """x = [3, 4], A = [[1], [2]], B = [[1, 0, -1]]: x A = 11, times alpha / rank = 2 / 1"""
    layer = student.LoraLayer(2, 3, rank=1, alpha=2)
    set_layer(layer, rng.tensor([[1.0], [2.0]]), rng.tensor([[1.0, 0.0, -1.0]]))
    return layer(rng.tensor([3.0, 4.0]))


NEW_LAYER = (90, 5, 3000, 2)  # d_in, d_out, rank, alpha


def _starts_right(observed, reference):
    shapes = sorted(list(observed[name].shape) for name in ("lora_A", "lora_B"))
    if (trained := observed["shapes of what is trained"]) != shapes:
        return f"what is trained has shapes {trained}, but A and B have {shapes}"
    entries = observed["lora_A"].double().flatten() * math.sqrt(NEW_LAYER[0])
    spread = entries.std().item() * math.sqrt(3)
    if abs(spread - 1) > 0.1:
        return f"lora_A spreads {spread:.2g} times as far as uniform in ±1/sqrt(d_in) would"
    counts = torch.histc(entries, bins=10, min=-1, max=1)
    statistic = (counts - len(entries) / 10).square().sum() / (len(entries) / 10)
    if entries.abs().max() > 1 + 1e-6 or statistic > 65:  # 9 degrees of freedom: p < 1e-9
        return "lora_A is not uniform in ±1/sqrt(d_in)"
    if torch.equal(observed["lora_A"], observed["lora_A of a second layer"]):
        return "two new layers should not have the same lora_A"
    if observed["lora_B"].any() or observed["the result"].any():
        return "lora_B should start at 0, so that a new adapter changes nothing"
    return None


@check("LoraLayer", public=True, points=2, beside=True, holds=_starts_right)
def new_adapters(student, rng):
    """A new adapter: A uniform in ±1/sqrt(d_in), B zero, and both are trained"""
    layer, second = student.LoraLayer(*NEW_LAYER), student.LoraLayer(*NEW_LAYER)
    x = rng.normal(3, NEW_LAYER[0])
    return {
        "shapes of what is trained": sorted(
            list(p.shape) for p in layer.parameters() if p.requires_grad
        ),
        "lora_A": layer.lora_A,
        "lora_B": layer.lora_B,
        "lora_A of a second layer": second.lora_A,
        "the result": layer(x),
    }


@check("LoraLayer", public=True, points=3, seeds=2, expected=LoraByOuterProducts)
def random_adapters(student, rng):
    """Random adapters, inputs of every shape, B = 0: output, gradients, compute_delta"""
    found = {}
    for rank, alpha in ((1, 1), (2, 5), (6, 4), (3, 0.5)):
        layer = random_layer(student, rng, 5, 3, rank=rank, alpha=alpha)
        found[f"rank {rank}, alpha {alpha}"] = [
            layer_and_gradients(layer, rng.normal(*leading, 5)) for leading in ((), (1,), (2, 3))
        ]
    layer.lora_B.data.zero_()
    found["B = 0"] = layer_and_gradients(layer, rng.normal(2, 5))
    wide = random_layer(student, rng, 3, 6, 2, 8)
    found["by position"] = wide(rng.normal(2, 3))
    found["the change of the weight"] = compute_change(wide)
    found["in eval()"] = wide.eval()(rng.normal(2, 3))
    defaults = random_layer(student, rng, d_in=6, d_out=4)
    return found | {"default rank and alpha": layer_and_gradients(defaults, rng.normal(2, 6))}


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


def call_hooks(hooks, point: str, activation: Tensor) -> Tensor:
    """Call the hooks of a point as TransformerLens does: None leaves the activation as it is."""
    for name, function in hooks:
        if name == point:
            result = function(activation, hook=SimpleNamespace(name=name, ctx={}))
            activation = activation if result is None else result
    return activation


def call_both(hooks, site: str, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    return {
        "the input": call_hooks(hooks, f"{site}.hook_in", x),
        "the output": call_hooks(hooks, f"{site}.hook_out", out),
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
    "none, B = 0": ("mlp.out", (6,), (8,)),
    "at hook_out": ("attn.q", (6,), (4, 2)),
    "at hook_in": ("attn.o", (3, 2), (8,)),
    "on both sides, in groups": ("some.site", (3, 1, 2), (2, 2, 2)),
}


@check("make_lora_hooks", public=True, points=2, seeds=2, expected=hooks_by_position)
def head_axes(student, rng):
    """Head axes on the input, the output, both or neither, B of 0: the sum and its gradients"""
    found = {}
    for name, (site, x_axes, out_axes) in HEAD_AXES.items():
        layer = random_layer(student, rng, 6, 8, rank=3, alpha=7)
        if name.endswith("B = 0"):
            layer.lora_B.data.zero_()
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
    """Two adapters on one site; a forward pass after one that broke off"""
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
    return found


DTYPES = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "a float32 input and a bfloat16 output": (torch.float32, torch.bfloat16),
}


def _keeps_the_dtype(observed, reference):
    for name, expected in reference.items():
        yours, expected = observed[name].double(), expected.double()
        if (yours - expected).abs().max() > 0.05 * expected.abs().max():
            return f"{name} is wrong by more than rounding"
    if not torch.equal(observed["lora_A afterwards"], reference["lora_A afterwards"]):
        return "the hooks round the trained lora_A: cast what passes through, not the layer"
    return None


@check("make_lora_hooks", points=2, holds=_keeps_the_dtype, tier="hardening")
def dtypes(student, rng):
    """A 16-bit model: the output keeps its dtype, and the adapter stays in float32"""
    layer = random_layer(student, rng, 6, 8, rank=3, alpha=7)
    hooks = student.make_lora_hooks("blocks.0.attn.q", layer)
    found = {}
    for name, (x_dtype, out_dtype) in DTYPES.items():
        x, out = leaf(rng.normal(2, 4, 6).to(x_dtype)), leaf(rng.normal(2, 4, 4, 2).to(out_dtype))
        both = call_both(hooks, "blocks.0.attn.q", x * 1, out * 1)
        inputs = {"x": x, "out": out, "lora_A": layer.lora_A, "lora_B": layer.lora_B}
        both |= gradients(both["the output"] * rng.normal(2, 4, 4, 2).to(out_dtype), **inputs)
        found |= {f"{key}, {name},": value for key, value in both.items()}
    return found | {"lora_A afterwards": layer.lora_A}


@check("make_lora_hooks", points=2, expected=hooks_by_position, tier="hardening")
def what_is_kept(student, rng):
    """No activation is held after a forward pass, nor beyond the next where one breaks off"""
    layer = random_layer(student, rng, 6, 8, rank=3, alpha=7)
    hooks = student.make_lora_hooks("blocks.0.attn.o", layer)
    x, out = rng.normal(2, 5, 3, 2), rng.normal(2, 5, 8)
    broken = rng.normal(2, 5, 3, 2)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in (x, out, broken)]
    call_hooks(hooks, "blocks.0.attn.o.hook_in", broken)
    with torch.no_grad():
        result = call_both(hooks, "blocks.0.attn.o", x, out)["the output"].clone()
    del x, out, broken
    gc.collect()  # hooks may be a cycle
    return {"the result": result, "it is freed": [storage.expired() for storage in storages]}


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


@check(
    "TransformerWithLora.from_pretrained", public=True, points=2, expected=ByHuggingFace, **CLOSE
)
def every_site(student, rng):
    """Adapters on every site of GPT-2, of Llama with a gated MLP; .train() turns no dropout on"""
    ids, mask = ragged_batch(rng)
    found = {}
    for kind in ("gpt2", "llama"):  # both have dropout in their configs
        model = boot(student, kind)
        found[kind] = describe_new_model(model, ids[:1])
        logits = score(set_alike(model, rng), ids, mask)
        found[kind] |= measure_gradients(model, logits.square().mean())
        found[kind]["logits after .train()"] = score(model.train(), ids, mask)
        found[kind]["parameters that require a gradient then"] = list_trained(model)
    return found


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


@check("TransformerWithLora.from_pretrained", points=2, expected=ByHuggingFace, **CLOSE)
def rank_alpha_and_sites(student, rng):
    """Rank, alpha, sites and device are passed on; the defaults; two models share no weights"""
    ids, mask = ragged_batch(rng)
    build, path = student.TransformerWithLora.from_pretrained, models.get_checkpoint("llama")
    found = {"what is asked for and ignored": ", ".join(_list_ignored(build, path)) or "nothing"}
    sites = ("mlp.out", "attn.v", "mlp.in")
    for name, rank, args in (
        ("chosen, by position", 37, (37, 25.5, sites, torch.device("cpu"), torch.float32)),
        ("defaults", 4, ()),
    ):
        model = set_alike(build(str(path), *args), rng, rank)
        device = next(iter(model.trainable_parameters())).device
        found[name] = {
            "shapes of what is trained": list_shapes(model.trainable_parameters()),
            "logits": score(model, ids.to(device), mask.to(device)),
        }
        # The base of a model that has been scored changes: the next one's is another.
        scale_weights([p for p in model.parameters() if not p.requires_grad], 1.1)
    return found


@check("TransformerWithLora.from_pretrained", public=True, expected=OfTheClassAsked(), **CLOSE)
def initial_adapters(student, rng):
    """Two blocks, each with its own A, uniform in ±1/sqrt(d_in), and B = 0; in a subclass too"""
    rank, d_in = 20, models.D_MODEL

    class Descendant(student.TransformerWithLora):
        pass

    Descendant.__name__ = f"Descendant{rng.integer(0, 10**6)}"
    given = SimpleNamespace(TransformerWithLora=Descendant)
    model = boot(given, "gpt2", rank=rank, sites=("attn.q", "attn.k"))
    parameters = list(model.trainable_parameters())
    started = [p.detach() * d_in**0.5 for p in parameters if p.shape[-1] == rank]
    pairs = itertools.combinations(started, 2)
    return {
        "the class of what a subclass builds": type(model).__name__,
        "shapes of what is trained": list_shapes(parameters),
        "Bs that are not 0": sum(bool(p.any()) for p in parameters if p.shape[-1] != rank),
        "As that are alike": sum(torch.equal(a, b) for a, b in pairs),
        "As that leave ±1/sqrt(d_in)": sum(bool(a.abs().max() > 1 + 1e-6) for a in started),
        "As that are not uniform": sum(  # 8 standard errors
            bool(abs(a.std() * 3**0.5 - 1) > 0.15) for a in started
        ),
    }


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
    return None


@check("TransformerWithLora.from_pretrained", holds=_is_in_the_dtype, tier="hardening")
def base_dtype(student, rng):
    """The base in bfloat16 or float16 if you ask for it, the adapters in float32"""
    ids, found = rng.integers(3, 512, 2, 6), {}
    for dtype in BASE_DTYPES:
        model = boot(student, "llama", sites=("attn.q", "attn.o"), dtype=dtype)
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
    """A site that never fires, that is no linear layer, that is unknown: a ValueError names it"""
    unknown = f"attn.q{rng.integer(0, 10**6)}"
    return {
        site: error_of(site, boot, student, "gpt2", sites=("attn.q", site))
        for site in ("mlp.gate", "attn.qkv", "q_proj", "ln1", unknown)
    }


# --- TransformerWithLora.forward ----------------------------------------------------------------


@check(
    "TransformerWithLora.forward", public=True, expected=forward_by_hugging_face("shallow"), **CLOSE
)
def one_row(student, rng):
    """One row, no mask: the logits with A B alpha/rank added to the weights of every site"""
    model = set_alike(boot(student, "shallow"), rng)
    return model(rng.integers(3, 512, 1, 5))


def _logits_and_gradients(model, ids: Tensor, mask: Tensor, rng) -> dict[str, Any]:
    logits = score(model, ids, mask)
    weights = rng.normal(*logits.shape).to(logits.dtype)
    loss = 10 * (logits * weights).mean()  # gradients are of size 1
    return {"logits": logits} | measure_gradients(model, loss)


@check(
    "TransformerWithLora.forward",
    public=True,
    points=3,
    expected=forward_by_hugging_face("gpt2"),
    **CLOSE,
)
def padded_gpt2(student, rng):
    """Rows padded left and right, absolute positions: logits, and each adapter's gradient"""
    ids, mask = ragged_batch(rng)
    return _logits_and_gradients(set_alike(boot(student, "gpt2"), rng), ids, mask, rng)


@check("TransformerWithLora.forward", points=3, expected=forward_by_hugging_face("qwen"), **CLOSE)
def padded_qwen(student, rng):
    """Rotary positions, grouped queries, an added token, spare logits; pad, bos, eos as tokens"""
    ids, mask = ragged_batch(rng)
    ids[ids == ids.max()] = models.ADDED_ID
    return _logits_and_gradients(set_alike(boot(student, "qwen"), rng), ids, mask, rng)


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


@check(
    "TransformerWithLora.forward",
    points=2,
    public=True,
    expected=forward_by_hugging_face("shallow"),
    **CLOSE,
)
def key_value_cache(student, rng):
    """Padded prompts, then tokens from the cache, in every mode; a mask of a wrong shape"""
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
    _, cache = model(ids[:, :4], **CACHED)
    found["from a cache without a mask"] = model(ids[:, 4:6], past_key_values=cache)
    return found


class Interruption(BaseException):
    """What is no `Exception`, as KeyboardInterrupt."""


@check(
    "TransformerWithLora.forward",
    points=2,
    expected=forward_by_hugging_face("llama"),
    **CLOSE,
    tier="hardening",
)
def again_and_again(student, rng):
    """A second forward, after an error too, under no_grad, with other values, beside another's"""
    ids, mask = ragged_batch(rng)
    model = set_alike(boot(student, "llama", sites=("attn.o", "mlp.in")), rng)
    other = set_alike(boot(student, "llama", sites=("attn.v",)), rng)
    found = {"first": score(model, ids, mask)}
    hooks = count_hooks(model)
    found["ids beyond the vocabulary"] = is_error(model, ids + 10**6, mask)
    found["after the error"] = score(model, ids, mask)
    found["hooks that are left behind"] = count_hooks(model) - hooks
    set_alike(model, rng)
    with torch.no_grad(), other.reference():
        found["other values"] = score(model, ids, mask)
    return found | {"another model": score(other, ids, mask)}


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
    found = {"before": model(ids)}
    with model.reference() as yielded:
        found["inside, of what is yielded"] = yielded(ids)
    return found | {"after": model(ids)}


@check(
    "TransformerWithLora.reference", public=True, points=3, expected=NEVER_ADAPTED["gpt2"], **CLOSE
)
def between_forward_and_backward(student, rng):
    """Forward passes of both on the same rows, one backward pass through both; then no_grad"""
    ids, mask = ragged_batch(rng)
    model = set_alike(boot(student, "gpt2"), rng)
    logits = score(model, ids, mask)
    with model.reference():
        ref_logits = score(model, ids, mask)
        found = {"gradients are recorded inside": torch.is_grad_enabled()}
    found["ref_logits"] = ref_logits
    loss = (logits * ref_logits).mean()
    found["the backward"] = "passed"
    try:
        found |= measure_gradients(model, loss)
    except RuntimeError as error:
        found["the backward"] = str(error)
    with torch.no_grad(), model.reference():
        found["gradients are recorded inside, under no_grad"] = torch.is_grad_enabled()
    return found | {"gradients are recorded afterwards": torch.is_grad_enabled()}


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
    found["parameters that require a gradient"] = list_trained(model)
    return found | {"hooks that are left behind": count_hooks(model) - hooks}


def enter(context: Callable) -> None:
    with context():
        pass


def _try_to_nest(student, rng, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """What entering the second of two contexts inside the first gives, and the logits then."""
    ids, mask = ragged_batch(rng)
    model, found = set_alike(boot(student, "llama", sites=("attn.q", "attn.o")), rng), {}
    before = copy_weights(model)
    for outer, inner in pairs:
        with getattr(model, outer)():
            found[f"{inner}() inside {outer}()"] = is_error(enter, getattr(model, inner))
            found[f"logits inside {outer}(), {inner}() refused"] = score(model, ids, mask)
        found[f"logits after {inner}() inside {outer}()"] = score(model, ids, mask)
    return found | {"weights that changed": name_changed(before, model)}


@check("TransformerWithLora.reference", expected=NEVER_ADAPTED["llama"], **CLOSE, tier="hardening")
def reference_does_not_nest(student, rng):
    """reference() inside reference() or merged() is an error that leaves the model usable"""
    pairs = [("reference", "reference"), ("reference", "merged"), ("merged", "reference")]
    return _try_to_nest(student, rng, pairs)


def _takes_no_second_copy(observed, reference):
    # bfloat16 rounds by up to 0.35 here; scaling the weights moves a logit by 3 and more.
    for when in ("inside", "weights changed before"):
        if not torch.allclose(observed[when], reference[when], rtol=0, atol=1.0):
            return f"{when}: the logits are not those of the model's weights as they are now"
    if observed["bytes inside"] > 1.4 * reference["bytes inside"]:
        return "the base takes more memory than one copy in its dtype: turn the adapters off"
    return None


@check("TransformerWithLora.reference", holds=_takes_no_second_copy, tier="hardening")
def memory_of_the_reference(student, rng):
    """There's one copy of the weights: their bytes, and what happens if you change them"""
    ids = rng.integers(3, 512, 1, 4)
    model = set_alike(boot(student, "llama", sites=("attn.q",), dtype=torch.bfloat16), rng)
    base = [p for p in model.parameters() if not p.requires_grad]
    with model.reference():
        found = {"bytes inside": count_bytes(model), "inside": model(ids).float()}
    scale_weights(base, 1.1)
    with model.reference():
        return found | {"weights changed before": model(ids).float()}


# --- TransformerWithLora.merged -----------------------------------------------------------------


def overwrite_adapters(model, value: float) -> None:
    for parameter in list(model.trainable_parameters()):
        parameter.data.fill_(value)


def _merge(student, rng, kind: str) -> dict[str, Any]:
    ids, mask = ragged_batch(rng)
    model = set_alike(boot(student, kind), rng)
    before, found = copy_weights(model), {}
    with model.merged():
        found["inside"] = score(model, ids, mask)
    found["weights that changed"] = name_changed(before, model)
    found["after"] = score(model, ids, mask)
    with set_alike(model, rng).merged():
        overwrite_adapters(model, math.nan)  # they are read on entering, and then looked at no more
        found["inside, adapters overwritten with nan"] = score(model, ids, mask)
        overwrite_adapters(model, 0)
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
    if (observed["hooked"] - reference["base"]).abs().max() < 1e-2:
        return "the adapters have no effect on the logits"
    if (observed["merged"] - observed["hooked"]).abs().max() > 1e-3:
        return "the logits inside merged() differ from the hooked model's by more than rounding"
    for when in ("after", "after an error", "after an interrupt"):
        if not torch.equal(observed[f"hooked, {when}"], observed["hooked"]):
            return f"{when}: the logits are not bit for bit those from before"
        if (names := observed[f"weights changed, {when}"]) != "none":
            return f"{when}: weights changed: {names}"
    if observed["weights changed, an error while merging"] != "none":
        return "after an error while merging, weights are changed"
    if (errors := observed["errors"]) != reference["errors"]:
        return f"an error inside merged() should pass on, but what came out is {errors}"
    if observed["hooks left behind"] > 0:
        return "hooks are left behind"
    return None


@check("TransformerWithLora.merged", public=True, points=3, beside=True, holds=_is_the_same_model)
def restored_bit_for_bit(student, rng):
    """Different adapters on each site: merged equals hooked; all is back, after errors too"""
    ids, mask = ragged_batch(rng)
    model = set_apart(boot(student, "gpt2", dtype=torch.float64), rng)
    found = {"hooked": score(model, ids, mask), "errors": []}
    with model.reference():
        found["base"] = score(model, ids, mask)
    hooks, weights = count_hooks(model), copy_weights(model)

    def look(when):
        found[f"hooked, {when}"] = score(model, ids, mask)
        found[f"weights changed, {when}"] = name_changed(weights, model)

    with model.merged():
        found["merged"] = score(model, ids, mask)
    look("after")
    for error, when in ((SeveralErrors, "after an error"), (Interruption, "after an interrupt")):
        passed = "swallowed"
        try:
            with model.merged():
                raise error
        except (error, Exception) as caught:
            passed = f"{type(caught).__name__} passed on"
        found["errors"].append(passed)
        look(when)
    parameters = list(model.trainable_parameters())
    for parameter in (parameters[0], parameters[-1]):  # whichever end merging begins at
        values, parameter.data = parameter.data, parameter.data.flatten()[1:]  # fits no product
        attempt(enter, model.merged)
        parameter.data = values
    found["weights changed, an error while merging"] = name_changed(weights, model)
    return found | {"hooks left behind": count_hooks(model) - hooks}


@check(
    "TransformerWithLora.merged",
    points=2,
    beside=True,  # where merged() does nothing, this is right
    expected=context_by_hugging_face("shallow", adapted=True),
    **CLOSE,
    tier="hardening",
)
def merged_between_forward_and_backward(student, rng):
    """A forward pass, sampling inside merged(), then a backward pass through a loss of both"""
    ids, mask = ragged_batch(rng)
    model = set_alike(boot(student, "shallow"), rng)
    logits = score(model, ids, mask)
    with model.merged(), torch.no_grad():
        found = {"inside": score(model, ids, mask)}
    found |= measure_gradients(model, (logits * found["inside"]).mean())
    return found | {"weights of the base that require a gradient": list_unfrozen(model)}


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
    for name in ("weights that changed inside", "dtypes inside"):
        if observed[name] != reference[name]:
            return f"{name} should be {reference[name]}, but are {observed[name]}"
    inside, exact = observed["inside"], reference["the sums"]
    _, exponent = torch.frexp(inside.float())
    ulp = torch.ldexp(torch.ones_like(exact), exponent - 1) * torch.finfo(torch.bfloat16).eps
    # What float32 itself rounds off may be many ulps of a sum that is nearly 0.
    excess = ((inside.double() - exact).abs() - 1e-6).clamp(min=0)
    if (excess / ulp).max() > 0.51:
        return "a weight is further from W + A B alpha/rank than by rounding it once"
    if observed["weights that changed afterwards"]:
        return "the weights in 16 bits should come back bit for bit"
    return None


@check("TransformerWithLora.merged", holds=_is_rounded_once, tier="hardening")
def rounded_once(student, rng):
    """A base in bfloat16: sums are computed in float32, rounded once"""
    model = set_alike(boot(student, "llama", sites=ATTENTION, dtype=torch.bfloat16), rng)
    by_shape = {tuple(p.shape): p.detach().double() for p in model.trainable_parameters()}
    before, inside, sums, dtypes = copy_weights(model), [], [], set()
    with model.merged():
        for old, new in list_changed(before, model):
            d_out, d_in = new.shape
            delta = by_shape[d_in, RANK] @ by_shape[RANK, d_out] * ALPHA / RANK
            sums.append((old.double() + delta.T).flatten())
            inside.append(new.clone().flatten())
            dtypes.add(str(new.dtype))
    return {
        "weights that changed inside": len(inside),
        "dtypes inside": sorted(dtypes),
        "inside": torch.cat([*inside, torch.zeros(0)]).double(),
        "the sums": torch.cat([*sums, torch.zeros(0)]).double(),
        "weights that changed afterwards": len(list_changed(before, model)),
    }


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
    "TransformerWithLora.trainable_parameters", points=3, expected=parameters_by_backward, **CLOSE
)
def the_same_at_each_call(student, rng):
    """Each call gives the same parameters, of every site, in every mode; and a head's, if any"""
    model = set_alike(boot(student, "llama"), rng)
    calls = [list(model.trainable_parameters())]
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


def rewrite_file(path: Path, change: Callable[[Tensor], Tensor], new_path: Path) -> None:
    """Write a file in which every matrix is changed."""
    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    changed = {k: change(x).contiguous() if x.ndim == 2 else x for k, x in state.items()}
    save_file(changed, new_path, metadata)


def float_logits(model, ids: Tensor, mask: Tensor) -> Tensor:
    """`score` in float32: the dtype of a 16-bit base's logits is left open."""
    return score(model, ids, mask).float()


def _is_loaded(observed, reference):
    saved, loaded = observed["logits saved"], observed["logits loaded"]
    if (observed["logits of the base"] - reference["logits of the base"]).abs().max() > 0.1:
        return "under reference(), the logits aren't those of the base"
    for other in (observed["logits before loading"], reference["logits of the base"]):
        if (saved - other).abs().max() < 1e-2:
            return "the adapters have no effect on the logits"
    if (loaded - observed["logits before loading"]).abs().max() == 0:
        return "after loading, the logits are those from before"
    if (difference := (loaded - saved).abs().max()) > 1e-6:
        how = "slightly" if difference < 0.2 else "altogether"
        return f"the model that loaded gives {how} different logits from the one that saved"
    if observed["weights of the base that require a gradient"]:
        return "after loading, weights of the base require a gradient: they should stay frozen"
    if observed["a head is lost"]:
        return "in a subclass with one more part, like chapter 2's head, that part is lost"
    if not observed["the same parameters"]:
        return "load_adapter should write into the existing parameters: an optimizer has them"
    return None


def _holds_the_adapters(observed, reference):
    if observed["format"] != "safetensors":
        return f"reading the file as safetensors fails: {observed['format']}"
    if observed["files"] != reference["files"]:
        return "save_adapter should write the file at its path, and touch no other"
    trained, saved = reference["numbers that are trained"], observed["numbers in the file"]
    if not 0 <= saved - trained <= 100:
        return f"the file holds {saved} numbers, but the adapters have {trained}"
    return _is_loaded(observed, reference)


def _save_and_load(
    student, rng, kind: str, sites, dtype=torch.float32, path_type=str
) -> dict[str, Any]:
    """What one model saves, over another file, a second one with its sites in reverse loads."""
    ids, mask = ragged_batch(rng)
    first = set_apart(boot(student, kind, sites=sites, dtype=dtype), rng)
    second = set_apart(boot(student, kind, sites=sites[::-1], dtype=dtype), rng)
    parameters = list(second.trainable_parameters())
    found = {"logits before loading": float_logits(second, ids, mask)}
    found["numbers that are trained"] = sum(p.numel() for p in first.trainable_parameters())
    heads = add_head(first, rng), add_head(second, rng)
    with second.reference():
        found["logits of the base"] = float_logits(second, ids, mask)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "adapter.step100")
        save_file({"of another model": torch.ones(1000)}, path)
        first.save_adapter(path_type(path))
        found["files"] = ", ".join(sorted(p.name for p in Path(folder).iterdir()))
        try:
            with safe_open(path, framework="pt") as file:
                numbers = [file.get_tensor(name).numel() for name in file.keys()]  # noqa: SIM118
            found |= {"format": "safetensors", "numbers in the file": sum(numbers)}
        except Exception as error:  # an observation: whatever it is
            found |= {"format": type(error).__name__, "numbers in the file": 0}
        second.load_adapter(path_type(path))
    now = {id(p) for p in second.trainable_parameters()}
    return found | {
        "logits saved": float_logits(first, ids, mask),
        "logits loaded": float_logits(second, ids, mask),
        "weights of the base that require a gradient": len(list_unfrozen(second)) - len(heads[1]),
        "the same parameters": now >= {id(p) for p in parameters},
        "a head is lost": any(not torch.equal(a, b) for a, b in zip(*heads, strict=True)),
    }


@check("TransformerWithLora.save_adapter", public=True, points=2, holds=_holds_the_adapters)
def saved_and_loaded(student, rng):
    """A model that loads what another saved becomes the same; a head of a subclass too"""
    return _save_and_load(student, rng, "gpt2", ("attn.q", "attn.v"))  # of one shape


@check("TransformerWithLora.save_adapter", points=2, holds=_holds_the_adapters, tier="hardening")
def every_site_is_saved(student, rng):
    """Every site of Llama in bfloat16, whose adapters are in float32, in the file too"""
    return _save_and_load(student, rng, "llama", SITES["llama"], torch.bfloat16, Path)


@check("TransformerWithLora.save_adapter", beside=True, tier="hardening")
def the_scaling_is_noted(student, rng):
    """An adapter that was saved with one scaling can't be loaded with another"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "adapter.safetensors")
        saved, other = (
            set_alike(boot(student, "shallow", alpha=alpha, sites=("attn.q",)), rng)
            for alpha in (7, 8)
        )
        saved.save_adapter(path)
        found = {"an error is raised": is_error(other.load_adapter, path)}
        return found | measure(other.trainable_parameters())


@check("TransformerWithLora.load_adapter", public=True, points=2, holds=_is_loaded)
def loaded_into_another(student, rng):
    """A second model gets the first one's logits, and keeps its own parameter objects"""
    return _save_and_load(student, rng, "gpt2", ("attn.o", "mlp.in"), path_type=Path)


OTHER_SITES = {
    "fits": ("attn.k", "mlp.in"),
    "other sites of the same shapes": ("attn.v", "mlp.in"),
    "a site too few": ("attn.k",),
    "a site too many": ("attn.k", "mlp.in", "attn.o"),
    "another scaling": ("attn.k", "mlp.in"),
}


def _resize(rank: int) -> Callable[[Tensor], Tensor]:
    """A change of A and B: along the axis of the rank, their parts over and over."""
    index = torch.arange(rank) % RANK
    return lambda matrix: matrix.index_select(list(matrix.shape).index(RANK), index)


@check("TransformerWithLora.load_adapter", points=3, beside=True, tier="hardening")
def refused_files_change_nothing(student, rng):
    """Wrong sizes, sites missing or left over, another scaling, no file or half a file: errors"""
    changes = {"rank 1": _resize(1), "rank 6": _resize(6), "transposed": torch.t}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, name) for name in (*OTHER_SITES, *changes, "cut off", "none")}
        for name, sites in OTHER_SITES.items():
            alpha = ALPHA + (name == "another scaling")
            saved = boot(student, "llama", alpha=alpha, sites=sites)
            set_alike(saved, rng).save_adapter(paths[name])
        for name, change in changes.items():
            rewrite_file(paths["fits"], change, paths[name])
        paths["cut off"].write_bytes(paths["fits"].read_bytes()[:-7])
        model = set_alike(boot(student, "llama", sites=OTHER_SITES["fits"]), rng)
        for name, path in paths.items():
            found[name] = is_error(model.load_adapter, path)
            found[f"{name}: the parameters afterwards"] = measure(model.trainable_parameters())
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


@check("calc_sft_loss", public=True, points=3, seeds=2, expected=sft_loss_by_loops)
def random_targets(student, rng):
    """Targets with gaps, a row without any; first tokens never count: the loss, its gradient"""
    logits, tokens, loss_mask = sft_batch(rng)
    found = []
    for first in (True, False):
        loss_mask[:, 0] = first
        found.append(sft_loss_and_gradient(student, logits, tokens, loss_mask))
    return found


@check("calc_sft_loss", points=2, expected=sft_loss_by_loops, tier="hardening")
def large_logits(student, rng):
    """Logits of 1e4, and small differences on top of 200"""
    large, tokens, loss_mask = sft_batch(rng, std=1e4)
    offset = rng.integers(-3, 4, *large.shape).to(rng.dtype) + 200
    return [sft_loss_and_gradient(student, x, tokens, loss_mask) for x in (large, offset)]


@check("calc_sft_loss", expected=sft_loss_by_loops, tier="hardening")
def no_targets(student, rng):
    """No target, or only first tokens: the loss and its gradient are 0; one target; masks stay"""
    logits, tokens, loss_mask = sft_batch(rng)
    none = torch.zeros_like(loss_mask)
    firsts = none.clone()
    firsts[:, 0] = True
    one = none.clone()
    one[rng.integer(0, len(one)), -1] = True
    masks = {"no target": none, "the first tokens alone": firsts, "one": one, "some": loss_mask}
    found = {name: sft_loss_and_gradient(student, logits, tokens, m) for name, m in masks.items()}
    return found | {"the masks, which should stay as they were,": masks}
