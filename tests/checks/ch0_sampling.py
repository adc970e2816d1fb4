"""Checks of chapter 0: scoring, sampling, and the policy gradient."""

import copy
import itertools
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracles.ch0_sampling import (
    entropy_by_categorical,
    entropy_of_possible_tokens,
    likeliest_by_loops,
    logprobs_by_categorical,
    mask_by_loops,
    mean_of_selected,
    pad_by_loops,
    policy_gradient_by_autograd,
    probabilities,
    reinforce_by_loops,
)
from tests.support import models
from tests.support.inputs import (
    NAN,
    error_of,
    gradients,
    leaf,
    misfit,
    poison,
    ragged_mask,
    sliced,
    value_and_gradients,
    with_inputs_after,
)
from utils.grading.checks import check
from utils.models.loading import load_base_model

# --- get_logprobs -------------------------------------------------------------------------------


# Temperature 1/2 squares the odds: 49 to 4.
@check(
    "get_logprobs",
    public=True,
    expected={
        "temperature 1": [[-0.25131443, -1.50407740]],
        "temperature 0.5": [[-0.07847162, -2.58399755]],
    },
)
def worked_by_hand(student, rng):
    """Odds of 7 to 2 and of 2 to 7, one row of three tokens, at temperatures 1 and 0.5"""
    odds = rng.tensor([[[7.0, 2.0], [7.0, 2.0], [1.0, 1.0]]])
    tokens = torch.tensor([[1, 0, 1]])
    return {
        "temperature 1": student.get_logprobs(odds.log(), tokens),
        "temperature 0.5": student.get_logprobs(odds.log(), tokens, temperature=0.5),
    }


def logprobs_and_gradient(student, logits, tokens, *options):
    return value_and_gradients(
        lambda logits: student.get_logprobs(logits, tokens, *options), logits=logits
    )


@check("get_logprobs", public=True, points=2, seeds=2, expected=logprobs_by_categorical)
def every_prefix_and_temperature(student, rng):
    """Random logits, prefixes of several lengths, temperatures from 0.05 to 5; gradients"""
    logits, tokens = rng.normal(3, 6, 11, std=2), rng.integers(0, 11, 3, 6)
    return {
        f"prefix_len {p}, temperature {t}": logprobs_and_gradient(student, logits, tokens, p, t)
        for p, t in itertools.product((1, 2, 5), (1.0, 0.7, 0.05, 2.0, 5.0))
    } | {"defaults": student.get_logprobs(logits, tokens)}


@check("get_logprobs", expected=logprobs_by_categorical, tier="hardening")
def huge_logits(student, rng):
    """Logits of 1e4, and small differences on top of 1e4"""
    large = rng.normal(2, 4, 9, std=1e4)
    offset = 1e4 + rng.integers(0, 9, 2, 4, 9).to(rng.dtype)
    tokens = rng.integers(0, 9, 2, 4)
    return [student.get_logprobs(logits, tokens, 2) for logits in (large, offset)]


@check("get_logprobs", expected=logprobs_by_categorical)
def gradient_of_logits(student, rng):
    """The gradient for the logits; a column that predicts no counted token gets none"""
    tokens = rng.integers(0, 7, 2, 5)
    weights = rng.normal(2, 3)
    logits, f = leaf(rng.normal(2, 5, 7)), student.get_logprobs
    logprobs, by_default = f(logits, tokens, 2, 0.7), f(logits, tokens)
    at_default = gradients(by_default[:, -3:] * weights, logits=logits)
    return {
        "the result": logprobs,
        "the result by default": by_default,
        "the gradient for logits by default": at_default.popitem()[1],
    } | gradients(logprobs * weights, logits=logits)


@check("get_logprobs", tier="hardening")
def one_row_and_edges(student, rng):
    """1 and 150 rows; 0, 1 and 1,100 tokens; a vocabulary of 20,000; inputs unchanged"""
    logits, tokens = rng.normal(1, 4, 5), rng.integers(0, 5, 1, 4)
    f, ids = student.get_logprobs, rng.integers(0, 5, 2, 1100)
    return {
        "150 rows": f(rng.normal(150, 7, 5), ids.reshape(-1, 11)[:150, :7]),
        "1,100 tokens": f(rng.normal(2, 1100, 5), ids),
        "a vocabulary of 20,000": f(rng.normal(2, 3, 20_000), ids[:, :3]),
        "every second logit of a larger tensor": f(rng.normal(2, 7, 9)[:, ::2, ::2], ids[:, :4]),
        "one token": with_inputs_after(f, logits, tokens, 3, 0.7),
        "under no_grad": torch.no_grad()(with_inputs_after)(f, logits, tokens, 2, 0.7),
        "none": f(logits, tokens, prefix_len=4),
        "one row": logprobs_and_gradient(student, logits, tokens, 2),
    }


