"""Training runs for studies: on the embedded digits, or on files in ``--data-dir``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfac import experiment
from fedfac.config import Config, merged
from fedfac.result import Result
from fedfac.studies.frame import Ask

Tables = Mapping[str, Mapping[str, Any]]

QUICK: Tables = {
    "data": {"name": "digits", "clients": 24},
    "model": {"name": "cnn"},
    "train": {"rounds": 10, "cohort": 8, "epochs": 1, "batch_size": 8, "lr": 3e-3},
}
FULL: Tables = {
    "data": {"name": "digits", "clients": 60},
    "model": {"name": "cnn"},
    "train": {"rounds": 60, "cohort": 8, "epochs": 3, "batch_size": 16, "lr": 1e-3},
}


@dataclass(frozen=True)
class Level:
    """How different clients are: a title, and the keys of [data] that make it so."""

    title: str
    data: Mapping[str, Any]


def dirichlet(*alphas: float) -> list[Level]:
    """Label skew by Dir(π), the paper's levels for CIFAR-10; the smaller π, the fewer classes a client sees."""
    return [Level(f"Dir({alpha:g})", {"partition": "dirichlet", "alpha": alpha}) for alpha in alphas]


IID = Level("IID", {"partition": "iid"})


def config(ask: Ask, level: Level, method: Mapping[str, Any], seed: int, **train: Any) -> Config:
    """One run of a study."""
    tables = merged(
        QUICK if ask.quick else FULL, {"data": level.data, "method": method, "train": {"seed": seed, **train}}
    )
    return Config.from_dict(tables)


def train(ask: Ask, asked: Config) -> Result:
    """The run, in memory."""
    return experiment.run(asked, lanes=ask.lanes, device=ask.device)


def in_words(ask: Ask, seeds: Sequence[int]) -> str:
    """The setting of a study, for its page."""
    tables = QUICK if ask.quick else FULL
    data, local = tables["data"], tables["train"]
    return (
        f"{data['clients']} clients of the embedded digits (1,797 images of 8 × 8 pixels), network `cnn`, "
        f"{local['rounds']} rounds, {local['cohort']} clients a round, {_many(local['epochs'], 'local epoch')} in "
        f"batches of {local['batch_size']}, Adam at {local['lr']:g}, {_many(len(seeds), 'seed')}."
    )


def _many(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number > 1)}"
