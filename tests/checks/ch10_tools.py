"""Checks of chapter 10: tools and turns."""

from types import SimpleNamespace

import torch

from tests.oracles.ch10_tools import (
    calculator_in_decimals,
    call_value_by_outcomes,
    measured_token_by_token,
    own_mask_by_loops,
    parts_by_sorting,
    priced_by_reading,
    tool_objective_by_loops,
    turns_by_plain_calls,
)
from tests.support.inputs import (
    INF,
    NAN,
    error_of,
    masks_of_many_shapes,
    one_zero,
    ragged_logprobs,
    ragged_mask,
    value_and_gradients,
    with_inputs_after,
)
from tests.support.tables import EOS, ScriptModel, get_id, make_chain, make_writer
from utils.grading.checks import check
from utils.models.loading import load_base_model

# --- run_calculator -----------------------------------------------------------------------------


def draw_number(rng, digits=None):
    """A whole number as text, of 1 to 9 digits; leading zeros are as likely as others."""
    return "".join(map(str, rng.integers(0, 10, digits or rng.integer(1, 10)).tolist()))


def answers_to(student, turns):
    return {turn: student.run_calculator(turn) for turn in turns}


@check(
    "run_calculator",
    public=True,
    expected={
        "<23*47>": "=1081\n",
        "<23+47>": "=70\n",
        "<007*8>": "=56\n",
        "<23-47>": "=?\n",
        "<23*47": "=?\n",
        "<23*47>\n": "=?\n",
        "A: 1081": "=?\n",
    },
)
def worked_calls(student, rng):
    """A product, a sum, leading zeros; anything that is not exactly a call gets "=?" """
    turns = ["<23*47>", "<23+47>", "<007*8>", "<23-47>", "<23*47", "<23*47>\n", "A: 1081"]
    return answers_to(student, turns)


@check("run_calculator", public=True, points=2, seeds=2, expected=calculator_in_decimals)
def random_calls(student, rng):
    """Random sums and products of 1 to 9 digits: exact to the last digit, newline included"""
    pairs = [(draw_number(rng), draw_number(rng)) for _ in range(12)]
    pairs.append((draw_number(rng, 9), "999999999"))
    return answers_to(student, [f"<{a}{sign}{b}>" for a, b in pairs for sign in "+*"])


@check("run_calculator", points=2, seeds=2, expected=calculator_in_decimals)
def malformed_calls(student, rng):
    """Calls with something missing or something extra, and plain text: all get "=?" """
    a, b, c = draw_number(rng, 3), draw_number(rng, 2), draw_number(rng, 2)
    turns = [f"<{a}>", f"<{a}*>", f"<*{b}>", "<+>", "<>", "", f"<{a}{b}>", f"A: {c}", ">", "<"]
    turns += [f"{a}*{b}", f"<{a}*{b}", f"{a}*{b}>", f"<{a}+{b}*{c}>", f"<{a}**{b}>", f"<{a}+*{b}>"]
    turns += [f"<{a}-{b}>", f"<{a}/{b}>", f"<{a}%{b}>", f"<<{a}*{b}>", f"<{a}*{b}>>"]
    turns += [f"<{a}*{b}>={c}\n", f"<{a}+{b}><{a}*{b}>", f"so <{a}*{b}>", f"A: {c}\n<{a}*{b}>"]
    return answers_to(student, [*turns, f"<{a}*{b}>", f"<{a}+{c}>"])


@check("run_calculator", expected=calculator_in_decimals, tier="hardening")
def numbers_that_are_none(student, rng):
    """Spaces, signs, decimal points, underscores, other alphabets' digits, newlines: "=?" """
    a, b = draw_number(rng, 2), draw_number(rng, 2)
    numbers = [f" {a}", f"{a} ", f"-{a}", f"+{a}", f"{a}.0", f"{a[0]}_{a[1]}", "0x1f", "1e3", "²"]
    numbers += ["٢٣", "२३", "２３", "x", f"{a}\n", f"\t{a}", f"{a},5", "inf", "True"]
    turns = [f"<{x}*{b}>" for x in numbers] + [f"<{b}+{x}>" for x in numbers]
    others = [f"<{a}×{b}>", f"<{a}*{b}> ", f" <{a}*{b}>", f"<{a}*{b}>\r", f"\n<{a}+{b}>"]
    return answers_to(student, [*turns, *others, f"<{a}*{b}>"])


@check("run_calculator", expected=calculator_in_decimals, tier="hardening")
def lengths_of_numbers(student, rng):
    """Nine digits are fine, ten are too many, leading zeros included; a turn of 300,000 digits"""
    nine, ten, b = draw_number(rng, 9), draw_number(rng, 10), draw_number(rng, 1)
    turns = [f"<{nine}*{nine}>", f"<{ten}*{b}>", f"<{b}+{ten}>", f"<000000000*{b}>"]
    turns += [f"<000000000{b}*{b}>", f"<{b}+0000000007>", f"<000000007+{b}>"]
    found = answers_to(student, turns)
    long = "9" * 300_000
    turns = {"a long first": f"<{long}*{b}>", "a long second": f"<{b}+{long}>", "no call": long}
    return found | {name: student.run_calculator(turn) for name, turn in turns.items()}


