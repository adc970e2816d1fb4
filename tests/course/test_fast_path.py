"""What runs is what was written: an edit of the reader's code changes what a trainer does."""

import contextlib
import re
import sys
import warnings
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig

from solutions.ch2_ppo import TransformerWithValueHeadLora
from tests.course.helpers import ROOT, randomize
from utils.bench.models import save_random
from utils.grading.substitution import build_module
from utils.models import forward
from utils.models.decoding import Decoder, get_decoder
from utils.models.fast_path import forget
from utils.models.forward import BridgeScorer, NativeScorer, get_scorer

pytestmark = pytest.mark.takes_long

twist = ModuleType("twist")  # a reader's own module
twist.values = lambda values: values
CHAPTERS = ("ch0_sampling", "ch1_lora", "ch2_ppo")
TASK = {
    "total_phases": 2, "batch_size": 8, "gen_len": 8, "num_minibatches": 2, "warmup_steps": 0,
    "prompts": ["This movie is", "A film with a plot that"], "temperature": 0.7, "base_lr": 1e-2,
    "ent_coef": 0.5, "kl_coef": 0.5, "vf_coef": 1.0, "device": "cpu", "samples_every": 0,
}  # fmt: skip
# Lines of LoRA, the value head and the objective, what is written instead, and whether that is
# something which the fast path does not compute.
EDITS = {
    "adapters off": ("return out + layer(x).reshape(out.shape).to(out.dtype)", "return out", True),
    "a gelu": (
        "return (x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B",
        "return F.gelu(x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B",
        True,
    ),
    "alpha alone": ("self.scaling = alpha / rank", "self.scaling = alpha", False),
    "half is frozen": ("@ self.lora_A * self.scaling)", "@ self.lora_A.detach() * 8.0)", True),
    "no reference": ('self._in_mode("reference")', 'self._in_mode("hooked")', True),
    "merged twice": ("(weight) + delta)", "(weight) + 2 * delta)", True),
    "no mask": (
        "return self._run([], input_ids, attention_mask, **kwargs)",
        "return self._run([], input_ids, None, **kwargs)",
        True,
    ),
    "a tanh": (
        "values = self.value_head(hidden[0].to(self.value_head.weight.dtype))",
        "values = self.value_head(hidden[0].to(self.value_head.weight.dtype)).tanh()",
        True,
    ),
    "before the norm": ('"ln_final.hook_out", read', '"ln_final.hook_in", read', True),
    "a detached head": ("hidden.append(x)", "hidden.append(x.detach())", True),
    "no temperature": ("logits if temperature == 1 else logits / temperature", "logits", True),
    "twice the entropy": ("return ent_coef * entropies", "return 2 * ent_coef * entropies", True),
    "a turned KL": ("(logprobs.exp() * logratio)", "-(logprobs.exp() * logratio)", True),
    "the maximum": ("masked_mean(torch.minimum(ratio", "masked_mean(torch.maximum(ratio", False),
    "no half": ("return vf_coef / 2 * masked_mean", "return vf_coef * masked_mean", False),
}  # fmt: skip


def build_chapters(monkeypatch, old: str | re.Pattern = "", new=""):
    """Build chapters 0 to 2 with one edit, or one name changed everywhere, each built on the one
    before; return chapter 2's module."""
    sources = {c: (ROOT / "solutions" / f"{c}.py").read_text(encoding="utf-8") for c in CHAPTERS}
    pattern = old if isinstance(old, re.Pattern) else re.compile(re.escape(old))
    n_found = sum(len(pattern.findall(source)) for source in sources.values())
    assert n_found == 1 or old == "" or (pattern is old and n_found)
    for chapter, source in sources.items():
        source = pattern.sub(new, source)
        source = re.sub(r"from solutions\.(ch[012]\w+) import", r"from \1_now import", source)
        module = build_module(chapter, source)
        monkeypatch.setitem(sys.modules, f"{chapter}_now", module)
    return module


