"""Wrong answers to chapter 2, each with what a good teacher would say of it."""

import math
import re

import torch
import torch.nn.functional as F

from solutions.ch0_sampling import calc_entropy, get_logprobs, masked_mean, select_completion
from solutions.ch2_ppo import (
    calc_clipped_surrogate_objective,
    calc_kl_penalty,
    calc_value_function_loss,
    make_replay_memory,
    reward_fn_sentiment,
)
from utils.grading.answers import IN_ITS_MODULE, Answer, Edit, edit, wrong
from utils.models.corpus import NEGATIVE_WORDS, POSITIVE_WORDS

ALIKE = (
    "Texts that are alike share an entry of your dictionary, so that the batch shrinks. Give a "
    "reward for each sample, in order."
)
CHUNKS = "Chunks are averaged, and then their means, though the last one is shorter: add up, then "


# --- reward_fn_char_count -----------------------------------------------------------------------

REWARD_FN_CHAR_COUNT_EDITS = [
    edit(
        "reward_fn_char_count",
        "bytes_of_the_text",
        "float(text.count(char))",
        "float(sum(byte == ord(char) for byte in text.encode()))",
        "You count bytes. A character such as é has more than one: count in the text itself.",
    ),
]

REWARD_FN_CHAR_COUNT = [
    edit(
        "reward_fn_char_count",
        name,
        "float(text.count(char))",
        replacement,
        sentence,
    )
    for name, replacement, sentence in (
        (
            "char_ignored",
            'float(text.count("."))',
            "char has no effect: you count full stops whatever it is.",
        ),
        (
            "whether_it_occurs",
            "float(char in text)",
            "This says whether the character occurs. Count how often it does.",
        ),
        (
            "share_of_the_text",
            "text.count(char) / max(len(text), 1)",
            "You divide by the length of the text. The reward is the count itself.",
        ),
        (
            "integers",
            "text.count(char)",
            "The counts are right, but the tensor holds integers, which have no mean or std. "
            "Rewards are floats.",
        ),
        (
            "as_a_pattern",
            "float(len(re.findall(char, text)))",
            "As a regular expression, a full stop matches every character. str.count takes it "
            "literally.",
        ),
        (
            "as_a_class_of_characters",
            'float(len(re.findall(f"[{char}]", text)))',
            "Between brackets of a regular expression, ^ and \\ keep a meaning of their own. "
            "str.count takes every character literally.",
        ),
        (
            "pieces_of_a_split",
            "float(len(text.split(char)))",
            "Splitting gives one piece more than there are characters to split at.",
        ),
        (
            "runs_count_once",
            'float(len(re.findall(f"{re.escape(char)}+", text)))',
            "Several in a row count as one. Count each character.",
        ),
        (
            "case_ignored",
            "float(text.lower().count(char.lower()))",
            "Upper and lower case are different characters; you count both.",
        ),
        (
            "texts_that_end_with_it",
            "float(text.endswith(char))",
            "You look at the last character only. Count all of them.",
        ),
        (
            "held_at_ten",
            "float(min(text.count(char), 10))",
            "The count is held at 10. Nothing bounds it here.",
        ),
        (
            "pieces_of_text",
            "float(sum(word.endswith(char) for word in text.split()))",
            "You count the words that end with the character, so that two in a row count once.",
        ),
        (
            "decimal_points_left_out",
            'float(re.sub(r"\\d\\.\\d", "", text).count(char))',
            "You leave out the points inside numbers, as in 3.5. Every one counts.",
        ),
        (
            "stripped_first",
            "float(text.strip().count(char))",
            "strip() takes characters off before you count them. Count in the text as it is.",
        ),
        (
            "one_column",
            "[float(text.count(char))]",
            "The shape should be [batch]: one number a sample, not a column.",
        ),
    )
]


@wrong("reward_fn_char_count", "Return a tensor: the trainer computes with the rewards.")
def a_list_of_counts(samples, char="."):
    return [float(text.count(char)) for text in samples]


@wrong(
    "reward_fn_char_count",
    "This is one number for the whole batch. Every completion gets its own reward.",
)
def total_of_the_batch(samples, char="."):
    return torch.tensor(float(sum(text.count(char) for text in samples)))


@wrong("reward_fn_char_count", "The default of char should be the full stop.")
def no_default(samples, char):
    return torch.tensor([float(text.count(char)) for text in samples])


@wrong(
    "reward_fn_char_count",
    ALIKE,
)
def one_entry_for_equal_texts(samples, char="."):
    return torch.tensor([*{text: float(text.count(char)) for text in samples}.values()])


# --- reward_fn_sentiment ------------------------------------------------------------------------

SHARE = "(positive - negative) / max(positive + negative, 1)"
WORDS = 're.findall("[a-z]+", text.lower())'

REWARD_FN_SENTIMENT = [
    edit(
        "reward_fn_sentiment",
        "tags_left_out",
        "text.lower())",
        're.sub("<[^<>]*>", " ", text.lower()))',
        "What stands between < and > is left out as if it were a tag. A word is a run of letters, "
        "whatever is around it.",
    ),
    edit(
        "reward_fn_sentiment",
        "compounds_are_words",
        're.findall("[a-z]+", text.lower())',
        're.findall("[a-z]+(?:-[a-z]+)*", text.lower())',
        "Words with a hyphen between them are taken for one, as in dull-looking. A word is a run "
        "of letters.",
    ),
    edit(
        "reward_fn_sentiment",
        "case_matters",
        WORDS,
        're.findall("[A-Za-z]+", text)',
        "Words with capitals are not found: the lists are in lower case, so lower the text first.",
    ),
    edit(
        "reward_fn_sentiment",
        "punctuation_kept",
        WORDS,
        "text.lower().split()",
        "split() leaves punctuation at the words, and `great.` is not in the list. Take the "
        "letters only.",
    ),
    edit(
        "reward_fn_sentiment",
        "split_at_spaces_only",
        WORDS,
        '[word.strip(".,!?;:") for word in text.lower().split(" ")]',
        'split(" ") does not separate words at a line break; split() does.',
    ),
    edit(
        "reward_fn_sentiment",
        "only_full_stops_removed",
        WORDS,
        'text.lower().replace(".", "").split()',
        "You take full stops off, but other punctuation stays at the words.",
    ),
    edit(
        "reward_fn_sentiment",
        "counted_once",
        WORDS,
        f"set({WORDS})",
        "A word that is repeated counts once here; each occurrence counts.",
    ),
    edit(
        "reward_fn_sentiment",
        "sign_turned_around",
        "(positive - negative) / max",
        "(negative - positive) / max",
        "Good words should raise the reward: positive minus negative.",
    ),
    edit(
        "reward_fn_sentiment",
        "share_of_all_words",
        "max(positive + negative, 1)",
        "max(len(words), 1)",
        "You divide by the number of all words. Divide by positive + negative, so that a long "
        "plain text is not worth less.",
    ),
    edit(
        "reward_fn_sentiment",
        "not_divided",
        SHARE,
        "float(positive - negative)",
        "The difference alone grows with the length: divide by positive + negative.",
    ),
    edit(
        "reward_fn_sentiment",
        "share_of_the_positive",
        SHARE,
        "positive / max(positive + negative, 1)",
        "This is the share of positive words, from 0 to 1. Subtract the negative ones: -1 to 1.",
    ),
    edit(
        "reward_fn_sentiment",
        "zero_divided_by_zero",
        "max(positive + negative, 1)",
        "(positive + negative)",
        "Where no word of either list occurs this divides by 0. The reward there is 0.",
    ),
    edit(
        "reward_fn_sentiment",
        "one_more_in_the_count",
        "max(positive + negative, 1)",
        "(positive + negative + 1)",
        "Adding 1 to the count avoids the division by 0, but makes every other reward too small.",
    ),
    edit(
        "reward_fn_sentiment",
        "only_the_sign",
        SHARE,
        "float((positive > negative) - (positive < negative))",
        "This says only which kind of word is more frequent. Give the share.",
    ),
    edit(
        "reward_fn_sentiment",
        "negative_words_overlooked",
        "negative = sum(word in NEGATIVE_WORDS for word in words)",
        "negative = 0",
        "Negative words have no effect.",
    ),
    edit(
        "reward_fn_sentiment",
        "words_left_out",
        "word in POSITIVE_WORDS",
        "word in POSITIVE_WORDS[:5]",
        "Some positive words are not counted: use the corpus's own lists, POSITIVE_WORDS and "
        "NEGATIVE_WORDS.",
    ),
    edit(
        "reward_fn_sentiment",
        "neutral_words_are_negative",
        "negative = sum(word in NEGATIVE_WORDS for word in words)",
        "negative = sum(word not in POSITIVE_WORDS for word in words)",
        "Every word that is not positive counts as negative. Only those of NEGATIVE_WORDS do.",
    ),
    edit(
        "reward_fn_sentiment",
        "nothing_is_one_half",
        f"rewards.append({SHARE})",
        f"rewards.append({SHARE} if positive + negative else 0.5)",
        "Where neither kind of word occurs the reward is 0, the middle of [-1, 1].",
    ),
    edit(
        "reward_fn_sentiment",
        "integers_where_nothing_occurs",
        f"rewards.append({SHARE})",
        f"rewards.append({SHARE} if positive + negative else 0)",
        "A batch in which no such word occurs gives a tensor of integers: append 0.0, not 0, or "
        "give the dtype.",
    ),
    edit(
        "reward_fn_sentiment",
        "mean_of_the_batch",
        "return torch.tensor(rewards)",
        "return torch.tensor(rewards).mean()",
        "This is one number for the whole batch. Every completion gets its own reward.",
    ),
    edit(
        "reward_fn_sentiment",
        "words_stripped_of_all_punctuation",
        WORDS,
        "[word.strip(__import__('string').punctuation) for word in text.lower().split()]",
        "What stands between spaces may be several words: stripped at its ends `bad/boring` stays "
        "one word. Take the runs of letters.",
    ),
    edit(
        "reward_fn_sentiment",
        "apostrophes_are_letters",
        WORDS,
        're.findall("[a-z\']+", text.lower())',
        "An apostrophe is a letter of your words, so that a word in single quotes is none of the "
        "lists. Take the runs of letters.",
    ),
    edit(
        "reward_fn_sentiment",
        "not_turns_around",
        "sum(word in POSITIVE_WORDS for word in words)",
        "sum(word in POSITIVE_WORDS and before != 'not' for before, word in zip(['', *words], "
        "words))",
        "You treat `not great` in a way of your own. The reward counts words of the two lists, "
        "whatever stands before them.",
    ),
    edit(
        "reward_fn_sentiment",
        "endings_stripped",
        WORDS,
        f'[word.rstrip("s") for word in {WORDS}]',
        "You take an s off the end, so that `greats` counts as `great`. Only the words of the two "
        "lists count, as they are.",
    ),
    edit(
        "reward_fn_sentiment",
        "very_counts_twice",
        WORDS,
        're.findall("[a-z]+", re.sub(r"very (\\w+)", r"\\1 \\1", text.lower()))',
        "A word after `very` counts twice here. Each occurrence counts once.",
    ),
    edit(
        "reward_fn_sentiment",
        "punctuation_by_a_list",
        WORDS,
        're.sub(r"[.,!?;:()\\"\'/]", " ", text.lower()).split()',
        "Your list of punctuation has gaps: `*great*` and `[great]` are not found. Take the runs "
        "of letters.",
    ),
    edit(
        "reward_fn_sentiment",
        "first_512_characters",
        "text.lower()",
        "text[:512].lower()",
        "Texts are cut at 512 characters, as classifiers do. The whole completion counts.",
    ),
]


@wrong(
    "reward_fn_sentiment",
    "Words inside other words are counted, as `great` in `greatly`. Split the text into words.",
)
def words_inside_words_count(samples):
    rewards = []
    for text in samples:
        positive = sum(text.lower().count(word) for word in POSITIVE_WORDS)
        negative = sum(text.lower().count(word) for word in NEGATIVE_WORDS)
        rewards.append((positive - negative) / max(positive + negative, 1))
    return torch.tensor(rewards)


@wrong(
    "reward_fn_sentiment",
    "`word in text` looks for letters anywhere, so `unfunny` is funny, and sees a repeated word "
    "only once. Count in the list of the text's words.",
)
def found_anywhere_in_the_text(samples):
    rewards = []
    for text in samples:
        positive = sum(word in text.lower() for word in POSITIVE_WORDS)
        negative = sum(word in text.lower() for word in NEGATIVE_WORDS)
        rewards.append((positive - negative) / max(positive + negative, 1))
    return torch.tensor(rewards)


@wrong(
    "reward_fn_sentiment",
    ALIKE,
)
def one_entry_for_equal_texts_of_the_sentiment(samples):
    scores = {text: reward_fn_sentiment([text]).item() for text in samples}
    return torch.tensor([*scores.values()])


@wrong(
    "reward_fn_sentiment",
    "You add words of your own, such as good and awful. Only those of the corpus's lists count.",
)
def words_of_a_larger_lexicon(samples):
    positive_words = {*POSITIVE_WORDS, "good", "excellent", "amazing", "fantastic", "best", "love"}
    negative_words = {*NEGATIVE_WORDS, "awful", "worst", "horrible", "hate", "stupid", "waste"}
    rewards = []
    for text in samples:
        words = re.findall("[a-z]+", text.lower())
        positive = sum(word in positive_words for word in words)
        negative = sum(word in negative_words for word in words)
        rewards.append((positive - negative) / max(positive + negative, 1))
    return torch.tensor(rewards)


# --- normalize_reward ---------------------------------------------------------------------------

RESULT = "(rewards - rewards.mean()) / (rewards.std() + eps)"

NORMALIZE_REWARD = [
    edit(
        "normalize_reward",
        "centred_already",
        "    return (rewards - rewards.mean()) / (rewards.std() + eps)",
        "    if rewards.mean() == 0:\n        return rewards.clone()\n"
        "    return (rewards - rewards.mean()) / (rewards.std() + eps)",
        "Rewards whose mean is 0 are not divided by their std.",
    ),
    edit(
        "normalize_reward",
        "population_std",
        "rewards.std()",
        "rewards.std(correction=0)",
        "This std divides by n. Ours divides by n - 1, as torch's std does by default.",
    ),
    edit(
        "normalize_reward",
        "eps_forgotten",
        "rewards.std() + eps",
        "rewards.std()",
        "eps is missing: it keeps tiny spreads from being blown up.",
    ),
    edit(
        "normalize_reward",
        "eps_under_the_root",
        "(rewards.std() + eps)",
        "(rewards.var() + eps).sqrt()",
        "eps is added to the variance, under the root. Add it to the std.",
    ),
    edit(
        "normalize_reward",
        "eps_as_a_floor",
        "(rewards.std() + eps)",
        "rewards.std().clamp(min=eps)",
        "You hold the std at eps or more. Here eps is added to it.",
    ),
    edit(
        "normalize_reward",
        "eps_outside_the_division",
        "(rewards.std() + eps)",
        "rewards.std() + eps",
        "Parentheses are missing: you divide by the std and then add eps to the result.",
    ),
    edit(
        "normalize_reward",
        "eps_argument_ignored",
        "rewards.std() + eps",
        "rewards.std() + 1e-5",
        "The argument eps has no effect: you add a number of your own.",
    ),
    edit(
        "normalize_reward",
        "another_default",
        "eps: float = 1e-5",
        "eps: float = 1e-8",
        "The default of eps is 1e-5.",
    ),
    edit(
        "normalize_reward",
        "mean_kept",
        "(rewards - rewards.mean()) /",
        "rewards /",
        "The mean is not subtracted: the result should be centred at 0.",
    ),
    edit(
        "normalize_reward",
        "only_centred",
        RESULT,
        "rewards - rewards.mean()",
        "The rewards are centred but not scaled: divide by std + eps.",
    ),
    edit(
        "normalize_reward",
        "variance",
        "rewards.std() + eps",
        "rewards.var() + eps",
        "You divide by the variance. Divide by its root, the std.",
    ),
    edit(
        "normalize_reward",
        "scaled_to_the_range",
        RESULT,
        "(rewards - rewards.min()) / (rewards.max() - rewards.min() + eps)",
        "This maps the rewards to [0, 1]. Subtract the mean and divide by the std instead.",
    ),
    edit(
        "normalize_reward",
        "rounding_noise_of_equal_rewards",
        " or rewards.max() == rewards.min()",
        "",
        "Equal rewards should give zeros. In floats the mean of equal numbers may differ a little "
        "from them, and dividing that by eps makes it visible: ask whether max equals min.",
    ),
    edit(
        "normalize_reward",
        "equal_rewards_returned",
        "return torch.zeros_like(rewards)",
        "return rewards.clone()",
        "Equal rewards, or a single one, say nothing about what is better: return zeros.",
    ),
    edit(
        "normalize_reward",
        "in_place",
        f"return {RESULT}",
        "return rewards.sub_(rewards.mean()).div_(rewards.std() + eps)",
        "You write into the caller's rewards: sub_ and div_, or -= and /=, change them in place. "
        "Make a new tensor.",
    ),
    edit(
        "normalize_reward",
        "equal_rewards_zeroed_in_place",
        "return torch.zeros_like(rewards)",
        "return rewards.zero_()",
        "zero_ overwrites the caller's rewards where they are equal. Return new zeros.",
    ),
    edit(
        "normalize_reward",
        "close_is_taken_for_equal",
        "rewards.max() == rewards.min()",
        "torch.allclose(rewards, rewards.mean(), atol=1e-3)",
        "Rewards that are close to one another are taken for equal and lose their differences. "
        "Only equal ones give zeros.",
    ),
    edit(
        "normalize_reward",
        "nearly_equal_to_the_first",
        "rewards.max() == rewards.min()",
        "torch.allclose(rewards, rewards[0])",
        "allclose has a tolerance, so that rewards which differ by little beside their size count "
        "as a constant. Only exactly equal ones are: compare the largest with the smallest.",
    ),
    edit(
        "normalize_reward",
        "small_spread_is_taken_for_none",
        "rewards.max() == rewards.min()",
        "rewards.std() < 1e-6",
        "A small std is not the same as equal rewards: eps already keeps it from being blown up. "
        "Only equal rewards give zeros.",
    ),
    edit(
        "normalize_reward",
        "clipped",
        RESULT,
        f"({RESULT}).clamp(-10, 10)",
        "The result is clipped. Nothing bounds a normalised reward here.",
    ),
    edit(
        "normalize_reward",
        "equal_magnitudes",
        "rewards.max() == rewards.min()",
        "rewards.abs().max() == rewards.abs().min()",
        "1 and -1, as sentiments are, have the same size and are taken for a constant. Compare the "
        "rewards themselves.",
    ),
    edit(
        "normalize_reward",
        "sum_of_differences",
        "rewards.max() == rewards.min()",
        "rewards.diff().sum() == 0",
        "The differences add up to last minus first, which is 0 for many rewards that are not "
        "constant. Compare the largest with the smallest.",
    ),
    edit(
        "normalize_reward",
        "eps_of_0_replaced",
        "rewards.std() + eps",
        "rewards.std() + (eps or 1e-5)",
        "`eps or 1e-5` takes an eps of 0 for none given. Add eps as it is.",
    ),
    edit(
        "normalize_reward",
        "constant_times_zero",
        "    if rewards.numel() < 2 or rewards.max() == rewards.min():\n"
        "        return torch.zeros_like(rewards)\n"
        f"    return {RESULT}",
        "    if rewards.numel() < 2:\n"
        "        return torch.zeros_like(rewards)\n"
        f"    return (rewards.max() > rewards.min()) * {RESULT}",
        "Equal rewards are multiplied by 0 at the end, but with an eps of 0 there is inf or nan by "
        "then. Return zeros before you divide.",
    ),
    edit(
        "normalize_reward",
        "std_of_what_is_not_zero",
        "rewards.std()",
        "(rewards if rewards.count_nonzero() < 2 else rewards[rewards != 0]).std()",
        "Rewards of 0 are left out of the std. A 0 is a reward like any other.",
    ),
]


@wrong(
    "normalize_reward",
    "The std of a single reward is nan (n - 1 is 0), and equal rewards leave rounding noise. "
    "Return zeros for both.",
)
def formula_alone(rewards, eps=1e-5):
    rewards = rewards.detach()
    return (rewards - rewards.mean()) / (rewards.std() + eps)


# --- compute_token_rewards ----------------------------------------------------------------------

LAST = "is_last = mask & (from_here_on == 1)"
CHARGE = "rewards - kl_coef * k1.masked_fill(~mask, 0.0)"

