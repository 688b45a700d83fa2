"""How good a federation's models are: over all samples, and over clients.

Weighted accuracy is Σ correct / Σ n (paper 5.2). Beside it, how clients fare: mean, standard deviation, median,
the mean of the worst tenth, and Jain's index (Σa)²/(C·Σa²), which is 1 when all clients do equally well. The
headline of a run is the mean over the evaluations of its last ten rounds (:func:`headline`). The paper's is the best
mean of ten consecutive rounds; it is picked on test data, and stands beside the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from fedfac.data.pool import Pool
from fedfac.errors import ConfigError, did_you_mean
from fedfac.method import Loss
from fedfac.numerics import Numerics

BATCH = 512
WINDOW = 10  # rounds
LEAST = 3  # evaluations
Metric = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Score:
    """One client's evaluation: counts and figures, no sample."""

    client: int
    samples: int
    correct: int | None  # None when there are no classes
    loss: float  # mean over the samples
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """Correct answers over all answers."""
        return None if self.correct is None or not self.samples else self.correct / self.samples


@torch.no_grad()
def score(
    model: nn.Module,
    client: int,
    pool: Pool,
    index: Tensor,
    loss: Loss,
    classes: int | None,
    metrics: Mapping[str, Metric] | None = None,
) -> Score:
    """A model on some samples of one client."""
    model.eval()
    parts = torch.split(index, BATCH) if len(index) else ()
    return tally(client, (predict(model, Numerics(), pool, part) for part in parts), loss, classes, metrics)


def predict(model: nn.Module, numerics: Numerics, pool: Pool, index: Tensor) -> tuple[Any, Tensor]:
    """Outputs and targets of some samples."""
    inputs, targets = pool.batch(index)
    with numerics.autocast():
        outputs = model(numerics.inputs(inputs))
    if isinstance(outputs, Tensor) and outputs.dtype == torch.bfloat16:
        outputs = outputs.float()  # figures are taken in full precision
    return outputs, targets


def tally(
    client: int,
    answers: Iterable[tuple[Any, Tensor]],
    loss: Loss,
    classes: int | None,
    metrics: Mapping[str, Metric] | None = None,
) -> Score:
    """One client's figures from its models' outputs and the targets, batch by batch; a GPU is waited for once."""
    losses: list[Tensor] = []
    hits: list[Tensor] = []
    samples = answered = 0
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    for given, wanted in answers:
        losses.append(torch.as_tensor(loss(given, wanted)).double() * len(wanted))
        samples += len(wanted)
        if classes is not None:
            hits.append((given.argmax(1) == wanted).sum())
            answered += wanted.numel()
        if metrics:
            outputs.append(given.clone())  # the engine may write the next answers to the same place
            targets.append(wanted.clone())
    nothing = torch.zeros((), dtype=torch.float64)
    sums = [torch.stack(values).sum().double() if values else nothing for values in (losses, hits)]
    lost, correct = torch.stack(sums).tolist() if losses and hits else (float(sums[0]), 0.0)
    mean = lost / samples if samples else 0.0
    figures = {}
    if metrics and samples:
        all_outputs, all_targets = torch.cat(outputs), torch.cat(targets)
        figures = {name: float(metric(all_outputs, all_targets)) for name, metric in metrics.items()}
    if classes is None:
        return Score(client, samples, None, mean, figures)
    return Score(client, answered, int(correct), mean, figures)


def summary(scores: Sequence[Score], model: str) -> dict[str, Any]:
    """Figures over all clients that have samples; ``model`` says which model they are of."""
    tested = [s for s in scores if s.samples]
    if not tested:
        return {"model": model, "clients": 0}
    n = sum(s.samples for s in tested)
    result: dict[str, Any] = {
        "model": model,
        "clients": len(tested),
        "samples": n,
        "loss": sum(s.loss * s.samples for s in tested) / n,
    }
    accuracies = [s.accuracy for s in tested if s.accuracy is not None]
    if accuracies:
        result["accuracy"] = sum(s.correct or 0 for s in tested) / n
        result |= over_clients(accuracies)
    for name in tested[0].metrics:
        result[name] = sum(s.metrics[name] * s.samples for s in tested) / n
    return result


