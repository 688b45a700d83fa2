"""How far the two solvers of factor analysis are from each other and from the limit, by κ; and their earlier names."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from helpers import message
from recording import moments_of_a_run

from fedfac import methods
from fedfac.errors import ConfigError
from fedfac.moments import Moments
from fedfac.rules import Asked, FactorRule, Memory, Threshold

Matrix = npt.NDArray[np.float64]
HALF = Threshold.parse("50%")


@pytest.fixture(scope="module")
def recorded() -> list[Moments]:
    """The digits, 64 elements, twelve rounds."""
    return moments_of_a_run("cnn")


def sides(recorded: list[Moments], solver: str, kappa: float) -> Matrix:
    """The mask of the last round."""
    rule = FactorRule({"fc1": HALF}, {"fc1": kappa}, solver=solver)
    memory: Memory = {}
    for number, total in enumerate(recorded, start=1):
        made = rule.score(Asked("fc1", 64, total, seed=0, round=number, memory=memory))
        memory = made.memory
    return np.array(HALF.cut(made.values)[0])


def at_the_limit(total: Moments, kappa: float) -> Matrix:
    """The mask of the iteration that has converged, by numpy alone and from the numbers that clients sent."""
    n, mean, products = total.n, total.total.numpy() / total.n, total.products.numpy()
    covariance = products / n - np.outer(mean, mean)
    scale = np.sqrt(np.diag(covariance))
    corr = covariance / np.outer(scale, scale)
    values, vectors = np.linalg.eigh(corr)
    shares = np.maximum(values[::-1], 0).cumsum() / np.maximum(values, 0).sum()
    factors = int((shares < kappa).sum()) + 1
    nu = (vectors[:, -factors:] ** 2 * values[-factors:]).sum(1)
    for _ in range(40_000):
        before = nu
        values, vectors = np.linalg.eigh(corr - np.diag(np.clip(1 - nu, 0, 1)))
        nu = (vectors[:, -factors:] ** 2 * np.maximum(values[-factors:], 0)).sum(1)
        if np.abs(nu - before).max() < 1e-6:
            return np.asarray(nu >= np.quantile(nu, 0.5))
    raise AssertionError("the reference has not converged")


@pytest.mark.parametrize(
    ("kappa", "cold", "warm"),
    [
        (0.2, (0.96, 1), (0.96, 1)),
        (0.3, (0.96, 1), (0.96, 1)),
        (0.7, (0.7, 0.95), (0.6, 0.95)),
        (0.85, (0.5, 0.8), (0.5, 0.85)),
    ],
)
def test_both_solvers_reach_the_limit_at_a_low_kappa_and_neither_does_at_the_default(
    kappa: float, cold: tuple[float, float], warm: tuple[float, float], recorded: list[Moments]
) -> None:
    """Shares of elements on the limit's side; .5 is chance. What a solver is called must not promise more."""
    limit = at_the_limit(recorded[-1], kappa)
    masks = {solver: sides(recorded, solver, kappa) for solver in ("cold", "warm")}
    for solver, (least, most) in (("cold", cold), ("warm", warm)):
        agreement = float((masks[solver] == limit).mean())
        assert least <= agreement <= most, (solver, agreement)
    each_other = float((masks["cold"] == masks["warm"]).mean())
    assert each_other >= 0.96 if kappa <= 0.3 else each_other <= 0.95, each_other


def test_an_unknown_solver_is_refused_with_those_that_there_are() -> None:
    for refused in (lambda: methods.fedfac(solver="exact"), lambda: FactorRule({}, {}, solver="fast")):
        assert "Known: warm, cold" in message(ConfigError, refused)
