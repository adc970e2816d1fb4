"""What people bring: their tables, numbers, files, chats, models and machines."""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from solutions.ch0_sampling import get_completion_mask, sample_completions
from solutions.ch1_lora import TransformerWithLora
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch5_rlvr import find_finished
from tests.course.helpers import ONE_STEP, ROOT, randomize, run_python
from utils.course import session
from utils.models.decoding import get_end_ids
from utils.models.export import save_merged
from utils.models.loading import EMBEDDED_MODEL, load_base_model
from utils.prompts import write_prompt
from utils.rewards import call_reward_fn, reward_fn_sum
from utils.train.data import load_function, load_rows

SMALL = ONE_STEP | {"batch_size": 8, "group_size": 4, "total_phases": 1, "gen_len": 4}


def length(samples):
    return [float(len(text)) for text in samples]


def make_trainer(folder, **given):
    return GrpoTrainer(GrpoArgs(**SMALL | {"runs_dir": folder, "reward_fn": length} | given))


# --- Data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, lambda c: c, lambda c: c.to_numpy()])
def test_rows_of_a_table_stay_together(kind, tmp_path):
    table = pd.DataFrame({"prompt": ["p0", "p1", "p2"], "answer": ["a0", "a1", "a2"]})
    table = table.iloc[[2, 0]]  # as after sorting or filtering
    met = set()

    def reward_fn(samples, prompts, answer):
        met.update(zip(prompts, answer, strict=True))
        return length(samples)

    args = {"columns": {"answer": table["answer"]}, "reward_fn": reward_fn}
    trainer = make_trainer(tmp_path, prompts=kind(table["prompt"]), batch_size=32, **args)
    trainer.train()
    assert met == {("p2", "a2"), ("p0", "a0")}
    with pytest.raises(ValueError, match="prompts should be None or a list"):
        make_trainer(tmp_path, prompts=table)


@pytest.mark.parametrize(
    ("reward_fn", "name"),
    [(lambda samples, answer: answer, "samples"), (lambda completion, n=3: n, "completion")],
)
def test_a_column_named_like_the_samples_is_said(reward_fn, name):
    with pytest.raises(ValueError, match=f"take the samples, .* parameters .*'{name}'.* are col"):
        call_reward_fn(reward_fn, ["x"], {name: [1.0], "answer": [1.0]})


def test_a_reward_cannot_change_what_is_trained_on(tmp_path):
    met = []

    def judge(samples, prompts, answers):
        met.append(list(zip(prompts, map(str, answers), strict=True)))
        for prompt, answer in zip(prompts, answers, strict=True):
            answer.append(prompt)
        prompts.reverse()
        samples.clear()
        return [float(i) for i in range(len(answers))]

    columns = {"answers": [["a"], ["b"]]}
    args = {"prompts": ["p", "q"], "columns": columns, "reward_fn": judge, "total_phases": 2}
    trainer = make_trainer(tmp_path, **args)
    trainer.train()
    assert {pair for pairs in met for pair in pairs} <= {("p", "['a']"), ("q", "['b']")}
    assert trainer.args.columns == columns == {"answers": [["a"], ["b"]]}


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [("12", 12, 1), ("-3", "-3", 1), ("9,801", "9801", 1), ("3.5", "3", 0), ("3,000", "3", 0),
     ("3/4", "3", 0), ("3", "3", 1), (" 7\n8", "7", 1), ("35.5", "3", 0), ("3.", "3", 1),
     ("3, then 4", "3", 1), ("no 3", "3", 0), ("1,2345", "1", 0), ("", "3", 0)],
)  # fmt: skip
def test_a_whole_number_is_read_as_one(text, answer, right):
    assert reward_fn_sum([text], [answer]).tolist() == [right]


def test_an_answer_that_is_no_whole_number_is_refused():
    with pytest.raises(ValueError, match="answers should be whole numbers, but one is '3.5'"):
        reward_fn_sum(["3"], ["3.5"])


def test_lines_end_with_a_newline_alone(tmp_path):
    texts = [f"One{code}line" for code in "\u2028\u2029\x85\x0c"]
    jsonl, txt = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n\n" for text in texts]
    jsonl.write_bytes("\ufeff".encode() + "".join(lines).encode())
    txt.write_bytes("\ufeff".encode() + "\n".join(texts).encode())
    for path in (jsonl, txt):
        assert [row["prompt"] for row in load_rows(str(path))] == texts
    assert load_function("json.py:loads") is json.loads


