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
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from fedfac.data import partition
from fedfac.data.partition import (
    PARTITIONS,
    by_name,
    dirichlet,
    dirichlet_by_class,
    hold_out,
    iid,
    natural,
    pathological,
    quantity,
    shards,
)
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
        "there is no partition 'dirichlt'. Did you mean 'dirichlet' or 'dirichlet-by-class'?"
    )
    assert message(ConfigError, lambda: by_name("zipf")) == (
        "there is no partition 'zipf'. Known: iid, dirichlet, dirichlet-by-class, pathological, shards, quantity."
    )


# --- the laws of all of them ---------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {"alpha": 0.3},
    "dirichlet-by-class": {"alpha": 0.3, "min_size": 2},
    "pathological": {"classes_per_client": 2},
    "shards": {"shards_per_client": 2},
    "quantity": {"alpha": 0.3, "min_size": 2},
}
EVERY = pytest.mark.parametrize("name", PARTITIONS)


def test_there_are_options_for_every_partition() -> None:
    assert list(OPTIONS) == list(PARTITIONS)


@EVERY
@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(20, 80), st.integers(1, 8))
def test_every_partition_is_disjoint_and_leaves_nobody_out(name: str, seed: int, n: int, clients: int) -> None:
    labels = np.r_[np.arange(4).repeat(2), labels_of(seed, n, 4)]
    parts = by_name(name)(labels, clients=clients, seed=seed, **OPTIONS[name])
    assert len(parts) == clients
    assert min(map(len, parts)) > 0
    assert_sorted_int64(parts)
    dealt = all_of(parts)
    assert len(set(dealt)) == len(dealt)
    assert set(dealt) <= set(range(len(labels)))
    if name not in ("dirichlet", "pathological"):
        assert dealt == list(range(len(labels)))


@EVERY
@settings(max_examples=15, deadline=None)
@given(SEEDS, SEEDS)
def test_every_partition_is_a_function_of_the_seed(name: str, seed: int, other: int) -> None:
    labels = labels_of(0, 200, 5)
    once, again, else_ = (
        lists(by_name(name)(labels, clients=10, seed=s, **OPTIONS[name])) for s in (seed, seed, other)
    )
    assert once == again
    assert (once == else_) == (seed == other)


IDS: dict[str, Callable[[int], Any]] = {
    "numbers": lambda i: 7 * i,
    "negative reals": lambda i: -i / 3,
    "texts": lambda i: f"train/{i}.png",
    "tuples": lambda i: (i % 3, f"{i}"),
}


@EVERY
@settings(max_examples=15, deadline=None)
@given(SEEDS, st.sampled_from(list(IDS)), st.booleans())
def test_with_ids_the_order_of_the_rows_does_not_matter(name: str, seed: int, kind: str, as_array: bool) -> None:
    labels = np.r_[np.arange(4).repeat(4), labels_of(seed, 60, 4)]
    ids = [IDS[kind](i) for i in range(len(labels))]
    shuffled = np.random.default_rng(seed).permutation(len(labels)).tolist()

    def dealt(rows: list[int]) -> list[set[Any]]:
        own = [ids[row] for row in rows]
        given_ids: Any = np.array(own) if as_array and kind != "tuples" else own
        parts = by_name(name)(labels[rows], clients=6, seed=seed, ids=given_ids, **OPTIONS[name])
        assert_sorted_int64(parts)
        return [{own[i] for i in part} for part in parts]

    assert dealt(list(range(len(labels)))) == dealt(shuffled)


@EVERY
def test_ids_in_the_order_of_the_rows_change_nothing(name: str) -> None:
    labels = labels_of(3, 100, 4)
    with_ids, without = (
        lists(by_name(name)(labels, clients=5, seed=1, ids=ids, **OPTIONS[name])) for ids in (range(100), None)
    )
    assert with_ids == without


@EVERY
def test_numbers_of_numpy_are_numbers(name: str) -> None:
    labels = labels_of(3, 100, 4)
    plain, numpys = (lists(by_name(name)(labels, clients=kind(5), seed=1, **OPTIONS[name])) for kind in (int, np.int64))
    assert plain == numpys


