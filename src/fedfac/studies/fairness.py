"""How clients fare: accuracy client by client, method by method (paper 5.2, the figure of local performance).

The paper's figure orders methods by the median of their clients' accuracies and says that FedFac improves most
clients and has a relatively small variance between them. Here: the same figure, on clients with few digits each and
with more of them, and the spread in numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fedfac import evaluate
from fedfac.studies import figures
from fedfac.studies.frame import Ask, Finding, Row, markdown
from fedfac.studies.training import Level, config, dirichlet, in_words, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("fedavg", "fedprox", "fedper", "lg-fedavg", "fedrep", "local", "fedfac-static", "fedfac")
MORE = ("fedavg+", "fedem", "ditto", "apfl")  # in the full setting
OURS = "fedfac"


def study(ask: Ask) -> Finding:
    """Train every method, and look at the clients."""
    levels = dirichlet(0.1) if ask.quick else dirichlet(0.1, 0.5)
    seeds = ask.seed_list(1 if ask.quick else 3)
    methods = METHODS if ask.quick else (*METHODS, *MORE)
    rounds: dict[str, Any] = {"evaluate_every": 1000}  # the last round is always evaluated
    rows: list[Row] = []
    with ask.steps("fairness", len(levels) * len(methods) * len(seeds)) as progress:
        for level in levels:
            for method in methods:
                for seed in seeds:
                    result = train(ask, config(ask, level, {"name": method}, seed, **rounds))
                    where = {"level": level.title, "method": method, "seed": seed}
                    rows += [where | {k: c[k] for k in ("client", "samples", "accuracy")} for c in result.clients]
                    progress.step(f"{level.title} {method} seed {seed}")
    rows = [row for row in rows if row["accuracy"] is not None]
    summary = [spread(rows, level, method) for level in levels for method in methods]
    summary.sort(key=lambda row: (row["level"], -row["median"], -row["mean"]))
    return Finding(
        tables={"clients": rows, "methods": summary},
        figures={"fairness": partial(draw, rows, levels)},
        page=page(ask, seeds, levels, summary),
        summary={"methods": summary},
    )


def spread(rows: Sequence[Row], level: Level, method: str) -> dict[str, Any]:
    """How one method's clients fare, all seeds together."""
    own = [float(row["accuracy"]) for row in rows if (row["level"], row["method"]) == (level.title, method)]
    quartiles = statistics.quantiles(own, n=4, method="inclusive")
    return {
        "level": level.title,
        "method": method,
        **evaluate.over_clients(own),
        "quartile_range": quartiles[2] - quartiles[0],
        "clients": len(own),
    }


def ordered(rows: Sequence[Row], level: Level) -> list[tuple[str, list[float]]]:
    """Methods and their clients' accuracies, the lowest median first (the mean decides between equal ones)."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["level"] == level.title:
            found.setdefault(row["method"], []).append(float(row["accuracy"]))
    return sorted(found.items(), key=lambda item: (statistics.median(item[1]), statistics.fmean(item[1])))


def draw(rows: Sequence[Row], levels: Sequence[Level]) -> Figure:
    """A box a method, ordered by median; FedFac's is orange, as in the paper. The diamond is the mean."""
    figure, axes = figures.panels(1, len(levels), width=5.2, height=4.2)
    for place, level in enumerate(levels):
        own = ordered(rows, level)
        here = axes[0, place]
        drawn = here.boxplot(
            [values for _, values in own],
            orientation="horizontal",
            tick_labels=[name for name, _ in own],
            patch_artist=True,
            showmeans=True,
            meanprops={"marker": "D", "markersize": 4, "markerfacecolor": "white", "markeredgecolor": "black"},
            medianprops={"color": "black"},
            flierprops={"marker": ".", "markersize": 4},
        )
        for (name, _), box in zip(own, drawn["boxes"], strict=True):
            box.set_facecolor(figures.COLOURS[4] if name == OURS else "#d0d7de")
        figures.label(here, "accuracy of a client", "method, by median", level.title)
    return figure


def page(ask: Ask, seeds: Sequence[int], levels: Sequence[Level], summary: Sequence[Row]) -> str:
    """What came out."""
    columns = {
        "method": "method",
        "median": "median",
        "mean": "mean",
        "std": "std",
        "quartile_range": "quartile range",
        "worst_decile": "worst decile",
        "jain": "Jain",
    }
    parts = [
        "# How clients fare",
        f"{in_words(ask, seeds)} A box is over all clients (and seeds) after the last round; methods are ordered by "
        "their median, as in the paper; orange is FedFac, the diamond is the mean.",
        "![accuracy of clients by method](fairness.png)",
    ]
    for level in levels:
        own = [row for row in summary if row["level"] == level.title]
        parts += [f"## {level.title}", markdown(own, columns), _said(own)]
    return "\n\n".join(parts)


def _said(own: Sequence[Row]) -> str:
    """Both claims of the paper, as they come out here."""
    order = [row["method"] for row in own]
    place, count = order.index(OURS) + 1, len(order)
    steady = sorted(own, key=lambda row: row["std"])
    rank = [row["method"] for row in steady].index(OURS) + 1
    ours = own[place - 1]
    fedavg = next(row for row in own if row["method"] == "fedavg")
    best = own[0]
    claim = "as in the paper" if place == 1 else f"not first, as the paper has it; the first is {best['method']}"
    equal = sum(row["median"] == ours["median"] for row in own) - 1
    tie = f", which {equal} other{'s have' if equal > 1 else ' has'} too: the mean decides" if equal else ""
    return (
        f"**FedFac is number {place} of {count} by its median** ({ours['median']:.3f}{tie}; {claim}), FedAvg's is "
        f"{fedavg['median']:.3f}. Its spread between clients is number {rank} of {count}, the smallest first (standard "
        f"deviation {ours['std']:.3f}; FedAvg {fedavg['std']:.3f}, the smallest {steady[0]['method']} "
        f"{steady[0]['std']:.3f}). The paper says that FedFac improves the accuracy of most clients and has a "
        f"relatively "
        "small variance: "
        + (
            "both hold here against FedAvg."
            if ours["median"] > fedavg["median"] and ours["std"] < fedavg["std"]
            else "against FedAvg that does not hold here."
        )
    )
