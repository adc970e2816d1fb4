"""Right answers to chapter 3, written differently."""

import numpy as np
import torch
import torch.nn.functional as F

from solutions.ch0_sampling import get_logprobs, get_samples
from solutions.ch3_grpo import (
    calc_grpo_objective,
    calc_single_update_objective,
    make_grpo_memory,
)
from utils.grading.known_answers import edit, right
from utils.rewards import call_reward_fn

# --- group_advantages ---------------------------------------------------------------------------


def _check_groups(group_size, batch):
    if group_size < 2 or batch % group_size != 0:
        raise ValueError(f"group_size should divide {batch} and be at least 2: {group_size}")


@right("group_advantages")
def with_numpy(rewards, group_size, scale="group", eps=1e-4):
    _check_groups(group_size, len(rewards))
    groups = rewards.detach().cpu().numpy().reshape(-1, group_size)
    stds = {
        "group": groups.std(1, ddof=1, keepdims=True) + eps,
        "batch": groups.std(ddof=1) + eps,
        "none": 1,
    }
    if scale not in stds:
        raise ValueError(f"scale should be one of {list(stds)}, but is {scale}")
    varied = np.ptp(groups, axis=1, keepdims=True) > 0
    advantages = varied * (groups - groups.mean(1, keepdims=True)) / stds[scale]
    return torch.from_numpy(advantages.reshape(-1).astype(groups.dtype))


# --- calc_single_update_objective ---------------------------------------------------------------


@right("calc_single_update_objective")
def one_plus_the_difference(logprobs, advantages, mask):
    logprobs = logprobs.masked_fill(~mask, 0)
    surrogate = (1 + logprobs - logprobs.detach()) * mask
    return torch.mean(surrogate.sum(1) / mask.sum(1).clamp_min(1) * advantages.detach())


# --- calc_per_token_kl --------------------------------------------------------------------------


@right("calc_per_token_kl")
def series_for_small_differences(logprobs, ref_logprobs):
    d = ref_logprobs.detach() - logprobs
    small = d.abs() < 0.01
    near = torch.where(small, d, 0.0)
    far = torch.where(small, 0.0, d)
    series = near**2 / 2 + near**3 / 6 + near**4 / 24 + near**5 / 120
    return torch.where(small, series, far.exp() - 1 - far)


# --- calc_grpo_objective ------------------------------------------------------------------------


