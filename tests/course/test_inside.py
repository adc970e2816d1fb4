"""Chapter 8: what no check of it asks for, and its recorded runs."""

import functools
import operator
import re
import statistics

import pytest
import torch

from chapters.experiments import ch8_inside_runs
from solutions.ch0_sampling import get_samples, sample_completions
from solutions.ch1_lora import TransformerWithLora
from solutions.ch8_inside import get_activation, steer
from tests.course.helpers import read_page, read_results
from utils.models.corpus import addition_prompt, held_out_pairs
from utils.models.loading import ALL_LINEAR_SITES
from utils.plotting import format_spread

PROMPTS = [addition_prompt(a, b) for a, b in held_out_pairs()[:6]] + ["The plot", "This movie is"]


@pytest.fixture(scope="module")
def policy():
    """The embedded model with adapters of random values at every linear site."""
    model = TransformerWithLora.from_pretrained("embedded", 4, 32, ALL_LINEAR_SITES, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for layer in model.adapters.values():
        for parameter in (layer.lora_A, layer.lora_B):
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.requires_grad_(False)


@pytest.mark.parametrize("name", ["blocks.0.attn.qkv.hook_out", "blocks.9.hook_out"])
def test_a_hook_that_never_fires_is_refused(policy, name):
    """GPT-2's fused projection has hook points, of which nothing is heard."""
    with pytest.raises((ValueError, KeyError)):
        get_activation(policy, torch.ones(1, 3, dtype=torch.long), name)


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
RUNS = read_results("ch8_inside_runs")
SOURCE = read_page("chapters/source/ch8_inside.md")


def get_runs(name):
    return [run for run in RUNS if run["run"] == name]


def test_every_run_of_the_script_is_recorded_with_three_seeds():
    for name in ch8_inside_runs.RUNS:
        assert {run["seed"] for run in get_runs(name)} == {1, 2, 3}, name
    assert {run["run"] for run in RUNS} == set(ch8_inside_runs.RUNS)
    named = set(re.findall(r'(?:get_runs|spread)\("(\w+)"', SOURCE))
    assert {"grpo", "ppo", "control"} <= named <= set(ch8_inside_runs.RUNS)


@pytest.mark.parametrize(("name", "path", "digits", "phrase"), SAID)
def test_a_number_of_the_prose_is_that_of_the_runs(name, path, digits, phrase):
    values = [functools.reduce(operator.getitem, path, run) for run in get_runs(name)]
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
