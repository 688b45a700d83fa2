"""FedFac (paper 4, algorithms 1 and 2) and the controls that differ from it only in the rule.

Layers in Λ are split element by element; everything else is shared. *Static* (algorithm 1): a cohort trains
once from the common start W⁰, one factor analysis of its weights fixes the masks, training restarts from
W⁰. *Dynamic* (algorithm 2): factor analysis of the cohort's weights after every round's local training,
before the aggregation.

Where we differ from the paper's text, and why: the correlation comes from sums over clients (module
``moments``); Σ_ε is diagonal (module ``factor``); an element that has just become shared takes the weighted
mean of the cohort's weights, since a sum of updates is not defined for it; Λ may include the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedfac.anatomy import Anatomy, Layer, LayerKey
from fedfac.errors import ConfigError, did_you_mean
from fedfac.factor import ESTIMATORS, check_kappa
from fedfac.method import PERSONAL, Method, Phase, Plan
from fedfac.rules import FactorRule, RandomRule, Rule, Threshold, VarianceRule, per_layer
from fedfac.split import NORM_OPTIONS, Mask, Split, mask_of, mask_text

Tau = str | float | Mapping[LayerKey, str | float]
Kappa = float | Mapping[LayerKey, float]
LAST_HIDDEN = (-2,)
SCHEDULES = ("dynamic", "static")
HEADS = ("shared", "personal", "split")
# paper 3.2: LocalTrain (the personal part is trained, the shared part frozen) and Ensemble
_NEWCOMERS: dict[str, Any] = {"newcomer": (Phase(trains=PERSONAL),), "newcomer_rules": ("adapt", "ensemble")}


def fedfac(
    *,
    layers: Sequence[LayerKey] = LAST_HIDDEN,
    tau: Tau = "50%",
    kappa: Kappa = 0.85,
    schedule: str = "dynamic",
    estimator: str = "principal-axis",
    on: str = "weights",
    norm: str = "follow",
    head: str = "shared",
    probe_all: bool = False,
    eta_g: float = 1.0,
) -> Method:
    """FedFac.

    Parameters
    ----------
    layers
        Λ: numbers 1..L, module names, or negative numbers from the end. Default: the last hidden layer.
    tau
        τ_l: ``"50%"`` makes that share of the elements personal, ``"inf"`` all, ``0`` none; or one for
        each layer, as a mapping.
    kappa
        κ_l: the share of variance that decides the number of factors; or a mapping.
    schedule
        ``"dynamic"`` (split anew every round) or ``"static"`` (once, before the first round).
    estimator, on
        How communalities are estimated (see :mod:`fedfac.factor`), from ``"weights"`` or ``"updates"``.
    norm
        The normalisation after a split layer: ``"follow"`` its elements, ``"shared"`` or ``"personal"``.
    head
        The last layer: ``"shared"`` (the paper), ``"personal"`` beside the split, or ``"split"`` itself, by
        class. Under label skew a personal head is worth more than anything else.
    probe_all
        Static only: let all clients train for the one factor analysis instead of one cohort.
    eta_g
        η_g, the server's rate.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule is {schedule!r}. {did_you_mean(schedule, SCHEDULES)}")
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator is {estimator!r}. {did_you_mean(estimator, ESTIMATORS)}")
    for value in kappa.values() if isinstance(kappa, Mapping) else [kappa]:
        check_kappa(value)

    def rule(anatomy: Anatomy, chosen: tuple[Layer, ...], thresholds: Mapping[str, Threshold]) -> Rule:
        return FactorRule(thresholds, per_layer("kappa", kappa, anatomy, chosen), estimator, on)

    return _by_element(
        "fedfac" if schedule == "dynamic" else "fedfac-static",
        rule,
        layers=layers,
        tau=tau,
        norm=norm,
        head=head,
        every_round=schedule == "dynamic",
        probe_all=probe_all,
        eta_g=eta_g,
        options={
            "kappa": kappa,
            "schedule": schedule,
            "estimator": estimator,
            "on": on,
            "probe_all": probe_all,
        },
    )


def random_split(
    *,
    layers: Sequence[LayerKey] = LAST_HIDDEN,
    tau: Tau = "50%",
    redraw: bool = False,
    norm: str = "follow",
    eta_g: float = 1.0,
) -> Method:
    """A random split in place of factor analysis: fixed (drawn once) or redrawn every round."""
    return _by_element(
        "random-redrawn" if redraw else "random",
        lambda anatomy, chosen, thresholds: RandomRule(thresholds, redraw),
        layers=layers,
        tau=tau,
        norm=norm,
        every_round=redraw,
        eta_g=eta_g,
        options={"redraw": redraw},
    )


