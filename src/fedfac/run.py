"""Run directory: what was asked for, what came out of every round, and the state to go on from.

    config.json     what was asked for, and which model and data it was for
    partition.json  which sample is whose
    metrics.jsonl   one line a round, the same bytes for the same run
    timing.jsonl    seconds, kept apart because they differ from run to run
    state.sqlite    records, splits, the server's state, what the rule remembers, every client's personal state

A round is one transaction of ``state.sqlite``: a kill at any moment leaves a whole round. It is written by a thread of
its own while the next rounds train. Training does not wait for it: rounds that end while it is busy are put off and
share the next transaction (``MOST`` of them at most), so a kill costs no more than what trained during one writing.
``metrics.jsonl`` is written from it. Tensors are safetensors bytes with a checksum; there is no pickle. One
process at a time may write (an operating-system lock, which dies with its process).
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from fedfac.errors import RunError
from fedfac.split import Split, mask_of, mask_text
from fedfac.state import State, digest, from_bytes, to_bytes

FORMAT = 1
MOST = 8  # rounds that may wait to be written
_PAGE = 1 << 15  # bytes: states are large, runs need not be
_SCHEMA = """
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, record TEXT NOT NULL, masks TEXT NOT NULL, scores TEXT NOT NULL, digest TEXT NOT NULL
);
CREATE TABLE server (id INTEGER PRIMARY KEY CHECK (id = 0), data BLOB NOT NULL, digest TEXT NOT NULL);
CREATE TABLE personal (client INTEGER PRIMARY KEY, data BLOB NOT NULL, digest TEXT NOT NULL);
CREATE TABLE evaluation (id INTEGER PRIMARY KEY CHECK (id = 0), round INTEGER NOT NULL, clients TEXT NOT NULL);
"""
# only runs whose rule remembers something have it, and a run of an earlier version gets it when it needs it
_MEMORY = """
CREATE TABLE IF NOT EXISTS memory (id INTEGER PRIMARY KEY CHECK (id = 0), data BLOB NOT NULL, digest TEXT NOT NULL)
"""
AVERAGED, VELOCITY = "averaged//", "velocity//"  # in the memory, names of rules are LAYER/WHAT


@dataclass(frozen=True)
class Checkpoint:
    """The last whole round."""

    round: int
    server: State
    masks: Mapping[str, tuple[bool, ...]]
    memory: State  # what the rule remembers
    averaged: State  # the mean over rounds, if the method predicts with one
    velocity: State  # the server's last step, if it has momentum

    @property
    def shown(self) -> State:
        """What clients predict with."""
        return {**self.server, **self.averaged}


@dataclass(frozen=True)
class _Round:
    """What is written of every round: text. Of states only the last ones count."""

    number: int
    texts: tuple[str, ...]  # its record, masks and scores
    tested: str | None
    times: str


class RunDirectory:
    """One run's files. Use :meth:`create`, :meth:`resume` (to write) or :meth:`read`."""

    def __init__(self, path: Path, config: dict[str, Any], lock: FileLock | None) -> None:
        self.path, self.config, self._lock = path, config, lock
        self._db = _connect(path / "state.sqlite", writable=lock is not None)
        self._turn = threading.RLock()  # one connection, two threads: the writer's and the caller's
        self._logging = False
        self._waiting: dict[int, State] = {}  # personal states of the round that is under way
        self._put_off: dict[int, State] = {}  # those of rounds that are put off
        self._leaving: dict[int, State] = {}  # those of the rounds that are being written
        self._rounds: list[_Round] = []  # what is put off
        self._state_of_server: tuple[State, State] = {}, {}  # and what the rule remembers, of the last round
        self.most = MOST  # rounds that may be put off because the writer is busy
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="fedfac-writer")
        self._written: Future[None] | None = None

    @classmethod
    def create(cls, path: str | Path, config: dict[str, Any], *, partition: str | None = None) -> RunDirectory:
        """A new run in an empty or new folder."""
        path = Path(path)
        cls.check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        lock = _locked(path)
        try:
            for leftover in path.glob("state.sqlite*"):  # a start that was killed before it had a config
                leftover.unlink()
            with contextlib.closing(sqlite3.connect(path / "state.sqlite")) as db:
                db.execute(f"PRAGMA page_size={_PAGE}")
                db.executescript(_SCHEMA)
            if partition is not None:
                atomic_write(path / "partition.json", partition + "\n")
            config = {"format": FORMAT, **config}
            atomic_write(path / "config.json", json.dumps(config, indent=1) + "\n")
            return cls(path, config, lock)
        except BaseException:
            lock.release()
            raise

    @staticmethod
    def check_free(path: str | Path) -> None:
        """Fail if a new run cannot be made there; nothing is written."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; a run needs a folder of its own")
        if (path / "config.json").exists():
            raise RunError(
                f"{path} already holds a run: go on with 'fedfac resume {path}' (resume=True in Python), "
                "or choose another folder"
            )
        others = [p.name for p in path.iterdir() if p.name not in _OURS] if path.is_dir() else []
        if others:
            raise RunError(f"{path} is not empty ({', '.join(sorted(others)[:3])}): a run needs a folder of its own")

    @classmethod
    def resume(cls, path: str | Path, *, rounds: int) -> RunDirectory:
        """An existing run, locked for writing, checked from end to end, to be taken to ``rounds`` rounds."""
        path = Path(path)
        config = read_config(path)
        lock = _locked(path)
        try:
            run = cls(path, config, lock)
            run._check_whole()
            run._rebuild_metrics()
            if config.get("rounds") != rounds:
                config["rounds"] = rounds
                atomic_write(path / "config.json", json.dumps(config, indent=1) + "\n")
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def read(cls, path: str | Path) -> RunDirectory:
        """An existing run, to look at; it may be running."""
        return cls(Path(path), read_config(path), None)

    def get(self, client: int) -> State | None:
        """A client's personal state (this is the run's ``Store``)."""
        for states in (self._waiting, self._put_off, self._leaving):
            if client in states:
                return states[client]
        row = self._one("SELECT data, digest FROM personal WHERE client = ?", (client,))
        return None if row is None else self._state(f"the personal state of client {client}", *row)

    def put(self, client: int, state: State) -> None:
        """Store a client's personal state, by reference: nobody writes into it. It counts once the round is whole."""
        self._waiting[client] = state

    def commit(
        self,
        record: dict[str, Any],
        server: State,
        split: Split,
        *,
        scores: Mapping[str, list[float]],
        clients: list[dict[str, Any]] | None,
        timing: Mapping[str, float],
        memory: Mapping[str, Tensor] | None = None,
        averaged: Mapping[str, Tensor] | None = None,
        velocity: Mapping[str, Tensor] | None = None,
        put_off: bool = False,
    ) -> None:
        """Make a round whole: all of it is written, in the background, or none of it.

        It is on disk when :meth:`flush` returns; an error of the writing is raised there, or by a later commit. A round
        that is ``put_off`` is written together with the next one that is not.
        """
        masks = {layer: mask_text(mask) for layer, mask in split.masks.items()}
        rounded = {layer: [round(v, 6) for v in values] for layer, values in scores.items()}
        texts = tuple(json.dumps(value) for value in (record, masks, rounded))  # now: the caller's values may change
        number, tested = record["round"], None if clients is None else json.dumps(clients)
        remembered = dict(memory or {})
        for kind, state in ((AVERAGED, averaged), (VELOCITY, velocity)):
            remembered |= {f"{kind}{name}": tensor for name, tensor in (state or {}).items()}
        times = json.dumps({"round": number, **timing})
        self._rounds.append(_Round(number, texts, tested, times))
        self._state_of_server = server, remembered
        self._put_off, self._waiting = {**self._put_off, **self._waiting}, {}
        busy = self._written is not None and not self._written.done()
        if not put_off and (not busy or len(self._rounds) >= self.most):
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the writer have everything up to now, once it has done what it had before."""
        self._wait()
        if self._rounds:
            rounds, self._rounds = self._rounds, []
            self._leaving, self._put_off = self._put_off, {}
            self._written = self._writer.submit(self._write, rounds, *self._state_of_server, self._leaving)

    def _wait(self) -> None:
        if self._written is not None:
            written, self._written = self._written, None
            try:
                written.result()
            except BaseException:
                self._rounds, self._put_off = [], {}  # no round is written after one that was not
                raise
            self._leaving = {}

    def flush(self) -> None:
        """Wait until every committed round is on disk."""
        self._hand_over()
        self._wait()

    def _write(self, rounds: Sequence[_Round], server: State, memory: State, personal: Mapping[int, State]) -> None:
        """Rounds as one transaction, and then their lines."""
        data = to_bytes(server)
        self._begin()
        for client, state in personal.items():
            own = to_bytes(state)
            self._execute("INSERT OR REPLACE INTO personal VALUES (?, ?, ?)", (client, own, digest(own)))
        for done in rounds:
            self._execute(
                "INSERT INTO rounds VALUES (?, ?, ?, ?, ?)", (done.number, *done.texts, _digest_of(done.texts))
            )
            if done.tested is not None:
                self._execute("INSERT OR REPLACE INTO evaluation VALUES (0, ?, ?)", (done.number, done.tested))
        self._execute("INSERT OR REPLACE INTO server VALUES (0, ?, ?)", (data, digest(data)))
        if memory:
            kept = to_bytes(memory)
            self._execute(_MEMORY)
            self._execute("INSERT OR REPLACE INTO memory VALUES (0, ?, ?)", (kept, digest(kept)))
        self._execute("COMMIT")
        for name, lines in (
            ("metrics.jsonl", [r.texts[0] for r in rounds]),
            ("timing.jsonl", [r.times for r in rounds]),
        ):
            with (self.path / name).open("a") as file:
                file.write("".join(line + "\n" for line in lines))

    def rollback(self) -> None:
        """Forget what was stored since the last whole round."""
        self._waiting = {}

    def checkpoint(self) -> Checkpoint | None:
        """The last whole round, or None before the first."""
        row = self._one("SELECT round, masks FROM rounds ORDER BY round DESC LIMIT 1")
        if row is None:
            return None
        blob = self._one("SELECT data, digest FROM server")
        if blob is None:
            raise self._damaged("it has rounds but no server state")
        memory = self._memory()
        averaged: State = {}
        velocity: State = {}
        for kind, state in ((AVERAGED, averaged), (VELOCITY, velocity)):
            for name in [name for name in memory if name.startswith(kind)]:
                state[name.removeprefix(kind)] = memory.pop(name)
        server = self._state("the server's state", *blob)
        return Checkpoint(row[0], server, _masks(row[1]), memory, averaged, velocity)

    def _memory(self) -> State:
        if self._one("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'memory'") is None:
            return {}
        blob = self._one("SELECT data, digest FROM memory")
        return {} if blob is None else self._state("what the rule remembers", *blob)

    def records(self) -> list[dict[str, Any]]:
        """The records of all whole rounds."""
        return [json.loads(row[0]) for row in self._all("SELECT record FROM rounds ORDER BY round")]

    def masks(self) -> dict[int, dict[str, tuple[bool, ...]]]:
        """The masks of every round, by layer."""
        return {row[0]: _masks(row[1]) for row in self._all("SELECT round, masks FROM rounds ORDER BY round")}

    def scores(self) -> dict[int, dict[str, list[float]]]:
        """The scores (ν) behind the masks of every round in which they were decided."""
        rows = self._all("SELECT round, scores FROM rounds ORDER BY round")
        return {row[0]: json.loads(row[1]) for row in rows if row[1] != "{}"}

    def clients(self) -> list[dict[str, Any]]:
        """The last evaluation, client by client."""
        row = self._one("SELECT clients FROM evaluation")
        return [] if row is None else list(json.loads(row[0]))

    def close(self) -> None:
        """Wait for the last round, close the files and let others write."""
        try:
            self.flush()
        finally:
            self._writer.shutdown()
            if self._db.in_transaction:  # the writing failed
                self._db.rollback()
            if self._logging:
                with contextlib.suppress(sqlite3.OperationalError):  # somebody is reading: the log stays for now
                    self._db.execute("PRAGMA journal_mode=DELETE")
            self._db.close()
            if self._lock is not None:
                self._lock.release()

    def _begin(self) -> None:
        if not self._logging:  # while it is written to, others can read; afterwards it is one plain file again
            self._execute("PRAGMA journal_mode=WAL")
            self._logging = True
        if not self._db.in_transaction:
            self._execute("BEGIN IMMEDIATE")

    def _check_whole(self) -> None:
        """Look at every page, row and tensor before anything is written."""
        (size,), (pages,) = self._all("PRAGMA page_size")[0], self._all("PRAGMA page_count")[0]
        wal = self.path / "state.sqlite-wal"
        if not (wal.exists() and wal.stat().st_size) and (self.path / "state.sqlite").stat().st_size < size * pages:
            raise self._damaged("it was cut short")
        verdict = self._all("PRAGMA quick_check")
        if verdict != [("ok",)]:
            raise self._damaged(str(verdict[0][0]))
        tables = {row[0] for row in self._all("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not {"rounds", "server", "personal", "evaluation"} <= tables:
            raise self._damaged(f"it has the tables {sorted(tables)}")
        for row in self._iterate("SELECT client, data, digest FROM personal"):
            if digest(row[1]) != row[2]:
                raise self._damaged(f"the personal state of client {row[0]} does not match its checksum")
        for number, *texts, check in self._iterate("SELECT round, record, masks, scores, digest FROM rounds"):
            if _digest_of(texts) != check:
                raise self._damaged(f"the record of round {number} does not match its checksum")
        self.checkpoint()

    def _rebuild_metrics(self) -> None:
        """Write metrics.jsonl anew from the whole rounds; a kill may have cost it its last line."""
        path = self.path / "metrics.jsonl"
        text = "".join(json.dumps(record) + "\n" for record in self.records())
        found = path.read_text(errors="replace") if path.exists() else ""
        if not text.startswith(found):
            raise RunError(
                f"{path} does not say what state.sqlite says: one of the two was changed by hand or damaged. "
                "Move metrics.jsonl away to have it written anew from state.sqlite; nothing was changed."
            )
        if found != text:
            atomic_write(path, text)

    def _state(self, what: str, data: bytes, check: str) -> State:
        if digest(data) != check:
            raise self._damaged(f"{what} does not match its checksum")
        return from_bytes(data)

    def _damaged(self, why: str) -> RunError:
        return RunError(
            f"{self.path / 'state.sqlite'} is damaged ({why}). Nothing was changed; restore it from a backup, "
            "or start the run again in another folder."
        )

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """One thread at a time; what goes wrong is said in the run's words."""
        try:
            with self._turn:
                yield
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error

    def _execute(self, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        with self._guarded():
            return self._db.execute(sql, values)

    def _iterate(self, sql: str) -> Iterator[tuple[Any, ...]]:
        """Row by row, because they may be large; only while nobody writes."""
        cursor = self._execute(sql)
        while True:
            with self._guarded():
                row = cursor.fetchone()
            if row is None:
                return
            yield row

    def _all(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """All rows, in one go: a statement that is under way would keep the writer from beginning."""
        with self._guarded(), contextlib.closing(self._db.execute(sql, values)) as cursor:
            return cursor.fetchall()

    def _one(self, sql: str, values: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
        return next(iter(self._all(sql, values)), None)


_OURS = frozenset(
    {"lock", "partition.json", "state.sqlite", "state.sqlite-wal", "state.sqlite-shm", "state.sqlite-journal"}
)


def read_config(path: str | Path) -> dict[str, Any]:
    """A run's config.json, of the format that this version reads."""
    path = Path(path)
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise RunError(f"{path} holds no run: there is no {file.name} in it{_runs_in(path)}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file} cannot be read ({error}); nothing was changed") from error
    found = config.get("format") if isinstance(config, dict) else None
    if found != FORMAT:
        raise RunError(
            f"{path} was written in run format {found!r}; this version of fedfac reads format {FORMAT}. "
            f"Use the version that wrote it ({config.get('version', 'unknown') if isinstance(config, dict) else '?'})."
        )
    return dict(config)


def _runs_in(path: Path) -> str:
    """The runs of a comparison, for somebody who named the folder of all of them."""
    runs = sorted(str(found.parent) for found in path.glob("**/config.json"))
    more = f" and {len(runs) - 5} more" if len(runs) > 5 else ""
    return f". Name one of the runs in it: {', '.join(runs[:5])}{more}" if runs else ""


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for key in sorted(found.keys() | asked.keys()):
        was, now = found.get(key), asked.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from _differences(was, now, f"{within}{key}.")
        elif was != now:
            yield f"{within}{key} was {was!r}, now {now!r}"


def check_same_run(path: Path, found: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Fail unless the run in the folder is the one that is asked for; says which keys differ."""
    if different := "; ".join(_differences(found, asked)):
        todo = "Resume it with its own settings, or choose another folder; nothing was changed."
        raise RunError(f"{path} holds another run: {different}. {todo}")


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a whole file or nothing; once this returns, it survives a loss of power."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Bring the names in a folder to disk, where the system can."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _digest_of(texts: Iterable[str]) -> str:
    return digest("\n".join(texts).encode())


def _masks(text: str) -> dict[str, tuple[bool, ...]]:
    return {layer: mask_of(mask) for layer, mask in json.loads(text).items()}


def _locked(path: Path) -> FileLock:
    lock = FileLock(path / "lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise RunError(f"another process is writing to {path}: wait for it to end, or choose another folder") from error
    return lock


def _connect(path: Path, *, writable: bool) -> sqlite3.Connection:
    if not path.exists():
        raise RunError(f"{path} is missing: the run has lost its state")
    mode = "mode=rw" if writable else "mode=ro"
    if not writable and not os.access(path.parent, os.W_OK):
        mode = "mode=ro&immutable=1"  # a folder that nobody can write to needs no log beside the file
    try:
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None, check_same_thread=False
        )
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if writable:
            db.execute("PRAGMA synchronous=NORMAL")
    except sqlite3.DatabaseError as error:
        raise RunError(f"{path} is damaged ({error}). Nothing was changed; restore it from a backup.") from error
    return db
