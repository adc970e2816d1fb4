"""Wrong answers to chapter 3, each with what a good teacher would say of it."""

import copy
import math
import re

import torch

from solutions.ch0_sampling import (
    Samples,
    get_logprobs,
    get_samples,
    masked_mean,
    select_completion,
)
from solutions.ch2_ppo import ReplayMinibatch, calc_kl_penalty
from solutions.ch3_grpo import (
    calc_grpo_objective,
    calc_per_token_kl,
    group_advantages,
    make_grpo_memory,
)
from utils.grading.answers import edit, wrong
from utils.rewards import call_reward_fn


def _check(rewards, group_size, scale):
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(f"group_size {group_size}")
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale {scale}")


def _views(mask):
    """Which entries of a flat view count, and the row of each of them."""
    kept = mask.view(-1)
    return kept, torch.arange(len(mask)).repeat_interleave(mask.shape[1])[kept]


# --- group_advantages ---------------------------------------------------------------------------

GROUPS = 'groups = rearrange(rewards.detach(), "(group member) -> group member", member=group_size)'
CHECKED = """_check_group_size(group_size, len(rewards))
    require(
        scale in ("group", "batch", "none"),
        f"scale should be 'group', 'batch' or 'none', but is {scale!r}",
    )
    """
BOTH_UNCHECKED = (
    "Neither group_size nor scale is checked: raise a ValueError that names the one that does not "
    "fit"
)

GROUP_ADVANTAGES = [
    edit(
        "group_advantages",
        "made_in_inference_mode",
        "@shape_checked\n",
        "@torch.inference_mode()\n@shape_checked\n",
        "What is made in inference_mode cannot stand in a later backward, as the advantages may in "
        "an objective: detach, or use no_grad.",
    ),
    edit(
        "group_advantages",
        "centred_already",
        "    centered = groups - groups.mean(-1, keepdim=True)\n",
        "    if rewards.mean() == 0:\n"
        "        return rewards.clone()\n"
        "    centered = groups - groups.mean(-1, keepdim=True)\n",
        "Rewards whose mean is 0 are returned as they are. Each group is centred and divided.",
    ),
    edit(
        "group_advantages",
        "std_of_a_population",
        "groups.std(-1, keepdim=True)",
        "groups.std(-1, keepdim=True, correction=0)",
        "The group's std divides by the number of rewards. It is estimated from few of them: "
        "divide by one less (ddof 1), as torch.std does unless told.",
    ),
    edit(
        "group_advantages",
        "batch_std_of_a_population",
        "groups.std()",
        "groups.std(correction=0)",
        "The std of the batch divides by the number of rewards: divide by one less (ddof 1), as "
        "torch.std does unless told.",
    ),
    edit(
        "group_advantages",
        "variance",
        "groups.std(-1, keepdim=True)",
        "groups.var(-1, keepdim=True)",
        "You divide by the group's variance. Divide by its std, or the advantages carry the "
        "inverse unit of the rewards.",
    ),
    edit(
        "group_advantages",
        "another_default_eps",
        "eps: float = 1e-4",
        "eps: float = 1e-8",
        "The default of eps should be 1e-4: it is what keeps groups of tiny differences from being "
        "blown up to full size.",
    ),
    edit(
        "group_advantages",
        "eps_left_out",
        "(groups.std(-1, keepdim=True) + eps)",
        "groups.std(-1, keepdim=True)",
        "eps has no effect on the scale 'group': add it to the group's std.",
    ),
    edit(
        "group_advantages",
        "eps_left_out_of_the_batch",
        "(groups.std() + eps)",
        "groups.std()",
        "eps has no effect on the scale 'batch': add it to the std of the batch.",
    ),
    edit(
        "group_advantages",
        "eps_under_the_root",
        "(groups.std(-1, keepdim=True) + eps)",
        "(groups.var(-1, keepdim=True) + eps).sqrt()",
        "eps is added to the variance, where it counts far more. Add it to the std.",
    ),
    edit(
        "group_advantages",
        "eps_as_a_floor",
        "(groups.std(-1, keepdim=True) + eps)",
        "groups.std(-1, keepdim=True).clamp(min=eps)",
        "eps is used as the least value of the std. Add it to the std, however large that is.",
    ),
    edit(
        "group_advantages",
        "not_detached",
        "rewards.detach()",
        "rewards",
        "Gradients flow through the advantages. They are constants of the policy gradient: detach "
        "them.",
    ),
    edit(
        "group_advantages",
        "rounding_noise_of_constant_groups",
        "centered.masked_fill(is_constant, 0.0)",
        "centered + 0",
        "A group of equal rewards should give exact zeros. In floats their mean need not equal "
        "them, and the division by a tiny std blows the difference up: test max == min.",
    ),
    edit(
        "group_advantages",
        "small_spreads_count_as_constant",
        "groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)",
        "groups.std(-1, keepdim=True) < 1e-4",
        "Groups whose rewards differ little are treated as constant. Only equal rewards give "
        "zeros; eps takes care of small differences.",
    ),
    edit(
        "group_advantages",
        "ties_count_as_constant",
        "groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)",
        "(groups[:, 1:] == groups[:, :-1]).any(-1, keepdim=True)",
        "A group counts as constant as soon as two of its rewards are equal, as rewards of 0 or 1 "
        "often are. All of them have to be.",
    ),
    edit(
        "group_advantages",
        "first_and_last_alone",
        "groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)",
        "groups[:, :1] == groups[:, -1:]",
        "A group counts as constant if its first and last reward are equal. Those between them "
        "may differ.",
    ),
    edit(
        "group_advantages",
        "variance_in_one_pass",
        "groups.std(-1, keepdim=True)",
        "((groups.square().mean(-1, keepdim=True) - groups.mean(-1, keepdim=True).square()).clamp("
        "min=0) * group_size / (group_size - 1)).sqrt()",
        "The variance is the mean square less the squared mean, which cancels where the rewards "
        "are large beside their spread. Center first, as torch.std does.",
    ),
    edit(
        "group_advantages",
        "batch_std_of_centered_rewards",
        "groups.std()",
        "centered.std()",
        "The scale 'batch' divides by the std of the raw rewards; yours is that of the centered "
        "ones, which leaves out how the prompts' means differ.",
    ),
    edit(
        "group_advantages",
        "batch_std_as_a_mean_of_stds",
        "groups.std()",
        "groups.std(-1).mean()",
        "The scale 'batch' divides by the std of all rewards of the batch taken together, not by "
        "the average of the groups' stds.",
    ),
    edit(
        "group_advantages",
        "batch_divides_by_the_groups_std",
        'scale == "group"',
        'scale in ("group", "batch")',
        "The scale 'batch' does the same as 'group'. It divides all groups by one number: the std "
        "of all rewards of the batch.",
    ),
    edit(
        "group_advantages",
        "none_is_scaled",
        'scale == "group"',
        'scale in ("group", "none")',
        "The scale 'none' should only subtract the group's mean: nothing is divided.",
    ),
    edit(
        "group_advantages",
        "another_default_scale",
        'scale: str = "group"',
        'scale: str = "none"',
        "Without a scale given, the advantages are not scaled. The default is 'group'.",
    ),
    edit(
        "group_advantages",
        "sign_flipped",
        "groups - groups.mean(-1, keepdim=True)",
        "groups.mean(-1, keepdim=True) - groups",
        "The sign is flipped: a reward above its group's mean is an advantage, and positive.",
    ),
    edit(
        "group_advantages",
        "leave_one_out",
        "groups - groups.mean(-1, keepdim=True)",
        "(groups - groups.mean(-1, keepdim=True)) * group_size / (group_size - 1)",
        "The baseline leaves out the completion's own reward, as in RLOO. GRPO subtracts the mean "
        "of the whole group.",
    ),
    edit(
        "group_advantages",
        "median",
        "groups - groups.mean(-1, keepdim=True)",
        "groups - groups.median(-1, keepdim=True).values",
        "The baseline is the group's median. GRPO subtracts its mean.",
    ),
    edit(
        "group_advantages",
        "batch_mean",
        "groups - groups.mean(-1, keepdim=True)",
        "groups - groups.mean()",
        "You subtract the mean of the whole batch, so that an easy prompt looks good throughout. "
        "Each group has a mean of its own.",
    ),
    edit(
        "group_advantages",
        "not_centered",
        "groups - groups.mean(-1, keepdim=True)",
        "groups",
        "The rewards are scaled but not centered: subtract the group's mean first.",
    ),
    edit(
        "group_advantages",
        "in_place",
        "groups - groups.mean(-1, keepdim=True)",
        "groups.sub_(groups.mean(-1, keepdim=True))",
        "The rewards that you were given are changed in place: a view of them still shares their "
        "memory. Make a new tensor.",
    ),
    edit(
        "group_advantages",
        "group_size_unchecked",
        "_check_group_size(group_size, len(rewards))",
        "pass",
        "A group_size that does not divide the batch should raise a ValueError that names "
        "group_size, rather than whatever the reshape says.",
    ),
    edit(
        "group_advantages",
        "groups_of_one_are_allowed",
        "isinstance(group_size, int) and group_size >= 2",
        "group_size != 0",
        "A completion alone has nothing to be compared with: a group_size below 2 is a ValueError "
        "that names group_size.",
        within="_check_group_size",
    ),
    edit(
        "group_advantages",
        "unknown_scale_accepted",
        'scale in ("group", "batch", "none")',
        "True",
        "An unknown scale passes in silence, and the rewards stay unscaled. Raise a ValueError "
        "that names scale.",
    ),
    edit(
        "group_advantages",
        "matrix_of_groups",
        'rearrange(centered, "group member -> (group member)")',
        "centered",
        "The result has an axis of groups and one of members. Return one advantage per reward, in "
        "the order of the rewards.",
    ),
    edit(
        "group_advantages",
        "clipped_to_10",
        "centered / (groups.std(-1, keepdim=True) + eps)",
        "(centered / (groups.std(-1, keepdim=True) + eps)).clamp(-10, 10)",
        "Advantages are not clipped: one hit in a large group is worth what it is worth.",
    ),
    edit(
        "group_advantages",
        "nearly_equal_counts_as_constant",
        "groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)",
        "torch.isclose(groups, groups[:, :1]).all(-1, keepdim=True)",
        "isclose takes rewards for equal that differ little beside their size. Only equal rewards "
        "give zeros.",
    ),
    edit(
        "group_advantages",
        "std_below_1e_6_counts_as_constant",
        "groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)",
        "groups.std(-1, keepdim=True) < 1e-6",
        "A std below 1e-6 is taken for 0. Rewards may be that small: only equal ones give zeros, "
        "and eps keeps the others from being blown up.",
    ),
    edit(
        "group_advantages",
        "none_as_an_object",
        'scale in ("group", "batch", "none")',
        'scale in ("group", "batch", "none", None)',
        'The scales are three strings, and None is not the string "none": raise a ValueError that '
        "names scale for it.",
    ),
    edit(
        "group_advantages",
        "scale_as_true_or_false",
        "    require(\n",
        '    scale = {True: "group", False: "none"}.get(scale, scale)\n    require(\n',
        "True and False are a library's older names of the scales. Here they are unknown ones: "
        "raise a ValueError that names scale.",
    ),
    edit(
        "group_advantages",
        "std_of_the_batch_attached",
        "groups.std()",
        "rewards.std()",
        "With the scale 'batch' a gradient flows through the std: take that of the detached "
        "rewards, too.",
    ),
    edit(
        "group_advantages",
        "std_below_eps_counts_as_constant",
        "groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)",
        "groups.std(-1, keepdim=True) < eps",
        "A std below eps is taken for 0. eps is added to it, whatever its size: only equal rewards "
        "give zeros.",
    ),
    edit(
        "group_advantages",
        "group_sizes_below_two_are_allowed",
        "isinstance(group_size, int) and group_size >= 2",
        "True",
        "A group_size of 0, 1 or less is not checked: below 2 there is nothing to compare, so "
        "raise a ValueError that names group_size.",
        within="_check_group_size",
    ),
    edit(
        "group_advantages",
        "nothing_checked",
        CHECKED,
        "",
        f"{BOTH_UNCHECKED}, rather than what rearrange says.",
    ),
    edit(
        "group_advantages",
        "nothing_checked_before_reshape",
        f"{CHECKED}{GROUPS}",
        "groups = rewards.detach().reshape(-1, group_size)",
        f"{BOTH_UNCHECKED}, rather than what reshape says.",
    ),
    edit(
        "group_advantages",
        "group_size_unchecked_before_reshape",
        f"{CHECKED}{GROUPS}",
        f"{CHECKED.partition(chr(10))[2].strip()}\n"
        "    groups = rewards.detach().reshape(-1, group_size)",
        "group_size is not checked: raise a ValueError that names it where it is below 2 or does "
        "not divide the batch, rather than what reshape says.",
    ),
    edit(
        "group_advantages",
        "equal_rewards_before_the_checks",
        "    _check_group_size(group_size, len(rewards))\n",
        "    if rewards.max() == rewards.min():\n"
        "        return torch.zeros_like(rewards)\n"
        "    _check_group_size(group_size, len(rewards))\n",
        "Where all rewards are equal you return before group_size and scale are checked. Check "
        "the arguments first.",
    ),
]


@wrong(
    "group_advantages",
    "The whole batch is normalised as one group. With several prompts each reward is compared with "
    "those of its own prompt only.",
)
def one_group_for_the_batch(rewards, group_size, scale="group", eps=1e-4):
    _check(rewards, group_size, scale)
    rewards = rewards.detach()
    centered = rewards - rewards.mean()
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    return centered if scale == "none" else centered / (rewards.std() + eps)


@wrong(
    "group_advantages",
    "You take every n-th reward as a group. The completions of a prompt stand side by side: "
    "reshape to [groups, group_size].",
)
def strided_groups(rewards, group_size, scale="group", eps=1e-4):
    _check(rewards, group_size, scale)
    groups = rewards.detach().reshape(group_size, -1)
    centered = groups - groups.mean(0)
    centered = centered.masked_fill(groups.amax(0) == groups.amin(0), 0.0)
    if scale != "none":
        centered = centered / (groups.std(0 if scale == "group" else None) + eps)
    return centered.flatten()


@wrong(
    "group_advantages",
    "group_size is taken for the number of groups. It is the number of completions of one prompt.",
)
def group_size_as_a_number_of_groups(rewards, group_size, scale="group", eps=1e-4):
    _check(rewards, group_size, scale)
    groups = rewards.detach().reshape(group_size, -1)
    centered = groups - groups.mean(-1, keepdim=True)
    is_constant = groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)
    centered = centered.masked_fill(is_constant, 0.0)
    if scale == "group":
        centered = centered / (groups.std(-1, keepdim=True) + eps)
    if scale == "batch":
        centered = centered / (groups.std() + eps)
    return centered.flatten()


@wrong(
    "group_advantages",
    "One constant group sets the advantages of the whole batch to zero. Treat each group for "
    "itself.",
)
def all_zeros_beside_a_constant_group(rewards, group_size, scale="group", eps=1e-4):
    _check(rewards, group_size, scale)
    groups = rewards.detach().reshape(-1, group_size)
    if (groups.amax(-1) == groups.amin(-1)).any():
        return torch.zeros_like(rewards)
    centered = groups - groups.mean(-1, keepdim=True)
    if scale == "group":
        centered = centered / (groups.std(-1, keepdim=True) + eps)
    if scale == "batch":
        centered = centered / (groups.std() + eps)
    return centered.flatten()


@wrong(
    "group_advantages",
    "The std of the batch is taken without its constant groups. The scale 'batch' is the std of "
    "all raw rewards.",
)
def batch_std_without_constant_groups(rewards, group_size, scale="group", eps=1e-4):
    _check(rewards, group_size, scale)
    groups = rewards.detach().reshape(-1, group_size)
    varied = groups.amax(-1, keepdim=True) != groups.amin(-1, keepdim=True)
    centered = (groups - groups.mean(-1, keepdim=True)) * varied
    if scale == "group":
        centered = centered / (groups.std(-1, keepdim=True) + eps)
    if scale == "batch" and varied.any():
        centered = centered / (groups[varied.squeeze(-1)].std() + eps)
    return centered.flatten()


