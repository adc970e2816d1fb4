"""Chapter 0's solutions against finite differences, enumeration and plain decoding."""

import itertools

import pytest
import torch

from solutions.ch0_sampling import (
    calc_entropy,
    calc_expected_policy_gradient,
    calc_reinforce_objective,
    get_completion_mask,
    get_logprobs,
    get_samples,
    sample_next_token,
    select_completion,
)
from solutions.ch1_lora import TransformerWithLora
from tests.support.inputs import poison, ragged_mask
from utils.grading.checks import Rng

PROMPTS = ["The plot", "Q: 12+34\n", "To be honest the acting", "F"]


def test_logprobs_keep_no_log_softmax():
    logits, tokens = torch.randn(2, 5, 64, requires_grad=True), torch.randint(64, (2, 5))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        get_logprobs(logits, tokens, temperature=0.7)
    forbidden = (logits[:, :-1] / 0.7).log_softmax(-1)
    large = [x for x in kept if x.shape == forbidden.shape and x.is_floating_point()]
    assert len({x.data_ptr() for x in large}) <= 1  # the scaled logits themselves
    assert not any(torch.allclose(x, forbidden) for x in large)


def test_bfloat16_logits_are_scored_and_sampled_in_float32():
    logits, tokens = torch.randn(2, 4, 500).bfloat16(), torch.randint(500, (2, 4))
    got = get_logprobs(logits, tokens)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, get_logprobs(logits.float(), tokens))
    flat = torch.zeros(1, 30_000).bfloat16()  # the mass up to p cannot be counted in bfloat16
    draws = [sample_next_token(flat, top_p=0.5) for _ in range(100)]
    assert torch.cat(draws).unique().numel() > 90


def test_a_tiny_temperature_is_greedy():
    logits = torch.randn(50, 7) * 100
    assert torch.equal(sample_next_token(logits, temperature=1e-38), logits.argmax(-1))


def test_select_completion_is_one_position_early():
    per_position = torch.arange(6.0)[None]
    assert select_completion(per_position, 4).tolist() == [[3.0, 4.0]]


def test_entropy_gradient_by_finite_differences():
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(calc_entropy, (logits,))


def sample_without_cache(model, prompt_ids, mask, steps, temperature, generator):
    """Plain decoding: the whole sequence again for every token."""
    ids, ended = prompt_ids, torch.zeros(len(prompt_ids), dtype=torch.bool)
    for _ in range(steps):
        with torch.no_grad():
            logits = model(ids, mask)[:, -1]
        tokens = sample_next_token(logits, temperature, generator=generator)
        tokens = tokens.masked_fill(ended, 0)
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        mask = torch.cat([mask, (~ended).long()[:, None]], dim=1)
        ended |= tokens == 2
        if ended.all():
            break
    return ids


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_cached_sampling_equals_the_full_forward(lora, temperature):
    samples = get_samples(
        lora, PROMPTS, 12, temperature, generator=torch.Generator().manual_seed(1)
    )
    prompt_len = samples.prompt_len
    plain = sample_without_cache(
        lora,
        samples.input_ids[:, :prompt_len],
        samples.attention_mask[:, :prompt_len],
        12,
        temperature,
        torch.Generator().manual_seed(1),
    )
    assert torch.equal(samples.input_ids, plain)


def test_left_padding_changes_neither_sampling_nor_scoring(lora):
    together = get_samples(lora, PROMPTS, 10, temperature=0)
    logits = lora(together.input_ids, together.attention_mask)
    logprobs = get_logprobs(logits, together.input_ids, together.prompt_len)
    for row, prompt in enumerate(PROMPTS):
        alone = get_samples(lora, [prompt], 10, temperature=0)
        assert alone.texts == [together.texts[row]]
        score = get_logprobs(lora(alone.input_ids), alone.input_ids, alone.prompt_len)
        mask = alone.completion_mask[0]
        width = alone.completion_ids.shape[1]
        torch.testing.assert_close(score[0][mask], logprobs[row, :width][mask], atol=2e-5, rtol=0)


def test_samples_of_the_embedded_model(embedded):
    samples = get_samples(embedded, PROMPTS, 40, generator=torch.Generator().manual_seed(0))
    tokenizer = embedded.tokenizer
    assert samples.completion_ids.shape == samples.completion_mask.shape
    assert torch.equal(
        samples.completion_mask, get_completion_mask(samples.completion_ids, tokenizer.eos_token_id)
    )
    assert torch.equal(
        samples.attention_mask[:, samples.prompt_len :].bool(), samples.completion_mask
    )
    for row, (prompt, text) in enumerate(zip(PROMPTS, samples.texts, strict=True)):
        kept = samples.input_ids[row][samples.attention_mask[row].bool()]
        assert kept[0] == tokenizer.bos_token_id
        assert tokenizer.decode(kept, skip_special_tokens=True) == prompt + text
        beyond = samples.completion_ids[row][~samples.completion_mask[row]]
        assert (beyond == tokenizer.pad_token_id).all()
    assert samples.completion_ids.shape[1] < 40  # all had ended


def test_a_bare_bridge_samples_what_new_adapters_do(embedded):
    bare, adapted = (
        get_samples(model, PROMPTS, 12, generator=torch.Generator().manual_seed(0)).texts
        for model in (embedded.base, embedded)
    )
    assert bare == adapted


def test_an_advantage_per_completion_counts_for_each_of_its_tokens():
    rng = Rng(0)
    mask = ragged_mask(rng, 5, 4)
    logprobs, per_row = poison(rng.normal(5, 4), mask), rng.normal(5)
    torch.testing.assert_close(
        calc_reinforce_objective(logprobs, per_row, mask),
        calc_reinforce_objective(logprobs, per_row[:, None].repeat(1, 4), mask),
    )


@pytest.mark.parametrize("baseline", [0.0, 3.0])
def test_expected_policy_gradient_is_the_gradient_of_the_expected_reward(baseline):
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(6, dtype=torch.float64)
    (exact,) = torch.autograd.grad((logits.softmax(-1) * rewards).sum(), logits)
    mean, _ = calc_expected_policy_gradient(logits.detach(), rewards, baseline)
    torch.testing.assert_close(mean, exact)


def test_the_groups_own_mean_as_baseline_shrinks_the_gradient():
    """By enumerating all groups of 3 over 4 actions: a factor of (G - 1) / G."""
    logits = torch.randn(4, dtype=torch.float64)
    rewards = torch.randn(4, dtype=torch.float64)
    probs, group = logits.softmax(-1), 3
    scores = torch.eye(4, dtype=torch.float64) - probs
    total = torch.zeros(4, dtype=torch.float64)
    for actions in itertools.product(range(4), repeat=group):
        chosen = list(actions)
        centered = rewards[chosen] - rewards[chosen].mean()
        total += probs[chosen].prod() * (centered[:, None] * scores[chosen]).mean(0)
    exact, _ = calc_expected_policy_gradient(logits, rewards, 0.0)
    torch.testing.assert_close(total, exact * (group - 1) / group)


def test_a_tokenizer_without_bos_or_pad_still_samples(checkpoints):
    model = TransformerWithLora.from_pretrained(checkpoints["gpt2"], device="cpu")
    model.tokenizer.bos_token = None
    model.tokenizer.pad_token = None
    samples = get_samples(model, PROMPTS, 6, generator=torch.Generator().manual_seed(0))
    assert samples.completion_mask.any(-1).all()
    assert samples.prompt_len == max(
        len(ids) for ids in model.tokenizer(PROMPTS, add_special_tokens=False)["input_ids"]
    )
