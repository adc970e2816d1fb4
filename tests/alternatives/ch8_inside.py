"""Right answers to chapter 8, written differently."""

from contextlib import contextmanager

import torch
from torch import nn

from utils.grading.known_answers import right

# --- Where --------------------------------------------------------------------------------------


@right("measure_kl_by_position")
def position_by_position(model, samples):
    ids, attention_mask = samples.input_ids, samples.attention_mask
    with torch.no_grad():
        policy = model(ids, attention_mask).log_softmax(-1)
        with model.reference():
            reference = model(ids, attention_mask=attention_mask).log_softmax(-1)
        found = []
        for t in range(samples.completion_mask.shape[1]):
            rows = samples.completion_mask[:, t]
            p, q = (x[rows, samples.prompt_len + t - 1] for x in (policy, reference))
            kl = nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
            found.append(kl.mean() if len(kl) else policy.new_zeros(()))
    return torch.stack(found)


# --- Which adapters, and how much of each -------------------------------------------------------


@right("only_adapters")
class OnlyAdapters:
    """A context that is a class, and zeroes the other matrix."""

    def __init__(self, model, keep):
        self.model, self.keep = model, keep

    def __enter__(self):
        self.saved = {}
        for site in self.model.adapters:
            if not self.keep(site):
                lora_A = self.model.adapters[site].lora_A
                self.saved[site] = lora_A.data
                lora_A.data = torch.zeros_like(lora_A.data)
        return self.model

    def __exit__(self, *error):
        for site, data in self.saved.items():
            self.model.adapters[site].lora_A.data = data


@right("truncate_rank")
@contextmanager
def projected_onto_its_directions(model, rank):
    """A times the projection of B onto the kept directions of the output."""
    if rank < 1:
        raise ValueError(f"rank is {rank}")
    state = {name: tensor.clone() for name, tensor in model.trainable_state().items()}
    try:
        for layer in model.adapters.values():
            if rank < layer.lora_A.shape[1]:
                product = (layer.lora_A @ layer.lora_B).detach().double()
                v = torch.linalg.svd(product, full_matrices=False).Vh[:rank]
                layer.lora_B.data = (layer.lora_B.data.double() @ v.T @ v).to(layer.lora_B.dtype)
        yield model
    finally:
        model.load_trainable_state(state)


# --- What the layers know -----------------------------------------------------------------------


@right("get_logit_lens")
@torch.no_grad()
def inputs_of_the_next_block(model, input_ids, attention_mask=None):
    """A block's output is the next one's input, and the last one's is that of the final norm."""
    names = [f"blocks.{i}.hook_in" for i in range(1, model.cfg.n_layers)] + ["ln_final.hook_in"]
    streams = []
    for name in names:
        model._run([(name, lambda x, hook: streams.append(x))], input_ids, attention_mask)
    w = model.base.unembed.W_U
    logits = torch.stack([model.base.ln_final(x) @ w for x in streams])
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


# --- Causes -------------------------------------------------------------------------------------


@right("patch")
def in_place(model, input_ids, hook_name, source, position=None, attention_mask=None):
    where = slice(None) if position is None else [position]

    def put(x, hook):
        if list(x.shape) != list(source.shape):
            raise ValueError("source should have the activation's shape")
        x[:, where] = source[:, where]
        return x

    with torch.no_grad(), model.reference():
        return model._run([(hook_name, put)], input_ids, attention_mask)


@right("find_direction")
def two_means(model, input_ids, hook_name, attention_mask=None):
    means = []

    def add_up(x, hook):
        means.append(x[:, -1].double().mean(0).to(x.dtype))

    with torch.no_grad(), model.base.hooks(fwd_hooks=[(hook_name, add_up)]):
        model(input_ids, attention_mask)
        with model.reference():
            model(input_ids, attention_mask)
    return means[0] - means[1]


@right("steer")
@contextmanager
def where_no_cache_is_given(model, hook_name, direction, scale=1.0):
    """The steps of sampling are told by their cache."""
    run, change = model._run, scale * direction.detach()

    def steered(hooks, input_ids, attention_mask, **kwargs):
        def add(x, hook):
            x = x.clone()
            x[:, -1] = x[:, -1] + change
            return x

        is_prompt = kwargs.get("past_key_values") is None
        return run(hooks + [(hook_name, add)] * is_prompt, input_ids, attention_mask, **kwargs)

    with model.reference():
        model._run = steered
        try:
            yield model
        finally:
            del model._run
