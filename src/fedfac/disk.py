"""Files of a run: written whole or not at all, private, and JSON that every reader accepts."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from fedfac.errors import RunError

PRIVATE = 0o600  # only the owner: states, partitions and figures of single clients
FOR_OTHERS = 0o666  # a page or a table that is made to be handed on; the umask takes away what it takes away
_DISK_FULL = "The disk is full, or files may not grow further: free some space. Every whole round is safe: resume then"
_FORBIDDEN = "This user may not read or write there: change its permissions, or choose another folder"
_REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: _DISK_FULL,
    errno.EDQUOT: _DISK_FULL,
    errno.EFBIG: _DISK_FULL,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: "It is on a file system that is read-only: choose another folder",
    errno.ENOTDIR: "One of the names on the way is a file: choose another folder",
    errno.EEXIST: "There is a file of that name: choose another folder",
    errno.ENAMETOOLONG: "A name in it is too long for the file system (most end at 255 bytes): choose a shorter one",
}


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What the operating system refuses inside, as an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(refused(path, error)) from error


def refused(path: Path, error: OSError) -> str:
    """Which file, why, and what to do."""
    shown = str(path) if len(str(path)) <= 300 else f"{str(path)[:300]}..."
    todo = _REMEDIES.get(error.errno or 0, "")
    return f"{shown} cannot be used: {error.strerror or error}" + (f". {todo}" if todo else "")


def private_folder(path: Path) -> None:
    """Make a folder that only its owner can enter; one that is there stays as it is."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            if not path.is_dir():
                raise


def private_file(path: Path) -> None:
    """Make an empty file that only its owner can read. Not for one that SQLite has open: closing it ends the locks."""
    with disk_errors(path):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, PRIVATE))
        path.chmod(PRIVATE)


def append(path: Path, text: str) -> None:
    """Add lines to a private file."""
    with disk_errors(path), _opened(path, os.O_APPEND, PRIVATE) as file:
        file.write(text.encode())


def atomic_write(path: Path, content: str | bytes, *, mode: int = PRIVATE) -> None:
    """Write a whole file or nothing; once this returns, it survives a loss of power."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with _opened(temporary, os.O_TRUNC, mode) as file:
                file.write(content if isinstance(content, bytes) else content.encode())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):  # what went wrong before counts
                temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)


def _opened(path: Path, flags: int, mode: int) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | flags, mode), "wb")


def _sync_folder(path: Path) -> None:
    """Bring the names in a folder to disk, where the system can."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def plain(value: Any) -> Any:
    """The value with None for every number that JSON has no word for: a loss that overflowed, a figure of nothing.

    >>> plain({"loss": float("inf"), "of": [1.5, float("nan")]})
    {'loss': None, 'of': [1.5, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def worded(value: Any) -> Any:
    """The value with a word for every number that JSON has none for: of a setting, it must not get lost.

    >>> worded({"tau": float("inf")})
    {'tau': 'inf'}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: worded(item) for key, item in value.items()}
    return [worded(item) for item in value] if isinstance(value, list | tuple) else value


def json_text(value: Any, *, indent: int | None = None) -> str:
    """JSON without ``Infinity`` and ``NaN``, which only Python reads.

    >>> json_text({"loss": float("inf")})
    '{"loss": null}'
    """
    return json.dumps(plain(value), allow_nan=False, indent=indent)
