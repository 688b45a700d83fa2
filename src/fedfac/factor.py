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

What principal-axis converges to, measured on recorded moments of real runs. (The limit: digits, 64 elements; its
minima: digits and FEMNIST, 64. κ = .85 asks for G ≈ ¾ d factors there, and in ResNet-18's 512, because the
correlations are weak.)

- It is projected gradient descent with step 1 on f(Ψ) = ½ Σ_{m>G} λ_m(R − Ψ)² over Ψ in [0, 1]^d: the gradient is
  −diag(R − Ψ − AAᵀ). It does have a limit, but gets there in 5,000 to 20,000 iterations, not in 50, and a quarter
  of the elements are Heywood cases in it. The mask (τ = 50 %) of the 50th iterate agrees with that of the limit on
  .62 to .72 of the elements, where chance is .5.
- f has many minima of about the same height. L-BFGS-B and projected Newton steps find one in 16 to 270
  eigendecompositions, but not always the same one: their masks agree on .6 to 1.0 of the elements. So "the true
  limit" is no target; as the rule of dynamic FedFac on the digits it is worse than 50 plain iterations.
- What pays is to go on from the last round's ν (``start``) for a few iterations, until the mask is settled
  (``sides``): the iteration then goes on over rounds and follows one minimum, where a cold start picks another one
  every round. Elements change sides less often, accuracy rises (docs/digits.md), and it is a tenth of the work:
  38 ms a round instead of 518 for the two layers of ResNet-18 on an H200 (``benchmarks/factor.py`` has ratios).
- So the masks of warm starts are those of cold ones where 50 iterations converge, and others where they do not: on
  recorded moments (digits, 14 rounds) they agree on .99 of the elements at κ = .2 and .98 at .3, where cold starts
  converge; on .93 at .4 and .94 at .5, .82 at .7, .74 at .85, where they do not.
- Neither has the masks of the limit there: after twelve rounds on the digits, a cold start agrees with the iteration
  run to its end on all elements up to κ = .5, on .91 at .6, .81 at .7 and .62 at .85; a warm one on all up to .3, .97
  at .4 and .5, .91 at .6 and .7, .53 at .85, where .5 is chance (``tests/test_solvers.py`` has four of these).
