"""Small fully connected models of many clients as one: their tensors are stacked and stepped together.

A step of such a model is so little arithmetic that a lane spends its time between the operations; with the tensors of
a group of clients stacked, one operation does the group's work (``torch.vmap`` over ``functional_call``). Clients of
unequal sizes go together: a shorter batch is filled up with samples of weight 0, and a client that has no steps left
drops out of the group, whose largest client comes first. The numbers are those of the lanes up to rounding.

Which models are stacked is a fixed rule, see :func:`why_not`, and so is the size of a group: results do not depend on
how many lanes there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedfac.data.pool import ClientData, Pool
from fedfac.evaluate import BATCH, Metric, Score, tally
from fedfac.method import PERSONAL, Begin, Loss, Phase, Step, supervised, weighted
from fedfac.noise import Seeded, silent
from fedfac.split import Split
from fedfac.state import State, copy_into, references
from fedfac.training import BETAS, Local, Outcome, go_back, numbered, problem_of, schedule

GROUP = 32  # clients stepped together
LARGEST = 300_000  # parameters; beyond, the arithmetic itself takes the time, and lanes are as fast
LAYERS = (
    nn.Linear,
    nn.Flatten,
    nn.Identity,
    nn.ReLU,
    nn.LeakyReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.Softplus,
    nn.LayerNorm,
)


def why_not(model: nn.Module, phases: Sequence[Phase], data: ClientData, seeded: Seeded) -> str | None:
    """Why the clients of this model are trained one at a time, or None: they are stacked."""
    for module in model.modules():
        if type(module) is not nn.Sequential and type(module) not in LAYERS:
            return f"it has a {type(module).__name__}; stacked models are nn.Sequential of fully connected layers"
    size = sum(p.numel() for p in model.parameters())
    if size > LARGEST:
        return f"it has {size:,} parameters; stacked models have {LARGEST:,} at most"
    for phase in phases:  # one that only prepares is done client by client
        own = phase.before is not None or not (phase.stacks or phase.objective is supervised)
        if own and phase.epochs != 0:
            return "its method has an objective or a step of its own that is not made for it"
    if data.augment is not None or seeded is not silent:
        return "its training draws random numbers"
    if len({id(p) for p in model.parameters()}) != len(list(model.named_parameters(remove_duplicate=False))):
        return "it has tied parameters"
    return None


@dataclass(frozen=True)
class Client:
    """One client of a group."""

    number: int
    data: ClientData
    start: State


def train_clients(
    model: nn.Module,
    group: Sequence[Client],
    phases: Sequence[Phase],
    local: Local,
    *,
    split: Split,
    seed: int,
    round: int,
    purpose: str,
) -> list[tuple[Outcome, State]]:
    """What :func:`fedfac.training.train_client` does, for a group; outcomes and states in the group's order."""
    ranks = sorted(range(len(group)), key=lambda i: -group[i].data.size)  # the largest first: it takes the most steps
    clients = [group[i] for i in ranks]
    received = stack([client.start for client in clients])
    state = {name: tensor.clone() for name, tensor in received.items()}
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    total = torch.zeros(len(clients), dtype=torch.float64, device=next(iter(state.values())).device)
    seen = 0
    for number, phase in numbered(phases):
        if phase.before is not None:
            _prepare(model, phase.before, clients, state, local.loss)
        trains = split.own | phase.also if phase.trains == PERSONAL else phase.trains
        chosen = [name for name in trainable if trains is None or name in trains]
        epochs = local.epochs if phase.epochs is None else phase.epochs
        if not chosen or not epochs:
            continue
        held = {}
        if phase.trains == PERSONAL:
            mixed = [name for name in split.owners if name in chosen and name not in phase.also]
            held = {name: (split.mask(name, total.device), state[name].clone()) for name in mixed}
        began = {name: state[name].clone() for name in chosen if phase.shrinkage}
        todo = [list(schedule(c.data.size, epochs, local, seed, purpose, round, c.number, number)) for c in clients]
        _Stack(model, phase, local.scaled(phase.lr_scale), state, received, chosen, held, total).take(clients, todo)
        go_back(state, began, phase.shrinkage)
        seen += epochs
    finite = torch.stack([torch.isfinite(t).reshape(len(t), -1).all(1) for t in state.values()]).all(0).tolist()
    losses = [value / (seen * c.data.size) if seen else 0.0 for value, c in zip(total.tolist(), clients, strict=True)]
    done: list[tuple[Outcome, State] | None] = [None] * len(group)
    for place, rank in enumerate(ranks):
        outcome = Outcome(clients[place].data.size, losses[place], problem_of(losses[place], finite[place]))
        # a copy: a view would keep the whole group's memory alive for as long as one client's state is kept
        done[rank] = outcome, {name: tensor[place].clone() for name, tensor in state.items()}
    return [entry for entry in done if entry is not None]


def _prepare(
    model: nn.Module, before: Callable[[Begin], Any], clients: Sequence[Client], state: State, loss: Loss
) -> None:
    """What comes before a phase: each client's model is looked at, and perhaps written into, by itself."""
    own = references(model)
    for place, client in enumerate(clients):
        copy_into(own, {name: tensor[place] for name, tensor in state.items()})
        before(Begin(model, client.data, loss))
        for name, tensor in state.items():
            tensor[place] = own[name]


class _Objective(nn.Module):
    """A phase's objective as a module, so that its model's tensors can be given from outside."""

    def __init__(self, model: nn.Module, phase: Phase, loss: Loss) -> None:
        super().__init__()
        self.model, self.phase, self.loss = model, phase, loss

    def forward(self, inputs: Tensor, targets: Tensor, weights: Tensor, received: State, index: Tensor) -> Tensor:
        """The objective on the samples that have weight."""
        step = Step(self.model, inputs, targets, weighted(self.loss, weights), received, index)
        return self.phase.objective(step)


