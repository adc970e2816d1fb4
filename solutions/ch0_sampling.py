"""Chapter 0: tokens, log-probabilities, sampling, and the policy gradient.

Builds what every later chapter rests on: scoring a completion under a model, sampling one with a
key-value cache, and the policy gradient of REINFORCE, which a small vocabulary lets us enumerate.

Simplified: one sampler for all uses, no beam search, no penalties, no chat templates.

Papers: REINFORCE (Williams, 1992, doi:10.1007/BF00992696); policy gradients with function
approximation (Sutton et al., 2000, NeurIPS 12); nucleus sampling (Holtzman et al., 2019,
arXiv:1904.09751).
"""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from utils.models.decoding import get_decoder, get_end_ids
from utils.prompts import Prompt, is_prompt, write_prompt
from utils.validation import require, shape_checked

# --- Scoring ------------------------------------------------------------------------------------


@shape_checked
def get_logprobs(
    logits: Float[Tensor, "batch seq vocab"],
    tokens: Int[Tensor, "batch seq"],
    prefix_len: int = 1,
    temperature: float = 1.0,
) -> Float[Tensor, "batch completion"]:
    """Return the log-probability, in nats, of each token after the first `prefix_len`.

    log p(token_t) = z[token_t] - logsumexp(z), where z = logits[t - 1] / temperature: the logits at
    a position predict the next one. A gather and a logsumexp are enough; a log-softmax over the
    whole vocabulary is never stored.

    Raises ValueError if `prefix_len` is not in [1, seq] or `temperature` is not positive.
    """
    seq = tokens.shape[1]
    require(1 <= prefix_len <= seq, f"prefix_len should be in [1, {seq}], but is {prefix_len}")
    require(temperature > 0, f"temperature should be positive, but is {temperature}")
    logits = at_least_float32(select_completion(logits, prefix_len))
    scaled = logits if temperature == 1 else logits / temperature  # [batch completion vocab]
    chosen = scaled.gather(-1, tokens[:, prefix_len:, None]).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def at_least_float32(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return `x`, in float32 if its dtype has fewer bits: bfloat16 has 2 to 3 decimal digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def select_completion(
    per_position: Float[Tensor, "batch seq *rest"], prefix_len: int
) -> Float[Tensor, "batch completion *rest"]:
    """Line up what a model says at each position with the token that it's about.

    Entry t of the result belongs to token `prefix_len + t`, and was computed one position earlier,
    from the tokens before it: with prefix_len 3 and 5 positions, what positions 2 and 3 say is
    about tokens 3 and 4. Every shift between logits or values and tokens happens here.
    """
    return per_position[:, prefix_len - 1 : -1]


@shape_checked
def calc_entropy(logits: Float[Tensor, "*rest vocab"]) -> Float[Tensor, "*rest"]:
    """Return the entropy of softmax(logits), in nats: H = -sum_v p_v log p_v.

    A logit of -inf has p = 0 and counts as 0 (the limit of p log p), in the gradient too.
    """
    logprobs = at_least_float32(logits).log_softmax(-1)
    # 0 * -inf is nan, so the impossible tokens leave before the product.
    finite = logprobs.masked_fill(logits == -torch.inf, 0.0)
    return -(logprobs.exp() * finite).sum(-1)


@shape_checked
def masked_mean(
    values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Return the mean of `values` where `mask` is true, overall or along `dim`; 0 where none is.

    What is masked out is replaced before the sum, so that nan and inf there reach neither the
    result nor the gradient (multiplying by the mask would not do: 0 * nan = nan). The arguments
    stay as they were.
    """
    kept = values.masked_fill(~mask, 0.0)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)


# --- Sampling -----------------------------------------------------------------------------------


@shape_checked
def sample_next_token(
    logits: Float[Tensor, "batch vocab"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "batch"]:
    """Draw one token per row from softmax(logits / temperature), after top-k, then top-p.

    top-k keeps the k likeliest tokens. top-p keeps the smallest set of the likeliest remaining
    tokens whose probabilities reach p, including the token that crosses p (Holtzman et al., section
    3.1). Temperature 0 takes the likeliest token; a k beyond the vocabulary and a p of 1 keep all.
    The logits stay as they were.

    Raises ValueError for a negative temperature, top_k < 1 or top_p outside (0, 1].
    """
    require(temperature >= 0, f"temperature should be at least 0, but is {temperature}")
    require(
        top_k is None or (isinstance(top_k, int) and top_k >= 1),
        f"top_k should be an integer of at least 1, but is {top_k}",
    )
    require(top_p is None or 0 < top_p <= 1, f"top_p should be in (0, 1], but is {top_p}")
    if temperature == 0:
        return logits.argmax(-1)
    logits = at_least_float32(logits)
    # The likeliest at 0, or a tiny temperature would overflow.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        dropped = logits.argsort(descending=True)[:, top_k:]
        logits = logits.scatter(-1, dropped, -torch.inf)
    if top_p is not None and top_p < 1:
        probs, order = logits.softmax(-1).sort(descending=True)
        before = probs.cumsum(-1) - probs  # the mass of the likelier tokens
        dropped = torch.empty_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


@shape_checked
def get_completion_mask(
    completion_ids: Int[Tensor, "batch completion"], eos_token_id: int
) -> Bool[Tensor, "batch completion"]:
    """Mark the tokens that are trained on: those up to and including the first eos.

    The eos is included: ending is a decision of the policy like any other. The pad id isn't used,
    so this also works if pad and eos are the same token.
    """
    require(
        isinstance(eos_token_id, int), f"eos_token_id should be an integer, but is {eos_token_id!r}"
    )
    is_eos = completion_ids == eos_token_id
    eos_before = is_eos.cumsum(-1) - is_eos.int()
    return eos_before == 0


def left_pad(
    sequences: list[list[int]], pad_token_id: int
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Pad on the left to a common length: return ids, and a mask that is 1 on the real tokens.

    The mask comes from the lengths, not from the pad id, which may be a real token as well. The
    given lists stay as they were.

    Raises ValueError for an empty list.
    """
    require(len(sequences) > 0, "sequences should hold at least one sequence, but is empty")
    seq = max(map(len, sequences))
    ids = [[pad_token_id] * (seq - len(tokens)) + list(tokens) for tokens in sequences]
    mask = [[0] * (seq - len(tokens)) + [1] * len(tokens) for tokens in sequences]
    return torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.long)


@dataclass
class Samples:
    """Hold prompts and what a model made of them. Prompts are left-padded to `prompt_len` columns,
    so that every completion starts at the same one.
    """

    input_ids: Int[Tensor, "batch seq"]  # prompt, completion, pad after the first eos
    attention_mask: Int[Tensor, "batch seq"]  # 0 on padding, on either side
    prompt_len: int
    completion_mask: Bool[Tensor, "batch completion"]
    texts: list[str]  # the completions alone, without special tokens
    completion_ids: Int[Tensor, "batch completion"] | None = None  # default: input_ids' last part
    # If the sampler kept them: what it said of each token before top-k and top-p, and the log of
    # the probability that these kept.
    logprobs: Float[Tensor, "batch completion"] | None = None
    log_kept_mass: Float[Tensor, "batch completion"] | None = None

    def __post_init__(self):
        if self.completion_ids is None:
            self.completion_ids = self.input_ids[:, self.prompt_len :]


@torch.no_grad()
def get_samples(
    model: nn.Module,
    prompts: list[str],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    prepend_bos: bool = True,
) -> Samples:
    """Sample one completion for each prompt, with a key-value cache, until all rows have ended.

    `model` is a TransformerBridge, or anything that's called the same way and has its `tokenizer`
    and `cfg`. The bos is prepended if the tokenizer has one. Each step feeds only the newest token,
    but the attention mask of everything so far: it says which cached positions are padding. The
    tensors can be used in a later backward pass, which is true of those made under `no_grad` (not
    `inference_mode`).

    Raises ValueError for an empty list of prompts, a prompt without tokens (an empty one, if no bos
    is prepended), `max_new_tokens` < 1, and a prompt that leaves too little room in the model's
    context.
    """
    require(
        isinstance(max_new_tokens, int) and max_new_tokens >= 1,
        f"max_new_tokens should be an integer of at least 1, but is {max_new_tokens!r}",
    )
    tokenizer = model.tokenizer
    prompt_ids, prompt_mask = encode_prompts(model, prompts, max_new_tokens, prepend_bos)

    def sample(logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, "batch"]:
        return sample_next_token(logits, temperature, top_k, top_p, generator)

    completion_ids = _generate(model, prompt_ids, prompt_mask, max_new_tokens, sample)
    mask = get_completion_mask(completion_ids, tokenizer.eos_token_id)
    texts = [
        tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)
        for row, keep in zip(completion_ids, mask, strict=True)
    ]
    return Samples(
        input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
        attention_mask=torch.cat([prompt_mask, mask.long()], dim=1),
        prompt_len=prompt_ids.shape[1],
        completion_mask=mask,
        texts=texts,
    )


