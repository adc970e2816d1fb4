"""Runs chapter 10's finished thing: a model learns which questions to send to a calculator."""

import functools
import tempfile

import torch
from tqdm import tqdm

from solutions.ch3_grpo import GrpoArgs
from solutions.ch10_tools import ToolTrainer, reward_fn_priced, run_calculator, sample_in_turns
from utils.course import shorten
from utils.models.questions import calculate, draw_questions, question_prompt, question_rows

PRICE = 0.4


def train_and_show() -> None:
    rows = question_rows()
    with tempfile.TemporaryDirectory() as folder:
        args = GrpoArgs(
            base_model="tools",
            seed=2,
            prompts=[row["prompt"] for row in rows],
            columns={"answers": [row["answers"] for row in rows]},
            reward_fn=functools.partial(reward_fn_priced, price=PRICE),
            environment=run_calculator,
            total_phases=24,
            gen_len=40,
            base_lr=2e-3,
            warmup_steps=3,
            kl_coef=0.0,
            ent_coef=0.0,
            advantage_scale="none",
            device="cpu",
            runs_dir=folder,
        )
        trainer = ToolTrainer(args)
        show_answers(trainer.model, "Before")
        for _ in tqdm(range(shorten(args.total_phases)), unit="phase"):
            trainer.learning_phase(trainer.rollout_phase())
            trainer.phase += 1
        show_answers(trainer.model, "After")


def show_answers(model, when: str) -> None:
    questions = draw_questions(256, "held_out", seed=5)  # it never saw any of them
    generator = torch.Generator().manual_seed(1)
    prompts = [question_prompt(question) for question in questions]
    turns = sample_in_turns(model, prompts, 1, run_calculator, generator=generator)
    rewards = reward_fn_priced(turns.texts, [str(calculate(question)) for question in questions])
    print(f"{when}: {rewards.mean():.0%} of {len(questions)} new questions right")
    answers = list(zip(questions, turns.texts, rewards, strict=True))
    for op, name in (("+", "sums"), ("*", "products")):
        chosen = [answer for answer in answers if op in answer[0]]
        called = sum(">" in text for _, text, _ in chosen) / len(chosen)
        print(f"  {name}, a call in {called:.0%}, for example")
        for question, text, reward in chosen[:3]:
            said = text.replace("\n", " / ")
            print(f"    {question + '?':<9} {said:<36} {'right' if reward else 'wrong'}")


if __name__ == "__main__":
    train_and_show()
