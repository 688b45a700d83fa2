"""What a run's clients and server send each other over a network: the bytes of all tensors, counted from the masks.

The network engine (``fedfac.engine.flower``) sends

- down: the server's *whole* state at its own precision, with every request to train and once more with every request to
  evaluate; values that are personal travel too, because a client that has never trained starts from them;
- up: the shared part, weighted by n_k, and what the rule measures, all in double precision. FedFac's moments of a layer
  with d elements are Σz and a triangle of the symmetric Σzzᵀ: d(d + 3)/2 values. The variance rule's are the layer's
  weights again, and one value for each element.

A run in one process sends nothing; its figures are those of the same run over a network. Left out: names and shapes of
tensors, masks (a character for each element) and plain values (together some kilobytes a message for a large network),
clients that were left out of a round, TLS, and the last state that clients which are never tested are handed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedfac.preflight import hold_out_newcomers, tested_clients
from fedfac.split import Mask, Split

SENT_UP = torch.float64.itemsize  # sums of all kinds


def traffic(
    config: Mapping[str, Any], records: Sequence[Mapping[str, Any]], masks: Mapping[int, Mapping[str, Mask]]
) -> dict[str, float]:
    """Means by client and round: values shared, bytes up (of these ``for_split``) and down; and the run's total.

    ``down`` is one request's; ``total`` has the requests to evaluate as well.
    """
    split = Split.from_json(config["split"])
    method, down = config["settings"]["method"]["name"], state_bytes(config["tensors"])
    tested = _tested(config["settings"])
    visits = shared = measured = evaluated = 0
    for record in records:
        people = len(record.get("cohort", ())) - len(record.get("left_out", ()))  # who took part to the end
        visits += people
        measured += people * _measured(method, record.get("split", {}), split)
        if record["round"] > 0:  # a static method's round 0 sends what it measures only
            shared += people * _shared(split, masks[record["round"]], record)
        if "test" in record:
            evaluated += tested - len(record.get("not_tested", ()))
    up, for_split, each = SENT_UP * (shared + measured), SENT_UP * measured, max(visits, 1)
    return {
        "values": shared / each,
        "up": up / each,
        "for_split": for_split / each,
        "down": float(down),
        "total": float(up + down * (visits + evaluated)),
    }


def state_bytes(tensors: Mapping[str, tuple[Sequence[int], str]]) -> int:
    """A state at its own precision; by name, shape and kind of every tensor."""
    return sum(torch.Size(shape).numel() * getattr(torch, kind).itemsize for shape, kind in tensors.values())


def moments_values(elements: int) -> int:
    """Σz, and a triangle of Σzzᵀ; n is a plain value.

    >>> moments_values(64)
    2144
    """
    return elements * (elements + 3) // 2


def _shared(split: Split, masks: Mapping[str, Mask], record: Mapping[str, Any]) -> int:
    """How many values of the state the clients sent in a round."""
    sizes = {name: torch.Size(shape).numel() for name, shape in split.shapes.items()}
    if not masks:  # nothing is decided by element, or not yet: in a warm-up personal layers are shared, too
        share: float = record["shared_share"]
        return round(share * sum(sizes.values()))
    now = split.with_masks(masks)
    return sum(_shared_of(now, name, size) for name, size in sizes.items())


def _shared_of(split: Split, name: str, size: int) -> int:
    """How many values of a tensor are shared; every element of a tensor owns equally many."""
    if name not in split.cut:
        return 0 if name in split.personal_tensors else size
    layer, rows = split.owners[name]
    return size // rows.count * sum(split.masks[layer][rows.first : rows.first + rows.count])


def _measured(method: str, layers: Mapping[str, Mapping[str, Any]], split: Split) -> int:
    """How many values a client sent for the decision of a round, if there was one."""
    values = 0
    for name, layer in layers.items():
        elements = int(layer["elements"])
        if "factors" in layer:
            values += moments_values(elements)
        elif method == "variance" and "tau" in layer:
            own = [n for n, (owner, _) in split.owners.items() if owner == name and len(split.shapes[n]) > 1]
            values += sum(torch.Size(split.shapes[n]).numel() for n in own) + elements
    return values


def _tested(settings: Mapping[str, Any]) -> int:
    """How many clients an evaluation asks."""
    participants, _ = hold_out_newcomers(settings["clients"], settings["newcomers"], settings["seed"])
    return len(tested_clients(participants, settings.get("evaluate_clients"), settings["seed"]))
