"""Normalisation by a client's own statistics: what is measured, that training does not see it, and what it is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import bitwise, message
from torch import nn

import fedfac
from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.conformance import small_federation, small_model
from fedfac.data.federation import one_client
from fedfac.errors import ConfigError
from fedfac.method import Begin
from fedfac.seeds import global_stream, stream
from fedfac.state import clone, references
from fedfac.switches import Statistics, statistics
from fedfac.switches.statistics import Measured

SHORT: dict[str, Any] = {"rounds": 3, "cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu", "evaluate_every": 1}


def normalised() -> nn.Sequential:
    with global_stream(0, "model"):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
    state = references(model)
    state["1.running_mean"].copy_(torch.arange(5.0))
    state["1.running_var"].copy_(torch.arange(5.0) + 1)
    return model


def moved(model: nn.Module, x: np.ndarray[Any, Any], share: float) -> nn.Module:
    data = one_client((x, np.arange(len(x)) % 3), classes=3)
    Measured(share)(Begin(model, data, nn.functional.cross_entropy))
    return model


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize(("samples", "batch"), [(40, 512), (40, 10)])
def test_it_is_the_mixture_of_the_clients_own_and_the_shared_distribution(
    share: float, samples: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "BATCH", batch)
    x = stream(1, "inputs").normal(2, 3, (samples, 4)).astype(np.float32)
    model = normalised()
    state = references(model)
    hidden = x @ state["0.weight"].numpy().T + state["0.bias"].numpy()
    blocks = np.split(hidden, samples // min(batch, samples))
    own_mean, own_variance = hidden.mean(0), np.mean([block.var(0, ddof=1) for block in blocks], axis=0)
    # the second moment of a mixture is the mixture of the second moments
    mean = share * own_mean + (1 - share) * np.arange(5)
    second = share * (own_variance + own_mean**2) + (1 - share) * (np.arange(5) + 1 + np.arange(5) ** 2)
    moved(model, x, share)
    np.testing.assert_allclose(state["1.running_mean"].numpy(), mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state["1.running_var"].numpy(), second - mean**2, rtol=1e-4, atol=1e-4)


def test_nothing_else_of_the_model_moves() -> None:
    model = normalised()
    model[3].eval()
    before, modes = clone(references(model)), [module.training for module in model.modules()]
    moved(model, np.ones((6, 4), np.float32), 0.5)
    after = references(model)
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"1.running_mean", "1.running_var"}
    assert [module.training for module in model.modules()] == modes
    assert model[1].momentum == 0.1


def test_one_sample_has_no_variance() -> None:
    model = moved(normalised(), np.ones((1, 4), np.float32), 1.0)
    assert references(model)["1.running_mean"].tolist() == [0, 1, 2, 3, 4]


def test_training_does_not_see_it_and_nothing_of_it_leaves_a_client() -> None:
    plain, own = (
        fedfac.fit(small_model(), small_federation(), method=methods.fedper() | Statistics(share), **SHORT)
        for share in (0.0, 1.0)
    )
    assert bitwise(plain.server, own.server)
    assert [r["train_loss"] for r in plain.records] == [r["train_loss"] for r in own.records]
    assert [r["test"]["loss"] for r in plain.records] != [r["test"]["loss"] for r in own.records]


def test_a_model_without_statistics_is_left_alone() -> None:
    with global_stream(0, "model"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
    plain, own = (
        fedfac.fit(model, small_federation(), method=methods.fedper() | Statistics(share), **SHORT)
        for share in (0.0, 1.0)
    )
    assert plain.records == own.records
    assert (methods.fedper() | Statistics(1.0)).plan(Anatomy.of(model)) == methods.fedper().plan(Anatomy.of(model))


def test_a_shared_model_is_then_the_clients_own() -> None:
    method = methods.fedfac(layers=[1], tau=0) | Statistics(0.5)
    result = fedfac.fit(small_model(), small_federation(), method=method, **SHORT)
    assert result.records[-1]["test"]["model"] == "personal"
    states = [result.model(client).state_dict() for client in range(2)]
    different = {name for name in states[0] if not torch.equal(states[0][name], states[1][name])}
    assert different
    assert all(name.endswith(("running_mean", "running_var")) for name in different)


def test_it_serves_clients_whose_instruments_differ_and_newcomers_too() -> None:
    """All clients have one task, but each measures on a scale of its own."""
    rng = stream(0, "instruments")
    centres = rng.normal(size=(4, 6))
    arrays = []
    for _ in range(10):
        y = rng.integers(0, 4, 80)
        x = centres[y] + 0.5 * rng.normal(size=(80, 6))
        arrays.append(((x * rng.uniform(0.2, 5) + rng.normal(0, 3, 6)).astype(np.float32), y))
    federation = fedfac.Federation.from_arrays(arrays, classes=4)
    with global_stream(0, "model"):
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    settings: dict[str, Any] = {"rounds": 15, "cohort": 8, "epochs": 3, "batch_size": 16, "lr": 0.01, "device": "cpu"}
    shared, own = (
        fedfac.fit(
            model, federation, method=methods.fedfac(layers=[1], tau=0) | Statistics(share), newcomers=0.2, **settings
        ).records[-1]
        for share in (0.0, 1.0)
    )
    assert own["test"]["accuracy"] > shared["test"]["accuracy"] + 0.1
    assert own["newcomers"]["adapt"]["accuracy"] > shared["newcomers"]["adapt"]["accuracy"] + 0.1


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_bad_requests_are_refused(share: float) -> None:
    assert message(ConfigError, lambda: methods.fedper() | Statistics(share)) == (
        f"statistics is {share}; the share of a client's own is a number from 0 (none) to 1 (all)"
    )
