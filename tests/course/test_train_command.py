"""What the command adds to the trainers: evaluation, samples, several rewards, signals."""

import json
import re
import shlex
import shutil
from typing import get_type_hints

import pytest
import torch
import tyro
from safetensors.torch import load_file

from solutions.ch2_ppo import RLHFArgs, RLHFTrainer
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch5_rlvr import RlvrArgs
from solutions.ch7_scale import DataParallelGrpoTrainer, RefreshArgs
from tests.course.helpers import read_lines, write_lines
from tests.course.test_scale import finish, start
from tests.course.test_trainers import assert_equal_adapters, without_seconds
from utils import sample
from utils.models.corpus import addition_prompt, addition_rows, held_out_pairs
from utils.models.export import read_run
from utils.models.loading import EMBEDDED_MODEL, load_base_model
from utils.models.turns import Stops
from utils.run_folder import read_args
from utils.signals import find_equal_rewards
from utils.train.__main__ import is_of_own_code, make_trainer, train
from utils.train.data import WeightedRewards
from utils.train.dpo import DpoCommand, train_on_preferences
from utils.train.options import GrpoCommand, PpoCommand, make_args
from utils.train.parsing import parse

pytestmark = pytest.mark.takes_long

SMALL = (
    "--gen-len 16 --batch-size 16 --num-minibatches 1 --batches-per-learning-phase 1 "
    "--device cpu --samples-every 0 --warmup-steps 0 --total-phases 4"
)
DATA, HERE = "--data utils.models.corpus:addition_rows", "tests.course.test_train_command"
GRADED = f"{DATA} --reward {HERE}:graded"
FALLING = f"--reward {HERE}:falling"
HELD = [{"prompt": addition_prompt(a, b), "answers": str(a + b)} for a, b in held_out_pairs()[:2]]
COMMANDS = {"grpo": GrpoCommand, "ppo": PpoCommand}


def read(kind, folder, options=""):
    """The options of a small run in this folder, as the command reads them."""
    groups = "--group-size 4" if kind == "grpo" else ""
    given = f"{kind} {SMALL} {groups} --runs-dir {folder} --name run {options}"
    return parse(shlex.split(given))


def run(kind, folder, options=GRADED):
    """Train as the command does, and return the history and what it left."""
    return train(read(kind, folder, options)), folder / "run"


def resume(folder, options=""):
    return train(parse(shlex.split(f"--resume {folder} {options}")))


def make(command):
    return make_trainer(command, make_args(command))


def graded(samples, answers):
    return [len(text) / 10 + text.endswith(f"A: {a}") for text, a in zip(samples, answers)]  # noqa: B905


def short(samples):
    return [float(len(text) < 10) for text in samples]


def falling(samples, calls=[]):  # noqa: B006  # it counts its calls
    calls.append(None)
    return [-float(len(calls))] * len(samples)


@pytest.fixture
def held(tmp_path):
    return write_lines(tmp_path / "held.jsonl", HELD)


def of_training(history):
    """What training itself measured."""
    return [
        {k: v for k, v in row.items() if not k.startswith("eval_") and k != "seconds"}
        for row in history
        if row["phase"] > 0
    ]


@pytest.mark.parametrize("kind", COMMANDS)
def test_evaluation_leaves_training_bit_for_bit_what_it_is(kind, held, tmp_path):
    plain, folder = run(kind, tmp_path / "plain")
    options = f"{GRADED} --eval-data {held} --eval-every 3 --eval-samples 5"
    evaluated, other = run(kind, tmp_path / "evaluated", options)
    assert of_training(evaluated) == of_training(plain)
    assert_equal_adapters(*(load_file(path / "adapter.safetensors") for path in (folder, other)))
    assert [row["phase"] for row in evaluated if "eval_reward" in row] == [0, 3, 4]
    assert evaluated == read_lines(other / "metrics.jsonl")


