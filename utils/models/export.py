"""Exporting what was trained: as an adapter of PEFT, or as a plain Hugging Face checkpoint.

    python -m utils.models.export runs/my-run out --format peft

A PEFT adapter is small and goes on the base again, in PEFT, TRL or a server. A merged checkpoint
has W + A B alpha / rank in place of each W, and is loaded like any other model. Beside either lies
the tokenizer, which puts a bos before a text if that is how the prompts of training began.

Covered are GPT-2, Llama, Mistral, Qwen2 and Qwen3. On Hugging Face's GPT-2 one module, `c_attn`,
computes q, k and v. Adapters of rank r on the three become one of rank 3r: A side by side, B block
diagonal. An adapter that PEFT itself made for `c_attn` is of another kind: its q, k and v share A.

Format: PEFT's, https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformer_lens  # noqa: F401  before transformers
from jaxtyping import Float
from peft import LoraConfig, PeftConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from utils.models.blocks import GATED, Parts
from utils.models.fetch import MODELS, get_models_folder, write_folder
from utils.models.loading import load_base_model
from utils.run_folder import read_trained
from utils.validation import require

ROOT = Path(__file__).parents[2]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Habits of a model's generation config, each as it is where nothing is changed.
NEUTRAL = {
    "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "min_new_tokens": 0, "min_length": 0, "num_beams": 1,
}  # fmt: skip
PREFIX = "base_model.model."  # of PEFT's names: it wraps the model twice
CONTENTS = "EXPORTED.txt"  # lists the files of a folder that was written here
NAMES = {  # of the linear layers in a block: GPT-2's, and those of the other models
    "attn.q": ("attn.c_attn", "self_attn.q_proj"),
    "attn.k": ("attn.c_attn", "self_attn.k_proj"),
    "attn.v": ("attn.c_attn", "self_attn.v_proj"),
    "attn.o": ("attn.c_proj", "self_attn.o_proj"),
    "mlp.in": ("mlp.c_fc", "mlp.up_proj"),
    "mlp.gate": (None, "mlp.gate_proj"),
    "mlp.out": ("mlp.c_proj", "mlp.down_proj"),
}
# Fields of PEFT's configuration that may differ from its defaults: under all others an adapter is
# more than x A B alpha / rank on some linear layers.
OPEN = """task_type base_model_name_or_path revision auto_mapping peft_version inference_mode r
lora_alpha rank_pattern alpha_pattern target_modules exclude_modules layers_to_transform
layers_pattern fan_in_fan_out lora_dropout init_lora_weights eva_config""".split()
FUSED = (
    ": an adapter that was trained on c_attn as a whole has one A for q, k and v, and cannot be "
    "taken apart into adapters of this rank"
)
STARTS = (True, False, "gaussian", "eva", "orthogonal")  # of A and B; others change the base too


# --- The adapters by module -----------------------------------------------------------------------


def _is_gpt2(model: Any) -> bool:
    """Return whether a model is a GPT-2 or not; any that is not covered is a ValueError."""
    kind, covered = model.base.original_model.config.model_type, ["gpt2", *GATED]
    require(kind in covered, f"the model's type should be among {covered}, but is {kind!r}")
    return kind == "gpt2"


def group_sites(model: Any) -> dict[str, list[str]]:
    """Return the sites whose adapters each module of the Hugging Face model holds, by its name.

    Of `c_attn` these are those of q, k and v, in this order, the bridge's; of others it is one.
    """
    is_gpt2 = _is_gpt2(model)
    require(
        not model.base.compatibility_mode,
        "the base should have its own weights, but its compatibility_mode has changed them",
    )
    groups: dict[str, list[str]] = {}
    for site in model.adapters:
        _, index, name = site.split(".", 2)
        blocks = "transformer.h" if is_gpt2 else "model.layers"
        groups.setdefault(f"{blocks}.{index}.{NAMES[name][0 if is_gpt2 else 1]}", []).append(site)
    return groups


def _calc_margins(module: str, site: str, width: int) -> tuple[int, int]:
    """Return how many columns of a module's output stand before and after those of a site."""
    if not module.endswith(".c_attn"):
        return 0, 0
    place = "qkv".index(site[-1])
    return place * width, (2 - place) * width