def variance_split(
    *,
    layers: Sequence[LayerKey] = LAST_HIDDEN,
    tau: Tau = "50%",
    schedule: str = "dynamic",
    norm: str = "follow",
    eta_g: float = 1.0,
) -> Method:
    """Elements whose input weights differ most between clients are personal."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule is {schedule!r}. {did_you_mean(schedule, SCHEDULES)}")
    return _by_element(
        "variance",
        lambda anatomy, chosen, thresholds: VarianceRule(thresholds),
        layers=layers,
        tau=tau,
        norm=norm,
        every_round=schedule == "dynamic",
        eta_g=eta_g,
        options={"schedule": schedule},
    )


def all_personal(*, layers: Sequence[LayerKey] = LAST_HIDDEN, norm: str = "follow", eta_g: float = 1.0) -> Method:
    """The layers in Λ are wholly personal: FedFac with τ = inf, without its factor analysis."""

    def masks(anatomy: Anatomy) -> dict[str, Mask]:
        return {layer.name: (False,) * layer.elements for layer in anatomy.select(layers)}

    return _fixed("all-personal", masks, norm, eta_g, {"layers": list(layers)})


def given_split(*, masks: Mapping[Any, Sequence[bool] | str], norm: str = "follow", eta_g: float = 1.0) -> Method:
    """A split that is known beforehand (FedSplit, paper 3): by layer, True (or ``1``) for a shared element.

    >>> given_split(masks={"fc1": "0011"}).options["masks"]
    {'fc1': '0011'}
    """
    texts = {key: mask if isinstance(mask, str) else mask_text(mask) for key, mask in masks.items()}
    for key, text in texts.items():
        if set(text) - {"0", "1"}:
            raise ConfigError(
                f"the mask of layer {key!r} is {text!r}; write 1 for a shared element, 0 for a personal one"
            )

    def named(anatomy: Anatomy) -> dict[str, Mask]:
        known = {anatomy.layer(key).name: mask_of(text) for key, text in texts.items()}
        if len(known) < len(texts):
            raise ConfigError(f"masks has two masks for one layer: {texts}")
        return known

    return _fixed("given", named, norm, eta_g, {"masks": texts})


def _fixed(
    name: str, masks: Callable[[Anatomy], Mapping[str, Mask]], norm: str, eta_g: float, options: dict[str, Any]
) -> Method:
    """A method whose split is known before anything is trained."""

    def plan(anatomy: Anatomy) -> Plan:
        fixed = masks(anatomy)
        return Plan(split=Split.of(anatomy, layers=anatomy.select(fixed), norm=norm).with_masks(fixed), **_NEWCOMERS)

    return Method(name=name, plan=plan, server_rate=eta_g, options={**options, "norm": norm, "eta_g": eta_g})


def _by_element(
    name: str,
    rule: Callable[[Anatomy, tuple[Layer, ...], Mapping[str, Threshold]], Rule],
    *,
    layers: Sequence[LayerKey],
    tau: Tau,
    norm: str,
    every_round: bool,
    eta_g: float,
    options: dict[str, Any],
    probe_all: bool = False,
    head: str = "shared",
) -> Method:
    """A method that splits the layers in Λ by a rule; values are checked now, layers with the model."""
    if isinstance(layers, str | int):
        raise ConfigError(f"layers is {layers!r}; give a list of layer numbers or names, such as [{layers!r}]")
    if norm not in NORM_OPTIONS:
        raise ConfigError(f"norm is {norm!r}. {did_you_mean(norm, NORM_OPTIONS)}")
    if head not in HEADS:
        raise ConfigError(f"head is {head!r}. {did_you_mean(head, HEADS)}")
    for value in tau.values() if isinstance(tau, Mapping) else [tau]:
        Threshold.parse(value)

    def plan(anatomy: Anatomy) -> Plan:
        chosen = anatomy.select([*layers, -1] if head == "split" else layers)
        if head == "personal" and anatomy.head in chosen:
            raise ConfigError(f"the head {anatomy.head.name!r} cannot be both personal and one of the layers to split")
        personal = anatomy.last(1) if head == "personal" else ()
        split = Split.of(anatomy, layers=chosen, personal=personal, norm=norm)
        if not chosen:
            return Plan(split=split, **_NEWCOMERS)
        thresholds = {k: Threshold.parse(v) for k, v in per_layer("tau", tau, anatomy, chosen).items()}
        return Plan(
            split=split,
            rule=rule(anatomy, chosen, thresholds),
            every_round=every_round,
            probe_all=probe_all,
            **_NEWCOMERS,
        )

    recorded = {"layers": list(layers), "tau": tau, "norm": norm, "head": head, "eta_g": eta_g, **options}
    return Method(name=name, plan=plan, server_rate=eta_g, options=recorded)
