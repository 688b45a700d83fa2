"""Class frequencies smoothed by what clients have in common: what is added, what is learned, what leaves a client."""

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
from fedfac.anatomy import Anatomy
from fedfac.conformance import Watched, small_federation, small_model
from fedfac.engine.protocol import Engine
from fedfac.errors import ConfigError, ModelError
from fedfac.method import Step
from fedfac.seeds import global_stream, stream
from fedfac.switches import Prior, Warmup
from fedfac.switches.common_prior import COMMON, COUNTS, FASTER, SAMPLES, _LeftOut

LEARNED = Prior(smoothing="learned")
SHORT: dict[str, Any] = {"rounds": 3, "cohort": 3, "epochs": 1, "batch_size": 8, "device": "cpu", "evaluate_every": 1}


def frequencies(counts: torch.Tensor, state: dict[str, torch.Tensor], start: float) -> torch.Tensor:
    """By definition: (n + m·q) / (Σ n + m)."""
    q = torch.softmax(state[COMMON], 0)
    m = start * torch.exp(8 * torch.tanh(FASTER * state[SAMPLES] / 8))
    return (counts + m * q) / (counts.sum() + m)


def counted(client: int) -> torch.Tensor:
    data = small_federation().client(client)
    return torch.bincount(data.pool.batch(data.train)[1], minlength=3).float()


def wrapped(model: nn.Module, strength: float = 1.0) -> nn.Module:
    return Prior(strength, "learned").wrap(model)


def test_outputs_are_the_weights_plus_the_log_of_smoothed_frequencies() -> None:
    method = methods.fedfac(layers=[1]) | Prior(0.7, "learned")
    result = fedfac.fit(small_model(), small_federation(), method=method, **SHORT)
    x = torch.randn(4, 2, 6, 6)
    assert float(result.server[SAMPLES]) != 0
    assert result.server[COMMON].any()  # both were trained
    for client in range(5):
        state = dict(result.state(client))
        assert torch.equal(state.pop(COUNTS), counted(client))
        added = 0.7 * frequencies(counted(client), state, 1.5).log()  # half a sample of each of three classes
        plain = small_model().eval()
        plain.load_state_dict({name: t for name, t in state.items() if name not in (COMMON, SAMPLES)})
        torch.testing.assert_close(result.model(client)(x), plain(x) + added)


def test_counts_never_leave_a_client_but_what_is_common_does() -> None:
    watched: list[Watched] = []

    def watch(inner: Engine) -> Engine:
        watched.append(Watched(inner))
        return watched[-1]

    result = fedfac.fit(
        small_model(), small_federation(), method=methods.fedper() | LEARNED | Warmup(1), engine=watch, **SHORT
    )
    assert len(watched[0].sums) == 3
    for _, sums in watched[0].sums:
        assert COUNTS not in sums.values
        assert {COMMON, SAMPLES} <= sums.values.keys()
    assert not result.server[COUNTS].any()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 2), st.sampled_from([(), (5,)]))
def test_a_sample_does_not_count_for_itself(seed: int, strength: float, places: tuple[int, ...]) -> None:
    """The loss is that of a model which has counted all samples but this one."""
    draws = torch.Generator().manual_seed(seed)
    model = wrapped(nn.Sequential(nn.Linear(6, 4)), strength)
    with torch.no_grad():
        getattr(model, COUNTS).copy_(torch.randint(1, 9, (4,), generator=draws))
        getattr(model, COMMON).copy_(torch.randn(4, generator=draws))
        getattr(model, SAMPLES).copy_(torch.randn((), generator=draws) / 10)
    y = torch.randint(0, 4, (7, *places), generator=draws)
    x = torch.randn(7, 6, generator=draws)
    lengthened = Lengthened(model, places)
    found = _LeftOut(strength)(Step(lengthened, x, y, nn.functional.cross_entropy, {}, torch.arange(7)))
    losses = []
    counts = getattr(model, COUNTS).clone()
    for number in range(7):
        for place in range(places[0] if places else 1):
            label = y[number, place] if places else y[number]
            with torch.no_grad():
                getattr(model, COUNTS).copy_(counts - nn.functional.one_hot(label, 4))
            losses.append(nn.functional.cross_entropy(model(x[number : number + 1]), label[None]))
    torch.testing.assert_close(found, torch.stack(losses).mean())