@pytest.mark.parametrize(
    ("data", "text", "said"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": "schön"}\n', "a.jsonl, line 2 should be UTF-8"),
        ("a.jsonl", '{"prompt": "x"', r"a\.jsonl, line 1 should be JSON"),
        ("a.jsonl", '{"question": "x"}\n', "rename 'question' to prompt"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": "b", "answers": 2}\n', "row 2"),
        ("a.jsonl", None, "no .*a.jsonl"),
        ("data.csv", None, r"module:function.*read_csv\(...\).to_json\('rows.jsonl'"),
        ("nowhere:f", None, "there is no module 'nowhere' for 'nowhere:f' in "),
        ("utils.rewards:oops", None, "no function 'oops', but has .*check_rewards"),
        ("utils.train.data:load_rows", None, "should need no arguments, .* argument: 'data'"),
    ],
)
def test_data_that_does_not_fit_is_named(data, text, said, tmp_path):
    if text is not None:
        (tmp_path / data).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=said):
        load_rows(str(tmp_path / data) if data == "a.jsonl" else data)


# --- Models ---------------------------------------------------------------------------------------


def test_a_completion_ends_at_each_of_the_models_ends():
    base = load_base_model("embedded", device="cpu")
    letter = base.tokenizer(" ", add_special_tokens=False)["input_ids"][0]
    base.original_model.generation_config.eos_token_id = [base.tokenizer.eos_token_id, letter]
    assert get_end_ids(base) == [base.tokenizer.eos_token_id, letter]
    generator = torch.Generator().manual_seed(0)
    samples = sample_completions(base, ["This movie is"] * 32, 20, generator=generator)
    masks = [get_completion_mask(samples.completion_ids, end) for end in get_end_ids(base)]
    assert torch.equal(samples.completion_mask, masks[0] & masks[1])
    held = (samples.completion_ids == letter).any(-1)
    assert held.any()
    assert find_finished(samples, get_end_ids(base))[held].all()


def test_a_chat_that_ends_with_the_assistant_is_gone_on_with():
    tokenizer = load_base_model("embedded", device="cpu").tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    user = {"role": "user", "content": "Hi"}
    assert write_prompt([user], tokenizer) == "<user>Hi</><assistant>"
    begun = [user, {"role": "assistant", "content": "Well"}]
    assert write_prompt(begun, tokenizer) == "<user>Hi</><assistant>Well"


def test_a_special_token_beyond_the_embedding_is_named(tmp_path):
    AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its pad token has the id 512, and the embedding has 512"):
        load_base_model(tmp_path, device="cpu")


def test_an_exported_tokenizer_puts_the_bos_where_training_put_it(embedded, tmp_path):
    randomize(embedded)
    save_merged(embedded, tmp_path / "with")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "with")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "with")
    inputs = tokenizer("Q: 12+34\n", return_tensors="pt")
    samples = sample_completions(embedded, ["Q: 12+34\n"], 20, temperature=0.0)
    assert torch.equal(inputs["input_ids"], samples.input_ids[:, : samples.prompt_len])
    found = plain.generate(**inputs, do_sample=False, max_new_tokens=20)
    text = tokenizer.decode(found[0, samples.prompt_len :], skip_special_tokens=True)
    assert text == samples.texts[0]
    base = load_base_model(tmp_path / "with", device="cpu")  # its tokenizer puts it
    for model, name in (
        (embedded, "without"),
        (TransformerWithLora(base, rank=2), "again without"),
    ):
        save_merged(model, tmp_path / name, prepend_bos=False)
        ids = AutoTokenizer.from_pretrained(tmp_path / name)("Q: 1+2")["input_ids"]
        assert [tokenizer.bos_token_id, *ids] == tokenizer("Q: 1+2")["input_ids"]


def test_an_adapter_with_nan_is_refused(embedded, tmp_path):
    state = {name: tensor.clone() for name, tensor in embedded.trainable_state().items()}
    name = next(iter(state))
    state[name][0, 0] = torch.nan
    with pytest.raises(ValueError, match=f"{name} should be finite"):
        embedded.load_trainable_state(state)


# --- Runs -----------------------------------------------------------------------------------------


