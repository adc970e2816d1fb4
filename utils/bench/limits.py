"""The update alone, against what its floating-point operations would take at the machine's rate."""

from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from utils.bench.measuring import get_median, take_turns
from utils.bench.models import Work
from utils.bench.trainers import make_trainer

SIDE = 2048  # of the matrices whose product gives the machine's rate


def measure_limits(folder: Path, rounds: int) -> dict:
    """Measure for PPO and GRPO the operations of one update (forward, backward, the optimizer's
    step; in PPO also the reference's forward pass), and the share of the machine's rate that it
    reaches.

    Counted are matrix products, as PyTorch's counter does; elementwise work is not.
    """
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    results = {}
    for kind in ("grpo", "ppo"):
        trainer = make_trainer(folder, Work(), kind)
        memory = trainer.rollout_phase()
        with FlopCounterMode(display=False) as counter:
            trainer.learning_phase(memory)
        flops = counter.get_total_flops()
        sides = {"update": lambda: trainer.learning_phase(memory), "product": lambda: a @ b}  # noqa: B023
        seconds = {name: get_median(s) for name, s in take_turns(sides, rounds, kind).items()}
        rate = 2 * SIDE**3 / seconds["product"]
        results[kind] = {
            "gflop": flops / 1e9,
            "seconds": seconds["update"],
            "machine_gflop_per_second": rate / 1e9,
            "fraction": flops / rate / seconds["update"],
        }
    return results
