"""Train several methods on the same clients, from the same start, with the same cohorts, and print one table.

Running it again with the same --out trains only what is missing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfac import experiment, methods
from fedfac.commands.flags import (
    add_experiment_flags,
    add_running_flags,
    config_for,
    free_folder,
    read_config,
    stop_on_interrupt,
)
from fedfac.commands.show import print_comparison, result_json
from fedfac.config import SECTIONS
from fedfac.errors import ConfigError, RunError, did_you_mean
from fedfac.progress import RoundProgress
from fedfac.result import Result
from fedfac.run import atomic_write, check_same_run

PLAN = "comparison.json"
DEFAULT_METHODS = "fedavg,local,fedfac-static,fedfac"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac compare``."""
    parser.add_argument("--methods", default=DEFAULT_METHODS, metavar="A,B,...", help=f"default: {DEFAULT_METHODS}")
    parser.add_argument("--out", metavar="DIR", help="folder for all runs (default: runs/compare-N)")
    add_experiment_flags(parser)
    add_running_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan the comparison, then train it."""
    names = [name.strip() for name in arguments.methods.split(",") if name.strip()]
    out = Path(arguments.out) if arguments.out else free_folder("compare")
    plan(out, names, read_config(arguments))
    return go_on(out, arguments)


def plan(out: Path, names: Sequence[str], tables: Mapping[str, Any]) -> None:
    """Check everything, then write down what is compared; an existing comparison must be the same one."""
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"methods is {','.join(names)!r}; give at least one method, each once")
    for name in names:
        experiment.build(config_for(tables, name))  # fails before anything is written
    options = set(tables.get("method", {})) - {"name"}
    for option in options - {o for name in names for o in methods.options_of(name)}:
        known = {o for name in names for o in methods.options_of(name)}
        raise ConfigError(f"none of the methods has an option {option!r}. {did_you_mean(option, sorted(known))}")
    wanted = {"methods": list(names), **{name: tables[name] for name in SECTIONS if name in tables}}
    wanted = json.loads(json.dumps(wanted))
    path = out / PLAN
    if path.exists():
        check_same_run(out, read_plan(out), wanted)
        return
    if out.exists() and any(out.iterdir()):
        raise RunError(f"{out} is not empty and holds no comparison: choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(wanted, indent=1) + "\n")


def read_plan(out: Path) -> dict[str, Any]:
    """What a folder compares."""
    try:
        return dict(json.loads((out / PLAN).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{out / PLAN} cannot be read ({error}); nothing was changed") from error


def go_on(out: Path, arguments: argparse.Namespace) -> int:
    """Train every method of a planned comparison that is not finished, and print the table."""
    wanted = read_plan(out)
    tables = {name: wanted[name] for name in SECTIONS if name in wanted}
    results: dict[str, Result] = {}
    stopped = False
    for name in wanted["methods"]:
        config = config_for(tables, name)
        folder = out / name
        with (
            RoundProgress(name, config.train.rounds, quiet=arguments.quiet) as progress,
            stop_on_interrupt(progress.say) as should_stop,
        ):
            results[name] = experiment.run(
                config,
                out=folder,
                resume=(folder / "config.json").exists(),
                lanes=arguments.lanes,
                device=arguments.device,
                on_round=progress,
                should_stop=should_stop,
            )
        if not results[name].finished:
            stopped = True
            progress.say(f"stopped; go on with: fedfac resume {out}")
            break
    if arguments.json:
        print(json.dumps({"path": str(out), "methods": [result_json(r, name) for name, r in results.items()]}))
    else:
        print_comparison(results, out)
    return 130 if stopped else 0
