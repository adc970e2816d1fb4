"""Checks of chapter 5: verifiable rewards, and what was changed in GRPO."""

import functools
import itertools
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from solutions.ch0_sampling import Samples
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import ReplayMemory
from tests.oracles.ch5_rlvr import (
    aggregate_by_loops,
    answer_by_characters,
    combine_by_loops,
    correct_by_characters,
    drop_by_loops,
    format_by_characters,
    geometric_mean_of_ratios,
    informative_by_sets,
    leave_one_out_by_loops,
    pass_by_enumeration,
    pass_one_by_one,
    penalize_by_loops,
    rlvr_by_cases,
)
from tests.support import models, trainers
from tests.support.inputs import (
    NAN,
    constant_groups_are_zeros,
    error_of,
    grouped_rewards,
    leaf,
    masks_of_many_shapes,
    one_zero,
    poison,
    ragged_logprobs,
    ragged_mask,
    value_and_gradients,
    with_inputs_after,
)
from tests.support.trainers import beyond, inside, make_model, make_samples
from utils.grading.checks import check
from utils.models.corpus import worked_answer


def after_a_change(function, given: Tensor, *args) -> Tensor:
    """Return the first argument once the result was overwritten, which a view would share."""
    given = given.clone()
    function(given, *args).fill_(1)
    return given


def error_of_group_sizes(function, rewards: Tensor) -> dict:
    """Return how group sizes for six rewards are answered, four of them and then two."""
    bad = {n: error_of("group_size", function, rewards, n) for n in (4, 5, 12, 1, 0, -3)}
    found = {f"group_size {n} for 6 rewards": error for n, error in bad.items()}
    return found | {f"{n}": function(rewards, n) for n in (2, 6)}


# --- extract_answer -----------------------------------------------------------------------------


def work_out(rng, slip: int = 0) -> tuple[str, int]:
    """A worked completion, and its answer, which is off by `slip`."""
    a, b = rng.integer(10, 100), rng.integer(10, 100)
    answer = a + b + slip
    return worked_answer(a, b, a % 10 + b % 10, a // 10 + b // 10, answer), answer


def draw_number(rng) -> int:
    """Of one to five digits."""
    return rng.integer(0, 10 ** rng.integer(1, 6))


@check(
    "extract_answer",
    public=True,
    expected=["42", "-7", "121", None, None, "12"],
)
def worked_texts(student, rng):
    """A direct, a negative, a worked answer; a full stop; words that follow; two answers"""
    worked = "ones 5+6=11 tens 6+4=10 sum 100+11=111\nA: 121"
    texts = ["A: 42", "A: -7", worked, "A: 12.", "A: 12 and more", "A: 11\nA: 12"]
    return [student.extract_answer(text) for text in texts]


@check("extract_answer", public=True, points=2, seeds=2, expected=answer_by_characters)
def completions_of_the_corpus(student, rng):
    """Direct and worked answers of one to five digits, negative ones, and ones cut off"""
    texts = [f"A: {draw_number(rng)}" for _ in range(4)]
    texts += [f"A: -{draw_number(rng)}" for _ in range(4)]
    texts += [work_out(rng, slip)[0] for slip in (0, -10, 1)]
    text, _ = work_out(rng)
    texts += [text[:-n] for n in range(1, len(text), 5)]
    return [student.extract_answer(text) for text in texts]


@check("extract_answer", points=4, expected=answer_by_characters)
def only_the_very_end_counts(student, rng):
    """Nothing may follow the integer, not even a newline; of several answers the last counts"""
    x, y, z = (f"A: {draw_number(rng)}" for _ in range(3))
    ends = [".", " ", "\n", "\n\n", " \n", "\t", " and more", ".0", ",000", "%", "A: ", "\nA: x"]
    ends += ["A", "\nones", "-", " 5", "\r", "\x1c", "e3", "\nQ: 1+1", ""]
    joined = [f"{x} {y}", f"{x}\n{y}", f"{x}{y}", f"{x} {y}\n{z}", f"{x}\nA: -{draw_number(rng)}"]
    joined += [f"{x}\nA: none", f"{x}\nA:", f"{x}\n{y}\n", f"{x} or {draw_number(rng)}"]
    return [student.extract_answer(text) for text in [*(z + end for end in ends), *joined]]


@check("extract_answer", points=2, expected=answer_by_characters, tier="hardening")
def spellings(student, rng):
    """Anything that isn't written `A: <integer>`: other cases, blanks, signs and digits"""
    n = draw_number(rng)
    none = ["a: {}", "A:{}", "A:  {}", "A: +{}", "A: - {}", "A: --{}", "{}", "B: {}", "A : {}"]
    none += ["A:\n{}", "A:\t{}", "A: {}²", "A: ٣{}", "A: 0x{}", "A: 1_{}", "A: -", "A: ", "A:", ""]
    none += ["A: {0},{0}", "A: {0}.{0}", "A: {0}-{0}", "Q: {}", "answer {}", "A: (-{})", "A: ${}"]
    right = ["A: 007{}", "QA: {}", "A: 1{0}{0}{0}{0}{0}", "A: x\n\nA: {}", "A: A: {}", "A: -0{}"]
    return {f"{text!r}": student.extract_answer(text.format(n)) for text in none + right}


# --- reward_fn_correct --------------------------------------------------------------------------


@check("reward_fn_correct", public=True, expected=[1.0, 0.0, 1.0, 0.0, 0.0])
def worked_corrections(student, rng):
    """12 for 12, 13 for 12, the last of two, one that goes on, none"""
    samples = ["A: 12", "A: 13", "A: 13\nA: 12", "A: 12.", "twelve"]
    return student.reward_fn_correct(samples, ["12"] * 5)


@check("reward_fn_correct", public=True, points=2, seeds=2, expected=correct_by_characters)
def each_its_own_answer(student, rng):
    """Direct and worked completions, some right, some alike, each compared with its answer"""
    pairs = [work_out(rng) for _ in range(8)]
    texts = [text if i % 2 else f"A: {answer}" for i, (text, answer) in enumerate(pairs)]
    slips = rng.tensor([0, 0, 0, 0, 1, -1, 10, -10])[rng.permutation(8)].long().tolist()
    answers = [str(answer + slip) for (_, answer), slip in zip(pairs, slips, strict=True)]
    n = draw_number(rng)
    texts, answers = [*texts, "", "A: none"], [*answers, "7", "8"]
    texts, answers = [*texts, *[f"A: {n}"] * 3], [*answers, str(n), str(n + 1), str(n)]
    found = {"the rewards": student.reward_fn_correct(samples=texts, answers=answers)}
    found["of one"] = student.reward_fn_correct(texts[3:4], answers[3:4])
    return found | {"the texts afterwards": texts, "the answers afterwards": answers}


@check("reward_fn_correct", public=True, points=2, seeds=2, expected=correct_by_characters)
def answers_that_look_alike(student, rng):
    """One digit too many or too few, a wrong sign, the answer elsewhere, or more text after it"""
    n = rng.integer(10, 1000)
    texts = [f"A: 1{n}", f"A: {n}1", f"A: -{n}", f"A: {n // 10}", f"A: {n} ", f"A: {n}\n", f"A:{n}"]
    texts += [f"sum {n}\nA: 1", f"A: {n}\nA: 1", f"A: 1\nA: {n}", f"{n}", f"A: {n}.", f"A: {n}0"]
    texts += [f"A: {n}", f"x\nA: -{n}", f"A: {n}A: {n}"]
    texts = [texts[i] for i in rng.permutation(len(texts)).tolist()]
    return {
        "for n": student.reward_fn_correct(texts, [str(n)] * len(texts)),
        "for -n": student.reward_fn_correct(texts, [f"-{n}"] * len(texts)),
        "no answer for none": student.reward_fn_correct(["A: x", "A: None", ""], ["x", "None", ""]),
    }


@check("reward_fn_correct", tier="hardening")
def numbers_of_answers(student, rng):
    """Fewer answers than samples, or more: a ValueError names them"""
    f, texts = student.reward_fn_correct, [f"A: {n}" for n in rng.integers(0, 2, 16).tolist()]
    bad = {f"{n} answers": error_of("answers", f, texts, ["1"] * n) for n in (0, 1, 15, 17)}
    return bad | {"16 answers": f(texts, ["1"] * 16)}


@check("reward_fn_correct", tier="hardening")
def answers_as_integers(student, rng):
    """Answers that are integers; no samples at all"""
    f, pairs = student.reward_fn_correct, [work_out(rng) for _ in range(16)]
    integers = [answer + rng.integer(0, 2) for _, answer in pairs]
    return {"integers": f([text for text, _ in pairs], integers), "none": f([], [])}


# --- reward_fn_format ---------------------------------------------------------------------------


@check("reward_fn_format", public=True, expected=[1.0, 0.0, 0.0, 1.0])
def worked_formats(student, rng):
    """Worked with an answer; direct; worked but cut off; worked with a wrong answer"""
    steps = "ones 5+6=11 tens 6+4=10 sum 100+11=111\n"
    return student.reward_fn_format([f"{steps}A: 111", "A: 111", f"{steps}A:", f"{steps}A: 5"])


@check("reward_fn_format", public=True, points=2, seeds=2, expected=format_by_characters)
def formats_of_completions(student, rng):
    """Worked and direct, right and wrong, cut off anywhere, or going on after the answer"""
    texts = [work_out(rng, slip)[0] for slip in (0, 0, 1, -10)]
    texts += [f"A: {draw_number(rng)}" for _ in range(3)]
    texts += [text[: rng.integer(5, len(text) - 3)] for text in texts[:4]]
    texts += [f"{texts[0]}{end}" for end in (".", " ", "\n", "\nA: ", "\nA: 3", "7")]
    texts += ["", f"{texts[1]}\n{texts[2]}", f"A: 3\n{texts[1]}", f"A: {texts[2]}"]
    texts = [texts[i] for i in rng.permutation(len(texts)).tolist()]
    found = {"the rewards": student.reward_fn_format(texts)}
    return found | {"one text": student.reward_fn_format(texts[:1]), "texts afterwards": texts}


@check("reward_fn_format", public=True, points=2, expected=format_by_characters)
def steps_that_are_missing(student, rng):
    """Steps left out or in another order, wrong sums, more text than the steps"""
    text, answer = work_out(rng)
    steps = text.split("\n")[0]
    parts = [f"{word} {steps.split(f'{word} ')[1].split()[0]}" for word in ("ones", "tens", "sum")]
    lines = [" ".join(p) for n in (1, 2, 3) for p in itertools.permutations(parts, n)]
    lines += [f"ones {draw_number(rng)} tens {draw_number(rng)} sum {draw_number(rng)}"]
    lines += [f"Let me see.\n{steps}\nSo it is"]
    texts = [f"{line}\nA: {answer}" for line in lines]
    texts += [f"{steps}\nA: {sign}" for sign in ("0", "-5", "-0")]
    texts += [f"A: {draw_number(rng)}" for _ in range(7)]
    texts = [texts[i] for i in rng.permutation(len(texts)).tolist()]
    return {"rewards": student.reward_fn_format(texts), "no texts": student.reward_fn_format([])}


# --- combine_rewards ----------------------------------------------------------------------------


@check("combine_rewards", public=True, expected=[2.0, 0.5, 2.5])
def worked_weights(student, rng):
    """Rewards 1, 0, 1 and 0, 1, 1 with weights 2 and 0.5"""
    return student.combine_rewards(rng.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]), [2.0, 0.5])


