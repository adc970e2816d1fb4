"""Chapter 2's solutions against hand-worked cases, brute force and torch.distributions."""

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from solutions.ch0_sampling import Samples, select_completion
from solutions.ch2_ppo import (
    ReplayMemory,
    RLHFArgs,
    TransformerWithValueHeadLora,
    calc_clipped_surrogate_objective,
    calc_entropy_bonus,
    calc_kl_penalty,
    calc_value_function_loss,
    compute_advantages,
    compute_token_rewards,
    get_optimizer_and_scheduler,
    make_replay_memory,
    normalize_advantages,
    normalize_reward,
    reward_fn_char_count,
    reward_fn_sentiment,
)
from tests.course.conftest import ARCHITECTURES, build_hf_model
from tests.course.helpers import poison, ragged_batch, ragged_mask, randomize


def test_rewards_by_hand():
    assert reward_fn_char_count(["a.b.", "", "..."]).tolist() == [2.0, 0.0, 3.0]
    assert reward_fn_char_count(["a.b.", "b"], char="b").tolist() == [1.0, 1.0]
    texts = ["Great, and a bad end. Lovely!", "dull", "plain", "Superb.", "notgreat greatly", ""]
    expected = torch.tensor([1 / 3, -1.0, 0.0, 1.0, 0.0, 0.0])
    torch.testing.assert_close(reward_fn_sentiment(texts), expected)


def test_normalized_rewards_by_hand():
    rewards = torch.tensor([1.0, 2.0, 6.0])  # mean 3, variance (4 + 1 + 9) / 2 = 7
    expected = torch.tensor([-2.0, -1.0, 3.0]) / (7**0.5 + 0.5)
    torch.testing.assert_close(normalize_reward(rewards, eps=0.5), expected)
    assert rewards.tolist() == [1.0, 2.0, 6.0]


@pytest.mark.parametrize("value", [0.1, -3.3, 1e6])
@pytest.mark.parametrize("rows", [1, 7, 128])
def test_constant_rewards_give_exact_zeros(value, rows):
    assert (normalize_reward(torch.full((rows,), value)) == 0).all()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_value_head_reads_the_last_hidden_state(kind, checkpoints):
    model = TransformerWithValueHeadLora.from_pretrained(checkpoints[kind], device="cpu")
    ids, attention_mask, _ = ragged_batch()
    logits, values = model.forward_with_value_head(ids, attention_mask)
    assert torch.equal(logits, model(ids, attention_mask))
    assert (values == 0).all()
    torch.nn.init.normal_(model.value_head.weight)
    torch.nn.init.normal_(model.value_head.bias)
    _, values = model.forward_with_value_head(ids, attention_mask)
    hf = build_hf_model(kind)
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    hidden = hf(
        ids, attention_mask=attention_mask, position_ids=positions, output_hidden_states=True
    ).hidden_states[-1]
    expected = hidden @ model.value_head.weight[0] + model.value_head.bias
    real = attention_mask.bool()
    torch.testing.assert_close(values[real], expected[real], atol=1e-5, rtol=1e-5)


def test_the_value_head_is_saved_with_the_adapters(tmp_path):
    model = TransformerWithValueHeadLora.from_pretrained("embedded", device="cpu")
    randomize(model)
    torch.nn.init.normal_(model.value_head.weight)
    model.save_adapter(tmp_path / "a.safetensors")
    other = TransformerWithValueHeadLora.from_pretrained("embedded", device="cpu")
    other.load_adapter(tmp_path / "a.safetensors")
    ids, attention_mask, _ = ragged_batch()
    for ours, theirs in zip(
        model.forward_with_value_head(ids, attention_mask),
        other.forward_with_value_head(ids, attention_mask),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_token_rewards_by_hand():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0]]).bool()
    scores = torch.tensor([5.0, -2.0, 9.0, 1.0])
    plain = compute_token_rewards(scores, mask)
    assert plain.tolist() == [[0, 5, 0], [0, 0, -2], [0, 0, 0], [1, 0, 0]]
    logprobs = poison(torch.full((4, 3), -1.0), mask)
    ref_logprobs = poison(torch.tensor([[-2.0, -0.5, 0.0]]).repeat(4, 1), mask)
    charged = compute_token_rewards(scores, mask, logprobs, ref_logprobs, kl_coef=0.1)
    expected = [[-0.1, 5.05, 0], [-0.1, 0.05, -2 + 0.1], [0, 0, 0], [0.9, 0, 0]]
    torch.testing.assert_close(charged, torch.tensor(expected))


