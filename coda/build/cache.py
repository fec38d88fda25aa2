"""The cache of built artifacts: one folder for each content key, published by one atomic rename.

* An entry is built in a private folder next to its final place, every file is flushed to disk, then the folder is
  renamed. A reader sees all of it or nothing.
* One process builds an entry, the others wait for it: the ranks of a job compile a kernel once. Where files cannot be
  locked all build, and who loses the race keeps and uses its own folder: on NFS the winner may not be visible yet.
* ``entry.json`` holds a hash of the library; an entry that does not match it is rebuilt.
* A cache that cannot be written is only read; builds then go to a temporary folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

Build = Callable[[Path], None]  # fills a folder with the files of an entry


def cache_root() -> Path:
    """CODA_CACHE, else the coda folder in the user's cache directory."""
    given = os.environ.get("CODA_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coda"


def content_key(parts: Mapping[str, str]) -> str:
    """A hash of everything that can change the result. Lengths are hashed too, so that parts cannot run together."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        for text in (name, parts[name]):
            data = text.encode()
            digest.update(f"{len(data)}:".encode() + data)
    return digest.hexdigest()[:40]


def obtain(key: str, library: str, build: Build, root: Path | None = None) -> Path:
    """The folder of the entry, with a verified file ``library`` in it; built if necessary."""
    entry = _entry(key, root)
    if is_intact(entry, library):
        return entry
    with locked(entry.parent.parent / ".locks" / key):
        if is_intact(entry, library):  # built while we waited
            return entry
        private = _private_folder(entry)
        try:
            build(private)
        except BaseException:
            _keep_log(private, entry)
            raise
        _seal(private, library)
        return _publish(private, entry, library)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process, or thread, at a time for each file; the lock of a process that dies is free. Where files cannot be
    locked nobody waits."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def reject(key: str, reason: str, root: Path | None = None) -> None:
    """Remember that what this key stands for is not worth building again."""
    entry = _entry(key, root)
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.with_suffix(".rejected").write_text(reason)


def rejection(key: str, root: Path | None = None) -> str | None:
    """Why it was rejected, or None."""
    try:
        return _entry(key, root).with_suffix(".rejected").read_text()
    except OSError:
        return None


def _entry(key: str, root: Path | None) -> Path:
    return (root or cache_root()) / key[:2] / key


def is_intact(entry: Path, library: str) -> bool:
    """Whether the entry is there and its library is the one that was built."""
    try:
        recorded = json.loads((entry / "entry.json").read_text())
        return recorded == {"library": library, "sha256": _hash(entry / library)}
    except (OSError, ValueError):
        return False


def _private_folder(entry: Path) -> Path:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{entry.name[:12]}-", dir=entry.parent))
    except OSError:  # read-only or full: build where temporary files go, and leave the result there
        return Path(tempfile.mkdtemp(prefix="coda-"))


def _seal(folder: Path, library: str) -> None:
    """Record the hash and flush everything to disk, so that a crash after the rename leaves no torn files."""
    record = {"library": library, "sha256": _hash(folder / library)}
    (folder / "entry.json").write_text(json.dumps(record))
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _publish(private: Path, entry: Path, library: str) -> Path:
    if private.parent != entry.parent:
        return private
    private.chmod(0o755)
    if entry.exists() and not is_intact(entry, library):
        _set_aside(entry)
    try:
        private.rename(entry)
    except OSError:
        return private  # somebody else was first, or the folder is not writable any more: ours is as good
    return entry


def _set_aside(entry: Path) -> None:
    """Move a corrupted entry out of the way in one step; another process may be doing the same."""
    grave = Path(tempfile.mkdtemp(prefix=".corrupt-", dir=entry.parent))
    with contextlib.suppress(OSError):
        entry.rename(grave / "entry")
    shutil.rmtree(grave, ignore_errors=True)


def _keep_log(private: Path, entry: Path) -> None:
    """A failed build leaves only its folder with the log, whose path the error names; older ones of the key go."""
    for old in entry.parent.glob(f".{entry.name[:12]}-*"):
        if old != private and (old / "failed").exists():
            shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(OSError):
        (private / "failed").touch()


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
