"""Checks of chapter 7: memory, accumulation, checkpointing, ranks, TRL's arguments, the outer loop.

Ranks are threads here (`tests.support.ranks`); real processes are in tests/course/test_scale.py.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from solutions.ch0_sampling import sample_completions
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import ReplayMinibatch, TransformerWithValueHeadLora
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch5_rlvr import RlvrArgs
from tests.oracles.ch7_scale import (
    accumulate_by_one_batch,
    bytes_of_shapes,
    config_by_table,
    gradients_by_hugging_face,
    mean_of_gradients,
    means_of_joined_rows,
    stays_whole,
)
from tests.support import trainers, trl
from tests.support.inputs import NAN, error_of, leaf, ragged_mask
from tests.support.ranks import run_on_ranks, shard
from tests.support.trainers import IN_FLOAT32, make_model
from utils.grading.checks import check

# --- estimate_memory ----------------------------------------------------------------------------


@check(
    "estimate_memory",
    public=True,
    expected={
        "weights": 4000,
        "gradients": 400,
        "optimizer": 800,
        "activations": 22080,
        "attention": 4800,
        "logits": 8448,
    },
)
def worked_bytes(student, rng):
    """2 layers of width 8 with 2 heads, 32 words, 3 rows of 10 tokens, the last 4 of them scored"""
    return dict(student.estimate_memory(1000, 100, 2, 8, 2, 32, batch=3, seq=10, completion=4))


def _draw_shape(rng):
    return {
        "n_params": rng.integer(10**5, 10**6),
        "n_trainable": rng.integer(10**3, 10**4),
        "n_layers": rng.integer(2, 9),
        "d_model": 8 * rng.integer(3, 20),
        "n_heads": rng.integer(2, 8),
        "d_vocab": rng.integer(300, 2000),
        "batch": rng.integer(2, 30),
        "seq": rng.integer(60, 100),
        "completion": rng.integer(5, 50),
    }


@check("estimate_memory", points=3, seeds=2, public=True, expected=bytes_of_shapes, rtol=0.0)
def bytes_of_random_shapes(student, rng):
    """Random shapes, with adapters on attention, and on the MLP as well"""
    shapes = [_draw_shape(rng) for _ in range(3)]
    found = {f"shape {i}": dict(student.estimate_memory(**shape)) for i, shape in enumerate(shapes)}
    return found | {"MLP": dict(student.estimate_memory(**shapes[0], mlp_adapters=True))}


@check("estimate_memory", public=True, expected=bytes_of_shapes, rtol=0.0, tier="hardening")
def bytes_in_other_dtypes(student, rng):
    """Weights in bfloat16 and float64: adapters, their inputs and logits are at least float32"""
    shape = _draw_shape(rng)
    return {
        f"{dtype}, MLP {mlp}": dict(student.estimate_memory(**shape, mlp_adapters=mlp, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float64)
        for mlp in (False, True)
    }


# --- accumulate_gradients -----------------------------------------------------------------------


class _Scale(nn.Module):
    """A model of one weight for each column: what it says of a token is a product."""

    def __init__(self, rng, width):
        super().__init__()
        self.weight = nn.Parameter(rng.normal(width))
        self.bias = nn.Parameter(rng.normal(1))


def _make_minibatch(mask, logprobs, advantages):
    ids = torch.zeros(mask.shape, dtype=torch.long)
    return ReplayMinibatch(
        input_ids=ids,
        attention_mask=ids,
        mask=mask,
        logprobs=logprobs,
        advantages=advantages,
    )


def _make_microbatches(rng, rows, width):
    """The later ones are narrower."""
    shapes = [(n, width - i) for i, n in enumerate(rows)]
    return [
        _make_minibatch(ragged_mask(rng, *shape), rng.normal(*shape), rng.normal(shape[0]))
        for shape in shapes
    ]


def _per_token(model, m):
    weight = model.weight[: m.mask.shape[1]].tanh()
    per_token = weight * m.logprobs * m.advantages[:, None] + model.bias.square()
    return torch.where(m.mask, per_token, NAN)


@check(
    "accumulate_gradients",
    public=True,
    points=2,
    expected={"the value": 1.9, "the gradient": 1.9},
    rtol=1e-5,
)
def worked_microbatches(student, rng):
    """10 tokens of 1 and 90 tokens of 2: the mean is 1.9, not 1.5, the mean of the two means"""
    model, masks = nn.Module(), [(torch.arange(90) < n)[None] for n in (10, 90)]
    model.scale = nn.Parameter(rng.tensor([1.0]))
    microbatches = [
        _make_minibatch(mask, rng.tensor([[value] * 90]), rng.tensor([1.0]))
        for mask, value in zip(masks, (1.0, 2.0), strict=True)
    ]
    value = student.accumulate_gradients(
        model, microbatches, lambda model, m: model.scale * m.logprobs, "token"
    )
    return {"the value": value, "the gradient": model.scale.grad.item()}


def _accumulate(student, rng, mode, rows, max_len=None):
    model, microbatches = _Scale(rng, 6), _make_microbatches(rng, rows, 6)
    value = student.accumulate_gradients(model, microbatches, _per_token, mode, max_len)
    return {"the value": float(value), "weight": model.weight.grad, "bias": model.bias.grad}


@check("accumulate_gradients", points=4, seeds=2, public=True, expected=accumulate_by_one_batch)
def gradients_of_ragged_microbatches(student, rng):
    """Microbatches of 4, 1 and 3 ragged rows, NaN behind masks: each mode, and the default"""
    found = {"token": _accumulate(student, rng, "token", (4, 1, 3))}
    found["sequence"] = _accumulate(student, rng, "sequence", (4, 1, 3))
    found["constant"] = _accumulate(student, rng, "constant", (2, 5), max_len=9)
    model, microbatches = _Scale(rng, 5), _make_microbatches(rng, (1, 2), 5)
    student.accumulate_gradients(model, microbatches, _per_token)
    return found | {"the default": model.weight.grad}


def _one_at_a_time(observed, reference):
    if observed["gradients before the second"] == 0:
        return "a microbatch's backward pass should be over before the next one runs"
    if not torch.allclose(observed["afterwards"], reference["afterwards"], atol=1e-5):
        return "the gradient should be that of both microbatches"
    return None


@check("accumulate_gradients", public=True, beside=True, holds=_one_at_a_time)
def one_microbatch_at_a_time(student, rng):
    """Each microbatch is freed before the next one runs"""
    model, seen = _Scale(rng, 4), []
    microbatches = _make_microbatches(rng, (2,), 4) + _make_microbatches(rng, (2,), 4)

    def per_token(model, m):
        grad = model.weight.grad
        seen.append(0.0 if grad is None else float(grad.abs().sum()))
        return _per_token(model, m)

    student.accumulate_gradients(model, microbatches, per_token, "token")
    before = seen[1] if len(seen) > 1 else 0.0
    return {"gradients before the second": before, "afterwards": model.weight.grad.clone()}


@check(
    "accumulate_gradients",
    public=True,
    points=2,
    expected=accumulate_by_one_batch,
    tier="hardening",
)
def microbatches_without_tokens(student, rng):
    """`.grad` isn't cleared; one microbatch or all without tokens, a single token: never NaN"""
    model, found = _Scale(rng, 4), {}
    for microbatch in _make_microbatches(rng, (3, 2), 4):  # the second gradient adds to the first
        student.accumulate_gradients(model, [microbatch], _per_token, "token")
    found["added"] = model.weight.grad
    for name, empty in (("one", (1,)), ("all", (0, 1)), ("one token", (0, 1))):
        model, microbatches = _Scale(rng, 4), _make_microbatches(rng, (2, 2), 4)
        for i in empty:
            microbatches[i].mask.zero_()
        microbatches[0].mask[0, 0] = name == "one token"
        value = student.accumulate_gradients(model, microbatches, _per_token, "token")
        grad = model.weight.grad  # None is no gradient, as zeros are
        grad = torch.zeros_like(model.weight) if grad is None else grad
        found[name] = {"the value": float(value), "weight": grad}
    return found


