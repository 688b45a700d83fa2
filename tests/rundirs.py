"""Run directories without a training: a config as a run would write it, and rounds by hand."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from fedfac.run import RunDirectory
from fedfac.split import Split

CONFIG: dict[str, Any] = {
    "version": "0",
    "rounds": 99,
    "settings": {
        "method": {"name": "fedper"},
        "local": {
            "epochs": 1,
            "batch_size": 8,
            "lr": 0.1,
            "optimizer": "sgd",
            "momentum": 0.0,
            "weight_decay": 0.0,
            "loss": "cross_entropy",
        },
        "cohort": 2,
        "seed": 0,
        "evaluate_every": 1,
        "newcomers": 0.0,
        "clients": 9,
        "data": "none",
    },
    "tensors": {"w": [[3], "float32"]},
    "split": Split({"w": (3,)}).to_json(),
    "names": None,
    "origin": None,
}


def new_directory(path: Path, **more: Any) -> RunDirectory:
    """An empty run."""
    return RunDirectory.create(path, CONFIG | more)


def client_row(name: str) -> dict[str, Any]:
    """A client's row of an evaluation."""
    return {"client": name, "samples": 4, "loss": 0.5, "accuracy": 0.75}


def whole(path: Path) -> dict[str, list[Any]]:
    """Every row of what a run is, tensors as their bytes: what it keeps of earlier rounds depends on the clock."""
    with closing(sqlite3.connect(path / "state.sqlite")) as db:
        there = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        names = sorted(there & {"rounds", "server", "memory", "personal", "evaluation"})
        return {name: db.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall() for name in names}


def own(value: float, size: int = 3) -> dict[str, torch.Tensor]:
    """A client's state."""
    return {"w": torch.full((size,), float(value))}
