"""A client's own normalisation.

A batch normalisation trains with the means and variances of the batch, which are the client's own, and predicts with
running ones, which are shared: a mean over clients. Where clients differ, each of them predicts with a network that it
has never trained. Before a client predicts (and before the refresh), its statistics therefore move a share of the way
from the shared ones to those of its own training samples: at .5 as if every second sample were its own. FedBN keeps
all of the normalisation personal, in training as well (Li et al., ICLR 2021); mixing the statistics of two sources is
due to Schneider et al. (NeurIPS 2020).

Training is not changed and nothing leaves a client. A model without such statistics is left alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn.modules.batchnorm import _NormBase

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.method import Begin, Phase, Plan

BUFFERS = ("running_mean", "running_var")
BATCH = 512


@dataclass(frozen=True)
class Statistics:
    """Before a client predicts, its running means and variances move this share of the way to its own samples'."""

    share: float = 0.5
    name: ClassVar[str] = "statistics"
    changes: ClassVar[str] = "prediction"
    paper: ClassVar[str] = "Schneider et al., NeurIPS 2020"
    wrap: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(
                f"statistics is {self.share}; the share of a client's own is a number from 0 (none) to 1 (all)"
            )

    @property
    def is_on(self) -> bool:
        """Whether statistics move."""
        return self.share > 0

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """Clients measure before they predict; a model without such statistics is left alone."""
        names = frozenset(name for name in anatomy.norms if name.endswith(BUFFERS))
        if not names:
            return plan
        first = Phase(trains=names, epochs=0, before=Measured(self.share))
        prediction = replace(
            plan.prediction,
            refresh=(first, *plan.prediction.refresh),
            newcomer=(first, *plan.prediction.newcomer),
        )
        return replace(plan, prediction=prediction)


@dataclass(frozen=True)
class Measured:
    """Before a phase: measure the statistics of the client's training samples."""

    share: float

    @torch.no_grad()
    def __call__(self, begin: Begin) -> None:
        """Move the model's running statistics."""
        data = begin.data
        if data.size < 2:
            return  # one sample has no variance
        with begin.evaluating() as model:
            norms = [part for part in model.modules() if isinstance(part, _NormBase) and part.track_running_stats]
            before = [_Before(module) for module in norms]
            for module in norms:
                module.train()
            try:
                for number, index in enumerate(torch.tensor_split(data.train, math.ceil(data.size / BATCH)), start=1):
                    for module in norms:
                        module.momentum = 1 / number  # the mean over batches, of equal sizes but for one sample
                    model(data.pool.batch(index)[0])
            finally:
                for one in before:
                    one.mix(self.share)


class _Before:
    """A normalisation as it was."""

    def __init__(self, module: _NormBase) -> None:
        self.module, self.momentum = module, module.momentum
        self.buffers = {name: tensor.clone() for name, tensor in module.named_buffers(recurse=False)}

    def mix(self, share: float) -> None:
        """The mean and variance of a mixture: ``share`` of what was measured since, the rest as before."""
        mean, variance = (self.module.get_buffer(name) for name in BUFFERS)
        old_mean, old_variance = (self.buffers[name] for name in BUFFERS)
        between = (mean - old_mean).square() * (share * (1 - share))
        variance.mul_(share).add_(old_variance, alpha=1 - share).add_(between)
        mean.mul_(share).add_(old_mean, alpha=1 - share)
        self.module.get_buffer("num_batches_tracked").copy_(self.buffers["num_batches_tracked"])
        self.module.momentum = self.momentum
