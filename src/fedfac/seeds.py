"""Random streams as pure functions of (seed, purpose, ids): no state is ever saved, so resume is exact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def key(seed: int, purpose: str, *ids: int | str) -> int:
    """128 bits that depend on every argument and on nothing else."""
    text = json.dumps([int(seed), purpose, *(i if isinstance(i, str) else int(i) for i in ids)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def stream(seed: int, purpose: str, *ids: int | str) -> np.random.Generator:
    """The random stream for one purpose, for example ``stream(0, "batches", round, client)``.

    >>> bool(stream(0, "cohort", 3).random() == stream(0, "cohort", 3).random())
    True
    >>> bool(stream(0, "cohort", 3).random() == stream(0, "cohort", 4).random())
    False
    """
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *ids)))


def generator(seed: int, purpose: str, *ids: int | str, device: str | torch.device = "cpu") -> torch.Generator:
    """The same as :func:`stream`, as a torch generator on ``device``."""
    made = torch.Generator(device=device)
    made.manual_seed(key(seed, purpose, *ids) & (2**63 - 1))
    return made


@contextmanager
def global_stream(seed: int, purpose: str, *ids: int | str) -> Iterator[None]:
    """Inside, PyTorch's default CPU generator is that stream; afterwards it is as it was.

    Only for code that offers no other way, such as the initialisation of an ``nn.Module``.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(key(seed, purpose, *ids) & (2**63 - 1))
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
