"""Can factor analysis find the true decomposition, and does it matter? (paper 4.3)

Eight ways to split the hidden layer of one MLP, on the paper's simulated federation (module ``simulated``), from the
same start and with the same cohorts: the true split, the *oracle* (factor analysis of the true parameters), FedFac
static and dynamic, a random split drawn once and one redrawn every round, everything shared (FedAvg), nothing shared
(local). All but the last two share p·m neurons (τ is the quantile 1 − p of ν), so that only *which* ones differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from fedfac import methods, models
from fedfac.anatomy import Anatomy, Layer
from fedfac.data.federation import Federation
from fedfac.factor import ESTIMATORS
from fedfac.method import Method
from fedfac.rounds import fit
from fedfac.rules import Threshold
from fedfac.run import RunDirectory
from fedfac.state import state_of
from fedfac.studies import figures, simulation_page
from fedfac.studies.frame import Ask, Finding, Row
from fedfac.studies.simulated import World, communality

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BY_P = ((0.3, 0.4), (0.5, 0.4), (0.7, 0.4))  # (p, α): the paper's upper row
BY_ALPHA = ((0.5, 0.2), (0.5, 0.4), (0.5, 0.8))  # and its lower row
SETTINGS = tuple(dict.fromkeys((*BY_P, *BY_ALPHA)))
METHODS = ("true", "oracle", "fedfac-static", "fedfac", "random", "random-redrawn", "fedavg", "local")
USUAL = ("principal-axis", 0.85)  # estimator and κ that decide
KAPPAS = (0.5, 0.75, USUAL[1], 0.95)
LAYER = "fc1"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What the paper leaves open, and the size of the problem."""

    clients: int = 100
    inputs: int = 100
    hidden: int = 200
    samples: int = 100  # for training; as many more for testing
    noise: float = 1.0
    rounds: int = 40
    rate: float = 0.1
    epochs: int = 5
    batch_size: int = 50
    evaluate_every: int = 5
    seeds: int = 2

    def world(self, p: float, alpha: float, seed: int) -> World:
        """The federation of one setting."""
        return World(
            p=p,
            alpha=alpha,
            seed=seed,
            clients=self.clients,
            inputs=self.inputs,
            hidden=self.hidden,
            train=self.samples,
            test=self.samples,
            noise=self.noise,
        )


FULL = Scale()
QUICK = Scale(
    clients=16,
    inputs=20,
    hidden=40,
    samples=60,
    rounds=10,
    rate=0.25,
    epochs=3,
    batch_size=30,
    evaluate_every=2,
    seeds=1,
)


def study(ask: Ask) -> Finding:
    """Train everything, and write down accuracies, kept shares and how well the true set is found."""
    scale = QUICK if ask.quick else FULL
    seeds = ask.seed_list(scale.seeds)
    worlds = [scale.world(p, alpha, seed) for seed in seeds for p, alpha in SETTINGS]
    worlds += [replace(scale.world(0.5, 0.4, seed), balanced=False) for seed in seeds[:1]]
    curves: list[Row] = []
    kept: list[Row] = []
    recovery: list[Row] = []
    with ask.steps("simulation", len(worlds) * len(METHODS)) as progress:
        for world in worlds:
            bench = Bench.of(world)
            recovery += bench.recovery("true parameters", bench.oracle)
            for name in METHODS:
                own = bench.train(name, scale, ask)
                curves += own.curve
                kept += own.kept
                recovery += own.recovery
                progress.step(f"p = {world.p}, α = {world.alpha}, seed {world.seed}: {name}")
    labels = label_balance(scale, seed=ask.seed)
    return present({"curves": curves, "kept": kept, "recovery": recovery, "labels": labels}, scale, seeds)


def present(tables: Mapping[str, Sequence[Row]], scale: Scale, seeds: Sequence[int]) -> Finding:
    """Figures and words for what was computed."""
    balanced = {name: [row for row in rows if row["balanced"]] for name, rows in tables.items()}
    return Finding(
        tables=tables,
        figures={
            "accuracy": partial(draw_accuracy, balanced["curves"]),
            "kept": partial(draw_kept, balanced["kept"]),
            "recovery": partial(draw_recovery, balanced["recovery"]),
        },
        page=simulation_page.page(tables, scale, seeds),
        summary=simulation_page.summary(tables),
    )


@dataclass(frozen=True)
class Rows:
    """What one method leaves: its accuracy by round, the share of neurons kept, and what its weights tell."""

    curve: list[Row]
    kept: list[Row]
    recovery: list[Row]


