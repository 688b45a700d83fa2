"""FedFac (paper 4, algorithms 1 and 2) and the controls that differ from it only in the rule.

Layers in Λ are split element by element; everything else is shared. *Static* (algorithm 1): a cohort trains
once from the common start W⁰, one factor analysis of its weights fixes the masks, training restarts from
W⁰. *Dynamic* (algorithm 2): factor analysis of the cohort's weights after every round's local training,
before the aggregation.

Where we differ from the paper's text, and why: the correlation comes from sums over clients (module
``moments``); Σ_ε is diagonal (module ``factor``); an element that has just become shared takes the weighted
mean of the cohort's weights, since a sum of updates is not defined for it; Λ may include the head.

FedFac+ is FedFac with switches that the paper does not have, each of which can be turned off: a warm-up, moments and
masks that change slowly, a server with momentum, clients that are held near it if the network normalises nothing,
class frequencies as a prior, a mean of the shared part over rounds, normalisation by a client's own statistics, and
personal elements that all clients train together and each makes its own from there before it predicts. All of it runs
in FedFac's protocol: the server needs only sums over clients. What each is worth: docs/fedfac-plus.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedfac.anatomy import Anatomy, Layer, LayerKey
from fedfac.errors import ConfigError, did_you_mean
from fedfac.factor import ESTIMATORS, check_kappa
from fedfac.method import PERSONAL, Method, Phase, Plan, at_least_zero, refreshed
from fedfac.methods.averaging import held_near
from fedfac.methods.common_prior import with_frequencies
from fedfac.methods.own_statistics import with_statistics
from fedfac.methods.prior import with_prior
from fedfac.rules import (
    FactorRule,
    RandomRule,
    Rule,
    Threshold,
    VarianceRule,
    check_decay,
    check_solver,
    per_layer,
)
from fedfac.split import NORM_OPTIONS, Mask, Split, mask_of, mask_text

Tau = str | float | Mapping[LayerKey, str | float]
Kappa = float | Mapping[LayerKey, float]
LAST_HIDDEN = (-2,)
SCHEDULES = ("dynamic", "static")
HEADS = ("shared", "personal", "split", "copy")
ELEMENTS = ("personal", "refreshed")
REFRESHES = ("personal", "head", "all")
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
    solver: str = "warm",
    norm: str = "follow",
    head: str = "shared",
    elements: str = "personal",
    warmup: int = 0,
    decay: float = 0.0,
    hysteresis: float = 0.0,
    refresh_epochs: int = 0,
    refresh: str = "personal",
    refresh_lr: float = 1.0,
    shrinkage: float = 0.0,
    mu: float | None = 0.0,
    prior: float = 0.0,
    smoothing: str = "fixed",
    average: float = 0.0,
    pull: float = 0.0,
    statistics: float = 0.0,
    server_momentum: float = 0.0,
    probe_all: bool = False,
    eta_g: float = 1.0,
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
        The last layer: ``"shared"`` (the paper), ``"personal"`` beside the split, ``"split"`` itself, by class, or
        ``"copy"``: shared, but every client trains on from a copy of its own, and meets the shared one when it
        predicts (see ``pull``). Under label skew a head of one's own, or one that is refreshed, is worth more than
        anything else.
    elements
        The personal elements of the layers in Λ: ``"personal"`` (they stay with their client: the paper), or
        ``"refreshed"``: all clients train them together, as everything else, and a client makes its own of them in the
        refresh before it predicts. Then a client keeps no weights from round to round, and a newcomer has all that
        the others have.
    warmup
        So many rounds share everything, the head too, so that personal parts start from a good common point.
    decay
        Moments are sums over this round's clients, plus ``decay`` times the sums of the round before, and so on.
    hysteresis
        An element changes sides only if its communality passes τ by this margin, in ranks (see
        :class:`fedfac.rules.Threshold`): .1 at τ = 50 % means into the upper, or the lower, 40 %.
    refresh_epochs
        Before a client predicts, a copy of its model trains its personal part for so many epochs, the shared part
        frozen: the shared part has moved since the client last trained.
    refresh
        What a refresh trains, and a newcomer that adapts: the ``"personal"`` part, that and the ``"head"`` (which may
        be shared in training), or ``"all"``, as FedAvg+ does.
    refresh_lr
        The learning rate of a refresh, as a share of the run's.
    shrinkage
        After the refresh, what it trained moves that share of the way back to where it began: for shared numbers, to
        what all clients have trained together (empirical Bayes: the prior).
    mu
        FedProx's term: ½μ‖w − wᵗ‖² is added to a client's loss and holds it near what it received, for federations in
        which weights run away from round to round. None: .01 where the network normalises nothing, else 0.
    prior
        Class frequencies: so much of log π_c is added to client c's outputs, so that weights need not learn which
        classes a client has (:mod:`fedfac.methods.prior`). With ``head="copy"`` only in prediction, and only as far as
        it makes the client's own training samples more likely. Without classes: nothing.
    smoothing
        What is added to a client's counts of classes: half a sample of each (``"fixed"``), or as many samples as all
        clients together find best, of frequencies that they have in common (``"learned"``,
        :mod:`fedfac.methods.common_prior`): for clients with few samples of many classes.
    average
        Clients predict with a mean of the server's states over rounds, in which the past weighs so much (.9: about
        the last ten rounds); they go on training from the last one.
    pull
        With ``head="copy"``: before a client predicts (and before the refresh), its copy moves that share of the way
        to the shared head, the mean of all; at 1 the refresh begins there.
    statistics
        Normalisation: before a client predicts, the running means and variances move that share of the way to those
        of its own training samples (:mod:`fedfac.methods.own_statistics`).
    server_momentum
        The server takes so much of its last step once more (:func:`fedfac.aggregate.with_momentum`): with few clients
        a round, the shared part gets further in as many rounds.
    probe_all
        Static only: let all clients train for the one factor analysis instead of one cohort.
    eta_g
        η_g, the server's rate.
    """
    return _factor_split("fedfac" if schedule == "dynamic" else "fedfac-static", **locals())