# --- calc_single_update_objective ---------------------------------------------------------------

CALC_SINGLE_UPDATE_OBJECTIVE = [
    edit(
        "calc_single_update_objective",
        "single_mean_over_tokens",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "masked_mean(per_token, mask)",
        "You average over all tokens at once, so that long completions weigh more. Average each "
        "completion first, then the batch.",
        within="_mean_over_completions",
    ),
    edit(
        "calc_single_update_objective",
        "single_sum_over_tokens",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "per_token.masked_fill(~mask, 0.0).sum(-1).mean()",
        "Each completion's tokens are summed. Divide by its own number of tokens.",
        within="_mean_over_completions",
    ),
    edit(
        "calc_single_update_objective",
        "single_constant_denominator",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "per_token.masked_fill(~mask, 0.0).mean()",
        "Each completion is divided by the width of the tensor, as in Dr. GRPO. Divide by its own "
        "number of true positions.",
        within="_mean_over_completions",
    ),
    edit(
        "calc_single_update_objective",
        "single_empty_rows_left_out",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "masked_mean(masked_mean(per_token, mask, dim=-1), mask.any(-1))",
        "The batch mean leaves out empty completions. They count 0, but they count.",
        within="_mean_over_completions",
    ),
    edit(
        "calc_single_update_objective",
        "single_sum_over_the_batch",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "masked_mean(per_token, mask, dim=-1).sum()",
        "The completions are summed. Take their mean, or the step grows with the batch.",
        within="_mean_over_completions",
    ),
    edit(
        "calc_single_update_objective",
        "no_gradient",
        "logprobs - logprobs.detach()",
        "logprobs.detach() - logprobs.detach()",
        "The value is right, but there is no gradient: both log-probs are detached, or neither is, "
        "and then they cancel. Detach only the subtracted ones.",
    ),
    edit(
        "calc_single_update_objective",
        "detach_on_the_wrong_side",
        "logprobs - logprobs.detach()",
        "logprobs.detach() - logprobs",
        "The gradient has the wrong sign: the current policy stands in the numerator of the ratio. "
        "Subtract the detached log-probs.",
    ),
    edit(
        "calc_single_update_objective",
        "probabilities_for_ratios",
        "logprobs - logprobs.detach()",
        "logprobs",
        "exp(logprobs) is a probability. The ratio has the old policy below: subtract the detached "
        "log-probs.",
    ),
    edit(
        "calc_single_update_objective",
        "logratio_without_exp",
        "torch.exp(logprobs - logprobs.detach())",
        "(logprobs - logprobs.detach())",
        "The log-ratio is 0 and the ratio is 1: take exp of the difference.",
    ),
    edit(
        "calc_single_update_objective",
        "value_of_reinforce",
        "torch.exp(logprobs - logprobs.detach())",
        "logprobs",
        "The gradient is right, but the value is that of logprob * A. What is left of the ratio is "
        "exp(logprobs - detached logprobs), which is 1.",
    ),
    edit(
        "calc_single_update_objective",
        "single_loss",
        "return _mean",
        "return -_mean",
        "This is a loss. Objectives are maximised: leave the sign.",
    ),
    edit(
        "calc_single_update_objective",
        "single_advantages_not_detached",
        "advantages.detach()",
        "advantages",
        "Gradients flow into the advantages. They are constants: detach them.",
    ),
    edit(
        "calc_single_update_objective",
        "single_advantages_along_the_tokens",
        "advantages.detach()[:, None]",
        "(advantages.detach()[None, :] if len(advantages) == mask.shape[1] "
        "else advantages.detach()[:, None])",
        "Where there are as many completions as tokens, the advantages are laid along the tokens. "
        "Each belongs to a completion: add the axis of tokens with [:, None].",
    ),
    edit(
        "calc_single_update_objective",
        "single_broadcast_left_to_torch",
        "advantages.detach()[:, None]",
        "advantages.detach()",
        "Broadcasting lines advantages up with the last axis, that of the tokens. Add one with "
        "[:, None].",
    ),
    edit(
        "calc_single_update_objective",
        "single_absolute_advantages",
        "advantages.detach()[:, None]",
        "advantages.detach().abs()[:, None]",
        "A negative advantage should make its completion less likely: keep the sign.",
    ),
    edit(
        "calc_single_update_objective",
        "single_advantages_centered_again",
        "advantages.detach()[:, None]",
        "(advantages - advantages.mean()).detach()[:, None]",
        "The advantages are centered once more, over the batch. They are ready to use.",
    ),
    edit(
        "calc_single_update_objective",
        "single_nan_leaks_into_the_gradient",
        "logprobs = logprobs.masked_fill(~mask, 0.0)",
        "pass",
        "What lies beyond the mask reaches the gradient: in the backward pass 0 * nan is nan. "
        "Replace the masked log-probs before you use them.",
    ),
    edit(
        "calc_single_update_objective",
        "single_mean_over_tokens_of_unmasked",
        "    logprobs = logprobs.masked_fill(~mask, 0.0)\n    ratio = torch.exp(logprobs - "
        "logprobs.detach())\n    return _mean_over_completions(ratio * "
        "advantages.detach()[:, None], mask)",
        "    ratio = torch.exp(logprobs - logprobs.detach())\n"
        "    return masked_mean(ratio * advantages.detach()[:, None], mask)",
        "Two things: the mean is taken over all tokens at once, and not over each completion "
        "first; and what lies beyond the mask makes the gradient nan. Replace the masked log-probs "
        "before you use them.",
    ),
    edit(
        "calc_single_update_objective",
        "single_in_place",
        "logprobs = logprobs.masked_fill(~mask, 0.0)",
        "logprobs.data.masked_fill_(~mask, 0.0)",
        "The log-probs that you were given are changed in place. Make a new tensor.",
    ),
    edit(
        "calc_single_update_objective",
        "single_mask_forgotten",
        "return _mean_over_completions(ratio * advantages.detach()[:, None], mask)",
        "return (ratio * advantages.detach()[:, None]).mean()",
        "The mask is ignored: positions after a completion's end count as tokens.",
    ),
    edit(
        "calc_single_update_objective",
        "last_token_left_out",
        "advantages.detach()[:, None], mask)",
        "advantages.detach()[:, None], mask & torch.cat([mask[:, 1:], mask[:, :0], "
        "torch.zeros_like(mask[:, :1])], 1))",
        "The last true position of each completion does not count. It is the end of the text, and "
        "the policy is to learn when to stop.",
    ),
    edit(
        "calc_single_update_objective",
        "length_by_counting_logprobs",
        "return _mean_over_completions(ratio * advantages.detach()[:, None], mask)",
        "per_token = (ratio * advantages.detach()[:, None]).masked_fill(~mask, 0.0)\n"
        "    return (per_token.sum(-1) / logprobs.count_nonzero(-1).clamp(min=1)).mean()",
        "A completion's length is the number of its log-probs that are not 0. A token that was "
        "certain has log-prob 0, and counts: sum the mask.",
    ),
    edit(
        "calc_single_update_objective",
        "advantages_clipped",
        "advantages.detach()[:, None]",
        "advantages.detach().clamp(-10, 10)[:, None]",
        "The advantages are clipped. Nothing bounds them here.",
    ),
]


