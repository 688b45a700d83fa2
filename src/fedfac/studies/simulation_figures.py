"""The figures of the simulation study: the paper's two, and one of recovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfac.studies import figures
from fedfac.studies.frame import Row
from fedfac.studies.simulated import BY_ALPHA, BY_P

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOK: Mapping[str, dict[str, Any]] = {
    "true": {"color": figures.COLOURS[6], "linewidth": 3.0, "alpha": 0.35},
    "oracle": {"color": figures.COLOURS[5], "linestyle": "--"},
    "fedfac-static": {"color": figures.COLOURS[0]},
    "fedfac": {"color": figures.COLOURS[1]},
    "random": {"color": figures.COLOURS[2], "linestyle": "--"},
    "random-redrawn": {"color": figures.COLOURS[2], "linestyle": ":"},
    "fedavg": {"color": figures.COLOURS[4]},
    "local": {"color": figures.COLOURS[3], "linestyle": "-."},
}


def _mean_curve(rows: Sequence[Row], value: str) -> tuple[list[int], list[float]]:
    by_round: dict[int, list[float]] = {}
    for row in rows:
        by_round.setdefault(row["round"], []).append(row[value])
    return list(by_round), [float(np.mean(values)) for values in by_round.values()]


def _at(rows: Sequence[Row], p: float, alpha: float, method: str) -> list[Row]:
    return [r for r in rows if (r["p"], r["alpha"], r["method"]) == (p, alpha, method)]


def accuracy(rows: Sequence[Row]) -> Figure:
    """The paper's figure: test accuracy by round, p varied above, α below; the mean over seeds."""
    figure, axes = figures.panels(2, 3, width=3.0, height=2.6, sharex=True, sharey=True)
    for line, settings in enumerate((BY_P, BY_ALPHA)):
        for column, (p, alpha) in enumerate(settings):
            own: Axes = axes[line, column]
            for name in _LOOK:
                own.plot(*_mean_curve(_at(rows, p, alpha, name), "accuracy"), label=name, **_LOOK[name])
            title = f"p = {p} (α = {alpha})" if line == 0 else f"α = {alpha} (p = {p})"
            figures.label(own, "round", "test accuracy", title)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    return figure


def kept(rows: Sequence[Row]) -> Figure:
    """The share of neurons that keep their side from one round to the next."""
    figure, axes = figures.panels(1, 2, width=4.0, height=3.0, sharey=True)
    for column, (settings, varied) in enumerate(((BY_P, 0), (BY_ALPHA, 1))):
        own: Axes = axes[0, column]
        for number, setting in enumerate(settings):
            colour = figures.COLOURS[number]
            name = f"{'pα'[varied]} = {setting[varied]}"
            own.plot(*_mean_curve(_at(rows, *setting, "fedfac"), "kept"), color=colour, label=f"{name}, fedfac")
            redrawn = _mean_curve(_at(rows, *setting, "random-redrawn"), "kept")
            own.plot(*redrawn, color=colour, linestyle=":", label=f"{name}, random-redrawn")
        figures.label(own, "round", "share of neurons that keep their side", f"{'pα'[varied]} varied")
        own.set_ylim(0, 1.03)
        own.legend(ncols=2, fontsize=7, loc="lower right")
    return figure


def recovery(rows: Sequence[Row]) -> Figure:
    """AUC of ν for the true shared set: of the true parameters by κ, and of trained weights."""
    figure, axes = figures.panels(1, 2, width=4.2, height=3.0, sharey=True)
    left, right = axes[0]
    true = [row for row in rows if row["weights"] == "true parameters"]
    kappas = sorted({row["kappa"] for row in true})
    for number, estimator in enumerate(dict.fromkeys(row["estimator"] for row in true)):
        values = [[r["auc"] for r in true if (r["estimator"], r["kappa"]) == (estimator, kappa)] for kappa in kappas]
        colour = figures.COLOURS[number]
        left.plot(kappas, [np.mean(v) for v in values], marker="o", markersize=4, color=colour, label=estimator)
        left.fill_between(kappas, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, lw=0)
    figures.label(left, "κ", "AUC of ν for the true shared set", "true parameters (mean, range)")
    left.legend()
    trained = list(dict.fromkeys(row["weights"] for row in rows if row["weights"] != "true parameters"))
    for place, where in enumerate(trained):
        values_here = [row["auc"] for row in rows if row["weights"] == where]
        spread = place + np.linspace(-0.2, 0.2, len(values_here))
        right.scatter(spread, values_here, s=14, color=figures.COLOURS[place], label=where)
    figures.label(right, "weights analysed", "AUC of ν for the true shared set", "trained weights")
    right.set_xticks(range(len(trained)), [where.replace(" ", "\n", 1).replace(" (", "\n(") for where in trained])
    for own in (left, right):
        own.axhline(0.5, color="#666666", linewidth=0.8)
        own.set_ylim(0, 1.03)
    return figure
