"""The paper's simulated federation (4.3.1), as it is written there.

A sample of client c is x = (x^p, x^s): x^s ~ MN(0, I) of dimension d₂ = αd, and x^p ~ MN(μ_c, Σ) of dimension
d₁ = d − d₂, with μ_c ~ MN(0, I) and Σ = (0.5^|i−j|). The true model has m hidden neurons, the first m₁ personal, the
other m₂ = pm shared::

    h*_c(x) = Σ_q a_q σ(w_cq · x) + Σ_r a_r σ(w_r · x),     y = 1 if h*_c(x) + ε > 0, else 0

w^sp ~ U(−0.1, 0.1), w^ss ~ U(−1, 1), w^pp_c ~ MN(μ_c, I), w^ps_c ~ U(−0.1, 0.1), a ~ MN(0, I), ε ~ N(0, c²).
(The sigmoid of y* is above 0.5 exactly where y* is above 0.)

What the paper does not say: how many samples a client has, and c. And what it does not mention: inputs and personal
weights have the *same* mean μ_c, so w_cq · x is near ‖μ_c‖² ≈ d₁ for all q, and h* is near (Σ_q a_q)·d₁ on every
client: unless Σ_q a_q happens to be near 0, nearly all labels of all clients are the same. ``balanced`` draws a
from MN(0, I) *given* Σ_q a_q = 0, which keeps to the paper's model and leaves something to learn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add

import numpy as np
import numpy.typing as npt
import torch
from scipy.signal import lfilter
from torch import Tensor

from fedfac.anatomy import Layer
from fedfac.data.federation import Federation
from fedfac.moments import Moments
from fedfac.rules import Asked, FactorRule, Threshold
from fedfac.seeds import stream
from fedfac.split import Mask

Matrix = npt.NDArray[np.float64]
BY_P = ((0.3, 0.4), (0.5, 0.4), (0.7, 0.4))  # (p, α): the paper's upper row
BY_ALPHA = ((0.5, 0.2), (0.5, 0.4), (0.5, 0.8))  # and its lower row
SETTINGS = tuple(dict.fromkeys((*BY_P, *BY_ALPHA)))
CORRELATION = 0.5  # of neighbouring personal covariates


@dataclass(frozen=True, kw_only=True)
class World:
    """One draw of the true models and of the clients' samples: a pure function of these fields."""

    p: float  # share of the neurons that is shared
    alpha: float  # share of the covariates that is shared
    seed: int
    clients: int = 100
    inputs: int = 100
    hidden: int = 200
    train: int = 100
    test: int = 100
    noise: float = 1.0
    balanced: bool = True

    @property
    def shared_inputs(self) -> int:
        """d₂."""
        return round(self.alpha * self.inputs)

    @property
    def shared_hidden(self) -> int:
        """m₂."""
        return round(self.p * self.hidden)

    @property
    def mask(self) -> Mask:
        """The true decomposition: the personal neurons come first."""
        return (False,) * (self.hidden - self.shared_hidden) + (True,) * self.shared_hidden

    @cached_property
    def output_weights(self) -> Matrix:
        """a, of the personal neurons first; balanced: those sum to 0 (MN(0, I) given that they do)."""
        a = stream(self.seed, "simulation", "a").standard_normal(self.hidden)
        personal = self.hidden - self.shared_hidden
        if self.balanced and personal:
            a[:personal] -= a[:personal].mean()
        return a

    @cached_property
    def shared_weights(self) -> Matrix:
        """W^s, (m₂, d): a neuron is a row."""
        draws = stream(self.seed, "simulation", "shared")
        d1 = self.inputs - self.shared_inputs
        on_personal = draws.uniform(-0.1, 0.1, (self.shared_hidden, d1))
        return np.hstack([on_personal, draws.uniform(-1, 1, (self.shared_hidden, self.shared_inputs))])

    def centre(self, client: int) -> Matrix:
        """μ_c."""
        return stream(self.seed, "simulation", "mu", client).standard_normal(self.inputs - self.shared_inputs)

    def weights(self, client: int) -> Matrix:
        """W_c = (W^p_c, W^s), (m, d), in the order of ``mask``."""
        draws = stream(self.seed, "simulation", "personal", client)
        personal, mu = self.hidden - self.shared_hidden, self.centre(client)
        on_personal = mu + draws.standard_normal((personal, len(mu)))
        own = np.hstack([on_personal, draws.uniform(-0.1, 0.1, (personal, self.shared_inputs))])
        return np.vstack([own, self.shared_weights])

    def samples(self, client: int, count: int, purpose: str) -> tuple[Matrix, npt.NDArray[np.int64]]:
        """Inputs and labels."""
        draws = stream(self.seed, "simulation", purpose, client)
        mu = self.centre(client)
        personal = mu + autoregressive(draws.standard_normal((count, len(mu))))
        x = np.hstack([personal, draws.standard_normal((count, self.shared_inputs))])
        response = np.maximum(x @ self.weights(client).T, 0) @ self.output_weights
        y = response + self.noise * draws.standard_normal(count) > 0
        return x, y.astype(np.int64)

    def federation(self) -> Federation:
        """All clients' training and test samples."""
        return Federation.from_arrays([self._load(client) for client in range(self.clients)], classes=2)

    def _load(self, client: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, y = self.samples(client, self.train, "train")
        x_test, y_test = self.samples(client, self.test, "test")
        return (
            torch.from_numpy(x).float(),
            torch.from_numpy(y),
            torch.from_numpy(x_test).float(),
            torch.from_numpy(y_test),
        )

    def majority(self) -> float:
        """The accuracy of each client's best constant answer, over the test samples of all."""
        means = [self.samples(client, self.test, "test")[1].mean() for client in range(self.clients)]
        return float(np.mean(np.maximum(means, 1 - np.asarray(means))))


def autoregressive(noise: Matrix, correlation: float = CORRELATION) -> Matrix:
    """Rows of independent normal numbers made MN(0, Σ), Σ_ij = correlation^|i−j|: x_j = ρx_{j−1} + √(1−ρ²)z_j."""
    scaled = noise * np.sqrt(1 - correlation**2)
    scaled[:, :1] = noise[:, :1]
    filtered: Matrix = lfilter([1.0], [1.0, -correlation], scaled, axis=1)
    return filtered


def communality(
    layer: Layer, states: Iterable[Mapping[str, Tensor]], *, kappa: float = 0.85, estimator: str = "principal-axis"
) -> Tensor:
    """ν of a layer's elements by factor analysis of these clients' weights (paper 4.1)."""
    total = reduce(add, (Moments.of(layer, state) for state in states))
    rule = FactorRule({layer.name: Threshold()}, {layer.name: kappa}, estimator)
    return rule.score(Asked(layer.name, layer.elements, total, seed=0, round=0)).values
