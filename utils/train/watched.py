"""What the command does beside training: it evaluates, keeps samples, and says what goes wrong."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool
from torch import Tensor
from tqdm import tqdm

from solutions.ch0_sampling import Samples, encode_prompts
from solutions.ch2_ppo import ReplayMemory, RLHFTrainer
from utils.models.decoding import get_end_ids
from utils.models.turns import Stops
from utils.prompts import Prompt
from utils.rewards import call_reward_fn
from utils.run_folder import SAMPLES, append_rows, load_checkpoint
from utils.signals import find_cut_off, find_mostly_cut_off
from utils.tracking import EarlyStop, check_same_args
from utils.train.data import WeightedRewards
from utils.validation import Count, check_fields, require


@dataclass
class Evaluation:
    """Say what a policy is evaluated on, and when a run ends that gets no better.

    `rows` have a prompt and the columns that the reward reads.
    """

    rows: list[dict[str, Any]]
    eval_every: Count = 10  # phases
    eval_samples: Count = 1  # completions of each prompt
    patience: Count | None = None  # evaluations without improvement

    def __post_init__(self):
        check_fields(self)


def count_overlap(rows: list[dict[str, Any]], prompts: Sequence[Prompt]) -> int:
    """Return how many rows have a prompt that is among `prompts`, but for space at its ends."""

    def strip(prompt: Prompt) -> str:
        return prompt.strip() if isinstance(prompt, str) else json.dumps(prompt)

    known = {strip(prompt) for prompt in prompts}
    return sum(strip(row["prompt"]) in known for row in rows)


class Watched(RLHFTrainer):
    """Evaluate before the first phase, every few phases and after the last one, keep the adapters
    that were best, and write samples: a base class to put before a trainer's.

    An evaluation samples as training does, but from a generator of its own that begins anew each
    time: training is bit for bit what it is without. On many ranks each evaluates its share of
    the prompts. An evaluation's figures are metrics with the prefix "eval_"; those of the model
    before training are a row of phase 0.

    options: the command's, which the run keeps as its arguments.
    """

    options: dict[str, Any] | None = None
    evaluation: Evaluation | None = None
    stops: Stops | None = None
    shown: Sequence[dict[str, Any]] = ()  # the samples of the latest table
    is_told = False  # that most completions are cut off

    def train(self) -> list[dict[str, float]]:
        """Run the phases that are left, unless patience ends first, and return the history."""
        self.is_told = False
        try:
            return super().train()
        except EarlyStop:
            return self.history

    def rollout_phase(self) -> ReplayMemory:
        """Roll out, after an evaluation if none was before, or end the run if patience has."""
        evaluation = self.evaluation
        if evaluation is not None:
            if not self.history:
                self.history.append({"phase": 0} | self.evaluate(0))
            self._end_if_no_better(evaluation.patience)
        memory = super().rollout_phase()
        if "cut_off" in self.metrics:  # chapter 5's own `truncated_frac` knows no stops
            self.metrics["truncated_frac"] = self.metrics.pop("cut_off")
        return memory

    def learning_phase(self, memory: ReplayMemory) -> None:
        """Learn, keep the samples that are shown, and evaluate if it is due."""
        super().learning_phase(memory)
        done, every = self.phase + 1, self.args.samples_every
        if get_rank()[0] == 0 and self.folder and every and self.phase % every == 0:
            rows = [{"phase": done, "split": "train"} | row for row in self.shown]
            append_rows(self.folder / SAMPLES, rows)
        evaluation = self.evaluation
        if evaluation and (done % evaluation.eval_every == 0 or done == self.args.total_phases):
            for name, value in self.evaluate(done).items():
                self.metrics[name].append(value)
        self._say_what_is_cut_off()

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a checkpoint, for more phases than its run had if the arguments say so.

        Then the learning rates follow the schedule of all the phases from here on.
        """
        state = load_checkpoint(Path(path))
        was, now = state["args"].get("total_phases", 0), self.args.total_phases
        require(now >= was, f"total_phases should be {was} or more, as the run's, but is {now}")
        try:
            saved = state["args"] | {"total_phases": max(was, now)}
            if Path(self.args.base_model).is_dir():  # it may have moved since
                saved["base_model"] = self.args.base_model
            check_same_args(self.args, saved)
        except ValueError as error:
            if str(error).startswith(("prompts should", "columns should")):
                raise ValueError("data should hold the rows that the run had") from error
            hint = "a run goes on with its own options, but for more phases and other rewards"
            other = "to change others, begin a new one from its adapters: --adapter"
            raise ValueError(f"{error}: {hint}; {other} {Path(path).parent}") from None
        self.set_state(state)
        self.folder = Path(path).parent
        if now > was:
            before = self.scheduler.get_last_lr()[0]
            self.scheduler.last_epoch -= 1  # the step after the last phase, taken again
            self.scheduler.step()
            if get_rank()[0] == 0:
                tqdm.write(
                    f"{self.folder.name} goes on to phase {now} in place of {was}. The learning "
                    f"rate is that of a run of {now} phases from here on: "
                    f"{self.scheduler.get_last_lr()[0]:.3g}, and it was {before:.3g}"
                )

    # Samples

    def stop_at(self, stops: list[str]) -> None:
        """End completions at these strings; their tokens are kept and learnt, as an eos is.

        Raises ValueError where something else decides what has ended.
        """
        for name, default in (("environment", None), ("truncation", "keep")):
            value = getattr(self.args, name, default)
            require(value == default, f"{name} should be {default} beside stop, but is {value!r}")
        self.stops = Stops(stops)

    def sample(self, prompts: list[Prompt], columns: dict[str, list]) -> Samples:
        """Sample as the trainer does, or up to the first stop."""
        if self.stops is None:
            return super().sample(prompts, columns)
        args = self.args
        ids, mask = encode_prompts(self.model, prompts, args.gen_len, args.prepend_bos)
        limits = (args.gen_len, args.temperature, args.top_k, args.top_p, self.generator)
        drawn = self.stops.sample(self.model, ids, mask, {}, *limits)
        return Samples(**drawn.put_behind(ids, mask))

    def _record_samples(self, prompts: list[Prompt], samples: Samples, scores: Tensor) -> None:
        super()._record_samples(prompts, samples, scores)
        self.metrics["cut_off"].append(self.find_cut_off(samples).float().mean().item())
        for name, part in self.get_parts().items():
            self.metrics[f"reward_{name}"].append(part.mean().item())
        ranked = scores.argsort(descending=True).tolist()
        rows = self._describe(prompts, samples, scores)
        self.shown = [rows[ranked[i]] for i in (0, len(ranked) // 2, -1)]  # as in the table

    def find_cut_off(self, samples: Samples) -> Bool[Tensor, "batch"]:
        """Mark the completions that had not ended when they had `gen_len` tokens."""
        cut_off = find_cut_off(samples, get_end_ids(self.model), self.args.gen_len)
        if self.stops is not None:
            has_ended = [self.stops.is_end(text) for text in samples.texts]
            cut_off &= ~torch.tensor(has_ended, device=cut_off.device)
        return cut_off

    def get_parts(self) -> dict[str, Tensor]:
        """Return what each of several rewards gave in the last call, by its name."""
        reward_fn = self.args.reward_fn
        return reward_fn.parts if isinstance(reward_fn, WeightedRewards) else {}

    def _describe(self, prompts: list[Prompt], samples: Samples, scores: Tensor) -> list[dict]:
        parts = {"reward": scores}
        parts |= {f"reward_{name}": part for name, part in self.get_parts().items()}
        numbers = {name: part.tolist() for name, part in parts.items()}
        return [
            {"prompt": prompt, "completion": text} | {name: numbers[name][i] for name in numbers}
            for i, (prompt, text) in enumerate(zip(prompts, samples.texts, strict=True))
        ]

    # Evaluation

    @torch.no_grad()
    def evaluate(self, phase: int) -> dict[str, float]:
        """Sample completions of the held-out prompts, write them, keep the adapters if they are the
        best, and return the means."""
        rank, n_ranks = get_rank()
        kept = self.generator, self.metrics
        seed = 2**31 + self.args.seed * n_ranks + rank  # no trainer's; a CPU reads 32 bits of it
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.metrics = defaultdict(list)
        try:
            mine = self._sample_held_out(rank, n_ranks)
        finally:
            self.generator, self.metrics = kept
        shares = [mine] * n_ranks
        if n_ranks > 1:
            dist.all_gather_object(shares, mine)
        rows = [row for share in shares for row in share]
        means = {
            f"eval_{name}": sum(row[name] for row in rows) / len(rows)
            for name in rows[0]
            if name not in ("prompt", "completion")
        }
        before = [row["eval_reward"] for row in self.history if "eval_reward" in row]
        if rank == 0 and self.folder:
            names = [name for name in rows[0] if name not in ("completion_len", "truncated_frac")]
            start = {"phase": phase, "split": "eval"}
            shown = [start | {name: row[name] for name in names} for row in rows]
            append_rows(self.folder / SAMPLES, shown)
            if means["eval_reward"] > max(before, default=-math.inf):
                self.model.save_adapter(self.folder / "best.safetensors")
                best = {"phase": phase, "eval_reward": means["eval_reward"]}
                (self.folder / "best.json").write_text(json.dumps(best) + "\n")
        return means

    def _sample_held_out(self, rank: int, n_ranks: int) -> list[dict]:
        """Return a row for each completion of this rank's share of the held-out prompts."""
        evaluation, rows = self.evaluation, []
        assert evaluation is not None
        share, n = evaluation.rows[rank::n_ranks], evaluation.eval_samples
        size = max(self.args.batch_size // n, 1)  # prompts at a time
        for start in range(0, len(share), size):
            batch = [row for row in share[start : start + size] for _ in range(n)]
            columns = {name: [row[name] for row in batch] for name in batch[0]}
            prompts = columns.pop("prompt")
            samples = self.sample(prompts, columns)
            args = self.args
            ids, _ = encode_prompts(self.model, prompts, args.gen_len, args.prepend_bos)
            require(
                torch.equal(ids, samples.input_ids[:, : samples.prompt_len]),
                "eval_samples should be a multiple of group_size for a trainer that samples whole "
                f"groups, as this one does, but is {n}",
            )
            known = {"prompts": prompts} | columns
            scores = call_reward_fn(self.args.reward_fn, samples.texts, known)
            lengths = samples.completion_mask.sum(-1).tolist()
            cut_off = self.find_cut_off(samples).float().tolist()
            described = self._describe(prompts, samples, scores)
            for row, length, is_cut in zip(described, lengths, cut_off, strict=True):
                rows.append(row | {"completion_len": length, "truncated_frac": is_cut})
        return rows

    def _end_if_no_better(self, patience: int | None) -> None:
        """Raise EarlyStop if the last `patience` evaluations were no better than one before."""
        found = [(row["eval_reward"], row["phase"]) for row in self.history if "eval_reward" in row]
        best, at = max(found, key=lambda pair: pair[0], default=(0.0, 0.0))
        since = [phase for _, phase in found if phase > at]
        if patience is not None and len(since) >= patience:
            raise EarlyStop(
                f"Stopped after phase {self.phase}: the last {len(since)} evaluations were no "
                f"better than that after phase {at:.0f}, whose reward was {best:.3f}. To go on, "
                f"resume it with a larger --patience, or None"
            )

    def _say_what_is_cut_off(self) -> None:
        """Say once, on the first rank, that most completions of the latest phases were cut off."""
        shares = self.metrics.get("truncated_frac", [0.0])
        row = {"phase": self.phase + 1, "truncated_frac": sum(shares) / len(shares)}
        limits = (self.args.total_phases, self.args.gen_len)
        said = find_mostly_cut_off([*self.history, row], *limits)
        if said and not self.is_told and get_rank()[0] == 0:
            tqdm.write(said)
            self.is_told = True


def get_rank() -> tuple[int, int]:
    """Return this process's rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
