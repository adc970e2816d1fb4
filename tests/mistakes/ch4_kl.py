"""Wrong answers to chapter 4, each with what a good teacher would say of it."""

import torch

from solutions.ch4_kl import calc_exact_kl, calc_kl_estimate
from utils.grading.answers import edit, wrong

# --- calc_kl_estimate ---------------------------------------------------------------------------

CALC_KL_ESTIMATE = [
    edit(
        "calc_kl_estimate",
        "sign_of_the_log_ratio",
        "logprobs - ref_logprobs.detach()",
        "ref_logprobs.detach() - logprobs",
        "The log-ratio is the wrong way up: l = logprobs - ref_logprobs, large where the policy "
        "is likelier to say the token.",
    ),
    edit(
        "calc_kl_estimate",
        "reference_not_detached",
        "ref_logprobs.detach()",
        "ref_logprobs",
        "Gradients flow into the reference's log-probs. The reference is a constant: detach it.",
    ),
    edit(
        "calc_kl_estimate",
        "k1_as_a_distance",
        'return logratio\n    if kind == "k2"',
        'return logratio.abs()\n    if kind == "k2"',
        "k1 is made positive. It is negative for a token that the reference likes better; only so "
        "does its mean come out as the KL.",
    ),
    edit(
        "calc_kl_estimate",
        "k1_never_negative",
        'return logratio\n    if kind == "k2"',
        'return logratio.clamp(min=0)\n    if kind == "k2"',
        "k1 is cut off at 0. A KL is never negative, but its single samples are: without them the "
        "mean is too high.",
    ),
    edit(
        "calc_kl_estimate",
        "k1_detached",
        'return logratio\n    if kind == "k2"',
        'return logratio.detach()\n    if kind == "k2"',
        "k1 carries no gradient. The function leaves it to its caller to detach: here the policy's "
        "log-probs keep theirs.",
    ),
    edit(
        "calc_kl_estimate",
        "k2_without_the_half",
        "logratio.square() / 2",
        "logratio.square()",
        "k2 lacks its half: it is l² / 2, so that its gradient is that of the KL and not twice it.",
    ),
    edit(
        "calc_kl_estimate",
        "k2_half_inside_the_square",
        "logratio.square() / 2",
        "(logratio / 2).square()",
        "The half of k2 is inside the square, where it becomes a quarter.",
    ),
    edit(
        "calc_kl_estimate",
        "k2_of_the_absolute_value",
        "logratio.square() / 2",
        "logratio.abs() / 2",
        "k2 is the square of the log-ratio, halved, not its absolute value.",
    ),
    edit(
        "calc_kl_estimate",
        "k2_of_the_ratio",
        "logratio.square() / 2",
        "torch.expm1(logratio).square() / 2",
        "k2 squares the ratio less 1. It squares the log of the ratio, l.",
    ),
    edit(
        "calc_kl_estimate",
        "k2_weighted_by_the_ratio",
        "return logratio.square() / 2",
        "return torch.exp(logprobs - logprobs.detach()) * logratio.square() / 2",
        "k2 has a ratio before it, which changes its gradient. Only k4 has one.",
    ),
    edit(
        "calc_kl_estimate",
        "k3_of_the_inverse_ratio",
        "torch.expm1(-logratio) + logratio",
        "torch.expm1(logratio) - logratio",
        "k3 is upside down: the ratio in it is reference over policy, exp(-l). Averaged over the "
        "policy's samples, yours is no KL of these two.",
    ),
    edit(
        "calc_kl_estimate",
        "k3_with_the_log_subtracted",
        "torch.expm1(-logratio) + logratio",
        "torch.expm1(-logratio) - logratio",
        "The last term of k3 has the wrong sign: exp(-l) - 1 + l. Yours falls below 0.",
    ),
    edit(
        "calc_kl_estimate",
        "k3_without_the_one",
        "torch.expm1(-logratio) + logratio",
        "torch.exp(-logratio) + logratio",
        "k3 lacks its -1: two equal policies are at a distance of 0, not 1.",
    ),
    edit(
        "calc_kl_estimate",
        "k3_by_exp",
        "torch.expm1(-logratio) + logratio",
        "torch.exp(-logratio) - 1 + logratio",
        "exp(-l) - 1 loses the digits where l is small, and k3 comes out negative. torch.expm1 "
        "keeps them.",
    ),
    edit(
        "calc_kl_estimate",
        "k3_never_negative_by_force",
        "torch.expm1(-logratio) + logratio",
        "(torch.exp(-logratio) - 1 + logratio).clamp(min=0)",
        "A clamp hides that exp(-l) - 1 loses the digits where l is small: what is left is "
        "rounding, and where it was negative there is no gradient. torch.expm1 keeps the digits.",
    ),
    edit(
        "calc_kl_estimate",
        "k3_without_its_mean_zero_part",
        "torch.expm1(-logratio) + logratio",
        "torch.expm1(-logratio)",
        "exp(-l) - 1 alone is 0 on average: it is what k3 adds to l. Add l.",
    ),
    edit(
        "calc_kl_estimate",
        "k3_of_clamped_ratios",
        "torch.expm1(-logratio) + logratio",
        "torch.expm1(-logratio).clamp(max=10.0) + logratio",
        "The ratio in k3 is clamped, and so loses its gradient just where the two policies are "
        "furthest apart.",
    ),
    edit(
        "calc_kl_estimate",
        "k3_of_clamped_log_ratios",
        "torch.expm1(-logratio) + logratio",
        "torch.expm1(-logratio.clamp(-5, 5)) + logratio.clamp(-5, 5)",
        "The log-ratio of k3 is clamped to 5 either way, where the function asks for it as it is.",
    ),
    edit(
        "calc_kl_estimate",
        "k4_without_its_gradient",
        "torch.exp(logprobs - old_logprobs.detach()) * logratio",
        "torch.exp(logprobs - old_logprobs).detach() * logratio",
        "The ratio of k4 is detached. Its gradient is what makes k4's the gradient of the KL: only "
        "the old log-probs are constants.",
    ),
    edit(
        "calc_kl_estimate",
        "k4_with_a_detached_log_ratio",
        "torch.exp(logprobs - old_logprobs.detach()) * logratio",
        "torch.exp(logprobs - old_logprobs.detach()) * logratio.detach()",
        "The log-ratio of k4 is detached. Its gradient alone is 0 on average on-policy, but it "
        "belongs to k4.",
    ),
    edit(
        "calc_kl_estimate",
        "k4_against_the_reference",
        "torch.exp(logprobs - old_logprobs.detach()) * logratio",
        "torch.exp(logratio) * logratio",
        "The ratio of k4 is against the reference. It corrects for who sampled: it is against the "
        "old log-probs.",
    ),
    edit(
        "calc_kl_estimate",
        "k4_ratio_upside_down",
        "torch.exp(logprobs - old_logprobs.detach())",
        "torch.exp(old_logprobs.detach() - logprobs)",
        "The ratio of k4 is upside down: policy over sampler.",
    ),
    edit(
        "calc_kl_estimate",
        "k4_log_ratio_for_ratio",
        "torch.exp(logprobs - old_logprobs.detach())",
        "(logprobs - old_logprobs.detach())",
        "k4 multiplies by the log of the ratio. Take the exponential: on-policy the ratio is 1.",
    ),
    edit(
        "calc_kl_estimate",
        "k4_is_k1",
        "torch.exp(logprobs - old_logprobs.detach()) * logratio",
        "logratio",
        "k4 is k1 here. On-policy their values are equal, but not their gradients: keep the ratio, "
        "even where its value is 1.",
    ),
    edit(
        "calc_kl_estimate",
        "k4_weighs_k3",
        "torch.exp(logprobs - old_logprobs.detach()) * logratio",
        "torch.exp(logprobs - old_logprobs.detach()) * (torch.expm1(-logratio) + logratio)",
        "k4 is the ratio times k1, l itself. You weigh k3 with it, as some libraries do under "
        "another name.",
    ),
    edit(
        "calc_kl_estimate",
        "k4_ignores_the_sampler",
        "old_logprobs = logprobs if old_logprobs is None else old_logprobs",
        "old_logprobs = logprobs",
        "k4 ignores the old log-probs that it is given: once the policy has moved, the ratio is "
        "no longer 1.",
    ),
    edit(
        "calc_kl_estimate",
        "k4_takes_the_reference_for_the_sampler",
        "old_logprobs = logprobs if old_logprobs is None else old_logprobs",
        "old_logprobs = ref_logprobs if old_logprobs is None else old_logprobs",
        "Without old log-probs, k4 takes the reference for the policy that sampled. It is the "
        "current policy: its own log-probs, detached.",
    ),
    edit(
        "calc_kl_estimate",
        "k4_ratio_capped",
        "torch.exp(logprobs - old_logprobs.detach())",
        "torch.exp(logprobs - old_logprobs.detach()).clamp(max=10)",
        "The ratio of k4 is capped. Where the policy has moved far from its sampler, value and "
        "gradient are then too small: take the ratio as it is.",
    ),
    edit(
        "calc_kl_estimate",
        "old_not_detached",
        "old_logprobs.detach()",
        "old_logprobs",
        "The ratio of k4 passes gradient into the old log-probs. They are constants, and where "
        "they are the current ones, the gradient of the ratio cancels: detach them.",
    ),
    edit(
        "calc_kl_estimate",
        "every_estimate_off_policy",
        "logratio = logprobs - ref_logprobs.detach()",
        "logratio = (logprobs if old_logprobs is None else old_logprobs) - ref_logprobs.detach()",
        "With old log-probs given, l is taken between the sampler and the reference. It is the "
        "current policy's, whoever sampled.",
    ),
    edit(
        "calc_kl_estimate",
        "a_mean",
        '    if kind == "k1":\n        return logratio\n',
        '    if kind == "k1":\n        return logratio.mean()\n',
        "k1 comes back as a mean. The estimates are one a token, in the shape of the log-probs.",
    ),
    edit(
        "calc_kl_estimate",
        "unknown_kinds_are_k4",
        "require(kind in KINDS,",
        "require(True,",
        "An unknown kind is taken for k4. A ValueError should name it: a misspelt flag is how "
        "scans go wrong in silence.",
    ),
    edit(
        "calc_kl_estimate",
        "log_ratio_in_place",
        "return logratio.square() / 2",
        "return ref_logprobs.detach().sub_(logprobs.detach()).square() / 2 + 0 * logprobs",
        "Your function changes its arguments: an operation that ends in an underscore writes into "
        "them.",
    ),
]


