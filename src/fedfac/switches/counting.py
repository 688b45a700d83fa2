"""Counting a client's classes, and adding numbers for classes to outputs: what both kinds of frequencies need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedfac.anatomy import Anatomy
from fedfac.data.pool import ClientData
from fedfac.errors import ModelError
from fedfac.method import Begin, Phase, Plan

SMOOTHING = 0.5  # added to every class's count: Jeffreys' prior
BATCH = 512


def named(anatomy: Anatomy, buffer: str) -> frozenset[str]:
    """The tensors of that name, in the network and in all copies that a method makes of it."""
    return frozenset(name for name in anatomy.shapes if name.split(".")[-1] == buffer)


def with_counts(plan: Plan, names: frozenset[str], before: Callable[[Begin], Any]) -> Plan:
    """The plan with clients that count (into personal tensors) before they train, predict or adapt."""
    count = Phase(trains=names, epochs=0, before=before)
    training, prediction = plan.training, plan.prediction
    phases = tuple(
        replace(phase, trains=phase.trains | names) if isinstance(phase.trains, frozenset) else phase
        for phase in training.phases
    )
    training = replace(
        training,
        split=replace(training.split, personal_tensors=training.split.personal_tensors | names),
        own=training.own | names,
        phases=(count, *phases),
    )
    split = prediction.split
    prediction = replace(
        prediction,
        split=None if split is None else replace(split, personal_tensors=split.personal_tensors | names),
        refresh=(count, *prediction.refresh),
        newcomer=(count, *prediction.newcomer),
    )
    return replace(plan, training=training, prediction=prediction)


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
