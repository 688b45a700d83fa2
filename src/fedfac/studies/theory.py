"""What the theorems say, beside what happens (paper 3.3).

Two-layer ReLU networks (module ``tangent``) trained by parallel gradient descent: FedSplit (model (4)), FedAvg with
one network of the same width, and FedAvg with the *two* networks of model (4), both shared. The last one is a control
that the paper does not have: model (4) adds two normalised networks, so that its kernel is a sum of two, and a
faster rate is due to that before anything is personal.

Step size: Theorem 1 allows η_l of the order (λ^s + λ^p) / (γ^sγ^pGN²). That is so small that nothing would be seen to
move; training uses η_l = 1 / (G(λ_max(H^s)/C + λ_max(H^p))), for all three alike, and the page says what the theorem's
step would mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from fedfac.studies import figures, theory_page
from fedfac.studies.frame import Ask, Finding, Row
from fedfac.studies.tangent import (
    Part,
    Problem,
    Rates,
    Spectrum,
    complexity,
    fedavg,
    fedsplit,
    gram,
    kernel,
    outputs,
    own_blocks,
    step,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NETWORKS = ("FedSplit", "FedAvg", "FedAvg, two networks")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes: of the base problem, of what is varied around it, and of the study of generalisation."""

    clients: int = 10
    samples: int = 10
    inputs: int = 20
    width: int = 400  # of each part of model (4)
    wide: int = 1500  # of each part where the bound is drawn
    local_steps: int = 5
    rounds: int = 100
    effect_rounds: int = 40
    by_clients: tuple[int, ...] = (2, 5, 10, 20)
    by_samples: tuple[int, ...] = (5, 10, 20, 40)
    by_width: tuple[int, ...] = (50, 200, 800, 3200)
    total: int = 120  # N, where C is varied and N is not
    split_into: tuple[int, ...] = (2, 4, 6, 12, 20)
    start: float = 0.1  # α of Theorem 2
    seeds: int = 3


FULL = Scale()
QUICK = Scale(
    clients=4,
    samples=5,
    inputs=8,
    width=100,
    wide=1000,
    local_steps=2,
    rounds=60,
    effect_rounds=20,
    by_clients=(2, 4, 8),
    by_samples=(3, 5, 10),
    by_width=(50, 200, 800),
    total=40,
    split_into=(2, 4, 10),
    seeds=2,
)


@dataclass(frozen=True)
class Kernels:
    """The infinite-width kernels of a problem, and the step size that they allow."""

    shared: Tensor
    personal: Tensor
    s: Spectrum
    p: Spectrum
    eta_l: float
    rates: Rates

    @classmethod
    def of(cls, problem: Problem, local_steps: int) -> Kernels:
        """In closed form."""
        shared = kernel(problem.x)
        personal = own_blocks(shared, problem.clients)
        s, p = Spectrum.of(shared), Spectrum.of(personal)
        eta_l = 1 / (local_steps * (s.largest / problem.clients + p.largest))
        return cls(shared, personal, s, p, eta_l, Rates.of(eta_l, local_steps, problem.clients))

    def bound(self, name: str) -> float:
        """The factor by which Theorem 1 (for FedAvg: Huang et al. 2021) lets the squared error shrink in a round."""
        shared = 2 * self.s.smallest if name == NETWORKS[2] else self.s.smallest
        return self.rates.bound(shared, self.p.smallest if name == NETWORKS[0] else 0.0)

    def linear(self, name: str) -> Tensor:
        """The matrix that the residual is multiplied with in a round if kernels stay as they are in the limit."""
        one = torch.eye(len(self.shared), dtype=self.shared.dtype)
        if name == NETWORKS[0]:
            return one - self.rates.shared * self.shared - self.rates.personal * self.personal
        return one - (2 if name == NETWORKS[2] else 1) * self.rates.shared * self.shared

    def theorem_rounds(self, problem: Problem, local_steps: int) -> float:
        """How many rounds the bound needs to halve the error at the theorem's own step size (constant 1)."""
        total = problem.clients * problem.samples
        eta_l = (self.s.smallest + self.p.smallest) / (self.s.condition * self.p.condition * local_steps * total**2)
        rates = Rates.of(eta_l, local_steps, problem.clients)
        return 2 * math.log(2) / (rates.shared * self.s.smallest + rates.personal * self.p.smallest)


