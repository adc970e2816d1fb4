"""On-policy distillation on additions, against the reward, and against a teacher's own samples.

`python -m chapters.experiments.ch9_async_distil` trains students, all with updates on 64
completions at temperature 1 and a constant rate of 1e-3, and writes
chapters/results/ch9_async_distil.json: the accuracy on all held-out pairs by the number of
completions that the student has learned from.

- "reward": chapter 3's objective, on time, with 8 completions for each of 8 prompts. The other
  three have 64 prompts.
- "KL as reward": the student samples; the advantage of a token is log teacher - log student.
- "KL as loss": the student samples; the loss is the exact KL(student ‖ teacher) at each token.
- "teacher's samples": the teacher samples; the loss is the cross-entropy of its tokens.

Each seed has a teacher of its own: the base, trained with the reward for as many updates, at a rate
that falls from 1e-3 to 0. Whoever has a teacher gets half as many updates. Runs that the result has
already are not made again.
"""

import argparse
import functools
import tempfile
from pathlib import Path

import torch

from chapters.experiments.ch5_rlvr_ablations import go_on, make_setup, measure
from solutions.ch0_sampling import masked_mean, select_completion
from solutions.ch2_ppo import calc_kl_penalty
from solutions.ch9_async import AsyncArgs, StaleTrainer
from utils.models.corpus import held_out_pairs, training_pairs
from utils.rewards import is_worked, reward_fn_addition

RESULT = Path(__file__).parents[1] / "results" / "ch9_async_distil.json"
KINDS = ("reward", "KL as reward", "KL as loss", "teacher's samples")
RATE = 1e-3
UPDATES = 48
EVERY = 2  # updates from one evaluation to the next


def make_trainer(seed: int, updates: int, folder: str, **setting) -> StaleTrainer:
    setup = make_setup(training_pairs(), seed, updates, folder, base_lr=RATE)
    setup |= {"reward_fn": reward_fn_addition, "batches_per_learning_phase": 1}
    return StaleTrainer(AsyncArgs(**setup | setting))


def evaluate(trainer: StaleTrainer, seed: int) -> dict[str, float]:
    pairs = held_out_pairs()
    texts = [text for (text,) in measure(trainer.model, pairs, 1, seed)]
    right = reward_fn_addition(texts, [str(a + b) for a, b in pairs]).mean().item()
    worked = sum(map(is_worked, texts)) / len(texts)
    return {"accuracy": round(right, 4), "worked": round(worked, 4)}


@functools.cache
def train_teacher(seed: int, updates: int) -> tuple[StaleTrainer, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        teacher = make_trainer(100 + seed, updates, folder, final_scale=0.0)
        for _ in range(updates):
            teacher.learning_phase(teacher.rollout_phase())
            teacher.phase += 1
    return teacher, evaluate(teacher, seed)


def calc_objective(kind: str, student: StaleTrainer, teacher: StaleTrainer) -> torch.Tensor:
    """Sample from the student or the teacher, and return the objective of these samples."""
    sampler = teacher if kind == "teacher's samples" else student
    samples, _ = sampler.sample_and_score(student.args.batch_size)
    ids, attention_mask, prompt_len = samples.input_ids, samples.attention_mask, samples.prompt_len
    mask = samples.completion_mask
    if kind == "KL as loss":
        with torch.no_grad():
            wanted = select_completion(teacher.model(ids, attention_mask), prompt_len)
        logits = select_completion(student.model(ids, attention_mask), prompt_len)
        return -calc_kl_penalty(logits, wanted, mask, 1.0)
    logprobs = student.score(ids, attention_mask, prompt_len).logprobs
    if kind == "teacher's samples":
        return masked_mean(logprobs, mask)
    with torch.no_grad():
        advantages = teacher.score(ids, attention_mask, prompt_len).logprobs - logprobs
    return masked_mean(torch.exp(logprobs - logprobs.detach()) * advantages, mask)


def update(kind: str, student: StaleTrainer, teacher: StaleTrainer) -> None:
    if kind == "reward":
        student.learning_phase(student.rollout_phase())
    else:
        student.optimizer.zero_grad()
        calc_objective(kind, student, teacher).backward()
        norm = student.args.max_grad_norm
        torch.nn.utils.clip_grad_norm_(student.model.trainable_parameters(), norm)
        student.optimizer.step()
    student.phase += 1


def run(kind: str, seed: int, updates: int, folder: str) -> dict:
    teacher, of_teacher = train_teacher(seed, updates)
    updates = updates if kind == "reward" else updates // 2
    student = make_trainer(seed, updates, folder)
    teacher.generator = student.generator  # so that no run depends on those before it
    samples, found = [], []
    for done in range(1, updates + 1):
        update(kind, student, teacher)
        if done % EVERY == 0 or done == updates:
            samples.append(done * student.args.batch_size)
            found.append(evaluate(student, seed))
    curves = {key: [row[key] for row in found] for key in ("accuracy", "worked")}
    return {"setting": kind, "seed": seed, "teacher": of_teacher, "samples": samples} | curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(1, args.seeds + 1)
    go_on(
        args.out,
        [(kind, seed) for seed in seeds for kind in KINDS],
        lambda run: (run["setting"], run["seed"]),
        lambda kind, seed, folder: run(kind, seed, args.updates, folder),
    )


if __name__ == "__main__":
    main()
