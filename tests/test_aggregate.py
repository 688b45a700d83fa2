"""The server's arithmetic, with numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import bits, bitwise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedfac.aggregate import Sums, aggregate, with_momentum
from fedfac.anatomy import Anatomy
from fedfac.split import Split
from fedfac.state import State

MODEL = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3))
ANATOMY = Anatomy.of(MODEL)
BY_ELEMENT = Split.of(ANATOMY, layers=ANATOMY.layers)
ALL_SHARED = Split.of(ANATOMY)


def state(weight: list[float], bias: float = 0.0, tracked: int = 0) -> State:
    """A state of the model whose interesting numbers are its three weights."""
    return {
        "0.weight": torch.tensor(weight)[:, None],
        "0.bias": torch.full((3,), bias),
        "1.weight": torch.ones(3),
        "1.bias": torch.zeros(3),
        "1.running_mean": torch.zeros(3),
        "1.running_var": torch.ones(3),
        "1.num_batches_tracked": torch.tensor(tracked),
    }


def sums(split: Split, clients: list[tuple[int, State]]) -> Sums:
    """What a cohort sends: of every tensor the shared numbers, weighted and added in double precision."""
    parts = [(n, split.shared(s)) for n, s in clients]
    names = parts[0][1]
    values: dict[str, Tensor] = {name: sum((n * p[name].double() for n, p in parts), torch.zeros(())) for name in names}
    return Sums(values, sum(n for n, _ in clients))


def masked(*mask: bool) -> Split:
    return BY_ELEMENT.with_masks({"0": mask})


SERVER = state([10.0, 20.0, 30.0], bias=1.0, tracked=4)
COHORT = [(1, state([1.0, 2.0, 3.0], bias=5.0, tracked=7)), (3, state([5.0, 6.0, 7.0], bias=9.0, tracked=8))]
# weighted means: (1 + 3 * 5) / 4 = 4, (2 + 18) / 4 = 5, (3 + 21) / 4 = 6; bias (5 + 27) / 4 = 8; 7.75 batches


def test_rate_one_gives_the_weighted_mean() -> None:
    new = aggregate(SERVER, sums(ALL_SHARED, COHORT), ALL_SHARED, before=ALL_SHARED, rate=1.0)
    assert new["0.weight"].flatten().tolist() == [4, 5, 6]
    assert new["0.bias"].tolist() == [8, 8, 8]
    assert new.keys() == SERVER.keys()


def test_another_rate_goes_that_part_of_the_way() -> None:
    half = aggregate(SERVER, sums(ALL_SHARED, COHORT), ALL_SHARED, before=ALL_SHARED, rate=0.5)
    assert half["0.weight"].flatten().tolist() == [7, 12.5, 18]
    assert half["0.bias"].tolist() == [4.5, 4.5, 4.5]
    beyond = aggregate(SERVER, sums(ALL_SHARED, COHORT), ALL_SHARED, before=ALL_SHARED, rate=2.0)
    assert beyond["0.weight"].flatten().tolist() == [-2, -10, -18]


def test_whole_numbers_are_rounded_and_stay_whole() -> None:
    new = aggregate(SERVER, sums(ALL_SHARED, COHORT), ALL_SHARED, before=ALL_SHARED, rate=1.0)
    assert bits(new["1.num_batches_tracked"]) == bits(torch.tensor(8))  # of 7.75
    half = aggregate(SERVER, sums(ALL_SHARED, COHORT), ALL_SHARED, before=ALL_SHARED, rate=0.5)
    assert bits(half["1.num_batches_tracked"]) == bits(torch.tensor(6))  # of 4 + (7.75 - 4) / 2 = 5.875


def test_types_of_the_server_s_tensors_stay() -> None:
    server = {**SERVER, "0.bias": SERVER["0.bias"].to(torch.bfloat16), "1.bias": SERVER["1.bias"].double()}
    new = aggregate(server, sums(ALL_SHARED, COHORT), ALL_SHARED, before=ALL_SHARED, rate=0.5)
    assert {name: t.dtype for name, t in new.items()} == {name: t.dtype for name, t in server.items()}


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_personal_values_of_the_server_are_untouched(rate: float) -> None:
    split = masked(True, False, True)
    new = aggregate(SERVER, sums(split, COHORT), split, before=split, rate=rate)
    assert bitwise(split.personal(new), split.personal(SERVER))
    assert new["0.weight"].flatten().tolist() == ([4, 20, 6] if rate == 1 else [7, 20, 18])
    assert new["0.bias"].tolist() == ([8, 1, 8] if rate == 1 else [4.5, 1, 4.5])


def test_an_element_that_has_just_become_shared_takes_the_mean_whatever_the_rate() -> None:
    before, now = masked(True, False, False), masked(True, True, False)
    new = aggregate(SERVER, sums(now, COHORT), now, before=before, rate=0.5)
    assert new["0.weight"].flatten().tolist() == [7, 5, 30]  # half the way; the mean; personal
    assert new["0.bias"].tolist() == [4.5, 8, 1]
    assert new["1.num_batches_tracked"].item() == 6


def test_an_element_that_has_just_become_personal_keeps_the_last_shared_value() -> None:
    before, now = masked(True, True, True), masked(False, True, True)
    new = aggregate(SERVER, sums(now, COHORT), now, before=before, rate=1.0)
    assert new["0.weight"].flatten().tolist() == [10, 5, 6]


def test_when_nothing_is_shared_the_server_stays() -> None:
    split = Split.of(ANATOMY, personal=ANATOMY.shapes)
    new = aggregate(SERVER, Sums({}, 4.0), split, before=split, rate=1.0)
    assert bitwise(new, SERVER)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_the_old_state_and_the_sums_are_not_written(rate: float) -> None:
    split = masked(True, False, True)
    server = {name: t.clone() for name, t in SERVER.items()}
    given_sums = sums(split, COHORT)
    copied = {name: t.clone() for name, t in given_sums.values.items()}
    new = aggregate(server, given_sums, split, before=split, rate=rate)
    new["0.weight"].fill_(99)
    assert bitwise(server, SERVER)
    assert bitwise(given_sums.values, copied)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 500), min_size=1, max_size=5), st.sampled_from([1.0, 0.3, 1.7]))
def test_the_server_moves_by_its_rate_towards_the_mean_of_what_is_shared(
    seed: int, sizes: list[int], rate: float
) -> None:
    draws = np.random.default_rng(seed)
    was, now = ((draws.random(3) < 0.5) for _ in range(2))
    server = draws.normal(size=3)
    clients = draws.normal(size=(len(sizes), 3))
    mean = np.average(clients, axis=0, weights=sizes)
    expected = np.where(now, np.where(was, server + rate * (mean - server), mean), server)
    split = masked(*now.tolist())
    cohort = [(n, state(w.tolist())) for n, w in zip(sizes, clients, strict=True)]
    new = aggregate(state(server.tolist()), sums(split, cohort), split, before=masked(*was.tolist()), rate=rate)
    assert np.allclose(new["0.weight"].flatten().numpy(), expected, atol=1e-5)


def test_a_client_alone_hands_over_its_state_bit_by_bit() -> None:
    alone = [(7, state([0.1, 0.2, 0.3], bias=1 / 3, tracked=5))]
    new = aggregate(SERVER, sums(ALL_SHARED, alone), ALL_SHARED, before=ALL_SHARED, rate=1.0)
    assert bitwise(new, alone[0][1])


# --- momentum ------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 0.95))
def test_momentum_is_that_of_sgd_on_the_servers_steps(seed: int, momentum: float) -> None:
    """The optimiser of PyTorch, with rate 1 and the step backwards as its gradient."""
    rng = np.random.default_rng(seed)
    server = state([1.0, 2.0, 3.0])
    parameter = nn.Parameter(server["0.weight"].clone())
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=momentum)
    velocity: State = {}
    for _ in range(5):
        new = state(rng.normal(size=3).tolist(), tracked=3)
        parameter.grad = parameter.detach() - new["0.weight"]
        optimizer.step()
        server, velocity = with_momentum(
            server, new, velocity, momentum=momentum, moved=["0.weight"], split=ALL_SHARED, before=ALL_SHARED
        )
        torch.testing.assert_close(server["0.weight"], parameter.detach(), rtol=1e-4, atol=1e-4)
        assert server["1.num_batches_tracked"] == 3  # a statistic is no weight
        assert velocity.keys() == {"0.weight"}


def test_only_what_goes_on_being_shared_has_momentum() -> None:
    """Of three elements the first stays shared, the second becomes shared, the third becomes personal."""
    before, split = masked(True, False, True), masked(True, True, False)
    old, new = state([1.0, 2.0, 3.0], bias=1.0), state([2.0, 8.0, 3.0], bias=1.0)
    velocity = {"0.weight": torch.tensor([[4.0], [4.0], [4.0]])}
    server, kept = with_momentum(
        old, new, velocity, momentum=0.5, moved=["0.weight", "0.bias"], split=split, before=before
    )
    assert server["0.weight"].flatten().tolist() == [4, 8, 3]  # 1 + (1 + 4 / 2); as it came; where it stood
    assert kept["0.weight"].flatten().tolist() == [3, 0, 0]
    assert kept["0.bias"].tolist() == [0, 0, 0]
    whole = Split(split.shapes, frozenset({"0.weight"}))
    server, kept = with_momentum(old, new, velocity, momentum=0.5, moved=["0.weight"], split=whole, before=whole)
    assert server["0.weight"].equal(new["0.weight"])
    assert not kept