@EVERY
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1, 2, 3], "3 sample ids for 4 samples; give one id per sample"),
        ([1, 2, 2, 3], "the sample id 2 does not name one sample; every sample needs an id of its own"),
        ([1.0, math.nan, 2.0, 3.0], "does not name one sample"),
        ([1, "a", 2, 3], "the sample ids cannot be put in order"),
    ],
    ids=["too few", "twice", "nan", "mixed"],
)
def test_ids_that_do_not_name_samples_are_refused(name: str, ids: Any, text: str) -> None:
    assert text in message(
        DataError, lambda: by_name(name)(np.array([0, 0, 1, 1]), clients=1, seed=0, ids=ids, **OPTIONS[name])
    )


@EVERY
def test_every_partition_refuses_more_clients_than_samples(name: str) -> None:
    least = "2" if "min_size" in OPTIONS[name] else "one"
    assert message(DataError, lambda: by_name(name)(np.zeros(10), clients=11, seed=0, **OPTIONS[name])) == (
        f"10 samples cannot be dealt out to 11 clients with {least} each at least"
    )


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-by-class", "pathological", "shards"])
def test_a_partition_by_class_needs_one_label_per_sample(name: str) -> None:
    text = message(DataError, lambda: by_name(name)(np.zeros((20, 3)), clients=2, seed=0, **OPTIONS[name]))
    assert text.startswith("the labels are of shape (20, 3); a partition by class needs one label per sample")


@pytest.mark.parametrize("name", ["iid", "quantity"])
def test_a_partition_that_does_not_look_at_labels_takes_any(name: str) -> None:
    made = [lists(by_name(name)(y, clients=3, seed=0, **OPTIONS[name])) for y in (np.zeros((20, 3)), np.arange(20))]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("dirichlet-by-class", "min_size"),
        ("quantity", "min_size"),
        ("pathological", "classes_per_client"),
        ("shards", "shards_per_client"),
        *((name, "clients") for name in PARTITIONS),
    ],
)
def test_options_that_count_are_whole_numbers(name: str, option: str) -> None:
    options = {"clients": 2, **OPTIONS[name], option: 2.5}
    text = message(ConfigError, lambda: by_name(name)(labels_of(0, 20, 4), seed=0, **options))
    assert text == f"{option} is 2.5; it must be a whole number"


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-by-class", "quantity"])
@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, math.inf, 1e300])
def test_every_alpha_is_positive_and_finite(name: str, alpha: float) -> None:
    with pytest.raises(ConfigError, match=r"alpha is .*(positive|finite)"):
        by_name(name)(np.zeros(10), clients=2, alpha=alpha, seed=0)


# --- by class, and by quantity -------------------------------------------------------------------------------------


