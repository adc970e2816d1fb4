"""Loading a causal language model as a TransformerBridge, on its device and in its dtype."""

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import NormalizationBridge
from transformers import AutoTokenizer
from transformers.utils import logging

from utils.models.fetch import MODELS, find_fetched
from utils.validation import require

EMBEDDED_MODEL = Path(__file__).parent / "embedded"
CONTROL_MODEL = Path(__file__).parent / "control"  # of chapter 5's control experiment
TOOLS_MODEL = Path(__file__).parent / "tools"  # of chapter 10
IN_THIS_REPO = {"embedded": EMBEDDED_MODEL, "tools": TOOLS_MODEL}
ALL_LINEAR_SITES = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.in", "mlp.out")  # of GPT-2


class NativeLayerNorm(NormalizationBridge):
    """A bridge's layer norm by PyTorch's own kernel, unless someone looks inside it.

    The bridge composes it of eight operations, whose backward passes took 4 to 20% of an update of
    the embedded model on a CPU.
    """

    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        points = (self.hook_scale, self.hook_normalized)
        if any(point.fwd_hooks or point.bwd_hooks for point in points):
            return super().forward(hidden_states, **kwargs)
        norm: Any = self.original_component
        return self.hook_out(norm(self.hook_in(hidden_states)))


_kept: dict[str, dict[tuple, list[TransformerBridge]]] = {}  # by name, then device and dtypes


def keep_booted(name: str | Path) -> None:
    """Make `load_base_model` give copies, from now on, of what it boots first for this name.

    For the small models of the checks, of which many are booted: a copy takes a fifth of the time.
    """
    _kept.setdefault(str(IN_THIS_REPO.get(str(name), name)), {})


def boot_ahead(name: str | Path) -> None:
    """Boot a model and a copy on the CPU, for the processes that are forked from this one: the
    first that each loads is there already."""
    keep_booted(name)
    copied = load_base_model(name, device="cpu")
    for models in _kept[str(IN_THIS_REPO.get(str(name), name))].values():
        models.append(copied)


def _copy(model: TransformerBridge) -> TransformerBridge:
    """Return a copy whose parameters share memory where the model's do, as GPT-2's q, k, v and
    `c_attn`; of itself, `deepcopy` gives each its own."""
    storages: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Any] = {}
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        own = storages.setdefault(storage.data_ptr(), storage.clone())
        view = (parameter.storage_offset(), parameter.shape, parameter.stride())
        data = parameter.detach().new_empty(0).set_(own, *view)
        copies[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
    for module in model.modules():  # thousands of empty dicts of hooks, which deepcopy is slow at
        for value in vars(module).values():
            if type(value) in (dict, OrderedDict, set) and not value:
                copies[id(value)] = type(value)()
    return copy.deepcopy(model, copies)


def load_base_model(
    name: str | Path,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
) -> TransformerBridge:
    """Boot "embedded" or "tools" (the models in this repo), one that `utils.models.fetch` has
    fetched ("smollm2"), a local folder, or a model of the Hugging Face hub.

    The device defaults to the GPU if there is one. The dtype defaults to bfloat16 on a GPU that
    computes in it, and else to float32, as always for the small models in this repo. Both are given
    at the start because a bridge that is moved later stops sharing GPT-2's q, k, v weights with
    `c_attn`.

    Raises ValueError for a name that cannot be loaded, and for a dtype that is none.
    """
    exact_dtype = None if dtype is None else _get_dtype(dtype)
    name = IN_THIS_REPO.get(str(name), name)
    if str(name) in MODELS and not Path(name).is_dir():
        name = find_fetched(str(name))
    path = Path(name).expanduser()
    if isinstance(name, Path) or str(name).startswith((".", "/", "~")) or path.is_dir():
        said = "the model's name should"
        require(path.is_dir(), f"{said} be a folder with a model, but {name} is not there")
        has_config = (path / "config.json").exists()
        require(has_config, f"{said} hold a config.json, but {path} has none")
        name = path
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # as PyTorch raises without CUDA
        said = f"device should be one that PyTorch has here, such as cpu, but is {str(device)!r}"
        raise ValueError(f"{said}: {str(error).splitlines()[0]}") from error
    if exact_dtype is None:
        is_ours = path.resolve().parent == EMBEDDED_MODEL.resolve().parent
        exact_dtype = torch.float32 if is_ours else choose_dtype(torch.device(device))
    kept = _kept.get(str(name))
    if kept is None:
        return _boot(str(name), device, exact_dtype)
    key = (str(device), exact_dtype, torch.get_default_dtype())
    if key not in kept:
        kept[key] = [_boot(str(name), *key[:2])]
    return kept[key].pop() if len(kept[key]) > 1 else _copy(kept[key][0])


def choose_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 for a GPU that computes in it, else float32."""
    if device.type != "cuda":
        return torch.float32
    with torch.cuda.device(device):
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def _get_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found: Any = dtype
    if isinstance(found, str):
        found = getattr(torch, found.removeprefix("torch."), found)
    require(
        isinstance(found, torch.dtype) and found.is_floating_point,
        f"dtype should be a floating-point dtype such as torch.bfloat16, but is {dtype!r}",
    )
    return found


def _boot(name: str, device: str | torch.device, dtype: torch.dtype) -> TransformerBridge:
    logging.disable_progress_bar()
    try:
        base = TransformerBridge.boot_transformers(name, device=device, dtype=dtype)
    except OSError as error:
        raise ValueError(
            f"the model's name should be 'embedded', 'tools', a local folder, a model of the "
            f"Hugging Face hub, or one that `python -m utils.models.fetch` fetches "
            f"({', '.join(MODELS)}), but there is no folder {name!r} here and the hub did not "
            f"give it: {error}"
        ) from error
    tokenizer: Any = base.tokenizer
    if tokenizer.bos_token_id == tokenizer.eos_token_id:  # the bridge takes the eos where none is
        tokenizer.bos_token = AutoTokenizer.from_pretrained(name).bos_token
    n_rows = len(base.original_model.get_input_embeddings().weight)
    for which in ("bos", "eos" if tokenizer.pad_token_id is None else "pad"):  # which it may read
        found = getattr(tokenizer, f"{which}_token_id")
        require(
            found is None or found < n_rows,
            f"the tokenizer of {name} should have tokens that the model knows, but its {which} "
            f"token has the id {found}, and the embedding has {n_rows} rows: call "
            f"model.resize_token_embeddings and save it again, or take another {which} token",
        )
    for module in base.modules():
        if type(module) is NormalizationBridge and type(module.original_component) is nn.LayerNorm:
            module.__class__ = NativeLayerNorm
    return base
