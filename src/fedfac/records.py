"""What is written down about a round, and about the method of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from fedfac.rules import Decision
from fedfac.split import Split
from fedfac.training import Outcome

Record = dict[str, Any]
TRAINING = ("cohort", "left_out", "samples", "train_loss")  # what a record says of the training


class Clock:
    """Seconds by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = perf_counter()

    def lap(self, step: str) -> None:
        """The step ends now."""
        now = perf_counter()
        self.seconds[step] = round(now - self._last, 6)
        self._last = now


def training_record(outcomes: Mapping[int, Outcome], names: Sequence[str]) -> Record:
    """Who trained, on how many samples, with which loss, and who was left out."""
    good = {client: o for client, o in outcomes.items() if o.problem is None}
    samples = sum(o.samples for o in good.values())
    return {
        "cohort": list(outcomes),
        "left_out": {names[client]: o.problem for client, o in outcomes.items() if o.problem is not None},
        "samples": samples,
        "train_loss": sum(o.loss * o.samples for o in good.values()) / samples if samples else None,
    }


def split_record(split: Split, before: Split, decision: Decision | None) -> Record:
    """By layer: how many elements are shared, how many kept their side, and what the rule says about it."""
    changes = split.diff(before)
    return {
        layer: {
            "elements": len(mask),
            "shared": sum(mask),
            "kept": changes[layer].kept,
            **({} if decision is None else decision.notes[layer]),
        }
        for layer, mask in split.masks.items()
    }


def has_decided(records: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a rule has decided about elements in one of these rounds."""
    return any("tau" in own for record in records for own in record.get("split", {}).values())


def method_used(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's method, name and options; what was left to the network or to the run is what it came to.

    >>> method_used({"settings": {"method": {"name": "fedfac-plus", "proximal": None}}, "resolved": {"proximal": 0.01}})
    {'name': 'fedfac-plus', 'proximal': 0.01}
    """
    return {**config["settings"]["method"], **config.get("resolved", {})}