@check("combine_rewards", points=2, seeds=2, expected=combine_by_loops)
def rewards_of_many_functions(student, rng):
    """Any number of functions and completions, also the same number; weights of either sign"""
    found = {}
    for functions, batch in ((3, 5), (4, 4), (1, 3), (2, 1), (5, 2)):
        rewards, weights = rng.normal(functions, batch, mean=1), rng.normal(functions, std=2)
        found[f"{functions} functions, {batch} completions"] = student.combine_rewards(
            rewards, weights.tolist()
        )
    return found


@check("combine_rewards", points=2, tier="hardening")
def weights_of_every_kind(student, rng):
    """Weights of 0, negative, large, integers"""
    rewards, f = rng.normal(3, 4, mean=2), student.combine_rewards
    weights = {
        "zeros": [0.0, 0.0, 0.0],
        "opposites": [1.0, -1.0, 0.0],
        "one of them": [0.0, 1.0, 0.0],
        "integers": [3, 2, 1],
        "large": [1e4, -5.0, 1e-4],
        "negative": [-1.0, -0.5, -0.25],
    }
    return {name: f(rewards, w) for name, w in weights.items()}


@check("combine_rewards", tier="hardening")
def weights_that_do_not_fit(student, rng):
    """Not one weight for each function: a ValueError names them"""
    rewards, f = rng.normal(3, 4, mean=2), student.combine_rewards
    bad = {n: error_of("weights", f, rewards, rng.normal(n).tolist()) for n in (0, 1, 2, 4)}
    return {f"{n} weights": e for n, e in bad.items()} | {"3": f(rewards, rng.normal(3).tolist())}


@check("combine_rewards", public=True, expected=combine_by_loops, tier="hardening")
def rewards_afterwards(student, rng):
    """The result carries no gradient and is new; rewards and weights stay as they were"""
    f, found = student.combine_rewards, {}
    for weights in ([1.0], [1.0, *rng.normal(2).tolist()]):
        n, rewards, scale = len(weights), rng.normal(len(weights), 4), rng.normal(4)
        found[f"{n}: gradient"] = value_and_gradients(
            lambda rewards: f(rewards, weights) * scale,  # noqa: B023
            rewards=rewards,
        )
        found[f"{n}: the rewards after the result is changed"] = after_a_change(f, rewards, weights)
        found[f"{n}: the weights afterwards"] = weights
    return found


# --- pass_at_k ----------------------------------------------------------------------------------


def _pass(student, cases):
    found = [float(student.pass_at_k(*case)) for case in cases]
    return torch.tensor(found, dtype=torch.float64)


@check("pass_at_k", public=True, expected=[0.5, 1.0, 5 / 6, 0.0, 0.4])
def worked_passes(student, rng):
    """2 of 4, k 1, 3, 2: 1/2, 1, 1 - 1/6; none of 5; 1 of 5, k 2: 2/5"""
    return _pass(student, [(4, 2, 1), (4, 2, 3), (4, 2, 2), (5, 0, 3), (5, 1, 2)])


PASS_CHECK = {"rtol": 1e-6, "atol": 1e-9}