@wrong(
    "calc_kl_estimate",
    "These are ratios of log-probabilities, not of probabilities: the log of a ratio is a "
    "difference of logs.",
)
def ratio_of_logs(logprobs, ref_logprobs, kind, old_logprobs=None):
    if kind not in ("k1", "k2", "k3", "k4"):
        raise ValueError(f"unknown kind {kind}")
    x = (logprobs / ref_logprobs.detach()).log()
    old = (logprobs if old_logprobs is None else old_logprobs).detach()
    return {"k1": x, "k2": x**2 / 2, "k3": torch.expm1(-x) + x, "k4": (logprobs / old) * x}[kind]


@wrong(
    "calc_kl_estimate",
    "Each estimate is weighted by the policy's probability of the token. The sample has that "
    "weight already: frequent tokens are sampled often.",
)
def weighted_by_probability(logprobs, ref_logprobs, kind, old_logprobs=None):
    return logprobs.exp() * calc_kl_estimate(logprobs, ref_logprobs, kind, old_logprobs)


@wrong(
    "calc_kl_estimate",
    "The probabilities themselves underflow where log-probs are below -100: stay with their logs.",
)
def by_way_of_probabilities(logprobs, ref_logprobs, kind, old_logprobs=None):
    if kind not in ("k1", "k2", "k3", "k4"):
        raise ValueError(f"unknown kind {kind}")
    p, q = logprobs.exp(), ref_logprobs.detach().exp()
    old = (logprobs if old_logprobs is None else old_logprobs).detach().exp()
    x = (p / q).log()
    return {"k1": x, "k2": x**2 / 2, "k3": torch.expm1(-x) + x, "k4": p / old * x}[kind]