def test_what_is_evaluated_is_written_and_the_best_adapters_are_kept(held, tmp_path):
    options = f"{GRADED} --eval-data {held} --eval-every 1 --eval-samples 3"
    history, folder = run("grpo", tmp_path, f"{options} --samples-every 2 --base-lr 0.01")
    rows = read_lines(folder / "samples.jsonl")
    held_out = [row for row in rows if row["split"] == "eval"]
    assert [row["phase"] for row in rows if row["split"] == "train"] == [1] * 3 + [3] * 3
    answers = {row["prompt"]: row["answers"] for row in HELD}
    found = {}
    for phase in range(5):
        of_phase = [row for row in held_out if row["phase"] == phase]
        assert sorted(row["prompt"] for row in of_phase) == sorted(3 * [*answers])
        texts = [row["completion"] for row in of_phase]
        expected = graded(texts, [answers[row["prompt"]] for row in of_phase])
        assert [row["reward"] for row in of_phase] == pytest.approx(expected)
        found[phase] = history[phase]["eval_reward"]
        assert found[phase] == pytest.approx(sum(expected) / 6)
    best = json.loads((folder / "best.json").read_text())
    assert best == {"phase": max(found, key=found.get), "eval_reward": max(found.values())}
    last = load_file(folder / "adapter.safetensors")
    kept = load_file(folder / "best.safetensors")
    is_last = all(torch.equal(kept[name], last[name]) for name in last)
    assert is_last == (best["phase"] == 4)


def test_patience_ends_a_run_that_gets_no_better(held, tmp_path, capsys):
    options = f"{DATA} {FALLING} --eval-data {held} --eval-every 1 --patience 2"
    history, folder = run("grpo", tmp_path, options)
    assert [row["phase"] for row in history] == [0, 1, 2]
    said = capsys.readouterr().out
    assert "Stopped after phase 2: the last 2 evaluations were no better than" in said
    names = {path.name for path in folder.iterdir()}
    assert {"adapter.safetensors", "checkpoint.pt", "metrics.png"} <= names
    kept = load_file(folder / "best.safetensors")  # of phase 0
    assert all(not x.any() for name, x in kept.items() if name.endswith("lora_B"))
    assert "to go on" not in said
    assert resume(folder) == history


def test_a_stopped_run_goes_on_with_its_samples(held, tmp_path, monkeypatch):
    options = f"{GRADED} --eval-data {held} --eval-every 1 --samples-every 1"
    whole, folder = run("grpo", tmp_path / "whole", options)
    calls, reward = [], graded

    def stop(samples, answers):
        calls.append(None)
        if len(calls) == 7:  # in the evaluation of phase 3: each phase has two calls, phase 0 one
            raise KeyboardInterrupt
        return reward(samples, answers)

    monkeypatch.setattr(f"{__name__}.graded", stop)
    with pytest.raises(KeyboardInterrupt):
        run("grpo", tmp_path / "half", options)
    other = tmp_path / "half" / "run"
    assert read_lines(other / "samples.jsonl")[-1]["phase"] == 3
    assert len(read_lines(other / "metrics.jsonl")) == 3
    with (other / "samples.jsonl").open("a") as file:
        file.write('{"phase": 4, "pro')  # as where the process is killed
    again = resume(other)
    assert without_seconds(whole) == without_seconds(again)
    for name in ("samples.jsonl", "best.json"):
        assert (folder / name).read_text() == (other / name).read_text()


def test_held_out_rows_that_are_trained_on_are_counted(tmp_path, capsys):
    known = [{"prompt": addition_rows()[3]["prompt"], "answers": "1"}, HELD[0]]
    path = write_lines(tmp_path / "held.jsonl", known)
    run("grpo", tmp_path, f"{GRADED} --eval-data {path} --total-phases 1")
    assert "eval_data: 1 of its 2 prompts are among those of" in capsys.readouterr().err
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="eval_data should have the columns of data, but lacks"):
        run("grpo", tmp_path / "other", f"{GRADED} --eval-data {path}")


# --- Rewards --------------------------------------------------------------------------------------


