"""The methods, and the table of their names on the command line and in config files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedfac.errors import ConfigError, did_you_mean
from fedfac.method import Method
from fedfac.methods.averaging import fedavg, fedavg_plus, fedprox, fedprox_plus, local
from fedfac.methods.fedem import fedem
from fedfac.methods.fedfac import all_personal, fedfac, fedfac_plus, given_split, random_split, variance_split
from fedfac.methods.layerwise import fedbabu, fedbn, fedper, fedrep, lg_fedavg
from fedfac.methods.twin import apfl, ditto, pfedme
from fedfac.options import check_value

METHODS: Mapping[str, Callable[..., Method]] = {
    "fedavg": fedavg,
    "fedavg+": fedavg_plus,
    "fedprox": fedprox,
    "fedprox+": fedprox_plus,
    "local": local,
    "fedper": fedper,
    "fedrep": fedrep,
    "lg-fedavg": lg_fedavg,
    "fedem": fedem,
    "fedbn": fedbn,
    "fedbabu": fedbabu,
    "ditto": ditto,
    "apfl": apfl,
    "pfedme": pfedme,
    "fedfac": fedfac,
    "fedfac-static": partial(fedfac, schedule="static"),
    "fedfac-plus": fedfac_plus,
    "random": random_split,
    "random-redrawn": partial(random_split, redraw=True),
    "all-personal": all_personal,
    "variance": variance_split,
}

AUTO = "auto"  # no method: 'fedfac run' and fedfac.choose pick one


def check_name(name: str) -> None:
    """Fail unless there is such a method."""
    if name == AUTO:
        raise ConfigError(
            "'auto' is a choice among methods, which 'fedfac run --method auto' (in Python fedfac.choose) makes; "
            "here, name the method that it chose"
        )
    bare, colon, options = name.partition(":")
    if colon and bare in METHODS:
        raise ConfigError(
            f"the method is {name!r}; NAME:OPTION=VALUE is how 'fedfac compare' lists methods. "
            f"Here, give the name {bare!r} and its options by themselves: {options.replace(':', ', ')}"
        )
    if name not in METHODS:
        raise ConfigError(f"there is no method {name!r}. {did_you_mean(name, (*METHODS, AUTO))}")


def build(name: str, options: Mapping[str, Any] | None = None) -> Method:
    """A method by its name; an option that it does not have fails with the nearest one that it has."""
    known = options_of(name)
    for key in options or {}:
        if key not in known:
            raise ConfigError(f"method {name!r} has no option {key!r}. {did_you_mean(key, known)}")
        check_value(f"method {name!r}", key, (options or {})[key], known[key])
    return METHODS[name](**(options or {}))


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The options of a method: its builder's keywords, without those that the name already fixes."""
    check_name(name)
    builder = METHODS[name]
    fixed = builder.keywords if isinstance(builder, partial) else {}
    return {k: p for k, p in inspect.signature(builder).parameters.items() if k not in fixed}


__all__ = [
    "AUTO",
    "METHODS",
    "all_personal",
    "apfl",
    "build",
    "check_name",
    "ditto",
    "fedavg",
    "fedavg_plus",
    "fedbabu",
    "fedbn",
    "fedem",
    "fedfac",
    "fedfac_plus",
    "fedper",
    "fedprox",
    "fedprox_plus",
    "fedrep",
    "given_split",
    "lg_fedavg",
    "local",
    "options_of",
    "pfedme",
    "random_split",
    "variance_split",
]
