"""Right answers to chapter 0, written differently."""

import torch

from utils.grading.answers import right


@right("get_logprobs")
def in_float64(logits, tokens, prefix_len=1, temperature=1.0):
    scaled = logits[:, prefix_len - 1 : -1].double() / temperature
    chosen = torch.take_along_dim(scaled, tokens[:, prefix_len:].unsqueeze(-1), dim=-1)[..., 0]
    return (chosen - torch.logsumexp(scaled, dim=-1)).to(logits.dtype)