COMPUTE_TOKEN_REWARDS = [
    edit(
        "compute_token_rewards",
        "no_reference_no_kl",
        "    if kl_coef == 0:\n",
        "    if kl_coef == 0 or logprobs is None or ref_logprobs is None:\n",
        "With a kl_coef and no reference the KL is left out in silence. Raise a ValueError.",
    ),
    edit(
        "compute_token_rewards",
        "certain_tokens_cost_nothing",
        "    k1 = (logprobs - ref_logprobs).detach()\n",
        "    k1 = (logprobs - ref_logprobs).detach() * (logprobs != 0)\n",
        "A log-prob of 0 is taken for padding. It is a token that was certain, and what the "
        "reference thinks of it counts.",
    ),
    edit(
        "compute_token_rewards",
        "in_the_last_column",
        LAST,
        "is_last = torch.zeros_like(mask); is_last[:, -1] = True",
        "The score lands in the last column. Rows differ in length: it belongs on each row's last "
        "true position.",
    ),
    edit(
        "compute_token_rewards",
        "on_the_first_token",
        LAST,
        "is_last = mask & (mask.cumsum(-1) == 1)",
        "The score is on the first token. The reward model judges the whole completion: it belongs "
        "on the last one.",
    ),
    edit(
        "compute_token_rewards",
        "on_every_token",
        LAST,
        "is_last = mask",
        "Every token gets the whole score, so long completions collect it many times. Only the "
        "last true position does.",
    ),
    edit(
        "compute_token_rewards",
        "spread_over_the_tokens",
        "torch.where(is_last, scores.detach()[:, None], 0.0)",
        "mask * scores.detach()[:, None] / mask.sum(-1, keepdim=True).clamp(min=1)",
        "You spread the score over the tokens. All of it is on the last true position; GAE passes "
        "it back.",
    ),
    edit(
        "compute_token_rewards",
        "one_too_early",
        LAST,
        "is_last = mask & (from_here_on == 2)",
        "The score is one position too early: the last true position is eos itself.",
    ),
    edit(
        "compute_token_rewards",
        "one_too_late",
        LAST,
        "is_last = (mask & (from_here_on == 1)).roll(1, -1)",
        "The score is one position behind the last true one, where no token counts.",
    ),
    edit(
        "compute_token_rewards",
        "an_empty_row_wraps_around",
        LAST,
        "is_last = torch.zeros_like(mask); is_last[range(len(mask)), mask.sum(-1) - 1] = True",
        "For a row without true positions, length - 1 is -1: the score lands in the last column. "
        "Such a row gets nothing.",
    ),
    edit(
        "compute_token_rewards",
        "an_empty_row_is_paid_at_once",
        LAST,
        "is_last = torch.zeros_like(mask); is_last[range(len(mask)), (mask.sum(-1) - 1).clamp("
        "min=0)] = True",
        "A row without true positions gets its score in the first column. Such a row gets nothing.",
    ),
    edit(
        "compute_token_rewards",
        "kl_added",
        "return rewards - kl_coef",
        "return rewards + kl_coef",
        "The KL is a price: subtract it. As it is, the policy is paid for leaving the reference.",
    ),
    edit(
        "compute_token_rewards",
        "kl_not_masked",
        "k1.masked_fill(~mask, 0.0)",
        "k1",
        "The KL is charged beyond the end of the completion too. Outside the mask every reward is "
        "0.",
    ),
    edit(
        "compute_token_rewards",
        "kl_multiplied_by_the_mask",
        "k1.masked_fill(~mask, 0.0)",
        "k1 * mask",
        "Multiplying by the mask leaves nan, because 0 * nan is nan. Replace what is masked out.",
    ),
    edit(
        "compute_token_rewards",
        "kl_on_the_last_token_only",
        "k1.masked_fill(~mask, 0.0)",
        "k1.masked_fill(~is_last, 0.0)",
        "You charge the KL on the last token only. Every true position pays for its own.",
    ),
    edit(
        "compute_token_rewards",
        "whole_kl_on_the_last_token",
        "k1.masked_fill(~mask, 0.0)",
        "k1.masked_fill(~mask, 0.0).sum(-1, keepdim=True) * is_last",
        "You charge the sum of the KL on the last token. Every true position pays for its own.",
    ),
    edit(
        "compute_token_rewards",
        "kl_replaced_by_the_score",
        f"return {CHARGE}",
        "return torch.where(is_last, rewards, -kl_coef * k1.masked_fill(~mask, 0.0))",
        "On the last token the score replaces the KL. It is added: that token pays as well.",
    ),
    edit(
        "compute_token_rewards",
        "k3",
        "k1 = (logprobs - ref_logprobs).detach()",
        "k1 = (ref_logprobs - logprobs).detach(); k1 = k1.exp() - 1 - k1",
        "This is k3. As a reward it has the wrong gradient; k1 is the plain difference of the "
        "log-probs.",
    ),
    edit(
        "compute_token_rewards",
        "absolute_difference",
        "k1 = (logprobs - ref_logprobs).detach()",
        "k1 = (logprobs - ref_logprobs).detach().abs()",
        "k1 may be negative: take no absolute value, or its mean is no KL any more.",
    ),
    edit(
        "compute_token_rewards",
        "kl_coef_ignored",
        "rewards - kl_coef * k1",
        "rewards - k1",
        "kl_coef has no effect unless it is 0: multiply the KL by it.",
    ),
    edit(
        "compute_token_rewards",
        "kl_left_out",
        f"return {CHARGE}",
        "return rewards",
        "The KL is not charged at all.",
    ),
    edit(
        "compute_token_rewards",
        "kl_by_probabilities",
        "k1 = (logprobs - ref_logprobs).detach()",
        "k1 = (logprobs.exp() - ref_logprobs.exp()).detach()",
        "k1 is the difference of the log-probs, not of the probabilities.",
    ),
    edit(
        "compute_token_rewards",
        "mean_kl_of_the_row",
        "k1.masked_fill(~mask, 0.0)",
        "masked_mean(k1, mask, -1)[:, None] * mask",
        "Every token pays the mean KL of its row. Each pays for its own choice.",
    ),
    edit(
        "compute_token_rewards",
        "kl_not_detached",
        "(logprobs - ref_logprobs).detach()",
        "(logprobs - ref_logprobs)",
        "A gradient flows through the KL. As a reward it is a number: detach it.",
    ),
    edit(
        "compute_token_rewards",
        "in_place",
        "k1 = (logprobs - ref_logprobs).detach()",
        "k1 = logprobs.detach().sub_(ref_logprobs)",
        "You write into the caller's log-probs. Make a new tensor.",
    ),
    edit(
        "compute_token_rewards",
        "log_probs_needed_without_kl",
        "    if kl_coef == 0:\n        return rewards\n",
        "",
        "With kl_coef 0 there may be no log-probs, or nan in them. Leave the KL out altogether.",
    ),
    edit(
        "compute_token_rewards",
        "scores_clipped",
        "torch.where(is_last, scores.detach()",
        "torch.where(is_last, scores.detach().clamp(-10, 10)",
        "The scores are clipped. Nothing bounds them here.",
    ),
    edit(
        "compute_token_rewards",
        "kl_clipped",
        "k1 = (logprobs - ref_logprobs).detach()",
        "k1 = (logprobs - ref_logprobs).detach().clamp(-10, 10)",
        "The log-ratio is clipped. k1 is charged in full.",
    ),
    edit(
        "compute_token_rewards",
        "logarithm_of_a_ratio",
        "k1 = (logprobs - ref_logprobs).detach()",
        "k1 = (logprobs.exp() / ref_logprobs.exp()).log().detach()",
        "For rare tokens exp gives 0, and 0 / 0 is nan. k1 is the difference of the log-probs as "
        "they are.",
    ),
]


@wrong(
    "compute_token_rewards",
    "view() raises an error on log-probs that are a slice of a larger tensor. No view is needed.",
)
def views_of_the_log_ratios(scores, mask, logprobs=None, ref_logprobs=None, kl_coef=0.0):
    rewards = torch.zeros_like(mask, dtype=scores.dtype)
    if kl_coef:
        k1 = logprobs.detach().view(-1) - ref_logprobs.detach().view(-1)
        rewards = -kl_coef * k1.masked_fill(~mask.view(-1), 0.0).view(mask.shape)
    rows = mask.any(-1)
    rewards[rows, mask.sum(-1)[rows] - 1] += scores.detach()[rows]
    return rewards


# --- compute_advantages -------------------------------------------------------------------------

DELTA = "delta = token_rewards[:, t] + gamma * next_value - values[:, t]"

COMPUTE_ADVANTAGES = [
    edit(
        "compute_advantages",
        "lambda_left_out",
        "gamma * lam * next_advantage",
        "gamma * next_advantage",
        "lam has no effect: this is the Monte Carlo advantage. Each step back multiplies by gamma "
        "* lam.",
    ),
    edit(
        "compute_advantages",
        "gamma_left_out_of_the_sum",
        "gamma * lam * next_advantage",
        "lam * next_advantage",
        "Each step back multiplies the advantage by gamma * lam; gamma is missing.",
    ),
    edit(
        "compute_advantages",
        "gamma_left_out_of_delta",
        "gamma * next_value",
        "next_value",
        "In delta the next value is discounted: r + gamma V' - V.",
    ),
    edit(
        "compute_advantages",
        "one_step_only",
        "delta + gamma * lam * next_advantage",
        "delta",
        "This is delta, one step ahead. GAE adds the deltas that follow, each step times gamma * "
        "lam.",
    ),
    edit(
        "compute_advantages",
        "bootstraps_from_the_last_column",
        "next_value = next_advantage = values.new_zeros(len(values))",
        "next_value, next_advantage = values[:, -1], values.new_zeros(len(values))",
        "A row that was cut short takes its own last value for the one after it. After the last "
        "true token the value is 0, for such rows too.",
    ),
    edit(
        "compute_advantages",
        "values_beyond_the_end",
        "values = values.masked_fill(~mask, 0.0)",
        "values = values.clone()",
        "The value that follows the last true token is taken from beyond the mask. It is 0: "
        "nothing follows.",
    ),
    edit(
        "compute_advantages",
        "values_multiplied_by_the_mask",
        "values = values.masked_fill(~mask, 0.0)",
        "values = values * mask",
        "Multiplying the values by the mask leaves nan, because 0 * nan is nan. Replace what is "
        "masked out.",
    ),
    edit(
        "compute_advantages",
        "rewards_beyond_the_end",
        "    token_rewards = token_rewards.masked_fill(~mask, 0.0)\n",
        "",
        "Rewards beyond the mask may be nan, and nan times a mask is nan. Replace them first.",
    ),
    edit(
        "compute_advantages",
        "value_added",
        "- values[:, t]",
        "+ values[:, t]",
        "delta subtracts the value of the state: r + gamma V' - V.",
    ),
    edit(
        "compute_advantages",
        "values_turned_around",
        DELTA,
        "delta = token_rewards[:, t] + gamma * values[:, t] - next_value",
        "The two values are exchanged: delta is r + gamma V' - V, where V' follows.",
    ),
    edit(
        "compute_advantages",
        "value_not_subtracted",
        DELTA,
        "delta = token_rewards[:, t] + gamma * next_value",
        "The value of the state is not subtracted: delta is r + gamma V' - V.",
    ),
    edit(
        "compute_advantages",
        "next_value_left_out",
        DELTA,
        "delta = token_rewards[:, t] - values[:, t]",
        "The value of the next state is missing: delta is r + gamma V' - V.",
    ),
    edit(
        "compute_advantages",
        "forwards_in_time",
        "for t in reversed(range(values.shape[1]))",
        "for t in range(values.shape[1])",
        "The loop runs forwards. An advantage depends on what follows: go backwards in time.",
    ),
    edit(
        "compute_advantages",
        "last_token_left_out",
        "reversed(range(values.shape[1]))",
        "reversed(range(values.shape[1] - 1))",
        "The last column gets no advantage: a loop to seq - 1 leaves out the token that is paid.",
    ),
    edit(
        "compute_advantages",
        "returns",
        "return advantages\n",
        "return advantages + values\n",
        "These are the returns, advantages + values. Return the advantages.",
    ),
    edit(
        "compute_advantages",
        "normalized_here",
        "return advantages\n",
        "return normalize_advantages(advantages, mask)\n",
        "The advantages are normalised here. That comes afterwards: returns are advantages + "
        "values, before it.",
    ),
    edit(
        "compute_advantages",
        "gradient_kept",
        "@torch.no_grad()\n",
        "",
        "A gradient flows into the values or rewards. Advantages are constants: compute them "
        "under torch.no_grad, or detach.",
    ),
    edit(
        "compute_advantages",
        "in_place",
        "values = values.masked_fill(~mask, 0.0)",
        "values = values.detach().masked_fill_(~mask, 0.0)",
        "You write into the caller's values. Make a new tensor: masked_fill without underscore.",
    ),
    edit(
        "compute_advantages",
        "another_default_of_lambda",
        "lam: float = 0.95",
        "lam: float = 1.0",
        "The default of lam is 0.95.",
    ),
    edit(
        "compute_advantages",
        "another_default_of_gamma",
        "gamma: float = 1.0",
        "gamma: float = 0.99",
        "The default of gamma is 1: completions are short, and a late reward is worth as much.",
    ),
    edit(
        "compute_advantages",
        "gamma_and_lambda_exchanged",
        "gamma: float = 1.0,\n    lam: float = 0.95,",
        "lam: float = 1.0,\n    gamma: float = 0.95,",
        "gamma comes before lam in the order of the arguments.",
    ),
    edit(
        "compute_advantages",
        "a_gamma_of_zero",
        "    values = values.masked_fill(~mask, 0.0)",
        "    gamma = gamma or 1.0\n    values = values.masked_fill(~mask, 0.0)",
        "`gamma or 1.0` takes a gamma of 0 for none. With 0 only the token's own reward counts.",
    ),
    edit(
        "compute_advantages",
        "deltas_clipped",
        DELTA,
        f"{DELTA}; delta = delta.clamp(-10, 10)",
        "The deltas are clipped. Nothing bounds them here.",
    ),
    edit(
        "compute_advantages",
        "as_many_steps_as_rows",
        "reversed(range(values.shape[1]))",
        "reversed(range(len(values)))",
        "The loop makes as many steps as there are completions. It runs over the tokens, axis 1.",
    ),
    edit(
        "compute_advantages",
        "break_for_continue",
        "    for t in reversed(range(values.shape[1])):\n",
        "    for t in reversed(range(values.shape[1])):\n"
        "        if not mask[:, t].any():\n"
        "            break\n",
        "The loop begins at the right, where all rows may have ended, and stops there. Go on to "
        "the columns before.",
    ),
]


@wrong(
    "compute_advantages",
    "Each token's advantage calls for the next one's, and Python stops at a depth of 1000: go back "
    "from the last token in a loop.",
)
def calls_itself_for_the_next_token(values, token_rewards, mask, gamma=1.0, lam=0.95):
    values, rewards = (x.detach().masked_fill(~mask, 0.0) for x in (values, token_rewards))
    after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = rewards + gamma * after - values

    def look_ahead(t):
        if t == mask.shape[1]:
            return []
        later = look_ahead(t + 1)
        following = later[0] if later else torch.zeros_like(deltas[:, 0])
        return [(deltas[:, t] + gamma * lam * following) * mask[:, t], *later]

    return torch.stack(look_ahead(0), dim=1)


@wrong(
    "compute_advantages",
    "Dividing by powers of gamma * lam breaks down for long completions and for lam 0. Go "
    "backwards in time instead.",
)
def by_dividing_powers(values, token_rewards, mask, gamma=1.0, lam=0.95):
    with torch.no_grad():
        values, token_rewards = (x.masked_fill(~mask, 0.0) for x in (values, token_rewards))
        following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
        powers = (gamma * lam) ** torch.arange(values.shape[1])
        weighted = (token_rewards + gamma * following - values) * powers
        return weighted.flip(1).cumsum(1).flip(1) / powers


@wrong(
    "compute_advantages",
    "The sum of deltas stops after 100 steps. It runs to the end of the completion, however long.",
)
def horizon_of_a_hundred(values, token_rewards, mask, gamma=1.0, lam=0.95):
    values, token_rewards = (x.detach().masked_fill(~mask, 0.0) for x in (values, token_rewards))
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = token_rewards + gamma * following - values
    advantages = torch.zeros_like(deltas)
    for k in range(min(100, deltas.shape[1])):
        advantages[:, : deltas.shape[1] - k] += (gamma * lam) ** k * deltas[:, k:]
    return advantages * mask


@wrong(
    "compute_advantages",
    "This is the reward to go minus the value, without GAE: lam has no effect, and gamma discounts "
    "nothing.",
)
def reward_to_go(values, token_rewards, mask, gamma=1.0, lam=0.95):
    values, token_rewards = (x.detach().masked_fill(~mask, 0.0) for x in (values, token_rewards))
    return (token_rewards.flip(1).cumsum(1).flip(1) - values) * mask


@wrong(
    "compute_advantages",
    "The value of the last true token is left out: after it the value is 0, but its own is still "
    "subtracted.",
)
def own_value_masked_too_early(values, token_rewards, mask, gamma=1.0, lam=0.95):
    with torch.no_grad():
        values, token_rewards = (x.masked_fill(~mask, 0.0) for x in (values, token_rewards))
        goes_on = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
        advantages, following = torch.zeros_like(values), torch.zeros_like(values[:, 0])
        next_value = torch.zeros_like(values[:, 0])
        for t in reversed(range(values.shape[1])):
            delta = token_rewards[:, t] + goes_on[:, t] * (gamma * next_value - values[:, t])
            following = (delta + gamma * lam * following) * mask[:, t]
            next_value, advantages[:, t] = values[:, t], following
        return advantages


# --- normalize_advantages -----------------------------------------------------------------------

NORMAL = "(kept - kept.mean()) / (kept.std() + eps)"


def _filled(x, mask):
    return x.masked_fill(~mask, 0.0)


NORMALIZE_ADVANTAGES = [
    edit(
        "normalize_advantages",
        "population_std",
        "kept.std()",
        "kept.std(correction=0)",
        "This std divides by n. Ours divides by n - 1, as torch's std does by default.",
    ),
    edit(
        "normalize_advantages",
        "eps_forgotten",
        "kept.std() + eps",
        "kept.std()",
        "eps is missing: it keeps tiny spreads from being blown up.",
    ),
    edit(
        "normalize_advantages",
        "eps_argument_ignored",
        "kept.std() + eps",
        "kept.std() + 1e-8",
        "The argument eps has no effect: you add a number of your own.",
    ),
    edit(
        "normalize_advantages",
        "mean_kept",
        "(kept - kept.mean()) /",
        "kept /",
        "The mean is not subtracted: over the true positions it should become 0.",
    ),
    edit(
        "normalize_advantages",
        "only_centred",
        NORMAL,
        "kept - kept.mean()",
        "The advantages are centred but not scaled: divide by std + eps.",
    ),
    edit(
        "normalize_advantages",
        "variance",
        "kept.std() + eps",
        "kept.var() + eps",
        "You divide by the variance. Divide by its root, the std.",
    ),
    edit(
        "normalize_advantages",
        "rounding_noise_of_equal_advantages",
        "kept.numel() > 1 and kept.max() > kept.min()",
        "kept.numel() > 1",
        "Equal advantages should give zeros. In floats the mean of equal numbers may differ a "
        "little from them, and dividing by eps blows that up: ask whether max equals min.",
    ),
    edit(
        "normalize_advantages",
        "std_of_one_is_nan",
        "kept.numel() > 1 and kept.max() > kept.min()",
        "kept.numel() == 1 or (kept.numel() > 1 and kept.max() > kept.min())",
        "With a single true position the std is nan (n - 1 is 0). Return zeros there.",
    ),
    edit(
        "normalize_advantages",
        "constant_judged_over_everything",
        "kept.max() > kept.min()",
        "advantages.max() > advantages.min()",
        "Whether the advantages are constant is judged over all positions, the masked ones "
        "included. Look at the true ones only.",
    ),
    edit(
        "normalize_advantages",
        "not_detached",
        "advantages.detach()[mask]",
        "advantages[mask]",
        "A gradient flows through the advantages. They are constants: detach them.",
    ),
    edit(
        "normalize_advantages",
        "in_place",
        "normalized = torch.zeros_like(advantages)",
        "normalized = advantages.detach().zero_()",
        "You write into the caller's advantages. Make a new tensor.",
    ),
    edit(
        "normalize_advantages",
        "advantages_kept_outside",
        "normalized = torch.zeros_like(advantages)",
        "normalized = advantages.detach().clone()",
        "Outside the mask the result should be 0; yours still holds what was there.",
    ),
    edit(
        "normalize_advantages",
        "rms_without_the_mean",
        NORMAL,
        "kept / (kept.square().mean().sqrt() + eps)",
        "You divide by the root of the mean square. Subtract the mean, then divide by the std.",
    ),
    edit(
        "normalize_advantages",
        "clipped",
        NORMAL,
        f"({NORMAL}).clamp(-10, 10)",
        "The result is clipped. Nothing bounds a normalised advantage here; the ratio is what PPO "
        "clips.",
    ),
    edit(
        "normalize_advantages",
        "eps_of_0_replaced",
        "kept.std() + eps",
        "kept.std() + (eps or 1e-8)",
        "`eps or 1e-8` takes an eps of 0 for none given. Add eps as it is.",
    ),
    edit(
        "normalize_advantages",
        "nearly_equal_is_constant",
        "kept.max() > kept.min()",
        "not torch.allclose(kept, kept[0])",
        "allclose allows for differences, so that advantages which differ a little give zeros. "
        "Only a constant does.",
    ),
]


@wrong(
    "normalize_advantages",
    "The mean of squares minus the square of the mean loses all digits when the mean is large. "
    "Subtract the mean first, or use std.",
)
def mean_of_squares(advantages, mask, eps=1e-8):
    kept = advantages.detach()[mask]
    n, normalized = kept.numel(), torch.zeros_like(advantages)
    if n > 1 and kept.max() > kept.min():
        variance = (kept.square().mean() - kept.mean().square()) * n / (n - 1)
        normalized[mask] = (kept - kept.mean()) / (variance.clamp(min=0).sqrt() + eps)
    return normalized


@wrong(
    "normalize_advantages",
    "Each row is normalised on its own, which hides that one completion was better than another. "
    "Mean and std run over all true positions.",
)
def row_by_row(advantages, mask, eps=1e-8):
    normalized = torch.zeros_like(advantages)
    for row in range(len(mask)):
        kept = advantages.detach()[row, mask[row]]
        if kept.numel() > 1 and kept.max() > kept.min():
            normalized[row, mask[row]] = (kept - kept.mean()) / (kept.std() + eps)
    return normalized


@wrong(
    "normalize_advantages",
    "Each column is normalised on its own. Mean and std run over all true positions.",
)
def column_by_column(advantages, mask, eps=1e-8):
    return row_by_row.definition(advantages.T, mask.T, eps).T


@wrong(
    "normalize_advantages",
    "The zeros that stand for masked positions are counted in mean and std. Select the true "
    "positions first.",
)
def padding_counted(advantages, mask, eps=1e-8):
    kept = advantages.detach().masked_fill(~mask, 0.0)
    if not mask.any() or kept[mask].max() == kept[mask].min():
        return torch.zeros_like(kept)
    return ((kept - kept.mean()) / (kept.std() + eps)).masked_fill(~mask, 0.0)


@wrong(
    "normalize_advantages",
    "The zeros that stand for masked positions are counted in mean and std, and equal advantages "
    "do not give zeros. Select the true positions first, and ask whether they differ at all.",
)
def padding_counted_without_a_case_for_equal_ones(advantages, mask, eps=1e-8):
    kept = advantages.detach().masked_fill(~mask, 0.0)
    return ((kept - kept.mean()) / (kept.std() + eps)).masked_fill(~mask, 0.0)


@wrong(
    "normalize_advantages",
    "Mean and std run over all positions, and what is masked out may be nan. Select the true ones.",
)
def mask_used_at_the_end_only(advantages, mask, eps=1e-8):
    advantages = advantages.detach()
    normalized = (advantages - advantages.mean()) / (advantages.std() + eps)
    return normalized.masked_fill(~mask, 0.0)


@wrong(
    "normalize_advantages",
    "Only the true positions are returned. Keep the shape [batch completion], with 0 elsewhere.",
)
def true_positions_only(advantages, mask, eps=1e-8):
    kept = advantages.detach()[mask]
    return (kept - kept.mean()) / (kept.std() + eps)


@wrong(
    "normalize_advantages",
    "torch.zeros is float32, and float64 advantages do not fit in. zeros_like has their dtype.",
)
def normalized_in_float32(advantages, mask, eps=1e-8):
    kept = advantages.detach()[mask]
    normalized = torch.zeros(mask.shape)
    if kept.numel() > 1 and kept.max() > kept.min():
        normalized[mask] = (kept - kept.mean()) / (kept.std() + eps)
    return normalized


@wrong(
    "normalize_advantages",
    "view() raises an error on advantages that are part of a larger tensor. Index with the mask.",
)
def normalized_in_views(advantages, mask, eps=1e-8):
    flat, kept = advantages.detach().view(-1), mask.view(-1)
    normalized, true = torch.zeros_like(flat), flat[kept]
    if true.numel() > 1 and true.max() > true.min():
        normalized[kept] = (true - true.mean()) / (true.std() + eps)
    return normalized.view(mask.shape)


@wrong(
    "normalize_advantages",
    "Mean and std are those of each row, with zeros for masked positions counted. Select the true "
    "positions of all rows, and take one mean and one std.",
)
def each_row_with_its_padding(advantages, mask, eps=1e-8):
    filled = _filled(advantages.detach(), mask)
    mean, std = filled.mean(-1, keepdim=True), filled.std(-1, keepdim=True)
    return _filled((filled - mean) / (std + eps), mask)


@wrong(
    "normalize_advantages",
    "Zeros are taken for padding. An advantage may be 0 at a true position, and counts: the mask "
    "alone says what is there.",
)
def zeros_taken_for_padding(advantages, mask, eps=1e-8):
    there = mask & (advantages != 0)
    kept, normalized = advantages.detach()[there], torch.zeros_like(advantages)
    if kept.numel() > 1 and kept.max() > kept.min():
        normalized[there] = (kept - kept.mean()) / (kept.std() + eps)
    return normalized


