"""Factor analysis of a correlation matrix (paper 4.1).

R = A Aᵀ + Σ_ε: the d hidden elements are driven by G < d common factors with loadings A, and by special
factors of their own. The communality ν_j = Σ_m a_jm² says how much of element j the common factors explain;
a high one means "shared". G is the smallest number of leading eigenvalues of R whose share reaches κ.

Three estimators, because the paper can be read in three ways:

``principal-axis`` (default)
    A factor model's special factors are uncorrelated, so Σ_ε is diagonal: Ψ = diag(R − AAᵀ). Iterate
    A ← √γ*·u* of R − Ψ until ν stands still. Ψ is clipped to [0, 1]: Heywood cases are common.
``principal-component``
    The paper's Σ_ε = R − AAᵀ taken whole makes R − Σ_ε = AAᵀ at once, so the first A is the fixed point.
``leverage``
    What the authors' published code does: unit eigenvectors without √γ, and one factor fewer.

They are not interchangeable, and (paper, formula for A) the transpose there is a slip: A is d × G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedfac.errors import ConfigError, did_you_mean

ESTIMATORS = ("principal-axis", "principal-component", "leverage")


@dataclass(frozen=True)
class Factors:
    """What factor analysis makes of a correlation."""

    loadings: Tensor  # d × G
    communality: Tensor  # ν, d
    n_factors: int
    iterations: int
    converged: bool
    estimator: str


def factor_analysis(
    correlation: Tensor,
    *,
    kappa: float,
    estimator: str = "principal-axis",
    tolerance: float = 1e-4,
    max_iterations: int = 50,
) -> Factors:
    """Loadings and communalities of a correlation matrix.

    Parameters
    ----------
    correlation
        d × d, symmetric, ones on the diagonal.
    kappa
        κ in (0, 1]: the share of the variance that the common factors must reach.
    estimator
        See the module's page.
    tolerance, max_iterations
        Principal-axis stops when no ν moves by ``tolerance`` or more, or after ``max_iterations``;
        ``converged`` says which one it was.
    """
    check_kappa(kappa)
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator is {estimator!r}. {did_you_mean(estimator, ESTIMATORS)}")
    R = _checked(correlation)
    values, vectors = _leading(R)
    share = values.cumsum(0) / values.sum()
    # κ = 1 may be missed by rounding, hence the clamp
    n_factors = min(int((share < kappa - 1e-12).sum()) + 1, len(values))

    if estimator == "leverage":
        loadings = vectors[:, : max(1, n_factors - 1)]
        return _result(loadings, 0, True, estimator)
    loadings = values[:n_factors].sqrt() * vectors[:, :n_factors]
    if estimator == "principal-component":
        return _result(loadings, 0, True, estimator)

    communality = loadings.square().sum(1)
    for iteration in range(1, max_iterations + 1):
        special = (1 - communality).clamp(0, 1)
        values, vectors = _leading(R - special.diag())
        loadings = values[:n_factors].sqrt() * vectors[:, :n_factors]
        before, communality = communality, loadings.square().sum(1)
        if float((communality - before).abs().max()) < tolerance:
            return _result(loadings, iteration, True, estimator)
    return _result(loadings, max_iterations, False, estimator)


def check_kappa(kappa: float) -> None:
    """κ is a share of variance."""
    if not 0 < kappa <= 1:
        raise ConfigError(
            f"kappa is {kappa}; it is a share of variance, above 0 and at most 1 (the paper: 0.5 to 0.95)"
        )


def _leading(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first and never below 0, and their eigenvectors."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def _result(loadings: Tensor, iterations: int, converged: bool, estimator: str) -> Factors:
    return Factors(loadings, loadings.square().sum(1), loadings.shape[1], iterations, converged, estimator)


def _checked(correlation: Tensor) -> Tensor:
    R = correlation.double()
    if R.ndim != 2 or R.shape[0] != R.shape[1] or R.shape[0] == 0:
        raise ConfigError(f"a correlation matrix is square; this one is {tuple(correlation.shape)}")
    if not bool(torch.isfinite(R).all()):
        raise ConfigError("the correlation matrix holds numbers that are not finite")
    if not torch.allclose(R, R.T, atol=1e-8) or not torch.allclose(R.diagonal(), R.new_ones(()), atol=1e-6):
        raise ConfigError("a correlation matrix is symmetric with ones on its diagonal; this one is not")
    return R
