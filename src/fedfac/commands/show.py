"""Results for people (tables) and for machines (JSON)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedfac.result import Result

FIGURES = {"accuracy": "accuracy", "mean": "client mean", "std": "std", "worst_decile": "worst decile"}


def result_json(result: Result, method: str) -> dict[str, Any]:
    """The last evaluation of a run, and where it is."""
    return {
        "method": method,
        "path": str(result.path) if result.path else None,
        "rounds": max((r["round"] for r in result.records), default=0),
        "finished": result.finished,
        "test": last_test(result),
        "shared_share": result.records[-1]["shared_share"] if result.records else None,
    }


def last_test(result: Result) -> dict[str, Any]:
    """The figures of the last evaluation."""
    return next((r["test"] for r in reversed(result.records) if "test" in r), {})


def print_result(result: Result, method: str) -> None:
    """One run's figures."""
    print_comparison({method: result}, result.path)


def print_comparison(results: Mapping[str, Result], path: Path | None) -> None:
    """A row per method, best figures in bold."""
    console = Console()
    table = Table(title=None, header_style="bold")
    table.add_column("method")
    for title in (*FIGURES.values(), "shared"):
        table.add_column(title, justify="right")
    tests = {name: last_test(result) for name, result in results.items()}
    best = {
        key: (min if key == "std" else max)((t[key] for t in tests.values() if key in t), default=None)
        for key in FIGURES
    }
    for name, result in results.items():
        cells = []
        for key in FIGURES:
            value = tests[name].get(key)
            text = "-" if value is None else f"{value:.3f}"
            cells.append(f"[bold]{text}[/bold]" if len(results) > 1 and value == best[key] else text)
        table.add_row(name, *cells, f"{result.split.shared_share:.0%}")
    console.print(table)
    if path is not None:
        console.print(f"in {path}", highlight=False, markup=False, soft_wrap=True)
