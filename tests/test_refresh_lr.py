"""A refresh at a learning rate of its own (refresh_lr, finetune_lr: a share of the run's)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import bitwise, message
from torch import nn

import fedfac
from fedfac import methods
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError
from fedfac.method import Method, check_method
from fedfac.newcomers import trained_copy
from fedfac.state import references
from fedfac.training import Local

SHORT: dict[str, Any] = {"rounds": 3, "cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu", "lanes": 1}
BUILDERS: dict[str, Callable[[float], Method]] = {
    "fedavg+": lambda share: methods.fedavg_plus(finetune_epochs=2, finetune_lr=share),
    "fedprox+": lambda share: methods.fedprox_plus(finetune_epochs=2, mu=0.5, finetune_lr=share),
    "fedper": lambda share: methods.fedper(refresh_epochs=2, refresh_lr=share),
    "fedfac": lambda share: methods.fedfac(layers=[1], refresh_epochs=2, refresh_lr=share),
    "fedfac-plus": lambda share: methods.fedfac_plus(layers=[1], refresh_lr=share),
    "fedfac-plus, all": lambda share: methods.fedfac_plus(layers=[1], refresh="all", refresh_lr=share),
}


def trained(method: Method, model: nn.Module | None = None, **changes: Any) -> fedfac.Result:
    return fedfac.fit(model or small_model(), small_federation(), method=method, **SHORT | changes)


@pytest.mark.parametrize("name", BUILDERS)
def test_it_is_the_refresh_of_a_run_with_that_rate_on_the_training_of_this_one(name: str) -> None:
    plain, slow = (trained(BUILDERS[name](share), lr=0.004) for share in (1.0, 0.25))
    assert bitwise(plain.server, slow.server)
    assert BUILDERS[name](1.0).training == BUILDERS[name](0.25).training
    assert [r["train_loss"] for r in plain.records] == [r["train_loss"] for r in slow.records]
    assert plain.records[-1]["test"]["loss"] != slow.records[-1]["test"]["loss"]
    assert plain.plan is not None
    for client in (0, 3):
        by_hand = trained_copy(
            plain.template,
            plain.state(client),
            plain.split,
            plain.plan.refresh,
            Local(epochs=1, batch_size=8, lr=0.001),
            small_federation().client(client),
            seed=plain.seed,
            client=client,
            round=3,
            purpose="refresh",
        )
        assert bitwise(references(slow.model(client)), references(by_hand))
        assert not bitwise(references(slow.model(client)), references(plain.model(client)))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_stacked_clients_go_as_slowly(optimizer: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.ReLU(), nn.Linear(6, 3))
    losses = {
        (share, stack): trained(BUILDERS["fedfac-plus, all"](share), model, stack=stack, optimizer=optimizer, lr=0.01)
        .records[-1]["test"]["loss"]
        for share in (1.0, 0.1)
        for stack in (False, True)
    }  # fmt: skip
    assert losses[1.0, True] == pytest.approx(losses[1.0, False], rel=1e-4)
    assert losses[0.1, True] == pytest.approx(losses[0.1, False], rel=1e-4)
    assert losses[0.1, True] != pytest.approx(losses[1.0, True], rel=1e-4)


def test_it_keeps_the_laws() -> None:
    check_method(BUILDERS["fedfac-plus, all"](0.3))


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan"), float("inf")])
def test_a_share_out_of_range_is_explained(share: float) -> None:
    words = f"the learning rate of a refresh is {share} times the run's; allowed: a positive number"
    for build in BUILDERS.values():
        assert message(ConfigError, lambda build=build: trained(build(share))) == words  # type: ignore[misc]
