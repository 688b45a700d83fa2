"""LEAF's JSON: ``users``, ``num_samples`` and ``user_data`` with an ``x`` and a ``y`` list for every user.

S. Caldas and others, LEAF: A Benchmark for Federated Settings, 2018.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfac.data.images import ImageSet, check_labels
from fedfac.errors import DataError


def users_of(path: Path) -> dict[str, dict[str, Any]]:
    """By user, its ``x`` and ``y`` as the file has them."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise DataError(f"{path} is not JSON: {error}. Is the file whole? Make or download it again") from error
    found = sorted(content) if isinstance(content, dict) else type(content).__name__
    if not isinstance(content, dict) or not isinstance(content.get("user_data"), dict):
        raise DataError(f"{path} has {found}; wanted: LEAF's 'users', 'num_samples' and 'user_data'")
    users = {}
    for user in content.get("users", list(content["user_data"])):
        data = content["user_data"].get(user)
        users[str(user)] = data if isinstance(data, dict) else {}
    return users


def read_images(files: Sequence[Path], images: ImageSet) -> dict[str, Tensor]:
    """Grey images as LEAF's FEMNIST has them: a list of pixels from 0 (black) to 1 a sample; users are owners."""
    inputs, targets, owners = [], [], []
    names: dict[str, int] = {}
    for path in files:
        for user, data in users_of(path).items():
            pixels, labels = _arrays(f"{path}: user {user!r}", data, images)
            check_labels(labels, f"{path}: user {user!r}, sample", 0, images)
            inputs.append(torch.from_numpy((pixels * 255).round().astype(np.uint8)).reshape(-1, *images.shape))
            targets.append(torch.from_numpy(labels))
            owners.append(torch.full((len(labels),), names.setdefault(user, len(names))))
    if not inputs:
        raise DataError(f"{files[0].parent} has LEAF files without any user")
    return {
        "inputs": torch.cat(inputs),
        "targets": torch.cat(targets),
        "owners": torch.cat(owners),
        "owner_names": torch.tensor(list(json.dumps(list(names)).encode()), dtype=torch.uint8),
    }


def _arrays(where: str, data: dict[str, Any], images: ImageSet) -> tuple[Any, Any]:
    size = int(np.prod(images.shape))
    try:
        pixels = np.asarray(data.get("x"), dtype=np.float32).reshape(-1, size)
        labels = np.asarray(data.get("y"), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} needs 'x', a list of {size} pixels a sample, and 'y', labels: {error}") from error
    if labels.ndim != 1 or len(pixels) != len(labels) or not np.array_equal(labels, labels.round()):
        raise DataError(
            f"{where} has {len(pixels)} images and labels of shape {labels.shape}; wanted: one whole number each"
        )
    if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 1):
        raise DataError(f"{where} has pixels from {pixels.min()} to {pixels.max()}; wanted: from 0 to 1")
    return pixels, labels.astype(np.int64)
