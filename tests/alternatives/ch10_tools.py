"""Right answers to chapter 10, written differently."""

import itertools
import math
import operator
from collections import defaultdict

import torch

from solutions.ch0_sampling import encode_prompts
from solutions.ch10_tools import Turns, run_calculator
from utils.grading.known_answers import right
from utils.models.decoding import draw, get_end_ids

# --- run_calculator -----------------------------------------------------------------------------


@right("run_calculator")
def taken_apart_by_hand(turn):
    failed = "=?\n"
    if not (turn.startswith("<") and turn.endswith(">")):
        return failed
    for sign, combine in (("+", operator.add), ("*", operator.mul)):
        a, found, b = turn[1:-1].partition(sign)
        is_number = [x.isascii() and x.isdigit() and len(x) < 10 for x in (a, b)]
        if found and all(is_number):
            return "=" + str(combine(int(a), int(b))) + "\n"
    return failed


# --- get_own_mask -------------------------------------------------------------------------------


@right("get_own_mask")
def padded_by_pytorch(turns):
    if len(turns) == 0:
        raise ValueError("turns: there is no row")
    rows = []
    for row in turns:
        own = torch.tensor([own for _, own in row], dtype=torch.bool)
        lengths = torch.tensor([len(ids) for ids, _ in row], dtype=torch.long)
        rows.append(own.repeat_interleave(lengths))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=False)


# --- sample_in_turns ----------------------------------------------------------------------------


@right("sample_in_turns")
@torch.no_grad()
def with_matrices(model, prompts, group_size, tool, max_calls=2, max_new_tokens=40, generator=None):
    """Everyone's tokens in matrices; what the tool wrote is laid into them ahead; all rows stay in
    the batch to the end."""
    if group_size < 1:
        raise ValueError(f"group_size: {group_size}")
    if max_calls < 0:
        raise ValueError(f"max_calls: {max_calls}")
    tokenizer, ends = model.tokenizer, get_end_ids(model)
    copies = [prompt for prompt in prompts for _ in range(group_size)]
    prompt_ids, prompt_mask = encode_prompts(model, copies, max_new_tokens, True)
    n, (sign,) = len(copies), tokenizer(">", add_special_tokens=False)["input_ids"]
    uniforms = torch.rand(n, max_new_tokens, generator=generator)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    laid = torch.full((n, max_new_tokens), -1)
    ids, own = torch.full_like(laid, pad), torch.zeros_like(laid, dtype=torch.bool)
    written, logprobs = own.clone(), torch.full(laid.shape, math.nan)
    is_over, finished = [False] * n, [False] * n
    call_ends, begins, cache = [[] for _ in copies], [0] * n, None
    mask, new = prompt_mask, prompt_ids
    for step in range(max_new_tokens):
        logits, cache = model(
            new,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            return_type="logits_and_cache",
        )
        tokens, found, _ = draw(logits[:, -1], uniforms[:, step])
        for row in range(n):
            if is_over[row]:
                continue
            written[row, step] = True
            if laid[row, step] >= 0:
                ids[row, step] = laid[row, step]
                continue
            ids[row, step], own[row, step] = tokens[row], True
            logprobs[row, step] = found[row]
            if int(tokens[row]) in ends:
                is_over[row] = finished[row] = True
            elif int(tokens[row]) == sign and len(call_ends[row]) >= max_calls:
                is_over[row] = True
            elif int(tokens[row]) == sign:
                call_ends[row].append(step)
                said = tool(tokenizer.decode(ids[row, begins[row] : step + 1]))
                answer = tokenizer(said, add_special_tokens=False)["input_ids"]
                begins[row] = step + 1 + len(answer)
                kept = laid[row, step + 1 : begins[row]]
                kept.copy_(torch.tensor(answer[: len(kept)], dtype=torch.long))
        if all(is_over):
            break
        new = ids[:, step : step + 1]
        mask = torch.cat([mask, written[:, step : step + 1].long()], dim=1)
    steps = slice(step + 1)
    texts = [
        tokenizer.decode(row[there], skip_special_tokens=True)
        for row, there in zip(ids, written, strict=True)
    ]
    return Turns(
        input_ids=torch.cat([prompt_ids, ids[:, steps]], dim=1),
        attention_mask=torch.cat([prompt_mask, written[:, steps].long()], dim=1),
        prompt_len=prompt_ids.shape[1],
        completion_mask=own[:, steps],
        texts=texts,
        logprobs=logprobs[:, steps],
        call_ends=call_ends,
        finished=torch.tensor(finished),
    )