# --- checkpoint_blocks --------------------------------------------------------------------------


def _checkpoint(student, rng, kind, sites):
    model = make_model(TransformerWithLora, rng, kind, sites=sites)
    ids = rng.integers(3, 512, 3, 9)
    attention = (torch.arange(9) >= rng.integers(0, 4, 3, 1)).long()
    weights = rng.normal(3, 9, 1) * attention[..., None]
    found = {}
    for name in ("without", "with checkpoints"):
        inside = student.checkpoint_blocks(model) if name != "without" else nullcontext()
        with inside:
            (model(ids, attention).log_softmax(-1)[..., :7] * weights).sum().backward()
        gradients = [p.grad.clone() for p in model.trainable_parameters()]
        found[name] = trainers.canonical(gradients)
        model.zero_grad()
    return found


@check(
    "checkpoint_blocks",
    public=True,
    points=4,
    beside=True,
    expected=gradients_by_hugging_face,
    **IN_FLOAT32,
)
def gradients_recomputed(student, rng):
    """A GPT-2 and a Llama: the adapters' gradients, before and inside, against Hugging Face"""
    return {
        "GPT-2": _checkpoint(student, rng, "gpt2", ("attn.q", "attn.o")),
        "Llama": _checkpoint(student, rng, "llama", ("attn.v", "attn.o")),
    }


