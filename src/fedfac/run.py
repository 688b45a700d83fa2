"""Run directory: what was asked for, what came out of every round, and the state to go on from.

    config.json     what was asked for, and which model and data it was for
    partition.json  which sample is whose
    metrics.jsonl   one line a round, the same bytes for the same run
    timing.jsonl    seconds, kept apart because they differ from run to run
    state.sqlite    records, splits, the server's state, what the rule remembers, every client's personal state, and
                    what it takes to go back to a few earlier rounds (:mod:`fedfac.earlier`)

A round is one transaction of ``state.sqlite``: a kill at any moment leaves a whole round. It is written by a thread of
its own while the next rounds train. Training does not wait for it: rounds that end while it is busy are put off and
share the next transaction, so a kill costs no more than what trained during one writing. At most ``MOST`` rounds and
``WRITE_BEHIND`` bytes wait, or one round if that is more: beyond it, training waits for the disk.
``metrics.jsonl`` is written from it. Tensors are safetensors bytes with a checksum; there is no pickle. One
process at a time may write (an operating-system lock, which dies with its process).

A run directory is private: a folder made here can be entered by its owner only, and its files are the owner's to read
and write, whatever the umask is.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from fedfac import earlier
from fedfac.database import Database
from fedfac.disk import PRIVATE, append, atomic_write, disk_errors, json_text, private_folder
from fedfac.errors import RunError
from fedfac.run_files import FORMAT, Record, Tested, check_same_run, masks_from, parsed, read_config, split_of
from fedfac.split import Split, mask_text
from fedfac.state import State, digest, nbytes, to_bytes

__all__ = ["Checkpoint", "RunDirectory", "atomic_write", "check_same_run", "read_config", "split_of"]

MOST = 8  # rounds that may wait to be written
WRITE_BEHIND = 256 << 20  # bytes of personal states that may: some seconds of a slow disk
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
        self._db = Database(path / "state.sqlite", writable=lock is not None)
        self._waiting: dict[int, State] = {}  # personal states of the round that is under way
        self._put_off: dict[int, State] = {}  # those of rounds that are put off
        self._leaving: dict[int, State] = {}  # those of the rounds that are being written
        self._rounds: list[_Round] = []  # what is put off
        self._state_of_server: tuple[State, State] = {}, {}  # and what the rule remembers, of the last round
        # a node keeps what it had in the last rounds only: the server must not be further behind
        self.most = 1 if "remote" in config else MOST  # rounds that may be put off because the writer is busy
        self._every = 1 if "remote" in config else earlier.EVERY  # without personal states a round is small
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="fedfac-writer")
        self._written: Future[None] | None = None

    @classmethod
    def create(cls, path: str | Path, config: dict[str, Any], *, partition: str | None = None) -> RunDirectory:
        """A new run in an empty or new folder."""
        path = Path(path)
        cls.check_free(path)
        private_folder(path)
        lock = _locked(path)
        try:
            with disk_errors(path):
                Database.create(path / "state.sqlite", _SCHEMA)
            if partition is not None:
                atomic_write(path / "partition.json", partition + "\n")
            config = {"format": FORMAT, **config}
            atomic_write(path / "config.json", json_text(config, indent=1) + "\n")
            return cls(path, config, lock)
        except BaseException:
            lock.release()
            raise

    @staticmethod
    def check_free(path: str | Path) -> None:
        """Fail if a new run cannot be made there; nothing is written."""
        path = Path(path)
        with disk_errors(path):
            if path.exists() and not path.is_dir():
                raise RunError(f"{path} is a file; a run needs a folder of its own")
            above = next((parent for parent in path.parents if parent.exists()), path)
            if not above.is_dir():
                raise RunError(f"{above} is a file, so {path} cannot be a folder: choose another one")
            if (path / "config.json").exists():
                raise RunError(
                    f"{path} already holds a run: go on with 'fedfac resume {path}' (resume=True in Python), "
                    "or choose another folder"
                )
            others = [p.name for p in path.iterdir() if not _is_ours(p.name)] if path.is_dir() else []
        if others:
            raise RunError(f"{path} is not empty ({', '.join(sorted(others)[:3])}): a run needs a folder of its own")

    @classmethod
    def resume(cls, path: str | Path, *, rounds: int, from_round: int | None = None) -> RunDirectory:
        """An existing run, locked for writing, checked from end to end, to be taken to ``rounds`` rounds.

        With ``from_round``, from after that round: what came later is given up.
        """
        path = Path(path)
        config = read_config(path)
        lock = _locked(path)
        run: RunDirectory | None = None
        try:
            run = cls(path, config, lock)
            run._check_whole()
            if from_round is not None:
                run._check_back(from_round)
            run._rebuild_metrics()
            if from_round is not None:
                run._go_back(from_round)
            run._rebuild_timing()
            _make_private(path)
            if config.get("rounds") != rounds:
                config["rounds"] = rounds
                atomic_write(path / "config.json", json_text(config, indent=1) + "\n")
        except BaseException:
            if run is not None:
                run._db.close()
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
        row = self._db.one("SELECT data, digest FROM personal WHERE client = ?", (client,))
        return None if row is None else self._db.state(f"the personal state of client {client}", *row)

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
        texts = tuple(json_text(value) for value in (record, masks, rounded))  # now: the caller's values may change
        number, tested = record["round"], None if clients is None else json_text(clients)
        remembered = dict(memory or {})
        for kind, state in ((AVERAGED, averaged), (VELOCITY, velocity)):
            remembered |= {f"{kind}{name}": tensor for name, tensor in (state or {}).items()}
        times = json_text({"round": number, **timing})
        self._rounds.append(_Round(number, texts, tested, times))
        self._state_of_server = server, remembered
        room = max(WRITE_BEHIND, _bytes(self._waiting))
        self._put_off, self._waiting = {**self._put_off, **self._waiting}, {}
        if self._written is not None and self._written.done():
            self._wait()
        free = self._written is None or len(self._rounds) >= self.most
        if self.unwritten_bytes > room or (free and not put_off):
            self._hand_over()
        if self.unwritten_bytes > room:
            self._wait()

    @property
    def unwritten_bytes(self) -> int:
        """The bytes of personal states that were committed, and are not on disk yet."""
        return _bytes(self._put_off) + _bytes(self._leaving)

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
                self._rounds, self._put_off, self._leaving = [], {}, {}  # no round is written after one that was not
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
        sizes = {client: nbytes(state) for client, state in personal.items()}
        earlier.keep(self._db, sizes, every=self._every)
        for client, state in personal.items():
            own = to_bytes(state)
            self._db.execute("INSERT OR REPLACE INTO personal VALUES (?, ?, ?)", (client, own, digest(own)))
        for done in rounds:
            self._db.execute(
                "INSERT INTO rounds VALUES (?, ?, ?, ?, ?)", (done.number, *done.texts, _digest_of(done.texts))
            )
            if done.tested is not None:
                self._db.execute("INSERT OR REPLACE INTO evaluation VALUES (0, ?, ?)", (done.number, done.tested))
        self._db.execute("INSERT OR REPLACE INTO server VALUES (0, ?, ?)", (data, digest(data)))
        if memory:
            kept = to_bytes(memory)
            self._db.execute(_MEMORY)
            self._db.execute("INSERT OR REPLACE INTO memory VALUES (0, ?, ?)", (kept, digest(kept)))
        earlier.reached(self._db, rounds[-1].number)
        self._db.execute("COMMIT")
        append(self.path / "metrics.jsonl", _lines(done.texts[0] for done in rounds))
        append(self.path / "timing.jsonl", _lines(done.times for done in rounds))

    def _begin(self) -> None:
        self._db.begin()

    def rollback(self) -> None:
        """Forget what was stored since the last whole round."""
        self._waiting = {}

    def checkpoint(self) -> Checkpoint | None:
        """The last whole round, or None before the first."""
        row = self._db.one("SELECT round, masks FROM rounds ORDER BY round DESC LIMIT 1")
        if row is None:
            return None
        blob = self._db.one("SELECT data, digest FROM server")
        if blob is None:
            raise self._db.damaged("it has rounds but no server state")
        memory = self._memory()
        averaged: State = {}
        velocity: State = {}
        for kind, state in ((AVERAGED, averaged), (VELOCITY, velocity)):
            for name in [name for name in memory if name.startswith(kind)]:
                state[name.removeprefix(kind)] = memory.pop(name)
        server = self._db.state("the server's state", *blob)
        return Checkpoint(row[0], server, self._masks(row[1]), memory, averaged, velocity)

    def _masks(self, text: Any) -> dict[str, tuple[bool, ...]]:
        return masks_from(text, f"the masks in {self._db.path}")

    def _memory(self) -> State:
        if "memory" not in self._db.tables():
            return {}
        blob = self._db.one("SELECT data, digest FROM memory")
        return {} if blob is None else self._db.state("what the rule remembers", *blob)

    def earlier_rounds(self) -> list[int]:
        """The rounds before the last one from which the run can be resumed (``from_round``)."""
        return earlier.rounds(self._db)

    def records(self) -> list[dict[str, Any]]:
        """The records of all whole rounds."""
        found = []
        for number, text, masks, _ in self._whole_rounds():
            record = parsed(text, Record, f"the record of round {number} in {self._db.path}")
            if record["round"] != number or record.get("split", {}).keys() != self._masks(masks).keys():
                raise self._db.damaged(f"the record of round {number} is not of that round, or of other layers")
            found.append(record)
        return found

    def masks(self) -> dict[int, dict[str, tuple[bool, ...]]]:
        """The masks of every round, by layer."""
        return {number: self._masks(masks) for number, _, masks, _ in self._whole_rounds()}

    def scores(self) -> dict[int, dict[str, list[float]]]:
        """The scores (ν) behind the masks of every round in which they were decided."""
        what = f"the scores in {self._db.path}"
        found = {}
        for number, _, masks, text in self._whole_rounds():
            scores = parsed(text, dict[str, list[float]], what)
            elements = {layer: len(mask) for layer, mask in self._masks(masks).items()}
            if any(elements.get(layer) != len(values) for layer, values in scores.items()):
                raise self._db.damaged(f"the scores of round {number} are of other elements than its masks")
            if scores:
                found[number] = scores
        return found

    def clients(self) -> list[dict[str, Any]]:
        """The last evaluation, client by client."""
        row = self._db.one("SELECT clients FROM evaluation")
        return [] if row is None else list(parsed(row[0], list[Tested], f"the evaluation in {self._db.path}"))

    def _whole_rounds(self) -> list[tuple[int, str, str, str]]:
        """(number, record, masks, scores) of every round, if they are what was written."""
        found = []
        for number, *texts, check in self._db.all("SELECT round, record, masks, scores, digest FROM rounds ORDER BY 1"):
            if not all(isinstance(text, str) for text in texts) or _digest_of(texts) != check:
                raise self._db.damaged(f"the record of round {number} does not match its checksum")
            found.append((number, *texts))
        return found

    def close(self) -> None:
        """Wait for the last round, close the files and let others write."""
        try:
            self.flush()
        finally:
            self._writer.shutdown()
            self._db.close()
            if self._lock is not None:
                self._lock.release()

    def _check_whole(self) -> None:
        """Look at every page, row and tensor before anything is written."""
        self._db.check_pages()
        tables = self._db.tables()
        if not {"rounds", "server", "personal", "evaluation"} <= tables:
            raise self._db.damaged(f"it has the tables {sorted(tables)}")
        for client, data, check in self._db.iterate("SELECT client, data, digest FROM personal"):
            self._db.state(f"the personal state of client {client}", data, check)
        self._whole_rounds()
        self.checkpoint()

    def _rebuild_metrics(self) -> None:
        """Write metrics.jsonl anew from the whole rounds; a kill may have cost it its last line."""
        path = self.path / "metrics.jsonl"
        text = _lines(record for _, record, _, _ in self._whole_rounds())
        found = path.read_text(errors="replace") if path.exists() else ""
        if not text.startswith(found):
            raise RunError(
                f"{path} does not say what state.sqlite says: one of the two was changed by hand or damaged. "
                "Move metrics.jsonl away to have it written anew from state.sqlite; nothing was changed."
            )
        if found != text:
            atomic_write(path, text)

    def _rebuild_timing(self) -> None:
        """Take out of timing.jsonl what is no line of a whole round: half a line of a kill, rounds that are gone."""
        path = self.path / "timing.jsonl"
        found = path.read_text(errors="replace") if path.exists() else ""
        known = {number for number, *_ in self._whole_rounds()}
        text = _lines(json.dumps(line) for line in timing_lines(found) if line["round"] in known)
        if text != found:
            atomic_write(path, text)

    def _last(self) -> int | None:
        (last,) = self._db.all("SELECT max(round) FROM rounds")[0]
        return None if last is None else int(last)

    def _check_back(self, round: int) -> None:
        """Fail unless the run can go back to that round, or is there; nothing has been changed by then."""
        if round != self._last():
            earlier.check(self._db, round)

    def _go_back(self, round: int) -> None:
        """Give up what came after a round. A kill in between leaves the run as it was, or as it is afterwards.

        The lines go first: of a run that was not taken back yet, a resume writes them anew.
        """
        if round == self._last():
            return
        atomic_write(
            self.path / "metrics.jsonl",
            _lines(record for number, record, _, _ in self._whole_rounds() if number <= round),
        )
        earlier.restore(self._db, round)


def timing_lines(text: str) -> list[dict[str, Any]]:
    """The lines of a timing.jsonl that are whole: seconds by step, and ``round``."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(RunError):
            values = parsed(line, dict[str, float], "a line")
            if "round" in values and all(map(math.isfinite, values.values())):
                found.append(values)
    return found