@check("run_calculator", expected=calculator_in_decimals, tier="hardening")
def code_in_a_call(student, rng):
    """Python code inside a call is only text, and gets "=?" """
    a, b = draw_number(rng, 2), draw_number(rng, 2)
    code = ["__import__('os').getpid()", f"int('{a}')*{b}", f"[{a}]*{b}", f"({a})+({b})"]
    code += ["1/0", "raise", f"'{a}'+'{b}'", f"{a}+{b};{a}", f"{a}*{b}#", "9**9**9", f"{a}+{b}if 1"]
    return answers_to(student, [f"<{each}>" for each in code] + [f"<{a}+{b}>"])


# --- get_own_mask -------------------------------------------------------------------------------


def draw_turns(rng, rows=6, most=5):
    """Rows of turns, some of them empty, the two sides in any order; ids may be those of pads."""
    return [
        [
            (rng.integers(0, 6, rng.integer(0, 5)).tolist(), bool(rng.integer(0, 2)))
            for _ in range(rng.integer(0, most + 1))
        ]
        for _ in range(rows)
    ]


@check(
    "get_own_mask",
    public=True,
    expected=[
        [True, True, False, False, False, True],
        [True, True, True, False, False, False],
        [False, False, True, False, False, False],
    ],
)
def worked_own_mask(student, rng):
    """Own, tool, own; a row that is all own, then padding; a row that the tool begins"""
    turns = [
        [([30, 32], True), ([31, 33, 201], False), ([2], True)],
        [([35, 28, 2], True)],
        [([31, 201], False), ([2], True)],
    ]
    return student.get_own_mask(turns)


@check("get_own_mask", public=True, points=2, seeds=3, expected=own_mask_by_loops)
def masks_of_random_turns(student, rng):
    """Any number of turns per row, in any order, some empty; ids of both sides; turns that recur"""
    whole = draw_turns(rng)
    whole[rng.integer(0, 6)] = [([1, 2, 2, 0], True), ([2, 0], False), ([0, 2], True)] * 2
    return student.get_own_mask(whole)


@check("get_own_mask", seeds=2, expected=own_mask_by_loops)
def turns_one_after_another(student, rng):
    """Two turns in a row by the same side; a single row; a longest row that is all the tool's"""
    n = rng.integers(1, 4, 6).tolist()
    rows = [
        [([3] * n[0], True), ([4] * n[1], True), ([5] * n[2], False), ([6] * n[3], False)],
        [([3] * n[4], False), ([], True), ([4] * n[5], False), ([5], True)],
        [([9] * 20, False)],
    ]
    return {
        "three rows": student.get_own_mask(rows),
        "the first alone": student.get_own_mask(rows[:1]),
        "the last alone": student.get_own_mask(rows[2:]),
    }


@check("get_own_mask", expected=own_mask_by_loops, tier="hardening")
def rows_without_a_token(student, rng):
    """Rows with no turns, or only empty ones, next to others and on their own"""
    rows = [[], [([], True)], [([], False), ([], True)]]
    return {
        "beside others": student.get_own_mask([rows[0], *draw_turns(rng), *rows]),
        "by themselves": student.get_own_mask(rows),
        "one row": student.get_own_mask([[]]),
    }


@check("get_own_mask", expected=own_mask_by_loops, tier="hardening")
def turns_afterwards(student, rng):
    """With no rows, a ValueError names turns; the turns are left unchanged"""
    turns = draw_turns(rng)
    found = {"no row": error_of("turns", student.get_own_mask, [])}
    found["the mask"] = student.get_own_mask(turns)
    return found | {"the turns": [[[*ids, -1 - own] for ids, own in row] for row in turns]}


# --- sample_in_turns ----------------------------------------------------------------------------

SYMBOLS = "<>0123456789*+=A:\n."
OFTEN = {">": 1.5, ".": 0.7, "<": 1.0}


def reply(turn):
    """Answer every turn, in 1 to 6 tokens that tell turns apart."""
    return f"={len(turn)}{turn[: len(turn) % 4].strip()}\n"


def describe(turns):
    """All that a Turns holds."""
    return {
        "the ids": turns.input_ids,
        "the attention mask": turns.attention_mask,
        "prompt_len": turns.prompt_len,
        "the own mask": turns.own_mask,
        "the completion mask": turns.completion_mask,
        "the log-probs": turns.logprobs,
        "texts": list(turns.texts),
        "call_ends": [list(ends) for ends in turns.call_ends],
        "finished": turns.finished,
    }


def draw_prompts(rng, n=3):
    """Prompts of different lengths, in any order, one of them twice."""
    prompts = ["A", f"Q: {rng.integer(10, 100)}*{rng.integer(10, 100)}\n", "<1", "=7\n"]
    prompts = [prompts[i] for i in rng.permutation(4)[:n].tolist()]
    return [*prompts, prompts[0]]


