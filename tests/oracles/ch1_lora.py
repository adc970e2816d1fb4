"""Chapter 1 by other means: outer products, positions one by one, and plain Hugging Face.

A model's oracle holds no adapters as hooks: their change is added to the weights of Hugging Face's
model in float64, each row's real tokens alone.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.func import functional_call

from tests.support import models
from tests.support.inputs import find_leaves
from tests.support.models import ATTENTION, SITES, get_sizes


class LoraByOuterProducts(nn.Module):
    """Change the weight by a sum of outer products, one for each rank."""

    def __init__(self, d_in, d_out, rank=4, alpha=32):
        super().__init__()
        self.lora_A = nn.Parameter((2 * torch.rand(d_in, rank) - 1) / math.sqrt(d_in))
        self.lora_B = nn.Parameter(torch.zeros(rank, d_out))
        self.alpha = alpha

    def forward(self, x):
        pairs = list(zip(self.lora_A.T, self.lora_B, strict=True))
        weight = sum(torch.outer(a, b) for a, b in pairs) * self.alpha / len(pairs)
        return torch.einsum("...i,io->...o", x, weight)


def hooks_by_position(site, layer):
    """Add the change of the weight to one position of one row after the other."""
    seen = {}

    def remember(x, hook):
        seen["x"] = x

    def change(out, hook):
        x, delta = seen.pop("x"), layer(torch.eye(layer.lora_A.shape[0]))
        rows = []
        for i in range(out.shape[0]):
            changes = [x[i, t].flatten() @ delta for t in range(out.shape[1])]
            rows.append(torch.stack([c.reshape(out.shape[2:]) for c in changes]))
        return out + torch.stack(rows).to(out.dtype)

    return [(f"{site}.hook_in", remember), (f"{site}.hook_out", change)]


def change_weights(kind: str, deltas: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return Hugging Face's weights in float64, [d_in d_out] added to those of some sites."""
    weights = {n: p.detach() for n, p in models.load_hf(kind, torch.float64).named_parameters()}
    for site, delta in deltas.items():
        models.fold(weights, site, delta.double(), kind)
    return weights


def score_by_hugging_face(
    kind: str, deltas: dict[str, Tensor], input_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Return logits with changed weights, each row's real tokens alone; 0 where there is padding.

    Rows with as many real tokens run in one batch, so that none has padding.
    """
    weights, model = change_weights(kind, deltas), models.load_hf(kind, torch.float64)
    real = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool()
    logits = torch.zeros(*input_ids.shape, model.config.vocab_size, dtype=torch.float64)
    n_real = real.sum(-1, keepdim=True)  # [batch 1]
    for n in n_real.unique().tolist():
        chosen = real & (n_real == n)
        output = functional_call(model, weights, (input_ids[chosen].view(-1, n),))
        logits = logits.masked_scatter(chosen[..., None], output.logits)
    return logits


class ByHuggingFace(nn.Module):
    """Stand in for `TransformerWithLora`, by weights that are changed each time."""

    def __init__(self, name, rank=4, alpha=32, sites=ATTENTION, device=None, dtype=None):
        super().__init__()
        self.kind, self.scaling, self.sites = Path(name).name.split("-")[0], alpha / rank, {}
        for site in sites:
            if site not in SITES[self.kind]:
                raise ValueError(f"{site} is no site of {self.kind}")
        self.layers = nn.ParameterList()
        device = "cpu" if device is None else device
        for block, site in itertools.product(range(models.N_LAYERS[self.kind]), sites):
            d_in, d_out = get_sizes(self.kind, site)
            self.sites[f"blocks.{block}.{site}"] = len(self.layers)
            lora_A = (torch.rand(d_in, rank) * 2 - 1) / d_in**0.5
            lora_B = torch.zeros(rank, d_out)
            self.layers.extend([lora_A.float().to(device), lora_B.float().to(device)])

    def trainable_parameters(self):
        return list(self.layers)

    def forward(self, input_ids, attention_mask=None):
        deltas = {
            site: self.layers[i].double() @ self.layers[i + 1].double() * self.scaling
            for site, i in self.sites.items()
        }
        return score_by_hugging_face(self.kind, deltas, input_ids, attention_mask).float()


def get_deltas(model) -> dict[str, Tensor]:
    """Return A B alpha/rank by full site name, of the reference's model."""
    return {
        site: layer.lora_A.double() @ layer.lora_B.double() * layer.alpha / layer.rank
        for site, layer in model.adapters.items()
    }


@dataclass
class CacheOfIds:
    """Hold all ids so far: each forward lengthens the cache that it is given."""

    ids: Tensor | None = None


def forward_by_hugging_face(kind: str, folded: dict[str, Tensor] | None = None) -> Callable:
    """Stand in for the forward, in each of the reference's modes, with a cache of ids.

    folded: what is added to the weights; where None is given, what the adapters hold.
    """

    def forward(self, input_ids, attention_mask=None, past_key_values=None, **kwargs):
        ids, cache = input_ids, past_key_values
        if not isinstance(cache, CacheOfIds):
            cache = CacheOfIds()
        if cache.ids is not None:
            ids = torch.cat([cache.ids, input_ids], dim=1)
        if attention_mask is not None and attention_mask.shape != ids.shape:
            raise ValueError("attention_mask should cover the cached positions and the new ones")
        deltas = folded
        if deltas is None:
            deltas = {} if self._mode == "reference" else get_deltas(self)
        logits = score_by_hugging_face(kind, deltas, ids, attention_mask)
        logits = logits[:, -input_ids.shape[1] :].float()
        cache.ids = ids
        if not kwargs.get("use_cache", True):
            cache = None
        return (logits, cache) if kwargs.get("return_type") == "logits_and_cache" else logits

    return forward


def context_by_hugging_face(kind: str, adapted: bool) -> Callable:
    """Stand in for `merged` or `reference`: inside, the forward is Hugging Face's."""

    @contextlib.contextmanager
    def context(self) -> Iterator:
        if self._mode != "hooked":
            raise RuntimeError("contexts do not nest")
        self._mode = "by Hugging Face"
        folded = get_deltas(self) if adapted else {}  # as they are on entering
        vars(self)["forward"] = forward_by_hugging_face(kind, folded).__get__(self)
        try:
            yield self
        finally:
            self._mode = "hooked"
            del vars(self)["forward"]

    return context


class OfTheClassAsked:
    """Build `ByHuggingFace` in a subclass named as the class of which it is asked."""

    def __init__(self):
        self.__name__ = self.__qualname__ = type(self).__name__  # as functions and classes have

    def __get__(self, _, owner: type) -> type:
        return type(owner.__name__, (ByHuggingFace,), {})

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        return ByHuggingFace(*args, **kwargs)


def parameters_by_backward(self):
    """Collect all that a backward from the logits reaches, with the adapters on."""
    mode, self._mode = self._mode, "hooked"
    head = list(self.value_head.parameters()) if hasattr(self, "value_head") else []
    try:
        return find_leaves(self(torch.ones(1, 1, dtype=torch.long))) + head
    finally:
        self._mode = mode


def sft_loss_by_loops(logits, tokens, loss_mask):
    """Pick the targets one by one, and score them with torch.distributions."""
    targets = [(i, t) for i, t in loss_mask.nonzero().tolist() if t > 0]
    if not targets:
        return (logits * 0).sum()
    predictions = Categorical(logits=torch.stack([logits[i, t - 1] for i, t in targets]))
    return -predictions.log_prob(torch.stack([tokens[i, t] for i, t in targets])).mean()
