"""Sampling in turns: completions that a policy and an environment write together.

The trainers' own version of chapter 10's `sample_in_turns`, for any environment: it may end a
rollout, see the prompt and the columns of its row, raise, or hang. `Environment.sample` is one loop
over a decoder's `start`, `draw` and `advance`, as `Decoder.generate` is, with the same draws.
"""

import contextlib
import copy
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from utils.models.decoding import Draws, draw, get_decoder, get_pad_and_ends
from utils.validation import require

CHARACTERS = 1000  # of an answer that are read for each token of room
OFFERED = ("prompt", "completion")  # what an environment may name, besides a trainer's columns


@dataclass(frozen=True)
class TurnDraws(Draws):
    """Hold completions in turns. The log-probabilities are as those of `Draws` on the policy's
    tokens, and NaN elsewhere. A row whose environment failed has no own token, so that nothing is
    learnt from it."""

    own_mask: Bool[Tensor, "batch completion"]  # true where the policy chose the token
    is_written: Bool[Tensor, "batch completion"]  # true where either wrote
    texts: list[str]  # of both, without special tokens
    n_calls: Int[Tensor, "batch"]  # how often the environment was asked
    failed: Bool[Tensor, "batch"]

    def put_behind(
        self, prompt_ids: Int[Tensor, "batch seq"], prompt_mask: Int[Tensor, "batch seq"]
    ) -> dict[str, Any]:
        """Return the fields of chapter 0's `Samples`, of which the policy's tokens are the
        completion mask."""
        return {
            "input_ids": torch.cat([prompt_ids, self.completion_ids], dim=1),
            "attention_mask": torch.cat([prompt_mask, self.is_written.long()], dim=1),
            "prompt_len": prompt_ids.shape[1],
            "completion_mask": self.own_mask,
            "texts": self.texts,
            "logprobs": self.logprobs,
            "log_kept_mass": self.log_kept_mass,
        }


def fill_failed(
    scores: Float[Tensor, "batch"], failed: Bool[Tensor, "batch"], group_size: int
) -> Float[Tensor, "batch"]:
    """Return scores in which what failed has the mean of the others in its group, 0 without any."""
    if not failed.any():
        return scores
    groups, is_valid = scores.view(-1, group_size), ~failed.view(-1, group_size)
    sums = groups.masked_fill(~is_valid, 0.0).sum(-1)
    means = sums / is_valid.sum(-1).clamp(min=1)
    return torch.where(failed, means.repeat_interleave(group_size), scores)


@dataclass(frozen=True)
class Failure:
    """Say why a call gave no answer: it raised, took too long, or returned something else."""

    said: str