# --- calc_exact_kl ------------------------------------------------------------------------------

CALC_EXACT_KL = [
    edit(
        "calc_exact_kl",
        "the_other_direction",
        "logprobs.exp() * logratio",
        "ref_logprobs.exp() * -logratio",
        "This is KL(reference ‖ policy). The average is over the policy's tokens: weigh with p.",
    ),
    edit(
        "calc_exact_kl",
        "log_ratio_upside_down",
        "(logprobs - ref_logprobs)",
        "(ref_logprobs - logprobs)",
        "The log-ratio is the wrong way up, so that the KL comes out negative: log p - log q.",
    ),
    edit(
        "calc_exact_kl",
        "weighed_by_the_reference",
        "logprobs.exp() * logratio",
        "ref_logprobs.exp() * logratio",
        "The log-ratio is averaged over the reference's tokens. It is the policy that samples: "
        "weigh with p.",
    ),
    edit(
        "calc_exact_kl",
        "mean_over_the_vocabulary",
        "(logprobs.exp() * logratio).sum(-1)",
        "(logprobs.exp() * logratio).mean(-1)",
        "The probabilities are weights already: sum over the vocabulary. A mean divides by its "
        "size once more.",
    ),
    edit(
        "calc_exact_kl",
        "summed_over_everything",
        "(logprobs.exp() * logratio).sum(-1)",
        "(logprobs.exp() * logratio).sum()",
        "The KL is summed over all positions. It is one number a position: sum the last axis only.",
    ),
    edit(
        "calc_exact_kl",
        "sum_along_the_first_axis",
        "(logprobs.exp() * logratio).sum(-1)",
        "(logprobs.exp() * logratio).sum(0)",
        "The sum runs along the first axis. The vocabulary is the last one.",
    ),
    edit(
        "calc_exact_kl",
        "softmax_along_the_first_axis",
        "at_least_float32(logits).log_softmax(-1)",
        "at_least_float32(logits).log_softmax(0)",
        "The policy's softmax runs along the first axis. The vocabulary is the last one.",
    ),
    edit(
        "calc_exact_kl",
        "policy_not_normalised",
        "at_least_float32(logits).log_softmax(-1)",
        "at_least_float32(logits)",
        "The policy's logits are taken for log-probs. They need not sum to 1: log_softmax first.",
    ),
    edit(
        "calc_exact_kl",
        "reference_not_normalised",
        "at_least_float32(ref_logits.detach()).log_softmax(-1)",
        "at_least_float32(ref_logits.detach())",
        "The reference's logits are taken for log-probs. They need not sum to 1: log_softmax "
        "first.",
    ),
    edit(
        "calc_exact_kl",
        "in_bits",
        "return (logprobs.exp() * logratio).sum(-1)",
        "return (logprobs.exp() * logratio).sum(-1) / 0.6931471805599453",
        "The KL is in bits. Use the natural log: nats.",
    ),
    edit(
        "calc_exact_kl",
        "reference_not_detached",
        "ref_logits.detach()",
        "ref_logits",
        "Gradients flow into the reference's logits. The reference is a constant: detach it.",
    ),
    edit(
        "calc_exact_kl",
        "policy_detached",
        "logprobs.exp() * logratio",
        "logprobs.detach().exp() * logratio",
        "The weights p are detached, and with them the gradient of the KL: what is left of it is "
        "0, for any reference. Unlike a sampled estimate, the exact KL is differentiated through "
        "its weights.",
    ),
    edit(
        "calc_exact_kl",
        "nothing_carries_gradient",
        "return (logprobs.exp() * logratio).sum(-1)",
        "return (logprobs.exp() * logratio).sum(-1).detach()",
        "The KL carries no gradient. As a penalty it has to: only the reference is a constant.",
    ),
    edit(
        "calc_exact_kl",
        "impossible_tokens_are_nan",
        ".masked_fill(logits == -torch.inf, 0.0)",
        "",
        "A token that the policy cannot emit makes the KL nan, because 0 * -inf is nan. It counts "
        "0: take it out before the product.",
    ),
    edit(
        "calc_exact_kl",
        "nan_replaced_afterwards",
        "return (logprobs.exp() * logratio).sum(-1)",
        "return (logprobs.exp() * (logprobs - ref_logprobs)).nan_to_num().sum(-1)",
        "nan is replaced after the product. The value is right then, but the gradient still runs "
        "through 0 * -inf and is nan: take impossible tokens out before the product.",
    ),
    edit(
        "calc_exact_kl",
        "log_of_the_softmax",
        "at_least_float32(logits).log_softmax(-1)",
        "at_least_float32(logits).softmax(-1).log()",
        "The log of a softmax is -inf where the probability underflows. log_softmax is not.",
    ),
    edit(
        "calc_exact_kl",
        "reference_log_with_an_epsilon",
        "at_least_float32(ref_logits.detach()).log_softmax(-1)",
        "(at_least_float32(ref_logits.detach()).softmax(-1) + 1e-8).log()",
        "A small number inside the reference's log caps the log-ratio of tokens that are rare "
        "there. log_softmax needs none.",
    ),
    edit(
        "calc_exact_kl",
        "k2_over_the_vocabulary",
        "logprobs.exp() * logratio",
        "logprobs.exp() * logratio.square() / 2",
        "This averages k2 over the vocabulary, which is biased. The KL averages the log-ratio "
        "itself.",
    ),
    edit(
        "calc_exact_kl",
        "symmetric",
        "logprobs.exp() * logratio",
        "(logprobs.exp() - ref_logprobs.exp()) * logratio / 2",
        "This is the mean of both directions. KL(policy ‖ reference) is one of them.",
    ),
]


