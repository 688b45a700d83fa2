"""The same engine on a GPU. Run where there is one: ``pytest tests/test_cuda.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fedfac
from fedfac import methods
from fedfac.conformance import small_federation, small_model
from fedfac.seeds import global_stream
from fedfac.state import same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def smooth_model() -> nn.Module:
    """No dropout and no batch normalisation: rounding is all that differs between devices."""
    with global_stream(0, "cuda"):
        return nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_a_gpu_gives_what_a_cpu_gives(name: str) -> None:
    results = [
        fedfac.fit(
            smooth_model(),
            small_federation(),
            method=methods.build(name),
            rounds=3,
            cohort=3,
            epochs=1,
            batch_size=8,
            optimizer="sgd",
            lr=0.05,
            device=device,
        )
        for device in ("cpu", "cuda")
    ]
    for name, tensor in results[0].server.items():
        torch.testing.assert_close(results[1].server[name], tensor, rtol=1e-3, atol=1e-4)
    assert results[1].accuracy == pytest.approx(results[0].accuracy, abs=0.1)


def test_dropout_on_a_gpu_is_seeded_and_resume_works(tmp_path: Path) -> None:
    torch.backends.cudnn.deterministic = True
    try:
        arguments = {"method": methods.fedfac(layers=[1]), "cohort": 3, "epochs": 1, "batch_size": 8, "device": "cuda"}
        straight = fedfac.fit(small_model(), small_federation(), rounds=3, **arguments)  # type: ignore[arg-type]
        fedfac.fit(small_model(), small_federation(), rounds=1, out=tmp_path / "r", **arguments)  # type: ignore[arg-type]
        resumed = fedfac.fit(
            small_model(),
            small_federation(),
            rounds=3,
            out=tmp_path / "r",
            resume=True,
            **arguments,  # type: ignore[arg-type]
        )
    finally:
        torch.backends.cudnn.deterministic = False
    assert resumed.records == straight.records
    assert same(resumed.server, straight.server)
    assert next(resumed.model(0).parameters()).device.type == "cpu"