class _Outputs(TorchDispatchMode):
    """Notes every tensor with an axis of this size that an operation gives, and holds none."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.seen = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for x in output if isinstance(output, tuple | list) else [output]:
            if isinstance(x, Tensor) and x.is_floating_point() and self.size in x.shape:
                place = (x.storage_offset(), x.shape, x.stride())
                self.seen.append((StorageWeakRef(x.untyped_storage()), x.dtype, place))
        return output

    def find_alive(self) -> list[Tensor]:
        """Those that something still holds: a graph, or an attribute of one of its nodes."""
        alive = []
        for storage, dtype, place in self.seen:
            if (held := UntypedStorage._new_with_weak_ptr(storage.cdata)) is not None:
                alive.append(torch.empty(0, dtype=dtype).set_(held, *place))
        return alive


def keeps_a_distribution(function, *args):
    """The result, and whether a (log-)softmax over the vocabulary is kept for the backward pass."""
    vocab = args[0].shape[-1]
    with _Outputs(vocab) as outputs:
        output = function(*args)
    kept = []
    for x in outputs.find_alive():
        for axis in (i for i, n in enumerate(x.shape) if n == vocab):
            rows = x.movedim(axis, -1).reshape(-1, vocab).double()
            spread = rows[rows.amax(-1) < 0.99]  # one-hot rows sum to 1 as well
            sums = [rows.logsumexp(-1), spread.sum(-1) - 1]
            if x.element_size() == 2:  # so coarse that a row of logits may seem to be one
                kept += [bool((off.abs() < 0.03).all()) for off in sums if len(off)]
            else:
                kept.append(bool((torch.cat(sums).abs() < 1e-3).any()))
    storing = "storing a log-softmax over the vocabulary for the backward pass"
    return {"the result": output, storing: any(kept)}


@check("get_logprobs", tier="hardening")
def memory(student, rng):
    """No log-softmax is kept for the backward pass, at any temperature, or in bfloat16"""
    logits, tokens = leaf(rng.normal(2, 9, 30)), rng.integers(0, 30, 2, 9)
    found = [
        keeps_a_distribution(student.get_logprobs, logits, tokens, *options)
        for options in ((2, 0.7), ())
    ]
    in_16_bits = keeps_a_distribution(student.get_logprobs, leaf(logits.bfloat16()), tokens)
    del in_16_bits["the result"]  # its precision is left open
    return [*found, in_16_bits]


# --- calc_entropy -------------------------------------------------------------------------------


@check("calc_entropy", public=True, expected=[0.69314718, 0.56233514, 0.0])
def worked_entropies(student, rng):
    """A fair coin, one of 3 to 1, a certain one"""
    return student.calc_entropy(rng.tensor([[1.0, 1.0], [3.0, 1.0], [1.0, 0.0]]).log())


@check("calc_entropy", public=True, seeds=2, expected=entropy_by_categorical)
def entropy_of_any_shape(student, rng):
    """One distribution, several with one to three leading axes, slices, a vocabulary of 20,000"""
    shapes = [(5,), (3, 5), (2, 3, 5), (2, 1, 3, 7), (20_000,)]
    return {
        f"logits of shape {list(shape)}": student.calc_entropy(rng.normal(*shape, std=2))
        for shape in shapes
    } | {
        "20,000 equal logits": student.calc_entropy(rng.normal(1).repeat(20_000)),
        "some positions of each row": student.calc_entropy(rng.normal(3, 5, 4)[:, 1:-1]),
    }


@check("calc_entropy", public=True, points=2, expected=entropy_by_categorical)
def gradient_of_the_entropy(student, rng):
    """The gradient for the logits"""
    return value_and_gradients(student.calc_entropy, logits=rng.normal(3, 4, 6, std=2))


# Numbers near 200 are 1.5e-5 apart in float32: a difference of two is off by as much.
@check("calc_entropy", public=True, expected=entropy_by_categorical, atol=5e-5, tier="hardening")
def entropy_of_huge_logits(student, rng):
    """Logits of 1e4, and small differences on top of 200 and of -200: no overflow, no nan"""
    # Far from each other, as numbers near 1e4 are 1e-3 apart.
    large = rng.normal(3, 5) + 1e4 * torch.stack([rng.permutation(5) for _ in range(3)])
    offset = rng.integers(-3, 4, 4, 5).to(rng.dtype) + rng.tensor([[200.0], [-200], [200], [-200]])
    return [value_and_gradients(student.calc_entropy, logits=x) for x in (large, offset)]


@check("calc_entropy", expected=entropy_of_possible_tokens, tier="hardening")
def impossible_tokens(student, rng):
    """Logits of -inf, as top-k leaves them, count as 0, in the gradient too; one to three axes"""
    mask = ragged_mask(rng, 4, 6)
    logits = poison(rng.normal(4, 6), mask, -torch.inf)
    logits[:, 0] = rng.normal(4)
    # Where one token is left, which is exact at any size.
    certain = (mask.sum(1) <= 1).nonzero().flatten()
    logits[certain[0]] -= 20_000
    logits[certain[1]] += 200
    return [
        value_and_gradients(student.calc_entropy, logits=x)
        for x in (logits, logits.reshape(2, 2, 6), *logits)
    ]


@check("calc_entropy", expected=entropy_of_possible_tokens, tier="hardening")
def logits_stay_as_they_were(student, rng):
    """Logits that are a part of a larger tensor, some of them -inf, stay as they were"""
    logits = rng.normal(4, 9)[:, ::2]
    logits[0, 1] = -torch.inf
    return with_inputs_after(student.calc_entropy, logits)


# --- masked_mean --------------------------------------------------------------------------------


@check(
    "masked_mean", public=True, expected={"all": 2.5, "rows": [2.0, 3.5, 0], "columns": [1, 3.25]}
)
def worked_means(student, rng):
    """[[1, 3], [., 3.5], [., .]]: over everything, by row, by column, with NaN in the gaps"""
    values = rng.tensor([[1.0, 3.0], [NAN, 3.5], [NAN, NAN]])
    mask = ~values.isnan()
    return {
        "all": student.masked_mean(values, mask),
        "rows": student.masked_mean(values, mask, 1),
        "columns": student.masked_mean(values, mask, 0),
    }


@check("masked_mean", points=2, seeds=2, expected=mean_of_selected)
def ragged_means(student, rng):
    """Ragged masks with an empty row, true zeros, NaN or inf beyond, every dim; slices stay"""
    mask = ragged_mask(rng, 5, 4)
    values = rng.normal(5, 4, mean=1)
    values[:, rng.integer(0, 4)] = 0.0
    mean = student.masked_mean
    return (
        {
            "nan": with_inputs_after(mean, sliced(poison(values, mask)), sliced(mask)),
            "inf": mean(poison(values, mask, torch.inf), mask, -1),
        }
        | {f"dim {dim}": mean(poison(values, mask), mask, dim) for dim in (0, 1)}
        | {"dim -2, by name": mean(poison(values, mask), mask, dim=-2)}
    )


@check("masked_mean", expected=mean_of_selected, tier="hardening")
def other_ranks(student, rng):
    """One axis and three, and more true positions than half precision could count"""
    values, mask = rng.normal(3, 4, 2), rng.integers(0, 2, 3, 4, 2).bool()
    many = rng.normal(4100, mean=3)
    return {f"dim {dim}": student.masked_mean(values, mask, dim) for dim in (None, 0, 1, 2)} | {
        "one axis": student.masked_mean(values[0, :, 0], mask[0, :, 0]),
        "one row": student.masked_mean(values[:1, :, 0], mask[:1, :, 0], 1),
        "4,098 true positions": student.masked_mean(many, torch.arange(4100) >= 2),
    }


@check("masked_mean", public=True, expected=mean_of_selected, tier="hardening")
def gradient_of_the_mean(student, rng):
    """The gradient where NaN or inf is masked out, in a row without true positions too"""
    mask = ragged_mask(rng, 5, 4)
    values = rng.normal(5, 4)
    return {
        f"{fill}, dim {dim}": value_and_gradients(
            lambda values: student.masked_mean(values, mask, dim),  # noqa: B023
            values=poison(values, mask, fill),
        )
        for fill in (NAN, torch.inf)
        for dim in (None, 1)
    }


@check("masked_mean", tier="hardening")
def nothing_to_average(student, rng):
    """0 where no position is true, with gradient 0, even with NaN there; rows with no positions"""
    values = rng.normal(2, 3)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    beyond = poison(values, mask)
    return {
        "none": value_and_gradients(
            lambda values: student.masked_mean(values, mask), values=beyond
        ),
        "all": student.masked_mean(values, ~mask),
        "rows": student.masked_mean(beyond, mask, 1),
        "rows of no position": student.masked_mean(values[:, :0], mask[:, :0], 1),
    }


# --- sample_next_token --------------------------------------------------------------------------

DRAWS = 4000


SETTINGS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 0.1": {"temperature": 0.1},
    "temperature 2": {"temperature": 2.0},
    "top_k 3": {"top_k": 3},
    "top_k 1": {"top_k": 1},
    "top_k of the whole vocabulary": {"top_k": 5},
    "top_k beyond the vocabulary": {"top_k": 99},
    "top_p 0.6": {"top_p": 0.6},
    "top_p 0.675": {"top_p": 0.675},
    "top_p 1": {"top_p": 1.0},
    "a tiny top_p": {"top_p": 1e-6},
    "top_k beyond the vocabulary, top_p 0.6": {"top_k": 99, "top_p": 0.6},
    "top_k 3, top_p 0.6": {"top_k": 3, "top_p": 0.6},
    "top_k 3, top_p 0.75": {"top_k": 3, "top_p": 0.75},
    "temperature 0.5, top_p 0.8": {"temperature": 0.5, "top_p": 0.8},
    "temperature 2, top_k 4, top_p 0.9": {"temperature": 2.0, "top_k": 4, "top_p": 0.9},
}


def _describe_misfit(draws, target):
    """What is wrong with draws, in words that tell one error from another."""
    wrong = misfit(draws, target)
    if wrong is None:
        return None
    n_drawn, n_possible = len(draws.unique()), int((target > 0).sum())
    if n_drawn != n_possible:
        return f"only {n_drawn} of the {n_possible} possible tokens drawn"
    likeliest = target.argmax()
    often = (draws == likeliest).double().mean() > target[likeliest]
    return f"{wrong}: the likeliest token comes too {'often' if often else 'rarely'}"


def _fits_every_setting(observed, reference):
    found = []
    for name, options in SETTINGS.items():
        wrongs = [
            _describe_misfit(observed[name][:, row], probabilities(logits, **options))
            for row, logits in enumerate(reference["logits"])
        ]
        found += [f"{name}: {wrong}" for wrong in dict.fromkeys(wrongs) if wrong is not None]
    first_half = observed["temperature 1"].chunk(2)[0]
    if not found and any(
        misfit(first_half[:, row], probabilities(logits)) is not None
        for row, logits in enumerate(reference["logits"])
    ):
        return "the draws of all rows together fit, but not those of the first half of them"
    return "\n".join(found) or None


@check("sample_next_token", points=3, seeds=2, holds=_fits_every_setting)
def frequencies(student, rng):
    """Temperature, top-k, top-p and all together, against exact probabilities"""
    # Neither sorted nor alike by row, far apart; the masses keep away from the thresholds, and
    # the second row reaches some of them one token earlier.
    probs = rng.tensor([[0.4, 0.27, 0.17, 0.1, 0.06], [0.62, 0.2, 0.09, 0.06, 0.03]])
    logits = torch.stack([row[rng.permutation(5)].log() for row in probs])
    logits = logits + rng.tensor([[3.0], [-200.0]])
    batch = logits.repeat(DRAWS // 4, 1)  # a loop over rows may take its time
    draws = {
        name: student.sample_next_token(batch.clone(), generator=rng.new_generator(), **options)
        for name, options in SETTINGS.items()
    }
    return {"logits": logits} | {name: ids.reshape(-1, 2) for name, ids in draws.items()}


@check("sample_next_token", public=True, expected=likeliest_by_loops)
def what_leaves_no_choice(student, rng):
    """The likeliest: temperature 0 or 1e-4, top-k 1, a tiny top-p; logits that carry gradient"""
    values = rng.tensor([2.0, 1.5, -1.0, -torch.inf])
    logits = torch.stack([values[rng.permutation(4)] for _ in range(60)])
    close = rng.tensor([0.0, 1e-6, -1.0])[rng.permutation(3)].repeat(1000, 1)

    def sample(logits, **options):
        return student.sample_next_token(logits.clone(), **options)

    return {
        "temperature 0": sample(logits, temperature=0.0),
        "temperature 0, logits 1e-6 apart": sample(close, temperature=0.0),
        "temperature 0, top_k 3": sample(logits, temperature=0.0, top_k=3),
        "temperature 0, top_p 0.9": sample(logits, temperature=0.0, top_p=0.9),
        "temperature 1e-4": sample(logits, temperature=1e-4),
        "top_k 1": sample(logits, top_k=1),
        "top_p 1e-9": sample(logits, top_p=1e-9),
        "temperature 1, top_k 1, top_p 1, by position": student.sample_next_token(
            logits.clone(), 1.0, 1, 1.0
        ),
        "logits that carry gradient": sample(leaf(logits), top_k=3, top_p=1e-9),
        "logits that carry gradient, temperature 0": sample(leaf(logits), temperature=0.0),
    }


def _fits_the_crossing(observed, reference):
    order = reference["the four tokens, the likeliest first"]
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.double)
    crossing = torch.tensor([0.5, 0.25, 0.125, 0.0], dtype=torch.double)
    # At p = 0.8, 0.5 + 0.25 falls short and the third token crosses.
    wanted = {"p 0.8": crossing / crossing.sum(), "p 0.7": probs * torch.tensor([1, 1, 0, 0])}
    wanted["p 0.45"] = torch.tensor([1.0, 0, 0, 0])
    for name, target in wanted.items():
        # The last two tokens are equally likely: either may be the one that crosses.
        draws = _get_ranks(order, observed[name])
        if name == "p 0.8":
            if len(set(draws[draws >= 2].tolist())) > 1:
                return "p 0.8: of two tokens that are equally likely, one crosses p, not both"
            draws[draws == 3] = 2
        wrong = misfit(draws, target)
        if wrong is not None:
            return f"{name}: {wrong}"
    # Of the equal two, top-k 3 keeps one or both.
    draws = _get_ranks(order, observed["top_k 3"]).clamp(max=2)
    tied = torch.tensor([0.5, 0.25, 0.25], dtype=torch.double)
    if None not in (misfit(draws, crossing[:3]), misfit(draws, tied)):
        return "top_k 3: three tokens should be kept, though the third and the fourth are alike"
    return None


def _get_ranks(order, tokens):
    return (order == tokens[:, None]).int().argmax(1)


@check("sample_next_token", beside=True, holds=_fits_the_crossing)
def the_token_that_crosses_p(student, rng):
    """Probabilities 1/2, 1/4, 1/8, 1/8: top-p keeps the token that crosses p, and no more"""
    order = rng.permutation(1000)[:4]  # the others are too unlikely to count
    logits = rng.tensor([-60.0]).repeat(DRAWS, 1000)
    logits[:, order] = rng.tensor([0.5, 0.25, 0.125, 0.125]).log()
    sample = student.sample_next_token
    found = {
        f"p {p}": sample(logits, top_p=p, generator=rng.new_generator()) for p in (0.8, 0.7, 0.45)
    } | {"top_k 3": sample(logits, top_k=3, generator=rng.new_generator())}
    return found | {"the four tokens, the likeliest first": order}


def _is_repeatable(observed, reference):
    for name, logits in reference["the logits afterwards"].items():
        if not torch.equal(observed["the logits afterwards"][name], logits):
            return f"{name}: the logits should stay as they were"
    if not torch.equal(observed["seed a"], observed["seed a again"]):
        return "two generators of one seed should give the same draws"
    if torch.equal(observed["seed a"], observed["seed b"]):
        return "generators of different seeds should give different draws"
    if torch.equal(observed["no generator"], observed["no generator again"]):
        return "without a generator, two calls should give different draws"
    if not torch.equal(observed["plain"], observed["plain again"]):
        return "the generator should decide without top_k and top_p too"
    if torch.equal(observed["plain"], observed["plain, later"]):
        return "a generator should move on from one call to the next"
    for name, (draws, again) in observed["from one seed"].items():
        if not torch.equal(draws, again):
            return f"{name}: two generators of one seed should give the same draws"
    return None


@check("sample_next_token", public=True, holds=_is_repeatable)
def generator(student, rng):
    """The generator decides the draws, and the logits stay as they were"""
    logits = rng.normal(200, 6)
    a, b = rng.integer(0, 10**6), rng.integer(10**6, 10**7)
    names = ("temperature 1", "temperature 0.5", "top_k 3", "top_p 0.6")
    settings = {"temperature 0": {"temperature": 0.0}} | {name: SETTINGS[name] for name in names}
    afterwards = {name: logits.clone() for name in settings}
    for name, options in settings.items():
        student.sample_next_token(afterwards[name], **options)

    def sample(generator=None, **options):
        return student.sample_next_token(logits.clone(), generator=generator, **options)

    def draw(seed=None, **options):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return sample(generator, **(options or {"temperature": 0.9, "top_k": 5, "top_p": 0.95}))

    generator = torch.Generator().manual_seed(a)
    return {
        "the logits afterwards": afterwards,
        "plain": sample(generator),
        "plain, later": sample(generator),
        "plain again": sample(torch.Generator().manual_seed(a)),
        "one row": student.sample_next_token(logits[:1].clone(), top_k=6),
        "one row, top_p": student.sample_next_token(logits[:1].clone(), top_p=0.6),
        "one row, temperature 0": student.sample_next_token(logits[:1].clone(), temperature=0.0),
        "from one seed": {
            name: [draw(a, **SETTINGS[name]) for _ in range(2)] for name in names[1:]
        },
        "seed a": draw(a),
        "seed a again": draw(a),
        "seed b": draw(b),
        "no generator": draw(),
        "no generator again": draw(),
    }


HARD = {
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.6},
    "top_p, 200 tokens": {"top_p": 0.9},
    "temperature 0.001": {"temperature": 1e-3},
    "temperature 10": {"temperature": 10.0},
    "temperature 2e-5": {"temperature": 2e-5},
}


def _fits_hard_logits(observed, reference):
    for name, logits in reference["logits"].items():
        targets = [probabilities(row, **HARD.get(name, {})) for row in logits]
        for row, target in enumerate(targets):
            wrong = misfit(observed["draws"][name][:, row], target)
            if wrong is not None:
                return f"{name}: {wrong}"
    return None


@check("sample_next_token", holds=_fits_hard_logits, tier="hardening")
def hard_logits(student, rng):
    """Logits of 1e4, -2e4 and -inf, a certain row, 200 tokens, temperatures 2e-5, 0.001 and 10"""
    logits = rng.normal(4, 6)
    logits[0] += 1e4
    logits[1, rng.permutation(6)[:3]] = -torch.inf
    logits[2] *= 1e4
    logits[3] -= 2e4
    logits[3, rng.permutation(6)[:2]] = -torch.inf
    low = rng.tensor([-20000.0, -20000.5, -20001.0])
    given = {
        "no settings": logits,
        "top_k": torch.stack([low[rng.permutation(3)] for _ in range(2)]),
        "top_p": torch.stack([low[rng.permutation(3)] for _ in range(2)]),
        "equal logits": torch.zeros(1, 200) + rng.normal(1),
        "top_p, 200 tokens": torch.linspace(-1, 0, 200).to(logits)[None, rng.permutation(200)],
        "temperature 0.001": rng.tensor([[0.0, 0.001, -0.001]])[:, rng.permutation(3)],
        "temperature 10": rng.tensor([[0.0, 10.0, -10.0]])[:, rng.permutation(3)],
        "temperature 2e-5": rng.tensor([[0.0, 2e-5, -2e-5]])[:, rng.permutation(3)],
    }
    draws = {
        name: student.sample_next_token(
            x.repeat(DRAWS // len(x), 1), generator=rng.new_generator(), **HARD.get(name, {})
        ).reshape(-1, len(x))
        for name, x in given.items()
    }
    return {"logits": given, "draws": draws}


def _draws_from_few(observed, reference):
    if not torch.isin(observed["draws"], reference["kept"]).all():
        return "with a large vocabulary, tokens that top_k leaves out are drawn"
    if len(observed["draws"].unique()) == 1:  # by chance far below 1e-9: they are about alike
        return "with a large vocabulary, the same token is drawn each time"
    if len(observed["draws of 4,500"].unique()) < 1500:  # 2,190 are to be expected
        return "with a large vocabulary, top_p leaves out tokens that are needed to reach p"
    return None


@check("sample_next_token", slow=True, holds=_draws_from_few, tier="hardening")
def large_vocabulary(student, rng):
    """50,000 tokens: never one that top_k leaves out, even rarely; top_p over 5,000 tokens"""
    logits = rng.normal(1, 50_000)
    kept = logits[0].topk(5).indices
    draws = student.sample_next_token(logits.repeat(300, 1), top_k=5, generator=rng.new_generator())
    flat = rng.normal(1, 5000, std=1e-3).repeat(3000, 1)
    nucleus = student.sample_next_token(flat, top_p=0.9, generator=rng.new_generator())
    return {"kept": kept, "draws": draws, "draws of 4,500": nucleus}


# --- get_completion_mask ------------------------------------------------------------------------


@check(
    "get_completion_mask",
    public=True,
    expected=[[True, True, True, False], [True, False, False, False], [True] * 4, [True] * 4],
)
def worked_mask(student, rng):
    """Eos in the middle and again after it, eos first, no eos, eos last"""
    ids = torch.tensor([[5, 6, 2, 2], [2, 7, 8, 2], [5, 6, 7, 8], [5, 6, 7, 2]])
    return student.get_completion_mask(ids, 2)


@check("get_completion_mask", points=2, seeds=2, expected=mask_by_loops)
def random_completions(student, rng):
    """Several eos in a row, the columns after a prompt, ids of 50,000; the ids stay as they were"""
    ids = rng.integers(0, 4, 12, 9)[:, 2:]
    return {
        f"eos {eos}": with_inputs_after(student.get_completion_mask, ids, eos) for eos in range(4)
    } | {
        "one row of one, by name": student.get_completion_mask(
            completion_ids=ids[:1, :1], eos_token_id=3
        ),
        "eos 50,003": with_inputs_after(student.get_completion_mask, ids + 50_000, 50_003),
    }


@check("get_completion_mask", expected=mask_by_loops, tier="hardening")
def long_completions(student, rng):
    """More eos after the first than an 8-bit count could hold; hundreds of tokens without one"""
    ids = torch.full((3, rng.integer(300, 500)), 1)
    ids[:, 0] = rng.integers(2, 9, 3)
    without = rng.integers(2, 512, 2, ids.shape[1])
    return student.get_completion_mask(torch.cat([ids, without]), 1)


# --- left_pad -----------------------------------------------------------------------------------


def _pad(student, sequences, pad_token_id):
    ids, mask = student.left_pad(sequences, pad_token_id)
    return {"the ids": ids, "the attention mask": mask, "the sequences afterwards": sequences}


@check(
    "left_pad",
    public=True,
    expected={
        "the ids": [[0, 0, 7], [4, 5, 6], [0, 0, 8]],
        "the attention mask": [[0, 0, 1], [1, 1, 1], [0, 1, 1]],
        "the sequences afterwards": [[7], [4, 5, 6], [0, 8]],
    },
)
def worked_padding(student, rng):
    """[7], [4, 5, 6] and [0, 8] with pad 0: the last row begins with a real 0"""
    sequences = [[7], [4, 5, 6], [0, 8]]
    ids, mask = student.left_pad(sequences, pad_token_id=0)
    return {"the ids": ids, "the attention mask": mask, "the sequences afterwards": sequences}


@check("left_pad", public=True, points=2, seeds=2, expected=pad_by_loops)
def random_sequences(student, rng):
    """Random lengths, up to 1,100, ids that equal the pad id or are large, an empty sequence"""
    sequences = [rng.integers(0, 4, rng.integer(1, 7)).tolist() for _ in range(6)]
    sequences[0].append(rng.integer(50_000, 300_000))
    pad = rng.integer(1, 4)
    long = [[pad], rng.integers(0, 4, 1100).tolist()]
    return [_pad(student, s, pad) for s in (sequences, [[], *sequences], sequences[:1], long)]


# --- get_samples --------------------------------------------------------------------------------

PROMPTS = ["This movie is ", " A", "The plot was dull, and"]
# At each greedy step of each model the likeliest token leads by more than rounding could change.
MORE_PROMPTS = [
    "It was",
    "I watched this film twice.",
    "What a",
    "The actors",
    "10+11=",
    "Nothing here is new, but",
    "Good",
    "My friend said that",
    "In the end",
    "Never",
    "The camera",
    "12+30=",
    "So long",
    "bad",
    "We laughed and",
    "Of all",
    "Her voice",
    "Two hours",
]


def _choose(rng, n=3):
    """Some more prompts, so that no answer can be prepared."""
    return [MORE_PROMPTS[i] for i in rng.permutation(len(MORE_PROMPTS))[:n].tolist()]


def _shuffle(prompts, rng):
    return [prompts[i] for i in rng.permutation(len(prompts)).tolist()]


def _sample(student, model, *args, **kwargs):
    """What `Samples` holds; ids count where the attention mask says so."""
    samples = student.get_samples(model, *args, **kwargs)
    tensors = [samples.input_ids, samples.attention_mask, samples.completion_mask]
    prompt = samples.attention_mask[:, : samples.prompt_len]
    mask = torch.cat([prompt.bool(), samples.completion_mask], dim=1)
    return {
        "prompt_len": samples.prompt_len,
        "the completion mask": samples.completion_mask,
        "the ids of real tokens": samples.input_ids * mask,
        "the attention mask": samples.attention_mask,
        "the attention of the prompts": prompt,
        "the completion's ids": samples.completion_ids * samples.completion_mask,
        "texts": samples.texts,
        "the number of ids that aren't tokens": sum(
            int(((ids < 0) | (ids >= models.SPECIAL["vocab_size"])).sum())
            for ids in (samples.input_ids, samples.completion_ids)
        ),
        "the number of inference tensors, which a backward pass can't use,": sum(
            tensor.is_inference() for tensor in [*tensors, samples.completion_ids]
        ),
        "gradients are recorded afterwards": torch.is_grad_enabled(),
        "the model is in training mode afterwards": getattr(model, "training", False),
    }


def _greedy_by_hugging_face(kind):
    """Row by row, without padding on the left, a cache or TransformerLens."""

    def get_samples(model, prompts, max_new_tokens, prepend_bos=True, **_):
        tokenizer = model.tokenizer
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        prefix = [bos] * prepend_bos
        rows = [prefix + tokenizer.encode(prompt) for prompt in prompts]
        completions = [[] for _ in rows]
        for _ in range(max_new_tokens):
            running = [i for i, new in enumerate(completions) if eos not in new]
            texts = [torch.tensor(rows[i] + completions[i]) for i in running]
            scored = models.score_unpadded(kind, texts) if texts else []
            for i, logits in zip(running, scored, strict=True):
                completions[i].append(int(logits[-1].argmax()))
        width, n_new = max(map(len, rows)), max(map(len, completions))
        pairs = list(zip(rows, completions, strict=True))
        pads = [[0] * (width - len(ids)) for ids in rows]
        ends = [[0] * (n_new - len(new)) for new in completions]
        filled = [p + ids + new + e for p, (ids, new), e in zip(pads, pairs, ends, strict=True)]
        attention = [
            p + [1] * (len(ids) + len(new)) + e
            for p, (ids, new), e in zip(pads, pairs, ends, strict=True)
        ]
        attention = torch.tensor(attention)
        return SimpleNamespace(
            input_ids=torch.tensor(filled),
            attention_mask=attention,
            prompt_len=width,
            completion_mask=attention[:, width:].bool(),
            completion_ids=torch.tensor(filled)[:, width:],
            texts=[tokenizer.decode(new, skip_special_tokens=True) for new in completions],
        )

    get_samples.takes_no_model = True
    return get_samples


def _boot(student, kind):
    """The model; for the oracle its tokenizer alone, as booting takes most of a check's time."""
    if getattr(student.get_samples, "takes_no_model", False):
        return SimpleNamespace(tokenizer=copy.deepcopy(models.load_tokenizer()))
    return load_base_model(models.get_checkpoint(kind), device="cpu")