def sample(student, rng, tool=reply, group_size=2, prompts=None, model=None, **limits):
    model = model or make_writer(rng, SYMBOLS, OFTEN)
    prompts = prompts or draw_prompts(rng)
    generator = rng.new_generator()
    return describe(
        student.sample_in_turns(model, prompts, group_size, tool, **limits, generator=generator)
    )


@check(
    "sample_in_turns",
    public=True,
    expected={
        "texts": ["<2*3>=6\nA: 6", "A: 1", "<1+1>=2\n<1+1>=2\n<1+1>"],
        "the own mask": [
            [True] * 5 + [False] * 3 + [True] * 5 + [False] * 8,
            [True] * 5 + [False] * 16,
            ([True] * 5 + [False] * 3) * 2 + [True] * 5,
        ],
        "call_ends": [[4], [], [4, 12]],
        "finished": [True, True, False],
    },
)
def worked_turns(student, rng):
    """A model that calls, one that doesn't, and one that makes a call too many"""
    scripts = ["Q: 2*3\n<2*3>[=6\n]A: 6", "Q: 1\nA: 1", "Q: 1+1\n" + "<1+1>[=2\n]" * 3 + "A: 2"]
    # A ScriptModel writes what its script has next, and an eos at its end. What is in brackets it
    # reads, but doesn't write.
    model, prompts = ScriptModel(*scripts), ["Q: 2*3\n", "Q: 1\n", "Q: 1+1\n"]
    tool = {"<2*3>": "=6\n", "<1+1>": "=2\n"}.get
    turns = student.sample_in_turns(model, prompts, 1, tool, max_calls=2)
    return {
        "texts": turns.texts,
        "the own mask": turns.own_mask,
        "call_ends": turns.call_ends,
        "finished": turns.finished,
    }


@check(
    "sample_in_turns",
    public=True,
    points=3,
    seeds=2,
    expected=turns_by_plain_calls,
    float64=False,
)
def turns_of_random_writers(student, rng):
    """Random models that call often, token for token against plain calls of the model"""
    # The tool is `reply`: it says something else to every turn.
    return sample(student, rng, max_new_tokens=24)


@check("sample_in_turns", points=2, expected=turns_by_plain_calls, float64=False)
def numbers_of_calls(student, rng):
    """No call allowed, one, three, and the default of two"""
    model, prompts = make_writer(rng, SYMBOLS, OFTEN | {".": -1.0, ">": 2.0}), draw_prompts(rng, 2)
    limits = {"max_new_tokens": 20, "model": model, "prompts": prompts}
    found = {n: sample(student, rng, max_calls=n, **limits) for n in (0, 1, 3)}
    found = {f"max_calls {n}": value for n, value in found.items()}
    return found | {"by default": sample(student, rng, **limits)}


@check("sample_in_turns", points=2, expected=turns_by_plain_calls, float64=False)
def numbers_of_tokens(student, rng):
    """Budgets of one to eight tokens, and the default of 40: an answer is cut off at the end"""
    model, prompts = make_writer(rng, SYMBOLS, OFTEN | {".": -2.0, ">": 2.0}), draw_prompts(rng, 2)
    found = {
        f"max_new_tokens {n}": sample(
            student, rng, max_new_tokens=n, model=model, prompts=prompts, group_size=3
        )
        for n in (1, 2, 3, 5, 8)
    }
    return found | {"by default": sample(student, rng, model=model, prompts=prompts[:1])}


@check("sample_in_turns", points=2, seeds=2, expected=turns_by_plain_calls, float64=False)
def what_the_tool_is_given(student, rng):
    """The tool gets one turn, ">" included: no prompt, no earlier turn, none of its own answers"""
    heard = []

    def listen(turn):
        heard.append(turn)
        return reply(turn)

    options = {"max_calls": 4, "max_new_tokens": 30, "group_size": 3}
    model = make_writer(rng, SYMBOLS, OFTEN | {".": -1.0})
    found = sample(student, rng, tool=listen, model=model, **options)
    return found | {"the turns, sorted,": sorted(heard)}


@check("sample_in_turns", points=2, expected=turns_by_plain_calls, float64=False)
def turns_of_the_tools_model(student, rng):
    """The chapter's own model writes, calls a calculator and reads its answer"""
    model = load_base_model("tools", "cpu", torch.float64)
    a, b = rng.integer(10, 100), rng.integer(10, 100)
    prompts = [f"Q: {a}*{b}\n<", f"Q: {a}+{b}\n", f"Q: {b}*7\n<{b}"]

    def calculate(turn):
        digits = [character for character in turn if character in "0123456789"]
        return f"={''.join(reversed(digits))}\n"

    return sample(student, rng, calculate, prompts=prompts, model=model, max_new_tokens=20)


