"""Chapter 8: what no check of it asks for, and its recorded runs."""

import json
import re
import statistics
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from chapters.experiments import ch8_inside_runs
from solutions.ch0_sampling import encode_prompts, get_samples, sample_completions
from solutions.ch1_lora import TransformerWithLora
from solutions.ch8_inside import find_direction, get_activation, steer
from utils.models.corpus import addition_prompt, held_out_pairs
from utils.models.loading import ALL_LINEAR_SITES
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


@pytest.mark.parametrize("name", ["blocks.0.attn.qkv.hook_out", "blocks.9.hook_out"])
def test_a_hook_that_never_fires_is_refused(policy, prompts, name):
    """GPT-2's fused projection has hook points, of which nothing is heard."""
    with pytest.raises((ValueError, KeyError)):
        get_activation(policy, prompts[0], name)


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


def test_the_fast_sampler_is_steered_as_chapter_0s_is(policy):
    direction = 3 * torch.randn(128, generator=torch.Generator().manual_seed(2))
    name = "blocks.2.hook_out"
    with steer(policy, name, direction):
        slow = get_samples(policy, PROMPTS[:6], 8, temperature=0)
        fast = sample_completions(policy, PROMPTS[:6], 8, temperature=0)
    assert torch.equal(slow.completion_ids, fast.completion_ids)


# --- What the chapter says of its runs ----------------------------------------------------------

SAID = [  # of a run, where it stands, with how many digits, and the words around it
    ("grpo", ("kl", "by_position", 0), 2, "one token accounts for {} nats"),
    ("grpo", ("kl", "per_completion"), 2, " nats out of {} for"),
    ("grpo", ("ablations", "blocks.3.mlp.out", "alone", "first"), 2, "from 0.19 to {}. Among"),
    ("grpo", ("ablations", "layer 3", "alone", "worked"), 2, "with it alone, {} of"),
    ("grpo", ("ablations", "mlp.out", "alone", "worked"), 2, "only `mlp.out` does: {}. On"),
    ("grpo", ("ablations", "blocks.3.mlp.out", "without", "first"), 2, "is still {}. Without"),
    ("grpo", ("ablations", "layer 3", "without", "first"), 2, "of the last block it's {}, about"),
    ("grpo", ("ranks", "1", "worked"), 2, "worked answers is {}, and"),
    ("grpo", ("ranks", "1", "accuracy"), 2, ", and {} are"),
    ("grpo", ("all", "accuracy"), 2, "with all eight: {}. But"),
    ("grpo", ("singular", "blocks.3.mlp.out"), 2, "the first accounts for {} of"),
    ("grpo", ("lens", "policy", 1), 2, "lens is at {}, after"),
    ("grpo", ("lens", "policy", 2), 2, "after block 2 at {}, and"),
    ("grpo", ("lens", "policy", 3), 3, "at the end, at {}. So"),
    ("grpo", ("curve", 0, "accuracy_direct"), 2, "`A`, rises from {} ("),
    ("grpo", ("curve", 40, "accuracy_direct"), 2, ") to {}. Probably"),
    ("grpo", ("curve", 0, "accuracy_worked"), 2, "of worked answers, {} before"),
    ("grpo", ("curve", 40, "accuracy_worked"), 2, " before and {} after,"),
    ("grpo", ("curve", 8, "accuracy_worked"), 2, "a little lower, {}."),
    ("grpo", ("patches", 1, 9), 2, "in its output: {} after"),
    ("grpo", ("patches", 2, 9), 2, "after block 1, {} after"),
    ("grpo", ("patches", 3, 9), 3, "after block 2, {} after"),
    ("grpo", ("directions", 3, "doses", 5, "first"), 3, "from 0.19 to {}. Sample"),
    ("grpo", ("directions", 3, "sampled", "worked"), 2, "with it, and {} of"),
    ("grpo", ("directions", 3, "sampled", "accuracy"), 2, "worked and {} right"),
    ("grpo", ("directions", 2, "doses", 7, "first"), 2, "of 2 gives {}. At"),
    ("grpo", ("directions", 3, "doses", 0, "first"), 4, "the base had: {} at"),
    ("grpo", ("directions", 3, "doses", 9, "first"), 2, "is back at {}: the"),
    ("grpo", ("cosines", 3, "unembedding"), 2, "a cosine of {} with"),
    ("grpo", ("cosines", 3, "mlp.out"), 2, ", and of {} with"),
    ("grpo", ("cosines", 1, "unembedding"), 2, "the way there, {} after"),
    ("grpo", ("cosines", 2, "unembedding"), 2, "block 1 and {} after"),
    ("grpo", ("directions", 3, "readout", 0), 3, "block 3 it gives {}: nothing"),
    ("grpo", ("directions", 2, "readout", 0), 2, "$g$ gives {} at"),
    ("grpo", ("directions", 2, "readout", 1), 2, "dose of 1 and {} at"),
    ("ppo", ("kl", "per_completion"), 2, "The KL, {} nats"),
    ("ppo", ("kl", "tokens_of_nine_tenths"), 2, "of it is on {} of"),
    ("ppo", ("kl", "by_position", 2), 2, "About half of it, {} nats, is"),
    ("ppo", ("ablations", "layer 3", "alone", "sentiment"), 2, "of the way, {}, and"),
    ("ppo", ("ablations", "layer 2", "alone", "sentiment"), 2, "on the seed, {}. So"),
    ("ppo", ("directions", 1, "doses", 1, "sentiment"), 2, "reviews cheerful: {}, while"),
    ("ppo", ("directions", 1, "random", 0), 2, "random one gives {}. After"),
    ("control", ("directions", 3, "doses", 5, "first"), 2, "away* from them, to {}, and"),
    ("control", ("kl", "by_position", 0), 2, "first token has only {} nats"),
    ("control", ("none", "accuracy"), 2, "has risen from {} to"),
    ("control", ("all", "accuracy"), 2, " to {}. It"),
    ("control", ("ablations", "layer 3", "alone", "accuracy"), 2, "one alone, {} of"),
    ("control", ("ranks", "1", "accuracy"), 2, "is *not* enough: only {} are"),
    ("direct", ("kl", "by_position", 0), 2, "what we predicted, {} nats."),
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


def test_one_adapter_is_enough_and_none_is_indispensable():
    for run in get_runs("grpo"):
        found = run["ablations"]
        assert found["blocks.3.mlp.out"]["alone"]["first"] > 0.9
        assert all(part["without"]["first"] > 0.4 for part in found.values())
        for name in ("layer 0", "layer 1", "attn.q", "attn.k", "attn.v", "attn.o"):
            assert found[name]["alone"]["first"] < 0.45
        for name in ("attn.q", "attn.k", "attn.v"):
            assert abs(found[name]["alone"]["first"] - run["none"]["first"]) < 0.02


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
