"""Wrong answers to chapter 5, each with what a good teacher would say of it."""

import math
import re

import torch

from solutions.ch0_sampling import masked_mean
from solutions.ch2_ppo import calc_ratio
from solutions.ch3_grpo import calc_per_token_kl, make_grpo_memory
from solutions.ch5_rlvr import (
    aggregate_tokens,
    calc_sequence_ratio,
    extract_answer,
    find_finished,
    leave_one_out_advantages,
    mask_truncated,
)
from utils.grading.answers import edit, wrong

# --- extract_answer -----------------------------------------------------------------------------

EXTRACT_ANSWER = [
    edit(
        "extract_answer",
        "newline_before_the_end",
        r"\Z",
        "$",
        "$ also matches before a newline at the end. Nothing may follow the integer: use \\Z.",
    ),
    edit(
        "extract_answer",
        "first_answer_anywhere",
        r"\Z",
        "",
        "This is the first answer of the text, wherever it stands. Only the one that ends the text "
        "counts.",
    ),
    edit(
        "extract_answer",
        "blanks_stripped",
        r'\Z", text)',
        r'\Z", text.strip())',
        "Blanks and newlines are stripped before the answer is looked for. Nothing may follow the "
        "integer, as in reward_fn_addition.",
    ),
    edit(
        "extract_answer",
        "full_stop_stripped",
        r'\Z", text)',
        r'\Z", text.rstrip("."))',
        "A full stop after the integer is taken off. `A: 12.` does not end with the integer, and "
        "has no answer.",
    ),
    edit(
        "extract_answer",
        "no_sign",
        "(-?[0-9]+)",
        "([0-9]+)",
        "Negative integers are integers, too: allow for a minus sign.",
    ),
    edit(
        "extract_answer",
        "sign_left_out",
        "(-?[0-9]+)",
        "-?([0-9]+)",
        "The minus sign is matched but not returned, so that -7 becomes 7. It belongs inside the "
        "parentheses.",
    ),
    edit(
        "extract_answer",
        "any_blanks",
        "A: (",
        r"A:\s*(",
        r"\s* allows for no blank, several, or a newline after the colon. It is exactly one space.",
    ),
    edit(
        "extract_answer",
        "either_case",
        '"A: ',
        '"(?i)A: ',
        "A lower-case `a: ` is accepted. The format has a capital A.",
    ),
    edit(
        "extract_answer",
        "whole_text",
        "re.search",
        "re.fullmatch",
        "The answer has to be the whole text, so worked steps before it are not allowed. It only "
        "has to end the text.",
    ),
    edit(
        "extract_answer",
        "digits_of_every_script",
        "[0-9]",
        r"\\d"[1:],
        r"\d matches the digits of every script. The digits are 0 to 9.",
    ),
    edit(
        "extract_answer",
        "one_digit",
        "[0-9]+",
        "[0-9]",
        "Only answers of a single digit are found: the + is missing.",
    ),
    edit(
        "extract_answer",
        "no_digits_needed",
        "[0-9]+",
        "[0-9]*",
        "With * a text that ends in `A: ` has an empty answer. At least one digit is needed.",
    ),
    edit(
        "extract_answer",
        "all_that_matched",
        "match[1]",
        "match[0]",
        "You return all that matched, `A: ` included. The answer is the first group.",
    ),
    edit(
        "extract_answer",
        "an_int",
        "match and match[1]",
        "match and int(match[1])",
        "The answer is an int. Return the text of the integer, which is compared as a string.",
    ),
    edit(
        "extract_answer",
        "leading_zeros_removed",
        "match and match[1]",
        "match and str(int(match[1]))",
        "The integer is rewritten: 007 becomes 7. Return it as it is written.",
    ),
    edit(
        "extract_answer",
        "empty_for_none",
        "match and match[1]",
        'match[1] if match else ""',
        "Where there is no answer you return an empty string. It is None.",
    ),
    edit(
        "extract_answer",
        "fails_without_an_answer",
        "match and match[1]",
        "match[1]",
        "Where nothing matches, match is None and has no groups. Return None then.",
    ),
    edit(
        "extract_answer",
        "decimals",
        "[0-9]+)",
        r"[0-9]+(?:\.[0-9]+)?)",
        "Decimal numbers are accepted. The answer is an integer.",
    ),
    edit(
        "extract_answer",
        "plus_sign",
        "-?",
        "[-+]?",
        "A plus sign is accepted. Only a minus sign may stand before the digits.",
    ),
    edit(
        "extract_answer",
        "without_the_a",
        '"A: (',
        '"(',
        "Any integer that ends the text is taken. It has to follow `A: `.",
    ),
    edit(
        "extract_answer",
        "on_a_line_of_its_own",
        '"A: (',
        r'"(?:^|\n)A: (',
        "The answer has to begin a line. What stands before `A: ` does not matter.",
    ),
    edit(
        "extract_answer",
        "at_the_end_of_a_line",
        r'\Z", text)',
        r'$", text, re.MULTILINE)',
        "With MULTILINE, $ matches at the end of every line. The answer ends the text.",
    ),
]


@wrong(
    "extract_answer",
    "This is the last answer wherever it stands in the text. It has to end the text, too.",
)
def last_answer_anywhere(text):
    found = re.findall(r"A: (-?[0-9]+)", text)
    return found[-1] if found else None


@wrong(
    "extract_answer",
    "What follows the last `A: ` is returned whatever it is. It has to be an integer.",
)
def whatever_follows(text):
    _, found, tail = text.rpartition("A: ")
    return tail if found and tail else None


@wrong(
    "extract_answer",
    "str.isdigit is also true of other digits, such as a superscript 2. The digits are 0 to 9.",
)
def by_isdigit(text):
    _, found, tail = text.rpartition("A: ")
    return tail if found and tail.removeprefix("-").isdigit() else None


@wrong(
    "extract_answer",
    "int() also reads blanks around the number, underscores and a plus sign. None of them is an "
    "answer here.",
)
def by_int(text):
    _, found, tail = text.rpartition("A: ")
    try:
        int(tail)
    except ValueError:
        return None
    return tail if found else None


@wrong(
    "extract_answer",
    "The text is split at the first `A: `, so that a text with two answers has none. Split at the "
    "last.",
)
def split_at_the_first(text):
    _, found, tail = text.partition("A: ")
    return tail if found and re.fullmatch("-?[0-9]+", tail) else None


# --- reward_fn_correct --------------------------------------------------------------------------

REWARD_FN_CORRECT = [
    edit(
        "reward_fn_correct",
        "ends_with_the_digits",
        "extract_answer(text) == str(answer)",
        "text.endswith(str(answer))",
        "A text that ends with the answer's digits is right for you, 112 for 12 too, and without "
        "any `A: `. Compare what extract_answer finds.",
    ),
    edit(
        "reward_fn_correct",
        "somewhere_in_the_text",
        "extract_answer(text) == str(answer)",
        "str(answer) in text",
        "The answer may stand anywhere in the text, in the worked steps for one. Compare what "
        "extract_answer finds.",
    ),
    edit(
        "reward_fn_correct",
        "some_answer_of_the_text",
        "extract_answer(text) == str(answer)",
        'f"A: {answer}" in text',
        "Any of the text's answers may be right, so a policy gains by listing many. Only the last "
        "one counts, which ends the text.",
    ),
    edit(
        "reward_fn_correct",
        "any_answer_of_the_batch",
        "extract_answer(text) == str(answer)",
        "extract_answer(text) in [str(a) for a in answers]",
        "A completion is right if its answer is that of any prompt in the batch. Each has its own.",
    ),
    edit(
        "reward_fn_correct",
        "the_first_answer_for_all",
        "str(answer)",
        "str(answers[0])",
        "All completions are compared with the first answer. Each has its own.",
    ),
    edit(
        "reward_fn_correct",
        "answers_taken_as_strings",
        "str(answer)",
        "answer",
        "An answer that is an integer never equals a string, so every reward is 0. Turn it into a "
        "string first.",
    ),
    edit(
        "reward_fn_correct",
        "none_taken_as_text",
        "extract_answer(text) == str(answer)",
        "str(extract_answer(text)) == str(answer)",
        "No answer becomes the text 'None', which can be equal to one. Do not turn it into a "
        "string.",
    ),
    edit(
        "reward_fn_correct",
        "sign_ignored",
        "extract_answer(text) == str(answer)",
        '(extract_answer(text) or "x").strip("-") == str(answer).strip("-")',
        "The sign is ignored: -12 is not 12.",
    ),
    edit(
        "reward_fn_correct",
        "minus_one_for_wrong",
        "float(extract_answer(text) == str(answer))",
        "1.0 if extract_answer(text) == str(answer) else -1.0",
        "A wrong answer gets -1. It gets 0.",
    ),
    edit(
        "reward_fn_correct",
        "rewards_of_bools",
        "float(extract_answer(text) == str(answer))",
        "extract_answer(text) == str(answer)",
        "The rewards are booleans, whose mean and std are not defined. Make them floats.",
    ),
    edit(
        "reward_fn_correct",
        "rewards_of_integers",
        "float(extract_answer(text) == str(answer))",
        "int(extract_answer(text) == str(answer))",
        "The rewards are integers, whose mean and std are not defined. Make them floats.",
    ),
    edit(
        "reward_fn_correct",
        "numbers_of_answers_unchecked",
        "len(answers) == len(samples)",
        "True",
        "Another number of answers than of samples should be a ValueError that names answers.",
    ),
    edit(
        "reward_fn_correct",
        "share_of_right_ones",
        "for text, answer in pairs])",
        "for text, answer in pairs]).mean()",
        "This is the share of right completions. Return one reward for each.",
    ),
    edit(
        "reward_fn_correct",
        "fails_without_an_answer",
        "extract_answer(text) == str(answer)",
        "int(extract_answer(text)) == int(answer)",
        "Where there is no answer, int(None) is an error. Such a completion gets 0.",
    ),
    edit(
        "reward_fn_correct",
        "half_for_an_answer",
        "float(extract_answer(text) == str(answer))",
        "0.5 * (extract_answer(text) is not None) + 0.5 * (extract_answer(text) == str(answer))",
        "A wrong answer gets half of the reward for its form. The form is reward_fn_format's "
        "business.",
    ),
    edit(
        "reward_fn_correct",
        "answer_of_the_first_like_it",
        "str(answer)",
        "str(answers[samples.index(text)])",
        "index finds the first completion that reads alike, which may answer another prompt. Go "
        "through samples and answers side by side.",
    ),
]


