"""Faults that people met in notebooks and trainers, each an example of its kind."""

import io
import os
import sys

import numpy as np
import psutil
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from transformers import AutoModelForCausalLM, AutoTokenizer

from solutions.ch0_sampling import get_samples
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from utils import tracking
from utils.course import kept_methods, session
from utils.course.checking import run_and_print
from utils.grading import diagnosis
from utils.grading.checks import get_checks
from utils.grading.observation import StudentNames
from utils.grading.reference import get_chapter_source
from utils.grading.substitution import build_module, is_stub
from utils.models import loading
from utils.models.loading import EMBEDDED_MODEL, load_base_model
from utils.rewards import call_reward_fn
from utils.tracking import describe_args, format_stably


@pytest.fixture(autouse=True)
def without_colour(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")


def masked_mean(values, mask, dim=None):
    if isinstance(dim, str):
        raise NotImplementedError
    kept = values.masked_fill(~mask, 0.0)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)


# --- Trainers -----------------------------------------------------------------------------------


def test_nothing_is_put_before_a_prompt_where_the_tokenizer_has_no_bos_nor_pad(tmp_path):
    AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL, bos_token=None, pad_token=None)
    tokenizer.save_pretrained(tmp_path)
    model = load_base_model(tmp_path, device="cpu")
    assert model.tokenizer.bos_token is None
    model.tokenizer.pad_token = None
    samples = get_samples(model, ["Q: 12+34\n", "F"], 2)
    assert samples.input_ids[0, :-2].tolist() == tokenizer("Q: 12+34\n")["input_ids"]
    assert samples.attention_mask[1, : samples.prompt_len].sum() == 1


def test_the_repositorys_models_stay_in_float32_by_whatever_path(monkeypatch):
    monkeypatch.setattr(loading, "choose_dtype", lambda device: torch.bfloat16)  # as on a GPU
    for name in ("embedded", EMBEDDED_MODEL, os.path.relpath(EMBEDDED_MODEL)):
        assert next(load_base_model(name, device="cpu").parameters()).dtype == torch.float32


def test_a_bos_is_not_put_before_another():
    model = load_base_model("embedded", device="cpu")
    prompt = f"{model.tokenizer.bos_token}This movie is"
    with pytest.raises(ValueError, match="prompts should not begin with a bos"):
        get_samples(model, [prompt], 1)
    twice = get_samples(model, [prompt], 1, temperature=0.0, prepend_bos=False)
    once = get_samples(model, ["This movie is"], 1, temperature=0.0)
    assert torch.equal(twice.input_ids, once.input_ids)


def test_arguments_are_described_alike_in_every_process():
    rows = [{"21", "twenty-one", "XXI"}, {"3", "three"}]  # a set's order differs
    assert format_stably(rows) == "[{'21', 'XXI', 'twenty-one'}, {'3', 'three'}]"
    assert "0x" not in format_stably([len, lambda x: x, masked_mean])  # an address does, too
    for plain in ([1, (2.0,), ("a", None)], {"k": ["v", True]}, (1, 2), torch.float16):
        assert format_stably(plain) == repr(plain)


def test_a_runs_folder_is_claimed_at_its_start(tmp_path):
    lock = tracking.claim(tmp_path / "run")
    with pytest.raises(ValueError, match="another run is writing"):
        tracking.claim(tmp_path / "run")
    lock.release()
    tracking.claim(tmp_path / "run").release()


@pytest.mark.parametrize("kind", ["stdout", "stderr"])
def test_what_a_stream_cannot_encode_ends_nothing(kind, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, kind, stream)
    tracking.tolerate_encoding()
    print("✓ ⏎ │", file=getattr(sys, kind), flush=True)
    assert stream.buffer.getvalue().strip() == b"? ? ?"


def test_rewards_may_be_an_array_seen_backwards_and_a_column_not_named_like_the_samples():
    rewards = call_reward_fn(lambda samples: np.arange(3.0)[::-1], ["a", "b", "c"], {})
    assert rewards.tolist() == [2, 1, 0]
    with pytest.raises(ValueError, match="columns should not hold 'completions'"):
        call_reward_fn(lambda completions, **_: [0.0], ["a"], {"completions": ["gold"]})


