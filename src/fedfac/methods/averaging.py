"""Methods with one global model, and none at all.

- FedAvg (McMahan et al., AISTATS 2017): everything is shared, the server takes the n_k-weighted mean. The local
  optimiser is the run's, Adam by default and anew in every round; in the paper it is SGD.
- FedProx (Li et al., MLSys 2020): the local loss gets ½μ‖w − wᵗ‖², which holds clients near the global model wᵗ
  that they received. It is added to the *mean* loss of a batch; normalisation statistics are not held. Under Adam, the
  default, μ weighs distance against loss and does not scale a step. The paper draws clients with probability n_k/n and
  takes a plain mean, and lets slow ones do less; here cohorts are uniform, means weighted, and all do the same epochs.
- FedAvg+ and FedProx+ (paper 5.2): the same training; before a client predicts, a copy of the global model is
  fine-tuned on its data and thrown away afterwards. The paper does not say for how long: ``finetune_epochs``.
- Local only: nothing is shared; the baseline that keeps everybody honest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.method import Method, Phase, Plan, Step, at_least_one, supervised
from fedfac.split import Split

NEAR = 0.01  # μ where it is left to a network that normalises nothing


def fedavg(*, average: float = 0.0, server_momentum: float = 0.0, eta_g: float = 1.0) -> Method:
    """One global model: W ← W + η_g (Σ n_k W_k / Σ n_k − W). A newcomer gets the global model.

    Not in the paper, and off by default, here and below: predictions with an ``average`` of the server's states over
    rounds, and a server with momentum (FedAvgM, Hsu et al. 2019): FedFac+'s switches, as FedPer has them.
    """
    return _global("fedavg", Phase(), **locals())


def fedavg_plus(
    *,
    finetune_epochs: int | None = None,
    finetune_lr: float = 1.0,
    shrinkage: float = 0.0,
    average: float = 0.0,
    server_momentum: float = 0.0,
    eta_g: float = 1.0,
) -> Method:
    """FedAvg whose global model each client fine-tunes (by default for the run's local epochs) to predict.

    Also FedFac+'s: ``finetune_lr``, a share of the run's learning rate, and ``shrinkage``: then it moves that share of
    the way back to the global model.
    """
    return _global("fedavg+", Phase(), **locals())


def fedprox(*, mu: float = 0.01, average: float = 0.0, server_momentum: float = 0.0, eta_g: float = 1.0) -> Method:
    """FedAvg with a proximal term. The paper's grid for μ: 1, 0.5, 0.1, 0.01, 0.001."""
    return _global("fedprox", Phase(objective=proximal(mu), stacks=True), **locals())


def fedprox_plus(
    *,
    mu: float = 0.01,
    finetune_epochs: int | None = None,
    finetune_lr: float = 1.0,
    shrinkage: float = 0.0,
    average: float = 0.0,
    server_momentum: float = 0.0,
    eta_g: float = 1.0,
) -> Method:
    """FedProx whose global model each client fine-tunes, by the same objective, to predict."""
    return _global("fedprox+", Phase(objective=proximal(mu), stacks=True), **locals())


def local() -> Method:
    """Every client trains a model of its own from the common start; nothing is ever sent."""
    return Method(
        name="local",
        plan=lambda anatomy: Plan(split=Split.of(anatomy, personal=anatomy.shapes), newcomer=(Phase(),)),
    )


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
        # A frozen one is where it was: it adds nothing. Few kernels a tensor: they are most of what it costs on a GPU.
        moved = [
            F.mse_loss(parameter, step.received[name], reduction="sum")
            for name, parameter in step.model.named_parameters()
        ]
        return self.objective(step) + 0.5 * self.mu * torch.stack(moved).sum()


def held_near(method: Method, mu: float | None) -> Method:
    """The same method with FedProx's term in its training, whatever its objectives are; what a refresh does stays.

    None leaves it to the network: ``NEAR`` where nothing is normalised, else 0. Behind a normalisation the length of
    weights does not matter; without one they may grow from round to round until the network is no good.
    """
    proximal(mu or 0)  # refuses what is no weight
    if mu == 0:
        return method

    def plan(anatomy: Anatomy) -> Plan:
        found = method.plan(anatomy)
        weight = mu if mu is not None else 0 if anatomy.norms else NEAR
        phases = tuple(held(p, weight) if weight else p for p in found.phases)
        return replace(found, phases=phases, settled={**found.settled, "mu": weight})

    def held(phase: Phase, weight: float) -> Phase:
        if phase.epochs == 0:
            return phase
        stacks = phase.stacks or phase.objective is supervised
        return replace(phase, objective=proximal(weight, phase.objective), stacks=stacks)

    return replace(method, plan=plan)


def _global(name: str, phase: Phase, *, average: float, server_momentum: float, eta_g: float, **own: Any) -> Method:
    """One global model; a name with a + is that of a method that fine-tunes it."""
    epochs: int | None = own.get("finetune_epochs")
    at_least_one(finetune_epochs=epochs)
    tuned = replace(phase, epochs=epochs, gentle=own.get("finetune_lr", 1.0), back=own.get("shrinkage", 0.0))
    tuning = (tuned,) if name.endswith("+") else ()

    def plan(anatomy: Anatomy) -> Plan:
        return Plan(
            split=Split.of(anatomy),
            average=average,
            phases=(phase,),
            refresh=tuning,
            newcomer=tuning,
            settled={"finetune_epochs": epochs},
        )

    return Method(
        name=name,
        plan=plan,
        server_rate=eta_g,
        server_momentum=server_momentum,
        options={**own, "average": average, "server_momentum": server_momentum, "eta_g": eta_g},
        predicts=frozenset({"finetune_epochs", "finetune_lr", "shrinkage", "average"}),
        trains_as=name.removesuffix("+"),
    )
