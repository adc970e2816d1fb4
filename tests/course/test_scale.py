"""Chapter 7 on real processes (gloo, two ranks), against the profiler, and against TRL."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
import warnings

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from solutions.ch0_sampling import get_logprobs, sample_completions
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import ReplayMemory, RLHFArgs, RLHFTrainer, calc_entropy_bonus
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch5_rlvr import RlvrArgs, RlvrTrainer
from solutions.ch7_scale import (
    DataParallelGrpoTrainer,
    DataParallelRLHFTrainer,
    RefreshArgs,
    RefreshTrainer,
    estimate_memory,
    gather_trainable_state,
    shard_model,
    to_trl_config,
    unsharded,
)
from solutions.ch10_tools import run_calculator
from tests.course.helpers import ONE_STEP, ROOT, read_lines, read_page, read_results
from tests.course.test_trainers import without_seconds
from tests.support import models, trl
from utils.models.corpus import addition_rows, review_prompts
from utils.models.loading import EMBEDDED_MODEL
from utils.plotting import format_spread
from utils.rewards import reward_fn_addition
from utils.run_folder import load_checkpoint
from utils.scale.memory import boot_gpt2, make_update, measure_allocated
from utils.scale.ranks import run_ranks
from utils.scale.trl import cut, make_qwen, take_trl_step

TRAIN, _ = review_prompts()
pytestmark = pytest.mark.takes_long  # all of it: several ranks, steps of TRL's, large shapes


# --- Memory -------------------------------------------------------------------------------------

BASE = {"n_layers": 4, "d_model": 128, "n_heads": 4, "d_vocab": 512, "batch": 16, "seq": 48}
SHAPES = [
    {},
    {"batch": 64},
    {"seq": 128},
    {"n_layers": 2, "d_vocab": 50257, "batch": 8, "seq": 32},
    {"n_layers": 6, "d_model": 256, "n_heads": 8},
    {"mlp_adapters": True},
    {"dtype": torch.bfloat16, "mlp_adapters": True},
]


@pytest.mark.parametrize("change", SHAPES, ids=str)
def test_the_estimate_is_what_the_profiler_measures(change):
    shape = BASE | change
    completion = shape["seq"] - 8
    model = boot_gpt2(**shape)
    measured = measure_allocated(make_update(model, shape["batch"], shape["seq"], completion))
    n_trainable = sum(p.numel() for p in model.trainable_parameters())
    causes = estimate_memory(0, n_trainable, completion=completion, **shape)
    estimate = sum(causes[name] for name in causes if name != "optimizer")  # made before
    assert estimate / measured == pytest.approx(1, abs=0.05)


# --- Ranks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """What everything below that runs on two ranks found: starting them takes most of the time."""
    folder = tmp_path_factory.mktemp("ranks")
    results = run_ranks(run_everything, folder, make_qwen(folder / "qwen"), limit=240)
    assert None not in results, "a rank failed; what it printed is above"
    return results


def run_everything(folder, qwen):
    found = {kind: learn_beside_one(kind, folder) for kind in CASES}
    return found | {"embedded": shard_and_compare("embedded"), "qwen": shard_and_compare(qwen)}


def join(memories):
    left = max(m.prompt_len for m in memories)
    right = max(m.mask.shape[1] for m in memories)
    sizes = {"num_minibatches", "batches_per_learning_phase", "group_size"}
    joined = {}
    for name in (f.name for f in dataclasses.fields(ReplayMemory) if f.name not in sizes):
        rows = []
        for m in memories:
            before = left - m.prompt_len if name in ("input_ids", "attention_mask") else 0
            x, pads = getattr(m, name), (before, right - m.mask.shape[1])
            rows.append(x if x is None or x.ndim == 1 else nn.functional.pad(x, pads))
        if rows[0] is not None:
            joined[name] = torch.cat(rows)
    return ReplayMemory(group_size=memories[0].group_size, **joined)


IN_TURNS = {
    "base_model": "tools",
    "prompts": ["Q: 23*47\n<", "Q: 3*47\n<3", "Q: 123+456\n<"],
    "environment": run_calculator,
    "group_size": 4,
    "gen_len": 24,
}
CASES = {
    "GRPO": (DataParallelGrpoTrainer, GrpoTrainer, GrpoArgs, {"kl_kind": "exact", "group_size": 4}),
    "PPO": (DataParallelRLHFTrainer, RLHFTrainer, RLHFArgs, {}),
    "turns": (DataParallelGrpoTrainer, GrpoTrainer, GrpoArgs, IN_TURNS | {"kl_kind": "exact"}),
}


def make_args(kind, folder, **given):
    setup = {"batch_size": 16, "gen_len": 16, "total_phases": 3, "runs_dir": folder}
    _, _, args_class, options = CASES[kind]
    return args_class(**{"prompts": TRAIN} | ONE_STEP | setup | options | given)


def learn_beside_one(kind, folder):
    args = make_args(kind, folder)
    trainer, alone = CASES[kind][0](args, microbatch_size=4), CASES[kind][1](args)
    off = []
    for _ in range(3):
        memory = trainer.rollout_phase()
        written = memory.attention_mask[:, memory.prompt_len :].bool()
        assert bool((written & ~memory.mask).any()) == (kind == "turns")
        memories = [None, None]
        dist.all_gather_object(memories, memory)
        trainer.learning_phase(memory)
        alone.learning_phase(join(memories))
        pairs = zip(
            trainer.model.trainable_parameters(), alone.model.trainable_parameters(), strict=True
        )
        off.append(max((a - b).abs().max().item() for a, b in pairs))
    ids = [m.input_ids[:, m.prompt_len :].tolist() for m in memories]
    weights = torch.cat([p.detach().flatten() for p in trainer.model.trainable_parameters()])
    return off, ids, weights


@pytest.mark.parametrize("kind", CASES)
def test_two_ranks_learn_what_one_process_learns_from_their_union(kind, of_ranks):
    (off, ids, weights), (_, _, others) = (found[kind] for found in of_ranks)
    assert max(off) < 2e-5
    assert ids[0] != ids[1]  # seeds of their own
    assert torch.equal(weights, others)


def learn_once(kind, folder, **of_memory):
    """Return the weights after a step, the gradients of it, and its metrics."""
    args = make_args(kind, folder, ent_coef=0.1, kl_coef=0.3)
    trainer = CASES[kind][0](args, **of_memory)
    for layer in trainer.model.adapters.values():
        nn.init.normal_(layer.lora_B, std=0.02, generator=torch.Generator().manual_seed(0))
    trainer.learning_phase(trainer.rollout_phase())
    parameters = trainer.model.trainable_parameters()
    metrics = {name: sum(x) / len(x) for name, x in trainer.metrics.items()}
    metrics["objective"] = trainer.metrics["objective"]
    found = ([p.detach() for p in parameters], [p.grad for p in parameters])
    return *(torch.cat([x.flatten() for x in tensors]) for tensors in found), metrics


@pytest.mark.parametrize("kind", CASES)
def test_a_step_is_the_same_by_microbatches_and_with_checkpointing(kind, tmp_path):
    weights, gradient, metrics = learn_once(kind, tmp_path)
    for size in (4, 8):
        _, found, its = learn_once(kind, tmp_path, microbatch_size=size)
        assert_close(found, gradient, rtol=1e-4, atol=1e-6)
        for name in ("objective", "grad_norm"):
            assert_close(torch.tensor(its[name]), torch.tensor(metrics[name]), rtol=1e-4, atol=1e-6)
    assert torch.equal(learn_once(kind, tmp_path, checkpointing=True)[0], weights)
    both = learn_once(kind, tmp_path, microbatch_size=4, checkpointing=True)
    assert_close(both[1], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["learning_phase", "train"])
def test_an_edit_of_the_trainer_reaches_the_command_on_one_rank(name, tmp_path, monkeypatch):
    own, seen = getattr(RLHFTrainer, name), []
    monkeypatch.setattr(RLHFTrainer, name, lambda *given: seen.append(name) or own(*given))
    setup = {"batch_size": 16, "group_size": 4, "gen_len": 4, "total_phases": 2}
    DataParallelGrpoTrainer(GrpoArgs(prompts=TRAIN, runs_dir=tmp_path, **setup)).train()
    assert seen == [name] * (1 if name == "train" else 2)


@pytest.mark.parametrize("name", ["measure_entropy", "measure_kl"])
def test_an_edit_of_what_is_measured_is_trained_by_microbatches_too(name, tmp_path, monkeypatch):
    _, gradient, _ = learn_once("GRPO", tmp_path, microbatch_size=8)
    own = getattr(RLHFTrainer, name)
    monkeypatch.setattr(RLHFTrainer, name, lambda *given: 3 * own(*given))
    _, edited, _ = learn_once("GRPO", tmp_path, microbatch_size=8)
    assert (edited - gradient).norm() > 0.01 * gradient.norm()


def test_checkpointing_keeps_less_for_the_backward_pass(tmp_path):
    args = GrpoArgs(prompts=TRAIN, batch_size=64, runs_dir=tmp_path, **ONE_STEP)
    trainers = [DataParallelGrpoTrainer(args, checkpointing=is_on) for is_on in (False, True)]
    memory = trainers[0].rollout_phase()
    peaks = [measure_allocated(lambda t=trainer: t.learning_phase(memory)) for trainer in trainers]
    assert peaks[1] < 0.6 * peaks[0]


def test_checkpointing_is_refused_where_it_would_not_happen(folders, tmp_path):
    args = GrpoArgs(base_model=folders["gpt_neox"], lora_sites=("attn.q",), runs_dir=tmp_path)
    with pytest.raises(ValueError, match="checkpointing should be False .* gpt_neox"):
        DataParallelGrpoTrainer(args, checkpointing=True)


def test_checkpointing_is_refused_where_a_readers_formula_runs(monkeypatch, tmp_path):
    def twice(logits, mask, ent_coef):
        return 2 * calc_entropy_bonus(logits, mask, ent_coef)

    monkeypatch.setattr("solutions.ch2_ppo.calc_entropy_bonus", twice)
    args = RLHFArgs(runs_dir=tmp_path, **ONE_STEP)
    with (
        pytest.warns(UserWarning, match="your own code runs"),
        pytest.raises(ValueError, match="checkpointing should be False .* something else"),
    ):
        DataParallelRLHFTrainer(args, checkpointing=True)


@pytest.mark.parametrize("kind", ["GRPO", "PPO"])
def test_a_rollout_is_scored_by_microbatches_too(kind, tmp_path, monkeypatch):
    rows = []
    score = RLHFTrainer.score
    monkeypatch.setattr(
        RLHFTrainer, "score", lambda *given: rows.append(len(given[1])) or score(*given)
    )
    learn_once(kind, tmp_path, microbatch_size=2)
    assert set(rows) == {2}


def test_a_checkpoint_of_a_gpu_is_told_once(tmp_path):
    trainer = DataParallelGrpoTrainer(GrpoArgs(prompts=TRAIN, runs_dir=tmp_path, **ONE_STEP))
    of_a_gpu = torch.arange(16, dtype=torch.uint8)
    state = trainer.get_state() | {"generator": of_a_gpu, "generators": [of_a_gpu]}
    with pytest.warns(UserWarning, match="another device's") as said:
        trainer.set_state(state)
    assert len(said) == 1
    before = trainer.generator.get_state()
    with warnings.catch_warnings():  # Ctrl-C in the next phase: it's a state of here by now
        warnings.simplefilter("error")
        trainer.set_state(trainer.get_state())
    assert torch.equal(trainer.generator.get_state(), before)


@pytest.mark.parametrize("size", [3, 0, 4.0, "4"])
def test_a_microbatch_that_does_not_divide_is_an_error(size, tmp_path):
    with pytest.raises(ValueError, match="microbatch_size .*batch_size / num_minibatches"):
        learn_once("GRPO", tmp_path, microbatch_size=size)


# --- A sharded model ----------------------------------------------------------------------------


def make_model(folder):
    torch.manual_seed(0)
    model = TransformerWithLora.from_pretrained(folder, device="cpu")
    for layer in model.adapters.values():
        nn.init.normal_(layer.lora_B, std=0.02)
    return model


def shard_and_compare(folder):
    rank, n = dist.get_rank(), dist.get_world_size()
    single = make_model(folder)
    model = shard_model(make_model(folder), dist.init_device_mesh("cpu", (n,)))
    ids = torch.randint(3, 500, (4, 12), generator=torch.Generator().manual_seed(1))
    found = {"held": sum(p.to_local().numel() for p in model.parameters())}
    found["of"] = sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        found["logits"] = (model(ids) - single(ids)).abs().max().item()
    for m, rows, weight in ((single, ids, 1), (model, ids.chunk(n)[rank], n)):
        loss = -get_logprobs(m(rows), rows, 1).sum() / ids[:, 1:].numel()
        (loss * weight).backward()
    pairs = zip(single.trainable_parameters(), model.trainable_parameters(), strict=True)
    found["gradients"] = max((a.grad - b.grad.full_tensor()).abs().max().item() for a, b in pairs)
    prompts = TRAIN[rank : rank + 2]  # other prompts on each rank
    generator = torch.Generator().manual_seed(3)
    with unsharded(model), model.merged():
        texts = sample_completions(model, prompts, 8, generator=generator).texts
    generator.manual_seed(3)
    alone = sample_completions(single, prompts, 8, generator=generator)
    found["same texts"] = texts == alone.texts
    single.load_trainable_state(gather_trainable_state(model))
    return found


@pytest.mark.parametrize("kind", ["embedded", "qwen"])
def test_a_sharded_model_computes_learns_and_samples_as_one(kind, of_ranks):
    for found in (found[kind] for found in of_ranks):
        assert found["held"] <= 0.51 * found["of"]
        assert found["same texts"]
        assert found["logits"] < 2e-4
        assert found["gradients"] < 1e-5


def test_a_rank_that_waits_in_vain_gives_up_and_says_where(capsys):
    def wait_for_nobody():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    assert run_ranks(wait_for_nobody, timeout=4, limit=60)[0] is None
    assert re.search(r"\[rank 0\] \w+Error in wait_for_nobody", capsys.readouterr().out)


# --- The command --------------------------------------------------------------------------------

OPTIONS = (
    "--data utils.models.corpus:addition_rows --reward utils.rewards:reward_fn_addition "
    "--gen-len 16 --batch-size 16 --group-size 4 --num-minibatches 1 "
    "--batches-per-learning-phase 1 --device cpu --samples-every 0 --warmup-steps 0"
).split()


def start(folder, *options, n_ranks=1, **given):
    command = [sys.executable, "-m"]
    if n_ranks > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}", "-m"]
    command += ["utils.train", "grpo", *OPTIONS, "--runs-dir", str(folder), *options]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process, timeout=150):
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output


def test_the_plain_command_is_the_plain_trainer(tmp_path):
    status, output = finish(start(tmp_path, "--name", "run", "--total-phases", "2"))
    assert status == 0, output
    given = {name: [row[name] for row in addition_rows()] for name in ("prompt", "answers")}
    given = {"prompts": given.pop("prompt"), "columns": given, "reward_fn": reward_fn_addition}
    sizes = {"gen_len": 16, "batch_size": 16, "group_size": 4, "total_phases": 2}
    args = GrpoArgs(runs_dir=tmp_path, **given, **sizes, **ONE_STEP)
    torch.set_num_threads(1)
    history = GrpoTrainer(args).train()
    for row, found in zip(history, read_lines(tmp_path / "run" / "metrics.jsonl"), strict=True):
        row.pop("seconds"), found.pop("seconds"), found.pop("truncated_frac")
        assert found == pytest.approx(row, rel=1e-4, abs=1e-5)


def test_a_killed_rank_ends_the_other_and_the_run_goes_on(tmp_path):
    given = ["--total-phases", "6", "--checkpoint-every", "1"]
    status, output = finish(start(tmp_path, "--name", "whole", *given, n_ranks=2))
    assert status == 0, output
    process = start(tmp_path, "--name", "killed", *given, n_ranks=2)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and len(metrics.read_text().splitlines()) >= 2:
            break
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)  # torchrun's
    ranks = [p for p in children if "utils.train" in p.cmdline()]
    victim = next(p for p in ranks if p.environ()["RANK"] == "1")
    victim.send_signal(signal.SIGKILL)
    status, output = finish(process)
    assert status != 0
    assert "rank 0 stopped" in output
    assert f"--resume {tmp_path / 'killed'}" in output
    assert not any(p.is_running() and p.status() != "zombie" for p in ranks)
    resumed = start(tmp_path, "--resume", str(tmp_path / "killed"), *given, n_ranks=2)
    status, output = finish(resumed)
    assert status == 0, output
    files = (tmp_path / name / "metrics.jsonl" for name in ("whole", "killed"))
    whole, killed = (without_seconds(read_lines(path)) for path in files)
    assert whole == killed
    state = load_checkpoint(tmp_path / "whole" / "checkpoint.pt")
    alone = DataParallelGrpoTrainer(GrpoArgs(lora_rank=4, device="cpu", runs_dir=tmp_path))
    with pytest.raises(ValueError, match="2 ranks"):
        alone.set_state(state)


# --- TRL ----------------------------------------------------------------------------------------


def test_the_defaults_of_trl_are_what_the_checks_take_them_for(tmp_path):
    from trl import GRPOConfig

    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", bf16=False)
    for name, value in trl.DEFAULTS.items():
        if name == "bf16":  # on unless it is switched off, where the machine has it
            continue
        found = getattr(config, name)
        assert getattr(found, "value", found) == value, name


def compare_step(folder, sites, prompts, kind=(RlvrTrainer, RlvrArgs), change=None, **options):
    """Our loss, gradients and one step against TRL's, on the same completions."""
    torch.manual_seed(0)
    given = {"batch_size": 16, "group_size": 4, "gen_len": 12, "total_phases": 1, "ent_coef": 0.0}
    given |= {"base_model": folder, "prompts": prompts, "lora_sites": sites, "final_scale": 1.0}
    args = kind[1](**ONE_STEP | given | {"base_lr": 1e-3} | options)
    trainer = kind[0](args)
    for layer in trainer.model.adapters.values():
        nn.init.normal_(layer.lora_B, std=0.05)
    other = TransformerWithLora.from_pretrained(folder, sites=sites, device="cpu")
    other.load_trainable_state(trainer.model.trainable_state())
    rows = [prompt for prompt in prompts for _ in range(4)]
    generator = torch.Generator().manual_seed(3)
    samples = sample_completions(trainer.model, rows, 12, args.temperature, generator=generator)
    samples = cut(samples, torch.randint(2, 13, (16,), generator=generator))
    samples = change(samples) if change else samples
    scores = torch.tensor([float(len(t) % 7 + t.count("e")) for t in samples.texts])
    trainer.sample_and_score = lambda *_: (samples, scores)
    (minibatch,) = trainer.rollout_phase().get_minibatches()
    objective = trainer.compute_rlhf_objective(minibatch)
    objective.backward()
    names, parameters = trainer.model.trainable_state(), trainer.model.trainable_parameters()
    ours = {name: p.grad.clone() for name, p in zip(names, parameters, strict=True)}
    nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
    trainer.optimizer.step()
    loss, theirs = take_trl_step(other, folder, to_trl_config(args), samples, scores)
    assert theirs.keys() == ours.keys()
    scale = min(1.0, 1.0 / nn.utils.get_total_norm(list(ours.values())).item())
    largest = max(g.abs().max().item() for g in ours.values())
    # TRL's gradients are seen after clipping, and it minimises.
    off = max((ours[k] * scale + theirs[k]).abs().max().item() for k in ours) / (largest * scale)
    pairs = zip(trainer.model.trainable_parameters(), other.trainable_parameters(), strict=True)
    weights = max((a - b).abs().max().item() for a, b in pairs)
    return abs(loss + objective.item()), off, weights


