"""Sampling and training on a GPU, where there is one."""

import pytest
import torch

from solutions.ch0_sampling import encode_prompts, sample_completions
from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import reward_fn_char_count
from solutions.ch7_scale import DataParallelGrpoTrainer, DataParallelRLHFTrainer
from tests.course.helpers import NATIVE, load, randomize
from tests.course.test_decoding import LONG, OPTIONS, assert_same_draws
from tests.course.test_trainers import make_trainer
from utils.models import graph
from utils.models.decoding import GraphDecoder, NativeDecoder, get_decoder
from utils.models.forward import get_scorer
from utils.models.loading import choose_dtype, load_base_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = [torch.float32, torch.bfloat16]


# --- Sampling -------------------------------------------------------------------------------------


def generate(decoder, model, prompts=LONG, tokens=20, **options):
    ids, mask = encode_prompts(model, prompts, tokens, prepend_bos=True)
    generator = torch.Generator("cuda").manual_seed(0)
    return decoder.generate(ids, mask, tokens, generator=generator, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_the_graph_draws_what_single_kernels_draw(name, options, folders):
    model = load(folders, name, device="cuda")
    decoder = get_decoder(model)
    assert type(decoder) is GraphDecoder
    native = get_scorer(model).native
    expected = generate(NativeDecoder(model, native), model, **options)
    assert_same_draws(generate(decoder, model, **options), expected, 1e-4)
    assert_same_draws(generate(get_decoder(model), model, **options), expected, 1e-4)  # kept


def test_a_kept_graph_has_the_weights_of_each_moment(folders):
    model = load(folders, "llama", device="cuda")
    for _ in range(2):
        found = generate(get_decoder(model), model)
        step = graph._kept[model]
        assert_same_draws(
            found, generate(NativeDecoder(model, get_scorer(model).native), model), 1e-4
        )
        for parameter in model.trainable_parameters():
            parameter.data *= 1.5
    assert graph._kept[model] is step
    for inside in (model.reference, model.merged):
        with inside():
            native = NativeDecoder(model, get_scorer(model).native)
            assert_same_draws(generate(get_decoder(model), model), generate(native, model), 1e-4)


@pytest.mark.parametrize("name", ["embedded", "llama"])
def test_tokens_in_bfloat16_have_the_log_probs_of_scoring(name, folders):
    model = load(folders, name, TransformerWithLora, torch.bfloat16, device="cuda")
    samples = sample_completions(model, LONG, 20)
    with torch.no_grad():
        scores = get_scorer(model).measure(
            samples.input_ids, samples.attention_mask, samples.prompt_len
        )
    off = (samples.logprobs - scores.logprobs)[samples.completion_mask]
    assert off.square().mean().sqrt() < 0.05


# --- Training -------------------------------------------------------------------------------------


class Interrupting:
    """A reward function during whose third call Ctrl-C is pressed."""

    calls = 0

    def __call__(self, samples):
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return reward_fn_char_count(samples)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_run_on_the_gpu_stops_and_goes_on(kind, dtype, tmp_path):
    setup = {"device": None, "dtype": dtype}
    stopped = make_trainer(kind, tmp_path, reward_fn=Interrupting(), **setup)
    assert {p.device.type for p in stopped.model.trainable_parameters()} == {"cuda"}
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = make_trainer(kind, tmp_path, reward_fn=reward_fn_char_count, **setup)
    resumed.load_checkpoint(tmp_path / kind / "checkpoint.pt")
    assert [row["phase"] for row in resumed.train()] == [1, 2, 3, 4]


@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_run_goes_on_on_another_device(kind, devices, tmp_path):
    first, second = devices
    stopped = make_trainer(kind, tmp_path, reward_fn=Interrupting(), device=first)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = make_trainer(kind, tmp_path, reward_fn=reward_fn_char_count, device=second)
    with pytest.warns(UserWarning, match="another device's"):
        resumed.load_checkpoint(tmp_path / kind / "checkpoint.pt")
    assert [row["phase"] for row in resumed.train()] == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_the_first_ratio_on_the_gpu_is_one(kind, dtype, tmp_path):
    trainer = make_trainer(kind, tmp_path, device=None, dtype=dtype)
    randomize(trainer.model)
    memory = trainer.rollout_phase()
    fields = [x for x in memory.get_fields().values() if x is not None]
    assert {x.device.type for x in fields} == {"cuda"}
    trainer.compute_rlhf_objective(memory.get_minibatches(trainer.generator)[0])
    assert trainer.metrics["approx_kl"][0] < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_less_memory_gives_the_same_gradients(kind, dtype, tmp_path):
    args = make_trainer(kind, tmp_path, device="cuda", dtype=dtype).args
    args.num_minibatches = args.batches_per_learning_phase = 1
    gradients = []
    for of_memory in ({}, {"checkpointing": True, "microbatch_size": args.batch_size // 2}):
        parallel = {"ppo": DataParallelRLHFTrainer, "grpo": DataParallelGrpoTrainer}[kind]
        trainer = parallel(args, **of_memory)
        torch.manual_seed(0)
        randomize(trainer.model)
        trainer.learning_phase(trainer.rollout_phase())
        found = [p.grad.flatten() for p in trainer.model.trainable_parameters()]
        gradients.append(torch.cat(found))
    off = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert off < (1e-3 if dtype == torch.float32 else 0.05)


def test_the_dtype_is_that_of_the_card_but_for_the_repositorys_models(folders):
    expected = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float32
    assert choose_dtype(torch.device("cuda")) == expected
    assert next(load_base_model(folders["llama"]).parameters()).dtype == expected
    assert next(load_base_model("embedded").parameters()).dtype == torch.float32
