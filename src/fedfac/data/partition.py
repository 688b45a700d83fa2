"""Partitions: pure functions of (labels, parameters, seed) to one sorted index array per client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedfac.errors import ConfigError, DataError, did_you_mean
from fedfac.seeds import stream

Labels = npt.NDArray[Any]
Index = npt.NDArray[np.int64]


def iid(labels: Labels, *, clients: int, seed: int) -> list[Index]:
    """Samples dealt out at random, sizes equal up to one."""
    _enough(labels, clients)
    order = stream(seed, "partition", "iid").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(labels: Labels, *, clients: int, alpha: float, seed: int, size: int | None = None) -> list[Index]:
    """Label skew: each client draws class shares p_c ~ Dir(α·1), then ``size`` samples without replacement.

    A class that runs out is left out of the shares that follow. ``size`` defaults to an equal part of the
    data (so every client has the same number of samples and only the classes differ). The smaller α, the
    fewer classes a client sees. Clients draw in random order, so that none is favoured by its number.
    """
    _enough(labels, clients)
    if not 0 < alpha < float("inf"):
        raise ConfigError(f"alpha is {alpha}; a Dirichlet distribution needs a positive one (0.1 = strong skew)")
    size = len(labels) // clients if size is None else size
    if not isinstance(size, int | np.integer) or not 1 <= size * clients <= len(labels):
        raise DataError(f"{clients} clients of {size} samples need {clients * size}, the data has {len(labels)}")
    classes, codes = np.unique(labels, return_inverse=True)
    draws = stream(seed, "partition", "dirichlet")
    left = [draws.permutation(np.flatnonzero(codes == k)).tolist() for k in range(len(classes))]
    parts: dict[int, Index] = {}
    for client in draws.permutation(clients):
        shares = draws.dirichlet(np.full(len(classes), alpha))
        chosen: list[int] = []
        while len(chosen) < size:
            room = np.array([len(pool) for pool in left])
            open_shares = np.where(room > 0, shares, 0.0)
            if open_shares.sum() <= 0:  # every class that this client wanted is gone: take what there is
                open_shares = room.astype(float)
            wanted = draws.multinomial(size - len(chosen), open_shares / open_shares.sum())
            for pool, n in zip(left, np.minimum(wanted, room), strict=True):
                chosen += [pool.pop() for _ in range(n)]
        parts[int(client)] = np.sort(np.array(chosen, dtype=np.int64))
    return [parts[client] for client in range(clients)]


def natural(ids: Sequence[Any] | npt.NDArray[Any]) -> dict[str, Index]:
    """One client for every distinct id (writer, hospital, phone), in the order of the ids."""
    names, codes = np.unique(np.asarray(ids), return_inverse=True)
    return {str(name): np.flatnonzero(codes == k) for k, name in enumerate(names)}


PARTITIONS: Mapping[str, Callable[..., list[Index]]] = {"iid": iid, "dirichlet": dirichlet}


def by_name(name: str) -> Callable[..., list[Index]]:
    """A partition function by its name."""
    if name not in PARTITIONS:
        raise ConfigError(f"there is no partition {name!r}. {did_you_mean(name, PARTITIONS)}")
    return PARTITIONS[name]


def hold_out(index: Index, share: float, *, seed: int, client: int, purpose: str) -> tuple[Index, Index]:
    """Cut a random share off a client's samples: (kept, held out). At least one sample is kept."""
    if not 0 <= share < 1:
        raise ConfigError(f"a share of {share} cannot be held out for {purpose}; allowed: from 0 to below 1")
    order = stream(seed, purpose, client).permutation(index)
    n = min(round(share * len(index)), len(index) - 1)
    return np.sort(order[n:]), np.sort(order[:n])


def _enough(labels: Labels, clients: int) -> None:
    if not isinstance(clients, int | np.integer) or not 1 <= clients <= len(labels):
        raise DataError(f"{len(labels)} samples cannot be dealt out to {clients} clients with one each at least")
