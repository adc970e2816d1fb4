"""Wrong answers to chapter 1, each with what a good teacher would say of it."""

from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from solutions.ch1_lora import LoraLayer, TransformerWithLora, make_lora_hooks
from utils.grading.answers import IN_ITS_MODULE, Answer, Edit, edit, wrong

BUILD, CONSTRUCT = "TransformerWithLora.from_pretrained", "TransformerWithLora.__init__"
REFERENCE, IN_MODE = "TransformerWithLora.reference", "TransformerWithLora._in_mode"
SAVE, LOAD = "TransformerWithLora.save_adapter", "TransformerWithLora.load_adapter"


def _put_under_names(self, state):
    for name, tensor in self.trainable_state().items():
        tensor.copy_(state[name])


def _looks_at_no_mask(context):
    @contextmanager
    def enter(self):
        with context(self):
            self.forward = lambda input_ids, attention_mask=None, **kwargs: self._run(
                [], input_ids, attention_mask, **kwargs
            )
            try:
                yield self
            finally:
                del self.forward

    return enter


def _forward_of_its_own(context, forward):
    @contextmanager
    def enter(self):
        with context(self):
            self.forward = forward.__get__(self)
            try:
                yield self
            finally:
                del self.forward

    return enter


HEAD = "A subclass may have more parts than the adapters, as chapter 2's has a value head"


# --- LoraLayer ----------------------------------------------------------------------------------

INIT, FORWARD = "LoraLayer.__init__", "LoraLayer.forward"

LORA_LAYER = [
    edit(
        "LoraLayer",
        "always_in_float32",
        "x.to(self.lora_A.dtype)",
        "x.float()",
        "x is cast to float32, and an adapter in float64 then raises. Cast to the adapter's dtype.",
        within="LoraLayer.forward",
    ),
    edit(
        "LoraLayer",
        "delta_kept_in_evaluation_mode",
        "        return self.lora_A @ self.lora_B * self.scaling",
        "        if self.training:\n"
        "            return self.lora_A @ self.lora_B * self.scaling\n"
        '        if getattr(self, "_delta", None) is None:\n'
        "            self._delta = (self.lora_A @ self.lora_B * self.scaling).detach()\n"
        "        return self._delta\n\n"
        "    def train(self, mode=True):\n"
        "        self._delta = None\n"
        "        return super().train(mode)",
        "In eval() compute_delta is kept, and is out of date once A and B change: eval() does not "
        "say that nothing is trained.",
    ),
    edit(
        "LoraLayer",
        "delta_kept_under_no_grad",
        "        return self.lora_A @ self.lora_B * self.scaling",
        "        if torch.is_grad_enabled():\n"
        "            return self.lora_A @ self.lora_B * self.scaling\n"
        '        if not hasattr(self, "_delta"):\n'
        "            self._delta = self.lora_A @ self.lora_B * self.scaling\n"
        "        return self._delta",
        "Under no_grad the first compute_delta is kept, and out of date after a training step.",
    ),
    edit(
        "LoraLayer",
        "not_scaled",
        " * self.scaling",
        "",
        "The product x A B is not scaled. Multiply by alpha / rank, which keeps the size of the "
        "change alike when another rank is tried.",
        within=FORWARD,
    ),
    edit(
        "LoraLayer",
        "rank_over_alpha",
        "alpha / rank",
        "rank / alpha",
        "The scaling is upside down: it is alpha / rank.",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "alpha_alone",
        "alpha / rank",
        "alpha",
        "You multiply by alpha alone. Divide by the rank: A B is a sum over the rank, and should "
        "not grow with it.",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "square_root_of_the_rank",
        "alpha / rank",
        "alpha / rank**0.5",
        "alpha / sqrt(rank) is the scaling of a later paper (rsLoRA). Here it is alpha / rank.",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "integer_division",
        "alpha / rank",
        "alpha // rank",
        "alpha // rank rounds down, to 0 where alpha is the smaller. Divide with /.",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "scaled_twice",
        "self.lora_A * self.scaling) @ self.lora_B",
        "self.lora_A * self.scaling) @ self.lora_B * self.scaling",
        "alpha / rank is multiplied in twice. Once is enough, on either side of B.",
        within=FORWARD,
    ),
    edit(
        "LoraLayer",
        "b_starts_at_random",
        "nn.Parameter(torch.zeros(rank, d_out))",
        "nn.Parameter(torch.empty(rank, d_out).uniform_(-1, 1) / d_in**0.5)",
        "lora_B starts at random, so a new adapter already changes the model. Start it at zero: "
        "training begins at the pretrained weights.",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "both_start_at_zero",
        "torch.empty(d_in, rank).uniform_(-1, 1) / d_in**0.5",
        "torch.zeros(d_in, rank)",
        "A and B both start at zero, and then neither ever has a gradient. Only B should; A starts "
        "uniform in ±1/sqrt(d_in).",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "normal",
        "torch.empty(d_in, rank).uniform_(-1, 1) / d_in**0.5",
        "torch.randn(d_in, rank) / d_in**0.5",
        "lora_A is drawn from a normal distribution. Draw it uniformly from ±1/sqrt(d_in).",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "kaiming_takes_the_rank_for_the_fan_in",
        "torch.empty(d_in, rank).uniform_(-1, 1) / d_in**0.5",
        "nn.init.kaiming_uniform_(torch.empty(d_in, rank), a=5**0.5)",
        "kaiming_uniform_ takes the last axis for the fan-in. On a [d_in, rank] matrix that is the "
        "rank, so the bound is 1/sqrt(rank), where 1/sqrt(d_in) is right.",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "kaiming_with_its_own_slope",
        "torch.empty(d_in, rank).uniform_(-1, 1) / d_in**0.5",
        "nn.init.kaiming_uniform_(torch.empty(rank, d_in)).T.contiguous()",
        "kaiming_uniform_ has a gain of sqrt(2) unless told otherwise, so the bound is "
        "sqrt(6/d_in). With a=5**0.5 it is 1/sqrt(d_in).",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "bound_without_a_root",
        "/ d_in**0.5",
        "/ d_in",
        "The bound of lora_A is 1/d_in. Take the square root: 1/sqrt(d_in) keeps x A as large as "
        "the entries of x.",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "positive_only",
        "uniform_(-1, 1)",
        "uniform_(0, 1)",
        "Every entry of lora_A is positive, as torch.rand gives them. Draw from -1/sqrt(d_in) to "
        "+1/sqrt(d_in).",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "b_is_a_buffer",
        "self.lora_B = nn.Parameter(torch.zeros(rank, d_out))",
        'self.register_buffer("lora_B", torch.zeros(rank, d_out))',
        "lora_B is no nn.Parameter, so nothing trains it.",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "a_is_frozen",
        "/ d_in**0.5)",
        "/ d_in**0.5, requires_grad=False)",
        "lora_A is frozen. Both A and B are trained.",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "input_detached",
        "x.to(self.lora_A.dtype)",
        "x.detach().to(self.lora_A.dtype)",
        "The input is detached: no gradient flows through this adapter to those of earlier blocks.",
        within=FORWARD,
    ),
    edit(
        "LoraLayer",
        "an_activation_between",
        "(x.to(self.lora_A.dtype) @ self.lora_A * self.scaling)",
        "(x.to(self.lora_A.dtype) @ self.lora_A * self.scaling).relu()",
        "There is a nonlinearity between A and B. An adapter is linear, or it could not be merged "
        "into a weight.",
        within=FORWARD,
    ),
    edit(
        "LoraLayer",
        "dropout_in_the_adapter",
        "x.to(self.lora_A.dtype)",
        "F.dropout(x.to(self.lora_A.dtype), 0.05)",
        "There is dropout on the adapter's input: a policy that is scored twice would give two "
        "answers. This adapter has none.",
        within=FORWARD,
    ),
    edit(
        "LoraLayer",
        "input_changed_in_place",
        "(x.to(self.lora_A.dtype) @ self.lora_A * self.scaling)",
        "(x.mul_(self.scaling) @ self.lora_A)",
        "The input is scaled in place: the linear layer beside the adapter reads the same tensor.",
        within=FORWARD,
    ),
    edit(
        "LoraLayer",
        "input_added",
        ") @ self.lora_B",
        ") @ self.lora_B + (x if self.d_in == self.d_out else 0)",
        "The input is added to the result. The adapter returns the change alone; the hook adds it "
        "to the layer's output.",
        within=FORWARD,
    ),
    edit(
        "LoraLayer",
        "kept_in_evaluation_mode",
        "return (x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B",
        "if self.training or not hasattr(self, 'kept'):\n"
        "            self.kept = self.compute_delta()\n"
        "        return x.to(self.lora_A.dtype) @ self.kept",
        "In eval() the product A B is kept from an earlier call: once the adapter has changed, "
        "the result is out of date.",
        within=FORWARD,
    ),
    edit(
        "LoraLayer",
        "other_defaults",
        "rank: int = 4, alpha: float = 32",
        "rank: int = 8, alpha: float = 16",
        "The defaults are rank 4 and alpha 32.",
        within=INIT,
    ),
    edit(
        "LoraLayer",
        "first_axis_squeezed",
        "return (x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B",
        "rows = torch.atleast_2d(x)\n"
        "        return (rows @ self.lora_A * self.scaling @ self.lora_B).squeeze(0)",
        "A leading axis of size 1 is lost, as of a batch of one row. Give the result all of x's "
        "leading axes.",
        within=FORWARD,
    ),
    edit(
        "LoraLayer",
        "no_gradient_in_evaluation_mode",
        "        return (x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B",
        "        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):\n"
        "            return (x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B",
        "In eval() there is no gradient. eval() is about dropout: a policy is trained in it too.",
        within=FORWARD,
    ),
    edit(
        "LoraLayer",
        "alpha_rounded",
        "self.scaling = alpha / rank",
        "self.scaling = int(alpha) / rank",
        "alpha is cut to an integer, but any positive number will do. Divide it as it is.",
    ),
    edit(
        "LoraLayer",
        "no_gradient_through_a_frozen_adapter",
        "        return (x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B",
        "        trained = self.lora_A.requires_grad\n"
        "        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):\n"
        "            return (x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B",
        "A frozen adapter lets no gradient through, so that adapters of earlier blocks learn from "
        "a wrong one. Only A and B are frozen: the product still depends on x.",
        within=FORWARD,
    ),
    edit(
        "LoraLayer",
        "alpha_below_one_refused",
        "require(alpha > 0,",
        "require(alpha >= 1,",
        "An alpha below 1 is refused. Any positive number will do.",
        within="LoraLayer.__init__",
    ),
    edit(
        "LoraLayer",
        "delta_not_scaled",
        "return self.lora_A @ self.lora_B * self.scaling",
        "return self.lora_A @ self.lora_B",
        "compute_delta leaves out alpha / rank. It is the change of the weight, A B alpha / rank.",
    ),
    edit(
        "LoraLayer",
        "delta_as_nn_linear_keeps_it",
        "return self.lora_A @ self.lora_B * self.scaling",
        "return (self.lora_A @ self.lora_B * self.scaling).T",
        "compute_delta is transposed, as nn.Linear keeps its weight. It is [d_in d_out] here.",
    ),
    edit(
        "LoraLayer",
        "cast_to_the_input",
        "        return (x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B",
        "        self.to(x.dtype)\n        return (x @ self.lora_A * self.scaling) @ self.lora_B",
        "The layer itself is cast to the dtype of x, which rounds the trained weights for good. "
        "Cast x.",
    ),
]


