"""Reading submissions: notebooks, scripts, folders and zips, as bytes that nobody has looked into.

Nothing is extracted to disk and no link is followed, so a name can lead nowhere.
"""

import hashlib
import io
import os
import re
import stat
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

SUFFIXES = (".ipynb", ".py")
MAX_FILES = 200
MAX_NAME_CHARACTERS = 1000  # of a file, with its folders: it stands in reports
MAX_ZIP_ENTRIES = 40_000  # of a zip, which can hold a virtual environment beside the work
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # zipfile bounds what comes of these
MAX_SUBMISSION_BYTES = 2**25  # of all files together
VARIANTS = 2  # of the seeds, among the submissions: a worker runs the reference once for each
SKIPPED = {"__MACOSX", "__pycache__", "node_modules", "site-packages", "venv"}


@dataclass(frozen=True)
class SubmittedFiles:
    """A submission: its name, its files in the order of their names, and what was left out."""

    name: str
    files: tuple[tuple[str, bytes], ...] = ()
    problems: tuple[str, ...] = field(default=())

    @property
    def digest(self) -> str:
        """Return a digest of names and content."""
        digest = hashlib.sha256()
        for name, data in self.files:
            digest.update(f"{len(name)}:{name}:{len(data)}:".encode(errors="replace") + data)
        return digest.hexdigest()


def name_submissions(paths: list[Path]) -> dict[str, Path]:
    """Return a folder name for each path, from its own name and, where two share it, its
    parents'."""
    names = {path: _clean(path.stem if path.suffix in (*SUFFIXES, ".zip") else path.name)
             for path in paths}  # fmt: skip
    counts = Counter(names.values())
    for path, name in names.items():
        if counts[name] > 1:
            names[path] = _clean("__".join([*path.absolute().parts[-3:-1], path.name]))
    counts = Counter(names.values())
    return {
        name if counts[name] == 1 else f"{name}-{hashlib.sha256(bytes(path)).hexdigest()[:8]}": path
        for path, name in names.items()
    }


def get_variant(name: str) -> int:
    """Return which of the seeds a submission gets."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % VARIANTS


def _clean(name: str) -> str:
    """Keep at most 100 bytes, and none of the names beside which it will stand, as class.html."""
    clean = re.sub(r"[^\w.() +-]", "_", name).strip(". ").encode()[:100].decode(errors="ignore")
    return f"{clean}_" if clean.startswith("class.") else clean or "submission"


def read_submission(name: str, path: Path) -> SubmittedFiles:
    """Return the notebooks and scripts of a path. What cannot be read is a problem, never an
    error."""
    try:
        if path.is_dir() and not path.is_symlink():
            return _gather(name, _iterate_folder(path))
        data = _read_regular(path)
        if path.suffix == ".zip" or data[:4] == b"PK\x03\x04":
            if data.count(b"PK\1\2") > MAX_ZIP_ENTRIES:  # zipfile makes an object of each
                raise ValueError(f"a zip should have at most {MAX_ZIP_ENTRIES} entries")
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return _gather(name, _iterate_zip(archive))
        if path.suffix not in SUFFIXES:
            return SubmittedFiles(
                name, (), (f"{path.name} should be .ipynb, .py, .zip or a folder",)
            )
        return SubmittedFiles(name, ((path.name, data),))
    except Exception as error:  # zipfile's are of many kinds
        return SubmittedFiles(name, (), (f"{path.name} cannot be read: {_say(error)}",))


def _gather(name: str, entries) -> SubmittedFiles:
    files: list[tuple[str, bytes]] = []
    problems: list[str] = []
    left = MAX_SUBMISSION_BYTES
    for entry, read in entries:
        parts = PurePosixPath(entry).parts
        if not entry.endswith(SUFFIXES) or any(p in SKIPPED or p.startswith(".") for p in parts):
            continue
        if len(files) + len(problems) >= MAX_FILES:
            problems.append(f"only the first {MAX_FILES} files are read")
            break
        if len(entry) > MAX_NAME_CHARACTERS:
            problems.append(f"{entry[:50]}... cannot be read: its name is too long")
            continue
        try:
            data = read(left)
        except Exception as error:
            problems.append(f"{entry} cannot be read: {_say(error)}")
            continue
        left -= len(data)
        files.append((entry, data))
    if not files and not problems:
        problems.append("there is no .ipynb or .py file in it")
    return SubmittedFiles(name, tuple(sorted(files)), tuple(problems))


def _iterate_folder(folder: Path):
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            yield (
                path.relative_to(folder).as_posix(),
                lambda most, path=path: _read_regular(path, most),
            )


def _iterate_zip(archive: zipfile.ZipFile):
    for info in archive.infolist():
        if stat.S_ISLNK(info.external_attr >> 16) or info.is_dir():
            continue

        def read(most, info=info):
            if info.compress_type not in COMPRESSIONS:
                raise ValueError("it should be stored or deflated")
            with archive.open(info) as file:  # says in its head what it likes: count what comes
                data = file.read(most + 1)
            return _limit(data, most)

        yield info.filename, read


def _read_regular(path: Path, most: int = MAX_SUBMISSION_BYTES) -> bytes:
    """Read a file that is one: no link, pipe or device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        return _limit(file.read(most + 1), most)


def _limit(data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise ValueError(f"a submission should have at most {MAX_SUBMISSION_BYTES // 2**20} MB")
    return data


def _say(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) else error  # not the path
    return f"{type(error).__name__}: {said}"[:200]
