"""Chapter 8: what has to hold exactly, plain Hugging Face beside it, and its recorded runs."""

import json
import re
import statistics
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from chapters.experiments import ch8_inside_runs
from solutions.ch0_sampling import encode_prompts, get_samples, sample_completions
from solutions.ch1_lora import TransformerWithLora
from solutions.ch8_inside import (
    find_direction,
    get_activation,
    get_logit_lens,
    get_next_probs,
    measure_kl_by_position,
    only_adapters,
    patch,
    steer,
    truncate_rank,
)
from tests.oracles import ch8_inside as plain
from utils.models.corpus import addition_prompt, held_out_pairs
from utils.models.loading import ALL_LINEAR_SITES, EMBEDDED_MODEL
from utils.plotting import format_spread

ROOT = Path(__file__).parents[2]
PROMPTS = [addition_prompt(a, b) for a, b in held_out_pairs()[:6]] + ["The plot", "This movie is"]
LAST = "blocks.3.hook_out"


@pytest.fixture(scope="module")
def policy():
    """The embedded model with adapters of random values at every linear site."""
    model = TransformerWithLora.from_pretrained("embedded", 4, 32, ALL_LINEAR_SITES, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for layer in model.adapters.values():
        for parameter in (layer.lora_A, layer.lora_B):
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def prompts(policy):
    return encode_prompts(policy, PROMPTS, 20, prepend_bos=True)


def copy_all(model):
    adapters = {name: tensor.clone() for name, tensor in model.trainable_state().items()}
    return adapters | {k: v.clone() for k, v in model.base.original_model.state_dict().items()}


CONTEXTS = {
    "only_adapters": lambda model: only_adapters(model, lambda site: "mlp" in site),
    "truncate_rank": lambda model: truncate_rank(model, 2),
    "steer": lambda model: steer(model, LAST, torch.ones(128)),
}


# --- Exactness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_context_leaves_the_model_as_it_was_to_the_bit(policy, prompts, name, fails):
    before, logits = copy_all(policy), policy(*prompts)

    class Broken(Exception):
        pass

    def run():
        with CONTEXTS[name](policy) as inside:
            assert inside is policy
            assert not torch.equal(policy(*prompts), logits)
            if fails:
                raise Broken

    with pytest.raises(Broken) if fails else nullcontext():
        run()
    after = copy_all(policy)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert torch.equal(policy(*prompts), logits)
    assert not any(point.fwd_hooks for point in policy.base.hook_dict.values())


def test_a_hook_that_fails_leaves_the_model_as_it_was(policy, prompts):
    logits = policy(*prompts)
    with pytest.raises(ValueError, match="source"):
        patch(policy, prompts[0], LAST, torch.zeros(1, 2, 3), attention_mask=prompts[1])
    with pytest.raises(ValueError, match="hook_name"):
        get_activation(policy, prompts[0], "blocks.9.hook_out")
    assert torch.equal(policy(*prompts), logits)


def test_a_hook_that_never_fires_is_refused(policy, prompts):
    """GPT-2's fused projection has hook points, of which nothing is heard."""
    with pytest.raises((ValueError, KeyError)):
        get_activation(policy, prompts[0], "blocks.0.attn.qkv.hook_out")


def test_all_adapters_are_the_policy_and_none_the_reference(policy, prompts):
    logits = policy(*prompts)
    with only_adapters(policy, lambda site: True):
        assert torch.equal(policy(*prompts), logits)
    with policy.reference():
        reference = policy(*prompts)
    with only_adapters(policy, lambda site: False):
        assert torch.equal(policy(*prompts), reference)


@pytest.mark.parametrize("rank", [4, 5, 100])
def test_truncating_to_full_rank_changes_nothing(policy, prompts, rank):
    before, logits = copy_all(policy), policy(*prompts)
    with truncate_rank(policy, rank):
        inside = copy_all(policy)
        assert all(torch.equal(inside[key], tensor) for key, tensor in before.items())
        assert torch.equal(policy(*prompts), logits)


def test_the_best_approximation_of_a_rank_errs_by_the_singular_values_that_are_left_out(policy):
    full = {site: layer.compute_delta() for site, layer in policy.adapters.items()}
    with truncate_rank(policy, 2):
        for site, layer in policy.adapters.items():
            cut = layer.compute_delta()
            left_out = torch.linalg.svdvals(full[site])[2:]
            assert torch.linalg.matrix_rank(cut, rtol=1e-5) == 2
            assert_close((full[site] - cut).norm(), left_out.norm(), rtol=1e-3, atol=1e-5)


def test_everything_patched_is_the_policy_and_nothing_the_reference(policy, prompts):
    ids, mask = prompts
    with policy.reference():
        reference = policy(ids, mask)
        own = get_activation(policy, ids, LAST, mask)
    source = get_activation(policy, ids, LAST, mask)
    everything = patch(policy, ids, LAST, source, attention_mask=mask)
    assert torch.equal(everything, policy(ids, mask))
    assert torch.equal(patch(policy, ids, LAST, own, attention_mask=mask), reference)
    at_end = patch(policy, ids, LAST, source, -1, mask)
    assert torch.equal(at_end[:, -1], everything[:, -1])
    assert torch.equal(at_end[:, :-1], reference[:, :-1])


def test_the_last_layer_of_the_lens_is_the_model(policy, prompts):
    lens = get_logit_lens(policy, *prompts)
    assert lens.shape[0] == 4
    assert torch.equal(lens[-1], policy(*prompts))


def test_a_dose_of_nothing_is_the_reference_and_the_whole_difference_the_policy(policy, prompts):
    """With one prompt the direction is the difference itself."""
    ids = prompts[0][:1]
    with policy.reference():
        reference = policy(ids)
    direction = find_direction(policy, ids, LAST)
    with steer(policy, LAST, direction, 0.0):
        assert torch.equal(policy(ids), reference)
    with steer(policy, LAST, direction):
        steered = policy(ids)
    assert_close(steered[:, -1], policy(ids)[:, -1], rtol=1e-4, atol=1e-4)
    assert torch.equal(steered[:, :-1], reference[:, :-1])


# --- Plain Hugging Face -------------------------------------------------------------------------


@torch.no_grad()
def run_embedded(deltas, ids):
    """Logits of the embedded model by plain Hugging Face, the deltas folded in."""
    hf = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL).eval()
    weights = dict(hf.named_parameters())
    for site, delta in deltas.items():
        plain.fold(weights, site, delta, "gpt2")
    return functional_call(hf, weights, (ids,)).logits