@wrong(
    "calc_exact_kl",
    "Only the likeliest token counts here. The KL is a sum over the whole vocabulary.",
)
def of_the_likeliest_token(logits, ref_logits):
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.detach().log_softmax(-1)
    best = logprobs.argmax(-1, keepdim=True)
    return (logprobs.exp() * (logprobs - ref_logprobs)).gather(-1, best).squeeze(-1)


@wrong(
    "calc_exact_kl",
    "Only the 64 likeliest tokens count here. Vocabularies are larger, and the sum is over all "
    "tokens: many rare tokens together weigh too.",
)
def of_the_likeliest_64(logits, ref_logits):
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.detach().log_softmax(-1)
    top, tokens = logprobs.topk(min(64, logprobs.shape[-1]), dim=-1)
    logratio = (top - ref_logprobs.gather(-1, tokens)).masked_fill(top == -torch.inf, 0.0)
    return (top.exp() * logratio).sum(-1)


@wrong(
    "calc_exact_kl",
    "This is KL(reference ‖ policy). If you used kl_div: it takes the log-probs of the second "
    "distribution first.",
)
def arguments_of_kl_div(logits, ref_logits):
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.detach().log_softmax(-1)
    return torch.nn.functional.kl_div(
        logprobs, ref_logprobs, reduction="none", log_target=True
    ).sum(-1)