def network(name: str, problem: Problem, width: int, seed: int, scale: float = 1.0) -> list[Part]:
    """The start of one of the three networks; ``width`` is that of each part of model (4)."""
    inputs = problem.x.shape[2]
    if name == NETWORKS[0]:
        return fedsplit(inputs, problem.clients, personal=width, shared=width, seed=seed, scale=scale)
    return fedavg(inputs, widths=[width, width] if name == NETWORKS[2] else [2 * width], seed=seed, scale=scale)


def train(
    parts: Sequence[Part], problem: Problem, kernels: Kernels, scale: Scale, rounds: int
) -> list[tuple[list[Part], float]]:
    """The network and its squared training error after every round, from round 0 on."""
    path = []
    now = list(parts)
    for number in range(rounds + 1):
        path.append((now, float((outputs(now, problem.x) - problem.y).square().sum())))
        if number < rounds:
            now = step(now, problem.x, problem.y, eta_l=kernels.eta_l, local_steps=scale.local_steps)
    return path


def distance(matrix: Tensor, other: Tensor) -> float:
    """‖A − B‖₂ / ‖B‖₂."""
    return float(torch.linalg.matrix_norm(matrix - other, 2) / torch.linalg.matrix_norm(other, 2))


def study(ask: Ask) -> Finding:
    """Convergence beside the bound, what C, n and m change, and generalisation."""
    scale = QUICK if ask.quick else FULL
    seeds = ask.seed_list(scale.seeds)
    plan = _effects_plan(scale)
    with ask.steps("theory", len(NETWORKS) + (len(plan) + len(_complexity_plan(scale))) * len(seeds)) as progress:
        curves: list[Row] = []
        for name in NETWORKS:
            curves += convergence(name, scale, ask.seed)
            progress.step(f"convergence, {name}")
        effects: list[Row] = []
        generalisation: list[Row] = []
        for seed in seeds:
            for varied, sizes in plan:
                effects.append(effect(varied, sizes, scale, seed))
                progress.step(f"effect of {varied}, {sizes}, seed {seed}")
            for varied, sizes, noise in _complexity_plan(scale):
                generalisation.append(generalise(varied, sizes, noise, scale, seed))
                progress.step(f"generalisation, {sizes}, seed {seed}")
    return present({"convergence": curves, "effects": effects, "generalisation": generalisation}, scale, seeds)


def present(tables: dict[str, list[Row]], scale: Scale, seeds: Sequence[int]) -> Finding:
    """Figures and words for what was computed."""
    return Finding(
        tables=tables,
        figures={
            "convergence": partial(draw_convergence, tables["convergence"]),
            "effects": partial(draw_effects, tables["effects"]),
            "generalisation": partial(draw_generalisation, tables["generalisation"]),
        },
        page=theory_page.page(tables, scale, seeds),
        summary=theory_page.summary(tables),
    )


def _problem(sizes: dict[str, int], scale: Scale, seed: int, noise: float = 0.0) -> Problem:
    return Problem.draw(clients=sizes["clients"], samples=sizes["samples"], inputs=scale.inputs, seed=seed, noise=noise)


def _base(scale: Scale) -> dict[str, int]:
    return {"clients": scale.clients, "samples": scale.samples, "width": scale.width}


def convergence(name: str, scale: Scale, seed: int) -> list[Row]:
    """Theorem 1: the squared training error, its bound, the linear prediction, and how far kernels drift."""
    problem = _problem(_base(scale), scale, seed)
    kernels = Kernels.of(problem, scale.local_steps)
    path = train(network(name, problem, scale.wide, seed), problem, kernels, scale, scale.rounds)
    residual = (outputs(path[0][0], problem.x) - problem.y).reshape(-1)
    at_start = [gram(part, problem.x) for part in path[0][0]]
    rows: list[Row] = []
    for number, (parts, error) in enumerate(path):
        drift = {
            "personal" if part.personal else "shared": distance(gram(part, problem.x), before)
            for part, before in zip(parts, at_start, strict=True)
        }
        rows.append(
            {
                "network": name,
                "round": number,
                "error": error,
                "bound": kernels.bound(name) ** number * path[0][1],
                "prediction": float(residual.square().sum()),
                "drift_shared": drift["shared"],
                "drift_personal": drift.get("personal"),
                "theorem_rounds": kernels.theorem_rounds(problem, scale.local_steps),
            }
        )
        residual = kernels.linear(name) @ residual
    return rows


def _effects_plan(scale: Scale) -> list[tuple[str, dict[str, int]]]:
    varied = {"clients": scale.by_clients, "samples": scale.by_samples, "width": scale.by_width}
    return [(name, {**_base(scale), name: value}) for name, values in varied.items() for value in values]


