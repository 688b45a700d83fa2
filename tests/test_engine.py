"""The line between clients and server, and lanes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedfac
from fedfac import methods
from fedfac.anatomy import Anatomy
from fedfac.conformance import Watched, small_federation, small_model
from fedfac.engine.graphs import _kind
from fedfac.engine.protocol import Engine
from fedfac.method import PERSONAL, Phase
from fedfac.noise import silent
from fedfac.preflight import draw_cohort
from fedfac.seeds import global_stream, stream
from fedfac.split import Split
from fedfac.state import State, clone, references, same
from fedfac.switches.proximal import proximal
from fedfac.training import Local, Work, batches, train_client


class Recurrent(nn.Module):
    """An LSTM with dropout inside: its draws cannot be routed."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 5, num_layers=2, dropout=0.4, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x.reshape(len(x), 6, 12))[0][:, -1])
        return out


def recurrent() -> nn.Module:
    with global_stream(0, "test"):
        return Recurrent()


@pytest.mark.parametrize("make", [small_model, recurrent])
@pytest.mark.parametrize("name", ["fedavg", "fedfac", "local"])
def test_any_number_of_lanes_gives_the_same_bits(make: Any, name: str) -> None:
    results = [
        fedfac.fit(
            make(), small_federation(), method=methods.build(name), rounds=3, cohort=4, epochs=2, batch_size=8, lanes=n
        )
        for n in (1, 2, 5)
    ]
    for other in results[1:]:
        assert other.records == results[0].records
        assert same(other.server, results[0].server)
        for client in range(5):
            assert same(references(other.model(client)), references(results[0].model(client)))


def test_seeds_change_the_run_and_the_callers_module_and_generator_stay() -> None:
    model = small_model()
    before = clone(references(model))
    state = torch.default_generator.get_state()
    threads = torch.get_num_threads()
    one, two = (fedfac.fit(model, small_federation(), rounds=1, epochs=1, seed=s) for s in (0, 1))
    assert not same(one.server, two.server)
    assert same(references(model), before)
    assert torch.equal(torch.default_generator.get_state(), state)
    assert torch.get_num_threads() == threads


