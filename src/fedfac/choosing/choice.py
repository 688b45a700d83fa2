"""What came out: the method, the table behind it, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfac.method import Method
from fedfac.preflight import json_like


@dataclass(frozen=True)
class Trial:
    """One candidate: how far it was trained, and how it stood when it was last looked at."""

    label: str
    figure: float | None  # on validation samples; None if it could not be trained
    behind: float | None  # the best one of the same stage; 0 for the best itself
    error: float | None  # paired standard error of that, over clients
    rounds: int  # trained in its trial, common ones included
    personal: float | None  # share of its numbers that are personal
    verdict: str


@dataclass(frozen=True)
class Choice:
    """The method to train with, and the trials that speak for it."""

    method: Method
    asked: Mapping[str, Any]  # the method as a config file has it
    reason: str
    trials: Sequence[Trial]
    metric: str  # "accuracy" or "loss", on validation samples
    cost: int  # rounds trained to find it, those that candidates have in common counted once
    layers: Mapping[str, float]  # by hidden layer, the share of updates that clients do not have in common, if asked

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a run records them."""
        return dict(
            json_like(
                {
                    "method": dict(self.asked),
                    "reason": self.reason,
                    "metric": f"validation {self.metric}",
                    "cost": self.cost,
                    "layers": dict(self.layers),
                    "trials": [vars(trial) for trial in self.trials],
                }
            )
        )

    def __str__(self) -> str:
        """The table and the reason."""
        rows = [("candidate", self.metric, "rounds", "verdict"), *map(cells, self.to_dict()["trials"])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, self.reason])


def cells(trial: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A trial as a row of a table."""
    figure = "-" if trial["figure"] is None else f"{trial['figure']:.3f}"
    return str(trial["label"]), figure, str(trial["rounds"]), str(trial["verdict"])
