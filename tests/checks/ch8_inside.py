"""Checks of chapter 8: what did RL change inside?"""

import torch

from solutions.ch0_sampling import get_samples
from solutions.ch1_lora import TransformerWithLora
from tests.oracles.ch8_inside import (
    direction_by_rows,
    kl_by_rows,
    lens_by_hugging_face,
    only_by_folding,
    patch_by_hugging_face,
    steer_by_hugging_face,
    truncated_by_numpy,
)
from tests.support import models
from tests.support.inputs import error_of
from tests.support.trainers import RANK, make_model, make_samples
from utils.grading.checks import check

CLOSE = {"rtol": 1e-3, "atol": 1e-3, "float64": False}  # of logits of models, which are costly


def make_policy(rng, kind="gpt2", **options):
    """A model with an adapter of its own values at each linear site."""
    model = make_model(TransformerWithLora, rng, kind, sites=models.SITES[kind], **options)
    for place, parameter in enumerate(model.trainable_parameters()):
        generator = torch.Generator().manual_seed(rng.seed % 2**31 + place)
        draws = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.data.copy_(0.1 * draws)
    return model


def draw_prompts(rng, rows=4, seq=7):
    """Left-padded ids and their mask; one row at least has no padding. The mask alone says what is
    padding: any id may stand there, and the pad id may be a token."""
    pads = rng.permutation(rows)[:, None]
    mask = (torch.arange(seq) >= pads).long()
    ids = rng.integers(0, 512, rows, seq)
    return ids.where(rng.uniform(rows, seq) < 0.8, ids % 3), mask


def real(logits, mask):
    """Logits where there is a token; 0 on the padding, where anything may stand."""
    return logits.masked_fill(mask[..., None] == 0, 0.0)


def describe_state(model):
    """All that a context should leave as it was, but the tensors."""
    points = model.base.hook_dict.values()
    of_torch = sum(len(module._forward_hooks) for module in model.modules())
    return {
        "the hooks": of_torch + sum(len(point.fwd_hooks) for point in points),
        "the mode": model._mode,
        "which parameters are trained": [id(p) for p in model.parameters() if p.requires_grad],
        "whether gradients are recorded": torch.is_grad_enabled(),
    }


def copy_weights(model):
    adapters = {name: tensor.clone() for name, tensor in model.trainable_state().items()}
    weights = model.base.original_model.state_dict()
    return adapters | {name: tensor.clone() for name, tensor in weights.items()}


def find_changes(model, before, weights, ids, logits):
    """What is not as it was, in words."""
    now = copy_weights(model)
    changed = [name for name, value in describe_state(model).items() if value != before[name]]
    if any(not torch.equal(now[name], tensor) for name, tensor in weights.items()):
        changed.append("the weights")
    if not torch.equal(model(ids), logits):
        changed.append("the logits")
    return ", ".join(changed)


class Expected(Exception):
    """An error of the caller's, inside a context."""


def enter_and_leave(model, make_context):
    """Enter and leave a context twice, the second time by an error; say what that changed. A hook
    of the reader's own is on all the while."""
    ids = torch.arange(3, 13).view(2, 5)
    model.base.add_hook("blocks.0.hook_in", lambda x, hook: 0.5 * x)
    with torch.no_grad():
        logits = model(ids)
        before, weights = describe_state(model), copy_weights(model)
        with make_context():
            inside = model(ids)
        found = {"changed on leaving": find_changes(model, before, weights, ids, logits)}
        passed_on = False
        try:
            with make_context():
                model(ids)
                raise Expected
        except Expected:
            passed_on = True
        found["changed after an error"] = find_changes(model, before, weights, ids, logits)
    return found | {"whether the error is passed on": passed_on, "inside": inside}


def look_inside(model, ids, context):
    """The logits of what a context yields, and of the model in its other modes."""
    with torch.no_grad(), context as yielded:
        found = {"inside, of what is yielded": yielded(ids)}
        with model.merged():
            found["inside, merged"] = model(ids)
        with model.reference():
            found["inside, the reference"] = model(ids)
    return found