# --- reward_fn_priced ---------------------------------------------------------------------------


@right("reward_fn_priced")
def right_less_costs(samples, answers, price=0.0):
    if len(samples) != len(answers):
        raise ValueError(f"{len(samples)} samples and {len(answers)} answers")
    right = [("\n" + s).endswith(f"\nA: {a}") for s, a in zip(samples, answers, strict=True)]
    calls = [len(s.split(">")) - 1 for s in samples]
    return torch.tensor(right, dtype=torch.float32) - price * torch.tensor(calls).float()


# --- calc_tool_objective ------------------------------------------------------------------------


@right("calc_tool_objective")
def token_weights(logprobs, old_logprobs, advantages, own_mask, clip_coef=0.2):
    """All own tokens in one vector, each weighed by its completion's share."""
    rows, _ = own_mask.nonzero(as_tuple=True)
    ratio = (logprobs[own_mask] - old_logprobs[own_mask].detach()).exp()
    advantage = advantages.detach()[rows]
    bound = torch.where(advantage > 0, 1 + clip_coef, 1 - clip_coef)
    clipped = torch.where(advantage > 0, ratio.minimum(bound), ratio.maximum(bound))
    share = 1 / own_mask.sum(1)[rows] / len(own_mask)
    return (share * clipped * advantage).sum()


# --- calc_call_value ----------------------------------------------------------------------------


@right("calc_call_value")
def mean_rewards(p_right_direct, p_right_called, price):
    """Right, less the price in either case."""
    reward_if_right, reward_if_wrong = 1 - price, -price
    of_a_call = p_right_called * reward_if_right + (1 - p_right_called) * reward_if_wrong
    return of_a_call - p_right_direct


# --- measure_exactly ----------------------------------------------------------------------------


@right("measure_exactly")
@torch.no_grad()
def multiplied_as_numbers(model, questions):
    """Token by token, in Python's floats, and so in float32 at the end."""
    tokenizer = model.tokenizer

    def multiply(before, text, end=()):
        ids, following = tokenizer([before, text], add_special_tokens=False)["input_ids"]
        ids, following = [tokenizer.bos_token_id, *ids], [*following, *end]
        probs = model(torch.tensor([ids + following]))[0].softmax(-1)
        return math.prod(probs[len(ids) - 1 + i, v].item() for i, v in enumerate(following))

    found, end = defaultdict(list), [tokenizer.eos_token_id]
    for question in questions:
        result = run_calculator(f"<{question}>")
        prompt = f"Q: {question}\n"
        found["call"].append(multiply(prompt, "<"))
        found["right_direct"].append(multiply(f"{prompt}A", f": {result[1:-1]}", end))
        found["exact_call"].append(multiply(f"{prompt}<", f"{question}>"))
        called = f"{prompt}<{question}>{result}"
        found["copied"].append(multiply(called, f"A: {result[1:-1]}", end))
    return {name: torch.tensor(values) for name, values in found.items()}


# --- compare_within_kinds -----------------------------------------------------------------------


@right("compare_within_kinds")
def in_groups_of_a_sorted_list(p_right, p_call, kinds, n=3):
    """All questions sorted by kind, then by P(right); it is n that is too large."""
    if n < 1:
        raise ValueError(f"n should be at least 1, but is {n}")
    first, found = {kind: kinds.index(kind) for kind in kinds}, {}
    order = sorted(range(len(kinds)), key=lambda i: (first[kinds[i]], p_right[i].item()))
    for kind, group in itertools.groupby(order, key=kinds.__getitem__):
        size, more = divmod(len(chosen := list(group)), n)
        if size == 0:
            raise ValueError(f"n should be at most {len(chosen)}, as {kind!r} has no more")
        rest = iter(chosen)
        parts = [list(itertools.islice(rest, size + (i < more))) for i in range(n)]
        found[kind] = torch.stack([p_call[part].mean() for part in parts])
    return found
