"""Sampling without hooks: what chapter 0's sampler draws from a model, with less work per token.

`get_decoder(model).generate(...)` draws from the distribution that `sample_next_token` defines. The
forward pass is made of `utils.models.blocks`, adapters unmerged, with

- a cache that is allocated once, and rows that leave it when they have ended;
- the prompt's forward pass once for all completions of a prompt;
- one uniform number a token, all drawn ahead: what a row draws does not depend on which other rows
  it is computed with, up to rounding, and `multinomial`, which takes longer, is not called.

On a GPU a token is one CUDA graph (`utils.models.graph`), and rows that have ended stay: there a
row costs little, and a launch much. Other architectures, and models with a reader's hooks, decode
by the bridge, with the same draws. `get_decoder` decides; a decoder's `why` gives the reason.
"""

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from utils.models.blocks import NativeModel, multiply
from utils.models.fast_path import agrees
from utils.models.forward import NativeScorer, get_scorer
from utils.models.graph import Step, get_step, lower
from utils.validation import require

LEAVE = 0.9  # rows leave when at most this share of those in the cache goes on
EVERY = 32  # On a GPU, it's checked after so many tokens whether all rows have ended.


@dataclass(frozen=True)
class Draws:
    """Completions, the pad id after the first end; the log-probability of each token at the
    sampling temperature, before top-k and top-p; and the log of the probability that these kept.
    Both are 0 after the eos."""

    completion_ids: Int[Tensor, "batch completion"]
    logprobs: Float[Tensor, "batch completion"]
    log_kept_mass: Float[Tensor, "batch completion"]


def get_decoder(model: Any) -> "Decoder":
    """Return what samples from a model, or a bridge, as it is now.

    Inside `reference()` that is the frozen model, inside `merged()` the merged one. Where a model's
    `merged()` holds another one than its adapters make, samples are drawn inside of it.
    """
    with torch.no_grad():
        scorer = get_scorer(model)
    if not isinstance(scorer, NativeScorer):
        return Decoder(model, why=f"the model's own code runs: {scorer.why}")
    if scorer.native.parts.adapters and hasattr(model, "merged") and not merges(model):
        why = "the model's own code runs: merged() holds another model than its adapters make"
        return Decoder(model, why, is_merged=True)
    if is_on_a_gpu(scorer.native):
        return GraphDecoder(model, scorer.native)
    return NativeDecoder(model, scorer.native)


def is_on_a_gpu(native: NativeModel) -> bool:
    return native.unembedding.is_cuda


def merges(model: Any) -> bool:
    """Return whether a model inside its `merged()` gives the logits that it gives outside."""
    device = next(model.parameters()).device
    ids = torch.arange(8, device=device).view(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]], device=device)

    @torch.no_grad()
    def run(is_merged: bool, _: Any) -> dict[str, Tensor]:
        with model.merged() if is_merged else contextlib.nullcontext():
            return {"logits": model(ids, attention_mask=mask)[mask.bool()]}

    merged, own = (functools.partial(run, is_merged) for is_merged in (True, False))
    return agrees(model, (), "sampling with merged weights", merged, own)


