"""Partitions: pure functions of (labels, parameters, seed) to one sorted index array per client.

======================  ============================================================  =================
name                    what differs between clients                                  all samples dealt
======================  ============================================================  =================
``iid``                 nothing                                                       yes
``dirichlet``           class shares, drawn client by client; sizes are equal         up to rounding
``dirichlet-by-class``  class shares and sizes: each class is cut by its own Dir(α)   yes
``pathological``        which S classes a client holds; sizes are balanced            of classes held
``shards``              shards of the data sorted by label (McMahan et al., 2017)     yes
``quantity``            sizes                                                         yes
======================  ============================================================  =================

The paper cuts CIFAR-10 by ``dirichlet`` and CIFAR-100 by ``pathological``. Nothing here retries without end:
a request that cannot be met fails at once and says why.

Which rows a client gets depends on the order of the rows, unless every sample is given an id: with ``ids=``
rows that are shuffled together with their ids are dealt out to the same clients as before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fedfac.errors import ConfigError, DataError, did_you_mean
from fedfac.seeds import stream

Labels = npt.NDArray[Any]
Index = npt.NDArray[np.int64]
Ids = Sequence[Any] | npt.NDArray[Any]

REDRAWS = 10  # tries to give every client its smallest size by chance, before samples are moved
SWAPS = 5  # swaps of classes between clients, for each class that a client holds
LARGEST_ALPHA = 1e100
FORMAT = "fedfac partition 1"


def iid(labels: Labels, *, clients: int, seed: int, ids: Ids | None = None) -> list[Index]:
    """Samples dealt out at random, sizes equal up to one."""
    _enough(labels, clients)
    rows = _rows(labels, ids)
    order = stream(seed, "partition", "iid").permutation(rows)
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(
    labels: Labels, *, clients: int, alpha: float, seed: int, size: int | None = None, ids: Ids | None = None
) -> list[Index]:
    """Label skew: each client draws class shares p_c ~ Dir(α·1), then ``size`` samples without replacement.

    A class that runs out is left out of the shares that follow. ``size`` defaults to an equal part of the
    data (so every client has the same number of samples and only the classes differ). The smaller α, the
    fewer classes a client sees. Clients draw in random order, so that none is favoured by its number.
    """
    _enough(labels, clients)
    _check_alpha(alpha)
    size = len(labels) // clients if size is None else _whole("size", size)
    if not 1 <= size * clients <= len(labels):
        raise DataError(f"{clients} clients of {size} samples need {clients * size}, the data has {len(labels)}")
    _, classes = _by_class(labels, ids)
    draws = stream(seed, "partition", "dirichlet")
    left = [draws.permutation(rows).tolist() for rows in classes]
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


def dirichlet_by_class(
    labels: Labels, *, clients: int, alpha: float, seed: int, min_size: int = 1, ids: Ids | None = None
) -> list[Index]:
    """Label and size skew: each class is cut into shares over the clients ~ Dir(α·1), the common variant.

    If a client is left with fewer than ``min_size`` samples, everything is drawn again, at most ten times;
    after that the best draw is mended by moving samples from the largest clients to those that are too small.
    """
    _enough(labels, clients, min_size)
    _check_alpha(alpha)
    _, classes = _by_class(labels, ids)
    return _share_out(classes, "dirichlet-by-class", clients=clients, alpha=alpha, min_size=min_size, seed=seed)


def quantity(
    labels: Labels, *, clients: int, alpha: float, seed: int, min_size: int = 1, ids: Ids | None = None
) -> list[Index]:
    """Size skew only: shares of the data ~ Dir(α·1), labels as they fall; ``min_size`` as by class."""
    _enough(labels, clients, min_size)
    _check_alpha(alpha)
    everything = [_rows(labels, ids)]
    return _share_out(everything, "quantity", clients=clients, alpha=alpha, min_size=min_size, seed=seed)


def pathological(
    labels: Labels, *, clients: int, classes_per_client: int, seed: int, ids: Ids | None = None
) -> list[Index]:
    """Label skew: every client holds exactly ``classes_per_client`` distinct classes, sizes balanced.

    Larger classes are held by more clients; every class is held by someone if there are places enough, and its
    samples are all dealt out. Sizes are as equal as the choice of classes permits: equal up to one wherever
    classes are of one size and the places divide evenly among them.
    """
    _enough(labels, clients)
    names, classes = _by_class(labels, ids)
    sizes = np.array([len(rows) for rows in classes])
    _check_places(names, sizes, clients, _whole("classes_per_client", classes_per_client))
    draws = stream(seed, "partition", "pathological")
    holders = _holders(sizes, clients, classes_per_client, draws)
    held = _choose_classes(sizes / np.maximum(holders, 1), holders, clients, classes_per_client, draws)
    amounts = _level(_cut_evenly(sizes, held), held)
    return _deal([draws.permutation(rows) for rows in classes], amounts)


def shards(labels: Labels, *, clients: int, shards_per_client: int, seed: int, ids: Ids | None = None) -> list[Index]:
    """Label skew: sort by label, cut into equal shards, deal each client ``shards_per_client`` of them.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017. A shard may
    straddle two classes, so a client sees about ``shards_per_client`` classes; for exactly that many there is
    :func:`pathological`.
    """
    _enough(labels, clients)
    number = clients * _whole("shards_per_client", shards_per_client, least=1)
    if number > len(labels):
        raise DataError(
            f"{clients} clients with {shards_per_client} shards each need {number} shards, "
            f"the data has {len(labels)} samples: ask for fewer"
        )
    _, classes = _by_class(labels, ids)
    draws = stream(seed, "partition", "shards")
    pieces = np.array_split(np.concatenate([draws.permutation(rows) for rows in classes]), number)
    dealt = draws.permutation(number).reshape(clients, shards_per_client)
    return [np.sort(np.concatenate([pieces[i] for i in own])) for own in dealt]


def natural(ids: Ids, *, min_samples: int = 1) -> dict[str, Index]:
    """One client for every distinct id (writer, hospital, phone), in the order of the ids.

    Clients with fewer than ``min_samples`` samples are dropped.
    """
    _whole("min_samples", min_samples)
    names, codes = np.unique(np.asarray(ids), return_inverse=True)
    every = dict(zip(map(str, names), _groups(codes, len(names)), strict=False))
    kept = {name: part for name, part in every.items() if len(part) >= min_samples}
    if every and not kept:
        most = max(map(len, every.values()))
        raise DataError(
            f"none of {len(every)} clients has {min_samples} samples, the largest has {most}: lower min_samples"
        )
    return kept


PARTITIONS: Mapping[str, Callable[..., list[Index]]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "dirichlet-by-class": dirichlet_by_class,
    "pathological": pathological,
    "shards": shards,
    "quantity": quantity,
}


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


# --- checks --------------------------------------------------------------------------------------------------------


def _whole(name: str, value: Any, *, least: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number") from error
    if least is not None and number < least:
        raise ConfigError(f"{name} is {value}; it is a whole number from {least} up")
    return number


def _enough(labels: Labels, clients: int, min_size: int = 1) -> None:
    _whole("clients", clients)
    _whole("min_size", min_size, least=1)
    if clients < 1 or clients * min_size > len(labels):
        each = "one" if min_size == 1 else min_size
        raise DataError(f"{len(labels)} samples cannot be dealt out to {clients} clients with {each} each at least")


def _check_alpha(alpha: float) -> None:
    if not alpha > 0:
        raise ConfigError(f"alpha is {alpha}; a Dirichlet distribution needs a positive one (0.1 = strong skew)")
    if not alpha <= LARGEST_ALPHA:
        raise ConfigError(f"alpha is {alpha}; it must be finite (from a million up shares are all but equal)")


def _check_places(names: Labels, sizes: Index, clients: int, each: int) -> None:
    """Whether exactly ``each`` distinct classes for every client can be had: a place in a class takes a sample."""
    if not 1 <= each <= len(names):
        raise ConfigError(f"classes_per_client is {each}; the data has {len(names)} classes: allowed are 1 to that")
    places = int(np.minimum(sizes, clients).sum())
    if places < clients * each:
        small = int(sizes.argmin())
        raise DataError(
            f"{clients} clients cannot have {each} of {len(names)} classes each: that takes {clients * each} places, "
            f"the classes have {places}, for a class has no more places than clients or samples (class "
            f"{str(names[small])!r} has {sizes[small]} samples). Ask for fewer clients or fewer classes_per_client"
        )


# --- rows and classes ----------------------------------------------------------------------------------------------


def _rows(labels: Labels, ids: Ids | None) -> Index:
    """The row numbers, in the order of the sample ids if there are ids."""
    if ids is None:
        return np.arange(len(labels), dtype=np.int64)
    keys = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    if len(keys) != len(labels):
        raise DataError(f"{len(keys)} sample ids for {len(labels)} samples; give one id per sample")
    try:
        order = sorted(range(len(keys)), key=keys.__getitem__)
        unclear = [keys[b] for a, b in pairwise(order) if not keys[a] < keys[b]]
    except TypeError as error:
        raise DataError(f"the sample ids cannot be put in order: {error}. Give numbers, or texts") from error
    if unclear:
        raise DataError(f"the sample id {unclear[0]!r} does not name one sample; every sample needs an id of its own")
    return np.array(order, dtype=np.int64)


def _by_class(labels: Labels, ids: Ids | None) -> tuple[Labels, list[Index]]:
    """The classes, and the rows of each."""
    rows = _rows(labels, ids)
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise DataError(
            f"the labels are of shape {labels.shape}; a partition by class needs one label per sample "
            "(iid and quantity do not look at labels)"
        )
    names, codes = np.unique(labels[rows], return_inverse=True)
    return names, [rows[places] for places in _groups(codes, len(names))]


def _groups(codes: npt.NDArray[np.intp], n: int) -> list[Index]:
    """Where each of the codes 0..n-1 stands, in ascending order."""
    ends = np.cumsum(np.bincount(codes, minlength=n))
    return np.split(np.argsort(codes, kind="stable").astype(np.int64), ends[:-1])


def _deal(classes: Sequence[Index], amounts: Index) -> list[Index]:
    """Samples by amounts (clients × classes): the first of a class go to the first client, and so on."""
    clients = np.arange(len(amounts))
    owners = np.concatenate([np.repeat(clients, column) for column in amounts.T])
    rows = np.concatenate([own[: column.sum()] for own, column in zip(classes, amounts.T, strict=True)])
    return [np.sort(rows[places]) for places in _groups(owners, len(clients))]


# --- shares ~ Dir(α), and a smallest size --------------------------------------------------------------------------


def _share_out(
    classes: Sequence[Index], name: str, *, clients: int, alpha: float, min_size: int, seed: int
) -> list[Index]:
    """Cut each class by its own draw of shares; of the draws, the first in which nobody is too small."""
    sizes = np.array([len(rows) for rows in classes])
    drawn: list[Index] = []
    for attempt in range(REDRAWS):
        draws = stream(seed, "partition", name, attempt)
        drawn.append(_amounts(draws.dirichlet(np.full(clients, alpha), size=len(sizes)).T, sizes))
        if _missing(drawn[-1], min_size) == 0:
            break
    best = min(drawn, key=lambda amounts: _missing(amounts, min_size))
    _raise_to(min_size, best)
    order = stream(seed, "partition", name, "order")
    return _deal([order.permutation(rows) for rows in classes], best)


def _amounts(shares: npt.NDArray[np.float64], sizes: Index) -> Index:
    """Shares (clients × classes) of every class as whole numbers that add up to the class's size."""
    ends = np.minimum(np.rint(np.cumsum(shares, axis=0) * sizes), sizes).astype(np.int64)
    ends[-1] = sizes
    return np.diff(ends, axis=0, prepend=0)