def _gather(
    model: Any, module: str, sites: list[str]
) -> tuple[Float[Tensor, "d_in ranks"], Float[Tensor, "ranks d_out"]]:
    """Return A and B of a module, on the CPU."""
    layers = [(site, model.adapters[site]) for site in sites]
    lora_A = torch.cat([layer.lora_A.detach() for _, layer in layers], dim=1)
    lora_B = [
        F.pad(layer.lora_B.detach(), _calc_margins(module, site, layer.lora_B.shape[1]))
        for site, layer in layers
    ]
    return lora_A.cpu(), torch.cat(lora_B).cpu()


# --- PEFT -----------------------------------------------------------------------------------------


def save_peft_adapter(model: Any, folder: str | Path, prepend_bos: bool = True) -> None:
    """Write the adapters of a `TransformerWithLora` to a folder that PEFT loads.

    It gets `adapter_config.json`, which names the base, `adapter_model.safetensors`, and the
    tokenizer. A value head is left out. prepend_bos: whether prompts began with a bos.

    Raises ValueError for another architecture, and for a folder that holds something else.
    """
    tensors, ranks = {}, {}
    for module, sites in group_sites(model).items():
        lora_A, lora_B = _gather(model, module, sites)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = lora_A.T.contiguous()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = lora_B.T.contiguous()
        ranks[".".join(module.split(".")[-2:])] = lora_A.shape[1]
    layer = next(iter(model.adapters.values()))
    rank, scaling = layer.lora_A.shape[1], float(layer.scaling)
    other_ranks = {name: found for name, found in ranks.items() if found != rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _name_base(model.base.cfg.model_name),
        "r": rank,
        "lora_alpha": _calc_alpha(scaling, rank),
        "rank_pattern": other_ranks,
        "alpha_pattern": {name: _calc_alpha(scaling, found) for name, found in other_ranks.items()},
        "target_modules": sorted(ranks),
        "fan_in_fan_out": _is_gpt2(model),  # its Conv1D keeps W [d_in d_out]
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with _write_export(folder) as new:
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        _save_tokenizer(model.base.cfg.model_name, new, prepend_bos)


def _name_base(source: str) -> str:
    """Return the name by which others find a base: on the hub, in the course, or a folder."""
    if not Path(source).is_dir():
        return source
    folder = Path(source).resolve()
    for name, known in MODELS.items():
        if folder == (get_models_folder() / name).resolve():
            return known.hub
    return str(folder.relative_to(ROOT)) if folder.is_relative_to(ROOT) else str(folder)


def _save_tokenizer(source: str, folder: Path, prepend_bos: bool) -> None:
    """Save a base's tokenizer, which puts the bos before a text where training put it.

    A text that a chat template wrote stays as it is: it is encoded without special tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    bos, backend = tokenizer.bos_token, getattr(tokenizer, "backend_tokenizer", None)
    does_prepend = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    if bos is not None and does_prepend != prepend_bos:
        require(backend is not None, f"the tokenizer of {source} should be a fast one, but is not")
        start = f"{bos} " if prepend_bos else ""
        backend.post_processor = TemplateProcessing(
            single=f"{start}$A",
            pair=f"{start}$A $B",
            special_tokens=[(bos, tokenizer.bos_token_id)],
        )
    tokenizer.save_pretrained(folder)


def _calc_alpha(scaling: float, rank: int) -> int | float:
    """Return the alpha of a rank, without the rounding error of dividing and multiplying."""
    alpha = float(f"{scaling * rank:.12g}")
    return int(alpha) if alpha.is_integer() else alpha


def load_peft_adapter(model: Any, folder: str | Path) -> None:
    """Read into a `TransformerWithLora` what `save_peft_adapter`, PEFT or TRL wrote.

    Nothing but the adapters is changed, and nothing at all unless everything fits.

    Raises ValueError for a folder without PEFT's configuration, for options that the course doesn't
    have (DoRA, rsLoRA, trained biases, ...), for other sites, ranks or alpha / rank, and for an
    adapter on GPT-2's `c_attn` that isn't three adapters of this rank; OSError or SafetensorError
    for weights that are missing or damaged.
    """
    groups, folder = group_sites(model), Path(folder)
    config, tensors = _read_config(folder), load_file(folder / WEIGHTS)
    names = {f"{PREFIX}{module}.lora_{which}.weight" for module in groups for which in "AB"}
    missing, unknown = sorted(names - tensors.keys()), sorted(tensors.keys() - names)
    require(
        not missing and not unknown,
        f"the adapter should have this model's sites, but {len(missing)} tensors are missing "
        f"{missing[:4]} and {len(unknown)} are unknown {unknown[:4]}",
    )
    state: dict[str, Tensor] = {}
    for module, sites in groups.items():
        lora_A, lora_B = (tensors[f"{PREFIX}{module}.lora_{which}.weight"].T for which in "AB")
        expected = [list(own.shape) for own in _gather(model, module, sites)]
        found = [list(lora_A.shape), list(lora_B.shape)]
        require(
            found == expected,
            f"A and B of {module} should be {expected}, of {len(sites)} times this model's rank, "
            f"but are {found}" + FUSED * module.endswith(".c_attn"),
        )
        alphas = config.alpha_pattern or {}
        alpha = alphas.get(get_pattern_key([*alphas], module), config.lora_alpha)
        scaling = alpha / lora_A.shape[1]
        own_scaling = float(model.adapters[sites[0]].scaling)
        require(
            math.isclose(scaling, own_scaling),
            f"alpha / rank of {module} should be {own_scaling}, but is {scaling}",
        )
        parts = zip(sites, lora_A.chunk(len(sites), 1), lora_B.chunk(len(sites)), strict=True)
        for site, part_A, part_B in parts:
            before, after = _calc_margins(module, site, model.adapters[site].lora_B.shape[1])
            block = F.pad(part_B, (-before, -after))  # negative margins are cut off
            require(
                torch.equal(F.pad(block, (before, after)), part_B),
                f"lora_B of {module} should be block diagonal, but is not{FUSED}",
            )
            state |= {f"{site}.lora_A": part_A, f"{site}.lora_B": block}
    model.load_trainable_state(model.trainable_state() | state)


def _read_config(folder: Path) -> LoraConfig:
    """Read an adapter's configuration with PEFT, which would look for a folder that isn't here on
    the hub."""
    require(folder.is_dir(), f"folder should hold a PEFT adapter, but {folder} is not there")
    config, plain = PeftConfig.from_pretrained(str(folder)), LoraConfig()
    kind = type(config).__name__
    require(isinstance(config, LoraConfig), f"the adapter should be of LoRA, but has {kind}")
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    odd = {k: v for k, v in given.items() if k not in OPEN and v != getattr(plain, k)}
    require(not odd, f"the adapter should use only options that the course has, but sets {odd}")
    start = config.init_lora_weights
    require(
        start in STARTS,
        f"init_lora_weights should be among {list(STARTS)}, as others change the base's weights, "
        f"but is {start!r}",
    )
    return config


# --- A checkpoint of its own ----------------------------------------------------------------------


@torch.no_grad()
def save_merged(model: Any, folder: str | Path, prepend_bos: bool = True) -> None:
    """Write a plain Hugging Face checkpoint with W + A B alpha / rank in place of W.

    The sum is rounded to the base's dtype once. Config, tokenizer and generation config are the
    base's own, which are read again where it came from; its weights are those in memory, which
    stay as they are. A value head is left out. prepend_bos: whether prompts began with a bos.

    Raises ValueError for another architecture, and for a folder that holds something else.
    """
    groups, base = group_sites(model), model.base
    source = base.cfg.model_name
    require(
        Path(folder).resolve() != Path(source).resolve(),
        f"folder should be a new one, but {folder} holds the base",
    )
    with _write_export(folder) as new:
        dtype = next(base.parameters()).dtype
        plain: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        held = base.original_model.state_dict()
        weights = {name.replace("._original_component", ""): held[name] for name in held}
        plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
        for module, sites in groups.items():
            lora_A, lora_B = _gather(model, module, sites)
            delta = lora_A @ lora_B * float(model.adapters[sites[0]].scaling)  # [d_in d_out]
            linear = plain.get_submodule(module)
            delta = delta if isinstance(linear, Conv1D) else delta.T
            linear.weight.copy_(linear.weight + delta)  # added in the adapters' dtype
        plain.save_pretrained(new)
        _save_tokenizer(source, new, prepend_bos)


@contextmanager
def _write_export(folder: str | Path) -> Iterator[Path]:
    """Yield a new folder as `write_folder` does, and list in it what it holds.

    Raises ValueError where `folder` holds anything but an earlier export.
    """
    folder = Path(folder).expanduser().resolve()
    if folder.exists():
        require(folder.is_dir(), f"folder should be a folder to write, but {folder} is a file")
        contents = folder / CONTENTS
        own = {CONTENTS, *contents.read_text().splitlines()} if contents.is_file() else set()
        others = sorted(path.name for path in folder.iterdir() if path.name not in own)
        require(
            not others,
            f"folder should be new, or an earlier export, but {folder} holds {others[:4]}",
        )
    with write_folder(folder) as new:
        yield new
        (new / CONTENTS).write_text("".join(f"{path.name}\n" for path in sorted(new.iterdir())))


# --- The command ----------------------------------------------------------------------------------


def read_run(path: str | Path) -> tuple[Parts, list[str], dict[str, Any]]:
    """Load the base of a run, and its adapters, or those of a file in it; name its tensors that
    belong to no adapter, as those of a value head, and give its arguments.

    The base is the one that the run's arguments name: a model that the trainer was handed beside
    them is not recorded.

    Raises ValueError if the checkpoint is missing or damaged, or does not fit the base.
    """
    trained, args = read_trained(path)
    require(args, f"path should lie in a run's folder, but {path} has no checkpoint.pt beside it")
    base, rank = load_base_model(args["base_model"], "cpu", args.get("dtype")), args["lora_rank"]
    scaling = args["lora_alpha"] / rank
    names = [name for name in trained if name.endswith((".lora_A", ".lora_B"))]
    adapters = {}
    for site in dict.fromkeys(name.rpartition(".")[0] for name in names):
        lora_A, lora_B = trained[f"{site}.lora_A"], trained[f"{site}.lora_B"]
        linear: Any = base.get_submodule(site).original_component
        expected = [*sorted(linear.weight.shape), rank, rank]  # GPT-2 has [d_in d_out], others not
        found = [*sorted((len(lora_A), lora_B.shape[1])), lora_A.shape[1], len(lora_B)]
        require(
            found == expected,
            f"sizes and ranks at {site} should be {expected}, of {args['base_model']!r} and the "
            f"run's lora_rank, but are {found}",
        )
        adapters[site] = SimpleNamespace(lora_A=lora_A, lora_B=lora_B, scaling=scaling)
    return Parts(base, adapters), [name for name in trained if name not in names], args


# By name: what saves it, the class that loads it, and that class's library.
FORMATS: dict[str, tuple[Callable[..., None], str, str]] = {
    "peft": (save_peft_adapter, "AutoPeftModelForCausalLM", "peft"),
    "merged": (save_merged, "AutoModelForCausalLM", "transformers"),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m utils.models.export", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("run", type=Path, metavar="RUN",
                        help="a run's folder, or its best.safetensors")  # fmt: skip
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder, or an earlier export")
    what = "adapters beside their base, or one model that needs no PEFT"
    parser.add_argument("--format", choices=FORMATS, required=True, help=what)
    args = parser.parse_args(arguments)
    try:
        parts, left_out, of_run = read_run(args.run)
        save, kind, library = FORMATS[args.format]
        save(parts, args.out, of_run.get("prepend_bos", True))
    except (OSError, ValueError, SafetensorError) as error:
        parser.exit(1, f"error: {error}\n")
    if left_out:
        print(f"Left out, as the format has no place for a head: {', '.join(left_out)}.")
    print(f"{args.out} holds the {len(parts.adapters)} adapters of {args.run}, as {args.format}.")
    sampling = {"top_k": of_run.get("top_k") or 0, "max_new_tokens": of_run["gen_len"]}
    sampling["temperature"] = of_run["temperature"]
    habits = parts.base.original_model.generation_config  # which training does not follow
    sampling |= {k: v for k, v in NEUTRAL.items() if getattr(habits, k, None) not in (None, v)}
    listed = ", ".join(f"{name}={value}" for name, value in sampling.items())
    dtype = str(of_run.get("dtype") or "float32").removeprefix("torch.")
    inputs = 'inputs = tokenizer("your prompt", return_tensors="pt")'
    if str(of_run.get("prompts")).startswith("[["):  # chats, as a checkpoint describes them
        inputs = """chat = [{"role": "user", "content": "your prompt"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )"""
    name = Path(_name_base(parts.base.cfg.model_name))
    is_ours = args.format == "peft" and not name.is_absolute() and (ROOT / name).is_dir()
    where = ", in the course's folder, where its base lies" if is_ours else ""
    print(f"""To load it{where}, and sample as in training (top_k=0 keeps every token):
    from transformers import AutoTokenizer
    from {library} import {kind}
    tokenizer = AutoTokenizer.from_pretrained({str(args.out)!r})
    model = {kind}.from_pretrained({str(args.out)!r}, dtype="{dtype}")
    {inputs}
    ids = model.generate(**inputs, do_sample=True, {listed})
    print(tokenizer.decode(ids[0], skip_special_tokens=True))""")


if __name__ == "__main__":
    main()
