"""What a client and the server would send each other, computed from the splits; nothing here was measured on a wire.

Down: the shared part, by the split that the round began with. Up: the shared part by the split that it ended with, and
what the rule measures. FedFac's moments of a layer with d elements are n, Σz and the symmetric Σzzᵀ (module
``moments``): d(d + 3)/2 + 1 numbers in single precision when packed; the variance rule's are the layer's weights again.
Protocol overhead, evaluation and the masks themselves (a bit an element) are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedfac.split import Split

_SINGLE = 4


def traffic(
    config: Mapping[str, Any], records: Sequence[Mapping[str, Any]], splits: Mapping[int, Split]
) -> dict[str, float]:
    """Mean bytes a client and round, up, down and (of up) for the split; and the sum over the whole run."""
    sizes = {name: getattr(torch, kind).itemsize for name, (_, kind) in config["tensors"].items()}
    start = Split.from_json(config["split"])
    known: dict[tuple[Any, ...], int] = {}

    def shared_bytes(split: Split) -> int:
        key = tuple(split.masks.items())
        if key not in known:
            known[key] = sum(_shared(split, name) * size for name, size in sizes.items())
        return known[key]

    up = down = measured = total = 0.0
    visits = 0
    for record in records:
        number = record["round"]
        people = len(record.get("cohort", ())) - len(record.get("left_out", ()))  # who took part to the end
        before, after = splits.get(number - 1, start), splits[number]
        extra = _measured(config["settings"]["method"]["name"], record.get("split", {}), start)
        sent = shared_bytes(after) if number > 0 else 0  # a static method's round 0 sends what it measures only
        got = shared_bytes(before)
        up, down, measured = up + people * (sent + extra), down + people * got, measured + people * extra
        total += people * (sent + extra + got)
        visits += people
    each = max(visits, 1)
    return {"up": up / each, "down": down / each, "for_split": measured / each, "total": total}


def _shared(split: Split, name: str) -> int:
    """How many numbers of a tensor are shared; every element of a tensor owns equally many."""
    numbers = torch.Size(split.shapes[name]).numel()
    if name not in split.cut:
        return 0 if name in split.personal_tensors else numbers
    layer, rows = split.owners[name]
    return numbers // rows.count * sum(split.masks[layer][rows.first : rows.first + rows.count])


def _measured(method: str, layers: Mapping[str, Mapping[str, Any]], split: Split) -> int:
    numbers = 0
    for name, layer in layers.items():
        elements = int(layer["elements"])
        if "factors" in layer:
            numbers += elements * (elements + 3) // 2 + 1
        elif method == "variance" and "tau" in layer:
            own = [n for n, (owner, _) in split.owners.items() if owner == name and len(split.shapes[n]) > 1]
            numbers += sum(torch.Size(split.shapes[n]).numel() for n in own) + elements + 1
    return numbers * _SINGLE
