"""One submission, from its files to its report: the trusted side of grading code of others.

What the student's code did comes from `jobs` as bytes; it is judged here, with seeds that derive
from a secret, which is one for a class: a worker runs the reference once.
"""

import contextlib
import functools
import marshal
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import PurePosixPath
from typing import Any

from utils.autograder import given, jobs, modules
from utils.autograder.batch import Options
from utils.autograder.child import File, ProbeRun
from utils.autograder.hiding import hide_paths, hide_words
from utils.autograder.jobs import Job, Outcome, Reply
from utils.autograder.reading import SubmittedFiles, shorten
from utils.grading.checks import Check, get_chapters, get_checks, get_reference, get_top_names
from utils.grading.comparison import Mismatch
from utils.grading.diagnosis import diagnose
from utils.grading.judging import Verdict, count_points, judge, observe_reference
from utils.grading.packing import unpack
from utils.grading.points import ExerciseReport, Points, Report
from utils.grading.probes import collect_sources
from utils.grading.reference import get_chapter_source, get_given_lines, get_source
from utils.grading.substitution import ChapterSource
from utils.version import find_other_versions, get_version

SLOW_FACTOR = 6  # a slow check gets this many times as long
MAX_FAILED = 10  # imports that failed and are named
MAX_SLOW = 5  # statements of a submission that take too long and are left out
PATIENCE_SHARE = 3  # into which the time of a check is divided, for one statement
MAX_TRIES = 3  # orders of files that define the same
MAX_TIMEOUTS = 2  # checks of one exercise that took too long: the others are not run
MAX_MESSAGE_CHARACTERS = 2000
MAX_ERROR_CHARACTERS = 500
MAX_PROBLEMS, MAX_LEFT_OUT = 50, 100  # of a submission, in its report
MAX_LINE_CHARACTERS = 400  # of each of these
MAX_MODULE_BYTES = 2**20  # of a file that others of the submission may import
MAX_KEPT_BYTES = 2**23  # of a reply: what is larger than any right answer is judged, and let go
Inspected = tuple[File, dict[str, Any]]  # and what it defines
NOT_RUN = "was not run, as others took too long"


def _blame(check: Check, error: Exception | str) -> Verdict:
    """Return the verdict on a check that the grader failed at. Students are told no more of an
    error than its kind: its words may be of a hidden check."""
    said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    kind = said.partition(":")[0][:80]
    mismatch = Mismatch(f"not graded: an error of the grader ({kind})")
    return Verdict(check, (), mismatch, error=said[:MAX_ERROR_CHARACTERS])


