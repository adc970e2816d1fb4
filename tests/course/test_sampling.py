"""Chapter 0's solutions against autograd, and what no check of them asks for."""

import pytest
import torch

from solutions.ch0_sampling import (
    calc_expected_policy_gradient,
    calc_reinforce_objective,
    get_logprobs,
    get_samples,
    sample_next_token,
)
from tests.support.inputs import poison, ragged_mask
from utils.grading.checks import Rng

PROMPTS = ["The plot", "Q: 12+34\n", "To be honest the acting", "F"]


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
