"""What holds of any model, on SmolLM2, where it has been fetched."""

import pytest
import torch

from solutions.ch0_sampling import get_logprobs, get_samples, select_completion
from solutions.ch1_lora import TransformerWithLora
from utils.course.real_model import make_tasks, run_task
from utils.models.fetch import find_fetched, is_fetched
from utils.models.forward import get_scorer

pytestmark = [
    pytest.mark.takes_long,
    pytest.mark.skipif(not is_fetched("smollm2"), reason="python -m utils.models.fetch smollm2"),
]
PROMPTS = ["This movie is", "The film", "After the first hour I"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = TransformerWithLora.from_pretrained("smollm2", device="cpu")
    for layer in model.adapters.values():
        torch.nn.init.normal_(layer.lora_B, std=0.02)
    return model


@pytest.fixture(scope="module")
def samples(model):
    return get_samples(model, PROMPTS, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def logits(model, samples):
    with torch.no_grad():
        return model(samples.input_ids, samples.attention_mask)


def test_a_row_does_not_depend_on_its_left_padding(model, samples, logits):
    for row in range(len(PROMPTS)):
        kept = samples.attention_mask[row].bool()
        with torch.no_grad():
            alone = model(samples.input_ids[row : row + 1, kept])
        torch.testing.assert_close(alone[0], logits[row, kept], atol=2e-3, rtol=1e-4)


def test_merged_equals_hooked_and_the_reference_is_the_base_bit_for_bit(model, samples, logits):
    before = {name: x.clone() for name, x in model.base.state_dict().items()}
    with torch.no_grad(), model.merged():
        merged = model.base(samples.input_ids, attention_mask=samples.attention_mask)
    torch.testing.assert_close(merged, logits, atol=2e-3, rtol=1e-4)
    assert all(torch.equal(x, before[name]) for name, x in model.base.state_dict().items())
    with torch.no_grad(), model.reference():
        reference = model(samples.input_ids, samples.attention_mask)
        base = model.base(samples.input_ids, attention_mask=samples.attention_mask)
    assert torch.equal(reference, base)
    assert (logits - reference).abs().max() > 1e-2


def test_the_fast_path_gives_the_bridges_logprobs(model, samples, logits):
    prompt_len, mask = samples.prompt_len, samples.completion_mask
    with torch.no_grad():
        scored = get_scorer(model).measure(
            samples.input_ids, samples.attention_mask, prompt_len, temperature=0.7
        )
    expected = get_logprobs(logits, samples.input_ids, prompt_len, temperature=0.7)
    torch.testing.assert_close(scored.logprobs[mask], expected[mask], atol=5e-4, rtol=1e-4)
    log_p = (select_completion(logits, prompt_len) / 0.7).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(scored.entropies[mask], entropy[mask], atol=2e-3, rtol=1e-4)


def test_sums_are_learnt_in_a_few_phases(tmp_path):
    task = make_tasks()["sums"]
    row = run_task("sums", task, find_fetched("smollm2"), tmp_path, 1, total_phases=8)
    assert row["heldout_after"] > row["heldout_before"] + 0.2
