"""What `check` says in a course bundle: how many checks pass, which mistakes, what is called."""

import dataclasses
import json
import re
from unittest.mock import Mock

import pytest

from utils.authoring.notebooks import Edition, build, write
from utils.authoring.recording import collect
from utils.authoring.sums import read_exercises
from utils.course import checking, in_bundle, session
from utils.course.checking import run_and_print
from utils.grading import diagnosis, recorded
from utils.grading.checks import get_checks, get_reference
from utils.grading.diagnosis import diagnose, grade_answer, grade_exercise
from utils.grading.known_answers import combine, get_mistakes
from utils.grading.packing import pack, unpack
from utils.grading.reference import find_called, get_chapter_source


@pytest.fixture
def in_a_bundle(monkeypatch, tmp_path):
    """Take the solutions away, and have the record of some exercises of a chapter in their place,
    with public checks alone."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(session, "PROGRESS", tmp_path / "progress.json")

    def take(chapter, *exercises):
        known = recorded.make(unpack(pack(collect(chapter, exercises)), max_nodes=10**7))
        public = {e: tuple(c for c in get_checks(chapter)[e] if c.public) for e in exercises}
        monkeypatch.setattr(recorded, "load", lambda name: known if name == chapter else None)
        for place in (checking, session):
            monkeypatch.setattr(place, "has_reference", lambda name: False)
        for place in (checking, diagnosis, session, checking.in_bundle):
            monkeypatch.setattr(place, "get_checks", lambda name: public)
        quick = lambda name, e: [c for c in public[e] if not c.slow]  # noqa: E731
        for place in (checking, diagnosis, checking.in_bundle):
            monkeypatch.setattr(place, "get_quick_checks", quick)
        monkeypatch.setattr(checking, "get_chapters", lambda: (chapter,))
        monkeypatch.setattr(session, "get_chapters", lambda: (chapter,))
        return known

    return take


def test_a_bundle_never_says_solved_nor_points(in_a_bundle, capsys):
    in_a_bundle("ch0_sampling", "masked_mean")
    names = dict(vars(get_reference("ch0_sampling")))
    *graded, verdicts = run_and_print(names["masked_mean"], names)
    session._save_progress("::".join(graded), verdicts)
    session.progress()
    names["masked_mean"] = lambda values, mask, dim=None: values.mean()
    run_and_print(names["masked_mean"], names)
    said = capsys.readouterr().out
    assert said.startswith("masked_mean: passes the public checks: 2 of 5 checks\n")
    assert re.search("masked_mean  +passes the public checks: 2 of 5 checks", said)
    assert "1 of 1" in said
    assert "masked_mean: passes 0 of 2 public checks (5 checks in all)" in said
    assert "solved" not in said
    assert " points" not in said


def test_a_bundle_knows_two_mistakes_at_once(in_a_bundle):
    exercise = "calc_expected_policy_gradient"
    known = in_a_bundle("ch0_sampling", exercise)
    mistakes = {m.sentence: m for m in get_mistakes("ch0_sampling") if m.exercise == exercise}
    pairs = [mistake for mistake in known.mistakes if mistake.n == 2]
    assert len(pairs) > 5
    found = {}
    for pair in pairs:
        one, other = (mistakes[sentence] for sentence in pair.sentence.split(" And: "))
        student = combine(one, other).build()
        found[pair.sentence] = grade_exercise("ch0_sampling", exercise, student)[1]
    own = [sentence for sentence, said in found.items() if said == sentence]
    assert len(own) >= len(pairs) / 2
    # Some pairs do the same on the public check, as one of the two alone or another pair.
    assert all(said is None or said == sentence or " And: " not in said
               for sentence, said in found.items())  # fmt: skip


def test_a_bundle_knows_two_mistakes_that_fail_different_checks(in_a_bundle, monkeypatch):
    exercise = "normalize_reward"
    first, second = [check for check in get_checks("ch2_ppo")[exercise] if check.public][:2]
    mistakes = [m for m in get_mistakes("ch2_ppo") if m.exercise == exercise]
    known = in_a_bundle("ch2_ppo", exercise)
    failing = next(m for m in mistakes if not grade_answer(first, m).passed)
    bad, good = grade_answer(first, failing), grade_answer(second, failing)
    observed, same = [*bad.observations], recorded.SAME
    one, other = (
        recorded.RecordedMistake(exercise, "One.", {first.path: observed, second.path: same}),
        recorded.RecordedMistake(exercise, "Other.", {second.path: observed, first.path: same}),
    )
    known = dataclasses.replace(known, mistakes=(one, other))
    monkeypatch.setattr(recorded, "load", lambda chapter: known)
    monkeypatch.setattr(diagnosis, "same_observation", lambda check, a, b, *_: a is b)
    also = dataclasses.replace(bad, check=second)
    assert diagnose([bad, also], seconds=5) == "One. And: Other."
    passed = dataclasses.replace(good, check=second, mismatch=None)
    assert diagnose([bad, passed], seconds=5) == "One."


def test_a_bundle_shows_both_of_two_mistakes_that_it_cannot_tell_apart(in_a_bundle, monkeypatch):
    known = in_a_bundle("ch0_sampling", "masked_mean")
    single = [mistake for mistake in known.mistakes if mistake.n == 1]
    alike = dataclasses.replace(single[0], sentence="Something else.")
    known = dataclasses.replace(known, mistakes=(single[0], alike))
    monkeypatch.setattr(recorded, "load", lambda chapter: known)
    (mistake,) = (m for m in get_mistakes("ch0_sampling") if m.sentence == single[0].sentence)
    said = grade_exercise("ch0_sampling", "masked_mean", mistake.build())[1]
    assert said == f"Either: {mistake.sentence} Or: Something else."


def test_a_bundle_says_that_no_single_mistake_is_known(in_a_bundle, capsys):
    in_a_bundle("ch0_sampling", "masked_mean")
    names = dict(vars(get_reference("ch0_sampling")))
    names["masked_mean"] = lambda values, mask, dim=None: values.masked_fill(~mask, 0.0).amax(
        () if dim is None else dim
    )
    run_and_print(names["masked_mean"], names)
    said = capsys.readouterr().out
    assert checking.in_bundle.UNKNOWN in said
    assert "→" not in said


def test_a_bundle_names_what_an_answer_calls(in_a_bundle, capsys):
    in_a_bundle("ch0_sampling", "masked_mean", "calc_reinforce_objective")
    names = get_chapter_source("ch0_sampling").build()
    names["masked_mean"] = lambda values, mask, dim=None: values.mean()
    run_and_print(names["calc_reinforce_objective"], names)
    _, first, *rest = capsys.readouterr().out.splitlines()
    assert first == "Your masked_mean fails its own check, so fix that first."
    said = "The fault is in calc_reinforce_objective, or something that it calls: masked_mean."
    assert said in rest


def test_what_an_exercise_calls_is_found_through_its_class_and_helpers():
    called = find_called("ch2_ppo", "RLHFTrainer.learning_phase")
    assert {"get_optimizer_and_scheduler", "RLHFTrainer.compute_rlhf_objective"} <= {*called}
    assert "left_pad" in find_called("ch0_sampling", "get_samples")  # by way of encode_prompts
    inherited = find_called("ch3_grpo", "GrpoTrainer.train")
    assert "GrpoTrainer.compute_rlhf_objective" in inherited
    assert find_called("ch4_kl", "calc_exact_kl") == ()


def test_beside_solutions_what_an_answer_calls_is_named_where_it_matters(capsys):
    """With the solutions in the others' place it fails too, in another way."""
    names = get_chapter_source("ch4_kl").build()
    stats, estimate = names["calc_estimator_stats"], names["calc_kl_estimate"]
    names["calc_kl_estimate"] = lambda *args: 2 * estimate(*args)
    names["calc_estimator_stats"] = lambda *args: [x + 1 for x in stats(*args)]
    run_and_print(names["calc_estimator_stats"], names)
    assert "or something that it calls: calc_kl_estimate" in capsys.readouterr().out


