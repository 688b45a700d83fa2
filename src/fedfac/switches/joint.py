"""Joint training: all clients train all elements, and each makes some of them its own before it predicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.method import Plan
from fedfac.split import Split


@dataclass(frozen=True)
class Joint:
    """Personal elements are trained by all clients together, and a client makes its own of them in the refresh.

    Then a client keeps no weights from round to round, a new client has all that the others have, and the split says
    nothing about training: whatever Λ and τ are, the training is that of FedAvg. (A split that is decided once, before
    the first round, has a training of its own: that decision.)
    """

    on: bool = True
    name: ClassVar[str] = "joint"
    changes: ClassVar[str] = "training and prediction"
    paper: ClassVar[str] = "ours (FedFac+)"
    wrap: ClassVar[None] = None

    @property
    def is_on(self) -> bool:
        """Whether elements are trained by all."""
        return self.on

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """The split by element belongs to predictions; with it goes a decision that is made anew every round."""
        training, split = plan.training, plan.training.split
        if not plan.by_element:
            raise ConfigError("joint: this method splits no layer by element, so there is nothing to train together")
        anew = replace(split, anew=True)
        rules = plan.prediction.newcomer_rules if anew.kept else ("adapt",)  # each member would be the global model
        prediction = replace(plan.prediction, newcomer_rules=rules)
        if training.deciding is not None and not training.deciding.every_round:
            return replace(plan, training=replace(training, split=anew), prediction=prediction)
        whole = Split(split.shapes, split.personal_tensors)
        return replace(
            plan,
            training=replace(training, split=whole, deciding=None),
            prediction=replace(prediction, split=anew, deciding=training.deciding),
        )
