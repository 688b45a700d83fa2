"""What is searched: checked, and written down, so that any process can go on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from fedfac import experiment, methods
from fedfac.anatomy import Anatomy
from fedfac.config import Config
from fedfac.data.federation import Federation
from fedfac.disk import private_folder
from fedfac.errors import ConfigError, DataError, RunError, did_you_mean
from fedfac.factor import check_kappa
from fedfac.limits import read_json
from fedfac.method import at_least_one
from fedfac.options import layer_keys
from fedfac.preflight import json_like
from fedfac.rules import Threshold
from fedfac.run import atomic_write, check_same_run

PLAN = "tuning.json"
PARAMETERS = ("layers", "tau", "kappa")  # in the paper's order
MODES = ("stages", "joint")
TAUS = ("25%", "50%", "75%", "90%", "95%", "inf")  # the paper's text and its table
KAPPAS = (0.5, 0.75, 0.85, 0.9, 0.95)
VALIDATION_SHARE = 0.2
TRIALS = 30

Value = str | float


class Space(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """[tune] in a config file: the values to try."""

    layers: list[str | list[str | int]] = []
    tau: list[str | float] = []
    kappa: list[float] = []


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written down of a search."""

    tables: dict[str, dict[str, Any]]
    space: dict[Literal["layers", "tau", "kappa"], list[str | float]]
    mode: Literal["stages", "joint"]
    trials: int
    auto: bool
    metric: Literal["accuracy", "loss"]


@dataclass(frozen=True)
class Search:
    """A planned search in a folder."""

    out: Path
    config: Config  # as it was asked for
    space: Mapping[str, tuple[Value, ...]]  # what is tried, by parameter
    mode: str  # "stages" (one parameter after the other) or "joint"
    trials: int  # of a joint search
    auto: bool  # Λ from two rounds instead of a search
    metric: str  # "accuracy" or "loss", on validation data

    @property
    def tuned(self) -> Config:
        """What trials train: the config with validation data held out."""
        share = self.config.data.validation_share or VALIDATION_SHARE
        return replace(self.config, data=replace(self.config.data, validation_share=share))

    @property
    def base(self) -> dict[str, Value]:
        """The values that are not searched, or not yet: the config's own, else the method's defaults."""
        options = methods.options_of(self.config.method_name)
        given = {name: self.config.method.get(name, options[name].default) for name in PARAMETERS if name in options}
        return {name: label(value) if name == "layers" else value for name, value in given.items()}

    @property
    def at_most(self) -> int:
        """How many trials it takes at most."""
        searched = {name: values for name, values in self.space.items() if not (self.auto and name == "layers")}
        return self.trials if self.mode == "joint" else sum(map(len, searched.values()))

    @property
    def maximizes(self) -> bool:
        """Whether more is better."""
        return self.metric == "accuracy"

    def trial(self, values: Mapping[str, Value]) -> Config:
        """What is trained to try these values."""
        return with_values(self.tuned, values)


def with_values(config: Config, values: Mapping[str, Value]) -> Config:
    """A config with these values of Λ, τ and κ."""
    given = {name: layer_keys(str(value)) if name == "layers" else value for name, value in values.items()}
    return replace(config, method={"name": config.method_name, **config.method_options, **given})


def label(layers: Any) -> str:
    """A set of layers as one word, which :func:`fedfac.options.layer_keys` reads back.

    >>> label(["conv2", 3])
    'conv2+3'
    """
    return layers if isinstance(layers, str) else "+".join(map(str, layers))


def plan(
    out: Path,
    *,
    tables: Mapping[str, Any],
    space: Mapping[str, Sequence[Value]] | None = None,
    parameters: Sequence[str] | None = None,
    mode: str = "stages",
    trials: int = TRIALS,
    auto: bool = False,
    trust_code: bool = False,
) -> Search:
    """Check everything, then write down what is searched; a search that is already there must be the same.

    ``space`` holds the values to try, by parameter (default: every hidden layer by itself, and the paper's τ and κ);
    ``parameters`` says which are tuned (default: all that the method has).
    """
    config = Config.from_dict(tables, trust_code=trust_code)
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}. {did_you_mean(mode, MODES)}")
    if auto and mode == "joint":
        raise ConfigError(
            "an automatic choice of the layer goes with stages, not with a joint search: give one of them"
        )
    at_least_one(trials=trials)
    tunable = _tunable(config)
    chosen = list(tunable if parameters is None else parameters)
    for name in [*chosen, *(space or {})]:
        if name not in tunable:
            raise ConfigError(f"there is nothing called {name!r} to tune here. {did_you_mean(name, tunable)}")
    if auto and "layers" not in chosen:
        raise ConfigError("an automatic choice of the layer was asked for, but 'layers' is not among what is tuned")
    search = Search(out, config, {}, mode, trials if mode == "joint" else 0, auto, "accuracy")
    model, federation, _ = experiment.build(search.tuned)
    anatomy = Anatomy.of(model)
    given: dict[str, Sequence[Value]] = {
        "layers": [str(layer.key) for layer in anatomy.numbered[:-1]],
        "tau": TAUS,
        "kappa": KAPPAS,
        **(space or {}),
    }
    found = {name: tuple(given[name]) for name in PARAMETERS if name in chosen}
    _check_space(found, anatomy)
    _check_validation(federation)
    search = replace(search, space=found, metric="loss" if federation.classes is None else "accuracy")
    wanted = json_like(
        {
            "tables": config.to_dict(),
            "space": found,
            "mode": mode,
            "trials": search.trials,
            "auto": auto,
            "metric": search.metric,
        }
    )
    if is_search(out):
        check_same_run(out, _read(out), wanted)
        return search
    if out.exists() and any(out.iterdir()):
        raise RunError(f"{out} is not empty and holds no search: choose another folder")
    private_folder(out)
    atomic_write(out / PLAN, json.dumps(wanted, indent=1) + "\n")
    return search


def load(out: Path, *, trust_code: bool = False) -> Search:
    """The search in a folder."""
    found = _read(out)
    return Search(
        out,
        Config.from_dict(found["tables"], trust_code=trust_code),
        {name: tuple(values) for name, values in found["space"].items()},
        *(found[name] for name in ("mode", "trials", "auto", "metric")),
    )


def is_search(out: Path) -> bool:
    """Whether a folder holds a search."""
    return (out / PLAN).exists()


def _read(out: Path) -> dict[str, Any]:
    plan: dict[str, Any] = msgspec.to_builtins(read_json(out / PLAN, Plan, what="a search", error=RunError))
    return plan


def _tunable(config: Config) -> list[str]:
    """Which of Λ, τ and κ the method has."""
    options = methods.options_of(config.method_name)
    found = [name for name in PARAMETERS if name in options]
    if not found:
        able = [name for name in methods.METHODS if "layers" in methods.options_of(name)]
        raise ConfigError(
            f"the method {config.method_name!r} has no layers, tau or kappa to tune. These have: {', '.join(able)}."
        )
    return found


def _check_space(space: Mapping[str, tuple[Value, ...]], anatomy: Anatomy) -> None:
    for name, values in space.items():
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"the values of {name} to try are {list(values)}; give at least one, each once")
    for layers in space.get("layers", ()):
        anatomy.select(layer_keys(str(layers)))
    for tau in space.get("tau", ()):
        Threshold.parse(tau)
    for kappa in space.get("kappa", ()):
        check_kappa(float(kappa))


def _check_validation(federation: Federation) -> None:
    if not federation.has_validation():
        raise DataError(
            "no client has samples enough to hold some out for validation, and tuning looks at nothing else: "
            "raise --validation-share or cut the data into fewer clients"
        )