def test_equal_rewards_in_every_group_are_said_once_and_measured(tmp_path, capsys):
    given = {"reward_fn": lambda samples: [1.0] * len(samples), "total_phases": 2, "top_k": 5}
    history = make_trainer(tmp_path, **given).train()
    assert [row["frac_reward_zero_std"] for row in history] == [1.0, 1.0]
    said = "".join(capsys.readouterr())
    assert said.count("every group's rewards are equal, so they teach nothing") == 1
    assert said.count("Training with top_k: what the sampler drops is never learned") == 1


def test_a_failed_first_phase_leaves_no_folder(tmp_path):
    trainer = make_trainer(tmp_path, name="run", reward_fn=lambda samples: samples)
    with pytest.raises(ValueError, match="reward_fn"):
        trainer.train()
    assert not (tmp_path / "run").exists()
    trainer.args = dataclasses.replace(trainer.args, reward_fn=length)
    assert len(trainer.train()) == 1


def test_a_checkpoint_of_another_kind_of_device_goes_on_with_new_random_numbers(tmp_path):
    make_trainer(tmp_path, name="run").train()
    path = tmp_path / "run" / "checkpoint.pt"
    state = torch.load(path, weights_only=True)

    def resume(position):
        """A GPU's generator has a state of 16 bytes: its seed and its position."""
        of_gpu = torch.tensor([0] * 15 + [position], dtype=torch.uint8)
        torch.save(state | {"generator": of_gpu}, path)
        trainer = make_trainer(tmp_path, name="run", device="cpu")
        with pytest.warns(UserWarning, match="another device's"):
            trainer.load_checkpoint(path)
        now = trainer.model.trainable_state()
        assert all(torch.equal(now[name], tensor) for name, tensor in state["trainable"].items())
        return trainer.generator.get_state()

    assert torch.equal(resume(1), resume(1))
    assert not torch.equal(resume(1), resume(2))


def test_two_kernels_lose_no_notes(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "PROGRESS", tmp_path / "progress.json")
    monkeypatch.setattr(session, "is_solved", lambda _: True)
    monkeypatch.setattr(session, "count_points", lambda _: 1.0)
    check = SimpleNamespace(is_core=True, points=1, chapter="ch0_sampling")
    verdict = SimpleNamespace(check=check, passed=True)
    with ThreadPoolExecutor(2) as kernels:
        done = kernels.map(lambda i: session._save_progress(str(i), [verdict]), range(100))
    assert [*done] == [None] * 100
    assert len(json.loads((tmp_path / "progress.json").read_text())) == 100


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="runs_dir should be a folder that can be written"):
        make_trainer(tmp_path / "file", name="run").train()


def test_a_device_that_is_not_there_is_named():
    for device in ["gpu", "cuda:99"]:
        with pytest.raises(ValueError, match=f"device should be one that .* but is '{device}'"):
            load_base_model("embedded", device=device)


@pytest.mark.takes_long
@pytest.mark.parametrize(("asked", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_asked_to_stop_says_last_how_to_go_on(asked, status, tmp_path):
    command = [sys.executable, "-m", "utils.train", "grpo", "--device", "cpu", "--runs-dir",
               str(tmp_path), "--name", "run", "--gen-len", "8"]  # fmt: skip
    # Tests that a shell runs in the background inherit that SIGINT is ignored.
    listen = lambda: signal.signal(asked, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, preexec_fn=listen)  # fmt: skip
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(asked)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == status
    assert "Traceback" not in output
    assert output.splitlines()[-1].endswith(f"--resume {tmp_path / 'run'}")


@pytest.mark.takes_long
def test_an_ascii_locale_ends_no_check():
    imports = "from utils.course import check; from solutions.ch0_sampling import masked_mean"
    code = f"{imports}; check(masked_mean)"
    said = run_python("-c", code, PYTHONIOENCODING="ascii")
    assert said.returncode == 0, said.stderr
    assert "solved" in said.stdout


def test_what_truncation_keeps_is_measured_in_training(tmp_path):
    def train(**given) -> list[float]:
        history = make_trainer(tmp_path, **given).train()
        return [row["kept_mass"] for row in history if "kept_mass" in row]

    assert train() == []
    (narrow,), (wide,) = train(top_p=0.3), train(top_p=0.99)
    assert 0.3 <= narrow < 0.9 < 0.99 <= wide <= 1