def test_several_rewards_are_added_up_and_logged_by_name(held, tmp_path):
    options = f"{GRADED} {HERE}:short --reward-weights 1 0.5 --eval-data {held} --samples-every 1"
    history, folder = run("grpo", tmp_path, options)
    rows = read_lines(folder / "samples.jsonl")
    assert {row["split"] for row in rows} == {"train", "eval"}
    for row in [*history[1:], *rows]:
        expected = row["reward_graded"] + row["reward_short"] / 2
        assert row["reward"] == pytest.approx(expected, abs=1e-5)
    assert history[0]["eval_reward_short"] in (0, 0.5, 1)
    assert len({row["reward_graded"] for row in history[1:]}) > 1


def test_an_error_in_a_readers_reward_keeps_its_line(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def parse(samples):\n    return [float('no number') for _ in samples]\n"
        "def one(samples):\n    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no number") as caught:
        run("grpo", tmp_path, "--reward my_rewards:parse")
    assert is_of_own_code(caught.value)
    assert not is_of_own_code(KeyboardInterrupt().with_traceback(caught.value.__traceback__))
    with pytest.raises(ValueError, match="one reward for each of 16 samples") as caught:
        run("grpo", tmp_path, f"--reward my_rewards:one {HERE}:short")
    trace = caught.value.__traceback__
    while trace.tb_frame.f_code.co_filename == __file__:  # it has rewards of its own
        trace = trace.tb_next
    assert not is_of_own_code(caught.value.with_traceback(trace))
    assert "in the reward one" in caught.value.__notes__


def test_weights_that_do_not_fit_and_names_that_are_shared():
    path = f"{HERE}:short"
    for paths, weights in (([path], [1.0, 2.0]), ([], [1.0])):
        with pytest.raises(ValueError, match=f"weights should be one for each of {len(paths)} rew"):
            make_args(GrpoCommand(reward=paths, reward_weights=weights))
    other = "utils.rewards:reward_fn_sum"
    assert WeightedRewards([path, other]).names == ["short", "reward_fn_sum"]
    with pytest.raises(ValueError, match="reward should name each once"):
        WeightedRewards([path, path])
    both = WeightedRewards([path, "tests.course.test_own_data:length"], [2.0, -1.0])
    assert both(["abc", "a" * 20]).tolist() == [2 - 3, -20]


# --- Signals --------------------------------------------------------------------------------------


def test_groups_without_two_rewards_are_said():
    rows = [{"phase": i, "reward": 0.0, "frac_reward_zero_std": 1.0} for i in range(1, 6)]
    assert find_equal_rewards(rows[:2], total_phases=5) is None
    assert "In phases 1 to 3 every group's rewards" in find_equal_rewards(rows[:3], total_phases=5)
    rows[1]["frac_reward_zero_std"] = 0.75
    assert find_equal_rewards(rows[:3], 5) is None
    assert find_equal_rewards([{"phase": 1, "reward": 0.0}], 1) is None  # PPO has no groups


def test_completions_that_are_cut_off_are_measured_and_said(tmp_path, capsys):
    history, _ = run("ppo", tmp_path / "long", f"{GRADED} --gen-len 60")
    assert all(row["truncated_frac"] < 0.1 for row in history)
    assert "--gen-len" not in capsys.readouterr().out
    history, _ = run("ppo", tmp_path / "short", f"{GRADED} --gen-len 3")
    assert [row["truncated_frac"] for row in history] == [1, 1, 1, 1]  # "A: 7" has five tokens
    said = capsys.readouterr().out
    assert said.count("100% of the completions are cut off after --gen-len 3") == 1


@pytest.mark.parametrize("option", ["", "--dynamic-sampling"])
def test_a_stop_is_no_cut_in_chapter_5s_metric_either(option, tmp_path):
    options = f"{GRADED} --trainer solutions.ch5_rlvr:RlvrTrainer --total-phases 1 --gen-len 40"
    history, _ = run("grpo", tmp_path, f"{options} --stop '\\n' {option}")
    assert history[0]["truncated_frac"] < 0.1


# --- Arguments ------------------------------------------------------------------------------------