@wrong(
    "reward_fn_correct",
    "zip stops at the shorter list, so that samples without an answer get no reward at all. Raise "
    "a ValueError that names answers.",
)
def cut_to_the_shorter(samples, answers):
    pairs = zip(samples, answers, strict=False)
    return torch.tensor([float(extract_answer(s) == str(a)) for s, a in pairs])


@wrong(
    "reward_fn_correct",
    "The text is stripped first, so that answers followed by blanks are right. Take the text as it "
    "is.",
)
def texts_stripped(samples, answers):
    if len(samples) != len(answers):
        raise ValueError("answers should be one for each sample")
    pairs = zip(samples, answers, strict=True)
    return torch.tensor([float(extract_answer(s.strip()) == str(a)) for s, a in pairs])


@wrong(
    "reward_fn_correct",
    "The answers are taken off the list that you were given. Leave your arguments as they are.",
)
def answers_used_up(samples, answers):
    if len(samples) != len(answers):
        raise ValueError("answers should be one for each sample")
    return torch.tensor([float(extract_answer(s) == str(answers.pop(0))) for s in samples])


@wrong(
    "reward_fn_correct",
    "This is a list of numbers. Return a tensor.",
)
def a_list_of_rewards(samples, answers):
    if len(samples) != len(answers):
        raise ValueError("answers should be one for each sample")
    pairs = zip(samples, answers, strict=True)
    return [float(extract_answer(s) == str(a)) for s, a in pairs]


# --- reward_fn_format ---------------------------------------------------------------------------

REWARD_FN_FORMAT = [
    edit(
        "reward_fn_format",
        "steps_not_asked_for",
        "is_worked(text) and extract_answer(text) is not None",
        "extract_answer(text) is not None",
        "A direct answer passes. The worked steps belong to the format.",
    ),
    edit(
        "reward_fn_format",
        "answer_not_asked_for",
        "is_worked(text) and extract_answer(text) is not None",
        "is_worked(text)",
        "Worked steps alone pass, although the text has no answer to extract.",
    ),
    edit(
        "reward_fn_format",
        "either_of_the_two",
        "is_worked(text) and",
        "is_worked(text) or",
        "Either the steps or the answer will do for you. Both are needed.",
    ),
    edit(
        "reward_fn_format",
        "half_for_either",
        "float(is_worked(text) and extract_answer(text) is not None)",
        "0.5 * is_worked(text) + 0.5 * (extract_answer(text) is not None)",
        "Each part gets one half. The reward is 1 where both are there, and 0 otherwise.",
    ),
    edit(
        "reward_fn_format",
        "an_answer_anywhere",
        "extract_answer(text) is not None",
        '"A: " in text',
        "An `A: ` anywhere passes. The answer has to be one that can be extracted.",
    ),
    edit(
        "reward_fn_format",
        "answer_of_the_stripped_text",
        "extract_answer(text)",
        "extract_answer(text.strip())",
        "The text is stripped before its answer is extracted. Take it as it is.",
    ),
    edit(
        "reward_fn_format",
        "two_of_the_steps",
        "is_worked(text)",
        '("ones " in text and "tens " in text)',
        "The sum may be left out. All three steps are needed.",
    ),
    edit(
        "reward_fn_format",
        "some_step",
        "is_worked(text)",
        'any(step in text for step in ("ones ", "tens ", "sum "))',
        "One of the steps will do for you. All three are needed.",
    ),
    edit(
        "reward_fn_format",
        "steps_in_order",
        "is_worked(text)",
        'bool(re.search("ones .*tens .*sum ", text))',
        "The steps have to come in one order. `is_worked` asks only that they are there.",
    ),
    edit(
        "reward_fn_format",
        "steps_of_the_corpus",
        "is_worked(text)",
        r'bool(re.match(r"ones \d\+\d=\d+ tens \d\+\d=\d+ sum \d+\+\d+=\d+\n", text))',
        "The steps have to be written exactly as in the corpus. `is_worked` asks only that their "
        "names are there.",
    ),
    edit(
        "reward_fn_format",
        "sum_that_agrees",
        "extract_answer(text) is not None",
        'extract_answer(text) is not None and text.endswith("=" + extract_answer(text) + "\\nA: " '
        "+ extract_answer(text))",
        "The answer has to be the sum that was worked out. Whether it is right plays no part in "
        "the format.",
    ),
    edit(
        "reward_fn_format",
        "minus_one_for_none",
        "float(is_worked(text) and extract_answer(text) is not None)",
        "1.0 if is_worked(text) and extract_answer(text) is not None else -1.0",
        "A text without the format gets -1. It gets 0.",
    ),
    edit(
        "reward_fn_format",
        "formats_of_bools",
        "float(is_worked(text) and extract_answer(text) is not None)",
        "bool(is_worked(text) and extract_answer(text) is not None)",
        "The rewards are booleans. Make them floats, as other rewards are.",
    ),
    edit(
        "reward_fn_format",
        "answer_taken_as_truth",
        "extract_answer(text) is not None",
        "int(extract_answer(text) or 0) > 0",
        "An answer of 0 or below counts as none. Ask whether it is None.",
    ),
    edit(
        "reward_fn_format",
        "steps_before_the_first_answer",
        "is_worked(text)",
        'is_worked(text.split("A: ")[0])',
        "The steps have to come before the first `A: `. They may stand anywhere in the text.",
    ),
]


@wrong(
    "reward_fn_format",
    "This is one number for all texts. Return one reward for each.",
)
def share_with_the_format(samples):
    right = ["ones " in s and "tens " in s and "sum " in s for s in samples]
    pairs = zip(samples, right, strict=True)
    rewards = torch.tensor([float(r and extract_answer(s) is not None) for s, r in pairs])
    return rewards.mean()


# --- combine_rewards ----------------------------------------------------------------------------

COMBINE_REWARDS = [
    edit(
        "combine_rewards",
        "weighted_mean",
        "weights @ rewards.detach()",
        "weights @ rewards.detach() / len(rewards)",
        "You divide by the number of functions. It is a sum: the weights say all.",
    ),
    edit(
        "combine_rewards",
        "weights_normalised",
        "weights @ rewards.detach()",
        "(weights / weights.sum()) @ rewards.detach()",
        "The weights are divided by their sum. They are taken as they are, and may add up to 0.",
    ),
    edit(
        "combine_rewards",
        "softmax_of_weights",
        "weights @ rewards.detach()",
        "weights.softmax(0) @ rewards.detach()",
        "The weights go through a softmax. They are taken as they are.",
    ),
    edit(
        "combine_rewards",
        "sizes_of_weights",
        "weights @ rewards.detach()",
        "weights.abs() @ rewards.detach()",
        "The weights lose their sign. A negative one is a penalty.",
    ),
    edit(
        "combine_rewards",
        "no_negative_weights",
        "weights @ rewards.detach()",
        "weights.clamp(min=0) @ rewards.detach()",
        "Negative weights count as 0. They are penalties.",
    ),
    edit(
        "combine_rewards",
        "unweighted",
        "weights @ rewards.detach()",
        "rewards.detach().sum(0)",
        "The weights have no effect.",
    ),
    edit(
        "combine_rewards",
        "over_the_batch",
        "weights @ rewards.detach()",
        "rewards.detach().sum(-1) * weights",
        "You sum over the completions, and are left with one number for each function. Sum over "
        "the functions.",
    ),
    edit(
        "combine_rewards",
        "not_summed",
        "weights @ rewards.detach()",
        "weights[:, None] * rewards.detach()",
        "The rewards are weighted but not summed over the functions.",
    ),
    edit(
        "combine_rewards",
        "functions_left_as_an_axis",
        "weights @ rewards.detach()",
        "(weights @ rewards.detach())[None]",
        "The result has an axis too many. Return one number for each completion.",
    ),
    edit(
        "combine_rewards",
        "best_of_the_functions",
        "weights @ rewards.detach()",
        "(weights[:, None] * rewards.detach()).amax(0)",
        "You take the largest of the weighted rewards. They are summed.",
    ),
    edit(
        "combine_rewards",
        "product_of_rewards",
        "weights @ rewards.detach()",
        "(weights[:, None] * rewards.detach()).prod(0)",
        "You multiply the rewards of the functions. They are summed.",
    ),
    edit(
        "combine_rewards",
        "each_centered_first",
        "weights @ rewards.detach()",
        "weights @ (rewards - rewards.mean(-1, keepdim=True)).detach()",
        "Each function's rewards are centered first. They are taken as they are; a baseline comes "
        "later.",
    ),
    edit(
        "combine_rewards",
        "rewards_not_detached",
        "rewards.detach()",
        "rewards",
        "Gradients flow through the rewards. They are constants: detach them.",
    ),
    edit(
        "combine_rewards",
        "weights_unchecked",
        "len(weights) == len(rewards)",
        "True",
        "Another number of weights than of functions should be a ValueError that names weights.",
    ),
    edit(
        "combine_rewards",
        "weights_rounded",
        "weights @ rewards.detach()",
        "weights.round() @ rewards.detach()",
        "The weights are rounded to integers.",
    ),
    edit(
        "combine_rewards",
        "weights_in_reverse",
        "weights @ rewards.detach()",
        "weights.flip(0) @ rewards.detach()",
        "The weights are taken in reverse: the first belongs to the first function.",
    ),
    edit(
        "combine_rewards",
        "rewards_weighted_in_place",
        "weights @ rewards.detach()",
        "rewards.detach().mul_(weights[:, None]).sum(0)",
        "The rewards that you were given are changed in place: detach() shares their memory.",
    ),
]


@wrong(
    "combine_rewards",
    "zip stops at the shorter, so that functions without a weight are dropped in silence. Raise a "
    "ValueError that names weights.",
)
def functions_dropped(rewards, weights):
    total = torch.zeros_like(rewards[0])
    for weight, row in zip(weights, rewards.detach(), strict=False):
        total = total + weight * row
    return total


@wrong(
    "combine_rewards",
    "The sum starts from the first function's own rewards and changes them. Start from zeros.",
)
def summed_into_the_first(rewards, weights):
    if len(weights) != len(rewards):
        raise ValueError("weights should be one for each function")
    total = rewards.detach()[0].mul_(weights[0])
    for weight, row in zip(weights[1:], rewards.detach()[1:], strict=True):
        total += weight * row
    return total


