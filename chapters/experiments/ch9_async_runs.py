"""GRPO on additions with rollouts that are late, or from a sampler with other numbers.

`python -m chapters.experiments.ch9_async_runs` trains every setting with the same seeds and writes
chapters/results/ch9_async_runs.json: rewards and gauges by update, and the accuracy and the share
of worked answers on all held-out pairs afterwards. A run has 48 updates, one per rollout of 8
groups of 8, at a constant rate, without a KL term. It ends early when the rewards within each group
were equal in five rollouts in a row that it learned from: they give no gradient, and it is dead.

Runs that the result has already are not made again; so an interrupted script goes on.
"""

import argparse
from pathlib import Path

import torch

from chapters.experiments.ch5_rlvr_ablations import go_on, make_setup, measure
from solutions.ch3_grpo import calc_single_update_objective
from solutions.ch5_rlvr import calc_rlvr_objective
from solutions.ch9_async import (
    AsyncArgs,
    StaleTrainer,
    calc_importance_weights,
    measure_mismatch,
)
from utils.models.corpus import held_out_pairs, training_pairs
from utils.rewards import is_worked, reward_fn_addition

RESULT = Path(__file__).parents[1] / "results" / "ch9_async_runs.json"
CORRECTIONS = ("none", "clip", "truncate", "mask")
LATE = {"base_lr": 1e-3, "staleness": 8}
SETTINGS: dict[str, dict] = {
    "on-policy": {"base_lr": 1e-3},
    **{f"8 late, {c}": LATE | {"correction": c} for c in CORRECTIONS},
    "rate 0.001, 2 late": {"base_lr": 1e-3, "staleness": 2},
    "top-p 0.7": {"base_lr": 1e-3, "top_p": 0.7},
    "8 late, none, A > 0 alone": LATE | {"sign": 1},
    "8 late, none, A < 0 alone": LATE | {"sign": -1},
    "top-p 0.7, true log-probs, truncate": {
        "base_lr": 1e-3, "top_p": 0.7, "true_logprobs": True, "correction": "truncate",
    },
    **{f"rate {rate}, {k} late": {"base_lr": rate, "staleness": k} for rate, k in (
        (1e-2, 0), (3e-3, 0), (3e-3, 1), (3e-3, 2), (3e-3, 4), (1e-3, 4), (1e-3, 16),
        (3e-4, 0), (3e-4, 8), (3e-4, 16),
    )},
    **{f"rate 0.003, 8 late, {c}": {"base_lr": 3e-3, "staleness": 8, "correction": c}
       for c in CORRECTIONS},
    **{f"{bits} bits, {c}": {"base_lr": 3e-3, "sampler_bits": bits, "correction": c}
       for bits in (4, 3) for c in ("none", "truncate")},
    "top-p 0.7, rate 0.003": {"base_lr": 3e-3, "top_p": 0.7},
    "top-p 0.9, rate 0.003": {"base_lr": 3e-3, "top_p": 0.9},
    "8 late, weights of sequences": LATE | {"of_sequences": "product"},
    "8 late, weights of sequences, cap 10": LATE | {"of_sequences": "product", "cap": 10.0},
    "8 late, clip of sequences, 3e-4 and 4e-4": LATE | {
        "of_sequences": "mean", "clip_coef": 3e-4, "clip_coef_high": 4e-4,
    },
    "8 late, clip of sequences, 0.2": LATE | {"of_sequences": "mean"},
}  # fmt: skip
OWN = {"sign", "true_logprobs", "of_sequences"}  # of `Trainer`, not of its arguments
KEYS = ("reward", "worked", "k3", "max_ratio", "effective_share", "kept_mass")


