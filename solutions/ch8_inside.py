"""Chapter 8: what did RL change inside?

Builds the instruments that look into a policy that was trained with adapters: where its KL is,
which adapters carry it and how much of each, what the layers already know, and whether changing one
activation does what the training did. The frozen reference is the same model with the adapters off,
so every comparison is between two runs of one model.

Simplified: one direction for all prompts, one activation at a time, and adapters only, whereas a
model that was trained as a whole would have differences in every weight.

Papers: the logit lens (nostalgebraist, 2020); activation patching (Meng et al., 2022,
arXiv:2202.05262; how to read it, Heimersheim and Nanda, 2024, arXiv:2404.15255); directions as
differences of means (Arditi et al., 2024, arXiv:2406.11717), and adding them (Turner et al., 2023,
arXiv:2308.10248); the hooks are TransformerLens's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from solutions.ch0_sampling import Samples, at_least_float32, masked_mean, select_completion
from solutions.ch1_lora import TransformerWithLora
from solutions.ch4_kl import calc_exact_kl
from utils.validation import require

# --- Where --------------------------------------------------------------------------------------


@torch.no_grad()
def measure_kl_by_position(
    model: TransformerWithLora, samples: Samples
) -> Float[Tensor, "completion"]:
    """Measure the exact KL(policy ‖ reference), in nats, at each position of the completions.

    Entry t is the mean, over the completions that have a token t, of the KL between the two
    distributions of that token, given what the policy wrote before it. It is 0 where no completion
    is that long.
    """
    ids, attention_mask = samples.input_ids, samples.attention_mask
    logits = model(ids, attention_mask)
    with model.reference():
        ref_logits = model(ids, attention_mask)
    kl = select_completion(calc_exact_kl(logits, ref_logits), samples.prompt_len)
    return masked_mean(kl, samples.completion_mask, dim=0)


# --- Which adapters, and how much of each -------------------------------------------------------


@contextmanager
def restoring_adapters(model: TransformerWithLora) -> Iterator[TransformerWithLora]:
    """Put the adapters back bit for bit on leaving, even after an error, whatever was done to them
    inside."""
    saved = {name: tensor.clone() for name, tensor in model.trainable_state().items()}
    try:
        yield model
    finally:
        model.load_trainable_state(saved)


@contextmanager
def only_adapters(
    model: TransformerWithLora, keep: Callable[[str], bool]
) -> Iterator[TransformerWithLora]:
    """Inside, leave on the adapters whose site passes `keep`; the others add nothing.

    `keep` gets the full name of a site, such as "blocks.0.attn.q". This holds for everything the
    model does inside, including `merged()` and sampling. On leaving, even after an error, the
    adapters are as before, bit for bit.
    """
    with restoring_adapters(model):
        for site, layer in model.adapters.items():
            if not keep(site):
                layer.lora_B.data.zero_()
        yield model


@contextmanager
def truncate_rank(model: TransformerWithLora, rank: int) -> Iterator[TransformerWithLora]:
    """Inside, cut each adapter's product to its `rank` largest singular directions.

    The product A B alpha / rank = sum_i s_i u_i v_i, with singular values s_1 >= s_2 >= ...; the
    sum is cut off after `rank` terms, which leaves the best approximation of that rank. An adapter
    that has no more of them is left alone. This holds for everything the model does inside,
    including `merged()` and sampling. On leaving, even after an error, the adapters are as before,
    bit for bit.

    Raises ValueError unless `rank` is at least 1.
    """
    require(rank >= 1, f"rank should be at least 1, but is {rank}")
    with restoring_adapters(model):
        for layer in model.adapters.values():
            delta = layer.compute_delta().detach()  # [d_in d_out]
            if rank >= min(layer.rank, *delta.shape):
                continue
            u, s, v = torch.linalg.svd(delta, full_matrices=False)
            layer.lora_B.data.zero_()  # what A keeps beyond the rank then adds nothing
            layer.lora_A.data[:, :rank] = u[:, :rank] * s[:rank]
            layer.lora_B.data[:rank] = v[:rank] / layer.scaling
        yield model


# --- What the layers know -----------------------------------------------------------------------


@torch.no_grad()
def get_logit_lens(
    model: TransformerWithLora,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Int[Tensor, "batch seq"] | None = None,
) -> Float[Tensor, "layer batch seq vocab"]:
    """Return the logits that each block's output gives when it is read as if it were the last.

    The unembedding is applied to the output of each block after the final layer norm, affine part
    included, so that the last layer's are the model's logits. In at least float32. No hook is left
    behind.
    """
    outputs: list[Tensor] = []

    def keep_output(x: Float[Tensor, "batch seq d_model"], hook) -> None:
        outputs.append(x)

    names = [f"blocks.{layer}.hook_out" for layer in range(model.cfg.n_layers)]
    model._run([(name, keep_output) for name in names], input_ids, attention_mask)
    base = model.base
    return torch.stack([at_least_float32(base.unembed(base.ln_final(x))) for x in outputs])


# --- Causes -------------------------------------------------------------------------------------


@torch.no_grad()
def get_activation(
    model: TransformerWithLora,
    input_ids: Int[Tensor, "batch seq"],
    hook_name: str,
    attention_mask: Int[Tensor, "batch seq"] | None = None,
) -> Float[Tensor, "batch seq *rest"]:
    """Return the activation at a hook point in a run of the model: inside `reference()`, the
    reference's.

    Raises ValueError for a name at which no hook fires.
    """
    require(hook_name in model.base.hook_dict, f"hook_name should be a hook, but is {hook_name!r}")
    found: list[Tensor] = []

    def keep_activation(x: Float[Tensor, "batch seq *rest"], hook) -> None:
        found.append(x)

    model._run([(hook_name, keep_activation)], input_ids, attention_mask)
    require(found, f"hook_name should be a hook that fires, but {hook_name!r} does not")
    return found[0]


@torch.no_grad()
def get_next_probs(
    model: TransformerWithLora,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Int[Tensor, "batch seq"] | None = None,
) -> Float[Tensor, "batch vocab"]:
    """Return the probabilities of the token that follows each left-padded prompt."""
    return model(input_ids, attention_mask)[:, -1].softmax(-1)


def patch(
    model: TransformerWithLora,
    input_ids: Int[Tensor, "batch seq"],
    hook_name: str,
    source: Float[Tensor, "batch seq *rest"],
    position: int | None = None,
    attention_mask: Int[Tensor, "batch seq"] | None = None,
) -> Float[Tensor, "batch seq vocab"]:
    """Return the reference's logits with `source` in place of its activation at a hook point.

    `source` is the activation of another run on the same tokens, such as the policy's. With a
    `position`, a column, which may be negative, it is put in only there; the reference's own
    activation stays everywhere else. Everything after the hook point is recomputed. No hook is left
    behind, and the adapters are on again, even after an error.

    Raises ValueError if `source` has a different shape from the activation.
    """

    def put_in(x: Float[Tensor, "batch seq *rest"], hook) -> Float[Tensor, "batch seq *rest"]:
        require(
            source.shape == x.shape,
            f"source should have shape {list(x.shape)}, but has {list(source.shape)}",
        )
        if position is None:
            return source
        patched = x.clone()
        patched[:, position] = source[:, position]
        return patched

    with model.reference():
        return model._run([(hook_name, put_in)], input_ids, attention_mask)


@torch.no_grad()
def find_direction(
    model: TransformerWithLora,
    input_ids: Int[Tensor, "batch seq"],
    hook_name: str,
    attention_mask: Int[Tensor, "batch seq"] | None = None,
) -> Float[Tensor, "d_model"]:
    """Return the mean over prompts of policy minus reference, at the last token of each.

    The prompts are left-padded, so the last token of each is in the last column.
    """
    policy = get_activation(model, input_ids, hook_name, attention_mask)
    with model.reference():
        reference = get_activation(model, input_ids, hook_name, attention_mask)
    return (policy - reference)[:, -1].mean(0)


@contextmanager
def steer(
    model: TransformerWithLora,
    hook_name: str,
    direction: Float[Tensor, "d_model"],
    scale: float = 1.0,
) -> Iterator[TransformerWithLora]:
    """Inside, run the reference with scale * direction added at the last prompt token.

    A forward pass over several columns reads left-padded prompts: their last column is changed. One
    over a single column is a step of sampling with a cache, which comes after the prompt: it is
    left as it is. On leaving, even after an error, the hook is gone and the adapters are on again.
    """

    def add_direction(
        x: Float[Tensor, "batch seq d_model"], hook
    ) -> Float[Tensor, "batch seq d_model"]:
        if x.shape[1] == 1:
            return x
        steered = x.clone()
        steered[:, -1] += scale * direction
        return steered

    with model.reference(), model.base.hooks(fwd_hooks=[(hook_name, add_direction)]):
        yield model
