"""How layers were split, round by round, packed small enough for a page.

A frame is one decision: a byte for the ν of every element and a bit for its side. 500 rounds of 1,024 elements are
0.6 MB that way; where there is more, rounds are left out evenly and the page says so.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedfac.data.picture import evenly

MOST_FRAMES = 1_500_000  # elements × rounds, over all runs of a page: a byte each


def decided_rounds(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """The rounds in which some layer was decided."""
    return [r["round"] for r in records if any("tau" in layer for layer in r.get("split", {}).values())]


def layer_facts(
    records: Sequence[Mapping[str, Any]],
    masks: Mapping[int, Mapping[str, tuple[bool, ...]]],
    scores: Mapping[int, Mapping[str, list[float]]],
    budget: int,
) -> list[dict[str, Any]]:
    """By layer: what was recorded of every decision, and the frames of as many as the budget allows."""
    by_round = {r["round"]: r.get("split", {}) for r in records}
    decided = decided_rounds(records) or ([max(masks)] if masks else [])
    elements = {layer: len(mask) for layer, mask in masks[max(masks)].items()} if masks else {}
    total = max(sum(elements.values()), 1)
    shown = [decided[i] for i in evenly(len(decided), max(budget // total, 2))]
    return [
        {
            "name": layer,
            "elements": count,
            "rounds": decided,
            "kept": [by_round[r][layer]["kept"] for r in decided],
            "factors": _column(by_round, decided, layer, "factors"),
            "tau": _column(by_round, decided, layer, "tau"),
            "dead": _column(by_round, decided, layer, "dead"),
            "converged": _column(by_round, decided, layer, "converged"),
            "frames": _frames(layer, shown, masks, scores),
        }
        for layer, count in elements.items()
    ]


def _column(by_round: Mapping[int, Any], rounds: Sequence[int], layer: str, key: str) -> list[Any] | None:
    values = [by_round[r][layer].get(key) for r in rounds]
    return None if all(v is None for v in values) else [round(v, 5) if isinstance(v, float) else v for v in values]


def _frames(
    layer: str,
    rounds: Sequence[int],
    masks: Mapping[int, Mapping[str, tuple[bool, ...]]],
    scores: Mapping[int, Mapping[str, list[float]]],
) -> dict[str, Any]:
    sides = np.packbits(np.array([masks[r][layer] for r in rounds], dtype=bool).reshape(-1), bitorder="little")
    found: dict[str, Any] = {"rounds": list(rounds), "sides": _base64(sides), "scores": None}
    if rounds and all(layer in scores.get(r, {}) for r in rounds):
        values = np.array([scores[r][layer] for r in rounds])
        low, high = float(values.min()), float(values.max())
        scale = 255 / (high - low) if high > low else 0.0
        found["scores"] = _base64(np.rint((values - low) * scale).astype(np.uint8))
        found["range"] = [math.floor(low * 1e6) / 1e6, math.ceil(high * 1e6) / 1e6]
    return found


def _base64(values: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")