class Trainer(StaleTrainer):
    """Count worked answers; keep advantages of one sign, put the kept mass into log-probs, or
    correct whole completions: weight them by the "product" of their ratios, up to the cap, or clip
    their geometric "mean" (GSPO)."""

    sign = 0
    true_logprobs = False
    of_sequences = ""

    def sample_and_score(self, n_prompts: int, group_size: int = 1):
        samples, scores = super().sample_and_score(n_prompts, group_size)
        self.metrics["worked"].append(sum(map(is_worked, samples.texts)) / len(samples.texts))
        if self.true_logprobs:
            samples.logprobs = samples.logprobs - samples.log_kept_mass
        return samples, scores

    def sample_rollout(self):
        memory = super().sample_rollout()
        if self.sign:
            memory.advantages.copy_((self.sign * memory.advantages).clamp(min=0) * self.sign)
        return memory

    def record_ratios(self, logprobs, minibatch):
        super().record_ratios(logprobs, minibatch)
        found = measure_mismatch(logprobs, minibatch.logprobs, minibatch.mask)
        for name, value in found.items():
            self.metrics[name].append(value)

    def compute_rlhf_objective(self, minibatch):
        if not self.of_sequences:
            return super().compute_rlhf_objective(minibatch)
        args, mask = self.args, minibatch.mask
        scored = self.score(minibatch.input_ids, minibatch.attention_mask, minibatch.prompt_len)
        pair = (scored.logprobs, minibatch.logprobs)
        self.record_ratios(scored.logprobs, minibatch)
        if self.of_sequences == "mean":
            clips = (args.clip_coef, args.clip_coef_high)
            return calc_rlvr_objective(*pair, minibatch.advantages, mask, *clips, "sequence")
        weights = calc_importance_weights(*pair, mask, args.cap, "sequence").amax(-1)
        return calc_single_update_objective(pair[0], minibatch.advantages * weights, mask)


def train(setting: dict, seed: int, updates: int, folder: str, pairs=None) -> tuple[Trainer, list]:
    """Train, and return the trainer with one row of metrics per update."""
    setting = dict(setting)
    own = {name: setting.pop(name) for name in OWN & setting.keys()}
    setup = make_setup(pairs or training_pairs(), seed, updates, folder)
    setup |= {"reward_fn": reward_fn_addition, "batches_per_learning_phase": 1}
    trainer = Trainer(AsyncArgs(**setup | setting))
    for name, value in own.items():
        setattr(trainer, name, value)
    rows, n_constant = [], 0
    for _ in range(updates):
        trainer.metrics.clear()
        memory = trainer.rollout_phase()
        trainer.learning_phase(memory)
        trainer.phase += 1
        # The last of what was sampled is the newest; what is learned from is `staleness` older.
        rows.append({key: trainer.metrics[key][-1] for key in KEYS if trainer.metrics[key]})
        n_constant = 0 if memory.advantages.any() else n_constant + 1
        if n_constant == 5:
            break
    return trainer, rows


def run(name: str, seed: int, updates: int, folder: str) -> dict:
    trainer, rows = train(SETTINGS[name], seed, updates, folder)
    pairs = held_out_pairs()
    completions = measure(trainer.model, pairs, 1, seed)
    texts = [text for (text,) in completions]
    right = reward_fn_addition(texts, [str(a + b) for a, b in pairs])
    found = {
        "accuracy": round(right.mean().item(), 4),
        "worked": round(sum(map(is_worked, texts)) / len(texts), 4),
        "updates": len(rows),
    }
    for key in KEYS:
        if key in rows[0]:
            found[key if key != "worked" else "worked_rollouts"] = [
                float(f"{row[key]:.4g}") for row in rows
            ]
    return {"setting": name, "seed": seed} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=48)
    parser.add_argument("--only", default="", help="settings whose name begins with this")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in SETTINGS if name.startswith(args.only)]
    jobs = [(name, seed) for name in names for seed in range(1, args.seeds + 1)]
    go_on(
        args.out,
        jobs,
        lambda run: (run["setting"], run["seed"]),
        lambda name, seed, folder: run(name, seed, args.updates, folder),
    )


if __name__ == "__main__":
    main()
