"""Chapter 9's solutions against TRL, chapter 0's sampler, and chapter 3."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from solutions.ch0_sampling import get_logprobs, masked_mean, sample_completions
from solutions.ch1_lora import TransformerWithLora
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch7_scale import to_trl_config
from solutions.ch9_async import (
    AsyncArgs,
    StaleTrainer,
    calc_async_objective,
    calc_importance_weights,
    get_kept_logprobs,
    mask_mismatched,
    measure_mismatch,
    quantise,
    quantised,
    simulate,
)
from tests.course.helpers import (
    ONE_STEP,
    assert_bit_identical,
    get_base_weights,
    randomize,
    read_results,
)
from utils.models.corpus import training_pairs
from utils.scale.trl import cut, make_qwen, take_trl_step

# --- TRL ----------------------------------------------------------------------------------------


def of_vllm(**options):
    """TRL's arguments of its correction."""
    return {f"vllm_importance_sampling_{name}": value for name, value in options.items()}


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """A trainer of a small Qwen, and completions whose log-probs are those of another sampler."""
    folder = make_qwen(tmp_path_factory.mktemp("late") / "qwen")
    torch.manual_seed(0)
    prompts = [f"Q: {a}+{b}\n" for a, b in training_pairs()[:4]]
    sizes = {"batch_size": 16, "group_size": 4, "gen_len": 12, "total_phases": 1}
    setup = {"base_lr": 1e-3, "final_scale": 1.0, "ent_coef": 0.0, "max_grad_norm": 1e9}
    args = AsyncArgs(base_model=str(folder), prompts=prompts, **ONE_STEP | sizes | setup)
    trainer = StaleTrainer(args)
    for layer in trainer.model.adapters.values():
        nn.init.normal_(layer.lora_B, std=0.05)
    generator = torch.Generator().manual_seed(3)
    rows = [prompt for prompt in prompts for _ in range(4)]
    drawn = sample_completions(trainer.model, rows, 12, generator=generator)
    samples = cut(drawn, torch.randint(2, 13, (16,), generator=generator))
    with torch.no_grad():
        logits = trainer.model(samples.input_ids, samples.attention_mask)
    logprobs = get_logprobs(logits, samples.input_ids, samples.prompt_len)
    noise = 0.3 * torch.randn(logprobs.shape, generator=generator)
    samples = replace(samples, logprobs=logprobs + noise)
    scores = torch.tensor([float(len(text) % 7 + text.count("e")) for text in samples.texts])
    trainer.sample_and_score = lambda *_: (samples, scores)
    ratio = (-noise).exp()[samples.completion_mask]
    assert ratio.min() < 0.6 < 1.7 < ratio.max()
    return folder, trainer, samples, scores


def differentiate(trainer, objective):
    names, parameters = trainer.model.trainable_state(), trainer.model.trainable_parameters()
    found = torch.autograd.grad(objective, parameters)
    return objective.item(), dict(zip(names, found, strict=True))


def take_theirs(late, **options):
    """The objective of TRL's step, and its gradients: as our arguments are translated, or with
    these options of TRL's correction in their place."""
    folder, trainer, samples, scores = late
    model = TransformerWithLora.from_pretrained(folder, sites=trainer.args.lora_sites, device="cpu")
    model.load_trainable_state(trainer.model.trainable_state())
    config = to_trl_config(trainer.args)
    if options:
        config = {k: v for k, v in config.items() if not k.startswith("vllm")} | of_vllm(**options)
    loss, gradients = take_trl_step(model, folder, config, samples, scores, of_vllm=True)
    return -loss, {name: -gradient for name, gradient in gradients.items()}


def score_ours(late):
    """The one minibatch, and the learner's log-probs of it, with their gradient."""
    trainer = late[1]
    (minibatch,) = trainer.rollout_phase().get_minibatches()
    ids, attention_mask = minibatch.input_ids, minibatch.attention_mask
    return minibatch, trainer.score(ids, attention_mask, minibatch.prompt_len).logprobs


def weigh(late, batch, logprobs, weights):
    """The objective of one step with these weights, and its gradients."""
    ratio = torch.exp(logprobs - logprobs.detach())
    objective = masked_mean(ratio * weights * batch.advantages[:, None], batch.mask, dim=-1).mean()
    return differentiate(late[1], objective)


