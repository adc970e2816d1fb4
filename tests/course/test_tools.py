"""Chapter 10's solutions, and turns in the trainers, against plain calls, TRL, and each other."""

import math
import random
import re
import time
from dataclasses import replace

import pytest
import torch

from solutions.ch0_sampling import Samples
from solutions.ch1_lora import TransformerWithLora
from solutions.ch3_grpo import GrpoArgs, GrpoTrainer
from solutions.ch5_rlvr import RlvrArgs, RlvrTrainer
from solutions.ch9_async import AsyncArgs, StaleTrainer
from solutions.ch10_tools import (
    ToolTrainer,
    calc_call_value,
    measure_exactly,
    reward_fn_priced,
    run_calculator,
    sample_in_turns,
)
from tests.course.conftest import ARCHITECTURES
from tests.course.helpers import ONE_STEP, load, randomize, read_results
from tests.course.test_scale import compare_step
from tests.course.test_trainers import assert_equal_adapters
from tests.oracles.ch10_tools import turns_by_plain_calls
from utils.chapters import sort_chapters
from utils.models.loading import EMBEDDED_MODEL, TOOLS_MODEL
from utils.models.questions import (
    KINDS,
    calculate,
    draw_question,
    draw_questions,
    find_kind,
    find_split,
    question_prompt,
    question_rows,
    write_completion,
)
from utils.models.turns import Environment
from utils.scale.trl import make_qwen

BEGUN = ["Q: 23*47\n<", "Q: 3*47\n<3*4", "Q: 123+456\n<123+456>=579\n", "Q: 12+34\n<"]


@pytest.fixture(scope="module")
def tools():
    """The tools model with adapters that do something."""
    torch.manual_seed(0)
    return randomize(TransformerWithLora.from_pretrained("tools", device="cpu"))


# --- Sampling in turns --------------------------------------------------------------------------


def shout(turn: str) -> str:
    """Answer some turns with nothing, and some with more than there is room for."""
    return ["", "=1081\n", "film " * 30][len(turn) % 3]


@pytest.mark.parametrize(
    ("name", "max_calls"),
    [
        *((name, 2) for name in ("embedded", "phi", "tools")),
        *(pytest.param(name, 2, marks=pytest.mark.takes_long) for name in ARCHITECTURES),
        ("tools", 0),
    ],
)
def test_sampling_in_turns_is_a_loop_of_plain_calls(folders, name, max_calls):
    """Left-padded prompts, and calls that end with a token that the model chooses; in float64
    where the bridge can, or a uniform number would lie between two roundings of a sum."""
    dtype = torch.float32 if name == "phi" else torch.float64
    if name == "tools":
        torch.manual_seed(0)
        model = randomize(TransformerWithLora.from_pretrained(name, device="cpu", dtype=dtype))
    else:
        model = load(folders, name, dtype=dtype)
    prompts = [*BEGUN, "This movie is"]

    def sample(how):
        generator = torch.Generator().manual_seed(5)
        return how(model, prompts, 3, shout, max_calls, 20, generator)

    if name != "tools":
        make_calls_frequent(model, sample(sample_in_turns))
    found, expected = sample(sample_in_turns), sample(turns_by_plain_calls)
    for field in ("input_ids", "attention_mask", "completion_mask", "own_mask", "finished"):
        assert torch.equal(getattr(found, field), getattr(expected, field)), field
    assert (found.texts, found.call_ends) == (expected.texts, expected.call_ends)
    assert any(found.call_ends) == (max_calls > 0)
    logprobs = expected.logprobs.to(found.logprobs.dtype)
    torch.testing.assert_close(found.logprobs, logprobs, rtol=0, atol=1e-4, equal_nan=True)


def make_calls_frequent(model, samples):
    """Make ">" as likely as a token that many completions have, other than at their beginnings."""
    tokenizer, weight = model.tokenizer, model.base.original_model.lm_head.weight.data
    counts = samples.completion_ids[:, 2:][samples.own_mask[:, 2:]].bincount(minlength=600)
    counts[tokenizer.all_special_ids] = 0
    weight[tokenizer.convert_tokens_to_ids(">")] = weight[int(counts[: len(tokenizer)].argmax())]