def test_a_run_keeps_its_arguments(tmp_path):
    _, folder = run("ppo", tmp_path, f"{GRADED} --total-phases 1")
    found = read_args(folder)
    names = ("command", "data", "reward", "gen_len")
    assert [found[name] for name in names] == ["ppo", DATA.split()[1], [f"{HERE}:graded"], 16]
    assert "prompts" not in found
    assert re.fullmatch(r"\d+\.\d+", found["version"])
    args = RLHFArgs(runs_dir=tmp_path, name="own", total_phases=1, batch_size=4, gen_len=2,
                    dtype=torch.float32, reward_fn=short, device="cpu", columns={"n": [1]},
                    prompts=["a"])  # fmt: skip
    RLHFTrainer(args).train()
    found = read_args(tmp_path / "own")
    assert found["trainer"] == "solutions.ch2_ppo:RLHFTrainer"
    assert found["reward_fn"] == f"{HERE}:short"
    assert (found["dtype"], found["prompts"], found["columns"]) == ("float32", ["a"], {"n": [1]})
    with pytest.raises(ValueError, match="has no args.json"):
        read_args(tmp_path)


@pytest.mark.parametrize("command", [PpoCommand, GrpoCommand, DpoCommand])
def test_each_option_has_a_sentence_of_help(command, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(command, args=["--help"])
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    types = get_type_hints(command, include_extras=True)
    for name in command.__dataclass_fields__:
        (help_,) = [x.help for x in types[name].__metadata__ if hasattr(x, "help")]
        assert re.fullmatch(r"[^.].{20,}[^.]\.", help_), name
        option = f"--{name.replace('_', '-')}"
        assert re.search(
            rf" {option}[ ,].{{0,60}} {re.escape(help_)} \((default: |required)", said
        ), name


def test_grpo_shows_what_it_reads():
    fields = GrpoCommand.__dataclass_fields__.keys()
    assert "vf_coef" in PpoCommand.__dataclass_fields__
    assert not {"vf_coef", "gamma", "lam", "head_lr", "normalize_reward", "kl_in"} & fields
    assert GrpoArgs.__dataclass_fields__.keys() - fields >= {"prompts", "columns", "reward_fn"}
    assert {"clip_coef", "group_size"} <= fields


def test_a_file_gives_options_and_the_command_line_wins(tmp_path, capsys):
    path, other = tmp_path / "run.yaml", tmp_path / "run.json"
    path.write_text("gen-len: 7\nbase_lr: 1e-3\nprepend_bos: false\nreward: [a:f, b:g]\n"
                    "name: null\nlora_sites:\n  - attn.q\n")  # fmt: skip
    found = parse(["grpo", "--config", str(path), "--gen-len", "9"])
    assert (found.gen_len, found.base_lr, found.prepend_bos) == (9, 1e-3, False)
    assert (found.reward, found.lora_sites, found.name) == (["a:f", "b:g"], ("attn.q",), None)
    other.write_text('{"trainer": "solutions.ch5_rlvr:RlvrTrainer", "loss_mode": "token"}')
    assert parse(["grpo", "--config", str(other)]).loss_mode == "token"
    other.write_text('\ufeff{"gen_len": 9}', encoding="utf-8")
    assert parse(["grpo", "--config", str(other)]).gen_len == 9
    for words in (["--gen-len", "x"], ["--weights-dtype", "float16"]):
        with pytest.raises(SystemExit):
            parse(["grpo", *words])
    assert "float16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"gen_length: 7", "'gen_length' is none: did you mean gen_len?"),
        (b"vf_coef: 1", "'vf_coef' is none"),
        (b"[1]", "should hold options by name"),
        (b"a: [", "should be YAML or JSON"),
        ("name: schön".encode("latin-1"), "run.yaml, line 1 should be UTF-8"),
        (None, "config should be a file"),
    ],
)
def test_a_file_that_holds_no_options_is_refused(text, said, tmp_path):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ValueError, match=said):
        parse(["grpo", "--config", str(path)])


