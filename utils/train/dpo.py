"""Training on preferences from the command line, by chapter 6's DPO."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from solutions.ch1_lora import ATTENTION_SITES, TransformerWithLora
from solutions.ch6_preferences import measure_implicit_accuracy, train_dpo
from utils.preferences import load_preferences
from utils.run_folder import (
    append_rows,
    create_run_folder,
    name_fields,
    save_checkpoint,
    write_options,
)
from utils.train.options import Dtype, explained, find_adapter
from utils.validation import Count, CountOrZero, Positive, check_fields, require


@explained
@dataclass(kw_only=True)
class DpoCommand:
    """Train by DPO on a file of preferences. The reference is the base."""

    #: Lines of prompt, chosen and rejected: .jsonl or .parquet.
    data: Path
    #: Held-out preferences, like --data: measured before and after.
    eval_data: Path | None = None
    beta: Positive = 0.1  # What the KL from the reference costs, as in PPO.
    lr: Positive = 1e-3  # The learning rate; it falls to zero.
    epochs: Count = 1  # How many times learning goes over the preferences.
    batch_size: Count = 32  # Preferences in each update.
    seed: CountOrZero = 1  # Decides the initial adapters and the order of the data.
    name: str | None = None
    runs_dir: Path = Path("runs")
    base_model: str = "embedded"
    lora_rank: Count = 4
    lora_alpha: Positive = 32
    lora_sites: tuple[str, ...] = ATTENTION_SITES
    device: str | None = None
    weights_dtype: Dtype | None = None
    adapter: Path | None = None
    config: Path | None = None


def train_on_preferences(command: DpoCommand) -> list[dict[str, float]]:
    """Train, write the run's folder, and return the metrics: a row for each update.

    A run that is stopped leaves an empty folder. Raises ValueError under torchrun.
    """
    require("LOCAL_RANK" not in os.environ, "dpo should run as one process, not under torchrun")
    check_fields(command)
    preferences = load_preferences(command.data)
    held_out = None if command.eval_data is None else load_preferences(command.eval_data)
    dtype = command.weights_dtype and getattr(torch, command.weights_dtype)
    torch.manual_seed(command.seed)  # of the adapters
    size = (command.lora_rank, command.lora_alpha, command.lora_sites)
    model = TransformerWithLora.from_pretrained(command.base_model, *size, command.device, dtype)
    if command.adapter is not None:
        model.load_adapter(find_adapter(command.adapter))
    folder = create_run_folder(command.runs_dir, command.name, "dpo")

    def measure() -> dict[str, float]:
        if held_out is None:
            return {}
        return {"eval_accuracy": measure_implicit_accuracy(model, held_out, command.batch_size)}

    history: list[dict[str, float]] = [{"phase": 0} | measure()]
    settings = (command.beta, command.lr, command.epochs, command.batch_size, command.seed)
    rows = train_dpo(model, preferences, *settings)
    history += [{"phase": step} | row for step, row in enumerate(rows, 1)]
    history[-1] |= measure()

    options = name_fields(command)
    options.pop("config")
    write_options(folder, {"command": "dpo"} | options)
    append_rows(folder / "metrics.jsonl", history, anew=True)
    model.save_adapter(folder / "adapter.safetensors")
    # What `python -m utils.models.export` and `utils.sample` read: of the context, half at most.
    gen_len = min(128, model.cfg.n_ctx // 2)
    args = options | {"dtype": dtype and str(dtype), "gen_len": gen_len, "temperature": 1.0}
    none: dict[str, Any] = dict.fromkeys(("optimizer", "scheduler", "generator"))
    state = {"args": args, "phase": len(rows), "trainable": model.trainable_state()}
    save_checkpoint(folder / "checkpoint.pt", state | none | {"history": history})
    print(f"{folder}: metrics.jsonl, adapter.safetensors")
    if held_out:
        before, after = (history[i]["eval_accuracy"] for i in (0, -1))
        print(f"accuracy on held-out preferences: {before:.3f} before, {after:.3f} after")
    return history