@right("calc_grpo_objective")
def plain_exp(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    clip_coef=0.2,
    clip_coef_high=None,
    beta=0.04,
):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    logprobs, old = logprobs.masked_fill(~mask, 0), old_logprobs.detach().masked_fill(~mask, 0)
    a = advantages.detach()
    a = a[:, None].expand_as(logprobs) if a.ndim == 1 else a
    a = a.masked_fill(~mask, 0)
    ratio = torch.exp(logprobs - old)
    terms = torch.min(ratio * a, ratio.clamp(1 - clip_coef, 1 + high) * a)
    if beta:
        d = ref_logprobs.detach().masked_fill(~mask, 0) - logprobs
        terms = terms - beta * (d.exp() - d - 1)
    return ((terms * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


# --- process_advantages -------------------------------------------------------------------------


def _check_steps(step_rewards, step_ends, completion_len):
    if len(step_rewards) != len(step_ends):
        raise ValueError("step_rewards and step_ends should have as many rows")
    for rewards, ends in zip(step_rewards, step_ends, strict=True):
        if len(rewards) != len(ends) or any(not 0 <= end < completion_len for end in ends):
            raise ValueError(f"step_ends do not fit: {ends}")


@right("process_advantages")
def without_a_special_case(step_rewards, step_ends, group_size, completion_len, eps=1e-4):
    if len(step_rewards) % group_size:
        raise ValueError(f"group_size should divide {len(step_rewards)}, but is {group_size}")
    _check_steps(step_rewards, step_ends, completion_len)
    advantages = torch.zeros(len(step_rewards), completion_len)
    for row, (rewards, ends) in enumerate(zip(step_rewards, step_ends, strict=True)):
        start = row - row % group_size
        group = torch.cat(step_rewards[start : start + group_size]).detach()
        for reward, end in zip(rewards.detach(), ends.tolist(), strict=True):
            advantages[row, : end + 1] += (reward - group.mean()) / (group.std() + eps)
    return advantages


# --- The trainer --------------------------------------------------------------------------------


@right("GrpoTrainer.rollout_phase")
def rollout_in_one_batch(self):
    args = self.args
    groups = (args.batch_size // args.group_size,)
    chosen = torch.randint(len(args.prompts or [0]), groups, generator=self.generator)
    prompts = [(args.prompts or [args.prefix])[i] for i in chosen for _ in range(args.group_size)]
    with torch.no_grad():
        samples = get_samples(
            self.model,
            prompts,
            args.gen_len,
            temperature=args.temperature,
            top_k=args.top_k,
            generator=self.generator,
            prepend_bos=args.prepend_bos,
        )
        ids, attention, n = samples.input_ids, samples.attention_mask, samples.prompt_len
        logprobs = get_logprobs(self.model(ids, attention), ids, n, args.temperature)
        ref_logprobs = None
        if args.kl_coef > 0:
            with self.model.reference():
                ref_logprobs = get_logprobs(self.model(ids, attention), ids, n, args.temperature)
    scores = call_reward_fn(args.reward_fn, samples.texts, {"prompts": prompts})
    return make_grpo_memory(args, samples, scores, logprobs, ref_logprobs)


@right("GrpoTrainer.compute_rlhf_objective")
def objective_in_one_piece(self, minibatch):
    args, mask, ids = self.args, minibatch.mask, minibatch.input_ids
    n = mask.shape[1]
    logits = self.model(ids, minibatch.attention_mask)[:, -n - 1 : -1] / args.temperature
    logp = F.log_softmax(logits, dim=-1)
    objective = calc_grpo_objective(
        logp.gather(-1, ids[:, -n:, None])[..., 0],
        minibatch.logprobs,
        minibatch.ref_logprobs,
        minibatch.advantages,
        mask,
        clip_coef=args.clip_coef,
        beta=args.kl_coef * (args.kl_kind == "k3"),
    )
    per_token = args.ent_coef * (logp.exp() * logp).sum(-1)
    if args.kl_kind == "exact" and args.kl_coef > 0:
        with torch.no_grad(), self.model.reference():
            ref_logits = self.model(ids, minibatch.attention_mask)[:, -n - 1 : -1]
        ref_logp = F.log_softmax(ref_logits / args.temperature, dim=-1)
        per_token = per_token + args.kl_coef * (logp.exp() * (logp - ref_logp)).sum(-1)
    return objective - per_token[mask].mean()


@right("measure_loss_and_gradient_at_start")
def measured_by_backward(trainer):
    memory = trainer.rollout_phase()
    n = memory.mask.shape[1]
    prompt_len = memory.input_ids.shape[1] - n
    logits = trainer.model(memory.input_ids, memory.attention_mask)
    logprobs = get_logprobs(logits, memory.input_ids, prompt_len, trainer.args.temperature)
    objective = calc_single_update_objective(logprobs, memory.advantages, memory.mask)
    objective.backward()
    parameters = list(trainer.model.trainable_parameters())
    norm = sum(float(p.grad.square().sum()) for p in parameters) ** 0.5
    for parameter in parameters:
        parameter.grad = None
    return objective.detach(), norm


RATIOS_OF_ONE_UPDATE = [
    edit(
        "GrpoTrainer.compute_rlhf_objective",
        "stored_log_probs_with_one_update",
        "            old_logprobs,\n",
        "            minibatch.logprobs,\n",
    ),
]