def _generate(
    model: nn.Module,
    prompt_ids: Int[Tensor, "batch seq"],
    attention_mask: Int[Tensor, "batch seq"],
    max_new_tokens: int,
    sample: Callable[[Float[Tensor, "batch vocab"]], Int[Tensor, "batch"]],
) -> Int[Tensor, "batch completion"]:
    """Sample token after token until all rows have ended; the pad id follows a row's eos.

    The eos is the tokenizer's; the pad id is `get_pad_token_id` of it.
    """
    eos_token_id, pad_token_id = model.tokenizer.eos_token_id, get_pad_token_id(model.tokenizer)
    step_ids, cache = prompt_ids, None
    columns: list[Tensor] = []
    ended = torch.zeros(len(prompt_ids), dtype=torch.bool, device=prompt_ids.device)
    while len(columns) < max_new_tokens and not ended.all():
        logits, cache = model(
            step_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
            return_type="logits_and_cache",
        )
        tokens = sample(logits[:, -1]).masked_fill(ended, pad_token_id)
        columns.append(tokens)
        attention_mask = torch.cat([attention_mask, (~ended).long()[:, None]], dim=1)
        ended |= tokens == eos_token_id
        step_ids = tokens[:, None]
    return torch.stack(columns, dim=1)


def encode_prompts(
    model: nn.Module, prompts: Sequence[Prompt], max_new_tokens: int, prepend_bos: bool
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Return the left-padded prompts on the model's device: ids and attention mask.

    A prompt is a string, or a list of messages, {"role": "user", "content": "Hi"}, which the
    tokenizer's chat template writes, special tokens and all.

    Raises ValueError for an empty list, a prompt without tokens, one that begins with the bos that
    is put before it, messages without a template, and a prompt too long for the context.
    """
    tokenizer = model.tokenizer
    require(
        isinstance(prompts, list | tuple) and all(map(is_prompt, prompts)),
        f"prompts should be a list of strings, or of lists of messages, but is "
        f"{reprlib.repr(prompts)}",
    )
    require(len(prompts) > 0, "prompts should hold at least one prompt, but is empty")
    texts = [write_prompt(prompt, tokenizer) for prompt in prompts]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    bos_token_id = tokenizer.bos_token_id
    prefix = [bos_token_id] if prepend_bos and bos_token_id is not None else []
    sequences = [
        prefix + tokens if isinstance(prompt, str) else tokens
        for prompt, tokens in zip(prompts, encoded, strict=True)
    ]
    for prompt, sequence in zip(prompts, sequences, strict=True):
        require(len(sequence) > 0, f"prompts should have tokens, but one is {prompt!r}")
        require(
            not prefix or sequence[1:2] != prefix,
            f"prompts should not begin with a bos, as one is put before them, but {prompt[:40]!r} "
            f"does: leave it out, or pass prepend_bos=False",
        )
        require(
            len(sequence) + max_new_tokens <= model.cfg.n_ctx,
            f"prompts and max_new_tokens should fit the model's context of {model.cfg.n_ctx} "
            f"tokens, but {prompt[:40]!r} has {len(sequence)} tokens and max_new_tokens is "
            f"{max_new_tokens}",
        )
    device = next(model.parameters()).device
    ids, mask = left_pad(sequences, get_pad_token_id(model.tokenizer))
    return ids.to(device), mask.to(device)


def get_pad_token_id(tokenizer) -> int:
    """Return the pad token's id, or the eos's if there is none (GPT-2): both are masked out."""
    pad_token_id = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad_token_id is None else pad_token_id


def sample_completions(
    model: nn.Module,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    prepend_bos: bool = True,
) -> Samples:
    """Sample as `get_samples` does, faster (`utils/models/decoding.py`): different draws from the
    same distribution, with their log-probs. For a bridge, or a model that has one as `base`.

    A completion ends at the tokenizer's eos, and at the other ends that the model names.
    """
    prompt_ids, prompt_mask = encode_prompts(model, prompts, max_new_tokens, prepend_bos)
    draws = get_decoder(model).generate(
        prompt_ids, prompt_mask, max_new_tokens, temperature, top_k, top_p, generator
    )
    masks = [get_completion_mask(draws.completion_ids, end) for end in get_end_ids(model)]
    mask = torch.stack(masks).all(0)  # up to the first end
    texts = [
        model.tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)
        for row, keep in zip(draws.completion_ids, mask, strict=True)
    ]
    return Samples(
        input_ids=torch.cat([prompt_ids, draws.completion_ids], dim=1),
        attention_mask=torch.cat([prompt_mask, mask.long()], dim=1),
        prompt_len=prompt_ids.shape[1],
        completion_mask=mask,
        texts=texts,
        logprobs=draws.logprobs,
        log_kept_mass=draws.log_kept_mass,
    )


# --- The policy gradient ------------------------------------------------------------------------


@shape_checked
def calc_reinforce_objective(
    logprobs: Float[Tensor, "batch completion"],
    advantages: Float[Tensor, "batch completion"] | Float[Tensor, "batch"],
    mask: Bool[Tensor, "batch completion"],
) -> Float[Tensor, ""]:
    """Return the masked mean of logprob * advantage (maximised).

    Its gradient is REINFORCE's estimate of the policy gradient, up to a factor: the number of
    completions over the number of tokens. Advantages are constants, one per token, or one per
    completion that its tokens share.
    What is masked out may be NaN or inf, and reaches neither the result nor the gradient.
    """
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(logprobs)
    # Masked before the product: 0 * nan in the backward pass would be nan.
    weights = advantages.detach().masked_fill(~mask, 0.0)
    return masked_mean(logprobs.masked_fill(~mask, 0.0) * weights, mask)


@shape_checked
def calc_expected_policy_gradient(
    logits: Float[Tensor, "vocab"], rewards: Float[Tensor, "vocab"], baseline: float
) -> tuple[Float[Tensor, "vocab"], Float[Tensor, "vocab"]]:
    """Return mean and variance, over actions, of REINFORCE's one-sample gradient for logits.

    The policy is p = softmax(logits). Sampling action a, with reward r_a, gives the gradient
    g_a = (r_a - baseline) grad log p_a = (r_a - baseline)(onehot_a - p). With every action
    enumerated, the mean sum_a p_a g_a and the elementwise variance are exact. The mean does not
    depend on the baseline, because sum_a p_a grad log p_a = 0; the variance does. The arguments
    stay as they were: none requires a gradient that didn't before.
    """
    probs = logits.softmax(-1)
    scores = torch.eye(len(probs), dtype=probs.dtype, device=probs.device) - probs
    gradients = (rewards.detach() - baseline)[:, None] * scores  # [action vocab]
    mean = probs @ gradients
    variance = probs @ (gradients - mean).square()
    return mean, variance
