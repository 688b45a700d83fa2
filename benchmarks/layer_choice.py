"""How often the automatic choice of Λ (two rounds) finds the layer that the search finds, and what a miss costs.

    python benchmarks/layer_choice.py --out choice.csv            # digits: three networks, six kinds of clients
    python benchmarks/layer_choice.py --out choice.csv --summary  # the table in docs/tuning.md

For every setting and every hidden layer l, dynamic FedFac with Λ = {l} is trained to its end; "the search" takes the
layer with the best validation accuracy. Three others choose without that: the automatic choice, the last hidden layer,
and chance. A line per setting; settings that are in the file are not trained again. The statistic behind the automatic
choice was picked by looking at seed 0, so seeds begin at 1.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfac import evaluate, experiment, models
from fedfac.anatomy import Anatomy
from fedfac.config import Config, DataConfig
from fedfac.data import sources
from fedfac.data.federation import Federation
from fedfac.data.pool import ClientArrays
from fedfac.seeds import stream
from fedfac.tuning import automatic

CLIENTS = 40
TRAIN = {"rounds": 40, "cohort": 8, "epochs": 3, "batch_size": 16, "evaluate_every": 2}
VALIDATION = 0.25
NETWORKS = ("mlp3", "cnn", "cnn5")
CUTS = {
    "dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "dirichlet 0.5": {"partition": "dirichlet", "alpha": 0.5},
    "two classes": {"partition": "pathological", "classes_per_client": 2},
}
SHIFTS = ("rotated", "shuffled pixels", "renamed classes")
FIELDS = ("data", "network", "clients", "seed", "layer", "number", "validation", "test", "score")


@models.register("mlp3")
def mlp3(*, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Three hidden layers of 64."""
    inputs = torch.Size(shape).numel()
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(inputs, 64),
            relu1=nn.ReLU(),
            fc2=nn.Linear(64, 64),
            relu2=nn.ReLU(),
            fc3=nn.Linear(64, 64),
            relu3=nn.ReLU(),
            head=nn.Linear(64, classes),
        )
    )