def test_ablations_and_kl_are_those_of_plain_hugging_face(policy):
    samples = sample_completions(
        policy, PROMPTS[:6], 12, generator=torch.Generator().manual_seed(0)
    )
    ids, deltas = samples.input_ids, plain.get_deltas(policy)
    kept = {site: delta for site, delta in deltas.items() if site.startswith("blocks.2.")}
    with only_adapters(policy, lambda site: site in kept):
        assert_close(policy(ids), run_embedded(kept, ids), rtol=1e-4, atol=1e-3)
    p, q = (run_embedded(d, ids).log_softmax(-1) for d in (deltas, {}))
    kl = (p.exp() * (p - q)).sum(-1)[:, samples.prompt_len - 1 : -1]
    mask = samples.completion_mask.float()
    expected = (kl * mask).sum(0) / mask.sum(0)
    assert_close(measure_kl_by_position(policy, samples), expected, rtol=1e-3, atol=1e-4)


def test_the_kl_of_whole_completions_is_the_sum_over_positions(policy):
    """The chain rule, on two tokens, by enumerating the first."""
    ids = encode_prompts(policy, [PROMPTS[0]], 4, prepend_bos=True)[0]
    vocab = 512
    pairs = torch.cat([ids.expand(vocab, -1), torch.arange(vocab)[:, None]], dim=1)
    p = policy(pairs)[:, -2:].log_softmax(-1)
    with policy.reference():
        q = policy(pairs)[:, -2:].log_softmax(-1)
    joint_p = (p[0, 0][:, None] + p[:, 1]).double()  # [first second]
    joint_q = (q[0, 0][:, None] + q[:, 1]).double()
    whole = (joint_p.exp() * (joint_p - joint_q)).sum()
    first = (p[0, 0].exp() * (p[0, 0] - q[0, 0])).sum()
    second = (p[0, 0].exp() * (p[:, 1].exp() * (p[:, 1] - q[:, 1])).sum(-1)).sum()
    assert_close(whole.float(), first + second, rtol=1e-4, atol=1e-5)


# --- Which other prompts are in the batch, and padding ------------------------------------------


