"""What both peers share: the job's files, the network, and the conversation with the driver. No fedfac in here.

The files are those that ``job.write`` makes. The conversation is that of ``fedfac.bench.worker``: a line of JSON when
everything is set up, then for every line read one round and a line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    """The paper's network for FEMNIST: 608,702 parameters, logits out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(1024, 512)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(512, 62)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(self.dropout(x))
        return logits


@dataclass(frozen=True)
class Visit:
    """One client in one round: how many samples it has, where its dropout begins, and its batches."""

    samples: int
    seed: int
    inputs: Tensor
    targets: Tensor
    batches: list[list[int]]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches in their order, dropout's random numbers set to where ours begin: losses can be compared."""
        torch.manual_seed(self.seed)
        for numbers in self.batches:
            index = torch.tensor(numbers)
            yield self.inputs[index], self.targets[index]


class Job:
    """The job in a folder, read back."""

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        described: dict[str, Any] = json.loads((path / "job.json").read_text())
        self.data: str = described["data"]
        self.clients: int = described["clients"]
        self.lr: float = described["lr"]
        self.batch_size: int = described["batch_size"]
        self.dropout: float = described["dropout"]
        self.rounds: list[list[dict[str, Any]]] = described["rounds"]
        # Mapped, not read: the processes of a peer share what they touch. Copy-on-write, as torch wants to write.
        self.inputs = torch.from_numpy(np.load(path / "inputs.npy", mmap_mode="c"))
        self.targets = torch.from_numpy(np.load(path / "targets.npy", mmap_mode="c"))
        with np.load(path / "start.npz") as start:
            self.start = {name: torch.from_numpy(start[name]) for name in start.files}

    def model(self) -> CNN:
        """The network with the common start weights, in training mode."""
        model = CNN(self.dropout)
        model.load_state_dict(self.start)
        return model.train()

    def visit(self, round: int, place: int) -> Visit:
        """The client at a place of a round's cohort."""
        own = self.rounds[round][place]
        return Visit(own["samples"], own["seed"], self.inputs, self.targets, own["batches"])


class Referee:
    """The driver, who says when a round begins."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a framework prints is for people, not for the driver
        self._start = 0.0

    def ready(self, data: str) -> None:
        self._say({"data": data})

    def wait(self) -> None:
        """Until the driver wants a round."""
        if not sys.stdin.readline():
            raise EOFError("the driver has gone")
        self._start = perf_counter()

    def done(self, loss: float) -> None:
        seconds = perf_counter() - self._start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._say({"seconds": seconds, "loss": loss, "peak_mb": peak})

    def _say(self, values: dict[str, Any]) -> None:
        print(json.dumps(values), file=self._answers, flush=True)