# --- pass_at_k ----------------------------------------------------------------------------------

PASS_AT_K = [
    edit(
        "pass_at_k",
        "with_replacement",
        "1 - math.comb(n - c, k) / math.comb(n, k)",
        "1 - (1 - c / n) ** k",
        "1 - (1 - c/n)^k draws with replacement, and is biased downwards. Count the subsets.",
    ),
    edit(
        "pass_at_k",
        "share_of_right_ones",
        "1 - math.comb(n - c, k) / math.comb(n, k)",
        "c / n",
        "This is pass@1. One of k completions is right more often.",
    ),
    edit(
        "pass_at_k",
        "all_wrong",
        "1 - math.comb(n - c, k) / math.comb(n, k)",
        "math.comb(n - c, k) / math.comb(n, k)",
        "This is the probability that all k are wrong: take it from 1.",
    ),
    edit(
        "pass_at_k",
        "all_right",
        "1 - math.comb(n - c, k) / math.comb(n, k)",
        "math.comb(c, k) / math.comb(n, k)",
        "This is the probability that all k are right. One is enough.",
    ),
    edit(
        "pass_at_k",
        "some_wrong",
        "math.comb(n - c, k)",
        "math.comb(c, k)",
        "This is the probability that one of k is wrong: C(n - c, k) counts the draws without a "
        "right one.",
    ),
    edit(
        "pass_at_k",
        "exactly_one",
        "1 - math.comb(n - c, k) / math.comb(n, k)",
        "c * math.comb(n - c, k - 1) / math.comb(n, k)",
        "This is the probability of exactly one right completion. More than one will do as well.",
    ),
    edit(
        "pass_at_k",
        "k_times_the_share",
        "1 - math.comb(n - c, k) / math.comb(n, k)",
        "min(1.0, k * c / n)",
        "The shares of k completions do not add up: two of them can be right at once.",
    ),
    edit(
        "pass_at_k",
        "any_right_at_all",
        "1 - math.comb(n - c, k) / math.comb(n, k)",
        "float(c > 0)",
        "This is 1 as soon as one of all n is right, which is pass@n. Only k of them are drawn.",
    ),
    edit(
        "pass_at_k",
        "one_more_drawn",
        "1 - math.comb(n - c, k) / math.comb(n, k)",
        "1 - math.comb(n - c, k + 1) / max(math.comb(n, k + 1), 1)",
        "k + 1 completions are drawn.",
    ),
    edit(
        "pass_at_k",
        "one_fewer_drawn",
        "1 - math.comb(n - c, k) / math.comb(n, k)",
        "1 - math.comb(n - c, k - 1) / math.comb(n, k - 1)",
        "k - 1 completions are drawn.",
    ),
    edit(
        "pass_at_k",
        "sure_when_as_many_are_wrong",
        "return 1",
        "if n - c <= k:\n        return 1.0\n    return 1",
        "With exactly k wrong completions all of those drawn can be wrong. It is 1 where fewer "
        "than k are.",
    ),
    edit(
        "pass_at_k",
        "k_above_n_allowed",
        "require(1 <= k <= n",
        "require(1 <= k",
        "A k above n should be a ValueError that names k: so many were not sampled.",
    ),
    edit(
        "pass_at_k",
        "k_of_zero_allowed",
        "require(1 <= k <= n",
        "require(0 <= k <= n",
        "A k of 0 should be a ValueError that names k.",
    ),
    edit(
        "pass_at_k",
        "c_above_n_allowed",
        "require(0 <= c <= n",
        "require(0 <= c",
        "A c above n should be a ValueError that names c.",
    ),
    edit(
        "pass_at_k",
        "negative_c_allowed",
        "require(0 <= c <= n",
        "require(c <= n",
        "A negative c should be a ValueError that names c.",
    ),
    edit(
        "pass_at_k",
        "percent",
        "1 - math.comb(n - c, k) / math.comb(n, k)",
        "100 * (1 - math.comb(n - c, k) / math.comb(n, k))",
        "This is in percent. A probability is in [0, 1].",
    ),
    edit(
        "pass_at_k",
        "none_right_before_the_arguments_are_checked",
        "    require(1 <= k <= n",
        "    if c == 0:\n        return 0.0\n    require(1 <= k <= n",
        "With c = 0 a k that cannot be passes in silence. Check the arguments first.",
    ),
]


@wrong(
    "pass_at_k",
    "Floats hold no factorial beyond 170!. Use math.comb, or multiply the factors one by one.",
)
def factorials_in_floats(n, c, k):
    _check_counts(n, c, k)
    if n - c < k:
        return 1.0

    def comb(a, b):
        return float(math.factorial(a)) / float(math.factorial(b)) / float(math.factorial(a - b))

    return 1 - comb(n - c, k) / comb(n, k)


@wrong(
    "pass_at_k",
    "This divides the completions into runs of k and counts those with a right one, which depends "
    "on their order. Average over all subsets.",
)
def runs_of_k(n, c, k):
    _check_counts(n, c, k)
    runs = n // k
    return sum(start * k < c for start in range(runs)) / runs


@wrong(
    "pass_at_k",
    "The number of wrong completions that are left stays the same from draw to draw. Each draw "
    "takes one away.",
)
def wrong_ones_put_back(n, c, k):
    _check_counts(n, c, k)
    missed = 1.0
    for i in range(k):
        missed *= min(1.0, (n - c) / (n - i))
    return 1 - missed


def _check_counts(n, c, k):
    if not 1 <= k <= n:
        raise ValueError(f"k should be in [1, {n}], but is {k}")
    if not 0 <= c <= n:
        raise ValueError(f"c should be in [0, {n}], but is {c}")


# --- select_informative_groups ------------------------------------------------------------------

SELECT_GROUPS = [
    edit(
        "select_informative_groups",
        "the_constant_ones",
        "groups.amax(-1) != groups.amin(-1)",
        "groups.amax(-1) == groups.amin(-1)",
        "True stands for the constant groups here. It is to stand for those that teach something.",
    ),
    edit(
        "select_informative_groups",
        "some_reward",
        "groups.amax(-1) != groups.amin(-1)",
        "groups.amax(-1) > 0",
        "A group with any reward counts, also one that is right throughout. Its rewards have to "
        "differ.",
    ),
    edit(
        "select_informative_groups",
        "some_failure",
        "groups.amax(-1) != groups.amin(-1)",
        "groups.amin(-1) < 1",
        "A group with any failure counts, also one that fails throughout. Its rewards have to "
        "differ.",
    ),
    edit(
        "select_informative_groups",
        "mean_between_0_and_1",
        "groups.amax(-1) != groups.amin(-1)",
        "(groups.mean(-1) > 0) & (groups.mean(-1) < 1)",
        "A mean between 0 and 1 tells only for rewards of 0 and 1. Ask whether the rewards differ.",
    ),
    edit(
        "select_informative_groups",
        "beside_their_mean",
        "groups.amax(-1) != groups.amin(-1)",
        "(groups != groups.mean(-1, keepdim=True)).any(-1)",
        "In floats the mean of equal rewards need not be exactly their value. Compare max and min.",
    ),
    edit(
        "select_informative_groups",
        "enough_spread",
        "groups.amax(-1) != groups.amin(-1)",
        "groups.std(-1) > 1e-4",
        "A small spread counts as none. However little rewards differ, the advantages tell them "
        "apart.",
    ),
    edit(
        "select_informative_groups",
        "clearly_different",
        "groups.amax(-1) != groups.amin(-1)",
        "~torch.isclose(groups.amax(-1), groups.amin(-1))",
        "isclose takes rewards for equal that differ little beside their size. Only equal rewards "
        "teach nothing.",
    ),
    edit(
        "select_informative_groups",
        "first_and_last",
        "groups.amax(-1) != groups.amin(-1)",
        "groups[:, 0] != groups[:, -1]",
        "Only the first and the last reward of a group are compared. One between them may differ.",
    ),
    edit(
        "select_informative_groups",
        "first_and_second",
        "groups.amax(-1) != groups.amin(-1)",
        "groups[:, 0] != groups[:, 1]",
        "Only the first two rewards of a group are compared.",
    ),
    edit(
        "select_informative_groups",
        "all_different",
        "groups.amax(-1) != groups.amin(-1)",
        "(groups.sort(-1).values.diff(dim=-1) != 0).all(-1)",
        "A group with two equal rewards is dropped. It is enough that not all are equal.",
    ),
    edit(
        "select_informative_groups",
        "one_for_each_completion",
        "groups.amax(-1) != groups.amin(-1)",
        "(groups.amax(-1) != groups.amin(-1)).repeat_interleave(group_size)",
        "This is one entry for each completion. Return one for each group.",
    ),
    edit(
        "select_informative_groups",
        "indices",
        "groups.amax(-1) != groups.amin(-1)",
        "(groups.amax(-1) != groups.amin(-1)).nonzero().flatten()",
        "These are the indices of the groups. Return true or false for each.",
    ),
    edit(
        "select_informative_groups",
        "numbers_for_bools",
        "groups.amax(-1) != groups.amin(-1)",
        "(groups.amax(-1) != groups.amin(-1)).float()",
        "The result is a tensor of floats. Return booleans: ~ and indexing depend on it.",
    ),
    edit(
        "select_informative_groups",
        "axes_swapped",
        "groups.amax(-1) != groups.amin(-1)",
        "groups.amax(0) != groups.amin(0)",
        "You compare across the groups. Compare the members of each.",
    ),
    edit(
        "select_informative_groups",
        "strided_groups",
        "_split_groups(rewards, group_size)",
        "_split_groups(rewards, group_size).reshape(group_size, -1).T",
        "You take every n-th reward as a group. The completions of a prompt stand side by side.",
    ),
    edit(
        "select_informative_groups",
        "size_as_a_number",
        "_split_groups(rewards, group_size)",
        "_split_groups(rewards, group_size).reshape(group_size, -1)",
        "group_size is taken for the number of groups. It is the number of completions of one "
        "prompt.",
    ),
    edit(
        "select_informative_groups",
        "whole_batch",
        "groups.amax(-1) != groups.amin(-1)",
        "(groups != rewards[0]).any(-1)",
        "The rewards of each group are compared with the batch's first. Compare them with each "
        "other.",
    ),
    edit(
        "select_informative_groups",
        "selection_unchecked",
        "_split_groups(rewards, group_size)",
        "rewards[: len(rewards) // group_size * group_size].reshape(-1, group_size)",
        "A group_size that does not divide the batch passes in silence, and the last rewards are "
        "lost. Raise a ValueError that names group_size.",
    ),
    edit(
        "select_informative_groups",
        "selection_of_single_ones",
        "_split_groups(rewards, group_size)",
        "_split_groups(rewards, 2 if group_size == 1 else group_size)",
        "A group_size of 1 passes in silence. A completion alone has nothing to differ from: "
        "raise a ValueError that names group_size.",
    ),
]

