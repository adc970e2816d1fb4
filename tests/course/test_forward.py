"""The native forward against the bridge: log-probs, entropies, values, KL, and their gradients."""

import contextlib

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from solutions.ch0_sampling import calc_entropy, get_logprobs, select_completion
from solutions.ch1_lora import LoraLayer, TransformerWithLora
from solutions.ch2_ppo import TransformerWithValueHeadLora
from tests.course.helpers import NATIVE, OTHERS, load
from utils.models import blocks, forward
from utils.models.fast_path import find_native
from utils.models.forward import BridgeScorer, NativeScorer, get_scorer
from utils.models.loading import load_base_model


def make_rows(vocab=512):
    """Unequal groups of prompts padded to 7 columns, completions of 0 to 6 tokens."""
    generator = torch.Generator().manual_seed(0)
    groups, lengths = torch.tensor([3, 1, 2, 2]), torch.tensor([7, 3, 1, 5])
    ends = torch.tensor([6, 1, 3, 6, 0, 2, 5, 4])
    prompts = torch.randint(0, vocab, (4, 7), generator=generator).repeat_interleave(groups, 0)
    ids = torch.cat([prompts, torch.randint(0, vocab, (8, 6), generator=generator)], dim=1)
    is_prompt = torch.arange(7) >= 7 - lengths.repeat_interleave(groups)[:, None]
    is_completion = torch.arange(6) < ends[:, None]
    return ids, torch.cat([is_prompt, is_completion], dim=1).long(), is_completion


def score_by_the_bridge(model, ids, attention, temperature):
    """What chapter 0 and torch.distributions make of the bridge's logits."""
    logits, values = model.forward_with_value_head(ids, attention)
    with torch.no_grad(), model.reference():
        ref_logits = select_completion(model(ids, attention), 7) / temperature
    logprobs = get_logprobs(logits, ids, 7, temperature)
    logits = select_completion(logits, 7) / temperature
    kl = kl_divergence(Categorical(logits=logits), Categorical(logits=ref_logits))
    return logprobs, calc_entropy(logits), select_completion(values, 7), kl


def get_parts(scores):
    return scores.logprobs, scores.entropies, scores.values, scores.measure_kl()


def assert_parts_of_the_bridge(model, temperature=0.7):
    """Return the parts of both as well, and the mask."""
    ids, attention, mask = make_rows()
    found = get_parts(get_scorer(model).measure(ids, attention, 7, temperature))
    expected = score_by_the_bridge(model, ids, attention, temperature)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=1e-5, atol=2e-5)
    return found, expected, mask


@torch.no_grad()
def assert_scored_as_by_the_bridge(model, rows):
    ids, attention, mask = rows
    logprobs = get_scorer(model).measure(ids, attention, 7).logprobs
    expected = get_logprobs(model(ids, attention), ids, 7)
    torch.testing.assert_close(logprobs[mask], expected[mask], rtol=1e-5, atol=2e-5)


def get_gradients(parts, mask, model):
    """Gradients of a random combination of the four parts."""
    generator = torch.Generator().manual_seed(1)
    total = sum(
        (part.masked_fill(~mask, 0.0) * torch.randn(mask.shape, generator=generator)).sum()
        for part in parts
    )
    return torch.autograd.grad(total, model.trainable_parameters())


def test_every_architecture_has_a_model_that_is_tried(folders):
    """One that is added to `blocks`, and that no test tries, could be slow without a word."""
    kinds = {AutoConfig.from_pretrained(folders[n]).model_type for n in NATIVE if n != "embedded"}
    assert kinds == {"gpt2", *blocks.GATED}, "NATIVE, in helpers.py, should have one of each"
    assert {*NATIVE, *OTHERS} == folders.keys(), "helpers.py should name every model of conftest.py"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", NATIVE)
