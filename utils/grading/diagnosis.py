"""Which known mistake a student made: the one whose observations equal theirs.

Where none does, two at once are tried, and then the one that explains most.
"""

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from utils.grading import recorded
from utils.grading.checks import Check, get_checks
from utils.grading.comparison import find_mismatch
from utils.grading.judging import (
    Verdict,
    get_quick_checks,
    grade,
    grade_runs,
    judge,
    measure_reference_gap,
)
from utils.grading.known_answers import AND, KnownAnswer, combine, get_mistakes
from utils.grading.observation import Raised, StudentNames, run_check
from utils.grading.substitution import build_module

SEARCH_SECONDS = 5  # in a notebook, after which no mistake and no pair is tried any more
EITHER = "Either: {} Or: {}"  # two mistakes that the public checks of a bundle do not tell apart
AT_LEAST = "At least in part: "  # before a sentence that does not explain all that fails
SAME_RTOL, SAME_ATOL = 1e-3, 1e-4  # two answers that round differently do the same


def grade_answer(check: Check, answer: KnownAnswer, secret: str = "") -> Verdict:
    """Grade a known answer, and keep what was observed of it."""
    return grade_runs(
        check, lambda index: (observe_answer(answer, check, index, secret), ""), secret
    )


def diagnose(
    verdicts: Iterable[Verdict], secret: str = "", seconds: float | None = None, exact: bool = False
) -> str | None:
    """Return the sentence of the mistake whose observations equal the student's over all checks.

    Where none's do, and there are `seconds` to look, those of the two mistakes that do together;
    else, unless it has to be `exact`, that of the mistake which explains most of the core checks
    that fail, and half of them at least. None for a tie of two that fit (in a bundle, whose public
    checks tell fewer apart, the sentences of both), for a name that is missing, and for an error in
    slow checks alone, as to run every known mistake takes longer than reading the error.
    """
    # The telling ones first, and the quick ones of them: each mistake is run until one differs.
    verdicts = sorted(verdicts, key=lambda verdict: (verdict.passed, verdict.seconds))
    failed = [verdict for verdict in verdicts if not verdict.passed]
    is_begun = all(verdict.observations and not verdict.is_stub for verdict in verdicts)
    if not is_begun or all(map(_is_a_typo, failed)):  # or none failed
        return None
    first = failed[0].check
    known = recorded.load(first.chapter)
    if known is None:
        if all(v.check.slow and isinstance(v.observations[-1], Raised) for v in failed):
            return None
        mine: list[Any] = list(get_mistakes(first.chapter))
    else:
        mine = [mistake for mistake in known.mistakes if mistake.n == 1]
    mine = [mistake for mistake in mine if mistake.exercise == first.exercise]
    compare = _same_as_mistake if known is None else _same_as_recorded
    deadline = None if seconds is None else time.monotonic() + seconds
    # Each mistake is run, which takes seconds at the first time.
    is_seen = "ipykernel" in sys.modules
    bar = tqdm(mine, "looking for the mistake", leave=False, delay=1, disable=not is_seen)
    fitting, alike = [], []
    for mistake in bar:
        if deadline is not None and time.monotonic() > deadline:
            break
        n_same = _count_while(compare, verdicts, mistake, secret)
        fitting += [mistake] * (n_same == len(verdicts))
        alike += [mistake] * (n_same > 0)
    if known is not None and len(fitting) == 2:  # on public checks more mistakes are alike
        return EITHER.format(*(mistake.sentence for mistake in fitting))
    if not fitting and known is not None:
        pairs = [m for m in known.mistakes if m.exercise == first.exercise and m.n == 2]
        fitting = [m for m in pairs if _count_while(compare, verdicts, m, secret) == len(verdicts)]
        fitting += _find_recorded_pairs(verdicts, mine)
    elif not fitting and deadline is not None:
        fitting = _find_pairs(verdicts, mine, secret, deadline)
    if fitting or exact:
        return fitting[0].sentence if len(fitting) == 1 else None
    core = [verdict for verdict in failed if verdict.check.is_core] or failed
    most, sentence = (0, 0), None
    for mistake in alike if deadline is None else mine:
        if deadline is not None and time.monotonic() > deadline:
            break
        same = [verdict for verdict in failed if compare(verdict, mistake, secret)]
        explained = (sum(verdict in core for verdict in same), len(same))
        if 2 * explained[0] >= len(core) and explained > most:
            most, sentence = explained, f"{AT_LEAST}{mistake.sentence}"
    return sentence


def _is_a_typo(verdict: Verdict) -> bool:
    """Return whether a name is missing, which says enough."""
    last, typos = verdict.observations[-1], ("NameError", "UnboundLocalError", "NotDefined")
    return isinstance(last, Raised) and last.kind in typos


def _count_while(compare: Any, verdicts: list[Verdict], mistake: Any, secret: str) -> int:
    """Count the verdicts up to the first on which a mistake does something else."""
    for n, verdict in enumerate(verdicts):
        if not compare(verdict, mistake, secret):
            return n
    return len(verdicts)