@wrong(
    "LoraLayer",
    "lora_A and lora_B are transposed, as the weights of nn.Linear are. Here lora_A is [d_in rank] "
    "and lora_B is [rank d_out].",
)
class TransposedLayer(nn.Module):
    def __init__(self, d_in, d_out, rank=4, alpha=32):
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, d_in).uniform_(-1, 1) / d_in**0.5)
        self.lora_B = nn.Parameter(torch.zeros(d_out, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return x @ self.lora_A.T @ self.lora_B.T * self.scaling


@wrong(
    "LoraLayer",
    "A and B are nn.Linear layers, whose weights are transposed and lie one level deeper. Keep two "
    "parameters: lora_A [d_in rank] and lora_B [rank d_out].",
)
class TwoLinearLayers(nn.Module):
    def __init__(self, d_in, d_out, rank=4, alpha=32):
        super().__init__()
        self.d_in, self.d_out, self.rank, self.alpha = d_in, d_out, rank, alpha
        self.scaling = alpha / rank
        self.lora_A = nn.Linear(d_in, rank, bias=False)
        self.lora_B = nn.Linear(rank, d_out, bias=False)
        nn.init.uniform_(self.lora_A.weight, -(d_in**-0.5), d_in**-0.5)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.scaling


@wrong(
    "LoraLayer",
    "A starts at zero and B at random. It is the other way round: A is random, B is zero.",
)
class SwappedStart(nn.Module):
    def __init__(self, d_in, d_out, rank=4, alpha=32):
        super().__init__()
        self.lora_A = nn.Parameter(torch.zeros(d_in, rank))
        self.lora_B = nn.Parameter(torch.empty(rank, d_out).uniform_(-1, 1) / d_in**0.5)
        self.scaling = alpha / rank

    def forward(self, x):
        return x @ self.lora_A @ self.lora_B * self.scaling


@wrong(
    "LoraLayer",
    "The arguments have other names, so a call with d_in=... and d_out=... raises a TypeError. "
    "Keep the names that the exercise gives.",
)
class InFeatures(LoraLayer):
    def __init__(self, in_features, out_features, rank=4, alpha=32):
        super().__init__(in_features, out_features, rank, alpha)


@wrong(
    "LoraLayer",
    "A dataclass with a hash compares and hashes by its fields, so two layers of one size count as "
    "one module, and parameters() lists one of them. Write __init__, or pass eq=False.",
)
@dataclass(unsafe_hash=True)
class ADataclassWithAHash(nn.Module):
    d_in: int
    d_out: int
    rank: int = 4
    alpha: float = 32

    def __post_init__(self):
        super().__init__()
        self.scaling = self.alpha / self.rank
        lora_A = torch.empty(self.d_in, self.rank).uniform_(-1, 1) / self.d_in**0.5
        self.lora_A = nn.Parameter(lora_A)
        self.lora_B = nn.Parameter(torch.zeros(self.rank, self.d_out))

    def forward(self, x):
        return (x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B


@wrong(
    "LoraLayer",
    "An nn.Linear has a weight of [d_out, d_in], frozen or not, which nothing uses and every file "
    "of adapters would hold: make it a plain nn.Module.",
)
class AsALinearLayer(nn.Linear):
    def __init__(self, d_in, d_out, rank=4, alpha=32):
        super().__init__(d_in, d_out, bias=False)
        self.weight.requires_grad = False
        self.d_in, self.d_out, self.rank, self.alpha = d_in, d_out, rank, alpha
        self.scaling = alpha / rank
        self.lora_A = nn.Parameter(torch.empty(d_in, rank).uniform_(-1, 1) / d_in**0.5)
        self.lora_B = nn.Parameter(torch.zeros(rank, d_out))

    def forward(self, x):
        return (x.to(self.lora_A.dtype) @ self.lora_A * self.scaling) @ self.lora_B


# --- make_lora_hooks ----------------------------------------------------------------------------

_shared_input = {}
_input_of_site = {}
_activations = {}
_recent_inputs = deque(maxlen=50)

MAKE_LORA_HOOKS = [
    edit(
        "make_lora_hooks",
        "nan_to_num_of_the_change",
        "layer(x).reshape(out.shape)",
        "torch.nan_to_num(layer(x)).reshape(out.shape)",
        "An adapter that has become nan changes nothing here, so that a run which has diverged "
        "looks like the reference. Let the nan through.",
    ),
    edit(
        "make_lora_hooks",
        "rounded_products_under_no_grad",
        "        return out + layer(x).reshape(out.shape).to(out.dtype)\n",
        "        if torch.is_grad_enabled():\n"
        "            change = layer(x)\n"
        "        else:\n"
        "            A, B = layer.lora_A.to(x.dtype), layer.lora_B.to(x.dtype)\n"
        "            change = (x @ A * layer.scaling) @ B\n"
        "        return out + change.reshape(out.shape).to(out.dtype)\n",
        "Under no_grad the products are rounded to the activations' dtype: old log-probs then "
        "differ from those of training.",
    ),
    edit(
        "make_lora_hooks",
        "no_nonlocal",
        "        inputs[:] = [x]",
        "        inputs = [x]",
        "The inner function assigns to a name of its own: the other hook never sees it. Say "
        "`nonlocal`, or put it into a list.",
    ),
    edit(
        "make_lora_hooks",
        "heads_told_by_the_last_axis",
        ".reshape(out.shape)",
        ".reshape(out.shape if out.shape[-1] != layer.d_out else (*out.shape[:2], -1))",
        "The last axis does not say whether there are heads: a single one is as wide as the layer. "
        "Give what is added the output's shape.",
    ),
    edit(
        "make_lora_hooks",
        "replaces_the_output",
        "return out + layer(x)",
        "return layer(x)",
        "The hook replaces the output of the linear layer. Add the adapter's output to it.",
    ),
    edit(
        "make_lora_hooks",
        "subtracts",
        "return out + layer(x)",
        "return out - layer(x)",
        "The adapter's output is subtracted: add it.",
    ),
    edit(
        "make_lora_hooks",
        "reads_the_output",
        "x = x.reshape(*x.shape[:2], layer.d_in)",
        "x = out.reshape(*out.shape[:2], -1)",
        "The adapter is given the layer's output. It reads the layer's input, which passes at "
        "`site.hook_in`.",
    ),
    edit(
        "make_lora_hooks",
        "oldest_input_first",
        "inputs[:] = [x]",
        "inputs.insert(0, x)",
        "Inputs pile up: after a forward that broke off, the next one adds to its output what "
        "belongs to the old input. A new input overwrites the last.",
    ),
    edit(
        "make_lora_hooks",
        "inputs_pile_up",
        "inputs[:] = [x]",
        "inputs.append(x)",
        "The input of a forward that broke off is held for good, beside the new one. A new input "
        "overwrites the last.",
    ),
    edit(
        "make_lora_hooks",
        "keeps_the_input_in_training",
        "inputs.pop()",
        "inputs[-1] if torch.is_grad_enabled() else inputs.pop()",
        "The input is let go of under no_grad only: in training every layer's activations stay in "
        "memory after the backward.",
    ),
    edit(
        "make_lora_hooks",
        "keeps_the_input",
        "inputs.pop()",
        "inputs[-1]",
        "The input is still held after the forward: every layer's activations stay in memory. Let "
        "go of it in the second hook.",
    ),
    edit(
        "make_lora_hooks",
        "promoted_dtype",
        ".to(out.dtype)",
        "",
        "Adding a float32 adapter to a bfloat16 output makes it float32, and the next layer "
        "raises. Cast what is added to the output's dtype.",
    ),
    edit(
        "make_lora_hooks",
        "dtype_of_the_input",
        ".to(out.dtype)",
        ".to(x.dtype)",
        "What is added gets the input's dtype. It is the output that it is added to: cast to the "
        "output's.",
    ),
    edit(
        "make_lora_hooks",
        "layer_cast_in_place",
        "layer(x)",
        "layer.to(x.dtype)(x)",
        "`layer.to(...)` casts the layer itself: in bfloat16 its trained weights are rounded for "
        "good. Cast what passes through.",
    ),
    edit(
        "make_lora_hooks",
        "heads_flattened_at_attn_o_only",
        "x = x.reshape(*x.shape[:2], layer.d_in)",
        'x = x.reshape(*x.shape[:2], layer.d_in) if site.endswith("attn.o") else x',
        "Head axes are flattened at attn.o only. Go by the shape of the input, not by the site's "
        "name.",
    ),
    edit(
        "make_lora_hooks",
        "heads_of_the_input_kept",
        "x = x.reshape(*x.shape[:2], layer.d_in)",
        "x = x",
        "At attn.o the input carries separate head axes. Flatten them to d_in before the adapter.",
    ),
    edit(
        "make_lora_hooks",
        "heads_of_the_output_kept",
        ".reshape(out.shape)",
        "",
        "At attn.q, k and v the output carries separate head axes. Give the adapter's output the "
        "shape of the layer's.",
    ),
    edit(
        "make_lora_hooks",
        "heads_transposed",
        "layer(x).reshape(out.shape)",
        "layer(x).reshape(*out.shape[:2], *out.shape[:1:-1]).transpose(2, -1).reshape(out.shape)",
        "The head axes are transposed: d_out is [heads d_head] in this order, so a plain reshape "
        "splits it.",
    ),
    edit(
        "make_lora_hooks",
        "input_detached",
        "x = inputs.pop()",
        "x = inputs.pop().detach()",
        "The input is detached: no gradient flows through this adapter to those of earlier blocks.",
    ),
    edit(
        "make_lora_hooks",
        "output_detached",
        "return out + layer(x)",
        "return out.detach() + layer(x)",
        "The layer's own output is detached: the gradient should flow through it to earlier blocks "
        "as well.",
    ),
    edit(
        "make_lora_hooks",
        "adapter_detached",
        "layer(x).reshape(out.shape)",
        "layer(x).detach().reshape(out.shape)",
        "The adapter's output is detached, so that nothing would be learned.",
    ),
    edit(
        "make_lora_hooks",
        "returns_the_product_as_input",
        "inputs[:] = [x]",
        "inputs[:] = [x]; return layer(x.reshape(*x.shape[:2], -1))",
        "What the first hook returns replaces the layer's input. It should read only: return None.",
    ),
    edit(
        "make_lora_hooks",
        "another_hook_point",
        '(f"{site}.hook_out", add_output)]',
        '(f"{site}.hook_result", add_output)]',
        "The point after a linear layer is `site.hook_out`.",
    ),
    edit(
        "make_lora_hooks",
        "site_left_out",
        '(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)',
        '("hook_in", read_input), ("hook_out", add_output)',
        "The names of the hook points begin with the site: `site.hook_in` and `site.hook_out`.",
    ),
    edit(
        "make_lora_hooks",
        "attention_only",
        '(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)',
        "(f\"{site.split('.attn')[0]}.hook_attn_in\", read_input), "
        '(f"{site}.hook_out", add_output)',
        "The input of a site is what passes at `site.hook_in`, not what enters the whole attention "
        "layer.",
    ),
    edit(
        "make_lora_hooks",
        "scaled_again",
        "layer(x).reshape(out.shape)",
        "(layer(x) * layer.scaling).reshape(out.shape)",
        "The layer has already multiplied by alpha / rank: do not scale again.",
    ),
    edit(
        "make_lora_hooks",
        "last_position_only",
        "return out + layer(x).reshape(out.shape).to(out.dtype)",
        "change = layer(x).reshape(out.shape).to(out.dtype); "
        "return torch.cat([out[:, :-1], out[:, -1:] + change[:, -1:]], 1)",
        "Only the last position is adapted. The adapter acts at every position.",
    ),
    edit(
        "make_lora_hooks",
        "nothing_added_while_b_is_zero",
        "        x = inputs.pop()\n",
        "        x = inputs.pop()\n        if not layer.lora_B.any():\n            return out\n",
        "While B is 0 nothing is added, so B never gets a gradient and nothing is learned.",
    ),
    edit(
        "make_lora_hooks",
        "off_in_evaluation",
        "        x = inputs.pop()\n",
        "        x = inputs.pop()\n        if not layer.training:\n            return out\n",
        "The adapter is off in eval(): it belongs to the policy, which is sampled in eval() too.",
    ),
    edit(
        "make_lora_hooks",
        "added_to_a_flat_copy",
        "return out + layer(x).reshape(out.shape).to(out.dtype)",
        "out.flatten(2).add_(layer(x).to(out.dtype)); return out",
        "`flatten` gives a copy where the output's head axes are strided, and what is added to the "
        "copy is lost. Give the adapter's output the shape of the layer's, and add.",
    ),
    edit(
        "make_lora_hooks",
        "cast_for_bfloat16_only",
        ".to(out.dtype)",
        ".to(out.dtype if out.dtype == torch.bfloat16 else torch.float32)",
        "The output keeps its dtype in bfloat16 only: in float16 it becomes float32.",
    ),
    edit(
        "make_lora_hooks",
        "two_head_axes_expected",
        "x = x.reshape(*x.shape[:2], layer.d_in)",
        "x = x.flatten(2) if x.ndim == 4 else x",
        "Head axes are flattened only where there are two of them. Flatten whatever follows the "
        "batch and seq axes.",
    ),
    edit(
        "make_lora_hooks",
        "change_kept_at_the_point",
        "return out + layer(x).reshape(out.shape).to(out.dtype)",
        "hook.ctx['change'] = layer(x).reshape(out.shape).to(out.dtype)\n"
        "        return out + hook.ctx['change']",
        "What is added stays in `hook.ctx` after the forward, and with it every layer's graph. "
        "Take it out again in the second hook, or keep it in the closure alone.",
    ),
    edit(
        "make_lora_hooks",
        "input_of_a_frozen_adapter_detached",
        "        x = inputs.pop()\n",
        "        x = inputs.pop()\n        x = x if layer.lora_A.requires_grad else x.detach()\n",
        "The input of a frozen adapter is detached, so that adapters of earlier blocks learn from "
        "a wrong gradient. Only A and B are frozen.",
    ),
    edit(
        "make_lora_hooks",
        "off_where_nothing_is_trained",
        "        x = inputs.pop()\n",
        "        x = inputs.pop()\n"
        "        if not (torch.is_grad_enabled() or layer.training):\n"
        "            return out\n",
        "In eval() under no_grad the adapter is off, which is how a policy is sampled. Add its "
        "output in every mode.",
    ),
    edit(
        "make_lora_hooks",
        "input_detached_where_it_is_cast",
        "        x = inputs.pop()\n",
        "        x = inputs.pop()\n"
        "        if x.dtype != layer.lora_A.dtype:\n"
        "            x = x.detach().to(layer.lora_A.dtype)\n",
        "Where the input is cast it is detached as well, so that on a base of 16 bits no gradient "
        "flows through this adapter to those of earlier blocks. A cast alone keeps the graph.",
    ),
    edit(
        "make_lora_hooks",
        "output_detached_where_it_is_cast",
        "        return out + layer(x).reshape(out.shape).to(out.dtype)\n",
        "        change = layer(x).reshape(out.shape)\n"
        "        if change.dtype != out.dtype:\n"
        "            return (out.data.to(change.dtype) + change).to(out.dtype)\n"
        "        return out + change\n",
        "On a base of 16 bits the layer's own output is taken by `.data`, which cuts the graph to "
        "the adapters of earlier blocks: add to `out` itself.",
    ),
    edit(
        "make_lora_hooks",
        "cast_while_gradients_are_on",
        ".to(out.dtype)",
        ".to(out.dtype if torch.is_grad_enabled() else layer.lora_A.dtype)",
        "Under no_grad what is added is not cast: a bfloat16 output becomes float32 when the "
        "policy is sampled. Cast it always.",
    ),
]


@wrong(
    "make_lora_hooks",
    '"in" is in the name of both points of mlp.in: its output is taken for an input, and '
    "nothing is added. Look at the name's end.",
)
def one_function_that_looks_for_in(site, layer):
    inputs = []

    def adapt(activation, hook):
        if "in" in hook.name:
            inputs[:] = [activation]
            return None
        x = inputs.pop().flatten(2)
        return activation + layer(x).reshape(activation.shape).to(activation.dtype)

    return [(f"{site}.hook_in", adapt), (f"{site}.hook_out", adapt)]


@wrong(
    "make_lora_hooks",
    "Two things: what is added is not cast to the output's dtype, so a bfloat16 output becomes "
    "float32; and the input is still held after the forward. Cast, and let go of it in the second "
    "hook.",
)
def neither_cast_nor_let_go(site, layer):
    inputs = []

    def read_input(x, hook):
        inputs[:] = [x]

    def add_output(out, hook):
        change = layer(inputs[0].reshape(*inputs[0].shape[:2], layer.d_in))
        return out + change.reshape(out.shape)

    return [(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)]


@wrong(
    "make_lora_hooks",
    "The input is kept as an attribute of the layer, where it outlives the forward. Keep it "
    "between the two hooks only.",
)
def keeps_the_input_in_the_layer(site, layer):
    def read_input(x, hook):
        layer.last_input = x.detach().clone()
        layer.current = x

    def add_output(out, hook):
        x = layer.current
        del layer.current
        change = layer(x.reshape(*x.shape[:2], -1))
        return out + change.reshape(out.shape).to(out.dtype)

    return [(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)]


@wrong(
    "make_lora_hooks",
    "All sites share one place for the input: where two sites read before the first one adds, as "
    "q, k and v do, each gets the last one's input.",
)
def one_place_for_all_sites(site, layer):
    def read_input(x, hook):
        _shared_input["x"] = x

    def add_output(out, hook):
        x = _shared_input["x"]
        change = layer(x.reshape(*x.shape[:2], -1))
        return out + change.reshape(out.shape).to(out.dtype)

    return [(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)]


@wrong(
    "make_lora_hooks",
    "The inputs are kept by the site's name, so that two adapters on one site share a place: the "
    "first to add takes the input away. Give every pair of hooks a place of its own.",
)
def one_place_for_each_name(site, layer):
    def read_input(x, hook):
        _input_of_site[site] = x

    def add_output(out, hook):
        x = _input_of_site.pop(site)
        change = layer(x.reshape(*x.shape[:2], -1))
        return out + change.reshape(out.shape).to(out.dtype)

    return [(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)]


@wrong(
    "make_lora_hooks",
    "The inputs are kept by their shape, so that of a forward that broke off stays until another "
    "of its shape comes. A new input overwrites the last, whatever its shape.",
)
def one_place_for_each_shape(site, layer):
    inputs = {}

    def read_input(x, hook):
        inputs[x.shape[:2]] = x

    def add_output(out, hook):
        x = inputs.pop(out.shape[:2]).flatten(2)
        return out + layer(x).reshape(out.shape).to(out.dtype)

    return [(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)]


@wrong(
    "make_lora_hooks",
    "A dict of the module keeps every site's input until the next forward, so that all of them "
    "stay in memory. Take the input out again in the second hook.",
)
def kept_by_the_name_of_the_point(site, layer):
    def read_input(x, hook):
        _activations[hook.name] = x.clone()

    def add_output(out, hook):
        x = _activations[f"{site}.hook_in"].flatten(2)
        return out + layer(x).reshape(out.shape).to(out.dtype)

    return [(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)]


@wrong(
    "make_lora_hooks",
    "The hook at hook_in returns the input in the adapter's dtype, which then goes on into the "
    "frozen layer: in 16 bits that is an error. Read it, and return nothing.",
)
def input_goes_on_in_the_adapters_dtype(site, layer):
    inputs = []

    def read_input(x, hook):
        x = x.to(layer.lora_A.dtype)
        inputs[:] = [x]
        return x

    def add_output(out, hook):
        x = inputs.pop()
        x = x.reshape(*x.shape[:2], layer.d_in)
        return out + layer(x).reshape(out.shape).to(out.dtype)

    return [(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)]


@wrong(
    "make_lora_hooks",
    "Inputs pile up until a forward is completed: each one that breaks off leaves one more in the "
    "list. A second input should overwrite the first.",
)
def newest_of_a_stack(site, layer):
    inputs = []

    def read_input(x, hook):
        inputs.append(x)

    def add_output(out, hook):
        x = inputs[-1]
        inputs.clear()
        change = layer(x.reshape(*x.shape[:2], -1))
        return out + change.reshape(out.shape).to(out.dtype)

    return [(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)]


@wrong(
    "make_lora_hooks",
    "A deque of the module keeps copies of the last inputs, which stay in memory after the "
    "forward. Keep the input between the two hooks only.",
)
def recent_inputs_in_a_deque(site, layer):
    inputs = []

    def read_input(x, hook):
        inputs[:] = [x]
        _recent_inputs.append(x.detach().clone())

    def add_output(out, hook):
        x = inputs.pop().flatten(2)
        return out + layer(x).reshape(out.shape).to(out.dtype)

    return [(f"{site}.hook_in", read_input), (f"{site}.hook_out", add_output)]


# --- TransformerWithLora.from_pretrained --------------------------------------------------------

TRANSFORMER_WITH_LORA_FROM_PRETRAINED = [
    edit(
        "TransformerWithLora.from_pretrained",
        "no_sites_are_the_default_ones",
        "        return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "        sites = sites or ATTENTION_SITES\n"
        "        return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "An empty list of sites, as a filter may leave it, gets the default ones. It asks for "
        "none: refuse it, or train nothing.",
    ),
    edit(
        BUILD,
        "no_return",
        "        return cls(",
        "        cls(",
        "The model is built, but not returned.",
    ),
    edit(
        BUILD,
        "moved_to_the_dtype_afterwards",
        "return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "return cls(load_base_model(name, device), rank, alpha, sites).to(device, dtype)",
        "`.to(dtype)` on the whole model rounds the adapters too: give dtype to load_base_model.",
    ),
    edit(
        BUILD,
        "names_of_peft_accepted",
        "        return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        '        pefts = {"q_proj": "attn.q", "k_proj": "attn.k", "v_proj": "attn.v"}\n'
        "        sites = tuple(pefts.get(site, site) for site in sites)\n"
        "        return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "q_proj, PEFT's name, is taken for attn.q. No such site fires: raise a ValueError.",
    ),
    edit(
        BUILD,
        "falls_back_to_the_embedded_model",
        "        return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "        try:\n"
        "            base = load_base_model(name, device, dtype)\n"
        "        except ValueError as error:\n"
        '            print(f"{error}; using the embedded model")\n'
        '            base = load_base_model("embedded", device, dtype)\n'
        "        return cls(base, rank, alpha, sites)",
        "A name that cannot be loaded gives the embedded model, with a line of text that is soon "
        "out of sight. Let the error out.",
    ),
    edit(
        BUILD,
        "rank_ignored",
        "cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "cls(load_base_model(name, device, dtype), alpha=alpha, sites=sites)",
        "The rank is accepted and ignored: every adapter has the default rank.",
    ),
    edit(
        BUILD,
        "alpha_ignored",
        "cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "cls(load_base_model(name, device, dtype), rank, sites=sites)",
        "alpha is accepted and ignored: every adapter is scaled by the default.",
    ),
    edit(
        BUILD,
        "sites_ignored",
        "rank, alpha, sites)",
        "rank, alpha)",
        "The sites are accepted and ignored: the adapters are always on q, k, v and o.",
    ),
    edit(
        BUILD,
        "dtype_ignored",
        "load_base_model(name, device, dtype)",
        "load_base_model(name, device)",
        "The dtype is accepted and ignored: the base is always in float32.",
    ),
    edit(
        BUILD,
        "base_not_frozen",
        "        base.original_model.requires_grad_(False)\n        self.requires_grad_(False)\n",
        "",
        "The base is not frozen. Turn requires_grad off for all of its parameters: only the "
        "adapters are trained.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "biases_trained_too",
        'self._mode = "hooked"',
        'self._mode = "hooked"; [p.requires_grad_() for n, p in base.named_parameters() '
        'if n.endswith("bias") or "norm" in n]',
        "Biases or layer norms of the base still require a gradient. Freeze everything but the "
        "adapters.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "adapters_frozen_too",
        "self.train(False)",
        "self.train(False); self.requires_grad_(False)",
        "The adapters are frozen with the base. Freeze the base before you make the adapters.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "dropout_comes_back",
        "        self.base.train(False)\n",
        "",
        "`.train()` turns the base's dropout on: two identical forwards then differ. Keep the base "
        "in evaluation mode whatever `.train()` says.",
        within="TransformerWithLora.train",
    ),
    edit(
        BUILD,
        "dropout_modules_only",
        "        self.base.train(False)\n",
        "        for module in self.base.modules():\n"
        "            if isinstance(module, nn.Dropout):\n"
        "                module.p = 0.0\n",
        "Only the nn.Dropout modules are off, but Llama's attention calls a function. Keep the "
        "base in evaluation mode.",
        within="TransformerWithLora.train",
    ),
    edit(
        BUILD,
        "train_unfreezes",
        "        self.base.train(False)\n",
        "        self.base.train(False)\n        if mode:\n            self.requires_grad_(True)\n",
        "`.train()` turns requires_grad on for the base as well. It is about modes, such as "
        "dropout: leave requires_grad alone.",
        within="TransformerWithLora.train",
    ),
    edit(
        BUILD,
        "always_the_parent",
        "return cls(",
        "return TransformerWithLora(",
        "from_pretrained of a subclass gives the parent. Build `cls(...)`: later chapters add a "
        "head in a subclass.",
    ),
    edit(
        BUILD,
        "train_returns_nothing",
        "        return self\n",
        "",
        "`.train()` and `.eval()` return None: a `train` of your own has to return self.",
        within="TransformerWithLora.train",
    ),
    edit(
        BUILD,
        "dropout_on_unless_eval",
        "self.train(False)",
        "nn.Module.train(base, True)",
        "A new model starts with the base's dropout on. Put the base into evaluation mode.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "sites_that_never_fire_accepted",
        "for name in names if name in fired",
        "for name in names",
        "An adapter at attn.qkv of GPT-2 is silently dead: this hook point exists, but never "
        "fires. Run a token through and see which points do.",
        within="find_lora_sites",
    ),
    edit(
        BUILD,
        "unknown_sites_dropped",
        "            require(site in available, "
        'f"sites should be among {available}, but one is {site!r}")\n',
        "            pass\n",
        "A site that this architecture does not have is silently left out. Raise a ValueError that "
        "names it.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "error_only_if_no_site_fires",
        "require(site in available,",
        "require(bool(set(sites) & set(available)),",
        "A wrong site beside a right one is accepted. Every site has to fire.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "an_error_that_does_not_name_the_site",
        'f"sites should be among {available}, but one is {site!r}"',
        '"a site is wrong"',
        "The error does not say which site is wrong. Name it, and list those that fire.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "a_key_error",
        'require(site in available, f"sites should be among {available}, but one is {site!r}")',
        "linears[f'blocks.0.{site}']",
        "A site that does not fire is a KeyError. Raise a ValueError that names the site.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "full_names_cut",
        '        require(len(sites) > 0, f"sites should hold',
        '        sites = [s.split(".", 2)[2] if s.startswith("blocks.") else s for s in sites]\n'
        '        require(len(sites) > 0, f"sites should hold',
        "A full name is cut to that within the block, so that blocks.99.attn.q is taken for "
        "attn.q. There is no such site: raise a ValueError.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "an_assertion",
        'require(site in available, f"sites should be among {available}, but one is {site!r}")',
        "assert site in available, f'no site {site!r}'",
        "A site that does not fire is an AssertionError, which `python -O` leaves out. Raise a "
        "ValueError that names the site.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "no_class_method",
        "    @classmethod\n",
        "",
        "from_pretrained is a plain method, so that the name is taken for cls. Put @classmethod "
        "above it.",
    ),
    edit(
        BUILD,
        "sites_matched_by_their_ending",
        "            require(site in available, "
        'f"sites should be among {available}, but one is {site!r}")\n',
        "            require(any(a.endswith(site) for a in available), f'no site {site!r}')\n"
        "        sites = [a for a in available if a.endswith(tuple(sites))]\n",
        'A site is matched by its ending, so that "q" is taken for "attn.q". Compare whole names.',
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "anything_with_a_weight",
        "if isinstance(linear, nn.Linear | Conv1D):",
        'if hasattr(linear, "weight"):',
        "A layer norm is taken for a site, as its hooks fire and it has a weight. Accept linear "
        "layers alone.",
        within="find_lora_sites",
    ),
    edit(
        BUILD,
        "first_block_only",
        'if k.split(".", 2)[2] in sites}',
        "if k.split(\".\", 2)[2] in sites and k.startswith('blocks.0.')}",
        "Only the first block has adapters. Put one on each site of every block.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "one_adapter_for_all_blocks",
        "LoraLayer(*_get_in_out(linear), rank, alpha) for linear in self._linears.values()",
        "shared.setdefault(site.split('.', 2)[2], LoraLayer(*_get_in_out(linear), rank, alpha)) "
        "for shared in [{}] for site, linear in self._linears.items()",
        "All blocks share one adapter for each site. Every block needs adapters of its own.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "the_same_start_for_all",
        "LoraLayer(*_get_in_out(linear), rank, alpha) for linear",
        "(torch.manual_seed(0), LoraLayer(*_get_in_out(linear), rank, alpha))[1] for linear",
        "The generator is seeded before every adapter, so that all of one shape start with the "
        "same A. Seed once, outside.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "linear_layers_only",
        "isinstance(linear, nn.Linear | Conv1D)",
        "isinstance(linear, nn.Linear)",
        "attn.o and the MLP of GPT-2 are refused: they are Conv1D, not nn.Linear.",
        within="find_lora_sites",
    ),
    edit(
        BUILD,
        "linear_sizes_swapped",
        "return shape[::-1] if isinstance(linear, nn.Linear) else shape",
        "return shape",
        "d_in and d_out of an nn.Linear are swapped: its weight is [d_out d_in].",
        within="_get_in_out",
    ),
    edit(
        BUILD,
        "conv_sizes_swapped",
        "return shape[::-1] if isinstance(linear, nn.Linear) else shape",
        "return shape[::-1]",
        "d_in and d_out of GPT-2's Conv1D are swapped: its weight is [d_in d_out], unlike that of "
        "nn.Linear.",
        within="_get_in_out",
    ),
    edit(
        BUILD,
        "rank_and_alpha_swapped",
        "LoraLayer(*_get_in_out(linear), rank, alpha)",
        "LoraLayer(*_get_in_out(linear), alpha, rank)",
        "Rank and alpha are swapped.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "alpha_is_twice_the_rank",
        "LoraLayer(*_get_in_out(linear), rank, alpha)",
        "LoraLayer(*_get_in_out(linear), rank, 2 * rank)",
        "alpha is set to twice the rank, whatever is asked for.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "other_default_sites",
        "sites: tuple[str, ...] = ATTENTION_SITES",
        'sites: tuple[str, ...] = ("attn.q", "attn.v")',
        "The default sites are attn.q, attn.k, attn.v and attn.o.",
    ),
    edit(
        BUILD,
        "other_default_alpha",
        "alpha: float = 32",
        "alpha: float = 16",
        "alpha is 32 by default.",
    ),
    edit(
        BUILD,
        "last_site_checked",
        "        for site in sites:\n",
        "        for site in sites[-1:]:\n",
        "Only the last site is checked, and a wrong one before it is silently left out. Check all.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "bfloat16_or_float32",
        "load_base_model(name, device, dtype)",
        "load_base_model(name, device, dtype if dtype == torch.bfloat16 else torch.float32)",
        "Every dtype but bfloat16 gives float32. Load the base in the dtype that is asked for.",
    ),
    edit(
        BUILD,
        "blocks_start_as_copies",
        "LoraLayer(*_get_in_out(linear), rank, alpha) for linear in self._linears.values()",
        "copy_of(first.setdefault(site.split('.', 2)[2], LoraLayer(*_get_in_out(linear), rank, "
        "alpha))) for copy_of, first in [(__import__('copy').deepcopy, {})] "
        "for site, linear in self._linears.items()",
        "The adapters of a site are copies of the first block's, so that all blocks start with the "
        "same A. Make each one anew.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "one_base_for_all_models",
        "load_base_model(name, device, dtype)",
        "globals().setdefault('_load', __import__('functools').cache(load_base_model))"
        "(name, device, dtype)",
        "The base is loaded once and shared by all models of its name: what one merges into the "
        "weights, the others see. Load one for each.",
    ),
    edit(
        BUILD,
        "blocks_of_one_digit",
        'if k.split(".", 2)[2] in sites}',
        'if k[len("blocks.0.") :] in sites}',
        "Blocks from the tenth on have no adapters: `blocks.10.` is longer than `blocks.0.`. Split "
        "the name at its dots.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "sizes_from_the_config",
        "LoraLayer(*_get_in_out(linear), rank, alpha) for linear in self._linears.values()",
        "LoraLayer(*sizes.get(site.split('.', 2)[2], _get_in_out(linear)), rank, alpha) "
        "for d in [base.cfg.d_model] for sizes in [{'attn.q': (d, d), 'attn.o': (d, d)}] "
        "for site, linear in self._linears.items()",
        "The output of q and the input of o are taken for d_model wide. They are as wide as all "
        "heads together, which another head size makes another number: ask the layer's weight.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "architectures_by_name",
        'available = sorted({site.split(".", 2)[2] for site in linears})',
        'available = [*ATTENTION_SITES, "mlp.in", "mlp.out"]\n'
        '        if base.cfg.architecture == "LlamaForCausalLM":\n'
        '            available.append("mlp.gate")',
        "mlp.gate is refused on every architecture but Llama, though Qwen2's fires as well. Look "
        "at what fires, not at a name.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "takes_no_string",
        "load_base_model(name, device, dtype)",
        "load_base_model(name.resolve(), device, dtype)",
        "A name that is a string raises an error. Wrap a folder: `Path(name)` takes both.",
    ),
    edit(
        BUILD,
        "device_ignored",
        "load_base_model(name, device, dtype)",
        "load_base_model(name, dtype=dtype)",
        "device has no effect. Pass it on.",
    ),
    edit(
        BUILD,
        "seeds_the_global_generator",
        "        return cls(",
        "        torch.manual_seed(0)\n        return cls(",
        "The same seed is set each time: every model starts with the same A, whatever seed the "
        "caller has set. Leave seeds to the caller.",
    ),
    edit(
        "TransformerWithLora.from_pretrained",
        "alpha_rounded",
        "_get_in_out(linear), rank, alpha)",
        "_get_in_out(linear), rank, int(alpha))",
        "alpha is cut to an integer, but any positive number will do. Hand it on as it is.",
        within="TransformerWithLora.__init__",
    ),
    edit(
        "TransformerWithLora.from_pretrained",
        "adapters_in_the_dtype_of_the_base",
        "torch.promote_types(weight.dtype, torch.float32))",
        "weight.dtype)",
        "On a base in bfloat16 the adapters are in bfloat16 too, where a small step of the "
        "optimizer is rounded away. Keep them in float32.",
        within="TransformerWithLora.__init__",
    ),
    edit(
        "TransformerWithLora.from_pretrained",
        "dtype_before_device",
        "        device: str | torch.device | None = None,\n"
        "        dtype: torch.dtype | None = None,",
        "        dtype: torch.dtype | None = None,\n"
        "        device: str | torch.device | None = None,",
        "device and dtype have changed places, so that a call by position mixes them up. Keep the "
        "order of the arguments.",
    ),
    edit(
        "TransformerWithLora.from_pretrained",
        "adapters_on_the_cpu",
        ".to(weight.device, torch.promote_types(weight.dtype, torch.float32))",
        ".float()",
        "The base goes to the device that is asked for and the adapters stay on the CPU, so that "
        "the first forward on a GPU raises an error. Put them where the weights of the base are.",
        within="TransformerWithLora.__init__",
    ),
    Answer(
        IN_ITS_MODULE,
        BUILD,
        "alpha_goes_with_the_rank",
        "Where alpha is left out it is 8 times the rank, which is 32 for a rank of 4 only. It is "
        "32 by default, whatever the rank.",
        edits=(
            Edit(BUILD, "alpha: float = 32", "alpha: float | None = None"),
            Edit(BUILD, "rank, alpha, sites)", "rank, alpha or 8 * rank, sites)"),
        ),
    ),
    edit(
        BUILD,
        "takes_no_torch_device",
        "        return cls(",
        '        if device is not None and "cuda" in device and not torch.cuda.is_available():\n'
        "            device = None\n"
        "        return cls(",
        "A torch.device is searched as if it were a string, which raises a TypeError. The device "
        "may be given as either: hand it on as it is.",
    ),
    edit(
        BUILD,
        "rank_capped",
        "LoraLayer(*_get_in_out(linear), rank, alpha)",
        "LoraLayer(*_get_in_out(linear), min(rank, *_get_in_out(linear)), alpha)",
        "The rank is cut to the smaller of d_in and d_out, which changes alpha / rank as well. "
        "Make the adapters of the rank that is asked for.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "all_but_adapters_frozen_by_name",
        "        return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "        model = cls(load_base_model(name, device, dtype), rank, alpha, sites)\n"
        "        for parameter_name, parameter in model.named_parameters():\n"
        '            parameter.requires_grad_("lora_" in parameter_name)\n'
        "        return model",
        "All that is not called lora_ is frozen, and so is a subclass's value head. Freeze the "
        "base alone.",
    ),
    edit(
        BUILD,
        "one_model_for_the_same_arguments",
        "        return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "        made = vars(TransformerWithLora).get('made', {})\n"
        "        TransformerWithLora.made = made\n"
        "        key = (cls, str(name), rank, alpha, tuple(sites), device, dtype)\n"
        "        if key not in made:\n"
        "            made[key] = cls(load_base_model(name, device, dtype), rank, alpha, sites)\n"
        "        return made[key]",
        "A second call with the same arguments gives the first one's model, trained as it is by "
        "then. Make a new one each time.",
    ),
    edit(
        BUILD,
        "sixteen_bits_or_float32",
        "        return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "        if dtype not in (torch.bfloat16, torch.float16):\n"
        "            dtype = torch.float32\n"
        "        return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "With float64 the base is in float32. Load it in the dtype that is asked for, whichever.",
    ),
    edit(
        BUILD,
        "default_dtype_set",
        "        return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "        if dtype is not None:\n"
        "            torch.set_default_dtype(dtype)\n"
        "        return cls(load_base_model(name, device, dtype), rank, alpha, sites)",
        "The default dtype of torch is set, and all that is made afterwards has it, other models "
        "too. Give the dtype to the loader alone.",
    ),
    edit(
        BUILD,
        "one_start_for_q_k_and_v",
        "        self._attentions =",
        "        started = {}  # q, k and v read the same input\n"
        "        for site, layer in self.adapters.items():\n"
        "            key = (site.split('.')[1], layer.d_in)\n"
        "            layer.lora_A.data.copy_(started.setdefault(key, layer.lora_A.data))\n"
        "        self._attentions =",
        "Adapters of one block start with the same A where they read inputs of one size. Draw an "
        "A for each.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "started_anew_above_zero",
        "        self._attentions =",
        "        for layer in self._layers:\n"
        "            nn.init.uniform_(layer.lora_A, 0, layer.d_in**-0.5)\n"
        "        self._attentions =",
        "The model draws A anew, and from positive values alone. A LoraLayer starts as it should.",
        within=CONSTRUCT,
    ),
    edit(
        BUILD,
        "started_anew_from_a_bell",
        "        self._attentions =",
        "        for layer in self._layers:\n"
        "            bound = layer.d_in**-0.5\n"
        "            nn.init.trunc_normal_(layer.lora_A, std=bound / 2, a=-bound, b=bound)\n"
        "        self._attentions =",
        "The model draws A anew, from a truncated normal distribution. It is uniform.",
        within=CONSTRUCT,
    ),
]


# --- TransformerWithLora.forward ----------------------------------------------------------------

CALL, RUN = "TransformerWithLora.forward", "TransformerWithLora._run"


def _refuse_mask(input_ids, attention_mask, kwargs):
    cache = kwargs.get("past_key_values")
    seq = input_ids.shape[1] + (0 if cache is None else cache.get_seq_length())
    if attention_mask is not None and attention_mask.shape != (len(input_ids), seq):
        raise ValueError("the mask has another shape")


TRANSFORMER_WITH_LORA_FORWARD = [
    edit(
        "TransformerWithLora.forward",
        "dynamic_caches_alone_are_counted",
        "(0 if cache is None else cache.get_seq_length())",
        '(cache.get_seq_length() if type(cache).__name__ == "DynamicCache" else 0)',
        "Only a DynamicCache is counted, so that with a cache of another class the right mask is "
        "refused. Ask any cache for its get_seq_length().",
    ),
    edit(
        "TransformerWithLora.forward",
        "leading_pad_ids_are_padding",
        '        cache = kwargs.get("past_key_values")\n',
        '        cache = kwargs.get("past_key_values")\n'
        "        if attention_mask is None and cache is None:\n"
        "            pad = self.tokenizer.pad_token_id\n"
        "            attention_mask = ((input_ids != pad).cumsum(1) > 0).long()\n",
        "Without a mask, pad ids at the start of a row are taken for padding. They are tokens like "
        "others, as a bos that is the pad token too: without a mask all of them count.",
    ),
    edit(
        "TransformerWithLora.forward",
        "cut_to_the_context",
        "        seq = input_ids.shape[1] +",
        "        if cache is None and input_ids.shape[1] > self.cfg.n_ctx:\n"
        "            input_ids = input_ids[:, -self.cfg.n_ctx :]\n"
        "            if attention_mask is not None:\n"
        "                attention_mask = attention_mask[:, -self.cfg.n_ctx :]\n"
        "        seq = input_ids.shape[1] +",
        "A text longer than the context is cut, without a word, and has fewer logits than tokens. "
        "Hand it on: the model reads it, or says that it cannot.",
    ),
    edit(
        "TransformerWithLora.forward",
        "padding_at_the_end_cut",
        "        return self._run([], input_ids, attention_mask, **kwargs)\n",
        "        if attention_mask is not None and not kwargs:\n"
        "            end = int(attention_mask.any(0).nonzero().max()) + 1\n"
        "            input_ids, attention_mask = input_ids[:, :end], attention_mask[:, :end]\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)\n",
        "Columns at the end that are padding in every row are missing from the logits. They are "
        "[batch seq vocab], as wide as input_ids.",
    ),
    edit(
        "TransformerWithLora.forward",
        "the_callers_cache_is_spared",
        "        return self._run([], input_ids, attention_mask, **kwargs)\n",
        "        if seq > input_ids.shape[1]:\n"
        "            import copy\n"
        "            kwargs['past_key_values'] = copy.deepcopy(cache)\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)\n",
        "The cache that you are given stays as it was, so that the next forward misses what this "
        "one read. The base lengthens it: pass on that very cache.",
    ),
    edit(
        "TransformerWithLora.forward",
        "length_of_the_first_layers_cache",
        "(0 if cache is None else cache.get_seq_length())",
        "(0 if cache is None else cache.layers[0].keys.shape[-2])",
        "A cache that is still empty has no layers, and raises an IndexError. Ask it for "
        "get_seq_length().",
    ),
    edit(
        "TransformerWithLora.forward",
        "no_cache_by_default",
        "        return self._run([], input_ids, attention_mask, **kwargs)\n",
        '        kwargs.setdefault("use_cache", False)\n'
        "        return self._run([], input_ids, attention_mask, **kwargs)\n",
        "use_cache is off by default, so that return_type logits_and_cache gives no cache. Leave "
        "the arguments to the bridge.",
    ),
    edit(
        "TransformerWithLora.forward",
        "longer_masks_cut",
        "        require(\n            attention_mask is None",
        "        if cache is not None and attention_mask is not None:\n"
        "            attention_mask = attention_mask[:, :seq]\n"
        "        require(\n            attention_mask is None",
        "Beside a cache a mask that is too long is cut, and where its padding is on the left the "
        "wrong columns go. Raise a ValueError.",
    ),
    edit(
        "TransformerWithLora.forward",
        "cache_taken_out_of_the_arguments",
        'kwargs.get("past_key_values")',
        'kwargs.pop("past_key_values", None)',
        "`pop` takes the cache out of kwargs, so the model never gets it: use `get`.",
    ),
    edit(
        "TransformerWithLora.forward",
        "hooks_given_that_run_adds",
        "return self._run([], ",
        "hooks = [h for s, x in self.adapters.items() for h in make_lora_hooks(s, x)]\n"
        "        return self._run(hooks, ",
        "The adapters are on twice: `_run` adds their hooks itself. Give it an empty list.",
    ),
    edit(
        "TransformerWithLora.forward",
        "full_context_refused",
        '        cache = kwargs.get("past_key_values")\n',
        '        cache = kwargs.get("past_key_values")\n'
        "        require(input_ids.shape[1] < self.cfg.n_ctx, 'input_ids should be shorter')\n",
        "A text as long as the context is refused, though the model can read it: compare with <=.",
    ),
    edit(
        "TransformerWithLora.forward",
        "counts_the_positions_itself",
        "        seq = input_ids.shape[1] + (0 if cache is None else cache.get_seq_length())\n",
        "        self._seen = input_ids.shape[1] + (0 if cache is None else self._seen)\n"
        "        seq = self._seen\n",
        "The model counts the positions of its last forward, which need not be those of the cache "
        "that it is given: ask the cache.",
    ),
    edit(
        "TransformerWithLora.forward",
        "ids_cut_to_what_the_cache_lacks",
        "        return self._run(",
        "        if cache is not None and input_ids.shape[1] > cache.get_seq_length():\n"
        "            input_ids = input_ids[:, cache.get_seq_length() :]\n"
        "        return self._run(",
        "More new tokens than cached positions are taken for all tokens so far, and their first "
        "ones are cut off. `input_ids` are the new ones.",
    ),
    edit(
        "TransformerWithLora.forward",
        "use_cache_dropped",
        "        return self._run(",
        "        kwargs.pop('use_cache', None)\n        return self._run(",
        "use_cache does not reach the base, which then decides by its config. Pass all of the "
        "cache's arguments on.",
    ),
    edit(
        "TransformerWithLora.forward",
        "checkpointed_in_training_mode",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        if self.training and torch.is_grad_enabled():\n"
        "            return torch.utils.checkpoint.checkpoint(\n"
        "                self._run, [], input_ids, attention_mask, use_reentrant=False, **kwargs\n"
        "            )\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "Checkpointing runs the forward again in the backward, and so lengthens the cache twice.",
    ),
    edit(
        "TransformerWithLora.forward",
        "equal_rows_run_once",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        unique, places = torch.unique(input_ids, dim=0, return_inverse=True)\n"
        "        if not kwargs and len(unique) < len(input_ids):  # a group's prompts\n"
        "            firsts = [places.tolist().index(i) for i in range(len(unique))]\n"
        "            mask = None if attention_mask is None else attention_mask[firsts]\n"
        "            return self._run([], unique, mask)[places]\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "Rows with the same ids are taken for equal, though their masks differ.",
    ),
    edit(
        "TransformerWithLora.forward",
        "gradient_by_the_mode",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        '        with torch.set_grad_enabled(self._mode == "hooked"):\n'
        "            return self._run([], input_ids, attention_mask, **kwargs)",
        "set_grad_enabled(True) turns gradients on inside the caller's no_grad. Leave them to the "
        "caller.",
    ),
    edit(
        "TransformerWithLora.forward",
        "mask_squeezed",
        '        cache = kwargs.get("past_key_values")\n',
        "        if attention_mask is not None:\n"
        "            attention_mask = attention_mask.squeeze(1)  # [batch 1 seq] of a data set\n"
        '        cache = kwargs.get("past_key_values")\n',
        "A mask of one column loses that axis, so that rows of one token are refused. Take the "
        "mask as it is.",
    ),
    edit(
        "TransformerWithLora.forward",
        "added_tokens_refused",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        vocab = self.tokenizer.vocab_size\n"
        "        require(\n"
        "            bool((input_ids < vocab).all()),\n"
        '            f"input_ids should be below {vocab}, but one is {int(input_ids.max())}",\n'
        "        )\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "tokenizer.vocab_size counts no added token, as Qwen's eos is one, so that its id is "
        "refused. Leave this to the embedding.",
    ),
    edit(
        "TransformerWithLora.forward",
        "merged_under_no_grad",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        '        if self._mode == "hooked" and not torch.is_grad_enabled():\n'
        "            with self.merged():\n"
        "                return self._run([], input_ids, attention_mask, **kwargs)\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "Under no_grad the merged model answers, which rounds otherwise: old log-probs are not "
        "those of the model that learns. Keep the hooks on.",
    ),
    edit(
        CALL,
        "no_gradient_with_a_cache",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):\n"
        "            return self._run([], input_ids, attention_mask, **kwargs)",
        "With a cache the logits carry no gradient. A completion may be scored behind a cached "
        "prompt: who samples says no_grad himself.",
    ),
    edit(
        CALL,
        "no_gradient_where_a_cache_is_asked_for",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        '        keeps = torch.is_grad_enabled() and "return_type" not in kwargs\n'
        "        with torch.set_grad_enabled(keeps):\n"
        "            return self._run([], input_ids, attention_mask, **kwargs)",
        "Where a cache is asked for there is no gradient: what is scored after a cached prompt "
        "sends none through the prompt. Who samples says no_grad himself.",
    ),
    edit(
        CALL,
        "cache_detached",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        if cache is not None:\n"
        "            for layer in cache.layers:\n"
        "                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "The cache is detached: what was computed of the prompt depends on the adapters too, and "
        "the gradient lacks that part. Hand the cache on as it is.",
    ),
    edit(
        CALL,
        "cached_positions_counted_where_a_cache_is_asked_for",
        "(0 if cache is None else cache.get_seq_length())",
        '(cache.get_seq_length() if cache is not None and "return_type" in kwargs else 0)',
        "The cached positions are counted only where a cache is to come back, so that a last step "
        "is refused. Ask whether there is a cache.",
    ),
    edit(
        CALL,
        "cache_dropped_without_use_cache",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        '        if not kwargs.get("use_cache"):\n'
        '            kwargs.pop("past_key_values", None)\n'
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "Without use_cache=True a cache that is given is dropped. past_key_values may come alone: "
        "hand it on.",
    ),
    edit(
        CALL,
        "logits_kept_under_no_grad",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        if torch.is_grad_enabled() or kwargs:\n"
        "            return self._run([], input_ids, attention_mask, **kwargs)\n"
        "        given = [x.tolist() for x in (input_ids, attention_mask) if x is not None]\n"
        '        kept, key = vars(self).setdefault("_kept", {}), (self._mode, str(given))\n'
        "        if key not in kept:\n"
        "            kept[key] = self._run([], input_ids, attention_mask)\n"
        "        return kept[key]",
        "Under no_grad the logits of the same ids are kept, and are out of date once the adapters "
        "have changed. Compute them anew.",
    ),
    edit(
        CALL,
        "mask_ignored",
        "self._run([], input_ids, attention_mask, **kwargs)",
        "self._run([], input_ids, None, **kwargs)",
        "The attention mask has no effect: padding is attended to. Hand it on to the base.",
    ),
    edit(
        CALL,
        "positions_without_the_mask",
        "self._run([], input_ids, attention_mask, **kwargs)",
        "self._run([], input_ids, attention_mask, **kwargs, **({} if kwargs else {'position_ids': "
        "torch.arange(input_ids.shape[1]).expand(input_ids.shape)}))",
        "Positions are counted from the first column. Under left padding they start at the first "
        "real token: let the base derive them from the mask.",
    ),
    edit(
        CALL,
        "cache_arguments_dropped",
        "self._run([], input_ids, attention_mask, **kwargs)",
        "self._run([], input_ids, attention_mask)",
        "The cache arguments are dropped. Hand `**kwargs` on to the base.",
    ),
    edit(
        CALL,
        "cache_arguments_dropped_without_hooks",
        "attention_mask=attention_mask, **kwargs)",
        "attention_mask=attention_mask, **(kwargs if hooks else {}))",
        "Inside merged() and reference() the cache arguments are dropped. Hand `**kwargs` on in "
        "every mode: sampling runs inside merged().",
        within=RUN,
    ),
    edit(
        CALL,
        "one_position_for_a_cached_step",
        "self._run([], input_ids, attention_mask, **kwargs)",
        "self._run([], input_ids, attention_mask, **kwargs, **({} if cache is None else "
        "{'position_ids': attention_mask.sum(1, keepdim=True).expand_as(input_ids) - 1}))",
        "Several new tokens after a cache all get the position of the last one. Give each its own, "
        "or let the base derive them from the mask.",
    ),
    edit(
        CALL,
        "a_mask_of_the_ids",
        "self._run([], input_ids, attention_mask, **kwargs)",
        "self._run([], input_ids, (input_ids != self.tokenizer.pad_token_id).long() "
        "if attention_mask is None else attention_mask, **kwargs)",
        "Where no mask is given, one is made from the ids, and real tokens that equal the pad id "
        "are hidden. Without a mask every token is real.",
    ),
    edit(
        CALL,
        "pad_ids_masked_too",
        "self._run([], input_ids, attention_mask, **kwargs)",
        "self._run([], input_ids, attention_mask if attention_mask is None or cache is not None "
        "else attention_mask * (input_ids != self.tokenizer.pad_token_id), **kwargs)",
        "Tokens that equal the pad id are hidden though the mask says that they are real. The mask "
        "alone says what is padding.",
    ),
    edit(
        CALL,
        "without_gradient",
        "with self.base.hooks(fwd_hooks=hooks):",
        "with torch.no_grad(), self.base.hooks(fwd_hooks=hooks):",
        "The forward runs under no_grad: the adapters get no gradient. That the base is frozen "
        "does not mean that nothing flows through it.",
        within=RUN,
    ),
    edit(
        CALL,
        "adapters_off",
        'if self._mode == "hooked":',
        'if self._mode == "never":',
        "The adapters have no effect: run the base with the hooks of every adapter on.",
        within=RUN,
    ),
    edit(
        CALL,
        "adapters_on_twice",
        "hooks = [hook for pair in pairs for hook in pair] + hooks",
        "hooks = [hook for pair in pairs for hook in pair] + hooks\n"
        "            hooks += [h for s, l in self.adapters.items() for h in make_lora_hooks(s, l)]",
        "Every adapter is added twice.",
        within=RUN,
    ),
    edit(
        CALL,
        "all_hooks_use_the_last_adapter",
        "make_lora_hooks(site, layer) for site, layer in self.adapters.items()",
        "make_lora_hooks(site, [l for l in self.adapters.values() if l.d_in == layer.d_in and "
        "l.d_out == layer.d_out][-1]) for site, layer in self.adapters.items()",
        "Sites of one shape all use the last adapter, and the others get no gradient: a closure "
        "made in a loop sees the variable's last value. Make each pair in a function of its own.",
        within=RUN,
    ),
    edit(
        CALL,
        "a_copy_of_the_adapters",
        "make_lora_hooks(site, layer) for",
        "make_lora_hooks(site, copy_of(layer)) for copy_of in [__import__('copy').deepcopy] for",
        "The forward runs on a copy of the adapters: the gradients go to the copy.",
        within=RUN,
    ),
    edit(
        CALL,
        "first_block_unhooked",
        "for site, layer in self.adapters.items())",
        "for site, layer in self.adapters.items() if not site.startswith('blocks.0.'))",
        "The adapters of the first block are not hooked.",
        within=RUN,
    ),
    edit(
        CALL,
        "log_probabilities",
        "return at_least_float32(output)",
        "return at_least_float32(output).log_softmax(-1)",
        "These are log-probabilities: return the logits.",
        within=RUN,
    ),
    edit(
        CALL,
        "last_position",
        "return at_least_float32(output)",
        "return at_least_float32(output)[:, -1:].expand_as(output)",
        "Every position shows the logits of the last one. Return those of all positions.",
        within=RUN,
    ),
    edit(
        CALL,
        "cached_steps_without_adapters",
        'if self._mode == "hooked":',
        'if self._mode == "hooked" and kwargs.get("past_key_values") is None:',
        "Steps from the key-value cache run without the adapters.",
        within=RUN,
    ),
    edit(
        CALL,
        "mask_of_the_newest_tokens",
        "self._run([], input_ids, attention_mask, **kwargs)",
        "self._run([], input_ids, attention_mask if attention_mask is None else "
        "attention_mask[:, -input_ids.shape[1]:], **kwargs)",
        "With a cache the mask has to cover the cached positions too: do not cut it to the new "
        "tokens.",
    ),
    edit(
        CALL,
        "mask_never_refused",
        "attention_mask is None or attention_mask.shape == (len(input_ids), seq),",
        "True,",
        "A mask of another shape is passed on, and where the bridge broadcasts it the logits are "
        "wrong without a word. Raise a ValueError unless the mask has a row for each of input_ids "
        "and a column for each position, those in the cache included.",
    ),
    edit(
        CALL,
        "mask_held_against_the_ids_alone",
        "attention_mask is None or attention_mask.shape == (len(input_ids), seq),",
        "attention_mask is None or attention_mask.shape == input_ids.shape,",
        "The mask is held against input_ids alone, so every step from the cache is refused. It "
        "covers the cached positions too: compare with their number plus that of the new tokens.",
    ),
    edit(
        CALL,
        "columns_of_the_mask_compared",
        "attention_mask is None or attention_mask.shape == (len(input_ids), seq),",
        "attention_mask is None or attention_mask.shape[1] == seq,",
        "Only the columns of the mask are compared: a mask of one row is broadcast to all rows. "
        "Compare both axes.",
    ),
    edit(
        CALL,
        "too_short_a_mask_refused_only",
        "attention_mask is None or attention_mask.shape == (len(input_ids), seq),",
        "attention_mask is None or cache is None or attention_mask.shape == (len(input_ids), seq),",
        "The shape of the mask is compared only where there is a cache. Compare it without one "
        "too.",
    ),
    edit(
        CALL,
        "always_a_mask",
        "attention_mask is None or attention_mask.shape",
        "attention_mask.shape",
        "Without a mask, attention_mask is None, and every token is real: look at its shape only "
        "where there is one.",
    ),
    edit(
        CALL,
        "always_a_tuple",
        "return at_least_float32(output)",
        "return at_least_float32(output), None",
        "A tuple is returned where only logits are asked for.",
        within=RUN,
    ),
    edit(
        "TransformerWithLora.forward",
        "a_mask_of_the_new_tokens",
        '        cache = kwargs.get("past_key_values")\n',
        "        if attention_mask is None:\n"
        "            attention_mask = torch.ones_like(input_ids)\n"
        "            return self._run([], input_ids, attention_mask, **kwargs)\n"
        '        cache = kwargs.get("past_key_values")\n',
        "A mask made for the new tokens alone hides what is in the cache.",
    ),
    edit(
        "TransformerWithLora.forward",
        "adapters_at_zero_skipped",
        "for site, layer in self.adapters.items())",
        "for site, layer in self.adapters.items() if layer.lora_B.any())",
        "Adapters whose B is 0 are skipped, so B never gets a gradient and nothing is learned.",
        within="TransformerWithLora._run",
    ),
    edit(
        CALL,
        "frozen_adapters_are_off",
        'if self._mode == "hooked":',
        'if self._mode == "hooked" and any(p.requires_grad for p in self._layers.parameters()):',
        "Adapters that require no gradient are left out. Frozen or trained, they belong to the "
        "model.",
        within=RUN,
    ),
    Answer(
        IN_ITS_MODULE,
        CALL,
        "gradient_in_training_mode_only",
        "In eval() the logits carry no gradient. That is for no_grad: eval() says how layers "
        "behave, and here they behave alike in either mode.",
        edits=(
            Edit(CONSTRUCT, "self.train(False)", "self.train(True)"),
            Edit(
                RUN,
                "with self.base.hooks(fwd_hooks=hooks):",
                "with self.base.hooks(fwd_hooks=hooks), "
                "torch.set_grad_enabled(torch.is_grad_enabled() and self.training):",
            ),
        ),
    ),
    edit(
        CALL,
        "blocks_by_their_prefix",
        "for site, layer in self.adapters.items())",
        "for block in range(self.cfg.n_layers) for site, layer in self.adapters.items() "
        "if site.startswith(f'blocks.{block}'))",
        "`blocks.1` begins `blocks.10` too, whose adapters are then on twice. Compare with "
        "`blocks.1.`, the dot included.",
        within=RUN,
    ),
    edit(
        "TransformerWithLora.forward",
        "no_cache_is_asked_for_its_length",
        "(0 if cache is None else cache.get_seq_length())",
        '(cache.get_seq_length() if "past_key_values" in kwargs else 0)',
        "past_key_values may be given as None, as get_samples does in its first step, and None has "
        "no length. Ask whether the cache is None, not whether the argument is there.",
    ),
    edit(
        "TransformerWithLora.forward",
        "mask_dropped_in_the_first_step",
        '        cache = kwargs.get("past_key_values")\n',
        '        cache = kwargs.get("past_key_values")\n'
        '        if cache is None and "past_key_values" in kwargs:\n'
        "            return self._run([], input_ids, None, **kwargs)\n",
        "While the cache is still None the attention mask is not handed on, so that the padding "
        "of the prompts is attended to and cached. The mask matters in the first step most.",
    ),
    edit(
        CALL,
        "numbers_of_the_mask_counted",
        "attention_mask is None or attention_mask.shape == (len(input_ids), seq),",
        "attention_mask is None or attention_mask.numel() == len(input_ids) * seq,",
        "The entries of the mask are counted, so that one of [seq batch] passes for one of "
        "[batch seq]. Compare the shape, axis by axis.",
    ),
    edit(
        CALL,
        "masks_not_looked_at_in_a_context",
        '        cache = kwargs.get("past_key_values")\n',
        '        if self._mode != "hooked":\n'
        "            return self._run([], input_ids, attention_mask, **kwargs)\n"
        '        cache = kwargs.get("past_key_values")\n',
        "Inside merged() and reference() the base is run before the mask is looked at. Refuse a "
        "mask that does not fit in every mode: sampling runs inside merged().",
    ),
    edit(
        CALL,
        "rows_of_the_mask_not_compared_with_a_cache",
        "attention_mask is None or attention_mask.shape == (len(input_ids), seq),",
        "attention_mask is None or (attention_mask.shape == input_ids.shape if cache is None "
        "else attention_mask.shape[1] == seq),",
        "With a cache only the columns of the mask are compared, so that a mask of one row is "
        "broadcast to all rows. Compare both axes there too.",
    ),
    edit(
        CALL,
        "mask_of_one_row_never_refused",
        "attention_mask is None or attention_mask.shape",
        "attention_mask is None or len(input_ids) == 1 or attention_mask.shape",
        "The mask of a single row is passed on whatever its length. Compare the shape for every "
        "number of rows.",
    ),
    edit(
        "TransformerWithLora.forward",
        "mask_dropped_without_left_padding",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        if attention_mask is not None and bool(attention_mask[:, 0].all()):\n"
        "            attention_mask = None\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "A mask without padding on the left is dropped, so that tokens after padding on the right "
        "attend to it. Hand every mask on.",
    ),
    edit(
        CALL,
        "first_row_says_if_there_is_padding",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        if attention_mask is not None and bool(attention_mask[0].all()):\n"
        "            attention_mask = None\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "The mask is dropped where its first row has no padding, though other rows may have some. "
        "Hand it on as it is.",
    ),
    edit(
        CALL,
        "prompts_to_cache_not_looked_at",
        '        cache = kwargs.get("past_key_values")\n',
        '        cache = kwargs.get("past_key_values")\n'
        '        if cache is None and kwargs.get("use_cache"):\n'
        "            return self._run([], input_ids, attention_mask, **kwargs)\n",
        "Where a cache is begun, the shape of the mask is not looked at. Refuse a misfit there "
        "too.",
    ),
    edit(
        CALL,
        "new_tokens_taken_for_real",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        if cache is not None and attention_mask is not None:\n"
        "            old = attention_mask[:, : cache.get_seq_length()]\n"
        "            attention_mask = torch.cat([old, torch.ones_like(input_ids)], dim=1)\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "With a cache all new tokens are taken for real, whatever the mask says of them. Hand on "
        "the mask that is given.",
    ),
    edit(
        CALL,
        "a_tuple_with_use_cache",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        '        if kwargs.get("use_cache"):\n'
        '            kwargs["return_type"] = "logits_and_cache"\n'
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "With use_cache=True a tuple is returned, though only logits are asked for. It is "
        "return_type that asks for the cache: pass both on as they are.",
    ),
    edit(
        CALL,
        "pad_ids_masked_in_cached_steps",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        if cache is not None and attention_mask is not None:\n"
        "            attention_mask = attention_mask.clone()\n"
        "            is_real = input_ids != self.tokenizer.pad_token_id\n"
        "            attention_mask[:, -input_ids.shape[1] :] *= is_real\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "In steps from the cache new tokens that equal the pad id are hidden. The mask alone says "
        "what is padding, there too.",
    ),
    edit(
        CALL,
        "no_cache_in_training_mode",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        '        if self.training and "use_cache" in kwargs:\n'
        '            kwargs["use_cache"] = False\n'
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "After train() use_cache is ignored, and sampling fails. Pass cache arguments on in every "
        "mode.",
    ),
    edit(
        CALL,
        "cut_to_the_vocabulary",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        output, vocab = self._run([], input_ids, attention_mask, **kwargs), "
        "self.tokenizer.vocab_size\n"
        "        if isinstance(output, tuple):\n"
        "            return output[0][..., :vocab], *output[1:]\n"
        "        return output[..., :vocab]",
        "The logits are cut to tokenizer.vocab_size, which leaves out added tokens: on Qwen2.5 eos "
        "then has no logit. Return all of them.",
    ),
    edit(
        CALL,
        "one_row_of_a_mask_for_all",
        '        cache = kwargs.get("past_key_values")\n',
        '        cache = kwargs.get("past_key_values")\n'
        '        if attention_mask is not None and len(attention_mask) == 1 and "use_cache" not in '
        "kwargs:\n"
        "            attention_mask = attention_mask.expand(len(input_ids), -1)\n",
        "A mask of one row is spread over all rows unless a cache is asked for. Refuse a mask of "
        "another shape than the ids'.",
    ),
    edit(
        CALL,
        "rows_in_pieces_of_64",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        if len(input_ids) > 64:\n"
        "            masks = [None] * len(input_ids)\n"
        "            if attention_mask is not None:\n"
        "                masks = attention_mask.split(64)\n"
        "            pieces = [\n"
        "                self._run([], piece, mask, **kwargs)\n"
        "                for piece, mask in zip(input_ids.split(64), masks)\n"
        "            ]\n"
        "            if isinstance(pieces[0], tuple):\n"
        "                return torch.cat([piece[0] for piece in pieces]), pieces[-1][1]\n"
        "            return torch.cat(pieces)\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "A large batch is cut into pieces, and the cache is that of the last piece alone. Return "
        "the cache of all rows.",
    ),
    edit(
        CALL,
        "arguments_dropped_under_no_grad",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        if not torch.is_grad_enabled():  # only scored\n"
        "            return self._run([], input_ids, attention_mask)\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "Under no_grad the cache arguments are dropped, and that is where sampling needs them. "
        "Hand `**kwargs` on with and without gradients.",
    ),
    edit(
        CALL,
        "no_mask_for_a_single_token_inside_merged",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        '        if self._mode == "merged" and input_ids.shape[1] == 1:  # it sees all before it\n'
        "            attention_mask = None\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "Inside merged() a single new token is run without the mask, so it attends to the padding "
        "in the cache, and its position counts that. Hand the mask on in every step.",
    ),
    edit(
        CALL,
        "no_mask_for_a_single_row_with_a_cache",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        if len(input_ids) == 1 and kwargs:  # a prompt alone has no padding\n"
        "            attention_mask = None\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "The mask of a single row is dropped where there are cache arguments. One row may be "
        "padded as well, as one of a batch that is sampled row by row.",
    ),
    edit(
        CALL,
        "rows_of_the_mask_cut",
        '        cache = kwargs.get("past_key_values")\n',
        '        cache = kwargs.get("past_key_values")\n'
        "        if attention_mask is not None:\n"
        "            attention_mask = attention_mask[: len(input_ids)]\n",
        "Rows of the mask that input_ids lacks are cut off without a word, and the first rows' "
        "mask may not be that of these ids. Refuse a mask with too many rows.",
    ),
    edit(
        CALL,
        "a_mask_of_the_prompt_lengthened",
        '        cache = kwargs.get("past_key_values")\n',
        '        cache = kwargs.get("past_key_values")\n'
        "        if attention_mask is not None and cache is None and attention_mask.shape[1] > 1:\n"
        "            missing = input_ids.shape[1] - attention_mask.shape[1]\n"
        "            attention_mask = F.pad(attention_mask, (0, max(missing, 0)), value=1)\n",
        "A mask that is too short is filled up with ones, so that padding behind a completion is "
        "taken for real. Refuse a mask that does not cover every position.",
    ),
    edit(
        CALL,
        "common_padding_trimmed_before_caching",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        '        if attention_mask is not None and cache is None and kwargs.get("use_cache"):\n'
        "            first = int(attention_mask.any(0).int().argmax())\n"
        "            input_ids, attention_mask = input_ids[:, first:], attention_mask[:, first:]\n"
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "Columns in which every row is padded are cut off when a cache is begun: the logits lack "
        "them, and the next mask is longer than the cache. Leave ids and mask as they are.",
    ),
    edit(
        CALL,
        "no_gradient_with_a_cache_in_evaluation_mode",
        "        return self._run([], input_ids, attention_mask, **kwargs)",
        "        sampled = kwargs.get('use_cache') and not self.training\n"
        "        with torch.set_grad_enabled(torch.is_grad_enabled() and not sampled):\n"
        "            return self._run([], input_ids, attention_mask, **kwargs)",
        "In eval(), which is how a new model is, logits with a cache carry no gradient. Whoever "
        "samples says no_grad; neither eval() nor a cache does.",
    ),
]


@wrong(
    "TransformerWithLora.forward",
    "The hooks are added at every forward and never removed: at the second one the adapters count "
    "twice. Use them as a context, `with base.hooks(fwd_hooks=...)`.",
)
def hooks_pile_up(self, input_ids, attention_mask=None, **kwargs):
    _refuse_mask(input_ids, attention_mask, kwargs)
    mode, self._mode = self._mode, "plain"
    if mode == "hooked":
        for site, layer in self.adapters.items():
            for name, function in make_lora_hooks(site, layer):
                self.base.add_hook(name, function)
    try:
        return self._run([], input_ids, attention_mask, **kwargs)
    finally:
        self._mode = mode


@wrong(
    "TransformerWithLora.forward",
    "After a forward that raised, the hooks are still there and count twice from then on. Remove "
    "them in a `finally`, or use `with base.hooks(...)`.",
)
def hooks_left_by_an_error(self, input_ids, attention_mask=None, **kwargs):
    _refuse_mask(input_ids, attention_mask, kwargs)
    mode, self._mode = self._mode, "plain"
    if mode == "hooked":
        for site, layer in self.adapters.items():
            for name, function in make_lora_hooks(site, layer):
                self.base.add_hook(name, function)
    try:
        output = self._run([], input_ids, attention_mask, **kwargs)
    finally:
        self._mode = mode
    for name, _ in [hook for pair in self.adapters.items() for hook in make_lora_hooks(*pair)]:
        self.base.hook_dict[name].remove_hooks("fwd")
    return output


@wrong(
    "TransformerWithLora.forward",
    "After a forward that was interrupted, as by Ctrl-C, the hooks are still there: `except "
    "Exception` does not see KeyboardInterrupt. Remove them in a `finally`.",
)
def hooks_left_by_an_interrupt(self, input_ids, attention_mask=None, **kwargs):
    _refuse_mask(input_ids, attention_mask, kwargs)
    hooks = [hook for pair in self.adapters.items() for hook in make_lora_hooks(*pair)]
    hooks = hooks if self._mode == "hooked" else []
    mode, self._mode = self._mode, "plain"
    for name, function in hooks:
        self.base.add_hook(name, function)
    try:
        output = self._run([], input_ids, attention_mask, **kwargs)
    except Exception:
        for name, _ in hooks:
            self.base.hook_dict[name].remove_hooks("fwd")
        raise
    finally:
        self._mode = mode
    for name, _ in hooks:
        self.base.hook_dict[name].remove_hooks("fwd")
    return output


@wrong(
    "TransformerWithLora.forward",
    "The wrapped Hugging Face model is called past the bridge, which derives the positions from "
    "the mask: left-padded rows get the wrong ones.",
)
def past_the_bridge(self, input_ids, attention_mask=None, **kwargs):
    _refuse_mask(input_ids, attention_mask, kwargs)
    cached = kwargs.pop("return_type", None) == "logits_and_cache"
    hooks = [hook for pair in self.adapters.items() for hook in make_lora_hooks(*pair)]
    with self.base.hooks(fwd_hooks=hooks if self._mode == "hooked" else []):
        output = self.base.original_model(input_ids, attention_mask=attention_mask, **kwargs)
    return (output.logits, output.past_key_values) if cached else output.logits


@wrong(
    CALL,
    "The argument has another name, so a call with input_ids=... raises a TypeError. Keep the "
    "names that the exercise gives.",
)
def tokens_for_input_ids(self, tokens, attention_mask=None, **kwargs):
    return TransformerWithLora.forward(self, tokens, attention_mask, **kwargs)


# --- TransformerWithLora.reference --------------------------------------------------------------


class _OffFromTheStart:
    def __init__(self, model):
        if model._mode != "hooked":
            raise RuntimeError("contexts do not nest")
        self.model, model._mode = model, "reference"

    def __enter__(self):
        return self.model

    def __exit__(self, *error):
        self.model._mode = "hooked"


_in_a_context = []


def _refuse_cached_positions(self, input_ids, attention_mask=None, **kwargs):
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError("attention_mask should have the shape of input_ids")
    return self._run([], input_ids, attention_mask, **kwargs)


TRANSFORMER_WITH_LORA_REFERENCE = [
    edit(
        REFERENCE,
        "returned_instead_of_entered",
        '        with self._in_mode("reference"):\n            yield self',
        '        return self._in_mode("reference")',
        "Under @contextmanager the function has to yield: enter `_in_mode` by `with`, and yield "
        "inside.",
    ),
    edit(
        REFERENCE,
        "weights_saved_as_in_merged",
        "            yield self",
        "            weights = [linear.weight.data for linear in self._linears.values()]\n"
        "            saved = [weight.clone() for weight in weights]\n"
        "            try:\n"
        "                yield self\n"
        "            finally:\n"
        "                for weight, original in zip(weights, saved, strict=True):\n"
        "                    weight.copy_(original)",
        "Every adapted weight is copied on entering, as merged() needs it. Nothing is folded in "
        "here: turn the hooks off and copy nothing.",
    ),
    edit(
        REFERENCE,
        "adapters_stay_on",
        'self._in_mode("reference")',
        'self._in_mode("hooked")',
        "The adapters stay on inside reference(): the KL to the reference would silently be 0.",
    ),
    edit(
        REFERENCE,
        "never_turned_on_again",
        '        with self._in_mode("reference"):\n            yield self\n',
        "        self._mode = 'reference'\n        yield self\n",
        "The adapters stay off after reference(). Turn them on again on leaving.",
    ),
    edit(
        REFERENCE,
        "off_after_an_error",
        '        with self._in_mode("reference"):\n            yield self\n',
        "        if self._mode != 'hooked':\n            raise RuntimeError\n"
        "        self._mode = 'reference'\n        yield self\n        self._mode = 'hooked'\n",
        "After an error inside reference() the adapters stay off. Turn them on in a `finally`.",
    ),
    edit(
        REFERENCE,
        "restores_after_exceptions_only",
        '        with self._in_mode("reference"):\n            yield self\n',
        "        if self._mode != 'hooked':\n            raise RuntimeError\n"
        "        self._mode = 'reference'\n        try:\n            yield self\n"
        "        except Exception:\n            self._mode = 'hooked'\n            raise\n"
        "        self._mode = 'hooked'\n",
        "An interrupted cell raises KeyboardInterrupt, which is no Exception: the adapters stay "
        "off. Use `finally`.",
    ),
    edit(
        REFERENCE,
        "errors_swallowed",
        '        with self._in_mode("reference"):\n            yield self\n',
        "        with __import__('contextlib').suppress(Exception), self._in_mode('reference'):\n"
        "            yield self\n",
        "Errors inside reference() disappear. Restore, and let them pass: `finally` does both.",
    ),
    edit(
        REFERENCE,
        "nests",
        '        with self._in_mode("reference"):\n            yield self\n',
        "        mode, self._mode = self._mode, 'reference'\n        try:\n            yield self\n"
        "        finally:\n            self._mode = mode\n",
        "reference() can be entered inside merged(), where the weights hold the adapters: what you "
        "get is not the reference. Make nesting an error.",
    ),
    edit(
        REFERENCE,
        "mode_set_by_hand",
        '        with self._in_mode("reference"):\n            yield self\n',
        "        self._mode = 'reference'\n        try:\n            yield self\n"
        "        finally:\n            self._mode = 'hooked'\n",
        "reference() can be entered inside itself and inside merged(), and the inner one turns the "
        "adapters on when it ends. Nesting is an error: `_in_mode` raises it.",
    ),
    edit(
        REFERENCE,
        "mode_set_by_hand_without_finally",
        '        with self._in_mode("reference"):\n            yield self\n',
        "        self._mode = 'reference'\n        yield self\n        self._mode = 'hooked'\n",
        "Two things: after an error inside reference() the adapters stay off, and reference() can "
        "be entered inside itself or merged(). `_in_mode` has the `finally`, and refuses to nest.",
    ),
    edit(
        REFERENCE,
        "gradients_stay_off",
        "            yield self\n",
        "            torch.set_grad_enabled(False)\n            yield self\n",
        "Gradients are still off after reference(): nothing that follows is trained. Use no_grad "
        "as a context.",
    ),
    edit(
        REFERENCE,
        "inference_mode",
        'with self._in_mode("reference"):',
        'with torch.inference_mode(), self._in_mode("reference"):',
        "Logits made in inference_mode cannot enter a later backward, as the KL penalty asks. Use "
        "no_grad, or nothing: the base is frozen.",
    ),
    edit(
        REFERENCE,
        "a_second_copy",
        '        with self._in_mode("reference"):\n            yield self\n',
        "        base = self.base\n"
        "        if not hasattr(self, 'frozen'):\n"
        "            self.frozen = __import__('copy').deepcopy(base)\n"
        '        with self._in_mode("reference"):\n'
        "            self.base = self.frozen\n            try:\n                yield self\n"
        "            finally:\n                self.base = base\n",
        "The reference is a second copy of the base, which doubles the memory. With its adapters "
        "off the model is the reference.",
    ),
    edit(
        REFERENCE,
        "a_copy_at_each_entry",
        '        with self._in_mode("reference"):\n            yield self\n',
        "        base = self.base\n"
        '        with self._in_mode("reference"):\n'
        "            self.base = __import__('copy').deepcopy(base)\n"
        "            try:\n                yield self\n"
        "            finally:\n                self.base = base\n",
        "Every reference() copies the base for as long as it lasts: twice the memory, and the time "
        "of a copy. Turn the adapters off instead.",
    ),
    edit(
        "TransformerWithLora.reference",
        "unfrozen_on_leaving",
        '        with self._in_mode("reference"):\n            yield self',
        '        with self._in_mode("reference"):\n'
        "            self.requires_grad_(False)\n"
        "            try:\n"
        "                yield self\n"
        "            finally:\n"
        "                self.requires_grad_(True)",
        "On leaving, every weight requires a gradient, those of the frozen base too.",
    ),
    edit(
        "TransformerWithLora.reference",
        "off_for_the_class",
        '        with self._in_mode("reference"):\n            yield self',
        '        with self._in_mode("reference"):\n'
        "            kept = type(self).adapters\n"
        "            type(self).adapters = property(lambda model: {})\n"
        "            try:\n"
        "                yield self\n"
        "            finally:\n"
        "                type(self).adapters = kept",
        "The adapters are switched off on the class, so for every other model as well.",
    ),
    edit(
        "TransformerWithLora.reference",
        "a_forward_without_the_cache",
        '        with self._in_mode("reference"):\n            yield self',
        '        with self._in_mode("reference"):\n'
        "            self.forward = lambda input_ids, attention_mask=None: at_least_float32(\n"
        "                self.base(input_ids, attention_mask=attention_mask)\n"
        "            )\n"
        "            try:\n"
        "                yield self\n"
        "            finally:\n"
        "                del self.forward",
        "Inside, forward drops its other arguments: the reference cannot be sampled with a cache.",
    ),
    edit(
        "TransformerWithLora.reference",
        "adapters_unfrozen_on_leaving",
        "            yield self",
        "            self._layers.requires_grad_(False)\n"
        "            try:\n"
        "                yield self\n"
        "            finally:\n"
        "                self._layers.requires_grad_(True)",
        "On leaving, adapters that were frozen are trained again. Leave requires_grad alone: with "
        "the hooks off, no gradient reaches them.",
    ),
    Answer(
        IN_ITS_MODULE,
        REFERENCE,
        "scalings_in_a_default_argument",
        "The scalings are saved in a default argument, which is made once: with two models inside "
        "reference(), one gets the other's back. Save them in a variable of the call.",
        edits=(
            Edit(REFERENCE, "def reference(self)", "def reference(self, saved=[])"),
            Edit(
                REFERENCE,
                '        with self._in_mode("reference"):\n            yield self\n',
                '        with self._in_mode("reference"):\n'
                "            saved[:] = [layer.scaling for layer in self._layers]\n"
                "            for layer in self._layers:\n"
                "                layer.scaling = 0.0\n"
                "            try:\n"
                "                yield self\n"
                "            finally:\n"
                "                for layer, scaling in zip(self._layers, saved):\n"
                "                    layer.scaling = scaling\n",
            ),
        ),
    ),
    edit(
        REFERENCE,
        "runtime_errors_swallowed",
        "            yield self\n",
        "            try:\n"
        "                yield self\n"
        "            except RuntimeError as error:\n"
        "                print(error)\n",
        "A RuntimeError inside reference() is printed and disappears. Let every error pass on.",
    ),
    edit(
        REFERENCE,
        "reference_in_float32",
        "            yield self",
        "            dtype = next(self.base.parameters()).dtype\n"
        "            self.base.float()\n"
        "            try:\n"
        "                yield self\n"
        "            finally:\n"
        "                self.base.to(dtype)",
        "A base in 16 bits becomes one in float32, which takes twice the memory and gives other "
        "logits than a policy whose B is 0. Keep its dtype.",
    ),
    edit(
        REFERENCE,
        "off_in_the_first_block_only",
        "        with self.base.hooks(fwd_hooks=hooks):\n",
        '        elif self._mode == "reference":\n'
        "            items = [*self.adapters.items()][len(self._layers) // self.cfg.n_layers :]\n"
        "            hooks = [h for item in items for h in make_lora_hooks(*item)] + hooks\n"
        "        with self.base.hooks(fwd_hooks=hooks):\n",
        "Inside, the adapters of the first block are off and those of the others stay on. Turn off "
        "those of every block.",
        within="TransformerWithLora._run",
    ),
]


@wrong(
    REFERENCE,
    "The adapters are overwritten with zeros and never come back. Turn the hooks off, and leave "
    "the adapters as they are.",
)
@contextmanager
def adapters_erased(self):
    with self._in_mode("reference"):
        for layer in self._layers:
            layer.lora_B.data.zero_()
        yield self


@wrong(
    REFERENCE,
    "The adapters are set to zero and back in place: the backward of an earlier forward then "
    "raises, as its values have changed. Turn the hooks off instead.",
)
@contextmanager
def adapters_zeroed_in_place(self):
    with self._in_mode("reference"):
        saved = [layer.lora_B.detach().clone() for layer in self._layers]
        try:
            with torch.no_grad():
                for layer in self._layers:
                    layer.lora_B.zero_()
            yield self
        finally:
            with torch.no_grad():
                for layer, lora_B in zip(self._layers, saved, strict=True):
                    layer.lora_B.copy_(lora_B)


@wrong(
    REFERENCE,
    "The adapters are subtracted inside reference() instead of being left out.",
)
@contextmanager
def adapters_negated(self):
    with self._in_mode("reference"):
        self._mode = "hooked"
        for layer in self._layers:
            layer.scaling = -layer.scaling
        try:
            yield self
        finally:
            for layer in self._layers:
                layer.scaling = -layer.scaling


@wrong(
    REFERENCE,
    "Only the first forward inside reference() is the reference's.",
)
@contextmanager
def for_one_forward(self):
    with self._in_mode("reference"):
        handle = self.register_forward_hook(lambda *_: setattr(self, "_mode", "hooked"))
        try:
            yield self
        finally:
            handle.remove()


@wrong(
    REFERENCE,
    "reference() removes every hook of the base and puts the adapters back with add_hook: they are "
    "then on twice, and stay.",
)
@contextmanager
def hooks_left_behind(self):
    with self._in_mode("reference"):
        self.base.reset_hooks()
        try:
            yield self
        finally:
            for site, layer in self.adapters.items():
                for name, function in make_lora_hooks(site, layer):
                    self.base.add_hook(name, function)


@wrong(
    REFERENCE,
    "The adapters go off when reference() is called, before the `with` is entered. Turn them off "
    "in `__enter__`, where leaving is sure to turn them on again.",
)
def off_at_the_call(self):
    return _OffFromTheStart(self)


@wrong(
    REFERENCE,
    "The adapters are set to zero inside: what save_adapter writes there is lost. Turn the hooks "
    "off, and leave the adapters as they are.",
)
@contextmanager
def adapters_zeroed_through_data(self):
    with self._in_mode("reference"):
        saved = [layer.lora_B.data.clone() for layer in self._layers]
        try:
            for layer in self._layers:
                layer.lora_B.data.zero_()
            yield self
        finally:
            for layer, lora_B in zip(self._layers, saved, strict=True):
                layer.lora_B.data.copy_(lora_B)


@wrong(
    REFERENCE,
    "One lock serves all models, so that no two can be in a context at once, such as a policy and "
    "a reward model. Keep it on the model.",
)
@contextmanager
def a_lock_for_all_models(self):
    if _in_a_context:
        raise RuntimeError("contexts do not nest")
    _in_a_context.append(self)
    try:
        with self._in_mode("reference"):
            yield self
    finally:
        _in_a_context.clear()


@wrong(
    REFERENCE,
    "Inside, a forward of its own looks at no mask, and one of another shape is broadcast. Leave "
    "forward as it is, and turn the hooks off.",
)
def a_forward_that_looks_at_no_mask(self):
    return _looks_at_no_mask(TransformerWithLora.reference)(self)


@wrong(
    REFERENCE,
    "Inside, a forward of its own refuses every mask that covers cached positions, so that the "
    "reference cannot be sampled. Leave forward as it is, and turn the hooks off.",
)
def a_forward_that_knows_no_cached_positions(self):
    return _forward_of_its_own(TransformerWithLora.reference, _refuse_cached_positions)(self)


# --- TransformerWithLora.merged -----------------------------------------------------------------

MERGED = "TransformerWithLora.merged"


def _merge_in_place(self, weights):
    for weight, linear, layer in zip(weights, self._linears.values(), self._layers, strict=True):
        delta = layer.compute_delta().detach()
        delta = delta.T if isinstance(linear, nn.Linear) else delta
        weight.copy_(weight.float() + delta)


@contextmanager
def _merged(self, restore="always", nests=False, subtract=False, delta_of=None):
    """`merged` written out, wrong as asked."""
    if self._mode != "hooked" and not nests:
        raise RuntimeError
    mode, self._mode = self._mode, "merged"
    pairs = list(zip(self._linears.values(), self._layers, strict=True))
    saved = [linear.weight.data.clone() for linear, _ in pairs]
    deltas = [(delta_of or (lambda layer: layer.compute_delta().detach()))(x) for _, x in pairs]
    deltas = [
        d.T if isinstance(linear, nn.Linear) else d
        for d, (linear, _) in zip(deltas, pairs, strict=True)
    ]
    for (linear, _), delta in zip(pairs, deltas, strict=True):
        linear.weight.data.copy_(linear.weight.data.float() + delta)

    def put_back():
        self._mode = mode
        for (linear, _), weight, delta in zip(pairs, saved, deltas, strict=True):
            if subtract == "rounded":
                linear.weight.data -= delta.to(weight.dtype)
            elif subtract:
                linear.weight.data.copy_(linear.weight.data.float() - delta)
            else:
                linear.weight.data.copy_(weight)

    try:
        yield self
    except Exception:
        if restore in ("always", "after an Exception"):
            put_back()
        raise
    except BaseException:
        if restore == "always":
            put_back()
        raise
    put_back()


_kept_deltas = WeakKeyDictionary()


def _take_no_cache(self, input_ids, attention_mask=None):
    return TransformerWithLora.forward(self, input_ids, attention_mask)


TRANSFORMER_WITH_LORA_MERGED = [
    edit(
        "TransformerWithLora.merged",
        "adapters_that_are_nan_left_out",
        "                    delta = layer.compute_delta().detach()  # [d_in d_out]\n",
        "                    delta = layer.compute_delta().detach()  # [d_in d_out]\n"
        "                    if not delta.isfinite().all():\n"
        "                        continue\n",
        "An adapter that holds nan is left out, so that a run which has diverged samples as if all "
        "were well. Merge what there is.",
    ),
    edit(
        MERGED,
        "deltas_kept_under_no_grad",
        "delta = layer.compute_delta().detach()",
        "delta = layer.compute_delta().detach()\n"
        "                    if not torch.is_grad_enabled():  # nothing is trained: keep it\n"
        '                        delta = layer.__dict__.setdefault("_delta", delta)',
        "Under no_grad the deltas of the first merged() are kept, and rollouts go on with the "
        "adapters of the first phase.",
    ),
    edit(
        MERGED,
        "hooks_stay_on",
        'with self._in_mode("merged"):',
        'with self._in_mode("hooked"):',
        "The adapters count twice inside merged(): once in the weights, and once through the "
        "hooks. Turn the hooks off.",
    ),
    edit(
        MERGED,
        "nothing_merged",
        "weight.copy_(at_least_float32(weight) + delta)",
        "pass",
        "Inside merged() the hooks are off, but the weights do not hold the adapters.",
    ),
    edit(
        MERGED,
        "adapters_subtracted",
        "at_least_float32(weight) + delta",
        "at_least_float32(weight) - delta",
        "The adapters are subtracted from the weights: add them.",
    ),
    edit(
        MERGED,
        "weights_replaced",
        "at_least_float32(weight) + delta",
        "delta",
        "The weights are replaced by A B alpha / rank. Add it to them.",
    ),
    edit(
        MERGED,
        "not_scaled",
        "delta = layer.compute_delta().detach()",
        "delta = (layer.lora_A @ layer.lora_B).detach()",
        "What is added to the weights is not scaled: it should be A B alpha / rank.",
    ),
    edit(
        MERGED,
        "never_transposed",
        "if isinstance(linear, nn.Linear):",
        "if False:",
        "A B is [d_in d_out], and nn.Linear keeps its weight as [d_out d_in]: transpose what you "
        "add there. GPT-2's Conv1D keeps [d_in d_out].",
    ),
    edit(
        MERGED,
        "always_transposed",
        "if isinstance(linear, nn.Linear):",
        "if True:",
        "What is added is transposed everywhere. nn.Linear keeps [d_out d_in], but GPT-2's Conv1D "
        "[d_in d_out], as A B is.",
    ),
    edit(
        MERGED,
        "transposed_only_if_it_must_be",
        "if isinstance(linear, nn.Linear):",
        "if delta.shape != linear.weight.shape:",
        "A square weight is not transposed. nn.Linear keeps [d_out d_in], GPT-2's Conv1D "
        "[d_in d_out]: go by the kind of the layer, not by the shape.",
    ),
    edit(
        MERGED,
        "square_weights_of_a_conv_transposed",
        "if isinstance(linear, nn.Linear):",
        "if isinstance(linear, nn.Linear) or delta.shape[0] == delta.shape[1]:",
        "The change for GPT-2's attn.o is transposed, though Conv1D keeps [d_in d_out].",
    ),
    edit(
        MERGED,
        "saved_without_a_copy",
        "[weight.clone() for weight in weights]",
        "list(weights)",
        "The weights still hold the adapters after merged(), and the hooks add them once more. Put "
        "copies back that were made before: `weight.data` is no copy, it changes with the merge.",
    ),
    edit(
        MERGED,
        "errors_swallowed",
        'with self._in_mode("merged"):',
        'with __import__("contextlib").suppress(Exception), self._in_mode("merged"):',
        "Errors inside merged() disappear. Restore, and let them pass: `finally` does both.",
    ),
    edit(
        MERGED,
        "rounded_twice",
        "weight.copy_(at_least_float32(weight) + delta)",
        "weight.copy_(weight + delta.to(weight.dtype))",
        "A B is rounded to bfloat16 before it is added, and the sum is rounded again. Add in "
        "float32 and round once.",
    ),
    edit(
        MERGED,
        "conv_rounded_twice",
        "weight.copy_(at_least_float32(weight) + delta)",
        "weight.copy_(at_least_float32(weight) + delta if isinstance(linear, nn.Linear) else "
        "weight + delta.to(weight.dtype))",
        "For nn.Linear the sum is rounded once, but for GPT-2's Conv1D A B is rounded to bfloat16 "
        "before it is added.",
    ),
    edit(
        MERGED,
        "weights_come_back_as_trained",
        "                for weight, original in zip(weights, saved, strict=True):\n"
        "                    weight.copy_(original)\n",
        "                for linear, original in zip(self._linears.values(), saved, strict=True):\n"
        "                    linear.weight = nn.Parameter(original)\n",
        "The weights come back as new Parameters, which require a gradient: the base is no longer "
        "frozen. Put the old ones back, or pass requires_grad=False.",
    ),
    edit(
        MERGED,
        "autograd_sees_it",
        "weight = linear.weight.data\n",
        "weight = linear.weight\n",
        "The weights are written to where autograd counts it, as it does under no_grad too: the "
        "backward of a forward before merged() then raises. Write through `.data`.",
    ),
    edit(
        MERGED,
        "data_put_back",
        "                for weight, original in zip(weights, saved, strict=True):\n"
        "                    weight.copy_(original)\n",
        "                for linear, original in zip(self._linears.values(), saved, strict=True):\n"
        "                    linear.weight.data = original\n",
        "`weight.data = saved` gives the weight other memory. GPT-2's q, k and v are views of one "
        "matrix, which stays merged, and they no longer belong to it. Copy into the memory that "
        "is there: `weight.data.copy_(saved)`.",
    ),
    edit(
        MERGED,
        "hooks_off_for_good",
        'with self._in_mode("merged"):',
        'self._mode = "merged"\n        if True:',
        "After merged() the hooks stay off: the adapters have no effect any more.",
    ),
    edit(
        MERGED,
        "first_block_only",
        "delta = layer.compute_delta().detach()",
        "delta = layer.compute_delta().detach() * (linear in list(self._linears.values())"
        "[: len(self._linears) // 2])",
        "Only the first block's adapters are merged.",
    ),
    edit(
        MERGED,
        "weights_of_the_first_merge",
        "saved = [weight.clone() for weight in weights]",
        'saved = vars(self).setdefault("_saved", [weight.clone() for weight in weights])',
        "The weights that come back are those of the first merge, even if the base has changed "
        "since, and the copy stays in memory. Save them on entering, each time.",
    ),
    edit(
        MERGED,
        "inference_mode",
        'with self._in_mode("merged"):',
        'with torch.inference_mode(), self._in_mode("merged"):',
        "What is made in inference_mode cannot enter a later backward, as samples and log-probs "
        "do. Use no_grad, or nothing.",
    ),
    edit(
        MERGED,
        "one_lock_for_all_models",
        '        if self._mode != "hooked":\n'
        '            raise RuntimeError(f"{mode}() cannot be entered inside {self._mode}()")\n'
        "        self._mode = mode\n"
        "        try:\n"
        "            yield\n"
        "        finally:\n",
        "        if vars(TransformerWithLora).get('_inside'):\n"
        '            raise RuntimeError(f"{mode}() cannot be entered inside another context")\n'
        "        self._mode, TransformerWithLora._inside = mode, True\n"
        "        try:\n"
        "            yield\n"
        "        finally:\n"
        "            TransformerWithLora._inside = False\n",
        "The lock belongs to the class, so that no two models can be in a context at once, such as "
        "a policy and a reward model. Keep the mode on the model.",
        within=IN_MODE,
    ),
    edit(
        "TransformerWithLora.merged",
        "adapters_unfrozen_on_leaving",
        "                yield self\n            finally:\n",
        "                self._layers.requires_grad_(False)\n"
        "                yield self\n"
        "            finally:\n"
        "                self._layers.requires_grad_(True)\n",
        "On leaving, adapters that were frozen are trained again. Leave requires_grad alone: with "
        "the hooks off, no gradient reaches them.",
    ),
    edit(
        MERGED,
        "float16_rounded_twice",
        "weight.copy_(at_least_float32(weight) + delta)",
        "weight.copy_(weight.float() + delta if weight.dtype == torch.bfloat16 else "
        "weight + delta.to(weight.dtype))",
        "The sum is made in float32 for bfloat16 only: in float16 A B is rounded before it is "
        "added. Add in float32 whatever the dtype of the weights.",
    ),
    edit(
        MERGED,
        "frozen_adapters_left_out",
        "delta = layer.compute_delta().detach()",
        "delta = layer.compute_delta().detach() * float(layer.lora_A.requires_grad)",
        "Adapters that require no gradient are not folded in. Frozen or trained, they belong to "
        "the model.",
    ),
    Answer(
        IN_ITS_MODULE,
        MERGED,
        "saved_in_a_default_argument",
        "The weights are saved in a default argument, which is made once: with two models inside "
        "merged(), one gets the other's back. Save them in a variable of the call.",
        edits=(
            Edit(MERGED, "def merged(self)", "def merged(self, saved={})"),
            Edit(
                MERGED,
                "saved = [weight.clone() for weight in weights]",
                "saved.update(zip(self._linears, [weight.clone() for weight in weights]))",
            ),
            Edit(
                MERGED,
                "zip(weights, saved, strict=True)",
                "zip(weights, [saved[site] for site in self._linears], strict=True)",
            ),
        ),
    ),
    edit(
        MERGED,
        "nothing_to_fold",
        '        with self._in_mode("merged"):\n            weights',
        "        if not any(layer.lora_B.any() for layer in self._layers):\n"
        "            yield self\n"
        "            return\n"
        '        with self._in_mode("merged"):\n            weights',
        "While every B is 0 merged() does nothing, and so can be entered inside itself. Nesting is "
        "an error whatever the adapters hold.",
    ),
    edit(
        MERGED,
        "runtime_errors_swallowed",
        "                yield self\n            finally:\n",
        "                yield self\n"
        "            except RuntimeError as error:\n"
        "                print(error)\n"
        "            finally:\n",
        "A RuntimeError inside merged() is printed and disappears. Let every error pass on.",
    ),
    edit(
        MERGED,
        "put_back_where_the_delta_is_not_zero",
        "                for weight, original in zip(weights, saved, strict=True):\n",
        "                for weight, original, layer in zip("
        "weights, saved, self._layers, strict=True):\n"
        "                    if not layer.compute_delta().any():\n"
        "                        continue\n",
        "What is put back depends on the adapters at the time of leaving, which may have changed "
        "inside. Put back every weight that was saved.",
    ),
    Answer(
        IN_ITS_MODULE,
        MERGED,
        "adapters_put_back_too",
        "With the weights the adapters are put back: one that is loaded inside is lost on leaving. "
        "Save the weights that change.",
        edits=(
            Edit(
                MERGED,
                "saved = [weight.clone() for weight in weights]",
                "saved = {name: tensor.clone() for name, tensor in self.state_dict().items()}",
            ),
            Edit(
                MERGED,
                "                for weight, original in zip(weights, saved, strict=True):\n"
                "                    weight.copy_(original)\n",
                "                for name, tensor in self.state_dict().items():\n"
                "                    tensor.data.copy_(saved[name])\n",
            ),
        ),
    ),
    edit(
        MERGED,
        "saved_in_float32",
        "[weight.clone() for weight in weights]",
        "[weight.float().clone() for weight in weights]",
        "The copies are in float32, so that the weights of a base in float64 come back rounded. "
        "Keep their dtype.",
    ),
]


@wrong(
    MERGED,
    "After an error inside merged() the weights stay merged, and with the hooks on again the "
    "adapters count twice. Put the weights back in a `finally`.",
)
@contextmanager
def weights_stay_after_an_error(self):
    with self._in_mode("merged"):
        weights = [linear.weight.data for linear in self._linears.values()]
        saved = [weight.clone() for weight in weights]
        _merge_in_place(self, weights)
        yield self
        for weight, original in zip(weights, saved, strict=True):
            weight.copy_(original)


@wrong(
    MERGED,
    "The weights come back only up to rounding: in floating point, adding and then subtracting is "
    "not the identity. Put a saved copy back.",
)
def subtracted_on_leaving(self):
    return _merged(self, subtract=True)


@wrong(
    MERGED,
    "Subtracting a rounded A B alpha / rank from the rounded sum does not give the weights back. "
    "Put a saved copy back.",
)
def subtracted_on_leaving_in_the_dtype_of_the_weights(self):
    return _merged(self, subtract="rounded")


@wrong(
    MERGED,
    "After an error inside merged() the weights stay merged and the hooks off. Restore in a "
    "`finally`.",
)
def merged_for_good_by_an_error(self):
    return _merged(self, restore="never")


@wrong(
    MERGED,
    "An interrupted cell raises KeyboardInterrupt, which is no Exception: the weights stay merged. "
    "Restore in a `finally`.",
)
def merged_for_good_by_an_interrupt(self):
    return _merged(self, restore="after an Exception")


@wrong(
    MERGED,
    "merged() inside merged() adds the adapters twice, and inside reference() brings them back. "
    "Make nesting an error.",
)
def merges_nest(self):
    return _merged(self, nests=True)


@wrong(
    MERGED,
    "The product A B is kept from the first time on: after a step of the optimizer the merged "
    "weights are out of date. Compute it on entering.",
)
def merges_old_adapters(self):
    def delta_of(layer):
        return _kept_deltas.setdefault(layer, layer.compute_delta().detach())

    return _merged(self, delta_of=delta_of)


@wrong(
    MERGED,
    "The adapters are set to zero instead of turning the hooks off, and stay zero: training starts "
    "anew after every merge.",
)
@contextmanager
def adapters_reset(self):
    with _merged(self):
        for layer in self._layers:
            layer.lora_B.data.zero_()
        yield self


@wrong(
    MERGED,
    "Inside merged() the weights are Parameters that require a gradient, as a new nn.Parameter "
    "does. The base stays frozen: pass requires_grad=False.",
)
@contextmanager
def merged_weights_require_a_gradient(self):
    with self._in_mode("merged"):
        saved = [(linear, linear.weight) for linear in self._linears.values()]
        try:
            for (linear, weight), layer in zip(saved, self._layers, strict=True):
                delta = layer.compute_delta().detach()
                total = weight.float() + (delta.T if isinstance(linear, nn.Linear) else delta)
                linear.weight = nn.Parameter(total.to(weight.dtype))
            yield self
        finally:
            for linear, weight in saved:
                linear.weight = weight


@wrong(
    MERGED,
    "The weights are merged when merged() is called, before the `with` is entered. Merge on "
    "entering, where leaving is sure to put the weights back.",
)
def merged_at_the_call(self):
    stack = ExitStack()
    stack.enter_context(TransformerWithLora.merged(self))
    return stack


@wrong(
    MERGED,
    "The merged weights of a 16-bit base stay in float32, and a forward inside mixes the two. Make "
    "the sum in float32, then round it once to the dtype of the weights.",
)
@contextmanager
def merged_weights_stay_in_float32(self):
    with self._in_mode("merged"):
        saved = [(linear, linear.weight.data) for linear in self._linears.values()]
        try:
            for (linear, weight), layer in zip(saved, self._layers, strict=True):
                delta = layer.compute_delta().detach()
                delta = delta.T if isinstance(linear, nn.Linear) else delta
                linear.weight.data = weight.float() + delta
            yield self
        finally:
            for linear, weight in saved:
                linear.weight.data = weight


@wrong(
    "TransformerWithLora.merged",
    "An error while the adapters are folded in, such as a lack of memory, leaves some of them in "
    "the weights. Begin the try before the first weight changes.",
)
@contextmanager
def half_merged_by_an_error(self):
    with self._in_mode("merged"):
        weights = [linear.weight.data for linear in self._linears.values()]
        saved = [weight.clone() for weight in weights]
        for linear, layer in zip(self._linears.values(), self._layers, strict=True):
            delta = layer.compute_delta().detach()
            weight = linear.weight.data
            weight.copy_(weight.float() + (delta.T if isinstance(linear, nn.Linear) else delta))
        try:
            yield self
        finally:
            for weight, original in zip(weights, saved, strict=True):
                weight.copy_(original)


@wrong(
    MERGED,
    "`blocks.1` begins `blocks.10` too, so its adapters are folded in twice. Go through the sites "
    "once, or compare with the dot that follows.",
)
@contextmanager
def blocks_merged_by_their_prefix(self):
    with self._in_mode("merged"):
        saved = [linear.weight.data.clone() for linear in self._linears.values()]
        try:
            for block in range(self.cfg.n_layers):
                for (site, linear), layer in zip(self._linears.items(), self._layers, strict=True):
                    if site.startswith(f"blocks.{block}"):
                        delta = layer.compute_delta().detach()
                        delta = delta.T if isinstance(linear, nn.Linear) else delta
                        linear.weight.data.copy_(linear.weight.data.float() + delta)
            yield self
        finally:
            for linear, weight in zip(self._linears.values(), saved, strict=True):
                linear.weight.data.copy_(weight)


@wrong(
    MERGED,
    "Inside, a forward of its own looks at no mask, and one of another shape is broadcast. Leave "
    "forward as it is, and turn the hooks off.",
)
def a_merged_forward_that_looks_at_no_mask(self):
    return _looks_at_no_mask(TransformerWithLora.merged)(self)


@wrong(
    MERGED,
    "Inside, a forward of its own takes no cache arguments, though sampling runs inside merged(). "
    "Leave forward as it is, and turn the hooks off.",
)
def a_merged_forward_without_the_cache(self):
    return _forward_of_its_own(TransformerWithLora.merged, _take_no_cache)(self)


@wrong(
    MERGED,
    "Inside merged() the hooks still run, with a scaling of 0: sampling is no faster, and an "
    "adapter that is not finite spoils the logits. Turn the hooks off.",
)
@contextmanager
def hooks_stay_on_and_add_zero(self):
    def refuse(mode):
        raise RuntimeError(f"{mode}() cannot be entered inside merged()")

    with TransformerWithLora.merged(self):
        scalings = [layer.scaling for layer in self._layers]
        self._mode, self._in_mode = "hooked", refuse
        try:
            for layer in self._layers:
                layer.scaling = 0.0
            yield self
        finally:
            del self._in_mode
            for layer, scaling in zip(self._layers, scalings, strict=True):
                layer.scaling = scaling


# --- TransformerWithLora.trainable_parameters ---------------------------------------------------

TRAINABLE = "TransformerWithLora.trainable_parameters"

TRANSFORMER_WITH_LORA_TRAINABLE_PARAMETERS = [
    edit(
        "TransformerWithLora.trainable_parameters",
        "adapters_alone",
        "[parameter for part in self.trainable_parts().values() for parameter in part]",
        "list(self._layers.parameters())",
        f"The adapters' parameters alone are given. {HEAD}: go over trainable_parts().",
    ),
]


@wrong(TRAINABLE, "These are all parameters, the frozen base's too. Give the adapters' alone.")
def all_parameters(self):
    return list(self.parameters())


@wrong(TRAINABLE, "Only A is given: B, which starts at zero, would stay there.")
def only_a(self):
    return [layer.lora_A for layer in self._layers]


@wrong(TRAINABLE, "Only B is given: A is trained too.")
def only_b(self):
    return [layer.lora_B for layer in self._layers]


@wrong(TRAINABLE, "Only the first block's adapters are given.")
def first_block(self):
    layers = [layer for site, layer in self.adapters.items() if site.startswith("blocks.0.")]
    return [p for layer in layers for p in layer.parameters()]


@wrong(TRAINABLE, "Only the attention's adapters are given: those of the MLP are trained too.")
def attention_only(self):
    layers = [layer for site, layer in self.adapters.items() if ".attn." in site]
    return [p for layer in layers for p in layer.parameters()]


@wrong(
    TRAINABLE,
    "These are copies: an optimizer that steps them leaves the model as it was. Give the "
    "parameters themselves.",
)
def copies(self):
    return [nn.Parameter(p.detach().clone()) for p in self._layers.parameters()]


@wrong(
    TRAINABLE,
    "These are the parameters' data, without a gradient. Give the parameters themselves.",
)
def data(self):
    return [p.data for p in self._layers.parameters()]


@wrong(TRAINABLE, "These are pairs of a name and a parameter. Give the parameters alone.")
def with_names(self):
    return list(self._layers.named_parameters())


@wrong(
    TRAINABLE,
    "Every parameter is listed twice: an optimizer warns of it and steps it twice.",
)
def twice(self):
    return 2 * list(self._layers.parameters())


@wrong(
    TRAINABLE,
    "The list is right, but to ask for it unfreezes the base. Leave requires_grad as it is.",
)
def unfreezes_the_base(self):
    for parameter in self.parameters():
        parameter.requires_grad = True
    return [p for name, p in self.named_parameters() if "lora_" in name]


@wrong(
    TRAINABLE,
    "After a backward that reaches some of the adapters, the others are left out. What is trained "
    "does not depend on which gradients there are at the moment.",
)
def those_that_have_a_gradient(self):
    trained = list(self._layers.parameters())
    return [p for p in trained if p.grad is not None] or trained


@wrong(
    TRAINABLE,
    "Each part takes the place of the one before, so that beside a head the adapters are left out. "
    "Collect all parts.",
)
def last_part_only(self):
    for part in self.trainable_parts().values():
        parameters = list(part)
    return parameters


# --- TransformerWithLora.save_adapter -----------------------------------------------------------


def _save(self, path, state):
    save_file({name: t.contiguous() for name, t in state.items()}, path)


TRANSFORMER_WITH_LORA_SAVE_ADAPTER = [
    edit(
        SAVE,
        "alpha_noted_as_the_scaling",
        "self._layers[0].scaling",
        "self._layers[0].scaling * self._layers[0].lora_A.shape[1]",
        'The metadata\'s "scaling" is alpha: it should be alpha / rank, which load_adapter '
        "compares.",
    ),
    edit(
        SAVE,
        "scaling_noted_with_two_digits",
        "str(float(self._layers[0].scaling))",
        'f"{self._layers[0].scaling:.2f}"',
        'The metadata\'s "scaling" is rounded, so that load_adapter finds another one: write all '
        "its digits, str(scaling).",
    ),
    edit(
        SAVE,
        "named_site_by_site",
        "        save_file(state, partial",
        "        names = dict.fromkeys(site.split('.', 2)[2] for site in self._linears)\n"
        "        sites = [f'blocks.{i}.{n}' for n in names for i in range(self.cfg.n_layers)]\n"
        "        for site, layer in zip(sites, self._layers, strict=True):\n"
        "            state[f'{site}.lora_A'] = layer.lora_A.data.contiguous()\n"
        "            state[f'{site}.lora_B'] = layer.lora_B.data.contiguous()\n"
        "        save_file(state, partial",
        "The names go site by site and the adapters block by block, so that most are saved under "
        "the name of another: take name and adapter from one place.",
    ),
    edit(
        SAVE,
        "a_pickle_by_the_suffix",
        "        os.replace(partial, path)",
        '        if path.suffix in (".pt", ".pth", ".bin"):\n'
        "            torch.save(state, partial)\n"
        "        os.replace(partial, path)",
        "A path that ends in .pt gets a pickle. The file is safetensors, whatever its name.",
    ),
    edit(
        SAVE,
        "a_bare_name_refused",
        "        path.parent.mkdir(parents=True, exist_ok=True)\n",
        "        os.makedirs(os.path.dirname(path), exist_ok=True)\n",
        "The folder of a bare name such as adapter.safetensors is an empty string, which makedirs "
        "refuses. Path(path).parent is `.` there.",
    ),
    edit(
        "TransformerWithLora.save_adapter",
        "everything_trained_after_saving",
        "        os.replace(partial, path)",
        "        os.replace(partial, path)\n        self.requires_grad_(True)",
        "After saving, the weights of the base require a gradient. Saving changes nothing of the "
        "model: leave requires_grad alone.",
    ),
    edit(
        "TransformerWithLora.save_adapter",
        "detached_in_place",
        "tensor.contiguous() for name, tensor in self.trainable_state().items()}",
        "layer.get_parameter(name[-6:]).detach_() for name in self.trainable_state()\n"
        "                 for layer in [self.adapters[name[:-7]]]}",
        "detach_() with an underscore takes the gradient from the parameters themselves, and "
        "training ends with the first save. Use detach(), which gives another tensor.",
    ),
    edit(
        SAVE,
        "in_the_dtype_of_the_base",
        "tensor.contiguous() for",
        "tensor.to(self.cfg.dtype).contiguous() for",
        "The adapters are saved in the dtype of the base, which rounds them where that has 16 "
        "bits. They are in float32: save them as they are.",
    ),
    edit(
        SAVE,
        "adapters_alone",
        "self.trainable_state().items()",
        "TransformerWithLora.trainable_state(self).items()",
        f"The adapters alone are saved. {HEAD}: save all of trainable_state().",
    ),
    edit(
        SAVE,
        "the_suffix_replaced",
        "path = Path(path)\n",
        "path = Path(path)\n"
        "        path = path.with_suffix('.safetensors') if path.suffix else path\n",
        "What stands after the last dot is replaced, so that adapter.step100 and adapter.step200 "
        "become one file. Keep the path as it is given.",
    ),
    edit(
        SAVE,
        "older_adapters_removed",
        "        os.replace(partial, path)",
        "        for old in path.parent.glob('*.safetensors'):\n"
        "            old.unlink()\n"
        "        os.replace(partial, path)",
        "The folder's other adapters are removed. Write one file, and leave the others to whoever "
        "has saved them.",
    ),
]


@wrong(SAVE, "The file is a pickle, which can run code when it is loaded. Write safetensors.")
def with_torch_save(self, path):
    torch.save(self.trainable_state(), path)


@wrong(SAVE, "The whole model is in the file. Save the adapters alone: the base can be had again.")
def saves_everything(self, path):
    rest = {f"base.{i}": p.data.clone() for i, p in enumerate(self.base.parameters())}
    _save(self, path, self.trainable_state() | rest)


@wrong(SAVE, "The adapters are saved in half precision. Keep their dtype.")
def saves_in_half_precision(self, path):
    _save(self, path, {name: t.to(torch.bfloat16) for name, t in self.trainable_state().items()})


@wrong(SAVE, "Only lora_B is in the file. A is trained as well.")
def saves_only_b(self, path):
    _save(self, path, {n: t for n, t in self.trainable_state().items() if n.endswith("lora_B")})


@wrong(SAVE, "Only the last block's adapters are in the file: the names do not tell blocks apart.")
def blocks_overwrite_each_other(self, path):
    _save(self, path, {n.split(".", 2)[2]: t for n, t in self.trainable_state().items()})


@wrong(SAVE, "The product A B is in the file. Save A and B: they are smaller, and go on training.")
def saves_the_product(self, path):
    _save(self, path, {s: layer.compute_delta().detach() for s, layer in self.adapters.items()})


@wrong(SAVE, "The adapters are saved with alpha / rank multiplied in, and scaled again when used.")
def saves_scaled(self, path):
    scaling = self._layers[0].scaling
    state = self.trainable_state()
    _save(self, path, {n: t * scaling if n.endswith("B") else t for n, t in state.items()})


@wrong(SAVE, "Saving moves the adapters: after it, the model is another one.")
def saving_changes_the_model(self, path):
    state = {name: t.half().float() for name, t in self.trainable_state().items()}
    _save(self, path, state)
    _put_under_names(self, state)


@wrong(SAVE, "The file is not where it should be: keep the path as it is given.")
def another_path(self, path):
    _save(self, f"{path}.lora", self.trainable_state())


@wrong(
    SAVE,
    "The path gets a suffix where it has none, so that the file is not where it was asked for.",
)
def another_suffix(self, path):
    _save(self, Path(path).with_suffix(".safetensors"), self.trainable_state())


@wrong(SAVE, "A file that is there already is kept, and the newest values are lost. Overwrite it.")
def never_overwrites(self, path):
    if not Path(path).exists():
        _save(self, path, self.trainable_state())


@wrong(SAVE, "Tensors that are 0 are left out: a new adapter, whose B is 0, cannot be loaded.")
def leaves_out_zeros(self, path):
    _save(self, path, {name: t for name, t in self.trainable_state().items() if t.any()})


@wrong(SAVE, "A temporary file is left beside the adapter. Move it into place with os.replace.")
def leaves_a_temporary_file(self, path):
    _save(self, f"{path}.partial", self.trainable_state())
    Path(path).write_bytes(Path(f"{path}.partial").read_bytes())


@wrong(SAVE, "The tensors are named by number, in the order in which the sites were listed.")
def named_by_number(self, path):
    _save(self, path, {str(i): p.data for i, p in enumerate(self._layers.parameters())})


@wrong(
    SAVE,
    "The names have one digit for the block, so block 10 overwrites block 1. Keep all of it.",
)
def blocks_saved_by_one_digit(self, path):
    state = {}
    for site, layer in self.adapters.items():
        start = f"blocks.{site[len('blocks.')]}.{site.split('.', 2)[2]}"
        state |= {f"{start}.lora_A": layer.lora_A.data, f"{start}.lora_B": layer.lora_B.data}
    save_file(state, path)


@wrong(
    SAVE,
    "What the file at this path held before stays in it, of another model too. Write this model's "
    "tensors alone.",
)
def added_to_the_file(self, path):
    _save(self, path, (load_file(path) if Path(path).is_file() else {}) | self.trainable_state())


@wrong(
    SAVE,
    "Where nothing has changed since the last save no file is written, though that one may be gone "
    "or at another path. Write it each time.",
)
def not_again_if_nothing_changed(self, path):
    state = {name: tensor.clone() for name, tensor in self.trainable_state().items()}
    last = vars(self).get("_last_saved")
    if last is None or not all(torch.equal(tensor, last[name]) for name, tensor in state.items()):
        self._last_saved = state
        save_file(state, path)


# --- TransformerWithLora.load_adapter -----------------------------------------------------------

TRANSFORMER_WITH_LORA_LOAD_ADAPTER = [
    edit(
        LOAD,
        "scaling_compared_as_text",
        'float(metadata.get("scaling", self._layers[0].scaling))',
        'metadata["scaling"]',
        "The file's metadata are strings, and a string never equals a number: compare "
        'float(metadata["scaling"]).',
    ),
    edit(
        LOAD,
        "load_state_dict_not_strict",
        "        self.load_trainable_state(state)",
        "        self.load_state_dict(state, strict=False)",
        "load_state_dict knows the parameters by other names than the file has, and strict=False "
        "says nothing of it: no adapter is loaded.",
    ),
    edit(
        LOAD,
        "copied_by_name_alone",
        "        self.load_trainable_state(state)",
        "        own = self.trainable_state()\n"
        "        for name, tensor in state.items():\n"
        "            own[name].copy_(tensor)",
        "Tensors that the file lacks stay as they were, and one of another shape is broadcast "
        "where it can be. Compare all names and shapes first.",
    ),
    edit(
        LOAD,
        "shapes_as_a_set",
        "                tensor.shape == state[name].shape,",
        "                state[name].shape in {x.shape for x in own.values()},",
        "A shape that some other tensor has is let through, and is broadcast or refused without a "
        "name: compare each tensor with the parameter of its name.",
        within="TransformerWithLora.load_trainable_state",
    ),
    edit(
        LOAD,
        "a_head_that_does_not_fit_is_kept",
        "        self.load_trainable_state(state)",
        "        for name, own in self.trainable_state().items():\n"
        '            if "lora" not in name and own.shape != state.get(name, own[:0]).shape:\n'
        "                state[name] = own\n"
        "        self.load_trainable_state(state)",
        "A head of another shape is left out, and the old one stays without a word. That it does "
        "not fit is an error, as it is for an adapter.",
    ),
    edit(
        "TransformerWithLora.load_adapter",
        "dtype_of_the_file",
        "        self.load_trainable_state(state)",
        "        self.load_trainable_state(state)\n"
        "        for site, layer in self.adapters.items():\n"
        "            for name, parameter in layer.named_parameters():\n"
        '                parameter.data = state[f"{site}.{name}"]',
        "The adapters take the file's dtype, and lie on the CPU. Copy the values into parameters "
        "that are there.",
    ),
    edit(
        "TransformerWithLora.load_adapter",
        "read_once",
        "state = {name: file.get_tensor(name) for name in file.keys()}",
        "state = TransformerWithLora.load_adapter.__dict__.setdefault("
        "str(path), {name: file.get_tensor(name) for name in file.keys()})",
        "A file is read once for good: one that was written anew gives the old adapter.",
    ),
    edit(
        "TransformerWithLora.load_adapter",
        "missing_blocks_pass",
        "        self.load_trainable_state(state)",
        "        own = self.trainable_state()\n"
        '        if {n.split(".", 2)[2] for n in state} != {n.split(".", 2)[2] for n in own}:\n'
        '            raise ValueError("other sites")\n'
        "        for name, tensor in state.items():\n"
        "            if name in own:\n"
        "                if own[name].shape != tensor.shape:\n"
        "                    raise ValueError(name)\n"
        "                own[name].copy_(tensor)",
        "Sites are compared within a block, so an adapter of fewer blocks is loaded in silence.",
    ),
    edit(
        "TransformerWithLora.load_adapter",
        "a_missing_file_passes",
        'require(Path(path).is_file(), f"path should be an adapter file, but {path} is not there")',
        "if not Path(path).is_file():\n            return",
        "Where there is no file you load nothing and say nothing, and what follows runs with other "
        "adapters. Raise an error that names the path.",
    ),
    edit(
        "TransformerWithLora.load_adapter",
        "a_damaged_file_passes",
        "            raise ValueError(\n"
        '                f"path should be a safetensors file, but {path} is not: {error}"\n'
        "            ) from error",
        '            print(f"{path}: {error}")\n            return',
        "A damaged file is printed and then passed over, so that the adapters stay what they were. "
        "Let the error out.",
    ),
    edit(
        LOAD,
        "in_the_dtype_of_the_base",
        "file.get_tensor(name) for",
        "file.get_tensor(name).to(self.cfg.dtype) for",
        "What is read is cast to the dtype of the base, which rounds the adapters where that has "
        "16 bits. Copy them as they are in the file.",
    ),
    edit(
        LOAD,
        "adapters_alone",
        "        self.load_trainable_state(state)",
        "        own = TransformerWithLora.trainable_state(self)\n"
        '        require(own.keys() == state.keys(), "the file has other sites")\n'
        "        for name, tensor in own.items():\n"
        '            require(tensor.shape == state[name].shape, f"{name} has another shape")\n'
        "            tensor.copy_(state[name])",
        f"The adapters alone are loaded. {HEAD}: load all of trainable_state().",
    ),
    edit(
        LOAD,
        "the_suffix_replaced",
        "        require(Path(path).is_file(),",
        "        path = Path(path)\n"
        "        path = path.with_suffix('.safetensors') if path.suffix else path\n"
        "        require(Path(path).is_file(),",
        "What stands after the last dot is replaced, so that adapter.step100 is not found. Read "
        "the path as it is given.",
    ),
    edit(
        LOAD,
        "relative_to_the_home_folder",
        "        require(Path(path).is_file()",
        "        path = Path.home() / path\n        require(Path(path).is_file()",
        "A relative path is looked for in the home folder, where save_adapter has not written it. "
        "Take it from the working directory, as every other function does.",
    ),
]


@wrong(
    LOAD,
    "What does not fit is skipped without a word, as with `strict=False`. Missing and unknown "
    "sites are errors.",
)
def skips_what_does_not_fit(self, path):
    state = load_file(path)
    for name, tensor in self.trainable_state().items():
        if name in state and state[name].shape == tensor.shape:
            tensor.copy_(state[name])


@wrong(
    LOAD,
    "Sites of the file that this model does not have are ignored. That is an error: the adapter "
    "belongs to another model.",
)
def unknown_sites_ignored(self, path):
    self.load_trainable_state({n: load_file(path)[n] for n in self.trainable_state()})


@wrong(
    LOAD,
    "Sites that the file does not have keep their old adapters. That is an error: what is loaded "
    "would be half of each.",
)
def missing_sites_ignored(self, path):
    self.load_trainable_state(self.trainable_state() | load_file(path))


@wrong(
    LOAD,
    "An adapter of rank 1 is broadcast to the model's rank. Compare the shapes before you copy.",
)
def broadcasts(self, path):
    state = load_file(path)
    if state.keys() != self.trainable_state().keys():
        raise ValueError("other sites")
    _put_under_names(self, state)


@wrong(
    LOAD,
    "The tensors are matched by their order, not by name: an adapter of another site with the same "
    "shapes is taken.",
)
def by_position(self, path):
    own, state = self.trainable_state(), load_file(path)
    if [t.shape for t in own.values()] != [state[name].shape for name in sorted(state)]:
        raise ValueError("other shapes")
    for tensor, name in zip(own.values(), sorted(state), strict=True):
        tensor.copy_(state[name])


@wrong(
    LOAD,
    "The adapter takes on whatever rank the file has. A wrong shape is an error.",
)
def takes_any_rank(self, path):
    state = load_file(path)
    if state.keys() != self.trainable_state().keys():
        raise ValueError("other sites")
    for site, layer in self.adapters.items():
        layer.lora_A.data = state[f"{site}.lora_A"]
        layer.lora_B.data = state[f"{site}.lora_B"]


@wrong(
    LOAD,
    "A matrix of another shape is reshaped if it has as many numbers: a transposed one goes in "
    "scrambled. Compare the shapes.",
)
def reshapes(self, path):
    state, own = load_file(path), self.trainable_state()
    self.load_trainable_state({n: t.reshape(own[n].shape) for n, t in state.items()})


@wrong(LOAD, "A path that is a string raises. Wrap it: `Path(path)` takes both.")
def takes_no_string(self, path):
    self.load_trainable_state(load_file(path.resolve()))


@wrong(
    LOAD,
    "The adapters are new Parameters after loading: an optimizer goes on stepping the old ones. "
    "Copy the values into those that are there.",
)
def makes_new_parameters(self, path):
    self.load_trainable_state(load_file(path))
    for layer in self._layers:
        layer.lora_A = nn.Parameter(layer.lora_A.detach().clone())
        layer.lora_B = nn.Parameter(layer.lora_B.detach().clone())


@wrong(LOAD, "The file is read, but nothing is copied into the adapters.")
def nothing_copied(self, path):
    state, own = load_file(path), self.trainable_state()
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in state.items()}:
        raise ValueError("other sites or shapes")
    for name in own:
        own[name] = state[name]


@wrong(LOAD, "Only lora_B is loaded; A keeps the values that it had.")
def only_b_loaded(self, path):
    state = load_file(path)
    self.load_trainable_state(
        {n: state[n] if n.endswith("B") else t for n, t in self.trainable_state().items()}
        | {n: t for n, t in state.items() if n.endswith("B")}
    )


@wrong(
    LOAD,
    "After loading, the adapters no longer require a gradient: training cannot go on. Copy the "
    "values into the parameters that are there.",
)
def loaded_for_inference(self, path):
    self.load_trainable_state(load_file(path))
    self._layers.requires_grad_(False)


@wrong(LOAD, "The loaded values are added to those that are there. Overwrite them.")
def added(self, path):
    own = self.trainable_state()
    self.load_trainable_state({n: t + own.get(n, 0) for n, t in load_file(path).items()})


@wrong(
    LOAD,
    "Blocks of the file that this model does not have are ignored. That is an error: the adapter "
    "belongs to a deeper model.",
)
def blocks_beyond_the_last_ignored(self, path):
    state, own = load_file(path), self.trainable_state()
    for block in range(self.cfg.n_layers):
        start = f"blocks.{block}."
        theirs = {n: t for n, t in state.items() if n.startswith(start)}
        ours = {n: t for n, t in own.items() if n.startswith(start)}
        if {n: t.shape for n, t in ours.items()} != {n: t.shape for n, t in theirs.items()}:
            raise ValueError(f"block {block} does not fit")
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])


