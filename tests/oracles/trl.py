"""The losses of TRL's trainers, on log-probs and rewards that are given."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer


def calc_trl_loss(
    logprobs,
    old_logprobs,
    ref_logprobs,
    advantages,
    mask,
    low,
    high,
    beta,
    loss_type="grpo",
    level="token",
    max_completion_length=None,
):
    """Return the loss of `trl.GRPOTrainer`, of whose gradient `logprobs` are the leaf."""
    config = GRPOConfig(output_dir="unused", use_cpu=True, report_to="none", bf16=False)
    assert hasattr(config, "use_bias_correction_kl")
    config.use_bias_correction_kl = False
    config.steps_per_generation = 1
    trainer = SimpleNamespace(
        args=config,
        beta=beta,
        epsilon_low=low,
        epsilon_high=high,
        loss_type=loss_type,
        max_completion_length=max_completion_length,
        importance_sampling_level=level,
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
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
    )
    completion_ids = torch.zeros(mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": completion_ids[:, :1],
        "prompt_mask": completion_ids[:, :1],
        "completion_ids": completion_ids,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old_logprobs,
        "ref_per_token_logps": ref_logprobs,
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def calc_trl_dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta):
    """Return the loss of `trl.DPOTrainer` and the mean rewards that it logs, of completions of one
    token, whose log-probs are given."""
    logps = torch.cat([policy_chosen, policy_rejected])[:, None]
    outputs = SimpleNamespace(
        log_probs=logps,
        entropies=torch.zeros_like(logps),
        entropy=torch.zeros_like(logps),
        mean_logits=torch.zeros_like(logps),
        is_top1=torch.ones_like(logps, dtype=torch.bool),
        aux_loss=None,
    )
    metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
    trainer = SimpleNamespace(
        args=DPOConfig(output_dir="unused", use_cpu=True, report_to="none", bf16=False),
        model=torch.nn.Identity(),
        accelerator=Accelerator(cpu=True),
        beta=beta,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        label_smoothing=0.0,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    ids = torch.zeros(len(logps), 2, dtype=torch.long)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": torch.tensor([[0, 1]]).expand_as(ids),
        "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)
    return loss, metrics["train"]["rewards/chosen"][0], metrics["train"]["rewards/rejected"][0]


def calc_trl_reward_loss(chosen_rewards, rejected_rewards):
    """Return the loss of `trl.RewardTrainer`, for rewards that are given, and its accuracy."""
    logits = torch.cat([chosen_rewards, rejected_rewards])[:, None]
    metrics = {mode: defaultdict(list) for mode in ("train", "eval")}
    trainer = SimpleNamespace(
        args=RewardConfig(output_dir="unused", use_cpu=True, report_to="none", bf16=False),
        model=torch.nn.Identity(),
        accelerator=Accelerator(cpu=True),
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(len(logits), 2)}
    outputs = SimpleNamespace(logits=logits)
    loss = RewardTrainer.compute_loss(trainer, lambda **_: outputs, inputs)
    return loss, metrics["train"]["accuracy"][0]
