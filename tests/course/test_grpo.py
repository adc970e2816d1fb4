"""Chapter 3's solutions against TRL, brute force and chapter 2."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from trl import GRPOConfig, GRPOTrainer

from solutions.ch0_sampling import Samples, calc_reinforce_objective
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import compute_advantages, compute_token_rewards
from solutions.ch3_grpo import (
    GrpoArgs,
    GrpoTrainer,
    calc_grpo_objective,
    calc_per_token_kl,
    calc_single_update_objective,
    group_advantages,
    make_grpo_memory,
    measure_loss_and_gradient_at_start,
    process_advantages,
)
from tests.course.helpers import poison, ragged_mask, randomize


def test_group_advantages_by_hand():
    rewards = torch.tensor([1.0, 3.0, 10.0, 10.0, 0.0, 4.0], requires_grad=True)
    # group means 2, 10, 2; stds sqrt(2), 0, sqrt(8); the batch's variance 18.2666...
    got = group_advantages(rewards, 2, eps=0.5)
    expected = [
        -1 / (2**0.5 + 0.5),
        1 / (2**0.5 + 0.5),
        0,
        0,
        -2 / (8**0.5 + 0.5),
        2 / (8**0.5 + 0.5),
    ]
    torch.testing.assert_close(got, torch.tensor(expected))
    assert not got.requires_grad
    batch_std = torch.tensor([1.0, 3.0, 10.0, 10.0, 0.0, 4.0]).std().item()
    expected = torch.tensor([-1.0, 1.0, 0.0, 0.0, -2.0, 2.0])
    torch.testing.assert_close(group_advantages(rewards, 2, "none"), expected)
    torch.testing.assert_close(
        group_advantages(rewards, 2, "batch", eps=0.5), expected / (batch_std + 0.5)
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_constant_group_gives_exact_zeros_and_a_prompts_level_does_not_matter(scale):
    rewards = torch.cat([torch.full((7,), 0.1), torch.randn(7), torch.full((7,), 1e6 / 3)])
    got = group_advantages(rewards, 7, scale)
    assert (got[:7] == 0).all()
    assert (got[14:] == 0).all()
    assert got[7:14].any()
    if scale != "batch":
        shifted = rewards.view(3, 7) + torch.tensor([[1.0], [-5.0], [3.0]])
        torch.testing.assert_close(
            group_advantages(shifted.flatten(), 7, scale)[7:14], got[7:14], atol=1e-5, rtol=1e-4
        )


def test_process_advantages_by_brute_force():
    step_rewards = [torch.tensor(x) for x in ([1.0, 0.5], [0.0], [2.0, 0.0, 1.0], [], [3.0], [3.0])]
    step_ends = [torch.tensor(x, dtype=torch.long) for x in ([1, 4], [5], [0, 2, 3], [], [2], [4])]
    got = process_advantages(step_rewards, step_ends, group_size=2, completion_len=6, eps=0.1)
    for first in (0, 2):
        together = torch.cat(step_rewards[first : first + 2])
        for row in (first, first + 1):
            for t in range(6):
                expected = sum(
                    ((r - together.mean()) / (together.std() + 0.1)).item()
                    for r, end in zip(step_rewards[row], step_ends[row], strict=True)
                    if end >= t
                )
                assert got[row, t].item() == pytest.approx(expected, abs=1e-6)
    assert (got[4:] == 0).all()  # a constant group
    with pytest.raises(ValueError, match=r"step_ends should be in \[0, 5\)"):
        process_advantages(step_rewards, step_ends, group_size=2, completion_len=5)
    with pytest.raises(ValueError, match="group_size should divide the batch of 0"):
        process_advantages([], [], group_size=2, completion_len=5)


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


def test_the_single_update_objective_averages_completions_first():
    mask = ragged_mask()
    logprobs = poison(torch.randn(mask.shape), mask).requires_grad_()
    advantages = torch.randn(6, requires_grad=True)
    objective = calc_single_update_objective(logprobs, advantages, mask)
    torch.testing.assert_close(objective.item(), (advantages * mask.any(1)).mean().item())
    objective.backward()
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    expected = (advantages[:, None] / lengths / 6 * mask).detach()
    torch.testing.assert_close(logprobs.grad, expected)
    assert advantages.grad is None


def test_k3_is_never_negative_and_averages_to_the_kl():
    logprobs = torch.randn(100_000) * 3e-4 - 1
    assert (calc_per_token_kl(logprobs, logprobs + 2e-4 * torch.randn(100_000)) >= 0).all()
    policy, reference = torch.randn(2, 8, dtype=torch.float64).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    policy.requires_grad_()
    reference.requires_grad_()
    k3 = calc_per_token_kl(policy, reference)
    torch.testing.assert_close((policy.exp() * k3).sum(), exact)
    k3.sum().backward()
    torch.testing.assert_close(policy.grad, (1 - (reference - policy).exp()).detach())
    assert reference.grad is None


# --- TRL ----------------------------------------------------------------------------------------


def calc_trl_loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, low, high, beta):
    """The loss of `trl.GRPOTrainer` on given log-probs, which are the leaf of its gradient."""
    config = GRPOConfig(output_dir="unused", use_cpu=True, report_to="none", bf16=False)
    assert hasattr(config, "use_bias_correction_kl")
    config.use_bias_correction_kl = False
    trainer = SimpleNamespace(
        args=config,
        beta=beta,
        epsilon_low=low,
        epsilon_high=high,
        loss_type="grpo",
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        model=torch.nn.Identity(),
        accelerator=Accelerator(cpu=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logprobs, torch.zeros_like(logprobs), None,
        ),
    )  # fmt: skip
    completion_ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": completion_ids[:, :1],
        "prompt_mask": completion_ids[:, :1],
        "completion_ids": completion_ids,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "ref_per_token_logps": ref_logprobs,
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("low", "high", "beta"), [(0.2, 0.2, 0.04), (0.1, 0.3, 0.0), (0.2, 0.28, 1.0)]
)
def test_objective_equals_trl_in_value_and_gradient(seed, low, high, beta):
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask()
    old, noise, ref, theirs = torch.randn(4, *mask.shape, generator=generator, dtype=torch.float64)
    new = old + 0.5 * noise
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
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


def test_group_advantages_equal_the_formula_of_trl():
    """TRL 1.16: (r - mean) / (std + 1e-4) with ddof 1 within each group of `num_generations`."""
    rewards = torch.rand(24)
    groups = rewards.view(-1, 8)
    means, stds = (f(groups, dim=1).repeat_interleave(8) for f in (torch.mean, torch.std))
    torch.testing.assert_close(group_advantages(rewards, 8), (rewards - means) / (stds + 1e-4))


def test_objective_takes_advantages_of_tokens_and_needs_no_reference_at_beta_zero():
    mask = ragged_mask()
    new, old = torch.randn(2, *mask.shape)
    advantages = torch.randn(6)
    expected = calc_grpo_objective(new, old, None, advantages, mask, beta=0.0)
    per_token = poison(advantages[:, None].repeat(1, mask.shape[1]), mask)
    torch.testing.assert_close(
        calc_grpo_objective(new, old, None, per_token, mask, beta=0.0), expected
    )
    with pytest.raises(ValueError, match="ref_logprobs should be given"):
        calc_grpo_objective(new, old, None, advantages, mask, beta=0.1)


def test_only_the_policy_gets_a_gradient_and_nothing_leaks():
    mask = ragged_mask()
    leaves = [poison(torch.randn(mask.shape), mask, torch.nan).requires_grad_() for _ in range(3)]
    advantages = torch.randn(6, requires_grad=True)
    calc_grpo_objective(*leaves, advantages, mask).backward()
    assert leaves[0].grad.isfinite().all()
    assert (leaves[0].grad[~mask] == 0).all()
    assert all(x.grad is None for x in (*leaves[1:], advantages))


# --- From chapter 2 to chapter 3 ----------------------------------------------------------------


def test_ppo_without_values_at_lambda_one_is_grpos_broadcast_advantage():
    mask = ragged_mask()
    scores = group_advantages(torch.randn(6), 3)
    token_rewards = compute_token_rewards(scores, mask)
    got = compute_advantages(torch.zeros(mask.shape), token_rewards, mask, gamma=1.0, lam=1.0)
    assert torch.equal(got, scores[:, None] * mask)
    other = compute_advantages(torch.zeros(mask.shape), token_rewards, mask, gamma=1.0, lam=0.95)
    assert not torch.allclose(other, got)


def test_grpo_memory_by_hand():
    mask = ragged_mask()
    args = GrpoArgs(batch_size=6, num_minibatches=1, group_size=3, advantage_scale="none")
    ids = torch.randint(3, 512, (6, 13))
    samples = Samples(ids, torch.ones(6, 13, dtype=torch.long), 4, mask, ["."] * 6)
    logprobs = poison(torch.randn(mask.shape), mask).requires_grad_()
    scores = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 0.0])
    memory = make_grpo_memory(args, samples, scores, logprobs, None)
    assert memory.advantages.tolist() == [-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]
    assert set(memory.names) == {
        "input_ids", "attention_mask", "mask", "logprobs", "ref_logprobs", "advantages",
    }  # fmt: skip
    assert memory.ref_logprobs is None
    assert not memory.logprobs.requires_grad
    assert torch.equal(memory.mask, mask)
    for minibatch in memory.get_minibatches():
        assert minibatch.advantages.view(-1, 3).sum(-1).abs().max() < 1e-6  # whole groups


def test_the_objective_starts_at_zero_and_its_gradient_does_not(tmp_path):
    args = GrpoArgs(batch_size=32, num_minibatches=1, gen_len=20, runs_dir=tmp_path, device="cpu")
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


def test_the_grpo_trainer_builds_no_value_head(tmp_path):
    trainer = GrpoTrainer(GrpoArgs(runs_dir=tmp_path, device="cpu"))
    assert type(trainer.model) is TransformerWithLora
    assert len(trainer.optimizer.param_groups) == 1
    assert not [name for name, _ in trainer.model.named_parameters() if "value" in name]


def test_the_trainer_builds_no_value_head():
    assert GrpoTrainer.model_class is TransformerWithLora
    assert "head" not in GrpoTrainer(GrpoArgs(device="cpu")).model.trainable_parts()
