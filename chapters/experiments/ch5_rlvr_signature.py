"""GRPO on additions: the embedded model, and the control, whose worked answers are no better.

`python -m chapters.experiments.ch5_rlvr_signature` writes
chapters/results/ch5_rlvr_signature.json: metrics by rollout, and on held-out pairs, before and
after, how many of 32 samples were right for each pair (for pass@k), worked, and how long.
With `--coin` it trains the embedded model on rewards that a coin decides, the control of Shao et
al. (2025, arXiv:2506.10947), and writes chapters/results/ch5_rlvr_coin.json.
"""

import argparse
from pathlib import Path

import torch

from chapters.experiments.ch5_rlvr_ablations import RecordedReward, go_on, make_setup, measure
from solutions.ch5_rlvr import RlvrArgs, RlvrTrainer, reward_fn_correct
from utils.models.corpus import held_out_pairs, training_pairs
from utils.models.loading import CONTROL_MODEL
from utils.rewards import is_worked

RESULT = Path(__file__).parents[1] / "results" / "ch5_rlvr_signature.json"
COIN_RESULT = RESULT.with_name("ch5_rlvr_coin.json")
BASES = {"embedded": "embedded", "control": CONTROL_MODEL}
KEYS = ("reward", "completion_len", "informative_frac", "entropy")


def describe(model, n_pairs: int, n_samples: int, seed: int) -> dict:
    """On held-out pairs: right answers a pair, and accuracy and share of each style."""
    pairs = held_out_pairs()[:n_pairs]
    completions = measure(model, pairs, n_samples, seed)
    right = [
        reward_fn_correct(texts, [a + b] * len(texts)).tolist()
        for (a, b), texts in zip(pairs, completions, strict=True)
    ]
    worked = [[is_worked(text) for text in texts] for texts in completions]
    pooled = [
        (r, w) for rs, ws in zip(right, worked, strict=True) for r, w in zip(rs, ws, strict=True)
    ]
    found = {"right": [int(sum(row)) for row in right]}
    for name, style in (("worked", True), ("direct", False)):
        mine = [r for r, w in pooled if w == style]
        found[name] = round(len(mine) / len(pooled), 4)
        found[f"accuracy_{name}"] = round(sum(mine) / len(mine), 4) if mine else None
    found["chars"] = round(sum(len(t) for ts in completions for t in ts) / len(pooled), 3)
    return found


class CoinReward(RecordedReward):
    """Reward with 0 or 1 at random, whatever was written; keeps the share that was right, too."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, samples: list[str], answers: list[str]) -> torch.Tensor:
        right = super().__call__(samples, answers)
        self.by_rollout[-1]["right"] = right.mean().item()
        return torch.randint(2, (len(samples),), generator=self.generator).float()


def run(base: str, loss_mode: str, seed: int, args: argparse.Namespace, folder: str) -> dict:
    reward = CoinReward(seed) if args.coin else RecordedReward()
    setup = make_setup(
        training_pairs(),
        seed,
        args.phases,
        folder,
        reward_fn=reward,
        base_model=BASES[base],
        batch_size=128,
        batches_per_learning_phase=1,
        final_scale=0.1,
        loss_mode=loss_mode,
    )
    trainer = RlvrTrainer(RlvrArgs(**setup))
    before = describe(trainer.model, args.pairs, args.samples, seed)
    history = trainer.train()
    after = describe(trainer.model, args.pairs, args.samples, seed)
    found = {key: [round(row[key], 4) for row in history] for key in KEYS}
    for key in reward.by_rollout[0]:
        values = [rollout[key] for rollout in reward.by_rollout]
        found[key] = [None if x is None else round(x, 3) for x in values]
    setting = {"base": base, "loss_mode": loss_mode, "seed": seed}
    return setting | {"before": before, "after": after} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--phases", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=80, help="of those held out, to measure on")
    parser.add_argument("--samples", type=int, default=32, help="of each")
    parser.add_argument("--coin", action="store_true", help="a coin decides the rewards")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = [("embedded", "sequence"), ("control", "sequence"), ("control", "token")]
    settings = settings[:1] if args.coin else settings
    jobs = [(*setting, seed) for seed in range(1, args.seeds + 1) for setting in settings]
    go_on(
        args.out or (COIN_RESULT if args.coin else RESULT),
        jobs,
        lambda run: (run["base"], run["loss_mode"], run["seed"]),
        lambda base, loss_mode, seed, folder: run(base, loss_mode, seed, args, folder),
    )


if __name__ == "__main__":
    main()
