"""From run directories to the plain values behind a page.

A page shows runs by setting (which data), method and seed. A comparison knows these; for runs that are given one by
one they are found out: what differs in the data makes a setting, whatever else differs goes into the method's label.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedfac import comparison as comparisons
from fedfac import tables
from fedfac.comparison import Cell, Comparison
from fedfac.config import Config
from fedfac.data.picture import evenly
from fedfac.data.sources import PARAMETERS
from fedfac.errors import RunError
from fedfac.records import method_used
from fedfac.report.layers import MOST_FRAMES, decided_rounds, layer_facts
from fedfac.report.traffic import traffic
from fedfac.run import RunDirectory, read_config, split_of, timing_lines
from fedfac.run_files import Partition, parsed
from fedfac.tables import Block

MOST_POINTS = 500  # of a curve; a screen is hardly wider
DIGITS = 5


@dataclass(frozen=True)
class Shown:
    """A run and where it stands on the page."""

    cell: Cell
    about: Mapping[str, Any]  # everything it was asked for, flat


def gather(folders: Sequence[Path]) -> dict[str, Any]:
    """Everything that the page shows."""
    shown, times = _find(folders)
    if not shown:
        raise RunError(f"{', '.join(map(str, folders))}: no run in it has finished its first round yet")
    together = Comparison(folders[0], tuple(one.cell for one in shown))
    blocks = tables.blocks(together, times)
    budget = MOST_FRAMES // len(shown)
    partitions: dict[str, Any] = {}
    runs = [_run(one, partitions, budget) for one in shown]
    damaged = list(dict.fromkeys(one["damaged"] for one in partitions.values() if one["damaged"]))
    return {
        "title": ", ".join(str(folder) for folder in folders),
        "version": read_config(shown[0].cell.folder)["version"],
        "common": _common([one.about for one in shown]),
        "settings": together.settings,
        "methods": together.methods,
        "runs": runs,
        "partitions": partitions,
        "tables": [_table(block) for block in blocks],
        "note": " ".join([tables.note(blocks), *damaged]),
    }


def _table(block: Block) -> dict[str, Any]:
    """A table of results as text; ``best`` marks what is set in bold."""
    rows = []
    for method, row in block.rows.items():
        entries = [row.get(column) for column in block.columns]
        cells = [{"text": e.text(("", "")) if e else "-", "best": bool(e and e.best)} for e in entries]
        rows.append({"method": method, "model": block.models[method], "cells": cells})
    return {"setting": block.setting, "columns": [tables.title(c) for c in block.columns], "rows": rows}


def _find(folders: Sequence[Path]) -> tuple[list[Shown], dict[str, float]]:
    """The runs in the folders that have at least one whole round, with their labels."""
    cells: list[Cell] = []
    single: list[Path] = []
    times: dict[str, float] = {}
    grids = [folder for folder in folders if comparisons.is_comparison(folder)]
    for folder in folders:
        if folder not in grids:
            read_config(folder)  # says so if it is no run
            single.append(folder)
            continue
        grid = comparisons.load(folder)
        times = comparisons.times(grid) if len(folders) == 1 else {}
        for cell in grid.cells:
            name = f"{folder.name} {cell.setting}".strip() if len(folders) > 1 else cell.setting
            cells.append(Cell(name, cell.method, cell.seed, cell.config, cell.folder))
    cells += _labelled(single)
    return [Shown(c, _about(c.folder)) for c in cells if comparisons.rounds_done(c)], times


def _labelled(folders: Sequence[Path]) -> list[Cell]:
    """Runs that were given one by one."""
    configs = [read_config(folder) for folder in folders]
    data = [_data_of(config) for config in configs]
    rest = [_rest_of(config) for config in configs]
    methods = [dict(config["settings"]["method"]) for config in configs]
    cells: list[Cell] = []
    taken: set[tuple[str, str, int]] = set()
    for i, (folder, config) in enumerate(zip(folders, configs, strict=True)):
        setting = _differences(data[i], data)
        own = methods[i]
        siblings = [m for m in methods if m["name"] == own["name"]]
        extra = [_differences(own, siblings), _differences(rest[i], rest)]
        label = " ".join([own["name"], *(text for text in extra if text)])
        seed = int(config["settings"]["seed"])
        if (setting, label, seed) in taken:
            label = f"{label} ({folder})"
        taken.add((setting, label, seed))
        origin = config["origin"] or {"train": {"seed": seed}, "method": {"name": own["name"]}}
        origin = {**origin, "train": {**origin["train"], "rounds": config["rounds"]}}
        cells.append(Cell(setting, label, seed, Config.from_dict(origin), folder))
    return cells


def _data_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The data and how it was cut, without the parameters of other partitions."""
    data = {**(config["origin"] or {}).get("data", {}), "clients": config["settings"]["clients"]}
    used = PARAMETERS.get("dirichlet" if data.get("partition") == "auto" else data.get("partition", ""), ())
    unused = {key for keys in PARAMETERS.values() for key in keys} - set(used)
    return {key: value for key, value in data.items() if key not in unused}