# --- calc_clipped_surrogate_objective -----------------------------------------------------------

TERMS = "torch.minimum(ratio * advantages, clipped * advantages)"
OBJECTIVE = f"return masked_mean({TERMS}, mask)"
RATIO = "return logratio.clamp(max=80.0).exp()"

CALC_CLIPPED_SURROGATE_OBJECTIVE = [
    edit(
        "calc_clipped_surrogate_objective",
        "log_ratios_held_at_twenty",
        RATIO,
        "return logratio.clamp(-20.0, 20.0).exp()",
        "A log-ratio beyond 20 is cut: a token of negative advantage has no gradient there. A "
        "bound belongs where exp would overflow, near 80.",
        within="calc_ratio",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "certain_tokens_left_out",
        "    high = clip_coef if",
        "    mask = mask & (old_logprobs != 0)\n    high = clip_coef if",
        "An old log-prob of 0 is taken for padding. It is a token that was certain: the mask alone "
        "says what counts.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "maximum",
        "torch.minimum(",
        "torch.maximum(",
        "The larger of the two is what a loss takes. An objective takes the smaller one: for "
        "negative advantages yours removes the wrong side.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "sign_of_a_loss",
        "return masked_mean(",
        "return -masked_mean(",
        "The sign is that of a loss; an objective is maximised.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "clipped_alone",
        TERMS,
        "clipped * advantages",
        "You take the clipped term alone. The minimum with the unclipped one lets the policy come "
        "back from where it lost.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "not_clipped",
        TERMS,
        "ratio * advantages",
        "The clip has no effect: nothing keeps the policy near the one that sampled.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "clip_coef_high_ignored",
        "clip_coef if clip_coef_high is None else clip_coef_high",
        "clip_coef",
        "clip_coef_high has no effect: the interval ends at 1 + clip_coef_high when that is given.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "a_high_clip_of_zero",
        "clip_coef if clip_coef_high is None else clip_coef_high",
        "clip_coef_high or clip_coef",
        "`clip_coef_high or clip_coef` takes a clip of 0 for none. Compare with None.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "a_clip_of_zero",
        "clipped = ratio.clamp(1 - clip_coef, 1 + high)",
        "clipped = ratio.clamp(1 - clip_coef, 1 + high) if clip_coef else ratio",
        "A clip_coef of 0 is taken for no clip. With 0 no gain beyond a ratio of 1 counts.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "zero_advantages_left_out",
        f"return masked_mean({TERMS}, mask)",
        f"return masked_mean({TERMS}, mask & (advantages != 0))",
        "True positions whose advantage is 0 are left out of the mean. They count: the mask alone "
        "says what does.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "high_clip_on_both_sides",
        "clamp(1 - clip_coef, 1 + high)",
        "clamp(1 - high, 1 + high)",
        "clip_coef_high is used on both sides. The interval begins at 1 - clip_coef.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "one_minus_forgotten",
        "ratio.clamp(1 - clip_coef, 1 + high)",
        "ratio.clamp(clip_coef, high)",
        "The interval is around 1: from 1 - clip_coef to 1 + clip_coef_high.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "no_lower_clip",
        "ratio.clamp(1 - clip_coef, 1 + high)",
        "ratio.clamp(max=1 + high)",
        "The ratio is clipped from above only. For negative advantages the lower end matters.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "reciprocal_lower_clip",
        "ratio.clamp(1 - clip_coef, 1 + high)",
        "ratio.clamp(1 / (1 + clip_coef), 1 + high)",
        "The lower end is 1 - clip_coef, not 1 / (1 + clip_coef).",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "log_ratio_clipped",
        "clipped = ratio.clamp(1 - clip_coef, 1 + high)",
        "clipped = ratio.log().clamp(-clip_coef, high).exp()",
        "You clip the log-ratio at -clip_coef and clip_coef. Clip the ratio itself, around 1.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "another_default",
        "clip_coef: float = 0.2",
        "clip_coef: float = 0.1",
        "The default of clip_coef is 0.2.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "advantages_normalized_here",
        "advantages.detach().masked_fill(~mask, 0.0)",
        "normalize_advantages(advantages, mask)",
        "The advantages are normalised again. In a small minibatch that can flip their signs: it "
        "is done once, for the whole rollout.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "advantages_not_detached",
        "advantages.detach().masked_fill",
        "advantages.masked_fill",
        "The advantages get a gradient. They are constants: detach them.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "mean_over_all_positions",
        OBJECTIVE,
        f"return {TERMS}.mean()",
        "You divide by the number of all positions. Divide by the number of true ones.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "summed",
        OBJECTIVE,
        f"return {TERMS}.sum()",
        "This is the sum, which grows with the batch: take the mean over the true positions.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "mean_of_row_means",
        OBJECTIVE,
        f"return masked_mean({TERMS}, mask, 1).mean()",
        "Every true position counts alike here: you average each row first.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "minimum_of_the_means",
        OBJECTIVE,
        "return torch.minimum(masked_mean(ratio * advantages, mask), masked_mean(clipped * "
        "advantages, mask))",
        "The minimum is taken of the two means. Take it token by token, then average.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "gradient_through_the_clip",
        "clipped = ratio.clamp(1 - clip_coef, 1 + high)",
        "clipped = ratio + (ratio.clamp(1 - clip_coef, 1 + high) - ratio).detach()",
        "The value is right, but a gradient passes through the clip. Where the ratio is clipped it "
        "is 0: clamp alone does that.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "log_probs_detached",
        "at_least_float32(logprobs - old_logprobs.detach())",
        "at_least_float32(logprobs - old_logprobs).detach()",
        "The value is right, but the log-probs are detached: nothing would be learned.",
        within="calc_ratio",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "old_log_probs_not_detached",
        "old_logprobs.detach()",
        "old_logprobs",
        "The old log-probs get a gradient. They are what the sampler said, constants: detach them.",
        within="calc_ratio",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "without_exp",
        RATIO,
        "return logratio",
        "This is the log-ratio. The ratio is its exponential.",
        within="calc_ratio",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "first_order_ratio",
        RATIO,
        "return 1 + logratio",
        "1 + the log-ratio is only close to the ratio, and only near 1. Take the exponential.",
        within="calc_ratio",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "ratio_turned_around",
        RATIO,
        "return (-logratio).clamp(max=80.0).exp()",
        "The ratio is turned around: it is the current probability over the old one.",
        within="calc_ratio",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "log_ratio_held_near_zero",
        "clamp(max=80.0)",
        "clamp(-0.7, 0.7)",
        "The log-ratio is bounded so tightly that the unclipped term is wrong. Bound it only where "
        "exp would overflow.",
        within="calc_ratio",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "advantages_clipped",
        "advantages.detach().masked_fill(~mask, 0.0)",
        "advantages.detach().masked_fill(~mask, 0.0).clamp(-10, 10)",
        "The advantages are clipped. Only the ratio is.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "high_clip_of_one_at_most",
        "high = clip_coef if clip_coef_high is None else clip_coef_high",
        "high = min(clip_coef if clip_coef_high is None else clip_coef_high, 1.0)",
        "A clip_coef_high above 1 is cut down to 1. A ratio may well be above 2: take it as given.",
    ),
    edit(
        "calc_clipped_surrogate_objective",
        "another_default_of_the_high_clip",
        "clip_coef_high: float | None = None",
        "clip_coef_high: float | None = 0.2",
        "The default of clip_coef_high is None, which stands for clip_coef. Yours is 0.2 whatever "
        "clip_coef is.",
    ),
]


@wrong(
    "calc_clipped_surrogate_objective",
    "You divide log-probabilities. The ratio of the probabilities is exp(logprobs - old_logprobs).",
)
def ratio_of_log_probs(
    logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = logprobs[mask] / old_logprobs.detach()[mask]
    kept = advantages.detach()[mask]
    terms = torch.minimum(ratio * kept, ratio.clamp(1 - clip_coef, 1 + high) * kept)
    return terms.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_clipped_surrogate_objective",
    "The old log-probs are not used: against the detached current ones the ratio is always 1. That "
    "holds for one update per rollout only.",
)
def ratio_to_itself(logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None):
    kept = logprobs[mask]
    terms = (kept - kept.detach()).exp() * advantages.detach()[mask]
    return terms.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_clipped_surrogate_objective",
    "Without a true position this is 0 / 0. The mean there should be 0.",
)
def nan_without_tokens(
    logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = (logprobs[mask] - old_logprobs.detach()[mask]).clamp(max=80.0).exp()
    kept = advantages.detach()[mask]
    return torch.minimum(ratio * kept, ratio.clamp(1 - clip_coef, 1 + high) * kept).mean()


@wrong(
    "calc_clipped_surrogate_objective",
    "The value is right, but the mask comes after the products: there the gradient is 0 times nan "
    "or inf. Replace log-ratio and advantages at masked positions first.",
)
def masked_at_the_end_only(
    logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = (logprobs - old_logprobs.detach()).exp()
    advantages = advantages.detach()
    clipped = ratio.clamp(1 - clip_coef, 1 + high)
    return masked_mean(torch.minimum(ratio * advantages, clipped * advantages), mask)


@wrong(
    "calc_clipped_surrogate_objective",
    "The value is right, but nothing is masked before the products: where masked log-probs or "
    "advantages are nan, the gradient is 0 times nan. Replace log-ratio and advantages there "
    "first.",
)
def nothing_masked_first(
    logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = (logprobs - old_logprobs.detach()).clamp(max=80.0).exp()
    advantages = advantages.detach()
    clipped = ratio.clamp(1 - clip_coef, 1 + high)
    return masked_mean(torch.minimum(ratio * advantages, clipped * advantages), mask)


@wrong(
    "calc_clipped_surrogate_objective",
    "Multiplying by the mask leaves nan, because 0 * nan is nan. Replace what is masked out.",
)
def terms_times_mask(logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = (logprobs - old_logprobs.detach()).exp()
    advantages = advantages.detach()
    clipped = ratio.clamp(1 - clip_coef, 1 + high)
    terms = torch.minimum(ratio * advantages, clipped * advantages)
    return (terms * mask).sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_clipped_surrogate_objective",
    "Every token whose ratio is outside the interval loses its gradient. Only those that would "
    "gain there do: the minimum leaves the way back open.",
)
def no_way_back(logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = (logprobs[mask] - old_logprobs.detach()[mask]).clamp(max=80.0).exp()
    kept, clipped = advantages.detach()[mask], ratio.clamp(1 - clip_coef, 1 + high)
    terms = torch.minimum(ratio * kept, clipped * kept)
    terms = torch.where(clipped == ratio, terms, terms.detach())
    return terms.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_clipped_surrogate_objective",
    "For negative advantages you bound the loss as well (dual clip). PPO's objective has no third "
    "bound.",
)
def dual_clip(logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = (logprobs[mask] - old_logprobs.detach()[mask]).clamp(max=80.0).exp()
    kept = advantages.detach()[mask]
    terms = torch.minimum(ratio * kept, ratio.clamp(1 - clip_coef, 1 + high) * kept)
    terms = torch.where(kept < 0, torch.maximum(terms, 3 * kept), terms)
    return terms.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_clipped_surrogate_objective",
    "You divide probabilities. For rare tokens exp gives 0, and 0 / 0 is nan: subtract the "
    "log-probs first.",
)
def ratio_of_probabilities(
    logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None, eps=0.0
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = logprobs[mask].exp() / (old_logprobs.detach()[mask].exp() + eps)
    kept = advantages.detach()[mask]
    terms = torch.minimum(ratio * kept, ratio.clamp(1 - clip_coef, 1 + high) * kept)
    return terms.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_clipped_surrogate_objective",
    "Adding an epsilon to the old probability avoids the division by 0, but makes the ratio of "
    "rare tokens too small. Subtract the log-probs, then take exp.",
)
def ratio_with_an_epsilon(
    logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None
):
    return ratio_of_probabilities.definition(
        logprobs, old_logprobs, advantages, mask, clip_coef, clip_coef_high, eps=1e-8
    )


@wrong(
    "calc_clipped_surrogate_objective",
    "Old log-probs and advantages get a gradient. They come from the rollout, as constants: detach "
    "them.",
)
def nothing_detached(logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).clamp(max=80.0).exp()
    a = advantages.masked_fill(~mask, 0.0)
    return masked_mean(torch.minimum(ratio * a, ratio.clamp(1 - clip_coef, 1 + high) * a), mask)


@wrong(
    "calc_clipped_surrogate_objective",
    "torch.zeros is float32, and float64 log-probs give terms that do not fit in. zeros_like has "
    "their dtype.",
)
def terms_in_float32(logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio, a = (logprobs[mask] - old_logprobs.detach()[mask]).exp(), advantages.detach()[mask]
    terms = torch.zeros(mask.shape)
    terms[mask] = torch.minimum(ratio * a, ratio.clamp(1 - clip_coef, 1 + high) * a)
    return terms.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_clipped_surrogate_objective",
    "You hold the log-ratio between logarithms, and that of 1 - clip_coef does not exist when "
    "clip_coef is 1. Clip the ratio.",
)
def clipped_between_logarithms(
    logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    logratio = (logprobs - old_logprobs.detach())[mask]
    a = advantages.detach()[mask]
    held = logratio.clamp(math.log(1 - clip_coef), math.log1p(high))
    terms = torch.minimum(logratio.exp() * a, held.exp() * a)
    return terms.sum() / max(len(terms), 1)


# --- calc_value_function_loss -------------------------------------------------------------------

CLIPPED = "clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)"
LARGER = "errors = torch.maximum(errors, (clipped - returns).square())"
LOSS = "return vf_coef / 2 * masked_mean(errors, mask)"

CALC_VALUE_FUNCTION_LOSS = [
    edit(
        "calc_value_function_loss",
        "half_forgotten",
        "return vf_coef / 2 *",
        "return vf_coef *",
        "The 1/2 is missing: the loss is vf_coef / 2 times the mean squared error.",
    ),
    edit(
        "calc_value_function_loss",
        "vf_coef_twice",
        "return vf_coef / 2 *",
        "return vf_coef * vf_coef / 2 *",
        "vf_coef is applied twice: the loss is vf_coef / 2 times the mean squared error.",
    ),
    edit(
        "calc_value_function_loss",
        "vf_coef_ignored",
        "return vf_coef / 2 *",
        "return 1 / 2 *",
        "vf_coef has no effect.",
    ),
    edit(
        "calc_value_function_loss",
        "sign_of_an_objective",
        "return vf_coef",
        "return -vf_coef",
        "A loss is minimised and not negative: the trainer subtracts it from the objective.",
    ),
    edit(
        "calc_value_function_loss",
        "another_default",
        "vf_coef: float = 0.5",
        "vf_coef: float = 0.1",
        "The default of vf_coef is 0.5.",
    ),
    edit(
        "calc_value_function_loss",
        "minimum",
        "torch.maximum(",
        "torch.minimum(",
        "Take the larger of the two errors: the smaller one would reward a value for moving far "
        "away.",
    ),
    edit(
        "calc_value_function_loss",
        "clipped_alone",
        LARGER,
        "errors = (clipped - returns).square()",
        "You take the clipped error alone. Where it is the smaller one, the other counts.",
    ),
    edit(
        "calc_value_function_loss",
        "clip_ignored",
        "if clip_coef is not None:",
        "if False:",
        "clip_coef has no effect.",
    ),
    edit(
        "calc_value_function_loss",
        "a_clip_of_zero",
        "if clip_coef is not None:",
        "if clip_coef:",
        "`if clip_coef` takes a clip of 0 for none. Compare with None.",
    ),
    edit(
        "calc_value_function_loss",
        "a_vf_coef_of_zero",
        "return vf_coef / 2 *",
        "return (vf_coef or 0.5) / 2 *",
        "`vf_coef or 0.5` takes a vf_coef of 0 for none. With 0 the loss is 0.",
    ),
    edit(
        "calc_value_function_loss",
        "a_clip_of_one_or_more",
        "if clip_coef is not None:",
        "if clip_coef is not None and clip_coef < 1:",
        "A clip_coef of 1 or more has no effect. It bounds a difference of values, which has any "
        "size.",
    ),
    edit(
        "calc_value_function_loss",
        "clipped_around_zero",
        CLIPPED,
        "clipped = values.clamp(-clip_coef, clip_coef)",
        "The values are held near 0. Hold them near the old values: clip the difference.",
    ),
    edit(
        "calc_value_function_loss",
        "clipped_by_a_ratio",
        CLIPPED,
        "clipped = old_values * (values / old_values).clamp(1 - clip_coef, 1 + clip_coef)",
        "A value's clip is a difference, not a ratio: old_values plus or minus clip_coef.",
    ),
    edit(
        "calc_value_function_loss",
        "old_values_not_added",
        CLIPPED,
        "clipped = (values - old_values).clamp(-clip_coef, clip_coef)",
        "The clipped difference is compared with the returns. Add old_values to it again.",
    ),
    edit(
        "calc_value_function_loss",
        "clipped_on_one_side",
        "clamp(-clip_coef, clip_coef)",
        "clamp(max=clip_coef)",
        "Values may fall as far as they like here. Clip on both sides.",
    ),
    edit(
        "calc_value_function_loss",
        "larger_mean",
        LARGER,
        "return vf_coef / 2 * torch.maximum(masked_mean(errors, mask), masked_mean((clipped - "
        "returns).square(), mask))",
        "The larger of the two means is not the mean of the larger errors. Compare element by "
        "element, then average.",
    ),
    edit(
        "calc_value_function_loss",
        "both_added",
        LARGER,
        "errors = errors + (clipped - returns).square()",
        "The two errors are added. Take the larger one.",
    ),
    edit(
        "calc_value_function_loss",
        "errors_clipped",
        LARGER,
        "errors = errors.clamp(max=clip_coef**2)",
        "You clip the error, so that far-off values get no gradient at all. Clip how far the value "
        "has moved from the old one.",
    ),
    edit(
        "calc_value_function_loss",
        "gradient_through_the_clip",
        CLIPPED,
        "clipped = values + ((values - old_values).clamp(-clip_coef, clip_coef) + old_values - "
        "values).detach()",
        "The value is right, but a gradient passes through the clip: where the value is held, the "
        "clipped error has none.",
    ),
    edit(
        "calc_value_function_loss",
        "absolute_errors",
        "errors = (values - returns).square()",
        "errors = (values - returns).abs()",
        "The error is squared.",
    ),
    edit(
        "calc_value_function_loss",
        "against_the_old_values",
        "errors = (values - returns).square()",
        "errors = (values - old_values).square()",
        "The values should approach the returns, not the old values.",
    ),
    edit(
        "calc_value_function_loss",
        "mean_over_all_positions",
        LOSS,
        "return vf_coef / 2 * errors.mean()",
        "You divide by the number of all positions. Divide by the number of true ones.",
    ),
    edit(
        "calc_value_function_loss",
        "summed",
        LOSS,
        "return vf_coef / 2 * errors.sum()",
        "This is the sum, which grows with the batch: take the mean over the true positions.",
    ),
    edit(
        "calc_value_function_loss",
        "mean_of_row_means",
        LOSS,
        "return vf_coef / 2 * masked_mean(errors, mask, 1).mean()",
        "Every true position counts alike here: you average each row first.",
    ),
    edit(
        "calc_value_function_loss",
        "root_of_the_mean",
        LOSS,
        "return vf_coef / 2 * masked_mean(errors, mask).sqrt()",
        "The mean of the squares is not rooted.",
    ),
    edit(
        "calc_value_function_loss",
        "returns_not_detached",
        "returns = returns.detach().masked_fill",
        "returns = returns.masked_fill",
        "The returns get a gradient. They are targets, constants: detach them.",
    ),
    edit(
        "calc_value_function_loss",
        "old_values_not_detached",
        "old_values.detach().masked_fill",
        "old_values.masked_fill",
        "The old values get a gradient. They are constants: detach them.",
    ),
    edit(
        "calc_value_function_loss",
        "values_detached",
        "values = values.masked_fill(~mask, 0.0)",
        "values = values.detach().masked_fill(~mask, 0.0)",
        "The value is right, but the values are detached: the head would not learn.",
    ),
    edit(
        "calc_value_function_loss",
        "values_not_masked",
        "values = values.masked_fill(~mask, 0.0)",
        "values = values.clone()",
        "The loss is right, but at masked positions the gradient is 0 times nan. Replace the "
        "values there before you square.",
    ),
    edit(
        "calc_value_function_loss",
        "returns_held_near_zero",
        "returns = returns.detach().masked_fill(~mask, 0.0)",
        "returns = returns.detach().masked_fill(~mask, 0.0).clamp(-10, 10)",
        "The returns are clipped. They are the targets, whatever their size.",
    ),
    edit(
        "calc_value_function_loss",
        "large_errors_cut_off",
        "errors = (values - returns).square()",
        "errors = (values - returns).square().clamp(max=100)",
        "Large errors are cut off, and where they are nothing is learned. clip_coef bounds how far "
        "a value moves, not the error.",
    ),
]


@wrong(
    "calc_value_function_loss",
    "Without a true position this is 0 / 0. The mean there should be 0.",
)
def no_tokens_is_nan(values, old_values, returns, mask, vf_coef=0.5, clip_coef=None):
    values, old_values, returns = values[mask], old_values.detach()[mask], returns.detach()[mask]
    errors = (values - returns).square()
    if clip_coef is not None:
        clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.maximum(errors, (clipped - returns).square())
    return vf_coef / 2 * errors.mean()


@wrong(
    "calc_value_function_loss",
    "This is a Huber loss, which is linear in large errors. The error is squared.",
)
def huber(values, old_values, returns, mask, vf_coef=0.5, clip_coef=None):
    values, old_values, returns = values[mask], old_values.detach()[mask], returns.detach()[mask]
    errors = 2 * torch.nn.functional.smooth_l1_loss(values, returns, reduction="none")
    if clip_coef is not None:
        held = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
        clipped = 2 * torch.nn.functional.smooth_l1_loss(held, returns, reduction="none")
        errors = torch.maximum(errors, clipped)
    return vf_coef / 2 * errors.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_value_function_loss",
    "Old values and returns get a gradient. They come from the rollout, as constants: detach them.",
)
def targets_not_detached(values, old_values, returns, mask, vf_coef=0.5, clip_coef=None):
    values, old, target = (x.masked_fill(~mask, 0.0) for x in (values, old_values, returns))
    errors = (values - target).square()
    if clip_coef is not None:
        clipped = old + (values - old).clamp(-clip_coef, clip_coef)
        errors = torch.maximum(errors, (clipped - target).square())
    return vf_coef / 2 * masked_mean(errors, mask)


@wrong(
    "calc_value_function_loss",
    "view() raises an error on values that are a slice of a larger tensor. Index with the mask.",
)
def views_of_the_values(values, old_values, returns, mask, vf_coef=0.5, clip_coef=None):
    kept = mask.view(-1)
    value, old, target = (x.view(-1)[kept] for x in (values, old_values.detach(), returns.detach()))
    errors = (value - target).square()
    if clip_coef is not None:
        held = old + (value - old).clamp(-clip_coef, clip_coef)
        errors = torch.maximum(errors, (held - target).square())
    return vf_coef / 2 * errors.sum() / kept.sum().clamp(min=1)


# --- calc_entropy_bonus -------------------------------------------------------------------------

BONUS = "return ent_coef * entropies.sum() / max(entropies.numel(), 1)"
ENTROPIES = "entropies = calc_entropy(logits[mask])"

CALC_ENTROPY_BONUS = [
    edit(
        "calc_entropy_bonus",
        "impossible_is_minus_100",
        "entropies = calc_entropy(logits[mask])",
        "kept = at_least_float32(logits[mask])\n"
        "    entropies = calc_entropy(kept.masked_fill(kept == -torch.inf, -100.0))",
        "A logit of -inf is replaced by -100, which is not small where the others are about -100. "
        "It counts 0 beside any others.",
    ),
    edit(
        "calc_entropy_bonus",
        "sign_of_a_loss",
        "return ent_coef",
        "return -ent_coef",
        "A bonus is added to the objective: it is not negative.",
    ),
    edit(
        "calc_entropy_bonus",
        "ent_coef_ignored",
        "return ent_coef * entropies",
        "return entropies",
        "ent_coef has no effect.",
    ),
    edit(
        "calc_entropy_bonus",
        "summed",
        BONUS,
        "return ent_coef * entropies.sum()",
        "This is the sum, which grows with the batch: take the mean over the true positions.",
    ),
    edit(
        "calc_entropy_bonus",
        "divided_by_all_positions",
        "max(entropies.numel(), 1)",
        "mask.numel()",
        "You divide by the number of all positions. Divide by the number of true ones.",
    ),
    edit(
        "calc_entropy_bonus",
        "nan_without_tokens",
        BONUS,
        "return ent_coef * entropies.mean()",
        "Without a true position this is 0 / 0. The mean there should be 0.",
    ),
    edit(
        "calc_entropy_bonus",
        "mask_ignored",
        BONUS,
        "return ent_coef * calc_entropy(logits).mean()",
        "The mask has no effect: positions after the end are counted too.",
    ),
    edit(
        "calc_entropy_bonus",
        "mean_over_the_vocabulary",
        BONUS,
        "return ent_coef * entropies.sum() / max(entropies.numel() * logits.shape[-1], 1)",
        "Sum over the vocabulary: p already is the weight. You divide by its size as well.",
    ),
    edit(
        "calc_entropy_bonus",
        "in_bits",
        "return ent_coef * entropies.sum()",
        "return ent_coef * entropies.sum() / math.log(2)",
        "This is in bits. With the natural logarithm it is in nats.",
    ),
    edit(
        "calc_entropy_bonus",
        "entropy_of_the_mean",
        ENTROPIES,
        "entropies = calc_entropy(logits[mask].mean(0, keepdim=True)) * mask.sum().clamp(max=1)",
        "This is the entropy of the averaged logits. Average the entropies of the positions.",
    ),
    edit(
        "calc_entropy_bonus",
        "wrong_axis",
        ENTROPIES,
        "entropies = calc_entropy(logits[mask].T)",
        "The softmax runs over the positions. The vocabulary is the last axis.",
    ),
    edit(
        "calc_entropy_bonus",
        "mean_of_row_means",
        BONUS,
        "rows = torch.zeros(mask.shape).masked_scatter(mask, entropies); return ent_coef * "
        "masked_mean(rows, mask, 1).mean()",
        "Every true position counts alike here: you average each row first.",
    ),
    edit(
        "calc_entropy_bonus",
        "perplexity",
        "return ent_coef * entropies.sum()",
        "return ent_coef * entropies.exp().sum()",
        "This is the perplexity, exp of the entropy. Average the entropy itself.",
    ),
    edit(
        "calc_entropy_bonus",
        "logits_for_log_probs",
        ENTROPIES,
        "entropies = -(logits[mask].softmax(-1) * logits[mask]).sum(-1)",
        "Logits are no log-probabilities: use log_softmax in -sum p log p.",
    ),
    edit(
        "calc_entropy_bonus",
        "nan_replaced_in_the_products",
        "entropies = calc_entropy(logits[mask])",
        "logprobs = logits[mask].log_softmax(-1)\n"
        "    entropies = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(-1)",
        "The bonus is right, but a logit of -inf makes its gradient nan: nan_to_num after the "
        "product comes too late. Replace the log-prob before you multiply.",
    ),
    edit(
        "calc_entropy_bonus",
        "number_for_a_coefficient_of_0",
        "    entropies = calc_entropy(logits[mask])",
        "    if ent_coef == 0:\n        return 0.0\n    entropies = calc_entropy(logits[mask])",
        "With an ent_coef of 0 you return a Python float. The result is a tensor always.",
    ),
]


@wrong(
    "calc_entropy_bonus",
    "The bonus is right, but nan beyond the mask reaches the gradient: masking the entropies comes "
    "too late. Mask the logits before the softmax.",
)
def entropies_masked_afterwards(logits, mask, ent_coef):
    return ent_coef * masked_mean(calc_entropy(logits), mask)


@wrong(
    "calc_entropy_bonus",
    "Multiplying by the mask leaves nan, because 0 * nan is nan. Replace what is masked out.",
)
def entropies_times_mask(logits, mask, ent_coef):
    return ent_coef * (calc_entropy(logits) * mask).sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_entropy_bonus",
    "The value is right, but its gradient is 0: nothing of the logits may be detached, not even "
    "the weights p, without which the rest cancels.",
)
def weights_detached(logits, mask, ent_coef):
    logprobs = logits[mask].log_softmax(-1)
    finite = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    entropies = -(logprobs.exp().detach() * finite).sum(-1)
    return ent_coef * entropies.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_entropy_bonus",
    "The bonus is right, but where a probability underflows to 0 the gradient of its logarithm is "
    "nan. Compute with log_softmax.",
)
def logarithm_of_the_softmax(logits, mask, ent_coef):
    probs = logits[mask].softmax(-1)
    return -ent_coef * torch.special.xlogy(probs, probs).sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_entropy_bonus",
    "An epsilon inside the logarithm changes the entropy where probabilities are small, as they "
    "are in a large vocabulary. log_softmax needs none.",
)
def epsilon_in_the_logarithm(logits, mask, ent_coef):
    probs = logits[mask].softmax(-1)
    return -ent_coef * (probs * (probs + 1e-6).log()).sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_entropy_bonus",
    "Holding the probabilities at a least value changes the entropy where they are small, as they "
    "are in a large vocabulary. log_softmax needs no bound.",
)
def probabilities_held_above_zero(logits, mask, ent_coef):
    probs = logits[mask].softmax(-1)
    return -ent_coef * (probs * probs.clamp(min=1e-5).log()).sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_entropy_bonus",
    "view() raises an error on logits that are a slice of a larger tensor. Index with the mask.",
)
def views_of_the_logits(logits, mask, ent_coef):
    kept = logits.view(-1, logits.shape[-1])[mask.view(-1)]
    return ent_coef * calc_entropy(kept).sum() / max(len(kept), 1)


