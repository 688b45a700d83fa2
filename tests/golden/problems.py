"""The golden record's data and networks: tiny, and made without fedfac, so that its code cannot move them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

CLIENTS = 6
SEED = 20_25
Arrays = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Every client's samples, a start, and a few samples to predict."""

    clients: Mapping[str, Arrays]
    classes: int | None
    model: Callable[[], nn.Module]

    @property
    def batch(self) -> Tensor:
        """The first samples of every client."""
        return torch.cat([x[:3] for x, _ in self.clients.values()])


class Recurrent(nn.Module):
    """An LSTM, normalisation by element of two kinds, and dropout."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.fc = nn.Linear(6, 8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """The last step's hidden state, through two layers."""
        steps, _ = self.lstm(inputs)
        hidden = self.batch_norm(self.fc(self.norm(steps[:, -1])))
        outputs: Tensor = self.head(self.dropout(hidden.tanh()))
        return outputs


def started(make: Callable[[], nn.Module]) -> nn.Module:
    """A network from a start of its own; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return make()


def mlp() -> nn.Module:
    """Fully connected: its clients can be trained as one."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def cnn() -> nn.Module:
    """Convolutions with a normalisation."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 8),
        nn.ReLU(),
        nn.Linear(8, 10),
    )


def digits() -> dict[str, Arrays]:
    """A few of the embedded handwritten digits; client c has the classes from c on."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    draws = np.random.Generator(np.random.Philox(key=SEED))
    clients = {}
    for client in range(CLIENTS):
        own = np.flatnonzero(np.isin(bunch.target, [(client + k) % 10 for k in range(4)]))
        own = draws.choice(own, size=24 + 6 * client, replace=False)
        x = torch.tensor(bunch.images[own] / 16, dtype=torch.float32)[:, None]
        clients[str(client)] = (x, torch.tensor(bunch.target[own], dtype=torch.int64))
    return clients


def sequences() -> dict[str, Arrays]:
    """Series of five steps; what decides a sample's class is another feature for every second client."""
    draws = np.random.Generator(np.random.Philox(key=SEED + 1))
    clients = {}
    for client in range(CLIENTS):
        x = draws.normal(size=(22 + 5 * client, 5, 3)).astype(np.float32)
        sums = x[:, :, client % 2].sum(1)
        classes = np.digitize(sums, [-1.0, 1.0]) if client % 3 else np.digitize(-sums, [0.0, 2.0])
        clients[str(client)] = (torch.from_numpy(x), torch.from_numpy(classes.astype(np.int64)))
    return clients


def numbers() -> dict[str, Arrays]:
    """The same series with a real target."""
    return {name: (x, (x[:, -1] * x[:, 0]).sum(1, keepdim=True)) for name, (x, _) in sequences().items()}


def problem(name: str) -> Problem:
    """By the name that the cases use."""
    if name == "digits":
        return Problem(clients=digits(), classes=10, model=lambda: started(mlp))
    if name == "images":
        return Problem(clients=digits(), classes=10, model=lambda: started(cnn))
    if name == "sequences":
        return Problem(clients=sequences(), classes=3, model=lambda: started(lambda: Recurrent(3)))
    if name == "numbers":
        return Problem(clients=numbers(), classes=None, model=lambda: started(lambda: Recurrent(1)))
    raise ValueError(f"there is no problem {name!r}")