def test_catching_up_names_what_its_cell_needs_and_puts_in_what_is_given(
    monkeypatch, tmp_path, capsys
):
    def read_names():
        return capsys.readouterr().out.partition("no solutions here: ")[2].strip().split(", ")

    monkeypatch.setattr(session, "get_reference", Mock(side_effect=ModuleNotFoundError))
    monkeypatch.setattr(session, "ROOT", tmp_path)
    notebook = build("ch2_ppo", Edition(folded_solutions=False))
    (tmp_path / "chapters").mkdir()
    write(notebook, tmp_path / "chapters" / "ch2_ppo.ipynb")
    (imports,) = (c.source for c in notebook.cells if "imports" in c.metadata.get("tags", ()))
    names = {"CHAPTER": "ch2_ppo", "catch_up": session.catch_up}
    exec(imports, names)
    exec("def measure(texts):\n    return reward_fn_sentiment(texts).mean()", names)
    exec("catch_up()", names)
    assert capsys.readouterr().out == ""
    exec("catch_up()\nlambda: measure", names)
    assert read_names() == ["reward_fn_sentiment"]
    assert "TransformerWithValueHeadLora" in names
    assert "RLHFArgs" not in names  # its default is the reward that isn't written
    training = "catch_up()\nlambda: RLHFTrainer(RLHFArgs(reward_fn_char_count)).train()"
    exec(training, names)
    needed = read_names()
    for cell in (training, f"await None\n{training}"):
        exec("catch_up()", names | {"In": [cell]})  # IPython runs a cell line by line
        assert read_names() == needed
    exec(training, names | {"In": ["get_ipython().run_cell_magic('time', '', '')"]})
    assert read_names() == needed
    exec("def reward_fn_char_count(samples):\n    return samples", names)
    names["reward_fn_sentiment"] = names["reward_fn_char_count"]
    exec(training, names)
    assert needed == ["reward_fn_char_count", "reward_fn_sentiment", *read_names()]
    assert {"RLHFArgs", "RLHFTrainer"} <= names.keys()
    marked = {e.name for e in read_exercises("ch2_ppo") if e.is_core}
    assert {"ReplayMemory", "make_replay_memory", "get_optimizer_and_scheduler"} <= {*needed}
    unseen = {"TransformerWithValueHeadLora.forward_with_value_head"}  # of an object
    assert marked - {*needed} == unseen


