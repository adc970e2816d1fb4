"""A faster forward pass for sampling: what a TransformerBridge of a GPT-2 computes, with less work.

`get_samples` in chapter 0 is the plain sampler. It calls a model once a token, and accepts
whatever is called as a bridge is: `get_decoder(model)` is such a thing. The loop, the random
numbers and, to rounding, the logits stay the same; what is left out is

- the hooks, some thirty Python calls a block;
- the prompt's forward pass for all but one of its copies in a group;
- a copy of the whole cache a token: the cache is allocated ahead, and grows by steps;
- two of three products for queries, keys and values: their weights stand side by side;
- the forward pass of rows that have ended (they are still drawn for, as the random numbers are
  those of the plain sampler).

Other architectures are decoded by the bridge itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

GROW = 64  # tokens by which a cache grows
LEAVE = 0.75  # rows leave when at most this share of those in the cache goes on


def get_decoder(model: nn.Module) -> Any:
    """Return a model made faster for `get_samples`, with its weights as they are now.

    Inside `merged()` that is the policy, inside `reference()` the reference. Outside of both, where
    the adapters are hooks, `model` itself is returned; likewise for other architectures and for
    models with hooks of the reader's own.
    """
    base: Any = model.base
    config = base.original_model.config
    is_plain = config.model_type == "gpt2" and not (
        config.scale_attn_by_inverse_layer_idx or config.reorder_and_upcast_attn
    )
    has_hooks = any(point.fwd_hooks for point in base.hook_dict.values())
    is_bare = is_plain and not has_hooks and model._mode != "hooked"
    return Gpt2Decoder(base) if is_bare else model


@dataclass
class Cache:
    """Keys and values of the tokens so far, for the rows that go on."""

    keys: list[Float[Tensor, "row head capacity d_head"]]  # one a block
    values: list[Float[Tensor, "row head capacity d_head"]]
    rows: Int[Tensor, "row"]  # where in the batch each one belongs
    length: int  # columns in use

    def grow(self) -> None:
        for tensors in (self.keys, self.values):
            tensors[:] = [F.pad(tensor, (0, 0, 0, GROW)) for tensor in tensors]

    def keep(self, rows: Int[Tensor, "kept"]) -> None:
        for tensors in (self.keys, self.values):
            tensors[:] = [tensor[rows] for tensor in tensors]
        self.rows = self.rows[rows]


class Gpt2Decoder:
    """A GPT-2 without hooks, called as `get_samples` calls a bridge."""

    def __init__(self, base: TransformerBridge):
        self.base, self.tokenizer, self.cfg = base, base.tokenizer, base.cfg
        self.blocks = [Gpt2Block(block) for block in base.blocks]

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.base.parameters()

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Int[Tensor, "batch total"],
        past_key_values: Cache | None = None,
        use_cache: bool = True,
        return_type: str = "logits_and_cache",
    ) -> tuple[Float[Tensor, "batch 1 vocab"], Cache]:
        """Return the logits of the last token alone, and the cache.

        A row whose last entry of `attention_mask` is 0 has ended: its logits mean nothing.
        """
        if past_key_values is None:
            return self._read_prompts(input_ids, attention_mask)
        return self._read_token(input_ids, attention_mask, past_key_values)

    def _read_prompts(
        self, input_ids: Int[Tensor, "batch seq"], attention_mask: Int[Tensor, "batch seq"]
    ) -> tuple[Float[Tensor, "batch 1 vocab"], Cache]:
        """Read each distinct prompt once; its copies share the result."""
        seq = input_ids.shape[1]
        both, copies = torch.unique(
            torch.cat([input_ids, attention_mask], dim=1), dim=0, return_inverse=True
        )
        ids, mask = both.split(seq, dim=1)
        causal = torch.ones(seq, seq, dtype=torch.bool, device=ids.device).tril()
        # A pad sees itself: a row of attention that may look nowhere would be nan.
        itself = torch.eye(seq, dtype=torch.bool, device=ids.device)
        visible = causal & mask.bool()[:, None, None, :] | itself  # [row 1 seq seq]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        x = self._embed(ids, positions)
        cache = Cache([], [], torch.arange(len(copies), device=ids.device), seq)
        for block in self.blocks:
            q, k, v = block.project(x)
            x = block.finish(x, F.scaled_dot_product_attention(q, k, v, attn_mask=visible))
            cache.keys.append(F.pad(k[copies], (0, 0, 0, GROW)))
            cache.values.append(F.pad(v[copies], (0, 0, 0, GROW)))
        return self._unembed(x[:, -1:])[copies], cache

    def _read_token(
        self,
        input_ids: Int[Tensor, "batch 1"],
        attention_mask: Int[Tensor, "batch total"],
        cache: Cache,
    ) -> tuple[Float[Tensor, "batch 1 vocab"], Cache]:
        goes_on = attention_mask[cache.rows, -1].nonzero().squeeze(-1)
        if len(goes_on) <= LEAVE * len(cache.rows):
            cache.keep(goes_on)
        if cache.length == cache.keys[0].shape[2]:
            cache.grow()
        position, cache.length = cache.length, cache.length + 1
        here = slice(position, position + 1)
        mask = attention_mask[cache.rows]
        heads = self.cfg.n_heads
        bias = torch.zeros(mask.shape, dtype=cache.keys[0].dtype, device=mask.device)
        bias = bias.masked_fill_(mask == 0, -torch.inf).repeat_interleave(heads, dim=0)
        x = self._embed(input_ids[cache.rows], mask.sum(-1, keepdim=True) - 1)
        for block, keys, values in zip(self.blocks, cache.keys, cache.values, strict=True):
            q, keys[:, :, here], values[:, :, here] = block.project(x)
            # For one query a row, two products of batches beat the fused attention on a CPU.
            q, k, v = (part.flatten(0, 1)[:, : cache.length] for part in (q, keys, values))
            scores = torch.baddbmm(bias[:, None], q, k.mT, alpha=q.shape[-1] ** -0.5)
            attended = scores.softmax(-1) @ v  # [(row head) 1 d_head]
            x = block.finish(x, attended.unflatten(0, (-1, heads)))
        logits = self._unembed(x)
        if len(cache.rows) == len(input_ids):
            return logits, cache
        everyone = logits.new_zeros(len(input_ids), *logits.shape[1:])
        return everyone.index_copy(0, cache.rows, logits), cache

    def _embed(
        self, ids: Int[Tensor, "row seq"], positions: Int[Tensor, "row seq"]
    ) -> Float[Tensor, "row seq d_model"]:
        wte, wpe = (
            part.original_component.weight for part in (self.base.embed, self.base.pos_embed)
        )
        return F.embedding(ids, wte) + F.embedding(positions, wpe)

    def _unembed(self, x: Float[Tensor, "row seq d_model"]) -> Float[Tensor, "row seq vocab"]:
        return self.base.unembed.original_component(self.base.ln_final.original_component(x))


class Gpt2Block:
    """One block, its queries', keys' and values' weights side by side."""

    def __init__(self, block: Any):
        attention = block.attn
        projections = [part.original_component for part in (attention.q, attention.k, attention.v)]
        self.n_heads = attention.config.n_heads
        self.weight = torch.cat([part.weight.data for part in projections])  # [3*d_model d_model]
        self.bias = torch.cat([part.bias.data for part in projections])
        self.ln1, self.ln2 = block.ln1.original_component, block.ln2.original_component
        self.out = attention.o.original_component
        self.mlp_in = getattr(block.mlp, "in").original_component
        self.act = block.mlp.original_component.act
        self.mlp_out = block.mlp.out.original_component

    def project(self, x: Float[Tensor, "row seq d_model"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, each [row head seq d_head]."""
        qkv = F.linear(self.ln1(x), self.weight, self.bias)
        q, k, v = rearrange(
            qkv, "row seq (part head d) -> part row head seq d", part=3, head=self.n_heads
        )
        return q, k, v

    def finish(
        self, x: Float[Tensor, "row seq d_model"], attended: Float[Tensor, "row head seq d_head"]
    ) -> Float[Tensor, "row seq d_model"]:
        """Compute the rest of the block, from what attention read."""
        x = x + self.out(rearrange(attended, "row head seq d -> row seq (head d)"))
        return x + self.mlp_out(self.act(self.mlp_in(self.ln2(x))))