@dataclass
class Grader:
    """Grades one submission, through a job server."""

    connection: Connection
    options: Options
    points: Points
    submitted: SubmittedFiles
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    protections: set[str] | None = None
    seconds_used: float = 0.0
    helpers: list[tuple[str, bytes]] = field(default_factory=list)
    answers: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # files, by exercise
    # Of statements: what a child says of other places is not passed on.
    places: set[str] = field(default_factory=set)
    slow: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    replaced: dict[str, set[str]] = field(default_factory=dict)  # by chapter: the course's own

    def grade(self, only: Collection[str] = ()) -> Report:
        """Return the report of the submission; of some exercises if `only` names them."""
        self.problems += self.submitted.problems
        exercises = []
        by_chapter = self._sort_files()
        chapters = [*(self.options.chapters or by_chapter)]  # of what cannot be read, all lacks
        for chapter in chapters:
            files, defined = by_chapter.get(chapter, ([], set()))
            for exercise, checks in get_checks(chapter).items():
                if only and exercise not in only:
                    continue
                name, before = exercise.partition(".")[0], self.seconds_used
                missing = Mismatch(f"{name} is not defined")
                verdicts, sentence = [Verdict(check, (), missing) for check in checks], None
                if name in defined:
                    one = _Exercise(self, chapter, exercise, files, self.options.secret)
                    verdicts, sentence = self._grade_best(one, name)
                seconds = self.seconds_used - before
                exercises.append(_describe(chapter, exercise, verdicts, sentence, seconds))
        _require_own_work(exercises)
        self.problems += self._describe_running()
        if by_chapter and not by_chapter.keys() & {*chapters}:
            found, wanted = ", ".join(by_chapter), ", ".join(chapters)
            self.problems.append(f"it defines exercises of {found}, but what was set is {wanted}")
        if not by_chapter and not self.problems:
            self.problems.append("it defines no exercise of any chapter")
        version = get_version()
        self.problems += [
            f"{shorten(file)} is of version {made_by} of the course, and was graded by {version}"
            for file, made_by in find_other_versions(self.submitted.files).items()
        ]
        report = {
            "submission": self.submitted.name,
            "version": version,
            "readable": bool(by_chapter),
            "chapters": chapters,
            "seconds": round(self.seconds_used, 1),
            "protections": sorted(self.protections or ()),
            "problems": _bound([*map(hide_paths, self.problems)], MAX_PROBLEMS),
            "left_out": _bound(self.left_out, MAX_LEFT_OUT),
            "exercises": exercises,
        }
        return self.points.score(report)

    def _grade_best(self, one: "_Exercise", name: str) -> tuple[list[Verdict], str | None]:
        """Grade an exercise; where several files answer it, the one that earns most."""
        best = one.grade()
        tries = [n for n in self.answers.get((one.chapter, name), []) if n != one.files[-1][0]]
        for file in tries[: MAX_TRIES - 1]:
            if all(verdict.passed for verdict in best[0]):
                break
            files = sorted(one.files, key=lambda entry: entry[0] == file)
            other = replace(one, files=files).grade()
            if _rank(other[0]) > _rank(best[0]):
                best = other
                self.problems.append(f"{one.chapter}: {one.exercise} of {shorten(file)} counts")
        return best

    def note(self, seen: dict[str, Any], chapter: str, is_open: bool) -> bool:
        """Keep what a child says of the statements that it ran; return whether it is to run once
        more without one of them. is_open: whether it knew of no more than students may see."""
        slow = [p for p in _as_list(seen.get("slow")) if p in self.places and p not in self.slow]
        if slow and len(self.slow) < MAX_SLOW:
            self.slow.append(slow[0])
            return True  # what runs once more may import what was not there yet
        self.stopped += [p for p in _as_list(seen.get("stopped")) if p in self.places]
        self.failed += _as_list(seen.get("failed")) * is_open
        if names := _as_list(seen.get("replaced")):
            known = get_chapter_source(chapter).get_names().intersection(names)
            self.replaced.setdefault(chapter, set()).update(known)
        return False

    @property
    def patience(self) -> float:
        """Return the seconds that one statement of a submission may take."""
        return min(modules.MAX_STATEMENT_SECONDS, self.options.seconds / PATIENCE_SHARE)

    def _describe_running(self) -> list[str]:
        """Say which statements were stopped or replaced, and which imports failed, but not of the
        course's own modules, which is said elsewhere."""
        slow = f"it takes more than {self.patience:.2g} s, and what it defines was left out"
        most = modules.MAX_EFFECT_SECONDS
        stopped = f"it was stopped, as loops and calls took more than {most} s"
        return [
            *(f"{place}: {slow}" for place in self.slow),
            *(f"{place}: {stopped}" for place in dict.fromkeys(self.stopped)),
            *(
                f"{chapter}: what the notebook gives of {', '.join(sorted(names))} does not run"
                " with this version of the course as it was handed in: the course's own took its"
                " place, beside what you wrote"
                for chapter, names in self.replaced.items()
            ),
            *[*dict.fromkeys(self.failed)][:MAX_FAILED],
        ]

    @property
    def is_out_of_time(self) -> bool:
        return self.seconds_used > self.options.submission_seconds

    def ask(self, job: Job) -> Reply:
        """Ask for a reply, and keep which protections were active in all replies so far."""
        start = time.monotonic()
        reply = jobs.ask(self.connection, job)
        self.seconds_used += time.monotonic() - start
        active = set(reply.protections)
        if reply.protections or reply.outcome is Outcome.DONE:
            self.protections = active if self.protections is None else self.protections & active
        return reply

    # Files

    def _sort_files(self) -> dict[str, tuple[list[File], set[str]]]:
        """Find for each chapter that is there the files that define something of it, and what.

        Where two define the same, the one with fewer stubs comes last, and counts.
        """
        inspected = self._leave_out_copies(self._inspect())
        small = [file for file, _ in inspected if len(file[1]) <= MAX_MODULE_BYTES]
        written = [
            (str(PurePosixPath(name).parent / module), text.encode(errors="replace"))
            for (name, _), seen in inspected
            for module, text, _ in seen["written"]
        ]
        others = [file for file in written if len(file[1]) <= MAX_MODULE_BYTES]
        self.helpers = small + others if len(inspected) > 1 or others else []
        found: dict[str, list[tuple[int, File, set[str]]]] = {}
        for (name, _), seen in inspected:
            self._note_file(name, seen)
            code = (name, seen["code"].numpy().tobytes())  # nobody but a child looks into it
            for chapter, names in seen["defined"].items():
                found.setdefault(chapter, []).append((seen["stubs"], code, set(names)))
        found = {chapter: found[chapter] for chapter in get_chapters() if chapter in found}
        own = modules.SubmittedModules(self.helpers, [], modules.Runner()).files
        imports = [tuple(entry) for _, seen in inspected for entry in seen["imports"]]
        if chapters := [c for c in get_chapters() if c in (self.options.chapters or found)]:
            self.problems += given.say_not_given(imports, chapters, own)
        for chapter, entries in found.items():
            defined = Counter(name for _, _, names in entries for name in names)
            if twice := sorted(name for name, count in defined.items() if count > 1):
                entries.sort(key=lambda entry: -entry[0])
                files = [shorten(file[0]) for _, file, mine in entries if mine & {*twice}][-5:]
                self.problems.append(
                    f"{chapter}: {', '.join(files)} define the same, such as {twice[0]}: of each"
                    " exercise the better counts, and where they are alike, the last"
                )
        return {
            chapter: ([file for _, file, _ in entries], set().union(*(n for *_, n in entries)))
            for chapter, entries in found.items()
        }

    def _inspect(self) -> list[Inspected]:
        """List what each file defines and imports, in a process apart."""
        inspected = []
        known = {
            "names": get_top_names(),
            "given": get_given_lines(),
            "solved": given.list_solved(),
        }
        for file in self.submitted.files:
            if self.is_out_of_time:
                self.problems.append(f"{file[0]} was not read, as others took too long")
                continue
            arguments = {"file": file, "patience": self.patience} | known
            reply = self.ask(Job("list_definitions", self.options.seconds, arguments))
            said = reply.outcome.value.format(seconds=self.options.seconds)
            try:
                seen = None if said else unpack(reply.data)
            except ValueError:
                seen = None
            if isinstance(seen, dict):
                inspected.append((file, seen))
            else:
                said = said or "gave nothing that can be read"
                self.problems.append(f"{file[0]}: reading it {said}")
        return inspected

    def _leave_out_copies(self, inspected: list[Inspected]) -> list[Inspected]:
        """Leave out the course's solutions, by what they define, where they lie beside other work.

        What is handed in alone is graded, but said, unless it lies in a folder "solutions".
        """
        found = {
            file[0]: given.find_copy(seen["digests"], seen["first_line"])
            for file, seen in inspected
        }
        copies = {name: chapter for name, chapter in found.items() if chapter}
        copies = copies or given.find_parts({file[0]: seen["digests"] for file, seen in inspected})
        if len(self.submitted.files) == 1 and not any(map(given.is_in_solutions, copies)):
            self.problems += [f"{n} is the course's solution of {c}" for n, c in copies.items()]
            return inspected
        if copies:
            names = ", ".join(f"{name} ({chapter})" for name, chapter in copies.items())
            self.problems.append(f"{len(copies)} of the course's own files left out: {names[:300]}")
        return [(file, seen) for file, seen in inspected if file[0] not in copies]

    def _note_file(self, file: str, seen: dict[str, Any]) -> None:
        """Keep what is said of a file, its places, and which exercises it answers."""
        self.problems += seen["problems"]
        self.left_out += seen["left_out"]
        self.places |= {f"{file}{place}" for place in seen["places"]}
        for name, _, places in seen["written"]:
            self.places |= {f"{PurePosixPath(file).parent / name}{p}" for p in places}
        for chapter, names in seen["defined"].items():
            for name in {*names} - {*seen["unfinished"]}:
                self.answers.setdefault((chapter, name), []).append(file)


