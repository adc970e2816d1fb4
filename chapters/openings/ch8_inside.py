"""Runs chapter 8's finished thing: one vector makes the untrained model show its work."""

import tempfile
from pathlib import Path

import torch

from solutions.ch0_sampling import encode_prompts, sample_completions
from solutions.ch8_inside import find_direction, steer
from utils.course import shorten
from utils.course.demo import make_grpo_trainer
from utils.models.corpus import addition_prompt, held_out_pairs, training_pairs
from utils.rewards import is_worked, reward_fn_addition

PLACE = "blocks.3.hook_out"  # the output of the last block
SEED = 0
PAIRS = held_out_pairs()[:100]
SHOWN = [(a, b) for a, b in PAIRS if a % 10 + b % 10 > 9][:4]  # with a carry: the harder ones


def show_answers(model, when: str) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [addition_prompt(a, b) for a, b in PAIRS]
    texts = sample_completions(model, prompts, 40, generator=generator).texts
    n_worked = sum(map(is_worked, texts))
    n_right = int(reward_fn_addition(texts, [str(a + b) for a, b in PAIRS]).sum())
    print(f"{when}: of {len(texts)} answers {n_worked} show their work, {n_right} are right")
    prompts = [addition_prompt(a, b) for a, b in SHOWN]
    likeliest = sample_completions(model, prompts, 40, temperature=0).texts
    right = reward_fn_addition(likeliest, [str(a + b) for a, b in SHOWN]).tolist()
    for (a, b), text, is_right in zip(SHOWN, likeliest, right, strict=True):
        print(f"  {a} + {b}  {text.strip().replace(chr(10), ' | ')}{'' if is_right else '  WRONG'}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = {"samples_every": 0, "checkpoint_every": 0, "device": "cpu", "final_scale": 1.0}
        trainer = make_grpo_trainer(Path(folder), SEED, total_phases=shorten(12), **options)
        trainer.train()
    policy = trainer.model.requires_grad_(False)
    practice = [addition_prompt(a, b) for a, b in training_pairs()[:100]]
    ids, mask = encode_prompts(policy, practice, 40, prepend_bos=True)
    vector = find_direction(policy, ids, PLACE, mask)
    other = torch.randn(vector.shape, generator=torch.Generator().manual_seed(0))
    with policy.reference():
        show_answers(policy, "The base model")
    with steer(policy, PLACE, other / other.norm() * vector.norm()):
        show_answers(policy, "\nThe base model + a random vector of the same size")
    with steer(policy, PLACE, vector):
        show_answers(policy, "\nThe base model + the vector")


if __name__ == "__main__":
    main()
