"""FedFac (paper 4, algorithms 1 and 2) and the controls that differ from it only in the rule.

Layers in Λ are split element by element; everything else is shared. *Static* (algorithm 1): a cohort trains
once from the common start W⁰, one factor analysis of its weights fixes the masks, training restarts from
W⁰. *Dynamic* (algorithm 2): factor analysis of the cohort's weights after every round's local training,
before the aggregation.

Where we differ from the paper's text, and why: the correlation comes from sums over clients (module
``moments``); Σ_ε is diagonal (module ``factor``); an element that has just become shared takes the weighted
mean of the cohort's weights, since a sum of updates is not defined for it; Λ may include the head.

FedFac+ is FedFac with switches (``fedfac.switches``): its elements are trained by all clients together, and each makes
some of them its own before it predicts; moments and masks change slowly, the server has a momentum, a proximal term
holds clients near it where the network normalises nothing, outputs know the client's class frequencies, and predictions
use a mean over rounds and the client's own normalisation statistics. The server needs only sums over clients. What
each is worth: docs/fedfac-plus.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedfac.anatomy import Anatomy, Layer, LayerKey
from fedfac.errors import ConfigError, did_you_mean
from fedfac.factor import ESTIMATORS, check_kappa
from fedfac.method import PERSONAL, Deciding, Method, Phase, Plan, Prediction, Training, with_switches
from fedfac.rules import FactorRule, RandomRule, Rule, Threshold, VarianceRule, check_solver, per_layer
from fedfac.split import NORM_OPTIONS, Mask, Split, mask_of, mask_text
from fedfac.switches.average import Average
from fedfac.switches.joint import Joint
from fedfac.switches.prior import Prior
from fedfac.switches.proximal import Proximal
from fedfac.switches.refresh import Refresh
from fedfac.switches.server import ServerMomentum
from fedfac.switches.statistics import Statistics
from fedfac.switches.steady import Decay, Hysteresis

Tau = str | float | Mapping[LayerKey, str | float]
Kappa = float | Mapping[LayerKey, float]
Thresholds = Mapping[str, Threshold]
LAST_HIDDEN = (-2,)
SCHEDULES = ("dynamic", "static")
HEADS = ("shared", "personal")
# paper 3.2: LocalTrain (the personal part is trained, the shared part frozen) and Ensemble
NEWCOMERS = Prediction(newcomer=(Phase(trains=PERSONAL),), newcomer_rules=("adapt", "ensemble"))
PLUS = (
    Joint(),
    Decay(0.9),
    Hysteresis(0.1),
    Refresh(3),
    Prior(1.0),
    Proximal(),
    Statistics(0.5),
    Average(0.9),
    ServerMomentum(0.5),
)


def fedfac(
    *,
    layers: Sequence[LayerKey] = LAST_HIDDEN,
    tau: Tau = "50%",
    kappa: Kappa = 0.85,
    schedule: str = "dynamic",
    estimator: str = "principal-axis",
    on: str = "weights",
    solver: str = "warm",
    norm: str = "follow",
    head: str = "shared",
    probe_all: bool = False,
) -> Method:
    """FedFac.

    Parameters
    ----------
    layers
        Λ: numbers 1..L, module names, or negative numbers from the end. Default: the last hidden layer.
    tau
        τ_l: ``"50%"`` makes that share of the elements personal, ``"inf"`` all, ``0`` none, without looking at them
        (``"0%"``: none, but scores are recorded); or one for each layer, as a mapping.
    kappa
        κ_l: the share of variance that decides the number of factors; or a mapping.
    schedule
        ``"dynamic"`` (split anew every round) or ``"static"`` (once, before the first round; with a warm-up, once
        after it).
    estimator, on
        How communalities are estimated (see :mod:`fedfac.factor`), from ``"weights"`` or ``"updates"``.
    solver
        Dynamic only: ``"warm"`` goes on from the last round's communalities, ``"cold"`` begins anew every round. The
        two agree where 50 iterations converge, at a low κ, and not at the default .85 (:mod:`fedfac.factor`).
    norm
        The normalisation after a split layer: ``"follow"`` its elements, ``"shared"`` or ``"personal"``.
    head
        The last layer: ``"shared"`` (the paper) or ``"personal"``, beside the split. Under label skew a head of one's
        own, or one that is refreshed, is worth more than anything else. To split it by class, name it in ``layers``.
    probe_all
        Static only: let all clients train for the one factor analysis instead of one cohort.
    """
    for option, value, known in (("schedule", schedule, SCHEDULES), ("estimator", estimator, ESTIMATORS)):
        if value not in known:
            raise ConfigError(f"{option} is {value!r}. {did_you_mean(value, known)}")
    for share in kappa.values() if isinstance(kappa, Mapping) else [kappa]:
        check_kappa(share)
    check_solver(solver)

    def rule(anatomy: Anatomy, chosen: tuple[Layer, ...], thresholds: Thresholds) -> Rule:
        shares = per_layer("kappa", kappa, anatomy, chosen)
        return FactorRule(thresholds, shares, estimator, on, solver)

    dynamic = schedule == "dynamic"
    return _by_element(
        "fedfac" if dynamic else "fedfac-static",
        rule,
        {"layers": layers, "tau": tau, "norm": norm, "head": head},
        {
            "kappa": kappa,
            "schedule": schedule,
            "estimator": estimator,
            "on": on,
            "solver": solver,
            "probe_all": probe_all,
        },
        every_round=dynamic,
        probe_all=probe_all,
    )


fedfac_plus = with_switches(fedfac, *PLUS, name="fedfac-plus")
"""FedFac+: :func:`fedfac` with the switches ``PLUS``. With every switch off it is FedFac, bit by bit."""


def random_split(
    *,
    layers: Sequence[LayerKey] = LAST_HIDDEN,
    tau: Tau = "50%",
    redraw: bool = False,
    norm: str = "follow",
    head: str = "shared",
) -> Method:
    """A random split in place of factor analysis: fixed (drawn once) or redrawn every round."""
    return _by_element(
        "random-redrawn" if redraw else "random",
        lambda anatomy, chosen, thresholds: RandomRule(thresholds, redraw),
        {"layers": layers, "tau": tau, "norm": norm, "head": head},
        {"redraw": redraw},
        every_round=redraw,
    )


def variance_split(
    *,
    layers: Sequence[LayerKey] = LAST_HIDDEN,
    tau: Tau = "50%",
    schedule: str = "dynamic",
    norm: str = "follow",
    head: str = "shared",
) -> Method:
    """Elements whose input weights differ most between clients are personal."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule is {schedule!r}. {did_you_mean(schedule, SCHEDULES)}")
    return _by_element(
        "variance",
        lambda anatomy, chosen, thresholds: VarianceRule(thresholds),
        {"layers": layers, "tau": tau, "norm": norm, "head": head},
        {"schedule": schedule},
        every_round=schedule == "dynamic",
    )


