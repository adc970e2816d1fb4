"""Chapter 8 by plain Hugging Face: adapters folded into the weights, torch's own hooks on blocks.

What a context of the chapter promises of `model(ids, attention_mask)` is computed without the
bridge; inside an oracle's context the model's forward pass is that of plain Hugging Face.
"""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torch.func import functional_call

from tests.oracles.ch7_scale import computing
from tests.support import models


def get_deltas(model):
    """What each adapter adds to its weight, [d_in d_out], by site."""
    return {
        site: (layer.lora_A @ layer.lora_B * layer.alpha / layer.rank).detach()
        for site, layer in model.adapters.items()
    }


def get_kind(model):
    """Which of the checkpoints a model was loaded from."""
    if "Llama" in type(model.base.original_model).__name__:
        return "llama"
    return {1: "shallow", 2: "gpt2", 11: "deep"}[model.cfg.n_layers]


@torch.no_grad()
def run_plain(model, deltas, ids, attention=None, edit=None):
    """Logits, and each block's output. `edit` is (layer, function of that block's output)."""
    kind = get_kind(model)
    hf = models.load_hf(kind, get_dtype(model))
    blocks = hf.model.layers if kind in models.D_HEAD else hf.transformer.h
    weights = dict(hf.named_parameters())
    for site, delta in deltas.items():
        models.fold(weights, site, delta, kind)
    outputs, handles = {}, []

    def watch(layer):
        def hook(module, args, output):
            x = output[0] if isinstance(output, tuple) else output
            if edit is not None and edit[0] == layer:
                x = edit[1](x)
            outputs[layer] = x
            return (x, *output[1:]) if isinstance(output, tuple) else x

        return hook

    attention = torch.ones_like(ids) if attention is None else attention
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    try:
        handles = [block.register_forward_hook(watch(i)) for i, block in enumerate(blocks)]
        given = {"attention_mask": attention, "position_ids": positions}
        logits = functional_call(hf, weights, (ids,), given).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits, [outputs[layer] for layer in range(len(blocks))]


def compute_with(model, deltas):
    """A context in which the model's forward pass is that of plain Hugging Face with these."""

    def forward(ids, attention=None):
        return run_plain(model, deltas, ids, attention)[0]

    return computing(model, forward)


def get_dtype(model):
    return next(model.base.original_model.parameters()).dtype


def get_layer(hook_name):
    """Of the name of a block's output."""
    start, layer, end = hook_name.split(".")
    assert (start, end) == ("blocks", "hook_out")
    return int(layer)


# --- Oracles ------------------------------------------------------------------------------------


def kl_by_rows(model, samples):
    """One row at a time, without its padding; torch.distributions."""
    sums = torch.zeros(samples.completion_mask.shape[1], dtype=get_dtype(model))
    counts = torch.zeros_like(sums)
    deltas, start = get_deltas(model), samples.prompt_len
    rows = zip(samples.input_ids, samples.attention_mask, samples.completion_mask, strict=True)
    for ids, attention, mask in rows:
        n_pads = int((attention[:start] == 0).sum())
        real = ids[None, n_pads:]
        both = [run_plain(model, d, real)[0][0] for d in (deltas, {})]
        for t in mask.nonzero().flatten().tolist():
            policy, reference = (Categorical(logits=x[start - n_pads + t - 1]) for x in both)
            sums[t] += kl_divergence(policy, reference)
            counts[t] += 1
    return torch.where(counts > 0, sums / counts.clamp(min=1), torch.zeros_like(sums))


def only_by_folding(model, keep):
    """Fold in the products that are kept, and no others."""
    kept = {site: delta for site, delta in get_deltas(model).items() if keep(site)}
    return compute_with(model, kept)


def truncated_by_numpy(model, rank):
    """Sum up outer products of numpy's singular vectors."""
    cut = {}
    for site, delta in get_deltas(model).items():
        u, s, v = np.linalg.svd(delta.double().numpy())
        terms = [s[i] * np.outer(u[:, i], v[i]) for i in range(min(rank, len(s)))]
        cut[site] = torch.as_tensor(sum(terms)).to(delta.dtype)
    return compute_with(model, cut)


def lens_by_hugging_face(model, input_ids, attention_mask=None):
    """Each block's output through the modules that end the model."""
    kind, dtype = get_kind(model), get_dtype(model)
    deltas = get_deltas(model) if model._mode == "hooked" else {}
    _, outputs = run_plain(model, deltas, input_ids, attention_mask)
    hf = models.load_hf(kind, dtype)
    norm = hf.model.norm if kind in models.D_HEAD else hf.transformer.ln_f
    with torch.no_grad():
        logits = [nn.functional.linear(norm(x), hf.lm_head.weight) for x in outputs]
        return torch.stack(logits).to(torch.promote_types(dtype, torch.float32))


def patch_by_hugging_face(model, input_ids, hook_name, source, position=None, attention_mask=None):
    """A hook of torch's on a block."""

    def put(x):
        if position is None:
            return source
        columns = [x[:, i] for i in range(x.shape[1])]
        columns[position] = source[:, position]
        return torch.stack(columns, dim=1)

    return run_plain(model, {}, input_ids, attention_mask, (get_layer(hook_name), put))[0]


def direction_by_rows(model, input_ids, hook_name, attention_mask=None):
    """One prompt at a time, without its padding."""
    layer, deltas = get_layer(hook_name), get_deltas(model)
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    differences = []
    for ids, attention in zip(input_ids, attention_mask, strict=True):
        real = ids[attention.bool()][None]
        policy, reference = (run_plain(model, d, real)[1][layer][0, -1] for d in (deltas, {}))
        differences.append(policy - reference)
    return torch.stack(differences).mean(0)


def steer_by_hugging_face(model, hook_name, direction, scale=1.0):
    """Without a cache: every step reads the whole text anew, and adds at the prompt's end."""
    layer = get_layer(hook_name)

    def forward(ids, attention_mask=None, past_key_values=None, return_type="logits", **_):
        seen = past_key_values
        if seen is None:
            seen = SimpleNamespace(ids=ids, end=ids.shape[1] - 1)
        else:
            seen = SimpleNamespace(ids=torch.cat([seen.ids, ids], dim=1), end=seen.end)

        def add(x):
            change = torch.zeros_like(x)
            change[:, seen.end] = scale * direction
            return x + change

        logits, _ = run_plain(model, {}, seen.ids, attention_mask, (layer, add))
        new = logits[:, -ids.shape[1] :]
        return new if return_type == "logits" else (new, seen)

    return computing(model, forward)
