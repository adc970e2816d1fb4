"""What TRL 1.16 makes of the arguments of its GRPO trainer, for one process."""

# What it reads where nothing is given; `tests/course/test_scale.py` compares this with TRL itself.
DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "num_generations": 8,
    "max_steps": -1,
    "max_completion_length": 512,
    "temperature": 1.0,
    "top_k": 0,
    "mask_truncated_completions": False,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "epsilon": 0.2,
    "epsilon_high": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "entropy_coef": 0.0,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "bf16": True,
}


# What does not change the step of one process, at the values that TRL has where nothing is given.
HARMLESS = {
    "top_p": 1.0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "fp16": False,
    "warmup_steps": 0,
    "delta": None,
    "sync_ref_model": False,
}
FREE = {"seed", "gradient_checkpointing", "output_dir", "report_to", "use_cpu", "shuffle_dataset"}
FREE |= {"logging_steps", "save_strategy", "remove_unused_columns", "num_train_epochs", "use_vllm"}


def read(config: dict) -> dict:
    """The arguments that matter, as TRL reads them: defaults, and what one says by another."""
    sizes = {"steps_per_generation", "generation_batch_size"}
    others = config.keys() - DEFAULTS.keys() - FREE - sizes
    others -= {name for name in others if name.startswith("vllm_")}  # without use_vllm, harmless
    strange = {name for name in others if HARMLESS.get(name, config) != config[name]}
    found = DEFAULTS | config
    per_device = found.pop("per_device_train_batch_size")
    accumulation = found.pop("gradient_accumulation_steps")
    steps = found.pop("steps_per_generation", None) or accumulation
    rollout = found.pop("generation_batch_size", None) or per_device * steps
    if found["epsilon_high"] is None:
        found["epsilon_high"] = found["epsilon"]
    found["top_k"] = found["top_k"] or 0
    scale = found["scale_rewards"]
    found["scale_rewards"] = {True: "group", False: "none"}.get(scale, scale)
    found["lr_scheduler_type"] = str(getattr(found["lr_scheduler_type"], "value", "")) or str(
        found["lr_scheduler_type"]
    )
    known = {name: found[name] for name in DEFAULTS if name in found}
    known["arguments that TRL lacks or that change the step"] = sorted(strange)
    known["both batch sizes of a rollout"] = sizes <= config.keys()
    known["completions an update"] = per_device * accumulation
    return known | {"completions a rollout": rollout}
