"""What a client's training gives: its last iterate, or the mean of all of them (iterate)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import bitwise, message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedfac
from fedfac import methods
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError
from fedfac.method import PERSONAL, Method, Phase, check_method
from fedfac.newcomers import trained_copy
from fedfac.seeds import global_stream
from fedfac.split import Split
from fedfac.state import clone, references
from fedfac.training import Local, schedule

SHORT: dict[str, Any] = {"rounds": 3, "cohort": 3, "epochs": 2, "batch_size": 8, "device": "cpu", "lanes": 1}
BUILDERS: dict[str, Callable[[str], Method]] = {
    "fedavg": lambda iterate: methods.fedavg(iterate=iterate),
    "fedavg+": lambda iterate: methods.fedavg_plus(iterate=iterate, finetune_epochs=1),
    "fedprox": lambda iterate: methods.fedprox(iterate=iterate, mu=0.5),
    "fedprox+": lambda iterate: methods.fedprox_plus(iterate=iterate, mu=0.5),
    "fedper": lambda iterate: methods.fedper(iterate=iterate, refresh_epochs=1),
    "fedrep": lambda iterate: methods.fedrep(iterate=iterate),
    "fedfac": lambda iterate: methods.fedfac(layers=[1], iterate=iterate),
    "fedfac-plus": lambda iterate: methods.fedfac_plus(layers=[1], iterate=iterate),
}


def trained(method: Method, model: nn.Module | None = None, **changes: Any) -> fedfac.Result:
    return fedfac.fit(model or small_model(), small_federation(), method=method, **SHORT | changes)


def plain_model() -> nn.Module:
    """No dropout and no batch normalisation: a hand-written loop needs to know nothing of ours."""
    with global_stream(0, "iterate"):
        return nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.ReLU(), nn.Linear(6, 3))


def through(model: nn.Module, phase: Phase, local: Local, split: Split | None = None) -> dict[str, Tensor]:
    data = small_federation().client(1)
    split = Split({name: tuple(t.shape) for name, t in references(model).items()}) if split is None else split
    start = clone(references(model))
    return references(trained_copy(model, start, split, (phase,), local, data, seed=3, client=1, purpose="train"))


@settings(max_examples=15, deadline=None)
@given(epochs=st.integers(1, 3), batch=st.integers(2, 30), optimizer=st.sampled_from(["adam", "sgd"]))
def test_the_mean_is_over_every_place_that_a_hand_written_loop_comes_to(
    epochs: int, batch: int, optimizer: str
) -> None:
    local = Local(epochs=epochs, batch_size=batch, lr=0.02, optimizer=optimizer)
    ours = through(plain_model(), Phase(iterate="mean"), local)
    model, data = plain_model(), small_federation().client(1)
    descend = (torch.optim.Adam if optimizer == "adam" else torch.optim.SGD)(model.parameters(), lr=0.02)
    places = []
    for index in schedule(data.size, epochs, local, 3, "train", 0, 1, 0):
        inputs, targets = data.pool.batch(data.train[index])
        descend.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        descend.step()
        places.append(copy.deepcopy(model.state_dict()))
    for name, tensor in ours.items():
        expected = torch.stack([place[name] for place in places]).double().mean(0).float()
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-5)


def test_the_mean_of_one_step_is_its_end() -> None:
    local = Local(epochs=1, batch_size=1000)
    ends = [through(plain_model(), Phase(iterate=iterate), local) for iterate in ("last", "mean")]
    assert bitwise(*ends)
    more = [through(plain_model(), Phase(iterate=iterate), replace(local, epochs=2)) for iterate in ("last", "mean")]
    assert not bitwise(*more)


def test_what_is_frozen_stays_to_the_bit() -> None:
    model = plain_model()
    split = methods.fedfac(layers=[1]).plan(fedfac.Anatomy.of(model)).split.with_masks({"1": (True, False) * 3})
    found = through(model, Phase(trains=PERSONAL, iterate="mean"), Local(epochs=3, batch_size=8, lr=0.1), split)
    before = references(model)
    assert bitwise({"w": found["1.weight"][::2]}, {"w": before["1.weight"][::2]})  # a third of a third is not a ninth
    assert bitwise({"h": found["3.weight"]}, {"h": before["3.weight"]})
    assert not torch.equal(found["1.weight"][1::2], before["1.weight"][1::2])


@pytest.mark.parametrize("name", BUILDERS)
def test_every_method_that_has_it_trains_by_it(name: str) -> None:
    end, mean = (trained(BUILDERS[name](iterate)) for iterate in ("last", "mean"))
    assert not bitwise(end.server, mean.server)
    assert BUILDERS[name]("last").training != BUILDERS[name]("mean").training
    assert BUILDERS[name]("mean").options["iterate"] == "mean"
    same = mean.records[0]["train_loss"] == end.records[0]["train_loss"]
    assert same is (name != "fedrep")  # the steps of a first round are the same, unless a second phase begins at a mean


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedprox", "fedfac", "fedfac-plus"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_stacked_clients_take_the_same_means(name: str, optimizer: str) -> None:
    lanes, stack = (
        trained(BUILDERS[name]("mean"), plain_model(), stack=stack, optimizer=optimizer, lr=0.01)
        for stack in (False, True)
    )
    for tensor, value in lanes.server.items():
        torch.testing.assert_close(stack.server[tensor], value, rtol=1e-5, atol=1e-5)


def test_with_everything_shared_fedfac_is_fedavg_with_means_too() -> None:
    fedavg = trained(methods.fedavg(iterate="mean"))
    assert bitwise(trained(methods.fedfac(layers=[1], tau=0, iterate="mean")).server, fedavg.server)
    plus = methods.fedfac_plus(layers=[1], iterate="mean", prior=0.0, server_momentum=0.0, average=0.0)
    assert plus.training == methods.fedavg(iterate="mean").training
    assert bitwise(trained(plus).server, fedavg.server)


@pytest.mark.parametrize("name", ["fedavg+", "fedrep", "fedfac-plus"])
def test_it_keeps_the_laws(name: str) -> None:
    check_method(BUILDERS[name]("mean"))


@pytest.mark.parametrize("name", BUILDERS)
def test_another_one_is_refused_at_once(name: str) -> None:
    assert message(ConfigError, lambda: BUILDERS[name]("middle")) == "iterate is 'middle'. Known: last, mean."
