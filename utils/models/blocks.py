"""The parts of GPT-2 and of Llama-type models over a bridge's own weights, without its hooks.

Adapters are added inside the products, and are never merged. `utils.models.forward` scores with
these parts, `utils.models.decoding` samples with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

GATED = ("llama", "mistral", "qwen2", "qwen3")  # with rotary positions and a gated MLP
SMALL = 2**17  # weights up to this size are merged while one samples: 0.5 MB
FEW_ROWS = 128  # up to which W x^T is faster than x W^T where W is kept [d_out d_in]


@dataclass(frozen=True)
class Parts:
    """What a model is made of at this moment: a model's `get_parts()` says it.

    It is all that the fast path knows of the model. Whether the model computes what these parts
    make up is tried (`utils.models.fast_path`).
    """

    base: Any  # a TransformerBridge
    adapters: Mapping[str, Any] = field(default_factory=dict)  # that are on, by site
    value_head: nn.Linear | None = None  # It reads what the unembedding reads.


# --- Products and blocks --------------------------------------------------------------------------


class LoraProduct(torch.autograd.Function):
    """x W + b + x A B, in the dtype of x. It keeps x and the thin x A for the backward pass.

    The gradients of A and B are summed over tokens in float32 at least. A is passed transposed, and
    the thin products are ordered the way MKL runs fastest.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, lora_A_T, lora_B):
        lora_A_T, lora_B = lora_A_T.to(x.dtype), lora_B.to(x.dtype)
        low = F.linear(x, lora_A_T)
        ctx.save_for_backward(x, low, weight, lora_A_T, lora_B)
        return multiply(x, weight, bias).addmm_(low, lora_B)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, low, weight, lora_A_T, lora_B = ctx.saved_tensors
        grad_low = F.linear(grad, lora_B)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight.T).addmm_(grad_low, lora_A_T)
        return grad_x, None, None, sum_exactly(grad_low.T, x), sum_exactly(low.T, grad)


def sum_exactly(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """Return a b, in float32 at least."""
    exact = torch.promote_types(a.dtype, torch.float32)
    if a.dtype != exact and a.is_cuda:
        return torch.mm(a, b, out_dtype=exact)
    return a.to(exact) @ b.to(exact)


def multiply(x, weight, bias, lora_A_T=None, lora_B=None):
    if len(x) <= FEW_ROWS and weight.stride(0) == 1:
        out = (weight.T @ x.T).T
        out = out if bias is None else out.add_(bias)
    else:
        out = x @ weight if bias is None else torch.addmm(bias, x, weight)
    if lora_A_T is None:
        return out
    return out.addmm_(F.linear(x, lora_A_T), lora_B)


class Product:
    """x W + b, and what the adapters of the sites that it computes add to their columns of it."""

    def __init__(
        self,
        weight: Float[Tensor, "d_in d_out"],
        bias: Float[Tensor, "d_out"] | None,
        adapters: list[tuple[Any, slice]],
    ):
        self.weight, self.bias, self.adapters = weight, bias, adapters
        self.frozen: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Float[Tensor, "token d_in"]) -> Float[Tensor, "token d_out"]:
        if not self.adapters:
            return multiply(x, self.weight, self.bias)
        if self.frozen is not None:
            return multiply(x, self.weight, self.bias, *self.frozen)
        return LoraProduct.apply(x, self.weight, self.bias, *self.gather_adapters())

    def freeze(self) -> None:
        """Keep the adapters as they are now, or merge them into a copy of a small weight."""
        lora_A_T, lora_B = self.gather_adapters()
        if self.weight.numel() <= SMALL and self.weight.dtype == lora_B.dtype:
            self.weight, self.adapters = torch.addmm(self.weight, lora_A_T.T, lora_B), []
        else:
            self.frozen = (lora_A_T.to(self.weight.dtype), lora_B.to(self.weight.dtype))

    def gather_adapters(self) -> tuple[Float[Tensor, "R d_in"], Float[Tensor, "R d_out"]]:
        """Return A transposed and B, scaled, of all adapters: B of several is block diagonal."""
        lora_A_T = [layer.lora_A.T for layer, _ in self.adapters]
        lora_B = [layer.lora_B * layer.scaling for layer, _ in self.adapters]
        d_out = self.weight.shape[1]
        padded = [
            F.pad(b, (columns.start, d_out - columns.stop))
            for b, (_, columns) in zip(lora_B, self.adapters, strict=True)
        ]
        return torch.cat(lora_A_T).contiguous(), torch.cat(padded)