def test_scores_and_gradients_are_those_of_the_bridge(name, temperature, folders, monkeypatch):
    monkeypatch.setattr(forward, "MIN_ROWS", 3)  # several chunks, the last one shorter
    monkeypatch.setattr(forward, "CHUNK", 0)
    model = load(folders, name)
    why = f"the fast path of {name} is off: {find_native(model)}"
    assert type(get_scorer(model)) is NativeScorer, why
    found, expected, mask = assert_parts_of_the_bridge(model, temperature)
    assert not any(part[~mask].any() for part in found)
    gradients = (get_gradients(parts, mask, model) for parts in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() < 3e-5 * theirs.norm()


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_scored_by_the_bridge(name, folders):
    model = load(folders, name)
    assert type(get_scorer(model)) is BridgeScorer
    assert_parts_of_the_bridge(model)


def test_in_float64_hardly_a_difference_is_left(folders):
    """Of GPT-2: Hugging Face's rotations and RMS norms are in float32."""
    model = load(folders, "gpt2", TransformerWithLora, torch.float64)
    ids, attention, mask = make_rows()
    scores = get_scorer(model).measure(ids, attention, 7, 0.7)
    logits = model(ids, attention)
    expected = get_logprobs(logits, ids, 7, 0.7), calc_entropy(select_completion(logits, 7) / 0.7)
    for ours, theirs in zip((scores.logprobs, scores.entropies), expected, strict=True):
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", NATIVE)
def test_bfloat16_is_as_near_to_float32_as_the_bridge_is(name, folders):
    exact, rounded = load(folders, name), load(folders, name, dtype=torch.bfloat16)
    ids, attention, mask = make_rows()
    expected = score_by_the_bridge(exact, ids, attention, 0.7)
    bridged = score_by_the_bridge(rounded, ids, attention, 0.7)
    found = get_parts(get_scorer(rounded).measure(ids, attention, 7, 0.7))
    for ours, theirs, right in zip(found, bridged, expected, strict=True):
        assert ours.dtype == torch.float32
        ours, theirs = ((x - right)[mask].square().mean().sqrt() for x in (ours, theirs))
        assert ours < 1.5 * theirs + 1e-3
    right = torch.cat([g.flatten() for g in get_gradients(expected, mask, exact)])
    ours, theirs = (
        (torch.cat([g.flatten() for g in get_gradients(parts, mask, rounded)]) - right).norm()
        for parts in (found, bridged)
    )
    assert ours < 2 * theirs  # of one draw: 0.65 to 1.78 times, over these models and five draws


def test_modes_decide_what_is_scored(folders):
    model, rows = load(folders, "gpt2"), make_rows()
    for mode in (contextlib.nullcontext, model.reference, model.merged):
        with mode():
            assert_scored_as_by_the_bridge(model, rows)
    with model.merged():
        scores = get_scorer(model).measure(*rows[:2], 7)
        with pytest.raises(RuntimeError, match="reference"):  # which would be merged, too
            scores.measure_kl()


def test_entropies_carry_a_gradient_only_if_asked(folders):
    model, (ids, attention, _) = load(folders, "gpt2"), make_rows()
    scores = get_scorer(model).measure(ids, attention, 7, has_entropy_grad=False)
    assert scores.logprobs.requires_grad
    assert not scores.entropies.requires_grad
    with torch.no_grad():
        assert not get_scorer(model).measure(ids, attention, 7).logprobs.requires_grad


class Overridden(TransformerWithLora):
    """A reader's own forward pass."""

    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


def test_a_reader_who_looks_on_is_shown_the_bridge(folders):
    model = load(folders, "gpt2")
    zeroed = [("blocks.0.mlp.hook_out", lambda x, hook: torch.zeros_like(x))]
    with model.base.hooks(fwd_hooks=zeroed):
        assert_scored_as_by_the_bridge(model, make_rows())
    assert type(get_scorer(model)) is NativeScorer
    linear = model.base.get_submodule("blocks.0.attn.o").original_component
    (layer, *_) = model.adapters.values()
    before = linear.register_forward_pre_hook
    for register in (linear.register_forward_hook, before, layer.register_forward_hook):
        handle = register(lambda *_: None)
        assert type(get_scorer(model)) is BridgeScorer
        handle.remove()
    model.base.train()
    assert type(get_scorer(model)) is BridgeScorer  # with its dropout
    model.base.train(False)
    assert type(get_scorer(model)) is NativeScorer
    assert type(get_scorer(load(folders, "gpt2", Overridden))) is BridgeScorer
    layer.forward = lambda x: 0 * x
    assert type(get_scorer(model)) is BridgeScorer
    del layer.forward
    model.base.original_model.train()
    assert type(get_scorer(model)) is BridgeScorer


class HalfLayer(LoraLayer):
    def forward(self, x):
        return 0.5 * super().forward(x)

    def compute_delta(self):
        return 0.5 * super().compute_delta()


class SameLayer(LoraLayer):
    def forward(self, x):
        return x.to(self.lora_A.dtype) @ self.compute_delta()

    def compute_delta(self):
        return self.scaling * (self.lora_A @ self.lora_B)


def test_what_computes_something_else_is_scored_by_the_bridge(folders, monkeypatch):
    def get_kind(change):
        model = load(folders, "llama")
        change(model)
        with torch.no_grad():
            return type(get_scorer(model))

    def replace_adapter(model, kind=HalfLayer):
        next(iter(model.adapters.values())).__class__ = kind

    def replace_mlp(model):
        mlp = model.base.blocks[0].mlp.original_component
        twice = {"forward": lambda self, x: 2 * super(type(self), self).forward(x)}
        mlp.__class__ = type("Mlp", (type(mlp),), twice)

    def add_bias(model):  # as folding a norm into the unembedding does
        unembed = model.base.unembed.original_component
        unembed.bias = torch.nn.Parameter(torch.linspace(0, 3, len(unembed.weight)))

    assert get_kind(lambda model: replace_adapter(model, SameLayer)) is NativeScorer
    for change in (replace_adapter, replace_mlp, add_bias):
        assert get_kind(change) is BridgeScorer, change.__name__
    with torch.autocast("cpu", torch.bfloat16):
        assert get_kind(lambda model: None) is BridgeScorer
    monkeypatch.setattr(LoraLayer, "forward", lambda self, x: 0 * x)
    assert get_kind(lambda model: None) is BridgeScorer


@pytest.mark.parametrize(
    ("hook_name", "factor", "expected"),
    [
        ("ln_final.hook_out", 1, NativeScorer),
        ("ln_final.hook_in", 1, BridgeScorer),
        ("ln_final.hook_out", 2, BridgeScorer),
        ("no.such.hook", 1, BridgeScorer),
    ],
)
def test_a_method_of_a_notebook_is_tried(hook_name, factor, expected, folders):
    """A notebook's class has its exercise in a class of its own, and a head that starts at zero."""

    class Pieces(TransformerWithValueHeadLora):
        def forward_with_value_head(self, input_ids, attention_mask=None):
            seen = []
            hook = (hook_name, lambda x, hook: seen.append(x))
            logits = self._run([hook], input_ids, attention_mask)
            return logits, factor * self.value_head(seen[0]).squeeze(-1)

    model = load(folders, "gpt2")
    model.__class__ = Pieces
    weight = torch.nn.init.zeros_(model.value_head.weight).clone()
    assert type(get_scorer(model)) is expected
    assert torch.equal(model.value_head.weight, weight)


def test_rows_without_a_mask_without_a_completion_and_with_gaps(folders):
    model, (ids, attention, mask) = load(folders, "llama"), make_rows()
    attention[0, 9], attention[3, 6] = 0, 0  # amid a completion, and the end of a prompt
    assert_scored_as_by_the_bridge(model, (ids, attention, mask))
    with torch.no_grad():
        found = get_scorer(model).measure(ids, None, 7)
        expected = get_scorer(model).measure(ids, torch.ones_like(ids), 7)
        assert get_scorer(model).measure(ids, None, ids.shape[1]).logprobs.shape == (len(ids), 0)
    assert torch.equal(found.logprobs, expected.logprobs)


def test_adapters_and_weights_count_as_their_attributes_say(folders):
    model = load(folders, "gpt2")
    for layer in model.adapters.values():
        layer.scaling = 0.5
    query = model.base.blocks[0].attn.q.original_component
    query.bias.data = torch.ones(32)
    query.weight.data = 2 * query.weight.data  # no longer joint with the keys' and values'
    assert_scored_as_by_the_bridge(model, make_rows())


def test_a_bridge_that_learns_itself_gets_its_gradients(folders):
    base, (ids, attention, _) = load_base_model(folders["gpt2"], device="cpu"), make_rows()
    get_scorer(base).measure(ids, attention, 7).logprobs.sum().backward()
    found = {name: p.grad.clone() for name, p in base.named_parameters() if p.grad is not None}
    base.zero_grad()
    get_logprobs(base(ids, attention_mask=attention), ids, 7).sum().backward()
    assert found.keys() == {n for n, p in base.named_parameters() if p.grad is not None}
    with torch.no_grad():
        assert type(get_scorer(base)) is NativeScorer


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"prompt_len": 0}, {"prompt_len": 14}])
def test_settings_that_mean_nothing_are_refused(wrong, folders):
    model, (ids, attention, _) = load(folders, "gpt2"), make_rows()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        get_scorer(model).measure(ids, attention, **{"prompt_len": 7} | wrong)


