"""What a client tells about a layer: sums, and nothing else.

Factor analysis (paper 4.1) wants the correlation R_l of the matrix Z_l that stacks the input weights of
all sampled clients. With n rows, s = Σ_c Z_cᵀ1 and M = Σ_c Z_cᵀZ_c, its covariance is M/n − ssᵀ/n², so R_l
follows exactly from :class:`Moments`, and moments of clients add up. Nobody needs to see a client's
weights, and the server's memory is d_l², whatever the number of clients. R is never built in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from fedfac.anatomy import Layer
from fedfac.errors import ModelError


class Additive(Protocol):
    """A statistic that leaves a client: its only operation is the sum over clients."""

    def __add__(self, other: Self, /) -> Self:
        """The statistic of both clients together."""


@dataclass(frozen=True)
class Moments:
    """n, Σz and Σzzᵀ of the rows z of one layer's Z (one number per element), in double precision."""

    n: float  # a whole number, unless earlier rounds are counted in part
    total: Tensor
    products: Tensor

    @classmethod
    def of(cls, layer: Layer, state: Mapping[str, Tensor], minus: Mapping[str, Tensor] | None = None) -> Moments:
        """The moments of one client's input weights, or of their change since ``minus``."""
        vectors = layer.vectors(state).double()
        if minus is not None:
            vectors = vectors - layer.vectors(minus).double()
        products = vectors @ vectors.T  # its two halves may differ in the last bit, and one is enough
        return cls(vectors.shape[1], vectors.sum(1), products.triu() + products.triu(1).T)

    def __add__(self, other: Moments) -> Moments:
        if self.total.shape != other.total.shape:
            raise ModelError(
                f"moments of {self.total.numel()} and of {other.total.numel()} elements do not belong to one layer"
            )
        return Moments(self.n + other.n, self.total + other.total, self.products + other.products)

    def __mul__(self, share: float) -> Moments:
        """The same moments with a smaller weight, to be added to fresher ones."""
        return Moments(self.n * share, self.total * share, self.products * share)

    def to(self, device: torch.device) -> Moments:
        """The same moments on another device."""
        return Moments(self.n, self.total.to(device), self.products.to(device))

    @property
    def covariance(self) -> Tensor:
        """M/n − ssᵀ/n²."""
        mean = self.total / self.n
        return self.products / self.n - torch.outer(mean, mean)

    @property
    def dead(self) -> Tensor:
        """Elements without variance: rounding of M/n is all that is left of it."""
        power = self.products.diagonal() / self.n
        return self.covariance.diagonal() <= 1e-12 * power

    def correlation(self) -> Tensor:
        """R_l. A dead element correlates with nothing: its row is that of the identity."""
        covariance, dead = self.covariance, self.dead
        scale = torch.where(dead, 1.0, covariance.diagonal()).sqrt()
        correlation = covariance / torch.outer(scale, scale)
        correlation[dead, :] = 0
        correlation[:, dead] = 0
        correlation.fill_diagonal_(1)
        return (correlation + correlation.T) / 2


@dataclass(frozen=True)
class Spread:
    """Clients, Σ_c z_c and Σ_c ‖z_cj‖²: what the between-client variance of every element follows from."""

    clients: int
    total: Tensor
    squares: Tensor

    @classmethod
    def of(cls, layer: Layer, state: Mapping[str, Tensor], minus: Mapping[str, Tensor] | None = None) -> Spread:
        """One client's contribution: of its weights, or of their change since ``minus``."""
        vectors = layer.vectors(state).double()
        if minus is not None:
            vectors = vectors - layer.vectors(minus).double()
        return cls(1, vectors, vectors.square().sum(1))

    def __add__(self, other: Spread) -> Spread:
        if self.total.shape != other.total.shape:
            raise ModelError(
                f"spreads of {tuple(self.total.shape)} and of {tuple(other.total.shape)} weights "
                "do not belong to one layer"
            )
        return Spread(self.clients + other.clients, self.total + other.total, self.squares + other.squares)

    def variance(self) -> Tensor:
        """Between-client variance of an element's input weights, relative to their mean square."""
        power = self.squares / self.clients
        between = power - (self.total / self.clients).square().sum(1)
        return torch.where(power > 0, between / power.clamp_min(torch.finfo(power.dtype).tiny), 0.0)
