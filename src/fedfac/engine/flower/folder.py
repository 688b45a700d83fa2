"""A node's own folder: what is personal, what waits between two messages, and what has been answered.

    FOLDER/RUN/CLIENT/
      ledger          which round was trained and evaluated last, for which request, and which masks went with it
      kept-000007     the client's own tensors after round 7
      held-000008     what round 8 has trained, until the server knows which elements are shared
      model           the last model that was evaluated: what the server sent, and for which round

Every file is written whole or not at all, with a checksum: kill the client app, the SuperNode or the machine at any
moment, and the last whole state is there. Folders and files can be read by their owner only (0700, 0600); those of
an earlier version are mended when they are used. A state is kept by its round. The server says which round of this
client counted last, so a part that got lost on its way, or a server that fell back to its last whole round, finds the
state that belongs to it. Two are kept at most, that one and the newest, and one held; both of a round go together.
Of earlier runs a node keeps so many (:class:`~fedfac.engine.flower.settings.Keeps`).
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, unquote

import msgspec
from filelock import FileLock, Timeout

from fedfac.engine.flower.consent import Allowed
from fedfac.engine.flower.ledger import Ledger
from fedfac.engine.flower.settings import Keeps
from fedfac.errors import RunError
from fedfac.run import atomic_write
from fedfac.state import State, digest, from_bytes, to_bytes

RUN = re.compile(r"[0-9a-f]{16}")
DAY = 24 * 3600
Header = TypeVar("Header")


class Own(msgspec.Struct):
    """Nothing is said of what a client keeps."""


class Held(msgspec.Struct):
    """What is known of a round that waits for its masks."""

    samples: Annotated[int, msgspec.Meta(ge=1)]
    split: str
    allowed: Allowed  # which masks
    once: bool  # whether the method decides once in the run


class About(msgspec.Struct):
    """How the last model was made."""

    round: int
    last: int
    client: int
    masks: dict[str, str]
    shape: list[int]
    classes: int | None
    run: dict[str, Any]
    node: dict[str, Any]


class Folder:
    """One client's files of one run."""

    def __init__(self, base: Path, run: str, client: str) -> None:
        if not RUN.fullmatch(run):  # it comes over the network: it must not lead to another folder
            raise RunError(f"a run is called by 16 hexadecimal digits; the server called it {run[:40]!r}")
        self.base = base
        self.path = base / run / quote(client, safe="").replace(".", "%2E")

    def lock(self) -> FileLock:
        """One message at a time."""
        self._make_private()
        return FileLock(self.path / "lock", mode=0o600)

    def ledger(self) -> Ledger:
        """What has been answered in this run."""
        found = self._read("ledger", Ledger)
        if found is not None:
            return found[0]
        return Ledger(trained=max(map(_number, self.path.glob("kept-*")), default=-1))  # of an earlier version

    def write_ledger(self, ledger: Ledger) -> None:
        """Remember it, before the answer leaves."""
        self._write("ledger", ledger, {})

    def kept(self, round: int) -> State | None:
        """The client's own tensors after that round."""
        found = self._read(f"kept-{round:06d}", Own)
        return None if found is None else found[1]

    def keep(self, round: int, state: State, *, last: int) -> None:
        """Store the client's own tensors; of the older ones only those of the round ``last`` that counted stay."""
        self._write(f"kept-{round:06d}", Own(), state)
        self._remove("kept", besides=(round, last))
        self._remove("held", besides=(round,))

    def held(self, round: int) -> tuple[Held, State] | None:
        """What was trained in that round and waits for the split."""
        return self._read(f"held-{round:06d}", Held)

    def hold(self, round: int, values: Held, state: State) -> None:
        """Put what was trained aside until the split is known; what was put aside before goes."""
        self._write(f"held-{round:06d}", values, state)
        self._remove("held", besides=(round,))

    def model(self) -> tuple[About, State] | None:
        """The last model that was evaluated: how it is built, and the server's state."""
        return self._read("model", About)

    def set_model(self, values: About, server: State) -> None:
        """Remember what the server sent for the evaluation."""
        self._write("model", values, server)

    def _remove(self, kind: str, *, besides: tuple[int, ...]) -> None:
        for path in self.path.glob(f"{kind}-*"):
            if _number(path) not in besides:
                path.unlink(missing_ok=True)

    def _make_private(self) -> None:
        """Make the folders, for their owner only, and mend those and the files of an earlier version."""
        self.path.mkdir(parents=True, exist_ok=True)
        folders = [self.path.parent, self.path]
        if all(RUN.fullmatch(path.name) for path in self.base.iterdir()):  # else it is not only ours
            folders.append(self.base)
        _allow(folders, 0o700)
        _allow((path for path in self.path.iterdir() if path.is_file()), 0o600)

    def _write(self, name: str, values: msgspec.Struct, state: State) -> None:
        body = msgspec.json.encode(values) + b"\n" + to_bytes(state)
        if not self.path.exists():
            self._make_private()
        atomic_write(self.path / name, digest(body).encode() + b"\n" + body)
        _allow([self.path / name], 0o600)

    def _read(self, name: str, kind: type[Header]) -> tuple[Header, State] | None:
        path = self.path / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        check, _, body = content.partition(b"\n")
        if digest(body).encode() != check:
            raise RunError(f"{path} is damaged: it does not match its checksum. Restore it from a backup")
        values, _, data = body.partition(b"\n")
        try:
            return msgspec.json.decode(values, type=kind), from_bytes(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, RunError) as error:
            raise RunError(f"{path} was not written by this version of fedfac ({error})") from error


def _allow(paths: Iterable[Path], mode: int) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another message has just removed it
            if path.stat().st_mode & 0o777 != mode:
                path.chmod(mode)


def found_in(base: Path) -> list[tuple[str, str]]:
    """(run, client) of everything in a node's folder that has a model, newest first."""
    models = sorted(base.glob("*/*/model"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [(path.parts[-3], unquote(path.parts[-2])) for path in models if RUN.fullmatch(path.parts[-3])]


def prune(base: Path, current: str, keeps: Keeps) -> list[str]:
    """Remove runs that are beyond what a node keeps, the oldest first; returns their names.

    The ``current`` run stays, whatever is in use stays, and so does the run with the newest model.
    """
    newest = {run for run, _ in found_in(base)[:1]}
    runs = [path for path in base.iterdir() if RUN.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    removed, count, size = [], 0, 0
    for path in sorted(runs, key=lambda path: (path.name == current, _used(path)), reverse=True):
        own = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        beyond = count + 1 > keeps.runs or size + own > keeps.bytes or time.time() - _used(path) > keeps.days * DAY
        if beyond and path.name != current and path.name not in newest and not _in_use(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
        else:
            count, size = count + 1, size + own
    return removed


def _used(run: Path) -> float:
    """When something was last written in a run."""
    return max((path.stat().st_mtime for path in run.rglob("*") if path.is_file()), default=run.stat().st_mtime)


def _in_use(run: Path) -> bool:
    for path in run.glob("*/lock"):
        try:
            FileLock(path, blocking=False).acquire().lock.release()
        except Timeout:
            return True
    return False


def _number(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else -1