def assert_same_step(ours, theirs):
    assert abs(ours[0] - theirs[0]) < 1e-6
    assert ours[1].keys() == theirs[1].keys()
    assert max(g.abs().max() for g in ours[1].values()) > 1e-3
    for name, gradient in ours[1].items():
        torch.testing.assert_close(gradient, theirs[1][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "of_trl"),
    [
        ({"correction": "none"}, {"correction": False}),
        ({"correction": "truncate", "cap": 1.5}, {"mode": "token_truncate", "clip_max": 1.5}),
    ],
)
def test_a_correction_is_that_of_trl(late, ours, of_trl):
    trainer = late[1]
    (minibatch,) = trainer.rollout_phase().get_minibatches()
    vars(trainer.args).update(ours)
    ours = differentiate(trainer, trainer.compute_rlhf_objective(minibatch))
    assert_same_step(ours, take_theirs(late))
    assert_same_step(ours, take_theirs(late, **of_trl))


@pytest.mark.parametrize("cap", [0.8, 1.5])
def test_weights_of_sequences_are_trl_with_sequence_truncate(late, cap):
    batch, logprobs = score_ours(late)
    weights = calc_importance_weights(logprobs, batch.logprobs, batch.mask, cap, "sequence")
    assert (weights.amax(-1) == cap).any()
    assert (weights.amax(-1) < cap).any()
    theirs = take_theirs(late, mode="sequence_truncate", clip_max=cap)
    assert_same_step(weigh(late, batch, logprobs, weights), theirs)


def test_what_trl_masks_stays_in_its_denominator(late):
    """With "token_mask" and limits of 1 / cap and cap, it divides by all tokens of a completion,
    and our "mask" by those that are left."""
    batch, logprobs = score_ours(late)
    theirs = take_theirs(late, mode="token_mask", clip_min=1 / 1.5, clip_max=1.5)
    kept = mask_mismatched(logprobs, batch.logprobs, batch.mask, 1 / 1.5, 1.5)
    share = kept.sum(-1) / batch.mask.sum(-1)
    assert share.min() < 0.9
    scaled, unscaled = (
        calc_async_objective(logprobs, batch.logprobs, advantages, batch.mask, "mask", cap=1.5)
        for advantages in (batch.advantages * share, batch.advantages)
    )
    assert_same_step(differentiate(late[1], scaled), theirs)
    assert abs(unscaled.item() - theirs[0]) > 1e-3


def test_the_default_of_trl_leaves_out_whole_completions(late):
    """It is "sequence_mask" with 3: no limit from below, the completion stays in the batch's mean,
    and the clip's old log-probs are the learner's own, so that every ratio of it is 1."""
    from trl import GRPOConfig

    config = GRPOConfig(output_dir="unused", use_cpu=True, report_to="none", bf16=False)
    assert config.vllm_importance_sampling_correction
    assert config.vllm_importance_sampling_mode == "sequence_mask"
    assert config.vllm_importance_sampling_clip_max == 3.0
    assert config.vllm_importance_sampling_clip_min is None
    batch, logprobs = score_ours(late)
    weights = calc_importance_weights(logprobs, batch.logprobs, batch.mask, None, "sequence")
    assert (weights > 3).any()
    assert ((weights < 1 / 3) & batch.mask).any()
    ours = weigh(late, batch, logprobs, weights.masked_fill(weights > 3, 0.0))
    assert_same_step(ours, take_theirs(late, clip_max=3.0))


def test_the_translation_is_what_trl_reads():
    from trl import GRPOConfig

    args = AsyncArgs(top_p=0.9, correction="truncate", cap=1.7)
    rest = {"output_dir": "unused", "use_cpu": True, "report_to": "none", "bf16": False}
    config = GRPOConfig(**to_trl_config(args) | rest)
    assert config.top_p == 0.9
    assert config.vllm_importance_sampling_correction
    assert config.vllm_importance_sampling_mode == "token_truncate"
    assert config.vllm_importance_sampling_clip_max == 1.7
    off = GRPOConfig(**to_trl_config(AsyncArgs()) | rest)
    assert off.top_p == 1.0
    assert not off.vllm_importance_sampling_correction
    assert not [name for name in to_trl_config(GrpoArgs()) if name.startswith("vllm")]


@pytest.mark.parametrize(
    "options",
    [{"staleness": 1}, {"sampler_bits": 8}, {"correction": "clip"}, {"correction": "mask"}],
    ids=str,
)
def test_what_trl_has_nothing_for_is_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} should be .* but is {value!r}"):
        to_trl_config(AsyncArgs(**options))


# --- Short dtypes -------------------------------------------------------------------------------


