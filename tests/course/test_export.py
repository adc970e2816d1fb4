"""Trained adapters leave the course: from the files, PEFT and transformers compute our logits."""

import copy
import json
import re
import warnings
from contextlib import contextmanager

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from solutions.ch0_sampling import sample_completions
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import RLHFArgs, RLHFTrainer, TransformerWithValueHeadLora
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from tests.course.helpers import (
    NATIVE,
    assert_bit_identical,
    get_base_weights,
    get_sites,
    load,
    randomize,
)
from tests.support.inputs import ragged_batch
from tests.support.models import SITES
from utils.grading.checks import Rng
from utils.models import export
from utils.models.blocks import GATED
from utils.models.export import load_peft_adapter, main, save_merged, save_peft_adapter
from utils.models.loading import EMBEDDED_MODEL
from utils.run_folder import save_checkpoint

ALL_SITES = [(name, get_sites(name)) for name in NATIVE]
SUBSETS = [
    ("gpt2", ("attn.v", "attn.q")),
    ("gpt2", ("attn.k",)),
    ("gpt2", ("attn.o", "mlp.out")),
    ("llama", ("attn.k", "mlp.gate")),
    ("qwen", ("attn.v", "attn.o", "mlp.out")),
]


def make(folder, sites, rank=3, alpha=12, **options):
    torch.manual_seed(0)
    options = {"device": "cpu", "rank": rank, "alpha": alpha, "sites": sites} | options
    return randomize(TransformerWithLora.from_pretrained(folder, **options))


@torch.no_grad()
def get_ours(model):
    ids, attention_mask = ragged_batch(Rng(0))
    return model(ids, attention_mask)[attention_mask.bool()]


def get_theirs(model):
    """The logits of a plain or of a PEFT model. Hugging Face derives no positions from the mask."""
    ids, attention_mask = ragged_batch(Rng(0))
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    options = {"attention_mask": attention_mask, "position_ids": positions}
    with torch.no_grad():
        return model.eval()(input_ids=ids, **options).logits[attention_mask.bool()]


def load_peft(base, folder):
    """PEFT's model; what it warns of, such as missing tensors, is an error."""
    plain = AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return peft.PeftModel.from_pretrained(plain, folder)


def train_a_step(model):
    """One step that moves every adapter, its A too."""
    ids, attention_mask = ragged_batch(Rng(1))
    model.train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    model(input_ids=ids, attention_mask=attention_mask, labels=ids).loss.backward()
    optimizer.step()


def make_theirs(base, **options):
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 3, "lora_alpha": 12} | options)
    torch.manual_seed(0)
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


@contextmanager
def refused(model, message):
    """An error, after which the adapters are what they were."""
    before = copy.deepcopy(model.trainable_state())
    with pytest.raises(ValueError, match=message):
        yield
    assert all(torch.equal(before[k], v) for k, v in model.trainable_state().items())


# --- PEFT -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "sites"), [*ALL_SITES[1:], *SUBSETS])
def test_peft_computes_our_logits_and_adapters_come_back(kind, sites, folders, tmp_path):
    ours = make(folders[kind], sites)
    save_peft_adapter(ours, tmp_path / "out")
    theirs = load_peft(folders[kind], tmp_path / "out")
    torch.testing.assert_close(get_theirs(theirs), get_ours(ours), atol=1e-5, rtol=0)
    with ours.reference():
        base = get_ours(ours)
    assert (get_ours(ours) - base).abs().max() > 1e-3
    with theirs.disable_adapter():
        torch.testing.assert_close(get_theirs(theirs), base, atol=1e-5, rtol=0)
    other = TransformerWithLora.from_pretrained(folders[kind], 3, 12, sites, device="cpu")
    weights = get_base_weights(other)
    load_peft_adapter(other, tmp_path / "out")
    expected = ours.trainable_state()
    assert all(torch.equal(expected[k], v) for k, v in other.trainable_state().items())
    assert torch.equal(get_ours(other), get_ours(ours))
    assert_bit_identical(other, weights)


