"""The jobs that are timed: a model, clients, a cohort. Sizes are those of docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedfac import models
from fedfac.config import DataConfig
from fedfac.data import sources
from fedfac.data.federation import Federation
from fedfac.errors import ConfigError, did_you_mean
from fedfac.seeds import stream
from fedfac.training import Local


@dataclass(frozen=True)
class Job:
    """What a round has to do."""

    name: str
    federation: Federation
    model: nn.Module
    local: Local
    cohort: int
    layers: tuple[int, ...]  # Λ of the dynamic FedFac round
    data: str  # in words


def femnist(data_dir: str | None, device: torch.device) -> Job:
    """The paper's CNN on FEMNIST by writer, B = 16: 39 writers and E = 1 on a CPU, 10 writers and E = 5 on a GPU."""
    if data_dir is None:
        federation, data = _made((1, 28, 28), 62, clients=396, train=160, test=40), "made up, FEMNIST's shapes"
    else:
        federation, data = sources.load(DataConfig(name="femnist", data_dir=data_dir), seed=0), "FEMNIST, by writer"
    model = models.build("femnist-cnn", shape=(1, 28, 28), classes=62, seed=0)
    epochs, cohort = (1, 39) if device.type == "cpu" else (5, 10)
    return Job("femnist-cnn", federation, model, Local(epochs=epochs, batch_size=16), cohort, (2,), data)


def digits() -> Job:
    """An MLP 64-128-10 on the embedded digits, all 50 clients a round, E = 5, B = 20."""
    federation = sources.load(DataConfig(name="digits", clients=50, partition="iid"), seed=0)
    model = models.build("mlp", shape=(1, 8, 8), classes=10, seed=0, hidden=128)
    return Job("digits-mlp", federation, model, Local(epochs=5, batch_size=20), 50, (1,), "digits, embedded")


def resnet(data_dir: str | None, device: torch.device) -> Job:
    """ResNet-18 on CIFAR-10, ten clients of 480 images a round, B = 32: E = 5 on a GPU, on a CPU one short epoch."""
    gpu = device.type == "cuda"
    size = 480 if gpu else 64
    if data_dir is None or not gpu:
        federation, data = _made((3, 32, 32), 10, clients=100 if gpu else 10, train=size, test=size // 5), "made up"
    else:
        config = DataConfig(name="cifar10", data_dir=data_dir, clients=100, alpha=0.5)
        federation, data = sources.load(config, seed=0), "CIFAR-10, Dir(.5)"
    model = models.build("resnet18", shape=(3, 32, 32), classes=10, seed=0)
    local = Local(epochs=5 if gpu else 1, batch_size=32)
    return Job("resnet18", federation, model, local, 10 if gpu else 4, (16, 17), data)


def many(clients: int) -> Job:
    """A hundred of very many clients a round, each made when it is needed: does memory grow with their number?"""

    def load(client: int) -> tuple[Any, Any, Any, Any]:
        rng = stream(0, "bench client", client)
        x, y = rng.normal(size=(25, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 25)
        return x[:20], y[:20], x[20:], y[20:]

    federation = Federation.lazy(clients, load, classes=10)
    model = models.build("cnn", shape=(1, 8, 8), classes=10, seed=0)
    return Job("clients", federation, model, Local(epochs=1, batch_size=10), 100, (2,), "made up, lazy clients")


JOBS: dict[str, Callable[[str | None, torch.device], Job]] = {
    "femnist-cnn": femnist,
    "digits-mlp": lambda data_dir, device: digits(),
    "resnet18": resnet,
    "clients-1000": lambda data_dir, device: many(1_000),
    "clients-100000": lambda data_dir, device: many(100_000),
}


def build(name: str, data_dir: str | None, device: torch.device) -> Job:
    """A job by name."""
    if name not in JOBS:
        raise ConfigError(f"there is no job {name!r}. {did_you_mean(name, JOBS)}")
    return JOBS[name](data_dir, device)


def _made(shape: tuple[int, ...], classes: int, *, clients: int, train: int, test: int) -> Federation:
    """Random images: as good as real ones for a clock."""
    rng = stream(0, "bench")
    arrays = []
    for _ in range(clients):
        x = rng.normal(size=(train + test, *shape)).astype(np.float32)
        y = rng.integers(0, classes, train + test)
        arrays.append((x[:train], y[:train], x[train:], y[train:]))
    return Federation.from_arrays(arrays, classes=classes)