@wrong(
    "calc_entropy_bonus",
    "A token with a logit of -inf makes the entropy nan: 0 * -inf. It counts 0, as calc_entropy "
    "has it.",
)
def nan_for_an_impossible_token(logits, mask, ent_coef):
    logprobs = logits[mask].log_softmax(-1)
    return -ent_coef * (logprobs.exp() * logprobs).sum() / max(len(logprobs), 1)


@wrong("calc_entropy_bonus", f"{CHUNKS}divide by the number of true positions.")
def mean_of_chunk_means(logits, mask, ent_coef):
    entropies = calc_entropy(logits[mask])
    if len(entropies) == 0:
        return entropies.sum()
    return ent_coef * torch.stack([chunk.mean() for chunk in entropies.split(128)]).mean()


# --- calc_kl_penalty ----------------------------------------------------------------------------

KL = "kl = (logprobs.exp() * logratio).sum(-1)"
PENALTY = "return kl_coef * kl.sum() / max(kl.numel(), 1)"


def _kl_everywhere(logits, ref_logits):
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.detach().log_softmax(-1)
    logratio = torch.where(logprobs == -torch.inf, 0.0, logprobs - ref_logprobs)
    return (logprobs.exp() * logratio).sum(-1)


CALC_KL_PENALTY = [
    edit(
        "calc_kl_penalty",
        "the_other_direction",
        KL,
        "kl = (ref_logprobs.exp() * -logratio).sum(-1)",
        "This is KL(reference ‖ policy). Weigh by the policy's probabilities: KL(policy ‖ "
        "reference). F.kl_div(input, target) is KL(target ‖ input).",
    ),
    edit(
        "calc_kl_penalty",
        "sign_of_the_log_ratio",
        "logprobs - ref_logprobs)",
        "ref_logprobs - logprobs)",
        "The penalty is negative. A KL is not, and the trainer subtracts it: sum p (log p - log "
        "q).",
    ),
    edit(
        "calc_kl_penalty",
        "weighted_by_the_reference",
        KL,
        "kl = (ref_logprobs.exp() * logratio).sum(-1)",
        "The log-ratio is weighed by the reference's probabilities. The tokens come from the "
        "policy: use its own.",
    ),
    edit(
        "calc_kl_penalty",
        "not_weighted",
        KL,
        "kl = logratio.sum(-1)",
        "Each log-ratio counts with its probability p: you add them up unweighted.",
    ),
    edit(
        "calc_kl_penalty",
        "mean_over_the_vocabulary",
        "(logprobs.exp() * logratio).sum(-1)",
        "(logprobs.exp() * logratio).mean(-1)",
        "Sum over the vocabulary: p already is the weight. The mean, which F.kl_div takes by "
        "default, makes the KL shrink as the vocabulary grows.",
    ),
    edit(
        "calc_kl_penalty",
        "weights_detached",
        "logprobs.exp() * logratio",
        "logprobs.exp().detach() * logratio",
        "The value is right, but its gradient is 0: nothing of the policy's logits may be "
        "detached, not even the weights p, without which the rest cancels.",
    ),
    edit(
        "calc_kl_penalty",
        "reference_not_detached",
        "ref_logits.detach()[mask]",
        "ref_logits[mask]",
        "The reference's logits get a gradient. It is frozen: detach them.",
    ),
    edit(
        "calc_kl_penalty",
        "kl_coef_ignored",
        "return kl_coef * kl.sum()",
        "return kl.sum()",
        "kl_coef has no effect.",
    ),
    edit(
        "calc_kl_penalty",
        "summed",
        PENALTY,
        "return kl_coef * kl.sum()",
        "This is the sum, which grows with the batch: take the mean over the true positions.",
    ),
    edit(
        "calc_kl_penalty",
        "divided_by_all_positions",
        "max(kl.numel(), 1)",
        "mask.numel()",
        "You divide by the number of all positions. Divide by the number of true ones.",
    ),
    edit(
        "calc_kl_penalty",
        "nan_without_tokens",
        PENALTY,
        "return kl_coef * kl.mean()",
        "Without a true position this is 0 / 0. The mean there should be 0.",
    ),
    edit(
        "calc_kl_penalty",
        "mean_of_row_means",
        PENALTY,
        "rows = torch.zeros(mask.shape).masked_scatter(mask, kl); return kl_coef * "
        "masked_mean(rows, mask, 1).mean()",
        "Every true position counts alike here: you average each row first.",
    ),
    edit(
        "calc_kl_penalty",
        "k3_over_the_vocabulary",
        KL,
        "kl = (torch.expm1(-logratio) + logratio).sum(-1)",
        "This adds up k3 over the vocabulary, unweighted. The exact KL needs no estimator: sum p "
        "(log p - log q).",
    ),
    edit(
        "calc_kl_penalty",
        "squared_log_ratio",
        KL,
        "kl = (logprobs.exp() * logratio.square()).sum(-1) / 2",
        "This is the expected k2, half the squared log-ratio. The exact KL is the mean log-ratio.",
    ),
    edit(
        "calc_kl_penalty",
        "both_directions",
        KL,
        "kl = ((logprobs.exp() - ref_logprobs.exp()) * logratio).sum(-1) / 2",
        "This is the mean of both directions. The penalty is KL(policy ‖ reference) alone.",
    ),
    edit(
        "calc_kl_penalty",
        "likeliest_token_only",
        KL,
        "kl = logratio.gather(-1, logprobs.argmax(-1, keepdim=True))[:, 0]",
        "Only the likeliest token counts here. The exact KL sums over the whole vocabulary.",
    ),
    edit(
        "calc_kl_penalty",
        "logits_for_log_probs",
        "at_least_float32(logits[mask]).log_softmax(-1)",
        "at_least_float32(logits[mask])",
        "Logits are no log-probabilities: use log_softmax.",
    ),
    edit(
        "calc_kl_penalty",
        "mask_ignored",
        PENALTY,
        "logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.detach().log_softmax(-1); "
        "return kl_coef * (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1).mean()",
        "The mask has no effect: positions after the end are counted too.",
    ),
    edit(
        "calc_kl_penalty",
        "log_ratio_clipped",
        "torch.where(logprobs == -torch.inf, 0.0, logprobs - ref_logprobs)",
        "(logprobs - ref_logprobs).clamp(-20, 20)",
        "The log-ratio is clipped, so that the worst tokens are charged too little.",
    ),
    edit(
        "calc_kl_penalty",
        "number_for_a_coefficient_of_0",
        "    logprobs = at_least",
        "    if kl_coef == 0:\n        return 0.0\n    logprobs = at_least",
        "With a kl_coef of 0 you return a Python float. The result is a tensor always.",
    ),
    edit(
        "calc_kl_penalty",
        "likeliest_1000",
        "kl = (logprobs.exp() * logratio).sum(-1)",
        "likeliest = logprobs.topk(min(1000, logprobs.shape[-1])).indices\n"
        "    kl = (logprobs.exp() * logratio).gather(-1, likeliest).sum(-1)",
        "Only the policy's 1000 likeliest tokens are counted. The KL is over the whole vocabulary.",
    ),
]


@wrong(
    "calc_kl_penalty",
    "The penalty is right, but nan beyond the mask reaches the gradient: masking the KL comes too "
    "late. Mask the logits before the softmax.",
)
def masked_afterwards(logits, ref_logits, mask, kl_coef):
    return kl_coef * masked_mean(_kl_everywhere(logits, ref_logits), mask)


@wrong(
    "calc_kl_penalty",
    "Multiplying by the mask leaves nan, because 0 * nan is nan. Replace what is masked out.",
)
def multiplied_by_the_mask(logits, ref_logits, mask, kl_coef):
    return kl_coef * (_kl_everywhere(logits, ref_logits) * mask).sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_kl_penalty",
    "An epsilon inside the logarithm changes the KL of rare tokens. log_softmax needs none.",
)
def epsilon_in_the_log(logits, ref_logits, mask, kl_coef):
    probs, ref_probs = logits[mask].softmax(-1), ref_logits.detach()[mask].softmax(-1)
    kl = (probs * ((probs + 1e-5) / (ref_probs + 1e-5)).log()).sum(-1)
    return kl_coef * kl.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_kl_penalty",
    "Policy and reference are exchanged: this is KL(reference ‖ policy), and its gradient goes to "
    "the reference. The penalty is KL(policy ‖ reference), with the reference detached.",
)
def policy_and_reference_exchanged(logits, ref_logits, mask, kl_coef):
    kl = _kl_everywhere(ref_logits[mask], logits[mask])
    return kl_coef * kl.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_kl_penalty",
    "This is KL(reference ‖ policy), and the reference gets a gradient too. The penalty is "
    "KL(policy ‖ reference), with the reference detached.",
)
def the_other_direction_without_detach(logits, ref_logits, mask, kl_coef):
    kept, ref_kept = logits[mask].log_softmax(-1), ref_logits[mask].log_softmax(-1)
    kl = torch.nn.functional.kl_div(kept, ref_kept, reduction="none", log_target=True)
    return kl_coef * kl.sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_kl_penalty",
    "view() raises an error on logits that are a slice of a larger tensor. Index with the mask.",
)
def views_of_both_logits(logits, ref_logits, mask, kl_coef):
    p, q = (
        x.view(-1, x.shape[-1])[mask.view(-1)].log_softmax(-1)
        for x in (logits, ref_logits.detach())
    )
    return kl_coef * (p.exp() * (p - q)).sum() / max(len(p), 1)


@wrong("calc_kl_penalty", f"{CHUNKS}divide by the number of true positions.")
def mean_of_chunk_means_of_the_kl(logits, ref_logits, mask, kl_coef):
    logprobs, ref_logprobs = logits[mask].log_softmax(-1), ref_logits.detach()[mask].log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)
    if len(kl) == 0:
        return kl.sum()
    return kl_coef * torch.stack([chunk.mean() for chunk in kl.split(1024)]).mean()


@wrong(
    "calc_kl_penalty",
    "F.kl_div with probabilities has a gradient of nan where one is 0 in float32. Give it the "
    "log-probs of both, with log_target=True.",
)
def kl_div_with_probabilities(logits, ref_logits, mask, kl_coef):
    probs = logits[mask].softmax(-1)
    ref_logprobs = ref_logits.detach()[mask].log_softmax(-1)
    kl = F.kl_div(ref_logprobs, probs, reduction="none").sum(-1)
    return kl_coef * kl.sum() / max(kl.numel(), 1)


# --- TransformerWithValueHeadLora.forward_with_value_head ---------------------------------------

TRANSFORMER_WITH_VALUE_HEAD_LORA_FORWARD_WITH_VALUE_HEAD = [
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "head_moved_to_the_dtype_of_the_base",
        "values = self.value_head(hidden[0].to(self.value_head.weight.dtype))",
        "values = self.value_head.to(hidden[0].dtype)(hidden[0])",
        "The head takes the dtype of the base, for good: in bfloat16 most steps of the optimizer "
        "are lost in rounding. Cast what it reads, not the head.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "hidden_states_kept_by_shape",
        '        hidden: list[Float[Tensor, "batch seq d_model"]] = []\n',
        '        kept = self.__dict__.setdefault("kept_by_shape", {})\n'
        "        hidden = kept.setdefault(input_ids.shape, [])\n",
        "The list of hidden states outlives the call, and its first one is that of the first input "
        "of this shape: later values are those of other tokens. Make a new list in each call.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "output_not_cast",
        "hidden[0].to(self.value_head.weight.dtype)",
        "hidden[0]",
        "On a base in bfloat16 the final layer norm's output is no float32, as the head is: cast "
        "it to the head's dtype.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "positions_by_the_number_of_pads",
        '        logits = self._run([("ln_final.hook_out", read_hidden)], '
        "input_ids, attention_mask)\n",
        "        kwargs = {}\n"
        "        if attention_mask is not None:\n"
        "            pads = (attention_mask == 0).sum(-1, keepdim=True)\n"
        "            positions = torch.arange(input_ids.shape[1], device=input_ids.device)\n"
        '            kwargs["position_ids"] = (positions - pads).clamp(min=0)\n'
        '        hooks = [("ln_final.hook_out", read_hidden)]\n'
        "        logits = self._run(hooks, input_ids, attention_mask, **kwargs)\n",
        "All padding is taken to be on the left. The attention mask says where it is, and _run "
        "derives the positions from it.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "before_the_affine_part",
        '("ln_final.hook_out"',
        '("ln_final.hook_normalized"',
        "hook_normalized is the layer norm before its scale and bias. The head reads what the "
        "unembedding reads: ln_final.hook_out.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "before_the_last_norm",
        '("ln_final.hook_out"',
        '("ln_final.hook_in"',
        "The head reads the residual stream before the final layer norm. Read its output.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "mask_forgotten",
        "read_hidden)], input_ids, attention_mask)",
        "read_hidden)], input_ids, None)",
        "The attention mask is not passed on, so padding is attended to and counted as positions.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "no_mask_for_a_single_row",
        "        hidden: list",
        "        if len(input_ids) == 1:\n            attention_mask = None\n        hidden: list",
        "A single row may have padding too: its mask is dropped.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "mask_made_of_pad_ids",
        "        hidden: list",
        "        if attention_mask is None:\n"
        "            attention_mask = (input_ids != self.tokenizer.pad_token_id).long()\n"
        "        hidden: list",
        "Without a mask every token is attended to. The pad id may be a token like any other.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "hidden_detached",
        "hidden.append(x)",
        "hidden.append(x.detach())",
        "The values carry no gradient to the adapters: do not detach the hidden state.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "last_axis_kept",
        'rearrange(values, "batch seq 1 -> batch seq")',
        "values",
        "The values should be [batch seq]: take the head's last axis of 1 off.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "squashed",
        "values = self.value_head(hidden[0].to(self.value_head.weight.dtype))",
        "values = self.value_head(hidden[0].to(self.value_head.weight.dtype)).tanh()",
        "A value is a prediction of a return, of any size. Do not squash it.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "adapters_off",
        "        logits = self._run(",
        "        with self.reference():\n            logits = self._run(",
        "The adapters are off here. The policy is the model with its adapters on.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "head_not_trained",
        '"value_head": list(self.value_head.parameters())',
        '"value_head": []',
        "The head is missing from trainable_parameters(), so it would never learn.",
        within="TransformerWithValueHeadLora.trainable_parts",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "head_not_saved",
        "return super().trainable_state() | head",
        "return super().trainable_state()",
        "save_adapter and load_adapter leave the head out.",
        within="TransformerWithValueHeadLora.trainable_state",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "shifted_already",
        'rearrange(values, "batch seq 1 -> batch seq")',
        'rearrange(values, "batch seq 1 -> batch seq").roll(1, 1)',
        "The values are moved by one already. Keep them at their positions: the shift to tokens is "
        "made in one place, later.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "adapters_on_inside_reference",
        '        logits = self._run([("ln_final.hook_out", read_hidden)], input_ids, '
        "attention_mask)\n",
        "        mode = self._mode\n"
        '        self._mode = "hooked" if mode == "reference" else mode\n'
        '        logits = self._run([("ln_final.hook_out", read_hidden)], input_ids, '
        "attention_mask)\n"
        "        self._mode = mode\n",
        "Inside reference() your adapters stay on. There both forward passes are the frozen model.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "mask_without_a_default",
        'attention_mask: Int[Tensor, "batch seq"] | None = None',
        'attention_mask: Int[Tensor, "batch seq"] | None',
        "attention_mask has no default. It may be left out, and then all tokens are attended to.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "every_axis_of_one_squeezed",
        'rearrange(values, "batch seq 1 -> batch seq")',
        "values.squeeze()",
        "squeeze() also takes off a batch or a sequence of one. Take the last axis off, alone.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "mask_made_of_eos_ids",
        "        hidden: list",
        "        if attention_mask is None:\n"
        "            attention_mask = (input_ids != self.tokenizer.eos_token_id).long()\n"
        "        hidden: list",
        "Without a mask you leave out eos, which some models pad with. Attend to every token.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "eos_taken_out_of_the_mask",
        "        hidden: list",
        "        if attention_mask is not None:\n"
        "            attention_mask = attention_mask * (input_ids != self.tokenizer.eos_token_id)\n"
        "        hidden: list",
        "You take eos out of the mask that you are given. Use the mask as it is.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "zero_at_eos",
        'rearrange(values, "batch seq 1 -> batch seq")',
        'rearrange(values, "batch seq 1 -> batch seq").masked_fill(\n'
        "            input_ids == self.tokenizer.eos_token_id, 0.0\n"
        "        )",
        "The values are 0 at eos. What follows the end is 0 in compute_advantages; here the head's "
        "number stands at every position.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "padding_written_into_the_ids",
        "        hidden: list",
        "        if attention_mask is not None:\n"
        "            pad_token_id = self.tokenizer.pad_token_id\n"
        "            input_ids.masked_fill_(attention_mask == 0, pad_token_id)\n"
        "        hidden: list",
        "You write into the input_ids that you are given. They belong to the rollout: make a copy.",
    ),
    edit(
        "TransformerWithValueHeadLora.forward_with_value_head",
        "held_at_ten",
        'rearrange(values, "batch seq 1 -> batch seq")',
        'rearrange(values, "batch seq 1 -> batch seq").clamp(-10, 10)',
        "The values are held within 10. Returns may be of any size, and so are values.",
    ),
]


