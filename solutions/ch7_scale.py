"""Chapter 7: memory, batches, many devices, and the library that takes over.

Builds what a run needs that outgrows one process: an account of the memory, gradients that are
accumulated or recomputed, data-parallel trainers, a sharded model, the arguments of TRL's trainer
for the same step, and a reference that is refreshed.

Simplified: gradients are synchronised once after the backward pass, not while it runs; a sharded
model trains and samples, but no trainer of this course shards; no tensor or pipeline parallelism.

Sources: ZeRO (Rajbhandari et al., 2019, arXiv:1910.02054); recomputation (Chen et al., 2016,
arXiv:1604.06174); FSDP (Zhao et al., 2023, arXiv:2304.11277); GRPO's outer loop (Shao et al., 2024,
arXiv:2402.03300, algorithm 1); the documentation of `torch.distributed` and of TRL 1.16.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from solutions.ch0_sampling import Samples, masked_mean
from solutions.ch1_lora import TransformerWithLora, make_lora_hooks
from solutions.ch2_ppo import ReplayMemory, ReplayMinibatch, RLHFArgs, RLHFTrainer
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch5_rlvr import aggregate_tokens
from utils.models.forward import NativeScorer, Scores, get_scorer, recomputing
from utils.tracking import Run
from utils.validation import CountOrZero, require, shape_checked

# --- Memory -------------------------------------------------------------------------------------


def estimate_memory(
    n_params: int,
    n_trainable: int,
    n_layers: int,
    d_model: int,
    n_heads: int,
    d_vocab: int,
    batch: int,
    seq: int,
    completion: int,
    mlp_adapters: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, int]:
    """Estimate the bytes at the peak of one update of a GPT-2 with adapters, by cause.

    "weights": the n_params in `dtype`. "gradients": of the n_trainable. "optimizer": Adam's two
    moments of them. Both are at least in float32, as adapters are. "activations": what the blocks
    keep for the backward pass, and the last layer norm's input. "attention": the patterns.
    "logits": those of the model, and three times the completion's, at least in float32.
    """
    size, exact = dtype.itemsize, max(dtype.itemsize, 4)
    tokens = batch * seq
    # The inputs of q, k, v (one, unless a cast makes three of it) and of o, and of the MLP.
    adapter_inputs = (2 if size == exact else 4) + (5 if mlp_adapters else 0)
    per_layer = (9 * size + adapter_inputs * exact) * tokens * d_model
    return {
        "weights": n_params * size,
        "gradients": n_trainable * exact,
        "optimizer": n_trainable * 2 * exact,
        "activations": n_layers * per_layer + tokens * d_model * size,
        "attention": n_layers * batch * n_heads * seq**2 * size,
        "logits": (tokens + 3 * batch * completion) * d_vocab * exact,
    }


def accumulate_gradients(
    model: nn.Module,
    microbatches: list[ReplayMinibatch],
    calc_per_token: Callable[[nn.Module, ReplayMinibatch], Float[Tensor, "rows completion"]],
    mode: str = "sequence",
    max_len: int | None = None,
) -> float:
    """Add the gradient of one batch to `.grad`, a microbatch at a time, and return the objective.

    `calc_per_token(model, microbatch)` gives the objective of each token; `aggregate_tokens` makes
    one number of them, in the same `mode`, as if all microbatches were one batch. They may have
    different numbers of rows and of tokens. Each is freed before the next one runs. Without any
    token the objective is 0, and so are its gradients.
    """
    counts = [int(m.mask.sum()) if mode == "token" else len(m.mask) for m in microbatches]
    total = 0.0
    for microbatch, count in zip(microbatches, counts, strict=True):
        per_token = calc_per_token(model, microbatch)
        objective = aggregate_tokens(per_token, microbatch.mask, mode, max_len)
        share = objective * (count / max(sum(counts), 1))
        share.backward()
        total += share.item()
    return total


def run_lean(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a block of a bridge and keep nothing: no cache, and no attention pattern."""

    def drop_cache(x: Any) -> Any:  # recomputed, a block would append to it a second time
        return None if isinstance(x, Cache) else x

    args = tuple(map(drop_cache, args))
    kwargs = {name: drop_cache(x) for name, x in kwargs.items()}
    try:
        return type(block).forward(block, *args, **kwargs)
    finally:  # recomputation leaves a block by an exception, as soon as it has what it needs
        block.attn._pattern = None


