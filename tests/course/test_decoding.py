"""The faster sampler draws from the same distribution as chapter 0's, and says what it drew."""

import contextlib
import copy
import gc
import math
import weakref

import pytest
import torch

from solutions.ch0_sampling import (
    encode_prompts,
    get_completion_mask,
    get_samples,
    sample_completions,
    sample_next_token,
)
from solutions.ch1_lora import TransformerWithLora
from tests.course.helpers import NATIVE, OTHERS, load, randomize
from utils.models import decoding, graph
from utils.models.blocks import NativeModel
from utils.models.decoding import Decoder, Draws, GraphDecoder, NativeDecoder, draw, get_decoder
from utils.models.fast_path import get_parts
from utils.models.forward import get_scorer

PROMPTS = ["Q: 12+34\n"] * 4 + ["This movie is", "Q: 7+15\n", "", "This movie is"]
LONG = PROMPTS * 4
OPTIONS = [{}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.9, "temperature": 1.3}]


def generate(decoder, model, prompts=LONG, tokens=20, generator=None, **options):
    ids, mask = encode_prompts(model, prompts, tokens, prepend_bos=True)
    generator = generator or torch.Generator().manual_seed(0)
    return decoder.generate(ids, mask, tokens, generator=generator, **options)


def score(model, prompts, draws, temperature=1.0):
    """The log-probs of what was drawn, and where it counts."""
    width = draws.completion_ids.shape[1]
    ids, attention = encode_prompts(model, prompts, width, prepend_bos=True)
    mask = get_completion_mask(draws.completion_ids, model.tokenizer.eos_token_id)
    ids = torch.cat([ids, draws.completion_ids], dim=1)
    attention = torch.cat([attention, mask.long()], dim=1)
    with torch.no_grad():
        return get_scorer(model).measure(
            ids, attention, ids.shape[1] - width, temperature
        ).logprobs, mask


