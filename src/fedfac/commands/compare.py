"""Train several methods on the same clients, from the same start, with the same cohorts, and print one table.

Methods × settings × seeds; running it again with the same --out trains only what is missing, and adds methods and seeds
that are new. The folder gets results.csv, table.md and table.tex.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfac import comparison as comparisons
from fedfac import tables
from fedfac.commands.flags import (
    add_experiment_flags,
    add_running_flags,
    free_folder,
    read_config,
    stop_on_interrupt,
    table_of,
    trusts_code,
)
from fedfac.commands.show import print_blocks
from fedfac.comparison import Cell, Comparison, Grid
from fedfac.config import Config
from fedfac.errors import ConfigError
from fedfac.progress import RoundProgress, plain
from fedfac.records import Record
from fedfac.run import atomic_write

TIME_ROUNDS = 3
DEFAULT_METHODS = "fedavg,local,fedper,fedfac,fedfac-plus"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac compare``."""
    parser.add_argument(
        "--methods",
        metavar="A,B:OPTION=VALUE,...",
        help=f"methods, each with options of its own if you like: fedprox:mu=0.1 (default: {DEFAULT_METHODS})",
    )
    parser.add_argument(
        "--seeds", metavar="N", help="number of seeds, from --seed on (3: 0, 1, 2), or a list: 4,7 (default: 1)"
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="settings: alpha=0.1,0.5 (repeatable)",
    )
    parser.add_argument(
        "--time-rounds", type=int, metavar="N", help=f"rounds to time, alternating (default: {TIME_ROUNDS})"
    )
    parser.add_argument("--out", metavar="DIR", help="folder for all runs (default: runs/compare-N)")
    add_experiment_flags(parser)
    add_running_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan the comparison, then train it."""
    asked = read_config(arguments)
    grid = table_of(asked, "compare", Grid)
    listed = grid.methods
    labels = _labels(arguments.methods or ",".join(listed) or DEFAULT_METHODS)
    out = Path(arguments.out) if arguments.out else free_folder("compare")
    if comparisons.is_comparison(out):
        labels = comparisons.together(comparisons.load(out).methods, labels)
    _leave_out_options_of_others(asked, labels, listed, arguments)
    typed = dict(map(_vary, arguments.vary))
    vary = {key: list(values) for key, values in grid.vary.items()} | typed
    own_word = "model" in typed if "model" in vary else trusts_code(arguments)
    first = Config.from_dict({"train": asked.get("train", {})}).train.seed
    chosen: int | None = getattr(arguments, "train.seed")
    if arguments.seeds is None:
        planned = [first] if grid.seeds is None else grid.seeds
        seeds = planned if chosen is None else [chosen]  # a flag outweighs a file
    else:
        seeds = _seeds(arguments.seeds, first)
        if "," in arguments.seeds and chosen is not None:
            raise ConfigError(f"--seeds {arguments.seeds} lists the seeds; leave out --seed {chosen}")
    comparison = comparisons.plan(
        out,
        methods=labels,
        tables=asked,
        seeds=seeds,
        vary=vary,
        time_rounds=next(n for n in (arguments.time_rounds, grid.time_rounds, TIME_ROUNDS) if n is not None),
        trust_code=arguments.trust_code or own_word,
    )
    return go_on(comparison, arguments)


def go_on(comparison: Comparison, arguments: argparse.Namespace) -> int:
    """Train every cell that is not finished, write the tables, print them."""
    total = sum(cell.config.train.rounds for cell in comparison.cells)
    with (
        RoundProgress("compare", total, quiet=arguments.quiet) as progress,
        stop_on_interrupt(progress.say) as should_stop,
    ):
        failed = comparisons.train(
            comparison,
            lanes=arguments.lanes,
            device=arguments.device,
            on_cells=_shown(comparison, progress),
            should_stop=should_stop,
        )
        stopped = should_stop()
    if not stopped and not failed:
        comparisons.take_times(comparison, lanes=arguments.lanes, device=arguments.device)
    blocks = tables.blocks(comparison, comparisons.times(comparison))
    atomic_write(comparison.out / "results.csv", tables.csv_text(comparison))
    atomic_write(comparison.out / "table.md", tables.markdown(blocks))
    atomic_write(comparison.out / "table.tex", tables.latex(blocks))
    if arguments.json:
        said = {"path": str(comparison.out), "settings": tables.plain(blocks)}
        print(json.dumps(said | {"failed": {str(folder): why for folder, why in failed.items()}}))
    else:
        print_blocks(blocks, comparison.out)
    for line in _failures(failed):
        plain(progress.console, line)  # --quiet is about progress
    if stopped:
        progress.say(f"stopped; go on with: fedfac resume {comparison.out}")
        return 130
    return 1 if failed else 0


def _failures(failed: Mapping[Path, str]) -> list[str]:
    """A line for every reason, with the runs that it stopped.

    >>> _failures({Path("a"): "no data", Path("b"): "no data", Path("c"): "no room"})
    ['failed: a, b: no data', 'failed: c: no room']
    """
    folders: dict[str, list[str]] = {}
    for folder, why in failed.items():
        folders.setdefault(why, []).append(str(folder))
    return [f"failed: {', '.join(those)}: {why}" for why, those in folders.items()]


def _shown(
    comparison: Comparison, progress: RoundProgress
) -> Callable[[Sequence[Cell]], Callable[[Record], None] | None]:
    """Progress over the whole grid: rounds of all cells."""

    def start(cells: Sequence[Cell]) -> Callable[[Record], None]:
        done = sum(comparisons.rounds_done(cell) for cell in comparison.cells)
        first, others = cells[0], len(cells) - 1
        name = " ".join(part for part in (first.setting, first.method, f"seed {first.seed}") if part)
        name += f" and {others} that train{'s' * (others == 1)} alike" if others else ""
        progress.begin(name, done, done - len(cells) * comparisons.rounds_done(first), each=len(cells))
        return progress

    return start


def _labels(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _leave_out_options_of_others(
    asked: dict[str, Any], labels: Sequence[str], listed: Sequence[str], arguments: argparse.Namespace
) -> None:
    """A file's options are for the methods that it lists: some of them, or others, may have no use for all of them.

    A flag without use is still an error, and so is an option that no method has.
    """
    useless = comparisons.known_options(listed) - comparisons.known_options(labels)
    options = asked.get("method", {})
    for option in options.keys() & useless:
        if getattr(arguments, f"method.{option}", None) is None:
            del options[option]


def _vary(text: str) -> tuple[str, list[Any]]:
    key, sign, values = text.partition("=")
    if not sign or not values:
        raise ConfigError(f"--vary is {text!r}; write the key and its values: --vary alpha=0.1,0.5")
    return key.replace("-", "_"), [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _seeds(text: str, first: int) -> list[int]:
    """A number of seeds, from the first one on, or a list.

    >>> _seeds("3", 0), _seeds("2", 5), _seeds("4,7", 0)
    ([0, 1, 2], [5, 6], [4, 7])
    """
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
        if not numbers or ("," not in text and numbers[0] < 1):
            raise ValueError(text)
    except ValueError as error:
        raise ConfigError(f"--seeds is {text!r}; give a number of seeds, or a list of them: 0,1,2") from error
    return numbers if "," in text else list(range(first, first + numbers[0]))
