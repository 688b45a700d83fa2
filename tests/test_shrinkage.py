"""After a refresh, what it trained moves a share of the way back to where it began (shrinkage)."""

from __future__ import annotations

from collections.abc import Callable
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
from fedfac.method import Method, check_method
from fedfac.methods.prior import BUFFER
from fedfac.state import State, references

SHORT: dict[str, Any] = {"rounds": 3, "cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu", "lanes": 1}
BUILDERS: dict[str, Callable[..., Method]] = {
    "fedavg+": lambda **o: methods.fedavg_plus(finetune_epochs=2, **o),
    "fedavg+, averaged": lambda **o: methods.fedavg_plus(finetune_epochs=2, average=0.5, **o),
    "fedprox+": lambda **o: methods.fedprox_plus(finetune_epochs=1, mu=0.5, **o),
    "fedper": lambda **o: methods.fedper(refresh_epochs=2, **o),
    "fedfac": lambda **o: methods.fedfac(layers=[1], refresh_epochs=2, **o),
    "fedfac-plus": lambda **o: methods.fedfac_plus(layers=[1], **o),
    "fedfac-plus, its head too": lambda **o: methods.fedfac_plus(layers=[1], refresh="head", **o),
    "fedfac-plus, all": lambda **o: methods.fedfac_plus(layers=[1], refresh="all", **o),
}


def trained(method: Method, model: nn.Module | None = None, **changes: Any) -> fedfac.Result:
    return fedfac.fit(model or small_model(), small_federation(), method=method, **SHORT | changes)


def states(method: Method, client: int) -> tuple[State, State]:
    """A client's tensors before and after the refresh."""
    result = trained(method)
    return result.state(client), references(result.model(client))


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("share", [0.25, 0.9])
def test_a_client_ends_between_where_the_refresh_ends_and_where_it_began(name: str, share: float) -> None:
    for client in (0, 4):
        began, ended = states(BUILDERS[name](statistics=0) if "plus" in name else BUILDERS[name](), client)
        options = {"shrinkage": share, **({"statistics": 0} if "plus" in name else {})}
        same_start, found = states(BUILDERS[name](**options), client)
        assert bitwise(began, same_start)  # the training is the same
        moved = {n for n in began if began[n].is_floating_point() and not torch.equal(began[n], ended[n])}
        assert moved
        for tensor in began.keys() - moved:
            assert torch.equal(found[tensor], ended[tensor])
        for tensor in moved - {BUFFER}:  # which is counted, not trained
            torch.testing.assert_close(found[tensor], (1 - share) * ended[tensor] + share * began[tensor])
            assert not torch.equal(found[tensor], ended[tensor])


def test_with_none_of_it_nothing_changes() -> None:
    for build in BUILDERS.values():
        assert trained(build(shrinkage=0.0)).records == trained(build()).records


@pytest.mark.parametrize("name", BUILDERS)
def test_it_changes_predictions_and_no_number_of_the_training(name: str) -> None:
    plain, shrunk = (trained(BUILDERS[name](**o), newcomers=0.4) for o in ({}, {"shrinkage": 0.5}))
    assert BUILDERS[name]().training == BUILDERS[name](shrinkage=0.5).training
    assert bitwise(plain.server, shrunk.server)
    assert [r["train_loss"] for r in plain.records] == [r["train_loss"] for r in shrunk.records]
    assert plain.records[-1]["test"]["loss"] != shrunk.records[-1]["test"]["loss"]
    served = [r.records[-1]["newcomers"]["adapt"]["loss"] for r in (plain, shrunk)]
    # FedPer's newcomers begin at a head that nobody trains: they do not go back to it. FedFac's own elements likewise
    # begin at the server's, and go back to what there is of them there.
    assert (served[0] == served[1]) is (name == "fedper")


@settings(max_examples=10, deadline=None)
@given(st.floats(0, 0.99), st.sampled_from(["personal", "head", "all"]))
def test_stacked_clients_go_back_as_far(share: float, refresh: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.ReLU(), nn.Linear(6, 3))
    method = methods.fedfac_plus(layers=[1], refresh=refresh, shrinkage=share)
    one, many = (trained(method, model, stack=stack).records[-1]["test"]["loss"] for stack in (False, True))
    assert one == pytest.approx(many, rel=1e-4)


@pytest.mark.parametrize("name", ["fedavg+", "fedper", "fedfac-plus, all"])
def test_it_keeps_the_laws(name: str) -> None:
    check_method(BUILDERS[name](shrinkage=0.3))


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_out_of_range_is_explained(share: float) -> None:
    words = f"shrinkage is {share}; the share of the way back is a number from 0 to below 1"
    for build in BUILDERS.values():
        assert message(ConfigError, lambda build=build: trained(build(shrinkage=share))) == words  # type: ignore[misc]
