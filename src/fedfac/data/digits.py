"""The embedded data set: 1,797 real handwritten digits of 8 × 8 pixels, inside scikit-learn's wheel.

E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
"""

from __future__ import annotations

import torch
from torch import Tensor


def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8), standardised as a whole, and labels 0..9."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None]
    return (images - images.mean()) / images.std(), torch.tensor(bunch.target, dtype=torch.int64)
