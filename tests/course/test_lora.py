"""Chapter 1's solutions against PEFT, and what no check of it asks for."""

import copy
import gc

import peft
import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

from solutions.ch1_lora import TransformerWithLora
from tests.course.helpers import randomize
from tests.support.inputs import ragged_batch
from tests.support.models import LLAMA_NAMES
from utils.grading.checks import Rng
from utils.models.export import save_peft_adapter
from utils.models.loading import ALL_LINEAR_SITES, NativeLayerNorm, load_base_model


def test_no_attention_pattern_outlives_a_forward(checkpoints):
    model = TransformerWithLora.from_pretrained(checkpoints["gpt2"], device="cpu")
    pattern_shape = (2, 4, 9, 9)  # [batch heads seq seq]
    with model.base.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", lambda x, hook: None)]):
        model(torch.ones(2, 9, dtype=torch.long))
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    assert not [x for x in tensors if x.shape == pattern_shape]


def test_a_deepcopy_has_adapters_of_its_own(embedded):
    ids, attention_mask = ragged_batch(Rng(0))
    randomize(embedded)
    twin = copy.deepcopy(embedded)
    before = embedded(ids, attention_mask)
    assert torch.equal(twin(ids, attention_mask), before)
    randomize(twin)
    assert torch.equal(embedded(ids, attention_mask), before)
    assert not torch.equal(twin(ids, attention_mask), before)


def test_an_adapter_whose_scaling_is_a_tensor_is_saved_and_loaded(embedded, tmp_path):
    ids, attention_mask = ragged_batch(Rng(0))
    randomize(embedded)
    for layer in embedded.adapters.values():  # as a reader's own may have it
        layer.scaling = torch.tensor(layer.scaling)
    path = tmp_path / "deep" / "adapter.safetensors"
    embedded.save_adapter(path)
    other = TransformerWithLora.from_pretrained("embedded", sites=ALL_LINEAR_SITES, device="cpu")
    other.load_adapter(path)
    assert torch.equal(other(ids, attention_mask), embedded(ids, attention_mask))


# --- PEFT ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_gradients_and_merged_weights_are_those_of_peft(kind, checkpoints, tmp_path):
    """The logits are compared where adapters are exported (test_export.py), GPT-2's among them."""
    ours = TransformerWithLora.from_pretrained(
        checkpoints[kind], 3, 12, tuple(LLAMA_NAMES), device="cpu"
    )
    save_peft_adapter(randomize(ours), tmp_path / "peft")
    plain = AutoModelForCausalLM.from_pretrained(checkpoints[kind])
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "peft", is_trainable=True)
    ids, attention_mask = ragged_batch(Rng(0))
    given = {"position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0)}
    expected = theirs(input_ids=ids, attention_mask=attention_mask, **given).logits
    for logits in (ours(ids, attention_mask), expected):
        logits[attention_mask.bool()].square().mean().backward()
    modules = {}
    for site, layer in ours.adapters.items():
        _, index, name = site.split(".", 2)
        path = f"base_model.model.model.layers.{index}.{LLAMA_NAMES[name]}"
        modules[site] = module = theirs.get_submodule(path)
        for matrix in ("lora_A", "lora_B"):
            gradient = getattr(module, matrix)["default"].weight.grad.T
            torch.testing.assert_close(getattr(layer, matrix).grad, gradient, atol=2e-6, rtol=1e-4)
    theirs.merge_adapter()
    with ours.merged():
        for site, module in modules.items():
            merged = ours.base.get_submodule(site).original_component.weight
            torch.testing.assert_close(merged, module.base_layer.weight, atol=1e-6, rtol=0)


def look_into_a_layer_norm(base, ids):
    """Logits, a gradient, logits when a hook doubles a norm's inside, and what the hooks saw."""
    seen = []
    ends = [(f"blocks.1.ln2.hook_{end}", lambda x, hook: seen.append(x)) for end in ("in", "out")]
    with base.hooks(fwd_hooks=ends):
        logits = base(ids)
    weight = base.blocks[0].attn.o.original_component.weight
    (gradient,) = torch.autograd.grad(logits.square().mean(), weight)
    inside = [("blocks.1.ln2.hook_normalized", lambda x, hook: seen.append(x) or 2 * x)]
    with base.hooks(fwd_hooks=inside):
        changed = base(ids)
    assert len(seen) == 3
    assert not torch.allclose(changed, logits, atol=1e-2)
    return [logits, gradient, changed, *seen]


def test_layer_norms_are_native_until_someone_looks_inside(checkpoints):
    """The values, the gradients and what hooks see are those of the bridge that TransformerLens
    boots."""
    ours = load_base_model(checkpoints["gpt2"], device="cpu")
    theirs = TransformerBridge.boot_transformers(str(checkpoints["gpt2"]), device="cpu")
    ids = torch.arange(3, 23).reshape(2, 10)
    found = [look_into_a_layer_norm(base.train(False), ids) for base in (ours, theirs)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert sum(isinstance(m, NativeLayerNorm) for m in ours.modules()) == 5
