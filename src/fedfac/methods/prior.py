"""A client's class frequencies as part of its model: ``prior``, a switch that the paper does not have.

Where clients see different classes, most of what a personal head learns is *which* classes. That needs no learning: it
can be counted. The model's outputs get ``strength`` · log π_c added, π_c the (smoothed) class frequencies of client c's
training samples, in training and in prediction alike. The weights are then left with p(x|y), which clients have in
common far more than p(y|x): local training no longer pushes the logits of absent classes down, and what is shared
stays shareable. This is the balanced softmax of Ren et al. (NeurIPS 2020) and the logit adjustment of Menon et al.
(ICLR 2021), used in federated learning by FedRoD (Chen and Chao, ICLR 2022) and FedLC (Zhang et al., ICML 2022).

π_c is counted by the client and never leaves it: a personal tensor of its model, from the first round on. Where targets
are real numbers there is nothing to count, and nothing is added.

Where the frequencies are added in predictions only, the weights know those that clients have in common (a text has many
spaces, whoever speaks), and adding log π_c would count them twice. How much of it is added is then the share from 0 to
1 that makes the client's own training samples most likely, each of them left out of the count: nothing if all clients
are alike, or if the client's weights already know its classes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedfac.anatomy import Anatomy
from fedfac.data.pool import ClientData
from fedfac.errors import ConfigError, ModelError
from fedfac.method import Begin, Method, Phase, Plan

BUFFER = "log_prior"
SMOOTHING = 0.5  # added to every class's count: Jeffreys' prior
BATCH = 512
SHARES = tuple(step / 5 for step in range(6))  # of log π_c that may be added in predictions only


def with_prior(method: Method, strength: float, *, trained: bool = True) -> Method:
    """The same method on a model that knows its client's class frequencies; at strength 0 the method itself.

    Not ``trained`` means in predictions only, and only as much of it as the client's own samples ask for.
    """
    if not 0 <= strength < float("inf"):
        raise ConfigError(f"prior is {strength}; the weight of the class frequencies is a number from 0 (off) up")
    if not strength:
        return method
    count = Phase(trains=frozenset({BUFFER}), epochs=0, before=Counted(strength) if trained else Fitted(strength))

    def plan(anatomy: Anatomy) -> Plan:
        found = method.plan(anatomy)
        return replace(
            found,
            split=replace(found.split, personal_tensors=found.split.personal_tensors | {BUFFER}),
            own=found.own | {BUFFER},
            phases=(count, *found.phases) if trained else found.phases,
            refresh=(count, *found.refresh),
            newcomer=(count, *found.newcomer),
        )

    return replace(method, plan=plan, wrap=lambda model: _wrapped(method.wrap(model) if method.wrap else model))


@dataclass(frozen=True)
class Counted:
    """Before a phase: count the client's classes."""

    strength: float

    @torch.no_grad()
    def __call__(self, begin: Begin) -> None:
        """Write strength · log π_c into the model."""
        prior: Tensor = getattr(begin.model, BUFFER)
        counts = class_counts(begin.data, prior)
        if counts is None:
            return
        counts += SMOOTHING
        prior.zero_()
        prior.copy_(self.strength * self.share(begin, counts) * (counts / counts.sum()).log())

    def share(self, begin: Begin, counts: Tensor) -> Tensor | float:
        """How much of the frequencies is added."""
        return 1.0


class Fitted(Counted):
    """The same, as far as it makes the client's own samples more likely."""

    def share(self, begin: Begin, counts: Tensor) -> Tensor:
        """The best of :data:`SHARES`; a sample's own count does not speak for it."""
        shares = torch.tensor(SHARES, dtype=torch.float64, device=counts.device)
        losses = torch.zeros_like(shares)
        fewer = counts - 1
        with begin.evaluating() as model:
            for inputs, targets in _batches(begin.data):
                outputs = model(inputs).double().movedim(1, -1).flatten(0, -2)
                own = nn.functional.one_hot(targets.flatten(), len(counts)).bool()
                added = self.strength * torch.where(own, fewer, counts).log()
                losses += torch.stack(
                    [
                        nn.functional.cross_entropy(outputs + s * added, targets.flatten(), reduction="sum")
                        for s in shares
                    ]
                )
        return shares[losses.argmin()]


def class_counts(data: ClientData, like: Tensor) -> Tensor | None:
    """How many training samples of each class a client has; None where targets are real numbers."""
    counts = torch.zeros_like(like, dtype=torch.float64)
    for _, targets in _batches(data):
        if targets.is_floating_point():
            return None
        counts += torch.bincount(targets.flatten(), minlength=len(counts))
    return counts


def _batches(data: ClientData) -> Iterator[tuple[Any, Tensor]]:
    for index in torch.split(data.train, BATCH):
        yield data.pool.batch(index)


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
    return added(outputs, getattr(module, BUFFER))


def added(outputs: Any, prior: Tensor) -> Any:
    """Outputs with one number for every class added to them; one real number for every sample stays what it is."""
    if isinstance(outputs, Tensor) and outputs.ndim == len(prior) == 1:
        return outputs
    if not isinstance(outputs, Tensor) or outputs.ndim < 2 or outputs.shape[1] != len(prior):
        came = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ModelError(
            f"prior needs outputs of shape (samples, {len(prior)}, ...), one for every class; they are {came}"
        )
    return outputs + prior.reshape(1, -1, *[1] * (outputs.ndim - 2))
