"""Sums over clients give the correlation of the stacked weights, exactly; numpy.corrcoef is the oracle."""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers import message
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from fedfac.anatomy import Anatomy, Layer
from fedfac.errors import ModelError
from fedfac.moments import Moments, Spread

Matrix = npt.NDArray[np.float64]
LAWS = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def layer_of(rows: int, d: int) -> Layer:
    """A fully connected layer of d elements with that many input weights each."""
    return Anatomy.of(nn.Linear(rows, d, bias=False)).layer(1)


def moments_of(block: Matrix) -> Moments:
    """One client's moments; its block has a row for every input and a column for every element."""
    return Moments.of(layer_of(*block.shape), {"weight": torch.from_numpy(block.T.copy())})


def mixed(draws: np.random.Generator, rows: int, d: int) -> Matrix:
    """Correlated columns of different scale and mean."""
    Z: Matrix = draws.normal(size=(rows, d)) @ draws.normal(size=(d, d)) + draws.normal(size=d)
    return Z * draws.uniform(0.1, 10, size=d)


def close(a: Moments, b: Moments) -> bool:
    return (
        a.n == b.n
        and torch.allclose(a.total, b.total, rtol=1e-12, atol=1e-12)
        and torch.allclose(a.products, b.products, rtol=1e-12, atol=1e-12)
    )


@LAWS
@given(SEEDS, st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 8))
def test_the_moments_of_any_clients_give_the_correlation_of_all_rows(seed: int, sizes: list[int], d: int) -> None:
    assume(sum(sizes) >= 3)
    Z = mixed(np.random.default_rng(seed), sum(sizes), d)
    assume((Z.var(0) / (Z**2).mean(0)).min() > 1e-2)  # a column far from zero loses digits in any formula of sums
    parts = np.split(Z, np.cumsum(sizes)[:-1])
    total = reduce(add, [moments_of(part) for part in parts])
    direct = np.atleast_2d(np.corrcoef(Z, rowvar=False))
    assert total.n == len(Z)
    assert np.abs(total.correlation().numpy() - direct).max() < 1e-12
    assert np.allclose(total.covariance.numpy(), np.atleast_2d(np.cov(Z, rowvar=False, bias=True)), rtol=1e-10)
    assert not total.dead.any()


@LAWS
@given(SEEDS, st.integers(1, 6))
def test_adding_moments_is_associative_and_commutative(seed: int, d: int) -> None:
    draws = np.random.default_rng(seed)
    a, b, c = (moments_of(mixed(draws, int(n), d)) for n in draws.integers(1, 20, size=3))
    assert close((a + b) + c, a + (b + c))
    assert close(a + b, b + a)
    assert not close(a + b, a)


def test_moments_by_hand() -> None:
    made = moments_of(np.array([[1.0, 2.0], [3.0, -2.0], [2.0, 3.0]]))
    assert made.n == 3
    assert made.total.tolist() == [6, 3]
    assert made.products.tolist() == [[14, 2], [2, 17]]
    assert torch.allclose(made.covariance, torch.tensor([[2 / 3, -4 / 3], [-4 / 3, 14 / 3]], dtype=torch.float64))
    assert made.correlation()[0, 1].item() == pytest.approx(-4 / np.sqrt(28), abs=1e-15)


def test_moments_are_of_input_weights_not_of_biases() -> None:
    anatomy = Anatomy.of(nn.Conv2d(2, 3, 2))
    state = {"weight": torch.arange(24.0).reshape(3, 2, 2, 2), "bias": torch.full((3,), 1e9)}
    made = Moments.of(anatomy.layer(1), state)
    assert made.n == 8
    assert made.total.tolist() == [28, 92, 156]


def test_single_precision_weights_are_added_up_in_double() -> None:
    weights = torch.full((1, 3), 1e4, dtype=torch.float32)
    weights[0, 0] += 0.01
    made = Moments.of(layer_of(3, 1), {"weight": weights})
    assert made.total.dtype == made.products.dtype == torch.float64
    exact = weights.double().numpy()
    assert made.products.item() == (exact**2).sum()


def test_moments_of_updates_are_moments_of_the_difference() -> None:
    draws = np.random.default_rng(0)
    before, after = mixed(draws, 9, 4), mixed(draws, 9, 4)
    layer = layer_of(9, 4)
    made = Moments.of(layer, {"weight": torch.from_numpy(after.T)}, minus={"weight": torch.from_numpy(before.T)})
    assert close(made, moments_of(after - before))
    assert np.abs(made.correlation().numpy() - np.corrcoef(after - before, rowvar=False)).max() < 1e-12