@wrong(
    LOAD,
    "Only the shapes of A are compared: a B of one column or row is broadcast. Compare both.",
)
def only_shapes_of_a_compared(self, path):
    state, own = load_file(path), self.trainable_state()
    if state.keys() != own.keys():
        raise ValueError("other sites")
    for name, tensor in own.items():
        if name.endswith("lora_A") and state[name].shape != tensor.shape:
            raise ValueError(f"{name} has another shape")
    _put_under_names(self, state)


@wrong(
    LOAD,
    "After loading, every weight requires a gradient, those of the frozen base too. Only the "
    "adapters are trained.",
)
def everything_trained_after_loading(self, path):
    self.load_trainable_state(load_file(path))
    self.requires_grad_(True)


@wrong(
    LOAD,
    "The names are sorted as text in the file and by number in the model, so that block 10's "
    "adapters go to block 2. Copy by name.",
)
def sorted_as_text(self, path):
    state, own = load_file(path), self.trainable_state()
    if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in own.items()}:
        raise ValueError("sites or shapes do not fit")
    theirs = sorted(state, key=lambda n: (n.split(".", 2)[2], n.split(".")[1]))
    ours = sorted(own, key=lambda n: (n.split(".", 2)[2], int(n.split(".")[1])))
    for mine, name in zip(ours, theirs, strict=True):
        own[mine].copy_(state[name])


