"""TRL's contestant: `GRPOTrainer` with PEFT, in the best configuration found for a CPU."""

import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformer_lens  # noqa: F401  before transformers
from datasets import Dataset
from peft import LoraConfig
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from utils.bench.models import Between, Work, make_data
from utils.rewards import reward_fn_addition

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
    """Reward as ours does, in TRL's form."""
    return reward_fn_addition(completions, answers).tolist()


class _AfterStep(TrainerCallback):
    """Measures TRL's steps, and calls `between` between them, outside the measurement."""

    def __init__(self, between: Between):
        self.between = between
        self.seconds: list[float] = []

    def on_train_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.start)
        if self.between(len(self.seconds)):
            control.should_training_stop = True
        self.start = time.perf_counter()


class Contestant:
    """Takes the steps of the course's `Contestant`, the first time that it is asked to train."""

    def __init__(
        self,
        folder: Path | str,
        work: Work,
        seed: int = 0,
        attn_implementation: str = "sdpa",
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ):
        torch.manual_seed(seed)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        prompts, answers = make_data()
        prompts = [self.tokenizer.bos_token + prompt for prompt in prompts]  # TRL prepends none
        self.out = tempfile.TemporaryDirectory()
        config: dict[str, Any] = {
            "output_dir": self.out.name,
            "per_device_train_batch_size": work.batch_size,
            "num_generations": work.group_size,
            "max_completion_length": work.gen_len,
            "learning_rate": work.lr,
            "lr_scheduler_type": "constant",
            "beta": work.beta,
            "loss_type": "grpo",
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
        self.work = work
        model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=attn_implementation, dtype=dtype
        )
        self.trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(**config | options),
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": prompts, "answers": answers}),
            processing_class=self.tokenizer,
            peft_config=LoraConfig(
                r=work.rank,
                lora_alpha=32,
                lora_dropout=0.0,
                target_modules="all-linear",
                fan_in_fan_out=model.config.model_type == "gpt2",  # Conv1D keeps [d_in d_out]
            ),
        )
        self.trainer.remove_callback(PrinterCallback)

    def train(self, steps: int, between: Between = lambda step: None) -> list[float]:
        """Take steps until `between` returns True, and return their seconds."""
        callback = _AfterStep(between)
        self.trainer.add_callback(callback)
        self.trainer.args.max_steps = steps
        self.trainer.train()
        return callback.seconds

    @torch.no_grad()
    def sample(self, prompts: list[str], seed: int) -> list[str]:
        """Sample a completion of each prompt."""
        model: Any = self.trainer.model
        prompts = [self.tokenizer.bos_token + prompt for prompt in prompts]
        inputs = self.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        sampling: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
        with torch.random.fork_rng():  # the training samples from the global generator
            torch.manual_seed(seed)
            ids = model.generate(**inputs, max_new_tokens=self.work.gen_len, **sampling)
        completions = ids[:, inputs["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(completions, skip_special_tokens=True)


@functools.cache
def choose_configuration(folder: Path, work: Work, steps: int = 3) -> tuple[str, dict[str, float]]:
    """Return the fastest of `CONFIGURATIONS` at this work, and the median seconds a step of each:
    there and back through the list, `steps` steps each time after a first one."""
    seconds: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
    order = [*CONFIGURATIONS, *reversed(CONFIGURATIONS)]
    for tried in tqdm(order, desc="TRL's configurations", leave=False):
        contestant = Contestant(folder, work, **CONFIGURATIONS[tried])
        seconds[tried] += contestant.train(steps + 1)[1:]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return min(medians, key=lambda name: medians[name]), medians
