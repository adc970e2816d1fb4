"""Trains the policies that the book's pages run in the reader's browser.

`python -m chapters.experiments.adapters` writes chapters/adapters/<family>-<label>.safetensors:
float16, without value heads, with alpha / rank as the metadata "scaling". A family whose files are
there is skipped; delete them to train it again. Chapters 2 and 6 have their experiments' runs, with
one of the three seeds; trained again, a run may diverge from the recorded one by rounding.

To add a family, write a generator that yields a label and the model as it is at that moment, such
as (phase, model) along a run or (beta, model) over several, and name it in FAMILIES. The book's
build exports whatever lies in chapters/adapters, and a widget asks for it as "<family>-<label>".

It also draws chapters/figures/play-strength.svg, GRPO's last policy on held-out pairs with its
adapters at several strengths: the book's first page shows it where there is no JavaScript.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from chapters.experiments import ch2_ppo_runs, ch6_preferences_runs
from chapters.openings import ch1_lora
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import RLHFArgs, RLHFTrainer
from solutions.ch6_preferences import train_dpo
from utils.course.demo import make_grpo_trainer, make_ppo_trainer
from utils.course.evaluation import evaluate_additions
from utils.models.corpus import held_out_pairs

ADAPTERS = Path(__file__).parents[1] / "adapters"
PICTURE = Path(__file__).parents[1] / "figures" / "play-strength.svg"
PHASES = (1, 2, 3, 4, 6, 8, 10, 14, 18, 25)  # it learns in the first ten
PPO_PHASES = (2, 3, 4, 6, 10, 30)
STOPS_PHASES = (2, 6, 10, 12, 16, 30)
OVER_PHASES = (3, 6, 12, 21, 30, 60)
BETAS = (1.0, 0.5, 0.2, 0.1, 0.05)
prepare_preferences = cache(ch6_preferences_runs.prepare)


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


def train_sft(folder: Path) -> Iterator[tuple[str, Any]]:
    """Chapter 1's opening: SFT on friendly reviews."""
    torch.manual_seed(0)
    model = TransformerWithLora.from_pretrained("embedded", device="cpu")
    ch1_lora.train(model)
    yield "friendly", model


def train_ppo(folder: Path) -> Iterator[tuple[int, Any]]:
    """Chapter 2's PPO on the mood of reviews, as the demonstration trains it with seed 0."""
    options = {"samples_every": 0, "device": "cpu"}
    yield from train_phases(make_ppo_trainer(folder, 0, **options), PPO_PHASES)


def train_stops(folder: Path, setting: str) -> Iterator[tuple[int, Any]]:
    """Chapter 2's PPO on full stops, in a setting of its experiment, with seed 1."""
    options = ch2_ppo_runs.COMMON | ch2_ppo_runs.SETTINGS[setting]
    args = RLHFArgs(seed=1, runs_dir=str(folder), **options)
    yield from train_phases(RLHFTrainer(args), STOPS_PHASES)


def train_reward_model(folder: Path) -> Iterator[tuple[str, Any]]:
    """Chapter 6's reward model of a thousand choices, in its experiment's setting of seed 1."""
    yield "model", prepare_preferences(1).reward_model


def train_over(folder: Path) -> Iterator[tuple[int, Any]]:
    """Chapter 6's GRPO against that reward model, without a KL term."""
    trainer = ch6_preferences_runs.make_trainer(
        prepare_preferences(1), folder, "GRPO", beta=0.0, phases=OVER_PHASES[-1]
    )
    yield from train_phases(trainer, OVER_PHASES)


def train_betas(folder: Path) -> Iterator[tuple[float, Any]]:
    """Chapter 6's DPO on those choices, with one beta after another."""
    setting = prepare_preferences(1)
    for beta in BETAS:
        model = setting.new_policy()
        train_dpo(model, setting.pairs, beta, seed=setting.seed)
        yield beta, model


FAMILIES = {
    "ch1_sft": train_sft,
    "ch2_ppo": train_ppo,
    "ch2_stops": partial(train_stops, setting="kl_coef 0"),
    "ch2_stops_kl": partial(train_stops, setting="kl_coef 0.2, in the loss"),
    "ch3_grpo": train_grpo,
    "ch6_reward": train_reward_model,
    "ch6_over": train_over,
    "ch6_dpo": train_betas,
}


def save_half(model: Any, path: Path) -> None:
    """Write a model's adapters in float16, without its value head, but with its reward head."""
    state = {
        name: tensor.half().contiguous()
        for name, tensor in model.trainable_state().items()
        if not name.startswith("value_head.")
    }
    save_file(state, path, metadata={"scaling": str(float(model._layers[0].scaling))})


def load_policy(
    path: Path, strength: float = 1.0, model_class: type = TransformerWithLora
) -> TransformerWithLora:
    """Return the embedded model with the adapters of a file, their products times a strength."""
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if name.endswith("lora_A")]  # noqa: SIM118
        rank = file.get_slice(names[0]).get_shape()[1]
        scaling = float(file.metadata()["scaling"])
    sites = tuple({".".join(name.split(".")[2:4]) for name in names})
    model = model_class.from_pretrained("embedded", rank, scaling * rank, sites, "cpu")
    model.load_adapter(path)
    for layer in model.adapters.values():
        layer.lora_B.data *= strength
    return model


def draw_strengths(adapter: Path, path: Path, n_pairs: int = 100) -> None:
    """Draw the shares of right and of worked answers at several strengths of an adapter."""
    strengths = [0.25 * k for k in range(7)]
    pairs = held_out_pairs()[:n_pairs]
    found = [evaluate_additions(load_policy(adapter, x), pairs, n_samples=4) for x in strengths]
    print(*(f"{x}: {row}" for x, row in zip(strengths, found, strict=True)), sep="\n")
    plt.rcParams.update({"svg.hashsalt": "play", "svg.fonttype": "none", "font.size": 12})
    figure, axes = plt.subplots(figsize=(5.2, 2.8), layout="constrained")
    for key, name, color in (("worked", "worked", "#3b82f6"), ("accuracy", "right", "#0f9d58")):
        values = [row[key] for row in found]
        axes.plot(strengths, values, "o-", color=color)
        axes.annotate(
            name, (1.5, values[-1]), (6, -4), textcoords="offset points", color=color, weight="bold"
        )
    axes.set(xlabel="strength of the training", ylabel="share of answers", ylim=(0, 1.05))
    axes.set_xticks([0, 0.5, 1, 1.5], ["0: base", "0.5", "1: after GRPO", "1.5"])
    axes.spines[["top", "right"]].set_visible(False)
    grey = "#808080"  # seen on white and on black
    axes.tick_params(colors=grey)
    for part in (axes.xaxis.label, axes.yaxis.label):
        part.set_color(grey)
    axes.spines[["left", "bottom"]].set_color(grey)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


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
    if not PICTURE.exists():
        draw_strengths(args.out / f"ch3_grpo-{PHASES[-1]}.safetensors", PICTURE)


if __name__ == "__main__":
    main()
