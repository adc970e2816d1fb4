"""Chapter 10: tools and turns.

Builds what a trainer needs when a model's text stops for a tool: a calculator, a sampler in turns,
a mask of the policy's own tokens, GRPO on these, and measurements that say whether calling pays.

Simplified: a call is a text that ends with ">", and not JSON in a chat template; a tool answers at
once, within the process; a completion has one advantage, however many turns it has.

Papers: GRPO (Shao et al., 2024, arXiv:2402.03300); Toolformer (Schick et al., 2023,
arXiv:2302.04761); Search-R1, which masks what the environment wrote (Jin et al., 2025,
arXiv:2503.09516).
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from solutions.ch0_sampling import (
    Samples,
    encode_prompts,
    get_logprobs,
    get_pad_token_id,
    left_pad,
    masked_mean,
)
from solutions.ch2_ppo import ReplayMinibatch, calc_ratio
from solutions.ch3_grpo import GrpoTrainer
from utils.models.decoding import draw, get_decoder, get_end_ids
from utils.prompts import Prompt
from utils.validation import require, shape_checked

CALL_END = ">"  # A turn that ends with it is a call.

# --- The calculator -----------------------------------------------------------------------------


def run_calculator(turn: str) -> str:
    """Return what the calculator writes after a turn: "=1081\\n" after "<23*47>".

    A turn that is "<a+b>" or "<a*b>", and nothing else, is answered with "=", the result and a
    newline. a and b are whole numbers of one to nine digits, 0 to 9, without a sign or a space;
    leading zeros are ignored. After any other turn it writes "=?\\n". It depends on its argument
    alone, evaluates no code, and never raises.
    """
    match = re.fullmatch(r"<([0-9]{1,9})([+*])([0-9]{1,9})>", turn)
    if match is None:
        return "=?\n"
    a, b = int(match[1]), int(match[3])
    return f"={a + b if match[2] == '+' else a * b}\n"


# --- Turns --------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Turns(Samples):
    """Hold completions that a policy and an environment wrote together.

    `completion_mask`, which says what is trained on, is true on the policy's tokens alone;
    `attention_mask` is 1 on the environment's as well. `logprobs` are the sampler's, at
    temperature 1, of the policy's tokens as it drew them; they are NaN elsewhere. `texts` hold
    what both wrote.
    """

    call_ends: list[list[int]]  # of each row: in which columns the ">" of its answered calls stand
    finished: Bool[Tensor, "batch"]  # true where the policy ended the completion itself, by an eos

    @property
    def own_mask(self) -> Bool[Tensor, "batch completion"]:
        """Return the completion mask: true for the policy's own tokens."""
        return self.completion_mask


def get_own_mask(
    turns: list[list[tuple[list[int], bool]]],
) -> Bool[Tensor, "batch completion"]:
    """Return a mask that is true where the policy chose the token.

    Each row is a list of turns in the order in which they were written: the token ids of a turn,
    and whether the policy wrote it (true) or the environment (false). A turn may be empty, and a
    row may have any number of them. The mask is as wide as the longest row has tokens; what lies
    behind a row's last token is padding, and false. On the CPU.

    Raises a ValueError that names turns if there is no row.
    """
    require(len(turns) > 0, "turns should hold at least one row, but is empty")
    rows = [[is_own for ids, is_own in row for _ in ids] for row in turns]
    width = max(map(len, rows))
    padded = [row + [False] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.bool).view(len(rows), width)


