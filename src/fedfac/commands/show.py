"""Results for people (tables) and for machines (JSON)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedfac import tables
from fedfac.choosing.choice import cells
from fedfac.result import Result
from fedfac.run import read_config
from fedfac.tables import Block


def result_json(result: Result, method: str) -> dict[str, Any]:
    """The last evaluation of a run, where it is, and how its method was chosen, if it was."""
    chosen = read_config(result.path).get("choice") if result.path else None
    return {
        "method": method,
        "path": str(result.path) if result.path else None,
        "rounds": max((r["round"] for r in result.records), default=0),
        "finished": result.finished,
        "test": last_test(result),
        "newcomers": last_newcomers(result.records),
        "shared_share": result.records[-1].get("shared_share") if result.records else None,
        **({} if chosen is None else {"choice": chosen}),
    }


def last_test(result: Result) -> dict[str, Any]:
    """The figures of the last evaluation."""
    return next((r["test"] for r in reversed(result.records) if "test" in r), {})


def last_newcomers(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How newcomers fared after the last round, by rule; a run that goes on has to serve them again."""
    return dict(next((r.get("newcomers", {}) for r in reversed(records) if "test" in r), {}))


def newcomers_line(found: Mapping[str, Any]) -> str:
    """The figures of newcomers that adapted, in words.

    >>> newcomers_line({"adapt": {"model": "adapted", "clients": 4, "accuracy": 0.75, "worst_decile": 0.5, "loss": 1}})
    'newcomers: 4 clients, adapted model, accuracy 0.750, worst decile 0.500'
    """
    figures = found["adapt"]
    keys = ("accuracy", "worst_decile") if "accuracy" in figures else ("loss",)
    found_out = [(key, figures[key]) for key in keys if figures[key] is not None]
    shown = ", ".join(f"{tables.title(key)} {value:.3f}" for key, value in found_out) or "loss not finite"
    return f"newcomers: {figures['clients']} clients, {figures['model']} model, {shown}"


def wide_console() -> Console:
    """Standard output; in a file or a pipe lines are as long as they need to be."""
    console = Console()
    return console if console.is_terminal else Console(width=200)


def print_result(result: Result, method: str) -> None:
    """One run's figures."""
    test = last_test(result)
    table = Table(header_style="bold")
    figures = {key: value for key, value in test.items() if isinstance(value, float)}
    for name in ("method", "model", *figures):
        table.add_column(tables.title(name), justify="left" if name in ("method", "model") else "right")
    table.add_row(method, str(test.get("model", "-")), *(f"{value:.3f}" for value in figures.values()))
    console = wide_console()
    console.print(table)
    if newcomers := last_newcomers(result.records):
        console.print(newcomers_line(newcomers), highlight=False)
    if result.path is not None:
        _where(console, result.path)


def print_choice(choice: Mapping[str, Any]) -> None:
    """How a method was chosen: the candidates, and why."""
    table = Table(title="choosing", title_justify="left", header_style="bold")
    for name in ("candidate", str(choice["metric"]), "rounds", "verdict"):
        table.add_column(name, justify="right" if name in ("rounds", choice["metric"]) else "left")
    for trial in choice["trials"]:
        table.add_row(*cells(trial))
    console = wide_console()
    console.print(table)
    console.print(str(choice["reason"]), highlight=False, markup=False, soft_wrap=True)


def print_blocks(blocks: Sequence[Block], path: Path) -> None:
    """A comparison: a table per setting, best figures in bold."""
    console = wide_console()
    for block in blocks:
        if not block.rows:
            console.print(
                f"{block.setting or 'the comparison'}: nothing has been evaluated yet", highlight=False, markup=False
            )
            continue
        table = Table(title=block.setting or None, title_justify="left", header_style="bold")
        table.add_column("method")
        table.add_column("model")
        for column in block.columns:
            table.add_column(tables.title(column), justify="right")
        for method, row in block.rows.items():
            cells = [row[c].text(("[bold]", "[/bold]"), "±") if c in row else "-" for c in block.columns]
            table.add_row(method, block.models[method], *cells)
        console.print(table)
    if any(block.rows for block in blocks):
        console.print(tables.note(blocks), style="dim", highlight=False, markup=False)
    _where(console, path)


def _where(console: Console, path: Path) -> None:
    console.print(f"in {path}", highlight=False, markup=False, soft_wrap=True)