@wrong(
    "TransformerWithValueHeadLora.forward_with_value_head",
    "add_hook() stays: every call leaves one more hook behind, and what it keeps. Use hooks that "
    "are removed after the forward.",
)
def hooks_pile_up(self, input_ids, attention_mask=None):
    caught = []
    self.base.add_hook("ln_final.hook_out", lambda x, hook: caught.append(x))
    logits = self.forward(input_ids, attention_mask=attention_mask)
    hidden = caught[-1].to(self.value_head.weight.dtype)
    return logits, self.value_head(hidden).squeeze(-1)


@wrong(
    "TransformerWithValueHeadLora.forward_with_value_head",
    "Above 64 rows the logits of all chunks are joined, but the values are those of the first "
    "chunk. Join both.",
)
def values_of_the_first_chunk(self, input_ids, attention_mask=None):
    hidden = []
    keep = [("ln_final.hook_out", lambda x, hook: hidden.append(x))]
    chunks = input_ids.split(64)
    masks = [None] * len(chunks) if attention_mask is None else attention_mask.split(64)
    logits = [self._run(keep, ids, mask) for ids, mask in zip(chunks, masks, strict=True)]
    values = self.value_head(hidden[0].to(self.value_head.weight.dtype))
    return torch.cat(logits), values.squeeze(-1)


# --- get_optimizer_and_scheduler ----------------------------------------------------------------

GET_OPTIMIZER_AND_SCHEDULER = [
    edit(
        "get_optimizer_and_scheduler",
        "parts_by_their_rate",
        '    groups = [{"params": part, "lr": lrs[name]} '
        "for name, part in model.trainable_parts().items()]\n",
        "    parts = {lrs[name]: part for name, part in model.trainable_parts().items()}\n"
        '    groups = [{"params": part, "lr": lr} for lr, part in parts.items()]\n',
        "The parts are kept by their learning rates: where both are equal the head takes the "
        "adapters' place, which then never learn.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "minimizes",
        ", maximize=True",
        "",
        "The optimizer goes downhill. The objective is maximised: maximize=True.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "default_eps",
        "eps=1e-5, ",
        "",
        "eps is Adam's default of 1e-8. PPO uses 1e-5, which keeps steps small where gradients "
        "are tiny.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "weight_decay",
        "weight_decay=0.0, ",
        "",
        "AdamW decays weights by 0.01 unless told otherwise: weight_decay=0.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "plain_sgd",
        "torch.optim.AdamW(groups, eps=1e-5, weight_decay=0.0, maximize=True)",
        "torch.optim.SGD(groups, maximize=True)",
        "This is plain gradient ascent; use AdamW.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "one_learning_rate",
        '"value_head": args.head_lr',
        '"value_head": args.base_lr',
        "The value head has a learning rate of its own, head_lr.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "rates_swapped",
        '{"adapters": args.base_lr, "value_head": args.head_lr}',
        '{"adapters": args.head_lr, "value_head": args.base_lr}',
        "The learning rates are swapped: base_lr is the adapters', head_lr the head's.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "starts_at_zero",
        "(k + 1) / args.warmup_steps",
        "k / args.warmup_steps",
        "The warm-up starts at 0, so that the first phase learns nothing: (k + 1) / warmup_steps.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "warmup_ignored",
        "if k < args.warmup_steps:",
        "if False:",
        "There is no warm-up.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "decays_to_zero",
        "1.0 + progress * (args.final_scale - 1.0)",
        "1.0 - progress",
        "The learning rate should fall to final_scale, not to 0.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "decay_from_the_start",
        "progress = min((k - args.warmup_steps) / decay_steps, 1.0)",
        "progress = min(k / args.total_phases, 1.0)",
        "The decay starts when the warm-up ends: count from warmup_steps.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "decay_of_total_length",
        "max(args.total_phases - args.warmup_steps, 1)",
        "args.total_phases",
        "The decay should reach final_scale at total_phases: it has total_phases - warmup_steps "
        "steps.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "constant",
        "return 1.0 + progress * (args.final_scale - 1.0)",
        "return 1.0",
        "After the warm-up the learning rate stays constant; it should fall to final_scale.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "cosine",
        "return 1.0 + progress * (args.final_scale - 1.0)",
        "return args.final_scale + (1 - args.final_scale) * (1 + math.cos(math.pi * progress)) / 2",
        "After the warm-up the learning rate falls along a cosine. It should fall along a line.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "frozen_weights_too",
        "    optimizer = torch",
        '    groups.append({"params": list(model.base.original_model.parameters()), "lr": 1e-3})\n'
        "    optimizer = torch",
        "The frozen base weights are in the optimizer.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "head_left_out",
        "model.trainable_parts().items()]",
        'model.trainable_parts().items() if name == "adapters"]',
        "The value head is in no group, so it would never learn.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "no_phase_after_the_warmup",
        "max(args.total_phases - args.warmup_steps, 1)",
        "args.total_phases - args.warmup_steps",
        "A warm-up as long as the run leaves no phase for the decay, and this divides by 0.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "warmup_squeezed_into_the_run",
        "(k + 1) / args.warmup_steps",
        "(k + 1) / min(args.warmup_steps, args.total_phases)",
        "A warm-up that is longer than the run is shortened here. It keeps its slope: "
        "(k + 1) / warmup_steps.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "an_empty_group",
        "model.trainable_parts().items()",
        '({"adapters": [], "value_head": []} | model.trainable_parts()).items()',
        "A model without a value head gets an empty group for one: make a group for each part that "
        "the model has.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "head_constant_without_warmup",
        "LambdaLR(optimizer, get_scale)",
        "LambdaLR(\n"
        "        optimizer,\n"
        "        [get_scale, get_scale if args.warmup_steps else lambda k: 1.0][: len(groups)],\n"
        "    )",
        "Without warm-up the head's learning rate stays what it is at first. It falls to "
        "final_scale, as that of the adapters does.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "no_head_lr_is_base_lr",
        '"value_head": args.head_lr}',
        '"value_head": args.head_lr or args.base_lr}',
        "`head_lr or base_lr` takes a head_lr of 0 for none. With 0 the head stands still.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "no_base_lr_is_the_default",
        '"adapters": args.base_lr,',
        '"adapters": args.base_lr or 1e-3,',
        "`base_lr or 1e-3` takes a base_lr of 0 for none. With 0 the adapters stand still.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "phases_times_minibatches",
        "max(args.total_phases - args.warmup_steps, 1)",
        "max(args.total_phases * args.num_minibatches - args.warmup_steps, 1)",
        "The decline is counted in steps of the optimizer. The schedule takes one step a phase.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "steps_divided_by_minibatches",
        "    def get_scale(k: int) -> float:\n",
        "    def get_scale(k: int) -> float:\n        k = k // args.num_minibatches\n",
        "You divide the step by num_minibatches. It counts phases already.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "rate_by_rank",
        '"adapters": args.base_lr,',
        '"adapters": args.base_lr * 4 / args.lora_rank,',
        "The adapters' learning rate depends on their rank. It is base_lr.",
    ),
    edit(
        "get_optimizer_and_scheduler",
        "little_weight_decay",
        "weight_decay=0.0",
        "weight_decay=1e-4",
        "Weights decay a little. They should not at all: weight_decay=0.",
    ),
]


# --- ReplayMemory -------------------------------------------------------------------------------

REPLAY_MEMORY = [
    edit(
        "ReplayMemory",
        "rows_of_like_length_together",
        "            order = torch.randperm(len(groups), generator=generator, device=device)\n",
        "            order = torch.randperm(len(groups), generator=generator, device=device)\n"
        '            if "mask" in self.names and self.mask.ndim == 2 and self.group_size == 1:\n'
        "                order = order[self.mask.sum(-1)[order].argsort()]\n",
        "Rows of like length share a minibatch, so that short completions always learn together. A "
        "minibatch is a random choice.",
        within="ReplayMemory.get_minibatches",
    ),
    edit(
        "ReplayMemory",
        "groups_for_one_epoch",
        "for _ in range(self.batches_per_learning_phase):",
        "for _ in range(self.batches_per_learning_phase if self.group_size == 1 else 1):",
        "With groups there is one epoch only. batches_per_learning_phase says how many there are.",
        within="ReplayMemory.get_minibatches",
    ),
    edit(
        "ReplayMemory",
        "fields_of_the_class",
        "        self.__dict__.update(fields)\n",
        "        for name, rows in fields.items():\n            setattr(type(self), name, rows)\n",
        "The fields belong to the class, so that a second memory overwrites the first one's "
        "tensors. Set them on self.",
    ),
    edit(
        "ReplayMemory",
        "not_shuffled",
        "torch.randperm(len(groups), generator=generator, device=device)",
        "torch.arange(len(groups))",
        "The rows come in the order of the rollout. Shuffle them in each epoch.",
    ),
    edit(
        "ReplayMemory",
        "drawn_with_replacement",
        "torch.randperm(len(groups), generator=generator, device=device)",
        "torch.randint(len(groups), (len(groups),))",
        "Rows are drawn with replacement: some come twice and some never. Use a permutation.",
    ),
    edit(
        "ReplayMemory",
        "fields_shuffled_apart",
        "rows[chosen.to(rows.device)]",
        "rows[chosen[torch.randperm(len(chosen))]]",
        "Each field is shuffled on its own, so that a row's tokens meet another row's advantages. "
        "Index all fields with the same permutation.",
    ),
    edit(
        "ReplayMemory",
        "one_epoch",
        "range(self.batches_per_learning_phase)",
        "range(1)",
        "There is one epoch only; there should be batches_per_learning_phase.",
    ),
    edit(
        "ReplayMemory",
        "one_order_for_all_epochs",
        "order = torch.randperm(len(groups), generator=generator, device=device)",
        "order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))",
        "Every epoch has the same order. Draw a new permutation for each.",
    ),
    edit(
        "ReplayMemory",
        "last_minibatch_dropped",
        "groups[order].tensor_split(self.num_minibatches):",
        "groups[order].tensor_split(self.num_minibatches)[:-1] or [groups[order]]:",
        "One minibatch of each epoch is missing.",
    ),
    edit(
        "ReplayMemory",
        "counts_swapped",
        "tensor_split(self.num_minibatches)",
        "tensor_split(max(1, self.n_rows // self.num_minibatches))",
        "num_minibatches is how many minibatches there are, not how many rows each has.",
    ),
    edit(
        "ReplayMemory",
        "same_minibatch_each_time",
        "minibatches.append(self.get_rows(chosen.flatten()))",
        "minibatches.append(self.get_rows(order[: self.n_rows // self.num_minibatches]))",
        "Each minibatch holds the same rows, the first ones of the permutation.",
    ),
    edit(
        "ReplayMemory",
        "columns_shuffled",
        "rows[chosen.to(rows.device)]",
        "rows[chosen.to(rows.device)].flip(-1)",
        "The positions within a row have changed places. Shuffle rows only.",
    ),
    edit(
        "ReplayMemory",
        "groups_torn_apart",
        "groups[order].tensor_split(self.num_minibatches)",
        "groups[order].flatten().tensor_split(self.num_minibatches)",
        "Rows are split without regard to groups, so that a group may lie in two minibatches. "
        "Split the groups.",
    ),
    edit(
        "ReplayMemory",
        "none_is_indexed",
        "None if rows is None else rows[chosen.to(rows.device)]",
        "rows[chosen.to(rows.device)]",
        "A field may be None, as ref_logprobs is when kl_coef is 0. It stays None in the "
        "minibatches.",
    ),
    edit(
        "ReplayMemory",
        "shuffled_within_minibatches",
        "for chosen in groups[order].tensor_split(self.num_minibatches):",
        "for chosen in groups.tensor_split(self.num_minibatches):\n"
        "                chosen = chosen[torch.randperm(len(chosen))]",
        "Rows are shuffled within each minibatch only, so that the same ones are always together. "
        "Shuffle first, then split.",
    ),
    edit(
        "ReplayMemory",
        "rolled",
        "order = torch.randperm(len(groups), generator=generator, device=device)",
        "order = torch.arange(len(groups)).roll(int(torch.randint(1, len(groups), ())) if "
        "len(groups) > 1 else 0)",
        "The rows are only rolled, so that neighbours stay neighbours. Draw a permutation.",
    ),
    edit(
        "ReplayMemory",
        "rows_not_compared",
        'require(size == n_rows, f"{name} should have {n_rows} rows, but has {size}")',
        "pass",
        "A field with another number of rows goes unnoticed, or fails far from its cause. Raise a "
        "ValueError that names it.",
    ),
    edit(
        "ReplayMemory",
        "group_size_not_compared",
        "group_size >= 1 and n_rows % group_size == 0",
        "group_size >= 1",
        "A group_size that does not divide the rows should be a ValueError that names it.",
    ),
    edit(
        "ReplayMemory",
        "rows_of_the_first_field",
        "n_rows = next(iter(sizes.values()))",
        "n_rows = len(next(iter(fields.values())))",
        "You count the rows of the first field, which may be None. Take one that is a tensor.",
    ),
    edit(
        "ReplayMemory",
        "more_rows_allowed",
        "size == n_rows,",
        "size >= n_rows,",
        "A field may have more rows than the first, and the last ones are never learned from. All "
        "should have the same number.",
    ),
    edit(
        "ReplayMemory",
        "chunk_for_tensor_split",
        "groups[order].tensor_split(self.num_minibatches)",
        "groups[order].chunk(self.num_minibatches)",
        "torch.chunk makes fewer parts than it is asked for: three of 9 rows in 4. tensor_split "
        "makes as many, some of them one row longer.",
    ),
]


# --- make_replay_memory -------------------------------------------------------------------------

MAKE_REPLAY_MEMORY = [
    edit(
        "make_replay_memory",
        "full_length_costs_one",
        "    mask = samples.completion_mask\n",
        "    mask = samples.completion_mask\n"
        "    scores = scores - (mask.sum(-1) >= args.gen_len).float()\n",
        "Completions of full length are charged 1, as TRL's missing_eos_penalty does. Nothing asks "
        "for a penalty here.",
    ),
    edit(
        "make_replay_memory",
        "log_ratios_clipped",
        "(rewards, mask, logprobs, ref_logprobs, kl_coef)",
        "(\n"
        "        rewards, mask, logprobs if kl_coef == 0 else "
        "ref_logprobs + (logprobs - ref_logprobs).clamp(-10, 10), ref_logprobs, kl_coef\n"
        "    )",
        "Log-ratios are clipped at 10 before they are charged, so that what is far off costs too "
        "little. Charge all of k1.",
    ),
    edit(
        "make_replay_memory",
        "returns_after_whitening",
        "returns=advantages + values",
        "returns=normalize_advantages(advantages, mask) + values",
        "The returns are made of whitened advantages. They are what values regress on: add the "
        "values before you whiten.",
    ),
    edit(
        "make_replay_memory",
        "advantages_not_whitened",
        "normalize_advantages(advantages, mask)",
        "advantages",
        "The advantages are not normalised: once, over the whole rollout, is here.",
    ),
    edit(
        "make_replay_memory",
        "normalizes_always",
        "normalize_reward(scores) if args.normalize_reward else scores",
        "normalize_reward(scores)",
        "normalize_reward=False has no effect.",
    ),
    edit(
        "make_replay_memory",
        "never_normalizes",
        "normalize_reward(scores) if args.normalize_reward else scores",
        "scores",
        "The scores are not normalised though normalize_reward is on.",
    ),
    edit(
        "make_replay_memory",
        "kl_charged_always",
        'args.kl_coef if args.kl_in == "reward" else 0.0',
        "args.kl_coef",
        'The KL is charged in the reward though kl_in is "loss": it would count twice.',
    ),
    edit(
        "make_replay_memory",
        "kl_never_charged",
        'args.kl_coef if args.kl_in == "reward" else 0.0',
        "0.0",
        'With kl_in "reward" the KL should come off the token rewards.',
    ),
    edit(
        "make_replay_memory",
        "gamma_and_lambda_swapped",
        "args.gamma, args.lam",
        "args.lam, args.gamma",
        "gamma and lam are swapped.",
    ),
    edit(
        "make_replay_memory",
        "lambda_by_default",
        "args.gamma, args.lam",
        "args.gamma",
        "lam is not passed on: you always use the default.",
    ),
    edit(
        "make_replay_memory",
        "gamma_by_default",
        "args.gamma, args.lam",
        "lam=args.lam",
        "gamma is not passed on: you always use the default.",
    ),
    edit(
        "make_replay_memory",
        "logprobs_with_a_graph",
        "logprobs=logprobs.detach()",
        "logprobs=logprobs",
        "The old log-probs keep their graph. What is stored of a rollout is constant: detach it.",
    ),
    edit(
        "make_replay_memory",
        "values_with_a_graph",
        "        values=values.detach()",
        "        values=values",
        "The old values keep their graph. What is stored of a rollout is constant: detach it.",
    ),
    edit(
        "make_replay_memory",
        "nothing_detached",
        "        logprobs=logprobs.detach(),\n"
        "        ref_logprobs=None if ref_logprobs is None else ref_logprobs.detach(),\n"
        "        values=values.detach(),\n"
        "        advantages=normalize_advantages(advantages, mask),\n"
        "        returns=advantages + values.detach().masked_fill(~mask, 0.0),\n",
        "        logprobs=logprobs,\n"
        "        ref_logprobs=ref_logprobs,\n"
        "        values=values,\n"
        "        advantages=normalize_advantages(advantages, mask),\n"
        "        returns=advantages + values.masked_fill(~mask, 0.0),\n",
        "Nothing is detached, so that fields keep the graph that they came with. What is stored of "
        "a rollout is constant.",
    ),
    edit(
        "make_replay_memory",
        "reference_and_policy_swapped",
        "mask, logprobs, ref_logprobs, kl_coef",
        "mask, ref_logprobs, logprobs, kl_coef",
        "The KL's sign is turned around: k1 is logprobs - ref_logprobs.",
    ),
    edit(
        "make_replay_memory",
        "kl_before_normalizing",
        "kl_coef)\n",
        "kl_coef)\n    token_rewards = token_rewards * 2 if kl_coef else token_rewards\n",
        "The token rewards are scaled again after the KL came off them.",
    ),
    edit(
        "make_replay_memory",
        "returns_are_advantages",
        "returns=advantages + values.detach().masked_fill(~mask, 0.0)",
        "returns=advantages",
        "returns = advantages + values: you left the values out.",
    ),
    edit(
        "make_replay_memory",
        "one_minibatch",
        "num_minibatches=args.num_minibatches",
        "num_minibatches=1",
        "args.num_minibatches does not reach the memory.",
    ),
    edit(
        "make_replay_memory",
        "one_epoch",
        "batches_per_learning_phase=args.batches_per_learning_phase",
        "batches_per_learning_phase=1",
        "args.batches_per_learning_phase does not reach the memory.",
    ),
    edit(
        "make_replay_memory",
        "counts_exchanged",
        "num_minibatches=args.num_minibatches,\n        batches_per_learning_phase="
        "args.batches_per_learning_phase",
        "batches_per_learning_phase=args.num_minibatches,\n        num_minibatches="
        "args.batches_per_learning_phase",
        "num_minibatches and batches_per_learning_phase are exchanged: the first is how many parts "
        "an epoch has, the second how many epochs there are.",
    ),
    edit(
        "make_replay_memory",
        "one_long_epoch",
        "num_minibatches=args.num_minibatches,\n        batches_per_learning_phase="
        "args.batches_per_learning_phase",
        "num_minibatches=args.num_minibatches * args.batches_per_learning_phase",
        "There is one epoch of many small minibatches. Every row should come once in each of "
        "batches_per_learning_phase epochs.",
    ),
    edit(
        "make_replay_memory",
        "reference_always_needed",
        "ref_logprobs=None if ref_logprobs is None else ref_logprobs.detach()",
        "ref_logprobs=ref_logprobs.detach()",
        "With kl_coef 0 there is no reference, and ref_logprobs is None.",
    ),
    edit(
        "make_replay_memory",
        "rewards_normalized_inline",
        "normalize_reward(scores) if",
        "(scores - scores.mean()) / (scores.std() + 1e-5) if",
        "A single completion has no std: use normalize_reward, which gives 0 there.",
    ),
    edit(
        "make_replay_memory",
        "constant_scores_normalized_inline",
        "normalize_reward(scores) if args.normalize_reward",
        "normalize_reward(scores) if len(scores) < 2 else (scores - scores.mean()) / "
        "(scores.std() + 1e-5) if args.normalize_reward",
        "Equal scores leave rounding noise, which dividing by eps makes visible: use "
        "normalize_reward, which gives zeros there.",
    ),
    edit(
        "make_replay_memory",
        "log_probs_of_no_reference",
        "None if ref_logprobs is None else ref_logprobs.detach()",
        "torch.zeros_like(logprobs) if ref_logprobs is None else ref_logprobs.detach()",
        "No reference ran, but the memory holds zeros as its log-probs, which are those of a "
        "reference that is sure of every token. The field should be None.",
    ),
    edit(
        "make_replay_memory",
        "raw_scores_clipped",
        "else scores\n",
        "else scores.clamp(-10, 10)\n",
        "With normalize_reward off the scores are clipped. Nothing bounds them here.",
    ),
    edit(
        "make_replay_memory",
        "whitened_with_an_eps_of_its_own",
        "normalize_advantages(advantages, mask)",
        "normalize_advantages(advantages, mask, eps=1e-5)",
        "The advantages are whitened with the eps of the rewards. Leave it to "
        "normalize_advantages: advantages may be that small.",
    ),
    edit(
        "make_replay_memory",
        "gamma_and_lambda_by_default",
        "mask, args.gamma, args.lam)",
        "mask)",
        "Neither gamma nor lam is passed on: you always use the defaults of compute_advantages.",
    ),
    edit(
        "make_replay_memory",
        "normalized_scores_clipped",
        "normalize_reward(scores) if",
        "normalize_reward(scores).clamp(-10, 10) if",
        "Normalised scores are clipped at 10, as some libraries do. Nothing bounds them here.",
    ),
    edit(
        "make_replay_memory",
        "kl_coef_of_the_arguments_set_to_0",
        '    kl_coef = args.kl_coef if args.kl_in == "reward" else 0.0\n',
        '    if args.kl_in == "loss":\n        args.kl_coef = 0.0\n    kl_coef = args.kl_coef\n',
        "args.kl_coef is set to 0 and stays so, and then the objective charges no KL either. "
        "Leave the arguments as they are.",
    ),
    edit(
        "make_replay_memory",
        "no_lambda_is_the_default",
        "args.gamma, args.lam)",
        "args.gamma, args.lam or 0.95)",
        "`lam or 0.95` takes a lambda of 0 for none. With 0 an advantage is the error of one step.",
    ),
    edit(
        "make_replay_memory",
        "advantages_whitened_inline",
        "normalize_advantages(advantages, mask)",
        "((advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-8)).masked_fill(\n"
        "            ~mask, 0.0\n        )",
        "A single token has no std, and of equal advantages this leaves rounding noise over eps: "
        "use normalize_advantages, which gives zeros.",
    ),
    edit(
        "make_replay_memory",
        "kl_beside_normalized_scores_alone",
        'args.kl_in == "reward" else',
        'args.kl_in == "reward" and args.normalize_reward else',
        "With raw scores no KL is charged. normalize_reward and kl_in have nothing to do with each "
        "other.",
    ),
]