def _missing(amounts: Index, min_size: int) -> int:
    return int(np.maximum(min_size - amounts.sum(1), 0).sum())


def _raise_to(min_size: int, amounts: Index) -> None:
    """Move samples, in place, from the largest clients to those that have fewer than ``min_size``.

    What moves is of the giver's most frequent class, so that a small client stays as one-sided as it was.
    """
    sizes = amounts.sum(1)
    givers = [(-int(size), client) for client, size in enumerate(sizes) if size > min_size]
    heapify(givers)
    for client in np.flatnonzero(sizes < min_size):
        missing = min_size - int(sizes[client])
        while missing:
            size, giver = heappop(givers)
            moved = min(missing, -size - min_size)
            _give(amounts, giver, int(client), moved)
            missing -= moved
            if -size - moved > min_size:
                heappush(givers, (size + moved, giver))


def _give(amounts: Index, giver: int, taker: int, n: int) -> None:
    while n:
        most = amounts[giver].argmax()
        moved = min(n, int(amounts[giver, most]))
        amounts[giver, most] -= moved
        amounts[taker, most] += moved
        n -= moved


# --- exactly S classes for every client ----------------------------------------------------------------------------


def _holders(sizes: Index, clients: int, each: int, draws: np.random.Generator) -> Index:
    """How many clients hold each class: the next place always goes to the class with most samples per holder.

    This is Adams' apportionment; it starts with one place for every class (for a random choice of classes if
    there are fewer places than classes), and a class has no more places than clients or samples.
    """
    order = draws.permutation(len(sizes))
    holders = np.zeros(len(sizes), dtype=np.int64)
    holders[order[: clients * each]] = 1
    waiting = [(-float(sizes[k]), tie, int(k)) for tie, k in enumerate(order) if min(clients, sizes[k]) > 1]
    heapify(waiting)
    for _ in range(clients * each - len(sizes)):
        _, tie, k = heappop(waiting)
        holders[k] += 1
        if holders[k] < min(clients, sizes[k]):
            heappush(waiting, (-float(sizes[k] / holders[k]), tie, k))
    return holders


