"""Chapter 7: two processes against one, and a reference that is refreshed against a fixed one.

`python -m chapters.experiments.ch7_scale_runs` writes chapters/results/ch7_scale_runs.json.

"1 process" and "2 processes" are `utils.train` on chapter 3's additions with chapter 3's
settings, the second under torchrun, and accuracies on held-out pairs. "fixed" and "refreshed" are
GRPO on the true reward of chapter 6, with several betas; they are measured on 15 beginnings of
reviews that nothing is trained on, with 540 completions, and their KL is from the first model.

Runs that the result has already are not made again; so an interrupted script goes on.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from solutions.ch1_lora import TransformerWithLora
from solutions.ch6_preferences import reward_fn_true
from solutions.ch7_scale import RefreshArgs, RefreshTrainer
from utils.course.evaluation import evaluate_additions, sample_prompts
from utils.models.corpus import held_out_pairs, review_prompts
from utils.models.forward import get_scorer
from utils.models.loading import ALL_LINEAR_SITES

RESULT = Path(__file__).parents[1] / "results" / "ch7_scale_runs.json"
TRAIN, HELD = review_prompts()
GEN_LEN, PHASES, EVERY, PER_HELD = 30, 24, 8, 36

ADDITIONS = {  # `utils.course.demo.make_grpo_trainer` has the same
    "data": "utils.models.corpus:addition_rows",
    "reward": "utils.rewards:reward_fn_addition",
    "gen-len": 40,
    "lora-rank": 8,
    "total-phases": 40,
    "num-minibatches": 1,
    "batches-per-learning-phase": 1,
    "base-lr": 3e-3,
    "warmup-steps": 0,
    "final-scale": 0.0,
    "ent-coef": 0.0,
    "kl-coef": 0.001,
    "samples-every": 0,
}


def make_command(n_processes: int, folder: str, seed: int) -> list[str]:
    """Return the command of a run on additions."""
    start = [sys.executable, "-m"]
    if n_processes > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={n_processes}", "-m"]
    options = [f"--{name}={value}" for name, value in ADDITIONS.items()]
    options += ["--lora-sites", *ALL_LINEAR_SITES]
    options += ["--runs-dir", folder, "--name", "run", "--seed", str(seed), "--device", "cpu"]
    return [*start, "utils.train", "grpo", *options]


def run_additions(seed: int, n_processes: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = make_command(n_processes, folder, seed)
        env = os.environ | ({"OMP_NUM_THREADS": "1"} if n_processes > 1 else {})
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        run = Path(folder, "run")
        history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        model = TransformerWithLora.from_pretrained(
            "embedded", rank=8, sites=ALL_LINEAR_SITES, device="cpu"
        )
        model.load_adapter(run / "adapter.safetensors")
    found = evaluate_additions(model, held_out_pairs(), seed=seed)
    return found | {"rewards": [row["reward"] for row in history]}


def run_refreshed(seed: int, beta: float, every: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        args = RefreshArgs(
            seed=seed,
            prompts=TRAIN,
            reward_fn=reward_fn_true,
            total_phases=PHASES,
            batch_size=64,
            gen_len=GEN_LEN,
            num_minibatches=1,
            batches_per_learning_phase=1,
            base_lr=2e-3,
            warmup_steps=3,
            final_scale=1.0,
            ent_coef=0.0,
            kl_coef=beta,
            kl_kind="exact",
            refresh_every=every,
            samples_every=0,
            checkpoint_every=0,
            runs_dir=folder,
            device="cpu",
        )
        trainer = RefreshTrainer(args)
        first = copy.deepcopy(trainer.model)
        trainer.train()
    many = HELD * PER_HELD
    batches = sample_prompts(trainer.model, many, GEN_LEN, seed=77, rows=270)
    texts = [text for batch in batches for text in batch.texts]
    return {
        "true": reward_fn_true(texts).mean().item(),
        "kl": sum(measure_kl_between(trainer.model, first, batch) for batch in batches) / len(many),
        "rewards": [row["reward"] for row in trainer.history],
        "sample": HELD[0] + texts[0],
    }


@torch.no_grad()
def measure_kl_between(model: TransformerWithLora, first: TransformerWithLora, samples) -> float:
    """Sum the log-ratios of a model to another one over all sampled tokens, in nats."""
    given = (samples.input_ids, samples.attention_mask, samples.prompt_len)
    now, then = (get_scorer(policy).measure(*given).logprobs for policy in (model, first))
    logratio = now - then
    return logratio.masked_fill(~samples.completion_mask, 0.0).sum().item()


RUNS: dict[str, Callable[[int], dict]] = {
    "1 process": partial(run_additions, n_processes=1),
    "2 processes": partial(run_additions, n_processes=2),
    **{
        f"fixed, beta {beta}": partial(run_refreshed, beta=beta, every=0)
        for beta in (0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
    },
    **{
        f"refreshed, beta {beta}": partial(run_refreshed, beta=beta, every=EVERY)
        for beta in (0.5, 1.0, 2.0)
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    made = {(row["run"], row["seed"]) for row in rows}
    todo = [(name, seed) for seed in args.seeds for name in args.only if (name, seed) not in made]
    for name, seed in tqdm(todo):
        found = RUNS[name](seed)
        rows.append({"run": name, "seed": seed, **found})
        partial_file = args.out.with_suffix(".partial")
        text = json.dumps(rows, indent=1, ensure_ascii=False)
        partial_file.write_text(text + "\n")
        os.replace(partial_file, args.out)


if __name__ == "__main__":
    main()