def test_log_probs_of_bfloat16_are_measured_in_float32():
    """A ratio of 1.0117 would be 1.0078 or 1.0156 in bfloat16."""
    sampler_logprobs = torch.tensor([[-0.5, -1.0]], dtype=torch.bfloat16)
    logprobs = sampler_logprobs + torch.tensor([[0.01171875, 0.25]], dtype=torch.bfloat16)
    difference, mask = (logprobs - sampler_logprobs).float(), torch.ones(1, 2, dtype=torch.bool)
    weights = calc_importance_weights(logprobs, sampler_logprobs, mask, cap=None)
    torch.testing.assert_close(weights, difference.exp(), rtol=1e-6, atol=0)
    measured = measure_mismatch(logprobs, sampler_logprobs, mask)
    assert measured["max_ratio"] == pytest.approx(difference.exp().max().item(), rel=1e-6)
    logits = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.bfloat16)
    found = get_kept_logprobs(logits, torch.tensor([1]), top_k=2)
    torch.testing.assert_close(found, get_kept_logprobs(logits.float(), torch.tensor([1]), top_k=2))


# --- The trainer --------------------------------------------------------------------------------


def count_vowels(samples: list[str]) -> torch.Tensor:
    return torch.tensor([float(sum(text.count(vowel) for vowel in "aeiou")) for text in samples])


SIZES = {"batch_size": 16, "group_size": 4, "gen_len": 10, "total_phases": 4}
SMALL = ONE_STEP | SIZES | {"kl_coef": 0.0, "base_lr": 1e-3, "reward_fn": count_vowels}


def test_on_time_and_without_a_correction_it_is_grpo(tmp_path):
    common = SMALL | {"total_phases": 3, "runs_dir": tmp_path}
    grpo = GrpoTrainer(GrpoArgs(**common, name="grpo"))
    late = StaleTrainer(AsyncArgs(**common, name="late"))
    start = {name: x.clone() for name, x in grpo.model.trainable_state().items()}
    rows = [trainer.train() for trainer in (grpo, late)]
    assert [row["reward"] for row in rows[0]] == [row["reward"] for row in rows[1]]
    assert [row["age"] for row in rows[1]] == [0, 0, 0]
    assert max(row["approx_kl"] for row in rows[1]) < 1e-9
    ours = late.model.trainable_state()
    for name, tensor in grpo.model.trainable_state().items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5)
    assert max((ours[name] - start[name]).abs().max() for name in ours) > 1e-4


def test_the_first_rollouts_are_not_late_yet(tmp_path):
    args = AsyncArgs(**SMALL | {"base_lr": 3e-3}, staleness=2, runs_dir=tmp_path, name="late")
    rows = StaleTrainer(args).train()
    assert [row["age"] for row in rows] == [0, 1, 2, 2]
    assert rows[0]["approx_kl"] < 1e-9
    assert min(row["approx_kl"] for row in rows[1:]) > 1e-8  # the sampler's own log-probs arrive


# --- Weights of fewer bits ----------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 8, 3, 2])
def test_rounded_weights_are_put_back_bit_for_bit(embedded, bits):
    randomize(embedded)
    weights, ids = get_base_weights(embedded), torch.arange(3, 15)[None]
    with torch.no_grad():
        before = embedded(ids)
        with quantised(embedded, bits):
            rounded = embedded(ids)
        assert_bit_identical(embedded, weights)
        torch.testing.assert_close(embedded(ids), before, rtol=0, atol=0)
        assert (rounded - before).abs().max() > 1e-4
    with pytest.raises(RuntimeError, match="in the sampler"), quantised(embedded, bits):
        raise RuntimeError("in the sampler")
    assert_bit_identical(embedded, weights)


def test_rounding_takes_the_nearest_level():
    weight = torch.randn(40, 5)
    for bits in (2, 3, 4, 8):
        top = 2 ** (bits - 1) - 1
        rounded, step = quantise(weight, bits), weight.abs().amax(0) / top
        assert all(len(column.unique()) <= 2 * top + 1 for column in rounded.T)
        assert ((rounded - weight).abs() <= step / 2 + 1e-6).all()
        torch.testing.assert_close(quantise(rounded, bits), rounded)


# --- The distribution that was drawn from -------------------------------------------------------


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (8, None), (None, 0.7), (20, 0.8)])
def test_the_kept_mass_is_that_of_the_sampler(embedded, top_k, top_p):
    randomize(embedded)
    generator = torch.Generator().manual_seed(0)
    prompts = ["This movie is", "Q: 12+34\n"] * 8
    samples = sample_completions(embedded, prompts, 10, 0.9, top_k, top_p, generator)
    with torch.no_grad():
        logits = embedded(samples.input_ids, samples.attention_mask)
    mask = samples.completion_mask
    logits = logits[:, samples.prompt_len - 1 : -1][mask]
    tokens = samples.completion_ids[mask]
    logprobs, log_kept_mass = get_kept_logprobs(logits, tokens, 0.9, top_k, top_p)
    torch.testing.assert_close(log_kept_mass, samples.log_kept_mass[mask], rtol=0, atol=1e-4)
    whole = samples.logprobs[mask]  # of the sampler, before it was cut
    torch.testing.assert_close(logprobs + log_kept_mass, whole, rtol=0, atol=1e-4)