@check("pass_at_k", public=True, points=2, seeds=3, expected=pass_by_enumeration, **PASS_CHECK)
def every_way_to_take_k(student, rng):
    """Random n up to 9, c and k, against all subsets of size k"""
    cases = []
    for _ in range(12):
        n = rng.integer(1, 10)
        cases.append((n, rng.integer(0, n + 1), rng.integer(1, n + 1)))
    n = rng.integer(4, 9)
    cases += [(n, 0, n), (n, n, 1), (n, n, n), (n, 1, n), (n, 1, 1), (n, n - 1, 1), (n, n - 1, 2)]
    return {"the cases": torch.tensor(cases), "pass@k": _pass(student, cases)}


@check("pass_at_k", points=2, seeds=2, expected=pass_one_by_one, **PASS_CHECK, tier="hardening")
def many_completions(student, rng):
    """Up to 3000 completions, where factorials are beyond floats"""
    cases = [(rng.integer(150, 400), rng.integer(1, 5), rng.integer(1, 100)) for _ in range(4)]
    cases += [(rng.integer(2000, 3000), rng.integer(1, 50), k) for k in (1, 64, 1024)]
    return {"the cases": torch.tensor(cases), "pass@k": _pass(student, cases)}


@check("pass_at_k", tier="hardening")
def numbers_that_cannot_be(student, rng):
    """k not in [1, n], c not in [0, n]: a ValueError names it"""
    f, n = student.pass_at_k, rng.integer(3, 9)
    cases = [("k", c, k) for c in (1, n, 0) for k in (n + 1, n + 2, 0, -1)]
    cases += [("c", n + 1, 2), ("c", -1, 2)]
    bad = {f"{name}: {i}": error_of(name, f, n, c, k) for i, (name, c, k) in enumerate(cases)}
    many, right = rng.integer(100, 1000), rng.integer(1, 50)
    return bad | {"as it should be": float(f(many, right, rng.integer(2, 50)))}


# --- select_informative_groups ------------------------------------------------------------------


@check("select_informative_groups", public=True, expected=[True, False, False, True])
def worked_selection(student, rng):
    """Rewards 0, 1, 0 | 1, 1, 1 | 0, 0, 0 | 1, 1, 0"""
    rewards = rng.tensor([0.0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0])
    return student.select_informative_groups(rewards, 3)


@check("select_informative_groups", public=True, points=2, seeds=3, expected=informative_by_sets)
def groups_of_every_size(student, rng):
    """Rewards of 0 and 1 in groups of 2 to 5: a lone group, all alike, one that differs anywhere"""
    found = {}
    for groups, size in ((6, 2), (4, 4), (3, 5), (1, 3), (5, 3)):
        rewards = rng.integers(0, 2, groups * size).to(rng.dtype)
        found[f"{groups} groups of {size}"] = student.select_informative_groups(rewards, size)
    one = torch.cat([torch.eye(4), 1 - torch.eye(4)])[rng.permutation(8)].to(rng.dtype)
    found["one that differs"] = student.select_informative_groups(one.flatten(), 4)
    pairs = rng.tensor([[1.0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]])
    pairs = pairs[rng.permutation(4)]
    return found | {"pairs": student.select_informative_groups(pairs.flatten(), 4)}


@check("select_informative_groups", tier="hardening")
def groups_that_do_not_fit(student, rng):
    """A group_size of 1, or one that doesn't divide the rewards: a ValueError names it"""
    select, rewards = student.select_informative_groups, rng.integers(0, 2, 6).to(rng.dtype)
    return error_of_group_sizes(select, rewards) | {"3": select(rewards, 3)}


@check("select_informative_groups", points=2, tier="hardening")
def constants_and_near_constants(student, rng):
    """Equal and nearly equal rewards of any size"""
    select = student.select_informative_groups
    values = torch.cat([rng.tensor([0.1, 1 / 3, 1e6 / 3, -0.5, -2]), rng.normal(3)])
    constant = values.repeat_interleave(7)
    near = constant.reshape(8, 7).clone()
    near[:, rng.integer(0, 7)] *= 1 + 1e-6
    tiny = rng.tensor([0.0] * 7 + [1e-7])[rng.permutation(8)]
    return {
        "constant": select(constant, 7),
        "both signs": select(rng.tensor([-1.0, 1.0] * 4) * values[0], 2),
        "tiny": select(tiny, 4),
        "mean 0": select(rng.tensor([-1.0, 1, -1, 1, 0, 0, 0, 0]), 4),
        "nearly": with_inputs_after(select, near.flatten(), 7),
        "with a gradient": select(leaf(near.flatten()), 7),
    }


# --- leave_one_out_advantages -------------------------------------------------------------------


@check(
    "leave_one_out_advantages",
    public=True,
    expected=[-1.5, 0, 1.5, -4.5, 0, 4.5, 0, 0, 0],
)
def worked_others(student, rng):
    """Rewards 1, 2, 3 | 0, 3, 6 | 5, 5, 5: the first is 1 - (2 + 3)/2"""
    rewards = rng.tensor([1.0, 2.0, 3.0, 0.0, 3.0, 6.0, 5.0, 5.0, 5.0])
    return student.leave_one_out_advantages(rewards, 3)