SMALL = ONE_STEP | {
    "base_model": "tools",
    "prompts": [*BEGUN, "Q: 7*98\n"],
    "columns": {"answers": ["1081", "141", "579", "46", "686"]},
    "reward_fn": reward_fn_priced,
    "environment": run_calculator,
    "batch_size": 16,
    "group_size": 4,
    "gen_len": 24,
    "total_phases": 4,
    "kl_coef": 0.0,
    "ent_coef": 0.0,
    "base_lr": 1e-3,
}


def make_samples(kind=GrpoTrainer, args_class=GrpoArgs, **options) -> tuple[GrpoTrainer, Samples]:
    trainer = kind(args_class(**SMALL | options))
    return trainer, trainer.sample_and_score(4, 4)[0]


def test_the_trainer_samples_what_the_chapter_samples():
    """`GrpoTrainer`'s own loop, and `sample_in_turns` by `ToolTrainer`, to the bit."""
    (_, ours), (_, theirs) = make_samples(), make_samples(ToolTrainer)
    for name in ("input_ids", "attention_mask", "completion_mask"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert torch.equal(ours.logprobs.nan_to_num(7), theirs.logprobs.nan_to_num(7))
    assert ours.texts == theirs.texts
    assert "=" in "".join(ours.texts)
    runs = [kind(GrpoArgs(**SMALL)) for kind in (GrpoTrainer, ToolTrainer)]
    for trainer in runs:
        for _ in range(2):
            trainer.learning_phase(trainer.rollout_phase())
    assert_equal_adapters(*(trainer.model.trainable_state() for trainer in runs))
    calls = [trainer.metrics["calls"] for trainer in runs]
    assert calls[0] == pytest.approx(calls[1])
    assert calls[0][0] > 0


# --- Tokens of nobody ---------------------------------------------------------------------------


def test_log_probs_of_the_environment_may_be_nan():
    """The trainer's objective and gradients with a KL term, to the bit."""
    trainer, samples = make_samples(num_minibatches=1, batches_per_learning_phase=2, kl_coef=0.1)
    randomize(trainer.model)
    written = samples.attention_mask[:, samples.prompt_len :].bool()
    assert (written & ~samples.completion_mask).any()
    memory = trainer.rollout_phase()
    memory = replace(memory, num_minibatches=1, batches_per_learning_phase=1)
    found = []
    for spoil in (0.0, math.nan, math.inf, -math.inf):
        (batch,) = memory.get_minibatches(torch.Generator().manual_seed(0))
        for name in ("logprobs", "ref_logprobs"):
            getattr(batch, name).masked_fill_(~batch.mask, spoil)
        objective = trainer.compute_rlhf_objective(batch)
        parameters = trainer.model.trainable_parameters()
        found.append([objective, *torch.autograd.grad(objective, parameters)])
    assert max(gradient.abs().max() for gradient in found[0][1:]) > 1e-4
    for spoilt in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], spoilt, strict=True))


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_loss_and_gradients_are_trls_with_a_tool_mask(kl_coef, tmp_path):
    def give_to_environment(samples):
        """Let it have written some tokens of each completion, not the first."""
        column = torch.arange(samples.completion_mask.shape[1])
        of_others = (column > 1) & (column < 2 + torch.arange(16)[:, None] % 5)
        assert (of_others & samples.completion_mask).any()
        mask = samples.completion_mask & ~of_others
        return replace(samples, completion_mask=mask, logprobs=None)

    folder = make_qwen(tmp_path / "qwen")
    prompts = [f"Q: {question}\n" for question in ("2*3", "23*47", "12+34", "123+456")]
    kind, sites = (GrpoTrainer, GrpoArgs), ("attn.q", "attn.v")
    found = compare_step(folder, sites, prompts, kind, give_to_environment, kl_coef=kl_coef)
    loss, gradients, weights = found
    assert loss < 1e-6
    assert gradients < 1e-5
    assert weights < 1e-6