def test_a_dtype_may_be_given_by_its_name():
    assert load_base_model("embedded", "cpu", "bfloat16").unembed.weight.dtype == torch.bfloat16
    for wrong in ("bloat16", "int8", torch.int64):
        with pytest.raises(ValueError, match="dtype should be a floating-point dtype"):
            load_base_model("embedded", "cpu", wrong)
    assert GrpoTrainer(GrpoArgs(dtype="bfloat16", device="cpu")).model.cfg.dtype == torch.bfloat16
    assert describe_args(GrpoArgs(dtype="bfloat16"))["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("given", "disabled", "is_logged_in", "mode"),
    [
        ("", "", False, "offline"),
        ("", "", True, "online"),
        ("disabled", "", True, "disabled"),
        ("online", "true", True, "disabled"),
    ],
)
def test_the_mode_of_wandb(given, disabled, is_logged_in, mode, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", given)
    monkeypatch.setenv("WANDB_DISABLED", disabled)
    assert tracking.get_wandb_mode(is_logged_in) == mode


# --- The notebook -------------------------------------------------------------------------------


def test_checks_pass_under_unusual_settings_and_leave_them(capsys):
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad(), torch.autograd.set_detect_anomaly(True):
            run_and_print(masked_mean, globals())
            assert torch.get_default_device() == torch.device("meta")
            assert torch.get_default_dtype() == torch.float64
            assert torch.is_anomaly_enabled()
            assert not torch.is_grad_enabled()
            assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert "6 of 6 points, solved" in capsys.readouterr().out


def test_a_branch_that_is_not_implemented_is_no_stub():
    def falls_through(kind):
        if kind == "k1":
            return 1
        raise NotImplementedError

    def in_a_loop(kinds):
        for kind in kinds:
            if kind:
                raise NotImplementedError
        return kinds

    def stub(kind):
        if kind is None:
            kind = "k1"
        raise NotImplementedError

    assert not any(map(is_stub, (masked_mean, falls_through, in_a_loop)))
    assert is_stub(stub)


def test_progress_that_cannot_be_saved_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(session, "PROGRESS", tmp_path / "file" / "progress.json")
    session.check(masked_mean)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("(Your progress could not be saved in ")


def test_progress_follows_a_later_version_that_fails(monkeypatch, capsys, tmp_path):
    """And begins anew where its file is damaged."""
    path = tmp_path / "progress.json"
    monkeypatch.setattr(session, "PROGRESS", path)

    def is_solved():
        capsys.readouterr()
        session.progress()
        return f"1 of {len(get_checks('ch0_sampling'))} " in capsys.readouterr().out

    for source in (RIGHT, WRONG, RIGHT):
        exec("check(masked_mean)", run_cell(source) | {"check": session.check})
        assert is_solved() == (source == RIGHT)
    path.write_text("{")
    assert not is_solved()


def test_methods_stay_when_the_cell_of_their_class_runs_again(monkeypatch, capsys):
    shell = InteractiveShell()
    monkeypatch.setattr(kept_methods, "get_ipython", lambda: shell)
    for classes in ({"Other"}, {"T"}):  # the set-up cell runs twice
        kept_methods.watch(classes)

    def run(source: str) -> str:
        shell.run_cell(source)
        return capsys.readouterr().out.partition("what was attached to it stays: ")[2]

    given = "class T:\n    def base(self): return {n}\n    def given(self): return self.mine()"
    assert run(given.format(n=1)) == ""
    assert run("class T(T):\n    def mine(self): return 1 + super().base()") == ""
    assert run("T.other = lambda self: 5") == ""
    assert run(given.format(n=10)) == "T.mine, T.other\n"
    model = shell.user_ns["T"]()
    assert (model.given(), model.other()) == (11, 5)
    assert run("class T(T):\n    def mine(self): return 0") == ""
    assert shell.user_ns["T"]().given() == 0


def test_the_set_up_leaves_processors_to_others(monkeypatch, capsys):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 16)
    try:
        for load, threads in ((0.0, 8), (11.0, 5), (15.2, 1), (40.0, 1)):
            percent = 100 * min(load / 16, 1)
            monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percent=percent: percent)
            session.choose_threads()
            assert torch.get_num_threads() == threads
            assert f"uses {threads} of 16" in capsys.readouterr().out
    finally:
        torch.set_num_threads(before)


