"""Checks of chapter 10: tools and turns."""

from types import SimpleNamespace

import torch
from tokenizers.processors import TemplateProcessing

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


@check("run_calculator", points=2, expected=calculator_in_decimals, tier="hardening")
def numbers_that_are_none(student, rng):
    """Spaces, signs, points, other alphabets' digits, newlines, Python code: all get "=?" """
    a, b = draw_number(rng, 2), draw_number(rng, 2)
    numbers = [f" {a}", f"{a} ", f"-{a}", f"+{a}", f"{a}.0", f"{a[0]}_{a[1]}", "0x1f", "1e3", "²"]
    numbers += ["٢٣", "२३", "２３", "x", f"{a}\n", f"\t{a}", f"{a},5", "inf", "True"]
    turns = [f"<{x}*{b}>" for x in numbers] + [f"<{b}+{x}>" for x in numbers]
    code = ["__import__('os').getpid()", f"int('{a}')*{b}", f"[{a}]*{b}", f"({a})+({b})"]
    code += ["1/0", "raise", f"'{a}'+'{b}'", f"{a}+{b};{a}", f"{a}*{b}#", "9**9**9", f"{a}+{b}if 1"]
    turns += [f"<{each}>" for each in code]
    turns += [f"<{a}×{b}>", f"<{a}*{b}> ", f" <{a}*{b}>", f"<{a}*{b}>\r", f"\n<{a}+{b}>"]
    return answers_to(student, [*turns, f"<{a}*{b}>"])


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


@check("get_own_mask", public=True, points=3, seeds=3, expected=own_mask_by_loops)
def masks_of_random_turns(student, rng):
    """Any number of turns per row, in any order, some empty; ids of both sides; turns that recur"""
    whole = draw_turns(rng)
    whole[rng.integer(0, 6)] = [([1, 2, 2, 0], True), ([2, 0], False), ([0, 2], True)] * 2
    n = rng.integers(1, 4, 2).tolist()
    twice = [([3] * n[0], True), ([4] * n[1], True), ([5], False), ([6, 0], False)]
    return {
        "many rows": student.get_own_mask(whole),
        "two in a row": student.get_own_mask([twice]),
        "the tool's is the longest": student.get_own_mask([[([9] * 20, False)], twice]),
    }


@check("get_own_mask", points=2, expected=own_mask_by_loops, tier="hardening")
def rows_without_a_token(student, rng):
    """Rows with no turns, or only empty ones; no rows: a ValueError; the turns stay unchanged"""
    rows, turns = [[], [([], True)], [([], False), ([], True)]], draw_turns(rng)
    return {
        "no row": error_of("turns", student.get_own_mask, []),
        "beside others": student.get_own_mask([rows[0], *turns, *rows]),
        "by themselves": student.get_own_mask(rows),
        "one row": student.get_own_mask([[]]),
        "the turns": [[[*ids, -1 - own] for ids, own in row] for row in turns],
    }


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


def put_bos_before(tokenizer):
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    template = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.backend_tokenizer.post_processor = template


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


@check("sample_in_turns", points=4, expected=turns_by_plain_calls, float64=False)
def numbers_of_calls_and_tokens(student, rng):
    """No call allowed, one, three; budgets of one to eight tokens; both defaults"""
    model, prompts = make_writer(rng, SYMBOLS, OFTEN | {".": -2.0, ">": 2.0}), draw_prompts(rng, 2)
    options = {"model": model, "prompts": prompts}
    found = {
        f"max_calls {n}": sample(student, rng, max_calls=n, max_new_tokens=20, **options)
        for n in (0, 1, 3)
    }
    for n in (1, 2, 3, 5, 8):
        limits = {"max_new_tokens": n, "group_size": 3}
        found[f"max_new_tokens {n}"] = sample(student, rng, **limits, **options)
    return found | {"by default": sample(student, rng, model=model, prompts=prompts[:1])}


