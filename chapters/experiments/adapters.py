"""Trains the policies that the book's pages run in the reader's browser.

`python -m chapters.experiments.adapters` writes chapters/adapters/<family>-<label>.safetensors:
float16, without value heads, with alpha / rank as the metadata "scaling". A family whose files are
there is skipped; delete them to train it again.

To add a family, write a generator that yields a label and the model as it is at that moment, such
as (phase, model) along a run or (beta, model) over several, and name it in FAMILIES. The book's
build exports whatever lies in chapters/adapters, and a widget asks for it as "<family>-<label>".
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from utils.course.demo import make_grpo_trainer

ADAPTERS = Path(__file__).parents[1] / "adapters"
PHASES = (1, 2, 3, 4, 6, 8, 10, 14, 18, 25)  # it learns in the first ten


def train_phases(trainer: Any, phases: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
    """Train to the last of these phases, and yield each with the model as it is after it."""
    while trainer.phase < phases[-1]:
        trainer.metrics.clear()
        trainer.learning_phase(trainer.rollout_phase())
        trainer.phase += 1
        if trainer.phase in phases:
            yield trainer.phase, trainer.model


def train_grpo(folder: Path) -> Iterator[tuple[int, Any]]:
    """Chapter 3's GRPO on additions, as the demonstration trains it with seed 0."""
    options = {"total_phases": PHASES[-1], "samples_every": 0, "device": "cpu"}
    yield from train_phases(make_grpo_trainer(folder, 0, **options), PHASES)


FAMILIES = {"ch3_grpo": train_grpo}


def save_half(model: Any, path: Path) -> None:
    """Write a model's adapters in float16, without its value head."""
    state = {
        name: tensor.half().contiguous()
        for name, tensor in model.trainable_state().items()
        if ".lora_" in name
    }
    save_file(state, path, metadata={"scaling": str(float(model._layers[0].scaling))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ADAPTERS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is small: more threads are hardly faster
    args.out.mkdir(exist_ok=True)
    for family, train in FAMILIES.items():
        if any(args.out.glob(f"{family}-*.safetensors")):
            continue
        with tempfile.TemporaryDirectory(dir=args.out) as folder:
            made = []
            for label, model in tqdm(train(Path(folder) / "runs"), family):
                made.append(Path(folder) / f"{family}-{label}.safetensors")
                save_half(model, made[-1])
            for path in made:
                os.replace(path, args.out / path.name)


if __name__ == "__main__":
    main()
