"""Pretrain the embedded model: `python -m utils.models.pretrain --out runs/pretrain/model`.

Builds the corpus, a byte-level BPE of 512 tokens with digits split, and a GPT-2 of 0.9M parameters,
and trains it on packed rows of 128 tokens (documents see those before them in their row). Step k's
batch depends on the seed and on k alone, so a run that was stopped goes on from its last checkpoint
and ends at the same weights.
"""

import argparse
import math
from pathlib import Path

import torch
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from utils.models.corpus import documents
from utils.tracking import save_checkpoint

CONTEXT = 128
VOCAB_SIZE = 512


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCAB_SIZE` tokens; every digit is a token of its own."""
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
    """Rows of whole documents, each `bos text eos`; the last of a row is cut at `CONTEXT`."""
    rows, row = [], []
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        row += [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]
        if len(row) >= CONTEXT:
            rows.append(row[:CONTEXT])
            row = []
    return torch.tensor(rows)


def build_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """A GPT-2 of 4 layers and width 128, without dropout, with the fused tanh gelu."""
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
    checkpoint: Path,
    steps: int = 2500,
    batch_size: int = 32,
    n_documents: int = 200_000,
    lr: float = 2.5e-3,
    warmup_steps: int = 100,
    seed: int = 0,
    checkpoint_every: int = 250,
) -> float:
    """Train, or go on from `checkpoint`, and save model and tokenizer to `out`.

    Returns the mean loss of the last 100 steps, in nats per token.
    """
    texts = list(documents(n_documents, seed))
    tokenizer = build_tokenizer(texts[:20_000])
    rows = pack(texts, tokenizer)
    torch.manual_seed(seed)
    model = build_model(tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda k: min((k + 1) / warmup_steps, 0.5 + 0.5 * math.cos(math.pi * k / steps)),
    )
    losses: list[float] = []
    setup = {"steps": steps, "batch_size": batch_size, "n_documents": n_documents, "seed": seed}
    setup |= {"lr": lr, "warmup_steps": warmup_steps}
    if checkpoint.exists():
        state = torch.load(checkpoint)
        if state["setup"] != setup:
            raise ValueError(f"{checkpoint} is of another run: {state['setup']}, not {setup}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        losses = state["losses"]

    bar = tqdm(range(len(losses), steps), desc="pretrain", initial=len(losses), total=steps)
    for step in bar:
        generator = torch.Generator().manual_seed(seed * steps + step)
        batch = rows[torch.randint(len(rows), (batch_size,), generator=generator)]
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if (step + 1) % checkpoint_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"scheduler": scheduler.state_dict(), "losses": losses, "setup": setup}
            save_checkpoint(checkpoint, state)
    out.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(out)
    tokenizer.save_pretrained(out)
    return sum(losses[-100:]) / len(losses[-100:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain/model"))
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/pretrain/checkpoint.pt"))
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    loss = pretrain(args.out, args.checkpoint, steps=args.steps, seed=args.seed)
    print(f"{args.out}: loss {loss:.3f} nats per token over the last 100 steps")


if __name__ == "__main__":
    main()