class Environment:
    """What answers a policy's turns.

    `function(turn)` gets the text of a turn: all since the environment last wrote, up to
    `turn_end`, which it ends with. It returns the text that is written next, or None to end the
    rollout. It may name further arguments: `prompt`, `completion` (all that both have written), and
    those of `columns`, each with its row's value, a copy if that is a list or a dict.

    After `max_calls` answers, the next turn gets none and ends the rollout. Calls are made one
    after another, each in a thread of its own, so what is bound to a thread doesn't outlive a call.
    After `seconds` one is given up; if it never returns, it goes on until the program ends.

    Raises ValueError for a `function` that is none, takes no turn or needs another argument, and
    for an empty `turn_end`.
    """

    def __init__(
        self,
        function: Callable[..., str | None],
        columns: Sequence[str] = (),
        turn_end: str = ">",
        max_calls: int = 2,
        seconds: float = 10.0,
    ):
        require(callable(function), f"environment should be a function, but is {function!r}")
        require(turn_end, "turn_end should have at least one character, but is empty")
        self.function, self.turn_end = function, turn_end
        self.max_calls, self.seconds = max_calls, seconds
        self.named = find_named(function, (*OFFERED, *columns))
        self._turn_ends: Bool[Tensor, "vocab"] | None = None

    def ask(self, turn: str, row: dict[str, Any]) -> str | Failure | None:
        """Return what the environment answers to a turn; warn if that is a failure."""
        known = {name: row[name] for name in self.named}
        for name, value in known.items():
            if isinstance(value, list | dict):  # such as a chat, which it may go on with
                known[name] = copy.deepcopy(value)
        answers: list[str | Failure | None] = []
        thread = threading.Thread(
            target=lambda: answers.append(self._call(turn, known)), daemon=True, name="environment"
        )
        thread.start()
        thread.join(self.seconds)
        late = Failure(f"gave no answer within {self.seconds:g} seconds")
        said = answers[0] if answers else late
        if isinstance(said, Failure):
            warnings.warn(f"environment {said.said}, after the turn {turn!r}", stacklevel=2)
        return said

    @torch.no_grad()
    def _call(self, turn: str, row: dict[str, Any]) -> str | Failure | None:
        try:
            said = self.function(turn, **row)
            if isinstance(said, str):
                said.encode()  # a tokenizer can't read half of a surrogate pair
        except BaseException as error:  # in its thread, nothing else would report it
            return Failure(f"raised {type(error).__name__}: {error}")
        if said is None or isinstance(said, str):
            return said
        return Failure(f"returned {type(said).__name__}, and not text or None")

    @torch.no_grad()
    def sample(
        self,
        model: Any,
        prompt_ids: Int[Tensor, "batch seq"],
        prompt_mask: Int[Tensor, "batch seq"],
        rows: Mapping[str, Sequence[Any]],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> TurnDraws:
        """Sample a completion for each left-padded prompt, until all have ended.

        `rows` hold what the environment may name, but for `completion`: a value for each row. The
        uniform numbers are drawn ahead, one for each row and step, so what a row draws does not
        depend on the others.

        Raises ValueError, with the last failure, if the environment failed in all rows.
        """
        decoder, device = get_decoder(model), prompt_ids.device
        shape = (len(prompt_ids), max_new_tokens)
        uniforms = torch.rand(shape, generator=generator, device=device)
        going = torch.arange(len(prompt_ids), device=device)  # the rows that go on
        with model.merged() if decoder.is_merged else contextlib.nullcontext():
            logits = decoder.start(prompt_ids, prompt_mask, max_new_tokens)
            turn_ends = self.find_turn_ends(model.tokenizer, logits.shape[-1]).to(device)
            transcripts = Transcripts(self, model, rows, shape, turn_ends)
            for step in range(max_new_tokens):
                drawn = draw(logits, uniforms[going, step], temperature, top_k, top_p)
                tokens, goes_on = transcripts.write(going, step, *drawn)
                going = going[goes_on]
                if len(going) == 0 or step + 1 == max_new_tokens:
                    break
                logits = decoder.advance(tokens, goes_on)
        return transcripts.close(step + 1)

    def find_turn_ends(self, tokenizer: Any, vocab: int) -> Bool[Tensor, "vocab"]:
        """Return which tokens may be the last of a turn, by their text."""
        if self._turn_ends is None or len(self._turn_ends) != vocab:
            known = min(vocab, len(tokenizer))
            texts = tokenizer.batch_decode([[token] for token in range(known)])
            special = {*tokenizer.all_special_ids}
            ends = [self.may_end(text, token in special) for token, text in enumerate(texts)]
            self._turn_ends = torch.tensor(ends + [False] * (vocab - known))
        return self._turn_ends

    def may_end(self, text: str, is_special: bool) -> bool:
        """Return whether a token may end a turn: a special one if `turn_end` ends with it."""
        if is_special:
            return self.turn_end.endswith(text)
        return text.endswith((self.turn_end[-1], "\ufffd"))  # part of a character is the latter

    def is_end(self, turn: str) -> bool:
        """Return whether a turn with this text has ended."""
        return turn.endswith(self.turn_end)


class Stops(Environment):
    """What ends a completion as soon as its text holds one of these strings, and writes nothing.

    A token may go on beyond the end of a string. It's kept whole, and is the policy's own.

    Raises ValueError unless there is at least one string, and for an empty one.
    """

    def __init__(self, stops: Sequence[str]):
        require(stops and all(stops), f"stop should be texts that are not empty, but is {stops!r}")
        super().__init__(lambda turn: None, max_calls=0)
        self.stops = tuple(stops)

    def may_end(self, text: str, is_special: bool) -> bool:
        """Return whether a token may complete a stop."""
        return "\ufffd" in text or any(stop[-1] in text for stop in self.stops)

    def is_end(self, turn: str) -> bool:
        """Return whether a text holds a stop."""
        return any(stop in turn for stop in self.stops)


class Transcripts:
    """What has been written in each row, by whom, and what the environment writes next."""

    def __init__(
        self,
        environment: Environment,
        model: Any,
        rows: Mapping[str, Sequence[Any]],
        shape: tuple[int, int],
        turn_ends: Bool[Tensor, "vocab"],
    ):
        self.environment, self.tokenizer, self.rows = environment, model.tokenizer, rows
        self.turn_ends, batch, device = turn_ends, shape[0], turn_ends.device
        pad, self.ends = get_pad_and_ends(model, device)
        self.ids = torch.full(shape, pad, device=device)
        self.forced = torch.full(shape, -1, device=device)  # the environment's tokens, ahead
        self.logprobs = torch.full(shape, torch.nan, device=device)
        self.log_kept_mass = self.logprobs.clone()
        self.own_mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.is_written = torch.zeros_like(self.own_mask)
        self.starts, self.n_calls = [0] * batch, [0] * batch  # of the present turns; in all
        self.failures: dict[int, Failure] = {}

    def write(
        self,
        going: Int[Tensor, "row"],
        step: int,
        tokens: Int[Tensor, "row"],
        logprobs: Float[Tensor, "row"],
        log_kept_mass: Float[Tensor, "row"],
    ) -> tuple[Int[Tensor, "row"], Bool[Tensor, "row"]]:
        """Write a token in each row, the environment's if it has one, or else the drawn one.

        Returns the tokens, and which rows go on.
        """
        forced = self.forced[going, step]
        is_own = forced < 0
        tokens = torch.where(is_own, tokens, forced)
        self.ids[going, step], self.own_mask[going, step] = tokens, is_own
        self.is_written[going, step] = True
        for kept, drawn in ((self.logprobs, logprobs), (self.log_kept_mass, log_kept_mass)):
            kept[going, step] = drawn.to(kept.dtype).masked_fill(~is_own, torch.nan)
        goes_on = ~(is_own & torch.isin(tokens, self.ends))
        for i in (is_own & self.turn_ends[tokens]).nonzero().flatten().tolist():
            row = int(going[i])
            turn = self.tokenizer.decode(self.ids[row, self.starts[row] : step + 1].tolist())
            if self.environment.is_end(turn):
                goes_on[i] = self._end_turn(row, turn, step)
        return tokens, goes_on

    def _end_turn(self, row: int, turn: str, step: int) -> bool:
        """Ask the environment, unless it was asked too often, and return whether the row goes
        on."""
        if self.n_calls[row] == self.environment.max_calls:
            return False
        self.n_calls[row] += 1
        known = {name: values[row] for name, values in self.rows.items()}
        said = self.environment.ask(turn, known | {"completion": self._show(row, step)})
        if isinstance(said, Failure):
            self.failures[row] = said
        if not isinstance(said, str):
            return False
        room = self.ids.shape[1] - step - 1
        said = said[: room * CHARACTERS]  # to read a long page to its end takes seconds
        ids = self.tokenizer(said, add_special_tokens=False)["input_ids"][:room]
        self.starts[row] = step + 1 + len(ids)
        self.forced[row, step + 1 : self.starts[row]] = self.forced.new_tensor(ids)
        return True

    def _show(self, row: int, step: int) -> str:
        ids = self.ids[row, : step + 1].tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def close(self, length: int) -> TurnDraws:
        """Return what was written, in columns up to `length`."""
        if len(self.failures) == len(self.ids):
            last = list(self.failures.values())[-1]
            raise ValueError(f"environment should answer, but in all rollouts it {last.said}")
        failed = torch.zeros_like(self.is_written[:, 0])
        failed[list(self.failures)] = True
        drawn, lengths = slice(length), self.is_written.sum(-1).tolist()
        return TurnDraws(
            self.ids[:, drawn],
            self.logprobs[:, drawn],
            self.log_kept_mass[:, drawn],
            self.own_mask[:, drawn] & ~failed[:, None],
            self.is_written[:, drawn],
            [self._show(row, n - 1) for row, n in enumerate(lengths)],
            torch.tensor(self.n_calls, device=self.ids.device),
            failed,
        )


def find_named(function: Callable[..., Any], offered: Sequence[str]) -> list[str]:
    """Return which of the offered names parameters behind the first one have.

    Raises ValueError for another parameter that has no default, and if there is no first one.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # as of some built-in functions
        return []
    parameters = list(signature.parameters.values())
    takes_turn = any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters[:1])
    require(takes_turn, f"environment should take a turn, but takes {signature}")
    del parameters[0]
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return list(offered)
    named = []
    for p in parameters:
        if p.name in offered and p.kind != p.POSITIONAL_ONLY:
            named.append(p.name)
        elif p.kind != p.VAR_POSITIONAL and p.default is p.empty:
            said = f"environment should need no more than a turn and {', '.join(offered)}"
            raise ValueError(f"{said}, but needs {p.name!r}")
    return named
