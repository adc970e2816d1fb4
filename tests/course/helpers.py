"""Inputs and measures that the tests of this folder share."""

import torch

from utils import course
from utils.authoring.notebooks import SOLUTIONS, Edition, build, execute


def randomize(model):
    """B away from 0, so that the adapters do something."""
    for name, tensor in model.trainable_state().items():
        if name.endswith("lora_B"):
            tensor.normal_(std=0.02)
    return model


def ragged_batch(rows: int = 4, prompt_len: int = 5, completion_len: int = 7, seed: int = 0):
    """Random tokens, left-padded prompts of different lengths, and a ragged completion mask."""
    generator = torch.Generator().manual_seed(seed)
    seq = prompt_len + completion_len
    input_ids = torch.randint(3, 512, (rows, seq), generator=generator)
    pads = torch.arange(rows) % prompt_len
    lengths = torch.randint(1, completion_len + 1, (rows,), generator=generator)
    mask = torch.arange(completion_len) < lengths[:, None]
    attention_mask = torch.cat([torch.arange(prompt_len) >= pads[:, None], mask], dim=1).long()
    return input_ids * attention_mask, attention_mask, mask


def ragged_mask(rows: int = 6, completion: int = 9) -> torch.Tensor:
    """Lengths from 0 to all: an empty row, one token, a full row."""
    lengths = torch.tensor([0, 1, completion, 4, 2, completion - 1])[:rows]
    return torch.arange(completion) < lengths[:, None]


def poison(x: torch.Tensor, mask: torch.Tensor, value: float = float("nan")) -> torch.Tensor:
    """`x` with `value` wherever `mask` is false."""
    while mask.ndim < x.ndim:
        mask = mask[..., None]
    return x.masked_fill(~mask, value)


def chi_square_p(draws: torch.Tensor, probs: torch.Tensor) -> float:
    """The p-value of the draws' frequencies under `probs`; impossible draws give 0."""
    counts = torch.bincount(draws.flatten(), minlength=len(probs)).double()
    if counts[probs == 0].sum() > 0:
        return 0.0
    expected = counts.sum() * probs.double()
    possible = probs > 0
    statistic = ((counts - expected)[possible].square() / expected[possible]).sum()
    degrees = torch.tensor(possible.sum().item() - 1, dtype=torch.float64)
    if degrees == 0:
        return 1.0
    return torch.special.gammaincc(degrees / 2, statistic / 2).item()


def get_base_weights(model):
    return {k: v.clone() for k, v in model.base.original_model.state_dict().items()}


def assert_bit_identical(model, weights):
    now = model.base.original_model.state_dict()
    assert weights.keys() == now.keys()
    assert all(torch.equal(weights[name], now[name]) for name in weights)


def run_short(stem: str, edition: Edition, monkeypatch) -> list[str]:
    """Execute a chapter's notebook, cut short: what its cells with checks print."""
    monkeypatch.setenv(course.SHORT, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # another notebook runs beside it
    executed = execute(build(stem, edition), SOLUTIONS)
    checks = [cell for cell in executed.cells if "check" in cell.metadata.get("tags", [])]
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in checks]
