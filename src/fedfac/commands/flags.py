"""Flags that several commands share, made from the config's fields and the methods' options."""

from __future__ import annotations

import argparse
import inspect
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from fedfac import methods, models
from fedfac.choosing.candidates import options_known
from fedfac.config import TYPED_SECTIONS, Config, merged, read_toml, value_type
from fedfac.errors import ConfigError
from fedfac.limits import fitting
from fedfac.options import reader
from fedfac.switches import SWITCHES, summary, switch_parameters
from fedfac.words import file_stem

if TYPE_CHECKING:
    from fedfac.observers import Observer

Kind = TypeVar("Kind")


def add_experiment_flags(parser: argparse.ArgumentParser) -> None:
    """Every key of the config as a flag, and every option of every method and model."""
    parser.add_argument("--config", metavar="FILE", help="a TOML file with [data], [model], [method] and [train]")
    add_trust_flag(parser)
    for section, kind in TYPED_SECTIONS.items():
        group = parser.add_argument_group(f"[{section}]")
        hints = get_type_hints(kind)
        for entry in fields(kind):
            flag = f"--{section if entry.name == 'name' else entry.name.replace('_', '-')}"
            default = "" if entry.default is None else f" (default: {entry.default})"
            dest, text = f"{section}.{entry.name}", entry.metadata["help"] + default
            wanted = value_type(hints[entry.name])
            if wanted is bool:
                group.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, help=text)
            else:
                group.add_argument(flag, dest=dest, type=wanted, metavar=wanted.__name__.upper(), help=text)
    group = parser.add_argument_group("[model]", "options of the networks that have them")
    group.add_argument(
        "--model", dest="model.name", metavar="NAME", help=f"{', '.join(models.MODELS)} (default: by data)"
    )
    group.add_argument("--weights", dest="model.weights", metavar="FILE", help="start from a safetensors file")
    _add_options(group, "model", {name: models.options_of(name) for name in models.MODELS})
    group = parser.add_argument_group("[method]", "parameters of the methods that have them")
    _add_options(group, "method", {name: methods.parameters_of(name) for name in methods.METHODS})
    group = parser.add_argument_group("[method]: switches", "what can be added to any method")
    for kind in SWITCHES.values():
        for name, parameter in switch_parameters(kind).items():
            _add_option(group, f"method.{name}", parameter, summary(kind) if name == kind.name else f"of --{kind.name}")


def _add_options(group: Any, section: str, owners: Mapping[str, Mapping[str, inspect.Parameter]]) -> None:
    """A flag for every option that any of the owners has; its help names them."""
    options: dict[str, tuple[inspect.Parameter, list[str]]] = {}
    for owner, parameters in owners.items():
        for name, parameter in parameters.items():
            options.setdefault(name, (parameter, []))[1].append(owner)
    for name, (parameter, having) in options.items():
        _add_option(group, f"{section}.{name}", parameter, ", ".join(having))


def _add_option(group: Any, dest: str, parameter: inspect.Parameter, text: str) -> None:
    flag = f"--{dest.partition('.')[2].replace('_', '-')}"
    if isinstance(parameter.default, bool):
        group.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, help=text)
    else:
        group.add_argument(flag, dest=dest, type=reader(parameter), metavar=_metavar(parameter), help=text)


def add_running_flags(parser: argparse.ArgumentParser) -> None:
    """Where it runs, and what is printed."""
    group = parser.add_argument_group("running")
    group.add_argument("--lanes", type=int, help="clients trained at a time; does not change results")
    group.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    group.add_argument("--json", action="store_true", help="print the result as JSON for machines")
    group.add_argument("--quiet", action="store_true", help="no progress")


def add_trust_flag(parser: argparse.ArgumentParser) -> None:
    """The user's word for code that a file names."""
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="a file may name the model as module:function, which is imported and called (--model is your own word)",
    )


def trusts_code(arguments: argparse.Namespace) -> bool:
    """Whether a function may be called for the model: the flag says so, or the user typed the model himself."""
    typed = getattr(arguments, "model.name") is not None
    return bool(arguments.trust_code or typed)


def add_observer_flags(parser: argparse.ArgumentParser) -> None:
    """Who else follows the rounds."""
    group = parser.add_argument_group("following the run elsewhere (each needs its extra)")
    group.add_argument("--tensorboard", action="store_true", help="event files in DIR/tensorboard")
    group.add_argument("--mlflow", action="store_true", help="an MLflow run, where MLFLOW_TRACKING_URI says")
    group.add_argument("--wandb", action="store_true", help="a Weights & Biases run; WANDB_MODE=offline keeps it here")


def observers_of(arguments: argparse.Namespace, out: str | Path) -> list[Observer]:
    """The observers that were asked for; what is not installed fails before anything is written."""
    from fedfac import observers

    found: list[Observer] = []
    if arguments.tensorboard:
        found.append(observers.TensorBoard(Path(out) / "tensorboard"))
    if arguments.mlflow:
        found.append(observers.MLflow(str(out)))
    if arguments.wandb:
        found.append(observers.WandB(str(out), folder=out))
    return found


def read_config(arguments: argparse.Namespace, *, methods_asked: str | None = None) -> dict[str, Any]:
    """The tables of the config file, with the flags on top."""
    tables = read_toml(arguments.config) if arguments.config else {}
    flags: dict[str, dict[str, Any]] = {}
    for dest, value in vars(arguments).items():
        section, dot, key = dest.partition(".")
        if dot:
            flags.setdefault(section, {})[key] = value
    if methods_asked is not None:
        flags.setdefault("method", {})["name"] = methods_asked
    return merged(tables, flags)


def table_of(tables: dict[str, Any], name: str, kind: type[Kind]) -> Kind:
    """A table that only one command reads, taken out of the others."""
    return fitting(tables.pop(name, {}), kind, f"[{name}]")


def of_one_method(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables for a single method: of a file for a comparison, without the options of the other methods."""
    if tables.pop("compare", None) is not None:
        name = Config.from_dict({"method": tables.get("method", {})}).method_name
        known = options_known() if name == methods.AUTO else methods.options_of(name)
        tables["method"] = {k: v for k, v in tables.get("method", {}).items() if k == "name" or k in known}
    return tables


def check_epochs(epochs: int | None) -> None:
    """Epochs are counted from 1."""
    if epochs is not None and epochs < 1:
        raise ConfigError(f"--epochs is {epochs}; it is a whole number from 1 up")


def free_folder(stem: str) -> Path:
    """The next ``runs/STEM-N`` that does not exist."""
    number = 1
    while (path := Path("runs") / f"{file_stem(stem)}-{number}").exists():
        number += 1
    return path


@contextmanager
def stop_on_interrupt(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks to stop after the round that is running; the second stops at once."""
    asked = False

    def handle(number: int, frame: Any) -> None:  # noqa: ARG001
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        say("stopping after this round; Ctrl-C again to stop at once")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _metavar(parameter: inspect.Parameter) -> str:
    return "LAYERS" if isinstance(parameter.default, tuple) else reader(parameter).__name__.upper()
