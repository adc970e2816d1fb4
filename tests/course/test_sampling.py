"""Chapter 0's solutions against torch.distributions, enumeration and plain decoding."""

import itertools

import pytest
import torch
from torch.distributions import Categorical

from solutions.ch0_sampling import (
    calc_entropy,
    calc_expected_policy_gradient,
    calc_reinforce_objective,
    get_completion_mask,
    get_logprobs,
    get_samples,
    left_pad,
    masked_mean,
    sample_next_token,
    select_completion,
)
from solutions.ch1_lora import TransformerWithLora
from tests.course.helpers import chi_square_p, poison, ragged_mask

PROMPTS = ["The plot", "Q: 12+34\n", "To be honest the acting", "F"]


@pytest.mark.parametrize(("prefix_len", "temperature"), [(1, 1.0), (3, 0.7), (5, 2.0)])
def test_logprobs_are_those_of_torch_distributions(prefix_len, temperature):
    logits, tokens = torch.randn(3, 6, 11), torch.randint(11, (3, 6))
    expected = Categorical(logits=logits[:, :-1] / temperature).log_prob(tokens[:, 1:])
    got = get_logprobs(logits, tokens, prefix_len, temperature)
    torch.testing.assert_close(got, expected[:, prefix_len - 1 :])


def test_logprobs_are_stable_for_huge_logits():
    logits = torch.tensor([[[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]]])
    got = get_logprobs(logits, torch.tensor([[0, 1]]))
    torch.testing.assert_close(got, torch.tensor([[-2e4]]))


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


def test_entropy_is_that_of_torch_distributions_and_bears_impossible_tokens():
    logits = torch.randn(4, 5, 9)
    torch.testing.assert_close(calc_entropy(logits), Categorical(logits=logits).entropy())
    logits = torch.tensor([0.3, -torch.inf, 1.2, 1e4], dtype=torch.float64, requires_grad=True)
    entropy = calc_entropy(logits)
    torch.testing.assert_close(entropy.item(), 0.0)
    entropy.backward()
    assert logits.grad.isfinite().all()
    half = torch.tensor([0.0, 0.0, -torch.inf])
    torch.testing.assert_close(calc_entropy(half), torch.tensor(2.0).log())


def test_entropy_gradient_by_finite_differences():
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(calc_entropy, (logits,))


def test_masked_mean_by_hand():
    values = torch.tensor([[1.0, 5.0], [torch.nan, torch.inf]], requires_grad=True)
    mask = torch.tensor([[True, True], [False, False]])
    assert masked_mean(values, mask) == 3.0
    assert masked_mean(values, mask, dim=1).tolist() == [3.0, 0.0]
    assert masked_mean(values, mask, dim=0).tolist() == [1.0, 5.0]
    masked_mean(values, mask).backward()
    assert values.grad.tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert masked_mean(values, torch.zeros_like(mask)) == 0.0


def expected_probs(logits, temperature, top_k, top_p):
    """The sampler's distribution, one token after the other in plain Python."""
    weights = [((z - max(logits)) / temperature, i) for i, z in enumerate(logits)]
    ranked = sorted(weights, reverse=True)[:top_k]
    masses = [(torch.tensor(w, dtype=torch.float64).exp().item(), i) for w, i in ranked]
    total = sum(mass for mass, _ in masses)
    kept, reached = [], 0.0
    for mass, i in masses:
        kept.append((mass, i))
        reached += mass / total
        if top_p is not None and reached >= top_p:
            break
    probs = torch.zeros(len(logits), dtype=torch.float64)
    for mass, i in kept:
        probs[i] = mass / sum(m for m, _ in kept)
    return probs


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, None, None),
        (0.7, None, None),
        (1.0, 3, None),
        (2.0, 100, None),
        (1.0, None, 0.6),
        (1.0, None, 1.0),
        (1.5, 4, 0.7),
        (1.0, None, 1e-6),
        (1.0, 1, None),
    ],
)
def test_samples_have_the_enumerated_frequencies(temperature, top_k, top_p):
    logits = [2.0, -1.0, 0.5, 1.5, 0.0, -3.0]
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor(logits).expand(20_000, -1)
    draws = sample_next_token(rows, temperature, top_k, top_p, generator)
    assert draws.shape == (20_000,)
    assert chi_square_p(draws, expected_probs(logits, temperature, top_k, top_p)) > 1e-9