@check("sample_in_turns", points=4, seeds=2, expected=turns_by_plain_calls, float64=False)
def what_the_tool_is_given(student, rng):
    """The tool gets one turn, ">" included: no prompt, no earlier turn, none of its own answers

    The tokenizer puts a bos before every text, as many do: an answer is no text of its own.
    """
    heard = []

    def listen(turn):
        heard.append(turn)
        return reply(turn)

    options = {"max_calls": 4, "max_new_tokens": 30, "group_size": 3}
    model = make_writer(rng, SYMBOLS, OFTEN | {".": -1.0})
    put_bos_before(model.tokenizer)
    found = sample(student, rng, tool=listen, model=model, **options)
    return found | {"the turns, sorted,": sorted(heard)}


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


@check("sample_in_turns", points=2, expected=turns_by_plain_calls, float64=False, tier="hardening")
def ends_of_other_tokenizers(student, rng):
    """A second end token; no pad token; no generator; a prompt alone draws as among others"""
    model, prompts, found = make_writer(rng, SYMBOLS, OFTEN), ["A", "Q: 12+3\n", "=7"], {}
    for n in (1, 3):
        generator = torch.Generator().manual_seed(rng.seed % 1000)
        turns = student.sample_in_turns(model, prompts[:n], 1, reply, 3, 16, generator)
        found[f"{n} prompts"] = describe(turns)
    torch.manual_seed(rng.seed % 1000)
    turns = student.sample_in_turns(model, prompts, 2, reply, max_new_tokens=12)
    found["without a generator"] = describe(turns)
    model.tokenizer.pad_token = None
    options = {"model": model, "prompts": prompts[:2], "max_new_tokens": 12}
    found["no pad token"] = sample(student, rng, **options)
    config = SimpleNamespace(eos_token_id=[EOS, get_id("\n")])
    model.original_model = SimpleNamespace(generation_config=config)
    return found | {"two ends": sample(student, rng, **options)}


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


@check("sample_in_turns", points=2, expected=turns_by_plain_calls, float64=False, tier="hardening")
def sampling_that_is_refused(student, rng):
    """A ValueError names a bad argument; a tool's error comes through; nothing has a gradient"""
    model, f, prompts = make_writer(rng, SYMBOLS, {">": 9.0}), student.sample_in_turns, ["A", "=7"]
    found = {
        "group_size 0": error_of("group_size", f, model, ["A"], 0, reply),
        "group_size -1": error_of("group_size", f, model, ["A"], -1, reply),
        "max_calls -1": error_of("max_calls", f, model, ["A"], 1, reply, max_calls=-1),
        "no prompt": error_of("prompts", f, model, [], 2, reply),
        "too long": error_of("prompts", f, model, ["1" * 120], 1, reply, max_new_tokens=20),
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
    turns = f(model, prompts, 1, reply, 2, 8, rng.new_generator())
    found |= describe(turns) | {"a gradient": turns.logprobs.requires_grad}
    return found | {"the prompts": prompts}


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


@check("reward_fn_priced", points=2, seeds=2, expected=priced_by_reading)
def prices_and_answers_of_many_kinds(student, rng):
    """No price by default, one above a reward; answers that are words, patterns, or empty"""
    samples, answers = draw_texts(rng)
    words = ["yes", ".*", "a b", "", "(", "x > y", "1,000", "\\d", str(rng.integer(0, 10**6))]
    samples += [f"A: {word}" for word in words] + ["A: 7", "A: a", "A: ab", "A: YES"]
    answers += [*words, "07", ".*", "a b", "yes"]
    order = rng.permutation(len(samples)).tolist()
    samples, answers = [samples[i] for i in order], [answers[i] for i in order]
    found = {"by default": student.reward_fn_priced(samples, answers)}
    return found | {
        f"price {price}": student.reward_fn_priced(samples, answers, price=price)
        for price in (0, 1, 1.5)
    }


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


@check("calc_tool_objective", points=4, seeds=2, expected=tool_objective_by_loops)
def objectives_of_every_shape(student, rng):
    """One row, one token, 150 rows, no own token; inf where the tool wrote; other clip_coefs"""
    found = {
        f"{name}": objective(student, rng, m, INF) for name, m in masks_of_many_shapes(rng).items()
    }
    own, f = draw_own_mask(rng), student.calc_tool_objective
    found |= {f"clip_coef {c}": objective(student, rng, own, clip_coef=c) for c in (0.05, 0.5)}
    args = (*ragged_logprobs(rng, own).values(), rng.normal(len(own)), own)
    return found | {"by position": f(*args, 0.1), "by default": f(*args)}


@check("calc_tool_objective", points=3, expected=tool_objective_by_loops, tier="hardening")
def fills_of_all_kinds(student, rng):
    """NaN, inf and -inf side by side, and half of the rows empty; arguments are left unchanged"""
    own = draw_own_mask(rng, 8)
    own[rng.permutation(8)[:4]] = False
    fills = rng.tensor([NAN, INF, -INF])[rng.integers(0, 3, *own.shape)]
    pair = {name: torch.where(own, x, fills) for name, x in ragged_logprobs(rng, own).items()}
    args, f = pair | {"advantages": one_zero(rng, own)}, student.calc_tool_objective
    found = value_and_gradients(lambda **inputs: f(**inputs, own_mask=own), **args)
    return found | {"inputs": with_inputs_after(f, *args.values(), own.clone())}


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


# --- calc_call_value ----------------------------------------------------------------------------


@check("calc_call_value", public=True, expected=[0.5, -0.25, -0.125])
def worked_values(student, rng):
    """Price 1/8: 3/4 - 1/8 - 1/8 pays; 3/4 - 7/8 - 1/8 doesn't; 1/2 - 1/2 - 1/8 neither"""
    direct, called = rng.tensor([0.125, 0.875, 0.5]), rng.tensor([0.75, 0.75, 0.5])
    return student.calc_call_value(direct, called, 0.125)


@check("calc_call_value", public=True, points=3, seeds=2, expected=call_value_by_outcomes)
def values_by_outcomes(student, rng):
    """The mean reward with a call, over right and wrong, less that without; prices per question"""
    f, found = student.calc_call_value, {}
    prices = rng.uniform(12, high=2.0)
    for price in (0, 0.4, prices[3].item(), prices[4], prices):
        p_direct, p_called = rng.uniform(2, 12)
        p_direct[:2], p_called[1:3], p_called[3:5] = 0.0, 1.0, 0.0
        found[f"price {len(found)}"] = f(p_direct, p_called, price)
    return found | {"one question": f(p_direct[:1], p_called[:1], 0.3)}


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
    points=4,
    seeds=2,
    expected=measured_token_by_token,
    float64=False,
)
def probabilities_of_random_models(student, rng):
    """Random models, numbers of different lengths: products of single tokens' probabilities"""
    model, questions = make_writer(rng, ASKED, {}), draw_questions(rng)
    found = {"alone": measure(student, model, questions[:1])}
    return found | {"among others": measure(student, model, [*questions, "99999*99999"])}


