"""The command's options: those of a trainer's arguments, each with its help, and its own."""

import inspect
import re
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import torch
from tyro.conf import arg

from solutions.ch2_ppo import RLHFArgs
from solutions.ch3_grpo import GrpoArgs
from utils.run_folder import find_run, load_checkpoint
from utils.train.data import WeightedRewards, load_function, load_rows
from utils.validation import require


def read_comments(args_class: type) -> dict[str, str]:
    """Return the help of each field: the comment that ends its line, or one above it with "#:"."""
    found: dict[str, str] = {}
    for one in reversed(args_class.__mro__[:-1]):
        source = inspect.getsource(one)
        found |= dict(re.findall(r"^ +(\w+): .*?  # (.+)$", source, re.MULTILINE))
        found |= {name: said for said, name in re.findall(r" #: (.+)\n +(\w+): ", source)}
    return found


# Help for arguments whose comment is missing, or speaks to readers of the code.
HELP = read_comments(RLHFArgs) | {
    "wandb_project_name": "The project's name there.",
    "wandb_entity": "The account or team there; None is your own.",
    "base_model": "'embedded', a local folder, or a name on the Hugging Face hub.",
    "lora_rank": "The rank of the adapters, the part that's trained.",
    "lora_alpha": "Adapters are scaled by this number divided by the rank.",
    "lora_sites": "Layers that get adapters: attn.q, .k, .v and .o; mlp.in, .out and .gate.",
    "device": "cpu, cuda or mps; None takes a GPU if there is one.",
    "prefix": "The prompt of every completion if there's no --data.",
    "batch_size": "Completions in a rollout, over all processes: whole groups in each minibatch.",
    "temperature": "Logits are divided by it, in sampling and in log-probs alike.",
    "top_k": "Sample only from this many of the likeliest tokens: off-policy then (chapter 9).",
    "top_p": "Sample only from the likeliest tokens that add up to this: off-policy, too.",
    "prepend_bos": "Begin prompts with the tokenizer's bos, unless a chat template wrote them.",
    "num_minibatches": "Parts into which learning cuts a rollout; each is one update.",
    "max_grad_norm": "Gradients are scaled down to this norm.",
    "clip_coef": "How far below 1 ratios are clipped; in a fresh rollout's first update they're 1.",
    "clip_coef_high": "How far above 1 a ratio is clipped; None is as below.",
    "ent_coef": "The weight of the entropy bonus, in nats per token.",
    "kl_coef": "The price of the KL from the base, in nats per token.",
    "kl_in": "Charge the exact KL in the loss, or its estimate k1 in each token's reward.",
    "gamma": "What a reward one token later is worth.",
    "lam": "The lambda of generalised advantage estimation.",
    "vf_coef": "The weight of the value loss.",
    "vf_clip_coef": "How far a value may move in one phase; None is any distance.",
    "advantage_scale": "Divide by the group's std, the batch's (when length has a price), or 1.",
    "kl_kind": "The estimate k3 of the KL, or the exact one over the whole vocabulary.",
    "environment": "module:function that gets a turn's text and returns what follows, or None.",
    "advantage_kind": "Compare with the group's mean, or with the mean of the others (RLOO).",
    "loss_mode": "Mean per completion (GRPO), over tokens (DAPO), or by gen_len (Dr. GRPO).",
    "ratio_level": "The ratio of each token, or of the whole completion (GSPO).",
    "dynamic_sampling": "Keep sampling until every group has two different rewards (DAPO).",
    "max_extra_rollouts": "The most batches that dynamic sampling may add.",
    "truncation": "What is cut off at gen_len is kept, masked out, or pays the penalty.",
    "kl_estimator": "The estimate of the KL: k1, k2, k3 or k4.",
    "pick_temperature": "A low one picks the best of the pool, a high one picks at random.",
    "baseline": "The advantages are against the mean of the whole pool, or of what is kept.",
    "refresh_every": "Phases from one refreshed reference to the next; 0 keeps the first.",
    "correction": "How the objective corrects for a policy that isn't the sampler.",
    "cap": "The highest ratio that a correction lets through.",
    "weights_dtype": "The type of the base's weights; None is bfloat16 on a GPU that has it, "
    "else float32.",
    "adapter": "Begin with the adapters of this run or file; the KL stays that from the base.",
    "config": "A YAML or JSON file of options by name; the command line wins.",
    "sampler_bits": "Bits to which the sampler's weights are rounded; None rounds nothing.",
}
# What nothing reads without another option.
NEEDED = {
    "eval_data": ("eval_every", "eval_samples", "patience"),
    "environment": ("turn_end", "max_calls", "environment_seconds"),
}
GIVEN_OTHERWISE = {"prompts", "columns", "reward_fn", "dtype"}
# What GRPO has no use for: it trains no values, and its KL is in the loss.
OF_PPO = {"kl_in", "normalize_reward", "gamma", "lam", "head_lr", "vf_coef", "vf_clip_coef"}


def explained(command: Any) -> Any:
    """Give each field of a dataclass its help: the comment beside it, else that of `HELP`."""
    comments = HELP | read_comments(command)
    kinds = get_type_hints(command, include_extras=True)
    command.__annotations__ = {
        f.name: Annotated[kinds[f.name], arg(help=comments[f.name])] for f in fields(command)
    }
    return command


Dtype = Literal["float32", "bfloat16"]


