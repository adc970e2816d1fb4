"""One step of TRL's trainer on completions that are given: to hold a step of one's own against."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformer_lens  # noqa: F401  before transformers
from peft import PeftConfig, load_peft_weights, set_peft_model_state_dict
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)

from utils.models.export import group_sites, load_peft_adapter, save_peft_adapter
from utils.models.loading import EMBEDDED_MODEL


def make_qwen(folder: str | Path) -> Path:
    """Write a small random Qwen2 with the embedded model's tokenizer, and return its folder."""
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        model = Qwen2ForCausalLM(config)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED_MODEL).save_pretrained(folder)
    return folder


def cut(samples: Any, lengths: Tensor) -> Any:
    """Return samples whose completions have at most these many tokens; their texts stay."""
    mask = samples.completion_mask & (
        torch.arange(samples.completion_mask.shape[1]) < lengths[:, None]
    )
    attention = samples.attention_mask.clone()
    attention[:, samples.prompt_len :] = mask
    return replace(samples, completion_mask=mask, attention_mask=attention, logprobs=None)


class _Gradients(TrainerCallback):
    """Keeps the gradients before the first step."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        if not self.by_name:
            named = model.named_parameters()
            self.by_name = {n: p.grad.clone() for n, p in named if p.grad is not None}


def take_trl_step(
    model: Any,
    folder: str | Path,
    config: dict[str, Any],
    samples: Any,
    rewards: Tensor,
    of_vllm: bool = False,
) -> tuple[float, dict[str, Tensor]]:
    """Train TRL's `GRPOTrainer` with `config` on `samples` in place of its own, once.

    `model` gives the adapters to begin with, and holds TRL's afterwards; `folder` its base.
    Returns the sum of the losses that TRL computed, and their gradient at the first step by the
    names of `model.trainable_state()`. Prompts are handed over as ids, as the samples have them.
    What a completion has outside its mask but in the attention mask is the environment's, and goes
    to TRL as its `env_mask` does, which it calls `tool_mask`.
    `model` should have rotary positions, or be a GPT-2 without adapters on q, k and v, of which
    PEFT has one. With `of_vllm` TRL takes the samples, with their log-probs, for vLLM's, and
    corrects for it as `config` says.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt_mask, written = samples.attention_mask.bool().split(
        [samples.prompt_len, samples.completion_ids.shape[1]], dim=1
    )

    def select(values: Tensor, mask: Tensor) -> list[list]:
        return [row[kept].tolist() for row, kept in zip(values, mask, strict=True)]

    prompts = select(samples.input_ids[:, : samples.prompt_len], prompt_mask)
    completions = select(samples.completion_ids, written)
    own_masks = None
    if not samples.completion_mask.equal(written):
        own_masks = select(samples.completion_mask.long(), written)
    logprobs = select(samples.logprobs, written) if of_vllm else None
    losses: list[float] = []

    class Trainer(GRPOTrainer):
        def _tokenize_prompts(self, given: list):
            return prompts, None, {}

        def _generate_single_turn(self, *_: Any, **__: Any):
            return completions, logprobs

        def _generate(self, given: list):
            found = super()._generate(given)
            return (*found[:2], own_masks, *found[3:])

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            losses.append(loss.item())
            return loss

    gradients = _Gradients()
    with tempfile.TemporaryDirectory() as out:
        save_peft_adapter(model, f"{out}/adapter")
        base = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        quiet: dict[str, Any] = {
            "output_dir": out,
            "use_cpu": True,
            "report_to": "none",
            "logging_strategy": "no",
            "save_strategy": "no",
            "disable_tqdm": True,
            "shuffle_dataset": False,
        }
        adapter = PeftConfig.from_pretrained(f"{out}/adapter")
        adapter.inference_mode = False
        group_size = config["num_generations"]
        texts = [tokenizer.decode(ids) for ids in prompts[::group_size]]
        trainer = Trainer(
            model=base,
            peft_config=adapter,
            args=GRPOConfig(**quiet | config),
            reward_funcs=lambda completions, **_: rewards.tolist(),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            callbacks=[gradients],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.use_vllm = of_vllm  # only now: no engine is started
        # Of a model that comes with its adapter, TRL takes that for the reference too.
        set_peft_model_state_dict(trainer.model, load_peft_weights(f"{out}/adapter"))
        trainer.train()
        trained: Any = trainer.model
        trained.save_pretrained(f"{out}/trained")
        load_peft_adapter(model, f"{out}/trained")
    named = {
        f"{sites[0]}.lora_{which}": gradients.by_name[
            f"base_model.model.{module}.lora_{which}.default.weight"
        ].T
        for module, sites in group_sites(model).items()
        for which in "AB"
    }
    return sum(losses), named