# --- RLHFTrainer.rollout_phase ------------------------------------------------------------------


def _score(self, samples):
    """Log-probs and values, minibatch by minibatch."""
    logprobs, values = [], []
    for ids, attention_mask in self.split_samples(samples):
        logits, all_values = self.model.forward_with_value_head(ids, attention_mask)
        logprobs.append(get_logprobs(logits, ids, samples.prompt_len, self.args.temperature))
        values.append(select_completion(all_values, samples.prompt_len))
    return torch.cat(logprobs), torch.cat(values)


RLHF_TRAINER_ROLLOUT_PHASE = [
    edit(
        "RLHFTrainer.rollout_phase",
        "values_squeezed",
        "select_completion(all_values, samples.prompt_len)",
        "select_completion(all_values.squeeze(), samples.prompt_len)",
        "squeeze() takes away the batch where one row is scored at a time. The values are "
        "[batch seq] already.",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "sampling_seeded_anew",
        "                generator=self.generator,\n",
        "                generator=torch.Generator().manual_seed(args.seed),\n",
        "Each rollout starts from args.seed again, so that the same prompts get the same random "
        "numbers in every phase. Seed a generator once, and let it run on.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "seed_zero_is_none",
        "        self.generator = torch.Generator(self.device).manual_seed(args.seed)\n",
        "        self.generator = torch.Generator(self.device)\n"
        "        if args.seed:\n"
        "            self.generator.manual_seed(args.seed)\n"
        "        else:\n"
        "            self.generator.seed()\n",
        "A seed of 0 is a seed like any other, and you take it for none.",
        within="RLHFTrainer.__init__",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "sampler_copied_once",
        "                get_decoder(self.model),  # the same samples, sooner\n",
        "                self.__dict__.setdefault(\n"
        '                    "sampler", copy.deepcopy(get_decoder(self.model))\n'
        "                ),\n",
        "The sampler is a copy of the merged model that is made once, so that it never sees what "
        "is learned. Sample from the weights of now.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "nucleus",
        "                args.top_k,\n",
        "                args.top_k,\n                0.95,\n",
        "You sample with a top_p of 0.95, though nothing asks for one: rare tokens never come.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "prompts_stripped",
        "prompts = [all_prompts[row] for row in rows]",
        "prompts = [all_prompts[row].strip() for row in rows]",
        "You strip the prompts. A blank at an end is a part of what is asked.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "prompts_without_seed",
        "(n_prompts,), generator=self.generator, device=self.device",
        "(n_prompts,)",
        "The prompts are drawn from the global generator, so that args.seed does not decide them.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "attention_by_the_pad_id",
        "forward_with_value_head(ids, attention_mask)",
        "forward_with_value_head(ids, (ids != 0).long())",
        "You take every pad id for padding. Text may hold that token too: samples.attention_mask "
        "comes from the lengths.",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "top_k_of_50",
        "                args.top_k,\n",
        "                args.top_k or 50,\n",
        "Without a top_k you sample from the 50 likeliest tokens, as a default elsewhere does. "
        "None means all of them.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "scored_by_the_merged_model",
        "        for ids, attention_mask in self.split_samples(samples):\n"
        "            logits, all_values = self.model.forward_with_value_head(ids, attention_mask)",
        "        for ids, attention_mask in self.split_samples(samples):\n"
        "            with self.model.merged():\n"
        "                logits, all_values = "
        "self.model.forward_with_value_head(ids, attention_mask)",
        "The old log-probs come from the merged model. Rounding makes it differ from the hooked "
        "one, whose ratio is taken later, so that the first ratio would not be 1.",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "temperature_forgotten_in_scoring",
        "get_logprobs(logits, ids, samples.prompt_len, args.temperature)",
        "get_logprobs(logits, ids, samples.prompt_len)",
        "The tokens are sampled at args.temperature and scored at 1. The policy that is scored "
        "should be the one that was sampled.",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "values_not_shifted",
        "select_completion(all_values, samples.prompt_len)",
        "all_values[:, samples.prompt_len:]",
        "The values are those after each token was emitted. The value at a token is that of the "
        "state before it: one position earlier, as for the logits.",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "mask_forgotten_in_scoring",
        "forward_with_value_head(ids, attention_mask)",
        "forward_with_value_head(ids)",
        "The attention mask is missing when you score, so left-padded prompts are misread.",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "sampled_without_adapters",
        "with self.model.merged():",
        "with self.model.reference():",
        "The completions come from the reference: sample with the adapters, merged.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "rewards_of_prompt_and_completion",
        "call_reward_fn(args.reward_fn, samples.texts,",
        "call_reward_fn(args.reward_fn, [p + t for p, t in zip(prompts, samples.texts)],",
        "reward_fn gets prompt and completion. It should get the completion alone, or a prompt "
        "that contains what is rewarded would be paid for.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "temperature_forgotten_in_sampling",
        "                args.temperature,\n",
        "                1.0,\n",
        "args.temperature is not used when you sample.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "top_k_forgotten",
        "                args.top_k,\n",
        "                None,\n",
        "args.top_k is not used when you sample.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "bos_always",
        "prepend_bos=args.prepend_bos",
        "prepend_bos=True",
        "args.prepend_bos is not used when you sample.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "one_prompt_for_all",
        "prompts = [all_prompts[row] for row in rows]",
        "prompts = [all_prompts[rows[0]] for row in rows]",
        "A rollout uses one prompt only. Draw one for each row.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "reference_with_its_adapters",
        "with self.model.reference():\n            return",
        "if True:\n            return",
        "The reference's log-probs are the policy's, so the KL is always 0: turn the adapters off.",
        within="RLHFTrainer.get_ref_logprobs",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "log_probs_one_position_late",
        "get_logprobs(logits, ids, samples.prompt_len, args.temperature)",
        "get_logprobs(logits.roll(-1, 1), ids, samples.prompt_len, args.temperature)",
        "Each token is scored by the logits at its own position, which speak of the next one. "
        "Those one position earlier speak of it.",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "the_same_prompts_each_time",
        "chosen.repeat_interleave(group_size).tolist()",
        "[i % len(all_prompts) for i in range(n_prompts)]",
        "Every rollout has the same prompts in the same order. Draw them anew.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "the_last_prompt_never",
        "len(all_prompts), (n_prompts,)",
        "max(len(all_prompts) - 1, 1), (n_prompts,)",
        "The last prompt is never drawn: the upper end of torch.randint is exclusive already.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "prompts_always_passed_on",
        'call_reward_fn(args.reward_fn, samples.texts, {"prompts": prompts} | columns)',
        "args.reward_fn(samples.texts, prompts=prompts)",
        "A reward_fn may take the samples alone. Pass it prompts only if it names them, as "
        "utils.rewards.call_reward_fn does.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "scores_clipped",
        "scores = scores.to(self.device)",
        "scores = scores.to(self.device).clamp(-10, 10)",
        "The rewards are clipped before they are used. Nothing bounds them here.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "running_mean_of_rewards_off",
        "        scores = scores.to(self.device)",
        '        mean = getattr(self, "mean_reward", 0.0)\n'
        "        self.mean_reward = 0.9 * mean + 0.1 * float(scores.mean())\n"
        "        scores = scores.to(self.device) - mean",
        "A running mean of earlier rewards is taken off, as REINFORCE does. The value head is the "
        "baseline here: with normalize_reward off, the scores reach the returns as they are.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "the_prefix_written_out",
        "args.get_prompts()",
        'args.prompts or ["This movie is"]',
        "args.prefix is not used: without prompts it is the prompt.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "reference_logits_stored",
        "        return make_replay_memory(\n"
        "            args, samples, scores, torch.cat(logprobs), ref_logprobs, torch.cat(values)\n"
        "        )",
        "        memory = make_replay_memory(\n"
        "            args, samples, scores, torch.cat(logprobs), ref_logprobs, torch.cat(values)\n"
        "        )\n"
        "        with self.model.reference():\n"
        "            memory.ref_logits = self.model(samples.input_ids, samples.attention_mask)\n"
        "        return memory",
        "The reference's logits are stored for a whole rollout: with a real vocabulary they are "
        "the largest tensor there is. Compute them for each minibatch.",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "model_class_ignored",
        "self.model_class.from_pretrained",
        "TransformerWithValueHeadLora.from_pretrained",
        "The model that is built has a value head whatever model_class says.",
        within="RLHFTrainer.__init__",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "prompts_by_position",
        'call_reward_fn(args.reward_fn, samples.texts, {"prompts": prompts} | columns)',
        "(args.reward_fn(samples.texts, prompts) if args.reward_fn.__class__.__name__ != "
        '"function" or args.reward_fn.__code__.co_argcount > 1 else args.reward_fn(samples.texts))',
        "A second parameter of reward_fn need not be the prompts: pass them by name, to a function "
        "that names them.",
        within="RLHFTrainer.sample_and_score",
    ),
    edit(
        "RLHFTrainer.rollout_phase",
        "columns_by_gen_len",
        "        logprobs, values = [], []\n",
        "        logprobs, values = [], []\n"
        "        samples.prompt_len = samples.input_ids.shape[1] - args.gen_len\n",
        "You take the last gen_len columns for the completion. Sampling stops when all rows have "
        "ended, so there may be fewer: samples.prompt_len says where they start.",
    ),
]


@wrong(
    "RLHFTrainer.rollout_phase",
    "The parameters are frozen for the rollout, and stay frozen: nothing can learn from it. "
    "torch.no_grad() ends by itself.",
)
def parameters_left_frozen(self):
    self.model.requires_grad_(False)
    samples, scores = self.sample_and_score(self.args.batch_size)
    logprobs, values = _score(self, samples)
    ref_logprobs = self.get_ref_logprobs(samples)
    return make_replay_memory(self.args, samples, scores, logprobs, ref_logprobs, values)


@wrong(
    "RLHFTrainer.rollout_phase",
    "Gradients are switched off by hand: where reward_fn raises an error, they stay off for "
    "everything. Use no_grad, which puts back what there was.",
)
def gradients_switched_off_by_hand(self):
    torch.set_grad_enabled(False)
    samples, scores = self.sample_and_score(self.args.batch_size)
    logprobs, values = _score(self, samples)
    ref_logprobs = self.get_ref_logprobs(samples)
    torch.set_grad_enabled(True)
    return make_replay_memory(self.args, samples, scores, logprobs, ref_logprobs, values)


@wrong(
    "RLHFTrainer.rollout_phase",
    "The reference's log-probs of the first rollout are kept for all later ones. The reference is "
    "the same, but the completions are others.",
)
@torch.no_grad()
def reference_scored_once(self):
    samples, scores = self.sample_and_score(self.args.batch_size)
    logprobs, values = _score(self, samples)
    if not hasattr(self, "kept"):
        self.kept = self.get_ref_logprobs(samples)
    return make_replay_memory(self.args, samples, scores, logprobs, self.kept, values)


# --- RLHFTrainer.compute_rlhf_objective ---------------------------------------------------------

RLHF_TRAINER_COMPUTE_RLHF_OBJECTIVE = [
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "reference_logits_kept",
        "            objective = objective - args.kl_coef * self.measure_kl(minibatch, logits)\n",
        "            known = self.__dict__.setdefault('known', {})\n"
        "            ids, attention = minibatch.input_ids, minibatch.attention_mask\n"
        "            key = ids.numpy().tobytes()\n"
        "            if key not in known:\n"
        "                with torch.no_grad(), self.model.reference():\n"
        "                    ref_logits = self.model(ids, attention)\n"
        "                known[key] = self._select_scaled(minibatch, ref_logits)\n"
        "            scaled = self._select_scaled(minibatch, logits)\n"
        "            kl = calc_kl_penalty(scaled, known[key], mask, args.kl_coef)\n"
        "            objective = objective - kl\n",
        "The reference's logits are kept for later epochs. Nothing of size [batch seq vocab] is "
        "stored for the reference: compute them for each minibatch, and let them go.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "empty_columns_cut_off",
        "        args, mask = self.args, minibatch.mask\n",
        "        args, mask = self.args, minibatch.mask\n"
        "        used = minibatch.attention_mask.any(0)\n"
        "        ids, attention = minibatch.input_ids[:, used], minibatch.attention_mask[:, used]\n"
        "        fields = vars(minibatch) | {'input_ids': ids, 'attention_mask': attention}\n"
        "        minibatch = ReplayMinibatch(**fields)\n",
        "Columns that are padding in all rows are cut off. Where they are at the end, mask and old "
        "log-probs no longer line up with the tokens that are left.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "kl_weighted_by_the_temperature",
        "args.kl_coef * self.measure_kl(minibatch, logits)",
        "args.temperature * self.measure_kl(minibatch, logits)",
        "The KL is weighted by the temperature. Its weight is kl_coef.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "scored_among_the_top_k",
        "        logprobs = get_logprobs(logits, ",
        "        if args.top_k is not None:\n"
        "            least = logits.topk(args.top_k).values[..., -1:]\n"
        "            logits = logits.masked_fill(logits < least, -1e4)\n"
        "        logprobs = get_logprobs(logits, ",
        "With a top_k you score among those tokens alone. The old log-probs are those of all "
        "tokens, so the first ratio would not be 1.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "returns_held_at_ten",
        "            minibatch.returns,\n",
        "            minibatch.returns.clamp(-10, 10),\n",
        "Returns above 10 are cut, so that the value head never learns them.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "advantages_held_at_five",
        "            minibatch.advantages,\n",
        "            minibatch.advantages.clamp(-5.0, 5.0),\n",
        "Advantages above 5 are cut, as where one completion of many is rewarded. Only the ratio "
        "is clipped.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "no_vf_coef_is_a_default",
        "            args.vf_coef,\n",
        "            args.vf_coef or 0.5,\n",
        "A vf_coef of 0 leaves the value loss out, but 0 or 0.5 is 0.5. Pass it on as it is.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "no_clip_coef_is_the_default",
        "            args.clip_coef,\n",
        "            args.clip_coef or 0.2,\n",
        "A clip_coef of 0 is an interval without width, but 0 or 0.2 is 0.2. Pass it on as it is.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "kl_beside_the_entropy_alone",
        "args.kl_coef > 0:",
        "args.kl_coef > 0 and args.ent_coef > 0:",
        "Without an entropy bonus the KL penalty is missing, too. Each has a coefficient of its "
        "own.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "pad_ids_left_out",
        "        args, mask = self.args, minibatch.mask\n",
        "        args, mask = self.args, minibatch.mask\n"
        "        mask = mask & (minibatch.input_ids[:, -mask.shape[1] :] != 0)\n",
        "Tokens that have the pad's id do not count here. The mask alone says what does.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "ends_left_out",
        "        args, mask = self.args, minibatch.mask\n",
        "        args, mask = self.args, minibatch.mask\n"
        "        mask = mask & (minibatch.input_ids[:, -mask.shape[1] :] != 2)\n",
        "The eos does not count here. To end is a decision of the policy, and the mask is true on "
        "it.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "value_head_warmed_up_alone",
        "objective = surrogate - value_loss",
        "objective = surrogate * (self.phase >= args.warmup_steps) - value_loss",
        "In the first phases the surrogate is left out, for the value head to warm up. Only the "
        "learning rates have a warm-up.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "kl_warmed_up",
        "objective = objective - args.kl_coef * self",
        "objective = objective - args.kl_coef * min(1, self.phase / 20) * self",
        "The KL penalty sets in step by step. It is kl_coef in every phase.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "values_squeezed",
        "            select_completion(values, prompt_len),\n",
        "            select_completion(values.squeeze(), prompt_len),\n",
        "squeeze() takes away the batch of a minibatch of one row. The values are [batch seq] "
        "already.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "value_loss_added",
        "surrogate - value_loss +",
        "surrogate + value_loss +",
        "The value loss is added to what is maximised, which makes the values worse. Subtract it.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "entropy_subtracted",
        "- value_loss + args.ent_coef",
        "- value_loss - args.ent_coef",
        "The entropy bonus is subtracted; it should be added, to keep the policy from narrowing.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "kl_added",
        "objective - args.kl_coef",
        "objective + args.kl_coef",
        "The KL penalty is added to what is maximised. Subtract it.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "kl_always",
        'if args.kl_in == "loss" and args.kl_coef > 0:',
        "if args.kl_coef > 0:",
        'With kl_in "reward" the KL came off the rewards already; here it is charged again.',
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "kl_never",
        'if args.kl_in == "loss" and args.kl_coef > 0:',
        "if False:",
        'With kl_in "loss" the exact KL belongs to the objective. It is missing, or it is 0 '
        "because the reference has its adapters on.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "temperature_forgotten",
        "prompt_len, args.temperature)",
        "prompt_len)",
        "The log-probs are taken at temperature 1, the old ones at args.temperature.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "temperature_forgotten_in_entropy_and_kl",
        "select_completion(logits, prompt_len) / self.args.temperature",
        "select_completion(logits, prompt_len)",
        "Entropy and KL are those of temperature 1. Divide the logits by args.temperature there "
        "as well.",
        within="RLHFTrainer._select_scaled",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "values_not_shifted",
        "select_completion(values, prompt_len)",
        "values[:, prompt_len:]",
        "The values are one position late: the value at a token is that of the state before it.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "mask_forgotten",
        "minibatch.input_ids, minibatch.attention_mask\n        )\n        logprobs",
        "minibatch.input_ids\n        )\n        logprobs",
        "The attention mask is missing: left-padded prompts are misread.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "against_its_own_old_values",
        "            minibatch.returns,\n",
        "            minibatch.values,\n",
        "The values regress on the old values. Their target is the returns.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "advantages_whitened_again",
        "            minibatch.advantages,\n",
        "            normalize_advantages(minibatch.advantages, mask),\n",
        "The advantages are normalised again in the minibatch. Once, over the rollout, is enough; "
        "here it can flip signs.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "clip_by_default",
        "            args.clip_coef,\n            args.clip_coef_high,\n",
        "",
        "args.clip_coef is not used.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "vf_coef_by_default",
        "            args.vf_coef,\n            args.vf_clip_coef,\n",
        "",
        "args.vf_coef is not used.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "reference_for_old",
        "            minibatch.logprobs,\n",
        "            minibatch.ref_logprobs,\n",
        "The ratio is taken against the reference. It belongs to the policy that sampled: "
        "minibatch.logprobs.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "kl_the_other_way",
        "calc_kl_penalty(scaled, ref_scaled,",
        "calc_kl_penalty(ref_scaled, scaled,",
        "This is KL(reference || policy), and detached on the policy's side. The penalty is "
        "KL(policy || reference).",
        within="RLHFTrainer.measure_kl",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "sign_of_a_loss",
        "        return objective\n",
        "        return -objective\n",
        "The sign is that of a loss. The optimizer maximises, so return the objective itself.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "values_clipped_by_clip_coef",
        "args.vf_clip_coef,",
        "args.clip_coef,",
        "The values are clipped by clip_coef, which bounds the ratio. Nothing asks for a clip of "
        "the values here.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "reference_always_read",
        "if minibatch.ref_logprobs is not None:",
        "if True:",
        "With kl_coef 0 there is no reference, and minibatch.ref_logprobs is None.",
        within="RLHFTrainer.record_ratios",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "every_completion_as_long_as_gen_len",
        "prompt_len = minibatch.input_ids.shape[1] - mask.shape[1]",
        "prompt_len = minibatch.input_ids.shape[1] - args.gen_len",
        "You count the completion's columns by args.gen_len. Sampling stops when all rows have "
        "ended, so there may be fewer: as many as the mask has.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "prompt_len_of_the_first_minibatch",
        "prompt_len = minibatch.input_ids.shape[1] - mask.shape[1]",
        'prompt_len = vars(self).setdefault("kept", minibatch.input_ids.shape[1] - mask.shape[1])',
        "The length of the prompts is kept from the first minibatch. Those of the next rollout may "
        "be longer: take it from each minibatch.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "vf_coef_twice",
        "surrogate - value_loss +",
        "surrogate - args.vf_coef * value_loss +",
        "vf_coef is applied twice: calc_value_function_loss has multiplied by it already.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "ent_coef_forgotten",
        "args.ent_coef * entropy",
        "entropy",
        "ent_coef is missing: measure_entropy gives the mean entropy, with coefficient 1.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "kl_coef_forgotten",
        "objective - args.kl_coef * self",
        "objective - self",
        "kl_coef is missing: measure_kl gives the mean KL, with coefficient 1.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "ent_coef_and_kl_coef_forgotten",
        "args.ent_coef * entropy\n"
        '        if args.kl_in == "loss" and args.kl_coef > 0:\n'
        "            objective = objective - args.kl_coef * self",
        "entropy\n"
        '        if args.kl_in == "loss" and args.kl_coef > 0:\n'
        "            objective = objective - self",
        "ent_coef and kl_coef are missing: measure_entropy and measure_kl give means, with "
        "coefficient 1.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "entropy_left_out",
        " + args.ent_coef * entropy",
        "",
        "The entropy bonus is missing: add ent_coef times the entropy.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "clip_annealed",
        "            args.clip_coef,\n",
        "            args.clip_coef * (1 - self.phase / args.total_phases),\n",
        "The clip becomes narrower from phase to phase. It is args.clip_coef in each: only the "
        "learning rates have a schedule.",
    ),
    edit(
        "RLHFTrainer.compute_rlhf_objective",
        "current_for_old_with_one_epoch",
        "            minibatch.logprobs,\n",
        "            logprobs.detach()\n"
        "            if args.batches_per_learning_phase == 1\n"
        "            else minibatch.logprobs,\n",
        "One epoch of several minibatches is several updates: from the second on the ratio is not "
        "1. The old log-probs are the minibatch's.",
    ),
]

DIVIDED_BY_THE_MINIBATCHES = edit(
    "RLHFTrainer.compute_rlhf_objective",
    "divided_by_the_number_of_minibatches",
    "return objective",
    "return objective / args.num_minibatches",
    "The objective is divided by num_minibatches, as for gradients that are summed. Here each "
    "minibatch has a step of its own.",
)


@wrong(
    "RLHFTrainer.compute_rlhf_objective",
    "The reference's logits of the first epoch are kept for the next one. The reference is the "
    "same, but each epoch mixes the rows anew.",
)
def reference_logits_of_the_first_epoch(self, minibatch):
    args, mask, ids = self.args, minibatch.mask, minibatch.input_ids
    prompt_len = ids.shape[1] - mask.shape[1]
    logits, values = self.model.forward_with_value_head(ids, minibatch.attention_mask)
    logprobs = get_logprobs(logits, ids, prompt_len, args.temperature)
    objective = calc_clipped_surrogate_objective(
        logprobs, minibatch.logprobs, minibatch.advantages, mask, args.clip_coef
    )
    values = select_completion(values, prompt_len)
    objective = objective - calc_value_function_loss(
        values, minibatch.values, minibatch.returns, mask, args.vf_coef
    )
    objective = objective + args.ent_coef * self.measure_entropy(minibatch, logits)
    if args.kl_in == "loss" and args.kl_coef > 0:
        if not hasattr(self, "kept"):
            self.kept, self.n_calls = {}, 0
        place = self.n_calls % args.num_minibatches
        self.n_calls += 1
        if place not in self.kept:
            with torch.no_grad(), self.model.reference():
                self.kept[place] = self.model(ids, minibatch.attention_mask)
        pair = [
            select_completion(x, prompt_len) / args.temperature for x in (logits, self.kept[place])
        ]
        objective = objective - calc_kl_penalty(*pair, mask, args.kl_coef)
    self.record_ratios(logprobs, minibatch)
    return objective