def _count_saved(run):
    """The numbers that a forward pass keeps for its backward pass, beyond parameters."""
    sizes = {}

    def keep(x):
        if not isinstance(x, nn.Parameter):
            sizes[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = run()
    return output, sum(sizes.values())


def _is_recomputed(observed, reference):
    if observed["runs of a block"] != 2:
        return (
            f"each block should run twice, forward and again in the backward pass, but ran "
            f"{observed['runs of a block']} times"
        )
    if observed["kept inside"] > 0.5 * observed["kept outside"]:
        return "inside, the forward pass keeps nearly as much as outside"
    if not torch.allclose(observed["logits afterwards"], observed["logits"], atol=1e-4):
        return "afterwards, the logits are others than inside"
    if observed["kept afterwards"] != observed["kept outside"]:
        return "afterwards, blocks should no longer be recomputed"
    return _find_other_logits(observed["logits"], reference["logits"])


def _find_other_logits(observed, reference):
    if not torch.allclose(observed, reference, atol=1e-3, rtol=1e-3):
        return "the logits should be those of the adapted model"
    return None


@check("checkpoint_blocks", public=True, points=2, holds=_is_recomputed, float64=False)
def blocks_keep_their_inputs_alone(student, rng):
    """Inside, a forward pass keeps less than half as much, and each block runs twice"""
    model = make_model(TransformerWithLora, rng, "gpt2")
    ids = rng.integers(3, 512, 4, 30)
    runs = []
    original = model.base.blocks[1].attn.o.register_forward_hook(lambda *_: runs.append(1))
    _, outside = _count_saved(lambda: model(ids))
    runs.clear()
    with student.checkpoint_blocks(model):
        output, inside = _count_saved(lambda: model(ids))
        output.sum().backward()
    original.remove()
    found = {"kept inside": inside, "kept outside": outside, "runs of a block": len(runs)}
    afterwards, found["kept afterwards"] = _count_saved(lambda: model(ids))
    return found | {"logits": output.detach(), "logits afterwards": afterwards.detach()}


def _is_left(observed, reference):
    for name in ("after", "after an error"):
        if not torch.equal(observed[f"logits {name}"], observed["logits before"]):
            return f"{name}, the model should give the logits that it gave before, bit for bit"
        if observed[f"hooks {name}"] != observed["hooks before"]:
            return f"{name}, hooks are left on the model"
        if observed[f"runs {name}"] != 1:
            return f"{name}, blocks should no longer be recomputed"
    if not observed["the error"]:
        return "an error inside should come out"
    if not observed["the model"]:
        return "the context should give the model"
    if not torch.allclose(observed["logits inside"], observed["logits before"], atol=1e-4):
        return "inside, the logits should be those of the adapted model"
    return _find_other_logits(observed["logits before"], reference["logits before"])


@check(
    "checkpoint_blocks",
    public=True,
    beside=True,
    holds=_is_left,
    float64=False,
    tier="hardening",
)
def the_model_is_as_before(student, rng):
    """Left normally or by an error: no hooks, no recomputation, the same logits bit for bit"""
    model = make_model(TransformerWithLora, rng, "gpt2")
    ids, runs = rng.integers(3, 512, 2, 7), []
    counter = model.base.blocks[0].attn.o.register_forward_hook(lambda *_: runs.append(1))

    def look(name):
        with torch.no_grad():
            found[f"logits {name}"] = model(ids)
        points = model.base.hook_dict.values()
        found[f"hooks {name}"] = sum(len(p.fwd_hooks) + len(p.bwd_hooks) for p in points)
        runs.clear()
        model(ids).sum().backward()
        found[f"runs {name}"] = len(runs)

    found = {}
    look("before")
    with student.checkpoint_blocks(model) as inside:
        found["logits inside"] = model(ids).detach()
        found["the model"] = inside is model
    look("after")
    found["the error"] = False
    try:
        with student.checkpoint_blocks(model):
            model(ids)
            raise ArithmeticError("inside")
    except ArithmeticError:
        found["the error"] = True
    look("after an error")
    counter.remove()
    return found


# --- global_masked_mean -------------------------------------------------------------------------


def _average(student, values, masks):
    """The mean on each rank, and the gradients for each rank's values."""

    def be(rank):
        x = leaf(values[rank])
        mean = student.global_masked_mean(x, masks[rank])
        mean.backward()
        return mean.detach(), x.grad

    ranks = run_on_ranks(be, len(values))
    found = {f"the mean on rank {i}": mean for i, (mean, _) in enumerate(ranks)}
    return found | {f"the gradient on rank {i}": grad for i, (_, grad) in enumerate(ranks)}


@check(
    "global_masked_mean",
    public=True,
    expected=[[3.0, 3.0], [2 / 3, 2 / 3, 0.0], [2 / 3, 0.0, 0.0]],
    rtol=1e-5,
)
def worked_global_mean(student, rng):
    """Rank 0 has 1 and 2, rank 1 only a 6: 3 on both; gradients of 2/3 each, not 1/2 and 1"""
    values = [rng.tensor([1.0, 2.0, 9.0]), rng.tensor([6.0, 7.0, 8.0])]
    masks = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]
    found = _average(student, values, masks)
    means = [found[f"the mean on rank {i}"].item() for i in range(2)]
    return [means, *(found[f"the gradient on rank {i}"].tolist() for i in range(2))]


