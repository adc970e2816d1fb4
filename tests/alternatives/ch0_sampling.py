"""Right answers to chapter 0, written differently."""

import torch
import torch.nn.functional as F

from solutions.ch0_sampling import Samples
from utils.grading.known_answers import right


@right("get_logprobs")
def in_float64(logits, tokens, prefix_len=1, temperature=1.0):
    scaled = logits[:, prefix_len - 1 : -1].double() / temperature
    chosen = torch.take_along_dim(scaled, tokens[:, prefix_len:].unsqueeze(-1), dim=-1)[..., 0]
    return (chosen - torch.logsumexp(scaled, dim=-1)).to(logits.dtype)


@right("calc_entropy")
def entropy_without_logprobs(logits):
    mean_logit = (logits.softmax(-1) * logits.masked_fill(logits == -torch.inf, 0)).sum(-1)
    return logits.logsumexp(-1) - mean_logit


@right("masked_mean")
def masked_mean_by_nan_to_num(values, mask, dim=None):
    kept = torch.nan_to_num(values * mask, nan=0.0, posinf=0.0, neginf=0.0)
    dims = tuple(range(values.ndim)) if dim is None else dim
    return kept.sum(dims) / mask.sum(dims).clamp(min=1)


@right("sample_next_token")
def by_inverse_transform(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return logits.max(-1).indices
    vocab = logits.shape[-1]
    z, order = (logits.double() / temperature).sort(-1, descending=True)
    rank = torch.arange(vocab)
    if top_k is not None:
        z = z.masked_fill(rank >= top_k, -torch.inf)
    probs = z.softmax(-1)
    if top_p is not None and top_p < 1:
        probs = probs * ((probs.cumsum(-1) - probs) < top_p)
    cumulative = probs.cumsum(-1)
    u = torch.rand(len(logits), 1, generator=generator, dtype=torch.double) * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, u, right=True).clamp(max=vocab - 1)
    return order.gather(-1, chosen).squeeze(-1)


@right("sample_next_token")
def by_gumbel_noise(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    if temperature == 0:
        return logits.argmax(dim=1)
    z = (logits - logits.max(dim=1, keepdim=True).values) / temperature
    if top_k is not None:
        kth = z.topk(min(top_k, z.shape[1])).values[:, -1:]
        z = torch.where(z < kth, -torch.inf, z)
    if top_p is not None:
        probs, order = z.softmax(-1).sort(descending=True, stable=True)
        n_kept = (probs.cumsum(-1) < top_p).sum(-1, keepdim=True) + 1
        z = z.masked_fill(order.argsort(-1) >= n_kept, -torch.inf)
    exponential = torch.empty(z.shape).exponential_(generator=generator)
    return (z - exponential.log()).argmax(-1)


@right("get_completion_mask")
def mask_by_first_position(completion_ids, eos_token_id):
    n = completion_ids.shape[1]
    positions = torch.arange(n, device=completion_ids.device)
    first = torch.where(completion_ids == eos_token_id, positions, n).amin(-1, keepdim=True)
    return positions <= first


@right("left_pad")
def padded_row_by_row(sequences, pad_token_id):
    longest = max(len(tokens) for tokens in sequences)
    ids = torch.full((len(sequences), longest), pad_token_id)
    mask = torch.zeros_like(ids, dtype=torch.int32)
    for row, tokens in enumerate(sequences):
        if len(tokens) > 0:
            ids[row, -len(tokens) :] = torch.tensor(tokens)
            mask[row, -len(tokens) :] = 1
    return [ids, mask]


@right("get_samples")
def samples_by_the_tokenizer(
    model,
    prompts,
    max_new_tokens,
    temperature=1.0,
    top_k=None,
    top_p=None,
    generator=None,
    prepend_bos=True,
):
    """The tokenizer pads, and rows go on after their eos."""
    tokenizer = model.tokenizer
    bos, eos = [tokenizer.bos_token_id] * prepend_bos, tokenizer.eos_token_id
    rows = [bos + tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    inputs = tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
    prompt, attention = inputs["input_ids"], inputs["attention_mask"]
    ids, step, cache = prompt, prompt, None
    with torch.no_grad():
        for _ in range(max_new_tokens):
            logits, cache = model(
                step,
                attention_mask=attention,
                past_key_values=cache,
                return_type="logits_and_cache",
            )
            sampled = by_gumbel_noise.definition(
                logits[:, -1], temperature, top_k, top_p, generator
            )
            step = sampled.unsqueeze(1)
            ids = torch.hstack([ids, step])
            attention = torch.hstack([attention, torch.ones_like(step)])
            if (ids[:, prompt.shape[1] :] == eos).any(1).all():
                break
    new = ids[:, prompt.shape[1] :]
    mask = mask_by_first_position.definition(new, eos)
    texts = tokenizer.batch_decode(torch.where(mask, new, eos), skip_special_tokens=True)
    attention[:, prompt.shape[1] :] = mask
    return Samples(ids, attention, prompt.shape[1], mask, texts)


@right("calc_reinforce_objective")
def reinforce_of_selected(logprobs, advantages, mask):
    products = logprobs[mask] * advantages[mask].detach()
    return products.mean() if len(products) else logprobs.new_zeros(())


@right("calc_expected_policy_gradient")
def policy_gradient_in_closed_form(logits, rewards, baseline):
    p, r = logits.double().softmax(0), (rewards - baseline).double()
    mean = p * (r - (p * r).sum())
    scores = torch.diag(torch.ones_like(p)) - p[None, :]
    deviations = r[:, None] * scores - mean
    return mean.to(logits.dtype), torch.einsum("a,av->v", p, deviations**2).to(logits.dtype)


@right("get_logprobs")
def by_a_one_hot(logits, tokens, prefix_len=1, temperature=1.0):
    z = logits[:, prefix_len - 1 : -1] / temperature
    one_hot = F.one_hot(tokens[:, prefix_len:], z.shape[-1]).to(z.dtype)
    return torch.einsum("btv,btv->bt", z, one_hot) - z.logsumexp(-1)