@pytest.mark.parametrize(
    "options",
    [
        {"loss_mode": "sequence"},
        {"loss_mode": "token"},
        {"loss_mode": "constant"},
        {"temperature": 0.7, "advantage_scale": "batch", "ratio_level": "sequence"},
        {"ent_coef": 0.01, "kl_coef": 0.0, "advantage_scale": "none"},
    ],
    ids=str,
)
def test_one_step_is_that_of_trl(options, tmp_path):
    folder = make_qwen(tmp_path / "qwen")
    lengths = sorted(TRAIN, key=len)
    prompts = [lengths[i] for i in (0, 10, 20, -1)]
    sites = ("attn.q", "attn.k", "attn.v", "attn.o")
    loss, gradients, weights = compare_step(folder, sites, prompts, **options)
    assert loss < 1e-6
    assert gradients < 1e-5
    assert weights < 1e-6


def test_trl_gives_gpt2_wrong_positions_under_padding(tmp_path):
    sites = ("attn.o", "mlp.in", "mlp.out")
    tokenizer = models.load_tokenizer()
    length = len(tokenizer(TRAIN[0])["input_ids"])
    alike = [p for p in TRAIN if len(tokenizer(p)["input_ids"]) == length][:4]
    loss, gradients, _ = compare_step(EMBEDDED_MODEL, sites, alike)
    assert loss < 1e-6
    assert gradients < 1e-4
    lengths = sorted(TRAIN, key=len)
    _, gradients, _ = compare_step(EMBEDDED_MODEL, sites, [lengths[i] for i in (0, 10, 20, -1)])
    assert gradients > 0.01