# --- The clock ----------------------------------------------------------------------------------

LENGTHS = [10.0, 20.0, 30.0, 200.0]


def test_who_waits_for_whom():
    """Batches of 64 in 64 slots take 30 s, and learning 60: what the modes come to by hand."""
    found = {mode: simulate(mode, [30.0]) for mode in ("sync", "overlap", "partial")}
    assert found["sync"]["seconds_per_step"] == pytest.approx(90)
    assert found["overlap"]["seconds_per_step"] == pytest.approx(60)
    assert found["sync"]["sampling_share"] == pytest.approx(1 / 3)
    assert found["partial"]["seconds_per_step"] == pytest.approx(90, rel=0.02)
    assert [found["sync"]["max_age"], found["overlap"]["max_age"]] == [0, 1]
    sync = simulate("sync", LENGTHS)["seconds_per_step"]
    assert sync == pytest.approx(260, rel=0.01)  # the longest completion, and learning
    late = simulate("async", LENGTHS, n_slots=128, eta=2, n_steps=400)["seconds_per_step"]
    assert late == pytest.approx(60, rel=0.01)  # learning alone


def test_more_room_ages_rollouts_by_no_more_than_it_and_never_makes_a_step_slower():
    found = {e: simulate("async", LENGTHS, n_slots=128, eta=e) for e in (0, 1, 2, 4, None)}
    for eta, run in found.items():
        assert eta is None or run["mean_age"] < eta + 1
        assert run["seconds_per_step"] >= 60
        assert 0 < run["sampling_share"] <= 1
    seconds = [run["seconds_per_step"] for run in found.values()]
    assert all(b <= 1.02 * a for a, b in itertools.pairwise(seconds))


# --- What the chapter says of its runs ----------------------------------------------------------


def load(name, key):
    """One number of each recorded run, by its setting."""
    found = {}
    for run in read_results(f"ch9_async_{name}"):
        found.setdefault(run["setting"], []).append(run[key])
    assert all(len(numbers) == 3 for numbers in found.values())
    return found


def test_late_runs_die_and_a_clip_or_weights_of_completions_keep_them_alive():
    """To the digits of "Go further"."""
    accuracy = load("runs", "accuracy")
    assert min(accuracy["on-policy"]) > 0.88
    for name in ("8 late, none", "rate 0.003, 8 late, none"):
        assert max(accuracy[name]) < 0.05
    assert min(accuracy["rate 0.003, 8 late, clip"]) > 0.25
    for correction in ("truncate", "mask"):
        assert max(accuracy[f"rate 0.003, 8 late, {correction}"]) == 0
    names = {
        "8 late, weights of sequences": (0.79, 0.91),
        "8 late, clip of sequences, 0.2": (0.83, 0.89),
        "8 late, clip": (0.83, 0.87),
        "8 late, clip of sequences, 3e-4 and 4e-4": (0.71, 0.75),
    }
    for name, ends in names.items():
        assert (round(min(accuracy[name]), 2), round(max(accuracy[name]), 2)) == ends
    assert [round(x, 2) for x in accuracy["8 late, truncate"]] == [0.89, 0.89, 0.0]
    assert round(min(accuracy["8 late, weights of sequences, cap 10"]), 2) == 0.30
    worked = load("runs", "worked")["8 late, clip of sequences, 3e-4 and 4e-4"]
    assert 0.38 < min(worked) < max(worked) < 0.45


def test_a_teacher_saves_samples_with_its_own_as_well():
    """The completions until 85% are right: the numbers of "Go further"."""
    samples, accuracy = load("distil", "samples"), load("distil", "accuracy")
    ends = {"reward": (1536, 1920), "KL as reward": (896, 1024), "KL as loss": (768, 896)}
    ends["teacher's samples"] = (896, 1024)
    assert accuracy.keys() == ends.keys()
    for setting, curves in accuracy.items():
        needed = [
            next(n for n, a in zip(ns, curve, strict=True) if a >= 0.85)
            for ns, curve in zip(samples[setting], curves, strict=True)
        ]
        assert (min(needed), max(needed)) == ends[setting]
    teachers = [found["accuracy"] for found in load("distil", "teacher")["reward"]]
    assert (round(min(teachers), 2), round(max(teachers), 2)) == (0.89, 0.91)
