"""The forward pass of GPT-2 and of Llama-type models without hooks: for scoring and for learning.

What chapter 0's `get_logprobs` and `calc_entropy` make of a `TransformerBridge`'s logits,
`get_scorer(model)` computes from the same weights with less work:

- the tokens of all rows lie one after another, without padding, each distinct prompt once;
- adapters are added inside the products, not by hooks (`utils.models.blocks`);
- no logits are kept: the head goes through them in chunks, and makes its gradients as it goes.

When hooks are attached, for other architectures, and where a reader's code computes something else
(`utils.models.fast_path` tries it), the bridge does the computing.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from utils.models.blocks import Block, NativeModel
from utils.models.fast_path import agrees, find_native, get_parts
from utils.validation import require

CHUNK = 2**19  # logits that exist at a time on a CPU, if that is MIN_ROWS or more
GPU_SHARE = 1 / 512  # of a GPU's memory, which one float32 copy of a chunk's logits may take
MIN_ROWS = 64  # of a chunk: fewer make poor use of the unembedding that is read for them
WIDTH = 32  # tokens of a row on which a scorer is tried

_recomputes: ContextVar[bool] = ContextVar("recomputes", default=False)


# --- Rows without padding -------------------------------------------------------------------------


@dataclass
class FlatRows:
    """The tokens of some rows one after another: those of the distinct prompts, then those of the
    completions, without the last one of each, which predicts nothing."""

    ids: Int[Tensor, "token"]
    positions: Int[Tensor, "token"]
    grid: Int[Tensor, "row column"]  # the token at each place, rows beginning at column 0
    cells: Int[Tensor, "token"]  # where in the grid each token stands first
    predictors: Int[Tensor, "scored"]  # the token before each that is scored
    targets: Int[Tensor, "scored"]  # ids of those
    mask: Bool[Tensor, "row completion"]  # where they stand

    def fill(self, scored: Float[Tensor, "scored"]) -> Float[Tensor, "row completion"]:
        """Put what belongs to the scored tokens in their places; 0 elsewhere."""
        return scored.new_zeros(self.mask.shape).masked_scatter(self.mask, scored)


def flatten(
    input_ids: Int[Tensor, "row seq"], attention_mask: Int[Tensor, "row seq"], prompt_len: int
) -> FlatRows | None:
    """Lay out rows; None unless each has padding on its outside alone, a prompt, and a column for
    a completion."""
    real = attention_mask.bool()
    if prompt_len == real.shape[1]:
        return None
    starts = (real[:, 1:] & ~real[:, :-1]).sum(-1) + real[:, 0]
    if not bool((real[:, prompt_len - 1] & (starts == 1)).all()):
        return None
    prompt_ids = input_ids[:, :prompt_len].masked_fill(~real[:, :prompt_len], 0)
    both = torch.cat([prompt_ids, real[:, :prompt_len].long()], dim=1)
    both, prompt_of_row = both.unique(dim=0, return_inverse=True)
    prompt_real, scored = both[:, prompt_len:].bool(), real[:, prompt_len:]
    fed = scored[:, :-1] & scored[:, 1:]
    ids = torch.cat([both[:, :prompt_len][prompt_real], input_ids[:, prompt_len:-1][fed]])
    # The number of each token, at its place in its row; 0 elsewhere.
    in_prompts = number(prompt_real, 0)[prompt_of_row]
    in_completions = number(fed, int(prompt_real.sum()))
    places = torch.cat([in_prompts, in_completions], dim=1)
    is_token = torch.cat([prompt_real[prompt_of_row], fed], dim=1)
    width = int(is_token.sum(-1).max())
    columns = is_token.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    grid, is_token = places.gather(1, columns), is_token.gather(1, columns)
    cells = torch.arange(grid.numel(), device=grid.device).view_as(grid)[is_token]
    first = cells.new_empty(len(ids)).scatter_reduce_(
        0, grid[is_token], cells, "amin", include_self=False
    )
    before = torch.cat([in_prompts[:, -1:], in_completions], dim=1)
    return FlatRows(
        ids=ids,
        positions=first % width,
        grid=grid,
        cells=first,
        predictors=before[scored],
        targets=input_ids[:, prompt_len:][scored],
        mask=scored,
    )


def number(chosen: Bool[Tensor, "row column"], start: int) -> Int[Tensor, "row column"]:
    """Return the numbers of what is chosen, row after row, from `start`; 0 elsewhere."""
    numbers = chosen.flatten().cumsum(0).view(chosen.shape) - 1 + start
    return numbers.masked_fill(~chosen, 0)


# --- The head -------------------------------------------------------------------------------------


class ScoreHead(torch.autograd.Function):
    """log p(target) and the entropy of softmax(h W / temperature), chunk by chunk.

    The gradient for a row of h depends on that row's incoming gradient by a factor alone, so it is
    made in the forward pass, where the logits are.
    """

    @staticmethod
    def forward(ctx, h, unembedding, targets, temperature, has_entropy_grad):
        exact = torch.promote_types(h.dtype, torch.float32)
        logprobs, entropies = (h.new_empty(len(h), dtype=exact) for _ in range(2))
        has_grad = ctx.needs_input_grad[0]
        grad = torch.empty_like(h) if has_grad else None
        entropy_grad = torch.empty_like(h) if has_grad and has_entropy_grad else None
        for rows in split_rows(h, len(unembedding)):
            logp = calc_chunk_logprobs(h[rows], unembedding, temperature)
            target = targets[rows, None]
            logprobs[rows] = logp.gather(-1, target).squeeze(-1)
            p = logp.exp()
            entropies[rows] = -torch.linalg.vecdot(p, logp)
            if entropy_grad is not None:
                d_logits = p * (logp + entropies[rows, None])
                entropy_grad[rows] = d_logits.to(h.dtype) @ unembedding
            if grad is not None:
                p.scatter_add_(-1, target, -torch.ones_like(p[:, :1]))
                grad[rows] = p.to(h.dtype) @ unembedding
        ctx.save_for_backward(grad, entropy_grad)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, of_logprobs, of_entropies):
        grad, entropy_grad = ctx.saved_tensors
        total = grad * of_logprobs[:, None].to(grad.dtype)
        if entropy_grad is not None:
            total.addcmul_(entropy_grad, of_entropies[:, None].to(grad.dtype))
        return total.div_(-ctx.temperature), None, None, None, None


class KlHead(torch.autograd.Function):
    """The exact KL from softmax(ref_h W / temperature) to softmax(h W / temperature), in chunks."""

    @staticmethod
    def forward(ctx, h, ref_h, unembedding, temperature):
        kls = h.new_empty(len(h), dtype=torch.promote_types(h.dtype, torch.float32))
        grad = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        for rows in split_rows(h, len(unembedding)):
            logp = calc_chunk_logprobs(h[rows], unembedding, temperature)
            logratio = logp - calc_chunk_logprobs(ref_h[rows], unembedding, temperature)
            p = logp.exp_()
            kls[rows] = torch.linalg.vecdot(p, logratio)
            if grad is not None:
                d_logits = p * (logratio - kls[rows, None])
                grad[rows] = d_logits.to(h.dtype) @ unembedding
        ctx.save_for_backward(grad)
        ctx.temperature = temperature
        return kls

    @staticmethod
    @once_differentiable
    def backward(ctx, of_kls):
        (grad,) = ctx.saved_tensors
        return grad * of_kls[:, None].to(grad.dtype) / ctx.temperature, None, None, None


def split_rows(h: Float[Tensor, "row d_model"], vocab: int) -> list[slice]:
    """Return the rows of each chunk: on a GPU larger ones, by its memory."""
    chunk = CHUNK
    if h.is_cuda:
        chunk = int(torch.cuda.get_device_properties(h.device).total_memory * GPU_SHARE / 4)
    size = max(MIN_ROWS, chunk // vocab)
    return [slice(start, start + size) for start in range(0, len(h), size)]


def calc_chunk_logprobs(
    h: Float[Tensor, "row d_model"], unembedding: Float[Tensor, "vocab d_model"], temperature: float
) -> Float[Tensor, "row vocab"]:
    """Return the log-softmax of h W / temperature, at least in float32."""
    logits = h @ unembedding.T
    logits = logits.to(torch.promote_types(h.dtype, torch.float32))
    return (logits if temperature == 1 else logits.div_(temperature)).log_softmax(-1)


# --- Scorers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formulas:
    """The functions that turn logits into parts of an objective, as you wrote them."""

    get_logprobs: Callable[..., Float[Tensor, "row completion"]]
    calc_entropy_bonus: Callable[..., Float[Tensor, ""]]
    calc_kl_penalty: Callable[..., Float[Tensor, ""]]


@dataclass
class Scores:
    """What a model says of the completions of some rows. Where there is no token it means nothing.

    `measure_kl()` computes the exact KL from the reference at each token, [row completion];
    `calc_mean_entropy(mask)` and `calc_mean_kl(mask)` are the means over the tokens in a mask, by a
    reader's formulas if there are any.
    """

    logprobs: Float[Tensor, "row completion"]  # in nats, as `entropies`
    entropies: Float[Tensor, "row completion"]
    measure_kl: Callable[[], Float[Tensor, "row completion"]]
    calc_mean_entropy: Callable[[Bool[Tensor, "row completion"]], Float[Tensor, ""]]
    calc_mean_kl: Callable[[Bool[Tensor, "row completion"]], Float[Tensor, ""]]
    values: Any = None  # likewise, of a model with a value head


def calc_mean(
    values: Float[Tensor, "row completion"], mask: Bool[Tensor, "row completion"]
) -> Float[Tensor, ""]:
    """Return the mean of the values of the tokens in a mask; 0 without any."""
    return values.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def get_scorer(model: Any, formulas: Formulas | None = None) -> "BridgeScorer":
    """Return what scores completions under a model, or a bridge, as it is now.

    Inside `reference()` that is the frozen model, inside `merged()` the merged one. What `formulas`
    make of logits is what the scores hold; for a formula that is not written yet, the course's own
    stands in.
    """
    native = find_native(model)
    if isinstance(native, str):
        return BridgeScorer(model, formulas, why=native)
    scorer = NativeScorer(model, native, formulas)
    if scorer.gives_the_same("scoring"):
        return scorer
    return BridgeScorer(model, formulas, why="your own code computes something else")


def try_scorer(
    scorer: "BridgeScorer", native: NativeModel, way: str, parameters: list[Tensor]
) -> dict[str, Tensor]:
    """Return what a scorer gives on three rows of some tokens, and the gradients of it: scores, or
    "the KL", where alone the reference runs."""
    model, base = scorer.model, native.base
    device, vocab = native.unembedding.device, len(native.unembedding)
    width = min(WIDTH, getattr(base.cfg, "n_ctx", WIDTH))
    prompt_len = width // 4
    ids = (torch.arange(3 * width, device=device).view(3, width) * 7919 + 5) % vocab
    attention_mask = torch.ones_like(ids)
    attention_mask[0, : prompt_len // 2] = attention_mask[1, width // 2 :] = 0
    mask = attention_mask[:, prompt_len:].bool()
    is_trained = bool(native.parts.adapters) and not torch.is_inference_mode_enabled()
    with torch.set_grad_enabled(is_trained):
        scores = scorer.measure(ids, attention_mask, prompt_len, temperature=0.7)
        if way == "the KL":
            found = {"KL": scores.measure_kl()[mask], "mean KL": scores.calc_mean_kl(mask)}
        else:
            found = {"log-probs": scores.logprobs[mask], "entropy": scores.calc_mean_entropy(mask)}
            if scores.values is not None:
                found["values"] = scores.values[mask]
            if not isinstance(scorer, NativeScorer):  # what is sampled from, without values
                logits = model(ids, attention_mask=attention_mask)
                scores = read_logits(model, logits, ids, attention_mask, prompt_len, 0.7)
            found["log-probs without values"] = scores.logprobs[mask]
        for name, part in list(found.items()) if is_trained and parameters else ():
            found[f"gradient of {name}"] = _calc_gradient(part, parameters)
    return {name: part.detach() for name, part in found.items()}


def _calc_gradient(part: Tensor, parameters: list[Tensor]) -> Tensor:
    """Return the gradient of a sum with other weights than 1, of all parameters together."""
    total = (part * torch.linspace(1, 2, part.numel()).to(part.device).view_as(part)).sum()
    if not total.requires_grad:
        return torch.cat([torch.zeros_like(p).flatten() for p in parameters])
    gradients = torch.autograd.grad(
        total, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([gradient.flatten() for gradient in gradients])


def read_logits(
    model: Any,
    logits: Float[Tensor, "row seq vocab"],
    input_ids: Int[Tensor, "row seq"],
    attention_mask: Int[Tensor, "row seq"],
    prompt_len: int,
    temperature: float = 1.0,
    formulas: Formulas | None = None,
    has_entropy_grad: bool = True,
) -> Scores:
    """Return the scores that a model's logits give, by formulas if there are any."""
    exact = torch.promote_types(logits.dtype, torch.float32)

    def scale(whole: Float[Tensor, "row seq vocab"]) -> Float[Tensor, "row completion vocab"]:
        return whole[:, prompt_len - 1 : -1].to(exact) / temperature

    def run_reference() -> Float[Tensor, "row completion vocab"]:
        with torch.no_grad(), model.reference():
            return scale(model(input_ids, attention_mask=attention_mask))

    def measure_kl() -> Float[Tensor, "row completion"]:
        logratio = torch.where(logp == -torch.inf, 0.0, logp - run_reference().log_softmax(-1))
        return (logp.exp() * logratio).sum(-1)

    def calc_mean_entropy(mask: Bool[Tensor, "row completion"]) -> Float[Tensor, ""]:
        has_grad = torch.is_grad_enabled() and has_entropy_grad
        with torch.set_grad_enabled(has_grad), contextlib.suppress(NotImplementedError):
            if formulas is not None:
                return formulas.calc_entropy_bonus(scale(logits), mask, 1.0)
        return calc_mean(entropies, mask)

    def calc_mean_kl(mask: Bool[Tensor, "row completion"]) -> Float[Tensor, ""]:
        if formulas is not None:
            ref_logits = run_reference()
            with contextlib.suppress(NotImplementedError):
                return formulas.calc_kl_penalty(scale(logits), ref_logits, mask, 1.0)
        return calc_mean(measure_kl(), mask)

    logp = scale(logits).log_softmax(-1)
    possible = logp.masked_fill(logp == -torch.inf, 0.0)  # 0 log 0 is 0, where 0 * -inf is nan
    entropies = -(logp.exp() * possible).sum(-1)
    entropies = entropies if has_entropy_grad else entropies.detach()
    logprobs = logp.gather(-1, input_ids[:, prompt_len:, None]).squeeze(-1)
    if formulas is not None:
        with contextlib.suppress(NotImplementedError):
            logprobs = formulas.get_logprobs(logits, input_ids, prompt_len, temperature)
    return Scores(logprobs, entropies, measure_kl, calc_mean_entropy, calc_mean_kl)