@check("sample_in_turns", expected=turns_by_plain_calls, float64=False, tier="hardening")
def answers_of_all_kinds(student, rng):
    """Answers that contain ">" or an eos, are empty, or are longer than the space that is left"""
    answers = ["", "=1>2\n", "=3<eos>4\n", "film " * 30, "<1+1>"]
    model = make_writer(rng, SYMBOLS, OFTEN | {".": -1.0, ">": 2.0})
    limits = {"max_calls": 3, "max_new_tokens": 16, "model": model, "prompts": draw_prompts(rng, 2)}
    return {
        f"after {answer[:8]!r}": sample(student, rng, lambda _, said=answer: said, **limits)
        for answer in answers
    }


@check("sample_in_turns", seeds=2, expected=turns_by_plain_calls, float64=False, tier="hardening")
def tokens_that_a_text_hides(student, rng):
    """A pad or a bos that the policy draws ends nothing; tokens stay those that were drawn"""
    symbols = ["<", ">", ".", " ", "A", "<pad>", "<bos>"]  # " A" is one token, too
    model = make_writer(rng, symbols, {".": -2.0, "A": 2.0, " ": 2.0})

    def answer(turn):
        return reply(turn.replace("<pad>", "").replace("<bos>", ""))

    return sample(student, rng, answer, 4, max_calls=3, max_new_tokens=24, model=model)


@check("sample_in_turns", expected=turns_by_plain_calls, float64=False, tier="hardening")
def rows_do_not_depend_on_others(student, rng):
    """A prompt draws the same completion alone and among others"""
    model, seed = make_writer(rng, SYMBOLS, OFTEN), rng.integer(0, 10**6)
    found = {}
    for name, prompts in (("alone", ["A"]), ("among others", ["A", "Q: 12+3\n", "=7"])):
        generator = torch.Generator().manual_seed(seed)
        turns = student.sample_in_turns(model, prompts, 1, reply, 3, 16, generator)
        found[name] = describe(turns)
    torch.manual_seed(seed)
    turns = student.sample_in_turns(model, ["A", "=7"], 2, reply, max_new_tokens=12)
    return found | {"without a generator": describe(turns)}


@check("sample_in_turns", expected=turns_by_plain_calls, float64=False, tier="hardening")
def ends_of_other_tokenizers(student, rng):
    """A second end token, and a tokenizer without a pad token"""
    model = make_writer(rng, SYMBOLS, OFTEN)
    prompts = ["A", "Q: 1\n"]
    model.tokenizer.pad_token = None
    found = {"no pad token": sample(student, rng, model=model, prompts=prompts, max_new_tokens=12)}
    config = SimpleNamespace(eos_token_id=[EOS, get_id("\n")])
    model.original_model = SimpleNamespace(generation_config=config)
    found["two ends"] = sample(student, rng, model=model, prompts=prompts, max_new_tokens=12)
    return found


def _reads_once(observed, reference):
    if observed["n_calls"] > observed["steps"]:
        return "the model was called more often than there are steps: all rows share one loop"
    if observed["n_read"] > observed["at most"]:
        return "positions are read more than once: all rows share one cache"
    if not torch.equal(observed["the ids"], reference["the ids"]):
        return "the ids are not those of the uniform numbers"
    return None


@check("sample_in_turns", holds=_reads_once, float64=False, tier="hardening")
def one_loop_and_one_cache(student, rng):
    """One call of the model per step for all rows, and no position read twice"""
    model = make_writer(rng, SYMBOLS, OFTEN | {".": -3.0, ">": 0.5})
    prompts, steps = draw_prompts(rng), 16
    turns = student.sample_in_turns(
        model, prompts, 2, reply, max_new_tokens=steps, generator=rng.new_generator()
    )
    return {
        "the ids": turns.input_ids,
        "n_calls": model.n_calls,
        "n_read": model.n_read,
        "steps": steps,
        "at most": 2 * len(prompts) * (turns.prompt_len + steps),
    }


@check("sample_in_turns", expected=turns_by_plain_calls, float64=False, tier="hardening")
def sampling_that_is_refused(student, rng):
    """A ValueError names a bad argument; an error in the tool comes through"""
    model, f = make_writer(rng, SYMBOLS, {">": 9.0}), student.sample_in_turns
    long = ["1" * 120]
    found = {
        "group_size 0": error_of("group_size", f, model, ["A"], 0, reply),
        "group_size -1": error_of("group_size", f, model, ["A"], -1, reply),
        "max_calls -1": error_of("max_calls", f, model, ["A"], 1, reply, max_calls=-1),
        "no prompt": error_of("prompts", f, model, [], 2, reply),
        "too long": error_of("prompts", f, model, long, 1, reply, max_new_tokens=20),
    }

    def fail(turn):
        raise KeyError(turn)

    try:
        f(model, ["A"], 3, fail)
        found["a tool that raises"] = "no error"
    except KeyError as error:
        found["a tool that raises"] = f"KeyError, after a {str(error)[-2:]}"
    finally:
        found["gradients afterwards"] = torch.is_grad_enabled()
    return found | {"and then": sample(student, rng, max_new_tokens=6, model=model)}


