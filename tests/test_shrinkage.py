"""After a refresh, what it trained moves a share of the way back to where it began (Refresh(shrinkage=...))."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers import bitwise, message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedfac
from fedfac import methods
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError
from fedfac.method import Method
from fedfac.state import State, references
from fedfac.switches import Average, Refresh, Statistics
from fedfac.switches.prior import BUFFER

SHORT: dict[str, Any] = {"rounds": 3, "cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu", "lanes": 1}
METHODS: dict[str, Method] = {
    "fedavg+": methods.fedavg_plus() | Refresh(2, "all"),
    "fedavg+, averaged": methods.fedavg_plus() | Refresh(2, "all") | Average(0.5),
    "fedprox+": methods.fedprox_plus(mu=0.5) | Refresh(1, "all"),
    "fedper": methods.fedper() | Refresh(2),
    "fedfac": methods.fedfac(layers=[1]) | Refresh(2),
    "fedfac-plus": methods.fedfac_plus(layers=[1]),
    "fedfac-plus, its head too": methods.fedfac_plus(layers=[1]) | Refresh(3, "head"),
    "fedfac-plus, all": methods.fedfac_plus(layers=[1]) | Refresh(3, "all"),
}


def shrunk(method: Method, share: float) -> Method:
    """The same with a refresh that goes back."""
    (own,) = [switch for switch in method.switches if isinstance(switch, Refresh)]
    return method | replace(own, shrinkage=share)


def trained(method: Method, model: nn.Module | None = None, **changes: Any) -> fedfac.Result:
    return fedfac.fit(model or small_model(), small_federation(), method=method, **SHORT | changes)


def states(method: Method, client: int) -> tuple[State, State]:
    """A client's tensors before and after the refresh."""
    result = trained(method)
    return result.state(client), references(result.model(client))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("share", [0.25, 0.9])
def test_a_client_ends_between_where_the_refresh_ends_and_where_it_began(name: str, share: float) -> None:
    method = METHODS[name] | Statistics(0)
    for client in (0, 4):
        began, ended = states(method, client)
        same_start, found = states(shrunk(method, share), client)
        assert bitwise(began, same_start)  # the training is the same
        moved = {n for n in began if began[n].is_floating_point() and not torch.equal(began[n], ended[n])}
        assert moved
        for tensor in began.keys() - moved:
            assert torch.equal(found[tensor], ended[tensor])
        for tensor in moved - {BUFFER}:  # which is counted, not trained
            torch.testing.assert_close(found[tensor], (1 - share) * ended[tensor] + share * began[tensor])
            assert not torch.equal(found[tensor], ended[tensor])


def test_with_none_of_it_nothing_changes() -> None:
    for method in METHODS.values():
        assert shrunk(method, 0.0) == method


@pytest.mark.parametrize("name", METHODS)
def test_it_changes_predictions_and_no_number_of_the_training(name: str) -> None:
    plain, back = (trained(shrunk(METHODS[name], share), newcomers=0.4) for share in (0.0, 0.5))
    assert plain.plan is not None
    assert back.plan is not None
    assert plain.plan.training == back.plan.training
    assert bitwise(plain.server, back.server)
    assert [r["train_loss"] for r in plain.records] == [r["train_loss"] for r in back.records]
    assert plain.records[-1]["test"]["loss"] != back.records[-1]["test"]["loss"]
    served = [r.records[-1]["newcomers"]["adapt"]["loss"] for r in (plain, back)]
    assert served[0] != served[1]  # a new client goes back to what it began with, as all others do


@settings(max_examples=10, deadline=None)
@given(st.floats(0, 0.99), st.sampled_from(["personal", "head", "all"]))
def test_stacked_clients_go_back_as_far(share: float, refresh: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.ReLU(), nn.Linear(6, 3))
    method = methods.fedfac_plus(layers=[1]) | Refresh(3, refresh, share)
    one, many = (trained(method, model, stack=stack).records[-1]["test"]["loss"] for stack in (False, True))
    assert one == pytest.approx(many, rel=1e-4)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_out_of_range_is_explained(share: float) -> None:
    words = f"shrinkage is {share}; the fraction of the way back is a number from 0 to below 1"
    assert message(ConfigError, lambda: Refresh(3, "all", share)) == words
    for name in methods.METHODS:
        build = partial(methods.build, name, {"refresh_shrinkage": share})
        assert message(ConfigError, build) == words
