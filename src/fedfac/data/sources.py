"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedfac.config import DataConfig
from fedfac.data.digits import digits
from fedfac.data.federation import Federation
from fedfac.errors import ConfigError, did_you_mean

SOURCES: Mapping[str, Callable[[], tuple[Tensor, Tensor]]] = {"digits": digits}


def load(config: DataConfig, *, seed: int) -> Federation:
    """The federation that a config asks for."""
    if config.name not in SOURCES:
        raise ConfigError(f"there is no data set {config.name!r}. {did_you_mean(config.name, SOURCES)}")
    parameters: dict[str, Any] = {"alpha": config.alpha} if config.partition == "dirichlet" else {}
    return Federation.partition(
        SOURCES[config.name](),
        by=config.partition,
        clients=config.clients,
        test_share=config.test_share,
        validation_share=config.validation_share,
        seed=seed,
        **parameters,
    )
