"""A warm-up: the first rounds share everything, so that personal parts start from a good common point."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.method import Plan, at_least_zero


@dataclass(frozen=True)
class Warmup:
    """The first ``rounds`` share everything, the head too; the split and the first decision come after them.

    Where all elements are trained by all anyway (:class:`~fedfac.switches.Joint`) only the first decision waits.
    """

    rounds: int = 10
    name: ClassVar[str] = "warmup"
    changes: ClassVar[Literal["training and prediction"]] = "training and prediction"
    paper: ClassVar[str] = "as in FedBABU's and FedRep's official runs; ours for elements"
    wrap: ClassVar[None] = None

    def __post_init__(self) -> None:
        at_least_zero(warmup=self.rounds)

    @property
    def is_on(self) -> bool:
        """Whether there are such rounds."""
        return self.rounds > 0

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """Everything is shared at first; what comes before the first round cannot be asked for as well."""
        training, prediction = plan.training, plan.prediction
        if not (training.split.kept or plan.by_element):
            raise ConfigError("warmup: this method shares everything in every round; a warm-up would change nothing")
        if training.models > 1:
            raise ConfigError("warmup: this method trains several models for each client, which share what they share")
        if training.split.kept:
            training = replace(training, warmup=self.rounds)
        if plan.deciding is not None:
            if plan.deciding.probe_all:
                raise ConfigError(
                    "probe_all looks at all clients before the first round; with a warm-up there is no such look"
                )
            later = replace(plan.deciding, after=self.rounds)
            if training.deciding is not None:
                training = replace(training, deciding=later)
            else:
                prediction = replace(prediction, deciding=later)
        return replace(plan, training=training, prediction=prediction)
