"""Choose the layers to split, then tau, then kappa (paper 5.3), on validation data only.

Prints a table for each and the chosen config, which 'fedfac run --config' takes. Test data is never looked at: it is
not there while tuning. Running it again with the same --out goes on where it was; several processes, or several
machines on one file system with locks, may work on one folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec
from rich.table import Table

from fedfac.commands.flags import (
    add_experiment_flags,
    add_running_flags,
    free_folder,
    of_one_method,
    read_config,
    stop_on_interrupt,
    table_of,
    trusts_code,
)
from fedfac.commands.show import wide_console
from fedfac.errors import ConfigError
from fedfac.method import at_least_one
from fedfac.progress import RoundProgress
from fedfac.records import Record
from fedfac.run import atomic_write
from fedfac.tuning import automatic, worker
from fedfac.tuning import plan as plans
from fedfac.tuning.plan import PARAMETERS, TRIALS, Search, Space, Value
from fedfac.tuning.stages import Outcome, decides_nothing, require

CHOSEN = "chosen.toml"
TABLES = "tables.md"
TITLES = {"layers": "Λ", "tau": "τ", "kappa": "κ"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac tune``."""
    parser.add_argument("--method", help="fedfac (default), fedfac-static, variance, ...: one that splits layers")
    parser.add_argument("--parameters", metavar="A,B", help="what is tuned (default: layers,tau,kappa)")
    parser.add_argument("--try-layers", metavar="A,B+C", help="sets of layers to try (default: each hidden layer)")
    parser.add_argument(
        "--try-tau", metavar="A,B", help=f"values of tau to try (default: {','.join(plans.TAUS).replace('%', '%%')})"
    )
    parser.add_argument(
        "--try-kappa", metavar="A,B", help=f"values of kappa to try (default: {','.join(map(str, plans.KAPPAS))})"
    )
    parser.add_argument("--auto", action="store_true", help="pick the layer from two rounds instead of searching it")
    parser.add_argument(
        "--jointly", dest="joint", action="store_true", help="search all of them together, and prune hopeless trials"
    )
    parser.add_argument("--trials", type=int, metavar="N", help=f"trials of a joint search (default: {TRIALS})")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes at work (default: 1)")
    parser.add_argument("--out", metavar="DIR", help="folder for the search (default: runs/tune-N)")
    add_experiment_flags(parser)
    add_running_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan the search, then go through it."""
    require()
    tables = of_one_method(read_config(arguments, methods_asked=arguments.method))
    given: dict[str, list[Value]] = dict(msgspec.to_builtins(table_of(tables, "tune", Space)))
    for name in PARAMETERS:
        if (text := getattr(arguments, f"try_{name}")) is not None:
            given[name] = [_number(word) if name == "kappa" else word for word in _words(text)]
    given["layers"] = [plans.label(layers) for layers in given["layers"]] if "layers" in given else []
    if arguments.trials is not None and not arguments.joint:
        raise ConfigError("--trials goes with --jointly; stage by stage, every value is tried once")
    search = plans.plan(
        Path(arguments.out) if arguments.out else free_folder("tune"),
        tables=tables,
        space={name: values for name, values in given.items() if values},
        parameters=_words(arguments.parameters) if arguments.parameters else None,
        mode="joint" if arguments.joint else "stages",
        trials=TRIALS if arguments.trials is None else arguments.trials,
        auto=arguments.auto,
        trust_code=trusts_code(arguments),
    )
    return go_on(search, arguments)


def go_on(search: Search, arguments: argparse.Namespace) -> int:
    """Try what is left to try, then say what came out."""
    processes = getattr(arguments, "processes", 1)
    at_least_one(processes=processes)
    rounds = search.config.train.rounds
    with (
        RoundProgress("tune", search.at_most * rounds, quiet=arguments.quiet) as progress,
        stop_on_interrupt(progress.say) as should_stop,
    ):
        if not search.config.data.validation_share:
            progress.say(
                f"tuning holds out {plans.VALIDATION_SHARE:.0%} of each client's training samples for validation"
            )

        def on_trial(title: str, finished: int) -> Callable[[Record], None]:
            progress.begin(title, finished * rounds, finished * rounds)
            return progress

        found = worker.run(
            search,
            processes=processes,
            lanes=arguments.lanes,
            device=arguments.device,
            on_trial=on_trial,
            should_stop=should_stop,
        )
    if not found.finished:
        progress.say(f"stopped; go on with: fedfac resume {search.out}")
        return 130
    atomic_write(search.out / CHOSEN, found.chosen.to_toml())
    atomic_write(search.out / TABLES, markdown(search, found))
    if arguments.json:
        print(json.dumps(_plain(search, found)))
    else:
        _print(search, found)
    return 0


def markdown(search: Search, found: Outcome) -> str:
    """The tables as Markdown."""
    lines = []
    for title, columns, rows in _tables(search, found):
        lines += [f"### {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        lines += [f"| {' | '.join(cells)} |" for cells in rows] + [""]
    return "\n".join(lines)


def _print(search: Search, found: Outcome) -> None:
    console = wide_console()
    for title, columns, rows in _tables(search, found):
        table = Table(title=title, title_justify="left", header_style="bold")
        for column in columns:
            table.add_column(column)
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
    if "kappa" in search.space and "kappa" not in found.tables:
        console.print("κ was not searched: at τ = inf everything in Λ is personal, and κ decides nothing.")
    console.print(f"# {search.out / CHOSEN}", highlight=False, markup=False, soft_wrap=True)
    console.print(found.chosen.to_toml(), highlight=False, markup=False, soft_wrap=True)


def _tables(search: Search, found: Outcome) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and rows of every table."""
    made = []
    if search.auto:
        choice = automatic.load(search.out)
        rows = [[name, f"{score:.3f}", _mark(name == choice.layer)] for name, score in choice.scores.items()]
        made.append((f"Λ, from {choice.rounds} rounds", ["Λ", "updates not in common", ""], rows))
    for name, tried in found.tables.items():
        several = search.mode == "joint"
        title = f"{TITLES[name]}, {'best of the trials with each value' if several else _fixed(search, found, name)}"
        columns = [TITLES[name], f"validation {search.metric}", *(["trials"] if several else []), ""]
        rows = [
            [
                str(row.value),
                row.state if row.score is None else f"{row.score:.4f}",
                *([str(row.trials)] if several else []),
                _mark(row.value == found.best[name]),
            ]
            for row in tried
        ]
        made.append((title, columns, rows))
    return made


def _fixed(search: Search, found: Outcome, name: str) -> str:
    """What was held while a parameter was searched: the best of those before it, the start of those after it."""
    place = PARAMETERS.index(name)
    held = {n: (found.best if PARAMETERS.index(n) < place else search.base)[n] for n in search.base if n != name}
    return "with " + ", ".join(f"{TITLES[n]} = {value}" for n, value in held.items())


def _mark(chosen: bool) -> str:
    return "chosen" if chosen else ""


def _plain(search: Search, found: Outcome) -> dict[str, object]:
    return {
        "path": str(search.out),
        "metric": f"validation {search.metric}",
        "tables": {name: [asdict(row) for row in rows] for name, rows in found.tables.items()},
        "automatic": asdict(automatic.load(search.out)) if search.auto else None,
        "chosen": dict(found.best),
        "kappa_matters": not decides_nothing(found.best),
        "config": found.chosen.to_dict(),
    }


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--try-kappa has {text!r}; kappa is a number above 0 and at most 1") from error
