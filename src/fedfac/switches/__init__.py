"""Switches: what can be added to any method, a file for each.

A switch is a frozen dataclass that turns a Plan into another one. ``fedper() | Warmup(10) | Refresh(3)`` is a method
with two of them. They apply in the order of ``SWITCHES``, however they were written. On the command line and in files
the first parameter of a switch goes by the name of the switch, the others by ``switch_parameter``:
``fedper:warmup=10:refresh=3:refresh_shrinkage=0.5``. A parameter at its value for *off* takes the switch away.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from fedfac.method import Method, Switch
from fedfac.switches.average import Average
from fedfac.switches.joint import Joint
from fedfac.switches.prior import Prior
from fedfac.switches.proximal import Proximal
from fedfac.switches.refresh import Refresh
from fedfac.switches.server import ServerMomentum, ServerRate
from fedfac.switches.statistics import Statistics
from fedfac.switches.steady import Decay, Hysteresis
from fedfac.switches.warmup import Warmup

SWITCHES: Mapping[str, type[Any]] = {
    kind.name: kind
    for kind in (
        Joint,
        Decay,
        Hysteresis,
        Warmup,
        Refresh,
        Prior,
        Proximal,
        Statistics,
        Average,
        ServerMomentum,
        ServerRate,
    )
}


def in_order(switches: Iterable[Switch]) -> tuple[Switch, ...]:
    """Switches in the order in which they apply; those that are not of this package come last."""
    places = {name: place for place, name in enumerate(SWITCHES)}
    return tuple(sorted(switches, key=lambda switch: places.get(switch.name, len(places))))


def option_names(kind: type[Any]) -> dict[str, str]:
    """The options of a switch on the command line, and the parameters that they stand for.

    >>> option_names(Refresh)
    {'refresh': 'epochs', 'refresh_trains': 'trains', 'refresh_shrinkage': 'shrinkage'}
    """
    first, *others = [entry.name for entry in fields(kind)]
    return {kind.name: first} | {f"{kind.name}_{name}": name for name in others}


def options_of(switch: Switch) -> dict[str, Any]:
    """The values of a switch, by option."""
    return {option: getattr(switch, name) for option, name in option_names(type(switch)).items()}


def switch_parameters(kind: type[Any]) -> dict[str, inspect.Parameter]:
    """Every option of a switch, with its default."""
    known = inspect.signature(kind).parameters
    return {option: known[name] for option, name in option_names(kind).items()}


def parameters() -> dict[str, inspect.Parameter]:
    """Every option of every switch, with its default."""
    return {option: own for kind in SWITCHES.values() for option, own in switch_parameters(kind).items()}


def summary(kind: type[Any]) -> str:
    """The first sentence about a switch, and where it comes from."""
    first = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ").replace("``", "")
    return f"{first} ({kind.paper})"


def switched(method: Method, options: Mapping[str, Any]) -> Method:
    """A method with these options of switches; what is not given stays as it is, or at the switch's default."""
    there = {switch.name: switch for switch in method.switches}
    for kind in SWITCHES.values():
        names = option_names(kind)
        given = {names[option]: value for option, value in options.items() if option in names}
        if given:
            own = there.get(kind.name)
            values = {} if own is None else {entry.name: getattr(own, entry.name) for entry in fields(kind)}
            method = method | kind(**{**values, **given})
    return method


__all__ = [
    "SWITCHES",
    "Average",
    "Decay",
    "Hysteresis",
    "Joint",
    "Prior",
    "Proximal",
    "Refresh",
    "ServerMomentum",
    "ServerRate",
    "Statistics",
    "Warmup",
]