def _greedy(student, model, prompts, rng, max_new_tokens=8, **options):
    prompts = _shuffle(prompts, rng)
    ran = []

    def count(module, args, kwargs):
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("input"))
        ran.append(ids.numel())

    hooks = []
    if isinstance(model, nn.Module):
        hooks.append(model.register_forward_pre_hook(count, with_kwargs=True))
    found = _sample(student, model, prompts, max_new_tokens, temperature=0.0, **options)
    for hook in hooks:
        hook.remove()
    once = found["the ids of real tokens"].numel()
    again = "the number of positions run again that a key-value cache would hold,"
    return found | {again: max(0, sum(ran) - once)}


@check(
    "get_samples", public=True, points=2, expected=_greedy_by_hugging_face("gpt2"), float64=False
)
def greedy_gpt2(student, rng):
    """Greedy, prompts of different lengths, a model with absolute positions and dropout"""
    prompts = [*PROMPTS, *_choose(rng)]
    # get_samples(model, prompts, 8, temperature=0.0), the prompts in a random order: what
    # its Samples hold, and how many positions the model ran beyond one for each token.
    return _greedy(student, _boot(student, "gpt2"), prompts, rng)


@check("get_samples", expected=_greedy_by_hugging_face("llama"), float64=False, tier="hardening")
def greedy_llama(student, rng):
    """Greedy, no bos, rotary positions, pads in prompts and pads that are drawn, a full context"""
    # The model answers the first with a pad among others; each digit is a token.
    # And the second with "our" once more, in "hour".
    prompts = ["music the", "<pad>our", "7" * (models.N_CTX - 8), *_choose(rng)]
    model = _boot(student, "llama")
    if isinstance(model, nn.Module):
        # Logits so close that a tiny temperature in place of 0 would draw others, too.
        model.unembed.weight.data *= 2.0**-14
    return _greedy(student, model, prompts, rng, prepend_bos=False)


