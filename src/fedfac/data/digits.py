"""The embedded data set: 1,797 real handwritten digits of 8 × 8 pixels, inside scikit-learn's wheel.

E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fedfac.data.pool import ArrayPool
from fedfac.data.samples import Samples


def digits(*, data_dir: Path | None = None) -> Samples:  # noqa: ARG001  (it needs no folder)
    """Images (1797, 1, 8, 8), standardised as a whole, and labels 0..9."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None]
    pool = ArrayPool((images - images.mean()) / images.std(), torch.tensor(bunch.target, dtype=torch.int64))
    return Samples(
        name="digits",
        pool=pool,
        fingerprint=pool.fingerprint(),
        labels=pool.targets.numpy(),
        classes=10,
        class_names=tuple("0123456789"),
    )