def test_a_run_goes_on_by_its_folder_alone(held, tmp_path, capsys):
    options = f"--eval-data {held} --prefix='Q: 12+3' --reward {HERE}:short --total-phases 2"
    half, folder = run("grpo", tmp_path, options)
    with pytest.raises(ValueError, match="total_phases should be 2 or more, .* but is 1"):
        resume(folder, "--total-phases 1")
    for path in (folder, folder / "checkpoint.pt"):
        assert resume(path) == half
    said = capsys.readouterr().err
    assert "has had all its 2 phases: for more, --total-phases" in said
    assert "reward changed" not in said
    other = write_lines(tmp_path / "moved.jsonl", HELD)
    fewer = write_lines(tmp_path / "fewer.jsonl", HELD[:1])
    for given, changed in (
        (FALLING, "reward changed: don't compare"),
        ("--stop . --eval-samples 2", "stop and eval_samples changed: don't compare"),
        (f"--eval-data {other}", None),
        (f"--eval-data {fewer} --total-phases 3", "eval_data changed: don't compare"),
        ("", None),
    ):
        resume(folder, given)
        said = capsys.readouterr().err
        assert changed in said if changed else "changed" not in said
    with pytest.raises(ValueError, match="gen_len should be 16 as in the checkpoint, but is 8"):
        resume(folder, "--gen-len 8")
    saved = parse(["--resume", str(folder)])
    assert (saved.prefix, saved.eval_data) == ("Q: 12+3", str(fewer))
    path = tmp_path / "more.yaml"
    path.write_text("eval_data: null")
    assert parse(["--resume", str(folder), "--config", str(path)]).eval_data is None
    with pytest.raises(ValueError, match="resume should be a run of ppo, but .*run is of grpo"):
        parse(["ppo", "--resume", str(folder)])
    with pytest.raises(ValueError, match="name should be left out beside resume"):
        parse(["--resume", str(folder), "--name", "other"])


def test_a_run_whose_files_have_moved_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EMBEDDED_MODEL, "base")
    write_lines(tmp_path / "rows.jsonl", HELD)
    write_lines(tmp_path / "others.jsonl", HELD[:1])
    files = "--base-model base --data rows.jsonl --eval-data rows.jsonl"
    _, folder = run("grpo", tmp_path, f"{files} --reward {HERE}:short --total-phases 1")
    away = tmp_path / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    for name in ("base", "rows.jsonl", "others.jsonl"):
        shutil.move(tmp_path / name, name)
    again = "--total-phases 2"
    with pytest.raises(ValueError, match="^data should be a file.* if it has moved, --data"):
        resume(folder, again)
    again += " --base-model base --data rows.jsonl"
    with pytest.raises(ValueError, match="^eval_data should be a file.* has moved, --eval-data"):
        resume(folder, again)
    again += " --eval-data rows.jsonl"
    with pytest.raises(ValueError, match="^data should hold the rows that the run had"):
        resume(folder, f"{again} --data others.jsonl")
    assert [row["phase"] for row in resume(folder, again)] == [0, 1, 2]
    assert read_args(folder)["base_model"] == str(away / "base")


def test_a_finished_run_goes_on_for_more_phases(tmp_path, capsys):
    options = "--base-lr 0.01 --final-scale 0"
    half, folder = run("ppo", tmp_path, f"{options} --total-phases 2")
    whole, _ = run("ppo", tmp_path / "whole", options)
    capsys.readouterr()
    more = resume(folder, "--total-phases 4")
    said = " ".join(capsys.readouterr().out.split())
    assert "run goes on to phase 4 in place of 2." in said
    assert "a run of 4 phases from here on: 0.005, and it was 0" in said
    assert more[:2] == half
    assert [row["lr"] for row in more[2:]] == [row["lr"] for row in whole[2:]] == [0.005, 0.0025]
    assert read_args(folder)["total_phases"] == 4


def test_a_run_begins_with_the_adapters_of_another(tmp_path):
    _, folder = run("grpo", tmp_path, "--total-phases 1 --lora-rank 2 --base-lr 0.1")
    path = folder / "adapter.safetensors"
    assert read("grpo", tmp_path, f"--adapter {path}").lora_rank == 2
    command = read("grpo", tmp_path, f"--total-phases 1 --name second --adapter {folder}")
    assert_equal_adapters(make(command).model.trainable_state(), load_file(path))
    assert train(command)[0]["kl_k3"] > 1e-3  # from the base


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--patience", "3"], "patience should be given with eval_data"),
        (["--turn-end", "x", "--max-calls", "5"], "turn_end and max_calls .* with environment"),
    ],
)
def test_options_that_need_another_are_refused_without_it(options, said):
    with pytest.raises(ValueError, match=said):
        make_args(parse(["grpo", *options]))


