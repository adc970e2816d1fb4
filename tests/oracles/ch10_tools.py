"""Chapter 10 by other means: decimal numbers, loops over tokens, plain calls of the model."""

import itertools
import math
from decimal import Context, Decimal
from types import SimpleNamespace

import torch


def calculator_in_decimals(turn):
    """Take the turn apart character by character; add and multiply in decimal numbers."""
    inside = turn[1:-1]
    if len(turn) > 30 or turn[:1] != "<" or turn[-1:] != ">":
        return "=?\n"
    signs = [character for character in inside if character not in "0123456789"]
    if signs not in (["+"], ["*"]):
        return "=?\n"
    a, b = inside.split(signs[0])
    if not (1 <= len(a) <= 9 and 1 <= len(b) <= 9):
        return "=?\n"
    context = Context(prec=40)
    combine = context.add if signs == ["+"] else context.multiply
    return f"={combine(Decimal(a), Decimal(b)):f}\n"


def own_mask_by_loops(turns):
    """Write each row out as a string of signs, and read those."""
    if not turns:
        raise ValueError("turns is empty")
    rows = ["".join("-+"[own] * len(ids) for ids, own in row) for row in turns]
    mask = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.bool)
    for row, column in itertools.product(*map(range, mask.shape)):
        mask[row, column] = rows[row][column : column + 1] == "+"
    return mask


def find_ends(model):
    """The tokens that end a completion."""
    ends = [model.tokenizer.eos_token_id]
    original = getattr(model, "original_model", None)
    named = getattr(getattr(original, "generation_config", None), "eos_token_id", None)
    return ends + (named if isinstance(named, list) else [])