class Block:
    """One block of either family, over the bridge's own weights."""

    def __init__(self, base: Any, site: str, adapters: Mapping[str, Any]):
        def get(name: str) -> Product:
            linear = base.get_submodule(f"{site}.{name}").original_component
            weight = linear.weight.data
            weight = weight.T if isinstance(linear, nn.Linear) else weight  # Conv1D: [d_in d_out]
            bias = None if linear.bias is None else linear.bias.data
            layer = adapters.get(f"{site}.{name}")
            return Product(weight, bias, [(layer, slice(0, weight.shape[1]))] if layer else [])

        block, config = base.get_submodule(site), base.original_model.config
        mlp, attention = block.mlp.original_component, block.attn.original_component
        self.qkv = [get(f"attn.{name}") for name in "qkv"]
        own_width = getattr(config, "head_dim", None)
        self.d_head = own_width or config.hidden_size // config.num_attention_heads
        self.heads = [product.weight.shape[1] // self.d_head for product in self.qkv]
        fused = block.attn.qkv.original_component if hasattr(block.attn, "qkv") else None
        if fused is not None and _are_views(self.qkv, fused):
            self.qkv = [join(self.qkv, fused)]
        self.out, self.mlp_in, self.mlp_out = get("attn.o"), get("mlp.in"), get("mlp.out")
        self.gate = get("mlp.gate") if config.model_type in GATED else None
        self.act = mlp.act if self.gate is None else mlp.act_fn
        self.norms = [norm.original_component for norm in (block.ln1, block.ln2)]
        self.head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]

    def project(
        self, x: Float[Tensor, "token d_model"], rotary: tuple[Tensor, Tensor] | None
    ) -> Float[Tensor, "token all_heads d_head"]:
        """Return queries, keys and values side by side; `self.heads` says how many of each."""
        h = normalize(self.norms[0], x)
        parts = [product(h).unflatten(1, (-1, self.d_head)) for product in self.qkv]
        if len(parts) == 1:
            return parts[0]
        for i, norm in enumerate(self.head_norms):
            parts[i] = parts[i] if norm is None else normalize(norm, parts[i])
            parts[i] = parts[i] if rotary is None else rotate(parts[i], *rotary)
        return torch.cat(parts, dim=1)

    def finish(
        self, x: Float[Tensor, "token d_model"], attended: Float[Tensor, "token d_heads"]
    ) -> Float[Tensor, "token d_model"]:
        """Compute the rest of the block, from what attention read."""
        x = x + self.out(attended)
        h = normalize(self.norms[1], x)
        if self.gate is None:
            h = self.act(self.mlp_in(h))
        else:
            h = self.act(self.gate(h)) * self.mlp_in(h)
        return x + self.mlp_out(h)


def _are_views(products: list[Product], linear: Any) -> bool:
    """Return whether products are views of a layer's weight, as GPT-2's queries, keys and values.

    They no longer are where a bridge was moved or copied after it was booted.
    """
    weights = [linear.weight, *(product.weight for product in products)]
    biases = [linear.bias, *(product.bias for product in products)]
    places = ({x.untyped_storage().data_ptr() for x in tensors} for tensors in (weights, biases))
    return all(len(distinct) == 1 for distinct in places)


def join(products: list[Product], whole: Any = None) -> Product:
    """Return one product for those that read the same: of the layer `whole`, of which they are
    views, or else of a copy of their weights."""
    if len(products) == 1:
        return products[0]
    adapters, start = [], 0  # with their columns where the products lie side by side
    for product in products:
        for layer, columns in product.adapters:
            adapters.append((layer, slice(start + columns.start, start + columns.stop)))
        start += product.weight.shape[1]
    if whole is not None:
        return Product(whole.weight.data, whole.bias.data, adapters)
    biases = [product.bias for product in products if product.bias is not None]
    weight = torch.cat([product.weight.T for product in products]).T
    return Product(weight, torch.cat(biases) if biases else None, adapters)


def normalize(norm: Any, x: Float[Tensor, "*rest d"]) -> Float[Tensor, "*rest d"]:
    """Normalise by a layer norm or an RMS norm, which computes in float32."""
    if isinstance(norm, nn.LayerNorm):
        return norm(x)
    if x.is_cuda:  # one kernel in place of seven
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (exact * scale).to(x.dtype)


def rotate(
    x: Float[Tensor, "token heads d_head"],
    cos: Float[Tensor, "token 1 d_head"],
    sin: Float[Tensor, "token 1 d_head"],
) -> Float[Tensor, "token heads d_head"]:
    """Rotate pairs (i, i + d_head / 2) by the angle of the token's position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class NativeModel:
    """A GPT-2 or a Llama-type model over a bridge's weights, with the adapters that are on."""

    def __init__(self, parts: Parts):
        self.parts, base = parts, parts.base
        self.base, self.config = base, base.original_model.config
        self.blocks = [Block(base, f"blocks.{i}", parts.adapters) for i in range(len(base.blocks))]
        unembed = base.unembed.original_component
        self.unembedding = unembed.weight.data  # [vocab d_model]

    @torch.no_grad()
    def freeze(self) -> None:
        """Gather the adapters once, where they do not change and no gradient is asked for.

        Into small weights they are merged, in a copy: there the thin products take longer.
        """
        for block in self.blocks:
            products = [*block.qkv, block.out, block.mlp_in, block.mlp_out, block.gate]
            for product in products:
                if product is not None and product.adapters:
                    product.freeze()

    def embed(
        self, ids: Int[Tensor, "token"], positions: Int[Tensor, "token"]
    ) -> tuple[Float[Tensor, "token d_model"], tuple[Tensor, Tensor] | None]:
        """Return embeddings, and cosines and sines of the positions where these rotate."""
        x = F.embedding(ids, self.base.embed.original_component.weight)
        if self.config.model_type not in GATED:
            return x + F.embedding(positions, self.base.pos_embed.original_component.weight), None
        cos, sin = self.base.rotary_emb.original_component(x, positions[None])
        return x, (cos[0, :, None], sin[0, :, None])

    def normalize_last(self, x: Float[Tensor, "token d_model"]) -> Float[Tensor, "token d_model"]:
        return normalize(self.base.ln_final.original_component, x)


# --- Which models these parts make up -------------------------------------------------------------


def is_covered(config: Any) -> bool:
    """Return whether this module computes a model of this configuration."""
    if config.model_type == "gpt2":
        differs = config.scale_attn_by_inverse_layer_idx or config.reorder_and_upcast_attn
        return config.scale_attn_weights and not differs
    if config.model_type not in GATED:
        return False
    window = getattr(config, "sliding_window", None)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return window is None and rope in ("default", "linear", "llama3")
