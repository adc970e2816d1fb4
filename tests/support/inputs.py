"""Inputs that hide nothing, and measures, which the checks of the chapters share."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")
KINDS, PLACES = ("k1", "k2", "k3", "k4"), ("loss", "reward")  # of chapter 4's estimators


def ragged_mask(rng, rows: int = 6, completion: int = 7) -> Tensor:
    """Lengths in any order: a full row, one token, an empty row, the rest random."""
    lengths = torch.cat([torch.tensor([completion, 1, 0]), rng.integers(1, completion + 1, rows)])
    return torch.arange(completion) < lengths[:rows][rng.permutation(rows), None]


def masks_of_many_shapes(rng) -> dict[str, Tensor]:
    """As many completions as tokens, one row, one token, all full, 150 rows, nothing at all."""
    return {
        "5 by 5": ragged_mask(rng, 5, 5),
        "one row": torch.arange(6)[None] < 4,
        "one token": torch.ones(1, 1, dtype=torch.bool),
        "one token each": torch.arange(3)[None].repeat(4, 1) < 1,
        "all full": torch.ones(4, 3, dtype=torch.bool),
        "150 rows": ragged_mask(rng, 150, 3),
        "nothing": torch.zeros(3, 4, dtype=torch.bool),
    }


def ragged_batch(rng, rows: int = 3, seq: int = 8) -> tuple[Tensor, Tensor]:
    """Draw ids, padded on the left and, in other rows, on the right; pad, bos and eos are real
    tokens as well."""
    left = torch.arange(rows)[rng.permutation(rows)] * 2
    right = seq - torch.arange(rows)[rng.permutation(rows)]
    positions = torch.arange(seq)
    mask = ((positions >= left[:, None]) & (positions < right[:, None])).long()
    ids = rng.integers(3, 512, rows, seq)
    ids[:, seq // 2] = rng.permutation(rows)  # a column that is real in every row
    return ids * mask, mask


def grouped_rewards(rng, groups: int, group_size: int) -> Tensor:
    """Draw groups with means and spreads of their own."""
    spreads, means = rng.uniform(groups, 1, low=0.3, high=3.0), rng.normal(groups, 1, std=3)
    return (rng.normal(groups, group_size) * spreads + means).flatten()


def one_zero(rng, mask: Tensor) -> Tensor:
    """Draw advantages, 0 for the longest completion."""
    advantages = rng.normal(len(mask))
    advantages[mask.sum(-1).argmax()] = 0.0
    return advantages


def ragged_logprobs(
    rng, mask: Tensor, fill: float = NAN, with_ref: bool = False
) -> dict[str, Tensor]:
    """Draw log-probs with ratios beyond both clips; `fill` beyond the mask."""
    old = -rng.uniform(*mask.shape, low=0.1, high=3.0)
    found = {
        "logprobs": poison(old + rng.normal(*mask.shape, std=0.7), mask, fill),
        "old_logprobs": poison(old, mask, -fill),
    }
    if with_ref:
        ref_logprobs = old + rng.normal(*mask.shape, std=0.7)
        found["ref_logprobs"] = poison(ref_logprobs, mask, fill)
    return found


def poison(x: Tensor, mask: Tensor, value: float = NAN) -> Tensor:
    """`x` with `value` wherever `mask`, of the leading axes, is false."""
    return x.masked_fill(~mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), value)


def sliced(x: Tensor) -> Tensor:
    """The same values as a slice of a larger tensor: its rows do not follow one another."""
    return torch.cat([x, x[:, :1]], dim=1)[:, :-1]


def leaf(x: Tensor) -> Tensor:
    """A copy that records gradients."""
    return x.detach().clone().requires_grad_()


def gradients(output: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
    """d output.sum() / d input for each input, zeros where the output does not depend on it.

    An output that is no tensor has no gradients: it is the observation that says so.
    """
    if not (isinstance(output, Tensor) and output.requires_grad):
        found = [None] * len(inputs)
    else:
        # The gradient from above is 1/2, so that a backward which ignores it is seen.
        half = output.sum() / 2
        found = torch.autograd.grad(half, list(inputs.values()), allow_unused=True)
    return {
        f"the gradient for {name}": torch.zeros_like(x) if g is None else 2 * g
        for (name, x), g in zip(inputs.items(), found, strict=True)
    }


def find_leaves(output: Tensor) -> list[Tensor]:
    """Return the tensors in which a backward from `output` would leave gradients."""
    seen, todo, leaves = set(), [output.grad_fn], []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves += [node.variable] if hasattr(node, "variable") else []
        todo += [following for following, _ in node.next_functions]
    return leaves


def value_and_gradients(function: Callable, *args: Any, **inputs: Tensor) -> dict[str, Any]:
    """function(*args, **inputs), and its gradient for every one of the inputs."""
    inputs = {name: leaf(x) for name, x in inputs.items()}
    output = function(*args, **inputs)
    return {"the result": output} | gradients(output, **inputs)


def with_inputs_after(function: Callable, *args: Tensor, **kwargs: Any) -> dict[str, Any]:
    """What a function returns, and what it left of its arguments."""
    output = function(*args, **kwargs)
    return {"the result": output} | {
        f"the argument {i}, which should stay as it was,": a
        for i, a in enumerate(args)
        if isinstance(a, Tensor)
    }


def error_of(name: str, function: Callable, *args: Any, **kwargs: Any) -> str:
    """How a function answers a bad argument: a ValueError should name it."""
    try:
        function(*args, **kwargs)
    except ValueError as error:
        text = str(error).replace("_", " ").lower()
        wanted = name.replace("_", " ")
        # A single letter is in many words.
        if re.search(rf"\b{name}\b", text) if len(name) == 1 else wanted in text:
            return "a ValueError that names it"
        return f"a ValueError that does not name {name}"
    except Exception as error:  # an observation: whatever it is
        return f"{type(error).__name__}"
    return "no error"


def attempt(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """What a function returns, or its error in words: whether it refuses is left open."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # an observation: whatever it is
        return f"{type(error).__name__}: {error}"