@pytest.mark.parametrize(
    ("trainer_class", "args_class", "right"),
    [
        (GrpoTrainer, RlvrArgs, "RlvrTrainer"),
        (DataParallelGrpoTrainer, RefreshArgs, "RefreshTrainer"),
        (RLHFTrainer, GrpoArgs, "GrpoTrainer"),
    ],
)
def test_arguments_that_a_trainer_would_ignore_are_refused(
    trainer_class, args_class, right, tmp_path
):
    trainer = trainer_class(args_class(device="cpu", runs_dir=tmp_path))
    with pytest.raises(ValueError, match=f"but are {args_class.__name__}, which {right} reads"):
        trainer.train()


def test_trainers_of_other_chapters_and_of_ones_own(held, tmp_path):
    options = f"{GRADED} --eval-data {held} --total-phases 1"
    rlvr = "--trainer solutions.ch5_rlvr:RlvrTrainer"
    tools = "--trainer solutions.ch10_tools:ToolTrainer"
    tools += " --environment solutions.ch10_tools:run_calculator"
    for i, (own, metric) in enumerate((
        (f"{rlvr} --loss-mode token --dynamic-sampling", "informative_frac"),
        ("--trainer solutions.ch9_async:StaleTrainer --staleness 1", "age"),
        (f"{tools} --eval-samples 4", "calls"),
    )):  # fmt: skip
        history, left = run("grpo", tmp_path / str(i), f"{options} {own}")
        assert metric in history[1]
        assert history[0]["eval_reward"] > 0
        assert read_args(left)["trainer"] == own.split()[1]
        assert resume(left) == history
    for n in (1, 2):
        with pytest.raises(ValueError, match="eval_samples should be a multiple of group_size"):
            run("grpo", tmp_path, f"{options} {tools} --eval-samples {n}")
    with pytest.raises(ValueError, match="should derive from DataParallel for microbatch_size"):
        run("grpo", tmp_path, f"{options} {rlvr} --microbatch-size 4")
    for path in (f"{HERE}:short", "solutions.ch2_ppo:RLHFTrainer"):
        with pytest.raises(ValueError, match="should be a class derived from GrpoTrainer for grpo"):
            read("grpo", tmp_path, f"--trainer {path}")


# --- Stops ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", COMMANDS)
def test_completions_end_at_a_stop_and_are_drawn_as_without(kind, tmp_path):
    stops = ["tens", "A: 8"]
    stopping = read(kind, tmp_path, f"--prefix 'Q: 47+38\n' --stop {shlex.join(stops)}")
    trainer = make(stopping)
    plain, stopped = (
        x.sample(["Q: 47+38\n"] * 64, {}) for x in (make(read(kind, tmp_path)), trainer)
    )
    prompt_len, ids = plain.prompt_len, plain.input_ids
    is_stopped = [any(stop in text for stop in stops) for text in stopped.texts]
    for i, (text, whole) in enumerate(zip(stopped.texts, plain.texts, strict=True)):
        n = int(stopped.completion_mask[i].sum())
        drawn = stopped.input_ids[i, prompt_len : prompt_len + n]
        assert torch.equal(drawn, ids[i, prompt_len : prompt_len + n])
        assert is_stopped[i] == any(stop in whole for stop in stops)
        if is_stopped[i]:
            shorter = trainer.model.tokenizer.decode(drawn[:-1])
            assert not any(stop in shorter for stop in stops)  # the last token completes it
        else:
            assert text == whole
    assert 10 < sum(is_stopped) < 64
    assert not trainer.find_cut_off(stopped)[is_stopped].any()
    assert all(row["grad_norm"] < 1e3 for row in train(stopping))  # nothing is nan behind the stop
    assert read_args(tmp_path / "run")["stop"] == stops


