"""The two ends of every comparison.

FedAvg (McMahan et al. 2017): everything is shared, the server takes the n_k-weighted mean.
Local only: nothing is shared; the baseline that keeps everybody honest.
"""

from __future__ import annotations

from fedfac.method import Method, Plan
from fedfac.split import Split


def fedavg(*, eta_g: float = 1.0) -> Method:
    """One global model: W ← W + η_g (Σ n_k W_k / Σ n_k − W)."""
    return Method(
        name="fedavg",
        plan=lambda anatomy: Plan(split=Split.of(anatomy)),
        server_rate=eta_g,
        options={"eta_g": eta_g},
    )


def local() -> Method:
    """Every client trains a model of its own from the common start; nothing is ever sent."""
    return Method(name="local", plan=lambda anatomy: Plan(split=Split.of(anatomy, personal=anatomy.shapes)))