@check("sample_in_turns", expected=turns_by_plain_calls, float64=False, tier="hardening")
def nothing_to_differentiate(student, rng):
    """The log-probs carry no gradient; the prompts are left unchanged"""
    prompts = draw_prompts(rng)
    model = make_writer(rng, SYMBOLS, OFTEN)
    turns = student.sample_in_turns(model, prompts, 1, reply, 2, 8, rng.new_generator())
    return {
        "the log-probs": turns.logprobs,
        "a gradient": turns.logprobs.requires_grad,
        "the prompts": prompts,
    }


# --- reward_fn_priced ---------------------------------------------------------------------------


@check("reward_fn_priced", public=True, expected=[1.0, 0.75, -0.25, 0.5, -0.5, 0.0])
def worked_rewards(student, rng):
    """Right; right with a call; only the tool said it; two calls, right and wrong; more"""
    samples = ["A: 6", "<2*3>=6\nA: 6", "<2*3>=6", "<2*>=?\n<2*3>=6\nA: 6", "<>=?\n>=?\nA: 5"]
    return student.reward_fn_priced([*samples, "A: 6 or 7"], ["6"] * 6, price=0.25)


def draw_texts(rng):
    """Texts of every kind, and their answers: what is right, what the tool wrote, what is near."""
    a, b = rng.integer(2, 100), rng.integer(2, 100)
    right, call, said = str(a * b), f"<{a}*{b}>", f"={a * b}\n"
    texts = [f"A: {right}", f"{call}{said}A: {right}", f"{call}{said}", f"{call}{said[:-1]}"]
    texts += [f"<{a}*>=?\nA: {right}", f"<{a}*>=?\n{call}{said}A: {right}", f"{call}{said}{call}"]
    texts += [f"A: {right}\n", f"A: {right}\n\n", f"A: {right}\nA: {right}0", f"A: 0\nA: {right}"]
    texts += [f"A: {right}0", f"A: 0{right}", f"A: -{right}", f"A: {right} ", f" A: {right}"]
    texts += [f"A:{right}", f"A {right}", right, f"a: {right}", f"B: {right}", f"AA: {right}"]
    texts += [f"A: {right[:-1]}", "A: ", "", "\n", ">", ">>>>>\n", f">A: {right}", f"A: {right}>"]
    texts += [f"{call}=?\nA: {right}", f"A: {right}\n{call}", f"{call}{said}A: {a + b}"]
    texts += [f"7\rA: {right}", f"7\x0cA: {right}", f"7\u2028A: {right}"]  # no newlines
    order = rng.permutation(len(texts)).tolist()
    return [texts[i] for i in order], [right] * len(texts)


@check("reward_fn_priced", public=True, points=2, seeds=2, expected=priced_by_reading)
def rewards_of_many_texts(student, rng):
    """Right, wrong and nearly right texts, with any number of calls"""
    samples, answers = draw_texts(rng)
    more, others = draw_texts(rng)
    price = float(rng.uniform(1, low=0.05, high=0.7))
    return student.reward_fn_priced(samples + more, answers + others, price)


@check("reward_fn_priced", seeds=2, expected=priced_by_reading)
def prices_of_many_kinds(student, rng):
    """No price by default; prices of 0, of 1, and of more than a right answer earns"""
    samples, answers = draw_texts(rng)
    found = {"by default": student.reward_fn_priced(samples, answers)}
    return found | {
        f"price {price}": student.reward_fn_priced(samples, answers, price=price)
        for price in (0, 1, 1.5)
    }


@check("reward_fn_priced", seeds=2, expected=priced_by_reading)
def answers_that_are_no_numbers(student, rng):
    """Answers that are words, look like patterns, or are empty"""
    answers = ["yes", ".*", "a b", "", "(", "x > y", "1,000", "\\d", str(rng.integer(0, 10**6))]
    samples = [f"A: {answer}" for answer in answers] + ["A: 7", "A: a", "A: ab", "A: YES"]
    answers += ["07", ".*", "a b", "yes"]
    order = rng.permutation(len(samples)).tolist()
    return student.reward_fn_priced([samples[i] for i in order], [answers[i] for i in order], 0.1)


@check("reward_fn_priced", expected=priced_by_reading, tier="hardening")
def as_many_answers_as_samples(student, rng):
    """One answer too few or too many is a ValueError; empty lists give an empty tensor"""
    samples, answers = draw_texts(rng)
    f, before = student.reward_fn_priced, list(samples)
    return {
        "too few": error_of("", f, samples, answers[:-1]),
        "too many": error_of("", f, samples[:-1], answers),
        "none": error_of("", f, samples, []),
        "nothing at all": f([], []),
        "rewards": f(samples, answers, 0.3),
        "the samples as they were": samples == before,
    }


# --- calc_tool_objective ------------------------------------------------------------------------


def draw_own_mask(rng, rows=6, completion=9):
    """Own tokens with gaps; a full row, one token, an empty row."""
    written = ragged_mask(rng, rows, completion)
    own = written & (rng.uniform(rows, completion) < 0.6)
    lengths = written.sum(-1, keepdim=True)
    return torch.where((lengths == 1) | (lengths == completion), written, own)


