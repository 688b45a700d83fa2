"""Rules: from sums over clients to a split.

Every rule gives each element of a layer a score, and a threshold τ_l cuts the scores: ζ_lj = 1 (shared) if
ν_lj ≥ τ_l (paper 4.1). FedFac's score is the communality; the others are controls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedfac.anatomy import Anatomy, Layer, LayerKey
from fedfac.errors import ConfigError, did_you_mean
from fedfac.factor import ESTIMATORS, MAX_ITERATIONS, check_kappa, factor_analysis
from fedfac.moments import Additive, Moments, Spread
from fedfac.seeds import stream
from fedfac.split import CPU, Mask, Split

BASES = ("weights", "updates")
SMALL = 128  # elements up to which a GPU's eigh is mostly waiting: the CPU takes it
SOLVERS = ("warm", "cold")
WARM_ITERATIONS = 5  # of the warm solver in a round that can go on from an earlier one
Memory = Mapping[str, Tensor]  # what a rule remembers from round to round


@dataclass(frozen=True)
class Threshold:
    """τ: a quantile of the scores ("50%": that share of the elements is personal) or an absolute value.

    With a ``margin``, an element changes sides only if its score passes τ by that much: in ranks for a quantile
    (τ = 50 %, margin .1: a personal element becomes shared in the upper 40 %, a shared one personal in the lower 40 %),
    because only ranks matter there and ν has no natural scale; in units of the score for an absolute τ. The
    share of personal elements then moves within the margin.
    """

    quantile: float | None = None
    value: float = 0.0
    margin: float = 0.0

    @classmethod
    def parse(cls, tau: str | float, margin: float = 0.0) -> Threshold:
        """Read ``"50%"``, ``"inf"`` (all personal), ``0`` (all shared) or a number.

        >>> Threshold.parse("50%"), Threshold.parse("inf")
        (Threshold(quantile=0.5, value=0.0, margin=0.0), Threshold(quantile=None, value=inf, margin=0.0))
        """
        text = str(tau).strip()
        try:
            number = float(text.removesuffix("%"))
        except ValueError:
            number = math.nan
        if text.endswith("%") and 0 <= number <= 100:
            return cls(quantile=number / 100, margin=margin)
        if not text.endswith("%") and number >= 0 and not isinstance(tau, bool):
            return cls(value=number, margin=margin)
        raise ConfigError(
            f"tau is {tau!r}; allowed: a quantile from '0%' to '100%' (that share of the elements is personal), "
            "'inf' (all personal), or a number from 0 (all shared) up, which is compared with the scores themselves"
        )

    @property
    def shares_all(self) -> bool:
        """Whether everything is shared, whatever the scores are."""
        return self.quantile is None and not self.value

    def cut(self, scores: Tensor, before: Sequence[bool] | None = None) -> tuple[Mask, float]:
        """The mask (True = shared; ties at τ are shared) and the value of τ behind it.

        ``before`` is the mask that the margin protects.
        """
        value = self._value(scores, 0.0)
        if before is None or not self.margin:
            return tuple((scores >= value).tolist()), value
        was = torch.tensor(before, device=scores.device)
        stays, joins = (scores >= self._value(scores, shift) for shift in (-self.margin, self.margin))
        return tuple(torch.where(was, stays, joins).tolist()), value

    def _value(self, scores: Tensor, shift: float) -> float:
        if self.quantile is None:
            return self.value + shift if self.value else 0.0
        value = float(torch.quantile(scores, min(max(self.quantile + shift, 0.0), 1.0)))
        if self.quantile and value == 0:  # a dead element (score 0) is personal, however many there are
            value = torch.finfo(scores.dtype).tiny
        return value


@dataclass(frozen=True)
class Asked:
    """One layer to be scored: the sum of all clients' contributions, and what the rule remembers of that layer."""

    layer: str
    elements: int
    total: Additive | None
    seed: int
    round: int
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """One number per element, high = shared, and what the record should say about them."""

    values: Tensor
    notes: Mapping[str, Any] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """A new split, with the scores and notes behind every layer's mask, and what the rule wants to remember."""

    split: Split
    scores: Mapping[str, list[float]]
    notes: Mapping[str, Mapping[str, Any]]
    memory: Memory = field(default_factory=dict)


