"""Networks by name. ``register`` adds one of your own; ``module:function`` names one without registering it.

A file that names one as ``module:function`` is refused unless the user trusts it (:func:`check_trusted`).
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfac.errors import ConfigError, FedfacError, ModelError, RunError, did_you_mean
from fedfac.limits import check_memory
from fedfac.models.paper import char_lstm, femnist_cnn, resnet18, vgg16
from fedfac.models.small import mlp, signal_cnn, small_cnn
from fedfac.options import check_value
from fedfac.seeds import global_stream
from fedfac.state import check_same_tensors, from_file, load_state, nbytes, references

Builder = Callable[..., nn.Module]
MODELS: dict[str, Builder] = {
    "cnn": small_cnn,
    "mlp": mlp,
    "signal-cnn": signal_cnn,
    "femnist-cnn": femnist_cnn,
    "char-lstm": char_lstm,
    "resnet18": resnet18,
    "vgg16": vgg16,
}
_GIVEN = ("shape", "classes")


def register(name: str) -> Callable[[Builder], Builder]:
    """Add a network: a function of ``shape`` (of one sample), ``classes``, and keyword options with defaults."""

    def add(builder: Builder) -> Builder:
        if name in MODELS:
            raise ConfigError(f"there is already a model {name!r}: choose another name")
        missing = set(_GIVEN) - set(inspect.signature(builder).parameters)
        if missing:
            raise ConfigError(f"the builder of {name!r} does not take {', '.join(sorted(missing))}")
        MODELS[name] = builder
        return builder

    return add


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The options of a network: its builder's keywords."""
    return {k: p for k, p in inspect.signature(_builder(name)).parameters.items() if k not in _GIVEN}


def _builder(name: str) -> Builder:
    if ":" in name:
        return imported(name)
    if name not in MODELS:
        raise ConfigError(f"there is no model {name!r}. {did_you_mean(name, MODELS)}")
    return MODELS[name]


def check_trusted(name: str, *, trust_code: bool) -> None:
    """A name that comes from a file must not run code unless the user says so."""
    if ":" in name and not trust_code:
        module, _, function = name.partition(":")
        raise ConfigError(
            f"the file names the model {name!r}: to build it, the module {module!r} is imported and its function "
            f"{function!r} called, which can do whatever you can. If you know and trust that code, allow it: "
            "--trust-code (in Python trust_code=True). Nothing was imported"
        )


def imported(name: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{name!r} cannot be imported ({error}): it must be module:function, and the module installed or in the "
            "folder of the app"
        ) from error
    if not callable(found):
        raise ConfigError(f"{name!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def build(
    name: str, *, shape: tuple[int, ...], classes: int, seed: int, weights: str | Path | None = None, **options: Any
) -> nn.Module:
    """A network for samples of ``shape``, initialised from the stream (seed, "model"), or from ``weights``."""
    known = options_of(name)
    for key in options:
        if key not in known:
            raise ConfigError(f"model {name!r} has no option {key!r}. {did_you_mean(key, known)}")
        check_value(f"model {name!r}", key, options[key], known[key])
    builder = _builder(name)
    size = _size(name, builder, {"shape": shape, "classes": classes, **options})
    check_memory(size, f"the model {name!r}", ModelError)
    with global_stream(seed, "model"):
        model = builder(shape=shape, classes=classes, **options)
    if weights is not None:
        load_weights(model, weights)
    return model


def bytes_of(name: str, **given: Any) -> int:
    """What a network of fedfac's own would take (shape, classes and options as for :func:`build`); 0 for others."""
    return _size(name, _builder(name), given)


def _size(name: str, builder: Builder, given: Mapping[str, Any]) -> int:
    """Build it without memory first: a setting too large by a few digits would fill the machine."""
    if not str(getattr(builder, "__module__", "")).startswith("fedfac."):
        return 0  # what others' code does without memory is not known
    try:
        with torch.device("meta"):
            made = references(builder(**given))
    except FedfacError:
        raise
    except Exception as error:  # PyTorch has no word of its own for sizes that cannot be
        said = ", ".join(f"{key} = {value!r}" for key, value in given.items())
        reason = str(error).partition("\n")[0]
        raise ModelError(f"the model {name!r} cannot be built with {said}: {reason}") from error
    return nbytes(made)


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Start from a safetensors file of your own; its names and shapes must be the model's."""
    try:
        state = from_file(Path(path))
    except FileNotFoundError as error:
        raise ModelError(f"there is no weights file {path}") from error
    except (OSError, RunError) as error:
        raise ModelError(f"the weights file {path} is not a whole safetensors file: {error}") from error
    check_same_tensors(references(model), state)
    load_state(model, state)
