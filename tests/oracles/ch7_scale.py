"""Chapter 7 by other means: tensors of the named shapes, one batch in place of many, one process
in place of ranks, plain Hugging Face, and what TRL's trainer would read."""

import contextlib

import torch
import torch.distributed as dist

from tests.support import trainers


def bytes_of_shapes(
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
    """Make every tensor, without its numbers, and add up its bytes."""

    def measure(*shapes, of=dtype):
        tensors = [torch.empty(shape, dtype=of, device="meta") for shape in shapes]
        return sum(x.numel() * x.element_size() for x in tensors)

    exact = torch.promote_types(dtype, torch.float32)
    hidden, wide = (batch, seq, d_model), (batch, seq, 4 * d_model)
    block = [hidden, hidden, hidden, hidden, hidden, wide]  # norms, q, k, v, GELU
    read = [hidden, hidden] if exact == dtype else [hidden] * 4  # by adapters, in their dtype
    read += [hidden, wide] if mlp_adapters else []
    scored = (batch, completion, d_vocab)
    return {
        "weights": measure((n_params,)),
        "gradients": measure((n_trainable,), of=exact),
        "optimizer": measure((n_trainable,), (n_trainable,), of=exact),
        "activations": measure(hidden, *(block * n_layers)) + measure(*(read * n_layers), of=exact),
        "attention": measure(*[(batch, n_heads, seq, seq)] * n_layers),
        "logits": measure((batch, seq, d_vocab), scored, scored, scored, of=exact),
    }


def accumulate_by_one_batch(model, microbatches, calc_per_token, mode="sequence", max_len=None):
    """Collect every token's number, add them up in the end, and differentiate once."""
    numbers, weights = [], []
    n_rows = sum(len(m.mask) for m in microbatches)
    n_tokens = sum(int(m.mask.sum()) for m in microbatches)
    for m in microbatches:
        per_token = calc_per_token(model, m)
        for row in range(len(m.mask)):
            positions = m.mask[row].nonzero().flatten().tolist()
            for t in positions:
                numbers.append(per_token[row, t])
                weights.append(
                    {
                        "token": 1 / max(n_tokens, 1),
                        "sequence": 1 / (n_rows * len(positions)),
                        "constant": 1 / (n_rows * (max_len or 1)),
                    }[mode]
                )
    if not numbers:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return 0.0
    total = sum(x * w for x, w in zip(numbers, weights, strict=True))
    total.backward()
    return total.item()


@contextlib.contextmanager
def computing(model, forward):
    """Inside, the model's forward pass is this function."""
    model.forward = forward
    try:
        yield model
    finally:
        del model.forward


def gradients_by_hugging_face(model):
    """Return a context in which the model's forward pass is that of plain Hugging Face."""
    kind = model.base.original_model.config.model_type

    def forward(ids, attention):
        return trainers.run_hugging_face(model, kind, ids, attention)[0]

    return computing(model, forward)


def means_of_joined_rows(values, mask, group=None):
    """Gather all rows on every rank, and average them there; the gradient is written by hand."""

    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            kept = [values[mask].tolist()]
            n_ranks = 1
            if dist.is_initialized():
                n_ranks = dist.get_world_size(group)
                kept = [None] * n_ranks
                dist.all_gather_object(kept, values[mask].tolist(), group=group)
            kept = [x for part in kept for x in part]
            ctx.scale = n_ranks / max(len(kept), 1)
            return values.new_tensor(sum(kept) / max(len(kept), 1))

        @staticmethod
        def backward(ctx, grad):
            return mask.to(values.dtype) * ctx.scale * grad

    return Mean.apply(values)


def mean_of_gradients(parameters, group=None):
    """Gather every gradient by itself and average in Python."""
    if not dist.is_initialized():
        return
    for parameter in parameters:
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gathered = [torch.empty_like(grad) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, grad.contiguous(), group=group)
        parameter.grad = torch.stack(gathered).mean(0)


# --- A sharded model ----------------------------------------------------------------------------


def stays_whole(model, mesh):
    """No sharding at all: every rank computes with the whole model."""
    return model


# --- TRL ----------------------------------------------------------------------------------------


def config_by_table(args):
    """The table of section 6, row by row."""
    get = vars(args).get
    refused = [get("kl_kind") == "exact" and args.kl_coef != 0, get("dynamic_sampling", False)]
    refused += [get("advantage_kind") == "leave_one_out", get("truncation") == "penalty"]
    names = ["kl_kind", "dynamic_sampling", "advantage_kind", "truncation"]
    for name, is_refused in zip(names, refused, strict=True):
        if is_refused:
            raise ValueError(f"TRL has no such {name}")
    rollout = args.batch_size
    update = rollout // args.num_minibatches
    n_updates = args.total_phases * args.batches_per_learning_phase * (rollout // update)
    means = {"token": "dapo", "constant": "dr_grpo"}
    return {
        "per_device_train_batch_size": update,
        "generation_batch_size": rollout,
        "num_iterations": args.batches_per_learning_phase,
        "num_generations": args.group_size,
        "max_steps": n_updates,
        "max_completion_length": args.gen_len,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "mask_truncated_completions": get("truncation") == "mask",
        "loss_type": means.get(get("loss_mode"), "grpo"),
        "importance_sampling_level": get("ratio_level", "token"),
        "scale_rewards": args.advantage_scale,
        "epsilon": args.clip_coef,
        "epsilon_high": args.clip_coef_high,
        "beta": args.kl_coef,
        "use_bias_correction_kl": False,
        "entropy_coef": args.ent_coef,
        "learning_rate": args.base_lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": args.max_grad_norm,
        "adam_epsilon": 1e-5,
        "bf16": args.dtype is torch.bfloat16,
    }
