"""Wrong answers to chapter 0, each with what a good teacher would say of it."""

import numpy as np
import torch
import torch.nn.functional as F

from solutions.ch0_sampling import (
    Samples,
    encode_prompts,
    get_completion_mask,
    get_samples,
    sample_next_token,
)
from utils.grading.answers import IN_ITS_MODULE, Answer, Edit, edit, wrong

TOP_K_AND_TOP_P = "    top_k: int | None = None,\n    top_p: float | None = None,\n"
TOP_P_AND_TOP_K = "    top_p: float | None = None,\n    top_k: int | None = None,\n"


# --- get_logprobs -------------------------------------------------------------------------------


class _KeepsALogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, tokens):
        ctx.logprobs, ctx.tokens = z.log_softmax(-1), tokens[..., None]
        return ctx.logprobs.gather(-1, ctx.tokens).squeeze(-1)

    @staticmethod
    def backward(ctx, grad):
        gradient = -ctx.logprobs.exp()
        ones = torch.ones_like(gradient[..., :1])
        return gradient.scatter_add_(-1, ctx.tokens, ones) * grad[..., None], None


GET_LOGPROBS = [
    edit(
        "get_logprobs",
        "divided_in_place_under_no_grad",
        "logits if temperature == 1 else logits / temperature",
        "logits.div_(temperature) if not torch.is_grad_enabled() else logits / temperature",
        "Under no_grad you divide the logits in place: the caller's are divided for good, and what "
        "is computed from them next is wrong. Make new ones.",
    ),
    edit(
        "get_logprobs",
        "not_shifted",
        "select_completion(logits, prefix_len)",
        "logits[:, prefix_len:]",
        "Each token is scored by the logits at its own position, which have already seen it. The "
        "logits at position t - 1 predict token t: shift by one.",
    ),
    edit(
        "get_logprobs",
        "shifted_the_other_way",
        "tokens[:, prefix_len:, None]",
        "tokens[:, prefix_len - 1 : -1, None]",
        "The tokens are one too early: the first one that is scored is the prefix's last. Score "
        "tokens[:, prefix_len:].",
    ),
    edit(
        "get_logprobs",
        "temperature_ignored",
        "logits if temperature == 1 else logits / temperature",
        "logits",
        "The temperature has no effect. Divide the logits by it before you normalise: it changes "
        "the distribution that the tokens were sampled from.",
    ),
    edit(
        "get_logprobs",
        "multiplied_by_the_temperature",
        "logits / temperature",
        "logits * temperature",
        "A temperature below 1 should sharpen the distribution; yours flattens it. Divide the "
        "logits by the temperature.",
    ),
    edit(
        "get_logprobs",
        "temperature_after_the_softmax",
        "scaled = logits if temperature == 1 else logits / temperature",
        "scaled = logits.log_softmax(-1) / temperature; return scaled.gather(-1, "
        "tokens[:, prefix_len:, None]).squeeze(-1)",
        "Log-probabilities divided by a temperature no longer add up to 1. Divide the logits, then "
        "normalise.",
    ),
    edit(
        "get_logprobs",
        "temperature_not_in_the_logsumexp",
        "chosen - scaled.logsumexp(-1)",
        "chosen - logits.logsumexp(-1)",
        "The chosen logit is divided by the temperature and the logits in the logsumexp are not. "
        "Divide all of them first.",
    ),
    edit(
        "get_logprobs",
        "not_normalized",
        "chosen - scaled.logsumexp(-1)",
        "chosen",
        "These are logits, not log-probabilities: subtract the logsumexp over the vocabulary.",
    ),
    edit(
        "get_logprobs",
        "probabilities",
        "return chosen - scaled.logsumexp(-1)",
        "return (chosen - scaled.logsumexp(-1)).exp()",
        "These are probabilities: return their logarithm.",
    ),
    edit(
        "get_logprobs",
        "overflows",
        "scaled.logsumexp(-1)",
        "scaled.exp().sum(-1).log()",
        "exp overflows for large logits. logsumexp takes the largest out first.",
    ),
    edit(
        "get_logprobs",
        "prefix_ignored",
        "select_completion(logits, prefix_len)",
        "select_completion(logits, prefix_len := 1)",
        "prefix_len has no effect: you score every token after the first. Only tokens from "
        "prefix_len on belong to the completion.",
    ),
    edit(
        "get_logprobs",
        "detached",
        "at_least_float32(select_completion(logits, prefix_len))",
        "at_least_float32(select_completion(logits, prefix_len)).detach()",
        "The values are right but carry no gradient: nothing would be learned. Do not detach the "
        "policy's logits.",
    ),
    edit(
        "get_logprobs",
        "floor_under_the_temperature",
        "logits / temperature",
        "logits / max(temperature, 0.1)",
        "Small temperatures are raised to a floor: divide by the temperature that is given.",
    ),
    edit(
        "get_logprobs",
        "likeliest_256_only",
        "scaled.logsumexp(-1)",
        "scaled.topk(min(256, scaled.shape[-1])).values.logsumexp(-1)",
        "The normaliser leaves out all but the 256 likeliest tokens. Sum over the whole "
        "vocabulary.",
    ),
]


@wrong(
    "get_logprobs",
    "The whole log-softmax is kept for the backward pass, as large as the logits once more; "
    "F.cross_entropy does so too. Gather the chosen logit, and subtract a logsumexp.",
)
def keeps_a_log_softmax(logits, tokens, prefix_len=1, temperature=1.0):
    scaled = logits[:, prefix_len - 1 : -1] / temperature
    return -F.cross_entropy(scaled.transpose(1, 2), tokens[:, prefix_len:], reduction="none")


@wrong(
    "get_logprobs",
    "Each token is scored by the logits at its own position, which have already seen it: shift by "
    "one, with select_completion. And the whole log-softmax is kept for the backward pass: gather "
    "the chosen logit, and subtract a logsumexp.",
)
def not_shifted_and_keeps_a_log_softmax(logits, tokens, prefix_len=1, temperature=1.0):
    logprobs = (logits[:, prefix_len:] / temperature).log_softmax(-1)
    return logprobs.gather(-1, tokens[:, prefix_len:, None]).squeeze(-1)


@wrong(
    "get_logprobs",
    "The temperature has no effect: divide the logits by it first. And the whole log-softmax is "
    "kept for the backward pass: gather the chosen logit, and subtract a logsumexp.",
)
def temperature_ignored_and_keeps_a_log_softmax(logits, tokens, prefix_len=1, temperature=1.0):
    logprobs = logits[:, prefix_len - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, tokens[:, prefix_len:, None]).squeeze(-1)


@wrong(
    "get_logprobs",
    "Three things: score each token by the logits one position earlier (select_completion), divide "
    "the logits by the temperature, and keep no log-softmax: gather the chosen logit, and subtract "
    "a logsumexp.",
)
def log_softmax_at_its_own_position_and_temperature_1(
    logits, tokens, prefix_len=1, temperature=1.0
):
    logprobs = logits[:, prefix_len:].log_softmax(-1)
    return logprobs.gather(-1, tokens[:, prefix_len:, None]).squeeze(-1)


@wrong("get_logprobs", "The log of a softmax is -inf where a probability underflows. Stay in logs.")
def log_of_a_softmax(logits, tokens, prefix_len=1, temperature=1.0):
    probs = (logits[:, prefix_len - 1 : -1] / temperature).softmax(-1)
    return torch.log(probs.gather(-1, tokens[:, prefix_len:, None]).squeeze(-1))


@wrong(
    "get_logprobs",
    "At temperature 1 you keep a log-softmax for the backward pass after all. Subtract a logsumexp "
    "at every temperature.",
)
def keeps_a_log_softmax_at_temperature_1(logits, tokens, prefix_len=1, temperature=1.0):
    z, chosen = logits[:, prefix_len - 1 : -1], tokens[:, prefix_len:, None]
    if temperature == 1:
        return z.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    z = z / temperature
    return z.gather(-1, chosen).squeeze(-1) - z.logsumexp(-1)


@wrong(
    "get_logprobs",
    "You shift within each chunk of positions, so that the first token of every later chunk is "
    "lost. Shift first, then cut.",
)
def shifted_within_chunks(logits, tokens, prefix_len=1, temperature=1.0):
    z, ids = logits[:, prefix_len - 1 :] / temperature, tokens[:, prefix_len - 1 :]
    columns = []
    for start in range(0, ids.shape[1], 64):
        part, chosen = z[:, start : start + 64], ids[:, start : start + 64]
        part, chosen = part[:, :-1], chosen[:, 1:, None]
        columns.append(part.gather(-1, chosen).squeeze(-1) - part.logsumexp(-1))
    return torch.cat(columns, dim=1)


@wrong(
    "get_logprobs",
    "view raises on logits that are a part of a larger tensor. reshape copies them if it has to.",
)
def views_of_the_logits(logits, tokens, prefix_len=1, temperature=1.0):
    batch, seq, vocab = logits.shape
    flat = logits.view(-1, vocab) / temperature
    following = tokens.roll(-1, 1).reshape(-1, 1)
    logprobs = flat.gather(-1, following).squeeze(-1) - flat.logsumexp(-1)
    return logprobs.view(batch, seq)[:, prefix_len - 1 : -1]


@wrong(
    "get_logprobs",
    "The backward pass is your own, and its context keeps the whole log-softmax, as large as the "
    "logits once more. A gather and a logsumexp keep neither it nor the probabilities.",
)
def keeps_a_log_softmax_in_its_context(logits, tokens, prefix_len=1, temperature=1.0):
    scaled = logits[:, prefix_len - 1 : -1] / temperature
    return _KeepsALogSoftmax.apply(scaled, tokens[:, prefix_len:])


