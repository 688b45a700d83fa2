"""Federation: the clients' training, validation and test data, as indices into tensors.

Samples live in a *pool* (:mod:`fedfac.data.pool`); a client is a set of sample numbers. With arrays there is one
pool for the whole federation, resident on the device, and a batch is one gather. A lazy federation makes a client
when it is needed and forgets it: its memory does not grow with the number of clients.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedfac.data import partition as partitions
from fedfac.data.pool import (
    Array,
    ArrayPool,
    Augment,
    ClientArrays,
    ClientData,
    Pool,
    Prepare,
    as_tensor,
    check_lengths,
    read_dataset,
)
from fedfac.errors import ConfigError, DataError

Index = partitions.Index | range
REMEMBERED = 4096  # clients, of which only the sample numbers are kept


class Federation:
    """Clients and their data.

    Make one with :meth:`from_arrays`, :meth:`from_datasets`, :meth:`partition` or :meth:`lazy`.

    >>> import torch
    >>> x, y = torch.randn(60, 4), torch.arange(60) % 3
    >>> federation = Federation.partition((x, y), by="iid", clients=5, seed=0)
    >>> len(federation), federation.classes, federation.client(0).size
    (5, 3, 10)
    """

    def __init__(
        self,
        client: Callable[[int], ClientData],
        *,
        names: Sequence[str],
        classes: int | None,
        fingerprint: str,
        pool: Pool | None = None,
        parts: Mapping[str, tuple[Index, Index]] | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        if not len(names):
            raise DataError("a federation needs at least one client; this one has none")
        self._client = client
        self.names = names
        self.classes = classes
        self.fingerprint = fingerprint
        self.pool = pool  # the one pool of all clients, where there is one
        self.class_names = class_names  # what the classes are called, where that is known
        self.parts = parts  # by client, (training, test) sample numbers of the one pool, where there is one

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Federation({len(self)} clients, classes={self.classes})"

    def client(self, index: int) -> ClientData:
        """One client's data, checked."""
        data = self._client(index)
        if data.size == 0:
            raise DataError(
                f"client {self.names[index]!r} has no training samples: leave it out of the federation, "
                "or give it at least one"
            )
        return data

    def to(self, device: torch.device) -> Federation:
        """The federation with its pool resident on ``device`` (lazy clients move when they are made).

        Clients of a resident pool are only numbers: the recent ones are remembered.
        """
        resident = None if self.pool is None else self.pool.to(device)

        def client(index: int) -> ClientData:
            data = self._client(index)
            return replace(data, pool=data.pool.to(device) if resident is None else resident)

        return Federation(
            client if resident is None else lru_cache(REMEMBERED)(client),
            names=self.names,
            classes=self.classes,
            fingerprint=self.fingerprint,
            pool=resident,
            class_names=self.class_names,
        )

    def without_test(self) -> Federation:
        """The same clients with their test samples taken away: whatever is decided here cannot have seen them."""
        nothing = torch.empty(0, dtype=torch.int64)
        return self._changed(lambda index, data: replace(data, test=nothing), "without test")

    def with_validation(self, share: float, *, seed: int = 0) -> Federation:
        """The same clients with a share of each one's training samples held out for validation."""

        def hold_out(index: int, data: ClientData) -> ClientData:
            own = data.train.cpu().numpy()
            kept, held = partitions.hold_out(own, share, seed=seed, client=index, purpose="validation")
            return replace(data, train=_indices(kept), validation=_indices(held))

        return self._changed(hold_out, f"validation {share} {seed}")

    def has_validation(self) -> bool:
        """Whether any client has validation samples; of many clients, the first thousand are asked."""
        return any(len(self.client(client).validation) for client in range(min(len(self), 1000)))

    def _changed(self, change: Callable[[int, ClientData], ClientData], note: str) -> Federation:
        return Federation(
            lambda index: change(index, self._client(index)),
            names=self.names,
            classes=self.classes,
            fingerprint=f"{self.fingerprint} {note}",
            pool=self.pool,
        )

    def partition_json(self) -> str | None:
        """Who has which samples of the pool, as text for the record of a run; None for lazy clients.

        ``counts`` says how many of them are of which class, where the pool holds class labels as they are.
        """
        if self.parts is None:
            return None
        clients = {
            name: {part: _plain(index) for part, index in zip(("train", "test"), both, strict=True)}
            for name, both in self.parts.items()
        }
        names = None if self.class_names is None else list(self.class_names)
        counts = self._class_counts()
        known = {"fingerprint": self.fingerprint, "clients": clients, "counts": counts, "class_names": names}
        return json.dumps(known)

    def _class_counts(self) -> list[list[int]] | None:
        if self.classes is None or self.parts is None or not isinstance(self.pool, ArrayPool):
            return None
        labels = self.pool.targets
        owned = [torch.cat([_indices(train), _indices(test)]) for train, test in self.parts.values()]
        return [torch.bincount(labels[index].flatten().cpu(), minlength=self.classes).tolist() for index in owned]

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[ClientArrays] | Mapping[str, ClientArrays],
        *,
        test_share: float = 0.2,
        validation_share: float = 0.0,
        classes: int | None = None,
        prepare: Prepare | None = None,
        seed: int = 0,
    ) -> Federation:
        """One ``(x, y)`` per client, of which ``test_share`` is held out, or ``(x, y, x_test, y_test)``."""
        named = dict(clients) if isinstance(clients, Mapping) else {str(i): c for i, c in enumerate(clients)}
        inputs: list[Tensor] = []
        targets: list[Tensor] = []
        parts: dict[str, tuple[Index, Index]] = {}
        start = 0
        for number, (name, arrays) in enumerate(named.items()):
            if len(arrays) not in (2, 4):
                raise DataError(f"client {name!r} gave {len(arrays)} arrays; give (x, y) or (x, y, x_test, y_test)")
            tensors = [as_tensor(a) for a in arrays]
            check_lengths(name, tensors)
            own = np.arange(start, start + len(tensors[0]))
            start += len(own)
            if len(tensors) == 4:
                held = np.arange(start, start + len(tensors[2]))
                start += len(held)
            else:
                own, held = partitions.hold_out(own, test_share, seed=seed, client=number, purpose="test")
            inputs += tensors[::2]
            targets += tensors[1::2]
            parts[name] = (own, held)
        if not named:
            raise DataError("a federation needs at least one client; this one has none")
        for what, several in (("inputs", inputs), ("targets", targets)):
            shapes = {tuple(t.shape[1:]) for t in several if len(t)}
            if len(shapes) > 1:
                raise DataError(f"the clients' {what} have different shapes: {sorted(shapes)}")
        pool = ArrayPool(torch.cat(inputs), torch.cat(targets), prepare)
        return cls._pooled(pool, parts, classes=classes, validation_share=validation_share, seed=seed)

    @classmethod
    def from_datasets(
        cls,
        clients: Sequence[Dataset[Any]] | Mapping[str, Dataset[Any]],
        *,
        test: Sequence[Dataset[Any]] | Mapping[str, Dataset[Any]] | None = None,
        test_share: float = 0.2,
        validation_share: float = 0.0,
        classes: int | None = None,
        seed: int = 0,
    ) -> Federation:
        """One map-style ``Dataset`` of (input, target) per client; each is read once, into one tensor."""
        named = dict(clients) if isinstance(clients, Mapping) else {str(i): d for i, d in enumerate(clients)}
        arrays: dict[str, ClientArrays] = {name: read_dataset(name, dataset) for name, dataset in named.items()}
        if test is not None:
            held = dict(test) if isinstance(test, Mapping) else {str(i): d for i, d in enumerate(test)}
            if held.keys() != named.keys():
                raise DataError(f"test data for the clients {sorted(held)}, training data for {sorted(named)}")
            arrays = {name: (*read_dataset(name, named[name]), *read_dataset(name, held[name])) for name in named}
        return cls.from_arrays(
            arrays, test_share=test_share, validation_share=validation_share, classes=classes, seed=seed
        )

    @classmethod
    def partition(
        cls,
        dataset: Dataset[Any] | tuple[Array, Array],
        *,
        by: str | Callable[..., Sequence[Any]] | Sequence[Any] | npt.NDArray[Any] | Tensor,
        clients: int | None = None,
        test_share: float = 0.2,
        validation_share: float = 0.0,
        classes: int | None = None,
        prepare: Prepare | None = None,
        seed: int = 0,
        **parameters: Any,
    ) -> Federation:
        """Deal one dataset (or ``(x, y)``) out to clients.

        ``by`` is the name of a partition (``"iid"``, ``"dirichlet"`` with ``alpha=``), a function
        ``(labels, clients=, seed=, ...)`` to index arrays, or one client id per sample.
        """
        x, y = dataset if isinstance(dataset, tuple) else read_dataset("all", dataset)
        inputs, targets = as_tensor(x), as_tensor(y)
        if len(inputs) != len(targets):
            raise DataError(f"the data has {len(inputs)} inputs and {len(targets)} targets")
        named: Mapping[str, Any]
        if isinstance(by, str) or callable(by):
            function = partitions.by_name(by) if isinstance(by, str) else by
            if clients is None:
                raise ConfigError(f"say into how many clients the data is cut by {by!r}: clients=20, for example")
            try:
                parts = function(targets.numpy(), clients=clients, seed=seed, **parameters)
            except TypeError as error:
                raise ConfigError(f"partition {by!r} with {sorted(parameters)}: {error}") from error
            named = {str(i): part for i, part in enumerate(parts)}
            for name, part in named.items():
                if len(part) and not 0 <= min(part) <= max(part) < len(targets):
                    raise DataError(
                        f"client {name!r} was dealt samples that the data does not have: 0..{len(targets) - 1}"
                    )
        else:
            if clients is not None or parameters:
                given = [*(["clients"] if clients is not None else []), *parameters]
                raise ConfigError(f"{', '.join(given)} cannot be given beside one client id per sample: the ids decide")
            ids = by.numpy() if isinstance(by, Tensor) else np.asarray(by)
            if len(ids) != len(targets):
                raise DataError(f"{len(ids)} client ids for {len(targets)} samples; give one id per sample")
            named = partitions.natural(ids)
        split = {
            name: partitions.hold_out(np.asarray(part), test_share, seed=seed, client=i, purpose="test")
            if len(part)
            else (np.asarray(part, dtype=np.int64), np.asarray(part, dtype=np.int64))
            for i, (name, part) in enumerate(named.items())
        }
        pool = ArrayPool(inputs, targets, prepare)
        return cls._pooled(pool, split, classes=classes, validation_share=validation_share, seed=seed)

    @classmethod
    def lazy(
        cls,
        clients: int | Sequence[str],
        load: Callable[[int], tuple[Array, Array, Array, Array]],
        *,
        classes: int | None = None,
        fingerprint: str = "",
    ) -> Federation:
        """Clients that are made when they are needed: ``load(i)`` gives ``(x, y, x_test, y_test)``.

        ``fingerprint`` names the data, so that a run is not resumed on other data by mistake.
        """

        def client(index: int) -> ClientData:
            tensors = [as_tensor(a) for a in load(index)]
            check_lengths(names[index], tensors)
            x, y, x_test, y_test = tensors
            pool = ArrayPool(torch.cat([x, x_test]), torch.cat([y, y_test]))
            pool.check(classes, where=f"client {names[index]!r}")
            n = len(y)
            nothing = torch.empty(0, dtype=torch.int64)
            return ClientData(pool, torch.arange(n), torch.arange(n, n + len(y_test)), nothing)

        if isinstance(clients, int) and clients < 1:
            raise DataError(f"a federation needs at least one client; this one has {clients}")
        names: Sequence[str] = numbers(clients) if isinstance(clients, int) else clients
        return cls(client, names=names, classes=classes, fingerprint=f"lazy {len(names)} {fingerprint}")

    @classmethod
    def from_pool(
        cls,
        pool: Pool,
        parts: Mapping[str, tuple[Index, Index]],
        *,
        classes: int | None,
        fingerprint: str,
        validation_share: float = 0.0,
        augment: Augment | None = None,
        class_names: Sequence[str] | None = None,
        seed: int = 0,
    ) -> Federation:
        """Clients as sample numbers of one pool: by name, (training, test). ``range`` needs no memory.

        ``fingerprint`` names the pool's contents.
        """
        names = list(parts)
        check = hashlib.blake2b(fingerprint.encode(), digest_size=16)
        for name, (train, test) in parts.items():
            check.update(name.encode() + b"|")
            if len(train) == 0:
                raise DataError(
                    f"client {name!r} has no training samples: leave it out of the federation, or give it at least one"
                )
            for index in (train, test):
                check.update(repr(index).encode() if isinstance(index, range) else _indices(index).numpy().tobytes())
                check.update(b"|")
        check.update(repr((validation_share, seed)).encode() if validation_share else b"")

        def client(number: int) -> ClientData:
            train, test = parts[names[number]]
            held: Index = range(0)
            if validation_share:
                array = np.asarray(train, dtype=np.int64)
                train, held = partitions.hold_out(
                    array, validation_share, seed=seed, client=number, purpose="validation"
                )
            return ClientData(pool, _indices(train), _indices(test), _indices(held), augment)

        if validation_share:
            client(0)  # a share that is out of range fails now
        return cls(
            client,
            names=names,
            classes=classes,
            fingerprint=check.hexdigest(),
            pool=pool,
            parts=parts,
            class_names=class_names,
        )

    @classmethod
    def _pooled(
        cls,
        pool: ArrayPool,
        parts: Mapping[str, tuple[Index, Index]],
        *,
        classes: int | None,
        validation_share: float,
        seed: int,
    ) -> Federation:
        """Checked arrays as a pool."""
        classes = pool.check(classes)
        return cls.from_pool(
            pool,
            parts,
            classes=classes,
            fingerprint=pool.fingerprint(),
            validation_share=validation_share,
            seed=seed,
        )


class _Numbers(Sequence[str]):
    """The names "0", "1", ... without holding them."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return str(range(self.n)[index])


def _plain(index: Index) -> list[int] | dict[str, int]:
    if isinstance(index, range):
        return {"from": index.start, "to": index.stop}
    return [int(i) for i in index]


def _indices(index: Index) -> Tensor:
    if isinstance(index, range):
        return torch.arange(index.start, index.stop, index.step)
    return torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))


def one_client(samples: ClientArrays | Dataset[Any], classes: int | None = None) -> ClientData:
    """A client outside of any federation, all of whose samples are for training."""
    x, y = samples[:2] if isinstance(samples, tuple) else read_dataset("new", samples)
    return Federation.from_arrays([(x, y)], test_share=0.0, classes=classes).client(0)


def numbers(n: int) -> Sequence[str]:
    """The client names "0" to "n-1", made on demand."""
    return _Numbers(n)


def are_numbers(names: Sequence[str]) -> bool:
    """Whether these are the names that :func:`numbers` would give."""
    return isinstance(names, _Numbers) or all(name == str(i) for i, name in enumerate(names))