def _choose_classes(
    weights: npt.NDArray[np.float64], holders: Index, clients: int, each: int, draws: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Who holds which classes, at random under equal loads (clients × classes).

    ``weights`` are the samples that a place in each class brings. The classes, heaviest first, go to the clients
    that have most places free, then to the least loaded ones: with this rule the places always come out even.
    """
    held = np.zeros((clients, len(weights)), dtype=bool)
    free = np.full(clients, each)
    load = np.zeros(clients)
    for k in np.lexsort((draws.random(len(weights)), -weights)):
        chosen = np.lexsort((draws.random(clients), load, -free))[: holders[k]]
        held[chosen, k] = True
        free[chosen] -= 1
        load[chosen] += weights[k]
    _swap_classes(held, weights, load, draws)
    return held


def _swap_classes(
    held: npt.NDArray[np.bool_],
    weights: npt.NDArray[np.float64],
    load: npt.NDArray[np.float64],
    draws: np.random.Generator,
) -> None:
    """Let random pairs of clients swap a class, in place, unless that drives their loads apart.

    Without this some combinations of classes would never occur.
    """
    own = [set(np.flatnonzero(row).tolist()) for row in held]
    number = SWAPS * int(held.sum())
    pairs = draws.integers(len(held), size=(number, 2)).tolist()
    luck = draws.random((number, 2)).tolist()
    for (a, b), (first, second) in zip(pairs, luck, strict=True):
        mine, theirs = sorted(own[a] - own[b]), sorted(own[b] - own[a])
        if not mine:
            continue
        i, j = mine[int(first * len(mine))], theirs[int(second * len(theirs))]
        gain, gap = weights[j] - weights[i], load[a] - load[b]
        if abs(gap + 2 * gain) <= max(abs(gap), 1.0):
            own[a] ^= {i, j}
            own[b] ^= {i, j}
            load[a] += gain
            load[b] -= gain
    held[:] = False
    for client, classes in enumerate(own):
        held[client, list(classes)] = True


def _cut_evenly(sizes: Index, held: npt.NDArray[np.bool_]) -> Index:
    """Every class in equal parts over its holders; what is left over goes to the smallest of them."""
    amounts = np.zeros(held.shape, dtype=np.int64)
    for k in range(len(sizes)):
        clients = np.flatnonzero(held[:, k])
        if len(clients):
            smallest = clients[np.argsort(amounts[clients].sum(1), kind="stable")]
            amounts[clients, k] = sizes[k] // len(clients)
            amounts[smallest[: sizes[k] % len(clients)], k] += 1
    return amounts


def _level(amounts: Index, held: npt.NDArray[np.bool_]) -> Index:
    """Make the clients' sizes as equal as they can be without anyone gaining or losing a class.

    The largest client passes samples on, by way of others if need be (it gives of one class to a second client,
    which gives as many of another class to a third), to the smallest that can be reached so. Whoever it reaches
    is done once none of them is smaller by two. Every step lowers the sum of squared sizes, so this ends.
    """
    sizes = amounts.sum(1)
    open_ = np.ones(len(sizes), dtype=bool)
    while open_.any():
        top = int(np.where(open_, sizes, -1).argmax())
        giver, via = _reach(amounts, held, top)
        reached = np.flatnonzero(giver >= 0)
        low = int(reached[sizes[reached].argmin()])
        if sizes[low] > sizes[top] - 2:
            open_[reached] = False
            continue
        chain = [low]
        while chain[-1] != top:
            chain.append(int(giver[chain[-1]]))
        steps = [(giver[c], c, via[c]) for c in chain[:-1]]
        n = min(int(sizes[top] - sizes[low]) // 2, *(int(amounts[source, k]) - 1 for source, _, k in steps))
        for source, target, k in steps:
            amounts[source, k] -= n
            amounts[target, k] += n
        sizes[top] -= n
        sizes[low] += n
    return amounts


def _reach(amounts: Index, held: npt.NDArray[np.bool_], start: int) -> tuple[Index, Index]:
    """By whom, and in which class, each client can be given what ``start`` passes on; -1 if it cannot be."""
    giver = np.full(len(held), -1)
    via = np.full(len(held), -1)
    giver[start] = start
    fresh = np.ones(held.shape[1], dtype=bool)
    frontier = np.array([start])
    while len(frontier):
        can_give = (amounts[frontier] > 1) & fresh
        found = []
        for k in np.flatnonzero(can_give.any(0)):
            fresh[k] = False
            new = np.flatnonzero(held[:, k] & (giver < 0))
            giver[new], via[new] = frontier[can_give[:, k].argmax()], k
            found.append(new)
        frontier = np.concatenate(found) if found else frontier[:0]
    return giver, via
