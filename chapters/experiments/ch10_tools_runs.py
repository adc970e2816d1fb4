"""GRPO with a calculator: prices, tools that lie or are off, and what goes wrong with a mask.

`python -m chapters.experiments.ch10_tools_runs` trains every setting with the same seeds and writes
chapters/results/ch10_tools_runs.json, and, first, what the base does to
chapters/results/ch10_tools_base.json. A run has 45 phases, unless its name says otherwise, of 16
groups of 8 completions and 8 updates, without a KL term. By phase it has the share of right answers
and of completions with a call; afterwards, on questions that neither the corpus nor the trainer
has, what is sampled (accuracy, calls, with the tool and with one that answers "=?" alone), and what
is measured exactly: the probabilities of `measure_exactly`, and that of the tool's words after a
call, by kind of question, and P(call) in three parts of each kind, by what the base knows.

Runs that the result has already are not made again; so an interrupted script goes on.
"""

import argparse
import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from chapters.experiments.ch5_rlvr_ablations import go_on
from solutions.ch0_sampling import masked_mean
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import ReplayMinibatch, calc_ratio
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch10_tools import (
    calc_call_value,
    calc_tool_objective,
    compare_within_kinds,
    measure_exactly,
    reward_fn_priced,
    run_calculator,
    sample_in_turns,
    score_parts,
)
from utils.models.questions import (
    KINDS,
    calculate,
    draw_questions,
    find_kind,
    question_prompt,
    question_rows,
)

RESULTS = Path(__file__).parents[1] / "results"
MISTAKES = ("trained on", "in the mean", "log-probs 0", "sequence ratio", "in the sequence ratio")
SETTINGS: dict[str, dict] = {
    "price 0": {"price": 0.0},
    "price 0.4": {"price": 0.4},
    "price 0.6": {"price": 0.6},
    "price 0.2": {"price": 0.2},
    "price 0.8": {"price": 0.8},
    "lies in 10%": {"price": 0.0, "lies": 0.1},
    "lies in 30%": {"price": 0.0, "lies": 0.3},
    **{f"price 0.4, {mistake}": {"price": 0.4, "mistake": mistake} for mistake in MISTAKES},
    "lies in 10%, price 0.2": {"price": 0.2, "lies": 0.1},
    "lies in 30%, price 0.2": {"price": 0.2, "lies": 0.3},
    "price 0.4, 180 phases": {"price": 0.4, "phases": 180},
    "1x2 products alone, price 0.6": {"price": 0.6, "phases": 180, "kind": "1x2 product"},
}  # fmt: skip


def make_liar(share: float, seed: int) -> Callable[[str], str]:
    """Return a calculator that gives a wrong result in this share of the calls that it
    understands."""
    rng = random.Random(seed)

    def lie(turn: str) -> str:
        said = run_calculator(turn)
        if said == "=?\n" or rng.random() >= share:
            return said
        wrong = int(said[1:]) + rng.choice((-20, -10, -2, -1, 1, 2, 10, 20))
        return f"={max(0, wrong)}\n"

    return lie


