"""FedProx's term for any method: ½μ‖w − wᵗ‖² holds a client near what it received (Li et al., MLSys 2020).

It is added to the *mean* loss of a batch, over the parameters; statistics of a normalisation are not held. It is for
federations in which weights run away from round to round. What a refresh does is not held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.method import Phase, Plan, Step, supervised

NEAR = 0.01  # μ where it is left to a network that normalises nothing


@dataclass(frozen=True)
class proximal:  # noqa: N801  (an objective is used like a function)
    """ℓ(w) + ½μ‖w − wᵗ‖² over the parameters; ℓ is an objective itself."""

    mu: float
    objective: Callable[[Step], Tensor] = supervised

    def __post_init__(self) -> None:
        if not 0 <= self.mu < float("inf"):
            raise ConfigError(f"mu is {self.mu}; the weight of the proximal term is a number from 0 (FedAvg) up")

    def __call__(self, step: Step) -> Tensor:
        """The loss of one batch."""
        loss = self.objective(
            step
        )  # first: an objective may set a parameter right (APFL's share), and that one is held
        # A frozen one is where it was: it adds nothing. Few kernels a tensor: they are most of what it costs on a GPU.
        moved = [
            F.mse_loss(parameter, step.received[name], reduction="sum")
            for name, parameter in step.model.named_parameters()
        ]
        return loss + 0.5 * self.mu * torch.stack(moved).sum()


@dataclass(frozen=True)
class Proximal:
    """FedProx's term in a method's training, whatever its objectives are.

    ``mu`` None leaves it to the network: .01 where nothing is normalised, else 0. Behind a normalisation the length of
    weights does not matter; without one they may grow from round to round until the network is no good.
    """

    mu: float | None = None
    name: ClassVar[str] = "proximal"
    changes: ClassVar[str] = "training"
    paper: ClassVar[str] = "FedProx: Li et al., MLSys 2020"
    wrap: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.mu is not None and not 0 <= self.mu < float("inf"):
            raise ConfigError(
                f"proximal is {self.mu}; the weight of the proximal term is a number from 0 (off) up, or left out: "
                "by the network"
            )

    @property
    def is_on(self) -> bool:
        """Whether there is a term, or may be one."""
        return self.mu != 0

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """Every phase of the training with the term."""
        mu = self.mu if self.mu is not None else 0 if anatomy.norms else NEAR
        phases = tuple(_held(phase, mu) if mu and phase.epochs != 0 else phase for phase in plan.training.phases)
        return replace(plan, training=replace(plan.training, phases=phases), resolved={**plan.resolved, "proximal": mu})


def _held(phase: Phase, mu: float) -> Phase:
    stacks = phase.stacks or phase.objective is supervised
    return replace(phase, objective=proximal(mu, phase.objective), stacks=stacks)
