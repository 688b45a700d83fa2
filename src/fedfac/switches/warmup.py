"""A warm-up: the first rounds share everything, so that personal parts start from a good common point."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

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
    changes: ClassVar[str] = "training and prediction"
    paper: ClassVar[str] = "ours"
    wrap: ClassVar[None] = None

    def __post_init__(self) -> None:
        at_least_zero(warmup=self.rounds)

    @property
    def is_on(self) -> bool:
        """Whether there are such rounds."""
        return self.rounds > 0

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """Everything is shared at first; what comes before the first round cannot be asked for as well."""
        training = plan.training
        if not (training.split.kept or plan.by_element):
            raise ConfigError("warmup: this method shares everything in every round; a warm-up would change nothing")
        if training.models > 1:
            raise ConfigError("warmup: this method trains several models for each client, which share what they share")
        if plan.deciding is not None and plan.deciding.probe_all:
            raise ConfigError(
                "probe_all looks at all clients before the first round; with a warm-up there is no such look"
            )
        return warmed_up(plan, self.rounds)


def warmed_up(plan: Plan, rounds: int) -> Plan:
    """The plan with rounds that share everything before the split and the first decision."""
    training, prediction = plan.training, plan.prediction
    if training.split.kept - training.own:
        training = replace(training, warmup=rounds)
    if training.deciding is not None:
        training = replace(training, deciding=replace(training.deciding, after=rounds, probe_all=False))
    elif prediction.deciding is not None:
        prediction = replace(prediction, deciding=replace(prediction.deciding, after=rounds, probe_all=False))
    return replace(plan, training=training, prediction=prediction)