# --- calc_estimator_stats -----------------------------------------------------------------------

CALC_ESTIMATOR_STATS = [
    edit(
        "calc_estimator_stats",
        "the_mean_for_the_bias",
        "mean - calc_exact_kl(logits, ref_logits), std",
        "mean, std",
        "You return the mean of the estimate. Its bias is what that is off by: subtract the exact "
        "KL.",
    ),
    edit(
        "calc_estimator_stats",
        "bias_with_the_sign_flipped",
        "mean - calc_exact_kl(logits, ref_logits), std",
        "calc_exact_kl(logits, ref_logits) - mean, std",
        "The bias has the wrong sign: the estimate's mean less the truth.",
    ),
    edit(
        "calc_estimator_stats",
        "size_of_the_bias",
        "mean - calc_exact_kl(logits, ref_logits), std",
        "(mean - calc_exact_kl(logits, ref_logits)).abs(), std",
        "The bias comes back without its sign, and with it whether the estimate is too low or too "
        "high.",
    ),
    edit(
        "calc_estimator_stats",
        "bias_against_the_other_direction",
        "mean - calc_exact_kl(logits, ref_logits), std",
        "mean - calc_exact_kl(ref_logits, logits), std",
        "The bias is taken against KL(reference ‖ policy). The estimates are of KL(policy ‖ "
        "reference).",
    ),
    edit(
        "calc_estimator_stats",
        "swapped",
        "mean - calc_exact_kl(logits, ref_logits), std",
        "std, mean - calc_exact_kl(logits, ref_logits)",
        "Bias and std are swapped.",
    ),
    edit(
        "calc_estimator_stats",
        "variance_for_std",
        "(probs @ (estimates - mean).square()).sqrt()",
        "probs @ (estimates - mean).square()",
        "You return the variance. Its root, the std, is in nats as the KL is.",
    ),
    edit(
        "calc_estimator_stats",
        "root_of_the_mean_square",
        "(estimates - mean).square()",
        "estimates.square()",
        "The spread is taken about 0. A std is about the mean.",
    ),
    edit(
        "calc_estimator_stats",
        "spread_about_the_truth",
        "(estimates - mean).square()",
        "(estimates - calc_exact_kl(logits, ref_logits)).square()",
        "The spread is taken about the exact KL. That is the root mean square error, which has the "
        "bias in it; a std is about the estimate's own mean.",
    ),
    edit(
        "calc_estimator_stats",
        "mean_absolute_deviation",
        "(probs @ (estimates - mean).square()).sqrt()",
        "probs @ (estimates - mean).abs()",
        "This is the mean absolute deviation. The std is the root of the mean square one.",
    ),
    edit(
        "calc_estimator_stats",
        "every_token_alike",
        "probs = logprobs.exp()",
        "probs = torch.full_like(logprobs, 1 / len(logprobs))",
        "Every token weighs alike. They are sampled with the policy's probabilities: weigh with p.",
    ),
    edit(
        "calc_estimator_stats",
        "sampled_from_the_reference",
        "probs = logprobs.exp()",
        "probs = ref_logits.softmax(-1)",
        "The tokens are weighed as the reference would sample them. The policy samples.",
    ),
    edit(
        "calc_estimator_stats",
        "std_of_the_vocabulary",
        "(probs @ (estimates - mean).square()).sqrt()",
        "estimates.std()",
        "torch.std gives every token of the vocabulary the same weight. Weigh the squares with p.",
    ),
    edit(
        "calc_estimator_stats",
        "policy_not_normalised",
        "logprobs = logits.log_softmax(-1)",
        "logprobs = logits",
        "The logits are taken for log-probs: log_softmax first.",
    ),
    edit(
        "calc_estimator_stats",
        "reference_not_normalised",
        "ref_logits.log_softmax(-1)",
        "ref_logits",
        "The reference's logits are taken for log-probs: log_softmax first.",
    ),
    edit(
        "calc_estimator_stats",
        "policy_log_with_an_epsilon",
        "logprobs = logits.log_softmax(-1)",
        "logprobs = (logits.softmax(-1) + 1e-8).log()",
        "A small number inside the policy's log changes the log-ratio of tokens that it hardly "
        "says, which is where k3 is large. log_softmax needs none.",
    ),
    edit(
        "calc_estimator_stats",
        "reference_log_with_an_epsilon",
        "ref_logits.log_softmax(-1)",
        "(ref_logits.softmax(-1) + 1e-8).log()",
        "A small number inside the reference's log caps the log-ratio of tokens that are rare "
        "there. log_softmax needs none.",
    ),
    edit(
        "calc_estimator_stats",
        "the_other_way_round",
        "calc_kl_estimate(logprobs, ref_logits.log_softmax(-1), kind)",
        "calc_kl_estimate(ref_logits.log_softmax(-1), logprobs, kind)",
        "Policy and reference are swapped in the call of calc_kl_estimate.",
    ),
    edit(
        "calc_estimator_stats",
        "always_k1",
        "ref_logits.log_softmax(-1), kind)",
        'ref_logits.log_softmax(-1), "k1")',
        "Every kind gives the statistics of k1: `kind` is not passed on.",
    ),
    edit(
        "calc_estimator_stats",
        "standard_error",
        "(probs @ (estimates - mean).square()).sqrt()",
        "(probs @ (estimates - mean).square() / len(probs)).sqrt()",
        "The variance is divided by the size of the vocabulary once more. The probabilities are "
        "weights already: the std is that of one sampled token.",
    ),
]


