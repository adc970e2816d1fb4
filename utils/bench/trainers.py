"""This course's side of what is compared; TRL's is `utils.bench.trl`.

Neither imports the other: the memory of each is measured in a process that holds it alone.
"""

import importlib
from pathlib import Path
from typing import Any

from solutions.ch2_ppo import RLHFArgs, RLHFTrainer
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from utils.bench.measuring import measure_peak
from utils.bench.models import Work, get_sites, make_data
from utils.rewards import reward_fn_addition


def load_trl() -> Any:
    """Import TRL's side: only now, as what it imports would count in the memory of ours."""
    return importlib.import_module("utils.bench.trl")


def make_trainer(folder: Path | str, work: Work, kind: str = "grpo", **overrides):
    """Return this course's trainer for `work`, "grpo" or "ppo"."""
    prompts, answers = make_data()
    setup = {
        "base_model": folder,
        "device": "cpu",
        "prompts": prompts,
        "columns": {"answers": answers},
        "reward_fn": reward_fn_addition,
        "batch_size": work.batch_size,
        "gen_len": work.gen_len,
        "num_minibatches": 1,
        "batches_per_learning_phase": 1,
        "lora_rank": work.rank,
        "lora_sites": get_sites(folder)[0],
        "kl_coef": work.beta,
        "base_lr": work.lr,
        "warmup_steps": 0,
        "final_scale": 1.0,
        "ent_coef": 0.0,
    } | overrides
    if kind == "ppo":
        return RLHFTrainer(RLHFArgs(**setup, head_lr=work.lr))
    return GrpoTrainer(GrpoArgs(**setup, group_size=work.group_size))


def run_step(trainer) -> None:
    """Run a phase without its table and log: a rollout, and the learning from it."""
    trainer.metrics.clear()
    trainer.learning_phase(trainer.rollout_phase())


def check_length(trainer, work: Work) -> None:
    """Raise ValueError unless every completion of a rollout has exactly `gen_len` tokens."""
    lengths = trainer.rollout_phase().mask.sum(-1)
    if not bool((lengths == work.gen_len).all()):
        raise ValueError(f"completions should have {work.gen_len} tokens, but have {lengths}")


def use_the_bridge(trainer) -> None:
    """Make a trainer score and sample by its bridge, as one does with a reader's hooks on it."""
    trainer.model.base.register_forward_hook(lambda *_: None)


def measure_our_memory(folder: Path, work: Work) -> dict:
    """Measure the memory that three steps take."""
    trainer = make_trainer(folder, work)

    def run_three() -> None:
        for _ in range(3):
            run_step(trainer)

    return measure_peak(run_three)
