"""Small networks for small inputs."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn

from fedfac.errors import ModelError


def small_cnn(*, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Layers 1 conv1 (16 channels), 2 conv2 (32), 3 fc1 (64), 4 fc2: for images of 8 × 8 and a little more."""
    if len(shape) != 3 or min(shape[1:]) < 2:
        raise ModelError(f"the small CNN eats images (channels, height, width); the data has samples of {shape}")
    channels, height, width = shape
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 16, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(32 * (height // 2) * (width // 2), 64),
            relu3=nn.ReLU(),
            fc2=nn.Linear(64, classes),
        )
    )


def mlp(*, shape: tuple[int, ...], classes: int, hidden: int = 200) -> nn.Module:
    """One hidden layer, as in the paper's sections 1 and 4.3: layers 1 fc1, 2 fc2."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(math.prod(shape), hidden),
            relu=nn.ReLU(),
            fc2=nn.Linear(hidden, classes),
        )
    )
