"""Where clients keep their personal states between rounds."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Protocol

import torch

from fedfac.errors import RunError
from fedfac.state import State, nbytes


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


class CachedStore:
    """A store whose states stay in the device's memory, the least recently used ones leaving when it is full.

    Evaluation reads every client's state: by reference, not from a file and back.
    """

    def __init__(self, inner: Store, device: torch.device, limit: int | None = None) -> None:
        self.inner, self.device = inner, device
        self.limit = room_for_states(device) if limit is None else limit
        self._recent: OrderedDict[int, State] = OrderedDict()
        self._bytes = 0

    def get(self, client: int) -> State | None:
        """The client's tensors, by reference."""
        if client in self._recent:
            self._recent.move_to_end(client)
            return self._recent[client]
        found = self.inner.get(client)
        if found is not None:
            found = {name: tensor.to(self.device) for name, tensor in found.items()}
            self._remember(client, found)
        return found

    def put(self, client: int, state: State) -> None:
        """Keep the tensors, here and there."""
        self.inner.put(client, state)
        self._remember(client, state)

    def _remember(self, client: int, state: State) -> None:
        self._bytes -= nbytes(self._recent.pop(client, {}))
        self._recent[client] = state
        self._bytes += nbytes(state)
        while self._bytes > self.limit:
            self._bytes -= nbytes(self._recent.popitem(last=False)[1])


def room_for_states(device: torch.device) -> int:
    """A quarter of a GPU's memory, a sixteenth of the machine's otherwise."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1]) // 4
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16
    except (AttributeError, ValueError):
        return 1 << 29


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