@wrong(
    LOAD,
    "A site or a shape that does not fit is an error without a word. Say in the error which one "
    "it is, and what was expected.",
)
def asserts_without_words(self, path):
    own, state = self.trainable_state(), load_file(path)
    assert state.keys() == own.keys()
    for name, tensor in own.items():
        assert state[name].shape == tensor.shape
        tensor.copy_(state[name])


@wrong(
    LOAD,
    "Only the sites are compared, so that a file in which a site has an A and no B is loaded: the "
    "old B stays beside the new A. Compare the full names.",
)
def half_an_adapter_passes(self, path):
    state, own = load_file(path), self.trainable_state()
    if {name.rsplit(".", 1)[0] for name in state} != {name.rsplit(".", 1)[0] for name in own}:
        raise ValueError("the file has other sites")
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise ValueError(f"{name} has another shape")
        own[name].copy_(tensor)


# --- calc_sft_loss ------------------------------------------------------------------------------

CALC_SFT_LOSS = [
    edit(
        "calc_sft_loss",
        "only_finite_losses",
        '    loss = F.cross_entropy(chosen, tokens[:, 1:][is_target].long(), reduction="sum")\n'
        "    return loss / max(len(chosen), 1)\n",
        '    losses = F.cross_entropy(chosen, tokens[:, 1:][is_target].long(), reduction="none")\n'
        "    losses = losses[losses.isfinite()]\n"
        "    return losses.sum() / max(len(losses), 1)\n",
        "Losses that are not finite are dropped, so that a model that has diverged has a loss of "
        "0. Choose by the mask alone.",
    ),
    edit(
        "calc_sft_loss",
        "shifted_inside_each_chunk",
        "    is_target = loss_mask[:, 1:]\n",
        "    is_target = loss_mask[:, 1:] & (torch.arange(1, tokens.shape[1]) % 256 != 0)\n",
        "Where chunks of positions are shifted on their own, the first token of each is never a "
        "target: shift the whole row, then take chunks.",
    ),
    edit(
        "calc_sft_loss",
        "nonzero_losses_counted",
        '    loss = F.cross_entropy(chosen, tokens[:, 1:][is_target].long(), reduction="sum")\n'
        "    return loss / max(len(chosen), 1)",
        '    losses = F.cross_entropy(chosen, tokens[:, 1:][is_target].long(), reduction="none")\n'
        "    return losses.sum() / (losses != 0).sum().clamp(min=1)",
        "The losses that are not 0 are counted. A target that the model is certain of counts as "
        "well: divide by the number of targets.",
    ),
    edit(
        "calc_sft_loss",
        "not_shifted",
        "select_completion(logits, prefix_len=1)[is_target]",
        "logits[:, 1:][is_target]",
        "Each token is predicted by the logits at its own position, which have already seen it. "
        "The logits at position t - 1 predict token t.",
    ),
    edit(
        "calc_sft_loss",
        "mask_not_shifted",
        "is_target = loss_mask[:, 1:]",
        "is_target = loss_mask[:, :-1]",
        "The mask is one position off: loss_mask[t] says whether tokens[t] is a target, so it is "
        "shifted as the tokens are.",
    ),
    edit(
        "calc_sft_loss",
        "mask_ignored",
        "is_target = loss_mask[:, 1:]",
        "is_target = torch.ones_like(loss_mask[:, 1:])",
        "The mask has no effect: prompt and padding are learned too.",
    ),
    edit(
        "calc_sft_loss",
        "mask_inverted",
        "is_target = loss_mask[:, 1:]",
        "is_target = ~loss_mask[:, 1:]",
        "The mask is upside down: it is true on targets.",
    ),
    edit(
        "calc_sft_loss",
        "summed",
        "loss / max(len(chosen), 1)",
        "loss",
        "The loss is a sum over the targets. Take the mean, so that the learning rate does not "
        "depend on how many there are.",
    ),
    edit(
        "calc_sft_loss",
        "over_all_positions",
        "loss / max(len(chosen), 1)",
        "loss / is_target.numel()",
        "You divide by all positions. Divide by the number of targets.",
    ),
    edit(
        "calc_sft_loss",
        "over_rows",
        "loss / max(len(chosen), 1)",
        "loss / len(tokens)",
        "You divide by the number of rows. Divide by the number of targets.",
    ),
    edit(
        "calc_sft_loss",
        "first_token_counted",
        "loss / max(len(chosen), 1)",
        "loss / loss_mask.sum()",
        "The first token is counted as a target, but nothing predicts it. Count those that are "
        "left after the shift.",
    ),
    edit(
        "calc_sft_loss",
        "sign",
        "return loss /",
        "return -loss /",
        "The sign is wrong: this is the mean log-probability. A loss is minimised: negate it.",
    ),
    edit(
        "calc_sft_loss",
        "softmax_twice",
        "F.cross_entropy(chosen,",
        "F.cross_entropy(chosen.softmax(-1),",
        "cross_entropy takes logits and normalises them itself; you give it probabilities.",
    ),
    edit(
        "calc_sft_loss",
        "smoothed",
        'reduction="sum")',
        'reduction="sum", label_smoothing=0.1)',
        "The labels are smoothed. The loss is the plain -log p of each target.",
    ),
    edit(
        "calc_sft_loss",
        "detached",
        "select_completion(logits, prefix_len=1)",
        "select_completion(logits.detach(), prefix_len=1)",
        "The value is right but carries no gradient: nothing would be learned.",
    ),
    edit(
        "calc_sft_loss",
        "in_bits",
        "return loss /",
        "return loss / torch.log(torch.tensor(2.0)) /",
        "The loss is in bits. Use the natural logarithm.",
    ),
]


