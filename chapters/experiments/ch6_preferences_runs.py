"""Every method of chapter 6 on the same preferences, measured by the true reward.

`python -m chapters.experiments.ch6_preferences_runs` writes
chapters/results/ch6_preferences_runs.json: for each seed 1,000 pairs of the base model's reviews
with the choices of a simulated person, a reward model of them, and what each method makes of the
two. Every point is measured on 15 beginnings of reviews that nothing is trained on, with 540
completions. Where a phase is chosen, it is chosen on others: 270 completions of the 45 beginnings
that are trained on.

Runs that the result has already are not made again; so an interrupted script goes on.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import RLHFArgs, RLHFTrainer
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch6_preferences import (
    PickedGrpoArgs,
    PickedGrpoTrainer,
    RewardModel,
    calc_best_of_n_kl,
    calc_preference_accuracy,
    calc_preference_loss,
    make_preferences,
    make_reward_fn,
    measure_implicit_accuracy,
    rejection_sample,
    reward_fn_true,
    sample_texts,
    score_pairs,
    train_dpo,
    train_reward_model,
    train_sft,
)
from utils.course.evaluation import measure_kl, sample_prompts
from utils.models.corpus import review_prompts
from utils.preferences import Preferences

RESULT = Path(__file__).parents[1] / "results" / "ch6_preferences_runs.json"
TRAIN, HELD = review_prompts()
N_PAIRS, GEN_LEN, PHASES, EVERY = 1000, 40, 30, 3
PER_HELD, PER_TRAIN = 36, 6  # completions of each beginning: 540 and 270
POOL, KEPT = 64, 8  # of each beginning, for supervised fine-tuning
BEST_OF = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Setting:
    """What the runs of one seed share."""

    seed: int
    pairs: Preferences
    held_pairs: Preferences
    reward_model: RewardModel
    rm_fn: Callable
    ceiling: float

    def score(self, texts: list[str], prompts: list[str], rows: int = 256) -> torch.Tensor:
        """Score by the reward model, some rows at a time."""
        starts = range(0, len(texts), rows)
        parts = [self.rm_fn(texts[i : i + rows], prompts[i : i + rows]) for i in starts]
        return torch.cat(parts)

    def new_policy(self) -> TransformerWithLora:
        torch.manual_seed(self.seed)
        return TransformerWithLora.from_pretrained("embedded", device="cpu")


def prepare(seed: int) -> Setting:
    """Sample and label the pairs, and fit the reward model."""
    torch.manual_seed(seed)
    base = TransformerWithLora.from_pretrained("embedded", device="cpu")
    pairs, _ = make_preferences(base, TRAIN, N_PAIRS, gen_len=GEN_LEN, seed=seed)
    held_pairs, ceiling = make_preferences(base, HELD, N_PAIRS, gen_len=GEN_LEN, seed=seed + 1000)
    reward_model = RewardModel.from_pretrained("embedded", device="cpu")
    train_reward_model(reward_model, pairs, seed=seed)
    reward_model.requires_grad_(False)
    return Setting(seed, pairs, held_pairs, reward_model, make_reward_fn(reward_model), ceiling)


def measure(model, setting: Setting, prompts: list[str] = HELD, per_prompt: int = PER_HELD) -> dict:
    """Measure a policy: true reward and the reward model's, KL in nats per completion."""
    many = prompts * per_prompt
    batches = sample_prompts(model, many, GEN_LEN, seed=77, rows=270)
    texts = [text for batch in batches for text in batch.texts]
    lengths = torch.cat([batch.completion_mask.sum(-1) for batch in batches]).float()
    return {
        "true": reward_fn_true(texts).mean().item(),
        "rm": setting.score(texts, many).mean().item(),
        "kl": measure_kl(model, batches) * lengths.mean().item(),
        "length": lengths.mean().item(),
    }


def finish(model, setting: Setting, tokens: int) -> dict:
    """Measure a policy in the end: with its accuracy on held-out pairs, and samples."""
    accuracy = measure_implicit_accuracy(model, setting.held_pairs)
    texts = sample_texts(model, HELD[:4], GEN_LEN, torch.Generator().manual_seed(5))
    return measure(model, setting) | {
        "accuracy": accuracy,
        "tokens": tokens,
        "samples": [list(pair) for pair in zip(HELD[:4], texts, strict=True)],
    }


def count_tokens(texts: list[str], model) -> int:
    """Count the tokens of completions, each with its eos."""
    encoded = model.tokenizer(texts, add_special_tokens=False)["input_ids"]
    return sum(len(ids) + 1 for ids in encoded)


# --- The runs -----------------------------------------------------------------------------------


def run_base(setting: Setting) -> dict:
    return finish(setting.new_policy(), setting, 0)


