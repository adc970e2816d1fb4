"""Chapter 1's solutions against PEFT, and the invariants of hooks, reference and merging."""

import copy
import gc

import peft
import pytest
import torch
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

from solutions.ch1_lora import (
    TransformerWithLora,
    calc_sft_loss,
    find_lora_sites,
)
from tests.course.conftest import ARCHITECTURES
from tests.course.helpers import (
    assert_bit_identical,
    get_base_weights,
    randomize,
)
from tests.oracles.ch1_lora import LLAMA_NAMES, sft_loss_by_loops
from tests.support.inputs import poison, ragged_batch, ragged_mask
from utils.grading.checks import Rng
from utils.models.loading import ALL_LINEAR_SITES, NativeLayerNorm, load_base_model


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_new_model_equals_its_base_bit_for_bit(kind, checkpoints):
    model = TransformerWithLora.from_pretrained(
        checkpoints[kind], sites=ALL_LINEAR_SITES, device="cpu"
    )
    ids, attention_mask = ragged_batch(Rng(0))
    assert torch.equal(model(ids, attention_mask), model.base(ids, attention_mask=attention_mask))


def test_the_reference_is_the_base_and_leaves_nothing_behind(lora):
    ids, attention_mask = ragged_batch(Rng(0))
    base = lora.base(ids, attention_mask=attention_mask)
    adapted = lora(ids, attention_mask)
    assert not torch.allclose(adapted, base, atol=1e-3)
    with lora.reference():
        assert torch.equal(lora(ids, attention_mask), base)
    assert torch.equal(lora(ids, attention_mask), adapted)
    assert torch.equal(lora.base(ids, attention_mask=attention_mask), base)
    assert not any(hook.fwd_hooks for hook in lora.base.hook_dict.values())


def test_merged_equals_hooked_and_the_weights_come_back_bit_for_bit(lora):
    ids, attention_mask = ragged_batch(Rng(0))
    weights = get_base_weights(lora)
    hooked = lora(ids, attention_mask)
    with lora.merged():
        torch.testing.assert_close(lora(ids, attention_mask), hooked, atol=1e-5, rtol=0)
        assert torch.equal(lora(ids, attention_mask), lora.base(ids, attention_mask=attention_mask))
    assert_bit_identical(lora, weights)
    with pytest.raises(KeyboardInterrupt), lora.merged():
        raise KeyboardInterrupt
    assert_bit_identical(lora, weights)
    assert torch.equal(lora(ids, attention_mask), hooked)


