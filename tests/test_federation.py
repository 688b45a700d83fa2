"""Whose data is whose: every sample of a client is its own, each used for one thing, and bad data is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import bits, message
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedfac.data.federation import Federation, are_numbers, numbers, one_client
from fedfac.data.pool import ArrayPool, ClientData
from fedfac.data.samples import Samples
from fedfac.errors import ConfigError, DataError

LAWS = settings(max_examples=25, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def arrays(n: int, client: int = 0) -> tuple[Tensor, Tensor]:
    """n samples that carry their owner and their number, and labels 0, 1, 2 that follow from the number."""
    x = torch.stack([torch.full((n,), float(client)), torch.arange(n, dtype=torch.float32)], 1)
    return x, torch.arange(n) % 3


def samples(data: ClientData, part: str) -> list[tuple[int, int, int]]:
    """Owner, number and label of a client's samples for training, test or validation."""
    x, y = data.pool.batch(getattr(data, part))
    return [(int(a), int(b), int(c)) for (a, b), c in zip(x.tolist(), y.tolist(), strict=True)]


def parts(data: ClientData) -> list[list[tuple[int, int, int]]]:
    return [samples(data, part) for part in ("train", "test", "validation")]


def assert_owns(data: ClientData, owner: int, numbers: Sequence[int]) -> None:
    """The client's three parts hold these samples of this owner with their labels, each once."""
    train, test, validation = parts(data)
    assert sorted(train + test + validation) == [(owner, i, i % 3) for i in sorted(numbers)]


# --- from arrays ---------------------------------------------------------------------------------------------------


@LAWS
@given(
    SEEDS,
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.floats(0, 0.9),
    st.floats(0, 0.9),
)
def test_each_client_s_samples_are_cut_into_disjoint_parts(
    seed: int, sizes: list[int], test_share: float, validation_share: float
) -> None:
    federation = Federation.from_arrays(
        [arrays(n, c) for c, n in enumerate(sizes)],
        test_share=test_share,
        validation_share=validation_share,
        seed=seed,
    )
    assert len(federation) == len(sizes)
    for c, n in enumerate(sizes):
        data = federation.client(c)
        assert_owns(data, c, range(n))
        tests = min(round(test_share * n), n - 1)
        validations = min(round(validation_share * (n - tests)), n - tests - 1)
        assert [len(part) for part in parts(data)] == [n - tests - validations, tests, validations]
        assert data.size == n - tests - validations


def test_given_test_data_is_the_test_data() -> None:
    x, y = arrays(6, 1)
    tx, ty = arrays(3, 2)
    federation = Federation.from_arrays([(x, y, tx, ty), arrays(5, 3)], validation_share=0.5)
    train, test, validation = parts(federation.client(0))
    assert test == [(2, 0, 0), (2, 1, 1), (2, 2, 2)]
    assert sorted(train + validation) == [(1, i, i % 3) for i in range(6)]
    assert len(validation) == 3
    assert_owns(federation.client(1), 3, range(5))


def test_clients_have_names() -> None:
    assert list(Federation.from_arrays([arrays(3), arrays(3)]).names) == ["0", "1"]
    named = Federation.from_arrays({"ward": arrays(4, 7), "clinic": arrays(5, 8)})
    assert list(named.names) == ["ward", "clinic"]
    assert_owns(named.client(1), 8, range(5))


def test_the_split_depends_on_the_seed_and_on_nothing_else() -> None:
    def cut(seed: int, clients: int = 2) -> list[list[tuple[int, int, int]]]:
        federation = Federation.from_arrays([arrays(30, c) for c in range(clients)], validation_share=0.3, seed=seed)
        return parts(federation.client(1))

    assert cut(0) == cut(0) == cut(0, clients=5)
    assert cut(0) != cut(1)


def test_arrays_of_numpy_and_of_other_types_become_what_models_eat() -> None:
    x = np.arange(8, dtype=np.float64).reshape(4, 2)
    for kind in (np.int8, np.int16, np.int32, np.int64):
        pool = Federation.from_arrays([(x, np.array([0, 1, 1, 0], dtype=kind))]).client(0).pool
        assert isinstance(pool, ArrayPool)
        assert pool.inputs.dtype == torch.float32
        assert pool.targets.dtype == torch.int64
        assert pool.inputs.tolist() == x.tolist()


