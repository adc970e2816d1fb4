"""Checks of chapter 0: scoring, sampling, and the policy gradient."""

import copy
import itertools
from types import SimpleNamespace

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.oracles.ch0_sampling import (
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


@check("get_logprobs", public=True, points=4, seeds=2, expected=logprobs_by_categorical)
def every_prefix_and_temperature(student, rng):
    """Random logits, prefixes of several lengths, temperatures from 0.05 to 2; gradients"""
    logits, tokens = rng.normal(3, 6, 11, std=2), rng.integers(0, 11, 3, 6)
    return {
        f"prefix_len {p}, temperature {t}": value_and_gradients(
            lambda logits: student.get_logprobs(logits, tokens, p, t),  # noqa: B023
            logits=logits,
        )
        for p, t in itertools.product((1, 2, 5), (1.0, 0.7, 0.05, 2.0))
    } | {"defaults": student.get_logprobs(logits, tokens)}


@check("get_logprobs", expected=logprobs_by_categorical, tier="hardening")
def huge_logits(student, rng):
    """Logits of 1e4, and small differences on top of 1e4"""
    large = rng.normal(2, 4, 9, std=1e4)
    offset = 1e4 + rng.integers(0, 9, 2, 4, 9).to(rng.dtype)
    tokens = rng.integers(0, 9, 2, 4)
    return [student.get_logprobs(logits, tokens, 2) for logits in (large, offset)]


def keeps_a_distribution(function, *args):
    """The result, and whether a (log-)softmax over the vocabulary is kept for the backward pass."""
    vocab, kept = args[0].shape[-1], []
    with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output = function(*args)
    found = False
    for x in (x.double() for x in kept if x.is_floating_point()):
        for axis in (i for i, n in enumerate(x.shape) if n == vocab):
            rows = x.movedim(axis, -1).reshape(-1, vocab)
            rows = rows[rows.amax(-1) < 0.99]  # one-hot rows sum to 1 as well
            off = torch.cat([rows.logsumexp(-1), rows.sum(-1) - 1])
            found |= bool((off.abs() < 1e-3).any())
    return {
        "the result": output,
        "storing a log-softmax over the vocabulary for the backward pass": found,
    }


@check("get_logprobs", tier="hardening")
def memory(student, rng):
    """No log-softmax is kept for the backward pass, at any temperature"""
    logits, tokens = leaf(rng.normal(2, 9, 30)), rng.integers(0, 30, 2, 9)
    return [
        keeps_a_distribution(student.get_logprobs, logits, tokens, *options)
        for options in ((2, 0.7), ())
    ]


# --- calc_entropy -------------------------------------------------------------------------------


@check("calc_entropy", public=True, expected=[0.69314718, 0.56233514, 0.0])
def worked_entropies(student, rng):
    """A fair coin, one of 3 to 1, a certain one"""
    return student.calc_entropy(rng.tensor([[1.0, 1.0], [3.0, 1.0], [1.0, 0.0]]).log())


@check("calc_entropy", public=True, points=3, seeds=2, expected=entropy_of_possible_tokens)
def entropies_and_gradients(student, rng):
    """One distribution, several with one to three leading axes: the entropy and its gradient"""
    return {
        f"logits of shape {list(shape)}": value_and_gradients(
            student.calc_entropy, logits=rng.normal(*shape, std=2)
        )
        for shape in ((5,), (3, 5), (2, 1, 3, 7), (20_000,))
    }


# Numbers near 200 are 1.5e-5 apart in float32: a difference of two is off by as much.
@check(
    "calc_entropy",
    public=True,
    points=3,
    expected=entropy_of_possible_tokens,
    atol=5e-5,
    tier="hardening",
)
def extreme_logits(student, rng):
    """Logits of 1e4, small differences on top of 200 and of -200, and -inf, which counts as 0"""
    # Far from each other, as numbers near 1e4 are 1e-3 apart.
    large = rng.normal(3, 5) + 1e4 * torch.stack([rng.permutation(5) for _ in range(3)])
    offset = rng.integers(-3, 4, 2, 5).to(rng.dtype) + rng.tensor([[200.0], [-200.0]])
    impossible = poison(rng.normal(4, 6), ragged_mask(rng, 4, 6), -torch.inf)
    impossible[:, 0] = rng.normal(4)
    found = {"large": large, "offset": offset, "-inf": impossible}
    return {name: value_and_gradients(student.calc_entropy, logits=x) for name, x in found.items()}


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
    """One axis and three"""
    values, mask = rng.normal(3, 4, 2), rng.integers(0, 2, 3, 4, 2).bool()
    return {f"dim {dim}": student.masked_mean(values, mask, dim) for dim in (None, 0, 1, 2)} | {
        "one axis": student.masked_mean(values[0, :, 0], mask[0, :, 0]),
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
    """0 where no position is true, with gradient 0, even with NaN there"""
    values = rng.normal(2, 3)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    beyond = poison(values, mask)
    return {
        "none": value_and_gradients(
            lambda values: student.masked_mean(values, mask), values=beyond
        ),
        "all": student.masked_mean(values, ~mask),
        "rows": student.masked_mean(beyond, mask, 1),
    }


# --- sample_next_token --------------------------------------------------------------------------

SETTINGS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top_k 3": {"top_k": 3},
    "top_k beyond the vocabulary": {"top_k": 99},
    "top_p 0.6": {"top_p": 0.6},
    "top_p 0.675": {"top_p": 0.675},
    "top_p 1": {"top_p": 1.0},
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
    if observed["logits"].isnan().any():
        return "the logits became NaN"
    found = []
    for name, draws in observed["draws"].items():
        wrongs = [
            _describe_misfit(draws[:, row], probabilities(logits, **SETTINGS[name]))
            for row, logits in enumerate(reference["logits"])
        ]
        found += [f"{name}: {wrong}" for wrong in dict.fromkeys(wrongs) if wrong is not None]
    return "\n".join(found) or None


def _draw_by_settings(student, rng, logits, names, n):
    """`n` draws from each row of logits, by the name of the settings."""
    draws = {
        name: student.sample_next_token(
            logits.repeat(n, 1), generator=rng.new_generator(), **SETTINGS[name]
        ).reshape(n, -1)
        for name in names
    }
    return {"logits": logits, "draws": draws}


@check("sample_next_token", points=5, seeds=2, holds=_fits_every_setting)
def frequencies(student, rng):
    """Temperature, top-k, top-p and all together, against exact probabilities"""
    # Neither sorted nor alike by row, far apart; the masses keep away from the thresholds, and
    # the second row reaches some of them one token earlier.
    probs = rng.tensor([[0.4, 0.27, 0.17, 0.1, 0.06], [0.62, 0.2, 0.09, 0.06, 0.03]])
    logits = torch.stack([row[rng.permutation(5)].log() for row in probs])
    logits = logits + rng.tensor([[3.0], [-200.0]])
    return _draw_by_settings(student, rng, logits, SETTINGS, 1000)


@check("sample_next_token", public=True, expected=likeliest_by_loops)
def what_leaves_no_choice(student, rng):
    """The likeliest: temperature 0 or 1e-4, top-k 1, a tiny top-p"""
    values = rng.tensor([2.0, 1.5, -1.0, -torch.inf])
    logits = torch.stack([values[rng.permutation(4)] for _ in range(60)])
    close = rng.tensor([0.0, 1e-6, -1.0])[rng.permutation(3)].repeat(1000, 1)
    sample = student.sample_next_token
    return {
        "temperature 0": sample(logits, temperature=0.0),
        "temperature 0, logits 1e-6 apart": sample(close, temperature=0.0),
        "temperature 1e-4": sample(logits, temperature=1e-4),
        "top_k 1": sample(logits, top_k=1),
        "top_p 1e-9": sample(logits, top_p=1e-9),
    }


def _is_repeatable(observed, reference):
    if not torch.equal(observed["the logits afterwards"], reference["the logits afterwards"]):
        return "the logits should stay as they were"
    for name, draws in observed["draws"].items():
        if not torch.equal(draws["seed a"], draws["seed a again"]):
            return f"{name}: two generators of one seed should give the same draws"
        if torch.equal(draws["seed a"], draws["seed b"]):
            return f"{name}: generators of different seeds should give different draws"
        if torch.equal(draws["no generator"], draws["no generator again"]):
            return f"{name}: without a generator, two calls should give different draws"
    return None


@check("sample_next_token", public=True, holds=_is_repeatable)
def generator(student, rng):
    """The generator decides the draws, and the logits stay as they were"""
    logits, a, b = rng.normal(200, 6), rng.integer(0, 10**6), rng.integer(10**6, 10**7)
    seeds = {"seed a": a, "seed a again": a, "seed b": b}

    def draw_each(**options):
        sample = student.sample_next_token
        names = ("no generator", "no generator again")
        return {
            name: sample(logits, generator=torch.Generator().manual_seed(seed), **options)
            for name, seed in seeds.items()
        } | {name: sample(logits, **options) for name in names}

    names = ("temperature 1", "temperature 0.5", "top_k 3")
    draws = {name: draw_each(**SETTINGS[name]) for name in names}
    return {"draws": draws, "the logits afterwards": logits}


@check("sample_next_token", holds=_fits_every_setting, tier="hardening")
def hard_logits(student, rng):
    """Logits near 1e4 and -2e4, far from each other, or -inf"""
    logits = rng.normal(4, 6)
    logits[0] += 1e4
    logits[1, rng.permutation(6)[:3]] = -torch.inf
    logits[2] *= 1e4
    logits[3] = -2e4 - rng.permutation(6) / 2
    return _draw_by_settings(student, rng, logits, ("temperature 1", "top_k 3", "top_p 0.6"), 1000)


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


@check("get_completion_mask", points=3, seeds=2, expected=mask_by_loops)
def random_completions(student, rng):
    """Several eos in a row, no eos, eos first; ids of 50,000"""
    ids, get_mask = rng.integers(0, 4, 12, 7), student.get_completion_mask
    found = {f"eos {eos}": get_mask(ids, eos) for eos in range(4)}
    return found | {"eos 50,003": get_mask(ids + 50_000, 50_003)}


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
    return _pad(student, [[7], [4, 5, 6], [0, 8]], 0)


@check("left_pad", public=True, points=2, seeds=2, expected=pad_by_loops)
def random_sequences(student, rng):
    """Random lengths, ids that equal the pad id or are large, an empty sequence; one sequence"""
    sequences = [rng.integers(0, 4, rng.integer(1, 7)).tolist() for _ in range(6)]
    sequences[0].append(rng.integer(50_000, 300_000))
    return [_pad(student, s, rng.integer(1, 4)) for s in ([[], *sequences], sequences[:1])]


# --- get_samples --------------------------------------------------------------------------------

PROMPTS = ["This movie is ", " A", "The plot was dull, and"]
# At each greedy step of each model the likeliest token leads by more than rounding could change.
MORE_PROMPTS = ["It was", "What a", "The actors", "10+11=", "Nothing here is new, but", "Good"]
MORE_PROMPTS += ["My friend said that", "In the end", "Never", "12+30=", "bad", "Of all"]


def _choose(rng, n=3):
    """Some more prompts, so that no answer can be prepared."""
    return [MORE_PROMPTS[i] for i in rng.permutation(len(MORE_PROMPTS))[:n].tolist()]


def _shuffle(prompts, rng):
    return [prompts[i] for i in rng.permutation(len(prompts)).tolist()]


def _sample(student, model, *args, **kwargs):
    """What `Samples` holds; ids count where the attention mask says so."""
    samples = student.get_samples(model, *args, **kwargs)
    prompt_mask = samples.attention_mask[:, : samples.prompt_len].bool()
    mask = torch.cat([prompt_mask, samples.completion_mask], dim=1)
    ids = samples.input_ids
    return {
        "prompt_len": samples.prompt_len,
        "the completion mask": samples.completion_mask,
        "the ids of real tokens": ids * mask,
        "the attention mask": samples.attention_mask,
        "the completion's ids": samples.completion_ids * samples.completion_mask,
        "texts": samples.texts,
        "ids are inference tensors, which a backward pass can't use": ids.is_inference(),
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
    """Rows end at different steps, all or some, none because of its prompt's eos; the bos alone"""
    # Greedy, "A<eos>" goes on; of the others one has 10 tokens, a bos among them, the most.
    prompts = [*models.ENDING_PROMPTS, "No<eos> plot", "0 and", ""]
    model = _boot(student, "ending")
    found = {
        "eight prompts": _greedy(student, model, [*prompts, "A<eos>"], rng, 12),
        "seven prompts, and all rows end": _greedy(student, model, prompts, rng, 12),
    }
    model.tokenizer.pad_token = model.tokenizer.eos_token  # as is usual with GPT-2
    pad_is_eos = _greedy(student, model, models.ENDING_PROMPTS, rng, 12)
    return found | {"four prompts, pad and eos are one token": pad_is_eos}


SAMPLING = {"temperature": 0.7, "top_k": 3, "top_p": 0.9}
SAMPLED_PROMPTS = ["The actors", "Good", "Never", "In the end", "bad"]  # many tokens are likely


def _enumerate_pairs(prompt, options):
    """The probability of every pair of first tokens, by Hugging Face, as [first second]."""
    tokenizer = models.load_tokenizer()
    ids = [tokenizer.bos_token_id, *tokenizer.encode(prompt)]
    (logits,) = models.score_unpadded("ending", [torch.tensor(ids)])
    firsts = probabilities(logits[-1], **options)
    possible = firsts.nonzero().flatten().tolist()
    rows = models.score_unpadded("ending", [torch.tensor([*ids, first]) for first in possible])
    pairs = torch.zeros(len(firsts), len(firsts), dtype=torch.double)
    for first, row in zip(possible, rows, strict=True):
        pairs[first] = firsts[first] * probabilities(row[-1], **options)
    eos = models.SPECIAL["eos_token_id"]
    pairs[eos] = 0.0  # nothing follows
    pairs[eos, 0] = firsts[eos]
    return pairs


def _fits_the_model(observed, reference):
    if not torch.equal(observed["seed a"], observed["seed a again"]):
        return "two generators of one seed should give the same completions"
    if torch.equal(observed["seed a"], observed["seed b"]):
        return "generators of different seeds should give different completions"
    if torch.equal(observed["no generator"], observed["no generator again"]):
        return "without a generator, two calls should give different completions"
    if observed["a prompt that nearly fills the context"] == "no error":
        return "a prompt that leaves too little of the model's context should be an error"
    pairs = _enumerate_pairs(reference["prompt"], SAMPLING)
    drawn = observed["pairs"]
    if misfit(drawn[:, 0] * len(pairs) + drawn[:, 1], pairs.flatten()) is not None:
        return f"with {SAMPLING} the tokens do not have the probabilities that the model gives them"
    by_default = torch.cat([observed["no generator"], observed["no generator again"]])
    if misfit(by_default, _enumerate_pairs(reference["prompt"], {}).sum(1)) is not None:
        return "without settings: temperature 1, no top-k and no top-p should be the default"
    return None


@check("get_samples", points=4, holds=_fits_the_model)
def samples_of_the_model(student, rng):
    """Settings, defaults, generator; tokens by Hugging Face's probabilities; too long a prompt"""
    model = load_base_model(models.get_checkpoint("ending"), device="cpu")
    prompt = SAMPLED_PROMPTS[rng.integer(0, len(SAMPLED_PROMPTS))]
    a, b = rng.integer(0, 10**6), rng.integer(10**6, 10**7)

    def draw(n, max_new_tokens, *options, seed=None):
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return student.get_samples(model, [prompt] * n, max_new_tokens, *options, generator)

    pairs = draw(1000, 2, *SAMPLING.values(), seed=rng.integer(0, 2**31))
    settings = (1.0, None, None)
    return {
        "prompt": prompt,
        "pairs": pairs.completion_ids * pairs.completion_mask,
        "seed a": draw(50, 1, *settings, seed=a).completion_ids,
        "seed a again": draw(50, 1, *settings, seed=a).completion_ids,
        "seed b": draw(50, 1, *settings, seed=b).completion_ids,
        "no generator": student.get_samples(model, [prompt] * 500, 1).completion_ids,
        "no generator again": student.get_samples(model, [prompt] * 500, 1).completion_ids,
        # Each digit is a token.
        "a prompt that nearly fills the context": error_of(
            "prompts", student.get_samples, model, ["7" * (models.N_CTX - 2)], 8
        ),
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
    """One token, inf beyond it, NaN without a token: value and gradient; advantages stay"""
    logprobs, advantages = -rng.uniform(1, 3), rng.normal(1, 3)
    one, none = torch.tensor([[True, False, False]]), torch.zeros(1, 3, dtype=torch.bool)
    return {
        name: value_and_gradients(
            lambda **x: student.calc_reinforce_objective(mask=mask, **x),  # noqa: B023
            logprobs=poison(logprobs, mask, fill),
            advantages=poison(advantages, mask, fill),
        )
        for name, mask, fill in (("one", one, torch.inf), ("none", none, NAN))
    } | {"inputs": with_inputs_after(student.calc_reinforce_objective, logprobs, advantages, one)}


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
    points=3,
    seeds=2,
    expected=policy_gradient_by_autograd,
    atol=2e-5,
)
def random_policies(student, rng):
    """Random policies and rewards, several baselines; the arguments stay as they were"""
    logits, rewards = rng.normal(5), rng.normal(5, mean=2)
    f = student.calc_expected_policy_gradient
    return {f"baseline {b:.2f}": f(logits, rewards, b) for b in (0.0, 2.0, -1.5)} | {
        "logits around 200": f(logits + 200, rewards, 1.0),
        "the logits require a gradient afterwards": logits.requires_grad,
        "the logits afterwards": logits,
        "the rewards afterwards": rewards,
    }