def fedfac_plus(
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
    elements: str = "refreshed",
    warmup: int = 0,
    decay: float = 0.9,
    hysteresis: float = 0.1,
    refresh_epochs: int = 3,
    refresh: str = "personal",
    refresh_lr: float = 1.0,
    shrinkage: float = 0.0,
    mu: float | None = None,
    prior: float = 1.0,
    smoothing: str = "fixed",
    average: float = 0.9,
    pull: float = 1.0,
    statistics: float = 0.5,
    server_momentum: float = 0.5,
    probe_all: bool = False,
    eta_g: float = 1.0,
) -> Method:
    """FedFac+: :func:`fedfac` with its switches on; the parameters are the same.

    With ``elements="personal"`` and the numbers (``mu`` too) at 0 it is FedFac, bit by bit.
    """
    return _factor_split("fedfac-plus", **locals())


def _factor_split(
    name: str,
    *,
    layers: Sequence[LayerKey],
    kappa: Kappa,
    schedule: str,
    estimator: str,
    on: str,
    solver: str,
    decay: float,
    probe_all: bool,
    **common: Any,
) -> Method:
    for option, value, known in (
        ("schedule", schedule, SCHEDULES),
        ("estimator", estimator, ESTIMATORS),
    ):
        if value not in known:
            raise ConfigError(f"{option} is {value!r}. {did_you_mean(value, known)}")
    for share in kappa.values() if isinstance(kappa, Mapping) else [kappa]:
        check_kappa(share)
    check_solver(solver)
    check_decay(decay)
    if probe_all and common["warmup"]:
        raise ConfigError("probe_all looks at all clients before the first round; with a warm-up there is no such look")

    def rule(anatomy: Anatomy, chosen: tuple[Layer, ...], thresholds: Mapping[str, Threshold]) -> Rule:
        shares = per_layer("kappa", kappa, anatomy, chosen)
        return FactorRule(thresholds, shares, estimator, on, solver, decay)

    return _by_element(
        name,
        rule,
        layers=layers,
        every_round=schedule == "dynamic",
        probe_all=probe_all,
        options={
            "kappa": kappa,
            "schedule": schedule,
            "estimator": estimator,
            "on": on,
            "solver": solver,
            "decay": decay,
            "probe_all": probe_all,
        },
        **common,
    )