@torch.no_grad()
def sample_in_turns(
    model: nn.Module,
    prompts: Sequence[Prompt],
    group_size: int,
    tool: Callable[[str], str],
    max_calls: int = 2,
    max_new_tokens: int = 40,
    generator: torch.Generator | None = None,
) -> Turns:
    """Sample `group_size` completions, side by side, for each prompt, at temperature 1; a tool
    writes into them.

    A turn of the policy begins where the completion does, or where the tool has written. When the
    policy chooses the token ">", the turn, ">" included, goes to `tool` as text. What `tool`
    returns is the row's next tokens, which are taken from it rather than drawn; then the policy
    goes on. All rows share one loop and one cache: in each step, a row takes its pending token if
    it has one, or else samples.

    A row ends with an end token of its own (`get_end_ids`); with a ">" after `max_calls` answered
    calls, which goes to no tool; or after `max_new_tokens` tokens, the tool's included. The tool's
    answer is cut there: to nothing, if its call was the last token. Pad ids follow. The uniform
    numbers are drawn ahead, one for each row and step, whether or not the step samples: `draw`
    turns them into tokens, so what a row draws does not depend on the other rows. No gradient is
    recorded.

    Raises a ValueError that names the argument for a group_size below 1 and a negative max_calls,
    and as `encode_prompts` does for the prompts. Exceptions from `tool` propagate.
    """
    require(group_size >= 1, f"group_size should be at least 1, but is {group_size}")
    require(max_calls >= 0, f"max_calls should be at least 0, but is {max_calls}")
    tokenizer, decoder, ends = model.tokenizer, get_decoder(model), get_end_ids(model)
    copies = [prompt for prompt in prompts for _ in range(group_size)]
    prompt_ids, prompt_mask = encode_prompts(model, copies, max_new_tokens, prepend_bos=True)
    shape, device = (len(copies), max_new_tokens), prompt_ids.device
    uniforms = torch.rand(shape, generator=generator, device=device)
    logprobs = torch.full(shape, torch.nan, device=device)
    call_end = tokenizer.convert_tokens_to_ids(CALL_END)
    # Of each row: its turns, the present one last, as `get_own_mask` takes them; the tool's tokens
    # that are still to come.
    turns: list[list[tuple[list[int], bool]]] = [[([], True)] for _ in copies]
    pending: list[list[int]] = [[] for _ in copies]
    call_ends: list[list[int]] = [[] for _ in copies]
    finished = [False for _ in copies]
    with model.merged() if decoder.is_merged else contextlib.nullcontext():
        logits = decoder.start(prompt_ids, prompt_mask, max_new_tokens)
        rows = torch.arange(len(copies), device=device)  # those that go on
        # SOLUTION START
        for step in range(max_new_tokens):
            drawn, found, _ = draw(logits, uniforms[rows, step])
            is_own = torch.tensor([not pending[row] for row in rows.tolist()], device=device)
            logprobs[rows[is_own], step] = found[is_own].to(logprobs.dtype)
            goes_on = torch.ones_like(is_own)
            tokens = drawn.tolist()
            for i, (row, own) in enumerate(zip(rows.tolist(), is_own.tolist(), strict=True)):
                if not own:
                    tokens[i] = pending[row].pop(0)
                turn = turns[row][-1][0]
                turn.append(tokens[i])
                if own and tokens[i] in ends:
                    finished[row], goes_on[i] = True, False
                elif own and tokens[i] == call_end and len(call_ends[row]) == max_calls:
                    goes_on[i] = False
                elif own and tokens[i] == call_end:
                    call_ends[row].append(step)
                    said = tool(tokenizer.decode(turn))
                    pending[row] = list(tokenizer(said, add_special_tokens=False)["input_ids"])
                    turns[row].append(([], False))
                if not turns[row][-1][1] and not pending[row]:  # the tool has written it all
                    turns[row].append(([], True))
            rows = rows[goes_on]
            if step + 1 == max_new_tokens or len(rows) == 0:
                break
            logits = decoder.advance(torch.tensor(tokens, device=device), goes_on)
        # SOLUTION END
    own_mask = get_own_mask(turns).to(device)
    written = [[token for ids, _ in row for token in ids] for row in turns]
    completion_len = own_mask.shape[1]
    pad_token_id = get_pad_token_id(tokenizer)
    ids = [row + [pad_token_id] * (completion_len - len(row)) for row in written]
    completion_ids = torch.tensor(ids, device=device)
    lengths = torch.tensor([len(row) for row in written], device=device)
    is_written = torch.arange(completion_len, device=device) < lengths[:, None]
    return Turns(
        input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
        attention_mask=torch.cat([prompt_mask, is_written.long()], dim=1),
        prompt_len=prompt_ids.shape[1],
        completion_mask=own_mask,
        texts=[tokenizer.decode(row, skip_special_tokens=True) for row in written],
        logprobs=logprobs[:, :completion_len],
        call_ends=call_ends,
        finished=torch.tensor(finished, device=device),
    )


# --- Rewards and the objective ------------------------------------------------------------------


