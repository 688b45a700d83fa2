"""LEAF's JSON: ``users``, ``num_samples`` and ``user_data`` with an ``x`` and a ``y`` list for every user.

S. Caldas and others, LEAF: A Benchmark for Federated Settings, 2018.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from fedfac.data.images import ImageSet, check_labels
from fedfac.errors import DataError
from fedfac.limits import check_memory, check_name, file_bytes, most_bytes, reason
from fedfac.words import quoted

Kind = TypeVar("Kind")


class File(msgspec.Struct, frozen=True):
    """A file; what belongs to a user is decoded when it is that user's turn."""

    user_data: dict[str, msgspec.Raw]
    users: list[str] | None = None
    num_samples: list[int] | None = None


class Drawings(msgspec.Struct, frozen=True):
    """A user's images, a list of pixels each, and their labels."""

    x: list[list[float]]
    y: list[float]


class Windows(msgspec.Struct, frozen=True):
    """A user's texts, and the character that follows each."""

    x: list[str]
    y: list[str]


def users_of(path: Path, kind: type[Kind], wanted: str) -> Iterator[tuple[str, Kind]]:
    """By user, in the file's order, its ``x`` and ``y``."""
    check_memory(path.stat().st_size, str(path))
    try:
        content = msgspec.json.decode(file_bytes(path, most_bytes()), type=File)
    except msgspec.ValidationError as error:
        raise DataError(f"{path}: {error}; wanted: LEAF's 'users', 'num_samples' and 'user_data'") from error
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {reason(error)}. Is the file whole? Make or download it again") from error
    users = list(content.user_data) if content.users is None else content.users
    _check_users(path, content, users)
    for user in users:
        check_name(user, f"{path}: the user")
        try:
            yield user, msgspec.json.decode(content.user_data[user], type=kind)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: user {quoted(user)} needs {wanted}: {reason(error)}") from error


def _check_users(path: Path, content: File, users: Sequence[str]) -> None:
    """Every user is listed once and has data; a file that says otherwise was cut or put together wrongly."""
    for user, times in Counter(users).items():
        if times > 1 or user not in content.user_data:
            what = f"is listed {times} times" if times > 1 else "has no data"
            raise DataError(f"{path}: user {quoted(user)} {what}; wanted: every user once, in 'user_data', too")
    if others := content.user_data.keys() - set(users):
        raise DataError(f"{path}: user {quoted(min(others))} has data and is not listed in 'users'")
    if content.num_samples is not None and len(content.num_samples) != len(users):
        raise DataError(f"{path} has {len(users)} users and {len(content.num_samples)} entries in 'num_samples'")


def read_images(files: Sequence[Path], images: ImageSet) -> dict[str, Tensor]:
    """Grey images as LEAF's FEMNIST has them: a list of pixels from 0 (black) to 1 a sample; users are owners."""
    inputs, targets, owners = [], [], []
    names: dict[str, int] = {}
    size = int(np.prod(images.shape))
    for path in files:
        for user, data in users_of(path, Drawings, f"'x', a list of {size} pixels a sample, and 'y', labels"):
            where = f"{path}: user {quoted(user)}"
            pixels, labels = _arrays(where, data, size)
            check_labels(labels, f"{where}, sample", 0, images)
            inputs.append(torch.from_numpy((pixels * 255).round().astype(np.uint8)).reshape(-1, *images.shape))
            targets.append(torch.from_numpy(labels))
            owners.append(torch.full((len(labels),), names.setdefault(user, len(names))))
    if not sum(map(len, targets)):
        raise DataError(f"{files[0].parent} has LEAF files without any user, or only users without samples")
    return {
        "inputs": torch.cat(inputs),
        "targets": torch.cat(targets),
        "owners": torch.cat(owners),
        "owner_names": torch.tensor(list(json.dumps(list(names)).encode()), dtype=torch.uint8),
    }


def _arrays(where: str, data: Drawings, size: int) -> tuple[Any, Any]:
    wrong = next((i for i, row in enumerate(data.x) if len(row) != size), None)
    if wrong is not None:
        raise DataError(f"{where} needs 'x', a list of {size} pixels a sample; number {wrong} has {len(data.x[wrong])}")
    pixels = np.asarray(data.x, dtype=np.float32).reshape(-1, size)
    labels = np.asarray(data.y, dtype=np.float64)
    if len(pixels) != len(labels) or not np.array_equal(labels, labels.round()):
        raise DataError(
            f"{where} has {len(pixels)} images and labels of shape {labels.shape}; wanted: one whole number each"
        )
    if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 1):
        raise DataError(f"{where} has pixels from {pixels.min()} to {pixels.max()}; wanted: from 0 to 1")
    if labels.size and np.abs(labels).max() > 2**31:
        raise DataError(f"{where} has labels from {labels.min()} to {labels.max()}")
    return pixels, labels.astype(np.int64)
