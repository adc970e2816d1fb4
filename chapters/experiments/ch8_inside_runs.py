"""Four kinds of policies, looked at from inside.

`python -m chapters.experiments.ch8_inside_runs` writes chapters/results/ch8_inside_runs.json. It
trains, for each seed,

- grpo: chapter 3's GRPO on additions;
- control: the same on chapter 5's control model, whose worked answers are no better;
- direct: the same on the embedded model, where a direct answer pays, right or wrong;
- ppo: chapter 2's PPO on the mood of reviews.

Everything is measured on pairs or beginnings of reviews that nothing is trained on; a direction is
found on those that are. Probabilities of a first token are exact and without sampling: the mean
over 100 prompts. Runs that the result has already are not made again; so an interrupted script
goes on.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chapters.experiments.ch5_rlvr_ablations import go_on
from chapters.experiments.ch6_preferences_runs import shorten
from solutions.ch0_sampling import encode_prompts
from solutions.ch2_ppo import reward_fn_sentiment
from solutions.ch4_kl import calc_exact_kl
from solutions.ch8_inside import (
    find_direction,
    get_activation,
    get_logit_lens,
    get_next_probs,
    measure_kl_by_position,
    only_adapters,
    patch,
    steer,
    truncate_rank,
)
from utils.course.demo import make_grpo_trainer, make_ppo_trainer
from utils.course.evaluation import sample_prompts
from utils.models.corpus import addition_prompt, held_out_pairs, review_prompts, training_pairs
from utils.models.forward import get_scorer
from utils.models.loading import CONTROL_MODEL
from utils.rewards import is_worked, reward_fn_addition

RESULT = Path(__file__).parents[1] / "results" / "ch8_inside_runs.json"
PAIRS, TRAIN_PAIRS = held_out_pairs()[:100], training_pairs()[:100]
TRAIN_REVIEWS, REVIEWS = review_prompts()
GEN_LEN, REVIEW_LEN = 40, 30
SCALES = (-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
N_RANDOM = 20  # directions of the same size


def reward_fn_direct(samples: list[str]) -> Tensor:
    """Pay for a direct answer, right or wrong."""
    return torch.tensor([float(text.startswith("A: ")) for text in samples])


def make_trainer(run: str, seed: int, folder: str):
    options: dict[str, Any] = {"samples_every": 0, "checkpoint_every": 0, "device": "cpu"}
    if run == "ppo":
        return make_ppo_trainer(Path(folder), seed, **options)
    options |= {"control": {"base_model": CONTROL_MODEL}}.get(run, {})
    options |= {"direct": {"reward_fn": reward_fn_direct}}.get(run, {})
    return make_grpo_trainer(Path(folder), seed, kl_kind="exact", **options)


# --- Tasks --------------------------------------------------------------------------------------


@dataclass
class Additions:
    """How a policy answers the held-out pairs; "first" is the probability of beginning the
    steps."""

    model: Any
    seed: int
    n: int = 1  # samples of each prompt

    def __post_init__(self):
        self.prompts = [addition_prompt(a, b) for a, b in PAIRS]
        self.answers = [str(a + b) for a, b in PAIRS]
        self.ids, _ = encode_prompts(self.model, self.prompts, GEN_LEN, prepend_bos=True)
        trained_on = [addition_prompt(a, b) for a, b in TRAIN_PAIRS]
        self.train_ids, _ = encode_prompts(self.model, trained_on, GEN_LEN, prepend_bos=True)
        self.train_mask = self.mask = torch.ones_like(self.ids)
        self.steps, self.direct = self.model.tokenizer.convert_tokens_to_ids(["ones", "A"])

    def get_first(self) -> float:
        return get_next_probs(self.model, self.ids)[:, self.steps].mean().item()

    def measure_quickly(self) -> dict[str, float]:
        return {"first": self.get_first()}

    def measure(self, begin: str = "", n: int = 1) -> dict[str, float]:
        """Of sampled answers, the share that is right, and the share that shows its steps."""
        prompts = [prompt + begin for prompt in self.prompts] * n
        batches = sample_prompts(self.model, prompts, GEN_LEN, seed=self.seed, rows=256)
        texts = [begin + text for batch in batches for text in batch.texts]
        right = reward_fn_addition(texts, self.answers * n).mean().item()
        worked = sum(map(is_worked, texts)) / len(texts)
        return self.measure_quickly() | {"accuracy": right, "worked": worked}

    def sample(self):
        return sample_prompts(self.model, self.prompts, GEN_LEN, seed=self.seed)[0]


@dataclass
class Reviews:
    """The mood of reviews with held-out beginnings."""

    model: Any
    seed: int
    n: int = 16

    def __post_init__(self):
        self.ids, self.mask = encode_prompts(self.model, REVIEWS, REVIEW_LEN, prepend_bos=True)
        self.train_ids, self.train_mask = encode_prompts(
            self.model, TRAIN_REVIEWS, REVIEW_LEN, prepend_bos=True
        )

    def measure(self, n: int = 16) -> dict[str, float]:
        prompts = REVIEWS * n
        batches = sample_prompts(self.model, prompts, REVIEW_LEN, seed=self.seed, rows=512)
        texts = [text for batch in batches for text in batch.texts]
        return {"sentiment": reward_fn_sentiment(texts).mean().item()}

    def measure_quickly(self) -> dict[str, float]:
        return self.measure(8)

    def sample(self):
        return sample_prompts(self.model, REVIEWS * 16, REVIEW_LEN, seed=self.seed, rows=256)[0]


# --- What is measured of each -------------------------------------------------------------------


def describe_kl(task) -> dict:
    """KL by position; in nats per completion; on how few tokens nine tenths of it stand."""
    samples = task.sample()
    by_position = measure_kl_by_position(task.model, samples)
    reached = samples.completion_mask.float().mean(0)
    scorer = get_scorer(task.model)
    with torch.no_grad():
        scores = scorer.measure(samples.input_ids, samples.attention_mask, samples.prompt_len)
        each = scores.measure_kl()[samples.completion_mask].sort(descending=True).values
    n_most = int((each.cumsum(0) < 0.9 * each.sum()).sum()) + 1
    return {
        "by_position": by_position.tolist(),
        "reached": reached.tolist(),
        "per_completion": (by_position * reached).sum().item(),
        "tokens_of_nine_tenths": n_most / len(each),
    }


def describe_ablations(task, each: bool) -> dict:
    """Adapters on alone, and all but these: by layer, by site, and, of additions, each one."""
    sites = list(task.model.adapters)
    layers = sorted({site.split(".")[1] for site in sites})
    kinds = list(dict.fromkeys(site.split(".", 2)[2] for site in sites))
    groups = {f"layer {n}": {s for s in sites if s.split(".")[1] == n} for n in layers}
    groups |= {kind: {s for s in sites if s.endswith(f".{kind}")} for kind in kinds}
    found = {}
    groups |= {site: {site} for site in sites} if each else {}
    for name, group in groups.items():
        measure = task.measure if len(group) > 1 else task.measure_quickly
        with only_adapters(task.model, group.__contains__):
            alone = measure()
        with only_adapters(task.model, ({*sites} - group).__contains__):
            without = measure()
        found[name] = {"alone": alone, "without": without}
    return found


def describe_ranks(task) -> dict:
    found = {}
    for rank in (1, 2, 4):
        with truncate_rank(task.model, rank):
            found[str(rank)] = task.measure()
    return found


def get_singular_shares(model) -> dict[str, float]:
    """Of the squared singular values of each adapter's product, the share of the largest."""
    found = {}
    for site, layer in model.adapters.items():
        squares = torch.linalg.svdvals(layer.compute_delta().detach()).square()
        found[site] = (squares[0] / squares.sum()).item()
    return found