_STATE = "state.sqlite"
_OURS = frozenset({"lock", "partition.json", *(f"{_STATE}{tail}" for tail in ("", "-wal", "-shm", "-journal"))})
_PRIVATE = _OURS | {"config.json", "metrics.jsonl", "timing.jsonl", "failed.txt"}


def _is_ours(name: str) -> bool:
    """Whether a start that was killed before it had a config may have left this."""
    return name in _OURS or (name.startswith(".") and name.endswith(".tmp"))


def _make_private(path: Path) -> None:
    """Take from others what an earlier version let them read; the folder stays as its owner made it.

    No file is opened: closing one of SQLite's would end this process's locks on it; a reader could take the log away.
    """
    with disk_errors(path):
        for name in _PRIVATE:
            if (path / name).exists():
                (path / name).chmod(PRIVATE)


def _lines(texts: Iterable[str]) -> str:
    return "".join(f"{text}\n" for text in texts)


def _digest_of(texts: Iterable[str]) -> str:
    return digest("\n".join(texts).encode())


def _bytes(states: Mapping[int, State]) -> int:
    return sum(nbytes(state) for state in states.values())


def _locked(path: Path) -> FileLock:
    lock = FileLock(path / "lock", blocking=False, mode=PRIVATE)
    with disk_errors(path / "lock"):
        try:
            lock.acquire()
        except Timeout as error:
            raise RunError(
                f"another process is writing to {path}: wait for it to end, or choose another folder"
            ) from error
    return lock
