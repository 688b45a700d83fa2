"""Go on with a run, a comparison or a search that was stopped or killed.

--rounds makes a run longer; --from-round goes back to an earlier round first, if its state is still kept.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fedfac import comparison, experiment
from fedfac.commands import compare, tune
from fedfac.commands import run as run_command
from fedfac.commands.flags import add_observer_flags, add_running_flags, add_trust_flag
from fedfac.errors import ConfigError
from fedfac.run import RunDirectory, read_config
from fedfac.tuning import plan as search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac resume``."""
    parser.add_argument("dir", metavar="DIR", help="the run directory, or the folder of a comparison or of a search")
    parser.add_argument("--rounds", type=int, help="go on to that many rounds in all (a run only)")
    parser.add_argument(
        "--from-round",
        type=int,
        metavar="N",
        help="go on after round N, and give up what came later (a run only; 'fedfac inspect' lists the rounds)",
    )
    add_trust_flag(parser)
    add_running_flags(parser)
    add_observer_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Resume what is in the folder."""
    several = comparison.is_comparison(Path(arguments.dir)) or search.is_search(Path(arguments.dir))
    if several and arguments.from_round is not None:
        raise ConfigError("--from-round goes with a single run: name the folder of one of these")
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
    if arguments.from_round is not None and "remote" in read_config(arguments.dir):
        return _take_back(arguments.dir, arguments.from_round)
    config = experiment.config_of(arguments.dir, trust_code=arguments.trust_code)
    if arguments.rounds is not None:
        config = replace(config, train=replace(config.train, rounds=arguments.rounds))
    return run_command.train(config, arguments, out=arguments.dir, resume=True, from_round=arguments.from_round)


def _take_back(folder: str, number: int) -> int:
    """Take a server's run back; it goes on when its app is run again, as far as its nodes agree to go back."""
    RunDirectory.resume(folder, rounds=read_config(folder)["rounds"], from_round=number).close()
    print(
        f"{folder} is back at round {number}. Nothing is trained here: 'flwr run' its app again. Every node has to "
        "have its own state of that round still, and to agree to go back; without them the round has no personal parts"
    )
    return 0