def _rest_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What else a run was asked for that may tell it from another."""
    settings = config["settings"]
    model = (config["origin"] or {}).get("model", {})
    named = {("model" if key == "name" else key): value for key, value in model.items()}
    return {**named, **settings["local"], "cohort": settings["cohort"]}


def _differences(own: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]]) -> str:
    """The keys whose values are not the same for all, as text."""
    keys = dict.fromkeys(key for one in everyone for key in one)
    differing = [key for key in keys if any(one.get(key) != own.get(key) for one in everyone)]
    return " ".join(f"{key}={_text(own.get(key))}" for key in differing)


def _about(folder: Path) -> dict[str, Any]:
    """What a run was asked for, flat, in the order in which it is read."""
    config = read_config(folder)
    settings = config["settings"]
    origin = config["origin"] or {}
    numbers = sum(int(np.prod(shape)) for shape, _ in config["tensors"].values())
    data = {("data" if key == "name" else key): value for key, value in _data_of(config).items()}
    model = {("model" if key == "name" else key): value for key, value in origin.get("model", {}).items()}
    return {
        **data,
        **model,
        "parameters and buffers": numbers,
        "clients in a round": settings["cohort"],
        "rounds": config["rounds"],
        **settings["local"],
        "evaluated every": settings["evaluate_every"],
        "newcomers": settings["newcomers"],
        "started from": "the command line" if config["origin"] else "Python",
    }


def _common(abouts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """What all runs have in common, without what is switched off."""
    first = abouts[0]
    same = [key for key in first if all(about.get(key) == first[key] for about in abouts)]
    return [[key.replace("_", " "), _text(first[key])] for key in same if first[key] not in (None, "", False, 0.0)]


def _run(one: Shown, partitions: dict[str, Any], budget: int) -> dict[str, Any]:
    folder = one.cell.folder
    with closing(RunDirectory.read(folder)) as run:
        records, masks, scores, clients = run.records(), run.masks(), run.scores(), run.clients()
        config = run.config
    split = split_of(config, folder)
    partition = _partition(folder, config, partitions)
    test: dict[str, Any] = next((r["test"] for r in reversed(records) if "test" in r), {})
    return {
        "setting": one.cell.setting,
        "method": one.cell.method,
        "seed": one.cell.seed,
        "options": [[key, _text(value)] for key, value in method_used(config).items()],
        "folder": str(folder),
        "done": max(r["round"] for r in records),
        "rounds": config["rounds"],
        "model": test.get("model", ""),
        "partition": partition,
        "curves": _curves(records),
        "clients": _client_rows(clients, partitions[partition]["names"]),
        "layers": layer_facts(records, masks, scores, budget),
        "decisions": len(decided_rounds(records)),
        "personal": sorted(split.personal_tensors),
        "skipped": sum("skipped" in r for r in records),
        "left_out": sum(len(r.get("left_out", {})) for r in records),
        "seconds": _seconds(folder),
        "bytes": traffic(config, records, masks),
    }


def _curves(records: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Every figure over rounds: by name, the rounds and the values."""
    curves: dict[str, list[list[float]]] = {}

    def add(name: str, number: int, value: Any) -> None:
        if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value):
            rounds, values = curves.setdefault(name, [[], []])
            rounds.append(number)
            values.append(round(value, DIGITS))

    for record in records:
        for name, value in record.get("test", {}).items():
            if name not in ("clients", "samples"):
                add(name, record["round"], value)
        if record["round"] > 0:
            add("train_loss", record["round"], record.get("train_loss"))
    thin = {}
    for name, (rounds, values) in curves.items():
        kept = evenly(len(rounds), MOST_POINTS)
        thin[name] = [[rounds[i] for i in kept], [values[i] for i in kept]]
    return thin


def _client_rows(clients: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[float | None]]:
    """The last evaluation as columns in the order of the partition; None for who was not tested."""
    by_name = {row["client"]: row for row in clients}
    columns = {}
    for column in ("accuracy", "loss"):
        values = [by_name.get(name, {}).get(column) for name in names]
        columns[column] = [None if v is None or not np.isfinite(v) else round(v, DIGITS) for v in values]
    return columns


def _partition(folder: Path, config: Mapping[str, Any], known: dict[str, Any]) -> str:
    """Enter the run's clients under their fingerprint, once, and return that; without sizes if they cannot be read."""
    settings = config["settings"]
    key = str(settings["data"])
    if key in known:
        return key
    names = config["names"] or [str(i) for i in range(settings["clients"])]
    found, damaged = _partition_file(folder / "partition.json")
    sizes = {part: [_size(found["clients"].get(name, {}).get(part)) for name in names] for part in ("train", "test")}
    known[key] = {"names": names, **sizes, **_class_counts(found, len(names)), "damaged": damaged}
    return key


def _class_counts(found: Mapping[str, Any], clients: int) -> dict[str, Any]:
    """How many samples of which class clients have, if that is a whole table, and what the classes are called."""
    counts, names = found.get("counts"), found.get("class_names")
    width = len(names) if names else len(counts[0]) if counts else 0
    whole = counts is not None and width and len(counts) == clients and all(len(own) == width for own in counts)
    return {"counts": counts if whole else None, "classes": names if whole else None}


def _partition_file(path: Path) -> tuple[dict[str, Any], str]:
    """What is in it, and why nothing is, if it is damaged: the rest of a run can be shown without it."""
    if not path.exists():
        return {"clients": {}}, ""
    try:
        return parsed(path.read_bytes(), Partition, str(path)), ""
    except RunError as error:
        return {"clients": {}}, f"Sizes and classes of clients are missing: {error}"


def _size(index: list[int] | dict[str, int] | None) -> int | None:
    if index is None:
        return None
    return index["to"] - index["from"] if isinstance(index, dict) else len(index)


def _seconds(folder: Path) -> dict[str, float]:
    """The median seconds of every step of a round; a line that a kill has cut is left out."""
    path = folder / "timing.jsonl"
    steps: dict[str, list[float]] = {}
    for line in timing_lines(path.read_text(errors="replace") if path.exists() else ""):
        for step, value in line.items():
            if step != "round":
                steps.setdefault(step, []).append(value)
    return {step: round(statistics.median(values), 6) for step, values in steps.items()}


def _text(value: Any) -> str:
    """A value for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) if value else "none"
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
