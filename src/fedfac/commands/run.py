"""Train one method. Without flags: dynamic FedFac on the embedded digits.

With --method auto it is chosen first, from a few cheap rounds of each of a short list, on validation samples;
--layers auto and --tau auto choose only these.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedfac import experiment
from fedfac.choosing.candidates import AUTO, TRIAL_ROUNDS, is_open
from fedfac.choosing.choice import Choice
from fedfac.choosing.choose import VALIDATION_SHARE, settle
from fedfac.commands.flags import (
    add_experiment_flags,
    add_observer_flags,
    add_running_flags,
    free_folder,
    observers_of,
    of_one_method,
    read_config,
    stop_on_interrupt,
    trusts_code,
)
from fedfac.commands.show import print_choice, print_result, result_json
from fedfac.config import Config
from fedfac.errors import ConfigError
from fedfac.progress import RoundProgress
from fedfac.run import RunDirectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac run``."""
    parser.add_argument("--method", help="fedfac (default), fedfac-static, fedavg, local, random, ..., or auto")
    parser.add_argument("--out", metavar="DIR", help="the run directory (default: runs/DATA-METHOD-N)")
    parser.add_argument(
        "--trial-rounds",
        dest=f"method.{TRIAL_ROUNDS}",
        type=int,
        metavar="N",
        help="what choosing may cost (--method auto, --layers auto, --tau auto; default: as many as --rounds)",
    )
    add_experiment_flags(parser)
    add_running_flags(parser)
    add_observer_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Train, show progress, print where the result is."""
    tables = of_one_method(read_config(arguments, methods_asked=arguments.method))
    tables.pop("tune", None)
    config = Config.from_dict(tables, trust_code=trusts_code(arguments))
    out = str(arguments.out or free_folder(f"{Path(config.data.name).stem}-{config.method_name}"))
    if not is_open(config.method):
        if TRIAL_ROUNDS in config.method:
            raise ConfigError(f"trial_rounds goes with a choice: --method {AUTO}, --layers {AUTO} or --tau {AUTO}")
        return train(config, arguments, out=out, resume=False)
    RunDirectory.check_free(out)
    observers_of(arguments, out)  # what is missing fails before the trials, not after them
    choice = _chosen(config, arguments)
    if choice is None:
        return 130
    if not arguments.json:
        print_choice(choice.to_dict())
    return train(replace(config, method=choice.asked), arguments, out=out, resume=False, choice=choice.to_dict())


def _chosen(config: Config, arguments: argparse.Namespace) -> Choice | None:
    """What the config leaves open, chosen; None if it was interrupted. Nothing is written before it is made."""
    with (
        RoundProgress("choosing", config.train.rounds, quiet=arguments.quiet) as progress,
        stop_on_interrupt(progress.say) as should_stop,
    ):
        if not config.data.validation_share:
            progress.say(
                f"choosing holds out {VALIDATION_SHARE:.0%} of each client's training samples for validation; "
                "the run has them again"
            )

        def on_round(label: str, cost: int, budget: int, record: Mapping[str, Any]) -> None:
            progress.begin(label, cost - 1, cost - record["round"], budget)
            progress(dict(record))
            if should_stop():
                raise KeyboardInterrupt

        try:
            return settle(config, lanes=arguments.lanes, device=arguments.device, on_round=on_round)
        except KeyboardInterrupt:
            progress.say("stopped while choosing; nothing was written. The same command begins again")
            return None


def train(
    config: Config,
    arguments: argparse.Namespace,
    *,
    out: str,
    resume: bool,
    from_round: int | None = None,
    choice: Mapping[str, Any] | None = None,
) -> int:
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
            from_round=from_round,
            lanes=arguments.lanes,
            device=arguments.device,
            on_round=progress,
            observers=observers,
            should_stop=should_stop,
            choice=choice,
        )
    if arguments.json:
        print(json.dumps(result_json(result, config.method_name)))
    else:
        print_result(result, config.method_name)
    if not result.finished:
        progress.say(f"stopped; go on with: fedfac resume {out}")
        return 130
    return 0