@check("leave_one_out_advantages", public=True, points=2, seeds=2, expected=leave_one_out_by_loops)
def others_of_several_groups(student, rng):
    """Groups with different means and spreads; two rewards per group; 0 or 1; an outlier"""
    f = student.leave_one_out_advantages
    found = {
        f"{groups} groups of {size}": f(grouped_rewards(rng, groups, size), size)
        for groups, size in ((3, 2), (4, 3), (2, 5), (3, 3), (1, 4))
    }
    hits = [[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 1], [0, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]
    found["0 or 1"] = f(rng.tensor(hits)[rng.permutation(6)].flatten(), 4)
    found["an outlier"] = f(rng.normal(50).index_fill(0, rng.integers(0, 50, 1), 600.0), 50)
    level = rng.tensor([1e4]) + rng.integers(-3, 4, 16)
    beside = 1e4 + rng.tensor([[0.0, 1.0]] * 4 + [[3.0, 2.0]] * 4)[rng.permutation(8)] / 64
    found["close beside their size"] = f(beside.flatten(), 2)
    return found | {"a level of 10000": f(level, 4), "close": f(rng.normal(12, std=1e-5), 4)}


@check(
    "leave_one_out_advantages", points=2, seeds=2, holds=constant_groups_are_zeros, tier="hardening"
)
def constant_groups_left_out(student, rng):
    """Groups of equal rewards such as 0.1 give exact zeros, beside another group and alone"""
    values = torch.cat([rng.tensor([0.1, 1 / 3, 1e6 / 3]), rng.uniform(3, low=-1e4, high=1e4)])
    constant = values.repeat_interleave(7)
    f = student.leave_one_out_advantages
    return {
        "beside": f(torch.cat([rng.normal(7, mean=2), constant]), 7),
        "alone": f(constant, 7),
    }


@check("leave_one_out_advantages", public=True, points=2, tier="hardening")
def others_that_require_gradient(student, rng):
    """No gradient; the rewards stay; group_size 1 or no divisor: a ValueError names it"""
    rewards, weights = grouped_rewards(rng, 3, 4), rng.normal(12)
    f = student.leave_one_out_advantages
    return error_of_group_sizes(f, rng.normal(6)) | {
        "gradient": value_and_gradients(lambda rewards: f(rewards, 4) * weights, rewards=rewards),
        "inputs": with_inputs_after(f, rewards.clone(), 4),
    }


# --- mask_truncated and apply_missing_eos_penalty -----------------------------------------------


def draw_finished(rng, rows: int) -> Tensor:
    """Some of each, where there are two."""
    return (torch.arange(rows) % 2 == rng.integer(0, 2))[rng.permutation(rows)]


@check(
    "mask_truncated",
    public=True,
    expected=[[True, True, False], [False, False, False], [True, False, False]],
)
def worked_truncation(student, rng):
    """Three completions of 2, 3 and 1 tokens; the second did not finish"""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
    return student.mask_truncated(mask, torch.tensor([True, False, True]))


@check("mask_truncated", points=2, seeds=2, expected=drop_by_loops)
def truncated_rows(student, rng):
    """Ragged masks with an empty row, as many rows as tokens, one row, one token"""
    found = {}
    for rows, completion in ((6, 7), (5, 5), (4, 9), (1, 4), (1, 1), (3, 1)):
        mask, finished = ragged_mask(rng, rows, completion), draw_finished(rng, rows)
        found[f"{rows} by {completion}"] = [
            student.mask_truncated(mask, x)
            for x in (finished, ~finished, finished | True, finished & False)
        ]
    return found


@check("mask_truncated", expected=drop_by_loops, tier="hardening")
def masks_afterwards(student, rng):
    """The result is a new tensor, and the arguments stay as they were"""
    f, mask, found = student.mask_truncated, ragged_mask(rng), {}
    for name, finished in (("some", draw_finished(rng, 6)), ("all", torch.ones(6).bool())):
        found[name] = with_inputs_after(f, mask.clone(), finished)
        found[f"{name}: the mask after the result is changed"] = after_a_change(f, mask, finished)
    return found


@check("apply_missing_eos_penalty", public=True, expected=[1.0, -0.5, 0.0, 0.5])
def worked_penalties(student, rng):
    """Scores 1, 0, 0, 1, of which the second and the fourth did not finish; penalty 0.5"""
    finished = torch.tensor([True, False, True, False])
    return student.apply_missing_eos_penalty(rng.tensor([1.0, 0, 0, 1]), finished, 0.5)


@check("apply_missing_eos_penalty", public=True, points=2, seeds=2, expected=penalize_by_loops)
def penalties_of_every_size(student, rng):
    """Scores of both signs; penalties of 0, 2, 0.3 and 100; some, all and none finished"""
    found = {}
    for rows, penalty in itertools.product((6, 1), (0.0, 2, 0.3, 100.0)):
        scores, finished = rng.normal(rows, std=3), draw_finished(rng, rows)
        found[f"{rows} rows, {penalty}"] = [
            student.apply_missing_eos_penalty(scores, x, penalty)
            for x in (finished, ~finished, finished | True, finished & False)
        ]
    return found


@check("apply_missing_eos_penalty", expected=penalize_by_loops, tier="hardening")
def scores_afterwards(student, rng):
    """The result carries no gradient and is new; the arguments stay as they were"""
    f, scores, weights = student.apply_missing_eos_penalty, rng.normal(6), rng.normal(6)
    found = {}
    for name, ended in (("some", draw_finished(rng, 6)), ("all", torch.ones(6).bool())):
        found[name] = with_inputs_after(f, scores.clone(), ended, 0.7)
        found[f"{name}: gradient"] = value_and_gradients(
            lambda scores: f(scores, ended, 0.7) * weights,  # noqa: B023
            scores=scores,
        )
        found[f"{name}: the scores after a change"] = after_a_change(f, scores, ended, 0.7)
    return found


# --- aggregate_tokens ---------------------------------------------------------------------------

MODES = ("sequence", "token", "constant")


def _every_mode(student, mask, max_len, per_token):
    found = {}
    for mode in MODES:
        options = {"max_len": max_len} if mode == "constant" else {}
        found[mode] = value_and_gradients(
            lambda per_token: student.aggregate_tokens(per_token, mask, mode, **options),  # noqa: B023
            per_token=per_token,
        )
    return found


@check(
    "aggregate_tokens",
    public=True,
    expected={"sequence": 2.0, "token": 3.0, "constant": 1.0, "default": 2.0},
)
def worked_aggregates(student, rng):
    """Tokens 1, 5 | 3, 3, 3 | none, NaN masked: (3 + 3 + 0)/3, 15/5, 15/(3 * 5)"""
    per_token = rng.tensor([[1.0, 5.0, NAN], [3.0, 3.0, 3.0], [NAN, NAN, NAN]])
    f, mask = student.aggregate_tokens, ~per_token.isnan()
    found = {mode: f(per_token, mask, mode) for mode in MODES[:2]}
    return found | {"constant": f(per_token, mask, "constant", 5), "default": f(per_token, mask)}


@check("aggregate_tokens", public=True, points=4, seeds=2, expected=aggregate_by_loops)
def ragged_aggregates(student, rng):
    """Ragged, with an empty row; NaN or inf beyond the mask: the values and the gradients"""
    mask = ragged_mask(rng)
    per_token, max_len = rng.normal(6, 7, mean=0.5), rng.integer(8, 20)
    return {
        f"{fill}": _every_mode(student, mask, max_len, poison(per_token, mask, fill))
        for fill in (NAN, torch.inf, -torch.inf, 7.0)
    }


@check("aggregate_tokens", points=2, expected=aggregate_by_loops, tier="hardening")
def aggregates_of_many_shapes(student, rng):
    """As many completions as tokens, one row, one token, all full, 150 rows, nothing"""
    masks = masks_of_many_shapes(rng) | {"gaps": rng.integers(0, 2, 4, 6).bool()}
    return {
        name: _every_mode(student, mask, 11, poison(rng.normal(*mask.shape, mean=1), mask))
        for name, mask in masks.items()
    }


@check("aggregate_tokens", tier="hardening")
def modes_that_there_are_not(student, rng):
    """Another mode, "constant" without a positive max_len: a ValueError names it; inputs stay"""
    args, f = (rng.normal(6, 7), ragged_mask(rng)), student.aggregate_tokens
    modes = ("grpo", "Token", "", "sequences", None)
    found = {f"mode {mode!r}": error_of("mode", f, *args, mode, 7) for mode in modes}
    for n in (None, 0, -5):
        found[f"max_len {n}"] = error_of("max_len", f, *args, "constant", n)
    return found | {mode: with_inputs_after(f, *args, mode, max_len=5) for mode in MODES}


# --- calc_sequence_ratio ------------------------------------------------------------------------


def _ratio(student, mask):
    return lambda logprobs, old_logprobs: student.calc_sequence_ratio(logprobs, old_logprobs, mask)


@check("calc_sequence_ratio", public=True, expected=[2.0, 0.5, 1.0])
def worked_sequence_ratios(student, rng):
    """Ratios 1 and 4: sqrt(4) = 2; 0.5 alone; an empty completion: 1"""
    ratios = rng.tensor([[1.0, 4.0, NAN], [0.5, NAN, NAN], [NAN, NAN, NAN]])
    old = rng.tensor([[-1.0, -3.0, -2.0]] * 3)
    return student.calc_sequence_ratio(old + ratios.log(), old, ~ratios.isnan())


@check("calc_sequence_ratio", public=True, points=2, seeds=2, expected=geometric_mean_of_ratios)
def ragged_sequence_ratios(student, rng):
    """Ragged, NaN or inf beyond the mask: the ratios, and a gradient for the log-probs alone"""
    mask, weights = ragged_mask(rng), rng.normal(6)
    return {
        f"{fill}": value_and_gradients(
            lambda logprobs, old_logprobs: _ratio(student, mask)(logprobs, old_logprobs) * weights,
            **ragged_logprobs(rng, mask, fill),
        )
        for fill in (NAN, torch.inf, -torch.inf, -1.0)
    }


@check("calc_sequence_ratio", points=4, expected=geometric_mean_of_ratios, tier="hardening")
def sequence_ratios_of_many_shapes(student, rng):
    """One row, 150 rows, 300 tokens; log-probs of -1000 and 0; log-ratios of +-1000 masked out"""
    found = {
        name: value_and_gradients(_ratio(student, mask), **ragged_logprobs(rng, mask))
        for name, mask in masks_of_many_shapes(rng).items()
    }
    mask = torch.arange(300) < torch.tensor([300, 250, 3])[:, None]
    old = -rng.uniform(3, 300, high=2.0)  # the product of the ratios overflows
    new = old + rng.tensor([[0.9], [-0.9], [30.0]]) + rng.normal(3, 300, std=0.1)
    found["long"] = value_and_gradients(_ratio(student, mask), logprobs=new, old_logprobs=old)
    mask = torch.arange(4) < torch.tensor([4, 2, 3])[:, None]
    old = -1000 * rng.uniform(3, 4, low=0.9, high=1.1)
    old[:, rng.integer(0, 4)] = 0.0
    new = (old.float() + rng.normal(3, 4).float()).to(rng.dtype)
    found["unlikely"] = value_and_gradients(_ratio(student, mask), logprobs=new, old_logprobs=old)
    found["inputs"] = with_inputs_after(student.calc_sequence_ratio, new, old, mask)
    mask = torch.arange(4) < torch.tensor([2, 3, 4, 0])[:, None]
    extremes = poison(torch.zeros(4, 4), mask, 1e3) * rng.tensor([1.0, -1.0, 1.0, -1.0])
    old = -rng.uniform(4, 4)
    return found | {
        "extremes": value_and_gradients(
            _ratio(student, mask), logprobs=old + rng.normal(4, 4) + extremes, old_logprobs=old
        )
    }


# --- calc_rlvr_objective ------------------------------------------------------------------------


def _rlvr(student, mask, *args, **options):
    """The objective as a function of the tensors that could have a gradient."""
    return lambda logprobs, old_logprobs, advantages, **ref: student.calc_rlvr_objective(
        logprobs, old_logprobs, advantages, mask, *args, **options, **ref
    )


@check(
    "calc_rlvr_objective",
    public=True,
    expected={"token": 0.5, "sequence": 0.8, "DAPO": 0.55, "Dr. GRPO": 0.275},
)
def worked_levels(student, rng):
    """Ratios 4, 1, A = 1; a row of A = 0. Clip 0: 1/2; sqrt(4), clip 0.6: 1.6/2; 2.2/4; 2.2/8"""
    logprobs = rng.tensor([[4.0, 1.0], [0.5, 0.5]]).log()
    old, mask = torch.zeros_like(logprobs), torch.ones(2, 2, dtype=torch.bool)
    advantages, f = rng.tensor([1.0, 0.0]), student.calc_rlvr_objective
    return {
        "token": f(logprobs, old, advantages, mask, 0.0),
        "sequence": f(logprobs, old, advantages, mask, 0.6, ratio_level="sequence"),
        "DAPO": f(logprobs, old, advantages, mask, loss_mode="token"),
        "Dr. GRPO": f(logprobs, old, advantages, mask, loss_mode="constant", max_len=4),
    }


@check("calc_rlvr_objective", public=True, points=3, seeds=2, expected=rlvr_by_cases)
def ragged_rlvr_objectives(student, rng):
    """Both levels and all modes, NaN or inf beyond the mask; the defaults, which are GRPO's"""
    mask = ragged_mask(rng)
    advantages, found = one_zero(rng, mask), {}
    for level, mode in itertools.product(("token", "sequence"), MODES):
        fill = (NAN, torch.inf, -torch.inf)[rng.integer(0, 3)]
        tensors = ragged_logprobs(rng, mask, fill) | {"advantages": advantages}
        objective = _rlvr(student, mask, ratio_level=level, loss_mode=mode, max_len=9)
        found[f"{level}, {mode}"] = value_and_gradients(objective, **tensors)
    return found | {"defaults": value_and_gradients(_rlvr(student, mask), **tensors)}


@check("calc_rlvr_objective", public=True, points=4, expected=rlvr_by_cases)
def rlvr_clips(student, rng):
    """Ratios from 0.05 to 20, both signs of A, at both levels, each with many clips; by position"""
    mask, signs = torch.ones(12, 2, dtype=torch.bool), rng.tensor([1.0] * 6 + [-1.0] * 6)
    old = -rng.uniform(12, 2, low=3.5, high=4.0)
    logratio = rng.tensor([-3.0, -1.0, -0.1, 0.1, 1.0, 3.0] * 2)[:, None]
    tensors = {"logprobs": old + logratio + rng.normal(12, 2, std=0.02), "old_logprobs": old}
    tensors["advantages"] = signs * rng.uniform(12, low=0.5, high=2.0)
    clips = [(0.05, None), (0.0, None), (0.6, None), (3e-4, 4e-4), (0.2, 0.6), (0.3, 0.05)]
    cases = itertools.product(("token", "sequence"), [*clips, (0.3, 0.0)])
    found = {
        f"{level}, {low} below, {high} above": value_and_gradients(
            _rlvr(student, mask, low, high, level), **tensors
        )
        for level, (low, high) in cases
    }
    by_position = student.calc_rlvr_objective(
        *tensors.values(), mask, 0.1, 0.3, "sequence", "constant", 13
    )
    return found | {"by position": by_position}


@check("calc_rlvr_objective", points=2, expected=rlvr_by_cases)
def the_reference_inside(student, rng):
    """ref_logprobs and beta, both levels, all modes: each token's k3; the reference is detached"""
    mask, found = ragged_mask(rng), {}
    for level, mode in itertools.product(("token", "sequence"), MODES):
        found[f"{level}, {mode}"] = value_and_gradients(
            _rlvr(student, mask, ratio_level=level, loss_mode=mode, max_len=12, beta=0.7),
            **ragged_logprobs(rng, mask, with_ref=True),
            advantages=one_zero(rng, mask),
        )
    return found


@check("calc_rlvr_objective", expected=rlvr_by_cases)
def rlvr_advantages_of_tokens(student, rng):
    """Advantages [batch completion] that differ within a row, NaN beyond; one row, 5 by 5"""
    found = {}
    for shape, level in itertools.product(((6, 4), (5, 5), (1, 4)), ("token", "sequence")):
        mask = ragged_mask(rng, *shape)
        found[f"{shape}, {level}"] = value_and_gradients(
            _rlvr(student, mask, ratio_level=level),
            **ragged_logprobs(rng, mask),
            advantages=poison(rng.normal(*shape), mask),
        )
    return found


@check("calc_rlvr_objective", points=2, expected=rlvr_by_cases, tier="hardening")
def rlvr_of_many_shapes(student, rng):
    """One row, 150 rows; inputs unchanged; log-ratios of +-1000 masked out, and one of 200"""
    found, extremes = {}, torch.arange(4) < torch.tensor([2, 3, 4])[:, None]
    masks = masks_of_many_shapes(rng) | {"extremes": extremes, "far": extremes}
    for (name, mask), level in itertools.product(masks.items(), ("token", "sequence")):
        tensors = ragged_logprobs(rng, mask) | {"advantages": rng.normal(len(mask))}
        if name == "extremes":
            old = -rng.uniform(3, 4)
            new = (old + rng.normal(3, 4)).where(mask, rng.tensor([1e3, -1e3, 1e3, -1e3]))
            tensors |= {"logprobs": new, "old_logprobs": old}
        if name == "far":
            tensors["logprobs"] = tensors["old_logprobs"] + rng.tensor([[200.0], [0.0], [0.0]])
            tensors["advantages"] = tensors["advantages"].abs() + 0.1
        objective = _rlvr(student, mask, ratio_level=level)
        found[f"{name}, {level}"] = value_and_gradients(objective, **tensors)
    inputs = with_inputs_after(student.calc_rlvr_objective, *tensors.values(), mask)
    return found | {"inputs": inputs}


@check("calc_rlvr_objective", tier="hardening")
def levels_that_there_are_not(student, rng):
    """An unknown ratio_level or mode, no max_len, no ref_logprobs: a ValueError names it"""
    mask = ragged_mask(rng)
    args = (*ragged_logprobs(rng, mask).values(), rng.normal(6), mask)

    def bad(name, **options):
        return error_of(name, student.calc_rlvr_objective, *args, **options)

    return {
        "level 'Token'": bad("ratio_level", ratio_level="Token"),
        "level 'completion'": bad("ratio_level", ratio_level="completion"),
        "mode 'grpo'": bad("mode", loss_mode="grpo"),
        "no max_len": bad("max_len", loss_mode="constant"),
        "no ref_logprobs": bad("ref_logprobs", beta=0.1),
        "as it should be": student.calc_rlvr_objective(*args),
    }


# --- RlvrTrainer: which groups are trained on ---------------------------------------------------


def _make_rlvr_args(student, **options):
    defaults = {
        "batch_size": 6,
        "num_minibatches": 1,
        "group_size": 3,
        "gen_len": 5,
        "prompts": list(trainers.PROMPTS),
    }
    return student.RlvrArgs(**(defaults | options))


def _script_batch(rng, number: int, informative: list[bool], prompt_len: int, completion: int):
    """A batch of groups of 3, as the sampler gives it: rows that say whose they are.

    Every other prompt has an eos in it, which ends nothing.
    """
    rows = 3 * len(informative)
    lengths = rng.integers(1, completion + 1, rows)
    cut_off = rng.integer(0, rows)
    lengths[cut_off] = completion
    pads = rng.integers(0, prompt_len, rows)
    pads[rng.integer(0, rows)] = 0
    mask = torch.arange(completion) < lengths[:, None]
    prompt = torch.arange(prompt_len) >= pads[:, None]
    attention = torch.cat([prompt, mask], dim=1).long()
    ids = rng.integers(3, 512, rows, prompt_len + completion) * attention
    ended = rng.integers(0, 2, rows).bool()
    ended |= lengths < completion  # what is shorter ended by itself
    ended[cut_off] = False
    last = prompt_len + lengths - 1
    ids[torch.arange(rows)[ended], last[ended]] = models.SPECIAL["eos_token_id"]
    ids[rng.permutation(rows) % 2 == 0, prompt_len - 1] = models.SPECIAL["eos_token_id"]
    texts = [f"batch {number}, row {row}" for row in range(rows)]
    levels = torch.tensor([0.1, 1 / 3, 1.0])[rng.integers(0, 3, len(informative))]
    scores = levels.repeat_interleave(3)
    for group, differs in enumerate(informative):
        if differs:
            scores[3 * group + rng.integer(0, 3)] += 1.0
    return Samples(ids, attention, prompt_len, mask, texts), scores


def _describe_samples(samples: Samples, scores: Tensor) -> dict:
    """Row by row, whatever the padding."""
    n, prompts, completions, seen = samples.prompt_len, [], [], []
    for row, mask in enumerate(samples.completion_mask):
        ids, attention = samples.input_ids[row], samples.attention_mask[row].bool()
        prompts.append(ids[:n][attention[:n]].tolist())
        completions.append(ids[n:][mask].tolist())
        seen.append(attention[n:][mask].all().item())
    return {
        "texts": list(samples.texts),
        "prompts": prompts,
        "completions": completions,
        "the attention is on for each token": seen,
        "completion_ids fit": torch.equal(samples.completion_ids, samples.input_ids[:, n:]),
        "scores": scores,
    }


def sample_groups_by_loops(self):
    """Group by group; what is kept is listed row by row."""
    args, size = self.args, self.args.group_size
    n_groups, groups = args.batch_size // size, []
    rounds = 1 + args.max_extra_rollouts if args.dynamic_sampling else 1
    while rounds > 0 and sum(g.differs for g in groups) < n_groups:
        samples, scores = self.sample_and_score(n_groups, size)
        rounds -= 1
        finished = []
        for ids, mask in zip(samples.completion_ids, samples.completion_mask, strict=True):
            finished.append(bool((ids[mask] == models.SPECIAL["eos_token_id"]).any()))
        if args.truncation == "penalty":
            scores = penalize_by_loops(scores, torch.tensor(finished), args.missing_eos_penalty)
        for start in range(0, len(scores), size):
            rows = range(start, start + size)
            numbers = [scores[row].item() for row in rows]
            group = SimpleNamespace(samples=samples, rows=rows, numbers=numbers)
            group.differs, group.finished = len(set(numbers)) > 1, finished[start : start + size]
            groups.append(group)
    self.metrics["informative_frac"].append(sum(g.differs for g in groups) / len(groups))
    self.metrics["prompts_sampled"].append(len(groups))
    ended = [x for g in groups for x in g.finished]
    self.metrics["truncated_frac"].append(1 - sum(ended) / len(ended))
    kept = [g for g in groups if g.differs][:n_groups]
    fill = [g for g in groups if not g.differs][: n_groups - len(kept)]
    chosen = {id(g) for g in kept + fill}
    return _stack_groups([g for g in groups if id(g) in chosen])


def _stack_groups(groups):
    prompt_len = max(g.samples.prompt_len for g in groups)
    completion = max(g.samples.completion_mask.shape[1] for g in groups)
    ids, attention, masks, texts, scores = [], [], [], [], []
    for g in groups:
        pads = (prompt_len - g.samples.prompt_len, completion - g.samples.completion_mask.shape[1])
        for row in g.rows:
            ids.append(F.pad(g.samples.input_ids[row], pads))
            attention.append(F.pad(g.samples.attention_mask[row], pads))
            masks.append(F.pad(g.samples.completion_mask[row], (0, pads[1])))
            texts.append(g.samples.texts[row])
        scores += g.numbers
    samples = Samples(
        torch.stack(ids), torch.stack(attention), prompt_len, torch.stack(masks), texts
    )
    return samples, torch.tensor(scores, dtype=torch.float32)


def _play(student, rng, script: list[list[int]], rollouts: int = 1, **options):
    """Dynamic sampling from batches that are written beforehand, on a trainer's own method.

    Described is the last rollout; the metrics are of all of them.
    """
    n_groups = len(script[0])
    args = _make_rlvr_args(student, batch_size=3 * n_groups, **options)
    trainer = student.RlvrTrainer(args, _load_tiny_model())
    batches = [
        _script_batch(rng, i, [bool(x) for x in line], rng.integer(3, 7), rng.integer(4, 7))
        for i, line in enumerate(script)
    ]
    calls, given = [], [scores.clone() for _, scores in batches]

    def sample_and_score(n_prompts, group_size=1):
        calls.append([n_prompts, group_size])
        return batches[min(len(calls), len(batches)) - 1]

    trainer.sample_and_score = sample_and_score
    trainer.metrics.clear()
    for _ in range(rollouts):
        found = _describe_samples(*trainer.sample_groups())
    names = ("informative_frac", "prompts_sampled", "truncated_frac")
    metrics = {n: torch.tensor(trainer.metrics[n]).double().mean() for n in names}
    afterwards = [scores for _, scores in batches]
    found |= metrics | {"calls": calls, "given": given}
    return found | {"the sampled scores afterwards": afterwards}


@functools.cache
def _load_tiny_model():
    """Nothing is computed by it: dynamic sampling needs its tokenizer."""
    rng = SimpleNamespace(seed=0, dtype=torch.float32)
    return make_model(TransformerWithLora, rng)


SAMPLE_CHECK = {"expected": sample_groups_by_loops, "float64": False}


@check("RlvrTrainer.sample_groups", public=True, **SAMPLE_CHECK)
def one_batch_is_enough(student, rng):
    """All groups of the first batch informative: one call, and the batch as it came"""
    return _play(student, rng, [[1, 1, 1], [1, 1, 1]], dynamic_sampling=True)


@check("RlvrTrainer.sample_groups", points=4, seeds=2, **SAMPLE_CHECK)
def until_the_batch_is_full(student, rng):
    """The first informative groups, in order; at the bound the first of the others fill it up"""
    script = [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1], [1, 1, 1, 1]]
    few = [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]
    play = functools.partial(_play, student, rng, dynamic_sampling=True)
    found = {f"{n} more": play(few, max_extra_rollouts=n) for n in (2, 1, 0)}
    return found | {
        "four": play(script, max_extra_rollouts=6),
        "the last that is allowed": play(script[1:], max_extra_rollouts=2),
        "one group": play([[0], [0], [1], [0]]),
        "one batch of two": play([[0, 0], [1, 1], [0, 0]], max_extra_rollouts=9),
        "a second rollout": play([[1, 0], [1, 1], [0, 1], [1, 1]], rollouts=2),
        "the default bound": play([[0, 0, 0]] * 4 + [[1, 1, 1]]),
        "none informative": play([[0, 0], [0, 0]], max_extra_rollouts=1),
    }