def reward_fn_priced(
    samples: list[str], answers: list[str], price: float = 0.0
) -> Float[Tensor, "batch"]:
    """Reward a right answer with 1, and charge `price` for each call.

    The answer is right if what follows the completion's last newline, or all of it where there is
    none, is "A: ", the answer, and nothing else: a number that the tool wrote is no answer, until
    the policy writes it below. Each ">" is a call, well-formed or not, and also one that came too
    late to be answered. In float32.

    Raises ValueError if there is not one answer for each sample.
    """
    rewards = [
        float(text.rsplit("\n", 1)[-1] == f"A: {answer}") - price * text.count(CALL_END)
        for text, answer in zip(samples, answers, strict=True)
    ]
    return torch.tensor(rewards, dtype=torch.float32)


@shape_checked
def calc_tool_objective(
    logprobs: Float[Tensor, "batch completion"],
    old_logprobs: Float[Tensor, "batch completion"],
    advantages: Float[Tensor, "batch"],
    own_mask: Bool[Tensor, "batch completion"],
    clip_coef: float = 0.2,
) -> Float[Tensor, ""]:
    """Return GRPO's objective over the tokens that the policy chose, without a KL term (maximised).

    It averages min(ratio A, clip(ratio, 1 - clip_coef, 1 + clip_coef) A) over the own tokens of
    each completion, then over the batch, with ratio = exp(logprobs - old_logprobs). The
    environment's tokens, and padding, enter no ratio, no sum and no count. There both log-probs may
    be NaN or inf, which reach neither the value nor the gradient.

    A completion without a token of its own counts 0 in the batch's mean. No gradient reaches
    `old_logprobs` and `advantages`.
    """
    ratio = calc_ratio(logprobs, old_logprobs, own_mask)
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    advantages = advantages.detach()[:, None]
    per_token = torch.minimum(ratio * advantages, clipped * advantages)
    return masked_mean(per_token, own_mask, dim=-1).mean()