@wrong(
    "calc_estimator_stats",
    "This draws samples. Over a vocabulary that can be enumerated, bias and std are exact sums.",
)
def by_sampling(logits, ref_logits, kind):
    tokens = torch.multinomial(logits.softmax(-1), 10_000, replacement=True)
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    drawn = calc_kl_estimate(logprobs[tokens], ref_logprobs[tokens], kind)
    return drawn.mean() - calc_exact_kl(logits, ref_logits), drawn.std()


# --- calc_expected_gradient ---------------------------------------------------------------------

CALC_EXPECTED_GRADIENT = [
    edit(
        "calc_expected_gradient",
        "sampling_differentiated",
        "old_logits.detach().log_softmax(-1)",
        "old_logits.log_softmax(-1)",
        "The weights are differentiated too. Tokens have been drawn when the loss is computed: "
        "autograd does not see the drawing, so the weights are constants.",
    ),
    edit(
        "calc_expected_gradient",
        "weights_of_the_policy_off_policy",
        "old_logprobs.exp() @ per_token",
        "logprobs.detach().exp() @ per_token",
        "Off-policy the tokens are weighed as the policy would draw them. The sampler drew them.",
    ),
    edit(
        "calc_expected_gradient",
        "sampler_ignored",
        "old_logits = logits if sampler_logits is None else sampler_logits",
        "old_logits = logits",
        "sampler_logits has no effect: tokens of an older policy come with its probabilities.",
    ),
    edit(
        "calc_expected_gradient",
        "sampled_from_the_reference",
        "old_logits = logits if sampler_logits is None else sampler_logits",
        "old_logits = ref_logits if sampler_logits is None else sampler_logits",
        "Without sampler_logits the tokens come from the reference. The policy itself samples.",
    ),
    edit(
        "calc_expected_gradient",
        "k4_not_told_who_sampled",
        "calc_kl_estimate(logprobs, ref_logprobs, kind, old_logprobs)",
        "calc_kl_estimate(logprobs, ref_logprobs, kind)",
        "k4 is not told who sampled: pass the sampler's log-probs on.",
    ),
    edit(
        "calc_expected_gradient",
        "reward_not_detached",
        "per_token.detach() * logprobs",
        "per_token * logprobs",
        "A reward is a number: the estimate in it carries no gradient. Detach it.",
    ),
    edit(
        "calc_expected_gradient",
        "reward_with_the_sign_flipped",
        "per_token.detach() * logprobs",
        "-per_token.detach() * logprobs",
        "In the reward, this is the direction in which the policy moves. Negated, it compares with "
        "the gradient of a loss.",
    ),
    edit(
        "calc_expected_gradient",
        "reward_by_probability",
        "per_token.detach() * logprobs",
        "per_token.detach() * logprobs.exp()",
        "In the reward, the estimate multiplies grad log p, the policy gradient's score, not grad "
        "p: the weight of the sample is there already.",
    ),
    edit(
        "calc_expected_gradient",
        "reward_as_a_loss",
        "per_token = per_token.detach() * logprobs",
        "pass",
        "The reward is treated as a loss. In the reward the estimate is a number, and the policy "
        "gradient multiplies it by grad log p.",
    ),
    edit(
        "calc_expected_gradient",
        "loss_as_a_reward",
        'if place == "reward":',
        "if True:",
        "The loss is treated as a reward. In the loss the estimate itself is differentiated.",
    ),
    edit(
        "calc_expected_gradient",
        "places_swapped",
        'if place == "reward":',
        'if place == "loss":',
        "Loss and reward are swapped.",
    ),
    edit(
        "calc_expected_gradient",
        "reward_with_a_ratio",
        "per_token.detach() * logprobs",
        "per_token.detach() * torch.exp(logprobs - old_logprobs)",
        "In the reward, off-policy, there is a ratio that the equation does not have: it is "
        "k(v) grad log p, weighed by the sampler alone.",
    ),
    edit(
        "calc_expected_gradient",
        "reward_with_the_mean_as_baseline_of_the_vocabulary",
        "per_token.detach() * logprobs",
        "(per_token - per_token.mean()).detach() * logprobs",
        "The mean over the vocabulary is subtracted. On-policy a baseline changes nothing in "
        "expectation, off-policy it does: the estimate stands alone.",
    ),
    edit(
        "calc_expected_gradient",
        "mean_for_the_sum",
        "old_logprobs.exp() @ per_token",
        "(old_logprobs.exp() * per_token).mean()",
        "The sum is divided by the size of the vocabulary. The probabilities are weights already.",
    ),
    edit(
        "calc_expected_gradient",
        "every_token_alike",
        "old_logprobs.exp() @ per_token",
        "per_token.mean()",
        "Every token weighs alike. Weigh it with the probability of being drawn.",
    ),
    edit(
        "calc_expected_gradient",
        "gradient_for_log_probs",
        "return torch.autograd.grad(old_logprobs.exp() @ per_token, logits)[0]",
        "return torch.autograd.grad(old_logprobs.exp() @ per_token, logprobs)[0]",
        "This is the gradient for the log-probs, which cannot move freely: they sum to 1. Take it "
        "for the logits.",
    ),
    edit(
        "calc_expected_gradient",
        "policy_not_normalised",
        "logprobs = logits.log_softmax(-1)",
        "logprobs = logits * 1.0",
        "The policy's logits are taken for log-probs: log_softmax first.",
    ),
    edit(
        "calc_expected_gradient",
        "reference_not_normalised",
        "ref_logprobs = ref_logits.log_softmax(-1)",
        "ref_logprobs = ref_logits",
        "The reference's logits are taken for log-probs: log_softmax first.",
    ),
    edit(
        "calc_expected_gradient",
        "policy_log_with_an_epsilon",
        "logprobs = logits.log_softmax(-1)",
        "logprobs = (logits.softmax(-1) + 1e-8).log()",
        "A small number inside the policy's log changes the log-ratio of tokens that it hardly "
        "says, and their gradient. log_softmax needs none.",
    ),
    edit(
        "calc_expected_gradient",
        "reference_log_with_an_epsilon",
        "ref_logits.log_softmax(-1)",
        "(ref_logits.softmax(-1) + 1e-8).log()",
        "A small number inside the reference's log caps the log-ratio of tokens that are rare "
        "there. log_softmax needs none.",
    ),
    edit(
        "calc_expected_gradient",
        "always_k1",
        "calc_kl_estimate(logprobs, ref_logprobs, kind, old_logprobs)",
        'calc_kl_estimate(logprobs, ref_logprobs, "k1", old_logprobs)',
        "Every kind gives the gradient of k1: `kind` is not passed on.",
    ),
    edit(
        "calc_expected_gradient",
        "unknown_places_are_losses",
        'require(place in ("loss", "reward"),',
        "require(True,",
        "An unknown place is taken for the loss. A ValueError should name it.",
    ),
    edit(
        "calc_expected_gradient",
        "gradient_left_on_the_logits",
        "logits = logits.detach().requires_grad_()",
        "logits = logits if logits.requires_grad else logits.requires_grad_()",
        "The caller's logits require gradient afterwards: work on a detached copy.",
    ),
]


