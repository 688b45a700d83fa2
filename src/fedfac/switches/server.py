"""What the server does with the mean: its rate, and a momentum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.method import Plan


@dataclass(frozen=True)
class ServerMomentum:
    """The server takes ``momentum`` times its last step once more (:func:`fedfac.aggregate.with_momentum`)."""

    momentum: float = 0.5
    name: ClassVar[str] = "server_momentum"
    changes: ClassVar[str] = "training"
    paper: ClassVar[str] = "FedAvgM: Hsu et al. 2019"
    wrap: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"server_momentum is {self.momentum}; it is a number from 0 (off) to below 1")

    @property
    def is_on(self) -> bool:
        """Whether the last step counts."""
        return self.momentum > 0

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """A server with momentum."""
        _shares_something(plan, self.name)
        return replace(
            plan, training=replace(plan.training, server=replace(plan.training.server, momentum=self.momentum))
        )


@dataclass(frozen=True)
class ServerRate:
    """η_g: the server's rate, W ← W + η_g (mean − W)."""

    rate: float = 1.0
    name: ClassVar[str] = "server_rate"
    changes: ClassVar[str] = "training"
    paper: ClassVar[str] = "the paper's η_g; pFedMe's β"
    wrap: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf"):
            raise ConfigError(f"server_rate is {self.rate}; the server's rate is a positive number, usually 1")

    @property
    def is_on(self) -> bool:
        """Whether it is another one than 1."""
        return self.rate != 1

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """A server with this rate."""
        _shares_something(plan, self.name)
        return replace(plan, training=replace(plan.training, server=replace(plan.training.server, rate=self.rate)))


def _shares_something(plan: Plan, name: str) -> None:
    if plan.shares_nothing:
        raise ConfigError(f"{name}: this method shares nothing, so there is no server to take a step")