@contextmanager
def checkpoint_blocks(model: TransformerWithLora) -> Iterator[TransformerWithLora]:
    """Make the forward pass inside keep only the input of each block, and the backward pass compute
    the block anew.

    Gradients are the same bit for bit. Both passes have to be inside: the adapters' hooks are on
    until it is left. Afterwards, also after an error inside, the model is as it was. It does not
    nest with `reference()` and `merged()`.
    """
    adapters = model.adapters.items()
    hooks = [hook for site, layer in adapters for hook in make_lora_hooks(site, layer)]
    with model._in_mode("checkpointed"), model.base.hooks(fwd_hooks=hooks):
        try:
            for block in model.base.blocks:
                run = functools.partial(run_lean, block)
                # An assignment would end in the block inside, to which a bridge hands it on.
                vars(block)["forward"] = functools.partial(checkpoint, run, use_reentrant=False)
            yield model
        finally:
            for block in model.base.blocks:
                vars(block).pop("forward", None)


# --- Many processes -----------------------------------------------------------------------------


@shape_checked
def global_masked_mean(
    values: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"],
    group: dist.ProcessGroup | None = None,
) -> Float[Tensor, ""]:
    """Average over the true positions of all ranks: the same number on every rank.

    Its gradients are such that their mean over the ranks is the gradient of that number, as
    `sync_gradients`, DDP and FSDP average. What is masked out may be NaN or inf and never leaks.
    Without any true position the mean is 0. In one process it is `masked_mean`.
    """
    if not dist.is_initialized():
        return masked_mean(values, mask)
    total = values.masked_fill(~mask, 0.0).sum()
    sums = torch.stack([total.detach().double(), mask.sum().double()])
    dist.all_reduce(sums, group=group)
    count = sums[1].clamp(min=1)
    share = total * dist.get_world_size(group) / count.to(total.dtype)
    mean = (sums[0] / count).to(total.dtype)
    return mean + (share - share.detach())  # the mean's value, the share's gradient


def sync_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None
) -> None:
    """Replace every `.grad` by its mean over the ranks, in one all-reduce.

    A parameter without a gradient on this rank counts as zeros, as others may have one.
    `parameters` may be a generator, which can be read only once. In one process nothing happens.
    """
    if not dist.is_initialized():
        return
    parameters = list(parameters)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


