"""Many clients as one: the numbers of the lanes, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import bitwise, message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedfac
from fedfac import methods
from fedfac.engine import stacked
from fedfac.errors import ConfigError
from fedfac.method import Method, Phase
from fedfac.noise import Routed, silent
from fedfac.seeds import global_stream, stream

SIZES = (23, 9, 40, 2, 17, 33, 16)  # none alike: a last batch of one, of two, a client with one batch only


def mlp(seed: int = 0) -> nn.Module:
    with global_stream(seed, "stacked"):
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


def clients(sizes: tuple[int, ...] = SIZES, *, classes: int | None = 3) -> list[tuple[Any, ...]]:
    made = []
    for number, size in enumerate(sizes):
        rng = stream(1, "stacked data", number)
        x, x_test = (rng.normal(size=(n, 2, 3)).astype(np.float32) + number for n in (size, 5 + number))
        labels: list[Any] = [rng.integers(0, 3, n) for n in (size, 5 + number)]
        if classes is None:
            labels = [own.astype(np.float32)[:, None] for own in labels]
        made.append((x, labels[0], x_test, labels[1]))
    return made


def federation(**options: Any) -> fedfac.Federation:
    return fedfac.Federation.from_arrays(clients(), classes=3, **options)


def run(stack: bool | None, method: Method, data: fedfac.Federation | None = None, **options: Any) -> fedfac.Result:
    given: dict[str, Any] = {"rounds": 3, "cohort": 5, "epochs": 2, "batch_size": 8, "lanes": 1} | options
    return fedfac.fit(mlp(), data or federation(), method=method, stack=stack, device="cpu", **given)


def alike(a: fedfac.Result, b: fedfac.Result) -> None:
    assert a.splits == b.splits
    for client in range(len(SIZES)):
        for name, tensor in a.state(client).items():
            torch.testing.assert_close(b.state(client)[name], tensor, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(a.records, b.records, strict=True):
        assert ours["cohort"] == theirs["cohort"]
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-5)
        if "test" in ours:
            assert ours["test"]["loss"] == pytest.approx(theirs["test"]["loss"], abs=1e-5)
            assert ours["test"]["samples"] == theirs["test"]["samples"]


STACKED = ["fedavg", "fedavg+", "fedprox", "fedprox+", "local", "fedper", "fedrep", "lg-fedavg", "fedbabu", "fedfac"]


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}])
@pytest.mark.parametrize("name", STACKED)
def test_a_stacked_run_is_the_run_of_the_lanes(name: str, optimizer: dict[str, Any]) -> None:
    one = run(False, methods.build(name), **optimizer)
    many = run(True, methods.build(name), **optimizer)
    assert not bitwise(one.server, fedfac.fit(mlp(), federation(), rounds=1, cohort=2, epochs=1).server)  # it trained
    alike(one, many)


@pytest.mark.parametrize(
    "options",
    [{"warmup": 1}, {"warmup": 0, "head": "personal"}, {"warmup": 1, "head": "shared"}, {"prior_smoothing": "learned"}],
)
def test_fedfac_plus_is_stacked_with_the_priors_that_clients_count(options: dict[str, Any]) -> None:
    method = methods.build("fedfac-plus", {"layers": [2], **options})
    one, many = (run(stack, method, rounds=4, newcomers=0.3) for stack in (False, True))
    alike(one, many)
    served = [result.records[-1]["newcomers"]["adapt"]["loss"] for result in (one, many)]
    assert served[0] == pytest.approx(served[1], rel=1e-4)


def test_small_fully_connected_models_are_stacked_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = []
    inner = stacked.train_clients

    def watched(model: nn.Module, group: Any, *rest: Any, **options: Any) -> Any:
        groups.append(len(group))
        return inner(model, group, *rest, **options)

    monkeypatch.setattr(stacked, "train_clients", watched)
    run(None, methods.fedavg())
    assert groups == [5, 5, 5]
    run(False, methods.fedavg())
    assert groups == [5, 5, 5]


def test_the_number_of_lanes_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "GROUP", 2)
    one, three = (run(True, methods.fedfac(layers=[1]), lanes=lanes) for lanes in (1, 3))
    assert bitwise(one.server, three.server)
    assert one.records == three.records


def test_regression_validation_and_a_loss_of_ones_own() -> None:
    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().mean()

    with global_stream(0, "regression"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))
    for loss in (F.mse_loss, own):
        data = fedfac.Federation.from_arrays(clients(classes=None), classes=None, validation_share=0.2)
        results = [
            fedfac.fit(model, data, rounds=2, cohort=4, epochs=1, batch_size=8, loss=loss, stack=stack, device="cpu")
            for stack in (False, True)
        ]
        alike(*results)
        first, second = (result.records[-1]["validation"] for result in results)
        assert first["samples"] == second["samples"] > 0
        assert first["r2"] == pytest.approx(second["r2"], abs=1e-4)


def test_lazy_clients_are_stacked_too() -> None:
    arrays = clients()
    data = fedfac.Federation.lazy(len(arrays), lambda i: arrays[i], classes=3)
    alike(run(False, methods.fedper(), data), run(True, methods.fedper(), data))


def test_a_client_that_breaks_is_left_out_alone() -> None:
    arrays = clients()
    arrays[2] = (arrays[2][0] * 1e25, *arrays[2][1:])
    data = fedfac.Federation.from_arrays(arrays, classes=3)
    one, many = (run(stack, methods.fedper(), data, cohort=7, optimizer="sgd", lr=1e10) for stack in (False, True))
    assert list(one.records[0]["left_out"]) == list(many.records[0]["left_out"])


def test_a_stacked_run_is_resumed_exactly(tmp_path: Path) -> None:
    straight = run(True, methods.fedfac(layers=[1, 2]))
    run(True, methods.fedfac(layers=[1, 2]), rounds=1, out=tmp_path / "r")
    resumed = run(True, methods.fedfac(layers=[1, 2]), out=tmp_path / "r", resume=True)
    assert bitwise(straight.server, resumed.server)
    assert straight.records == resumed.records


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 3))
def test_any_sizes_train_as_one_by_one(sizes: list[int], batch: int, epochs: int) -> None:
    data = fedfac.Federation.from_arrays(clients(tuple(sizes)), classes=3)
    results = [
        fedfac.fit(
            mlp(), data, method=methods.fedavg(), rounds=1, cohort=len(sizes), epochs=epochs, batch_size=batch,
            optimizer="sgd", lr=0.05, stack=stack, device="cpu", lanes=1,
        )
        for stack in (False, True)
    ]  # fmt: skip
    for name, tensor in results[0].server.items():
        torch.testing.assert_close(results[1].server[name], tensor, rtol=1e-4, atol=1e-5)


def tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("model", "phase", "noise", "reason"),
    [
        (nn.Sequential(nn.Conv1d(1, 2, 2)), Phase(), silent, "it has a Conv1d; stacked models are nn.Sequential of"),
        (nn.Sequential(nn.Linear(1000, 1000)), Phase(), silent, "it has 1,001,000 parameters; stacked models have"),
        (mlp(), Phase(objective=lambda step: step.loss(0, step.targets)), silent, "its method has an objective"),
        (mlp(), Phase(before=lambda begin: None), silent, "its method has an objective or a step of its own"),
        (mlp(), Phase(), Routed, "its training draws random numbers"),
        (tied(), Phase(), silent, "it has tied parameters"),
    ],
)
def test_what_is_not_stacked(model: nn.Module, phase: Phase, noise: Callable[..., Any], reason: str) -> None:
    found = stacked.why_not(model, [phase], federation().client(0), noise)
    assert found is not None
    assert reason in found


def test_insisting_on_a_stack_fails_with_the_reason() -> None:
    with global_stream(0, "conv"):
        model = nn.Sequential(nn.Conv1d(2, 4, 2), nn.Flatten(), nn.Linear(8, 3))
    text = message(ConfigError, lambda: fedfac.fit(model, federation(), rounds=1, stack=True, device="cpu"))
    assert text == (
        "the clients of this model cannot be stacked: it has a Conv1d; stacked models are nn.Sequential of fully "
        "connected layers. Leave out stack=True."
    )