def test_images_of_bytes_stay_bytes_until_they_are_prepared() -> None:
    x = np.arange(8, dtype=np.uint8).reshape(4, 2)
    federation = Federation.from_arrays([(x, np.array([0, 1, 1, 0]))], test_share=0.0, prepare=lambda b: b.float() / 2)
    pool = federation.client(0).pool
    assert isinstance(pool, ArrayPool)
    assert pool.inputs.dtype == torch.uint8
    assert pool.batch(torch.tensor([1, 3]))[0].tolist() == [[1.0, 1.5], [3.0, 3.5]]


def test_arrays_that_are_read_only_or_not_contiguous_are_taken() -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4).T
    x.flags.writeable = False
    y = np.array([0, 1, 1, 0])
    y.flags.writeable = False
    pool = Federation.from_arrays([(x, y)]).client(0).pool
    assert isinstance(pool, ArrayPool)
    assert pool.inputs.tolist() == x.tolist()


def test_half_precision_inputs_are_taken() -> None:
    for kind in (torch.float16, torch.bfloat16):
        federation = Federation.from_arrays([(torch.ones(4, 2, dtype=kind), torch.tensor([0, 1, 0, 1]))])
        assert federation.client(0).pool.batch(torch.tensor([0]))[0].dtype == kind


def test_classes_are_counted_or_given_and_real_targets_have_none() -> None:
    x = torch.zeros(4, 1)
    assert Federation.from_arrays([(x, torch.tensor([0, 2, 1, 0]))]).classes == 3
    assert Federation.from_arrays([(x, torch.tensor([0, 2, 1, 0]))], classes=10).classes == 10
    assert Federation.from_arrays([(x, torch.rand(4))]).classes is None


def test_a_federation_prints_its_size() -> None:
    assert repr(Federation.from_arrays([arrays(5)] * 3)) == "Federation(3 clients, classes=3)"


def test_one_client_trains_on_all_of_its_samples() -> None:
    for given_as in (arrays(7, 4), (*arrays(7, 4), *arrays(2, 9)), TensorDataset(*arrays(7, 4))):
        data = one_client(given_as)
        assert sorted(samples(data, "train")) == [(4, i, i % 3) for i in range(7)]
        assert data.size == 7


# --- from datasets -------------------------------------------------------------------------------------------------


class Pairs(Dataset[tuple[Tensor, int]]):
    """A map-style dataset that counts how often it is read."""

    def __init__(self, n: int, client: int) -> None:
        self.x, self.y = arrays(n, client)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.reads += 1
        return self.x[index], int(self.y[index])


def test_datasets_are_read_once_into_tensors() -> None:
    datasets = [Pairs(6, 0), Pairs(9, 1)]
    federation = Federation.from_datasets(datasets, validation_share=0.2)
    for c, dataset in enumerate(datasets):
        for _ in range(3):
            assert_owns(federation.client(c), c, range(len(dataset)))
        assert dataset.reads == len(dataset)
    assert federation.classes == 3


def test_test_datasets_belong_to_their_clients() -> None:
    federation = Federation.from_datasets(
        {"a": Pairs(4, 0), "b": Pairs(5, 1)}, test={"b": Pairs(2, 11), "a": Pairs(3, 10)}
    )
    for c, (n, tests) in enumerate([(4, 3), (5, 2)]):
        assert samples(federation.client(c), "test") == [(10 + c, i, i % 3) for i in range(tests)]
        assert sorted(samples(federation.client(c), "train")) == [(c, i, i % 3) for i in range(n)]


