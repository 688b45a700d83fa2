"""Networks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fedfac.errors import ConfigError, did_you_mean
from fedfac.models.small import mlp, small_cnn
from fedfac.seeds import global_stream

MODELS: Mapping[str, Callable[..., nn.Module]] = {"cnn": small_cnn, "mlp": mlp}


def build(name: str, *, shape: tuple[int, ...], classes: int, seed: int, **options: Any) -> nn.Module:
    """A network for inputs of ``shape``, initialised from the stream (seed, "model")."""
    if name not in MODELS:
        raise ConfigError(f"there is no model {name!r}. {did_you_mean(name, MODELS)}")
    with global_stream(seed, "model"):
        return MODELS[name](shape=shape, classes=classes, **options)