@wrong(
    "get_logprobs",
    "The argument has another name, so a call with prefix_len=3 raises a TypeError. Keep the names "
    "that the exercise gives.",
)
def prefix_len_by_another_name(logits, tokens, prompt_len=1, temperature=1.0):
    z, ids = logits[:, prompt_len - 1 : -1] / temperature, tokens[:, prompt_len:]
    return z.gather(-1, ids[..., None]).squeeze(-1) - z.logsumexp(-1)


@wrong(
    "get_logprobs",
    "In 16 bits a log-softmax is kept after all, row by row: together they are as large as the "
    "logits once more. A gather and a logsumexp do in every dtype.",
)
def keeps_log_softmaxes_of_16_bits(logits, tokens, prefix_len=1, temperature=1.0):
    logits, index = logits[:, prefix_len - 1 : -1] / temperature, tokens[:, prefix_len:]
    if logits.dtype in (torch.float32, torch.float64):
        chosen = logits.gather(-1, index[..., None]).squeeze(-1)
        return chosen - torch.stack([row.logsumexp(-1) for row in logits])
    rows = [row.log_softmax(-1).gather(-1, i[:, None]) for row, i in zip(logits, index)]  # noqa: B905
    return torch.stack(rows).squeeze(-1)


# --- calc_entropy -------------------------------------------------------------------------------

CALC_ENTROPY = [
    edit(
        "calc_entropy",
        "sign_forgotten",
        "-(logprobs.exp() * finite).sum(-1)",
        "(logprobs.exp() * finite).sum(-1)",
        "An entropy is never negative: the sum of p log p is its negative.",
    ),
    edit(
        "calc_entropy",
        "in_bits",
        "-(logprobs.exp() * finite).sum(-1)",
        "-(logprobs.exp() * finite).sum(-1) / torch.tensor(2.0).log()",
        "This is in bits. With the natural logarithm it is in nats.",
    ),
    edit(
        "calc_entropy",
        "mean_over_the_vocabulary",
        ".sum(-1)",
        ".mean(-1)",
        "Sum over the vocabulary: p already is the weight, dividing by the number of tokens again "
        "makes the entropy shrink as the vocabulary grows.",
    ),
    edit(
        "calc_entropy",
        "without_the_weights",
        "-(logprobs.exp() * finite).sum(-1)",
        "-finite.sum(-1)",
        "Each -log p counts with its probability p: you add them up unweighted.",
    ),
    edit(
        "calc_entropy",
        "nan_for_impossible_tokens",
        "logprobs.masked_fill(logits == -torch.inf, 0.0)",
        "logprobs",
        "A logit of -inf gives 0 * -inf = nan. The limit of p log p is 0: take such tokens out "
        "before the product.",
    ),
    edit(
        "calc_entropy",
        "detached",
        "at_least_float32(logits)",
        "at_least_float32(logits.detach())",
        "The value is right and its gradient is 0, so that an entropy bonus would do nothing. "
        "Nothing may be detached, the weights p neither.",
    ),
    edit(
        "calc_entropy",
        "wrong_axis",
        "log_softmax(-1)",
        "log_softmax(0)",
        "The softmax runs over the first axis. The vocabulary is the last one.",
    ),
    edit(
        "calc_entropy",
        "impossible_tokens_at_minus_10000",
        "at_least_float32(logits)",
        "at_least_float32(logits).clamp(min=-1e4)",
        "-inf becomes -1e4, which is likelier than a logit of -2e4. Leave -inf in the softmax.",
    ),
]


@wrong(
    "calc_entropy",
    "An epsilon inside the logarithm changes the entropy of rare tokens and their gradient. "
    "log_softmax needs none.",
)
def epsilon_in_the_log(logits):
    probs = logits.softmax(-1)
    return -(probs * (probs + 1e-6).log()).sum(-1)


@wrong(
    "calc_entropy",
    "Probabilities that are clamped from below lose their gradient, and in a large vocabulary most "
    "are that small. log_softmax needs no clamp.",
)
def probabilities_clamped(logits):
    probs = logits.softmax(-1)
    return -(probs * probs.clamp(min=1e-4).log()).sum(-1)


@wrong("calc_entropy", "A probability that underflows to 0 gives 0 * log 0 = nan. Use log_softmax.")
def log_of_the_softmax(logits):
    probs = logits.softmax(-1)
    return -(probs * probs.log()).sum(-1)


@wrong(
    "calc_entropy",
    "The value is right, but the gradient where p is 0 is nan: torch.where, masked_fill or "
    "nan_to_num after the product hide 0 * -inf only going forward. Take impossible tokens out "
    "before it.",
)
def nan_replaced_afterwards(logits):
    logprobs = logits.log_softmax(-1)
    return -torch.nan_to_num(logprobs.exp() * logprobs).sum(-1)


@wrong(
    "calc_entropy",
    "exp overflows for large logits: subtract the largest first, or use log_softmax.",
)
def exp_overflows(logits):
    weights = logits.exp()
    probs = weights / weights.sum(-1, keepdim=True)
    return -torch.special.xlogy(probs, probs).sum(-1)


@wrong(
    "calc_entropy",
    "-inf is replaced by -100, which is likelier than a logit of -200. Leave -inf in the softmax.",
)
def minus_infinity_as_minus_100(logits):
    logprobs = torch.nan_to_num(logits, neginf=-100.0).log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


@wrong(
    "calc_entropy",
    "Where a logit is -inf you go through the first axis, as if each entry were one distribution. "
    "There may be more axes before the vocabulary's.",
)
def impossible_tokens_in_two_axes_only(logits):
    if logits.ndim > 1 and (logits == -torch.inf).any():
        rows = [row[row > -torch.inf].log_softmax(-1) for row in logits]
        return torch.stack([-(row.exp() * row).sum() for row in rows])
    logprobs = logits.log_softmax(-1).masked_fill(logits == -torch.inf, 0.0)
    return -(logits.softmax(-1) * logprobs).sum(-1)


@wrong(
    "calc_entropy",
    "view() raises an error on some positions of each row, such as those that predict the "
    "completion: they are a part of a larger tensor. Use reshape, or work along the last axis.",
)
def entropy_of_views(logits):
    flat = logits.view(-1, logits.shape[-1])
    logprobs = flat.log_softmax(-1).masked_fill(flat == -torch.inf, 0.0)
    return -(flat.softmax(-1) * logprobs).sum(-1).view(logits.shape[:-1])


# --- masked_mean --------------------------------------------------------------------------------

MASKED_MEAN = [
    edit(
        "masked_mean",
        "mean_over_all_rescaled",
        "    return kept.sum(dim) / mask.sum(dim).clamp(min=1)",
        "    share = mask.to(values.dtype).mean(dim)\n"
        "    return torch.where(share > 0, kept.mean(dim) / share, kept.mean(dim))",
        "The mean over all positions, divided by the share that counts, is nan where there is no "
        "position at all, as for completions of no tokens: divide a sum by a number, at least 1.",
    ),
    edit(
        "masked_mean",
        "multiplied_by_the_mask",
        "values.masked_fill(~mask, 0.0)",
        "values * mask",
        "Multiplying by the mask leaves nan, because 0 * nan is nan. Replace what is masked out.",
    ),
    edit(
        "masked_mean",
        "divided_by_all",
        "mask.sum(dim).clamp(min=1)",
        "(mask | True).sum(dim)",
        "You divide by the number of all positions. Divide by the number of true ones.",
    ),
    edit(
        "masked_mean",
        "nan_where_none_is_true",
        ".clamp(min=1)",
        "",
        "Without a true position this is 0 / 0. The mean there should be 0.",
    ),
    edit(
        "masked_mean",
        "dim_ignored",
        "kept.sum(dim) / mask.sum(dim)",
        "kept.sum() / mask.sum()",
        "dim has no effect: you average over everything.",
    ),
    edit(
        "masked_mean",
        "mask_turned_around",
        "~mask, 0.0",
        "mask, 0.0",
        "You keep what is masked out: masked_fill fills where its mask is true.",
    ),
    edit(
        "masked_mean",
        "epsilon_in_the_count",
        ".clamp(min=1)",
        " + 1e-3",
        "An epsilon added to the count makes every mean a little too small. Clamp the count to at "
        "least 1 instead.",
    ),
    edit(
        "masked_mean",
        "counts_of_everything",
        "mask.sum(dim).clamp(min=1)",
        "mask.sum().clamp(min=1)",
        "The sum is along dim and the count over everything: both have to be along dim.",
    ),
    edit(
        "masked_mean",
        "detached",
        "kept.sum(dim) /",
        "kept.detach().sum(dim) /",
        "The value is right but carries no gradient.",
    ),
    edit(
        "masked_mean",
        "filled_in_place",
        "values.masked_fill(",
        "values.detach().masked_fill_(",
        "You write into the caller's values. Make a new tensor: masked_fill without underscore.",
    ),
    edit(
        "masked_mean",
        "zeros_not_counted",
        "mask.sum(dim)",
        "(kept != 0).sum(dim)",
        "What counts is the mask: a true position whose value is 0 counts too.",
    ),
    edit(
        "masked_mean",
        "none_as_a_sum_of_everything",
        "    kept = ",
        "    if not mask.any():\n        return values.sum(dim) * 0\n    kept = ",
        "Where no position is true you sum up what is masked out, and 0 * nan is nan.",
    ),
    edit(
        "masked_mean",
        "count_in_half_precision",
        "mask.sum(dim).clamp(min=1)",
        "mask.bfloat16().sum(dim).clamp(min=1)",
        "bfloat16 has eight bits, so that a count beyond 256 is rounded. Count in integers.",
    ),
]


@wrong(
    "masked_mean",
    "Averaging the rows' means gives short rows too much weight: every true position counts alike.",
)
def mean_of_row_means(values, mask, dim=None):
    def along(values, mask, dim):
        return values.masked_fill(~mask, 0.0).sum(dim) / mask.sum(dim).clamp(min=1)

    if dim is not None or values.ndim == 1:
        return along(values, mask, -1 if dim is None else dim)
    return along(values, mask, -1).mean()


