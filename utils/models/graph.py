"""One more token for every row, as a CUDA graph.

To sample a token from a model of 24 blocks takes some 550 kernels, most of which run for a few
microseconds: starting them one by one takes longer than they do. A graph is a recording of them,
which a single call replays. So every tensor stays where it is: caches with room for the whole
completion, counters, uniform numbers and adapters in buffers that are written before the replay.
Nothing in it may wait for the GPU (`bool(x)`, `x.item()`, `x[mask]`), as a recording can't.

`utils.models.decoding` samples with it. On a CPU the same code runs without a graph.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from utils.models.blocks import Block, NativeModel, Product, join, normalize
from utils.models.fast_path import list_parameters

COLUMNS = 64  # The caches' width is a multiple of it: prompts of another width fit the same graph.
WIDTH = 128  # tokens of the vocabulary that are summed together, when one is drawn

_kept: weakref.WeakKeyDictionary[Any, "Step"] = weakref.WeakKeyDictionary()  # by model, its latest


def get_step(model: Any, native: NativeModel, n_rows: int, n_columns: int) -> "Step":
    """Return the model's kept step, with the weights of this moment, or a new one in its place.

    It takes up the GPU's memory until another takes its place or the model is gone, also where the
    model has moved to a CPU. A bridge alone keeps none: a step holds its bridge, which then would
    never be freed.
    """
    step = _kept.get(model)
    if step is None or not step.fits(native, n_rows, n_columns):
        step = None
        _kept.pop(model, None)  # before there are two
        step = Step(native, n_rows, -(-n_columns // COLUMNS) * COLUMNS)
        if model is not native.base:
            _kept[model] = step
    step.take_weights(native)
    return step


class JoinedProduct:
    """x W + b + x A B, of products that read the same x, with A and B in its dtype."""

    def __init__(self, products: list[Product]):
        product = join(products)
        lora = product.gather_adapters() if product.adapters else ()
        self.weight, self.bias = product.weight, product.bias
        self.lora = [x.detach().to(product.weight.dtype) for x in lora]
        held = (self.weight, self.bias, *self.lora)
        self.tensors = [tensor for tensor in held if tensor is not None]

    def take_weights(self, products: list[Product]) -> None:
        """Write the weights of this moment over those of before."""
        for kept, new in zip(self.tensors, JoinedProduct(products).tensors, strict=True):
            if kept.data_ptr() != new.data_ptr():
                kept.copy_(new)

    def __call__(
        self, x: Float[Tensor, "row d_in"], onto: Float[Tensor, "row d_out"] | None = None
    ) -> Float[Tensor, "row d_out"]:
        """Return the product, added to `onto` where it is given."""
        addend = self.bias if onto is None else onto
        out = x @ self.weight if addend is None else torch.addmm(addend, x, self.weight)
        if onto is not None and self.bias is not None:
            out += self.bias
        if self.lora:
            lora_A_T, lora_B = self.lora
            out.addmm_(F.linear(x, lora_A_T), lora_B)
        return out


def list_products(block: Block) -> list[list[Product]]:
    """Return the products of a block, those that read the same side by side."""
    inner = [block.mlp_in] if block.gate is None else [block.gate, block.mlp_in]
    return [block.qkv, [block.out], inner, [block.mlp_out]]


class Step:
    """What it takes to draw a token for each row and to read it, in buffers.

    `begin` says where the rows stand; then `pick` and `read` in turns, or `read` alone of tokens
    that are written into `tokens`.
    """

    def __init__(self, native: NativeModel, n_rows: int, n_columns: int):
        self.native, self.key = native, get_key(native)
        self.products = [[JoinedProduct(x) for x in list_products(b)] for b in native.blocks]
        weight, first = native.unembedding, native.blocks[0]
        dtype, device = weight.dtype, weight.device
        exact = torch.promote_types(dtype, torch.float32)

        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        cache = (n_rows, first.heads[1], n_columns, first.d_head)
        self.keys = [make(*cache, dtype=dtype) for _ in native.blocks]
        self.values = [make(*cache, dtype=dtype) for _ in native.blocks]
        self.bias = make(n_rows, 1, 1, n_columns, dtype=dtype)  # -inf where there is no token
        self.positions = make(n_rows, dtype=torch.long)  # of the tokens that are read next
        self.column = make(1, dtype=torch.long)  # in which they go
        self.tokens = make(n_rows, dtype=torch.long)
        self.logits = make(n_rows, len(weight), dtype=dtype)
        self.temperature = make(1, dtype=exact)
        self.n_drawn = make(1, dtype=torch.long)
        self.uniforms = make(n_rows, n_columns, dtype=torch.float32)
        self.ids = make(n_rows, n_columns, dtype=torch.long)  # what was drawn
        self.logprobs = make(n_rows, n_columns, dtype=torch.float32)
        functions = [self._pick, self._read]
        if device.type == "cuda":
            with torch.cuda.device(device):
                functions = capture(*functions)
        self.pick, self.read = functions

    def fits(self, native: NativeModel, n_rows: int, n_columns: int) -> bool:
        """Return whether this step does for so many rows and columns, without much waste."""
        rows, _, _, columns = self.bias.shape
        wanted = -(-n_columns // COLUMNS) * COLUMNS
        return rows == n_rows and wanted <= columns <= 2 * wanted and self.key == get_key(native)

    @torch.no_grad()
    def take_weights(self, native: NativeModel) -> None:
        """Write a model's weights of this moment, adapters first of all, into the buffers."""
        for block, joined in zip(native.blocks, self.products, strict=True):
            for product, products in zip(joined, list_products(block), strict=True):
                product.take_weights(products)

    def begin(self, decoder: Any, logits: Float[Tensor, "row vocab"]) -> None:
        """Take over what a decoder's forward pass has made of the prompts, and make it the user.

        Behind the prompts the caches are cleared. What an earlier decoder left there has a weight
        of 0, but if it's nan, so is 0 times it.
        """
        self.user, seq = weakref.ref(decoder), decoder.bias.shape[1]
        for caches, parts in ((self.keys, decoder.keys), (self.values, decoder.values)):
            for cache, part in zip(caches, parts, strict=True):
                cache[:, :, :seq], cache[:, :, seq:] = part, 0.0
        self.bias.fill_(-torch.inf)[:, 0, 0, :seq] = decoder.bias
        self.positions.copy_(decoder.positions + 1)
        self.column.fill_(seq)
        self.logits.copy_(logits)
        self.n_drawn.zero_()

    def _pick(self) -> None:
        """Draw a token for each row, and put it where it's kept and where it's read."""
        uniforms = self.uniforms.index_select(1, self.n_drawn).squeeze(1)
        drawn, logprobs = pick(self.logits / self.temperature, uniforms)
        self.tokens.copy_(drawn)
        self.ids.index_copy_(1, self.n_drawn, drawn[:, None])
        self.logprobs.index_copy_(1, self.n_drawn, logprobs[:, None].to(self.logprobs.dtype))
        self.n_drawn.add_(1)

    def _read(self) -> None:
        """Read `tokens`, and put the logits of the next ones into `logits`."""
        x, rotary = self.native.embed(self.tokens, self.positions)
        if rotary is not None:
            first, second = rotary[1].chunk(2, dim=-1)
            rotary = rotary[0], torch.cat([-first, second], dim=-1)
        self.bias.index_fill_(3, self.column, 0.0)
        for i, block in enumerate(self.native.blocks):
            x = self._run(block, self.products[i], x, rotary, self.keys[i], self.values[i])
        torch.mm(self.native.normalize_last(x), self.native.unembedding.T, out=self.logits)
        self.positions.add_(1)
        self.column.add_(1)

    def _run(
        self,
        block: Block,
        products: list[JoinedProduct],
        x: Float[Tensor, "row d_model"],
        rotary: tuple[Tensor, Tensor] | None,
        keys: Float[Tensor, "row kv_heads column d_head"],
        values: Float[Tensor, "row kv_heads column d_head"],
    ) -> Float[Tensor, "row d_model"]:
        """Compute `project`, attention and `finish` of a block, in fewer and larger kernels."""
        project, out, mlp_in, mlp_out = products
        n_q, n_kv, _ = block.heads
        heads = project(normalize(block.norms[0], x)).unflatten(1, (-1, block.d_head))
        qk, v = heads.split([n_q + n_kv, n_kv], dim=1)
        if block.head_norms[0] is not None:
            parts = zip(block.head_norms, qk.split([n_q, n_kv], dim=1), strict=True)
            qk = torch.cat([normalize(norm, part) for norm, part in parts], dim=1)
        if rotary is not None:
            cos, signed_sin = rotary
            qk = torch.addcmul(qk * cos, qk.roll(block.d_head // 2, -1), signed_sin)
        keys.index_copy_(2, self.column, qk[:, n_q:, None])
        values.index_copy_(2, self.column, v[:, :, None])
        q = qk[:, :n_q].unflatten(1, (n_kv, -1))  # the queries that share keys, as one text
        bias = self.bias.expand(-1, n_kv, q.shape[2], -1)
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
        x = out(attended.flatten(1), onto=x)
        inner = mlp_in(normalize(block.norms[1], x))
        if block.gate is None:
            return mlp_out(block.act(inner), onto=x)
        gate, inner = inner.chunk(2, dim=-1)
        return mlp_out(block.act(gate) * inner, onto=x)


def get_key(native: NativeModel) -> tuple:
    """Return what a recording depends on: the adapters' ranks, and where the weights lie."""
    ranks = {site: layer.lora_A.shape[-1] for site, layer in native.parts.adapters.items()}
    places = [parameter.data_ptr() for parameter in list_parameters(native.base)]
    return ranks, places, native.unembedding.dtype, torch.is_inference_mode_enabled()


def pick(
    logits: Float[Tensor, "row vocab"], uniforms: Float[Tensor, "row"]
) -> tuple[Int[Tensor, "row"], Float[Tensor, "row"]]:
    """Draw a token a row, as `decoding.draw` does, in two levels: first which WIDTH tokens of the
    vocabulary, then which of them. A cumulative sum over all of them takes much longer.

    The second result is its log-probability: nan in a row where a logit is.
    """
    probs = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    missing = -probs.shape[1] % WIDTH
    parts = (F.pad(probs, (0, missing)) if missing else probs).unflatten(1, (-1, WIDTH))
    sums = parts.sum(-1).cumsum(-1)
    total = sums[:, -1:]
    at = lower(uniforms[:, None] * total, total)
    part = torch.searchsorted(sums, at, right=True).clamp_(max=sums.shape[1] - 1)
    before = F.pad(sums, (1, 0)).gather(1, part)
    inner = parts.take_along_dim(part[..., None], 1).squeeze(1).cumsum(-1)
    place = torch.searchsorted(inner, lower(at - before, inner[:, -1:]), right=True)
    drawn = (part * WIDTH + place).clamp_(max=probs.shape[1] - 1)
    return drawn.squeeze(1), probs.gather(1, drawn).log().squeeze(1)


def lower(at: Float[Tensor, "row 1"], total: Float[Tensor, "row 1"]) -> Float[Tensor, "row 1"]:
    """Keep a place below the total: behind it there may be tokens of probability 0."""
    return torch.minimum(at, total.nextafter(torch.zeros_like(total)))


@functools.cache
def get_stream(device: int) -> torch.cuda.Stream:
    """Return the stream on which a GPU records. One will do: cuBLAS keeps memory for each."""
    return torch.cuda.Stream(device)


def capture(*functions: Callable[[], None]) -> list[Callable[[], None]]:
    """Record what each function starts on the GPU, and return what replays it.

    They run twice before, in turns: what they set up the first time can't be recorded. Meanwhile
    other threads, NCCL's for one, may use the GPU.
    """
    side, here = get_stream(torch.cuda.current_device()), torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for function in functions * 2:
            function()
    here.wait_stream(side)
    graphs: list[torch.cuda.CUDAGraph] = []
    for function in functions:
        pool = graphs[0].pool() if graphs else None
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool, side, capture_error_mode="thread_local"):
            function()
    return [graph.replay for graph in graphs]