def run_reward_model(setting: Setting) -> dict:
    chosen, rejected = score_pairs(setting.reward_model, setting.held_pairs)
    texts = [*setting.held_pairs.chosen, *setting.held_pairs.rejected]
    true = reward_fn_true(texts)
    both = torch.stack([torch.cat([chosen, rejected]), true])
    return {
        "accuracy": calc_preference_accuracy(chosen, rejected),
        "true_accuracy": calc_preference_accuracy(*true.chunk(2)),
        "ceiling": setting.ceiling,
        "loss": calc_preference_loss(chosen, rejected).item(),
        "correlation": both.corrcoef()[0, 1].item(),
    }


def run_dpo(setting: Setting, beta: float) -> dict:
    model = setting.new_policy()
    history = train_dpo(model, setting.pairs, beta, seed=setting.seed)
    texts = [*setting.pairs.chosen, *setting.pairs.rejected]
    row = finish(model, setting, count_tokens(texts, model))
    keys = ("chosen", "rejected", "margin", "accuracy")
    return row | {"steps": {key: [step[key] for step in history] for key in keys}}


def run_dpo_again(setting: Setting, beta: float) -> dict:
    """DPO, then DPO on new pairs of that policy which the reward model labels.

    The reference of both is the base model.
    """
    model = setting.new_policy()
    train_dpo(model, setting.pairs, beta, seed=setting.seed)
    picked = torch.Generator().manual_seed(setting.seed)
    prompts = [TRAIN[i] for i in torch.randint(len(TRAIN), (N_PAIRS,), generator=picked).tolist()]
    twice = [prompt for prompt in prompts for _ in range(2)]
    texts = sample_texts(model, twice, GEN_LEN, picked)
    rewards = setting.score(texts, twice)
    first_wins = (rewards[::2] > rewards[1::2]).tolist()
    rows = list(zip(first_wins, texts[::2], texts[1::2], strict=True))
    chosen = [a if wins else b for wins, a, b in rows]
    rejected = [b if wins else a for wins, a, b in rows]
    train_dpo(model, Preferences(prompts, chosen, rejected), beta, seed=setting.seed)
    both = [*texts, *setting.pairs.chosen, *setting.pairs.rejected]
    return finish(model, setting, count_tokens(both, model))


def make_trainer(
    setting: Setting,
    folder: str | Path,
    kind: str,
    beta: float,
    lr: float = 3e-3,
    reward_fn: Callable | None = None,
    phases: int = PHASES,
    **options: Any,
) -> RLHFTrainer:
    """Return a trainer of GRPO or PPO, against the reward model unless a reward is given."""
    trainer_class, args_class, extra = {
        "GRPO": (GrpoTrainer, GrpoArgs, {"kl_kind": "exact"}),
        "PPO": (RLHFTrainer, RLHFArgs, {}),
        "picked": (PickedGrpoTrainer, PickedGrpoArgs, {"kl_kind": "exact"}),
    }[kind]
    args = args_class(
        seed=setting.seed,
        prompts=TRAIN,
        reward_fn=reward_fn or setting.rm_fn,
        total_phases=phases,
        batch_size=64,
        gen_len=GEN_LEN,
        num_minibatches=1,
        batches_per_learning_phase=1,
        base_lr=lr,
        warmup_steps=5,
        final_scale=1.0,
        ent_coef=0.0,
        kl_coef=beta,
        samples_every=0,
        checkpoint_every=0,
        runs_dir=str(folder),
        device="cpu",
        **extra | options,
    )
    return trainer_class(args)


