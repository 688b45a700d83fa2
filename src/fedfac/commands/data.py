"""Look at the data of an experiment before training: who has how many samples of which classes.

'fedfac data show' takes the flags or the file of 'fedfac run' and shows the clients that run would train.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfac.commands.flags import add_experiment_flags, read_config
from fedfac.commands.show import wide_console
from fedfac.config import Config
from fedfac.data import picture, sources
from fedfac.data.federation import Federation
from fedfac.data.pool import Pool

_CHUNK = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``fedfac data``."""
    parser.add_argument("action", choices=["show"], help="show: a heat map of clients and classes")
    parser.add_argument("--png", metavar="FILE", help="also draw a bubble chart into this PNG file")
    parser.add_argument("--json", action="store_true", help="everything as JSON for machines")
    add_experiment_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Load the clients as ``fedfac run`` would, count, and show."""
    tables = read_config(arguments)
    for name in ("compare", "tune"):  # a file may describe these too
        tables.pop(name, None)
    config = Config.from_dict(tables)
    facts = gather(sources.load(config.data, seed=config.train.seed))
    if arguments.png:
        draw(facts, arguments.png, title=f"{config.data.name}: samples by client and class")
    if arguments.json:
        print(json.dumps({"data": config.data.name, **facts, "png": arguments.png}))
    else:
        show(facts, png=arguments.png)
    return 0


def gather(federation: Federation) -> dict[str, Any]:
    """What there is to say about a federation, as plain values; ``counts`` is None if there are no classes."""
    classes = federation.classes
    sizes: list[int] = []
    counts: list[list[int]] | None = None if classes is None else []
    for number in range(len(federation)):  # one at a time: clients may be lazy
        client = federation.client(number)
        index = torch.cat([client.train, client.test, client.validation])
        sizes.append(len(index))
        if classes is not None and counts is not None:
            counts.append(_class_counts(client.pool, index, classes))
    return {
        "clients": len(sizes),
        "samples": sum(sizes),
        "classes": classes,
        "smallest": min(sizes),
        "median": float(np.median(sizes)),
        "largest": max(sizes),
        "classes_per_client": None if counts is None else float(np.count_nonzero(counts, axis=1).mean()),
        "fingerprint": federation.fingerprint,
        "names": list(federation.names),
        "sizes": sizes,
        "counts": counts,
        "class_names": None if federation.class_names is None else list(federation.class_names),
    }


def sentence(facts: dict[str, Any]) -> str:
    """The facts in a line."""
    classes = "no classes" if facts["classes"] is None else f"{facts['classes']} classes"
    text = f"{facts['clients']:,} clients, {facts['samples']:,} samples, {classes}; a client has "
    text += f"{facts['smallest']:,} to {facts['largest']:,} samples (median {facts['median']:,.10g})"
    seen = facts["classes_per_client"]
    return text if seen is None else f"{text} of {seen:.1f} classes on average"


def show(facts: dict[str, Any], *, png: str | None = None) -> None:
    """Print it for people."""
    console = wide_console()
    if facts["counts"] is None:
        console.print(picture.terminal_sizes(facts["sizes"], facts["names"]))
    else:
        console.print(picture.terminal(np.array(facts["counts"]), facts["names"], facts["class_names"]))
    console.print(sentence(facts), highlight=False, soft_wrap=True)
    if png is not None:
        console.print(f"drawn in {png}", highlight=False, markup=False, soft_wrap=True)


def draw(facts: dict[str, Any], path: str, *, title: str) -> None:
    """The same as a PNG file; without classes a single row of sizes."""
    if facts["counts"] is None:
        table, class_names = np.array(facts["sizes"])[:, None], ["all"]
    else:
        table, class_names = np.array(facts["counts"]), facts["class_names"]
    picture.save_png(table, path, names=facts["names"], class_names=class_names, title=title, subtitle=sentence(facts))


def _class_counts(pool: Pool, index: Tensor, classes: int) -> list[int]:
    """How often each class occurs among these samples."""
    total = np.zeros(classes, dtype=np.int64)
    for start in range(0, len(index), _CHUNK):
        _, targets = pool.batch(index[start : start + _CHUNK])
        labels = targets.flatten().cpu().numpy()
        total += picture.counts([np.arange(len(labels))], labels, classes)[0]
    counts: list[int] = total.tolist()
    return counts
