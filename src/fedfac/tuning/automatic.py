"""Λ without a search: the paper's first open problem (section 6), from two rounds.

Two rounds of FedAvg are trained, in which clients measure every hidden layer; then the layer whose *updates* differ
most between clients is split. With Δ_c the update of a layer's input weights on client c, out of K,

    D_l = K/(K−1) · (E‖Δ_c‖² − ‖E Δ_c‖²) / E‖Δ_c‖²

is the share of an update that the clients do not have in common (1: nothing in common, the factor makes it unbiased).
A layer that all clients push in one direction should stay shared; one that each pushes elsewhere gains by being
personal. D_l follows from :class:`fedfac.moments.Spread` of the updates, a sum over clients: nothing crosses to the
server that FedFac itself, or its variance control, does not send.

How often it finds the layer that the search finds, and what it costs when it does not, is measured in docs/tuning.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfac import experiment
from fedfac.anatomy import Anatomy, Layer
from fedfac.config import Config
from fedfac.data.federation import Federation
from fedfac.errors import ConfigError
from fedfac.method import Deciding, Method, Plan, Training
from fedfac.moments import Spread
from fedfac.options import layer_keys
from fedfac.rules import Asked, Scores, Threshold
from fedfac.run import atomic_write
from fedfac.split import Split

ROUNDS = 2  # the first one pushes all clients away from the random start; the second tells them apart
FILE = "automatic.json"


@dataclass(frozen=True)
class Choice:
    """The layer (or set of layers) to split, and the score of every candidate."""

    layer: str
    scores: Mapping[str, float]
    rounds: int = ROUNDS


@dataclass(frozen=True)
class UpdateRule:
    """Measures how far clients' updates differ, and shares everything."""

    tau: Mapping[str, Threshold]
    measures: ClassVar[bool] = True

    def measure(self, layer: Layer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Spread:
        """The client's update, to be summed."""
        return Spread.of(layer, after, minus=before)

    def score(self, asked: Asked) -> Scores:
        """All elements shared; the record says how large updates are, and how large the part not in common is."""
        total = asked.total
        if not isinstance(total, Spread):
            raise ConfigError(f"the spread of the updates of layer {asked.layer!r} is needed; it was given {total!r}")
        power = float(total.squares.sum()) / total.clients
        common = float((total.total / total.clients).square().sum())
        between = (power - common) * total.clients / max(total.clients - 1, 1)
        return Scores(torch.ones(asked.elements, dtype=torch.float64), {"power": power, "between": between})


def probe() -> Method:
    """FedAvg that measures every hidden layer."""

    def base(anatomy: Anatomy) -> Plan:
        hidden = anatomy.numbered[:-1]
        rule = UpdateRule({layer.name: Threshold(value=0.0) for layer in hidden})
        deciding = Deciding(rule=rule, every_round=True)
        return Plan(training=Training(split=Split.of(anatomy, layers=hidden), deciding=deciding))

    return Method(name="probe", base=base)


def choose(
    config: Config,
    federation: Federation | None = None,
    *,
    layers: Sequence[str] | None = None,
    lanes: int | None = None,
    device: str | None = None,
) -> Choice:
    """Pick Λ among ``layers`` (default: every hidden layer by itself; ``"conv1+conv2"`` is the two together)."""
    with experiment.session(
        config,
        federation=federation,
        method=probe(),
        lanes=lanes,
        device=device,
        rounds=ROUNDS,
        evaluate_every=ROUNDS,
        evaluate_clients=1,
    ) as session:
        anatomy = Anatomy.of(session.template)
        while not session.finished:
            record = session.step()
    return pick(record, anatomy, layers)


def pick(record: Mapping[str, Any], anatomy: Anatomy, layers: Sequence[str] | None = None) -> Choice:
    """The choice that the record of the probe's last round stands for."""
    measured = record["split"]
    if not measured:
        raise ConfigError(
            "the model has no hidden layer, so there is none to split: give it one, or use another method"
        )
    sets = {name: [name] for name in measured}
    if layers is not None:
        sets = {text: [layer.name for layer in anatomy.select(layer_keys(text))] for text in layers}
    scores = {}
    for candidate, names in sets.items():
        own = [measured[name] for name in names if name in measured]
        power = sum(m["power"] for m in own)
        scores[candidate] = sum(m["between"] for m in own) / power if power else 0.0
    return Choice(max(scores, key=lambda candidate: scores[candidate]), scores)


def save(choice: Choice, folder: Path) -> None:
    """Keep the choice in the folder of a search."""
    atomic_write(folder / FILE, json.dumps(asdict(choice), indent=1) + "\n")


def load(folder: Path) -> Choice:
    """The choice that was made."""
    return Choice(**json.loads((folder / FILE).read_text()))


def saved(folder: Path) -> Choice | None:
    """The choice, if it has been made."""
    return load(folder) if (folder / FILE).exists() else None
