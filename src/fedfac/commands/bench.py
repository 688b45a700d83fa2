"""Time fedfac against a plain PyTorch loop and against the limit, as ratios taken in one run.

Contestants: 'fedfac' (a FedAvg round of ours), 'eager' (client after client by hand, PyTorch's defaults), 'limit'
(one model on batches K times as large: the same arithmetic without a federation), 'dynamic' (a dynamic FedFac round),
'fedfac-bf16', 'evaluation' and 'dynamic-evaluation' (all clients tested once). They take turns, each in a process of
its own.
"""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

from rich.console import Console
from rich.table import Table

from fedfac.bench import jobs, race
from fedfac.bench.contestants import CONTESTANTS
from fedfac.engine.lanes import pick_device
from fedfac.errors import ConfigError, did_you_mean
from fedfac.progress import Steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac bench``."""
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{', '.join(jobs.JOBS)} (default: all but the largest)")
    parser.add_argument("--contestants", metavar="A,B", help="which of them (default: fedfac,eager,limit,dynamic)")
    parser.add_argument("--turns", type=int, default=7, help="rounds that count (default: 7)")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before them (default: 2)")
    parser.add_argument("--data-dir", metavar="DIR", help="folder with the real data (default: made-up data)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON for machines")
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(arguments: argparse.Namespace) -> int:
    """Race, and print the table."""
    device = pick_device(arguments.device)
    asked = arguments.jobs or ["femnist-cnn", "digits-mlp", "clients"]
    names = (arguments.contestants or "fedfac,eager,limit,dynamic").split(",")
    for kind, given, known in (("job", asked, [*jobs.JOBS, "clients"]), ("contestant", names, [*CONTESTANTS])):
        for name in given:
            if name not in known:
                raise ConfigError(f"there is no {kind} {name!r}. {did_you_mean(name, known)}")
    if arguments.turns < 1 or arguments.warm_up < 1:
        raise ConfigError(f"turns is {arguments.turns} and warm-up {arguments.warm_up}; both are at least 1")
    found = {}
    for job in asked:
        pairs = [(job, name) for name in names]
        if job == "clients":
            pairs = [("clients-1000", "dynamic"), ("clients-100000", "dynamic")]
        found[job] = _race(job, pairs, str(device), arguments)
    if arguments.json:
        print(json.dumps({"machine": machine(str(device)), "jobs": found}))
    else:
        for job, figures in found.items():
            _print(job, figures)
    return 0


def _race(job: str, pairs: list[tuple[str, str]], device: str, arguments: argparse.Namespace) -> dict[str, Any]:
    runners = [race.worker(own, name, device, arguments.data_dir) for own, name in pairs]
    if job == "clients":
        for runner, (own, _) in zip(runners, pairs, strict=True):
            runner.name = own
    with Steps(f"bench {job}", arguments.warm_up + arguments.turns - 1, quiet=arguments.quiet) as progress:
        race.race(runners, arguments.turns, arguments.warm_up, lambda turn: progress.step(f"{job}: turn {turn}"))
    by_name = {runner.name: runner for runner in runners}
    figures: dict[str, Any] = {"data": runners[0].data, "turns": arguments.turns, "contestants": {}}
    for name, runner in by_name.items():
        figures["contestants"][name] = {
            "seconds": sorted(runner.seconds)[len(runner.seconds) // 2],
            "loss": runner.losses[-1],
            "first_round": runner.first,
            "start_up_and_first_round": runner.start_up,
            "peak_mb": runner.peak_mb,
            "over": {
                other.name: race.ratio(runner, other) for other in runners if other is not runner and job != "clients"
            },
        }
    return figures


def machine(device: str) -> dict[str, Any]:
    """Where the figures come from."""
    import os

    import torch

    import fedfac

    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": name,
        "cores": cores,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fedfac": fedfac.__version__,
    }


def _print(job: str, figures: dict[str, Any]) -> None:
    contestants = figures["contestants"]
    table = Table(title=f"{job}: {figures['data']}, {figures['turns']} turns", title_justify="left")
    table.add_column("")
    others = [name for name in ("eager", "limit", "fedfac") if name in contestants]
    for column in (*(f"/ {name}" for name in others), "s a round", "start-up + first", "peak MB", "loss"):
        table.add_column(column, justify="right")
    for name, own in contestants.items():
        ratios = [own["over"].get(other) for other in others]
        cells = ["" if r is None else f"{r['median']:.2f} ({r['low']:.2f}–{r['high']:.2f})" for r in ratios]
        table.add_row(
            name,
            *cells,
            f"{own['seconds']:.3g}",
            f"{own['start_up_and_first_round']:.1f} s",
            f"{own['peak_mb']:.0f}",
            f"{own['loss']:.4f}",
        )
    Console().print(table)
