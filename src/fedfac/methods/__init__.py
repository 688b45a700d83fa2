"""The methods, and the table of their names on the command line and in config files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedfac.errors import ConfigError, did_you_mean
from fedfac.method import Method
from fedfac.methods.averaging import fedavg, local
from fedfac.methods.fedfac import all_personal, fedfac, random_split, variance_split

METHODS: Mapping[str, Callable[..., Method]] = {
    "fedavg": fedavg,
    "local": local,
    "fedfac": fedfac,
    "fedfac-static": partial(fedfac, schedule="static"),
    "random": random_split,
    "random-redrawn": partial(random_split, redraw=True),
    "all-personal": all_personal,
    "variance": variance_split,
}


def build(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """A method by its name; an option that it does not have fails with the nearest one that it has."""
    if name not in METHODS:
        raise ConfigError(f"there is no method {name!r}. {did_you_mean(name, METHODS)}")
    known = options_of(name)
    for key in options or {}:
        if key not in known:
            raise ConfigError(f"method {name!r} has no option {key!r}. {did_you_mean(key, known)}")
    return METHODS[name](**(options or {}))


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The options of a method: its builder's keywords, without those that the name already fixes."""
    builder = METHODS[name]
    fixed = builder.keywords if isinstance(builder, partial) else {}
    return {k: p for k, p in inspect.signature(builder).parameters.items() if k not in fixed}


__all__ = [
    "METHODS",
    "all_personal",
    "build",
    "fedavg",
    "fedfac",
    "local",
    "options_of",
    "random_split",
    "variance_split",
]
