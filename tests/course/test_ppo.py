"""Chapter 2's solutions against finite differences, and what no check of it draws."""

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from solutions.ch2_ppo import (
    TransformerWithValueHeadLora,
    calc_clipped_surrogate_objective,
    calc_entropy_bonus,
    calc_kl_penalty,
    calc_value_function_loss,
)
from tests.course.conftest import ARCHITECTURES
from tests.support.inputs import ragged_batch, ragged_mask
from utils.grading.checks import Rng


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_new_value_head_says_zero_and_changes_no_logit(kind, checkpoints):
    model = TransformerWithValueHeadLora.from_pretrained(checkpoints[kind], device="cpu")
    ids, attention_mask = ragged_batch(Rng(0))
    logits, values = model.forward_with_value_head(ids, attention_mask)
    assert torch.equal(logits, model(ids, attention_mask))
    assert (values == 0).all()


def test_gradients_are_finite_differences():
    rng = Rng(0, torch.float64)
    mask = ragged_mask(rng)
    values, old_values, returns = rng.normal(3, *mask.shape)
    logits, ref_logits = rng.normal(2, *mask.shape, 7)
    for f, x in (
        (lambda x: calc_value_function_loss(x, old_values, returns, mask, 0.3, None), values),
        (lambda x: calc_value_function_loss(x, old_values, returns, mask, 0.3, 0.2), values),
        (lambda x: calc_entropy_bonus(x, mask, 0.7), logits),
        (lambda x: calc_kl_penalty(x, ref_logits, mask, 0.7), logits),
    ):
        assert torch.autograd.gradcheck(f, (x.clone().requires_grad_(),))


def test_a_ratio_beyond_float32_leaves_no_nan():
    new = torch.tensor([[0.0, 0.0, -3.0]], requires_grad=True)
    old, advantages = torch.tensor([[-200.0, 0.0, -1e4]]), torch.tensor([[1.0, 2.0, 3.0]])
    objective = calc_clipped_surrogate_objective(new, old, advantages, torch.ones(1, 3).bool())
    torch.testing.assert_close(objective.item(), (1.2 + 2.0 + 3.6) / 3)
    objective.backward()
    torch.testing.assert_close(new.grad, torch.tensor([[0.0, 2 / 3, 0.0]]))


def test_kl_penalty_bears_tokens_that_neither_can_emit():
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]]], requires_grad=True)
    ref_logits = torch.tensor([[[1.0, 0.0, -torch.inf]]])
    mask = torch.tensor([[True]])
    penalty = calc_kl_penalty(logits, ref_logits, mask, 1.0)
    expected = kl_divergence(
        Categorical(logits=torch.zeros(2)), Categorical(logits=torch.tensor([1.0, 0.0]))
    )
    torch.testing.assert_close(penalty, expected)
    penalty.backward()
    assert logits.grad.isfinite().all()
