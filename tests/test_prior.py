"""Class frequencies as a prior: what is counted, what it changes, and that it never leaves a client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import bitwise, message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedfac
from fedfac import methods
from fedfac.conformance import Watched, small_federation, small_model
from fedfac.data.pool import ArrayPool, ClientData
from fedfac.engine.protocol import Engine
from fedfac.errors import ConfigError, ModelError
from fedfac.method import Begin
from fedfac.methods.prior import BUFFER, SHARES, SMOOTHING, Fitted, _wrapped
from fedfac.seeds import global_stream, stream

SHORT: dict[str, Any] = {"rounds": 3, "cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu", "evaluate_every": 1}


def counted(client: int) -> torch.Tensor:
    data = small_federation().client(client)
    counts = torch.bincount(data.pool.batch(data.train)[1], minlength=3) + SMOOTHING
    return (counts / counts.sum()).log()


@pytest.mark.parametrize("name", ["fedfac", "fedfac-static", "fedfac-plus", "random", "all-personal", "fedper"])
def test_every_method_that_has_it_keeps_the_laws(name: str) -> None:
    fedfac.check_method(methods.build(name, {"prior": 1.0}))


@pytest.mark.parametrize("warmup", [0, 2, 9])
def test_outputs_are_the_weights_plus_the_log_frequencies_that_the_client_counts(warmup: int) -> None:
    method = methods.fedfac(layers=[1], prior=0.7, warmup=warmup)
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

    method = methods.fedfac(layers=[1], prior=1.0, warmup=1)
    result = fedfac.fit(small_model(), small_federation(), method=method, engine=watch, **SHORT)
    assert len(watched[0].sums) == 3
    assert all(BUFFER not in sums.values for _, sums in watched[0].sums)
    assert not result.server[BUFFER].any()


def test_without_strength_it_is_the_method_itself_bit_by_bit() -> None:
    runs = [
        fedfac.fit(small_model(), small_federation(), method=method, **SHORT)
        for method in (methods.fedfac(layers=[1]), methods.fedfac(layers=[1], prior=0.0))
    ]
    assert bitwise(runs[0].server, runs[1].server)
    assert BUFFER not in runs[1].server


def test_a_client_that_was_never_drawn_and_a_newcomer_count_too() -> None:
    method = methods.fedper(prior=1.0)
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
            model, federation, method=methods.fedfac(layers=[1], tau=0, prior=prior), **arguments
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
            model, federation, method=methods.fedper(prior=strength, smoothing=smoothing),
            loss=nn.functional.mse_loss, **SHORT | {"cohort": 2, "stack": False},
        )
        for strength in (0.0, 1.0)
    )  # fmt: skip
    assert [r["test"]["loss"] for r in plain.records] == [r["test"]["loss"] for r in prior.records]


def test_bad_requests_are_refused() -> None:
    assert "number from 0" in message(ConfigError, lambda: methods.fedper(prior=-1.0))
    model = small_model()
    model.register_buffer(BUFFER, torch.zeros(1))
    wrap = methods.fedper(prior=1.0).wrap
    assert wrap is not None
    assert "rename it" in message(ModelError, lambda: wrap(model))


def test_outputs_of_another_shape_are_refused() -> None:
    wrap = methods.fedper(prior=1.0).wrap
    assert wrap is not None
    turned = wrap(nn.Sequential(nn.Linear(6, 4), nn.Unflatten(1, (2, 2))))
    assert "(samples, 4, ...)" in message(ModelError, lambda: turned(torch.zeros(3, 6)))


# --- in predictions only: as much of it as the client's own samples ask for -------------------------------------------


def fitted(logits: torch.Tensor, targets: torch.Tensor, strength: float = 1.0) -> torch.Tensor:
    """What is added for a client whose model says ``logits``, whatever the input."""
    model = _wrapped(nn.Sequential(nn.Flatten(), nn.Linear(logits.shape[1], logits.shape[1])))
    with torch.no_grad():
        model.get_parameter("1.weight").copy_(torch.eye(logits.shape[1]))
        model.get_parameter("1.bias").zero_()
    everything = torch.arange(len(targets))
    data = ClientData(ArrayPool(logits, targets), everything, everything[:0], everything[:0])
    Fitted(strength)(Begin(model.train(), data, nn.functional.cross_entropy))
    assert model.training
    return model.get_buffer(BUFFER)


def shares_by_definition(logits: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], strength: float) -> list[float]:
    """The loss at every share, sample by sample: each sees the counts of all the others."""
    classes = logits.shape[1]
    losses = []
    for share in SHARES:
        loss = 0.0
        for row, target in zip(logits, targets, strict=True):
            counts = np.bincount(targets, minlength=classes) + SMOOTHING
            counts[target] -= 1
            added = row + share * strength * np.log(counts)
            loss += np.log(np.exp(added).sum()) - added[target]
        losses.append(loss)
    return losses


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    classes=st.integers(2, 8),
    size=st.integers(1, 40),
    strength=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_the_share_is_the_one_under_which_the_others_explain_each_sample_best(
    seed: int, classes: int, size: int, strength: float
) -> None:
    draws = np.random.default_rng(seed)
    targets = draws.choice(classes, size, p=draws.dirichlet(np.full(classes, 0.5)))
    logits = draws.normal(size=(size, classes)) + 2 * np.eye(classes)[targets]
    losses = shares_by_definition(logits, targets, strength)
    counts = np.bincount(targets, minlength=classes) + SMOOTHING
    whole = strength * np.log(counts / counts.sum())
    found = fitted(torch.tensor(logits).float(), torch.tensor(targets), strength).numpy()
    share = SHARES[int(np.argmin(np.abs(np.array(SHARES)[:, None] * whole - found).max(1)))]
    assert np.allclose(share * whole, found, atol=1e-5)
    assert losses[SHARES.index(share)] <= min(losses) + 1e-4


def test_a_model_that_knows_nothing_of_the_classes_gets_all_of_them() -> None:
    targets = torch.tensor([0] * 40 + [1] * 10)
    counts = torch.bincount(targets, minlength=4) + SMOOTHING
    torch.testing.assert_close(fitted(torch.zeros(50, 4), targets), (counts / counts.sum()).log())


def test_frequencies_that_the_weights_already_know_are_not_counted_twice() -> None:
    targets = torch.tensor([0] * 300 + [1] * 100 + [2] * 60 + [3] * 40)
    known = torch.bincount(targets).log().expand(500, 4)
    assert not fitted(known, targets).any()


def test_a_sample_does_not_speak_for_itself() -> None:
    """One sample of each class says nothing about their frequencies, though each makes its own class likelier."""
    assert not fitted(torch.zeros(20, 40), torch.arange(20)).any()
