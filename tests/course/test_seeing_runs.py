"""Seeing a run: `python -m utils.watch` while it goes on, `python -m utils.sample` afterwards."""

import json
import re
import shutil

import pytest
import torch

from solutions.ch0_sampling import sample_completions
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import RLHFArgs, RLHFTrainer
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch7_scale import RefreshArgs, RefreshTrainer
from tests.course.helpers import ONE_STEP, read_lines
from utils import sample, watch
from utils.models.loading import load_base_model
from utils.run_folder import load_checkpoint
from utils.tracking import claim
from utils.train.options import find_adapter

pytestmark = pytest.mark.takes_long

SMALL = ONE_STEP | {"batch_size": 8, "total_phases": 2, "gen_len": 6}
PROMPTS = ["Q: 12+34\n", "This movie is", "Q: 50+11\n"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run whose adapters say something."""
    folder = tmp_path_factory.mktemp("runs")
    args = GrpoArgs(prompts=PROMPTS, runs_dir=folder, name="run", lora_rank=3, **SMALL)
    trainer = GrpoTrainer(args)
    generator = torch.Generator().manual_seed(0)
    for layer in trainer.model.adapters.values():
        layer.lora_B.data.normal_(std=0.1, generator=generator)
    trainer.train()
    return folder / "run"


# --- Before and after -----------------------------------------------------------------------------


def test_both_are_sampled_by_the_same_numbers_and_the_kl_is_exact(run):
    policy, _ = sample.load_policy(run, device="cpu")
    found = sample.compare(policy, PROMPTS, 6, temperature=0.7, seed=5)
    for model, samples in (
        (load_base_model("embedded", "cpu"), found.before),
        (policy, found.after),
    ):
        generator = torch.Generator().manual_seed(5)
        own = sample_completions(model, PROMPTS, 6, 0.7, generator=generator)
        assert own.texts == samples.texts
    assert found.before.texts != found.after.texts
    ids, mask, start = found.after.input_ids, found.after.attention_mask, found.after.prompt_len
    with torch.no_grad():
        p = (policy(ids, attention_mask=mask)[:, start - 1 : -1] / 0.7).log_softmax(-1)
        with policy.reference():
            q = (policy(ids, attention_mask=mask)[:, start - 1 : -1] / 0.7).log_softmax(-1)
    expected, kept = (p.exp() * (p - q)).sum(-1), found.after.completion_mask
    torch.testing.assert_close(found.kl[kept], expected[kept], atol=1e-4, rtol=1e-3)
    assert found.mean_kl == pytest.approx(expected[kept].mean().item(), rel=1e-3)
    assert found.mean_kl > 0.01


def test_a_folder_and_its_adapter_file_are_the_same_policy(run, tmp_path):
    whole, args = sample.load_policy(run)
    inside, _ = sample.load_policy(run / "adapter.safetensors")
    alone = shutil.copy(run / "adapter.safetensors", tmp_path / "alone.safetensors")
    outside, none = sample.load_policy(alone, base="embedded")
    assert args["gen_len"] == 6
    assert none == {}
    for other in (inside, outside):
        assert other.adapters.keys() == whole.adapters.keys()
        for site, layer in whole.adapters.items():
            assert torch.equal(layer.compute_delta(), other.adapters[site].compute_delta())
    with pytest.raises(ValueError, match=r"base should name the model of .*--base"):
        sample.load_policy(alone)


def test_an_adapter_file_in_a_run_has_its_own_scaling(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    model = TransformerWithLora.from_pretrained("embedded", rank=3, alpha=6, device="cpu")
    model.save_adapter(tmp_path / "run" / "other.safetensors")
    policy, args = sample.load_policy(tmp_path / "run" / "other.safetensors")
    assert {layer.scaling for layer in policy.adapters.values()} == {2.0}
    assert args["lora_alpha"] / args["lora_rank"] != 2.0


def test_a_ppo_run_is_sampled_without_its_value_head(tmp_path):
    RLHFTrainer(RLHFArgs(runs_dir=tmp_path, name="ppo", **SMALL)).train()
    policy, args = sample.load_policy(tmp_path / "ppo")
    assert sample.choose_prompts(tmp_path / "ppo", args, 8) == ["This movie is"]
    assert len(policy.adapters) == 16


def test_completions_end_where_the_run_ended_them(run):
    policy, _ = sample.load_policy(run)
    found = sample.compare(policy, ["This movie is"] * 8, 20, stops=["."])
    for samples in (found.before, found.after):
        ends = [text.find(".") for text in samples.texts]
        assert max(ends) > 0
        assert all(end in (-1, len(text) - 1) for end, text in zip(ends, samples.texts))  # noqa: B905


def test_the_adapters_of_a_run_that_changed_its_base_are_refused(tmp_path):
    args = {"refresh_every": 1, "runs_dir": tmp_path, "name": "run"}
    RefreshTrainer(RefreshArgs(**SMALL | args)).train()
    for name in ("run", "run/adapter.safetensors"):
        with pytest.raises(ValueError, match="run should have left its base as it was"):
            sample.load_policy(tmp_path / name)
        with pytest.raises(ValueError, match="adapter should be of a run that left its base"):
            find_adapter(tmp_path / name)


def test_an_environment_that_is_not_asked_is_said(run, monkeypatch, capsys):
    policy, args = sample.load_policy(run, device="cpu")
    given = (policy, args | {"environment": "run_calculator"})
    monkeypatch.setattr(sample, "load_policy", lambda *_: given)
    sample.main([str(run), "--n", "1"])
    assert "run_calculator: the run's environment isn't asked here" in capsys.readouterr().err


def test_held_out_prompts_come_first(run):
    args = load_checkpoint(run / "checkpoint.pt")["args"]
    assert sample.choose_prompts(run, args, 8) == PROMPTS
    rows = [{"prompt": f"p{i % 4}", "split": "eval" if i > 3 else "train"} for i in range(12)]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sample.choose_prompts(run, args, 2) == ["p0", "p2"]
    (run / "samples.jsonl").unlink()


def test_the_command_shows_both_and_writes_the_page(run, tmp_path, capsys, monkeypatch):
    page = tmp_path / "page.html"
    monkeypatch.setenv("COLUMNS", "400")  # no text is broken
    words = [str(run), "--temperature", "0"]
    sample.main([*words, "--html", str(page)])
    said, written = capsys.readouterr().out, page.read_text(encoding="utf-8")
    assert "\x1b" not in said  # no terminal
    policy, _ = sample.load_policy(run)
    found = sample.compare(policy, PROMPTS, 6, temperature=0.0)
    assert f"mean over the tokens on the right: {found.mean_kl:.3f} nats" in said
    for texts in (found.before.texts, found.after.texts):
        assert texts[0].split("\n")[0] in said
        assert texts[0].split("\n")[0] in written
    assert 'alt="Plot. Colours show KL(policy ‖ base), nats.' in written
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    sample.main([*words, "--prompt", "Q: 12+34\\n"])
    coloured = capsys.readouterr().out
    assert coloured.count("\x1b[30;48;5;") > 4
    assert found.after.texts[0].split("\n")[0] in re.sub(r"\x1b\[[\d;]*m", "", coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    sample.main(words)
    assert "\x1b" not in capsys.readouterr().out


def test_a_model_that_nobody_has_trained_is_sampled_alone(tmp_path, capsys):
    page = tmp_path / "page.html"
    words = ["embedded", "--device", "cpu"]
    prompted = [*words, "--prompt", *PROMPTS]
    sample.main([*prompted, "--gen-len", "6", "--temperature", "0", "--html", str(page)])
    said, written = capsys.readouterr().out, page.read_text(encoding="utf-8")
    model = load_base_model("embedded", "cpu")
    texts = sample_completions(model, PROMPTS, 6, temperature=0.0).texts
    for shown in (said, written):
        assert all(text.split("\n")[0].strip() in shown for text in texts)
        assert "before" not in shown
    assert f"The page: {page}" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [("none", "run should be a run's folder, an adapter file or a model's name"),
     ("none.safetensors", "run should be a folder or an adapter file, but there is no"),
     ("torn.safetensors", "run should be a safetensors file"),
     ("embedded", "prompt should be given, as embedded"),
     ("embedded --prompt x --base gpt2", "base should be left out, as embedded is a model"),
     ("embedded --prompt x --chat", "chat template"),
     ("embedded --chat", "chat should be given with prompt"),
     ("embedded --prompt x --n 3", "n should be left out beside prompt"),
     ("embedded --prompt x --gen-len 0", "max_new_tokens should be at least 1: 0")],
)  # fmt: skip
def test_what_is_no_run_and_options_that_say_nothing_are_refused(
    words, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torn.safetensors").write_bytes(b"x" * 50)
    with pytest.raises(SystemExit, match=message):
        sample.main([*words.split(), "--device", "cpu"])


# --- While it goes on -----------------------------------------------------------------------------


def test_a_run_that_has_ended_is_shown_once(run, capsys):
    watch.main([str(run)])
    said = capsys.readouterr().out
    rows = read_lines(run / "metrics.jsonl")
    assert "2 of 2 phases are done; it has ended" in said
    assert f"{rows[-1]['reward']:.3f}" in said
    assert f"{rows[0]['entropy']:.3f} to {rows[-1]['entropy']:.3f}" in said


def test_a_run_is_followed_until_it_ends(tmp_path, capsys, monkeypatch):
    page, path = tmp_path / "page.html", tmp_path / "metrics.jsonl"
    row = {"reward": 0.5, "entropy": 1.0, "completion_len": 3.0}
    path.write_text(json.dumps({"phase": 1} | row) + '\n{"phase": 2, "rew')  # half a row
    (tmp_path / "args.json").write_text('{"total_phases": 7}')
    lock, states = claim(tmp_path), []

    def go_on(_):
        states.append(page.read_text(encoding="utf-8"))
        path.write_text("".join(json.dumps({"phase": i} | row) + "\n" for i in (1, 2)))
        lock.release()

    monkeypatch.setattr(watch.time, "sleep", go_on)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    watch.watch(tmp_path, page)
    said = capsys.readouterr().out
    assert len(states) == 1
    assert "1 of 7 phases are done; it goes on" in said
    assert "2 of 7 phases are done; it stopped there" in said
    assert re.search(r"\x1b\[\d+F\x1b\[J", said)  # in place
    assert 'http-equiv="refresh"' in states[0]
    assert 'http-equiv="refresh"' not in page.read_text(encoding="utf-8")


def test_a_folder_without_a_run_or_without_rows_is_said(tmp_path, capsys):
    with pytest.raises(SystemExit, match="run should be the folder of a run, but .*metrics.jsonl"):
        watch.main([str(tmp_path)])
    (tmp_path / "metrics.jsonl").write_text("")
    watch.main([str(tmp_path)])
    assert "0 of ? phases are done" in capsys.readouterr().out