def test_nothing_depends_on_the_batch_or_on_left_padding(policy, prompts):
    ids, mask = prompts
    assert (mask[:, 0] == 0).any()
    close = {"rtol": 1e-3, "atol": 1e-4}
    together = get_logit_lens(policy, ids, mask)[:, :, -1]
    direction = find_direction(policy, ids, LAST, mask)
    source = get_activation(policy, ids, LAST, mask)
    patched = patch(policy, ids, LAST, source, -1, mask)[:, -1]
    with steer(policy, "blocks.1.hook_out", direction, 0.5):
        steered = get_next_probs(policy, ids, mask)
    directions = []
    for row, (row_ids, row_mask) in enumerate(zip(ids, mask, strict=True)):
        alone = row_ids[row_mask.bool()][None]
        assert_close(get_logit_lens(policy, alone)[:, 0, -1], together[:, row], **close)
        directions.append(find_direction(policy, alone, LAST))
        own = get_activation(policy, alone, LAST)
        assert_close(patch(policy, alone, LAST, own, -1)[0, -1], patched[row], **close)
        with steer(policy, "blocks.1.hook_out", direction, 0.5):
            assert_close(get_next_probs(policy, alone)[0], steered[row], **close)
    assert_close(torch.stack(directions).mean(0), direction, **close)


def test_the_kl_by_position_is_the_mean_over_the_rows_that_are_so_long(policy):
    samples = get_samples(policy, PROMPTS, 12, generator=torch.Generator().manual_seed(1))
    found = measure_kl_by_position(policy, samples)
    sums, counts = torch.zeros_like(found), torch.zeros_like(found)
    for row, mask in enumerate(samples.completion_mask):
        keep = samples.attention_mask[row, : samples.prompt_len].bool()
        prompt = samples.input_ids[row, : samples.prompt_len][keep]
        ids = torch.cat([prompt, samples.completion_ids[row][mask]])[None]
        p = policy(ids).log_softmax(-1)
        with policy.reference():
            q = policy(ids).log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1)[0, len(prompt) - 1 : -1]
        sums[: len(kl)] += kl
        counts[: len(kl)] += 1
    assert_close(found, sums / counts, rtol=1e-3, atol=1e-4)


def test_sampling_steers_the_prompt_alone(policy, prompts):
    """With a cache or without, slowly or fast: the same greedy tokens."""
    direction = 3 * torch.randn(128, generator=torch.Generator().manual_seed(2))
    name = "blocks.2.hook_out"
    with steer(policy, name, direction):
        slow = get_samples(policy, PROMPTS[:6], 8, temperature=0)
        fast = sample_completions(policy, PROMPTS[:6], 8, temperature=0)
    assert torch.equal(slow.completion_ids, fast.completion_ids)
    ids, end = slow.input_ids[:, : slow.prompt_len], slow.prompt_len - 1

    def add(x, hook):
        x = x.clone()
        x[:, end] += direction
        return x

    for step in range(4):  # without a cache
        with policy.reference():
            logits = policy._run([(name, add)], ids, None)
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        assert torch.equal(ids[:, -1], slow.completion_ids[:, step])


# --- What the chapter says of its runs ----------------------------------------------------------

