"""Limits in which one method is another, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedfac
from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.conformance import small_federation, small_model
from fedfac.method import Method
from fedfac.state import references, same
from fedfac.switches import ServerRate


def trained(method: Method, **settings: Any) -> fedfac.Result:
    arguments: dict[str, Any] = {"rounds": 3, "rate": 0.6, "epochs": 1, "batch_size": 8, "seed": 3, "lanes": 1}
    return fedfac.fit(small_model(), small_federation(), method=method, **(arguments | settings))


def models_of(result: fedfac.Result) -> list[dict[str, torch.Tensor]]:
    return [references(result.model(client)) for client in range(len(result.names))]


def equal(one: fedfac.Result, other: fedfac.Result) -> bool:
    return same(one.server, other.server) and all(
        same(a, b) for a, b in zip(models_of(one), models_of(other), strict=True)
    )


@pytest.mark.parametrize("schedule", ["dynamic", "static"])
@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("tau", [0, "0%"])  # without looking at the layers, and by their scores
def test_fedfac_with_everything_shared_is_fedavg(schedule: str, rate: float, tau: int | str) -> None:
    fedavg = trained(methods.fedavg() | ServerRate(rate))
    for layers in ([1], [1, 2, 3], ["0", "4"]):
        result = trained(methods.fedfac(layers=layers, tau=tau, schedule=schedule) | ServerRate(rate))
        assert equal(result, fedavg)
        assert bool(result.split.masks) == (tau == "0%")


def test_a_layer_with_a_threshold_of_zero_is_shared_as_a_whole() -> None:
    """The same bits as by its scores, but nothing is measured and a client keeps nothing of it."""
    some = trained(methods.fedfac(layers=[1, 2], tau={1: "50%", 2: 0}, kappa={1: 0.8, 2: 0.9}))
    one = trained(methods.fedfac(layers=[1], tau="50%", kappa=0.8))
    assert equal(some, one)
    assert some.split.masks == one.split.masks
    assert some.split.kept == one.split.kept
    assert methods.fedfac(layers=[1], tau=0, norm="personal").plan(Anatomy.of(small_model())).split.kept


def test_fedfac_without_layers_is_fedavg() -> None:
    assert equal(trained(methods.fedfac(layers=[])), trained(methods.fedavg()))


def test_fedfac_with_half_personal_is_not_fedavg() -> None:
    assert not equal(trained(methods.fedfac(layers=[1], tau="50%")), trained(methods.fedavg()))


@pytest.mark.parametrize("schedule", ["dynamic", "static"])
def test_all_personal_layers_never_move_on_the_server(schedule: str) -> None:
    start = references(small_model())
    result = trained(methods.fedfac(layers=[1, 2], tau="inf", schedule=schedule))
    split = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "4.weight", "4.bias"]
    for name in split:
        assert torch.equal(result.server[name], start[name]), name
    assert not torch.equal(result.server["7.weight"], start["7.weight"])
    assert equal(result, trained(methods.all_personal(layers=[1, 2])))


def test_local_training_never_moves_the_server() -> None:
    result = trained(methods.local())
    assert same(result.server, references(small_model()))


def test_one_client_alone_trains_the_same_with_every_method_that_shares_all_or_nothing() -> None:
    """With a federation of one, averaging does nothing: FedAvg is local training up to a rounding of n·w/n."""
    federation = small_federation(clients=1)
    runs = [
        fedfac.fit(small_model(), federation, method=m, rounds=2, epochs=1, batch_size=8)
        for m in (methods.fedavg(), methods.local())
    ]
    for a, b in zip(models_of(runs[0]), models_of(runs[1]), strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name])


def test_a_fixed_random_split_stays_and_a_redrawn_one_moves() -> None:
    fixed, redrawn = trained(methods.random_split(layers=[2])), trained(methods.random_split(layers=[2], redraw=True))
    assert len({str(dict(masks)) for masks in fixed.masks.values()}) == 1
    assert len({str(dict(masks)) for masks in redrawn.masks.values()}) == len(redrawn.masks)
    assert all(sum(masks["4"]) == 4 for result in (fixed, redrawn) for masks in result.masks.values())


def test_static_restarts_from_the_common_start() -> None:
    """Round 0 trains only to decide: with no element personal, what follows is FedAvg from W⁰ (see above),
    and the record of round 0 has a cohort but no evaluation."""
    result = trained(methods.fedfac(layers=[1], schedule="static"))
    assert [r["round"] for r in result.records] == [0, 1, 2, 3]
    assert result.records[0]["cohort"]
    assert "test" not in result.records[0]
    assert len({str(dict(masks)) for masks in result.masks.values()}) == 1


def test_static_probe_can_look_at_all_clients() -> None:
    result = trained(methods.fedfac(layers=[1], schedule="static", probe_all=True))
    assert result.records[0]["cohort"] == [0, 1, 2, 3, 4]


def test_the_head_may_be_split_too() -> None:
    result = trained(methods.fedfac(layers=[-1], tau="34%"))
    assert result.splits[3].masks.keys() == {"7"}
    assert not torch.equal(references(result.model(0))["7.weight"], references(result.model(1))["7.weight"])
