"""The loss of TRL's GRPO trainer, on log-probs that are given."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from trl import GRPOConfig, GRPOTrainer


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