def over_clients(values: Sequence[float]) -> dict[str, float]:
    """How a figure is spread over clients.

    >>> over_clients([0.5, 1.0])["mean"], over_clients([0.7, 0.7])["jain"]
    (0.75, 1.0)
    """
    squares = sum(v * v for v in values)
    return {
        "mean": float(np.mean(values)),
        "std": float(np.std(values)),
        "median": float(np.median(values)),
        "worst_decile": worst_decile(values),
        "jain": round(sum(values) ** 2 / (len(values) * squares), 12) if squares else 0.0,
    }


def worst_decile(values: Sequence[float]) -> float:
    """The mean of the lowest tenth (at least one value).

    >>> worst_decile([0.1, 0.3] + [1.0] * 18)
    0.2
    """
    return float(np.mean(sorted(values)[: math.ceil(len(values) / 10)]))


class Headline(TypedDict, total=False):
    """The figure that a run is compared by, and what it is the mean of; empty without evaluations."""

    last: float  # the mean over the evaluations of the last ten rounds
    best: float  # the best such mean of ten consecutive rounds, picked on these very data
    evaluations: int  # how many ``last`` is the mean of
    window: tuple[int, int]  # the first and the last round of them


def headline(curve: Sequence[tuple[int, float]], rounds: int | None = None) -> Headline:
    """The mean over the evaluations of the last ten rounds, and the best mean of ten consecutive rounds.

    ``curve`` has a (round, value) pair for every evaluation, in order; ``rounds`` is the last round that was trained
    (that of the last evaluation, if it is left out). Where fewer than three evaluations lie in ten rounds, the mean
    reaches back to the third last one.

    >>> headline([(5, 0.25), (10, 0.5), (15, 0.75), (20, 1.0)])
    {'last': 0.75, 'best': 0.75, 'evaluations': 3, 'window': (10, 20)}
    """
    if not curve:
        return {}
    numbers, values = [number for number, _ in curve], [value for _, value in curve]
    end = len(curve) - 1
    first = _window_start(numbers, end, numbers[end] if rounds is None else rounds)
    whole = [i for i in range(LEAST - 1, end) if numbers[i] - numbers[0] >= WINDOW - 1]
    last = _mean(values[first:])
    best = [_mean(values[_window_start(numbers, i, numbers[i]) : i + 1]) for i in whole]
    return {
        "last": last,
        "best": max([last, *best]),
        "evaluations": end + 1 - first,
        "window": (numbers[first], numbers[end]),
    }


def headline_of(records: Iterable[Mapping[str, Any]], part: str = "test", figure: str = "accuracy") -> Headline:
    """The headline of a run's records: of a figure on its test samples, or on its validation samples."""
    known = list(records)
    curve = [(r["round"], float(r[part][figure])) for r in known if figure in r.get(part, {})]
    return headline(curve, max((r["round"] for r in known), default=None))


def _window_start(numbers: Sequence[int], end: int, rounds: int) -> int:
    """Where the ten rounds begin that the evaluation ``end`` closes, with the least number of evaluations in them."""
    inside = next((i for i in range(end + 1) if numbers[i] > rounds - WINDOW), end)
    return max(0, min(inside, end + 1 - LEAST))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def table(scores: Sequence[Score], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row per client."""
    return [
        {"client": names[s.client], "samples": s.samples, "loss": s.loss, "accuracy": s.accuracy, **s.metrics}
        for s in scores
    ]


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error."""
    return (outputs.reshape(targets.shape) - targets).square().mean()


def mae(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean absolute error."""
    return (outputs.reshape(targets.shape) - targets).abs().mean()


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the targets' variance on this client that the model explains."""
    spread = (targets - targets.mean()).square().mean()
    error = mse(outputs, targets)
    if not bool(spread):
        return (error == 0).to(error.dtype)
    return 1 - error / spread


METRICS: Mapping[str, Metric] = {"mse": mse, "mae": mae, "r2": r2}


def named_metrics(metrics: Mapping[str, Metric] | Sequence[str] | str | None, classes: int | None) -> dict[str, Metric]:
    """Metrics by name or as functions of (outputs, targets); by default MSE and R² where there are no classes."""
    if metrics is None:
        return {} if classes is not None else {"mse": mse, "r2": r2}
    if isinstance(metrics, Mapping):
        return dict(metrics)
    metrics = [metrics] if isinstance(metrics, str) else metrics
    for name in metrics:
        if name not in METRICS:
            raise ConfigError(f"there is no metric {name!r}. {did_you_mean(name, METRICS)}")
    return {name: METRICS[name] for name in metrics}
