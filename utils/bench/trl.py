"""The same GRPO step by `trl.GRPOTrainer` with PEFT, in the best configuration found for a CPU."""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformer_lens  # noqa: F401  before transformers
from datasets import Dataset
from peft import LoraConfig
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from utils.bench.measuring import measure_peak
from utils.bench.models import Work, get_sites, make_data

EAGER, STATIC = {"attn_implementation": "eager"}, {"cache_implementation": "static"}
# What is tried. TRL's own defaults, bfloat16 autocast and checkpointing, took 1.7 times as long as
# the best of these on a CPU, autocast alone 1.4 times.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32, sdpa": {},
    "float32, eager attention": EAGER,
    "float32, sdpa, static cache": STATIC,
    "float32, eager attention, static cache": EAGER | STATIC,
}


def reward(completions: list[str], answers: list[str], **_) -> list[float | None]:
    """Reward as `reward_fn_addition` does, in TRL's form."""
    return [
        float(text.endswith(f"A: {answer}"))
        for text, answer in zip(completions, answers, strict=True)
    ]


class AfterStep(TrainerCallback):
    """Measures TRL's steps, and calls `between` between them, outside the measurement.

    Stops the training when `between` returns True.
    """

    def __init__(self, between: Callable[[int], bool | None]):
        self.between = between
        self.seconds: list[float] = []
        self.start = 0.0

    def on_train_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.seconds.append(time.perf_counter() - self.start)
        if self.between(len(self.seconds)):
            control.should_training_stop = True
        self.start = time.perf_counter()


def make_trl_trainer(
    folder: Path | str,
    out: Path | str,
    work: Work,
    steps: int,
    between: Callable[[int], bool | None] = lambda step: None,
    seed: int = 0,
    attn_implementation: str = "sdpa",
    **options,
) -> tuple[GRPOTrainer, AfterStep]:
    """Return a trainer for `steps` steps of `work`, and the callback that has their seconds."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts, answers = make_data()
    prompts = [tokenizer.bos_token + prompt for prompt in prompts]  # TRL prepends none
    config: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": work.batch_size,
        "num_generations": work.group_size,
        "max_completion_length": work.gen_len,
        "learning_rate": work.lr,
        "lr_scheduler_type": "constant",
        "beta": work.beta,
        "loss_type": "grpo",
        "max_steps": steps,
        "max_grad_norm": 1.0,
        "seed": seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    _, target_modules = get_sites(folder)
    callback = AfterStep(between)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=attn_implementation, dtype=torch.float32
        ),
        args=GRPOConfig(**(config | options)),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts, "answers": answers}),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=work.rank,
            lora_alpha=32,
            lora_dropout=0.0,
            target_modules=target_modules,
            fan_in_fan_out="c_attn" in target_modules,  # GPT-2's Conv1D keeps [d_in d_out]
        ),
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer, callback


@functools.cache
def choose_configuration(folder: Path, work: Work, steps: int = 3) -> tuple[str, dict[str, float]]:
    """Return the fastest of `CONFIGURATIONS` at this work, and the median seconds a step of each:
    there and back through the list, `steps` steps each time after a first one."""
    seconds: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
    with tempfile.TemporaryDirectory() as out:
        order = [*CONFIGURATIONS, *reversed(CONFIGURATIONS)]
        for tried in tqdm(order, desc="TRL's configurations", leave=False):
            trainer, clock = make_trl_trainer(folder, out, work, steps + 1, **CONFIGURATIONS[tried])
            trainer.train()
            seconds[tried] += clock.seconds[1:]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return min(medians, key=lambda name: medians[name]), medians


def measure_trl_memory(folder: Path, work: Work, options: dict) -> dict:
    """Measure the memory that three steps take."""
    with tempfile.TemporaryDirectory() as out:
        trainer, _ = make_trl_trainer(folder, out, work, 3, **options)
        return measure_peak(trainer.train)