def all_personal(*, layers: Sequence[LayerKey] = LAST_HIDDEN, norm: str = "follow", head: str = "shared") -> Method:
    """The layers in Λ are wholly personal: FedFac with τ = inf, without its factor analysis."""
    _check_placement(layers, norm, head)

    def base(anatomy: Anatomy) -> Plan:
        split = _split_of(anatomy, _chosen(anatomy, layers, head), norm, head)
        masks = {name: (False,) * len(mask) for name, mask in split.masks.items()}
        return Plan(training=Training(split=split.with_masks(masks)), prediction=NEWCOMERS, by_element=True)

    return Method(name="all-personal", base=base, options={"layers": list(layers), "norm": norm, "head": head})


def given_split(*, masks: Mapping[Any, Sequence[bool] | str], norm: str = "follow") -> Method:
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

    def base(anatomy: Anatomy) -> Plan:
        known: dict[str, Mask] = {anatomy.layer(key).name: mask_of(text) for key, text in texts.items()}
        if len(known) < len(texts):
            raise ConfigError(f"masks has two masks for one layer: {texts}")
        split = _split_of(anatomy, anatomy.select(known), norm, "shared")
        return Plan(training=Training(split=split.with_masks(known)), prediction=NEWCOMERS, by_element=True)

    return Method(name="given", base=base, options={"masks": texts, "norm": norm})


def _by_element(
    name: str,
    rule: Callable[[Anatomy, tuple[Layer, ...], Thresholds], Rule],
    placement: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    every_round: bool,
    probe_all: bool = False,
) -> Method:
    """A method that splits the layers in Λ by a rule; values are checked now, layers with the model."""
    layers, tau, norm, head = (placement[key] for key in ("layers", "tau", "norm", "head"))
    _check_placement(layers, norm, head)
    for value in tau.values() if isinstance(tau, Mapping) else [tau]:
        Threshold.parse(value)

    def base(anatomy: Anatomy) -> Plan:
        asked = _chosen(anatomy, layers, head)
        wanted = per_layer("tau", tau, anatomy, asked)
        thresholds = {layer: Threshold.parse(value) for layer, value in wanted.items()}
        # with τ = 0 nothing can become personal: nothing is measured, and clients keep nothing
        thresholds = {layer: t for layer, t in thresholds.items() if norm == "personal" or not t.shares_all}
        chosen = tuple(layer for layer in asked if layer.name in thresholds)
        split = _split_of(anatomy, chosen, norm, head)
        deciding = None
        if chosen:
            deciding = Deciding(rule=rule(anatomy, asked, thresholds), every_round=every_round, probe_all=probe_all)
        # where clients keep no weights, each member of an ensemble would be the global model
        prediction = NEWCOMERS if split.kept else replace(NEWCOMERS, newcomer_rules=("adapt",))
        return Plan(training=Training(split=split, deciding=deciding), prediction=prediction, by_element=True)

    return Method(name=name, base=base, options={**placement, "layers": list(layers), **options})


def _check_placement(layers: Any, norm: str, head: str) -> None:
    if isinstance(layers, str | int):
        raise ConfigError(f"layers is {layers!r}; give a list of layer numbers or names, such as [{layers!r}]")
    if norm not in NORM_OPTIONS:
        raise ConfigError(f"norm is {norm!r}. {did_you_mean(norm, NORM_OPTIONS)}")
    if head not in HEADS:
        raise ConfigError(f"head is {head!r}. {did_you_mean(head, HEADS)}")


def _chosen(anatomy: Anatomy, layers: Sequence[LayerKey], head: str) -> tuple[Layer, ...]:
    """The layers in Λ, in the model's order."""
    chosen = anatomy.select(layers)
    if head == "personal" and anatomy.head in chosen:
        raise ConfigError(f"the head {anatomy.head.name!r} cannot be both personal and one of the layers to split")
    return chosen


def _split_of(anatomy: Anatomy, chosen: tuple[Layer, ...], norm: str, head: str) -> Split:
    """The chosen layers by element, all shared at first, and the head as asked for."""
    return Split.of(anatomy, layers=chosen, personal=anatomy.last(1) if head == "personal" else (), norm=norm)
