"""Roster: clients that a server knows by name only. Their data is where they are, and stays there.

A :class:`~fedfac.rounds.Session` runs on a federation, whose clients it trains in this process, or on a roster, whose
clients it reaches through the engine that ``connect`` makes. The rounds are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedfac.engine.protocol import Engine
from fedfac.errors import DataError
from fedfac.method import Plan

Connect = Callable[[nn.Module, Plan, Sequence[Mapping[str, Any]]], Engine]  # (model, plan, records, which grow)


@dataclass(frozen=True)
class Roster:
    """Names in the order of the clients' numbers, and how they are reached."""

    names: Sequence[str]
    classes: int | None
    fingerprint: str  # what is known of the data, so that a run is not resumed on other data by mistake
    connect: Connect
    about: Mapping[str, Any]  # plain values for the record of a run: how it is found again

    def __post_init__(self) -> None:
        if not self.names:
            raise DataError("a roster needs at least one client; this one has none")
        twice = sorted({name for name in self.names if list(self.names).count(name) > 1})
        if twice:
            raise DataError(f"two clients have the name {twice[0]!r}: give each a name of its own")

    def __len__(self) -> int:
        return len(self.names)

    def partition_json(self) -> None:
        """Nobody but the clients knows who has which samples."""
