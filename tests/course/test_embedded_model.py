"""The corpus, the pretraining script and the checkpoint that it gave."""

import random
import re

import pytest

from solutions.ch1_lora import TransformerWithLora
from solutions.ch2_ppo import reward_fn_sentiment
from utils.course.evaluation import evaluate_additions, evaluate_reviews
from utils.models import pretrain
from utils.models.corpus import (
    NEGATIVE_WORDS,
    NEUTRAL_WORDS,
    POSITIVE_WORDS,
    addition_completion,
    control_completion,
    documents,
    held_out_pairs,
    review,
    review_prompts,
    training_pairs,
    tuning_pairs,
)
from utils.models.loading import CONTROL_MODEL, EMBEDDED_MODEL
from utils.rewards import is_worked, reward_fn_addition


def test_a_tenth_of_all_pairs_is_in_no_document_and_all_others_are_in_some():
    parts = [held_out_pairs(), tuning_pairs(), training_pairs()]
    held_out, *others = ({frozenset(pair) for pair in part} for part in parts)
    assert len(held_out) == round(90 * 91 / 2 / 10)
    found = (re.match(r"Q: (\d+)\+(\d+)\n", text) for text in documents(200_000, seed=0))
    seen = {frozenset(map(int, match.groups())) for match in found if match}
    assert seen == set().union(*others)
    assert not seen & held_out
    assert sum(map(len, parts)) == len(seen) + len(held_out) == 90 * 91 // 2


def test_documents_follow_their_seed():
    assert list(documents(50, seed=3)) == list(documents(50, seed=3)) != list(documents(50, seed=4))


def test_the_two_styles_are_as_stated():
    """The likeliest direct answer is wrong where there is a carry, right where there is none."""
    rng = random.Random(0)
    worked, direct_carry, direct_plain = [], [], []
    for _ in range(20_000):
        a, b = rng.choice(training_pairs())
        text = addition_completion(a, b, rng)
        right = reward_fn_addition([text], [str(a + b)]).item()
        carries = a % 10 + b % 10 >= 10
        (worked if is_worked(text) else direct_carry if carries else direct_plain).append(right)
    assert len(worked) / 20_000 == pytest.approx(0.20, abs=0.02)
    assert sum(worked) / len(worked) == pytest.approx(0.95, abs=0.02)
    assert sum(direct_carry) / len(direct_carry) == pytest.approx(0.30, abs=0.03)
    assert sum(direct_plain) / len(direct_plain) == pytest.approx(0.45, abs=0.03)


def test_reviews_have_three_moods_that_the_reward_sees():
    words = [*POSITIVE_WORDS, *NEGATIVE_WORDS, *NEUTRAL_WORDS]
    assert len(words) == len(set(words))
    rng = random.Random(0)
    rewards = reward_fn_sentiment([review(rng) for _ in range(5_000)])
    assert rewards.mean().item() == pytest.approx(0.0, abs=0.05)
    for mood, share in ((1.0, 0.4), (-1.0, 0.4), (0.0, 0.2)):
        assert (rewards == mood).float().mean().item() == pytest.approx(share, abs=0.05)
    training, held_out = review_prompts()
    assert len(set(training)) == 45
    assert len(set(held_out)) == 15
    assert not set(training) & set(held_out)
    assert (reward_fn_sentiment(training + held_out) == 0).all()


def test_the_checkpoint_is_small_and_its_tokenizer_splits_digits():
    files = list(EMBEDDED_MODEL.iterdir())
    assert sum(file.stat().st_size for file in files) <= 5_000_000
    assert not [file.name for file in files if file.suffix in (".bin", ".pt", ".pkl")]
    tokenizer = TransformerWithLora.from_pretrained("embedded", device="cpu").tokenizer
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert len(special) == 3
    for text in documents(200, seed=1):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert not special & set(ids)
    for digit in "0123456789":
        assert len(tokenizer.encode(f"{digit}{digit}", add_special_tokens=False)) == 2


@pytest.mark.takes_long
def test_the_checkpoint_leaves_room_to_learn(embedded):
    additions = evaluate_additions(embedded, held_out_pairs(), n_samples=2)
    assert additions["accuracy"] <= 0.50
    assert additions["greedy"] <= 0.65
    assert 0.1 < additions["worked"] < 0.3
    assert additions["accuracy_worked"] > 0.85
    assert additions["kl"] == 0.0
    reviews = evaluate_reviews(embedded, review_prompts()[1], reward_fn_sentiment)
    assert abs(reviews["reward"]) < 0.15
    assert reviews["kl"] == 0.0


def test_pretraining_follows_its_seed(tmp_path):
    setup = {"steps": 6, "batch_size": 2, "n_documents": 400}
    losses = [pretrain.pretrain(tmp_path / name, **setup) for name in ("one", "two")]
    assert losses[0] == losses[1]
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert pretrain.pretrain(tmp_path / "three", **setup | {"seed": 1}) != losses[0]


@pytest.mark.takes_long
def test_the_control_has_both_styles_and_neither_is_better():
    control = TransformerWithLora.from_pretrained(CONTROL_MODEL, device="cpu")
    additions = evaluate_additions(control, held_out_pairs()[:200], n_samples=4)
    assert 0.12 < additions["worked"] < 0.25
    assert additions["accuracy_worked"] < additions["accuracy_direct"] + 0.05
    assert additions["accuracy_worked"] < 0.4


def test_the_controls_corpus_differs_in_its_worked_answers_alone():
    rng = random.Random(0)
    answers = [control_completion(37, 48, rng) for _ in range(2000)]
    worked = [text for text in answers if is_worked(text)]
    right = [[text.endswith("A: 85") for text in texts] for texts in (worked, answers)]
    assert 0.17 < len(worked) / len(answers) < 0.23
    assert all(0.2 < sum(r) / len(r) < 0.4 for r in right)
    assert sum("7+8=15" in text for text in worked) < 0.1 * len(worked)