def get_end_ids(model: Any) -> list[int]:
    """Return the tokens that end a completion: the tokenizer's eos first, then the other ends that
    the generation config names, as the end of a turn of Gemma and Phi."""
    base = getattr(model, "base", model)
    config = getattr(getattr(base, "original_model", None), "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    named = named if isinstance(named, list) else [named]
    ends = dict.fromkeys([model.tokenizer.eos_token_id, *named])
    known = [end for end in ends if end is not None]
    require(known, "the tokenizer should have an eos token, but has none")
    return known


def get_pad_and_ends(model: Any, device: torch.device) -> tuple[int, Int[Tensor, "end"]]:
    """Return the token that pads, an end where the tokenizer has none, and those that end."""
    ends, pad = get_end_ids(model), model.tokenizer.pad_token_id
    return ends[0] if pad is None else pad, torch.tensor(ends, device=device)


def draw(
    logits: Float[Tensor, "row vocab"],
    uniforms: Float[Tensor, "row"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> tuple[Int[Tensor, "row"], Float[Tensor, "row"], Float[Tensor, "row"]]:
    """Draw a token a row, where the cumulative sum of the probabilities passes the uniform number.

    The second result is its log-probability before top-k and top-p; at temperature 0, where the
    likeliest token is taken, that at temperature 1. The third is the log of the probability that
    top-k and top-p kept.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature > 0:
        logits = (logits - logits.amax(-1, keepdim=True)).div_(temperature)
    all_probs = logits.softmax(-1)
    log_kept_mass = all_probs.new_zeros(len(all_probs))
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        probs = all_probs if top_k is None else keep_top_k(all_probs, top_k)
        probs = probs if top_p in (None, 1) else keep_top_p(probs, top_p)
        sums = probs.cumsum(-1)
        total = sums[:, -1:]
        if probs is not all_probs:
            log_kept_mass = total.squeeze(-1).log()
        require(total.isfinite().all(), "logits should be numbers, but some are nan or inf")
        at = lower(uniforms[:, None] * total, total)
        tokens = torch.searchsorted(sums, at, right=True).squeeze(-1)
    return tokens, all_probs.gather(-1, tokens[:, None]).squeeze(-1).log(), log_kept_mass


def keep_top_k(probs: Float[Tensor, "row vocab"], k: int) -> Float[Tensor, "row vocab"]:
    kept = probs.topk(min(k, probs.shape[-1]))
    return torch.zeros_like(probs).scatter_(-1, kept.indices, kept.values)


def keep_top_p(probs: Float[Tensor, "row vocab"], p: float) -> Float[Tensor, "row vocab"]:
    """Keep the fewest likeliest whose share of the sum reaches p."""
    kept = probs.sort(descending=True)
    likelier = kept.values.cumsum(-1) - kept.values
    is_beyond = likelier >= p * probs.sum(-1, keepdim=True)
    values = kept.values.masked_fill(is_beyond, 0.0)
    return torch.zeros_like(probs).scatter_(-1, kept.indices, values)


class Decoder:
    """Samples token after token from a model that is called with a cache."""

    def __init__(self, model: Any, why: str = "asked for", is_merged: bool = False):
        self.model, self.why, self.is_merged = model, why, is_merged

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Int[Tensor, "batch seq"],
        prompt_mask: Int[Tensor, "batch seq"],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Draws:
        """Sample a completion for each left-padded prompt, until all have ended.

        Raises ValueError for settings that chapter 0's sampler refuses, and for logits of nan.
        """
        require(max_new_tokens >= 1, f"max_new_tokens should be at least 1: {max_new_tokens}")
        require(temperature >= 0, f"temperature should not be negative: {temperature}")
        require(top_k is None or top_k >= 1, f"top_k should be 1 or more: {top_k}")
        require(top_p is None or 0 < top_p <= 1, f"top_p should be above 0 and at most 1: {top_p}")
        shape, device = (len(prompt_ids), max_new_tokens), prompt_ids.device
        uniforms = torch.rand(shape, generator=generator, device=device)
        settings = (temperature, top_k, top_p)
        with self.model.merged() if self.is_merged else contextlib.nullcontext():
            return self._generate(prompt_ids, prompt_mask, uniforms, settings)

    def _generate(
        self,
        prompt_ids: Int[Tensor, "batch seq"],
        prompt_mask: Int[Tensor, "batch seq"],
        uniforms: Float[Tensor, "batch completion"],
        settings: tuple[float, int | None, float | None],
    ) -> Draws:
        """Sample with these uniform numbers: temperature, top-k and top-p are the settings."""
        (batch, max_new_tokens), device = uniforms.shape, uniforms.device
        pad, ends = get_pad_and_ends(self.model, device)
        ids = torch.full(uniforms.shape, pad, device=device)
        logprobs = torch.zeros(uniforms.shape, device=device)
        log_kept_mass = torch.zeros(uniforms.shape, device=device)
        rows = torch.arange(batch, device=device)  # those that go on
        logits = self.start(prompt_ids, prompt_mask, max_new_tokens)
        for step in range(max_new_tokens):
            tokens, found, kept = draw(logits, uniforms[rows, step], *settings)
            ids[rows, step], logprobs[rows, step] = tokens, found.to(logprobs.dtype)
            log_kept_mass[rows, step] = kept.to(logprobs.dtype)
            goes_on = ~torch.isin(tokens, ends)
            rows = rows[goes_on]
            if len(rows) == 0 or step + 1 == max_new_tokens:
                break
            logits = self.advance(tokens, goes_on)
        drawn = slice(step + 1)
        return Draws(ids[:, drawn], logprobs[:, drawn], log_kept_mass[:, drawn])

    def start(
        self,
        prompt_ids: Int[Tensor, "batch seq"],
        prompt_mask: Int[Tensor, "batch seq"],
        max_new_tokens: int,
    ) -> Float[Tensor, "batch vocab"]:
        """Read the prompts, and return the logits of the first tokens."""
        self.mask, self.cache = prompt_mask, None
        self.rows = torch.arange(len(prompt_ids), device=prompt_ids.device)
        return self._call(prompt_ids)

    def advance(
        self, tokens: Int[Tensor, "row"], goes_on: Bool[Tensor, "row"]
    ) -> Float[Tensor, "kept vocab"]:
        """Read a token for each row, and return the next logits of those that go on."""
        ids = self.mask.new_full((len(self.mask), 1), int(tokens[0]))
        ids[self.rows, 0] = tokens
        self.rows = self.rows[goes_on]
        newest = self.mask.new_zeros(len(self.mask), 1)
        newest[self.rows] = 1
        self.mask = torch.cat([self.mask, newest], dim=1)
        return self._call(ids)[self.rows]

    def _call(self, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch vocab"]:
        logits, self.cache = self.model(
            ids,
            attention_mask=self.mask,
            past_key_values=self.cache,
            use_cache=True,
            return_type="logits_and_cache",
        )
        return logits[:, -1]


class NativeDecoder(Decoder):
    """Samples from GPT-2 and Llama-type models without hooks."""

    def __init__(self, model: Any, native: NativeModel):
        device = native.unembedding.device.type
        why = f"without hooks; on {device}, rows leave when they have ended"
        super().__init__(model, why)
        self.native = native
        self.keys: list[Tensor] = []  # of each block, [row kv_heads capacity d_head]
        self.values: list[Tensor] = []
        native.freeze()

    def start(
        self,
        prompt_ids: Int[Tensor, "batch seq"],
        prompt_mask: Int[Tensor, "batch seq"],
        max_new_tokens: int,
    ) -> Float[Tensor, "batch vocab"]:
        """Read each distinct prompt once, and fill the caches of its copies with the result."""
        native, seq = self.native, prompt_ids.shape[1]
        both = torch.cat([prompt_ids, prompt_mask], dim=1)
        both, copies = both.unique(dim=0, return_inverse=True)
        ids, mask = both.split(seq, dim=1)
        # A pad sees itself: a row of attention that may look nowhere would be nan.
        causal = torch.ones(seq, seq, dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(seq, dtype=torch.bool, device=ids.device)
        visible = causal & mask.bool()[:, None, None, :] | itself  # [prompt 1 seq seq]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        self.positions = positions[copies, -1]
        x, rotary = native.embed(ids.flatten(), positions.flatten())
        self.length, self.keys, self.values = seq, [], []
        for block in native.blocks:
            qkv = block.project(x, rotary).unflatten(0, ids.shape)
            q, k, v = qkv.transpose(1, 2).split(block.heads, dim=1)
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible, enable_gqa=q.shape[1] != k.shape[1]
            )
            x = block.finish(x, attended.transpose(1, 2).flatten(2).flatten(0, 1))
            for cache, part in ((self.keys, k), (self.values, v)):
                filled = part.new_empty(
                    len(copies), part.shape[1], seq + max_new_tokens, part.shape[3]
                )
                filled[:, :, :seq] = part[copies]
                cache.append(filled)
        self.bias = x.new_zeros(len(copies), filled.shape[2])
        self.bias[:, :seq].masked_fill_(prompt_mask == 0, -torch.inf)
        self.active = torch.arange(len(copies), device=ids.device)  # rows of the cache that go on
        return self._unembed(x.unflatten(0, ids.shape)[:, -1])[copies]

    def advance(
        self, tokens: Int[Tensor, "row"], goes_on: Bool[Tensor, "row"]
    ) -> Float[Tensor, "kept vocab"]:
        """Read the tokens of the rows that go on, and return their next logits."""
        self.active, tokens = self.active[goes_on], tokens[goes_on]
        if len(self.active) <= LEAVE * len(self.positions):
            self._keep(self.active)
        everyone = tokens.new_zeros(len(self.positions)).index_copy(0, self.active, tokens)
        self.positions += 1
        x, rotary = self.native.embed(everyone, self.positions)
        here, self.length = self.length, self.length + 1
        for block, keys, values in zip(self.native.blocks, self.keys, self.values, strict=True):
            qkv = block.project(x, rotary)
            q, keys[:, :, here], values[:, :, here] = qkv.split(block.heads, dim=1)
            x = block.finish(x, self._attend(q, keys, values))
        return self._unembed(x[self.active])

    def _keep(self, rows: Int[Tensor, "kept"]) -> None:
        for cache in (self.keys, self.values):
            for i, whole in enumerate(cache):
                cache[i] = whole.new_empty(len(rows), *whole.shape[1:])
                cache[i][:, :, : self.length] = whole[rows, :, : self.length]
        self.positions, self.bias = self.positions[rows], self.bias[rows]
        self.active = torch.arange(len(rows), device=rows.device)

    def _attend(
        self,
        q: Float[Tensor, "row heads d_head"],
        keys: Float[Tensor, "row kv_heads capacity d_head"],
        values: Float[Tensor, "row kv_heads capacity d_head"],
    ) -> Float[Tensor, "row d_heads"]:
        """Attend from one query a head: two products of batches beat fused attention on a CPU."""
        rows, kv_heads, _, d_head = keys.shape
        bias = self.bias[:, None, None, : self.length]
        if q.dtype != torch.float32 or q.device.type != "cpu":  # bfloat16 would round the scores
            k, v = keys[:, :, : self.length], values[:, :, : self.length]
            is_grouped = q.shape[1] != kv_heads
            out = F.scaled_dot_product_attention(
                q[:, :, None], k, v, attn_mask=bias, enable_gqa=is_grouped
            )
            return out.flatten(1)
        q = q.reshape(rows * kv_heads, -1, d_head)  # the queries that share keys, together
        k, v = (x.flatten(0, 1)[:, : self.length] for x in (keys, values))
        bias = bias.expand(-1, kv_heads, q.shape[1], -1).flatten(0, 1)
        scores = torch.baddbmm(bias, q, k.mT, alpha=d_head**-0.5)
        return (scores.softmax(-1) @ v).reshape(rows, -1)

    def _unembed(self, x: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocab"]:
        return multiply(self.native.normalize_last(x), self.native.unembedding.T, None).contiguous()


class GraphDecoder(NativeDecoder):
    """Samples without hooks, in buffers that a CUDA graph can replay; a row that has ended stays
    until the last one ends.

    The buffers are kept for the model, so only one of its decoders can sample at a time.
    """

    def __init__(self, model: Any, native: NativeModel):
        Decoder.__init__(self, model, "without hooks; on a GPU, each token is one CUDA graph")
        self.native = native

    @torch.no_grad()
    def start(
        self,
        prompt_ids: Int[Tensor, "batch seq"],
        prompt_mask: Int[Tensor, "batch seq"],
        max_new_tokens: int,
    ) -> Float[Tensor, "batch vocab"]:
        """Read each distinct prompt once, and copy the result into the kept buffers."""
        logits = super().start(prompt_ids, prompt_mask, 0)
        columns = prompt_ids.shape[1] + max_new_tokens
        self.step = get_step(self.model, self.native, len(prompt_ids), columns)
        self.step.begin(self, logits)
        self.keys, self.values = [], []
        return logits

    @torch.no_grad()
    def advance(
        self, tokens: Int[Tensor, "row"], goes_on: Bool[Tensor, "row"]
    ) -> Float[Tensor, "kept vocab"]:
        """Read the tokens of the rows that go on, and return their next logits."""
        step = self._get_step()
        self.active, tokens = self.active[goes_on], tokens[goes_on]
        step.tokens.index_copy_(0, self.active, tokens)
        step.read()
        return step.logits[self.active]

    def _get_step(self) -> Step:
        require(self.step.user() is self, "another decoder of this model has begun since")
        return self.step

    def _generate(self, prompt_ids, prompt_mask, uniforms, settings) -> Draws:
        """Sample with these uniform numbers; top-k, top-p and temperature 0 draw outside the graph.

        The GPU is awaited only every EVERY tokens, so that the graphs follow one another closely.
        """
        temperature, top_k, top_p = settings
        if temperature == 0 or top_k is not None or top_p not in (None, 1):
            return super()._generate(prompt_ids, prompt_mask, uniforms, settings)
        max_new_tokens = uniforms.shape[1]
        pad, ends = get_pad_and_ends(self.model, uniforms.device)
        self.start(prompt_ids, prompt_mask, max_new_tokens)
        step = self._get_step()
        step.temperature.fill_(temperature)
        step.uniforms[:, :max_new_tokens] = uniforms
        for n_drawn in range(1, max_new_tokens + 1):
            step.pick()
            ids = step.ids[:, :n_drawn]
            if n_drawn == max_new_tokens:
                break
            if n_drawn % EVERY == 0 and bool(torch.isin(ids, ends).any(1).all()):
                break
            step.read()
        logprobs = step.logprobs[:, :n_drawn]
        require(not logprobs.isnan().any(), "logits should be numbers, but some are nan or inf")
        is_end = torch.isin(ids, ends)
        has_ended = is_end.cumsum(1) > is_end.long()  # before this token
        longest = int((~has_ended).sum(1).max())
        ids, logprobs = ids.masked_fill(has_ended, pad), logprobs.masked_fill(has_ended, 0.0)
        log_kept_mass = torch.zeros_like(logprobs[:, :longest])
        return Draws(ids[:, :longest], logprobs[:, :longest], log_kept_mass)
