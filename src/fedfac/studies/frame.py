"""What every study has in common: what it is asked, what it finds, and how that is written.

``write`` leaves, in one folder, a parquet file for every table, a PNG and an SVG file for every figure, and
``page.md``, which says what came out and how that compares with the paper. The files depend on the settings and
the seed only: no dates, no times, no paths.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from threadpoolctl import threadpool_limits  # scikit-learn brings it

from fedfac.errors import ConfigError, RunError, did_you_mean
from fedfac.method import at_least_one
from fedfac.progress import Steps
from fedfac.studies import STUDIES, figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
PAGE = "page.md"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What the command line asks of a study; every study has a quick and a full setting of its own."""

    quick: bool = False
    seed: int = 0
    seeds: int | None = None  # how many seeds, from ``seed`` on; None: as many as the setting has
    data_dir: str | None = None
    lanes: int | None = None
    device: str | None = None
    quiet: bool = True

    def __post_init__(self) -> None:
        at_least_one(seeds=self.seeds, lanes=self.lanes)

    def seed_list(self, usual: int) -> list[int]:
        """The seeds to average over: ``usual`` many unless another number was asked for.

        >>> Ask(seed=3).seed_list(2), Ask(seeds=1).seed_list(2)
        ([3, 4], [0])
        """
        return [self.seed + i for i in range(usual if self.seeds is None else self.seeds)]

    def steps(self, title: str, total: int) -> Steps:
        """Progress over the parts of the study; use it as a context and call ``step(name)`` after each."""
        return Steps(title, total, quiet=self.quiet)

    def flags(self) -> str:
        """The flags that change what comes out, as they are typed (a folder of data is left to the reader)."""
        given = ["--quick"] if self.quick else []
        given += [f"--seed {self.seed}"] if self.seed else []
        given += [f"--seeds {self.seeds}"] if self.seeds is not None else []
        given += ["--data-dir DIR"] if self.data_dir is not None else []
        return " ".join(given)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a study found.

    ``tables`` are rows of plain values (or arrow tables), ``figures`` are functions that draw one figure each from
    what they were given, ``page`` is Markdown that begins with a title and shows the figures as ``NAME.png``, and
    ``summary`` holds the few figures that the page's conclusions rest on, for ``--json``.
    """

    tables: Mapping[str, Sequence[Row] | pa.Table]
    figures: Mapping[str, Callable[[], Figure]]
    page: str
    summary: Mapping[str, Any] = field(default_factory=dict)


def find(name: str) -> Callable[[Ask], Finding]:
    """The study of that name."""
    if name not in STUDIES:
        raise ConfigError(f"there is no study {name!r}. {did_you_mean(name, STUDIES)}")
    module, _, function = STUDIES[name].where.partition(".")
    found: Callable[[Ask], Finding] = getattr(importlib.import_module(f"fedfac.studies.{module}"), function)
    return found


def run(name: str, ask: Ask, out: str | Path) -> tuple[Finding, Path]:
    """Run a study and write it into ``out/name``. What cannot work fails before anything is computed."""
    study = find(name)
    folder = Path(out) / name
    if folder.exists():
        raise RunError(f"{folder} exists already: choose another --out, or remove it first")
    figures.require()
    with one_thread():
        finding = study(ask)
    write(name, finding, ask, folder)
    return finding, folder


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices here are small: more threads would only wait for each other, and round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def write(name: str, finding: Finding, ask: Ask, folder: Path) -> None:
    """The whole folder, or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        for title, rows in finding.tables.items():
            table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist([dict(row) for row in rows])
            pq.write_table(table, temporary / f"{title}.parquet")
        with figures.style():
            for title, draw in finding.figures.items():
                figures.save(draw(), temporary, title)
        (temporary / PAGE).write_text(page(name, finding, ask), encoding="utf-8")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def page(name: str, finding: Finding, ask: Ask) -> str:
    """The study's text, and below it the command that makes it again."""
    command = f"fedfac study {name} {ask.flags()}".strip()
    tables = ", ".join(f"`{title}.parquet`" for title in finding.tables)
    made = f"## How this was made\n\n```sh\n{command}\n```\n\nThe numbers behind it: {tables}.\n"
    return f"{finding.page.strip()}\n\n{made}"


def markdown(rows: Sequence[Row], columns: Mapping[str, str] | None = None, form: str = ".3f") -> str:
    """Rows as a Markdown table; ``columns`` maps keys to titles, numbers are printed by ``form``.

    >>> print(markdown([{"method": "fedavg", "accuracy": 0.75}], {"method": "method", "accuracy": "acc."}))
    | method | acc. |
    |---|---:|
    | fedavg | 0.750 |
    """
    keys = dict(columns) if columns is not None else {key: key for key in rows[0]}

    def cell(value: Any) -> str:
        if value is None:
            return "-"
        return format(value, form) if isinstance(value, float) else str(value)

    numeric = {key: all(isinstance(row[key], int | float | None) for row in rows) for key in keys}
    lines = [
        [*keys.values()],
        ["---:" if numeric[key] else "---" for key in keys],
        *([cell(row[key]) for key in keys] for row in rows),
    ]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    text[1] = text[1].replace(" ", "")
    return "\n".join(text)