@wrong(
    "calc_single_update_objective",
    "A ratio of two probabilities is 0/0 where both underflow. Subtract log-probs, then take exp.",
)
def quotient_of_probabilities(logprobs, advantages, mask):
    logprobs = logprobs.masked_fill(~mask, 0.0)
    ratio = logprobs.exp() / logprobs.exp().detach()
    per_token = ratio * advantages.detach()[:, None] * mask
    return (per_token.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


@wrong(
    "calc_single_update_objective",
    "An empty completion divides 0 by 0. Let it count 0: clamp the number of tokens at 1.",
)
def single_zero_by_zero(logprobs, advantages, mask):
    logprobs = logprobs.masked_fill(~mask, 0.0)
    per_token = torch.exp(logprobs - logprobs.detach()) * advantages.detach()[:, None] * mask
    return (per_token.sum(-1) / mask.sum(-1)).mean()


@wrong(
    "calc_single_update_objective",
    "Multiplying by the mask does not remove what lies beyond it: 0 * nan is nan. Use masked_fill "
    "or torch.where on the log-probs.",
)
def single_multiplied_by_the_mask(logprobs, advantages, mask):
    per_token = torch.exp(logprobs - logprobs.detach()) * advantages.detach()[:, None] * mask
    return (per_token.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


@wrong(
    "calc_single_update_objective",
    "What counts is told by the mask, not by NaN: in training, what is masked out is finite.",
)
def mask_from_isfinite(logprobs, advantages, mask):
    valid = torch.isfinite(logprobs)
    logprobs = torch.where(valid, logprobs, 0.0)
    ratio = torch.exp(logprobs - logprobs.detach())
    per_token = torch.where(valid, ratio * advantages.detach()[:, None], 0.0)
    return (per_token.sum(1) / valid.sum(1).clamp(min=1)).mean()


@wrong(
    "calc_single_update_objective",
    "view() raises an error on log-probs that are a slice of a larger tensor. Index with the mask.",
)
def single_views_of_the_logprobs(logprobs, advantages, mask):
    kept, row = _views(mask)
    chosen = logprobs.view(-1)[kept]
    gains = (chosen - chosen.detach()).exp() * advantages.detach()[row]
    return (gains / mask.sum(-1)[row]).sum() / len(mask)


@wrong(
    "calc_single_update_objective",
    "torch.zeros is float32, and float64 log-probs give terms that do not fit in. zeros_like has "
    "their dtype.",
)
def single_terms_in_float32(logprobs, advantages, mask):
    chosen, rows = logprobs[mask], mask.nonzero()[:, 0]
    per_token = torch.zeros(mask.shape)
    per_token[mask] = torch.exp(chosen - chosen.detach()) * advantages.detach()[rows]
    return (per_token.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


# --- calc_per_token_kl --------------------------------------------------------------------------

CALC_PER_TOKEN_KL = [
    edit(
        "calc_per_token_kl",
        "square_of_small_differences",
        "return torch.expm1(d) - d",
        "return torch.where(d.abs() < 1e-2, d.square() / 2, torch.exp(d) - 1 - d)",
        "Where d is small you take d^2/2, which leaves out d^3/6: 0.3% of k3 at 0.01. "
        "torch.expm1(d) keeps the digits for every d.",
    ),
    edit(
        "calc_per_token_kl",
        "other_direction",
        "ref_logprobs.detach() - logprobs",
        "logprobs - ref_logprobs.detach()",
        "The ratio is upside down: samples come from the policy, so k3 takes d = ref_logprobs - "
        "logprobs.",
    ),
    edit(
        "calc_per_token_kl",
        "digits_lost",
        "torch.expm1(d) - d",
        "torch.exp(d) - 1 - d",
        "For small differences exp(d) - 1 loses the digits that count, and the estimate can come "
        "out negative. torch.expm1 keeps them.",
    ),
    edit(
        "calc_per_token_kl",
        "clamped_at_zero",
        "torch.expm1(d) - d",
        "(torch.exp(d) - 1 - d).clamp(min=0)",
        "The clamp hides the negative values, but the digits are lost all the same, and with them "
        "the gradient. Use torch.expm1.",
    ),
    edit(
        "calc_per_token_kl",
        "absolute_value",
        "torch.expm1(d) - d",
        "(torch.exp(d) - 1 - d).abs()",
        "The absolute value hides the sign of a rounding error. torch.expm1 does not make it in "
        "the first place.",
    ),
    edit(
        "calc_per_token_kl",
        "k1",
        "torch.expm1(d) - d",
        "-d",
        "This is k1, the plain log-ratio: as a loss its expected gradient is zero. k3 adds "
        "exp(d) - 1.",
    ),
    edit(
        "calc_per_token_kl",
        "k1_flipped",
        "torch.expm1(d) - d",
        "d",
        "This is the log-ratio with its sign flipped. k3 is exp(d) - 1 - d.",
    ),
    edit(
        "calc_per_token_kl",
        "k2",
        "torch.expm1(d) - d",
        "d.square() / 2",
        "This is k2, half the square of the log-ratio. It agrees with k3 for small differences "
        "only.",
    ),
    edit(
        "calc_per_token_kl",
        "absolute_difference",
        "torch.expm1(d) - d",
        "d.abs()",
        "This is the size of the log-ratio. k3 is exp(d) - 1 - d.",
    ),
    edit(
        "calc_per_token_kl",
        "one_not_subtracted",
        "torch.expm1(d) - d",
        "torch.exp(d) - d",
        "Two policies that agree have a KL of 1 here: subtract 1.",
    ),
    edit(
        "calc_per_token_kl",
        "plus_d",
        "torch.expm1(d) - d",
        "torch.expm1(d) + d",
        "The sign of the last term is wrong: expm1(d) + d is negative wherever d is.",
    ),
    edit(
        "calc_per_token_kl",
        "negative",
        "torch.expm1(d) - d",
        "d - torch.expm1(d)",
        "The sign is flipped: the estimate of a KL is never negative. The objective subtracts it.",
    ),
    edit(
        "calc_per_token_kl",
        "without_exp",
        "torch.expm1(d) - d",
        "d.exp() - 1",
        "This is the ratio less 1, whose mean is 0. Subtract the log-ratio d as well.",
    ),
    edit(
        "calc_per_token_kl",
        "k4",
        "torch.expm1(d) - d",
        "-d * torch.exp(-d)",
        "This weighs the log-ratio with the ratio of policy to reference. k3 is exp(d) - 1 - d.",
    ),
    edit(
        "calc_per_token_kl",
        "averaged",
        "torch.expm1(d) - d",
        "(torch.expm1(d) - d).mean()",
        "The estimate is averaged. Return one number per token: the mask is not known here.",
    ),
    edit(
        "calc_per_token_kl",
        "difference_clamped",
        "torch.expm1(d) - d",
        "torch.expm1(d.clamp(-10, 10)) - d.clamp(-10, 10)",
        "Large differences are cut off, and with them the gradient that would bring the policy "
        "back.",
    ),
    edit(
        "calc_per_token_kl",
        "reference_not_detached",
        "ref_logprobs.detach()",
        "ref_logprobs",
        "Gradients flow into the reference. It is frozen: detach it.",
    ),
    edit(
        "calc_per_token_kl",
        "policy_detached",
        "ref_logprobs.detach() - logprobs",
        "ref_logprobs.detach() - logprobs.detach()",
        "The values are right, but no gradient holds the policy near the reference. Detach the "
        "reference only.",
    ),
    edit(
        "calc_per_token_kl",
        "ratio_detached",
        "torch.expm1(d) - d",
        "torch.expm1(d.detach()) - d",
        "The gradient flows through the last term only, which makes it that of k1. Leave the ratio "
        "attached.",
    ),
    edit(
        "calc_per_token_kl",
        "other_direction_not_detached",
        "ref_logprobs.detach() - logprobs",
        "logprobs - ref_logprobs",
        "Two things: the ratio is upside down, since k3 takes d = ref_logprobs - logprobs; and "
        "gradients flow into the reference, which is frozen: detach it.",
    ),
    edit(
        "calc_per_token_kl",
        "digits_lost_not_detached",
        "d = ref_logprobs.detach() - logprobs\n    return torch.expm1(d) - d",
        "d = ref_logprobs - logprobs\n    return torch.exp(d) - 1 - d",
        "Two things: for small differences exp(d) - 1 loses the digits that count, which "
        "torch.expm1 keeps; and gradients flow into the reference, which is frozen: detach it.",
    ),
    edit(
        "calc_per_token_kl",
        "other_direction_digits_lost",
        "d = ref_logprobs.detach() - logprobs\n    return torch.expm1(d) - d",
        "d = logprobs - ref_logprobs.detach()\n    return torch.exp(d) - 1 - d",
        "Two things: the ratio is upside down, since k3 takes d = ref_logprobs - logprobs; and for "
        "small differences exp(d) - 1 loses the digits that count, which torch.expm1 keeps.",
    ),
    edit(
        "calc_per_token_kl",
        "no_gradient_where_large",
        "return torch.expm1(d) - d",
        "kl = torch.expm1(d) - d\n    return torch.where(kl > 100, kl.detach(), kl)",
        "Where k3 is large it has no gradient, so that nothing brings the policy back from where "
        "it is farthest off. Leave it attached.",
    ),
]


@wrong(
    "calc_per_token_kl",
    "Probabilities underflow where log-probs are small. Subtract the log-probs first, then "
    "exponentiate.",
)
def k3_from_probabilities(logprobs, ref_logprobs):
    ratio = ref_logprobs.detach().exp() / logprobs.exp()
    return ratio - 1 - ratio.log()


@wrong(
    "calc_per_token_kl",
    "Each term of a sum over the vocabulary would carry its probability. Tokens that were sampled "
    "from the policy have it already: leave the weight out.",
)
def weighted_with_the_probability(logprobs, ref_logprobs):
    d = ref_logprobs.detach() - logprobs
    return logprobs.exp() * (torch.expm1(d) - d)


@wrong(
    "calc_per_token_kl",
    "The reference's log-probs are changed in place: detach() shares their memory. Make a new "
    "tensor.",
)
def reference_in_place(logprobs, ref_logprobs):
    d = ref_logprobs.detach().sub_(logprobs)
    return torch.expm1(d) - d


@wrong(
    "calc_per_token_kl",
    "The series for small differences is cut off too early. expm1 is right everywhere.",
)
def series_for_small_differences(logprobs, ref_logprobs):
    d = ref_logprobs.detach() - logprobs
    return torch.where(d.abs() < 5e-4, d**2 / 2 + d**3 / 6, torch.exp(d) - 1 - d)


@wrong(
    "calc_per_token_kl",
    "view() raises an error on log-probs that are a slice of a larger tensor. k3 needs no view.",
)
def views_of_k3(logprobs, ref_logprobs):
    d = ref_logprobs.detach().view(-1) - logprobs.view(-1)
    return (torch.expm1(d) - d).view(logprobs.shape)


# --- calc_grpo_objective ------------------------------------------------------------------------


def _mean_by_completion(per_token, mask):
    return (per_token.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def _per_token(advantages, mask):
    return (advantages[:, None] if advantages.ndim == 1 else advantages).detach().expand_as(mask)


def _k3(logprobs, ref_logprobs):
    d = ref_logprobs.detach() - logprobs
    return torch.expm1(d) - d


CALC_GRPO_OBJECTIVE = [
    edit(
        "calc_grpo_objective",
        "kl_multiplied_by_a_beta_of_0",
        "if beta != 0:",
        "if ref_logprobs is not None:",
        "With beta 0 the KL is computed all the same: where k3 overflows, 0 * inf is nan. Leave it "
        "out.",
    ),
    edit(
        "calc_grpo_objective",
        "log_ratios_held_at_ten",
        "ratio = calc_ratio(logprobs, old_logprobs, mask)",
        "ratio = (logprobs - old_logprobs.detach()).masked_fill(~mask, 0.0).clamp(-10, 10).exp()",
        "A log-ratio beyond 10 is cut: a token of negative advantage has no gradient there. A "
        "bound belongs where exp would overflow, near 80.",
    ),
    edit(
        "calc_grpo_objective",
        "maximum",
        "torch.minimum(",
        "torch.maximum(",
        "You take the larger of clipped and unclipped. The smaller one is the pessimistic choice: "
        "it takes away what the policy would gain beyond the interval.",
    ),
    edit(
        "calc_grpo_objective",
        "never_clipped",
        "torch.minimum(ratio * advantages, clipped * advantages)",
        "ratio * advantages",
        "The ratio is never clipped: take the minimum with the clipped ratio times A.",
    ),
    edit(
        "calc_grpo_objective",
        "always_clipped",
        "torch.minimum(ratio * advantages, clipped * advantages)",
        "clipped * advantages",
        "Only the clipped ratio counts, so that a bad step beyond the interval has no gradient "
        "back. Take the minimum of both.",
    ),
    edit(
        "calc_grpo_objective",
        "minimum_of_the_ratios",
        "torch.minimum(ratio * advantages, clipped * advantages)",
        "torch.minimum(ratio, clipped) * advantages",
        "The minimum is taken before the advantage comes in, which is the maximum for negative "
        "advantages. Multiply each by A first.",
    ),
    edit(
        "calc_grpo_objective",
        "clipped_a_second_time",
        "torch.minimum(ratio * advantages, clipped * advantages)",
        "torch.minimum(ratio.clamp(max=3) * advantages, clipped * advantages)",
        "Large ratios are bounded for negative advantages as well (dual clip). In GRPO what the "
        "policy loses beyond the interval counts in full.",
    ),
    edit(
        "calc_grpo_objective",
        "unclipped_below_for_negative_advantages",
        "clipped * advantages)",
        "torch.where(advantages < 0, ratio, clipped) * advantages)",
        "Negative advantages are never clipped. A ratio below 1 - clip_coef has done what they ask "
        "for, and should gain nothing more.",
    ),
    edit(
        "calc_grpo_objective",
        "product_clipped",
        "clipped * advantages)",
        "(ratio * advantages).clamp(1 - clip_coef, 1 + high))",
        "You clip ratio times A. Clip the ratio, then multiply by A.",
    ),
    edit(
        "calc_grpo_objective",
        "no_old_policy",
        "calc_ratio(logprobs, old_logprobs, mask)",
        "calc_ratio(logprobs, logprobs, mask)",
        "The ratio is taken against the current policy, and is always 1. Subtract old_logprobs, "
        "from the time of sampling.",
    ),
    edit(
        "calc_grpo_objective",
        "ratio_upside_down",
        "calc_ratio(logprobs, old_logprobs, mask)",
        "1 / calc_ratio(logprobs, old_logprobs, mask)",
        "The ratio is upside down: the current policy over the old one.",
    ),
    edit(
        "calc_grpo_objective",
        "reference_for_the_old_policy",
        "calc_ratio(logprobs, old_logprobs, mask)",
        "calc_ratio(logprobs, old_logprobs if ref_logprobs is None else ref_logprobs, mask)",
        "The ratio is taken against the reference. Its denominator is the policy that sampled: "
        "old_logprobs.",
    ),
    edit(
        "calc_grpo_objective",
        "logratio",
        "calc_ratio(logprobs, old_logprobs, mask)",
        "calc_ratio(logprobs, old_logprobs, mask).log()",
        "exp is missing: the ratio is exp(logprobs - old_logprobs).",
    ),
    edit(
        "calc_grpo_objective",
        "quotient_of_logprobs",
        "calc_ratio(logprobs, old_logprobs, mask)",
        "(logprobs / old_logprobs.detach()).masked_fill(~mask, 1.0)",
        "You divide one log-prob by the other. A quotient of probabilities is exp of the "
        "difference of their logs.",
    ),
    edit(
        "calc_grpo_objective",
        "logratio_bounded_too_tightly",
        "calc_ratio(logprobs, old_logprobs, mask)",
        "calc_ratio(logprobs.clamp(old_logprobs.detach() - 0.5, old_logprobs.detach() + 0.5), "
        "old_logprobs, mask)",
        "The log-ratio is bounded so tightly that the unclipped branch loses its gradient, too. A "
        "bound against overflow belongs far outside the clip.",
    ),
    edit(
        "calc_grpo_objective",
        "ratio_of_the_sequence",
        "calc_ratio(logprobs, old_logprobs, mask)",
        "calc_ratio(*(masked_mean(x, mask, -1)[:, None].expand_as(mask) "
        "for x in (logprobs, old_logprobs)), mask)",
        "One ratio for the whole completion is GSPO. In GRPO each token has its own.",
    ),
    edit(
        "calc_grpo_objective",
        "upper_clip_ignored",
        "high = clip_coef if clip_coef_high is None else clip_coef_high",
        "high = clip_coef",
        "clip_coef_high has no effect. The interval is [1 - clip_coef, 1 + clip_coef_high].",
    ),
    edit(
        "calc_grpo_objective",
        "upper_clip_of_zero_ignored",
        "high = clip_coef if clip_coef_high is None else clip_coef_high",
        "high = clip_coef_high or clip_coef",
        "`clip_coef_high or clip_coef` takes 0 for missing. Only None stands for clip_coef.",
    ),
    edit(
        "calc_grpo_objective",
        "clips_swapped",
        "ratio.clamp(1 - clip_coef, 1 + high)",
        "ratio.clamp(1 - high, 1 + clip_coef)",
        "The two clips are swapped: clip_coef bounds the ratio from below, clip_coef_high from "
        "above.",
    ),
    edit(
        "calc_grpo_objective",
        "upper_clip_on_both_sides",
        "ratio.clamp(1 - clip_coef, 1 + high)",
        "ratio.clamp(1 - high, 1 + high)",
        "clip_coef_high bounds the ratio on both sides. Below it is clip_coef that counts.",
    ),
    edit(
        "calc_grpo_objective",
        "reciprocal_interval",
        "ratio.clamp(1 - clip_coef, 1 + high)",
        "ratio.clamp(1 / (1 + clip_coef), 1 + high)",
        "The lower end of the interval is 1 - clip_coef, not 1 / (1 + clip_coef).",
    ),
    edit(
        "calc_grpo_objective",
        "another_default_clip",
        "clip_coef: float = 0.2",
        "clip_coef: float = 0.1",
        "The default of clip_coef should be 0.2.",
    ),
    edit(
        "calc_grpo_objective",
        "another_default_upper_clip",
        "clip_coef_high: float | None = None",
        "clip_coef_high: float | None = 0.28",
        "The default of clip_coef_high is clip_coef. The 0.28 is DAPO's.",
    ),
    edit(
        "calc_grpo_objective",
        "another_default_beta",
        "beta: float = 0.04",
        "beta: float = 0.1",
        "The default of beta should be 0.04, as in the paper.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_left_out",
        "objective = objective - beta * kl",
        "pass",
        "The KL penalty is missing: subtract beta * k3 from each token.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_rewarded",
        "objective - beta * kl",
        "objective + beta * kl",
        "The KL is added, which rewards leaving the reference. This is maximised: subtract it.",
    ),
    edit(
        "calc_grpo_objective",
        "beta_forgotten",
        "objective - beta * kl",
        "objective - kl",
        "The KL is subtracted at full weight: multiply it by beta.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_detached",
        "objective - beta * kl",
        "objective - beta * kl.detach()",
        "The KL has no gradient here, so it changes the number and not the policy. Leave it "
        "attached.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_times_the_advantage",
        "objective - beta * kl",
        "objective - beta * kl * advantages",
        "The KL is multiplied by the advantage: where that is negative, the penalty becomes a "
        "reward. It stands apart from the surrogate.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_weighted_by_the_ratio",
        "objective - beta * kl",
        "objective - beta * ratio * kl",
        "The KL is multiplied by the ratio, as newer libraries do. The paper's equation, and this "
        "one, has plain k3.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_only_where_not_clipped",
        "objective - beta * kl",
        "objective - beta * kl * (ratio == clipped)",
        "Clipped tokens escape the KL. The clip concerns the surrogate only.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_mean_over_tokens",
        "objective - beta * kl",
        "objective - beta * masked_mean(kl, mask) * len(mask) / mask.any(-1).sum().clamp(min=1)",
        "The KL is averaged over all tokens of the batch. It belongs to each token, inside the "
        "mean over its completion.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_upside_down",
        "calc_per_token_kl(",
        "(lambda p, q: torch.expm1(p - q.detach()) + q.detach() - p)(",
        "The KL takes the ratio upside down: k3 has d = ref_logprobs - logprobs.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_by_k1",
        "calc_per_token_kl(",
        "(lambda p, q: p - q.detach())(",
        "The KL is the plain log-ratio, k1, whose expected gradient as a loss is zero. Use k3.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_by_k2",
        "calc_per_token_kl(",
        "(lambda p, q: (q.detach() - p).square() / 2)(",
        "The KL is half the squared log-ratio, k2. GRPO uses k3.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_against_the_old_policy",
        "ref_logprobs.masked_fill(~mask, 0.0)",
        "old_logprobs.masked_fill(~mask, 0.0)",
        "The KL is measured from the old policy. It holds the policy near the reference: "
        "ref_logprobs.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_of_the_old_policy",
        "logprobs.masked_fill(~mask, 0.0), ref",
        "old_logprobs.masked_fill(~mask, 0.0), ref",
        "The KL is that of the policy that sampled, which no update changes. Use the current "
        "log-probs.",
    ),
    edit(
        "calc_grpo_objective",
        "reference_gets_a_gradient",
        "calc_per_token_kl(",
        "(lambda p, q: torch.expm1(q - p) - (q - p))(",
        "Gradients flow into the reference's log-probs. It is frozen: detach them.",
    ),
    edit(
        "calc_grpo_objective",
        "reference_always_needed",
        "if beta != 0:",
        "if True:",
        "With beta 0 there is no KL and ref_logprobs may be None: leave the term out.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_left_out_without_a_reference",
        "high = clip_coef if clip_coef_high is None else clip_coef_high",
        "high = clip_coef if clip_coef_high is None else clip_coef_high\n"
        "    beta = 0.0 if ref_logprobs is None else beta",
        "Without ref_logprobs the KL is left out in silence, whatever beta is. Only with beta 0 "
        "may they be None; otherwise it is an error.",
    ),
    edit(
        "calc_grpo_objective",
        "kl_of_clamped_differences",
        "calc_per_token_kl(",
        "(lambda p, q: calc_per_token_kl(p, p + (q - p).clamp(-20, 20)))(",
        "Log-ratios to the reference are clamped to 20, as some libraries do. Beyond that no "
        "gradient brings the policy back.",
    ),
    edit(
        "calc_grpo_objective",
        "mean_over_tokens",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "masked_mean(per_token, mask)",
        "You average over all tokens at once, as DAPO does. GRPO averages each completion first, "
        "then the batch.",
        within="_mean_over_completions",
    ),
    edit(
        "calc_grpo_objective",
        "sum_over_tokens",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "per_token.masked_fill(~mask, 0.0).sum(-1).mean()",
        "Each completion's tokens are summed. Divide by its own number of tokens.",
        within="_mean_over_completions",
    ),
    edit(
        "calc_grpo_objective",
        "constant_denominator",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "per_token.masked_fill(~mask, 0.0).mean()",
        "Each completion is divided by the width of the tensor, as in Dr. GRPO. Divide by its own "
        "number of true positions.",
        within="_mean_over_completions",
    ),
    edit(
        "calc_grpo_objective",
        "empty_rows_left_out",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "masked_mean(masked_mean(per_token, mask, dim=-1), mask.any(-1))",
        "The batch mean leaves out empty completions. They count 0, but they count.",
        within="_mean_over_completions",
    ),
    edit(
        "calc_grpo_objective",
        "sum_over_the_batch",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "masked_mean(per_token, mask, dim=-1).sum()",
        "The completions are summed. Take their mean, or the step grows with the batch.",
        within="_mean_over_completions",
    ),
    edit(
        "calc_grpo_objective",
        "zero_by_zero",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "(per_token.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1)).mean()",
        "An empty completion divides 0 by 0. Let it count 0: clamp the number of tokens at 1.",
        within="_mean_over_completions",
    ),
    edit(
        "calc_grpo_objective",
        "loss",
        "return _mean",
        "return -_mean",
        "This is a loss. Objectives are maximised: leave the sign.",
    ),
    edit(
        "calc_grpo_objective",
        "advantages_not_detached",
        "advantages.detach()",
        "advantages",
        "Gradients flow into the advantages. They are constants: detach them.",
    ),
    edit(
        "calc_grpo_objective",
        "advantages_along_the_tokens",
        "advantages[:, None].expand_as(logprobs)",
        "(advantages[None] if len(advantages) == mask.shape[1] else advantages[:, None])"
        ".expand_as(logprobs)",
        "Where there are as many completions as tokens, the advantages are laid along the tokens. "
        "Each belongs to a completion: add the axis of tokens with [:, None].",
    ),
    edit(
        "calc_grpo_objective",
        "advantages_of_tokens_not_accepted",
        "if advantages.ndim == 1:",
        "if True:",
        "Advantages may also come one per token, [batch completion]: only those of one axis need "
        "another.",
    ),
    edit(
        "calc_grpo_objective",
        "one_advantage_per_row",
        "advantages = advantages.detach()",
        "advantages = advantages[:, :1].expand_as(mask).detach()",
        "Advantages that differ from token to token are reduced to the first of the row. Use each "
        "at its own token.",
    ),
    edit(
        "calc_grpo_objective",
        "advantages_normalised_again",
        "advantages = advantages.detach().masked_fill(~mask, 0.0)",
        "advantages = advantages.detach().masked_fill(~mask, 0.0); "
        "advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)",
        "The advantages are normalised once more. They are ready to use: another mean would undo "
        "the comparison within the group.",
    ),
    edit(
        "calc_grpo_objective",
        "absolute_advantages",
        "advantages = advantages.detach()",
        "advantages = advantages.detach().abs()",
        "A negative advantage should make its completion less likely: keep the sign.",
    ),
    edit(
        "calc_grpo_objective",
        "changed_in_place",
        "ratio = calc_ratio(",
        "logprobs.data.masked_fill_(~mask, 0.0); ratio = calc_ratio(",
        "The log-probs that you were given are changed in place. Make a new tensor.",
    ),
    edit(
        "calc_grpo_objective",
        "advantages_of_zero_left_out",
        "return _mean_over_completions(objective, mask)",
        "counts = (advantages != 0).any(-1) | ~mask.any(-1); "
        "return _mean_over_completions(objective[counts], mask[counts])",
        "Completions whose advantage is 0 are left out of the mean. They count: their KL pulls, "
        "and the others weigh less beside them.",
    ),
    edit(
        "calc_grpo_objective",
        "surrogate_detached",
        "objective = torch.minimum(",
        "objective = 0 * logprobs.nan_to_num(0, 0, 0) + torch.no_grad()(torch.minimum)(",
        "Only the KL has a gradient: nothing would learn from the rewards. Do not detach the ratio "
        "of the current policy.",
    ),
    edit(
        "calc_grpo_objective",
        "tokens_of_zero_advantage_left_out",
        "    advantages = advantages.detach()",
        "    else:\n        mask = mask & (advantages != 0)\n    advantages = advantages.detach()",
        "A token whose advantage is 0 is still a token: it counts in the mean and has a KL.",
    ),
    edit(
        "calc_grpo_objective",
        "log_ratio_clamped",
        "ratio = calc_ratio(logprobs, old_logprobs, mask)",
        "ratio = (logprobs - old_logprobs.detach()).masked_fill(~mask, 0.0).clamp(-5, 5).exp()",
        "The log-ratio is clamped before exp: a large ratio with a negative advantage loses its "
        "gradient, just where it is needed.",
    ),
    edit(
        "calc_grpo_objective",
        "clip_of_zero_taken_for_missing",
        "high = clip_coef if clip_coef_high is None else clip_coef_high",
        "clip_coef = clip_coef or 0.2\n"
        "    high = clip_coef if clip_coef_high is None else clip_coef_high",
        "A clip_coef of 0 is taken for missing. It is a value: the interval is then 1 alone.",
    ),
    edit(
        "calc_grpo_objective",
        "length_by_counting_logprobs",
        "return _mean_over_completions(objective, mask)",
        "counts = logprobs.masked_fill(~mask, 0.0).count_nonzero(-1).clamp(min=1)\n"
        "    return (objective.masked_fill(~mask, 0.0).sum(-1) / counts).mean()",
        "A completion's length is the number of its log-probs that are not 0. A token that is "
        "certain has log-prob 0, and counts: sum the mask.",
    ),
    edit(
        "calc_grpo_objective",
        "advantages_squeezed",
        "    if advantages.ndim == 1:",
        "    advantages = advantages.squeeze()\n    if advantages.ndim <= 1:\n"
        "        advantages = advantages.reshape(-1)",
        "squeeze() also drops the axis of completions where there is a single one: the advantages "
        "of its tokens are then taken for those of completions.",
    ),
    edit(
        "calc_grpo_objective",
        "logprobs_clamped",
        "ratio = calc_ratio(logprobs, old_logprobs, mask)",
        "logprobs, old_logprobs = logprobs.clamp(min=-10), old_logprobs.clamp(min=-10)\n"
        "    ratio = calc_ratio(logprobs, old_logprobs, mask)",
        "Log-probs are clamped from below: the ratio of an unlikely token becomes 1, and nothing "
        "is learned from it.",
    ),
    edit(
        "calc_grpo_objective",
        "no_kl_without_advantages",
        "    ratio = calc_ratio(",
        "    if not advantages.any():\n"
        "        return 0.0 * logprobs.masked_fill(~mask, 0.0).sum()\n"
        "    ratio = calc_ratio(",
        "Where all advantages are 0 you return 0. The KL is left, and its gradient.",
    ),
    edit(
        "calc_grpo_objective",
        "log_ratio_times_the_mask",
        "calc_ratio(logprobs, old_logprobs, mask)",
        "((logprobs - old_logprobs.detach()) * mask).exp()",
        "The log-ratio is multiplied by the mask, which leaves nan, because 0 * nan is nan. Use "
        "masked_fill or torch.where.",
    ),
    edit(
        "calc_grpo_objective",
        "advantages_clipped",
        "advantages.detach().masked_fill(~mask, 0.0)",
        "advantages.detach().masked_fill(~mask, 0.0).clamp(-10, 10)",
        "The advantages are clipped. Only the ratio is.",
    ),
]


@wrong(
    "calc_grpo_objective",
    "The old log-probs get a gradient as well, opposite to the policy's. They are numbers from the "
    "time of sampling: detach them.",
)
def old_policy_not_detached(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    logprobs, old_logprobs = logprobs.masked_fill(~mask, 0), old_logprobs.masked_fill(~mask, 0)
    advantages = _per_token(advantages, mask).masked_fill(~mask, 0)
    ratio = (logprobs - old_logprobs).clamp(max=80).exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if beta:
        objective = objective - beta * _k3(logprobs, ref_logprobs.masked_fill(~mask, 0))
    return _mean_by_completion(objective * mask, mask)


@wrong(
    "calc_grpo_objective",
    "The value is right but the gradient is nan: log-probs behind the mask are used before they "
    "are replaced, and in the backward pass 0 * nan is nan. calc_ratio masks its own; "
    "calc_per_token_kl, which knows no mask, has to be given masked ones.",
)
def masked_at_the_end(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    advantages = _per_token(advantages, mask)
    ratio = (logprobs - old_logprobs.detach()).clamp(max=80).exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if beta:
        objective = objective - beta * _k3(logprobs, ref_logprobs)
    return _mean_by_completion(objective.masked_fill(~mask, 0), mask)


@wrong(
    "calc_grpo_objective",
    "Multiplying by the mask does not remove what lies beyond it: 0 * nan is nan. Use masked_fill "
    "or torch.where, before you compute with it.",
)
def multiplied_by_the_mask(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    advantages = _per_token(advantages, mask)
    ratio = (logprobs - old_logprobs.detach()).clamp(max=80).exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if beta:
        objective = objective - beta * _k3(logprobs, ref_logprobs)
    return _mean_by_completion(objective * mask, mask)


@wrong(
    "calc_grpo_objective",
    "The KL is taken off the advantages, detached and inside the minimum. It stands apart from the "
    "surrogate, with a gradient of its own.",
)
def kl_in_the_advantages(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    logprobs, old_logprobs = logprobs.masked_fill(~mask, 0), old_logprobs.masked_fill(~mask, 0)
    advantages = _per_token(advantages, mask).masked_fill(~mask, 0)
    if beta:
        advantages = advantages - beta * _k3(logprobs, ref_logprobs.masked_fill(~mask, 0)).detach()
    ratio = (logprobs - old_logprobs.detach()).clamp(max=80).exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + high)
    return _mean_by_completion(torch.minimum(ratio * advantages, clipped * advantages) * mask, mask)


@wrong(
    "calc_grpo_objective",
    "You clip the log-ratio to [-clip_coef, clip_coef]. The interval is that of the ratio: clip "
    "after exp.",
)
def logratio_clipped(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    logprobs, old_logprobs = logprobs.masked_fill(~mask, 0), old_logprobs.masked_fill(~mask, 0)
    advantages = _per_token(advantages, mask).masked_fill(~mask, 0)
    logratio = logprobs - old_logprobs.detach()
    ratio, clipped = logratio.clamp(max=80).exp(), logratio.clamp(-clip_coef, high).exp()
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if beta:
        objective = objective - beta * _k3(logprobs, ref_logprobs.masked_fill(~mask, 0))
    return _mean_by_completion(objective * mask, mask)


@wrong(
    "calc_grpo_objective",
    "Old and reference log-probs and advantages get a gradient. They come from the rollout, as "
    "constants: detach them.",
)
def nothing_detached(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    a = advantages[:, None].expand_as(logprobs) if advantages.ndim == 1 else advantages
    a, logprobs, old = (x.masked_fill(~mask, 0.0) for x in (a, logprobs, old_logprobs))
    ratio = (logprobs - old).exp()
    terms = torch.minimum(ratio * a, ratio.clamp(1 - clip_coef, 1 + high) * a)
    if beta:
        d = ref_logprobs.masked_fill(~mask, 0.0) - logprobs
        terms = terms - beta * (torch.expm1(d) - d)
    return (terms.sum(1) / mask.sum(1).clamp(min=1)).mean()


@wrong(
    "calc_grpo_objective",
    "view() raises an error on log-probs that are a slice of a larger tensor. Index with the mask.",
)
def views_of_the_logprobs(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    if beta != 0 and ref_logprobs is None:
        raise ValueError("ref_logprobs should be given when beta is not 0")
    kept, row = _views(mask)
    chosen, old = logprobs.view(-1)[kept], old_logprobs.detach().view(-1)[kept]
    a = advantages.detach()
    a = a[row] if a.ndim == 1 else a.view(-1)[kept]
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = (chosen - old).clamp(max=80.0).exp()
    gains = torch.minimum(ratio * a, ratio.clamp(1 - clip_coef, 1 + high) * a)
    if beta != 0:
        gains = gains - beta * calc_per_token_kl(chosen, ref_logprobs.view(-1)[kept])
    return (gains / mask.sum(-1)[row]).sum() / len(mask)


@wrong(
    "calc_grpo_objective",
    "torch.zeros is float32, and float64 log-probs give terms that do not fit in. zeros_like has "
    "their dtype.",
)
def terms_in_float32(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    if beta != 0 and ref_logprobs is None:
        raise ValueError("ref_logprobs should be given when beta is not 0")
    a = advantages.detach()
    a = a[mask.nonzero()[:, 0]] if a.ndim == 1 else a[mask]
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = (logprobs[mask] - old_logprobs.detach()[mask]).clamp(max=80.0).exp()
    gains = torch.minimum(ratio * a, ratio.clamp(1 - clip_coef, 1 + high) * a)
    if beta != 0:
        gains = gains - beta * calc_per_token_kl(logprobs[mask], ref_logprobs[mask])
    per_token = torch.zeros(mask.shape)
    per_token[mask] = gains
    return (per_token.sum(-1) / mask.sum(-1).clamp(min=1)).mean()


@wrong(
    "calc_grpo_objective",
    "Advantages that are NaN are set to 0, and those that are inf are not: behind the mask, "
    "inf * 0 is nan. Fill by the mask, not by what is found there.",
)
def nan_of_the_advantages_alone(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    if beta != 0 and ref_logprobs is None:
        raise ValueError("ref_logprobs should be given when beta is not 0")
    a = advantages.detach() if advantages.ndim == 2 else advantages.detach()[:, None]
    a = torch.where(a.isnan(), 0.0, a)
    new = logprobs.masked_fill(~mask, 0.0)
    ratio = torch.exp(new - old_logprobs.detach().masked_fill(~mask, 0.0))
    terms = torch.minimum(ratio * a, ratio.clamp(1 - clip_coef, 1 + high) * a)
    if beta != 0:
        terms = terms - beta * calc_per_token_kl(new, ref_logprobs.masked_fill(~mask, 0.0))
    return ((terms * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


@wrong(
    "calc_grpo_objective",
    "You hold the log-ratio between logarithms, and that of 1 - clip_coef does not exist when "
    "clip_coef is 1. Clip the ratio.",
)
def clipped_between_logarithms(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    a = advantages.detach() if advantages.ndim == 2 else advantages.detach()[:, None]
    a = a.expand_as(mask).masked_fill(~mask, 0.0)
    new, old = (x.masked_fill(~mask, 0.0) for x in (logprobs, old_logprobs.detach()))
    clipped = (new - old).clamp(math.log(1 - clip_coef), math.log1p(high)).exp()
    terms = torch.minimum((new - old).exp() * a, clipped * a)
    if beta != 0:
        terms = terms - beta * calc_per_token_kl(new, ref_logprobs.masked_fill(~mask, 0.0))
    return ((terms * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


# --- process_advantages -------------------------------------------------------------------------


def _check_steps(step_rewards, step_ends, completion_len):
    if [len(rewards) for rewards in step_rewards] != [len(ends) for ends in step_ends]:
        raise ValueError("step_ends should have one end for each of step_rewards")
    if any(not 0 <= end < completion_len for ends in step_ends for end in ends):
        raise ValueError(f"step_ends should be below {completion_len}")


def _normalised(step_rewards, step_ends, group_size, completion_len, eps):
    _check(step_rewards, group_size, "none")
    _check_steps(step_rewards, step_ends, completion_len)
    rows = []
    for start in range(0, len(step_rewards), group_size):
        group = [rewards.detach() for rewards in step_rewards[start : start + group_size]]
        together = torch.cat(group)
        if len(set(together.tolist())) < 2:
            rows += [torch.zeros_like(rewards) for rewards in group]
        else:
            rows += [(rewards - together.mean()) / (together.std() + eps) for rewards in group]
    return rows


RATHER_THAN_SUMMED = "Sum over all steps that end at a token or later"

PROCESS_ADVANTAGES = [
    edit(
        "process_advantages",
        "steps_that_have_ended",
        "ends_here.flip(-1).cumsum(-1).flip(-1)",
        "ends_here.cumsum(-1)",
        "Each token gets the steps that ended before it, on which it has no influence. Sum over "
        "those that end at it or later.",
    ),
    edit(
        "process_advantages",
        "end_exclusive",
        "ends_here.flip(-1).cumsum(-1).flip(-1)",
        "ends_here.flip(-1).cumsum(-1).flip(-1) - ends_here",
        "The last token of a step does not get its reward. `step_ends` are inclusive: a step that "
        "ends at a token counts for it.",
    ),
    edit(
        "process_advantages",
        "not_summed",
        "return ends_here.flip(-1).cumsum(-1).flip(-1)",
        "return ends_here",
        "Only the token at a step's end gets anything. Every token up to it contributed: sum over "
        "the steps that end at a token or later.",
    ),
    edit(
        "process_advantages",
        "all_tokens_alike",
        "ends_here.flip(-1).cumsum(-1).flip(-1)",
        "ends_here.sum(-1, keepdim=True).expand_as(ends_here).clone()",
        "Every token of a row gets the sum over all its steps. A token gets only those that end at "
        "it or later.",
    ),
    edit(
        "process_advantages",
        "last_of_shared_ends",
        "ends_here[row].index_add_(0, step_ends[row].long(), normalized)",
        "ends_here[row, step_ends[row].long()] += normalized",
        "Where several steps end at one token, only one of them counts: = or += with a list of "
        "indices writes each once. Use index_add_, or a loop.",
    ),
    edit(
        "process_advantages",
        "ends_counted_from_one",
        "step_ends[row].long()",
        "(step_ends[row].long() - 1).clamp(min=0)",
        "The ends are taken as counted from 1. They are 0-based positions of a step's last token.",
    ),
    edit(
        "process_advantages",
        "normalised_by_row",
        "(step_rewards[row].detach() - together.mean()) / (together.std() + eps)",
        "(step_rewards[row].detach() - step_rewards[row].detach().mean()) / "
        "(step_rewards[row].detach().std().nan_to_num() + eps)",
        "Each completion is normalised for itself, so that a bad one looks like a good one. All "
        "steps of the group are normalised together.",
    ),
    edit(
        "process_advantages",
        "normalised_over_the_batch",
        "torch.cat([step_rewards[row] for row in rows])",
        "torch.cat(step_rewards)",
        "The steps of the whole batch are normalised together. Each group, the completions of one "
        "prompt, has a mean and a std of its own.",
    ),
    edit(
        "process_advantages",
        "normalised_by_the_first_row",
        "torch.cat([step_rewards[row] for row in rows])",
        "step_rewards[start]",
        "Mean and std are those of the group's first completion. Take all steps of all its "
        "completions.",
    ),
    edit(
        "process_advantages",
        "mean_of_row_means",
        "step_rewards[row].detach() - together.mean()",
        "step_rewards[row].detach() - torch.stack([step_rewards[r].detach().mean() for r in rows "
        "if len(step_rewards[r])]).mean()",
        "The mean is taken over each completion and then over the group, so that steps of short "
        "completions weigh more. Put all steps of the group together.",
    ),
    edit(
        "process_advantages",
        "steps_not_centered",
        "(step_rewards[row].detach() - together.mean())",
        "step_rewards[row].detach()",
        "The rewards are scaled but not centered: subtract the mean of the group's steps.",
    ),
    edit(
        "process_advantages",
        "steps_not_scaled",
        " / (together.std() + eps)",
        "",
        "The rewards are centered but not scaled: divide by the std of the group's steps + eps.",
    ),
    edit(
        "process_advantages",
        "not_normalised",
        "(step_rewards[row].detach() - together.mean()) / (together.std() + eps)",
        "step_rewards[row].detach()",
        "The raw rewards are summed: nothing says whether a step was better than the group's. "
        "Normalise them first.",
    ),
    edit(
        "process_advantages",
        "std_of_a_population_of_steps",
        "together.std()",
        "together.std(correction=0)",
        "The std divides by the number of steps: divide by one less (ddof 1), as torch.std does "
        "unless told.",
    ),
    edit(
        "process_advantages",
        "eps_left_out_of_steps",
        "(together.std() + eps)",
        "together.std()",
        "eps has no effect: add it to the std.",
    ),
    edit(
        "process_advantages",
        "eps_under_the_root_of_steps",
        "(together.std() + eps)",
        "(together.var() + eps).sqrt()",
        "eps is added to the variance, where it counts far more. Add it to the std.",
    ),
    edit(
        "process_advantages",
        "another_default_eps_of_steps",
        "eps: float = 1e-4",
        "eps: float = 1e-8",
        "The default of eps should be 1e-4.",
    ),
    edit(
        "process_advantages",
        "two_steps_are_too_few",
        "together.numel() < 2",
        "together.numel() < 3",
        "A group with two steps gives zeros. Two are enough for a mean and a std.",
    ),
    edit(
        "process_advantages",
        "steps_not_detached",
        "step_rewards[row].detach()",
        "step_rewards[row]",
        "Gradients flow through the advantages. They are constants of the policy gradient: detach "
        "the rewards.",
    ),
    edit(
        "process_advantages",
        "steps_changed_in_place",
        "(step_rewards[row].detach() - together.mean()) / (together.std() + eps)",
        "step_rewards[row].detach().sub_(together.mean()).div_(together.std() + eps)",
        "The rewards that you were given are changed in place: detach() shares their memory. Make "
        "a new tensor.",
    ),
    edit(
        "process_advantages",
        "strided_rows",
        "rows = range(start, start + group_size)",
        "rows = range(start // group_size, len(step_rewards), len(step_rewards) // group_size)",
        "Every n-th completion is taken as a group. The completions of a prompt stand side by "
        "side.",
    ),
    edit(
        "process_advantages",
        "only_the_first_group",
        "range(0, len(step_rewards), group_size)",
        "range(0, group_size, group_size)",
        "Only the first group gets advantages. Go through all of them.",
    ),
    edit(
        "process_advantages",
        "process_sign_flipped",
        "return ends_here",
        "return -ends_here",
        "The sign is flipped: a step rewarded above the mean is an advantage, and positive.",
    ),
    edit(
        "process_advantages",
        "process_group_size_unchecked",
        "_check_group_size(group_size, len(step_rewards))",
        "group_size = min(group_size, len(step_rewards)); step_rewards = step_rewards[: "
        "len(step_rewards) // group_size * group_size]; step_ends = step_ends[: len(step_rewards)]",
        "A group_size that does not divide the number of completions passes in silence, and the "
        "last ones are lost. Raise a ValueError that names group_size.",
    ),
    edit(
        "process_advantages",
        "ends_unchecked",
        "((all_ends >= 0) & (all_ends < completion_len)).all()",
        "True",
        "An end outside the completion should be a ValueError that names step_ends, not whatever "
        "the indexing says.",
    ),
    edit(
        "process_advantages",
        "ends_moved_inside",
        "all_ends = torch.cat(step_ends)",
        "step_ends = [ends.clamp(0, completion_len - 1) for ends in step_ends]; "
        "all_ends = torch.cat(step_ends)",
        "An end outside the completion is moved inside in silence, which hides that the steps were "
        "found wrongly. Raise a ValueError that names step_ends.",
    ),
    edit(
        "process_advantages",
        "steps_without_an_end",
        "    require(\n        [len",
        "    step_rewards = [r[: len(e)] for r, e in zip(step_rewards, step_ends)]\n"
        "    step_ends = [e[: len(r)] for r, e in zip(step_rewards, step_ends)]\n"
        "    require(\n        [len",
        "Rewards without an end, or ends without a reward, are dropped in silence. Raise a "
        "ValueError that names step_ends or step_rewards.",
    ),
    edit(
        "process_advantages",
        "averaged_over_steps",
        "ends_here[row].index_add_(0, step_ends[row].long(), normalized)",
        "ends_here[row].index_add_(0, step_ends[row].long(), normalized / max(len(normalized), 1))",
        "The steps' rewards are averaged over the row. A token gets their sum.",
    ),
    edit(
        "process_advantages",
        "variance_in_one_pass",
        "together.std()",
        "((together.square().mean() - together.mean().square()).clamp(min=0) * together.numel() "
        "/ (together.numel() - 1)).sqrt()",
        "The mean of the squares minus the square of the mean loses all digits where rewards are "
        "large and close. Use std.",
    ),
    edit(
        "process_advantages",
        "fails_without_steps",
        "together.numel() < 2 or together.max()",
        "together.max()",
        "A group without any step has no maximum. Its tokens are after the last end: they get 0.",
    ),
    edit(
        "process_advantages",
        "nearly_equal_steps_count_as_constant",
        "together.max() == together.min()",
        "torch.allclose(together, together[0])",
        "allclose takes steps for equal whose rewards differ little beside their size. eps takes "
        "care of small differences.",
    ),
    edit(
        "process_advantages",
        "clipped_to_3",
        "ends_here[row].index_add_(0, step_ends[row].long(), normalized)",
        "ends_here[row].index_add_(0, step_ends[row].long(), normalized.clamp(-3, 3))",
        "The normalised rewards are clipped. One hit among many steps is worth what it is worth.",
    ),
    edit(
        "process_advantages",
        "steps_in_float32",
        "step_rewards[0].new_zeros(len(step_rewards), completion_len)",
        "torch.zeros(len(step_rewards), completion_len)",
        "torch.zeros is float32, and float64 rewards do not fit in. new_zeros has their dtype.",
    ),
    edit(
        "process_advantages",
        "std_of_steps_below_1e_6_counts_as_constant",
        "together.max() == together.min()",
        "together.std() < 1e-6",
        "A std below 1e-6 is taken for 0. Only steps that are all rewarded alike give zeros; eps "
        "is added to any other std, however small.",
    ),
    edit(
        "process_advantages",
        "last_end_of_each_row_checked",
        "all_ends = torch.cat(step_ends)",
        "all_ends = torch.cat([ends[-1:] for ends in step_ends])",
        "Only the last end of each row is checked. Ends come in any order, and each of them may be "
        "outside the completion.",
    ),
    edit(
        "process_advantages",
        "ends_of_the_first_row_checked",
        "all_ends = torch.cat(step_ends)",
        "all_ends = step_ends[0]",
        "Only the ends of the first row are checked. Check those of every row.",
    ),
    edit(
        "process_advantages",
        "not_summed_and_last_of_shared_ends",
        "ends_here[row].index_add_(0, step_ends[row].long(), normalized)\n"
        "    return ends_here.flip(-1).cumsum(-1).flip(-1)",
        "ends_here[row, step_ends[row].long()] = normalized\n    return ends_here",
        "Only the token at a step's end gets anything, and of several that end there one alone. "
        f"{RATHER_THAN_SUMMED}.",
    ),
    edit(
        "process_advantages",
        "normalised_by_row_of_one",
        "(step_rewards[row].detach() - together.mean()) / (together.std() + eps)",
        "(step_rewards[row].detach() - step_rewards[row].detach().mean()) / "
        "(step_rewards[row].detach().std() + eps)",
        "Each completion is normalised for itself, and the std of a single step is nan. All steps "
        "of the group are normalised together.",
    ),
    edit(
        "process_advantages",
        "ends_checked_where_rewards_differ",
        "    all_ends = torch.cat(step_ends)\n",
        "    groups = [torch.cat(step_rewards[i - i % group_size :][:group_size]) "
        "for i in range(len(step_ends))]\n"
        "    all_ends = [e for e, g in zip(step_ends, groups) if len(g.unique()) > 1]\n"
        "    all_ends = torch.cat(all_ends or [torch.tensor([0])])\n",
        "The ends are checked after groups without differences are skipped. Check them all, first.",
    ),
]


@wrong(
    "process_advantages",
    "Each token gets the reward of the step that it lies in, and not those of the steps that come "
    "after. Sum over all steps that end at it or later.",
)
def own_step_only(step_rewards, step_ends, group_size, completion_len, eps=1e-4):
    rows = _normalised(step_rewards, step_ends, group_size, completion_len, eps)
    advantages = torch.zeros(len(rows), completion_len)
    for row, (normalised, ends) in enumerate(zip(rows, step_ends, strict=True)):
        order = ends.argsort(stable=True)
        start = 0
        for step in order.tolist():
            advantages[row, start : ends[step] + 1] = normalised[step]
            start = int(ends[step]) + 1
    return advantages


@wrong(
    "process_advantages",
    "The rewards still to come are summed first and normalised then. Normalise the single steps, "
    "then sum.",
)
def normalised_after_the_sum(step_rewards, step_ends, group_size, completion_len, eps=1e-4):
    _check(step_rewards, group_size, "none")
    _check_steps(step_rewards, step_ends, completion_len)
    sums = torch.zeros(len(step_rewards), completion_len)
    for row, (rewards, ends) in enumerate(zip(step_rewards, step_ends, strict=True)):
        for r, end in zip(rewards.tolist(), ends.tolist(), strict=True):
            sums[row, : end + 1] += r
    groups = sums.reshape(-1, group_size, completion_len)
    centered = groups - groups.mean((1, 2), keepdim=True)
    return (centered / (groups.std((1, 2), keepdim=True) + eps)).reshape(sums.shape)


@wrong(
    "process_advantages",
    "The ends are taken to be sorted: tokens after the last one in the list get nothing, although "
    "an earlier one in the list ends later. Look at every end.",
)
def ends_taken_as_sorted(step_rewards, step_ends, group_size, completion_len, eps=1e-4):
    rows = _normalised(step_rewards, step_ends, group_size, completion_len, eps)
    advantages = torch.zeros(len(rows), completion_len)
    for row, (normalised, ends) in enumerate(zip(rows, step_ends, strict=True)):
        to_come, start = normalised.flip(0).cumsum(0).flip(0), 0
        for step, end in enumerate(ends.tolist()):
            advantages[row, start : end + 1] = to_come[step]
            start = end + 1
    return advantages


@wrong(
    "process_advantages",
    "After the last end the advantage goes on. Tokens that belong to no step get 0.",
)
def goes_on_after_the_last_end(step_rewards, step_ends, group_size, completion_len, eps=1e-4):
    rows = _normalised(step_rewards, step_ends, group_size, completion_len, eps)
    advantages = torch.zeros(len(rows), completion_len)
    for row, (normalised, ends) in enumerate(zip(rows, step_ends, strict=True)):
        for r, end in zip(normalised.tolist(), ends.tolist(), strict=True):
            stop = completion_len if end == max(ends.tolist()) else end + 1
            advantages[row, :stop] += r
    return advantages


@wrong(
    "process_advantages",
    "The last step is always taken to end at the last token. Its end is given, and tokens after it "
    "get 0.",
)
def last_step_reaches_the_end(step_rewards, step_ends, group_size, completion_len, eps=1e-4):
    rows = _normalised(step_rewards, step_ends, group_size, completion_len, eps)
    advantages = torch.zeros(len(rows), completion_len)
    for row, (normalised, ends) in enumerate(zip(rows, step_ends, strict=True)):
        last = len(ends) - 1
        for step, (r, end) in enumerate(zip(normalised.tolist(), ends.tolist(), strict=True)):
            advantages[row, : completion_len if step == last else end + 1] += r
    return advantages


# --- make_grpo_memory ---------------------------------------------------------------------------

MAKE_GRPO_MEMORY = [
    edit(
        "make_grpo_memory",
        "groups_of_a_whole_minibatch",
        "group_size=args.group_size,",
        "group_size=args.minibatch_size,",
        "The memory's groups are whole minibatches, so that the same prompts meet in every epoch. "
        "Its group_size is that of the arguments.",
    ),
    edit(
        "make_grpo_memory",
        "gradients_switched_off",
        "logprobs=logprobs.detach(),",
        "logprobs=logprobs.requires_grad_(False),",
        "requires_grad_(False) is no detach(): it raises an error for what a forward gave, and of "
        "a leaf it switches off the caller's gradient.",
    ),
    edit(
        "make_grpo_memory",
        "scale_by_default",
        "args.group_size, args.advantage_scale",
        "args.group_size",
        "args.advantage_scale is not used.",
    ),
    edit(
        "make_grpo_memory",
        "one_group",
        "group_advantages(scores, args.group_size,",
        "group_advantages(scores, len(scores),",
        "The whole batch is taken for one group. Each prompt's completions are compared with each "
        "other only.",
    ),
    edit(
        "make_grpo_memory",
        "constant_groups_dropped",
        "    return ReplayMemory(",
        "    keep = scores.reshape(-1, args.group_size).std(-1) > 0\n"
        "    keep = keep.repeat_interleave(args.group_size)\n"
        "    samples = Samples(samples.input_ids[keep], samples.attention_mask[keep], "
        "samples.prompt_len, samples.completion_mask[keep], samples.texts)\n"
        "    scores, logprobs = scores[keep], logprobs[keep]\n"
        "    ref_logprobs = None if ref_logprobs is None else ref_logprobs[keep]\n"
        "    return ReplayMemory(",
        "Groups of equal scores are dropped, as in DAPO. Here they stay, with advantages of 0.",
    ),
    edit(
        "make_grpo_memory",
        "rounding_noise_of_equal_scores",
        "group_advantages(scores, args.group_size, args.advantage_scale)",
        "(scores.detach().unflatten(0, (-1, args.group_size)) - scores.detach().unflatten(0, "
        "(-1, args.group_size)).mean(-1, keepdim=True)).div({'group': scores.detach().unflatten("
        "0, (-1, args.group_size)).std(-1, keepdim=True) + 1e-4, 'batch': scores.detach().std() "
        "+ 1e-4, 'none': 1}[args.advantage_scale]).flatten()",
        "The scores are normalised anew, without the zeros of a group whose scores are equal: "
        "rounding is blown up. `group_advantages` takes care of that.",
    ),
    edit(
        "make_grpo_memory",
        "raw_scores",
        "group_advantages(scores, args.group_size, args.advantage_scale)",
        "scores.detach()",
        "These are the scores; the advantages are relative to each group.",
    ),
    edit(
        "make_grpo_memory",
        "logprobs_with_a_graph",
        "logprobs=logprobs.detach()",
        "logprobs=logprobs",
        "The old log-probs keep their graph. What is stored of a rollout is constant: detach it.",
    ),
    edit(
        "make_grpo_memory",
        "nothing_detached",
        "        logprobs=logprobs.detach(),\n"
        "        ref_logprobs=None if ref_logprobs is None else ref_logprobs.detach(),\n",
        "        logprobs=logprobs,\n        ref_logprobs=ref_logprobs,\n",
        "Nothing is detached, so that fields keep the graph that they came with. What is stored of "
        "a rollout is constant.",
    ),
    edit(
        "make_grpo_memory",
        "reference_with_a_graph",
        "ref_logprobs.detach()",
        "ref_logprobs",
        "The reference's log-probs keep their graph. Detach them.",
    ),
    edit(
        "make_grpo_memory",
        "groups_torn_apart",
        "        group_size=args.group_size,\n",
        "",
        "Minibatches tear groups apart: group_size has to reach the memory.",
    ),
    edit(
        "make_grpo_memory",
        "reference_and_policy_swapped",
        "logprobs=logprobs.detach(),\n        ref_logprobs=None if ref_logprobs is None else "
        "ref_logprobs.detach()",
        "logprobs=logprobs.detach() if ref_logprobs is None else ref_logprobs.detach(),\n"
        "        ref_logprobs=None if ref_logprobs is None else logprobs.detach()",
        "logprobs and ref_logprobs are swapped.",
    ),
    edit(
        "make_grpo_memory",
        "one_epoch",
        "batches_per_learning_phase=args.batches_per_learning_phase",
        "batches_per_learning_phase=1",
        "args.batches_per_learning_phase does not reach the memory.",
    ),
    edit(
        "make_grpo_memory",
        "whitened_as_in_ppo",
        "group_advantages(scores, args.group_size, args.advantage_scale)",
        "(a := group_advantages(scores, args.group_size, args.advantage_scale)) / (a.std() + 1e-8)",
        "The advantages are normalised over the batch once more. Their scale is advantage_scale's "
        "business.",
    ),
    edit(
        "make_grpo_memory",
        "attention_mask_for_mask",
        "mask=samples.completion_mask",
        "mask=samples.attention_mask[:, samples.prompt_len :].bool() | True",
        "The mask is true everywhere. It should end with each completion.",
    ),
    edit(
        "make_grpo_memory",
        "scores_clipped_to_10",
        "group_advantages(scores,",
        "group_advantages(scores.clamp(-10, 10),",
        "Scores are not clipped: their mean is taken off anyway.",
    ),
    edit(
        "make_grpo_memory",
        "log_probs_of_no_reference",
        "None if ref_logprobs is None else ref_logprobs.detach()",
        "torch.zeros_like(logprobs) if ref_logprobs is None else ref_logprobs.detach()",
        "No reference ran, but the memory holds zeros as its log-probs, which are those of a "
        "reference that is sure of every token. The field should be None.",
    ),
    edit(
        "make_grpo_memory",
        "no_reference_with_the_exact_kl",
        "None if ref_logprobs is None else",
        'None if ref_logprobs is None or args.kl_kind == "exact" else',
        'With kl_kind "exact" the ref_logprobs that you are given are dropped. The memory has a '
        "field for them.",
    ),
    edit(
        "make_grpo_memory",
        "eps_of_its_own",
        "args.advantage_scale)",
        "args.advantage_scale, eps=1e-8)",
        "The advantages are made with an eps of your own. Leave it to group_advantages, so that "
        "scores which hardly differ are not blown up.",
    ),
    edit(
        "make_grpo_memory",
        "kl_coef_of_the_arguments_set_to_0",
        "    return ReplayMemory(",
        '    if args.kl_kind == "exact":\n        args.kl_coef = 0.0\n    return ReplayMemory(',
        "args.kl_coef is set to 0 and stays so, and then the objective charges no KL at all. "
        "Leave the arguments as they are.",
    ),
]

BATCH_OF_A_MINIBATCH = edit(
    "make_grpo_memory",
    "batch_std_of_each_minibatch",
    "group_advantages(scores, args.group_size, args.advantage_scale)",
    "torch.cat([group_advantages(part, args.group_size, args.advantage_scale)"
    " for part in scores.split(args.minibatch_size)])",
    'The scale "batch" is taken from each minibatch. It is the std of all rewards of the rollout.',
)


# --- GrpoTrainer.rollout_phase ------------------------------------------------------------------


def _roll_out(self, prompts, chosen, repeats=1):
    args = self.args
    prompts = [prompts[i] for i in chosen]
    how = {"generator": self.generator, "prepend_bos": args.prepend_bos}
    with torch.no_grad():
        samples = get_samples(
            self.model, prompts, args.gen_len, args.temperature, args.top_k, **how
        )
        rows = torch.arange(len(prompts)).repeat_interleave(repeats)
        samples = Samples(
            samples.input_ids[rows],
            samples.attention_mask[rows],
            samples.prompt_len,
            samples.completion_mask[rows],
            [samples.texts[row] for row in rows],
        )
        columns = {"prompts": [prompts[row] for row in rows]}
        scores = call_reward_fn(args.reward_fn, samples.texts, columns)
        logprobs = self.get_sample_logprobs(samples)
        return make_grpo_memory(args, samples, scores, logprobs, self.get_ref_logprobs(samples))


GRPO_TRAINER_ROLLOUT_PHASE = [
    edit(
        "GrpoTrainer.rollout_phase",
        "running_std_of_the_batches",
        "        return make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)",
        '        if args.advantage_scale == "batch":\n'
        "            std = scores.std()\n"
        '            self.std = 0.9 * getattr(self, "std", std) + 0.1 * std\n'
        "            scores = scores * std / self.std\n"
        "        memory = make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)\n"
        '        if args.advantage_scale == "batch":\n'
        "            memory.advantages = memory.advantages * std / self.std\n"
        "        return memory",
        'With advantage_scale "batch" you divide by a running mean of the stds of all rollouts. It '
        "is the std of this batch's rewards alone.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "base_unfrozen_afterwards",
        "        return make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)",
        "        self.model.requires_grad_(True)\n"
        "        return make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)",
        "After the rollout all weights require a gradient, those of the base too, which should "
        "stay frozen: @torch.no_grad() is enough for a rollout.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "no_ref_logprobs_for_the_exact_kl",
        "self.get_ref_logprobs(samples)",
        'self.get_ref_logprobs(samples) if args.kl_kind == "k3" else None',
        'With kl_kind "exact" the memory has no ref_logprobs. The objective can do without them, '
        "but kl_k3 is recorded from them: only with kl_coef 0 the reference does not run.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "scores_clipped",
        "make_grpo_memory(args, samples, scores, ",
        "make_grpo_memory(args, samples, scores.clamp(-10, 10), ",
        "The rewards are clipped before they are compared, so that large ones of a group seem "
        "alike. Nothing bounds them here.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "a_prompt_for_each_row",
        "args.batch_size // args.group_size, args.group_size",
        "args.batch_size",
        "Every row has a prompt of its own. Draw batch_size / group_size prompts and sample "
        "group_size completions for each.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "too_many_rows",
        "args.batch_size // args.group_size, args.group_size",
        "args.batch_size, args.group_size",
        "batch_size counts completions, not prompts.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "scored_by_the_reference",
        "logprobs = self.get_sample_logprobs(samples)\n        ref",
        "with self.model.reference():\n            logprobs = self.get_sample_logprobs(samples)\n"
        "        ref",
        "The old log-probs are the reference's. They are those of the policy that sampled.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "policy_for_reference",
        "ref_logprobs = self.get_ref_logprobs(samples)",
        "ref_logprobs = logprobs if args.kl_coef > 0 else None",
        "The reference's log-probs are the policy's own: k3 would be 0. Turn the adapters off.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "reference_always_runs",
        "ref_logprobs = self.get_ref_logprobs(samples)",
        "with self.model.reference():\n"
        "            ref_logprobs = self.get_sample_logprobs(samples)",
        "With kl_coef 0 nothing needs the reference, and yet it runs.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "groups_interleaved",
        "        logprobs = self.get_sample",
        "        order = torch.arange(len(scores)).view(-1, args.group_size).T.flatten()\n"
        "        scores = scores[order]\n        logprobs = self.get_sample",
        "The scores are in another order than the completions: groups are contiguous rows.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "sizes_swapped",
        "args.batch_size // args.group_size, args.group_size",
        "args.group_size, args.batch_size // args.group_size",
        "The number of prompts and the size of a group are swapped: batch_size / group_size "
        "prompts, with group_size completions each.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "memory_by_hand",
        "make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)",
        "ReplayMemory(input_ids=samples.input_ids, attention_mask=samples.attention_mask, "
        "mask=samples.completion_mask, logprobs=logprobs, ref_logprobs=ref_logprobs, "
        "advantages=group_advantages(scores, args.group_size, args.advantage_scale))",
        "The memory does not know how many minibatches and epochs there are, nor the size of a "
        "group. `make_grpo_memory` tells it.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "scores_normalized_first",
        "        logprobs = self.get_sample",
        "        scores = (scores - scores.mean()) / (scores.std() + 1e-5) * 3\n"
        "        logprobs = self.get_sample",
        "The scores are normalised over the batch before the groups are compared. The groups' own "
        "normalisation is all there is.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "one_completion_of_each_prompt",
        "args.batch_size // args.group_size, args.group_size",
        "args.batch_size // args.group_size",
        "sample_and_score gets no group_size, so that there is one completion of each prompt, and "
        "batch_size / group_size in all. Pass args.group_size, too.",
    ),
    edit(
        "GrpoTrainer.rollout_phase",
        "columns_by_gen_len",
        "        logprobs = self.get_sample_logprobs(samples)\n",
        "        samples.prompt_len = samples.input_ids.shape[1] - args.gen_len\n"
        "        logprobs = self.get_sample_logprobs(samples)\n",
        "You take the last gen_len columns for the completion. Sampling stops when all rows have "
        "ended, so there may be fewer: samples.prompt_len says where they start.",
    ),
]


@wrong(
    "GrpoTrainer.rollout_phase",
    "args.prompts may be None, and then every prompt is args.prefix: `args.get_prompts()` knows.",
)
def prompts_of_the_arguments_alone(self):
    n, size = len(self.args.prompts), self.args.group_size
    chosen = torch.randint(n, (self.args.batch_size // size,), generator=self.generator)
    return _roll_out(self, self.args.prompts, chosen.repeat_interleave(size).tolist())


@wrong(
    "GrpoTrainer.rollout_phase",
    "The prompts are the same in every rollout, in the order of the list. Draw them at random, "
    "anew each time.",
)
def prompts_in_order(self):
    prompts, size = self.args.get_prompts(), self.args.group_size
    chosen = [(row // size) % len(prompts) for row in range(self.args.batch_size)]
    return _roll_out(self, prompts, chosen)


@wrong(
    "GrpoTrainer.rollout_phase",
    "One completion of each prompt is sampled and repeated, so that there is nothing to compare. "
    "Repeat the prompt, then sample.",
)
def one_completion_repeated(self):
    prompts, size = self.args.get_prompts(), self.args.group_size
    n = self.args.batch_size // size
    chosen = torch.randint(len(prompts), (n,), generator=self.generator)
    return _roll_out(self, prompts, chosen.tolist(), size)


@wrong(
    "GrpoTrainer.rollout_phase",
    "The advantages are computed minibatch by minibatch: the batch whose std they are divided by "
    "is the whole rollout.",
)
@torch.no_grad()
def advantages_by_minibatch(self):
    args = self.args
    samples, scores = self.sample_and_score(args.batch_size // args.group_size, args.group_size)
    memory = make_grpo_memory(
        args, samples, scores, self.get_sample_logprobs(samples), self.get_ref_logprobs(samples)
    )
    parts = scores.split(args.minibatch_size)
    memory.advantages = torch.cat(
        [group_advantages(part, args.group_size, args.advantage_scale) for part in parts]
    )
    return memory


@wrong(
    "GrpoTrainer.rollout_phase",
    "The prompts are drawn by PyTorch's global generator, so that args.seed does not decide them. "
    "Draw them by self.generator.",
)
@torch.no_grad()
def prompts_by_the_global_generator(self):
    prompts, size = self.args.get_prompts(), self.args.group_size
    chosen = torch.randint(len(prompts), (self.args.batch_size // size,))
    return _roll_out(self, prompts, chosen.repeat_interleave(size).tolist())


@wrong(
    "GrpoTrainer.rollout_phase",
    "Completions whose prompts read alike are compared across groups. A prompt that is drawn twice "
    "makes two groups.",
)
@torch.no_grad()
def groups_by_the_text_of_the_prompt(self):
    args = self.args
    samples, scores = self.sample_and_score(args.batch_size // args.group_size, args.group_size)
    logprobs, ref_logprobs = self.get_sample_logprobs(samples), self.get_ref_logprobs(samples)
    memory = make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)
    ids = samples.input_ids[:, : samples.prompt_len]
    same = ids.unique(dim=0, return_inverse=True)[1]
    for i in same.unique():
        rows = same == i
        memory.advantages[rows] = group_advantages(
            scores[rows], int(rows.sum()), args.advantage_scale
        )
    return memory


@wrong(
    "GrpoTrainer.rollout_phase",
    "The reference's log-probs of the first rollout are kept for all later ones. The reference is "
    "the same, but the completions are others.",
)
@torch.no_grad()
def reference_scored_once(self):
    args = self.args
    samples, scores = self.sample_and_score(args.batch_size // args.group_size, args.group_size)
    logprobs = self.get_sample_logprobs(samples)
    if not hasattr(self, "kept"):
        self.kept = self.get_ref_logprobs(samples)
    return make_grpo_memory(args, samples, scores, logprobs, self.kept)


@wrong(
    "GrpoTrainer.rollout_phase",
    "The old log-probs come from a copy of the policy that is made once and never learns. Score "
    "with the policy that has sampled.",
)
def scored_by_a_first_copy(self):
    args = self.args
    samples, scores = self.sample_and_score(args.batch_size // args.group_size, args.group_size)
    ref_logprobs, policy = self.get_ref_logprobs(samples), self.model
    self.model = self.__dict__.setdefault("old_policy", copy.deepcopy(policy))
    logprobs = self.get_sample_logprobs(samples)
    self.model = policy
    return make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)


# --- GrpoTrainer.compute_rlhf_objective ---------------------------------------------------------


def _objective_with(self, minibatch, calc_penalty):
    """With a KL in the objective that is not k3 made by `calc_penalty(logits, prompt_len)`."""
    args, mask, ids = self.args, minibatch.mask, minibatch.input_ids
    prompt_len = ids.shape[1] - mask.shape[1]
    logits = self.model(ids, minibatch.attention_mask)
    logprobs = get_logprobs(logits, ids, prompt_len, args.temperature)
    is_exact = args.kl_kind == "exact" and args.kl_coef > 0
    penalty = calc_penalty(logits, prompt_len) if is_exact else 0.0
    objective = calc_grpo_objective(
        logprobs,
        minibatch.logprobs,
        minibatch.ref_logprobs,
        minibatch.advantages,
        mask,
        args.clip_coef,
        args.clip_coef_high,
        0.0 if is_exact else args.kl_coef,
    )
    self.record_ratios(logprobs, minibatch)
    return objective + args.ent_coef * self.measure_entropy(minibatch, logits) - penalty


GRPO_TRAINER_COMPUTE_RLHF_OBJECTIVE = [
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "rows_without_advantage_left_out",
        "args, mask = self.args, minibatch.mask\n",
        "args, useful = self.args, minibatch.advantages != 0\n"
        "        if args.kl_coef == 0 and args.ent_coef == 0 and useful.any():\n"
        "            fields = vars(minibatch).items()\n"
        "            kept = {k: None if x is None else x[useful] for k, x in fields}\n"
        "            minibatch = ReplayMinibatch(**kept)\n"
        "        mask = minibatch.mask\n",
        "Rows whose advantage is 0 are left out of the batch. They add nothing to the sum, but the "
        "mean is over all completions: without them it is divided by too few.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "exact_kl_weighted_by_the_temperature",
        "args.kl_coef * self.measure_kl(minibatch, logits)",
        "args.temperature * self.measure_kl(minibatch, logits)",
        "The exact KL is weighted by the temperature. Its weight is kl_coef.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "advantages_held_at_five",
        "            minibatch.advantages,\n",
        "            minibatch.advantages.clamp(-5, 5),\n",
        "Advantages above 5 are cut, as where one completion of many is rewarded. Only the ratio "
        "is clipped.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "prompt_len_from_gen_len",
        "minibatch.input_ids.shape[1] - mask.shape[1]",
        "minibatch.input_ids.shape[1] - args.gen_len",
        "The completions are taken to have gen_len tokens. They are shorter when all of them ended "
        "sooner: take the mask's width.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "advantages_of_zero_left_out",
        "        args, mask = self.args, minibatch.mask\n",
        "        kept = minibatch.advantages != 0\n"
        "        minibatch = ReplayMinibatch(**{name: x if x is None else x[kept] "
        "for name, x in vars(minibatch).items()})\n"
        "        args, mask = self.args, minibatch.mask\n",
        "Completions whose advantage is 0 are left out. They count in the means, and their KL and "
        "entropy have a gradient.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "eos_left_out",
        "args, mask = self.args, minibatch.mask",
        "args, mask = self.args, minibatch.mask & (minibatch.input_ids[:, "
        "-minibatch.mask.shape[1] :] != self.model.tokenizer.eos_token_id)",
        "The end of a completion is left out of the mean. The mask has it, since the policy is to "
        "learn when to stop.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "pad_ids_left_out",
        "args, mask = self.args, minibatch.mask",
        "args, mask = self.args, minibatch.mask & (minibatch.input_ids[:, "
        "-minibatch.mask.shape[1] :] != self.model.tokenizer.pad_token_id)",
        "Tokens with the id of padding are left out. A completion may hold that id, too: the mask "
        "alone says what counts.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "top_k_in_scoring",
        "self.model(minibatch.input_ids, minibatch.attention_mask)",
        "self.model(minibatch.input_ids, minibatch.attention_mask)\n"
        "        if args.top_k is not None:\n"
        "            kth = logits.topk(args.top_k).values[..., -1:]\n"
        "            logits = logits.masked_fill(logits < kth, -torch.inf)",
        "top_k truncates the logits that are scored. It concerns sampling alone: log-probs are "
        "those of the whole vocabulary.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "entropy_subtracted",
        "objective + args.ent_coef",
        "objective - args.ent_coef",
        "The entropy bonus is subtracted; it should be added.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "entropy_forgotten",
        "objective + args.ent_coef * self.measure_entropy(minibatch, logits)",
        "objective",
        "The entropy bonus is missing.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "both_kls",
        'beta=args.kl_coef if args.kl_kind == "k3" else 0.0',
        "beta=args.kl_coef",
        'With kl_kind "exact" k3 is charged as well. One of the two.',
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "k3_always",
        'if args.kl_kind == "exact" and args.kl_coef > 0:',
        "if False:",
        'With kl_kind "exact" there is no KL at all.',
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "exact_always",
        'if args.kl_kind == "exact" and args.kl_coef > 0:',
        "if args.kl_coef > 0:",
        'With kl_kind "k3" the exact KL is charged as well. One of the two.',
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "reference_runs_without_kl",
        'if args.kl_kind == "exact" and args.kl_coef > 0:',
        'if args.kl_kind == "exact":',
        "The reference ran although kl_coef is 0: measure_kl runs it, whatever it is multiplied "
        "by. Call it only if kl_coef is above 0.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "beta_by_default",
        'beta=args.kl_coef if args.kl_kind == "k3" else 0.0',
        'beta=0.04 if args.kl_kind == "k3" and args.kl_coef else 0.0',
        "args.kl_coef is not used: it is the paper's beta.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "temperature_forgotten",
        "prompt_len, args.temperature)",
        "prompt_len)",
        "The log-probs are taken at temperature 1, the old ones at args.temperature.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "mask_forgotten",
        "self.model(minibatch.input_ids, minibatch.attention_mask)",
        "self.model(minibatch.input_ids)",
        "The attention mask is missing: left-padded prompts are misread.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "old_and_reference_swapped",
        "            minibatch.logprobs,\n            minibatch.ref_logprobs,\n",
        "            *((minibatch.logprobs, None) if minibatch.ref_logprobs is None else "
        "(minibatch.ref_logprobs, minibatch.logprobs)),\n",
        "old_logprobs and ref_logprobs are swapped: the ratio is against the policy that sampled.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "clip_by_default",
        "            args.clip_coef,\n            args.clip_coef_high,\n",
        "",
        "args.clip_coef is not used.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "a_loss",
        "return objective",
        "return -objective",
        "The sign is that of a loss; the objective is maximised.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "adapters_off",
        "        logits = self.model(",
        "        with self.model.reference():\n            logits = self.model(",
        "The adapters are off, so nothing can be learned.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "one_epoch_taken_for_one_update",
        "            minibatch.logprobs,\n",
        "            logprobs.detach() if args.batches_per_learning_phase == 1 else "
        "minibatch.logprobs,\n",
        "One epoch is not one update: each of its minibatches is. From the second on the ratio is "
        "not 1.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "overlong_filter",
        "    args, mask = self.args, minibatch.mask\n",
        "    args, mask = self.args, minibatch.mask\n"
        "        ids = minibatch.input_ids[:, -mask.shape[1] :]\n"
        "        ended = ((ids == self.model.tokenizer.eos_token_id) & mask).any(-1)\n"
        "        mask = mask & ended[:, None]\n"
        "        minibatch = ReplayMinibatch(**(vars(minibatch) | {'mask': mask}))\n",
        "Completions that were cut off count like all others; dropping them is DAPO's filter, not "
        "this objective.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "divided_by_the_number_of_minibatches",
        "return objective",
        "return objective / args.num_minibatches",
        "The objective is divided by num_minibatches, as for gradients that are summed. Here each "
        "minibatch has a step of its own.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "nothing_left_without_advantages",
        "        objective = objective + args.ent_coef",
        "        if not minibatch.advantages.any():\n            return 0.0 * objective\n"
        "        objective = objective + args.ent_coef",
        "Where all advantages are 0 you return 0. KL and entropy bonus are left, and their "
        "gradients.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "prompt_len_of_the_first_minibatch",
        "prompt_len = minibatch.input_ids.shape[1] - mask.shape[1]",
        'prompt_len = vars(self).setdefault("kept", minibatch.input_ids.shape[1] - mask.shape[1])',
        "The length of the prompts is kept from the first minibatch. The prompts of the next "
        "rollout may be longer: take it from each minibatch.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "clip_annealed",
        "            args.clip_coef,\n",
        "            args.clip_coef * (1 - self.phase / args.total_phases),\n",
        "The clip becomes narrower from phase to phase. It is args.clip_coef in each: only the "
        "learning rates have a schedule.",
    ),
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "one_minibatch_taken_for_one_update",
        "            minibatch.logprobs,\n",
        "            logprobs.detach() if args.num_minibatches == 1 else minibatch.logprobs,\n",
        "With one minibatch there is still an update for each epoch, and from the second on the "
        "ratio is not 1. Compare with minibatch.logprobs.",
    ),
]


@wrong(
    "GrpoTrainer.compute_rlhf_objective",
    "The reference's logits of the first minibatch are kept for all later ones. The reference is "
    "the same, but the rows are others.",
)
def reference_logits_of_the_first_minibatch(self, minibatch):
    def calc_penalty(logits, prompt_len):
        if not hasattr(self, "kept"):
            with torch.no_grad(), self.model.reference():
                self.kept = self.model(minibatch.input_ids, minibatch.attention_mask)
        pair = [
            select_completion(x, prompt_len) / self.args.temperature for x in (logits, self.kept)
        ]
        return calc_kl_penalty(*pair, minibatch.mask, self.args.kl_coef)

    return _objective_with(self, minibatch, calc_penalty)


@wrong(
    "GrpoTrainer.compute_rlhf_objective",
    "To keep k3 out, args.kl_coef is set to 0, and stays so: later minibatches are not charged any "
    "KL.",
)
def kl_coef_left_at_zero(self, minibatch):
    def calc_penalty(logits, prompt_len):
        penalty = self.args.kl_coef * self.measure_kl(minibatch, logits)
        self.args.kl_coef = 0.0
        return penalty

    return _objective_with(self, minibatch, calc_penalty)


# --- measure_loss_and_gradient_at_start ---------------------------------------------------------


def _measure_by_the_trainers_objective(trainer):
    """By compute_rlhf_objective without KL and entropy, on a rollout of which no trace is left."""
    state, metrics = trainer.generator.get_state(), copy.deepcopy(trainer.metrics)
    memory = trainer.rollout_phase()
    trainer.generator.set_state(state)
    trainer.metrics = metrics
    fields = {name: getattr(memory, name) for name in memory.names}
    n_prompt = memory.input_ids.shape[1] - memory.mask.shape[1]
    with torch.no_grad():
        logits = trainer.model(memory.input_ids, memory.attention_mask)
    temperature = trainer.args.temperature
    fields["logprobs"] = get_logprobs(logits, memory.input_ids, n_prompt, temperature)
    trainer.args.kl_coef = trainer.args.ent_coef = 0.0
    objective = trainer.compute_rlhf_objective(ReplayMinibatch(**fields))
    found = torch.autograd.grad(objective, list(trainer.model.trainable_parameters()))
    return objective.item(), float(sum(g.square().sum() for g in found) ** 0.5)


MEASURE_LOSS_AND_GRADIENT_AT_START = [
    edit(
        "measure_loss_and_gradient_at_start",
        "old_logprobs_of_the_merged_model",
        "    objective = calc_grpo_objective(\n        logprobs, logprobs.detach(),",
        "    with torch.no_grad(), trainer.model.merged():\n"
        "        merged = trainer.model(ids, memory.attention_mask)\n"
        "        old = get_logprobs(merged, ids, prompt_len, trainer.args.temperature)\n"
        "    objective = calc_grpo_objective(\n        logprobs, old,",
        "The old log-probs are the merged model's, which rounds otherwise: on a base in bfloat16 "
        "the objective is far from 0. Take them from the forward that has the gradient.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "old_logprobs_of_the_memory",
        "logprobs, logprobs.detach(), None",
        "logprobs, memory.logprobs, None",
        "The old log-probs are the memory's. Take them from the forward that is measured, so that "
        "every ratio is exactly 1.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "gradient_with_kl_and_entropy",
        "torch.autograd.grad(objective, adapters)",
        "torch.autograd.grad(trainer.compute_rlhf_objective(memory.get_rows(torch.arange("
        "len(ids)))), adapters)",
        "The gradient is that of the trainer's whole objective. Leave KL and entropy out, as in "
        "the objective that you return.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "mean_over_tokens",
        "calc_grpo_objective(\n        logprobs, logprobs.detach(), None, memory.advantages, "
        "memory.mask, beta=0.0\n    )",
        "masked_mean(torch.exp(logprobs - logprobs.detach()) * memory.advantages[:, None], "
        "memory.mask)",
        "The mean is taken over all tokens at once, and is not 0 where lengths differ. Average "
        "each completion first, then the batch.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "adapters_alone_of_one_layer",
        'trainer.model.trainable_parts()["adapters"]',
        'trainer.model.trainable_parts()["adapters"][:2]',
        "The norm is that of one adapter. Take all of them.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "temperature_forgotten",
        "ids, prompt_len, trainer.args.temperature",
        "ids, prompt_len",
        "The log-probs are taken at temperature 1, not at the trainer's.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "temperature_forgotten_with_the_memorys_logprobs",
        "prompt_len, trainer.args.temperature)\n"
        "    # The old log-probs come from this very forward, so that every ratio is exactly 1.\n"
        "    objective = calc_grpo_objective(\n        logprobs, logprobs.detach(), None",
        "prompt_len)\n"
        "    objective = calc_grpo_objective(\n        logprobs, memory.logprobs, None",
        "Two things: the log-probs are taken at temperature 1, not at the trainer's; and the old "
        "ones are the memory's. Take both from the forward that is measured.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "largest_entry",
        "nn.utils.get_total_norm(gradients).item()",
        "max(g.abs().max() for g in gradients).item()",
        "This is the largest entry of the gradient, not its norm.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "norm_squared",
        "nn.utils.get_total_norm(gradients).item()",
        "nn.utils.get_total_norm(gradients).item() ** 2",
        "This is the squared norm.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "added_to_the_call_before",
        "gradients = torch.autograd.grad(objective, adapters)",
        "objective.backward(); gradients = [p.grad for p in adapters]",
        "backward() adds to what is in .grad, so a second call gives the norm of both gradients "
        "together. Set them to None first, or use torch.autograd.grad.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "sum_of_norms",
        "nn.utils.get_total_norm(gradients).item()",
        "sum(g.norm() for g in gradients).item()",
        "Norms of parts do not add up: the norm is the root of the sum of squares.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "mask_forgotten",
        "trainer.model(ids, memory.attention_mask)",
        "trainer.model(ids)",
        "The attention mask is missing: left-padded prompts are misread.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "first_half",
        "logprobs, logprobs.detach(), None, memory.advantages, memory.mask, beta=0.0",
        "logprobs[:2], logprobs[:2].detach(), None, memory.advantages[:2], memory.mask[:2], "
        "beta=0.0",
        "Only part of a group is measured. Over whole groups the objective is 0.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "an_update_first",
        "    ids, prompt_len =",
        "    trainer.learning_phase(memory)\n    ids, prompt_len =",
        "The trainer learns before it is measured. Measure at the start, and leave it as it was.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "with_entropy",
        "logprobs, logprobs.detach(), None, memory.advantages, memory.mask, beta=0.0\n    )",
        "logprobs, logprobs.detach(), None, memory.advantages, memory.mask, beta=0.0\n    )"
        " - logprobs[memory.mask].mean()",
        "Something besides the GRPO objective is in there: at the start it is 0 by itself.",
    ),
    edit(
        "measure_loss_and_gradient_at_start",
        "constant_groups_left_out",
        "    ids, prompt_len =",
        "    memory = memory.get_rows(memory.advantages.nonzero().flatten())\n"
        "    ids, prompt_len =",
        "Completions whose advantage is 0 are left out, which makes the mean, and the norm, too "
        "large. They count.",
    ),
]


@wrong(
    "measure_loss_and_gradient_at_start",
    "kl_coef and ent_coef of the trainer's arguments are set to 0 and stay so: the run that "
    "follows has neither. calc_grpo_objective with beta 0 needs no such change.",
)
def coefficients_left_at_zero(trainer):
    metrics = copy.deepcopy(trainer.metrics)
    found = _measure_by_the_trainers_objective(trainer)
    trainer.metrics = metrics
    return found


# --- Made by a loop -----------------------------------------------------------------------------


def _unmasked_kl(name, sentence, condition, reference, mean):
    """A KL of log-probs that are not masked; taken off where `condition` holds."""
    return edit(
        "calc_grpo_objective",
        name,
        "    if beta != 0:\n        kl = calc_per_token_kl(\n"
        "            logprobs.masked_fill(~mask, 0.0), ref_logprobs.masked_fill(~mask, 0.0)\n"
        "        )\n        objective = objective - beta * kl\n    return _mean_over_completions",
        f"    if {condition}:\n        kl = calc_per_token_kl(logprobs, {reference})\n"
        f"        objective = objective - beta * kl\n    return {mean}",
        sentence,
    )


NEITHER_MASKED = (
    "The value is right but the gradient is nan: calc_ratio masks its own log-probs, the KL has to "
    "be given masked ones. Replace those of the policy and of the reference before "
    "calc_per_token_kl."
)
REFERENCE_MASKED_ALONE = (
    "The KL gets masked log-probs of the reference but not of the policy, through which the "
    "gradient flows: there 0 * nan is nan. Replace both before calc_per_token_kl."
)
TWO_THINGS = (
    "Two things: the mean is taken over all tokens at once, and not over each completion first; "
    "and the KL's gradient is nan where the mask is false. Replace the masked log-probs of policy "
    "and reference before calc_per_token_kl."
)
TWO_THINGS_HALF = (
    "Two things: the mean is taken over all tokens at once, and not over each completion first; "
    "and the KL's gradient is nan where the mask is false: you mask the reference's log-probs, but "
    "the gradient flows through the policy's."
)
AT_0 = " And leave the KL out where beta is 0: there its nan does harm, too."
WITH_BETA, WITH_A_REFERENCE = "beta != 0", "ref_logprobs is not None"
BARE, MASKED = "ref_logprobs", "ref_logprobs.masked_fill(~mask, 0.0)"
BY_COMPLETION, OVER_TOKENS = "_mean_over_completions", "masked_mean"
# The KL of bare log-probs taken off where beta is not 0 is `masked_at_the_end`, below.
UNMASKED_KL = [
    _unmasked_kl(name, sentence, condition, reference, mean)
    for name, sentence, condition, reference, mean in [
        ("kl_not_masked", NEITHER_MASKED, WITH_A_REFERENCE, BARE, BY_COMPLETION),
        ("kl_half_masked", REFERENCE_MASKED_ALONE, WITH_BETA, MASKED, BY_COMPLETION),
        (
            "kl_half_masked_at_0",
            REFERENCE_MASKED_ALONE + AT_0,
            WITH_A_REFERENCE,
            MASKED,
            BY_COMPLETION,
        ),
        ("kl_bare_over_tokens", TWO_THINGS, WITH_BETA, BARE, OVER_TOKENS),
        ("kl_bare_over_tokens_at_0", TWO_THINGS + AT_0, WITH_A_REFERENCE, BARE, OVER_TOKENS),
        ("kl_half_over_tokens", TWO_THINGS_HALF, WITH_BETA, MASKED, OVER_TOKENS),
        ("kl_half_over_tokens_at_0", TWO_THINGS_HALF + AT_0, WITH_A_REFERENCE, MASKED, OVER_TOKENS),
    ]
]


def _grouped(name, sentence, split, axis, join=None, has_case=True, detached=True):
    """The formula over `axis` of the groups that `split(rewards, group_size)` makes."""

    def answer(rewards, group_size, scale="group", eps=1e-4):
        _check(rewards, group_size, scale)
        groups = split(rewards.detach() if detached else rewards, group_size)
        centered = groups - groups.mean(axis, keepdim=True)
        if has_case:
            is_constant = groups.amax(axis, keepdim=True) == groups.amin(axis, keepdim=True)
            centered = centered.masked_fill(is_constant, 0.0)
        if scale == "group":
            centered = centered / (groups.std(axis, keepdim=True) + eps)
        elif scale == "batch":
            centered = centered / (groups.std() + eps)
        return (join or torch.flatten)(centered)

    answer.__name__ = name
    return wrong("group_advantages", sentence)(answer)


def _by_number(rewards, group_size):
    return rewards.reshape(group_size, -1)


def _side_by_side(rewards, group_size):
    return rewards.reshape(-1, group_size)


def _strided(rewards, group_size):
    return rewards.reshape(group_size, -1).T


SIZE_FIRST = "reshape(group_size, -1) makes group_size groups. It should be reshape(-1, group_size)"
NO_ZEROS = "a group of equal rewards should give exact zeros, so test max == min"
NOT_DETACHED = "The advantages get a gradient: detach the rewards."
IN_GROUPS_OF_ANOTHER_SHAPE = [
    _grouped(
        "group_size_first_attached",
        f"{SIZE_FIRST}. {NOT_DETACHED}",
        _by_number,
        1,
        detached=False,
    ),
    _grouped(
        "group_size_first_without_a_case",
        f"{SIZE_FIRST}; and {NO_ZEROS}.",
        _by_number,
        1,
        has_case=False,
    ),
    _grouped(
        "group_size_first_without_a_case_attached",
        f"{SIZE_FIRST}; and {NO_ZEROS}. {NOT_DETACHED}",
        _by_number,
        1,
        has_case=False,
        detached=False,
    ),
    _grouped(
        "strided_groups_attached",
        "You take every n-th reward as a group; the completions of a prompt stand side by side: "
        f"reshape to [groups, group_size]. {NOT_DETACHED}",
        _by_number,
        0,
        detached=False,
    ),
    _grouped(
        "strided_groups_left_in_their_order",
        "You take every n-th reward as a group, and give the advantages back in another order than "
        "the rewards. The completions of a prompt stand side by side: reshape(-1, group_size), "
        "then flatten.",
        _strided,
        1,
    ),
    _grouped(
        "over_the_groups",
        "Mean and std run over the groups, not over the members of each: with [groups, group_size] "
        "that is the last axis, not the first.",
        _side_by_side,
        0,
    ),
    _grouped(
        "over_the_groups_attached",
        "Mean and std run over the groups, not over the members of each: the last axis of [groups, "
        f"group_size]. {NOT_DETACHED}",
        _side_by_side,
        0,
        detached=False,
    ),
    _grouped(
        "without_a_case_attached",
        f"Two things: {NO_ZEROS}; and the advantages get a gradient, so detach the rewards.",
        _side_by_side,
        1,
        has_case=False,
        detached=False,
    ),
]


def _sum_of_products(per_token, mask):
    return (per_token * mask).sum(-1)


def _sum_of_the_true(per_token, mask):
    return per_token.masked_fill(~mask, 0.0).sum(-1)


def _by_length(total, at_least):
    return lambda x, mask: (total(x, mask) / mask.sum(-1).clamp(min=at_least)).mean()


def _by_completion(per_token, mask):
    return masked_mean(per_token, mask, dim=-1).mean()


AVERAGES = {
    "mean": _by_completion,
    "product": _by_length(_sum_of_products, 1),
    "tokens": masked_mean,
    "product_by_0": _by_length(_sum_of_products, 0),
    "mean_by_0": _by_length(_sum_of_the_true, 0),
}
WHY_AVERAGES = {
    "mean": "",
    "product": "0 * nan is nan: use masked_fill instead of multiplying by the mask.",
    "tokens": "Average each completion first, then the batch, not all tokens at once.",
    "product_by_0": "Multiplying by the mask leaves nan, because 0 * nan is nan, and an empty "
    "completion divides 0 by 0.",
    "mean_by_0": "An empty completion divides 0 by 0: clamp the number of tokens at 1.",
}


def _single_update(average, attached, late):
    faults = (
        "The advantages get a gradient: detach them." if attached else "",
        "Log-probs behind the mask make the gradient nan: fill them before you use them."
        if late
        else "",
        WHY_AVERAGES[average],
    )

    def answer(logprobs, advantages, mask):
        advantages = advantages if attached else advantages.detach()
        kept = logprobs if late else logprobs.masked_fill(~mask, 0.0)
        per_token = (kept - kept.detach()).exp() * advantages[:, None]
        return AVERAGES[average](per_token, mask)

    words = ["single", average, "attached" if attached else "", "late" if late else ""]
    answer.__name__ = "_".join(filter(None, words))
    return wrong("calc_single_update_objective", " ".join(filter(None, faults)))(answer)


SINGLE_UPDATES_OF_TWO_MISTAKES = [
    _single_update(average, attached, late)
    for average, attached, late in (
        ("mean", True, True),
        ("product", True, True),
        ("tokens", True, True),
        ("tokens", True, False),
        ("product_by_0", True, True),
        ("mean_by_0", True, True),
        ("mean_by_0", True, False),
        ("product_by_0", False, True),
        ("mean_by_0", False, True),
    )
]
AFTERWARDS = "masked, but after exp"
MASKED_LATE = {
    # Of the ratio, of the KL: what comes before the mask, and what it is made of.
    (True, True): ("ratio and KL", "log-probs"),
    (True, False): ("the ratio", "its log-probs"),
    (False, True): ("the KL", "its log-probs"),
    (False, False): None,
}
MULTIPLIED = {
    (True, True): "log-probs and advantages",
    (True, False): "log-ratio and advantages",
    (False, True): "the log-probs of the KL, and advantages,",
    (False, False): "advantages",
    (AFTERWARDS, False): "the log-ratio before exp, and advantages,",
    (False, AFTERWARDS): "log-probs before the KL, and advantages,",
    (AFTERWARDS, AFTERWARDS): "log-probs before ratio and KL, and advantages,",
}
EXCHANGED = (
    "calc_per_token_kl takes the policy's log-probs first: yours come second, so that the KL is "
    "upside down and its gradient goes to the reference."
)


def _grpo(attached, late, bare, average="mean", is_or=False, exchanged=False):
    """GRPO's objective: what is `attached` not detached, a ratio masked too `late`, a KL of `bare`
    log-probs."""

    def answer(
        logprobs,
        old_logprobs,
        ref_logprobs,
        advantages,
        mask,
        clip_coef=0.2,
        clip_coef_high=None,
        beta=0.04,
    ):
        if beta != 0 and ref_logprobs is None:
            raise ValueError("ref_logprobs should be given when beta is not 0")
        high = clip_coef if clip_coef_high is None else clip_coef_high
        if is_or:
            high = clip_coef_high or clip_coef
        a = advantages if "advantages" in attached else advantages.detach()
        a = a[:, None] if a.ndim == 1 else a
        old = old_logprobs if "old log-probs" in attached else old_logprobs.detach()
        logratio = logprobs - old
        ratio = (logratio if late else logratio.masked_fill(~mask, 0.0)).exp()
        ratio = ratio.masked_fill(~mask, 1.0) if late == AFTERWARDS else ratio
        per_token = torch.minimum(ratio * a, ratio.clamp(1 - clip_coef, 1 + high) * a)
        if beta != 0:
            pair = (logprobs, ref_logprobs)
            new, ref = pair if bare else (x.masked_fill(~mask, 0.0) for x in pair)
            new, ref = (ref, new) if exchanged else (new, ref)
            d = (ref if REFERENCE in attached else ref.detach()) - new
            k3 = torch.expm1(d) - d
            k3 = k3.masked_fill(~mask, 0.0) if bare == AFTERWARDS else k3
            per_token = per_token - beta * k3
        return AVERAGES[average](per_token, mask)

    places = {True: "{}", AFTERWARDS: "{}_masked_afterwards", False: ""}
    words = ["grpo", average, places[late].format("late"), places[bare].format("bare"), *attached]
    words += ["or" if is_or else "", "exchanged" if exchanged else ""]
    answer.__name__ = re.sub(r"\W+", "_", "_".join(filter(None, words)))
    sentence = " ".join(filter(None, _say_grpo(attached, (late, bare), average)))
    sentence += " And `clip_coef_high or clip_coef` takes 0 for missing." if is_or else ""
    sentence = f"{EXCHANGED} {sentence}".strip() if exchanged else sentence
    return wrong("calc_grpo_objective", sentence)(answer)


def _say_grpo(attached, masked_late, average):
    """One sentence for each thing that is wrong."""
    if attached:
        *others, last = (f"the {name}" for name in attached)
        names = f"{', '.join(others)} and {last}" if others else last
        yield f"{names[0].upper()}{names[1:]} get a gradient: detach them."
    if average == "product":
        what = MULTIPLIED[masked_late]
        yield f"0 * nan is nan: replace {what} where the mask is false, instead of multiplying."
    elif MASKED_LATE[masked_late]:
        after, what = MASKED_LATE[masked_late]
        yield (
            f"The mask comes after {after}, where the gradient is 0 times nan: replace {what} "
            "before you use them."
        )
    if average == "tokens":
        yield WHY_AVERAGES["tokens"]


REFERENCE = "reference's log-probs"
OF_A_ROLLOUT = ((), ("old log-probs",), ("advantages",), ("old log-probs", "advantages"))
GRPO_OF_TWO_MISTAKES = [
    *(
        _grpo(attached, late, bare, average)
        for attached in OF_A_ROLLOUT
        for late in (True, False)
        for bare in (True, False)
        for average in ("mean", "product", "tokens")
        # These are right, or stand above.
        if late
        or average == "product"
        or (attached and bare)
        or (attached and average == "tokens")
        or (attached, bare, average) == (OF_A_ROLLOUT[3], False, "mean")
    ),
    *(_grpo((*names, REFERENCE), late, True) for names in OF_A_ROLLOUT for late in (True, False)),
    *(_grpo((*names, REFERENCE), False, False) for names in OF_A_ROLLOUT[1:3]),
    *(
        _grpo((*names, REFERENCE), True, True, average)
        for names in (OF_A_ROLLOUT[0], OF_A_ROLLOUT[3])
        for average in ("product", "tokens")
    ),
    *(
        _grpo((), late, bare, "product")
        for late, bare in ((AFTERWARDS, False), (False, AFTERWARDS), (AFTERWARDS, AFTERWARDS))
    ),
    *(_grpo(names, late, True, is_or=True) for names in OF_A_ROLLOUT for late in (True, False)),
    *(
        _grpo((), late, bare, exchanged=True)
        for late, bare in ((False, False), (False, True), (True, True))
    ),
]


def _own_step(name, sentence, order=list, adds=False, by_row=False, of_one=True):
    """Each token gets the step in which it lies, of the ends as they come in `order`."""

    def answer(step_rewards, step_ends, group_size, completion_len, eps=1e-4):
        rows = _normalised(step_rewards, step_ends, group_size, completion_len, eps)
        if by_row:
            rows = [_normalised_alone(rewards.detach(), eps, of_one) for rewards in step_rewards]
        advantages = torch.zeros(len(rows), completion_len)
        for row, (normalised, ends) in enumerate(zip(rows, step_ends, strict=True)):
            start = 0
            for end, x in order(zip(ends.tolist(), normalised.tolist(), strict=True)):
                advantages[row, start : end + 1] *= float(adds)
                advantages[row, start : end + 1] += x
                start = end + 1
        return advantages

    answer.__name__ = name
    return wrong("process_advantages", sentence)(answer)


def _normalised_alone(rewards, eps, of_one):
    if of_one and len(set(rewards.tolist())) < 2:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)


OWN_STEPS = [
    _own_step(
        "own_step_only_as_listed",
        "Each token gets the step in which it lies alone, and a step that ends sooner but comes "
        f"later in the list overwrites. {RATHER_THAN_SUMMED}, in whatever order they come.",
    ),
    _own_step(
        "own_step_only_as_listed_and_added",
        "Each token gets the step in which it lies alone, from the end that comes before it in the "
        f"list. {RATHER_THAN_SUMMED}, in whatever order they come.",
        adds=True,
    ),
    _own_step(
        "own_step_only_of_sorted_pairs",
        "Each token gets the step in which it lies alone, and of those that end together only the "
        f"one with the lowest reward. {RATHER_THAN_SUMMED}.",
        order=sorted,
    ),
    _own_step(
        "own_step_normalised_by_row",
        "Two things: each completion is normalised for itself, where all steps of the group should "
        "be together; and a token gets its own step alone, where it is all that end at it or "
        "later.",
        by_row=True,
    ),
    _own_step(
        "own_step_normalised_by_row_of_one",
        "Each completion is normalised for itself, where all steps of the group should be "
        "together: the std of one step is nan. And a token gets its own step alone, where it is "
        "all that end at it or later.",
        by_row=True,
        of_one=False,
    ),
]