def _describe(
    chapter: str, exercise: str, verdicts: list[Verdict], sentence: str | None, seconds: float
) -> ExerciseReport:
    checks = [
        {
            "name": verdict.check.name,
            "title": verdict.check.title,
            "tier": verdict.check.tier,
            "passed": verdict.passed,
            "public": verdict.check.public,
            "weight": verdict.check.points,
            "earns_alone": verdict.check.earns_alone,
            "message": hide_paths(verdict.describe())[:MAX_MESSAGE_CHARACTERS],
            "error": verdict.error,
            "took_too_long": verdict.is_timeout or verdict.mismatch == Mismatch(NOT_RUN),
        }
        for verdict in verdicts
    ]
    return {
        "chapter": chapter,
        "name": exercise,
        "sentence": sentence,
        "seconds": round(seconds, 1),
        "checks": checks,
    }


def _as_list(value: Any) -> list[str]:
    """Return the texts of what a child gave as a list of them."""
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []


def _bound(lines: list[str], most: int) -> list[str]:
    """Return the first of these lines, each once and none too long, and how many more there are."""
    each = [*dict.fromkeys(line[:MAX_LINE_CHARACTERS] for line in lines)]
    return each[:most] + [f"and {len(each) - most} more"] * (len(each) > most)


def _require_own_work(exercises: list[ExerciseReport]) -> None:
    """Let a method that the chapter's own class inherits fail, as `GrpoTrainer.train`, unless one
    of the class's other exercises is solved: it would be an earlier chapter's that is graded."""
    for exercise in exercises:
        chapter, name = exercise["chapter"], exercise["name"]
        if name not in get_chapter_source(chapter).inherited:
            continue
        own = [
            all(c["passed"] or c["error"] for c in other["checks"] if c["tier"] == "core")
            for other in exercises
            if other["chapter"] == chapter
            and other is not exercise
            and other["name"].partition(".")[0] == name.partition(".")[0]
        ]
        if own and not any(own):
            for check in exercise["checks"]:
                check["passed"] = False
                check["message"] = "counts once a method that you write for the class is solved"


