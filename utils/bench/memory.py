"""Peak memory of a PPO phase as batch, vocabulary and length grow.

The textbook's way stores the reference's logits with the rollout; ours computes them for each
minibatch and lets go of them. Minibatches have 16 rows everywhere.
"""

from pathlib import Path

import torch

from solutions.ch0_sampling import select_completion
from solutions.ch2_ppo import calc_kl_penalty
from utils.bench.measuring import measure_peak, run_apart
from utils.bench.models import Work, save_random
from utils.bench.trainers import make_trainer, run_step

ROWS = 16  # in a minibatch
VOCABULARIES = (512, 50257)
BATCHES, LENGTHS = (16, 32, 64), (20, 40, 80)


def measure_memory(folder: Path, rounds: int) -> list[dict[str, int]]:
    """Measure the MiB that a phase adds, by vocabulary, batch and length, for both ways."""
    del rounds  # a peak is no time
    results = []
    for vocabulary in VOCABULARIES:
        path = save_random(folder / f"vocab-{vocabulary}", 4, 128, 4, vocabulary)
        cases = [(batch, 40) for batch in BATCHES] + [(32, length) for length in LENGTHS]
        for batch, length in dict.fromkeys(cases):
            row: dict[str, int] = {"vocabulary": vocabulary, "batch": batch, "length": length}
            for way in ("ours", "textbook"):
                row[way] = run_apart(_measure_phase, path, batch, length, way)["added"]
            results.append(row)
    return results


def _measure_phase(folder: Path, batch: int, length: int, way: str) -> dict:
    work = Work(n_prompts=batch, group_size=1, gen_len=length)
    trainer = make_trainer(folder, work, "ppo", num_minibatches=batch // ROWS)
    if way == "textbook":
        store_reference_logits(trainer)
    run_step(make_trainer(folder, Work(1, 1, 2), "ppo"))  # what a first phase loads
    return measure_peak(lambda: run_step(trainer))


def store_reference_logits(trainer) -> None:
    """Make `trainer` keep the reference's logits with the rollout, as textbooks do."""
    rollout_phase = trainer.rollout_phase
    stored: dict[str, torch.Tensor] = {}

    # The bridge, whose logits are kept, in place of the native forward, which keeps none.
    def keep(module, inputs, logits):
        stored["last"] = logits

    trainer.model.base.register_forward_hook(keep)

    @torch.no_grad()
    def roll():
        memory = rollout_phase()
        n_rows, rows = len(memory.input_ids), trainer.args.minibatch_size
        with trainer.model.reference():
            for start in range(0, n_rows, rows):
                chosen = slice(start, start + rows)
                logits = trainer.model(memory.input_ids[chosen], memory.attention_mask[chosen])
                if start == 0:
                    shape = n_rows, memory.mask.shape[1], logits.shape[-1]
                    stored["logits"] = logits.new_empty(shape)
                stored["logits"][chosen] = select_completion(logits, memory.prompt_len)
        stored["input_ids"] = memory.input_ids
        return memory

    def measure_kl(minibatch, scored):
        logits = select_completion(stored["last"], minibatch.prompt_len)
        same = (minibatch.input_ids[:, None] == stored["input_ids"]).all(-1)  # [minibatch rows]
        ref_logits = stored["logits"][same.int().argmax(1)]  # rows that are alike have the same
        kl = calc_kl_penalty(logits, ref_logits, minibatch.mask, kl_coef=1.0)
        trainer.metrics["kl_exact"].append(kl.item())
        return kl

    trainer.rollout_phase, trainer.measure_kl = roll, measure_kl
