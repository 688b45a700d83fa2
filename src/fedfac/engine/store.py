"""Where clients keep their personal states between rounds."""

from __future__ import annotations

from typing import Protocol

from fedfac.errors import RunError
from fedfac.state import State


class Store(Protocol):
    """What a client last trained of every tensor that is not shared as a whole."""

    def get(self, client: int) -> State | None:
        """The client's tensors, or None if it has never trained."""

    def put(self, client: int, state: State) -> None:
        """Replace the client's tensors."""


class MemoryStore:
    """Personal states in a dictionary, for runs without a directory."""

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def get(self, client: int) -> State | None:
        """The client's tensors, by reference: nobody writes into them."""
        return self._states.get(client)

    def put(self, client: int, state: State) -> None:
        """Keep the tensors."""
        self._states[client] = state


class Elsewhere:
    """Personal states that are on the clients' own machines: nobody here can have them."""

    def get(self, client: int) -> State | None:
        """Fail: a model without its personal part would be another one."""
        raise RunError(
            f"the personal part of client {client} is on its node, and only 'fedfac deploy export' there gives its "
            "model; here is what is shared: result.server"
        )

    def put(self, client: int, state: State) -> None:
        """Fail: nothing personal comes here."""
        raise RunError(f"the personal part of client {client} belongs on its node")
