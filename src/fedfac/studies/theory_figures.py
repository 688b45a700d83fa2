"""The figures of the study of the theory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scipy.stats import spearmanr

from fedfac.studies import figures
from fedfac.studies.frame import Row
from fedfac.studies.tangent import NETWORKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _lines(own: Axes, rows: Sequence[Row], x: str, values: dict[str, tuple[str, str, str]]) -> None:
    """Means over seeds of some columns, by the values of ``x``: column -> (name, colour, line style)."""
    places = sorted({row[x] for row in rows})
    for column, (name, colour, style) in values.items():
        means = [_mean([row[column] for row in rows if row[x] == place]) for place in places]
        own.plot(places, means, color=colour, linestyle=style, marker="o", markersize=3, label=name)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def convergence(rows: Sequence[Row]) -> Figure:
    """Error, prediction and bound by round; and how far the kernels have moved."""
    figure, axes = figures.panels(1, 2, width=4.6, height=3.4)
    left, right = axes[0]
    for number, name in enumerate(NETWORKS):
        own = [row for row in rows if row["network"] == name]
        rounds, colour = [row["round"] for row in own], figures.COLOURS[number]
        left.plot(rounds, [row["error"] for row in own], color=colour, label=name)
        left.plot(rounds, [row["prediction"] for row in own], color=colour, linestyle="--", linewidth=0.8)
        left.plot(rounds, [row["bound"] for row in own], color=colour, linestyle=":")
        right.plot(rounds, [row["drift_shared"] for row in own], color=colour, label=f"{name}, shared")
        if own[0]["drift_personal"] is not None:
            drift = [row["drift_personal"] for row in own]
            right.plot(rounds, drift, color=colour, linestyle="--", label=f"{name}, personal")
    left.set_yscale("log")
    left.set_ylim(bottom=1e-12)
    figures.label(left, "round", "squared training error", "measured (—), kernel limit (--), bound (···)")
    figures.label(right, "round", "‖H(t) − H(0)‖ / ‖H(0)‖", "how far the kernels move")
    left.legend(loc="lower left")
    right.set_ylim(0, 1.5 * max(row["drift_personal"] or row["drift_shared"] for row in rows))
    right.legend(loc="upper right")
    return figure


_TITLES = {"clients": "C clients", "samples": "n samples a client", "width": "m neurons in a part"}


def effects(rows: Sequence[Row]) -> Figure:
    """Above: smallest eigenvalues (of kernels by C and n) and distances (by m). Below: progress in a round."""
    figure, axes = figures.panels(2, 3, width=3.2, height=2.8)
    blue, orange, green, pink = figures.COLOURS[:4]
    for column, (varied, title) in enumerate(_TITLES.items()):
        own = [row for row in rows if row["varied"] == varied]
        above, below = axes[0, column], axes[1, column]
        if varied == "width":
            shown = {
                "start_shared": ("shared, from the limit", blue, "-"),
                "start_personal": ("personal, from the limit", orange, "-"),
                "drift_shared": ("shared, moved", blue, ":"),
                "drift_personal": ("personal, moved", orange, ":"),
            }
            figures.label(above, title, "relative distance of kernels", "kernels by width")
        else:
            shown = {"lambda_s": (r"$\lambda^s$", blue, "-"), "lambda_p": (r"$\lambda^p$", orange, "-")}
            figures.label(above, title, "smallest eigenvalue", f"eigenvalues by {varied}")
        _lines(above, own, varied, shown)
        above.set_ylim(0, above.get_ylim()[1] * 1.35)  # room for the legend
        above.legend(fontsize=7, loc="upper right")
        rates = {
            "fedsplit_measured": ("FedSplit, measured", green, "-"),
            "fedsplit_bound": ("FedSplit, bound", green, ":"),
            "fedavg_measured": ("FedAvg, measured", pink, "-"),
            "fedavg_bound": ("FedAvg, bound", pink, ":"),
        }
        _lines(below, own, varied, rates)
        figures.label(below, title, "1 − factor of the error in a round", f"progress by {varied}")
        below.set_yscale("log")
        places = sorted({row[varied] for row in own})
        for axis in (above, below):
            axis.set_xscale("log")
            axis.set_xticks(places, [str(place) for place in places])
            axis.set_xticks([], minor=True)
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def generalisation(rows: Sequence[Row]) -> Figure:
    """Test errors beside Theorem 2's term, N fixed and C varied; and one against the other."""
    figure, axes = figures.panels(1, 3, width=3.4, height=3.0)
    true = [row for row in rows if row["varied"] == "clients" and row["noise"] == 0]
    blue, orange, green, pink = figures.COLOURS[:4]
    errors = {
        "fedsplit_test": ("FedSplit", green, "-"),
        "fedavg_test": ("FedAvg", pink, "-"),
        "zero_error": ("always 0", "#999999", ":"),
    }
    _lines(axes[0, 0], true, "clients", errors)
    terms = {"complexity": ("Theorem 2", blue, "-"), "without_c": ("Theorem 2, over C", orange, "--")}
    _lines(axes[0, 1], true, "clients", terms)
    axes[0, 1].axhline(1, color="#666666", linewidth=0.8)
    figures.label(axes[0, 0], "C clients (N fixed)", "test error, min(|h − y|, 1)", "measured")
    figures.label(axes[0, 1], "C clients (N fixed)", "complexity term", "the bound (vacuous above 1)")
    for number, (column, name) in enumerate({"complexity": "Theorem 2", "without_c": "Theorem 2, over C"}.items()):
        pairs = [(row[column], row["fedsplit_test"]) for row in rows]
        x, y = zip(*pairs, strict=True)
        rank = spearmanr(x, y).statistic
        axes[0, 2].scatter(x, y, s=10, color=(blue, orange)[number], label=f"{name} (rank corr. {rank:+.2f})")
    axes[0, 2].set_xscale("log")
    axes[0, 1].set_yscale("log")
    figures.label(axes[0, 2], "complexity term", "FedSplit's test error", "all problems")
    axes[0, 2].set_ylim(0, axes[0, 2].get_ylim()[1] * 1.25)  # room for the legend
    for own, place in zip(axes[0], ("best", "best", "upper left"), strict=True):
        own.legend(fontsize=7, loc=place)
    return figure