class BridgeScorer:
    """Scores by the bridge's logits, which are kept, as is all that hooks look at."""

    def __init__(self, model: Any, formulas: Formulas | None = None, why: str = "asked for"):
        self.model, self.formulas, self.why = model, formulas, why

    def measure(
        self,
        input_ids: Int[Tensor, "row seq"],
        attention_mask: Int[Tensor, "row seq"] | None,
        prompt_len: int,
        temperature: float = 1.0,
        has_entropy_grad: bool = True,
    ) -> Scores:
        """Return the log-probability of each token of the completions, the entropy there, the exact
        KL, and values where the model has a value head.

        attention_mask: None if no token is padding. has_entropy_grad: the entropies carry a
        gradient.

        Raises ValueError unless `temperature` is positive and `prompt_len` in [1, seq].
        """
        seq = input_ids.shape[1]
        require(temperature > 0, f"temperature should be positive, but is {temperature}")
        require(1 <= prompt_len <= seq, f"prompt_len should be in [1, {seq}], but is {prompt_len}")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self._compute(input_ids, mask, prompt_len, temperature, has_entropy_grad)

    def _compute(self, input_ids, mask, prompt_len, temperature, has_entropy_grad) -> Scores:
        """Compute the scores by the model's own forward pass."""
        model, values = self.model, None
        if hasattr(model, "forward_with_value_head"):
            logits, values = model.forward_with_value_head(input_ids, mask)
            values = values[:, prompt_len - 1 : -1]
        else:
            logits = model(input_ids, attention_mask=mask)
        settings = (prompt_len, temperature, self.formulas, has_entropy_grad)
        scores = read_logits(model, logits, input_ids, mask, *settings)
        scores.values = values
        return scores