class Trainer(GrpoTrainer):
    """Count right answers and calls, and make one mistake with the environment's tokens."""

    mistake: str | None = None
    price = 0.0

    def sample_and_score(self, n_prompts: int, group_size: int = 1):
        samples, scores = super().sample_and_score(n_prompts, group_size)
        calls = torch.tensor([text.count(">") for text in samples.texts])
        self.metrics["right"].append((scores + self.price * calls).mean().item())
        self.metrics["called"].append((calls > 0).float().mean().item())
        return samples, scores

    def compute_rlhf_objective(self, minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
        if self.mistake is None:
            return super().compute_rlhf_objective(minibatch)
        ids, attention_mask = minibatch.input_ids, minibatch.attention_mask
        logprobs = self.score(ids, attention_mask, minibatch.prompt_len).logprobs
        self.record_ratios(logprobs, minibatch)
        return calc_mistaken_objective(self.mistake, logprobs, minibatch, self.args.clip_coef)


def calc_mistaken_objective(
    mistake: str,
    logprobs: Float[Tensor, "batch completion"],
    minibatch: ReplayMinibatch,
    clip_coef: float,
) -> Float[Tensor, ""]:
    """Return `calc_tool_objective` with one mistake; "sequence ratio" is none, but GSPO's."""
    own, old_logprobs, advantages = minibatch.mask, minibatch.logprobs, minibatch.advantages
    written = minibatch.attention_mask[:, minibatch.prompt_len :].bool()
    if mistake == "trained on":
        return calc_tool_objective(logprobs, old_logprobs, advantages, written, clip_coef)
    if mistake == "log-probs 0":  # as a sampler may give for what it did not draw
        old_logprobs = old_logprobs.masked_fill(~own, 0.0)
        return calc_tool_objective(logprobs, old_logprobs, advantages, written, clip_coef)
    if mistake == "in the mean":
        of_own = own.sum(-1) / written.sum(-1)
        return calc_tool_objective(logprobs, old_logprobs, advantages * of_own, own, clip_coef)
    counted = own if mistake == "sequence ratio" else written
    mean = masked_mean(logprobs - old_logprobs, counted, dim=-1)[:, None].expand_as(logprobs)
    ratio = calc_ratio(mean, torch.zeros_like(mean), own)
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    per_token = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    return masked_mean(per_token, own, dim=-1).mean()


def train(setting: dict, seed: int, folder: str, phases: int = 45) -> tuple[Trainer, list[dict]]:
    """Train, and return the trainer with one row of metrics per phase."""
    kind = setting.get("kind")
    rows = [r for r in question_rows() if kind in (None, find_kind(r["prompt"][3:-1]))]
    lies = setting.get("lies", 0.0)
    args = GrpoArgs(
        base_model="tools",
        seed=seed,
        prompts=[row["prompt"] for row in rows],
        columns={"answers": [row["answers"] for row in rows]},
        reward_fn=functools.partial(reward_fn_priced, price=setting["price"]),
        environment=make_liar(lies, seed) if lies else run_calculator,
        total_phases=setting.get("phases", phases),
        gen_len=40,
        base_lr=2e-3,
        warmup_steps=3,
        kl_coef=0.0,
        ent_coef=0.0,
        advantage_scale="none",
        device="cpu",
        runs_dir=folder,
    )
    trainer = Trainer(args)
    trainer.mistake, trainer.price = setting.get("mistake"), setting["price"]
    history = []
    for _ in range(args.total_phases):
        trainer.metrics.clear()
        trainer.learning_phase(trainer.rollout_phase())
        trainer.phase += 1
        history.append({k: sum(v) / len(v) for k, v in trainer.metrics.items()})
    return trainer, history


def measure_sampled(model: Any, tool: Callable[[str], str], seed: int = 0) -> dict[str, Any]:
    """Sample 2 completions for each of 256 held-out questions, drawn as the corpus draws them."""
    questions = draw_questions(256, "held_out", seed=7)
    prompts = [question_prompt(question) for question in questions]
    turns = sample_in_turns(model, prompts, 2, tool, generator=torch.Generator().manual_seed(seed))
    answers = [str(calculate(question)) for question in questions for _ in range(2)]
    right = reward_fn_priced(turns.texts, answers)
    called = torch.tensor([len(ends) > 0 for ends in turns.call_ends])
    n_answered = [text.count(">=") - text.count(">=?") for text in turns.texts]
    n_calls = sum(map(len, turns.call_ends))
    return {
        "accuracy": right.mean().item(),
        "called": called.float().mean().item(),
        "well_formed": sum(n_answered) / max(1, n_calls),
        "own_tokens": turns.own_mask.sum(-1).float().mean().item(),
        "right_if_called": masked_mean(right, called).item() if called.any() else None,
        "right_if_direct": masked_mean(right, ~called).item() if not called.all() else None,
        "finished": turns.finished.float().mean().item(),
    }


@functools.cache
def get_questions() -> list[str]:
    """Return at most 60 different held-out questions of each kind."""
    return [
        question
        for kind in KINDS
        for question in list(dict.fromkeys(draw_questions(120, "held_out", 8, kind)))[:60]
    ]


def measure_all(model: Any) -> dict[str, Float[Tensor, "question"]]:
    """Return what `measure_exactly` does, and the probability of the tool's words after a call."""
    questions = get_questions()
    called = [["<", f"{q}>", f"={calculate(q)}\n", f"A: {calculate(q)}"] for q in questions]
    with torch.no_grad():
        parts = score_parts(model, [question_prompt(q) for q in questions], called)
    found = measure_exactly(model, questions)
    return found | {"tool_words": parts[:, 2].exp(), "log_tool_words": parts[:, 2]}


def average(found: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Return the means by kind of question."""
    kinds = [find_kind(question) for question in get_questions()]
    return {
        kind: {
            name: values[[i for i, other in enumerate(kinds) if other == kind]].mean().item()
            for name, values in found.items()
        }
        for kind in KINDS
    }


def measure(model: Any, base: dict[str, list[float]], tool: Any) -> dict:
    """Return everything that is measured of a model."""
    found = measure_all(model)
    kinds = [find_kind(question) for question in get_questions()]
    p_right = torch.tensor(base["right_direct"])
    thirds = compare_within_kinds(p_right, found["call"], kinds)
    return {
        "sampled": measure_sampled(model, tool),
        "tool_off": measure_sampled(model, lambda _: "=?\n"),
        "kinds": average(found),
        "thirds": {kind: parts.tolist() for kind, parts in thirds.items()},
    }


def measure_base() -> dict:
    """Return what the base does, question by question as well, and the value of a call at price
    0."""
    model = TransformerWithLora.from_pretrained("tools", device="cpu")
    found = measure_all(model)
    questions = {name: found[name].tolist() for name in ("call", "right_direct")}
    kinds = [find_kind(question) for question in get_questions()]
    of_right = compare_within_kinds(found["right_direct"], found["right_direct"], kinds)
    natural = measure_exactly(model, draw_questions(1024, "held_out", seed=9))
    p_called = natural["exact_call"] * natural["copied"]
    value = calc_call_value(natural["right_direct"], p_called, 0.0).mean().item()
    return {
        "value": value,
        "natural": {name: values.mean().item() for name, values in natural.items()},
        "right_thirds": {kind: parts.tolist() for kind, parts in of_right.items()},
        **measure(model, questions, run_calculator),
        "questions": questions | {"question": get_questions()},
    }


def run(name: str, seed: int, phases: int, folder: str, base: dict) -> dict:
    setting = SETTINGS[name]
    trainer, history = train(setting, seed, folder, phases)
    tool = trainer.args.environment
    assert tool is not None
    found = {"phases": len(history)} | measure(trainer.model, base["questions"], tool)
    if setting.get("lies"):
        found["honest"] = measure_sampled(trainer.model, run_calculator)
    found |= {key: [row[key] for row in history] for key in ("right", "called", "clip_frac")}
    takes_off = (i for i, share in enumerate(found["called"], 1) if share > 0.5)
    found["take_off"] = next(takes_off, None)  # the first phase in which most call
    return {"setting": name, "seed": seed} | round_all(found)


def round_all(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: round_all(value) for key, value in found.items()}
    if isinstance(found, list):
        return [round_all(value) for value in found]
    return float(f"{found:.4g}") if isinstance(found, float) else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--phases", type=int, default=45)
    parser.add_argument("--only", default="", help="settings whose name begins with this")
    parser.add_argument("--out", type=Path, default=RESULTS / "ch10_tools_runs.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    base_path = args.out.with_name("ch10_tools_base.json")
    if not base_path.exists():
        base_path.parent.mkdir(exist_ok=True)
        base_path.write_text(json.dumps(round_all(measure_base()), indent=1) + "\n")
    base = json.loads(base_path.read_text())
    names = [name for name in SETTINGS if name.startswith(args.only)]
    jobs = [(name, seed) for name in names for seed in range(1, args.seeds + 1)]
    go_on(
        args.out,
        jobs,
        lambda run: (run["setting"], run["seed"]),
        lambda name, seed, folder: run(name, seed, args.phases, folder, base),
    )


if __name__ == "__main__":
    main()
