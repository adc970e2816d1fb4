"""Right answers to chapter 1, written differently.

A whole model, without TransformerLens, stands in for the reference's in every exercise of
`TransformerWithLora`.
"""

import functools
from contextlib import contextmanager

import einops
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.support.models import ATTENTION, GPT2_NAMES, LLAMA_NAMES
from utils.grading.known_answers import edit, right

# --- LoraLayer ----------------------------------------------------------------------------------


@right("LoraLayer")
class WithEinsum(nn.Module):
    def __init__(self, d_in, d_out, rank=4, alpha=32):
        super().__init__()
        bound = 1 / d_in**0.5
        self.register_buffer("scaling", torch.tensor(alpha / rank), persistent=False)
        self.register_parameter("lora_A", nn.Parameter(torch.rand(d_in, rank) * 2 * bound - bound))
        self.register_parameter("lora_B", nn.Parameter(torch.zeros(rank, d_out)))

    def forward(self, x):
        low = einops.einsum(x.to(self.lora_B.dtype), self.lora_A, "... d_in, d_in rank -> ... rank")
        return einops.einsum(low, self.lora_B, "... rank, rank d_out -> ... d_out") * self.scaling


# --- make_lora_hooks ----------------------------------------------------------------------------


class _Pair:
    """Methods of an object, which knows itself: a reference cycle."""

    def __init__(self, layer):
        self.layer, self.x, self.itself = layer, None, self

    def read(self, tensor, hook):
        self.x = tensor
        return tensor

    def add(self, tensor, hook):
        x, self.x = self.x, None
        change = self.layer(x.flatten(2).to(self.layer.lora_A.dtype))
        return (tensor.to(change.dtype) + change.view_as(tensor)).to(tensor.dtype)


@right("make_lora_hooks")
def methods_of_an_object(site, layer):
    pair = _Pair(layer)
    return [(f"{site}.hook_out", pair.add), (f"{site}.hook_in", pair.read)]


@right("make_lora_hooks")
def lambdas(site, layer):
    """The adapter's output is made at once, and kept instead of the input."""
    kept = []
    read = lambda x, hook: kept.__setitem__(slice(None), [layer(x.reshape(*x.shape[:2], -1))])  # noqa: E731
    add = lambda out, hook: out + kept.pop().to(out.dtype).reshape(out.shape)  # noqa: E731
    return [(f"{site}.hook_in", lambda x, hook: read(x, hook)), (f"{site}.hook_out", add)]


# --- Whole models -------------------------------------------------------------------------------


class _Adapter(nn.Module):
    def __init__(self, d_in, d_out, rank, alpha):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(rank, d_out, dtype=torch.float32))
        self.down = nn.Parameter((torch.rand(d_in, rank, dtype=torch.float32) * 2 - 1) / d_in**0.5)
        self.scaling = alpha / rank

    def forward(self, x):
        return x.float() @ self.down @ self.up * self.scaling


