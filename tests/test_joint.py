"""Elements that all clients train, and of which a client makes its own before it predicts (Joint)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import bitwise

import fedfac
from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.cli import main
from fedfac.conformance import small_federation, small_model
from fedfac.method import Method
from fedfac.split import Split
from fedfac.state import references, state_of
from fedfac.switches import Joint, Warmup

HEAD = {"7.weight", "7.bias"}
FIRST = {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
SHORT: dict[str, Any] = {"cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu", "evaluate_every": 1, "lanes": 1}


def trained(method: Method, rounds: int = 4, **changes: Any) -> fedfac.Result:
    return fedfac.fit(small_model(), small_federation(), method=method, rounds=rounds, **SHORT | changes)


def joint(**options: Any) -> Method:
    return methods.build("fedfac", {"layers": [1], "joint": True, "refresh": 2} | options)


@pytest.mark.parametrize("schedule", ["dynamic", "static"])
@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("server", [{}, {"server_momentum": 0.5, "server_rate": 0.7}])
def test_all_clients_train_as_fedavg_s_do(schedule: str, warmup: int, server: dict[str, Any]) -> None:
    """Whatever is decided, and with elements that change sides in it."""
    split = trained(joint(layers=[1, 2], schedule=schedule, warmup=warmup, **server))
    common = trained(methods.build("fedavg", server))
    assert bitwise(split.server, common.server)
    rounds = [record for record in split.records if record["round"] > 0]
    assert [r["train_loss"] for r in rounds] == [r["train_loss"] for r in common.records]
    assert 0 < split.split.shared_share < 1


def test_a_client_keeps_nothing() -> None:
    result = trained(joint())
    for client in range(5):
        assert result.store.get(client) is None
        assert bitwise(result.state(client), result.server)


@pytest.mark.parametrize("refresh", ["personal", "head"])
def test_a_client_s_own_elements_are_made_anew_and_nothing_else_moves(refresh: str) -> None:
    result = trained(joint(refresh_trains=refresh))
    split = result.split
    newcomer = result.adapt(small_federation().client(1), client=1)
    for model in (result.model(0), result.model(1), newcomer):
        for name, tensor in references(model).items():
            if name in HEAD:
                assert torch.equal(tensor, result.server[name]) is (refresh == "personal")
                continue
            shared = split.mask(name)
            assert torch.equal(tensor[shared], result.server[name][shared])
            if name in ("0.weight", "0.bias"):
                assert not torch.equal(tensor[~shared], result.server[name][~shared])
    assert {record["test"]["model"] for record in result.records} == {"fine-tuned"}


def test_without_a_refresh_a_client_predicts_with_the_model_of_all() -> None:
    result = trained(joint(refresh=0))
    assert {record["test"]["model"] for record in result.records} == {"global"}
    assert bitwise(references(result.model(0)), result.server)


def test_newcomers_adapt_what_the_split_calls_personal() -> None:
    result = trained(joint(), newcomers=0.4)
    assert result.records[-1]["newcomers"]["adapt"]["model"] == "adapted"


def test_they_keep_the_laws_and_are_sent_as_a_whole() -> None:
    for schedule in ("dynamic", "static"):
        fedfac.check_method(methods.fedfac_plus(layers=[1, 2], schedule=schedule) | Warmup(1))
    split = joint().plan(Anatomy.of(small_model())).split.with_masks({"0": [False] * 3 + [True] * 3})
    state = state_of(small_model())
    assert split.shared(state).keys() == state.keys()
    assert split.personal(state) == {}
    assert bitwise(split.compose(split.shared(state), {}), state)
    assert split.shared_numel() == sum(tensor.numel() for tensor in state.values())
    assert not split.kept
    assert not split.cut
    assert split.own == split.mixed == FIRST
    assert split.with_masks({"0": [True] * 6}).own == frozenset()
    assert split.shared_share == 0.5
    assert "the others are trained by all, too" in str(split)


def test_it_is_a_part_of_the_split_s_value() -> None:
    anatomy = Anatomy.of(small_model())
    plain, anew = ((methods.fedfac(layers=[1]) | Joint(on)).plan(anatomy).split for on in (False, True))
    assert plain != anew
    assert hash(plain) != hash(anew)
    assert Split.from_json(anew.to_json()) == anew
    assert "anew" not in plain.to_json()  # runs of earlier versions go on
    assert anew.with_masks({"0": [False] * 6}).anew


def test_inspect_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for on in (True, False):
        trained(joint(joint=on), out=tmp_path / str(on))
        assert main(["inspect", str(tmp_path / str(on))]) == 0
        assert ("a client makes its own of them" in capsys.readouterr().out) is on