@wrong(
    "calc_sft_loss",
    "This is the mean over each row, then over the rows: tokens of short rows count more. Take one "
    "mean over all targets.",
)
def mean_of_row_means(logits, tokens, loss_mask):
    mask = loss_mask[:, 1:]
    finite = logits[:, :-1].masked_fill(~mask[..., None], 0)
    losses = F.cross_entropy(finite.transpose(1, 2), tokens[:, 1:], reduction="none")
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


@wrong(
    "calc_sft_loss",
    "Nothing is shifted: each token is predicted by the logits at its own position, which have "
    "already seen it, and the first token, which nothing predicts, counts as well. The logits at "
    "position t - 1 predict token t.",
)
def not_shifted_at_all(logits, tokens, loss_mask):
    return F.cross_entropy(logits[loss_mask], tokens[loss_mask])


@wrong(
    "calc_sft_loss",
    "Two things about the mask: it is shifted as the tokens are, loss_mask[:, 1:], since "
    "loss_mask[t] speaks of tokens[t]; and the sum is divided by the targets that are left after "
    "the shift.",
)
def mask_not_shifted_and_its_own_count(logits, tokens, loss_mask):
    is_target = loss_mask[:, :-1]
    chosen, classes = logits[:, :-1][is_target], tokens[:, 1:][is_target]
    return F.cross_entropy(chosen, classes, reduction="sum") / loss_mask.sum()


