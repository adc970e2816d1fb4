"""Chapter 3's solutions against TRL and the chapters before."""

import pytest
import torch

from solutions.ch3_grpo import (
    GrpoArgs,
    GrpoTrainer,
    calc_grpo_objective,
    group_advantages,
    measure_loss_and_gradient_at_start,
    process_advantages,
)
from tests.course.helpers import randomize
from tests.oracles.trl import calc_trl_loss
from tests.support.inputs import one_zero, poison, ragged_mask
from utils.grading.checks import Rng


def test_one_step_at_the_last_token_is_outcome_supervision():
    rewards = torch.randn(6)
    got = process_advantages(
        list(rewards[:, None]), [torch.tensor([3])] * 6, group_size=3, completion_len=4
    )
    expected = group_advantages(rewards, 3)[:, None].expand(6, 4)
    torch.testing.assert_close(got, expected)


# --- TRL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "beta"), [(0.2, 0.2, 0.04), (0.1, 0.3, 0.0), (0.2, 0.28, 1.0)]
)
def test_objective_equals_trl_in_value_and_gradient(low, high, beta):
    rng = Rng(0, torch.float64)
    mask = ragged_mask(rng, 6, 9)
    old, noise, ref = rng.normal(3, *mask.shape)
    new = old + 0.5 * noise
    advantages = one_zero(rng, mask)
    ratio = (new - old)[mask].exp()
    assert (ratio < 1 - low).any()
    assert (ratio > 1 + high).any()
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    objective = calc_grpo_objective(
        poison(ours, mask), poison(old, mask), poison(ref, mask), advantages, mask, low, high, beta
    )
    loss = calc_trl_loss(theirs, old, ref, advantages, mask, low, high, beta)
    assert abs(objective.item() + loss.item()) < 1e-6
    objective.backward()
    loss.backward()
    torch.testing.assert_close(ours.grad, -theirs.grad, atol=1e-6, rtol=0)


# --- From chapter 2 to chapter 3 ----------------------------------------------------------------


def test_the_objective_starts_at_zero_and_its_gradient_does_not(tmp_path):
    args = GrpoArgs(batch_size=16, num_minibatches=1, gen_len=10, runs_dir=tmp_path, device="cpu")
    trainer = GrpoTrainer(args)
    randomize(trainer.model)
    trainer.metrics["reward"].append(0.5)
    state = trainer.get_state()
    objective, grad_norm = measure_loss_and_gradient_at_start(trainer)
    assert abs(objective) < 1e-6
    assert grad_norm > 1e-3
    after = trainer.get_state()
    assert torch.equal(state["generator"], after["generator"])
    assert trainer.metrics == {"reward": [0.5]}
    assert all(p.grad is None for p in trainer.model.trainable_parameters())
    trainer.args.reward_fn = lambda samples: torch.ones(len(samples))
    with pytest.raises(ValueError, match="all are equal in every group"):
        measure_loss_and_gradient_at_start(trainer)
