"""A client's class frequencies as part of its model: ``prior``, a switch that the paper does not have.

Where clients see different classes, most of what a personal head learns is *which* classes. That needs no learning: it
can be counted. The model's outputs get ``strength`` · log π_c added, π_c the (smoothed) class frequencies of client c's
training samples, in training and in prediction alike. The weights are then left with p(x|y), which clients have in
common far more than p(y|x): local training no longer pushes the logits of absent classes down, and what is shared
stays shareable. This is the balanced softmax of Ren et al. (NeurIPS 2020) and the logit adjustment of Menon et al.
(ICLR 2021), used in federated learning by FedRoD (Chen and Chao, ICLR 2022) and FedLC (Zhang et al., ICML 2022).

π_c is counted by the client and never leaves it: a personal tensor of its model, from the first round on. Where targets
are real numbers there is nothing to count, and nothing is added.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError, ModelError
from fedfac.method import Begin, Method, Phase, Plan

BUFFER = "log_prior"
SMOOTHING = 0.5  # added to every class's count: Jeffreys' prior
BATCH = 4096


def with_prior(method: Method, strength: float, *, pulled: float | None = None) -> Method:
    """The same method on a model that knows its client's class frequencies; at strength 0 the method itself.

    With ``pulled``, it is added in predictions only, and as far as clients are pulled to what all have in common: by
    that share for those that have trained, wholly for a newcomer.
    """
    if not 0 <= strength < float("inf"):
        raise ConfigError(f"prior is {strength}; the weight of the class frequencies is a number from 0 (off) up")
    if not strength:
        return method
    whole = _counted(strength)
    part = whole if pulled is None else _counted(strength * pulled)

    def plan(anatomy: Anatomy) -> Plan:
        found = method.plan(anatomy)
        return replace(
            found,
            split=replace(found.split, personal_tensors=found.split.personal_tensors | {BUFFER}),
            own=found.own | {BUFFER},
            phases=(whole, *found.phases) if pulled is None else found.phases,
            refresh=(part, *found.refresh),
            newcomer=(whole, *found.newcomer),
        )

    return replace(method, plan=plan, wrap=lambda model: _wrapped(method.wrap(model) if method.wrap else model))


def _counted(strength: float) -> Phase:
    return Phase(trains=frozenset({BUFFER}), epochs=0, before=Counted(strength))


class Counted:
    """Before a phase: count the client's classes."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    @torch.no_grad()
    def __call__(self, begin: Begin) -> None:
        """Write strength · log π_c into the model."""
        prior: Tensor = getattr(begin.model, BUFFER)
        counts = torch.full_like(prior, SMOOTHING, dtype=torch.float64)
        for index in torch.split(begin.data.train, BATCH):
            targets = begin.data.pool.batch(index)[1]
            if targets.is_floating_point():
                return  # real targets have no classes
            counts += torch.bincount(targets.flatten(), minlength=len(counts))
        prior.copy_(self.strength * (counts / counts.sum()).log())


def _wrapped(model: nn.Module) -> nn.Module:
    """A copy of the model with the buffer, added to its outputs; all names stay what they are."""
    found = copy.deepcopy(model)
    classes = Anatomy.of(found).head.elements
    if BUFFER in dict(found.named_buffers(recurse=False)):
        raise ModelError(f"the model has a buffer {BUFFER!r} of its own: rename it, or leave prior at 0")
    tensor = next(found.parameters())
    found.register_buffer(BUFFER, torch.zeros(classes, dtype=tensor.dtype, device=tensor.device))
    found.register_forward_hook(_add)
    return found


def _add(module: nn.Module, inputs: Any, outputs: Any) -> Any:  # noqa: ARG001
    prior: Tensor = getattr(module, BUFFER)
    if isinstance(outputs, Tensor) and outputs.ndim == len(prior) == 1:  # one real number for every sample
        return outputs
    if not isinstance(outputs, Tensor) or outputs.ndim < 2 or outputs.shape[1] != len(prior):
        came = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ModelError(
            f"prior needs outputs of shape (samples, {len(prior)}, ...), one for every class; they are {came}"
        )
    return outputs + prior.reshape(1, -1, *[1] * (outputs.ndim - 2))
