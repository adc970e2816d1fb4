"""Runs chapter 4's finished thing: one penalty, three estimators, and where each leads."""

import torch
from tqdm import tqdm

from solutions.ch0_sampling import get_logprobs, get_samples, masked_mean, select_completion
from solutions.ch1_lora import TransformerWithLora
from solutions.ch4_kl import calc_exact_kl, calc_kl_estimate
from utils.course import shorten

PROMPT = "This movie is"


def make_drifted_policy(seed: int) -> TransformerWithLora:
    """A policy that was its reference until its adapters were jolted."""
    torch.manual_seed(seed)
    policy = TransformerWithLora.from_pretrained("embedded")
    for name, tensor in policy.trainable_state().items():
        if name.endswith("lora_B"):
            tensor.normal_(std=0.05)
    return policy


def sample(policy, generator: torch.Generator):
    """Reviews by the policy, and the reference's logits for them."""
    with policy.merged():
        samples = get_samples(policy, [PROMPT] * 32, 24, generator=generator)
    with torch.no_grad(), policy.reference():
        ref_logits = policy(samples.input_ids, samples.attention_mask)
    return samples, ref_logits


def show(policy, name: str) -> None:
    samples, ref_logits = sample(policy, torch.Generator().manual_seed(4))
    with torch.no_grad():
        logits = policy(samples.input_ids, samples.attention_mask)
    both = (select_completion(x, samples.prompt_len) for x in (logits, ref_logits))
    exact = calc_exact_kl(*both)
    print(f"{name}: exact KL {exact[samples.completion_mask].mean():.2f} nats per token")
    print(*(f"  {repr(PROMPT + text)[1:-1][:91].strip()}" for text in samples.texts[:3]), sep="\n")


def penalise(policy, kind: str, seed: int) -> None:
    """Minimise the estimate and nothing else, with four updates per rollout."""
    optimizer = torch.optim.Adam(policy.trainable_parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(shorten(8)), desc=kind, unit="rollout"):
        samples, ref_logits = sample(policy, generator)
        ids, prompt_len = samples.input_ids, samples.prompt_len
        ref_logprobs = get_logprobs(ref_logits, ids, prompt_len)
        for _ in range(4):
            logprobs = get_logprobs(policy(ids, samples.attention_mask), ids, prompt_len)
            estimates = calc_kl_estimate(logprobs, ref_logprobs, kind)
            loss = masked_mean(estimates, samples.completion_mask, dim=-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def main(seed: int = 0) -> None:
    show(make_drifted_policy(seed), "Before")
    for kind in ("k2", "k3", "k1"):
        policy = make_drifted_policy(seed)
        penalise(policy, kind, seed)
        show(policy, f"After minimising {kind}")


if __name__ == "__main__":
    main()