class Stream(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Any:
        return iter(range(3))


class Odd(Dataset[Any]):
    """A dataset of given items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def test_a_dataset_without_a_length_is_refused() -> None:
    assert message(DataError, lambda: Federation.from_datasets({"phone": Stream()})) == (
        "the dataset of client 'phone' has no length; a map-style Dataset is needed"
    )


def test_an_empty_dataset_is_refused() -> None:
    assert message(DataError, lambda: Federation.from_datasets([Pairs(3, 0), Pairs(0, 1)])) == (
        "client '1' has no samples: leave it out of the federation, or give it at least one"
    )


@pytest.mark.parametrize(
    "dataset",
    [
        Odd((torch.zeros(2), 0), (torch.zeros(3), 1)),
        Odd((torch.zeros(2), 0, 1), (torch.zeros(2), 1, 1)),
        Odd(torch.zeros(2), torch.zeros(2), torch.zeros(2)),
        Odd((object(), 0)),
    ],
    ids=["shapes differ", "triples", "inputs alone", "objects"],
)
def test_a_dataset_of_something_else_than_pairs_is_refused(dataset: Dataset[Any]) -> None:
    text = message(DataError, lambda: Federation.from_datasets({"ward": dataset}))
    assert text.startswith("the dataset of client 'ward' does not give (input, target) pairs of one shape: ")


def test_a_dataset_of_dictionaries_is_refused() -> None:
    with pytest.raises(DataError, match="does not give"):
        Federation.from_datasets({"ward": Odd({"image": torch.zeros(2), "label": 0})})


def test_test_datasets_for_other_clients_are_refused() -> None:
    assert message(DataError, lambda: Federation.from_datasets([Pairs(3, 0), Pairs(3, 1)], test=[Pairs(3, 0)])) == (
        "test data for the clients ['0'], training data for ['0', '1']"
    )


# --- partition -----------------------------------------------------------------------------------------------------


@LAWS
@given(SEEDS, st.integers(1, 12), st.sampled_from(["iid", "dirichlet"]), st.floats(0, 0.6), st.floats(0, 0.6))
def test_a_partition_by_name_gives_every_sample_to_one_client_for_one_purpose(
    seed: int, clients: int, by: str, test_share: float, validation_share: float
) -> None:
    n = 10 * clients
    parameters = {"alpha": 0.3} if by == "dirichlet" else {}
    federation = Federation.partition(
        arrays(n),
        by=by,
        clients=clients,
        test_share=test_share,
        validation_share=validation_share,
        seed=seed,
        **parameters,  # type: ignore[arg-type]
    )
    owned = [[s for part in parts(federation.client(c)) for s in part] for c in range(clients)]
    assert [len(own) for own in owned] == [10] * clients
    assert sorted(s for own in owned for s in own) == [(0, i, i % 3) for i in range(n)]
    tests = min(round(test_share * 10), 9)
    assert {len(federation.client(c).test) for c in range(clients)} == {tests}


def test_a_partition_by_ids_makes_a_client_of_every_id() -> None:
    ids = ["b", "a", "b", "c", "a", "b"]
    for by in (ids, tuple(ids), np.array(ids)):
        federation = Federation.partition(arrays(6), by=by)
        assert list(federation.names) == ["a", "b", "c"]
        for c, own in enumerate([(1, 4), (0, 2, 5), (3,)]):
            assert_owns(federation.client(c), 0, own)
    numbered = Federation.partition(arrays(3), by=torch.tensor([10, 9, 10]))
    assert list(numbered.names) == ["9", "10"]


def test_a_partition_by_a_function_is_what_the_function_says() -> None:
    asked: list[Any] = []

    def halves(labels: Any, *, clients: int, seed: int, start: int) -> list[Any]:
        asked.append((labels.tolist(), clients, seed, start))
        return [np.arange(start, 5), list(range(5, 9))]

    federation = Federation.partition(arrays(9), by=halves, clients=2, seed=4, start=1)
    assert asked == [([i % 3 for i in range(9)], 2, 4, 1)]
    assert_owns(federation.client(0), 0, range(1, 5))
    assert_owns(federation.client(1), 0, range(5, 9))


def test_a_dataset_can_be_partitioned_and_prepared() -> None:
    federation = Federation.partition(
        TensorDataset(*arrays(20)), by="iid", clients=4, prepare=lambda b: b * 2, classes=9
    )
    x, y = federation.client(0).pool.batch(torch.tensor([7]))
    assert x.tolist() == [[0, 14]]
    assert y.tolist() == [1]
    assert federation.classes == 9


@pytest.mark.parametrize("index", [[0, 99], [-1, 3], [20]])
def test_a_function_that_deals_out_samples_that_do_not_exist_is_refused(index: list[int]) -> None:
    with pytest.raises(DataError):
        Federation.partition(arrays(20), by=lambda labels, clients, seed: [[0, 1], index], clients=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"by": "iid"}, "say into how many clients the data is cut by 'iid': clients=20, for example"),
        ({"by": "idd", "clients": 2}, "there is no partition 'idd'. Did you mean 'iid'?"),
        (
            {"by": "dirichlet", "clients": 2},
            "partition 'dirichlet' with []: dirichlet() missing 1 required keyword-only argument: 'alpha'",
        ),
        (
            {"by": "iid", "clients": 2, "alpha": 0.1},
            "partition 'iid' with ['alpha']: iid() got an unexpected keyword argument 'alpha'",
        ),
        (
            {"by": "dirichlet", "clients": 2, "alpha": 0.0},
            "alpha is 0.0; a Dirichlet distribution needs a positive one (0.1 = strong skew)",
        ),
        (
            {"by": "iid", "clients": 2, "test_share": 1.0},
            "a share of 1.0 cannot be held out for test; allowed: from 0 to below 1",
        ),
        (
            {"by": "iid", "clients": 2, "validation_share": -0.5},
            "a share of -0.5 cannot be held out for validation; allowed: from 0 to below 1",
        ),
    ],
)
def test_bad_settings_of_a_partition_are_refused(options: dict[str, Any], text: str) -> None:
    assert message(ConfigError, lambda: Federation.partition(arrays(20), **options)) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"by": "iid", "clients": 21}, "20 samples cannot be dealt out to 21 clients with one each at least"),
        (
            {"by": "dirichlet", "clients": 3, "alpha": 1.0, "size": 7},
            "3 clients of 7 samples need 21, the data has 20",
        ),
        ({"by": [0, 1, 0]}, "3 client ids for 20 samples; give one id per sample"),
        (
            {"by": lambda labels, clients, seed: [[0, 1], []], "clients": 2},
            "client '1' has no training samples: leave it out of the federation, or give it at least one",
        ),
    ],
)
def test_impossible_partitions_are_refused(options: dict[str, Any], text: str) -> None:
    assert message(DataError, lambda: Federation.partition(arrays(20), **options)) == text


@pytest.mark.parametrize("options", [{"alpha": 0.1}, {"test_shares": 0.5}, {"clients": 7}])
def test_settings_that_ids_have_no_use_for_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Federation.partition(arrays(6), by=[0, 1, 0, 1, 0, 1], **options)


# --- lazy ----------------------------------------------------------------------------------------------------------


def test_a_lazy_client_is_made_when_it_is_needed_and_forgotten() -> None:
    loads: list[int] = []

    def load(index: int) -> Any:
        loads.append(index)
        return *arrays(4, index), *arrays(2, index + 100)

    federation = Federation.lazy(10**12, load, classes=3)
    assert len(federation) == 10**12
    assert federation.names[10**12 - 1] == str(10**12 - 1)
    assert loads == []
    data = federation.client(5)
    assert samples(data, "train") == [(5, i, i % 3) for i in range(4)]
    assert samples(data, "test") == [(105, 0, 0), (105, 1, 1)]
    assert samples(data, "validation") == []
    federation.client(5)
    assert loads == [5, 5]


def test_lazy_clients_can_have_names() -> None:
    federation = Federation.lazy(["ward", "clinic"], lambda i: (*arrays(4), *arrays(2)))
    assert list(federation.names) == ["ward", "clinic"]


def test_bad_lazy_clients_are_refused_by_name() -> None:
    empty = Federation.lazy(["a", "b"], lambda i: (*arrays(0), *arrays(2)))
    assert message(DataError, lambda: empty.client(1)) == (
        "client 'b' has no training samples: leave it out of the federation, or give it at least one"
    )
    labels = Federation.lazy(["a", "b"], lambda i: (*arrays(4), *arrays(2)), classes=2)
    assert message(DataError, lambda: labels.client(1)) == "client 'b' has labels from 0 to 2; allowed: 0..1"


@pytest.mark.parametrize(("train", "test"), [((5, 4), (2, 3)), ((5, 4), (2, 2)), ((4, 4), (2, 3))])
def test_a_lazy_client_whose_inputs_and_targets_do_not_match_is_refused(
    train: tuple[int, int], test: tuple[int, int]
) -> None:
    def load(index: int) -> Any:
        return arrays(train[0])[0], arrays(train[1])[1], arrays(test[0])[0], arrays(test[1])[1]

    with pytest.raises(DataError, match=r"client 'ward' has \d inputs and \d targets"):
        Federation.lazy(["ward"], load).client(0)


def test_a_lazy_client_with_numbers_that_are_not_finite_is_refused() -> None:
    def load(index: int) -> Any:
        x, y = arrays(4)
        x[1, 1] = math.nan
        return x, y, *arrays(2)

    with pytest.raises(DataError, match="not finite"):
        Federation.lazy(1, load).client(0)


@pytest.mark.parametrize("clients", [0, -1])
def test_a_lazy_federation_has_clients(clients: int) -> None:
    with pytest.raises(DataError, match="a federation needs at least one client"):
        Federation.lazy(clients, lambda i: (*arrays(4), *arrays(2)))


def test_client_numbers_are_made_on_demand() -> None:
    many = numbers(10**15)
    assert len(many) == 10**15
    assert many[10**15 - 1] == str(10**15 - 1)
    assert list(numbers(3)) == ["0", "1", "2"]
    with pytest.raises(IndexError):
        many[10**15]
    assert are_numbers(numbers(10**15))
    assert are_numbers(["0", "1"])
    assert not are_numbers(["1", "0"])


# --- what is refused -----------------------------------------------------------------------------------------------

NO_CLIENT = "a federation needs at least one client; this one has none"


def test_a_federation_without_clients_is_refused() -> None:
    assert message(DataError, lambda: Federation.from_arrays([])) == NO_CLIENT
    assert message(DataError, lambda: Federation.from_datasets({})) == NO_CLIENT
    assert message(DataError, lambda: Federation.lazy([], lambda i: (*arrays(1), *arrays(1)))) == NO_CLIENT


def with_bad(value: float, *places: int) -> tuple[Tensor, Tensor]:
    x, y = arrays(6)
    x[list(places), 1] = value
    return x, y


X, Y = arrays(6)


@pytest.mark.parametrize(
    ("clients", "text"),
    [
        ({"a": (X,)}, "client 'a' gave 1 arrays; give (x, y) or (x, y, x_test, y_test)"),
        ({"a": (X, Y, X)}, "client 'a' gave 3 arrays; give (x, y) or (x, y, x_test, y_test)"),
        ({"a": (X, Y), "b": (X, Y[:4])}, "client 'b' has 6 inputs and 4 targets"),
        ({"a": (X, Y, X, Y[:5])}, "client 'a' has 6 inputs and 5 targets"),
        ({"a": (X, Y), "b": (X[:, :1], Y)}, "the clients' inputs have different shapes: [(1,), (2,)]"),
        (
            {"a": (X, Y), "b": (X[:0], Y[:0])},
            "client 'b' has no training samples: leave it out of the federation, or give it at least one",
        ),
        (
            {"a": with_bad(math.nan, 1), "b": with_bad(math.inf, 2, 3)},
            "the data has 3 of 12 samples with numbers that are not finite: clean or drop them first",
        ),
        ({"a": (X, Y - 1)}, "the data has labels from -1 to 1; allowed: 0, 1, 2, ..."),
    ],
)
def test_bad_arrays_are_refused(clients: dict[str, Any], text: str) -> None:
    assert message(DataError, lambda: Federation.from_arrays(clients)) == text


def test_labels_beyond_the_given_classes_are_refused() -> None:
    assert message(DataError, lambda: Federation.from_arrays([(X, Y)], classes=2)) == (
        "the data has labels from 0 to 2; allowed: 0..1"
    )


def test_targets_of_different_shapes_are_refused() -> None:
    with pytest.raises(DataError, match="targets"):
        Federation.from_arrays({"a": (X, Y.float()), "b": (X, X)})


def test_targets_that_are_not_finite_are_refused() -> None:
    with pytest.raises(DataError, match="not finite"):
        Federation.from_arrays([(X, torch.tensor([0.5, math.nan, 1, 2, 3, 4]))])


def test_inputs_and_targets_of_a_partition_must_match() -> None:
    assert message(DataError, lambda: Federation.partition((X, Y[:4]), by="iid", clients=2)) == (
        "the data has 6 inputs and 4 targets"
    )


# --- fingerprints and devices --------------------------------------------------------------------------------------


def test_a_fingerprint_knows_the_data_and_who_holds_it() -> None:
    def made(x: Tensor = X, y: Tensor = Y, ids: tuple[int, ...] = (0, 0, 0, 1, 1, 1), **options: Any) -> str:
        return Federation.partition((x, y), by=ids, **options).fingerprint

    moved = X.clone()
    moved[2, 0] += 1e-6
    others = [
        made(x=moved),
        made(y=Y.flip(0)),
        made(ids=(0, 0, 1, 1, 1, 1)),
        made(seed=1, test_share=0.5),
        made(test_share=0.5),
        made(validation_share=0.5),
        made(test_share=0.0, validation_share=0.5),
        made(test_share=0.0, validation_share=0.5, seed=1),
        made(),
    ]
    assert made() == others[-1]
    assert len(set(others)) == len(others)


def test_a_lazy_fingerprint_is_what_it_is_told() -> None:
    def made(clients: int, fingerprint: str) -> str:
        return Federation.lazy(clients, lambda i: (*arrays(4), *arrays(2)), fingerprint=fingerprint).fingerprint

    assert made(3, "v1") == made(3, "v1")
    assert len({made(3, "v1"), made(3, "v2"), made(4, "v1")}) == 3


def test_a_federation_on_a_device_is_the_same_federation() -> None:
    here = Federation.from_arrays({"a": arrays(6, 0), "b": arrays(9, 1)}, validation_share=0.2)
    there = here.to(torch.device("cpu"))
    lazy = Federation.lazy(["a", "b"], lambda i: (*arrays(4, i), *arrays(2, i)), classes=3)
    for one, other in ((here, there), (lazy, lazy.to(torch.device("cpu")))):
        assert (one.names, one.classes, one.fingerprint) == (other.names, other.classes, other.fingerprint)
        for c in range(2):
            assert parts(one.client(c)) == parts(other.client(c))


def test_the_pool_of_a_federation_is_moved_once_for_all_clients() -> None:
    there = Federation.from_arrays([arrays(6, 0), arrays(9, 1)]).to(torch.device("cpu"))
    assert there.client(0).pool is there.client(1).pool


def test_the_caller_s_arrays_are_not_changed() -> None:
    x, y = arrays(9)
    before = bits(x), bits(y)
    Federation.partition((x, y), by="iid", clients=3, seed=1).client(0)
    assert (bits(x), bits(y)) == before


# --- clients with very many samples -----------------------------------------------------------------------------------


@LAWS
@given(sizes=st.lists(st.integers(2, 200), min_size=1, max_size=4), most=st.integers(2, 150), fixed=st.booleans())
def test_a_large_client_keeps_evenly_spaced_samples_on_both_sides(sizes: list[int], most: int, fixed: bool) -> None:
    owners = np.repeat([f"c{i}" for i in range(len(sizes))], sizes)
    targets = torch.zeros(len(owners), dtype=torch.int64)
    known: dict[str, Any] = {"owners": owners}
    if fixed:  # the data set's own division, as ranges
        ends = np.cumsum(sizes).tolist()
        cuts = [(end - size, end - max(1, size // 5), end) for end, size in zip(ends, sizes, strict=True)]
        known = {"fixed": {f"c{i}": (range(a, b), range(b, c)) for i, (a, b, c) in enumerate(cuts)}}
    made = Samples("made", ArrayPool(targets[:, None].float(), targets), "f", targets.numpy(), 1, **known)
    whole, thin = made.federation(seed=3), made.federation(seed=3, max_samples=most)
    for client, size in enumerate(sizes):
        for part in ("train", "test"):
            every, kept = (np.asarray(getattr(f.client(client), part)).tolist() for f in (whole, thin))
            gaps = np.diff([*map(every.index, kept), len(every)])  # the first place is 0
            assert kept[:1] == every[:1]
            assert np.ptp(gaps) <= 1 if kept else not every
            assert abs(len(kept) - min(1, most / size) * len(every)) <= 1
            assert size > most or kept == every


def test_a_client_needs_two_samples_and_has_to_be_there_by_nature() -> None:
    made = Samples("made", ArrayPool(torch.zeros(4, 1), torch.zeros(4)), "f", None, None, owners=np.array(list("aabb")))
    assert "max_samples is 1; a client needs at least 2" in message(ConfigError, lambda: made.federation(max_samples=1))
    labelled = Samples(
        "made", ArrayPool(torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)), "f", np.zeros(4, int), 1
    )
    said = message(ConfigError, lambda: labelled.federation(partition="iid", clients=2, max_samples=2))
    assert said == "max_samples is for natural clients; 'iid' cuts all samples into --clients clients"