def test_merging_between_forward_and_backward_changes_no_gradient(lora):
    ids, attention_mask = ragged_batch(Rng(0))
    lora(ids, attention_mask).square().mean().backward()
    expected = [p.grad.clone() for p in lora.trainable_parameters()]
    lora.zero_grad()
    loss = lora(ids, attention_mask).square().mean()
    with lora.merged():
        lora(ids, attention_mask)
    loss.backward()
    for parameter, gradient in zip(lora.trainable_parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("outer", ["merged", "reference"])
@pytest.mark.parametrize("inner", ["merged", "reference"])
def test_contexts_do_not_nest(embedded, outer, inner):
    weights = get_base_weights(randomize(embedded))
    with (
        pytest.raises(RuntimeError, match=f"{inner}.*{outer}"),
        getattr(embedded, outer)(),
        getattr(embedded, inner)(),
    ):
        pass
    assert_bit_identical(embedded, weights)
    with embedded.merged():  # and the failure left it usable
        pass


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


def test_bfloat16_base_with_float32_adapters(checkpoints):
    model = TransformerWithLora.from_pretrained(
        checkpoints["llama"], device="cpu", dtype=torch.bfloat16
    )
    randomize(model)
    ids, attention_mask = ragged_batch(Rng(0))
    weights = get_base_weights(model)
    logits = model(ids, attention_mask)
    assert logits.dtype == torch.float32
    logits.square().mean().backward()
    assert all(
        p.dtype == torch.float32 and p.grad.isfinite().all() for p in model.trainable_parameters()
    )
    with model.merged():
        site, layer = next(iter(model.adapters.items()))
        merged = model.base.get_submodule(site).original_component.weight
        original = next(w for n, w in weights.items() if "q_proj" in n)
        once_rounded = (original.float() + layer.compute_delta().T).to(torch.bfloat16)
        assert torch.equal(merged, once_rounded)
    assert_bit_identical(model, weights)


def test_a_site_that_never_fires_is_an_error_that_says_which_do(checkpoints):
    for sites in (("attn.qkv",), ("attn.q", "mlp.gate"), ("nothing",)):
        with pytest.raises(ValueError, match=r"sites should be among \['attn.k', .* 'mlp.out'\]"):
            TransformerWithLora.from_pretrained(checkpoints["gpt2"], sites=sites, device="cpu")


@pytest.mark.parametrize("as_scaling", [float, torch.tensor])  # a reader's own may be a tensor
def test_save_and_load(embedded, tmp_path, as_scaling):
    ids, attention_mask = ragged_batch(Rng(0))
    randomize(embedded)
    for layer in embedded.adapters.values():
        layer.scaling = as_scaling(layer.scaling)
    path = tmp_path / "deep" / "adapter.safetensors"
    embedded.save_adapter(path)
    other = TransformerWithLora.from_pretrained("embedded", sites=ALL_LINEAR_SITES, device="cpu")
    other.load_adapter(path)
    assert torch.equal(other(ids, attention_mask), embedded(ids, attention_mask))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "alpha": 16}, r"lora_A should have shape \[128, 2\], but has \[128, 4\]"),
        ({"alpha": 16}, "alpha / rank of the adapter should be 4.0, but is 8.0"),
        ({"sites": ("attn.q",)}, "unknown .*blocks.0.attn.k.lora_A"),
        ({"sites": (*ALL_LINEAR_SITES, "attn.q")[:5]}, "unknown .*mlp.out"),
    ],
)
def test_an_adapter_that_does_not_fit_changes_nothing(embedded, tmp_path, arguments, message):
    path = tmp_path / "adapter.safetensors"
    embedded.save_adapter(path)
    other = TransformerWithLora.from_pretrained(
        "embedded", **{"sites": ALL_LINEAR_SITES, "device": "cpu"} | arguments
    )
    before = copy.deepcopy(other.trainable_state())
    with pytest.raises(ValueError, match=message):
        other.load_adapter(path)
    assert all(torch.equal(before[k], v) for k, v in other.trainable_state().items())


def test_a_missing_or_damaged_adapter_is_a_clear_error(embedded, tmp_path):
    with pytest.raises(ValueError, match="is not there"):
        embedded.load_adapter(tmp_path / "none.safetensors")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="should be a safetensors file"):
        embedded.load_adapter(damaged)


# --- PEFT ---------------------------------------------------------------------------------------


def compare_with_peft(ours, theirs, set_theirs):
    """Logits, the gradient of a loss in A and B, and merged weights, with the same adapters."""
    ids, attention_mask = ragged_batch(Rng(0))
    set_theirs()
    expected = theirs(input_ids=ids, attention_mask=attention_mask, **_positions(attention_mask))
    logits = ours(ids, attention_mask)
    real = attention_mask.bool()
    torch.testing.assert_close(logits[real], expected.logits[real], atol=5e-6, rtol=0)
    logits[real].square().mean().backward()
    expected.logits[real].square().mean().backward()


def _positions(attention_mask):
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    return {"position_ids": positions}


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_equals_peft_on_separate_projections(kind, checkpoints):
    sites = tuple(LLAMA_NAMES)
    ours = randomize(
        TransformerWithLora.from_pretrained(checkpoints[kind], 3, 12, sites, device="cpu")
    )
    config = peft.LoraConfig(
        r=3, lora_alpha=12, target_modules=[n.split(".")[1] for n in LLAMA_NAMES.values()]
    )
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoints[kind]), config)
    modules = {}
    for site, layer in ours.adapters.items():
        _, index, name = site.split(".", 2)
        module = theirs.get_submodule(f"base_model.model.model.layers.{index}.{LLAMA_NAMES[name]}")
        modules[site] = module
        assert module.scaling["default"] == layer.scaling

    def set_theirs():
        for site, layer in ours.adapters.items():
            modules[site].lora_A["default"].weight.data = layer.lora_A.data.T.clone()
            modules[site].lora_B["default"].weight.data = layer.lora_B.data.T.clone()

    compare_with_peft(ours, theirs, set_theirs)
    for site, layer in ours.adapters.items():
        for name, gradient in (("lora_A", layer.lora_A.grad), ("lora_B", layer.lora_B.grad)):
            theirs_gradient = getattr(modules[site], name)["default"].weight.grad.T
            torch.testing.assert_close(gradient, theirs_gradient, atol=2e-6, rtol=1e-4)
    theirs.merge_adapter()
    with ours.merged():
        for site, module in modules.items():
            merged = ours.base.get_submodule(site).original_component.weight
            torch.testing.assert_close(merged, module.base_layer.weight, atol=1e-6, rtol=0)


