"""Every method with every switch: the laws hold, or the plan is refused, and both lists are here to be seen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import fedfac
from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.method import Method, Plan, Switch, check_method
from fedfac.rounds import Session
from fedfac.seeds import generator, global_stream
from fedfac.settings import Settings
from fedfac.state import State, clone, same
from fedfac.switches import (
    SWITCHES,
    Average,
    Decay,
    Hysteresis,
    Joint,
    Prior,
    Proximal,
    Refresh,
    ServerMomentum,
    ServerRate,
    Statistics,
    Warmup,
    options_of,
)
from fedfac.training import Local

GIVEN = methods.given_split(masks={"0": "001101"})
METHODS: Mapping[str, Method] = {**{name: methods.build(name) for name in methods.METHODS}, "given": GIVEN}
ON: Mapping[str, Switch] = {
    "joint": Joint(),
    "decay": Decay(0.5),
    "hysteresis": Hysteresis(0.3),
    "warmup": Warmup(1),
    "refresh": Refresh(1),
    "refresh, the head": Refresh(1, "head"),
    "refresh, all": Refresh(1, "all", 0.5),
    "prior": Prior(0.8),
    "prior, learned": Prior(0.8, "learned"),
    "proximal": Proximal(0.1),
    "statistics": Statistics(0.7),
    "average": Average(0.5),
    "server_momentum": ServerMomentum(0.4),
    "server_rate": ServerRate(0.6),
}
OFF: Mapping[str, Switch] = {
    "joint": Joint(False),
    "decay": Decay(0),
    "hysteresis": Hysteresis(0),
    "warmup": Warmup(0),
    "refresh": Refresh(0),
    "prior": Prior(0),
    "proximal": Proximal(0),
    "statistics": Statistics(0),
    "average": Average(0),
    "server_momentum": ServerMomentum(0),
    "server_rate": ServerRate(1),
}

ONE_MODEL = {"fedavg", "fedavg+", "fedprox", "fedprox+", "fedbabu"}  # everything is shared
SEVERAL = {"ditto", "apfl", "pfedme", "fedem"}  # networks for each client
BY_LAYER = {"local", "fedper", "fedrep", "lg-fedavg", "fedbn"}
NO_ELEMENTS = ONE_MODEL | SEVERAL | BY_LAYER
NO_DECISION = {"all-personal", "given"}  # a split by element that nobody decides about
REFUSED: Mapping[str, Mapping[str, set[str]]] = {  # by switch: what is said, and to which methods
    "joint": {"splits no layer by element": NO_ELEMENTS},
    "decay": {
        "has no rule that decides about elements": NO_ELEMENTS | NO_DECISION,
        "the rule of this method (RandomRule) does not have it": {"random", "random-redrawn"},
        "the rule of this method (VarianceRule) does not have it": {"variance"},
    },
    "hysteresis": {"has no rule that decides about elements": NO_ELEMENTS | NO_DECISION},
    "warmup": {"shares everything in every round": ONE_MODEL, "trains several models for each client": SEVERAL},
    "refresh": {
        "nothing of this method is a client's own and can be trained": ONE_MODEL,
        "has steps of its own before it predicts": {"fedem"},
    },
    "refresh, the head": {
        "has steps of its own before it predicts": {"fedem"},
        "refresh_trains=head: this method trains several models": SEVERAL - {"fedem"},
    },
    "refresh, all": {
        "has steps of its own before it predicts": {"fedem"},
        "refresh_trains=all: this method trains several models": SEVERAL - {"fedem"},
    },
    "prior": {},
    "prior, learned": {"one model by the plain objective": SEVERAL | {"fedprox", "fedprox+"}},
    "proximal": {},
    "statistics": {},
    "average": {"shares nothing, so there are no states of a server": {"local"}},
    "server_momentum": {"shares nothing, so there is no server": {"local"}},
    "server_rate": {"shares nothing, so there is no server": {"local"}},
}
REASONS = {
    (name, switch): reason
    for switch, said in REFUSED.items()
    for reason, names in said.items()
    for name in sorted(names)
}
PAIRS = list(itertools.product(METHODS, ON))
TAKEN = [pair for pair in PAIRS if pair not in REASONS]
SHORT: dict[str, Any] = {"rounds": 2, "cohort": 3, "device": "cpu", "lanes": 1, "evaluate_every": 2}


def each(pairs: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    """A test for every pair of a method and a switch."""
    return pytest.mark.parametrize(("name", "switch"), pairs, ids=[f"{name} | {switch}" for name, switch in pairs])


Comes = tuple[list[Any], State, list[State | None]]  # losses, the server's last state, what clients keep


@cache
def network() -> nn.Module:
    """Something to split, a normalisation, noise, a head."""
    with global_stream(0, "tiny"):
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))


@cache
def clients() -> fedfac.Federation:
    draws = generator(0, "tiny")
    arrays = []
    for client in range(4):
        x = torch.randn(12 + client, 4, generator=draws)
        arrays.append((x, (x[:, : 1 + client % 3].sum(1) > 0).long() + client % 2))
    return fedfac.Federation.from_arrays(arrays, classes=3, seed=0)


def planned(method: Method) -> Plan:
    return method.plan(Anatomy.of(method.wrapped(network())))


def of(name: str, switch: str) -> tuple[Method, Method]:
    """A method without a switch, and with it."""
    without = METHODS[name] | OFF[ON[switch].name]
    return without, without | ON[switch]


TRAINED: dict[str, Comes] = {}


def trained(method: Method) -> Comes:
    """All that a training comes to; the same method trains once."""
    if str(method) not in TRAINED:
        TRAINED[str(method)] = _trained(method)
    return TRAINED[str(method)]


def _trained(method: Method) -> Comes:
    local = Local(epochs=1, batch_size=8, lr=0.02)
    with Session(network(), clients(), method, local, Settings(**SHORT)) as session:
        while not session.finished:
            session.step()
        kept = [session._store.get(client) for client in range(4)]
        return [r["train_loss"] for r in session.records if r["round"]], clone(session.server), kept


def test_the_tables_have_every_switch_and_every_reason_is_for_one_that_is_there() -> None:
    assert {switch.name for switch in ON.values()} == OFF.keys() == SWITCHES.keys()
    assert REFUSED.keys() == ON.keys()
    assert {name for name, _ in REASONS} <= METHODS.keys()
    assert all(switch.is_on for switch in ON.values())
    assert not any(switch.is_on for switch in OFF.values())


@each(TAKEN)
def test_a_switch_that_is_taken_keeps_the_laws(name: str, switch: str) -> None:
    _, method = of(name, switch)
    check_method(method, model=network(), federation=clients())


@each(list(REASONS))
def test_a_switch_that_is_refused_is_named_with_the_method_and_a_reason_before_anything_is_trained(
    name: str, switch: str
) -> None:
    without, method = of(name, switch)
    planned(without)  # it is the switch that is refused
    with pytest.raises(ConfigError) as caught:
        fedfac.fit(network(), clients(), method=method, rounds=1, on_round=lambda record: pytest.fail("it trained"))
    assert REASONS[name, switch] in str(caught.value)
    assert ON[switch].name in str(caught.value)
    assert method.name in str(caught.value)


@each(TAKEN)
def test_a_switch_changes_the_half_of_the_plan_that_it_says(name: str, switch: str) -> None:
    without, method = (planned(method) for method in of(name, switch))
    changes = ON[switch].changes
    assert changes in ("training", "prediction", "training and prediction")
    assert without != method
    if changes == "training":
        assert without.prediction == method.prediction
    if changes == "prediction":
        assert without.training == method.training


@each([pair for pair in TAKEN if ON[pair[1]].changes == "prediction"])
def test_what_changes_predictions_changes_no_bit_of_a_training(name: str, switch: str) -> None:
    without, method = (trained(method) for method in of(name, switch))
    assert without[0] == method[0]
    assert same(without[1], method[1])
    for mine, theirs in zip(without[2], method[2], strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or theirs is None or same(mine, theirs)


@each([pair for pair in TAKEN if ON[pair[1]].changes == "training"])
def test_what_changes_the_training_changes_numbers(name: str, switch: str) -> None:
    without, method = (trained(method) for method in of(name, switch))
    assert without[0] != method[0] or not same(without[1], method[1])


@pytest.mark.parametrize("name", METHODS)
def test_the_order_in_which_switches_are_written_does_not_matter(name: str) -> None:
    method = METHODS[name]
    for one, other in itertools.permutations(ON.values(), 2):
        if one.name != other.name:
            assert method | one | other == method | other | one
    written = [switch for key, switch in ON.items() if "," not in key]
    together, backwards = method, method
    for switch in written:
        together |= switch
    for switch in reversed(written):
        backwards |= switch
    assert together == backwards
    assert [switch.name for switch in together.switches] == list(SWITCHES)


@pytest.mark.parametrize("name", METHODS)
def test_a_switch_that_is_off_is_not_there(name: str) -> None:
    method = METHODS[name]
    for switch in ON.values():
        off = OFF[switch.name]
        assert method | switch | off == method | off
        assert switch.name not in (method | off).describe()
        assert (method | switch | switch) == method | switch


@pytest.mark.parametrize("name", METHODS)
def test_all_the_switches_that_a_method_takes_go_together(name: str) -> None:
    method = METHODS[name]
    for switch in ON:
        if (name, switch) in TAKEN and "," not in switch:
            method |= ON[switch]
    check_method(method, model=network(), federation=clients())


@pytest.mark.parametrize("switch", ON)
def test_a_switch_is_built_by_its_options_too(switch: str) -> None:
    """What the command line and a file say is the value that is written in Python."""
    for name in METHODS.keys() - {"given"}:
        built = methods.build(name, options_of(ON[switch]))
        assert built.switches == (METHODS[name] | ON[switch]).switches
        assert replace(built, base=METHODS[name].base) == METHODS[name] | ON[switch]