@dataclass(frozen=True)
class Bench:
    """One federation, the start W⁰ that all methods share, and ν of the true parameters by (estimator, κ)."""

    world: World
    federation: Federation
    model: nn.Module
    layer: Layer
    oracle: Mapping[tuple[str, float], Tensor]

    @classmethod
    def of(cls, world: World) -> Bench:
        """Make the data and the model, and analyse the true parameters."""
        model = models.build("mlp", shape=(world.inputs,), classes=2, seed=world.seed, hidden=world.hidden)
        layer = Anatomy.of(model).layer(LAYER)
        (weight,) = (rows.tensor for rows in layer.weights)
        true = [{weight: torch.from_numpy(world.weights(client))} for client in range(world.clients)]
        oracle = {(e, k): communality(layer, true, kappa=k, estimator=e) for e in ESTIMATORS for k in KAPPAS}
        return cls(world, world.federation(), model, layer, oracle)

    def method(self, name: str) -> Method:
        """The method with as many shared neurons as there truly are."""
        tau = f"{100 * (1 - self.world.shared_hidden / self.world.hidden):g}%"
        if name == "true":
            return methods.given_split(masks={LAYER: self.world.mask})
        if name == "oracle":
            return methods.given_split(masks={LAYER: Threshold.parse(tau).cut(self.oracle[USUAL])[0]})
        if name in ("fedavg", "local"):
            return methods.build(name)
        kappa = {"kappa": USUAL[1]} if name.startswith("fedfac") else {}
        return methods.build(name, {"layers": [LAYER], "tau": tau, **kappa})

    def train(self, name: str, scale: Scale, ask: Ask) -> Rows:
        """One method from the common start."""
        with TemporaryDirectory() as folder:
            out = Path(folder) / "run" if name.startswith("fedfac") else None  # a run directory keeps the scores
            result = fit(
                self.model,
                self.federation,
                method=self.method(name),
                rounds=scale.rounds,
                rate=scale.rate,
                epochs=scale.epochs,
                batch_size=scale.batch_size,
                seed=self.world.seed,
                evaluate_every=scale.evaluate_every,
                lanes=ask.lanes,
                device=ask.device,
                out=out,
            )
            scores = {} if out is None else {t: own for t, own in RunDirectory.read(out).scores().items() if own}
        key = self._key() | {"method": name}
        curve = [{**key, "round": r["round"], "accuracy": r["test"]["accuracy"]} for r in result.records if "test" in r]
        # from round 2 on: before the first decision everything is shared
        moves = result.records[1:] if name in ("fedfac", "random-redrawn") else []
        kept = [{**key, "round": r["round"], "kept": r["split"][LAYER]["kept"]} for r in moves]
        found = {}
        if name == "true":
            states = [result.state(client) for client in range(self.world.clients)]
            found = {"trained under the true split": communality(self.layer, states, kappa=USUAL[1])}
        elif scores:
            where = "before round 1 (static)" if name == "fedfac-static" else "last round (dynamic)"
            found = {where: torch.tensor(scores[max(scores)][LAYER], dtype=torch.float64)}
        recovery = [row for where, nu in found.items() for row in self.recovery(where, {USUAL: nu})]
        return Rows([*curve], [*kept], recovery)

    def recovery(self, weights: str, found: Mapping[tuple[str, float], Tensor]) -> list[Row]:
        """How ν ranks the truly shared neurons, and how it agrees with ν of the untrained start."""
        start = communality(self.layer, [state_of(self.model)], kappa=USUAL[1])
        return [
            {
                **self._key(),
                "weights": weights,
                "estimator": estimator,
                "kappa": kappa,
                "auc": float(roc_auc_score(self.world.mask, nu.numpy())),
                "start": float(spearmanr(start.numpy(), nu.numpy()).statistic),
            }
            for (estimator, kappa), nu in found.items()
        ]

    def _key(self) -> dict[str, Any]:
        world = self.world
        return {"p": world.p, "alpha": world.alpha, "seed": world.seed, "balanced": world.balanced}


def label_balance(scale: Scale, *, seed: int, draws: int = 10) -> list[Row]:
    """How often a client's most frequent label occurs, as the generator is written and with a balanced a."""
    return [
        {"p": p, "alpha": alpha, "seed": number, "balanced": balanced, "majority": world.majority()}
        for p, alpha in SETTINGS
        for number in range(seed, seed + draws)
        for balanced in (False, True)
        for world in [replace(scale.world(p, alpha, number), balanced=balanced)]
    ]