class ToolTrainer(GrpoTrainer):
    """Train by GRPO with what this chapter writes: `sample_in_turns` and `calc_tool_objective`.

    There's no KL term here, no entropy bonus and no temperature but 1. (`GrpoTrainer` itself takes
    an `environment`, too, and does more with it: one may raise, hang or end the completion, and
    turns may end otherwise than with ">". See `utils/models/turns.py`.)
    """

    def sample(self, prompts: list[Prompt], columns: dict[str, list]) -> Samples:
        """Sample whole groups in turns, with `args.environment` as the tool."""
        args = self.args
        tool: Any = args.environment
        limits = (args.max_calls, args.gen_len, self.generator)
        turns = sample_in_turns(
            self.model, prompts[:: args.group_size], args.group_size, tool, *limits
        )
        n_calls = sum(len(ends) for ends in turns.call_ends)
        self.metrics["calls"].append(n_calls / len(turns.call_ends))
        return turns

    def compute_rlhf_objective(self, minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
        """Return the objective of the policy's own tokens (maximised)."""
        scored = self.score(minibatch.input_ids, minibatch.attention_mask, minibatch.prompt_len)
        old_logprobs = self.get_old_logprobs(minibatch, scored.logprobs)
        self.measure_entropy(minibatch, scored)
        self.record_ratios(scored.logprobs, minibatch)
        own_mask, clip_coef = minibatch.mask, self.args.clip_coef
        return calc_tool_objective(
            scored.logprobs, old_logprobs, minibatch.advantages, own_mask, clip_coef
        )


# --- When to call -------------------------------------------------------------------------------


@shape_checked
def calc_call_value(
    p_right_direct: Float[Tensor, "batch"],
    p_right_called: Float[Tensor, "batch"],
    price: float | Tensor,
) -> Float[Tensor, "batch"]:
    """Return the advantage of calling over answering directly: what `reward_fn_priced` pays on
    average for a completion with one call, less what it pays for one without.

    The two are the probabilities of a right answer without a call and with one; the price is one
    number, or one for each question. The sign of a question's value says what is best for it. The
    mean over questions says what training does first, while the policy does not tell them apart
    yet: above 0, calls become more frequent, and the larger it is, the sooner; below 0, rarer.
    """
    return p_right_called - p_right_direct - price


@torch.no_grad()
def measure_exactly(model: nn.Module, questions: list[str]) -> dict[str, Float[Tensor, "batch"]]:
    """Return probabilities of what a model may do with each question, by scoring: nothing is
    sampled, so a probability of 0.001 is measured as well as one of 0.5.

    A question is "23*47" or "23+47"; its prompt is "Q: 23*47\\n", and its answer what
    `run_calculator` says. With e the eos, the keys are

    - "call": P(the first token is "<");
    - "right_direct": P(": 1081" e, given that the first token is "A");
    - "exact_call": P("23*47>", given that the first token is "<");
    - "copied": P("A: 1081" e, given "<23*47>" and the tool's "=1081\\n").

    So exact_call * copied is the chance of being right with one exact call, given "<". At
    temperature 1, on the model's device; no gradient is recorded.
    """
    results = [run_calculator(f"<{question}>")[1:-1] for question in questions]
    direct = [["A", f": {result}"] for result in results]
    called = [
        ["<", f"{question}>", f"={result}\n", f"A: {result}"]
        for question, result in zip(questions, results, strict=True)
    ]
    prompts = [f"Q: {question}\n" for question in questions]
    # SOLUTION START
    of_direct, of_called = (score_parts(model, prompts, parts).exp() for parts in (direct, called))
    return {
        "call": of_called[:, 0],
        "right_direct": of_direct[:, 1],
        "exact_call": of_called[:, 1],
        "copied": of_called[:, 3],
    }
    # SOLUTION END


def score_parts(
    model: nn.Module, prompts: list[str], parts: list[list[str]]
) -> Float[Tensor, "batch part"]:
    """Return the log-prob of each part of each completion, given all that is before it.

    `parts` hold, for each prompt, the same number of texts, which together are its completion. An
    eos is appended to the last one and belongs to it. All rows are scored in one forward pass.
    """
    tokenizer, device = model.tokenizer, next(model.parameters()).device
    prompt_ids, prompt_mask = encode_prompts(model, prompts, 1, prepend_bos=True)
    rows = [tokenizer(row, add_special_tokens=False)["input_ids"] for row in parts]
    rows = [[*row[:-1], [*row[-1], tokenizer.eos_token_id]] for row in rows]
    # Padded on the right, as the reversed rows are on the left.
    ids, mask = left_pad([[*chain(*row)][::-1] for row in rows], get_pad_token_id(tokenizer))
    ids = torch.cat([prompt_ids, ids.flip(-1).to(device)], dim=1)
    mask = torch.cat([prompt_mask, mask.flip(-1).to(device)], dim=1)
    logprobs = get_logprobs(model(ids, attention_mask=mask), ids, prompt_ids.shape[1])
    sums = []
    for row, found in zip(rows, logprobs, strict=True):
        lengths = [len(part) for part in row]
        sums.append(torch.stack([part.sum() for part in found[: sum(lengths)].split(lengths)]))
    return torch.stack(sums)


@torch.no_grad()
def compare_within_kinds(
    p_right: Float[Tensor, "batch"], p_call: Float[Tensor, "batch"], kinds: list[str], n: int = 3
) -> dict[str, Float[Tensor, "n"]]:
    """Return, for each kind of question, the mean P(call) in n parts of it, from the questions that
    the base knows worst to those that it knows best.

    Within a kind the questions are ordered by `p_right`, the base's probability of a right direct
    answer, ties as they came, and cut into n parts, as even as can be; the first
    ones are the larger (`tensor_split`). A model that knows what it does not know calls less often
    from part to part. One that reads the kind calls equally often in all parts.

    Kinds are in the order in which they first occur. Raises a ValueError that names the argument
    for n below 1, and for a kind with fewer than n questions.
    """
    require(n >= 1, f"n should be at least 1, but is {n}")
    found = {}
    for kind in dict.fromkeys(kinds):
        chosen = torch.tensor([other == kind for other in kinds], device=p_right.device)
        require(
            int(chosen.sum()) >= n,
            f"kinds should hold at least {n} questions of each kind, but hold "
            f"{int(chosen.sum())} of {kind!r}",
        )
        order = p_right[chosen].argsort(stable=True)
        parts = p_call[chosen][order].tensor_split(n)
        found[kind] = torch.stack([part.mean() for part in parts])
    return found