def test_the_token_that_crosses_p_is_kept_and_every_row_is_its_own():
    # probabilities 0.5, 0.3, 0.2: 0.6 is crossed by the second
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]).log()
    rows = probs.repeat_interleave(5_000, dim=0)
    draws = sample_next_token(rows, top_p=0.6, generator=torch.Generator().manual_seed(0))
    assert set(draws[:5_000].tolist()) == {0, 1}
    assert set(draws[5_000:].tolist()) == {1, 2}


def test_temperature_zero_is_greedy():
    logits = torch.randn(50, 7)
    assert torch.equal(sample_next_token(logits, temperature=0), logits.argmax(-1))


def test_completion_mask_by_hand():
    ids = torch.tensor([[5, 2, 2, 5], [2, 5, 5, 5], [5, 5, 5, 5], [5, 5, 5, 2]])
    expected = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert get_completion_mask(ids, eos_token_id=2).int().tolist() == expected


def test_left_pad_masks_by_length_not_by_pad_id():
    ids, mask = left_pad([[7, 0, 8], [0], []], pad_token_id=0)
    assert ids.tolist() == [[7, 0, 8], [0, 0, 0], [0, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 0]]


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


def test_sampling_stops_when_all_rows_have_ended(embedded):
    samples = get_samples(embedded, ["Q: 12+34\n"], 40, temperature=0)
    assert samples.completion_ids[0, -1] == embedded.tokenizer.eos_token_id
    assert samples.texts[0].startswith("A: ")


def test_sampling_follows_its_seed_and_accepts_a_bare_bridge(embedded):
    first, again, other = (
        get_samples(embedded.base, PROMPTS, 20, generator=torch.Generator().manual_seed(seed)).texts
        for seed in (0, 0, 1)
    )
    assert first == again != other
    assert first == get_samples(embedded, PROMPTS, 20, generator=torch.manual_seed(0)).texts


def test_reinforce_objective_by_hand():
    mask = ragged_mask(3, 4)
    logprobs = poison(torch.randn(3, 4), mask).requires_grad_()
    advantages = poison(torch.randn(3, 4), mask).requires_grad_()
    objective = calc_reinforce_objective(logprobs, advantages, mask)
    by_hand = sum((logprobs[i, t] * advantages[i, t]).item() for i, t in mask.nonzero())
    torch.testing.assert_close(objective.item(), by_hand / mask.sum().item())
    objective.backward()
    expected = (advantages.detach() / mask.sum()).masked_fill(~mask, 0.0)
    torch.testing.assert_close(logprobs.grad, expected)
    assert advantages.grad is None
    per_row = torch.tensor([1.0, -2.0, 3.0])
    torch.testing.assert_close(
        calc_reinforce_objective(logprobs, per_row, mask),
        calc_reinforce_objective(logprobs, per_row[:, None].repeat(1, 4), mask),
    )


def test_expected_policy_gradient_is_the_gradient_of_the_expected_reward():
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(6, dtype=torch.float64)
    (exact,) = torch.autograd.grad((logits.softmax(-1) * rewards).sum(), logits)
    probs = logits.detach().softmax(-1)
    variances = []
    for baseline in (0.0, 3.0, (probs @ rewards).item()):
        mean, variance = calc_expected_policy_gradient(logits.detach(), rewards, baseline)
        torch.testing.assert_close(mean, exact)
        single = []
        for action in range(6):
            leaf = logits.detach().clone().requires_grad_()
            logprob = Categorical(logits=leaf).log_prob(torch.tensor(action))
            single.append(torch.autograd.grad((rewards[action] - baseline) * logprob, leaf)[0])
        spread = sum(p * (g - exact).square() for p, g in zip(probs, single, strict=True))
        torch.testing.assert_close(variance, spread)
        variances.append(variance.sum())
    assert variances[2] < variances[0] < variances[1]


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
