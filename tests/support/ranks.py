"""Ranks of a process group as threads of one process: for checks, which may open no sockets.

PyTorch's own tests of distributed code use this backend. Collectives have the meaning of the real
ones; `tests/course/test_scale.py` runs the same functions on real processes.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import multi_threaded_pg as threaded

SECONDS = 30  # until a rank that waits in vain is given up


def run_on_ranks(function: Callable[[int], Any], n_ranks: int = 2) -> list[Any]:
    """What `function(rank)` returns on each rank.

    Raises the error of the first rank that has one, and TimeoutError where ranks wait for each
    other.
    """
    results: list[Any] = [None] * n_ranks
    errors: list[BaseException | None] = [None] * n_ranks
    store = dist.HashStore()
    has_grad = torch.is_grad_enabled()

    def be(rank: int) -> None:
        torch.set_grad_enabled(has_grad)
        try:
            dist.init_process_group("threaded", rank=rank, world_size=n_ranks, store=store)
            results[rank] = function(rank)
        except BaseException as error:
            errors[rank] = error
            threaded.ProcessLocalGroup.exception_handle(error)  # the others need not wait
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    threaded._install_threaded_pg()
    c10d._set_thread_isolation_mode(True)  # each thread has groups of its own
    try:
        threads = [
            threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(n_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        is_hanging = any(thread.is_alive() for thread in threads)
        threaded.ProcessLocalGroup.exception_handle(TimeoutError())  # frees who still waits
        for thread in threads:
            thread.join(SECONDS)
    finally:
        c10d._set_thread_isolation_mode(False)
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
    for error in errors:
        if error is not None and not isinstance(error, SystemExit):  # which frees a rank that waits
            raise error
    if is_hanging:
        raise TimeoutError("the ranks wait for each other: each has to make the same calls")
    return results


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Shard a model, block by block, without the help of chapter 7."""
    for attention in [block.attn for block in model.base.blocks]:
        if "qkv" in attention._modules:
            for part in (attention.q, attention.k, attention.v):
                for name in ("weight", "bias"):
                    own = getattr(part.original_component, name).detach().clone().contiguous()
                    setattr(part.original_component, name, nn.Parameter(own, requires_grad=False))
            del attention._modules["qkv"], attention.original_component._modules["c_attn"]
    for module in [*model.base.blocks, model]:
        fully_shard(module, mesh=mesh)
    return model