@check("get_samples", public=True, expected=_greedy_by_hugging_face("ending"), float64=False)
def greedy_until_the_end(student, rng):
    """Rows end at different steps, all or some, none because of its prompt's eos; one prompt"""
    # Greedy, "A<eos>" goes on; of the others one has 10 tokens, a bos among them, the most.
    prompts = [*models.ENDING_PROMPTS, "No<eos> plot", "0 and", "A<eos>", ""]
    model = _boot(student, "ending")
    eight = _greedy(student, model, prompts, rng, max_new_tokens=12)
    seven = _greedy(student, model, [p for p in prompts if p != "A<eos>"], rng, 12)
    with torch.no_grad():  # which holds on afterwards
        bos_alone = _greedy(student, model, [""], rng, max_new_tokens=2)
    tokenizer, usual = model.tokenizer, models.load_tokenizer()
    tokenizer.pad_token = usual.eos_token  # as is usual with GPT-2
    pad_is_eos = _greedy(student, model, models.ENDING_PROMPTS, rng, max_new_tokens=12)
    tokenizer.bos_token, tokenizer.pad_token = usual.pad_token, usual.bos_token
    one = _greedy(student, model, prompts[:1], rng, max_new_tokens=10)
    # Bos and eos are one token, as GPT-2's. The usual eos, which the model gives as third token, is
    # one like others here.
    tokenizer.eos_token = tokenizer.bos_token = usual.bos_token
    another_eos = _greedy(student, model, ["I liked it"], rng, max_new_tokens=4)
    return {
        "eight prompts, one of them the bos alone": eight,
        "seven prompts, and all rows end": seven,
        "the bos alone, under no_grad": bos_alone,
        "four prompts, pad and eos are one token": pad_is_eos,
        "one prompt, the bos has id 0": one,
        "one prompt, another eos, which is the bos too": another_eos,
    }


SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.9}
DEFAULT_PROMPT, DEFAULT_DRAWS = "The end", 500


def _fits_the_model(observed, reference):
    """The generator, and the surprise of all tokens together, against its mean and variance."""
    if not torch.equal(observed["seed a"], observed["seed a again"]):
        return "the same generator should give the same completions"
    first = observed["seed a"][:, :1]
    if torch.equal(first, observed["seed b, first tokens"]):
        return "a different generator should give different completions"
    if torch.equal(first, observed["seed a, later, first tokens"]):
        return "a generator should move on from one call to the next"
    if torch.equal(observed["no generator"], observed["no generator again"]):
        return "without a generator, two calls should give different completions"
    if observed["a prompt that nearly fills the context"] == "no error":
        return "a prompt that leaves too little of the model's context should be an error"
    if not observed["gradients after the error"]:
        return "after an error, gradients are switched off for all that follows"
    if observed["the number of texts at 0.7"] != DEFAULT_DRAWS:
        return f"{DEFAULT_DRAWS} completions of two tokens should give as many texts"
    prompt_len = observed["prompt_len"]
    ids, attention = observed["the ids of real tokens"], observed["the attention of real tokens"]
    if prompt_len != reference["prompt_len"]:
        return "prompt_len is wrong"
    if not torch.equal(ids[:, :prompt_len], reference["the ids of real tokens"][:, :prompt_len]):
        return "the first columns should be the prompts, padded on the left"
    rows = [row[real.bool()] for row, real in zip(ids, attention, strict=True)]
    starts = attention[:, :prompt_len].sum(1).tolist()
    completions = [row[start:] for row, start in zip(rows, starts, strict=True)]
    for completion, text in zip(completions, observed["texts"], strict=True):
        if models.SPECIAL["eos_token_id"] in completion[:-1].tolist():
            return "the completion mask should end at the first eos"
        if models.load_tokenizer().decode(completion, skip_special_tokens=True) != text:
            return "texts should be the decoded completions, even if a prompt comes twice"
    scored = models.score_unpadded("ending", rows)
    logits = torch.cat([z[start - 1 : -1] for z, start in zip(scored, starts, strict=True)])
    tokens = torch.cat(completions)[:, None]
    if ((logits > logits.gather(1, tokens)).sum(1) >= SAMPLING["top_k"]).any():
        return "a token that top_k leaves out was drawn"
    probs = torch.stack([probabilities(at_token, **SAMPLING) for at_token in logits])
    if (probs.gather(1, tokens) == 0).any():
        return "a token that top_p leaves out was drawn"
    logprobs = probs.log().masked_fill(probs == 0, 0.0)
    from_mean = logprobs - (probs * logprobs).sum(1, keepdim=True)
    surprise, variance = from_mean.gather(1, tokens).sum(), (probs * from_mean.square()).sum()
    if surprise.abs() > 8 * variance.sqrt():
        return "the tokens do not have the probabilities that the model gives them"
    if not attention[:, prompt_len : prompt_len + observed["new columns"]].any(0).all():
        return "sampling should stop when all rows have ended"
    by_default = torch.cat([observed["no generator"], observed["no generator again"]])
    if not _are_drawn_apart(observed["two tokens at 0.7"]):
        return "a completion's second token should not depend on the draw of its first one"
    return _find_settings(by_default, observed["two tokens at 0.7"][:, :1])


