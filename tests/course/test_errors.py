"""Bad input is a ValueError that names the argument, before any long work."""

import re
from pathlib import Path

import pytest
import torch

from solutions.ch0_sampling import (
    get_logprobs,
    get_samples,
    left_pad,
    masked_mean,
)
from solutions.ch1_lora import LoraLayer, TransformerWithLora
from solutions.ch2_ppo import (
    ReplayMemory,
    RLHFArgs,
    RLHFTrainer,
    compute_advantages,
    compute_token_rewards,
    normalize_reward,
)
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer, calc_grpo_objective
from tests.course.helpers import run_python
from tests.support.inputs import ragged_mask
from utils.grading.checks import Rng

MASK = ragged_mask(Rng(0))
X = torch.zeros(MASK.shape)
LOGITS, IDS = torch.rand(2, 3, 5), torch.zeros(2, 4, dtype=torch.long)
FIELDS = dict.fromkeys(("input_ids", "attention_mask", "logprobs", "advantages"), X) | {
    "mask": MASK
}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: left_pad([], 0), "sequences should hold at least one"),
        (lambda: LoraLayer(3, 4, rank=0), "rank should be at least 1, but is 0"),
        (lambda: get_logprobs(LOGITS, IDS[:, :3], 4), r"prefix_len should be in \[1, 3\]"),
        (lambda: get_logprobs(LOGITS, IDS), r"beside logits \[2, 3, 5\], but is int64\[2, 4\]"),
        (lambda: masked_mean(torch.rand(2, 3), MASK), r"mask should be .* beside values \[2, 3\]"),
        (lambda: compute_advantages(X, X, MASK.float()), "mask should be Bool.*but is float32"),
        (lambda: compute_advantages(X, X[:, 1:], MASK), "token_rewards should be .*batch compl"),
        (lambda: compute_token_rewards(X[:3, 0], MASK), "mask should be .* beside scores"),
        (lambda: calc_grpo_objective(X, X, X, X[:2, 0], MASK), "advantages should be"),
        (lambda: normalize_reward([1.0, 2.0]), r"rewards should be Float.*but is \[1.0, 2.0\]"),
        (
            lambda: ReplayMemory(**FIELDS, group_size=3, num_minibatches=4).get_minibatches(),
            r"num_minibatches should be in \[1, 2\], the number of groups, but is 4",
        ),
        (lambda: LoraLayer(3, 4)(torch.rand(2, 5)), r"x should end in 3, but is \[2, 5\]"),
    ],
)
def test_functions_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts should be None or a list of at least one prompt"),
        ({"prompts": "Review:"}, "prompts should be None or a list of at least one prompt"),
        ({"prompts": ["a", "b"], "columns": {"c": ["1"]}}, "each of 2 prompts, but 'c' has 1"),
        ({"columns": {"answers": []}}, "each of 1 prompts, but 'answers' has 0"),
        ({"reward_fn": None}, "reward_fn should be a function"),
        ({"seed": "a"}, "seed should be an integer"),
        ({"base_lr": float("inf")}, "base_lr should be a finite number"),
        ({"columns": {"prompts": ["a"]}}, "columns should be a dict without 'prompts'"),
        ({"lora_sites": "attn.q"}, "lora_sites should be a tuple of names, but is 'attn.q'"),
        ({"batch_size": 0}, "batch_size should be an integer of at least 1, but is 0"),
        ({"batch_size": 130}, "batch_size should be a multiple of num_minibatches"),
        ({"gen_len": 2.5}, "gen_len should be an integer"),
        ({"temperature": 0.0}, "temperature should be a finite number in"),
        ({"lam": 1.5}, r"lam should be a finite number in \[0, 1\], but is 1.5"),
        ({"kl_in": "objective"}, r"kl_in should be one of \['loss', 'reward'\]"),
    ],
)
def test_arguments_of_a_run_are_checked_when_they_are_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        RLHFArgs(**{"num_minibatches": 4} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"group_size": 1}, "group_size should be an integer of at least 2"),
        ({"group_size": 24}, "group_size should divide a minibatch of .* 32 completions"),
        ({"kl_in": "reward"}, r"kl_in should be one of \['loss'\], but is 'reward'"),
        ({"kl_kind": "k1"}, r"kl_kind should be one of \['k3', 'exact'\]"),
    ],
)
def test_arguments_of_grpo_are_checked_when_they_are_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        GrpoArgs(**arguments)