def describe_lens(task: Additions) -> dict:
    """The probability of the steps' first token, layer by layer, at the last prompt token."""
    runs: dict[str, Callable[[], AbstractContextManager]] = {
        "policy": nullcontext,
        "base": task.model.reference,
    }
    found = {}
    for name, run in runs.items():
        with run():
            lens = get_logit_lens(task.model, task.ids)[:, :, -1].softmax(-1)
        found[name] = lens[:, :, task.steps].mean(-1).tolist()
    return found


def describe_patches(task: Additions) -> list[list[float]]:
    """The same of the base, one block's output at one position of the prompt being the policy's."""
    model, found = task.model, []
    for layer in range(model.cfg.n_layers):
        name = f"blocks.{layer}.hook_out"
        source = get_activation(model, task.ids, name)
        row = []
        for position in range(task.ids.shape[1]):
            logits = patch(model, task.ids, name, source, position)
            row.append(logits[:, -1].softmax(-1)[:, task.steps].mean().item())
        found.append(row)
    return found


def get_readout(task: Additions) -> Tensor:
    """What raises the steps' first token over the direct answer's in the logits."""
    w_steps, w_direct = task.model.base.unembed.W_U.T[[task.steps, task.direct]]
    readout = task.model.base.ln_final.weight * (w_steps - w_direct)
    return readout - readout.mean()  # the final layer norm takes the mean off


