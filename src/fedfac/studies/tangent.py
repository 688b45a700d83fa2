"""The two-layer ReLU network of paper 3.2-3.3, its parallel gradient descent, and its tangent kernels.

Model (4), on a sample x of client c::

    h(x) = 1/√m₁ Σ_q a_q σ(w^p_cq · x) + 1/√m₂ Σ_r a_r σ(w^s_r · x)

It is the sum of two *separately* normalised networks, here two ``Part``s; FedAvg's network is one shared part. Only
the first layer is trained; a is drawn from {−1, 1}. In a round each client takes G gradient steps on
l_c = 1/(2n) Σ_{i∈S_c} (h(x_i) − y_i)²; the server adds η_g times the mean of the shared updates.

The paper's gradients have the factor 1/n of l_c, its formulas for the updates Δw do not: the 1/n is taken into η_l.
``step`` follows the updates (η_l multiplies the *sum* over a client's samples), since ρ₁ = η_gη_lG/C and ρ₂ = η_lG of
Theorem 1 belong to them. Everything is in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedfac.seeds import generator

NETWORKS = ("FedSplit", "FedAvg", "FedAvg, two networks")


@dataclass(frozen=True)
class Problem:
    """Samples on the unit sphere, (C, n, d), and bounded responses, (C, n): what Assumption 1 asks for."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def clients(self) -> int:
        """C."""
        return self.x.shape[0]

    @property
    def samples(self) -> int:
        """n, on each client."""
        return self.x.shape[1]

    @classmethod
    def draw(
        cls,
        *,
        clients: int,
        samples: int,
        inputs: int,
        seed: int,
        own: float = 0.5,
        noise: float = 0.0,
        test: int = 100,
    ) -> Problem:
        """Linear truths: a share ``own`` of their variance differs from client to client; |y| ≤ 1.

        ``noise`` is the share of training responses that are replaced by random signs.
        """
        draws = generator(seed, "theory", "problem", clients, samples)
        double = torch.float64
        common = torch.randn(inputs, generator=draws, dtype=double)
        special = torch.randn(clients, inputs, generator=draws, dtype=double)
        truth = math.sqrt(1 - own) * common + math.sqrt(own) * special  # y has standard deviation ½ before the clip

        def pairs(count: int) -> tuple[Tensor, Tensor]:
            x = torch.randn(clients, count, inputs, generator=draws, dtype=double)
            x = x / x.norm(dim=2, keepdim=True)
            return x, (0.5 * torch.einsum("cnd,cd->cn", x, truth)).clamp(-1, 1)

        (x, y), (x_test, y_test) = pairs(samples), pairs(test)
        signs = torch.randint(0, 2, y.shape, generator=draws).to(double) * 2 - 1
        replaced = torch.rand(y.shape, generator=draws, dtype=double) < noise
        return cls(x, torch.where(replaced, signs, y), x_test, y_test)


@dataclass(frozen=True)
class Part:
    """One normalised sum of ReLU neurons: weights (C, m, d) if personal, (m, d) if shared, and signs a (m)."""

    weights: Tensor
    signs: Tensor

    @classmethod
    def draw(cls, width: int, inputs: int, *, clients: int | None, seed: int, name: str, scale: float = 1.0) -> Part:
        """w ~ MN(0, scale² I), a uniform on {−1, 1}; ``clients`` None: shared."""
        draws = generator(seed, "theory", name)
        shape = (width, inputs) if clients is None else (clients, width, inputs)
        signs = torch.randint(0, 2, (width,), generator=draws).double() * 2 - 1
        return cls(scale * torch.randn(shape, generator=draws, dtype=torch.float64), signs)

    @property
    def personal(self) -> bool:
        """Whether every client has weights of its own."""
        return self.weights.dim() == 3

    def local(self, clients: int) -> Part:
        """Every client's own copy of the weights, (C, m, d)."""
        return self if self.personal else replace(self, weights=self.weights.expand(clients, -1, -1))


def fedsplit(inputs: int, clients: int, *, personal: int, shared: int, seed: int, scale: float = 1.0) -> list[Part]:
    """Model (4): m₁ personal and m₂ shared neurons."""
    return [
        Part.draw(personal, inputs, clients=clients, seed=seed, name="personal", scale=scale),
        Part.draw(shared, inputs, clients=None, seed=seed, name="shared", scale=scale),
    ]


def fedavg(inputs: int, *, widths: Sequence[int], seed: int, scale: float = 1.0) -> list[Part]:
    """Everything shared: one network of the whole width, or the two of model (4)."""
    return [
        Part.draw(width, inputs, clients=None, seed=seed, name=f"all shared {number}", scale=scale)
        for number, width in enumerate(widths)
    ]