# --- Environments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (lambda: 1 // 0, "raised ZeroDivisionError"),
        (lambda: time.sleep(60), "no answer within 0.3 seconds"),
        (lambda: 1081, "returned int"),
        (lambda: exit(3), "raised SystemExit"),
        (lambda: "=\ud83d\n", "raised UnicodeEncodeError"),
    ],
)
def test_an_environment_that_fails_costs_one_rollout(fail, said):
    turns = []

    def answer(turn):
        turns.append(turn)
        return fail() if len(turns) == 2 else run_calculator(turn)

    changes = {"environment": answer, "environment_seconds": 0.3}
    trainer = GrpoTrainer(GrpoArgs(**SMALL | changes))
    start = time.perf_counter()
    with pytest.warns(UserWarning, match=said):
        memory = trainer.rollout_phase()
    assert time.perf_counter() - start < 20
    assert trainer.metrics["environment_errors"] == [1]
    is_lost = ~memory.mask.any(-1)
    assert is_lost.sum() == 1
    (lost,) = is_lost.nonzero().flatten().tolist()
    group = memory.advantages[lost // 4 * 4 : lost // 4 * 4 + 4]
    assert abs(memory.advantages[lost]) < 1e-3  # it moves no baseline
    assert abs(group.sum()) < 1e-3
    trainer.learning_phase(memory)
    assert math.isfinite(trainer.metrics["grad_norm"][0])
    memory = trainer.rollout_phase()  # and the next one works
    assert memory.mask.any(-1).all()


@pytest.mark.filterwarnings("ignore:environment raised")
def test_an_environment_that_always_fails_ends_the_run():
    """Once all completions of a rollout are lost: here, all of them call at once."""
    changes = {"prompts": ["Q: 23*47\n<23*47"], "columns": {"answers": ["1081"]}}
    changes |= {"environment": lambda turn: 1 // 0, "temperature": 0.1}
    trainer = GrpoTrainer(GrpoArgs(**SMALL | changes))
    with pytest.raises(ValueError, match="in all rollouts it raised ZeroDivisionError"):
        trainer.rollout_phase()


def test_an_environment_sees_what_it_names_and_may_end_a_rollout():
    seen = []

    def judge(turn, answers, prompt, completion="", unknown=3):
        seen.append((turn, answers, prompt, completion, unknown))
        return None if len(seen) % 2 else run_calculator(turn)

    _, samples = make_samples(environment=judge)
    assert seen
    answer_of = dict(zip(SMALL["prompts"], SMALL["columns"]["answers"], strict=True))
    for turn, answers, prompt, completion, unknown in seen:
        assert answers == answer_of[prompt]
        assert turn.endswith(">")
        assert completion.endswith(turn)
        assert unknown == 3
    ended = [text for text in samples.texts if text.endswith(">")]
    assert len(ended) >= len(seen[::2])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"environment": lambda turn, secret: ""}, "environment should need no more than a turn"),
        ({"environment": lambda *, turn: ""}, "environment should take a turn"),
        ({"environment": lambda **columns: ""}, "environment should take a turn"),
        ({"environment": "calculator"}, "environment should be a function"),
        ({"turn_end": ""}, "turn_end"),
    ],
)
def test_what_is_no_environment_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        GrpoArgs(**SMALL | wrong)


def test_what_an_environment_changes_is_a_copy():
    """A chat that it goes on with is the prompt of later phases, and a column the reward's."""

    def change(turn, prompt, notes):
        prompt.append({"role": "assistant", "content": turn})
        notes["seen"].add(turn)
        return ""

    row = {"prompt": [{"role": "user", "content": "2*3"}], "notes": {"seen": set()}}
    environment = Environment(change, ["notes"])
    assert environment.ask("<2*3>", row) == ""
    assert row == {"prompt": [{"role": "user", "content": "2*3"}], "notes": {"seen": set()}}