# --- measure_kl_by_position ---------------------------------------------------------------------


def _measure_kl(student, rng, kind):
    model = make_policy(rng, kind)
    samples = make_samples(rng, rows=5)
    found = {"the KL": student.measure_kl_by_position(model, samples)}
    one = make_samples(rng, rows=2, prompt_len=1, completion=3, empty_row=False)
    found["of prompts of one token"] = student.measure_kl_by_position(model, one)
    return found


@check("measure_kl_by_position", public=True, points=3, expected=kl_by_rows("gpt2"), **CLOSE)
def kl_of_ragged_completions(student, rng):
    """Left-padded prompts, completions of several lengths, one of them empty: row by row"""
    return _measure_kl(student, rng, "gpt2")


@check("measure_kl_by_position", points=2, expected=kl_by_rows("llama"), **CLOSE)
def kl_of_llama(student, rng):
    """The same for rotary positions and grouped-query attention"""
    return _measure_kl(student, rng, "llama")


@check("measure_kl_by_position", expected=kl_by_rows("shallow"), tier="hardening", **CLOSE)
def kl_where_no_completion_is_so_long(student, rng):
    """0 where no completion has a token; no gradient; model and samples are left as they were"""
    model = make_policy(rng, "shallow")
    samples = make_samples(rng, rows=4, empty_row=False)
    samples.completion_mask[:, -2:] = False
    before = describe_state(model)
    kl = student.measure_kl_by_position(model, samples)
    after = describe_state(model)
    return {
        "the KL": kl,
        "whether a gradient flows": bool(kl.requires_grad),
        "changed": ", ".join(name for name in before if before[name] != after[name]),
        "ids afterwards": samples.input_ids,
        "mask afterwards": samples.completion_mask,
    }


# --- only_adapters ------------------------------------------------------------------------------