class Rule(Protocol):
    """How the elements of a layer are scored."""

    measures: ClassVar[bool]  # whether it needs anything of the clients at all

    @property
    def tau(self) -> Mapping[str, Threshold]:
        """The threshold of every layer that the rule decides."""

    def measure(self, layer: Layer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Additive | None:
        """What a client contributes, from its state before and after local training; None if nothing."""

    def score(self, asked: Asked) -> Scores:
        """One number for every element of the layer."""


def decide(
    rule: Rule,
    split: Split,
    sums: Mapping[str, Additive],
    *,
    seed: int,
    round: int,
    memory: Memory | None = None,
) -> Decision:
    """Apply a rule to every layer that the split decides by element.

    ``memory`` is what the last decision returned as its own; tensors are named ``layer/what``.
    """
    masks: dict[str, Mask] = {}
    remembered: dict[str, Tensor] = {}
    scores: dict[str, list[float]] = {}
    notes: dict[str, Mapping[str, Any]] = {}
    for layer, old in split.masks.items():
        own = {name.removeprefix(f"{layer}/"): t for name, t in (memory or {}).items() if name.startswith(f"{layer}/")}
        made = rule.score(Asked(layer, len(old), sums.get(layer), seed, round, own))
        remembered |= {f"{layer}/{what}": tensor for what, tensor in made.memory.items()}
        threshold = rule.tau[layer]
        decided = own.get("mask")
        masks[layer], value = threshold.cut(made.values, None if decided is None else decided.bool().tolist())
        if threshold.margin:
            remembered[f"{layer}/mask"] = torch.tensor(masks[layer], dtype=torch.uint8)
        scores[layer] = made.values.tolist()
        notes[layer] = {"tau": value if math.isfinite(value) else "inf", **made.notes}
    return Decision(split.with_masks(masks), scores, notes, remembered)


@dataclass(frozen=True)
class FactorRule:
    """FedFac's rule: the communality of an element (paper 4.1). A dead element has ν = 0.

    The ``warm`` solver goes on from the last round's ν for a few iterations, until the mask is settled. The ``cold``
    one begins anew every round and stops after ``MAX_ITERATIONS``, which is short of the limit where κ is high (how
    far: :mod:`fedfac.factor`); so does the first decision of the warm one. Both run where the moments are, small
    layers on the CPU.
    """

    tau: Mapping[str, Threshold]
    kappa: Mapping[str, float]
    estimator: str = "principal-axis"
    on: str = "weights"
    solver: str = "warm"
    decay: float = 0.0  # weight of the sums of the round before; those of round t−k count decay^k
    measures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_solver(self.solver)
        for kappa in self.kappa.values():
            check_kappa(kappa)
        if self.estimator not in ESTIMATORS:
            raise ConfigError(f"estimator is {self.estimator!r}. {did_you_mean(self.estimator, ESTIMATORS)}")
        check_decay(self.decay)
        if self.on not in BASES:
            raise ConfigError(f"on is {self.on!r}; factor analysis is on {' or on '.join(BASES)}")

    def measure(self, layer: Layer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Moments:
        """The client's moments of its weights (as the authors do) or of their updates."""
        return Moments.of(layer, after, minus=before if self.on == "updates" else None)

    def score(self, asked: Asked) -> Scores:
        """ν of every element, from factor analysis of the elements that have variance."""
        layer, total, own = asked.layer, asked.total, asked.memory
        if not isinstance(total, Moments):
            raise ConfigError(f"factor analysis needs the moments of layer {layer!r}; it was given {total!r}")
        remembered: dict[str, Tensor] = {}
        if self.decay:
            total = _accumulated(total, own, self.decay)
            remembered |= {"n": torch.tensor(total.n, dtype=torch.float64), "total": total.total}
            remembered["products"] = total.products
        if asked.elements <= SMALL:
            total = total.to(CPU)
        dead = total.dead
        alive = ~dead
        values = torch.zeros(asked.elements, dtype=torch.float64, device=alive.device)
        notes: dict[str, Any] = {
            "factors": 0,
            "iterations": 0,
            "converged": True,
            "stopped": "closed form",
            "dead": int(dead.sum()),
        }
        continues = self.solver == "warm" and self.estimator == "principal-axis"
        before = own.get("communality") if continues else None
        if bool(alive.any()):
            found = factor_analysis(
                total.correlation()[alive][:, alive],
                kappa=self.kappa[layer],
                estimator=self.estimator,
                max_iterations=MAX_ITERATIONS if before is None else WARM_ITERATIONS,
                start=None if before is None else before.to(alive.device)[alive],
                sides=None if before is None else lambda nu: self.tau[layer].cut(values.masked_scatter(alive, nu))[0],
            )
            values[alive] = found.communality
            notes |= {
                "factors": found.n_factors,
                "iterations": found.iterations,
                "converged": found.converged,
                "stopped": found.stopped,
            }
        values = values.cpu()
        if continues:
            remembered["communality"] = values
        return Scores(values, notes, remembered)


@dataclass(frozen=True)
class RandomRule:
    """Random scores: drawn once for a run, or redrawn every round. The two behave very differently:

    hidden units are exchangeable at the start, so a *fixed* random split of the right size is as good as the
    true one; the paper's "random is much inferior" is the redrawn kind.
    """

    tau: Mapping[str, Threshold]
    redraw: bool = False
    measures: ClassVar[bool] = False

    def measure(self, layer: Layer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Nothing leaves a client for a random split."""

    def score(self, asked: Asked) -> Scores:
        """Uniform numbers."""
        draws = stream(asked.seed, "random split", asked.layer, asked.round if self.redraw else 0)
        return Scores(torch.from_numpy(draws.random(asked.elements)))


@dataclass(frozen=True)
class VarianceRule:
    """One minus the relative between-client variance: what differs between clients is personal."""

    tau: Mapping[str, Threshold]
    measures: ClassVar[bool] = True

    def measure(self, layer: Layer, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Spread:
        """The client's sums."""
        return Spread.of(layer, after)

    def score(self, asked: Asked) -> Scores:
        """1 − Var_c / E‖z‖²."""
        if not isinstance(asked.total, Spread):
            raise ConfigError(
                f"the variance rule needs the spread of layer {asked.layer!r}; it was given {asked.total!r}"
            )
        return Scores(1 - asked.total.variance().cpu())


def check_solver(solver: str) -> None:
    """Fail unless there is such a solver."""
    if solver not in SOLVERS:
        raise ConfigError(f"solver is {solver!r}. {did_you_mean(solver, SOLVERS)}")


def check_decay(decay: float) -> None:
    """A decay forgets."""
    if not 0 <= decay < 1:
        raise ConfigError(f"decay is {decay}; the weight of the round before is a number from 0 (none) to below 1")


def _accumulated(total: Moments, memory: Memory, decay: float) -> Moments:
    """The sums of this round, and of earlier ones with a weight that falls from round to round."""
    if "products" not in memory:
        return total
    device = total.total.device
    earlier = Moments(float(memory["n"]), memory["total"].to(device), memory["products"].to(device))
    return earlier * decay + total


def per_layer(name: str, value: Any, anatomy: Anatomy, layers: tuple[Layer, ...]) -> dict[str, Any]:
    """One value for all layers, or a mapping from layer (number or name) to value, by layer name."""
    if not isinstance(value, Mapping):
        return {layer.name: value for layer in layers}
    keyed: dict[LayerKey, Any] = {
        int(k) if isinstance(k, str) and k.lstrip("-").isdigit() else k: v for k, v in value.items()
    }
    named = {anatomy.layer(key).name: v for key, v in keyed.items()}
    if len(named) < len(value):
        raise ConfigError(f"{name} is given more than once for a layer: {dict(value)}")
    wanted = {layer.name for layer in layers}
    if named.keys() != wanted:
        raise ConfigError(
            f"{name} is given for the layers {sorted(named)}, but the layers to split are {sorted(wanted)}"
        )
    return named
