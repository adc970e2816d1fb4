"""Make the tools model: `python -m utils.models.pretrain_tools --out runs/pretrain/tools`.

Trains the embedded model on for 500 steps, on chapter 10's questions (`utils.models.questions`):
one document a row, and a loss on completions alone, the calculator's part of them included. The
rate follows a schedule of 800 steps that is broken off: what the model cannot do yet is what a
calculator is for. On one machine the same seed gives the same weights, stored in float16.
"""

import argparse
import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from utils.models.loading import EMBEDDED_MODEL
from utils.models.pretrain import fit
from utils.models.questions import draw_question, question_prompt, write_completion

BATCH_SIZE = 96
LONG = 20  # Documents with more tokens, those with calls, are read apart: less padding.


def draw_documents(
    n: int, rng: random.Random, tokenizer: PreTrainedTokenizerFast
) -> list[tuple[list[int], int]]:
    """Draw documents, `bos prompt completion eos`, each with the number of tokens before its
    completion."""
    texts = []
    for _ in range(n):
        question = draw_question(rng, "corpus")
        texts += [question_prompt(question), write_completion(question, rng)]
    parts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [
        ([bos, *prompt, *completion, eos], 1 + len(prompt))
        for prompt, completion in zip(parts[::2], parts[1::2], strict=True)
    ]


def stack(
    documents: list[tuple[list[int], int]], pad_token_id: int
) -> tuple[Int[Tensor, "row seq"], Bool[Tensor, "row seq"]]:
    """Return ids, padded on the right, and a mask of the completions."""
    ids = [torch.tensor(tokens) for tokens, _ in documents]
    mask = [torch.arange(len(tokens)) >= prompt_len for tokens, prompt_len in documents]
    return (
        pad_sequence(ids, batch_first=True, padding_value=pad_token_id),
        pad_sequence(mask, batch_first=True, padding_value=False),
    )


def pretrain_tools(out: Path, steps: int, seed: int) -> float:
    """Train, and save model and tokenizer to `out`.

    Returns the mean loss of the last 100 steps, in nats per token of a completion.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EMBEDDED_MODEL)
    model = GPT2LMHeadModel.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    rng = random.Random(seed)

    def get_loss(_: int) -> Tensor:
        documents = draw_documents(BATCH_SIZE, rng, tokenizer)
        n_tokens = sum(len(ids) - prompt_len for ids, prompt_len in documents)
        total = torch.zeros(())
        for is_long in (False, True):
            part = [document for document in documents if (len(document[0]) > LONG) == is_long]
            if not part:
                continue
            ids, mask = stack(part, tokenizer.pad_token_id)
            hidden = model.transformer(ids[:, :-1]).last_hidden_state[mask[:, 1:]]
            logits = model.lm_head(hidden)  # for what is learnt alone
            total = total + F.cross_entropy(logits, ids[:, 1:][mask[:, 1:]], reduction="sum")
        return total / n_tokens

    loss = fit(model, get_loss, steps, lr=1.5e-3, warmup_steps=100, schedule_steps=800)
    model.eval().half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = "float32"  # what it is to be computed in
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain/tools"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    loss = pretrain_tools(args.out, args.steps, args.seed)
    print(f"{args.out}: loss {loss:.3f} nats per token over the last {min(100, args.steps)} steps")


if __name__ == "__main__":
    main()