@wrong(
    "calc_expected_gradient",
    "This is the gradient of the estimate's expectation, in which the sampling is differentiated. "
    "The expected gradient is another thing: sample first, then differentiate.",
)
def gradient_of_the_expectation(logits, ref_logits, kind, place, sampler_logits=None):
    if kind not in ("k1", "k2", "k3", "k4") or place not in ("loss", "reward"):
        raise ValueError(f"unknown kind {kind} or place {place}")
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.detach().log_softmax(-1)
        weights = logprobs if sampler_logits is None else sampler_logits.detach().log_softmax(-1)
        estimates = calc_kl_estimate(logprobs, ref_logprobs, kind, weights)
        if place == "reward":
            estimates = estimates.detach()
        return torch.autograd.grad(weights.exp() @ estimates + 0 * logprobs.sum(), logits)[0]


@wrong(
    "calc_expected_gradient",
    "This is the gradient of the exact KL, whatever the estimator. Which estimators share it is "
    "what the function is there to find out.",
)
def of_the_exact_kl(logits, ref_logits, kind, place, sampler_logits=None):
    if kind not in ("k1", "k2", "k3", "k4") or place not in ("loss", "reward"):
        raise ValueError(f"unknown kind {kind} or place {place}")
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        return torch.autograd.grad(calc_exact_kl(logits, ref_logits), logits)[0]