class NativeScorer(BridgeScorer):
    """Scores without hooks, padding or kept logits."""

    def __init__(self, model: Any, native: NativeModel, formulas: Formulas | None = None):
        super().__init__(model, formulas)
        self.native = native
        self.is_trusted = False  # A KL is taken to be the model's own, as while it is compared.

    def gives_the_same(self, way: str) -> bool:
        """Return whether the model's own code gives the same: scores, or "the KL", where alone the
        reference runs."""
        trusted = NativeScorer(self.model, self.native, self.formulas)
        trusted.is_trusted = True
        both = (trusted, BridgeScorer(self.model, self.formulas))
        runs = (functools.partial(try_scorer, scorer, self.native, way) for scorer in both)
        functions = tuple(vars(self.formulas).values()) if self.formulas else ()
        return agrees(self.model, functions, way, *runs)

    def _compute(self, input_ids, mask, prompt_len, temperature, has_entropy_grad) -> Scores:
        """Compute the scores, 0 where there is no token.

        Rows with gaps, whose positions the bridge alone knows, are left to it.
        """
        given = (input_ids, mask, prompt_len, temperature, has_entropy_grad)
        rows = flatten(input_ids, mask, prompt_len)
        if rows is None:
            return super()._compute(*given)
        native = self.native
        h = read(native, rows)

        def find_own() -> Scores | None:
            """Return the scores of the model's own code, if its KL from the reference differs."""
            is_same = self.is_trusted or self.gives_the_same("the KL")
            return None if is_same else BridgeScorer._compute(self, *given)

        def measure_native_kl() -> Float[Tensor, "row completion"]:
            with torch.no_grad(), self.model.reference():
                ref_h = read(NativeModel(get_parts(self.model)), rows)
            return rows.fill(KlHead.apply(h, ref_h, native.unembedding, temperature))

        def measure_kl() -> Float[Tensor, "row completion"]:
            own = find_own()
            return measure_native_kl() if own is None else own.measure_kl()

        def calc_mean_kl(mask: Bool[Tensor, "row completion"]) -> Float[Tensor, ""]:
            own = find_own()
            return calc_mean(measure_native_kl(), mask) if own is None else own.calc_mean_kl(mask)

        found = ScoreHead.apply(h, native.unembedding, rows.targets, temperature, has_entropy_grad)
        entropies = rows.fill(found[1] if has_entropy_grad else found[1].detach())
        calc_mean_entropy = functools.partial(calc_mean, entropies)
        kls = (measure_kl, calc_mean_entropy, calc_mean_kl)
        scores = Scores(rows.fill(found[0]), entropies, *kls)
        if (head := native.parts.value_head) is not None:
            scores.values = rows.fill(head(h.to(head.weight.dtype)).squeeze(-1))
        return scores


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """Make a forward pass inside keep only the input of each block: the backward pass, inside or
    after, computes the block anew. Gradients are the same to the last bit."""
    before = _recomputes.set(True)
    try:
        yield
    finally:
        _recomputes.reset(before)


def read(native: NativeModel, rows: FlatRows) -> Float[Tensor, "scored d_model"]:
    """Return the final norm's output at the token before each that is scored."""
    x, rotary = native.embed(rows.ids, rows.positions)

    def run(block: Block, x: Float[Tensor, "token d_model"]) -> Float[Tensor, "token d_model"]:
        return block.finish(x, attend(block.project(x, rotary), block.heads, rows))

    for block in native.blocks:
        if _recomputes.get():
            x = checkpoint(run, block, x, use_reentrant=False, preserve_rng_state=False)
        else:
            x = run(block, x)
    return native.normalize_last(x.index_select(0, rows.predictors))


def attend(
    qkv: Float[Tensor, "token all_heads d_head"], heads: list[int], rows: FlatRows
) -> Float[Tensor, "token d_heads"]:
    """Attend row by row. Positions past a row's end see the row; no position in it sees them."""
    by_row = qkv.flatten(1).index_select(0, rows.grid.flatten())
    by_row = by_row.view(*rows.grid.shape, *qkv.shape[1:]).transpose(1, 2)
    q, k, v = by_row.split(heads, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1])
    return out.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, rows.cells)
