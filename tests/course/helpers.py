"""What the tests of this folder share: pages, recorded runs, programs, and models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from solutions.ch2_ppo import TransformerWithValueHeadLora
from tests.support.models import SITES

ROOT = Path(__file__).parents[2]

# Of the fixture `folders`, what the native forward computes, and what is left to the bridge.
NATIVE = ["embedded", "gpt2", "llama", "qwen", "qwen3", "mistral", "tied llama"]
OTHERS = ["phi", "gpt_neox", "windowed"]

# Of a trainer: one step for each rollout, and no table of samples.
ONE_STEP = {
    "num_minibatches": 1, "batches_per_learning_phase": 1, "warmup_steps": 0, "device": "cpu",
    "samples_every": 0,
}  # fmt: skip


def read_page(path):
    """The text of a file of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def read_results(name):
    """What the experiments have recorded under this name."""
    return json.loads(read_page(f"chapters/results/{name}.json"))


def run_python(*words, **environment):
    """Run Python in the course's folder, and return how it ended and what it said."""
    command, env = [sys.executable, *map(str, words)], os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def get_sites(name):
    """The linear layers of a model that is native."""
    return SITES.get(name, SITES["gpt2" if name == "embedded" else "llama"])


def load(
    folders, name, kind=TransformerWithValueHeadLora, dtype=torch.float32, sites=None, device="cpu"
):
    torch.manual_seed(0)
    given = ("attn.q", "attn.v") if name in OTHERS else get_sites(name)
    options = {"rank": 3, "sites": sites or given, "device": device, "dtype": dtype}
    model = kind.from_pretrained(folders[name], **options)
    for parameter in model.trainable_parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


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