def _keep_some(student, rng, kind):
    model = make_policy(rng, kind)
    ids, mask = draw_prompts(rng)
    sites = list(model.adapters)
    some = {sites[i] for i in rng.permutation(len(sites))[: len(sites) // 2].tolist()}
    rules = {
        "block 0": lambda site: site.startswith("blocks.0."),
        "mlp.out": lambda site: site.endswith(".mlp.out"),
        "attn.q of block 0": lambda site: site == "blocks.0.attn.q",
        "half of them": lambda site: site in some,
        "all": lambda site: True,
        "none": lambda site: False,
    }
    found = {}
    for name, keep in rules.items():
        with student.only_adapters(model, keep):  # where gradients are recorded, as in a notebook
            found[name] = real(model(ids, mask), mask)
    return found


@check("only_adapters", public=True, points=3, expected=only_by_folding("gpt2"), **CLOSE)
def logits_with_some_adapters(student, rng):
    """The adapters of one layer, of one site, a single one, half of them, all, none"""
    return _keep_some(student, rng, "gpt2")


@check("only_adapters", points=2, expected=only_by_folding("llama"), **CLOSE)
def logits_with_some_adapters_of_llama(student, rng):
    """The same on another architecture"""
    return _keep_some(student, rng, "llama")


def _nothing_is_left(observed, reference):
    for when in ("changed on leaving", "changed after an error"):
        if observed[when]:
            return f"{when}: {observed[when]}; all should be as before, bit for bit"
    if not observed["whether the error is passed on"]:
        return "an error inside should be passed on"
    for name in observed:
        if name.startswith("inside") and not torch.allclose(
            observed[name], reference[name], rtol=1e-3, atol=1e-3
        ):
            return f"{name}: the logits are wrong"
    return None


@check("only_adapters", public=True, points=2, holds=_nothing_is_left, float64=False)
def adapters_after_leaving(student, rng):
    """On leaving, all is back bit for bit, even after an error, which gets passed on"""
    model = make_policy(rng)
    return enter_and_leave(model, lambda: student.only_adapters(model, lambda s: "attn" in s))


@check("only_adapters", holds=_nothing_is_left, float64=False, tier="hardening")
def some_adapters_merged_and_yielded(student, rng):
    """merged() and reference() work inside; what's yielded is the model"""
    model = make_policy(rng, "shallow")
    ids, _ = draw_prompts(rng)
    found = enter_and_leave(model, lambda: student.only_adapters(model, lambda s: "mlp" in s))
    return found | look_inside(model, ids, student.only_adapters(model, lambda s: "mlp" in s))


# --- truncate_rank ------------------------------------------------------------------------------


def _truncate(student, rng, kind):
    model = make_policy(rng, kind)
    list(model.adapters.values())[1].lora_B.data.zero_()  # as every adapter begins
    ids, mask = draw_prompts(rng)
    found = {}
    for rank in range(1, RANK + 2):
        with student.truncate_rank(model, rank):
            found[f"rank {rank}"] = real(model(ids, mask), mask)
    return found


@check("truncate_rank", public=True, points=3, expected=truncated_by_numpy("gpt2"), **CLOSE)
def logits_of_each_rank(student, rng):
    """Adapters of rank 3, one of them untrained, cut to ranks 1, 2, 3 and 4"""
    return _truncate(student, rng, "gpt2")


@check("truncate_rank", points=2, expected=truncated_by_numpy("llama"), **CLOSE)
def logits_of_each_rank_of_llama(student, rng):
    """The same on another architecture"""
    return _truncate(student, rng, "llama")


@check("truncate_rank", public=True, points=2, holds=_nothing_is_left, float64=False)
def adapters_after_truncating(student, rng):
    """On leaving, all is back bit for bit, even after an error, which gets passed on"""
    model = make_policy(rng)
    return enter_and_leave(model, lambda: student.truncate_rank(model, 1))


@check("truncate_rank", holds=_nothing_is_left, float64=False, tier="hardening")
def truncated_merged_and_yielded(student, rng):
    """merged() and reference() work inside, whatever alpha is; what's yielded is the model"""
    model = make_policy(rng, "shallow", alpha=7)
    ids, _ = draw_prompts(rng)
    found = enter_and_leave(model, lambda: student.truncate_rank(model, 2))
    return found | look_inside(model, ids, student.truncate_rank(model, 2))


def _is_left_alone(observed, reference):
    if not torch.equal(observed["the adapters"], reference["the adapters"]):
        return "the adapters should be those of the policy"
    for rank in (RANK, RANK + 1, 50):
        name = f"rank {rank}"
        if observed[name]:
            return f"{name}: adapters of rank {RANK} should be left alone, to the bit"
    return None


@check("truncate_rank", beside=True, holds=_is_left_alone, float64=False, tier="hardening")
def ranks_that_cut_nothing(student, rng):
    """At the adapters' full rank, or above it, they stay as they are, bit for bit"""
    model = make_policy(rng, "shallow")
    found = {}
    for rank in (RANK, RANK + 1, 50):
        before = copy_weights(model)
        with student.truncate_rank(model, rank):
            inside = copy_weights(model)
        changed = [name for name in before if not torch.equal(before[name], inside[name])]
        found[f"rank {rank}"] = ", ".join(changed)
    flat = [inside[name].flatten() for name in sorted(inside)]
    return found | {"the adapters": torch.cat(flat)}


@check("truncate_rank", tier="hardening", rtol=1e-3, atol=1e-3)
def ranks_below_one(student, rng):
    """A rank of 0 or below: a ValueError names it"""
    model = make_policy(rng, "shallow")

    def enter(rank):
        with student.truncate_rank(model, rank):
            return model(torch.tensor([[3, 4]]))

    return {f"rank {rank}": error_of("rank", enter, rank) for rank in (0, -1)} | {
        "rank 1": enter(1)
    }


# --- get_logit_lens -----------------------------------------------------------------------------


def _read_layers(student, rng, kind):
    model = make_policy(rng, kind)
    ids, mask = draw_prompts(rng)
    found = {"with a mask": real(student.get_logit_lens(model, ids, mask), mask)}
    one = rng.integers(3, 512, 1, 5)
    found["of one row, without a mask"] = student.get_logit_lens(model, one)
    with model.reference():
        found["of the reference"] = student.get_logit_lens(model, one)
    return found


@check("get_logit_lens", public=True, points=3, expected=lens_by_hugging_face("gpt2"), **CLOSE)
def lens_of_gpt2(student, rng):
    """Every layer and position, with left padding and without, for policy and reference"""
    return _read_layers(student, rng, "gpt2")


@check("get_logit_lens", points=1, expected=lens_by_hugging_face("llama"), **CLOSE)
def lens_of_llama(student, rng):
    """The same with another kind of final norm"""
    return _read_layers(student, rng, "llama")


def _last_layer_is_the_model(observed, reference):
    if not torch.allclose(observed["the last layer"], observed["the logits"], 1e-4, 1e-4):
        return "the last layer should equal the model's logits"
    if not torch.allclose(observed["all layers"], reference["all layers"], rtol=1e-3, atol=1e-3):
        return "the layers should be in the order of the blocks, whatever their number"
    if observed["changed"]:
        return f"not as before: {observed['changed']}"
    return None


@check("get_logit_lens", points=2, holds=_last_layer_is_the_model, float64=False)
def lens_of_eleven_layers(student, rng):
    """Eleven layers, in order; the last equals the logits; no hook is left behind"""
    model = make_policy(rng, "deep")
    ids = rng.integers(3, 512, 2, 4)
    with torch.no_grad():
        logits = model(ids)
        before, weights = describe_state(model), copy_weights(model)
        lens = student.get_logit_lens(model, ids)
        changed = find_changes(model, before, weights, ids, logits)
    found = {"all layers": lens, "the last layer": lens[-1], "the logits": logits}
    return found | {"changed": changed}


@check("get_logit_lens", expected=lens_by_hugging_face("shallow"), tier="hardening", **CLOSE)
def lens_in_float32(student, rng):
    """On a base in bfloat16: at least float32, the last layer the model's logits; no gradient"""
    model = make_policy(rng, "shallow")
    ids = rng.integers(3, 512, 2, 4)
    lens = student.get_logit_lens(model, ids)
    short = make_policy(rng, "shallow", dtype=torch.bfloat16)
    with torch.no_grad():
        found = student.get_logit_lens(short, ids)
        off = (found[-1].float() - short(ids)).abs().max()
    return {
        "the lens": lens,
        "whether bfloat16 gives at least float32": found.dtype in (torch.float32, torch.float64),
        "whether the last layer is the model's": bool(off < 0.5),
        "whether a gradient flows": bool(lens.requires_grad),
    }


# --- patch --------------------------------------------------------------------------------------


def _patch_blocks(student, rng, kind, layers):
    model = make_policy(rng, kind)
    ids, mask = draw_prompts(rng)
    found = {}
    for layer in layers:
        name = f"blocks.{layer}.hook_out"
        source = student.get_activation(model, ids, name, mask)
        logits = student.patch(model, ids, name, source, attention_mask=mask)
        found[f"all of block {layer}"] = real(logits, mask)
        for position in (ids.shape[1] - 3, -1, -2):
            logits = student.patch(model, ids, name, source, position, mask)
            found[f"block {layer}, position {position}"] = real(logits, mask)
        same = rng.integers(3, 512, 2, 4)
        foreign = rng.normal(2, 4, models.D_MODEL)
        found[f"block {layer}, without a mask"] = student.patch(model, same, name, foreign)
        found[f"block {layer}, the first position"] = student.patch(
            model, same, name, foreign, position=0
        )
    return found


@check("patch", public=True, points=3, expected=patch_by_hugging_face("gpt2"), **CLOSE)
def patched_blocks(student, rng):
    """Each block's output, at all positions and at one, with left padding and without"""
    return _patch_blocks(student, rng, "gpt2", (0, 1))


@check("patch", points=1, expected=patch_by_hugging_face("llama"), **CLOSE)
def patched_llama(student, rng):
    """The same on another architecture"""
    return _patch_blocks(student, rng, "llama", (0,))


def _everything_is_the_policy(observed, reference):
    if not torch.allclose(observed["everything"], observed["the policy"], rtol=1e-4, atol=1e-4):
        return "with all of the last block's output patched in, the logits should be the policy's"
    if not torch.allclose(observed["nothing"], observed["the reference"], rtol=1e-4, atol=1e-4):
        return "with the reference's own activation put in, the logits should be the reference's"
    for name in ("of heads", "of one head position"):
        if not torch.allclose(observed[name], reference[name], rtol=1e-3, atol=1e-3):
            return f"{name}: an activation with head axes should be put in like any other"
    if not torch.equal(observed["source afterwards"], reference["source afterwards"]):
        return "source should stay as it was"
    if observed["changed"]:
        return f"not as before: {observed['changed']}"
    return None


@check("patch", points=2, holds=_everything_is_the_policy, float64=False)
def patching_everything(student, rng):
    """Everything patched is the policy, nothing patched the reference; nothing is left behind"""
    model = make_policy(rng)
    ids = rng.integers(3, 512, 3, 5)
    name, at_heads = "blocks.1.hook_out", "blocks.0.attn.v.hook_out"
    with torch.no_grad():
        policy = model(ids)
        with model.reference():
            reference = model(ids)
        before, weights = describe_state(model), copy_weights(model)
        source = student.get_activation(model, ids, name)
        found = {"the policy": policy, "the reference": reference}
        found["everything"] = student.patch(model, ids, name, source)
        with model.reference():
            own = student.get_activation(model, ids, name)
        found["nothing"] = student.patch(model, ids, name, own)
        heads = student.get_activation(model, ids, at_heads)
        found["of heads"] = student.patch(model, ids, at_heads, heads)
        found["of one head position"] = student.patch(model, ids, at_heads, heads, 2)
        changed = find_changes(model, before, weights, ids, policy)
    return found | {"source afterwards": source, "changed": changed}


@check("patch", tier="hardening")
def sources_of_another_shape(student, rng):
    """A source of the wrong shape: a ValueError names it, and the model is unchanged"""
    model = make_policy(rng, "shallow")
    ids, name = rng.integers(3, 512, 2, 4), "blocks.0.hook_out"
    bad = {
        f"{list(shape)}": error_of(
            "source", student.patch, model, ids, name, rng.normal(*shape), position
        )
        for shape, position in (((1, 4, 32), None), ((2, 3, 32), 1), ((4, 32), None))
    }
    logits = student.patch(model, ids, name, rng.normal(2, 4, 32))
    return bad | {"the mode": model._mode, "logits": logits}


# --- find_direction -----------------------------------------------------------------------------


def _find_directions(student, rng, kind, layers):
    model = make_policy(rng, kind)
    ids, mask = draw_prompts(rng)
    found = {}
    for layer in layers:
        name = f"blocks.{layer}.hook_out"
        found[f"block {layer}"] = student.find_direction(model, ids, name, mask)
        longest = mask.sum(-1).argmax()
        found[f"block {layer}, one prompt"] = student.find_direction(
            model, ids[longest][None], name
        )
        same = rng.integers(3, 512, 6, 3)
        found[f"block {layer}, without a mask"] = student.find_direction(model, same, name)
    return found


@check("find_direction", public=True, points=3, expected=direction_by_rows("gpt2"), **CLOSE)
def directions_of_prompts(student, rng):
    """Prompt by prompt: left-padded ones, one alone, some of equal length"""
    return _find_directions(student, rng, "gpt2", (0, 1))


@check("find_direction", points=1, expected=direction_by_rows("llama"), **CLOSE)
def directions_of_llama(student, rng):
    """The same on another architecture"""
    return _find_directions(student, rng, "llama", (0,))


@check("find_direction", expected=direction_by_rows("shallow"), tier="hardening", **CLOSE)
def a_direction_is_a_number(student, rng):
    """No gradient; the model and its prompts stay as they were"""
    model = make_policy(rng, "shallow")
    ids, mask = draw_prompts(rng)
    before = describe_state(model)
    direction = student.find_direction(model, ids, "blocks.0.hook_out", mask)
    after = describe_state(model)
    return {
        "the direction": direction,
        "whether a gradient flows": bool(direction.requires_grad),
        "changed": ", ".join(name for name in before if before[name] != after[name]),
        "ids afterwards": ids,
        "mask afterwards": mask,
    }


# --- steer --------------------------------------------------------------------------------------


def _steer(student, rng, kind, layers):
    model = make_policy(rng, kind)
    ids, mask = draw_prompts(rng)
    direction = rng.normal(models.D_MODEL, std=2)
    found = {}
    with torch.no_grad():
        for layer in layers:
            name = f"blocks.{layer}.hook_out"
            with student.steer(model, name, direction):
                found[f"block {layer}"] = real(model(ids, mask), mask)
                found[f"block {layer}, again"] = real(model(ids, mask), mask)
            for scale in (-1.5, 0.0, 2.0):
                with student.steer(model, name, direction, scale):
                    found[f"block {layer}, scale {scale}"] = real(model(ids, mask), mask)
    return found | {"direction afterwards": direction}


@check("steer", public=True, points=3, expected=steer_by_hugging_face("gpt2"), **CLOSE)
def steered_prompts(student, rng):
    """The reference's logits at every position, left-padded prompts, several scales"""
    return _steer(student, rng, "gpt2", (0, 1))


@check("steer", points=1, expected=steer_by_hugging_face("llama"), **CLOSE)
def steered_llama(student, rng):
    """The same on another architecture"""
    return _steer(student, rng, "llama", (0,))


@check("steer", public=True, points=3, expected=steer_by_hugging_face("gpt2"), **CLOSE)
def steered_samples(student, rng):
    """Greedy completions, with a cache: the direction is added only to the prompt"""
    model = make_policy(rng)
    prompts = ["This movie is", "A.", "The plot was dull, and"]
    found = {}
    for layer in (0, 1):
        direction = rng.normal(models.D_MODEL, std=3)
        with student.steer(model, f"blocks.{layer}.hook_out", direction):
            samples = get_samples(model, prompts, 8, temperature=0)
        found[f"block {layer}"] = samples.completion_ids * samples.completion_mask
    return found


@check("steer", public=True, points=2, holds=_nothing_is_left, float64=False)
def model_after_steering(student, rng):
    """On leaving, all is as before, even after an error, which gets passed on"""
    model = make_policy(rng)
    direction = rng.normal(models.D_MODEL)
    return enter_and_leave(model, lambda: student.steer(model, "blocks.0.hook_out", direction))


@check("steer", holds=_nothing_is_left, float64=False, tier="hardening")
def steered_and_yielded(student, rng):
    """What's yielded is the model; the adapters are off, even at a scale of 0"""
    model = make_policy(rng, "shallow")
    direction = rng.normal(models.D_MODEL)
    name, ids = "blocks.0.hook_out", rng.integers(3, 512, 2, 4)
    found = enter_and_leave(model, lambda: student.steer(model, name, direction, 0.0))
    with torch.no_grad(), student.steer(model, name, direction, scale=3) as yielded:
        found["inside, of what is yielded"] = yielded(ids)
    return found
