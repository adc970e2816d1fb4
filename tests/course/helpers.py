"""What the tests of this folder do to models and notebooks."""

import torch

from utils.authoring.notebooks import SOLUTIONS, Edition, build, execute
from utils.course import session


def randomize(model):
    """B away from 0, so that the adapters do something."""
    for name, tensor in model.trainable_state().items():
        if name.endswith("lora_B"):
            tensor.normal_(std=0.02)
    return model


def get_base_weights(model):
    return {k: v.clone() for k, v in model.base.original_model.state_dict().items()}


def assert_bit_identical(model, weights):
    now = model.base.original_model.state_dict()
    assert weights.keys() == now.keys()
    assert all(torch.equal(weights[name], now[name]) for name in weights)


def run_short(chapter: str, edition: Edition, monkeypatch) -> list[str]:
    """Execute a chapter's notebook, cut short: what its cells with checks print."""
    monkeypatch.setenv(session.SHORT, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # another notebook runs beside it
    executed = execute(build(chapter, edition), SOLUTIONS)
    checks = [cell for cell in executed.cells if "check" in cell.metadata.get("tags", [])]
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in checks]
