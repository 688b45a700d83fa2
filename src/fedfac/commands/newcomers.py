"""Serve the clients that were kept out of training (train with --newcomers 0.1), by each method's own rules.

A run has served them by 'adapt' after its last round; this does it again, for other --epochs or on another device, and
by the method's other rule.

adapt: the newcomer trains on its own samples as the method prescribes (FedFac: its personal elements only; FedAvg:
nothing, it takes the global model). ensemble: the mean of the existing clients' predictions, for newcomers without
labels.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

from fedfac import comparison, experiment
from fedfac.commands.flags import add_running_flags, add_trust_flag, check_epochs
from fedfac.commands.show import wide_console
from fedfac.engine.lanes import pick_device
from fedfac.errors import ConfigError
from fedfac.method import NEWCOMER_RULES
from fedfac.newcomers import serve
from fedfac.progress import Steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac newcomers``."""
    parser.add_argument("dir", metavar="DIR", help="a run directory, or the folder of a comparison")
    parser.add_argument("--epochs", type=int, help="epochs of adaptation (default: the run's local epochs)")
    parser.add_argument(
        "--rule", choices=NEWCOMER_RULES, help="only this one (an ensemble asks all clients' models; default: both)"
    )
    add_trust_flag(parser)
    add_running_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve the newcomers of every run in the folder, and print a row for every method and rule."""
    check_epochs(arguments.epochs)
    folder = Path(arguments.dir)
    if comparison.is_comparison(folder):
        cells = comparison.load(folder).cells
        runs = [(" ".join(p for p in (c.setting, c.method) if p), c.folder) for c in cells if comparison.is_finished(c)]
    else:
        runs = [(experiment.config_of(folder).method_name, folder)]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with Steps("newcomers", len(runs), quiet=arguments.quiet) as progress:
        for name, path in runs:
            train, device = experiment.config_of(path).train, pick_device(arguments.device)
            served = serve(
                experiment.load(path, trust_code=arguments.trust_code),
                epochs=arguments.epochs,
                rule=arguments.rule,
                lanes=arguments.lanes,
                device=device,
                precision="auto" if device.type != "cuda" and train.precision == "tf32" else train.precision,
                layout=train.layout,
                deterministic=train.deterministic,
                stack=train.stack,
            )
            for rule, figures in served.items():
                found.setdefault((name, rule), []).append(figures)
            progress.step(name)
    if arguments.rule and not found:
        raise ConfigError(f"--rule is {arguments.rule}; no method here serves newcomers by it: leave it out")
    if arguments.json:
        rows = [{"method": name, "rule": rule, "runs": values} for (name, rule), values in found.items()]
        print(json.dumps({"path": str(folder), "newcomers": rows}))
    else:
        show(found)
    return 0


def show(found: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """A row per method and rule; mean and standard deviation over seeds."""
    table = Table(header_style="bold")
    for column in ("method", "rule", "model", "accuracy", "worst decile"):
        table.add_column(column, justify="right" if column in ("accuracy", "worst decile") else "left")
    for (name, rule), values in found.items():
        cells = []
        for key in ("accuracy", "worst_decile"):
            numbers = [v[key] for v in values if key in v]
            spread = f" ± {statistics.stdev(numbers):.3f}" if len(numbers) > 1 else ""
            cells.append(f"{statistics.fmean(numbers):.3f}{spread}" if numbers else "-")
        table.add_row(name, rule, str(values[0]["model"]), *cells)
    wide_console().print(table)