# --- leave_one_out_advantages -------------------------------------------------------------------

OTHERS = "(groups.sum(-1, keepdim=True) - groups) / (group_size - 1)"

LEAVE_ONE_OUT = [
    edit(
        "leave_one_out_advantages",
        "mean_of_the_group",
        OTHERS,
        "groups.mean(-1, keepdim=True)",
        "The baseline is the mean of the whole group, the completion's own reward included. Leave "
        "that one out.",
    ),
    edit(
        "leave_one_out_advantages",
        "divided_by_the_group_size",
        "/ (group_size - 1)",
        "/ group_size",
        "The others are group_size - 1: divide by that.",
    ),
    edit(
        "leave_one_out_advantages",
        "own_reward_left_in",
        "(groups.sum(-1, keepdim=True) - groups)",
        "groups.sum(-1, keepdim=True)",
        "The completion's own reward is still in the sum: take it off.",
    ),
    edit(
        "leave_one_out_advantages",
        "sum_of_the_others",
        " / (group_size - 1)",
        "",
        "The baseline is the sum of the others. It is their mean.",
    ),
    edit(
        "leave_one_out_advantages",
        "factor_upside_down",
        OTHERS,
        "groups - (groups - groups.mean(-1, keepdim=True)) * (group_size - 1) / group_size",
        "The factor is upside down: leaving one out makes the advantages larger than GRPO's, by "
        "G / (G - 1).",
    ),
    edit(
        "leave_one_out_advantages",
        "best_of_the_others",
        OTHERS,
        "torch.stack([groups.masked_fill(torch.arange(group_size) == i, -torch.inf).amax(-1) "
        "for i in range(group_size)], -1)",
        "The baseline is the best of the others. It is their mean.",
    ),
    edit(
        "leave_one_out_advantages",
        "next_one_as_a_baseline",
        OTHERS,
        "groups.roll(-1, -1)",
        "The baseline is the next completion's reward alone. It is the mean of all the others.",
    ),
    edit(
        "leave_one_out_advantages",
        "median_of_the_group",
        OTHERS,
        "groups.median(-1, keepdim=True).values",
        "The baseline is the group's median. It is the mean of the others.",
    ),
    edit(
        "leave_one_out_advantages",
        "others_of_the_batch",
        OTHERS,
        "(groups.sum() - groups) / (groups.numel() - 1)",
        "The others are those of the whole batch, so that an easy prompt looks good throughout. "
        "They are those of the group.",
    ),
    edit(
        "leave_one_out_advantages",
        "others_sign_flipped",
        "(groups - others)",
        "(others - groups)",
        "The sign is flipped: a reward above the others' mean is an advantage, and positive.",
    ),
    edit(
        "leave_one_out_advantages",
        "scaled_by_the_std",
        "(groups - others)",
        "((groups - others) / (groups.std(-1, keepdim=True) + 1e-4))",
        "The advantages are divided by the group's std. RLOO leaves them as they are.",
    ),
    edit(
        "leave_one_out_advantages",
        "others_not_detached",
        "rewards.detach()",
        "rewards",
        "Gradients flow through the advantages. They are constants of the policy gradient: detach "
        "the rewards.",
    ),
    edit(
        "leave_one_out_advantages",
        "only_the_others_detached",
        "(groups - others)",
        "(_split_groups(rewards, group_size) - others)",
        "Only the baseline is detached. The reward is a constant, too.",
    ),
    edit(
        "leave_one_out_advantages",
        "rounding_noise",
        ".masked_fill(is_constant, 0.0)",
        "",
        "A group of equal rewards should give exact zeros. In floats the mean of the others need "
        "not be exactly the reward: test max == min.",
    ),
    edit(
        "leave_one_out_advantages",
        "nearly_constant",
        "groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)",
        "torch.isclose(groups, groups[:, :1], atol=1e-4).all(-1, keepdim=True)",
        "Rewards that differ little count as equal. Only equal rewards give zeros.",
    ),
    edit(
        "leave_one_out_advantages",
        "constant_by_isclose",
        "groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)",
        "torch.isclose(groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True))",
        "isclose takes rewards for equal that differ little beside their size. Ask whether they "
        "are equal.",
    ),
    edit(
        "leave_one_out_advantages",
        "ends_of_the_group",
        "groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)",
        "groups[:, :1] == groups[:, -1:]",
        "A group counts as constant if its first and last reward are equal. Those between them "
        "may differ.",
    ),
    edit(
        "leave_one_out_advantages",
        "one_constant_group_for_all",
        "groups.amax(-1, keepdim=True) == groups.amin(-1, keepdim=True)",
        "(groups.amax(-1) == groups.amin(-1)).any()",
        "One constant group sets the whole batch to zero. Treat each group for itself.",
    ),
    edit(
        "leave_one_out_advantages",
        "strided_others",
        "_split_groups(rewards.detach(), group_size)",
        "_split_groups(rewards.detach(), group_size).reshape(group_size, -1).T",
        "You take every n-th reward as a group. The completions of a prompt stand side by side.",
    ),
    edit(
        "leave_one_out_advantages",
        "size_as_a_number_of_groups",
        "groups = _split_groups(rewards.detach(), group_size)",
        "groups = _split_groups(rewards.detach(), group_size).reshape(group_size, -1)\n"
        "    group_size = groups.shape[1]",
        "group_size is taken for the number of groups. It is the number of completions of one "
        "prompt.",
    ),
    edit(
        "leave_one_out_advantages",
        "matrix_of_groups",
        '"group member -> (group member)"',
        '"group member -> group member"',
        "The result has an axis of groups and one of members. Return one advantage per reward, in "
        "the order of the rewards.",
    ),
    edit(
        "leave_one_out_advantages",
        "members_first",
        '"group member -> (group member)"',
        '"group member -> (member group)"',
        "The advantages come back in another order than the rewards: the groups' first members, "
        "then their second ones.",
    ),
    edit(
        "leave_one_out_advantages",
        "others_unchecked",
        "_split_groups(rewards.detach(), group_size)",
        "rewards.detach()[: len(rewards) // group_size * group_size].reshape(-1, group_size)",
        "A group_size that does not divide the batch passes in silence, and the last rewards are "
        "lost. Raise a ValueError that names group_size.",
    ),
    edit(
        "leave_one_out_advantages",
        "changed_in_place",
        "(groups - others)",
        "groups.sub_(others)",
        "The rewards that you were given are changed in place: a view of them still shares their "
        "memory. Make a new tensor.",
    ),
]

# --- mask_truncated -----------------------------------------------------------------------------

MASK_TRUNCATED = [
    edit(
        "mask_truncated",
        "finished_ones_dropped",
        "finished[:, None]",
        "~finished[:, None]",
        "You drop the completions that did finish. Those that were cut off are to go.",
    ),
    edit(
        "mask_truncated",
        "either_will_do",
        "mask & finished[:, None]",
        "mask | finished[:, None]",
        "With | the padding of finished completions comes in. A token needs both: use &.",
    ),
    edit(
        "mask_truncated",
        "mask_forgotten",
        "mask & finished[:, None]",
        "finished[:, None].expand_as(mask).clone()",
        "The mask is forgotten: what follows the end of a finished completion comes in.",
    ),
    edit(
        "mask_truncated",
        "nothing_dropped",
        "mask & finished[:, None]",
        "mask.clone()",
        "Nothing is dropped: finished has no effect.",
    ),
    edit(
        "mask_truncated",
        "rows_taken_out",
        "mask & finished[:, None]",
        "mask[finished]",
        "The rows are taken out, so that mask and log-probs no longer fit. Keep them, all false.",
    ),
    edit(
        "mask_truncated",
        "along_the_wrong_axis",
        "finished[:, None]",
        "finished[None, : mask.shape[1]]",
        "finished is laid along the tokens. It has one entry for each completion: [:, None].",
    ),
    edit(
        "mask_truncated",
        "last_token_only",
        "mask & finished[:, None]",
        "mask & (finished[:, None] | (torch.arange(mask.shape[1]) < mask.sum(-1, keepdim=True) - 1"
        "))",
        "Only the last token of a completion that was cut off is dropped. All of it goes.",
    ),
    edit(
        "mask_truncated",
        "all_or_nothing",
        "finished[:, None]",
        "finished.all()",
        "One completion that was cut off drops the whole batch.",
    ),
    edit(
        "mask_truncated",
        "a_product",
        "mask & finished[:, None]",
        "mask.float() * finished[:, None]",
        "The mask has become floats. It stays boolean: ~ and masked_fill depend on it.",
    ),
    edit(
        "mask_truncated",
        "integers_for_a_mask",
        "mask & finished[:, None]",
        "mask.long() * finished[:, None]",
        "The mask has become integers. It stays boolean: ~ and masked_fill depend on it.",
    ),
    edit(
        "mask_truncated",
        "mask_changed_in_place",
        "mask & finished[:, None]",
        "mask.logical_and_(finished[:, None])",
        "The mask that you were given is changed in place. Make a new one.",
    ),
    edit(
        "mask_truncated",
        "the_same_mask_back",
        "mask & finished[:, None]",
        "mask if finished.all() else mask & finished[:, None]",
        "Where all completions finished you return the mask that you were given, and whoever "
        "changes one changes both. Make a new one.",
    ),
    edit(
        "mask_truncated",
        "first_token_kept",
        "mask & finished[:, None]",
        "mask & (finished[:, None] | (torch.arange(mask.shape[1]) == 0))",
        "The first token of a completion that was cut off is kept. All of it goes.",
    ),
]

# --- apply_missing_eos_penalty ------------------------------------------------------------------

