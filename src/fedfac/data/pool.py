"""Pools: samples by number.

A pool hands out a batch for a tensor of sample numbers; a client is a pool and such numbers. Arrays and datasets of
the user's become tensors here, and are checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from fedfac.errors import DataError

Array = Tensor | npt.NDArray[Any]
Prepare = Callable[[Tensor], Tensor]


class Pool(Protocol):
    """Samples by number."""

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these samples, on the pool's device."""

    def to(self, device: torch.device) -> Pool:
        """The same pool on another device."""


@dataclass(frozen=True)
class ArrayPool:
    """Inputs and targets as two tensors; ``prepare`` turns a gathered batch into what the model eats."""

    inputs: Tensor
    targets: Tensor
    prepare: Prepare | None = None

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """One gather."""
        inputs = self.inputs[index]
        return (self.prepare(inputs) if self.prepare else inputs), self.targets[index]

    def to(self, device: torch.device) -> ArrayPool:
        """The pool with its tensors on ``device``."""
        return ArrayPool(self.inputs.to(device), self.targets.to(device), self.prepare)

    def check(self, classes: int | None, where: str = "the data") -> int | None:
        """Fail on numbers that are not finite and on labels out of range; returns the number of classes."""
        for tensor in (self.inputs, self.targets):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                bad = int((~torch.isfinite(tensor.reshape(len(tensor), -1)).all(1)).sum())
                raise DataError(
                    f"{where} has {bad} of {len(tensor)} samples with numbers that are not finite: "
                    "clean or drop them first"
                )
        return _check_targets(self.targets, classes, where=where)

    def fingerprint(self) -> str:
        """A checksum of inputs and targets."""
        check = hashlib.blake2b(digest_size=16)
        for tensor in (self.inputs, self.targets):
            check.update(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]
        return check.hexdigest()


Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class ClientData:
    """One client: a pool, and which of its samples are for what; ``augment`` changes training batches only."""

    pool: Pool
    train: Tensor
    test: Tensor
    validation: Tensor
    augment: Augment | None = None

    @property
    def size(self) -> int:
        """n_k, the number of training samples."""
        return len(self.train)


ClientArrays = tuple[Array, Array] | tuple[Array, Array, Array, Array]


def tensors_of(name: str, samples: ClientArrays | Dataset[Any]) -> list[Tensor]:
    """A client's (x, y) or (x, y, x_test, y_test) as tensors of matching lengths."""
    tensors = [as_tensor(a) for a in (samples if isinstance(samples, tuple) else read_dataset(name, samples))]
    check_lengths(name, tensors)
    return tensors


def as_tensor(array: Array) -> Tensor:
    """An array as a tensor of a type that models eat."""
    try:
        tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.require(array, requirements=["C", "W"]))
    except TypeError as error:
        raise DataError(f"an array of {array.dtype} cannot be trained on: give numbers") from error
    if tensor.dtype == torch.float64:
        return tensor.to(torch.get_default_dtype())
    return tensor.long() if tensor.dtype in (torch.int32, torch.int16, torch.int8) else tensor


def check_lengths(name: str, tensors: Sequence[Tensor]) -> None:
    """As many targets as inputs."""
    if len(tensors) not in (2, 4):
        raise DataError(f"client {name!r} gave {len(tensors)} arrays; give (x, y) or (x, y, x_test, y_test)")
    for x, y in zip(tensors[::2], tensors[1::2], strict=True):
        if len(x) != len(y):
            raise DataError(f"client {name!r} has {len(x)} inputs and {len(y)} targets")


def read_dataset(name: str, dataset: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """All samples of a map-style dataset, as two tensors."""
    try:
        n = len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataError(f"the dataset of client {name!r} has no length; a map-style Dataset is needed") from error
    if n == 0:
        raise DataError(f"client {name!r} has no samples: leave it out of the federation, or give it at least one")
    try:
        x, y = default_collate([dataset[i] for i in range(n)])
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            raise TypeError(f"items of {type(dataset[0]).__name__}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the dataset of client {name!r} does not give (input, target) pairs of one shape: {error}"
        ) from error
    return x, y


def _check_targets(targets: Tensor, classes: int | None, *, where: str) -> int | None:
    """Class labels are integers from 0 to classes - 1; real targets mean regression and have no classes."""
    if targets.is_floating_point():
        return None
    if len(targets) == 0:
        return classes
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or (classes is not None and high >= classes):
        allowed = f"0..{classes - 1}" if classes is not None else "0, 1, 2, ..."
        raise DataError(f"{where} has labels from {low} to {high}; allowed: {allowed}")
    return high + 1 if classes is None else classes
