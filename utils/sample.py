"""What training changed: completions of the base beside those of a run, by the same random numbers.

    python -m utils.sample runs/my-run --prompt "This movie is" "The plot"
    python -m utils.sample runs/my-run/best.safetensors --temperature 0 --html before_after.html
    python -m utils.sample smollm2 --chat --prompt "Say hello."    (a model before you train it)

Without `--prompt` the prompts are some of those that the run was evaluated on, or else trained on.
A token of the run's is coloured by the KL there, in nats: how far the policy's distribution over
the next token is from the base's. Colours show in a terminal, unless NO_COLOR is set.
"""

import argparse
import ast
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tabulate import tabulate
from torch import Tensor

from solutions.ch0_sampling import Samples, encode_prompts, sample_completions
from solutions.ch1_lora import TransformerWithLora
from utils.models.fetch import MODELS
from utils.models.forward import get_scorer
from utils.models.loading import IN_THIS_REPO, load_base_model
from utils.models.turns import Stops
from utils.plotting import decode_tokens, plot_tokens, write_page
from utils.prompts import Prompt, show_prompt
from utils.run_folder import ARGS, SAMPLES, find_run, read_args, read_rows, read_trained
from utils.tracking import tolerate_encoding
from utils.validation import require

KEPT = ("top_k", "top_p", "prepend_bos")  # settings of the run that no option overrides
SHADES = {0.05: 230, 0.2: 222, 1.0: 215, 3.0: 203}  # a KL of at least so many nats: ANSI's colour


def is_base(run: str | Path) -> bool:
    """Return whether this names a model, and not a run or its adapters."""
    folder = Path(run).expanduser()
    if (folder / "checkpoint.pt").is_file():
        return False
    return str(run) in (*IN_THIS_REPO, *MODELS) or (folder / "config.json").is_file()


def load_policy(
    run: str | Path, base: str | None = None, device: str | None = None
) -> tuple[TransformerWithLora, dict[str, Any]]:
    """Load the policy of a run's folder, or of an adapter file, and the run's arguments.

    Of a folder that is the checkpoint. A file's arguments are those of the run that it lies in, if
    it lies in one. base: the model, where that run isn't at hand. Of a model that is a policy whose
    adapters add nothing yet, and no arguments.

    Raises ValueError for a path that is neither, and for an adapter that doesn't fit its base.
    """
    if is_base(run):
        require(base is None, f"base should be left out, as {run} is a model, but is {base}")
        return TransformerWithLora.from_pretrained(str(run), device=device), {}
    path = Path(run).expanduser()
    require(
        path.suffix == ".safetensors" or (path / "checkpoint.pt").is_file(),
        f"run should be a run's folder, an adapter file or a model's name, but {path} has no "
        "checkpoint.pt",
    )
    trained, args = read_trained(path)
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            noted = file.metadata() or {}
        require("scaling" in noted, f"run should be an adapter of the course, but {path} isn't")
        scaling = float(noted["scaling"])
    else:
        scaling = args["lora_alpha"] / args["lora_rank"]
    name = base or args.get("base_model")
    require(name, f"base should name the model of {path}, as no run lies around it: --base NAME")
    adapters = {k: v for k, v in trained.items() if k.endswith((".lora_A", ".lora_B"))}
    sites = tuple(dict.fromkeys(k.split(".", 2)[2].rpartition(".")[0] for k in adapters))
    rank = next(v for k, v in adapters.items() if k.endswith(".lora_A")).shape[1]
    model = load_base_model(str(name), device, args.get("dtype"))
    policy = TransformerWithLora(model, rank, scaling * rank, sites)
    policy.load_trainable_state(adapters)
    return policy, args