@check("RlvrTrainer.sample_groups", points=2, **SAMPLE_CHECK)
def without_dynamic_sampling(student, rng):
    """One batch as it came, whichever groups are informative"""
    return [
        _play(student, rng, [line, [1, 1, 1, 1]], truncation=truncation)
        for line in ([0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1])
        for truncation in ("keep", "mask")
    ]


@check("RlvrTrainer.sample_groups", public=True, points=2, seeds=2, **SAMPLE_CHECK)
def penalties_before_the_selection(student, rng):
    """truncation "penalty": it can make a group informative, and the scores carry it"""
    script = [[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]]
    play = functools.partial(_play, student, rng, script)
    penalty = {"truncation": "penalty", "missing_eos_penalty": 0.25}
    return {
        "dynamic": play(dynamic_sampling=True, **penalty),
        "static": play(**penalty),
        "a penalty of 1 by default": play(truncation="penalty"),
        "a penalty that is not used": play(missing_eos_penalty=5.0),
    }


# --- RlvrTrainer: rollouts ----------------------------------------------------------------------

RLVR_FIELDS = ("input_ids", "attention_mask", "mask", "logprobs", "ref_logprobs", "advantages")


def rollout_by_definition(self):
    """Plain Hugging Face for the log-probs, loops over rewards and rows."""
    args = self.args
    samples, scores = self.sample_groups()
    ids, attention, n = samples.input_ids, samples.attention_mask, samples.prompt_len
    with torch.no_grad():
        logits, _ = trainers.run_hugging_face(self.model, "shallow", ids, attention)
        ref_logits, _ = trainers.run_hugging_face(self.model, "shallow", ids, attention, False)
    mask = samples.completion_mask.clone()
    if args.truncation == "mask":
        for row, completion_ids in enumerate(samples.completion_ids):
            if not (completion_ids[mask[row]] == models.SPECIAL["eos_token_id"]).any():
                mask[row] = False
    if args.advantage_kind == "leave_one_out":
        advantages = leave_one_out_by_loops(scores, args.group_size)
    else:
        groups = scores.reshape(-1, args.group_size)
        advantages = groups - groups.mean(-1, keepdim=True)
        stds = {"group": groups.std(-1, keepdim=True), "batch": scores.std()}
        if args.advantage_scale != "none":
            advantages = advantages / (stds[args.advantage_scale] + 1e-4)
        advantages = advantages.flatten()
    fields = {
        "input_ids": ids,
        "attention_mask": attention,
        "mask": mask,
        "logprobs": trainers.score_rows(logits, ids, n, args.temperature),
        "ref_logprobs": trainers.score_rows(ref_logits, ids, n, args.temperature),
        "advantages": advantages,
    }
    if args.kl_coef == 0:
        fields["ref_logprobs"] = None
    return ReplayMemory(
        **fields,
        num_minibatches=args.num_minibatches,
        batches_per_learning_phase=args.batches_per_learning_phase,
        group_size=args.group_size,
    )


