"""Methods with one global model, and none at all.

- FedAvg (McMahan et al., AISTATS 2017): everything is shared, the server takes the n_k-weighted mean.
- FedProx (Li et al., MLSys 2020): the local loss gets ½μ‖w − wᵗ‖², which holds clients near the global model wᵗ
  that they received. It is added to the *mean* loss of a batch; normalisation statistics are not held.
- FedAvg+ and FedProx+ (paper 5.2): the same training; before a client predicts, a copy of the global model is
  fine-tuned on its data and thrown away afterwards. The paper does not say for how long: ``finetune_epochs``.
- Local only: nothing is shared; the baseline that keeps everybody honest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fedfac.errors import ConfigError
from fedfac.method import Method, Phase, Plan, Step, at_least_one, supervised
from fedfac.split import Split


def fedavg(*, eta_g: float = 1.0, server_momentum: float = 0.0) -> Method:
    """One global model: W ← W + η_g (Σ n_k W_k / Σ n_k − W). A newcomer gets the global model.

    With ``server_momentum`` it is FedAvgM (Hsu et al. 2019).
    """
    return _global("fedavg", Phase(), eta_g, {"server_momentum": server_momentum})


def fedavg_plus(*, finetune_epochs: int | None = None, eta_g: float = 1.0, server_momentum: float = 0.0) -> Method:
    """FedAvg whose global model each client fine-tunes (by default for the run's local epochs) to predict."""
    return _finetuned("fedavg+", Phase(), finetune_epochs, eta_g, {"server_momentum": server_momentum})


def fedprox(*, mu: float = 0.01, eta_g: float = 1.0) -> Method:
    """FedAvg with a proximal term. The paper's grid for μ: 1, 0.5, 0.1, 0.01, 0.001."""
    return _global("fedprox", Phase(objective=proximal(mu), stacks=True), eta_g, {"mu": mu})


def fedprox_plus(*, mu: float = 0.01, finetune_epochs: int | None = None, eta_g: float = 1.0) -> Method:
    """FedProx whose global model each client fine-tunes, by the same objective, to predict."""
    return _finetuned("fedprox+", Phase(objective=proximal(mu), stacks=True), finetune_epochs, eta_g, {"mu": mu})


def local() -> Method:
    """Every client trains a model of its own from the common start; nothing is ever sent."""
    return Method(
        name="local",
        plan=lambda anatomy: Plan(split=Split.of(anatomy, personal=anatomy.shapes), newcomer=(Phase(),)),
    )


class proximal:  # noqa: N801  (an objective is used like a function)
    """ℓ(w) + ½μ‖w − wᵗ‖² over the parameters."""

    def __init__(self, mu: float) -> None:
        if not 0 <= mu < float("inf"):
            raise ConfigError(f"mu is {mu}; the weight of the proximal term is a number from 0 (FedAvg) up")
        self.mu = mu

    def __call__(self, step: Step) -> Tensor:
        """The loss of one batch."""
        loss = supervised(step)
        for name, parameter in step.model.named_parameters():  # a frozen one is where it was: it adds nothing
            loss = loss + 0.5 * self.mu * (parameter - step.received[name]).square().sum()
        return loss


def _global(name: str, phase: Phase, eta_g: float, options: dict[str, Any]) -> Method:
    return Method(
        name=name,
        plan=lambda anatomy: Plan(split=Split.of(anatomy), phases=(phase,)),
        server_rate=eta_g,
        server_momentum=options.get("server_momentum", 0.0),
        options={**options, "eta_g": eta_g},
    )


def _finetuned(name: str, phase: Phase, epochs: int | None, eta_g: float, options: dict[str, Any]) -> Method:
    at_least_one(finetune_epochs=epochs)
    tuning = (replace(phase, epochs=epochs),)
    return Method(
        name=name,
        plan=lambda anatomy: Plan(split=Split.of(anatomy), phases=(phase,), refresh=tuning, newcomer=tuning),
        server_rate=eta_g,
        server_momentum=options.get("server_momentum", 0.0),
        options={**options, "finetune_epochs": epochs, "eta_g": eta_g},
        predicts=frozenset({"finetune_epochs"}),
        trains_as=name.removesuffix("+"),
    )