class WithoutTransformerLens(nn.Module):
    """Plain Hugging Face with PyTorch's own hooks; GPT-2's q, k and v are columns of one output."""

    def __init__(self, name, rank=4, alpha=32, sites=ATTENTION, device=None, dtype=None):
        super().__init__()
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.base = AutoModelForCausalLM.from_pretrained(name, dtype=dtype or torch.float32)
        self.base.to(device).requires_grad_(False)
        self.scaling, self.mode = alpha / rank, []
        for module in self.base.modules():  # no dropout in any mode
            for field in ("p", "attention_dropout"):
                if isinstance(getattr(module, field, None), float):
                    setattr(module, field, 0.0)
        kind = self.base.config.model_type
        blocks = self.base.transformer.h if kind == "gpt2" else self.base.model.layers
        self.adapters, self.places = nn.ModuleDict(), []
        for index, block in enumerate(blocks):
            for site in sites:
                names = GPT2_NAMES if kind == "gpt2" else LLAMA_NAMES
                if site not in names:
                    raise ValueError(f"{site} is not one of {list(names)}")
                linear = block.get_submodule(names[site])
                is_conv = isinstance(linear, Conv1D)
                d_in, d_out = linear.weight.shape if is_conv else linear.weight.T.shape
                is_joint = names[site] == "attn.c_attn"
                start, d_out = (ATTENTION.index(site) * d_in, d_in) if is_joint else (0, d_out)
                adapter = _Adapter(d_in, d_out, rank, alpha).to(device)
                self.adapters[f"{index}-{site.replace('.', '-')}"] = adapter
                columns = slice(start, start + d_out)
                self.places.append((linear, adapter, columns, is_conv))

    def _change(self, adapter, columns, module, args, output):
        change = adapter(args[0]).to(output.dtype)
        end = output.shape[-1] - columns.stop
        return output + F.pad(change, (columns.start, end))

    def forward(self, input_ids, attention_mask=None, return_type="logits", **kwargs):
        cache = kwargs.get("past_key_values")
        seq = input_ids.size(1) + (cache.get_seq_length() if cache is not None else 0)
        if attention_mask is not None and attention_mask.shape[:2] != (len(input_ids), seq):
            raise ValueError(f"the mask should have {seq} columns and {len(input_ids)} rows")
        if attention_mask is None:
            attention_mask = input_ids.new_ones(len(input_ids), seq)
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        handles = []
        try:
            for linear, adapter, columns, _ in self.places if not self.mode else ():
                hook = functools.partial(self._change, adapter, columns)
                handles.append(linear.register_forward_hook(hook))
            output = self.base(
                input_ids, attention_mask=attention_mask, position_ids=positions, **kwargs
            )
        finally:
            for handle in handles:
                handle.remove()
        if return_type == "logits_and_cache":
            return output.logits, output.past_key_values
        return output.logits

    @contextmanager
    def _enter(self, mode):
        if self.mode:
            raise RuntimeError("contexts do not nest")
        self.mode.append(mode)
        try:
            yield self
        finally:
            self.mode.clear()

    @contextmanager
    def reference(self):
        with self._enter("reference"):
            yield self

    @contextmanager
    def merged(self):
        with self._enter("merged"):
            saved = {id(linear): (linear, linear.weight.data) for linear, *_ in self.places}
            try:
                for linear, weight in saved.values():
                    total = weight.to(torch.float64, copy=True)
                    for other, adapter, columns, is_conv in self.places:
                        if other is linear:
                            delta = adapter.down.detach() @ adapter.up.detach() * self.scaling
                            delta = delta if is_conv else delta.T
                            where = (slice(None), columns) if is_conv else (columns, slice(None))
                            total[where] += delta
                    linear.weight.data = total.to(weight.dtype)
                yield self
            finally:
                for linear, weight in saved.values():
                    linear.weight.data = weight

    def trainable_parameters(self):
        return [p for p in self.parameters() if p.requires_grad]

    def save_adapter(self, path):
        state = {k: v.contiguous() for k, v in self.adapters.state_dict().items()}
        save_file(state | {"scaling": torch.tensor(self.scaling)}, path)

    def load_adapter(self, path):
        state, own = load_file(path), self.adapters.state_dict()
        if state.pop("scaling").item() != torch.tensor(self.scaling).item():
            raise ValueError("alpha / rank should fit")
        if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in own.items()}:
            raise ValueError("sites and shapes should fit")
        self.adapters.load_state_dict(state)


def name_as(cls: type, model: nn.Module) -> nn.Module:
    """The model as one of `cls`, which a class written out by a student would be."""
    model.__class__ = type(cls.__name__, (type(model),), {})
    return model


METHODS = "from_pretrained forward reference merged trainable_parameters save_adapter load_adapter"

