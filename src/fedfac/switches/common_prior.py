"""Class frequencies that know what clients have in common: ``Prior(smoothing="learned")``.

:mod:`fedfac.switches.prior` smooths a client's counts with half a sample of every class. That is right for clients that
have a few classes each. Writers, who all write many e's and few q's, have a hundred samples for 62 classes: what they
have in common is then guessed from each one's few samples, and log π_c is mostly noise.

Here client c's frequencies are those of a Dirichlet-multinomial, π_c = (n_c + m·q) / (Σ n_c + m): its own counts n_c,
and m samples of the frequencies q that all clients have in common. q and m are shared parameters, trained like any
weight (empirical Bayes); the counts are personal and never leave the client. If m becomes large, all clients have q; if
it becomes small, each has its own.

So that training tells whether counts *predict*, a training sample does not count for itself: its own class has n − 1.
Otherwise m would go to 0, because counts always fit the samples that were counted.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError, ModelError
from fedfac.method import Begin, Phase, Plan, Step, supervised
from fedfac.switches.counting import SMOOTHING, added, class_counts, named, with_counts

COUNTS, COMMON, SAMPLES = "class_counts", "common_classes", "common_samples"
FASTER = 10.0  # Adam moves a number by its rate in a step, and log m has to go further than a weight
FURTHEST = 8.0  # log m stays within this distance from its start


def applied(plan: Plan, anatomy: Anatomy, strength: float) -> Plan:
    """Clients count before they train, and their samples do not count for themselves."""
    trains = [phase for phase in plan.training.phases if phase.epochs != 0]
    if plan.training.models > 1 or any(phase.objective is not supervised for phase in trains):
        raise ConfigError("prior_smoothing=learned is for methods that train one model by the plain objective")

    def left_out(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        honest = _LeftOut(strength)
        return tuple(replace(p, objective=honest, stacks=True) if p.objective is supervised else p for p in phases)

    prediction = replace(
        plan.prediction,
        refresh=left_out(plan.prediction.refresh),
        newcomer=left_out(plan.prediction.newcomer),
    )
    training = replace(plan.training, phases=left_out(plan.training.phases))
    return with_counts(replace(plan, training=training, prediction=prediction), named(anatomy, COUNTS), _count)


@dataclass(frozen=True)
class Wrapped:
    """Makes a copy of a network with the counts, q and m."""

    strength: float

    def __call__(self, model: nn.Module) -> nn.Module:
        """The copy; all names stay what they are."""
        return _wrapped(model, self.strength)


@torch.no_grad()
def _count(begin: Begin) -> None:
    """The client's classes; nothing where targets are real numbers."""
    counts: Tensor = getattr(begin.model, COUNTS)
    found = class_counts(begin.data, counts)
    if found is not None:
        counts.copy_(found)


@dataclass(frozen=True)
class _LeftOut:
    """The loss of the model's output in which a sample's own class has been seen once less."""

    strength: float

    def __call__(self, step: Step) -> Tensor:
        """The plain objective where there are no classes."""
        outputs = step.model(step.inputs)
        if step.targets.is_floating_point():
            return step.loss(outputs, step.targets)
        counts, common = getattr(step.model, COUNTS), _common(step.model)
        less = self.strength * (((counts - 1).clamp_min(0) + common).log() - (counts + common).log())
        shape = (1, -1, *[1] * (outputs.ndim - 2))
        own = step.targets.unsqueeze(1) == torch.arange(len(counts), device=counts.device).reshape(shape)
        return step.loss(outputs + own * less.reshape(shape), step.targets)


def _common(model: nn.Module) -> Tensor:
    """m·q, in samples of every class; m begins with the half a sample of every class that ``prior`` takes."""
    start = math.log(SMOOTHING * len(getattr(model, COMMON)))
    samples = start + FURTHEST * (FASTER / FURTHEST * getattr(model, SAMPLES)).tanh()
    result: Tensor = samples.exp() * getattr(model, COMMON).softmax(0)
    return result


def _wrapped(model: nn.Module, strength: float) -> nn.Module:
    """A copy of the model with the counts, q and m; all names stay what they are."""
    found = copy.deepcopy(model)
    classes = Anatomy.of(found).head.elements
    taken = {name for name in (COUNTS, COMMON, SAMPLES) if hasattr(found, name)}
    if taken:
        raise ModelError(
            f"the model has a tensor or attribute {sorted(taken)[0]!r} of its own: rename it, or leave prior at 0"
        )
    like = next(found.parameters())
    found.register_buffer(COUNTS, torch.zeros(classes, dtype=like.dtype, device=like.device))
    found.register_parameter(COMMON, nn.Parameter(torch.zeros(classes, dtype=like.dtype, device=like.device)))
    found.register_parameter(SAMPLES, nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device)))

    def add(module: nn.Module, inputs: Any, outputs: Any) -> Any:  # noqa: ARG001
        counts, common = getattr(module, COUNTS), _common(module)
        smoothed = counts + common
        log_prior = strength * (smoothed / smoothed.sum()).log()
        # a model that has counted nothing (its targets are real numbers) adds nothing
        return added(outputs, torch.where(counts.sum() > 0, log_prior, torch.zeros_like(log_prior)))

    found.register_forward_hook(add)
    return found
