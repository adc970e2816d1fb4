"""Right answers to chapter 2, written differently."""

import random
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributions import Categorical

from solutions.ch0_sampling import get_logprobs, get_samples
from solutions.ch2_ppo import (
    ReplayMemory,
    compute_advantages,
    compute_token_rewards,
    make_replay_memory,
    normalize_advantages,
    normalize_reward,
)
from utils.grading.known_answers import right
from utils.models.corpus import NEGATIVE_WORDS, POSITIVE_WORDS
from utils.rewards import call_reward_fn

# --- Rewards ------------------------------------------------------------------------------------

counted_by_lambda = right("reward_fn_char_count")(
    lambda samples, char=".": torch.tensor([s.count(char) for s in samples], dtype=torch.float32)
)


@right("reward_fn_sentiment")
def letters_kept_by_translation(samples):
    rewards = []
    for sample in samples:
        clean = "".join(c if c.isalpha() else " " for c in sample.lower())
        hits = np.array(
            [(w in POSITIVE_WORDS, w in NEGATIVE_WORDS) for w in clean.split()], dtype=float
        ).reshape(-1, 2)
        p, n = hits.sum(0)
        rewards.append(float((p - n) / (p + n)) if p + n else 0.0)
    return torch.tensor(rewards, dtype=torch.float32)


@right("normalize_reward")
@torch.no_grad()
def rewards_in_float64(rewards, eps=1e-5):
    wide = rewards.double()
    if len(set(rewards.tolist())) <= 1:
        return rewards.new_zeros(rewards.shape)
    return ((wide - wide.mean()) / (wide.std(unbiased=True) + eps)).to(rewards.dtype)


# --- Rewards and advantages of tokens -----------------------------------------------------------


@right("compute_token_rewards")
def made_in_float32_by_index(scores, mask, logprobs=None, ref_logprobs=None, kl_coef=0.0):
    rewards = torch.zeros(mask.shape)
    if kl_coef:
        rewards[mask] = -kl_coef * (logprobs - ref_logprobs).detach()[mask]
    rows = mask.any(-1)
    rewards[rows, mask.sum(-1)[rows] - 1] += scores.detach()[rows]
    return rewards


@right("compute_advantages")
def lambda_returns_minus_values(values, token_rewards, mask, gamma=1.0, lam=0.95):
    values, rewards = (x.detach().double().masked_fill(~mask, 0) for x in (values, token_rewards))
    returns = torch.zeros_like(values)
    following = next_value = torch.zeros(len(values), dtype=torch.double)
    for t in range(values.shape[1] - 1, -1, -1):
        following = rewards[:, t] + gamma * ((1 - lam) * next_value + lam * following)
        returns[:, t], next_value = following, values[:, t]
    return ((returns - values) * mask).to(token_rewards.dtype)


@right("normalize_advantages")
def scattered_back(advantages, mask, eps=1e-8):
    kept = advantages[mask].detach()
    if len(kept) <= 1 or torch.equal(kept, kept[:1].expand_as(kept)):
        normal = torch.zeros_like(kept)
    else:
        normal = kept.sub(kept.mean()).div(kept.var().sqrt().add(eps))
    return torch.zeros(mask.shape, dtype=kept.dtype).masked_scatter(mask, normal)


# --- The objective in its parts -----------------------------------------------------------------


@right("calc_clipped_surrogate_objective")
def plain_exp(logprobs, old_logprobs, advantages, mask, clip_coef=0.2, clip_coef_high=None):
    high = clip_coef if clip_coef_high is None else clip_coef_high
    ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0.0).exp()
    a = torch.where(mask, advantages.detach(), 0.0)
    terms = torch.min(ratio * a, torch.clamp(ratio, 1 - clip_coef, 1 + high) * a)
    return terms.sum() / mask.sum().clamp(min=1)


@right("calc_value_function_loss")
def values_selected_first(values, old_values, returns, mask, vf_coef=0.5, clip_coef=None):
    old_values, returns = old_values.detach()[mask], returns.detach()[mask]
    errors = (values[mask] - returns) ** 2
    if clip_coef is not None:
        moved = torch.clip(values[mask] - old_values, -clip_coef, clip_coef)
        errors = torch.max(errors, (old_values + moved - returns) ** 2)
    return 0.5 * vf_coef * errors.sum() / max(len(errors), 1)


