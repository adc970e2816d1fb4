"""One submission, from its files to its report: the trusted side of grading code of others.

What the student's code did comes from `zygote` as bytes; it is judged here, by `engine.judge`, with
seeds that derive from a secret and, over a few variants, from the submission.
"""

import builtins
import dataclasses
import hashlib
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from utils.grading import zygote
from utils.grading.answers import get_chapter, get_source
from utils.grading.checks import Check, get_checks, get_stems
from utils.grading.comparison import Mismatch
from utils.grading.engine import Verdict, count_points, diagnose, get_points, judge
from utils.grading.intake import Intake, get_variant
from utils.grading.observation import Raised, Unsupported
from utils.grading.points import Points
from utils.grading.probes import collect_sources
from utils.grading.stand_in import Chapter
from utils.grading.submission import get_top_names
from utils.grading.wire import unpack
from utils.grading.zygote import Job

SECONDS, SLOWER = 30, 6  # of one check, wall clock; a slow one gets so many times as long
MOST_SECONDS = 900  # of all checks of a submission together
MOST_STOPPED = 2  # checks of one exercise that took too long: the others are not run
LONGEST = 2000  # of a message
MOST_KEPT = 2**23  # of a reply: what is larger than any right answer is judged, and let go
MOST_EMPTY, MOST_DIMENSIONS = 1000, 8  # a tensor without numbers can have any shape
OUTCOMES = {
    "time": "was stopped after {seconds} s",
    "length": "gave more data than any answer has",
    "ended": "ended its process before it gave a result",
}


class Marker:
    """Grades submissions through one zygote."""

    def __init__(
        self,
        connection: Connection,
        secret: str,
        points: Points,
        seconds: int = SECONDS,
        chapters: tuple[str, ...] = (),
    ):
        self.connection, self.secret, self.points = connection, secret, points
        self.seconds, self.chapters = seconds, chapters
        self.names = get_top_names()

    def mark(self, intake: Intake, only: str | None = None) -> dict[str, Any]:
        """The report of a submission; of one exercise if `only` is given."""
        secret = f"{self.secret}|{get_variant(intake.name)}"
        secret = hashlib.sha256(secret.encode()).hexdigest()
        problems, chapters, exercises = list(intake.problems), [], []
        self.protections, self.started = None, time.monotonic()
        by_stem = self._sort_files(intake, problems) if intake.files else {}
        taken = {file for files, _ in by_stem.values() for file, *_ in files}
        self.helpers = [f for f in intake.files if f[0].endswith(".py") and f[0] not in taken]
        for stem in (self.chapters or by_stem) if by_stem else ():
            files, defined = by_stem.get(stem, ([], set()))
            chapters.append(stem)
            for exercise in get_checks(stem):
                if only not in (None, exercise):
                    continue
                one = _Exercise(self, stem, exercise, files, secret)
                name = exercise.partition(".")[0]
                verdicts, sentence = one.grade() if name in defined else (one.miss(name), None)
                exercises.append(self._describe(stem, exercise, verdicts, sentence))
        if not chapters and not problems:
            problems.append("it defines no exercise of any chapter")
        return {
            "submission": intake.name,
            "chapters": chapters,
            "score": round(sum(e["score"] for e in exercises), 4),
            "max_score": round(sum(e["max_score"] for e in exercises), 4),
            "protections": sorted(self.protections or ()),
            "problems": problems,
            "exercises": exercises,
        }

    @property
    def is_out_of_time(self) -> bool:
        return time.monotonic() - self.started > MOST_SECONDS

    def ask(self, job: Job) -> zygote.Reply:
        """A reply, and which protections were active: in a report, those of all its replies."""
        reply = zygote.ask(self.connection, job)
        active = set(reply.protections)
        if reply.protections or reply.outcome == "done":
            self.protections = active if self.protections is None else self.protections & active
        return reply

    def _sort_files(self, intake: Intake, problems: list[str]) -> dict[str, tuple[list, set[str]]]:
        """For each chapter that is there: the files that define something of it, and what.

        Where two define the same, the one with fewer stubs comes last, and counts.
        """
        found: dict[str, list[tuple[int, tuple, set[str]]]] = {}
        for file in intake.files:
            if self.is_out_of_time:
                problems.append(f"{file[0]} was not read, as others took too long")
                continue
            arguments = {"files": [file], "names": self.names}
            reply = self.ask(Job("inspect", self.seconds, arguments))
            try:
                seen = unpack(reply.data) if reply.outcome == "done" else None
            except ValueError:
                seen = None
            if seen is None:
                said = OUTCOMES.get(reply.outcome, "cannot be read").format(seconds=self.seconds)
                problems.append(f"{file[0]}: reading it {said}")
                continue
            problems += seen["problems"].values()
            code = (file[0], seen["code"].numpy().tobytes())  # nobody but a child looks into it
            for stem, names in seen["defined"].items():
                found.setdefault(stem, []).append((seen["stubs"], code, set(names)))
        for stem, entries in found.items():
            defined = Counter(name for _, _, names in entries for name in names)
            if twice := sorted(name for name, count in defined.items() if count > 1):
                entries.sort(key=lambda entry: -entry[0])
                names = ", ".join([file[0] for _, file, mine in entries if mine & {*twice}][-5:])
                problems.append(
                    f"{stem}: {names} define the same, such as {twice[0]}: the last counts"
                )
        return {
            stem: ([file for _, file, _ in found[stem]], set().union(*(n for *_, n in found[stem])))
            for stem in get_stems()
            if stem in found
        }

    def _describe(
        self, stem: str, exercise: str, verdicts: list[Verdict], sentence: str | None
    ) -> dict[str, Any]:
        worth, visibility = self.points.get(stem, exercise)
        share = count_points(verdicts) / sum(verdict.check.points for verdict in verdicts)
        earned = get_points(verdicts)
        checks = [
            {
                "name": verdict.check.name,
                "title": verdict.check.title,
                "passed": verdict.passed,
                "public": verdict.check.public,
                "points": points,
                "max_points": verdict.check.points,
                "message": verdict.describe()[:LONGEST],
            }
            for verdict, points in zip(verdicts, earned, strict=True)
        ]
        return {
            "chapter": stem,
            "name": exercise,
            "score": round(worth * share, 4),
            "max_score": worth,
            "visibility": visibility,
            "sentence": sentence,
            "checks": checks,
        }


