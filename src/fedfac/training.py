"""The one local loop: what a client does in a round (ClientUpdate in the paper's algorithms)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfac.data.pool import ClientData
from fedfac.errors import ConfigError, ModelError, did_you_mean
from fedfac.method import PERSONAL, Begin, Loss, Phase, Step, weighted
from fedfac.noise import Seeded, how_it_draws
from fedfac.numerics import CPU, Numerics
from fedfac.seeds import generator, stream
from fedfac.split import Split
from fedfac.state import State, copy_into, is_finite, references

OPTIMIZERS = ("adam", "sgd")
BETAS = (0.9, 0.999)


@dataclass(frozen=True, kw_only=True)
class Local:
    """How clients train: the paper uses Adam with rate 1e-3, reset in every round."""

    epochs: int = 5
    batch_size: int = 32
    lr: float = 1e-3
    optimizer: str = "adam"
    momentum: float = 0.0
    weight_decay: float = 0.0
    loss: Loss = F.cross_entropy

    def __post_init__(self) -> None:
        if any(not isinstance(n, int) or n < 1 for n in (self.epochs, self.batch_size)):
            raise ConfigError(
                f"epochs is {self.epochs} and batch_size {self.batch_size}; both are whole numbers from 1 up"
            )
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ConfigError(f"lr is {self.lr}; the learning rate is a positive number")
        if not (self.weight_decay >= 0 and 0 <= self.momentum < 1):
            raise ConfigError(
                f"weight_decay is {self.weight_decay} and momentum {self.momentum}; "
                "allowed: from 0 up, and from 0 to below 1"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"optimizer is {self.optimizer!r}. {did_you_mean(self.optimizer, OPTIMIZERS)}")
        if self.optimizer == "adam" and self.momentum:
            raise ConfigError("momentum goes with optimizer 'sgd'; Adam has its own")

    def describe(self) -> dict[str, Any]:
        """Plain values, for the record of a run."""
        loss = str(getattr(self.loss, "__name__", type(self.loss).__name__))
        return {name: value for name, value in vars(self).items() if name != "loss"} | {"loss": loss}

    def scaled(self, share: float) -> Local:
        """The same with another learning rate."""
        return self if share == 1 else replace(self, lr=self.lr * share)

    def make_optimizer(self, parameters: Sequence[nn.Parameter], *, capturable: bool = False) -> torch.optim.Optimizer:
        """A fresh optimiser: its state does not outlive a phase."""
        if self.optimizer == "adam":
            return torch.optim.Adam(
                parameters, lr=self.lr, betas=BETAS, weight_decay=self.weight_decay, fused=True, capturable=capturable
            )
        return torch.optim.SGD(
            parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=True
        )


@dataclass(frozen=True)
class Outcome:
    """What a client reports of its training: numbers only."""

    samples: int
    loss: float
    problem: str | None = None


@dataclass(frozen=True)
class Work:
    """One phase of one client's training, ready for its steps."""

    model: nn.Module
    data: ClientData
    phase: Phase
    local: Local
    received: State
    context: Any
    trained: list[nn.Parameter]
    held: list[tuple[Tensor, Tensor, Tensor]]  # tensors of which some elements stay: tensor, which, their values
    draws: torch.Generator
    seeded: Seeded
    numerics: Numerics
    total: Tensor  # Σ loss · samples, in double precision
    trains: frozenset[str] | None  # by name, None for all

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, the model is in training mode and only what is trained asks for gradients."""
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        _set_modes(self.model, trainable, self.trains)
        try:
            yield
        finally:
            _set_modes(self.model, trainable, None)
            self.model.zero_grad(set_to_none=True)

    def step(self, optimizer: torch.optim.Optimizer, index: Tensor, count: Tensor | None = None) -> None:
        """One batch, or the first ``count`` of its samples. Nothing waits for the device: a GPU can record it."""
        inputs, targets = self.data.pool.batch(self.data.train[index])
        if self.data.augment is not None:
            inputs = self.data.augment(inputs, self.draws)
        inputs = self.numerics.inputs(inputs)
        loss_of: Loss = self.local.loss
        if count is not None:
            loss_of = weighted(loss_of, (torch.arange(len(index), device=count.device) < count).float())
        with self.seeded(self.draws), self.numerics.autocast():
            step = Step(self.model, inputs, targets, loss_of, self.received, index, self.context)
            loss = self.phase.objective(step)
        if not loss.requires_grad:
            names = sorted(name for name, p in self.model.named_parameters() if p.requires_grad)
            raise ModelError(
                f"the model's output does not depend on what is to be trained now ({', '.join(names[:3])}): a module "
                "that its forward does not use? Leave it out, or name the layers that count in fedfac_layers"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for tensor, stays, value in self.held:
            tensor.copy_(torch.where(stays, value, tensor))
        self.total.add_(loss.detach().double() * (len(index) if count is None else count))


Steps = Callable[[Work, Sequence[Tensor]], None]


def eager(work: Work, batches: Sequence[Tensor]) -> None:
    """The plain way to take the steps of a phase: one after the other."""
    optimizer = work.local.make_optimizer(work.trained)
    with work.under_way():
        for index in batches:
            work.step(optimizer, index)


def train_client(
    model: nn.Module,
    state: State,
    data: ClientData,
    phases: Sequence[Phase],
    local: Local,
    *,
    received: State,
    split: Split,
    seeded: Seeded,
    seed: int,
    round: int,
    client: int,
    purpose: str = "train",
    numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
    steps: Steps = eager,
) -> Outcome:
    """Train ``model`` (whose tensors are ``state``) in place, phase by phase.

    ``received`` is the state that it starts from, ``purpose`` keeps the random streams of training, refreshing
    and adapting apart, ``steps`` is the way in which the engine takes them.
    """
    draws = generator(seed, "noise", purpose, round, client, device=numerics.device)
    total = torch.zeros((), dtype=torch.float64, device=numerics.device)
    seen = 0
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for number, phase in numbered(phases):
        with numerics.autocast():
            context = None if phase.before is None else phase.before(Begin(model, data, local.loss))
        trains = phase.trains
        if trains == PERSONAL:  # statistics of which a part is shared stand still, or that part would not be frozen
            trains = (split.own - split.mixed.difference(trainable)) | phase.also
        chosen = [p for name, p in trainable.items() if trains is None or name in trains]
        epochs = local.epochs if phase.epochs is None else phase.epochs
        if not chosen or not epochs:
            continue
        held = _held(state, split, phase.also) if phase.trains == PERSONAL else []
        still = () if trains is None else state.keys() - trains - trainable.keys()  # buffers, mostly
        frozen = {name: state[name].clone() for name in still}
        moves = state if trains is None else state.keys() & trains
        began = {name: state[name].clone() for name in moves if phase.shrinkage and state[name].is_floating_point()}
        todo = list(schedule(data.size, epochs, local, seed, purpose, round, client, number))
        own = local.scaled(phase.lr_scale)
        work = Work(model, data, phase, own, received, context, chosen, held, draws, seeded, numerics, total, trains)
        steps(work, todo)
        seen += epochs * data.size
        copy_into(state, frozen)
        go_back(state, began, phase.shrinkage)
    mean = float(total) / seen if seen else 0.0
    return Outcome(data.size, mean, problem_of(mean, is_finite(state)))


@torch.no_grad()
def go_back(state: State, began: State, share: float) -> None:
    """Move the tensors named in ``began`` that share of the way to what they were."""
    for name, tensor in began.items():
        state[name].lerp_(tensor, share)


def numbered(phases: Sequence[Phase]) -> Iterator[tuple[int, Phase]]:
    """Phases with their numbers in the random streams: one that only prepares does not change those of the others."""
    number = -1
    for phase in phases:
        number += phase.epochs != 0
        yield number, phase


def problem_of(loss: float, finite: bool) -> str | None:
    """Why a client that has trained cannot take part, if it cannot."""
    if not math.isfinite(loss):
        return f"its loss is {loss}"
    return None if finite else "its weights are not finite"


def schedule(
    samples: int, epochs: int, local: Local, seed: int, purpose: str, round: int, client: int, phase: int
) -> Iterator[Tensor]:
    """The batches of a phase, as sample numbers 0..n_k-1: every epoch in an order of its own."""
    for epoch in range(epochs):
        order = stream(seed, "batches", purpose, round, client, phase, epoch).permutation(samples)
        yield from batches(order, local.batch_size)


def noise_of(
    model: nn.Module, phases: Sequence[Phase], local: Local, data: ClientData, device: torch.device = CPU
) -> Seeded:
    """How the random numbers of these phases are seeded, found out by one batch of each on a copy of the model."""
    trial = copy.deepcopy(model).to(device)
    index = torch.arange(min(data.size, local.batch_size))
    inputs, targets = data.pool.batch(data.train[index])

    kinds = {(phase.objective, phase.before): phase for phase in phases}  # what else differs draws nothing

    def forward() -> None:
        for phase in kinds.values():
            context = None if phase.before is None else phase.before(Begin(trial, data, local.loss))
            trial.train()
            phase.objective(Step(trial, inputs, targets, local.loss, references(trial), index, context))

    return how_it_draws(forward, device)


def batches(order: npt.NDArray[np.int64], size: int) -> Iterator[Tensor]:
    """Cut an order of samples into batches; a last batch of one sample joins the one before it.

    (A batch normalisation cannot train on a single value.)

    >>> [len(b) for b in batches(np.arange(7), 3)], [len(b) for b in batches(np.arange(2), 9)]
    ([3, 4], [2])
    """
    index = torch.from_numpy(order)
    starts = list(range(0, len(order), size))
    if len(starts) > 1 and size > 1 and len(order) - starts[-1] == 1:
        starts.pop()
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        yield index[start:end]


def _held(state: State, split: Split, also: frozenset[str]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tensors of which only some elements are trained: after a step the others get their old values back."""
    names = sorted(split.mixed - also)
    return [(state[name], split.mask(name, state[name].device), state[name].clone()) for name in names]


def _set_modes(model: nn.Module, trainable: dict[str, nn.Parameter], trains: frozenset[str] | None) -> None:
    """Training mode, gradients for the tensors that are trained, and frozen buffers held still.

    A module whose buffers are frozen (a batch normalisation in a frozen body) runs in evaluation mode:
    frozen means that no number of it moves.
    """
    model.train()
    for name, parameter in trainable.items():
        parameter.requires_grad_(trains is None or name in trains)
    if trains is None:
        return
    for prefix, module in model.named_modules():
        own = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_buffers(recurse=False)]
        if own and not trains.intersection(own):
            module.training = False  # not .eval(): that would reach the modules below