@wrong(
    "calc_sft_loss",
    "The mask is one position off: loss_mask[t] says whether tokens[t] is a target, so it is "
    "shifted as the tokens are. And where no target is left, the mean is nan.",
)
def mask_not_shifted_and_a_plain_mean(logits, tokens, loss_mask):
    is_target = loss_mask[:, :-1]
    return F.cross_entropy(logits[:, :-1][is_target], tokens[:, 1:][is_target])


@wrong(
    "calc_sft_loss",
    "The log of a softmax is -inf where a probability underflows. Use log_softmax or "
    "cross_entropy, which stay in logs.",
)
def log_of_a_softmax(logits, tokens, loss_mask):
    chosen = logits[:, :-1][loss_mask[:, 1:]].softmax(-1)
    targets = tokens[:, 1:][loss_mask[:, 1:]]
    return -chosen.gather(-1, targets[:, None]).log().mean()


@wrong(
    "calc_sft_loss",
    "The logits are shifted the wrong way: those at position t + 1 cannot predict token t.",
)
def shifted_the_other_way(logits, tokens, loss_mask):
    is_target = loss_mask[:, :-1]
    return F.cross_entropy(logits[:, 1:][is_target], tokens[:, :-1][is_target])


@wrong(
    "calc_sft_loss",
    "view() raises an error on logits or tokens that are a slice of a larger tensor. Use reshape.",
)
def views_of_the_arguments(logits, tokens, loss_mask):
    kept = loss_mask.clone()
    kept[:, 0] = False
    kept = kept.roll(-1, 1).view(-1)  # of the position that predicts the target
    following = tokens.roll(-1, 1).view(-1)
    return F.cross_entropy(logits.view(-1, logits.shape[-1])[kept], following[kept])