# --- Messages -----------------------------------------------------------------------------------

RIGHT = """
def masked_mean(values, mask, dim=None):
    kept = values.masked_fill(~mask, 0.0)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)
"""
WRONG = "def masked_mean(values, mask, dim=None):\n    return values.mean(dim)\n"
TWO_ERRORS = """
def calc_entropy(logits):
    logprobs = logits.log_softmax(-1)
    entropy = (logprobs.exp() * logprobs).sum(-1)  # the sign
    return entropy if logits.isfinite().all() else entropy.double()  # and a dtype
"""
CELL = """
def calc_entropy(logits):
    probs = logits.softmax(-1)
    return (probs @ probs.log()).sum(-1)

def left_pad(sequences, pad_token_id):
    return [torch.tensor(s) for s in sequences]
"""


def run_cell(source: str) -> dict:
    names = {"torch": torch}
    exec(compile(source, "/tmp/ipykernel_1/123.py", "exec"), names)
    return names


def check(source: str, name: str, **options) -> None:
    names = run_cell(source)
    run_and_print(names[name], names, **options)


def test_an_error_shows_its_text_and_the_line_of_the_answer(capsys):
    check(CELL, "calc_entropy", hardening=True)
    said = capsys.readouterr().out
    n_checks = len(get_checks("ch0_sampling")["calc_entropy"])
    assert said.count("raised RuntimeError") == n_checks
    told = said.count('123.py", line 4, in calc_entropy') + said.count(", as above")
    assert told == n_checks
    assert "shapes cannot be multiplied" in said
    check(CELL, "left_pad")  # an error of the check is not said to be the answer's
    said = capsys.readouterr().out
    assert "raised" not in said
    assert "the check could not go on with what it got" in said


def test_hardening_stands_in_one_line_and_slow_checks_are_said_to_exist(capsys):
    harder = [check for check in get_checks("ch0_sampling")["masked_mean"] if not check.is_core]
    check(RIGHT, "masked_mean")
    said = capsys.readouterr().out
    assert f"hardening: {len(harder)} of {len(harder)}\n" in said
    assert harder[0].title not in said
    check(RIGHT, "masked_mean", hardening=True)
    said = capsys.readouterr().out
    assert all(check.title in said for check in harder)
    assert "slow" not in said
    names = get_chapter_source("ch2_ppo").build()
    run_and_print(names["RLHFTrainer"].train, names)
    n_slow = sum(check.slow for check in get_checks("ch2_ppo")["RLHFTrainer.train"])
    said = f"({n_slow} slow checks were not run: check(RLHFTrainer.train, slow=True))"
    assert said in capsys.readouterr().out


def test_the_mistake_that_explains_most_is_named(capsys):
    """A known mistake, and besides one that nobody has noted."""
    check(TWO_ERRORS, "calc_entropy")
    assert f"→ {diagnosis.AT_LEAST}" in capsys.readouterr().out


def test_the_given_old_logprobs_may_stand_for_the_memorys():
    """As the text allows; the checks of learning_phase run the student's objective."""
    source = get_chapter_source("ch2_ppo").source
    right = "            scored.logprobs,\n            minibatch.logprobs,\n"
    assert source.count(right) == 1
    given = right.replace("minibatch.logprobs", "self.get_old_logprobs(minibatch, scored.logprobs)")
    names = vars(build_module("ch2_ppo", source.replace(right, given)))
    for exercise in ("RLHFTrainer.compute_rlhf_objective", "RLHFTrainer.learning_phase"):
        verdicts, _ = diagnosis.grade_exercise("ch2_ppo", exercise, StudentNames(names))
        assert [verdict.check.name for verdict in verdicts if not verdict.passed] == []
