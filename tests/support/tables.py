"""Models whose probabilities are written down, for checks that sample and score.

They are called as a bridge is, with a cache or without, and say the same in any batch. A symbol is
one token of the embedded model's tokenizer, a digit for example; "." stands for the eos.
"""

import copy
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import models

N_CTX, VOCAB_SIZE, EOS = 128, models.SPECIAL["vocab_size"], models.SPECIAL["eos_token_id"]
PERIOD = 7
NEVER = -50.0  # the logit of what is not written


@functools.cache
def get_id(symbol: str) -> int:
    written = {"\n": "Ċ", " ": "Ġ", ".": "<eos>"}.get(symbol, symbol)
    return models.load_tokenizer().convert_tokens_to_ids(written)


class PlainModel(nn.Module):
    """Asks `tell` for the logits at the real positions of each row."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.cfg = SimpleNamespace(n_ctx=N_CTX)
        self.tokenizer = copy.deepcopy(models.load_tokenizer())
        self.n_calls = self.n_read = 0  # and positions, over all calls

    def forward(
        self,
        input: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        return_type: str = "logits",
        **_: Any,
    ) -> Any:
        self.n_calls, self.n_read = self.n_calls + 1, self.n_read + input.numel()
        ids = input if past_key_values is None else torch.cat([past_key_values, input], dim=1)
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        logits = torch.zeros(*ids.shape, VOCAB_SIZE, dtype=torch.float64)
        for row, real in enumerate(mask.bool()):
            logits[row, real] = self.tell(ids[row, real])
        logits = self.scale * logits[:, ids.shape[1] - input.shape[1] :]
        return (logits, ids) if return_type == "logits_and_cache" else logits

    def tell(self, ids: Tensor) -> Tensor:
        """Return what is said of the next token at each of these positions, [position vocab]."""
        raise NotImplementedError

    def get_parts(self) -> Any:
        """Return what tells the fast path that it does not know this architecture."""
        config = SimpleNamespace(model_type="plain")
        return SimpleNamespace(base=SimpleNamespace(original_model=SimpleNamespace(config=config)))


class TableModel(PlainModel):
    """Knows the next token by the last one, the one before, and the position modulo 7: the logits
    are sums of three tables."""

    def __init__(self, last: Tensor, before: Tensor | None = None, at: Tensor | None = None):
        super().__init__()
        self.tables = [last.double()]
        others = ((before, len(last)), (at, PERIOD))
        self.tables += [last.new_zeros(n, VOCAB_SIZE) if t is None else t for t, n in others]

    def tell(self, ids: Tensor) -> Tensor:
        last, before, at = self.tables
        one_earlier = torch.cat([ids[:1], ids[:-1]])
        return last[ids] + before[one_earlier] + at[torch.arange(len(ids)) % PERIOD]


class ScriptModel(PlainModel):
    """Writes what the one of its scripts that begins as the text so far has next, and an eos where
    it has nothing more. What is in brackets it reads, but says an eos in its place."""

    def __init__(self, *scripts: str):
        super().__init__()
        self.scripts = [self._learn(script) for script in scripts]

    def _learn(self, script: str) -> list[tuple[int, int]]:
        """Return the ids of a script, each with what is said in its place."""
        learned, is_read = [(self.tokenizer.bos_token_id, EOS)], False
        for symbol in script:
            if symbol in "[]":
                is_read = symbol == "["
            else:
                learned.append((get_id(symbol), EOS if is_read else get_id(symbol)))
        return learned

    def tell(self, ids: Tensor) -> Tensor:
        logits = torch.full((len(ids), VOCAB_SIZE), NEVER, dtype=torch.float64)
        for n in range(1, len(ids) + 1):
            so_far, said = ids[:n].tolist(), EOS
            for script in self.scripts:
                if [token for token, _ in script[:n]] == so_far and len(script) > n:
                    said = script[n][1]
                    break
            logits[n - 1, said] = 0.0
        return logits


def make_chain(steps: dict[str, dict[str, float]]) -> TableModel:
    """Return a model that knows the next symbol by the last one: these have these probabilities."""
    logits = torch.full((VOCAB_SIZE, VOCAB_SIZE), NEVER, dtype=torch.float64)
    for symbol, following in steps.items():
        for name, p in following.items():
            logits[get_id(symbol), get_id(name)] = torch.tensor(p, dtype=torch.float64).log()
    return TableModel(logits)


def make_writer(
    rng, symbols: Sequence[str], bonus: dict[str, float], spread: float = 1.0
) -> TableModel:
    """Return a model that writes these symbols in a random way; a bonus is added to the logits of
    some of them."""
    closed = torch.full((VOCAB_SIZE,), NEVER)
    for symbol in symbols:
        closed[get_id(symbol)] = bonus.get(symbol, 0.0)
    sizes = (VOCAB_SIZE, VOCAB_SIZE, PERIOD)
    last, before, at = (spread * rng.normal(n, VOCAB_SIZE).double() for n in sizes)
    return TableModel(last + closed.double(), before, at)