@LAWS
@given(SEEDS, st.integers(1, 150), st.integers(1, 8), ALPHAS, st.data())
def test_nobody_is_below_the_smallest_size(seed: int, n: int, classes: int, alpha: float, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, n))
    min_size = data.draw(st.integers(1, n // clients))
    labels = labels_of(seed, n, classes)
    for function in (dirichlet_by_class, quantity):
        with within(5):
            parts = function(labels, clients=clients, alpha=alpha, seed=seed, min_size=min_size)
        assert all_of(parts) == list(range(n))
        assert min(map(len, parts)) >= min_size
        assert_sorted_int64(parts)


def test_draws_are_repeated_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[Any, ...]] = []

    def counted(*key: Any) -> np.random.Generator:
        drawn.append(key)
        return np.random.default_rng(len(drawn))

    monkeypatch.setattr(partition, "stream", counted)
    parts = dirichlet_by_class(np.zeros(40), clients=20, alpha=1e-6, seed=0, min_size=2)
    assert [len(part) for part in parts] == [2] * 20
    assert len(drawn) <= partition.REDRAWS + 1


def test_what_is_missing_comes_from_the_largest() -> None:
    amounts = np.array([[6, 3], [0, 1], [0, 5], [0, 0]])
    partition._raise_to(2, amounts)
    assert amounts.tolist() == [[3, 3], [1, 1], [0, 5], [2, 0]]
    tight = np.array([[4, 1], [0, 0], [2, 1], [0, 0]])
    partition._raise_to(2, tight)
    assert tight.tolist() == [[1, 1], [2, 0], [1, 1], [2, 0]]


def test_a_smallest_size_that_cannot_be_had_is_refused() -> None:
    for function in (dirichlet_by_class, quantity):
        assert message(DataError, lambda f=function: f(np.zeros(10), clients=3, alpha=1.0, seed=0, min_size=4)) == (  # type: ignore[misc]
            "10 samples cannot be dealt out to 3 clients with 4 each at least"
        )
        assert message(ConfigError, lambda f=function: f(np.zeros(10), clients=3, alpha=1.0, seed=0, min_size=0)) == (  # type: ignore[misc]
            "min_size is 0; it is a whole number from 1 up"
        )


def test_shares_of_a_class_over_clients_are_dirichlet() -> None:
    labels = np.repeat(np.arange(200), 500)
    parts = dirichlet_by_class(labels, clients=4, alpha=0.5, seed=0)
    shares = np.array([np.bincount(labels[part], minlength=200) / 500 for part in parts])
    assert shares.sum(0) == pytest.approx(np.ones(200))
    assert shares.mean(1) == pytest.approx([0.25] * 4, abs=0.06)
    assert shares.var(1) == pytest.approx([1 / 16] * 4, rel=0.25)  # (1/4 * 3/4) / (4 * 0.5 + 1)


def test_quantity_skews_sizes_and_not_labels() -> None:
    labels = np.repeat(np.arange(4), 5000)
    parts = quantity(labels, clients=10, alpha=0.5, seed=1)
    sizes = np.array([len(part) for part in parts])
    assert sizes.max() > 4 * np.median(sizes)
    for part in parts:
        if len(part) > 1000:
            assert np.bincount(labels[part], minlength=4) / len(part) == pytest.approx([0.25] * 4, abs=0.05)
    even = [len(part) for part in quantity(labels, clients=10, alpha=1e6, seed=1)]
    assert max(even) - min(even) < 40


# --- pathological --------------------------------------------------------------------------------------------------


def table(parts: Parts, labels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.array([np.bincount(labels[part], minlength=int(labels.max()) + 1) for part in parts])


@LAWS
@given(SEEDS, st.integers(1, 25), st.integers(1, 8), st.data())
def test_every_client_has_exactly_so_many_classes(seed: int, clients: int, classes: int, data: st.DataObject) -> None:
    each = data.draw(st.integers(1, classes))
    sizes = data.draw(st.lists(st.integers(1, 3 * clients), min_size=classes, max_size=classes))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), sizes))
    if np.minimum(sizes, clients).sum() < clients * each:  # a client takes a sample of each of its classes
        with pytest.raises(DataError, match="cannot"):
            pathological(labels, clients=clients, classes_per_client=each, seed=seed)
        return
    with within(5):
        parts = pathological(labels, clients=clients, classes_per_client=each, seed=seed)
    counts = table(parts, labels)
    assert (np.count_nonzero(counts, axis=1) == each).all()
    held = counts.sum(0) > 0
    assert held.sum() == min(classes, clients * each)
    assert (counts.sum(0)[held] == np.array(sizes)[held]).all()  # a class that is held is dealt out whole
    assert_sorted_int64(parts)
    assert not more_balanced(counts)


def more_balanced(counts: npt.NDArray[np.int64]) -> bool:
    """Whether the same clients could hold the same classes with a smaller largest client: a question of flow.

    Everyone keeps one sample of each class that he holds; the rest flows from the classes to the clients.
    """
    clients, classes = counts.shape
    held = counts > 0
    spare = counts.sum(0) - held.sum(0)
    limits = counts.sum(1).max() - 1 - held.sum(1)
    if limits.min() < 0:
        return False
    source, sink = clients + classes, clients + classes + 1
    capacity = np.zeros((sink + 1, sink + 1), dtype=np.int32)
    capacity[source, clients:source] = spare
    capacity[clients:source, :clients] = np.where(held.T, spare.sum(), 0)
    capacity[:clients, sink] = limits
    return bool(maximum_flow(csr_array(capacity), source, sink).flow_value == spare.sum())


@LAWS
@given(SEEDS, st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.data())
def test_with_equal_classes_sizes_are_equal_up_to_one(
    seed: int, classes: int, holders: int, extra: int, data: st.DataObject
) -> None:
    each = data.draw(st.sampled_from([s for s in range(1, classes + 1) if classes * holders % s == 0]))
    clients = classes * holders // each
    labels = np.repeat(np.arange(classes), holders * extra + data.draw(st.integers(0, holders)))
    sizes = [len(part) for part in pathological(labels, clients=clients, classes_per_client=each, seed=seed)]
    assert sum(sizes) == len(labels)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("clients", "classes", "each"), [(100, 10, 2), (100, 10, 3), (100, 100, 10), (100, 100, 30)])
