"""A run's ``state.sqlite``: one connection for two threads, and its failures in words that say what to do."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedfac.disk import private_file
from fedfac.errors import RunError
from fedfac.state import State, digest, from_bytes

_PAGE = 1 << 15  # bytes: states are large, runs need not be
_UNTOUCHED = "Nothing was changed; restore it from a backup, or start the run again in another folder."
_PRIMARY = 0xFF  # of an extended result code
_REMEDIES = {
    sqlite3.SQLITE_FULL: "the disk is full. Every whole round is safe: free some space, then resume",
    sqlite3.SQLITE_IOERR: "the system could not read or write it. Every whole round is safe: look whether the disk is "
    "full, whether files may grow (ulimit -f) and whether the disk is healthy, then resume",
    sqlite3.SQLITE_BUSY: "another program holds a lock on it. Close that program, then resume",
    sqlite3.SQLITE_LOCKED: "another program holds a lock on it. Close that program, then resume",
    sqlite3.SQLITE_READONLY: "this user may not write to it, or to its folder: change their permissions",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened: look at its permissions, and at those of its folder",
    sqlite3.SQLITE_PERM: "this user may not open it: change its permissions",
    sqlite3.SQLITE_TOOBIG: "a state is larger than SQLite can hold (1 GB): make less of the model personal",
    sqlite3.SQLITE_NOMEM: "there is not enough memory. Every whole round is safe: resume where there is more",
}


class Database:
    """The file, its connection, and what goes wrong in it as a :class:`~fedfac.errors.RunError`."""

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        self._turn = threading.RLock()  # the writer's thread and the caller's
        self._logging = False
        with self._guarded():
            self._connection = _connect(path, writable=writable)

    @classmethod
    def create(cls, path: Path, schema: str) -> None:
        """A new private file with these tables; what a start that was killed has left makes way."""
        for leftover in path.parent.glob(f"{path.name}*"):
            leftover.unlink()
        private_file(path)  # SQLite gives its log the same permissions
        try:
            with contextlib.closing(sqlite3.connect(path)) as db:
                db.execute(f"PRAGMA page_size={_PAGE}")
                db.executescript(schema)
        except sqlite3.DatabaseError as error:
            raise _in_words(path, error) from error

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """A statement that changes something."""
        with self._guarded():
            return self._connection.execute(sql, values)

    def iterate(self, sql: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Row by row, because they may be large; only while nobody writes."""
        cursor = self.execute(sql, values)
        while True:
            with self._guarded():
                row = cursor.fetchone()
            if row is None:
                return
            yield row

    def all(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """All rows, in one go: a statement that is under way would keep the writer from beginning."""
        with self._guarded(), contextlib.closing(self._connection.execute(sql, values)) as cursor:
            return cursor.fetchall()

    def one(self, sql: str, values: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
        """The first row."""
        return next(iter(self.all(sql, values)), None)

    def tables(self) -> set[str]:
        """The names of its tables."""
        return {str(row[0]) for row in self.all("SELECT name FROM sqlite_master WHERE type = 'table'")}

    def begin(self) -> None:
        """A transaction to write in. While there are any, others can read; afterwards it is one plain file again."""
        if not self._logging:
            self.execute("PRAGMA journal_mode=WAL")
            self._logging = True
        if not self._connection.in_transaction:
            self.execute("BEGIN IMMEDIATE")

    def abandon(self) -> None:
        """Undo the transaction that is under way, if there is one."""
        if self._connection.in_transaction:
            self._connection.rollback()

    def close(self) -> None:
        """Undo what is not committed, and close."""
        with contextlib.suppress(sqlite3.OperationalError):  # a disk that is still full
            self.abandon()
        if self._logging:
            with contextlib.suppress(sqlite3.OperationalError):  # somebody is reading: the log stays for now
                self._connection.execute("PRAGMA journal_mode=DELETE")
        self._connection.close()

    def state(self, what: str, data: Any, check: Any) -> State:
        """A stored state, if it is whole."""
        if not isinstance(data, bytes) or digest(data) != check:
            raise self.damaged(f"{what} does not match its checksum")
        return from_bytes(data)

    def check_pages(self) -> None:
        """Fail unless every page of the file is there and sound."""
        (size,), (pages,) = self.all("PRAGMA page_size")[0], self.all("PRAGMA page_count")[0]
        wal = self.path.with_name(f"{self.path.name}-wal")
        if not (wal.exists() and wal.stat().st_size) and self.path.stat().st_size < size * pages:
            raise self.damaged("it was cut short")
        verdict = self.all("PRAGMA quick_check")
        if verdict != [("ok",)]:
            raise self.damaged(str(verdict[0][0]))

    def damaged(self, why: str) -> RunError:
        """The error of a file whose content is not what was written."""
        return RunError(f"{self.path} is damaged ({why}). {_UNTOUCHED}")

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """One thread at a time; what goes wrong is said in the run's words."""
        try:
            with self._turn:
                yield
        except sqlite3.DatabaseError as error:
            raise _in_words(self.path, error) from error
        except UnicodeDecodeError as error:  # its own tables, or an error's text, are no text any more
            raise self.damaged(f"text in it is not UTF-8: {error}") from error


def _in_words(path: Path, error: sqlite3.DatabaseError) -> RunError:
    """What a failure of SQLite means for a run; only what is not the system's doing is damage."""
    todo = _REMEDIES.get(getattr(error, "sqlite_errorcode", 0) & _PRIMARY)
    if todo is not None:
        return RunError(f"{path} cannot be used ({error}): {todo}.")
    return RunError(f"{path} is damaged ({error}). {_UNTOUCHED}")


def _connect(path: Path, *, writable: bool) -> sqlite3.Connection:
    if not path.exists():
        raise RunError(f"{path} is missing: the run has lost its state")
    mode = "mode=rw" if writable else "mode=ro"
    if not writable and not os.access(path.parent, os.W_OK):
        mode = "mode=ro&immutable=1"  # a folder that nobody can write to needs no log beside the file
    db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None, check_same_thread=False)
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if writable:
            db.execute("PRAGMA synchronous=NORMAL")
    except BaseException:
        db.close()
        raise
    return db