# --- A refreshed reference ----------------------------------------------------------------------


def make_refreshed(tmp_path, name):
    given = ONE_STEP | {"total_phases": 4, "batch_size": 16, "gen_len": 8, "runs_dir": tmp_path}
    args = RefreshArgs(name=name, prompts=TRAIN, refresh_every=1, checkpoint_every=1, **given)
    return RefreshTrainer(args)


def test_a_refreshed_run_goes_on_with_its_base(tmp_path):
    unbroken = make_refreshed(tmp_path, "unbroken")
    unbroken.train()
    broken = make_refreshed(tmp_path, "broken")
    stop = broken.rollout_phase
    broken.rollout_phase = lambda: stop() if broken.phase < 2 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        broken.train()
    resumed = make_refreshed(tmp_path, None)
    resumed.load_checkpoint(tmp_path / "broken" / "checkpoint.pt")
    resumed.train()
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        assert_close(resumed.model(ids), unbroken.model(ids), rtol=0, atol=1e-5)
        with resumed.model.reference(), unbroken.model.reference():
            assert_close(resumed.model(ids), unbroken.model(ids), rtol=0, atol=1e-5)


# --- What the chapter says of its recorded runs -------------------------------------------------

RUNS = read_results("ch7_scale_runs")
TEXT = read_page("chapters/source/ch7_scale.md")


def get_values(name, key):
    values = [run[key] for run in RUNS if run["run"] == name]
    assert len(values) >= 3
    return values


def test_two_processes_reach_the_accuracy_of_one():
    one, two = (get_values(name, "accuracy") for name in ("1 process", "2 processes"))
    assert min(one) - 0.02 <= min(two)
    assert max(two) <= max(one) + 0.02
    assert all(len(run["rewards"]) == 40 for run in RUNS if "process" in run["run"])


def test_a_refreshed_reference_lies_on_the_curve_of_fixed_ones():
    for name in ("refreshed, beta 0.5", "fixed, beta 0.2"):
        assert format_spread(get_values(name, "true"), 2) in TEXT
        assert sum(get_values(name, "kl")) / 3 == pytest.approx(2.8, abs=0.05)
    for beta in ("1.0", "2.0"):
        names = (f"{kind}, beta {beta}" for kind in ("refreshed", "fixed"))
        means = [sum(get_values(name, "true")) / 3 for name in names]
        assert "({:.1f} against {:.1f})".format(*means) in TEXT
