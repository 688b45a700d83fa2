"""The settings of a run: everything but its model, data and method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fedfac import evaluate
from fedfac.engine.lanes import LaneEngine
from fedfac.engine.protocol import Engine
from fedfac.observers import Observer
from fedfac.training import Local


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything about a run but its model, data, method and local training; see :func:`fit`."""

    rounds: int = 50
    rate: float | None = None
    cohort: int | None = None
    cohort_of_one: bool = False
    seed: int = 0
    evaluate_every: int | None = None
    evaluate_from: int = 1
    evaluate_clients: int | None = None
    metrics: Mapping[str, evaluate.Metric] | Sequence[str] | None = None
    newcomers: float = 0.0
    out: str | Path | None = None
    resume: bool = False
    from_round: int | None = None
    lanes: int | None = None
    device: str | torch.device | None = None
    precision: str = "auto"
    layout: str = "auto"
    deterministic: bool = False
    stack: bool | None = None
    engine: Callable[[LaneEngine], Engine] | None = None
    origin: Mapping[str, Any] | None = None
    choice: Mapping[str, Any] | None = None  # how the method was chosen, where 'auto' chose it
    observers: Sequence[Observer] = ()
    beside: LaneEngine | None = None  # whose lanes may be used: of a session that takes turns with this one


def divided(asked: Mapping[str, Any], *, without: Sequence[str] = ()) -> tuple[Local, Settings]:
    """Arguments by name, as those of local training and all others."""
    names = {entry.name for entry in fields(Local)}
    return (
        Local(**{name: value for name, value in asked.items() if name in names}),
        Settings(**{name: value for name, value in asked.items() if name not in {*names, *without}}),
    )
