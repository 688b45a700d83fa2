"""Differential entropy from a sample, by nearest neighbours (Kozachenko and Leonenko 1987), in one dimension."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import digamma

from fedfac.errors import DataError
from fedfac.seeds import stream

JITTER = (
    1e-3  # relative to the largest number of all: what is closer counts as equal, and equal numbers need a distance
)


def entropy(values: npt.ArrayLike, *, k: int = 3, seed: int = 0) -> npt.NDArray[np.float64]:
    """ψ(N) − ψ(k) + ln 2 + mean ln r_k of every column of N numbers, in nats; r_k is the distance to the k-th nearest.

    >>> bool(entropy(np.linspace(0, 1, 1000)[:, None])[0] < entropy(np.linspace(0, 2, 1000)[:, None])[0])
    True
    """
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or not 1 <= k < len(table):
        raise DataError(f"entropy of the k = {k} nearest of {table.shape}: give a table with more than k rows")
    scale = JITTER * float(np.abs(table).max() or 1.0)
    jittered = table + scale * stream(seed, "entropy").uniform(-1, 1, table.shape)
    ordered = np.sort(jittered, axis=0)
    count = len(ordered)
    # the k nearest of a number are among the k before it and the k after it
    padded = np.pad(ordered, ((k, k), (0, 0)), constant_values=np.inf)
    gaps = np.stack([np.abs(padded[k + step : k + step + count] - ordered) for step in range(-k, k + 1) if step])
    kth = np.partition(gaps, k - 1, axis=0)[k - 1]
    found: npt.NDArray[np.float64] = digamma(count) - digamma(k) + np.log(2) + np.log(kth).mean(axis=0)
    return found
