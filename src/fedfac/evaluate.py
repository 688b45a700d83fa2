"""What a federation's accuracy is: over all samples, and over clients.

Weighted accuracy is Σ correct / Σ n (paper 5.2); beside it how clients fare: mean, standard deviation and
the mean of the worst tenth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedfac.engine.protocol import Score


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Figures over all clients that have test samples."""
    tested = [s for s in scores if s.samples]
    if not tested:
        return {"clients": 0}
    n = sum(s.samples for s in tested)
    result: dict[str, Any] = {
        "clients": len(tested),
        "samples": n,
        "loss": sum(s.loss * s.samples for s in tested) / n,
    }
    accuracies = [s.correct / s.samples for s in tested if s.correct is not None]
    if accuracies:
        result |= {
            "accuracy": sum(s.correct or 0 for s in tested) / n,
            "mean": float(np.mean(accuracies)),
            "std": float(np.std(accuracies)),
            "worst_decile": worst_decile(accuracies),
        }
    return result


def worst_decile(values: Sequence[float]) -> float:
    """The mean of the lowest tenth (at least one value).

    >>> worst_decile([0.1, 0.3] + [1.0] * 18)
    0.2
    """
    return float(np.mean(sorted(values)[: math.ceil(len(values) / 10)]))


def table(scores: Sequence[Score], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row per client."""
    return [
        {
            "client": names[s.client],
            "samples": s.samples,
            "loss": s.loss,
            "accuracy": s.correct / s.samples if s.correct is not None and s.samples else None,
        }
        for s in scores
    ]
