"""What the tests of this folder do to models."""

import torch

from solutions.ch2_ppo import TransformerWithValueHeadLora
from tests.support.models import SITES

# What the native forward computes, of the fixture `folders`.
NATIVE = ["embedded", "gpt2", "llama", "qwen", "qwen3", "mistral", "tied llama"]

# Of a trainer: one step for each rollout, and no table of samples.
ONE_STEP = {
    "num_minibatches": 1, "batches_per_learning_phase": 1, "warmup_steps": 0, "device": "cpu",
    "samples_every": 0,
}  # fmt: skip


def load(
    folders, name, kind=TransformerWithValueHeadLora, dtype=torch.float32, sites=None, device="cpu"
):
    torch.manual_seed(0)
    given = SITES.get(name, SITES["gpt2"] if name == "embedded" else SITES["llama"])
    sites = sites or (("attn.q", "attn.v") if name in ("phi", "gpt_neox") else given)
    model = kind.from_pretrained(folders[name], rank=3, sites=sites, device=device, dtype=dtype)
    for parameter in model.trainable_parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


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