def test_a_prompt_is_computed_once_and_padding_never(folders, monkeypatch):
    model, (ids, attention, mask) = load(folders, "gpt2"), make_rows()
    get_scorer(model)  # which is tried once, on other tokens
    counts = []
    project = blocks.Block.project

    def count(self, x, *args):
        counts.append(len(x))
        return project(self, x, *args)

    monkeypatch.setattr(blocks.Block, "project", count)
    get_scorer(model).measure(ids, attention, 7)
    last_ones = int(mask.any(-1).sum())
    assert counts == [7 + 3 + 1 + 5 + int(mask.sum()) - last_ones] * 2


def test_no_more_logits_exist_than_a_chunk_holds(folders):
    vocab, seen = 511, []  # a width that nothing else has

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            outs = out if isinstance(out, tuple) else (out,)
            seen.extend(x.shape for x in outs if isinstance(x, torch.Tensor))
            return out

    model = load(folders, "embedded", TransformerWithLora, sites=("attn.q",))
    scorer, ids = get_scorer(model), torch.randint(3, vocab, (64, 60))
    scorer.native.unembedding = scorer.native.unembedding[:vocab].clone()
    with Watching():
        scores = scorer.measure(ids, torch.ones_like(ids), 10)
        kl = scores.measure_kl()
        (scores.logprobs + scores.entropies + kl).sum().backward()
    rows = [shape[0] for shape in seen if shape[-1:] == (vocab,) and shape[0] != vocab]
    assert len(ids) * 50 > 2 * max(rows) > 0
    assert max(rows) == forward.CHUNK // vocab
