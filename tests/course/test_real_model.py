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


def test_the_fast_path_gives_the_bridges_logprobs():
    torch.manual_seed(0)
    model = TransformerWithLora.from_pretrained("smollm2", device="cpu")
    for layer in model.adapters.values():
        torch.nn.init.normal_(layer.lora_B, std=0.02)
    prompts = ["This movie is", "The film", "After the first hour I"]
    samples = get_samples(model, prompts, 8, generator=torch.Generator().manual_seed(0))
    prompt_len, mask = samples.prompt_len, samples.completion_mask
    batch = (samples.input_ids, samples.attention_mask)
    with torch.no_grad():
        logits = model(*batch)
        scored = get_scorer(model).measure(*batch, prompt_len, temperature=0.7)
    expected = get_logprobs(logits, samples.input_ids, prompt_len, temperature=0.7)
    torch.testing.assert_close(scored.logprobs[mask], expected[mask], atol=5e-4, rtol=1e-4)
    log_p = (select_completion(logits, prompt_len) / 0.7).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(scored.entropies[mask], entropy[mask], atol=2e-3, rtol=1e-4)


def test_sums_are_learnt_in_a_few_phases(tmp_path):
    task = make_tasks()["sums"]
    row = run_task("sums", task, find_fetched("smollm2"), tmp_path, 1, total_phases=8)
    assert row["heldout_after"] > row["heldout_before"] + 0.2
