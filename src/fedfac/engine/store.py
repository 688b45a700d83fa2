"""Where clients keep their personal states between rounds."""

from __future__ import annotations

from typing import Protocol

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
