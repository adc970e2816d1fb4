"""What runs is what was written: an edit of the reader's code changes what a trainer does."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.course.helpers import randomize
from utils.grading.substitution import build_module

ROOT = Path(__file__).parents[2]
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
        "values = self.value_head(hidden[0]).tanh()",
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


def build_chapters(old: str = "", new: str = ""):
    """Chapters 0 to 2 with one edit, each built on the one before; chapter 2's module."""
    names: dict = {}
    sources = {c: (ROOT / "solutions" / f"{c}.py").read_text(encoding="utf-8") for c in CHAPTERS}
    assert not old or sum(source.count(old) for source in sources.values()) == 1
    for chapter, source in sources.items():
        for earlier in CHAPTERS:
            source = source.replace(
                f"from solutions.{earlier} import", f"from {earlier}_now import"
            )
        module = build_module(chapter, source.replace(old, new) if old else source)
        names[f"{chapter}_now"] = module
        yield f"{chapter}_now", module


def train(monkeypatch, folder, *edit):
    """The trained numbers, and what was said."""
    for name, module in build_chapters(*edit):
        monkeypatch.setitem(sys.modules, name, module)
    args = module.RLHFArgs(**TASK, runs_dir=folder, name=f"run-{len(edit)}")
    trainer = module.RLHFTrainer(args)
    torch.manual_seed(0)
    randomize(trainer.model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train()
    numbers = torch.cat([x.flatten() for x in trainer.model.trainable_state().values()])
    return numbers, [str(w.message) for w in said if "as it is written" in str(w.message)]


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return train(monkeypatch, tmp_path_factory.mktemp("unedited"))


def test_a_trainer_does_the_same_twice(unedited, tmp_path, monkeypatch):
    assert torch.equal(train(monkeypatch, tmp_path)[0], unedited[0])


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_changes_what_the_trainer_does(name, unedited, tmp_path, monkeypatch):
    old, new, is_said = EDITS[name]
    numbers, said = train(monkeypatch, tmp_path, old, new)
    assert (numbers - unedited[0]).abs().max() > 1e-4
    assert len(said) == is_said  # once, and not in each minibatch
    assert unedited[1] == []