def choose_prompts(folder: Path, args: dict[str, Any], n: int) -> list[Prompt]:
    """Return `n` prompts at most, spread over those a run was evaluated on, or else trained on.

    Raises ValueError where neither is known.
    """
    found = [x["prompt"] for x in read_rows(folder / SAMPLES) if x["split"] == "eval"]
    if not found:
        text = str(args.get("prompts"))
        found = [args.get("prefix")] if text == "None" else ast.literal_eval(text)
    said = f"prompt should be given, as {folder} doesn't say which it had: --prompt TEXT"
    require(found[0] is not None, said)
    distinct = list({json.dumps(x): x for x in found}.values())
    return distinct[:: max(len(distinct) // n, 1)][:n]


@dataclass
class Comparison:
    """Hold completions of the base and of the policy by the same uniform numbers, and the exact KL
    of each token of the policy's [batch completion]."""

    prompts: list[Prompt]
    before: Samples
    after: Samples
    kl: Tensor

    @property
    def kls(self) -> list[list[float]]:
        """Return the KL of each token of each completion of the policy's."""
        rows = zip(self.kl, self.after.completion_mask, strict=True)
        return [kl[mask].tolist() for kl, mask in rows]

    @property
    def mean_kl(self) -> float:
        """Return the KL from the base in nats per token, over all tokens of the policy's."""
        return self.kl[self.after.completion_mask].mean().item()


@torch.no_grad()
def compare(
    policy: TransformerWithLora,
    prompts: list[Prompt],
    gen_len: int,
    temperature: float = 1.0,
    seed: int = 0,
    top_k: int | None = None,
    top_p: float | None = None,
    prepend_bos: bool = True,
    stops: Sequence[str] = (),
    is_trained: bool = True,
) -> Comparison:
    """Sample the base and the policy, up to the first of `stops` if there are any, and measure the
    KL, at temperature 1 where that is 0. A policy that isn't trained is sampled once."""
    device = next(policy.parameters()).device

    def sample() -> Samples:
        generator = torch.Generator(device).manual_seed(seed)
        limits = (gen_len, temperature, top_k, top_p, generator)
        if not stops:
            return sample_completions(policy, prompts, *limits, prepend_bos)
        ids, mask = encode_prompts(policy, prompts, gen_len, prepend_bos)
        drawn = Stops(stops).sample(policy, ids, mask, {}, *limits)
        return Samples(**drawn.put_behind(ids, mask))

    with policy.reference():
        before = sample()
    after = sample() if is_trained else before
    scores = get_scorer(policy).measure(
        after.input_ids, after.attention_mask, after.prompt_len, temperature or 1.0
    )
    return Comparison(prompts, before, after, scores.measure_kl())


# --- What is shown ------------------------------------------------------------------------------


def list_tokens(samples: Samples, tokenizer: Any) -> list[list[str]]:
    """Return the tokens of each completion, line breaks as ⏎."""
    rows = zip(samples.input_ids[:, samples.prompt_len :], samples.completion_mask, strict=True)
    decoded = (decode_tokens(tokenizer, ids[mask]) for ids, mask in rows)
    return [[token.replace("\n", "⏎") for token in tokens] for tokens in decoded]


def list_prompts(comparison: Comparison) -> list[str]:
    """Return the end of each prompt, which may begin with examples."""
    return [show_prompt(prompt).strip().replace("\n", "⏎")[-100:] for prompt in comparison.prompts]


def paint(text: str, kl: float) -> str:
    shade = next((SHADES[least] for least in sorted(SHADES, reverse=True) if kl >= least), None)
    return text if shade is None else f"\x1b[30;48;5;{shade}m{text}\x1b[0m"


def format_texts(
    comparison: Comparison, tokenizer: Any, is_coloured: bool = False, **layout: Any
) -> str:
    """Format the texts as a table, with tabulate's `layout`; an untrained model has one column."""
    before, after = comparison.before, comparison.after
    columns = {"prompt": list_prompts(comparison)}
    if after is not before:
        columns["before: the base"] = ["".join(row) for row in list_tokens(before, tokenizer)]
    columns["completion" if after is before else "after: the run"] = [
        "".join(map(paint, tokens, kls) if is_coloured else tokens)
        for tokens, kls in zip(list_tokens(after, tokenizer), comparison.kls, strict=True)
    ]
    return tabulate(columns, "keys", disable_numparse=True, **layout)


def format_for_terminal(
    comparison: Comparison, tokenizer: Any, width: int, is_coloured: bool
) -> str:
    """Format the texts for a terminal of this width, and say what the colours mean."""
    n_texts = 1 if comparison.after is comparison.before else 2
    widths = [20, *[max((width - 30) // n_texts, 20)] * n_texts]
    layout = {"tablefmt": "simple_grid", "maxcolwidths": widths}
    text = format_texts(comparison, tokenizer, is_coloured, **layout)
    if n_texts == 1:
        return text
    legend = " ".join(paint(f" {least:g} or more ", least) for least in SHADES)
    colours = f"\nKL at a token, nats: {legend}" if is_coloured else ""
    return f"{text}{colours}\n{say_kl(comparison)}"


def write_comparison(path: Path, title: str, comparison: Comparison, tokenizer: Any) -> None:
    """Write a page with the texts as a table, and a picture of the tokens by their KL."""
    rows = zip(list_tokens(comparison.after, tokenizer), comparison.kls, strict=True)
    prompts = [f"{i}. {text[-60:]}" for i, text in enumerate(list_prompts(comparison), 1)]
    pictured = dict(zip(prompts, rows, strict=True))
    figure = plot_tokens(pictured, "KL(policy ‖ base), nats", center=None)
    table = format_texts(comparison, tokenizer, tablefmt="html")
    write_page(path, title, [say_kl(comparison)], table, figure)


def say_kl(comparison: Comparison) -> str:
    return f"KL from the base, mean over the tokens on the right: {comparison.mean_kl:.3f} nats"


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m utils.sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run's folder, its adapters, or a model's name")
    add("--prompt", nargs="+", action="extend", metavar="TEXT", help=r"prompts; \n is a line break")
    add("--chat", action="store_true", help="--prompt is what a user says (default: as in the run)")
    add("--n", type=int, help="how many of the run's prompts, without --prompt (8)")
    add("--temperature", type=float, help="0 takes the likeliest token (default: the run's)")
    add("--gen-len", type=int, help="tokens of a completion at most (default: the run's)")
    add("--seed", type=int, default=0, help="of the random numbers (0)")
    add("--base", help="the model, for an adapter file that lies in no run's folder")
    add("--device", help="such as cpu (default: the GPU if there is one)")
    add("--html", type=Path, metavar="FILE", help="write the same as a page, too")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    given = read_arguments(arguments)
    tolerate_encoding()
    try:
        policy, args = load_policy(given.run, given.base, given.device)
        folder = find_run(given.run)
        require(given.prompt or not given.chat, "chat should be given with prompt")
        require(given.n is None or not given.prompt, "n should be left out beside prompt")
        if given.prompt is None:
            prompts = choose_prompts(folder, args, 8 if given.n is None else max(given.n, 1))
        else:
            texts = [text.replace("\\n", "\n") for text in given.prompt]
            is_chat = given.chat or str(args.get("prompts")).startswith("[[")
            prompts = [[{"role": "user", "content": t}] if is_chat else t for t in texts]
        settings = {name: args[name] for name in KEPT if name in args} | {"seed": given.seed}
        for name, default in (("gen_len", 40), ("temperature", 1.0)):
            said = getattr(given, name)
            settings[name] = args.get(name, default) if said is None else said
        if (folder / ARGS).is_file():
            settings["stops"] = read_args(folder).get("stop") or []
        if args.get("environment"):
            said = "the run's environment isn't asked here: nobody answers a turn"
            print(f"{args['environment']}: {said}", file=sys.stderr)
        found = compare(policy, prompts, **settings, is_trained=not is_base(given.run))
        if given.html:
            write_comparison(given.html, str(given.run), found, policy.tokenizer)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if is_coloured and os.name == "nt":
        os.system("")  # switches colours on in Windows' older terminals
    width = shutil.get_terminal_size((120, 24)).columns
    print(format_for_terminal(found, policy.tokenizer, width, is_coloured))
    if given.html:
        print(f"The page: {given.html}")


if __name__ == "__main__":
    main()
