"""Methods in which a client holds two copies of the model: the global one, and one of its own.

The two are one module with the parts ``shared`` and ``own``, so they train in the one local loop, phase by phase,
and are split like any other state.

- Ditto (Li et al., ICML 2021): the global stream is FedAvg; own v minimises ℓ(v) + ½λ‖v − wᵗ‖², wᵗ as received.
  Originally every client has a v from the start, both streams step by turns on the same batch (they do not depend on
  each other), and the server's mean is not weighted.
- APFL (Deng et al. 2020): a client predicts with v̄ = α·v + (1−α)·w, a mixture of *parameters*; v and α follow the
  gradient of ℓ(v̄). The original steps w, v and α in turn on every batch; here first w for the local epochs, then v
  and α against it. α is always learned, on every batch, by the run's optimiser; the authors' code mixes outputs, keeps
  α fixed unless asked, and then steps it once a round by plain gradient descent.
- pFedMe (Dinh et al., NeurIPS 2020): θ minimises ℓ(θ) + ½λ‖θ − w‖², and w follows its Moreau envelope, whose gradient
  is λ(w − θ). The original takes several θ steps per batch between two w steps; here θ and w step together, by one
  loss whose cross terms are cut. θ is kept between rounds; the authors' code starts it from w in every round, and
  trains all clients, not only the cohort. The server's β is the switch ``server_rate``.

λ under Adam, the default: the term is part of the gradient that Adam normalises. For v and θ it weighs distance against
loss. For pFedMe's w, whose gradient is λ(w − θ) and nothing else, λ cancels: it means what the paper says with
``optimizer="sgd"`` only.

A client that has never trained has no copy of its own yet: it predicts with the global model, and its own copy starts
from there. More: docs/deviations.md.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError, ModelError
from fedfac.method import Begin, Method, Phase, Plan, Prediction, Step, Training, at_least_one
from fedfac.split import Split
from fedfac.state import copy_into, references


class Twin(nn.Module):
    """Two copies of a model; ``begun`` says whether the own one has begun to be one's own."""

    begun: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shared = copy.deepcopy(model)
        self.own = copy.deepcopy(model)
        self.register_buffer("begun", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        """The client's prediction."""
        # both, rather than a branch: a GPU's graph cannot look at a number and then decide
        return torch.where(self.begun.bool(), self.predict(inputs), self.shared(inputs))

    def predict(self, inputs: Tensor) -> Tensor:
        """The prediction of a client that has a copy of its own."""
        output: Tensor = self.own(inputs)
        return output

    def begin(self) -> None:
        """The own copy starts from the global one, once."""
        if not bool(self.begun):
            copy_into(references(self.own), references(self.shared))
            self.begun.fill_(1)

    def distance(self, anchor: Mapping[str, Tensor]) -> Tensor:
        """½‖own − anchor‖² over the parameters; the anchor is not moved."""
        total = torch.zeros((), device=self.begun.device)
        for name, parameter in self.own.named_parameters():
            total = total + 0.5 * (parameter - anchor[name].detach()).square().sum()
        return total


class Mixed(Twin):
    """APFL's: the own prediction is that of α·own + (1−α)·shared."""

    def __init__(self, model: nn.Module, alpha: float) -> None:
        super().__init__(model)
        self.alpha = nn.Parameter(torch.tensor(alpha))

    def predict(self, inputs: Tensor) -> Tensor:
        """The mixture's output; the shared part is not moved by it."""
        shared = dict(self.shared.named_parameters())
        mixed = {
            name: self.alpha * own + (1 - self.alpha) * shared[name].detach()
            for name, own in self.own.named_parameters()
        }
        output: Tensor = functional_call(self.own, mixed, (inputs,))
        return output


@dataclass(frozen=True)
class Near:
    """Ditto's objective of the own model: ℓ(v) + ½λ‖v − wᵗ‖²."""

    lam: float

    def __call__(self, step: Step) -> Tensor:
        """The loss of one batch."""
        twin = _twin(step.model)
        anchor = {name: step.received[f"shared.{name}"] for name, _ in twin.own.named_parameters()}
        return step.loss(twin.own(step.inputs), step.targets) + self.lam * twin.distance(anchor)


@dataclass(frozen=True)
class Envelope:
    """pFedMe's objective of both models: θ by ℓ(θ) + ½λ‖θ − w‖², w by its Moreau envelope."""

    lam: float

    def __call__(self, step: Step) -> Tensor:
        """The loss of one batch."""
        twin = _twin(step.model)
        loss = step.loss(twin.own(step.inputs), step.targets)
        own, shared = dict(twin.own.named_parameters()), dict(twin.shared.named_parameters())
        envelope = sum((0.5 * (shared[n] - own[n].detach()).square().sum() for n in own), torch.zeros_like(loss))
        return loss + self.lam * twin.distance(shared) + self.lam * envelope


@dataclass(frozen=True)
class AsMixed:
    """Makes APFL's pair of a network."""

    alpha: float

    def __call__(self, model: nn.Module) -> nn.Module:
        """The pair."""
        return Mixed(model, self.alpha)


def ditto(*, lam: float = 0.1, personal_epochs: int | None = None) -> Method:
    """A global model, and beside it an own one that is held near it with strength λ."""
    _not_negative("lam", lam)
    at_least_one(personal_epochs=personal_epochs)

    def base(anatomy: Anatomy) -> Plan:
        shared, own = _parts(anatomy)
        fit_own = Phase(trains=own, epochs=personal_epochs, objective=Near(lam), before=_begin)
        phases = (Phase(trains=shared, objective=_global_objective, before=_begin), fit_own)
        return Plan(
            training=Training(split=Split.of(anatomy, personal=own), phases=phases, models=2),
            prediction=Prediction(newcomer=(fit_own,)),
            resolved={"personal_epochs": personal_epochs},
        )

    return Method(name="ditto", base=base, wrap=Twin, options={"lam": lam, "personal_epochs": personal_epochs})


def apfl(*, mix: float = 0.5, personal_epochs: int | None = None) -> Method:
    """A mixture of an own and the global model, whose share α (``mix`` is its start) each client learns."""
    at_least_one(personal_epochs=personal_epochs)
    if not 0 <= mix <= 1:
        raise ConfigError(f"mix is {mix}; the share of the own model is a number from 0 to 1")

    def base(anatomy: Anatomy) -> Plan:
        shared, own = _parts(anatomy)
        fit_own = Phase(trains=own, epochs=personal_epochs, objective=_mixed_objective, before=_begin)
        clamp = Phase(epochs=0, before=_clamp)  # the last step may have left [0, 1]
        phases = (Phase(trains=shared, objective=_global_objective, before=_begin), fit_own, clamp)
        return Plan(
            training=Training(split=Split.of(anatomy, personal=own), phases=phases, models=2),
            prediction=Prediction(newcomer=(fit_own, clamp)),
            resolved={"personal_epochs": personal_epochs},
        )

    return Method(name="apfl", base=base, wrap=AsMixed(mix), options={"mix": mix, "personal_epochs": personal_epochs})


def pfedme(*, lam: float = 15.0) -> Method:
    """Own models θ, and a global one that follows their Moreau envelope."""
    _not_negative("lam", lam)

    def base(anatomy: Anatomy) -> Plan:
        _, own = _parts(anatomy)
        fit_own = Phase(trains=own, objective=Envelope(lam), before=_begin)
        phases = (Phase(objective=Envelope(lam), before=_begin), Phase(epochs=0, before=_share_statistics))
        return Plan(
            training=Training(split=Split.of(anatomy, personal=own), phases=phases, models=2),
            prediction=Prediction(newcomer=(fit_own,)),
        )

    return Method(name="pfedme", base=base, wrap=Twin, options={"lam": lam})


def _mixed_objective(step: Step) -> Tensor:
    twin = _twin(step.model)
    if isinstance(twin, Mixed):
        twin.alpha.data.clamp_(0, 1)  # the gradient is taken within [0, 1], also that of a term made before this
    return step.loss(twin.predict(step.inputs), step.targets)


def _twin(model: nn.Module) -> Twin:
    if not isinstance(model, Twin):
        raise ModelError(f"this method trains two copies of a model in one; it was given a {type(model).__name__}")
    return model


def _parts(anatomy: Anatomy) -> tuple[frozenset[str], frozenset[str]]:
    """The tensors of the wrapper's part ``shared``, and all others."""
    shared = frozenset(name for name in anatomy.shapes if name.split(".")[0] == "shared")
    return shared, frozenset(anatomy.shapes) - shared


def _share_statistics(begin: Begin) -> None:
    """The shared copy is never run, so its normalisation takes the statistics that the own one has seen."""
    twin = _twin(begin.model)
    copy_into(dict(twin.shared.named_buffers()), dict(twin.own.named_buffers()))


@torch.no_grad()
def _clamp(begin: Begin) -> None:
    twin = _twin(begin.model)
    if isinstance(twin, Mixed):
        twin.alpha.clamp_(0, 1)


def _begin(begin: Begin) -> None:
    _twin(begin.model).begin()


def _global_objective(step: Step) -> Tensor:
    return step.loss(_twin(step.model).shared(step.inputs), step.targets)


def _not_negative(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name} is {value}; it is a number from 0 up")
