"""Small networks for small inputs."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn

from fedfac.errors import ModelError


def small_cnn(*, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Layers 1 conv1 (16 channels), 2 conv2 (32), 3 fc1 (64), 4 fc2: for images of 8 × 8 and a little more."""
    channels, height, width = image_shape("cnn", shape, least=2)
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


def signal_cnn(*, shape: tuple[int, ...], classes: int) -> nn.Module:
    """For signals (channels, time): layers 1 conv1 (32), 2 conv2 (64), 3 fc1 (128), 4 fc2."""
    if len(shape) != 2 or shape[1] < 20:
        raise ModelError(f"signal-cnn eats signals (channels, 20 steps or more); the data has samples of {shape}")
    channels, steps = shape
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv1d(channels, 32, 5),
            norm1=nn.BatchNorm1d(32),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool1d(2),
            conv2=nn.Conv1d(32, 64, 5),
            norm2=nn.BatchNorm1d(64),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool1d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * (((steps - 4) // 2 - 4) // 2), 128),
            relu3=nn.ReLU(),
            fc2=nn.Linear(128, classes),
        )
    )


def image_shape(name: str, shape: tuple[int, ...], *, least: int) -> tuple[int, int, int]:
    """The (channels, height, width) of image samples, or an error that names the model."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ModelError(
            f"{name} eats images (channels, height, width) of {least} × {least} pixels or more; "
            f"the data has samples of {shape}"
        )
    return shape[0], shape[1], shape[2]