@check("measure_exactly", points=3, expected=measured_token_by_token, float64=False, rtol=1e-3)
def probabilities_of_the_tools_model(student, rng):
    """The chapter's model on sums and products, against plain calls without padding"""
    model = load_base_model("tools", "cpu", torch.float64)
    a, b, c = (str(rng.integer(10, 100)) for _ in range(3))
    return measure(student, model, [f"{a}*{b}", f"{a}+{c}", f"7*{c}", f"1{a}+2{b}"])


@check(
    "measure_exactly", points=2, expected=measured_token_by_token, float64=False, tier="hardening"
)
def probabilities_that_are_tiny(student, rng):
    """Probabilities of 1e-5 to 1e-20; no gradient is recorded; the questions are left unchanged"""
    rare, questions = {"<": -8.0, "A": -6.0, ">": -9.0, ".": -7.0}, draw_questions(rng)
    found = measure(student, make_writer(rng, ASKED, rare), questions)
    return found | {
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


@check("compare_within_kinds", points=2, expected=parts_by_sorting, tier="hardening")
def too_few_questions(student, rng):
    """n below 1, fewer than n questions: a ValueError; no questions at all; arguments unchanged"""
    answers, f = draw_answers(rng, {"many": 9, "few": 2}), student.compare_within_kinds
    found = {f"n {n}": error_of("n", f, *answers, n=n) for n in (0, -1)}
    for n in (3, 10):
        said = [error_of(name, f, *answers, n=n) for name in ("kind", "n")]  # either may be blamed
        found[f"n {n}"] = max(said, key=lambda one: one.endswith("names it"))
    found["no question"] = f(rng.uniform(0), rng.uniform(0), [])
    return found | with_inputs_after(f, *answers, n=2) | {"the kinds": answers[2]}