def effect(varied: str, sizes: dict[str, int], scale: Scale, seed: int) -> Row:
    """Eigenvalues, the bound's rate and the measured one, and the kernels' distances, for one size."""
    problem = _problem(sizes, scale, seed)
    kernels = Kernels.of(problem, scale.local_steps)
    row: dict[str, Any] = {
        "varied": varied,
        **sizes,
        "seed": seed,
        "lambda_s": kernels.s.smallest,
        "lambda_p": kernels.p.smallest,
        "largest_s": kernels.s.largest,
        "largest_p": kernels.p.largest,
    }
    for name, short in zip(NETWORKS[:2], ("fedsplit", "fedavg"), strict=True):
        path = train(network(name, problem, sizes["width"], seed), problem, kernels, scale, scale.effect_rounds)
        row[f"{short}_bound"] = 1 - kernels.bound(name)
        row[f"{short}_measured"] = 1 - (path[-1][1] / path[0][1]) ** (1 / scale.effect_rounds)
        if name == NETWORKS[0]:
            limits = (kernels.personal, kernels.shared)
            first, last = ([gram(part, problem.x) for part in path[end][0]] for end in (0, -1))
            for kind, start, end, limit in zip(("personal", "shared"), first, last, limits, strict=True):
                row[f"start_{kind}"] = distance(start, limit)
                row[f"drift_{kind}"] = distance(end, start)
    return row