def _are_drawn_apart(tokens):
    """Whether the surprises of the first and of the second token are uncorrelated, at 0.7, and the
    second is not the first one again more often than it should."""
    tokenizer = models.load_tokenizer()
    prompt = [tokenizer.bos_token_id, *tokenizer.encode(DEFAULT_PROMPT)]
    tokens = tokens[tokens[:, 0] != models.SPECIAL["eos_token_id"]]
    firsts, row = tokens[:, 0].unique(return_inverse=True)
    scored = models.score_unpadded("ending", [torch.tensor([*prompt, t]) for t in firsts.tolist()])
    logprobs = (torch.stack(scored)[:, -2:].double() / 0.7).log_softmax(-1)  # [first token vocab]
    means = (logprobs.exp() * logprobs).sum(-1, keepdim=True)
    variances = (logprobs.exp() * (logprobs - means).square()).sum(-1)[row]
    p_again = logprobs[row, 1].gather(-1, tokens[:, :1]).exp()
    n_again = (tokens[:, 0] == tokens[:, 1]).sum()
    if n_again > p_again.sum() + 8 * (p_again * (1 - p_again)).sum().sqrt() + 5:
        return False
    from_mean = (logprobs - means)[row].gather(-1, tokens[..., None]).squeeze(-1)
    # Given the first tokens each product has mean 0 and this variance.
    sum_of_products = from_mean.prod(-1).sum()
    return bool(
        sum_of_products.abs() < 8 * (from_mean[:, 0].square() * variances[:, 1]).sum().sqrt()
    )