@right("calc_entropy_bonus")
def entropy_by_categorical(logits, mask, ent_coef):
    if not mask.any():
        return torch.tensor(0.0)
    return Categorical(logits=logits[mask]).entropy().mean().mul(ent_coef)


@right("calc_kl_penalty")
def kl_by_logsumexps(logits, ref_logits, mask, kl_coef):
    x, y = logits[mask], ref_logits.detach()[mask]
    kl = (x.softmax(-1) * (x - y)).sum(-1) - x.logsumexp(-1) + y.logsumexp(-1)
    return kl_coef * kl.sum() / mask.sum().clamp(min=1)


# --- The trainer --------------------------------------------------------------------------------


@right("TransformerWithValueHeadLora.forward_with_value_head")
def forward_twice(self, input_ids, attention_mask=None):
    """The base's own hooks catch the hidden state during an ordinary forward."""
    caught = {}

    def catch(x, hook):
        caught["hidden"] = x

    with self.base.hooks(fwd_hooks=[("ln_final.hook_out", catch)]):
        logits = self.forward(input_ids, attention_mask=attention_mask)
    weight, bias = self.value_head.weight, self.value_head.bias
    return logits, torch.einsum("bsd,d->bs", caught["hidden"].to(weight.dtype), weight[0]) + bias


@right("get_optimizer_and_scheduler")
def adam_and_sequential_schedulers(args, model):
    """Adam is AdamW without weight decay; two schedulers, one after the other."""
    head = list(model.value_head.parameters()) if hasattr(model, "value_head") else []
    adapters = [p for p in model.trainable_parameters() if all(p is not h for h in head)]
    groups = [{"params": adapters, "lr": args.base_lr}]
    if head:
        groups.insert(0, {"params": head, "lr": args.head_lr})
    optimizer = torch.optim.Adam(groups, eps=1e-5, maximize=True)
    n_left = max(args.total_phases - args.warmup_steps, 1)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, args.final_scale, n_left)
    if args.warmup_steps == 0:
        return optimizer, decay
    n = args.warmup_steps
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min((k + 1) / n, 1.0))
    joined = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [n])
    return optimizer, joined


@right("ReplayMemory")
class MemoryOfRows:
    """Rows as dicts, shuffled by the random module."""

    def __init__(self, num_minibatches=1, batches_per_learning_phase=1, group_size=1, **fields):
        self.counts = (num_minibatches, batches_per_learning_phase, group_size)
        self.fields = fields
        lengths = {name: len(x) for name, x in fields.items() if x is not None}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"all fields should have the same number of rows, but have {lengths}")
        self.n = next(iter(lengths.values()))
        if self.n % group_size:
            raise ValueError(f"group_size should divide {self.n}, but is {group_size}")
        for name, value in fields.items():
            setattr(self, name, value)

    def get_minibatches(self, generator=None):
        n_minibatches, epochs, group = self.counts
        minibatches = []
        for _ in range(epochs):
            starts = list(range(0, self.n, group))
            random.shuffle(starts)
            for part in np.array_split(starts, n_minibatches):
                rows = [start + i for start in part.tolist() for i in range(group)]
                chosen = {
                    k: None if x is None else torch.stack([x[r] for r in rows])
                    for k, x in self.fields.items()
                }
                minibatches.append(SimpleNamespace(**chosen))
        return minibatches


@right("make_replay_memory")
def memory_built_step_by_step(args, samples, scores, logprobs, ref_logprobs, values):
    mask = samples.completion_mask
    with torch.no_grad():
        if args.normalize_reward:
            scores = normalize_reward(scores)
        token_rewards = compute_token_rewards(scores, mask)
        if args.kl_in == "reward" and args.kl_coef > 0:
            penalty = args.kl_coef * (logprobs - ref_logprobs)
            token_rewards = torch.where(mask, token_rewards - penalty, 0.0)
        advantages = compute_advantages(values, token_rewards, mask, lam=args.lam, gamma=args.gamma)
    return ReplayMemory(
        args.num_minibatches,
        args.batches_per_learning_phase,
        returns=advantages + values.detach(),
        advantages=normalize_advantages(advantages, mask),
        values=values.detach(),
        ref_logprobs=ref_logprobs.detach() if ref_logprobs is not None else None,
        logprobs=logprobs.detach(),
        mask=mask,
        attention_mask=samples.attention_mask,
        input_ids=samples.input_ids,
    )