MISSING_EOS = [
    edit(
        "apply_missing_eos_penalty",
        "penalty_added",
        "scores - penalty",
        "scores + penalty",
        "The penalty is added, which rewards being cut off. Subtract it.",
    ),
    edit(
        "apply_missing_eos_penalty",
        "finished_ones_penalised",
        "torch.where(finished, scores, scores - penalty)",
        "torch.where(finished, scores - penalty, scores)",
        "The penalty hits the completions that finished.",
    ),
    edit(
        "apply_missing_eos_penalty",
        "score_replaced",
        "scores - penalty",
        "torch.full_like(scores, -penalty)",
        "The score is replaced by minus the penalty, as a flag of open-instruct does. Subtract the "
        "penalty from it.",
    ),
    edit(
        "apply_missing_eos_penalty",
        "score_of_zero",
        "scores - penalty",
        "torch.zeros_like(scores)",
        "What was cut off gets 0, whatever the penalty. Subtract the penalty from its score.",
    ),
    edit(
        "apply_missing_eos_penalty",
        "all_penalised",
        "torch.where(finished, scores, scores - penalty)",
        "scores - penalty",
        "Every completion gets the penalty, which a baseline takes away again. Only those that did "
        "not finish do.",
    ),
    edit(
        "apply_missing_eos_penalty",
        "none_penalised",
        "torch.where(finished, scores, scores - penalty)",
        "scores.clone()",
        "The penalty has no effect.",
    ),
    edit(
        "apply_missing_eos_penalty",
        "score_scaled",
        "scores - penalty",
        "scores * (1 - penalty)",
        "The score is scaled down, so that one of 0 is not penalised at all. Subtract the penalty.",
    ),
    edit(
        "apply_missing_eos_penalty",
        "never_below_zero",
        "scores - penalty",
        "(scores - penalty).clamp(min=0)",
        "The score is held at 0. A wrong answer that was cut off is worth less than one that "
        "ended.",
    ),
    edit(
        "apply_missing_eos_penalty",
        "shared_penalty",
        "scores - penalty",
        "scores - penalty / (~finished).sum().clamp(min=1)",
        "The penalty is shared among the completions that were cut off. Each gets all of it.",
    ),
    edit(
        "apply_missing_eos_penalty",
        "bonus_for_the_others",
        "torch.where(finished, scores, scores - penalty)",
        "torch.where(finished, scores + penalty, scores - penalty)",
        "Those that finished get a bonus as well. They keep their score.",
    ),
    edit(
        "apply_missing_eos_penalty",
        "size_of_the_score",
        "scores - penalty",
        "scores - penalty * scores.abs()",
        "The penalty is multiplied by the score's size. It is the same for all.",
    ),
    edit(
        "apply_missing_eos_penalty",
        "scores_not_detached",
        "scores = scores.detach()",
        "pass",
        "Gradients flow through the scores. They are constants: detach them.",
    ),
]


@wrong(
    "apply_missing_eos_penalty",
    "The scores that you were given are changed in place. Make new ones.",
)
def scores_changed_in_place(scores, finished, penalty):
    scores = scores.detach()
    scores[~finished] -= penalty
    return scores


@wrong(
    "apply_missing_eos_penalty",
    "Where all completions finished you return the scores that you were given, and whoever changes "
    "one changes both. Make new ones.",
)
def the_same_scores_back(scores, finished, penalty):
    scores = scores.detach()
    return scores if finished.all() else torch.where(finished, scores, scores - penalty)


# --- aggregate_tokens ---------------------------------------------------------------------------

AGGREGATE_TOKENS = [
    edit(
        "aggregate_tokens",
        "sequence_over_all_tokens",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "masked_mean(per_token, mask)",
        'The mode "sequence" averages over all tokens at once, as "token" does. Average each '
        "completion first, then the batch.",
    ),
    edit(
        "aggregate_tokens",
        "sequence_of_sums",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "per_token.masked_fill(~mask, 0.0).sum(-1).mean()",
        'The mode "sequence" sums each completion\'s tokens. Divide by its own number of tokens.',
    ),
    edit(
        "aggregate_tokens",
        "sequence_by_the_width",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "per_token.masked_fill(~mask, 0.0).mean()",
        'The mode "sequence" divides by the width of the tensor. Divide by each completion\'s own '
        "number of tokens.",
    ),
    edit(
        "aggregate_tokens",
        "sequence_without_empty_rows",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "masked_mean(masked_mean(per_token, mask, dim=-1), mask.any(-1))",
        'The mode "sequence" leaves empty completions out of the batch mean. They count 0, but '
        "they count.",
    ),
    edit(
        "aggregate_tokens",
        "sequence_summed_over_the_batch",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "masked_mean(per_token, mask, dim=-1).sum()",
        'The mode "sequence" sums over the batch. Take the mean, or the step grows with it.',
    ),
    edit(
        "aggregate_tokens",
        "sequence_along_the_wrong_axis",
        "masked_mean(per_token, mask, dim=-1).mean()",
        "masked_mean(per_token, mask, dim=0).mean()",
        "You average over the batch at each position, then over positions. Average each "
        "completion, then the batch.",
    ),
    edit(
        "aggregate_tokens",
        "token_as_sequence",
        'if mode == "sequence":',
        'if mode in ("sequence", "token"):',
        'The mode "token" does the same as "sequence". It averages over all tokens of the batch.',
    ),
    edit(
        "aggregate_tokens",
        "token_over_every_position",
        "return masked_mean(per_token, mask)",
        "return per_token.masked_fill(~mask, 0.0).mean()",
        'The mode "token" divides by all positions. Divide by the number of true ones.',
    ),
    edit(
        "aggregate_tokens",
        "token_sum_by_the_batch",
        "return masked_mean(per_token, mask)",
        "return per_token.masked_fill(~mask, 0.0).sum() / len(mask)",
        'The mode "token" divides by the number of completions. Divide by that of tokens.',
    ),
    edit(
        "aggregate_tokens",
        "constant_by_the_width",
        "(len(mask) * max_len)",
        "mask.numel()",
        'The mode "constant" divides by the width of this batch. Dr. GRPO divides by max_len, '
        "whatever was sampled.",
    ),
    edit(
        "aggregate_tokens",
        "constant_without_the_batch",
        "(len(mask) * max_len)",
        "max_len",
        'The mode "constant" divides by max_len alone, so that the step grows with the batch. '
        "Divide by batch * max_len.",
    ),
    edit(
        "aggregate_tokens",
        "constant_without_max_len",
        "(len(mask) * max_len)",
        "len(mask)",
        'The mode "constant" divides by the batch alone: max_len has no effect.',
    ),
    edit(
        "aggregate_tokens",
        "constant_of_rows_with_tokens",
        "(len(mask) * max_len)",
        "(mask.any(-1).sum().clamp(min=1) * max_len)",
        'The mode "constant" leaves empty completions out of the batch. They count.',
    ),
    edit(
        "aggregate_tokens",
        "constant_twice_averaged",
        "per_token.masked_fill(~mask, 0.0).sum() / (len(mask) * max_len)",
        "masked_mean(per_token, mask) / max_len",
        'The mode "constant" divides the mean over tokens by max_len. Divide their sum by batch * '
        "max_len.",
    ),
    edit(
        "aggregate_tokens",
        "constant_multiplies",
        "per_token.masked_fill(~mask, 0.0).sum() / (len(mask) * max_len)",
        "(per_token * mask).sum() / (len(mask) * max_len)",
        "You multiply by the mask, and 0 * nan is nan. Replace what is masked out.",
    ),
    edit(
        "aggregate_tokens",
        "constant_without_the_mask",
        "per_token.masked_fill(~mask, 0.0).sum()",
        "per_token.nan_to_num(0.0, 0.0, 0.0).sum()",
        'The mode "constant" sums over masked positions, too. In training these are finite.',
    ),
    edit(
        "aggregate_tokens",
        "another_default_mode",
        'mode: str = "sequence"',
        'mode: str = "token"',
        'The default mode is "sequence".',
    ),
    edit(
        "aggregate_tokens",
        "unknown_mode_accepted",
        'mode == "constant", f',
        "True, f",
        "An unknown mode passes in silence. Raise a ValueError that names mode.",
    ),
    edit(
        "aggregate_tokens",
        "max_len_of_the_width",
        "    require(\n        max_len is not None and",
        "    max_len = mask.shape[1] if max_len is None else max_len\n"
        "    require(\n        max_len is not None and",
        "Without max_len the width of the batch is taken, which differs from batch to batch. Raise "
        "a ValueError that names max_len.",
    ),
    edit(
        "aggregate_tokens",
        "any_max_len",
        "max_len is not None and max_len > 0",
        "max_len is not None",
        "A max_len of 0 or below passes. Raise a ValueError that names max_len.",
    ),
    edit(
        "aggregate_tokens",
        "aggregate_detached",
        'if mode == "sequence":',
        'per_token = per_token.detach()\n    if mode == "sequence":',
        "The tokens are detached, so that nothing is learned.",
    ),
]


