"""A GRPO run as TRL would make it: `python -m utils.scale.to_trl runs/my-run for_trl`.

Writes a folder for TRL 1.16's command, run in the folder where the rewards' module lies:

    trl grpo --config for_trl/grpo.yaml

It holds the arguments that `to_trl_config` translates, the model, the size and places of the
adapters, the rewards with their weights, and the prompts, which get the bos that TRL doesn't put.
Run it in the folder in which the run was started, as its arguments name files.
"""

import argparse
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformer_lens  # noqa: F401  before transformers
import yaml
from transformers import AutoConfig, AutoTokenizer

from solutions.ch3_grpo import GrpoArgs
from solutions.ch5_rlvr import RlvrArgs
from solutions.ch7_scale import to_trl_config
from solutions.ch9_async import AsyncArgs
from utils.models.export import NAMES
from utils.models.fetch import MODELS, find_fetched
from utils.models.loading import IN_THIS_REPO
from utils.run_folder import read_args
from utils.train.data import load_rows
from utils.train.options import Options
from utils.validation import require

BY_NAME = {"prompts", "columns", "reward_fn", "environment", "dtype"}  # no plain values


def read_grpo_args(noted: dict[str, Any]) -> GrpoArgs:
    """Return the arguments of a run, of which `noted` is the args.json, without its functions.

    Raises ValueError, with the argument's name, for a run that isn't GRPO, or in which something
    counts that wouldn't in TRL.
    """
    require("group_size" in noted, f"run should be one of GRPO, but is {noted.get('command')!r}")
    for name in ("environment", "stop", "adapter"):
        given = noted.get(name)
        require(not given, f"{name} should not be given, as it isn't translated, but is {given!r}")
    kinds = {"loss_mode": RlvrArgs, "staleness": AsyncArgs}
    kind = next((kinds[name] for name in kinds if name in noted), GrpoArgs)
    known = {f.name for f in (*fields(kind), *fields(Options))} | {"version", "command"}
    other = ", ".join(noted.keys() - known)
    require(not other, f"trainer should have no other arguments than GRPO's, but has {other}")
    names = {f.name for f in fields(kind)} & noted.keys() - BY_NAME
    dtype = noted.get("weights_dtype") or noted.get("dtype") or "float32"
    return kind(**{name: noted[name] for name in names}, dtype=getattr(torch, dtype))


def read_rows(noted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a run's prompts with their columns."""
    if noted.get("data"):
        return load_rows(noted["data"])
    prompts = noted.get("prompts") or [noted["prefix"]]
    columns = noted.get("columns") or {}
    return [
        {"prompt": prompt} | {name: column[i] for name, column in columns.items()}
        for i, prompt in enumerate(prompts)
    ]


def make_config(noted: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return what `trl grpo --config` reads."""
    args = read_grpo_args(noted)
    alpha = args.lora_alpha
    require(alpha == int(alpha), f"lora_alpha should be whole for TRL, but is {alpha}")
    name = str(args.base_model)
    model = find_fetched(name) if name in MODELS else IN_THIS_REPO.get(name, name)
    is_gpt2 = AutoConfig.from_pretrained(model).model_type == "gpt2"
    modules = {str(NAMES[site][0 if is_gpt2 else 1]) for site in args.lora_sites}
    rewards = noted.get("reward") or [
        noted.get("reward_fn", "solutions.ch2_ppo:reward_fn_sentiment")
    ]
    for path in rewards:
        is_found = not re.search("^__main__|<", path)  # of a notebook, or local, or an object
        require(is_found, f"reward_fn should be a function of a module's, but is {path}")
    return {
        "model_name_or_path": str(model),
        "dtype": str(args.dtype).removeprefix("torch."),
        "use_peft": True,
        "lora_r": args.lora_rank,
        "lora_alpha": int(alpha),
        "lora_target_modules": sorted(modules),
        "datasets": [{"path": "json", "data_files": str((out / "prompts.jsonl").resolve())}],
        "reward_funcs": [path.replace(":", ".") for path in rewards],
        "reward_weights": noted.get("reward_weights") or [1.0] * len(rewards),
        "output_dir": str((out / "trained").resolve()),
        **to_trl_config(args),
    }


def write(run: Path, out: Path) -> None:
    """Write the folder for TRL.

    Raises ValueError, with the argument's name, where TRL has nothing for its value.
    """
    noted = read_args(run)
    config, rows = make_config(noted, out), read_rows(noted)
    tokenizer = AutoTokenizer.from_pretrained(config["model_name_or_path"])
    bos = tokenizer.bos_token if noted["prepend_bos"] else None
    if bos and tokenizer("a")["input_ids"][0] != tokenizer.bos_token_id:
        for row in rows:
            if isinstance(row["prompt"], str):
                row["prompt"] = bos + row["prompt"]
    out.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (out / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    (out / "grpo.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m utils.scale.to_trl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder to write")
    given = parser.parse_args(arguments)
    try:
        write(given.run, given.out)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    print(f"trl grpo --config {given.out / 'grpo.yaml'}")


if __name__ == "__main__":
    main()