def objective(student, rng, own_mask, fill=NAN, **options):
    """The objective of random log-probs, and its gradients."""
    return value_and_gradients(
        lambda **inputs: student.calc_tool_objective(**inputs, own_mask=own_mask, **options),
        **ragged_logprobs(rng, own_mask, fill),
        advantages=one_zero(rng, own_mask),
    )


@check("calc_tool_objective", public=True, expected=-0.15)
def worked_objective(student, rng):
    """Ratios 2 and 1/2, advantage 2: 2 (1.2 + 0.5) / 2; ratio 2, advantage -1: -2; their mean"""
    # The tool wrote two tokens in the first row; the second has one token, and padding.
    new = rng.tensor([[0.4, NAN, NAN, 0.2], [0.4, NAN, NAN, NAN]]).log()
    old = rng.tensor([[0.2, NAN, NAN, 0.4], [0.2, NAN, NAN, NAN]]).log()
    return student.calc_tool_objective(new, old, rng.tensor([2.0, -1.0]), new.isfinite())


@check("calc_tool_objective", public=True, points=3, seeds=3, expected=tool_objective_by_loops)
def objectives_and_gradients(student, rng):
    """Random completions with gaps of NaN where the tool wrote, and their gradients"""
    return objective(student, rng, draw_own_mask(rng))


@check("calc_tool_objective", points=2, seeds=2, expected=tool_objective_by_loops)
def tokens_of_nobody(student, rng):
    """Tool tokens whose log-probs look like any others: still left out"""
    own, found = draw_own_mask(rng), {}
    for fill in (0.0, -1.0, -30.0):
        found[f"filled with {fill}"] = objective(student, rng, own, fill)
    pair = ragged_logprobs(rng, torch.ones_like(own))
    args = (*pair.values(), rng.normal(len(own)), own)
    return found | {"the policy's own": student.calc_tool_objective(*args)}


@check("calc_tool_objective", points=2, seeds=2, expected=tool_objective_by_loops)
def objectives_with_other_clips(student, rng):
    """Other values of clip_coef, by name and by position, and the default of 0.2"""
    own = draw_own_mask(rng)
    found = {f"clip_coef {c}": objective(student, rng, own, clip_coef=c) for c in (0.05, 0.2, 0.5)}
    args = (*ragged_logprobs(rng, own).values(), rng.normal(len(own)), own)
    f = student.calc_tool_objective
    return found | {"by position": f(*args, 0.1), "by default": f(*args)}


@check("calc_tool_objective", points=2, seeds=2, expected=tool_objective_by_loops)
def objectives_of_every_shape(student, rng):
    """One row, one token, as many rows as tokens, no own token at all; inf where the tool wrote"""
    return {
        name: objective(student, rng, mask, INF) for name, mask in masks_of_many_shapes(rng).items()
    }


@check("calc_tool_objective", expected=tool_objective_by_loops, tier="hardening")
def fills_of_all_kinds(student, rng):
    """NaN, inf and -inf side by side on the tool's tokens"""
    own = draw_own_mask(rng)
    fills = rng.tensor([NAN, INF, -INF])[rng.integers(0, 3, *own.shape)]
    pair = {name: torch.where(own, x, fills) for name, x in ragged_logprobs(rng, own).items()}
    return value_and_gradients(
        lambda **inputs: student.calc_tool_objective(**inputs, own_mask=own),
        **pair,
        advantages=one_zero(rng, own),
    )


@check("calc_tool_objective", expected=tool_objective_by_loops, tier="hardening")
def ratios_far_from_one(student, rng):
    """Ratios up to e^30: where an advantage is negative, nothing limits them"""
    own = draw_own_mask(rng)
    pair = ragged_logprobs(rng, own)
    steps = rng.uniform(*own.shape, low=-1.0)
    return {
        f"up to e^{limit}": value_and_gradients(
            lambda **inputs: student.calc_tool_objective(**inputs, own_mask=own),
            logprobs=pair["old_logprobs"] + limit * steps,
            old_logprobs=pair["old_logprobs"],
            advantages=-rng.uniform(len(own), low=0.5),
        )
        for limit in (6, 30)
    }


@check("calc_tool_objective", expected=tool_objective_by_loops, tier="hardening")
def batches_with_empty_rows(student, rng):
    """Completions with no token of their own count as 0, whether half of them or all"""
    own = draw_own_mask(rng, 8)
    own[rng.permutation(8)[:4]] = False
    found = {"half": objective(student, rng, own)}
    return found | {"all": objective(student, rng, torch.zeros_like(own))}


@check("calc_tool_objective", expected=tool_objective_by_loops, tier="hardening")
def arguments_of_the_objective(student, rng):
    """The log-probs, advantages and mask are left unchanged"""
    own = draw_own_mask(rng)
    pair, advantages = ragged_logprobs(rng, own).values(), one_zero(rng, own)
    return with_inputs_after(student.calc_tool_objective, *pair, advantages, own.clone())


# --- calc_call_value ----------------------------------------------------------------------------