class Lengthened(nn.Module):
    """The same outputs at several places, as of a text."""

    def __init__(self, inner: nn.Module, places: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.places = inner, places
        for name in (COUNTS, COMMON, SAMPLES):
            setattr(self, name, getattr(inner, name))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        return outputs.unsqueeze(2).expand(-1, -1, *self.places) if self.places else outputs


def federation(alike: bool) -> fedfac.Federation:
    """Thirty clients, 40 samples of 20 classes that inputs do not tell apart: frequencies in common, or one's own."""
    rng = stream(0, "frequencies", int(alike))
    common = rng.dirichlet(np.full(20, 0.3))
    arrays = []
    for _ in range(30):
        own = common if alike else rng.dirichlet(np.full(20, 0.1))
        arrays.append((rng.normal(size=(40, 3)).astype(np.float32), rng.choice(20, 40, p=own)))
    return fedfac.Federation.from_arrays(arrays, classes=20)


def trained(alike: bool, smoothing: str, **options: Any) -> fedfac.Result:
    with global_stream(0, "model"):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 20))
    method = methods.fedfac(layers=[1], tau=0) | Prior(1.0, smoothing)
    common: dict[str, Any] = {"rounds": 30, "cohort": 10, "epochs": 3, "batch_size": 10, "device": "cpu"}
    return fedfac.fit(model, federation(alike), method=method, **common | options)


@pytest.mark.parametrize("alike", [True, False])
def test_it_learns_whether_clients_are_alike_and_predicts_better_for_it(alike: bool) -> None:
    """The samples that smooth a client's counts: many if all have the same frequencies, few if each has its own."""
    fixed, learned = (trained(alike, smoothing, lr=0.01) for smoothing in ("fixed", "learned"))
    samples = 10 * float(torch.exp(8 * torch.tanh(FASTER * learned.server[SAMPLES] / 8)))  # ten at first
    assert samples > 100 if alike else samples < 5
    assert learned.records[-1]["test"]["loss"] < fixed.records[-1]["test"]["loss"] - 0.03


@pytest.mark.parametrize("options", [{"lr": 0.1}, {"optimizer": "sgd", "lr": 1.0, "momentum": 0.9}])
def test_rates_that_are_far_too_large_are_survived(options: dict[str, Any]) -> None:
    result = trained(True, "learned", **options)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.server.values())


def test_without_strength_it_is_the_method_itself_bit_by_bit() -> None:
    runs = [
        fedfac.fit(small_model(), small_federation(), method=method, **SHORT)
        for method in (methods.fedper(), methods.fedper() | Prior(0.0, "learned"))
    ]
    assert bitwise(runs[0].server, runs[1].server)


def test_a_newcomer_counts_too() -> None:
    result = fedfac.fit(small_model(), small_federation(), method=methods.fedper() | LEARNED, **SHORT)
    x, y = torch.randn(10, 2, 6, 6), torch.tensor([2] * 10)
    assert dict(result.adapt((x, y)).named_buffers())[COUNTS].tolist() == [0, 0, 10]


def test_bad_requests_are_refused() -> None:
    assert "Did you mean" in message(ConfigError, lambda: Prior(smoothing="learnt"))
    anatomy = Anatomy.of(wrapped(small_model()))
    assert "the plain objective" in message(ConfigError, lambda: (methods.fedprox() | LEARNED).plan(anatomy))
    model = small_model()
    model.register_buffer(COUNTS, torch.zeros(1))
    assert "rename it" in message(ModelError, lambda: wrapped(model))