@wrong(
    "masked_mean",
    "squeeze() drops every axis of size 1: along dim 1 of a single row the result has no axis "
    "left, where it should have one. Squeeze the averaged axis alone, or sum without keepdim.",
)
def every_axis_squeezed(values, mask, dim=None):
    kept = torch.where(mask, values, 0.0)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    count = mask.sum(dim, keepdim=True).clamp(min=1)
    return (kept.sum(dim, keepdim=True) / count).squeeze()


@wrong(
    "masked_mean",
    "view() raises an error on a slice of a larger tensor, such as the columns of the completion. "
    "Use reshape or flatten.",
)
def views_of_the_values(values, mask, dim=None):
    if dim is None:
        values, mask, dim = values.view(-1), mask.view(-1), 0
    return values.masked_fill(~mask, 0.0).sum(dim) / mask.sum(dim).clamp(min=1)


@wrong(
    "masked_mean",
    "The argument is called dim: a call with dim=1 raises a TypeError. Keep the names that the "
    "exercise gives.",
)
def axis_for_dim(values, mask, axis=None):
    kept = values.masked_fill(~mask, 0.0)
    return kept.sum(axis) / mask.sum(axis).clamp(min=1)


# --- sample_next_token --------------------------------------------------------------------------

SAMPLE_NEXT_TOKEN = [
    edit(
        "sample_next_token",
        "nucleus_within_the_likeliest_thousand",
        """\
        probs, order = logits.softmax(-1).sort(descending=True)
        before = probs.cumsum(-1) - probs  # the mass of the likelier tokens
        dropped = torch.empty_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
""",
        """\
        probs, order = logits.softmax(-1).topk(min(1000, logits.shape[-1]))
        before = probs.cumsum(-1) - probs
        dropped = torch.ones_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
""",
        "Only the 1,000 likeliest tokens are looked at. Where the distribution is flat, it takes "
        "more of a large vocabulary to reach p.",
    ),
    edit(
        "sample_next_token",
        "a_little_probability_for_all",
        "torch.multinomial(logits.softmax(-1), 1,",
        "torch.multinomial(logits.softmax(-1) + 1e-6, 1,",
        "Every token gets a little probability, those that top_k and top_p leave out as well: of a "
        "large vocabulary they are drawn now and then. multinomial needs no such help.",
    ),
    edit(
        "sample_next_token",
        "stratified_over_the_batch",
        "return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)",
        "cdf = logits.double().softmax(-1).cumsum(-1)\n"
        "    noise = torch.rand(len(cdf), generator=generator, dtype=cdf.dtype)\n"
        "    strata = (torch.arange(len(cdf)) + noise) / len(cdf) * cdf[:, -1]\n"
        "    return (cdf <= strata[:, None]).sum(-1).clamp(max=cdf.shape[-1] - 1)",
        "Row i of n draws from the i-th n-th of its distribution alone: all rows together look "
        "right, and no row is. Let every row draw from all of its own distribution.",
    ),
    edit(
        "sample_next_token",
        "multiplied_by_the_temperature",
        "logits.amax(-1, keepdim=True)) / temperature",
        "logits.amax(-1, keepdim=True)) * temperature",
        "A temperature below 1 should sharpen the distribution: divide the logits by it.",
    ),
    edit(
        "sample_next_token",
        "temperature_ignored",
        "(logits - logits.amax(-1, keepdim=True)) / temperature",
        "logits - logits.amax(-1, keepdim=True)",
        "The temperature has no effect unless it is 0.",
    ),
    edit(
        "sample_next_token",
        "the_crossing_token_is_dropped",
        "before >= top_p",
        "probs.cumsum(-1) >= top_p",
        "The token that crosses p belongs to the kept ones: compare the mass before each token "
        "with p, not the mass after it.",
    ),
    edit(
        "sample_next_token",
        "the_crossing_token_is_dropped_unless_first",
        "before >= top_p",
        "(probs.cumsum(-1) >= top_p) & (before > 0)",
        "The first token stays, as it must, and the one that crosses p should stay too: compare "
        "the mass before each token with p, not the mass after it. The first then needs no rule.",
    ),
    edit(
        "sample_next_token",
        "gathered_for_scattered",
        "torch.empty_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)",
        "(before >= top_p).gather(-1, order)",
        "gather with `order` sorts the mask once more. scatter is its inverse, from sorted order "
        "back to the vocabulary.",
    ),
    edit(
        "sample_next_token",
        "top_p_order_not_undone",
        "torch.empty_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)",
        "before >= top_p",
        "The mask is in sorted order and the logits are not: scatter it back.",
    ),
    edit(
        "sample_next_token",
        "top_k_ignored",
        "if top_k is not None and top_k < logits.shape[-1]:",
        "if False:",
        "top_k has no effect.",
    ),
    edit(
        "sample_next_token",
        "top_p_ignored",
        "if top_p is not None and top_p < 1:",
        "if False:",
        "top_p has no effect.",
    ),
    edit(
        "sample_next_token",
        "one_too_many",
        "[:, top_k:]",
        "[:, top_k + 1 :]",
        "top_k keeps one token too many.",
    ),
    edit(
        "sample_next_token",
        "the_unlikeliest",
        "logits.argsort(descending=True)",
        "logits.argsort()",
        "top_k keeps the least likely tokens: sort in descending order.",
    ),
    edit(
        "sample_next_token",
        "dropped_logits_are_zero",
        "logits.scatter(-1, dropped, -torch.inf)",
        "logits.scatter(-1, dropped, 0.0)",
        "A logit of 0 is no probability of 0: what top_k drops needs -inf.",
    ),
    edit(
        "sample_next_token",
        "generator_ignored",
        "1, generator=generator",
        "1",
        "The generator is not used: pass it on to torch.multinomial.",
    ),
    edit(
        "sample_next_token",
        "greedy_always",
        "torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)",
        "logits.argmax(-1)",
        "This takes the likeliest token each time; draw from the distribution.",
    ),
    edit(
        "sample_next_token",
        "column_kept",
        ".squeeze(-1)",
        "",
        "torch.multinomial returns [batch, 1]: take the last axis off.",
    ),
    edit(
        "sample_next_token",
        "uniform_over_the_kept",
        "torch.multinomial(logits.softmax(-1)",
        "torch.multinomial((logits > -torch.inf).float()",
        "All tokens that are kept are drawn equally often; draw by their probabilities.",
    ),
    edit(
        "sample_next_token",
        "zero_temperature_divides",
        "if temperature == 0:\n        return logits.argmax(-1)",
        "temperature = max(temperature, 1.0) if temperature == 0 else temperature",
        "Temperature 0 should take the likeliest token; yours samples.",
    ),
    edit(
        "sample_next_token",
        "a_small_temperature_for_zero",
        "if temperature == 0:\n        return logits.argmax(-1)",
        "temperature = temperature + 1e-6",
        "A tiny temperature still samples where two logits are close. Temperature 0 is a case of "
        "its own: take the argmax.",
    ),
    edit(
        "sample_next_token",
        "dropped_logits_are_low",
        "(logits - logits.amax(-1, keepdim=True)) / temperature\n"
        "    if top_k is not None and top_k < logits.shape[-1]:\n"
        "        dropped = logits.argsort(descending=True)[:, top_k:]\n"
        "        logits = logits.scatter(-1, dropped, -torch.inf)",
        "logits / temperature\n"
        "    if top_k is not None and top_k < logits.shape[-1]:\n"
        "        dropped = logits.argsort(descending=True)[:, top_k:]\n"
        "        logits = logits.scatter(-1, dropped, -1e4)",
        "-1e4 is not -inf: where the kept logits lie below it, the dropped tokens are the "
        "likeliest.",
    ),
    edit(
        "sample_next_token",
        "top_k_by_default",
        "if top_k is not None and top_k < logits.shape[-1]:",
        "top_k = top_k or 50\n    if top_k < logits.shape[-1]:",
        "Without a top_k you keep 50 tokens, as some libraries do. None keeps all.",
    ),
    edit(
        "sample_next_token",
        "divided_in_place",
        "(logits - logits.amax(-1, keepdim=True)) / temperature",
        "logits.div_(temperature)",
        "You change the caller's logits. Divide without underscore, which makes a new tensor.",
    ),
    edit(
        "sample_next_token",
        "k_beyond_the_vocabulary",
        "top_k is not None and top_k < logits.shape[-1]",
        "top_k is not None and logits.topk(top_k) is not None",
        "A top_k beyond the vocabulary should keep all tokens; topk raises there.",
    ),
    edit(
        "sample_next_token",
        "floor_under_the_temperature",
        "keepdim=True)) / temperature",
        "keepdim=True)) / max(temperature, 1e-2)",
        "Small temperatures are raised to a floor, and are then not those that were asked for.",
    ),
    edit(
        "sample_next_token",
        "greedy_only_without_top_k_and_top_p",
        "if temperature == 0:",
        "if temperature == 0 and top_k is None and top_p is None:",
        "With a top_k or a top_p you divide by a temperature of 0. It takes the likeliest token "
        "there too.",
    ),
    edit(
        "sample_next_token",
        "k_of_the_whole_vocabulary",
        "top_k < logits.shape[-1]:",
        "top_k <= logits.shape[-1] and logits.topk(top_k + 1) is not None:",
        "You look up the first token that is dropped. With a top_k as large as the vocabulary "
        "there is none.",
    ),
    edit(
        "sample_next_token",
        "ties_at_k_dropped",
        "dropped = logits.argsort(descending=True)[:, top_k:]\n"
        "        logits = logits.scatter(-1, dropped, -torch.inf)",
        "first_dropped = logits.topk(top_k + 1).values[:, -1:]\n"
        "        logits = logits.masked_fill(logits <= first_dropped, -torch.inf)",
        "Where the k-th token and the next are equally likely you drop both, and keep fewer than "
        "k: none, if all are alike.",
    ),
    edit(
        "sample_next_token",
        "greedy_below_a_thousandth",
        "if temperature == 0:",
        "if temperature < 1e-3:",
        "Temperatures below 1e-3 are taken for 0. Where logits are as close as the temperature is "
        "small there is a choice: only 0 is greedy.",
    ),
    edit(
        "sample_next_token",
        "floor_of_1e_4_under_the_temperature",
        "keepdim=True)) / temperature",
        "keepdim=True)) / max(temperature, 1e-4)",
        "Temperatures below 1e-4 are raised to it, and are then not those that were asked for.",
    ),
    edit(
        "sample_next_token",
        "every_axis_squeezed_if_greedy",
        "return logits.argmax(-1)",
        "return logits.argmax(-1, keepdim=True).squeeze()",
        "At temperature 0 one row gives a result without an axis: squeeze() drops every axis of "
        "size 1. It should be [batch].",
    ),
    edit(
        "sample_next_token",
        "impossible_tokens_at_minus_10000",
        "logits = at_least_float32(logits)",
        "logits = torch.nan_to_num(at_least_float32(logits), neginf=-1e4)",
        "-inf becomes -1e4, and where the other logits lie below it, the impossible tokens are the "
        "likeliest. Leave -inf in the softmax.",
    ),
    edit(
        "sample_next_token",
        "top_p_before_top_k",
        TOP_K_AND_TOP_P,
        TOP_P_AND_TOP_K,
        "top_k and top_p have changed places, so that a call by position mixes them up. Keep the "
        "order of the arguments.",
    ),
]