def _roll_out(student, rng, **options):
    """The memory of a given batch."""
    sizes = {"batch_size": 12, "num_minibatches": 2, "temperature": 0.7}
    args = _make_rlvr_args(student, **(sizes | options))
    trainer = student.RlvrTrainer(args, make_model(TransformerWithLora, rng))
    samples, scores = _script_batch(rng, 0, [True, True, True, True], 4, 5)
    scores = scores + rng.normal(12).float()  # groups of different spreads
    samples.input_ids[:, 0] = 3 + rng.permutation(12)  # no two rows alike
    given = samples.completion_mask.clone()
    trainer.sample_groups = lambda: (samples, scores)
    memory = trainer.rollout_phase()
    names = [name for name in RLVR_FIELDS if args.kl_coef > 0 or name != "ref_logprobs"]
    fields = {name: getattr(memory, name) for name in names}
    found = {name: inside(x, given) if "logprobs" in name else x for name, x in fields.items()}
    minibatches = memory.get_minibatches()
    return found | {
        "fields with a gradient": [n for n, x in fields.items() if x.requires_grad],
        "rows of the minibatches": [len(m.mask) for m in minibatches],
        "tokens of an epoch": int(sum(m.mask.sum() for m in minibatches[:2])),
        "whole groups": [_count_groups(memory, m) for m in minibatches],
        "the sampled mask afterwards": samples.completion_mask,
        "the scores afterwards": scores,
    }