def test_a_weight_that_did_not_move_is_dead_among_the_updates() -> None:
    draws = np.random.default_rng(0)
    before, after = mixed(draws, 9, 4), mixed(draws, 9, 4)
    after[:, 2] = before[:, 2]
    layer = layer_of(9, 4)
    made = Moments.of(layer, {"weight": torch.from_numpy(after.T)}, minus={"weight": torch.from_numpy(before.T)})
    assert made.dead.tolist() == [False, False, True, False]


@LAWS
@given(SEEDS, st.floats(-1e3, 1e3), st.integers(1, 4))
def test_a_column_without_variance_is_dead_and_correlates_with_nothing(seed: int, value: float, clients: int) -> None:
    Z = mixed(np.random.default_rng(seed), 24, 4)
    Z[:, 1] = value
    total = reduce(add, [moments_of(part) for part in np.array_split(Z, clients)])
    R = total.correlation().numpy()
    assert total.dead.tolist() == [False, True, False, False]
    assert R[1].tolist() == R[:, 1].tolist() == [0, 1, 0, 0]
    alive = [0, 2, 3]
    assert np.abs(R[np.ix_(alive, alive)] - np.corrcoef(Z[:, alive], rowvar=False)).max() < 1e-10


def test_a_column_that_differs_only_between_clients_is_not_dead() -> None:
    one, two = np.full((5, 1), 1.0), np.full((5, 1), 2.0)
    assert moments_of(one).dead.tolist() == [True]
    assert (moments_of(one) + moments_of(two)).dead.tolist() == [False]


def test_small_weights_are_not_dead() -> None:
    Z = mixed(np.random.default_rng(1), 20, 3) * 1e-12
    assert not moments_of(Z).dead.any()
    assert np.abs(moments_of(Z).correlation().numpy() - np.corrcoef(Z, rowvar=False)).max() < 1e-12


@LAWS
@given(SEEDS, st.integers(1, 8))
def test_a_correlation_is_symmetric_with_ones_even_from_one_row(seed: int, rows: int) -> None:
    R = moments_of(mixed(np.random.default_rng(seed), rows, 5)).correlation()
    assert torch.equal(R, R.T)
    assert torch.equal(R.diagonal(), torch.ones(5, dtype=torch.float64))
    assert torch.isfinite(R).all()


def test_moments_of_different_layers_do_not_add_up() -> None:
    a, b = moments_of(np.ones((3, 2))), moments_of(np.ones((3, 5)))
    assert message(ModelError, lambda: a + b) == "moments of 2 and of 5 elements do not belong to one layer"


# --- between clients -----------------------------------------------------------------------------------------------


def spread_of(weights: Matrix) -> Spread:
    """One client's spread; a row of weights for every element."""
    return Spread.of(layer_of(weights.shape[1], weights.shape[0]), {"weight": torch.from_numpy(weights)})


@LAWS
@given(SEEDS, st.integers(1, 6), st.integers(1, 5), st.integers(1, 7))
def test_the_spread_gives_the_variance_between_clients(seed: int, clients: int, d: int, fan_in: int) -> None:
    W = np.random.default_rng(seed).normal(size=(clients, d, fan_in)) + 1
    total = reduce(add, [spread_of(w) for w in W])
    power = (W**2).sum(2).mean(0)
    between = ((W - W.mean(0)) ** 2).sum(2).mean(0)
    assert total.clients == clients
    assert np.abs(total.variance().numpy() - between / power).max() < 1e-12


def test_the_spread_by_hand() -> None:
    total = spread_of(np.array([[1.0], [1.0], [0.0]])) + spread_of(np.array([[3.0], [-1.0], [0.0]]))
    assert total.variance().tolist() == [pytest.approx(1 / 5), 1, 0]  # mean squares 5, 1, 0; variances 1, 1, 0


@pytest.mark.parametrize(("one", "other"), [((2, 3), (4, 3)), ((1, 3), (4, 3)), ((2, 1), (2, 3))])
def test_spreads_of_different_layers_do_not_add_up(one: tuple[int, int], other: tuple[int, int]) -> None:
    with pytest.raises(ModelError):
        spread_of(np.ones(one)) + spread_of(np.ones(other))
