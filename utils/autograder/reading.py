"""Reading submissions: notebooks, scripts, folders and zips, as bytes that nobody has looked into.

Nothing is extracted to disk and no link is followed, so a name can lead nowhere.
"""

import contextlib
import functools
import hashlib
import io
import os
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

SUFFIXES = (".ipynb", ".py")
# Of the course's folder, what students do not write; beside one of these, it is that folder.
COURSE_FOLDERS = ("solutions", "tests", "utils")
COURSE_MARKS = ("utils/course", "utils/grading", "utils/authoring")
MAX_COURSES = 20  # copies of the course in a submission that are looked for
MAX_FILES = 200
MAX_DEPTH = 3  # of zips in zips, as learning platforms send them
MAX_NAME_CHARACTERS = 1000  # of a file, with its folders
MAX_SAID_CHARACTERS = 100  # of such a name, in a problem
# Files beside which the folders of the submissions stand: none may be called like one of them.
OWN_FILES = ("class.csv", "class.html", "grades.csv", "canvas.csv", "moodle.csv", ".secret")
MAX_ZIP_ENTRIES = 40_000  # of a zip, which can hold a virtual environment beside the work
MAX_DATA_FILES, MAX_DATA_BYTES = 50, 2**21  # that the work may read, all together
# Of these no exercise needs anything.
NO_DATA = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf", ".html", ".pyc", ".md", ".log")
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # zipfile bounds what comes of these
MAX_SUBMISSION_BYTES = 2**25  # of all files together, without notebooks
MAX_NOTEBOOK_BYTES = 2**27  # of notebooks and zips, with the outputs, which are not looked at
Entry = tuple[str, Callable[[int], bytes]]  # a name, and what reads so many bytes at most
SKIPPED = {"__MACOSX", "__pycache__", "node_modules", "site-packages", "venv"}


@dataclass(frozen=True)
class SubmittedFiles:
    """A submission: its name, its files in the order of their names, and what was left out."""

    name: str
    files: tuple[tuple[str, bytes], ...] = ()
    problems: tuple[str, ...] = field(default=())
    data: tuple[tuple[str, bytes], ...] = ()  # small files of other kinds, beside the work

    @property
    def digest(self) -> str:
        """Return a digest of names and content."""
        digest = hashlib.sha256()
        for name, data in self.files + self.data:
            digest.update(f"{len(name)}:{name}:{len(data)}:".encode(errors="replace") + data)
        return digest.hexdigest()


@dataclass
class Budget:
    """How much more is read of a submission: notebooks and zips, all else, entries of zips."""

    notebooks: int = MAX_NOTEBOOK_BYTES
    others: int = MAX_SUBMISSION_BYTES
    entries: int = field(default_factory=lambda: MAX_ZIP_ENTRIES)

    def read(self, entry: str, read: Callable[[int], bytes]) -> bytes:
        if entry.lower().endswith((".ipynb", ".zip")):
            data = read(self.notebooks)
            self.notebooks -= len(data)
        else:
            data = read(self.others)
            self.others -= len(data)
        return data


def name_submissions(paths: list[Path], taken: dict[str, str] | None = None) -> dict[str, Path]:
    """Return a folder name for each path: its own and, where two share it, its parents' too.

    taken: names of before, and the path that each stands for.
    """
    places = taken or {}
    names = {path: _clean(path.stem if path.suffix.lower() in (*SUFFIXES, ".zip") else path.name)
             for path in paths}  # fmt: skip
    of_before = {place: name for name, place in places.items()}
    counts = Counter(names.values())
    for path, name in names.items():
        if counts[name] > 1 or places.get(name, str(path.absolute())) != str(path.absolute()):
            names[path] = _clean("__".join([*path.absolute().parts[-3:-1], path.name]))
        names[path] = of_before.get(str(path.absolute()), names[path])
    counts = Counter(names.values())
    return {
        name if counts[name] == 1 else f"{name}-{hashlib.sha256(bytes(path)).hexdigest()[:8]}": path
        for path, name in names.items()
    }