def network(name: str, problem: Problem, width: int, seed: int, scale: float = 1.0) -> list[Part]:
    """The start of one of the three networks; ``width`` is that of each part of model (4)."""
    inputs = problem.x.shape[2]
    if name == NETWORKS[0]:
        return fedsplit(inputs, problem.clients, personal=width, shared=width, seed=seed, scale=scale)
    return fedavg(inputs, widths=[width, width] if name == NETWORKS[2] else [2 * width], seed=seed, scale=scale)


def _sum(parts: Sequence[Part], before: Sequence[Tensor]) -> Tensor:
    """h from the neurons' inputs w · x."""
    terms = [torch.relu(z) @ part.signs / math.sqrt(len(part.signs)) for part, z in zip(parts, before, strict=True)]
    return torch.stack(terms).sum(0)


def outputs(parts: Sequence[Part], x: Tensor) -> Tensor:
    """h on every client's samples, (C, n)."""
    return _sum(parts, [x @ part.weights.mT for part in parts])


def gradients(parts: Sequence[Part], x: Tensor, y: Tensor) -> list[Tensor]:
    """∂l_c/∂W of every client's copy of the parts, written out as in paper 3.2: (C, m, d) for each part."""
    before = [x @ part.weights.mT for part in parts]  # (C, n, m)
    residual = (_sum(parts, before) - y) / x.shape[1]
    return [
        ((z >= 0) * residual[:, :, None]).mT @ x * (part.signs[:, None] / math.sqrt(len(part.signs)))
        for part, z in zip(parts, before, strict=True)
    ]


def step(
    parts: Sequence[Part], x: Tensor, y: Tensor, *, eta_l: float, local_steps: int, eta_g: float = 1.0
) -> list[Part]:
    """One communication round of parallel gradient descent."""
    clients, samples = y.shape
    mine = [part.local(clients) for part in parts]
    for _ in range(local_steps):
        slopes = gradients(mine, x, y)
        mine = [
            replace(part, weights=part.weights - eta_l * samples * slope)
            for part, slope in zip(mine, slopes, strict=True)
        ]
    return [
        after
        if before.personal
        else replace(before, weights=before.weights + eta_g * (after.weights - before.weights).mean(0))
        for before, after in zip(parts, mine, strict=True)
    ]


def kernel(x: Tensor) -> Tensor:
    """H^{s∞} over all N samples: x_i·x_j (π − arccos cos(x_i, x_j)) / 2π."""
    rows = x.reshape(-1, x.shape[-1])
    norms = rows.norm(dim=1)
    products = rows @ rows.T
    cosine = (products / torch.outer(norms, norms)).clamp(-1, 1)
    return products * (math.pi - torch.arccos(cosine)) / (2 * math.pi)


def own_blocks(matrix: Tensor, clients: int) -> Tensor:
    """H^p from H^s: zero unless i and j are on the same client."""
    samples = len(matrix) // clients
    client = torch.arange(len(matrix)) // samples
    return matrix * (client[:, None] == client[None, :])


def gram(part: Part, x: Tensor) -> Tensor:
    """The part's kernel with its present weights, over all N samples; a personal part's is block diagonal."""
    clients = x.shape[0]
    active = (x @ part.local(clients).weights.mT >= 0).to(x.dtype).reshape(-1, len(part.signs))
    rows = x.reshape(-1, x.shape[-1])
    matrix = (rows @ rows.T) * (active @ active.T) / len(part.signs)
    return own_blocks(matrix, clients) if part.personal else matrix


@dataclass(frozen=True)
class Spectrum:
    """The extreme eigenvalues of a kernel."""

    smallest: float
    largest: float

    @classmethod
    def of(cls, matrix: Tensor) -> Spectrum:
        """By a symmetric eigendecomposition."""
        values = torch.linalg.eigvalsh(matrix)
        return cls(float(values[0]), float(values[-1]))

    @property
    def condition(self) -> float:
        """γ."""
        return self.largest / self.smallest


@dataclass(frozen=True, kw_only=True)
class Rates:
    """ρ₁ and ρ₂ of Theorem 1."""

    shared: float
    personal: float

    @classmethod
    def of(cls, eta_l: float, local_steps: int, clients: int, eta_g: float = 1.0) -> Rates:
        """ρ₁ = η_gη_lG/C, ρ₂ = η_lG."""
        return cls(shared=eta_g * eta_l * local_steps / clients, personal=eta_l * local_steps)

    def bound(self, shared: float, personal: float) -> float:
        """Theorem 1: ‖h(t) − y‖² shrinks at least by this factor a round; λ^p = 0 for FedAvg."""
        return 1 - 0.5 * (self.shared * shared + self.personal * personal)


def complexity(y: Tensor, both: Tensor, clients: int) -> float:
    """Theorem 2's term 2√((C/n) yᵀ(H^s + H^p)⁻¹y)."""
    flat = y.reshape(-1)
    samples = len(flat) // clients
    return float(2 * torch.sqrt(clients / samples * (flat @ torch.linalg.solve(both, flat))))