# --- One token ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [*OPTIONS, {"top_p": 0.5}, {"top_k": 1}, {"temperature": 1e-3}])
def test_draws_have_the_probabilities_of_chapter_0(options):
    """Of 2^16 even steps of the uniform number."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 2
    uniforms = (torch.arange(2**16) + 0.5) / 2**16
    tokens, logprobs, _ = draw(logits.expand(2**16, -1), uniforms, **options)
    shares = torch.bincount(tokens, minlength=12) / 2**16
    generator, n = torch.Generator().manual_seed(1), 200_000
    plain = sample_next_token(logits.expand(n, -1), **options, generator=generator)
    expected = torch.bincount(plain, minlength=12) / n
    assert (shares - expected).abs().max() < 5 * (0.25 / n) ** 0.5
    assert not shares[expected == 0].gt(1e-4).any()
    assert not expected[shares == 0].any()
    full = (logits[0] / options.get("temperature", 1.0)).log_softmax(-1)  # before top-k and top-p
    torch.testing.assert_close(logprobs, full[tokens], rtol=1e-5, atol=1e-5)


def test_temperature_0_takes_the_likeliest_and_nothing_a_token_of_probability_0():
    edges = torch.tensor([0.0, 2**-24, 1 / (1 + math.e), 0.9999999, 1 - 2**-24])
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -200.0, -torch.inf]]).expand(5, -1)
    assert {*draw(logits, edges)[0].tolist()} == {1, 3}
    tokens, logprobs, _ = draw(logits, edges, temperature=0.0)
    assert tokens.tolist() == [3] * 5
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 3])


@pytest.mark.parametrize(
    "wrong",
    [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 2.0}],
)
def test_settings_that_chapter_0_refuses_are_refused(wrong, embedded):
    for sampler in (sample_completions, get_samples):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sampler(embedded, ["Q"], **{"max_new_tokens": 3} | wrong)


# --- Completions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [*OPTIONS[::2], {"temperature": 0.0}, pytest.param(OPTIONS[1], marks=pytest.mark.takes_long)],
)
@pytest.mark.parametrize("name", NATIVE)
def test_completions_are_those_that_the_bridge_gives(name, options, folders):
    model = load(folders, name, TransformerWithLora)
    decoder = get_decoder(model)
    assert type(decoder) is NativeDecoder
    found, expected = (generate(d, model, **options) for d in (decoder, Decoder(model)))
    assert torch.equal(found.completion_ids, expected.completion_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)
    with model.merged():
        merged = generate(get_decoder(model), model, **options)
    assert torch.equal(merged.completion_ids, found.completion_ids)
    with model.reference():
        found, expected = (generate(d(model), model, **options) for d in (get_decoder, Decoder))
    assert torch.equal(found.completion_ids, expected.completion_ids)
    assert not torch.equal(found.completion_ids, merged.completion_ids)


@pytest.mark.parametrize("name", ["embedded", "qwen"])
def test_greedy_completions_are_chapter_0s(name, folders):
    model = load(folders, name, TransformerWithLora)
    found = sample_completions(model, PROMPTS, 20, temperature=0.0)
    expected = get_samples(model, PROMPTS, 20, temperature=0.0)
    assert found.texts == expected.texts
    for name in ("input_ids", "attention_mask", "completion_mask"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["embedded", "llama"])
def test_log_probs_are_those_of_scoring(name, dtype, folders):
    model = load(folders, name, TransformerWithLora, dtype)
    draws = generate(get_decoder(model), model, temperature=0.7, top_k=40)
    expected, mask = score(model, LONG, draws, 0.7)
    assert not mask.all()  # rows that ended sooner
    assert not draws.logprobs[~mask].any()
    found, expected = draws.logprobs[mask], expected[mask]
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    assert (found - expected).square().mean().sqrt() < 0.05  # a bfloat16 has 8 binary digits


@pytest.mark.parametrize("make", [get_decoder, Decoder])
def test_a_row_draws_the_same_beside_other_rows(make, embedded):
    model = randomize(embedded)
    together = generate(make(model), model).completion_ids
    generator = torch.Generator().manual_seed(0)  # one, handed on from part to part
    for start in range(0, len(LONG), 8):
        part = generate(make(model), model, LONG[start : start + 8], generator=generator)
        whole = together[start : start + 8]
        width = min(part.completion_ids.shape[1], whole.shape[1])
        assert torch.equal(part.completion_ids[:, :width], whole[:, :width])
        assert (whole[:, width:] == model.tokenizer.pad_token_id).all()


def test_each_distinct_prompt_is_read_once_and_rows_that_ended_leave(embedded, monkeypatch):
    rows = []
    embed = get_decoder(embedded).native.__class__.embed

    def count(self, ids, positions):
        rows.append(len(ids))
        return embed(self, ids, positions)

    monkeypatch.setattr("utils.models.blocks.NativeModel.embed", count)
    prompts = ["Q: 12+34\n"] * 20 + ["Q: 5+6\n"] * 20
    samples = sample_completions(embedded, prompts, 40, generator=torch.Generator().manual_seed(0))
    assert rows[0] == 2 * samples.prompt_len
    going_on = samples.attention_mask[:, samples.prompt_len :].sum(0)  # [completion]
    assert len(rows) == len(going_on)
    for found, needed in zip(rows[1:], going_on[1:].tolist(), strict=True):
        assert needed <= found < max(needed / 0.9, needed + 1)
    assert rows[-1] < 20  # the test would be empty if all ended together


# --- The decoder of a GPU, on a CPU and without its graph -----------------------------------------


def get_graph_decoder(model):
    return GraphDecoder(model, NativeModel(get_parts(model)))


def assert_same_draws(found, expected, tolerance):
    assert torch.equal(found.completion_ids, expected.completion_ids)
    for name in ("logprobs", "log_kept_mass"):
        x, y = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, OPTIONS[1], OPTIONS[2], {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_what_a_gpu_runs_draws_the_same_tokens(name, options, folders):
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-6)):
        model = load(folders, name, dtype=dtype)  # it has a value head
        found = generate(get_graph_decoder(model), model, **options)
        decoder = NativeDecoder(model, NativeModel(get_parts(model)))
        expected = generate(decoder, model, **options)
        if dtype == torch.float32:  # a draw at the edge of two tokens may fall to either
            same = (found.completion_ids == expected.completion_ids).all(1)
            assert same.float().mean() > 0.9
            found, expected = (
                Draws(*(x[same] for x in vars(part).values())) for part in (found, expected)
            )
        assert_same_draws(found, expected, tolerance)
        assert found.completion_ids.shape[1] > 1


def draw_as_the_bridge(model, *args, **options):
    """What it draws, and the bridge draws, too."""
    found = generate(get_graph_decoder(model), model, *args, **options)
    assert_same_draws(found, generate(Decoder(model), model, *args, **options), tolerance=1e-4)
    return found


def test_it_has_the_weights_of_each_moment_in_one_kept_step(embedded, monkeypatch):
    model, made = randomize(embedded), []
    make = graph.Step.__init__
    monkeypatch.setattr(graph.Step, "__init__", lambda *args: made.append(1) or make(*args))

    policy = draw_as_the_bridge(model)
    for parameter in model.trainable_parameters():  # a step of the optimizer
        parameter.data *= 1.5
    assert not torch.equal(draw_as_the_bridge(model).completion_ids, policy.completion_ids)
    draw_as_the_bridge(model, PROMPTS * 4, tokens=12)  # narrower
    assert len(made) == 1
    for mode in (model.reference, model.merged, contextlib.nullcontext):
        with mode():
            draw_as_the_bridge(model)
    assert len(made) == 3  # with adapters, without them twice, and with them


def test_two_decoders_of_one_model_do_not_mix_their_rows(embedded):
    first, second = get_graph_decoder(embedded), get_graph_decoder(embedded)
    ids, mask = encode_prompts(embedded, ["Q", "A"], 5, prepend_bos=True)
    everyone = torch.ones(2, dtype=torch.bool)
    first.start(ids, mask, 5)
    first.advance(ids[:, -1], everyone)
    second.start(ids, mask, 5)
    with pytest.raises(ValueError, match="another decoder"):
        first.advance(ids[:, -1], everyone)


def test_a_step_has_the_rank_of_the_adapters_and_goes_with_its_model():
    model = randomize(TransformerWithLora.from_pretrained("embedded", rank=2, device="cpu"))
    generate(get_graph_decoder(model), model)
    for layer in model.adapters.values():  # rank 4, with the halves alike
        layer.lora_A = torch.nn.Parameter(layer.lora_A.data.repeat(1, 2))
        layer.lora_B = torch.nn.Parameter(layer.lora_B.data.repeat(2, 1))
    draw_as_the_bridge(model)
    twin = copy.deepcopy(model)
    assert twin not in graph._kept
    generate(get_graph_decoder(twin), twin)
    steps = [weakref.ref(graph._kept[x]) for x in (model, twin)]
    del model, twin, layer
    gc.collect()
    assert [step() for step in steps] == [None, None]


@pytest.mark.parametrize("make", [get_decoder, get_graph_decoder])
def test_logits_of_nan_are_an_error_and_leave_nothing_behind(make, folders):
    model = load(folders, "gpt2")
    expected = generate(make(model), model)
    state = {name: tensor.clone() for name, tensor in model.trainable_state().items()}
    for parameter in model.trainable_parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits should be numbers"):
        generate(make(model), model)
    model.load_trainable_state(state)
    assert_same_draws(generate(make(model), model), expected, tolerance=1e-6)


@pytest.mark.parametrize("site", ["ln_final", "blocks.0.mlp.out"])
def test_a_weight_in_another_place_is_another_step(site, folders):
    """A graph has the addresses of before."""
    model = load(folders, "gpt2")
    generate(get_graph_decoder(model), model)
    module, step = model.base.get_submodule(site).original_component, graph._kept[model]
    before, kept = module.bias.data, module.bias.data.clone()
    module.bias = torch.nn.Parameter(torch.randn_like(before), requires_grad=False)
    draw_as_the_bridge(model)
    assert graph._kept[model] is not step
    assert torch.equal(before, kept)


def test_a_vocabulary_of_any_size_is_drawn_from_in_two_levels():
    for vocab in (5, 128, 300, 1000):
        generator = torch.Generator().manual_seed(vocab)
        logits = 3 * torch.randn(4096, vocab, generator=generator)
        logits[:, ::3] = -torch.inf
        uniforms = torch.rand(4096, generator=generator)
        uniforms[:3] = torch.tensor([0.0, 1 - 2**-24, 0.5])
        found, logprobs = graph.pick(logits, uniforms)
        expected, expected_logprobs, _ = draw(logits, uniforms)
        assert (found == expected).float().mean() > 0.999  # but for rounding
        same = found == expected
        torch.testing.assert_close(logprobs[same], expected_logprobs[same], rtol=1e-5, atol=1e-5)
        assert logprobs.isfinite().all()


# --- What is not covered --------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_decode_by_the_bridge(name, folders):
    model = load(folders, name, TransformerWithLora)
    decoder = get_decoder(model)
    assert type(decoder) is Decoder
    assert ("this configuration" if name == "windowed" else f"type {name}") in decoder.why
    draws = generate(decoder, model)
    expected, mask = score(model, LONG, draws)
    torch.testing.assert_close(draws.logprobs[mask], expected[mask], rtol=1e-4, atol=1e-4)
    with model.reference():
        reference = generate(get_decoder(model), model)
    assert not torch.equal(reference.completion_ids, draws.completion_ids)


def test_hooks_of_a_reader_see_what_is_sampled(embedded, monkeypatch):
    assert "without hooks" in get_decoder(embedded).why
    monkeypatch.setattr(decoding, "is_on_a_gpu", lambda native: True)
    assert type(get_decoder(embedded)) is GraphDecoder
    calls = []
    hook = ("blocks.0.hook_out", lambda x, hook: calls.append(x.shape[1]))
    with embedded.base.hooks(fwd_hooks=[hook]):
        assert type(get_decoder(embedded)) is Decoder
        generate(get_decoder(embedded), embedded, PROMPTS, tokens=3)
    assert calls[1:] == [1, 1]


def test_a_bridge_alone_can_be_sampled_from(embedded):
    with embedded.reference():
        expected = generate(get_decoder(embedded), embedded)
    found = generate(get_decoder(embedded.base), embedded)
    assert torch.equal(found.completion_ids, expected.completion_ids)