def test_a_method_that_is_only_inherited_is_not_written(monkeypatch):
    checks = {"T.step": ["quick"], "T.train": []}  # nothing to write for the latter
    monkeypatch.setattr(in_bundle, "get_checks", lambda chapter: checks)
    monkeypatch.setattr(in_bundle, "get_quick_checks", lambda chapter, name: checks[name])
    monkeypatch.setattr(in_bundle, "find_called", lambda chapter, name: ())
    names: dict = {}
    exec("class Earlier:\n    def step(self): return 1\n    def train(self): return 1", names)
    exec("class T(Earlier): pass", names)
    code = compile("T().step(); T().train()", "", "exec")
    assert in_bundle.find_needed("small", code, names) == ["T.step"]
    exec("class T(T):\n    def step(self): raise NotImplementedError", names)
    assert in_bundle.find_needed("small", code, names) == ["T.step"]
    exec("class T(T):\n    def step(self): return 2", names)
    assert in_bundle.find_needed("small", code, names) == []


def test_what_is_given_is_put_in_from_a_notebook_that_was_edited(tmp_path):
    path, names = tmp_path / "edited.ipynb", {"kept": "mine"}
    assert in_bundle.put_in_given(path, names) == {}
    path.write_text("{half", encoding="utf-8")
    assert in_bundle.put_in_given(path, names) == {}
    cells = [
        "kept = 1\ndef first(): return 1\nclass Waits(Missing): pass",
        "%%time\ndef magic(): return 1",
        "def half(:",
        "broken = 1 / 0",
        "last = first()",
    ]
    tagged = [{"metadata": {"tags": ["given"]}, "source": source} for source in cells]
    own = [{"metadata": {}, "source": "own = 1"}]
    path.write_text(json.dumps({"cells": tagged + own}), encoding="utf-8")
    assert in_bundle.put_in_given(path, names).keys() == {"Waits", "broken"}
    assert (names["kept"], names["last"]) == ("mine", 1)
    assert not {"Waits", "broken", "magic", "half", "own"} & names.keys()
    before = names["first"]
    assert in_bundle.put_in_given(path, names | {"Missing": object}).keys() == {"broken"}
    assert names["first"] is before
