"""Class frequencies: a client's own, as part of its model.

Where clients see different classes, most of what a personal head learns is *which* classes. That needs no learning: it
can be counted. The model's outputs get ``strength`` · log π_c added, π_c the (smoothed) class frequencies of client c's
training samples, in training and in prediction alike. The weights are then left with p(x|y), which clients have in
common far more than p(y|x): local training no longer pushes the logits of absent classes down, and what is shared
stays shareable. This is the balanced softmax of Ren et al. (NeurIPS 2020) and the logit adjustment of Menon et al.
(ICLR 2021), used in federated learning by FedRoD (Chen and Chao, ICLR 2022) and FedLC (Zhang et al., ICML 2022).

π_c is counted by the client and never leaves it: a personal tensor of its model, from the first round on. Where targets
are real numbers there is nothing to count, and nothing is added. How counts are smoothed: half a sample of every class
(``"fixed"``), or as much of what clients have in common as they find best (``"learned"``,
:mod:`fedfac.switches.common_prior`).

The network is wrapped before a method makes copies of it: each copy then has the frequencies.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError, ModelError, did_you_mean
from fedfac.method import Begin, Plan, Wrap
from fedfac.switches import common_prior
from fedfac.switches.counting import SMOOTHING, added, class_counts, named, with_counts

BUFFER = "log_prior"
SMOOTHINGS = ("fixed", "learned")


@dataclass(frozen=True)
class Prior:
    """``strength`` · log π_c is added to client c's outputs, the frequencies of its classes, which it never sends."""

    strength: float = 1.0
    smoothing: str = "fixed"
    name: ClassVar[str] = "prior"
    changes: ClassVar[str] = "training and prediction"
    paper: ClassVar[str] = "balanced softmax: Ren et al., NeurIPS 2020"

    def __post_init__(self) -> None:
        if not 0 <= self.strength < float("inf"):
            raise ConfigError(
                f"prior is {self.strength}; the weight of the class frequencies is a number from 0 (off) up"
            )
        if self.smoothing not in SMOOTHINGS:
            raise ConfigError(f"prior_smoothing is {self.smoothing!r}. {did_you_mean(self.smoothing, SMOOTHINGS)}")

    @property
    def is_on(self) -> bool:
        """Whether anything is added."""
        return self.strength > 0

    @property
    def wrap(self) -> Wrap:
        """The network with the frequencies added to its outputs."""
        return common_prior.Wrapped(self.strength) if self.smoothing == "learned" else wrapped

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """Clients count before they train, and before they predict."""
        if self.smoothing == "learned":
            return common_prior.applied(plan, anatomy, self.strength)
        return with_counts(plan, named(anatomy, BUFFER), Counted(self.strength))


@dataclass(frozen=True)
class Counted:
    """Before a phase: count the client's classes."""

    strength: float

    @torch.no_grad()
    def __call__(self, begin: Begin) -> None:
        """Write strength · log π_c into the model, wherever it has a place for it."""
        for module in begin.model.modules():
            if BUFFER in module._buffers:
                self._write(begin, module.get_buffer(BUFFER))

    def _write(self, begin: Begin, prior: Tensor) -> None:
        counts = class_counts(begin.data, prior)
        if counts is None:
            return
        counts += SMOOTHING
        prior.zero_()
        prior.copy_(self.strength * 1.0 * (counts / counts.sum()).log())


def wrapped(model: nn.Module) -> nn.Module:
    """A copy of the model with the buffer, added to its outputs; all names stay what they are."""
    found = copy.deepcopy(model)
    classes = Anatomy.of(found).head.elements
    if hasattr(found, BUFFER):
        raise ModelError(f"the model has a tensor or attribute {BUFFER!r} of its own: rename it, or leave prior at 0")
    tensor = next(found.parameters())
    found.register_buffer(BUFFER, torch.zeros(classes, dtype=tensor.dtype, device=tensor.device))
    found.register_forward_hook(_add)
    return found


def _add(module: nn.Module, inputs: Any, outputs: Any) -> Any:  # noqa: ARG001
    return added(outputs, getattr(module, BUFFER))