@wrong(
    "aggregate_tokens",
    "You multiply by the mask, and 0 * nan is nan. Replace what is masked out before the sum.",
)
def multiplied_by_the_mask(per_token, mask, mode="sequence", max_len=None):
    _check_mode(mode, max_len)
    total = per_token * mask
    if mode == "sequence":
        return (total.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    return total.sum() / (mask.sum().clamp(min=1) if mode == "token" else len(mask) * max_len)


@wrong(
    "aggregate_tokens",
    "A completion without tokens is divided by 0. It counts 0: divide by at least 1.",
)
def divided_by_zero(per_token, mask, mode="sequence", max_len=None):
    _check_mode(mode, max_len)
    total = per_token.masked_fill(~mask, 0.0)
    if mode == "sequence":
        return (total.sum(-1) / mask.sum(-1)).mean()
    return total.sum() / (mask.sum() if mode == "token" else len(mask) * max_len)


@wrong(
    "aggregate_tokens",
    "What is masked out is written over in the tensor that you were given. Make a new one.",
)
def masked_in_place(per_token, mask, mode="sequence", max_len=None):
    _check_mode(mode, max_len)
    if not per_token.requires_grad:
        per_token[~mask] = 0.0
    return aggregate_tokens(per_token, mask, mode, max_len)


def _check_mode(mode, max_len):
    if mode not in ("sequence", "token", "constant"):
        raise ValueError(f"unknown mode {mode}")
    if mode == "constant" and (max_len is None or max_len <= 0):
        raise ValueError(f"max_len is {max_len}")


# --- calc_sequence_ratio ------------------------------------------------------------------------

MEAN_LOGRATIO = "masked_mean(logratio, mask, dim=-1).clamp(max=80.0).exp()"

SEQUENCE_RATIO = [
    edit(
        "calc_sequence_ratio",
        "sum_of_logratios",
        "masked_mean(logratio, mask, dim=-1)",
        "logratio.masked_fill(~mask, 0.0).sum(-1)",
        "The log-ratios are summed, so that long completions leave every clip. GSPO takes their "
        "mean.",
    ),
    edit(
        "calc_sequence_ratio",
        "mean_of_the_ratios",
        MEAN_LOGRATIO,
        "masked_mean(logratio.masked_fill(~mask, 0.0).clamp(max=80.0).exp(), mask, dim=-1)",
        "This is the mean of the tokens' ratios. Take the mean of their logs, then exp: the "
        "geometric mean.",
    ),
    edit(
        "calc_sequence_ratio",
        "exp_left_out",
        ".clamp(max=80.0).exp()",
        ".clamp(max=80.0)",
        "exp is missing: this is the mean log-ratio.",
    ),
    edit(
        "calc_sequence_ratio",
        "first_order",
        ".clamp(max=80.0).exp()",
        ".clamp(max=80.0) + 1",
        "1 + x is exp(x) for small x only.",
    ),
    edit(
        "calc_sequence_ratio",
        "sequence_ratio_upside_down",
        "logprobs - old_logprobs.detach()",
        "old_logprobs.detach() - logprobs",
        "The ratio is upside down: the current policy over the old one.",
    ),
    edit(
        "calc_sequence_ratio",
        "old_not_detached",
        "old_logprobs.detach()",
        "old_logprobs",
        "The old log-probs get a gradient. They come from the rollout, as constants: detach them.",
    ),
    edit(
        "calc_sequence_ratio",
        "current_detached",
        "logprobs - old_logprobs.detach()",
        "logprobs.detach() - old_logprobs.detach()",
        "The current log-probs are detached, so that nothing is learned.",
    ),
    edit(
        "calc_sequence_ratio",
        "no_ratio_at_all",
        "logprobs - old_logprobs.detach()",
        "logprobs",
        "The old policy is missing: this is the geometric mean of the tokens' probabilities.",
    ),
    edit(
        "calc_sequence_ratio",
        "mean_over_the_batch",
        "masked_mean(logratio, mask, dim=-1)",
        "masked_mean(logratio, mask).expand(len(mask))",
        "One mean is taken over all tokens of the batch. Each completion has a ratio of its own.",
    ),
    edit(
        "calc_sequence_ratio",
        "mean_over_the_width",
        "masked_mean(logratio, mask, dim=-1)",
        "logratio.masked_fill(~mask, 0.0).mean(-1)",
        "You divide by the width of the tensor. Divide by the completion's own number of tokens.",
    ),
    edit(
        "calc_sequence_ratio",
        "last_token_alone",
        "masked_mean(logratio, mask, dim=-1)",
        "logratio.masked_fill(~mask, 0.0).gather(-1, (mask.sum(-1, keepdim=True) - 1).clamp(min=0)"
        ").squeeze(-1)",
        "This is the ratio of the last token. Take the mean over all of them.",
    ),
    edit(
        "calc_sequence_ratio",
        "empty_ratio_of_zero",
        ".clamp(max=80.0).exp()",
        ".clamp(max=80.0).exp() * mask.any(-1)",
        "An empty completion has ratio 0. Nothing changed there: it is 1.",
    ),
    edit(
        "calc_sequence_ratio",
        "ratio_of_tokens",
        MEAN_LOGRATIO,
        "masked_mean(logratio, mask, dim=-1).clamp(max=80.0).exp()[:, None].expand_as(mask)",
        "This repeats the ratio for each token. Return one for each completion.",
    ),
    edit(
        "calc_sequence_ratio",
        "bounded_too_tightly",
        "clamp(max=80.0)",
        "clamp(max=1.0)",
        "The log-ratio is bounded so tightly that large ratios lose their gradient.",
    ),
    edit(
        "calc_sequence_ratio",
        "bounded_below",
        "clamp(max=80.0)",
        "clamp(-0.5, 80.0)",
        "The log-ratio is bounded from below, so that small ratios lose their gradient.",
    ),
    edit(
        "calc_sequence_ratio",
        "root_of_the_length",
        "masked_mean(logratio, mask, dim=-1)",
        "(masked_mean(logratio, mask, dim=-1) * mask.sum(-1).sqrt())",
        "You divide by the root of the number of tokens. Divide by the number.",
    ),
]


@wrong(
    "calc_sequence_ratio",
    "exp comes before the mean, as a product of ratios, which leaves the range of floats for long "
    "completions. Take the mean of the logs first.",
)
def root_of_the_product(logprobs, old_logprobs, mask):
    logratio = (logprobs - old_logprobs.detach()).masked_fill(~mask, 0.0)
    return logratio.exp().prod(-1) ** (1 / mask.sum(-1).clamp(min=1))


@wrong(
    "calc_sequence_ratio",
    "Probabilities of completions are below the range of floats. Subtract their logs before exp.",
)
def quotient_of_probabilities(logprobs, old_logprobs, mask):
    new = masked_mean(logprobs, mask, dim=-1).exp()
    return new / masked_mean(old_logprobs.detach(), mask, dim=-1).exp()


@wrong(
    "calc_sequence_ratio",
    "You divide one mean log-prob by the other. A quotient of probabilities is exp of the "
    "difference of their logs.",
)
def quotient_of_logprobs(logprobs, old_logprobs, mask):
    new, old = (masked_mean(x, mask, dim=-1) for x in (logprobs, old_logprobs.detach()))
    return torch.where(mask.any(-1), new / torch.where(old == 0, 1.0, old), 1.0)


@wrong(
    "calc_sequence_ratio",
    "You multiply by the mask, and 0 * nan is nan. Replace what is masked out before the sum.",
)
def logratio_times_mask(logprobs, old_logprobs, mask):
    logratio = (logprobs - old_logprobs.detach()) * mask
    return (logratio.sum(-1) / mask.sum(-1).clamp(min=1)).exp()


@wrong(
    "calc_sequence_ratio",
    "An empty completion is divided by 0 tokens. Divide by at least 1: its ratio is 1.",
)
def nan_for_an_empty_row(logprobs, old_logprobs, mask):
    logratio = (logprobs - old_logprobs.detach()).masked_fill(~mask, 0.0)
    return (logratio.sum(-1) / mask.sum(-1)).exp()


# --- calc_rlvr_objective ------------------------------------------------------------------------

SEQUENCE = "calc_sequence_ratio(logprobs, old_logprobs, mask)[:, None]"
MINIMUM = "torch.minimum(ratio * advantages, clipped * advantages)"

RLVR_OBJECTIVE = [
    edit(
        "calc_rlvr_objective",
        "levels_swapped",
        'if ratio_level == "token":',
        'if ratio_level == "sequence":',
        "The two levels are swapped.",
    ),
    edit(
        "calc_rlvr_objective",
        "tokens_at_every_level",
        'if ratio_level == "token":',
        "if True:",
        "ratio_level has no effect: every token has its own ratio.",
    ),
    edit(
        "calc_rlvr_objective",
        "sum_of_the_logratios",
        SEQUENCE,
        "((logprobs - old_logprobs.detach()).masked_fill(~mask, 0.0).sum(-1).clamp(max=80.0)"
        ".exp()[:, None])",
        "The ratio of the completion is that of its probability, without the root: it leaves every "
        "clip. GSPO takes the mean of the log-ratios.",
    ),
    edit(
        "calc_rlvr_objective",
        "mean_of_the_ratios",
        SEQUENCE,
        "masked_mean(calc_ratio(logprobs, old_logprobs, mask), mask, dim=-1)[:, None]",
        "The ratio of the completion is the mean of its tokens' ratios. It is exp of their mean "
        "log.",
    ),
    edit(
        "calc_rlvr_objective",
        "ratio_without_gradient",
        SEQUENCE,
        "calc_sequence_ratio(logprobs.detach(), old_logprobs, mask)[:, None]",
        "The ratio of the completion is detached, so that nothing is learned.",
    ),
    edit(
        "calc_rlvr_objective",
        "gspo_token",
        SEQUENCE,
        "(calc_sequence_ratio(logprobs.detach(), old_logprobs, mask)[:, None] * "
        "torch.exp((logprobs - logprobs.detach()).masked_fill(~mask, 0.0)))",
        "Only the value is the completion's ratio; the gradient is each token's own. That is the "
        "variant GSPO-token.",
    ),
    edit(
        "calc_rlvr_objective",
        "clipped_alone",
        MINIMUM,
        "clipped * advantages",
        "Only the clipped ratio is left. The minimum with the unclipped one keeps what the policy "
        "would lose.",
    ),
    edit(
        "calc_rlvr_objective",
        "never_clipped",
        MINIMUM,
        "ratio * advantages",
        "Nothing is clipped. Take the minimum with the clipped ratio's term.",
    ),
    edit(
        "calc_rlvr_objective",
        "maximum",
        "torch.minimum",
        "torch.maximum",
        "With the maximum the policy gains beyond the interval. The objective is maximised: take "
        "the minimum.",
    ),
    edit(
        "calc_rlvr_objective",
        "minimum_of_the_ratios",
        MINIMUM,
        "torch.minimum(ratio, clipped) * advantages",
        "The minimum is taken before the advantage comes in, which is the maximum for negative "
        "advantages. Multiply each by A first.",
    ),
    edit(
        "calc_rlvr_objective",
        "clips_of_tokens_alone",
        "ratio.clamp(1 - clip_coef, 1 + high)",
        '(ratio.clamp(1 - clip_coef, 1 + high) if ratio_level == "token" else ratio)',
        "The completions' ratios are not clipped. GSPO clips them, far more closely.",
    ),
    edit(
        "calc_rlvr_objective",
        "upper_clip_ignored",
        "high = clip_coef if clip_coef_high is None else clip_coef_high",
        "high = clip_coef",
        "clip_coef_high has no effect. The interval is [1 - clip_coef, 1 + clip_coef_high].",
    ),
    edit(
        "calc_rlvr_objective",
        "upper_clip_of_zero_ignored",
        "high = clip_coef if clip_coef_high is None else clip_coef_high",
        "high = clip_coef_high or clip_coef",
        "`clip_coef_high or clip_coef` takes 0 for missing. Only None stands for clip_coef.",
    ),
    edit(
        "calc_rlvr_objective",
        "clips_swapped",
        "ratio.clamp(1 - clip_coef, 1 + high)",
        "ratio.clamp(1 - high, 1 + clip_coef)",
        "The two clips are swapped: clip_coef bounds the ratio from below, clip_coef_high from "
        "above.",
    ),
    edit(
        "calc_rlvr_objective",
        "loss_mode_ignored",
        "aggregate_tokens(objective, mask, loss_mode, max_len)",
        "aggregate_tokens(objective, mask)",
        "loss_mode has no effect. Hand it, and max_len, to aggregate_tokens.",
    ),
    edit(
        "calc_rlvr_objective",
        "width_for_max_len",
        "aggregate_tokens(objective, mask, loss_mode, max_len)",
        "aggregate_tokens(objective, mask, loss_mode, max_len and mask.shape[1])",
        "The width of this batch stands in for max_len. Hand on what you were given.",
    ),
    edit(
        "calc_rlvr_objective",
        "modes_of_sequences_ignored",
        "return aggregate_tokens(objective",
        'if ratio_level == "sequence":\n        loss_mode = "sequence"\n'
        "    return aggregate_tokens(objective",
        "At the level of sequences loss_mode has no effect. The two can be combined.",
    ),
    edit(
        "calc_rlvr_objective",
        "reference_ignored",
        "if beta != 0:",
        "if False:",
        "The KL is missing: subtract beta times k3 from each token's term.",
    ),
    edit(
        "calc_rlvr_objective",
        "kl_added",
        "objective - beta * kl",
        "objective + beta * kl",
        "The KL is added, which rewards leaving the reference. The objective is maximised: "
        "subtract it.",
    ),
    edit(
        "calc_rlvr_objective",
        "kl_weighted_by_advantages",
        "objective - beta * kl",
        "objective - beta * kl * advantages.abs()",
        "The KL is weighted by the advantage. It is charged alike for every token.",
    ),
    edit(
        "calc_rlvr_objective",
        "another_default_clip",
        "clip_coef: float = 0.2",
        "clip_coef: float = 3e-4",
        "The default of clip_coef should be 0.2, as in GRPO.",
    ),
    edit(
        "calc_rlvr_objective",
        "another_default_level",
        'ratio_level: str = "token"',
        'ratio_level: str = "sequence"',
        'The default ratio_level is "token", as in GRPO.',
    ),
    edit(
        "calc_rlvr_objective",
        "another_default_loss_mode",
        'loss_mode: str = "sequence"',
        'loss_mode: str = "token"',
        'The default loss_mode is "sequence", as in GRPO.',
    ),
    edit(
        "calc_rlvr_objective",
        "unknown_level_accepted",
        'ratio_level in ("token", "sequence")',
        "True",
        "An unknown ratio_level passes in silence. Raise a ValueError that names ratio_level.",
    ),
    edit(
        "calc_rlvr_objective",
        "advantages_not_detached",
        "advantages.detach()",
        "advantages",
        "The advantages get a gradient. They are constants: detach them.",
    ),
    edit(
        "calc_rlvr_objective",
        "loss_for_objective",
        "return aggregate_tokens(",
        "return -aggregate_tokens(",
        "The sign is that of a loss. The objective is maximised.",
    ),
    edit(
        "calc_rlvr_objective",
        "only_the_first_advantage",
        "    advantages = advantages.detach()",
        '    if ratio_level == "sequence":\n'
        "        advantages = advantages[:, :1].expand_as(mask)\n"
        "    advantages = advantages.detach()",
        "With ratios of sequences only the first token's advantage counts. Each has its own.",
    ),
]


@wrong(
    "calc_rlvr_objective",
    "What is masked out is multiplied by 0 behind the ratio, and 0 * nan is nan. Mask the "
    "log-probs before exp.",
)
def masked_at_the_end(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    ratio_level="token",
    loss_mode="sequence",
    max_len=None,
    ref_logprobs=None,
    beta=0.0,
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    _check_level(ratio_level, beta, ref_logprobs)
    a = (advantages[:, None] if advantages.ndim == 1 else advantages).detach()
    if ratio_level == "token":
        ratio = (logprobs - old_logprobs.detach()).exp()
    else:
        ratio = calc_sequence_ratio(logprobs, old_logprobs, mask)[:, None]
    terms = torch.minimum(ratio * a, ratio.clamp(1 - clip_coef, 1 + high) * a)
    if beta:
        terms = terms - beta * calc_per_token_kl(logprobs, ref_logprobs)
    return aggregate_tokens(terms.expand_as(mask) * mask, mask, loss_mode, max_len)


@wrong(
    "calc_rlvr_objective",
    "The tokens are averaged before the clip, so that their ratios are clipped together. Clip each "
    "token's term, then aggregate.",
)
def clipped_after_the_mean(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    ratio_level="token",
    loss_mode="sequence",
    max_len=None,
    ref_logprobs=None,
    beta=0.0,
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    _check_level(ratio_level, beta, ref_logprobs)
    a = (advantages[:, None].expand_as(mask) if advantages.ndim == 1 else advantages).detach()
    a = a.masked_fill(~mask, 0.0)
    if ratio_level == "token":
        ratio = masked_mean(calc_ratio(logprobs, old_logprobs, mask), mask, dim=-1)[:, None]
    else:
        ratio = calc_sequence_ratio(logprobs, old_logprobs, mask)[:, None]
    terms = torch.minimum(ratio * a, ratio.clamp(1 - clip_coef, 1 + high) * a)
    if beta:
        new, ref = logprobs.masked_fill(~mask, 0.0), ref_logprobs.masked_fill(~mask, 0.0)
        terms = terms - beta * calc_per_token_kl(new, ref)
    return aggregate_tokens(terms, mask, loss_mode, max_len)


def _check_level(ratio_level, beta, ref_logprobs):
    if ratio_level not in ("token", "sequence"):
        raise ValueError(f"ratio_level is {ratio_level}")
    if beta and ref_logprobs is None:
        raise ValueError("ref_logprobs should be given")


# --- RlvrTrainer.sample_groups ------------------------------------------------------------------

SAMPLE_GROUPS = [
    edit(
        "RlvrTrainer.sample_groups",
        "always_dynamic",
        "args.max_extra_rollouts * args.dynamic_sampling",
        "args.max_extra_rollouts",
        "It is sampled again without dynamic_sampling, too.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "never_dynamic",
        "1 + args.max_extra_rollouts * args.dynamic_sampling",
        "1",
        "dynamic_sampling has no effect: there is only one batch.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "first_batch_counted_as_extra",
        "1 + args.max_extra_rollouts * args.dynamic_sampling",
        "max(args.max_extra_rollouts * args.dynamic_sampling, 1)",
        "The first batch counts as an extra one. max_extra_rollouts may follow it.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "to_the_bound_always",
        "if informative.sum() >= n_groups:",
        "if not args.dynamic_sampling:",
        "It is sampled up to the bound although the batch is full, which costs time and nothing "
        "else. Stop when enough groups are informative.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "stops_at_the_first",
        "if informative.sum() >= n_groups:",
        "if informative.any():",
        "Sampling stops with the first informative group. The batch needs n_groups of them.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "one_more_than_needed",
        "informative.sum() >= n_groups",
        "informative.sum() > n_groups",
        "Sampling goes on although the batch is full: n_groups are enough.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "one_full_batch",
        "informative.sum() >= n_groups",
        "informative[-n_groups:].all()",
        "Sampling goes on until one batch is informative throughout. The groups of several "
        "batches are put together.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "the_first_groups",
        "torch.cat([informative.nonzero(), (~informative).nonzero()]).flatten()",
        "torch.arange(len(informative))",
        "The groups of the first batch are kept, informative or not. Keep the informative ones, "
        "and fill up with others.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "the_last_batch",
        "torch.cat([informative.nonzero(), (~informative).nonzero()]).flatten()",
        "torch.arange(len(informative) - n_groups, len(informative))",
        "Only the last batch is kept, and what was informative before is lost.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "the_uninformative_ones",
        "[informative.nonzero(), (~informative).nonzero()]",
        "[(~informative).nonzero(), informative.nonzero()]",
        "The groups that teach nothing come first, and the others only fill up.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "the_newest_first",
        "[informative.nonzero(), (~informative).nonzero()]",
        "[informative.nonzero().flip(0), (~informative).nonzero()]",
        "The informative groups that came last are kept. Keep those that came first.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "a_batch_that_is_too_small",
        "torch.cat([informative.nonzero(), (~informative).nonzero()]).flatten()",
        "informative.nonzero().flatten() if informative.any() else torch.arange(n_groups)",
        "Where too few groups are informative the batch is too small, and its rows no longer fit "
        "the minibatches. Fill it up with others.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "a_batch_that_is_too_large",
        "order[:n_groups]",
        "order[: max(n_groups, int(informative.sum()))]",
        "All informative groups are kept, which can be more than a batch has. Keep n_groups.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "not_in_order",
        "order[:n_groups].sort().values",
        "order[:n_groups]",
        "The groups that fill up come last, so that without dynamic sampling the batch changes its "
        "order. Keep the order in which they came.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "penalty_forgotten",
        'args.truncation == "penalty"',
        "False",
        'truncation "penalty" has no effect on the scores.',
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "penalty_always",
        'args.truncation == "penalty"',
        "True",
        'The penalty is charged whatever truncation says. Only "penalty" asks for it.',
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "penalty_after_the_selection",
        "select_informative_groups(torch.cat(scores), args.group_size)",
        "select_informative_groups(torch.cat([s + (0.0 if args.truncation != 'penalty' else "
        "args.missing_eos_penalty) * ~f for s, f in zip(scores, finished)]), args.group_size)",
        "Which groups are informative is decided before the penalty. It can tell completions "
        "apart: charge it first.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "finished_upside_down",
        "part_scores, finished[-1], args.missing_eos_penalty",
        "part_scores, ~finished[-1], args.missing_eos_penalty",
        "The penalty hits the completions that finished.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "first_batchs_ends",
        "part_scores, finished[-1], args.missing_eos_penalty",
        "part_scores, finished[0], args.missing_eos_penalty",
        "Every batch is penalised for the ends of the first one.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "scores_without_their_rows",
        "torch.cat(scores)[rows]",
        "torch.cat(scores)[: len(rows)]",
        "The scores are those of the first rows, not those of the rows that are kept.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "rows_without_their_texts",
        "select_samples(joined, rows.tolist())",
        "select_samples(joined, list(range(len(rows))))",
        "The completions are those of the first rows, not those of the groups that are kept.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "members_far_apart",
        "(first_rows + torch.arange(args.group_size, device=chosen.device)).flatten()",
        "(first_rows + torch.arange(args.group_size, device=chosen.device)).T.flatten()",
        "The members of a group no longer lie next to each other.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "metrics_of_the_last_batch",
        "informative.float().mean().item()",
        "informative[-n_groups:].float().mean().item()",
        "informative_frac is that of the last batch. It is of all that was sampled.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "metric_of_what_is_kept",
        "informative.float().mean().item()",
        "min(informative.sum().item() / n_groups, 1.0)",
        "informative_frac is that of the batch which is kept, so that it says nothing of the "
        "policy. It is of all that was sampled.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "completions_counted",
        "append(len(informative))",
        "append(len(torch.cat(scores)))",
        "prompts_sampled counts completions. A group is one prompt.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "share_of_the_finished",
        "append(1 - torch.cat(finished)",
        "append(torch.cat(finished)",
        "truncated_frac is the share that finished. Take it from 1.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "as_many_prompts_as_completions",
        "self.sample_and_score(n_groups, args.group_size)",
        "self.sample_and_score(args.batch_size, args.group_size)",
        "A batch of prompts is sampled, each with group_size completions. The batch counts "
        "completions.",
    ),
    edit(
        "RlvrTrainer.sample_groups",
        "groups_of_earlier_rollouts",
        "parts, scores, finished = [], [], []",
        'parts, scores, finished = self.__dict__.setdefault("sampled", ([], [], []))',
        "Groups that an earlier rollout sampled are used again, though the policy has changed "
        "since. Begin each rollout anew.",
    ),
]

# --- RlvrTrainer.rollout_phase ------------------------------------------------------------------

RLVR_ROLLOUT = [
    edit(
        "RlvrTrainer.rollout_phase",
        "group_advantages_always",
        'args.advantage_kind == "leave_one_out"',
        "False",
        'advantage_kind "leave_one_out" has no effect.',
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "leave_one_out_always",
        'args.advantage_kind == "leave_one_out"',
        "True",
        'The advantages are leave-one-out whatever advantage_kind says. By default it is "group".',
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "leave_one_out_of_advantages",
        "leave_one_out_advantages(scores, args.group_size)",
        "leave_one_out_advantages(memory.advantages, args.group_size)",
        "Leave-one-out is taken of GRPO's advantages, which are scaled already. Take it of the "
        "scores.",
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "leave_one_out_by_scale",
        'args.advantage_kind == "leave_one_out"',
        'args.advantage_kind == "leave_one_out" and args.advantage_scale == "none"',
        'Leave-one-out is taken only with advantage_scale "none". The scale is of the other kind.',
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "nothing_masked",
        'args.truncation == "mask"',
        "False",
        'truncation "mask" has no effect.',
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "masked_always",
        'args.truncation == "mask"',
        "True",
        'What was cut off is masked whatever truncation says. Only "mask" asks for it.',
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "masked_with_the_penalty",
        'args.truncation == "mask"',
        'args.truncation != "keep"',
        'With truncation "penalty" what was cut off is masked, so that its penalty never tells.',
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "finished_rows_masked",
        "mask_truncated(memory.mask, finished)",
        "mask_truncated(memory.mask, ~finished)",
        "The completions that finished are masked.",
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "advantages_masked_instead",
        "memory.mask = mask_truncated(memory.mask, finished)",
        "memory.advantages = memory.advantages * finished",
        "The advantages of what was cut off are set to 0, so that its KL and entropy still count. "
        "Take it out of the mask.",
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "scores_masked_too",
        "memory.mask = mask_truncated(memory.mask, finished)",
        "memory.mask = mask_truncated(memory.mask, finished)\n"
        "            memory.advantages = make_grpo_memory(args, samples, scores * finished, "
        "logprobs, None).advantages",
        "What was cut off enters the baseline with a score of 0. It keeps its own.",
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "lengths_for_ends",
        "find_finished(samples, self.model.tokenizer.eos_token_id)",
        "samples.completion_mask.sum(-1) < samples.completion_mask.shape[1]",
        "A completion that ends with an eos in the last place counts as cut off. Look for the eos.",
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "an_eos_anywhere",
        "find_finished(samples, self.model.tokenizer.eos_token_id)",
        "(samples.input_ids == self.model.tokenizer.eos_token_id).any(-1)",
        "An eos of the prompt counts as an end. Look among the completion's tokens.",
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "not_the_groups_that_were_kept",
        "self.sample_groups()",
        "self.sample_and_score(args.batch_size // args.group_size, args.group_size)",
        "sample_groups never runs, so that dynamic_sampling and the penalty have no effect.",
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "scored_by_the_merged_model",
        "logprobs = self.get_sample_logprobs(samples)\n        ref",
        "with self.model.merged():\n            logprobs = self.get_sample_logprobs(samples)\n"
        "        ref",
        "The old log-probs come from the merged model, whose rounding differs: the first ratio is "
        "not 1. Score with the hooked one.",
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "reference_for_the_old",
        "make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)",
        "make_grpo_memory(args, samples, scores, logprobs if ref_logprobs is None else "
        "ref_logprobs, ref_logprobs)",
        "The reference's log-probs stand in for the old policy's.",
    ),
    edit(
        "RlvrTrainer.rollout_phase",
        "no_reference",
        "make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)",
        "make_grpo_memory(args, samples, scores, logprobs, None if ref_logprobs is None else "
        "logprobs)",
        "The old policy's log-probs stand in for the reference's: the KL is 0 at the start of "
        "every phase.",
    ),
]


@wrong(
    "RlvrTrainer.rollout_phase",
    "What was cut off is taken out of the batch before the advantages, so that a group loses "
    "members. It stays in its group's baseline.",
)
@torch.no_grad()
def rows_moved_to_the_mean(self):
    args = self.args
    samples, scores = self.sample_groups()
    finished = find_finished(samples, self.model.tokenizer.eos_token_id)
    logprobs = self.get_sample_logprobs(samples)
    kept = scores
    if args.truncation == "mask":
        groups, ended = (x.reshape(-1, args.group_size) for x in (scores, finished))
        means = masked_mean(groups, ended, dim=-1)[:, None]
        kept = torch.where(ended, groups, means).flatten()
    memory = make_grpo_memory(args, samples, kept, logprobs, self.get_ref_logprobs(samples))
    if args.advantage_kind == "leave_one_out":
        memory.advantages = leave_one_out_advantages(kept, args.group_size)
    if args.truncation == "mask":
        memory.mask = mask_truncated(memory.mask, finished)
    return memory


# --- RlvrTrainer.compute_rlhf_objective ---------------------------------------------------------

RLVR_TRAINER_OBJECTIVE = [
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "loss_mode_not_handed_on",
        "args.loss_mode,",
        '"sequence",',
        "loss_mode has no effect.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "ratio_level_not_handed_on",
        "args.ratio_level,",
        '"token",',
        "ratio_level has no effect.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "width_for_gen_len",
        "max_len=args.gen_len",
        "max_len=mask.shape[1]",
        'The mode "constant" divides by the width of this minibatch, which differs from rollout to '
        "rollout. Divide by gen_len.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "upper_clip_not_handed_on",
        "args.clip_coef_high,",
        "None,",
        "clip_coef_high has no effect.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "default_clips",
        "            args.clip_coef,\n            args.clip_coef_high,",
        "            0.2,\n            args.clip_coef_high,",
        "clip_coef has no effect: it is always 0.2.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "kl_charged_twice",
        'beta=args.kl_coef if args.kl_kind == "k3" else 0.0',
        "beta=args.kl_coef",
        'With kl_kind "exact" the KL is charged twice, as k3 and exactly.',
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "no_k3",
        'beta=args.kl_coef if args.kl_kind == "k3" else 0.0',
        "beta=0.0",
        "The KL is missing with kl_kind 'k3'.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "no_exact_kl",
        'args.kl_kind == "exact" and args.kl_coef > 0',
        "False",
        "The KL is missing with kl_kind 'exact'.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "exact_kl_always",
        'args.kl_kind == "exact" and args.kl_coef > 0',
        "args.kl_coef > 0",
        "With kl_kind 'k3' the exact KL is charged on top.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "reference_without_kl",
        'args.kl_kind == "exact" and args.kl_coef > 0',
        'args.kl_kind == "exact"',
        "With kl_coef 0 the reference runs for nothing.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "entropy_taken_off",
        "objective + args.ent_coef",
        "objective - args.ent_coef",
        "The entropy is a bonus: add it.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "no_entropy",
        "objective + args.ent_coef * self.measure_entropy(minibatch, logits)",
        "objective",
        "The entropy bonus is missing.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "exact_kl_added",
        "objective - args.kl_coef",
        "objective + args.kl_coef",
        "The exact KL is added. It is a penalty: subtract it.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "temperature_of_one",
        "prompt_len, args.temperature)",
        "prompt_len)",
        "The log-probs are taken at temperature 1, the old ones at that of sampling.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "attention_mask_forgotten",
        "self.model(minibatch.input_ids, minibatch.attention_mask)",
        "self.model(minibatch.input_ids)",
        "The attention mask is missing: left-padded prompts are misread.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "ratio_of_one",
        "            minibatch.logprobs,\n",
        "            logprobs.detach(),\n",
        "The ratio is taken against the current policy, and is always 1. The old log-probs are in "
        "the minibatch.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "ratio_to_the_reference",
        "            minibatch.logprobs,\n",
        "            minibatch.logprobs if minibatch.ref_logprobs is None else "
        "minibatch.ref_logprobs,\n",
        "The ratio is taken against the reference. Its denominator is the policy that sampled.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "loss_returned",
        "return objective",
        "return -objective",
        "The sign is that of a loss. The optimizer maximises.",
    ),
    edit(
        "RlvrTrainer.compute_rlhf_objective",
        "sequences_only_with_their_loss",
        "args.ratio_level,",
        '"token" if args.loss_mode != "sequence" else args.ratio_level,',
        "ratio_level has no effect with another loss_mode. The two can be combined.",
    ),
]