def _find_pairs(
    verdicts: list[Verdict], mistakes: list[KnownAnswer], secret: str, deadline: float
) -> list[KnownAnswer]:
    """Return the pairs of mistakes that fit, up to two; none if the time is up before the end.

    Only mistakes that pass whatever the student passes are paired.
    """
    able = []
    for mistake in mistakes:
        if time.monotonic() > deadline:
            return []
        if all(grade_answer(v.check, mistake, secret).passed for v in verdicts if v.passed):
            able.append(mistake)
    found: list[KnownAnswer] = []
    for one, other in itertools.combinations(able, 2):
        if len(found) == 2:
            break
        if time.monotonic() > deadline:
            return []
        pair = combine(one, other)
        if _fits_uncached(verdicts, pair, secret):
            found.append(pair)
    return found


def _find_recorded_pairs(
    verdicts: list[Verdict], mistakes: list[recorded.RecordedMistake]
) -> list[recorded.RecordedMistake]:
    """Return the pairs of mistakes that fit by what each does alone: on every check that fails one
    of the two does what the student's code does, and neither fails another."""
    same = [[_same_as_recorded(verdict, m, "") for verdict in verdicts] for m in mistakes]
    found = []
    for i, j in itertools.combinations(range(len(mistakes)), 2):
        both = zip(verdicts, same[i], same[j], strict=True)
        if all(a and b if verdict.passed else a or b for verdict, a, b in both):
            sentence = AND.format(mistakes[i].sentence, mistakes[j].sentence)
            found.append(dataclasses.replace(mistakes[i], sentence=sentence, n=2))
    return found


def _fits_uncached(verdicts: list[Verdict], pair: KnownAnswer, secret: str) -> bool:
    """Return whether two mistakes together do what the student's code did; keep nothing of them."""
    try:
        module = build_module(pair.chapter, pair.make_source())
    except Exception:  # they change the same lines, or make no program together
        return False
    try:
        student = StudentNames(vars(module))
        return all(
            same_observation(
                v.check, observed, run_check(v.check, student, i, secret)[0], i, secret
            )
            for v in verdicts
            for i, observed in enumerate(v.observations)
        )
    finally:
        del sys.modules[module.__name__]


def _same_as_recorded(verdict: Verdict, mistake: recorded.RecordedMistake, secret: str) -> bool:
    observed = mistake.observed.get(verdict.check.path, recorded.SAME)
    return is_same_as_recorded(verdict, observed, secret)


def is_same_as_recorded(verdict: Verdict, observed: Any, secret: str = "") -> bool:
    """Return whether a verdict's observations are those that were recorded of a mistake."""
    if observed == recorded.SAME or verdict.passed:
        return verdict.passed and observed == recorded.SAME
    return len(observed) == len(verdict.observations) and all(
        same_observation(verdict.check, a, b, i, secret)
        for i, (a, b) in enumerate(zip(verdict.observations, observed, strict=True))
    )


def _same_as_mistake(verdict: Verdict, mistake: KnownAnswer, secret: str) -> bool:
    return all(
        same_observation(
            verdict.check, observed, observe_answer(mistake, verdict.check, i, secret), i, secret
        )
        for i, observed in enumerate(verdict.observations)
    )


@functools.lru_cache(maxsize=16384)
def observe_answer(answer: KnownAnswer, check: Check, index: int, secret: str = "") -> Any:
    """Run a check's probe on a known answer, and return what it observed."""
    return run_check(check, answer.build(), index, secret)[0]


def same_observation(check: Check, a: Any, b: Any, index: int, secret: str = "") -> bool:
    """Return whether two answers did the same. A predicate may accept both though their draws
    differ."""
    if check.holds is not None:
        verdicts = [judge(check, observed, index, secret) for observed in (a, b)]
        said = [None if verdict is None else verdict.message for verdict in verdicts]
        if said[0] != said[1]:  # the values of a mismatch may hold a traceback
            return False
        if said[0] is None:
            return True
    gap = measure_reference_gap(check, index, secret) if check.holds is None else None
    rtol, atol = check.rtol, check.atol
    if gap is None:  # what rounding does to it is not known
        rtol, atol = max(rtol, SAME_RTOL), max(atol, SAME_ATOL)
    return find_mismatch(a, b, gap, rtol, atol) is None


def diagnose_answer(answer: KnownAnswer) -> str | None:
    """Return what `diagnose` says of a known mistake: its own sentence, unless another does the
    same."""
    checks = get_quick_checks(answer.chapter, answer.exercise)
    return diagnose([grade_answer(check, answer) for check in checks], exact=True)


def grade_exercise(
    chapter: str,
    exercise: str,
    student: StudentNames,
    slow: bool = False,
    hardening: bool = True,
    seconds: float | None = SEARCH_SECONDS,
) -> tuple[list[Verdict], str | None]:
    """Grade an exercise by every check, and find the sentence of the mistake.

    hardening: whether a mistake is looked for that fails no core check.
    """
    checks = get_quick_checks(chapter, exercise) if not slow else get_checks(chapter)[exercise]
    verdicts = [grade(check, student) for check in checks]
    failed = any(not v.passed and (hardening or v.check.is_core) for v in verdicts)
    return verdicts, diagnose(verdicts, seconds=seconds) if failed else None
