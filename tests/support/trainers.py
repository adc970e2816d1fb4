"""Trainers in a known state, for the checks of chapters 2 and 3, and oracles of plain Hugging Face.

The order of `trainable_parameters()` is free, so parameters of one shape get the same values, and
what is observed of them is sorted.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from solutions.ch0_sampling import Samples, sample_completions
from solutions.ch1_lora import TransformerWithLora
from tests.support import models
from tests.support.inputs import NAN, poison, ragged_mask
from utils.models.forward import get_scorer
from utils.models.loading import load_base_model

RANK = 3  # no other size of the small models: it tells adapters from the value head
# One with blanks around it, one with a pad token inside.
PROMPTS = ["This movie is", "A.", "The plot was dull, and", "So", " It ", "Not bad", "Yes,"]
PROMPTS += ["In<pad> all"]
IN_FLOAT32 = {"float64": False, "rtol": 1e-3, "atol": 1e-3}  # a check of whole models


def fill(model: nn.Module, rng) -> nn.Module:
    """The same random values in every trainable parameter of one shape; lora_B is not 0."""
    for parameter in model.trainable_parameters():
        shape = tuple(parameter.shape)
        generator = torch.Generator().manual_seed(rng.seed % 2**31 + sum(shape))
        draws = torch.randn(shape, generator=generator, dtype=torch.float32)
        parameter.data.copy_((0.03 if shape[0] == RANK else 0.2) * draws)
    return model


def make_end_likely(model: nn.Module) -> None:
    """Change the base, a GPT-2, in place: nearly every completion is eos alone, one column."""
    gpt2 = model.base.original_model
    bias = gpt2.transformer.ln_f.bias.data
    gpt2.transformer.ln_f.weight.data *= 0.1  # which leaves little but a constant
    gpt2.lm_head.weight.data[models.SPECIAL["eos_token_id"]] += 15 * bias / bias.square().sum()


def copy_arguments(args: Any) -> dict[str, Any]:
    """A trainer's arguments by name."""
    is_declared = dataclasses.is_dataclass(args)
    names = [x.name for x in dataclasses.fields(args)] if is_declared else list(vars(args))
    return {name: copy.copy(getattr(args, name)) for name in names}


def list_changed(args: Any, before: dict[str, Any]) -> list[str]:
    """The names of the arguments that are not as `copy_arguments` found them."""
    return [name for name, value in before.items() if getattr(args, name) != value]


def set_gradients(parameters: list[Tensor], rng) -> None:
    """Random gradients, large and tiny in turn; parameters of one shape may change places."""
    draw, counts = rng.integer(0, 10**6), {}
    for parameter in parameters:
        shape = tuple(parameter.shape)
        counts[shape] = count = counts.get(shape, 0) + 1
        generator = torch.Generator().manual_seed(draw + 1000 * sum(shape) + count)
        scale = 1.0 if count % 2 else 1e-5
        gradient = scale * torch.randn(shape, generator=generator, dtype=torch.float32)
        parameter.grad = gradient.to(parameter.dtype)


def roll_out_before(trainer: Any, rng) -> None:
    """A rollout with adapters of zero; then the weights are those of `make_model` again."""
    with torch.no_grad():
        for parameter in trainer.model.trainable_parameters():
            parameter.zero_()
    trainer.rollout_phase()
    fill(trainer.model, rng)


