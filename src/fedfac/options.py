"""Options of methods and models from their text: on the command line, and in ``fedprox:mu=0.1``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedfac.errors import ConfigError, did_you_mean

RENAMED: Mapping[str, str] = {
    "refresh_epochs": "refresh",
    "finetune_epochs": "refresh",
    "finetune": "refresh_trains",
    "shrinkage": "refresh_shrinkage",
    "smoothing": "prior_smoothing",
    "elements": "joint",
    "eta_g": "server_rate",
    "mu": "proximal",
}


def check_known(owner: str, option: str, known: Mapping[str, inspect.Parameter]) -> None:
    """Fail on an option that the method does not have, with the nearest one, or what it is called now."""
    if option in known:
        return
    now = RENAMED.get(option)
    hint = f"It is called {now!r} since version 0.2" if now in known else did_you_mean(option, known)
    raise ConfigError(f"method {owner!r} has no option {option!r}. {hint}")


def value_of(owner: str, option: str, text: str, known: Mapping[str, inspect.Parameter]) -> Any:
    """An option's value from its text, by the type of the option's default."""
    check_known(owner, option, known)
    default = known[option].default
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[text.lower()]
        return reader(known[option])(text)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{option} of {owner!r} is {text!r}; it is {_kind(known[option])}") from error


def _kind(parameter: inspect.Parameter) -> str:
    """What an option takes, where not every text will do."""
    if isinstance(parameter.default, bool):
        return "true or false"
    if isinstance(parameter.default, tuple):
        return "layers by number or name"
    return "a number" if reader(parameter) is float else "a whole number"


_KINDS: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


def check_value(owner: str, option: str, value: Any, parameter: inspect.Parameter) -> None:
    """Fail on a value of another type than the option's, where that is a plain one."""
    wanted = str(parameter.annotation).removesuffix(" | None")
    if wanted == "Sequence[LayerKey]" and isinstance(value, list | tuple):
        wrong = [one for one in value if not isinstance(one, int | str)]
        if wrong:
            raise ConfigError(f"{option} of {owner} has {wrong[0]!r} in it; layers are named by text or numbers")
    optional = parameter.default is None or str(parameter.annotation).endswith(" | None")
    if wanted not in _KINDS or (value is None and optional):
        return
    if not isinstance(value, _KINDS[wanted]) or (isinstance(value, bool) and wanted != "bool"):
        raise ConfigError(f"{option} is {value!r}; for the {owner} it must be of type {wanted}")


def reader(parameter: inspect.Parameter) -> Callable[[str], Any]:
    """What reads an option's text."""
    if isinstance(parameter.default, tuple):
        return layer_keys
    if parameter.default is None:  # left to the run or the network: a number, by the annotation
        return float if "float" in str(parameter.annotation) else int
    return type(parameter.default) if isinstance(parameter.default, int | float) else str


def layer_keys(text: str) -> list[int | str]:
    """Read ``2,3`` (or ``2+3``) or ``conv2`` as a list of layers; an empty text is no layer.

    >>> layer_keys("2,fc1"), layer_keys("")
    ([2, 'fc1'], [])
    """
    words = [word.strip() for word in text.replace("+", ",").split(",") if word.strip()]
    return [int(word) if word.lstrip("-").isdigit() else word for word in words]