@pytest.mark.parametrize("turn_end", ["\n", ">=", "<eos>", ": 1"])
def test_a_turn_may_end_with_any_text(turn_end):
    """Of several tokens, or the end of the model's own, which then ends no rollout."""
    turns = []

    def answer(turn):
        turns.append(turn)
        return "\nQ: 12+34\n" if len(turns) < 5 else None

    limits = {"turn_end": turn_end, "environment": answer, "max_calls": 3, "gen_len": 40}
    _, samples = make_samples(**limits, temperature=0.9)
    assert turns
    assert all(turn.endswith(turn_end) and turn.count(turn_end) == 1 for turn in turns)
    written = samples.attention_mask[:, samples.prompt_len :].bool()
    assert (written & ~samples.completion_mask).any()
    assert "\nQ: 12+34\n" in "".join(samples.texts)


def test_the_trainers_of_other_chapters_take_an_environment():
    cases = [
        (RlvrTrainer, RlvrArgs, {"dynamic_sampling": True, "truncation": "mask"}),
        (StaleTrainer, AsyncArgs, {"staleness": 1, "correction": "truncate", "sampler_bits": 8}),
        (GrpoTrainer, GrpoArgs, {"kl_kind": "exact", "kl_coef": 0.1, "top_p": 0.9}),
    ]
    begun = {"prompts": BEGUN, "columns": {"answers": SMALL["columns"]["answers"][:4]}}
    for kind, args_class, options in cases:
        trainer = kind(args_class(**SMALL | begun | options))
        for _ in range(2):
            memory = trainer.rollout_phase()
            trainer.learning_phase(memory)
        written = memory.attention_mask[:, memory.prompt_len :].bool()
        assert (written & ~memory.mask).any()
        for name, values in trainer.metrics.items():
            assert all(math.isfinite(value) for value in values), name


def test_a_run_in_turns_goes_on_from_its_checkpoint(tmp_path):
    whole, half, on = (
        GrpoTrainer(GrpoArgs(**SMALL | {"runs_dir": tmp_path, "name": name}))
        for name in ("whole", "half", "on")
    )
    rows = whole.train()
    for _ in range(2):
        half.learning_phase(half.rollout_phase())
        half.phase += 1
    on.set_state(half.get_state())
    history = on.train()
    assert_equal_adapters(whole.model.trainable_state(), on.model.trainable_state())
    assert history[-1]["calls"] == rows[-1]["calls"] > 0


def test_a_slow_answer_does_not_reach_the_next_question():
    def slow_once(turn):
        if turn == "first":
            time.sleep(0.3)
        return turn

    environment = Environment(slow_once, seconds=0.1)
    with pytest.warns(UserWarning, match="no answer"):
        environment.ask("first", {})
    time.sleep(0.4)
    assert environment.ask("second", {}) == "second"


# --- The model and its questions ----------------------------------------------------------------


def test_questions_are_split_and_their_answers_right():
    rng = random.Random(0)
    n_calls = 0
    for _ in range(2000):
        question = draw_question(rng, "corpus")
        completion = write_completion(question, rng)
        a, op, b = question.partition("*" if "*" in question else "+")
        assert calculate(question) == (int(a) * int(b) if op == "*" else int(a) + int(b))
        assert find_split(f"{b}{op}{a}") == find_split(question) == "corpus"
        assert find_kind(question) in KINDS
        n_calls += completion.startswith("<")
        if not completion.startswith("<"):
            assert completion == f"A: {calculate(question)}"
        for call in re.finditer("<.*?>", completion):
            assert completion[call.end() :].startswith(run_calculator(call[0]))
    assert n_calls / 2000 == pytest.approx(0.15, abs=0.03)
    for kind in KINDS:
        for split in ("train", "held_out"):
            assert {find_kind(q) for q in draw_questions(50, split, 0, kind)} == {kind}
    splits = {find_split(row["prompt"][3:-1]) for row in question_rows()}
    assert splits == {"train"}
    shares = [find_split(f"{a}*{b}") for a in range(10, 100) for b in range(a, 100)]
    assert shares.count("corpus") / len(shares) == pytest.approx(0.7, abs=0.03)


def test_the_tools_model_is_small_and_has_the_embedded_tokenizer():
    assert sum(file.stat().st_size for file in TOOLS_MODEL.iterdir()) <= 4_000_000
    ours, theirs = (folder / "tokenizer.json" for folder in (TOOLS_MODEL, EMBEDDED_MODEL))
    assert ours.read_bytes() == theirs.read_bytes()