@dataclass
class _Exercise:
    """One exercise of one submission."""

    grader: Grader
    chapter: str
    exercise: str
    files: list[File]  # of each its name and its code
    secret: str

    def grade(self) -> tuple[list[Verdict], str | None]:
        """Grade it as part of the whole work and, if that fails, alone: what is better counts.

        What took too long may be another exercise, which this one calls: alone, one check is enough
        to tell.
        """
        verdicts = self._run_checks(is_alone=False)
        if not all(v.passed or v.is_stub for v in verdicts):
            most = 1 if _took_too_long(verdicts) else MAX_TIMEOUTS
            again = self._run_checks(is_alone=True, max_timeouts=most)
            verdicts = max(verdicts, again, key=_rank)
        sentence = None
        if not (all(v.passed for v in verdicts) or any(v.error for v in verdicts)):
            with contextlib.suppress(Exception):  # costs the sentence, and no marks
                sentence = diagnose([v for v in verdicts if not v.check.slow], self.secret)
        return verdicts, sentence

    def _run_checks(self, is_alone: bool, max_timeouts: int = MAX_TIMEOUTS) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for check in get_checks(self.chapter)[self.exercise]:
            if verdicts and verdicts[0].is_unwritten:
                verdicts.append(replace(verdicts[0], check=check))
            elif _took_too_long(verdicts, max_timeouts) or self.grader.is_out_of_time:
                verdicts.append(Verdict(check, (), Mismatch(NOT_RUN)))
            else:
                verdicts.append(self._run_check(check, is_alone))
        return verdicts

    def _run_check(self, check: Check, is_alone: bool) -> Verdict:
        seconds = self.grader.options.seconds * (SLOW_FACTOR if check.slow else 1)
        try:
            _try_stand_in(self.chapter, self.exercise, is_alone)
            job = self._make_job(check, seconds, is_alone)
        except Exception as error:
            return _blame(check, error)
        while True:
            reply = self.grader.ask(job)
            if reply.error:
                return _blame(check, reply.error)
            verdict = self._read(check, reply, seconds, is_alone)
            if verdict is not None:
                return verdict
            job.arguments.skipped = [*self.grader.slow]

    def _make_job(self, check: Check, seconds: int, is_alone: bool) -> Job:
        chapters = get_chapters()
        earlier = chapters[: chapters.index(self.chapter)]
        sources = {f"solutions.{s}": get_source(s) for s in earlier} | collect_sources(check)
        run = ProbeRun(
            probe=(check.probe.__module__, check.name),
            modules={name: _compile(name, source) for name, source in sources.items()},
            seeds=[check.seed(index, self.secret) for index in range(check.seeds)],
            exercise=self.exercise,
            stand_in=_get_stand_in(self.chapter, self.exercise, is_alone),
            is_alone=is_alone,
            files=self.files,
            helpers=self.grader.helpers,
            data=[*self.grader.submitted.data],
            given=given.get_given(self.chapter),
            patience=self.grader.patience,
            skipped=[*self.grader.slow],
        )
        return Job("run_probe", seconds, run)

    def _read(self, check: Check, reply: Reply, seconds: int, is_alone: bool) -> Verdict | None:
        """Judge what came back of a check; None where it has to run once more."""
        if reply.outcome is not Outcome.DONE:
            mismatch = Mismatch(reply.outcome.value.format(seconds=seconds))
            return Verdict(check, (), mismatch, is_timeout=reply.outcome is Outcome.TOO_LONG)
        try:
            seen = unpack(reply.data)
            if self.grader.note(seen, self.chapter, is_open=check.public and not is_alone):
                return None
            observations, is_stub = seen["observations"], seen["is_stub"]
            printed = f"{seen['log']}\n{seen['printed']}".strip()
            if not isinstance(observations, list):
                raise TypeError("observations should be a list")
            if is_alone or not check.public:
                observations = hide_words(observations, self.chapter, self.exercise)
            observations = observations[: check.seeds]
        except Exception:  # of many kinds, as LookupError: of a tensor a name is no index
            return Verdict(check, (), Mismatch("what it gave cannot be read"))
        verdict = self._judge_all(check, observations, printed)
        if len(reply.data) > MAX_KEPT_BYTES:
            verdict = replace(verdict, observations=())
        verdict = replace(verdict, is_unwritten=verdict.is_stub and bool(is_stub))
        return _without_values(verdict) if is_alone else verdict

    def _judge_all(self, check: Check, observations: list[Any], printed: str) -> Verdict:
        for index, observed in enumerate(observations):
            try:
                mismatch = judge(check, observed, index, self.secret)
            except Exception as error:  # such as of tensors of exotic types
                mismatch = Mismatch(f"what it gave cannot be compared: {type(error).__name__}")
            if mismatch is not None:
                if fault := _find_fault(check, index, self.secret):
                    return fault
                return Verdict(check, tuple(observations[: index + 1]), mismatch, printed)
        said = Mismatch(f"it ran on {len(observations)} of {check.seeds} inputs")
        is_whole = len(observations) == check.seeds
        return Verdict(check, tuple(observations), None if is_whole else said, printed)