@right("RLHFTrainer.compute_rlhf_objective")
def objective_in_one_piece(self, minibatch):
    """One log-softmax for all; the reference before the policy."""
    args, mask, ids = self.args, minibatch.mask, minibatch.input_ids
    n = mask.shape[1]
    with torch.no_grad(), self.model.reference():
        ref_logits = self.model(ids, attention_mask=minibatch.attention_mask)[:, -n - 1 : -1]
    logits, values = self.model.forward_with_value_head(ids, minibatch.attention_mask)
    logp = F.log_softmax(logits[:, -n - 1 : -1] / args.temperature, dim=-1)
    ref_logp = F.log_softmax(ref_logits / args.temperature, dim=-1)
    chosen = logp.gather(-1, ids[:, -n:, None])[..., 0]
    ratio = torch.where(mask, chosen - minibatch.logprobs, 0.0).exp()
    a = torch.where(mask, minibatch.advantages, 0.0)
    above = args.clip_coef if args.clip_coef_high is None else args.clip_coef_high
    clipped = ratio.clamp(1 - args.clip_coef, 1 + above)
    total = torch.min(ratio * a, clipped * a)
    values, old = values[:, -n - 1 : -1], torch.where(mask, minibatch.values, 0.0)
    reach = torch.inf if args.vf_clip_coef is None else args.vf_clip_coef
    returns = torch.where(mask, minibatch.returns, 0.0)
    near = old + (values - old).clamp(-reach, reach)
    error = torch.max((values - returns) ** 2, (near - returns) ** 2)
    self.metrics["value_loss"] += [(args.vf_coef / 2 * error[mask].mean()).item()]
    total = total - args.vf_coef / 2 * error
    total = total - args.ent_coef * (logp.exp() * logp).sum(-1)
    if args.kl_in == "loss":
        total = total - args.kl_coef * (logp.exp() * (logp - ref_logp)).sum(-1)
    return total[mask].sum() / mask.sum()


@right("RLHFTrainer.learning_phase")
def learning_with_a_loop_of_its_own(self, memory):
    for minibatch in memory.get_minibatches():
        objective = self.compute_rlhf_objective(minibatch)
        parameters = list(self.model.trainable_parameters())
        gradients = torch.autograd.grad(objective, parameters)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        scale = (self.args.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * scale
        self.optimizer.step()
    self.optimizer.zero_grad()
    self.scheduler.step()


@right("RLHFTrainer.rollout_phase")
def rollout_in_one_batch(self):
    """Everything in one forward pass, rewards called by hand, prompts from the random module."""
    args = self.args
    choices = random.Random(int(torch.randint(2**31, (1,), generator=self.generator)))
    prompts = [choices.choice(args.prompts or [args.prefix]) for _ in range(args.batch_size)]
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
        logits, values = self.model.forward_with_value_head(ids, attention)
        with self.model.reference():
            ref_logits = self.model(ids, attention)
    return make_replay_memory(
        args,
        samples,
        call_reward_fn(args.reward_fn, samples.texts, {"prompts": prompts}),
        get_logprobs(logits, ids, n, args.temperature),
        get_logprobs(ref_logits, ids, n, args.temperature),
        values[:, n - 1 : -1],
    )


@right("RLHFTrainer.rollout_phase")
@torch.inference_mode()
def rollout_in_inference_mode(self):
    """A memory's rows are copies, made outside: they can enter a backward."""
    args = self.args
    samples, scores = self.sample_and_score(args.batch_size)
    n, ids = samples.prompt_len, samples.input_ids
    logits, values = self.model.forward_with_value_head(ids, samples.attention_mask)
    logprobs, ref_logprobs = (
        get_logprobs(logits, ids, n, args.temperature),
        self.get_ref_logprobs(samples),
    )
    return make_replay_memory(args, samples, scores, logprobs, ref_logprobs, values[:, n - 1 : -1])