def draw_like(direction: Tensor, n: int, seed: int) -> Tensor:
    """Draw random directions of the size of this one."""
    draws = torch.randn(n, len(direction), generator=torch.Generator().manual_seed(seed))
    return draws / draws.norm(dim=-1, keepdim=True) * direction.norm()


def describe_directions(task, each: bool) -> list[dict]:
    """For each block: the direction's size, its dose curve on the base, random ones beside it; and
    of the last two, if they are looked at each, random ones and the unembedding's own in smaller
    doses, what is sampled, and what becomes of reviews."""
    model, found = task.model, []
    for layer in range(model.cfg.n_layers):
        name = f"blocks.{layer}.hook_out"
        direction = find_direction(model, task.train_ids, name, task.train_mask)
        with model.reference():
            size = get_activation(model, task.ids, name, task.mask)[:, -1].norm(dim=-1).mean()
        row: dict[str, Any] = {"norm": direction.norm().item(), "norm_of_base": size.item()}
        is_exact = isinstance(task, Additions)
        doses = []
        for scale in SCALES if is_exact else (1.0, 4.0):
            with steer(model, name, direction, scale):
                doses.append({"scale": scale} | task.measure_quickly())
        row["doses"] = doses
        scale, n = (2.0, N_RANDOM) if is_exact else (4.0, 1)
        key = "first" if is_exact else "sentiment"
        row["random"] = []
        for other in draw_like(direction, n, task.seed):
            with steer(model, name, other, scale):
                row["random"].append(task.measure_quickly()[key])
        if each and layer >= 2:
            row["random_once"] = []
            for other in draw_like(direction, n, task.seed):
                with steer(model, name, other):
                    row["random_once"].append(task.get_first())
            readout = get_readout(task)
            row["readout"] = []
            for dose in (1.0, 2.0):
                with steer(model, name, readout / readout.norm() * direction.norm(), dose):
                    row["readout"].append(task.get_first())
            with steer(model, name, direction, scale=4 - layer):  # twice its size, or once
                row["sampled"] = task.measure()
            row["on_reviews"] = describe_on_reviews(task, name, direction, 4 - layer)
        found.append(row)
    return found


@torch.no_grad()
def describe_on_reviews(task: Additions, name: str, direction: Tensor, scale: float) -> dict:
    """What the same direction does to reviews: the next token's KL from the base, and the mood."""
    model, reviews = task.model, Reviews(task.model, task.seed)
    with model.reference():
        base = model(reviews.ids, reviews.mask)[:, -1]
        mood = reviews.measure_quickly()["sentiment"]
    with steer(model, name, direction, scale):
        steered = model(reviews.ids, reviews.mask)[:, -1]
        steered_mood = reviews.measure_quickly()["sentiment"]
    policy = model(reviews.ids, reviews.mask)[:, -1]
    kls = []
    for other in draw_like(direction, N_RANDOM, task.seed):
        with steer(model, name, other, scale):
            logits = model(reviews.ids, reviews.mask)[:, -1]
        kls.append(calc_exact_kl(logits, base).mean().item())
    return {
        "kl": calc_exact_kl(steered, base).mean().item(),
        "kl_of_policy": calc_exact_kl(policy, base).mean().item(),
        "kl_of_random": kls,
        "first": steered.softmax(-1)[:, task.steps].mean().item(),
        "first_of_policy": policy.softmax(-1)[:, task.steps].mean().item(),
        "sentiment": steered_mood,
        "sentiment_of_base": mood,
    }