def advantages_by_double_sum(values, rewards, mask, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, written out row by row."""
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        length = int(mask[row].sum())
        for t in range(length):
            for k in range(t, length):
                after = values[row, k + 1].item() if k + 1 < length else 0.0
                delta = rewards[row, k].item() + gamma * after - values[row, k].item()
                advantages[row, t] += (gamma * lam) ** (k - t) * delta
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0)])
def test_gae_is_the_double_sum(gamma, lam):
    mask = ragged_mask()
    values = torch.randn(mask.shape, dtype=torch.float64)
    rewards = torch.randn(mask.shape, dtype=torch.float64)
    expected = advantages_by_double_sum(values, rewards, mask, gamma, lam)
    values, rewards = poison(values, mask), poison(rewards, mask, torch.inf)
    values.requires_grad_()
    got = compute_advantages(values, rewards, mask, gamma, lam)
    torch.testing.assert_close(got, expected)
    assert not got.requires_grad
    assert values.isnan().any()  # and the input is as it was


def test_no_columns_are_no_advantages():
    empty = torch.zeros(3, 0)
    assert compute_advantages(empty, empty, empty.bool()).shape == (3, 0)


def test_gae_without_values_at_lambda_one_is_the_reward_to_go():
    mask = ragged_mask()
    rewards = torch.randn(mask.shape)
    got = compute_advantages(torch.zeros(mask.shape), rewards, mask, gamma=1.0, lam=1.0)
    kept = rewards.masked_fill(~mask, 0.0)
    torch.testing.assert_close(got, kept.flip(1).cumsum(1).flip(1).masked_fill(~mask, 0.0))


def test_normalized_advantages():
    mask = ragged_mask()
    advantages = poison(torch.randn(mask.shape) * 3 + 2, mask)
    got = normalize_advantages(advantages, mask)
    torch.testing.assert_close(got[mask].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(got[mask].std(), torch.tensor(1.0))
    assert (got[~mask] == 0).all()
    raw = advantages[mask]
    torch.testing.assert_close(got[mask], (raw - raw.mean()) / raw.std())


@pytest.mark.parametrize("value", [0.1, 123.4])
def test_constant_advantages_give_exact_zeros(value):
    mask = ragged_mask()
    assert (normalize_advantages(torch.full(mask.shape, value), mask) == 0).all()
    one = torch.zeros_like(mask)
    one[1, 2] = True
    assert (normalize_advantages(torch.randn(mask.shape), one) == 0).all()
    worked = normalize_advantages(torch.tensor([[1.0, 2.0, 3.0]]), torch.ones(1, 3).bool(), 1.0)
    assert worked.tolist() == [[-0.5, 0.0, 0.5]]  # the std is 1, and eps is added to it


def clip_inputs(seed=0):
    """Ratios beyond both clips with advantages of both signs, and nan beyond the mask."""
    generator = torch.Generator().manual_seed(seed)
    mask = ragged_mask()
    shape = mask.shape
    old = torch.randn(shape, generator=generator, dtype=torch.float64) - 2
    new = old + 0.6 * torch.randn(shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    return new, old, advantages, mask


@pytest.mark.parametrize(("low", "high"), [(0.2, None), (0.1, 0.4), (0.3, 0.0)])
def test_clipped_surrogate_by_loops(low, high):
    new, old, advantages, mask = clip_inputs()
    terms, slopes, outside = [], torch.zeros_like(new), set()
    upper = 1 + (low if high is None else high)
    for i, t in mask.nonzero().tolist():
        ratio, a = (new - old)[i, t].exp().item(), advantages[i, t].item()
        clipped = min(max(ratio, 1 - low), upper)
        terms.append(min(ratio * a, clipped * a))
        if ratio * a <= clipped * a:
            slopes[i, t] = ratio * a
        outside.add((ratio < 1 - low, ratio > upper, a > 0))
    assert len(outside) == 6  # both clips and neither, with both signs
    new = poison(new, mask).requires_grad_()
    old = poison(old, mask, torch.inf).requires_grad_()
    advantages = poison(advantages, mask).requires_grad_()
    objective = calc_clipped_surrogate_objective(new, old, advantages, mask, low, high)
    torch.testing.assert_close(objective.item(), sum(terms) / len(terms))
    objective.backward()
    torch.testing.assert_close(new.grad, slopes / len(terms))
    assert old.grad is None
    assert advantages.grad is None


def test_a_ratio_beyond_float32_leaves_no_nan():
    new = torch.tensor([[0.0, 0.0, -3.0]], requires_grad=True)
    old, advantages = torch.tensor([[-200.0, 0.0, -1e4]]), torch.tensor([[1.0, 2.0, 3.0]])
    objective = calc_clipped_surrogate_objective(new, old, advantages, torch.ones(1, 3).bool())
    torch.testing.assert_close(objective.item(), (1.2 + 2.0 + 3.6) / 3)
    objective.backward()
    torch.testing.assert_close(new.grad, torch.tensor([[0.0, 2 / 3, 0.0]]))


@pytest.mark.parametrize("clip_coef", [None, 0.2])
def test_value_loss_by_loops(clip_coef):
    values, old_values, returns, mask = clip_inputs()
    terms = []
    for i, t in mask.nonzero().tolist():
        v, old, target = (x[i, t].item() for x in (values, old_values, returns))
        error = (v - target) ** 2
        if clip_coef is not None:
            clipped = old + min(max(v - old, -clip_coef), clip_coef)
            error = max(error, (clipped - target) ** 2)
        terms.append(error)
    leaves = [poison(x, mask).requires_grad_() for x in (values, old_values, returns)]
    loss = calc_value_function_loss(*leaves, mask, vf_coef=0.3, clip_coef=clip_coef)
    torch.testing.assert_close(loss.item(), 0.3 / 2 * sum(terms) / len(terms))
    loss.backward()
    assert leaves[0].grad.isfinite().all()
    assert (leaves[0].grad[~mask] == 0).all()
    assert leaves[1].grad is None
    assert leaves[2].grad is None

    def kept(x):
        return calc_value_function_loss(x, old_values, returns, mask, 0.3, clip_coef)

    assert torch.autograd.gradcheck(kept, (values.clone().requires_grad_(),))


def test_entropy_bonus_and_kl_penalty_are_those_of_torch_distributions():
    mask = ragged_mask()
    logits, ref_logits = torch.randn(2, *mask.shape, 7, dtype=torch.float64)
    policy, reference = Categorical(logits=logits), Categorical(logits=ref_logits)
    clean = logits.clone().requires_grad_()
    logits = poison(logits, mask).requires_grad_()
    ref_logits = poison(ref_logits, mask, torch.inf).requires_grad_()
    bonus = calc_entropy_bonus(logits, mask, ent_coef=0.3)
    torch.testing.assert_close(bonus, 0.3 * policy.entropy()[mask].mean())
    penalty = calc_kl_penalty(logits, ref_logits, mask, kl_coef=0.7)
    torch.testing.assert_close(penalty, 0.7 * kl_divergence(policy, reference)[mask].mean())
    (bonus + penalty).backward()
    assert logits.grad.isfinite().all()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask] != 0).any()
    assert ref_logits.grad is None

    def penalize(x):
        return calc_kl_penalty(x, ref_logits.detach(), mask, 0.7)

    assert torch.autograd.gradcheck(penalize, (clean,))
    empty = torch.zeros_like(mask)
    assert calc_entropy_bonus(logits, empty, 0.3) == 0
    assert calc_kl_penalty(logits, ref_logits, empty, 0.7) == 0


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


def get_scales(**kwargs):
    args = RLHFArgs(base_lr=1.0, head_lr=10.0, **kwargs)
    model = TransformerWithValueHeadLora.from_pretrained("embedded", device="cpu")
    optimizer, scheduler = get_optimizer_and_scheduler(args, model)
    scales = []
    for _ in range(args.total_phases + 2):
        base, head = scheduler.get_last_lr()
        assert head == pytest.approx(10 * base)
        scales.append(base)
        optimizer.step()
        scheduler.step()
    return scales


def test_schedule_by_hand():
    got = get_scales(total_phases=6, warmup_steps=2, final_scale=0.2)
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    got = get_scales(total_phases=4, warmup_steps=0, final_scale=0.0)
    assert got == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    got = get_scales(total_phases=2, warmup_steps=4, final_scale=0.1)
    assert got == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_optimizer_has_one_group_a_part_and_no_frozen_weight():
    model = TransformerWithValueHeadLora.from_pretrained("embedded", device="cpu")
    optimizer, _ = get_optimizer_and_scheduler(RLHFArgs(), model)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2 * 4 * 4, 2]
    for group in optimizer.param_groups:
        assert group["maximize"]
        assert group["eps"] == 1e-5
        assert group["weight_decay"] == 0
        assert all(p.requires_grad for p in group["params"])


@pytest.mark.parametrize("group_size", [1, 3])
def test_memory_gives_every_row_once_an_epoch_and_keeps_rows_whole(group_size):
    rows = torch.arange(12)
    memory = ReplayMemory(
        num_minibatches=2,
        batches_per_learning_phase=3,
        group_size=group_size,
        input_ids=rows[:, None].repeat(1, 5),
        advantages=rows.float(),
        ref_logprobs=None,
    )
    minibatches = memory.get_minibatches(torch.Generator().manual_seed(0))
    assert len(minibatches) == 6
    epochs = [
        torch.cat([m.advantages for m in minibatches[start : start + 2]]) for start in (0, 2, 4)
    ]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == rows.tolist()
    assert not torch.equal(epochs[0], epochs[1])
    for minibatch in minibatches:
        assert minibatch.ref_logprobs is None
        assert (minibatch.input_ids == minibatch.advantages[:, None]).all()
        for group in minibatch.advantages.view(-1, group_size):
            assert torch.equal(group, group[0] + torch.arange(group_size))
            assert group[0] % group_size == 0


def get_fields(memory):
    return {name: getattr(memory, name) for name in memory.names}


def make_samples(mask):
    ids = torch.randint(3, 512, (len(mask), 4 + mask.shape[1]))
    attention_mask = torch.cat([torch.ones(len(mask), 4), mask], dim=1).long()
    return Samples(ids, attention_mask, 4, mask, ["."] * len(mask))


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize("normalize", [True, False])
def test_replay_memory_by_brute_force(kl_in, normalize):
    mask = ragged_mask()
    args = RLHFArgs(
        batch_size=6, num_minibatches=3, kl_in=kl_in, kl_coef=0.5, gamma=0.9, lam=0.8,
        normalize_reward=normalize,
    )  # fmt: skip
    logprobs, ref_logprobs, values = torch.randn(3, *mask.shape)
    scores = torch.randn(6)
    leaves = [poison(x, mask).requires_grad_() for x in (logprobs, ref_logprobs, values)]
    samples = make_samples(mask)
    memory = make_replay_memory(args, samples, scores.requires_grad_(), *leaves)
    again = make_replay_memory(args, samples, scores, *leaves)
    scores = scores.detach()
    if normalize:
        scores = (scores - scores.mean()) / (scores.std() + 1e-5)
    rewards = torch.zeros(mask.shape)
    for row in range(6):
        length = int(mask[row].sum())
        if length:
            rewards[row, length - 1] = scores[row]
        if kl_in == "reward":
            rewards[row, :length] -= 0.5 * (logprobs - ref_logprobs)[row, :length]
    advantages = advantages_by_double_sum(values, rewards, mask, 0.9, 0.8)
    torch.testing.assert_close(memory.returns[mask], (advantages + values)[mask])
    kept = advantages[mask]
    torch.testing.assert_close(memory.advantages[mask], (kept - kept.mean()) / kept.std())
    assert not any(x.requires_grad for x in get_fields(memory).values())
    assert set(get_fields(memory)) == {
        "input_ids", "attention_mask", "mask", "logprobs", "ref_logprobs", "values",
        "advantages", "returns",
    }  # fmt: skip
    for name, rows in get_fields(memory).items():
        torch.testing.assert_close(getattr(again, name), rows, rtol=0, atol=0, equal_nan=True)


def test_select_completion_moves_values_to_the_token_they_precede():
    values = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]])  # of the states after tokens 0 to 4
    assert select_completion(values, 3).tolist() == [[2.0, 3.0]]
