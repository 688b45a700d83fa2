"""A head that is shared and copied, and predictions with a mean over rounds: what FedFac+ has beyond FedPer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import bitwise, message

import fedfac
from fedfac import methods
from fedfac.aggregate import running_mean
from fedfac.anatomy import Anatomy
from fedfac.conformance import small_federation, small_model
from fedfac.errors import ConfigError
from fedfac.method import Method
from fedfac.methods.prior import SHARES
from fedfac.rounds import Session
from fedfac.settings import Settings
from fedfac.split import Split
from fedfac.state import State
from fedfac.training import Local

HEAD = ("7.weight", "7.bias")
SHORT: dict[str, Any] = {"cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu", "evaluate_every": 1, "lanes": 1}


def trained(method: Method, rounds: int = 4, **changes: Any) -> fedfac.Result:
    return fedfac.fit(small_model(), small_federation(), method=method, rounds=rounds, **SHORT | changes)


def test_clients_train_as_fedper_s_do() -> None:
    """With everybody in every round, the copy changes what the server knows, and nothing of the training."""
    fedper, copy = (trained(m, cohort=5) for m in (methods.fedper(), methods.fedfac(layers=[], head="copy")))
    for client in range(5):
        assert bitwise(fedper.state(client), copy.state(client))
    assert [r["train_loss"] for r in fedper.records] == [r["train_loss"] for r in copy.records]
    assert not torch.equal(fedper.server[HEAD[0]], copy.server[HEAD[0]])


def test_the_server_has_the_mean_of_the_copies() -> None:
    result = trained(methods.fedfac(layers=[], head="copy"), rounds=1, cohort=5)
    sizes = [small_federation().client(client).size for client in range(5)]
    for name in HEAD:
        copies = torch.stack([result.state(client)[name].double() * sizes[client] for client in range(5)])
        torch.testing.assert_close(result.server[name].double(), copies.sum(0) / sum(sizes))
        assert not torch.equal(result.state(0)[name], result.state(1)[name])


@pytest.mark.parametrize("pull", [0.0, 0.25, 1.0])
def test_a_copy_is_pulled_to_the_shared_head_before_its_client_predicts(pull: float) -> None:
    plain, pulled = (trained(methods.fedfac(layers=[], head="copy", pull=p)) for p in (0.0, pull))
    assert bitwise(plain.server, pulled.server)
    for client in range(5):
        for name in HEAD:
            wanted = torch.lerp(plain.state(client)[name], plain.server[name], pull)
            assert torch.equal(pulled.state(client)[name], wanted)
    losses = [r.records[-1]["test"]["loss"] for r in (plain, pulled)]
    assert (losses[0] == losses[1]) is (pull == 0)


def test_a_newcomer_begins_with_the_mean_of_all_heads() -> None:
    result = trained(methods.fedfac(layers=[], head="copy"))
    adapted = result.adapt((torch.randn(6, 2, 6, 6), torch.tensor([0, 1, 2] * 2)), epochs=1)
    for name, tensor in adapted.state_dict().items():
        moved = not torch.equal(tensor, result.server[name])
        assert moved is (name in HEAD), name


@pytest.mark.parametrize(
    "method",
    [
        methods.fedfac(layers=[1], head="copy", pull=0.5, average=0.5),
        methods.fedfac_plus(layers=[1], warmup=1),
        methods.fedper(average=0.9),
        methods.all_personal(layers=[1], head="copy"),
    ],
    ids=str,
)
def test_the_laws_are_kept(method: Method) -> None:
    fedfac.check_method(method)


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
    plain, mean = trained(methods.fedper()), trained(methods.fedper(average=0.6))
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
    method = methods.fedfac_plus(layers=[1], warmup=2)
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


def equal_clients(one: fedfac.Result, other: fedfac.Result) -> bool:
    return all(bitwise(one.state(client), other.state(client)) for client in range(5))


def test_a_split_with_copies_is_a_value() -> None:
    anatomy = Anatomy.of(small_model())
    plain = Split.of(anatomy, layers=[anatomy.layer(1)])
    split = Split(plain.shapes, plain.personal_tensors, plain.owners, plain.masks, dict.fromkeys(HEAD, 0.5))
    assert Split.from_json(split.to_json()) == split != plain
    assert hash(split) != hash(plain)
    assert split.kept == plain.kept | set(HEAD)
    assert split.with_masks({"0": [False] * 6}).copies == dict.fromkeys(HEAD, 0.5)
    assert split.shared_numel() == plain.shared_numel()
    assert "the server has the mean, each client its own: 7.bias, 7.weight" in str(split)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Split({"a": (1,)}, copies={"b": 0.0}), "does not have: ['b']"),
        (lambda: Split({"a": (1,)}, frozenset("a"), copies={"a": 0.0}), "these are not: ['a']"),
        (lambda: methods.fedfac(elements="copy"), "elements is 'copy'. Known: personal, refreshed."),
        (lambda: methods.fedfac(pull=1.5), "pull is 1.5; it is a number from 0 (not at all) to 1"),
        (lambda: trained(methods.fedper(average=1.0)), "average is 1.0; the weight of the past"),
        (lambda: trained(methods.fedfac(layers=[-1], head="copy")), "cannot be both copied and one of the layers"),
    ],
)
def test_impossible_requests_are_refused(make: Any, said: str) -> None:
    assert said in message(ConfigError, make)


def test_with_a_copied_head_the_prior_is_not_in_the_training() -> None:
    result = trained(methods.fedfac(layers=[], head="copy", prior=2.0), newcomers=0.2, cohort=2)
    assert "log_prior" not in {
        name for phase in (result.plan.phases if result.plan else ()) for name in phase.trains or ()
    }
    for client in range(5):
        data = small_federation().client(client)
        counts = torch.bincount(data.pool.batch(data.train)[1], minlength=3) + 0.5
        whole = 2.0 * (counts / counts.sum()).log()
        model = result.adapt(data) if client in result.newcomers else result.model(client)
        found = dict(model.named_buffers())["log_prior"]
        assert any(torch.allclose(found, share * whole) for share in SHARES)
