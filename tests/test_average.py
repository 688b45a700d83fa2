"""Predictions with a mean of the server's states over rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import bitwise, message

import fedfac
from fedfac import methods
from fedfac.aggregate import running_mean
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError
from fedfac.method import Method
from fedfac.rounds import Session
from fedfac.settings import Settings
from fedfac.state import State
from fedfac.switches import Average, Warmup
from fedfac.training import Local

SHORT: dict[str, Any] = {"cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu", "evaluate_every": 1, "lanes": 1}


def trained(method: Method, rounds: int = 4, **changes: Any) -> fedfac.Result:
    return fedfac.fit(small_model(), small_federation(), method=method, rounds=rounds, **SHORT | changes)


def states_of(method: Method, rounds: int) -> list[State]:
    settings = {k: v for k, v in SHORT.items() if k not in ("epochs", "batch_size")}
    found = []
    local = Local(epochs=1, batch_size=8)
    with Session(small_model(), small_federation(), method, local, Settings(rounds=rounds, **settings)) as session:
        while not session.finished:
            session.step()
            found.append({name: tensor.clone() for name, tensor in session.server.items()})
    return found


def test_clients_predict_with_the_mean_over_rounds_and_train_on_without_it() -> None:
    plain, mean = trained(methods.fedper()), trained(methods.fedper() | Average(0.6))
    assert [r["train_loss"] for r in plain.records] == [r["train_loss"] for r in mean.records]
    wanted: dict[str, torch.Tensor] = {}
    for number, state in enumerate(states_of(methods.fedper(), 4), start=1):
        weight = max(0.4, 9 / (number + 8))  # the first rounds are soon forgotten, later ones more slowly
        for name, tensor in state.items():
            wanted[name] = tensor.double() if number == 1 else (1 - weight) * wanted[name] + weight * tensor.double()
    for name, tensor in mean.server.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(tensor, plain.server[name])
    assert mean.records[0]["test"] == plain.records[0]["test"]
    assert mean.records[-1]["test"]["loss"] != plain.records[-1]["test"]["loss"]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_goes_on_exactly_and_is_loaded_with_its_mean(stop: int, tmp_path: Path) -> None:
    method = methods.fedfac_plus(layers=[1]) | Warmup(2)
    straight = trained(method, out=tmp_path / "straight")
    trained(method, rounds=stop, out=tmp_path / "run")
    resumed = trained(method, out=tmp_path / "run", resume=True)
    assert resumed.records == straight.records
    assert bitwise(resumed.server, straight.server)
    loaded = fedfac.load(tmp_path / "run", small_model(), method=method, federation=small_federation())
    assert bitwise(loaded.server, straight.server)
    x = torch.randn(3, 2, 6, 6)
    assert torch.equal(loaded.model(1)(x), straight.model(1)(x))


def test_a_mean_of_equal_states_is_that_state_and_counters_have_none() -> None:
    state = {"w": torch.tensor([0.1, 3.0]), "n": torch.tensor(7)}
    mean = running_mean({}, state, 1.0)
    assert mean.keys() == {"w"}
    assert mean["w"] is not state["w"]
    assert torch.equal(running_mean(mean, state, 0.3)["w"], state["w"])


@pytest.mark.parametrize("weight", [-0.1, 1.0, float("nan")])
def test_a_weight_out_of_range_is_explained(weight: float) -> None:
    assert message(ConfigError, lambda: Average(weight)) == (
        f"average is {weight}; the weight of the past is a number from 0 (off) to below 1"
    )