def describe_cosines(task: Additions) -> list[dict]:
    """Of each block's direction: its cosine with what that block's adapters mostly write, and with
    what the unembedding reads."""
    model, readout, found = task.model, get_readout(task), []
    for layer in range(model.cfg.n_layers):
        direction = find_direction(model, task.train_ids, f"blocks.{layer}.hook_out")
        row = {"unembedding": torch.cosine_similarity(direction, readout, dim=0).item()}
        for kind in ("attn.o", "mlp.out"):
            delta = model.adapters[f"blocks.{layer}.{kind}"].compute_delta().detach()
            written = torch.linalg.svd(delta, full_matrices=False).Vh[0]
            row[kind] = torch.cosine_similarity(direction, written, dim=0).abs().item()
        found.append(row)
    return found


def describe_base(task: Additions) -> dict[str, float]:
    """The base's probability of the steps' first token and of the direct answer's, and what that
    predicts for the KL where one of the two becomes certain: the mean of -log p."""
    with task.model.reference():
        probs = get_next_probs(task.model, task.ids)
        styles = {name: task.measure(begin) for name, begin in BEGINNINGS.items()}
    found = {"accuracy_" + name: row["accuracy"] for name, row in styles.items()}
    for name, token in (("steps", task.steps), ("direct", task.direct)):
        found[name] = probs[:, token].mean().item()
        found[f"kl_if_{name}"] = -probs[:, token].log().mean().item()
    return found


BEGINNINGS = {"worked": "ones", "direct": "A"}


def describe_phase(task, phase: int, is_sampled: bool) -> dict:
    """A point of the curve over training: exact numbers at each phase, samples now and then."""
    point: dict[str, Any] = {"phase": phase}
    if isinstance(task, Additions):
        point |= task.measure_quickly()
    if phase % (8 if isinstance(task, Additions) else 10) == 0 and is_sampled:
        kl = describe_kl(task)
        terms = torch.tensor(kl["by_position"]) * torch.tensor(kl["reached"])
        point |= {"kl_first": terms[0].item(), "kl_later": terms[1:].sum().item()}
        if isinstance(task, Additions):
            for name, begin in BEGINNINGS.items():
                point[f"accuracy_{name}"] = task.measure(begin)["accuracy"]
        else:
            point |= task.measure()
    return point


def run(name: str, seed: int, folder: str) -> dict:
    trainer = make_trainer(name, seed, folder)
    task = (Reviews if name == "ppo" else Additions)(trainer.model, seed)
    is_sampled = name in ("grpo", "ppo")
    curve = [describe_phase(task, 0, is_sampled)]
    for phase in range(1, trainer.args.total_phases + 1):
        trainer.metrics.clear()
        trainer.learning_phase(trainer.rollout_phase())
        curve.append(describe_phase(task, phase, is_sampled))
    found = {"run": name, "seed": seed, "all": task.measure(n=4 * task.n), "curve": curve}
    with trainer.model.reference():
        found["none"] = task.measure(n=4 * task.n)
    found |= {"kl": describe_kl(task), "singular": get_singular_shares(trainer.model)}
    if name == "direct":  # asked for its KL alone
        return shorten(found | {"base": describe_base(task)})
    found["ablations"] = describe_ablations(task, each=name == "grpo")
    found["ranks"] = describe_ranks(task)
    found["directions"] = describe_directions(task, each=name == "grpo")
    if isinstance(task, Additions):
        found |= {"base": describe_base(task), "lens": describe_lens(task)}
        found |= {"patches": describe_patches(task), "cosines": describe_cosines(task)}
        found["prompt"] = [task.model.tokenizer.decode([token]) for token in task.ids[0].tolist()]
    return shorten(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    jobs = [(name, seed) for seed in args.seeds for name in args.only]
    go_on(args.out, jobs, lambda found: (found["run"], found["seed"]), run)


RUNS = ("grpo", "ppo", "direct", "control")


if __name__ == "__main__":
    main()
