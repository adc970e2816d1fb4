"""Right answers to chapter 6, written differently."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from solutions.ch1_lora import TransformerWithLora
from solutions.ch6_preferences import encode_completions
from utils.grading.known_answers import right

# --- Bradley-Terry ------------------------------------------------------------------------------


@right("calc_preference_loss")
def a_classification_of_two(chosen_rewards, rejected_rewards):
    """The first of two classes is right each time."""
    logits = torch.stack([chosen_rewards, rejected_rewards], dim=1)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


@right("calc_preference_accuracy")
def by_a_step_function(chosen_rewards, rejected_rewards):
    margins = (chosen_rewards - rejected_rewards).detach()
    return torch.heaviside(margins, margins.new_tensor(0.5)).mean().item()


# --- The reward model ---------------------------------------------------------------------------


@right("RewardModel.forward")
def first_largest_count(self, input_ids, attention_mask):
    """The count of real tokens first reaches its maximum at the last of them."""
    caught = {}

    def catch(x, hook):
        caught["hidden"] = x

    with self.base.hooks(fwd_hooks=[("ln_final.hook_out", catch)]):
        TransformerWithLora.forward(self, input_ids, attention_mask=attention_mask)
    last = attention_mask.cumsum(-1).argmax(-1)[:, None, None]
    hidden = caught["hidden"].gather(1, last.expand(-1, -1, self.cfg.d_model)).squeeze(1)
    weight, bias = self.reward_head.weight, self.reward_head.bias
    return hidden.to(weight.dtype) @ weight[0] + bias


class Scorer:
    """A reward function that is an object."""

    def __init__(self, reward_model):
        self.reward_model = reward_model

    def __call__(self, samples, prompts):
        model = self.reward_model
        encoded = encode_completions(model, prompts, samples)
        rewards = model(input_ids=encoded.input_ids, attention_mask=encoded.attention_mask)
        mean, std = model.reward_mean.item(), model.reward_std.item()
        return torch.tensor([(reward - mean) / std for reward in rewards.tolist()])


@right("make_reward_fn")
def an_object_that_is_called(reward_model):
    return Scorer(reward_model)


# --- DPO ----------------------------------------------------------------------------------------


@right("calc_dpo_loss")
def ratios_of_the_two_models(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta=0.1):
    """As in the authors' code: the policy's log-odds less those of the reference."""
    if beta <= 0:
        raise ValueError(f"beta is {beta}")
    ref_chosen, ref_rejected = ref_chosen.detach(), ref_rejected.detach()
    logits = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
    with torch.no_grad():
        chosen_rewards = beta * (policy_chosen - ref_chosen)
        rejected_rewards = beta * (policy_rejected - ref_rejected)
    return -F.logsigmoid(beta * logits).mean(), chosen_rewards, rejected_rewards


# --- Picking samples ----------------------------------------------------------------------------


@right("best_of_n")
def a_table_of_texts(samples, rewards, n):
    if len(samples) != rewards.numel():
        raise ValueError("rewards should be as many as the samples")
    if n <= 0 or len(samples) % n != 0:
        raise ValueError("n should divide the samples")
    texts = np.array(samples, dtype=object).reshape(-1, n)
    columns = rewards.detach().numpy().reshape(-1, n).argmax(axis=1)
    return texts[np.arange(len(texts)), columns].tolist()


@right("calc_best_of_n_kl")
def with_numpy(n):
    if n < 1:
        raise ValueError("n should be 1 or more")
    return float(np.log(n) - np.divide(n - 1, n))


@right("rejection_sample")
def one_candidate_at_a_time(rewards, num_samples, temperature, generator=None):
    """As in the paper: a pass ends in the middle when enough are accepted."""
    if not 1 <= num_samples <= len(rewards):
        raise ValueError(f"num_samples is {num_samples}")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}")
    numbers, candidates, accepted = rewards.tolist(), list(range(len(rewards))), []
    while len(accepted) < num_samples:
        highest = max(numbers[i] for i in candidates)
        order = torch.randperm(len(candidates), generator=generator).tolist()
        for i in [candidates[place] for place in order]:
            uniform = torch.rand((), generator=generator).item()
            if uniform < math.exp((numbers[i] - highest) / temperature):
                accepted.append(i)
                if len(accepted) == num_samples:
                    break
        candidates = [i for i in candidates if i not in accepted]
    return torch.tensor(accepted)


@right("pool_advantages")
@torch.no_grad()
def pools_looked_up(scores, kept, pool_size):
    """The pools of the kept rows, one row each."""
    if pool_size <= 1 or len(scores) % pool_size != 0:
        raise ValueError("pool_size should be 2 or more and divide the scores")
    pools = scores.double().reshape(-1, pool_size)[kept // pool_size]
    std, mean = torch.std_mean(pools, dim=1)
    advantages = (scores[kept].double() - mean) / (std + 1e-4)
    is_constant = (pools == pools[:, :1]).all(dim=1)
    return torch.where(is_constant, 0.0, advantages).to(scores.dtype)