@functools.cache
def _compile(name: str, source: str) -> bytes:
    return marshal.dumps(compile(source, f"<{name}>", "exec", dont_inherit=True))


# --- Errors of the grader -------------------------------------------------------------------------


def _get_stand_in(chapter: str, exercise: str, is_alone: bool) -> ChapterSource:
    """Return the chapter without the exercise; on the whole work, without any.

    What student code could read of the other exercises' solutions, it could put into words.
    """
    source = get_chapter_source(chapter)
    if is_alone:
        return source.without(exercise)
    return source.without(*source.tops, *source.exercises)


@functools.cache
def _try_stand_in(chapter: str, exercise: str, is_alone: bool) -> None:
    """Build what stands in for the rest of the chapter, as a child does, with the reference in the
    place of the student's names. What it raises is no student's error."""
    source, names = _get_stand_in(chapter, exercise, is_alone), vars(get_reference(chapter))
    compile(source.source, f"<{chapter}>", "exec")
    source.without(exercise).build(**{top: names.get(top) for top in source.tops})


@functools.lru_cache(maxsize=4096)
def _find_fault(check: Check, index: int, secret: str) -> Verdict | None:
    """Find out whether the check rejects the reference itself, or cannot judge it: then it says
    nothing of the student, whatever was observed."""
    try:
        mismatch = judge(check, observe_reference(check, index, secret), index, secret)
    except Exception as error:
        return _blame(check, error)
    said = "it rejects the reference: "
    return None if mismatch is None else _blame(check, f"{said}{mismatch.message}")


def _took_too_long(verdicts: list[Verdict], most: int = MAX_TIMEOUTS) -> bool:
    return sum(verdict.is_timeout for verdict in verdicts) >= most


def _rank(verdicts: list[Verdict]) -> tuple[float, int]:
    """Rank what came of an exercise: by its points, those that are not graded among them."""
    hoped = [replace(v, mismatch=None) if v.error else v for v in verdicts]
    return count_points(hoped), -len([v for v in verdicts if v.error])


def _without_values(verdict: Verdict) -> Verdict:
    if verdict.mismatch is None:
        return verdict
    return replace(verdict, mismatch=Mismatch(verdict.mismatch.message), printed="")
