"""The methods, and the table of their names on the command line and in config files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from torch import nn

from fedfac import switches
from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError, did_you_mean
from fedfac.method import Method
from fedfac.methods.averaging import fedavg, fedavg_plus, fedprox, fedprox_plus, local
from fedfac.methods.fedem import fedem
from fedfac.methods.fedfac import all_personal, fedfac, fedfac_plus, given_split, random_split, variance_split
from fedfac.methods.layerwise import fedbabu, fedbn, fedper, fedrep, lg_fedavg
from fedfac.methods.twin import apfl, ditto, pfedme
from fedfac.options import check_known, check_value
from fedfac.switches import switched

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
    options = options or {}
    known = options_of(name)
    for key in options:
        check_known(name, key, known)
        check_value(f"method {name!r}", key, options[key], known[key])
    own = {key: value for key, value in options.items() if key in parameters_of(name)}
    return switched(METHODS[name](**own), options)


def as_method(asked: Any) -> Method:
    """A method as it is, or by its name; dynamic FedFac if nothing is asked for."""
    if asked is None:
        return fedfac()
    if isinstance(asked, str):
        return build(asked)
    if not isinstance(asked, Method):
        builder = " (call it: it is the builder of one)" if callable(asked) else ""
        raise ConfigError(
            f"method is a {type(asked).__name__}{builder}; allowed: a Method, such as fedfac.methods.fedper(), or the "
            f"name of one, such as 'fedper'"
        )
    return asked


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a method: its builder's keywords, without those that the name already fixes."""
    check_name(name)
    builder = METHODS[name]
    fixed = builder.keywords if isinstance(builder, partial) else {}
    return {k: p for k, p in inspect.signature(builder).parameters.items() if k not in fixed}


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a method, and the options of all switches; a switch that the method has shows its values."""
    parameters = parameters_of(name)
    there = {k: v for switch in METHODS[name]().switches for k, v in switches.options_of(switch).items()}
    known = switches.parameters()
    own = {key: known[key].replace(default=value) for key, value in there.items() if value is not None}
    return {**parameters, **known, **own}


@cache
def takes(name: str, option: str) -> bool:
    """Whether a method has an option that is given to several: a parameter of its own, or a switch that applies."""
    if option in parameters_of(name):
        return True
    kinds = [kind for kind in switches.SWITCHES.values() if option in switches.option_names(kind)]
    if not kinds:
        return False
    method = METHODS[name]() | kinds[0]()
    try:
        method.plan(Anatomy.of(method.wrapped(_small())))
    except ConfigError:
        return False
    return True


def _small() -> nn.Module:
    """A network with something of everything that switches look at."""
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3))


__all__ = [
    "AUTO",
    "METHODS",
    "all_personal",
    "apfl",
    "as_method",
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
    "parameters_of",
    "pfedme",
    "random_split",
    "takes",
    "variance_split",
]
