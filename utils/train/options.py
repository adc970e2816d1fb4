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
from utils.run_folder import load_checkpoint
from utils.train.data import WeightedRewards, load_function, load_rows
from utils.validation import require


def read_comments(args_class: type) -> dict[str, str]:
    """Return the comment at the end of each field's line, which is its help."""
    found: dict[str, str] = {}
    for one in reversed(args_class.__mro__[:-1]):
        lines = re.findall(r"^ +(\w+): .*?  # (.+)$", inspect.getsource(one), re.MULTILINE)
        found |= dict(lines)
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


def say(help: str) -> Any:
    return arg(help=help)


Data = Annotated[
    str | None,
    say("Prompts, and columns for the reward: a .jsonl or .txt file, or module:function."),
]
Dtype = Annotated[
    Literal["float32", "bfloat16"] | None,
    say("The type of the base's weights; None is bfloat16 on a GPU that has it, else float32."),
]
Adapter = Annotated[
    Path | None,
    say("Begin with the adapters of this run or file; the KL stays that from the base."),
]
Config = Annotated[
    Path | None, say("A YAML or JSON file of options by name; the command line wins.")
]


@dataclass(kw_only=True)
class Options:
    """Hold what the command has in place of arguments that are Python values, and more."""

    data: Data = None
    reward: Annotated[
        list[str],
        say("module:function, one or several, added up; if none, chapter 2's sentiment."),
    ] = field(default_factory=list)
    reward_weights: Annotated[
        list[float],
        say("A weight for each reward, in order, as 1 0.5 (0: only measured); if none, all are 1."),
    ] = field(default_factory=list)
    eval_data: Annotated[
        str | None,
        say("Held-out prompts, like --data: the run measures their mean reward."),
    ] = None
    eval_every: Annotated[
        int, say("Phases between evaluations; there's one before the first and after the last too.")
    ] = 10
    eval_samples: Annotated[int, say("Completions of each held-out prompt.")] = 1
    patience: Annotated[
        int | None,
        say("Stop after this many evaluations without a better mean reward; None never does."),
    ] = None
    stop: Annotated[
        list[str],
        say("Texts that end a completion and are learnt with it; \\n is a new line."),
    ] = field(default_factory=list)
    weights_dtype: Dtype = None
    microbatch_size: Annotated[
        int | None, say("Completions to learn from at a time, to save memory; None is all.")
    ] = None
    checkpointing: Annotated[
        bool, say("Compute each block twice to keep less of it in memory.")
    ] = False
    trainer: Annotated[
        str | None,
        say("module:class, such as solutions.ch5_rlvr:RlvrTrainer; its arguments are options too."),
    ] = None
    adapter: Adapter = None
    config: Config = None
    resume: Annotated[
        Path | None,
        say("Go on with the run of this folder, whose options are the defaults then."),
    ] = None

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
        columns.append((f.name, Annotated[kind, say(text)], default))
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


def find_run(path: str | Path) -> Path:
    """Return the folder of a run, which may be given by a file in it."""
    path = Path(path).expanduser()
    return path.parent if path.suffix in (".pt", ".safetensors") else path


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