@check("global_masked_mean", points=4, seeds=2, expected=means_of_joined_rows)
def global_means_of_ragged_rows(student, rng):
    """Two and three ranks with ragged masks: the value everywhere, and each rank's gradient"""
    found = {}
    for n in (2, 3):
        masks = [ragged_mask(rng, 3 + rank, 5) for rank in range(n)]  # 6 tokens on rank 0, or more
        values = [rng.normal(*mask.shape) for mask in masks]
        found[f"{n} ranks"] = _average(student, values, masks)
    return found


@check("global_masked_mean", public=True, expected=means_of_joined_rows, tier="hardening")
def global_means_with_nan_and_empty_ranks(student, rng):
    """NaN behind the masks, a rank without tokens, one token, and none at all"""
    found = {}
    cases = {"one empty rank": (2, 0), "one token": (1, 0), "all empty": (0, 0)}
    for name, counts in cases.items():
        masks = [torch.arange(4) < n for n in counts]
        values = [rng.normal(4).masked_fill(~mask, NAN) for mask in masks]
        found[name] = _average(student, values, masks)
    return found


@check("global_masked_mean", expected=means_of_joined_rows, tier="hardening")
def mean_of_a_group(student, rng):
    """A group of two out of three ranks: the third isn't part of the mean"""
    values, masks = rng.normal(3, 4), rng.uniform(3, 4) < 0.6
    masks[:, 0] = True

    def be(rank):
        group = dist.new_group([0, 1])  # every rank has to call this
        if rank == 2:
            dist.barrier()
            return None
        x = leaf(values[rank])
        mean = student.global_masked_mean(x, masks[rank], group)
        mean.backward()
        dist.barrier()
        return [mean.detach(), x.grad]

    return run_on_ranks(be, 3)[:2]


@check("global_masked_mean", public=True, beside=True, expected=means_of_joined_rows)
def mean_in_one_process(student, rng):
    """Without a process group, it's the mean over the mask"""
    x, mask = leaf(rng.normal(4, 6)), ragged_mask(rng, 4, 6)
    mean = student.global_masked_mean(x, mask)
    mean.backward()
    return {"the mean": mean.detach(), "the gradient": x.grad}


# --- sync_gradients -----------------------------------------------------------------------------


def _sync(student, gradients):
    """Each rank's gradients after syncing; None in, where a parameter has none."""
    shapes = [
        next(g.shape for g in of_ranks if g is not None)
        for of_ranks in zip(*gradients, strict=True)
    ]

    def be(rank):
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
        for parameter, grad in zip(parameters, gradients[rank], strict=True):
            parameter.grad = None if grad is None else grad.clone()
        student.sync_gradients(parameters)
        dist.barrier()  # or a rank that waits for a message in vain would wait long
        return [None if p.grad is None else p.grad.clone() for p in parameters]

    dtype = next(g.dtype for of_rank in gradients for g in of_rank if g is not None)
    return {f"rank {i}": grads for i, grads in enumerate(run_on_ranks(be, len(gradients)))}


@check("sync_gradients", public=True, points=5, expected=mean_of_gradients)
def gradients_of_two_ranks(student, rng):
    """Two ranks and three: the mean, on every rank; a gradient that is missing counts as zeros"""
    missing = [[rng.normal(2, 2), None], [rng.normal(2, 2), rng.normal(3)]]
    found = {"a gradient is missing": _sync(student, missing)}
    for n in (2, 3):
        gradients = [[rng.normal(3, 2), rng.normal(5), rng.normal(1)] for _ in range(n)]
        found[f"{n} ranks"] = _sync(student, gradients)
    return found


