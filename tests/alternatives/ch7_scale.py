"""Right answers to chapter 7, written differently."""

import contextlib
import functools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

from solutions.ch0_sampling import masked_mean
from solutions.ch1_lora import make_lora_hooks
from solutions.ch7_scale import own_weights, run_lean
from utils.grading.known_answers import right

# --- Memory -------------------------------------------------------------------------------------


@right("estimate_memory")
def kind_by_kind(
    n_params,
    n_trainable,
    n_layers,
    d_model,
    n_heads,
    d_vocab,
    batch,
    seq,
    completion,
    mlp_adapters=False,
    dtype=torch.float32,
):
    n_bytes, found = dtype.itemsize, {}
    wide = n_bytes if n_bytes > 4 else 4
    hidden = batch * seq * d_model
    found["logits"] = batch * d_vocab * (seq + completion * 3) * wide
    found["attention"] = math.prod((n_layers, n_heads, batch, seq, seq, n_bytes))
    found["activations"] = hidden * n_bytes
    for _ in range(n_layers):
        found["activations"] += n_bytes * hidden * (2 + 3 + 4)
        found["activations"] += wide * hidden * ((3 if n_bytes < 4 else 1) + 1)
        if mlp_adapters:
            found["activations"] += wide * hidden * 5
    found["weights"] = n_bytes * n_params
    found["gradients"], found["optimizer"] = wide * n_trainable, 2 * wide * n_trainable
    return found


@right("accumulate_gradients")
def sums_over_a_count(model, microbatches, calc_per_token, mode="sequence", max_len=None):
    n_rows = sum(m.mask.shape[0] for m in microbatches)
    n_tokens = sum(m.mask.sum().item() for m in microbatches)
    value = 0.0
    for m in microbatches:
        per_token = torch.where(m.mask, calc_per_token(model, m), 0.0)
        if mode == "token":
            part = per_token.sum() / max(n_tokens, 1)
        elif mode == "constant":
            part = per_token.sum() / (n_rows * max_len)
        else:
            part = (per_token.sum(1) / m.mask.sum(1).clamp(min=1)).sum() / n_rows
        part.backward()
        value += float(part.detach())
    return value


@right("checkpoint_blocks")
@contextlib.contextmanager
def by_a_stack(model):
    with contextlib.ExitStack() as stack:
        stack.enter_context(model._in_mode("checkpointed"))
        for site, layer in model.adapters.items():
            stack.enter_context(model.base.hooks(fwd_hooks=make_lora_hooks(site, layer)))
        for block in model.base.blocks:
            stack.callback(block.__dict__.__delitem__, "forward")

            def forward(*args, block=block, **kwargs):
                return checkpoint(
                    functools.partial(run_lean, block), *args, use_reentrant=False, **kwargs
                )

            block.__dict__["forward"] = forward
        yield model


# --- Ranks --------------------------------------------------------------------------------------


@right("global_masked_mean")
def by_gathering(values, mask, group=None):
    if not dist.is_initialized():
        return masked_mean(values, mask)
    n = dist.get_world_size(group)
    own = values.masked_fill(~mask, 0).sum()
    mine = torch.stack([own.detach(), mask.sum().to(own.dtype)])
    parts = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(parts, mine, group=group)
    total, count = torch.stack(parts).sum(0)
    share = own * n / count.clamp(min=1)
    return (total / count.clamp(min=1)) + share - share.detach()


@right("sync_gradients")
def by_a_vector(parameters, group=None):
    parameters = [*parameters]
    if not (dist.is_available() and dist.is_initialized()):
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    vector = parameters_to_vector([p.grad for p in parameters]) / dist.get_world_size(group)
    dist.all_reduce(vector, group=group)
    start = 0
    for parameter in parameters:
        n = parameter.numel()
        parameter.grad.copy_(vector[start : start + n].reshape(parameter.shape))
        start += n


@right("shard_model")
def modules_in_a_list(model, mesh):
    own_weights(model)
    for module in [*model.base.blocks, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for name in ("forward_with_value_head",):
        if name in dir(model):
            register_fsdp_forward_method(model, name)
    return model


@right("unsharded")
@contextlib.contextmanager
def with_callbacks(model):
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                stack.callback(module.reshard)
        yield model


# --- TRL and the outer loop ---------------------------------------------------------------------


@right("to_trl_config")
def what_differs_from_the_defaults(args):
    rlvr = {
        name: getattr(args, name, None)
        for name in ("loss_mode", "ratio_level", "truncation", "advantage_kind", "dynamic_sampling")
    }
    if args.kl_kind == "exact" and args.kl_coef:
        raise ValueError("kl_kind: TRL has no exact KL")
    if rlvr["advantage_kind"] == "leave_one_out":
        raise ValueError("advantage_kind: GRPO in TRL has no leave-one-out")
    if rlvr["dynamic_sampling"]:
        raise ValueError("dynamic_sampling is not there")
    if getattr(args, "refresh_every", 0):
        raise ValueError("refresh_every: TRL refreshes whole models only")
    if rlvr["truncation"] == "penalty":
        raise ValueError("truncation: no penalty")
    config = dict(
        generation_batch_size=args.batch_size,
        per_device_train_batch_size=args.batch_size // args.num_minibatches,
        num_iterations=args.batches_per_learning_phase,
        num_generations=args.group_size,
        max_steps=args.total_phases * args.num_minibatches * args.batches_per_learning_phase,
        max_completion_length=args.gen_len,
        temperature=args.temperature,
        beta=args.kl_coef,
        use_bias_correction_kl=False,
        entropy_coef=args.ent_coef,
        epsilon=args.clip_coef,
        learning_rate=args.base_lr,
        lr_scheduler_type="constant",
        max_grad_norm=args.max_grad_norm,
        adam_epsilon=1e-5,
        scale_rewards=args.advantage_scale,
        bf16=args.dtype == torch.bfloat16,
        gradient_checkpointing=False,
        seed=args.seed,
        loss_type={"token": "dapo", "constant": "dr_grpo"}.get(rlvr["loss_mode"], "grpo"),
    )
    if args.top_k is not None:
        config["top_k"] = args.top_k
    if args.clip_coef_high is not None:
        config["epsilon_high"] = args.clip_coef_high
    if rlvr["ratio_level"] == "sequence":
        config["importance_sampling_level"] = "sequence"
    if rlvr["truncation"] == "mask":
        config["mask_truncated_completions"] = True
    return config


@right("refresh_reference")
def by_the_products(trainer):
    model = trainer.model
    for site, layer in model.adapters.items():
        linear = model._linears[site]
        with torch.no_grad():
            delta = layer.compute_delta()
            linear.weight.data += delta.T if isinstance(linear, nn.Linear) else delta
            draws = torch.rand(
                layer.lora_A.shape, generator=trainer.generator, dtype=layer.lora_A.dtype
            )
            layer.lora_A.copy_((2 * draws - 1) / math.sqrt(layer.d_in))
            layer.lora_B.fill_(0)
        for parameter in (layer.lora_A, layer.lora_B):
            for moment in trainer.optimizer.state.get(parameter, {}).values():
                moment.zero_()
