"""Chapter 4's solutions against sampling and chapter 3; what it says of its recorded runs."""

import pytest
import torch
from torch.distributions import Categorical

from solutions.ch1_lora import TransformerWithLora
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch4_kl import (
    KINDS,
    KlArgs,
    KlTrainer,
    calc_exact_kl,
    calc_expected_gradient,
    calc_kl_estimate,
)
from tests.course.helpers import ONE_STEP, randomize, read_results


@pytest.fixture
def bandit():
    """Logits of a policy, a reference and a sampler, over seven tokens, in float64."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_expectation_is_the_mean_of_sampled_gradients(bandit, kind, place):
    policy, ref, old = bandit
    n = 40_000
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokens = Categorical(logits=old).sample((n,))
    logits = policy.expand(n, -1).clone().requires_grad_()  # one row, and gradient, a sample
    logprobs = Categorical(logits=logits).log_prob(tokens)
    ref_logprobs, old_logprobs = (Categorical(logits=x).log_prob(tokens) for x in (ref, old))
    k = calc_kl_estimate(logprobs, ref_logprobs, kind, old_logprobs)
    total = (k if place == "loss" else k.detach() * logprobs).sum()
    samples = torch.autograd.grad(total, logits)[0]
    error = samples.std(0) / n**0.5
    found = calc_expected_gradient(policy, ref, kind, place, old)
    assert ((samples.mean(0) - found).abs() < 5 * error).all()


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return randomize(TransformerWithLora.from_pretrained(GrpoArgs().base_model))


def make_setup(tmp_path, **overrides):
    setup = {"gen_len": 6, "batch_size": 8, "group_size": 4, "kl_coef": 0.3, "runs_dir": tmp_path}
    setup["reward_fn"] = lambda samples: torch.arange(len(samples)).float()
    return ONE_STEP | setup | overrides


def test_k3_is_chapter_3s_trainer(tmp_path, model):
    setup = make_setup(tmp_path, batches_per_learning_phase=2)
    ours = KlTrainer(KlArgs(kl_estimator="k3", **setup), model)
    theirs = GrpoTrainer(GrpoArgs(**setup), model)
    minibatch = next(iter(ours.rollout_phase().get_minibatches(ours.generator)))
    minibatch.logprobs.add_(torch.randn_like(minibatch.logprobs), alpha=0.1)  # an older policy
    adapters = model.trainable_parts()["adapters"]
    found = []
    for trainer in (ours, theirs):
        objective = trainer.compute_rlhf_objective(minibatch)
        found.append((objective.detach(), torch.autograd.grad(objective, adapters)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_penalty_is_the_mean_over_completions(tmp_path, model, kind):
    trainer = KlTrainer(KlArgs(kl_estimator=kind, ent_coef=0.0, **make_setup(tmp_path)), model)
    minibatch = next(iter(trainer.rollout_phase().get_minibatches(trainer.generator)))
    minibatch.mask[1] = False  # an empty completion counts 0
    minibatch.ref_logprobs[~minibatch.mask] = torch.nan
    minibatch.advantages.zero_()
    objective = trainer.compute_rlhf_objective(minibatch)
    rows = []
    for logprobs, ref_logprobs, kept in zip(
        minibatch.logprobs, minibatch.ref_logprobs, minibatch.mask, strict=True
    ):
        k = calc_kl_estimate(logprobs[kept], ref_logprobs[kept], kind)
        rows.append(k.mean() if kept.any() else torch.zeros(()))
    torch.testing.assert_close(objective, -0.3 * torch.stack(rows).mean())
    torch.testing.assert_close(trainer.metrics["kl_term"][-1], torch.stack(rows).mean().item())


def test_without_a_penalty_the_reference_does_not_run(tmp_path, model):
    trainer = KlTrainer(KlArgs(kl_estimator="k1", **make_setup(tmp_path, kl_coef=0.0)), model)
    memory = trainer.rollout_phase()
    assert memory.ref_logprobs is None
    trainer.learning_phase(memory)
    assert "kl_term" not in trainer.metrics


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="kl_estimator"):
        KlArgs(kl_estimator="k5")
    with pytest.raises(ValueError, match="kl_kind"):
        KlArgs(kl_estimator="k2", kl_kind="exact")
    with pytest.raises(ValueError, match="kl_estimator"):
        KlArgs()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_exact_kl_of_short_dtypes_is_computed_in_float32(dtype):
    logits, ref_logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    kl = calc_exact_kl(logits, ref_logits)
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl, calc_exact_kl(logits.float(), ref_logits.float()))


def test_the_scan_shows_what_the_chapter_declared():
    scan = {}  # the exact KL at the end, by seed
    for run in read_results("ch4_kl_scan"):
        by_seed = scan.setdefault((run["label"], run["beta"], run["updates"]), {})
        by_seed[run["seed"]] = run["after"]["kl"]
    betas = sorted({beta for _, beta, _ in scan} - {0.0})
    for updates in (1, 4):
        free = scan["none", 0.0, updates]
        assert len(free) == 3
        for beta in betas:
            for kind in ("k2", "k3", "k4"):
                penalised = scan[kind, beta, updates]
                assert all(penalised[seed] < free[seed] for seed in free), (kind, beta, updates)
            assert max(scan["k1", beta, updates].values()) > min(free.values()), (beta, updates)
    for updates, beta in [(1, 1.0), (4, 0.1), (4, 0.3), (4, 1.0)]:  # where k1 raises the KL
        free, penalised = scan["none", 0.0, updates], scan["k1", beta, updates]
        assert all(penalised[seed] > free[seed] for seed in free), (updates, beta)


def test_the_story_can_be_solved_from_its_logs():
    """All of its runs are k1: in each with a penalty the logged term falls below 0, as only k1 and
    k4 can, and each has the KL that k1 leads to."""
    runs = read_results("ch4_kl_lost_flag")
    scan = read_results("ch4_kl_scan")
    assert {run["label"] for run in runs} == set(KINDS)
    assert all(min(run["kl_term"]) < 0 for run in runs if run["beta"] > 0)
    assert all(min(r["kl_term"]) >= 0 for r in scan if r["label"] in ("k2", "k3"))