def test_a_value_head_is_left_out_and_left_alone(tmp_path):
    ours = load({"embedded": "embedded"}, "embedded")
    save_peft_adapter(ours, tmp_path / "out")
    assert not any("head" in name for name in load_file(tmp_path / "out" / export.WEIGHTS))
    other = TransformerWithValueHeadLora.from_pretrained(
        "embedded", 3, sites=SITES["gpt2"], device="cpu"
    )
    head = copy.deepcopy(other.value_head.state_dict())
    load_peft_adapter(other, tmp_path / "out")
    assert torch.equal(get_ours(other), get_ours(ours))
    assert all(torch.equal(head[k], v) for k, v in other.value_head.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "sites", "options"),
    [
        ("llama", ("attn.k", "mlp.gate"), {"target_modules": ["k_proj", "gate_proj"]}),
        ("qwen", SITES["qwen"], {"target_modules": "all-linear", "lora_dropout": 0.1}),
        (
            "llama",
            ("attn.q", "attn.v"),
            {
                "r": 8,
                "lora_alpha": 5,
                "target_modules": ["q_proj", "v_proj"],
                "rank_pattern": {"q_proj": 3, r"layers\.\d+\.self_attn\.v_proj": 3},
                "alpha_pattern": {"[qv]_proj": 12},
                "init_lora_weights": "gaussian",
            },
        ),
        (
            "gpt2",
            ("attn.o", "mlp.in", "mlp.out"),
            {"target_modules": ["c_proj", "c_fc"], "fan_in_fan_out": True},
        ),
    ],
)
def test_what_peft_made_and_trained_gives_its_logits(kind, sites, options, checkpoints, tmp_path):
    theirs = make_theirs(checkpoints[kind], **options)
    train_a_step(theirs)
    theirs.save_pretrained(tmp_path)
    ours = make(checkpoints[kind], sites)
    assert (get_ours(ours) - get_theirs(theirs)).abs().max() > 1e-3
    load_peft_adapter(ours, tmp_path)
    torch.testing.assert_close(get_ours(ours), get_theirs(theirs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rank", "ours"), [(9, 3), (3, 3)])
def test_what_peft_trained_on_c_attn_cannot_be_taken_apart(rank, ours, checkpoints, tmp_path):
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    theirs = make_theirs(checkpoints["gpt2"], r=rank, lora_alpha=4 * rank, **options)
    train_a_step(theirs)
    theirs.save_pretrained(tmp_path)
    model = make(checkpoints["gpt2"], ("attn.q", "attn.k", "attn.v"), rank=ours)
    with refused(model, "one A for q, k and v, and cannot be taken apart"):
        load_peft_adapter(model, tmp_path)


def test_the_base_is_found_by_the_adapter_alone(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(checkpoints["llama"].parent)
    ours = make(f"./{checkpoints['llama'].name}", SITES["llama"])
    save_peft_adapter(ours, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(get_theirs(theirs), get_ours(ours), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_rslora": True}, "only options that the course has, but sets .*use_rslora"),
        ({"use_dora": True, "modules_to_save": ["lm_head"]}, "modules_to_save.*lm_head.*use_dora"),
        ({"bias": "all"}, "sets .*bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights .* change the base.*'pissa'"),
        ({"peft_type": "IA3"}, "should be of LoRA, but has IA3Config"),
        ({"lora_alpha": 13}, "alpha / rank of .* should be 4.0, but is 4.33"),
        ({"alpha_pattern": {"v_proj": 6}}, "alpha / rank of .*v_proj should be 4.0, but is 2.0"),
    ],
)
def test_options_that_do_not_fit_change_nothing(change, message, checkpoints, tmp_path):
    ours = make(checkpoints["llama"], ("attn.q", "attn.v"))
    save_peft_adapter(ours, tmp_path / "out")
    path = tmp_path / "out" / export.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    other = randomize(make(checkpoints["llama"], ("attn.q", "attn.v")))
    with refused(other, message):
        load_peft_adapter(other, tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "sites", "rank", "message"),
    [
        ("llama", ("attn.q", "attn.v"), 4, r"q_proj should be \[\[32, 4\].* but are \[\[32, 3\]"),
        ("llama", ("attn.q",), 3, r"0 tensors are missing.* 2 are unknown .*v_proj"),
        ("llama", SITES["llama"], 3, r"10 tensors are missing .* 0 are unknown"),
        ("qwen", ("attn.q", "attn.v"), 3, r"q_proj should be \[\[32, 3\], \[3, 32\]\]"),
        ("gpt2", ("attn.q", "attn.v"), 3, r"4 tensors are missing .*h.0.attn.c_attn"),
        # Two sites' worth of rank on each side, but q and v are not q and k.
        ("gpt2", ("attn.q", "attn.k"), 3, "lora_B of .*c_attn should be block diagonal"),
    ],
)
def test_an_adapter_of_another_shape_changes_nothing(
    kind, sites, rank, message, checkpoints, tmp_path
):
    source = "gpt2" if "diagonal" in message else "llama"
    save_peft_adapter(make(checkpoints[source], ("attn.q", "attn.v")), tmp_path / "out")
    with refused(other := make(checkpoints[kind], sites, rank, 4 * rank), message):
        load_peft_adapter(other, tmp_path / "out")


def test_a_folder_without_an_adapter_is_an_error(checkpoints, tmp_path):
    ours = make(checkpoints["llama"], ("attn.q",))
    with pytest.raises(ValueError, match=r"should hold a PEFT adapter, but .*none is not there"):
        load_peft_adapter(ours, tmp_path / "none")
    with pytest.raises(ValueError, match=r"Can't find 'adapter_config.json'"):
        load_peft_adapter(ours, tmp_path)


# --- Merged checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "sites"), [*ALL_SITES, *SUBSETS[1:3]])
def test_a_merged_checkpoint_computes_our_logits(kind, sites, folders, tmp_path):
    ours = make(folders[kind], sites)
    # What is in memory counts, as after the adapters were folded into the base.
    ours.base.get_submodule("blocks.0.attn.k").original_component.weight.data += 0.01
    weights, before = get_base_weights(ours), get_ours(ours)
    save_merged(ours, tmp_path / "out")
    assert_bit_identical(ours, weights)
    assert torch.equal(get_ours(ours), before)
    theirs, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(get_theirs(theirs), before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "tied llama", "embedded"])
def test_all_but_the_adapted_weights_is_the_bases(kind, folders, tmp_path):
    source = EMBEDDED_MODEL if kind == "embedded" else folders[kind]
    save_merged(make(folders[kind], ("attn.q",)), tmp_path / "out")
    old, new = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert {k: (v.shape, v.dtype) for k, v in old.items()} == {
        k: (v.shape, v.dtype) for k, v in new.items()
    }
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed
    assert all(name.endswith(("attn.c_attn.weight", "q_proj.weight")) for name in changed)
    for reader in (AutoConfig, GenerationConfig):
        read = [reader.from_pretrained(f).to_dict() for f in (source, tmp_path / "out")]
        for found in read:
            for key in ("_name_or_path", "transformers_version"):
                found.pop(key, None)
        assert read[0] == read[1]


@pytest.mark.parametrize("kind", ["gpt2", "qwen"])
def test_a_bfloat16_base_is_rounded_once(kind, checkpoints, tmp_path):
    ours = make(checkpoints[kind], SITES[kind], dtype=torch.bfloat16)
    weights = get_base_weights(ours)
    save_peft_adapter(ours, tmp_path / "adapter")
    save_merged(ours, tmp_path / "out")
    assert_bit_identical(ours, weights)
    rounded = AutoModelForCausalLM.from_pretrained(checkpoints[kind], dtype=torch.bfloat16)
    exact = peft.PeftModel.from_pretrained(rounded.float(), tmp_path / "adapter")
    exact = exact.merge_and_unload()  # PEFT's sum, in float32
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert found.dtype == torch.bfloat16
    expected = exact.state_dict()
    for name, weight in found.state_dict().items():
        once = expected[name].to(torch.bfloat16)
        # float32 sums in another order fall on the other side of a rounding now and then.
        assert (weight != once).float().mean() < 1e-3, name
        torch.testing.assert_close(weight, once, atol=1e-6, rtol=2**-7)
    with ours.merged():
        inside = get_ours(ours)
    torch.testing.assert_close(get_theirs(found).float(), inside, atol=0.1, rtol=0.05)


# --- Folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [save_peft_adapter, save_merged])
def test_only_an_earlier_export_is_replaced(save, checkpoints, tmp_path):
    ours, out = make(checkpoints["llama"], ("attn.q",)), tmp_path / "deep" / "out"
    save(ours, out)
    first = {path.name: path.read_bytes() for path in out.iterdir()}
    randomize(ours)
    save(ours, out)
    second = {path.name: path.read_bytes() for path in out.iterdir()}
    assert first.keys() == second.keys()
    assert first != second
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"new, or an earlier export, but .*holds \['notes.txt'\]"):
        save(ours, out)
    assert {path.name for path in out.iterdir()} == {*second, "notes.txt"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        save(ours, tmp_path / "file")
    with pytest.raises(ValueError, match=r"should be (a new one|new)"):
        save(ours, checkpoints["llama"])
    (tmp_path / "empty").mkdir()
    save(ours, tmp_path / "empty")
    assert {path.name for path in (tmp_path / "empty").iterdir()} == second.keys()
    if save is save_merged:
        with pytest.raises(ValueError, match="folder should be a new one, but .* holds the base"):
            save(make(tmp_path / "empty", ("attn.q",)), tmp_path / "empty")


def test_an_export_that_breaks_off_leaves_nothing_or_the_earlier_one(
    checkpoints, tmp_path, monkeypatch
):
    ours, out = make(checkpoints["llama"], ("attn.q",)), tmp_path / "out"

    def break_off():
        with monkeypatch.context() as patch:
            patch.setattr(export, "AutoTokenizer", None)  # the last that is written
            with pytest.raises(AttributeError):
                save_merged(ours, out)

    break_off()
    assert list(tmp_path.iterdir()) == []
    save_merged(ours, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    randomize(ours)
    break_off()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("act", [save_peft_adapter, load_peft_adapter, save_merged])
def test_another_architecture_and_processed_weights_are_errors(act, folders, tmp_path):
    message = f"should be among {['gpt2', *GATED]}, but is 'phi'"
    with pytest.raises(ValueError, match=re.escape(message)):
        act(make(folders["phi"], ("attn.q",)), tmp_path / "out")
    model = make(folders["gpt2"], ("attn.q",))
    model.base.enable_compatibility_mode(disable_warnings=True)
    with pytest.raises(ValueError, match="base should have its own weights, .*compatibility_mode"):
        act(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- The command ----------------------------------------------------------------------------------


def write_run(trainer, folder):
    """What a run leaves in its folder, without the training."""
    torch.manual_seed(0)
    randomize(trainer.model)
    save_checkpoint(folder / "checkpoint.pt", trainer.get_state())
    return folder


SMALL = {"batch_size": 8, "num_minibatches": 1, "gen_len": 4, "lora_rank": 3, "device": "cpu"}


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_a_run_becomes_files_that_the_printed_lines_read(form, checkpoints, tmp_path, capsys):
    base = AutoModelForCausalLM.from_pretrained(checkpoints["llama"]).to(torch.bfloat16)
    base.generation_config.update(do_sample=True, top_p=0.5, repetition_penalty=1.5)
    base.save_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["llama"])
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "base")
    prompt = [{"role": "user", "content": "your prompt"}]
    args = GrpoArgs(
        base_model=tmp_path / "base", prompts=[prompt], lora_sites=SITES["llama"], **SMALL
    )
    trainer = GrpoTrainer(args)
    run = write_run(trainer, tmp_path / "run")
    main([str(run), str(tmp_path / "out"), "--format", form])
    said = capsys.readouterr().out
    assert f"out holds the 7 adapters of {run}, as {form}" in said
    assert "Left out" not in said
    lines = [line[4:] for line in said.splitlines() if line.startswith("    ")]
    code, here = "\n".join(lines), {}
    exec(code, here)
    assert "top_p=1.0, repetition_penalty=1.0" in code
    assert here["model"].dtype == torch.float32
    ours = get_ours(trainer.model)
    torch.testing.assert_close(get_theirs(here["model"]), ours, atol=1e-5, rtol=0)
    samples = sample_completions(trainer.model, [prompt], 1, temperature=0.0)
    assert here["inputs"]["input_ids"].tolist() == samples.input_ids[:, :-1].tolist()


def test_a_ppo_run_leaves_its_value_head_behind_and_says_so(tmp_path, capsys):
    trainer = RLHFTrainer(RLHFArgs(dtype=torch.bfloat16, **SMALL))
    run = write_run(trainer, tmp_path / "run")
    main([str(run), str(tmp_path / "out"), "--format", "merged"])
    assert "Left out, as the format has no place for a head: value_head." in capsys.readouterr().out
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "path should be a checkpoint, but .* is not there"),
        ("damaged", "path should be a checkpoint, but .* is not"),
        (lambda s: s["args"].pop("lora_alpha"), "should be a run with .*lora_alpha"),
        (lambda s: s["args"].update(base_model="./none"), "should be a folder with a model"),
        (lambda s: s["args"].update(lora_rank=4), "should be .*4.* and the run's lora_rank"),
        (
            lambda s: s["args"].update(base_model="embedded"),
            r"at blocks.0.attn.q should be \[128, 128, 3, 3\], of 'embedded'.* \[32, 40, 3, 3\]",
        ),
        (lambda s: s["trainable"].clear(), "no adapters"),
    ],
)
def test_a_run_that_cannot_be_exported_is_a_clear_error(
    change, message, checkpoints, tmp_path, capsys
):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "checkpoint.pt"
    if change == "damaged":
        path.write_bytes(b"\xff" * 50)
    elif change != "missing":
        state = GrpoTrainer(GrpoArgs(base_model=checkpoints["llama"], **SMALL)).get_state()
        change(state)
        save_checkpoint(path, state)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "run"), str(tmp_path / "out"), "--format", "merged"])
    assert ended.value.code == 1
    assert re.search(f"error: .*{message}", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
