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


def in_each_architecture(rng, find):
    """What `find(model)` gives for a GPT-2 and for a Llama, whose positions are rotary."""
    found = {kind: find(make_policy(rng, kind)) for kind in ("gpt2", "llama")}
    return {f"{name} ({kind})": x for kind, parts in found.items() for name, x in parts.items()}


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


@check("measure_kl_by_position", public=True, points=5, expected=kl_by_rows, **CLOSE)
def kl_of_ragged_completions(student, rng):
    """Left-padded prompts, completions of several lengths, one of them empty; of one token"""
    samples = make_samples(rng, rows=5)
    one = make_samples(rng, rows=2, prompt_len=1, completion=3, empty_row=False)
    return in_each_architecture(
        rng,
        lambda model: {
            "the KL": student.measure_kl_by_position(model, samples),
            "of prompts of one token": student.measure_kl_by_position(model, one),
        },
    )


@check("measure_kl_by_position", expected=kl_by_rows, tier="hardening", **CLOSE)
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


@check("only_adapters", public=True, points=5, expected=only_by_folding, **CLOSE)
def logits_with_some_adapters(student, rng):
    """The adapters of one layer, of one site, a single one, half of them, all, none"""
    ids, mask = draw_prompts(rng)

    def keep_some(model):
        sites, found = list(model.adapters), {}
        some = {sites[i] for i in rng.permutation(len(sites))[: len(sites) // 2].tolist()}
        rules = {
            "block 0": lambda site: site.startswith("blocks.0."),
            "mlp.out": lambda site: site.endswith(".mlp.out"),
            "attn.q of block 0": lambda site: site == "blocks.0.attn.q",
            "half of them": lambda site: site in some,
            "all": lambda site: True,
            "none": lambda site: False,
        }
        for name, keep in rules.items():
            with student.only_adapters(model, keep):  # with gradients recorded, as in a notebook
                found[name] = real(model(ids, mask), mask)
        return found

    return in_each_architecture(rng, keep_some)


@check("only_adapters", public=True, points=2, **CLOSE)
def adapters_after_leaving(student, rng):
    """On leaving, all is back bit for bit, even after an error, which gets passed on"""
    model = make_policy(rng)
    return enter_and_leave(model, lambda: student.only_adapters(model, lambda s: "attn" in s))


@check("only_adapters", tier="hardening", **CLOSE)
def some_adapters_merged_and_yielded(student, rng):
    """merged() and reference() work inside; what's yielded is the model"""
    model = make_policy(rng, "shallow")
    ids, _ = draw_prompts(rng)
    return look_inside(model, ids, student.only_adapters(model, lambda s: "mlp" in s))


# --- truncate_rank ------------------------------------------------------------------------------


@check("truncate_rank", public=True, points=5, expected=truncated_by_numpy, **CLOSE)
def logits_of_each_rank(student, rng):
    """Adapters of rank 3, one of them untrained, cut to ranks 1, 2, 3 and 4"""
    ids, mask = draw_prompts(rng)

    def truncate(model):
        list(model.adapters.values())[1].lora_B.data.zero_()  # as every adapter begins
        found = {}
        for rank in range(1, RANK + 2):
            with student.truncate_rank(model, rank):
                found[f"rank {rank}"] = real(model(ids, mask), mask)
        return found

    return in_each_architecture(rng, truncate)


@check("truncate_rank", public=True, points=2, **CLOSE)
def adapters_after_truncating(student, rng):
    """On leaving, all is back bit for bit, even after an error, which gets passed on"""
    model = make_policy(rng)
    return enter_and_leave(model, lambda: student.truncate_rank(model, 1))


@check("truncate_rank", tier="hardening", **CLOSE)
def truncated_merged_and_yielded(student, rng):
    """merged() and reference() work inside, whatever alpha is; what's yielded is the model"""
    model = make_policy(rng, "shallow", alpha=7)
    ids, _ = draw_prompts(rng)
    return look_inside(model, ids, student.truncate_rank(model, 2))


@check("truncate_rank", points=2, tier="hardening", **CLOSE)
def ranks_at_the_ends(student, rng):
    """From the adapters' rank on they stay, to the bit; below 1: a ValueError names it"""
    model = make_policy(rng, "shallow")
    found, before = {}, copy_weights(model)
    for rank in (RANK, RANK + 1, 50):
        with student.truncate_rank(model, rank):
            inside = copy_weights(model)
        changed = [name for name in before if not torch.equal(before[name], inside[name])]
        found[f"what is changed at rank {rank}"] = ", ".join(changed)

    def enter(rank):
        with student.truncate_rank(model, rank):
            return model(torch.tensor([[3, 4]]))

    found |= {f"rank {rank}": error_of("rank", enter, rank) for rank in (0, -1)}
    return found | {"rank 1": enter(1).detach()}


# --- get_logit_lens -----------------------------------------------------------------------------


@check("get_logit_lens", public=True, points=4, expected=lens_by_hugging_face, **CLOSE)
def lens_of_every_layer(student, rng):
    """Every layer and position, with left padding and without, for policy and reference"""
    ids, mask = draw_prompts(rng)
    one = rng.integers(3, 512, 1, 5)

    def read_layers(model):
        found = {"with a mask": real(student.get_logit_lens(model, ids, mask), mask)}
        found["of one row, without a mask"] = student.get_logit_lens(model, one)
        with model.reference():
            found["of the reference"] = student.get_logit_lens(model, one)
        return found

    return in_each_architecture(rng, read_layers)


@check("get_logit_lens", points=2, **CLOSE)
def lens_of_eleven_layers(student, rng):
    """Eleven layers, in order; no hook is left behind"""
    model = make_policy(rng, "deep")
    ids = rng.integers(3, 512, 2, 4)
    with torch.no_grad():
        logits = model(ids)
        before, weights = describe_state(model), copy_weights(model)
        lens = student.get_logit_lens(model, ids)
        changed = find_changes(model, before, weights, ids, logits)
    return {"all layers": lens, "what is changed": changed}


@check("get_logit_lens", expected=lens_by_hugging_face, tier="hardening", **CLOSE)
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


@check("patch", public=True, points=4, expected=patch_by_hugging_face, **CLOSE)
def patched_blocks(student, rng):
    """Each block's output, at all positions and at one, with left padding and without"""
    ids, mask = draw_prompts(rng)
    same, foreign = rng.integers(3, 512, 2, 4), rng.normal(2, 4, models.D_MODEL)

    def patch_blocks(model):
        found = {}
        for layer in range(model.cfg.n_layers):
            name = f"blocks.{layer}.hook_out"
            source = student.get_activation(model, ids, name, mask)
            for where in (None, ids.shape[1] - 3, -1, -2):
                logits = student.patch(model, ids, name, source, where, mask)
                found[f"block {layer}, position {where}"] = real(logits, mask)
            for where in (None, 0):
                logits = student.patch(model, same, name, foreign, position=where)
                found[f"block {layer}, position {where}, without a mask"] = logits
        return found

    return in_each_architecture(rng, patch_blocks)


@check("patch", points=2, **CLOSE)
def patching_everything(student, rng):
    """Everything patched is the policy, nothing patched the reference; nothing is left behind"""
    model = make_policy(rng)
    ids = rng.integers(3, 512, 3, 5)
    name, at_heads = "blocks.1.hook_out", "blocks.0.attn.v.hook_out"
    with torch.no_grad():
        policy = model(ids)
        before, weights = describe_state(model), copy_weights(model)
        source = student.get_activation(model, ids, name)
        heads = student.get_activation(model, ids, at_heads)
        with model.reference():
            own = student.get_activation(model, ids, name)
        found = {
            "everything": student.patch(model, ids, name, source),
            "nothing": student.patch(model, ids, name, own),
            "of heads": student.patch(model, ids, at_heads, heads),
            "of one head position": student.patch(model, ids, at_heads, heads, 2),
        }
        changed = find_changes(model, before, weights, ids, policy)
    return found | {"source afterwards": source, "what is changed": changed}


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


@check("find_direction", public=True, points=4, expected=direction_by_rows, **CLOSE)
def directions_of_prompts(student, rng):
    """Prompt by prompt: left-padded ones, one alone, some of equal length"""
    ids, mask = draw_prompts(rng)
    longest, same = ids[mask.sum(-1).argmax()][None], rng.integers(3, 512, 6, 3)

    def find_directions(model):
        found, find = {}, student.find_direction
        for layer in range(model.cfg.n_layers):
            name = f"blocks.{layer}.hook_out"
            found[f"block {layer}"] = find(model, ids, name, mask)
            found[f"block {layer}, one prompt"] = find(model, longest, name)
            found[f"block {layer}, without a mask"] = find(model, same, name)
        return found

    return in_each_architecture(rng, find_directions)


@check("find_direction", expected=direction_by_rows, tier="hardening", **CLOSE)
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


@check("steer", public=True, points=4, expected=steer_by_hugging_face, **CLOSE)
def steered_prompts(student, rng):
    """The reference's logits at every position, left-padded prompts, several scales"""
    ids, mask = draw_prompts(rng)
    direction = rng.normal(models.D_MODEL, std=2)

    @torch.no_grad()
    def steer(model):
        found = {}
        for layer in range(model.cfg.n_layers):
            name = f"blocks.{layer}.hook_out"
            with student.steer(model, name, direction):
                found[f"block {layer}"] = real(model(ids, mask), mask)
                found[f"block {layer}, again"] = real(model(ids, mask), mask)
            for scale in (-1.5, 0.0, 2.0):
                with student.steer(model, name, direction, scale):
                    found[f"block {layer}, scale {scale}"] = real(model(ids, mask), mask)
        return found

    return in_each_architecture(rng, steer) | {"direction afterwards": direction}


@check("steer", public=True, points=3, expected=steer_by_hugging_face, **CLOSE)
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


@check("steer", public=True, points=2, **CLOSE)
def model_after_steering(student, rng):
    """On leaving, all is as before, even after an error, which gets passed on"""
    model = make_policy(rng)
    direction = rng.normal(models.D_MODEL)
    return enter_and_leave(model, lambda: student.steer(model, "blocks.0.hook_out", direction))


@check("steer", tier="hardening", **CLOSE)
def steered_and_yielded(student, rng):
    """What's yielded is the model; the adapters are off, even at a scale of 0"""
    model = make_policy(rng, "shallow")
    direction, found = rng.normal(models.D_MODEL), {}
    for scale in (0, 3):
        context = student.steer(model, "blocks.0.hook_out", direction, scale)
        with torch.no_grad(), context as yielded:
            found[f"at a scale of {scale}"] = yielded(torch.arange(3, 11).view(2, 4))
    return found
