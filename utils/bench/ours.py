"""This course's contestant: `GrpoTrainer`, a phase of which is one GRPO step."""

import time
from pathlib import Path

import torch

from solutions.ch0_sampling import sample_completions
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from utils.bench.models import Between, Work, get_sites, make_data
from utils.rewards import reward_fn_addition
from utils.validation import require


class Contestant:
    """Takes steps without a phase's table and log."""

    def __init__(self, folder: Path | str, work: Work, seed: int = 0, device: str = "cpu"):
        prompts, answers = make_data()
        args = GrpoArgs(
            base_model=folder,
            device=device,
            seed=seed,
            prompts=prompts,
            columns={"answers": answers},
            reward_fn=reward_fn_addition,
            batch_size=work.batch_size,
            group_size=work.group_size,
            gen_len=work.gen_len,
            num_minibatches=1,
            batches_per_learning_phase=1,
            lora_rank=work.rank,
            lora_sites=get_sites(folder),
            kl_coef=work.beta,
            base_lr=work.lr,
            warmup_steps=0,
            final_scale=1.0,
            ent_coef=0.0,
        )
        self.trainer, self.work = GrpoTrainer(args), work

    def train(self, steps: int, between: Between = lambda step: None) -> list[float]:
        """Take steps until `between` returns True, and return their seconds."""
        seconds: list[float] = []
        while len(seconds) < steps:
            self.trainer.metrics.clear()
            start = time.perf_counter()
            self.trainer.learning_phase(self.trainer.rollout_phase())
            if self.trainer.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            if between(len(seconds)):
                break
        return seconds

    def sample(self, prompts: list[str], seed: int) -> list[str]:
        """Sample a completion of each prompt."""
        generator = torch.Generator(self.trainer.device).manual_seed(seed)
        gen_len = self.work.gen_len
        return sample_completions(self.trainer.model, prompts, gen_len, generator=generator).texts

    def check_length(self) -> None:
        """Raise ValueError unless every completion of a rollout has exactly `gen_len` tokens."""
        lengths = self.trainer.rollout_phase().mask.sum(-1)
        said = f"completions should have {self.work.gen_len} tokens, but have {lengths}"
        require(bool((lengths == self.work.gen_len).all()), said)
