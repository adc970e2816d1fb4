"""Which known mistake a student made: the one whose observations equal theirs.

Where none does, two at once are tried, and then the one that explains most.
"""

import dataclasses
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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
Same = Callable[[Any, Verdict], bool]  # whether a mistake does what was observed
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
    chapter, exercise = failed[0].check.chapter, failed[0].check.exercise
    known = recorded.load(chapter)
    if known is None and all(map(_is_a_slow_error, failed)):
        return None
    all_known: Iterable[Any] = get_mistakes(chapter) if known is None else known.mistakes
    mine = [mistake for mistake in all_known if mistake.exercise == exercise]
    single = [mistake for mistake in mine if mistake.n == 1]
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    is_same: Same = _is_as_recorded if known else functools.partial(_is_as_observed, secret)
    fitting = _find_fitting(verdicts, _until(deadline, single), is_same)
    if known and len(fitting) == 2:  # on public checks more mistakes are alike
        return EITHER.format(*(mistake.sentence for mistake in fitting))
    if not fitting and known:
        pairs = [mistake for mistake in mine if mistake.n == 2]
        fitting = _find_fitting(verdicts, pairs, is_same)
        fitting += _find_recorded_pairs(verdicts, single)
    elif not fitting and seconds is not None:
        fitting = _find_pairs(verdicts, single, secret, deadline)
    if fitting or exact:
        return fitting[0].sentence if len(fitting) == 1 else None
    if seconds is None:
        single = [mistake for mistake in single if is_same(mistake, failed[0])]
    return _explain_most(failed, _until(deadline, single), is_same)


def _is_a_typo(verdict: Verdict) -> bool:
    """Return whether a name is missing, which says enough."""
    last, typos = verdict.observations[-1], ("NameError", "UnboundLocalError", "NotDefined")
    return isinstance(last, Raised) and last.kind in typos


def _is_a_slow_error(verdict: Verdict) -> bool:
    return verdict.check.slow and isinstance(verdict.observations[-1], Raised)


def _until(deadline: float, mistakes: Iterable[Any]) -> Iterator[Any]:
    """Yield mistakes to try, until the time is up."""
    return itertools.takewhile(lambda _: time.monotonic() <= deadline, mistakes)


def _find_fitting(verdicts: list[Verdict], mistakes: Iterable[Any], is_same: Same) -> list[Any]:
    """Return the mistakes that do what the student's code does on all checks."""
    return [m for m in mistakes if all(is_same(m, verdict) for verdict in verdicts)]


def _explain_most(failed: list[Verdict], mistakes: Iterable[Any], is_same: Same) -> str | None:
    """Return the sentence of the mistake that explains most of what fails."""
    core = [verdict for verdict in failed if verdict.check.is_core] or failed
    most, sentence = (0, 0), None
    for mistake in mistakes:
        same = [verdict for verdict in failed if is_same(mistake, verdict)]
        explained = (sum(verdict in core for verdict in same), len(same))
        if 2 * explained[0] >= len(core) and explained > most:
            most, sentence = explained, f"{AT_LEAST}{mistake.sentence}"
    return sentence


def _find_pairs(
    verdicts: list[Verdict], mistakes: list[KnownAnswer], secret: str, deadline: float
) -> list[KnownAnswer]:
    """Return the pairs of mistakes that fit, up to two; none if the time is up before the end.

    Only mistakes that pass whatever the student passes are paired.
    """
    passed = [verdict.check for verdict in verdicts if verdict.passed]
    able = [
        mistake
        for mistake in _until(deadline, mistakes)
        if all(grade_answer(check, mistake, secret).passed for check in passed)
    ]
    pairs = _until(deadline, itertools.starmap(combine, itertools.combinations(able, 2)))
    found = itertools.islice((p for p in pairs if _fits_uncached(verdicts, p, secret)), 2)
    return [*found] if time.monotonic() <= deadline else []


def _find_recorded_pairs(
    verdicts: list[Verdict], mistakes: list[recorded.RecordedMistake]
) -> list[recorded.RecordedMistake]:
    """Return the pairs of mistakes that fit by what each does alone: on every check that fails one
    of the two does what the student's code does, and neither fails another."""
    found = []
    for one, other in itertools.combinations(mistakes, 2):
        same = [(v.passed, _is_as_recorded(one, v), _is_as_recorded(other, v)) for v in verdicts]
        if all(a and b if passed else a or b for passed, a, b in same):
            sentence = AND.format(one.sentence, other.sentence)
            found.append(dataclasses.replace(one, sentence=sentence, n=2))
    return found


def _fits_uncached(verdicts: list[Verdict], pair: KnownAnswer, secret: str) -> bool:
    """Return whether two mistakes together do what the student's code did; keep nothing of them."""
    try:
        module = build_module(pair.chapter, pair.make_source())
    except Exception:  # they change the same lines, or make no program together
        return False
    student = StudentNames(vars(module))

    def fits(verdict: Verdict) -> bool:
        check = verdict.check
        return _repeats(verdict, lambda i: run_check(check, student, i, secret)[0], secret)

    try:
        return all(map(fits, verdicts))
    finally:
        del sys.modules[module.__name__]


def _is_as_observed(secret: str, mistake: KnownAnswer, verdict: Verdict) -> bool:
    check = verdict.check
    return _repeats(verdict, lambda i: observe_answer(mistake, check, i, secret), secret)


def _is_as_recorded(mistake: recorded.RecordedMistake, verdict: Verdict) -> bool:
    return is_same_as_recorded(verdict, mistake.observed.get(verdict.check.path, recorded.SAME))


def is_same_as_recorded(verdict: Verdict, observed: Any) -> bool:
    """Return whether a verdict's observations are those that were recorded of a mistake."""
    if observed == recorded.SAME or verdict.passed:
        return verdict.passed and observed == recorded.SAME
    return len(observed) == len(verdict.observations) and _repeats(verdict, observed.__getitem__)


def _repeats(verdict: Verdict, observe: Callable[[int], Any], secret: str = "") -> bool:
    """Return whether what is observed with each seed's index is what a verdict's student did."""
    return all(
        same_observation(verdict.check, observed, observe(i), i, secret)
        for i, observed in enumerate(verdict.observations)
    )


@functools.lru_cache(maxsize=16384)
def observe_answer(answer: KnownAnswer, check: Check, index: int, secret: str = "") -> Any:
    """Run a check's probe on a known answer, and return what it observed."""
    return run_check(check, answer.build(), index, secret)[0]


def same_observation(check: Check, a: Any, b: Any, index: int, secret: str = "") -> bool:
    """Return whether two answers did the same: a predicate may accept both, with other draws."""
    if check.holds is not None:
        one, other = (judge(check, observed, index, secret) for observed in (a, b))
        if one is None or other is None or one.message != other.message:
            return one is other  # the values of a mismatch may hold a traceback
    gap = measure_reference_gap(check, index, secret) if check.holds is None else None
    rtol, atol = check.rtol, check.atol
    if gap is None:  # what rounding does to it is not known
        rtol, atol = max(rtol, SAME_RTOL), max(atol, SAME_ATOL)
    return find_mismatch(a, b, gap, rtol, atol) is None


def diagnose_answer(answer: KnownAnswer) -> str | None:
    """Return what `diagnose` says of a known mistake: its own sentence, unless two do the same."""
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