def _clean(name: str) -> str:
    """Keep at most 100 bytes, and none of the names beside which it will stand (`OWN_FILES`)."""
    clean = re.sub(r"[^\w.() +-]", "_", name).strip(". ").encode()[:100].decode(errors="ignore")
    return f"{clean}_" if is_taken(clean) else clean or "submission"


def is_taken(name: str) -> bool:
    """Return whether a folder of this name would stand in the way of a file of a batch, or of what
    becomes one, whatever the system makes of capitals."""
    small = name.casefold()
    return any(small in (own, f"{own}.partial") for own in OWN_FILES)


def read_submission(name: str, path: Path) -> SubmittedFiles:
    """Return the notebooks and scripts of a path. What cannot be read is a problem, no error."""
    problems: list[str] = []
    with _note_errors(path.name, problems):
        if path.is_dir() and not path.is_symlink():
            return _gather(name, list(_iterate_folder(path)), Budget())
        data = _read_regular(path, MAX_NOTEBOOK_BYTES)
        if path.suffix.lower() == ".zip" or data[:4] == b"PK\x03\x04":
            budget = Budget()
            return _gather(name, list(_iterate_zip(data, budget)), budget)
        if path.suffix.lower() not in SUFFIXES:
            problems.append(f"{path.name} should be .ipynb, .py, .zip or a folder")
            return SubmittedFiles(name, (), tuple(problems))
        if path.suffix.lower() == ".py":
            _limit(data, MAX_SUBMISSION_BYTES)
        return SubmittedFiles(name, ((path.name, data),))
    return SubmittedFiles(name, (), tuple(problems))


def _gather(name: str, entries: list[Entry], budget: Budget) -> SubmittedFiles:
    """Read the scripts and notebooks among these, except for those in the course's folders.

    Copies of its solutions in other places are left out later, by what they define (`given`).
    """
    files: list[tuple[str, bytes]] = []
    problems: list[str] = []
    found = list(_expand(entries, budget, problems))
    own = _find_course_folders([entry for entry, _ in found])
    left_out: list[str] = []
    others: dict[str, bytes | None] = {}  # None for one that is too large
    for entry, read in found:
        is_code = entry.lower().endswith(SUFFIXES)
        if _is_skipped(entry):
            continue
        if _fold(entry).startswith(own):
            left_out += [entry] * is_code
        elif not is_code:
            _read_data(entry, read, others)
        elif len(files) + len(problems) >= MAX_FILES:
            problems.append(f"only the first {MAX_FILES} files are read")
            break
        elif len(entry) > MAX_NAME_CHARACTERS:
            problems.append(f"...{entry[-50:]} cannot be read: its name is too long")
        else:
            with _note_errors(entry, problems):
                files.append((entry, budget.read(entry, read)))
    if left_out:
        places = ", ".join(sorted({str(PurePosixPath(entry).parent) for entry in left_out}))[:200]
        problems.append(f"{len(left_out)} of the course's own files left out: {places}")
    data = tuple(sorted((entry, data) for entry, data in others.items() if data is not None))
    if not files and not problems:
        problems.append("there is no .ipynb or .py file in it")
    return SubmittedFiles(name, tuple(sorted(files)), tuple(problems), data)


def _read_data(entry: str, read: Callable[[int], bytes], others: dict[str, bytes | None]) -> None:
    """Read a file that the work may read, if it is small; what is not is no problem."""
    left = MAX_DATA_BYTES - sum(len(data or b"") for data in others.values())
    is_wanted = not entry.lower().endswith(NO_DATA) and len(entry) <= MAX_NAME_CHARACTERS
    if is_wanted and len(others) < MAX_DATA_FILES:
        others[entry] = None
        with contextlib.suppress(Exception):
            others[entry] = read(left)


def _is_skipped(entry: str) -> bool:
    return any(part in SKIPPED or part.startswith(".") for part in PurePosixPath(entry).parts)


def _fold(entry: str) -> str:
    """Return a name for comparing: small letters, and a zip in a zip is a folder."""
    return entry.casefold().replace(".zip/", "/")


