"""The report's bytes against real packets: every request and reply of a run over the wire is weighed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import Loopback, deployment, nodes, session
from torch import Tensor

from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.engine.flower import wire
from fedfac.engine.flower.wire import Packet, Request
from fedfac.moments import Moments
from fedfac.report.traffic import traffic
from fedfac.run import RunDirectory

WIDE = {"model__hidden": 70, "train__rounds": 4}


class Scales:
    """Weighs what passes: bytes of tensors, by direction, and whole packets."""

    def __init__(self) -> None:
        self.tensors: Counter[str] = Counter()
        self.whole = self.names = self.packets = 0
        self.sums = 0

    def __call__(self, client: int, request: Request, reply: Packet) -> Packet:
        sent = request.packet()
        for direction, packet in ((f"{request.action} down", sent), ("up", reply)):
            self.tensors[direction] += sum(size(tensor) for tensor in packet.tensors.values())
            self.whole += sum(map(len, packet.pack()))
            self.names += len(packet.tensors)
            self.packets += 1
        self.sums += sum(size(tensor) for name, tensor in reply.tensors.items() if name.startswith("sums/"))
        return reply


def size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def weighed(method: str, folder: Path, **changes: Any) -> tuple[Scales, dict[str, float], list[dict[str, Any]]]:
    """What crossed the wire, what the report says of it, and the run's records."""
    session_only = ("evaluate_every", "evaluate_clients", "newcomers")
    settings = {key: changes.pop(key) for key in session_only if key in changes}
    run, scales = deployment(method, **{**WIDE, **changes}), Scales()
    there = Loopback(nodes(run, folder, **{"share-weights": True}), scales)
    session(run, there, out=folder / "run", **settings).drive()
    saved = RunDirectory.read(folder / "run")
    return scales, traffic(saved.config, saved.records(), saved.masks()), saved.records()


CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in sorted(methods.METHODS)]
CASES += [("fedfac-plus", {"method__warmup": 2, "method__joint": False}), ("fedfac", {"model__name": "mlp"})]
CASES += [("fedper", {"method__warmup": 2}), ("fedfac", {"method__warmup": 2, "method__head": "personal"})]
CASES += [("fedfac-plus", {"method__prior_smoothing": "learned"}), ("fedfac", {"evaluate_every": 3})]
CASES += [("fedfac", {"evaluate_clients": 2}), ("fedper", {"newcomers": 0.25, "evaluate_every": 2})]


@pytest.mark.parametrize(("method", "changes"), CASES)
def test_the_report_counts_the_bytes_that_cross_the_wire(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    scales, said, records = weighed(method, tmp_path, **changes)
    visits = sum(len(record.get("cohort", ())) for record in records)
    assert said["up"] * visits == pytest.approx(scales.tensors["up"])
    assert said["for_split"] * visits == pytest.approx(scales.sums)
    assert said["down"] * visits == pytest.approx(scales.tensors["train down"])
    assert said["total"] == pytest.approx(sum(scales.tensors.values()))
    # what is left out: names, shapes, masks and a few figures; no whole tensor
    assert said["total"] < scales.whole <= 1.01 * said["total"] + 110 * scales.names + 700 * scales.packets


@pytest.mark.parametrize("rows", [6, 512, 800])
def test_moments_are_symmetric_to_the_last_bit_so_only_a_triangle_is_sent(rows: int) -> None:
    layer = Anatomy.of(torch.nn.Linear(rows, 64)).layers[0]
    draws = torch.Generator().manual_seed(rows)
    moments = Moments.of(layer, {"weight": torch.randn(64, rows, generator=draws), "bias": torch.zeros(64)})
    assert torch.equal(moments.products, moments.products.T)
    sent = wire.train_reply(1, 0.0, {layer.name: moments}, None).tensors
    assert sum(t.numel() for t in sent.values()) == 64 * (64 + 3) // 2