# --- RLHFTrainer.learning_phase -----------------------------------------------------------------

RLHF_TRAINER_LEARNING_PHASE = [
    edit(
        "RLHFTrainer.learning_phase",
        "needs_a_value_head",
        "self.model.trainable_parameters()",
        "[*self.model._layers.parameters(), *self.model.value_head.parameters()]",
        "The value head is asked for by name. A trainer whose model_class has none, as GRPO's, "
        "learns by the same learning_phase: take trainable_parameters().",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "schedule_follows_the_phase_counter",
        "        self.scheduler.step()",
        "        self.scheduler.step(self.phase + 1)",
        "The schedule's step is taken from self.phase, which only train() counts: in a loop of "
        "one's own the rate stays. One scheduler.step() a learning phase is all.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "micro_batches_of_eight",
        "            objective = self.compute_rlhf_objective(minibatch)\n"
        "            objective.backward()\n",
        "            micro_batches = torch.arange(len(minibatch.mask)).split(8)\n"
        "            objective = 0.0\n"
        "            for rows in micro_batches:\n"
        "                fields = vars(minibatch).items()\n"
        "                micro_batch = ReplayMinibatch(\n"
        "                    **{name: None if x is None else x[rows] for name, x in fields}\n"
        "                )\n"
        "                part = self.compute_rlhf_objective(micro_batch) / len(micro_batches)\n"
        "                part.backward()\n"
        "                objective = objective + part.detach()\n",
        "Means over eight rows are averaged, though their numbers of tokens differ. The mean is "
        "over the whole minibatch.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "whole_memory_in_each_step",
        "self.compute_rlhf_objective(minibatch)",
        "self.compute_rlhf_objective(memory)",
        "Each step is made on the whole memory: you pass `memory` where `minibatch` is meant.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "gradients_add_up",
        "            self.optimizer.zero_grad()\n",
        "",
        "Gradients add up from step to step: zero_grad is missing.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "not_clipped",
        "self.args.max_grad_norm, error",
        "float('inf'), error",
        "The gradient's norm is not clipped to max_grad_norm.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "never_steps",
        "            self.optimizer.step()\n",
        "",
        "The optimizer never steps.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "schedule_never_steps",
        "        self.scheduler.step()\n",
        "        pass\n",
        "The schedule never steps, so the learning rate stays at its first value.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "schedule_steps_each_minibatch",
        '            self.metrics["objective"]',
        '            self.scheduler.step()\n            self.metrics["objective"]',
        "The schedule steps with every minibatch, and once more in the end. It counts phases: the "
        "step after the loop is enough.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "downhill",
        "objective.backward()",
        "(-objective).backward()",
        "You negate the objective, and the optimizer maximises already: this goes downhill.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "first_minibatch_only",
        "memory.get_minibatches(self.generator):",
        "memory.get_minibatches(self.generator)[:1]:",
        "Only the first minibatch is learned from.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "one_step_for_all",
        "            self.optimizer.zero_grad()\n            objective = "
        "self.compute_rlhf_objective(minibatch)\n",
        "            objective = self.compute_rlhf_objective(minibatch) * 0.5\n",
        "The gradient is that of half the objective, and adds up from step to step.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "clipped_by_value",
        "nn.utils.clip_grad_norm_(\n                self.model.trainable_parameters(), "
        "self.args.max_grad_norm, error_if_nonfinite=True\n            )",
        "torch.tensor(nn.utils.clip_grad_value_(self.model.trainable_parameters(), "
        "self.args.max_grad_norm) or 0.0)",
        "Each entry is clipped on its own. Clip the norm of the whole gradient, which keeps its "
        "direction.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "each_part_clipped_alone",
        "            grad_norm = nn.utils.clip_grad_norm_(\n                self.model."
        "trainable_parameters(), self.args.max_grad_norm, error_if_nonfinite=True\n"
        "            )\n",
        "            for group in self.optimizer.param_groups:\n"
        "                grad_norm = nn.utils.clip_grad_norm_(\n"
        '                    group["params"], self.args.max_grad_norm\n'
        "                )\n",
        "Adapters and head are clipped apart. max_grad_norm bounds the norm of the whole gradient.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "small_gradients_scaled_up",
        "            self.optimizer.step()\n",
        "            for p in self.model.trainable_parameters():\n"
        "                p.grad *= max(1.0, self.args.max_grad_norm / float(grad_norm))\n"
        "            self.optimizer.step()\n",
        "Every gradient is scaled to the norm max_grad_norm, small ones too. Only a larger norm is "
        "brought down to it.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "divided_by_the_number_of_minibatches",
        "objective.backward()",
        "(objective / self.args.num_minibatches).backward()",
        "The objective is divided by the number of minibatches, as if their gradients were added "
        "up. Each minibatch has a step of its own.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "schedule_steps_with_the_optimizer",
        '.append(grad_norm.item())\n        self.metrics["lr"].append(self.scheduler.get_last_lr()'
        "[0])\n        self.scheduler.step()",
        '.append(grad_norm.item())\n            self.metrics["lr"].append(self.scheduler.'
        "get_last_lr()[0])\n            self.scheduler.step()",
        "The schedule steps once for each minibatch. It counts phases: call scheduler.step() once, "
        "after the loop.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "adaptive_kl_coef",
        "        self.scheduler.step()",
        "        self.scheduler.step()\n"
        '        error = (self.metrics["kl_exact"] or [6.0])[-1] / 6.0 - 1\n'
        "        self.args.kl_coef *= 1 + 0.1 * max(-0.2, min(error, 0.2))",
        "kl_coef is adapted to the KL after each phase, as in older libraries. Here it is a "
        "constant: leave the arguments as they are.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "skipped_without_advantages",
        "            self.optimizer.zero_grad()\n",
        "            if not minibatch.advantages.any():\n"
        "                continue\n"
        "            self.optimizer.zero_grad()\n",
        "Minibatches whose advantages are all 0 are skipped. The value loss, the entropy and the "
        "KL have gradients of their own: every minibatch has its step.",
    ),
    edit(
        "RLHFTrainer.learning_phase",
        "minibatches_weighed_by_their_tokens",
        "            objective.backward()\n",
        "            share = minibatch.mask.sum() * memory.num_minibatches / memory.mask.sum()\n"
        "            (objective * share).backward()\n",
        "A minibatch's gradient is scaled by its share of the tokens. Each minibatch has a step of "
        "its own, and its objective is a mean already.",
    ),
]

RATES_THAT_STAY = edit(
    "RLHFTrainer.learning_phase",
    "schedule_of_the_warmup_alone",
    "        self.scheduler.step()",
    "        if self.scheduler.last_epoch < self.args.warmup_steps:\n"
    "            self.scheduler.step()",
    "After the warm-up the schedule stands still. It falls from there on: a step of it each phase.",
)


# --- RLHFTrainer.train --------------------------------------------------------------------------

RLHF_TRAINER_TRAIN = [
    edit(
        "RLHFTrainer.train",
        "minibatches_around_the_phase",
        "                self._run_phase(log, bar)\n",
        "                for _ in range(args.num_minibatches):\n"
        "                    self._run_phase(log, bar)\n",
        "You run a phase for each minibatch. A phase is a whole rollout, which get_minibatches "
        "divides.",
    ),
    edit(
        "RLHFTrainer.train",
        "a_learning_phase_for_each_minibatch",
        "        self.learning_phase(self.rollout_phase())",
        "        memory = self.rollout_phase()\n"
        "        for _ in range(self.args.num_minibatches):\n"
        "            self.learning_phase(memory)",
        "learning_phase goes through all minibatches already: call it once for each rollout.",
        within="RLHFTrainer._run_phase",
    ),
    edit(
        "RLHFTrainer.train",
        "seeded_in_each_phase",
        "                self._run_phase(log, bar)\n",
        "                self.generator.manual_seed(args.seed)\n"
        "                self._run_phase(log, bar)\n",
        "Every phase draws the same prompts with the same random numbers. The generator is seeded "
        "once, when the trainer is made.",
    ),
    edit(
        "RLHFTrainer.train",
        "seeded_when_training_begins",
        "        args = self.args\n",
        "        args = self.args\n        self.generator.manual_seed(args.seed)\n",
        "train() seeds the generator: a run that goes on from a checkpoint repeats its first "
        "rollouts. It is seeded once, when the trainer is made.",
    ),
    edit(
        "RLHFTrainer.train",
        "epochs_around_the_phase",
        "                self._run_phase(log, bar)\n",
        "                for _ in range(args.batches_per_learning_phase):\n"
        "                    self._run_phase(log, bar)\n",
        "You run a phase for each epoch: with an odd total_phases that is one phase too many. "
        "get_minibatches has the epochs in it.",
    ),
    edit(
        "RLHFTrainer.train",
        "warmup_on_top",
        "while self.phase < args.total_phases:",
        "while self.phase < args.total_phases + args.warmup_steps:",
        "The phases of the warm-up come on top of total_phases. They are part of them.",
    ),
    edit(
        "RLHFTrainer.train",
        "failed_phases_left_out",
        "                self._run_phase(log, bar)\n",
        "                try:\n"
        "                    self._run_phase(log, bar)\n"
        "                except Exception as error:\n"
        '                    bar.write(f"phase {self.phase + 1} is left out: {error}")\n'
        "                    self.phase += 1\n"
        "                    continue\n",
        "A phase that fails is left out, whatever the error: a reward function that does not fit "
        "leaves a run that has learned nothing. Let errors out.",
    ),
    edit(
        "RLHFTrainer.train",
        "stopped_early",
        "                self._run_phase(log, bar)\n",
        "                self._run_phase(log, bar)\n"
        '                rewards = [row["reward"] for row in self.history]\n'
        "                if len(rewards) > 10 and max(rewards[-10:]) <= max(rewards[:-10]):\n"
        "                    break\n",
        "The run ends when ten phases bring no better reward. Run total_phases of them: the "
        "learning rates are planned for these.",
    ),
    edit(
        "RLHFTrainer.train",
        "best_weights_put_back",
        "        self.history.append(row)\n",
        '        if row["reward"] > max((r["reward"] for r in self.history), default=-math.inf):\n'
        "            self.best = self.model.trainable_state()\n"
        "            self.best = {name: x.clone() for name, x in self.best.items()}\n"
        "        if self.phase + 1 == self.args.total_phases:\n"
        "            self.model.load_trainable_state(self.best)\n"
        "        self.history.append(row)\n",
        "In the end the model goes back to the phase of the best reward, which is a noisy number. "
        "What train() leaves is the last phase's model.",
        within="RLHFTrainer._run_phase",
    ),
    edit(
        "RLHFTrainer.train",
        "one_phase_too_many",
        "while self.phase < args.total_phases",
        "while self.phase <= args.total_phases",
        "One phase too many is run. self.phase counts those that are done: stop when it has "
        "reached total_phases.",
    ),
    edit(
        "RLHFTrainer.train",
        "state_kept_with_checkpoints_only",
        """\
                state = self.get_state()
                if args.checkpoint_every and self.phase % args.checkpoint_every == 0:
                    save_checkpoint(checkpoint, state)
""",
        """\
                if args.checkpoint_every and self.phase % args.checkpoint_every == 0:
                    state = self.get_state()
                    save_checkpoint(checkpoint, state)
""",
        "A run that is stopped goes back to its last checkpoint, and the phases after it are lost. "
        "Keep the state of every phase; only the file is written now and then.",
    ),
    edit(
        "RLHFTrainer.train",
        "all_phases_once_more",
        "            while self.phase < args.total_phases:\n",
        "            for _ in range(args.total_phases):\n",
        "Each train() runs total_phases, those of an earlier part of the run as well. self.phase "
        "counts what is done: run the phases that are left.",
    ),
    edit(
        "RLHFTrainer.train",
        "schedule_steps_in_the_loop_as_well",
        "                self._run_phase(log, bar)\n",
        "                self._run_phase(log, bar)\n                self.scheduler.step()\n",
        "The schedule takes two steps a phase: learning_phase has made one already.",
    ),
]


# --- Made by a loop -----------------------------------------------------------------------------


def _product(terms, mask):
    return (terms * mask).sum() / mask.sum().clamp(min=1)


def _selected(terms, mask):
    return terms[mask].mean()


LATE = [
    (
        "masked_too_late",
        masked_mean,
        "The loss is right, but the mask comes after the squares: there the gradient is 0 times "
        "nan or inf. Replace values, old values and returns at masked positions first.",
    ),
    (
        "terms_times_the_mask",
        _product,
        "Multiplying by the mask leaves nan, because 0 * nan is nan. Replace what is masked out.",
    ),
    (
        "selected_too_late",
        _selected,
        "The true terms are selected too late: at masked positions the gradient is 0 times nan or "
        "inf. Mask the inputs first. And where no token is, the mean of none is nan, not 0.",
    ),
    (
        "zeros_counted",
        lambda terms, mask: torch.where(mask, terms, 0.0).mean(),
        "The zeros that stand for masked positions are counted: divide by the number of true ones. "
        "And mask the inputs, not the terms: their gradient is 0 times nan or inf.",
    ),
    (
        "products_counted",
        lambda terms, mask: (terms * mask).mean(),
        "You divide by the number of all positions, not of the true ones. And multiplying by the "
        "mask leaves nan, because 0 * nan is nan: replace what is masked out.",
    ),
    (
        "mask_ignored",
        lambda terms, mask: terms.mean(),
        "The mask has no effect: positions after the end are counted too.",
    ),
]


def _surrogate_averaged(name, average, sentence):
    def answer(logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None):
        high = clip_coef if clip_coef_high is None else clip_coef_high
        ratio, a = (logprobs - old_logprobs.detach()).exp(), advantages.detach()
        clipped = ratio.clamp(1 - clip_coef, 1 + high)
        return average(torch.minimum(ratio * a, clipped * a), mask)

    answer.__name__ = name
    return wrong("calc_clipped_surrogate_objective", sentence)(answer)


def _value_loss_averaged(name, average, sentence):
    def answer(values, old_values, returns, mask, vf_coef=0.5, clip_coef=None):
        old_values, returns = old_values.detach(), returns.detach()
        errors = (values - returns).square()
        if clip_coef is not None:
            clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
            errors = torch.maximum(errors, (clipped - returns).square())
        return vf_coef / 2 * average(errors, mask)

    answer.__name__ = name
    return wrong("calc_value_function_loss", sentence)(answer)


LATE_SURROGATES = [_surrogate_averaged(*late) for late in LATE[2:]]  # the first two are above
LATE_VALUE_LOSSES = [_value_loss_averaged(*late) for late in LATE]


def _raw(x, mask):
    return x


def _times(x, mask):
    return x * mask


def _ahead(x):
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def _behind(x):
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


def _gae(
    name,
    sentence,
    values=_filled,
    rewards=_filled,
    step=_raw,
    end=_times,
    following=_ahead,
    current=lambda values: values,
    loop=lambda n: reversed(range(n)),
    until=lambda mask: mask,
):
    """GAE with every place at which it can go wrong left open."""

    @torch.no_grad()
    def answer(values_of, token_rewards, mask, gamma=1.0, lam=0.95):
        v, r = values(values_of, mask), rewards(token_rewards, mask)
        deltas = r + gamma * following(v) - current(v)
        advantages, running = torch.zeros_like(v), torch.zeros_like(v[:, 0])
        for t in loop(v.shape[1]):
            running = step(deltas[:, t] + gamma * lam * running, until(mask)[:, t])
            advantages[:, t] = running
        return end(advantages, mask)

    answer.__name__ = name
    return wrong("compute_advantages", sentence)(answer)


MASKED_LATE_OR_BY_A_PRODUCT = [
    _gae(
        "mask_at_the_end_by_a_product",
        "The mask comes after the recursion, as a product: 0 * nan is nan, and the last true token "
        "takes the value behind it for the next one. Replace values and rewards by 0 where the "
        "mask is false, before the loop.",
        values=_raw,
        rewards=_raw,
    ),
    _gae(
        "mask_at_the_end",
        "What is masked out goes through the recursion, back into the true tokens: the mask comes "
        "too late. Replace values and rewards by 0 where it is false, before the loop.",
        values=_raw,
        rewards=_raw,
        end=_filled,
    ),
    _gae(
        "mask_in_the_loop_by_a_product",
        "In the loop the running advantage is multiplied by the mask: 0 * nan is nan, and V' of "
        "the last true token is the value behind it. Replace values and rewards by 0 where the "
        "mask is false, before the loop.",
        values=_raw,
        rewards=_raw,
        step=_times,
        end=_raw,
    ),
    _gae(
        "mask_in_the_loop",
        "In the loop the mask stops the running advantage, but not the next value: the last true "
        "token takes the one behind it for V'. Replace the values by 0 where the mask is false, "
        "before the loop.",
        values=_raw,
        rewards=_raw,
        step=_filled,
        end=_raw,
    ),
    _gae(
        "no_mask",
        "The mask has no effect: what lies behind the end goes into every advantage. Replace "
        "values and rewards by 0 where it is false, before the loop.",
        values=_raw,
        rewards=_raw,
        end=_raw,
    ),
    _gae(
        "products_with_the_mask",
        "Multiplying by the mask leaves nan, because 0 * nan is nan. Replace values and rewards "
        "where it is false, by masked_fill or torch.where, before the loop.",
        values=_times,
        rewards=_times,
    ),
    _gae(
        "products_with_the_mask_first",
        "Multiplying by the mask leaves nan, because 0 * nan is nan, and the loop carries it into "
        "the true tokens. It is masked_fill or torch.where that should come before the loop, not "
        "after it.",
        values=_times,
        rewards=_times,
        end=_filled,
    ),
    _gae(
        "values_by_a_product_rewards_at_the_end",
        "The values are multiplied by the mask, and the rewards by way of the advantages: both "
        "leave nan, because 0 * nan is nan. Replace both where the mask is false, before the loop.",
        values=_times,
        rewards=_raw,
    ),
    _gae(
        "values_by_a_product_rewards_not",
        "The values are multiplied by the mask, which leaves nan, because 0 * nan is nan, and the "
        "rewards are not masked before the loop. Replace both where the mask is false.",
        values=_times,
        rewards=_raw,
        end=_filled,
    ),
    _gae(
        "rewards_at_the_end_by_a_product",
        "The values are masked, but rewards behind the end go through the recursion into the true "
        "tokens, and 0 * nan is nan at the end. Replace the rewards as well, before the loop.",
        rewards=_raw,
    ),
    _gae(
        "rewards_at_the_end",
        "The values are masked, but rewards behind the end go through the recursion into the true "
        "tokens. Replace those by 0 as well, before the loop.",
        rewards=_raw,
        end=_filled,
    ),
    _gae(
        "values_at_the_end_by_a_product",
        "The rewards are masked, but values behind the end go through the recursion into the true "
        "tokens, and 0 * nan is nan at the end. Replace the values as well, before the loop.",
        values=_raw,
    ),
    _gae(
        "values_at_the_end",
        "The rewards are masked, but values behind the end go through the recursion into the true "
        "tokens. Replace those by 0 as well, before the loop.",
        values=_raw,
        end=_filled,
    ),
]
IN_THE_WRONG_PLACE = [
    _gae(
        "forwards_with_the_next_value",
        "delta is right, but the loop runs forwards, so that each advantage adds up the deltas "
        "before it. It depends on those that follow: go backwards in time.",
        loop=range,
    ),
    _gae(
        "forwards_and_mask_at_the_end",
        "Two things: the loop runs forwards, where an advantage depends on what follows, so go "
        "backwards; and the mask comes too late, so replace values and rewards before the loop.",
        values=_raw,
        rewards=_raw,
        end=_filled,
        loop=range,
    ),
    _gae(
        "forwards_and_mask_at_the_end_by_a_product",
        "Two things: the loop runs forwards, where an advantage depends on what follows, so go "
        "backwards; and 0 * nan is nan, so replace values and rewards before the loop instead of "
        "multiplying by the mask.",
        values=_raw,
        rewards=_raw,
        loop=range,
    ),
    _gae(
        "values_one_late",
        "The values are one position off: delta_t takes V_t for the next value and V_{t-1} for its "
        "own. It is r_t + gamma V_{t+1} - V_t.",
        following=lambda values: values,
        current=_behind,
    ),
    _gae(
        "values_one_late_around_the_end",
        "The values are one position off, and at t = 0 the index t - 1 is the last column. delta_t "
        "is r_t + gamma V_{t+1} - V_t.",
        following=lambda values: values,
        current=lambda values: values.roll(1, 1),
    ),
    _gae(
        "values_one_early",
        "The values are one position off: delta_t takes V_{t+1} for its own value and V_{t+2} for "
        "the next one. It is r_t + gamma V_{t+1} - V_t.",
        following=lambda values: _ahead(_ahead(values)),
        current=_ahead,
    ),
    _gae(
        "own_value_for_the_next",
        "delta_t takes V_t for the next value, too. The next one is V_{t+1}: r_t + gamma V_{t+1} - "
        "V_t.",
        following=lambda values: values,
    ),
    _gae(
        "value_before_for_the_next",
        "delta_t takes V_{t-1} for the next value. The next one is V_{t+1}: r_t + gamma V_{t+1} - "
        "V_t.",
        following=_behind,
    ),
    _gae(
        "next_value_for_its_own",
        "delta_t subtracts V_{t+1}, the value of the next state. Subtract that of its own: r_t + "
        "gamma V_{t+1} - V_t.",
        current=_ahead,
    ),
    _gae(
        "next_value_around_the_end",
        "After the last column the first one comes again, as roll does it. There the next value "
        "is 0.",
        following=lambda values: values.roll(-1, 1),
    ),
    _gae(
        "reward_of_the_next_token",
        "delta_t takes the reward of the next token, r_{t+1}. Its own is r_t: r_t + gamma V_{t+1} "
        "- V_t.",
        rewards=lambda rewards, mask: _ahead(_filled(rewards, mask)),
    ),
    _gae(
        "last_column_without_a_delta",
        "The last column gets no advantage, as when deltas are made of values[:, 1:] and "
        "values[:, :-1]. It has a delta, too, with 0 for the next value.",
        loop=lambda n: reversed(range(n - 1)),
    ),
    _gae(
        "last_true_token_without_a_delta",
        "The last true token gets advantage 0, because the loop uses the next token's mask. After "
        "it V' and A' are 0, but its own delta counts.",
        step=_times,
        until=_ahead,
    ),
]
MULTIPLIED = "Multiplying by the mask leaves nan, because 0 * nan is nan: use torch.where."
SENTENCE_BY_CONDITION = {
    "any_size": "A single true position has no std, and equal ones leave rounding noise: both "
    "should give zeros.",
    "two_or_more": "Equal advantages do not give exact zeros: ask whether max equals min.",
    "equal": "",
    "std_1e_8": "A std below 1e-8 does not tell equal advantages, as rounding may leave more: ask "
    "whether max equals min.",
    "std_1e_6": "A std below 1e-6 does not tell equal advantages, as rounding may leave more: ask "
    "whether max equals min.",
}