@torch.no_grad()
def turns_by_plain_calls(
    model, prompts, group_size, tool, max_calls=2, max_new_tokens=40, generator=None
):
    """One row after the other; for each token the model reads all that there is."""
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}")
    if max_calls < 0:
        raise ValueError(f"max_calls is {max_calls}")
    if not prompts:
        raise ValueError("prompts is empty")
    tokenizer, ends = model.tokenizer, find_ends(model)
    bos = [tokenizer.bos_token_id]
    begun = [bos + tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    if max(map(len, begun)) + max_new_tokens > model.cfg.n_ctx:
        raise ValueError("prompts are too long")
    begun = [row for row in begun for _ in range(group_size)]
    uniforms = torch.rand(len(begun), max_new_tokens, generator=generator)
    rows = [
        _write(model, row, draws.tolist(), tool, max_calls, ends)
        for row, draws in zip(begun, uniforms, strict=True)
    ]
    width, length = max(map(len, begun)), max(len(row["ids"]) for row in rows)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    ids, attention, own, logprobs = [], [], [], []
    for prompt, row in zip(begun, rows, strict=True):
        before, behind = width - len(prompt), length - len(row["ids"])
        ids.append([pad] * before + prompt + row["ids"] + [pad] * behind)
        attention.append([0] * before + [1] * (len(prompt) + len(row["ids"])) + [0] * behind)
        own.append(row["own"] + [False] * behind)
        logprobs.append(row["logprobs"] + [math.nan] * behind)
    mask = torch.tensor(own)
    return SimpleNamespace(
        input_ids=torch.tensor(ids),
        attention_mask=torch.tensor(attention),
        prompt_len=width,
        completion_mask=mask,
        own_mask=mask,
        completion_ids=torch.tensor(ids)[:, width:],
        logprobs=torch.tensor(logprobs),
        texts=[tokenizer.decode(row["ids"], skip_special_tokens=True) for row in rows],
        call_ends=[row["call_ends"] for row in rows],
        finished=torch.tensor([row["finished"] for row in rows]),
    )


def _write(model, prompt, uniforms, tool, max_calls, ends):
    tokenizer = model.tokenizer
    ids, own, logprobs, call_ends, begins = [], [], [], [], 0
    found = {"ids": ids, "own": own, "logprobs": logprobs, "call_ends": call_ends}
    while len(ids) < len(uniforms):
        probs = model(torch.tensor([prompt + ids]))[0, -1].softmax(-1).tolist()
        sums = list(itertools.accumulate(probs))
        # The uniform number of a step belongs to it, whether or not it was needed.
        token = next(v for v, s in enumerate(sums) if s > uniforms[len(ids)] * sums[-1])
        ids.append(token)
        own.append(True)
        logprobs.append(math.log(probs[token]))
        if token in ends:
            return found | {"finished": True}
        if tokenizer.decode([token]) == ">":
            if len(call_ends) == max_calls:
                break
            call_ends.append(len(ids) - 1)
            said = tool(tokenizer.decode(ids[begins:]))
            answer = tokenizer(said, add_special_tokens=False)["input_ids"]
            answer = answer[: len(uniforms) - len(ids)]
            ids += answer
            own += [False] * len(answer)
            logprobs += [math.nan] * len(answer)
            begins = len(ids)
    return found | {"finished": False}


def priced_by_reading(samples, answers, price=0.0):
    """Walk through each text from its end to the last line break."""
    if len(samples) != len(answers):
        raise ValueError("samples and answers should be as many")
    rewards = []
    for text, answer in zip(samples, answers, strict=True):
        line = "".join(reversed(list(itertools.takewhile(lambda c: c != "\n", reversed(text)))))
        right = 1.0 if line == "A: " + answer else 0.0
        rewards.append(math.fsum([right] + [-price for character in text if character == ">"]))
    return torch.tensor(rewards, dtype=torch.float32)


def tool_objective_by_loops(logprobs, old_logprobs, advantages, own_mask, clip_coef=0.2):
    """Add up token by token; 1 + x - x.item() has the value 1 and the slope of x."""
    total = logprobs.new_zeros(())
    for row, advantage in enumerate(advantages.tolist()):
        terms = []
        for t in own_mask[row].nonzero().flatten().tolist():
            x = logprobs[row, t]
            ratio = math.exp(x.item() - old_logprobs[row, t].item())
            if advantage > 0 and ratio > 1 + clip_coef:
                terms.append((1 + clip_coef) * advantage)
            elif advantage < 0 and ratio < 1 - clip_coef:
                terms.append((1 - clip_coef) * advantage)
            else:
                terms.append(advantage * ratio * (1 + x - x.item()))
        if terms:
            total = total + sum(terms) / len(terms) / len(advantages)
    return total


def call_value_by_outcomes(p_right_direct, p_right_called, price):
    """The mean reward over right and wrong with a call, less that without one."""
    prices = torch.as_tensor(price).expand_as(p_right_direct).tolist()
    found = []
    for direct, called, each in zip(
        p_right_direct.tolist(), p_right_called.tolist(), prices, strict=True
    ):
        with_call = called * (1 - each) + (1 - called) * (0 - each)
        found.append(with_call - (direct * 1 + (1 - direct) * 0))
    return p_right_direct.new_tensor(found)


@torch.no_grad()
def measured_token_by_token(model, questions):
    """Multiply the probabilities of single tokens, each from the text before it alone."""
    tokenizer = model.tokenizer

    def multiply(before, text, ends):
        ids = tokenizer(before, add_special_tokens=False)["input_ids"]
        ids, product = [tokenizer.bos_token_id, *ids], 1.0
        following = tokenizer(text, add_special_tokens=False)["input_ids"]
        for token in [*following, *[tokenizer.eos_token_id] * ends]:
            logits = model(torch.tensor([ids]))[0, -1].tolist()
            product *= math.exp(logits[token] - math.log(math.fsum(map(math.exp, logits))))
            ids.append(token)
        return product

    found = {"call": [], "right_direct": [], "exact_call": [], "copied": []}
    for question in questions:
        prompt = f"Q: {question}\n"
        sign = "*" if "*" in question else "+"
        a, b = map(int, question.split(sign))
        result = a * b if sign == "*" else a + b
        found["call"].append(multiply(prompt, "<", False))
        found["right_direct"].append(multiply(f"{prompt}A", f": {result}", True))
        found["exact_call"].append(multiply(f"{prompt}<", f"{question}>", False))
        read = f"{prompt}<{question}>={result}\n"
        found["copied"].append(multiply(read, f"A: {result}", True))
    dtype = next(model.parameters()).dtype
    return {name: torch.tensor(values, dtype=dtype) for name, values in found.items()}


def parts_by_sorting(p_right, p_call, kinds, n=3):
    """Sort pairs in plain lists; deal the questions of a kind out one after the other."""
    if n < 1:
        raise ValueError(f"n is {n}")
    found = {}
    for kind in sorted(set(kinds), key=kinds.index):
        rows = zip(p_right.tolist(), p_call.tolist(), kinds, strict=True)
        pairs = [(r, c) for r, c, k in rows if k == kind]
        if len(pairs) < n:
            raise ValueError(f"kinds hold {len(pairs)} of {kind}")
        calls = [c for _, c in sorted(pairs, key=lambda pair: pair[0])]
        sizes = [0] * n
        for i in range(len(pairs)):  # the first parts are the larger ones
            sizes[i % n] += 1
        means = []
        for size in sizes:
            means.append(math.fsum(calls[:size]) / size)
            calls = calls[size:]
        found[kind] = p_call.new_tensor(means)
    return found
