"""Pretrain the embedded model: `python -m utils.models.pretrain --out runs/pretrain/model`.

Builds the corpus, a byte-level BPE of 512 tokens with digits split, and a GPT-2 of 0.9M parameters,
and trains it on packed rows of 128 tokens (documents see those before them in their row). On one
machine the same seed gives the same weights.

`--control` makes the model of chapter 5's control experiment: it trains the embedded model on for
500 steps, on a corpus whose worked answers do not help.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from utils.models.corpus import addition_completion, control_completion, documents
from utils.models.loading import EMBEDDED_MODEL

CONTEXT = 128
VOCAB_SIZE = 512


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE of `VOCAB_SIZE` tokens; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=CONTEXT,
    )


def pack(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Int[Tensor, "rows context"]:
    """Pack whole documents into rows, each `bos text eos`; the last is cut at `CONTEXT`."""
    rows, row = [], []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        row += [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
        if len(row) >= CONTEXT:
            rows.append(row[:CONTEXT])
            row = []
    return torch.tensor(rows)


def build_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """Return a GPT-2 of 4 layers and width 128, without dropout, with the fused tanh gelu."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_positions=CONTEXT,
            n_embd=128,
            n_layer=4,
            n_head=4,
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def pretrain(
    out: Path,
    steps: int = 2500,
    batch_size: int = 32,
    n_documents: int = 200_000,
    lr: float = 2.5e-3,
    warmup_steps: int = 100,
    seed: int = 0,
    complete: Callable = addition_completion,
    start: Path | None = None,
) -> float:
    """Train, and save model and tokenizer to `out`.

    `complete` answers the corpus's additions. With `start`, a folder, training begins at that
    model, with its tokenizer.

    Returns the mean loss of the last 100 steps, in nats per token.
    """
    texts = list(documents(n_documents, seed, complete))
    if start is None:
        tokenizer = build_tokenizer(texts[:20_000])
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(start)
    rows = pack(texts, tokenizer)
    torch.manual_seed(seed)
    model = build_model(tokenizer) if start is None else GPT2LMHeadModel.from_pretrained(start)

    def get_loss(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * steps + step)
        batch = rows[torch.randint(len(rows), (batch_size,), generator=generator)]
        return model(batch, labels=batch).loss

    loss = fit(model, get_loss, steps, lr, warmup_steps)
    model.eval().save_pretrained(out)
    tokenizer.save_pretrained(out)
    return loss


def fit(
    model: GPT2LMHeadModel,
    get_loss: Callable[[int], Tensor],
    steps: int,
    lr: float,
    warmup_steps: int,
    schedule_steps: int | None = None,
) -> float:
    """Take AdamW steps on `get_loss(step)`, and return the mean loss of the last 100.

    The rate has a linear warm-up, then a cosine down to 0 at `schedule_steps`, by default `steps`.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    end = steps if schedule_steps is None else schedule_steps

    def get_scale(k: int) -> float:
        return min((k + 1) / warmup_steps, 0.5 + 0.5 * math.cos(math.pi * k / end))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, get_scale)
    losses = []
    bar = tqdm(range(steps), desc="pretrain")
    for step in bar:
        loss = get_loss(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return sum(losses[-100:]) / len(losses[-100:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain/model"))
    parser.add_argument("--steps", type=int, help="default: 2500, of the control 500")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="make the control model")
    args = parser.parse_args()
    setup: dict[str, Any] = {"steps": args.steps or 2500}
    if args.control:
        setup = {"steps": args.steps or 500, "lr": 1e-3, "n_documents": 40_000}
        setup |= {"complete": control_completion, "start": EMBEDDED_MODEL}
    loss = pretrain(args.out, seed=args.seed, **setup)
    print(f"{args.out}: loss {loss:.3f} nats per token over the last 100 steps")


if __name__ == "__main__":
    main()