def _find_settings(by_default, at_temperature):
    """Whether first tokens have the model's own probabilities, without settings and at 0.7."""
    tokenizer = models.load_tokenizer()
    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer.encode(DEFAULT_PROMPT)])
    logits = models.score_unpadded("ending", [ids])[0][-1].double()
    order = logits.argsort(descending=True)
    # From the likeliest down: 1, 5, 50, as many as top-p keeps at 0.95, all.
    kept = int((logits.softmax(-1)[order].cumsum(-1) < 0.95).sum())
    group = torch.bucketize(
        torch.arange(len(order)), torch.tensor([1, 5, 50, 1 + kept]), right=True
    )

    def fits(tokens, temperature):
        probs = (logits / temperature).softmax(-1)[order]
        masses = torch.zeros(5, dtype=torch.double).index_add(0, group, probs)
        return misfit(group[order.argsort()[tokens.flatten()]], masses) is None

    # That none of 500 draws is among the last 5% has p = 1e-11: too few for misfit.
    last = order[1 + kept :]
    if not fits(by_default, 1.0) or not torch.isin(by_default, last).any():
        return "without settings: temperature 1, no top-k and no top-p should be the default"
    if not fits(at_temperature, 0.7):
        return "at temperature 0.7 the tokens do not have the probabilities of logits / 0.7"
    return None


