"""The faster decoder samples what the plain one does, with the work left out that it says."""

import pytest
import torch

from solutions.ch0_sampling import encode_prompts, get_samples
from solutions.ch1_lora import TransformerWithLora
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from tests.course.helpers import randomize
from utils.models.decoding import Gpt2Block, Gpt2Decoder, get_decoder

PROMPTS = ["Q: 12+34\n"] * 4 + ["This movie is", "Q: 7+15\n", "", "This movie is"]


def sample(model, prompts=PROMPTS, seed=0, tokens=40, **options):
    generator = torch.Generator().manual_seed(seed)
    return get_samples(model, prompts, tokens, generator=generator, **options)


def assert_same(ours, plain):
    assert ours.texts == plain.texts
    assert torch.equal(ours.input_ids, plain.input_ids)
    assert torch.equal(ours.attention_mask, plain.attention_mask)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0}]
)
def test_samples_are_those_of_the_plain_sampler(embedded, seed, options):
    model = randomize(embedded)
    with model.merged():
        decoder = get_decoder(model)
        assert isinstance(decoder, Gpt2Decoder)
        assert_same(sample(decoder, seed=seed, **options), sample(model, seed=seed, **options))


def test_logits_are_those_of_the_bridge_beyond_the_allocated_cache(embedded):
    model = randomize(embedded)
    ids, mask = encode_prompts(model, PROMPTS, 100, prepend_bos=True)
    generator = torch.Generator().manual_seed(0)
    with model.merged():
        decoder, caches = get_decoder(model), [None, None]
        step = ids
        for _ in range(100):
            found = []
            for index, called in enumerate((model, decoder)):
                logits, caches[index] = called(
                    step,
                    attention_mask=mask,
                    past_key_values=caches[index],
                    use_cache=True,
                    return_type="logits_and_cache",
                )
                found.append(logits[:, -1])
            torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=0)
            step = torch.randint(3, 512, (len(ids), 1), generator=generator)
            mask = torch.cat([mask, torch.ones_like(step)], dim=1)


def test_it_has_the_weights_of_the_context_that_it_is_made_in(embedded):
    model = randomize(embedded)
    with model.merged():
        policy = sample(get_decoder(model))
    with model.reference():
        reference = sample(get_decoder(model))
        assert_same(reference, sample(model))
    assert policy.texts != reference.texts


def test_each_distinct_prompt_is_read_once_and_rows_that_ended_leave(embedded, monkeypatch):
    rows = []
    project = Gpt2Block.project

    def count(self, x):
        rows.append(x.shape[:2])
        return project(self, x)

    monkeypatch.setattr(Gpt2Block, "project", count)
    prompts = ["Q: 12+34\n"] * 20 + ["Q: 5+6\n"] * 20
    with embedded.merged():
        samples = sample(get_decoder(embedded), prompts)
    rows = rows[:: embedded.cfg.n_layers]
    assert rows[0] == (2, samples.prompt_len)
    going_on = samples.attention_mask[:, samples.prompt_len :].sum(0)  # [completion]
    assert len(rows) == len(going_on)
    for (found, seq), needed in zip(rows[1:], going_on[:-1].tolist(), strict=True):
        assert seq == 1
        assert needed <= found < max(needed / 0.75, needed + 1)
    assert rows[-1][0] < 20  # the test would be empty if all ended together


def test_logits_in_bfloat16_are_those_of_the_bridge(checkpoints):
    model = TransformerWithLora.from_pretrained("embedded", device="cpu", dtype=torch.bfloat16)
    ids, mask = encode_prompts(randomize(model), PROMPTS, 4, prepend_bos=True)
    options = {"attention_mask": mask, "use_cache": True, "return_type": "logits_and_cache"}
    with model.merged(), torch.no_grad():
        plain, fast = (called(ids, **options)[0][:, -1] for called in (model, get_decoder(model)))
    error = (fast.float() - plain).norm() / plain.norm()
    assert error < 0.02  # a bfloat16 has 8 binary digits


def test_what_cannot_be_decoded_is_left_as_it_is(embedded, checkpoints):
    llama = TransformerWithLora.from_pretrained(checkpoints["llama"], device="cpu")
    with llama.merged():
        assert get_decoder(llama) is llama
    assert get_decoder(embedded) is embedded  # its adapters are hooks
    with embedded.reference():
        with embedded.base.hooks(fwd_hooks=[("blocks.0.hook_out", lambda x, hook: x)]):
            assert get_decoder(embedded) is embedded
        assert isinstance(get_decoder(embedded), Gpt2Decoder)
        embedded.base.original_model.config.scale_attn_by_inverse_layer_idx = True
        assert get_decoder(embedded) is embedded


def test_a_model_with_grouped_attention_or_dropout_samples_as_before(lora):
    with lora.merged():
        assert_same(sample(get_decoder(lora), tokens=12), sample(lora, tokens=12))


def test_the_trainer_samples_the_same_with_and_without(tmp_path, monkeypatch):
    def roll():
        args = GrpoArgs(batch_size=16, num_minibatches=2, gen_len=12, runs_dir=str(tmp_path))
        trainer = GrpoTrainer(args)
        randomize(trainer.model)
        return trainer.rollout_phase()

    torch.manual_seed(0)
    ours = roll()
    monkeypatch.setattr("solutions.ch2_ppo.get_decoder", lambda model: model)
    torch.manual_seed(0)
    plain = roll()
    for name in ("input_ids", "attention_mask", "mask", "logprobs", "advantages"):
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name