def run_rl(setting: Setting, phases: int = PHASES, **options: Any) -> dict:
    """Train as `make_trainer` says; a point every third phase."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(setting, folder, phases=phases, **options)
        args = trainer.args
        curve, tokens = [], 0.0
        for phase in range(phases + 1):
            if phase % EVERY == 0:
                point = {"phase": phase, "tokens": round(tokens)}
                point |= measure(trainer.model, setting)
                other = measure(trainer.model, setting, TRAIN, PER_TRAIN)
                point |= {f"train_{key}": other[key] for key in ("true", "rm")}
                if phase % (2 * EVERY) == 0:
                    held_pairs = setting.held_pairs
                    point["accuracy"] = measure_implicit_accuracy(trainer.model, held_pairs)
                curve.append(point)
            if phase < phases:
                trainer.metrics.clear()
                trainer.learning_phase(trainer.rollout_phase())
                per_prompt = getattr(args, "pool_size", 0) or getattr(args, "group_size", 1)
                n = args.batch_size // getattr(args, "group_size", 1) * per_prompt
                tokens += trainer.metrics["completion_len"][0] * n
        return finish(trainer.model, setting, round(tokens)) | {"curve": curve}


def run_best_of_n(setting: Setting) -> dict:
    """The best of n by the reward model: the mean over all n of 128 completions of a prompt."""
    n_samples = 128
    many = [prompt for prompt in HELD for _ in range(n_samples)]
    texts = sample_texts(setting.new_policy(), many, GEN_LEN, torch.Generator().manual_seed(9))
    rm = setting.score(texts, many).view(len(HELD), n_samples)
    true = reward_fn_true(texts).view(len(HELD), n_samples)
    order, true_order = rm.argsort(-1), true.argsort(-1)
    tokens = count_tokens(texts, setting.reward_model) / len(texts)
    curve = []
    for n in BEST_OF:
        # The i-th lowest of all is the best of n in comb(i, n - 1) of the choices of n.
        share = torch.tensor([comb(i, n - 1) / comb(n_samples, n) for i in range(n_samples)])
        curve.append(
            {
                "n": n,
                "kl": calc_best_of_n_kl(n),
                "true": (true.gather(1, order) @ share).mean().item(),
                "rm": (rm.gather(1, order) @ share).mean().item(),
                "true_by_truth": (true.gather(1, true_order) @ share).mean().item(),
                "tokens_per_answer": tokens * n,
            }
        )
    return {"curve": curve}


def run_sft(setting: Setting, temperature: float | None) -> dict:
    """Fine-tuning on 8 of 64 completions of each beginning: the best, or picked by rejection."""
    model = setting.new_policy()
    many = [prompt for prompt in TRAIN for _ in range(POOL)]
    generator = torch.Generator().manual_seed(setting.seed)
    texts = sample_texts(model, many, GEN_LEN, generator)
    rewards = setting.score(texts, many)
    kept = []
    for start in range(0, len(many), POOL):
        pool = rewards[start : start + POOL]
        if temperature is None:
            picked = pool.argsort(descending=True)[:KEPT]
        else:
            picked = rejection_sample(pool, KEPT, temperature, generator)
        kept += (start + picked).tolist()
    picked_texts = [texts[i] for i in kept]
    train_sft(model, [many[i] for i in kept], picked_texts, seed=setting.seed)
    about = {"kept_true": reward_fn_true(picked_texts).mean().item()}
    return finish(model, setting, count_tokens(texts, model)) | about


RUNS: dict[str, Callable[[Setting], dict]] = {
    "base": run_base,
    "reward model": run_reward_model,
    **{f"DPO, beta {beta}": partial(run_dpo, beta=beta) for beta in (1.0, 0.5, 0.2, 0.1, 0.05)},
    "DPO twice, beta 0.5": partial(run_dpo_again, beta=0.5),
    **{
        f"{kind}, beta {beta}": partial(run_rl, kind=kind, beta=beta)
        for kind, betas in {"GRPO": (0.0, 0.1, 0.3), "PPO": (0.0, 0.3)}.items()
        for beta in betas
    },
    **{
        f"GRPO, beta {beta}, 60 phases": partial(run_rl, kind="GRPO", beta=beta, phases=2 * PHASES)
        for beta in (0.0, 0.3)
    },
    **{
        f"GRPO on the truth, beta {beta}": partial(
            run_rl, kind="GRPO", beta=beta, reward_fn=reward_fn_true
        )
        for beta in (0.3, 0.0)
    },
    "GRPO, beta 0.0, lr 1e-3": partial(run_rl, kind="GRPO", beta=0.0, lr=1e-3),
    "best of n": run_best_of_n,
    "SFT, top 8 of 64": partial(run_sft, temperature=None),
    "SFT, rejection, T 0.5": partial(run_sft, temperature=0.5),
    "SFT, rejection, T 2.0": partial(run_sft, temperature=2.0),
    **{
        f"picked GRPO, T {t}, {baseline}": partial(
            run_rl, kind="picked", beta=0.3, pick_temperature=t, baseline=baseline
        )
        for t, baseline in ((0.5, "kept"), (0.5, "pool"))
    },
}


def shorten(value: Any) -> Any:
    """Round every number in a result to five digits after the point."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: shorten(x) for key, x in value.items()}
    return [shorten(x) for x in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    made = {(row["run"], row["seed"]) for row in rows}
    for seed in args.seeds:
        todo = [name for name in args.only if (name, seed) not in made]
        if not todo:
            continue
        setting = prepare(seed)
        for name in tqdm(todo, desc=f"seed {seed}"):
            rows.append({"run": name, "seed": seed, **shorten(RUNS[name](setting))})
            partial_file = args.out.with_suffix(".partial")
            partial_file.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
            os.replace(partial_file, args.out)


if __name__ == "__main__":
    main()
