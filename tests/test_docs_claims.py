"""Sentences of the documentation with "any", "never" and "only" that no other test holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import deployment, over_the_wire
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fedfac
from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.conformance import small_federation
from fedfac.engine.flower.wire import Packet, Request


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(12, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.gru(x.flatten(2).transpose(1, 2).reshape(len(x), 6, 12))[0][:, -1])
        return result


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.encoder(x.reshape(len(x), 6, 12)).mean(1)))
        return result


NETWORKS: dict[str, Any] = {
    "recurrent": Recurrent,
    "attention": Attention,
    "group norm": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ),
    "parametrised": lambda: nn.Sequential(
        nn.Flatten(), parametrizations.weight_norm(nn.Linear(72, 8)), nn.ReLU(), nn.Linear(8, 3)
    ),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_any_network_from_inputs_to_classes_goes_into_fit(name: str) -> None:
    """docs/extending.md; what has no elements is shared as a whole (docs/how-it-works.md)."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    result = fedfac.fit(model, small_federation(), method=methods.fedper(), rounds=2, cohort=3, epochs=1)
    assert result.finished
    assert result.split.personal_tensors == {n for n, _ in model.named_parameters() if n in Anatomy.of(model).last(1)}
    moved = {n for n, t in model.named_parameters() if not torch.equal(result.server[n], t.detach())}
    assert moved == set(result.split.shapes) - result.split.personal_tensors - {n for n, _ in model.named_buffers()}


HEAD = {"method__head": "personal"}


@pytest.mark.parametrize(
    ("method", "options", "warmup"),
    [
        ("fedper", {}, 0),
        ("fedper", {}, 2),
        ("fedfac", HEAD, 0),
        ("fedfac", HEAD, 2),
        ("lg-fedavg", {}, 0),
        ("ditto", {}, 0),
    ],
)
def test_tensors_that_are_personal_as_a_whole_are_sent_in_a_warm_up_only(
    method: str, options: dict[str, Any], warmup: int, tmp_path: Path
) -> None:
    """docs/deployment.md."""
    sent: dict[int, set[str]] = {}

    def listen(client: int, request: Request, reply: Packet) -> Packet:
        sent.setdefault(request.round, set()).update(name.removeprefix("part/") for name in reply.tensors)
        return reply

    change: dict[str, Any] = {**options, "train__rounds": 4, **({"method__warmup": warmup} if warmup else {})}
    personal = over_the_wire(deployment(method, **change), tmp_path, listen).split.personal_tensors
    assert personal
    assert [number for number in sent if sent[number] & personal] == list(range(1, warmup + 1))
