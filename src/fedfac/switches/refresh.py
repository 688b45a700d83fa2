"""A refresh: before it predicts, a copy of the client's model trains what is its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError, did_you_mean
from fedfac.method import PERSONAL, Phase, Plan, at_least_zero

TRAINS = ("personal", "head", "all")


@dataclass(frozen=True)
class Refresh:
    """Before it predicts, a copy of the client's model trains for ``epochs`` (None: the run's), and is thrown away.

    Parameters
    ----------
    epochs
        0 is off.
    trains
        ``"personal"``: what the split calls personal, the rest frozen; ``"head"``: that and the head; ``"all"``:
        everything (a fine-tuned copy, as in FedAvg+). A new client that adapts trains the same.
    shrinkage
        The fraction by which refreshed weights return to their start: for shared numbers, to what all clients have
        trained together.
    """

    epochs: int | None = 3
    trains: str = "personal"
    shrinkage: float = 0.0
    name: ClassVar[str] = "refresh"
    changes: ClassVar[str] = "prediction"
    paper: ClassVar[str] = "McMahan et al. 2017, fine-tuned; ours for elements"
    wrap: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.epochs is not None:
            at_least_zero(refresh=self.epochs)
        if self.trains not in TRAINS:
            raise ConfigError(f"refresh_trains is {self.trains!r}. {did_you_mean(self.trains, TRAINS)}")
        Phase(shrinkage=self.shrinkage)  # refuses what is no fraction

    @property
    def is_on(self) -> bool:
        """Whether anything is trained."""
        return self.epochs != 0

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """The phases before a prediction, and those of a new client."""
        if plan.prediction.refresh:
            raise ConfigError("refresh: this method has steps of its own before it predicts")
        phases = self._phases(plan, anatomy)
        refresh = tuple(p if p.epochs == 0 else replace(p, epochs=self.epochs) for p in phases)
        prediction = replace(plan.prediction, refresh=refresh, newcomer=phases)
        return replace(plan, prediction=prediction, resolved={**plan.resolved, "refresh": self.epochs})

    def _phases(self, plan: Plan, anatomy: Anatomy) -> tuple[Phase, ...]:
        if self.trains == "personal":
            return self._by_the_method(plan)
        objectives = {phase.objective for phase in plan.training.phases if phase.epochs != 0}
        if plan.training.models > 1:
            raise ConfigError(
                f"refresh_trains={self.trains}: this method trains several models for each client; "
                "allowed here: refresh_trains=personal"
            )
        if len(objectives) != 1:
            raise ConfigError(f"refresh_trains={self.trains}: this method trains by more than one objective")
        trained = next(phase for phase in plan.training.phases if phase.epochs != 0)
        whole = self.trains == "all"
        return (
            Phase(
                trains=None if whole else PERSONAL,
                also=frozenset() if whole else anatomy.last(1),
                objective=trained.objective,
                stacks=trained.stacks,
                shrinkage=self.shrinkage,
            ),
        )

    def _by_the_method(self, plan: Plan) -> tuple[Phase, ...]:
        """What the method's own rule for a new client trains: its personal part."""
        phases = plan.prediction.newcomer
        if not any(phase.epochs != 0 for phase in phases):
            raise ConfigError(
                "refresh: nothing of this method is a client's own and can be trained; allowed: "
                "refresh_trains=head or refresh_trains=all"
            )
        return tuple(p if p.epochs == 0 else replace(p, shrinkage=self.shrinkage) for p in phases)