def is_error(function: Callable, *args: Any, clear: bool = False) -> str:
    """Whether a call raises an error, and one that says something if it should be clear."""
    try:
        function(*args)
    except Exception as error:  # an observation: whatever it is
        return "an error" if str(error) or not clear else "an error without a message"
    return "no error"


def misfit(draws: Tensor, probs: Tensor) -> str | None:
    """What is wrong with draws from `probs`: support, or frequencies with p < 1e-9."""
    if draws.numel() and not bool(((draws >= 0) & (draws < len(probs))).all()):
        return "a draw is outside the vocabulary"
    counts = torch.bincount(draws.flatten(), minlength=len(probs)).double()
    probs = probs.double()
    if counts[probs == 0].any():
        return "a token was drawn that has probability 0"
    possible = probs > 0
    expected, order = (counts.sum() * probs[possible] / probs.sum()).sort()
    # The statistic follows its law with 5 expected draws a cell: what is rarer shares one.
    n_rare = max(int((expected < 5).sum()), int((expected.cumsum(0) < 5).sum()) + 1)
    expected, counts = (
        torch.cat([x[:n_rare].sum()[None], x[n_rare:]]) for x in (expected, counts[possible][order])
    )
    statistic = ((counts - expected).square() / expected).sum()
    degrees = torch.tensor(len(counts) - 1, dtype=torch.float64)
    if degrees == 0 or torch.special.gammaincc(degrees / 2, statistic / 2) >= 1e-9:
        return None
    return "the frequencies of the draws do not fit the probabilities"


def constant_groups_are_zeros(observed: dict[str, Tensor], reference: dict) -> str | None:
    """What is wrong with advantages whose last six groups of 7 had equal rewards; None if right."""
    for name, groups in observed.items():
        if bool((groups.reshape(-1, 7)[-6:] != 0).any()):
            return f"{name}: a group whose rewards are all equal should give exact zeros"
        if not torch.allclose(groups, reference[name], rtol=1e-3, atol=1e-5):
            return f"{name}: beside constant groups, the advantages of the other group are wrong"
    return None
