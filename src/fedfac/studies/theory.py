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
from typing import Any

import torch
from torch import Tensor

from fedfac.studies import theory_figures, theory_page
from fedfac.studies.frame import Ask, Finding, Row
from fedfac.studies.tangent import (
    NETWORKS,
    Part,
    Problem,
    Rates,
    Spectrum,
    complexity,
    gram,
    kernel,
    network,
    outputs,
    own_blocks,
    step,
)


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
                progress.step(f"seed {seed}, {varied} varied: {_words(sizes)}")
            for varied, sizes, noise in _complexity_plan(scale):
                generalisation.append(generalise(varied, sizes, noise, scale, seed))
                progress.step(f"seed {seed}, generalisation: {_words(sizes)}")
    return present({"convergence": curves, "effects": effects, "generalisation": generalisation}, scale, seeds)


def present(tables: dict[str, list[Row]], scale: Scale, seeds: Sequence[int]) -> Finding:
    """Figures and words for what was computed."""
    return Finding(
        tables=tables,
        figures={
            "convergence": partial(theory_figures.convergence, tables["convergence"]),
            "effects": partial(theory_figures.effects, tables["effects"]),
            "generalisation": partial(theory_figures.generalisation, tables["generalisation"]),
        },
        page=theory_page.page(tables, scale, seeds),
        summary=theory_page.summary(tables),
    )


def _problem(sizes: dict[str, int], scale: Scale, seed: int, noise: float = 0.0) -> Problem:
    return Problem.draw(clients=sizes["clients"], samples=sizes["samples"], inputs=scale.inputs, seed=seed, noise=noise)


def _words(sizes: dict[str, int]) -> str:
    return f"C = {sizes['clients']}, n = {sizes['samples']}, m = {sizes['width']}"


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