def plain_round(model: nn.Module, seed: int, round: int, cohort: list[int]) -> tuple[State, list[State]]:
    """FedAvg written out in plain PyTorch: the mean of the clients' states, weighted by their sizes."""
    federation = small_federation()
    states, sizes = [], []
    for client in cohort:
        own = copy.deepcopy(model).train()
        optimizer = torch.optim.SGD(own.parameters(), lr=0.05)  # Adam would blow up rounding in the dead conv bias
        data = federation.client(client)
        for epoch in range(2):
            order = stream(seed, "batches", "train", round, client, 0, epoch).permutation(data.size)
            for index in batches(order, 8):
                x, y = data.pool.batch(data.train[index])
                optimizer.zero_grad()
                F.cross_entropy(own(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        states.append(references(own))
        sizes.append(data.size)
    mean = {
        name: sum((s[name].double() * n for s, n in zip(states, sizes, strict=True)), torch.zeros(())) / sum(sizes)
        for name in states[0]
    }
    return mean, states


def without_dropout() -> nn.Module:
    model = small_model()
    assert isinstance(model, nn.Sequential)
    model[6] = nn.Identity()
    return model


def test_two_rounds_of_fedavg_equal_a_loop_written_out_in_plain_pytorch() -> None:
    model = without_dropout()
    result = fedfac.fit(
        model,
        small_federation(),
        method=methods.fedavg(),
        rounds=2,
        cohort=3,
        epochs=2,
        batch_size=8,
        optimizer="sgd",
        lr=0.05,
    )
    for number in (1, 2):
        mean, _ = plain_round(model, 0, number, draw_cohort(range(5), 3, 0, number))
        with torch.no_grad():
            for name, tensor in references(model).items():
                tensor.copy_(mean[name] if tensor.is_floating_point() else mean[name].round())
    for name, tensor in references(model).items():
        torch.testing.assert_close(result.server[name], tensor, rtol=1e-4, atol=1e-6)


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Every tensor anywhere inside what crossed the line."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors_in(value)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for entry in fields(thing):
            yield from tensors_in(getattr(thing, entry.name))
    elif not isinstance(thing, int | float | str | type(None)):
        raise AssertionError(f"a {type(thing).__name__} crossed the line")


class Crossing(Watched):
    """Everything that an engine ever returns to the server, in one list."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.everything: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("train", "moments", "collect", "keep", "evaluate"):
            return found

        def call(*arguments: Any) -> Any:
            answer = found(*arguments)
            super(Crossing, self).__getattribute__("everything").append((name, answer))
            return answer

        return call


@pytest.mark.parametrize("name", ["fedavg", "local", "fedfac", "fedfac-static", "all-personal", "variance"])
def test_only_sums_cross_to_the_server(name: str) -> None:
    """No number of any client's state ever crosses; what crosses is as long as the split says, and no longer."""
    crossings: list[Crossing] = []
    kept: list[State] = []

    def watch(inner: Engine) -> Engine:
        crossings.append(Crossing(inner))
        store = inner.store  # type: ignore[attr-defined]
        put = store.put

        def keep(client: int, state: State) -> None:
            kept.append(state)
            put(client, state)

        store.put = keep
        return crossings[0]

    method = methods.build(name)
    fedfac.fit(
        small_model(), small_federation(), method=method, rounds=2, cohort=3, epochs=1, batch_size=8, engine=watch
    )
    returned = crossings[0].everything
    assert {"train", "collect", "keep", "evaluate"} <= {call for call, _ in returned}
    for call, answer in returned:
        found = list(tensors_in(answer))
        if call in ("train", "keep", "evaluate"):
            assert not found, f"{call} returned tensors"
        if name == "local":
            assert not found, "local training sent something"
    crossed = np.concatenate([np.zeros(1), *(t.double().flatten().numpy() for _, a in returned for t in tensors_in(a))])
    personal = [t.double().flatten() for state in kept for t in state.values() if t.is_floating_point()]
    values = torch.cat(personal).numpy() if personal else np.empty(0)
    values = values[~np.isin(values, [0.0, 1.0])]  # trivial numbers prove nothing
    assert name == "fedavg" or len(values) > 100
    assert not np.isin(values, crossed).any()


def test_the_sums_are_the_weighted_sums_of_the_clients_states() -> None:
    watched: list[Watched] = []

    def watch(inner: Engine) -> Engine:
        watched.append(Watched(inner))
        return watched[0]

    model = without_dropout()
    method = methods.fedfac(layers=[1], tau="50%")
    fedfac.fit(
        model,
        small_federation(),
        method=method,
        rounds=1,
        cohort=3,
        epochs=2,
        batch_size=8,
        engine=watch,
        lanes=2,
        optimizer="sgd",
        lr=0.05,
    )
    cohort = draw_cohort(range(5), 3, 0, 1)
    mean, states = plain_round(model, 0, 1, cohort)
    split, sums = watched[0].sums[0]
    assert sums.weight == sum(small_federation().client(c).size for c in cohort)
    for name, expected in split.shared(mean).items():
        torch.testing.assert_close(sums.values[name] / sums.weight, expected, rtol=1e-4, atol=1e-6)
    moments = watched[0].moments_seen[0]["0"]
    assert isinstance(moments, fedfac.Moments)
    stacked = torch.cat([s["0.weight"].reshape(6, -1) for s in states], dim=1).double()
    torch.testing.assert_close(moments.correlation(), torch.corrcoef(stacked), rtol=1e-3, atol=1e-4)


def test_a_client_that_never_trained_gets_the_servers_values() -> None:
    result = fedfac.fit(small_model(), small_federation(), method=methods.fedfac(), rounds=1, cohort=2, epochs=1)
    idle = next(c for c in range(5) if c not in result.records[-1]["cohort"])
    assert same(references(result.model(idle)), result.server)


def test_a_float64_model_and_regression_work() -> None:
    draws = torch.Generator()
    clients = [(torch.randn(20, 3, generator=draws), torch.randn(20, 1, generator=draws)) for _ in range(3)]
    federation = fedfac.Federation.from_arrays(clients)
    assert federation.classes is None
    result = fedfac.fit(nn.Linear(3, 1), federation, method=methods.fedavg(), rounds=2, epochs=1, loss=F.mse_loss)
    assert "accuracy" not in result.records[-1]["test"]
    assert result.records[-1]["test"]["loss"] > 0


def test_steps_of_one_kind_are_told_from_others() -> None:
    """On a GPU they are one graph: whatever is part of a step must make a difference, and its number must not."""
    plain = methods.fedfac(layers=[1]).plan(Anatomy.of(small_model())).split
    half = plain.with_masks({"0": (True, True, True, False, False, False)})
    model = small_model()
    own = Phase(trains=PERSONAL)
    prox = proximal(0.1)

    def kind(phase: Phase, split: Split = half) -> object:
        found: list[object] = []

        def steps(work: Work, batches: object) -> None:
            found.append(_kind(work))

        train_client(
            model,
            references(model),
            small_federation().client(0),
            [phase],
            Local(batch_size=8),
            received=clone(references(model)),
            split=split,
            seeded=silent,
            seed=0,
            round=1,
            client=0,
            steps=steps,
        )
        (only,) = found
        return only

    assert kind(Phase()) == kind(Phase(epochs=3)) == kind(Phase(epochs=1, shrinkage=0.5))
    assert kind(own) == kind(replace(own, epochs=2))
    head = frozenset({"7.weight", "7.bias"})
    everything = half.with_masks({"0": (False,) * 6})
    different = [Phase(), own, replace(own, also=head), Phase(trains=head), Phase(objective=prox, stacks=True)]
    different += [Phase(lr_scale=0.5)]
    kinds = [*map(kind, different), kind(own, everything), kind(Phase(objective=prox))]
    assert len(set(kinds)) == len(kinds)