def make_model(
    model_class: type,
    rng,
    kind: str = "shallow",
    dtype: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """What `model_class.from_pretrained` gives, on a base of its own, filled by `rng`."""
    base = load_base_model(models.get_checkpoint(kind), "cpu", dtype or rng.dtype)
    return fill(model_class(base, RANK, **options), rng)


def canonical(tensors: list[Tensor]) -> dict[str, Tensor]:
    """Tensors whose order is free, by shape, and within a shape by a random projection."""
    by_shape: dict[tuple[int, ...], list[Tensor]] = {}
    for tensor in tensors:
        by_shape.setdefault(tuple(tensor.shape), []).append(tensor.detach())
    found = {}
    for shape in sorted(by_shape):
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(shape, generator=generator, dtype=torch.double)
        ordered = sorted(by_shape[shape], key=lambda x: float((x.double() * direction).sum()))
        found[describe_parameter(shape)] = torch.stack(ordered)
    return found


def describe_parameter(shape: tuple[int, ...]) -> str:
    """What a trainable parameter of this shape is, in words."""
    if len(shape) == 2 and RANK in shape:
        return f"the lora_{'A' if shape[1] == RANK else 'B'} of shape {list(shape)}"
    heads = {(1,): "the value head's bias", (1, models.D_MODEL): "the value head's weight"}
    return heads.get(shape, f"the weight of shape {list(shape)}")


def adapter_gradients(objective: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """d objective / d trainable parameter, zeros where there is none, or no objective."""
    parameters = list(model.trainable_parameters())
    n_left = sum(p.grad is not None for p in parameters)
    if isinstance(objective, Tensor) and objective.requires_grad:
        found = torch.autograd.grad(objective.sum(), parameters, allow_unused=True)
    else:
        found = [None] * len(parameters)
    pairs = zip(found, parameters, strict=True)
    gradients = canonical([torch.zeros_like(p) if g is None else g for g, p in pairs])
    named = {f"the gradient for {name}": g for name, g in gradients.items()}
    return named | {"the number of gradients left in .grad": n_left}


def make_samples(
    rng, rows: int = 6, prompt_len: int = 4, completion: int = 5, empty_row: bool = True
) -> Samples:
    """Random ids, left-padded prompts of different lengths, a ragged completion mask."""
    mask = ragged_mask(rng, rows, completion)
    if not empty_row:
        mask[:, 0] = True
    pads = rng.integers(0, prompt_len, rows)
    # After a completion the attention is on: what is trained on is the mask's business alone.
    prompt = torch.arange(prompt_len) >= pads[:, None]
    attention = torch.cat([prompt, torch.ones_like(mask)], dim=1).long()
    ids = rng.integers(0, 512, rows, prompt_len + completion)
    # The pad, bos and eos ids are tokens like any other: the masks say what counts.
    ids = ids.where(rng.uniform(*ids.shape) < 0.7, ids % 3)
    return Samples(ids, attention, prompt_len, mask, [f"text {i}" for i in range(rows)])


@torch.no_grad()
def draw_logprobs(rng, samples: Samples, temperature: float, std: float = 0.5) -> Tensor:
    """Log-probs near those of the "shallow" model, so that ratios lie on both sides of a clip."""
    ids, attention = samples.input_ids, samples.attention_mask
    position_ids = (attention.cumsum(-1) - 1).clamp(min=0)
    hf = models.load_hf("shallow", rng.dtype)
    logits = hf(ids, attention_mask=attention, position_ids=position_ids).logits
    logprobs = score_rows(logits, ids, samples.prompt_len, temperature)
    return logprobs + rng.normal(*logprobs.shape, std=std)


def beyond(x: Tensor, mask: Tensor) -> Tensor:
    return poison(x, mask, NAN)


def inside(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where it counts, 0 elsewhere."""
    return x.masked_fill(~mask, 0.0)


# --- Oracles ------------------------------------------------------------------------------------


def run_hugging_face(
    model: nn.Module, kind: str, ids: Tensor, attention: Tensor, adapters: bool = True
) -> tuple[Tensor, Tensor]:
    """Logits and last hidden states of plain Hugging Face with the adapters of a reference model
    folded into its weights, differentiably."""
    hf = models.load_hf(kind, next(model.parameters()).dtype)
    weights = dict(hf.named_parameters())
    if adapters:
        for site, layer in model.adapters.items():
            delta = layer.lora_A @ layer.lora_B * layer.alpha / layer.rank  # [d_in d_out]
            models.fold(weights, site, delta, kind)
    position_ids = (attention.cumsum(-1) - 1).clamp(min=0)
    output = functional_call(
        hf,
        weights,
        (ids,),
        {
            "attention_mask": attention,
            "position_ids": position_ids,
            "output_hidden_states": True,
        },
    )
    return output.logits, output.hidden_states[-1]


def score_rows(logits: Tensor, ids: Tensor, prompt_len: int, temperature: float = 1.0) -> Tensor:
    """log p of each token after the prompt, with torch.distributions."""
    policy = torch.distributions.Categorical(logits=logits[:, prompt_len - 1 : -1] / temperature)
    return policy.log_prob(ids[:, prompt_len:])


def as_memory(**fields: Any) -> SimpleNamespace:
    """Return a memory of these fields, and with the width of the prompts if it has a mask."""
    if "mask" in fields:
        fields["prompt_len"] = fields["input_ids"].shape[1] - fields["mask"].shape[1]
    return SimpleNamespace(**fields)


# --- Rollouts -----------------------------------------------------------------------------------


class RecordingReward:
    """A reward function that keeps what it is given of a rollout, in one call or several; see
    `score_text`."""

    def __init__(self):
        self.start()

    def start(self):
        """The next call belongs to another rollout."""
        self.samples, self.prompts = [], []

    def __call__(self, samples, *, prompts):
        self.samples, self.prompts = self.samples + list(samples), self.prompts + list(prompts)
        return torch.tensor([score_text(*pair) for pair in zip(samples, prompts, strict=True)])


def score_text(text: str, prompt: str) -> float:
    """The prompt's part moves all of a group alike; many scores are above 10."""
    return 8.0 * text.count("a") + 0.75 * len(prompt)


def sample_again(trainer_class: type, make_args: Callable, model: nn.Module) -> dict[str, Any]:
    """The texts of three trainers, two with the same seed, and the first one's memory; whether
    gradients are recorded after a rollout whose rewards fail."""

    def fail(samples):
        raise ArithmeticError("no reward")

    with contextlib.suppress(Exception):  # the reward's own, or what is made of it
        trainer_class(make_args(seed=0, reward_fn=fail), model).rollout_phase()
    found = {"gradients after an error": torch.is_grad_enabled()}
    torch.set_grad_enabled(True)
    for name, seed in (("texts", 0), ("texts with the same seed", 0), ("texts with another", 6)):
        reward_fn = RecordingReward()
        torch.manual_seed(len(found))
        memory = trainer_class(make_args(seed=seed, reward_fn=reward_fn), model).rollout_phase()
        pairs = zip(reward_fn.prompts, reward_fn.samples, strict=True)
        found[name] = [prompt + text for prompt, text in pairs]
        if name == "texts":
            first = memory
    trained = {id(parameter) for parameter in model.trainable_parameters()}
    unfrozen = [p for p in model.parameters() if p.requires_grad and id(p) not in trained]
    return found | {"memory": first, "whether the base is frozen": not unfrozen}


def describe_first_ratio(sampled: dict[str, Any], model: nn.Module, gen_len: int) -> dict[str, Any]:
    """Of `sample_again`: the old log-probs, and those of the model as it is trained, by its logits
    and by what trainers score with."""
    memory = sampled.pop("memory")
    ids, attention = memory.input_ids, memory.attention_mask
    n_prompt = ids.shape[1] - memory.mask.shape[1]
    with torch.no_grad():
        logits = model(ids, attention)
        scored = get_scorer(model).measure(ids, attention, n_prompt).logprobs
    pairs = {
        "logprobs": memory.logprobs,
        "hooked": score_rows(logits.float(), ids, n_prompt),
        "scored": scored,
    }
    width = (0, gen_len - memory.mask.shape[1])
    padded = {name: F.pad(inside(x, memory.mask), width).float() for name, x in pairs.items()}
    return sampled | padded


def find_wrong_ratio(observed: dict, reference: dict) -> str | None:
    if not observed["whether the base is frozen"]:
        return "after a rollout, weights of the base require a gradient"
    if not observed["gradients after an error"]:
        return "after a rollout that failed, gradients are switched off for all that follows"
    off = min((observed["logprobs"] - observed[name]).abs().max() for name in ("hooked", "scored"))
    if off > 1e-3:
        return (
            f"the old log-probs are off by up to {off:.2g} from those of the model that is trained,"
            " so the first ratio is not 1: score with the hooked model, not the merged one"
        )
    if observed["texts"] != observed["texts with the same seed"]:
        return "args.seed should decide what is sampled"
    if observed["texts"] == observed["texts with another"]:
        return "another args.seed should sample other completions"
    return None


def get_prompt_len() -> int:
    """The columns of the longest prompt, with bos."""
    return 1 + max(len(models.load_tokenizer().encode(prompt)) for prompt in PROMPTS)


def describe_rollout(fields: dict[str, Tensor], gen_len: int) -> dict[str, Any]:
    """A memory's fields in one shape, whichever prompts were drawn and however soon rows ended:
    `get_prompt_len()` columns of prompt, then `gen_len` of completion."""
    fields = dict(fields)
    ids, attention, mask = (fields.pop(k) for k in ("input_ids", "attention_mask", "mask"))
    n_prompt = ids.shape[1] - mask.shape[1]
    real = torch.cat([attention[:, :n_prompt].bool(), mask], dim=1)
    left, right = get_prompt_len() - n_prompt, gen_len - mask.shape[1]
    found = {
        "ids": F.pad(ids * real, (left, right)),
        "attention": F.pad(real.long(), (left, right)),
        "mask": F.pad(mask, (0, right)),
        "fields with a gradient": {name: x.requires_grad for name, x in fields.items()},
    }
    for name, x in fields.items():
        found[name] = F.pad(inside(x, mask), (0, right)) if x.ndim == 2 else x
    return found


@torch.no_grad()
def rebuild_rollout(model_class: type, observed: dict, seed: int, args: Any) -> SimpleNamespace:
    """What plain Hugging Face says of the ids that were observed."""
    rng = SimpleNamespace(seed=seed, dtype=torch.float32)
    model = make_model(model_class, rng, "ending")
    ids, attention, n_prompt = observed["ids"], observed["attention"], get_prompt_len()
    logits, hidden = run_hugging_face(model, "ending", ids, attention)
    ref_logits, _ = run_hugging_face(model, "ending", ids, attention, adapters=False)
    rebuilt = SimpleNamespace(
        samples=Samples(ids, attention, n_prompt, observed["mask"], observed["texts"]),
        logits=logits[:, n_prompt - 1 : -1] / args.temperature,
        logprobs=score_rows(logits, ids, n_prompt, args.temperature),
        ref_logprobs=score_rows(ref_logits, ids, n_prompt, args.temperature),
    )
    if hasattr(model, "value_head"):
        values = hidden @ model.value_head.weight[0] + model.value_head.bias
        rebuilt.values = values[:, n_prompt - 1 : -1]
    return rebuilt


def find_wrong_sample(observed: dict, rebuilt: SimpleNamespace, args: Any) -> str | None:
    """What is wrong with the prompts, the completions, the mask or their distribution."""
    tokenizer = models.load_tokenizer()
    ids, mask, n_prompt = observed["ids"], observed["mask"], get_prompt_len()
    if carriers := [
        name for name, carries in observed["fields with a gradient"].items() if carries
    ]:
        return f"no field may carry a gradient, but {carriers} do"
    prompts = observed["prompts"]
    if len(set(prompts)) < 2:
        return "prompts should be drawn anew for each rollout; here all are one"
    if observed.get("texts of the first rollout", [])[-len(mask) :] == observed["texts"]:
        return "a second rollout should sample anew"
    if not torch.equal(mask, get_mask_by_loops(ids[:, n_prompt:])):
        return "the mask should be true up to and including the first eos"
    for row, (text, prompt) in enumerate(zip(observed["texts"], observed["prompts"], strict=True)):
        bos = [tokenizer.bos_token_id] if args.prepend_bos else []
        given = ids[row, :n_prompt][observed["attention"][row, :n_prompt].bool()].tolist()
        if prompt not in args.prompts or given != bos + tokenizer.encode(prompt):
            return "reward_fn should get each sample's own prompt"
        new = ids[row, n_prompt:][mask[row]]
        if text != tokenizer.decode(new, skip_special_tokens=True):
            return "reward_fn should get the completions, without prompt and special tokens"
    return find_misfit(ids[:, n_prompt:][mask], rebuilt.logits[mask], args.top_k)


def get_mask_by_loops(completion_ids: Tensor) -> Tensor:
    eos, rows = models.SPECIAL["eos_token_id"], []
    for ids in completion_ids.tolist():
        n = ids.index(eos) + 1 if eos in ids else len(ids)
        rows.append([t < n for t in range(len(ids))])
    return torch.tensor(rows)


def find_misfit(tokens: Tensor, logits: Tensor, top_k: int | None) -> str | None:
    """What is wrong with tokens drawn from `logits`, if anything is: their support, their mean
    surprise (beyond 8 standard deviations), how many of them are rare."""
    logits = logits.double()
    if top_k is not None:
        kth = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth - 1e-4, -torch.inf)
    policy = torch.distributions.Categorical(logits=logits)
    surprise = -policy.log_prob(tokens)
    if surprise.isinf().any():
        return f"a token was sampled that top_k {top_k} leaves out"
    logprobs = policy.logits.masked_fill(policy.probs == 0, 0.0)
    variance = (policy.probs * logprobs.square()).sum(-1) - policy.entropy().square()
    if (surprise - policy.entropy()).sum().abs() > 8 * variance.sum().sqrt():
        return "the tokens do not have the probabilities of the adapted policy at its temperature"
    # Too few draws from each distribution's tail of 5%, as from a nucleus: p < 1e-9.
    ordered, order = policy.probs.sort(descending=True)
    is_rare = (ordered.cumsum(-1) - ordered >= 0.95).gather(-1, order.argsort(-1))
    expected = (policy.probs * is_rare).sum(-1)
    n_drawn = is_rare.gather(-1, tokens[:, None]).sum()
    if expected.sum() - n_drawn > 6.2 * (expected * (1 - expected)).sum().sqrt():
        return "rare tokens are left out: sample from the whole distribution"
    return None


def count_full_stops(samples: list[str]) -> Tensor:
    """The reward of short runs, which learn it in a few phases."""
    return torch.tensor([float(text.count(".")) for text in samples])


def train_shortly(trainer_class: type, make_args: Callable[..., Any], rng, **options) -> dict:
    """What the embedded model samples before and after eight phases rewarded for full stops."""
    args = make_args(
        batch_size=32,
        num_minibatches=1,
        gen_len=10,
        total_phases=8,
        warmup_steps=0,
        base_lr=5e-3,
        kl_coef=0.0,
        reward_fn=count_full_stops,
        **options,
    )
    model = TransformerWithLora.from_pretrained("embedded", device="cpu")
    before = sample_ids(model, args.prefix, rng)
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        trainer_class(args, model).train()
    return {"before": before, "after": sample_ids(model, args.prefix, rng)}


def sample_ids(model, prompt: str, rng) -> Tensor:
    """64 completions of 12 tokens, 0 behind an end."""
    samples = sample_completions(model, [prompt] * 64, 12, generator=rng.new_generator())
    ids = samples.completion_ids * samples.completion_mask
    return F.pad(ids, (0, 12 - ids.shape[1]))


def find_no_learning(observed, reference):
    """The rewards before and after, by what the sampled ids say."""
    before, after = (
        sum(models.load_tokenizer().decode(row).count(".") for row in rows) / 64
        for rows in (reference["before"], observed["after"])
    )
    if after < 1.5 * before:
        return (
            f"the mean number of full stops went from {before:.2f} to {after:.2f}, where training "
            f"should bring it to {1.5 * before:.2f} at least"
        )
    return None
