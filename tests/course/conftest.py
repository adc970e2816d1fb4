"""Models that the tests of this folder share."""

from pathlib import Path

import pytest
import torch

from solutions.ch1_lora import TransformerWithLora
from tests.course.helpers import randomize
from tests.support.models import SITES, get_checkpoint
from utils.models.loading import ALL_LINEAR_SITES

ARCHITECTURES = ("gpt2", "llama", "qwen")


@pytest.fixture(scope="session")
def checkpoints() -> dict[str, Path]:
    """Folders with the small checkpoints, by architecture, each with the embedded tokenizer."""
    folders = {kind: get_checkpoint(kind) for kind in ARCHITECTURES}
    return folders


@pytest.fixture
def embedded():
    """The embedded model with fresh adapters on every linear site."""
    torch.manual_seed(0)
    return TransformerWithLora.from_pretrained("embedded", sites=ALL_LINEAR_SITES, device="cpu")


@pytest.fixture(params=ARCHITECTURES)
def lora(request, checkpoints):
    """Each architecture with adapters on every linear site whose B is random instead of 0."""
    torch.manual_seed(0)
    folder, sites = checkpoints[request.param], SITES[request.param]
    return randomize(TransformerWithLora.from_pretrained(folder, sites=sites, device="cpu"))
