"""From a run to TRL's own command: the configuration, the prompts, and a step on them."""

import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from solutions.ch2_ppo import RLHFArgs, RLHFTrainer
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch5_rlvr import RlvrArgs, RlvrTrainer
from solutions.ch7_scale import to_trl_config
from tests.course.helpers import ONE_STEP, ROOT, read_page
from utils.scale import to_trl
from utils.scale.trl import make_qwen
from utils.train.data import load_function

pytestmark = pytest.mark.takes_long

EXAMPLES = ROOT / "examples"
PROMPTS = ["Q: 12+34\n", "Q: 50+11\n"]
SMALL = ONE_STEP | {"batch_size": 8, "total_phases": 1, "gen_len": 6}


@pytest.fixture
def rewards(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield load_function("rewards:is_right")
    sys.modules.pop("rewards", None)


def parse(out):
    from trl.scripts.grpo import make_parser

    return make_parser().parse_args_and_config(["--config", str(out / "grpo.yaml")])


def test_trls_own_command_takes_a_run_and_makes_a_step_of_it(rewards, tmp_path, monkeypatch):
    base = make_qwen(tmp_path / "base")
    given = {"prompts": PROMPTS, "columns": {"answer": [46, 61]}, "reward_fn": rewards}
    given |= {"base_model": base, "lora_rank": 3, "lora_sites": ("attn.q", "mlp.gate")}
    args = RlvrArgs(loss_mode="token", runs_dir=tmp_path, name="run", **given, **SMALL)
    RlvrTrainer(args).train()
    out = tmp_path / "out"
    to_trl.main([str(tmp_path / "run"), str(out)])
    parsed = script, config, model, _ = parse(out)
    expected = to_trl_config(args)
    assert {name: getattr(config, name) for name in expected} == expected
    assert expected["loss_type"] == "dapo"
    assert script.reward_funcs == ["rewards.is_right"]
    assert (model.lora_r, model.lora_alpha, model.use_peft) == (3, 32, True)
    assert model.lora_target_modules == ["mlp.gate_proj", "self_attn.q_proj"]
    rows = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert rows == [
        {"prompt": f"<bos>{prompt}", "answer": answer}
        for prompt, answer in zip(PROMPTS, (46, 61), strict=True)
    ]
    from trl.scripts.grpo import main

    config.use_cpu, config.report_to = True, "none"
    main(*parsed)
    trained = json.loads((out / "trained" / "adapter_config.json").read_text())
    assert sorted(trained["target_modules"]) == model.lora_target_modules
    assert trained["base_model_name_or_path"] == str(base)


def test_a_chat_and_the_commands_options_are_handed_over(rewards, tmp_path):
    noted = {"command": "grpo", "data": "chat.jsonl", "base_model": "embedded", "prepend_bos": True}
    noted |= {"reward": ["rewards:has_format", "rewards:is_right"], "reward_weights": [0.2, 1.0]}
    noted |= {"group_size": 8, "batch_size": 64, "lora_sites": ["attn.q"], "environment": None}
    (tmp_path / "args.json").write_text(json.dumps(noted))
    to_trl.write(tmp_path, tmp_path / "out")
    given = yaml.safe_load((tmp_path / "out" / "grpo.yaml").read_text())
    assert given["reward_funcs"] == ["rewards.has_format", "rewards.is_right"]
    assert given["reward_weights"] == [0.2, 1.0]
    assert given["lora_target_modules"] == ["attn.c_attn"]
    assert given["per_device_train_batch_size"] == GrpoArgs(batch_size=64).minibatch_size
    written = (tmp_path / "out" / "prompts.jsonl").read_text(encoding="utf-8")
    assert [json.loads(x) for x in written.splitlines()] == [
        json.loads(x) for x in Path("chat.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_what_trl_has_not_is_said(tmp_path):
    RLHFTrainer(RLHFArgs(runs_dir=tmp_path, name="ppo", **SMALL)).train()
    with pytest.raises(SystemExit, match="run should be one of GRPO"):
        to_trl.main([str(tmp_path / "ppo"), str(tmp_path / "out")])
    args = GrpoArgs(kl_kind="exact", runs_dir=tmp_path, name="exact", **SMALL)
    GrpoTrainer(args).train()
    with pytest.raises(SystemExit, match="kl_kind should be one that TRL's trainer has"):
        to_trl.main([str(tmp_path / "exact"), str(tmp_path / "out")])
    noted = json.loads((tmp_path / "exact" / "args.json").read_text()) | {"kl_kind": "k3"}
    to_trl.make_config(noted, tmp_path)
    for wrong, said in (
        ({"stop": ["\n"]}, "stop should not be given"),
        ({"adapter": "runs/first"}, "adapter should not be given"),
        ({"pool_size": 32}, "no other arguments than GRPO's, but has pool_size"),
        ({"lora_alpha": 2.5}, "lora_alpha should be whole"),
        ({"reward_fn": "__main__:mine"}, "reward_fn should be a function of a module's"),
        ({"reward_fn": "a:f.<locals>.<lambda>"}, "reward_fn should be a function of a module's"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            to_trl.make_config(noted | wrong, tmp_path)
    with pytest.raises(SystemExit, match=r"should be the folder of a run, but has no args\.json"):
        to_trl.main([str(tmp_path), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def read_table():
    """Of the page's table: the names of each row, here and in TRL."""
    page = read_page("solutions/moving_on.md")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [[re.findall(r"`(\w+)`", cell) for cell in row[:2]] for row in rows]


def test_the_page_has_every_argument_once():
    ours = [name for here, _ in read_table() for name in here if name not in ("grpo", "ppo")]
    assert sorted(ours) == sorted(field.name for field in dataclasses.fields(RlvrArgs))


def test_the_page_names_what_trl_has():
    from trl import GRPOConfig, GRPOTrainer, ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments
    from trl.scripts.utils import DatasetMixtureConfig

    kinds = (GRPOConfig, ModelConfig, GRPOScriptArguments, DatasetMixtureConfig)
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    known |= {*inspect.signature(GRPOTrainer.__init__).parameters}
    named = {name for _, theirs in read_table() for name in theirs}
    assert named - known == {"WANDB_PROJECT", "WANDB_ENTITY"}
    assert to_trl_config(RlvrArgs()).keys() <= named