def random_split(
    *,
    layers: Sequence[LayerKey] = LAST_HIDDEN,
    tau: Tau = "50%",
    redraw: bool = False,
    norm: str = "follow",
    head: str = "shared",
    warmup: int = 0,
    refresh_epochs: int = 0,
    prior: float = 0.0,
    eta_g: float = 1.0,
) -> Method:
    """A random split in place of factor analysis: fixed (drawn once) or redrawn every round."""
    return _by_element(
        "random-redrawn" if redraw else "random",
        lambda anatomy, chosen, thresholds: RandomRule(thresholds, redraw),
        layers=layers,
        tau=tau,
        norm=norm,
        head=head,
        warmup=warmup,
        refresh_epochs=refresh_epochs,
        prior=prior,
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
    head: str = "shared",
    warmup: int = 0,
    hysteresis: float = 0.0,
    refresh_epochs: int = 0,
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
        head=head,
        warmup=warmup,
        hysteresis=hysteresis,
        refresh_epochs=refresh_epochs,
        every_round=schedule == "dynamic",
        eta_g=eta_g,
        options={"schedule": schedule},
    )


def all_personal(
    *,
    layers: Sequence[LayerKey] = LAST_HIDDEN,
    norm: str = "follow",
    head: str = "shared",
    warmup: int = 0,
    refresh_epochs: int = 0,
    prior: float = 0.0,
    eta_g: float = 1.0,
) -> Method:
    """The layers in Λ are wholly personal: FedFac with τ = inf, without its factor analysis."""
    at_least_zero(warmup=warmup, refresh_epochs=refresh_epochs)

    def plan(anatomy: Anatomy) -> Plan:
        split = _split_of(anatomy, _chosen(anatomy, layers, head), norm, head)
        masks = {name: (False,) * len(mask) for name, mask in split.masks.items()}
        return Plan(split=split.with_masks(masks), warmup=warmup, refresh=refreshed(refresh_epochs), **_NEWCOMERS)

    options = {"layers": list(layers), "norm": norm, "head": head, "warmup": warmup, "refresh_epochs": refresh_epochs}
    options |= {"prior": prior, "eta_g": eta_g}
    method = Method(
        name="all-personal",
        plan=plan,
        server_rate=eta_g,
        options=options,
        predicts=frozenset({"refresh_epochs"}),
    )
    return with_prior(method, prior)


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

    def plan(anatomy: Anatomy) -> Plan:
        known: dict[str, Mask] = {anatomy.layer(key).name: mask_of(text) for key, text in texts.items()}
        if len(known) < len(texts):
            raise ConfigError(f"masks has two masks for one layer: {texts}")
        split = _split_of(anatomy, anatomy.select(known), norm, "shared")
        return Plan(split=split.with_masks(known), **_NEWCOMERS)

    options = {"masks": texts, "norm": norm, "eta_g": eta_g}
    return Method(name="given", plan=plan, server_rate=eta_g, options=options)


def _chosen(anatomy: Anatomy, layers: Sequence[LayerKey], head: str) -> tuple[Layer, ...]:
    """The layers in Λ, in the model's order."""
    if head not in HEADS:
        raise ConfigError(f"head is {head!r}. {did_you_mean(head, HEADS)}")
    chosen = anatomy.select([*layers, -1] if head == "split" else layers)
    if head in ("personal", "copy") and anatomy.head in chosen:
        kind = "personal" if head == "personal" else "copied"
        raise ConfigError(f"the head {anatomy.head.name!r} cannot be both {kind} and one of the layers to split")
    return chosen


def _split_of(
    anatomy: Anatomy, chosen: tuple[Layer, ...], norm: str, head: str, elements: str = "personal", pull: float = 0.0
) -> Split:
    """The chosen layers by element, all shared at first, and the head as asked for."""
    split = Split.of(anatomy, layers=chosen, personal=anatomy.last(1) if head == "personal" else (), norm=norm)
    copies = dict.fromkeys(sorted(anatomy.last(1)), pull) if head == "copy" else {}
    return replace(split, copies=copies, anew=elements == "refreshed")


