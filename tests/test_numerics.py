"""The fixed rules behind precision and layout, and switches that are put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import bitwise, message
from torch import nn

import fedfac
from fedfac import methods
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError
from fedfac.numerics import CPU, Numerics
from fedfac.seeds import global_stream

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("model", "device", "precision", "channels_last"),
    [
        (nn.Sequential(nn.Conv2d(1, 2, 3)), CPU, "fp32", True),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), GPU, "bf16", True),
        (nn.Sequential(nn.Conv1d(1, 2, 3)), GPU, "fp32", False),
        (nn.Linear(2, 2), GPU, "fp32", False),
    ],
)
def test_auto_is_a_fixed_rule(model: nn.Module, device: torch.device, precision: str, channels_last: bool) -> None:
    assert Numerics.choose(model, device) == Numerics(device, precision, channels_last)
    asked = Numerics.choose(model, device, precision="fp32", layout="contiguous", deterministic=True)
    assert asked == Numerics(device, "fp32", False, True)


def test_images_and_weights_are_laid_out() -> None:
    numerics = Numerics.choose(small_model(), CPU)
    model = numerics.place(small_model())
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]
    batch = torch.randn(3, 2, 6, 6)
    assert numerics.inputs(batch).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(numerics.inputs(batch), batch)
    text = torch.zeros(3, 80, dtype=torch.int64)
    assert numerics.inputs(text) is text


def test_switches_are_put_back() -> None:
    def switches() -> tuple[bool, ...]:
        cudnn = torch.backends.cudnn
        return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.allow_tf32

    before = switches()
    fedfac.fit(small_model(), small_federation(), rounds=1, cohort=2, epochs=1, deterministic=True, device="cpu")
    assert switches() == before
    with Numerics(deterministic=True).backend():
        assert torch.are_deterministic_algorithms_enabled()
    assert switches() == before


def test_bf16_trains_in_bf16_and_keeps_fp32_weights() -> None:
    seen = set()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.add(outputs.dtype)
        return nn.functional.cross_entropy(outputs.float(), targets)

    common = {"rounds": 2, "cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu", "loss": loss}
    half = fedfac.fit(small_model(), small_federation(), method=methods.fedavg(), precision="bf16", **common)  # type: ignore[arg-type]
    assert torch.bfloat16 in seen
    assert all(t.dtype != torch.bfloat16 for t in half.server.values())
    full = fedfac.fit(small_model(), small_federation(), method=methods.fedavg(), **common)  # type: ignore[arg-type]
    assert not bitwise(half.server, full.server)
    for name, tensor in full.server.items():
        torch.testing.assert_close(half.server[name], tensor, rtol=0.1, atol=0.02)


def test_the_layout_changes_rounding_only() -> None:
    with global_stream(0, "layout"):
        model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))
    common = {"rounds": 2, "cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu"}
    one, other = (
        fedfac.fit(model, small_federation(), method=methods.fedfac(layers=[1]), layout=layout, **common)  # type: ignore[arg-type]
        for layout in ("contiguous", "channels-last")
    )
    assert one.splits == other.splits
    for name, tensor in one.server.items():
        torch.testing.assert_close(other.server[name], tensor, rtol=1e-4, atol=1e-5)


def test_what_is_not_known_is_refused() -> None:
    def asked(**options: Any) -> str:
        return message(ConfigError, lambda: Numerics.choose(nn.Linear(1, 1), CPU, **options))

    assert asked(precision="bf61") == "precision is 'bf61'. Did you mean 'bf16'?"
    assert asked(layout="chanels-last") == "layout is 'chanels-last'. Did you mean 'channels-last'?"
    assert asked(precision="tf32") == "precision 'tf32' is a GPU's; on cpu choose fp32 or bf16"
