"""Go on with a run, a comparison or a search that was stopped or killed; --rounds makes a run longer."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fedfac import comparison, experiment
from fedfac.commands import compare, tune
from fedfac.commands import run as run_command
from fedfac.commands.flags import add_observer_flags, add_running_flags, add_trust_flag
from fedfac.errors import ConfigError
from fedfac.tuning import plan as search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac resume``."""
    parser.add_argument("dir", metavar="DIR", help="the run directory, or the folder of a comparison or of a search")
    parser.add_argument("--rounds", type=int, help="go on to that many rounds in all (a run only)")
    add_trust_flag(parser)
    add_running_flags(parser)
    add_observer_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Resume what is in the folder."""
    if comparison.is_comparison(Path(arguments.dir)):
        if arguments.rounds is not None:
            raise ConfigError("--rounds cannot be changed for a comparison: all its methods train for the same number")
        if arguments.tensorboard or arguments.mlflow or arguments.wandb:
            raise ConfigError("a comparison is not followed elsewhere; 'fedfac report' shows it, also while it trains")
        return compare.go_on(comparison.load(Path(arguments.dir), trust_code=arguments.trust_code), arguments)
    if search.is_search(Path(arguments.dir)):
        if arguments.rounds is not None:
            raise ConfigError("--rounds cannot be changed for a search: all its trials train for the same number")
        return tune.go_on(search.load(Path(arguments.dir), trust_code=arguments.trust_code), arguments)
    config = experiment.config_of(arguments.dir, trust_code=arguments.trust_code)
    if arguments.rounds is not None:
        config = replace(config, train=replace(config.train, rounds=arguments.rounds))
    return run_command.train(config, arguments, out=arguments.dir, resume=True)