def _by_element(
    name: str,
    rule: Callable[[Anatomy, tuple[Layer, ...], Mapping[str, Threshold]], Rule],
    *,
    layers: Sequence[LayerKey],
    tau: Tau,
    norm: str,
    head: str,
    warmup: int,
    refresh_epochs: int,
    every_round: bool,
    eta_g: float,
    options: dict[str, Any],
    elements: str = "personal",
    refresh: str = "personal",
    refresh_lr: float = 1.0,
    shrinkage: float = 0.0,
    hysteresis: float = 0.0,
    mu: float | None = 0.0,
    prior: float = 0.0,
    smoothing: str = "fixed",
    average: float = 0.0,
    pull: float = 0.0,
    statistics: float = 0.0,
    server_momentum: float = 0.0,
    probe_all: bool = False,
) -> Method:
    """A method that splits the layers in Λ by a rule; values are checked now, layers with the model."""
    if isinstance(layers, str | int):
        raise ConfigError(f"layers is {layers!r}; give a list of layer numbers or names, such as [{layers!r}]")
    if norm not in NORM_OPTIONS:
        raise ConfigError(f"norm is {norm!r}. {did_you_mean(norm, NORM_OPTIONS)}")
    if head not in HEADS:
        raise ConfigError(f"head is {head!r}. {did_you_mean(head, HEADS)}")
    if elements not in ELEMENTS:
        raise ConfigError(f"elements is {elements!r}. {did_you_mean(elements, ELEMENTS)}")
    if refresh not in REFRESHES:
        raise ConfigError(f"refresh is {refresh!r}. {did_you_mean(refresh, REFRESHES)}")
    if not 0 <= pull <= 1:
        raise ConfigError(f"pull is {pull}; it is a number from 0 (not at all) to 1 (all the way to the shared head)")
    if not 0 <= hysteresis <= 1:
        raise ConfigError(f"hysteresis is {hysteresis}; the margin is a number from 0 (none) to 1, in ranks")
    at_least_zero(warmup=warmup, refresh_epochs=refresh_epochs)
    for value in tau.values() if isinstance(tau, Mapping) else [tau]:
        Threshold.parse(value)

    def plan(anatomy: Anatomy) -> Plan:
        beside = anatomy.last(1) if refresh == "head" else frozenset()
        makes_own = Phase(
            trains=None if refresh == "all" else PERSONAL, beside=beside, gentle=refresh_lr, back=shrinkage
        )
        rest: dict[str, Any] = {**_NEWCOMERS, "warmup": warmup, "average": average}
        rest |= {"refresh": refreshed(refresh_epochs, makes_own), "newcomer": (makes_own,)}
        asked = _chosen(anatomy, layers, head)
        wanted = per_layer("tau", tau, anatomy, asked)
        thresholds = {layer: Threshold.parse(value, hysteresis) for layer, value in wanted.items()}
        # with τ = 0 nothing can become personal: nothing is measured, and clients keep nothing
        thresholds = {layer: t for layer, t in thresholds.items() if norm == "personal" or not t.shares_all}
        chosen = tuple(layer for layer in asked if layer.name in thresholds)
        split = _split_of(anatomy, chosen, norm, head, elements, pull)
        if not split.kept:
            rest["newcomer_rules"] = ("adapt",)  # clients keep no weights: each member would be the global model
        if not chosen:
            return Plan(split=split, **rest)
        return Plan(
            split=split,
            rule=rule(anatomy, asked, thresholds),
            every_round=every_round,
            probe_all=probe_all,
            **rest,
        )

    recorded: dict[str, Any] = {
        "layers": list(layers),
        "tau": tau,
        "norm": norm,
        "head": head,
        "elements": elements,
        "warmup": warmup,
    }
    recorded |= {"hysteresis": hysteresis, "refresh_epochs": refresh_epochs, "refresh": refresh, "mu": mu}
    recorded |= {"refresh_lr": refresh_lr, "shrinkage": shrinkage, "prior": prior, "smoothing": smoothing}
    recorded |= {"average": average, "pull": pull, "statistics": statistics, "server_momentum": server_momentum}
    recorded |= {"eta_g": eta_g, **options}
    predicts = {"refresh_epochs", "refresh", "refresh_lr", "shrinkage", "average", "pull", "statistics"}
    predicts |= {"prior"} if head == "copy" else set()
    trains_as = "fedfac" if name.startswith("fedfac") else None
    if elements == "refreshed" and every_round and head == "shared" and norm != "personal":
        # all train everything: the split says what they make their own later
        trains_as, trains = ("fedavg", set()) if mu == 0 else ("fedprox", {"mu"})
        trains |= {"server_momentum", "eta_g"} | ({"prior", "smoothing"} if prior else set())
        predicts = set(recorded) - trains
    method = Method(
        name=name,
        plan=plan,
        server_rate=eta_g,
        server_momentum=server_momentum,
        options=recorded,
        predicts=frozenset(predicts),
        trains_as=trains_as,
    )
    method = with_frequencies(method, prior, smoothing, trained=head != "copy")
    return with_statistics(held_near(method, mu), statistics)