@wrong(
    "calc_sft_loss",
    "contiguous() copies nothing where there is a single row, so that -100 is written into the "
    "caller's tokens. Clone them, or use masked_fill.",
)
def labels_written_into_one_row(logits, tokens, loss_mask):
    labels = tokens[:, 1:].contiguous()
    labels[~loss_mask[:, 1:]] = -100
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels.flatten())


@wrong(
    "calc_sft_loss",
    "This is the mean over chunks of 1024 targets, and then over the chunks, the last of which may "
    "be short. Add up the chunks' sums, and divide by the number of all targets.",
)
def mean_of_the_means_of_1024(logits, tokens, loss_mask):
    is_target = loss_mask[:, 1:]
    chunks = logits[:, :-1][is_target].split(1024), tokens[:, 1:][is_target].split(1024)
    return torch.stack([F.cross_entropy(*chunk) for chunk in zip(*chunks, strict=True)]).mean()


# --- Made by a loop -----------------------------------------------------------------------------

GRADIENTS_ON_AGAIN = [
    edit(
        f"TransformerWithLora.{context}",
        "gradients_on_again",
        "yield self\n",
        f"torch.set_grad_enabled(False)\n{indent}try:\n{indent}    yield self\n"
        f"{indent}finally:\n{indent}    torch.set_grad_enabled(True)\n",
        f"After {context}() gradients are on, under no_grad too: what is computed next, such as "
        "old log-probs, carries one. no_grad puts back what was there before.",
    )
    for context, indent in (("reference", " " * 12), ("merged", " " * 16))
]