def _count_groups(memory, minibatch) -> int:
    """How many groups the rows of a minibatch are of."""
    same = (minibatch.input_ids[:, None] == memory.input_ids).all(-1)
    return len(set((same.long().argmax(-1) // 3).tolist()))


ROLLOUT_CHECK = {
    "expected": rollout_by_definition,
    "float64": False,
    "rtol": 1e-3,
    "atol": 1e-3,
}


@check("RlvrTrainer.rollout_phase", public=True, **ROLLOUT_CHECK)
def memory_by_default(student, rng):
    """The defaults: GRPO's memory"""
    return _roll_out(student, rng, temperature=1.0)


@check("RlvrTrainer.rollout_phase", points=2, **ROLLOUT_CHECK)
def memories_of_each_baseline(student, rng):
    """Advantages of groups, scaled or not, and of leave-one-out, which is not scaled"""
    kinds = [{"advantage_scale": scale} for scale in ("group", "batch", "none")]
    kinds += [{"advantage_kind": "leave_one_out", "advantage_scale": s} for s in ("group", "none")]
    return [_roll_out(student, rng, kl_coef=0.0, **kind) for kind in kinds]


@check("RlvrTrainer.rollout_phase", public=True, points=2, **ROLLOUT_CHECK)
def memories_of_what_was_cut_off(student, rng):
    """truncation "mask" drops the rows that did not finish; "keep" and "penalty" keep them"""
    return [
        _roll_out(student, rng, truncation="mask", batches_per_learning_phase=1),
        _roll_out(student, rng, truncation="keep"),
        _roll_out(student, rng, truncation="penalty", kl_coef=0.0),
        _roll_out(student, rng, truncation="mask", advantage_kind="leave_one_out", kl_coef=0.0),
    ]


@check("RlvrTrainer.rollout_phase", holds=trainers.find_wrong_ratio, beside=True)
def rlvr_first_ratio_is_one(student, rng):
    """In bfloat16, where the merged model's log-probs differ visibly; what args.seed decides"""
    options = {"batch_size": 12, "group_size": 3}
    make_args = functools.partial(_make_rlvr_args, student, **options)
    model = make_model(TransformerWithLora, rng, dtype=torch.bfloat16)
    sampled = trainers.sample_again(student.RlvrTrainer, make_args, model)
    return trainers.describe_first_ratio(sampled, model, gen_len=5)


# --- RlvrTrainer: the objective -----------------------------------------------------------------

RLVR_OBJECTIVE = {
    "batch_size": 12,  # twice the rows of a minibatch
    "num_minibatches": 2,
    "clip_coef": 0.4,
    "clip_coef_high": 0.6,
    "ent_coef": 0.3,
    "kl_coef": 0.7,
    "temperature": 0.7,
    "top_k": 5,  # concerns sampling alone
    "gen_len": 8,  # no completion became as long
}


def rlvr_objective_by_definition(self, minibatch):
    """Plain Hugging Face for the logits, loops over completions and their tokens."""
    args, mask, ids = self.args, minibatch.mask, minibatch.input_ids
    n_prompt = ids.shape[1] - mask.shape[1]
    run = trainers.run_hugging_face
    logits, _ = run(self.model, "shallow", ids, minibatch.attention_mask)
    ref_logits, _ = run(self.model, "shallow", ids, minibatch.attention_mask, adapters=False)
    logprobs = torch.zeros(mask.shape)
    entropies, exact_kls = [], []
    for row, t in mask.nonzero().tolist():
        at = n_prompt + t - 1
        policy = Categorical(logits=logits[row, at] / args.temperature)
        reference = Categorical(logits=ref_logits[row, at].detach() / args.temperature)
        logprobs[row, t] = policy.log_prob(ids[row, at + 1])
        entropies.append(policy.entropy())
        exact_kls.append(kl_divergence(policy, reference))
    objective = rlvr_by_cases(
        logprobs,
        minibatch.logprobs,
        minibatch.advantages,
        mask,
        args.clip_coef,
        args.clip_coef_high,
        args.ratio_level,
        args.loss_mode,
        args.gen_len,
        minibatch.ref_logprobs,
        args.kl_coef if args.kl_kind == "k3" else 0.0,
    )
    objective = objective + args.ent_coef * torch.stack(entropies).mean()
    if args.kl_kind == "exact":
        objective = objective - args.kl_coef * torch.stack(exact_kls).mean()
    return objective


def _make_rlvr_fields(rng, samples, temperature):
    mask = samples.completion_mask
    old = trainers.draw_logprobs(rng, samples, temperature)
    ref = trainers.draw_logprobs(rng, samples, temperature, std=0)  # as a forward would give it
    return {
        "input_ids": samples.input_ids,
        "attention_mask": samples.attention_mask,
        "mask": mask,
        "logprobs": beyond(old, mask),
        "ref_logprobs": beyond(ref, mask),
        "advantages": one_zero(rng, mask),
    }


def _rlvr_objective(student, rng, **options):
    args = _make_rlvr_args(student, **(RLVR_OBJECTIVE | options))
    model = make_model(TransformerWithLora, rng, alpha=8)
    fields = _make_rlvr_fields(rng, make_samples(rng), args.temperature)
    if args.kl_coef == 0:
        fields["ref_logprobs"] = model.reference = None  # no reference runs
    trainer = student.RlvrTrainer(args, model)
    model.train()
    (minibatch,) = ReplayMemory(**fields).get_minibatches()
    objective = trainer.compute_rlhf_objective(minibatch)
    return {"the objective": objective} | trainers.adapter_gradients(objective, model)


OBJECTIVE_CHECK = {
    "expected": rlvr_objective_by_definition,
    "float64": False,
    "rtol": 1e-3,
    "atol": 1e-4,
}


@check("RlvrTrainer.compute_rlhf_objective", public=True, beside=True, **OBJECTIVE_CHECK)
def rlvr_objective_by_default(student, rng):
    """The defaults: GRPO's objective"""
    defaults = {"clip_coef": 0.2, "clip_coef_high": None, "ent_coef": 0.001, "kl_coef": 0.04}
    return _rlvr_objective(student, rng, **defaults, temperature=1.0, top_k=None, gen_len=5)


@check("RlvrTrainer.compute_rlhf_objective", points=4, **OBJECTIVE_CHECK)
def objective_in_each_loss_mode(student, rng):
    """Each loss_mode, "constant" by gen_len; ratio_level "sequence", with clips that bind"""
    sequence = {"ratio_level": "sequence", "clip_coef": 0.05, "clip_coef_high": 0.1}
    options = [{"loss_mode": mode} for mode in MODES]
    options += [sequence, sequence | {"loss_mode": "token", "kl_coef": 0.0}]
    return [_rlvr_objective(student, rng, **given) for given in options]


@check("RlvrTrainer.compute_rlhf_objective", public=True, **OBJECTIVE_CHECK)
def objective_with_either_kl(student, rng):
    """kl_kind "exact" in place of k3, not both; kl_coef 0: no reference"""
    return [
        _rlvr_objective(student, rng, kl_kind="exact", loss_mode="token"),
        _rlvr_objective(student, rng, kl_kind="exact", kl_coef=0.0),
        _rlvr_objective(student, rng, kl_coef=0.0, loss_mode="constant"),
    ]


# --- RlvrTrainer: all of it ---------------------------------------------------------------------


@check("RlvrTrainer.train", public=True, slow=True, holds=trainers.find_no_learning)
def a_short_run_of_rlvr(student, rng):
    """Eight phases with everything turned on, rewarded for full stops: at least half again"""
    everything = {
        "clip_coef_high": 0.28,
        "advantage_kind": "leave_one_out",
        "loss_mode": "token",
        "dynamic_sampling": True,
        "truncation": "penalty",
        "missing_eos_penalty": 0.1,
    }
    return trainers.train_shortly(student.RlvrTrainer, student.RlvrArgs, rng, **everything)
