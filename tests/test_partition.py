"""Dealing out samples: laws for any labels, and requests that cannot be met."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import message, within
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfac.data.partition import by_name, dirichlet, hold_out, iid, natural
from fedfac.errors import ConfigError, DataError

Parts = list[npt.NDArray[np.int64]]
LAWS = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
ALPHAS = st.sampled_from([1e-6, 0.01, 0.1, 0.5, 1.0, 10.0, 1e6])


def labels_of(seed: int, n: int, classes: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(classes, size=n)


def lists(parts: Parts) -> list[list[int]]:
    return [part.tolist() for part in parts]


def all_of(parts: Parts) -> list[int]:
    return sorted(i for part in parts for i in part.tolist())


def assert_sorted_int64(parts: Parts) -> None:
    assert all(part.dtype == np.int64 for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)


@LAWS
@given(SEEDS, st.integers(1, 200), st.data())
def test_iid_is_a_partition_of_sizes_equal_up_to_one(seed: int, n: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, n))
    parts = iid(np.zeros(n), clients=clients, seed=seed)
    assert all_of(parts) == list(range(n))
    assert sorted({len(part) for part in parts}) in ([n // clients], [n // clients, n // clients + 1])
    assert len(parts) == clients
    assert_sorted_int64(parts)


@LAWS
@given(SEEDS, st.integers(1, 200), st.integers(1, 10), ALPHAS, st.data())
def test_dirichlet_deals_out_exact_sizes_and_no_sample_twice(
    seed: int, n: int, classes: int, alpha: float, data: st.DataObject
) -> None:
    clients = data.draw(st.integers(1, n))
    size = data.draw(st.none() | st.integers(1, n // clients))
    parts = dirichlet(labels_of(seed, n, classes), clients=clients, alpha=alpha, size=size, seed=seed)
    assert [len(part) for part in parts] == [size or n // clients] * clients
    dealt = all_of(parts)
    assert len(set(dealt)) == len(dealt)
    assert set(dealt) <= set(range(n))
    if size is None and n % clients == 0:
        assert dealt == list(range(n))
    assert_sorted_int64(parts)


@LAWS
@given(SEEDS, SEEDS, st.integers(1, 10))
def test_partitions_are_functions_of_the_seed(seed: int, other: int, clients: int) -> None:
    labels = labels_of(0, 200, 5)
    cases: list[tuple[Callable[..., Parts], dict[str, float]]] = [(iid, {}), (dirichlet, {"alpha": 0.5})]
    for function, options in cases:
        once, again, else_ = (lists(function(labels, clients=clients, seed=s, **options)) for s in (seed, seed, other))
        assert once == again
        if clients > 1:
            assert (once == else_) == (seed == other)


def test_a_dirichlet_partition_depends_on_labels_only_by_which_are_equal() -> None:
    labels = labels_of(1, 120, 4)
    names = np.array(["ant", "bee", "cat", "dog"])[labels]
    made = [lists(dirichlet(given, clients=6, alpha=0.3, seed=2)) for given in (labels, labels * 10 + 3, names)]
    assert made[0] == made[1] == made[2]


def classes_seen(alpha: float, seed: int = 0) -> float:
    labels = np.repeat(np.arange(10), 200)
    parts = dirichlet(labels, clients=20, alpha=alpha, seed=seed, size=50)
    return float(np.mean([len(np.unique(labels[part])) for part in parts]))


def test_the_smaller_alpha_the_fewer_classes_a_client_sees() -> None:
    few, some, all_ = (classes_seen(alpha) for alpha in (0.01, 0.5, 100.0))
    assert few < 2.5
    assert few < some < all_
    assert all_ > 9.5


def test_class_shares_are_dirichlet() -> None:
    labels = np.repeat(np.arange(4), 10_000)
    parts = dirichlet(labels, clients=300, alpha=0.5, seed=0, size=40)
    shares = np.array([np.bincount(labels[part], minlength=4) / 40 for part in parts])
    # share p of Dir(.5 * 1), K = 4: mean 1/4, variance (1/4 * 3/4) / (2 + 1) = 1/16; and p (1 - p) / 40 of sampling
    variance = 1 / 16 + (1 / 4 - 1 / 16 - 1 / 16) / 40
    assert shares.mean(0) == pytest.approx([0.25] * 4, abs=0.06)
    assert shares.var(0) == pytest.approx([variance] * 4, rel=0.25)


def test_classes_that_run_out_are_made_up_for_by_others() -> None:
    labels = np.array([0] * 2 + [1] * 18)
    parts = dirichlet(labels, clients=4, alpha=1e-6, seed=0)  # each client wants one class only
    assert all_of(parts) == list(range(20))
    assert [len(part) for part in parts] == [5] * 4


def test_no_client_is_favoured_by_its_number() -> None:
    """With one rare sample, each of four clients gets it about equally often."""
    labels = np.array([0] + [1] * 39)
    owners = [
        next(c for c, part in enumerate(dirichlet(labels, clients=4, alpha=1.0, seed=s)) if 0 in part)
        for s in range(200)
    ]
    assert np.bincount(owners, minlength=4).min() > 25


def test_natural_clients_are_the_distinct_ids_in_order() -> None:
    made = natural(["b", "a", "b", "c"])
    assert {name: part.tolist() for name, part in made.items()} == {"a": [1], "b": [0, 2], "c": [3]}
    assert list(made) == ["a", "b", "c"]
    assert list(natural(np.array([10, 9, 10]))) == ["9", "10"]


@LAWS
@given(SEEDS, st.integers(1, 80), st.floats(0, 1, exclude_max=True))
def test_holding_out_cuts_the_share_off_and_keeps_one_at_least(seed: int, n: int, share: float) -> None:
    index = np.random.default_rng(seed).permutation(1000)[:n]
    kept, held = hold_out(index, share, seed=seed, client=0, purpose="test")
    assert sorted([*kept.tolist(), *held.tolist()]) == sorted(index.tolist())
    assert len(held) == min(round(share * n), n - 1)
    assert_sorted_int64([kept, held])


def test_what_is_held_out_depends_on_seed_client_and_purpose() -> None:
    def held(seed: int = 0, client: int = 0, purpose: str = "test") -> list[int]:
        part: list[int] = hold_out(np.arange(100), 0.5, seed=seed, client=client, purpose=purpose)[1].tolist()
        return part

    assert held() == held()
    assert held() != held(seed=1)
    assert held() != held(client=1)
    assert held() != held(purpose="validation")


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, math.nan])
def test_a_share_to_hold_out_is_below_one(share: float) -> None:
    text = message(ConfigError, lambda: hold_out(np.arange(5), share, seed=0, client=0, purpose="validation"))
    assert text == f"a share of {share} cannot be held out for validation; allowed: from 0 to below 1"


# --- requests that cannot be met -----------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [0, -1, 11])
def test_more_clients_than_samples_is_refused(clients: int) -> None:
    text = f"10 samples cannot be dealt out to {clients} clients with one each at least"
    assert message(DataError, lambda: iid(np.zeros(10), clients=clients, seed=0)) == text
    assert message(DataError, lambda: dirichlet(np.zeros(10), clients=clients, alpha=1.0, seed=0)) == text


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_alpha_is_positive(alpha: float) -> None:
    assert message(ConfigError, lambda: dirichlet(np.zeros(10), clients=2, alpha=alpha, seed=0)) == (
        f"alpha is {alpha}; a Dirichlet distribution needs a positive one (0.1 = strong skew)"
    )


def test_an_infinite_alpha_is_refused() -> None:
    with pytest.raises(ConfigError, match="alpha is inf"):
        dirichlet(labels_of(0, 20, 4), clients=2, alpha=math.inf, seed=0)


@pytest.mark.parametrize("size", [6, 0, -1])
def test_more_samples_than_there_are_is_refused_at_once(size: int) -> None:
    assert message(DataError, lambda: dirichlet(np.zeros(10), clients=2, alpha=1.0, size=size, seed=0)) == (
        f"2 clients of {size} samples need {2 * size}, the data has 10"
    )


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (iid, {"clients": 2.5}),
        (dirichlet, {"clients": 2.5, "alpha": 1.0}),
        (dirichlet, {"clients": 2, "alpha": 1.0, "size": 2.5}),
    ],
    ids=["iid clients", "dirichlet clients", "dirichlet size"],
)
def test_broken_numbers_of_clients_or_samples_are_refused(function: Any, options: dict[str, Any]) -> None:
    with within(5), pytest.raises((ConfigError, DataError), match=r"2\.5"):
        function(labels_of(0, 20, 4), seed=0, **options)


def test_an_unknown_partition_is_answered_with_the_nearest() -> None:
    assert by_name("iid") is iid
    assert by_name("dirichlet") is dirichlet
    assert message(ConfigError, lambda: by_name("dirichlt")) == (
        "there is no partition 'dirichlt'. Did you mean 'dirichlet'?"
    )
    assert message(ConfigError, lambda: by_name("zipf")) == "there is no partition 'zipf'. Known: iid, dirichlet."