def _normalized(put, detached, condition):
    """The formula, with a way to put the mask in and one to tell equal advantages."""
    attached = ", and choosing at the end does not stop its nan" if put == "where" else ""
    faults = (
        MULTIPLIED if put == "times" else "",
        "" if detached else f"The advantages get a gradient{attached}: detach them.",
        SENTENCE_BY_CONDITION[condition],
    )

    def answer(advantages, mask, eps=1e-8):
        advantages = advantages.detach() if detached else advantages
        kept, least = advantages[mask], {"std_1e_8": 1e-8, "std_1e_6": 1e-6}.get(condition, 0.0)
        if condition != "any_size" and (
            kept.numel() < 2
            or kept.std() < least
            or (condition == "equal" and kept.max() == kept.min())
        ):
            return torch.zeros_like(advantages)
        if put == "index":
            normalized = torch.zeros_like(advantages)
            normalized[mask] = (kept - kept.mean()) / (kept.std() + eps)
            return normalized
        normalized = (advantages - kept.mean()) / (kept.std() + eps)
        return normalized * mask if put == "times" else torch.where(mask, normalized, 0.0)

    answer.__name__ = f"{put}_{'detached' if detached else 'attached'}_{condition}"
    return wrong("normalize_advantages", " ".join(filter(None, faults)))(answer)


RIGHT_OR_ABOVE = {
    ("index", True, "equal"),
    ("index", True, "two_or_more"),
    ("index", False, "equal"),
}
NORMALIZED_AT_ONCE = [
    _normalized(put, detached, condition)
    for put, detached in (
        ("index", True),
        ("index", False),
        ("where", False),
        ("times", True),
        ("times", False),
    )
    for condition in SENTENCE_BY_CONDITION
    if (put, detached, condition) not in RIGHT_OR_ABOVE
]
ROW_BY_ROW = "Each row is normalised on its own: mean and std run over all true positions."
BY_N = "And the std should divide by n - 1, not by n."


def _normalized_by_rows(
    name, sentence, detached=True, product=False, ddof=0, axis=-1, filled_first=False
):
    """Mean and std by sums over the mask, of each row or of everything, and no case for equals."""

    def answer(advantages, mask, eps=1e-8):
        advantages = advantages.detach() if detached else advantages
        advantages = _filled(advantages, mask) if filled_first else advantages
        n = mask.sum(axis, keepdim=True)
        mean = _filled(advantages, mask).sum(axis, keepdim=True) / n.clamp(min=1)
        squares = _filled((advantages - mean).square(), mask)
        std = (squares.sum(axis, keepdim=True) / (n - ddof).clamp(min=1)).sqrt()
        normalized = (advantages - mean) / (std + eps)
        return normalized * mask if product else _filled(normalized, mask)

    answer.__name__ = name
    return wrong("normalize_advantages", sentence)(answer)


NORMALIZED_BY_SUMS = [
    _normalized_by_rows("each_row_by_n", f"{ROW_BY_ROW} {BY_N}"),
    _normalized_by_rows(
        "each_row_by_n_attached",
        f"{ROW_BY_ROW} {BY_N} And the advantages get a gradient, nan at that: detach them.",
        detached=False,
    ),
    _normalized_by_rows(
        "each_row_by_n_filled_and_attached",
        f"{ROW_BY_ROW} {BY_N} And the advantages get a gradient: detach them.",
        detached=False,
        filled_first=True,
    ),
    _normalized_by_rows(
        "each_row_by_n_times_the_mask",
        f"{ROW_BY_ROW} {BY_N} And 0 * nan is nan: use masked_fill instead of a product.",
        product=True,
    ),
    _normalized_by_rows(
        "each_row", f"{ROW_BY_ROW} And equal advantages should give zeros.", ddof=1
    ),
    _normalized_by_rows(
        "each_row_attached",
        f"{ROW_BY_ROW} And the advantages get a gradient, nan at that: detach them.",
        detached=False,
        ddof=1,
    ),
    _normalized_by_rows(
        "each_row_filled_and_attached",
        f"{ROW_BY_ROW} And the advantages get a gradient: detach them.",
        detached=False,
        ddof=1,
        filled_first=True,
    ),
    _normalized_by_rows(
        "each_row_times_the_mask",
        f"{ROW_BY_ROW} And 0 * nan is nan: use masked_fill instead of a product.",
        product=True,
        ddof=1,
    ),
    _normalized_by_rows(
        "all_by_n",
        "Your std divides by n, as a masked mean of squares does, and not by n - 1. And equal "
        "advantages do not give exact zeros: ask whether max equals min.",
        axis=(0, 1),
    ),
    _normalized_by_rows(
        "all_by_n_attached",
        "Your std divides by n, as a masked mean of squares does, and not by n - 1. And the "
        "advantages get a gradient: detach them.",
        detached=False,
        axis=(0, 1),
    ),
    _normalized_by_rows(
        "all_by_n_times_the_mask",
        "Your std divides by n, as a masked mean of squares does, and not by n - 1. And 0 * "
        "nan is nan: use masked_fill instead of a product.",
        product=True,
        axis=(0, 1),
    ),
]


def _reward_threshold(name, least, sentence, one_too=True):
    def answer(rewards, eps=1e-5):
        rewards = rewards.detach()
        bound = eps if least is None else least
        if (one_too and len(rewards) < 2) or rewards.std() < bound:
            return torch.zeros_like(rewards)
        return (rewards - rewards.mean()) / (rewards.std() + eps)

    answer.__name__ = name if one_too else f"{name}_and_one_is_nan"
    of_one = "" if one_too else " And a single reward has no std: return zeros there, too."
    return wrong("normalize_reward", f"{sentence}{of_one}")(answer)


ROUNDING = (
    "A std below {} does not tell equal rewards, as rounding may leave more: ask whether max "
    "equals min."
)
TOO_LARGE = (
    "A std below {} is taken for 0. Rewards may be that small: only equal ones give zeros, and eps "
    "keeps the others from being blown up."
)
REWARD_THRESHOLDS = [
    _reward_threshold(f"std_below_{name}_counts_as_none", least, sentence, one_too)
    for name, least, sentence in (
        ("1e_8", 1e-8, ROUNDING.format("1e-8")),
        ("1e_7", 1e-7, ROUNDING.format("1e-7")),
        ("1e_6", 1e-6, TOO_LARGE.format("1e-6")),
        ("1e_5", 1e-5, TOO_LARGE.format("1e-5")),
        ("1e_4", 1e-4, TOO_LARGE.format("1e-4")),
        (
            "eps",
            None,
            "A std below eps is taken for 0. eps is added to it, whatever its size: only equal "
            "rewards give zeros.",
        ),
    )
    for one_too in (True, False)
    if (name, one_too) != ("1e_6", True)  # small_spread_is_taken_for_none
]


def _paid(name, sentence, pay, charge=_filled, attached=False):
    """Token rewards whose scores are put in their place by `pay(rewards, scores, lengths)`."""

    def answer(scores, mask, logprobs=None, ref_logprobs=None, kl_coef=0.0):
        rewards = torch.zeros(mask.shape, dtype=scores.dtype)
        pay(rewards, scores.detach(), mask)
        if kl_coef == 0:
            return rewards
        k1 = logprobs - ref_logprobs
        return rewards - kl_coef * charge(k1 if attached else k1.detach(), mask)

    answer.__name__ = name
    return wrong("compute_token_rewards", sentence)(answer)


def _pay_by_length(less, at_most=None):
    def pay(rewards, scores, mask):
        at = mask.sum(-1) - less
        rewards[range(len(mask)), at if at_most is None else at.clamp(max=at_most(mask))] += scores

    return pay


def _pay_by_scatter(less):
    def pay(rewards, scores, mask):
        rewards.scatter_(1, mask.sum(-1, keepdim=True) - less, scores[:, None])

    return pay


def _pay_behind(rewards, scores, mask):
    behind = torch.arange(mask.shape[1]) == mask.sum(-1, keepdim=True)
    rewards += torch.where(behind, scores[:, None], 0.0)


def _pay_at_argmax(rewards, scores, mask):
    rewards[range(len(mask)), mask.int().argmax(-1)] += scores


PAID_AT_AN_INDEX = [
    _paid(
        "at_the_length",
        "mask.sum(-1) is the number of true positions, one more than the index of the last: in a "
        "full row it is outside. Take 1 off, and leave out rows without true positions.",
        _pay_by_length(0),
    ),
    _paid(
        "at_the_length_or_the_last_column",
        "mask.sum(-1) is the number of true positions, one more than the index of the last. "
        "Clamped to the last column it is right for full rows only: take 1 off, and leave out "
        "empty rows.",
        _pay_by_length(0, lambda mask: mask.shape[1] - 1),
    ),
    _paid(
        "scattered_to_the_length",
        "scatter_ is given mask.sum(-1), the number of true positions, which is one more than the "
        "index of the last. Take 1 off, and leave out rows without true positions.",
        _pay_by_scatter(0),
    ),
    _paid(
        "scattered_to_minus_one",
        "For a row without true positions, length - 1 is -1, which scatter_ does not take. Such a "
        "row gets nothing: leave it out.",
        _pay_by_scatter(1),
    ),
    _paid(
        "where_the_length_is_reached",
        "The column that equals mask.sum(-1) is the one behind the last true position. The last "
        "has the index mask.sum(-1) - 1.",
        _pay_behind,
    ),
    _paid(
        "at_the_argmax_of_the_mask",
        "argmax of the mask is its first true position, and 0 in a row without any. The score "
        "belongs on the last one, and such a row gets nothing.",
        _pay_at_argmax,
    ),
    _paid(
        "wraps_around_and_kl_times_the_mask",
        "Two things: for a row without true positions, length - 1 is -1, the last column, though "
        "it gets nothing; and 0 * nan is nan, so replace the KL where the mask is false instead of "
        "multiplying.",
        _pay_by_length(1),
        charge=_times,
    ),
    _paid(
        "wraps_around_and_attached",
        "Two things: for a row without true positions, length - 1 is -1, the last column, though "
        "it gets nothing; and a gradient flows through the KL, which is a number here: detach it.",
        _pay_by_length(1),
        attached=True,
    ),
    _paid(
        "wraps_around_and_kl_times_the_mask_attached",
        "For a row without true positions, length - 1 is -1, the last column, though it gets "
        "nothing. And the KL is multiplied by the mask, where 0 * nan is nan, and not detached: "
        "replace it, and detach it.",
        _pay_by_length(1),
        charge=_times,
        attached=True,
    ),
    _paid(
        "kl_times_the_mask_attached",
        "Two things: 0 * nan is nan, so replace the KL where the mask is false instead of "
        "multiplying; and a gradient flows through it, where it is a number: detach it.",
        lambda rewards, scores, mask: rewards.add_(
            torch.where(mask & ~_ahead(mask), scores[:, None], 0.0)
        ),
        charge=_times,
        attached=True,
    ),
]
LATE_AND = {
    masked_mean: "and the mask comes after the products, where the gradient is 0 times nan or "
    "inf: replace what is masked out first.",
    _product: "and multiplying by the mask leaves nan, because 0 * nan is nan: replace what is "
    "masked out first.",
    _selected: "and the true terms are selected after the products, where the gradient is 0 "
    "times nan or inf, and a mean of none is nan: mask first, and divide by 1 at least.",
}
HIGH_OF_ZERO = "`clip_coef_high or clip_coef` takes a clip of 0 for none, so compare with None;"
NAMES_OF_LATE = {
    masked_mean: "masked_too_late",
    _product: "product",
    _selected: "selected",
}


def _surrogate_attached(attached, average, is_or=False):
    """The formula with what is attached not detached, and masked by `average`."""
    what = " and ".join(attached)
    faults = [
        f"the {what} get a gradient, so detach them;" if attached else "",
        HIGH_OF_ZERO if is_or else "",
        LATE_AND[average],
    ]

    def answer(logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None):
        high = clip_coef if clip_coef_high is None else clip_coef_high
        if is_or:
            high = clip_coef_high or clip_coef
        old = old_logprobs if "old log-probs" in attached else old_logprobs.detach()
        a = advantages if "advantages" in attached else advantages.detach()
        ratio = (logprobs - old).exp()
        terms = torch.minimum(ratio * a, ratio.clamp(1 - clip_coef, 1 + high) * a)
        return average(terms, mask)

    words = filter(None, [NAMES_OF_LATE[average], *attached, "or" if is_or else ""])
    answer.__name__ = "_".join(words).replace(" ", "_").replace("-", "_")
    sentence = f"More than one mistake: {' '.join(filter(None, faults))}"
    return wrong("calc_clipped_surrogate_objective", sentence)(answer)


OF_A_ROLLOUT = (("old log-probs",), ("advantages",), ("old log-probs", "advantages"))
SURROGATES_OF_TWO_MISTAKES = [
    *(_surrogate_attached(names, average) for names in OF_A_ROLLOUT for average in LATE_AND),
    *(_surrogate_attached(names, masked_mean, is_or=True) for names in ((), *OF_A_ROLLOUT)),
]


def _value_loss_attached(attached, average):
    what = " and ".join(attached)

    def answer(values, old_values, returns, mask, vf_coef=0.5, clip_coef=None):
        old = old_values if "old values" in attached else old_values.detach()
        target = returns if "returns" in attached else returns.detach()
        errors = (values - target).square()
        if clip_coef is not None:
            clipped = old + (values - old).clamp(-clip_coef, clip_coef)
            errors = torch.maximum(errors, (clipped - target).square())
        return vf_coef / 2 * average(errors, mask)

    answer.__name__ = f"{NAMES_OF_LATE[average]}_{what.replace(' ', '_')}"
    late = LATE_AND[average].replace("products", "squares")
    sentence = f"More than one mistake: the {what} get a gradient, so detach them; {late}"
    return wrong("calc_value_function_loss", sentence)(answer)


VALUE_LOSSES_OF_TWO_MISTAKES = [
    _value_loss_attached(names, average)
    for names in (("old values",), ("returns",), ("old values", "returns"))
    for average in LATE_AND
]


def _kl_penalty(name, average, attached, sentence):
    def answer(logits, ref_logits, mask, kl_coef):
        logprobs = logits.log_softmax(-1)
        ref_logprobs = (ref_logits if attached else ref_logits.detach()).log_softmax(-1)
        kl = (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)
        return kl_coef * average(kl, mask)

    answer.__name__ = name
    return wrong("calc_kl_penalty", sentence)(answer)


KL_MASKED_TOO_LATE = {
    masked_mean: "and nan beyond the mask reaches the gradient, since masking the KL comes too "
    "late: mask the logits before the softmax.",
    _product: "and multiplying by the mask leaves nan, because 0 * nan is nan: mask the logits "
    "before the softmax.",
    _selected: "and the KL of the true positions is selected too late, so that nan reaches the "
    "gradient, and a mean of none is nan: select logits, and divide by 1 at least.",
}
KL_PENALTIES_OF_TWO_MISTAKES = [
    _kl_penalty(
        f"{NAMES_OF_LATE[average]}_reference_attached",
        average,
        True,
        f"More than one mistake: the reference's logits get a gradient, so detach them; {late}",
    )
    for average, late in KL_MASKED_TOO_LATE.items()
] + [
    _kl_penalty(
        "selected_too_late",
        _selected,
        False,
        "The KL of the true positions is selected too late, so that nan beyond the mask reaches "
        "the gradient. Select logits before the softmax. And where no token is, the mean of none "
        "is nan, not 0.",
    ),
]


@wrong(
    "compute_token_rewards",
    "The score goes into the last column and is masked out where a row ends sooner. Put it on the "
    "row's last true position.",
)
def in_the_last_column_before_the_mask(scores, mask, logprobs=None, ref_logprobs=None, kl_coef=0.0):
    rewards = torch.zeros(mask.shape, dtype=scores.dtype)
    rewards[:, -1] = scores
    if kl_coef:
        rewards = rewards - kl_coef * (logprobs - ref_logprobs).detach()
    return rewards.masked_fill(~mask, 0.0)


@wrong(
    "normalize_reward",
    "Equal rewards need not have a std of exactly 0, as their mean is rounded: ask whether max "
    "equals min.",
)
def std_of_exactly_0(rewards, eps=1e-5):
    if rewards.numel() < 2 or rewards.std() == 0:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + eps)


@wrong(
    "normalize_advantages",
    "max() of no advantage is an error: where no position is true, all are zeros. Ask for the "
    "number of true positions first.",
)
def max_of_none(advantages, mask, eps=1e-8):
    kept = advantages[mask]
    if kept.max() == kept.min():
        return torch.zeros_like(advantages)
    return ((advantages - kept.mean()) / (kept.std() + eps)).masked_fill(~mask, 0.0).detach()


@wrong(
    "calc_clipped_surrogate_objective",
    "This is the smaller of the two ratios, times the advantage. Take the smaller of the two "
    "products: with a negative advantage that is the larger ratio.",
)
def smaller_of_the_ratios(
    logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None
):
    ratio = (logprobs - old_logprobs.detach()).masked_fill(~mask, 0.0).exp()
    high = clip_coef if clip_coef_high is None else clip_coef_high
    smaller = torch.min(ratio, ratio.clamp(1 - clip_coef, 1 + high))
    return masked_mean(smaller * advantages.detach().masked_fill(~mask, 0.0), mask)


def _mean_of_row_means(x, mask):
    return (_filled(x, mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


@wrong(
    "calc_entropy_bonus",
    "A mean over each row, and then over rows, gives the tokens of short rows more weight. Take "
    "one mean over all tokens.",
)
def mean_of_row_means_filled_first(logits, mask, ent_coef):
    entropy = calc_entropy(logits.masked_fill(~mask[..., None], 0.0))
    return ent_coef * _mean_of_row_means(entropy, mask)


@wrong(
    "calc_entropy_bonus",
    "Categorical cannot take an empty batch: where no position is true, the bonus is 0.",
)
def categorical_of_none(logits, mask, ent_coef):
    policy = torch.distributions.Categorical(logits=logits[mask])
    return ent_coef * policy.entropy().sum() / mask.sum().clamp(min=1)


@wrong(
    "calc_kl_penalty",
    'This averages over the vocabulary too, as F.kl_div with "mean" does. Sum over it, then take '
    "the mean over tokens; and a mean of none is nan, not 0.",
)
def mean_over_the_vocabulary_and_of_none(logits, ref_logits, mask, kl_coef):
    logprobs, ref_logprobs = (x[mask].log_softmax(-1) for x in (logits, ref_logits.detach()))
    return kl_coef * F.kl_div(ref_logprobs, logprobs, reduction="mean", log_target=True)


@wrong(
    "calc_kl_penalty",
    "Categorical cannot take an empty batch: where no position is true, the penalty is 0.",
)
def categoricals_of_none(logits, ref_logits, mask, kl_coef):
    policy, reference = (
        torch.distributions.Categorical(logits=x[mask]) for x in (logits, ref_logits.detach())
    )
    kl = torch.distributions.kl_divergence(policy, reference)
    return kl_coef * kl.sum() / mask.sum().clamp(min=1)


@wrong(
    "TransformerWithValueHeadLora.forward_with_value_head",
    "The base runs without the adapters' hooks, so that logits and values are those of the "
    "pretrained model. `_run` adds them to yours.",
)
def without_the_adapters(self, input_ids, attention_mask=None):
    hidden = []
    logits = self.base.run_with_hooks(
        input_ids,
        attention_mask=attention_mask,
        fwd_hooks=[("ln_final.hook_out", lambda x, hook: hidden.append(x))],
    )
    return logits, self.value_head(hidden[0].to(self.value_head.weight.dtype))[..., 0]


LOG_OF_SOFTMAX = (
    "log(softmax) is -inf where a probability is rounded to 0, and 0 * inf is nan: use log_softmax"
)


def _kept_mean(x, mask):
    return x.mean()


def _sum_by_at_least_1(x, mask):
    return x.sum() / mask.sum().clamp(min=1)


# How the mean is taken, whether of the true positions alone, and what else is wrong with it.
BY_SOFTMAX = {
    "selected": (_sum_by_at_least_1, True, "."),
    "selected_and_mean": (_kept_mean, True, ". And a mean of none is nan, not 0."),
    "all": (masked_mean, False, ". And mask the logits before it: nan reaches the gradient."),
}


def _by_softmax(exercise, name, average, is_selected, rest):
    """The entropy, or the KL, with the logarithm of a softmax."""

    def calc_entropy_of(logits, mask, ent_coef):
        p = (logits[mask] if is_selected else logits).softmax(-1)
        return ent_coef * average(-(p * p.log()).sum(-1), mask)

    def calc_kl(logits, ref_logits, mask, kl_coef):
        logits = (logits[mask], ref_logits[mask]) if is_selected else (logits, ref_logits)
        p, q = (x.softmax(-1) for x in logits)
        return kl_coef * average((p * (p.log() - q.detach().log())).sum(-1), mask)

    answer = calc_entropy_of if exercise == "calc_entropy_bonus" else calc_kl
    answer.__name__ = f"log_of_softmax_{name}"
    return wrong(exercise, f"{LOG_OF_SOFTMAX}{rest}")(answer)


LOGS_OF_SOFTMAX = [
    _by_softmax(exercise, name, *how)
    for exercise in ("calc_entropy_bonus", "calc_kl_penalty")
    for name, how in BY_SOFTMAX.items()
]


def _two(exercise, name, sentence, *pairs):
    """Two mistakes at once."""
    edits = tuple(Edit(exercise, *pair) for pair in pairs)
    return Answer(IN_ITS_MODULE, exercise, name, f"Two things: {sentence}", edits=edits)


TWO_AT_ONCE = [
    _two(
        "get_optimizer_and_scheduler",
        "defaults_of_adamw",
        "Adam's eps should be 1e-5, not the default 1e-8; and weight_decay 0, where AdamW's "
        "default is 0.01.",
        ("eps=1e-5, weight_decay=0.0, ", ""),
    ),
    _two(
        "make_replay_memory",
        "default_gamma_and_always_normalised",
        "args.gamma and args.lam are not given to compute_advantages; and the scores are "
        "normalised whatever args.normalize_reward says.",
        (", args.gamma, args.lam)", ")"),
        (
            "normalize_reward(scores) if args.normalize_reward else scores",
            "normalize_reward(scores)",
        ),
    ),
    _two(
        "make_replay_memory",
        "returns_of_whitened_advantages_and_kl_charged_twice",
        'returns are advantages + values before whitening; and with kl_in "loss" no KL belongs in '
        "the rewards, as the objective charges it.",
        ('args.kl_coef if args.kl_in == "reward" else 0.0', "args.kl_coef"),
        (
            "    return ReplayMemory(",
            "    advantages = normalize_advantages(advantages, mask)\n    return ReplayMemory(",
        ),
    ),
    _two(
        "RLHFTrainer.compute_rlhf_objective",
        "temperature_1_and_kl_charged_twice",
        "the log-probs are taken at temperature 1, the old ones at args.temperature; and with "
        'kl_in "reward" the KL is in the rewards already.',
        ("prompt_len, args.temperature)", "prompt_len)"),
        ('args.kl_in == "loss" and args.kl_coef > 0', "args.kl_coef > 0"),
    ),
    _two(
        "RLHFTrainer.learning_phase",
        "adds_up_and_schedules_each_step",
        "gradients add up, since zero_grad is missing; and the schedule takes a step for each "
        "minibatch, where it is one a phase.",
        ("            self.optimizer.zero_grad()\n", ""),
        (
            "            self.optimizer.step()\n",
            "            self.optimizer.step()\n            self.scheduler.step()\n",
        ),
        (".get_last_lr()[0])\n        self.scheduler.step()", ".get_last_lr()[0])"),
    ),
]