@check("calc_call_value", public=True, expected=[0.5, -0.25, -0.125])
def worked_values(student, rng):
    """Price 1/8: 3/4 - 1/8 - 1/8 pays; 3/4 - 7/8 - 1/8 doesn't; 1/2 - 1/2 - 1/8 neither"""
    direct, called = rng.tensor([0.125, 0.875, 0.5]), rng.tensor([0.75, 0.75, 0.5])
    return student.calc_call_value(direct, called, 0.125)


@check("calc_call_value", public=True, points=2, seeds=2, expected=call_value_by_outcomes)
def values_by_outcomes(student, rng):
    """The mean reward with a call, over right and wrong, less the mean reward without one"""
    found = {}
    for price in (0, 0.4, float(rng.uniform(1, high=2.0))):
        p_direct, p_called = rng.uniform(2, 12)
        p_direct[:2], p_called[1:3], p_called[3:5] = 0.0, 1.0, 0.0
        found[f"price {price}"] = student.calc_call_value(p_direct, p_called, price)
    return found


@check("calc_call_value", expected=call_value_by_outcomes)
def prices_per_question(student, rng):
    """A price for each question; one price as a scalar tensor; a single question"""
    p_direct, p_called, prices = rng.uniform(3, 9)
    f = student.calc_call_value
    return {
        "nine prices": f(p_direct, p_called, prices),
        "a tensor": f(p_direct, p_called, prices[3]),
        "one question": f(p_direct[:1], p_called[:1], 0.3),
    }


@check("calc_call_value", expected=call_value_by_outcomes, tier="hardening")
def probabilities_afterwards(student, rng):
    """No questions at all; the probabilities and prices are left unchanged"""
    empty = rng.uniform(0)
    found = with_inputs_after(student.calc_call_value, *rng.uniform(3, 6))
    return found | {"no question": student.calc_call_value(empty, empty, 0.4)}


# --- measure_exactly ----------------------------------------------------------------------------


@check(
    "measure_exactly",
    public=True,
    expected={"call": [0.25], "right_direct": [0.2], "exact_call": [0.028], "copied": [0.12]},
)
def worked_probabilities(student, rng):
    """P("<") = 1/4; ": 6" and eos 1/2 · 0.8 · 1/2; "2*3>" 0.7 · 0.2 · 0.4 · 1/2; 0.6 · 0.2"""
    # What comes next depends on the last symbol alone; "." is the eos.
    chain = {"\n": {"<": 0.25, "A": 0.6, "Q": 0.15}, "A": {":": 0.5, "A": 0.5}, ":": {" ": 1.0}}
    chain |= {" ": {"6": 0.8, "7": 0.2}, "6": {".": 0.5, "6": 0.5}, "<": {"2": 0.7, "3": 0.3}}
    chain |= {"2": {"*": 0.2, "2": 0.8}, "*": {"3": 0.4, "2": 0.6}, "3": {"\n": 0.5, ">": 0.5}}
    return in_float64(student.measure_exactly(make_chain(chain), ["2*3"]))


ASKED = "<>0123456789*+=A: \n.Q?"


def draw_questions(rng, n=5, digits=4):
    """Sums and products of numbers of different lengths."""
    draws = [(draw_number(rng, rng.integer(1, digits)), draw_number(rng, 1 + i)) for i in range(n)]
    return [f"{a}{'+*'[rng.integer(0, 2)]}{b}" for a, b in draws] + ["2*3", "12+34"]


def in_float64(found):
    """What was found of a model in float64, which may be returned in float32 as well."""
    if isinstance(found, dict):
        return {name: in_float64(values) for name, values in found.items()}
    return found.double() if isinstance(found, torch.Tensor) else found


def measure(student, model, questions):
    """The probabilities, and their logs, as most are small."""
    found = in_float64(student.measure_exactly(model, questions))
    return found | {f"the log of {name}": values.log() for name, values in found.items()}


@check(
    "measure_exactly",
    public=True,
    points=3,
    seeds=2,
    expected=measured_token_by_token,
    float64=False,
)
def probabilities_of_random_models(student, rng):
    """Random models, numbers of different lengths: products of single tokens' probabilities"""
    model = make_writer(rng, ASKED, {})
    return measure(student, model, draw_questions(rng))


@check("measure_exactly", points=2, expected=measured_token_by_token, float64=False)
def probabilities_of_one_question(student, rng):
    """A question on its own, and the same one padded to the length of a longer one"""
    model, (one, *others) = make_writer(rng, ASKED, {}), draw_questions(rng, 4)
    return {
        "alone": measure(student, model, [one]),
        "among others": measure(student, model, [one, *others[:3], "99999*99999"]),
    }


@check(
    "measure_exactly",
    points=2,
    expected=measured_token_by_token,
    float64=False,
    rtol=1e-3,
)
def probabilities_of_the_tools_model(student, rng):
    """The chapter's model on sums and products, against plain calls without padding"""
    model = load_base_model("tools", "cpu", torch.float64)
    a, b, c = (str(rng.integer(10, 100)) for _ in range(3))
    return measure(student, model, [f"{a}*{b}", f"{a}+{c}", f"7*{c}", f"1{a}+2{b}"])