def _is_one_message(observed, reference):
    if observed["in one process"] != [1.0, 2.0]:
        return "without a process group the gradients should stay as they are"
    if observed["in a group of two of three"] != [3.5, 3.5, 5.0]:
        return "with a group, the mean should be over that group's ranks"
    if observed["collectives"] > 2:
        return f"the gradients should travel together, not in {observed['collectives']} messages"
    if not torch.allclose(observed["of a generator"], reference["of a generator"]):
        return "parameters may come from a generator, which can be read only once"
    return None


@check("sync_gradients", public=True, holds=_is_one_message, float64=False, tier="hardening")
def gradients_in_one_message(student, rng):
    """One process; a group of ranks; many parameters in one message, even from a generator"""
    alone = nn.Parameter(torch.zeros(2))
    alone.grad = torch.tensor([1.0, 2.0])
    student.sync_gradients([alone])
    calls = []
    original = dist.all_reduce

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    draws = [[rng.normal(2) for _ in range(6)] for _ in range(2)]

    def be(rank):
        parameters = [nn.Parameter(torch.zeros(2)) for _ in range(6)]
        for parameter, grad in zip(parameters, draws[rank], strict=True):
            parameter.grad = grad.float()
        student.sync_gradients(p for p in parameters)
        return torch.stack([p.grad for p in parameters])

    dist.all_reduce = counted
    try:
        synced = run_on_ranks(be)[0]
    finally:
        dist.all_reduce = original

    def be_in_a_group(rank):
        group = dist.new_group([0, 1])
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([3.0 + rank])
        if rank < 2:
            student.sync_gradients([parameter], group)
        return parameter.grad.item()

    return {
        "in a group of two of three": run_on_ranks(be_in_a_group, 3),
        "in one process": alone.grad.tolist(),
        "collectives": len(calls) // 2,
        "of a generator": synced,
    }


