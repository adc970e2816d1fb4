"""Chapter 3's solutions against TRL and the chapters before."""

import pytest
import torch

from solutions.ch0_sampling import calc_reinforce_objective
from solutions.ch2_ppo import compute_advantages, compute_token_rewards
from solutions.ch3_grpo import (
    GrpoArgs,
    GrpoTrainer,
    calc_grpo_objective,
    calc_single_update_objective,
    group_advantages,
    measure_loss_and_gradient_at_start,
    process_advantages,
)
from tests.course.helpers import randomize
from tests.oracles.trl import calc_trl_loss
from tests.support.inputs import one_zero, poison, ragged_mask
from utils.grading.checks import Rng


def test_process_advantages_keep_float64_and_bear_rows_without_steps():
    step_rewards = [torch.rand(2, dtype=torch.float64), torch.tensor([], dtype=torch.float64)]
    got = process_advantages(step_rewards, [torch.tensor([0, 1]), torch.tensor([])], 2, 3)
    assert got.dtype == torch.float64
    assert (got[1] == 0).all()
    assert got[0].any()


def test_one_step_at_the_last_token_is_outcome_supervision():
    rewards = torch.randn(6)
    got = process_advantages(
        list(rewards[:, None]), [torch.tensor([3])] * 6, group_size=3, completion_len=4
    )
    expected = group_advantages(rewards, 3)[:, None].expand(6, 4)
    torch.testing.assert_close(got, expected)


def test_the_single_update_objective_is_reinforce_in_its_gradient():
    mask = torch.ones(4, 5, dtype=torch.bool)
    logprobs = torch.randn(4, 5, requires_grad=True)
    advantages = torch.randn(4)
    objective = calc_single_update_objective(logprobs, advantages, mask)
    torch.testing.assert_close(objective, advantages.mean())
    (gradient,) = torch.autograd.grad(objective, logprobs)
    reinforce = calc_reinforce_objective(logprobs, advantages, mask)
    torch.testing.assert_close(gradient, torch.autograd.grad(reinforce, logprobs)[0])


# --- TRL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("low", "high", "beta"), [(0.2, 0.2, 0.04), (0.1, 0.3, 0.0), (0.2, 0.28, 1.0)]
)
def test_objective_equals_trl_in_value_and_gradient(seed, low, high, beta):
    rng = Rng(seed, torch.float64)
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


def test_ppo_without_values_at_lambda_one_is_grpos_broadcast_advantage():
    mask = ragged_mask(Rng(0))
    scores = group_advantages(torch.randn(6), 3)
    token_rewards = compute_token_rewards(scores, mask)
    got = compute_advantages(torch.zeros(mask.shape), token_rewards, mask, gamma=1.0, lam=1.0)
    assert torch.equal(got, scores[:, None] * mask)
    other = compute_advantages(torch.zeros(mask.shape), token_rewards, mask, gamma=1.0, lam=0.95)
    assert not torch.allclose(other, got)


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
