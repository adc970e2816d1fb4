"""Each estimator of the KL as GRPO's penalty: how far does the policy end from the reference?

`python -m chapters.experiments.ch4_kl_scan` trains every estimator with every coefficient, one and
four updates a rollout, on the sentiment of reviews, and writes chapters/results/ch4_kl_scan.json.
`--lost-flag` makes the scan of the chapter's debugging story instead, in ch4_kl_lost_flag.json: the
runs are labelled k1 to k4, but the label does not reach the trainer, and all of them use k1.

Runs that the result has already are not made again; so an interrupted scan goes on.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from tqdm import tqdm

from solutions.ch2_ppo import reward_fn_sentiment
from solutions.ch4_kl import KINDS, KlArgs, KlTrainer
from utils.course.evaluation import evaluate_reviews
from utils.models.corpus import review_prompts

RESULTS = Path(__file__).parents[1] / "results"
BETAS = (0.03, 0.1, 0.3, 1.0)
UPDATES = (1, 4)


def make_args(kind: str, beta: float, updates: int, seed: int, phases: int, folder: str) -> KlArgs:
    return KlArgs(
        seed=seed,
        reward_fn=reward_fn_sentiment,
        prompts=review_prompts()[0],
        gen_len=16,
        batch_size=64,
        num_minibatches=1,
        batches_per_learning_phase=updates,
        base_lr=2e-3,
        warmup_steps=0,
        final_scale=1.0,
        ent_coef=0.0,
        kl_coef=beta,
        kl_estimator=kind,
        total_phases=phases,
        samples_every=0,
        checkpoint_every=0,
        runs_dir=folder,
        device="cpu",
    )


def run(label: str, kind: str, beta: float, updates: int, seed: int, phases: int) -> dict:
    """Train once; reward and exact KL, in nats per token, on 15 held-out prompts, 8 samples each.

    Also the reward and the logged estimate of each phase.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = KlTrainer(make_args(kind, beta, updates, seed, phases, folder))
        trainer.train()
    after = evaluate_reviews(trainer.model, review_prompts()[1], reward_fn_sentiment, 8, 16, seed)
    by_phase = {
        key: [round(row[key], 5) for row in trainer.history if key in row]
        for key in ("reward", "kl_term")
    }
    after = {key: round(after[key], 5) for key in ("reward", "kl", "nll", "distinct_bigrams")}
    setting = {"label": label, "beta": beta, "updates": updates, "seed": seed}
    return setting | {"after": after} | by_phase


def get_jobs(lost_flag: bool, seeds: int) -> list[tuple[str, str, float, int, int]]:
    """(label, estimator used, beta, updates, seed). At beta 0 there is one run for all labels."""
    if lost_flag:  # one run a point, each label with a seed of its own
        return [
            (label, "k1", beta, 4, seeds + 1 + n)
            for n, label in enumerate(KINDS)
            for beta in (0.0, *BETAS)
        ]
    return [
        (label, kind, beta, updates, seed)
        for updates in UPDATES
        for seed in range(1, seeds + 1)
        for label, kind, betas in [("none", "k1", (0.0,)), *((k, k, BETAS) for k in KINDS)]
        for beta in betas
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--phases", type=int, default=16)
    parser.add_argument("--lost-flag", action="store_true", help="the debugging story's scan")
    parser.add_argument("--out", type=Path, help="default: in chapters/results")
    args = parser.parse_args()
    name = "ch4_kl_lost_flag.json" if args.lost_flag else "ch4_kl_scan.json"
    out = args.out or RESULTS / name
    torch.set_num_threads(1)  # the model is small: more threads are no faster
    runs = json.loads(out.read_text()) if out.exists() else []
    done = {(run["label"], run["beta"], run["updates"], run["seed"]) for run in runs}
    jobs = [job for job in get_jobs(args.lost_flag, args.seeds) if (job[0], *job[2:]) not in done]
    out.parent.mkdir(exist_ok=True)
    for job in tqdm(jobs, unit="run"):
        runs.append(run(*job, args.phases))
        lines = ",\n".join(" " + json.dumps(run) for run in runs)
        out.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
