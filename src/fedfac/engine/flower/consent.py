"""What a node lets a run learn: which layers may be measured, and which masks a server may choose.

A client's moments G = ZZᵀ of a layer and its shared rows Z_s give its personal rows: ``lstsq(Z_s, G[s, p])`` is Z_p
wherever the shared rows span the fan-in, and its projection onto them otherwise. Over a network both arrive by
themselves, whatever the order. So, as long as sums are not masked, a layer is measured only if all of its rows leave
in the same reply anyway, or if the node's owner says ``share-weights``.

Masks are the server's word, as only the server has the sums. A node bounds them: by what it can compute itself (a
random split, a given one), else by τ, where that is a quantile. A split that is redrawn with a margin goes on from
masks of rounds in which the node took no part: it is bounded by τ, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from fedfac.anatomy import Anatomy
from fedfac.engine.flower import wire
from fedfac.engine.flower.wire import RefusedError
from fedfac.method import Plan
from fedfac.rules import Threshold, decide
from fedfac.split import Split, mask_text


def measured_apart(plan: Plan, anatomy: Anatomy) -> list[str]:
    """The layers that the run measures at some time while not all of their rows leave in the same reply."""
    if plan.rule is None or not plan.rule.measures:
        return []
    at_first = plan.first_decision == 0  # then nothing but the measured sums leaves
    return [name for name in plan.rule.tau if at_first or not leaves_whole(plan.split, anatomy, name)]


def leaves_whole(split: Split, anatomy: Anatomy, name: str) -> bool:
    """Whether all input weights of a layer are in a client's part."""
    (layer,) = [layer for layer in anatomy.layers if layer.name == name]
    return not {rows.tensor for rows in layer.weights} & (split.personal_tensors | split.cut)


class Allowed(msgspec.Struct, frozen=True):
    """Which masks may be asked for in a round: these, or any with so many shared elements at most."""

    exactly: dict[str, str] | None = None
    most: dict[str, int] = {}

    @classmethod
    def of(cls, plan: Plan, *, round: int, seed: int) -> Allowed:
        """Of a method, in a round."""
        rule, split = plan.rule, plan.split_in(round)
        remembers = rule is not None and plan.every_round and any(tau.margin for tau in rule.tau.values())
        if rule is not None and (rule.measures or remembers):
            return cls(None, {name: most_shared(rule.tau[name], len(mask)) for name, mask in split.masks.items()})
        if rule is not None and split.masks:
            split = decide(rule, split, {}, seed=seed, round=round).split
        return cls({name: mask_text(mask) for name, mask in split.masks.items()})

    def check(self, masks: Mapping[str, str], round: int) -> None:
        """Fail if more elements would be shared than the method says, or others."""
        if self.exactly is not None and self.exactly != masks:
            raise RefusedError(wire.MASKS, f"round {round}: these are not the masks that the method gives")
        for layer, most in self.most.items():
            shared = masks.get(layer, "").count("1")
            if shared > most:
                raise RefusedError(
                    wire.MASKS, f"round {round}: {shared} elements of layer {layer!r} shared, at most {most}"
                )


def most_shared(threshold: Threshold, elements: int) -> int:
    """How many elements of a layer a threshold shares, unless scores are equal; an absolute one has no bound.

    >>> most_shared(Threshold.parse("50%"), 10), most_shared(Threshold.parse("50%", 0.1), 10)
    (5, 6)
    >>> most_shared(Threshold.parse("inf"), 10), most_shared(Threshold.parse(0.4), 10)
    (0, 10)
    """
    if threshold.quantile is None:
        return 0 if math.isinf(threshold.value) else elements
    lowest = max(threshold.quantile - threshold.margin, 0.0) * (elements - 1)
    return elements - math.ceil(lowest - 1e-9)