# For every exercise of the class, `from_pretrained` gives this model instead.
WITHOUT_TRANSFORMER_LENS = [
    edit(
        f"TransformerWithLora.{method}",
        "WithoutTransformerLens",
        "return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "import tests.alternatives.ch1_lora as alternatives\n"
        "        return alternatives.name_as(cls, alternatives.WithoutTransformerLens("
        "name, rank, alpha, sites, device, dtype))",
        within="TransformerWithLora.from_pretrained",
    )
    for method in METHODS.split()
]

# --- TransformerWithLora, in small --------------------------------------------------------------

BUILD, RUN = "TransformerWithLora.from_pretrained", "TransformerWithLora._run"
CONSTRUCT = "TransformerWithLora.__init__"

SMALL_CHANGES = [
    edit(
        BUILD,
        "sites_as_given",
        'self._linears = {k: v for k, v in linears.items() if k.split(".", 2)[2] in sites}',
        "self._linears = {k: linears[k] for site in sites for k in sorted(linears)[::-1] "
        "if k.endswith('.' + site)}",
        within=CONSTRUCT,
    ),
    edit(
        "TransformerWithLora.forward",
        "logits_in_the_dtype_of_the_base",
        "return at_least_float32(output)",
        "return output",
        within=RUN,
    ),
    edit(
        "TransformerWithLora.merged",
        "on_the_rank_side_in_float64",
        "delta = layer.compute_delta().detach()",
        "delta = ((layer.scaling * layer.lora_A).double() @ layer.lora_B.double()).detach()",
    ),
    edit(
        "TransformerWithLora.trainable_parameters",
        "a_generator",
        "return [parameter for part in self.trainable_parts().values() for parameter in part]",
        "yield from (p for p in self.parameters() if p.requires_grad)",
    ),
]


class _Off:
    """A context written as a class."""

    def __init__(self, model):
        self.model = model
        if model._mode != "hooked":
            raise ValueError("the adapters are off already")

    def __enter__(self):
        self.model._mode = "off"
        return self.model

    def __exit__(self, *error):
        self.model._mode = "hooked"


@right("TransformerWithLora.reference")
def a_context_written_as_a_class(self):
    return _Off(self)


@right("TransformerWithLora.reference")
def refuses_at_the_call(self):
    """What is in the way is said at once, not on entering."""
    if self._mode != "hooked":
        raise RuntimeError("the adapters are off already")
    return _enter(self)


@contextmanager
def _enter(model):
    with model._in_mode("reference"):
        yield model


@right("TransformerWithLora.merged")
@contextmanager
def with_plain_tensors(self):
    """The Parameters step aside, and come back as they were."""
    with self._in_mode("merged"):
        saved = [(linear, linear.weight) for linear in self._linears.values()]
        try:
            for (linear, weight), layer in zip(saved, self._layers, strict=True):
                delta = layer.compute_delta().detach()
                total = weight.float() + (delta.T if isinstance(linear, nn.Linear) else delta)
                del linear.weight
                linear.weight = total.to(weight.dtype)
            yield
        finally:
            for linear, weight in saved:
                linear.weight = weight


# --- calc_sft_loss ------------------------------------------------------------------------------


@right("calc_sft_loss")
def by_cross_entropy(logits, tokens, loss_mask):
    rows, columns = loss_mask[:, 1:].nonzero(as_tuple=True)
    if not len(rows):
        return logits.new_zeros(()) * logits.sum()
    return F.cross_entropy(logits[rows, columns], tokens[rows, columns + 1])


@right("calc_sft_loss")
def with_ignored_labels(logits, tokens, loss_mask):
    labels = tokens.masked_fill(~loss_mask, -100).roll(-1, 1)
    labels[:, -1] = -100
    clean = logits.masked_fill((labels == -100)[..., None], 0)
    flat = einops.rearrange(clean, "b s v -> (b s) v")
    loss = F.cross_entropy(flat, labels.flatten(), reduction="sum")
    return loss / max(1, int((labels != -100).sum()))