# --- shard_model and unsharded ------------------------------------------------------------------


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _learn_sharded(student, rng, kind, model_class=TransformerWithLora):
    """Logits, and the adapters after two steps: the optimizer is built after a forward pass."""
    ranks = [make_model(model_class, rng, kind) for _ in range(2)]
    ids, weights = rng.integers(3, 512, 2, 6), rng.normal(2, 6, 1)

    def be(rank):
        model = student.shard_model(ranks[rank], dist.init_device_mesh("cpu", (2,)))
        found = {}
        with torch.no_grad():
            found["logits"] = model(ids).clone()
            with model.reference():
                found["logits of the reference"] = model(ids).clone()
        optimizer = torch.optim.SGD(model.trainable_parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            if model_class is TransformerWithValueHeadLora:
                logits, values = model.forward_with_value_head(ids)
                objective = values.square().sum()
            else:
                logits, objective = model(ids), 0.0
            objective = objective + (logits.log_softmax(-1)[..., :5] * weights).sum()
            objective.backward()
            optimizer.step()
        parameters = [_whole(p) for p in model.trainable_parameters()]
        gradients = [_whole(p.grad) for p in model.trainable_parameters()]
        found["parameters"] = trainers.canonical(parameters)
        found["gradients"] = trainers.canonical(gradients)
        return found

    found = run_on_ranks(be)
    return {f"rank {rank}": of_rank for rank, of_rank in enumerate(found)}


@check("shard_model", public=True, points=4, beside=True, expected=stays_whole, **IN_FLOAT32)
def sharded_models_learn(student, rng):
    """A GPT-2 and a Llama on two ranks: logits, gradients and two steps are a whole model's"""
    return {kind: _learn_sharded(student, rng, kind) for kind in ("gpt2", "llama")}


@check("shard_model", public=True, points=2, beside=True, expected=stays_whole, **IN_FLOAT32)
def a_sharded_value_head_learns(student, rng):
    """PPO's model: forward_with_value_head works on shards too"""
    return _learn_sharded(student, rng, "shallow", TransformerWithValueHeadLora)


def _is_sharded(observed, reference):
    if not observed["the model itself"]:
        return "the model itself should come back, sharded in place"
    if observed["share"] > 0.52:
        return (
            f"each of two ranks should hold half of the numbers, but holds {observed['share']:.0%}"
        )
    if observed["blocks"] != 2:
        return "each block should be a unit of its own, so that one at a time is gathered"
    if observed["share after a forward"] > 0.52:
        return (
            "after a forward pass weights stay gathered: the root needs reshard_after_forward=True"
        )
    if observed["base trained"]:
        return "the base should stay frozen"
    for name in ("gradients", "gradients elsewhere"):
        for shape, expected in reference["gradients"].items():
            if not torch.allclose(observed[name][shape], expected, atol=1e-3, rtol=1e-3):
                return "the gradients should be averaged over the ranks"
    return _find_other_logits(observed["logits"], reference["logits"])


@check("shard_model", public=True, points=2, holds=_is_sharded, float64=False)
def each_rank_holds_half(student, rng):
    """Each of two ranks holds half of the numbers, even after a forward pass; one unit per block"""
    ranks = [make_model(TransformerWithLora, rng, "gpt2") for _ in range(2)]
    ids = rng.integers(3, 512, 1, 5)

    def measure(model):
        parameters = list(model.parameters())
        held = [p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in parameters]
        return sum(held) / sum(p.numel() for p in parameters)

    def be(rank):
        model = student.shard_model(ranks[rank], dist.init_device_mesh("cpu", (2,)))
        found = {"the model itself": model is ranks[rank], "share": measure(model)}
        found["blocks"] = sum(isinstance(block, FSDPModule) for block in model.base.blocks)
        with torch.no_grad():
            logits = model(ids).clone()
        found["share after a forward"] = measure(model)
        found["base trained"] = any(p.requires_grad for p in model.base.parameters())
        rows = ids + rank  # other data on each rank: gradients are averaged
        model(rows).log_softmax(-1)[..., 3].sum().backward()
        gradients = [_whole(p.grad) for p in model.trainable_parameters()]
        found["gradients"] = trainers.canonical(gradients)
        return found | {"logits": logits}

    first, second = run_on_ranks(be)
    return first | {"gradients elsewhere": second["gradients"]}


def _sample_unsharded(student, rng, kind):
    ranks = [make_model(TransformerWithLora, rng, kind) for _ in range(2)]
    ids = rng.integers(3, 512, 1, 5)
    seed = rng.integer(0, 1000)

    def be(rank):
        model = student.shard_model(ranks[rank], dist.init_device_mesh("cpu", (2,)))
        # Different prompts and lengths: through FSDP, the ranks would wait for each other.
        prompts = trainers.PROMPTS[2 * rank : 2 * rank + 2]
        generator = torch.Generator().manual_seed(seed)
        with student.unsharded(model) as inside, model.merged():
            samples = sample_completions(model, prompts, 4 + 2 * rank, generator=generator)
        is_sharded = all(hasattr(p, "to_local") for p in model.parameters())
        with torch.no_grad():
            logits = model(ids).clone()
        found = {"tokens": samples.completion_ids, "logits afterwards": logits}
        return found | {"sharded again": is_sharded, "the model": inside is model}

    found = run_on_ranks(be)
    return {f"rank {rank}": of_rank for rank, of_rank in enumerate(found)}


def _samples_of_one(observed, reference):
    for rank, found in observed.items():
        if not torch.equal(found["tokens"], reference[rank]["tokens"]):
            return f"{rank}: the samples should be those of a whole model"
        if not found["sharded again"]:
            return f"{rank}: on leaving, every module should be sharded again"
        if not torch.allclose(found["logits afterwards"], reference[rank]["logits afterwards"]):
            return f"{rank}: afterwards the model should compute as before"
        if not found["the model"]:
            return f"{rank}: the context should give the model"
    return None


@check("unsharded", public=True, points=3, holds=_samples_of_one, float64=False)
def ranks_sample_apart(student, rng):
    """Inside, each rank samples different prompts, of different lengths: GPT-2 and Llama"""
    found = {}
    for kind in ("gpt2", "llama"):
        for rank, of_rank in _sample_unsharded(student, rng, kind).items():
            found[f"{kind}, {rank}"] = of_rank
    return found


@check("unsharded", public=True, points=1, float64=False, tier="hardening")
def sharded_again_after_an_error(student, rng):
    """An error inside gets passed on, and the model is sharded again"""
    ranks = [make_model(TransformerWithLora, rng, "shallow") for _ in range(2)]
    ids = rng.integers(3, 512, 1, 5)

    def be(rank):
        model = shard(ranks[rank], dist.init_device_mesh("cpu", (2,)))
        try:
            with student.unsharded(model):
                whole = [not hasattr(p, "to_local") for p in model.parameters()]
                raise ArithmeticError("inside")
        except ArithmeticError:
            again = [hasattr(p, "to_local") for p in model.parameters()]
            with torch.no_grad():
                logits = model(ids).clone()
            found = {"tensors gathered inside": sum(whole), "sharded again": all(again)}
            return found | {"logits afterwards": logits}

    first, second = run_on_ranks(be)
    return {"rank 0": first, "rank 1": second}


# --- to_trl_config ------------------------------------------------------------------------------


def _make_args(rng, args_class=GrpoArgs, **options):
    """Arguments of which none is TRL's default."""
    # All different, so that none can stand for another.
    group_size, n_minibatches, n_epochs, n_groups = (2 + rng.permutation(4)).tolist()
    given = {
        "group_size": group_size,
        "num_minibatches": n_minibatches,
        "batch_size": group_size * n_minibatches * n_groups,
        "batches_per_learning_phase": n_epochs,
        "total_phases": rng.integer(5, 50),
        "gen_len": rng.integer(7, 100),
        "temperature": 0.5 + rng.integer(1, 5) / 10 + 0.03,
        "top_k": rng.integer(5, 40),
        "clip_coef": rng.integer(1100, 1900) / 10_000,
        "clip_coef_high": rng.integer(21, 29) / 100,
        "kl_coef": rng.integer(1, 9) / 100,
        "ent_coef": rng.integer(1, 9) / 1000,
        "advantage_scale": ("batch", "none")[rng.integer(0, 2)],
        "base_lr": rng.integer(1, 9) * 1e-5,
        "max_grad_norm": rng.integer(2, 9) / 10,
        "dtype": (torch.bfloat16, None)[rng.integer(0, 2)],
    }
    return args_class(**given | options)


@check(
    "to_trl_config", public=True, points=3, seeds=2, expected=config_by_table, rtol=1e-6, atol=0.0
)
def arguments_of_grpo(student, rng):
    """No argument at TRL's default: what TRL's trainer would read"""
    return {"config": trl.read(student.to_trl_config(_make_args(rng)))}


@check("to_trl_config", public=True, points=4, expected=config_by_table, rtol=1e-6)
def arguments_of_descendants(student, rng):
    """Chapter 5's means, ratios and mask; this course's defaults, which aren't TRL's"""
    few = {"clip_coef_high": None, "top_k": None, "advantage_scale": "group"}
    given = {"of this course": GrpoArgs(), "some defaults": _make_args(rng, **few)}
    for options in (
        {"loss_mode": "token"},
        {"loss_mode": "constant", "truncation": "mask"},
        {"ratio_level": "sequence"},
    ):
        given[str(options)] = _make_args(rng, RlvrArgs, **options)
    return {name: trl.read(student.to_trl_config(args)) for name, args in given.items()}


@check("to_trl_config", public=True, beside=True, tier="hardening")
def arguments_that_trl_lacks(student, rng):
    """An exact KL, leave-one-out, dynamic sampling, a penalty: an error that names the argument"""
    cases = {
        "kl_kind": _make_args(rng, kl_kind="exact"),
        "advantage_kind": _make_args(rng, RlvrArgs, advantage_kind="leave_one_out"),
        "dynamic_sampling": _make_args(rng, RlvrArgs, dynamic_sampling=True),
        "truncation": _make_args(rng, RlvrArgs, truncation="penalty"),
    }
    cases["refresh_every"] = _make_args(rng)
    cases["refresh_every"].refresh_every = 1  # as RefreshArgs has it
    found = {name: error_of(name, student.to_trl_config, args) for name, args in cases.items()}
    unset = _make_args(rng, kl_kind="exact", kl_coef=0.0)
    unset.refresh_every = 0
    unused = student.to_trl_config(unset)
    return found | {
        "an exact KL of weight 0": float(trl.read(unused)["beta"]),
        "another argument": float(trl.read(unused)["epsilon"]),
    }


# --- refresh_reference --------------------------------------------------------------------------


def _make_trainer(student, rng, kind="shallow"):
    model = make_model(TransformerWithLora, rng, kind)
    args = GrpoArgs(
        prompts=trainers.PROMPTS[:2],
        batch_size=4,
        group_size=2,
        num_minibatches=1,
        gen_len=4,
        seed=rng.seed % 1000,
        samples_every=0,
    )
    trainer = GrpoTrainer(args, model)
    for parameter in model.trainable_parameters():
        parameter.grad = rng.normal(*parameter.shape)
    trainer.optimizer.step()
    return trainer


@torch.no_grad()
def _refresh(student, rng, kind):
    trainer = _make_trainer(student, rng, kind)
    model, ids = trainer.model, rng.integers(3, 512, 3, 8)
    found = {"logits before": model(ids)}
    with model.merged():
        merged = [linear.weight.detach().clone() for linear in model._linears.values()]
    old = [layer.lora_A.clone() for layer in model.adapters.values()]
    student.refresh_reference(trainer)
    found["logits after"] = model(ids)
    with model.reference():
        found["logits of the reference"] = model(ids)
    weights = [linear.weight for linear in model._linears.values()]
    off = [(w - m).abs().max() for w, m in zip(weights, merged, strict=True)]
    found["weights off by"] = torch.stack(off).max()
    layers = list(model.adapters.values())
    found["largest B"] = torch.stack([layer.lora_B.abs().max() for layer in layers]).max()
    bounds = [layer.lora_A.abs().max() * layer.d_in**0.5 for layer in layers]
    stds = [layer.lora_A.std() * (3 * layer.d_in) ** 0.5 for layer in layers]
    found["A, largest"], found["A, std"] = torch.stack(bounds).max(), torch.stack(stds).mean()
    changed = [not torch.equal(a, layer.lora_A) for a, layer in zip(old, layers, strict=True)]
    found["A is new"] = all(changed)
    found["moments left"] = sum(
        any(bool((torch.as_tensor(x) != 0).any()) for x in state.values())
        for state in map(trainer.optimizer.state.get, model.trainable_parameters())
        if state
    )
    (group,) = trainer.optimizer.param_groups
    same = {id(p) for p in group["params"]} == {id(p) for p in model.trainable_parameters()}
    found["the optimizer has them"] = same
    found["maximises"] = bool(group["maximize"])
    found["trained"] = [bool(p.requires_grad) for p in model.trainable_parameters()]
    found["base trained"] = any(w.requires_grad for w in weights)
    return found


def _is_refreshed(observed, reference):
    for kind, found in observed.items():
        before = found["logits before"]
        scale = 2e-5 * max(1.0, float(before.abs().max()))
        if wrong := _find_other_logits(before, reference[kind]["logits before"]):
            return f"{kind}: {wrong}"
        if (found["logits after"] - before).abs().max() > scale:
            return f"{kind}: the logits should stay as they were"
        if (found["logits of the reference"] - found["logits after"]).abs().max() > 0:
            return f"{kind}: the reference should give the policy's logits"
        if found["weights off by"] > 1e-5:
            return f"{kind}: the weights should be W + A B alpha / rank"
        if found["largest B"] > 0:
            return f"{kind}: new adapters should begin with B at zero"
        if not found["A is new"]:
            return f"{kind}: A should be drawn anew"
        if found["A, largest"] > 1.0001 or not 0.8 < found["A, std"] < 1.2:
            return f"{kind}: A should be uniform in ±1/sqrt(d_in)"
        if found["moments left"]:
            return f"{kind}: Adam's moments of the old adapters should be dropped"
        if not found["the optimizer has them"]:
            return f"{kind}: the optimizer should hold the new adapters: fill the old tensors"
        if not found["maximises"]:
            return f"{kind}: the optimizer should maximise, as before"
        if not all(found["trained"]) or found["base trained"]:
            return f"{kind}: adapters should be trained and the base frozen, as before"
    return None


@check("refresh_reference", public=True, points=3, holds=_is_refreshed, float64=False)
def the_reference_becomes_the_policy(student, rng):
    """GPT-2 and Llama: unchanged logits, the reference's too; new adapters; no moments"""
    return {kind: _refresh(student, rng, kind) for kind in ("gpt2", "llama")}


def _goes_on(observed, reference):
    if not torch.equal(observed["A"], observed["A again"]):
        return "the trainer's generator should decide what the new A is"
    if observed["hooks left"]:
        return "hooks are left on the model"
    if not torch.equal(observed["q, k, v"], observed["fused"]):
        return "q, k and v should still be views of GPT-2's one weight, which is what is exported"
    if not torch.allclose(observed["fused"], reference["fused"], atol=1e-3):
        return "the weights should be W + A B alpha / rank"
    if observed["learning rate"] != reference["learning rate"]:
        return "learning rates and schedule should stay"
    return None


@check("refresh_reference", points=1, holds=_goes_on, float64=False, tier="hardening")
def training_goes_on(student, rng):
    """The generator decides the draw; weights stay shared; the optimizer goes on"""
    found = {}
    for name in ("A", "A again"):
        trainer = _make_trainer(student, _again(rng), "gpt2")
        trainer.optimizer.state.clear()  # as before the first step
        torch.manual_seed(len(name))
        student.refresh_reference(trainer)
        layers = trainer.model.adapters.values()
        found[name] = torch.cat([layer.lora_A.detach().flatten() for layer in layers])
    attention = trainer.model.base.blocks[0].attn
    linears = [part.original_component for part in (attention.q, attention.k, attention.v)]
    parts = [x.weight.T if isinstance(x, nn.Linear) else x.weight for x in linears]
    found["q, k, v"] = torch.cat(parts, dim=1).detach()
    found["fused"] = attention.qkv.original_component.weight.detach()
    found["hooks left"] = sum(len(p.fwd_hooks) for p in trainer.model.base.hook_dict.values())
    found["learning rate"] = trainer.optimizer.param_groups[0]["lr"]
    return found


def _again(rng):
    return type(rng)(rng.seed, rng.dtype)