def test_prompts_that_cannot_be_sampled(embedded):
    for prompts, said in (
        ([], "prompts should hold at least one prompt"),
        ("Review:", "prompts should be a list of strings, or of .*'Review:'"),
        (["Review:", ""], "prompts should have tokens, but one is ''"),
        (["Q", "Review:" + " The" * 120], r"context of 128 tokens, but 'Review: The The"),
    ):
        with pytest.raises(ValueError, match=said):
            get_samples(embedded, prompts, 20, prepend_bos=False)
    assert get_samples(embedded, [""], 3).texts  # the bos alone will do


def test_a_trainer_refuses_a_prompt_that_is_too_long_before_it_samples(tmp_path):
    args = RLHFArgs(prompts=["Review:", "Q" * 110], gen_len=30, device="cpu", runs_dir=tmp_path)
    with pytest.raises(ValueError, match="should fit the model's context of 128"):
        RLHFTrainer(args)


@pytest.mark.parametrize(
    ("reward_fn", "message"),
    [
        (lambda samples: torch.zeros(3), r"one reward for each of 16 samples, .* shape \[3\]"),
        (lambda samples: torch.zeros(16, 1), r"one reward for each of 16 .* shape \[16, 1\]"),
        (lambda samples: [0.0, torch.nan] * 8, "should return finite rewards, but gave nan for '"),
        (lambda samples: None, "should return a list or tensor of numbers, but returned None"),
        (lambda samples: ["good"] * 16, "reward_fn should return a list or tensor of numbers"),
        (lambda: torch.zeros(16), "reward_fn should take the samples"),
        (lambda samples, answers: torch.zeros(16), "should need no more .* but needs 'answers'"),
    ],
)
def test_a_bad_reward_function_is_an_error_in_the_first_phase(reward_fn, message, tmp_path):
    short = {"batch_size": 16, "num_minibatches": 1, "gen_len": 5, "device": "cpu", "name": "run"}
    args = GrpoArgs(reward_fn=reward_fn, runs_dir=tmp_path, **short)
    with pytest.raises(ValueError, match=message):
        GrpoTrainer(args).train()


def test_arguments_and_models_of_another_trainer(embedded):
    with pytest.raises(ValueError, match="args should be GrpoArgs, but is RLHFArgs"):
        GrpoTrainer(RLHFArgs())
    with pytest.raises(ValueError, match="model should be a TransformerWithValueHeadLora"):
        RLHFTrainer(RLHFArgs(), embedded)


def test_models_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for path, said in (
        (tmp_path / "nowhere", "should be a folder with a model, but .*nowhere"),
        (tmp_path, "should hold a config.json"),
        ("no/such-model", "there is no folder 'no/such-model' here"),
    ):
        with pytest.raises(ValueError, match=said):
            TransformerWithLora.from_pretrained(path, device="cpu")
    with pytest.raises(ValueError, match="is not there"):
        RLHFTrainer(RLHFArgs(base_model="./no/such/model"))


@pytest.mark.parametrize("lacks", ["einops", "torch"])
def test_a_pytorch_that_is_there_stays_as_it_knows_the_gpu(lacks):
    hide = f"u.find_spec = lambda name: None if name == {lacks!r} else found(name)"
    code = f"import importlib.util as u\nfound = u.find_spec\n{hide}\nimport utils.course"
    (file,) = re.findall(r"%pip install -r (\S+)", run_python("-c", code).stderr)
    names = [line.split("==")[0] for line in Path(file).read_text().splitlines() if "==" in line]
    assert "einops" in names
    assert ("torch" in names) == (lacks == "torch")