def test_equals_peft_on_gpt2_with_three_times_the_rank(checkpoints):
    """Rank r on each of q, k, v is PEFT's `c_attn` at rank 3r: stacked A, block-diagonal B."""
    rank = 3
    ours = randomize(
        TransformerWithLora.from_pretrained(
            checkpoints["gpt2"], rank, 12, ALL_LINEAR_SITES, device="cpu"
        )
    )
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=12,
        target_modules=["c_attn", "c_proj", "c_fc"],
        rank_pattern={"c_attn": 3 * rank},
        alpha_pattern={"c_attn": 36},
        fan_in_fan_out=True,
    )
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(checkpoints["gpt2"]), config
    ).eval()
    names = {"attn.o": "attn.c_proj", "mlp.in": "mlp.c_fc", "mlp.out": "mlp.c_proj"}
    adapters = ours.adapters

    def get_module(index, name):
        return theirs.get_submodule(f"base_model.model.transformer.h.{index}.{name}")

    def set_theirs():
        for index in range(2):
            qkv = [adapters[f"blocks.{index}.attn.{letter}"] for letter in "qkv"]
            module = get_module(index, "attn.c_attn")
            stacked = torch.cat([layer.lora_A.data for layer in qkv], dim=1)
            module.lora_A["default"].weight.data = stacked.T.clone()
            blocks = torch.block_diag(*[layer.lora_B.data for layer in qkv])
            module.lora_B["default"].weight.data = blocks.T.clone()
            for site, name in names.items():
                layer, module = adapters[f"blocks.{index}.{site}"], get_module(index, name)
                module.lora_A["default"].weight.data = layer.lora_A.data.T.clone()
                module.lora_B["default"].weight.data = layer.lora_B.data.T.clone()

    compare_with_peft(ours, theirs, set_theirs)
    for index in range(2):
        gradient = get_module(index, "attn.c_attn").lora_A["default"].weight.grad.T
        stacked = [adapters[f"blocks.{index}.attn.{letter}"].lora_A.grad for letter in "qkv"]
        torch.testing.assert_close(torch.cat(stacked, 1), gradient, atol=2e-6, rtol=1e-4)
    theirs.merge_adapter()
    with ours.merged():
        for index in range(2):
            merged = [
                ours.base.get_submodule(f"blocks.{index}.attn.{letter}").original_component.weight
                for letter in "qkv"
            ]
            fused = get_module(index, "attn.c_attn").base_layer.weight  # Conv1D: [d_in 3 d_out]
            torch.testing.assert_close(torch.cat(merged).T, fused, atol=1e-6, rtol=0)


def test_every_linear_site_is_found(checkpoints):
    for kind in ARCHITECTURES:
        base = TransformerWithLora.from_pretrained(checkpoints[kind], device="cpu").base
        names = {site.split(".", 2)[2] for site in find_lora_sites(base)}
        expected = set(LLAMA_NAMES) - ({"mlp.gate"} if kind == "gpt2" else set())
        assert names == expected


# --- Supervised fine-tuning ---------------------------------------------------------------------


def test_sft_loss_looks_at_no_other_position_and_is_zero_without_targets():
    rng = Rng(0)
    logits, tokens, loss_mask = (
        rng.normal(4, 6, 9),
        rng.integers(0, 9, 4, 6),
        ragged_mask(rng, 4, 6),
    )
    predicts = torch.cat([loss_mask[:, 1:], torch.zeros(4, 1, dtype=torch.bool)], dim=1)
    poisoned = poison(logits, predicts).requires_grad_()
    loss = calc_sft_loss(poisoned, tokens, loss_mask)
    torch.testing.assert_close(loss, sft_loss_by_loops(logits, tokens, loss_mask))
    loss.backward()
    assert poisoned.grad.isfinite().all()
    assert (poisoned.grad[~predicts] == 0).all()
    assert calc_sft_loss(logits, tokens, torch.zeros_like(loss_mask)) == 0


def test_sft_teaches_one_mood(embedded):
    ids = torch.tensor([embedded.tokenizer.encode("The plot was wonderful.")])
    optimizer = torch.optim.AdamW(embedded.trainable_parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = calc_sft_loss(embedded(ids), ids, torch.ones_like(ids, dtype=torch.bool))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


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