class _Stack:
    """The steps of one phase for a group."""

    def __init__(
        self,
        model: nn.Module,
        phase: Phase,
        local: Local,
        state: State,
        received: State,
        chosen: Sequence[str],
        held: Mapping[str, tuple[Tensor, Tensor]],
        total: Tensor,
    ) -> None:
        self.objective = _Objective(model, phase, local.loss)
        self.local, self.state, self.chosen, self.held, self.total = local, state, chosen, held, total
        self.received = {} if phase.objective is supervised else received
        self.first = {name: torch.zeros_like(state[name]) for name in chosen}
        self.second = {name: torch.zeros_like(state[name]) for name in chosen}
        self.steps = [torch.zeros((), device=total.device) for _ in chosen]

    def take(self, clients: Sequence[Client], todo: Sequence[Sequence[Tensor]]) -> None:
        """All steps of all clients."""
        device = self.total.device
        for now in range(len(todo[0])):
            batches = [own[now] for own in todo if now < len(own)]
            index, weights = _filled(batches)
            pools = [c.data.pool for c in clients[: len(batches)]]
            numbers = torch.stack([c.data.train[own] for c, own in zip(clients, index, strict=False)])
            inputs, targets = gather(pools, numbers)
            weights, index = weights.to(device), index.to(device)
            losses = self._step(len(batches), inputs, targets, weights, index)
            self.total[: len(batches)] += losses * weights.sum(1)

    def _step(self, active: int, inputs: Tensor, targets: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        now = {name: tensor[:active].detach() for name, tensor in self.state.items()}
        leaves = [now[name].requires_grad_() for name in self.chosen]
        received = {name: tensor[:active] for name, tensor in self.received.items()}

        def objective(state: State, *batch: Any) -> Tensor:
            loss: Tensor = functional_call(self.objective, {f"model.{n}": t for n, t in state.items()}, batch)
            return loss

        losses = vmap(objective)(now, inputs, targets, weights, received, index)
        gradients = torch.autograd.grad(losses.sum(), leaves)
        with torch.no_grad():
            # the fused optimisers walk through memory: gradients must lie in it as the tensors do
            self._descend([leaf.detach() for leaf in leaves], [g.contiguous() for g in gradients], active)
            for name, (stays, value) in self.held.items():
                self.state[name][:active] = torch.where(stays, value[:active], self.state[name][:active])
        return losses.detach().double()

    def _descend(self, tensors: list[Tensor], gradients: list[Tensor], active: int) -> None:
        first = [self.first[name][:active] for name in self.chosen]
        common: Any = {"weight_decay": self.local.weight_decay, "lr": self.local.lr, "maximize": False, "fused": True}
        if self.local.optimizer == "adam":
            second = [self.second[name][:active] for name in self.chosen]
            beta1, beta2 = BETAS
            adam(
                tensors, gradients, first, second, [], self.steps,
                amsgrad=False, beta1=beta1, beta2=beta2, eps=1e-8, **common,
            )  # fmt: skip
        else:
            momenta: list[Tensor | None] = list(first) if self.local.momentum else [None] * len(first)
            sgd(tensors, gradients, momenta, momentum=self.local.momentum, dampening=0, nesterov=False, **common)


def score_clients(
    model: nn.Module,
    group: Sequence[tuple[int, ClientData]],
    states: Sequence[State],
    part: str,
    loss: Loss,
    classes: int | None,
    metrics: Mapping[str, Metric],
) -> list[Score]:
    """Every client's model on its samples of one part (``"test"`` or ``"validation"``)."""
    model.eval()
    same = all(state is states[0] for state in states)
    tensors = states[0] if same else stack(states)
    forward = vmap(lambda state, x: functional_call(model, state, (x,)), in_dims=(None if same else 0, 0))
    indices = [getattr(data, part) for _, data in group]
    answers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in group]
    with torch.no_grad():
        for start in range(0, max(map(len, indices), default=0), BATCH):
            pieces = [index[start : start + BATCH] for index in indices]
            inputs, targets = gather([data.pool for _, data in group], _filled(pieces)[0])
            outputs = forward(tensors, inputs)
            for own, piece, output, target in zip(answers, pieces, outputs, targets, strict=True):
                if len(piece):
                    own.append((output[: len(piece)], target[: len(piece)]))
        return [tally(client, own, loss, classes, metrics) for (client, _), own in zip(group, answers, strict=True)]


def stack(states: Sequence[State]) -> State:
    """Tensors of one name, one client after the other along a new first dimension."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def gather(pools: Sequence[Pool], numbers: Tensor) -> tuple[Tensor, Tensor]:
    """A batch for every client: (clients, batch, ...)."""
    if all(pool is pools[0] for pool in pools):
        inputs, targets = pools[0].batch(numbers.flatten())
        shape = numbers.shape
        return inputs.reshape(*shape, *inputs.shape[1:]), targets.reshape(*shape, *targets.shape[1:])
    both = [pool.batch(own) for pool, own in zip(pools, numbers, strict=True)]
    return torch.stack([x for x, _ in both]), torch.stack([y for _, y in both])


def _filled(batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of equal length, filled up with sample 0, and weights: 1, and 0 for what was filled in."""
    width = max(map(len, batches))
    index = np.zeros((len(batches), width), dtype=np.int64)
    weights = np.zeros((len(batches), width), dtype=np.float32)
    for row, batch in enumerate(batches):
        index[row, : len(batch)] = batch
        weights[row, : len(batch)] = 1
    return torch.from_numpy(index), torch.from_numpy(weights)
