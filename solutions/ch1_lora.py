"""Chapter 1: the LoRA-hooked transformer.

Builds `TransformerWithLora`: a frozen language model whose linear layers carry low-rank adapters,
added by hooks. With the hooks off it is the frozen reference that a KL term needs, at no extra
memory. A hook is a function that TransformerLens calls with the activation at a named point of the
forward pass; a site is the name of a linear layer, with a point before (`hook_in`) and one after
(`hook_out`).

Simplified: no adapter dropout, one rank and alpha for all sites, adapters in float32.

Papers: LoRA (Hu et al., 2021, arXiv:2106.09685); the hooks are TransformerLens's.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import AttentionBridge
from transformers.pytorch_utils import Conv1D

from solutions.ch0_sampling import at_least_float32, select_completion
from utils.models.blocks import Parts
from utils.models.loading import load_base_model
from utils.validation import require, shape_checked

ATTENTION_SITES = ("attn.q", "attn.k", "attn.v", "attn.o")

# --- The adapter --------------------------------------------------------------------------------


class LoraLayer(nn.Module):
    """Add x A B alpha / rank to the output of a linear layer (LoRA, section 4.1).

    x is the layer's input, A and B are trained, and alpha / rank keeps the size of the change
    similar when you try a different rank. `lora_A` [d_in rank] starts uniform in ±1/sqrt(d_in),
    `lora_B` [rank d_out] at zero, so that a new adapter changes nothing.
    """

    def __init__(self, d_in: int, d_out: int, rank: int = 4, alpha: float = 32):
        super().__init__()
        require(isinstance(rank, int) and rank >= 1, f"rank should be at least 1, but is {rank}")
        require(alpha > 0, f"alpha should be positive, but is {alpha}")
        self.d_in, self.d_out, self.rank, self.alpha = d_in, d_out, rank, alpha
        self.scaling = alpha / rank
        self.lora_A = nn.Parameter(torch.empty(d_in, rank).uniform_(-1, 1) / d_in**0.5)
        self.lora_B = nn.Parameter(torch.zeros(rank, d_out))

    def forward(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        """Multiply through the rank, in the adapter's dtype; A B itself is never formed.

        x may have a different dtype, such as bfloat16: it is cast to the adapter's.
        """
        require(x.shape[-1] == self.d_in, f"x should end in {self.d_in}, but is {list(x.shape)}")
        return (x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B

    def compute_delta(self) -> Float[Tensor, "d_in d_out"]:
        """Return what the adapter adds to the weight: A B alpha / rank."""
        return self.lora_A @ self.lora_B * self.scaling


def make_lora_hooks(site: str, layer: LoraLayer) -> list[tuple[str, Callable]]:
    """Return the two hooks that put `layer` on the linear layer at `site`, e.g. "blocks.0.attn.q".

    One reads the input at `site.hook_in`, the other adds to the output at `site.hook_out`, in the
    output's dtype. Either may carry head axes, one or several, after batch and seq (q, k, v on the
    way out, o on the way in). The input is held only between the two hooks (or until the next
    forward pass, if one breaks off). Each is called as `function(activation, hook=point)`.
    """
    inputs: list[Tensor] = []

    def read_input(x: Float[Tensor, "batch seq *d_in"], hook) -> None:
        inputs[:] = [x]

    def add_output(
        out: Float[Tensor, "batch seq *d_out"], hook
    ) -> Float[Tensor, "batch seq *d_out"]:
        x = inputs.pop()
        x = x.reshape(*x.shape[:2], layer.d_in)  # [batch seq d_in]
        return out + layer(x).reshape(out.shape).to(out.dtype)

    return [(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)]


@torch.no_grad()
def find_lora_sites(base: TransformerBridge) -> dict[str, nn.Linear | Conv1D]:
    """List the linear layers of the blocks whose hooks fire in a forward pass, by full site name.

    Found by running one token: a hook point that exists may still never fire (GPT-2's `attn.qkv`),
    and an adapter there would be silently dead.
    """
    fired = set()
    names = [
        name for name in base.hook_dict if name.startswith("blocks.") and name.endswith(".hook_out")
    ]
    with base.hooks(fwd_hooks=[(name, lambda _, hook: fired.add(hook.name)) for name in names]):
        base(torch.zeros(1, 1, dtype=torch.long, device=next(base.parameters()).device))
    linears = {}
    for site in (name.removesuffix(".hook_out") for name in names if name in fired):
        linear = getattr(base.get_submodule(site), "original_component", None)
        if isinstance(linear, nn.Linear | Conv1D):
            linears[site] = linear
    return linears


# --- The model ----------------------------------------------------------------------------------


class TransformerWithLora(nn.Module):
    """Hold a frozen TransformerBridge with an adapter on each of `sites` in every block.

    `sites` are names within a block ("attn.q", "mlp.in", ...). Dropout stays off even after
    `.train()`: a policy that is scored twice must give the same log-probabilities.

    Raises ValueError for a site that does not fire on this architecture, and says which do.
    """

    def __init__(
        self,
        base: TransformerBridge,
        rank: int = 4,
        alpha: float = 32,
        sites: tuple[str, ...] = ATTENTION_SITES,
    ):
        super().__init__()
        linears = find_lora_sites(base)
        available = sorted({site.split(".", 2)[2] for site in linears})
        require(isinstance(sites, list | tuple), f"sites should be a tuple, but is {sites!r}")
        require(len(sites) > 0, f"sites should hold at least one of {available}, but is empty")
        for site in sites:
            require(site in available, f"sites should be among {available}, but one is {site!r}")
        self.base = base
        base.original_model.requires_grad_(False)
        self.requires_grad_(False)
        self._linears = {k: v for k, v in linears.items() if k.split(".", 2)[2] in sites}
        weight = next(base.parameters())
        self._layers = nn.ModuleList(
            LoraLayer(*_get_in_out(linear), rank, alpha) for linear in self._linears.values()
        ).to(weight.device, torch.promote_types(weight.dtype, torch.float32))
        self._attentions = [m for m in base.modules() if isinstance(m, AttentionBridge)]
        self._mode = "hooked"
        self.train(False)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        rank: int = 4,
        alpha: float = 32,
        sites: tuple[str, ...] = ATTENTION_SITES,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> "TransformerWithLora":
        """Put adapters on "embedded", a local folder or a model of the Hugging Face hub.

        The model is an instance of the class that this is called on: chapter 2 makes a subclass.
        """
        return cls(load_base_model(name, device, dtype), rank, alpha, sites)

    @property
    def tokenizer(self):
        return self.base.tokenizer

    @property
    def cfg(self):
        return self.base.cfg

    @property
    def adapters(self) -> dict[str, LoraLayer]:
        """Return the adapters by their full site name."""
        return dict(zip(self._linears, self._layers, strict=True))

    def get_parts(self) -> Parts:
        """Say what the model is made of now: `utils/models` computes with these parts, faster."""
        return Parts(self.base, self.adapters if self._mode == "hooked" else {})

    def train(self, mode: bool = True) -> "TransformerWithLora":
        super().train(mode)
        self.base.train(False)
        return self

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Int[Tensor, "batch seq"] | None = None,
        **kwargs,
    ) -> Float[Tensor, "batch seq vocab"]:
        """Return the logits with the adapters on, at least in float32.

        The bridge derives position ids from the mask, which matters under left padding. `kwargs` go
        to the bridge: with `return_type="logits_and_cache"` the result is (logits, cache).

        Raises a ValueError that names attention_mask if it has a different shape, which the bridge
        would broadcast: it should cover the cached positions too,
        `past_key_values.get_seq_length()` of them.
        """
        cache = kwargs.get("past_key_values")
        seq = input_ids.shape[1] + (0 if cache is None else cache.get_seq_length())
        require(
            attention_mask is None or attention_mask.shape == (len(input_ids), seq),
            f"attention_mask should have shape {[len(input_ids), seq]}, but has "
            f"{None if attention_mask is None else list(attention_mask.shape)}",
        )
        # SOLUTION START
        return self._run([], input_ids, attention_mask, **kwargs)
        # SOLUTION END

    def _run(self, hooks: list[tuple[str, Callable]], input_ids, attention_mask, **kwargs):
        # The adapters' hooks are made anew each time: stored closures would survive a deepcopy and
        # point at the original's adapters.
        if self._mode == "hooked":
            pairs = (make_lora_hooks(site, layer) for site, layer in self.adapters.items())
            hooks = [hook for pair in pairs for hook in pair] + hooks
        with self.base.hooks(fwd_hooks=hooks):
            output = self.base(input_ids, attention_mask=attention_mask, **kwargs)
        for attention in self._attentions:
            attention._pattern = None  # GPT-2's bridge keeps [batch heads seq seq] with its graph
        if isinstance(output, tuple):
            return at_least_float32(output[0]), *output[1:]
        return at_least_float32(output)

    @contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        if self._mode != "hooked":
            raise RuntimeError(f"{mode}() cannot be entered inside {self._mode}()")
        self._mode = mode
        try:
            yield
        finally:
            self._mode = "hooked"

    @contextmanager
    def reference(self) -> Iterator["TransformerWithLora"]:
        """Switch the adapters off inside: that's the frozen model, without a second copy.

        Gradients are recorded inside exactly when they are outside.
        Entering it inside `reference()` or `merged()` is an error.
        """
        with self._in_mode("reference"):
            yield self

    @contextmanager
    def merged(self) -> Iterator["TransformerWithLora"]:
        """Put W + A B alpha / rank in place of W inside, without hooks: faster sampling.

        The sum is rounded to the weights' dtype once, so in bfloat16 it differs visibly from the
        hooked model. On leaving, even after an error or in the middle of merging, the saved weights
        are put back bit for bit (subtracting what was added wouldn't do that). They are written
        through `.data`, which autograd does not see: a forward pass before `with merged()` and its
        backward pass after it are safe, a backward pass inside isn't. The adapters are read once,
        on entering. Entering it inside `reference()` or `merged()` is an error.
        """
        with self._in_mode("merged"):
            weights = [linear.weight.data for linear in self._linears.values()]
            saved = [weight.clone() for weight in weights]
            try:
                for linear, layer in zip(self._linears.values(), self._layers, strict=True):
                    delta = layer.compute_delta().detach()  # [d_in d_out]
                    if isinstance(linear, nn.Linear):
                        delta = delta.T  # nn.Linear keeps [d_out d_in], GPT-2's Conv1D [d_in d_out]
                    weight = linear.weight.data
                    weight.copy_(at_least_float32(weight) + delta)
                yield self
            finally:
                for weight, original in zip(weights, saved, strict=True):
                    weight.copy_(original)

    def trainable_parts(self) -> dict[str, list[nn.Parameter]]:
        """Return what is trained, by part: the optimizer gives each part a learning rate of its
        own.
        """
        return {"adapters": list(self._layers.parameters())}

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return what is trained, from every part, including those that a subclass adds."""
        return [parameter for part in self.trainable_parts().values() for parameter in part]

    def trainable_state(self) -> dict[str, Tensor]:
        """Return the trained tensors by name: `<site>.lora_A` and `<site>.lora_B`."""
        return {
            f"{site}.{name}": parameter.data
            for site, layer in self.adapters.items()
            for name, parameter in layer.named_parameters()
        }

    def load_trainable_state(self, state: dict[str, Tensor]) -> None:
        """Copy tensors in by name. Nothing is changed unless all names and shapes fit."""
        own = self.trainable_state()
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        require(
            not missing and not unknown,
            f"the adapter should have this model's sites; missing {missing}, unknown {unknown}",
        )
        for name, tensor in own.items():
            require(
                tensor.shape == state[name].shape,
                f"{name} should have shape {list(tensor.shape)}, but has {list(state[name].shape)}",
            )
            require(bool(state[name].isfinite().all()), f"{name} should be finite, but is not")
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def save_adapter(self, path: str | Path) -> None:
        """Write everything that is trained to a safetensors file, named as in `trainable_state`.

        Its metadata records "scaling", alpha / rank, as `str(float(...))`: `load_adapter` compares
        it as a number.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        state = {name: tensor.contiguous() for name, tensor in self.trainable_state().items()}
        save_file(state, partial, metadata={"scaling": str(float(self._layers[0].scaling))})
        os.replace(partial, path)

    def load_adapter(self, path: str | Path) -> None:
        """Read what `save_adapter` wrote, into the parameters that are there, in their dtype.

        Raises ValueError if the file is missing or damaged, or has different sites, shapes or
        scaling; no parameter changes then.
        """
        require(Path(path).is_file(), f"path should be an adapter file, but {path} is not there")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"path should be a safetensors file, but {path} is not: {error}"
            ) from error
        scaling = float(metadata.get("scaling", self._layers[0].scaling))
        require(
            scaling == self._layers[0].scaling,
            f"alpha / rank of the adapter should be {self._layers[0].scaling}, but is {scaling}",
        )
        self.load_trainable_state(state)


def _get_in_out(linear: nn.Linear | Conv1D) -> tuple[int, int]:
    shape = tuple(linear.weight.shape)
    return shape[::-1] if isinstance(linear, nn.Linear) else shape


# --- Supervised fine-tuning ---------------------------------------------------------------------


@shape_checked
def calc_sft_loss(
    logits: Float[Tensor, "batch seq vocab"],
    tokens: Int[Tensor, "batch seq"],
    loss_mask: Bool[Tensor, "batch seq"],
) -> Float[Tensor, ""]:
    """Return the mean of -log p(token_t), in nats, over the targets: cross-entropy (minimised).

    `loss_mask` is true where `tokens[t]` is a target. The first token has no prediction and is
    never one. Without any target the loss is 0.
    """
    is_target = loss_mask[:, 1:]
    # Chosen before the softmax: the other logits and tokens reach neither loss nor gradient.
    chosen = at_least_float32(select_completion(logits, prefix_len=1)[is_target])  # [targets vocab]
    loss = F.cross_entropy(chosen, tokens[:, 1:][is_target].long(), reduction="sum")
    return loss / max(len(chosen), 1)