class DataParallel(RLHFTrainer):
    """Learn on all ranks as one, and on each a microbatch at a time: a base class to put before the
    trainer's.

    `args` describe the whole run: each rank samples its share of `batch_size`, whole groups, from
    its own seed. Gradients are averaged, metrics too, and rank 0 alone writes. Rewards, and
    advantages that are normalised over a batch, are normalised over a rank's share of it. In one
    process it is the trainer itself. It is made for the objectives of PPO and GRPO, whose means the
    classes below take over all ranks and microbatches; another objective needs the same care.

    microbatch_size: how many completions a rank scores, or learns from, at a time; by default, its
        share of a minibatch. The step is the same. Metrics are means over the microbatches.
    checkpointing: keep only the input of each block, and compute the block anew in the backward
        pass, as `checkpoint_blocks` does for a bridge's forward pass.

    Raises ValueError if a rank's share does not divide into minibatches, whole groups or
    microbatches, and for checkpointing where the trainers' own forward pass does not run.
    """

    def __init__(
        self,
        args: RLHFArgs,
        model: TransformerWithLora | None = None,
        microbatch_size: int | None = None,
        checkpointing: bool = False,
    ):
        is_parallel = dist.is_initialized()
        self.rank, self.n_ranks = (
            (dist.get_rank(), dist.get_world_size()) if is_parallel else (0, 1)
        )
        require(
            args.batch_size % self.n_ranks == 0,
            f"batch_size should be a multiple of the {self.n_ranks} ranks, but is "
            f"{args.batch_size}",
        )
        args = copy.copy(args)
        args.batch_size //= self.n_ranks
        args.__post_init__()  # raises where a share is no batch
        super().__init__(args, model)
        size = args.minibatch_size
        self.microbatch_size = size if microbatch_size is None else microbatch_size
        require(
            isinstance(self.microbatch_size, int)
            and self.microbatch_size >= 1
            and size % self.microbatch_size == 0,
            f"microbatch_size should divide the {size} completions of a minibatch (batch_size / "
            f"num_minibatches, with ranks each one's share), but is {microbatch_size!r}",
        )
        scorer = get_scorer(self.model, self.get_formulas())
        require(
            not checkpointing or isinstance(scorer, NativeScorer),
            f"checkpointing should be False for this model: {scorer.why}",
        )
        self.checkpointing = checkpointing
        self.token_share: float | Tensor = 1.0  # of a microbatch, where 1 is as many as the others
        self.generator.manual_seed(args.seed * self.n_ranks + self.rank)
        if is_parallel:  # the same start everywhere
            for parameter in self.model.trainable_parameters():
                dist.broadcast(parameter.data, src=0)
        self.generator_states = self._gather(self.generator.get_state())

    def split_samples(self, samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield input ids and attention masks, one microbatch after the other."""
        rows = self.microbatch_size
        return zip(samples.input_ids.split(rows), samples.attention_mask.split(rows), strict=True)

    def learning_phase(self, memory: ReplayMemory) -> None:
        """Take one step for each minibatch, with the gradients of all ranks.

        One rank that learns from whole minibatches takes chapter 2's own steps.
        """
        is_whole = self.microbatch_size == self.args.minibatch_size
        if self.n_ranks == 1 and is_whole and not self.checkpointing:
            super().learning_phase(memory)
            return
        for minibatch in memory.get_minibatches(self.generator):
            self.optimizer.zero_grad()
            objective = self._add_gradients(minibatch)
            sync_gradients(self.model.trainable_parameters())
            # (5) update
            grad_norm = nn.utils.clip_grad_norm_(
                self.model.trainable_parameters(), self.args.max_grad_norm, error_if_nonfinite=True
            )
            self.optimizer.step()
            self.metrics["objective"].append(objective)
            self.metrics["grad_norm"].append(grad_norm.item())
        self.metrics["lr"].append(float(self.scheduler.get_last_lr()[0]))
        self.scheduler.step()

    def _add_gradients(self, minibatch: ReplayMinibatch) -> float:
        """Add the gradients of a minibatch, a microbatch at a time, and return the objective.

        A microbatch is to a minibatch what a rank is to a batch: all have as many completions, and
        means over tokens weight each by its share of the tokens.
        """
        rows = torch.arange(len(minibatch.mask)).split(self.microbatch_size)
        parts = [minibatch.get_rows(chosen) for chosen in rows]
        counts = torch.stack([part.mask.sum() for part in parts]).double()
        if self.n_ranks > 1:
            dist.all_reduce(counts)
        total = 0.0
        for part, share in zip(parts, counts / counts.sum().clamp(min=1), strict=True):
            self.token_share = (len(parts) * share).float()
            with recomputing() if self.checkpointing else contextlib.nullcontext():
                objective = self.compute_rlhf_objective(part) / len(parts)
            objective.backward()
            total += objective.item()
        self.token_share = 1.0
        return total

    def train(self) -> list[dict[str, float]]:
        """Run the phases that are left, and return the history, the same on every rank but for
        "seconds"."""
        if self.n_ranks == 1:
            return super().train()
        with Run(self) if self.rank == 0 else SilentRun(self) as run:
            while self.phase < self.args.total_phases:
                self.metrics.clear()
                memory = self.rollout_phase()
                self.learning_phase(memory)
                self.phase += 1
                self._average_metrics()
                self.generator_states = self._gather(self.generator.get_state())
                run.end_phase()
        return self.history

    def _average_metrics(self) -> None:
        gathered = self._gather({k: sum(v) / len(v) for k, v in self.metrics.items()})
        for name in list(self.metrics):
            self.metrics[name] = [sum(m[name] for m in gathered) / len(gathered)]

    def _gather(self, value: Any) -> list:
        """Return the values of all ranks, in their order."""
        values = [value] * self.n_ranks
        if self.n_ranks > 1:
            dist.all_gather_object(values, value)
        return values

    def get_state(self) -> dict:
        """Return a copy of everything that the rest of the run depends on, on any rank."""
        state = super().get_state()
        alone = [state["generator"]]
        return state | {"generators": alone if self.n_ranks == 1 else list(self.generator_states)}

    def set_state(self, state: dict) -> None:
        states = state.get("generators", [state["generator"]])
        n = len(states)
        require(n == self.n_ranks, f"the run should go on with {n} ranks, but has {self.n_ranks}")
        super().set_state(state | {"generator": states[self.rank]})
        self.generator_states = list(states)
        self.generator_states[self.rank] = self.generator.get_state()  # another one's, on a GPU


class SilentRun:
    """The phases of a trainer on a rank that shows and writes nothing; see `Run`."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def __enter__(self) -> "SilentRun":
        return self

    def end_phase(self) -> None:
        row = {name: sum(values) / len(values) for name, values in self.trainer.metrics.items()}
        self.trainer.history.append({"phase": self.trainer.phase} | row)

    def __exit__(self, *error: object) -> None:
        pass


class DataParallelGrpoTrainer(DataParallel, GrpoTrainer):
    """Train by GRPO on all ranks. The mean over completions needs no count: each rank has as many;
    entropy and exact KL are means over tokens, of which it has more or fewer.
    """

    kind = "grpo"  # Its runs are named as those of one process.

    def measure_entropy(
        self, minibatch: ReplayMinibatch, scored: Scores | Float[Tensor, "batch seq vocab"]
    ) -> Float[Tensor, ""]:
        """Return the entropy over the tokens of all ranks, by this microbatch's share of them."""
        here = super().measure_entropy(minibatch, scored)
        return self._weight("entropy", here, minibatch.mask)

    def measure_kl(
        self, minibatch: ReplayMinibatch, scored: Scores | Float[Tensor, "batch seq vocab"]
    ) -> Float[Tensor, ""]:
        """Return the exact KL from the reference over the tokens of all ranks, likewise."""
        here = super().measure_kl(minibatch, scored)
        return self._weight("kl_exact", here, minibatch.mask)

    def _weight(
        self, name: str, here: Float[Tensor, ""], mask: Bool[Tensor, "rows completion"]
    ) -> Float[Tensor, ""]:
        """Weight a mean over tokens, each rank and each microbatch by its tokens, and record it."""
        mean = global_masked_mean(here.expand(mask.shape), mask) * self.token_share
        self.metrics[name][-1:] = [mean.item()]  # in place of the one from here
        return mean


class DataParallelRLHFTrainer(DataParallel):
    """Train by PPO on all ranks. Every part of its objective is a mean over tokens."""

    kind = "rlhf"

    def compute_rlhf_objective(self, minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
        """Weight this rank's mean by its share of all tokens, and a microbatch's likewise: then the
        mean over both is that of all tokens."""
        mask = minibatch.mask
        count = mask.sum().double()
        if self.n_ranks > 1:
            dist.all_reduce(count)
        share = mask.sum() * self.n_ranks / count.clamp(min=1)
        return super().compute_rlhf_objective(minibatch) * share.float() * self.token_share


# --- A sharded model ----------------------------------------------------------------------------


def own_weights(model: TransformerWithLora) -> None:
    """Give GPT-2's q, k and v contiguous weights of their own, in place, and drop the fused weight.

    In the bridge they are views of one weight, which FSDP cannot cut, and whose module never runs.
    Models with separate weights stay as they are.
    """

    def copy_parameter(parameter: nn.Parameter) -> nn.Parameter:
        copied = parameter.detach().clone(memory_format=torch.contiguous_format)
        return nn.Parameter(copied, requires_grad=False)

    for block in model.base.blocks:
        attention = block.attn
        if "qkv" not in attention._modules:
            continue
        for part in (attention.q, attention.k, attention.v):
            linear = part.original_component
            linear.weight = copy_parameter(linear.weight)
            linear.bias = copy_parameter(linear.bias)
        del attention._modules["qkv"]
        attention.original_component._modules.pop("c_attn", None)


def shard_model(model: TransformerWithLora, mesh: DeviceMesh) -> TransformerWithLora:
    """Shard a model over the ranks of `mesh`, in place (FSDP2), and return it.

    Each block is gathered for as long as it runs, and the rest likewise. FSDP gathers around
    `forward` alone; `forward_with_value_head`, if there is one, has to gather too. Build the
    optimizer afterwards: the parameters are new ones. Gradients come out averaged over the ranks.
    """
    own_weights(model)
    for block in model.base.blocks:
        fully_shard(block, mesh=mesh)
    # Unless told, the root stays gathered after a forward pass, and with it the adapters: then
    # an optimizer would hold the gathered copies.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    method = "forward_with_value_head"
    if hasattr(model, method):
        register_fsdp_forward_method(model, method)
    return model


@contextmanager
def unsharded(model: TransformerWithLora) -> Iterator[TransformerWithLora]:
    """Gather all weights inside, on every rank, and shard them again on leaving, even by an error.

    For sampling: `sample_completions` then decodes with the weights themselves, so the ranks may
    have different prompts. The model must not be called inside: FSDP's hooks would gather and free
    what is gathered already.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module in modules:
            module.unshard()
        yield model
    finally:
        for module in modules:
            module.reshard()


def gather_trainable_state(model: TransformerWithLora) -> dict[str, Tensor]:
    """Return the trained tensors of a sharded model, whole: every rank has to call it."""
    state = model.trainable_state()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


# --- TRL ----------------------------------------------------------------------------------------


def _refuse_what_trl_lacks(args: GrpoArgs) -> None:
    get = vars(args).get
    lacking = {
        "kl_kind": args.kl_kind == "exact" and args.kl_coef > 0,
        "advantage_kind": get("advantage_kind") == "leave_one_out",
        "dynamic_sampling": get("dynamic_sampling"),
        "truncation": get("truncation") == "penalty",
        "refresh_every": get("refresh_every"),
        "staleness": get("staleness"),
        "sampler_bits": get("sampler_bits"),
        "correction": get("correction") in ("clip", "mask"),
    }
    for name, is_lacking in lacking.items():
        require(
            not is_lacking,
            f"{name} should be one that TRL's trainer has, but is {get(name)!r}",
        )


def to_trl_config(args: GrpoArgs) -> dict[str, Any]:
    """Return arguments of `trl.GRPOConfig` (TRL 1.16) that take the same step as `GrpoTrainer`.

    With several minibatches in a rollout TRL deals completions to them differently. Of `RlvrArgs`,
    what TRL has as well is translated: loss_mode, ratio_level, truncation "mask". The learning rate
    is constant, as ours follows a schedule by phases and TRL's by updates. TRL prepends no bos, so
    hand it prompts that have one. Prompts, rewards and an `environment` are for TRL's trainer and
    not for its config. (No check asks for top_p, or for chapter 9's `AsyncArgs`: its correction
    "none" or "truncate" is TRL's with `use_vllm` and one update per rollout.)

    Raises ValueError, with the argument's name, where TRL's trainer has nothing for its value:
    kl_kind "exact" (unless kl_coef is 0), advantage_kind "leave_one_out", dynamic_sampling,
    truncation "penalty", refresh_every.
    """
    _refuse_what_trl_lacks(args)
    get = vars(args).get
    loss_types = {"sequence": "grpo", "token": "dapo", "constant": "dr_grpo"}
    corrections: dict[Any, dict[str, Any]] = {
        "none": {"correction": False},
        "truncate": {"correction": True, "mode": "token_truncate", "clip_max": get("cap")},
    }
    correction = corrections.get(get("correction"), {})
    return {
        # What a batch is
        "per_device_train_batch_size": args.minibatch_size,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": args.num_minibatches,
        "num_iterations": args.batches_per_learning_phase,
        "num_generations": args.group_size,
        "max_steps": args.total_phases * args.updates_per_rollout,
        # How it samples
        "max_completion_length": args.gen_len,
        "temperature": args.temperature,
        "top_k": args.top_k or 0,
        "top_p": 1.0 if args.top_p is None else args.top_p,
        "mask_truncated_completions": get("truncation") == "mask",
        # What it maximises
        "loss_type": loss_types[get("loss_mode", "sequence")],
        "importance_sampling_level": get("ratio_level", "token"),
        "scale_rewards": args.advantage_scale,
        "epsilon": args.clip_coef,
        "epsilon_high": args.clip_coef if args.clip_coef_high is None else args.clip_coef_high,
        "beta": args.kl_coef,
        "use_bias_correction_kl": False,
        "entropy_coef": args.ent_coef,
        **{f"vllm_importance_sampling_{k}": value for k, value in correction.items()},
        # How it steps
        "learning_rate": args.base_lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": args.max_grad_norm,
        "adam_epsilon": 1e-5,
        "weight_decay": 0.0,
        "bf16": args.dtype == torch.bfloat16,
        "gradient_checkpointing": False,
        "seed": args.seed,
    }


# --- A refreshed reference ----------------------------------------------------------------------


@torch.no_grad()
def refresh_reference(trainer: GrpoTrainer) -> None:
    """Fold the adapters into the base, in place, and begin new ones: the outer loop of GRPO.

    The logits stay the same up to rounding, and the reference becomes the policy, so that the KL is
    0. New adapters are drawn from `trainer.generator`, as `LoraLayer` draws them. Adam's state of
    the old ones is dropped; a value head and its state stay.

    From then on the adapters alone are not the policy: what is saved has to hold the base. In
    bfloat16 the fold is rounded, and small changes are lost.
    """
    model = trainer.model
    with model.merged():
        folded = [linear.weight.data.clone() for linear in model._linears.values()]
    for linear, weight in zip(model._linears.values(), folded, strict=True):
        linear.weight.data.copy_(weight)
    for layer in model.adapters.values():
        layer.lora_A.uniform_(-1, 1, generator=trainer.generator).div_(layer.d_in**0.5)
        layer.lora_B.zero_()
    for parameter in model.trainable_parts()["adapters"]:
        trainer.optimizer.state.pop(parameter, None)


@dataclass
class RefreshArgs(GrpoArgs):
    """Say after how many phases the reference is refreshed; with 0, never."""

    refresh_every: CountOrZero = 0


class RefreshTrainer(GrpoTrainer):
    """Train by GRPO, with a reference that follows the policy in steps. Checkpoints hold the base's
    weights at the adapters' sites too."""

    args: RefreshArgs
    args_class = RefreshArgs

    def learning_phase(self, memory: ReplayMemory) -> None:
        """Learn, then refresh the reference if it is due."""
        super().learning_phase(memory)
        every, done = self.args.refresh_every, self.phase + 1
        if every and done % every == 0 and done < self.args.total_phases:
            refresh_reference(self)

    def get_state(self) -> dict:
        """Return everything that the rest of the run depends on: with what was folded in."""
        base = {site: linear.weight.data.clone() for site, linear in self.model._linears.items()}
        return super().get_state() | {"base": base}

    def set_state(self, state: dict) -> None:
        super().set_state(state)
        for site, linear in self.model._linears.items():
            linear.weight.data.copy_(state["base"][site])