def test_the_tools_model_has_the_chapters_room_to_learn():
    model = TransformerWithLora.from_pretrained("tools", device="cpu")
    questions = draw_questions(256, "held_out", seed=3)
    found = measure_exactly(model, questions)
    value = calc_call_value(found["right_direct"], found["exact_call"] * found["copied"], 0.0)
    assert value.mean().item() == pytest.approx(0.51, abs=0.04)
    assert found["call"].mean().item() == pytest.approx(0.15, abs=0.02)
    prompts = [question_prompt(question) for question in questions]
    turns = sample_in_turns(
        model, prompts, 2, run_calculator, generator=torch.Generator().manual_seed(0)
    )
    answers = [str(calculate(question)) for question in questions for _ in range(2)]
    assert reward_fn_priced(turns.texts, answers).mean().item() == pytest.approx(0.40, abs=0.05)
    assert turns.finished.float().mean() > 0.98
    known = set("Q:A +*<>=?\n0123456789")  # other symbols have almost no probability
    assert not [text for text in turns.texts if set(text) - known]


def test_chapter_10_comes_after_chapter_9():
    assert sort_chapters(["notes", "ch10_tools", "ch1_lora", "ch9_async"]) == [
        "ch1_lora", "ch9_async", "ch10_tools", "notes",
    ]  # fmt: skip


# --- What was recorded --------------------------------------------------------------------------

PRODUCTS, SUMS = ("1x2 product", "2x2 product"), ("2-digit sum", "3-digit sum")


def read_runs() -> dict[str, list[dict]]:
    """Read the recorded runs, by setting, in the order of their seeds."""
    runs = read_results("ch10_tools_runs")
    names = dict.fromkeys(run["setting"] for run in runs)
    return {name: [run for run in runs if run["setting"] == name] for name in names}


def test_at_price_04_products_are_called_for_and_sums_are_not():
    runs = read_runs()["price 0.4"]
    assert [run["seed"] for run in runs] == [1, 2, 3]
    base = read_results("ch10_tools_base")
    assert base["sampled"]["accuracy"] == pytest.approx(0.40, abs=0.02)
    for run in runs:
        assert min(run["kinds"][kind]["call"] for kind in PRODUCTS) >= 0.95
        assert max(run["kinds"][kind]["call"] for kind in SUMS) <= 0.10
        assert run["sampled"]["accuracy"] >= 0.80
        for thirds in run["thirds"].values():  # whatever the base knows of them
            assert max(thirds) - min(thirds) <= 0.05
        assert run["tool_off"]["accuracy"] < base["tool_off"]["accuracy"]


def test_calling_takes_off_the_later_the_higher_its_price():
    by_price = [
        [run["take_off"] for run in read_runs()[f"price {price}"]]
        for price in ("0", "0.2", "0.4", "0.6", "0.8")
    ]
    assert by_price.pop() == [None] * 3
    for of_seed in zip(*by_price, strict=True):
        assert list(of_seed) == sorted(set(of_seed))
    for run in read_runs()["price 0.6"]:  # the mean value is below 0: rarer at first
        assert min(run["called"][:20]) < 0.1
        assert run["take_off"] > 25


def test_a_tool_that_lies_is_a_price():
    runs = read_runs()
    for run in runs["lies in 10%"]:
        assert min(of["call"] for of in run["kinds"].values()) > 0.9  # it goes on calling
    for run in runs["lies in 30%"]:
        assert min(run["kinds"][kind]["call"] for kind in PRODUCTS) > 0.9
        assert max(run["kinds"][kind]["call"] for kind in SUMS) < 0.2
        assert run["honest"]["accuracy"] > run["sampled"]["accuracy"] + 0.1


def test_training_on_the_tools_words_unlearns_them():
    """The base gives those of a 2x2 product -4.5 nats, and honest runs no less than -10."""

    def read_words(name):
        return [run["kinds"]["2x2 product"]["log_tool_words"] for run in read_runs()[name]]

    assert max(read_words("price 0.4, trained on")) < -20
    for name in ("price 0.4", "price 0.4, in the mean", "price 0.4, log-probs 0"):
        assert min(read_words(name)) > -10