def _mean_curve(rows: Sequence[Row], value: str) -> tuple[list[int], list[float]]:
    by_round: dict[int, list[float]] = {}
    for row in rows:
        by_round.setdefault(row["round"], []).append(row[value])
    return list(by_round), [float(np.mean(values)) for values in by_round.values()]


def _at(rows: Sequence[Row], p: float, alpha: float, method: str) -> list[Row]:
    return [r for r in rows if (r["p"], r["alpha"], r["method"]) == (p, alpha, method)]


_LOOK: Mapping[str, dict[str, Any]] = {
    "true": {"color": figures.COLOURS[6], "linewidth": 3.0, "alpha": 0.35},
    "oracle": {"color": figures.COLOURS[5], "linestyle": "--"},
    "fedfac-static": {"color": figures.COLOURS[0]},
    "fedfac": {"color": figures.COLOURS[1]},
    "random": {"color": figures.COLOURS[2], "linestyle": "--"},
    "random-redrawn": {"color": figures.COLOURS[2], "linestyle": ":"},
    "fedavg": {"color": figures.COLOURS[4]},
    "local": {"color": figures.COLOURS[3], "linestyle": "-."},
}


def draw_accuracy(rows: Sequence[Row]) -> Figure:
    """The paper's figure: test accuracy by round, p varied above, α below; the mean over seeds."""
    figure, axes = figures.panels(2, 3, width=3.0, height=2.6, sharex=True, sharey=True)
    for line, settings in enumerate((BY_P, BY_ALPHA)):
        for column, (p, alpha) in enumerate(settings):
            own: Axes = axes[line, column]
            for name in METHODS:
                own.plot(*_mean_curve(_at(rows, p, alpha, name), "accuracy"), label=name, **_LOOK[name])
            title = f"p = {p} (α = {alpha})" if line == 0 else f"α = {alpha} (p = {p})"
            figures.label(own, "round", "test accuracy", title)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    return figure


def draw_kept(rows: Sequence[Row]) -> Figure:
    """The share of neurons that keep their side from one round to the next."""
    figure, axes = figures.panels(1, 2, width=4.0, height=3.0, sharey=True)
    for column, (settings, varied) in enumerate(((BY_P, 0), (BY_ALPHA, 1))):
        own: Axes = axes[0, column]
        for number, setting in enumerate(settings):
            colour = figures.COLOURS[number]
            name = f"{'pα'[varied]} = {setting[varied]}"
            own.plot(*_mean_curve(_at(rows, *setting, "fedfac"), "kept"), color=colour, label=f"{name}, fedfac")
            redrawn = _mean_curve(_at(rows, *setting, "random-redrawn"), "kept")
            own.plot(*redrawn, color=colour, linestyle=":", label=f"{name}, random-redrawn")
        figures.label(own, "round", "share of neurons that keep their side", f"{'pα'[varied]} varied")
        own.set_ylim(0, 1.03)
        own.legend(ncols=2, fontsize=7, loc="lower right")
    return figure


def draw_recovery(rows: Sequence[Row]) -> Figure:
    """AUC of ν for the true shared set: of the true parameters by κ, and of trained weights."""
    figure, axes = figures.panels(1, 2, width=4.2, height=3.0, sharey=True)
    left, right = axes[0]
    true = [row for row in rows if row["weights"] == "true parameters"]
    for number, estimator in enumerate(ESTIMATORS):
        values = [[r["auc"] for r in true if (r["estimator"], r["kappa"]) == (estimator, kappa)] for kappa in KAPPAS]
        colour = figures.COLOURS[number]
        left.plot(KAPPAS, [np.mean(v) for v in values], marker="o", markersize=4, color=colour, label=estimator)
        left.fill_between(KAPPAS, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, lw=0)
    figures.label(left, "κ", "AUC of ν for the true shared set", "true parameters (mean, range)")
    left.legend()
    trained = list(dict.fromkeys(row["weights"] for row in rows if row["weights"] != "true parameters"))
    for place, where in enumerate(trained):
        values_here = [row["auc"] for row in rows if row["weights"] == where]
        spread = place + np.linspace(-0.2, 0.2, len(values_here))
        right.scatter(spread, values_here, s=14, color=figures.COLOURS[place], label=where)
    figures.label(right, "weights analysed", "AUC of ν for the true shared set", f"trained weights (κ = {USUAL[1]})")
    right.set_xticks(range(len(trained)), [where.replace(" ", "\n", 1).replace(" (", "\n(") for where in trained])
    for own in (left, right):
        own.axhline(0.5, color="#666666", linewidth=0.8)
        own.set_ylim(0, 1.03)
    return figure
