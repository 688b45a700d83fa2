"""A node's own folder: what is personal, and what waits between two messages.

    FOLDER/RUN/CLIENT/
      kept-000007     the client's own tensors after round 7
      held-000008     what round 8 has trained, until the server knows which elements are shared
      model           the last model that was evaluated: what the server sent, and for which round

Every file is written whole or not at all, with a checksum: kill the client app, the SuperNode or the machine at any
moment, and the last whole state is there. A state is kept by its round. The server says which round of this client
counted last, so a part that got lost on its way, or a server that fell back to its last whole round, finds the state
that belongs to it. Two are kept at most: that one and the newest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from filelock import FileLock

from fedfac.errors import RunError
from fedfac.run import atomic_write
from fedfac.split import Mask, mask_text
from fedfac.state import State, digest, from_bytes, to_bytes

RUN = re.compile(r"[0-9a-f]{16}")


class Folder:
    """One client's files of one run."""

    def __init__(self, base: Path, run: str, client: str) -> None:
        if not RUN.fullmatch(run):  # it comes over the network: it must not lead to another folder
            raise RunError(f"a run is called by 16 hexadecimal digits; the server called it {run[:40]!r}")
        self.path = base / run / quote(client, safe="").replace(".", "%2E")

    def lock(self) -> FileLock:
        """One message at a time."""
        self.path.mkdir(parents=True, exist_ok=True)
        return FileLock(self.path / "lock")

    def kept(self, round: int) -> State | None:
        """The client's own tensors after that round."""
        found = self._read(f"kept-{round:06d}")
        return None if found is None else found[1]

    def keep(self, round: int, state: State, *, last: int, masks: Mapping[str, Mask]) -> None:
        """Store the client's own tensors; of the older ones only those of the round ``last`` that counted stay.

        ``masks`` are those for which the shared part of this round leaves the node. A second time they must be the
        same: two different parts of one round would tell more than either.
        """
        texts = {layer: mask_text(mask) for layer, mask in masks.items()}
        before = self._read(f"kept-{round:06d}")
        if before is not None and before[0]["masks"] != texts:
            raise RunError(f"the part of round {round} has already been sent for another split")
        self._write(f"kept-{round:06d}", {"masks": texts}, state)
        for path in self.path.glob("kept-*"):
            if _number(path) not in (round, last):
                path.unlink(missing_ok=True)
        for path in self.path.glob("held-*"):
            if _number(path) < round:
                path.unlink(missing_ok=True)

    def held(self, round: int) -> tuple[dict[str, Any], State] | None:
        """What was trained in that round and waits for the split."""
        return self._read(f"held-{round:06d}")

    def hold(self, round: int, values: dict[str, Any], state: State) -> None:
        """Put what was trained aside until the split is known."""
        self._write(f"held-{round:06d}", values, state)

    def model(self) -> tuple[dict[str, Any], State] | None:
        """The last model that was evaluated: how it is built, and the server's state."""
        return self._read("model")

    def set_model(self, values: dict[str, Any], server: State) -> None:
        """Remember what the server sent for the evaluation."""
        self._write("model", values, server)

    def _write(self, name: str, values: dict[str, Any], state: State) -> None:
        body = json.dumps(values).encode() + b"\n" + to_bytes(state)
        self.path.mkdir(parents=True, exist_ok=True)
        atomic_write(self.path / name, digest(body).encode() + b"\n" + body)

    def _read(self, name: str) -> tuple[dict[str, Any], State] | None:
        path = self.path / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        check, _, body = content.partition(b"\n")
        if digest(body).encode() != check:
            raise RunError(f"{path} is damaged: it does not match its checksum. Restore it from a backup")
        values, _, data = body.partition(b"\n")
        return json.loads(values), from_bytes(data)


def found_in(base: Path) -> list[tuple[str, str]]:
    """(run, client) of everything in a node's folder that has a model, newest first."""
    models = sorted(base.glob("*/*/model"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [(path.parts[-3], unquote(path.parts[-2])) for path in models if RUN.fullmatch(path.parts[-3])]


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