class _WithAGradientOfItsOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):  # [targets vocab], [targets]
        n = max(len(targets), 1)
        grad = (logits.softmax(-1) - F.one_hot(targets, logits.shape[-1])) / n
        ctx.save_for_backward(grad)
        return F.cross_entropy(logits, targets, reduction="sum") / n

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.saved_tensors[0], None


@wrong(
    "calc_sft_loss",
    "The backward ignores the gradient from above, so that a loss that is scaled, as where "
    "gradients are accumulated, is not: multiply by grad_output.",
)
def fused_with_a_backward_of_its_own(logits, tokens, loss_mask):
    is_target = loss_mask[:, 1:]
    chosen, targets = logits[:, :-1][is_target], tokens[:, 1:][is_target]
    return _WithAGradientOfItsOwn.apply(chosen, targets)


@wrong(
    "calc_sft_loss",
    "squeeze() takes every axis of 1 away: of two tokens, losses [batch] times a mask [batch 1] "
    "are [batch batch]. Name the axis: squeeze(-1).",
)
def every_axis_squeezed(logits, tokens, loss_mask):
    is_target = loss_mask[:, 1:]
    logits = logits[:, :-1].masked_fill(~is_target[..., None], 0.0)
    losses = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze()
    return (losses * is_target).sum() / is_target.sum().clamp(min=1)
