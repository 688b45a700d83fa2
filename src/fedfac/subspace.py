"""What the leading eigenvectors make up of a matrix's diagonal, for one matrix after another: subspace iteration.

Factor analysis (:mod:`fedfac.factor`) wants ν_j = Σ_{m≤G} max(λ_m, 0)·u_jm² of R − Ψ, then of the same R with a Ψ that
has moved a little, and so on. The first answer is a whole ``eigh``; after that the eigenvectors of the *smaller* end of
the spectrum are carried along, since one end says what the other one makes up: ν = diag(R − Ψ) − Σ_{m>G} λ_m·u_m².

A step is Chebyshev-filtered subspace iteration (Zhou, Saad, Tiago and Chelikowsky, J. Comput. Phys. 2006): a polynomial
of the matrix that is small on the other end of the spectrum and large on this one, and Rayleigh–Ritz in what comes out.
Some more eigenvectors than wanted are carried along, because the spectrum has no gap at G. The filter must know a bound
of the other end: eigenvalues move no further than the diagonal does (Weyl).
"""

from __future__ import annotations

import torch
from torch import Tensor

DEGREE = 3  # of the filter: at 512 elements 2 is hardly faster, 6 loses most of what is gained; masks are the same
LEAST = 128  # elements from which it pays
MOST = 0.45  # share of the eigenvectors up to which it pays


class Leading:
    """What the ``factors`` leading eigenvectors make up of the diagonals of matrices that differ in their diagonal."""

    def __init__(self, factors: int, size: int) -> None:
        self.lower = size - factors <= factors  # which end is carried along; the lower one of −matrix is the upper one
        self.wanted = size - factors if self.lower else factors
        self.width = self.wanted + max(8, self.wanted // 8)
        self.pays = size >= LEAST and self.width <= MOST * size
        self._block: Tensor | None = None  # the eigenvectors of the last matrix at that end, one in a column
        self._edge = self._bound = 0.0  # between these two is the rest of its spectrum
        self._diagonal: Tensor | None = None

    def explained(self, matrix: Tensor) -> Tensor:
        """Σ_{m≤G} max(λ_m, 0)·u_m², one number for every row."""
        turned = matrix if self.lower else -matrix
        found = self._followed(turned)
        if found is None:
            values, vectors = torch.linalg.eigh(turned)
            self._bound = float(values[-1])
        else:
            values, vectors = found
        if self.pays:
            self._block, self._diagonal = vectors[:, : self.width], turned.diagonal().clone()
            self._edge = float(values[self.width - 1])
        if not self.lower:
            return _made_up(-values[: self.wanted], vectors[:, : self.wanted])
        if found is None:
            return _made_up(values[self.wanted :], vectors[:, self.wanted :])
        rest: Tensor = (values[: self.wanted] * vectors[:, : self.wanted].square()).sum(1)
        return matrix.diagonal() - rest

    def _followed(self, matrix: Tensor) -> tuple[Tensor, Tensor] | None:
        """The lower end of a matrix near the last one, eigenvalues and eigenvectors; None if it cannot be followed."""
        if self._block is None or self._diagonal is None:
            return None
        self._bound += float((matrix.diagonal() - self._diagonal).abs().max())
        middle, half = (self._bound + self._edge) / 2, (self._bound - self._edge) / 2
        if not half > 0:
            return None
        before, block = self._block, (matrix @ self._block - middle * self._block) / half
        for _ in range(DEGREE - 1):  # T_{n+1}(x) = 2x·T_n(x) − T_{n−1}(x)
            before, block = block, (matrix @ block - middle * block) * (2 / half) - before
        block = block / block.norm(dim=0)  # they are amplified by very different factors
        lower, failed = torch.linalg.cholesky_ex(block.T @ block)
        if bool(failed):
            return None
        inner = torch.linalg.solve_triangular(lower, block.T @ (matrix @ block), upper=False)
        inner = torch.linalg.solve_triangular(lower, inner.T, upper=False)
        values, turn = torch.linalg.eigh((inner + inner.T) / 2)
        # a leading eigenvalue below 0 counts as 0, and the other end cannot tell how far below it is
        if self.lower and float(values[self.wanted]) < 0:
            return None
        return values, block @ torch.linalg.solve_triangular(lower.T, turn, upper=True)


def _made_up(values: Tensor, vectors: Tensor) -> Tensor:
    return (values.clamp_min(0) * vectors.square()).sum(1)
