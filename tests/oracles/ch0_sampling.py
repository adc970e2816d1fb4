"""Chapter 0 by other means: torch.distributions, loops and enumeration."""

import torch
from torch.distributions import Categorical

from tests.support.inputs import leaf


def logprobs_by_categorical(logits, tokens, prefix_len=1, temperature=1.0):
    """Score token by token with torch.distributions."""
    rows = []
    for row_logits, row in zip(logits, tokens, strict=True):
        pairs = zip(row_logits[prefix_len - 1 :], row[prefix_len:], strict=False)
        rows.append([Categorical(logits=z / temperature).log_prob(t) for z, t in pairs])
    return torch.stack([torch.stack(row) for row in rows])


def entropy_of_possible_tokens(logits):
    """Return the entropies over the tokens that a row can emit."""
    rows = [row[row > -torch.inf] for row in logits.reshape(-1, logits.shape[-1])]
    entropies = torch.stack([Categorical(logits=row).entropy() for row in rows])
    return entropies.reshape(logits.shape[:-1])


def mean_of_selected(values, mask, dim=None):
    """Average one selection after the other."""
    if dim is None:
        chosen = values[mask]
        return chosen.sum() / max(len(chosen), 1)
    rows = zip(values.movedim(dim, 0).flatten(1).T, mask.movedim(dim, 0).flatten(1).T, strict=True)
    means = torch.stack([mean_of_selected(v, m) for v, m in rows])
    return means.reshape([n for i, n in enumerate(values.shape) if i != dim % values.ndim])


def probabilities(logits, temperature=1.0, top_k=None, top_p=None):
    """Return what may be drawn and how often, token after token from the likeliest down."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = probs.argsort(descending=True, stable=True)[:top_k].tolist()
    probs = probs.tolist()
    total, kept, mass = sum(probs[v] for v in order), {}, 0.0
    for v in order:
        kept[v] = probs[v]
        mass += probs[v] / total
        if top_p is not None and top_p < 1 and mass >= top_p:
            break
    chosen = torch.zeros(len(probs), dtype=torch.double)
    chosen[list(kept)] = torch.tensor(list(kept.values()), dtype=torch.double)
    return chosen / chosen.sum()


def likeliest_by_loops(logits, *_, **__):
    """Find the first of the largest logits of each row."""
    return torch.tensor([row.index(max(row)) for row in logits.tolist()])


def mask_by_loops(completion_ids, eos_token_id):
    """Keep the tokens up to the first eos of each row."""
    rows = []
    for row in completion_ids.tolist():
        end = row.index(eos_token_id) if eos_token_id in row else len(row)
        rows.append([t <= end for t in range(len(row))])
    return torch.tensor(rows)


def pad_by_loops(sequences, pad_token_id):
    """Place the tokens from the end of each row backwards."""
    width = max(len(s) for s in sequences)
    ids = torch.full((len(sequences), width), pad_token_id)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        for back, token in enumerate(reversed(sequence), start=1):
            ids[row, -back], mask[row, -back] = token, 1
    return ids, mask


def reinforce_by_loops(logprobs, advantages, mask):
    """Average log-prob times advantage over the true positions, one by one."""
    terms = [logprobs[i, t] * advantages[i, t].detach() for i, t in mask.nonzero().tolist()]
    return torch.stack(terms).mean() if terms else logprobs.nan_to_num().sum() * 0


def policy_gradient_by_autograd(logits, rewards, baseline):
    """Differentiate log p action by action, and take moments about the mean."""
    logits = leaf(logits)
    policy = Categorical(logits=logits)
    gradients = torch.stack(
        [
            (rewards[a] - baseline).detach()
            * torch.autograd.grad(policy.log_prob(torch.tensor(a)), logits, retain_graph=True)[0]
            for a in range(len(logits))
        ]
    )
    probs = policy.probs.detach()[:, None]
    mean = (probs * gradients).sum(0)
    return mean, (probs * gradients**2).sum(0) - mean**2