- With G ≈ ¾ d the leading subspace is not small, but the other one is: after a round's first iteration, an ``eigh``,
  the others follow it (:mod:`fedfac.subspace`). From the same start and after as many iterations the masks are those
  of an ``eigh`` in every iteration, on .99 of the elements or more (tested on a run's recorded moments).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfac.errors import ConfigError, did_you_mean
from fedfac.subspace import Leading

ESTIMATORS = ("principal-axis", "principal-component", "leverage")
MAX_ITERATIONS = 50
UNSETTLED = 0.01  # a mask is settled when no more than this share of the elements changes sides,
PATIENCE = 2  # so many iterations running


@dataclass(frozen=True)
class Factors:
    """What factor analysis makes of a correlation."""

    loadings: Tensor | None  # d × G; not there if only sides were asked for
    communality: Tensor  # ν, d
    n_factors: int
    iterations: int
    converged: bool  # ν stands still
    estimator: str
    stopped: str  # why it ended: "closed form", "tolerance", "settled" or "iterations"


def factor_analysis(
    correlation: Tensor,
    *,
    kappa: float,
    estimator: str = "principal-axis",
    tolerance: float = 1e-4,
    max_iterations: int = MAX_ITERATIONS,
    start: Tensor | None = None,
    sides: Callable[[Tensor], Sequence[bool]] | None = None,
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
        ``stopped`` says which one it was.
    start
        The ν that principal-axis begins with; by default that of the principal components.
    sides
        The mask that follows from ν, if only that matters: principal-axis then also stops once the mask is settled, and
        many elements are followed by subspace iteration.
    """
    check_kappa(kappa)
    if estimator not in ESTIMATORS:
        raise ConfigError(f"estimator is {estimator!r}. {did_you_mean(estimator, ESTIMATORS)}")
    R = _checked(correlation)
    if start is not None and estimator == "principal-axis":
        n_factors = _number_of_factors(torch.linalg.eigvalsh(R).flip(0).clamp_min(0), kappa)
        communality = _checked_start(start, R)
    else:
        values, vectors = _leading(R)
        n_factors = _number_of_factors(values, kappa)
        if estimator == "leverage":
            return _closed_form(vectors[:, : max(1, n_factors - 1)], estimator)
        loadings = values[:n_factors].sqrt() * vectors[:, :n_factors]
        if estimator == "principal-component":
            return _closed_form(loadings, estimator)
        communality = loadings.square().sum(1)

    whole = _Whole(n_factors)
    leading = whole if sides is None else Leading(n_factors, len(R))
    mask = None if sides is None else sides(communality)
    quiet, stopped = 0, "iterations"
    for iteration in range(1, max_iterations + 1):  # noqa: B007 (where it ends is part of the result)
        special = (1 - communality).clamp(0, 1)
        before, communality = communality, leading.explained(R - special.diag())
        if float((communality - before).abs().max()) < tolerance:
            stopped = "tolerance"
            break
        if sides is not None and mask is not None:
            old, mask = mask, sides(communality)
            changed = sum(a != b for a, b in zip(old, mask, strict=True))
            quiet = quiet + 1 if changed <= UNSETTLED * len(mask) else 0
            if quiet == PATIENCE:
                stopped = "settled"
                break
    return Factors(whole.loadings, communality, n_factors, iteration, stopped == "tolerance", estimator, stopped)


class _Whole:
    """A whole ``eigh`` in every iteration, and the loadings of the last one."""

    def __init__(self, factors: int) -> None:
        self.factors = factors
        self.loadings: Tensor | None = None

    def explained(self, matrix: Tensor) -> Tensor:
        """Σ_m a_jm² of every row."""
        values, vectors = _leading(matrix)
        self.loadings = values[: self.factors].sqrt() * vectors[:, : self.factors]
        return self.loadings.square().sum(1)


def check_kappa(kappa: float) -> None:
    """κ is a share of variance."""
    if not isinstance(kappa, int | float) or not 0 < kappa <= 1:
        raise ConfigError(
            f"kappa is {kappa}; it is a share of variance, above 0 and at most 1 (the paper: 0.5 to 0.95)"
        )


def _number_of_factors(values: Tensor, kappa: float) -> int:
    """The smallest number of leading eigenvalues whose share reaches κ; κ = 1 may be missed by rounding."""
    share = values.cumsum(0) / values.sum()
    return min(int((share < kappa - 1e-12).sum()) + 1, len(values))


def _leading(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first and never below 0, and their eigenvectors."""
    values, vectors = torch.linalg.eigh(matrix)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def _closed_form(loadings: Tensor, estimator: str) -> Factors:
    return Factors(loadings, loadings.square().sum(1), loadings.shape[1], 0, True, estimator, "closed form")


def _checked(correlation: Tensor) -> Tensor:
    R = correlation.double()
    if R.ndim != 2 or R.shape[0] != R.shape[1] or R.shape[0] == 0:
        raise ConfigError(f"a correlation matrix is square; this one is {tuple(correlation.shape)}")
    if not bool(torch.isfinite(R).all()):
        raise ConfigError("the correlation matrix holds numbers that are not finite")
    if not torch.allclose(R, R.T, atol=1e-8) or not torch.allclose(R.diagonal(), R.new_ones(()), atol=1e-6):
        raise ConfigError("a correlation matrix is symmetric with ones on its diagonal; this one is not")
    return R


def _checked_start(start: Tensor, like: Tensor) -> Tensor:
    if start.shape != like.shape[:1]:
        raise ConfigError(f"start is of shape {tuple(start.shape)}; it is one ν for each of the {len(like)} elements")
    return start.to(like)
