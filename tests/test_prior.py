"""Class frequencies as a prior: what is counted, what it changes, and that it never leaves a client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import bitwise, message
from torch import nn

import fedfac
from fedfac import methods
from fedfac.conformance import Watched, small_federation, small_model
from fedfac.engine.protocol import Engine
from fedfac.errors import ConfigError, ModelError
from fedfac.seeds import global_stream, stream
from fedfac.switches import Prior, Warmup
from fedfac.switches.counting import SMOOTHING
from fedfac.switches.prior import BUFFER, wrapped

SHORT: dict[str, Any] = {"rounds": 3, "cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu", "evaluate_every": 1}


def counted(client: int) -> torch.Tensor:
    data = small_federation().client(client)
    counts = torch.bincount(data.pool.batch(data.train)[1], minlength=3) + SMOOTHING
    return (counts / counts.sum()).log()


@pytest.mark.parametrize("warmup", [0, 2, 9])
def test_outputs_are_the_weights_plus_the_log_frequencies_that_the_client_counts(warmup: int) -> None:
    method = methods.fedfac(layers=[1]) | Prior(0.7) | Warmup(warmup)
    result = fedfac.fit(small_model(), small_federation(), method=method, **SHORT)
    x = torch.randn(4, 2, 6, 6)
    for client in range(5):
        state = dict(result.state(client))
        del state[BUFFER]
        plain = small_model().eval()
        plain.load_state_dict(state)
        torch.testing.assert_close(result.model(client)(x), plain(x) + 0.7 * counted(client))


def test_it_never_leaves_a_client_and_the_server_does_not_know_it() -> None:
    watched: list[Watched] = []

    def watch(inner: Engine) -> Engine:
        watched.append(Watched(inner))
        return watched[-1]

    method = methods.fedfac(layers=[1]) | Prior() | Warmup(1)
    result = fedfac.fit(small_model(), small_federation(), method=method, engine=watch, **SHORT)
    assert len(watched[0].sums) == 3
    assert all(BUFFER not in sums.values for _, sums in watched[0].sums)
    assert not result.server[BUFFER].any()


def test_without_strength_it_is_the_method_itself_bit_by_bit() -> None:
    runs = [
        fedfac.fit(small_model(), small_federation(), method=method, **SHORT)
        for method in (methods.fedfac(layers=[1]), methods.fedfac(layers=[1]) | Prior(0.0))
    ]
    assert bitwise(runs[0].server, runs[1].server)
    assert BUFFER not in runs[1].server


def test_a_client_that_was_never_drawn_and_a_newcomer_count_too() -> None:
    method = methods.fedper() | Prior()
    result = fedfac.fit(small_model(), small_federation(), method=method, **SHORT | {"rounds": 1, "cohort": 1})
    for client in range(5):
        torch.testing.assert_close(dict(result.model(client).named_buffers())[BUFFER], counted(client))
    x, y = torch.randn(10, 2, 6, 6), torch.tensor([2] * 10)
    adapted = dict(result.adapt((x, y)).named_buffers())[BUFFER]
    assert int(adapted.argmax()) == 2


def test_it_carries_a_shared_model_over_skewed_clients() -> None:
    """Three clients with one class of four each, three with the rest: no weight is personal, the prior is."""
    rng = stream(0, "skewed")
    centres = rng.normal(size=(4, 6))
    arrays = []
    for client in range(6):
        y = np.full(60, client) if client < 3 else rng.integers(0, 4, 60)
        arrays.append(((centres[y] + rng.normal(size=(60, 6))).astype(np.float32), y))
    federation = fedfac.Federation.from_arrays(arrays, classes=4)
    with global_stream(0, "model"):
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    arguments: dict[str, Any] = {"rounds": 10, "cohort": 6, "epochs": 3, "batch_size": 10, "lr": 0.01, "device": "cpu"}
    accuracy = {
        prior: fedfac.fit(
            model, federation, method=methods.fedfac(layers=[1], tau=0) | Prior(prior), **arguments
        ).records[-1]["test"]["accuracy"]
        for prior in (0.0, 1.0)
    }
    assert accuracy[1.0] > accuracy[0.0] + 0.05


@pytest.mark.parametrize("smoothing", ["fixed", "learned"])
@pytest.mark.parametrize("columns", [1, 2])
def test_without_classes_it_does_nothing(columns: int, smoothing: str) -> None:
    x = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    y = x[:, 0] if columns == 1 else x[:, :2]
    federation = fedfac.Federation.from_arrays([(x, y), (-x, y)])
    last = [nn.Flatten(0)] if columns == 1 else []
    with global_stream(0, "model"):
        model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, columns), *last)
    plain, prior = (
        fedfac.fit(
            model, federation, method=methods.fedper() | Prior(strength, smoothing),
            loss=nn.functional.mse_loss, **SHORT | {"cohort": 2, "stack": False},
        )
        for strength in (0.0, 1.0)
    )  # fmt: skip
    assert [r["test"]["loss"] for r in plain.records] == [r["test"]["loss"] for r in prior.records]


def test_bad_requests_are_refused() -> None:
    assert "number from 0" in message(ConfigError, lambda: Prior(-1.0))
    model = small_model()
    model.register_buffer(BUFFER, torch.zeros(1))
    assert "rename it" in message(ModelError, lambda: wrapped(model))
    model = small_model()
    model.register_parameter(BUFFER, nn.Parameter(torch.zeros(1)))
    assert "rename it" in message(ModelError, lambda: wrapped(model))


def test_outputs_of_another_shape_are_refused() -> None:
    turned = wrapped(nn.Sequential(nn.Linear(6, 4), nn.Unflatten(1, (2, 2))))
    assert "(samples, 4, ...)" in message(ModelError, lambda: turned(torch.zeros(3, 6)))


@pytest.mark.parametrize("name", ["ditto", "apfl", "pfedme", "fedem"])
def test_every_copy_that_a_method_makes_of_the_network_has_the_frequencies(name: str) -> None:
    method = methods.build(name) | Prior(0.7)
    result = fedfac.fit(small_model(), small_federation(), method=method, **SHORT)
    copies = [key for key in result.server if key.split(".")[-1] == BUFFER]
    assert len(copies) == (3 if name == "fedem" else 2)
    for client in range(5):
        state = result.state(client)
        for key in copies:
            assert not result.server[key].any()
            torch.testing.assert_close(state[key], 0.7 * counted(client))
