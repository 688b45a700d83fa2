"""Train one method. Without flags: dynamic FedFac on the embedded digits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fedfac import experiment
from fedfac.commands.flags import (
    add_experiment_flags,
    add_observer_flags,
    add_running_flags,
    free_folder,
    observers_of,
    of_one_method,
    read_config,
    stop_on_interrupt,
)
from fedfac.commands.show import print_result, result_json
from fedfac.config import Config
from fedfac.progress import RoundProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac run``."""
    parser.add_argument("--method", help="fedfac (default), fedfac-static, fedavg, local, random, ...")
    parser.add_argument("--out", metavar="DIR", help="the run directory (default: runs/DATA-METHOD-N)")
    add_experiment_flags(parser)
    add_running_flags(parser)
    add_observer_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train, show progress, print where the result is."""
    tables = of_one_method(read_config(arguments, methods_asked=arguments.method))
    tables.pop("tune", None)
    config = Config.from_dict(tables)
    out = arguments.out or free_folder(f"{Path(config.data.name).stem}-{config.method_name}")
    return train(config, arguments, out=str(out), resume=False)


def train(config: Config, arguments: argparse.Namespace, *, out: str, resume: bool) -> int:
    """Start or resume a run, with progress and a clean Ctrl-C."""
    observers = observers_of(arguments, out)
    with (
        RoundProgress(config.method_name, config.train.rounds, quiet=arguments.quiet) as progress,
        stop_on_interrupt(progress.say) as should_stop,
    ):
        result = experiment.run(
            config,
            out=out,
            resume=resume,
            lanes=arguments.lanes,
            device=arguments.device,
            on_round=progress,
            observers=observers,
            should_stop=should_stop,
        )
    if arguments.json:
        print(json.dumps(result_json(result, config.method_name)))
    else:
        print_result(result, config.method_name)
    if not result.finished:
        progress.say(f"stopped; go on with: fedfac resume {out}")
        return 130
    return 0