def _complexity_plan(scale: Scale) -> list[tuple[str, dict[str, int], float]]:
    """C varied with N fixed, n varied with C fixed; truths, and half of the responses random."""
    by_clients = [{"clients": c, "samples": scale.total // c, "width": scale.width} for c in scale.split_into]
    by_samples = [{**_base(scale), "samples": n} for n in scale.by_samples]
    return [
        (varied, sizes, noise)
        for varied, several in (("clients", by_clients), ("samples", by_samples))
        for sizes in several
        for noise in (0.0, 0.5)
    ]


def generalise(varied: str, sizes: dict[str, int], noise: float, scale: Scale, seed: int) -> Row:
    """Theorem 2: its complexity term, and the test error min(|h − y|, 1) of both networks from a small start."""
    problem = _problem(sizes, scale, seed, noise)
    kernels = Kernels.of(problem, scale.local_steps)
    found = complexity(problem.y, kernels.shared + kernels.personal, problem.clients)
    row: dict[str, Any] = {"varied": varied, **sizes, "noise": noise, "seed": seed, "complexity": found}
    row["without_c"] = found / problem.clients
    row["zero_error"] = float(problem.y_test.abs().clamp(max=1).mean())
    for name, short in zip(NETWORKS[:2], ("fedsplit", "fedavg"), strict=True):
        start = network(name, problem, sizes["width"], seed, scale.start)
        (parts, error) = train(start, problem, kernels, scale, scale.rounds)[-1]
        missed = (outputs(parts, problem.x_test) - problem.y_test).abs().clamp(max=1)
        row[f"{short}_test"] = float(missed.mean())
        row[f"{short}_train"] = error / problem.y.numel()
    return row


def _lines(own: Axes, rows: Sequence[Row], x: str, values: dict[str, tuple[str, str, str]]) -> None:
    """Means over seeds of some columns, by the values of ``x``: column -> (name, colour, line style)."""
    places = sorted({row[x] for row in rows})
    for column, (name, colour, style) in values.items():
        means = [_mean([row[column] for row in rows if row[x] == place]) for place in places]
        own.plot(places, means, color=colour, linestyle=style, marker="o", markersize=3, label=name)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def draw_convergence(rows: Sequence[Row]) -> Figure:
    """Error, prediction and bound by round; and how far the kernels have moved."""
    figure, axes = figures.panels(1, 2, width=4.6, height=3.4)
    left, right = axes[0]
    for number, name in enumerate(NETWORKS):
        own = [row for row in rows if row["network"] == name]
        rounds, colour = [row["round"] for row in own], figures.COLOURS[number]
        left.plot(rounds, [row["error"] for row in own], color=colour, label=name)
        left.plot(rounds, [row["prediction"] for row in own], color=colour, linestyle="--", linewidth=0.8)
        left.plot(rounds, [row["bound"] for row in own], color=colour, linestyle=":")
        right.plot(rounds, [row["drift_shared"] for row in own], color=colour, label=f"{name}, shared")
        if own[0]["drift_personal"] is not None:
            drift = [row["drift_personal"] for row in own]
            right.plot(rounds, drift, color=colour, linestyle="--", label=f"{name}, personal")
    left.set_yscale("log")
    left.set_ylim(bottom=1e-12)
    figures.label(left, "round", "squared training error", "measured (—), kernel limit (--), bound (···)")
    figures.label(right, "round", "‖H(t) − H(0)‖ / ‖H(0)‖", "how far the kernels move")
    left.legend(loc="lower left")
    right.set_ylim(0, 1.5 * max(row["drift_personal"] or row["drift_shared"] for row in rows))
    right.legend(loc="upper right")
    return figure


_TITLES = {"clients": "C clients", "samples": "n samples a client", "width": "m neurons in a part"}


def draw_effects(rows: Sequence[Row]) -> Figure:
    """Above: smallest eigenvalues (of kernels by C and n) and distances (by m). Below: progress in a round."""
    figure, axes = figures.panels(2, 3, width=3.2, height=2.8)
    blue, orange, green, pink = figures.COLOURS[:4]
    for column, (varied, title) in enumerate(_TITLES.items()):
        own = [row for row in rows if row["varied"] == varied]
        above, below = axes[0, column], axes[1, column]
        if varied == "width":
            shown = {
                "start_shared": ("shared, from the limit", blue, "-"),
                "start_personal": ("personal, from the limit", orange, "-"),
                "drift_shared": ("shared, moved", blue, ":"),
                "drift_personal": ("personal, moved", orange, ":"),
            }
            figures.label(above, title, "relative distance of kernels", "kernels by width")
        else:
            shown = {"lambda_s": (r"$\lambda^s$", blue, "-"), "lambda_p": (r"$\lambda^p$", orange, "-")}
            figures.label(above, title, "smallest eigenvalue", f"eigenvalues by {varied}")
        _lines(above, own, varied, shown)
        above.set_ylim(0, above.get_ylim()[1] * 1.35)  # room for the legend
        above.legend(fontsize=7, loc="upper right")
        rates = {
            "fedsplit_measured": ("FedSplit, measured", green, "-"),
            "fedsplit_bound": ("FedSplit, bound", green, ":"),
            "fedavg_measured": ("FedAvg, measured", pink, "-"),
            "fedavg_bound": ("FedAvg, bound", pink, ":"),
        }
        _lines(below, own, varied, rates)
        figures.label(below, title, "1 − factor of the error in a round", f"progress by {varied}")
        below.set_yscale("log")
        places = sorted({row[varied] for row in own})
        for axis in (above, below):
            axis.set_xscale("log")
            axis.set_xticks(places, [str(place) for place in places])
            axis.set_xticks([], minor=True)
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def draw_generalisation(rows: Sequence[Row]) -> Figure:
    """Test errors beside Theorem 2's term, N fixed and C varied; and one against the other."""
    figure, axes = figures.panels(1, 3, width=3.4, height=3.0)
    true = [row for row in rows if row["varied"] == "clients" and row["noise"] == 0]
    blue, orange, green, pink = figures.COLOURS[:4]
    errors = {
        "fedsplit_test": ("FedSplit", green, "-"),
        "fedavg_test": ("FedAvg", pink, "-"),
        "zero_error": ("always 0", "#999999", ":"),
    }
    _lines(axes[0, 0], true, "clients", errors)
    terms = {"complexity": ("Theorem 2", blue, "-"), "without_c": ("Theorem 2, over C", orange, "--")}
    _lines(axes[0, 1], true, "clients", terms)
    axes[0, 1].axhline(1, color="#666666", linewidth=0.8)
    figures.label(axes[0, 0], "C clients (N fixed)", "test error, min(|h − y|, 1)", "measured")
    figures.label(axes[0, 1], "C clients (N fixed)", "complexity term", "the bound (vacuous above 1)")
    for number, (column, name) in enumerate({"complexity": "Theorem 2", "without_c": "Theorem 2, over C"}.items()):
        pairs = [(row[column], row["fedsplit_test"]) for row in rows]
        x, y = zip(*pairs, strict=True)
        rank = spearmanr(x, y).statistic
        axes[0, 2].scatter(x, y, s=10, color=(blue, orange)[number], label=f"{name} (rank corr. {rank:+.2f})")
    axes[0, 2].set_xscale("log")
    axes[0, 1].set_yscale("log")
    figures.label(axes[0, 2], "complexity term", "FedSplit's test error", "all problems")
    axes[0, 2].set_ylim(0, axes[0, 2].get_ylim()[1] * 1.25)  # room for the legend
    for own, place in zip(axes[0], ("best", "best", "upper left"), strict=True):
        own.legend(fontsize=7, loc=place)
    return figure
