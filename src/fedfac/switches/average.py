"""Predictions with a mean of the server's states over rounds (Polyak and Juditsky 1992, over rounds)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.method import Plan


@dataclass(frozen=True)
class Average:
    """Clients predict with a running mean of the server's states; they train on from the last one.

    ``weight`` is that of the past: at .9 the mean spans about ten rounds.
    """

    weight: float = 0.9
    name: ClassVar[str] = "average"
    changes: ClassVar[str] = "prediction"
    paper: ClassVar[str] = "Polyak and Juditsky 1992, over rounds"
    wrap: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not 0 <= self.weight < 1:
            raise ConfigError(f"average is {self.weight}; the weight of the past is a number from 0 (off) to below 1")

    @property
    def is_on(self) -> bool:
        """Whether the past has a weight."""
        return self.weight > 0

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """Predictions with the mean."""
        if plan.shares_nothing:
            raise ConfigError("average: this method shares nothing, so there are no states of a server to average")
        return replace(plan, prediction=replace(plan.prediction, average=self.weight))