@models.register("cnn5")
def cnn5(*, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Three convolutions and two fully connected hidden layers."""
    channels, height, width = shape
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 12, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(12, 16, 3, padding=1),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(16, 24, 3, padding=1),
            relu3=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(24 * (height // 2) * (width // 2), 48),
            relu4=nn.ReLU(),
            fc2=nn.Linear(48, 48),
            relu5=nn.ReLU(),
            head=nn.Linear(48, classes),
        )
    )


def federation_of(clients: str, seed: int) -> Federation:
    """Digits cut by class, or dealt out evenly and then changed, every client in a way of its own."""
    cut = CUTS.get(clients, {"partition": "iid"})
    config = DataConfig(name="digits", clients=CLIENTS, validation_share=0.0, **cut)  # type: ignore[arg-type]
    plain = sources.load(config, seed=seed)
    arrays: dict[str, ClientArrays] = {}
    for number, name in enumerate(plain.names):
        change = shift(clients, number, seed)
        data = plain.client(number)
        parts = [change(*data.pool.batch(index)) for index in (data.train, data.test)]
        arrays[name] = (*parts[0], *parts[1])
    return Federation.from_arrays(arrays, validation_share=VALIDATION, classes=plain.classes, seed=seed)


def shift(clients: str, number: int, seed: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What makes this client's samples its own."""
    draws = stream(seed, "shift", number)
    turns, order = int(draws.integers(4)), torch.from_numpy(draws.permutation(64))
    names = torch.from_numpy(draws.permutation(10))
    if clients == "rotated":
        return lambda x, y: (torch.rot90(x, turns, (2, 3)).contiguous(), y)
    if clients == "shuffled pixels":
        return lambda x, y: (x.reshape(len(x), 64)[:, order].reshape(x.shape), y)
    if clients == "renamed classes":
        return lambda x, y: (x, names[y])
    return lambda x, y: (x, y)


def measure(
    data: str, network: str, clients: str, seed: int, federation: Federation, tables: Any
) -> list[dict[str, Any]]:
    """Every hidden layer of one setting: what training with it gives, and what the automatic choice makes of it."""
    config = Config.from_dict(tables)
    model, _, _ = experiment.build(config, federation=federation)
    choice = automatic.choose(config, federation.without_test(), lanes=1)
    rows = []
    for layer in Anatomy.of(model).numbered[:-1]:
        asked = Config.from_dict({**tables, "method": {"name": "fedfac", "layers": [layer.name]}})
        result = experiment.session(asked, federation=federation, lanes=1).drive()
        found = {part: evaluate.headline_of(result.records, part)["last"] for part in ("validation", "test")}
        own = {"layer": layer.name, "number": layer.number, **found, "score": choice.scores[layer.name]}
        rows.append({"data": data, "network": network, "clients": clients, "seed": seed, **own})
    return rows


def settings(seeds: int, data_dir: str | None) -> list[tuple[str, str, str, int]]:
    """Everything that is measured."""
    grid = [
        ("digits", network, clients, seed)
        for seed in range(1, seeds + 1)
        for network in NETWORKS
        for clients in (*CUTS, *SHIFTS)
    ]
    if data_dir is not None:
        grid = [("hapt", "signal-cnn", "people", seed) for seed in range(1, seeds + 1)]
        grid += [("femnist", "femnist-cnn", "writers", 1)]
    return grid


def tables_of(data: str, network: str, seed: int, data_dir: str | None) -> dict[str, Any]:
    train = {**TRAIN, "seed": seed}
    natural: dict[str, Any] = {"name": data, "validation_share": VALIDATION}
    if data == "femnist":
        natural |= {"clients": 60, "min_samples": 100}
        train |= {"rounds": 20, "epochs": 1}
    if data != "digits":
        natural |= {"data_dir": f"{data_dir}/{data}"}
    return {"data": natural, "model": {"name": network}, "train": train}


def summary(rows: list[dict[str, str]]) -> None:
    """Hits and losses of the three ways to choose, by kind of clients and over all."""
    groups: dict[tuple[str, str, str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["data"], row["network"], row["clients"], row["seed"]), []).append(row)
    by_kind: dict[str, list[list[dict[str, str]]]] = {}
    for (data, network, clients, _), own in groups.items():
        by_kind.setdefault(f"{data}, {clients}", []).append(own)
        by_kind.setdefault(f"network {network}", []).append(own)
        by_kind.setdefault("all", []).append(own)
    print("| setting | n | auto: hit | loss | last hidden: hit | loss | random: hit | loss |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for kind in sorted(by_kind, key=lambda k: (k == "all", k)):
        found = [judged(own) for own in by_kind[kind]]
        cells = [
            f"{statistics.fmean(f[way][i] for f in found):.{2 if i == 0 else 3}f}" for way in range(3) for i in (0, 1)
        ]
        print(f"| {kind} | {len(found)} | {' | '.join(cells)} |")
    wrong = [j[0][1] for own in groups.values() if not (j := judged(own))[0][0]]
    if wrong:
        print(f"\nwhen it misses ({len(wrong)} times): mean loss {statistics.fmean(wrong):.3f}, worst {max(wrong):.3f}")


def judged(own: list[dict[str, str]]) -> list[tuple[float, float]]:
    """(Hit, loss of test accuracy against the search's layer) of the automatic choice, the last layer, and chance."""
    best = max(own, key=lambda row: float(row["validation"]))
    auto = max(own, key=lambda row: float(row["score"]))
    last = max(own, key=lambda row: int(row["number"]))
    made = [(float(row is best), float(best["test"]) - float(row["test"])) for row in (auto, last)]
    return [*made, (1 / len(own), statistics.fmean(float(best["test"]) - float(row["test"]) for row in own))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="FILE", help="a CSV file; what is in it is not trained again")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--data-dir", metavar="DIR", help="measure HAPT and FEMNIST from here instead of digits")
    parser.add_argument("--summary", action="store_true", help="only print the table")
    arguments = parser.parse_args()
    path = Path(arguments.out)
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    if arguments.summary:
        summary(rows)
        return
    torch.set_num_threads(1)
    done = {(row["data"], row["network"], row["clients"], int(row["seed"])) for row in rows}
    todo = [s for s in settings(arguments.seeds, arguments.data_dir) if s not in done]
    for place, (data, network, clients, seed) in enumerate(todo, 1):
        print(f"{place}/{len(todo)} {data} {network} {clients} seed {seed}", flush=True)
        tables = tables_of(data, network, seed, arguments.data_dir)
        own = Config.from_dict(tables).data
        federation = federation_of(clients, seed) if data == "digits" else sources.load(own, seed=seed)
        fresh = measure(data, network, clients, seed, federation, tables)
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerows(fresh)
    summary(list(csv.DictReader(path.open())))


if __name__ == "__main__":
    main()