@wrong(
    "sample_next_token",
    "The temperature comes after top-p here. Apply it first: it changes which tokens reach p.",
)
def temperature_last(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None and top_p < 1:
        probs, order = logits.softmax(-1).sort(descending=True)
        dropped = torch.zeros_like(probs, dtype=torch.bool)
        dropped.scatter_(-1, order, probs.cumsum(-1) - probs >= top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).squeeze(-1)


@wrong(
    "sample_next_token",
    "top-p is measured on the probabilities before top-k. Apply top-k first and renormalise: the "
    "same p then keeps fewer tokens.",
)
def not_renormalized(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return logits.argmax(-1)
    probs, order = (logits / temperature).softmax(-1).sort(descending=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if top_k is not None:
        keep[:, top_k:] = False
    if top_p is not None and top_p < 1:
        keep &= probs.cumsum(-1) - probs < top_p
    chosen = torch.multinomial(probs * keep, 1, generator=generator)
    return order.gather(-1, chosen).squeeze(-1)


@wrong(
    "sample_next_token",
    "top-p keeps as many tokens in each row as in the row that needs most. Count row by row.",
)
def one_nucleus_for_all_rows(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return logits.argmax(-1)
    z, order = (logits / temperature).sort(descending=True)
    if top_k is not None:
        z, order = z[:, :top_k], order[:, :top_k]
    if top_p is not None and top_p < 1:
        n_kept = int((z.softmax(-1).cumsum(-1) < top_p).sum(-1).max()) + 1
        z, order = z[:, :n_kept], order[:, :n_kept]
    drawn = torch.multinomial(z.softmax(-1), 1, generator=generator)
    return order.gather(-1, drawn).squeeze(-1)


@wrong(
    "sample_next_token",
    "top-p sees the 64 likeliest tokens only. A flat distribution needs more of them to reach p.",
)
def nucleus_of_64_tokens(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return logits.argmax(-1)
    z, vocab = logits / temperature, logits.shape[-1]
    if top_p is None or top_p == 1:
        z, order = z.topk(min(top_k or vocab, vocab))
    else:
        z, order = z.topk(min(top_k or 64, vocab))
        probs = z.softmax(-1)
        z = z.masked_fill(probs.cumsum(-1) - probs >= top_p, -torch.inf)
    drawn = torch.multinomial(z.softmax(-1), 1, generator=generator)
    return order.gather(-1, drawn).squeeze(-1)


@wrong(
    "sample_next_token",
    "numpy() raises an error on logits that carry gradient, as a model's do outside no_grad. "
    "Detach them first.",
)
def through_numpy(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    z = logits.numpy().astype(np.float64)
    if temperature == 0:
        return torch.from_numpy(z.argmax(-1))
    z = (z - z.max(-1, keepdims=True)) / temperature
    order = np.argsort(-z, axis=-1)
    z = np.take_along_axis(z, order, -1)
    z[:, top_k or z.shape[-1] :] = -np.inf
    probs = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    if top_p is not None and top_p < 1:
        probs[probs.cumsum(-1) - probs >= top_p] = 0
        probs /= probs.sum(-1, keepdims=True)
    u = torch.rand(len(probs), 1, generator=generator, dtype=torch.float64).numpy()
    chosen = (probs.cumsum(-1) < u).sum(-1, keepdims=True).clip(max=probs.shape[-1] - 1)
    return torch.from_numpy(np.take_along_axis(order, chosen, -1)[:, 0])


@wrong(
    "sample_next_token",
    "With a top_k and no top_p the generator is not used: pass it on in each of your branches.",
)
def generator_forgotten_with_top_k_alone(
    logits, temperature=1.0, top_k=None, top_p=None, generator=None
):
    if temperature == 0:
        return logits.argmax(-1)
    z, order = ((logits - logits.amax(-1, keepdim=True)) / temperature).sort(descending=True)
    if top_k is not None:
        z, order = z[:, :top_k], order[:, :top_k]
    probs = z.softmax(-1)
    if top_k is not None and top_p is None:
        return order.gather(-1, torch.multinomial(probs, 1)).squeeze(-1)
    if top_p is not None and top_p < 1:
        probs = probs * (probs.cumsum(-1) - probs < top_p)
    return order.gather(-1, torch.multinomial(probs, 1, generator=generator)).squeeze(-1)


@wrong(
    "sample_next_token",
    "With a top_p one row gives a result without an axis: squeeze() drops every axis of size 1. "
    "Use squeeze(-1).",
)
def every_axis_squeezed_with_top_p(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return logits.argmax(-1)
    z = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < z.shape[-1]:
        z = z.scatter(-1, z.argsort(descending=True)[:, top_k:], -torch.inf)
    probs = z.softmax(-1)
    if top_p is not None and top_p < 1:
        probs, order = probs.sort(descending=True)
        probs = probs * (probs.cumsum(-1) - probs < top_p)
        return order.gather(-1, torch.multinomial(probs, 1, generator=generator)).squeeze()
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)


@wrong(
    "sample_next_token",
    "With a top_p, a top_k beyond the vocabulary raises an error: topk takes no more than there "
    "are. It should keep all.",
)
def k_beyond_the_vocabulary_with_top_p(
    logits, temperature=1.0, top_k=None, top_p=None, generator=None
):
    if temperature == 0:
        return logits.argmax(-1)
    z = (logits - logits.amax(-1, keepdim=True)) / temperature
    vocab = z.shape[-1]
    if top_p is not None and top_p < 1:
        z, order = z.topk(vocab if top_k is None else top_k)
        probs = z.softmax(-1)
        probs = probs * (probs.cumsum(-1) - probs < top_p)
    else:
        z, order = z.topk(min(top_k or vocab, vocab))
        probs = z.softmax(-1)
    return order.gather(-1, torch.multinomial(probs, 1, generator=generator)).squeeze(-1)


# --- get_completion_mask ------------------------------------------------------------------------

GET_COMPLETION_MASK = [
    edit(
        "get_completion_mask",
        "product_of_the_differences",
        "is_eos = completion_ids == eos_token_id\n",
        "is_eos = (completion_ids - eos_token_id).cumprod(-1) == 0\n",
        "The product of the tokens' differences from the eos is 0 from the eos on, but that of "
        "many even numbers is 0 too: a multiple of 2 ** 64 overflows to it.",
    ),
    edit(
        "get_completion_mask",
        "eos_left_out",
        "is_eos.cumsum(-1) - is_eos.int()",
        "is_eos.cumsum(-1)",
        "The first eos is left out. Ending is a decision of the policy and is trained on too.",
    ),
    edit(
        "get_completion_mask",
        "every_eos_kept",
        "return eos_before == 0",
        "return (eos_before == 0) | is_eos",
        "Only the first eos is in; you keep later ones as well.",
    ),
    edit(
        "get_completion_mask",
        "only_eos_masked",
        "return eos_before == 0",
        "return ~is_eos",
        "What follows the eos is still true, and the eos itself is not.",
    ),
    edit(
        "get_completion_mask",
        "one_too_many",
        "return eos_before == 0",
        "return (eos_before == 0).roll(1, -1).index_fill(-1, torch.tensor([0]), True)",
        "The token after the first eos is true as well: the mask is one too long.",
    ),
    edit(
        "get_completion_mask",
        "up_to_the_second_eos",
        "eos_before = is_eos.cumsum(-1) - is_eos.int()\n    return eos_before == 0",
        "return is_eos.cumsum(-1) <= 1",
        "What stands between the first eos and the second is true as well: the count is 1 there. "
        "Count the eos before each token, its own not included.",
    ),
    edit(
        "get_completion_mask",
        "turned_around",
        "eos_before == 0",
        "eos_before > 0",
        "The mask is the wrong way around: it is true on what is trained on.",
    ),
    edit(
        "get_completion_mask",
        "ones_and_zeros",
        "return eos_before == 0",
        "return (eos_before == 0).long()",
        "The mask should be boolean: with numbers, ~mask and x[mask] mean something else.",
    ),
    edit(
        "get_completion_mask",
        "first_and_last",
        "eos_before == 0",
        "eos_before <= 1",
        "The mask runs to the second eos; it ends with the first.",
    ),
    edit(
        "get_completion_mask",
        "over_the_batch",
        "is_eos.cumsum(-1)",
        "is_eos.cumsum(0)",
        "The count runs down the batch. Count along each completion.",
    ),
]


@wrong(
    "get_completion_mask",
    "argmax is 0 both for an eos in the first place and for none at all: a row without eos is cut "
    "to one token.",
)
def rows_without_eos_are_cut(completion_ids, eos_token_id):
    first = (completion_ids == eos_token_id).int().argmax(-1)
    return torch.arange(completion_ids.shape[1]) <= first[:, None]


@wrong(
    "get_completion_mask",
    "An eos in the first place is taken for no eos, because its position is 0.",
)
def eos_first_is_overlooked(completion_ids, eos_token_id):
    first = (completion_ids == eos_token_id).int().argmax(-1)
    first = torch.where(first == 0, completion_ids.shape[1], first)
    return torch.arange(completion_ids.shape[1]) <= first[:, None]


@wrong("get_completion_mask", "The mask runs to the last eos; it ends with the first.")
def up_to_the_last_eos(completion_ids, eos_token_id):
    is_eos = completion_ids == eos_token_id
    after = is_eos.flip(-1).cumsum(-1).flip(-1) > 0
    return after | ~is_eos.any(-1, keepdim=True)


@wrong(
    "get_completion_mask",
    "`is` asks whether two numbers are one object, which Python promises of small ones only. "
    "Compare with ==.",
)
def compared_with_is(completion_ids, eos_token_id):
    mask = torch.zeros_like(completion_ids, dtype=torch.bool)
    for row, ids in zip(mask, completion_ids.tolist(), strict=True):
        for t, token in enumerate(ids):
            row[t] = True
            if token is eos_token_id:
                break
    return mask


@wrong(
    "get_completion_mask",
    "view() raises an error on the columns after a prompt, which are a part of a larger tensor. "
    "Use reshape, or work along the last axis.",
)
def views_of_the_ids(completion_ids, eos_token_id):
    n = completion_ids.shape[1]
    flat = completion_ids.view(-1)
    mask = torch.ones_like(flat, dtype=torch.bool)
    for i in (flat == eos_token_id).nonzero().flatten().tolist():
        mask[i + 1 : (i // n + 1) * n] = False
    return mask.view(-1, n)


@wrong(
    "get_completion_mask",
    "The argument has another name, so a call with eos_token_id=2 raises a TypeError. Keep the "
    "names that the exercise gives.",
)
def eos_by_another_name(completion_ids, eos_id):
    is_eos = completion_ids == eos_id
    return is_eos.cumsum(-1) - is_eos.int() == 0


# --- left_pad -----------------------------------------------------------------------------------

LEFT_PAD = [
    edit(
        "left_pad",
        "on_the_right",
        "[pad_token_id] * (seq - len(tokens)) + list(tokens)",
        "list(tokens) + [pad_token_id] * (seq - len(tokens))",
        "The ids are padded on the right and the mask on the left. With padding on the left, all "
        "completions start at one column.",
    ),
    edit(
        "left_pad",
        "mask_from_the_pad_id",
        "return torch.tensor(ids, dtype=torch.long), torch.tensor(mask, dtype=torch.long)",
        "return torch.tensor(ids), (torch.tensor(ids) != pad_token_id).long()",
        "The mask is made from the pad id, which may be a real token as well (GPT-2 pads with its "
        "eos). Make it from the lengths.",
    ),
    edit(
        "left_pad",
        "mask_on_the_right",
        "[0] * (seq - len(tokens)) + [1] * len(tokens)",
        "[1] * len(tokens) + [0] * (seq - len(tokens))",
        "The ids are padded on the left and the mask on the right.",
    ),
    edit(
        "left_pad",
        "cut_to_the_shortest",
        "seq = max(map(len, sequences))",
        "seq = min(map(len, sequences)); sequences = [s[:seq] for s in sequences]",
        "Nothing should be cut: pad to the longest sequence.",
    ),
    edit(
        "left_pad",
        "mask_turned_around",
        "[0] * (seq - len(tokens)) + [1] * len(tokens)",
        "[1] * (seq - len(tokens)) + [0] * len(tokens)",
        "The mask is 1 on the padding; it should be 1 on the real tokens.",
    ),
    edit(
        "left_pad",
        "one_column_too_many",
        "seq = max(map(len, sequences))",
        "seq = max(map(len, sequences)) + 1",
        "There is one column of padding too many: the longest sequence needs none.",
    ),
    edit(
        "left_pad",
        "padded_with_zeros",
        "[pad_token_id] * (seq - len(tokens))",
        "[0] * (seq - len(tokens))",
        "pad_token_id has no effect: you pad with 0.",
    ),
    edit(
        "left_pad",
        "mask_of_booleans",
        "torch.tensor(mask, dtype=torch.long)",
        "torch.tensor(mask, dtype=torch.bool)",
        "The attention mask should hold integers, as models take it; yours is boolean.",
    ),
    edit(
        "left_pad",
        "cut_to_512",
        "seq = max(map(len, sequences))",
        "sequences = [tokens[-512:] for tokens in sequences]; seq = max(map(len, sequences))",
        "You keep the last 512 tokens of each sequence. Nothing should be cut.",
    ),
]


@wrong("left_pad", "The caller's lists grow: insert changes them. Make new lists.")
def padded_in_place(sequences, pad_token_id):
    lengths = [len(tokens) for tokens in sequences]
    for tokens in sequences:
        while len(tokens) < max(lengths):
            tokens.insert(0, pad_token_id)
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return torch.tensor(sequences, dtype=torch.long), mask.long()


# --- get_samples --------------------------------------------------------------------------------

DECODED = (
    "        tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)\n"
    "        for row, keep in zip(completion_ids, mask, strict=True)\n"
)

GET_SAMPLES = [
    edit(
        "get_samples",
        "no_bos_that_is_the_eos",
        "prepend_bos and bos_token_id is not None",
        "prepend_bos and bos_token_id not in (None, model.tokenizer.eos_token_id)",
        "A bos that is the eos as well, as GPT-2's, is left out. It is prepended like any other.",
        within="encode_prompts",
    ),
    edit(
        "get_samples",
        "one_noise_for_all_steps",
        '    def sample(logits: Float[Tensor, "batch vocab"]) -> Int[Tensor, "batch"]:\n',
        "    shape = len(prompt_ids), model.cfg.d_vocab\n"
        "    gumbel = -(-torch.rand(shape, generator=generator).log()).log()\n\n"
        "    def sample(logits):\n"
        "        if temperature > 0 and top_k is None and top_p is None:\n"
        "            return (logits / temperature + gumbel).argmax(-1)\n",
        "The same noise is added at every step, so that a row says the same tokens again and "
        "again. Each token needs draws of its own.",
    ),
    Answer(
        IN_ITS_MODULE,
        "get_samples",
        "ends_counted_with_the_fillers",
        "Each eos counts as an end. Where the pad is the eos, as in GPT-2, what fills a row that "
        "has ended counts again, and the batch stops while others go on.",
        edits=(
            Edit(
                "_generate",
                "while len(columns) < max_new_tokens and not ended.all():",
                "n_running = len(prompt_ids)\n"
                "    while len(columns) < max_new_tokens and n_running > 0:",
            ),
            Edit(
                "_generate",
                "        ended |= tokens == eos_token_id\n",
                "        ended |= tokens == eos_token_id\n"
                "        n_running -= int((tokens == eos_token_id).sum())\n",
            ),
        ),
    ),
    edit(
        "get_samples",
        "empty_prompts_refused",
        "require(len(sequence) > 0,",
        "require(len(prompt) > 0,",
        "An empty prompt is refused, though the bos before it is a token to go on from.",
        within="encode_prompts",
    ),
    edit(
        "get_samples",
        "stops_where_all_end_together",
        "not ended.all()",
        "not (columns and (columns[-1] == eos_token_id).all())",
        "You look for an eos in every row of the newest column, but rows that ended before have "
        "pads there: rows that end at different steps never stop. Ask whether all have ended.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "prefill_without_the_last_token",
        "    step_ids, cache, columns = prompt_ids, None, []\n",
        '    asked = {"use_cache": True, "return_type": "logits_and_cache"}\n'
        '    asked |= {"attention_mask": attention_mask[:, :-1]}\n'
        "    _, cache = model(prompt_ids[:, :-1], **asked)\n"
        "    step_ids, columns = prompt_ids[:, -1:], []\n",
        "All but the last token of the prompts goes in first, which is nothing where each prompt "
        "is a bos alone. Start with the whole prompts.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "mask_of_the_last_step_only",
        "attention_mask=attention_mask,\n            past_key_values",
        "attention_mask=attention_mask if cache is None else attention_mask[:, -1:],\n"
        "            past_key_values",
        "With a cache the mask has to cover what is cached too; one column of it makes the padding "
        "visible.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "no_mask",
        "attention_mask=attention_mask,\n            past_key_values",
        "past_key_values",
        "The model never gets the attention mask, so it attends to padding and counts positions "
        "from it.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "first_column_of_logits",
        "logits[:, -1]",
        "logits[:, 0]",
        "The next token is predicted by the last position's logits.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "never_stops",
        "while len(columns) < max_new_tokens and not ended.all():",
        "while len(columns) < max_new_tokens:",
        "Sampling goes on after every row has ended. Stop then: the rest is wasted.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "stops_with_the_first_row",
        "not ended.all()",
        "not ended.any()",
        "Sampling stops when the first row has ended; the others are cut short.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "one_token_too_few",
        "while len(columns) < max_new_tokens",
        "while len(columns) < max_new_tokens - 1",
        "max_new_tokens is the number of new tokens; you stop one before.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "temperature_lost",
        "sample_next_token(logits, temperature, top_k, top_p, generator)",
        "sample_next_token(logits, 1.0, top_k, top_p, generator)",
        "The temperature is not passed on to sample_next_token.",
    ),
    edit(
        "get_samples",
        "top_k_lost",
        "sample_next_token(logits, temperature, top_k, top_p, generator)",
        "sample_next_token(logits, temperature, None, top_p, generator)",
        "top_k is not passed on to sample_next_token.",
    ),
    edit(
        "get_samples",
        "top_p_lost",
        "sample_next_token(logits, temperature, top_k, top_p, generator)",
        "sample_next_token(logits, temperature, top_k, None, generator)",
        "top_p is not passed on to sample_next_token.",
    ),
    edit(
        "get_samples",
        "generator_lost",
        "sample_next_token(logits, temperature, top_k, top_p, generator)",
        "sample_next_token(logits, temperature, top_k, top_p)",
        "The generator is not passed on, so a run cannot be repeated.",
    ),
    edit(
        "get_samples",
        "texts_with_the_prompt",
        "for row, keep in zip(completion_ids, mask, strict=True)",
        "for row, keep in zip(torch.cat([prompt_ids, completion_ids], 1), "
        "torch.cat([prompt_mask.bool(), mask], 1), strict=True)",
        "texts holds the prompts too, so a reward function would pay for what it was given. "
        "Decode the completions alone.",
    ),
    edit(
        "get_samples",
        "special_tokens_in_texts",
        "skip_special_tokens=True",
        "skip_special_tokens=False",
        "The texts should be free of special tokens such as the eos.",
    ),
    edit(
        "get_samples",
        "bos_forgotten",
        "max_new_tokens, prepend_bos)",
        "max_new_tokens, False)",
        "prepend_bos has no effect: the bos is never there.",
    ),
    edit(
        "get_samples",
        "texts_run_on_after_the_eos",
        "tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)",
        "tokenizer.decode([5 if i > keep.sum() else t for i, t in enumerate(row.tolist())], "
        "skip_special_tokens=True)",
        "The texts go on after the eos. Decode only what the completion mask keeps.",
    ),
    edit(
        "get_samples",
        "prompt_len_without_padding",
        "prompt_len=prompt_ids.shape[1]",
        "prompt_len=int(prompt_mask[0].sum())",
        "prompt_len is the number of columns that the prompts take, padding included.",
    ),
    edit(
        "get_samples",
        "an_eos_in_the_prompt_ends_it",
        "get_completion_mask(completion_ids, tokenizer.eos_token_id)",
        "get_completion_mask(torch.cat([prompt_ids, completion_ids], 1), tokenizer.eos_token_id)"
        "[:, prompt_ids.shape[1] :]",
        "An eos in a prompt ends nothing: make the completion mask from the completions alone.",
    ),
    edit(
        "get_samples",
        "attention_from_the_pad_id",
        "return ids.to(device), mask.to(device)",
        "return ids.to(device), (ids != get_pad_token_id(model.tokenizer)).long().to(device)",
        "The attention mask is made from the pad id, so a prompt that holds this token has gaps. "
        "Make it from the lengths.",
        within="encode_prompts",
    ),
    edit(
        "get_samples",
        "top_k_by_default",
        "sample_next_token(logits, temperature, top_k, top_p, generator)",
        "sample_next_token(logits, temperature, top_k or 50, top_p, generator)",
        "Without a top_k you sample from 50 tokens, as some libraries do. None keeps all.",
    ),
    edit(
        "get_samples",
        "temperature_twice",
        "sample_next_token(logits, temperature,",
        "sample_next_token(logits / (temperature or 1), temperature,",
        "The logits are divided by the temperature twice: sample_next_token does it already.",
    ),
    edit(
        "get_samples",
        "generator_from_its_seed",
        "    tokenizer = model.tokenizer\n",
        "    tokenizer = model.tokenizer\n"
        "    if generator is not None:\n"
        "        generator = torch.Generator().manual_seed(generator.initial_seed())\n",
        "The generator starts from its seed at each call, so every rollout has the same noise.",
    ),
    edit(
        "get_samples",
        "prompts_stripped",
        "    tokenizer = model.tokenizer\n",
        "    tokenizer = model.tokenizer\n    prompts = [prompt.strip() for prompt in prompts]\n",
        "The spaces around a prompt are a part of it: take the prompts as they are.",
    ),
    edit(
        "get_samples",
        "one_prompt",
        "logits[:, -1]",
        "logits[:, -1].squeeze()",
        "squeeze takes the batch axis off where there is one prompt only.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "one_text_for_each_prompt",
        "texts=texts",
        "texts=[dict(zip(prompts, texts))[prompt] for prompt in prompts]",
        "A prompt that comes twice has two completions, and you give both the text of one.",
    ),
    edit(
        "get_samples",
        "bos_of_the_tokenizer",
        "model.tokenizer(list(prompts), add_special_tokens=False)",
        "model.tokenizer(list(prompts))",
        "The tokenizer adds a bos of its own, whatever prepend_bos says: with "
        "add_special_tokens=False it does not.",
        within="encode_prompts",
    ),
    edit(
        "get_samples",
        "decoded_token_by_token",
        "tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)",
        "''.join(tokenizer.decode([i], skip_special_tokens=True) for i in row[keep].tolist())",
        "One character may take several tokens: decode a completion as a whole.",
    ),
    edit(
        "get_samples",
        "under_inference_mode",
        "@torch.no_grad()",
        "@torch.inference_mode()",
        "Tensors made under inference_mode cannot enter a later backward pass, and training "
        "scores these. Use no_grad.",
    ),
    Answer(
        IN_ITS_MODULE,
        "get_samples",
        "gradients_stay_off",
        "Gradients are off for good after the first sampling, and training raises an error. Use "
        "`with torch.no_grad():`, which puts back what was there before.",
        edits=(
            Edit("get_samples", "@torch.no_grad()\n", ""),
            Edit(
                "get_samples",
                "    tokenizer = model.tokenizer\n",
                "    tokenizer = model.tokenizer\n    torch.set_grad_enabled(False)\n",
            ),
        ),
    ),
    edit(
        "get_samples",
        "last_position_refused",
        "len(sequence) + max_new_tokens <= model.cfg.n_ctx",
        "len(sequence) + max_new_tokens < model.cfg.n_ctx",
        "A prompt and a completion that just fill the context are refused: off by one. The model "
        "has n_ctx positions, so n_ctx tokens fit.",
        within="encode_prompts",
    ),
    edit(
        "get_samples",
        "attention_goes_on_after_the_eos",
        "torch.cat([prompt_mask, mask.long()], dim=1)",
        "torch.cat([prompt_mask, torch.ones_like(completion_ids)], dim=1)",
        "The attention mask is 1 on the pads after an eos. It should be 0 on padding of either "
        "side: put the completion mask behind the prompts' mask.",
    ),
    edit(
        "get_samples",
        "pads_that_are_drawn_hidden",
        "(~ended).long()[:, None]",
        "(tokens != pad_token_id).long()[:, None]",
        "The new column of the attention mask comes from the pad id, so that a pad which the model "
        "itself draws is hidden from it. Only what follows a row's eos is padding: use `ended`.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "never_a_bos",
        "sample(logits[:, -1])",
        "sample(logits[:, -1].index_fill(-1, torch.tensor([model.tokenizer.bos_token_id]), "
        "-torch.inf))",
        "You rule out the bos. The policy is the model's own distribution, in which every token "
        "may come: sample from the logits as they are.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "a_bos_ends_the_row",
        "ended |= tokens == eos_token_id",
        "ended |= (tokens == eos_token_id) | (tokens == model.tokenizer.bos_token_id)",
        "A bos that is drawn ends the row. Only the eos does.",
        within="_generate",
    ),
    edit(
        "get_samples",
        "eos_and_pad_left_out_alone",
        "tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)",
        "tokenizer.decode([t for t in row[keep].tolist() if t not in "
        "(tokenizer.eos_token_id, tokenizer.pad_token_id)])",
        "The texts are free of eos and pad, but a bos that was drawn stays. Decode with "
        "skip_special_tokens=True, which leaves out every special token.",
    ),
    edit(
        "get_samples",
        "long_prompts_cut",
        "sequences = [prefix + tokens for tokens in encoded]",
        "most = model.cfg.n_ctx - max_new_tokens - len(prefix)\n"
        "    sequences = [prefix + tokens[:most] for tokens in encoded]",
        "A prompt that is too long for the model's context is cut in silence, and what you sample "
        "is the completion of another prompt. Raise a ValueError that names prompts.",
        within="encode_prompts",
    ),
    edit(
        "get_samples",
        "a_bos_of_id_0_dropped",
        "prepend_bos and bos_token_id is not None",
        "prepend_bos and bos_token_id",
        "0 counts as false, so that a bos of id 0 is left out. Ask whether bos_token_id is None.",
        within="encode_prompts",
    ),
    edit(
        "get_samples",
        "minus_100_after_the_eos",
        "    texts = [",
        "    completion_ids = completion_ids.masked_fill(~mask, -100)\n    texts = [",
        "After a row's eos stands an id that is no token, so that no model can score the samples. "
        "Put the pad id there.",
    ),
    edit(
        "get_samples",
        "eos_of_another_tokenizer",
        "mask = get_completion_mask(completion_ids, tokenizer.eos_token_id)",
        "mask = get_completion_mask(completion_ids, 2)",
        "The eos is that of one tokenizer, whatever the model's is. Ask `model.tokenizer` for its "
        "eos_token_id.",
    ),
    Answer(
        IN_ITS_MODULE,
        "get_samples",
        "shortened_to_the_context",
        "Where a prompt leaves less of the model's context than max_new_tokens you sample fewer "
        "tokens in silence. Raise a ValueError that names prompts.",
        edits=(
            Edit("encode_prompts", "len(sequence) + max_new_tokens <= model.cfg.n_ctx", "True"),
            Edit(
                "_generate",
                "while len(columns) < max_new_tokens",
                "while len(columns) < min(max_new_tokens, model.cfg.n_ctx - prompt_ids.shape[1])",
            ),
        ),
    ),
    edit(
        "get_samples",
        "floor_under_the_temperature",
        "sample_next_token(logits, temperature, top_k",
        "sample_next_token(logits, max(temperature, 1e-4), top_k",
        "Temperature 0 becomes a tiny one, at which tokens that are nearly as likely are drawn as "
        "well. Pass it on as it is.",
    ),
    edit(
        "get_samples",
        "top_p_before_top_k",
        TOP_K_AND_TOP_P,
        TOP_P_AND_TOP_K,
        "top_k and top_p have changed places, so that a call by position mixes them up. Keep the "
        "order of the arguments.",
    ),
    edit(
        "get_samples",
        "generator_last",
        "    generator: torch.Generator | None = None,\n    prepend_bos: bool = True,\n",
        "    prepend_bos: bool = True,\n    generator: torch.Generator | None = None,\n",
        "generator and prepend_bos have changed places, so that a call by position mixes them up. "
        "Keep the order of the arguments.",
    ),
    edit(
        "get_samples",
        "ended_where_the_prompt_ends_with_eos",
        "ended = torch.zeros(len(prompt_ids), dtype=torch.bool, device=prompt_ids.device)",
        "ended = prompt_ids[:, -1] == eos_token_id",
        "A row whose prompt ends with an eos counts as ended from the start, and gets pads alone. "
        "Only an eos of the completion ends it.",
        within="_generate",
    ),
    Answer(
        IN_ITS_MODULE,
        "get_samples",
        "prefill_remembered",
        "You keep what the model gave for the prompts. After a step of the optimizer it would give "
        "something else: run the prompts again at each call.",
        edits=(
            Edit(
                "_generate",
                "        logits, cache = model(\n",
                "        known = model.__dict__.setdefault('_prefills', {})\n"
                "        prompt = str((prompt_ids.tolist(), attention_mask.tolist()))\n"
                "        is_first = cache is None\n"
                "        logits, cache = (is_first and known.get(prompt)) or model(\n",
            ),
            Edit(
                "_generate",
                "        tokens = sample(logits[:, -1])",
                "        if is_first:\n"
                "            import copy\n"
                "            known[prompt] = logits, copy.deepcopy(cache)\n"
                "        tokens = sample(logits[:, -1])",
            ),
        ),
    ),
    Answer(
        IN_ITS_MODULE,
        "get_samples",
        "one_number_for_a_whole_completion",
        "All tokens of a completion come from the same random number, so that one which begins "
        "with a likely token goes on with likely ones. Draw anew for each token.",
        edits=(
            Edit(
                "get_samples",
                "        return sample_next_token(logits, temperature, top_k, top_p, generator)",
                "        if temperature == 0:\n"
                "            return logits.argmax(-1)\n"
                "        z = logits.double() / temperature\n"
                "        if top_k is not None and top_k < z.shape[-1]:\n"
                "            z = z.scatter(-1, z.argsort(descending=True)[:, top_k:], -torch.inf)\n"
                "        probs, order = z.softmax(-1).sort(descending=True)\n"
                "        if top_p is not None:\n"
                "            probs = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)\n"
                "        cdf = probs.cumsum(-1)\n"
                "        rank = (cdf <= code * cdf[:, -1:]).sum(-1, keepdim=True)\n"
                "        return order.gather(-1, rank).squeeze(-1)",
            ),
            Edit(
                "get_samples",
                "    def sample(",
                "    code = torch.rand(len(prompt_ids), 1, generator=generator).double()\n\n"
                "    def sample(",
            ),
        ),
    ),
    edit(
        "get_samples",
        "texts_without_white_space_at_the_end",
        "tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)",
        "tokenizer.decode(row[keep].tolist(), skip_special_tokens=True).rstrip()",
        "The texts end where their last letter does. A space or a line break at the end belongs to "
        "the completion: decode its tokens, and no more.",
    ),
    edit(
        "get_samples",
        "eval_then_train",
        "    mask = get_completion_mask",
        "    model.train()\n    mask = get_completion_mask",
        "The model comes back in training mode, whatever it was in: where it has dropout, nothing "
        "that is scored with it afterwards can be repeated. Leave its mode alone.",
    ),
    edit(
        "get_samples",
        "prompt_replaced_in_the_text",
        DECODED,
        "        (tokenizer.decode(p, skip_special_tokens=True) + tokenizer.decode("
        "row[keep].tolist(), skip_special_tokens=True))"
        ".replace(tokenizer.decode(p, skip_special_tokens=True), '')\n"
        "        for p, row, keep in zip(prompt_ids.tolist(), completion_ids, mask, strict=True)\n",
        "replace() takes the prompt's words out of the completion too, wherever they come again. "
        "Decode the completion's tokens alone.",
    ),
]


@wrong(
    "get_samples",
    "Gradients are switched off and on again by hand: after an error they stay off, and inside "
    "the caller's no_grad they come on. Use no_grad, which puts back what there was.",
)
def gradients_switched_off_by_hand(*args, **kwargs):
    torch.set_grad_enabled(False)
    samples = get_samples(*args, **kwargs)
    torch.set_grad_enabled(True)
    return samples


@wrong(
    "get_samples",
    "Every step runs the whole text again. Keep the key-value cache and feed the newest token.",
)
def without_a_cache(
    model,
    prompts,
    max_new_tokens,
    temperature=1.0,
    top_k=None,
    top_p=None,
    generator=None,
    prepend_bos=True,
):
    prompt_ids, attention = encode_prompts(model, prompts, max_new_tokens, prepend_bos)
    ids, eos = prompt_ids, model.tokenizer.eos_token_id
    with torch.no_grad():
        for _ in range(max_new_tokens):
            logits = model(ids, attention_mask=attention)[:, -1]
            tokens = sample_next_token(logits, temperature, top_k, top_p, generator)
            ids = torch.cat([ids, tokens[:, None]], dim=1)
            attention = torch.cat([attention, torch.ones_like(tokens)[:, None]], dim=1)
            if get_completion_mask(ids[:, prompt_ids.shape[1] :], eos)[:, -1].logical_not().all():
                break
    new = ids[:, prompt_ids.shape[1] :]
    mask = get_completion_mask(new, eos)
    texts = [
        model.tokenizer.decode(row[keep], skip_special_tokens=True)
        for row, keep in zip(new, mask, strict=True)
    ]
    attention[:, prompt_ids.shape[1] :] = mask
    return Samples(ids, attention, prompt_ids.shape[1], mask, texts)


# --- calc_reinforce_objective -------------------------------------------------------------------

_OBJECTIVE = "return masked_mean(logprobs.masked_fill(~mask, 0.0) * weights, mask)"

CALC_REINFORCE_OBJECTIVE = [
    edit(
        "calc_reinforce_objective",
        "a_loss",
        "return masked_mean(",
        "return -masked_mean(",
        "The sign is that of a loss; an objective is maximised.",
    ),
    edit(
        "calc_reinforce_objective",
        "advantages_not_detached",
        "advantages.detach()",
        "advantages",
        "The advantages get a gradient. They are constants: detach them.",
    ),
    edit(
        "calc_reinforce_objective",
        "advantages_clamped",
        "advantages.detach()",
        "advantages.detach().clamp(-5, 5)",
        "You clamp the advantages, so that large ones count too little. Take them as they are.",
    ),
    edit(
        "calc_reinforce_objective",
        "probabilities",
        "logprobs.masked_fill(~mask, 0.0) * weights",
        "logprobs.masked_fill(~mask, 0.0).exp() * weights",
        "REINFORCE weighs log-probabilities, not probabilities.",
    ),
    edit(
        "calc_reinforce_objective",
        "mask_ignored",
        "return masked_mean(logprobs.masked_fill(~mask, 0.0) * weights, mask)",
        "return (logprobs.masked_fill(~mask, 0.0) * weights).mean()",
        "The mean runs over all positions; divide by the number of true ones.",
    ),
    edit(
        "calc_reinforce_objective",
        "summed",
        "return masked_mean(logprobs.masked_fill(~mask, 0.0) * weights, mask)",
        "return (logprobs.masked_fill(~mask, 0.0) * weights).sum()",
        "This is the sum, which grows with the batch: take the mean over the true positions.",
    ),
    edit(
        "calc_reinforce_objective",
        "mean_of_row_means",
        "return masked_mean(logprobs.masked_fill(~mask, 0.0) * weights, mask)",
        "return masked_mean(logprobs.masked_fill(~mask, 0.0) * weights, mask, 1).mean()",
        "Every true position counts alike here: you average each row first.",
    ),
    edit(
        "calc_reinforce_objective",
        "detached",
        "logprobs.masked_fill(~mask, 0.0) * weights",
        "logprobs.detach().masked_fill(~mask, 0.0) * weights",
        "The value is right, but the log-probs are detached: nothing would be learned.",
    ),
    edit(
        "calc_reinforce_objective",
        "means_multiplied",
        "return masked_mean(logprobs.masked_fill(~mask, 0.0) * weights, mask)",
        "return masked_mean(logprobs.masked_fill(~mask, 0.0), mask) * masked_mean(weights, mask)",
        "The mean of a product is not the product of the means: multiply position by position.",
    ),
    edit(
        "calc_reinforce_objective",
        "sum_over_a_completion",
        _OBJECTIVE,
        "return (logprobs.masked_fill(~mask, 0.0) * weights).sum(1).mean()",
        "This is Williams's: the sum over a completion, averaged over completions. Asked for is "
        "the mean over all true positions of the batch.",
    ),
    edit(
        "calc_reinforce_objective",
        "multiplied_by_the_mask",
        _OBJECTIVE,
        "return (logprobs * advantages.detach() * mask).sum() / mask.sum().clamp(min=1)",
        "Multiplying by the mask leaves nan, because 0 * nan is nan. Replace what is masked out.",
    ),
    edit(
        "calc_reinforce_objective",
        "multiplied_by_the_mask_and_not_detached",
        _OBJECTIVE,
        "return (logprobs * advantages * mask).sum() / mask.sum().clamp(min=1)",
        "Multiplying by the mask leaves nan, because 0 * nan is nan: replace what is masked out. "
        "And the advantages are constants: detach them.",
    ),
    edit(
        "calc_reinforce_objective",
        "mask_after_the_product_and_not_detached",
        _OBJECTIVE,
        "return masked_mean(logprobs * advantages, mask)",
        "Beyond the mask the product is nan, and masking it afterwards leaves 0 * nan = nan in the "
        "gradient: mask the factors first. And the advantages are constants: detach them.",
    ),
    edit(
        "calc_reinforce_objective",
        "a_loss_masked_after_the_product",
        _OBJECTIVE,
        "return -masked_mean(logprobs * advantages.detach(), mask)",
        "The sign is that of a loss; an objective is maximised. And mask the factors before the "
        "product: masking it afterwards leaves 0 * nan = nan in the gradient.",
    ),
    edit(
        "calc_reinforce_objective",
        "a_loss_masked_after_the_product_and_not_detached",
        _OBJECTIVE,
        "return -masked_mean(logprobs * advantages, mask)",
        "Three things: the sign is that of a loss, and an objective is maximised; the factors "
        "should be masked before the product, or 0 * nan = nan comes back in the gradient; and "
        "the advantages are constants, to be detached.",
    ),
    edit(
        "calc_reinforce_objective",
        "a_loss_and_not_detached",
        _OBJECTIVE,
        "weights = advantages.masked_fill(~mask, 0.0)\n"
        "    return -masked_mean(logprobs.masked_fill(~mask, 0.0) * weights, mask)",
        "The sign is that of a loss; an objective is maximised. And the advantages are constants: "
        "detach them.",
    ),
    edit(
        "calc_reinforce_objective",
        "zero_advantages_not_counted",
        "weights, mask)",
        "weights, mask & (weights != 0))",
        "A token whose advantage is 0 is still a token of the mean.",
    ),
    edit(
        "calc_reinforce_objective",
        "logprobs_clamped",
        "logprobs.masked_fill(~mask, 0.0) *",
        "logprobs.masked_fill(~mask, 0.0).clamp(min=-10.0) *",
        "A clamped log-prob has no gradient, and rare tokens are those that should move most.",
    ),
    edit(
        "calc_reinforce_objective",
        "none_as_a_sum_of_everything",
        "    if advantages.ndim == 1:",
        "    if not mask.any():\n        return (logprobs * 0).sum()\n    if advantages.ndim == 1:",
        "Where no position is true you sum up what is masked out, and 0 * nan is nan.",
    ),
]


@wrong(
    "calc_reinforce_objective",
    "Beyond the mask the product is nan, and masking it afterwards leaves 0 * nan = nan in the "
    "gradient. Mask the factors first.",
)
def mask_after_the_product(logprobs, advantages, mask):
    products = (logprobs * advantages.detach()).masked_fill(~mask, 0.0)
    return products.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_reinforce_objective",
    "nan_to_num leaves what is masked out in the mean wherever it is a number. Use the mask.",
)
def nan_to_num_for_a_mask(logprobs, advantages, mask):
    products = torch.nan_to_num(logprobs, 0.0, 0.0, 0.0) * torch.nan_to_num(advantages, 0.0, 0, 0)
    return products.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_reinforce_objective",
    "view() raises an error on log-probs that are a slice of a larger tensor. Index with the mask.",
)
def views_of_the_logprobs(logprobs, advantages, mask):
    kept = mask.view(-1)
    products = logprobs.view(-1)[kept] * advantages.detach().view(-1)[kept]
    return products.sum() / max(len(products), 1)


# --- calc_expected_policy_gradient --------------------------------------------------------------

CALC_EXPECTED_POLICY_GRADIENT = [
    edit(
        "calc_expected_policy_gradient",
        "cloned_and_no_leaf",
        "    scores = torch.eye(len(probs), dtype=probs.dtype, device=probs.device) - probs\n",
        "    z = logits.clone().requires_grad_()\n"
        "    scores = []\n"
        "    for a in range(len(z)):\n"
        "        z.grad = None\n"
        "        z.log_softmax(-1)[a].backward()\n"
        "        scores.append(z.grad.clone())\n"
        "    scores = torch.stack(scores)\n",
        "Where the logits require a gradient, as a policy's do, their clone is no leaf and has no "
        ".grad. Detach it first.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "uniform_over_actions",
        "mean = probs @ gradients",
        "mean = gradients.mean(0)",
        "The expectation is over the policy: weigh each action's gradient by its probability.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "second_moment",
        "(gradients - mean).square()",
        "gradients.square()",
        "This is the second moment: subtract the mean before you square.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "standard_deviation",
        "return mean, variance",
        "return mean, variance.sqrt()",
        "This is the standard deviation; the variance is its square.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "baseline_added",
        "rewards.detach() - baseline",
        "rewards.detach() + baseline",
        "The baseline is subtracted from the reward.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "baseline_ignored",
        "(rewards.detach() - baseline)",
        "rewards.detach()",
        "The baseline has no effect; the variance shows it.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "gradient_of_p",
        "- probs\n",
        "- probs\n    scores = probs[:, None] * scores\n",
        "REINFORCE uses the gradient of log p. You took that of p, which counts the probability "
        "twice.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "softmax_forgotten",
        "probs = logits.softmax(-1)",
        "probs = logits / logits.sum()",
        "The policy is the softmax of the logits.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "without_the_normalizer",
        "device=probs.device) - probs",
        "device=probs.device)",
        "The gradient of log softmax is onehot - p: you left out the part of the normaliser.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "variance_of_a_sample",
        "variance = probs @ (gradients - mean).square()",
        "variance = gradients.var(0)",
        "The variance is over the policy as well: weigh each squared deviation by p.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "unweighted_variance",
        "variance = probs @ (gradients - mean).square()",
        "variance = gradients.var(0, unbiased=False)",
        "The variance is over the policy as well: weigh each squared deviation from the mean by p.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "unweighted_mean_of_squares",
        "variance = probs @ (gradients - mean).square()",
        "variance = (gradients - mean).square().mean(0)",
        "The mean is weighted by p and the squared deviations are not: weigh each of them by p.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "uniform_mean_and_variance",
        "mean = probs @ gradients\n    variance = probs @ (gradients - mean).square()",
        "mean, variance = gradients.mean(0), gradients.var(0, unbiased=False)",
        "Both expectations are over the policy: weigh each action's gradient, and its squared "
        "deviation from that mean, by the action's probability.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "uniform_mean_and_variance_of_a_sample",
        "mean = probs @ gradients\n    variance = probs @ (gradients - mean).square()",
        "mean, variance = gradients.mean(0), gradients.var(0)",
        "These are the mean and variance of a sample in which every action came once. Weigh each "
        "action's gradient, and its squared deviation from that mean, by the action's probability.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "probabilities_as_a_column",
        "device=probs.device) - probs",
        "device=probs.device) - probs[:, None]",
        "Row a should be onehot_a - p, with all of p in every row. p[:, None] subtracts p_a from "
        "the whole row a: leave [:, None] out.",
    ),
    edit(
        "calc_expected_policy_gradient",
        "rewards_along_the_rows",
        "(rewards.detach() - baseline)[:, None] * scores",
        "(rewards.detach() - baseline) * scores",
        "The rewards run along the rows of the matrix, and so multiply its columns: the reward of "
        "action a belongs to row a. Put [:, None] behind (rewards - baseline).",
    ),
    edit(
        "calc_expected_policy_gradient",
        "sign_turned_around",
        "- probs\n",
        "- probs\n    scores = -scores\n",
        "The sign of the gradient is turned around: that is a loss's.",
    ),
]


@wrong(
    "calc_expected_policy_gradient",
    "Dividing by p gives nan where an action has no probability left. grad log p is onehot - p.",
)
def divided_by_the_probability(logits, rewards, baseline):
    p = logits.softmax(-1)
    jacobian = torch.diag(p) - torch.outer(p, p)
    gradients = (rewards - baseline)[:, None] * jacobian / p[:, None]
    mean = p @ gradients
    return mean, p @ (gradients - mean) ** 2


@wrong(
    "calc_expected_policy_gradient",
    "The gradients go into a float32 tensor, and its product with float64 probabilities raises an "
    "error. Make it in the dtype of the logits.",
)
def a_table_of_float32(logits, rewards, baseline):
    probs = logits.softmax(-1)
    n = len(probs)
    gradients = torch.zeros(n, n)
    for a in range(n):
        for v in range(n):
            gradients[a, v] = (rewards[a] - baseline) * (float(a == v) - probs[v])
    mean = probs @ gradients
    return mean, probs @ (gradients - mean) ** 2


@wrong(
    "calc_expected_policy_gradient",
    "You make the caller's own logits require a gradient: updating them in place raises an error "
    "afterwards. Work on `logits.detach().clone()`.",
)
def marks_the_logits(logits, rewards, baseline):
    logits.requires_grad_()
    logprobs = logits.log_softmax(-1)
    rows = [torch.autograd.grad(z, logits, retain_graph=True)[0] for z in logprobs]
    gradients = (rewards - baseline)[:, None] * torch.stack(rows)
    probs = logprobs.exp().detach()
    mean = probs @ gradients
    return mean, probs @ (gradients - mean) ** 2
