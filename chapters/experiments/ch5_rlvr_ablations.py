"""GRPO's descendants, one change at a time, at equal budget on additions with a carry.

`python -m chapters.experiments.ch5_rlvr_ablations` trains every setting with the same seeds and
writes chapters/results/ch5_rlvr_ablations.json. The learning rate is the one that chapter 3's
comparison of baselines chose, with as many completions and updates. A run ends when it has sampled
`--groups` groups of 8 completions, whatever it used them for; its area under the curve is the mean
reward of all that it sampled.

Runs that the result has already are not made again; so an interrupted script goes on.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

from solutions.ch5_rlvr import RlvrArgs, RlvrTrainer, reward_fn_correct
from utils.course.evaluation import sample_prompts
from utils.models.corpus import Pair, addition_prompt, held_out_pairs, training_pairs
from utils.models.loading import ALL_LINEAR_SITES
from utils.rewards import is_worked

RESULT = Path(__file__).parents[1] / "results" / "ch5_rlvr_ablations.json"
# name: what differs from GRPO with two updates a rollout
SETTINGS = {
    "GRPO": {},
    "token mean": {"loss_mode": "token"},
    "constant length": {"loss_mode": "constant"},
    "no division by the std": {"advantage_scale": "none"},
    "Dr. GRPO: both of these": {"loss_mode": "constant", "advantage_scale": "none"},
    "upper clip 0.28": {"clip_coef_high": 0.28},
    "leave-one-out": {"advantage_kind": "leave_one_out"},
    "sequence ratio, clips of 3e-4 and 4e-4": {
        "ratio_level": "sequence",
        "clip_coef": 3e-4,
        "clip_coef_high": 4e-4,
    },
    "sequence ratio, clip of 0.2": {"ratio_level": "sequence"},
    "dynamic sampling": {"dynamic_sampling": True},
    "one update": {"batches_per_learning_phase": 1},
    "four updates": {"batches_per_learning_phase": 4},
    "four updates, no clip": {
        "batches_per_learning_phase": 4,
        "clip_coef": 1.0,  # of ratios, which are positive
        "clip_coef_high": 1e6,
    },
}
KEYS = ("reward", "prompts_sampled", "informative_frac", "completion_len", "clip_frac", "entropy")


def carries(pair: Pair) -> bool:
    return pair[0] % 10 + pair[1] % 10 >= 10


def make_setup(pairs: list[Pair], seed: int, phases: int, folder: str, **overrides) -> dict:
    """Arguments of a trainer on `pairs`: 64 completions of 8 prompts a rollout, no KL term."""
    return {
        "seed": seed,
        "prompts": [addition_prompt(a, b) for a, b in pairs],
        "columns": {"answers": [str(a + b) for a, b in pairs]},
        "reward_fn": reward_fn_correct,
        "gen_len": 40,
        "lora_sites": ALL_LINEAR_SITES,
        "lora_rank": 8,
        "total_phases": phases,
        "batch_size": 64,
        "num_minibatches": 1,
        "batches_per_learning_phase": 2,
        "base_lr": 3e-3,
        "warmup_steps": 0,
        "final_scale": 1.0,
        "ent_coef": 0.0,
        "kl_coef": 0.0,
        "samples_every": 0,
        "checkpoint_every": 0,
        "runs_dir": folder,
        "device": "cpu",
        **overrides,
    }


class RecordedReward:
    """`reward_fn_correct`; keeps for each rollout what the plots are drawn from."""

    def __init__(self):
        self.by_rollout: list[dict[str, float | None]] = []

    def __call__(self, samples: list[str], answers: list[str]) -> torch.Tensor:
        rewards = reward_fn_correct(samples, answers)
        worked = [is_worked(text) for text in samples]
        lengths = torch.tensor([float(len(text)) for text in samples])
        by_outcome = {
            name: lengths[rewards == value].mean().item() if (rewards == value).any() else None
            for name, value in (("chars_right", 1.0), ("chars_wrong", 0.0))
        }
        self.by_rollout.append({"worked": sum(worked) / len(worked), **by_outcome})
        return rewards


def measure(model, pairs: list[Pair], n_samples: int, seed: int) -> list[list[str]]:
    """`n_samples` completions of each pair."""
    prompts = [addition_prompt(a, b) for a, b in pairs]
    batches = sample_prompts(model, prompts * n_samples, gen_len=40, seed=seed)
    texts = [text for batch in batches for text in batch.texts]
    return [texts[i :: len(pairs)] for i in range(len(pairs))]


def run(setting: str, seed: int, groups: int, folder: str) -> dict:
    """Train until `groups` groups were sampled; accuracy on held-out pairs with a carry."""
    pairs = [pair for pair in training_pairs() if carries(pair)]
    reward = RecordedReward()
    setup = make_setup(pairs, seed, groups // 8, folder, reward_fn=reward, base_lr=1e-3)
    trainer = RlvrTrainer(RlvrArgs(**setup | SETTINGS[setting]))
    rows, sampled = [], 0
    while sampled < groups:
        trainer.metrics.clear()
        trainer.learning_phase(trainer.rollout_phase())
        row = {key: trainer.metrics[key] for key in KEYS}
        rows.append({key: sum(values) / len(values) for key, values in row.items()})
        sampled += rows[-1]["prompts_sampled"]
    # A phase that samples more than the budget has left counts with what was left.
    weights = torch.tensor([row["prompts_sampled"] for row in rows])
    weights[-1] -= sampled - groups
    rewards = torch.tensor([row["reward"] for row in rows])
    held_out = [pair for pair in held_out_pairs() if carries(pair)][:100]
    completions = measure(trainer.model, held_out, 2, seed)
    right = [
        reward_fn_correct(texts, [a + b] * len(texts)).mean().item()
        for (a, b), texts in zip(held_out, completions, strict=True)
    ]
    found = {
        "area": round(((weights * rewards).sum() / groups).item(), 5),
        "held_out": round(sum(right) / len(right), 5),
    }
    found |= {key: [round(row[key], 4) for row in rows] for key in KEYS}
    for key in ("worked", "chars_right", "chars_wrong"):
        values = [rollout[key] for rollout in reward.by_rollout]
        found[key] = [None if x is None else round(x, 3) for x in values]
    return {"setting": setting, "seed": seed, **found}


def go_on(out: Path, jobs: list[tuple], name_job, make) -> None:
    """Make the runs that `out` does not have, and write it after each."""
    torch.set_num_threads(1)  # the model is small: more threads are hardly faster
    runs = json.loads(out.read_text()) if out.exists() else []
    done = {name_job(run) for run in runs}
    out.parent.mkdir(exist_ok=True)
    for job in tqdm([job for job in jobs if job not in done], unit="run"):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(make(*job, folder))
        lines = ",\n".join(" " + json.dumps(run) for run in runs)
        out.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=96, help="12 rollouts of 8")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    jobs = [(setting, seed) for seed in range(1, args.seeds + 1) for setting in SETTINGS]
    go_on(
        args.out,
        jobs,
        lambda run: (run["setting"], run["seed"]),
        lambda setting, seed, folder: run(setting, seed, args.groups, folder),
    )


if __name__ == "__main__":
    main()
