"""Train FedAvg, local-only, FedPer, FedFac and FedFac+ on the embedded digits, and compare them.

60 clients have 29 images of three digits each, on average; the table says what personalisation is worth.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fedfac import comparison
from fedfac.commands import compare
from fedfac.commands.flags import add_running_flags, free_folder

SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "clients": 60, "alpha": 0.1},
    "model": {"name": "cnn"},
    "method": {"layers": ["fc1"], "tau": "50%", "kappa": 0.85},
    "train": {"rounds": 60, "rate": 0.2, "epochs": 5, "batch_size": 16},
}

LEGEND = """
fedavg shares the whole network, local shares nothing, fedper all but the last layer, fedfac half of the hidden
neurons of fc1 (those that factor analysis finds common to the clients) and all other layers; fedfac-plus shares
everything while it trains, and a client makes the other neurons its own before it predicts. Look closer with:
fedfac inspect {out}/fedfac-plus"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac demo``."""
    parser.add_argument("--out", metavar="DIR", help="folder for all runs (default: runs/demo-N)")
    add_running_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """The comparison with the demo's settings."""
    out = Path(arguments.out) if arguments.out else free_folder("demo")
    planned = comparison.plan(out, methods=compare.DEFAULT_METHODS.split(","), tables=SETTINGS)
    status = compare.go_on(planned, arguments)
    if not arguments.json and not arguments.quiet:
        print(LEGEND.format(out=out))
    return status
