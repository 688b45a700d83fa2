"""Splits that change slowly: moments that remember earlier rounds, and a margin around the threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from fedfac.anatomy import Anatomy
from fedfac.errors import ConfigError
from fedfac.method import Deciding, Plan
from fedfac.rules import FactorRule, RandomRule, Rule, VarianceRule, check_decay


@dataclass(frozen=True)
class Decay:
    """Moments are sums over this round's clients, plus ``weight`` times the sums of the round before, and so on."""

    weight: float = 0.9
    name: ClassVar[str] = "decay"
    changes: ClassVar[str] = "training and prediction"
    paper: ClassVar[str] = "ours"
    wrap: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_decay(self.weight)

    @property
    def is_on(self) -> bool:
        """Whether earlier rounds count."""
        return self.weight > 0

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """The rule remembers."""
        return _with_rule(plan, "decay", self._remembering)

    def _remembering(self, rule: Rule) -> Rule | None:
        return replace(rule, decay=self.weight) if isinstance(rule, FactorRule) else None


@dataclass(frozen=True)
class Hysteresis:
    """An element changes sides only if its score passes τ by this margin.

    In ranks where τ is a quantile: .1 at τ = 50 % means into the upper, or the lower, 40 %.
    """

    margin: float = 0.1
    name: ClassVar[str] = "hysteresis"
    changes: ClassVar[str] = "training and prediction"
    paper: ClassVar[str] = "ours"
    wrap: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not 0 <= self.margin <= 1:
            raise ConfigError(f"hysteresis is {self.margin}; the margin is a number from 0 (none) to 1, in ranks")

    @property
    def is_on(self) -> bool:
        """Whether there is a margin."""
        return self.margin > 0

    def apply(self, plan: Plan, anatomy: Anatomy) -> Plan:
        """Thresholds with the margin."""
        return _with_rule(plan, "hysteresis", self._with_margin)

    def _with_margin(self, rule: Rule) -> Rule | None:
        if not isinstance(rule, FactorRule | VarianceRule | RandomRule):
            return None
        return replace(rule, tau={layer: replace(own, margin=self.margin) for layer, own in rule.tau.items()})


def _with_rule(plan: Plan, name: str, change: Callable[[Rule], Rule | None]) -> Plan:
    """The plan with another rule, wherever the decision is used."""
    if plan.deciding is None:
        if plan.by_element and not plan.split.owners:  # with τ = 0 everything is shared, and there is nothing to decide
            return plan
        raise ConfigError(f"{name}: this method has no rule that decides about elements")
    rule = change(plan.deciding.rule)
    if rule is None:
        raise ConfigError(f"{name}: the rule of this method ({type(plan.deciding.rule).__name__}) does not have it")
    deciding: Deciding = replace(plan.deciding, rule=rule)
    if plan.training.deciding is not None:
        return replace(plan, training=replace(plan.training, deciding=deciding))
    return replace(plan, prediction=replace(plan.prediction, deciding=deciding))
