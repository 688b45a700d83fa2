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
from typing import Any

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
from fedfac.studies import simulation_figures, simulation_page
from fedfac.studies.frame import Ask, Finding, Row
from fedfac.studies.simulated import SETTINGS, World, communality

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
            "accuracy": partial(simulation_figures.accuracy, balanced["curves"]),
            "kept": partial(simulation_figures.kept, balanced["kept"]),
            "recovery": partial(simulation_figures.recovery, balanced["recovery"]),
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