def _find_course_folders(entries: list[str]) -> tuple[str, ...]:
    """Return the folders of the course that lie in a submission, folded, with a slash at the end.

    A bundle, or a whole clone, holds solutions beside the notebook in which somebody worked.
    """
    roots = set()
    for entry in map(_fold, entries):
        for mark in COURSE_MARKS:
            parts = f"/{entry}/".partition(f"/{mark}/")
            if parts[1]:
                roots.add(parts[0].strip("/"))
    chosen = sorted(roots)[:MAX_COURSES]
    return tuple(f"{r}/{f}/".lstrip("/") for r in chosen for f in COURSE_FOLDERS)


def _expand(entries: Iterable[Entry], budget: Budget, problems: list[str], depth: int = 1):
    """Yield the entries, and in the place of a zip those that are in it."""
    for entry, read in entries:
        if not entry.lower().endswith(".zip") or _is_skipped(entry):
            yield entry, read
            continue
        if depth >= MAX_DEPTH:
            _add(problems, f"{shorten(entry)} is not read: zips are nested too deeply")
            continue
        inner: list[Entry] = []
        with _note_errors(entry, problems):
            inner = list(_iterate_zip(budget.read(entry, read), budget))
        inside = [(f"{entry}/{name}", read) for name, read in inner]
        yield from _expand(inside, budget, problems, depth + 1)


@contextlib.contextmanager
def _note_errors(entry: str, problems: list[str]) -> Iterator[None]:
    """Add to the problems, if they are not too many, why a file cannot be read."""
    try:
        yield
    except Exception as error:  # zipfile's are of many kinds
        said = f"{error.strerror if isinstance(error, OSError) else error}"  # not the path
        if not isinstance(error, ValueError):  # in our own words
            said = f"{type(error).__name__}: {said}"
        _add(problems, f"{shorten(entry)} cannot be read: {said[:200]}")


def _add(problems: list[str], problem: str) -> None:
    if len(problems) < MAX_FILES:
        problems.append(problem)


def shorten(name: str) -> str:
    """Shorten the name of a file for a report: what stands last tells most."""
    return name if len(name) <= MAX_SAID_CHARACTERS else f"...{name[-MAX_SAID_CHARACTERS:]}"


def _iterate_folder(folder: Path) -> Iterator[Entry]:
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            yield path.relative_to(folder).as_posix(), functools.partial(_read_regular, path)


def _iterate_zip(data: bytes, budget: Budget) -> Iterator[Entry]:
    budget.entries -= data.count(b"PK\1\2")  # zipfile makes an object of each
    if budget.entries < 0:
        raise ValueError(f"a zip, with those in it, should have at most {MAX_ZIP_ENTRIES} entries")
    archive = zipfile.ZipFile(io.BytesIO(data))
    for info in archive.infolist():
        if stat.S_ISLNK(info.external_attr >> 16) or info.is_dir():
            continue

        def read(most, info=info):
            if info.compress_type not in COMPRESSIONS:
                raise ValueError("it should be stored or deflated")
            if info.flag_bits & 1:
                raise ValueError("it is encrypted: hand it in without a password")
            with archive.open(info) as file:  # says in its head what it likes: count what comes
                data = file.read(most + 1)
            return _limit(data, most)

        # Names as some tools of Windows write them, and ones that lead round about.
        yield str(PurePosixPath(info.filename.replace("\\", "/"))), read


def _read_regular(path: Path, most: int) -> bytes:
    """Read a file that is one: no link, pipe or device."""
    if path.is_symlink():
        raise ValueError("it is a link, which is not followed")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        return _limit(file.read(most + 1), most)


def _limit(data: bytes, most: int) -> bytes:
    if len(data) > most:
        code, notebooks = MAX_SUBMISSION_BYTES >> 20, MAX_NOTEBOOK_BYTES >> 20
        raise ValueError(
            f"a submission should have at most {notebooks} MB of notebooks and {code} MB of scripts"
        )
    return data