def train(monkeypatch, folder, *edit, **given):
    """The trained numbers, and what was said."""
    module = build_chapters(monkeypatch, *edit)
    args = module.RLHFArgs(**TASK, runs_dir=folder, name=f"run-{len(edit)}", **given)
    trainer = module.RLHFTrainer(args)
    torch.manual_seed(0)
    randomize(trainer.model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train()
    numbers = torch.cat([x.flatten() for x in trainer.model.trainable_state().values()])
    return numbers, [str(w.message) for w in said if "so your own code runs" in str(w.message)]


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return train(monkeypatch, tmp_path_factory.mktemp("unedited"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_changes_what_the_trainer_does(name, dtype, unedited, tmp_path, monkeypatch):
    old, new, is_said = EDITS[name]
    numbers, said = train(monkeypatch, tmp_path, old, new, dtype=dtype)
    assert len(said) == is_said  # once, and not in each minibatch
    assert unedited[1] == []
    if dtype == torch.float32:
        assert (numbers - unedited[0]).abs().max() > 1e-4


def test_rounding_in_a_deep_model_in_bfloat16_is_not_taken_for_an_edit(tmp_path):
    sizes = {"num_hidden_layers": 30, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    folder = save_random(tmp_path / "deep", LlamaConfig(**sizes, **heads, initializer_range=0.1))
    model = TransformerWithValueHeadLora.from_pretrained(
        folder, sites=("attn.q", "mlp.out"), device="cpu", dtype=torch.bfloat16
    )
    scorer = get_scorer(model)
    assert type(scorer) is NativeScorer
    assert scorer.gives_the_same("the KL")


# Names of given code, which a reader may change.
NAMES = {
    "_mode": "_state", "_run": "_go", "_layers": "_low_rank", "_linears": "_frozen",
    "adapters": "low_rank", "value_head": "critic",
}  # fmt: skip
# Other ways to say what a model is made of.
ON = 'self.adapters if self._mode == "hooked" else {}'
PARTS = {
    "none": (re.compile("def get_parts"), "def list_parts"),
    "an error": ("return Parts(", "return [].get_parts("),
    "another kind": ("return Parts(", "return list("),
    "no adapters": (ON, "{}"),
    "adapters that are always on": (ON, "self.adapters"),
    "no head": ("value_head=self.value_head", "value_head=None"),
}  # fmt: skip


def test_other_names_are_as_fast_and_train_the_same(unedited, tmp_path, monkeypatch):
    names = re.compile(rf"\b({'|'.join(NAMES)})\b(?!=)")
    numbers, said = train(monkeypatch, tmp_path, names, lambda match: NAMES[match[0]])
    assert said == []
    assert torch.equal(numbers, unedited[0])


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_wrong_are_slow_and_said_once(name, monkeypatch):
    module = build_chapters(monkeypatch, *PARTS[name])
    model = randomize(module.TransformerWithValueHeadLora.from_pretrained("embedded", device="cpu"))
    policy, reference = contextlib.nullcontext, model.reference
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for mode in (policy, reference, policy, reference):
            with mode(), torch.no_grad():
                kinds = {type(get_scorer(model)), type(get_decoder(model))}
            if mode is (reference if name == "adapters that are always on" else policy):
                assert kinds == {BridgeScorer, Decoder}
    assert ["so your own code runs" in str(warning.message) for warning in said] == [True]


@pytest.mark.parametrize("name", ["alpha alone", "the maximum", "no half"])
def test_what_stays_native_trains_what_the_slow_path_trains(name, unedited, tmp_path, monkeypatch):
    old, new, _ = EDITS[name]
    fast, _ = train(monkeypatch, tmp_path / "fast", old, new)
    monkeypatch.setattr(forward, "find_native", lambda model: "of a test")
    slow, _ = train(monkeypatch, tmp_path / "slow", old, new)
    # Adam makes a whole step of a gradient that is rounding alone.
    assert (fast - slow).norm() < 0.25 * (fast - unedited[0]).norm()


class Gated(TransformerWithValueHeadLora):
    """A reader's class with a number and a function that may change, and a detached head."""

    gate, detached = 1.0, False

    def forward_with_value_head(self, input_ids, attention_mask=None):
        logits, values = super().forward_with_value_head(input_ids, attention_mask)
        values = values.detach() if self.detached else values
        return logits, self.gate * twist.values(values)


@pytest.fixture
def gated():
    model = TransformerWithValueHeadLora.from_pretrained("embedded", device="cpu")
    model.__class__ = Gated
    return randomize(model)


def test_a_change_of_what_a_model_calls_is_seen(gated):
    assert type(get_scorer(gated)) is NativeScorer
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(twist, "values", lambda values: 1.005 * values)
        assert type(get_scorer(gated)) is BridgeScorer
    assert type(get_scorer(gated)) is NativeScorer
    gated.gate = 3.0
    forget(gated)  # as train() does
    assert type(get_scorer(gated)) is BridgeScorer


def test_gradients_are_compared_after_a_call_in_inference_mode(gated):
    gated.detached = True
    with torch.inference_mode():
        get_scorer(gated)
    assert type(get_scorer(gated)) is BridgeScorer


def test_a_try_leaves_everything_as_it_was(gated):
    gated.value_head.weight.grad = torch.ones_like(gated.value_head.weight)
    state = {name: tensor.clone() for name, tensor in gated.trainable_state().items()}
    random_state = torch.get_rng_state()
    get_scorer(gated)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in gated.trainable_state().items())
    assert (gated.value_head.weight.grad == 1).all()
    assert all(layer.lora_A.grad is None for layer in gated.adapters.values())


class Scaled(TransformerWithValueHeadLora):
    """A reader's class whose logits are scaled: by 1, or nearly everywhere."""

    def forward(self, input_ids, attention_mask=None, **kwargs):
        logits = super().forward(input_ids, attention_mask, **kwargs)
        return logits * self.get_scale(logits)


SCALES = {
    "a parameter": lambda model, logits: model.gain,
    "a far token": lambda model, logits: 1 + 0.1 * (torch.arange(logits.shape[1]) > 20)[:, None],
    "a token": lambda model, logits: 1 + 0.1 * (torch.arange(logits.shape[-1]) == 7),
}


@pytest.mark.parametrize("name", SCALES)
def test_what_differs_in_few_places_is_seen(name, gated, monkeypatch):
    gated.__class__ = Scaled
    gated.gain = torch.nn.Parameter(torch.tensor(1.0))
    monkeypatch.setattr(Scaled, "get_scale", SCALES[name], raising=False)
    assert type(get_scorer(gated)) is BridgeScorer