@check("measure_exactly", expected=measured_token_by_token, float64=False, tier="hardening")
def probabilities_that_are_tiny(student, rng):
    """Probabilities of 1e-5 to 1e-20, which no sample would show"""
    rare = {"<": -8.0, "A": -6.0, ">": -9.0, ".": -7.0}
    return measure(student, make_writer(rng, ASKED, rare), draw_questions(rng))


@check("measure_exactly", expected=measured_token_by_token, float64=False, tier="hardening")
def measuring_leaves_no_trace(student, rng):
    """No gradient is recorded; the questions are left unchanged"""
    model, questions = make_writer(rng, ASKED, {}), draw_questions(rng, 3)
    found = student.measure_exactly(model, questions)
    return in_float64(found) | {
        "the questions": questions,
        "gradients": [found[name].requires_grad for name in sorted(found)],
        "gradients afterwards": torch.is_grad_enabled(),
    }


# --- compare_within_kinds -----------------------------------------------------------------------


def draw_answers(rng, sizes, ties=False):
    """P(right), P(call) and the kind of so many questions of each kind, mixed."""
    kinds = [name for name, size in sizes.items() for _ in range(size)]
    kinds = [kinds[i] for i in rng.permutation(len(kinds)).tolist()]
    p_right, p_call = rng.uniform(2, len(kinds))
    if ties:
        p_right = (p_right * 3).floor() / 4
    return p_right, p_call, kinds


@check(
    "compare_within_kinds",
    public=True,
    expected={"2x2": [0.875, 0.75, 0.25], "sum": [0.0625, 0.125, 0.5]},
)
def worked_thirds(student, rng):
    """Products by P(right), worst first: 1 and 3/4, then 3/4, then 1/4; sums: one in each third"""
    p_right = rng.tensor([0.3, 0.8, 0.1, 0.4, 0.9, 0.2, 0.7])
    p_call = rng.tensor([0.75, 0.125, 1.0, 0.25, 0.5, 0.75, 0.0625])
    kinds = ["2x2", "sum", "2x2", "2x2", "sum", "2x2", "sum"]
    return student.compare_within_kinds(p_right, p_call, kinds)


def ordered(found):
    """The parts, and the order of the kinds, which a dict's comparison does not see."""
    return {"the kinds": list(found)} | {f"of {kind}": parts for kind, parts in found.items()}


@check("compare_within_kinds", public=True, points=3, seeds=3, expected=parts_by_sorting)
def thirds_of_mixed_kinds(student, rng):
    """Kinds of 3 to 17 questions, mixed: thirds within each kind, the larger parts first"""
    sizes = {name: rng.integer(3, 18) for name in ("2-digit sum", "1x2 product", "2x2 product", "")}
    return ordered(student.compare_within_kinds(*draw_answers(rng, sizes)))


@check("compare_within_kinds", points=2, seeds=2, expected=parts_by_sorting)
def other_numbers_of_parts(student, rng):
    """One, two, four and seven parts; as many parts as questions; a single kind"""
    sizes = {"b": 7, "a": rng.integer(8, 20), "c": 11}
    answers = draw_answers(rng, sizes)
    found = {f"n {n}": ordered(student.compare_within_kinds(*answers, n=n)) for n in (1, 2, 4, 7)}
    alone = draw_answers(rng, {"alone": 10})
    return found | {"one kind, n 4": ordered(student.compare_within_kinds(*alone, 4))}


@check("compare_within_kinds", points=2, seeds=2, expected=parts_by_sorting, tier="hardening")
def questions_known_alike(student, rng):
    """Questions with the same P(right) stay in the order in which they came"""
    answers = draw_answers(rng, {"x": 40, "y": 7, "z": 100}, ties=True)
    found = {"few values": student.compare_within_kinds(*answers)}
    alike = (torch.full_like(answers[0], 0.5), *answers[1:])
    return found | {"one value": student.compare_within_kinds(*alike, n=5)}


@check("compare_within_kinds", expected=parts_by_sorting, tier="hardening")
def too_few_questions(student, rng):
    """A ValueError names n if it is below 1, and kinds if one has fewer than n questions"""
    answers, f = draw_answers(rng, {"many": 9, "few": 2}), student.compare_within_kinds
    found = {f"n {n}": error_of("n", f, *answers, n=n) for n in (0, -1)}
    for n in (3, 10):
        said = [error_of(name, f, *answers, n=n) for name in ("kind", "n")]  # either may be blamed
        found[f"n {n}"] = max(said, key=lambda one: one.endswith("names it"))
    return found | {"two parts": f(*answers, n=2)}


@check("compare_within_kinds", expected=parts_by_sorting, tier="hardening")
def measurements_afterwards(student, rng):
    """No questions, no kinds; the probabilities and kinds are left unchanged"""
    p_right, p_call, kinds = draw_answers(rng, {"x": 5, "y": 6})
    found = with_inputs_after(student.compare_within_kinds, p_right, p_call, kinds)
    nothing = student.compare_within_kinds(rng.uniform(0), rng.uniform(0), [])
    return found | {"the kinds": kinds, "no question": nothing}