@explained
@dataclass(kw_only=True)
class Options:
    """Hold what the command has in place of arguments that are Python values, and more."""

    #: Prompts, and columns for the reward: a .jsonl or .txt file, or module:function.
    data: str | None = None
    #: module:function, one or several, added up; if none, chapter 2's sentiment.
    reward: list[str] = field(default_factory=list)
    #: A weight for each reward, in order, as 1 0.5 (0: only measured); if none, all are 1.
    reward_weights: list[float] = field(default_factory=list)
    #: Held-out prompts, like --data: the run measures their mean reward.
    eval_data: str | None = None
    #: Phases between evaluations; there's one before the first and after the last too.
    eval_every: int = 10
    #: Completions of each held-out prompt.
    eval_samples: int = 1
    #: Stop after this many evaluations without a better mean reward; None never does.
    patience: int | None = None
    #: Texts that end a completion and are learnt with it; \n is a new line.
    stop: list[str] = field(default_factory=list)
    weights_dtype: Dtype | None = None
    #: Completions to learn from at a time, to save memory; None is all.
    microbatch_size: int | None = None
    #: Compute each block twice to keep less of it in memory.
    checkpointing: bool = False
    #: module:class, such as solutions.ch5_rlvr:RlvrTrainer; its arguments are options too.
    trainer: str | None = None
    adapter: Path | None = None
    config: Path | None = None
    #: Go on with the run of this folder, whose options are the defaults then.
    resume: Path | None = None

    def __post_init__(self):
        """Read \\n and \\t as a new line and a tab, and make the paths of files and of a local base
        absolute, so that a run is resumed from any folder."""
        self.stop = [text.replace("\\n", "\n").replace("\\t", "\t") for text in self.stop]
        for name in ("data", "eval_data"):
            given = getattr(self, name)
            if given is not None and ":" not in given:
                setattr(self, name, str(Path(given).expanduser().absolute()))
        base = getattr(self, "base_model", None)
        if base is not None and (folder := Path(base).expanduser()).is_dir():
            self.base_model = str(folder.absolute())

    def read_rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of `data` or of `eval_data`; its errors name the option."""
        path = getattr(self, name)
        try:
            return load_rows(path)
        except ValueError as error:
            said = re.sub(r"^data\b", name, str(error))
            if self.resume is not None and ":" not in path and not Path(path).is_file():
                said += f". It's where the run had it: if it has moved, --{name.replace('_', '-')}"
            raise ValueError(said) from error

    def read_evaluation_rows(self, columns: dict[str, list]) -> list[dict[str, Any]]:
        """Return the held-out rows; raises ValueError if they lack a column of the data."""
        rows = self.read_rows("eval_data")
        missing = sorted(columns.keys() - rows[0].keys())
        require(not missing, f"eval_data should have the columns of data, but lacks {missing}")
        return rows


def make_command(name: str, args_class: type[RLHFArgs], doc: str) -> type[Options]:
    """Make the options of a trainer's arguments, without those that it doesn't read."""
    hidden = GIVEN_OTHERWISE | (OF_PPO if issubclass(args_class, GrpoArgs) else set())
    kinds = get_type_hints(args_class, include_extras=True)
    comments = read_comments(args_class)
    columns: list[Any] = []
    for f in fields(args_class):
        if f.name in hidden:
            continue
        kind = kinds[f.name]
        if "Callable" in str(kind):
            kind = str | None  # module:function
        elif kind == Literal[True, False]:
            kind = bool
        default = f.default
        if f.default_factory is not MISSING:
            default = field(default_factory=f.default_factory)
        text = HELP.get(f.name) or comments.get(f.name, "An argument of this trainer's own.")
        columns.append((f.name, Annotated[kind, arg(help=text)], default))
    given = {"__doc__": doc, "args_class": args_class}
    return make_dataclass(name, columns, bases=(Options,), namespace=given, kw_only=True)


PpoCommand = make_command("PpoCommand", RLHFArgs, "Train by PPO, with a value head.")
GrpoCommand = make_command(
    "GrpoCommand", GrpoArgs, "Train by GRPO, with groups of completions in place of a value head."
)


def make_args(command: Any) -> RLHFArgs:
    """Turn the options into the trainer's arguments; raises ValueError where one is wrong."""
    known = {f.name for f in fields(command.args_class)} & {f.name for f in fields(command)}
    values = {name: getattr(command, name) for name in known}
    defaults = {f.name: f.default for f in fields(command)}
    for needed, names in NEEDED.items():
        changed = [n for n in names if getattr(command, n, None) != defaults.get(n)]
        require(
            getattr(command, needed, None) is not None or not changed,
            f"{' and '.join(changed)} should be given with {needed}, which is missing",
        )
    if isinstance(values.get("environment"), str):
        values["environment"] = load_function(values["environment"])
    if command.data is not None:
        require(
            getattr(command, "prefix", None) == defaults.get("prefix"),
            "prefix should not be given beside data, which has the prompts",
        )
        rows = command.read_rows("data")
        values["prompts"] = [row["prompt"] for row in rows]
        values["columns"] = {k: [row[k] for row in rows] for k in rows[0] if k != "prompt"}
    weights = command.reward_weights
    if len(command.reward) == 1 and not weights:
        values["reward_fn"] = load_function(command.reward[0])
    elif command.reward or weights:
        values["reward_fn"] = WeightedRewards(command.reward, weights)
    if command.weights_dtype is not None:
        values["dtype"] = getattr(torch, command.weights_dtype)
    return command.args_class(**values)


def find_adapter(path: Path) -> Path:
    """Return the file of the adapters that are given by a run or a file.

    Raises ValueError for a run that changed its base, to which its adapters belong.
    """
    checkpoint = find_run(path) / "checkpoint.pt"
    require(
        not checkpoint.is_file() or "base" not in load_checkpoint(checkpoint),
        f"adapter should be of a run that left its base as it was, but that of {path} refreshed "
        "its reference",
    )
    path = path.expanduser()
    return path if path.suffix == ".safetensors" else path / "adapter.safetensors"