def test_what_a_shell_leaves_of_a_new_line_is_one():
    assert parse(["grpo", "--stop", "\\n\\n", "---"]).stop == ["\n\n", "---"]
    stops = Stops(["\n\n", "é"])
    tokenizer = load_base_model("embedded", device="cpu").tokenizer
    may_end = stops.find_turn_ends(tokenizer, 512)
    assert may_end[tokenizer("\n", add_special_tokens=False)["input_ids"][-1]]
    assert may_end[tokenizer("é", add_special_tokens=False)["input_ids"][-1]]
    assert 0 < may_end.sum() < 200
    with pytest.raises(ValueError, match="stop should be texts that are not empty"):
        Stops([""])
    command = parse(["grpo", "--stop", "a", "--environment", "solutions.ch10_tools:run_calculator"])
    with pytest.raises(ValueError, match="environment should be None beside stop"):
        make(command)


# --- Preferences ----------------------------------------------------------------------------------


def test_preferences_train_by_dpo(tmp_path):
    rows = [{"prompt": f"Q: {a}+11\n", "chosen": f"A: {a + 11}", "rejected": "I like it."}
            for a in range(20, 36)]  # fmt: skip
    chosen = write_lines(tmp_path / "train.jsonl", rows[:12])
    held = write_lines(tmp_path / "held.jsonl", rows[12:])
    words = f"dpo --data {chosen} --eval-data {held} --runs-dir {tmp_path} --name run --device cpu"
    words = f"{words} --batch-size 4 --epochs 2".split()
    history = train_on_preferences(parse(words))
    folder = tmp_path / "run"
    assert [row["phase"] for row in history] == list(range(7))
    assert history == read_lines(folder / "metrics.jsonl")
    assert history[0]["eval_accuracy"] == 0.5  # the policy is the reference
    assert history[-1]["eval_accuracy"] == 1
    assert history[-1]["margin"] > history[1]["margin"] == 0
    assert read_args(folder)["command"] == "dpo"
    _, _, args = read_run(folder)
    assert args["lora_rank"] == 4
    with pytest.raises(ValueError, match="name should be new"):
        train_on_preferences(parse(words))
    with pytest.raises(ValueError, match="sites should be among"):
        train_on_preferences(parse([*words, "--name", "wrong", "--lora-sites", "none"]))
    assert not (tmp_path / "wrong").exists()
    sample.main([str(folder), "--prompt", "Q: 20+11\n"])  # a length that fits the context
    trainer = make(read("grpo", tmp_path, f"--adapter {folder}"))
    assert_equal_adapters(
        trainer.model.trainable_state(), load_file(folder / "adapter.safetensors")
    )


# --- Processes ------------------------------------------------------------------------------------


def test_two_ranks_evaluate_together_and_stop_together(tmp_path):
    rows = [{"prompt": f"Q: {a}+11\n", "answers": str(a + 11)} for a in range(1, 4)]
    held = write_lines(tmp_path / "held.jsonl", rows)
    given = f"--eval-data {held} --eval-every 1 --eval-samples 2 --name run"
    given += " --patience 2 --base-lr 0 --stop tens --total-phases 9"
    status, output = finish(start(tmp_path, *given.split(), n_ranks=2))
    assert status == 0, output
    assert output.count("Stopped after phase 2") == 1
    found = read_lines(tmp_path / "run" / "samples.jsonl")
    history = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["phase"] for row in history] == [0, 1, 2]
    assert len({row["eval_reward"] for row in history}) == 1  # by the same random numbers
    first = [row for row in found if row["phase"] == 0]
    assert sorted(row["prompt"] for row in first) == sorted(2 * [row["prompt"] for row in rows])
    assert history[0]["eval_reward"] == pytest.approx(sum(row["reward"] for row in first) / 6)
    given = ["--resume", str(tmp_path / "run"), "--trainer", "solutions.ch5_rlvr:RlvrTrainer"]
    status, output = finish(start(tmp_path, *given, n_ranks=2))
    assert status != 0
    assert "error: trainer should derive from DataParallel for torchrun" in output