@dataclasses.dataclass
class _Exercise:
    """One exercise of one submission."""

    marker: Marker
    stem: str
    exercise: str
    files: list[tuple[str, bytes]]  # of each its name and its code
    secret: str

    def grade(self) -> tuple[list[Verdict], str | None]:
        """As part of the whole work and, if that fails, alone: what is better counts."""
        verdicts = self._run_checks(is_alone=False)
        if not (all(v.passed or v.is_stub for v in verdicts) or self._took_too_long(verdicts)):
            again = self._run_checks(is_alone=True)
            if count_points(again) > count_points(verdicts):
                verdicts = again
        if all(verdict.passed for verdict in verdicts):
            return verdicts, None
        quick = [verdict for verdict in verdicts if not verdict.check.slow]
        return verdicts, diagnose(quick, self.secret)

    def miss(self, name: str) -> list[Verdict]:
        """The verdicts on what is not there."""
        mismatch = Mismatch(f"{name} is not defined")
        return [Verdict(check, (), mismatch) for check in get_checks(self.stem)[self.exercise]]

    def _run_checks(self, is_alone: bool) -> list[Verdict]:
        verdicts = []
        for check in get_checks(self.stem)[self.exercise]:
            if verdicts and verdicts[0].is_stub:
                verdicts.append(dataclasses.replace(verdicts[0], check=check))
            elif self._took_too_long(verdicts) or self.marker.is_out_of_time:
                mismatch = Mismatch("was not run, as others took too long")
                verdicts.append(Verdict(check, (), mismatch))
            else:
                verdicts.append(self._run_check(check, is_alone))
        return verdicts

    def _took_too_long(self, verdicts: list[Verdict]) -> bool:
        stopped = [v for v in verdicts if v.mismatch and v.mismatch.message.startswith("was stop")]
        return len(stopped) >= MOST_STOPPED

    def _run_check(self, check: Check, is_alone: bool) -> Verdict:
        stems = get_stems()
        seconds = self.marker.seconds * (SLOWER if check.slow else 1)
        arguments = {
            "files": self.files,
            "helpers": self.marker.helpers,
            "chapter": self._get_stand_in(is_alone),
            "exercise": self.exercise,
            "modules": collect_sources(check),
            "probe": (check.probe.__module__, check.name),
            "seeds": [check.seed(index, self.secret) for index in range(check.seeds)],
            "is_alone": is_alone,
        }
        earlier = {f"solutions.{s}": get_source(s) for s in stems[: stems.index(self.stem)]}
        reply = self.marker.ask(Job("check", seconds, arguments, earlier))
        if reply.outcome != "done":
            return Verdict(check, (), Mismatch(OUTCOMES[reply.outcome].format(seconds=seconds)))
        try:
            seen = unpack(reply.data)
            observations, printed = (
                seen["observations"],
                f"{seen['log']}\n{seen['printed']}".strip(),
            )
            if not isinstance(observations, list):
                raise TypeError("observations should be a list")
            if is_alone or not check.public:
                observations = [self._clean(o) for o in observations]
            observations = observations[: check.seeds]
        except (ValueError, LookupError, TypeError):  # LookupError: of a tensor a name is no index
            return Verdict(check, (), Mismatch("what it gave cannot be read"))
        verdict = self._judge_all(check, observations, printed)
        if len(reply.data) > MOST_KEPT:
            verdict = dataclasses.replace(verdict, observations=())
        return _without_values(verdict) if is_alone else verdict

    def _get_stand_in(self, is_alone: bool) -> Chapter:
        """Of the chapter without the exercise; on the whole work, without any.

        What student code could read of the other exercises' solutions, it could put into words.
        """
        chapter = get_chapter(self.stem)
        if is_alone:
            return chapter.without(self.exercise)
        return chapter.without(*{name.partition(".")[0] for name in chapter.exercises})

    def _judge_all(self, check: Check, observations: list[Any], printed: str) -> Verdict:
        for index, observed in enumerate(observations):
            try:
                mismatch = judge(check, observed, index, self.secret)
            except RuntimeError as error:  # tensors of exotic types
                mismatch = Mismatch(f"what it gave cannot be compared: {type(error).__name__}")
            if mismatch is not None:
                return Verdict(check, tuple(observations[: index + 1]), mismatch, printed)
        if len(observations) < check.seeds:
            return Verdict(check, tuple(observations), Mismatch("some runs are missing"), printed)
        return Verdict(check, tuple(observations), None, printed)

    def _clean(self, observed: Any) -> Any:
        """What a message would pass on of a hidden check, or of solutions: not the student's words.

        The shape of an empty tensor is as good as words.
        """
        if isinstance(observed, Tensor):
            said = observed.numel() == 0 and max(observed.shape) > MOST_EMPTY
            return Unsupported("object") if said or observed.ndim > MOST_DIMENSIONS else observed
        if isinstance(observed, Raised):
            return self._clean_raised(observed)
        if isinstance(observed, Unsupported):
            return observed if _is_builtin(observed.kind, type) else Unsupported("object")
        if isinstance(observed, dict):
            return {key: self._clean(value) for key, value in observed.items()}
        if isinstance(observed, list):
            return [self._clean(value) for value in observed]
        return observed

    def _clean_raised(self, raised: Raised) -> Raised:
        name = self.exercise.rpartition(".")[2]
        known = {exercise.rpartition(".")[2] for exercise in get_checks(self.stem)} | {"__init__"}
        place = raised.place if raised.place in known else name
        kind, message = raised.kind, raised.message
        if kind == "NotDefined" and message.removesuffix(" is not defined") not in known:
            message = "something that the check needs is not defined"
        elif kind != "NotDefined" and not _is_builtin(kind, BaseException):
            kind = "an exception"
        return Raised(kind, message, "", place)


def _without_values(verdict: Verdict) -> Verdict:
    if verdict.mismatch is None:
        return verdict
    return dataclasses.replace(verdict, mismatch=Mismatch(verdict.mismatch.message), printed="")


def _is_builtin(name: str, base: type) -> bool:
    found = getattr(builtins, name, None)
    return isinstance(found, type) and (base is type or issubclass(found, base))