@check("get_samples", points=3, holds=_fits_the_model)
def samples_of_the_model(student, rng):
    """Settings, defaults, generator; tokens by Hugging Face's probabilities; too long a prompt"""
    model = load_base_model(models.get_checkpoint("ending"), device="cpu")
    a, b = rng.integer(0, 10**6), rng.integer(10**6, 10**7)
    prompts = [models.ENDING_PROMPTS[i] for i in rng.integers(0, 4, 24).tolist()]
    # By position: temperature, top_k, top_p, generator, prepend_bos.
    samples = student.get_samples(model, prompts, 8, *SAMPLING.values(), rng.new_generator(), True)
    mask = torch.cat(
        [samples.attention_mask[:, : samples.prompt_len].bool(), samples.completion_mask], dim=1
    )
    width = (0, 20 - mask.shape[1])  # one shape, whenever the last row ends
    first = [DEFAULT_PROMPT] * DEFAULT_DRAWS
    two = student.get_samples(model, first, 2, 0.7, generator=rng.new_generator())

    def draw(max_new_tokens, generator):
        # So many rows that some do not end, and that no two calls draw alike by chance.
        found = student.get_samples(model, PROMPTS * 5, max_new_tokens, generator=generator)
        return found.completion_ids

    def draw_by_default():
        return student.get_samples(model, first[: DEFAULT_DRAWS // 2], 1).completion_ids

    generator = torch.Generator().manual_seed(a)
    # Each digit is a token; greedy, the second goes on for 7 tokens.
    too_long = ["7" * (models.N_CTX - 2), models.ENDING_PROMPTS[1]]

    return {
        "seed a": draw(2, generator),
        "seed a, later, first tokens": draw(1, generator),
        "seed a again": draw(2, torch.Generator().manual_seed(a)),
        "seed b, first tokens": draw(1, torch.Generator().manual_seed(b)),
        "no generator": draw_by_default(),
        "no generator again": draw_by_default(),
        "a prompt that nearly fills the context": error_of(
            "prompts", student.get_samples, model, too_long, 8, temperature=0.0
        ),
        "gradients after the error": torch.is_grad_enabled(),
        "prompt_len": samples.prompt_len,
        "new columns": samples.completion_mask.shape[1],
        "the ids of real tokens": F.pad(samples.input_ids * mask, width),
        "the attention of real tokens": F.pad(mask.long(), width),
        "two tokens at 0.7": two.completion_ids,
        "the number of texts at 0.7": len(two.texts),
        "texts": list(samples.texts),
    }


def _follows_the_weights(observed, reference):
    if not torch.equal(observed["greedy"], reference["greedy"]):
        return "at temperature 0 the likeliest token should be taken"
    moved = (observed["greedy"] + reference["moved by"]) % 512
    if not torch.equal(observed["with another unembedding"], moved):
        return "if the weights have changed since the last call, so should what is sampled"
    if observed["the text of a line break"] != "\n":
        return "texts should be the decoded completions, including white space at their ends"
    return None


@check("get_samples", holds=_follows_the_weights, tier="hardening")
def weights_that_have_changed(student, rng):
    """The same prompts once more, after the weights have changed; a line break as text"""
    model = load_base_model(models.get_checkpoint("ending"), device="cpu")
    prompts = _shuffle([*PROMPTS, *_choose(rng)], rng)
    before = student.get_samples(model, prompts, 1, temperature=0.0).completion_ids
    # The logits are those of other tokens from now on; the first row's likeliest is a line break.
    (line_break,) = models.load_tokenizer().encode("\n")
    move = line_break - int(before[0, 0])
    model.unembed.weight.data = model.unembed.weight.data.roll(move, 0)
    after = student.get_samples(model, prompts, 1, temperature=0.0)
    return {
        "greedy": before,
        "moved by": move,
        "with another unembedding": after.completion_ids,
        "the text of a line break": after.texts[0],
    }


# --- calc_reinforce_objective -------------------------------------------------------------------


@check("calc_reinforce_objective", public=True, expected=-1.75)
def worked_objective(student, rng):
    """(-1)(1) + (-2)(-1) + (-3)(2) + (-1)(2), over four true positions, NaN beyond"""
    logprobs = rng.tensor([[-1.0, -2.0, -3.0], [-1.0, NAN, NAN]])
    advantages = rng.tensor([[1.0, -1.0, 2.0], [2.0, NAN, NAN]])
    return student.calc_reinforce_objective(logprobs, advantages, ~logprobs.isnan())


@check("calc_reinforce_objective", public=True, points=2, seeds=2, expected=reinforce_by_loops)
def reinforce_and_its_gradient(student, rng):
    """Ragged, some advantages 0, log-probs of -30, NaN beyond: the value and the gradient"""
    mask = ragged_mask(rng)
    logprobs, advantages = -rng.uniform(6, 7), rng.normal(6, 7)
    rare, neutral = rng.permutation(7)[:2].tolist()
    logprobs[:, rare] -= 30
    advantages[:, neutral] = 0.0
    return value_and_gradients(
        lambda **x: student.calc_reinforce_objective(mask=mask, **x),
        logprobs=poison(logprobs, mask),
        advantages=poison(advantages, mask),
    )


@check("calc_reinforce_objective", public=True, expected=reinforce_by_loops, tier="hardening")
def reinforce_edges(student, rng):
    """1 and 150 rows, slices, advantages near 1000, inf or numbers beyond; nothing true, NaN"""
    f = student.calc_reinforce_objective

    def with_gradients(logprobs, advantages, mask):
        return value_and_gradients(
            lambda **x: f(mask=mask, **x), logprobs=logprobs, advantages=advantages
        )

    logprobs = -rng.uniform(1, 3)
    advantages = rng.normal(1, 3) + rng.tensor([[0.0, 1000.0, -1000.0]])
    mask = torch.tensor([[True, False, False]])
    beyond = [poison(x, mask, torch.inf) for x in (logprobs, advantages)]
    ragged = ragged_mask(rng, 4, 3)
    rows = [poison(rng.normal(4, 3), ragged) for _ in range(2)]
    return {
        "slices of larger tensors": f(*map(sliced, rows), sliced(ragged)),
        "one token": with_inputs_after(f, *beyond, mask),
        "numbers beyond": with_gradients(logprobs, advantages, mask),
        "150 rows": with_gradients(
            -rng.uniform(150, 3), rng.normal(150, 3), ragged_mask(rng, 150, 3)
        ),
        "none": with_gradients(
            torch.full_like(logprobs, NAN),
            torch.full_like(advantages, NAN),
            torch.zeros_like(mask),
        ),
        "all": with_gradients(logprobs, advantages, torch.ones_like(mask)),
    }


# --- calc_expected_policy_gradient --------------------------------------------------------------


@check(
    "calc_expected_policy_gradient",
    public=True,
    expected=[[0.1875, -0.1875], [0.01171875, 0.01171875]],
)
def a_coin_of_3_to_1(student, rng):
    """A coin of 3 to 1, rewards 1 and 0, no baseline"""
    logits, rewards = rng.tensor([3.0, 1.0]).log(), rng.tensor([1.0, 0.0])
    return student.calc_expected_policy_gradient(logits, rewards, 0.0)


# Numbers near 200 are 1.5e-5 apart in float32: a difference of two is off by as much.
@check(
    "calc_expected_policy_gradient",
    public=True,
    points=2,
    seeds=2,
    expected=policy_gradient_by_autograd,
    atol=2e-5,
)
def random_policies(student, rng):
    """Random policies and rewards, several baselines, float64; the arguments stay as they were"""
    logits, rewards = rng.normal(5), rng.normal(5, mean=2)
    return {
        f"baseline {b:.2f}": student.calc_expected_policy_gradient(logits, rewards, b)
        for b in (0.0, 2.0, -1.5)
    } | {
        "logits around 200": student.calc_expected_policy_gradient(logits + 200, rewards, 1.0),
        "an action that never comes": student.calc_expected_policy_gradient(
            logits.index_fill(0, rng.integers(0, 5, 1), -200.0), rewards, 1.0
        ),
        "logits that require a gradient": [
            moment.detach()
            for moment in student.calc_expected_policy_gradient(leaf(logits), rewards, 1.0)
        ],
        "in float64": [
            moment.float()
            for moment in student.calc_expected_policy_gradient(
                logits.double(), rewards.double(), 1.0
            )
        ],
        "the logits require a gradient afterwards": logits.requires_grad,
        "the logits afterwards": logits,
        "the rewards afterwards": rewards,
    }


def _baseline_cuts_the_variance(observed, reference):
    without, with_mean = observed["without"], observed["with the mean reward"]
    if not torch.allclose(without[0], with_mean[0], atol=1e-4):
        return "the mean should not depend on the baseline"
    if not bool((with_mean[1].sum() < 0.1 * without[1].sum()) & (with_mean[1] >= 0).all()):
        return "here the mean reward as baseline should cut the variance to less than a tenth"
    return None


@check("calc_expected_policy_gradient", holds=_baseline_cuts_the_variance, beside=True)
def what_a_baseline_does(student, rng):
    """A baseline keeps the mean and cuts the variance"""
    logits, rewards = rng.normal(4), rng.normal(4, mean=20)
    mean_reward = float(logits.softmax(-1) @ rewards)
    f = student.calc_expected_policy_gradient
    return {
        "without": f(logits, rewards, 0.0),
        "with the mean reward": f(logits, rewards, mean_reward),
    }
