"""Wrong answers to chapter 0, each with what a good teacher would say of it."""

import torch

from utils.grading.answers import edit, wrong

GET_LOGPROBS = [
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
]


@wrong(
    "get_logprobs",
    "The whole log-softmax is kept for the backward pass: as large as the logits once more. "
    "Gather the chosen logit, and subtract a logsumexp.",
)
def keeps_a_log_softmax(logits, tokens, prefix_len=1, temperature=1.0):
    logprobs = (logits[:, prefix_len - 1 : -1] / temperature).log_softmax(-1)
    return logprobs.gather(-1, tokens[:, prefix_len:, None]).squeeze(-1)


@wrong("get_logprobs", "The log of a softmax is -inf where a probability underflows. Stay in logs.")
def log_of_a_softmax(logits, tokens, prefix_len=1, temperature=1.0):
    probs = (logits[:, prefix_len - 1 : -1] / temperature).softmax(-1)
    return torch.log(probs.gather(-1, tokens[:, prefix_len:, None]).squeeze(-1))