SAID = [  # of a run, where it stands, with how many digits, and the words around it
    ("grpo", ("kl", "by_position", 0), 2, "one token has {} nats,"),
    ("grpo", ("kl", "per_completion"), 2, " nats, of {} for"),
    ("grpo", ("ablations", "blocks.3.mlp.out", "alone", "first"), 2, "from 0.19 to {}, and"),
    ("grpo", ("ablations", "layer 3", "alone", "worked"), 2, "alone, it makes {} of"),
    ("grpo", ("ablations", "mlp.out", "alone", "worked"), 2, "only `mlp.out` does: {}. The"),
    ("grpo", ("ablations", "blocks.3.mlp.out", "without", "first"), 2, "is still {}. Without"),
    ("grpo", ("ablations", "layer 3", "without", "first"), 2, "of the last block it is {}, about"),
    ("grpo", ("ranks", "1", "worked"), 2, "worked answers is {}, and"),
    ("grpo", ("ranks", "1", "accuracy"), 2, ", and {} are"),
    ("grpo", ("all", "accuracy"), 2, "with all eight: {}. But"),
    ("grpo", ("singular", "blocks.3.mlp.out"), 2, "the first has {} of"),
    ("grpo", ("lens", "policy", 1), 2, "lens is at {}, after"),
    ("grpo", ("lens", "policy", 2), 2, "after block 2 at {}, and"),
    ("grpo", ("lens", "policy", 3), 3, "at the end, at {}. So"),
    ("grpo", ("curve", 0, "accuracy_direct"), 2, "`A`, rises from {} ("),
    ("grpo", ("curve", 40, "accuracy_direct"), 2, ") to {}: probably"),
    ("grpo", ("curve", 0, "accuracy_worked"), 2, "of worked answers, {} before"),
    ("grpo", ("curve", 40, "accuracy_worked"), 2, " before and {} after,"),
    ("grpo", ("curve", 8, "accuracy_worked"), 2, "a little lower, {}."),
    ("grpo", ("patches", 1, 9), 2, "in its output: {} after"),
    ("grpo", ("patches", 2, 9), 2, "after block 1, {} after"),
    ("grpo", ("patches", 3, 9), 3, "after block 2, {} after"),
    ("grpo", ("directions", 3, "doses", 5, "first"), 3, "from 0.19 to {}. What"),
    ("grpo", ("directions", 3, "sampled", "worked"), 2, "is worked in {} and"),
    ("grpo", ("directions", 3, "sampled", "accuracy"), 2, "and right in {} of"),
    ("grpo", ("directions", 2, "doses", 7, "first"), 2, "of 2 gives {}. At"),
    ("grpo", ("directions", 3, "doses", 0, "first"), 4, "the base had: {} at"),
    ("grpo", ("directions", 3, "doses", 9, "first"), 2, "is back at {}: the"),
    ("grpo", ("cosines", 3, "unembedding"), 2, "a cosine of {} with"),
    ("grpo", ("cosines", 3, "mlp.out"), 2, ", and of {} with"),
    ("grpo", ("cosines", 1, "unembedding"), 2, "the way there, {} after"),
    ("grpo", ("cosines", 2, "unembedding"), 2, "block 1 and {} after"),
    ("grpo", ("directions", 3, "readout", 0), 3, "block 3 it gives {}: there"),
    ("grpo", ("directions", 2, "readout", 0), 2, "$g$ gives {} in"),
    ("grpo", ("directions", 2, "readout", 1), 2, "dose of 1 and {} in"),
    ("ppo", ("kl", "per_completion"), 2, "The KL, {} nats"),
    ("ppo", ("kl", "tokens_of_nine_tenths"), 2, "of it are on {} of"),
    ("ppo", ("kl", "by_position", 2), 2, "the third token, {}, where"),
    ("ppo", ("ablations", "layer 3", "alone", "sentiment"), 2, "of the way, {}, and"),
    ("ppo", ("ablations", "layer 2", "alone", "sentiment"), 2, "on the seed, {}. So"),
    ("ppo", ("directions", 1, "doses", 1, "sentiment"), 2, "cheerful by itself: {}, where"),
    ("ppo", ("directions", 1, "random", 0), 2, "random one gives {}. After"),
    ("control", ("directions", 3, "doses", 5, "first"), 2, "away* from them, to {}, and"),
    ("control", ("kl", "by_position", 0), 2, "first token has only {} nats"),
    ("control", ("none", "accuracy"), 2, "has risen from {} to"),
    ("control", ("all", "accuracy"), 2, " to {}. It"),
    ("control", ("ablations", "layer 3", "alone", "accuracy"), 2, "is right in {} of"),
    ("control", ("ranks", "1", "accuracy"), 2, "is *not* enough: {} are"),
    ("direct", ("kl", "by_position", 0), 2, "what was predicted, {} nats."),
    ("direct", ("kl", "per_completion"), 1, "whole answer has {} nats,"),
    ("direct", ("none", "accuracy"), 2, "has fallen from {} to"),
    ("direct", ("all", "accuracy"), 2, " to {}. The"),
]
RUNS = json.loads((ROOT / "chapters/results/ch8_inside_runs.json").read_text(encoding="utf-8"))
SOURCE = (ROOT / "chapters/source/ch8_inside.md").read_text(encoding="utf-8")


def get_runs(name):
    return [run for run in RUNS if run["run"] == name]


def get(run, path):
    for key in path:
        run = run[key]
    return run


def test_every_run_of_the_script_is_recorded_with_three_seeds():
    for name in ch8_inside_runs.RUNS:
        assert {run["seed"] for run in get_runs(name)} == {1, 2, 3}, name
    assert {run["run"] for run in RUNS} == set(ch8_inside_runs.RUNS)
    named = set(re.findall(r'(?:get_runs|spread)\("(\w+)"', SOURCE))
    assert {"grpo", "ppo", "control"} <= named <= set(ch8_inside_runs.RUNS)


@pytest.mark.parametrize(("name", "path", "digits", "phrase"), SAID)
def test_a_number_of_the_prose_is_that_of_the_runs(name, path, digits, phrase):
    values = [get(run, path) for run in get_runs(name)]
    assert phrase.format(format_spread(values, digits)) in SOURCE


@pytest.mark.parametrize(
    ("layer", "key", "pick", "phrase"),
    [
        (2, "random", max, "gets to {} at block 2"),
        (3, "random_once", max, "block 2 and to {} at block 3"),
        (2, "random", statistics.mean, "at {} and"),
        (3, "random_once", statistics.mean, "and {}. At block 3"),
        (3, "random", max, "the best gets to {} ("),
    ],
)
def test_the_random_directions_are_those_of_the_runs(layer, key, pick, phrase):
    values = [pick(run["directions"][layer][key]) for run in get_runs("grpo")]
    assert phrase.format(format_spread(values, 2)) in SOURCE