def test_the_papers_pathological_settings_come_out_even(clients: int, classes: int, each: int) -> None:
    labels = np.repeat(np.arange(classes), 6000 // classes)
    counts = table(pathological(labels, clients=clients, classes_per_client=each, seed=0), labels)
    assert set(counts.sum(1).tolist()) == {60}
    assert set(np.count_nonzero(counts, axis=1).tolist()) == {each}
    assert set(np.count_nonzero(counts, axis=0).tolist()) == {clients * each // classes}


def test_large_classes_are_held_by_more_clients() -> None:
    labels = np.repeat(np.arange(3), [60, 30, 10])
    counts = table(pathological(labels, clients=10, classes_per_client=1, seed=0), labels)
    assert counts.sum(1).tolist() == [10] * 10
    assert np.count_nonzero(counts, axis=0).tolist() == [6, 3, 1]


def test_small_classes_go_to_clients_with_a_large_one() -> None:
    labels = np.repeat(np.arange(4), [100, 100, 1, 1])
    for seed in range(10):
        sizes = [len(part) for part in pathological(labels, clients=2, classes_per_client=2, seed=seed)]
        assert sizes == [101, 101]


def test_every_pair_of_classes_occurs() -> None:
    labels = np.repeat(np.arange(6), 200)
    for seed in range(5):
        counts = table(pathological(labels, clients=100, classes_per_client=2, seed=seed), labels)
        assert len({tuple(np.flatnonzero(row).tolist()) for row in counts}) == 15


def test_with_few_places_any_class_may_be_the_one_that_is_used() -> None:
    labels = np.arange(6)
    used = {tuple(pathological(labels, clients=2, classes_per_client=1, seed=s)[0].tolist()) for s in range(60)}
    assert used == {(k,) for k in range(6)}


def test_pathological_requests_that_cannot_be_met_say_why() -> None:
    labels = np.repeat([3, 5, 8], [20, 20, 4])
    for each in (0, 4):
        assert message(
            ConfigError,
            lambda e=each: pathological(labels, clients=4, classes_per_client=e, seed=0),  # type: ignore[misc]
        ) == (f"classes_per_client is {each}; the data has 3 classes: allowed are 1 to that")
    with within(1):
        text = message(DataError, lambda: pathological(labels, clients=5, classes_per_client=3, seed=0))
    assert text == (
        "5 clients cannot have 3 of 3 classes each: that takes 15 places, the classes have 14, for a class has no "
        "more places than clients or samples (class '8' has 4 samples). Ask for fewer clients or fewer "
        "classes_per_client"
    )
    assert len(pathological(labels, clients=4, classes_per_client=3, seed=0)) == 4


# --- shards --------------------------------------------------------------------------------------------------------


def test_shards_are_cut_from_the_data_sorted_by_label() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
    counts = table(shards(labels, clients=10, shards_per_client=2, seed=0), labels)
    assert counts.sum(1).tolist() == [60] * 10
    assert set(counts.ravel().tolist()) <= {0, 30, 60}  # two shards to a class


@LAWS
@given(SEEDS, st.integers(1, 200), st.integers(1, 5), st.data())
def test_shards_are_equal_up_to_one(seed: int, n: int, each: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, max(n // each, 1)))
    labels = labels_of(seed, n, 4)
    if clients * each > n:
        return
    parts = shards(labels, clients=clients, shards_per_client=each, seed=seed)
    small = n // (clients * each)
    assert all(each * small <= len(part) <= each * (small + 1) for part in parts)
    assert all_of(parts) == list(range(n))


def test_more_shards_than_samples_are_refused() -> None:
    assert message(DataError, lambda: shards(np.zeros(10), clients=4, shards_per_client=3, seed=0)) == (
        "4 clients with 3 shards each need 12 shards, the data has 10 samples: ask for fewer"
    )
    assert message(ConfigError, lambda: shards(np.zeros(10), clients=4, shards_per_client=0, seed=0)) == (
        "shards_per_client is 0; it is a whole number from 1 up"
    )


# --- natural clients ------------------------------------------------------------------------------------


def test_natural_clients_that_are_too_small_are_dropped() -> None:
    ids = ["b", "a", "b", "c", "b", "c"]
    assert list(natural(ids, min_samples=2)) == ["b", "c"]
    assert message(DataError, lambda: natural(ids, min_samples=4)) == (
        "none of 3 clients has 4 samples, the largest has 3: lower min_samples"
    )
    with pytest.raises(ConfigError, match=r"min_samples is 2\.5"):
        natural(ids, min_samples=2.5)  # type: ignore[arg-type]
