"""The ways in which a job's round is done. Each is a function from a round's number to its mean training loss."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from fedfac import evaluate, methods
from fedfac.bench.jobs import Job
from fedfac.engine.lanes import keep_freed_memory
from fedfac.errors import ConfigError, did_you_mean
from fedfac.method import Method
from fedfac.numerics import Numerics
from fedfac.preflight import draw_cohort
from fedfac.rounds import Session
from fedfac.settings import Settings
from fedfac.training import batches, schedule

Round = Callable[[int], float]


def ours(job: Job, device: torch.device, method: Method, **options: object) -> Round:
    """fedfac's own round, evaluation left out."""
    settings = Settings(rounds=10**6, cohort=job.cohort, evaluate_every=10**7, device=device, **options)  # type: ignore[arg-type]
    session = Session(job.model, job.federation, method, job.local, settings)

    return lambda number: float(session.step()["train_loss"])


def testing(job: Job, device: torch.device, method: Method) -> Round:
    """An evaluation of all clients, when most of them have trained."""
    settings = Settings(rounds=10**6, cohort=job.cohort, device=device, evaluate_from=10**6)
    session = Session(job.model, job.federation, method, job.local, settings)

    def step(number: int) -> float:  # noqa: ARG001 (a contestant's)
        while session.next_round * job.cohort <= len(job.federation):
            session.step()
        found = session.engine.evaluate(session.next_round, session.shown, session.split, session.tested)
        return float(evaluate.summary(found["test"], "")["loss"])

    return step


def eager_loop(job: Job, device: torch.device) -> Round:
    """What one writes by hand: client after client, PyTorch's defaults. On a GPU in the precision that ours has."""
    numerics = Numerics.choose(job.model, device, layout="contiguous" if device.type == "cpu" else "auto")
    federation = job.federation.to(device)
    model = numerics.place(copy.deepcopy(job.model))
    server = {name: t.clone() for name, t in model.state_dict().items()}

    def step(number: int) -> float:
        nonlocal server
        sums: dict[str, torch.Tensor] = {}
        weight, total = 0, 0.0
        for client in draw_cohort(range(len(federation)), job.cohort, 0, number):
            data = federation.client(client)
            model.load_state_dict(server)
            model.train()
            optimizer = torch.optim.Adam(model.parameters(), lr=job.local.lr)
            losses = torch.zeros((), device=device)
            for index in schedule(data.size, job.local.epochs, job.local, 0, "train", number, client, 0):
                inputs, targets = data.pool.batch(data.train[index])
                optimizer.zero_grad()
                with numerics.autocast():
                    loss = job.local.loss(model(numerics.inputs(inputs)), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses += loss.detach() * len(index)
            for name, tensor in model.state_dict().items():
                sums[name] = sums.get(name, 0) + tensor * data.size
            weight += data.size
            total += float(losses) / job.local.epochs
        server = {name: (tensor / weight).to(server[name].dtype) for name, tensor in sums.items()}
        return total / weight

    return step


def limit(job: Job, device: torch.device) -> Round:
    """The same floating-point work without any federation: one model on batches K times as large."""
    if device.type == "cpu":
        keep_freed_memory()
    numerics = Numerics.choose(job.model, device, layout="contiguous" if device.type == "cpu" else "auto")
    federation = job.federation.to(device)
    model = numerics.place(copy.deepcopy(job.model)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=job.local.lr, fused=True)

    def step(number: int) -> float:
        clients = [federation.client(c) for c in draw_cohort(range(len(federation)), job.cohort, 0, number)]
        numbers = torch.cat([data.train for data in clients])
        losses = torch.zeros((), device=device)
        for epoch in range(job.local.epochs):
            order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(number * 1000 + epoch))
            for index in batches(order.numpy(), job.local.batch_size * job.cohort):
                inputs, targets = clients[0].pool.batch(numbers[index])
                optimizer.zero_grad()
                with numerics.autocast():
                    loss = job.local.loss(model(numerics.inputs(inputs)), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses += loss.detach() * len(index)
        return float(losses) / job.local.epochs / len(numbers)

    return step


CONTESTANTS: dict[str, Callable[[Job, torch.device], Round]] = {
    "fedfac": lambda job, device: ours(job, device, methods.fedavg()),
    "fedfac-bf16": lambda job, device: ours(job, device, methods.fedavg(), precision="bf16"),
    "dynamic": lambda job, device: ours(job, device, methods.fedfac(layers=list(job.layers), tau="50%")),
    "evaluation": lambda job, device: testing(job, device, methods.fedavg()),
    "dynamic-evaluation": lambda job, device: testing(job, device, methods.fedfac(layers=list(job.layers), tau="50%")),
    "eager": eager_loop,
    "limit": limit,
}


def build(name: str, job: Job, device: torch.device) -> Round:
    """A contestant by name."""
    if name not in CONTESTANTS:
        raise ConfigError(f"there is no contestant {name!r}. {did_you_mean(name, CONTESTANTS)}")
    return CONTESTANTS[name](job, device)