def test_the_kl_stands_on_one_token_and_is_what_the_base_predicts():
    for run in get_runs("grpo"):
        kl = run["kl"]
        first, later = kl["by_position"][0], kl["by_position"][1:]
        assert abs(first - run["base"]["kl_if_steps"]) < 0.05
        assert first > 0.9 * kl["per_completion"]
        assert max(later) < 0.1
        assert kl["tokens_of_nine_tenths"] < 0.05


def test_one_adapter_is_enough_and_none_is_indispensable():
    for run in get_runs("grpo"):
        found = run["ablations"]
        assert found["blocks.3.mlp.out"]["alone"]["first"] > 0.9
        assert all(part["without"]["first"] > 0.4 for part in found.values())
        for name in ("layer 0", "layer 1", "attn.q", "attn.k", "attn.v", "attn.o"):
            assert found[name]["alone"]["first"] < 0.45
        for name in ("attn.q", "attn.k", "attn.v"):
            assert abs(found[name]["alone"]["first"] - run["none"]["first"]) < 0.02


def test_rank_one_keeps_the_decision_and_the_accuracy():
    for run in get_runs("grpo"):
        assert run["ranks"]["1"]["first"] > 0.99
        assert abs(run["ranks"]["1"]["accuracy"] - run["all"]["accuracy"]) < 0.08
        shares = sorted(run["singular"].values())
        assert shares[len(shares) // 2] < 0.5


def test_the_direction_does_what_the_policy_does():
    for run in get_runs("grpo"):
        last, third = run["directions"][3], run["directions"][2]
        doses = {point["scale"]: point["first"] for point in last["doses"]}
        assert doses[1.0] > 0.99
        assert doses[-1.0] < 0.01
        doses = {point["scale"]: point["first"] for point in third["doses"]}
        assert max(third["random"]) < 0.5 < 0.8 < doses[2.0]
        assert max(last["random_once"]) < 0.8
        assert abs(last["sampled"]["accuracy"] - run["all"]["accuracy"]) < 0.08
        assert max(p["first"] for p in run["directions"][0]["doses"]) < 0.5
        assert last["on_reviews"]["first"] < 0.02
    # A dose of 2 is larger than the stream at the last block: random ones do something, too.
    assert max(max(run["directions"][3]["random"]) for run in get_runs("grpo")) > 0.5


def test_patching_works_at_the_last_token_alone():
    for run in get_runs("grpo"):
        for row in run["patches"]:
            assert all(abs(value - run["none"]["first"]) < 0.02 for value in row[:-1])
        at_end = [row[-1] for row in run["patches"]]
        assert at_end == sorted(at_end)
        assert at_end[-1] == pytest.approx(run["all"]["first"], abs=1e-4)


def test_the_control_learns_many_things_and_no_way_to_the_steps():
    for run in get_runs("control"):
        assert run["all"]["accuracy"] > run["none"]["accuracy"] + 0.2
        assert run["all"]["first"] < run["none"]["first"]
        assert run["kl"]["by_position"][0] < 0.3 * run["kl"]["per_completion"]
        assert run["kl"]["tokens_of_nine_tenths"] > 0.15
        layers = [run["ablations"][f"layer {n}"] for n in range(4)]
        assert all(part["alone"]["accuracy"] < run["all"]["accuracy"] - 0.15 for part in layers)
        assert run["ranks"]["1"]["accuracy"] < run["all"]["accuracy"] - 0.05
        doses = {p["scale"]: p["first"] for p in run["directions"][3]["doses"]}
        assert doses[1.0] < run["none"]["first"]


def test_where_nothing_pays_for_the_digits_they_drift():
    for run in get_runs("direct"):
        assert run["kl"]["by_position"][0] == pytest.approx(run["base"]["kl_if_direct"], abs=0.02)
        assert run["kl"]["per_completion"] > 3 * run["kl"]["by_position"][0]
        assert run["all"]["accuracy"] < run["none"]["accuracy"]


def test_the_mood_of_reviews_is_on_many_tokens_and_held_redundantly():
    for run in get_runs("ppo"):
        assert 0.05 < run["kl"]["tokens_of_nine_tenths"] < 0.3
        assert max(run["kl"]["by_position"]) == run["kl"]["by_position"][2]
        assert all(p["without"]["sentiment"] > 0.75 for p in run["ablations"].values())
        assert run["ranks"]["1"]["sentiment"] > 0.9
