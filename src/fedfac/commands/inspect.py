"""Show a run: how layers were split, how that changed over rounds, who does well and who badly."""

from __future__ import annotations

import argparse
import math
from typing import Any

from rich.console import Console
from rich.table import Table

from fedfac.commands.show import last_newcomers, newcomers_line, print_choice
from fedfac.disk import json_text
from fedfac.records import method_used
from fedfac.run import RunDirectory, split_of
from fedfac.split import mask_text
from fedfac.words import unstyled

_BARS = "▁▂▃▄▅▆▇█"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac inspect``."""
    parser.add_argument("dir", metavar="DIR", help="the run directory")
    parser.add_argument(
        "--top", type=int, default=5, help="how many of the best and worst clients to list (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON for machines")


def run(arguments: argparse.Namespace) -> int:
    """Read the run (it may be running) and show it."""
    facts = gather(RunDirectory.read(arguments.dir))
    if arguments.json:
        print(json_text(facts))
    else:
        show(facts, arguments.top)
    return 0


def gather(run: RunDirectory) -> dict[str, Any]:
    """What there is to say about a run, as plain values."""
    records, masks, scores = run.records(), run.masks(), run.scores()
    layers: dict[str, Any] = {}
    for layer in masks[max(masks)] if masks else {}:
        seen = [r for r in records if layer in r["split"]]
        changes = [r["split"][layer]["kept"] for r in seen if "tau" in r["split"][layer]]
        layers[layer] = {
            **seen[-1]["split"][layer],
            "mask": mask_text(masks[max(masks)][layer]),
            "kept_by_round": changes,
            "scores": scores[max(scores)].get(layer, []) if scores else [],
        }
    split = split_of(run.config, run.path)
    return {
        "path": str(run.path),
        "method": method_used(run.config),
        "rounds": [max((r["round"] for r in records), default=0), run.config["rounds"]],
        "earlier_rounds": run.earlier_rounds(),
        "skipped": {r["round"]: r["skipped"] for r in records if "skipped" in r},
        "left_out": {r["round"]: r["left_out"] for r in records if r.get("left_out")},
        "accuracy": [[r["round"], r["test"]["accuracy"]] for r in records if "accuracy" in r.get("test", {})],
        "test": next((r["test"] for r in reversed(records) if "test" in r), {}),
        "newcomers": last_newcomers(records),
        "layers": layers,
        "anew": split.anew,
        "personal_tensors": sorted(split.personal_tensors),
        "choice": run.config.get("choice"),
        "clients": sorted(run.clients(), key=_worst_first),
    }


def show(facts: dict[str, Any], top: int) -> None:
    """Print it for people."""
    console = Console(highlight=False)
    method = dict(facts["method"])
    options = ", ".join(f"{unstyled(k)}={unstyled(v)}" for k, v in method.items() if k != "name")
    done, asked = facts["rounds"]
    name = unstyled(method["name"])
    console.print(f"[bold]{name}[/bold] ({options})" if options else f"[bold]{name}[/bold]")
    console.print(f"round {done} of {asked}")
    if facts["earlier_rounds"]:
        rounds = ", ".join(map(str, facts["earlier_rounds"]))
        console.print(f"can be resumed from earlier rounds (fedfac resume --from-round): {rounds}")
    if facts["choice"]:
        print_choice(facts["choice"])
    if facts["accuracy"]:
        values = [v for _, v in facts["accuracy"]]
        console.print(f"accuracy {values[0]:.3f} {sparkline(values)} {values[-1]:.3f}")
    if facts["newcomers"]:
        console.print(newcomers_line(facts["newcomers"]))
    for number, clients in facts["left_out"].items():
        absent = ", ".join(f"{unstyled(client)} ({unstyled(why, 200)})" for client, why in clients.items())
        console.print(f"round {number} went without {absent}")
    for number, why in facts["skipped"].items():
        console.print(f"round {number} was skipped: {unstyled(why, 200)}")
    for layer, entry in facts["layers"].items():
        console.print(f"\n[bold]{unstyled(layer)}[/bold]: {entry['shared']} of {entry['elements']} elements shared")
        console.print(f"  {entry['mask'].translate({48: '░', 49: '█'})}  (█ shared, ░ personal)", soft_wrap=True)
        if "factors" in entry:
            ended = entry.get("stopped") or ("converged" if entry["converged"] else "not converged")
            console.print(
                f"  {entry['factors']} factors, {entry['iterations']} iterations ({ended}), "
                f"{entry['dead']} dead elements, tau = {entry['tau']:.3f}"
                if entry["tau"] != "inf"
                else f"  {entry['factors']} factors, tau = inf"
            )
        kept = entry["kept_by_round"]
        if len(kept) > 1:
            console.print(f"  kept their side, round by round: {kept[1]:.0%} {sparkline(kept[1:])} {kept[-1]:.0%}")
    if facts["layers"] and facts["anew"]:
        console.print("\npersonal elements are trained by all; a client makes its own of them before it predicts")
    if facts["personal_tensors"]:
        console.print(f"\nwholly personal: {', '.join(map(unstyled, facts['personal_tensors']))}", soft_wrap=True)
    if facts["clients"]:
        console.print(_client_table(facts["clients"], top))


def sparkline(values: list[float], width: int = 60) -> str:
    """A line of bars, thinned out to ``width``.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    step = max(1, -(-len(values) // width))
    thin = values[::step]
    low, high = min(thin), max(thin)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0
    return "".join(_BARS[round((v - low) * scale)] for v in thin)


def _client_table(clients: list[dict[str, Any]], top: int) -> Table:
    table = Table(title="clients, worst first", header_style="bold", title_justify="left")
    for title in ("client", "test samples", "accuracy", "loss"):
        table.add_column(title, justify="right")
    few = len(clients) <= 2 * top
    for row in clients if few else [*clients[:top], None, *clients[-top:]]:
        if row is None:
            table.add_row("...", "", "", "")
        else:
            accuracy = "-" if row["accuracy"] is None else f"{row['accuracy']:.3f}"
            loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
            table.add_row(unstyled(row["client"]), str(row["samples"]), accuracy, loss)
    return table


def _worst_first(row: dict[str, Any]) -> tuple[bool, float, float]:
    """By accuracy where there is one; a loss that is not finite is the worst."""
    accuracy, loss = row["accuracy"], row["loss"]
    return accuracy is None, accuracy or 0.0, math.inf if loss is None else loss
